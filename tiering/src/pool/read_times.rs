//! When each segment was last read: a hint that decides which segments leave the data stores.
//!
//! Invariants:
//! - Time is that for which the pool was open, in seconds, across its owners. So neither a wall clock that jumps nor a
//!   month without a daemon makes segments cold.
//! - A segment of which nothing is known counts as read now. What a crash loses are the reads of some minutes, and the
//!   time since the last record.
//! - Memory is bounded by [`GROUPS_MAX`]. Beyond it, all segments count as read at that time.
//! - The groups in memory are additions to those in the metadata: of two times of a segment, the later one counts.

use super::Metadata;
use crate::map::read_times::{GROUP_SEGMENTS, Times, TimesChange, place_of};
use block::env::Clock;
use block::{Error, ErrorKind, Result};
use parking_lot::{Mutex, RwLock};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Maximum number of groups in memory. Chosen by hand: 4 MiB, and 16 TiB of segments of the default size that are read
/// between two records.
const GROUPS_MAX: usize = 4096;
/// Groups that stay in memory once they are recorded, so that reads do not add them again.
const GROUPS_KEPT: usize = GROUPS_MAX / 2;
/// Groups of one commit. Chosen by hand: 320 KiB at most.
const GROUPS_AT_ONCE: usize = 256;
/// Pause between two records while segments are read, and while none is. Chosen by hand: each is a commit.
const SAVE_PAUSE: Duration = Duration::from_secs(600);
const IDLE_SAVE_PAUSE: Duration = Duration::from_secs(3600);

/// The reads of a group since its record was read last, by the place in the group; 0: none.
#[derive(Debug)]
struct Group {
    times: [AtomicU32; GROUP_SEGMENTS],
    is_dirty: AtomicBool,
}

impl Group {
    fn new() -> Group {
        Group {
            times: [const { AtomicU32::new(0) }; GROUP_SEGMENTS],
            is_dirty: AtomicBool::new(false),
        }
    }

    fn note(&self, place: usize, now: u32) {
        // The order matters: a record that is made meanwhile has the time, or leaves the group dirty.
        self.times[place].fetch_max(now, Ordering::AcqRel);
        self.is_dirty.store(true, Ordering::Release);
    }
}

/// The times; see the module. All readers share them.
#[derive(Debug)]
pub(crate) struct ReadTimes {
    clock: Arc<dyn Clock>,
    opened_at: Instant,
    /// Nothing is noted before it is needed.
    is_on: AtomicBool,
    /// Seconds for which the pool was open before this owner.
    before: AtomicU64,
    groups: RwLock<HashMap<u64, Group>>,
    /// All segments count as read at this time at least.
    floor: AtomicU32,
    saved_at: Mutex<Option<Instant>>,
}

impl ReadTimes {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> ReadTimes {
        ReadTimes {
            opened_at: clock.now(),
            clock,
            is_on: AtomicBool::new(false),
            before: AtomicU64::new(0),
            groups: RwLock::default(),
            floor: AtomicU32::new(0),
            saved_at: Mutex::default(),
        }
    }

    /// Notes reads from now on. `before`: the seconds for which the pool was open until now.
    pub(crate) fn begin(&self, before: u64) {
        self.before.store(before, Ordering::Release);
        self.is_on.store(true, Ordering::Release);
    }

