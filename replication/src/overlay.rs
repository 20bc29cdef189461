//! What the log holds and the data tier does not yet: a stack of generations.
//!
//! Invariants:
//! - Entries enter in LSN order, when their batch has been written and before anybody is told.
//! - A generation covers a gapless run of LSNs; frozen ones never change and are destaged oldest
//!   first, so the data tier always holds a prefix of the log.
//! - A newer generation hides an older one; a generation leaves only when it is destaged durably.
//! - An entry about snapshots is the last one of its generation: whatever a snapshot shows is in generations
//!   and side layers that end with it or before.
//! - Below all generations are the side layers of volumes that could not be destaged, a newer layer
//!   above an older one. They change together with the generation that leaves, or on their own when
//!   the data tier has taken them in.

use crate::extents::{Cut, ExtentMap, Piece, Source, Weight};
use crate::format::entry::EntryKind;
use crate::memory::map_ahead;
use crate::planted::Planted;
use crate::side::SideLayer;
use block::buffers::PayloadBuffers;
use block::{Lsn, VolumeId};
use bytes::Bytes;
use parking_lot::RwLock;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Side files of one volume. Chosen by hand: a lookup that ends below them costs some microseconds.
const SIDE_FILES_MAX: usize = 64;
/// Fewer are not asked for, however many volumes there are. Chosen by hand.
const SIDE_FILES_MIN: usize = 4;
/// Side files of all volumes, as long as each may have [`SIDE_FILES_MIN`]. Chosen by hand: an eighth
/// of the open files that most systems allow a service.
const SIDE_FILES_OF_ALL: usize = 1024;

/// Memory of payloads that are on their way, beside what the overlay keeps: that of a full overlay would otherwise be
/// fresh each time. It is the front ends' memory of requests until these are answered. Chosen by hand: 64 of the
/// longest parts of writes.
const IN_FLIGHT_BYTES: usize = 8 << 20;

/// A run of LSNs, folded: per volume only the newest contents of each sector.
#[derive(Debug)]
pub struct Generation {
    first_lsn: Lsn,
    last_lsn: Lsn,
    volumes: HashMap<VolumeId, ExtentMap>,
    records: HashMap<VolumeId, Bytes>,
    snapshots: Option<Bytes>,
    weight: Weight,
    /// Log position (bytes over all laps) after its last batch.
    pub(crate) end_position: u64,
    /// Bytes of log that it used.
    pub(crate) log_bytes: u64,
    /// When its first entry came, or for a recovered one a moment that is not earlier.
    pub(crate) since: Option<Instant>,
}

impl Generation {
    fn new(first_lsn: Lsn, position: u64) -> Self {
        Generation {
            first_lsn,
            last_lsn: Lsn(first_lsn.0 - 1),
            volumes: HashMap::new(),
            records: HashMap::new(),
            snapshots: None,
            weight: Weight::default(),
            end_position: position,
            log_bytes: 0,
            since: None,
        }
    }

    /// LSN of its first entry.
    #[must_use]
    pub fn first_lsn(&self) -> Lsn {
        self.first_lsn
    }

    /// LSN of its last entry; one less than [`Generation::first_lsn`] when it is empty.
    #[must_use]
    pub fn last_lsn(&self) -> Lsn {
        self.last_lsn
    }

    /// No LSN in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.last_lsn < self.first_lsn
    }

    /// Each volume with extents, in order of id, with its sorted, disjoint extents. Their source is
    /// never [`Source::Beneath`].
    pub fn volumes(&self) -> impl Iterator<Item = (VolumeId, Vec<Piece>)> + '_ {
        let mut ids: Vec<VolumeId> = self.volumes.keys().copied().collect();
        ids.sort_unstable();
        ids.into_iter().map(|id| (id, self.volumes[&id].iter().collect()))
    }

    /// The extents of one volume, as [`Generation::volumes`] gives them.
    pub(crate) fn pieces_of(&self, volume: VolumeId) -> Vec<Piece> {
        self.volumes.get(&volume).map_or_else(Vec::new, |extents| extents.iter().collect())
    }

    /// The newest record of each volume that has one here, in order of id.
    pub fn volume_records(&self) -> impl Iterator<Item = (VolumeId, Bytes)> + '_ {
        let mut records: Vec<_> = self.records.iter().map(|(id, r)| (*id, r.clone())).collect();
        records.sort_unstable_by_key(|(id, _)| *id);
        records.into_iter()
    }

    /// What its last entry says of snapshots, if that is what its last entry is about.
    #[must_use]
    pub fn snapshots(&self) -> Option<Bytes> {
        self.snapshots.clone()
    }

    /// Bytes of data that destaging it moves.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        self.weight.payload_bytes
    }

    /// Extents over all volumes.
    #[must_use]
    pub fn extent_count(&self) -> u64 {
        self.weight.extent_count
    }
}

