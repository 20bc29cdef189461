//! The job that makes the fragments of segments anew which a lost data store had, moves those of stores that are to be
//! empty, and shows what the data would survive.
//!
//! Invariants:
//! - A walk through all segments comes before and after: what is shown was counted, never assumed.
//! - After a rebuild, the stores list their fragments, which are compared with the records of all segments, and a sample
//!   of the segments is verified by checksum. Only then does the state say that the segments are whole. A store that
//!   comes back lists its fragments, too: it may have lost some.
//! - The job gives way to clients: while there are any, it rebuilds two segments at a time, and rests after each for an
//!   eighth of the time that it took, up to a second. Its threads give way, too; see [`crate::background`].

use crate::data_stores::{DataStoreStatus, OpenDataStores};
use crate::pool::Pool;
use crate::seeded_bugs::seeded_bugs;
use block::conditions::Report;
use block::env::Clock;
use block::quantities::ByteSize;
use block::{ConditionKind, Conditions, ErrorKind, Result};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tiering::rebuild::{LACKING_MAX, RebuildReport, Redundancy};
use tiering::segment_store::Depth;

/// Shortest and longest pause between two walks while the stores are as they were. Chosen by hand: a walk reads the
/// records of all segments from the metadata.
pub(crate) const WALK_PAUSE: Duration = Duration::from_secs(10);
pub(crate) const WALK_PAUSE_MAX: Duration = Duration::from_secs(600);
/// Pause between two looks whether a store has come or gone.
pub(crate) const LOOK_PAUSE: Duration = Duration::from_secs(1);
/// Segments that are rebuilt side by side while there are no clients, and their bytes, unless one has more. Chosen by
/// hand: some are read and written while another one is computed. Each takes up to twice its size of memory: the
/// fragments that are read, and those that are made of them.
const AT_ONCE: usize = 3;
const BYTES_AT_ONCE: u64 = 96 << 20;
/// Segments that are rebuilt side by side beside clients. Chosen by hand: one is read while the metadata takes the other
/// one's placement.
const AT_ONCE_BESIDE_CLIENTS: usize = 2;
/// The rest after a segment, as a part of the time that it took. Chosen by hand: disks and networks know nothing of the
/// priority of threads. Longer rests did not make clients faster (benches/device/coded).
const REST_DIVISOR: u32 = 4;
/// The same in a rebuild: what is lacking may be lost for good with the next store.
const REBUILD_REST_DIVISOR: u32 = 8;
/// Longest rest after a segment.
const REST_MAX: Duration = Duration::from_secs(1);
/// Of so many segments, the check after a rebuild verifies one by checksum. Chosen by hand.
const SAMPLE: u64 = 16;
/// Time without a write after which a store that is to be empty counts as empty, once no segment names it. Chosen by hand:
/// reclaim commits what it has written two minutes later at most.
const QUIET: Duration = Duration::from_secs(150);
/// Pause before a check that did not find all fragments is repeated while the stores are as they were. Chosen by hand: it
/// reads a part of the pool.
const CHECK_PAUSE: Duration = Duration::from_secs(3600);
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
    /// Fragments rebuilt since the start.
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
    /// The stores of which segments name fragments.
    pub store_count: u64,
    /// Those of them that have listed theirs.
    pub listed_count: u64,
    /// Segments of the pool when it began.
    pub segment_count: u64,
    /// Segments that were verified by checksum.
    pub verified_count: u64,
    /// Fragments that were missing or damaged, and were rebuilt.
    pub found_count: u64,
    /// Estimated seconds until it ends; absent until the stores have listed theirs, and once it has ended.
    pub left_seconds: Option<u64>,
}

/// Shared state of the job.
#[derive(Debug, Default)]
pub struct RebuildState {
    status: Mutex<RebuildStatus>,
    /// Numbers of the stores that were away when the job last looked, or that have not listed their fragments since.
    away: Mutex<BTreeSet<u32>>,
    /// When the last check ended without all fragments, and how the stores were.
    failed_check: Mutex<Option<(Instant, Vec<StoreSeen>)>>,
}

/// Whether a store fails, is lost, and is to be empty; and its failure domain.
type StoreSeen = (bool, bool, bool, String);

impl RebuildState {
    /// Returns the state.
    #[must_use]
    pub fn status(&self) -> RebuildStatus {
        self.status.lock().clone()
    }
}

