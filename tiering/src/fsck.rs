//! Checks the whole data tier without changing it.
//!
//! Invariants:
//! - Every reference in the map is looked up in the segments' own directories: the frame must
//!   exist, lie where the map says, and have been written for the layer and blocks at which the map
//!   shows it, or have a back-reference to the page that shows it.
//! - A difference is described and counted, and the walk continues; only a store that does not
//!   answer ends it.
//! - Pages are compared with segments and counts of one state of the metadata. If the state of a
//!   reader was compacted away meanwhile, it continues with the newest state and starts that part
//!   again: objects that the owner has replaced are not damage.
//! - A missing segment is damage only if the newest state of the metadata still has it: the pool's
//!   owner may have reclaimed it during the check.
//! - Memory is bounded: pages and segments are walked in steps, and directories are kept within a
//!   budget.

use crate::map::clock_cache::ClockCache;
use crate::map::database::{Database, DatabaseOptions};
use crate::map::history::{self, Copy};
use crate::map::pages::{self, PAGE_BLOCKS, Run};
use crate::map::records::SegmentRecord;
use crate::map::snapshots::StoredCopy;
use crate::map::{LayerId, StoredPage};
use crate::pool::{Exclusions, Metadata, Pool, Segments};
use crate::segment::DirectoryEntry;
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use object_store::ObjectStore;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// Pages or segments taken from the database at a time.
const STEP: usize = 512;

/// Memory for directories, in bytes.
const DIRECTORY_BYTES: usize = 64 << 20;

/// Number of newer states of the metadata that one check may switch to, if the store does not allow
/// a checkpoint of the state being read. Chosen by hand: each of them lasts for at least a quarter
/// of an hour.
const REFRESHES_MAX: u32 = 8;

/// Maximum number of differences that are described; further ones are only counted.
const DIFFERENCES_MAX: usize = 1000;

/// Options for a check.
#[derive(Clone, Copy, Debug)]
pub struct FsckOptions {
    /// Read every segment whole and open every frame.
    pub verify_frames: bool,
}

impl Default for FsckOptions {
    fn default() -> Self {
        FsckOptions { verify_frames: true }
    }
}

/// Result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FsckReport {
    /// Segments that have a record.
    pub segment_count: u64,
    /// Bytes of the segments' objects.
    pub object_bytes: u64,
    /// Frames opened and verified.
    pub frame_count: u64,
    /// Map pages.
    pub page_count: u64,
    /// Runs in all pages.
    pub run_count: u64,
    /// Blocks that readers see as stored, excluding snapshots.
    pub block_count: u64,
    /// Snapshots.
    pub snapshot_count: u64,
    /// Copies of map pages that snapshots show.
    pub copy_count: u64,
    /// Segments that the pool's owner reclaimed during the check. Their live blocks are in other
    /// segments now and were not checked again.
    pub reclaimed_count: u64,
    /// Number of differences found.
    pub difference_count: u64,
    /// Descriptions of the first differences.
    pub differences: Vec<String>,
    /// The first segments with wrong counts of live blocks, for [`crate::Tier::repair_counts`].
    pub miscounted: Vec<u64>,
}

impl FsckReport {
    /// Returns whether no difference was found.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.difference_count == 0
    }

    fn differs(&mut self, what: impl FnOnce() -> String) {
        self.difference_count += 1;
        if self.differences.len() < DIFFERENCES_MAX {
            self.differences.push(what());
        }
    }
}

fn behind(volume: VolumeId, first: Lsn, last: Lsn, count: usize) -> String {
    format!(
        "volume {volume} is behind the others: its writes from LSN {first} to {last} are only in \
         {count} spill files beside the write log of the machine that had the pool open"
    )
}

/// A segment's directory, or `None` if it could not be read.
type Entries = Option<Arc<Vec<DirectoryEntry>>>;

