//! The data tier of one pool, as the daemon uses it.
//!
//! Invariants:
//! - At most one [`Tier`] is open for writing on a store. Opening one fences every earlier one: its
//!   next commit fails with `Fenced`.
//! - A read sees every window whose destage has returned. During a destage the caller's overlay
//!   still shows the window, so it does not matter whether a read finds old or new pages.
//! - Bytes that fail verification are never returned as data. They cause an error that names
//!   volume, offset, segment and frame.

mod copies;
mod dedup;
mod hints;
mod layers;
mod marks;
mod opening;
mod peers;
mod rebuild;
mod reopen;

use crate::copier::hydrate::Hydrator;
use crate::copier::{CopySource, RestoredStore};
use crate::dedup::Dedup;
use crate::destage::write::Output;
use crate::destage::{Destage, DestageError, DestageReport, LogSource, Window};
use crate::fetch::{Access, FramesOptions, FramesStatus};
use crate::fsck::{Fsck, FsckOptions, FsckReport};
use crate::keys::{KeyId, VolumeKeys};
use crate::map::database::DatabaseOptions;
use crate::map::records::NamedSpillFile;
use crate::map::{FoldReport, Health, LayerId, MapOptions, MapStatus, PromoteReport, PruneReport};
use crate::orphans::{SweepReport, Sweeper};
use crate::outage::StoreFailure;
use crate::pool::{Excluded, Exclusions, Metadata, OwnerCheck, Pool, Segments};
use crate::read::{ChangedExtent, Reader};
use crate::reclaim::{Reclaim, ReclaimOptions, ReclaimReport, ReclaimStatus};
use crate::repair::Repair;
use crate::seeded_bugs::{SeededBugs, seeded_bugs};
use crate::segment_store::SegmentStore;
use async_recursion::async_recursion;
use block::env::{Clock, SystemClock};
use block::seal::{Algorithm, PoolKey};
use block::{AllocationExtent, Epoch, Error, ErrorKind, Lsn, Result, VolumeId};
use bytes::Bytes;
use hints::Prefetch;
use object_store::ObjectStore;
use opening::Purpose;
use reopen::Reopener;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::runtime::Handle;

/// Maximum number of layers that one step forgets. Chosen by hand: each costs one commit.
const LAYERS_AT_ONCE: u64 = 64;
/// Longest wait for the record of the last reads when closing. Chosen by hand: it is a hint.
const SAVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for the store when closing. Chosen by hand: nothing is lost by giving up.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(20);

/// Options for opening a tier.
#[derive(Clone, Debug)]
pub struct TierOptions {
    /// The object store, with the prefix of the pool.
    pub store: Arc<dyn ObjectStore>,
    /// The store of the segments; absent: they are objects of `store`.
    pub segments: Option<Arc<dyn SegmentStore>>,
    /// Identity of the pool.
    pub pool: [u8; 16],
    /// Root key of the pool.
    pub pool_key: PoolKey,
    /// Keys of volumes. All of them must be present before anything is read or destaged.
    pub volume_keys: VolumeKeys,
    /// The owner's epoch, not 0.
    pub epoch: Epoch,
    /// Cipher for new data.
    pub algorithm: Algorithm,
    /// Compression level of frames; negative levels are faster.
    pub zstd_level: i32,
    /// Size of a segment: the bytes of uncompressed blocks that fill it.
    pub segment_bytes: usize,
    /// Blocks in a frame of sequential data, 1 to 16.
    pub frame_blocks: u8,
    /// Maximum number of segments that are built and uploaded concurrently. Each takes up to twice
    /// `segment_bytes` of memory.
    pub segments_in_flight_max: usize,
    /// Caches and read-ahead.
    pub frames: FramesOptions,
    /// Memory of the map.
    pub map: MapOptions,
    /// Memory and pace of the metadata database.
    pub database: DatabaseOptions,
    /// Opening fails if the store has not answered for this long.
    pub open_timeout: Duration,
    /// Runtime for background work (database, destage). `None` uses the runtime of the task that
    /// opens the tier.
    pub background: Option<Handle>,
    /// Memory for the deduplication index, in bytes. The index is used only while a volume has
    /// deduplication on.
    pub dedup_index_bytes: usize,
    /// Deduplicates every volume; for tests.
    pub(crate) is_dedup: bool,
    /// Mask of the fingerprint bits that are compared; tests clear some of them.
    pub(crate) fingerprint_mask: u64,
    /// Segments that may be missing, in a copy of some volumes or in a pool that was restored from
    /// one.
    pub excluded: Option<Excluded>,
    /// The store, if it still needs the copy behind it.
    pub restored: Option<Arc<RestoredStore>>,
    /// Called each time before the metadata is claimed. Without it, owners are told apart only by
    /// the epochs in the metadata.
    pub owner_check: Option<OwnerCheck>,
    /// Registry in which the data tier raises lasting conditions.
    pub conditions: block::Conditions,
    /// Time for pauses, limits and the ages of failures. Timers are tokio's.
    pub clock: Arc<dyn Clock>,
    /// Seeded bugs, for tests.
    pub(crate) seeded_bugs: SeededBugs,
}

