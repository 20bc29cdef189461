//! Scheduled snapshots: creates and prunes them.
//!
//! Invariants:
//! - A schedule removes only snapshots that it has made, and only after it has made another one.
//! - Volumes that are due at the same minute get snapshots of one instant.
//! - Times that passed while no daemon ran are made up for with a single snapshot.
//! - Snapshots are ordered by creation; the time on the clock only names them. The one made last is
//!   the newest, however the clock has jumped.

use super::{NamedSnapshot, Pool};
use crate::schedule::{AHEAD_MAX, Keep, Schedule, kept, name_at};
use crate::snapshot::{SnapshotName, VOLUMES_MAX};
use crate::superseded::SNAPSHOT_PREFIX;
use async_recursion::async_recursion;
use block::{Error, ErrorKind, Result};
use std::collections::BTreeMap;

/// Names to try for one time: a clock that was put back reaches the same hour again. Chosen by
/// hand.
const NAMES_OF_SLOT_MAX: u32 = 100;

/// Forecast for the snapshots that a schedule has made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchedulePlan {
    /// The schedule, if there is one.
    pub schedule: Option<Schedule>,
    /// Next time of the schedule, in seconds since the Unix epoch.
    pub next_at: Option<u64>,
    /// Snapshots made by it, oldest first, each with the reason why the next run keeps it; `None`
    /// if the next run removes it.
    pub snapshots: Vec<(NamedSnapshot, Option<&'static str>)>,
}

impl Pool {
    /// Sets or removes the schedule of a volume.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` for an invalid schedule; errors writing the log.
    #[async_recursion]
    pub async fn set_schedule(&self, name: &str, new: Option<(&str, Keep)>) -> Result<()> {
        let schedule =
            new.map(|(cron, keep)| Schedule::new(cron, keep, self.clock().wall())).transpose()?;
        let _one_at_a_time = self.changes.lock().await;
        let volume = self.find(name)?;
        let change = |record: &mut crate::record::VolumeRecord| record.schedule = schedule;
        let record = volume.update_record_of_any(change).await?;
        self.volumes.lock().records.insert(record.id, record);
        Ok(())
    }