struct Check<'a> {
    job: &'a Fsck,
    report: FsckReport,
    directories: ClockCache<u64, Entries>,
    /// Segments that were reclaimed since the state being checked.
    gone: HashSet<u64>,
    /// Number of blocks that pages store, by segment.
    stored: HashMap<u64, u64>,
    /// Segments up to this number were verified.
    verified_until: u64,
    refreshes_left: u32,
    /// A newer state of the metadata than the one that is checked.
    newer: Option<Database>,
    /// Segments that a copy of some volumes lacks on purpose.
    excluded: HashSet<u64>,
    /// Layers for which no segment may be missing, in addition to those of newer volumes.
    needing: BTreeSet<LayerId>,
}

/// The job; see the module.
pub(crate) struct Fsck {
    pub pool: Arc<Pool>,
    pub metadata: Arc<Metadata>,
    pub segments: Arc<Segments>,
    pub exclusions: Arc<Exclusions>,
    /// The store of the metadata, from which newer states are opened.
    pub objects: Arc<dyn ObjectStore>,
    pub database: DatabaseOptions,
}

impl Fsck {
    /// Implements [`crate::Tier::fsck`].
    pub(crate) async fn run(&self, options: FsckOptions) -> Result<FsckReport> {
        // The map does not change meanwhile, so counts are compared exactly.
        let _writer = self.metadata.writer.lock().await;
        let mut check = Check {
            job: self,
            report: FsckReport::default(),
            directories: ClockCache::new(DIRECTORY_BYTES),
            gone: HashSet::new(),
            stored: HashMap::new(),
            verified_until: 0,
            refreshes_left: REFRESHES_MAX,
            newer: None,
            excluded: HashSet::new(),
            needing: BTreeSet::new(),
        };
        if let Some(excluded) = &*self.exclusions.excluded.read() {
            check.needing = self.metadata.map.layers().needed_by(&excluded.volumes, false);
        }
        // Check pages first: a state that no checkpoint preserves lasts only some minutes, and
        // reading all frames may take days.
        while let Err(error) = check.check_map().await {
            check.refresh(error).await?;
        }
        if options.verify_frames {
            while let Err(error) = check.verify_segments().await {
                check.refresh(error).await?;
            }
        }
        if let Some(newer) = &check.newer {
            close_reader(newer).await;
        }
        Ok(check.report)
    }
}

async fn close_reader(db: &Database) {
    if let Err(error) = db.close().await {
        tracing::debug!(error = %error.chain(), "could not close a metadata reader");
    }
}

