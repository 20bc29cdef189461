//! Scrub: a job that verifies every segment of the pool's store, and repairs damage from copies where
//! it can.
//!
//! Invariants:
//! - Its progress and findings are a chain of documents in the pool's store. After a stop, a kill
//!   or a change of owner it continues behind the last document, which repeats at most a minute's
//!   work.
//! - It runs in the background runtime and keeps to its pace. A passing cause, like a store that is away,
//!   makes it wait; only the user ends it early.

#[cfg(test)]
mod tests;

use crate::clock::AGREES_WITHIN;
use crate::conditions::POOL;
use crate::pool::Pool;
use block::conditions::Report;
use block::env::{Clock, random_bytes};
use block::hex::to_hex;
use block::seal::PoolKey;
use block::{ConditionKind, Conditions, Error, ErrorKind, Result};
use control::chain::{Chain, Created, Format, corrupt, seal_document};
use control::store::Store;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiering::Tier;
use tiering::{Finding, Scrubbed};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use uuid::Uuid;

/// Folder of the chain in the pool's prefix, and the purpose of its seal.
pub const FOLDER: &str = "scrub";
/// Documents kept for people to read.
const KEEP_COUNT: usize = 3;
/// Default pace. Chosen by hand: a TiB in nine hours.
pub const BYTES_PER_SECOND: u64 = 32 << 20;
/// Interval at which the document is written while a scrub runs.
const SAVE: Duration = Duration::from_secs(60);
/// Bad segments that the condition names. Chosen by hand: a few lines.
const SHOWN_MAX: usize = 4;
/// Bad segments that are named; the others are only counted.
const NAMED_MAX: usize = 100;
/// Most bytes of the description of one segment. Chosen by hand: all of them fit a document twice.
const WHY_BYTES_MAX: usize = 300;
/// Pause after a failure; it doubles up to the maximum.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Longest sleep until the next run, as the clock may be set meanwhile.
const LOOK: Duration = Duration::from_secs(600);
/// Longest time that an orderly stop waits for the job. Chosen by hand: the job ends between two
/// requests.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// A segment that could not be repaired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BadSegment {
    /// Number.
    pub number: u64,
    /// Path of its object below the pool's prefix.
    pub object: String,
    /// The damage to the segment and to its versions in copies.
    pub why: String,
}

/// A scrub: the newest one, or the running one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScrubRecord {
    pub(crate) format: Format,
    pub(crate) pool: Uuid,
    /// Number of the document.
    pub(crate) number: u64,
    /// Seconds since 1970.
    pub started_at: u64,
    /// Time at which it had verified everything, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<u64>,
    /// It was stopped before its end. The next start continues it.
    pub is_stopped: bool,
    /// Segments up to this number are verified.
    pub position: u64,
    /// First number that it does not verify.
    pub until: u64,
    /// Pace.
    pub bytes_per_second: u64,
    /// Seconds from the start of one scrub to the start of the next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_seconds: Option<u64>,
    /// Segments verified.
    pub segment_count: u64,
    /// Frames in the segments that are whole.
    pub frame_count: u64,
    /// Bytes of the objects of those segments.
    pub object_bytes: u64,
    /// Segments that were put back from copies.
    pub repaired_count: u64,
    /// Segments that are damaged or missing.
    pub bad_count: u64,
    /// The first bad segments. Those of the run before stay until they are verified again.
    pub bad: Vec<BadSegment>,
    /// Random: tells our own create from another's after an ambiguous answer.
    pub(crate) nonce: String,
}

impl ScrubRecord {
    fn new(pool: Uuid) -> ScrubRecord {
        ScrubRecord {
            format: Format::CURRENT,
            pool,
            number: 0,
            started_at: 0,
            ended_at: None,
            is_stopped: true,
            position: 0,
            until: 0,
            bytes_per_second: BYTES_PER_SECOND,
            every_seconds: None,
            segment_count: 0,
            frame_count: 0,
            object_bytes: 0,
            repaired_count: 0,
            bad_count: 0,
            bad: Vec::new(),
            nonce: String::new(),
        }
    }

