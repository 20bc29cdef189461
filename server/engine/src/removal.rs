//! Removes a whole pool, restores it, and deletes it for good.
//!
//! Invariants:
//! - A pool is removed only if the store holds all of its data, and only by its owner: no other
//!   pool is removed in its place.
//! - A purge deletes objects only of a pool that is removed and marked as being purged, so that
//!   nothing can restore it meanwhile.
//! - A purge deletes data first, then the key rings, and the newest manifest last. Wherever it is
//!   cut short, the remains say that a purge has begun, and the next purge continues.
//! - Only objects below the folders that spindle itself creates in the pool's prefix are deleted.

use crate::clock;
use crate::config::PoolConfig;
use crate::data_stores::{DataStoresAsked, FRAGMENTS};
use crate::open_pool::OpenPool;
use crate::opening;
use crate::opening::Opening;
use async_recursion::async_recursion;
use block::quantities;
use block::seal::PoolKey;
use block::{Conditions, Epoch, Error, ErrorKind, Result};
use control::keys::{KeyRing, KeySource};
use control::manifest::{self, Manifest};
use control::store::{Reason, Store, StoreOptions, is_folder_marker};
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path as ObjectPath;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use std::sync::Arc;
use std::time::Duration;
use tiering::listing;
use tiering::segment_store::ObjectSegments;
use uuid::Uuid;

/// The folders with the data of a pool, and with leftovers of the probe of a store.
const DATA_FOLDERS: [&str; 3] = ["segments", "metadata", "probe"];
/// Objects deleted at a time: the most that S3 takes in one request.
const DELETE_COUNT_MAX: usize = 1000;
/// Walks of a folder that may find something. Chosen by hand: a job of the last owner may have
/// completed an upload during the first.
const WALK_COUNT_MAX: u32 = 4;

/// A pool that was removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolRemoved {
    /// Its name.
    pub name: String,
    /// Its identity.
    pub pool: Uuid,
    /// Time of the removal, in seconds since 1970.
    pub removed_at: u64,
    /// Earliest time of a purge, unless `--now` asks for it.
    pub purge_at: u64,
}

/// A pool that was restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolRestored {
    /// Its name.
    pub name: String,
    /// Its identity.
    pub pool: Uuid,
    /// Volumes in it, without removed ones.
    pub volume_count: u64,
}

/// A pool that is deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolPurged {
    /// Its name.
    pub name: String,
    /// Its identity.
    pub pool: Uuid,
    /// Objects that this purge deleted.
    pub object_count: u64,
    /// Their bytes.
    pub object_bytes: u64,
}

/// Moves everything to the store and marks the pool there as removed. `check_detached` refuses if a
/// volume is attached.
///
/// # Errors
/// Those of opening the pool and of `check_detached`, and those that keep data from reaching the
/// store. The pool is not removed then.
pub async fn remove(
    config: &PoolConfig,
    check_detached: impl FnOnce(&OpenPool) -> Result<()>,
) -> Result<PoolRemoved> {
    let open = opening::open(config, Opening::Existing).await?;
    let Manifest { name, pool, .. } = Manifest::clone(&open.ownership.manifest());
    // The check must follow the opening: only while the pool is open here can no daemon attach
    // anything.
    if let Err(error) = check_detached(&open) {
        open.close().await?;
        return Err(error);
    }
    let removed_at = open.remove().await?;
    let retention = config.retention;
    Ok(PoolRemoved { name, pool, removed_at, purge_at: purge_at(removed_at, retention) })
}

/// Opens a removed pool, which brings it back into use, and releases it.
///
/// # Errors
/// Those of opening it; `Invalid` for a pool that is not removed.
#[async_recursion]
pub async fn restore(config: &PoolConfig) -> Result<PoolRestored> {
    let open = opening::open(config, Opening::Removed).await?;
    let Manifest { name, pool, .. } = Manifest::clone(&open.ownership.manifest());
    let volume_count = open.pool.volumes().len() as u64;
    open.close().await?;
    Ok(PoolRestored { name, pool, volume_count })
}

/// Deletes a removed pool from the store; with `now`, before its retention time has passed.
///
/// # Errors
/// `Invalid` for a pool that is not removed, `Busy` for one that is still retained; those of the
/// store and of the key. A purge that was cut short can be repeated.
#[async_recursion]
pub async fn purge(config: &PoolConfig, now: bool) -> Result<PoolPurged> {
    opening::check_store_dir_exists(config)?;
    let store = Store::open(&config.store_url, &StoreOptions::default())?;
    let kept = Kept {
        retention: config.retention,
        wall_seconds: config.clock.unix_seconds(),
        proven_seconds: clock::proven_in(&*config.clock, &config.dir),
    };
    purge_store(&store, &config.keys, kept, now, Some(config)).await
}

/// The facts that decide whether a removed pool is still retained.
#[derive(Clone, Copy, Debug)]
struct Kept {
    retention: Duration,
    /// The wall clock, in seconds since the Unix epoch.
    wall_seconds: u64,
    /// The proven time, if it is known: a clock that has jumped purges nothing early.
    proven_seconds: Option<u64>,
}

