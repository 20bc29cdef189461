//! Work on the data tier beside destage that no write waits for: what crashes left, what trims hide, space that comes
//! back, and what deduplication looks in.
//!
//! Invariants:
//! - Each job is tried again for ever when it fails; a fence stops the pool.

use super::{ReclaimPace, stopped};
use crate::pool::Shared;
use block::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Back-references that are looked at while destage may have to wait. Chosen by hand: some milliseconds.
const SWEPT_AT_ONCE: usize = 64;
/// Pause before fingerprints that could not be read are read again. Chosen by hand.
const FINGERPRINTS_RETRY: Duration = Duration::from_secs(30);
/// Pages of the map folded after each window. Chosen by hand: a few milliseconds.
const FOLD_PAGES: usize = 256;
/// Pause between two looks for maintenance while nothing is written.
const MAINTENANCE: Duration = Duration::from_secs(5);

/// Memory of payloads that was of no use for so long goes back. Chosen by hand: longer than destage takes for what a
/// busy volume writes and a client's pause, and short enough that all is back a minute after a load (`benches/soak`).
const PAYLOADS_KEPT: Duration = Duration::from_secs(15);

/// Work on the data tier that no write waits for: segments that a crash left, pages that a large
/// trim hides. Runs until `stop` says so; failures are tried again.
pub(crate) async fn maintain(shared: Arc<Shared>, mut stop: watch::Receiver<bool>) {
    let mut is_swept = false;
    let mut trimmed_at = Instant::now();
    while !*stop.borrow() && !shared.is_stopped() {
        if trimmed_at.elapsed() >= PAYLOADS_KEPT {
            trimmed_at = Instant::now();
            shared.log.trim_payloads();
        }
        if !is_swept {
            match shared.tier.sweep_orphans().await {
                Ok(swept) => {
                    is_swept = true;
                    if swept.deleted_count > 0 {
                        tracing::info!(?swept, "deleted segments that a crash had left");
                    }
                }
                Err(error) => {
                    tracing::debug!(error = %error.chain(), "orphan segments stay for now");
                }
            }
        }
        match shared.tier.sweep_abandoned().await {
            Ok(swept) if swept.deleted_count > 0 => {
                tracing::info!(?swept, "deleted segments of destages that had failed");
            }
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Fenced => return shared.fail(error),
            Err(error) => {
                tracing::debug!(error = %error.chain(), "abandoned segments stay for now");
            }
        }
        let folded = shared.tier.step(FOLD_PAGES).await;
        match folded {
            Ok(report)
                if report.ranges_left + report.prunes_left + report.promotes_left > 0
                    && report.page_count > 0 =>
            {
                tokio::task::yield_now().await;
                continue;
            }
            // Nothing else is left to do.
            Ok(_) => match shared.tier.sweep_back_references(SWEPT_AT_ONCE).await {
                Err(error) if error.kind() == ErrorKind::Fenced => return shared.fail(error),
                Err(error) => {
                    tracing::debug!(error = %error.chain(), "back-references stay for now");
                }
                Ok(_) => {}
            },
            Err(error) if error.kind() == ErrorKind::Fenced => return shared.fail(error),
            Err(error) => tracing::debug!(error = %error.chain(), "trims are not folded for now"),
        }
        let _ = tokio::time::timeout(MAINTENANCE, stopped(&mut stop)).await;
    }
}

/// Gives space back: see [`tiering::reclaim`]. Runs until `stop` says so; failures are tried again.
pub(crate) async fn reclaim(
    shared: Arc<Shared>,
    options: ReclaimPace,
    mut stop: watch::Receiver<bool>,
) {
    while !*stop.borrow() && !shared.is_stopped() {
        let begun = Instant::now();
        let mut pause = MAINTENANCE;
        let done = tokio::select! {
            done = shared.tier.reclaim_step(options.reclaim) => done,
            // It may be waiting for the store.
            _ = stopped(&mut stop) => return,
        };
        match done {
            Ok(done) => {
                if !done.is_idle {
                    let bytes = done.read_bytes + done.written_bytes;
                    let worth = Duration::from_secs_f64(bytes as f64 / options.rate as f64);
                    pause = worth.saturating_sub(begun.elapsed());
                }
                if done.forgotten_count > 0 {
                    tracing::debug!(?done, "reclaimed segments");
                    // What is not deleted now is deleted by `maintain`.
                    if let Err(error) = shared.tier.sweep_abandoned().await {
                        tracing::debug!(error = %error.chain(), "reclaimed segments stay for now");
                    }
                }
            }
            Err(error) if error.kind() == ErrorKind::Fenced => return shared.fail(error),
            Err(error) => tracing::debug!(error = %error.chain(), "nothing is reclaimed for now"),
        }
        let _ = tokio::time::timeout(pause, stopped(&mut stop)).await;
    }
}

/// Brings what deduplication is to find into memory. What is destaged meanwhile is looked for among what is there.
pub(crate) async fn load_fingerprints(shared: Arc<Shared>, mut stop: watch::Receiver<bool>) {
    while !*stop.borrow() && !shared.is_stopped() {
        let loaded = tokio::select! {
            loaded = shared.tier.load_fingerprints() => loaded,
            // It may be waiting for the store.
            _ = stopped(&mut stop) => return,
        };
        match loaded {
            Ok(()) => return,
            Err(error) => tracing::debug!(error = %error.chain(), "fingerprints are not read yet"),
        }
        let _ = tokio::time::timeout(FINGERPRINTS_RETRY, stopped(&mut stop)).await;
    }
}
