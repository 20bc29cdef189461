//! The job that moves frozen generations of the log into the data tier, oldest first.
//!
//! Invariants:
//! - One window at a time, in LSN order: the store is always a consistent prefix of the pool's
//!   history over all its volumes.
//! - A generation is released only after its window is durable.
//! - A failure that may pass is retried for ever, with a pause that is bounded; a fence stops the
//!   pool.
//! - A volume whose data cannot be destaged does not pin the log for the others: its live entries
//!   are appended anew, so that the generation can go on without it, and are tried again with the
//!   next one. Beyond a bound that volume alone refuses writes until it can be destaged again.

use crate::planted::planted;
use crate::pool::Shared;
use block::units::BLOCK_BYTES;
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use bytes::Bytes;
use replication::{EntryKind, Generation, Log, NewEntry, Piece, Source, Wait};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiering::{DestageError, ExtentContent, LogSource, Window, WindowExtent};
use tokio::sync::watch;

/// Sectors of one entry that is appended anew. As volumes cut their own writes.
const ENTRY_SECTORS_MAX: u64 = 256;
/// Entries of a volume that is set aside under way at once. Chosen by hand.
const ASIDE_IN_FLIGHT_MAX: usize = 64;
/// Longest that one attempt to set a volume aside may take. Chosen by hand: an eighth of a log of
/// 2 GiB at 30 MiB/s.
const ASIDE_DURATION_MAX: Duration = Duration::from_secs(10);
/// Destage is urgent while this part of the log, one in so many, is in use. Chosen by hand: before
/// writers are slowed down.
const URGENT_FILL: u64 = 4;
/// Pages of the map folded after each window. Chosen by hand: a few milliseconds.
const FOLD_PAGES: usize = 256;
/// Pause between two looks for maintenance while nothing is written.
const MAINTENANCE: Duration = Duration::from_secs(5);

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
    /// Volumes whose data stays in the log, with the reason and their bytes there.
    pub aside: BTreeMap<u32, Aside>,
}

/// A volume that could not be destaged at the last attempt.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Aside {
    /// Bytes of it that only the log holds.
    pub log_bytes: u64,
    /// Why.
    pub reason: String,
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
            Err(DestageError { volume: Some(volume), error }) if is_of_the_volume(&error) => {
                let aside = tokio::select! {
                    // In a full log there may be no room for it: then it is tried again.
                    aside = tokio::time::timeout(
                        ASIDE_DURATION_MAX,
                        set_aside(&shared, &generation, volume, &error),
                    ) => aside,
                    () = stopped(&mut stop) => return,
                };
                let failure = match aside {
                    Ok(Ok(())) => continue,
                    Ok(Err(error)) => error,
                    Err(_) => error.context("set a volume aside: no room in the log"),
                };
                report(&shared, &failure, pause);
                let _ = tokio::time::timeout(pause, stopped(&mut stop)).await;
            }
            Err(failed) => {
                let error = Error::from(failed);
                report(&shared, &error, pause);
                let _ = tokio::time::timeout(pause, stopped(&mut stop)).await;
                pause = (pause * 2).min(options.retry * 16);
            }
        }
    }
}

fn report(shared: &Shared, error: &Error, pause: Duration) {
    let retry_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
    tracing::warn!(error = %error.chain(), retry_ms,
        "destage failed; writes go on until the log is full");
    let mut progress = shared.progress.lock();
    progress.failure = Some(error.chain());
    progress.failure_count += 1;
}

/// The store answers, but what it holds of this volume does not verify or is not there: trying
/// again does not help, and the other volumes must not wait for it.
fn is_of_the_volume(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound)
}