async fn purge_store(
    store: &Store,
    source: &KeySource,
    kept: Kept,
    now: bool,
    config: Option<&PoolConfig>,
) -> Result<PoolPurged> {
    let manifest = begin(store, source, kept, now).await?;
    let mut purged =
        PoolPurged { name: manifest.name, pool: manifest.pool, object_count: 0, object_bytes: 0 };
    let deleted = async {
        if let Some(config) = config {
            delete_from_data_stores(config, store, Epoch(manifest.epoch), &mut purged).await?;
        }
        delete_all(store, manifest.number, &mut purged).await
    };
    if let Err(error) = deleted.await {
        let what = format!(
            "purge pool {}: cut short after {} objects; it can no longer be restored. Run `spindle \
             pool purge` again once the cause is gone",
            purged.name, purged.object_count
        );
        return Err(Error::with_source(error.kind(), what, error));
    }
    Ok(purged)
}

/// Makes sure that the pool may be purged and that nothing restores it. Returns its newest
/// manifest.
async fn begin(store: &Store, source: &KeySource, kept: Kept, now: bool) -> Result<Manifest> {
    if !KeyRing::exists(store).await? {
        // A purge that was cut short leaves manifests without a key ring. Without a key nothing
        // else is believed.
        return match manifest::read_unverified(store).await? {
            Some(manifest) if manifest.is_purging => Ok(manifest),
            _ => Err(Error::new(
                ErrorKind::NotFound,
                format!("purge the pool in {}: the store holds no pool", store.url()),
            )),
        };
    }
    let keys = KeyRing::open(store, source).await?;
    let key = &keys.newest().key;
    let newest = manifest::read(store, key).await?.filter(|newest| newest.pool == keys.pool());
    let Some((newest, removed_at)) = newest.and_then(|newest| {
        let removed_at = newest.removed_at?;
        Some((newest, removed_at))
    }) else {
        let what = format!(
            "purge the pool in {}: it is not removed; `spindle pool rm` does that first",
            store.url()
        );
        return Err(Error::new(ErrorKind::Invalid, what));
    };
    if newest.is_purging {
        leave_origin(store, key, newest.pool).await?;
        return Ok(newest);
    }
    let purge_at = purge_at(removed_at, kept.retention);
    let passed = kept.proven_seconds.map_or(kept.wall_seconds, |at| at.min(kept.wall_seconds));
    if !now && passed < purge_at && kept.wall_seconds >= purge_at {
        let what = format!(
            "purge pool {}: it is kept until {}, which the clock of this machine says has passed; by the time that \
             has passed it would be {}, so the clock has jumped; nothing was deleted. Check the clock. To delete the \
             pool all the same, beyond recovery, use --now",
            newest.name,
            quantities::utc(purge_at),
            quantities::utc(passed)
        );
        return Err(Error::new(ErrorKind::Busy, what));
    }
    if !now && passed < purge_at {
        let what = format!(
            "purge pool {}: it was removed at {} and is kept until {}; nothing was deleted. To delete \
             it all the same, beyond recovery, use --now",
            newest.name,
            quantities::utc(removed_at),
            quantities::utc(purge_at)
        );
        return Err(Error::new(ErrorKind::Busy, what));
    }
    let purging = manifest::begin_purge(store, key, &newest).await?;
    leave_origin(store, key, newest.pool).await?;
    Ok(purging)
}

/// Unpins the copy from which the pool was restored, as the pool no longer needs it.
async fn leave_origin(store: &Store, key: &PoolKey, pool: Uuid) -> Result<()> {
    if let Some(origin) = crate::restore::read(store, key, pool).await? {
        crate::restore::leave(&origin).await;
    }
    Ok(())
}

fn purge_at(removed_at: u64, retention: Duration) -> u64 {
    removed_at.saturating_add(retention.as_secs())
}

/// Deletes the fragments, as far as their stores answer. Fragments of others stay, and nothing opens them once
/// the keys are gone.
async fn delete_from_data_stores(
    config: &PoolConfig,
    store: &Store,
    epoch: Epoch,
    purged: &mut PoolPurged,
) -> Result<()> {
    if !KeyRing::exists(store).await? {
        return Ok(()); // an earlier purge was here
    }
    let keys = KeyRing::open(store, &config.keys).await?;
    let (key, pool) = (&keys.newest().key, keys.pool());
    let origin = crate::restore::read(store, key, pool).await?;
    let asked = DataStoresAsked {
        store,
        key,
        pool,
        lineage: origin.map_or(pool, |origin| origin.lineage),
        objects: ObjectSegments::new(store.bulk()),
        owner: None,
        writer: Some(epoch),
        conditions: Conditions::default(),
        clock: config.clock.clone(),
    };
    let Some(stores) = config.data_stores.open(asked).await? else { return Ok(()) };
    stores.look().await;
    let failures = stores.status().stores.into_iter().map(|store| store.failure);
    for ((place, identity), failure) in stores.places().into_iter().zip(failures) {
        let objects = place.bulk();
        let deleted = async {
            if let Some(why) = failure {
                return Err(Error::new(ErrorKind::Unavailable, why));
            }
            place.clean_unfinished(FRAGMENTS);
            for folder in [FRAGMENTS, "probe"] {
                delete_folder(&place, &objects, folder, None, purged).await?;
            }
            let deleted = objects.delete(&identity).await;
            deleted.map_err(|error| place.explain("delete the identity of a data store", error))
        };
        if let Err(error) = deleted.await {
            tracing::warn!(
                store = place.url(),
                error = %error.chain(),
                "a data store was not emptied; what is left there is of the pool that was purged"
            );
        }
    }
    Ok(())
}

