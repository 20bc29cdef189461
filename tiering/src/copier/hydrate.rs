//! Hydration: fetches the objects that a restored pool still reads from the copy, in the
//! background.
//!
//! Invariants:
//! - Hydration fetches objects that the pool's metadata references at that time. Data that clients
//!   have overwritten since the restore and reclaim has dropped is never fetched.
//! - The end is final: it is reported only after a complete pass over the metadata has found
//!   nothing missing. Segments that the copy itself lacks, or does not send while it sends others,
//!   do not stop the rest from being fetched. They are named, and the pool is whole only once they
//!   are present or a person has given them up. The metadata that this pass sees is durable by
//!   then: a commit that forgets a segment becomes visible before it is durable, and may be lost.
//! - Objects that clients wait for come first, then segments that were read most before
//!   ([`crate::Tier::warm`]), then the rest.
//! - Segments whose live count is zero come last and, on request, only after reclaim had time to
//!   examine and drop them: counts alone are no proof that they are dead.
//! - Hydration yields to clients: while they wait for the copy, it pauses between objects.

use super::STEP;
use super::origin::RestoredStore;
use super::transfer::{Object, Pace, check_length, copy_parts, source_error};
use crate::dedup::Dedup;
use crate::fetch::FramesOptions;
use crate::fetch::peers::{Peer, Peers};
use crate::fetch::store::StoreReader;
use crate::heat::Hottest;
use crate::listing::HELD_COUNT_MAX;
use crate::map::records::SegmentRecord;
use crate::places::Places;
use crate::pool::{Exclusions, Metadata, Pool, Segments};
use crate::segment::{SegmentId, SegmentInfo, SegmentName, StoredSegment};
use crate::segment_store::{Leftover, Listed, ObjectSegments, SegmentStore};
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{GetOptions, ObjectStore, ObjectStoreExt};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// If clients have read from the copy within this time, hydration waits for the same time between
/// two objects.
const GIVE_WAY: Duration = Duration::from_millis(20);

/// Time after which a failing read of the copy ends the attempt. Chosen by hand: an object that
/// hangs is detected earlier, and the caller tries again.
const COPY_RETRY_MAX: Duration = Duration::from_secs(if cfg!(test) { 6 } else { 90 });

/// Interval at which hydration checks whether reclaim has dropped the dead segments.
const DEAD_LOOK: Duration = Duration::from_millis(500);

/// Options for hydrating a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HydrateOptions {
    /// Limit on the bytes fetched per second.
    pub bytes_per_second: Option<u64>,
    /// Segments with a live count of zero are left to reclaim as long as it drops one of them
    /// within this time.
    pub dead_patience: Duration,
    /// For this long from the first attempt on, a segment that the copy lacks on purpose is not
    /// called lost while references from dropped volumes are still being subtracted from the
    /// counts.
    pub counting_patience: Duration,
    /// Segments that a person has given up if they are missing; hydration does not wait for them.
    /// It still waits for segments that the copy has and does not send.
    pub given_up: Arc<BTreeSet<Path>>,
}

/// Segments that the pool still references and the copy did not send.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lacking {
    /// Segments that are confirmed to be missing.
    pub missing: BTreeSet<Path>,
    /// Segments that could not be read while others could, with the reason.
    pub unreadable: BTreeMap<Path, String>,
}

impl Lacking {
    /// Returns whether nothing is lacking.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unreadable.is_empty()
    }

    /// Returns the paths of all lacking segments.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.missing.iter().chain(self.unreadable.keys())
    }

    fn has(&self, path: &Path) -> bool {
        self.missing.contains(path) || self.unreadable.contains_key(path)
    }
}

/// Progress of hydration.
#[derive(Debug, Default)]
pub struct HydrateProgress {
    /// Bytes of the segments of the state; an upper bound of the bytes left until those are
    /// measured.
    state_bytes: u64,
    left_bytes: AtomicU64,
    done_bytes: AtomicU64,
    damaged_count: AtomicU64,
    /// Segments that the copy did not send at the last attempt.
    lacking: parking_lot::Mutex<BTreeSet<Path>>,
    begun: parking_lot::Mutex<Option<Instant>>,
}

