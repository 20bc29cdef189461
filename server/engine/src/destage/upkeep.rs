//! Background work on the data tier besides destage, which no write waits for: leftovers of
//! crashes, pages hidden by trims, space to reclaim, and the index of deduplication.
//!
//! Invariants:
//! - A failed job is retried for ever; a fence stops the pool. A job that keeps failing is a
//!   condition.

use super::{ReclaimPace, stopped};
use crate::state::Shared;
use block::conditions::Report;
use block::env::Clock;
use block::{ConditionKind, Conditions, Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Back-references checked at once, while destage may have to wait. Chosen by hand: a few
/// milliseconds.
const SWEPT_AT_ONCE: usize = 64;
/// Pause before another try to read fingerprints. Chosen by hand.
const FINGERPRINTS_RETRY: Duration = Duration::from_secs(30);
/// Pages of the map folded after each window. Chosen by hand: a few milliseconds.
const FOLD_PAGES: usize = 256;
/// Pause between two checks for maintenance while nothing is written.
const MAINTENANCE: Duration = Duration::from_secs(5);

/// Longest pause between two sweeps of the whole folder of segments, after one that did not
/// complete. Chosen by hand: a sweep lists everything.
const SWEEP_PAUSE_MAX: Duration = Duration::from_secs(600);

/// Time without use after which memory of payloads is released. Chosen by hand: longer than destage
/// takes for the writes of a busy volume plus a client's pause, and short enough that all memory is
/// back a minute after a load (`benches/soak`).
const PAYLOADS_KEPT: Duration = Duration::from_secs(15);

/// Duration of failures after which a job becomes a condition. Chosen by hand: longer than most
/// outages of a store, which are a condition of their own; a late job loses nothing.
const FAILING_MAX: Duration = Duration::from_secs(600);

/// A job, and the time from which on all its attempts have failed.
struct Job {
    name: &'static str,
    conditions: Conditions,
    clock: Arc<dyn Clock>,
    failing_since: Option<Instant>,
}

impl Job {
    fn new(name: &'static str, conditions: &Conditions, clock: &Arc<dyn Clock>) -> Job {
        let (conditions, clock) = (conditions.clone(), clock.clone());
        Job { name, conditions, clock, failing_since: None }
    }

    /// Records an attempt that ends now.
    fn note<T>(&mut self, done: &Result<T>) {
        let Err(error) = done else {
            if self.failing_since.take().is_some() {
                self.conditions.clear(ConditionKind::MaintenanceFailing, self.name);
            }
            return;
        };
        tracing::debug!(
            job = self.name, error = %error.chain(),
            "could not finish a job; trying again later"
        );
        let now = self.clock.now();
        let since = *self.failing_since.get_or_insert(now);
        if now.duration_since(since) >= FAILING_MAX {
            self.conditions.raise(
                ConditionKind::MaintenanceFailing,
                self.name,
                failing(self.name, error),
            );
        }
    }
}

fn failing(name: &str, error: &Error) -> Report {
    Report::new(
        format!("the maintenance job {name} keeps failing: {}", error.chain()),
        "space in the store comes back late, or reads of the metadata take longer; nothing is lost",
        "check the store and the credentials, which must be allowed to delete; spindle tries again \
         automatically",
    )
}

/// Runs the work on the data tier that no write waits for: deletes segments that a crash left, and
/// pages that a large trim hides. Runs until `stop`; retries failures.
pub(crate) async fn maintain(shared: Arc<Shared>, mut stop: watch::Receiver<bool>) {
    let mut is_swept = false;
    let clock = shared.clock();
    let (mut sweep_pause, mut sweep_due) = (MAINTENANCE, clock.now());
    let mut trimmed_at = clock.now();
    let job = |name| Job::new(name, shared.tier.conditions(), clock);
    let mut orphans = job("delete segments that a crash left");
    let mut abandoned = job("delete segments that nothing names");
    let mut folding = job("fold trims and drop what snapshots showed");
    let mut references = job("drop back-references");
    while !*stop.borrow() && !shared.is_stopped() {
        if clock.since(trimmed_at) >= PAYLOADS_KEPT {
            trimmed_at = clock.now();
            shared.log.trim_payloads();
        }
        if !is_swept && clock.now() >= sweep_due {
            let swept = shared.tier.sweep_orphans().await;
            sweep_due = clock.now() + sweep_pause;
            sweep_pause = (sweep_pause * 2).min(SWEEP_PAUSE_MAX);
            orphans.note(&swept);
            if let Ok(swept) = swept {
                is_swept = !swept.is_cut;
                if swept.deleted_count > 0 {
                    tracing::info!(?swept, "the sweep deleted segments that a crash had left");
                }
            }
        }
        let swept = shared.tier.sweep_abandoned().await;
        abandoned.note(&swept);
        match swept {
            Ok(swept) if swept.deleted_count > 0 => {
                tracing::info!(?swept, "the sweep deleted segments of destages that had failed");
            }
            Err(error) if error.kind() == ErrorKind::Fenced => return shared.fail(error),
            Ok(_) | Err(_) => {}
        }
        shared.tier.try_unreadable_again().await;
        let folded = shared.tier.step(FOLD_PAGES).await;
        folding.note(&folded);
        match folded {
            Ok(report)
                if report.ranges_left + report.prunes_left + report.promotes_left > 0
                    && report.page_count > 0 =>
            {
                tokio::task::yield_now().await;
                continue;
            }
            // There is nothing else to do.
            Ok(_) => {
                let swept = shared.tier.sweep_back_references(SWEPT_AT_ONCE).await;
                references.note(&swept);
                match swept {
                    Err(error) if error.kind() == ErrorKind::Fenced => return shared.fail(error),
                    Ok(_) | Err(_) => {}
                }
            }
            Err(error) if error.kind() == ErrorKind::Fenced => return shared.fail(error),
            Err(_) => {}
        }
        let _ = tokio::time::timeout(MAINTENANCE, stopped(&mut stop)).await;
    }
}

/// Reclaims space: see [`tiering::reclaim`]. Runs until `stop`; retries failures.
pub(crate) async fn reclaim(
    shared: Arc<Shared>,
    options: ReclaimPace,
    mut stop: watch::Receiver<bool>,
) {
    let mut job = Job::new("reclaim space", shared.tier.conditions(), shared.clock());
    while !*stop.borrow() && !shared.is_stopped() {
        let begun = shared.clock().now();
        let mut pause = MAINTENANCE;
        let done = tokio::select! {
            done = shared.tier.reclaim_step(options.reclaim) => done,
            // It may be waiting for the store.
            _ = stopped(&mut stop) => return,
        };
        job.note(&done);
        match done {
            Ok(done) => {
                if !done.is_idle {
                    let bytes = done.read_bytes + done.written_bytes;
                    let worth = Duration::from_secs_f64(bytes as f64 / options.rate as f64);
                    pause = worth.saturating_sub(shared.clock().since(begun));
                }
                if done.forgotten_count > 0 {
                    tracing::debug!(?done, "reclaim freed segments");
                    // Segments that are not deleted now are deleted by `maintain`.
                    if let Err(error) = shared.tier.sweep_abandoned().await {
                        tracing::debug!(
                            error = %error.chain(),
                            "could not delete reclaimed segments; they stay for now"
                        );
                    }
                }
            }
            Err(error) if error.kind() == ErrorKind::Fenced => return shared.fail(error),
            Err(_) => {}
        }
        let _ = tokio::time::timeout(pause, stopped(&mut stop)).await;
    }
}

/// Loads the fingerprints of deduplication into memory. Data destaged meanwhile is compared with
/// those loaded so far.
pub(crate) async fn load_fingerprints(shared: Arc<Shared>, mut stop: watch::Receiver<bool>) {
    let mut job = Job::new(
        "read the fingerprints of deduplication",
        shared.tier.conditions(),
        shared.clock(),
    );
    while !*stop.borrow() && !shared.is_stopped() {
        let loaded = tokio::select! {
            loaded = shared.tier.load_fingerprints() => loaded,
            // It may be waiting for the store.
            _ = stopped(&mut stop) => return,
        };
        job.note(&loaded);
        if loaded.is_ok() {
            return;
        }
        let _ = tokio::time::timeout(FINGERPRINTS_RETRY, stopped(&mut stop)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::env::ManualClock;

    #[test]
    fn a_job_that_fails_for_long_is_a_condition_until_it_succeeds() {
        let conditions = Conditions::default();
        let clock = ManualClock::new();
        let shown: Arc<dyn Clock> = Arc::new(clock.clone());
        let mut job = Job::new("reclaim space", &conditions, &shown);
        let failed: Result<()> = Err(Error::new(ErrorKind::Denied, "delete: forbidden"));
        let is_raised = || conditions.is_raised(ConditionKind::MaintenanceFailing, "reclaim space");
        job.note(&failed);
        clock.advance(FAILING_MAX - Duration::from_secs(1));
        job.note(&failed);
        assert!(!is_raised(), "it may pass");
        clock.advance(Duration::from_secs(1));
        job.note(&failed);
        assert!(is_raised());
        job.note(&Ok(()));
        assert!(!is_raised());
        job.note(&failed);
        assert!(!is_raised(), "it has begun again");
    }
}
