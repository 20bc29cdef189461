//! Repairing: restores segments that are damaged or missing in the pool's store, from copies of the
//! pool that have them.
//!
//! Invariants:
//! - A segment from a copy is not trusted: it is written only if every frame of it verifies as that
//!   very segment. If the key of the frames was destroyed, their checksums are verified, which the
//!   directory holds under the pool's key.
//! - Only segments that the map references are restored, and only by the pool's owner. A segment is
//!   held meanwhile ([`crate::leftovers::Hold`]), and deleted if the map has forgotten it
//!   nevertheless.
//! - A segment that no copy has intact is not changed in any way.
//! - For readers, [`READERS_AT_ONCE`] segments are repaired concurrently, and none whose repairing
//!   failed within [`TRY_AGAIN`].
//! - A copy that hangs does not delay repairing while another copy has the segment: see [`sources`].

mod sources;

pub use sources::RepairSource;

use crate::outage::public_text;
use crate::places::lend;
use crate::pool::{JobParts, Metadata, Pool, Segments};
use crate::rebuild::Rebuild;
use crate::segment::{SegmentInfo, StoredSegment};
use crate::segment_store::{Depth, Leftover};
use block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use sources::{HEDGE, Source};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// Time for which the copies are not asked again for a reader after repairing its segment has failed.
/// Chosen by hand.
const TRY_AGAIN: Duration = Duration::from_secs(3600);
/// The same time if a copy did not answer. Chosen by hand: such an attempt takes as long.
const TRY_AGAIN_AWAY: Duration = Duration::from_secs(60);
/// Longest time that a reader waits for copies. Chosen by hand, as for a store that does not
/// answer.
const READER_PATIENCE: Duration = Duration::from_secs(120);
/// Segments that are repaired for readers concurrently. Chosen by hand: each holds a segment in
/// memory.
const READERS_AT_ONCE: usize = 2;
/// Maximum number of remembered segments whose repairing failed. Chosen by hand; beyond it all are
/// forgotten.
const TRIED_MAX: usize = 4096;

/// Jobs that leave damaged segments alone.
pub(crate) trait SegmentMarks: Send + Sync {
    /// Marks a segment as damaged, missing or unreadable.
    fn note_bad(&self, number: u64);

    /// Removes the mark of a segment that is intact again.
    fn note_well(&self, number: u64);
}

/// The job, with the copies to repair from and the results so far; see the module.
pub(crate) struct Repair {
    pool: Arc<Pool>,
    metadata: Arc<Metadata>,
    segments: Arc<Segments>,
    marks: Arc<dyn SegmentMarks>,
    /// Makes fragments anew, for stores that have such.
    pub(crate) rebuild: Rebuild,
    /// Limits the objects that are being sent to copies or brought back.
    places: Arc<Semaphore>,
    sources: Mutex<Arc<[Arc<Source>]>>,
    /// Time until which the copies are not asked again for a reader, by segment.
    tried: Mutex<HashMap<u64, Instant>>,
    readers: Semaphore,
    /// Ensures that a segment is repaired for one reader at a time.
    turns: Mutex<HashMap<u64, Arc<tokio::sync::Mutex<()>>>>,
    repaired_count: AtomicU64,
}

impl Repair {
    pub(crate) fn new(
        parts: &JobParts,
        marks: Arc<dyn SegmentMarks>,
        places: Arc<Semaphore>,
    ) -> Repair {
        let JobParts { pool, metadata, segments } = parts.clone();
        let rebuild = Rebuild::new(parts);
        Repair {
            rebuild,
            pool,
            metadata,
            segments,
            marks,
            places,
            sources: Mutex::default(),
            tried: Mutex::default(),
            readers: Semaphore::new(READERS_AT_ONCE),
            turns: Mutex::default(),
            repaired_count: AtomicU64::new(0),
        }
    }
}

/// State of a segment in the pool's store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Every frame opens.
    Whole {
        /// Number of frames.
        frame_count: u64,
    },
    /// It was not intact, and has been restored.
    Repaired {
        /// The damage that was found.
        why: String,
        /// The copy that had it.
        source: String,
    },
    /// It is not intact.
    Bad {
        /// The damage, and the state of each copy.
        why: String,
    },
    /// The map no longer references it.
    Gone,
}

impl Repair {
    /// Returns the number of segments restored since the start.
    pub(crate) fn repaired_count(&self) -> u64 {
        self.repaired_count.load(Ordering::Relaxed)
    }

    /// Implements [`crate::Tier::set_repair_sources`].
    pub(crate) fn set_sources(&self, sources: Vec<RepairSource>) {
        let source = |source| Arc::new(Source::new(source, self.pool.clock.clone()));
        let sources = sources.into_iter().map(source);
        *self.sources.lock() = sources.collect();
        self.tried.lock().clear();
    }

    fn sources(&self) -> Arc<[Arc<Source>]> {
        self.sources.lock().clone()
    }

