//! What is known of a store of fragments from its answers: whether it fails, and how long it takes.
//!
//! Invariants:
//! - A store that fails is asked again from time to time, by one request at a time, and counts as well with
//!   the first answer.
//! - A store that is only late is not away: others are asked first, and it is asked if they are not enough. A store that
//!   is late with reads gets new fragments as ever.
//! - The estimate only decides when another way is tried. No read fails because of it.

use block::env::Clock;
use object_store::{Error, Result};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// First pause before a store that fails is asked again; it doubles up to the second. Chosen by hand.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Bounds of the time after which a read is tried another way. Below the first, the timer and the requests
/// cost more than the wait. Chosen by hand.
const PATIENCE_MIN: Duration = Duration::from_millis(2);
const PATIENCE_MAX: Duration = Duration::from_secs(1);
/// Late reads in a row after which a store counts as one that does not answer, and the shortest time that they take.
/// Chosen by hand: on a busy machine a process waits for a processor for some milliseconds, and to read everything from
/// others meanwhile makes the machine busier.
const LATE_MAX: u32 = 3;
pub(super) const LATE_MIN: Duration = Duration::from_millis(25);

/// What a store was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// For what a full store does, too: to read, list, look or delete.
    Read,
    /// To write.
    Write,
}

/// A store's record; see the module.
#[derive(Debug)]
pub(super) struct Health {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    reads: Option<Failing>,
    writes: Option<Failing>,
    /// Several reads in a row were late.
    late: Option<Failing>,
    late_count: u32,
    /// When the first of these was late.
    late_since: Option<Instant>,
    /// A fragment was late.
    late_write: Option<Late>,
    latency: Option<Latency>,
}

#[derive(Clone, Debug)]
struct Failing {
    why: String,
    since: Instant,
    pause: Duration,
    again_at: Instant,
}

/// A store that was late with a fragment.
#[derive(Clone, Copy, Debug)]
struct Late {
    noted_at: Instant,
    pause: Duration,
    again_at: Instant,
}

/// Smoothed time of a read and its deviation. Source: RFC 6298, section 2, with its gains.
#[derive(Clone, Copy, Debug)]
struct Latency {
    mean: Duration,
    deviation: Duration,
}

impl State {
    fn failing(&mut self, way: Way) -> &mut Option<Failing> {
        match way {
            Way::Read => &mut self.reads,
            Way::Write => &mut self.writes,
        }
    }
}

impl Failing {
    /// A failure at `now`, after an earlier one if there was one.
    fn after(earlier: Option<&Failing>, why: String, now: Instant) -> Failing {
        let pause = earlier.map_or(PAUSE, |earlier| (earlier.pause * 2).min(PAUSE_MAX));
        let since = earlier.map_or(now, |earlier| earlier.since);
        Failing { why, since, pause, again_at: now + pause }
    }

    /// Whether it is time to ask the store again. Whoever is told so has the turn.
    fn take_turn(&mut self, now: Instant) -> bool {
        let is_due = now >= self.again_at;
        if is_due {
            self.again_at = now + self.pause;
        }
        is_due
    }
}

impl Health {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Health {
        Health { clock, state: Mutex::default() }
    }

    /// Whether a request may go to the store: it is well, or it is time for one to ask it again.
    pub(super) fn may_ask(&self, way: Way) -> bool {
        let (mut state, now) = (self.state.lock(), self.clock.now());
        let may = state.failing(way).as_mut().is_none_or(|failing| failing.take_turn(now));
        let is_late = way == Way::Read && state.late.is_some();
        may && (!is_late || state.late.as_mut().is_none_or(|late| late.take_turn(now)))
    }

    /// Like [`Health::may_ask`], without taking the turn.
    pub(super) fn is_due(&self, way: Way) -> bool {
        let now = self.clock.now();
        self.state.lock().failing(way).as_ref().is_none_or(|failing| now >= failing.again_at)
    }

    /// Whether the store fails, without taking the turn to ask it again.
    pub(super) fn is_failing(&self, way: Way) -> bool {
        self.state.lock().failing(way).is_some()
    }

    /// Whether others are asked first.
    pub(super) fn is_avoided(&self) -> bool {
        let state = self.state.lock();
        state.reads.is_some() || state.late.is_some()
    }

    /// Whether others get new fragments first, because one was late. Whoever is told that it is not has the turn.
    pub(super) fn is_late_to_write(&self) -> bool {
        let (mut state, now) = (self.state.lock(), self.clock.now());
        state.late_write.as_mut().is_some_and(|late| {
            let is_due = now >= late.again_at;
            if is_due {
                late.again_at = now + late.pause;
            }
            !is_due
        })
    }

