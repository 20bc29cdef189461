//! Destage: one window of the log becomes segments and one commit of the map.
//!
//! Invariants:
//! - Order: every segment durable in the store, then one metadata batch durable, then the caller may
//!   trim the log. A crash in between leaves orphan segments, or repeats the window.
//! - A window that is destaged already is left alone, so repeating one is harmless.
//! - Memory is bounded: payload of one gathering step, plus [`TierOptions::segments_in_flight_max`]
//!   segments, whatever the size of the window.
//! - The store being away is waited out. Dropping the future stops a destage between two steps; a
//!   commit that has begun ends by itself.
//!
//! [`TierOptions::segments_in_flight_max`]: crate::TierOptions::segments_in_flight_max

pub(crate) mod buffers;
mod pack;

use crate::fail_point;
use crate::map::commit::CommitError;
use crate::map::pages::PAGE_BLOCKS;
use crate::map::ranges::RANGE_PAGES_MIN;
use crate::map::records::{AsideFile, SegmentRecord};
use crate::map::{Change, Commit, CommitReport, LayerId, Placed};
use crate::segment::build::FRAME_OVERHEAD_BYTES;
use crate::segment::{FrameAt, SealedSegment, SegmentBuilder, SegmentNumber, SegmentSeed};
use crate::tier::Inner;
use block::env::SystemRandom;
use block::units::{BLOCK_BYTES, SECTOR_BYTES, SECTORS_PER_BLOCK};

use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use pack::{Item, Packer, Partial, Piece, Splitter};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Payload gathered before it is packed, in bytes. Chosen by hand: large beside an extent, small
/// beside a segment.
const GATHER_BYTES: u64 = 4 << 20;

/// Extents read from the log at the same time.
const SOURCE_READS_MAX: usize = 16;

/// Partly written blocks that are completed from the tier at the same time.
const MERGES_MAX: usize = 32;
/// Blocks read at the same time where only their being readable matters. Chosen by hand.
const CHECKS_MAX: usize = 32;

/// Pause after the first failed upload; it doubles up to [`RETRY_PAUSE_MAX`].
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(100);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(10);

/// Compression level, at most, while the log fills faster than it is emptied. Source: zstd 1.5 on half
/// random data, in frames of 32 KiB: 1,400 MB/s a core instead of 650 at level 1, for the same size; on
/// program text 350 instead of 250, for an eighth more.
const URGENT_LEVEL: i32 = -1;

/// Room for what a segment holds beside its frames and their directory entries. Chosen by hand.
const FOOTER_ROOM_BYTES: usize = 4 << 10;

const BLOCK: usize = BLOCK_BYTES as usize;
const SECTOR: usize = SECTOR_BYTES as usize;

/// What the log has for the data tier: everything that happened up to an LSN since the window
/// before, newest state only.
#[derive(Clone, Debug)]
pub struct Window<H> {
    /// LSN of its last entry.
    pub last_lsn: Lsn,
    /// The newest record of each volume that has one in the window.
    pub volume_records: Vec<(VolumeId, Bytes)>,
    /// Each volume once.
    pub volumes: Vec<WindowVolume<H>>,
    /// All side files of each volume whose side files change with this window: those that hold what
    /// the window lacks of it, or none when the window brings what they held.
    pub asides: Vec<(VolumeId, Vec<AsideFile>)>,
    /// It brings what earlier windows lacked: `last_lsn` is the destaged LSN, and the volumes had
    /// side files until now.
    pub is_late: bool,
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
    /// What is there.
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

/// What an extent holds.
#[derive(Clone, Debug)]
pub enum ExtentContent<H> {
    /// Payload, of exactly the extent's length, which [`LogSource::read`] returns.
    Data(H),
    /// Nothing: it reads as zeroes.
    Zero,
}

/// Where payload comes from. Implemented by the daemon over its log.
pub trait LogSource: Send + Sync {
    /// Names the payload of one extent.
    type Handle: Clone + Send + Sync;

