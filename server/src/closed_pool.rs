//! A pool that was closed in order, opened for reading: commands report its state from the store
//! alone, without taking it.
//!
//! Invariants:
//! - Nothing is written to the store, and a daemon that opens the pool meanwhile is not disturbed.
//! - The store has all of such a pool, so no write log is needed.

use crate::config::Config;
use block::seal::PoolKey;
use block::{Conditions, Lsn, Result, VolumeId};
use control::keys::KeyRing;
use control::manifest::{Manifest, NodeDir};
use control::store::Store;
use engine::copies::{CopyStatus, list};
use engine::pool::NamedOrigin;
use engine::record::{VolumeRecord, VolumeState};
use engine::restore::Restored;
use engine::scrub::ScrubStatus;
use engine::snapshot::SnapshotRecord;
use std::collections::BTreeMap;
use tiering::Tier;

/// A pool that was closed in order, opened for reading.
pub struct ClosedPool {
    pub(crate) config: Config,
    /// Held so that no other process opens the pool from this directory meanwhile.
    pub(crate) _node: NodeDir,
    pub(crate) store: Store,
    pub(crate) keys: KeyRing,
    pub(crate) manifest: Manifest,
    pub(crate) tier: Tier,
    pub(crate) restored: Option<Restored>,
    /// Number of the document in which a key of a volume was destroyed last, or 0.
    pub(crate) keys_destroyed_in: u64,
    pub(crate) conditions: Conditions,
}

impl ClosedPool {
    fn key(&self) -> &PoolKey {
        &self.keys.newest().key
    }

    /// Records of all volumes, including restorable ones.
    pub(crate) fn records(&self) -> Result<Vec<VolumeRecord>> {
        let mut records = Vec::new();
        for (id, bytes) in self.tier.volume_records() {
            let record = VolumeRecord::decode(&bytes);
            let record = record.map_err(|error| error.context(format!("look at volume {id}")))?;
            if record.state != VolumeState::Purged {
                records.push(record);
            }
        }
        Ok(records)
    }

    /// Records of all snapshots, by volume and LSN.
    pub(crate) fn snapshot_records(&self) -> Result<BTreeMap<(u32, Lsn), SnapshotRecord>> {
        let decode = |(volume, lsn, bytes): (VolumeId, Lsn, bytes::Bytes)| {
            let record = SnapshotRecord::decode(&bytes)
                .map_err(|error| error.context(format!("look at a snapshot of volume {volume}")))?;
            Ok(((volume.0, lsn), record))
        };
        self.tier.snapshots().into_iter().map(decode).collect()
    }

    /// The snapshot that a volume depends on, if any. `names` are those of the volumes, by id.
    pub(crate) fn origin(
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
    pub(crate) async fn copies(&self) -> Result<Vec<CopyStatus>> {
        let specs = list::read(&self.store, self.key(), self.keys.pool()).await;
        let specs =
            specs.inspect_err(|error| engine::copies::show_unreadable(&self.conditions, error))?;
        let copies: Vec<CopyStatus> = specs
            .into_iter()
            .map(|spec| CopyStatus::unserved(spec, self.keys_destroyed_in > 0))
            .collect();
        for copy in &copies {
            engine::copies::show_erased_keys(
                &self.conditions,
                &copy.spec.url,
                copy.has_destroyed_keys,
            );
        }
        Ok(copies)
    }

    /// State of the scrub. If it cannot be read, a condition says so, too.
    pub(crate) async fn scrub(&self) -> Result<ScrubStatus> {
        let record = engine::scrub::read(&self.store, self.key(), self.keys.pool()).await;
        let record =
            record.inspect_err(|error| engine::scrub::show_unreadable(&self.conditions, error))?;
        engine::scrub::show_bad(&self.conditions, record.as_ref());
        Ok(ScrubStatus { record, is_serving: false, failure: None })
    }

    /// Raises the conditions that the state of the pool causes.
    ///
    /// # Errors
    /// `Corrupt` for a record of a volume that cannot be read.
    pub(crate) async fn raise_conditions(&self) -> Result<()> {
        // If these cannot be read, a condition says so.
        let _ = (self.scrub().await, self.copies().await);
        for record in &self.records()? {
            let has_key = self.tier.volume_keys().has(record.key());
            engine::conditions::show_record(&self.conditions, record, has_key);
        }
        engine::conditions::show_recovery_key(&self.conditions, self.keys.has_recovery());
        Ok(())
    }
}
