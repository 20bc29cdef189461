//! The job that makes the fragments of segments anew which a lost data store had, moves those of stores that are to be
//! empty, and shows what the data would survive.
//!
//! Invariants:
//! - A walk through all segments comes before and after: what is shown was counted, never assumed.
//! - After a rebuild, the stores are asked for every fragment of every segment, and a sample of the segments is
//!   verified by checksum. Only then does the state say that the segments are whole.
//! - The job gives way to clients: while there are any, it rests as long as each segment took, up to a second.

use crate::data_stores::OpenDataStores;
use crate::pool::Pool;
use crate::seeded_bugs::seeded_bugs;
use block::conditions::Report;
use block::env::Clock;
use block::quantities::ByteSize;
use block::{ConditionKind, Conditions, Result};
use futures::{StreamExt, stream};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::pin::pin;
use std::time::{Duration, Instant};
use tiering::rebuild::Redundancy;
use tiering::segment_store::Depth;

/// Shortest and longest pause between two walks while the stores are as they were. Chosen by hand: a walk reads the
/// records of all segments from the metadata.
pub(crate) const WALK_PAUSE: Duration = Duration::from_secs(10);
pub(crate) const WALK_PAUSE_MAX: Duration = Duration::from_secs(600);
/// Pause between two looks whether a store has come or gone.
pub(crate) const LOOK_PAUSE: Duration = Duration::from_secs(1);
/// Longest rest after a segment.
const REST_MAX: Duration = Duration::from_secs(1);
/// Of so many segments, the check after a rebuild verifies one by checksum. Chosen by hand: it costs about as much as the
/// rebuild of a store out of fifty.
const SAMPLE: u64 = 16;
/// Segments that the check after a rebuild examines at a time. Chosen by hand: most are only asked for.
const CHECKS_AT_ONCE: usize = 8;
/// Subject of the condition.
const POOL: &str = "pool";

/// The state of the job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RebuildStatus {
    /// What the segments would survive, as the last walk has counted; absent before the first.
    pub redundancy: Option<Redundancy>,
    /// Segments that the last walk found lacking and that were not examined since.
    pub left_count: u64,
    /// Estimated seconds until these are done; absent if there are none.
    pub left_seconds: Option<u64>,
    /// The check after the last rebuild; absent before.
    pub check: Option<CheckStatus>,
    /// Fragments made anew since the start.
    pub fragment_count: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Cause of the last failure, until a segment succeeds.
    pub failure: Option<String>,
    /// Numbers of the stores of which the last walk has found no fragment, and that got none since before it.
    pub empty: BTreeSet<u32>,
}

/// The check after a rebuild.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckStatus {
    /// It has ended, and all segments had all fragments at its end: the rebuild is done.
    pub is_whole: bool,
    /// Segments of the pool when it began.
    pub segment_count: u64,
    /// Segments of which the stores were asked for every fragment.
    pub checked_count: u64,
    /// Those of them that were verified by checksum.
    pub verified_count: u64,
    /// Fragments that were missing or damaged, and were made anew.
    pub found_count: u64,
    /// Estimated seconds until it ends; absent once it has.
    pub left_seconds: Option<u64>,
}

/// Shared state of the job.
#[derive(Debug, Default)]
pub struct RebuildState(Mutex<RebuildStatus>);

impl RebuildState {
    /// Returns the state.
    #[must_use]
    pub fn status(&self) -> RebuildStatus {
        self.0.lock().clone()
    }
}

/// What decides whether a walk finds something else than the last one: for each store whether it fails, is lost and is
/// to be empty, and the number of fragments that were not written.
pub(crate) fn seen(stores: &dyn OpenDataStores) -> (Vec<(bool, bool, bool)>, u64) {
    let status = stores.status();
    let states = status.stores.iter().map(|store| {
        (store.failure.is_some(), store.is_lost, store.is_draining || store.is_leaving)
    });
    (states.collect(), status.missing_write_count)
}

/// Numbers of the stores that are to be empty.
fn emptying(stores: &dyn OpenDataStores) -> BTreeSet<u32> {
    let stores = stores.status().stores.into_iter();
    stores.filter(|store| store.is_draining || store.is_leaving).map(|store| store.number).collect()
}

