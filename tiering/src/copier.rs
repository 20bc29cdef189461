//! A copy of the data tier in another store, brought up to one state after the other.
//!
//! A state is a manifest of the metadata database, the tables that it names, and the segments that the
//! metadata has records of. All of them are immutable objects that keep their names, so copying is resumed
//! by a listing, and what two states share is copied once.
//!
//! Invariants:
//! - Order: tables and segments, then the manifest. Whoever finds a manifest in the copy, and is told that its
//!   state was published, finds all that it names.
//! - The manifest is created only if absent. A copy in which there is a later one than the pool has, or another one
//!   of the same number, is refused: it holds what this pool does not have.
//! - What a state needs is not deleted in the pool before the copy has it ([`crate::orphans::Hold`]); beyond a bound the
//!   pool's space goes first, and the copy begins anew with a newer state. The published states stay whole.
//! - Nothing that the newest published state names is deleted in the copy, nor what a reader's pin keeps, nor
//!   anything within the grace of whoever is just opening an earlier state.
//! - Segments are verified on their way. A damaged one is copied as it is, counted and reported, and never takes the
//!   place of one that the copy has.
//! - Memory is bounded: two segments, two parts of tables, and 40 bytes for each segment of the copy.

mod hydrate;
mod origin;

pub use hydrate::{HydrateCounts, HydrateProgress};
pub use origin::RestoredStore;

use crate::keys::KeyId;
use crate::map::Map;
use crate::map::MapOptions;
use crate::map::database::{self, Database, DatabaseOptions, StateObjects};
use crate::map::records::{Root, SegmentRecord};
use crate::orphans::Hold;
use crate::segment::read::check_object;
use crate::segment::{FOLDER, SegmentId, SegmentInfo, SegmentNumber, parse_object_path};
use crate::tier::{Inner, Tier};
use block::{Epoch, Error, ErrorKind, Lsn, Result};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, WriteMultipart};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// Segment records taken from the metadata at a time.
const STEP: usize = 1024;
/// Objects of all copies of a process that are on their way at the same time. Chosen by hand: one is read while
/// the one before is written.
pub const OBJECTS_AT_ONCE: usize = 2;
/// Objects above this are copied in parts of this size. Chosen by hand: as large as the parts of a store must be.
const PART_BYTES: usize = 8 << 20;
/// Memory of the metadata that a pass reads.
const CACHE_BYTES: u64 = 4 << 20;
/// Longest that a replaced object stays before it is deleted, unless a pin keeps it. Chosen by hand: far above what
/// it takes to find the newest state and to pin it.
const GRACE: Duration = Duration::from_secs(600);
/// Replaced objects that are remembered; beyond it the oldest are left to the listing of the next start. Chosen by
/// hand: 25 MiB of names, while a reader keeps them.
const DOOMED_MAX: usize = 250_000;
/// A segment that was damaged or missing in the pool's store is looked at again after so long: it may have been mended,
/// or only what was read was damaged.
const BAD_AGAIN: Duration = Duration::from_secs(3600);
/// Folder of marks, one for each segment that is in the copy as damaged as it was in the pool.
const DAMAGED: &str = "damaged";
/// Objects deleted by one call. Chosen by hand: so that who calls can be stopped.
const DELETES_MAX: usize = 256;

/// How a copy is made.
#[derive(Clone, Copy, Debug)]
pub struct CopierOptions {
    /// Bytes a second that are written to the copy, at most.
    pub bytes_per_second: Option<u64>,
    /// How long what is replaced stays in the copy.
    pub grace: Duration,
}

impl Default for CopierOptions {
    fn default() -> Self {
        CopierOptions { bytes_per_second: None, grace: GRACE }
    }
}

