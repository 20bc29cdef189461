//! Destage: turns one window of the log into segments and one commit of the map.
//!
//! Invariants:
//! - Order: every segment is durable in the store, then one metadata batch is durable, then the
//!   caller may trim the log. A crash in between leaves orphan segments, or repeats the window.
//! - A window that is already destaged is ignored, so repeating one is harmless.
//! - Memory is bounded: the payload of one gathering step, plus
//!   [`TierOptions::segments_in_flight_max`] segments, whatever the size of the window.
//! - An outage of the store is waited out. Dropping the future stops a destage between two steps; a
//!   commit that has begun runs to its end.
//!
//! [`TierOptions::segments_in_flight_max`]: crate::TierOptions::segments_in_flight_max

pub(crate) mod buffers;
mod duplicates;
pub(crate) mod pack;
pub(crate) mod write;

use crate::dedup::{Dedup, Pin};
use crate::fail_point;
use crate::map::commit::CommitError;
use crate::map::pages::PAGE_BLOCKS;
use crate::map::ranges::RANGE_PAGES_MIN;
use crate::map::records::NamedSpillFile;
use crate::map::{Change, Commit, CommitReport, SnapshotChange};
use crate::pool::{JobParts, Metadata, Pool, Segments};
use crate::read::Reader;
use crate::segment_store::Leftover;
use block::units::{BLOCK_BYTES, SECTOR_BYTES, SECTORS_PER_BLOCK};
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use bytes::Bytes;
use duplicates::{Duplicates, Search};
use futures::{StreamExt, TryStreamExt};
use pack::{Item, Packer, Partial, Splitter};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use write::{Output, SegmentWriter, Written};

/// Payload gathered before it is packed, in bytes. Chosen by hand: large compared with an extent,
/// small compared with a segment.
const GATHER_BYTES: u64 = 4 << 20;

/// Extents read from the log concurrently.
const SOURCE_READS_MAX: usize = 16;

/// Partly written blocks that are completed from the tier concurrently.
const MERGES_MAX: usize = 32;
/// Blocks read concurrently to check only that they are readable. Chosen by hand.
const CHECKS_MAX: usize = 32;

/// Pause after the first failed upload; it doubles up to [`RETRY_PAUSE_MAX`].
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(100);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(10);

/// Highest compression level while the log fills faster than it is drained. Source: zstd 1.5 on
/// half random data, in frames of 32 KiB: 1,400 MB/s per core instead of 650 at level 1, for the
/// same size; on program text 350 instead of 250, for an eighth more.
const URGENT_LEVEL: i32 = -1;

/// Room for the contents of a segment other than its frames and their directory entries. Chosen by
/// hand.
const FOOTER_ROOM_BYTES: usize = 4 << 10;

const BLOCK: usize = BLOCK_BYTES as usize;
const SECTOR: usize = SECTOR_BYTES as usize;

/// The input of a destage from the log: all changes since the previous window up to an LSN, reduced
/// to the newest state.
#[derive(Clone, Debug)]
pub struct Window<H> {
    /// LSN of its last entry.
    pub last_lsn: Lsn,
    /// Snapshots made or removed at `last_lsn`.
    pub snapshots: Vec<SnapshotChange>,
    /// The newest record of each volume that has one in the window.
    pub volume_records: Vec<(VolumeId, Bytes)>,
    /// The extents by volume, each volume once.
    pub volumes: Vec<WindowVolume<H>>,
    /// All spill files of each volume whose spill files change with this window. They contain the
    /// entries that the window lacks for the volume. The list is empty when the window contains the
    /// entries that were in spill files.
    pub stalled_volumes: Vec<(VolumeId, Vec<NamedSpillFile>)>,
    /// Set for a catch-up window, which contains entries up to this LSN that earlier windows lacked.
    /// `last_lsn` is then the destaged LSN, and the volumes have had spill files until now. No
    /// snapshot of these volumes lies among the entries.
    pub late: Option<Lsn>,
}

/// The extents of one volume in a window: sorted and disjoint.
pub type WindowVolume<H> = (VolumeId, Vec<WindowExtent<H>>);

/// Consecutive sectors of one volume.
#[derive(Clone, Debug)]
pub struct WindowExtent<H> {
    /// First sector, in units of 512 bytes.
    pub start_sector: u64,
    /// Sectors, at least 1.
    pub sector_count: u64,
    /// Content of these sectors.
    pub content: ExtentContent<H>,
}

