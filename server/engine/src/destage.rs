//! The job that moves frozen generations of the log into the data tier, oldest first.
//!
//! Invariants:
//! - One window at a time, in LSN order: the store is always a consistent prefix of the pool's
//!   history over all its volumes.
//! - A window is committed only once the log is on stable storage up to its last entry. The log
//!   therefore never ends below the store's data after any power loss or crash; a log that does is
//!   an older copy or has lost data.
//! - A generation is released only after its window is durable.
//! - A failure that may pass is retried for ever, with a bounded pause; a fence stops the pool.
//! - A volume whose data cannot be destaged does not pin the log for the others: its data in the
//!   oldest generation goes to a spill file, and the generation is destaged without it. Nothing is
//!   appended, so this works in a full log too. All later generations leave the volume stalled until
//!   catch-up windows of its own have moved all data of its spill files.
//! - During a burst, while the log has room, a generation waits for the end of the burst, so that
//!   client requests get all processors. It waits for at most half of the oldest age, and not while
//!   a caller waits for the store.
//! - The batch that destages a generation names the spill files that complete it, and the batch of a
//!   catch-up window names none: a spill file counts exactly while the metadata names it.

mod burst;
mod upkeep;

use self::burst::{BURST_LOOK, Burst, is_urgent};
pub(crate) use self::upkeep::{load_fingerprints, maintain, reclaim};
use crate::conditions::POOL;
use crate::seeded_bugs::seeded_bugs;
use crate::snapshot::SnapshotEntry;
use crate::state::{self, Shared};
use block::conditions::Report;
use block::units::BLOCK_BYTES;
use block::{ConditionKind, Error, ErrorKind, Result, VolumeId};
use bytes::Bytes;
use futures::TryStreamExt;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiering::{
    DestageError, ExtentContent, LogSource, NamedSpillFile, ReclaimOptions, Window, WindowExtent,
};
use tokio::sync::watch;
use wal::{
    Generation, Log, ObsoleteSpillFiles, Piece, Source, SpillChange, SpillFileId, is_unreadable,
};

/// Longest pause before volumes that are stalled are tried again. Chosen by hand: each attempt
/// repeats the reads that failed before.
const CATCH_UP_PAUSE_MAX: Duration = Duration::from_secs(30);
/// Payload of one catch-up window, as a fraction of the log (one in this number) and in bytes: the next
/// generation waits for the duration of one. Chosen by hand.
const CATCH_UP_PART: u64 = 8;
const CATCH_UP_BYTES_MAX: u64 = 256 << 20;
/// Fill level of the log, in percent, from which the check of a catch-up window stops while a
/// generation waits. The check also stops while a caller waits for the store. Chosen by hand: above
/// the level at which writers are slowed down to the pace of destage.
const CATCH_UP_YIELD_PERCENT: u64 = 80;
/// Most times in a row that a catch-up window gives way: in a pool that is always busy, a volume must
/// be able to come back too. Chosen by hand.
const CATCH_UP_YIELDS_MAX: u32 = 3;
/// Pause before the next attempt after writes of a volume stalled, in units of the shortest
/// pause: the writes may have covered the damage. Chosen by hand.
const CATCH_UP_NUDGE_PAUSES: u32 = 16;
/// Pause between two looks at whether a check must give way. Chosen by hand.
const CATCH_UP_LOOK: Duration = Duration::from_millis(100);
/// Payloads of spill files that such a check reads at the same time. Chosen by hand.
const CATCH_UP_READS: usize = 4;

/// Amount and speed of reclaim.
#[derive(Clone, Copy, Debug)]
pub struct ReclaimPace {
    /// Amount.
    pub reclaim: ReclaimOptions,
    /// Most bytes per second that it reads and writes.
    pub rate: u64,
}

impl Default for ReclaimPace {
    fn default() -> Self {
        ReclaimPace { reclaim: ReclaimOptions::default(), rate: 200 << 20 }
    }
}

/// Rules for moving data out of the log.
#[derive(Clone, Copy, Debug)]
pub struct DestageOptions {
    /// Oldest age of data that only the log holds.
    pub max_age: Duration,
    /// Pause before a failed destage is tried again; doubled up to sixteen times its length.
    pub retry: Duration,
    /// Time for which data that the log's disk does not read is tried again before it counts as
    /// lost.
    pub unreadable: Duration,
    /// Pace of the reclaim that follows.
    pub reclaim: ReclaimPace,
}

