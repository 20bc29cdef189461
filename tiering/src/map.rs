//! The map: which frame holds each block of each volume, stored in SlateDB.
//!
//! Owns the metadata database, the page cache and the segment records. This file reads the map;
//! `commit` writes it and `opening` opens it.
//!
//! Invariants:
//! - Readers see only states that a commit made durable or is about to make durable, never half a
//!   page.
//! - Every value is opened with its dedicated key as associated data. A value that does not open is
//!   `Corrupt`.
//! - [`MapOptions`] bounds the memory whatever the size of the volumes. Opening reads the root, the
//!   range records and the volume records, but no pages.
//! - Only the holder of the [`Writer`] changes anything.
//! - The database and its ranges are replaced together, so that no page is folded with the ranges
//!   of another state: see [`Map::reopen`].

pub mod clock_cache;
mod clones;
pub mod commit;
mod counts;
pub mod database;
pub(crate) mod dedup;
mod exclusive_space;
mod fold;
#[cfg(test)]
pub(crate) mod golden;
pub mod history;
pub mod keys;
pub mod layers;
mod monotonic_clock;
mod opening;
pub mod pages;
mod pinned;
mod placements;
mod preserve;
mod prune;
pub mod ranges;
pub mod read_times;
pub mod records;
pub mod repoint;
pub mod snapshot_store;
pub mod snapshots;
pub mod space;

pub use clones::{LayerChange, NewLayer, PromoteReport};
pub use commit::{Change, Commit, CommitReport, FoldReport, Placed, Writer};
pub use layers::{LayerId, LayerList, LayerRecord};
pub use prune::PruneReport;
pub use repoint::{Moved, Repoint, RepointReport};
pub use snapshots::{SnapshotChange, SnapshotList};

use crate::dedup::Found;
use crate::seeded_bugs::SeededBugs;
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use bytes::Bytes;
use clock_cache::ClockCache;
use database::Database;
use futures::TryStreamExt;
use keys::{Opener, family, number_of, page_of};
use pages::{Operand, Page};
use parking_lot::{Mutex, RwLock};
use ranges::RangeList;
use records::{NamedSpillFile, SegmentRecord};
use slatedb::DbStatus;
use snapshots::Prune;
use space::SpaceCounter;
use std::collections::{BTreeMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::watch;

/// Longest time that a read waits for a new handle of a database that has given up. Chosen by hand,
/// equal to the time that reads wait for a store that does not answer
/// ([`crate::fetch::FramesOptions`]).
const REOPEN_WAIT_MAX: Duration = Duration::from_secs(120);

/// Memory limits of the map, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct MapOptions {
    /// Decoded pages.
    pub page_cache_bytes: usize,
    /// Segment records and live-block counts.
    pub segment_cache_bytes: usize,
    /// New segments may be in fragments; the header of the metadata says so from then on.
    pub in_fragments: bool,
    /// Segments may move between data stores and the object store; the header of the metadata says so from then on.
    pub in_tiers: bool,
}

impl Default for MapOptions {
    fn default() -> Self {
        MapOptions {
            page_cache_bytes: 64 << 20,
            segment_cache_bytes: 8 << 20,
            in_fragments: false,
            in_tiers: false,
        }
    }
}

/// Key of a page in the cache. The LSN is [`LIVE`] for the current page, or that of the snapshot
/// that shows it.
type PageKey = (LayerId, u32, Lsn);
/// Stands for the current state in a [`PageKey`].
const LIVE: Lsn = Lsn(u64::MAX);

/// Pages read at the same time by a check that they are readable. Chosen by hand.
const CHECKS_MAX: usize = 32;

/// Counts for status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MapStatus {
    /// Commits since the pool was created.
    pub commit_number: u64,
    /// Everything up to this LSN is in the data tier.
    pub destaged_lsn: Lsn,
    /// Range records that wait to be folded.
    pub range_count: usize,
    /// Layers with removed snapshots whose blocks have not been dropped yet.
    pub prune_count: usize,
    /// Bytes of decoded pages in memory.
    pub page_cache_bytes: usize,
    /// Decoded pages in memory.
    pub page_count: usize,
}

