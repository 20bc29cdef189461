//! The data tier of one pool as the daemon sees it.
//!
//! Invariants:
//! - One [`Tier`] is open for writing on a store; opening fences every earlier one, whose next
//!   commit fails with `Fenced`.
//! - A read sees every window whose destage has returned. During a destage the caller's overlay still
//!   shows the window, so it does not matter which of its pages a read finds.
//! - Bytes that do not verify are an error that names volume, offset, segment and frame, never data.

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

/// Frames fetched by one read at the same time: bounds what a large read holds besides its buffer.
const FRAMES_AT_ONCE: usize = 64;

/// Pages that one allocation query looks at; it answers for a shorter range beyond.
const ALLOCATION_PAGES_MAX: usize = 4096;

/// Layers that one step forgets. Chosen by hand: a commit each.
const LAYERS_AT_ONCE: u64 = 64;
/// Longest wait for the store when closing. Chosen by hand: nothing is lost by giving up.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(20);

/// Asks whoever grants ownership of the pool whether this process still has it.
#[derive(Clone)]
pub struct OwnerCheck(Arc<dyn Fn() -> BoxFuture<'static, Result<()>> + Send + Sync>);

impl OwnerCheck {
    /// `check` returns `Fenced` when another owner has taken the pool, anything else when nothing is
    /// known. A new owner must show there before it opens the tier.
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

/// How a tier is opened.
#[derive(Clone, Debug)]
pub struct TierOptions {
    /// The object store, prefixed to the pool.
    pub store: Arc<dyn ObjectStore>,
    /// Identity of the pool.
    pub pool: [u8; 16],
    /// Root key of the pool.
    pub pool_key: PoolKey,
    /// Keys of volumes; all of them before anything is read or destaged.
    pub volume_keys: VolumeKeys,
    /// The owner's epoch, not 0.
    pub epoch: Epoch,
    /// Cipher of what is written.
    pub algorithm: Algorithm,
    /// Compression level of frames; negative levels are faster.
    pub zstd_level: i32,
    /// Blocks before compression that fill a segment, in bytes.
    pub segment_bytes: usize,
    /// Blocks of a frame of sequential data, 1 to 16.
    pub frame_blocks: u8,
    /// Segments built and uploaded at the same time. Each takes up to twice `segment_bytes`.
    pub segments_in_flight_max: usize,
    /// Caches and read-ahead.
    pub frames: FramesOptions,
    /// Memory of the map.
    pub map: MapOptions,
    /// Memory and pace of the metadata database.
    pub database: DatabaseOptions,
    /// Opening fails if the store has not answered for this long.
    pub open_timeout: Duration,
    /// Runtime of background work (database, destage); the opener's without it.
    pub background: Option<Handle>,
    /// Memory of the index of deduplication, in bytes; it is used where a volume wants that.
    pub dedup_index_bytes: usize,
    /// Blocks of every volume are looked for, in tests.
    pub(crate) is_dedup: bool,
    /// The bits of a fingerprint that count: less of them in tests.
    pub(crate) fingerprint_mask: u64,
    /// Of a copy of some volumes, or a pool that was restored from one: segments that may be missing.
    pub left_out: Option<LeftOut>,
    /// The store, where it has a copy behind it that it still needs.
    pub restored: Option<Arc<RestoredStore>>,
    /// Asked each time before the metadata is claimed; without it only the metadata's own epochs
    /// tell owners apart.
    pub owner_check: Option<OwnerCheck>,
    /// Where the data tier raises the conditions that last.
    pub conditions: block::Conditions,
    /// Bugs, in tests.
    pub(crate) planted: Planted,
}

impl TierOptions {
    /// Defaults for a pool.
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
    /// Why the last attempt to upload failed, until one succeeds: the store is away, or refuses.
    pub upload_failure: Option<StoreFailure>,
    /// Segments that nothing names and that wait to be deleted from the store.
    pub abandoned_count: u64,
    /// Times that the metadata database had ended and was opened anew.
    pub reopen_count: u64,
    /// Why the metadata database has ended, until it is open again.
    pub metadata_failure: Option<String>,
    /// Bytes that the metadata database has written to the store.
    pub metadata_written_bytes: u64,
    /// Segments that were damaged or missing in the store and were put back from a copy.
    pub mended_count: u64,
    /// Hints to prefetch and read-ahead of streams that were dropped, because too many were under way.
    pub hint_dropped_count: u64,
}

/// Bytes of a volume that two snapshots show differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedExtent {
    /// Where.
    pub offset: u64,
    /// How many, never 0.
    pub length_bytes: u64,
    /// The later one has nothing there: it reads as zeroes.
    pub is_hole: bool,
}

/// What a volume was made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The volume; its own, after a rollback.
    pub volume: VolumeId,
    /// LSN of the snapshot.
    pub at: Lsn,
    /// It is being made independent of it.
    pub is_promoted: bool,
    /// Up to here, in bytes of its address space.
    pub done_bytes: u64,
}