impl TierOptions {
    /// Returns the default options for a pool.
    #[must_use]
    pub fn new(
        store: Arc<dyn ObjectStore>,
        pool: [u8; 16],
        pool_key: PoolKey,
        epoch: Epoch,
    ) -> TierOptions {
        TierOptions {
            store,
            segments: None,
            pool,
            pool_key,
            volume_keys: VolumeKeys::default(),
            epoch,
            algorithm: Algorithm::default(),
            zstd_level: 1,
            segment_bytes: 16 << 20,
            frame_blocks: 8,
            segments_in_flight_max: 3,
            frames: FramesOptions::default(),
            map: MapOptions::default(),
            database: DatabaseOptions::default(),
            open_timeout: Duration::from_secs(60),
            background: None,
            dedup_index_bytes: 32 << 20,
            is_dedup: false,
            fingerprint_mask: u64::MAX,
            excluded: None,
            restored: None,
            owner_check: None,
            conditions: block::Conditions::default(),
            clock: Arc::new(SystemClock),
            seeded_bugs: seeded_bugs(),
        }
    }
}

/// Counts for status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierStatus {
    /// The map.
    pub map: MapStatus,
    /// Caches and store reads.
    pub frames: FramesStatus,
    /// Uploads that failed and were tried again.
    pub upload_retry_count: u64,
    /// Cause of the last failed upload, until an upload succeeds: the store is unreachable, or it
    /// refuses.
    pub upload_failure: Option<StoreFailure>,
    /// Segments that nothing references and that wait to be deleted from the store.
    pub abandoned_count: u64,
    /// Number of times that the metadata database ended and was reopened.
    pub reopen_count: u64,
    /// Reason why the metadata database ended, until it is open again.
    pub metadata_failure: Option<String>,
    /// Bytes that the metadata database has written to the store.
    pub metadata_written_bytes: u64,
    /// Segments that were damaged or missing in the store and were restored from a copy.
    pub repaired_count: u64,
    /// Prefetch hints and read-aheads of streams that were dropped because too many were under way.
    pub hint_dropped_count: u64,
}

/// The source that a volume was made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The source volume. After a rollback it is the volume itself.
    pub volume: VolumeId,
    /// LSN of the snapshot.
    pub at: Lsn,
    /// A promotion is making the volume independent of its source.
    pub is_promoted: bool,
    /// Progress of the promotion, in bytes of the volume's address space.
    pub done_bytes: u64,
}

/// The data tier; see the module. It is cheap to clone, and every method may be called from any
/// task at any time.
#[derive(Clone)]
pub struct Tier {
    pub(crate) parts: Arc<Parts>,
}

/// The parts of a tier: what its jobs share, and the jobs.
pub(crate) struct Parts {
    pub(crate) pool: Arc<Pool>,
    pub(crate) metadata: Arc<Metadata>,
    pub(crate) segments: Arc<Segments>,
    pub(crate) exclusions: Arc<Exclusions>,
    pub(crate) dedup: Arc<Dedup>,
    pub(crate) jobs: Jobs,
}

/// The jobs of a tier.
pub(crate) struct Jobs {
    pub(crate) reader: Arc<Reader>,
    pub(crate) repair: Arc<Repair>,
    pub(crate) output: Arc<Output>,
    pub(crate) destage: Arc<Destage>,
    pub(crate) reclaim: Arc<Reclaim>,
    pub(crate) sweeper: Sweeper,
    pub(crate) fsck: Fsck,
    pub(crate) copies: CopySource,
    pub(crate) hydrator: Hydrator,
    pub(crate) prefetch: Prefetch,
    pub(crate) reopener: Arc<Reopener>,
}