    fn was_tried(&self, number: u64) -> bool {
        self.tried.lock().get(&number).is_some_and(|until| self.pool.clock.now() < *until)
    }

    fn note_tried(&self, number: u64, are_sources_well: bool) {
        let mut tried = self.tried.lock();
        if tried.len() >= TRIED_MAX {
            tried.clear();
        }
        let pause = if are_sources_well { TRY_AGAIN } else { TRY_AGAIN_AWAY };
        tried.insert(number, self.pool.clock.now() + pause);
    }

    /// Acquires the turn to repair a segment for a reader. Other readers of the same segment wait for
    /// it.
    async fn turn(&self, number: u64) -> tokio::sync::OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.turns.lock();
            turns.retain(|_, turn| Arc::strong_count(turn) > 1);
            turns.entry(number).or_default().clone()
        };
        turn.lock_owned().await
    }
}

/// Returns whether the error means that the data cannot be read, however often it is retried.
pub(crate) fn is_lost(error: &Error) -> bool {
    use ErrorKind::{Corrupt, NotFound, Unreadable, Unsupported};
    matches!(error.kind(), Corrupt | NotFound | Unreadable | Unsupported)
}

impl Repair {
    /// Reads a whole segment, bypassing every cache, and restores it if it is damaged, missing or
    /// unreadable. Holds one segment in memory, within the limit for objects in transit to copies.
    ///
    /// # Errors
    /// `Unavailable` when the pool's store does not answer, or the metadata database is being
    /// reopened; `Fenced` when another process owns the pool.
    pub(crate) async fn heal(&self, segment: &StoredSegment) -> Result<Finding> {
        lend(&self.places, self.heal_now(segment)).await
    }

    /// Like [`Repair::heal`], for a caller that holds a permit already.
    pub(crate) async fn heal_now(&self, segment: &StoredSegment) -> Result<Finding> {
        let current = match self.segments.store.redundancy(segment) {
            None => segment.clone(),
            Some(_) => {
                if let Some(found) = self.mend(segment).await? {
                    return Ok(found);
                }
                // Its fragments may have moved since the caller read the record.
                match self.current(segment).await? {
                    Some(current) => current,
                    None => return Ok(Finding::Gone),
                }
            }
        };
        let found = match self.look_at_own(&current).await? {
            Ok(found) => found,
            Err(why) => return self.repair(&current, why, None).await,
        };
        // It counts as what survives the loss of all data stores.
        if current.placement.is_copied() && self.rebuild.mend_object(current.info.number).await? {
            self.repaired_count.fetch_add(1, Ordering::Relaxed);
            let why = "its object was missing or damaged".to_owned();
            return Ok(Finding::Repaired { why, source: "its fragments".to_owned() });
        }
        Ok(found)
    }

    /// The segment as the map names it now.
    async fn current(&self, segment: &StoredSegment) -> Result<Option<StoredSegment>> {
        let current = self.rebuild.current(segment.info.number).await?;
        Ok(current.filter(|current| current.info.id == segment.info.id))
    }

    /// Like [`Repair::heal`], for a reader whose data was found unreadable: it does not wait for a
    /// store that hangs.
    async fn heal_for_reader(&self, segment: &StoredSegment) -> Result<Finding> {
        let looked = tokio::time::timeout(HEDGE, self.look_at_own(segment)).await;
        match looked.unwrap_or_else(|_| Ok(Err(format!("not sent in {HEDGE:?}"))))? {
            Ok(found) => Ok(found),
            Err(why) => self.repair(segment, why, Some(HEDGE)).await,
        }
    }

    /// Makes those fragments of a segment anew that are missing or do not verify. `None` if all are whole, or too
    /// few are left.
    async fn mend(&self, segment: &StoredSegment) -> Result<Option<Finding>> {
        let info = &segment.info;
        let report = match self.rebuild.rebuild(info.number, Depth::Checksums).await {
            Ok(Some(report)) if report.fragment_count > 0 => report,
            Ok(Some(_)) => return Ok(None),
            Ok(None) => return Ok(Some(Finding::Gone)),
            Err(error) if error.kind() == ErrorKind::Fenced => return Err(error),
            // A copy may have the segment.
            Err(error) => {
                tracing::debug!(error = %error.chain(), "could not make fragments anew");
                return Ok(None);
            }
        };
        let Some(current) = self.current(segment).await? else { return Ok(Some(Finding::Gone)) };
        self.segments.frames.store().set_stale(info);
        let why = format!("{} fragments were missing or damaged", report.fragment_count);
        if self.look_at_own(&current).await?.is_err() {
            return Ok(None);
        }
        self.repaired_count.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(object = %info.name(), why, "a segment was mended from its other fragments");
        Ok(Some(Finding::Repaired { why, source: "its other fragments".to_owned() }))
    }

