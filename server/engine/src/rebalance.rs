//! The job that moves fragments to where they would be if their segments were written now, so that data stores that were
//! added later get their share. A command starts it, and it ends by itself.
//!
//! Invariants:
//! - The list of data stores says that it is to run, so it goes on after a restart and with the next owner. It has no
//!   other state: a walk finds what is left to move.
//! - The rebuild of what segments lack comes first.
//! - The room of the stores is known before anything moves.
//! - The job gives way to clients: while there are any, it rests for a quarter of the time that each segment took.

use crate::data_stores::OpenDataStores;
use crate::rebuild::{Pace, RebuildState, seconds_left};
use block::Result;
use parking_lot::Mutex;
use std::time::Instant;

/// The state of the job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RebalanceStatus {
    /// All segments of the pool, as the last walk has counted.
    pub segment_count: u64,
    /// Segments of which the last walk has found fragments to move.
    pub misplaced_count: u64,
    /// Those of them that were not examined since.
    pub left_count: u64,
    /// Fragments that wait for a store that fails, and is not lost yet.
    pub waiting_count: u64,
    /// Fragments moved since the start.
    pub fragment_count: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Estimated seconds until the segments of this walk are done.
    pub left_seconds: Option<u64>,
    /// Cause of the last failure, until a segment succeeds.
    pub failure: Option<String>,
}

/// Shared state of the job.
#[derive(Debug, Default)]
pub struct RebalanceState(Mutex<RebalanceStatus>);

impl RebalanceState {
    /// Returns the state.
    #[must_use]
    pub fn status(&self) -> RebalanceStatus {
        self.0.lock().clone()
    }
}

/// Futile passes in a row after which the job ends. Chosen by hand: half a minute at least with their pauses. A data
/// store that is full takes no fragment, for however long it is asked.
pub(crate) const FUTILE_MAX: u32 = 5;

/// The outcome of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// Nothing is left to move.
    Ended,
    /// Something was moved, so another pass is due.
    Moved,
    /// Nothing was moved, as each attempt has failed.
    Futile,
    /// The rest waits: for stores, or for the rebuild.
    Waiting,
}

/// Walks through all segments and moves what the walk has found. It breaks off when it is no longer wanted, or when the
/// rebuild has something to do.
pub(crate) async fn pass(
    pool: &crate::pool::Pool,
    state: &RebalanceState,
    rebuild: &RebuildState,
    stores: &dyn OpenDataStores,
    clock: &dyn block::env::Clock,
) -> Result<Pass> {
    if rebuild.status().left_count > 0 {
        return Ok(Pass::Waiting);
    }
    // Where fragments are to be depends on the room of the stores, which the first look asks for.
    stores.look().await;
    let (found, misplaced) = pool.tier().imbalance().await?;
    {
        let mut state = state.0.lock();
        state.segment_count = found.segment_count;
        (state.misplaced_count, state.left_count) =
            (misplaced.len() as u64, misplaced.len() as u64);
        (state.waiting_count, state.left_seconds) = (found.waiting_count, None);
    }
    if misplaced.is_empty() {
        return Ok(if found.waiting_count == 0 { Pass::Ended } else { Pass::Waiting });
    }
    let (pace, begun, mut outcome) = (Pace::new(pool, clock), clock.now(), Pass::Waiting);
    for (done, number) in (1..).zip(misplaced) {
        if !stores.status().is_rebalancing || rebuild.status().left_count > 0 {
            return Ok(Pass::Waiting);
        }
        let of_segment: Instant = clock.now();
        let moved = pool.tier().rebalance(number).await;
        {
            let mut state = state.0.lock();
            state.left_count = state.left_count.saturating_sub(1);
            state.left_seconds = Some(seconds_left(clock, begun, done, state.left_count));
            match &moved {
                Ok(Some(report)) if report.fragment_count > 0 => {
                    state.fragment_count += report.fragment_count;
                    state.bytes += report.bytes;
                    (outcome, state.failure) = (Pass::Moved, None);
                }
                Ok(_) => {}
                Err(error) => {
                    outcome = if outcome == Pass::Moved { Pass::Moved } else { Pass::Futile };
                    state.failure = Some(error.chain());
                }
            }
        }
        if let Err(error) = moved
            && error.kind() == block::ErrorKind::Fenced
        {
            return Err(error);
        }
        pace.rest(of_segment).await;
    }
    Ok(outcome)
}

/// Notes that nothing is left to move, or that the rest cannot be moved.
pub(crate) async fn end(state: &RebalanceState, stores: &dyn OpenDataStores) {
    match stores.set_rebalancing(false).await {
        Ok(()) => {
            let RebalanceStatus { fragment_count, bytes, failure, .. } = state.status();
            tracing::info!(
                fragment_count,
                bytes,
                failure,
                "the rebalance of the data stores has ended"
            );
        }
        Err(error) => tracing::debug!(
            error = %error.chain(),
            "could not note the end of the rebalance; it is tried again"
        ),
    }
}