/// A page as stored in the database.
#[derive(Debug)]
pub struct StoredPage {
    /// Its layer.
    pub layer: LayerId,
    /// Its number within the layer.
    pub page: u32,
    /// The page as readers see it; empty if `operands` is an error.
    pub folded: Page,
    /// All stored operands, oldest first, including those that a range hides.
    pub operands: Result<Vec<Operand>>,
}

/// Whether the map can be read and written.
#[derive(Clone, Debug, Default)]
pub enum Health {
    /// It can be read and written.
    #[default]
    Well,
    /// Its database has given up or a commit has failed; it needs another handle.
    Ended(Error),
    /// It gets no other handle, because another owner has the pool or the map is closed.
    Final(Error),
}

/// Pages of snapshots, and of layers that show their base, that a change removes from the cache.
#[derive(Clone, Copy)]
pub(super) enum Forget<'a> {
    /// None.
    Nothing,
    /// The pages with these numbers.
    Moved(&'a HashSet<u32>),
    /// All of them.
    All,
}

/// The state that a page is read with.
#[derive(Clone)]
struct State {
    db: Arc<Database>,
    ranges: RangeList,
    layers: LayerList,
    health: Health,
}

/// The map: see the module.
pub struct Map {
    state: watch::Sender<State>,
    opener: Opener,
    pages: ClockCache<PageKey, Arc<Page>>,
    /// Caches [`LayerList::has_later`]. It is false in most pools, whose reads then skip the list.
    has_later_layers: AtomicBool,
    /// The cache may hold pages as snapshots show them.
    has_old_pages: AtomicBool,
    /// Records of segments that walks have passed over, because they do not open.
    unread_records: AtomicU64,
    /// Bytes of new pages that a commit may hold back in order to cache them.
    page_retain_bytes: usize,
    segments: ClockCache<u64, Arc<SegmentRecord>>,
    live: ClockCache<u64, u32>,
    /// Live bytes within the bytes that the store holds.
    pub(crate) space: SpaceCounter,
    volume_records: RwLock<BTreeMap<VolumeId, Bytes>>,
    /// Spill files of the volumes that are behind the others.
    stalled_volumes: RwLock<BTreeMap<VolumeId, Vec<NamedSpillFile>>>,
    snapshots: RwLock<SnapshotList>,
    /// Layers that must be pruned.
    prunes: Mutex<BTreeMap<LayerId, Prune>>,
    /// Results of deduplication.
    found: RwLock<BTreeMap<VolumeId, Found>>,
    /// Raised before and after the caches change, so it is odd during a change. A page is not
    /// cached if it was read under an older number, because it may be stale, or under an odd
    /// number, because it may build on a stale page. Only the holder of the writer changes it.
    generation: AtomicU64,
    /// Counts commits that have forgotten segments. It is raised after the caches have changed and
    /// before anything is deleted. A reader that finds a segment gone, and this count unchanged
    /// since before its lookup in the map, has found damage.
    repoints: AtomicU64,
    destaged: AtomicU64,
    commit_number: AtomicU64,
    /// Seeded bugs, for tests.
    pub(crate) seeded_bugs: SeededBugs,
}

impl Map {
    /// The current database.
    pub fn db(&self) -> Arc<Database> {
        self.state.borrow().db.clone()
    }

    /// The current database, and the cut of a page that belongs to it.
    fn db_and_cut(&self, layer: LayerId, page: u32) -> (Arc<Database>, Lsn) {
        let state = self.state.borrow();
        (state.db.clone(), state.ranges.cut(layer, page))
    }

    pub(crate) fn ranges(&self) -> RangeList {
        self.state.borrow().ranges.clone()
    }

    /// The layer of a volume's newest state, or of its snapshot at an LSN.
    pub(crate) fn layer_of(&self, volume: VolumeId, at: Option<Lsn>) -> LayerId {
        if !self.has_later_layers.load(Ordering::Acquire) {
            return LayerId::of_volume(volume);
        }
        let layers = self.layers();
        at.map_or_else(|| layers.current(volume), |at| layers.at(volume, at))
    }

    /// The current layers.
    pub fn layers(&self) -> LayerList {
        self.state.borrow().layers.clone()
    }

