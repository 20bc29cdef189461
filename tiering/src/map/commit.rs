//! Changes to the map: one batch per window.
//!
//! Invariants:
//! - A commit is one database batch: page operands, range records, segment records, live blocks,
//!   volume records, spill files and the destaged LSN. After a crash all of it is there or none of
//!   it.
//! - Live blocks change in the same batch as the pages that they count. A stored block is counted
//!   until it is replaced, even while a range hides it.
//! - The caches change after the batch is durable, so readers never see anything that a crash can
//!   undo.

pub(super) mod changes;
pub(super) mod draft;

use super::dedup::encode_found;
use super::keys::{self, ROOT_KEY};
use super::layers::{LayerId, LayerRecord};
use super::pages::{self, Page};
use super::preserve::Preserve;
use super::ranges::Range;
use super::records::{NAMED_SPILL_FILES_MAX, NamedSpillFile, Root, SegmentRecord, encode_stalled};
use super::snapshots::{Prune, SnapshotChange, encode_snapshot};
use super::{Forget, LIVE, Map, PageKey};
use crate::dedup::Found;
use crate::dedup::fingerprints::FrameFingerprints;
use crate::fail_point;
use crate::segment::FrameAt;
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use bytes::Bytes;
use changes::{PageChange, draft_page, split};
use draft::Draft;
use futures::TryStreamExt;
use slatedb::WriteBatch;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Batch size in bytes beyond which pages that snapshots show get an image only if they must,
/// because each image adds copies of the contents it replaces. Chosen by hand: the size of a window
/// of scattered writes without any snapshots.
const COPIES_BYTES_MAX: u64 = if cfg!(test) { 4 << 10 } else { 32 << 20 };

/// Pages whose old contents are fetched at the same time. Chosen by hand: hides the store's latency
/// while the database's block cache is cold.
pub(super) const FETCHES_MAX: usize = 32;

/// Pages held in memory at the same time while a batch is built.
pub(super) const PAGES_AT_ONCE: usize = 256;

/// Layers remembered as having a record; beyond this number they are looked up again.
const KNOWN_LAYERS_MAX: usize = 65_536;

/// A position within a frame of a segment: one of the frame's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Segment number.
    pub segment: u64,
    /// The frame.
    pub at: FrameAt,
    /// Block within the frame.
    pub within: u8,
}

/// A change that a window makes to consecutive blocks of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The layer.
    pub layer: LayerId,
    /// First block.
    pub first_block: u64,
    /// Number of blocks: at least 1, and at most 16 if they are in a frame.
    pub block_count: u64,
    /// The place of the blocks, or `None` if they hold nothing.
    pub placed: Option<Placed>,
    /// The frame was written earlier, for other blocks.
    pub is_duplicate: bool,
}

/// All changes of one window. They are disjoint.
#[derive(Clone, Debug, Default)]
pub struct Commit {
    /// LSN of the window's last entry.
    pub last_lsn: Lsn,
    /// For a late commit, the LSN of the last entry that it brings; otherwise equal to `last_lsn`.
    /// Its changes get this LSN or a later one, but never one beyond the next snapshot of their
    /// layers.
    pub lsn: Lsn,
    /// Newest record of each volume that has one in the window.
    pub volume_records: Vec<(VolumeId, Bytes)>,
    /// Snapshots made and removed, at `last_lsn`.
    pub snapshots: Vec<SnapshotChange>,
    /// Durable segments that the changes name.
    pub segments: Vec<SegmentRecord>,
    /// In any order.
    pub changes: Vec<Change>,
    /// Number of the next segment.
    pub next_segment: u64,
    /// The complete list of spill files of each volume whose spill files change. An empty list: the
    /// volume is no longer behind.
    pub stalled_volumes: Vec<(VolumeId, Vec<NamedSpillFile>)>,
    /// The commit catches up: `last_lsn` is already destaged.
    pub is_late: bool,
    /// Fingerprints of the segments that have any.
    pub(crate) fingerprints: Vec<(u64, Vec<FrameFingerprints>)>,
    /// Results of deduplication in the window.
    pub found: Vec<(VolumeId, Found)>,
}

