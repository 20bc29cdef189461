//! Reading: resolves a range of a volume to frames, and frames to bytes.
//!
//! Invariants:
//! - Frames are requested in address order. A frame that serves neighbouring parts is requested
//!   once.
//! - A frame that holds fewer blocks than the map says is `Corrupt`, never a short read.
//! - Reclaim may delete a segment between the lookup in the map and the read of the frame. A
//!   missing segment is looked up again, and is an error only if the map still references it.
//! - Data that is damaged or missing is read from a copy of the pool, if one has it, and restored
//!   ([`crate::repair`]).

use crate::dedup::Dedup;
use crate::fetch::Access;
use crate::map::pages::{PAGE_BYTES, Page, changed};
use crate::pool::{Metadata, Segments};
use crate::repair::{Repair, is_lost};
use crate::segment::{FrameAt, FrameRef, StoredSegment};
use block::units::{BLOCK_BYTES, VOLUME_BYTES_MAX};
use block::{AllocationExtent, Error, ErrorKind, Lsn, Result, VolumeId};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of frames that one read fetches concurrently. Bounds the memory that a large read
/// holds besides its buffer.
const FRAMES_AT_ONCE: usize = 64;

/// Maximum number of pages that one allocation query examines. A query over more pages is answered
/// for a shorter range.
const ALLOCATION_PAGES_MAX: usize = 4096;

/// Pages that an allocation query takes from the map at a time. Chosen by hand.
const ALLOCATION_STEP: usize = 64;

/// Maximum number of further map lookups for a frame whose segment is gone. Chosen by hand: each
/// one would have to collide with another commit of reclaim.
const GONE_TRIES_MAX: u32 = 8;

/// Maximum number of times that restored data is read again. Twice, because the first may be
/// answered by a fetch that began before the repair.
const REREADS_MAX: u32 = 2;
/// Longest wait for a commit under way. Chosen by hand, equal to the patience with a store that
/// does not answer ([`crate::fetch::FramesOptions`]).
const GONE_WAIT_MAX: Duration = Duration::from_secs(120);

/// A range of a volume that differs between two snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedExtent {
    /// Offset of the range, in bytes.
    pub offset: u64,
    /// Length of the range, never 0.
    pub length_bytes: u64,
    /// The later snapshot has no data here, so the range reads as zeroes.
    pub is_hole: bool,
}

/// The part of a read that one frame holds.
pub(crate) struct Wanted {
    pub frame: FrameRef,
    /// First byte in the frame's plaintext.
    skip: usize,
    /// Bytes of the read, relative to its start.
    at: Range<usize>,
}

/// Outcome of looking for the segments that a read lacks.
enum Lacking {
    /// Nothing that a copy could supply.
    Vain,
    /// Nothing any more: another task has restored it meanwhile.
    Back,
    /// Segments that a copy may have.
    These(Vec<StoredSegment>),
}

/// Reads volumes; see the module.
pub(crate) struct Reader {
    pub metadata: Arc<Metadata>,
    pub segments: Arc<Segments>,
    pub repair: Arc<Repair>,
    pub dedup: Arc<Dedup>,
}

impl Reader {
    /// Reads for destage, without influencing the detection of streams.
    pub(crate) async fn read(&self, volume: VolumeId, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.read_with(volume, None, offset, buf, Access::Random).await
    }