    /// The payload, from memory or read back from the log.
    fn read(&self, handle: &Self::Handle) -> impl Future<Output = Result<Bytes>> + Send;
}

/// Why a window could not be destaged. Nothing of it is in the map then.
#[derive(Clone, Debug)]
pub struct DestageError {
    /// The volume whose data is the cause, if it is one volume's.
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

/// What a destage did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DestageReport {
    /// The window was in the tier already.
    pub was_done: bool,
    /// Segments written.
    pub segment_count: u64,
    /// Bytes of the segments' objects.
    pub object_bytes: u64,
    /// Blocks stored.
    pub stored_block_count: u64,
    /// Blocks that held only zeroes, or were trimmed, and are not stored.
    pub zero_block_count: u64,
    /// Blocks completed from the tier because the window had only some of their sectors.
    pub merged_block_count: u64,
    /// Time spent compressing and sealing, over all threads.
    pub build_us: u64,
    /// Time of the metadata commit.
    pub commit_us: u64,
    /// The metadata commit.
    pub commit: CommitReport,
}

/// A segment that is durable in the store, and what it means to the map.
struct Stored {
    record: Option<SegmentRecord>,
    changes: Vec<Change>,
    report: DestageReport,
}

impl Inner {
    /// See [`crate::Tier::destage`].
    pub(crate) async fn destage<S: LogSource>(
        self: &Arc<Self>,
        window: Window<S::Handle>,
        source: &S,
    ) -> Result<DestageReport, DestageError> {
        let _turn = self.destage_turn.lock().await;
        // Before anything is uploaded in vain.
        self.map.check(&*self.writer.lock().await)?;
        if self.is_done(window.last_lsn, window.is_late, self.map.destaged_lsn())? {
            return Ok(DestageReport { was_done: true, ..DestageReport::default() });
        }
        fail_point!("destage-start");
        let mut job = Job::new(self);
        for (volume, extents) in &window.volumes {
            let added = job.add_volume(*volume, extents, source).await;
            added.map_err(|failed| DestageError {
                volume: failed.volume.or(Some(*volume)),
                ..failed
            })?;
        }
        let (commit, mut report) = job.finish(window).await?;
        fail_point!("destage-before-commit");
        let started = Instant::now();
        report.commit = self.commit(commit).await.map_err(DestageError::from)?;
        report.commit_us = micros(started);
        fail_point!("destage-committed");
        Ok(report)
    }