/// The reason why a commit was not made.
#[derive(Clone, Debug)]
pub struct CommitError {
    /// The volume whose map is the cause, if only one is.
    pub volume: Option<VolumeId>,
    /// The cause.
    pub error: Error,
}

impl From<Error> for CommitError {
    fn from(error: Error) -> Self {
        CommitError { volume: None, error }
    }
}

/// Attributes an error to the volume of a layer.
fn of_layer(layer: LayerId) -> impl Fn(Error) -> CommitError {
    move |error| CommitError { volume: Some(layer.volume()), error }
}

/// Refuses to record more spill files than can be read back.
fn check_stalled_volumes(commit: &Commit) -> Result<(), CommitError> {
    match commit.stalled_volumes.iter().find(|(_, files)| files.len() > NAMED_SPILL_FILES_MAX) {
        Some((volume, files)) => {
            let what =
                format!("note {} spill files, more than {NAMED_SPILL_FILES_MAX}", files.len());
            let error = Error::new(ErrorKind::Full, what);
            Err(CommitError { volume: Some(*volume), error })
        }
        None => Ok(()),
    }
}

/// Counts of one commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommitReport {
    /// Pages that got an operand.
    pub operand_count: u64,
    /// Pages that got an image.
    pub image_count: u64,
    /// Pages that were deleted.
    pub deleted_count: u64,
    /// Copies of pages made for snapshots.
    pub copy_count: u64,
    /// Range records made.
    pub range_count: u64,
    /// Bytes of keys and values in the batch.
    pub batch_bytes: u64,
}

/// Counts of one step of folding ranges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FoldReport {
    /// Pages visited.
    pub page_count: u64,
    /// Range records that are still waiting.
    pub ranges_left: usize,
    /// Layers that still have to be pruned.
    pub prunes_left: usize,
    /// Layers that still have to be promoted.
    pub promotes_left: usize,
}

/// The right to change the map. Only one exists.
#[derive(Debug)]
pub struct Writer {
    pub(super) root: Root,
    known_layers: HashSet<LayerId>,
    /// Layers that cannot be folded: a page below a range does not verify.
    pub(super) unfoldable: HashSet<LayerId>,
    /// Layers that cannot be pruned: a page or a copy does not verify.
    pub(super) unprunable: HashSet<LayerId>,
    /// Layers that cannot be promoted: a page of the layer or of its base does not verify.
    pub(super) unpromotable: HashSet<LayerId>,
    failed: Option<Error>,
}

impl Writer {
    pub(super) fn new(root: Root) -> Writer {
        Writer {
            root,
            known_layers: HashSet::new(),
            unfoldable: HashSet::new(),
            unprunable: HashSet::new(),
            unpromotable: HashSet::new(),
            failed: None,
        }
    }

    /// The root record of the last commit.
    #[must_use]
    pub fn root(&self) -> &Root {
        &self.root
    }

    pub(super) fn forget_known(&mut self, layer: LayerId) {
        self.known_layers.remove(&layer);
    }

    /// Checks that no commit has failed. After a failure, the contents of the database are
    /// uncertain until it is reopened.
    ///
    /// # Errors
    /// `Unavailable` once a commit has failed, or permanently `Fenced`.
    pub fn check(&self) -> Result<()> {
        match &self.failed {
            Some(error) if error.kind() == ErrorKind::Fenced => Err(error.clone()),
            Some(error) => {
                let what = "a commit has failed; the metadata database is being opened again";
                Err(Error::with_source(ErrorKind::Unavailable, what, error.clone()))
            }
            None => Ok(()),
        }
    }
}