/// Appends the live entries of one volume in the oldest generation anew, and notes that this
/// generation is destaged without it.
async fn set_aside(
    shared: &Shared,
    generation: &Arc<Generation>,
    volume: VolumeId,
    cause: &Error,
) -> Result<()> {
    let lock = shared.change_lock(volume);
    // Nobody else changes the volume meanwhile, so what is appended is what is newest.
    let _alone = lock.write().await;
    let extents = generation.volumes().find(|(id, _)| *id == volume).map(|(_, extents)| extents);
    let mut restated = Lsn::NONE;
    let mut waiters = VecDeque::new();
    for extent in extents.unwrap_or_default() {
        let (mut start, end) = (extent.start_sector, extent.start_sector + extent.sector_count);
        while start < end {
            // A range without payload may be of any length; one with payload is cut as written.
            let count = match extent.source {
                Source::Zeroes { .. } => end - start,
                _ => (end - start).min(ENTRY_SECTORS_MAX),
            };
            for piece in shared.log.overlay().lookup(volume, start, count) {
                if let Some(entry) = entry_of(shared, volume, piece).await? {
                    waiters.push_back(shared.log.append(entry, Wait::Durable));
                }
                while waiters.len() > ASIDE_IN_FLIGHT_MAX {
                    restated = restated.max(waiters.pop_front().expect("it is not empty").await?);
                }
            }
            start += count;
        }
    }
    for waiter in waiters {
        restated = restated.max(waiter.await?);
    }
    shared.set_aside(generation.last_lsn(), volume, restated, cause);
    Ok(())
}

/// The entry that says again what a piece of the overlay says.
async fn entry_of(shared: &Shared, volume: VolumeId, piece: Piece) -> Result<Option<NewEntry>> {
    let (kind, payload) = match &piece.source {
        Source::Payload(bytes) => (EntryKind::Write, bytes.clone()),
        Source::LogResident(resident) => {
            let bytes = shared.log.read(resident).await?;
            (EntryKind::Write, bytes.expect("the oldest generation is not released yet"))
        }
        Source::Zeroes { is_trim: true } => (EntryKind::Trim, Bytes::new()),
        Source::Zeroes { is_trim: false } => (EntryKind::Zero, Bytes::new()),
        Source::Beneath => return Ok(None),
    };
    let (start_sector, sector_count) = (piece.start_sector, piece.sector_count);
    Ok(Some(NewEntry { volume, kind, start_sector, sector_count, payload }))
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

async fn destage_one(shared: &Shared, generation: &Arc<Generation>) -> Result<(), DestageError> {
    let started = Instant::now();
    let log = shared.log.status();
    shared.tier.set_urgent(log.used_bytes.saturating_mul(URGENT_FILL) >= log.ring_bytes);
    let source = FromLog { log: shared.log.clone() };
    let mut window = window_of(generation);
    let left_out = shared.left_out(generation.last_lsn());
    window.volumes.retain(|(volume, _)| !left_out.contains(volume));
    let is_dropped_early = planted().overlay_dropped_early && is_in_memory(&window);
    if is_dropped_early {
        shared.log.release(generation);
    }
    let report = shared.tier.destage(window, &source).await?;
    if !is_dropped_early {
        shared.log.release(generation);
    }
    shared.took_in(generation, &left_out);
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

/// Nothing of the window has to be read from the log files, so its place there may be lost.
fn is_in_memory(window: &Window<Source>) -> bool {
    let mut extents = window.volumes.iter().flat_map(|(_, extents)| extents);
    !extents.any(|extent| matches!(extent.content, ExtentContent::Data(Source::LogResident(_))))
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

/// Work on the data tier that no write waits for: segments that a crash left, pages that a large
/// trim hides. Runs until `stop` says so; failures are tried again.
pub(crate) async fn maintain(shared: Arc<Shared>, mut stop: watch::Receiver<bool>) {
    let mut is_swept = false;
    while !*stop.borrow() && !shared.is_stopped() {
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
            Ok(report) if report.ranges_left > 0 && report.page_count > 0 => {
                tokio::task::yield_now().await;
                continue;
            }
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Fenced => return shared.fail(error),
            Err(error) => tracing::debug!(error = %error.chain(), "trims are not folded for now"),
        }
        let _ = tokio::time::timeout(MAINTENANCE, stopped(&mut stop)).await;
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