    pub(crate) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Acquire)
    }

    fn open_seconds(&self) -> u64 {
        self.before.load(Ordering::Acquire) + self.clock.since(self.opened_at).as_secs()
    }

    /// The time now, from 1.
    pub(crate) fn now(&self) -> u32 {
        u32::try_from(self.open_seconds().saturating_add(1)).unwrap_or(u32::MAX)
    }

    /// Notes a read of a segment.
    pub(crate) fn note(&self, segment: u64) {
        if self.is_on() {
            self.note_at(segment, self.now());
        }
    }

    /// Notes a read of a segment at a time.
    fn note_at(&self, segment: u64, now: u32) {
        let (group, place) = place_of(segment);
        if let Some(group) = self.groups.read().get(&group) {
            return group.note(place, now);
        }
        let mut groups = self.groups.write();
        if groups.len() >= GROUPS_MAX && !groups.contains_key(&group) {
            self.floor.fetch_max(now, Ordering::AcqRel);
            return;
        }
        groups.entry(group).or_insert_with(Group::new).note(place, now);
    }

    /// The time since the last read of a segment of which the metadata has this time. Of one of which nothing is known,
    /// it is noted that it was read now.
    pub(crate) fn idle(&self, segment: u64, recorded: u32) -> Duration {
        let (group, place) = place_of(segment);
        let noted = self
            .groups
            .read()
            .get(&group)
            .map_or(0, |group| group.times[place].load(Ordering::Acquire));
        let now = self.now();
        let read_at = match recorded.max(noted) {
            0 => {
                self.note_at(segment, now);
                now
            }
            time => time.max(self.floor.load(Ordering::Acquire)),
        };
        // A time of the future would be that of a bucket that was rolled back.
        Duration::from_secs(u64::from(now.saturating_sub(read_at)))
    }

    /// The groups that have reads since their last record.
    fn take_dirty(&self) -> Vec<u64> {
        let groups = self.groups.read();
        let dirty = groups.iter().filter(|(_, group)| group.is_dirty.swap(false, Ordering::AcqRel));
        dirty.map(|(number, _)| *number).collect()
    }

    fn set_dirty(&self, dirty: &[u64]) {
        let groups = self.groups.read();
        let dirty = dirty.iter().filter_map(|number| groups.get(number));
        dirty.for_each(|group| group.is_dirty.store(true, Ordering::Release));
    }

    /// The recorded times of a group with those in memory.
    fn merged(&self, group: u64, mut times: Times) -> Times {
        if let Some(group) = self.groups.read().get(&group) {
            for (time, noted) in times.iter_mut().zip(&group.times) {
                *time = (*time).max(noted.load(Ordering::Acquire));
            }
        }
        times
    }

    /// Records the reads in the metadata if it is time to. Call it from time to time.
    ///
    /// # Errors
    /// Database errors; the reads stay in memory then.
    pub(crate) async fn save_sometimes(&self, metadata: &Arc<Metadata>) -> Result<()> {
        if !self.is_on() {
            return Ok(());
        }
        let since = *self.saved_at.lock().get_or_insert_with(|| self.clock.now());
        let (is_any, is_full) = {
            let groups = self.groups.read();
            let is_any = groups.values().any(|group| group.is_dirty.load(Ordering::Acquire));
            (is_any, groups.len() >= GROUPS_MAX)
        };
        let pause = if is_any { SAVE_PAUSE } else { IDLE_SAVE_PAUSE };
        if !is_full && self.clock.since(since) < pause {
            return Ok(());
        }
        self.save(metadata).await
    }

    /// Records the reads in the metadata.
    ///
    /// # Errors
    /// Database errors; the reads stay in memory then.
    pub(crate) async fn save(&self, metadata: &Arc<Metadata>) -> Result<()> {
        if !self.is_on() {
            return Ok(());
        }
        *self.saved_at.lock() = Some(self.clock.now());
        let dirty = self.take_dirty();
        let saved = self.save_groups(metadata, &dirty).await;
        match &saved {
            Ok(()) => self.forget_recorded(),
            Err(_) => self.set_dirty(&dirty),
        }
        saved
    }

    async fn save_groups(&self, metadata: &Arc<Metadata>, dirty: &[u64]) -> Result<()> {
        let mut rest = dirty;
        loop {
            let (chunk, more) = rest.split_at(rest.len().min(GROUPS_AT_ONCE));
            let mut change =
                TimesChange { open_seconds: self.open_seconds(), ..TimesChange::default() };
            for group in chunk {
                let recorded = metadata.map.read_times(*group).await?;
                change.put.push((*group, self.merged(*group, recorded)));
            }
            record(metadata, change).await?;
            rest = more;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    /// Makes room in memory.
    fn forget_recorded(&self) {
        let mut groups = self.groups.write();
        if groups.len() > GROUPS_KEPT {
            groups.retain(|_, group| group.is_dirty.load(Ordering::Acquire));
        }
    }

    /// Deletes the records of groups of which no segment is left: `living` are the others, found by a complete walk
    /// that began when no segment numbered `below` or higher existed.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn prune(
        &self,
        metadata: &Arc<Metadata>,
        living: &BTreeSet<u64>,
        below: u64,
    ) -> Result<()> {
        let (end, _) = place_of(below);
        let is_dead = |group: &u64| *group < end && !living.contains(group);
        let mut last = None;
        loop {
            let found = metadata.map.read_time_groups(last, GROUPS_AT_ONCE).await?;
            let deleted: Vec<u64> = found.iter().copied().filter(is_dead).collect();
            if !deleted.is_empty() {
                self.groups.write().retain(|group, _| !deleted.contains(group));
                let open_seconds = self.open_seconds();
                let change = TimesChange { open_seconds, deleted, ..TimesChange::default() };
                record(metadata, change).await?;
            }
            match found.last() {
                Some(end) if found.len() == GROUPS_AT_ONCE => last = Some(*end),
                _ => return Ok(()),
            }
        }
    }
}

