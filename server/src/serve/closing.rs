//! The end of serving a pool: the work that is left when a stop is requested.
//!
//! Invariants:
//! - A second signal ends the process at once, whatever an orderly stop still waits for.

use super::Signals;
use block::Error;
use engine::open_pool::CLOSE_DESTAGE_MAX;
use engine::pool::Pool;

/// Exit code of a daemon that a second signal ended before its stop was complete.
pub(crate) const EXIT_AT_ONCE: i32 = 3;
/// Exit code of a daemon that ended because the disk of its write log failed.
pub(crate) const EXIT_LOG_FAILED: u8 = 5;

/// Moves the log to the store while devices are still served. From the moment a device is left
/// until the next daemon's first answer its user waits, so slow work is done before. Errors show
/// when the pool is closed. Returns why the pool is no longer ours if it was lost meanwhile or
/// before.
pub(super) async fn move_while_served(pool: &Pool) -> Option<Error> {
    let lost = tokio::select! {
        lost = pool.ended() => Some(lost),
        _ = tokio::time::timeout(CLOSE_DESTAGE_MAX, pool.destage_all()) => None,
    };
    if lost.is_some() {
        return lost;
    }
    // The loss may have ended the move first.
    tokio::select! {
        biased;
        lost = pool.ended() => Some(lost),
        () = std::future::ready(()) => None,
    }
}

/// Ends the process at the first signal after `spare_count` others, even during an orderly stop.
/// Acknowledged writes are in the write log, like after a kill.
pub(super) fn end_at_once_on_another(mut signals: Signals, spare_count: usize) {
    tokio::spawn(async move {
        for _ in 0..=spare_count {
            signals.stop().await;
        }
        tracing::warn!(
            "the daemon ends at once, because another signal came during the stop; the write log \
             holds the data that the store lacks, and this directory still owns the pool"
        );
        std::process::exit(EXIT_AT_ONCE);
    });
}
