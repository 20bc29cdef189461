//! SlateDB as the metadata database: how it is opened, and how its errors are classified.
//!
//! Invariants:
//! - SlateDB's own write-ahead log is off, because the pool's write log already serves as the log.
//!   A commit is durable once its memtable is flushed. One write batch is in one memtable, so a
//!   commit is all or nothing.
//! - [`DatabaseOptions`] bounds its memory: memtables, block cache, compaction buffers.
//! - A temporary failure of the store is waited out and is never an error; a fenced writer is
//!   `Fenced`.
//! - A checkpoint keeps a state that is read for a long time: see [`super::pinned`].
//! - A failure in any background task that waiting cannot repair ends the database permanently: an
//!   object that is missing, too short or written by another process, an operation that the store
//!   refuses as unknown, a table that does not verify, or a panic. Every later call fails with
//!   `Unavailable`, whatever the cause, because another handle may succeed; `tier::reopen` opens one.

use super::monotonic_clock::{ClockShift, MonotonicClock};
use super::pinned::Pin;
use super::snapshot_store::state_view;
use crate::listing;
use crate::recording_store::Shorter;
use async_recursion::async_recursion;
use block::{Error, ErrorKind};
use bytes::Bytes;
use futures::TryStreamExt;
use object_store::ObjectStore;
use object_store::path::Path;
use parking_lot::Mutex;
use slatedb::config::{
    CloseOptions, CompactionWorkerOptions, CompactorOptions, DbReaderOptions, FlushOptions,
    FlushType, GarbageCollectorDirectoryOptions, GarbageCollectorOptions, Settings,
    SizeTieredCompactionSchedulerOptions,
};
use slatedb::db_cache::foyer::{FoyerCache, FoyerCacheOptions};
use slatedb::db_cache::{DbCache, SplitCache};
use slatedb::{
    CloseReason, Db, DbIterator, DbReader, DbReaderMode, DbStatus, MergeOperator,
    MergeOperatorError, PathResolver, WriteBatch,
};
use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::watch;

/// Folder of the database within the pool's prefix.
pub const FOLDER: &str = "metadata";

/// Size in bytes at which a memtable is written out between commits; a commit writes it out
/// whatever its size. Chosen by hand: more than the operands of one window need.
const MEMTABLE_BYTES: usize = 16 << 20;

/// Memory of all memtables, in bytes: one being filled and one being written out. Further writes
/// wait.
pub const MEMTABLE_BYTES_MAX: u64 = 2 * MEMTABLE_BYTES as u64;

/// Tables in level 0 at which a commit waits for compaction. Chosen by hand: a minute of commits.
const LEVEL_0_COUNT_MAX: usize = 64;
/// Further tables allowed, up to [`LEVEL_0_COUNT_END`], for a database that is opened with level 0
/// full: its first commits must not wait for a compaction, which takes seconds to begin. Chosen by
/// hand: the number of commits in that time. Owners that follow each other every few seconds end before
/// a compaction does, so the end is far off: hundreds of them.
const LEVEL_0_COUNT_MORE: usize = 16;
const LEVEL_0_COUNT_END: usize = 1024;

/// Interval of the compactor worker's heartbeat, and the silence after which another worker takes
/// over its work. A killed daemon leaves work claimed. Until that is taken over, the daemon that
/// starts next may have to wait for room in level 0, although it must serve within seconds.
const WORKER_HEARTBEAT: Duration = Duration::from_millis(500);
const WORKER_SILENCE_MAX: Duration = Duration::from_secs(3);

/// Memory limits and intervals of the database.
#[derive(Clone, Debug)]
pub struct DatabaseOptions {
    /// Blocks, indexes and filters of tables kept in memory, in bytes.
    pub cache_bytes: u64,
    /// Interval at which the manifest is read to notice compactions and a fence, and at which the
    /// compactor looks for work. Each look is one request to the store.
    pub poll_interval: Duration,
    /// Age from which an unreferenced table is deleted, counted from the creation of the table. A
    /// table that is already older when it is replaced stays 15 minutes longer, through a
    /// checkpoint of the compaction. The age is hours, so that tables that an earlier compactor or
    /// owner is still writing are left alone. A reader of an earlier state makes a checkpoint of
    /// it.
    pub garbage_age: Duration,
    /// Whether the store can replace an object only if it is unchanged (a local directory cannot).
    pub has_conditional_update: bool,
    /// Lead of the machine's clock, in tests.
    pub(crate) clock: ClockShift,
}