    /// Tells whether a scrub is under way, as far as this record shows.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.ended_at.is_none() && !self.is_stopped
    }

    /// Start of the next scrub, in seconds since 1970.
    #[must_use]
    pub fn next_at(&self) -> Option<u64> {
        let every = self.every_seconds.filter(|_| !self.is_running() && !self.is_stopped)?;
        Some(self.started_at.saturating_add(every))
    }

    /// Starts again from the first segment, up to the newest one at this moment. Bad segments of
    /// the run before stay until they are verified again.
    fn begin(&mut self, now: u64, until: u64) {
        let (bad, every_seconds) = (std::mem::take(&mut self.bad), self.every_seconds);
        *self = ScrubRecord {
            number: self.number,
            started_at: now,
            is_stopped: false,
            until,
            bytes_per_second: self.bytes_per_second,
            every_seconds,
            bad,
            ..ScrubRecord::new(self.pool)
        };
    }

    fn note(&mut self, looked: &Scrubbed) {
        let number = looked.info.number.0;
        let before = self.position;
        self.bad.retain(|bad| bad.number <= before || bad.number > number);
        self.position = number;
        if looked.finding == Finding::Gone {
            return;
        }
        self.segment_count += 1;
        self.object_bytes += u64::from(looked.info.object_bytes);
        match &looked.finding {
            Finding::Whole { frame_count } => self.frame_count += frame_count,
            Finding::Repaired { .. } => {
                self.repaired_count += 1;
                self.frame_count += u64::from(looked.info.frame_count);
            }
            Finding::Gone => {}
            Finding::Bad { why } => {
                self.bad_count += 1;
                if self.bad.len() < NAMED_MAX {
                    let mut why = why.clone();
                    why.truncate(why.floor_char_boundary(WHY_BYTES_MAX));
                    let object = looked.info.object_path().to_string();
                    self.bad.push(BadSegment { number, object, why });
                    self.bad.sort_by_key(|bad| bad.number);
                }
            }
        }
    }

    fn end(&mut self, now: u64) {
        // Segments behind the last position have no record any longer.
        let last = self.position;
        self.bad.retain(|bad| bad.number <= last);
        self.position = self.until.saturating_sub(1);
        self.ended_at = Some(now);
    }
}

/// The state of the pool's scrub.
#[derive(Clone, Debug)]
pub struct ScrubStatus {
    /// The newest scrub; `None` before the first.
    pub record: Option<ScrubRecord>,
    /// A daemon serves the pool, so the scrub continues.
    pub is_serving: bool,
    /// The reason why it waits, and for how long it has.
    pub failure: Option<(String, Duration)>,
}

#[derive(Default)]
struct State {
    record: Option<ScrubRecord>,
    /// Counts the user's requests: a step that began before the latest one has no effect.
    turn: u64,
    failure: Option<(String, Instant)>,
}

struct Inner {
    pool: Arc<Pool>,
    store: Store,
    key: PoolKey,
    id: Uuid,
    /// The pool no longer needs the copy that it was restored from.
    is_complete: watch::Receiver<bool>,
    state: Mutex<State>,
    /// Serialises the writing of documents.
    saving: tokio::sync::Mutex<()>,
    wake: Notify,
}

/// The scrub of one pool; see the module.
pub struct Scrub {
    inner: Arc<Inner>,
    job: Mutex<Option<(watch::Sender<bool>, JoinHandle<()>)>>,
    is_serving: bool,
    /// The newest document could not be read when the daemon started.
    failure: Option<Error>,
}

/// Reads the newest record of a pool's scrub, if there is one.
///
/// # Errors
/// Those of reading the store; `Corrupt` if it does not verify.
pub async fn read(store: &Store, key: &PoolKey, pool: Uuid) -> Result<Option<ScrubRecord>> {
    let chain = Chain::new(store, FOLDER);
    let newest = chain.newest_body::<ScrubRecord>(key).await?;
    let Some((number, record)) = newest else { return Ok(None) };
    if record.pool != pool || record.number != number {
        return Err(corrupt(&chain.name(number), "it belongs elsewhere"));
    }
    Ok(Some(record))
}

/// Raises the condition that the record of the newest scrub cannot be read.
pub(crate) fn show_unreadable(conditions: &Conditions, error: &Error) {
    let report = Report::new(
        format!("could not read the progress of the scrub: {}", error.chain()),
        "segments are not verified until the next start",
        "bring the named object below scrub/ back from a version of the bucket, or delete it, \
         which makes the next scrub begin again; then restart spindle",
    );
    conditions.raise(ConditionKind::ScrubFailing, POOL, report);
}

