//! Tests with clocks that jump.

use super::*;
use block::env::ManualClock;
use std::time::Duration;

pub(crate) const DAY: u64 = 86_400;
/// Sunday, 22 November 2026, 20:15:30 UTC.
pub(crate) const NOW: u64 = 1_795_378_530;

/// Makes the clock of a machine on which it is [`NOW`].
pub(crate) fn manual_clock() -> ManualClock {
    let machine = ManualClock::new();
    machine.jump(NOW as i64 - machine.unix_seconds() as i64);
    machine
}

/// Lets time pass.
pub(crate) fn pass(machine: &ManualClock, seconds: u64) {
    machine.advance(Duration::from_secs(seconds));
}

/// Starts another kernel after this many seconds.
fn reboot(machine: &ManualClock, seconds: u64) {
    pass(machine, seconds);
    machine.reboot();
}

fn boot(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

/// Lets time pass while the pool looks at the clock every minute.
fn pass_looking(machine: &ManualClock, clock: &ProvenClock, seconds: u64) {
    for _ in 0..seconds / 60 {
        pass(machine, 60);
        clock.keep();
    }
}

fn is_told(clock: &ProvenClock) -> bool {
    clock.conditions.is_raised(ConditionKind::ClockJumped, "machine")
}

#[test]
fn a_deadline_passes_when_its_time_has_passed() {
    let machine = manual_clock();
    let clock = ProvenClock::new(Arc::new(machine.clone()), boot(1), 0, None);
    let deadline = clock.stamp() + 3600;
    pass(&machine, 3599);
    assert!(!clock.is_past(deadline));
    pass(&machine, 1);
    assert!(clock.is_past(deadline) && clock.is_even() && !is_told(&clock));
    // A small correction of the clock is followed.
    machine.jump(-60);
    assert!(!clock.is_past(deadline) && clock.is_even());
}

#[test]
fn jumped_clock_is_trusted_after_a_steady_day() {
    let machine = manual_clock();
    let clock = ProvenClock::new(Arc::new(machine.clone()), boot(1), 0, None);
    let (soon, late) = (clock.stamp() + 3600, clock.stamp() + 30 * DAY);
    machine.jump(365 * DAY as i64);
    assert!(!clock.is_past(soon) && is_told(&clock) && !clock.is_even());
    let mut trusting = ProvenClock::new(Arc::new(manual_clock()), boot(1), 0, None);
    trusting.believed_after = 0; // the seeded bug "clock-trusted"
    let deadline = trusting.stamp() + 30 * DAY;
    trusting.clock = Arc::new(machine.clone());
    trusting.keep();
    assert!(trusting.is_past(deadline), "the bug would be noticed");
    pass_looking(&machine, &clock, 3600);
    assert!(clock.is_past(soon), "an hour has passed by both clocks");
    pass_looking(&machine, &clock, DAY - 3700);
    assert!(!clock.is_past(late) && is_told(&clock));
    pass_looking(&machine, &clock, 300);
    assert!(clock.is_past(late) && clock.is_even() && !is_told(&clock));
}

#[test]
fn a_clock_that_jumps_there_and_back_has_passed_no_deadline() {
    let machine = manual_clock();
    let clock = ProvenClock::new(Arc::new(machine.clone()), boot(1), 0, None);
    let deadline = clock.stamp() + DAY;
    for _ in 0..20 {
        machine.jump(40 * DAY as i64);
        pass_looking(&machine, &clock, 600);
        assert!(!clock.is_past(deadline) && is_told(&clock));
        machine.jump(-40 * (DAY as i64));
        pass_looking(&machine, &clock, 600);
        assert!(!clock.is_past(deadline) && !is_told(&clock));
    }
}

#[test]
fn removals_under_a_wrong_clock_keep_their_full_time() {
    for days in [-3000, 3000] {
        let machine = manual_clock();
        let clock = ProvenClock::new(Arc::new(machine.clone()), boot(1), 0, None);
        machine.jump(days * DAY as i64);
        let deadline = clock.stamp() + 7 * DAY;
        pass_looking(&machine, &clock, 600);
        // The clock is set right again.
        machine.jump(-days * DAY as i64);
        pass_looking(&machine, &clock, 6 * DAY);
        assert!(!clock.is_past(deadline) && clock.is_even(), "{days} days");
    }
}

#[test]
fn a_clock_that_stays_back_is_believed_after_a_day_too() {
    let machine = manual_clock();
    let clock = ProvenClock::new(Arc::new(machine.clone()), boot(1), 0, None);
    machine.jump(-40 * (DAY as i64));
    assert!(!clock.is_even() && is_told(&clock));
    pass_looking(&machine, &clock, DAY + 60);
    assert!(clock.is_even() && !is_told(&clock));
    let deadline = clock.stamp() + DAY;
    assert!(deadline < NOW - 37 * DAY);
    machine.jump(40 * DAY as i64);
    assert!(!clock.is_past(deadline), "that it was believed once proves nothing");
}

#[test]
fn a_restart_forgets_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = Some(dir.path().join(FILE));
    let machine = manual_clock();
    let open =
        |number| ProvenClock::new(Arc::new(machine.clone()), boot(number), NOW, path.clone());
    let clock = open(1);
    let deadline = clock.stamp() + 7 * DAY;
    clock.save();
    drop(clock);
    // While no daemon runs, the kernel's clock continues.
    pass(&machine, 6 * DAY);
    machine.jump(100 * DAY as i64);
    let clock = open(1);
    assert!(!clock.is_past(deadline) && is_told(&clock));
    pass_looking(&machine, &clock, DAY / 2);
    clock.save();
    drop(clock);
    let clock = open(1);
    assert!(is_told(&clock));
    pass_looking(&machine, &clock, DAY / 2);
    assert!(clock.is_past(deadline) && !is_told(&clock));
}

