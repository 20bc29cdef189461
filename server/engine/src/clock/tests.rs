//! Tests with clocks that jump.

use super::*;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) const DAY: u64 = 86_400;
/// Sunday, 22 November 2026, 20:15:30 UTC.
pub(crate) const NOW: u64 = 1_795_378_530;

/// Clocks that are set by a test.
pub(crate) struct ManualTimes {
    wall: AtomicU64,
    steady: AtomicU64,
}

impl ManualTimes {
    pub(crate) fn new() -> Arc<ManualTimes> {
        Arc::new(ManualTimes { wall: AtomicU64::new(NOW), steady: AtomicU64::new(1000) })
    }

    /// Lets time pass.
    pub(crate) fn pass(&self, seconds: u64) {
        self.wall.fetch_add(seconds, Ordering::Relaxed);
        self.steady.fetch_add(seconds, Ordering::Relaxed);
    }

    /// Sets the wall clock forward or back.
    pub(crate) fn jump(&self, seconds: i64) {
        self.wall.fetch_add(seconds as u64, Ordering::Relaxed);
    }

    /// Starts another kernel after this many seconds.
    fn reboot(&self, seconds: u64) {
        self.wall.fetch_add(seconds, Ordering::Relaxed);
        self.steady.store(10, Ordering::Relaxed);
    }
}

impl Times for ManualTimes {
    fn wall_seconds(&self) -> u64 {
        self.wall.load(Ordering::Relaxed)
    }

    fn steady_seconds(&self) -> u64 {
        self.steady.load(Ordering::Relaxed)
    }
}

fn boot(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

/// Lets time pass while the pool looks at the clock every minute.
fn pass_looking(times: &ManualTimes, clock: &ProvenClock, seconds: u64) {
    for _ in 0..seconds / 60 {
        times.pass(60);
        clock.keep();
    }
}

fn is_told(clock: &ProvenClock) -> bool {
    clock.conditions.is_raised(ConditionKind::ClockJumped, "machine")
}

#[test]
fn a_deadline_passes_when_its_time_has_passed() {
    let times = ManualTimes::new();
    let clock = ProvenClock::new(times.clone(), boot(1), 0, None);
    let deadline = clock.stamp() + 3600;
    times.pass(3599);
    assert!(!clock.is_past(deadline));
    times.pass(1);
    assert!(clock.is_past(deadline) && clock.is_even() && !is_told(&clock));
    // A small correction of the clock is followed.
    times.jump(-60);
    assert!(!clock.is_past(deadline) && clock.is_even());
}

#[test]
fn a_jump_forward_passes_no_deadline_until_the_clock_has_gone_evenly_for_a_day() {
    let times = ManualTimes::new();
    let clock = ProvenClock::new(times.clone(), boot(1), 0, None);
    let (soon, late) = (clock.stamp() + 3600, clock.stamp() + 30 * DAY);
    times.jump(365 * DAY as i64);
    assert!(!clock.is_past(soon) && is_told(&clock) && !clock.is_even());
    pass_looking(&times, &clock, 3600);
    assert!(clock.is_past(soon), "an hour has passed by both clocks");
    pass_looking(&times, &clock, DAY - 3700);
    assert!(!clock.is_past(late) && is_told(&clock));
    pass_looking(&times, &clock, 300);
    assert!(clock.is_past(late) && clock.is_even() && !is_told(&clock));
}

#[test]
fn a_clock_that_jumps_there_and_back_has_passed_no_deadline() {
    let times = ManualTimes::new();
    let clock = ProvenClock::new(times.clone(), boot(1), 0, None);
    let deadline = clock.stamp() + DAY;
    for _ in 0..20 {
        times.jump(40 * DAY as i64);
        pass_looking(&times, &clock, 600);
        assert!(!clock.is_past(deadline) && is_told(&clock));
        times.jump(-40 * (DAY as i64));
        pass_looking(&times, &clock, 600);
        assert!(!clock.is_past(deadline) && !is_told(&clock));
    }
}

#[test]
fn what_is_removed_while_the_clock_is_wrong_is_kept_for_its_time() {
    for days in [-3000, 3000] {
        let times = ManualTimes::new();
        let clock = ProvenClock::new(times.clone(), boot(1), 0, None);
        times.jump(days * DAY as i64);
        let deadline = clock.stamp() + 7 * DAY;
        pass_looking(&times, &clock, 600);
        // The clock is set right again.
        times.jump(-days * DAY as i64);
        pass_looking(&times, &clock, 6 * DAY);
        assert!(!clock.is_past(deadline) && clock.is_even(), "{days} days");
    }
}

#[test]
fn a_clock_that_stays_back_is_believed_after_a_day_too() {
    let times = ManualTimes::new();
    let clock = ProvenClock::new(times.clone(), boot(1), 0, None);
    times.jump(-40 * (DAY as i64));
    assert!(!clock.is_even() && is_told(&clock));
    pass_looking(&times, &clock, DAY + 60);
    assert!(clock.is_even() && !is_told(&clock));
    let deadline = clock.stamp() + DAY;
    assert!(deadline < NOW - 37 * DAY);
    times.jump(40 * DAY as i64);
    assert!(!clock.is_past(deadline), "that it was believed once proves nothing");
}

#[test]
fn a_restart_forgets_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = Some(dir.path().join(FILE));
    let times = ManualTimes::new();
    let open = |number| ProvenClock::new(times.clone(), boot(number), NOW, path.clone());
    let clock = open(1);
    let deadline = clock.stamp() + 7 * DAY;
    clock.save();
    drop(clock);
    // While no daemon runs, the kernel's clock continues.
    times.pass(6 * DAY);
    times.jump(100 * DAY as i64);
    let clock = open(1);
    assert!(!clock.is_past(deadline) && is_told(&clock));
    pass_looking(&times, &clock, DAY / 2);
    clock.save();
    drop(clock);
    let clock = open(1);
    assert!(is_told(&clock));
    pass_looking(&times, &clock, DAY / 2);
    assert!(clock.is_past(deadline) && !is_told(&clock));
}

