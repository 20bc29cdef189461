//! The data that the log holds and the data tier does not have yet: a stack of generations.
//!
//! Invariants:
//! - Entries enter in LSN order, after their batch has been written and before it is acknowledged.
//! - A generation covers a gapless run of LSNs. Frozen generations never change and are destaged
//!   oldest first, so the data tier always holds a prefix of the log.
//! - A newer generation hides an older one; a generation leaves only when it is destaged durably.
//! - An entry about snapshots is the last one of its generation, so everything that a snapshot
//!   shows is in generations and spill layers that end at or before that entry.
//! - Below all generations are the spill layers of volumes that could not be destaged, newer layers
//!   above older ones. They change together with the generation that leaves, or on their own once
//!   the data tier has taken them in.

pub(crate) mod extents;
pub(crate) mod log_resident;
mod map_ahead;
pub(crate) mod spill_layer;
pub(crate) mod spill_resident;

use crate::format::entry::EntryKind;
use crate::options::NewEntry;
use crate::overlay::extents::{Cut, ExtentMap, Piece, Source, Weight};
use crate::overlay::log_resident::LogResident;
use crate::overlay::map_ahead::map_ahead;
use crate::overlay::spill_layer::SpillLayer;
use crate::seeded_bugs::SeededBugs;
use block::buffers::PayloadBuffers;
use block::{Lsn, VolumeId};
use bytes::Bytes;
use parking_lot::RwLock;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Maximum number of spill files of one volume. Chosen by hand: a lookup that ends below them costs
/// a few microseconds.
const SPILL_FILES_MAX: usize = 64;
/// Lower limit of that maximum, however many volumes there are. Chosen by hand.
const SPILL_FILES_MIN: usize = 4;
/// Maximum number of spill files of all volumes together, as long as each may have
/// [`SPILL_FILES_MIN`]. Chosen by hand: an eighth of the open files that most systems allow a
/// service.
const SPILL_FILES_OF_ALL: usize = 1024;

/// Buffer memory for payloads in flight, in addition to the payloads that the overlay keeps;
/// otherwise every payload of a full overlay would need fresh memory. Front ends hold it for their
/// requests until these are answered. Chosen by hand: 64 of the longest parts of writes.
const IN_FLIGHT_BYTES: usize = 8 << 20;

/// A run of LSNs, folded: only the newest contents of each sector, per volume.
#[derive(Debug)]
pub struct Generation {
    first_lsn: Lsn,
    last_lsn: Lsn,
    volumes: HashMap<VolumeId, ExtentMap>,
    records: HashMap<VolumeId, Bytes>,
    snapshots: Option<Bytes>,
    weight: Weight,
    /// Log position (bytes over all wraps) after its last batch.
    pub(crate) end_position: u64,
    /// Bytes of log that it used.
    pub(crate) log_bytes: u64,
    /// Time of its first entry; for a recovered generation a moment that is not earlier.
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

    /// Returns the LSN of its first entry.
    #[must_use]
    pub fn first_lsn(&self) -> Lsn {
        self.first_lsn
    }

    /// Returns the LSN of its last entry; one less than [`Generation::first_lsn`] if it is empty.
    #[must_use]
    pub fn last_lsn(&self) -> Lsn {
        self.last_lsn
    }

    /// Returns whether it has no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.last_lsn < self.first_lsn
    }

    /// Lists each volume with extents, in order of id, with its sorted, disjoint extents. Their
    /// source is never [`Source::Beneath`].
    pub fn volumes(&self) -> impl Iterator<Item = (VolumeId, Vec<Piece>)> + '_ {
        let mut ids: Vec<VolumeId> = self.volumes.keys().copied().collect();
        ids.sort_unstable();
        ids.into_iter().map(|id| (id, self.volumes[&id].iter().collect()))
    }

    /// Returns the extents of one volume, in the form that [`Generation::volumes`] gives.
    pub(crate) fn pieces_of(&self, volume: VolumeId) -> Vec<Piece> {
        self.volumes.get(&volume).map_or_else(Vec::new, |extents| extents.iter().collect())
    }

    /// Lists the newest record of each volume that has one here, in order of id.
    pub fn volume_records(&self) -> impl Iterator<Item = (VolumeId, Bytes)> + '_ {
        let mut records: Vec<_> = self.records.iter().map(|(id, r)| (*id, r.clone())).collect();
        records.sort_unstable_by_key(|(id, _)| *id);
        records.into_iter()
    }

    /// Returns the payload of its last entry, if that entry is about snapshots.
    #[must_use]
    pub fn snapshots(&self) -> Option<Bytes> {
        self.snapshots.clone()
    }

    /// Returns the bytes of data that destaging it moves.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        self.weight.payload_bytes
    }

    /// Returns the number of extents over all volumes.
    #[must_use]
    pub fn extent_count(&self) -> u64 {
        self.weight.extent_count
    }
}

