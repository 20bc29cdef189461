//! Requests about a pool that was closed in order: the replies are made from the store alone.
//!
//! Invariant: no request here changes anything.

use super::copy::copy_infos;
use super::restore::restore_info;
use super::scrub::scrub_info;
use super::snapshot::{Held, snapshot_info};
use super::status::{condition_counts, data_stores_info, space_info, tier_info};
use super::volume::{VolumeSeen, by_name, dedup_info, named_volume, volume_info_of};
use super::{convert, data, doctor, node};
use crate::admin::AdminHandler;
use api::copy::CopyRequest;
use api::data::DataRequest;
use api::doctor::DoctorRequest;
use api::pool::PoolRequest;
use api::scrub::ScrubRequest;
use api::snapshot::SnapshotRequest;
use api::status::{AtRisk, ConditionInfo, DestageInfo, LogInfo, StatusInfo};
use api::volume::{VolumeInfo, VolumeRequest};
use api::{Reply, Request};
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use engine::closed_pool::ClosedPool;
use engine::pool::NamedSnapshot;
use engine::rebuild::RebuildStatus;
use engine::record::{VolumeRecord, VolumeState};
use std::collections::BTreeMap;

/// Tells whether a request changes nothing, so that the pool need not be owned.
#[must_use]
pub(crate) fn answers_closed(request: &Request) -> bool {
    matches!(
        request,
        Request::Volume(VolumeRequest::List {} | VolumeRequest::Show { .. })
            | Request::Snapshot(SnapshotRequest::List { .. })
            | Request::Copy(CopyRequest::List {})
            | Request::Scrub(ScrubRequest::Status {})
            | Request::Data(DataRequest::List {})
            | Request::Pool(PoolRequest::Status {})
            | Request::Doctor(DoctorRequest::Examine { .. })
    )
}

fn volumes(pool: &ClosedPool) -> Result<Vec<VolumeInfo>> {
    let (records, snapshots) = (pool.records()?, pool.snapshot_records()?);
    let names: BTreeMap<u32, &str> =
        records.iter().map(|record| (record.id, record.name.as_str())).collect();
    let (stalled, dedup) = (pool.tier.stalled_volumes(), pool.tier.dedup_status());
    let retention = pool.config.retention;
    let info = |record: &VolumeRecord| {
        let origin = pool.origin(record, &names, &snapshots);
        // In a pool that was closed in order, a stalled volume lacks writes that no
        // longer exist.
        let is_stalled = stalled.contains_key(&VolumeId(record.id));
        let is_closed = is_stalled || !pool.tier.volume_keys().has(record.key());
        volume_info_of(record, VolumeSeen { is_closed, is_stalled, origin, retention }, &dedup)
    };
    Ok(by_name(records.iter().map(info).collect()))
}

async fn snapshots(pool: &ClosedPool, volume: Option<&str>, with_space: bool) -> Result<Reply> {
    let mut present: Vec<VolumeRecord> = pool.records()?;
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
    let (all, mut held) = (pool.snapshot_records()?, Held::new());
    let mut infos = Vec::new();
    for record in &present {
        let of = VolumeId(record.id);
        if with_space && all.keys().any(|(volume, _)| *volume == record.id) {
            let bytes = pool.tier.held_bytes(of).await?;
            held.extend(bytes.into_iter().map(|(lsn, bytes)| ((record.id, lsn.0), bytes)));
        }
        for ((_, lsn), snapshot) in all.range((record.id, Lsn::NONE)..=(record.id, Lsn(u64::MAX))) {
            let one =
                NamedSnapshot { volume: record.name.clone(), lsn: *lsn, record: snapshot.clone() };
            infos.push(snapshot_info(&one, true, &held));
        }
    }
    Ok(Reply::Snapshots { snapshots: infos })
}

