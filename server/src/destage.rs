//! The job that moves frozen generations of the log into the data tier, oldest first.
//!
//! Invariants:
//! - One window at a time, in LSN order: the store is always a consistent prefix of the pool's
//!   history over all its volumes.
//! - A generation is released only after its window is durable.
//! - A failure that may pass is retried for ever, with a pause that is bounded; one that cannot
//!   pass stops the pool.

use crate::pool::Shared;
use block::units::BLOCK_BYTES;
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use replication::{Generation, Log, Source};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiering::{DestageError, ExtentContent, LogSource, Window, WindowExtent};
use tokio::sync::watch;

/// How and when data leaves the log.
#[derive(Clone, Copy, Debug)]
pub struct DestageOptions {
    /// Oldest age of data that is only in the log.
    pub max_age: Duration,
    /// Pause before a failed destage is tried again; doubled up to sixteen times.
    pub retry: Duration,
}

impl Default for DestageOptions {
    fn default() -> Self {
        DestageOptions { max_age: Duration::from_secs(30), retry: Duration::from_millis(250) }
    }
}

/// What the job has done so far, for status and metrics.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct DestageProgress {
    /// Windows made durable in the store.
    pub window_count: u64,
    /// Bytes of volume data that these windows held.
    pub destaged_bytes: u64,
    /// Segments written.
    pub segment_count: u64,
    /// Bytes of these segments.
    pub stored_bytes: u64,
    /// Time spent, in milliseconds.
    pub busy_ms: u64,
    /// Why the latest attempt failed, while that lasts.
    pub failure: Option<String>,
    /// Attempts that failed.
    pub failure_count: u64,
}

/// Runs until `stop` says so (between two windows) or the pool ends.
pub(crate) async fn run(
    shared: Arc<Shared>,
    options: DestageOptions,
    mut stop: watch::Receiver<bool>,
) {
    let mut pause = options.retry;
    while !*stop.borrow() && !shared.is_stopped() {
        let Some(generation) = next_generation(&shared, options, &mut stop).await else {
            continue;
        };
        let attempt = tokio::select! {
            result = destage_one(&shared, &generation) => result,
            // Closing does not wait for a store that does not answer; the window is replayed.
            () = stopped(&mut stop) => return,
        };
        match attempt {
            Ok(()) => pause = options.retry,
            Err(DestageError { error, .. }) if error.kind() == ErrorKind::Fenced => {
                shared.fail(error);
            }
            Err(failed) => {
                let error = Error::from(failed);
                tracing::warn!(error = %error.chain(), retry_ms = pause.as_millis() as u64,
                    "destage failed; writes go on until the log is full");
                {
                    let mut progress = shared.progress.lock();
                    progress.failure = Some(error.chain());
                    progress.failure_count += 1;
                }
                let _ = tokio::time::timeout(pause, stopped(&mut stop)).await;
                pause = (pause * 2).min(options.retry * 16);
            }
        }
    }
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // A sender that is gone means the pool is gone.
    let _ = stop.wait_for(|stop| *stop).await;
}

/// The oldest frozen generation, once there is one: because it grew full, because it grew old, or
/// because somebody waits for its data to be in the store.
async fn next_generation(
    shared: &Shared,
    options: DestageOptions,
    stop: &mut watch::Receiver<bool>,
) -> Option<Arc<Generation>> {
    // Subscribed before the look at the state, so that no change in between is missed.
    let mut changes = shared.log.changes();
    changes.mark_unchanged();
    if let Some(generation) = shared.log.next_frozen() {
        return Some(generation);
    }
    let status = shared.log.status();
    // Half of the age is for gathering, the other half for the destage itself.
    let gather = options.max_age / 2;
    let is_wanted = shared.is_wanted() && status.oldest_undestaged_age.is_some();
    let is_old = status.oldest_undestaged_age.is_some_and(|age| age >= gather);
    if is_wanted || is_old {
        shared.log.freeze();
        return shared.log.next_frozen();
    }
    let wake_in = match status.oldest_undestaged_age {
        Some(age) => gather - age,
        None => gather,
    };
    tokio::select! {
        _ = changes.changed() => {}
        () = shared.wanted.notified() => {}
        () = tokio::time::sleep(wake_in) => {}
        () = stopped(stop) => {}
    }
    None
}

async fn destage_one(
    shared: &Shared,
    generation: &Arc<Generation>,
) -> Result<(), DestageError> {
    let started = Instant::now();
    let source = FromLog { log: shared.log.clone() };
    let report = shared.tier.destage(window_of(generation), &source).await?;
    shared.log.release(generation);
    shared.destaged.send_replace(generation.last_lsn());
    let mut progress = shared.progress.lock();
    progress.window_count += 1;
    progress.destaged_bytes += report.stored_block_count * BLOCK_BYTES;
    progress.segment_count += report.segment_count;
    progress.stored_bytes += report.object_bytes;
    progress.busy_ms += u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    progress.failure = None;
    tracing::debug!(last_lsn = %generation.last_lsn(), ?report, "destaged a window");
    Ok(())
}

/// The generation in the words of the data tier.
fn window_of(generation: &Generation) -> Window<Source> {
    let volumes = generation.volumes().map(|(volume, pieces)| {
        let extents = pieces.into_iter().map(|piece| WindowExtent {
            start_sector: piece.start_sector,
            sector_count: piece.sector_count,
            content: match piece.source {
                Source::Zeroes { .. } => ExtentContent::Zero,
                source => ExtentContent::Data(source),
            },
        });
        (volume, extents.collect())
    });
    Window {
        last_lsn: generation.last_lsn(),
        volume_records: generation.volume_records().collect(),
        volumes: volumes.collect(),
    }
}

/// Payloads of a window, from memory or from the log files.
struct FromLog {
    log: Log,
}

impl LogSource for FromLog {
    type Handle = Source;

    async fn read(&self, source: &Source) -> Result<Bytes> {
        match source {
            Source::Payload(bytes) => Ok(bytes.clone()),
            Source::LogResident(resident) => {
                let bytes = self.log.read(resident).await?;
                Ok(bytes.expect("a generation that is not released keeps its place in the log"))
            }
            Source::Zeroes { .. } | Source::Beneath => {
                unreachable!("a generation's data extents have a payload")
            }
        }
    }
}
