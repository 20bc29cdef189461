//! Volumes with a key of their own: creates them, and erases them by destroying the key.
//!
//! Invariants:
//! - The key is durable before the volume's record, and is destroyed only after the store knows
//!   that the volume is purged. The next purge finishes an interrupted removal.
//! - A key is destroyed when no volume that is present or restorable uses it.
//! - A volume whose key is gone is not served.

use super::Pool;
use super::snapshots::some_of;
use crate::record::{VolumeRecord, VolumeState};
use async_recursion::async_recursion;
use block::{Error, ErrorKind, Result, VolumeId};
use std::collections::BTreeSet;
use std::time::Duration;
use tiering::KeyId;

/// Longest time that erasing a volume waits for the store. Chosen by hand.
const STORE_PATIENCE: Duration = Duration::from_secs(60);

impl VolumeRecord {
    /// Key that the volume's data is sealed with.
    #[must_use]
    pub fn key(&self) -> KeyId {
        KeyId(self.dedicated_key)
    }
}

impl Pool {
    /// Checks that the key of the volume is present.
    ///
    /// # Errors
    /// `Denied` if it is gone; the message says what to do.
    pub(crate) fn check_key(&self, volume: VolumeId) -> Result<()> {
        self.shared.check_key(volume)
    }

    /// Purges a volume and destroys its dedicated key, so that its data cannot be read any more from any
    /// copy. Also works for a volume that was already removed, or purged without destroying the
    /// key.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` for a volume without a dedicated key; `Busy`, naming the other users
    /// of the key; `Unavailable` while the store does not answer; errors of the log and the store,
    /// after which the call can be repeated.
    #[async_recursion]
    pub async fn erase_volume(&self, name: &str) -> Result<VolumeRecord> {
        let _one_at_a_time = self.changes.lock().await;
        let record = self.to_be_erased(name)?;
        let key = record.key();
        if key.is_pool() {
            let what = format!(
                "erase volume {name}: it has no dedicated key, which only `spindle volume create --dedicated-key` gives; \
                 `spindle volume rm --now` removes it for good, and its data leaves the store after a while"
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let users = self.others_under(key, record.id);
        if !users.is_empty() {
            let what = format!(
                "erase volume {name}: other volumes are under the same key ({}); remove them with `spindle volume rm NAME \
                 --now` first",
                some_of(&users)
            );
            return Err(Error::new(ErrorKind::Busy, what));
        }
        self.check_store("erase a volume")?;
        let record = match record.state {
            VolumeState::Purged => record,
            VolumeState::Present | VolumeState::Removed { .. } => {
                self.remove_alone(name, true).await?
            }
        };
        self.shared.pass("erase-purged")?;
        let destroyed = async {
            // If the log is lost after this, the volume must not come back without its key.
            let lsn = self.shared.log.flush().await?;
            let destaged = tokio::time::timeout(STORE_PATIENCE, self.shared.wait_destaged(lsn));
            destaged.await.map_err(|_| {
                let what =
                    format!("the store did not record the removal within {STORE_PATIENCE:?}");
                Error::new(ErrorKind::Unavailable, what)
            })??;
            self.destroy_keys(&BTreeSet::from([key])).await
        };
        destroyed.await.map_err(|error| {
            error.context(format!(
                "erase volume {name}: it is removed, but its key may still exist; repeat the \
                 command"
            ))
        })?;
        tracing::info!(
            volume = %name,
            "the pool erased the volume and destroyed its dedicated key"
        );
        Ok(record)
    }

    /// Finds the volume of that name. A present volume takes precedence over a removed one, and
    /// that over a purged one whose key is left.
    fn to_be_erased(&self, name: &str) -> Result<VolumeRecord> {
        if let Some(volume) = self.volume(name) {
            return Ok(volume.record());
        }
        if let Some(record) = self.removed(name) {
            return Ok(record);
        }
        let volumes = self.volumes.lock();
        let keys = self.shared.tier.volume_keys();
        let is_it = |record: &&VolumeRecord| {
            record.name == name && !record.key().is_pool() && keys.has(record.key())
        };
        let found = volumes.records.values().rfind(is_it).cloned();
        drop(volumes);
        found.ok_or_else(|| self.why_not(name))
    }

    /// Lists the present and restorable volumes under a key, except one.
    fn others_under(&self, key: KeyId, id: u32) -> Vec<String> {
        let volumes = self.volumes.lock();
        let named = |record: &VolumeRecord| {
            if record.key() != key || record.id == id {
                return None;
            }
            match record.state {
                VolumeState::Present => Some(record.name.clone()),
                VolumeState::Removed { .. } => {
                    Some(format!("{} (removed, restorable)", record.name))
                }
                VolumeState::Purged => None,
            }
        };
        volumes.records.values().filter_map(named).collect()
    }

    async fn destroy_keys(&self, keys: &BTreeSet<KeyId>) -> Result<()> {
        self.volume_keys.destroy(keys).await?;
        for key in keys {
            self.shared.tier.forget_key(*key);
        }
        Ok(())
    }

    /// Destroys the keys of purged volumes. The caller must hold the lock on changes of volumes.
    pub(super) async fn destroy_unused_keys(&self) -> Result<()> {
        let there = self.volume_keys.table().ids();
        // Go by the records in the store: if the log is lost after this, the volume must not come
        // back.
        let is_purged = |(_, bytes): &(VolumeId, bytes::Bytes)| {
            let record = VolumeRecord::decode(bytes).ok()?;
            (record.state == VolumeState::Purged && there.contains(&record.key()))
                .then(|| record.key())
        };
        let mut unused: BTreeSet<KeyId> =
            self.shared.tier.volume_records().iter().filter_map(is_purged).collect();
        unused.retain(|key| self.others_under(*key, 0).is_empty());
        self.destroy_keys(&unused).await?;
        if !unused.is_empty() {
            tracing::info!(count = unused.len(), "the pool destroyed the keys of purged volumes");
        }
        Ok(())
    }

    /// Number of the key document in which a key was destroyed last, or 0. A copy with an earlier
    /// document still has that key.
    pub(crate) fn keys_destroyed_in(&self) -> u64 {
        self.volume_keys.destroyed_in()
    }

    /// Reports whether the volume's dedicated key is gone.
    #[must_use]
    pub fn is_keyless(&self, record: &VolumeRecord) -> bool {
        !self.volume_keys.table().has(record.key())
    }
}