impl DestageOptions {
    /// Time for gathering data: half of the age. The other half is for the destage itself.
    fn gather(&self) -> Duration {
        self.max_age / 2
    }
}

impl Default for DestageOptions {
    fn default() -> Self {
        DestageOptions {
            max_age: Duration::from_secs(30),
            retry: Duration::from_millis(250),
            // Longer than a controller needs to reset a device.
            unreadable: Duration::from_secs(60),
            reclaim: ReclaimPace::default(),
        }
    }
}

/// An attempt to destage the oldest generation.
struct Attempt {
    generation: Arc<Generation>,
    /// Volumes that the generation is destaged without, and the spill files that they then have.
    spills: BTreeMap<VolumeId, SpillChange>,
    /// Volumes that are newly stalled, with the causes.
    causes: Vec<(VolumeId, Error)>,
    /// The metadata may name the files of `spills`: a commit succeeded, or its outcome is unknown.
    is_maybe_committed: bool,
    /// Volumes with a payload that the log's disk does not read.
    unreadable: BTreeMap<VolumeId, Unreadable>,
    unreadable_max: Duration,
}

/// The time since which the log's disk does not read some data of a volume.
#[derive(Clone, Copy)]
struct Unreadable {
    since: Instant,
    latest: Instant,
}

impl Attempt {
    fn new(generation: Arc<Generation>, options: DestageOptions) -> Attempt {
        Attempt {
            generation,
            spills: BTreeMap::new(),
            causes: Vec::new(),
            is_maybe_committed: false,
            unreadable: BTreeMap::new(),
            unreadable_max: options.unreadable,
        }
    }

    /// Tells whether the volume's unreadable data has been retried for long enough to count as
    /// lost.
    fn are_unreadable_lost(&self, volume: VolumeId) -> bool {
        let found = self.unreadable.get(&volume);
        found.is_some_and(|found| found.latest - found.since >= self.unreadable_max)
    }

    /// Notes a failure of the disk. Failures that are far apart (the store was away in between) do
    /// not count as one that lasts.
    fn note(&mut self, volume: VolumeId, error: &Error, now: Instant) {
        if is_unreadable(error) {
            let found =
                self.unreadable.entry(volume).or_insert(Unreadable { since: now, latest: now });
            if now - found.latest > self.unreadable_max / 2 {
                found.since = now;
            }
            found.latest = now;
        }
    }

    /// Tells whether an error concerns this volume alone, so that the others must not wait. Either
    /// the store answers, but its data of this volume does not verify, is missing or cannot be
    /// read; or the log's disk has lost data.
    fn is_of_the_volume(&self, volume: VolumeId, error: &Error) -> bool {
        is_of_stored_data(error) || (is_unreadable(error) && self.are_unreadable_lost(volume))
    }
}

/// The time at which the volumes that are stalled are tried again, and the volumes left in this
/// round.
struct Late {
    due: Instant,
    pause: Duration,
    waiting: VecDeque<VolumeId>,
    is_under_way: bool,
    is_any_better: bool,
    /// Number of times in a row that a volume had to give way to others.
    yields: BTreeMap<VolumeId, u32>,
    /// A caller waits for the end of the round.
    is_wanted: bool,
}

impl Late {
    fn new(options: DestageOptions, now: Instant) -> Late {
        Late {
            due: now + options.retry,
            pause: options.retry,
            waiting: VecDeque::new(),
            is_under_way: false,
            is_any_better: false,
            yields: BTreeMap::new(),
            is_wanted: false,
        }
    }

    /// Begins a round if one is due. Returns whether a round is under way.
    fn begin(&mut self, shared: &Shared) -> bool {
        let is_wanted = shared.is_catch_up_wanted();
        let is_due = is_wanted || (shared.is_any_stalled() && shared.clock().now() >= self.due);
        if !self.is_under_way && is_due {
            shared.catch_up_begins();
            self.is_under_way = true;
            self.is_wanted = is_wanted;
            self.waiting = shared.stalled_volumes().into();
        }
        self.is_under_way
    }

