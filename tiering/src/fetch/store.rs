//! Ranged reads of segment objects. Reads are bounded and retried, and failures are classified:
//! transient or final, and caused by the store or by one object.
//!
//! Invariants:
//! - At most `read_count_max` requests are under way, plus [`SUSPECT_READS_MAX`] for objects that
//!   failed before, so that an object that hangs does not block reads of others. A read that waits
//!   for its next attempt holds no place.
//! - Every read ends: with the bytes, with a final error, or after it has failed for too long.
//! - Exactly the requested number of bytes is returned; a body that ends early counts as a failed
//!   transfer. The caller verifies the contents.
//! - A missing or unreadable object is a final error only with evidence: see [`super::suspects`]. A
//!   missing bucket is an outage.

use super::FramesOptions;
use super::peers::{Peer, Peers};
use super::suspects::{Cause, Patience, Round, Suspects, Verdict};
use crate::outage::{Outage, StoreFailure, Way, public_text};
use crate::seeded_bugs::SeededBugs;
use crate::segment::{SegmentInfo, StoredSegment};
use crate::segment_store::SegmentStore;
use block::conditions::Report;
use block::env::{Clock, random_bytes};
use block::{ConditionKind, Conditions, Error, ErrorKind, Result};
use bytes::Bytes;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// Pause before the second attempt; it doubles from then on. Chosen by hand.
const BACKOFF_FIRST: Duration = Duration::from_millis(50);
/// Longest pause between two attempts: bounds the delay until the end of an outage is noticed.
/// Chosen by hand.
const BACKOFF_MAX: Duration = Duration::from_secs(3);
/// Maximum number of concurrent requests for objects whose last read failed, in addition to those
/// for other objects. Chosen by hand.
const SUSPECT_READS_MAX: usize = 16;
/// Maximum number of concurrent probes, and the timeout of each. A probe reads another object to
/// tell a failure of the store from one of a single object. Chosen by hand: much longer than a
/// store takes for one byte.
const PROBES_MAX: usize = 4;
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout of an attempt to read an object that was judged; each MiB adds one second. Chosen by
/// hand.
const JUDGED_TIMEOUT: Duration = Duration::from_secs(5);
/// Other objects that a probe asks, until one is read. Chosen by hand: where every second object
/// is bad, one of four can be read in 15 of 16 probes.
const WITNESS_COUNT: usize = 4;
/// Pause before a judged object is tried again in the background, and the number that is tried in
/// one go. Chosen by hand.
const AGAIN_PAUSE: Duration = Duration::from_secs(if cfg!(test) { 0 } else { 15 });
const AGAIN_MAX: usize = 4;

/// Words in the errors of stores that mean that a whole bucket is missing, or that there are too
/// many requests.
const OF_THE_STORE: [&str; 7] = [
    "NoSuchBucket",
    "ContainerNotFound",
    "ContainerBeingDeleted",
    "SlowDown",
    "TooManyRequests",
    "429 Too Many Requests",
    "ServerBusy",
];

/// Names of the store in errors of the copy behind a restored pool: for one object while the copy
/// itself is reachable, and for the copy as a whole.
pub(crate) const OF_COPY_OBJECT: &str = "object of the copy";
pub(crate) const OF_COPY: &str = "copy";

/// Reader of segment objects; see the module.
#[derive(Debug)]
pub struct StoreReader {
    segments: Arc<dyn SegmentStore>,
    places: Semaphore,
    suspect_places: Semaphore,
    probe_places: Semaphore,
    attempt_timeout: Duration,
    retry_duration_max: Duration,
    /// Reads fail at once, rather than wait, while the store answers nothing at all.
    is_impatient: bool,
    outage: Outage,
    /// The segment whose read was the last to fail in the outage.
    waited_for: Mutex<Option<StoredSegment>>,
    suspects: Mutex<Suspects>,
    /// Source of knowledge about other objects. Without it, an object that is not found counts as
    /// missing, and no object is judged.
    peers: OnceLock<(Arc<dyn Peers>, SeededBugs)>,
    conditions: Conditions,
    clock: Arc<dyn Clock>,
    /// Requests sent, whatever their outcome.
    pub request_count: AtomicU64,
    /// Requests that failed for a transient reason.
    pub retry_count: AtomicU64,
    /// Bytes received.
    pub read_bytes: AtomicU64,
}

/// Outcome of asking for the size of an object.
enum Head {
    There,
    NotThere,
    Unknown,
}

