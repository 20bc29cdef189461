//! A pool that was restored in part: all but some volumes go, before anything is served.

use super::Pool;
use crate::record::VolumeState;
use crate::snapshot::{Removed, SnapshotEntry};
use block::{Lsn, Result, VolumeId};
use std::collections::{BTreeMap, BTreeSet};

/// Snapshots that one log entry removes. Chosen by hand: half of what an entry holds.
const REMOVED_AT_ONCE: usize = 8192;

impl Pool {
    /// Volumes that are made from now on have this id or a later one; those that were purged count, too.
    pub(crate) fn first_new_volume(&self) -> u32 {
        let volumes = self.volumes.lock();
        volumes.records.last_key_value().map_or(1, |(id, _)| id.saturating_add(1))
    }

    /// Drops every volume but these for good, with all of its snapshots, and those that could be restored. Nobody is asked
    /// who depends on them: clones go on showing what they were made from. Only for a pool of which nothing is served
    /// yet. Cut short, it can be called again.
    ///
    /// # Errors
    /// Those of the log; `Unavailable` while the store does not answer.
    pub(crate) async fn keep_only(&self, kept: &BTreeSet<u32>) -> Result<()> {
        let _one_at_a_time = self.changes.lock().await;
        let removed: Vec<Removed> = {
            let volumes = self.volumes.lock();
            let is_dropped = |(volume, _): &&(u32, Lsn)| !kept.contains(volume);
            let dropped = volumes.snapshots.records.keys().filter(is_dropped);
            dropped.map(|(volume, lsn)| Removed { volume: *volume, lsn: lsn.0 }).collect()
        };
        let mut last = None;
        for removed in removed.chunks(REMOVED_AT_ONCE) {
            // Each entry about snapshots ends a generation of the log.
            if let Some(last) = last {
                self.shared.wait_destaged(last).await?;
            }
            let made = self.log_snapshots(&SnapshotEntry::removing(removed.to_vec())).await?;
            let left = {
                let mut volumes = self.volumes.lock();
                for one in removed {
                    volumes.snapshots.records.remove(&(one.volume, Lsn(one.lsn)));
                }
                let lsns = removed.iter().map(|one| (Lsn(one.lsn), Vec::new()));
                let mut left: BTreeMap<Lsn, Vec<VolumeId>> = lsns.collect();
                for (volume, lsn) in volumes.snapshots.records.keys() {
                    if let Some(left) = left.get_mut(lsn) {
                        left.push(VolumeId(*volume));
                    }
                }
                left
            };
            for (lsn, left) in left {
                self.shared.log.set_snapshots(lsn, left);
            }
            self.shared.log.set_snapshots(made, Vec::new());
            last = Some(made);
        }
        let dropped: Vec<_> = {
            let mut volumes = self.volumes.lock();
            volumes.present.retain(|_, volume| {
                let is_kept = kept.contains(&volume.id().0);
                if !is_kept {
                    volume.retire();
                }
                is_kept
            });
            let is_dropped =
                |id: &u32, state: VolumeState| !kept.contains(id) && state != VolumeState::Purged;
            let dropped =
                volumes.records.iter().filter(|(id, record)| is_dropped(id, record.state));
            dropped.map(|(_, record)| record.clone()).collect()
        };
        let count = dropped.len();
        for mut record in dropped {
            // In this order: where a death comes between, the volume is found here again.
            self.trim_whole(VolumeId(record.id)).await?;
            record.state = VolumeState::Purged;
            self.shared.log_record(&record).await?;
            self.volumes.lock().records.insert(record.id, record);
        }
        // From now on the metadata says what is still being dropped.
        let last = self.shared.log.flush().await?;
        self.shared.wait_destaged(last).await?;
        tracing::info!(
            count,
            kept_count = kept.len(),
            "volumes that are not to be restored are dropped"
        );
        Ok(())
    }
}