    fn set_ranges(&self, ranges: RangeList) {
        self.state.send_modify(|state| state.ranges = ranges);
    }

    /// Whether the map can be read and written.
    pub fn health(&self) -> Health {
        self.state.borrow().health.clone()
    }

    /// Records that another handle is needed. A final state stays final.
    pub fn set_ended(&self, error: Error) {
        self.state.send_modify(|state| {
            if !matches!(state.health, Health::Final(_)) {
                state.health = Health::Ended(error);
            }
        });
    }

    /// Records that no other handle will follow. The first reason is kept.
    pub fn set_final(&self, error: Error) {
        self.state.send_modify(|state| {
            if !matches!(state.health, Health::Final(_)) {
                state.health = Health::Final(error);
            }
        });
    }

    /// Returns a handle that waits for the end of the database without keeping the map alive.
    pub fn health_watcher(&self) -> HealthWatcher {
        let state = self.state.subscribe();
        let status = state.borrow().db.subscribe();
        HealthWatcher { state, status }
    }

    /// Checks that the holder of `writer` may change the map.
    ///
    /// # Errors
    /// `Unavailable` until another handle has been opened; `Fenced` permanently.
    pub fn check(&self, writer: &Writer) -> Result<()> {
        let state = self.state.borrow();
        if let Health::Final(error) = &state.health {
            return Err(error.clone());
        }
        writer.check()?;
        let what = "the metadata database has ended and is being opened again";
        match &state.health {
            Health::Ended(error) => {
                Err(Error::with_source(ErrorKind::Unavailable, what, error.clone()))
            }
            _ if state.db.has_given_up() => Err(Error::new(ErrorKind::Unavailable, what)),
            _ => Ok(()),
        }
    }

    /// Waits until no reopening of the database is pending, at most for [`REOPEN_WAIT_MAX`]. Must
    /// not be called by the holder of the [`Writer`].
    pub(crate) async fn wait_well(&self) {
        let mut state = self.state.subscribe();
        let settled = state.wait_for(|state| !matches!(state.health, Health::Ended(_)));
        let _ = tokio::time::timeout(REOPEN_WAIT_MAX, settled).await;
    }

    /// Handles the failure of `db` with `error`: if the database has given up, waits until another
    /// handle has replaced it. Returns the error if it has not given up or the wait takes too long.
    /// Must not be called by the holder of the [`Writer`], without which no other handle is opened.
    async fn wait_reopened(&self, db: &Arc<Database>, error: Error) -> Result<()> {
        if !db.has_given_up() {
            return Err(error);
        }
        let mut state = self.state.subscribe();
        let settled = state.wait_for(|state| {
            !Arc::ptr_eq(&state.db, db) || matches!(state.health, Health::Final(_))
        });
        match tokio::time::timeout(REOPEN_WAIT_MAX, settled).await {
            Ok(Ok(state)) => match &state.health {
                Health::Final(reason) => Err(reason.clone()),
                Health::Well | Health::Ended(_) => Ok(()),
            },
            Ok(Err(_)) | Err(_) => Err(error),
        }
    }

    /// The LSN up to which everything is durable in the data tier.
    pub fn destaged_lsn(&self) -> Lsn {
        Lsn(self.destaged.load(Ordering::Acquire))
    }

    /// The newest record of every volume, by id.
    pub fn volume_records(&self) -> Vec<(VolumeId, Bytes)> {
        self.volume_records.read().iter().map(|(id, record)| (*id, record.clone())).collect()
    }

    /// The number of commits that have forgotten segments: see the field.
    pub(crate) fn repoint_count(&self) -> u64 {
        self.repoints.load(Ordering::SeqCst)
    }

    /// Volumes that are behind the others, each with the spill files that hold its missing entries.
    pub fn stalled_volumes(&self) -> BTreeMap<VolumeId, Vec<NamedSpillFile>> {
        self.stalled_volumes.read().clone()
    }

    /// Reads everything that a commit to these pages of a layer would read.
    ///
    /// # Errors
    /// Like [`Map::page`].
    pub async fn check_pages(
        &self,
        layer: LayerId,
        pages: impl IntoIterator<Item = u32>,
    ) -> Result<()> {
        self.layer(layer).await?;
        let pages = pages.into_iter().map(Ok);
        futures::stream::iter(pages)
            .try_for_each_concurrent(CHECKS_MAX, async |page| {
                self.page(layer, page).await.map(drop)
            })
            .await
    }

