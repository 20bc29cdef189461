//! Snapshots: their records, and the pages that they show.
//!
//! Invariants:
//! - A snapshot is identified by its layer and its LSN: it shows every window up to that LSN and
//!   nothing of later ones. A window ends at every snapshot.
//! - The record comes with the window that ends at its LSN. It is removed in the same batch that
//!   adds a prune record.
//! - A page is read before its copies: contents that were in no copy at that time were still with
//!   the page.

use super::history::{self, Copy};
use super::keys::{self, copy_of, corrupt, family, prune_key, snapshot_key};
use super::pages::{self, Page};
use super::{LayerId, LayerList, Map, PageKey, State, entries};
use block::units::u32_at;
use block::{Lsn, Result, VolumeId};
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const SNAPSHOT_VERSION: u8 = 1;
/// Bytes that the daemon may store with a snapshot. Chosen by hand: ten times the length of a name.
pub const SNAPSHOT_BYTES_MAX: usize = 4096;
const PRUNE_VERSION: u8 = 1;
const PRUNE_BYTES: usize = 1 + 4 + 1;
const PRUNE_AGAIN: u8 = 1;
const PRUNE_KEPT: u8 = 2;

/// The living snapshots of a pool. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct SnapshotList {
    layers: Arc<BTreeMap<LayerId, Vec<Lsn>>>,
    records: Arc<BTreeMap<(LayerId, Lsn), Bytes>>,
}

impl SnapshotList {
    pub(super) fn new(records: BTreeMap<(LayerId, Lsn), Bytes>, list: &LayerList) -> SnapshotList {
        Self::of_records(Arc::new(records), list)
    }

    fn of_records(records: Arc<BTreeMap<(LayerId, Lsn), Bytes>>, list: &LayerList) -> SnapshotList {
        let mut layers: BTreeMap<LayerId, Vec<Lsn>> = BTreeMap::new();
        for (layer, lsn) in records.keys() {
            layers.entry(*layer).or_default().push(*lsn);
        }
        for parent in list.parents() {
            let lsns = layers.entry(parent).or_default();
            lsns.extend(list.pins(parent));
            lsns.sort_unstable();
            lsns.dedup();
        }
        SnapshotList { layers: Arc::new(layers), records }
    }

    /// The same snapshots with other layers.
    pub(super) fn with_layers(&self, list: &LayerList) -> SnapshotList {
        Self::of_records(self.records.clone(), list)
    }

    /// LSNs of a layer's snapshots and of its states that are the base of another layer, ascending.
    #[must_use]
    pub fn of(&self, layer: LayerId) -> &[Lsn] {
        self.layers.get(&layer).map_or(&[], Vec::as_slice)
    }

    /// Every snapshot with its record, in order of layer and LSN.
    pub fn iter(&self) -> impl Iterator<Item = ((LayerId, Lsn), &Bytes)> + '_ {
        self.records.iter().map(|(key, record)| (*key, record))
    }

    /// Number of snapshots of the layer that has the most.
    pub(crate) fn count_max(&self) -> usize {
        self.layers.values().map(Vec::len).max().unwrap_or(0)
    }

    /// Whether both are the same state of the list.
    pub(crate) fn is_same(&self, other: &SnapshotList) -> bool {
        Arc::ptr_eq(&self.records, &other.records)
    }

    pub(super) fn changed(
        &self,
        list: &LayerList,
        changes: &[SnapshotChange],
        lsn: Lsn,
    ) -> SnapshotList {
        let mut records = (*self.records).clone();
        for change in changes {
            let layer = change.layer(list);
            match change {
                SnapshotChange::Made { record, .. } => records.insert((layer, lsn), record.clone()),
                SnapshotChange::Removed { lsn, .. } => records.remove(&(layer, *lsn)),
            };
        }
        SnapshotList::new(records, list)
    }
}

/// A change that a window makes to the list of snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotChange {
    /// A snapshot is made at the window's last LSN.
    Made {
        /// Its volume.
        volume: VolumeId,
        /// The daemon's record of it.
        record: Bytes,
    },
    /// A snapshot is removed; blocks that only it showed are dropped in the background.
    Removed {
        /// Its volume.
        volume: VolumeId,
        /// Its LSN.
        lsn: Lsn,
    },
}

impl SnapshotChange {
    pub(super) fn layer(&self, list: &LayerList) -> LayerId {
        match self {
            SnapshotChange::Made { volume, .. } => list.current(*volume),
            SnapshotChange::Removed { volume, lsn } => list.at(*volume, *lsn),
        }
    }
}

/// The stored form of a snapshot; layer and LSN are in the key. Byte table: docs/format-map.md.
#[must_use]
pub fn encode_snapshot(record: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(1 + record.len());
    bytes.push(SNAPSHOT_VERSION);
    bytes.extend_from_slice(record);
    bytes
}