/// A volume and its side layers, oldest first.
pub(crate) type LayersOf = (VolumeId, Vec<Arc<SideLayer>>);

/// The side layers of each volume that has any, oldest first.
pub(crate) type Sides = HashMap<VolumeId, Vec<Arc<SideLayer>>>;

#[derive(Debug)]
struct Stack {
    frozen: VecDeque<Arc<Generation>>,
    active: Generation,
    sides: Sides,
    /// Sum over the frozen ones.
    frozen_weight: Weight,
    /// LSNs of living snapshots, with the volumes that they are of; without any where that is not known: of
    /// all. No side layer of these may show both what is before and what is behind one.
    snapshots: BTreeMap<Lsn, Vec<VolumeId>>,
}

impl Stack {
    fn memory_bytes(&self) -> u64 {
        self.frozen_weight.memory_bytes + self.active.weight.memory_bytes
    }

    fn extent_count(&self) -> u64 {
        self.frozen_weight.extent_count + self.active.weight.extent_count
    }

    /// Newest first.
    fn newest_first(&self, depth: usize) -> Option<&Generation> {
        match depth {
            0 => Some(&self.active),
            _ => self.frozen.len().checked_sub(depth).map(|index| &*self.frozen[index]),
        }
    }

    /// The volume's extents in the newest generation or side layer at or below `depth` that has
    /// any.
    fn next_with(&self, volume: VolumeId, mut depth: usize) -> Option<(usize, &ExtentMap)> {
        while let Some(generation) = self.newest_first(depth) {
            if let Some(extents) = generation.volumes.get(&volume) {
                return Some((depth, extents));
            }
            depth += 1;
        }
        let layers = self.sides.get(&volume)?;
        // The newest one comes right below the oldest generation.
        let below = depth - (self.frozen.len() + 1);
        let layer = layers.len().checked_sub(below + 1).map(|index| &layers[index])?;
        Some((depth, &layer.extents))
    }

    /// How many generations and side layers of the volume, the newest ones, have entries behind an LSN.
    fn depth_of(&self, volume: VolumeId, at: Lsn) -> usize {
        let is_newer = |generation: &Generation| generation.last_lsn > at;
        let generations = (0..).map_while(|depth| self.newest_first(depth));
        // The active one is newer whatever it has.
        let newer = generations.skip(1).take_while(|generation| is_newer(generation)).count() + 1;
        let sides = self.sides.get(&volume).map_or(&[][..], Vec::as_slice);
        newer + sides.iter().filter(|layer| layer.id().last_lsn > at).count()
    }

    /// Freezes the active generation if it has any entry.
    fn freeze(&mut self) -> Option<Arc<Generation>> {
        if self.active.is_empty() {
            return None;
        }
        let next = Generation::new(self.active.last_lsn.next(), self.active.end_position);
        let frozen = Arc::new(std::mem::replace(&mut self.active, next));
        self.frozen_weight.extent_count += frozen.weight.extent_count;
        self.frozen_weight.memory_bytes += frozen.weight.memory_bytes;
        self.frozen_weight.payload_bytes += frozen.weight.payload_bytes;
        self.frozen.push_back(Arc::clone(&frozen));
        Some(frozen)
    }

    fn collect(
        &self,
        volume: VolumeId,
        start: u64,
        count: u64,
        depth: usize,
        out: &mut Vec<Piece>,
    ) {
        let piece =
            |start_sector, sector_count, source| Piece { start_sector, sector_count, source };
        let Some((depth, extents)) = self.next_with(volume, depth) else {
            out.push(piece(start, count, Source::Beneath));
            return;
        };
        extents.walk(start, count, |start, count, source| match source {
            Some(source) => out.push(piece(start, count, source)),
            None => self.collect(volume, start, count, depth + 1, out),
        });
    }
}

fn change(sides: &mut Sides, changes: Vec<LayersOf>) -> Vec<Vec<Arc<SideLayer>>> {
    let replace = |(volume, layers): LayersOf| {
        if layers.is_empty() { sides.remove(&volume) } else { sides.insert(volume, layers) }
    };
    changes.into_iter().filter_map(replace).collect()
}