/// A state that the copy holds whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopiedState {
    /// Number of the metadata's manifest: what [`crate::map::view::state_view`] shows it by.
    pub manifest: u64,
    /// Epoch that committed last.
    pub epoch: Epoch,
    /// Everything of the log up to here is in it, but for volumes that are aside.
    pub destaged_lsn: Lsn,
    /// Commits since the pool was made.
    pub commit_number: u64,
    /// Volumes of which it has an earlier state, because the pool's store lacks what side files hold.
    pub aside_count: u64,
    /// Segments that it names.
    pub segment_count: u64,
    /// Bytes of their objects.
    pub segment_bytes: u64,
    /// Tables of the metadata.
    pub table_count: u64,
    /// First number that no segment of it has.
    pub next_segment: u64,
}

/// How far a pass is, and what was done since the start. Shared with whoever shows it.
#[derive(Debug, Default)]
pub struct CopyProgress {
    copied_bytes: AtomicU64,
    copied_count: AtomicU64,
    deleted_count: AtomicU64,
    damaged_count: AtomicU64,
    missing_count: AtomicU64,
    looked_segment: AtomicU64,
    next_segment: AtomicU64,
    waiting_count: AtomicU64,
}

/// [`CopyProgress`] at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyCounts {
    /// Bytes written to the copy.
    pub copied_bytes: u64,
    /// Objects written.
    pub copied_count: u64,
    /// Objects deleted in the copy.
    pub deleted_count: u64,
    /// Segments that were damaged in the pool's store when they were copied.
    pub damaged_count: u64,
    /// Segments that are missing in the pool's store.
    pub missing_count: u64,
    /// Of the numbers of segments, this many thousandths are done in the pass that runs; `None` between passes.
    pub pass_permille: Option<u64>,
    /// Replaced objects that wait to be deleted in the copy.
    pub waiting_count: u64,
}

impl CopyProgress {
    /// At this moment.
    #[must_use]
    pub fn counts(&self) -> CopyCounts {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let next = load(&self.next_segment);
        CopyCounts {
            copied_bytes: load(&self.copied_bytes),
            copied_count: load(&self.copied_count),
            deleted_count: load(&self.deleted_count),
            damaged_count: load(&self.damaged_count),
            missing_count: load(&self.missing_count),
            pass_permille: (next > 0).then(|| load(&self.looked_segment) * 1000 / next),
            waiting_count: load(&self.waiting_count),
        }
    }

    fn set_pass(&self, looked: u64, next: u64) {
        self.looked_segment.store(looked.min(next), Ordering::Relaxed);
        self.next_segment.store(next, Ordering::Relaxed);
    }
}

/// What the copy holds of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    epoch: Epoch,
    id: SegmentId,
}

/// What the pool's store had of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Whole,
    Damaged,
    Missing,
}

/// What is no longer needed.
#[derive(Debug)]
struct Doomed {
    path: Path,
    /// The first published state that does not name it.
    since_state: u64,
    since: Instant,
}

/// What a pass has found to be replaced, until its state is published.
#[derive(Debug, Default)]
struct Replaced {
    commit_number: u64,
    segments: Vec<u64>,
    tables: BTreeSet<Path>,
    manifests: BTreeSet<u64>,
    /// Of the listing: other objects of the copy's folders.
    strays: Vec<Path>,
}

/// See the module. One for each copy at a time.
pub struct Copier {
    inner: Arc<Inner>,
    target: Arc<dyn ObjectStore>,
    options: CopierOptions,
    progress: Arc<CopyProgress>,
    pace: Pace,
    segments: BTreeMap<u64, Held>,
    tables: BTreeSet<Path>,
    manifests: BTreeSet<u64>,
    strays: Vec<Path>,
    /// Segments that were damaged or missing in the pool's store, and when that was found; `None`: before this start.
    bad: BTreeMap<u64, Option<Instant>>,
    replaced: Option<Replaced>,
    doomed: VecDeque<Doomed>,
    last_commit: Option<u64>,
}

impl std::fmt::Debug for Copier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Copier").field("segments", &self.segments.len()).finish_non_exhaustive()
    }
}