    /// Whether a window is in the tier already.
    fn is_done(&self, last_lsn: Lsn, is_late: bool, destaged: Lsn) -> Result<bool> {
        if is_late && last_lsn != destaged {
            let what = format!("destage a late window of {last_lsn}: the tier is at {destaged}");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        Ok(!is_late && last_lsn <= destaged)
    }

    /// See [`crate::Tier::check_extents`].
    pub(crate) async fn check_extents(
        &self,
        volume: VolumeId,
        extents: &[(u64, u64, bool)],
    ) -> Result<()> {
        let layer = LayerId::of_volume(volume);
        let pages = extents.iter().flat_map(|&extent| pages_of(extent));
        let mut pages: Vec<u32> = pages.collect();
        pages.dedup();
        self.map.check_pages(layer, pages).await?;
        let blocks = partial_blocks(extents).into_iter().map(Ok);
        futures::stream::iter(blocks)
            .try_for_each_concurrent(CHECKS_MAX, async |index| {
                let mut block = vec![0; BLOCK];
                self.read(volume, index * BLOCK_BYTES, &mut block).await
            })
            .await
    }

    /// Commits in a task of its own: a destage that is dropped does not leave the map halfway.
    async fn commit(self: &Arc<Self>, commit: Commit) -> Result<CommitReport, CommitError> {
        let inner = self.clone();
        let task = self.background.spawn(async move {
            let mut writer = inner.writer.lock().await;
            let names: Vec<Path> =
                commit.segments.iter().map(|record| record.info.object_path()).collect();
            match inner.is_done(commit.last_lsn, commit.is_late, writer.root().destaged) {
                Ok(false) => {}
                done => {
                    inner.orphans.abandon(names);
                    return done.map(|_| CommitReport::default()).map_err(CommitError::from);
                }
            }
            let committed = inner.map.commit(&mut writer, commit).await;
            if committed.is_err() {
                // Deleted only if the map turns out not to name them.
                inner.orphans.abandon(names);
            }
            committed
        });
        task.await.map_err(|cause| Error::with_source(ErrorKind::Io, "commit map", cause))?
    }

    /// Writes a segment's object, waiting for the store as long as it takes.
    async fn upload(&self, segment: &SealedSegment) -> Result<()> {
        let path = segment.info.object_path();
        let mut pause = RETRY_PAUSE_MIN;
        let mut has_differed = false;
        loop {
            let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
            let payload = PutPayload::from_bytes(segment.bytes.clone());
            let failed = match self.store.put_opts(&path, payload, options).await {
                Ok(_) => {
                    self.uploads.clear();
                    return Ok(());
                }
                // An earlier attempt of ours may have arrived without our hearing of it.
                Err(
                    object_store::Error::AlreadyExists { .. }
                    | object_store::Error::Precondition { .. },
                ) => match self.store.get(&path).await {
                    Ok(found) => match found.bytes().await {
                        Ok(bytes) if bytes == segment.bytes => {
                            self.uploads.clear();
                            return Ok(());
                        }
                        // The transfer may have been bad: it is looked at once more.
                        Ok(_) if !has_differed => {
                            has_differed = true;
                            let source = "other bytes were read back".into();
                            object_store::Error::Generic { store: "upload", source }
                        }
                        Ok(_) => {
                            let what = format!("write {}: other bytes are there", segment.info);
                            return Err(Error::new(ErrorKind::Corrupt, what));
                        }
                        Err(failed) => failed,
                    },
                    Err(failed) => failed,
                },
                Err(
                    failed @ (object_store::Error::NotSupported { .. }
                    | object_store::Error::NotImplemented { .. }),
                ) => {
                    let what = format!("write {}", segment.info);
                    return Err(Error::with_source(ErrorKind::Unsupported, what, failed));
                }
                Err(failed) => failed,
            };
            self.upload_retry_count.fetch_add(1, Ordering::Relaxed);
            self.uploads.note(&failed);
            tracing::warn!(object = %path, error = %failed, "segment not written, trying again");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_PAUSE_MAX);
        }
    }

    /// Builds, uploads and caches one segment.
    async fn store_segment(
        self: Arc<Self>,
        seed: SegmentSeed,
        pieces: Vec<Piece>,
    ) -> Result<Stored> {
        let inner = self.clone();
        let built = tokio::task::spawn_blocking(move || build(&inner, seed, &pieces));
        let (segment, mut stored) = built
            .await
            .map_err(|cause| Error::with_source(ErrorKind::Io, "build segment", cause))?;
        fail_point!("destage-segment-built");
        if let Some(segment) = segment {
            self.upload(&segment).await?;
            fail_point!("destage-segment-uploaded");
            self.frames.insert_segment(&segment.info, segment.bytes.clone());
            let block_count = u32::try_from(stored.report.stored_block_count)
                .expect("a segment has fewer than 2^24 blocks");
            stored.record = Some(SegmentRecord { info: segment.info, block_count });
            stored.report.segment_count = 1;
            stored.report.object_bytes = segment.info.object_bytes.into();
        }
        Ok(stored)
    }
}

/// Compresses and seals: the part that takes CPU.
fn build(inner: &Inner, seed: SegmentSeed, pieces: &[Piece]) -> (Option<SealedSegment>, Stored) {
    let started = Instant::now();
    let plain_bytes: usize = pieces.iter().map(|piece| piece.plaintext.len()).sum();
    let number = seed.number.0;
    // Room for the worst case, that nothing compresses: growing means copying, and memory that is
    // never written to costs nothing.
    let room = plain_bytes + pieces.len() * FRAME_OVERHEAD_BYTES + FOOTER_ROOM_BYTES;
    let bytes = inner.buffers.take(room);
    let level = match inner.is_urgent.load(Ordering::Relaxed) {
        true => inner.options.zstd_level.min(URGENT_LEVEL),
        false => inner.options.zstd_level,
    };
    let mut builder = SegmentBuilder::new_in(seed, &inner.pool_key, level, bytes);
    let mut stored = Stored {
        record: None,
        changes: Vec::with_capacity(pieces.len()),
        report: DestageReport::default(),
    };
    for piece in pieces {
        let mut at = 0;
        while at < piece.plaintext.len() {
            let is_zero = is_zero(&piece.plaintext[at..at + BLOCK]);
            let mut end = at + BLOCK;
            while end < piece.plaintext.len() && is_zero == is_zero_at(&piece.plaintext, end) {
                end += BLOCK;
            }
            let first_block = piece.first_block + (at / BLOCK) as u64;
            let block_count = ((end - at) / BLOCK) as u64;
            let placed = if is_zero {
                stored.report.zero_block_count += block_count;
                None
            } else {
                stored.report.stored_block_count += block_count;
                let at: FrameAt =
                    builder.push(piece.layer.0, first_block, &piece.plaintext[at..end]);
                Some(Placed { segment: number, at, within: 0 })
            };
            stored.changes.push(Change { layer: piece.layer, first_block, block_count, placed });
            at = end;
        }
    }
    let segment = (builder.frame_count() > 0).then(|| {
        let (info, bytes) = builder.finish_in();
        SealedSegment { info, bytes: inner.buffers.share(bytes) }
    });
    stored.report.build_us = micros(started);
    (segment, stored)
}

fn is_zero_at(bytes: &[u8], at: usize) -> bool {
    is_zero(&bytes[at..at + BLOCK])
}

/// Most blocks that are not zero say so in their first bytes.
fn is_zero(block: &[u8]) -> bool {
    block.chunks_exact(64).all(|chunk| chunk.iter().fold(0, |any, byte| any | byte) == 0)
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// A window on its way into segments.
struct Job<'a> {
    inner: &'a Arc<Inner>,
    /// Objects that the store may hold once this job has begun; abandoned if it is dropped.
    names: Vec<Path>,
    group: Vec<Piece>,
    group_bytes: usize,
    running: JoinSet<Result<Stored>>,
    segments: Vec<SegmentRecord>,
    changes: Vec<Change>,
    report: DestageReport,
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        self.inner.orphans.abandon(std::mem::take(&mut self.names));
    }
}