/// Sets or clears the condition that follows from the record: bad segments stay in it until they
/// are verified again.
pub fn show_bad(conditions: &Conditions, record: Option<&ScrubRecord>) {
    let count = record.map_or(0, |record| record.bad_count.max(record.bad.len() as u64));
    let named: Vec<&str> = record
        .into_iter()
        .flat_map(|record| &record.bad)
        .map(|bad| bad.object.as_str())
        .take(SHOWN_MAX)
        .collect();
    let report = (count > 0).then(|| {
        Report::new(
            format!(
                "the scrub has found {count} segments that are damaged or missing, and that no copy has whole: {}",
                named.join(", ")
            ),
            "reads of their data fail",
            "`spindle scrub status` names them; put the objects back from a version of the bucket or from another \
             copy, then run `spindle scrub start`",
        )
    });
    conditions.set(ConditionKind::SegmentsDamaged, POOL, report);
}

fn note_bad(tier: &Tier, record: Option<&ScrubRecord>) {
    let bad = record.into_iter().flat_map(|record| &record.bad);
    tier.note_bad_segments(bad.map(|bad| bad.number));
}

/// Keeps new data from depending on segments that the newest scrub has found bad. Call this before
/// anything is destaged.
pub(crate) async fn keep_from_bad(tier: &Tier, store: &Store, key: &PoolKey, pool: Uuid) {
    if !tier.has_dedup() {
        return;
    }
    match read(store, key, pool).await {
        Ok(record) => note_bad(tier, record.as_ref()),
        // The start of the scrub reports the error.
        Err(error) => {
            tracing::info!(
                error = %error.chain(),
                "could not read the findings of the scrub; deduplication refers to no data from \
                 before this start"
            );
            tier.set_dedup_floor(tier.next_segment());
        }
    }
}

impl Scrub {
    /// Returns a scrub that takes requests but verifies nothing.
    pub(crate) fn offline(
        pool: Arc<Pool>,
        store: Store,
        key: PoolKey,
        id: Uuid,
        is_complete: watch::Receiver<bool>,
    ) -> Scrub {
        let (state, saving, wake) =
            (Mutex::default(), tokio::sync::Mutex::default(), Notify::new());
        let inner = Inner { pool, store, key, id, is_complete, state, saving, wake };
        Scrub { inner: Arc::new(inner), job: Mutex::default(), is_serving: false, failure: None }
    }

    /// Starts the job, which continues where the newest document says. Volumes are served even if
    /// that cannot be read.
    pub async fn start(mut self) -> Scrub {
        self.is_serving = true;
        match self.inner.read().await {
            Ok(record) => {
                // The document may have been unreadable when the pool was opened.
                note_bad(self.inner.pool.tier(), record.as_ref());
                self.inner.show_bad(record.as_ref());
                self.inner.state.lock().record = record;
            }
            Err(error) => {
                self.inner.show_unreadable(&error);
                self.failure = Some(error);
                return self;
            }
        }
        let stop = watch::Sender::new(false);
        let (inner, mut stopped) = (self.inner.clone(), stop.subscribe());
        let job =
            block::Job::new("scrub", "segments are not verified, and damage is not found early");
        let (jobs, lane) = (self.inner.pool.supervisor(), self.inner.pool.tier().background());
        let task = jobs.spawn_on(lane, crate::jobs::Need::Useful, job, async move {
            tokio::select! {
                never = inner.run() => match never {},
                _ = stopped.wait_for(|stop| *stop) => {}
            }
            inner.save_last().await;
        });
        *self.job.lock() = Some((stop, task));
        self
    }

    /// Ends the job and saves its progress. If the pool `is_lost` to another owner, nothing is
    /// saved: the record belongs to that owner.
    pub async fn stop(&self, is_lost: bool) {
        let Some((stop, mut task)) = self.job.lock().take() else { return };
        if is_lost {
            return task.abort();
        }
        stop.send_replace(true);
        if tokio::time::timeout(STOP_GRACE, &mut task).await.is_err() {
            task.abort();
        }
    }