    /// Counts for status.
    pub fn status(&self) -> MapStatus {
        MapStatus {
            commit_number: self.commit_number.load(Ordering::Acquire),
            destaged_lsn: self.destaged_lsn(),
            range_count: self.state.borrow().ranges.len(),
            prune_count: self.prunes.lock().len(),
            page_cache_bytes: self.pages.bytes(),
            page_count: self.pages.entry_count(),
        }
    }

    /// The page, if it is in memory. Never waits.
    pub fn cached_page(&self, layer: LayerId, page: u32) -> Option<Arc<Page>> {
        self.pages.get(&(layer, page, LIVE))
    }

    /// Whether a page that was read under this generation may be cached.
    fn is_current(&self, generation: u64) -> bool {
        generation.is_multiple_of(2) && self.generation.load(Ordering::SeqCst) == generation
    }

    /// Removes cached pages of snapshots, and of layers that show their base, whose blocks a change
    /// may have moved. Called while the caches change: see the field.
    fn forget_old_pages(&self, forget: Forget<'_>) {
        if matches!(forget, Forget::Nothing) || !self.has_old_pages.load(Ordering::SeqCst) {
            return;
        }
        if matches!(forget, Forget::All) {
            self.has_old_pages.store(false, Ordering::SeqCst);
        }
        let layers = self.layers();
        self.pages.retain(|(layer, page, at)| {
            let is_based = layers.get(*layer).is_some_and(|layer| layer.base.is_some());
            let is_old = *at != LIVE || is_based;
            !is_old || matches!(forget, Forget::Moved(moved) if !moved.contains(page))
        });
    }

    /// Whether the base of a page is still the one in a state that was read.
    fn is_based_as(&self, state: &State, layer: LayerId, page: u32) -> bool {
        let now = self.state.borrow();
        Arc::ptr_eq(&now.db, &state.db)
            && now.layers.base(layer, page) == state.layers.base(layer, page)
    }

    /// The page, from memory or from the database.
    ///
    /// # Errors
    /// `Corrupt`, naming the page; database errors.
    pub async fn page(&self, layer: LayerId, page: u32) -> Result<Arc<Page>> {
        if let Some(page) = self.cached_page(layer, page) {
            return Ok(page);
        }
        loop {
            let generation = self.generation.load(Ordering::SeqCst);
            // Take the ranges and the layers before the page. If a range were folded in between, it
            // would be missing while the page still shows the blocks that it hides.
            let state = self.state.borrow().clone();
            let State { db, ranges, layers, .. } = &state;
            let cut = ranges.cut(layer, page);
            let operands = match self.operands(db, layer, page).await {
                Ok(operands) => operands,
                Err(error) => {
                    self.wait_reopened(db, error).await?;
                    continue;
                }
            };
            let base = layers.base(layer, page);
            let folded = match base.filter(|_| operands.is_empty() && cut == Lsn::NONE) {
                None => Arc::new(pages::fold(&operands, cut)),
                Some((parent, at)) => {
                    let base = Box::pin(self.page_at(parent, page, at)).await?;
                    if !self.is_based_as(&state, layer, page) {
                        continue; // it may have been promoted, and its base deleted
                    }
                    Arc::new(Page { runs: base.runs.clone(), ..Page::default() })
                }
            };
            let is_current = || {
                if base.is_some() {
                    self.has_old_pages.store(true, Ordering::SeqCst);
                }
                self.is_current(generation)
            };
            let bytes = folded.memory_bytes();
            self.pages.insert_if((layer, page, LIVE), folded.clone(), bytes, is_current);
            return Ok(folded);
        }
    }

    /// The stored operands of a page, oldest first.
    async fn operands(&self, db: &Database, layer: LayerId, page: u32) -> Result<Vec<Operand>> {
        let key = keys::page_key(layer, page);
        match get(db, &key).await? {
            Some(value) => self.decode_operands(&key, &value),
            None => Ok(Vec::new()),
        }
    }

