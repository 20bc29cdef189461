//! The job that moves segments between data stores and the object store, as the policy of the pool wants it.
//!
//! Invariants:
//! - The job has no state but the map: a walk finds what is left to do, after a restart and with the next owner.
//! - The rebuild of what segments lack comes first, unless all of them leave the data stores.
//! - The job gives way to clients: while there are any, it rests for a quarter of the time that each segment took.
//! - A kind of step ends for a pass when several in a row have failed, and the other kinds go on: space comes back even if
//!   nothing can be written to the data stores. The next pass comes after a pause, which grows, and leaves out for a while
//!   the segments that have failed, so that a few which cannot be moved do not keep others from it.

use crate::data_stores::OpenDataStores;
use crate::rebuild::{Pace, RebuildState, WALK_PAUSE};
use block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use tiering::survey::Amount;
use tiering::tiers::{TierOutcome, TierPlan, TierStep, Tiers};

/// Failures in a row that end a kind of step. Chosen by hand: one segment may be damaged, and several mean a store.
const FAILURES_MAX: u32 = 3;
/// Time for which a segment that has failed is left out; it doubles up to the second. Chosen by hand: the first is longer
/// than the pause after a pass, so that the next one tries others.
const AGAIN_AFTER: Duration = Duration::from_secs(10);
const AGAIN_AFTER_MAX: Duration = Duration::from_secs(600);
/// Maximum number of segments that are left out. Chosen by hand: 1 MiB.
const FAILED_MAX: usize = 1 << 14;
/// Bounds of the pause after a pass that failed. Chosen by hand.
const FAILED_PAUSE: Duration = Duration::from_secs(5);
const FAILED_PAUSE_MAX: Duration = Duration::from_secs(300);
/// Longest pause while nothing is to be done. Chosen by hand: a walk reads the records of all segments.
const IDLE_PAUSE_MAX: Duration = Duration::from_secs(600);
/// A segment is found cold within this part of the time after which it is.
const COLD_PARTS: u32 = 4;

/// The state of the job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TiersStatus {
    /// Segments that are left to be copied to the object store, as the last walk has counted, without those that were
    /// done since.
    pub to_copy: Amount,
    /// Those that are left to be dropped from the data stores.
    pub to_drop: Amount,
    /// Those that are left to be brought back to the data stores.
    pub to_bring_back: Amount,
    /// Segments copied since the start.
    pub copied: Amount,
    /// Segments dropped since the start.
    pub dropped: Amount,
    /// Segments brought back since the start.
    pub brought_back: Amount,
    /// Objects that were not what their fragments are, and were rewritten, since the start.
    pub rewritten_count: u64,
    /// Cause of the last failure, until a segment succeeds.
    pub failure: Option<String>,
}

impl TiersStatus {
    fn amounts(&mut self, step: TierStep) -> (&mut Amount, &mut Amount) {
        match step {
            TierStep::Copy => (&mut self.to_copy, &mut self.copied),
            TierStep::Drop => (&mut self.to_drop, &mut self.dropped),
            TierStep::BringBack => (&mut self.to_bring_back, &mut self.brought_back),
        }
    }

    fn note(&mut self, step: TierStep, outcome: &Result<TierOutcome>) {
        let (left, done) = self.amounts(step);
        match outcome {
            Ok(TierOutcome::Done(bytes)) => {
                left.segment_count = left.segment_count.saturating_sub(1);
                left.bytes = left.bytes.saturating_sub(*bytes);
                *done += Amount { segment_count: 1, bytes: *bytes };
                self.failure = None;
            }
            Ok(TierOutcome::Rewritten(_)) => self.rewritten_count += 1,
            Ok(TierOutcome::Needless) => {
                left.segment_count = left.segment_count.saturating_sub(1);
            }
            Err(error) => self.failure = Some(error.chain()),
        }
    }
}

/// Shared state of the job.
#[derive(Debug, Default)]
pub struct TiersState {
    status: Mutex<TiersStatus>,
    /// The segments that have failed: until when they are left out, and for how long the last time.
    failed: Mutex<BTreeMap<u64, (Instant, Duration)>>,
}