#[test]
fn a_machine_that_was_off_is_believed_after_a_day_and_nothing_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = Some(dir.path().join(FILE));
    let times = ManualTimes::new();
    let open = |number| ProvenClock::new(times.clone(), boot(number), NOW, path.clone());
    let clock = open(1);
    let deadline = clock.stamp() + 7 * DAY;
    clock.save();
    drop(clock);
    times.reboot(60);
    let clock = open(2);
    assert!(clock.is_even(), "a reboot of a minute is none");
    clock.save();
    drop(clock);
    times.reboot(30 * DAY);
    let clock = open(3);
    assert!(!clock.is_past(deadline) && !clock.is_even() && !is_told(&clock));
    pass_looking(&times, &clock, DAY + 60);
    assert!(clock.is_past(deadline));
    // A clock that starts up in the past is wrong.
    clock.save();
    drop(clock);
    times.jump(-9000 * (DAY as i64));
    times.reboot(60);
    assert!(is_told(&open(4)));
}

#[test]
fn a_directory_without_an_observation_knows_what_the_records_say() {
    let times = ManualTimes::new();
    let open = |newest| ProvenClock::new(times.clone(), boot(1), newest, None);
    assert!(open(0).is_even() && open(NOW - 10).is_even() && open(NOW + 1000 * DAY).is_even());
    let clock = open(NOW - 10 * DAY);
    assert!(!clock.is_past(NOW - 9 * DAY) && clock.is_past(NOW - 10 * DAY) && !is_told(&clock));
    // An incomplete file counts as none.
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(FILE), "{\"version\":1").unwrap();
    assert!(read(&dir.path().join(FILE)).is_none() && proven_in(dir.path()).is_none());
}

/// The bug that is also in [`crate::seeded_bugs`]: the tests above would detect it.
#[test]
fn a_clock_that_is_trusted_at_once_is_found() {
    let times = ManualTimes::new();
    let mut clock = ProvenClock::new(times.clone(), boot(1), 0, None);
    clock.believed_after = 0;
    let deadline = clock.stamp() + DAY;
    times.jump(2 * DAY as i64);
    assert!(clock.is_past(deadline));
}