/// [`HydrateProgress`] at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HydrateCounts {
    /// Bytes of segments that are still to be fetched. Until the metadata has been fetched, which
    /// comes first, an upper bound: the bytes of the state less those that the pool's own store
    /// has.
    pub left_bytes: u64,
    /// Bytes fetched since the start.
    pub done_bytes: u64,
    /// Segments that were damaged in the copy, plus those that are missing there or could not be
    /// read at the last attempt.
    pub bad_count: u64,
    /// Estimated seconds left at the average pace since the start, once known.
    pub left_seconds: Option<u64>,
}

impl HydrateProgress {
    /// Creates the progress for a state with this many bytes of segments, all of which count as
    /// still to be fetched.
    #[must_use]
    pub fn of_state(state_bytes: u64) -> HydrateProgress {
        let left_bytes = AtomicU64::new(state_bytes);
        HydrateProgress { state_bytes, left_bytes, ..HydrateProgress::default() }
    }

    /// Returns the counts; `now` is a moment of the tier's clock.
    #[must_use]
    pub fn counts(&self, now: Instant) -> HydrateCounts {
        let (left, done) =
            (self.left_bytes.load(Ordering::Relaxed), self.done_bytes.load(Ordering::Relaxed));
        let taken = |begun| now.saturating_duration_since(begun).as_millis() as u64;
        let taken = self.begun.lock().map_or(0, taken);
        let left_seconds = (done > 0 && taken > 0).then(|| {
            let per_second = u128::from(done) * 1000 / u128::from(taken);
            u64::try_from(u128::from(left) / per_second.max(1)).unwrap_or(u64::MAX)
        });
        let lacking_count = self.lacking.lock().len() as u64;
        let bad_count = self.damaged_count.load(Ordering::Relaxed) + lacking_count;
        HydrateCounts { left_bytes: left, done_bytes: done, bad_count, left_seconds }
    }
}

/// The job; see the module.
pub(crate) struct Hydrator {
    pub pool: Arc<Pool>,
    pub metadata: Arc<Metadata>,
    pub segments: Arc<Segments>,
    pub exclusions: Arc<Exclusions>,
    pub dedup: Arc<Dedup>,
    /// Limits of reading the copy.
    pub frames: FramesOptions,
    /// Limits the objects that are being sent to copies or brought back.
    pub places: Arc<Semaphore>,
}

impl Hydrator {
    /// Implements [`crate::Tier::hydrate`].
    pub(crate) async fn hydrate(
        &self,
        store: &Arc<RestoredStore>,
        options: HydrateOptions,
        progress: &HydrateProgress,
    ) -> Result<Lacking> {
        store.reader(|| CopyPeers::reader(store, self)).set_all_stale();
        progress.begun.lock().get_or_insert_with(|| self.pool.clock.now());
        let (own, own_bytes) = list_own(store).await?;
        let left_bytes = progress.state_bytes.saturating_sub(own_bytes);
        progress.left_bytes.store(left_bytes, Ordering::Relaxed);
        let pace = Pace::new(options.bytes_per_second, self.pool.clock.clone());
        let mut hydration = Hydration {
            job: self,
            store,
            below: store.below(),
            pace,
            places: Places::new(&self.places),
            progress,
            own,
            lacking: Lacking::default(),
            bad_table: None,
            excluded: Own::new(),
            uncounted: Own::new(),
            counting_patience: options.counting_patience,
        };
        hydration.fetch_tables().await?;
        if !options.dead_patience.is_zero() {
            while hydration.fetch_segments(false).await? + hydration.fetch_tables().await? > 0 {}
            hydration.wait_for_reclaim(options.dead_patience).await?;
        }
        loop {
            let db = self.metadata.map.db();
            while hydration.fetch_segments(true).await? + hydration.fetch_tables().await? > 0 {}
            if !hydration.uncounted.is_empty() {
                let what = "restore: the data of the volumes that were not restored is still being \
                            counted";
                return Err(Error::new(ErrorKind::Unavailable, what));
            }
            if self.pool.seeded_bugs.complete_unsettled {
                break;
            }
            // A committer holds the writer until its commit is durable or has failed.
            let writer = self.metadata.writer.lock().await;
            self.metadata.map.check(&writer)?;
            if Arc::ptr_eq(&db, &self.metadata.map.db()) {
                break;
            }
        }
        let Hydration { lacking, bad_table, .. } = hydration;
        *progress.lacking.lock() = lacking.paths().cloned().collect();
        if let Some(error) = bad_table {
            return Err(error);
        }
        if lacking.is_empty()
            || (lacking.unreadable.is_empty() && lacking.missing.is_subset(&options.given_up))
        {
            store.set_whole();
        }
        Ok(lacking)
    }
}