    /// Begins a scrub, continues one that was stopped, or changes the pace of the running one.
    ///
    /// # Errors
    /// `Busy` while the pool is fetched from a copy, which verifies it; those of the store.
    pub async fn begin(&self, bytes_per_second: Option<u64>, every: Option<u64>) -> Result<()> {
        self.check()?;
        if every == Some(0) || bytes_per_second == Some(0) {
            let what = "start a scrub: its pace and the time between two are not 0";
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        if !*self.inner.is_complete.borrow() {
            let what = "start a scrub: the pool is still being fetched from the copy that it was restored from, and is \
                        verified on its way; `spindle status` says how far it is";
            return Err(Error::new(ErrorKind::Busy, what));
        }
        self.load().await?;
        let (now, until) =
            (self.inner.clock().unix_seconds(), self.inner.pool.tier().next_segment());
        self.inner
            .change(|record| {
                match record.ended_at {
                    None if record.number > 0 => record.is_stopped = false,
                    _ => record.begin(now, until),
                }
                record.bytes_per_second = bytes_per_second.unwrap_or(BYTES_PER_SECOND);
                record.every_seconds = every;
            })
            .await
    }

    /// Stops the running scrub for now, and cancels those that would follow.
    ///
    /// # Errors
    /// `NotFound` if there is nothing to stop; those of the store.
    pub async fn end(&self) -> Result<()> {
        self.check()?;
        self.load().await?;
        let is_there = self
            .inner
            .record()
            .is_some_and(|record| record.is_running() || record.next_at().is_some());
        if !is_there {
            let what = "stop the scrub: none runs, and none is to begin";
            return Err(Error::new(ErrorKind::NotFound, what));
        }
        let change = |record: &mut ScrubRecord| {
            record.is_stopped = record.ended_at.is_none();
            record.every_seconds = None;
        };
        self.inner.change(change).await
    }

    /// Returns the state of the scrub.
    ///
    /// # Errors
    /// Those of reading the newest document if no daemon runs.
    pub async fn status(&self) -> Result<ScrubStatus> {
        self.check()?;
        self.load().await?;
        let state = self.inner.state.lock();
        let clock = self.inner.clock();
        let failure = state.failure.as_ref().map(|(why, since)| (why.clone(), clock.since(*since)));
        let record = state.record.clone();
        Ok(ScrubStatus { record, is_serving: self.is_serving, failure })
    }

    fn check(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    async fn load(&self) -> Result<()> {
        if !self.is_serving {
            let record = self.inner.read().await;
            let record = record.inspect_err(|error| self.inner.show_unreadable(error))?;
            self.inner.show_bad(record.as_ref());
            self.inner.state.lock().record = record;
        }
        Ok(())
    }
}

impl Inner {
    fn record(&self) -> Option<ScrubRecord> {
        self.state.lock().record.clone()
    }

    async fn read(&self) -> Result<Option<ScrubRecord>> {
        read(&self.store, &self.key, self.id).await
    }

    /// Makes a change that the user asks for, and wakes the job.
    async fn change(&self, change: impl Fn(&mut ScrubRecord)) -> Result<()> {
        self.save(|record, state| {
            change(record);
            if let Some(state) = state {
                state.turn += 1;
            }
        })
        .await?;
        self.wake.notify_one();
        Ok(())
    }

    /// Writes the current record with a change. Once it is durable, the change is also made to the
    /// record in memory, which may have moved on.
    async fn save(&self, change: impl Fn(&mut ScrubRecord, Option<&mut State>)) -> Result<()> {
        let _alone = self.saving.lock().await;
        let mut record = self.record().unwrap_or_else(|| ScrubRecord::new(self.id));
        change(&mut record, None);
        record.nonce = to_hex(&random_bytes::<16>());
        let chain = Chain::new(&self.store, FOLDER);
        // A previous owner may have written one more when it stopped.
        let newest = chain.newest_number().await?.unwrap_or(0);
        record.number = record.number.max(newest) + 1;
        let number = record.number;
        if chain.create(number, &seal_document(&self.key, FOLDER, &record)?).await? == Created::Lost
        {
            let what =
                "write how far the scrub is: another process did so at the same moment; try again";
            return Err(Error::new(ErrorKind::Busy, what));
        }
        {
            let mut state = self.state.lock();
            let mut now = state.record.take().unwrap_or_else(|| ScrubRecord::new(self.id));
            change(&mut now, Some(&mut state));
            now.number = number;
            self.show_bad(Some(&now));
            state.record = Some(now);
        }
        if let Err(error) = chain.prune(KEEP_COUNT).await {
            tracing::debug!(error = %error.chain(), "could not delete old records of scrubs");
        }
        Ok(())
    }

    /// Saves the progress at an orderly stop.
    async fn save_last(&self) {
        if self.record().is_some_and(|record| record.is_running())
            && let Err(error) = self.save(|_, _| {}).await
        {
            tracing::debug!(
                error = %error.chain(),
                "could not save the progress of the scrub; the next start repeats up to a minute \
                 of it"
            );
        }
    }

    fn clock(&self) -> &dyn Clock {
        &**self.pool.tier().clock()
    }

    async fn run(&self) -> std::convert::Infallible {
        let mut pause = PAUSE;
        let mut saved_at = self.clock().now();
        loop {
            let wait = match self.step(&mut saved_at).await {
                Ok(wait) => {
                    pause = PAUSE;
                    self.show_failure(None);
                    wait
                }
                Err(error) => {
                    self.show_failure(Some(&error));
                    let wait = pause;
                    pause = (pause * 2).min(PAUSE_MAX);
                    wait
                }
            };
            let _ = tokio::time::timeout(wait, self.wake.notified()).await;
        }
    }

    /// Shows the reason why the scrub waits, or clears it.
    fn show_failure(&self, error: Option<&Error>) {
        let mut state = self.state.lock();
        state.failure = error.map(|error| {
            let since =
                state.failure.as_ref().map_or_else(|| self.clock().now(), |(_, since)| *since);
            (error.chain(), since)
        });
        let report = state.failure.as_ref().map(|(why, _)| {
            Report::new(
                format!("the scrub waits: {why}"),
                "segments are not verified meanwhile",
                "remove the cause, usually a store that does not answer; the scrub then continues \
                 automatically",
            )
        });
        self.pool.tier().conditions().set(ConditionKind::ScrubFailing, POOL, report);
    }

    fn show_unreadable(&self, error: &Error) {
        show_unreadable(self.pool.tier().conditions(), error);
    }

    fn show_bad(&self, record: Option<&ScrubRecord>) {
        show_bad(self.pool.tier().conditions(), record);
    }

    /// Verifies at most one segment. Returns how long there is nothing to do.
    async fn step(&self, saved_at: &mut Instant) -> Result<Duration> {
        let (record, turn) = {
            let state = self.state.lock();
            (state.record.clone(), state.turn)
        };
        let Some(record) = record else { return Ok(LOOK) };
        let tier = self.pool.tier();
        if !record.is_running() {
            let Some(at) = record.next_at() else { return Ok(LOOK) };
            let now = self.clock().unix_seconds();
            // After a clock was put back, the last start lies in the future, and its successor is
            // not waited for.
            let is_ahead = record.started_at > now.saturating_add(AGREES_WITHIN);
            let at = if is_ahead { now } else { at };
            let left = Duration::from_secs(at.saturating_sub(now));
            if left.is_zero() {
                let (now, until) = (self.clock().unix_seconds(), tier.next_segment());
                self.save(|record, _| {
                    // The user may have stopped it just now.
                    if record.next_at().is_some() {
                        record.begin(now, until);
                    }
                })
                .await?;
                *saved_at = self.clock().now();
            }
            return Ok(left.min(LOOK));
        }
        // A restored pool is verified while it is fetched.
        let mut is_complete = self.is_complete.clone();
        let _ = is_complete.wait_for(|is_complete| *is_complete).await;
        let begun_at = self.clock().now();
        let looked = tier.scrub_next(record.position).await?;
        let looked = looked.filter(|looked| looked.info.number.0 < record.until);
        let Some(looked) = looked else {
            let now = self.clock().unix_seconds();
            self.save(|record, _| {
                if record.is_running() {
                    record.end(now);
                }
            })
            .await?;
            tracing::info!(
                segments = record.segment_count,
                repaired = record.repaired_count,
                bad = record.bad_count,
                "a scrub has verified every segment"
            );
            return Ok(Duration::ZERO);
        };
        if let Finding::Bad { why } = &looked.finding {
            tracing::info!(
                object = %looked.info.object_path(), why,
                "the scrub found a bad segment"
            );
        }
        {
            let mut state = self.state.lock();
            if state.turn == turn
                && let Some(record) = &mut state.record
            {
                record.note(&looked);
            }
            self.show_bad(state.record.as_ref());
        }
        if self.clock().since(*saved_at) >= SAVE {
            self.save(|_, _| {}).await?;
            *saved_at = self.clock().now();
        }
        let due =
            u64::from(looked.info.object_bytes) as f64 / record.bytes_per_second.max(1) as f64;
        Ok(Duration::from_secs_f64(due).saturating_sub(self.clock().since(begun_at)))
    }
}