impl StoreReader {
    /// Creates a reader of these segments.
    #[must_use]
    pub fn new(segments: Arc<dyn SegmentStore>, options: &FramesOptions) -> Self {
        let patience =
            Patience { missing: options.missing_patience, unreadable: options.unreadable_patience };
        StoreReader {
            segments,
            places: Semaphore::new(options.store_read_count_max.max(1)),
            suspect_places: Semaphore::new(SUSPECT_READS_MAX),
            probe_places: Semaphore::new(PROBES_MAX),
            attempt_timeout: options.attempt_timeout,
            retry_duration_max: options.retry_duration_max,
            is_impatient: false,
            outage: Outage::new(Way::Read, options.conditions.clone(), options.clock.clone()),
            waited_for: Mutex::default(),
            suspects: Mutex::new(Suspects::new(patience)),
            peers: OnceLock::new(),
            conditions: options.conditions.clone(),
            clock: options.clock.clone(),
            request_count: AtomicU64::new(0),
            retry_count: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
        }
    }

    /// Makes reads fail as soon as it is known that the store answers nothing else either, instead
    /// of waiting for it. For callers that retry themselves.
    #[must_use]
    pub(crate) fn impatient(self) -> Self {
        StoreReader { is_impatient: true, ..self }
    }

    /// Sets the source of knowledge about other objects. Only the first call has an effect.
    pub(crate) fn set_peers(&self, peers: Arc<dyn Peers>, seeded_bugs: SeededBugs) {
        let _ = self.peers.set((peers, seeded_bugs));
    }

    fn seeded_bugs(&self) -> SeededBugs {
        self.peers.get().map(|(_, seeded_bugs)| *seeded_bugs).unwrap_or_default()
    }

    /// Reads the bytes `range` of a segment's object.
    ///
    /// # Errors
    /// `NotFound` when there is no such object: at once if it is no longer referenced, otherwise
    /// once this is confirmed. `Unreadable` when the object repeatedly cannot be read while others
    /// can. `Corrupt` when its length differs from `info`; `Unavailable` when the store kept
    /// failing.
    pub async fn get(&self, segment: &StoredSegment, range: Range<u64>) -> Result<Bytes> {
        self.get_with(segment, range, false).await
    }

    /// Like [`StoreReader::get`], for a range whose bytes did not verify: the store reads it from elsewhere if it
    /// can.
    ///
    /// # Errors
    /// Those of [`StoreReader::get`].
    pub async fn get_again(&self, segment: &StoredSegment, range: Range<u64>) -> Result<Bytes> {
        self.get_with(segment, range, true).await
    }