#[test]
fn clock_after_downtime_is_trusted_after_a_day_silently() {
    let dir = tempfile::tempdir().unwrap();
    let path = Some(dir.path().join(FILE));
    let machine = manual_clock();
    let open =
        |number| ProvenClock::new(Arc::new(machine.clone()), boot(number), NOW, path.clone());
    let clock = open(1);
    let deadline = clock.stamp() + 7 * DAY;
    clock.save();
    drop(clock);
    reboot(&machine, 60);
    let clock = open(2);
    assert!(clock.is_even(), "a reboot of a minute is none");
    clock.save();
    drop(clock);
    reboot(&machine, 30 * DAY);
    let clock = open(3);
    assert!(!clock.is_past(deadline) && !clock.is_even() && !is_told(&clock));
    pass_looking(&machine, &clock, DAY + 60);
    assert!(clock.is_past(deadline));
    // A clock that starts up in the past is wrong.
    clock.save();
    drop(clock);
    machine.jump(-9000 * (DAY as i64));
    reboot(&machine, 60);
    assert!(is_told(&open(4)));
}

#[test]
fn directory_without_an_observation_relies_on_the_records() {
    let machine = manual_clock();
    let open = |newest| ProvenClock::new(Arc::new(machine.clone()), boot(1), newest, None);
    assert!(open(0).is_even() && open(NOW - 10).is_even() && open(NOW + 1000 * DAY).is_even());
    let clock = open(NOW - 10 * DAY);
    assert!(!clock.is_past(NOW - 9 * DAY) && clock.is_past(NOW - 10 * DAY) && !is_told(&clock));
    // An incomplete file counts as none.
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(FILE), "{\"version\":1").unwrap();
    assert!(read(&dir.path().join(FILE)).is_none() && proven_in(&machine, dir.path()).is_none());
}

/// The bug that is also in [`crate::seeded_bugs`]: the tests above would detect it.
#[test]
fn a_clock_that_is_trusted_at_once_is_found() {
    let machine = manual_clock();
    let mut clock = ProvenClock::new(Arc::new(machine.clone()), boot(1), 0, None);
    clock.believed_after = 0;
    let deadline = clock.stamp() + DAY;
    machine.jump(2 * DAY as i64);
    assert!(clock.is_past(deadline));
}
