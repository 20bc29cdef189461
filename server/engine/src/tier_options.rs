//! Options of the data tier, from the settings of a pool: to serve it, to read it, or to look at it.

use crate::config::{MAP_BYTES_MIN, METADATA_BYTES_MIN, PoolConfig};
use crate::data_stores::{DataStoresAsked, OpenDataStores};
use block::seal::PoolKey;
use block::{Epoch, Error, ErrorKind, Result};
use control::manifest::Ownership;
use control::store::Store;
use std::sync::Arc;
use std::time::Duration;
use tiering::segment_store::ObjectSegments;
use tiering::{Tier, TierOptions};
use uuid::Uuid;

/// The index of deduplication gets one part in this many of the map's share of the memory. Chosen
/// by hand: at the default budget it knows the blocks of 700 MiB, and finds those of far more by
/// the lists of their segments.
const DEDUP_INDEX_PART: u64 = 8;
/// Interval between checks for compaction of the metadata in a local directory, where a check costs
/// no request. With a small log, commits come every few milliseconds and wait for compaction.
/// Chosen by hand.
const LOCAL_POLL: Duration = Duration::from_millis(500);

/// Options to serve a data tier as its owner.
pub(crate) fn tier_options(
    config: &PoolConfig,
    store: &Store,
    pool: Uuid,
    key: &PoolKey,
    epoch: Epoch,
) -> TierOptions {
    let data = &config.data;
    let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut options = TierOptions::new(store.bulk(), pool.into_bytes(), key.clone(), epoch);
    options.clock = config.clock.clone();
    options.algorithm = data.algorithm;
    options.zstd_level = data.zstd_level;
    options.segment_bytes = bytes(data.segment_bytes);
    options.frames.memory_bytes = data.memory_cache_bytes;
    options.frames.stream_bytes = data.stream_bytes;
    options.frames.cache = data.cache.clone();
    // The index of deduplication is a part of the map's share; it is empty if no volume is
    // deduplicated.
    let index_bytes = data.map_cache_bytes / DEDUP_INDEX_PART;
    options.dedup_index_bytes = bytes(index_bytes);
    options.map.page_cache_bytes = bytes(data.map_cache_bytes - index_bytes);
    options.database.cache_bytes = data.metadata_cache_bytes;
    if store.local_dir().is_some() {
        options.database.has_conditional_update = false;
        options.database.poll_interval = LOCAL_POLL;
    }
    options
}

/// Options to look into a data tier that this process does not serve.
pub fn look_options(
    config: &PoolConfig,
    store: &Store,
    pool: Uuid,
    key: &PoolKey,
    epoch: u64,
) -> TierOptions {
    let mut options = reading_options(config, store, pool, key, epoch);
    // A walk reads everything once. It may run in a daemon whose own caches have the memory.
    options.frames.memory_bytes = 0;
    options.frames.stream_bytes = 0;
    options.map.page_cache_bytes = usize::try_from(MAP_BYTES_MIN).expect("it is small");
    options.database.cache_bytes = METADATA_BYTES_MIN;
    options
}

/// Options to serve a data tier that has no writer: with memory, but without the cache on disk, which belongs to the
/// daemon of the configured directory.
pub fn reading_options(
    config: &PoolConfig,
    store: &Store,
    pool: Uuid,
    key: &PoolKey,
    epoch: u64,
) -> TierOptions {
    let mut options = tier_options(config, store, pool, key, Epoch(epoch));
    options.frames.cache = None;
    options
}

/// Opens the data stores of a pool and hands them to its data tier. `options` are those of the tier, with the
/// conditions and the key; `lineage` is that of a restored pool. Without
/// `owner` nothing is changed.
///
/// # Errors
/// Those of [`crate::data_stores::DataStores::open`].
pub(crate) async fn open_data_stores(
    config: &PoolConfig,
    store: &Store,
    options: &mut TierOptions,
    lineage: Option<Uuid>,
    owner: Option<&Ownership>,
) -> Result<Option<Arc<dyn OpenDataStores>>> {
    let pool = Uuid::from_bytes(options.pool);
    let asked = DataStoresAsked {
        store,
        key: &options.pool_key,
        pool,
        lineage: lineage.unwrap_or(pool),
        objects: ObjectSegments::new(store.bulk()),
        owner,
        writer: owner.map(Ownership::epoch),
        conditions: options.conditions.clone(),
        clock: config.clock.clone(),
    };
    let opened = config.data_stores.open(asked).await?;
    options.segments = opened.as_ref().map(|stores| stores.segments());
    options.map.in_fragments = opened.is_some();
    options.map.in_tiers =
        opened.as_ref().is_some_and(|stores| stores.status().policy.tiers.is_moving());
    Ok(opened)
}

/// Checks that the list of a pool's data stores is there if its segments need it. The objects of a restored pool are all it
/// may have.
///
/// # Errors
/// `Corrupt` if it is gone.
pub(crate) fn check_data_stores(tier: &Tier, is_listed: bool, is_restored: bool) -> Result<()> {
    if !tier.has_fragments() || is_listed || is_restored {
        return Ok(());
    }
    let what = "open the pool: its segments are in fragments, and the list of its data stores is gone from the store: its \
                objects below data-stores/. Bring them back; nothing was changed";
    Err(Error::new(ErrorKind::Corrupt, what))
}