/// What decides whether a walk finds something else than the last one: for each store whether it fails, is lost and is
/// to be empty, and its failure domain; and the number of fragments that were not written.
pub(crate) fn seen(stores: &dyn OpenDataStores) -> (Vec<StoreSeen>, u64) {
    let status = stores.status();
    let states = status.stores.iter().map(|store| {
        let is_emptying = store.is_draining || store.is_leaving;
        (store.failure.is_some(), store.is_lost, is_emptying, store.domain.clone())
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
    clients: Mutex<Clients>,
    /// Whether there were any during the step that ended last.
    is_busy: AtomicBool,
    /// Segments that are rebuilt side by side without them.
    width: AtomicUsize,
    rest_divisor: u32,
}

/// What the job knows of clients.
#[derive(Debug)]
struct Clients {
    /// What they had done when the job last looked.
    done: (u64, u64),
    /// When it last saw that they had done more.
    seen_at: Option<Instant>,
}

impl Clients {
    /// Whether they were seen since a time; `done` is what they have done by now. Steps that run side by side look at
    /// different times, and all see the same clients.
    fn look(&mut self, done: (u64, u64), since: Instant, now: Instant) -> bool {
        if std::mem::replace(&mut self.done, done) != done {
            self.seen_at = Some(now);
        }
        self.seen_at.is_some_and(|at| at >= since)
    }
}

impl<'a> Pace<'a> {
    pub(crate) fn new(pool: &'a Pool, clock: &'a dyn Clock) -> Pace<'a> {
        let clients = Mutex::new(Clients { done: activity(pool), seen_at: None });
        // They get one step to show themselves.
        let (is_busy, width) = (AtomicBool::new(true), AtomicUsize::new(1));
        Pace { pool, clock, clients, is_busy, width, rest_divisor: REST_DIVISOR }
    }

    /// Rests for a part of the time that a step took, up to a second, if clients have written or read meanwhile.
    pub(crate) async fn rest(&self, begun: Instant) {
        let (done, now) = (activity(self.pool), self.clock.now());
        let is_busy = self.clients.lock().look(done, begun, now);
        self.is_busy.store(is_busy, Ordering::Relaxed);
        if is_busy {
            tokio::time::sleep((self.clock.since(begun) / self.rest_divisor).min(REST_MAX)).await;
        }
    }

    /// Notes how large the segments are that come next.
    fn expect(&self, found: &Redundancy) {
        let mean = (found.lacking_bytes / found.lacking_count.max(1)).max(1);
        let fit = usize::try_from(BYTES_AT_ONCE / mean).unwrap_or(AT_ONCE);
        self.width.store(fit.clamp(1, AT_ONCE), Ordering::Relaxed);
    }

    /// Segments that may be rebuilt side by side now.
    fn width(&self) -> usize {
        let width = self.width.load(Ordering::Relaxed);
        match self.is_busy.load(Ordering::Relaxed) {
            true => width.min(AT_ONCE_BESIDE_CLIENTS),
            false => width,
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
    let pace = Pace { rest_divisor: REBUILD_REST_DIVISOR, ..Pace::new(pool, clock) };
    loop {
        let quiet = quiet(&emptying(stores), stores, conditions);
        let emptying_at_first = emptying(stores);
        let (found, lacking) = pool.tier().redundancy().await?;
        show(conditions, &found, stores.status().parity_count);
        let named: BTreeSet<u32> = found.stores.keys().copied().collect();
        let unnamed: BTreeSet<u32> = match found.is_complete {
            true => emptying_at_first.difference(&named).copied().collect(),
            false => BTreeSet::new(),
        };
        let empty: BTreeSet<u32> = unnamed.intersection(&quiet).copied().collect();
        // It may be so after the next walk.
        is_any |= empty != unnamed;
        if found.is_complete
            && let Err(error) = stores.forget_unnamed(&named).await
        {
            tracing::warn!(
                error = %error.chain(),
                "could not take data stores out of the list that hold nothing any more"
            );
        }
        let is_complete = found.is_complete;
        pace.expect(&found);
        let is_away = stores
            .status()
            .stores
            .iter()
            .any(|store| store.failure.is_some() && named.contains(&store.number));
        {
            let mut status = state.status.lock();
            if found.lacking_count > 0 || is_away {
                // What it has said does not hold any more.
                status.check = None;
            }
            status.redundancy = Some(found);
            status.empty = empty;
        }
        let is_progress = rebuild_all(pool, state, stores, lacking, &pace).await?;
        is_any |= is_progress;
        if is_progress {
            continue;
        }
        if list_returned(pool, state, stores, &named, &pace).await? {
            is_any = true;
            continue;
        }
        let is_due = {
            let status = state.status.lock();
            let is_rebuilt =
                status.redundancy.as_ref().is_some_and(|found| found.lacking_count == 0);
            let is_checked = status.check.as_ref().is_some_and(|check| check.is_whole);
            is_rebuilt && status.fragment_count > 0 && !is_checked
        };
        let has_failed = state.failed_check.lock().as_ref().is_some_and(|(ended, seen)| {
            clock.since(*ended) < CHECK_PAUSE && *seen == self::seen(stores).0
        });
        let is_due = is_due && is_complete && !is_away && !has_failed;
        return match is_due && check(pool, state, stores, &named, &pace).await? {
            true => Ok(true),
            false => Ok(is_any),
        };
    }
}

/// Those of the stores to which nothing was written for a while. What was written to others may be about to be named.
fn quiet(
    among: &BTreeSet<u32>,
    stores: &dyn OpenDataStores,
    conditions: &Conditions,
) -> BTreeSet<u32> {
    // What is written then waits until the metadata can name it.
    let mut raised = conditions.list().into_iter();
    if raised.any(|condition| condition.kind == ConditionKind::StoreUnavailable) {
        return BTreeSet::new();
    }
    let status = stores.status();
    let quiet = status.stores.iter().filter(|store| store.quiet_for >= QUIET);
    quiet.map(|store| store.number).filter(|number| among.contains(number)).collect()
}

/// Rebuilds these segments. It breaks off when a command drains stores meanwhile: they have segments that were not
/// counted. Returns whether that has happened, or anything was rebuilt.
async fn rebuild_all(
    pool: &Pool,
    state: &RebuildState,
    stores: &dyn OpenDataStores,
    numbers: Vec<u64>,
    pace: &Pace<'_>,
) -> Result<bool> {
    {
        let mut status = state.status.lock();
        (status.left_count, status.left_seconds) = (numbers.len() as u64, None);
    }
    let (emptying_at_first, count) = (emptying(stores), numbers.len() as u64);
    let (begun, done) = (pace.clock.now(), AtomicU64::new(0));
    let rebuild = |number: u64| {
        let done = &done;
        async move {
            let of_segment = pace.clock.now();
            let rebuilt = pool.tier().rebuild(number, Depth::Presence).await;
            let done = done.fetch_add(1, Ordering::Relaxed) + 1;
            let is_rebuilt = note(state, &rebuilt, (begun, done, count), pace.clock);
            if let Err(error) = rebuilt
                && error.kind() == ErrorKind::Fenced
            {
                return Err(error);
            }
            pace.rest(of_segment).await;
            Ok(is_rebuilt)
        }
    };
    let (mut left, mut running) = (numbers.into_iter(), FuturesUnordered::new());
    let (mut is_any, mut is_drained_now, mut fenced) = (false, false, None);
    loop {
        is_drained_now |= emptying(stores) != emptying_at_first;
        // What has begun goes on to its end: fragments that were written are named then, or known to be strays.
        while !is_drained_now
            && fenced.is_none()
            && running.len() < pace.width()
            && let Some(number) = left.next()
        {
            running.push(rebuild(number));
        }
        match running.next().await {
            Some(Ok(is_rebuilt)) => is_any |= is_rebuilt,
            Some(Err(error)) => fenced = Some(error),
            None => return fenced.map_or(Ok(is_any || is_drained_now), Err),
        }
    }
}

/// Notes the end of a rebuild of a segment, of so many since a time, of all that there were. Returns whether it got
/// fragments.
fn note(
    state: &RebuildState,
    rebuilt: &Result<Option<RebuildReport>>,
    (begun, done, count): (Instant, u64, u64),
    clock: &dyn Clock,
) -> bool {
    let mut status = state.status.lock();
    let left = count.saturating_sub(done);
    status.left_count = left;
    status.left_seconds = (left > 0).then(|| seconds_left(clock, begun, done, left));
    match rebuilt {
        Ok(Some(report)) if report.fragment_count > 0 => {
            status.fragment_count += report.fragment_count;
            status.bytes += report.bytes;
            status.failure = None;
            // The next one is due when nothing is lacking any more.
            status.check = None;
            true
        }
        Ok(_) => false,
        Err(error) => {
            status.failure = Some(error.chain());
            false
        }
    }
}

/// Lets stores that were away list their fragments, and makes those anew that they have lost. Returns whether there were
/// any.
async fn list_returned(
    pool: &Pool,
    state: &RebuildState,
    stores: &dyn OpenDataStores,
    named: &BTreeSet<u32>,
    pace: &Pace<'_>,
) -> Result<bool> {
    let status = stores.status();
    let is_away = |store: &&DataStoreStatus| store.failure.is_some();
    let away: BTreeSet<u32> = status.stores.iter().filter(is_away).map(|it| it.number).collect();
    let returned: Vec<u32> = {
        let mut known = state.away.lock();
        known.extend(&away);
        known.retain(|number| named.contains(number));
        known.difference(&away).copied().collect()
    };
    let mut is_any = false;
    for store in returned {
        // It is asked after the next walk if it does not answer.
        let Ok(unlisted) = pool.tier().unlisted(store).await else { continue };
        if !unlisted.is_empty() {
            let segment_count = unlisted.len();
            tracing::warn!(
                store,
                segment_count,
                "a data store that was away lacks fragments that it had"
            );
        }
        if unlisted.len() < LACKING_MAX {
            state.away.lock().remove(&store);
        }
        is_any |= rebuild_all(pool, state, stores, unlisted, pace).await?;
    }
    Ok(is_any)
}

/// Lets all stores list their fragments, and verifies a sample of the segments by checksum. What is missing or damaged is
/// rebuilt. Returns whether there was any. It breaks off when a store comes or goes.
async fn check(
    pool: &Pool,
    state: &RebuildState,
    stores: &dyn OpenDataStores,
    named: &BTreeSet<u32>,
    pace: &Pace<'_>,
) -> Result<bool> {
    let seen = seen(stores).0;
    let mut found = CheckStatus { store_count: named.len() as u64, ..CheckStatus::default() };
    if let Some(counted) = &state.status.lock().redundancy {
        found.segment_count =
            counted.space.objects.segment_count + counted.space.coded.segment_count;
    }
    let mut is_whole = true;
    for store in named {
        if seeded_bugs().rebuild_unchecked {
            break;
        }
        match pool.tier().unlisted(*store).await {
            Ok(unlisted) => {
                found.listed_count += 1;
                is_whole &= unlisted.len() < LACKING_MAX;
                for number in unlisted {
                    is_whole &= examine(pool, state, number, Depth::Presence, &mut found).await?;
                }
            }
            Err(error) => {
                is_whole = false;
                state.status.lock().failure = Some(error.chain());
            }
        }
        state.status.lock().check = Some(found.clone());
    }
    let (begun, mut passed, mut last) = (pace.clock.now(), 0, 0);
    loop {
        if self::seen(stores).0 != seen {
            state.status.lock().check = None;
            return Ok(found.found_count > 0);
        }
        let (numbers, next) = pool.tier().segments_after(last).await?;
        for number in numbers {
            passed += 1;
            if !number.is_multiple_of(SAMPLE) || seeded_bugs().rebuild_unchecked {
                continue;
            }
            let of_segment = pace.clock.now();
            is_whole &= examine(pool, state, number, Depth::Checksums, &mut found).await?;
            found.verified_count += 1;
            let left = found.segment_count.saturating_sub(passed);
            found.left_seconds = Some(seconds_left(pace.clock, begun, passed, left));
            state.status.lock().check = Some(found.clone());
            pace.rest(of_segment).await;
        }
        match next {
            Some(next) => last = next,
            None => break,
        }
    }
    (found.is_whole, found.left_seconds) = (is_whole, None);
    *state.failed_check.lock() = (!is_whole).then(|| (pace.clock.now(), seen));
    let CheckStatus { listed_count, segment_count, verified_count, found_count, .. } = found;
    tracing::info!(
        is_whole,
        listed_count,
        segment_count,
        verified_count,
        found_count,
        "the data stores have listed their fragments after a rebuild"
    );
    state.status.lock().check = Some(found);
    Ok(found_count > 0)
}

/// Examines a segment for the check. Returns whether it is known to have all of its fragments.
async fn examine(
    pool: &Pool,
    state: &RebuildState,
    number: u64,
    depth: Depth,
    found: &mut CheckStatus,
) -> Result<bool> {
    match pool.tier().rebuild(number, depth).await {
        Ok(None) => Ok(true),
        Ok(Some(report)) => {
            found.found_count += report.fragment_count;
            let mut status = state.status.lock();
            status.fragment_count += report.fragment_count;
            status.bytes += report.bytes;
            Ok(!report.is_lacking && !report.is_unsure)
        }
        Err(error) if error.kind() == ErrorKind::Fenced => Err(error),
        Err(error) => {
            state.status.lock().failure = Some(error.chain());
            Ok(false)
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use block::env::SystemClock;

    #[test]
    fn steps_that_end_together_see_the_same_clients() {
        let begun = SystemClock.now();
        let at = |millis| begun + Duration::from_millis(millis);
        let mut clients = Clients { done: (0, 0), seen_at: None };
        assert!(!clients.look((0, 0), begun, at(50)), "there were none");
        assert!(clients.look((0, 1), begun, at(100)), "one has read");
        assert!(clients.look((0, 1), begun, at(101)), "another step has seen it, during this one");
        assert!(!clients.look((0, 1), at(102), at(150)), "it began later");
        assert!(clients.look((1, 1), at(102), at(200)), "one has written");
    }
}