    /// Tries one volume, or ends the round.
    async fn step(&mut self, shared: &Shared, options: DestageOptions) {
        let Some(volume) = self.waiting.front().copied() else {
            self.is_under_way = false;
            let is_any_better = std::mem::take(&mut self.is_any_better);
            let longer = (self.pause * 2).min(CATCH_UP_PAUSE_MAX);
            self.pause = if is_any_better { options.retry } else { longer };
            self.due = shared.clock().now() + self.pause;
            self.yields.retain(|volume, _| shared.is_stalled(*volume));
            shared.update_stalled_quota();
            return shared.catch_up_ended();
        };
        let yields = self.yields.entry(volume).or_default();
        let gives_way = !self.is_wanted && *yields < CATCH_UP_YIELDS_MAX;
        *yields += 1;
        let caught_up = catch_up(shared, volume, gives_way).await;
        if !caught_up.as_ref().is_err_and(|error| error.kind() == ErrorKind::Unavailable) {
            self.yields.remove(&volume);
        }
        self.waiting.pop_front();
        match caught_up {
            Ok(is_back) => {
                self.is_any_better = true;
                if !is_back {
                    self.waiting.push_back(volume);
                }
            }
            Err(error) if error.kind() == ErrorKind::Fenced => shared.fail(error),
            Err(error) => shared.note_still_stalled(volume, &error),
        }
    }
}

/// Runs until `stop` asks for the end (between two windows) or the pool ends.
pub(crate) async fn run(
    shared: Arc<Shared>,
    options: DestageOptions,
    mut stop: watch::Receiver<bool>,
) {
    let mut pause = options.retry;
    let clock = shared.clock().clone();
    let mut late = Late::new(options, clock.now());
    let mut attempt: Option<Attempt> = None;
    let mut burst = Burst::new(clock.now());
    while !*stop.borrow() && !shared.is_stopped() {
        // No catch-up window runs once spill files of this attempt are written: they are to join the
        // files that the catch-up window would drop.
        let is_free = attempt.as_ref().is_none_or(|attempt| attempt.spills.is_empty());
        if is_free && late.begin(&shared) {
            tokio::select! {
                () = late.step(&shared, options) => {}
                () = stopped(&mut stop) => return,
            }
        }
        if attempt.is_none() {
            // The volumes that are stalled and the generations take turns.
            let next = match late.is_under_way {
                true => ripe_generation(&shared, options),
                false => next_generation(&shared, options, (&late, &mut burst), &mut stop).await,
            };
            attempt = next.map(|generation| Attempt::new(generation, options));
        }
        let Some(current) = &mut attempt else { continue };
        let outcome = tokio::select! {
            outcome = destage_one(&shared, current) => outcome,
            // Closing does not wait for a store that does not answer; the window is replayed.
            () = stopped(&mut stop) => return,
        };
        match outcome {
            Ok(()) => {
                // Writes that cover the damage heal a volume, which makes an attempt worthwhile.
                // The log gets room first.
                if shared.log.next_frozen().is_none() && !current.spills.is_empty() {
                    late.due = late.due.min(clock.now() + options.retry * CATCH_UP_NUDGE_PAUSES);
                }
                attempt = None;
                pause = options.retry;
            }
            Err(DestageError { error, .. }) if error.kind() == ErrorKind::Fenced => {
                shared.fail(error);
            }
            Err(failed) => {
                if !current.is_maybe_committed {
                    // Their volumes may heal meanwhile, and another volume may be waiting for the
                    // room that they take.
                    let spills = std::mem::take(&mut current.spills).into_values().collect();
                    current.causes.clear();
                    shared.log.remove_spill_files(shared.log.discard_spill_files(spills)).await;
                }
                report(&shared, &Error::from(failed), pause);
                let _ = tokio::time::timeout(pause, stopped(&mut stop)).await;
                pause = (pause * 2).min(options.retry * 16);
            }
        }
    }
}

fn report(shared: &Shared, error: &Error, pause: Duration) {
    let retry_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
    tracing::debug!(error = %error.chain(), retry_ms, "could not destage; trying again");
    let report = Report::new(
        format!("data does not reach the store: {}", error.chain()),
        "writes go on until the log is full",
        "check the store, its credentials and the network; destage tries again automatically",
    );
    shared.tier.conditions().raise(ConditionKind::DestageFailing, POOL, report);
    let mut progress = shared.progress.lock();
    progress.failure = Some(error.chain());
    progress.failure_count += 1;
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // A sender that is gone means that the pool is gone.
    let _ = stop.wait_for(|stop| *stop).await;
}

/// The oldest generation if it is due: because it is full, because it is old, or because a caller
/// waits for its data to be in the store.
fn ripe_generation(shared: &Shared, options: DestageOptions) -> Option<Arc<Generation>> {
    if let Some(generation) = shared.log.next_frozen() {
        return Some(generation);
    }
    let age = shared.log.status().oldest_undestaged_age;
    let is_wanted = shared.is_wanted() && age.is_some();
    if is_wanted || age.is_some_and(|age| age >= options.gather()) {
        shared.log.freeze();
        return shared.log.next_frozen();
    }
    None
}

