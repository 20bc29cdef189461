//! Reads the ownership of a pool without taking it.

use super::{Manifest, NodeDir, TakeOver, Terms, check_available, check_not_removed, read_known};
use crate::chain::Chain;
use crate::store::Store;
use async_recursion::async_recursion;
use block::Result;
use block::seal::PoolKey;
use std::time::Duration;
use uuid::Uuid;

/// Asks whether the chain has a link above `number`, which the caller has read: for nodes that watch
/// a pool. Returns the highest number, or `None` if `number` is the newest. Costs one listing; the
/// link itself is not read.
///
/// # Errors
/// `Corrupt` if `number` is gone and nothing is above it: the store was rolled back or emptied.
/// `Unavailable` if the store does not answer, or its listing lacks an object that exists.
#[async_recursion]
pub async fn newer_than(store: &Store, number: u64) -> Result<Option<u64>> {
    let chain = Chain::new(store, "manifest");
    match chain.newest_from(number).await? {
        Some(highest) => Ok(Some(highest).filter(|highest| *highest > number)),
        None => Err(chain.gone(number)),
    }
}

/// Reads the newest manifest of a pool that was closed in order, so that its store has all of it.
/// `None` for a pool that this directory has open or would make: only an opening finds out what it
/// holds.
///
/// # Errors
/// Errors of [`super::Ownership::acquire`], which takes the pool. Nothing is written.
#[async_recursion]
pub async fn look(
    store: &Store,
    node: &NodeDir,
    key: &PoolKey,
    (pool, name): (Uuid, &str),
    retention: Duration,
) -> Result<Option<Manifest>> {
    let newest = read_known(&Chain::new(store, "manifest"), key, node).await?;
    node.check_not_rolled_back(pool, newest.as_ref())?;
    let Some(newest) = newest else { return Ok(None) };
    check_available(node, pool, &newest, TakeOver::ByQuorum)?;
    check_not_removed(name, Some(&newest), Terms { retention, ..Terms::default() })?;
    Ok(Some(newest).filter(|newest| newest.is_released))
}
