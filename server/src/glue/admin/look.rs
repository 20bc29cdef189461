//! A look at a pool that was closed in order: commands report its state from the store alone,
//! without taking it.
//!
//! Invariants:
//! - Nothing is written to the store, and a daemon that opens the pool meanwhile is not disturbed.
//! - The store has all of such a pool, so no write log is needed.

use super::answers::{
    Held, VolumeSeen, by_name, copy_infos_of, dedup_info, named_volume, restore_info_of,
    scrub_info_of, snapshot_info, volume_info_of,
};
use super::status::{condition_counts, space_info, tier_info};
use crate::admin::{
    AdminHandler, AtRisk, ConditionInfo, DestageInfo, KeySlotInfo, LogInfo, Reply, Request,
    StatusInfo, VolumeInfo,
};
use crate::config::Config;
use block::seal::PoolKey;
use block::{Conditions, Error, ErrorKind, Lsn, Result, VolumeId};
use control::keys::KeyRing;
use control::manifest::{Manifest, NodeDir};
use control::store::Store;
use engine::copies::{CopyStatus, list};
use engine::pool::{NamedOrigin, NamedSnapshot};
use engine::record::{VolumeRecord, VolumeState};
use engine::restore::Restored;
use engine::scrub::ScrubStatus;
use engine::snapshot::SnapshotRecord;
use std::collections::BTreeMap;
use tiering::Tier;

/// A pool that was closed in order, opened for reading.
pub struct Look {
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

impl Look {
    /// Reports whether a request changes nothing, so that the pool need not be owned.
    #[must_use]
    pub fn answers(request: &Request) -> bool {
        matches!(
            request,
            Request::VolumeList
                | Request::VolumeShow { .. }
                | Request::SnapshotList { .. }
                | Request::CopyList
                | Request::ScrubStatus
                | Request::Status
        )
    }

    fn key(&self) -> &PoolKey {
        &self.keys.newest().key
    }