impl Map {
    /// Commits a window. On return, the window is durable and visible to readers.
    ///
    /// If the future is dropped, the commit may or may not have happened; run it in its own task.
    ///
    /// # Errors
    /// `Fenced` if another owner has opened the map; `Corrupt` if replaced contents do not open
    /// (nothing is written then); database errors, after which the writer refuses every commit.
    pub async fn commit(
        &self,
        writer: &mut Writer,
        mut commit: Commit,
    ) -> Result<CommitReport, CommitError> {
        self.check(writer)?;
        check_stalled_volumes(&commit)?;
        commit.lsn = self.lsn_of_changes(&commit);
        self.check_duplicates(&commit).await?;
        if commit.is_late {
            self.settle_ranges(writer, &commit).await?;
        }
        let (page_changes, new_ranges) = split(&commit);
        self.make_room_for(writer, &new_ranges).await?;
        let snapshots = self.snapshots();
        let mut draft = Draft::new(self);
        let mut report =
            CommitReport { range_count: new_ranges.len() as u64, ..Default::default() };
        let mut fresh = Fresh { bytes_left: self.page_retain_bytes, pages: Vec::new() };
        for changes in page_changes.chunks(PAGES_AT_ONCE) {
            let may_copy = draft.bytes < COPIES_BYTES_MAX;
            let before = self.pages_before(changes, &snapshots, commit.lsn, may_copy).await?;
            for (change, before) in changes.iter().zip(before) {
                let living = snapshots.of(change.layer);
                let page = match &before.history {
                    Some(history) => {
                        // The segment records already count all new blocks.
                        draft.gain_duplicates(change, None);
                        draft.recount(&change.runs, std::iter::empty());
                        let preserve = Preserve {
                            layer: change.layer,
                            page: change.page,
                            lsn: commit.lsn,
                            runs: pages::assign(&before.page.runs, &change.runs),
                            ranges: self.ranges().cuts(change.layer, change.page),
                            living,
                            moved: &[],
                            base: before.base.clone(),
                            is_former: false,
                            is_promoted: false,
                        };
                        draft.preserve(&mut report, history, preserve)
                    }
                    None => {
                        draft.gain_duplicates(change, before.base_runs());
                        draft_page(&mut draft, &mut report, commit.lsn, change, &before, living)
                    }
                };
                fresh.push((change.layer, change.page), page);
                let mut named: Vec<u64> = change.duplicates.iter().map(|run| run.segment).collect();
                named.sort_unstable();
                named.dedup();
                for segment in named.into_iter().filter(|_| !self.seeded_bugs.unreferenced_back) {
                    draft.put_back_reference(segment, change.layer, change.page);
                }
            }
            tokio::task::yield_now().await;
        }
        let layers = self.draft_layers(writer, &mut draft, &page_changes, &new_ranges).await?;
        for (layer, range) in &new_ranges {
            draft.put(&keys::range_key(*layer, range.lsn, range.ordinal), &range.encode());
        }
        for record in &commit.segments {
            let number = record.info.number.0;
            draft.put(&keys::segment_key(number), &record.encode());
            *draft.live.entry(number).or_default() += i64::from(record.block_count);
        }
        for (segment, frames) in &commit.fingerprints {
            draft.put_fingerprints(*segment, frames);
        }
        let found = self.found_with(&commit.found);
        for (volume, found) in &found {
            draft.put(&keys::found_key(*volume), &encode_found(found));
        }
        let live = self.draft_live(&mut draft).await?;
        for (volume, record) in &commit.volume_records {
            draft.put(&keys::volume_key(*volume), record);
        }
        let prunes = self.draft_snapshots(&mut draft, &commit);
        for (volume, files) in &commit.stalled_volumes {
            match files.is_empty() {
                true => draft.delete(&keys::stalled_key(*volume)),
                false => draft.put(&keys::stalled_key(*volume), &encode_stalled(files)),
            }
        }
        let root = Root {
            destaged: commit.last_lsn.max(writer.root.destaged),
            commit_number: writer.root.commit_number + 1,
            next_segment: commit.next_segment.max(writer.root.next_segment),
            ..writer.root
        };
        // A version without support for snapshots, volume keys or deduplication must not open a map
        // that has them.
        let mut header = None;
        if !commit.snapshots.is_empty() && !self.opener.header().has_snapshots() {
            header = Some(self.opener.header().with_snapshots());
        }
        let is_keyed = commit.segments.iter().any(|record| !record.info.key.is_pool());
        if is_keyed && !self.opener.header().has_volume_keys() {
            let before = header.unwrap_or_else(|| self.opener.header());
            header = Some(before.with_volume_keys());
        }
        if !found.is_empty() && !self.opener.header().has_dedup() {
            let before = header.unwrap_or_else(|| self.opener.header());
            header = Some(before.with_dedup());
        }
        match &header {
            Some(header) => draft.put_root_under(header, &root),
            None => draft.put(ROOT_KEY, &root.encode()),
        }
        report.batch_bytes = draft.bytes;
        let live_delta = draft.live_delta;

        fail_point!("commit-before-write");
        self.write(writer, draft.batch).await?;
        fail_point!("commit-before-flush");
        self.flush(writer).await?;
        fail_point!("commit-after-flush");

        writer.root = root;
        if let Some(header) = header {
            self.opener.set_header(header);
        }
        if !commit.snapshots.is_empty() {
            // Only after the commit: until then readers ask for blocks that are in the overlay.
            let changed = snapshots.changed(&self.layers(), &commit.snapshots, commit.last_lsn);
            *self.snapshots.write() = changed;
            self.prunes.lock().extend(prunes);
        }
        if writer.known_layers.len() + layers.len() > KNOWN_LAYERS_MAX {
            writer.known_layers.clear();
        }
        writer.known_layers.extend(layers);
        // Snapshots between the two LSNs show the late changes.
        let forget = if commit.is_late { Forget::All } else { Forget::Nothing };
        self.apply(fresh, &new_ranges, live, forget);
        self.space.apply(&commit.segments, &[], live_delta);
        for record in commit.segments {
            let bytes = size_of::<SegmentRecord>();
            self.segments.insert(record.info.number.0, Arc::new(record), bytes);
        }
        self.volume_records.write().extend(commit.volume_records);
        self.found.write().extend(found);
        {
            let mut stalled_volumes = self.stalled_volumes.write();
            stalled_volumes.extend(commit.stalled_volumes);
            stalled_volumes.retain(|_, files| !files.is_empty());
        }
        self.commit_number.store(root.commit_number, Ordering::Release);
        self.destaged.store(root.destaged.0, Ordering::Release);
        Ok(report)
    }