    /// Notes a fragment that was not taken in time. Returns true for the first one.
    pub(super) fn note_late_write(&self) -> bool {
        let (mut state, now) = (self.state.lock(), self.clock.now());
        let pause = match state.late_write {
            None => PAUSE,
            // Fragments that were sent together say nothing new.
            Some(late) if now < late.noted_at + PAUSE => return false,
            Some(late) => (late.pause * 2).min(PAUSE_MAX),
        };
        let late = Late { noted_at: now, pause, again_at: now + pause };
        state.late_write.replace(late).is_none()
    }

    /// How long the store has failed to be read or written.
    pub(super) fn failing_for(&self) -> Duration {
        let state = self.state.lock();
        let since =
            [&state.reads, &state.writes].into_iter().flatten().map(|failing| failing.since);
        since.min().map_or(Duration::ZERO, |since| self.clock.since(since))
    }

    /// Notes an answer. What is not stored is an answer, too. Returns true if the store fails from now on.
    pub(super) fn note<T>(&self, way: Way, result: &Result<T>) -> bool {
        match result {
            Err(error) if !is_answer(error) => self.fail(way, &error.to_string()),
            _ => {
                let mut state = self.state.lock();
                if way == Way::Write && result.is_ok() {
                    state.late_write = None;
                }
                // A store that has come back takes writes again.
                if way == Way::Read && state.reads.take().is_some() {
                    state.writes = None;
                }
                *state.failing(way) = None;
                false
            }
        }
    }

    /// Notes a failure. Returns true if it is the first.
    pub(super) fn fail(&self, way: Way, why: &str) -> bool {
        let (mut state, now) = (self.state.lock(), self.clock.now());
        let is_first = state.failing(way).is_none();
        // A later failure of requests that began together says nothing new.
        if state.failing(way).as_ref().is_none_or(|failing| now >= failing.again_at) {
            let failing = state.failing(way);
            *failing = Some(Failing::after(failing.as_ref(), tiering::one_line(why), now));
        }
        is_first
    }

    /// How long the store has not been read.
    pub(super) fn away_for(&self) -> Duration {
        let since = self.state.lock().reads.as_ref().map(|failing| failing.since);
        since.map_or(Duration::ZERO, |since| self.clock.since(since))
    }

    /// Notes the time of a read that was answered.
    pub(super) fn note_time(&self, taken: Duration) {
        let mut state = self.state.lock();
        (state.late_count, state.late_since, state.late) = (0, None, None);
        state.latency = Some(match state.latency {
            None => Latency { mean: taken, deviation: taken / 2 },
            Some(Latency { mean, deviation }) => Latency {
                mean: (mean * 7 + taken) / 8,
                deviation: (deviation * 3 + mean.abs_diff(taken)) / 4,
            },
        });
    }

    /// Notes a read that was not answered in time.
    pub(super) fn note_late(&self) {
        let (mut state, now) = (self.state.lock(), self.clock.now());
        state.late_count += 1;
        let since = *state.late_since.get_or_insert(now);
        if state.late_count >= LATE_MAX && now >= since + LATE_MIN {
            let why = "reads were not answered in time".to_owned();
            state.late = Some(Failing::after(state.late.as_ref(), why, now));
            (state.late_count, state.late_since) = (0, None);
        }
    }

    /// The time after which a read is tried another way.
    pub(super) fn patience(&self) -> Duration {
        let estimate = self.state.lock().latency;
        let estimate = estimate.map_or(PATIENCE_MAX, |it| it.mean + it.deviation * 4);
        estimate.clamp(PATIENCE_MIN, PATIENCE_MAX)
    }

    /// The smoothed time of a read; absent before the first.
    pub(super) fn mean(&self) -> Option<Duration> {
        self.state.lock().latency.map(|latency| latency.mean)
    }

    /// The cause of the last failure, while it lasts.
    pub(super) fn failure(&self) -> Option<String> {
        let state = self.state.lock();
        let failing = state.reads.as_ref().or(state.writes.as_ref());
        failing.map(|failing| failing.why.clone())
    }

    /// Why the store is not asked first although it works.
    pub(super) fn lateness(&self) -> Option<String> {
        let state = self.state.lock();
        let of_write = || "a fragment was not taken in time".to_owned();
        let of_read = state.late.as_ref().map(|late| late.why.clone());
        of_read.or_else(|| state.late_write.map(|_| of_write()))
    }
}