/// Deletes everything, the manifest `newest` last.
async fn delete_all(store: &Store, newest: u64, purged: &mut PoolPurged) -> Result<()> {
    let bulk = store.bulk();
    store.clean_unfinished(tiering::segment::FOLDER);
    for folder in DATA_FOLDERS {
        delete_folder(store, &bulk, folder, None, purged).await?;
    }
    let control = store.control();
    delete_folder(store, &control, crate::restore::FOLDER, None, purged).await?;
    delete_folder(store, &control, crate::copies::list::FOLDER, None, purged).await?;
    delete_folder(store, &control, crate::data_stores::FOLDER, None, purged).await?;
    delete_folder(store, &control, crate::scrub::FOLDER, None, purged).await?;
    delete_folder(store, &control, crate::failed_log::FOLDER, None, purged).await?;
    delete_folder(store, &control, crate::volume_keys::FOLDER, None, purged).await?;
    delete_folder(store, &control, "keyring", None, purged).await?;
    let last = ObjectPath::from(manifest::object_name(newest));
    delete_folder(store, &control, "manifest", Some(&last), purged).await?;
    delete_folder(store, &control, "manifest", None, purged).await
}

/// Deletes every object below `folder` except `spared`, and walks the folder until nothing is
/// found. An object may be missing from one listing, and once the keys are gone nothing finds it
/// again.
async fn delete_folder(
    store: &Store,
    objects: &Arc<dyn ObjectStore>,
    folder: &str,
    spared: Option<&ObjectPath>,
    purged: &mut PoolPurged,
) -> Result<()> {
    let prefix = ObjectPath::from(folder);
    let look_count = if store.local_dir().is_some() { 1 } else { listing::EMPTY_LOOK_COUNT };
    let (mut walk_count, mut empty_count) = (0, 0);
    while walk_count < WALK_COUNT_MAX {
        listing::pause_before(empty_count).await;
        let listed = listing::list(objects, Some(&prefix));
        // The marker of a folder has another name than the listing shows, and is empty.
        let is_wanted = |meta: &ObjectMeta| {
            Some(&meta.location) != spared && !(meta.location == prefix && is_folder_marker(meta))
        };
        let wanted = listed.try_filter(|meta| std::future::ready(is_wanted(meta)));
        let mut chunks = wanted.try_chunks(DELETE_COUNT_MAX);
        let (mut is_empty, mut failure) = (true, None);
        while let Some(chunk) = chunks.next().await {
            // Objects of an incomplete chunk, listed before an error, wait for the next purge.
            let chunk = chunk.map_err(|error| store.explain(&format!("list {folder}"), error.1))?;
            is_empty = false;
            failure = failure.or(delete_objects(store, objects, chunk, purged).await.err());
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        match is_empty {
            true => empty_count += 1,
            false => (walk_count, empty_count) = (walk_count + 1, 0),
        }
        if empty_count == look_count {
            return Ok(());
        }
    }
    let what = format!(
        "delete what is below {folder}/: new objects appear each time. Stop the program that still \
         writes to {}",
        store.url()
    );
    Err(Error::new(ErrorKind::Busy, what))
}

async fn delete_objects(
    store: &Store,
    objects: &Arc<dyn ObjectStore>,
    chunk: Vec<ObjectMeta>,
    purged: &mut PoolPurged,
) -> Result<()> {
    // The answers arrive in the order of the names.
    let sizes: Vec<u64> = chunk.iter().map(|meta| meta.size).collect();
    let names = futures::stream::iter(chunk.into_iter().map(|meta| Ok(meta.location))).boxed();
    let mut deleted = objects.delete_stream(names).zip(futures::stream::iter(sizes));
    let mut failure = None;
    while let Some((outcome, size)) = deleted.next().await {
        match outcome {
            Ok(_) => {
                purged.object_count += 1;
                purged.object_bytes += size;
            }
            // Another purge has deleted it first.
            Err(error) if Reason::of(&error) == Reason::NotFound => {}
            // The objects behind it are deleted all the same.
            Err(error) if failure.is_none() => {
                failure = Some(store.explain("delete objects of the pool", error));
            }
            Err(_) => {}
        }
    }
    failure.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests;