    /// Checks that the segments in which duplicates were found still exist. They can be missing
    /// only if the database was reopened since: a commit of reclaim with an uncertain outcome may
    /// have turned out to be made.
    async fn check_duplicates(&self, commit: &Commit) -> Result<()> {
        let new: HashSet<u64> = commit.segments.iter().map(|record| record.info.number.0).collect();
        let named = commit.changes.iter().filter(|change| change.is_duplicate);
        let named: HashSet<u64> =
            named.filter_map(|change| change.placed).map(|placed| placed.segment).collect();
        let check = async |number| match self.find_segment(number).await? {
            Some(_) => Ok(()),
            None => {
                let what =
                    format!("segment {number} was reclaimed since duplicates were found in it");
                Err(Error::new(ErrorKind::Unavailable, what))
            }
        };
        let named = named.into_iter().filter(|number| !new.contains(number)).map(Ok);
        futures::stream::iter(named).try_for_each_concurrent(FETCHES_MAX, check).await
    }

    /// The recorded results of deduplication plus these.
    fn found_with(&self, more: &[(VolumeId, Found)]) -> Vec<(VolumeId, Found)> {
        let known = self.found.read();
        let sum = |(volume, found): &(VolumeId, Found)| {
            let mut sum = known.get(volume).copied().unwrap_or_default();
            sum += *found;
            (*volume, sum)
        };
        more.iter().map(sum).collect()
    }