impl TiersState {
    /// Returns the state.
    #[must_use]
    pub fn status(&self) -> TiersStatus {
        self.status.lock().clone()
    }

    fn set_plan(&self, plan: &TierPlan) {
        let mut state = self.status.lock();
        (state.to_copy, state.to_drop) = (plan.to_copy, plan.to_drop);
        state.to_bring_back = plan.to_bring_back;
    }
}

impl TiersState {
    /// Notes that a segment has failed.
    fn note_failed(&self, number: u64, now: Instant) {
        let mut failed = self.failed.lock();
        let earlier = failed.get(&number).map(|(_, pause)| *pause * 2);
        let pause = earlier.unwrap_or(AGAIN_AFTER).min(AGAIN_AFTER_MAX);
        failed.insert(number, (now + pause, pause));
        if failed.len() > FAILED_MAX {
            failed.pop_first();
        }
    }

    fn note_done(&self, number: u64) {
        self.failed.lock().remove(&number);
    }

    /// Takes out the segments that have failed a short while ago. Returns whether there were any.
    fn leave_out(&self, numbers: &mut Vec<u64>, now: Instant) -> bool {
        let failed = self.failed.lock();
        let count = numbers.len();
        numbers.retain(|number| failed.get(number).is_none_or(|(until, _)| now >= *until));
        numbers.len() < count
    }
}

/// The numbers of the stores that fail.
pub(crate) fn failing(stores: &dyn OpenDataStores) -> BTreeSet<u32> {
    let stores = stores.status().stores.into_iter();
    stores.filter(|store| store.failure.is_some()).map(|store| store.number).collect()
}

/// The outcome of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// Nothing is left to do, or the rest waits for the rebuild.
    Idle,
    /// Segments have changed their tiers.
    Moved,
    /// Stores have failed.
    Failed,
}

/// The pause after a pass. `pause` is the one before it.
pub(crate) fn pause_after(pass: Pass, pause: Duration, cold_after: Duration) -> Duration {
    let longest = (cold_after / COLD_PARTS).clamp(Duration::from_secs(1), IDLE_PAUSE_MAX);
    match pass {
        Pass::Idle => (pause * 2).min(longest),
        Pass::Moved => WALK_PAUSE.min(longest),
        Pass::Failed => (pause * 2).clamp(FAILED_PAUSE, FAILED_PAUSE_MAX),
    }
}

/// Walks through all segments, and changes the tiers of those that are not where they are to be: first of those that
/// clients wait for, then of those that are in one tier only.
///
/// # Errors
/// Database errors; `Fenced` when another process owns the pool.
pub(crate) async fn pass(
    pool: &crate::pool::Pool,
    state: &TiersState,
    rebuild: &RebuildState,
    stores: &dyn OpenDataStores,
    clock: &dyn block::env::Clock,
) -> Result<Pass> {
    let policy = stores.status().policy;
    let is_next = || policy.tiers == Tiers::ObjectStore || rebuild.status().left_count == 0;
    if !policy.tiers.is_moving() || !is_next() {
        return Ok(Pass::Idle);
    }
    let plan = pool.tier().tier_plan(policy).await?;
    state.set_plan(&plan);
    let steps = [
        (TierStep::BringBack, plan.bring_back),
        (TierStep::Copy, plan.copy),
        (TierStep::Drop, plan.drop),
    ];
    let pace = Pace::new(pool, clock);
    let (mut is_moved, mut is_failed) = (false, false);
    for (step, mut numbers) in steps {
        is_failed |= state.leave_out(&mut numbers, clock.now());
        let mut failure_count = 0;
        for number in numbers {
            if !is_next() {
                return Ok(if is_moved { Pass::Moved } else { Pass::Idle });
            }
            let begun: Instant = clock.now();
            let changed = pool.tier().change_tiers(number, step).await;
            state.status.lock().note(step, &changed);
            match changed {
                Ok(TierOutcome::Needless) => {}
                Ok(TierOutcome::Done(_) | TierOutcome::Rewritten(_)) => {
                    (is_moved, failure_count) = (true, 0);
                    state.note_done(number);
                }
                Err(error) if is_final(&error) => return Err(error),
                Err(_) => {
                    (is_failed, failure_count) = (true, failure_count + 1);
                    state.note_failed(number, clock.now());
                    if failure_count >= FAILURES_MAX {
                        break;
                    }
                }
            }
            pace.rest(begun).await;
        }
    }
    Ok(match (is_moved, is_failed) {
        (_, true) => Pass::Failed,
        (true, false) => Pass::Moved,
        (false, false) => Pass::Idle,
    })
}

