//! A pool that was restored in part: all but some volumes go, before anything is served.

use super::Pool;
use super::shared::trim_of_all;
use crate::record::{VolumeRecord, VolumeState};
use crate::snapshot::{Removed, SnapshotEntry};
use block::{Lsn, Result, VolumeId};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Snapshots that one log entry removes. Chosen by hand: half of what an entry holds.
const REMOVED_AT_ONCE: usize = 8192;
/// Rounds in which a volume that is aside is tried until its trim is in the store. Chosen by hand: each takes what a
/// quarter of the log holds.
const ASIDE_ROUNDS: u32 = 16;
/// Pause behind each, as the store may fail at once.
const ASIDE_PAUSE: Duration = Duration::from_millis(500);

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
            // One that is aside is trimmed in a side file first, which may be on another machine.
            let is_left = |record: &VolumeRecord| {
                record.state != VolumeState::Purged || self.shared.is_aside(VolumeId(record.id))
            };
            let dropped = volumes.records.values();
            dropped
                .filter(|record| !kept.contains(&record.id) && is_left(record))
                .cloned()
                .collect()
        };
        let count = dropped.len();
        for mut record in dropped {
            // In this order: where a death comes between, the volume is found here again.
            let trim = trim_of_all(VolumeId(record.id));
            self.shared.append_change(trim, Vec::new()).await?;
            record.state = VolumeState::Purged;
            self.shared.log_record(&record).await?;
            self.volumes.lock().records.insert(record.id, record);
        }
        // From now on the metadata says what is still being dropped.
        self.wait_logged_in_store().await?;
        self.wait_not_aside(kept).await?;
        // What they were made from is kept for their sake until then.
        self.retire_purged().await;
        tracing::info!(
            count,
            kept_count = kept.len(),
            "volumes that are not to be restored are dropped"
        );
        Ok(())
    }

    /// What was logged before this call is in the store when it returns, but for what volumes hold that are aside.
    ///
    /// # Errors
    /// Those of the log; `Unavailable` while the store does not answer.
    pub(crate) async fn wait_logged_in_store(&self) -> Result<()> {
        let last = self.shared.log.flush().await?;
        self.shared.wait_destaged(last).await
    }

    /// Tries those that are dropped and aside until the store has their trim, too: nobody else could, once another
    /// machine has the pool. In vain a few times, it is said, and the rest of the pool does not wait for them.
    async fn wait_not_aside(&self, kept: &BTreeSet<u32>) -> Result<()> {
        let asides = || -> Vec<VolumeId> {
            let all = self.shared.asides().into_iter();
            all.filter(|volume| !kept.contains(&volume.0)).collect()
        };
        for _ in 0..ASIDE_ROUNDS {
            if asides().is_empty() {
                return Ok(());
            }
            self.shared.try_late().await?;
            tokio::time::sleep(ASIDE_PAUSE).await;
        }
        for volume in asides() {
            tracing::warn!(
                volume = volume.0,
                "a dropped volume cannot be destaged; its space comes back once it can be"
            );
        }
        Ok(())
    }

    /// A volume has no end any more at which it is removed by itself.
    ///
    /// # Errors
    /// `NotFound`; those of the log.
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