async fn payload_of<S: LogSource>(
    source: &S,
    content: &ExtentContent<S::Handle>,
) -> Result<Option<Bytes>> {
    match content {
        ExtentContent::Data(handle) => source.read(handle).await.map(Some),
        ExtentContent::Zero => Ok(None),
    }
}

/// Content of an extent.
#[derive(Clone, Debug)]
pub enum ExtentContent<H> {
    /// Payload of exactly the extent's length, to be read with [`LogSource::read`].
    Data(H),
    /// No data: the extent reads as zeroes.
    Zero,
}

/// Source of payload. The daemon implements it over its log.
pub trait LogSource: Send + Sync {
    /// Handle of the payload of one extent.
    type Handle: Clone + Send + Sync;

    /// Returns the payload, from memory or from the log.
    fn read(&self, handle: &Self::Handle) -> impl Future<Output = Result<Bytes>> + Send;
}

/// Failure of a destage. Nothing of the window is in the map then.
#[derive(Clone, Debug)]
pub struct DestageError {
    /// The volume whose data is the cause, if it is a single one.
    pub volume: Option<VolumeId>,
    /// The cause.
    pub error: Error,
}

impl From<Error> for DestageError {
    fn from(error: Error) -> Self {
        DestageError { volume: None, error }
    }
}

impl From<CommitError> for DestageError {
    fn from(failed: CommitError) -> Self {
        DestageError { volume: failed.volume, error: failed.error }
    }
}

impl From<DestageError> for Error {
    fn from(failed: DestageError) -> Self {
        match failed.volume {
            Some(volume) => failed.error.context(format!("destage volume {volume}")),
            None => failed.error.context("destage"),
        }
    }
}

/// Work done by a destage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DestageReport {
    /// The window was already in the tier.
    pub was_done: bool,
    /// Segments written.
    pub segment_count: u64,
    /// Bytes of the segments' objects.
    pub object_bytes: u64,
    /// Blocks stored.
    pub stored_block_count: u64,
    /// Blocks that are duplicates of stored ones.
    pub duplicate_count: u64,
    /// Blocks that contained only zeroes or were trimmed, and are not stored.
    pub zero_block_count: u64,
    /// Blocks completed from the tier because the window had only some of their sectors.
    pub merged_block_count: u64,
    /// Time spent compressing and sealing, summed over all threads.
    pub build_us: u64,
    /// Time of the metadata commit.
    pub commit_us: u64,
    /// Report of the metadata commit.
    pub commit: CommitReport,
}

/// The job; see the module.
pub(crate) struct Destage {
    pub pool: Arc<Pool>,
    pub metadata: Arc<Metadata>,
    pub segments: Arc<Segments>,
    pub reader: Arc<Reader>,
    pub dedup: Arc<Dedup>,
    pub output: Arc<Output>,
    /// Serializes destages, in the order of the calls.
    turn: tokio::sync::Mutex<()>,
    /// Retries of reads that complete a partly overwritten block, after the store did not answer.
    complete_retry_count: AtomicU64,
}

impl Destage {
    pub(crate) fn new(parts: &JobParts, reader: &Arc<Reader>, output: &Arc<Output>) -> Destage {
        let JobParts { pool, metadata, segments } = parts.clone();
        Destage {
            pool,
            metadata,
            segments,
            reader: reader.clone(),
            dedup: reader.dedup.clone(),
            output: output.clone(),
            turn: tokio::sync::Mutex::default(),
            complete_retry_count: AtomicU64::new(0),
        }
    }

    /// Implements [`crate::Tier::destage`].
    pub(crate) async fn run<S: LogSource>(
        self: &Arc<Self>,
        window: Window<S::Handle>,
        source: &S,
    ) -> Result<DestageReport, DestageError> {
        let _turn = self.turn.lock().await;
        // Check before anything is uploaded in vain.
        self.metadata.map.check(&*self.metadata.writer.lock().await)?;
        if self.is_done(window.last_lsn, window.late.is_some(), self.metadata.map.destaged_lsn())? {
            return Ok(DestageReport { was_done: true, ..DestageReport::default() });
        }
        fail_point!("destage-start");
        let mut job = Job::new(self);
        // Volumes with the same key follow one another, so that they share segments.
        let mut volumes: Vec<&WindowVolume<S::Handle>> = window.volumes.iter().collect();
        volumes.sort_by_key(|(volume, _)| self.pool.volume_keys.of(*volume));
        for (volume, extents) in volumes {
            let added = job.add_volume(*volume, extents, source).await;
            added.map_err(|failed| DestageError {
                volume: failed.volume.or(Some(*volume)),
                ..failed
            })?;
        }
        let (commit, pins, mut report) = job.finish(window).await?;
        fail_point!("destage-before-commit");
        let started = self.pool.clock.now();
        report.commit = self.commit(commit, pins).await.map_err(DestageError::from)?;
        report.commit_us = micros(self.pool.clock.since(started));
        fail_point!("destage-committed");
        Ok(report)
    }

