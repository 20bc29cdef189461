//! Snapshots that are made and removed by schedule.
//!
//! Invariants:
//! - Only what a schedule has made is removed by it, and only after it has made another one.
//! - Volumes that are due at the same minute get snapshots of one instant.
//! - A time that came while no daemon ran is made up for once, by one snapshot.
//! - Snapshots are in the order in which they were made: what the clock showed then only names them. One that was just
//!   made is the newest, wherever the clock has jumped.

use super::{NamedSnapshot, Pool};
use crate::schedule::{AHEAD_MAX, Keep, Schedule, kept, name_at};
use crate::snapshot::{SnapshotName, VOLUMES_MAX};
use block::{Error, ErrorKind, Result};
use std::collections::BTreeMap;

/// Names for one time that are tried: a clock that was put back comes to the same hour again. Chosen by hand.
const NAMES_OF_SLOT_MAX: u32 = 100;

/// What becomes of the snapshots that a schedule has made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchedulePlan {
    /// The schedule, if there is one.
    pub schedule: Option<Schedule>,
    /// When it comes next, in seconds since the Unix epoch.
    pub next_at: Option<u64>,
    /// Those made by it, oldest first, each with why it is kept when it comes next; `None`: it goes then.
    pub snapshots: Vec<(NamedSnapshot, Option<&'static str>)>,
}

impl Pool {
    /// Gives a volume a schedule, or none.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` for what is no schedule; those of writing the log.
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

    /// What a volume's schedule will do next.
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

    /// Makes the snapshots that are due, and removes those that are not kept any more. Returns how many were made and
    /// removed. What fails is tried again with the next call.
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

    /// The time that came last, if no snapshot was made for it.
    fn due_slot(&self, record: &crate::record::VolumeRecord) -> Option<u64> {
        let schedule = record.schedule.as_ref()?;
        let now = self.clock().wall();
        let slot = schedule.last_before(now).ok()??;
        let mut volumes = self.volumes.lock();
        // What a clock that was ahead has left does not count, and neither what was made before it.
        let latest = now.saturating_add(AHEAD_MAX);
        let its = volumes.snapshots.of(record.id).filter(|(_, one)| one.is_scheduled);
        let newest = its.last().map_or(0, |(_, one)| one.created_at);
        let newest = if newest > latest { 0 } else { newest };
        let done = volumes.slots_done.entry(record.id).or_default();
        *done = newest.max(if *done > latest { 0 } else { *done });
        (*done < slot).then_some(slot)
    }

    /// Returns the volumes that have got one.
    async fn make_scheduled(&self, slot: u64, volumes: &[String]) -> Vec<String> {
        let name = self.free_name(slot, volumes);
        let mut done = Vec::new();
        for volume in volumes {
            match self.check_snapshot(volume, &name) {
                Ok(()) => done.push(volume.clone()),
                // It is not to be in the way of the others, which are of one instant.
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
        // Also if somebody removes it: that one is not made again.
        let mut held = self.volumes.lock();
        for name in &done {
            if let Some(id) = held.present.get(name).map(|volume| volume.id().0) {
                held.slots_done.insert(id, slot);
            }
        }
        done
    }

    /// A name for the snapshots of a time that none of the volumes has a snapshot of.
    fn free_name(&self, slot: u64, volumes: &[String]) -> String {
        let name = name_at(slot);
        let others = (2..=NAMES_OF_SLOT_MAX).map(|number| format!("{name}-{number}"));
        let is_free =
            |name: &String| volumes.iter().all(|volume| self.snapshot(volume, name).is_err());
        std::iter::once(name.clone()).chain(others).find(is_free).unwrap_or(name)
    }

    /// Once for each time that comes.
    fn warn_of_slot(&self, name: &str, slot: u64, error: &Error) {
        let mut volumes = self.volumes.lock();
        let Some(id) = volumes.present.get(name).map(|volume| volume.id().0) else { return };
        if volumes.slots_warned.insert(id, slot) != Some(slot) {
            tracing::warn!(
                volume = %name, error = %error.chain(),
                "a snapshot that is due was not made; it is tried again"
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
                Err(error) => tracing::debug!(error = %error.chain(), "a snapshot stays for now"),
            }
        }
        removed
    }

    /// Makes a snapshot of each of the volumes, of the same instant. Durable when this returns.
    ///
    /// # Errors
    /// `NotFound`; `Busy` when one of that name exists, or when too many wait for the store; `Full` when there are
    /// too many; `Invalid` for a name that schedules use.
    pub async fn create_snapshots(&self, asked: &SnapshotName) -> Result<Vec<NamedSnapshot>> {
        if asked.name.starts_with("auto-") {
            let what = format!(
                "make snapshot {}: names that begin with auto- are those of schedules; choose another",
                asked.name
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        self.create_snapshots_as(asked, false).await
    }
}