/// Like [`ripe_generation`], but waits for a generation. `None` means that other work may be due.
async fn next_generation(
    shared: &Shared,
    options: DestageOptions,
    (late, burst): (&Late, &mut Burst),
    stop: &mut watch::Receiver<bool>,
) -> Option<Arc<Generation>> {
    // The subscription precedes the look at the state, so that no change in between is missed.
    let mut changes = shared.log.changes();
    changes.mark_unchanged();
    let gather = options.gather();
    let mut wake_in = match ripe_generation(shared, options) {
        Some(_)
            if !shared.is_wanted()
                && (seeded_bugs().destage_put_off
                    || burst.goes_first(&shared.log.status(), gather, shared.clock().now())) =>
        {
            // The time until the next release says nothing about the duration of a destage.
            shared.log.note_destage_pause();
            shared.tier.set_urgent(false);
            BURST_LOOK
        }
        Some(generation) => return Some(generation),
        None => match shared.log.status().oldest_undestaged_age {
            Some(age) => gather.saturating_sub(age),
            None => gather,
        },
    };
    if shared.is_any_stalled() {
        wake_in = wake_in.min(late.due.saturating_duration_since(shared.clock().now()));
    }
    tokio::select! {
        _ = changes.changed() => {}
        () = shared.wanted.notified() => {}
        () = tokio::time::sleep(wake_in) => {}
        () = stopped(stop) => {}
    }
    None
}

/// Destages the oldest generation, except for the volumes that cannot be destaged: their data goes
/// to spill files.
async fn destage_one(shared: &Shared, attempt: &mut Attempt) -> Result<(), DestageError> {
    let started = shared.clock().now();
    let log = shared.log.status();
    shared.tier.set_urgent(is_urgent(&log));
    let source = FromLog { log: shared.log.clone() };
    let generation = attempt.generation.clone();
    // Once a volume has spill files, later data must not overtake them.
    let volumes: Vec<VolumeId> = generation.volumes().map(|(volume, _)| volume).collect();
    for volume in volumes {
        if shared.is_stalled(volume) {
            stall(shared, attempt, volume).await?;
        }
    }
    // A log that failed before it reached this LSN keeps the window from being committed.
    shared.log.make_durable(generation.last_lsn()).await?;
    let is_dropped_early =
        seeded_bugs().overlay_dropped_early && is_in_memory(&window_of(attempt)?);
    if is_dropped_early {
        shared.log.release(&generation);
    }
    let report = loop {
        attempt.is_maybe_committed = true;
        let failed = match shared.tier.destage(window_of(attempt)?, &source).await {
            Ok(report) => break report,
            Err(failed) => failed,
        };
        let Some(volume) = failed.volume else { return Err(failed) };
        // Failures of single volumes are found before the batch is written, and after a look at the
        // metadata: no earlier attempt has got through either.
        attempt.is_maybe_committed = false;
        attempt.note(volume, &failed.error, shared.clock().now());
        let is_new = !attempt.spills.contains_key(&volume);
        if !is_new || !attempt.is_of_the_volume(volume, &failed.error) {
            return Err(failed);
        }
        stall(shared, attempt, volume).await?;
        attempt.causes.push((volume, failed.error));
    };
    step(shared, "spill-committed")?;
    // This precedes the news that the generation is in the store.
    for (volume, cause) in &attempt.causes {
        shared.note_stalled(*volume, generation.first_lsn(), cause);
    }
    let spills = attempt.spills.values().cloned().collect();
    let obsolete = match is_dropped_early {
        true => ObsoleteSpillFiles::default(),
        false => shared.log.release_with(&generation, spills),
    };
    shared.update_stalled_quota();
    shared.destaged.send_replace(generation.last_lsn());
    step(shared, "spill-released")?;
    shared.log.remove_spill_files(obsolete).await;
    let mut progress = shared.progress.lock();
    progress.window_count += 1;
    progress.destaged_bytes += report.stored_block_count * BLOCK_BYTES;
    progress.segment_count += report.segment_count;
    progress.stored_bytes += report.object_bytes;
    progress.busy_ms +=
        u64::try_from(shared.clock().since(started).as_millis()).unwrap_or(u64::MAX);
    progress.failure = None;
    shared.tier.conditions().clear(ConditionKind::DestageFailing, POOL);
    tracing::debug!(last_lsn = %generation.last_lsn(), ?report, "destage stored a window");
    Ok(())
}

