//! Maintains a copy of the data tier in another store, bringing it up to one state after another.
//!
//! A state consists of a manifest of the metadata database, the tables that the manifest
//! references, and the segments that the metadata has records of. All of them are immutable objects
//! that keep their names. Therefore a listing is enough to resume copying, and objects that two
//! states share are copied once.
//!
//! Invariants:
//! - Order: tables and segments first, then the manifest. A reader that finds a manifest in the
//!   copy, and knows that its state was published, finds every object that it references.
//! - The manifest is created only if absent. A copy that has a later manifest than the pool, or a
//!   different one of the same number, is refused: it holds data that this pool does not have.
//! - Objects that a state needs are not deleted in the pool before the copy has them
//!   ([`crate::leftovers::Hold`]). Beyond a bound, the pool's space takes precedence, and the copy
//!   starts again with a newer state. The published states stay complete.
//! - No object is deleted in the copy if the newest published state references it, if a reader's
//!   pin keeps it, or within a grace period for readers that are just opening an earlier state.
//! - Segments are verified while they are copied. A damaged one is copied as it is, counted and
//!   reported, and never replaces one that the copy has.
//! - A copy of some volumes has all of the metadata, and the segments that these volumes need: see
//!   [`part`].
//! - Memory is bounded: two segments ([`crate::places`]), two parts of tables, and 40 bytes for each
//!   segment of the copy.

pub(crate) mod hydrate;
mod lineage;
mod origin;
mod part;
mod replaced;
mod segments;
mod transfer;

pub use crate::places::OBJECTS_AT_ONCE;
pub use hydrate::{HydrateCounts, HydrateOptions, HydrateProgress, Lacking};
pub use origin::RestoredStore;

use crate::create::{Created, create};
use crate::fail_point;
use crate::heat::Hottest;
use crate::leftovers::Hold;
use crate::listing::{HELD_COUNT_MAX, list_at_most};
use crate::map::Map;
use crate::map::MapOptions;
use crate::map::database::{self, Database, DatabaseOptions, StateObjects};
use crate::places::Places;
use crate::pool::{Exclusions, Metadata, Pool, Segments};
use crate::repair::Repair;
use crate::segment::{SegmentId, SegmentInfo, SegmentName, SegmentNumber};
use crate::segment_store::{Listed, ObjectSegments, SegmentStore};
use async_recursion::async_recursion;
use block::{Epoch, Error, ErrorKind, Lsn, Result};
use bytes::Bytes;
use futures::TryStreamExt;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use replaced::{Doomed, Replaced};
use segments::Bad;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Semaphore;
use transfer::{Object, Pace, copy_parts, each, source_error, target_error};

/// Segment records taken from the metadata at a time.
const STEP: usize = 1024;
/// Memory for the metadata that a pass reads.
const CACHE_BYTES: u64 = 4 << 20;
/// Time after which a replaced object is deleted, unless a pin keeps it. Chosen by hand: far longer
/// than it takes to find the newest state and to pin it.
const GRACE: Duration = Duration::from_secs(600);
/// Folder of marks, one for each segment that was damaged in the pool and copied as it was.
const DAMAGED: &str = "damaged";

/// Options for making a copy.
#[derive(Clone, Copy, Debug)]
pub struct CopierOptions {
    /// Limit on the bytes per second written to the copy.
    pub bytes_per_second: Option<u64>,
    /// Time for which replaced objects stay in the copy.
    pub grace: Duration,
}

impl Default for CopierOptions {
    fn default() -> Self {
        CopierOptions { bytes_per_second: None, grace: GRACE }
    }
}