impl Default for DatabaseOptions {
    fn default() -> Self {
        DatabaseOptions {
            cache_bytes: 64 << 20,
            poll_interval: Duration::from_secs(2),
            garbage_age: Duration::from_secs(2 * 3600),
            has_conditional_update: true,
            clock: ClockShift::default(),
        }
    }
}

/// Merge operator that appends: see `keys`.
struct Append;

impl MergeOperator for Append {
    fn merge(
        &self,
        _key: &Bytes,
        existing: Option<Bytes>,
        value: Bytes,
    ) -> Result<Bytes, MergeOperatorError> {
        Ok(match existing {
            Some(existing) => [existing, value].concat().into(),
            None => value,
        })
    }

    fn merge_batch(
        &self,
        _key: &Bytes,
        existing: Option<Bytes>,
        operands: &[Bytes],
    ) -> Result<Bytes, MergeOperatorError> {
        let parts: Vec<&[u8]> = existing.iter().chain(operands).map(|part| &part[..]).collect();
        match existing.as_ref().or(operands.first()) {
            Some(only) if parts.len() == 1 => Ok(only.clone()),
            Some(_) => Ok(parts.concat().into()),
            None => Err(MergeOperatorError::EmptyBatch),
        }
    }
}

/// Settings for a clock that is `ahead` of the store's, and a database that already has
/// `level_0_count` tables in level 0.
fn settings(options: &DatabaseOptions, ahead: Duration, level_0_count: usize) -> Settings {
    let level_0_count_max =
        (level_0_count + LEVEL_0_COUNT_MORE).clamp(LEVEL_0_COUNT_MAX, LEVEL_0_COUNT_END);
    let scheduler = SizeTieredCompactionSchedulerOptions {
        max_compaction_sources: 16,
        ..SizeTieredCompactionSchedulerOptions::default()
    };
    let garbage = Some(GarbageCollectorDirectoryOptions {
        interval: Some((options.garbage_age / 4).max(Duration::from_secs(1))),
        min_age: options.garbage_age,
        dry_run: false,
    });
    // The store's clock, not the local one, dates these objects.
    let timed = garbage.map(|garbage| GarbageCollectorDirectoryOptions {
        min_age: garbage.min_age + ahead,
        ..garbage
    });
    Settings {
        flush_interval: None,
        wal_enabled: false,
        manifest_poll_interval: options.poll_interval,
        // An outage of the store must not end the database.
        manifest_update_timeout: Duration::from_secs(365 * 24 * 3600),
        min_filter_keys: 64,
        max_unflushed_bytes: 2 * MEMTABLE_BYTES,
        l0_sst_size_bytes: MEMTABLE_BYTES,
        l0_max_ssts: level_0_count_max,
        l0_max_ssts_per_key: level_0_count_max,
        l0_flush_parallelism: 1,
        compactor_options: Some(CompactorOptions {
            poll_interval: options.poll_interval,
            manifest_update_timeout: Duration::from_secs(365 * 24 * 3600),
            max_concurrent_compactions: 2,
            scheduler_options: scheduler.into(),
            // 16 sources of 2 x 256 KiB: 8 MiB per compaction.
            worker_heartbeat_timeout: WORKER_SILENCE_MAX,
            worker: Some(CompactionWorkerOptions {
                heartbeat_interval: WORKER_HEARTBEAT,
                max_concurrent_compactions: 2,
                compactions_poll_interval: options.poll_interval,
                max_sst_size: 64 << 20,
                max_fetch_tasks: 2,
                bytes_to_fetch: 256 << 10,
                max_subcompactions: 1,
                min_filter_keys: 64,
                ..CompactionWorkerOptions::default()
            }),
            ..CompactorOptions::default()
        }),
        garbage_collector_options: Some(GarbageCollectorOptions {
            manifest_options: timed,
            wal_options: None,
            wal_fence_options: None,
            compacted_options: garbage,
            compactions_options: timed,
            detach_options: None,
            boundary_files_enabled: options.has_conditional_update,
            ..GarbageCollectorOptions::default()
        }),
        ..Settings::default()
    }
}