/// See the module. Cheap to clone; every method may be called from any task at any time.
#[derive(Clone)]
pub struct Tier {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) options: TierOptions,
    /// See [`TierOptions::left_out`] and [`Tier::set_left_out`].
    pub(crate) left_out: parking_lot::RwLock<Option<LeftOut>>,
    pub(crate) store: Arc<dyn ObjectStore>,
    /// The same one, for the metadata database.
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
    /// One destage at a time, in the order of the calls.
    pub(crate) destage_turn: tokio::sync::Mutex<()>,
    pub(crate) writer: tokio::sync::Mutex<Writer>,
    pub(crate) is_read_only: bool,
    opened_at_commit: u64,
    pub(crate) next_segment: AtomicU64,
    pub(crate) upload_retry_count: AtomicU64,
    /// Reads of blocks that complete others, which the store did not answer.
    pub(crate) complete_retry_count: AtomicU64,
    pub(crate) uploads: Outage,
    /// See [`Tier::set_urgent`].
    pub(crate) is_urgent: AtomicBool,
    pub(crate) reopen_count: AtomicU64,
    /// Objects on their way to copies, or back: see [`crate::copier`] and [`crate::mend`].
    pub(crate) copy_places: Arc<Semaphore>,
    prefetch_places: Arc<Semaphore>,
    read_ahead_places: Arc<Semaphore>,
    hint_dropped_count: AtomicU64,
}

impl Tier {
    /// Opens the tier, making it in an empty store, and fences every earlier owner.
    ///
    /// # Errors
    /// `Unavailable` when the store does not answer in time, `Denied` when it refuses us, `Fenced`
    /// when a higher epoch has been here, `Corrupt` when the metadata does not verify (also under
    /// another pool's key), `Invalid` for options out of range.
    pub async fn open(options: TierOptions) -> Result<Tier> {
        Self::open_as(options, Purpose::Own).await
    }

    /// The keys of volumes, as they are now.
    #[must_use]
    pub fn volume_keys(&self) -> &VolumeKeys {
        &self.inner.options.volume_keys
    }

    /// Where conditions that last are raised: those of the data tier, and of what works on it.
    #[must_use]
    pub fn conditions(&self) -> &block::Conditions {
        &self.inner.options.conditions
    }

    /// Commits that the metadata had when it was opened.
    #[must_use]
    pub fn opened_at_commit(&self) -> u64 {
        self.inner.opened_at_commit
    }

    /// The key of volumes is destroyed: what it has sealed cannot be read from here on.
    pub fn forget_key(&self, key: KeyId) {
        self.inner.options.volume_keys.remove(key);
        self.inner.frames.forget_keys();
    }

    /// Opens the tier as it is, without fencing its owner: for checks and copies, which take long. It goes on showing what
    /// it found, because a checkpoint in the store keeps that; nothing else is written. [`Tier::destage`], [`Tier::step`] and
    /// [`Tier::sweep_orphans`] are `Denied`.
    ///
    /// # Errors
    /// As [`Tier::open`]; `NotFound` in an empty store.
    pub async fn open_read_only(options: TierOptions) -> Result<Tier> {
        Self::open_as(options, Purpose::Read).await
    }

    /// As [`Tier::open_read_only`], for less than 15 minutes: nothing at all is written to the store.
    ///
    /// # Errors
    /// As [`Tier::open_read_only`].
    pub async fn open_for_look(options: TierOptions) -> Result<Tier> {
        Self::open_as(options, Purpose::Look).await
    }