impl Check<'_> {
    /// Reports volumes for which the store alone has an older state than for the others.
    fn name_stalled_volumes(&mut self) {
        for (volume, files) in self.job.metadata.map.stalled_volumes() {
            if let (Some(first), Some(last)) = (files.first(), files.last()) {
                self.report.differs(|| behind(volume, first.first_lsn, last.last_lsn, files.len()));
            }
        }
    }

    /// Handles `error`: continues with a newer state of the metadata if the owner has compacted
    /// away the one being read, otherwise returns the error.
    async fn refresh(&mut self, error: Error) -> Result<()> {
        let job = self.job;
        if !job.metadata.map.db().is_stale() {
            return Err(error);
        }
        let Some(left) = self.refreshes_left.checked_sub(1) else {
            let what = "check the pool: its owner compacts the metadata faster than it can be read. \
                        Run fsck again when less is written, or stop the daemon first";
            return Err(Error::with_source(ErrorKind::Unavailable, what, error));
        };
        self.refreshes_left = left;
        tracing::info!(left, "the metadata was compacted meanwhile; fsck reads its newest state");
        let db = Database::read_pinned(job.objects.clone(), &job.database).await?;
        let old = job.metadata.map.db();
        job.metadata.map.refresh(Arc::new(db), &job.pool.key).await?;
        close_reader(&old).await;
        Ok(())
    }

    /// Returns whether the pool's owner has reclaimed a segment since the state being checked.
    async fn is_reclaimed(&mut self, record: &SegmentRecord) -> Result<bool> {
        let job = self.job;
        if !job.pool.is_read_only {
            return Ok(false); // no other process changes the map, and this one waits for the check
        }
        let number = record.info.number.0;
        if let Some(newer) = &self.newer {
            match job.metadata.map.segment_in(newer, number).await {
                Ok(found) if found.as_ref().is_none_or(|found| !found.is_of(&record.info)) => {
                    return Ok(true);
                }
                // The newer state was used only for a lookup, and may have been compacted away by
                // now.
                Err(error) if !newer.is_stale() => return Err(error),
                _ => {}
            }
        }
        let newest = Database::read_only(job.objects.clone(), &job.database).await?;
        let found = job.metadata.map.segment_in(&newest, number).await?;
        let is_gone = found.is_none_or(|found| !found.is_of(&record.info));
        if let Some(newer) = self.newer.replace(newest) {
            close_reader(&newer).await;
        }
        Ok(is_gone)
    }

    /// Whether the newer state that was read for another segment shows that this one was reclaimed, too: reclaim removes
    /// many at a time, and a read of one that is missing is repeated for seconds before it counts as such.
    async fn is_gone(&mut self, record: &SegmentRecord) -> bool {
        let number = record.info.number.0;
        if self.gone.contains(&number) {
            return true;
        }
        let Some(newer) = &self.newer else { return false };
        let found = self.job.metadata.map.segment_in(newer, number).await;
        let is_gone = found.is_ok_and(|found| found.is_none_or(|found| !found.is_of(&record.info)));
        if is_gone {
            self.report.reclaimed_count += u64::from(self.gone.insert(number));
        }
        is_gone
    }

    /// Checks everything that needs no frames, in one state of the metadata.
    async fn check_map(&mut self) -> Result<()> {
        self.report = FsckReport::default();
        self.gone.clear();
        self.stored.clear();
        self.excluded.clear();
        self.name_stalled_volumes();
        self.report.snapshot_count = self.job.metadata.map.snapshots().iter().count() as u64;
        self.walk_pages().await?;
        self.walk_copies().await?;
        self.check_dedup().await?;
        self.compare_live().await
    }

    /// Reads and verifies every segment.
    async fn verify_segments(&mut self) -> Result<()> {
        loop {
            let segments = self.job.metadata.map.segments_after(self.verified_until, STEP).await?;
            if segments.is_empty() {
                return Ok(());
            }
            for (record, _) in segments {
                let info = record.info;
                if matches!(self.directories.get(&info.number.0), Some(None)) {
                    // Already reported when its pages were checked.
                    self.verified_until = info.number.0;
                    continue;
                }
                if self.is_gone(&record).await {
                    self.verified_until = info.number.0;
                    continue;
                }
                match self.job.segments.frames.check_segment(&record.stored()).await {
                    Ok(checked) => {
                        for (at, why) in &checked.damaged {
                            self.report.differs(|| {
                                format!("{info}, frame {} at {}: {why}", at.frame_index, at.offset)
                            });
                        }
                        let frame_count = checked.directory.entries.len() - checked.damaged.len();
                        self.report.frame_count += frame_count as u64;
                    }
                    Err(error) => self.unreadable(&record, &error).await?,
                }
                self.verified_until = info.number.0;
            }
        }
    }

    fn keep(&self, number: u64, entries: Option<Vec<DirectoryEntry>>) -> Entries {
        let entries = entries.map(Arc::new);
        let bytes = entries.as_ref().map_or(0, |list| list.len() * size_of::<DirectoryEntry>());
        self.directories.insert(number, entries.clone(), bytes);
        entries
    }

    /// Reports damage as a difference; a store that does not answer ends the check.
    async fn unreadable(&mut self, record: &SegmentRecord, error: &Error) -> Result<()> {
        match error.kind() {
            ErrorKind::NotFound if self.is_reclaimed(record).await? => {
                self.report.reclaimed_count += u64::from(self.gone.insert(record.info.number.0));
                self.keep(record.info.number.0, None);
                Ok(())
            }
            ErrorKind::NotFound if self.job.exclusions.may_be_excluded(record.info.number.0) => {
                // A layer that needs it is reported with its page.
                self.excluded.insert(record.info.number.0);
                self.keep(record.info.number.0, None);
                Ok(())
            }
            ErrorKind::Corrupt
            | ErrorKind::NotFound
            | ErrorKind::Unreadable
            | ErrorKind::Unsupported => {
                self.report.differs(|| format!("{}: {}", record.info, error.chain()));
                self.keep(record.info.number.0, None);
                Ok(())
            }
            _ => Err(error.clone()),
        }
    }

    async fn walk_pages(&mut self) -> Result<()> {
        let mut after = None;
        let mut layer_seen = None;
        loop {
            let pages = self.job.metadata.map.pages_after(after, STEP).await?;
            let Some(last) = pages.last() else { return Ok(()) };
            after = Some((last.layer, last.page));
            for page in pages {
                if layer_seen != Some(page.layer) {
                    layer_seen = Some(page.layer);
                    match self.job.metadata.map.layer(page.layer).await {
                        Ok(Some(_)) => {}
                        Ok(None) => {
                            let layer = page.layer;
                            self.report.differs(|| format!("layer {layer} has no record"));
                        }
                        Err(error) if error.kind() == ErrorKind::Unavailable => return Err(error),
                        Err(error) => self.report.differs(|| error.chain()),
                    }
                }
                self.check_page(&page).await?;
            }
        }
    }

    async fn check_page(&mut self, page: &StoredPage) -> Result<()> {
        self.report.page_count += 1;
        let operands = match &page.operands {
            Ok(operands) => operands,
            Err(error) => {
                self.report.differs(|| error.chain());
                return Ok(());
            }
        };
        let counted = pages::counted(operands);
        let base = self.job.metadata.map.base_page(page.layer, page.page).await;
        let base = match base {
            Err(error) if error.kind() == ErrorKind::Unavailable => return Err(error),
            // Reported when that page itself is walked.
            base => base.ok().flatten(),
        };
        let own = match &base {
            Some(base) => pages::difference(&counted, &base.runs),
            None => counted.clone(),
        };
        for run in &own {
            *self.stored.entry(run.segment).or_default() += u64::from(run.count());
        }
        for run in page.folded.runs.iter().filter(|run| run.is_mapped()) {
            self.report.run_count += 1;
            self.report.block_count += u64::from(run.count());
            self.name_run(page.layer, page.page, None, run).await?;
        }
        if page.folded.has_kept {
            if !self.job.metadata.map.is_noted_as_keeping(page.layer, page.page).await? {
                let (layer, number) = (page.layer, page.page);
                self.report.differs(|| {
                    format!(
                        "page {number} of layer {layer} keeps blocks counted, and no record says so"
                    )
                });
            }
            // Snapshots may show it.
            for run in &pages::difference_of_all(&counted, &page.folded.runs) {
                self.name_run(page.layer, page.page, None, run).await?;
            }
        }
        Ok(())
    }

    /// Reports a run that is wrong.
    async fn name_run(
        &mut self,
        layer: LayerId,
        page: u32,
        copy: Option<Lsn>,
        run: &Run,
    ) -> Result<()> {
        if let Some(wrong) = self.check_run(layer, page, run).await? {
            let of = copy.map_or_else(String::new, |until| format!("copy {until} of "));
            self.report.differs(|| {
                let (first, last) = (run.first, run.last);
                format!("{of}page {page} of layer {layer}, blocks {first} to {last}: {wrong}")
            });
        }
        Ok(())
    }

    /// Checks the copies that snapshots show, and counts the blocks that they store.
    async fn walk_copies(&mut self) -> Result<()> {
        let snapshots = self.job.metadata.map.snapshots();
        let mut last: Option<(LayerId, u32, Copy)> = None;
        let mut after = None;
        loop {
            let copies = self.job.metadata.map.copies_after(after, STEP).await?;
            let Some(end) = copies.last() else { break };
            after = Some((end.layer, end.page, end.until));
            for StoredCopy { layer, page, until, copy } in copies {
                self.report.copy_count += 1;
                let copy = match copy {
                    Ok(copy) => copy,
                    Err(error) => {
                        self.report.differs(|| error.chain());
                        continue;
                    }
                };
                for run in copy.runs.iter().filter(|run| run.is_mapped()) {
                    self.name_run(layer, page, Some(until), run).await?;
                }
                let is_same = |last: &&(LayerId, u32, Copy)| (last.0, last.1) == (layer, page);
                let before = last.as_ref().filter(is_same);
                let before_until = before.map_or(Lsn::NONE, |(_, _, before)| before.until);
                let is_shown = history::is_shown(&copy, before_until, snapshots.of(layer));
                if !is_shown && !self.job.metadata.map.is_prune_wanted(layer) {
                    self.report.differs(|| {
                        format!(
                            "copy {until} of page {page} of layer {layer}: no snapshot shows it"
                        )
                    });
                }
                match before.cloned() {
                    Some((_, _, before)) => {
                        self.count_copy(layer, page, &before, &copy.runs).await?;
                    }
                    None => self.end_copies(last.take()).await?,
                }
                last = Some((layer, page, copy));
            }
        }
        self.end_copies(last).await
    }

    /// Counts the newest copy of a page.
    async fn end_copies(&mut self, last: Option<(LayerId, u32, Copy)>) -> Result<()> {
        let Some((layer, page, copy)) = last else { return Ok(()) };
        match self.job.metadata.map.stored_operands(layer, page).await {
            Ok(operands) if operands.is_empty() => self.report.differs(|| {
                format!("page {page} of layer {layer} has copies and is not there itself")
            }),
            Ok(operands) => self.count_copy(layer, page, &copy, history::base(&operands)).await?,
            // Already reported when the pages were walked.
            Err(error) if error.kind() == ErrorKind::Corrupt => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Counts the blocks that a copy has in addition to the state that follows it and to the base
    /// of its layer.
    async fn count_copy(
        &mut self,
        layer: LayerId,
        page: u32,
        copy: &Copy,
        next: &[Run],
    ) -> Result<()> {
        let mut runs = pages::difference(&copy.runs, next);
        match self.job.metadata.map.base_page(layer, page).await {
            Ok(Some(base)) => runs = pages::difference(&runs, &base.runs),
            Ok(None) => {}
            Err(error) if error.kind() == ErrorKind::Unavailable => return Err(error),
            Err(_) => {} // reported when that page itself is walked
        }
        for run in runs {
            *self.stored.entry(run.segment).or_default() += u64::from(run.count());
        }
        Ok(())
    }

    /// Returns a description of the error in a run, if any.
    async fn check_run(&mut self, layer: LayerId, page: u32, run: &Run) -> Result<Option<String>> {
        let number = run.segment;
        if self.gone.contains(&number) {
            return Ok(None);
        }
        let entries = match self.directories.get(&number) {
            Some(entries) => entries,
            None => match self.job.metadata.map.find_segment(number).await? {
                None => {
                    self.keep(number, None);
                    return Ok(Some(format!("segment {number} has no record")));
                }
                Some(record) if self.is_gone(&record).await => return Ok(None),
                Some(record) => {
                    match self.job.segments.frames.read_directory(&record.stored()).await {
                        Ok(entries) => self.keep(number, Some(entries)),
                        Err(error) => {
                            self.unreadable(&record, &error).await?;
                            if self.gone.contains(&number) {
                                return Ok(None);
                            }
                            None
                        }
                    }
                }
            },
        };
        let Some(entries) = entries else {
            if self.excluded.contains(&number) && self.is_excused(layer) {
                return Ok(None);
            }
            return Ok(Some(format!("segment {number} cannot be read")));
        };
        let entry = usize::try_from(run.frame_index).ok().and_then(|index| entries.get(index));
        let Some(entry) = entry else {
            return Ok(Some(format!("segment {number} has no frame {}", run.frame_index)));
        };
        if (entry.at.offset, entry.at.sealed_bytes) != (run.offset, run.sealed_bytes) {
            return Ok(Some(format!(
                "frame {} of segment {number} lies elsewhere",
                run.frame_index
            )));
        }
        if u32::from(run.within) + run.count() > u32::from(entry.block_count) {
            let (frame, count) = (run.frame_index, entry.block_count);
            return Ok(Some(format!("frame {frame} of segment {number} has {count} blocks")));
        }
        let block = u64::from(page) * PAGE_BLOCKS + u64::from(run.first);
        let is_same = self.job.metadata.map.layers().is_below(layer, LayerId(entry.layer))
            && entry.first_block + u64::from(run.within) == block;
        if is_same {
            return Ok(None);
        }
        let (frame, owner, first_block) = (run.frame_index, entry.layer, entry.first_block);
        match self.job.metadata.map.is_referenced_back(number, layer, page).await {
            Ok(true) => Ok(None),
            Ok(false) => Ok(Some(format!(
                "frame {frame} of segment {number} was written for layer {owner}, block {first_block}, and \
                 has no back-reference to here"
            ))),
            Err(error) if error.kind() == ErrorKind::Corrupt => Ok(Some(error.chain())),
            Err(error) => Err(error),
        }
    }

    /// Returns whether a layer may reference segments that a copy of some volumes lacks on purpose.
    fn is_excused(&self, layer: LayerId) -> bool {
        let first_new =
            self.job.exclusions.excluded.read().as_ref().and_then(|one| one.first_new_volume);
        !self.needing.contains(&layer) && first_new.is_none_or(|first| layer.volume() < first)
    }

    /// Checks that the records of deduplication belong to existing segments.
    async fn check_dedup(&mut self) -> Result<()> {
        for error in self.job.metadata.map.damaged_found().await? {
            self.report.differs(|| error.chain());
        }
        let mut known: Option<(u64, bool)> = None;
        for is_fingerprints in [false, true] {
            let mut last: Option<Vec<u8>> = None;
            loop {
                let map = &self.job.metadata.map;
                let found = map.dedup_keys_after(is_fingerprints, last.as_deref(), STEP).await?;
                let Some((end, ..)) = found.last() else { break };
                last = Some(end.clone());
                for (key, segment, opened) in found {
                    if let Err(error) = opened {
                        self.report.differs(|| error.chain());
                    }
                    let is_there = match known {
                        Some((number, is_there)) if number == segment => is_there,
                        _ => match self.job.metadata.map.find_segment(segment).await {
                            Err(error) if error.kind() != ErrorKind::Corrupt => return Err(error),
                            found => !matches!(found, Ok(None)), // damage is reported elsewhere
                        },
                    };
                    known = Some((segment, is_there));
                    if !is_there {
                        let name = crate::map::keys::name_of(&key);
                        self.report.differs(|| format!("{name}: there is no such segment"));
                    }
                }
            }
        }
        Ok(())
    }

    /// Compares the counts of live blocks with the blocks that the pages store.
    async fn compare_live(&mut self) -> Result<()> {
        let mut after = 0;
        loop {
            let segments = self.job.metadata.map.segments_after(after, STEP).await?;
            let Some((last, _)) = segments.last() else { break };
            after = last.info.number.0;
            for (record, live) in segments {
                self.report.segment_count += 1;
                self.report.object_bytes += u64::from(record.info.object_bytes);
                let number = record.info.number.0;
                let stored = self.stored.remove(&number).unwrap_or(0);
                // A saturated count stays saturated.
                if live != u32::MAX && stored != u64::from(live) {
                    self.report.differs(|| {
                        format!("segment {number}: {live} live blocks recorded, {stored} found")
                    });
                    if self.report.miscounted.len() < DIFFERENCES_MAX {
                        self.report.miscounted.push(number);
                    }
                }
            }
        }
        Ok(())
    }
}