/// A volume and its spill layers, oldest first.
pub(crate) type LayersOf = (VolumeId, Vec<Arc<SpillLayer>>);

/// The spill layers of each volume that has any, oldest first.
pub(crate) type SpillLayers = HashMap<VolumeId, Vec<Arc<SpillLayer>>>;

#[derive(Debug)]
struct Stack {
    frozen: VecDeque<Arc<Generation>>,
    active: Generation,
    spills: SpillLayers,
    /// Sum over the frozen generations.
    frozen_weight: Weight,
    /// LSNs of living snapshots with their volumes. An empty list means that the volumes are
    /// unknown and counts for all. No spill layer of these volumes may show data from both sides of
    /// a snapshot.
    snapshots: BTreeMap<Lsn, Vec<VolumeId>>,
}

impl Stack {
    fn memory_bytes(&self) -> u64 {
        self.frozen_weight.memory_bytes + self.active.weight.memory_bytes
    }

    fn extent_count(&self) -> u64 {
        self.frozen_weight.extent_count + self.active.weight.extent_count
    }

    /// Returns a generation by its depth, 0 being the active one, which is the newest.
    fn newest_first(&self, depth: usize) -> Option<&Generation> {
        match depth {
            0 => Some(&self.active),
            _ => self.frozen.len().checked_sub(depth).map(|index| &*self.frozen[index]),
        }
    }

    /// Returns the volume's extents in the newest generation or spill layer at or below `depth` that
    /// has any.
    fn next_with(&self, volume: VolumeId, mut depth: usize) -> Option<(usize, &ExtentMap)> {
        while let Some(generation) = self.newest_first(depth) {
            if let Some(extents) = generation.volumes.get(&volume) {
                return Some((depth, extents));
            }
            depth += 1;
        }
        let layers = self.spills.get(&volume)?;
        // The newest spill layer is right below the oldest generation.
        let below = depth - (self.frozen.len() + 1);
        let layer = layers.len().checked_sub(below + 1).map(|index| &layers[index])?;
        Some((depth, &layer.extents))
    }

    /// Counts the newest generations and spill layers of the volume that have entries after `at`.
    fn depth_of(&self, volume: VolumeId, at: Lsn) -> usize {
        let is_newer = |generation: &Generation| generation.last_lsn > at;
        let generations = (0..).map_while(|depth| self.newest_first(depth));
        // The active generation counts as newer whatever it holds.
        let newer = generations.skip(1).take_while(|generation| is_newer(generation)).count() + 1;
        let spills = self.spills.get(&volume).map_or(&[][..], Vec::as_slice);
        newer + spills.iter().filter(|layer| layer.id().last_lsn > at).count()
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

fn change(spills: &mut SpillLayers, changes: Vec<LayersOf>) -> Vec<Vec<Arc<SpillLayer>>> {
    let replace = |(volume, layers): LayersOf| {
        if layers.is_empty() { spills.remove(&volume) } else { spills.insert(volume, layers) }
    };
    changes.into_iter().filter_map(replace).collect()
}

/// The overlay's holdings of one volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeWeight {
    /// Bytes of payload in the ring.
    pub log_bytes: u64,
    /// Bytes of payload in spill files.
    pub spill_bytes: u64,
    /// Number of spill files.
    pub spill_file_count: u64,
    /// Extents, in the ring and in spill files.
    pub extent_count: u64,
    /// Extents in the ring.
    pub log_extent_count: u64,
}

/// How full the overlay is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OverlayStatus {
    pub(crate) memory_bytes: u64,
    pub(crate) extent_count: u64,
    pub(crate) undestaged_bytes: u64,
    pub(crate) frozen_count: u64,
    /// Time of the oldest entry in the ring.
    pub(crate) since: Option<Instant>,
    /// Time of the oldest entry in spill files.
    pub(crate) spill_since: Option<Instant>,
}

