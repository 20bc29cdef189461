//! The map: which frame holds each block of each volume, over SlateDB.
//!
//! Owns the metadata database, the page cache and the segment records. Reading is here, writing in
//! `commit`, how it is opened in `opening`.
//!
//! Invariants:
//! - What is read is what some commit made durable, or is about to: readers never see half a page.
//! - Every value is opened with its own key as associated data; what does not open is `Corrupt`.
//! - Memory is bounded by [`MapOptions`] whatever the size of the volumes. Opening reads the root,
//!   the range records and the volume records, never a page.
//! - Only the holder of the [`Writer`] changes anything.
//! - The database and the ranges that go with it are replaced together, so that no page is folded
//!   with the ranges of another state: see [`Map::reopen`].

pub mod clock_cache;
mod clones;
pub mod commit;
mod counts;
pub mod database;
pub(crate) mod dedup;
mod fold;
mod forward;
#[cfg(test)]
pub(crate) mod golden;
mod held;
pub mod history;
pub mod keys;
pub mod layers;
mod opening;
pub mod pages;
mod pinned;
mod prune;
pub mod ranges;
pub mod records;
pub mod repoint;
mod settle;
pub mod snapshots;
pub mod space;
pub mod view;

pub use clones::{LayerChange, NewLayer, PromoteReport};
pub use commit::{Change, Commit, CommitReport, FoldReport, Placed, Writer};
pub use layers::{LayerId, LayerList, LayerRecord};
pub use prune::PruneReport;
pub use repoint::{Moved, Repoint, RepointReport};
pub use snapshots::{SnapshotChange, SnapshotList};

use crate::dedup::Found;
use crate::planted::Planted;
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use bytes::Bytes;
use clock_cache::ClockCache;
use database::Database;
use futures::TryStreamExt;
use keys::{Opener, family, number_of, page_of};
use pages::{Operand, Page};
use parking_lot::{Mutex, RwLock};
use ranges::RangeList;
use records::{AsideFile, SegmentRecord};
use slatedb::DbStatus;
use snapshots::Prune;
use space::SpaceCounter;
use std::collections::{BTreeMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::watch;

/// Longest that a read waits for another handle of a database that has given up. Chosen by hand, as
/// the patience with a store that does not answer ([`crate::fetch::FramesOptions`]).
const REOPEN_WAIT_MAX: Duration = Duration::from_secs(120);

/// Memory of the map, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct MapOptions {
    /// Decoded pages.
    pub page_cache_bytes: usize,
    /// Segment records and live-block counts.
    pub segment_cache_bytes: usize,
}

impl Default for MapOptions {
    fn default() -> Self {
        MapOptions { page_cache_bytes: 64 << 20, segment_cache_bytes: 8 << 20 }
    }
}

/// A page in the cache: as it is ([`LIVE`]), or as a snapshot at that LSN shows it.
type PageKey = (LayerId, u32, Lsn);
/// As it is.
const LIVE: Lsn = Lsn(u64::MAX);

/// Pages read at the same time where only their being readable matters. Chosen by hand.
const CHECKS_MAX: usize = 32;

/// Counts for status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MapStatus {
    /// Commits since the pool was made.
    pub commit_number: u64,
    /// Everything up to here is in the data tier.
    pub destaged_lsn: Lsn,
    /// Range records that wait to be folded.
    pub range_count: usize,
    /// Layers of which snapshots were removed, and what only these showed is still to be dropped.
    pub prune_count: usize,
    /// Bytes of decoded pages in memory.
    pub page_cache_bytes: usize,
    /// Decoded pages in memory.
    pub page_count: usize,
}

/// A page as it is stored.
#[derive(Debug)]
pub struct StoredPage {
    /// Its layer.
    pub layer: LayerId,
    /// Its number within the layer.
    pub page: u32,
    /// What readers see; empty where `operands` is an error.
    pub folded: Page,
    /// Everything that is stored, oldest first, also what a range hides.
    pub operands: Result<Vec<Operand>>,
}