/// A state that is complete in the copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopiedState {
    /// Number of the metadata's manifest, by which [`crate::map::snapshot_store::state_view`] shows the
    /// state.
    pub manifest: u64,
    /// Epoch that committed last.
    pub epoch: Epoch,
    /// LSN up to which the state contains all entries of the log, except for volumes that are
    /// aside.
    pub destaged_lsn: Lsn,
    /// Commits since the pool was created.
    pub commit_number: u64,
    /// Volumes that have an earlier state in it, because the pool's store lacks the entries in
    /// their spill files.
    pub stalled_count: u64,
    /// Segments that the state references.
    pub segment_count: u64,
    /// Bytes of their objects.
    pub segment_bytes: u64,
    /// Tables of the metadata.
    pub table_count: u64,
    /// The first segment number above all segments of the state.
    pub next_segment: u64,
}

/// Progress of the current pass, and totals since the start. Shared with the code that reports it.
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
    /// Segments that are missing in the pool's store, or could not be read there.
    pub missing_count: u64,
    /// Progress of the current pass over the segment numbers, in thousandths; `None` between
    /// passes.
    pub pass_permille: Option<u64>,
    /// Replaced objects that wait to be deleted in the copy.
    pub waiting_count: u64,
}

impl CopyProgress {
    /// Returns the counts at this moment.
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

/// A segment in the copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    epoch: Epoch,
    id: SegmentId,
}

/// The copier; see the module. There is at most one for each copy.
pub struct Copier {
    source: CopySource,
    target: Arc<dyn ObjectStore>,
    /// The segments in `target`.
    copied: ObjectSegments,
    options: CopierOptions,
    progress: Arc<CopyProgress>,
    pace: Pace,
    segments: BTreeMap<u64, Held>,
    tables: BTreeSet<Path>,
    manifests: BTreeSet<u64>,
    /// Newest manifest that is known to belong to the pool.
    known_manifest: Option<u64>,
    strays: Vec<Path>,
    /// Permits for this copy.
    places: Places,
    /// Segments that were damaged, missing or unreadable in the pool's store.
    bad: BTreeMap<u64, Bad>,
    /// `None`: all volumes.
    part: Option<part::Part>,
    replaced: Option<Replaced>,
    doomed: VecDeque<Doomed>,
    last_commit: Option<u64>,
}

impl std::fmt::Debug for Copier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Copier").field("segments", &self.segments.len()).finish_non_exhaustive()
    }
}

/// The pool that copies are made of.
#[derive(Clone)]
pub(crate) struct CopySource {
    pub pool: Arc<Pool>,
    pub metadata: Arc<Metadata>,
    pub segments: Arc<Segments>,
    pub exclusions: Arc<Exclusions>,
    pub repair: Arc<Repair>,
    /// The store of the metadata.
    pub objects: Arc<dyn ObjectStore>,
    pub database: DatabaseOptions,
    /// Limits the objects that are being sent to copies or brought back.
    pub places: Arc<Semaphore>,
}

impl CopySource {
    /// Implements [`crate::Tier::copier`].
    pub(crate) async fn copier(
        &self,
        target: Arc<dyn ObjectStore>,
        options: CopierOptions,
        progress: Arc<CopyProgress>,
    ) -> Result<Copier> {
        let mut copier = Copier {
            source: self.clone(),
            copied: ObjectSegments::new(target.clone()),
            target,
            options,
            progress,
            pace: Pace::new(options.bytes_per_second, self.pool.clock.clone()),
            segments: BTreeMap::new(),
            tables: BTreeSet::new(),
            manifests: BTreeSet::new(),
            known_manifest: None,
            strays: Vec::new(),
            places: Places::new(&self.places),
            bad: BTreeMap::new(),
            part: None,
            replaced: None,
            doomed: VecDeque::new(),
            last_commit: None,
        };
        copier.list().await?;
        Ok(copier)
    }
}

impl Copier {
    /// Returns the segments of the copy that the pool's users read most, with their number and read
    /// count, most read first.
    #[must_use]
    pub fn hottest(&self) -> Vec<(u64, u32)> {
        let mut hottest = Hottest::default();
        self.segments.keys().for_each(|number| hottest.add(&self.source.segments.heat, *number));
        hottest.into_list()
    }

