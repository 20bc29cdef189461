//! SlateDB as the metadata database: how it is opened, and what its errors mean.
//!
//! Invariants:
//! - Its own write-ahead log is off: the pool's write log is the log, and a commit is durable when
//!   its memtable was flushed. One write batch is in one memtable, so a commit is all or nothing.
//! - Its memory is bounded by [`DatabaseOptions`]: memtables, block cache, compaction buffers.
//! - The store failing for a while is waited out, never an error; a fenced writer is `Fenced`.
//! - A state that is read for long is kept by a checkpoint: see [`super::pinned`].
//! - What waiting does not mend ends the database for good: an object that is gone or was written by
//!   somebody else or is too short, an operation that the store refuses as unknown, a table that does
//!   not verify, a panic, in any of its background tasks. Everything fails with `Unavailable` from then on, whatever
//!   the cause was, because another handle may do better; `tier::keep` opens one.

use super::forward::{ClockShift, ForwardClock};
use super::pinned::Pin;
use super::view::state_view;
use crate::listing;
use crate::watched::Shorter;
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

/// Bytes from which a memtable is written out by itself; a commit writes it out whatever its size.
/// Chosen by hand: above what one window's operands take.
const MEMTABLE_BYTES: usize = 16 << 20;

/// What memtables take together, in bytes: one that is filled and one that is written out. More
/// writes wait.
pub const MEMTABLE_BYTES_MAX: u64 = 2 * MEMTABLE_BYTES as u64;

/// Tables of level 0 before a commit waits for compaction. Chosen by hand: a minute of commits.
const LEVEL_0_COUNT_MAX: usize = 64;
/// As many more may be there when a database is opened that is full of them, up to a bound: the first commits must not
/// wait for a compaction, which takes seconds to begin. Chosen by hand: what is committed in the meantime.
const LEVEL_0_COUNT_MORE: usize = 16;
const LEVEL_0_COUNT_END: usize = 256;

/// How often the compactor's worker says that it lives, and how long it may be silent before its
/// work is taken over. A killed daemon leaves work claimed; until that is taken over, the one that
/// starts after it may wait for room in level 0, and it is to serve within seconds.
const WORKER_HEARTBEAT: Duration = Duration::from_millis(500);
const WORKER_SILENCE_MAX: Duration = Duration::from_secs(3);

/// Memory and pace of the database.
#[derive(Clone, Debug)]
pub struct DatabaseOptions {
    /// Blocks, indexes and filters of tables kept in memory, in bytes.
    pub cache_bytes: u64,
    /// How often the manifest is read to notice compactions and a fence, and how often the compactor
    /// looks for work. Each look is a request to the store.
    pub poll_interval: Duration,
    /// Age from which an unreferenced table is deleted. It is the table's own age: one that is replaced when it is older is
    /// there for 15 minutes more, by a checkpoint of the compaction. Hours, so that what a compactor or owner of the past
    /// is just writing is left alone. Whoever reads an earlier state makes a checkpoint of it.
    pub garbage_age: Duration,
    /// The store can replace an object only if it is unchanged (a local directory cannot).
    pub has_conditional_update: bool,
    /// How far the machine's clock is ahead, in tests.
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

/// Appends: see `keys`.
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

/// For a clock that is `ahead` of the store's, and a database that has so many tables in level 0.
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
    // The store says when these were written.
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
            // 16 sources of 2 x 256 KiB: 8 MiB a compaction.
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
    /// Its one writer.
    Owner(Box<Db>),
    /// A reader of the state that it found; writes nothing to the store but the checkpoint that keeps it.
    Reader(Box<DbReader>, Keeping),
}

/// What keeps the state of a reader.
#[derive(Default)]
pub struct Keeping {
    /// A table that the reader needs was compacted away since it was opened.
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
    /// Earlier manifests that it names, which compaction keeps for a while; nothing is read through them.
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

/// The newest state that the store has; 0 for none, once several listings agree.
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

/// What is known of a database before it is opened for writing.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Writers that it has had.
    pub writer_count: u64,
    /// The time of its newest write, in milliseconds since 1970.
    pub clock_tick: i64,
    /// Tables in level 0.
    pub level_0_count: usize,
}