/// Whether the map can be written and read.
#[derive(Clone, Debug, Default)]
pub enum Health {
    /// It can.
    #[default]
    Well,
    /// Its database has given up, or a commit has failed; another handle is needed.
    Ended(Error),
    /// There will be no other handle: somebody else owns the pool, or it is closed.
    Final(Error),
}

/// Pages of snapshots, and of layers that show their base, that a change takes out of the cache.
#[derive(Clone, Copy)]
pub(super) enum Forget<'a> {
    /// None.
    Nothing,
    /// Those of these numbers.
    Moved(&'a HashSet<u32>),
    /// Every one.
    All,
}

/// What a page is read with.
#[derive(Clone)]
struct State {
    db: Arc<Database>,
    ranges: RangeList,
    layers: LayerList,
    health: Health,
}

/// See the module.
pub struct Map {
    state: watch::Sender<State>,
    opener: Opener,
    pages: ClockCache<PageKey, Arc<Page>>,
    /// See [`LayerList::has_later`]: most pools have none, and their reads do not ask the list.
    has_later_layers: AtomicBool,
    /// Pages that snapshots show may be in the cache.
    has_old_pages: AtomicBool,
    /// Bytes of new pages that a commit may hold back to put into the cache.
    page_retain_bytes: usize,
    segments: ClockCache<u64, Arc<SegmentRecord>>,
    live: ClockCache<u64, u32>,
    /// How much of what the store holds is live.
    pub(crate) space: SpaceCounter,
    volume_records: RwLock<BTreeMap<VolumeId, Bytes>>,
    /// Side files of volumes that are behind the others.
    asides: RwLock<BTreeMap<VolumeId, Vec<AsideFile>>>,
    snapshots: RwLock<SnapshotList>,
    /// Layers that have to be pruned.
    prunes: Mutex<BTreeMap<LayerId, Prune>>,
    /// What deduplication has found.
    found: RwLock<BTreeMap<VolumeId, Found>>,
    /// Raised before and after the caches change, so it is odd meanwhile: a page that was read under an older
    /// number may be stale, and one that was read meanwhile may be made of another one that is. Neither is cached.
    /// Only the holder of the writer changes it.
    generation: AtomicU64,
    /// Counts commits that have forgotten segments. Raised after the caches have changed, and before
    /// anything is deleted: who finds a segment gone and the count as it was before it looked into the
    /// map has found damage.
    repoints: AtomicU64,
    destaged: AtomicU64,
    commit_number: AtomicU64,
    /// Bugs, in tests.
    pub(crate) planted: Planted,
}

impl Map {
    /// The database at this moment.
    pub fn db(&self) -> Arc<Database> {
        self.state.borrow().db.clone()
    }

    /// The database, and the cut of a page that goes with it.
    fn db_and_cut(&self, layer: LayerId, page: u32) -> (Arc<Database>, Lsn) {
        let state = self.state.borrow();
        (state.db.clone(), state.ranges.cut(layer, page))
    }

    pub(crate) fn ranges(&self) -> RangeList {
        self.state.borrow().ranges.clone()
    }

    /// The layer of a volume's newest state, or of what its snapshot at an LSN shows.
    pub(crate) fn layer_of(&self, volume: VolumeId, at: Option<Lsn>) -> LayerId {
        if !self.has_later_layers.load(Ordering::Acquire) {
            return LayerId::of_volume(volume);
        }
        let layers = self.layers();
        at.map_or_else(|| layers.current(volume), |at| layers.at(volume, at))
    }

    /// The layers at this moment.
    pub fn layers(&self) -> LayerList {
        self.state.borrow().layers.clone()
    }

    fn set_ranges(&self, ranges: RangeList) {
        self.state.send_modify(|state| state.ranges = ranges);
    }

    /// Whether it can be written and read.
    pub fn health(&self) -> Health {
        self.state.borrow().health.clone()
    }

    /// Notes that another handle is needed. What is final stays so.
    pub fn set_ended(&self, error: Error) {
        self.state.send_modify(|state| {
            if !matches!(state.health, Health::Final(_)) {
                state.health = Health::Ended(error);
            }
        });
    }

    /// Notes that there will be no other handle. The first reason stays.
    pub fn set_final(&self, error: Error) {
        self.state.send_modify(|state| {
            if !matches!(state.health, Health::Final(_)) {
                state.health = Health::Final(error);
            }
        });
    }

