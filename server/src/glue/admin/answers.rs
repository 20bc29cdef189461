//! Volumes, snapshots, schedules, copies and jobs of the open pool, as reported on the admin
//! socket.

use crate::admin::{
    BadSegmentInfo, CopyInfo, CopyStateInfo, DedupInfo, Reply, RestoreInfo, ScheduleInfo,
    ScheduledInfo, ScrubInfo, SnapshotInfo, VolumeInfo,
};
use block::{Error, ErrorKind, Result, VolumeId};
use engine::copies::{Copies, CopyStatus};
use engine::open_pool::OpenPool;
use engine::pool::{NamedOrigin, NamedSnapshot, SchedulePlan};
use engine::record::{VolumeRecord, VolumeState};
use engine::restore::Restored;
use engine::scrub::{BadSegment, Scrub, ScrubStatus};
use std::collections::BTreeMap;
use std::time::Duration;
use tiering::DedupStatus;

/// State of a volume besides its record.
pub(super) struct VolumeSeen {
    /// It is not served.
    pub(super) is_closed: bool,
    /// The store has an older state of it than of the others.
    pub(super) is_aside: bool,
    pub(super) origin: Option<NamedOrigin>,
    /// Time for which it is kept once it is removed.
    pub(super) retention: Duration,
}

/// Report on a record.
pub(super) fn volume_info(open: &OpenPool, record: &VolumeRecord) -> VolumeInfo {
    let aside = open.pool.destage_progress().aside.remove(&record.id);
    let seen = VolumeSeen {
        is_closed: aside.as_ref().is_some_and(|aside| aside.is_closed)
            || open.pool.is_keyless(record),
        is_aside: aside.is_some(),
        origin: open.pool.origin(record),
        retention: open.config.retention,
    };
    volume_info_of(record, seen, &open.pool.dedup_status())
}

/// Like [`volume_info`], from collected state.
pub(super) fn volume_info_of(
    record: &VolumeRecord,
    seen: VolumeSeen,
    dedup: &DedupStatus,
) -> VolumeInfo {
    let VolumeSeen { is_closed, is_aside, origin, retention } = seen;
    let removed_at = match record.state {
        VolumeState::Removed { removed_at } => Some(removed_at),
        VolumeState::Present | VolumeState::Purged => None,
    };
    VolumeInfo {
        id: record.id,
        name: record.name.clone(),
        size_bytes: record.size_bytes,
        durability: record.durability,
        is_read_only: record.is_read_only,
        created_at: record.created_at,
        removed_at,
        purge_at: removed_at.map(|at| at.saturating_add(retention.as_secs())),
        is_stepped_back: record.is_stepped_back,
        is_closed,
        is_aside,
        origin: origin.as_ref().map(|origin| origin.name.clone()),
        promoted_bytes: origin.and_then(|origin| origin.promoted_bytes),
        expires_at: Some(record.expires_at).filter(|at| *at != 0),
        own_key: Some(record.own_key).filter(|id| *id != 0),
        dedup: dedup_info([record].into_iter(), dedup),
        warning: None,
    }
}

/// `None`: deduplication is off, and no duplicates were found.
pub(super) fn dedup_info<'a>(
    records: impl Iterator<Item = &'a VolumeRecord>,
    status: &DedupStatus,
) -> Option<DedupInfo> {
    let mut info = DedupInfo::default();
    for record in records {
        let found = status.found.get(&VolumeId(record.id)).copied().unwrap_or_default();
        info.is_on |= record.is_dedup;
        info.block_count += found.block_count;
        info.duplicate_count += found.duplicate_count;
    }
    info.ratio = ratio(info.block_count, info.block_count.saturating_sub(info.duplicate_count));
    Some(info).filter(|info| info.is_on || info.block_count > 0)
}

/// Ratio rounded to three decimals; 0 if the whole is 0.
pub(super) fn ratio(part: u64, whole: u64) -> f64 {
    match whole {
        0 => 0.0,
        _ => (part as f64 / whole as f64 * 1000.0).round() / 1000.0,
    }
}

/// Report on snapshots. `held` are the bytes that each alone holds, by volume and LSN, if known.
pub(super) fn snapshots(open: &OpenPool, found: &[NamedSnapshot], held: &Held) -> Reply {
    let destaged = open.pool.log_status().destaged_lsn;
    let aside = open.pool.destage_progress().aside;
    let is_whole = |one: &NamedSnapshot| {
        aside.get(&one.record.volume).is_none_or(|aside| one.lsn.0 < aside.since_lsn)
    };
    let info = |one: &NamedSnapshot| snapshot_info(one, one.lsn <= destaged && is_whole(one), held);
    Reply::Snapshots { snapshots: found.iter().map(info).collect() }
}

/// Report on one snapshot. `held`: see [`snapshots`].
pub(super) fn snapshot_info(one: &NamedSnapshot, is_in_store: bool, held: &Held) -> SnapshotInfo {
    SnapshotInfo {
        volume: one.volume.clone(),
        name: one.record.name.clone(),
        lsn: one.lsn.0,
        size_bytes: one.record.size_bytes,
        created_at: one.record.created_at,
        is_in_store,
        held_bytes: held.get(&(one.record.volume, one.lsn.0)).copied(),
    }
}

pub(super) fn restore_info(open: &OpenPool, restored: &Restored) -> RestoreInfo {
    restore_info_of(restored, *open.is_whole.borrow())
}