/// Decodes the stored form and returns the daemon's record.
///
/// # Errors
/// `Corrupt`, naming the snapshot.
pub fn decode_snapshot(layer: LayerId, lsn: Lsn, bytes: &[u8]) -> Result<Bytes> {
    match bytes.split_first() {
        Some((&SNAPSHOT_VERSION, record)) if record.len() <= SNAPSHOT_BYTES_MAX => {
            Ok(Bytes::copy_from_slice(record))
        }
        _ => Err(corrupt(&snapshot_key(layer, lsn), "not a snapshot record")),
    }
}

/// Progress of pruning the copies of a layer after the removal of one of its snapshots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prune {
    /// Next page to look at.
    pub next_page: u32,
    /// Another snapshot was removed in the meantime, so a second pass from the start is needed.
    pub is_again: bool,
    /// The copies are done; the pages that keep counting replaced blocks follow.
    pub is_kept: bool,
}

impl Prune {
    /// The stored form; the layer is in the key. Byte table: docs/format-map.md.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(PRUNE_BYTES);
        bytes.push(PRUNE_VERSION);
        bytes.extend_from_slice(&self.next_page.to_le_bytes());
        let flag = |is_set, bit| if is_set { bit } else { 0 };
        bytes.push(flag(self.is_again, PRUNE_AGAIN) | flag(self.is_kept, PRUNE_KEPT));
        bytes
    }

    /// Reads the stored form.
    ///
    /// # Errors
    /// `Corrupt`, naming the layer.
    pub fn decode(layer: LayerId, bytes: &[u8]) -> Result<Prune> {
        match (bytes, u32_at(bytes, 1)) {
            (&[PRUNE_VERSION, _, _, _, _, flags @ 0..=3], Some(next_page)) => Ok(Prune {
                next_page,
                is_again: flags & PRUNE_AGAIN != 0,
                is_kept: flags & PRUNE_KEPT != 0,
            }),
            _ => Err(corrupt(&prune_key(layer), "not a prune record")),
        }
    }

    /// The progress after the removal of one more snapshot.
    pub(super) fn again(before: Option<Prune>) -> Prune {
        before.map_or(Prune::default(), |prune| Prune {
            is_again: prune.next_page > 0 || prune.is_kept,
            ..prune
        })
    }
}

impl Map {
    /// The living snapshots that are destaged.
    #[must_use]
    pub fn snapshots(&self) -> SnapshotList {
        self.snapshots.read().clone()
    }

    /// Whether blocks that only removed snapshots of the layer showed are still being dropped.
    #[must_use]
    pub fn is_prune_wanted(&self, layer: LayerId) -> bool {
        self.prunes.lock().contains_key(&layer)
    }

    /// Layers for which [`Map::is_prune_wanted`] holds.
    pub(crate) fn layers_to_prune(&self) -> Vec<LayerId> {
        self.prunes.lock().keys().copied().collect()
    }

    /// The operands stored under a page's dedicated key.
    ///
    /// # Errors
    /// Like [`Map::page`].
    pub async fn stored_operands(&self, layer: LayerId, page: u32) -> Result<Vec<super::Operand>> {
        self.operands(&self.db(), layer, page).await
    }

    /// The page as it was at an LSN. The layer must have a snapshot there, or nothing beyond it may
    /// be destaged.
    ///
    /// # Errors
    /// Like [`Map::page`].
    pub async fn page_at(&self, layer: LayerId, page: u32, at: Lsn) -> Result<Arc<Page>> {
        let key: PageKey = (layer, page, at);
        if let Some(page) = self.pages.get(&key) {
            return Ok(page);
        }
        let generation = self.generation.load(Ordering::SeqCst);
        // Most pages have not changed since the snapshot.
        let live = self.cached_page(layer, page);
        let ranges = self.ranges();
        if let Some(live) = live.filter(|live| live.operand_count > 0 && live.last_lsn <= at)
            && ranges.cut(layer, page) <= at
            && self.is_current(generation)
        {
            return Ok(live);
        }
        loop {
            let generation = self.generation.load(Ordering::SeqCst);
            // Entries that are not destaged yet may still change the page that the snapshot shows.
            let is_final = at <= self.destaged_lsn();
            // Read both through one handle, and the page before its copies.
            let state = self.state.borrow().clone();
            let State { db, ranges, layers, .. } = &state;
            let read = async {
                let operands = self.operands(db, layer, page).await?;
                let copy = self.first_copy(db, layer, page, at).await?;
                Ok((operands, copy))
            };
            let (operands, copy) = match read.await {
                Ok(read) => read,
                Err(error) => {
                    self.wait_reopened(db, error).await?;
                    continue;
                }
            };
            let cuts = ranges.cuts(layer, page);
            let runs = match copy {
                Some(copy) if copy.since <= at => Some(copy.runs),
                None if history::is_own_at(&operands, &cuts, at) => {
                    Some(history::state_at(&operands, &cuts, at))
                }
                _ => None,
            };
            let runs = match (runs, layers.base(layer, page)) {
                (Some(runs), _) => runs.into_boxed_slice(),
                (None, None) => Box::default(),
                (None, Some((parent, at))) => {
                    let base = Box::pin(self.page_at(parent, page, at)).await?;
                    if !self.is_based_as(&state, layer, page) {
                        continue; // it may have been promoted, and its base deleted
                    }
                    base.runs.clone()
                }
            };
            let found = Arc::new(Page { runs, ..Page::default() });
            if is_final {
                // Both under the cache's lock, so that a commit that removes old pages either sees
                // this page or has raised the generation.
                let is_current = || {
                    self.has_old_pages.store(true, Ordering::SeqCst);
                    self.is_current(generation)
                };
                self.pages.insert_if(key, found.clone(), found.memory_bytes(), is_current);
            }
            return Ok(found);
        }
    }