    fn decode_operands(&self, key: &[u8], value: &[u8]) -> Result<Vec<Operand>> {
        let mut operands: Vec<Operand> = Vec::new();
        self.opener.open_all(key, value, |plain| {
            let operand = pages::decode(plain).map_err(|error| keys::corrupt(key, error))?;
            if operands.last().is_some_and(|before| before.lsn > operand.lsn) {
                return Err(keys::corrupt(key, "operands are out of order"));
            }
            operands.push(operand);
            Ok(())
        })?;
        Ok(operands)
    }

    /// The record of a segment that a page names.
    ///
    /// # Errors
    /// `NotFound` if it has no record: it was forgotten after the page was read, or the map is
    /// damaged.
    pub async fn segment(&self, number: u64) -> Result<Arc<SegmentRecord>> {
        if let Some(record) = self.segments.get(&number) {
            return Ok(record);
        }
        let generation = self.generation.load(Ordering::SeqCst);
        let found = loop {
            let db = self.db();
            match self.segment_in(&db, number).await {
                Ok(found) => break found,
                Err(error) => self.wait_reopened(&db, error).await?,
            }
        };
        let record = found.ok_or_else(|| {
            let what =
                format!("read metadata, segment {number}: a page names it, but it has no record");
            Error::new(ErrorKind::NotFound, what)
        })?;
        let record = Arc::new(record);
        // Its placement may have changed since it was read.
        let is_current = || self.generation.load(Ordering::SeqCst) == generation;
        self.segments.insert_if(number, record.clone(), size_of::<SegmentRecord>(), is_current);
        Ok(record)
    }

    /// The record, if it is in memory. Never waits.
    pub fn cached_segment(&self, number: u64) -> Option<Arc<SegmentRecord>> {
        self.segments.get(&number)
    }

    /// Reads the record of a segment from the database, if it has one.
    ///
    /// # Errors
    /// `Corrupt`; database errors.
    pub async fn find_segment(&self, number: u64) -> Result<Option<SegmentRecord>> {
        self.segment_in(&self.db(), number).await
    }

    /// The record of a segment in a given state of the metadata, if that state has one.
    pub(crate) async fn segment_in(
        &self,
        db: &Database,
        number: u64,
    ) -> Result<Option<SegmentRecord>> {
        let key = keys::segment_key(number);
        match get(db, &key).await? {
            Some(value) => {
                let plain = self.opener.open_one(&key, &value)?;
                Ok(Some(SegmentRecord::decode(number, &plain)?))
            }
            None => Ok(None),
        }
    }

    /// The number of live blocks of a segment; 0 if none is stored.
    ///
    /// # Errors
    /// `Corrupt`, naming the segment; database errors.
    pub(crate) async fn live_blocks(&self, number: u64) -> Result<u32> {
        if let Some(blocks) = self.live.get(&number) {
            return Ok(blocks);
        }
        let key = keys::live_key(number);
        match get(&self.db(), &key).await? {
            Some(value) => records::decode_live(number, &self.opener.open_one(&key, &value)?),
            None => Ok(0),
        }
    }

    /// Up to `count_max` segments after number `last`, in order, each with its live blocks.
    ///
    /// # Errors
    /// `Corrupt`; database errors.
    pub async fn segments_after(
        &self,
        last: u64,
        count_max: usize,
    ) -> Result<Vec<(SegmentRecord, u32)>> {
        let from = Bound::Excluded(keys::segment_key(last).to_vec());
        let mut found = Vec::new();
        for (key, value) in entries(&self.db(), from, after(family::SEGMENT), count_max).await? {
            let number = number_of(&key).ok_or_else(|| keys::corrupt(&key, "not a segment key"))?;
            let record = SegmentRecord::decode(number, &self.opener.open_one(&key, &value)?)?;
            found.push((record, self.live_blocks(number).await?));
        }
        Ok(found)
    }

    /// Returns the number of times that a walk has passed over the record of a segment.
    pub(crate) fn unread_records(&self) -> u64 {
        self.unread_records.load(Ordering::Relaxed)
    }

