//! Requests about copies.

use super::{AdminPool, convert};
use api::Reply;
use api::copy::{CopyInfo, CopyRequest, RecoveryPointInfo};
use block::Result;
use engine::copies::CopyStatus;
use engine::open_pool::OpenPool;
use std::collections::BTreeMap;

impl AdminPool {
    pub(super) async fn copy(&self, open: &OpenPool, request: CopyRequest) -> Result<Reply> {
        match request {
            CopyRequest::Add { copy } => self.copies.add(convert::new_copy(copy)).await?,
            CopyRequest::Remove { url } => {
                self.copies.remove(&url).await?;
                let message = format!(
                    "{url} is no longer brought up to date; its objects stay, and can be restored or deleted"
                );
                return Ok(Reply::Done { message });
            }
            CopyRequest::List {} => {}
            CopyRequest::Sync { url } => {
                let point = self.copies.sync(&url).await?;
                let message = format!(
                    "{url} holds everything up to LSN {}, as its recovery point {}",
                    point.destaged_lsn, point.number
                );
                return Ok(Reply::Done { message });
            }
        }
        let records = open.pool.records().into_iter();
        let names = records.map(|record| (record.id, record.name)).collect();
        Ok(Reply::Copies { copies: copy_infos(&names, self.copies.status().await?) })
    }
}

/// Reports on copies. `names` are those of the volumes, by id.
pub(super) fn copy_infos(names: &BTreeMap<u32, String>, copies: Vec<CopyStatus>) -> Vec<CopyInfo> {
    let named =
        |id: &u32| names.get(id).cloned().unwrap_or_else(|| format!("volume {id}, which is gone"));
    let info = |status: CopyStatus| {
        let (spec, counts) = (status.spec, status.counts);
        let newest = status.state.as_ref().and_then(|state| state.newest.as_ref());
        CopyInfo {
            url: spec.url,
            env_prefix: spec.env_prefix,
            interval_seconds: spec.interval_seconds,
            is_snapshots_only: spec.is_snapshots_only,
            bytes_per_second: spec.bytes_per_second,
            has_dedicated_key: spec.has_dedicated_key,
            volumes: spec.volumes.map(|volumes| volumes.iter().map(named).collect()),
            created_at: spec.created_at,
            is_running: status.state.is_some(),
            recovery_point: newest.map(|newest| RecoveryPointInfo {
                number: newest.number,
                as_of: newest.as_of,
                destaged_lsn: newest.destaged_lsn,
                segment_count: newest.segment_count,
                segment_bytes: newest.segment_bytes,
                stalled_count: newest.stalled_count,
            }),
            lag_seconds: status.lag_seconds,
            lag_bytes: status.lag_bytes,
            has_destroyed_keys: status.has_destroyed_keys,
            pass_permille: counts.pass_permille,
            copied_bytes: counts.copied_bytes,
            copied_count: counts.copied_count,
            deleted_count: counts.deleted_count,
            waiting_count: counts.waiting_count,
            damaged_count: counts.damaged_count + counts.missing_count,
            failure: status.failure.as_ref().map(|(why, _)| why.clone()),
            failing_seconds: status.failure.map(|(_, lasts)| lasts.as_secs()),
        }
    };
    copies.into_iter().map(info).collect()
}
