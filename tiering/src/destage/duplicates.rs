//! Finds blocks of a window that are stored already. Fingerprints nominate; the bytes decide.
//!
//! Invariants:
//! - A block counts as a duplicate only if the stored one was read and opened, and is equal.
//! - Every segment that contains a duplicate, except those of the window itself, is pinned until
//!   the commit of the window has ended.
//! - A block that cannot be read soon is stored once more. Deduplication never blocks a window, and
//!   spends at most [`WAIT_MAX`] reading for it.

use super::pack::Packer;
use super::{BLOCK, Job};
use crate::dedup::fingerprints::Fingerprinter;
use crate::dedup::index::{ByFingerprint, Location};
use crate::dedup::{self, Pin, is_of_segment};
use crate::fetch::Access;
use crate::keys::KeyId;
use crate::map::records::SegmentRecord;
use crate::map::{Change, LayerId, Placed};
use crate::segment::{FrameAt, FrameRef};
use block::buffers::part_of;
use block::{Error, ErrorKind, Result, VolumeId};
use bytes::Bytes;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Frames that are read at a time for comparison. Chosen by hand: at most 4 MiB.
const FRAMES_AT_ONCE: usize = 64;
/// Timeout of one such read. Chosen by hand: many times the latency of a store.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });
/// Time limit for all such reads of one window. Chosen by hand: a window that consists of
/// duplicates of data in a store a hundred milliseconds away takes that long.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// Lists of fingerprints that are read for one gathering step. Chosen by hand.
const LISTS_AT_ONCE: usize = 4;

/// Parameters for finding duplicates of the blocks of a volume.
#[derive(Clone, Copy)]
pub(super) struct Search {
    pub volume: VolumeId,
    pub layer: LayerId,
    pub key: KeyId,
    pub fingerprinter: Fingerprinter,
}

/// State of deduplication within a job.
#[derive(Default)]
pub(super) struct Duplicates {
    /// Blocks in the segments that the window itself has written.
    own: ByFingerprint<Location>,
    /// Number of lists of these segments that are in `own`.
    own_count: usize,
    /// Nominated segments; `None` for a segment that must not be used.
    used: HashMap<u64, Option<SegmentRecord>>,
    pub pins: Vec<Pin>,
    /// The store does not answer, so deduplication is off for the rest of this window.
    is_given_up: bool,
    /// Time spent waiting for candidate blocks.
    waited: Duration,
    pub changes: Vec<Change>,
    /// Blocks of the window that are equal to an earlier one whose place is not yet known.
    repeats: Vec<Repeat>,
    pub found: BTreeMap<VolumeId, dedup::Found>,
}

/// A block of a layer that is equal to an earlier one.
#[derive(Clone, Copy)]
struct Repeat {
    layer: LayerId,
    block: u64,
    first: u64,
}

/// Result of looking for a duplicate of a block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    /// It is new.
    New,
    /// It is stored at this place.
    At(Placed),
    /// It is equal to an earlier block of the same lookup.
    As(usize),
}

/// A frame, and the pairs of a block, by index, and the block of the frame that may be equal.
type Nominated = (FrameAt, Vec<(usize, Location)>);

/// A block that may have to be stored.
struct Block<'a> {
    number: u64,
    bytes: &'a [u8],
    fingerprint: u64,
    is_zero: bool,
}