    /// Like [`Map::segments_after`], but reads in two scans and past the cache, and also returns
    /// the number to continue from if more segments may follow. A segment whose count does not open
    /// is taken to be fully live; a segment whose record does not open is skipped, and counted by
    /// [`Map::unread_records`].
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn live_after(
        &self,
        last: u64,
        count_max: usize,
    ) -> Result<(Vec<(SegmentRecord, u32)>, Option<u64>)> {
        let db = self.db();
        let from = Bound::Excluded(keys::segment_key(last).to_vec());
        let mut found = Vec::new();
        let read = entries(&db, from, after(family::SEGMENT), count_max).await?;
        let mut next = None;
        for (key, value) in &read {
            let number = number_of(key).ok_or_else(|| keys::corrupt(key, "not a segment key"))?;
            next = Some(number).filter(|_| read.len() == count_max);
            let opened = self.opener.open_one(key, value);
            match opened.and_then(|plain| SegmentRecord::decode(number, &plain)) {
                Ok(record) => {
                    let block_count = record.block_count;
                    found.push((record, block_count));
                }
                // Reads of this segment report the error; it must not hold up the other segments.
                Err(error) => {
                    self.unread_records.fetch_add(1, Ordering::Relaxed);
                    tracing::debug!(
                        error = %error.chain(),
                        "could not read a segment's record; it is passed over"
                    );
                }
            }
        }
        let Some(((first, _), (last, _))) = found.first().zip(found.last()) else {
            return Ok((found, next));
        };
        let from = Bound::Included(keys::live_key(first.info.number.0).to_vec());
        let until = Bound::Included(keys::live_key(last.info.number.0).to_vec());
        let mut at = 0;
        for (key, value) in entries(&db, from, until, usize::MAX).await? {
            let Some(number) = number_of(&key) else { continue };
            while found.get(at).is_some_and(|(record, _)| record.info.number.0 < number) {
                at += 1;
            }
            let Some((record, live)) = found.get_mut(at) else { break };
            if record.info.number.0 == number
                && let Ok(plain) = self.opener.open_one(&key, &value)
                && let Ok(blocks) = records::decode_live(number, &plain)
            {
                *live = blocks;
            }
        }
        Ok((found, next))
    }

    /// Up to `count_max` pages after `last`, or from the first page on if it is `None`, in order of
    /// layer and number. A page that does not open is returned with its error.
    ///
    /// # Errors
    /// Database errors.
    pub async fn pages_after(
        &self,
        last: Option<(LayerId, u32)>,
        count_max: usize,
    ) -> Result<Vec<StoredPage>> {
        let from = match last {
            Some((layer, page)) => Bound::Excluded(keys::page_key(layer, page).to_vec()),
            None => Bound::Included(vec![family::PAGE]),
        };
        let State { db, ranges, .. } = self.state.borrow().clone();
        let mut found = Vec::new();
        for (key, value) in entries(&db, from, after(family::PAGE), count_max).await? {
            let (layer, page) =
                page_of(&key).ok_or_else(|| keys::corrupt(&key, "not a page key"))?;
            let operands = self.decode_operands(&key, &value);
            let folded = operands.as_ref().map_or_else(
                |_| Page::default(),
                |operands| pages::fold(operands, ranges.cut(layer, page)),
            );
            found.push(StoredPage { layer, page, folded, operands });
        }
        Ok(found)
    }

    /// Up to `count_max` stored pages of a layer from `first` to `last`, as readers see them, and
    /// the number of the page up to which the result is complete.
    ///
    /// # Errors
    /// `Corrupt`, naming the page; database errors.
    pub async fn pages_between(
        &self,
        layer: LayerId,
        first: u32,
        last: u32,
        count_max: usize,
    ) -> Result<(Vec<(u32, Arc<Page>)>, u32)> {
        if self.layers().base(layer, last).is_some() {
            return self.pages_between_based(layer, first..=last, count_max).await;
        }
        let from = Bound::Included(keys::page_key(layer, first).to_vec());
        let until = Bound::Included(keys::page_key(layer, last).to_vec());
        let (state, read) = loop {
            let state = self.state.borrow().clone();
            match entries(&state.db, from.clone(), until.clone(), count_max).await {
                Ok(read) => break (state, read),
                Err(error) => self.wait_reopened(&state.db, error).await?,
            }
        };
        let mut found = Vec::new();
        for (key, value) in read {
            let (_, page) = page_of(&key).ok_or_else(|| keys::corrupt(&key, "not a page key"))?;
            let operands = self.decode_operands(&key, &value)?;
            let folded = pages::fold(&operands, state.ranges.cut(layer, page));
            found.push((page, Arc::new(folded)));
        }
        let until =
            found.last().filter(|_| found.len() == count_max).map_or(last, |(page, _)| *page);
        Ok((found, until))
    }