/// Records a change in a task of its own, so that a caller that gives up does not leave the map half changed.
async fn record(metadata: &Arc<Metadata>, change: TimesChange) -> Result<()> {
    let metadata = Arc::clone(metadata);
    let task = tokio::spawn(async move {
        let mut writer = metadata.writer.lock().await;
        metadata.map.set_read_times(&mut writer, &change).await
    });
    let recorded = task.await.map_err(|cause| {
        Error::with_source(ErrorKind::Io, "record when segments were last read", cause)
    });
    recorded?
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::env::ManualClock;

    fn times(clock: &ManualClock) -> ReadTimes {
        let times = ReadTimes::new(Arc::new(clock.clone()));
        times.begin(1000);
        times
    }

    #[test]
    fn segment_is_idle_since_its_last_read_and_one_that_is_unknown_since_it_was_asked_for() {
        let clock = ManualClock::new();
        let times = times(&clock);
        times.note(7);
        clock.advance(Duration::from_secs(50));
        let idle = |segment, recorded| times.idle(segment, recorded).as_secs();
        assert_eq!((idle(7, 0), idle(8, 0)), (50, 0));
        clock.advance(Duration::from_secs(5));
        assert_eq!((idle(7, 0), idle(8, 0)), (55, 5));
        // The later of two times counts, and one of the future counts as now.
        assert_eq!((idle(7, 1031), idle(7, 900), idle(7, 5000)), (25, 55, 0));
        // Nothing is noted while nothing needs it.
        let off = ReadTimes::new(Arc::new(clock));
        off.note(7);
        assert!(off.groups.read().is_empty());
    }

    #[test]
    fn memory_is_bounded_and_what_does_not_fit_counts_as_read() {
        let clock = ManualClock::new();
        let times = times(&clock);
        let group = GROUP_SEGMENTS as u64;
        (0..GROUPS_MAX as u64).for_each(|number| times.note(number * group));
        assert_eq!(times.take_dirty().len(), GROUPS_MAX);
        clock.advance(Duration::from_secs(90));
        assert_eq!(times.idle(group, 0).as_secs(), 90);
        times.note(GROUPS_MAX as u64 * group);
        assert_eq!(times.groups.read().len(), GROUPS_MAX);
        assert_eq!(
            times.idle(group, 0).as_secs(),
            0,
            "some segment was read, and it is unknown which"
        );
        times.note(5);
        times.forget_recorded();
        assert_eq!(times.groups.read().len(), 1, "those that are recorded make room");
    }
}