impl Tier {
    /// Opens the tier, creates it if the store is empty, and fences every earlier owner.
    ///
    /// # Errors
    /// `Unavailable` when the store does not answer in time, `Denied` when it refuses access,
    /// `Fenced` when a higher epoch has opened it, `Corrupt` when the metadata does not verify
    /// (also with the key of another pool), `Invalid` for options out of range.
    #[async_recursion]
    pub async fn open(options: TierOptions) -> Result<Tier> {
        Self::open_as(options, Purpose::Own).await
    }

    /// Returns the keys of volumes that are present now.
    #[must_use]
    pub fn volume_keys(&self) -> &VolumeKeys {
        &self.parts.pool.volume_keys
    }

    /// Returns the registry of lasting conditions, for the data tier and the components that use
    /// it.
    #[must_use]
    pub fn conditions(&self) -> &block::Conditions {
        &self.parts.pool.conditions
    }

    /// Returns the clock of the data tier, for the components that use it.
    #[must_use]
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.parts.pool.clock
    }

    /// Returns the number of commits that the metadata contained when it was opened.
    #[must_use]
    pub fn opened_at_commit(&self) -> u64 {
        self.parts.metadata.opened_at_commit
    }

    /// Discards a destroyed key of volumes. Data sealed with it can no longer be read.
    pub fn forget_key(&self, key: KeyId) {
        self.parts.pool.volume_keys.remove(key);
        self.parts.segments.frames.forget_keys();
    }

    /// Opens the tier in its present state without fencing its owner, for checks and copies, which
    /// take long. The tier keeps showing that state, because it writes a checkpoint to the store
    /// that preserves it; it writes nothing else. [`Tier::destage`], [`Tier::step`] and
    /// [`Tier::sweep_orphans`] return `Denied`.
    ///
    /// # Errors
    /// Those of [`Tier::open`]; `NotFound` for an empty store.
    #[async_recursion]
    pub async fn open_read_only(options: TierOptions) -> Result<Tier> {
        Self::open_as(options, Purpose::Read).await
    }

    /// Like [`Tier::open_read_only`], but for less than 15 minutes and without writing anything to
    /// the store.
    ///
    /// # Errors
    /// Those of [`Tier::open_read_only`].
    #[async_recursion]
    pub async fn open_for_look(options: TierOptions) -> Result<Tier> {
        Self::open_as(options, Purpose::Look).await
    }

    /// Returns the runtime of background work.
    #[must_use]
    pub fn background(&self) -> &Handle {
        &self.parts.pool.background
    }

    /// Returns the LSN up to which every entry of the log is durable in the tier. A log that was
    /// trimmed beyond this LSN belongs to another state of the bucket.
    #[must_use]
    pub fn destaged_lsn(&self) -> Lsn {
        self.parts.metadata.map.destaged_lsn()
    }

    /// Returns the newest destaged record of every volume, by id.
    #[must_use]
    pub fn volume_records(&self) -> Vec<(VolumeId, Bytes)> {
        self.parts.metadata.map.volume_records()
    }

    /// Fills `buf` with the bytes at `offset`. Ranges that were never written, or were trimmed,
    /// read as zeroes.
    ///
    /// # Errors
    /// `Corrupt`, naming volume, offset, segment and frame; `Unavailable` when the store does not
    /// answer; `Invalid` beyond the largest volume.
    pub async fn read(&self, volume: VolumeId, offset: u64, buf: &mut [u8]) -> Result<()> {
        let advice = self.parts.segments.frames.on_read(volume, offset, buf.len() as u64);
        if let Some(ahead) = advice.ahead {
            self.parts.jobs.prefetch.read_ahead(volume, ahead);
        }
        self.parts.jobs.reader.read_with(volume, None, offset, buf, advice.access).await
    }

    /// Like [`Tier::read`], but reads the volume's snapshot at `at`. It works before the snapshot
    /// is destaged, as long as nothing beyond `at` is destaged.
    ///
    /// # Errors
    /// Those of [`Tier::read`]. If the snapshot is removed during the read, the result is
    /// meaningless.
    pub async fn read_at(
        &self,
        volume: VolumeId,
        at: Lsn,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<()> {
        self.parts.jobs.reader.read_with(volume, Some(at), offset, buf, Access::Random).await
    }

    /// Like [`Tier::allocation`], but for a snapshot.
    ///
    /// # Errors
    /// Those of [`Tier::read_at`].
    pub async fn allocation_at(
        &self,
        volume: VolumeId,
        at: Lsn,
        (offset, length): (u64, u64),
        extent_count_max: usize,
    ) -> Result<Vec<AllocationExtent>> {
        let range = (offset, length);
        let found =
            self.parts.jobs.reader.allocation(volume, Some(at), range, extent_count_max).await;
        found.map_err(|error| error.context(format!("map volume {volume}, offset {offset}")))
    }

    /// Compares two snapshots of a volume, `older` and `newer`, in the bytes from `range.start` to
    /// `range.end`. Returns at most about `count_max` extents and, if there may be more, the offset
    /// at which to continue. Both snapshots must be destaged. Blocks that were overwritten with the
    /// same bytes count as changed.
    ///
    /// # Errors
    /// Those of [`Tier::read_at`].
    #[async_recursion]
    pub async fn differences(
        &self,
        volume: VolumeId,
        (older, newer): (Lsn, Lsn),
        range: Range<u64>,
        count_max: usize,
    ) -> Result<(Vec<ChangedExtent>, Option<u64>)> {
        let found =
            self.parts.jobs.reader.differences(volume, (older, newer), range, count_max).await;
        found.map_err(|error| error.context(format!("compare snapshots of volume {volume}")))
    }

    /// Returns the snapshots that are destaged and not removed: volume, LSN and the daemon's record
    /// of each.
    #[must_use]
    pub fn snapshots(&self) -> Vec<(VolumeId, Lsn, Bytes)> {
        let list = self.parts.metadata.map.snapshots();
        let of = |((layer, lsn), record): ((LayerId, Lsn), &Bytes)| {
            (layer.volume(), lsn, record.clone())
        };
        list.iter().map(of).collect()
    }

    /// Estimates the bytes of the store that each snapshot of a volume holds exclusively, by LSN,
    /// counting only destaged data. Walks the metadata of everything that has changed since the
    /// oldest snapshot.
    ///
    /// # Errors
    /// Those of [`Tier::read`].
    #[async_recursion]
    pub async fn held_bytes(&self, volume: VolumeId) -> Result<BTreeMap<Lsn, u64>> {
        let layers = self.parts.metadata.map.layers();
        // The list lacks the first layer of a volume that was first written after the tier was
        // opened.
        let first = LayerId::of_volume(volume);
        let later = layers.iter().map(|(layer, _)| layer);
        let later = later.filter(|layer| layer.volume() == volume && *layer != first);
        let mut held = BTreeMap::new();
        for layer in std::iter::once(first).chain(later) {
            held.extend(self.parts.metadata.map.held_bytes(layer).await?);
        }
        Ok(held)
    }

    /// Returns the allocation of a range as consecutive runs starting at `offset`: between 1 and
    /// `extent_count_max` runs that together cover at most `length` bytes. `length` must not be 0.
    ///
    /// # Errors
    /// Those of [`Tier::read`].
    pub async fn allocation(
        &self,
        volume: VolumeId,
        offset: u64,
        length: u64,
        extent_count_max: usize,
    ) -> Result<Vec<AllocationExtent>> {
        let range = (offset, length);
        let found = self.parts.jobs.reader.allocation(volume, None, range, extent_count_max).await;
        found.map_err(|error| error.context(format!("map volume {volume}, offset {offset}")))
    }

    /// Moves one window of the log into the tier. When it returns, the window is durable, reads
    /// show it, and the log may discard it. Windows must come in the order of the log; a window
    /// that is already destaged is ignored.
    ///
    /// Waits for the store as long as it takes. Dropping the future stops the destage; the window
    /// may or may not be destaged then, and the caller must pass it again.
    ///
    /// # Errors
    /// `Fenced` when another owner has opened the tier; `Corrupt`, with the volume, when data that
    /// the window builds on does not verify; any error of `source`. After an error nothing of the
    /// window is in the tier.
    pub async fn destage<S: LogSource>(
        &self,
        window: Window<S::Handle>,
        source: &S,
    ) -> Result<DestageReport, DestageError> {
        self.parts.pool.check_writable()?;
        self.parts.jobs.destage.run(window, source).await
    }

    /// Checks whether the tier could take these extents of a volume (first sector, sectors, whether
    /// there is payload; sorted and disjoint). It reads everything that a window of them would
    /// build on and changes nothing. This avoids uploading in vain for a volume that failed before.
    ///
    /// # Errors
    /// Those of [`Tier::read`].
    pub async fn check_extents(
        &self,
        volume: VolumeId,
        extents: &[(u64, u64, bool)],
    ) -> Result<()> {
        self.parts.jobs.destage.check_extents(volume, extents).await
    }

    /// Returns the volumes for which the tier lacks entries up to the destaged LSN, each with the
    /// spill files of the log that contain those entries.
    #[must_use]
    pub fn stalled_volumes(&self) -> BTreeMap<VolumeId, Vec<NamedSpillFile>> {
        self.parts.metadata.map.stalled_volumes()
    }

    /// Sets whether destage favours speed over size. While the log fills up, segments are
    /// compressed less.
    pub fn set_urgent(&self, is_urgent: bool) {
        self.parts.jobs.output.is_urgent.store(is_urgent, Ordering::Relaxed);
    }

    /// Performs one step of background work, of the first of these kinds for which there is work:
    /// folds large trims into the map, up to `page_budget` pages; drops pages that only removed
    /// snapshots showed; promotes clones; forgets layers. It also frees memory that destage has not
    /// needed since the last step. Call it at the lowest priority while work is left.
    ///
    /// # Errors
    /// Those of [`Tier::destage`].
    #[async_recursion]
    pub async fn step(&self, page_budget: usize) -> Result<FoldReport> {
        self.parts.pool.check_writable()?;
        self.parts.jobs.output.buffers.trim();
        let metadata = self.parts.metadata.clone();
        let step = async move {
            let mut writer = metadata.writer.lock().await;
            let folded = metadata.map.fold_ranges(&mut writer, page_budget).await;
            // Prune also when a range cannot be folded.
            let is_pruned = folded.as_ref().map_or(true, |done| done.page_count == 0)
                && metadata.map.status().prune_count > 0;
            let pruned = match is_pruned {
                true => metadata.map.prune(&mut writer, page_budget).await,
                false => Ok(PruneReport::default()),
            };
            // A failure of one kind of work must not block the others.
            let is_folding = folded.as_ref().is_ok_and(|done| done.page_count > 0);
            let is_pruning = pruned.as_ref().is_ok_and(|done| done.layers_left > 0);
            let is_promoted = !is_folding && !is_pruning;
            let promoted = match is_promoted {
                true => metadata.map.promote_step(&mut writer, page_budget).await,
                false => Ok(PromoteReport::default()),
            };
            let is_promoting = promoted.as_ref().is_ok_and(|done| done.layers_left > 0);
            let mut forgotten = Ok(0);
            while is_promoted
                && !is_promoting
                && forgotten.as_ref().is_ok_and(|count| *count < LAYERS_AT_ONCE)
            {
                match metadata.map.forget_layer(&mut writer).await {
                    Ok(true) => forgotten = forgotten.map(|count| count + 1),
                    Ok(false) => break,
                    Err(error) => forgotten = Err(error),
                }
            }
            let mut done = folded?;
            // A step counts as progress even if it found nothing.
            done.page_count += pruned?.looked_count.max(is_pruned.into());
            done.page_count += promoted?.page_count.max(is_promoting.into());
            done.page_count += forgotten?;
            done.prunes_left = metadata.map.status().prune_count;
            done.promotes_left = metadata.map.promote_count();
            Ok(done)
        };
        let done = self.parts.pool.background.spawn(step).await;
        done.map_err(|cause| Error::with_source(ErrorKind::Io, "fold ranges", cause))?
    }

    /// Deletes segments of earlier epochs that nothing references.
    ///
    /// # Errors
    /// `Unavailable` when the store does not answer; call again later.
    #[async_recursion]
    pub async fn sweep_orphans(&self) -> Result<SweepReport> {
        self.parts.pool.check_writable()?;
        self.parts.jobs.sweeper.sweep_orphans().await
    }

    /// Deletes some of the segments that this process uploaded but never committed, because their
    /// destage failed or was cancelled. It is cheap when there are none.
    ///
    /// # Errors
    /// Those of [`Tier::sweep_orphans`]. The next call retries the remaining segments.
    #[async_recursion]
    pub async fn sweep_abandoned(&self) -> Result<SweepReport> {
        self.parts.pool.check_writable()?;
        self.parts.jobs.sweeper.sweep_abandoned().await
    }

    /// Performs one step of reclaim: examines some segments, drops dead ones, or rewrites mostly
    /// dead ones. Call it at the lowest priority, repeatedly while it is not idle and from time to
    /// time when it is. The report contains its reads and writes, so that the caller can pace it.
    ///
    /// # Errors
    /// Those of [`Tier::destage`]. Damage is not an error: a segment that cannot be read is left
    /// alone and counted.
    #[async_recursion]
    pub async fn reclaim_step(&self, options: ReclaimOptions) -> Result<ReclaimReport> {
        self.parts.pool.check_writable()?;
        self.parts.jobs.reclaim.step(options).await
    }

    /// Retries some of the objects that were found missing or unreadable while others could be
    /// read, and ends the conditions of those that are readable again. Call it from time to time.
    #[async_recursion]
    pub async fn try_unreadable_again(&self) {
        for info in self.parts.segments.frames.store().try_again().await {
            self.parts.jobs.reclaim.note_well(info.number.0);
            self.parts.dedup.note_well(info.number.0);
        }
    }

    /// Returns the usage of the segments and the work that reclaim has done.
    #[must_use]
    pub fn reclaim_status(&self) -> ReclaimStatus {
        self.parts.jobs.reclaim.status()
    }

    /// Checks everything and changes nothing. No window is committed meanwhile.
    ///
    /// # Errors
    /// `Unavailable` when the store does not answer. Damage is part of the report.
    #[async_recursion]
    pub async fn fsck(&self, options: FsckOptions) -> Result<FsckReport> {
        self.parts.jobs.fsck.run(options).await
    }

    /// Corrects the counts of live blocks of these segments, by examining every page that may
    /// reference them. A count that is too high keeps its segment from being reclaimed. Nothing is
    /// committed while a segment is being examined. Returns the counts that were wrong: number of
    /// the segment, count before, and count now.
    ///
    /// # Errors
    /// `Corrupt` when a page or the directory of a segment does not open, which is damage of a
    /// different kind; those of [`Tier::destage`].
    #[async_recursion]
    pub async fn repair_counts(&self, numbers: &[u64]) -> Result<Vec<(u64, u32, u32)>> {
        self.parts.pool.check_writable()?;
        self.parts.jobs.reclaim.repair_counts(numbers).await
    }

    /// Returns counts for status.
    #[must_use]
    pub fn status(&self) -> TierStatus {
        TierStatus {
            map: self.parts.metadata.map.status(),
            frames: self.parts.segments.frames.status(),
            upload_retry_count: self.parts.jobs.output.upload_retry_count.load(Ordering::Relaxed),
            upload_failure: self.parts.jobs.output.uploads.status(),
            abandoned_count: (self.parts.segments.leftovers.abandoned_count()
                + self.parts.segments.leftovers.undeletable_count())
                as u64,
            reopen_count: self.parts.jobs.reopener.reopen_count.load(Ordering::Relaxed),
            metadata_failure: match self.parts.metadata.map.health() {
                Health::Well => None,
                Health::Final(error) => Some(error.chain()),
                // The attempt under way may be waiting for a call that keeps failing.
                Health::Ended(error) => {
                    let failure = self.parts.jobs.reopener.watched.last_failure();
                    let said = failure.map_or_else(String::new, |said| format!("; {said}"));
                    Some(error.chain() + &said)
                }
            },
            metadata_written_bytes: self.parts.jobs.reopener.watched.written_bytes(),
            repaired_count: self.parts.jobs.repair.repaired_count(),
            hint_dropped_count: self.parts.jobs.prefetch.dropped_count.load(Ordering::Relaxed),
        }
    }

    /// Stops background work. Destaged data is durable whether or not this is called.
    ///
    /// # Errors
    /// `Unavailable` when the store does not answer; nothing is lost then.
    #[async_recursion]
    pub async fn close(&self) -> Result<()> {
        let saving = self.parts.segments.read_times.save(&self.parts.metadata);
        if let Ok(Err(error)) = tokio::time::timeout(SAVE_TIMEOUT, saving).await {
            tracing::debug!(error = %error.chain(), "could not record when segments were last read");
        }
        self.parts.segments.frames.close().await;
        let what = "the data tier is closed";
        self.parts.metadata.map.set_final(Error::new(ErrorKind::Unavailable, what));
        match tokio::time::timeout(CLOSE_TIMEOUT, self.parts.metadata.map.close()).await {
            Ok(closed) => closed,
            Err(_) => {
                let what =
                    format!("close data tier: no answer from the store in {CLOSE_TIMEOUT:?}");
                Err(Error::new(ErrorKind::Unavailable, what))
            }
        }
    }
}

#[cfg(test)]
mod tests;
