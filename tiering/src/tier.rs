//! The data tier of one pool, as the daemon uses it.
//!
//! Invariants:
//! - At most one [`Tier`] is open for writing on a store. Opening one fences every earlier one: its
//!   next commit fails with `Fenced`.
//! - A read sees every window whose destage has returned. During a destage the caller's overlay
//!   still shows the window, so it does not matter whether a read finds old or new pages.
//! - Bytes that fail verification are never returned as data. They cause an error that names
//!   volume, offset, segment and frame.

mod hints;
mod keep;
mod layers;
mod opening;
mod peers;
mod read;

use crate::copier::{LeftOut, RestoredStore};
use crate::dedup::Dedup;
use crate::destage::buffers::Buffers;
use crate::destage::{DestageError, DestageReport, LogSource, Window};
use crate::fetch::{Access, Frames, FramesOptions, FramesStatus};
use crate::fsck::{FsckOptions, FsckReport};
use crate::heat::Heat;
use crate::keys::{KeyId, VolumeKeys};
use crate::map::database::DatabaseOptions;
use crate::map::pages::PAGE_BLOCKS;
use crate::map::records::AsideFile;
use crate::map::{
    FoldReport, Health, LayerId, Map, MapOptions, MapStatus, PromoteReport, PruneReport, Writer,
};
use crate::mend::Mending;
use crate::orphans::{Orphans, SweepReport};
use crate::outage::{Outage, StoreFailure};
use crate::planted::Planted;
use crate::reclaim::{Reclaim, ReclaimOptions, ReclaimReport, ReclaimStatus};
use crate::segment_store::SegmentStore;
use crate::watched::Watched;
use block::seal::{Algorithm, PoolKey};
use block::units::BLOCK_BYTES;
use block::{AllocationExtent, Epoch, Error, ErrorKind, Lsn, Result, VolumeId};
use bytes::Bytes;
use futures::future::BoxFuture;
use object_store::ObjectStore;
use opening::Purpose;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

/// Bytes of address space of one map page.
const PAGE_BYTES: u64 = PAGE_BLOCKS * BLOCK_BYTES;

/// Maximum number of frames that one read fetches concurrently. Bounds the memory that a large read
/// holds besides its buffer.
const FRAMES_AT_ONCE: usize = 64;

/// Maximum number of pages that one allocation query examines. A query over more pages is answered
/// for a shorter range.
const ALLOCATION_PAGES_MAX: usize = 4096;

/// Maximum number of layers that one step forgets. Chosen by hand: each costs one commit.
const LAYERS_AT_ONCE: u64 = 64;
/// Longest wait for the store when closing. Chosen by hand: nothing is lost by giving up.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(20);

/// Asks the authority that grants ownership of the pool whether this process still owns it.
#[derive(Clone)]
pub struct OwnerCheck(Arc<dyn Fn() -> BoxFuture<'static, Result<()>> + Send + Sync>);

impl OwnerCheck {
    /// `check` returns `Fenced` when another owner has taken the pool, and any other error when the
    /// owner is unknown. A new owner must be visible to `check` before it opens the tier.
    pub fn new(check: impl Fn() -> BoxFuture<'static, Result<()>> + Send + Sync + 'static) -> Self {
        OwnerCheck(Arc::new(check))
    }

    pub(crate) async fn ask(&self) -> Result<()> {
        (self.0)().await
    }
}

impl std::fmt::Debug for OwnerCheck {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OwnerCheck")
    }
}