    /// Returns what a volume's schedule will do next.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn schedule_plan(&self, name: &str) -> Result<SchedulePlan> {
        let schedule = self.find(name)?.record().schedule;
        let mut made = self.snapshots(Some(name))?;
        made.retain(|one| one.record.is_scheduled);
        let now = self.clock().wall();
        let next_at = match &schedule {
            Some(schedule) => schedule.next_after(now)?,
            None => None,
        };
        let mut times: Vec<u64> = made.iter().map(|one| one.record.created_at).collect();
        times.extend(next_at);
        let why = match &schedule {
            Some(schedule) => kept(&times, schedule.keep),
            None => vec![Some("no schedule"); times.len()],
        };
        let snapshots = made.into_iter().zip(why).collect();
        Ok(SchedulePlan { schedule, next_at, snapshots })
    }

    /// Makes the snapshots that are due, and removes those that are no longer kept. Returns how
    /// many were made and removed. The next call tries again what failed.
    #[async_recursion]
    pub async fn run_schedules(&self) -> (usize, usize) {
        let mut due: BTreeMap<u64, Vec<String>> = BTreeMap::new();
        for volume in self.volumes() {
            let record = volume.record();
            if let Some(slot) = self.due_slot(&record) {
                due.entry(slot).or_default().push(record.name);
            }
        }
        let (mut made, mut removed) = (0, 0);
        for (slot, names) in due {
            for volumes in names.chunks(VOLUMES_MAX) {
                for name in self.make_scheduled(slot, volumes).await {
                    made += 1;
                    removed += self.prune_scheduled(&name).await;
                }
            }
        }
        (made, removed)
    }

    /// Latest scheduled time, if no snapshot was made for it.
    fn due_slot(&self, record: &crate::record::VolumeRecord) -> Option<u64> {
        let schedule = record.schedule.as_ref()?;
        let now = self.clock().wall();
        let slot = schedule.last_before(now).ok()??;
        let mut volumes = self.volumes.lock();
        // Ignore snapshots and marks that a clock running ahead has left, and those made before
        // them.
        let latest = now.saturating_add(AHEAD_MAX);
        let its = volumes.snapshots.of(record.id).filter(|(_, one)| one.is_scheduled);
        let newest = its.last().map_or(0, |(_, one)| one.created_at);
        let newest = if newest > latest { 0 } else { newest };
        let done = volumes.slots_done.entry(record.id).or_default();
        *done = newest.max(if *done > latest { 0 } else { *done });
        (*done < slot).then_some(slot)
    }

    /// Returns the volumes that got a snapshot.
    async fn make_scheduled(&self, slot: u64, volumes: &[String]) -> Vec<String> {
        let name = self.free_name(slot, volumes);
        let mut done = Vec::new();
        for volume in volumes {
            match self.check_snapshot(volume, &name) {
                Ok(()) => done.push(volume.clone()),
                // It must not hold up the others, which share one instant.
                Err(error) => self.warn_of_slot(volume, slot, &error),
            }
        }
        let asked = SnapshotName { volumes: done.clone(), name };
        if !done.is_empty()
            && let Err(error) = self.create_snapshots_as(&asked, true).await
        {
            done.iter().for_each(|volume| self.warn_of_slot(volume, slot, &error));
            return Vec::new();
        }
        // Marked even if the snapshot is removed: it is not made again.
        let mut held = self.volumes.lock();
        for name in &done {
            if let Some(id) = held.present.get(name).map(|volume| volume.id().0) {
                held.slots_done.insert(id, slot);
            }
        }
        done
    }

    /// Finds a name for the snapshots of a time that none of the volumes uses.
    fn free_name(&self, slot: u64, volumes: &[String]) -> String {
        let name = name_at(slot);
        let others = (2..=NAMES_OF_SLOT_MAX).map(|number| format!("{name}-{number}"));
        let is_free =
            |name: &String| volumes.iter().all(|volume| self.snapshot(volume, name).is_err());
        std::iter::once(name.clone()).chain(others).find(is_free).unwrap_or(name)
    }

    /// Warns once for each scheduled time.
    fn warn_of_slot(&self, name: &str, slot: u64, error: &Error) {
        let mut volumes = self.volumes.lock();
        let Some(id) = volumes.present.get(name).map(|volume| volume.id().0) else { return };
        if volumes.slots_warned.insert(id, slot) != Some(slot) {
            tracing::warn!(
                volume = %name, error = %error.chain(),
                "could not make a snapshot that is due; trying again"
            );
        }
    }

    pub(super) async fn prune_scheduled(&self, name: &str) -> usize {
        let Ok(volume) = self.find(name) else { return 0 };
        let Some(schedule) = volume.record().schedule else { return 0 };
        drop(volume);
        let mut made = self.snapshots(Some(name)).unwrap_or_default();
        made.retain(|one| one.record.is_scheduled);
        let times: Vec<u64> = made.iter().map(|one| one.record.created_at).collect();
        let mut removed = 0;
        for (one, why) in made.iter().zip(kept(&times, schedule.keep)) {
            if why.is_some() {
                continue;
            }
            match self.remove_this(name, one).await {
                Ok(_) => removed += 1,
                Err(error) => tracing::debug!(
                    error = %error.chain(),
                    "could not remove a snapshot; it stays for now"
                ),
            }
        }
        removed
    }

    /// Makes a snapshot of each of the volumes, at the same instant. Durable when this returns.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if a snapshot of that name exists, or too many wait for the store; `Full`
    /// if there are too many; `Invalid` for a name reserved for schedules or take-overs.
    #[async_recursion]
    pub async fn create_snapshots(&self, asked: &SnapshotName) -> Result<Vec<NamedSnapshot>> {
        if asked.name.starts_with("auto-") {
            let what = format!(
                "make snapshot {}: names that begin with auto- are those of schedules; choose another",
                asked.name
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        if asked.name.starts_with(SNAPSHOT_PREFIX) {
            let what = format!(
                "make snapshot {}: names that begin with {SNAPSHOT_PREFIX} are those of take-overs; choose another",
                asked.name
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        self.create_snapshots_as(asked, false).await
    }
}