/// Segments that the pool's own store has, by number.
type Own = BTreeMap<u64, [u8; 16]>;

/// Lists the segments of the pool's own store, and returns the bytes of those that the state may
/// have.
async fn list_own(store: &RestoredStore) -> Result<(Own, u64)> {
    let failed =
        |cause| Error::with_source(ErrorKind::Unavailable, "restore: list the pool's store", cause);
    let (mut own, mut bytes) = (Own::new(), 0);
    let mut listing = store.own_segments().list(HELD_COUNT_MAX);
    while let Some(found) = listing.try_next().await.map_err(failed)? {
        if let Listed::Segment { name, bytes: stored_bytes, .. } = found {
            own.insert(name.number.0, name.id);
            if name.number.0 < store.below() {
                bytes += stored_bytes;
            }
        }
    }
    Ok((own, bytes))
}

struct Hydration<'a> {
    job: &'a Hydrator,
    store: &'a Arc<RestoredStore>,
    below: u64,
    pace: Pace,
    places: Places,
    progress: &'a HydrateProgress,
    own: Own,
    lacking: Lacking,
    /// Error of the first table that could not be fetched.
    bad_table: Option<Error>,
    /// Segments that the copy lacks on purpose and nothing references.
    excluded: Own,
    /// Segments that the copy lacks on purpose but that the counts still show as referenced.
    uncounted: Own,
    counting_patience: Duration,
}

