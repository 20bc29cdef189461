//! A pool that was closed in order, opened for reading: commands report its state from the store
//! alone, without taking it.
//!
//! Invariants:
//! - Nothing is written to the store, and a daemon that opens the pool meanwhile is not disturbed.
//! - The store has all of such a pool, so no write log is needed.

use crate::config::PoolConfig;
use crate::copies::{CopyStatus, list};
use crate::data_stores::OpenDataStores;
use crate::opening::check_pool_is_there;
use crate::pool::NamedOrigin;
use crate::record::{VolumeRecord, VolumeState};
use crate::restore::{self, Restored};
use crate::scrub::ScrubStatus;
use crate::snapshot::SnapshotRecord;
use crate::tier_options::{check_data_stores, look_options, open_data_stores};
use crate::volume_keys;
use async_recursion::async_recursion;
use block::seal::PoolKey;
use block::{Conditions, ErrorKind, Lsn, Result, VolumeId};
use control::keys::KeyRing;
use control::manifest::{self, Manifest, NodeDir};
use control::store::{Store, StoreOptions};
use std::collections::BTreeMap;
use std::sync::Arc;
use tiering::Tier;

/// A pool that was closed in order, opened for reading.
pub struct ClosedPool {
    /// The settings that it was looked at with.
    pub config: PoolConfig,
    /// Held so that no other process opens the pool from this directory meanwhile.
    _node: NodeDir,
    /// The store of the pool.
    pub store: Store,
    /// Its key ring.
    pub keys: KeyRing,
    /// Its newest manifest.
    pub manifest: Manifest,
    /// Its data tier, opened for reading.
    pub tier: Tier,
    /// Present for a pool that was restored from a copy.
    pub restored: Option<Restored>,
    /// The data stores, if the pool's segments are there.
    pub data_stores: Option<Arc<dyn OpenDataStores>>,
    /// Number of the document in which a key of a volume was destroyed last, or 0.
    pub keys_destroyed_in: u64,
    /// Conditions that the look has found.
    pub conditions: Conditions,
}

impl ClosedPool {
    fn key(&self) -> &PoolKey {
        &self.keys.newest().key
    }

    /// Records of all volumes, including restorable ones.
    ///
    /// # Errors
    /// `Corrupt` for a record that cannot be read.
    pub fn records(&self) -> Result<Vec<VolumeRecord>> {
        let mut records = Vec::new();
        for (id, bytes) in self.tier.volume_records() {
            let record = VolumeRecord::decode(&bytes);
            let record =
                record.map_err(|error| error.context(format!("read the record of volume {id}")))?;
            if record.state != VolumeState::Purged {
                records.push(record);
            }
        }
        Ok(records)
    }

    /// Records of all snapshots, by volume and LSN.
    ///
    /// # Errors
    /// `Corrupt` for a record that cannot be read.
    pub fn snapshot_records(&self) -> Result<BTreeMap<(u32, Lsn), SnapshotRecord>> {
        let decode = |(volume, lsn, bytes): (VolumeId, Lsn, bytes::Bytes)| {
            let record = SnapshotRecord::decode(&bytes).map_err(|error| {
                error.context(format!("read a snapshot record of volume {volume}"))
            })?;
            Ok(((volume.0, lsn), record))
        };
        self.tier.snapshots().into_iter().map(decode).collect()
    }

    /// The snapshot that a volume depends on, if any. `names` are those of the volumes, by id.
    #[must_use]
    pub fn origin(
        &self,
        record: &VolumeRecord,
        names: &BTreeMap<u32, &str>,
        snapshots: &BTreeMap<(u32, Lsn), SnapshotRecord>,
    ) -> Option<NamedOrigin> {
        let origin = self.tier.origin(VolumeId(record.id))?;
        let volume = names.get(&origin.volume.0).copied().unwrap_or("?");
        let name = match snapshots.get(&(origin.volume.0, origin.at)) {
            Some(snapshot) => format!("{volume}@{}", snapshot.name),
            None => format!("{volume} at LSN {}", origin.at),
        };
        let done_bytes = origin.done_bytes.min(record.size_bytes);
        Some(NamedOrigin { name, promoted_bytes: origin.is_promoted.then_some(done_bytes) })
    }