    fn listed(&self, folder: &Path) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        list_at_most(&self.target, Some(folder), HELD_COUNT_MAX)
    }

    async fn list(&mut self) -> Result<()> {
        let failed = |cause| target_error("list the copy", cause);
        let mut listing = self.copied.list(HELD_COUNT_MAX);
        while let Some(found) = listing.try_next().await.map_err(failed)? {
            let Listed::Segment { name: SegmentName { epoch, number, id }, .. } = found else {
                continue;
            };
            if let Some(other) = self.segments.insert(number.0, Held { epoch, id }) {
                // The first pass determines which of the two it needs, and copies it again.
                self.strays.push(path_of(number.0, other));
            }
        }
        let mut listing = self.listed(&Path::from(DAMAGED));
        while let Some(found) = listing.try_next().await.map_err(failed)? {
            match damaged_number(&found.location) {
                Some(number) if self.segments.contains_key(&number) => {
                    self.bad.insert(number, Bad::of_listing());
                    self.progress.damaged_count.fetch_add(1, Ordering::Relaxed);
                }
                _ => self.strays.push(found.location),
            }
        }
        let mut listing = self.listed(&database::table_folder());
        while let Some(found) = listing.try_next().await.map_err(failed)? {
            self.tables.insert(found.location);
        }
        let mut listing = self.listed(&database::manifest_folder());
        while let Some(found) = listing.try_next().await.map_err(failed)? {
            self.manifests.extend(database::manifest_number(&found.location));
        }
        Ok(())
    }

    /// Brings the copy up to the state that the pool's store holds now. Returns `None` if the copy
    /// has that state already. The state counts only after the caller has published it and has
    /// called [`Copier::published`].
    ///
    /// # Errors
    /// `Unavailable` when a store does not answer, or the state was superseded; call it again, the
    /// copied objects are kept. `Denied` when the copy refuses; `Invalid` for a copy that holds a
    /// later state than the pool; `Corrupt` for a copy of another pool, and for metadata that does
    /// not verify.
    #[async_recursion]
    pub async fn pass(&mut self) -> Result<Option<CopiedState>> {
        // From a pass whose state was not published.
        self.strays.extend(self.replaced.take().into_iter().flat_map(|replaced| replaced.strays));
        if self.last_commit == Some(self.source.metadata.map.status().commit_number) {
            self.complete().await?;
            return Ok(None);
        }
        self.check_lineage().await?;
        let hold = self.source.segments.leftovers.hold();
        let options = DatabaseOptions { cache_bytes: CACHE_BYTES, ..self.source.database.clone() };
        let db = Arc::new(Database::read_pinned(self.source.objects.clone(), &options).await?);
        let done = self.pass_over(&db, &hold).await;
        self.progress.set_pass(0, 0);
        if let Err(error) = db.close().await {
            tracing::debug!(error = %error.chain(), "could not close a metadata reader");
        }
        done
    }

    async fn pass_over(&mut self, db: &Arc<Database>, hold: &Hold) -> Result<Option<CopiedState>> {
        let objects = db.objects();
        let manifest = database::manifest_path(objects.manifest);
        let manifest_bytes = self.read_source(&manifest).await?;
        let small = MapOptions {
            page_cache_bytes: 0,
            segment_cache_bytes: 64 << 10,
            ..MapOptions::default()
        };
        let (map, writer) = Map::read_only(db.clone(), &self.source.pool.key, small).await?;
        let root = *writer.root();
        if self.last_commit == Some(root.commit_number) {
            return Ok(None);
        }
        hold.set_below(root.next_segment);
        let seeded_bugs = self.source.pool.seeded_bugs;
        if seeded_bugs.copy_without_hold {
            hold.set_below(0);
        }
        if seeded_bugs.manifest_first {
            self.put_manifest(objects.manifest, manifest_bytes.clone()).await?;
        }
        self.progress.set_pass(0, root.next_segment);
        let mut replaced = Replaced { commit_number: root.commit_number, ..Replaced::default() };
        self.copy_tables(&objects).await?;
        fail_point!("copy-tables-copied");
        let (segment_count, segment_bytes) =
            self.copy_segments(&map, &root, hold, &mut replaced).await?;
        fail_point!("copy-segments-copied");
        for number in objects.earlier.difference(&self.manifests.clone()) {
            let path = database::manifest_path(*number);
            match self.source.objects.get(&path).await {
                Ok(got) => {
                    let bytes = got.bytes().await.map_err(|cause| source_error(&path, cause))?;
                    self.put_manifest(*number, bytes).await?;
                }
                // It has expired.
                Err(object_store::Error::NotFound { .. }) => {}
                Err(cause) => return Err(source_error(&path, cause)),
            }
        }
        self.put_manifest(objects.manifest, manifest_bytes).await?;
        fail_point!("copy-manifest-written");
        replaced.tables = self.tables.difference(&objects.tables).cloned().collect();
        let is_needed =
            |number: &u64| *number == objects.manifest || objects.earlier.contains(number);
        replaced.manifests =
            self.manifests.iter().copied().filter(|number| !is_needed(number)).collect();
        let needed = |path: &Path| {
            SegmentName::parse(path).is_some_and(|SegmentName { epoch, number, id }| {
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
            stalled_count: map
                .stalled_volumes()
                .keys()
                .filter(|volume| self.is_of(**volume))
                .count() as u64,
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
        // Record them even if the pass ends here, so that the next one does not copy them again.
        self.tables.extend(copied);
        done
    }

    async fn copy_table(&self, path: &Path) -> Result<()> {
        let head = self.source.objects.head(path).await;
        let bytes = head.map_err(|cause| source_error(path, cause))?.size;
        let (from, to) = (&self.source.objects, &self.target);
        copy_parts(from, to, Object { path, bytes }, &self.pace, &self.places).await?;
        self.count(bytes);
        Ok(())
    }

    async fn read_source(&self, path: &Path) -> Result<Bytes> {
        let got = self.source.objects.get(path).await;
        let got = got.map_err(|cause| source_error(path, cause))?;
        got.bytes().await.map_err(|cause| source_error(path, cause))
    }

    async fn put_manifest(&mut self, number: u64, bytes: Bytes) -> Result<()> {
        let path = database::manifest_path(number);
        let failed = |cause| target_error(format!("copy {path}"), cause);
        match create(&self.target, &path, &bytes).await.map_err(failed)? {
            Created::Ours => {}
            // Written by an earlier pass, or by an attempt whose answer was lost.
            Created::Exists => {
                let found = self.target.get(&path).await.map_err(failed)?;
                if found.bytes().await.map_err(failed)? != bytes {
                    let what = format!(
                        "copy the pool: the copy holds another {path}: another pool was copied there, or this one in \
                         another life. Nothing was changed there; copy to another prefix"
                    );
                    return Err(Error::new(ErrorKind::Corrupt, what));
                }
            }
        }
        self.manifests.insert(number);
        self.known_manifest = self.manifests.last().copied().filter(|newest| *newest == number);
        self.count(bytes.len() as u64);
        Ok(())
    }

    fn count(&self, bytes: u64) {
        self.progress.copied_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.progress.copied_count.fetch_add(1, Ordering::Relaxed);
    }
}

fn held_of(info: &SegmentInfo) -> Held {
    Held { epoch: info.epoch, id: info.id }
}

/// Returns the path of the mark for a segment that was damaged in the pool's store when it was
/// copied.
fn damaged_path(number: u64) -> Path {
    Path::from(format!("{DAMAGED}/{number:016x}"))
}

fn damaged_number(path: &Path) -> Option<u64> {
    let name = path.as_ref().strip_prefix(DAMAGED)?.strip_prefix('/')?;
    (name.len() == 16).then(|| u64::from_str_radix(name, 16).ok()).flatten()
}

fn path_of(number: u64, held: Held) -> Path {
    let Held { epoch, id } = held;
    SegmentName { epoch, number: SegmentNumber(number), id }.object_path()
}
