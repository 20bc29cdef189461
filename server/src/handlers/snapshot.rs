//! Requests about snapshots and their schedules.

use super::{AdminPool, convert};
use api::Reply;
use api::snapshot::{
    DiffExtent, DiffInfo, ScheduleChange, ScheduleInfo, ScheduledInfo, SnapshotInfo,
    SnapshotRequest,
};
use block::{Result, VolumeId};
use engine::open_pool::OpenPool;
use engine::pool::{NamedSnapshot, SchedulePlan};
use engine::snapshot::SnapshotName;
use std::collections::BTreeMap;
use tiering::ChangedExtent;

/// Approximate number of extents in one answer about the difference of two snapshots. Chosen by
/// hand: with one more page of the map, it is still far below the longest reply.
const DIFF_EXTENTS_MAX: usize = 50_000;

/// Bytes that a snapshot alone holds, by volume and LSN.
pub(super) type Held = BTreeMap<(u32, u64), u64>;

impl AdminPool {
    pub(super) async fn snapshot(
        &self,
        open: &OpenPool,
        request: SnapshotRequest,
    ) -> Result<Reply> {
        let pool = &open.pool;
        match request {
            SnapshotRequest::Create { snapshot } => {
                let made = pool.create_snapshots(&snapshot.parse()?).await?;
                Ok(snapshots(open, &made, &Held::new()))
            }
            SnapshotRequest::List { volume, space } => {
                let found = pool.snapshots(volume.as_deref())?;
                let held = if space { pool.held_by(&found).await? } else { Held::new() };
                Ok(snapshots(open, &found, &held))
            }
            SnapshotRequest::Diff { older, newer, offset } => {
                diff(open, &older, &newer, offset).await
            }
            SnapshotRequest::Schedule { volume, change } => {
                match change {
                    Some(ScheduleChange::Set { cron, keep }) => {
                        let keep = convert::keep_in(keep);
                        pool.set_schedule(&volume, Some((&cron, keep))).await?;
                    }
                    Some(ScheduleChange::Off) => pool.set_schedule(&volume, None).await?,
                    None => {}
                }
                let plan = pool.schedule_plan(&volume)?;
                Ok(Reply::Schedule(schedule_info(volume, plan)))
            }
            SnapshotRequest::Rollback { snapshot } => self.roll_back(open, &snapshot).await,
            SnapshotRequest::Remove { snapshot } => {
                let name: SnapshotName = snapshot.parse()?;
                let (volume, name) = name.single()?;
                pool.remove_snapshot(volume, name).await?;
                let message = format!(
                    "snapshot {volume}@{name} is removed; the store reclaims the space that it alone held in the \
                     background"
                );
                Ok(Reply::Done { message })
            }
        }
    }

    async fn roll_back(&self, open: &OpenPool, snapshot: &str) -> Result<Reply> {
        let of: SnapshotName = snapshot.parse()?;
        let (volume, snapshot) = of.single()?;
        let _kept = self.guard_detached(open, "roll back", volume).await?;
        let id = VolumeId(open.pool.snapshot(volume, snapshot)?.record.volume);
        let check = self.check_id_detached(open, "roll back", volume, id);
        let rolled_back = open.pool.roll_back(volume, snapshot, check).await;
        let record = rolled_back.map_err(|error| self.name_users(id, error))?;
        Ok(super::volume::reply(open, &record))
    }
}

async fn diff(open: &OpenPool, older: &str, newer: &str, offset: u64) -> Result<Reply> {
    let names = (older.parse()?, newer.parse()?);
    let differences =
        open.pool.snapshot_differences((&names.0, &names.1), offset, DIFF_EXTENTS_MAX);
    let (found, next_offset) = differences.await?;
    let extent = |one: ChangedExtent| DiffExtent {
        offset: one.offset,
        length: one.length_bytes,
        is_hole: one.is_hole,
    };
    let extents = found.into_iter().map(extent).collect();
    Ok(Reply::SnapshotDiff(DiffInfo { extents, next_offset }))
}

/// Reports on snapshots. `held` are the bytes that each alone holds, if known.
fn snapshots(open: &OpenPool, found: &[NamedSnapshot], held: &Held) -> Reply {
    let are_in_store = open.pool.are_in_store(found);
    let infos = found.iter().zip(are_in_store);
    let infos = infos.map(|(one, is_in_store)| snapshot_info(one, is_in_store, held));
    Reply::Snapshots { snapshots: infos.collect() }
}

/// Reports on one snapshot. `held`: see [`snapshots`].
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

fn schedule_info(volume: String, plan: SchedulePlan) -> ScheduleInfo {
    let one = |(one, why): (NamedSnapshot, Option<&'static str>)| ScheduledInfo {
        name: one.record.name,
        created_at: one.record.created_at,
        kept_as: why.map(str::to_owned),
    };
    ScheduleInfo {
        volume,
        cron: plan.schedule.as_ref().map(|schedule| schedule.cron.clone()),
        keep: plan.schedule.map(|schedule| convert::keep_out(schedule.keep)),
        next_at: plan.next_at,
        snapshots: plan.snapshots.into_iter().map(one).collect(),
    }
}
