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
//! - A copy of some volumes has all of the metadata, and the segments that these volumes need: see [`part`].
//! - Memory is bounded: two segments ([`places`]), two parts of tables, and 40 bytes for each segment of the copy.

mod hydrate;
mod lineage;
mod origin;
mod part;
pub(crate) mod places;
mod replaced;
mod segments;
mod transfer;

pub use hydrate::{HydrateCounts, HydrateOptions, HydrateProgress, Lacking};
pub use origin::RestoredStore;
pub use part::LeftOut;

use crate::create::{Created, create};
use crate::fail_point;
use crate::heat::Hottest;
use crate::keys::KeyId;
use crate::listing::{HELD_COUNT_MAX, list_at_most};
use crate::map::Map;
use crate::map::MapOptions;
use crate::map::database::{self, Database, DatabaseOptions, StateObjects};
use crate::orphans::Hold;
use crate::segment::read::check_object;
use crate::segment::{FOLDER, SegmentId, SegmentInfo, SegmentNumber, parse_object_path};
use crate::tier::{Inner, Tier};
use block::{Epoch, Error, ErrorKind, Lsn, Result};
use bytes::Bytes;
use futures::TryStreamExt;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use places::Places;
use replaced::{Doomed, Replaced};
use segments::Bad;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use transfer::{Pace, copy_parts, each, source_error, target_error};

/// Segment records taken from the metadata at a time.
const STEP: usize = 1024;
/// Objects of all copies of a process that are on their way at the same time. Chosen by hand: one is read while
/// the one before is written.
pub const OBJECTS_AT_ONCE: usize = 2;
/// Memory of the metadata that a pass reads.
const CACHE_BYTES: u64 = 4 << 20;
/// Longest that a replaced object stays before it is deleted, unless a pin keeps it. Chosen by hand: far above what
/// it takes to find the newest state and to pin it.
const GRACE: Duration = Duration::from_secs(600);
/// Folder of marks, one for each segment that is in the copy as damaged as it was in the pool.
const DAMAGED: &str = "damaged";

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
    /// Segments that are missing in the pool's store, or could not be read there.
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
    /// The newest of them is known to be the pool's own.
    known_manifest: Option<u64>,
    strays: Vec<Path>,
    /// Permits of this copy.
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
            known_manifest: None,
            strays: Vec::new(),
            places: Places::new(&self.inner.copy_places),
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
    /// The segments of the copy that the pool's users read most, by number and with how often, most read first.
    #[must_use]
    pub fn hottest(&self) -> Vec<(u64, u32)> {
        let mut hottest = Hottest::default();
        self.segments.keys().for_each(|number| hottest.add(&self.inner.heat, *number));
        hottest.into_list()
    }

    fn listed(&self, folder: &Path) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        list_at_most(&self.target, Some(folder), HELD_COUNT_MAX)
    }

    async fn list(&mut self) -> Result<()> {
        let failed = |cause| target_error("list the copy", cause);
        let mut listing = self.listed(&Path::from(FOLDER));
        while let Some(found) = listing.try_next().await.map_err(failed)? {
            let Some((epoch, number, id)) = parse_object_path(&found.location) else { continue };
            if let Some(other) = self.segments.insert(number.0, Held { epoch, id }) {
                // The first pass finds which of them it needs, and copies it again.
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
            self.complete().await?;
            return Ok(None);
        }
        self.check_lineage().await?;
        let hold = self.inner.orphans.hold();
        let options =
            DatabaseOptions { cache_bytes: CACHE_BYTES, ..self.inner.options.database.clone() };
        let db = Arc::new(Database::read_pinned(self.inner.store.clone(), &options).await?);
        let done = self.pass_over(&db, &hold).await;
        self.progress.set_pass(0, 0);
        if let Err(error) = db.close().await {
            tracing::debug!(error = %error.chain(), "a reader that is no longer wanted");
        }
        done
    }

    async fn pass_over(&mut self, db: &Arc<Database>, hold: &Hold) -> Result<Option<CopiedState>> {
        let objects = db.objects();
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
        fail_point!("copy-tables-copied");
        let (segment_count, segment_bytes) =
            self.copy_segments(&map, &root, hold, &mut replaced).await?;
        fail_point!("copy-segments-copied");
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
        fail_point!("copy-manifest-written");
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
            aside_count: map.asides().keys().filter(|volume| self.is_of(**volume)).count() as u64,
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

    async fn copy_table(&self, path: &Path) -> Result<()> {
        let head = self.inner.store.head(path).await;
        let bytes = head.map_err(|cause| source_error(path, cause))?.size;
        let (from, to) = (&self.inner.store, &self.target);
        copy_parts(from, to, (path, bytes), &self.pace, &self.places).await?;
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
        match create(&self.target, &path, &bytes).await.map_err(failed)? {
            Created::Ours => {}
            // By an earlier pass, or a try whose answer was lost.
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

/// Marks a segment that was damaged in the pool's store when it was copied.
fn damaged_path(number: u64) -> Path {
    Path::from(format!("{DAMAGED}/{number:016x}"))
}

fn damaged_number(path: &Path) -> Option<u64> {
    let name = path.as_ref().strip_prefix(DAMAGED)?.strip_prefix('/')?;
    (name.len() == 16).then(|| u64::from_str_radix(name, 16).ok()).flatten()
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
