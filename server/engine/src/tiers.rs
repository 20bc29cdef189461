//! The job that moves segments between data stores and the object store, as the policy of the pool wants it.
//!
//! Invariants:
//! - The job has no state but the map: a walk finds what is left to do, after a restart and with the next owner.
//! - The rebuild of what segments lack comes first, unless all of them leave the data stores. While room is short,
//!   segments are dropped beside it: it needs room, too.
//! - While room is short, segments are dropped before others are copied, and none are brought back. A segment that is
//!   not copied is never dropped.
//! - The job gives way to clients: while there are any, it rests for a quarter of the time that each segment took.
//! - A kind of step ends for a pass when several in a row have failed, and the other kinds go on: space comes back even if
//!   nothing can be written to the data stores. The next pass comes after a pause, which grows, and leaves out for a while
//!   the segments that have failed, so that a few which cannot be moved do not keep others from it.

mod room;

use crate::data_stores::{DataStoresStatus, OpenDataStores};
use crate::rebuild::{Pace, RebuildState, WALK_PAUSE};
use block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use room::MeasuredRoom;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use tiering::survey::Amount;
use tiering::tiers::{TierOutcome, TierPlan, TierRoom, TierStep, Tiers};

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
/// Longest pause while room is short and no store fails, and longest time for which a pass copies segments then. Chosen
/// by hand: what was copied is dropped soon, and fragments are deleted two and a half minutes after they were dropped.
const SHORT_PAUSE_MAX: Duration = Duration::from_secs(60);
const SHORT_PASS_MAX: Duration = Duration::from_secs(60);
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
    /// The data stores have little room: segments are dropped before they are cold, and none are brought back.
    pub is_short: bool,
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

    /// Whether room is short, as it was last noted.
    pub(crate) fn is_short(&self) -> bool {
        self.status.lock().is_short
    }

    /// Whether room is short and was not when it was last noted. `leaving_bytes`: bytes of the segments that were
    /// dropped, and whose fragments are still there.
    pub(crate) fn turns_short(&self, stores: &DataStoresStatus, leaving_bytes: u64) -> bool {
        !self.is_short() && MeasuredRoom::of(stores, leaving_bytes).is_low
    }

    /// Notes the room of the data stores. It is short from the low mark on, until it reaches the high one.
    fn note_room(&self, stores: &DataStoresStatus, leaving_bytes: u64) -> TierRoom {
        let measured = MeasuredRoom::of(stores, leaving_bytes);
        let mut state = self.status.lock();
        let was_short = state.is_short;
        state.is_short = measured.is_low || (was_short && measured.wanted_bytes > 0);
        match (was_short, state.is_short) {
            (false, true) => tracing::info!(
                bytes = measured.wanted_bytes,
                "the data stores have little room, and segments are dropped from them before they are cold"
            ),
            (true, false) => tracing::info!("the data stores have room again"),
            (false, false) | (true, true) => {}
        }
        measured.for_plan(state.is_short)
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

/// The pause after a pass. `pause` is the one before it; `is_short`: room is short.
pub(crate) fn pause_after(
    pass: Pass,
    pause: Duration,
    cold_after: Duration,
    is_short: bool,
) -> Duration {
    let longest = if is_short { SHORT_PAUSE_MAX } else { IDLE_PAUSE_MAX };
    let longest = (cold_after / COLD_PARTS).clamp(Duration::from_secs(1), longest);
    match pass {
        Pass::Idle => (pause * 2).min(longest),
        Pass::Moved => WALK_PAUSE.min(longest),
        Pass::Failed => (pause * 2).clamp(FAILED_PAUSE, FAILED_PAUSE_MAX),
    }
}

/// The segments of a plan by step: first those that clients wait for, then those that are in one tier only. While room
/// is short, those come first that make room: more are dropped later, once they are copied.
fn steps(plan: TierPlan, is_short: bool) -> [(TierStep, Vec<u64>); 3] {
    let TierPlan { copy, drop, bring_back, .. } = plan;
    let bring_back = (TierStep::BringBack, bring_back);
    let (copy, drop) = ((TierStep::Copy, copy), (TierStep::Drop, drop));
    match is_short {
        true => [drop, copy, bring_back],
        false => [bring_back, copy, drop],
    }
}

/// Walks through all segments, and changes the tiers of those that are not where they are to be; see [`steps`]. It ends
/// early when room becomes short, and soon while it is, so that the next one drops what this one has copied.
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
    let (started, status) = (clock.now(), stores.status());
    let policy = status.policy;
    if !policy.tiers.is_moving() {
        return Ok(Pass::Idle);
    }
    let room = state.note_room(&status, pool.tier().leaving_bytes());
    let is_short = state.is_short();
    let is_next = |step: TierStep| {
        let makes_room = is_short && step == TierStep::Drop;
        makes_room || policy.tiers == Tiers::ObjectStore || rebuild.status().left_count == 0
    };
    if !is_next(TierStep::Drop) {
        return Ok(Pass::Idle);
    }
    let is_over = |step: TierStep| match (step, is_short) {
        (TierStep::Drop, _) => false,
        (_, true) => clock.since(started) >= SHORT_PASS_MAX,
        (_, false) => state.turns_short(&stores.status(), pool.tier().leaving_bytes()),
    };
    let plan = pool.tier().tier_plan(policy, room).await?;
    state.set_plan(&plan);
    let pace = Pace::new(pool, clock);
    let (mut is_moved, mut is_failed) = (false, false);
    'steps: for (step, mut numbers) in steps(plan, is_short) {
        is_failed |= state.leave_out(&mut numbers, clock.now());
        let mut failure_count = 0;
        for number in numbers {
            if !is_next(step) {
                return Ok(if is_moved { Pass::Moved } else { Pass::Idle });
            }
            if is_over(step) {
                break 'steps;
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
    use crate::data_stores::DataStoreStatus;
    use tiering::tiers::TierPolicy;

    #[test]
    fn pauses_grow_and_stay_below_the_time_in_which_segments_become_cold() {
        let seconds = Duration::from_secs;
        let day = seconds(86_400);
        let after = |pass, pause, cold_after| pause_after(pass, pause, cold_after, false);
        assert_eq!(after(Pass::Idle, seconds(10), day), seconds(20));
        assert_eq!(after(Pass::Idle, seconds(500), day), IDLE_PAUSE_MAX);
        assert_eq!(after(Pass::Idle, seconds(500), seconds(20)), seconds(5));
        assert_eq!(after(Pass::Moved, seconds(500), day), WALK_PAUSE);
        assert_eq!(after(Pass::Moved, seconds(500), seconds(2)), seconds(1));
        assert_eq!(after(Pass::Failed, seconds(1), day), FAILED_PAUSE);
        assert_eq!(after(Pass::Failed, seconds(30), day), seconds(60));
        assert_eq!(after(Pass::Failed, seconds(200), day), FAILED_PAUSE_MAX);
        assert_eq!(pause_after(Pass::Idle, seconds(500), day, true), SHORT_PAUSE_MAX);
        assert_eq!(pause_after(Pass::Failed, seconds(200), day, true), FAILED_PAUSE_MAX);
    }

    /// The state of three data stores of 2+1, the fullest of which has this many hundredths free.
    fn stores_with(percent: u64) -> DataStoresStatus {
        let store = |number: u32, percent: u64| DataStoreStatus {
            number,
            domain: format!("node {number}"),
            is_staying: true,
            total_bytes: Some(100 << 30),
            free_bytes: Some(percent << 30),
            ..DataStoreStatus::default()
        };
        DataStoresStatus {
            fragment_count: 3,
            parity_count: 1,
            stores: vec![store(1, 60), store(2, 60), store(3, percent)],
            policy: TierPolicy { tiers: Tiers::Both, free_min: 20, ..TierPolicy::default() },
            ..DataStoresStatus::default()
        }
    }

    #[test]
    fn room_is_short_from_the_low_mark_until_the_high_one() {
        let state = TiersState::default();
        let gib = |count: u64| count << 30;
        let note = |percent, leaving_bytes| state.note_room(&stores_with(percent), leaving_bytes);
        assert_eq!(note(21, 0), TierRoom { wanted_bytes: 0, spare_bytes: gib(2) });
        assert!(!state.turns_short(&stores_with(20), 0) && state.turns_short(&stores_with(19), 0));
        assert_eq!(note(19, 0), TierRoom { wanted_bytes: gib(12), spare_bytes: 0 });
        assert!(state.is_short() && !state.turns_short(&stores_with(19), 0));
        // Not all of it has left.
        assert_eq!(note(19, gib(8)), TierRoom { wanted_bytes: gib(4), spare_bytes: 0 });
        assert_eq!(note(23, 0), TierRoom { wanted_bytes: gib(4), spare_bytes: 0 });
        assert!(state.status().is_short);
        // All of it has, and is not deleted yet.
        assert_eq!(note(19, gib(12)), TierRoom { wanted_bytes: 0, spare_bytes: 0 });
        assert!(!state.is_short());
        assert_eq!(note(25, 0), TierRoom { wanted_bytes: 0, spare_bytes: gib(10) });
    }

    #[test]
    fn segments_are_dropped_before_others_are_copied_while_room_is_short() {
        let plan = || TierPlan {
            copy: vec![1],
            drop: vec![2],
            bring_back: vec![3],
            ..TierPlan::default()
        };
        let order = |is_short| steps(plan(), is_short).map(|(step, numbers)| (step, numbers[0]));
        let (copy, drop, bring_back) =
            ((TierStep::Copy, 1), (TierStep::Drop, 2), (TierStep::BringBack, 3));
        assert_eq!(order(false), [bring_back, copy, drop]);
        assert_eq!(order(true), [drop, copy, bring_back]);
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