    /// Returns whether a window is already in the tier.
    fn is_done(&self, last_lsn: Lsn, is_late: bool, destaged: Lsn) -> Result<bool> {
        if is_late && last_lsn != destaged {
            let what =
                format!("destage a catch-up window of {last_lsn}: the tier is at {destaged}");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        Ok(!is_late && last_lsn <= destaged)
    }

    /// Implements [`crate::Tier::check_extents`].
    pub(crate) async fn check_extents(
        &self,
        volume: VolumeId,
        extents: &[(u64, u64, bool)],
    ) -> Result<()> {
        let layer = self.metadata.map.layers().current(volume);
        let pages = extents.iter().flat_map(|&extent| pages_of(extent));
        let mut pages: Vec<u32> = pages.collect();
        pages.dedup();
        self.metadata.map.check_pages(layer, pages).await?;
        let blocks = partial_blocks(extents).into_iter().map(Ok);
        futures::stream::iter(blocks)
            .try_for_each_concurrent(CHECKS_MAX, async |index| {
                let mut block = vec![0; BLOCK];
                self.reader.read(volume, index * BLOCK_BYTES, &mut block).await
            })
            .await
    }

    /// Commits in a task of its own, so that dropping the destage does not leave the map half
    /// changed.
    async fn commit(
        self: &Arc<Self>,
        commit: Commit,
        pins: Vec<Pin>,
    ) -> Result<CommitReport, CommitError> {
        let destage = self.clone();
        let task = self.pool.background.spawn(async move {
            let _pins = pins; // until the commit is over
            let mut writer = destage.metadata.writer.lock().await;
            let lists = commit.fingerprints.clone();
            let written: Vec<Leftover> = commit.segments.iter().map(Leftover::from).collect();
            match destage.is_done(commit.last_lsn, commit.is_late, writer.root().destaged) {
                Ok(false) => {}
                done => {
                    destage.segments.leftovers.abandon(written);
                    return done.map(|_| CommitReport::default()).map_err(CommitError::from);
                }
            }
            let committed = destage.metadata.map.commit(&mut writer, commit).await;
            match &committed {
                Ok(_) => destage.dedup.add(&lists),
                // They are deleted only if the map turns out not to reference them.
                Err(_) => destage.segments.leftovers.abandon(written),
            }
            committed
        });
        task.await.map_err(|cause| Error::with_source(ErrorKind::Io, "commit map", cause))?
    }
}

/// A window that is being turned into segments.
struct Job<'a> {
    destage: &'a Arc<Destage>,
    writer: SegmentWriter,
    /// Ranges that the window unmaps.
    unmapped: Vec<Change>,
    duplicates: Duplicates,
    report: DestageReport,
}