impl<'a> Job<'a> {
    fn new(inner: &'a Arc<Inner>) -> Job<'a> {
        Job {
            inner,
            names: Vec::new(),
            group: Vec::new(),
            group_bytes: 0,
            running: JoinSet::new(),
            segments: Vec::new(),
            changes: Vec::new(),
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
        let mut packer = Packer::new(volume, self.inner.options.frame_blocks);
        let mut splitter = Splitter::default();
        let mut rest = extents;
        while !rest.is_empty() {
            let mut bytes = 0;
            let count = rest.iter().take_while(|extent| {
                let takes = bytes < GATHER_BYTES;
                // At each end there may be a block that has to be completed.
                bytes += 2 * BLOCK_BYTES;
                if let ExtentContent::Data(_) = extent.content {
                    bytes += extent.sector_count * SECTOR_BYTES;
                }
                takes
            });
            let (now, later) = rest.split_at(count.count());
            rest = later;
            // A list of futures, not a closure over `now`: such a closure is not `Send` for every
            // lifetime, and the daemon spawns this.
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
            self.pack(&mut packer, volume, &mut splitter.items).await?;
        }
        if let Some(piece) = packer.end() {
            self.add_piece(piece).await?;
        }
        Ok(())
    }

    /// Splits one extent into items, and notes what it unmaps.
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
            let layer = LayerId::of_volume(volume);
            self.changes.push(Change { layer, first_block, block_count, placed: None });
        }
        Ok(())
    }

    /// Completes the partly written blocks and packs everything into frames.
    async fn pack(
        &mut self,
        packer: &mut Packer,
        volume: VolumeId,
        items: &mut Vec<Item>,
    ) -> Result<()> {
        let inner = self.inner;
        let merged = items.iter().filter(|item| matches!(item, Item::Merge(_))).count();
        self.report.merged_block_count += merged as u64;
        let mut whole = futures::stream::iter(items.drain(..))
            .map(|item| async move {
                match item {
                    Item::Whole { first_block, bytes } => Ok((first_block, bytes)),
                    Item::Merge(partial) => inner.complete(volume, partial).await,
                }
            })
            .buffered(MERGES_MAX);
        let mut pieces = Vec::new();
        while let Some((first_block, bytes)) = whole.try_next().await? {
            packer.add(first_block, bytes, &mut pieces);
            for piece in pieces.drain(..) {
                self.add_piece(piece).await?;
            }
        }
        Ok(())
    }