async fn status_of(pool: &ClosedPool) -> Result<StatusInfo> {
    pool.raise_conditions().await?;
    let (records, tier) = (pool.records()?, pool.tier.status());
    let conditions: Vec<ConditionInfo> =
        pool.conditions.list().into_iter().map(ConditionInfo::from).collect();
    let mut warnings: Vec<String> = conditions.iter().map(ConditionInfo::line).collect();
    let node = node::status(None, &pool.config.dir).await.unwrap_or_else(|error| {
        warnings.push(error.context("show the node").chain());
        None
    });
    let present = records.iter().filter(|record| record.state == VolumeState::Present);
    let (manifest, lsn) = (&pool.manifest, pool.tier.destaged_lsn().0);
    Ok(StatusInfo {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pool: manifest.pool.to_string(),
        name: manifest.name.clone(),
        store: pool.config.store_url.to_owned(),
        epoch: manifest.epoch,
        host: manifest.owner.host.clone(),
        pid: manifest.owner.pid,
        opened_at: manifest.owner.opened_at,
        is_offline: true,
        endpoints: Vec::new(),
        volume_count: present.count() as u64,
        at_risk: AtRisk { oldest_seconds: 0.0, bytes: 0 },
        members: None,
        log: LogInfo {
            used_bytes: 0,
            ring_bytes: pool.config.log.ring_bytes,
            last_lsn: lsn,
            durable_lsn: lsn,
            destaged_lsn: lsn,
            failure: None,
        },
        destage: DestageInfo::default(),
        space: space_info(&pool.tier.reclaim_status(), 0, tier.metadata_written_bytes),
        tier: tier_info(tier),
        data_stores: pool
            .data_stores
            .as_ref()
            .map(|stores| data_stores_info(stores.status(), RebuildStatus::default())),
        dedup: dedup_info(records.iter(), &pool.tier.dedup_status()),
        restored: pool
            .restored
            .as_ref()
            .map(|restored| restore_info(restored, restored.origin.is_complete)),
        nbd: None,
        cache: None,
        node,
        memory_bytes_max: pool.config.memory_bytes_max,
        key_slots: convert::key_slots(pool.keys.slots()),
        has_recovery_key: pool.keys.has_recovery(),
        warnings,
        conditions,
        condition_counts: condition_counts(&pool.conditions),
        condition_excluded_count: pool.conditions.excluded_count(),
    })
}

impl AdminHandler for ClosedPool {
    async fn handle(&self, request: Request) -> Result<Reply> {
        match request {
            Request::Volume(VolumeRequest::List {}) => {
                Ok(Reply::Volumes { volumes: volumes(self)? })
            }
            Request::Volume(VolumeRequest::Show { name }) => {
                Ok(Reply::Volume(named_volume(volumes(self)?, &name)?))
            }
            Request::Snapshot(SnapshotRequest::List { volume, space }) => {
                snapshots(self, volume.as_deref(), space).await
            }
            Request::Copy(CopyRequest::List {}) => {
                let names: BTreeMap<u32, String> =
                    self.records()?.into_iter().map(|record| (record.id, record.name)).collect();
                Ok(Reply::Copies { copies: copy_infos(&names, self.copies().await?) })
            }
            Request::Scrub(ScrubRequest::Status {}) => {
                Ok(Reply::Scrub(scrub_info(self.scrub().await?)))
            }
            Request::Data(DataRequest::List {}) => {
                let stores = self.data_stores.as_ref().ok_or_else(data::none)?;
                let info = data_stores_info(stores.status(), RebuildStatus::default());
                Ok(Reply::DataStores(Box::new(info)))
            }
            Request::Pool(PoolRequest::Status {}) => {
                Ok(Reply::Status(Box::new(status_of(self).await?)))
            }
            Request::Doctor(request) => doctor::of_closed(self, request).await,
            _ => {
                Err(Error::new(ErrorKind::Invalid, "change the pool: it is open for reading only"))
            }
        }
    }

    async fn close(&self) -> Result<()> {
        self.tier.close().await
    }
}
