//! Partial restore of a pool: drops all volumes but the chosen ones before anything is served.

use super::Pool;
use crate::record::{VolumeRecord, VolumeState};
use crate::snapshot::{Removed, SnapshotEntry};
use crate::state::trim_of_all;
use block::{Lsn, Result, VolumeId};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Snapshots that one log entry removes. Chosen by hand: half of the capacity of an entry.
const REMOVED_AT_ONCE: usize = 8192;
/// Rounds in which volumes that are stalled are tried until their trims are in the store. Chosen by
/// hand: each round moves up to a quarter of the log.
const STALLED_ROUNDS: u32 = 16;
/// Pause after each round, because the store may fail at once.
const STALLED_PAUSE: Duration = Duration::from_millis(500);

impl Pool {
    /// Lowest id that a volume created from now on can get. Purged volumes count, too.
    pub(crate) fn first_new_volume(&self) -> u32 {
        let volumes = self.volumes.lock();
        volumes.records.last_key_value().map_or(1, |(id, _)| id.saturating_add(1))
    }

    /// Drops all volumes except `kept` for good, with all of their snapshots, including volumes
    /// that could be restored. Does not check for dependents: clones keep showing the data they
    /// were made from. Only for a pool that does not serve anything yet. If interrupted, it can be
    /// called again.
    ///
    /// # Errors
    /// Log errors; `Unavailable` while the store does not answer.
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
            // A volume that is stalled is trimmed in a spill file first, and that file may be on
            // another machine.
            let is_left = |record: &VolumeRecord| {
                record.state != VolumeState::Purged || self.shared.is_stalled(VolumeId(record.id))
            };
            let dropped = volumes.records.values();
            dropped
                .filter(|record| !kept.contains(&record.id) && is_left(record))
                .cloned()
                .collect()
        };
        let count = dropped.len();
        for mut record in dropped {
            // Keep this order: after a crash between the two steps, the volume is found here again.
            let trim = trim_of_all(VolumeId(record.id));
            self.shared.append_change(trim, Vec::new()).await?;
            record.state = VolumeState::Purged;
            self.shared.log_record(&record).await?;
            self.volumes.lock().records.insert(record.id, record);
        }
        // From now on the metadata says which data is still being dropped.
        self.wait_logged_in_store().await?;
        self.wait_not_stalled(kept).await?;
        // Their origins are kept for their sake until then.
        self.retire_purged().await;
        tracing::info!(
            count,
            kept_count = kept.len(),
            "the restore dropped the volumes that were not asked for"
        );
        Ok(())
    }

    /// Waits until everything logged before this call is in the store, except the data of volumes
    /// that are stalled.
    ///
    /// # Errors
    /// Log errors; `Unavailable` while the store does not answer.
    pub(crate) async fn wait_logged_in_store(&self) -> Result<()> {
        let last = self.shared.log.flush().await?;
        self.shared.wait_destaged(last).await
    }

    /// Tries the dropped volumes that are stalled until the store has their trims, too: no other
    /// machine could do it once it has taken over the pool. After a few failed rounds, this is
    /// logged, and the rest of the pool does not wait for them.
    async fn wait_not_stalled(&self, kept: &BTreeSet<u32>) -> Result<()> {
        let stalled_volumes = || -> Vec<VolumeId> {
            let all = self.shared.stalled_volumes().into_iter();
            all.filter(|volume| !kept.contains(&volume.0)).collect()
        };
        for _ in 0..STALLED_ROUNDS {
            if stalled_volumes().is_empty() {
                return Ok(());
            }
            self.shared.try_catch_up().await?;
            tokio::time::sleep(STALLED_PAUSE).await;
        }
        for volume in stalled_volumes() {
            tracing::warn!(
                volume = volume.0,
                "could not destage a dropped volume; its space does not return until then"
            );
        }
        Ok(())
    }

    /// Removes the expiry time of a volume, so that it is not removed automatically.
    ///
    /// # Errors
    /// `NotFound`; log errors.
    pub(crate) async fn keep_for_good(&self, name: &str) -> Result<()> {
        let volume = self.find(name)?;
        if volume.record().expires_at == 0 {
            return Ok(());
        }
        let _one_at_a_time = self.changes.lock().await;
        let record = volume.update_record_of_any(|record| record.expires_at = 0).await?;
        self.volumes.lock().records.insert(record.id, record);
        Ok(())
    }
}