/// Lets a job give way to clients.
pub(crate) struct Pace<'a> {
    pool: &'a Pool,
    clock: &'a dyn Clock,
    /// What clients had done when the job last looked.
    seen: Mutex<(u64, u64)>,
}

impl<'a> Pace<'a> {
    pub(crate) fn new(pool: &'a Pool, clock: &'a dyn Clock) -> Pace<'a> {
        let seen = Mutex::new(activity(pool));
        Pace { pool, clock, seen }
    }

    /// Rests as long as a step took, up to a second, if clients have written or read meanwhile.
    pub(crate) async fn rest(&self, begun: Instant) {
        let now = activity(self.pool);
        if std::mem::replace(&mut *self.seen.lock(), now) != now {
            tokio::time::sleep(self.clock.since(begun).min(REST_MAX)).await;
        }
    }
}

/// Grows with each write of clients, and with each read that is not answered from memory.
fn activity(pool: &Pool) -> (u64, u64) {
    let frames = pool.tier_status().frames;
    (pool.log_status().acked_lsn.0, frames.cache_hit_count + frames.store_frame_count)
}

/// Estimates the seconds that `left` steps take, after `done` have taken the time since `begun`.
pub(crate) fn seconds_left(clock: &dyn Clock, begun: Instant, done: u64, left: u64) -> u64 {
    let [done, left] = [done.max(1), left].map(|count| u32::try_from(count).unwrap_or(u32::MAX));
    (clock.since(begun) / done).saturating_mul(left).as_secs()
}

/// Walks, rebuilds what is lacking, and walks again if something was. Returns whether anything was rebuilt.
pub(crate) async fn round(
    pool: &Pool,
    state: &RebuildState,
    stores: &dyn OpenDataStores,
    conditions: &Conditions,
    clock: &dyn Clock,
) -> Result<bool> {
    let mut is_any = false;
    let pace = Pace::new(pool, clock);
    loop {
        let emptying_at_first = emptying(stores);
        let (found, lacking) = pool.tier().redundancy().await?;
        show(conditions, &found, stores.status().parity_count);
        let named: BTreeSet<u32> = found.stores.keys().copied().collect();
        let empty = match found.is_complete {
            true => emptying_at_first.difference(&named).copied().collect(),
            false => BTreeSet::new(),
        };
        if found.is_complete
            && let Err(error) = stores.forget_unnamed(&named).await
        {
            tracing::warn!(
                error = %error.chain(),
                "could not take data stores out of the list that hold nothing any more"
            );
        }
        {
            let mut state = state.0.lock();
            (state.redundancy, state.left_count) = (Some(found), lacking.len() as u64);
            (state.empty, state.left_seconds) = (empty, None);
        }
        let mut is_progress = false;
        let emptying_now = emptying(stores);
        let walked = clock.now();
        for (done, number) in (1..).zip(lacking) {
            // Stores that a command drains meanwhile have segments that this walk did not count.
            if emptying(stores) != emptying_now {
                is_progress = true;
                break;
            }
            let begun: Instant = clock.now();
            let rebuilt = pool.tier().rebuild(number, Depth::Presence).await;
            {
                let mut state = state.0.lock();
                state.left_count = state.left_count.saturating_sub(1);
                let left = state.left_count;
                state.left_seconds = (left > 0).then(|| seconds_left(clock, walked, done, left));
                match &rebuilt {
                    Ok(Some(report)) => {
                        state.fragment_count += report.fragment_count;
                        state.bytes += report.bytes;
                        if report.fragment_count > 0 {
                            (is_progress, state.failure) = (true, None);
                            // The next one is due when nothing is lacking any more.
                            state.check = None;
                        }
                    }
                    Ok(None) => {}
                    Err(error) => state.failure = Some(error.chain()),
                }
            }
            if let Err(error) = rebuilt
                && error.kind() == block::ErrorKind::Fenced
            {
                return Err(error);
            }
            pace.rest(begun).await;
        }
        is_any |= is_progress;
        if is_progress {
            continue;
        }
        let is_due = {
            let state = state.0.lock();
            let is_rebuilt =
                state.redundancy.as_ref().is_some_and(|found| found.lacking_count == 0);
            let is_checked = state.check.as_ref().is_some_and(|check| check.is_whole);
            is_rebuilt && state.fragment_count > 0 && !is_checked
        };
        return match is_due && check(pool, state, stores, clock).await? {
            true => Ok(true),
            false => Ok(is_any),
        };
    }
}