impl Database {
    /// Opens the database for writing, creating it if there is none, and fences every earlier writer.
    /// With what was `seen` of it before only if no other writer has come since; `Fenced` otherwise.
    /// Background tasks run on the runtime of the caller.
    ///
    /// # Errors
    /// As [`error`]. It does not return while the store is away: the caller probes and limits the
    /// time.
    pub async fn open(
        store: Arc<dyn ObjectStore>,
        options: &DatabaseOptions,
        seen: Option<Seen>,
    ) -> block::Result<Database> {
        let not_before = seen.map(|seen| seen.clock_tick);
        let level_0_count = seen.map_or(0, |seen| seen.level_0_count);
        let clock = ForwardClock::new(not_before, options.clock.clone());
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

    /// Opens an existing database for reading, for a short look: what it shows may be compacted away after 15 minutes.
    ///
    /// # Errors
    /// As [`Database::open`]; `Corrupt` when there is none.
    pub async fn read_only(
        store: Arc<dyn ObjectStore>,
        options: &DatabaseOptions,
    ) -> block::Result<Database> {
        let newest = newest_manifest(&store).await?;
        Self::read_state(store, options, newest).await
    }

    /// As [`Database::read_only`], for as long as it takes: a checkpoint in the store keeps what it shows until it is closed.
    /// Without that where the store refuses to be written to: then something else keeps it, or it may become stale.
    ///
    /// # Errors
    /// As [`Database::read_only`].
    pub async fn read_pinned(
        store: Arc<dyn ObjectStore>,
        options: &DatabaseOptions,
    ) -> block::Result<Database> {
        let first = Self::read_only(store.clone(), options).await?;
        let clock = ForwardClock::new(Some(first.seen().clock_tick), options.clock.clone());
        let (pin, manifest) = match Pin::newest(store.clone(), clock).await {
            Ok(made) => made,
            Err(error) => {
                // A copy has pins of its own.
                if error.kind() != ErrorKind::Denied {
                    tracing::info!(
                        error = %error.chain(),
                        "could not keep the state of the metadata that is read: what takes longer than 15 minutes may \
                         have to turn to a newer one"
                    );
                }
                return Ok(first);
            }
        };
        if let Err(error) = first.close().await {
            tracing::debug!(error = %error.chain(), "a reader that is no longer wanted");
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
        // The reader looks for a newer state at once and from time to time; it is to show the one that it was opened
        // with.
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

    /// What another opening has to know of this state.
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

    /// What this state is made of.
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
    /// What the database says.
    pub async fn get(&self, key: &[u8]) -> Result<Option<Bytes>, slatedb::Error> {
        match self {
            Database::Owner(db) => db.get(key).await,
            Database::Reader(reader, _) => reader.get(key).await,
        }
    }

    /// Entries between two keys, in order.
    ///
    /// # Errors
    /// What the database says.
    pub async fn scan(
        &self,
        range: (Bound<Vec<u8>>, Bound<Vec<u8>>),
    ) -> Result<DbIterator, slatedb::Error> {
        match self {
            Database::Owner(db) => db.scan(range).await,
            Database::Reader(reader, _) => reader.scan(range).await,
        }
    }

    /// Adds a batch to the memtable: all of it is durable after the next flush, or nothing.
    ///
    /// # Errors
    /// `Denied` of a reader; what the database says.
    pub async fn write(&self, batch: WriteBatch) -> block::Result<()> {
        match self.owner()?.write(batch).await {
            Ok(_handle) => Ok(()),
            Err(cause) => Err(self.failed("write metadata batch", cause)),
        }
    }

    /// Makes everything written durable.
    ///
    /// # Errors
    /// As [`Database::write`].
    pub async fn flush(&self) -> block::Result<()> {
        let options = FlushOptions { flush_type: FlushType::MemTable };
        let flushed = self.owner()?.flush_with_options(options).await;
        flushed.map_err(|cause| self.failed("flush metadata", cause))
    }

    /// Ends the background tasks; the owner's writes are flushed first.
    ///
    /// # Errors
    /// What the database says; it is closed in any case.
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

    /// Renews what keeps the state, if it is time.
    #[cfg(test)]
    pub(crate) async fn keep_on(&self) {
        let Database::Reader(_, keeping) = self else { return };
        let renewed = keeping.pin.lock().as_ref().map(Pin::renew_if_due);
        if let Some(renewed) = renewed {
            renewed.await.expect("the store of the test takes it");
        }
    }

    /// As [`Database::close`] for a database that is given up: what is not durable stays so.
    ///
    /// # Errors
    /// What the database says; it is closed in any case.
    pub async fn abandon(&self) -> block::Result<()> {
        let closed = match self {
            Database::Owner(db) => db.close_with_options(CloseOptions { flush_type: None }).await,
            Database::Reader(..) => return self.close().await,
        };
        closed.map_err(|cause| error("close metadata database", cause))
    }

    /// Tells when it has ended.
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

    /// A reader found that what it reads is gone: only a newer state can still be read.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        matches!(self, Database::Reader(_, keeping) if keeping.is_stale.load(Ordering::Relaxed))
    }

    /// Why it has ended, if another owner has fenced it.
    #[must_use]
    pub fn fence(&self) -> Option<Error> {
        let is_fenced = self.close_reason() == Some(CloseReason::Fenced);
        is_fenced.then(|| Error::new(ErrorKind::Fenced, "another owner has opened the metadata"))
    }

    /// It has ended, and nobody has fenced it: another handle may go on.
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

    /// What an error of this database asks of the caller. Once it has ended, what fails does so
    /// because of that.
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
                let what = "the metadata database has ended and is being opened anew";
                Error::with_source(ErrorKind::Unavailable, what, error)
            }
            _ => error,
        }
    }
}

/// What the store has said, if that is the cause.
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

/// The store has said that an object does not exist.
fn is_object_missing(cause: &slatedb::Error) -> bool {
    matches!(store_error(cause), Some(object_store::Error::NotFound { .. }))
}

/// The store has said that it is not to be written to.
pub(super) fn is_refused(cause: &slatedb::Error) -> bool {
    matches!(store_error(cause), Some(object_store::Error::PermissionDenied { .. }))
}

/// An object of the database is too short.
fn shorter(cause: &slatedb::Error) -> Option<Shorter> {
    match store_error(cause)? {
        object_store::Error::NotSupported { source } => source.downcast_ref::<Shorter>().cloned(),
        _ => None,
    }
}

/// What an error of the database asks of the caller.
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