    /// Reads a range of the volume, or of its snapshot at the LSN `at`.
    pub(crate) async fn read_with(
        &self,
        volume: VolumeId,
        at: Option<Lsn>,
        offset: u64,
        buf: &mut [u8],
        access: Access,
    ) -> Result<()> {
        let mut tries_left = GONE_TRIES_MAX;
        let read = loop {
            let moves = self.metadata.map.repoint_count();
            let read = self.read_inner(volume, at, offset, buf, access).await;
            let is_gone = read.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound);
            let is_again = tries_left < GONE_TRIES_MAX;
            if !is_gone
                || tries_left == 0
                || (is_again && self.metadata.map.repoint_count() == moves)
            {
                break read;
            }
            tries_left -= 1;
            // Reclaim forgets a segment and tells the readers while it holds the writer, so once
            // the writer is free they know. If its commit failed, the next handle of the database
            // shows the outcome.
            let _ = tokio::time::timeout(GONE_WAIT_MAX, self.metadata.writer.lock()).await;
            self.metadata.map.wait_well().await;
        };
        let read = match read {
            Err(error) if is_lost(&error) => {
                // One of these segments is bad, so nothing new may depend on any of them.
                let wanted = self.resolve(volume, at, offset, buf.len() as u64).await;
                for part in wanted.iter().flatten() {
                    self.dedup.note_bad(part.frame.info.number.0);
                }
                let lacking = Box::pin(self.lacking(volume, at, offset, buf.len() as u64)).await;
                let is_there = match &lacking {
                    Lacking::Vain => false,
                    Lacking::Back => true,
                    Lacking::These(segments) => {
                        Box::pin(self.repair.repair_for_reader(segments)).await
                    }
                };
                let reread_count = if is_there { REREADS_MAX } else { 0 };
                let mut read = Err(error);
                for _ in 0..reread_count {
                    read = self.read_inner(volume, at, offset, buf, access).await;
                    if !read.as_ref().is_err_and(is_lost) {
                        break;
                    }
                }
                read
            }
            read => read,
        };
        read.map_err(|error| {
            let place = format!("read volume {volume}, offset {offset}");
            match error.kind() {
                // The map references an object that does not exist. For the reader this is damaged
                // data, whatever the store's error says.
                ErrorKind::NotFound => Error::with_source(ErrorKind::Corrupt, place, error),
                _ => error.context(place),
            }
        })
    }

    /// Determines which segments a failed read lacked.
    async fn lacking(
        &self,
        volume: VolumeId,
        at: Option<Lsn>,
        offset: u64,
        length: u64,
    ) -> Lacking {
        let Ok(wanted) = self.resolve(volume, at, offset, length).await else {
            return Lacking::Vain;
        };
        let mut segments: BTreeMap<u64, Vec<FrameRef>> = BTreeMap::new();
        let is_vain = |part: &&Wanted| self.repair.is_repair_vain(&part.frame.info);
        let is_any_vain = wanted.iter().any(|part| is_vain(&part));
        for part in wanted.iter().filter(|part| !is_vain(part)) {
            segments.entry(part.frame.info.number.0).or_default().push(part.frame.clone());
        }
        if segments.is_empty() {
            return Lacking::Vain;
        }
        let mut lacking = Vec::new();
        for mut frames in segments.into_values() {
            frames.dedup();
            let read = self.segments.frames.read_many(&frames, Access::Once).await;
            if read.is_err_and(|error| is_lost(&error)) {
                lacking.extend(frames.first().map(FrameRef::segment));
            }
        }
        match lacking.is_empty() {
            true if is_any_vain => Lacking::Vain,
            true => Lacking::Back,
            false => Lacking::These(lacking),
        }
    }

    async fn read_inner(
        &self,
        volume: VolumeId,
        at: Option<Lsn>,
        offset: u64,
        buf: &mut [u8],
        access: Access,
    ) -> Result<()> {
        let wanted = self.resolve(volume, at, offset, buf.len() as u64).await?;
        for part in &wanted {
            self.segments.heat.note(part.frame.info.number.0);
            self.segments.read_times.note(part.frame.info.number.0);
        }
        if wanted.iter().map(|part| part.at.len()).sum::<usize>() < buf.len() {
            buf.fill(0);
        }
        if let [only] = &wanted[..] {
            let bytes =
                self.segments.frames.read_many(std::slice::from_ref(&only.frame), access).await?;
            return copy(buf, only, bytes.first());
        }
        for parts in wanted.chunks(FRAMES_AT_ONCE) {
            let mut frames: Vec<FrameRef> = parts.iter().map(|part| part.frame.clone()).collect();
            frames.dedup();
            let read = self.segments.frames.read_many(&frames, access).await?;
            let mut index = 0;
            for part in parts {
                if frames[index] != part.frame {
                    index += 1;
                }
                copy(buf, part, read.get(index))?;
            }
        }
        Ok(())
    }

    /// Returns the frames of a range, in address order.
    pub(crate) async fn resolve(
        &self,
        volume: VolumeId,
        snapshot: Option<Lsn>,
        offset: u64,
        length: u64,
    ) -> Result<Vec<Wanted>> {
        let end = offset.checked_add(length).filter(|end| *end <= VOLUME_BYTES_MAX);
        let Some(end) = end else {
            return Err(Error::new(ErrorKind::Invalid, "the range is beyond the largest volume"));
        };
        let layer = self.metadata.map.layer_of(volume, snapshot);
        let mut wanted = Vec::new();
        let mut at = offset;
        while at < end {
            let number = page_of(at);
            let page_end = ((at / PAGE_BYTES + 1) * PAGE_BYTES).min(end);
            let page = match snapshot {
                Some(snapshot) => self.metadata.map.page_at(layer, number, snapshot).await?,
                None => match self.metadata.map.cached_page(layer, number) {
                    Some(page) => page,
                    None => self.metadata.map.page(layer, number).await?,
                },
            };
            self.resolve_page(&page, offset, at..page_end, &mut wanted).await?;
            at = page_end;
        }
        Ok(wanted)
    }

    async fn resolve_page(
        &self,
        page: &Page,
        offset: u64,
        bytes: Range<u64>,
        wanted: &mut Vec<Wanted>,
    ) -> Result<()> {
        let page_start = bytes.start / PAGE_BYTES * PAGE_BYTES;
        let first = ((bytes.start - page_start) / BLOCK_BYTES) as u8;
        let last = ((bytes.end - 1 - page_start) / BLOCK_BYTES) as u8;
        for run in page.runs_between(first, last).filter(|run| run.is_mapped()) {
            let record = match self.metadata.map.cached_segment(run.segment) {
                Some(record) => record,
                None => self.metadata.map.segment(run.segment).await?,
            };
            let run_start = page_start + u64::from(run.first) * BLOCK_BYTES;
            let run_end = page_start + (u64::from(run.last) + 1) * BLOCK_BYTES;
            let (from, until) = (run_start.max(bytes.start), run_end.min(bytes.end));
            let skip = u64::from(run.within) * BLOCK_BYTES + (from - run_start);
            let at = FrameAt {
                frame_index: run.frame_index,
                offset: run.offset,
                sealed_bytes: run.sealed_bytes,
            };
            wanted.push(Wanted {
                frame: record.frame(at),
                skip: skip as usize,
                at: (from - offset) as usize..(until - offset) as usize,
            });
        }
        Ok(())
    }

    /// Implements [`crate::Tier::allocation`].
    pub(crate) async fn allocation(
        &self,
        volume: VolumeId,
        snapshot: Option<Lsn>,
        (offset, length): (u64, u64),
        extent_count_max: usize,
    ) -> Result<Vec<AllocationExtent>> {
        let end = offset.checked_add(length).filter(|end| *end <= VOLUME_BYTES_MAX);
        let Some(end) = end.filter(|_| length > 0) else {
            return Err(Error::new(ErrorKind::Invalid, "the range is empty or too far"));
        };
        let layer = self.metadata.map.layer_of(volume, snapshot);
        let mut extents =
            Extents { list: Vec::new(), count_max: extent_count_max.max(1), at: offset };
        let (mut next, last) = (page_of(offset), page_of(end - 1));
        let mut looked_at = 0;
        while next <= last {
            let (pages, until) = match snapshot {
                None => self.metadata.map.pages_between(layer, next, last, ALLOCATION_STEP).await?,
                Some(at) => {
                    self.metadata
                        .map
                        .pages_between_at(layer, next..=last, at, ALLOCATION_STEP)
                        .await?
                }
            };
            for (number, page) in pages {
                let page_start = u64::from(number) * PAGE_BYTES;
                for run in page.runs.iter().filter(|run| run.is_mapped()) {
                    let from = page_start + u64::from(run.first) * BLOCK_BYTES;
                    let until = page_start + (u64::from(run.last) + 1) * BLOCK_BYTES;
                    if until <= offset || from >= end {
                        continue;
                    }
                    if !extents.push(from, true) || !extents.push(until.min(end), false) {
                        return Ok(extents.list);
                    }
                }
                looked_at += 1;
            }
            next = until.saturating_add(1);
            if next > last {
                break;
            }
            if looked_at >= ALLOCATION_PAGES_MAX {
                extents.push((u64::from(next) * PAGE_BYTES).min(end), true);
                return Ok(extents.list);
            }
        }
        extents.push(end, true);
        Ok(extents.list)
    }
}