    async fn add_piece(&mut self, piece: Piece) -> Result<()> {
        self.group_bytes += piece.plaintext.len();
        self.group.push(piece);
        if self.group_bytes >= self.inner.options.segment_bytes {
            self.start_group().await?;
        }
        Ok(())
    }

    /// Starts building what is gathered, once there is room for one more segment in memory.
    async fn start_group(&mut self) -> Result<()> {
        while self.running.len() >= self.inner.options.segments_in_flight_max.max(1) {
            self.join_one().await?;
        }
        let pieces = std::mem::take(&mut self.group);
        self.group_bytes = 0;
        let number = SegmentNumber(self.inner.next_segment.fetch_add(1, Ordering::SeqCst));
        let options = &self.inner.options;
        let seed =
            SegmentSeed::new(options.pool, options.epoch, number, options.algorithm, &SystemRandom);
        self.names.push(object_path(&seed));
        let inner = self.inner.clone();
        self.running.spawn_on(inner.store_segment(seed, pieces), &self.inner.background);
        Ok(())
    }

    async fn join_one(&mut self) -> Result<()> {
        let Some(joined) = self.running.join_next().await else { return Ok(()) };
        let stored =
            joined.map_err(|cause| Error::with_source(ErrorKind::Io, "store segment", cause))??;
        self.segments.extend(stored.record);
        self.changes.extend(stored.changes);
        self.report.segment_count += stored.report.segment_count;
        self.report.object_bytes += stored.report.object_bytes;
        self.report.stored_block_count += stored.report.stored_block_count;
        self.report.zero_block_count += stored.report.zero_block_count;
        self.report.build_us += stored.report.build_us;
        Ok(())
    }

    /// Waits for every segment. From here on the commit owns the objects.
    async fn finish<H>(mut self, window: Window<H>) -> Result<(Commit, DestageReport)> {
        if !self.group.is_empty() {
            self.start_group().await?;
        }
        while !self.running.is_empty() {
            self.join_one().await?;
        }
        self.names.clear();
        let mut segments = std::mem::take(&mut self.segments);
        segments.sort_unstable_by_key(|record| record.info.number);
        let commit = Commit {
            last_lsn: window.last_lsn,
            volume_records: window.volume_records,
            segments,
            changes: std::mem::take(&mut self.changes),
            next_segment: self.inner.next_segment.load(Ordering::SeqCst),
            asides: window.asides,
            is_late: window.is_late,
        };
        Ok((commit, self.report))
    }
}

impl Inner {
    /// Fills the sectors that the window does not have from the tier.
    async fn complete(&self, volume: VolumeId, partial: Partial) -> Result<(u64, Bytes)> {
        let Partial { block, mut bytes, have } = partial;
        let mut old = vec![0; BLOCK];
        let mut pause = RETRY_PAUSE_MIN;
        while let Err(error) = self.read(volume, block * BLOCK_BYTES, &mut old).await {
            if error.kind() != ErrorKind::Unavailable {
                return Err(error);
            }
            tracing::warn!(error = %error.chain(), "block not completed, trying again");
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

/// Blocks of which the extents (first sector, sectors, whether there is payload) have some sectors
/// and not all. The extents are sorted and disjoint.
pub(crate) fn partial_blocks(extents: &[(u64, u64, bool)]) -> Vec<u64> {
    let mut partial = Vec::new();
    // Of the block of the last extent's end: its index and how many of its sectors there are.
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

/// The pages that a commit of an extent reads. Whole pages without payload become a range if there
/// are enough of them, and are not read.
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

fn object_path(seed: &SegmentSeed) -> Path {
    crate::segment::SegmentInfo {
        number: seed.number,
        epoch: seed.epoch,
        id: seed.id,
        algorithm: seed.algorithm,
        object_bytes: 0,
        frame_count: 0,
    }
    .object_path()
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
