//! The thread that fills the cache file: gathers frames into packs, writes them, and empties
//! regions.
//!
//! Invariants:
//! - Only this thread writes the file, and only it knows which regions are open, full or free.
//! - A region's wrap is set to 0 before its first byte is overwritten, and frames are in the index
//!   only while their bytes are in the file.
//! - A pack's directory is written after its frames, and the previous contents of a region are
//!   unnamed before the first of them is written. A process that is killed during a write therefore
//!   leaves only complete packs.
//! - A waiting frame is released only after it is in the index, so a reader always finds it in one
//!   of the two.

use super::file::AlignedBuffer;
use super::format::{
    self, ALIGN, FileState, PACK_BYTES_MAX, PACK_HEADER_BYTES, PackEntry, PackHeader,
};
use super::{Shared, Work};
use crate::seeded_bugs::SeededBugs;
use crate::segment::SegmentId;
use crate::segment::read::walk_frames;
use block::ConditionKind;
use block::conditions::Report;
use bytes::Bytes;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Bytes of gathered single frames at which they are written. Chosen by hand.
const GATHER_BYTES: usize = 1 << 20;
/// Age of the oldest gathered frame at which they are written. Until then they are read from
/// memory, so only a crash loses them. Chosen by hand.
const GATHER_TIME: Duration = Duration::from_millis(100);
/// At most one part in this many of an emptied region moves on. Chosen by hand: it bounds write
/// amplification to 4/3.
const SURVIVOR_PART: u64 = 4;

/// Interval at which the disk's space is checked and refused growth is retried. Chosen by hand: it
/// costs one call.
const SPACE_LOOK: Duration =
    if cfg!(test) { Duration::from_millis(20) } else { Duration::from_secs(30) };
/// Free space, in regions, from which refused growth is retried. The last space of a disk is left
/// to other users such as the log. Chosen by hand.
const GROWTH_REGIONS: u64 = 4;
/// A disk that was too small counts as large enough when its free space exceeds the cache's need by
/// one part in this many. Chosen by hand.
const MARGIN_PART: u64 = 16;

/// A frame to be written: its key and its bytes.
type Item = (u64, Bytes);

/// Regions that could not be read.
#[derive(Default)]
struct Unreadable {
    count: usize,
    first: Option<io::Error>,
}

struct OpenRegion {
    region: usize,
    sequence: u64,
    filled_bytes: u64,
}