/// Writes the generation's data of a volume to a spill file, unless that was done before.
async fn stall(shared: &Shared, attempt: &mut Attempt, volume: VolumeId) -> Result<()> {
    if attempt.spills.contains_key(&volume) {
        return Ok(());
    }
    step(shared, "spill-start")?;
    let are_unreadable_lost = attempt.are_unreadable_lost(volume);
    let spill = match shared.check_spill(volume) {
        Ok(()) if shared.log.has_replicas() => {
            // The members release what the owner has destaged or spilled.
            let what = "write a spill file: it would be on this machine only, and the write log is on several";
            Err(Error::new(ErrorKind::Unavailable, what))
        }
        Ok(()) => {
            shared.log.write_spill_file(&attempt.generation, volume, are_unreadable_lost).await
        }
        Err(error) => Err(error),
    };
    let spill = spill.map_err(|error| {
        attempt.note(volume, &error, shared.clock().now());
        error.context(format!("stall volume {volume}"))
    })?;
    step(shared, "spill-written")?;
    attempt.spills.insert(volume, spill);
    Ok(())
}

/// Destages the contents of the oldest spill files of a volume, up to a bound, which brings the
/// volume to where the others were at that time. Returns true if no spill files are left and the
/// volume is back. `gives_way`: stops while others wait.
async fn catch_up(shared: &Shared, volume: VolumeId, gives_way: bool) -> Result<bool> {
    if shared.is_given_up(volume) {
        return give_up(shared, volume).await.map(|()| true);
    }
    let mut bytes_max = (shared.log.status().ring_bytes / CATCH_UP_PART).min(CATCH_UP_BYTES_MAX);
    let mut left_count = usize::MAX;
    let part = loop {
        let part = shared.log.spill_part(volume, bytes_max).await?;
        match check(shared, volume, &part.pieces, gives_way).await {
            Ok(()) => break part,
            // Later writes may cover the damaged data.
            Err(error) if is_damage(&error) && !part.rest.is_empty() => {
                if bytes_max == u64::MAX {
                    let what = "later writes may cover it, but a snapshot from before them shows \
                                it, and would have to be removed";
                    return Err(error.context(what));
                }
                let is_more = part.rest.len() < left_count;
                left_count = part.rest.len();
                bytes_max = if is_more { bytes_max.saturating_mul(2) } else { u64::MAX };
            }
            Err(error) => return Err(error),
        }
    };
    let window = Window {
        last_lsn: shared.tier.destaged_lsn(),
        volume_records: Vec::new(),
        volumes: vec![(volume, extents_of(part.pieces.clone()))],
        stalled_volumes: vec![(volume, spill_file_refs(&part.rest))],
        late: Some(part.last_lsn()),
        snapshots: Vec::new(),
    };
    let source = FromLog { log: shared.log.clone() };
    shared.tier.destage(window, &source).await?;
    step(shared, "late-committed")?;
    let obsolete = shared.log.drop_spilled(&part);
    let next = part.rest.first().map(|file| file.first_lsn);
    match next {
        Some(since) => shared.note_nearer(volume, since),
        None => shared.note_back(volume),
    }
    step(shared, "late-dropped")?;
    shared.log.remove_spill_files(obsolete).await;
    Ok(next.is_none())
}

fn is_damage(error: &Error) -> bool {
    is_of_stored_data(error) || is_unreadable(error)
}

/// Tells whether data in the store is damaged, missing or unreadable, while the rest is available.
fn is_of_stored_data(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound | ErrorKind::Unreadable)
}

/// Takes a volume back to its data in the store: the metadata no longer names its spill files.
async fn give_up(shared: &Shared, volume: VolumeId) -> Result<()> {
    let part = shared.log.all_spilled(volume).await?;
    let window = Window {
        last_lsn: shared.tier.destaged_lsn(),
        volume_records: Vec::new(),
        volumes: Vec::new(),
        stalled_volumes: vec![(volume, Vec::new())],
        late: Some(shared.tier.destaged_lsn()),
        snapshots: Vec::new(),
    };
    shared.tier.destage(window, &FromLog { log: shared.log.clone() }).await?;
    let obsolete = shared.log.drop_spilled(&part);
    shared.note_back(volume);
    shared.log.remove_spill_files(obsolete).await;
    Ok(())
}