/// Options for opening a tier.
#[derive(Clone, Debug)]
pub struct TierOptions {
    /// The object store, with the prefix of the pool.
    pub store: Arc<dyn ObjectStore>,
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
    pub left_out: Option<LeftOut>,
    /// The store, if it still needs the copy behind it.
    pub restored: Option<Arc<RestoredStore>>,
    /// Called each time before the metadata is claimed. Without it, owners are told apart only by
    /// the epochs in the metadata.
    pub owner_check: Option<OwnerCheck>,
    /// Registry in which the data tier raises lasting conditions.
    pub conditions: block::Conditions,
    /// Bugs that tests plant.
    pub(crate) planted: Planted,
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
            left_out: None,
            restored: None,
            owner_check: None,
            conditions: block::Conditions::default(),
            planted: Planted::from_environment(),
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
    pub mended_count: u64,
    /// Prefetch hints and read-aheads of streams that were dropped because too many were under way.
    pub hint_dropped_count: u64,
}

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
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) options: TierOptions,
    /// See [`TierOptions::left_out`] and [`Tier::set_left_out`].
    pub(crate) left_out: parking_lot::RwLock<Option<LeftOut>>,
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) segments: Arc<dyn SegmentStore>,
    /// The same store, for the metadata database.
    pub(crate) watched: Arc<Watched>,
    pub(crate) pool_key: PoolKey,
    pub(crate) map: Map,
    pub(crate) frames: Frames,
    pub(crate) orphans: Orphans,
    pub(crate) reclaim: Reclaim,
    pub(crate) dedup: Dedup,
    pub(crate) heat: Heat,
    pub(crate) mending: Mending,
    pub(crate) background: Handle,
    pub(crate) buffers: Arc<Buffers>,
    /// Serializes destages, in the order of the calls.
    pub(crate) destage_turn: tokio::sync::Mutex<()>,
    pub(crate) writer: tokio::sync::Mutex<Writer>,
    pub(crate) is_read_only: bool,
    opened_at_commit: u64,
    pub(crate) next_segment: AtomicU64,
    pub(crate) upload_retry_count: AtomicU64,
    /// Retries of reads that complete a partly overwritten block, after the store did not answer.
    pub(crate) complete_retry_count: AtomicU64,
    pub(crate) uploads: Outage,
    /// See [`Tier::set_urgent`].
    pub(crate) is_urgent: AtomicBool,
    pub(crate) reopen_count: AtomicU64,
    /// Limits the objects that are being sent to copies or brought back: see [`crate::copier`] and
    /// [`crate::mend`].
    pub(crate) copy_places: Arc<Semaphore>,
    prefetch_places: Arc<Semaphore>,
    read_ahead_places: Arc<Semaphore>,
    hint_dropped_count: AtomicU64,
}

impl Tier {
    /// Opens the tier, creates it if the store is empty, and fences every earlier owner.
    ///
    /// # Errors
    /// `Unavailable` when the store does not answer in time, `Denied` when it refuses access,
    /// `Fenced` when a higher epoch has opened it, `Corrupt` when the metadata does not verify
    /// (also with the key of another pool), `Invalid` for options out of range.
    pub async fn open(options: TierOptions) -> Result<Tier> {
        Self::open_as(options, Purpose::Own).await
    }

    /// Returns the keys of volumes that are present now.
    #[must_use]
    pub fn volume_keys(&self) -> &VolumeKeys {
        &self.inner.options.volume_keys
    }

    /// Returns the registry of lasting conditions, for the data tier and the components that use
    /// it.
    #[must_use]
    pub fn conditions(&self) -> &block::Conditions {
        &self.inner.options.conditions
    }

    /// Returns the number of commits that the metadata contained when it was opened.
    #[must_use]
    pub fn opened_at_commit(&self) -> u64 {
        self.inner.opened_at_commit
    }

    /// Discards a destroyed key of volumes. Data sealed with it can no longer be read.
    pub fn forget_key(&self, key: KeyId) {
        self.inner.options.volume_keys.remove(key);
        self.inner.frames.forget_keys();
    }

    /// Opens the tier in its present state without fencing its owner, for checks and copies, which
    /// take long. The tier keeps showing that state, because it writes a checkpoint to the store
    /// that preserves it; it writes nothing else. [`Tier::destage`], [`Tier::step`] and
    /// [`Tier::sweep_orphans`] return `Denied`.
    ///
    /// # Errors
    /// Those of [`Tier::open`]; `NotFound` for an empty store.
    pub async fn open_read_only(options: TierOptions) -> Result<Tier> {
        Self::open_as(options, Purpose::Read).await
    }

    /// Like [`Tier::open_read_only`], but for less than 15 minutes and without writing anything to
    /// the store.
    ///
    /// # Errors
    /// Those of [`Tier::open_read_only`].
    pub async fn open_for_look(options: TierOptions) -> Result<Tier> {
        Self::open_as(options, Purpose::Look).await
    }

    /// Returns the runtime of background work.
    #[must_use]
    pub fn background(&self) -> &Handle {
        &self.inner.background
    }

    /// Returns the LSN up to which every entry of the log is durable in the tier. A log that was
    /// trimmed beyond this LSN belongs to another state of the bucket.
    #[must_use]
    pub fn destaged_lsn(&self) -> Lsn {
        self.inner.map.destaged_lsn()
    }

    /// Returns the newest destaged record of every volume, by id.
    #[must_use]
    pub fn volume_records(&self) -> Vec<(VolumeId, Bytes)> {
        self.inner.map.volume_records()
    }

    /// Fills `buf` with the bytes at `offset`. Ranges that were never written, or were trimmed,
    /// read as zeroes.
    ///
    /// # Errors
    /// `Corrupt`, naming volume, offset, segment and frame; `Unavailable` when the store does not
    /// answer; `Invalid` beyond the largest volume.
    pub async fn read(&self, volume: VolumeId, offset: u64, buf: &mut [u8]) -> Result<()> {
        let advice = self.inner.frames.on_read(volume, offset, buf.len() as u64);
        if let Some(ahead) = advice.ahead {
            self.read_ahead(volume, ahead, &self.inner.read_ahead_places);
        }
        self.inner.read_with(volume, None, offset, buf, advice.access).await
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
        self.inner.read_with(volume, Some(at), offset, buf, Access::Random).await
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
        let found = self.inner.allocation(volume, Some(at), range, extent_count_max).await;
        found.map_err(|error| error.context(format!("map volume {volume}, offset {offset}")))
    }