fn block_cache(options: &DatabaseOptions) -> Arc<dyn DbCache> {
    let cache = |bytes: u64| -> Arc<dyn DbCache> {
        Arc::new(FoyerCache::new_with_opts(FoyerCacheOptions { max_capacity: bytes, shards: 4 }))
    };
    // Filters and indexes are worth more than blocks: every lookup of an absent page needs them.
    let split = SplitCache::new()
        .with_block_cache(Some(cache(options.cache_bytes / 2)))
        .with_meta_cache(Some(cache(options.cache_bytes / 2)))
        .build();
    Arc::new(split)
}

/// The metadata database, open for writing or only for reading.
pub enum Database {
    /// The only writer.
    Owner(Box<Db>),
    /// A reader of the state it was opened with. It writes nothing to the store except the
    /// checkpoint that keeps this state.
    Reader(Box<DbReader>, Keeping),
}

/// Keeps the state that a reader shows.
#[derive(Default)]
pub struct Keeping {
    /// A table that the reader needs has been compacted away since the reader was opened.
    is_stale: AtomicBool,
    pin: Mutex<Option<Pin>>,
}

/// The objects of one state of the database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateObjects {
    /// Number of the state's manifest.
    pub manifest: u64,
    /// The tables that the manifest names.
    pub tables: BTreeSet<Path>,
    /// Earlier manifests that this one names. Compaction keeps them for a while; nothing is read
    /// through them.
    pub earlier: BTreeSet<u64>,
}

/// Folder of the manifests of a database.
#[must_use]
pub fn manifest_folder() -> Path {
    Path::from(format!("{FOLDER}/manifest"))
}

/// Name of a manifest.
#[must_use]
pub fn manifest_path(number: u64) -> Path {
    Path::from(format!("{FOLDER}/manifest/{number:020}.manifest"))
}

/// The number in the name of a manifest.
#[must_use]
pub fn manifest_number(path: &Path) -> Option<u64> {
    path.filename()?.strip_suffix(".manifest")?.parse().ok()
}

/// Number of the newest state in the store; 0 if several listings agree that there is none.
pub(crate) async fn newest_manifest(store: &Arc<dyn ObjectStore>) -> block::Result<u64> {
    let folder = manifest_folder();
    let failed = |cause| {
        let kind = match cause {
            object_store::Error::PermissionDenied { .. }
            | object_store::Error::Unauthenticated { .. } => ErrorKind::Denied,
            _ => ErrorKind::Unavailable,
        };
        Error::with_source(kind, "open metadata database for reading: list its states", cause)
    };
    let mut newest = 0;
    for look in 0..listing::EMPTY_LOOK_COUNT {
        listing::pause_before(look).await;
        let mut listing = listing::list(store, Some(&folder));
        while let Some(found) = listing.try_next().await.map_err(failed)? {
            newest = manifest_number(&found.location).map_or(newest, |number| number.max(newest));
        }
        if newest > 0 {
            break;
        }
    }
    Ok(newest)
}

/// Folder of the tables of a database.
#[must_use]
pub fn table_folder() -> Path {
    Path::from(format!("{FOLDER}/compacted"))
}

/// Facts about a database, read before it is opened for writing.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Number of writers so far.
    pub writer_count: u64,
    /// Time of its newest write, in milliseconds since 1970.
    pub clock_tick: i64,
    /// Tables in level 0.
    pub level_0_count: usize,
}

impl Database {
    /// Opens the database for writing, creating it if necessary, and fences every earlier writer.
    /// With `seen`, opens it only if no other writer has come since, and fails with `Fenced`
    /// otherwise. Background tasks run on the runtime of the caller.
    ///
    /// # Errors
    /// Those of [`error`]. It does not return while the store is unreachable: the caller probes the
    /// store and limits the time.
    #[async_recursion]
    pub async fn open(
        store: Arc<dyn ObjectStore>,
        options: &DatabaseOptions,
        seen: Option<Seen>,
    ) -> block::Result<Database> {
        let not_before = seen.map(|seen| seen.clock_tick);
        let level_0_count = seen.map_or(0, |seen| seen.level_0_count);
        let clock = MonotonicClock::new(not_before, options.clock.clone());
        clock.tell();
        let mut builder = Db::builder(FOLDER, store)
            .with_settings(settings(options, clock.ahead(), level_0_count))
            .with_system_clock(Arc::new(clock))
            .with_db_cache(block_cache(options), 0)
            .with_merge_operator(Arc::new(Append));
        if let Some(seen) = seen {
            builder = builder.with_expected_epoch(seen.writer_count);
        }
        let db = builder.build().await.map_err(|cause| error("open metadata database", cause))?;
        Ok(Database::Owner(Box::new(db)))
    }