impl<'a> Job<'a> {
    fn new(destage: &'a Arc<Destage>) -> Job<'a> {
        Job {
            destage,
            writer: SegmentWriter::new(
                &destage.output,
                destage.output.settings.segments_in_flight_max,
                destage.output.settings.segment_bytes,
            ),
            unmapped: Vec::new(),
            duplicates: Duplicates::default(),
            report: DestageReport::default(),
        }
    }

    async fn add_volume<S: LogSource>(
        &mut self,
        volume: VolumeId,
        extents: &[WindowExtent<S::Handle>],
        source: &S,
    ) -> Result<(), DestageError> {
        check_order(volume, extents)?;
        let key = self.destage.pool.volume_keys.of(volume);
        self.writer.set_key(key).await?;
        let layer = self.destage.metadata.map.layers().current(volume);
        let fingerprinter = match self.destage.dedup.is_forced || self.destage.dedup.has(volume) {
            true => self.destage.dedup.fingerprinter(key),
            false => None,
        };
        let search =
            fingerprinter.map(|fingerprinter| Search { volume, layer, key, fingerprinter });
        if search.is_some() {
            self.writer.set_dedup();
        }
        let mut packer = Packer::new(layer, self.destage.output.settings.frame_blocks);
        let mut splitter = Splitter::default();
        let mut rest = extents;
        while !rest.is_empty() {
            let mut bytes = 0;
            let count = rest.iter().take_while(|extent| {
                let takes = bytes < GATHER_BYTES;
                // Each end may have a block that must be completed.
                bytes += 2 * BLOCK_BYTES;
                if let ExtentContent::Data(_) = extent.content {
                    bytes += extent.sector_count * SECTOR_BYTES;
                }
                takes
            });
            let (now, later) = rest.split_at(count.count());
            rest = later;
            // Build a list of futures rather than a closure over `now`: such a closure is not
            // `Send` for every lifetime, and the daemon spawns this future.
            let mut reads = Vec::with_capacity(now.len());
            for extent in now {
                reads.push(payload_of(source, &extent.content));
            }
            let payloads: Vec<Option<Bytes>> =
                futures::stream::iter(reads).buffered(SOURCE_READS_MAX).try_collect().await?;
            for (extent, payload) in now.iter().zip(payloads) {
                self.split(&mut splitter, volume, extent, payload)?;
            }
            if rest.is_empty() {
                splitter.end();
            }
            self.pack(&mut packer, volume, &mut splitter.items, search).await?;
        }
        if let Some(piece) = packer.end() {
            self.writer.add(piece).await?;
        }
        Ok(())
    }

    /// Splits one extent into items, and records the range that it unmaps.
    fn split<H>(
        &mut self,
        splitter: &mut Splitter,
        volume: VolumeId,
        extent: &WindowExtent<H>,
        payload: Option<Bytes>,
    ) -> Result<()> {
        let wanted = extent.sector_count * SECTOR_BYTES;
        if payload.as_ref().is_some_and(|payload| payload.len() as u64 != wanted) {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!(
                    "read the log for volume {volume}, sector {}: wrong length",
                    extent.start_sector
                ),
            ));
        }
        if let Some((first_block, block_count)) = splitter.add(extent, payload.as_ref()) {
            self.report.zero_block_count += block_count;
            let layer = self.destage.metadata.map.layers().current(volume);
            // A trim of a whole device arrives as many consecutive requests; join them into one
            // range.
            match self.unmapped.last_mut() {
                Some(last)
                    if last.layer == layer
                        && last.first_block + last.block_count == first_block =>
                {
                    last.block_count += block_count;
                }
                _ => {
                    let (placed, is_duplicate) = (None, false);
                    let change = Change { layer, first_block, block_count, placed, is_duplicate };
                    self.unmapped.push(change);
                }
            }
        }
        Ok(())
    }

    /// Completes the partly written blocks and packs everything into frames.
    async fn pack(
        &mut self,
        packer: &mut Packer,
        volume: VolumeId,
        items: &mut Vec<Item>,
        search: Option<Search>,
    ) -> Result<()> {
        let destage = self.destage;
        let merged = items.iter().filter(|item| matches!(item, Item::Merge(_))).count();
        self.report.merged_block_count += merged as u64;
        let mut whole = futures::stream::iter(items.drain(..))
            .map(|item| async move {
                match item {
                    Item::Whole { first_block, bytes } => Ok((first_block, bytes)),
                    Item::Merge(partial) => destage.complete(volume, partial).await,
                }
            })
            .buffered(MERGES_MAX);
        if let Some(search) = search {
            let whole: Vec<(u64, Bytes)> = whole.try_collect().await?;
            return self.pack_new(packer, search, whole).await;
        }
        let mut pieces = Vec::new();
        while let Some((first_block, bytes)) = whole.try_next().await? {
            packer.add(first_block, bytes, &[], &mut pieces);
            for piece in pieces.drain(..) {
                self.writer.add(piece).await?;
            }
        }
        Ok(())
    }

    /// Waits for every segment. From then on the commit owns the objects.
    async fn finish<H>(mut self, window: Window<H>) -> Result<(Commit, Vec<Pin>, DestageReport)> {
        let written = self.writer.finish().await?;
        let Written { segments, mut changes, fingerprints, report: written } = written;
        let repeats = self.duplicates.take_repeats(&changes)?;
        let Duplicates { pins, changes: duplicates, mut found, .. } = self.duplicates;
        let own = changes.iter().filter(|change| change.is_duplicate);
        for change in own {
            let volume = found.entry(change.layer.volume()).or_default();
            volume.duplicate_count += change.block_count;
        }
        let duplicate_count = found.values().map(|found| found.duplicate_count).sum();
        changes.extend(duplicates.into_iter().chain(repeats));
        changes.extend(self.unmapped);
        let commit = Commit {
            last_lsn: window.last_lsn,
            lsn: window.late.unwrap_or(window.last_lsn),
            volume_records: window.volume_records,
            snapshots: window.snapshots,
            segments,
            changes,
            next_segment: self.destage.metadata.next_segment.load(Ordering::SeqCst),
            stalled_volumes: window.stalled_volumes,
            is_late: window.late.is_some(),
            fingerprints,
            found: found.into_iter().collect(),
        };
        let report = DestageReport {
            segment_count: written.segment_count,
            object_bytes: written.object_bytes,
            stored_block_count: written.stored_block_count,
            duplicate_count,
            zero_block_count: self.report.zero_block_count + written.zero_block_count,
            build_us: written.build_us,
            ..self.report
        };
        Ok((commit, pins, report))
    }
}