    /// The record of a layer, if it has one.
    ///
    /// # Errors
    /// `Corrupt`, naming the layer; database errors.
    pub async fn layer(&self, layer: LayerId) -> Result<Option<LayerRecord>> {
        let key = keys::layer_key(layer);
        match get(&self.db(), &key).await? {
            Some(value) => {
                Ok(Some(LayerRecord::decode(layer, &self.opener.open_one(&key, &value)?)?))
            }
            None => Ok(None),
        }
    }

    /// Empties the page cache, so that every page has to be read from the database.
    #[cfg(test)]
    pub fn forget_pages(&self) {
        self.pages.retain(|_| false);
    }

    /// Empties the cache of live counts, so that every count has to be read from the database.
    #[cfg(test)]
    pub fn forget_live(&self) {
        self.live.retain(|_| false);
    }

    /// Overwrites a stored value with bytes that do not open.
    #[cfg(test)]
    pub(crate) async fn damage(&self, key: &[u8]) {
        let mut batch = slatedb::WriteBatch::new();
        batch.put(key, b"damaged");
        self.db().write(batch).await.expect("the store is there");
        self.pages.retain(|_| false);
    }

    /// Makes everything written so far durable and ends the database's background tasks.
    ///
    /// # Errors
    /// Database errors; the database is closed in any case.
    pub async fn close(&self) -> Result<()> {
        self.db().close().await
    }
}

/// Waits for the end of a map's database; see [`Map::vigil`].
pub struct HealthWatcher {
    state: watch::Receiver<State>,
    status: watch::Receiver<DbStatus>,
}

impl HealthWatcher {
    /// Resolves to `true` when another handle is needed, and to `false` when none will follow.
    pub async fn ended(&mut self) -> bool {
        tokio::select! {
            is_ended = is_ended(&mut self.state) => is_ended,
            // A dropped handle has ended, too; the state tells whether that matters.
            _ = self.status.wait_for(|status| status.close_reason.is_some()) => {
                self.state.has_changed().is_ok()
                    && !matches!(self.state.borrow().health, Health::Final(_))
            }
        }
    }

    /// Resolves when no other handle will follow.
    pub async fn finished(&mut self) {
        // A map that has been dropped needs none.
        let _ = self.state.wait_for(|state| matches!(state.health, Health::Final(_))).await;
    }
}

async fn is_ended(state: &mut watch::Receiver<State>) -> bool {
    match state.wait_for(|state| !matches!(state.health, Health::Well)).await {
        Ok(state) => matches!(state.health, Health::Ended(_)),
        Err(_) => false,
    }
}

/// Up to `count_max` entries between two keys, in order.
async fn entries(
    db: &Database,
    from: Bound<Vec<u8>>,
    until: Bound<Vec<u8>>,
    count_max: usize,
) -> Result<Vec<(Bytes, Bytes)>> {
    let failed = |cause| db.failed("scan metadata", cause);
    let mut scan = db.scan((from, until)).await.map_err(failed)?;
    let mut found = Vec::new();
    while found.len() < count_max {
        match scan.next().await.map_err(failed)? {
            Some(entry) => found.push((entry.key, entry.value)),
            None => break,
        }
    }
    Ok(found)
}

/// The bound after the last key of a family.
fn after(family: u8) -> Bound<Vec<u8>> {
    Bound::Excluded(vec![family + 1])
}

async fn get(db: &Database, key: &[u8]) -> Result<Option<Bytes>> {
    let got = db.get(key).await;
    got.map_err(|cause| db.failed(format!("read metadata, {}", keys::name_of(key)), cause))
}