/// What the overlay has of one volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeWeight {
    /// Bytes of payload in the ring.
    pub log_bytes: u64,
    /// Bytes of payload in side files.
    pub side_bytes: u64,
    /// Side files.
    pub side_file_count: u64,
    /// Extents, in the ring and in side files.
    pub extent_count: u64,
    /// Those in the ring.
    pub log_extent_count: u64,
}

/// How full the overlay is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OverlayStatus {
    pub(crate) memory_bytes: u64,
    pub(crate) extent_count: u64,
    pub(crate) undestaged_bytes: u64,
    pub(crate) frozen_count: u64,
    /// When the oldest entry of the ring came.
    pub(crate) since: Option<Instant>,
    /// The same for what side files hold.
    pub(crate) side_since: Option<Instant>,
}

/// An entry on its way into the overlay. The payload has its place in the log beside it.
pub(crate) struct Incoming {
    pub(crate) volume: VolumeId,
    pub(crate) kind: EntryKind,
    pub(crate) start_sector: u64,
    pub(crate) sector_count: u64,
    pub(crate) payload: Bytes,
    pub(crate) resident: Option<crate::resident::LogResident>,
}

impl Incoming {
    pub(crate) fn new(entry: crate::NewEntry, resident: crate::resident::LogResident) -> Self {
        let resident = (entry.kind == EntryKind::Write).then_some(resident);
        Incoming {
            volume: entry.volume,
            kind: entry.kind,
            start_sector: entry.start_sector,
            sector_count: entry.sector_count,
            payload: entry.payload,
            resident,
        }
    }
}

/// The stack. Lookups run beside each other and beside the log's I/O.
#[derive(Debug)]
pub struct Overlay {
    stack: RwLock<Stack>,
    /// Extents over all generations; written under the stack's lock.
    extent_count: AtomicU64,
    payload_memory_bytes: u64,
    /// Memory of payloads, those that recovery finds and copies of rests too.
    payloads: Arc<PayloadBuffers>,
    planted: Planted,
}

impl Overlay {
    pub(crate) fn new(destaged: Lsn, payload_memory_bytes: u64, planted: Planted) -> Self {
        let active = Generation::new(destaged.next(), 0);
        let stack = Stack {
            frozen: VecDeque::new(),
            active,
            sides: Sides::new(),
            frozen_weight: Weight::default(),
            snapshots: BTreeMap::new(),
        };
        let (stack, extent_count) = (RwLock::new(stack), AtomicU64::new(0));
        let kept_bytes = usize::try_from(payload_memory_bytes).unwrap_or(usize::MAX);
        let payloads = PayloadBuffers::new(kept_bytes.saturating_add(IN_FLIGHT_BYTES), map_ahead);
        Overlay { stack, extent_count, payload_memory_bytes, payloads, planted }
    }

    /// Memory for payloads of entries.
    pub(crate) fn payloads(&self) -> &Arc<PayloadBuffers> {
        &self.payloads
    }

    /// Where each part of the range is found: pieces in order that cover all of it, newest contents
    /// first. `sector_count` is not 0.
    #[must_use]
    pub fn lookup(&self, volume: VolumeId, start_sector: u64, sector_count: u64) -> Vec<Piece> {
        let mut pieces = Vec::with_capacity(1);
        self.stack.read().collect(volume, start_sector, sector_count, 0, &mut pieces);
        pieces
    }

    /// As [`Overlay::lookup`], of what a snapshot at `at` shows: of nothing behind that LSN.
    #[must_use]
    pub fn lookup_at(
        &self,
        volume: VolumeId,
        at: Lsn,
        start_sector: u64,
        sector_count: u64,
    ) -> Vec<Piece> {
        let mut pieces = Vec::with_capacity(1);
        let stack = self.stack.read();
        let depth = stack.depth_of(volume, at);
        stack.collect(volume, start_sector, sector_count, depth, &mut pieces);
        pieces
    }

    /// What entries about snapshots say that are not destaged yet, oldest first, each with its LSN.
    #[must_use]
    pub fn snapshots(&self) -> Vec<(Lsn, Bytes)> {
        let stack = self.stack.read();
        let of = |generation: &Arc<Generation>| {
            Some((generation.last_lsn, generation.snapshots.clone()?))
        };
        stack.frozen.iter().filter_map(of).collect()
    }