    /// Records of all volumes, including restorable ones.
    fn records(&self) -> Result<Vec<VolumeRecord>> {
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

    fn snapshot_records(&self) -> Result<BTreeMap<(u32, Lsn), SnapshotRecord>> {
        let decode = |(volume, lsn, bytes): (VolumeId, Lsn, bytes::Bytes)| {
            let record = SnapshotRecord::decode(&bytes)
                .map_err(|error| error.context(format!("look at a snapshot of volume {volume}")))?;
            Ok(((volume.0, lsn), record))
        };
        self.tier.snapshots().into_iter().map(decode).collect()
    }

    fn volumes(&self) -> Result<Vec<VolumeInfo>> {
        let (records, snapshots) = (self.records()?, self.snapshot_records()?);
        let names: BTreeMap<u32, &str> =
            records.iter().map(|record| (record.id, record.name.as_str())).collect();
        let (asides, dedup) = (self.tier.asides(), self.tier.dedup_status());
        let retention = self.config.settings().deleted_retention.duration();
        let info = |record: &VolumeRecord| {
            let origin = self.tier.origin(VolumeId(record.id)).map(|origin| {
                let volume = names.get(&origin.volume.0).copied().unwrap_or("?");
                let name = match snapshots.get(&(origin.volume.0, origin.at)) {
                    Some(snapshot) => format!("{volume}@{}", snapshot.name),
                    None => format!("{volume} at LSN {}", origin.at),
                };
                let done_bytes = origin.done_bytes.min(record.size_bytes);
                NamedOrigin { name, promoted_bytes: origin.is_promoted.then_some(done_bytes) }
            });
            // In a pool that was closed in order, a volume that is aside lacks writes that no
            // longer exist.
            let is_aside = asides.contains_key(&VolumeId(record.id));
            let is_closed = is_aside || !self.tier.volume_keys().has(record.key());
            volume_info_of(record, VolumeSeen { is_closed, is_aside, origin, retention }, &dedup)
        };
        Ok(by_name(records.iter().map(info).collect()))
    }

    async fn snapshots(&self, volume: Option<&str>, with_space: bool) -> Result<Reply> {
        let mut present: Vec<VolumeRecord> = self.records()?;
        present.retain(|record| record.state == VolumeState::Present);
        present.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some(name) = volume {
            present.retain(|record| record.name == name);
            if present.is_empty() {
                let what =
                    format!("find volume {name}: there is none; `spindle volume list` shows all");
                return Err(Error::new(ErrorKind::NotFound, what));
            }
        }
        let (all, mut held) = (self.snapshot_records()?, Held::new());
        let mut infos = Vec::new();
        for record in &present {
            let of = VolumeId(record.id);
            if with_space && all.keys().any(|(volume, _)| *volume == record.id) {
                let bytes = self.tier.held_bytes(of).await?;
                held.extend(bytes.into_iter().map(|(lsn, bytes)| ((record.id, lsn.0), bytes)));
            }
            for ((_, lsn), snapshot) in
                all.range((record.id, Lsn::NONE)..=(record.id, Lsn(u64::MAX)))
            {
                let one = NamedSnapshot {
                    volume: record.name.clone(),
                    lsn: *lsn,
                    record: snapshot.clone(),
                };
                infos.push(snapshot_info(&one, true, &held));
            }
        }
        Ok(Reply::Snapshots { snapshots: infos })
    }

    async fn copies(&self) -> Result<Vec<CopyStatus>> {
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

    async fn scrub(&self) -> Result<ScrubStatus> {
        let record = engine::scrub::read(&self.store, self.key(), self.keys.pool()).await;
        let record =
            record.inspect_err(|error| engine::scrub::show_unreadable(&self.conditions, error))?;
        engine::scrub::show_bad(&self.conditions, record.as_ref());
        Ok(ScrubStatus { record, is_serving: false, failure: None })
    }

    async fn status(&self) -> Result<StatusInfo> {
        // If these cannot be read, a condition says so.
        let _ = (self.scrub().await, self.copies().await);
        let (records, tier) = (self.records()?, self.tier.status());
        for record in &records {
            let has_key = self.tier.volume_keys().has(record.key());
            engine::conditions::show_record(&self.conditions, record, has_key);
        }
        engine::conditions::show_recovery_key(&self.conditions, self.keys.has_recovery());
        let conditions: Vec<ConditionInfo> =
            self.conditions.list().into_iter().map(ConditionInfo::from).collect();
        let present = records.iter().filter(|record| record.state == VolumeState::Present);
        let (manifest, lsn) = (&self.manifest, self.tier.destaged_lsn().0);
        let slots = self.keys.slots().into_iter();
        Ok(StatusInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pool: manifest.pool.to_string(),
            name: manifest.name.clone(),
            store: self.config.store_url().to_owned(),
            epoch: manifest.epoch,
            host: manifest.owner.host.clone(),
            pid: manifest.owner.pid,
            opened_at: manifest.owner.opened_at,
            is_offline: true,
            endpoints: Vec::new(),
            volume_count: present.count() as u64,
            at_risk: AtRisk { oldest_seconds: 0.0, bytes: 0 },
            log: LogInfo {
                used_bytes: 0,
                ring_bytes: self.config.settings().log.size.0,
                last_lsn: lsn,
                durable_lsn: lsn,
                destaged_lsn: lsn,
                failure: None,
            },
            destage: DestageInfo::default(),
            space: space_info(&self.tier.reclaim_status(), 0, tier.metadata_written_bytes),
            tier: tier_info(tier),
            dedup: dedup_info(records.iter(), &self.tier.dedup_status()),
            restored: self
                .restored
                .as_ref()
                .map(|restored| restore_info_of(restored, restored.origin.is_whole)),
            nbd: None,
            cache: None,
            memory_bytes_max: self.config.budget().total_bytes,
            key_slots: slots.map(|(kind, created_at)| KeySlotInfo { kind, created_at }).collect(),
            has_recovery_key: self.keys.has_recovery(),
            warnings: conditions.iter().map(ConditionInfo::line).collect(),
            conditions,
            condition_counts: condition_counts(&self.conditions),
            condition_excluded_count: self.conditions.excluded_count(),
        })
    }
}

impl AdminHandler for Look {
    async fn handle(&self, request: Request) -> Result<Reply> {
        match request {
            Request::VolumeList => Ok(Reply::Volumes { volumes: self.volumes()? }),
            Request::VolumeShow { name } => {
                Ok(Reply::Volume(named_volume(self.volumes()?, &name)?))
            }
            Request::SnapshotList { volume, space } => {
                self.snapshots(volume.as_deref(), space).await
            }
            Request::CopyList => {
                let names: BTreeMap<u32, String> =
                    self.records()?.into_iter().map(|record| (record.id, record.name)).collect();
                Ok(Reply::Copies { copies: copy_infos_of(&names, self.copies().await?) })
            }
            Request::ScrubStatus => Ok(Reply::Scrub(scrub_info_of(self.scrub().await?))),
            Request::Status => Ok(Reply::Status(Box::new(self.status().await?))),
            _ => {
                Err(Error::new(ErrorKind::Invalid, "a pool that is only looked at is not changed"))
            }
        }
    }

    async fn close(&self) -> Result<()> {
        self.tier.close().await
    }
}