    /// Opens an existing database for a short read: compaction may delete its state after 15
    /// minutes.
    ///
    /// # Errors
    /// Like [`Database::open`]; `Corrupt` if there is no database.
    #[async_recursion]
    pub async fn read_only(
        store: Arc<dyn ObjectStore>,
        options: &DatabaseOptions,
    ) -> block::Result<Database> {
        let newest = newest_manifest(&store).await?;
        Self::read_state(store, options, newest).await
    }

    /// Like [`Database::read_only`], but for a read of any length: a checkpoint in the store keeps
    /// the state until the reader is closed. If the store refuses writes, the reader has no
    /// checkpoint and may become stale unless the state is kept by other means.
    ///
    /// # Errors
    /// Like [`Database::read_only`].
    #[async_recursion]
    pub async fn read_pinned(
        store: Arc<dyn ObjectStore>,
        options: &DatabaseOptions,
    ) -> block::Result<Database> {
        let first = Self::read_only(store.clone(), options).await?;
        let clock = MonotonicClock::new(Some(first.seen().clock_tick), options.clock.clone());
        let (pin, manifest) = match Pin::newest(store.clone(), clock).await {
            Ok(made) => made,
            Err(error) => {
                // A copy has pins of its own.
                if error.kind() != ErrorKind::Denied {
                    tracing::info!(
                        error = %error.chain(),
                        "could not keep the state of the metadata that is read; a read of more \
                         than 15 minutes may have to turn to a newer state"
                    );
                }
                return Ok(first);
            }
        };
        if let Err(error) = first.close().await {
            tracing::debug!(error = %error.chain(), "could not close a metadata reader");
        }
        match Self::read_state(store, options, manifest).await {
            Ok(Database::Reader(reader, keeping)) => {
                *keeping.pin.lock() = Some(pin);
                Ok(Database::Reader(reader, keeping))
            }
            other => {
                pin.end().await;
                other
            }
        }
    }

    async fn read_state(
        store: Arc<dyn ObjectStore>,
        options: &DatabaseOptions,
        manifest: u64,
    ) -> block::Result<Database> {
        // The reader looks for a newer state at once and then periodically, but it must keep
        // showing the state that it was opened with.
        let store = state_view(store, manifest);
        let reader = DbReader::builder(FOLDER, store)
            .with_reader_mode(DbReaderMode::FollowLatest)
            .with_options(DbReaderOptions {
                manifest_poll_interval: Duration::from_secs(24 * 3600),
                skip_wal_replay: true,
                ..DbReaderOptions::default()
            })
            .with_db_cache(block_cache(options), 0)
            .with_merge_operator(Arc::new(Append))
            .build()
            .await
            .map_err(|cause| error("open metadata database for reading", cause))?;
        Ok(Database::Reader(Box::new(reader), Keeping::default()))
    }

    /// Facts about this state that the next opening needs.
    #[must_use]
    pub fn seen(&self) -> Seen {
        let manifest = match self {
            Database::Owner(db) => db.manifest(),
            Database::Reader(reader, _) => reader.manifest(),
        };
        Seen {
            writer_count: manifest.writer_epoch(),
            clock_tick: manifest.last_l0_clock_tick(),
            level_0_count: manifest.l0().len(),
        }
    }

    /// The objects of this state.
    #[must_use]
    pub fn objects(&self) -> StateObjects {
        let manifest = match self {
            Database::Owner(db) => db.manifest(),
            Database::Reader(reader, _) => reader.manifest(),
        };
        let paths = PathResolver::new(FOLDER, &manifest);
        let tables = manifest.all_sst_views().map(|view| paths.sst_path(&view.sst.id)).collect();
        let earlier = manifest.checkpoints().iter().map(|checkpoint| checkpoint.manifest_id);
        let earlier = earlier.filter(|number| *number < manifest.id()).collect();
        StateObjects { manifest: manifest.id(), tables, earlier }
    }