impl Job<'_> {
    /// Separates the blocks that are stored already, and packs the rest. The blocks of `whole` are
    /// in order.
    pub(super) async fn pack_new(
        &mut self,
        packer: &mut Packer,
        search: Search,
        whole: Vec<(u64, Bytes)>,
    ) -> Result<()> {
        let mut blocks: Vec<Block> = Vec::new();
        for (first_block, bytes) in &whole {
            let each = bytes.chunks_exact(BLOCK).zip(search.fingerprinter.of_blocks(bytes));
            blocks.extend(each.zip(*first_block..).map(|((bytes, fingerprint), number)| {
                let is_zero = super::write::is_zero(bytes);
                Block { number, bytes, fingerprint, is_zero }
            }));
        }
        let stored = self.find(&search, &blocks).await?;
        let found = self.with_repeats(&blocks, &stored);
        let counts = self.duplicates.found.entry(search.volume).or_default();
        counts.block_count += blocks.iter().filter(|block| !block.is_zero).count() as u64;
        counts.duplicate_count += found.iter().filter(|one| **one != Found::New).count() as u64;

        let fingerprints: Vec<u64> = blocks.iter().map(|block| block.fingerprint).collect();
        let mut pieces = Vec::new();
        let mut at = 0; // among all blocks
        for (first_block, bytes) in &whole {
            let block_count = bytes.len() / BLOCK;
            let mut start = 0;
            for index in 0..=block_count {
                let one = found.get(at + index).copied().filter(|_| index < block_count);
                if one == Some(Found::New) {
                    continue;
                }
                if start < index {
                    let new = part_of(bytes, start * BLOCK..index * BLOCK);
                    let fingerprints = &fingerprints[at + start..at + index];
                    packer.add(first_block + start as u64, new, fingerprints, &mut pieces);
                }
                let (layer, block) = (search.layer, first_block + index as u64);
                match one {
                    Some(Found::At(placed)) => self.duplicates.add(layer, block, placed),
                    Some(Found::As(first)) => {
                        let first = blocks[first].number;
                        self.duplicates.repeats.push(Repeat { layer, block, first });
                    }
                    Some(Found::New) | None => {}
                }
                start = index + 1;
            }
            at += block_count;
            for piece in pieces.drain(..) {
                self.writer.add(piece).await?;
            }
        }
        Ok(())
    }

    /// Returns the place of each block that is stored already.
    async fn find(&mut self, search: &Search, blocks: &[Block<'_>]) -> Result<Vec<Option<Placed>>> {
        let mut found = vec![None; blocks.len()];
        if self.duplicates.is_given_up {
            return Ok(found);
        }
        let wanted = || blocks.iter().filter(|block| !block.is_zero).map(|block| block.fingerprint);
        self.learn_own(wanted()).await?;
        self.read_lists(wanted()).await;
        // By frame: the blocks that may be equal to blocks of the frame.
        let mut nominated: BTreeMap<(u64, u32), Nominated> = BTreeMap::new();
        for (index, block) in blocks.iter().enumerate().filter(|(_, block)| !block.is_zero) {
            let own = self.duplicates.own.get(&block.fingerprint).copied();
            let location = own.or_else(|| self.destage.dedup.index.lock().find(block.fingerprint));
            if let Some(location) = location {
                let frame = (location.segment, location.at.frame_index);
                let (_, these) = nominated.entry(frame).or_insert((location.at, Vec::new()));
                these.push((index, location));
            }
        }
        let mut frames = Vec::new();
        for ((segment, _), (at, these)) in nominated {
            match self.use_segment(search, segment).await? {
                Some(record) => frames.push((record.frame(at), these)),
                None => self.forget(blocks, &these),
            }
        }
        if self.destage.output.is_urgent.load(Ordering::Relaxed) {
            // The log is filling up: do not fetch frames for comparison.
            frames.retain(|(frame, _)| self.destage.segments.frames.is_local(frame));
        }
        for frames in frames.chunks(FRAMES_AT_ONCE) {
            let refs: Vec<FrameRef> = frames.iter().map(|(frame, _)| frame.clone()).collect();
            let begun = self.destage.pool.clock.now();
            let read = self.read_frames(&refs).await;
            self.duplicates.waited += self.destage.pool.clock.since(begun);
            let Some(read) = read.filter(|_| self.duplicates.waited < WAIT_MAX) else {
                self.duplicates.is_given_up = true;
                break;
            };
            for ((_, these), plain) in frames.iter().zip(read) {
                let Some(plain) = plain else {
                    self.destage
                        .dedup
                        .unread_count
                        .fetch_add(these.len() as u64, Ordering::Relaxed);
                    self.forget(blocks, these);
                    continue;
                };
                for (index, location) in these {
                    let start = usize::from(location.within) * BLOCK;
                    let is_equal = plain.get(start..start + BLOCK) == Some(blocks[*index].bytes)
                        || self.destage.pool.seeded_bugs.fingerprints_trusted;
                    if is_equal {
                        let Location { segment, at, within } = *location;
                        found[*index] = Some(Placed { segment, at, within });
                    } else {
                        self.destage.dedup.unequal_count.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        }
        Ok(found)
    }

    /// Finds blocks that are equal to earlier ones, in addition to those that are stored already.
    fn with_repeats(&self, blocks: &[Block<'_>], stored: &[Option<Placed>]) -> Vec<Found> {
        let is_trusting = self.destage.pool.seeded_bugs.fingerprints_trusted;
        let mut seen: ByFingerprint<usize> = ByFingerprint::default();
        let each = blocks.iter().zip(stored).enumerate();
        each.map(|(index, (block, stored))| {
            if let Some(placed) = stored {
                return Found::At(*placed);
            }
            if block.is_zero {
                return Found::New;
            }
            let first = *seen.entry(block.fingerprint).or_insert(index);
            let is_equal = first != index && (is_trusting || blocks[first].bytes == block.bytes);
            if is_equal { Found::As(first) } else { Found::New }
        })
        .collect()
    }

    /// Registers the blocks that the window itself has stored so far, at least those with the
    /// wanted fingerprints.
    async fn learn_own(&mut self, wanted: impl Iterator<Item = u64>) -> Result<()> {
        let written = self.writer.settle(wanted).await?;
        for (segment, frames) in &written.fingerprints[self.duplicates.own_count..] {
            for frame in frames {
                for (fingerprint, within) in frame.fingerprints.iter().zip(0u8..) {
                    let location = Location { segment: *segment, at: frame.at, within };
                    self.duplicates.own.entry(*fingerprint).or_insert(location);
                }
            }
        }
        self.duplicates.own_count = written.fingerprints.len();
        for record in &written.segments {
            self.duplicates.used.insert(record.info.number.0, Some(record.clone()));
        }
        Ok(())
    }

    /// Reads the lists of fingerprints of the segments that the index suggests.
    async fn read_lists(&self, wanted: impl Iterator<Item = u64>) {
        let dedup = &self.destage.dedup;
        let segments = dedup.index.lock().lists_wanted(wanted, LISTS_AT_ONCE);
        for segment in segments {
            match self.destage.metadata.map.fingerprints(segment).await {
                Ok(frames) => {
                    dedup.index.lock().add_list(segment, &frames.unwrap_or_default());
                }
                Err(error) => {
                    tracing::debug!(segment, error = %error.chain(), "could not read fingerprints");
                    return;
                }
            }
        }
    }

    /// Returns the record of a segment that may contain duplicates, if it exists and has the right
    /// key, and pins it.
    async fn use_segment(&mut self, search: &Search, number: u64) -> Result<Option<SegmentRecord>> {
        let known = match self.duplicates.used.get(&number) {
            Some(known) => known.clone(),
            None => {
                // Pin before the lookup: a segment that is pinned and then found stays.
                let pin = self.destage.dedup.pin(number);
                let found = match &pin {
                    Some(_) => self.destage.metadata.map.find_segment(number).await,
                    None => Ok(None),
                };
                let record = match found {
                    Ok(record) => record,
                    Err(error) if is_of_segment(error.kind()) => None,
                    Err(error) => return Err(error),
                };
                if record.is_some() {
                    self.duplicates.pins.extend(pin);
                }
                self.duplicates.used.insert(number, record.clone());
                record
            }
        };
        Ok(known.filter(|record| record.info.key == search.key))
    }

    /// Reads the blocks of those frames that are readable. Returns `None` if the store does not
    /// answer.
    async fn read_frames(&self, frames: &[FrameRef]) -> Option<Vec<Option<Bytes>>> {
        match self.read_together(frames).await? {
            Ok(read) => Some(read.into_iter().map(Some).collect()),
            Err(_) => {
                let mut read = Vec::with_capacity(frames.len());
                for frame in frames {
                    let alone = self.read_together(std::slice::from_ref(frame)).await?;
                    if alone.is_err() {
                        self.destage.dedup.note_bad(frame.info.number.0);
                    }
                    read.push(alone.ok().and_then(|mut alone| alone.pop()));
                }
                Some(read)
            }
        }
    }

    /// Reads the blocks of the frames, or returns an error if one of them is unreadable. Returns
    /// `None` if the store does not answer.
    async fn read_together(&self, frames: &[FrameRef]) -> Option<Result<Vec<Bytes>>> {
        let read = self.destage.segments.frames.read_many(frames, Access::Once);
        match tokio::time::timeout(PATIENCE, read).await {
            Ok(Err(error)) if !is_of_segment(error.kind()) => {
                tracing::debug!(
                    error = %error.chain(),
                    "could not read blocks that may be duplicates"
                );
                None
            }
            Ok(read) => Some(read),
            Err(_) => None,
        }
    }

    fn forget(&self, blocks: &[Block<'_>], these: &[(usize, Location)]) {
        let mut index = self.destage.dedup.index.lock();
        for (block, location) in these {
            index.forget(blocks[*block].fingerprint, location);
        }
    }
}

impl Duplicates {
    /// Returns the places of blocks that are equal to other blocks of the window; by now, all of
    /// those are in `changes`.
    pub(super) fn take_repeats(&mut self, changes: &[Change]) -> Result<Vec<Change>> {
        let repeats = std::mem::take(&mut self.repeats);
        if repeats.is_empty() {
            return Ok(Vec::new());
        }
        let mut sorted: Vec<&Change> = changes.iter().collect();
        sorted.sort_unstable_by_key(|change| (change.layer, change.first_block));
        let of = |Repeat { layer, block, first }: Repeat| {
            let after = sorted
                .partition_point(|change| (change.layer, change.first_block) <= (layer, first));
            let change = after.checked_sub(1).map(|index| sorted[index]).filter(|change| {
                change.layer == layer && first < change.first_block + change.block_count
            });
            let placed = change.and_then(|change| {
                let skipped = u8::try_from(first - change.first_block).ok()?;
                let placed = change.placed?;
                Some(Placed { within: placed.within + skipped, ..placed })
            });
            let placed = placed.ok_or_else(|| {
                let what = format!("destage layer {layer}: block {first} was not stored");
                Error::new(ErrorKind::Io, what)
            })?;
            let (first_block, placed) = (block, Some(placed));
            Ok(Change { layer, first_block, block_count: 1, placed, is_duplicate: true })
        };
        repeats.into_iter().map(of).collect()
    }

    /// Adds a block that is stored already. It must come after all earlier added blocks of its
    /// layer.
    fn add(&mut self, layer: LayerId, block: u64, placed: Placed) {
        match self.changes.last_mut() {
            Some(last)
                if last.layer == layer
                    && last.first_block + last.block_count == block
                    && last.placed.is_some_and(|first| {
                        let within = u64::from(first.within) + last.block_count;
                        first.segment == placed.segment
                            && first.at == placed.at
                            && within == u64::from(placed.within)
                    }) =>
            {
                last.block_count += 1;
            }
            _ => self.changes.push(Change {
                layer,
                first_block: block,
                block_count: 1,
                placed: Some(placed),
                is_duplicate: true,
            }),
        }
    }
}