    /// The runtime of background work.
    #[must_use]
    pub fn background(&self) -> &Handle {
        &self.inner.background
    }

    /// Every entry of the log up to this LSN is durable in the tier. A log that was trimmed further
    /// than this belongs to another state of the bucket.
    #[must_use]
    pub fn destaged_lsn(&self) -> Lsn {
        self.inner.map.destaged_lsn()
    }

    /// The newest destaged record of every volume, by id.
    #[must_use]
    pub fn volume_records(&self) -> Vec<(VolumeId, Bytes)> {
        self.inner.map.volume_records()
    }

    /// Fills `buf` with the bytes at `offset`; what was never written, or was trimmed, is zero.
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

    /// As [`Tier::read`], of the volume as its snapshot at `at` shows it. Also before that is destaged, as
    /// long as nothing beyond it is.
    ///
    /// # Errors
    /// As [`Tier::read`]. What is read of a snapshot that is removed meanwhile means nothing.
    pub async fn read_at(
        &self,
        volume: VolumeId,
        at: Lsn,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<()> {
        self.inner.read_with(volume, Some(at), offset, buf, Access::Random).await
    }

    /// As [`Tier::allocation`], of a snapshot.
    ///
    /// # Errors
    /// As [`Tier::read_at`].
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

    /// What has changed of a volume from one LSN at which it has a snapshot to a later one, in the bytes from
    /// `range.start` to `range.end`: at most about `count_max` extents, and where to go on if there may be more. Both
    /// are destaged. What was written anew with the same bytes counts as changed.
    ///
    /// # Errors
    /// As [`Tier::read_at`].
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

    /// The snapshots that are destaged and not removed: volume, LSN and what the daemon said of each.
    #[must_use]
    pub fn snapshots(&self) -> Vec<(VolumeId, Lsn, Bytes)> {
        let list = self.inner.map.snapshots();
        let of = |((layer, lsn), record): ((LayerId, Lsn), &Bytes)| {
            (layer.volume(), lsn, record.clone())
        };
        list.iter().map(of).collect()
    }

    /// Bytes of the store that each snapshot of a volume alone holds, by LSN: an estimate, of what is destaged. Walks
    /// the metadata of what has changed since the oldest one.
    ///
    /// # Errors
    /// As [`Tier::read`].
    pub async fn held_bytes(&self, volume: VolumeId) -> Result<BTreeMap<Lsn, u64>> {
        let layers = self.inner.map.layers();
        // The list has no first layer of a volume that was first written since the start.
        let first = LayerId::of_volume(volume);
        let later = layers.iter().map(|(layer, _)| layer);
        let later = later.filter(|layer| layer.volume() == volume && *layer != first);
        let mut held = BTreeMap::new();
        for layer in std::iter::once(first).chain(later) {
            held.extend(self.inner.map.held_bytes(layer).await?);
        }
        Ok(held)
    }

    /// Allocation of a range as consecutive runs from `offset` on: at least one, at most
    /// `extent_count_max`, together at most `length` bytes, which is not 0.
    ///
    /// # Errors
    /// As [`Tier::read`].
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

    /// Moves one window of the log into the tier. When it returns, the window is durable, reads show
    /// it, and the log may forget it. Windows come in the order of the log; one that is destaged
    /// already is left alone.
    ///
    /// Waits for the store as long as it takes. Dropping the future stops it; the window may then
    /// be destaged or not, and is given again.
    ///
    /// # Errors
    /// `Fenced` when another owner has opened the tier; `Corrupt` when something that the window
    /// builds on does not verify (with the volume); what `source` returns. Nothing of the window is
    /// in the tier then.
    pub async fn destage<S: LogSource>(
        &self,
        window: Window<S::Handle>,
        source: &S,
    ) -> Result<DestageReport, DestageError> {
        self.inner.check_writable()?;
        self.inner.destage(window, source).await
    }

    /// Whether the tier could take these extents of a volume (first sector, sectors, whether there is
    /// payload; sorted and disjoint): reads everything that a window of them would build on, and
    /// changes nothing. So that nothing is uploaded in vain for a volume that failed before.
    ///
    /// # Errors
    /// As [`Tier::read`].
    pub async fn check_extents(
        &self,
        volume: VolumeId,
        extents: &[(u64, u64, bool)],
    ) -> Result<()> {
        self.inner.check_extents(volume, extents).await
    }

    /// Volumes of which the tier lacks something that other volumes have, with the side files of the
    /// log in which it is.
    #[must_use]
    pub fn asides(&self) -> BTreeMap<VolumeId, Vec<AsideFile>> {
        self.inner.map.asides()
    }

    /// Says whether destage should rather be fast than store little: while the log fills, segments are
    /// compressed less.
    pub fn set_urgent(&self, is_urgent: bool) {
        self.inner.is_urgent.store(is_urgent, Ordering::Relaxed);
    }

    /// One step of background work: folds what large trims hide in the map, up to `page_budget`
    /// pages, or else drops what only removed snapshots showed, and gives back memory that destage did not
    /// need since the last step. Call it while something is left, at the lowest priority.
    ///
    /// # Errors
    /// As [`Tier::destage`].
    pub async fn step(&self, page_budget: usize) -> Result<FoldReport> {
        self.inner.check_writable()?;
        self.inner.buffers.trim();
        let inner = self.inner.clone();
        let step = async move {
            let mut writer = inner.writer.lock().await;
            let folded = inner.map.fold_ranges(&mut writer, page_budget).await;
            // Also where a range cannot be folded.
            let is_pruned = folded.as_ref().map_or(true, |done| done.page_count == 0)
                && inner.map.status().prune_count > 0;
            let pruned = match is_pruned {
                true => inner.map.prune(&mut writer, page_budget).await,
                false => Ok(PruneReport::default()),
            };
            // Nothing that cannot be done keeps the rest from being done.
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
            // A step that has found nothing more has gone on all the same.
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

    /// Deletes segments of earlier epochs that nothing names.
    ///
    /// # Errors
    /// `Unavailable` when the store does not answer; call again later.
    pub async fn sweep_orphans(&self) -> Result<SweepReport> {
        self.inner.check_writable()?;
        self.inner.sweep_orphans().await
    }

    /// Deletes some of the segments that this process uploaded and never committed: of destages that
    /// failed or were cancelled. Cheap where there are none.
    ///
    /// # Errors
    /// As [`Tier::sweep_orphans`]; what is left is tried again with the next call.
    pub async fn sweep_abandoned(&self) -> Result<SweepReport> {
        self.inner.check_writable()?;
        self.inner.sweep_abandoned().await
    }

    /// One step of reclaim: looks at some segments, drops some that are dead, or rewrites some that mostly
    /// are. Call it while it is not idle, and from time to time when it is, at the lowest priority. Its
    /// reads and writes are in the report, for the caller's pace.
    ///
    /// # Errors
    /// As [`Tier::destage`]. Damage is no error: a segment that cannot be read is left alone, and counted.
    pub async fn reclaim_step(&self, options: ReclaimOptions) -> Result<ReclaimReport> {
        self.inner.check_writable()?;
        self.inner.reclaim_step(options).await
    }

    /// Tries some of the objects again that were missing or unreadable while others were read. Their conditions end where
    /// they can be read. Call it from time to time.
    pub async fn try_unreadable_again(&self) {
        for info in self.inner.frames.store().try_again().await {
            self.inner.reclaim.note_well(info.number.0);
            self.inner.dedup.note_well(info.number.0);
        }
    }

    /// What the segments hold, and what reclaim has done.
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

    /// Puts the counts of live blocks of these segments right, by looking at every page that may name them. A count that
    /// is too high keeps its segment from being reclaimed. Nothing is committed while one of them is looked at. Returns
    /// those that were wrong: number, count before and now.
    ///
    /// # Errors
    /// `Corrupt` where a page or a segment's directory does not open, which is damage of its own; as [`Tier::destage`].
    pub async fn repair_counts(&self, numbers: &[u64]) -> Result<Vec<(u64, u32, u32)>> {
        self.inner.check_writable()?;
        self.inner.repair_counts(numbers).await
    }

    /// Counts for status.
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
                // The attempt that is under way may be waiting for a call that fails.
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

    /// Ends background work. What was destaged is durable with or without it.
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