impl Hydration<'_> {
    fn is_missing(&self, info: &SegmentInfo) -> bool {
        info.number.0 < self.below
            && self.own.get(&info.number.0) != Some(&info.id)
            && self.excluded.get(&info.number.0) != Some(&info.id)
            && self.uncounted.get(&info.number.0) != Some(&info.id)
            && !self.lacking.has(&info.object_path())
    }

    fn is_patient(&self) -> bool {
        let begun = *self.progress.begun.lock();
        begun.is_some_and(|begun| self.job.pool.clock.since(begun) < self.counting_patience)
    }

    /// Fetches the tables and returns how many it fetched. A table that the copy does not send does
    /// not stop segments from being fetched.
    async fn fetch_tables(&mut self) -> Result<u64> {
        let mut count = 0;
        self.bad_table = None;
        for path in self.job.metadata.map.db().objects().tables {
            match self.fetch_table(&path).await {
                Ok(is_fetched) => count += u64::from(is_fetched),
                Err(error) if self.store.read_witness().await.is_err() => return Err(error),
                Err(error) => drop(self.bad_table.get_or_insert(error)),
            }
        }
        Ok(count)
    }

    async fn fetch_table(&self, path: &Path) -> Result<bool> {
        match self.store.own().head(path).await {
            Ok(_) => return Ok(false),
            Err(object_store::Error::NotFound { .. }) => {}
            Err(cause) => return Err(source_error(path, cause)),
        }
        let head = GetOptions { head: true, ..GetOptions::default() };
        let bytes = match self.store.get_of_copy(path, head).await {
            Ok(found) => found.meta.size,
            // The table was compacted away meanwhile.
            Err(object_store::Error::NotFound { .. })
                if !self.job.metadata.map.db().objects().tables.contains(path) =>
            {
                return Ok(false);
            }
            Err(object_store::Error::NotFound { .. }) => {
                let what = format!(
                    "restore: the copy lacks {path}, a table of the metadata; bring it back there"
                );
                return Err(Error::new(ErrorKind::Corrupt, what));
            }
            Err(cause) => return Err(source_error(path, cause)),
        };
        let (from, to) = (self.store.of_copy(), self.store.own());
        copy_parts(from, to, Object { path, bytes }, &self.pace, &self.places).await?;
        self.store.forget(path);
        Ok(true)
    }

    /// Makes one pass over all segments, or over those with live blocks. Returns the number of
    /// fetched segments.
    async fn fetch_segments(&mut self, with_dead: bool) -> Result<u64> {
        let hottest = self.measure(with_dead).await?.into_list();
        let (mut last, mut count) = (0, 0);
        for (number, _) in hottest {
            count += self.fetch_waited_for().await?;
            if let Some(record) = self.job.metadata.map.find_segment(number).await?
                && self.is_missing(&record.info)
            {
                count += self.fetch(&record.stored()).await?;
            }
        }
        loop {
            let (records, next) = self.job.metadata.map.live_after(last, STEP).await?;
            for (record, live) in records {
                count += self.fetch_waited_for().await?;
                if (live > 0 || with_dead) && self.is_missing(&record.info) {
                    count += self.fetch(&record.stored()).await?;
                }
            }
            match next {
                Some(next) if next < self.below => last = next,
                _ => return Ok(count),
            }
        }
    }

    /// Fetches the objects that clients wait for.
    async fn fetch_waited_for(&mut self) -> Result<u64> {
        let mut count = 0;
        while let Some(path) = self.store.most_read(|path| SegmentName::parse(path).is_some()) {
            count += self.fetch_named(&path).await?;
            self.store.forget(&path);
        }
        Ok(count)
    }

    /// Measures how much is missing, and finds the most read of the missing segments.
    async fn measure(&mut self, with_dead: bool) -> Result<Hottest> {
        let (mut last, mut bytes) = (0, 0);
        let mut hottest = Hottest::default();
        loop {
            let (records, next) = self.job.metadata.map.live_after(last, STEP).await?;
            let is_wanted = |(record, live): &&(SegmentRecord, u32)| {
                (*live > 0 || with_dead) && self.is_missing(&record.info)
            };
            for (record, _) in records.iter().filter(is_wanted) {
                bytes += u64::from(record.info.object_bytes);
                hottest.add(&self.job.segments.heat, record.info.number.0);
            }
            match next {
                Some(next) if next < self.below => last = next,
                _ => break,
            }
        }
        self.progress.left_bytes.store(bytes, Ordering::Relaxed);
        Ok(hottest)
    }

    /// Waits until no dead segment is missing here, or until reclaim has dropped none for
    /// `patience`.
    async fn wait_for_reclaim(&mut self, patience: Duration) -> Result<()> {
        let clock = &self.job.pool.clock.clone();
        let (mut fewest, mut since) = (u64::MAX, clock.now());
        loop {
            let count = self.dead_count().await?;
            if count == 0 || (count >= fewest && clock.since(since) > patience) {
                return Ok(());
            }
            if count < fewest {
                (fewest, since) = (count, clock.now());
            }
            let _ = self.fetch_waited_for().await?;
            tokio::time::sleep(DEAD_LOOK).await;
        }
    }

    async fn dead_count(&self) -> Result<u64> {
        let (mut last, mut count) = (0, 0);
        loop {
            let (records, next) = self.job.metadata.map.live_after(last, STEP).await?;
            let is_dead = |(record, live): &&(SegmentRecord, u32)| {
                *live == 0 && self.is_missing(&record.info)
            };
            count += records.iter().filter(is_dead).count() as u64;
            match next {
                Some(next) if next < self.below => last = next,
                _ => return Ok(count),
            }
        }
    }

    async fn fetch_named(&mut self, path: &Path) -> Result<u64> {
        let Some(name) = SegmentName::parse(path) else { return Ok(0) };
        match self.job.metadata.map.find_segment(name.number.0).await? {
            Some(record) if record.info.id == name.id && self.is_missing(&record.info) => {
                self.fetch(&record.stored()).await
            }
            _ => Ok(0),
        }
    }

    async fn fetch(&mut self, segment: &StoredSegment) -> Result<u64> {
        let places = self.places.clone();
        self.pace.wait(u64::from(segment.info.object_bytes)).await;
        places.with(self.fetch_now(segment)).await
    }

    async fn fetch_now(&mut self, segment: &StoredSegment) -> Result<u64> {
        let info = &segment.info;
        let path = info.object_path();
        let mut is_second = false;
        let object = loop {
            let object = match self.get(segment).await {
                Ok(object) => object,
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    self.note_missing(info).await?;
                    return Ok(0);
                }
                Err(error) if error.kind() == ErrorKind::Unreadable => {
                    self.note_unreadable(info, &error).await?;
                    return Ok(0);
                }
                Err(error) => return Err(error),
            };
            match self.job.pool.verify(info, &object).await? {
                None => break object,
                Some(_) if !is_second => is_second = true,
                Some(why) => {
                    self.job.dedup.note_bad(info.number.0);
                    self.progress.damaged_count.fetch_add(1, Ordering::Relaxed);
                    tracing::error!(
                        object = %path, why,
                        "a segment is damaged in the copy, and was taken as it is; `spindle fsck` \
                         names its data"
                    );
                    break object;
                }
            }
        };
        let bytes = object.len() as u64;
        self.put(segment, object).await?;
        self.own.insert(info.number.0, info.id);
        self.progress.done_bytes.fetch_add(bytes, Ordering::Relaxed);
        let left = self.progress.left_bytes.load(Ordering::Relaxed).saturating_sub(bytes);
        self.progress.left_bytes.store(left, Ordering::Relaxed);
        if self.progress.lacking.lock().remove(&path) {
            self.job.dedup.note_well(info.number.0);
        }
        // Reclaim may have dropped the segment before its object was here to be deleted.
        if !self.is_named(info).await? {
            self.job.segments.leftovers.abandon([Leftover::from(segment)]);
        }
        self.store.forget(&path);
        Ok(1)
    }

    /// Records a segment that the copy does not have. If the copy should have it, its absence was
    /// confirmed.
    async fn note_missing(&mut self, info: &SegmentInfo) -> Result<()> {
        // The order matters: the subtraction of counts may finish in between.
        let is_uncounted = self.is_patient()
            && self.job.exclusions.may_be_excluded(info.number.0)
            && self.job.exclusions.is_counting_out();
        if self.job.exclusions.is_excluded(info.number.0).await? {
            self.excluded.insert(info.number.0, info.id);
        } else if is_uncounted {
            self.uncounted.insert(info.number.0, info.id);
        } else if self.is_named(info).await? {
            let path = info.object_path();
            self.job.dedup.note_bad(info.number.0);
            if self.progress.lacking.lock().insert(path.clone()) {
                tracing::error!(object = %path, "the copy lacks a segment that the restored pool needs");
            }
            self.lacking.missing.insert(path);
        }
        Ok(())
    }

    /// Records a segment that the copy does not send while it sends others.
    async fn note_unreadable(&mut self, info: &SegmentInfo, error: &Error) -> Result<()> {
        if self.is_named(info).await? {
            let path = info.object_path();
            self.job.dedup.note_bad(info.number.0);
            if self.progress.lacking.lock().insert(path.clone()) {
                tracing::error!(
                    object = %path, error = %error.chain(),
                    "the copy does not send a segment that the restored pool needs, while it sends others"
                );
            }
            self.lacking.unreadable.insert(path, error.chain());
        }
        Ok(())
    }

    async fn is_named(&self, info: &SegmentInfo) -> Result<bool> {
        let writer = self.job.metadata.writer.lock().await;
        self.job.metadata.map.check(&writer)?;
        let found = self.job.metadata.map.find_segment(info.number.0).await?;
        Ok(found.is_some_and(|record| record.is_of(info)))
    }

    /// Reads the object of a segment from the copy.
    async fn get(&self, segment: &StoredSegment) -> Result<Bytes> {
        let info = &segment.info;
        if self.store.is_read_within(GIVE_WAY) {
            tokio::time::sleep(GIVE_WAY).await;
        }
        let reader = self.store.reader(|| CopyPeers::reader(self.store, self.job));
        let path = info.object_path();
        let error = match reader.get(segment, 0..u64::from(info.object_bytes)).await {
            Err(error) if error.kind() == ErrorKind::Corrupt => error,
            read => return read.map_err(|error| error.context("restore: read the copy")),
        };
        tracing::debug!(
            error = %error.chain(),
            "could not read a segment with the size in the metadata; taking it as it is"
        );
        let failed = |cause| {
            let what = format!("restore: read {path} of the copy");
            Error::with_source(ErrorKind::Unavailable, what, cause)
        };
        let got = self.store.get_of_copy(&path, GetOptions::default()).await.map_err(failed)?;
        let said = got.meta.size;
        let bytes = got.bytes().await.map_err(failed)?;
        check_length(&path, bytes.len() as u64, said)?;
        Ok(bytes)
    }

    async fn put(&self, segment: &StoredSegment, bytes: Bytes) -> Result<()> {
        let own = self.store.own_segments();
        // Never overwrite an object that a repair or an operator has put there meanwhile.
        let put = match self.job.pool.seeded_bugs.hydrate_overwrites {
            true => own.replace(segment, bytes).await,
            false => own.restore(&segment.info, bytes).await,
        };
        put.map(drop).map_err(|cause| {
            let what = format!("restore: write {} to the pool's store", segment.info.name());
            Error::with_source(ErrorKind::Unavailable, what, cause)
        })
    }
}