    /// To wait for the end without keeping the map alive.
    pub fn vigil(&self) -> Vigil {
        let state = self.state.subscribe();
        let status = state.borrow().db.subscribe();
        Vigil { state, status }
    }

    /// Whether the holder of `writer` may change anything.
    ///
    /// # Errors
    /// `Unavailable` until another handle has been opened; `Fenced` for good.
    pub fn check(&self, writer: &Writer) -> Result<()> {
        let state = self.state.borrow();
        if let Health::Final(error) = &state.health {
            return Err(error.clone());
        }
        writer.check()?;
        let what = "the metadata database has ended and is being opened anew";
        match &state.health {
            Health::Ended(error) => {
                Err(Error::with_source(ErrorKind::Unavailable, what, error.clone()))
            }
            _ if state.db.has_given_up() => Err(Error::new(ErrorKind::Unavailable, what)),
            _ => Ok(()),
        }
    }

    /// Waits until the database is not being opened anew, or for too long. Not for the holder of the
    /// [`Writer`].
    pub(crate) async fn wait_well(&self) {
        let mut state = self.state.subscribe();
        let settled = state.wait_for(|state| !matches!(state.health, Health::Ended(_)));
        let _ = tokio::time::timeout(REOPEN_WAIT_MAX, settled).await;
    }

    /// After `db` has failed with `error`: waits until another handle has taken its place, if it has
    /// given up; hands the error back otherwise, or when that takes too long. Not for the holder of
    /// the [`Writer`], without which there is no other handle.
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

    /// Everything up to this LSN is durable in the data tier.
    pub fn destaged_lsn(&self) -> Lsn {
        Lsn(self.destaged.load(Ordering::Acquire))
    }

    /// The newest record of every volume, by id.
    pub fn volume_records(&self) -> Vec<(VolumeId, Bytes)> {
        self.volume_records.read().iter().map(|(id, record)| (*id, record.clone())).collect()
    }

    /// Commits that have forgotten segments: see the field.
    pub(crate) fn repoint_count(&self) -> u64 {
        self.repoints.load(Ordering::SeqCst)
    }

    /// Volumes that are behind the others, with the side files that hold what is missing.
    pub fn asides(&self) -> BTreeMap<VolumeId, Vec<AsideFile>> {
        self.asides.read().clone()
    }

    /// Reads what a commit to these pages of a layer would read.
    ///
    /// # Errors
    /// As [`Map::page`].
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

    /// The page if it is in memory. Never waits.
    pub fn cached_page(&self, layer: LayerId, page: u32) -> Option<Arc<Page>> {
        self.pages.get(&(layer, page, LIVE))
    }

    /// Whoever read under this generation may keep what it has read.
    fn is_current(&self, generation: u64) -> bool {
        generation.is_multiple_of(2) && self.generation.load(Ordering::SeqCst) == generation
    }

    /// What snapshots show of pages, and what layers show of their base, may have changed its place. While the caches
    /// change: see the field.
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

    /// The base of a page is what it was in a state that was read.
    fn is_based_as(&self, state: &State, layer: LayerId, page: u32) -> bool {
        let now = self.state.borrow();
        Arc::ptr_eq(&now.db, &state.db)
            && now.layers.base(layer, page) == state.layers.base(layer, page)
    }