    /// Determines the state of a segment in the pool's store, or the reason to repair it.
    async fn look_at_own(&self, segment: &StoredSegment) -> Result<Result<Finding, String>> {
        let info = &segment.info;
        let why = match self.segments.frames.check_segment(segment).await {
            Ok(report) => match report.damage() {
                None => {
                    self.marks.note_well(info.number.0);
                    let frame_count = report.directory.entries.len() as u64;
                    return Ok(Ok(Finding::Whole { frame_count }));
                }
                Some(why) => why,
            },
            Err(error) if is_lost(&error) => error.chain(),
            Err(error) => return Err(error),
        };
        // Until it is restored.
        self.marks.note_bad(info.number.0);
        Ok(Err(why))
    }

    /// Restores a segment from the copies. `patience` limits the wait for the pool's store to
    /// return the restored segment.
    async fn repair(
        &self,
        segment: &StoredSegment,
        why: String,
        patience: Option<Duration>,
    ) -> Result<Finding> {
        let info = &segment.info;
        let seeded_bugs = self.pool.seeded_bugs;
        // The order matters: even if the segment is forgotten from now on, its object is not
        // deleted before repairing is done.
        let hold =
            (!seeded_bugs.repair_unheld).then(|| self.segments.leftovers.hold_one(info.number));
        if !self.metadata.is_named(info.number, info.id).await? {
            return Ok(Finding::Gone);
        }
        let (object, source) = match self.fetch_from_sources(info).await {
            Ok(found) => found,
            Err(mut said) => {
                said.insert(0, why);
                return Ok(Finding::Bad { why: said.join("; ") });
            }
        };
        self.pool.check_owner().await?;
        let _turn = self.rebuild.turn(info.number).await;
        // A failed write of this segment must not prevent the check of others.
        let placement = match self.segments.store.replace(segment, object).await {
            Ok(placement) => placement,
            Err(cause) => {
                let cause = public_text(&cause);
                let why = format!(
                    "{why}; the copy {source} has it, but it could not be put back: {cause}"
                );
                return Ok(Finding::Bad { why });
            }
        };
        let is_moved = !placement.is(&segment.placement);
        if is_moved && !self.rebuild.commit(segment, placement.clone()).await? {
            return Ok(Finding::Gone);
        }
        let segment = &StoredSegment { info: *info, placement };
        self.segments.frames.store().set_stale(info);
        if !seeded_bugs.repair_unheld && !self.metadata.is_named(info.number, info.id).await? {
            self.segments.leftovers.abandon([Leftover::from(segment)]);
            return Ok(Finding::Gone);
        }
        drop(hold);
        let checked = self.segments.frames.check_segment(segment);
        let checked = match patience {
            None => checked.await,
            Some(patience) => match tokio::time::timeout(patience, checked).await {
                Ok(checked) => checked,
                Err(_) => {
                    let why = format!("{why}; put back, and not sent in {patience:?}");
                    return Ok(Finding::Bad { why });
                }
            },
        };
        match checked {
            Ok(report) if report.damage().is_none() || seeded_bugs.repair_unverified => {}
            Ok(_) => return Ok(Finding::Bad { why: format!("{why}; put back in vain") }),
            Err(error) if is_lost(&error) => {
                let why = format!("{why}; put back in vain: {}", error.chain());
                return Ok(Finding::Bad { why });
            }
            Err(error) => return Err(error),
        }
        self.marks.note_well(info.number.0);
        self.repaired_count.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(
            object = %info.name(), why, copy = source,
            "a segment was damaged or missing in the pool's store, and was put back from a copy"
        );
        Ok(Finding::Repaired { why, source })
    }

    /// Mends the segments that a reader lacks. Returns true if some were restored, so that reading
    /// again is worthwhile.
    pub(crate) async fn repair_for_reader(&self, lacking: &[StoredSegment]) -> bool {
        let repair = async {
            let mut is_repaired = false;
            for segment in lacking {
                let info = &segment.info;
                let _turn = self.turn(info.number.0).await;
                if self.was_tried(info.number.0) {
                    continue;
                }
                let _place = self.readers.acquire().await;
                match lend(&self.places, self.heal_for_reader(segment)).await {
                    // Another task has restored it meanwhile, or the transfer was bad.
                    Ok(Finding::Whole { .. } | Finding::Repaired { .. } | Finding::Gone) => {
                        is_repaired = true;
                    }
                    Ok(Finding::Bad { why }) => {
                        let are_well = self.sources().iter().all(|source| !source.is_failing());
                        self.note_tried(info.number.0, are_well);
                        tracing::error!(
                            object = %info.object_path(), why,
                            "a segment is damaged or missing, and no copy of the pool has it whole"
                        );
                    }
                    Err(error) => {
                        tracing::debug!(error = %error.chain(), "could not repair a segment");
                    }
                }
            }
            is_repaired
        };
        tokio::time::timeout(READER_PATIENCE, repair).await.unwrap_or(false)
    }

    /// Returns whether repairing would be in vain: there are no copies, or this segment was tried
    /// recently.
    pub(crate) fn is_repair_vain(&self, info: &SegmentInfo) -> bool {
        self.sources().is_empty() || self.was_tried(info.number.0)
    }
}
