//! SlateDB as the metadata database: how it is opened, and what its errors mean.
//!
//! Invariants:
//! - Its own write-ahead log is off: the pool's write log is the log, and a commit is durable when
//!   its memtable was flushed. One write batch is in one memtable, so a commit is all or nothing.
//! - Its memory is bounded by [`DatabaseOptions`]: memtables, block cache, compaction buffers.
//! - The store failing for a while is waited out, never an error; a fenced writer is `Fenced`.

use block::{Error, ErrorKind};
use bytes::Bytes;
use object_store::ObjectStore;
use slatedb::config::{
    CompactionWorkerOptions, CompactorOptions, GarbageCollectorDirectoryOptions,
    GarbageCollectorOptions, Settings, SizeTieredCompactionSchedulerOptions,
};
use slatedb::db_cache::foyer::{FoyerCache, FoyerCacheOptions};
use slatedb::db_cache::{DbCache, SplitCache};
use slatedb::{CloseReason, Db, MergeOperator, MergeOperatorError};
use std::sync::Arc;
use std::time::Duration;

/// Folder of the database within the pool's prefix.
pub const FOLDER: &str = "metadata";

/// Bytes from which a memtable is written out by itself; a commit writes it out whatever its size.
/// Chosen by hand: above what one window's operands take.
const MEMTABLE_BYTES: usize = 16 << 20;

/// Tables of level 0 before a commit waits for compaction. Chosen by hand: a minute of commits.
const LEVEL_0_COUNT_MAX: usize = 64;

/// Memory and pace of the database.
#[derive(Clone, Debug)]
pub struct DatabaseOptions {
    /// Blocks, indexes and filters of tables kept in memory, in bytes.
    pub cache_bytes: u64,
    /// How often the manifest is read to notice compactions and a fence, and how often the compactor
    /// looks for work. Each look is a request to the store.
    pub poll_interval: Duration,
    /// Age before an unreferenced table is deleted. Hours, so that a paused owner, reader or
    /// compactor of the past finds what it needs or fails on the manifest.
    pub garbage_age: Duration,
    /// The store can replace an object only if it is unchanged (a local directory cannot).
    pub has_conditional_update: bool,
}

impl Default for DatabaseOptions {
    fn default() -> Self {
        DatabaseOptions {
            cache_bytes: 64 << 20,
            poll_interval: Duration::from_secs(2),
            garbage_age: Duration::from_secs(2 * 3600),
            has_conditional_update: true,
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

fn settings(options: &DatabaseOptions) -> Settings {
    let scheduler = SizeTieredCompactionSchedulerOptions {
        max_compaction_sources: 16,
        ..SizeTieredCompactionSchedulerOptions::default()
    };
    let garbage = Some(GarbageCollectorDirectoryOptions {
        interval: Some((options.garbage_age / 4).max(Duration::from_secs(1))),
        min_age: options.garbage_age,
        dry_run: false,
    });
    Settings {
        flush_interval: None,
        wal_enabled: false,
        manifest_poll_interval: options.poll_interval,
        // An outage of the store must not end the database.
        manifest_update_timeout: Duration::from_secs(365 * 24 * 3600),
        min_filter_keys: 64,
        max_unflushed_bytes: 4 * MEMTABLE_BYTES,
        l0_sst_size_bytes: MEMTABLE_BYTES,
        l0_max_ssts: LEVEL_0_COUNT_MAX,
        l0_max_ssts_per_key: LEVEL_0_COUNT_MAX,
        l0_flush_parallelism: 1,
        compactor_options: Some(CompactorOptions {
            poll_interval: options.poll_interval,
            manifest_update_timeout: Duration::from_secs(365 * 24 * 3600),
            max_concurrent_compactions: 2,
            scheduler_options: scheduler.into(),
            // 16 sources of 2 x 256 KiB: 8 MiB a compaction.
            worker: Some(CompactionWorkerOptions {
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
            manifest_options: garbage,
            wal_options: None,
            wal_fence_options: None,
            compacted_options: garbage,
            compactions_options: garbage,
            detach_options: None,
            boundary_files_enabled: options.has_conditional_update,
            ..GarbageCollectorOptions::default()
        }),
        ..Settings::default()
    }
}

/// Opens the database, creating it if there is none, and fences every earlier writer. Its background
/// tasks run on the runtime of the caller.
///
/// # Errors
/// As [`error`]. It does not return while the store is away: the caller probes and limits the time.
pub async fn open(
    store: Arc<dyn ObjectStore>,
    options: &DatabaseOptions,
) -> block::Result<Arc<Db>> {
    let cache = |bytes: u64| -> Arc<dyn DbCache> {
        Arc::new(FoyerCache::new_with_opts(FoyerCacheOptions { max_capacity: bytes, shards: 4 }))
    };
    // Filters and indexes are worth more than blocks: every lookup of an absent page needs them.
    let split = SplitCache::new()
        .with_block_cache(Some(cache(options.cache_bytes / 2)))
        .with_meta_cache(Some(cache(options.cache_bytes / 2)))
        .build();
    let db = Db::builder(FOLDER, store)
        .with_settings(settings(options))
        .with_db_cache(Arc::new(split), 0)
        .with_merge_operator(Arc::new(Append))
        .build()
        .await
        .map_err(|cause| error("open metadata database", cause))?;
    Ok(Arc::new(db))
}

/// What an error of the database asks of the caller.
#[must_use]
pub fn error(doing: impl Into<String>, cause: slatedb::Error) -> Error {
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
        let left = Append.merge(&key, Append.merge(&key, Some(a.clone()), b.clone()).ok(), c.clone());
        let right = Append.merge_batch(&key, Some(a), &[Append.merge(&key, Some(b), c).unwrap()]);
        assert_eq!(left.unwrap(), right.unwrap());
        assert!(Append.merge_batch(&key, None, &[]).is_err());
    }

    #[test]
    fn the_settings_are_valid() {
        settings(&DatabaseOptions::default()).validate().unwrap();
    }
}