    /// The page, from memory or from the database.
    ///
    /// # Errors
    /// `Corrupt`, naming the page; what the database says.
    pub async fn page(&self, layer: LayerId, page: u32) -> Result<Arc<Page>> {
        if let Some(page) = self.cached_page(layer, page) {
            return Ok(page);
        }
        loop {
            let generation = self.generation.load(Ordering::SeqCst);
            // The ranges before the page: a range that is folded in between would otherwise be missing
            // while the page still shows what it hides. The layers likewise.
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
                        continue; // it may be promoted by now, and its base gone
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

    /// What is stored of a page, oldest operand first.
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
    /// `NotFound` if there is none: it was forgotten since the page was read, or the map is damaged.
    pub async fn segment(&self, number: u64) -> Result<Arc<SegmentRecord>> {
        if let Some(record) = self.segments.get(&number) {
            return Ok(record);
        }
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
        self.segments.insert(number, record.clone(), size_of::<SegmentRecord>());
        Ok(record)
    }

    /// The record if it is in memory. Never waits.
    pub fn cached_segment(&self, number: u64) -> Option<Arc<SegmentRecord>> {
        self.segments.get(&number)
    }

    /// The record of a segment, from the database, if it has one.
    ///
    /// # Errors
    /// `Corrupt`; what the database says.
    pub async fn find_segment(&self, number: u64) -> Result<Option<SegmentRecord>> {
        self.segment_in(&self.db(), number).await
    }

    /// The record of a segment in some state of the metadata, if it has one there.
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

    /// The count of a segment's live blocks; 0 where there is none.
    ///
    /// # Errors
    /// `Corrupt`, naming the segment; what the database says.
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

    /// Up to `count_max` segments that follow number `last`, in order, each with its live blocks.
    ///
    /// # Errors
    /// `Corrupt`; what the database says.
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

    /// As [`Map::segments_after`], read in two scans and past the cache, with the number to go on after if
    /// there may be more. A count that does not open is taken for all of the segment, and a segment whose
    /// record does not open is passed over.
    ///
    /// # Errors
    /// What the database says.
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
                Ok(record) => found.push((record, record.block_count)),
                // Whoever reads from it is told; the others are not to wait for it.
                Err(error) => tracing::debug!(error = %error.chain(), "a segment is passed over"),
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

    /// Up to `count_max` pages that follow `last` (from the first one on without it), in order of
    /// layer and number. A page that does not open is handed on with its error.
    ///
    /// # Errors
    /// What the database says.
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

    /// Up to `count_max` pages of a layer from `first` to `last` that are stored, as readers see them, and the
    /// page up to which none was left out.
    ///
    /// # Errors
    /// `Corrupt`, naming the page; what the database says.
    pub async fn pages_between(
        &self,
        layer: LayerId,
        first: u32,
        last: u32,
        count_max: usize,
    ) -> Result<(Vec<(u32, Arc<Page>)>, u32)> {
        if self.layers().base(layer, last).is_some() {
            return self.pages_between_based(layer, (first, last), count_max).await;
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
    /// `Corrupt`, naming the layer; what the database says.
    pub async fn layer(&self, layer: LayerId) -> Result<Option<LayerRecord>> {
        let key = keys::layer_key(layer);
        match get(&self.db(), &key).await? {
            Some(value) => {
                Ok(Some(LayerRecord::decode(layer, &self.opener.open_one(&key, &value)?)?))
            }
            None => Ok(None),
        }
    }

    /// As after a while: every page has to be read from the database.
    #[cfg(test)]
    pub fn forget_pages(&self) {
        self.pages.retain(|_| false);
    }

    /// As after a while: every count has to be read from the database.
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
    /// What the database says; it is closed in any case.
    pub async fn close(&self) -> Result<()> {
        self.db().close().await
    }
}

/// Waits for the end of a map's database; see [`Map::vigil`].
pub struct Vigil {
    state: watch::Receiver<State>,
    status: watch::Receiver<DbStatus>,
}

impl Vigil {
    /// Resolves when another handle is needed; `false` when there will be none.
    pub async fn ended(&mut self) -> bool {
        tokio::select! {
            is_ended = is_ended(&mut self.state) => is_ended,
            // A handle that is gone has ended, too; the state tells whether it matters.
            _ = self.status.wait_for(|status| status.close_reason.is_some()) => {
                self.state.has_changed().is_ok()
                    && !matches!(self.state.borrow().health, Health::Final(_))
            }
        }
    }

    /// Resolves when there will be no other handle.
    pub async fn finished(&mut self) {
        // A map that is gone needs none.
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

/// Where the keys of a family end.
fn after(family: u8) -> Bound<Vec<u8>> {
    Bound::Excluded(vec![family + 1])
}

async fn get(db: &Database, key: &[u8]) -> Result<Option<Bytes>> {
    let got = db.get(key).await;
    got.map_err(|cause| db.failed(format!("read metadata, {}", keys::name_of(key)), cause))
}
