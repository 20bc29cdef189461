//! The job that makes the fragments of segments anew which a lost data store had, moves those of stores that are to be
//! empty, and shows what the data would survive.
//!
//! Invariants:
//! - A walk through all segments comes before and after: what is shown was counted, never assumed.
//! - The job gives way to clients: it rests as long as each segment took, up to a second.

use crate::data_stores::OpenDataStores;
use block::conditions::Report;
use block::quantities::ByteSize;
use block::{ConditionKind, Conditions, Result};
use parking_lot::Mutex;
use std::collections::BTreeSet;
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
pub(crate) const REST_MAX: Duration = Duration::from_secs(1);
/// Subject of the condition.
const POOL: &str = "pool";

/// The state of the job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RebuildStatus {
    /// What the segments would survive, as the last walk has counted; absent before the first.
    pub redundancy: Option<Redundancy>,
    /// Segments that the last walk found lacking and that were not examined since.
    pub left_count: u64,
    /// Fragments made anew since the start.
    pub fragment_count: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Cause of the last failure, until a segment succeeds.
    pub failure: Option<String>,
    /// Numbers of the stores of which the last walk has found no fragment, and that got none since before it.
    pub empty: BTreeSet<u32>,
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

/// Walks, rebuilds what is lacking, and walks again if something was. Returns whether anything was rebuilt.
pub(crate) async fn round(
    pool: &crate::pool::Pool,
    state: &RebuildState,
    stores: &dyn OpenDataStores,
    conditions: &Conditions,
    clock: &dyn block::env::Clock,
) -> Result<bool> {
    let mut is_any = false;
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
            state.empty = empty;
        }
        let mut is_progress = false;
        let emptying_now = emptying(stores);
        for number in lacking {
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
                match &rebuilt {
                    Ok(Some(report)) => {
                        state.fragment_count += report.fragment_count;
                        state.bytes += report.bytes;
                        if report.fragment_count > 0 {
                            (is_progress, state.failure) = (true, None);
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
            tokio::time::sleep(clock.since(begun).min(REST_MAX)).await;
        }
        is_any |= is_progress;
        if !is_progress {
            return Ok(is_any);
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