/// Report on a restore. `is_whole`: the pool has everything that the copy has.
pub(super) fn restore_info_of(restored: &Restored, is_whole: bool) -> RestoreInfo {
    let (origin, counts) = (&restored.origin, restored.counts());
    RestoreInfo {
        url: origin.url.clone(),
        state: origin.state.number,
        as_of: origin.state.as_of,
        is_whole,
        left_bytes: counts.left_bytes,
        done_bytes: counts.done_bytes,
        left_seconds: counts.left_seconds,
        bad_count: counts.bad_count.max(origin.lost_count),
    }
}

pub(super) async fn scrub_info(scrub: &Scrub) -> Result<ScrubInfo> {
    Ok(scrub_info_of(scrub.status().await?))
}

pub(super) fn scrub_info_of(status: ScrubStatus) -> ScrubInfo {
    let mut info = ScrubInfo {
        is_served: status.is_serving,
        failing_seconds: status.failure.as_ref().map(|(_, since)| since.elapsed().as_secs()),
        failure: status.failure.map(|(why, _)| why),
        ..ScrubInfo::default()
    };
    let Some(record) = status.record else { return info };
    let bad = |bad: BadSegment| {
        let BadSegment { number, object, why } = bad;
        BadSegmentInfo { number, object, why }
    };
    info.is_running = record.is_running();
    info.is_stopped = record.is_stopped;
    info.started_at = Some(record.started_at);
    info.ended_at = record.ended_at;
    info.next_at = record.next_at();
    info.permille = match record.ended_at {
        Some(_) => 1000,
        None => record.position * 1000 / record.until.max(1),
    };
    info.bytes_per_second = record.bytes_per_second;
    info.every_seconds = record.every_seconds;
    info.segment_count = record.segment_count;
    info.frame_count = record.frame_count;
    info.object_bytes = record.object_bytes;
    info.mended_count = record.mended_count;
    info.bad_count = record.bad_count;
    info.bad = record.bad.into_iter().map(bad).collect();
    info
}

pub(super) async fn copy_infos(open: &OpenPool, copies: &Copies) -> Result<Vec<CopyInfo>> {
    let names = open.pool.records().into_iter().map(|record| (record.id, record.name)).collect();
    Ok(copy_infos_of(&names, copies.status().await?))
}

/// Reports on copies. `names` are those of the volumes, by id.
pub(super) fn copy_infos_of(
    names: &BTreeMap<u32, String>,
    copies: Vec<CopyStatus>,
) -> Vec<CopyInfo> {
    let named =
        |id: &u32| names.get(id).cloned().unwrap_or_else(|| format!("volume {id}, which is gone"));
    let info = |status: CopyStatus| {
        let (spec, counts) = (status.spec, status.counts);
        let newest = status.state.as_ref().and_then(|state| state.newest.as_ref());
        let failure = status.state.as_ref().and_then(|state| state.failure.as_ref());
        CopyInfo {
            url: spec.url,
            env_prefix: spec.env_prefix,
            interval_seconds: spec.interval_seconds,
            is_snapshots_only: spec.is_snapshots_only,
            bytes_per_second: spec.bytes_per_second,
            has_own_key: spec.has_own_key,
            volumes: spec.volumes.map(|volumes| volumes.iter().map(named).collect()),
            created_at: spec.created_at,
            is_running: status.state.is_some(),
            state: newest.map(|newest| CopyStateInfo {
                number: newest.number,
                as_of: newest.as_of,
                destaged_lsn: newest.destaged_lsn,
                segment_count: newest.segment_count,
                segment_bytes: newest.segment_bytes,
                aside_count: newest.aside_count,
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
            failure: failure.map(|(why, _)| why.clone()),
            failing_seconds: failure.map(|(_, since)| since.elapsed().as_secs()),
        }
    };
    copies.into_iter().map(info).collect()
}

pub(super) type Held = BTreeMap<(u32, u64), u64>;

pub(super) fn schedule_info(volume: String, plan: SchedulePlan) -> ScheduleInfo {
    let one = |(one, why): (NamedSnapshot, Option<&'static str>)| ScheduledInfo {
        name: one.record.name,
        created_at: one.record.created_at,
        kept_as: why.map(str::to_owned),
    };
    ScheduleInfo {
        volume,
        cron: plan.schedule.as_ref().map(|schedule| schedule.cron.clone()),
        keep: plan.schedule.map(|schedule| schedule.keep),
        next_at: plan.next_at,
        snapshots: plan.snapshots.into_iter().map(one).collect(),
    }
}

pub(super) fn list(open: &OpenPool) -> Vec<VolumeInfo> {
    by_name(open.pool.records().iter().map(|record| volume_info(open, record)).collect())
}

pub(super) fn by_name(mut volumes: Vec<VolumeInfo>) -> Vec<VolumeInfo> {
    volumes.sort_by(|a, b| (&a.name, a.id).cmp(&(&b.name, b.id)));
    volumes
}

pub(super) fn show(open: &OpenPool, name: &str) -> Result<VolumeInfo> {
    named_volume(list(open), name)
}

/// Finds the volume of this name.
///
/// # Errors
/// `NotFound`.
pub(super) fn named_volume(volumes: Vec<VolumeInfo>, name: &str) -> Result<VolumeInfo> {
    // A present volume takes precedence over a removed one of the same name.
    let mut found: Vec<VolumeInfo> =
        volumes.into_iter().filter(|volume| volume.name == name).collect();
    found.sort_by_key(|volume| volume.removed_at.is_some());
    found.into_iter().next().ok_or_else(|| {
        let what = format!("show volume {name}: there is none; `spindle volume list` shows all");
        Error::new(ErrorKind::NotFound, what)
    })
}