/// An entry on its way into the overlay, with the place of its payload in the log.
pub(crate) struct Incoming {
    pub(crate) volume: VolumeId,
    pub(crate) kind: EntryKind,
    pub(crate) start_sector: u64,
    pub(crate) sector_count: u64,
    pub(crate) payload: Bytes,
    pub(crate) resident: Option<LogResident>,
}

impl Incoming {
    pub(crate) fn new(entry: NewEntry, resident: LogResident) -> Self {
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

/// The overlay after an insertion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inserted {
    /// Log space that the active generation uses, in bytes.
    pub(crate) log_bytes: u64,
    /// Extents of the active generation.
    pub(crate) extent_count: u64,
    /// Whether a generation was frozen.
    pub(crate) is_frozen: bool,
}

/// The stack of generations and spill layers. Lookups run in parallel with each other and with the
/// log's I/O.
#[derive(Debug)]
pub struct Overlay {
    stack: RwLock<Stack>,
    /// Extents over all generations; written under the stack's lock.
    extent_count: AtomicU64,
    payload_memory_bytes: u64,
    /// Memory for payloads, including those that recovery finds and copies of cut extents.
    payloads: Arc<PayloadBuffers>,
    seeded_bugs: SeededBugs,
}

impl Overlay {
    pub(crate) fn new(destaged: Lsn, payload_memory_bytes: u64, seeded_bugs: SeededBugs) -> Self {
        let active = Generation::new(destaged.next(), 0);
        let stack = Stack {
            frozen: VecDeque::new(),
            active,
            spills: SpillLayers::new(),
            frozen_weight: Weight::default(),
            snapshots: BTreeMap::new(),
        };
        let (stack, extent_count) = (RwLock::new(stack), AtomicU64::new(0));
        let kept_bytes = usize::try_from(payload_memory_bytes).unwrap_or(usize::MAX);
        let payloads = PayloadBuffers::new(kept_bytes.saturating_add(IN_FLIGHT_BYTES), map_ahead);
        Overlay { stack, extent_count, payload_memory_bytes, payloads, seeded_bugs }
    }

    /// Memory for payloads of entries.
    pub(crate) fn payloads(&self) -> &Arc<PayloadBuffers> {
        &self.payloads
    }

    /// Finds the source of each part of the range. Returns pieces in order that cover all of it,
    /// newest contents first. `sector_count` must not be 0.
    #[must_use]
    pub fn lookup(&self, volume: VolumeId, start_sector: u64, sector_count: u64) -> Vec<Piece> {
        let mut pieces = Vec::with_capacity(1);
        self.stack.read().collect(volume, start_sector, sector_count, 0, &mut pieces);
        pieces
    }

    /// Like [`Overlay::lookup`], for the contents that a snapshot at `at` shows: entries after that
    /// LSN are ignored.
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

    /// Lists the payloads of entries about snapshots that are not destaged yet, oldest first, each
    /// with its LSN.
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

    /// Returns whether a snapshot of the volume separates two LSNs: at or after the first, before
    /// the second.
    pub(crate) fn is_snapshot_between(&self, volume: VolumeId, first: Lsn, second: Lsn) -> bool {
        let stack = self.stack.read();
        let is_its = |volumes: &Vec<VolumeId>| volumes.is_empty() || volumes.contains(&volume);
        stack.snapshots.range(first..second).any(|(_, volumes)| is_its(volumes))
    }

    /// Returns the overlay's holdings of one volume. Walks its extents, so it is not for hot paths.
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
        for layer in stack.spills.get(&volume).into_iter().flatten() {
            found.extent_count += layer.weight.extent_count;
            found.spill_bytes += layer.weight.payload_bytes;
            found.spill_file_count += 1;
        }
        found
    }

    /// Returns the number of spill files of the volume.
    #[must_use]
    pub fn spill_file_count(&self, volume: VolumeId) -> usize {
        self.stack.read().spills.get(&volume).map_or(0, Vec::len)
    }

    /// Returns the maximum number of spill files for the volume: each is an open file, so the more
    /// volumes are stalled, the fewer files each may have.
    pub(crate) fn spill_files_max(&self, volume: VolumeId) -> usize {
        let stack = self.stack.read();
        let others = stack.spills.keys().filter(|other| **other != volume).count();
        (SPILL_FILES_OF_ALL / (others + 1)).clamp(SPILL_FILES_MIN, SPILL_FILES_MAX)
    }