    /// Compares two snapshots of a volume, `older` and `newer`, in the bytes from `range.start` to
    /// `range.end`. Returns at most about `count_max` extents and, if there may be more, the offset
    /// at which to continue. Both snapshots must be destaged. Blocks that were overwritten with the
    /// same bytes count as changed.
    ///
    /// # Errors
    /// Those of [`Tier::read_at`].
    pub async fn differences(
        &self,
        volume: VolumeId,
        (older, newer): (Lsn, Lsn),
        range: Range<u64>,
        count_max: usize,
    ) -> Result<(Vec<ChangedExtent>, Option<u64>)> {
        let found = self.inner.differences(volume, (older, newer), range, count_max).await;
        found.map_err(|error| error.context(format!("compare snapshots of volume {volume}")))
    }

    /// Returns the snapshots that are destaged and not removed: volume, LSN and the daemon's record
    /// of each.
    #[must_use]
    pub fn snapshots(&self) -> Vec<(VolumeId, Lsn, Bytes)> {
        let list = self.inner.map.snapshots();
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
    pub async fn held_bytes(&self, volume: VolumeId) -> Result<BTreeMap<Lsn, u64>> {
        let layers = self.inner.map.layers();
        // The list lacks the first layer of a volume that was first written after the tier was
        // opened.
        let first = LayerId::of_volume(volume);
        let later = layers.iter().map(|(layer, _)| layer);
        let later = later.filter(|layer| layer.volume() == volume && *layer != first);
        let mut held = BTreeMap::new();
        for layer in std::iter::once(first).chain(later) {
            held.extend(self.inner.map.held_bytes(layer).await?);
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
        let found = self.inner.allocation(volume, None, range, extent_count_max).await;
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
        self.inner.check_writable()?;
        self.inner.destage(window, source).await
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
        self.inner.check_extents(volume, extents).await
    }

    /// Returns the volumes for which the tier lacks entries up to the destaged LSN, each with the
    /// side files of the log that contain those entries.
    #[must_use]
    pub fn asides(&self) -> BTreeMap<VolumeId, Vec<AsideFile>> {
        self.inner.map.asides()
    }

    /// Sets whether destage favours speed over size. While the log fills up, segments are
    /// compressed less.
    pub fn set_urgent(&self, is_urgent: bool) {
        self.inner.is_urgent.store(is_urgent, Ordering::Relaxed);
    }

    /// Performs one step of background work, of the first of these kinds for which there is work:
    /// folds large trims into the map, up to `page_budget` pages; drops pages that only removed
    /// snapshots showed; promotes clones; forgets layers. It also frees memory that destage has not
    /// needed since the last step. Call it at the lowest priority while work is left.
    ///
    /// # Errors
    /// Those of [`Tier::destage`].
    pub async fn step(&self, page_budget: usize) -> Result<FoldReport> {
        self.inner.check_writable()?;
        self.inner.buffers.trim();
        let inner = self.inner.clone();
        let step = async move {
            let mut writer = inner.writer.lock().await;
            let folded = inner.map.fold_ranges(&mut writer, page_budget).await;
            // Prune also when a range cannot be folded.
            let is_pruned = folded.as_ref().map_or(true, |done| done.page_count == 0)
                && inner.map.status().prune_count > 0;
            let pruned = match is_pruned {
                true => inner.map.prune(&mut writer, page_budget).await,
                false => Ok(PruneReport::default()),
            };
            // A failure of one kind of work must not block the others.
            let is_folding = folded.as_ref().is_ok_and(|done| done.page_count > 0);
            let is_pruning = pruned.as_ref().is_ok_and(|done| done.layers_left > 0);
            let is_promoted = !is_folding && !is_pruning;
            let promoted = match is_promoted {
                true => inner.map.promote_step(&mut writer, page_budget).await,
                false => Ok(PromoteReport::default()),
            };
            let is_promoting = promoted.as_ref().is_ok_and(|done| done.layers_left > 0);
            let mut forgotten = Ok(0);
            while is_promoted
                && !is_promoting
                && forgotten.as_ref().is_ok_and(|count| *count < LAYERS_AT_ONCE)
            {
                match inner.map.forget_layer(&mut writer).await {
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
            done.prunes_left = inner.map.status().prune_count;
            done.promotes_left = inner.map.promote_count();
            Ok(done)
        };
        let done = self.inner.background.spawn(step).await;
        done.map_err(|cause| Error::with_source(ErrorKind::Io, "fold ranges", cause))?
    }

    /// Deletes segments of earlier epochs that nothing references.
    ///
    /// # Errors
    /// `Unavailable` when the store does not answer; call again later.
    pub async fn sweep_orphans(&self) -> Result<SweepReport> {
        self.inner.check_writable()?;
        self.inner.sweep_orphans().await
    }

    /// Deletes some of the segments that this process uploaded but never committed, because their
    /// destage failed or was cancelled. It is cheap when there are none.
    ///
    /// # Errors
    /// Those of [`Tier::sweep_orphans`]. The next call retries the remaining segments.
    pub async fn sweep_abandoned(&self) -> Result<SweepReport> {
        self.inner.check_writable()?;
        self.inner.sweep_abandoned().await
    }

    /// Performs one step of reclaim: examines some segments, drops dead ones, or rewrites mostly
    /// dead ones. Call it at the lowest priority, repeatedly while it is not idle and from time to
    /// time when it is. The report contains its reads and writes, so that the caller can pace it.
    ///
    /// # Errors
    /// Those of [`Tier::destage`]. Damage is not an error: a segment that cannot be read is left
    /// alone and counted.
    pub async fn reclaim_step(&self, options: ReclaimOptions) -> Result<ReclaimReport> {
        self.inner.check_writable()?;
        self.inner.reclaim_step(options).await
    }

    /// Retries some of the objects that were found missing or unreadable while others could be
    /// read, and ends the conditions of those that are readable again. Call it from time to time.
    pub async fn try_unreadable_again(&self) {
        for info in self.inner.frames.store().try_again().await {
            self.inner.reclaim.note_well(info.number.0);
            self.inner.dedup.note_well(info.number.0);
        }
    }

    /// Returns the usage of the segments and the work that reclaim has done.
    #[must_use]
    pub fn reclaim_status(&self) -> ReclaimStatus {
        self.inner.reclaim_status()
    }

    /// Checks everything and changes nothing. No window is committed meanwhile.
    ///
    /// # Errors
    /// `Unavailable` when the store does not answer. Damage is part of the report.
    pub async fn fsck(&self, options: FsckOptions) -> Result<FsckReport> {
        self.inner.fsck(options).await
    }

    /// Corrects the counts of live blocks of these segments, by examining every page that may
    /// reference them. A count that is too high keeps its segment from being reclaimed. Nothing is
    /// committed while a segment is being examined. Returns the counts that were wrong: number of
    /// the segment, count before, and count now.
    ///
    /// # Errors
    /// `Corrupt` when a page or the directory of a segment does not open, which is damage of a
    /// different kind; those of [`Tier::destage`].
    pub async fn repair_counts(&self, numbers: &[u64]) -> Result<Vec<(u64, u32, u32)>> {
        self.inner.check_writable()?;
        self.inner.repair_counts(numbers).await
    }

    /// Returns counts for status.
    #[must_use]
    pub fn status(&self) -> TierStatus {
        TierStatus {
            map: self.inner.map.status(),
            frames: self.inner.frames.status(),
            upload_retry_count: self.inner.upload_retry_count.load(Ordering::Relaxed),
            upload_failure: self.inner.uploads.status(),
            abandoned_count: (self.inner.orphans.abandoned_count()
                + self.inner.orphans.undeletable_count()) as u64,
            reopen_count: self.inner.reopen_count.load(Ordering::Relaxed),
            metadata_failure: match self.inner.map.health() {
                Health::Well => None,
                Health::Final(error) => Some(error.chain()),
                // The attempt under way may be waiting for a call that keeps failing.
                Health::Ended(error) => {
                    let failure = self.inner.watched.last_failure();
                    let said = failure.map_or_else(String::new, |said| format!("; {said}"));
                    Some(error.chain() + &said)
                }
            },
            metadata_written_bytes: self.inner.watched.written_bytes(),
            mended_count: self.inner.mending.mended_count(),
            hint_dropped_count: self.inner.hint_dropped_count.load(Ordering::Relaxed),
        }
    }

    /// Stops background work. Destaged data is durable whether or not this is called.
    ///
    /// # Errors
    /// `Unavailable` when the store does not answer; nothing is lost then.
    pub async fn close(&self) -> Result<()> {
        self.inner.frames.close().await;
        let what = "the data tier is closed";
        self.inner.map.set_final(Error::new(ErrorKind::Unavailable, what));
        match tokio::time::timeout(CLOSE_TIMEOUT, self.inner.map.close()).await {
            Ok(closed) => closed,
            Err(_) => {
                let what =
                    format!("close data tier: no answer from the store in {CLOSE_TIMEOUT:?}");
                Err(Error::new(ErrorKind::Unavailable, what))
            }
        }
    }
}

impl Inner {
    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.is_read_only {
            let what = "the data tier is open for reading only";
            return Err(Error::new(ErrorKind::Denied, what));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