    /// See [`crate::Log::set_snapshots`].
    pub(crate) fn set_snapshots(&self, lsn: Lsn, volumes: Vec<VolumeId>) {
        let mut stack = self.stack.write();
        match volumes.is_empty() {
            true => stack.snapshots.remove(&lsn),
            false => stack.snapshots.insert(lsn, volumes),
        };
    }

    /// A snapshot of the volume lies between what two LSNs have written: behind the first, before the second.
    pub(crate) fn is_snapshot_between(&self, volume: VolumeId, first: Lsn, second: Lsn) -> bool {
        let stack = self.stack.read();
        let is_its = |volumes: &Vec<VolumeId>| volumes.is_empty() || volumes.contains(&volume);
        stack.snapshots.range(first..second).any(|(_, volumes)| is_its(volumes))
    }

    /// What there is of one volume. Walks its extents: not for hot paths.
    #[must_use]
    pub fn weight_of(&self, volume: VolumeId) -> VolumeWeight {
        let stack = self.stack.read();
        let mut found = VolumeWeight::default();
        let generations = (0..).map_while(|depth| stack.newest_first(depth));
        for extents in generations.filter_map(|generation| generation.volumes.get(&volume)) {
            for piece in extents.iter() {
                found.extent_count += 1;
                found.log_extent_count += 1;
                if matches!(piece.source, Source::Payload(_) | Source::LogResident(_)) {
                    found.log_bytes += piece.sector_count * block::units::SECTOR_BYTES;
                }
            }
        }
        for layer in stack.sides.get(&volume).into_iter().flatten() {
            found.extent_count += layer.weight.extent_count;
            found.side_bytes += layer.weight.payload_bytes;
            found.side_file_count += 1;
        }
        found
    }

    /// Side files of the volume.
    #[must_use]
    pub fn side_file_count(&self, volume: VolumeId) -> usize {
        self.stack.read().sides.get(&volume).map_or(0, Vec::len)
    }

    /// Most side files that the volume is to have: each is an open file, so many volumes that are
    /// aside have fewer each.
    pub(crate) fn side_files_max(&self, volume: VolumeId) -> usize {
        let stack = self.stack.read();
        let others = stack.sides.keys().filter(|other| **other != volume).count();
        (SIDE_FILES_OF_ALL / (others + 1)).clamp(SIDE_FILES_MIN, SIDE_FILES_MAX)
    }

    /// The volume's side layers, oldest first.
    pub(crate) fn sides_of(&self, volume: VolumeId) -> Vec<Arc<SideLayer>> {
        self.stack.read().sides.get(&volume).cloned().unwrap_or_default()
    }

    /// Puts in place what was found when the log was opened.
    pub(crate) fn set_sides(&self, sides: Sides) {
        self.stack.write().sides = sides;
    }

    /// Replaces the side layers of volumes; none takes the volume away.
    pub(crate) fn change_sides(&self, changes: Vec<LayersOf>) {
        let before = change(&mut self.stack.write().sides, changes);
        drop(before); // many small frees, so outside of the lock
    }

    /// The newest record of the volume that is not destaged yet.
    #[must_use]
    pub fn volume_record(&self, volume: VolumeId) -> Option<Bytes> {
        let stack = self.stack.read();
        (0..)
            .map_while(|depth| stack.newest_first(depth))
            .find_map(|generation| generation.records.get(&volume).cloned())
    }

    /// The newest record of each volume that has one here, in order of id.
    #[must_use]
    pub fn volume_records(&self) -> Vec<(VolumeId, Bytes)> {
        let stack = self.stack.read();
        let mut newest = BTreeMap::new();
        for generation in stack.frozen.iter().map(|g| &**g).chain([&stack.active]) {
            newest.extend(generation.records.iter().map(|(id, record)| (*id, record.clone())));
        }
        newest.into_iter().collect()
    }