    /// The value of a key.
    ///
    /// # Errors
    /// Database errors.
    #[async_recursion]
    pub async fn get(&self, key: &[u8]) -> Result<Option<Bytes>, slatedb::Error> {
        match self {
            Database::Owner(db) => db.get(key).await,
            Database::Reader(reader, _) => reader.get(key).await,
        }
    }

    /// Entries between two keys, in order.
    ///
    /// # Errors
    /// Database errors.
    #[async_recursion]
    pub async fn scan(
        &self,
        range: (Bound<Vec<u8>>, Bound<Vec<u8>>),
    ) -> Result<DbIterator, slatedb::Error> {
        match self {
            Database::Owner(db) => db.scan(range).await,
            Database::Reader(reader, _) => reader.scan(range).await,
        }
    }

    /// Adds a batch to the memtable: after the next flush all of it is durable, after a crash
    /// before that none of it.
    ///
    /// # Errors
    /// `Denied` for a reader; database errors.
    #[async_recursion]
    pub async fn write(&self, batch: WriteBatch) -> block::Result<()> {
        match self.owner()?.write(batch).await {
            Ok(_handle) => Ok(()),
            Err(cause) => Err(self.failed("write metadata batch", cause)),
        }
    }

    /// Makes everything written durable.
    ///
    /// # Errors
    /// Like [`Database::write`].
    #[async_recursion]
    pub async fn flush(&self) -> block::Result<()> {
        let options = FlushOptions { flush_type: FlushType::MemTable };
        let flushed = self.owner()?.flush_with_options(options).await;
        flushed.map_err(|cause| self.failed("flush metadata", cause))
    }

    /// Ends the background tasks; the owner's writes are flushed first.
    ///
    /// # Errors
    /// Database errors; the database is closed in any case.
    #[async_recursion]
    pub async fn close(&self) -> block::Result<()> {
        let closed = match self {
            Database::Owner(db) => db.close().await,
            Database::Reader(reader, keeping) => {
                let closed = reader.close().await;
                let pin = keeping.pin.lock().take();
                if let Some(pin) = pin {
                    pin.end().await;
                }
                closed
            }
        };
        closed.map_err(|cause| error("close metadata database", cause))
    }

    /// Renews the pin of the state, if it is due.
    #[cfg(test)]
    pub(crate) async fn keep_on(&self) {
        let Database::Reader(_, keeping) = self else { return };
        let renewed = keeping.pin.lock().as_ref().map(Pin::renew_if_due);
        if let Some(renewed) = renewed {
            renewed.await.expect("the store of the test takes it");
        }
    }

    /// Like [`Database::close`], but for a database that is given up: writes that are not durable
    /// are not flushed.
    ///
    /// # Errors
    /// Database errors; the database is closed in any case.
    #[async_recursion]
    pub async fn abandon(&self) -> block::Result<()> {
        let closed = match self {
            Database::Owner(db) => db.close_with_options(CloseOptions { flush_type: None }).await,
            Database::Reader(..) => return self.close().await,
        };
        closed.map_err(|cause| error("close metadata database", cause))
    }