    /// The first copy of a page that ends at an LSN or later.
    async fn first_copy(
        &self,
        db: &super::Database,
        layer: LayerId,
        page: u32,
        at: Lsn,
    ) -> Result<Option<Copy>> {
        let from = Bound::Included(keys::copy_key(layer, page, at).to_vec());
        let until = Bound::Included(keys::copy_key(layer, page, Lsn(u64::MAX)).to_vec());
        let found = entries(db, from, until, 1).await?;
        let Some((key, value)) = found.first() else { return Ok(None) };
        self.decode_copy(key, value).map(|(_, _, copy)| Some(copy))
    }

    /// Every copy of a page, oldest first.
    pub(super) async fn copies(
        &self,
        db: &super::Database,
        layer: LayerId,
        page: u32,
    ) -> Result<Vec<Copy>> {
        let from = Bound::Included(keys::copy_key(layer, page, Lsn::NONE).to_vec());
        let until = Bound::Included(keys::copy_key(layer, page, Lsn(u64::MAX)).to_vec());
        let found = entries(db, from, until, usize::MAX).await?;
        found.iter().map(|(key, value)| Ok(self.decode_copy(key, value)?.2)).collect()
    }

    /// Decodes a copy, with its layer and page number.
    pub(super) fn decode_copy(&self, key: &[u8], value: &[u8]) -> Result<(LayerId, u32, Copy)> {
        let (layer, page, until) = copy_of(key).ok_or_else(|| corrupt(key, "not a copy's key"))?;
        let plain = self.opener.open_one(key, value)?;
        let image = pages::decode(&plain).map_err(|error| corrupt(key, error))?;
        if !image.is_image() || image.lsn > until {
            return Err(corrupt(key, "not a copy of a page"));
        }
        Ok((layer, page, Copy { until, since: image.lsn, runs: image.runs }))
    }

    /// Up to `count_max` copies after `last`, or from the first one on if it is `None`, in order of
    /// layer, page and LSN. A copy that does not open is returned with its error.
    ///
    /// # Errors
    /// Database errors.
    pub async fn copies_after(
        &self,
        last: Option<(LayerId, u32, Lsn)>,
        count_max: usize,
    ) -> Result<Vec<StoredCopy>> {
        let from = match last {
            Some((layer, page, until)) => {
                Bound::Excluded(keys::copy_key(layer, page, until).to_vec())
            }
            None => Bound::Included(vec![family::COPY]),
        };
        let mut found = Vec::new();
        for (key, value) in entries(&self.db(), from, super::after(family::COPY), count_max).await?
        {
            let (layer, page, until) =
                copy_of(&key).ok_or_else(|| corrupt(&key, "not a copy's key"))?;
            let copy = self.decode_copy(&key, &value).map(|(_, _, copy)| copy);
            found.push(StoredCopy { layer, page, until, copy });
        }
        Ok(found)
    }

    /// Up to `count_max` of these pages of a layer, as they were at an LSN, and the number of the page
    /// up to which the result is complete.
    ///
    /// # Errors
    /// Like [`Map::page`].
    pub async fn pages_between_at(
        &self,
        layer: LayerId,
        pages: RangeInclusive<u32>,
        at: Lsn,
        count_max: usize,
    ) -> Result<(Vec<(u32, Arc<Page>)>, u32)> {
        let (numbers, until) = loop {
            let db = self.db();
            match self.numbers_between(&db, layer, pages.clone(), count_max).await {
                Ok(found) => break found,
                Err(error) => self.wait_reopened(&db, error).await?,
            }
        };
        let mut found = Vec::new();
        for page in numbers.into_iter().filter(|page| *page <= until) {
            found.push((page, self.page_at(layer, page, at).await?));
        }
        Ok((found, until))
    }