impl Destage {
    /// Fills the sectors that the window lacks from the tier.
    async fn complete(&self, volume: VolumeId, partial: Partial) -> Result<(u64, Bytes)> {
        let Partial { block, mut bytes, have } = partial;
        let mut old = vec![0; BLOCK];
        let mut pause = RETRY_PAUSE_MIN;
        while let Err(error) = self.reader.read(volume, block * BLOCK_BYTES, &mut old).await {
            if error.kind() != ErrorKind::Unavailable {
                return Err(error);
            }
            // Many blocks may wait for one store, so only the 1st, 2nd, 4th, 8th and so on attempt
            // is logged.
            let count = self.complete_retry_count.fetch_add(1, Ordering::Relaxed) + 1;
            if count.is_power_of_two() {
                tracing::warn!(
                    error = %error.chain(), count,
                    "could not complete blocks from the data tier; trying again"
                );
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_PAUSE_MAX);
        }
        for sector in 0..SECTORS_PER_BLOCK as usize {
            if have & (1 << sector) == 0 {
                let range = sector * SECTOR..(sector + 1) * SECTOR;
                bytes[range.clone()].copy_from_slice(&old[range]);
            }
        }
        Ok((block, bytes.freeze()))
    }
}

/// Returns the blocks of which the extents contain some but not all sectors. The extents (first
/// sector, sectors, whether there is payload) are sorted and disjoint.
pub(crate) fn partial_blocks(extents: &[(u64, u64, bool)]) -> Vec<u64> {
    let mut partial = Vec::new();
    // The block at the end of the last extent: its index, and the number of its sectors so far.
    let mut open = (0, 0);
    let mut close = |(index, count): (u64, u64)| {
        if count > 0 && count < SECTORS_PER_BLOCK {
            partial.push(index);
        }
    };
    for &(start, count, _) in extents {
        let (mut at, end) = (start, start + count);
        let first = at / SECTORS_PER_BLOCK;
        if first != open.0 {
            close(open);
            open = (first, 0);
        }
        let in_first = ((first + 1) * SECTORS_PER_BLOCK).min(end) - at;
        open.1 += in_first;
        at += in_first;
        if at < end {
            close(open);
            open = (end / SECTORS_PER_BLOCK, end % SECTORS_PER_BLOCK);
        }
    }
    close(open);
    partial
}

/// Returns the pages that a commit of an extent reads. A sufficient number of whole pages without
/// payload becomes a range, and these pages are not read.
fn pages_of((start, count, has_payload): (u64, u64, bool)) -> Vec<u32> {
    const PAGE_SECTORS: u64 = PAGE_BLOCKS * SECTORS_PER_BLOCK;
    let number = |page: u64| u32::try_from(page).expect("a volume of 1 PiB has 2^30 pages");
    let end = start + count;
    let (whole_first, whole_end) = (start.div_ceil(PAGE_SECTORS), end / PAGE_SECTORS);
    if !has_payload && whole_end.saturating_sub(whole_first) >= u64::from(RANGE_PAGES_MIN) {
        let head = (!start.is_multiple_of(PAGE_SECTORS)).then(|| whole_first - 1);
        let tail = (!end.is_multiple_of(PAGE_SECTORS)).then_some(whole_end);
        return head.into_iter().chain(tail).map(number).collect();
    }
    (number(start / PAGE_SECTORS)..=number((end - 1) / PAGE_SECTORS)).collect()
}

fn check_order<H>(volume: VolumeId, extents: &[WindowExtent<H>]) -> Result<()> {
    let mut end = 0;
    for extent in extents {
        let next = extent.start_sector.checked_add(extent.sector_count);
        let is_ordered = extent.start_sector >= end && extent.sector_count > 0;
        match next {
            Some(next) if is_ordered && next <= block::units::VOLUME_BYTES_MAX / SECTOR_BYTES => {
                end = next;
            }
            _ => {
                let what = format!(
                    "destage volume {volume}: extent at sector {} overlaps, is empty or is too far",
                    extent.start_sector
                );
                return Err(Error::new(ErrorKind::Invalid, what));
            }
        }
    }
    Ok(())
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