    /// A channel that reports when the database has ended.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<DbStatus> {
        match self {
            Database::Owner(db) => db.subscribe(),
            Database::Reader(reader, _) => reader.subscribe(),
        }
    }

    fn close_reason(&self) -> Option<CloseReason> {
        match self {
            Database::Owner(db) => db.status().close_reason,
            Database::Reader(reader, _) => reader.status().close_reason,
        }
    }

    /// Whether a reader has found objects of its state missing, so that only a newer state can be
    /// read.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        matches!(self, Database::Reader(_, keeping) if keeping.is_stale.load(Ordering::Relaxed))
    }

    /// The error that ended it, if another owner has fenced it.
    #[must_use]
    pub fn fence(&self) -> Option<Error> {
        let is_fenced = self.close_reason() == Some(CloseReason::Fenced);
        is_fenced.then(|| Error::new(ErrorKind::Fenced, "another owner has opened the metadata"))
    }

    /// Whether it has ended without having been fenced, so that another handle may succeed.
    #[must_use]
    pub fn has_given_up(&self) -> bool {
        self.close_reason().is_some_and(|reason| reason != CloseReason::Fenced)
    }

    fn owner(&self) -> block::Result<&Db> {
        match self {
            Database::Owner(db) => Ok(db),
            Database::Reader(..) => {
                Err(Error::new(ErrorKind::Denied, "the data tier is open for reading only"))
            }
        }
    }

    /// Classifies an error of this database for the caller. Once the database has ended, later
    /// failures are attributed to that end.
    #[must_use]
    pub fn failed(&self, doing: impl Into<String>, cause: slatedb::Error) -> Error {
        if let Database::Reader(_, keeping) = self
            && is_object_missing(&cause)
        {
            keeping.is_stale.store(true, Ordering::Relaxed);
            return Error::with_source(ErrorKind::Unavailable, doing, cause)
                .context("the metadata was compacted since it was opened for reading");
        }
        let error = error(doing, cause);
        match self.close_reason() {
            Some(CloseReason::Fenced) if error.kind() != ErrorKind::Fenced => {
                let what = "another owner has opened the metadata";
                Error::with_source(ErrorKind::Fenced, what, error)
            }
            Some(_) if !matches!(error.kind(), ErrorKind::Fenced | ErrorKind::Unavailable) => {
                let what = "the metadata database has ended and is being opened again";
                Error::with_source(ErrorKind::Unavailable, what, error)
            }
            _ => error,
        }
    }
}

/// The error of the store, if that is the cause.
fn store_error(cause: &slatedb::Error) -> Option<&object_store::Error> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(cause);
    while let Some(error) = next {
        let shared = error.downcast_ref::<Arc<object_store::Error>>().map(Arc::as_ref);
        if let Some(found) = shared.or_else(|| error.downcast_ref::<object_store::Error>()) {
            return Some(found);
        }
        next = error.source();
    }
    None
}

/// Whether the store has reported that an object does not exist.
fn is_object_missing(cause: &slatedb::Error) -> bool {
    matches!(store_error(cause), Some(object_store::Error::NotFound { .. }))
}

/// Whether the store has refused a write.
pub(super) fn is_refused(cause: &slatedb::Error) -> bool {
    matches!(store_error(cause), Some(object_store::Error::PermissionDenied { .. }))
}

/// The error of an object of the database that is too short, if that is the cause.
fn shorter(cause: &slatedb::Error) -> Option<Shorter> {
    match store_error(cause)? {
        object_store::Error::NotSupported { source } => source.downcast_ref::<Shorter>().cloned(),
        _ => None,
    }
}

/// Classifies an error of the database for the caller.
#[must_use]
pub fn error(doing: impl Into<String>, cause: slatedb::Error) -> Error {
    if let Some(shorter) = shorter(&cause) {
        return Error::with_source(ErrorKind::Corrupt, doing, shorter);
    }
    let kind = match cause.kind() {
        slatedb::ErrorKind::Closed(CloseReason::Fenced) => ErrorKind::Fenced,
        slatedb::ErrorKind::Data => ErrorKind::Corrupt,
        slatedb::ErrorKind::Unavailable | slatedb::ErrorKind::Closed(CloseReason::Clean) => {
            ErrorKind::Unavailable
        }
        _ => ErrorKind::Io,
    };
    Error::with_source(kind, doing, cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appending_is_associative() {
        let key = Bytes::from_static(b"k");
        let [a, b, c] = [&b"a"[..], b"bb", b"ccc"].map(Bytes::from_static);
        let left =
            Append.merge(&key, Append.merge(&key, Some(a.clone()), b.clone()).ok(), c.clone());
        let right = Append.merge_batch(&key, Some(a), &[Append.merge(&key, Some(b), c).unwrap()]);
        assert_eq!(left.unwrap(), right.unwrap());
        assert!(Append.merge_batch(&key, None, &[]).is_err());
    }

    #[test]
    fn the_settings_are_valid() {
        settings(&DatabaseOptions::default(), Duration::ZERO, 0).validate().unwrap();
    }
}