    /// Like [`Map::pages_between`], for a layer with a base.
    pub(super) async fn pages_between_based(
        &self,
        layer: LayerId,
        pages: RangeInclusive<u32>,
        count_max: usize,
    ) -> Result<(Vec<(u32, Arc<Page>)>, u32)> {
        let (numbers, until) = loop {
            let db = self.db();
            match self.numbers_between(&db, layer, pages.clone(), count_max).await {
                Ok(found) => break found,
                Err(error) => self.wait_reopened(&db, error).await?,
            }
        };
        let mut found = Vec::new();
        for page in numbers.into_iter().filter(|page| *page <= until) {
            found.push((page, self.page(layer, page).await?));
        }
        Ok((found, until))
    }

    /// Numbers of pages that are stored or have copies in the layer or in its bases, and the number
    /// up to which the result is complete.
    pub(super) async fn numbers_between(
        &self,
        db: &super::Database,
        layer: LayerId,
        pages: RangeInclusive<u32>,
        count_max: usize,
    ) -> Result<(BTreeSet<u32>, u32)> {
        loop {
            let bases = self.layers().bases(layer);
            let (mut numbers, mut until) =
                self.numbers_of(db, layer, pages.clone(), count_max).await?;
            for base in &bases {
                let (more, end) =
                    self.numbers_of(db, *base, *pages.start()..=until, count_max).await?;
                numbers.extend(more);
                until = until.min(end);
            }
            if self.layers().bases(layer) != bases {
                continue; // a promotion may have moved pages from a base into the layer
            }
            numbers.retain(|number| *number <= until);
            return Ok((numbers, until));
        }
    }

    /// Numbers of pages of a layer that are stored or have copies, and the number up to which the
    /// result is complete.
    async fn numbers_of(
        &self,
        db: &super::Database,
        layer: LayerId,
        pages: RangeInclusive<u32>,
        count_max: usize,
    ) -> Result<(BTreeSet<u32>, u32)> {
        let (first, mut until) = pages.into_inner();
        let mut numbers = BTreeSet::new();
        let keys_of = |from: &[u8], end: &[u8]| {
            (Bound::Included(from.to_vec()), Bound::Included(end.to_vec()))
        };
        let (from, end) = keys_of(&keys::page_key(layer, first), &keys::page_key(layer, until));
        let live = entries(db, from, end, count_max).await?;
        let pages: Vec<u32> =
            live.iter().filter_map(|(key, _)| Some(keys::page_of(key)?.1)).collect();
        if pages.len() == count_max {
            until = pages.last().copied().unwrap_or(until);
        }
        numbers.extend(pages);
        // Pages with copies and nothing else are rare, because an emptied page keeps an operand
        // that says so as long as it has copies.
        let mut next = first;
        while next <= until && numbers.len() < 2 * count_max {
            let (from, end) = keys_of(
                &keys::copy_key(layer, next, Lsn::NONE),
                &keys::copy_key(layer, until, Lsn(u64::MAX)),
            );
            let found = entries(db, from, end, 1).await?;
            let Some((_, page, _)) = found.first().and_then(|(key, _)| copy_of(key)) else { break };
            numbers.insert(page);
            if numbers.len() == 2 * count_max {
                until = until.min(page);
            }
            let Some(after) = page.checked_add(1) else { break };
            next = after;
        }
        Ok((numbers, until))
    }
}

/// A copy as stored in the database.
#[derive(Debug)]
pub struct StoredCopy {
    /// Its layer.
    pub layer: LayerId,
    /// Number of its page.
    pub page: u32,
    /// LSN of the newest snapshot that shows it.
    pub until: Lsn,
    /// The decoded copy.
    pub copy: Result<Copy>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_read_back_and_nothing_else_does() {
        let (layer, lsn) = (LayerId(3), Lsn(77));
        let bytes = encode_snapshot(b"nightly");
        assert_eq!(decode_snapshot(layer, lsn, &bytes).unwrap(), b"nightly".as_slice());
        for wrong in [&b""[..], b"\x02nightly", &[1; SNAPSHOT_BYTES_MAX + 2]] {
            let error = decode_snapshot(layer, lsn, wrong).unwrap_err();
            assert!(error.to_string().contains("snapshot 77 of layer 3"), "{error}");
        }
        for prune in
            [Prune::default(), Prune { next_page: u32::MAX, is_again: true, is_kept: true }]
        {
            assert_eq!(Prune::decode(layer, &prune.encode()).unwrap(), prune);
        }
        for wrong in [&b""[..], &[2, 0, 0, 0, 0, 0], &[1, 0, 0, 0, 0, 4], &[1, 0, 0, 0, 0]] {
            assert!(Prune::decode(layer, wrong).is_err(), "{wrong:?}");
        }
    }
}