/// State of the writer thread: see the module.
pub(super) struct Writer {
    shared: Arc<Shared>,
    /// Oldest first.
    full: VecDeque<usize>,
    free: Vec<usize>,
    open: Option<OpenRegion>,
    /// Bytes of packs in each region.
    filled_bytes: Vec<u64>,
    /// Whether the region's space is reserved on the disk.
    is_reserved: Vec<bool>,
    /// Regions for which the disk had no space, and its last error.
    refused: Vec<usize>,
    refusal: String,
    /// The disk has less space than the cache needs for its configured size.
    is_short: bool,
    looked_at: Instant,
    sequence_next: u64,
    buffer: AlignedBuffer,
    seeded_bugs: SeededBugs,
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>, seeded_bugs: SeededBugs) -> Self {
        let (region_count, looked_at) = (shared.sequences.len(), shared.clock.now());
        Writer {
            shared,
            full: VecDeque::new(),
            free: (0..region_count).rev().collect(),
            open: None,
            filled_bytes: vec![0; region_count],
            is_reserved: vec![false; region_count],
            refused: Vec::new(),
            refusal: String::new(),
            is_short: false,
            looked_at,
            sequence_next: 1,
            buffer: AlignedBuffer::default(),
            seeded_bugs,
        }
    }

    /// Runs the thread. Ends when told to, or when the cache is dropped.
    pub(super) fn run(mut self, work: &Receiver<Work>) {
        if let Err(error) = self.load() {
            self.fail("load the cache file", &error);
        }
        self.look_at_space();
        let mut gathered: Vec<Item> = Vec::new();
        let mut gathered_bytes = 0;
        let clock = self.shared.clock.clone();
        let mut deadline = clock.now();
        loop {
            if clock.since(self.looked_at) >= SPACE_LOOK {
                self.look_at_space();
                self.shared.look_at_bad();
            }
            let patience = match gathered.is_empty() {
                true => SPACE_LOOK,
                false => deadline.saturating_duration_since(clock.now()),
            };
            let next = work.recv_timeout(patience);
            if let Ok(Work::Frame { key, sealed }) = next {
                if gathered.is_empty() {
                    deadline = clock.now() + GATHER_TIME;
                }
                gathered_bytes += sealed.len();
                gathered.push((key, sealed));
                if gathered_bytes < GATHER_BYTES {
                    continue;
                }
                self.write_gathered(&mut gathered);
                gathered_bytes = 0;
                continue;
            }
            self.write_gathered(&mut gathered);
            gathered_bytes = 0;
            match next {
                Ok(Work::Segment { id, object }) => self.write_segment(&id, &object),
                // The waiting caller may have given up.
                Ok(Work::Flush(done)) => drop(done.send(())),
                Ok(Work::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(Work::Frame { .. }) | Err(RecvTimeoutError::Timeout) => {}
            }
        }
        while let Ok(left) = work.try_recv() {
            self.abandon(left);
        }
        // If the cache is off, some writes have not arrived.
        if self.is_on() {
            let proven_from = self.shared.proven_from.load(Ordering::Relaxed);
            let closed = FileState { is_closed: true, proven_from };
            if let Err(error) = self.shared.file.note_state(closed) {
                self.fail("close the cache file", &error);
            }
        }
    }

    fn write_gathered(&mut self, gathered: &mut Vec<Item>) {
        self.write_items(gathered);
        let mut pending = self.shared.pending.frames.lock();
        for (key, sealed) in gathered.drain(..) {
            pending.remove(&key);
            self.shared.release(sealed.len());
        }
    }

    fn write_segment(&mut self, id: &SegmentId, object: &Bytes) {
        let items: Vec<Item> = walk_frames(id, object)
            .map(|(at, sealed)| (super::key_of(id, at.offset), object.slice_ref(sealed)))
            .collect();
        self.write_items(&items);
        self.shared.pending.segments.lock().remove(id);
        self.shared.release(object.len());
    }

    fn abandon(&self, work: Work) {
        match work {
            Work::Frame { key, sealed } => {
                self.shared.pending.frames.lock().remove(&key);
                self.shared.release(sealed.len());
            }
            Work::Segment { id, object } => {
                self.shared.pending.segments.lock().remove(&id);
                self.shared.release(object.len());
            }
            Work::Flush(done) => drop(done.send(())),
            Work::Stop => {}
        }
    }

    fn is_on(&self) -> bool {
        self.shared.is_on.load(Ordering::Relaxed)
    }

    fn fail(&self, action: &str, error: &io::Error) {
        self.shared.counters.error_count.fetch_add(1, Ordering::Relaxed);
        self.shared.turn_off(action, error);
    }

    /// Writes all items in as few packs as possible. A failure turns the cache off, except that
    /// items for which the disk has no space are dropped.
    fn write_items(&mut self, mut items: &[Item]) {
        while !items.is_empty() && self.is_on() {
            match self.write_some(items) {
                Ok(count) => items = &items[count..],
                Err(error) if is_full(&error) => {
                    let count = items.len() as u64;
                    self.shared.counters.dropped_count.fetch_add(count, Ordering::Relaxed);
                    return self.give_up_open(&error);
                }
                Err(error) => self.fail("write the cache file", &error),
            }
        }
    }

    /// Gives up the open region, if there is one, because the disk had no space for a write to it.
    /// This happens on file systems that do not reserve space.
    fn give_up_open(&mut self, error: &io::Error) {
        let Some(open) = self.open.take() else { return };
        let start = self.start_of(open.region);
        self.shared.sequences[open.region].store(0, Ordering::Release);
        self.shared.index.remove_range(start..start + self.shared.region_bytes);
        self.filled_bytes[open.region] = 0;
        self.is_reserved[open.region] = false;
        self.note_refused(open.region, error);
    }

    /// Writes the items that fit one pack and returns their number, which is at least one.
    fn write_some(&mut self, items: &[Item]) -> io::Result<usize> {
        let needed_bytes = format::pack_bytes(1, items[0].1.len()) as u64;
        let region_bytes = self.shared.region_bytes;
        let room_bytes = |open: &Option<OpenRegion>| {
            open.as_ref().map_or(0, |open| region_bytes - open.filled_bytes)
        };
        if room_bytes(&self.open) < needed_bytes {
            self.open_next()?;
        }
        let room_bytes = room_bytes(&self.open).min(PACK_BYTES_MAX as u64) as usize;
        let count = fitting(items, room_bytes);
        if count == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a frame larger than a region",
            ));
        }
        self.make_index_room(count);
        self.write_pack(&items[..count])?;
        Ok(count)
    }

    /// Closes the open region and opens another one: a free one, or otherwise the oldest full one.
    fn open_next(&mut self) -> io::Result<()> {
        if let Some(open) = self.open.take() {
            self.full.push_back(open.region);
        }
        let mut survivors = Vec::new();
        let region = loop {
            if let Some(region) = self.free.pop() {
                match self.reserve(region) {
                    Ok(()) => break region,
                    Err(error) if self.full.is_empty() && !is_full(&error) => return Err(error),
                    Err(error) => self.note_refused(region, &error),
                }
                continue;
            }
            let Some(oldest) = self.full.pop_front() else {
                return Err(io::ErrorKind::StorageFull.into());
            };
            survivors = self.empty(oldest);
            self.free.push(oldest);
        };
        let sequence = self.sequence_next;
        self.sequence_next += 1;
        self.filled_bytes[region] = 0;
        self.unname(region)?;
        self.shared.sequences[region].store(sequence, Ordering::Release);
        self.open = Some(OpenRegion { region, sequence, filled_bytes: 0 });
        self.reinsert(&survivors)
    }

    /// Unnames the packs of a region, so that no later start finds them: their frames are about to
    /// be overwritten.
    fn unname(&mut self, region: usize) -> io::Result<()> {
        if self.seeded_bugs.directory_first {
            return Ok(());
        }
        let start = self.start_of(region);
        let block = self.buffer.room(ALIGN);
        block.fill(0);
        self.shared.file.write(block, start)
    }

    fn reserve(&mut self, region: usize) -> io::Result<()> {
        if !self.is_reserved[region] {
            self.shared.file.reserve(self.start_of(region), self.shared.region_bytes)?;
            self.is_reserved[region] = true;
            self.refusal.clear();
            self.show_space();
        }
        Ok(())
    }

    /// Records that the disk has no space for a region. The cache continues with the regions that
    /// it has.
    fn note_refused(&mut self, region: usize, error: &io::Error) {
        if self.refusal.is_empty() {
            self.shared.counters.error_count.fetch_add(1, Ordering::Relaxed);
        }
        self.refusal = format!(": {error}");
        let is_reserved = &self.is_reserved;
        self.refused.push(region);
        self.refused.extend(self.free.extract_if(.., |region| !is_reserved[*region]));
        self.show_space();
    }

    /// Lets the cache grow again once the disk has space.
    fn look_at_space(&mut self) {
        self.looked_at = self.shared.clock.now();
        let wanted_bytes = self.shared.region_bytes * GROWTH_REGIONS.min(self.refused.len() as u64);
        let free_bytes = self.shared.file.free_bytes();
        if free_bytes.is_none_or(|free| free >= wanted_bytes) {
            // In front, so that reserved regions are filled first.
            self.free.splice(..0, self.refused.drain(..));
        }
        self.show_space();
    }

    /// Updates the condition to the free space of the disk and its refusals.
    fn show_space(&mut self) {
        let count = self.is_reserved.iter().filter(|is_reserved| !**is_reserved).count();
        let missing_bytes = count as u64 * self.shared.region_bytes;
        self.shared.counters.unreserved_bytes.store(missing_bytes, Ordering::Relaxed);
        let free_bytes = self.shared.file.free_bytes();
        // Other programs use the disk, too; the margin keeps the condition from flapping.
        let margin_bytes = if self.is_short { missing_bytes / MARGIN_PART } else { 0 };
        if free_bytes.is_some_and(|free| free >= missing_bytes + margin_bytes) {
            self.refusal.clear();
        }
        let is_too_small = free_bytes.is_some_and(|free| free < missing_bytes + margin_bytes);
        self.is_short = self.is_on() && (is_too_small || !self.refusal.is_empty());
        let report = self.is_short.then(|| {
            let size_bytes = self.is_reserved.len() as u64 * self.shared.region_bytes;
            let (mib, dir) = (|bytes: u64| bytes >> 20, self.shared.dir.display());
            let left = free_bytes.map_or_else(String::new, |free| {
                format!(", and its disk has {} MiB left", mib(free))
            });
            Report::new(
                format!(
                    "the read cache in {dir} should have {} MiB and has {} MiB{left}{}",
                    mib(size_bytes),
                    mib(size_bytes - missing_bytes),
                    self.refusal
                ),
                "more reads come from the store and take longer; nothing is lost",
                "free space on its disk, after which the cache grows automatically, or lower \
                 `cache.size`",
            )
        });
        self.shared.conditions.set(ConditionKind::CacheShrunk, &self.shared.subject(), report);
    }

    /// Writes surviving frames into the newly opened region, of which they take a fraction.
    fn reinsert(&mut self, mut survivors: &[Item]) -> io::Result<()> {
        while !survivors.is_empty() {
            let filled_bytes = self.open.as_ref().map_or(0, |open| open.filled_bytes);
            let room_bytes = (self.shared.region_bytes - filled_bytes).min(PACK_BYTES_MAX as u64);
            let count = fitting(survivors, room_bytes as usize);
            if count == 0 {
                break;
            }
            self.write_pack(&survivors[..count])?;
            let counter = &self.shared.counters.reinserted_count;
            counter.fetch_add(count as u64, Ordering::Relaxed);
            survivors = &survivors[count..];
        }
        Ok(())
    }

    /// Removes a region from the index and returns those of its frames that deserve to stay.
    fn empty(&mut self, region: usize) -> Vec<Item> {
        let shared = self.shared.clone();
        let sequence = shared.sequences[region].swap(0, Ordering::AcqRel);
        shared.counters.evicted_region_count.fetch_add(1, Ordering::Relaxed);
        let start = self.start_of(region);
        let mut survivors = Vec::new();
        let mut survivor_bytes = 0;
        let walked = self.walk(region, sequence, |writer, pack_start, entry| {
            let at = pack_start + u64::from(entry.offset);
            let was_hit = shared.index.remove(entry.key, at) == Some(true);
            let bytes = u64::from(entry.sealed_bytes);
            if was_hit && survivor_bytes + bytes <= shared.region_bytes / SURVIVOR_PART {
                let read = shared.file.read(&mut writer.buffer, at, entry.sealed_bytes as usize);
                if let Ok(sealed) = read {
                    survivor_bytes += bytes;
                    survivors.push((entry.key, Bytes::copy_from_slice(sealed)));
                }
            }
        });
        // If the directory is damaged for any reason, no entry may outlive the bytes that it points
        // to.
        if !matches!(walked, Ok(filled) if filled >= self.filled_bytes[region]) {
            shared.index.remove_range(start..start + shared.region_bytes);
        }
        survivors
    }

    /// Empties old regions until the index has room for `count` more frames.
    fn make_index_room(&mut self, count: usize) {
        let limit = self.shared.index.entry_count_max();
        while self.shared.index.entry_count() + count > limit {
            let Some(oldest) = self.full.pop_front() else { break };
            drop(self.empty(oldest));
            self.free.push(oldest);
        }
    }

    /// Writes one pack into the open region and adds its frames to the index.
    fn write_pack(&mut self, items: &[Item]) -> io::Result<()> {
        let open = self.open.as_ref().expect("a region is open");
        let lengths: Vec<(u64, u32)> =
            items.iter().map(|(key, sealed)| (*key, sealed.len() as u32)).collect();
        let position = open.filled_bytes as u32;
        let (directory, entries) = format::encode_directory(open.sequence, position, &lengths)
            .expect("the caller chose as many as fit");
        let start = self.start_of(open.region) + open.filled_bytes;
        let frame_bytes: usize = items.iter().map(|(_, sealed)| sealed.len()).sum();
        let pack_bytes = format::pack_bytes(items.len(), frame_bytes);
        let buffer = self.buffer.room(pack_bytes);
        let (head, mut rest) = buffer.split_at_mut(directory.len());
        head.copy_from_slice(&directory);
        for (_, sealed) in items {
            let (frame, behind) = rest.split_at_mut(sealed.len());
            frame.copy_from_slice(sealed);
            rest = behind;
        }
        rest.fill(0);
        // Write the block that names the frames last: a write that a kill interrupts leaves its
        // beginning on the disk.
        let (first, behind) = buffer.split_at(ALIGN);
        if self.seeded_bugs.directory_first {
            self.shared.file.write(first, start)?;
        }
        if !behind.is_empty() {
            self.shared.file.write(behind, start + ALIGN as u64)?;
        }
        if !self.seeded_bugs.directory_first {
            self.shared.file.write(first, start)?;
        }
        let open = self.open.as_mut().expect("a region is open");
        open.filled_bytes += pack_bytes as u64;
        self.filled_bytes[open.region] = open.filled_bytes;
        let mut insert_count = 0;
        for entry in &entries {
            let is_in = self.shared.index.insert(entry.key, start + u64::from(entry.offset));
            insert_count += u64::from(is_in);
        }
        let counters = &self.shared.counters;
        counters.insert_count.fetch_add(insert_count, Ordering::Relaxed);
        counters.dropped_count.fetch_add(entries.len() as u64 - insert_count, Ordering::Relaxed);
        counters.written_bytes.fetch_add(pack_bytes as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Finds the frames of the last run, newest regions first, as many as fit the index.
    fn load(&mut self) -> io::Result<()> {
        let Some(kept) = self.shared.file.kept() else { return Ok(()) };
        let file_bytes = self.shared.file.size_bytes()?;
        let mut found = Vec::new();
        let mut unreadable = Unreadable::default();
        for region in 0..self.filled_bytes.len() {
            if self.start_of(region) >= file_bytes {
                break;
            }
            self.is_reserved[region] =
                self.start_of(region) + self.shared.region_bytes <= file_bytes;
            match self.pack_at(region, 0) {
                Ok(Some(pack)) => found.push((pack.sequence, region)),
                Ok(None) => {}
                Err(error) => self.note_unreadable(region, error, &mut unreadable),
            }
        }
        found.sort_unstable_by(|a, b| b.cmp(a));
        self.sequence_next = found.first().map_or(1, |(sequence, _)| sequence.saturating_add(1));
        self.begin_state(kept)?;
        let shared = self.shared.clone();
        for (sequence, region) in found {
            if shared.index.entry_count() >= shared.index.entry_count_max() {
                break;
            }
            let mut lost_count = 0;
            let walked = self.walk(region, sequence, |_, pack_start, entry| {
                // A newer copy may already be in the index.
                let is_room = shared.index.entry_count() < shared.index.entry_count_max();
                let at = pack_start + u64::from(entry.offset);
                if !is_room || entry.key == 0 {
                    lost_count += 1;
                } else if !shared.index.contains(entry.key) {
                    shared.index.insert(entry.key, at);
                }
            });
            let filled_bytes = match walked {
                Ok(filled_bytes) => filled_bytes,
                Err(error) => {
                    self.note_unreadable(region, error, &mut unreadable);
                    continue;
                }
            };
            self.filled_bytes[region] = filled_bytes;
            shared.sequences[region].store(sequence, Ordering::Release);
            self.free.retain(|&free| free != region);
            self.full.push_front(region);
            tracing::debug!(region, sequence, filled_bytes, lost_count, "the cache found a region");
        }
        if let Some(error) = unreadable.first {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                count = unreadable.count,
                "could not read regions of the cache file, whose frames are read from the store; \
                 check its disk"
            );
        }
        Ok(())
    }

    /// Records, before anything is written, that the file is not closed. If the last run did not
    /// close it either, its frames are unproven, in this run and later ones.
    fn begin_state(&self, kept: FileState) -> io::Result<()> {
        let next = u32::try_from(self.sequence_next).unwrap_or(u32::MAX);
        let is_proven = kept.is_closed || self.seeded_bugs.unclosed_trusted;
        let proven_from = if is_proven { kept.proven_from } else { next };
        self.shared.proven_from.store(proven_from, Ordering::Relaxed);
        self.shared.file.note_state(FileState { is_closed: false, proven_from })
    }

    /// Treats a region that cannot be read as empty.
    fn note_unreadable(&self, region: usize, error: io::Error, unreadable: &mut Unreadable) {
        self.shared.counters.error_count.fetch_add(1, Ordering::Relaxed);
        let start = self.start_of(region);
        self.shared.index.remove_range(start..start + self.shared.region_bytes);
        unreadable.count += 1;
        unreadable.first.get_or_insert(error);
    }

    /// Calls `each` for every entry of every pack in a region's wrap, with the file offset of its
    /// pack. Returns the bytes of the packs whose directories were complete.
    fn walk(
        &mut self,
        region: usize,
        sequence: u64,
        mut each: impl FnMut(&mut Self, u64, &PackEntry),
    ) -> io::Result<u64> {
        let mut position = 0;
        while let Some(header) = self.pack_at(region, position)? {
            if header.sequence != sequence {
                break;
            }
            let pack_start = self.start_of(region) + position;
            let count = header.directory_bytes();
            let directory = match self.shared.file.read(&mut self.buffer, pack_start, count) {
                Ok(directory) => directory,
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                Err(error) => return Err(error),
            };
            let Some(entries) = header.decode_entries(directory) else { break };
            for entry in &entries {
                each(self, pack_start, entry);
            }
            position += u64::from(header.pack_bytes);
        }
        Ok(position)
    }

    /// The header of the pack at `position` in a region, if there is one.
    fn pack_at(&mut self, region: usize, position: u64) -> io::Result<Option<PackHeader>> {
        if position + ALIGN as u64 > self.shared.region_bytes {
            return Ok(None);
        }
        let start = self.start_of(region) + position;
        let bytes = match self.shared.file.read(&mut self.buffer, start, PACK_HEADER_BYTES) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        };
        let Some(header) = PackHeader::decode(bytes) else { return Ok(None) };
        let end = position + u64::from(header.pack_bytes);
        let is_here = u64::from(header.position) == position && end <= self.shared.region_bytes;
        // In a truncated file, a pack must not promise readers anything past the end.
        let is_complete =
            is_here && self.start_of(region) + end <= self.shared.file.size_bytes()?;
        Ok(is_complete.then_some(header))
    }

    fn start_of(&self, region: usize) -> u64 {
        ALIGN as u64 + region as u64 * self.shared.region_bytes
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// The number of leading items that fit a pack of `room_bytes`.
fn fitting(items: &[Item], room_bytes: usize) -> usize {
    let mut frame_bytes = 0;
    items
        .iter()
        .enumerate()
        .take_while(|(before, (_, sealed))| {
            frame_bytes += sealed.len();
            format::pack_bytes(before + 1, frame_bytes) <= room_bytes
        })
        .count()
}