impl Reader {
    /// Implements [`crate::Tier::differences`].
    pub(crate) async fn differences(
        &self,
        volume: VolumeId,
        (older, newer): (Lsn, Lsn),
        range: Range<u64>,
        count_max: usize,
    ) -> Result<(Vec<ChangedExtent>, Option<u64>)> {
        let mut found: Vec<ChangedExtent> = Vec::new();
        if range.is_empty() || range.end > VOLUME_BYTES_MAX {
            return Ok((found, None));
        }
        let (then_layer, layer) = (
            self.metadata.map.layer_of(volume, Some(older)),
            self.metadata.map.layer_of(volume, Some(newer)),
        );
        let (mut next, last) = (page_of(range.start), page_of(range.end - 1));
        loop {
            let (mut pages, mut until) = self
                .metadata
                .map
                .pages_between_at(layer, next..=last, newer, ALLOCATION_STEP)
                .await?;
            if then_layer != layer {
                // Pages that only the older snapshot has.
                let between = next..=until;
                let (more, end) = self
                    .metadata
                    .map
                    .pages_between_at(then_layer, between, older, ALLOCATION_STEP)
                    .await?;
                until = end;
                for (number, _) in more {
                    if pages.iter().all(|(page, _)| *page != number) {
                        pages
                            .push((number, self.metadata.map.page_at(layer, number, newer).await?));
                    }
                }
                pages.retain(|(number, _)| *number <= until);
                pages.sort_unstable_by_key(|(number, _)| *number);
            }
            for (number, now) in pages {
                let then = self.metadata.map.page_at(then_layer, number, older).await?;
                let page_start = u64::from(number) * PAGE_BYTES;
                for (first, last, is_hole) in changed(&then.runs, &now.runs) {
                    let start = (page_start + u64::from(first) * BLOCK_BYTES).max(range.start);
                    let end = (page_start + (u64::from(last) + 1) * BLOCK_BYTES).min(range.end);
                    match found.last_mut() {
                        _ if start >= end => {}
                        Some(before)
                            if before.offset + before.length_bytes == start
                                && before.is_hole == is_hole =>
                        {
                            before.length_bytes += end - start;
                        }
                        _ => found.push(ChangedExtent {
                            offset: start,
                            length_bytes: end - start,
                            is_hole,
                        }),
                    }
                }
            }
            next = match until.checked_add(1) {
                Some(next) if until < last => next,
                _ => return Ok((found, None)),
            };
            if found.len() >= count_max {
                return Ok((found, Some(u64::from(next) * PAGE_BYTES)));
            }
        }
    }
}