/// Knowledge about the objects of the copy that the pool is hydrated from. The witness exists as
/// long as the copy does.
struct CopyPeers {
    exclusions: Weak<Exclusions>,
    store: Arc<dyn ObjectStore>,
    witness: Path,
}

impl std::fmt::Debug for CopyPeers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CopyPeers")
    }
}

impl CopyPeers {
    fn reader(store: &RestoredStore, job: &Hydrator) -> StoreReader {
        let mut options = job.frames.clone();
        // The caller reports lacking segments itself.
        options.conditions = block::Conditions::default();
        options.retry_duration_max = options.retry_duration_max.min(COPY_RETRY_MAX);
        let copy = store.of_copy().clone();
        let segments = Arc::new(ObjectSegments::new(copy.clone()));
        let reader = StoreReader::new(segments, &options).impatient();
        let exclusions = Arc::downgrade(&job.exclusions);
        let witness = store.witness().clone();
        let peers = CopyPeers { exclusions, store: copy, witness };
        reader.set_peers(Arc::new(peers), job.pool.seeded_bugs);
        reader
    }
}

#[async_trait::async_trait]
impl Peers for CopyPeers {
    async fn is_named(&self, info: &SegmentInfo) -> bool {
        match self.exclusions.upgrade() {
            Some(exclusions) => exclusions.is_wanted(info).await,
            None => false,
        }
    }

    async fn another(&self, _: &SegmentInfo, _: &HashSet<SegmentId>) -> Option<Peer> {
        Some(Peer::Object(self.store.clone(), self.witness.clone()))
    }
}