    /// State of the copies. If it cannot be read, a condition says so, too.
    ///
    /// # Errors
    /// Those of reading the store.
    #[async_recursion]
    pub async fn copies(&self) -> Result<Vec<CopyStatus>> {
        let specs = list::read(&self.store, self.key(), self.keys.pool()).await;
        let specs =
            specs.inspect_err(|error| crate::copies::show_unreadable(&self.conditions, error))?;
        let copies: Vec<CopyStatus> = specs
            .into_iter()
            .map(|spec| CopyStatus::unserved(spec, self.keys_destroyed_in > 0))
            .collect();
        for copy in &copies {
            crate::copies::show_erased_keys(
                &self.conditions,
                &copy.spec.url,
                copy.has_destroyed_keys,
            );
        }
        Ok(copies)
    }

    /// State of the scrub. If it cannot be read, a condition says so, too.
    ///
    /// # Errors
    /// Those of reading the store.
    #[async_recursion]
    pub async fn scrub(&self) -> Result<ScrubStatus> {
        let record = crate::scrub::read(&self.store, self.key(), self.keys.pool()).await;
        let record =
            record.inspect_err(|error| crate::scrub::show_unreadable(&self.conditions, error))?;
        crate::scrub::show_bad(&self.conditions, record.as_ref());
        Ok(ScrubStatus { record, is_serving: false, failure: None })
    }

    /// Raises the conditions that the state of the pool causes.
    ///
    /// # Errors
    /// `Corrupt` for a record of a volume that cannot be read.
    #[async_recursion]
    pub async fn raise_conditions(&self) -> Result<()> {
        // If these cannot be read, a condition says so.
        let _ = (self.scrub().await, self.copies().await);
        for record in &self.records()? {
            let has_key = self.tier.volume_keys().has(record.key());
            crate::conditions::show_record(&self.conditions, record, has_key);
        }
        crate::conditions::show_recovery_key(&self.conditions, self.keys.has_recovery());
        Ok(())
    }
}

/// Looks at the configured pool if it was closed in order. `None` if only an opening can find out
/// what it holds: this directory has it open, or nothing was made yet.
///
/// # Errors
/// Errors of [`crate::opening::open`], which takes the pool.
#[async_recursion]
pub async fn look(config: &PoolConfig) -> Result<Option<ClosedPool>> {
    let node = check_pool_is_there(config).await?;
    let store = Store::open(&config.store_url, &StoreOptions::default())?;
    let keys = KeyRing::open(&store, &config.keys).await?;
    let (pool, key) = (keys.pool(), keys.newest().key.clone());
    let retention = config.retention;
    let named = (pool, config.name.as_str());
    let newest = manifest::look(&store, &node, &key, named, retention).await?;
    let Some(manifest) = newest else { return Ok(None) };
    let (keys_of_volumes, keys_destroyed_in) =
        volume_keys::load_with_destroyed(&store, &key, pool).await?;
    let (with_copy, restored) = restore::store_of(store.clone(), &key, pool, &config.clock).await?;
    let mut options = look_options(config, &with_copy, pool, &key, manifest.epoch);
    let conditions = Conditions::default();
    options.conditions = conditions.clone();
    options.volume_keys = keys_of_volumes;
    options.excluded = restored.as_ref().and_then(Restored::excluded);
    let lineage = restored.as_ref().map(|restored| restored.origin.lineage);
    let data_stores = open_data_stores(config, &with_copy, &mut options, lineage, None).await?;
    let tier = match Tier::open_for_look(options).await {
        Ok(tier) => tier,
        // An opening ended before there was any metadata.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    check_data_stores(&tier, data_stores.is_some(), restored.is_some())?;
    let config = config.clone();
    Ok(Some(ClosedPool {
        config,
        _node: node,
        store,
        keys,
        manifest,
        tier,
        restored,
        data_stores,
        keys_destroyed_in,
        conditions,
    }))
}
