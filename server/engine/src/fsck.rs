//! The report of a walk of everything that a store holds of a pool.
//!
//! It says what is wrong; it changes nothing, and leaves the form for clients to the handlers.

use crate::config::PoolConfig;
use crate::copies::target::Target;
use crate::opening::check_store_dir_exists;
use crate::report::{PoolReport, without_key};
use crate::restore::{self, Restored};
use crate::tier_options::{check_data_stores, look_options, open_data_stores};
use crate::volume_keys;
use async_recursion::async_recursion;
use block::seal::PoolKey;
use block::{Error, ErrorKind, Result};
use control::keys::KeyRing;
use control::store::{Store, StoreOptions};
use tiering::{FsckOptions, Tier};
use uuid::Uuid;

/// Walks the contents of the store without opening the pool: its owner is not disturbed, and nothing is changed. Data
/// that only a write log holds is not checked.
///
/// # Errors
/// `NotFound` for a store without a pool; those of reading the store and the key.
#[async_recursion]
pub async fn fsck(config: &PoolConfig) -> Result<PoolReport> {
    check_store_dir_exists(config)?;
    let store = Store::open(&config.store_url, &StoreOptions::default())?;
    let keys = KeyRing::open(&store, &config.keys).await?;
    fsck_of(config, keys.pool(), &keys.newest().key).await
}

/// Like [`fsck`], with an open key ring: the secret that opened it may be gone or replaced by now.
#[async_recursion]
pub async fn fsck_of(config: &PoolConfig, pool: Uuid, key: &PoolKey) -> Result<PoolReport> {
    check_store_dir_exists(config)?;
    let store = Store::open(&config.store_url, &StoreOptions::default())?;
    let Some(manifest) = control::manifest::read(&store, key).await? else {
        let what = format!("check the pool in {}: it was never opened", store.url());
        return Err(Error::new(ErrorKind::NotFound, what));
    };
    // A restored pool may still have parts that only the copy holds.
    let volume_keys = volume_keys::load(&store, key, pool).await?;
    let (store, restored) = restore::store_of(store, key, pool, &config.clock).await?;
    let mut options = look_options(config, &store, pool, key, manifest.epoch);
    options.restored = restored.as_ref().and_then(Restored::objects);
    options.excluded = restored.as_ref().and_then(Restored::lacks);
    options.volume_keys = volume_keys;
    let lineage = restored.as_ref().map(|restored| restored.origin.lineage);
    let stores = open_data_stores(config, &store, &mut options, lineage, None).await?;
    let tier = Tier::open_read_only(options).await?;
    check_data_stores(&tier, stores.is_some(), restored.is_some())?;
    fsck_tier(tier).await
}

async fn fsck_tier(tier: Tier) -> Result<PoolReport> {
    let report = tier.fsck(FsckOptions::default()).await?;
    let volumes = tier.volume_records();
    let without_key = without_key(&volumes, tier.volume_keys());
    tier.close().await?;
    Ok(PoolReport { volume_count: volumes.len(), report, without_key })
}

/// Like [`fsck`], for the newest state of a copy, which a pin preserves meanwhile.
///
/// # Errors
/// `NotFound` if there is no copy, or no whole state yet; those of reading the store and the key.
#[async_recursion]
pub async fn fsck_copy(
    config: &PoolConfig,
    url: &str,
    env_prefix: Option<&str>,
) -> Result<PoolReport> {
    let target = Target::existing(url, env_prefix).await?;
    let keys = target.open_keys(&config.keys).await?;
    let (pool, key) = (keys.pool(), keys.newest().key.clone());
    let (pin, state) = match target.pin_newest(&key, pool, true).await {
        Ok((pin, state)) => (Some(pin), state),
        Err(error) if error.kind() == ErrorKind::Denied => {
            // The state can be read for as long as replaced objects stay.
            let state = target.newest(&key, pool).await?;
            (None, state.ok_or(error)?)
        }
        Err(error) => return Err(error),
    };
    let mut options = look_options(config, &target.view(&state), pool, &key, state.epoch);
    options.excluded = state.excluded();
    let checked = async {
        options.volume_keys = target.volume_keys(&key, pool).await?;
        fsck_tier(Tier::open_read_only(options).await?).await
    };
    let checked = checked.await;
    if let Some(pin) = pin {
        target.unpin(pin).await;
    }
    checked
}