/// Whether the error is the answer of a store that works.
fn is_answer(error: &Error) -> bool {
    matches!(error, Error::NotFound { .. } | Error::AlreadyExists { .. })
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::env::ManualClock;

    fn failed() -> Result<()> {
        Err(Error::Generic { store: "test", source: "no disk".into() })
    }

    fn advance(clock: &ManualClock, millis: u64) {
        clock.advance(Duration::from_millis(millis));
    }

    #[test]
    fn store_that_fails_is_asked_again_after_growing_pauses_by_one_at_a_time() {
        let clock = ManualClock::new();
        let health = Health::new(Arc::new(clock.clone()));
        assert!(health.may_ask(Way::Read) && health.may_ask(Way::Read));
        health.note(Way::Read, &failed());
        health.note(Way::Read, &failed());
        assert!(health.failure().is_some_and(|why| why.contains("no disk")));
        assert!(health.may_ask(Way::Write), "reads say nothing of writes");
        advance(&clock, 999);
        assert!(!health.may_ask(Way::Read));
        advance(&clock, 1);
        assert!(health.may_ask(Way::Read));
        assert!(!health.may_ask(Way::Read), "one request has the turn");
        advance(&clock, 1000);
        health.note(Way::Read, &failed());
        advance(&clock, 1999);
        assert!(!health.may_ask(Way::Read), "the pause has doubled");
        for _ in 0..9 {
            advance(&clock, 30_000);
            assert!(health.may_ask(Way::Read));
            advance(&clock, 30_000);
            health.note(Way::Read, &failed());
        }
        advance(&clock, 30_000);
        assert!(health.may_ask(Way::Read), "30 s at most");
        let not_found = Error::NotFound { path: "x".to_owned(), source: "gone".into() };
        health.note::<()>(Way::Read, &Err(not_found));
        assert!(!health.is_failing(Way::Read) && health.failure().is_none());
        // A full disk, for instance: it is read as ever. One that was not mounted takes writes when it is back.
        health.note(Way::Write, &failed());
        health.note(Way::Read, &Ok(()));
        assert!(health.is_failing(Way::Write) && health.failure().is_some());
        health.note(Way::Read, &failed());
        health.note(Way::Read, &Ok(()));
        assert!(!health.is_failing(Way::Write));
    }

    #[test]
    fn store_that_is_late_with_fragments_is_passed_over_for_growing_times() {
        let clock = ManualClock::new();
        let health = Health::new(Arc::new(clock.clone()));
        assert!(!health.is_late_to_write() && health.note_late_write());
        for pause in [1, 2, 4, 8, 16, 30, 30] {
            assert!(!health.note_late_write(), "sent together with the one before");
            advance(&clock, pause * 1000 - 1);
            assert!(health.is_late_to_write(), "{pause}");
            advance(&clock, 1);
            assert!(!health.is_late_to_write(), "{pause}");
            assert!(health.is_late_to_write(), "one has the turn");
            // The one that had the turn is late, too, long before the next turn.
            advance(&clock, 1050);
            assert!(!health.note_late_write());
        }
        assert!(health.lateness().is_some() && health.failure().is_none());
        assert_eq!(health.failing_for(), Duration::ZERO);
        health.note(Way::Read, &Ok(()));
        assert!(health.is_late_to_write());
        health.note(Way::Write, &Ok(()));
        assert!(!health.is_late_to_write() && health.lateness().is_none());
    }

    #[test]
    fn patience_follows_the_reads_and_late_ones_in_a_row_are_a_failure() {
        let clock = ManualClock::new();
        let health = Health::new(Arc::new(clock.clone()));
        assert_eq!(health.patience(), PATIENCE_MAX);
        for _ in 0..100 {
            health.note_time(Duration::from_micros(100));
        }
        assert_eq!(health.patience(), PATIENCE_MIN);
        for _ in 0..100 {
            health.note_time(Duration::from_millis(20));
        }
        let patience = health.patience();
        assert!((20..25).contains(&patience.as_millis()), "{patience:?}");
        for _ in 0..9 {
            health.note_late();
            health.note_late();
            health.note_time(Duration::from_millis(20));
        }
        assert!(!health.is_avoided());
        (0..9).for_each(|_| health.note_late());
        assert!(!health.is_avoided(), "a process may wait for a processor for that long");
        advance(&clock, 25);
        health.note_late();
        assert!(health.is_avoided() && !health.is_failing(Way::Read) && !health.may_ask(Way::Read));
        assert!(health.may_ask(Way::Write) && health.failing_for() == Duration::ZERO);
        health.note_time(Duration::from_millis(20));
        assert!(!health.is_avoided());
    }
}