    /// Takes the entries of one batch, `first_lsn` upwards; `now` is asked where a generation begins. Returns
    /// how much of the log the active generation has used, how many extents it has, and whether one was frozen.
    pub(crate) fn insert(
        &self,
        first_lsn: Lsn,
        entries: impl Iterator<Item = Incoming>,
        position: u64,
        now: impl Fn() -> Instant,
    ) -> (u64, u64, bool) {
        let mut stack = self.stack.write();
        let mut lsn = first_lsn;
        let stack = &mut *stack;
        let mut is_frozen = false;
        for entry in entries {
            let mut memory_left = self.payload_memory_bytes.saturating_sub(stack.memory_bytes());
            let active = &mut stack.active;
            assert_eq!(active.last_lsn.next(), lsn, "entries enter the overlay in order");
            active.last_lsn = lsn;
            active.since.get_or_insert_with(&now);
            lsn = lsn.next();
            let source = match entry.kind {
                EntryKind::Write => {
                    let bytes = u64::try_from(entry.payload.len()).expect("64 bits");
                    match entry.resident {
                        Some(resident) if memory_left < bytes => Source::LogResident(resident),
                        _ => {
                            memory_left = memory_left.saturating_sub(bytes);
                            Source::Payload(entry.payload)
                        }
                    }
                }
                EntryKind::Zero => Source::Zeroes { is_trim: false },
                EntryKind::Trim => Source::Zeroes { is_trim: true },
                EntryKind::VolumeRecord => {
                    active.records.insert(entry.volume, entry.payload);
                    continue;
                }
                EntryKind::Marker => continue,
                EntryKind::Snapshot => {
                    active.snapshots = Some(entry.payload);
                    stack.snapshots.insert(active.last_lsn, Vec::new());
                    if !self.planted.snapshot_not_frozen {
                        is_frozen |= stack.freeze().is_some();
                    }
                    continue;
                }
            };
            let extents = active.volumes.entry(entry.volume).or_default();
            let cut = Cut {
                buffers: Some(&self.payloads),
                room_bytes: memory_left,
                is_buffer_forgotten: self.planted.rest_buffer_forgotten,
            };
            let range = (entry.start_sector, entry.sector_count);
            extents.insert(range, source, &mut active.weight, &cut);
        }
        let active = &mut stack.active;
        active.log_bytes += position - active.end_position;
        active.end_position = position;
        let active_used = (active.log_bytes, active.weight.extent_count, is_frozen);
        self.extent_count.store(stack.extent_count(), Ordering::Release);
        active_used
    }

    /// The log position of the first entry to come, while there is none.
    pub(crate) fn start_at(&self, position: u64) {
        let mut stack = self.stack.write();
        assert!(stack.active.is_empty() && stack.frozen.is_empty(), "the overlay has entries");
        stack.active.end_position = position;
    }

    /// Freezes the active generation if it has any entry. What it covers is exact: all that is
    /// visible at this moment.
    pub(crate) fn freeze(&self) -> Option<Arc<Generation>> {
        self.stack.write().freeze()
    }

    pub(crate) fn next_frozen(&self) -> Option<Arc<Generation>> {
        self.stack.read().frozen.front().cloned()
    }

    /// Drops the oldest frozen generation, which must be this one, and changes side layers in the
    /// same instant: what it had and the data tier has not got is in them.
    pub(crate) fn release(&self, generation: &Arc<Generation>, changes: Vec<LayersOf>) {
        let mut stack = self.stack.write();
        let before = change(&mut stack.sides, changes);
        let oldest = stack.frozen.front().expect("release: nothing is frozen");
        assert!(Arc::ptr_eq(oldest, generation), "release: generations go oldest first");
        let oldest = stack.frozen.pop_front();
        stack.frozen_weight.extent_count -= generation.weight.extent_count;
        stack.frozen_weight.memory_bytes -= generation.weight.memory_bytes;
        stack.frozen_weight.payload_bytes -= generation.weight.payload_bytes;
        self.extent_count.store(stack.extent_count(), Ordering::Release);
        drop(stack);
        drop((oldest, before)); // many small frees, so outside of the lock
    }

    pub(crate) fn extent_count(&self) -> u64 {
        self.extent_count.load(Ordering::Acquire)
    }

    pub(crate) fn status(&self) -> OverlayStatus {
        let stack = self.stack.read();
        // Of recovered generations an older one may have the later bound; whatever is older than
        // another is at least as old as it.
        let generations = stack.frozen.iter().map(|frozen| &**frozen).chain([&stack.active]);
        let since = generations.filter_map(|generation| generation.since).min();
        OverlayStatus {
            memory_bytes: stack.memory_bytes(),
            extent_count: stack.extent_count(),
            undestaged_bytes: stack.frozen_weight.payload_bytes + stack.active.weight.payload_bytes,
            frozen_count: u64::try_from(stack.frozen.len()).expect("64 bits"),
            since,
            side_since: stack.sides.values().flatten().filter_map(|layer| layer.since).min(),
        }
    }
}

#[cfg(test)]
mod tests;
