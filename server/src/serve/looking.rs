//! Inspects a pool without taking ownership or writing.

use crate::closed_pool::ClosedPool;
use crate::config::Config;
use block::{Conditions, ErrorKind, Result};
use control::keys::KeyRing;
use control::manifest;
use control::store::{Store, StoreOptions};
use engine::opening::{check_pool_is_there, look_options};
use engine::restore;
use engine::volume_keys;
use tiering::Tier;

/// Looks at the configured pool if it was closed in order. `None` if only an opening can find out
/// what it holds: this directory has it open, or nothing was made yet.
///
/// # Errors
/// Errors of [`super::open`], which takes the pool.
pub(crate) async fn look(config: &Config) -> Result<Option<ClosedPool>> {
    let node = check_pool_is_there(&config.pool()).await?;
    let store = Store::open(config.store_url(), &StoreOptions::default())?;
    let keys = KeyRing::open(&store, &config.key_source()).await?;
    let (pool, key) = (keys.pool(), keys.newest().key.clone());
    let retention = config.settings().deleted_retention.duration();
    let named = (pool, config.settings().name.as_str());
    let newest = manifest::look(&store, &node, &key, named, retention).await?;
    let Some(manifest) = newest else { return Ok(None) };
    let (keys_of_volumes, keys_destroyed_in) =
        volume_keys::load_with_destroyed(&store, &key, pool).await?;
    let (with_copy, restored) = restore::store_of(store.clone(), &key, pool).await?;
    let mut options = look_options(&config.pool(), &with_copy, pool, &key, manifest.epoch);
    let conditions = Conditions::default();
    options.conditions = conditions.clone();
    options.volume_keys = keys_of_volumes;
    options.left_out = restored.as_ref().and_then(restore::Restored::left_out);
    let tier = match Tier::open_for_look(options).await {
        Ok(tier) => tier,
        // An opening ended before there was any metadata.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let config = config.clone();
    Ok(Some(ClosedPool {
        config,
        _node: node,
        store,
        keys,
        manifest,
        tier,
        restored,
        keys_destroyed_in,
        conditions,
    }))
}