impl Tier {
    /// Looks what the copy in `target` holds. Call its methods from the background runtime.
    ///
    /// # Errors
    /// `Unavailable` or `Denied` where the copy cannot be listed.
    pub async fn copier(
        &self,
        target: Arc<dyn ObjectStore>,
        options: CopierOptions,
        progress: Arc<CopyProgress>,
    ) -> Result<Copier> {
        self.inner.check_writable()?;
        let mut copier = Copier {
            inner: self.inner.clone(),
            target,
            options,
            progress,
            pace: Pace::new(options.bytes_per_second),
            segments: BTreeMap::new(),
            tables: BTreeSet::new(),
            manifests: BTreeSet::new(),
            strays: Vec::new(),
            bad: BTreeMap::new(),
            replaced: None,
            doomed: VecDeque::new(),
            last_commit: None,
        };
        copier.list().await?;
        Ok(copier)
    }
}

impl Copier {
    async fn list(&mut self) -> Result<()> {
        let failed = |cause| target_error("list the copy", cause);
        let mut listing = self.target.list(Some(&Path::from(FOLDER)));
        while let Some(found) = listing.try_next().await.map_err(failed)? {
            let Some((epoch, number, id)) = parse_object_path(&found.location) else { continue };
            if let Some(other) = self.segments.insert(number.0, Held { epoch, id }) {
                // The first pass finds which of them it needs, and copies it again.
                self.strays.push(path_of(number.0, other));
            }
        }
        let mut listing = self.target.list(Some(&Path::from(DAMAGED)));
        while let Some(found) = listing.try_next().await.map_err(failed)? {
            match damaged_number(&found.location) {
                Some(number) if self.segments.contains_key(&number) => {
                    self.bad.insert(number, None);
                    self.progress.damaged_count.fetch_add(1, Ordering::Relaxed);
                }
                _ => self.strays.push(found.location),
            }
        }
        let mut listing = self.target.list(Some(&database::table_folder()));
        while let Some(found) = listing.try_next().await.map_err(failed)? {
            self.tables.insert(found.location);
        }
        let mut listing = self.target.list(Some(&database::manifest_folder()));
        while let Some(found) = listing.try_next().await.map_err(failed)? {
            self.manifests.extend(database::manifest_number(&found.location));
        }
        Ok(())
    }

    /// Brings the copy up to the state that the pool's store holds now. `None`: it has that one already. The state
    /// counts once the caller has published it, and said so by [`Copier::published`].
    ///
    /// # Errors
    /// `Unavailable` when a store does not answer, or the state was overtaken; call it again, what was copied stays.
    /// `Denied` where the copy refuses; `Invalid` for a copy that holds a later state than the pool; `Corrupt` for
    /// one of another pool, and for metadata that does not verify.
    pub async fn pass(&mut self) -> Result<Option<CopiedState>> {
        // Of a pass whose state was not published.
        self.strays.extend(self.replaced.take().into_iter().flat_map(|replaced| replaced.strays));
        if self.last_commit == Some(self.inner.map.status().commit_number) {
            return Ok(None);
        }
        let hold = self.inner.orphans.hold();
        let options =
            DatabaseOptions { cache_bytes: CACHE_BYTES, ..self.inner.options.database.clone() };
        let db = Arc::new(Database::read_only(self.inner.store.clone(), &options).await?);
        let done = self.pass_over(&db, &hold).await;
        self.progress.set_pass(0, 0);
        if let Err(error) = db.close().await {
            tracing::debug!(error = %error.chain(), "a reader that is no longer wanted");
        }
        done
    }