fn is_final(error: &Error) -> bool {
    error.kind() == ErrorKind::Fenced
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_stay_below_the_time_in_which_segments_become_cold() {
        let seconds = Duration::from_secs;
        let day = seconds(86_400);
        assert_eq!(pause_after(Pass::Idle, seconds(10), day), seconds(20));
        assert_eq!(pause_after(Pass::Idle, seconds(500), day), IDLE_PAUSE_MAX);
        assert_eq!(pause_after(Pass::Idle, seconds(500), seconds(20)), seconds(5));
        assert_eq!(pause_after(Pass::Moved, seconds(500), day), WALK_PAUSE);
        assert_eq!(pause_after(Pass::Moved, seconds(500), seconds(2)), seconds(1));
        assert_eq!(pause_after(Pass::Failed, seconds(1), day), FAILED_PAUSE);
        assert_eq!(pause_after(Pass::Failed, seconds(30), day), seconds(60));
        assert_eq!(pause_after(Pass::Failed, seconds(200), day), FAILED_PAUSE_MAX);
    }

    #[test]
    fn segments_that_have_failed_are_left_out_for_a_while() {
        use block::env::Clock as _;
        let clock = block::env::ManualClock::new();
        let state = TiersState::default();
        let rest = |numbers: &[u64]| {
            let mut numbers = numbers.to_vec();
            let is_any = state.leave_out(&mut numbers, clock.now());
            (numbers, is_any)
        };
        state.note_failed(3, clock.now());
        clock.advance(AGAIN_AFTER / 2);
        state.note_failed(5, clock.now());
        assert_eq!(rest(&[2, 3, 4, 5]), (vec![2, 4], true));
        clock.advance(AGAIN_AFTER / 2);
        assert_eq!(rest(&[2, 3, 4, 5]), (vec![2, 3, 4], true));
        assert_eq!(rest(&[2, 3]), (vec![2, 3], false));
        // For twice as long each time, until it is done.
        state.note_failed(3, clock.now());
        clock.advance(AGAIN_AFTER);
        assert_eq!(rest(&[3]), (vec![], true));
        (0..9).for_each(|_| state.note_failed(3, clock.now()));
        clock.advance(AGAIN_AFTER_MAX);
        assert_eq!(rest(&[3]), (vec![3], false));
        state.note_done(3);
        state.note_failed(3, clock.now());
        clock.advance(AGAIN_AFTER);
        assert_eq!(rest(&[3]), (vec![3], false));
        (0..2 * FAILED_MAX as u64).for_each(|number| state.note_failed(number, clock.now()));
        assert_eq!(state.failed.lock().len(), FAILED_MAX);
    }

    #[test]
    fn each_step_is_counted_where_it_belongs() {
        let one = |bytes| Amount { segment_count: 1, bytes };
        let mut status =
            TiersStatus { to_copy: one(10), to_drop: one(20), ..TiersStatus::default() };
        let failed = Error::new(ErrorKind::Unavailable, "the store is away");
        status.note(TierStep::Copy, &Err(failed));
        assert_eq!(status.failure.as_deref(), Some("the store is away"));
        status.note(TierStep::Copy, &Ok(TierOutcome::Done(10)));
        status.note(TierStep::Drop, &Ok(TierOutcome::Rewritten(20)));
        status.note(TierStep::BringBack, &Ok(TierOutcome::Done(5)));
        let expected = TiersStatus {
            to_drop: one(20),
            copied: one(10),
            brought_back: one(5),
            rewritten_count: 1,
            ..TiersStatus::default()
        };
        assert_eq!(status, expected);
    }
}