    /// The LSN of a window's changes: as high as snapshots allow. It is thus never below the LSN of
    /// changes from an earlier catch-up window of the volume, and always below that of the next window.
    fn lsn_of_changes(&self, commit: &Commit) -> Lsn {
        let snapshots = self.snapshots();
        let layers = commit.changes.iter().map(|change| change.layer);
        let first_of = |layer| {
            let living = snapshots.of(layer);
            living.get(living.partition_point(|snapshot| *snapshot < commit.lsn)).copied()
        };
        let first = if commit.is_late { layers.filter_map(first_of).min() } else { None };
        first.map_or(commit.last_lsn, |snapshot| snapshot.min(commit.last_lsn))
    }

    /// Whether a record says that a page keeps counting blocks that were replaced.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn is_noted_as_keeping(&self, layer: LayerId, page: u32) -> Result<bool> {
        Ok(super::get(&self.db(), &keys::kept_key(layer, page)).await?.is_some())
    }

    /// Puts and deletes the records of snapshots; returns the prune records that result.
    fn draft_snapshots(&self, draft: &mut Draft<'_>, commit: &Commit) -> Vec<(LayerId, Prune)> {
        let mut prunes = BTreeMap::new();
        let layers = self.layers();
        for change in &commit.snapshots {
            let layer = change.layer(&layers);
            match change {
                SnapshotChange::Made { record, .. } => {
                    let key = keys::snapshot_key(layer, commit.last_lsn);
                    draft.put(&key, &encode_snapshot(record));
                }
                SnapshotChange::Removed { lsn, .. } => {
                    draft.delete(&keys::snapshot_key(layer, *lsn));
                    let before = self.prunes.lock().get(&layer).copied();
                    prunes.insert(layer, Prune::again(before));
                }
            }
        }
        for (layer, prune) in &prunes {
            draft.put(&keys::prune_key(*layer), &prune.encode());
        }
        prunes.into_iter().collect()
    }

    pub(super) async fn write(&self, writer: &mut Writer, batch: WriteBatch) -> Result<()> {
        let written = self.db().write(batch).await;
        written.inspect_err(|error| self.fail(writer, error))
    }

    pub(super) async fn flush(&self, writer: &mut Writer) -> Result<()> {
        let flushed = self.db().flush().await;
        flushed.inspect_err(|error| self.fail(writer, error))
    }

    /// Records that the contents of the database are uncertain from this failure on.
    fn fail(&self, writer: &mut Writer, error: &Error) {
        writer.failed = Some(error.clone());
        if error.kind() == ErrorKind::Fenced {
            self.set_final(error.clone());
        } else {
            self.set_ended(error.clone());
        }
    }

    /// Puts the records of layers that are written for the first time. Returns the layers that have
    /// a record once this is committed.
    async fn draft_layers(
        &self,
        writer: &Writer,
        draft: &mut Draft<'_>,
        changes: &[PageChange],
        ranges: &[(LayerId, Range)],
    ) -> Result<Vec<LayerId>, CommitError> {
        let mut layers: Vec<LayerId> = changes.iter().map(|change| change.layer).collect();
        layers.extend(ranges.iter().map(|(layer, _)| *layer));
        layers.sort_unstable();
        layers.dedup();
        layers.retain(|layer| !writer.known_layers.contains(layer));
        for layer in layers.iter().copied() {
            if self.layer(layer).await.map_err(of_layer(layer))?.is_none() {
                let volume = layer.volume();
                // Only the end of a rolled-back volume can come so late that its layer has been
                // forgotten.
                let is_former = layer != LayerId::of_volume(volume);
                let record = LayerRecord { is_former, ..LayerRecord::plain(volume) };
                draft.put(&keys::layer_key(layer), &record.encode());
            }
        }
        Ok(layers)
    }

    /// Folds the contents that ranges of a late commit's layers hide at or after the commit's LSN.
    /// An earlier late commit may have left such ranges. LSNs do not tell which of the two commits
    /// came first, and the new changes must neither be hidden by such a range nor replace it.
    async fn settle_ranges(&self, writer: &mut Writer, commit: &Commit) -> Result<(), CommitError> {
        let layers: HashSet<LayerId> = commit.changes.iter().map(|change| change.layer).collect();
        loop {
            let is_due = |(layer, range): &(LayerId, Range)| {
                layers.contains(layer) && range.lsn >= commit.lsn
            };
            let Some((layer, range)) = self.ranges().iter().find(is_due) else { return Ok(()) };
            match self.fold_run(writer, 4 * PAGES_AT_ONCE, layer, &[range]).await {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    return Err(of_layer(layer)(error));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Folds until `new` fits beside the waiting ranges. A layer whose pages do not verify cannot
    /// be folded and may not add ranges while the list is full. The other layers may, and may
    /// exceed the bound by one commit's ranges, because theirs are folded first.
    pub(super) async fn make_room_for(
        &self,
        writer: &mut Writer,
        new: &[(LayerId, Range)],
    ) -> Result<(), CommitError> {
        while !new.is_empty() && !self.ranges().has_room_for(new) {
            match self.fold_ranges(writer, 4 * PAGES_AT_ONCE).await {
                Ok(report) if report.ranges_left > 0 => {}
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    let damaged = |layer: &LayerId| writer.unfoldable.contains(layer);
                    if let Some((layer, _)) = new.iter().find(|(layer, _)| damaged(layer)) {
                        return Err(of_layer(*layer)(error));
                    }
                    if self.ranges().iter().all(|(layer, _)| damaged(&layer)) {
                        return Ok(());
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Updates the caches to match the database. Ranges come first, then the generation, then
    /// pages: see `Map::page`.
    pub(super) fn apply(
        &self,
        fresh: Fresh,
        new_ranges: &[(LayerId, Range)],
        live: Vec<(u64, u32)>,
        forget: Forget<'_>,
    ) {
        if !new_ranges.is_empty() {
            self.set_ranges(self.ranges().with(new_ranges.iter().copied()));
        }
        self.generation.fetch_add(1, Ordering::SeqCst);
        for ((layer, page), fresh) in fresh.pages {
            let key: PageKey = (layer, page, LIVE);
            match fresh {
                Some(page) => {
                    let bytes = page.memory_bytes();
                    self.pages.insert(key, page, bytes);
                }
                None => self.pages.remove(&key),
            }
        }
        if !new_ranges.is_empty() {
            let mut by_layer: BTreeMap<LayerId, Vec<Range>> = BTreeMap::new();
            for (layer, range) in new_ranges {
                by_layer.entry(*layer).or_default().push(*range);
            }
            self.pages.retain(|(layer, page, _)| {
                let ranges = by_layer.get(layer).map_or(&[][..], Vec::as_slice);
                !ranges.iter().any(|range| range.covers(*page))
            });
        }
        self.forget_old_pages(forget);
        for (number, blocks) in live {
            self.live.insert(number, blocks, size_of::<u32>());
        }
        self.generation.fetch_add(1, Ordering::SeqCst);
    }
}

/// Pages as a commit leaves them, for the cache. `None` only removes the cached page.
pub(super) struct Fresh {
    pub bytes_left: usize,
    pub pages: Vec<(PageId, Option<Arc<Page>>)>,
}

pub(super) type PageId = (LayerId, u32);

impl Fresh {
    pub fn push(&mut self, key: PageId, page: Page) {
        let bytes = page.memory_bytes();
        let kept = bytes <= self.bytes_left;
        if kept {
            self.bytes_left -= bytes;
        }
        self.pages.push((key, kept.then(|| Arc::new(page))));
    }
}