    async fn pass_over(&mut self, db: &Arc<Database>, hold: &Hold) -> Result<Option<CopiedState>> {
        let objects = db.objects();
        if let Some(newest) = self.manifests.last().filter(|newest| **newest > objects.manifest) {
            let what = format!(
                "copy the pool: the copy holds state {newest}, which is later than the pool's {}: the pool was put \
                 back to an earlier state, or it is not the one that the copy was made of. Nothing was changed there; \
                 copy to another prefix",
                objects.manifest
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let manifest = database::manifest_path(objects.manifest);
        let manifest_bytes = self.read_source(&manifest).await?;
        let small = MapOptions { page_cache_bytes: 0, segment_cache_bytes: 64 << 10 };
        let (map, writer) = Map::read_only(db.clone(), &self.inner.pool_key, small).await?;
        let root = *writer.root();
        if self.last_commit == Some(root.commit_number) {
            return Ok(None);
        }
        hold.set_below(root.next_segment);
        let planted = self.inner.options.planted;
        if planted.copy_without_hold {
            hold.set_below(0);
        }
        if planted.manifest_first {
            self.put_manifest(objects.manifest, manifest_bytes.clone()).await?;
        }
        self.progress.set_pass(0, root.next_segment);
        let mut replaced = Replaced { commit_number: root.commit_number, ..Replaced::default() };
        self.copy_tables(&objects).await?;
        let (segment_count, segment_bytes) =
            self.copy_segments(&map, &root, hold, &mut replaced).await?;
        for number in objects.earlier.difference(&self.manifests.clone()) {
            let path = database::manifest_path(*number);
            match self.inner.store.get(&path).await {
                Ok(got) => {
                    let bytes = got.bytes().await.map_err(|cause| source_error(&path, cause))?;
                    self.put_manifest(*number, bytes).await?;
                }
                // Its time was over.
                Err(object_store::Error::NotFound { .. }) => {}
                Err(cause) => return Err(source_error(&path, cause)),
            }
        }
        self.put_manifest(objects.manifest, manifest_bytes).await?;
        replaced.tables = self.tables.difference(&objects.tables).cloned().collect();
        let is_needed =
            |number: &u64| *number == objects.manifest || objects.earlier.contains(number);
        replaced.manifests =
            self.manifests.iter().copied().filter(|number| !is_needed(number)).collect();
        let needed = |path: &Path| {
            parse_object_path(path).is_some_and(|(epoch, number, id)| {
                self.segments.get(&number.0) == Some(&Held { epoch, id })
            })
        };
        replaced.strays = std::mem::take(&mut self.strays);
        replaced.strays.retain(|path| !needed(path));
        self.replaced = Some(replaced);
        Ok(Some(CopiedState {
            manifest: objects.manifest,
            epoch: root.epoch,
            destaged_lsn: root.destaged,
            commit_number: root.commit_number,
            aside_count: map.asides().len() as u64,
            segment_count,
            segment_bytes,
            table_count: objects.tables.len() as u64,
            next_segment: root.next_segment,
        }))
    }

    async fn copy_tables(&mut self, objects: &StateObjects) -> Result<()> {
        let missing: Vec<Path> = objects.tables.difference(&self.tables).cloned().collect();
        let this = &*self;
        let (copied, done) = each(missing, |path| async move {
            this.copy_table(&path).await?;
            Ok(path)
        })
        .await;
        // Also of a pass that ends here: the next one does not copy them again.
        self.tables.extend(copied);
        done
    }

    /// Returns how many segments the state has, and their bytes.
    async fn copy_segments(
        &mut self,
        map: &Map,
        root: &Root,
        hold: &Hold,
        replaced: &mut Replaced,
    ) -> Result<(u64, u64)> {
        let (mut count, mut bytes, mut last) = (0, 0, 0);
        loop {
            let (records, next) = map.live_after(last, STEP).await?;
            let end = next.unwrap_or(u64::MAX);
            let named: BTreeMap<u64, SegmentRecord> =
                records.iter().map(|(record, _)| (record.info.number.0, *record)).collect();
            let has = |number: &u64, held: &Held| {
                named.get(number).is_some_and(|record| held_of(&record.info) == *held)
            };
            let mut gone_numbers = Vec::new();
            let gone =
                self.segments.range(last + 1..=end).filter(|(number, held)| !has(number, held));
            for (number, held) in gone {
                match named.contains_key(number) {
                    // Of a life of the pool that was undone. It is copied under its own name.
                    true => self.strays.push(path_of(*number, *held)),
                    false => gone_numbers.push(*number),
                }
            }
            for number in gone_numbers {
                // A record that does not open was passed over: what the copy has of it may be all that there is.
                match map.find_segment(number).await {
                    Ok(None) => replaced.segments.push(number),
                    Ok(Some(_)) => {}
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        self.note_bad(number, Found::Damaged);
                    }
                    Err(error) => return Err(error),
                }
            }
            let is_wanted = |info: &SegmentInfo| match self.bad.get(&info.number.0) {
                Some(at) => at.is_none_or(|at| at.elapsed() > BAD_AGAIN),
                None => self.segments.get(&info.number.0) != Some(&held_of(info)),
            };
            let missing: Vec<SegmentInfo> =
                named.values().map(|record| record.info).filter(is_wanted).collect();
            let this = &*self;
            let (copied, done) = each(missing, |info| async move {
                let found = this.copy_segment(&info).await?;
                this.progress.looked_segment.fetch_max(info.number.0, Ordering::Relaxed);
                Ok((info, found))
            })
            .await;
            for (info, found) in copied {
                let number = info.number.0;
                match found {
                    Found::Whole => {
                        if self.bad.remove(&number).is_some() {
                            self.strays.push(damaged_path(number));
                        }
                    }
                    Found::Damaged | Found::Missing => self.note_bad(number, found),
                }
                if found != Found::Missing {
                    self.segments.insert(number, held_of(&info));
                }
            }
            done?;
            count += named.len() as u64;
            bytes += named.values().map(|record| u64::from(record.info.object_bytes)).sum::<u64>();
            let Some(next) = next else { return Ok((count, bytes)) };
            last = next;
            hold.release_below(last + 1);
            self.progress.set_pass(last, root.next_segment);
        }
    }

    /// Counts it once, and notes when it was found.
    fn note_bad(&mut self, number: u64, found: Found) {
        let is_new = self.bad.insert(number, Some(Instant::now())).is_none();
        let count = match found {
            Found::Missing => &self.progress.missing_count,
            Found::Whole | Found::Damaged => &self.progress.damaged_count,
        };
        count.fetch_add(is_new.into(), Ordering::Relaxed);
    }

    async fn copy_segment(&self, info: &SegmentInfo) -> Result<Found> {
        self.pace.wait(u64::from(info.object_bytes)).await;
        let _place = self.inner.copy_places.acquire().await;
        let path = info.object_path();
        let (mut is_second, mut is_damaged) = (false, false);
        let planted = self.inner.options.planted;
        let object = loop {
            let object = match self.inner.store.get(&path).await {
                Ok(got) => got.bytes().await,
                Err(cause) => Err(cause),
            };
            let object = match object {
                Ok(object) => object,
                Err(object_store::Error::NotFound { .. }) => {
                    self.check_missing(info).await?;
                    return Ok(Found::Missing);
                }
                Err(cause) => return Err(source_error(&path, cause)),
            };
            match verify(&self.inner, info, &object).await? {
                None => break object,
                // The way may have been bad, not the object.
                Some(_) if !is_second => is_second = true,
                Some(why) => {
                    if !planted.damage_overwrites && self.has_whole(info).await? {
                        return Ok(Found::Whole);
                    }
                    // Before it: whoever copies next knows that this one is to be looked at again.
                    let mark = damaged_path(info.number.0);
                    let marked = self.target.put(&mark, PutPayload::new());
                    marked.await.map_err(|cause| target_error(format!("copy {path}"), cause))?;
                    tracing::error!(
                        object = %path, why,
                        "a segment is damaged in the pool's store, and was copied as it is; `spindle fsck` says what \
                         it holds"
                    );
                    is_damaged = true;
                    break object;
                }
            }
        };
        let bytes = object.len() as u64;
        let put = self.target.put(&path, object.into()).await;
        put.map_err(|cause| target_error(format!("copy {path}"), cause))?;
        self.count(bytes);
        Ok(if is_damaged { Found::Damaged } else { Found::Whole })
    }

    /// What the copy has of a segment is whole: it was copied before the damage, or put there since.
    async fn has_whole(&self, info: &SegmentInfo) -> Result<bool> {
        let path = info.object_path();
        let failed = |cause| target_error(format!("read {path} of the copy"), cause);
        let object = match self.target.get(&path).await {
            Ok(got) => got.bytes().await.map_err(failed)?,
            Err(object_store::Error::NotFound { .. }) => return Ok(false),
            Err(cause) => return Err(failed(cause)),
        };
        Ok(verify(&self.inner, info, &object).await?.is_none())
    }

    /// A segment that was not there is damage only if the pool still names it, and is still ours: whoever has it now may
    /// have reclaimed that.
    async fn check_missing(&self, info: &SegmentInfo) -> Result<()> {
        let named = {
            let writer = self.inner.writer.lock().await;
            self.inner.map.check(&writer)?;
            self.inner.map.find_segment(info.number.0).await?
        };
        if named.is_none_or(|record| record.info != *info) {
            let what = "copy the pool: it has reclaimed a segment of the state that was being copied; a newer state is \
                        copied instead";
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        if !self.inner.options.planted.missing_unowned {
            self.inner.check_owner().await?;
        }
        tracing::error!(
            object = %info.object_path(),
            "a segment is missing in the pool's store, and so in the copy; `spindle fsck` says what it held"
        );
        Ok(())
    }

    async fn copy_table(&self, path: &Path) -> Result<()> {
        let head = self.inner.store.head(path).await;
        let bytes = head.map_err(|cause| source_error(path, cause))?.size;
        let (from, to) = (&self.inner.store, &self.target);
        copy_parts(from, to, (path, bytes), &self.pace, &self.inner.copy_places).await?;
        self.count(bytes);
        Ok(())
    }

    async fn read_source(&self, path: &Path) -> Result<Bytes> {
        let got = self.inner.store.get(path).await;
        let got = got.map_err(|cause| source_error(path, cause))?;
        got.bytes().await.map_err(|cause| source_error(path, cause))
    }

    async fn put_manifest(&mut self, number: u64, bytes: Bytes) -> Result<()> {
        let path = database::manifest_path(number);
        let failed = |cause| target_error(format!("copy {path}"), cause);
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let payload = PutPayload::from(bytes.clone());
        match self.target.put_opts(&path, payload, options).await {
            Ok(_) => {}
            // By an earlier pass, or a try whose answer was lost.
            Err(
                object_store::Error::AlreadyExists { .. }
                | object_store::Error::Precondition { .. },
            ) => {
                let found = self.target.get(&path).await.map_err(failed)?;
                if found.bytes().await.map_err(failed)? != bytes {
                    let what = format!(
                        "copy the pool: the copy holds another {path}: another pool was copied there, or this one in \
                         another life. Nothing was changed there; copy to another prefix"
                    );
                    return Err(Error::new(ErrorKind::Corrupt, what));
                }
            }
            Err(cause) => return Err(failed(cause)),
        }
        self.manifests.insert(number);
        self.count(bytes.len() as u64);
        Ok(())
    }

    fn count(&self, bytes: u64) {
        self.progress.copied_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.progress.copied_count.fetch_add(1, Ordering::Relaxed);
    }

    /// The state of the last pass counts now, as number `state` of the published ones: what it does not name will be
    /// deleted in the copy.
    pub fn published(&mut self, state: u64) {
        let Some(replaced) = self.replaced.take() else { return };
        let Replaced { commit_number, segments, tables, manifests, strays } = replaced;
        self.last_commit = Some(commit_number);
        let mut paths = strays;
        for number in segments {
            paths.extend(self.segments.remove(&number).map(|held| path_of(number, held)));
            if self.bad.remove(&number).is_some() {
                paths.push(damaged_path(number));
            }
        }
        for path in tables {
            self.tables.remove(&path);
            paths.push(path);
        }
        for number in manifests {
            self.manifests.remove(&number);
            paths.push(database::manifest_path(number));
        }
        let since = Instant::now();
        let doomed = paths.into_iter().map(|path| Doomed { path, since_state: state, since });
        self.doomed.extend(doomed);
        let excess = self.doomed.len().saturating_sub(DOOMED_MAX);
        self.doomed.drain(..excess);
        self.progress.waiting_count.store(self.doomed.len() as u64, Ordering::Relaxed);
    }

    /// Deletes some of what no published state names since long enough, and no pin keeps: `pinned` is the oldest
    /// state that somebody reads. To be called while the caller knows that the copy is still its own.
    ///
    /// # Errors
    /// `Unavailable` or `Denied`; what is left is deleted later. `Fenced` when the pool is not ours any more.
    pub async fn collect(&mut self, pinned: Option<u64>) -> Result<u64> {
        let is_pin_ignored = self.inner.options.planted.pin_ignored;
        let is_free = |doomed: &Doomed| {
            doomed.since.elapsed() >= self.options.grace
                && (is_pin_ignored || pinned.is_none_or(|pinned| pinned >= doomed.since_state))
        };
        // In the order in which they were replaced, so that none is free behind one that is not.
        let count = self.doomed.iter().take_while(|doomed| is_free(doomed)).count();
        if count == 0 {
            return Ok(0);
        }
        self.inner.check_owner().await?;
        for done in 0..count.min(DELETES_MAX) {
            let Some(doomed) = self.doomed.front() else { return Ok(done as u64) };
            match self.target.delete(&doomed.path).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
                Err(cause) => {
                    return Err(target_error(format!("delete {} in the copy", doomed.path), cause));
                }
            }
            self.doomed.pop_front();
            self.progress.deleted_count.fetch_add(1, Ordering::Relaxed);
            self.progress.waiting_count.store(self.doomed.len() as u64, Ordering::Relaxed);
        }
        Ok(count.min(DELETES_MAX) as u64)
    }
}

/// Copies an object of so many bytes. A large one part by part: a request that waits for its turn in the middle would come
/// to its end.
async fn copy_parts(
    from: &Arc<dyn ObjectStore>,
    to: &Arc<dyn ObjectStore>,
    (path, bytes): (&Path, u64),
    pace: &Pace,
    places: &Semaphore,
) -> Result<()> {
    let failed = |cause| target_error(format!("copy {path}"), cause);
    let read = async |range: Range<u64>| {
        let piece = from.get_range(path, range.clone()).await;
        let piece = piece.map_err(|cause| source_error(path, cause))?;
        check_length(path, piece.len() as u64, range.end - range.start)?;
        Ok::<_, Error>(piece)
    };
    let part_bytes = PART_BYTES as u64;
    if bytes <= part_bytes {
        pace.wait(bytes).await;
        let _place = places.acquire().await;
        return to.put(path, read(0..bytes).await?.into()).await.map(drop).map_err(failed);
    }
    let upload = to.put_multipart(path).await.map_err(failed)?;
    let mut parts = WriteMultipart::new_with_chunk_size(upload, PART_BYTES);
    for start in (0..bytes).step_by(PART_BYTES) {
        let range = start..bytes.min(start + part_bytes);
        pace.wait(range.end - range.start).await;
        let _place = places.acquire().await;
        let next = async {
            let piece = read(range).await?;
            parts.wait_for_capacity(1).await.map_err(failed)?;
            Ok(piece)
        };
        match next.await {
            Ok(piece) => parts.put(piece),
            Err(error) => {
                // What is left of it is the store's to clean.
                let _ = parts.abort().await;
                return Err(error);
            }
        }
    }
    parts.finish().await.map(drop).map_err(failed)
}

/// What is wrong with a segment's object, if something is.
pub(crate) async fn verify(
    inner: &Inner,
    info: &SegmentInfo,
    object: &Bytes,
) -> Result<Option<String>> {
    let (key, object, info, pool) =
        (inner.pool_key.clone(), object.clone(), *info, inner.options.pool);
    let volume_keys = inner.options.volume_keys.clone();
    let check = move || match check_object(&key, &volume_keys, &object) {
        Ok(found) if found.directory.info != info || found.directory.pool != pool => {
            Some("it is another one".to_owned())
        }
        Ok(found) => found.damage(),
        Err(error) => Some(error.to_string()),
    };
    let checked = tokio::task::spawn_blocking(check).await;
    checked.map_err(|cause| Error::with_source(ErrorKind::Io, "verify a segment", cause))
}

/// Does something to each, a few at a time. Returns what was done before the first failure, and that.
async fn each<A, B, F>(all: Vec<A>, of: impl Fn(A) -> F) -> (Vec<B>, Result<()>)
where
    F: Future<Output = Result<B>>,
{
    let mut done = Vec::with_capacity(all.len());
    let mut running = futures::stream::iter(all).map(of).buffer_unordered(OBJECTS_AT_ONCE);
    loop {
        match running.try_next().await {
            Ok(Some(one)) => done.push(one),
            Ok(None) => return (done, Ok(())),
            Err(error) => return (done, Err(error)),
        }
    }
}

/// Marks a segment that was damaged in the pool's store when it was copied.
fn damaged_path(number: u64) -> Path {
    Path::from(format!("{DAMAGED}/{number:016x}"))
}

fn damaged_number(path: &Path) -> Option<u64> {
    let name = path.as_ref().strip_prefix(DAMAGED)?.strip_prefix('/')?;
    (name.len() == 16).then(|| u64::from_str_radix(name, 16).ok()).flatten()
}

fn held_of(info: &SegmentInfo) -> Held {
    Held { epoch: info.epoch, id: info.id }
}

fn path_of(number: u64, held: Held) -> Path {
    let info = SegmentInfo {
        number: SegmentNumber(number),
        epoch: held.epoch,
        id: held.id,
        algorithm: block::seal::Algorithm::default(),
        key: KeyId::POOL,
        object_bytes: 0,
        frame_count: 0,
    };
    info.object_path()
}

fn check_length(path: &Path, read: u64, said: u64) -> Result<()> {
    if read == said {
        return Ok(());
    }
    let what = format!("copy {path}: {read} bytes came of {said}");
    Err(Error::new(ErrorKind::Unavailable, what))
}

fn source_error(path: &Path, cause: object_store::Error) -> Error {
    Error::with_source(ErrorKind::Unavailable, format!("copy {path}: read it"), cause)
}

fn target_error(doing: impl Into<String>, cause: object_store::Error) -> Error {
    let kind = match cause {
        object_store::Error::PermissionDenied { .. }
        | object_store::Error::Unauthenticated { .. } => ErrorKind::Denied,
        _ => ErrorKind::Unavailable,
    };
    Error::with_source(kind, doing, cause)
}

/// Spreads bytes over time.
#[derive(Debug)]
struct Pace {
    /// Bytes a second.
    rate: Option<u64>,
    free_at: Mutex<Instant>,
}

impl Pace {
    fn new(rate: Option<u64>) -> Pace {
        Pace { rate, free_at: Mutex::new(Instant::now()) }
    }

    /// Waits until so many bytes may be sent.
    async fn wait(&self, bytes: u64) {
        let Some(rate) = self.rate else { return };
        let at = {
            let mut free_at = self.free_at.lock();
            let at = (*free_at).max(Instant::now());
            *free_at = at + Duration::from_secs_f64(bytes as f64 / rate as f64);
            at
        };
        tokio::time::sleep_until(at.into()).await;
    }
}