/// Reads everything that a catch-up window needs, so that nothing is uploaded in vain for a volume that
/// failed before. Ends early if the other volumes need the log's space.
async fn check(shared: &Shared, volume: VolumeId, pieces: &[Piece], gives_way: bool) -> Result<()> {
    let lost = pieces.iter().find_map(|piece| match piece.source {
        Source::Lost { lsn } => Some((piece.start_sector, piece.sector_count, lsn)),
        _ => None,
    });
    if let Some((start_sector, sector_count, lsn)) = lost {
        return Err(state::lost(volume, start_sector, sector_count, lsn));
    }
    let has_payload = |piece: &Piece| !matches!(piece.source, Source::Zeroes { .. });
    let extents: Vec<(u64, u64, bool)> = pieces
        .iter()
        .map(|piece| (piece.start_sector, piece.sector_count, has_payload(piece)))
        .collect();
    let read_all = async {
        let payloads = pieces.iter().filter_map(|piece| match &piece.source {
            Source::SpillResident(resident) => Some(Ok(resident)),
            _ => None,
        });
        futures::stream::iter(payloads)
            .try_for_each_concurrent(CATCH_UP_READS, async |resident| {
                shared.log.read_spilled(resident).await.map(drop)
            })
            .await?;
        shared.tier.check_extents(volume, &extents).await
    };
    tokio::select! {
        checked = read_all => checked,
        () = pressed(shared), if gives_way => {
            let what = "other volumes' data goes first; it is tried again";
            Err(Error::new(ErrorKind::Unavailable, what))
        }
    }
}

/// Resolves when a caller waits for the store, or when a generation waits and the log is filling
/// up.
async fn pressed(shared: &Shared) {
    let mut changes = shared.log.changes();
    loop {
        changes.mark_unchanged();
        let log = shared.log.status();
        let is_filling = log.used_bytes.saturating_mul(100)
            >= log.ring_bytes.saturating_mul(CATCH_UP_YIELD_PERCENT);
        if shared.is_wanted() || (is_filling && log.frozen_count > 0) {
            return;
        }
        let _ = tokio::time::timeout(CATCH_UP_LOOK, changes.changed()).await;
    }
}

/// A point between two steps at which tests end the process or the pool.
fn step(shared: &Shared, name: &'static str) -> Result<()> {
    #[cfg(feature = "failpoints")]
    tiering::failpoint::pass(name);
    shared.pass(name)
}

fn spill_file_refs(files: &[SpillFileId]) -> Vec<NamedSpillFile> {
    let file = |file: &SpillFileId| NamedSpillFile {
        first_lsn: file.first_lsn,
        last_lsn: file.last_lsn,
        id: file.id,
    };
    files.iter().map(file).collect()
}

/// Tells whether no data of the window has to be read from the log files, so that its place there
/// may be lost.
fn is_in_memory(window: &Window<Source>) -> bool {
    let mut extents = window.volumes.iter().flat_map(|(_, extents)| extents);
    !extents.any(|extent| matches!(extent.content, ExtentContent::Data(Source::LogResident(_))))
}

/// Returns the generation in the types of the data tier.
fn window_of(attempt: &Attempt) -> Result<Window<Source>> {
    let generation = &attempt.generation;
    let volumes = generation.volumes().filter(|(volume, _)| !attempt.spills.contains_key(volume));
    let stalled_volumes =
        attempt.spills.iter().map(|(volume, spill)| (*volume, spill_file_refs(&spill.files())));
    let snapshots =
        generation.snapshots().map(|bytes| SnapshotEntry::decode(&bytes)).transpose()?;
    Ok(Window {
        last_lsn: generation.last_lsn(),
        volume_records: generation.volume_records().collect(),
        volumes: volumes.map(|(volume, pieces)| (volume, extents_of(pieces))).collect(),
        stalled_volumes: stalled_volumes.collect(),
        late: None,
        snapshots: snapshots.map_or_else(Vec::new, |entry| entry.changes()),
    })
}

fn extents_of(pieces: Vec<Piece>) -> Vec<WindowExtent<Source>> {
    let extents = pieces.into_iter().map(|piece| WindowExtent {
        start_sector: piece.start_sector,
        sector_count: piece.sector_count,
        content: match piece.source {
            Source::Zeroes { .. } => ExtentContent::Zero,
            source => ExtentContent::Data(source),
        },
    });
    extents.collect()
}

/// Reads payloads of a window from memory, from the log files or from spill files.
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
            Source::SpillResident(resident) => self.log.read_spilled(resident).await,
            Source::Zeroes { .. } | Source::Lost { .. } | Source::Beneath => {
                unreachable!("what is destaged has a payload")
            }
        }
    }
}