/// Asks the stores for every fragment of every segment, and verifies a sample of the segments by checksum. What is missing
/// or damaged is made anew. Returns whether that has happened. It breaks off when a store comes or goes.
async fn check(
    pool: &Pool,
    state: &RebuildState,
    stores: &dyn OpenDataStores,
    clock: &dyn Clock,
) -> Result<bool> {
    let (pace, begun, seen) = (Pace::new(pool, clock), clock.now(), seen(stores));
    let segment_count = state
        .0
        .lock()
        .redundancy
        .as_ref()
        .map_or(0, |found| found.space.objects.segment_count + found.space.coded.segment_count);
    let mut found = CheckStatus { segment_count, ..CheckStatus::default() };
    let (mut last, mut is_whole) = (0, true);
    while !seeded_bugs().rebuild_unchecked {
        let (numbers, next) = pool.tier().segments_after(last).await?;
        let examined = stream::iter(numbers).map(async |number| {
            let is_sample = number % SAMPLE == 0;
            let depth = if is_sample { Depth::Checksums } else { Depth::Presence };
            let examining = clock.now();
            let outcome = pool.tier().rebuild(number, depth).await;
            pace.rest(examining).await;
            (is_sample, outcome)
        });
        let mut examined = pin!(examined.buffer_unordered(CHECKS_AT_ONCE));
        while let Some((is_sample, outcome)) = examined.next().await {
            found.checked_count += 1;
            found.verified_count += u64::from(is_sample);
            let failure = match outcome {
                Ok(None) => None,
                Ok(Some(report)) => {
                    found.found_count += report.fragment_count;
                    is_whole &= !report.is_lacking && !report.is_unsure;
                    None
                }
                Err(error) if error.kind() == block::ErrorKind::Fenced => return Err(error),
                Err(error) => {
                    is_whole = false;
                    Some(error.chain())
                }
            };
            let left = found.segment_count.saturating_sub(found.checked_count);
            found.left_seconds = Some(seconds_left(clock, begun, found.checked_count, left));
            let mut state = state.0.lock();
            state.check = Some(found.clone());
            state.failure = failure.or_else(|| state.failure.take());
        }
        if self::seen(stores).0 != seen.0 {
            state.0.lock().check = None;
            return Ok(found.found_count > 0);
        }
        match next {
            Some(next) => last = next,
            None => break,
        }
    }
    // What was asked for first may be gone by now, if its store has lost it meanwhile; the scrub looks again.
    (found.is_whole, found.left_seconds) = (is_whole, None);
    let CheckStatus { checked_count, verified_count, found_count, .. } = found;
    tracing::info!(
        is_whole,
        checked_count,
        verified_count,
        found_count,
        "the data stores were asked for all fragments after a rebuild"
    );
    state.0.lock().check = Some(found);
    Ok(found_count > 0)
}

/// Shows that segments survive fewer losses than the scheme promises, and will not get better by themselves: stores that
/// are away for a while are a condition of their own, and those that are drained are none.
fn show(conditions: &Conditions, found: &Redundancy, parity_count: u8) {
    let size = |bytes: u64| ByteSize(bytes).rounded();
    let worst = found.bytes.iter().next().map(|(worst, bytes)| (*worst, *bytes));
    let report = worst.and_then(|(worst, bytes)| {
        let is_short = worst.is_none_or(|spare| spare < parity_count);
        if !is_short || (found.lacking_count == 0 && worst.is_some()) {
            return None;
        }
        let cost = match worst {
            None => format!("{} cannot be read now", size(bytes)),
            Some(0) => format!("{} would be lost with one more store", size(bytes)),
            Some(spare) => format!("{} survives the loss of {spare} more stores, and not of more", size(bytes)),
        };
        let what = match found.lacking_count {
            0 => "too few of the data stores that have a segment answer".to_owned(),
            count => format!("{count} segments of {} lack fragments", size(found.lacking_bytes)),
        };
        let remedy = "bring data stores back, or add some in other failure domains; the fragments are then made anew";
        Some(Report::new(what, cost, remedy))
    });
    conditions.set(ConditionKind::FragmentsLacking, POOL, report);
}