    async fn get_with(
        &self,
        segment: &StoredSegment,
        range: Range<u64>,
        is_again: bool,
    ) -> Result<Bytes> {
        let info = &segment.info;
        let started = self.clock.now();
        let mut backoff = BACKOFF_FIRST;
        // Spares the store a request from each of many readers of one bad object.
        let (verdict, _) = self.suspects.lock().verdict(&info.id, started);
        if verdict != Verdict::Undecided {
            return Err(verdict_error(info, verdict, None));
        }
        loop {
            let begun = self.clock.now();
            let source = match self.attempt(segment, range.clone(), is_again).await {
                Ok(bytes) => return Ok(self.accept(info, bytes)),
                Err(error) if is_unsupported(&error) => {
                    let what = format!("read {info}");
                    return Err(Error::with_source(ErrorKind::Unsupported, what, error));
                }
                Err(error) => error,
            };
            self.retry_count.fetch_add(1, Ordering::Relaxed);
            match self.judge(segment, &source, begun, backoff == BACKOFF_FIRST).await? {
                Verdict::Undecided => {}
                verdict => return Err(verdict_error(info, verdict, Some(source))),
            }
            if self.clock.since(started) + backoff > self.retry_duration_max {
                let what = format!("read {info}: the object store does not answer");
                return Err(Error::with_source(ErrorKind::Unavailable, what, source));
            }
            tokio::time::sleep(jittered(backoff)).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }

    /// Returns the cause of the last transient failure, until a read succeeds.
    #[must_use]
    pub fn failure(&self) -> Option<StoreFailure> {
        self.outage.status()
    }

    /// Returns whether an object was judged missing or unreadable while others can be read.
    #[must_use]
    pub fn is_judged(&self, info: &SegmentInfo) -> bool {
        self.suspects.lock().judged(&info.id) != Verdict::Undecided
    }

    /// Returns whether the last read of an object failed.
    #[must_use]
    pub fn is_suspect(&self, info: &SegmentInfo) -> bool {
        self.suspects.lock().has(&info.id)
    }

    /// Makes the next read of an object ask the store, because the object was written again.
    pub(crate) fn set_stale(&self, info: &SegmentInfo) {
        self.suspects.lock().set_stale(&info.id);
    }

    /// Makes the next read of each object ask the store, whatever its verdict.
    pub(crate) fn set_all_stale(&self) {
        self.suspects.lock().set_all_stale();
    }

    /// Retries some of the judged objects, and ends the conditions of those that can be read or are
    /// no longer referenced. Returns the objects whose conditions have ended.
    pub(crate) async fn try_again(&self) -> Vec<SegmentInfo> {
        let due = self.suspects.lock().take_due(self.clock.now(), AGAIN_PAUSE, AGAIN_MAX);
        self.look_for_the_end().await;
        let mut ended = Vec::new();
        for segment in due {
            let info = segment.info;
            let is_named = match self.peers.get() {
                Some((peers, _)) => self.is_named(&info, &**peers).await,
                None => true,
            };
            if !is_named {
                self.clear(&info);
                ended.push(info);
            } else if let Ok(bytes) = self.attempt(&segment, 0..1, false).await {
                self.accept(&info, bytes);
                ended.push(info);
            }
        }
        ended
    }

    fn note_outage(&self, segment: &StoredSegment, error: &object_store::Error) {
        *self.waited_for.lock() = Some(segment.clone());
        self.outage.note(error);
    }

    /// Reads one byte if an outage lasts and no reader has tried for a while, because the readers
    /// may have given up.
    async fn look_for_the_end(&self) {
        let is_due = self.outage.status().is_some_and(|failure| failure.age >= AGAIN_PAUSE);
        let segment = self.waited_for.lock().clone().filter(|_| is_due);
        let Some(segment) = segment else { return };
        let begun = self.clock.now();
        let error = match self.attempt(&segment, 0..1, false).await {
            Ok(bytes) => return drop(self.accept(&segment.info, bytes)),
            Err(error) => error,
        };
        // The object may fail alone, or be unreferenced by now. Other objects decide.
        if let Ok(Verdict::Missing) = self.judge(&segment, &error, begun, false).await {
            self.outage.clear();
        }
    }

    async fn attempt(
        &self,
        segment: &StoredSegment,
        range: Range<u64>,
        is_again: bool,
    ) -> Result<Bytes, object_store::Error> {
        let info = &segment.info;
        let (is_suspect, is_judged) = (self.is_suspect(info), self.is_judged(info));
        let places = if is_suspect { &self.suspect_places } else { &self.places };
        let _place = places.acquire().await.expect("never closed");
        self.request_count.fetch_add(1, Ordering::Relaxed);
        let timeout = match is_judged {
            true => self.attempt_timeout.min(JUDGED_TIMEOUT),
            false => self.attempt_timeout,
        };
        let timeout = timeout + Duration::from_secs((range.end - range.start) >> 20);
        let wanted_bytes = range.end - range.start;
        let read = match is_again {
            true => self.segments.read_again(segment, range),
            false => self.segments.read(segment, range),
        };
        let bytes = tokio::time::timeout(timeout, read).await.unwrap_or_else(|elapsed| {
            Err(object_store::Error::Generic { store: "timeout", source: Box::new(elapsed) })
        })?;
        if bytes.len() as u64 != wanted_bytes {
            let source = format!("{} bytes arrived instead of {wanted_bytes}", bytes.len()).into();
            return Err(object_store::Error::Generic { store: "short body", source });
        }
        Ok(bytes)
    }

    fn accept(&self, info: &SegmentInfo, bytes: Bytes) -> Bytes {
        self.clear(info);
        self.outage.clear();
        self.read_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        bytes
    }

    /// Forgets the failures of an object that was read, or that is no longer wanted.
    pub(crate) fn clear(&self, info: &SegmentInfo) {
        let verdict = {
            let mut suspects = self.suspects.lock();
            match suspects.is_empty() {
                true => Verdict::Undecided,
                false => suspects.clear(&info.id),
            }
        };
        if verdict != Verdict::Undecided {
            let subject = info.object_path();
            self.conditions.clear(ConditionKind::ObjectUnreadable, subject.as_ref());
            self.conditions.clear(ConditionKind::ObjectMissing, subject.as_ref());
        }
    }

    /// Judges whether a transient failure is caused by the object itself, as far as is known by
    /// now.
    async fn judge(
        &self,
        segment: &StoredSegment,
        error: &object_store::Error,
        begun: Instant,
        is_first: bool,
    ) -> Result<Verdict> {
        let info = &segment.info;
        let lasted = self.clock.since(begun);
        let is_not_found = matches!(error, object_store::Error::NotFound { .. });
        if is_outage(error) {
            self.note_outage(segment, error);
            return self.wait_for_store(info, error);
        }
        let Some((peers, seeded_bugs)) = self.peers.get() else {
            return match is_not_found || (is_first && self.is_gone(segment).await?) {
                true => Ok(Verdict::Missing),
                false => {
                    self.note_outage(segment, error);
                    Ok(Verdict::Undecided)
                }
            };
        };
        if is_not_found && (seeded_bugs.missing_unconfirmed || !self.is_named(info, &**peers).await)
        {
            self.clear(info);
            return Ok(Verdict::Missing);
        }
        let place = self.probe_places.try_acquire();
        let is_round = place.is_ok() && self.suspects.lock().begin_round(segment, self.clock.now());
        // A truncated object is found out at once, whatever else is failing.
        let head = match is_round || is_first {
            true => self.head(segment).await?,
            false => Head::Unknown,
        };
        if !is_round {
            return Ok(self.suspects.lock().verdict(&info.id, self.clock.now()).0);
        }
        let cause = match (head, is_not_found) {
            (Head::NotThere, _) => Some(Cause::Missing),
            (Head::There, _) | (Head::Unknown, false) => Some(Cause::Passing),
            (Head::Unknown, true) => None,
        };
        let are_others_read = match is_of_copy_object(error) || self.seeded_bugs().judged_alone {
            true => Some(true), // the witness of the copy was read
            false => self.are_others_read(info, &**peers).await,
        };
        match are_others_read {
            Some(true) => self.outage.clear(),
            _ => self.note_outage(segment, error),
        }
        if are_others_read == Some(false) {
            self.wait_for_store(info, error)?;
        }
        let Some((cause, are_others_read)) = cause.zip(are_others_read) else {
            return Ok(Verdict::Undecided);
        };
        let now = self.clock.now();
        let round = Round { cause, lasted, are_others_read };
        let (verdict, is_new) = self.suspects.lock().end_round(&info.id, now, round);
        if is_new {
            self.raise(info, verdict, error);
        }
        Ok(verdict)
    }

    /// Handles the case that the store answers nothing: waits, or fails if the reader is impatient.
    fn wait_for_store(&self, info: &SegmentInfo, error: &object_store::Error) -> Result<Verdict> {
        if !self.is_impatient {
            return Ok(Verdict::Undecided);
        }
        let what = format!("read {info}: nothing can be read there: {}", public_text(error));
        Err(Error::new(ErrorKind::Unavailable, what))
    }

    async fn is_named(&self, info: &SegmentInfo, peers: &dyn Peers) -> bool {
        tokio::time::timeout(PROBE_TIMEOUT, peers.is_named(info)).await.unwrap_or(true)
    }

    /// Reads a byte of other objects, until one is read. Returns `None` if there is no other object to
    /// ask, or if all of them are missing too, which proves nothing about the store.
    async fn are_others_read(&self, info: &SegmentInfo, peers: &dyn Peers) -> Option<bool> {
        let probe = async {
            let mut suspects = self.suspects.lock().ids();
            let mut unread = Vec::new();
            for _ in 0..WITNESS_COUNT {
                let Some(peer) = peers.another(info, &suspects).await else { break };
                self.request_count.fetch_add(1, Ordering::Relaxed);
                let (read, other) = match peer {
                    Peer::Segment(other) => (self.segments.read(&other, 0..1).await, Some(other)),
                    Peer::Object(store, path) => (store.get_range(&path, 0..1).await, None),
                };
                match (read, other) {
                    (Ok(_), other) => {
                        let is_suspect = |other: &StoredSegment| suspects.contains(&other.info.id);
                        if let Some(other) = other.filter(is_suspect) {
                            self.clear(&other.info);
                        }
                        // The store answers, so these fail on their own: later probes avoid them.
                        let mut list = self.suspects.lock();
                        for other in &unread {
                            let _ = list.begin_round(other, self.clock.now());
                        }
                        return Some(true);
                    }
                    (Err(object_store::Error::NotFound { .. }), Some(other)) => {
                        // The next probe asks a different object.
                        let _ = self.suspects.lock().begin_round(&other, self.clock.now());
                        suspects.insert(other.info.id);
                    }
                    (Err(error), Some(other)) if !is_outage(&error) => {
                        suspects.insert(other.info.id);
                        unread.push(other);
                    }
                    (Err(_), _) => return Some(false),
                }
            }
            (!unread.is_empty()).then_some(false)
        };
        tokio::time::timeout(PROBE_TIMEOUT, probe).await.unwrap_or(Some(false))
    }

    /// Asks for the size of an object. Stores report a range past the end in the same way as an
    /// outage, and a truncated object must not be waited for.
    async fn head(&self, segment: &StoredSegment) -> Result<Head> {
        let info = &segment.info;
        let (name, placement) = (info.name(), Some(&segment.placement));
        let timeout = PROBE_TIMEOUT.min(self.attempt_timeout);
        let Ok(size) = tokio::time::timeout(timeout, self.segments.size(&name, placement)).await
        else {
            return Ok(Head::Unknown);
        };
        match size {
            Ok(size) if size != u64::from(info.object_bytes) => {
                self.clear(info);
                let what = format!("read {info}: {size} bytes instead of {}", info.object_bytes);
                Err(Error::new(ErrorKind::Corrupt, what))
            }
            Ok(_) => Ok(Head::There),
            Err(object_store::Error::NotFound { .. }) => Ok(Head::NotThere),
            Err(_) => Ok(Head::Unknown),
        }
    }

    async fn is_gone(&self, segment: &StoredSegment) -> Result<bool> {
        Ok(matches!(self.head(segment).await?, Head::NotThere))
    }

    fn raise(&self, info: &SegmentInfo, verdict: Verdict, error: &object_store::Error) {
        let (kind, other) = (ConditionKind::ObjectUnreadable, ConditionKind::ObjectMissing);
        let (kind, other, fact) = match verdict {
            Verdict::Missing => (other, kind, "is not in the store, though the metadata names it"),
            _ => (kind, other, "could not be read repeatedly, while other objects were"),
        };
        let report = Report::new(
            format!("{info} {fact}: {}", public_text(error)),
            "reads of data in it fail, unless a copy of the pool has it; volumes whose writes build on it are behind in \
             the store",
            "bring the object back under the same name, from a version, a copy or a backup of the \
             store; spindle tries again from time to time",
        );
        let subject: Path = info.object_path();
        self.conditions.clear(other, subject.as_ref());
        self.conditions.raise(kind, subject.as_ref(), report);
    }
}

fn is_unsupported(error: &object_store::Error) -> bool {
    use object_store::Error as E;
    matches!(error, E::InvalidPath { .. } | E::NotSupported { .. } | E::NotImplemented { .. })
}

/// Returns whether an error is evidently a failure of the store, or of the copy behind it, rather
/// than of one object. Refused credentials do not count: an archive refuses single objects.
fn is_outage(error: &object_store::Error) -> bool {
    if matches!(error, object_store::Error::Generic { store, .. } if *store == OF_COPY) {
        return true;
    }
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(one) = cause {
        let text = one.to_string();
        if OF_THE_STORE.iter().any(|word| text.contains(word)) {
            return true;
        }
        cause = one.source();
    }
    false
}

fn is_of_copy_object(error: &object_store::Error) -> bool {
    matches!(error, object_store::Error::Generic { store, .. } if *store == OF_COPY_OBJECT)
}

/// Builds the error for a verdict. `source` is the store's latest error.
fn verdict_error(
    info: &SegmentInfo,
    verdict: Verdict,
    source: Option<object_store::Error>,
) -> Error {
    let (kind, what) = match verdict {
        Verdict::Missing => (ErrorKind::NotFound, "the object is not in the store"),
        _ => (ErrorKind::Unreadable, "it cannot be read, while other objects can"),
    };
    let what = format!("read {info}: {what}");
    match source {
        Some(source) => Error::with_source(kind, what, source),
        None => Error::new(kind, what),
    }
}

/// Returns a duration between half of `backoff` and all of it, so that many readers do not retry at
/// the same instant.
fn jittered(backoff: Duration) -> Duration {
    let random = u16::from_le_bytes(random_bytes()) % 512;
    backoff / 2 + backoff / 1024 * u32::from(random)
}