    /// Returns the volume's spill layers, oldest first.
    pub(crate) fn spill_layers_of(&self, volume: VolumeId) -> Vec<Arc<SpillLayer>> {
        self.stack.read().spills.get(&volume).cloned().unwrap_or_default()
    }

    /// Installs the spill layers found when the log was opened.
    pub(crate) fn set_spill_layers(&self, spills: SpillLayers) {
        self.stack.write().spills = spills;
    }

    /// Replaces the spill layers of volumes; an empty list removes the volume.
    pub(crate) fn change_spill_layers(&self, changes: Vec<LayersOf>) {
        let before = change(&mut self.stack.write().spills, changes);
        drop(before); // many small frees, so outside of the lock
    }

    /// Returns the newest record of the volume that is not destaged yet.
    #[must_use]
    pub fn volume_record(&self, volume: VolumeId) -> Option<Bytes> {
        let stack = self.stack.read();
        (0..)
            .map_while(|depth| stack.newest_first(depth))
            .find_map(|generation| generation.records.get(&volume).cloned())
    }

    /// Lists the newest record of each volume that has one here, in order of id.
    #[must_use]
    pub fn volume_records(&self) -> Vec<(VolumeId, Bytes)> {
        let stack = self.stack.read();
        let mut newest = BTreeMap::new();
        for generation in stack.frozen.iter().map(|g| &**g).chain([&stack.active]) {
            newest.extend(generation.records.iter().map(|(id, record)| (*id, record.clone())));
        }
        newest.into_iter().collect()
    }

    /// Takes the entries of one batch, `first_lsn` upwards; `now` is called when a generation
    /// begins.
    pub(crate) fn insert(
        &self,
        first_lsn: Lsn,
        entries: impl Iterator<Item = Incoming>,
        position: u64,
        now: impl Fn() -> Instant,
    ) -> Inserted {
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
                    if !self.seeded_bugs.snapshot_not_frozen {
                        is_frozen |= stack.freeze().is_some();
                    }
                    continue;
                }
            };
            let extents = active.volumes.entry(entry.volume).or_default();
            let cut = Cut {
                buffers: Some(&self.payloads),
                room_bytes: memory_left,
                is_buffer_forgotten: self.seeded_bugs.rest_buffer_forgotten,
            };
            let range = (entry.start_sector, entry.sector_count);
            extents.insert(range, source, &mut active.weight, &cut);
        }
        let active = &mut stack.active;
        active.log_bytes += position - active.end_position;
        active.end_position = position;
        let (log_bytes, extent_count) = (active.log_bytes, active.weight.extent_count);
        self.extent_count.store(stack.extent_count(), Ordering::Release);
        Inserted { log_bytes, extent_count, is_frozen }
    }

    /// Sets the log position of the first entry; the overlay must be empty.
    pub(crate) fn start_at(&self, position: u64) {
        let mut stack = self.stack.write();
        assert!(stack.active.is_empty() && stack.frozen.is_empty(), "the overlay has entries");
        stack.active.end_position = position;
    }

    /// Freezes the active generation if it has any entry. The generation covers exactly the entries
    /// that are visible at this moment.
    pub(crate) fn freeze(&self) -> Option<Arc<Generation>> {
        self.stack.write().freeze()
    }

    pub(crate) fn next_frozen(&self) -> Option<Arc<Generation>> {
        self.stack.read().frozen.front().cloned()
    }

    /// Drops the oldest frozen generation, which must be this one, and changes spill layers in the
    /// same instant: they hold the generation's data that the data tier does not have.
    pub(crate) fn release(&self, generation: &Arc<Generation>, changes: Vec<LayersOf>) {
        let mut stack = self.stack.write();
        let before = change(&mut stack.spills, changes);
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
        // Of two recovered generations the older one may have the later bound, yet an older
        // generation is at least as old as any newer one.
        let generations = stack.frozen.iter().map(|frozen| &**frozen).chain([&stack.active]);
        let since = generations.filter_map(|generation| generation.since).min();
        OverlayStatus {
            memory_bytes: stack.memory_bytes(),
            extent_count: stack.extent_count(),
            undestaged_bytes: stack.frozen_weight.payload_bytes + stack.active.weight.payload_bytes,
            frozen_count: u64::try_from(stack.frozen.len()).expect("64 bits"),
            since,
            spill_since: stack.spills.values().flatten().filter_map(|layer| layer.since).min(),
        }
    }
}

#[cfg(test)]
mod tests;