/// Builds the answer to an allocation query.
struct Extents {
    list: Vec<AllocationExtent>,
    count_max: usize,
    at: u64,
}

impl Extents {
    /// Extends the answer to `until` with a hole or with data. Returns false if no more fits.
    fn push(&mut self, until: u64, is_hole: bool) -> bool {
        let Some(length_bytes) = until.checked_sub(self.at).filter(|length| *length > 0) else {
            return true;
        };
        let is_full = self.list.len() == self.count_max;
        match self.list.last_mut().filter(|last| last.is_hole == is_hole) {
            Some(last) => last.length_bytes += length_bytes,
            None if is_full => return false,
            None => self.list.push(AllocationExtent { length_bytes, is_hole, is_zero: is_hole }),
        }
        self.at = until;
        true
    }
}

fn page_of(offset: u64) -> u32 {
    u32::try_from(offset / PAGE_BYTES).expect("a volume of 1 PiB has 2^30 pages")
}

fn copy(buf: &mut [u8], part: &Wanted, frame: Option<&Bytes>) -> Result<()> {
    let bytes = frame.and_then(|frame| frame.get(part.skip..part.skip + part.at.len()));
    let Some(bytes) = bytes else {
        let what = format!(
            "{}, frame {}: it holds fewer blocks than the map says",
            part.frame.info, part.frame.at.frame_index
        );
        return Err(Error::new(ErrorKind::Corrupt, what));
    };
    buf[part.at.clone()].copy_from_slice(bytes);
    Ok(())
}
