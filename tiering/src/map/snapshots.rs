//! Snapshots: their records, and what they show of a page.
//!
//! Invariants:
//! - A snapshot is named by its layer and its LSN: it shows every window up to that LSN, and nothing of the
//!   later ones. Windows end where a snapshot is.
//! - The record comes with the window that ends at its LSN, and goes in one batch with a prune record.
//! - A page is read before its copies: what is not in a copy then was still with the page.

use super::history::{self, Copy};
use super::keys::{self, copy_of, corrupt, family, prune_key, snapshot_key};
use super::pages::{self, Page};
use super::{LayerId, LayerList, Map, PageKey, State, entries};
use block::units::u32_at;
use block::{Lsn, Result, VolumeId};
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const SNAPSHOT_VERSION: u8 = 1;
/// What the daemon may say of a snapshot, in bytes. Chosen by hand: ten times what a name takes.
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

    /// LSNs of a layer's snapshots, and of what is the base of another layer, ascending.
    #[must_use]
    pub fn of(&self, layer: LayerId) -> &[Lsn] {
        self.layers.get(&layer).map_or(&[], Vec::as_slice)
    }

    /// Every snapshot with its record, in order of layer and LSN.
    pub fn iter(&self) -> impl Iterator<Item = ((LayerId, Lsn), &Bytes)> + '_ {
        self.records.iter().map(|(key, record)| (*key, record))
    }

    /// Snapshots of the layer that has most.
    pub(crate) fn count_max(&self) -> usize {
        self.layers.values().map(Vec::len).max().unwrap_or(0)
    }

    /// It is the same state of the list.
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

/// What a window does to snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotChange {
    /// One is made at the window's last LSN.
    Made {
        /// Of what.
        volume: VolumeId,
        /// What the daemon wants to know of it.
        record: Bytes,
    },
    /// One is removed; what only it showed is dropped in the background.
    Removed {
        /// Of what.
        volume: VolumeId,
        /// Which.
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

/// Reads the stored form: the daemon's record.
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

/// How far the copies of a layer have been looked at since one of its snapshots was removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prune {
    /// Where to go on.
    pub next_page: u32,
    /// Another one was removed meanwhile: once more from the start.
    pub is_again: bool,
    /// The copies are done; it is the turn of the pages that keep counting what was replaced.
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

    /// After one more was removed.
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

    /// What only removed snapshots of the layer showed is still being dropped.
    #[must_use]
    pub fn is_prune_wanted(&self, layer: LayerId) -> bool {
        self.prunes.lock().contains_key(&layer)
    }

    /// Layers of which that is so.
    pub(crate) fn layers_to_prune(&self) -> Vec<LayerId> {
        self.prunes.lock().keys().copied().collect()
    }

    /// What is stored under a page's own key.
    ///
    /// # Errors
    /// As [`Map::page`].
    pub async fn stored_operands(&self, layer: LayerId, page: u32) -> Result<Vec<super::Operand>> {
        self.operands(&self.db(), layer, page).await
    }

    /// The page as it was at an LSN at which its layer has a snapshot, or none is destaged beyond it.
    ///
    /// # Errors
    /// As [`Map::page`].
    pub async fn page_at(&self, layer: LayerId, page: u32, at: Lsn) -> Result<Arc<Page>> {
        let key: PageKey = (layer, page, at);
        if let Some(page) = self.pages.get(&key) {
            return Ok(page);
        }
        let generation = self.generation.load(Ordering::SeqCst);
        // Most pages have not changed since.
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
            // What is not destaged yet may still change what the snapshot shows.
            let is_final = at <= self.destaged_lsn();
            // One handle for both, and the page before its copies.
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
                        continue; // it may be promoted by now, and its base gone
                    }
                    base.runs.clone()
                }
            };
            let found = Arc::new(Page { runs, ..Page::default() });
            if is_final {
                // Both under the cache's lock: who forgets them sees this one, or has raised the generation.
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

    /// Reads a copy and what it is of.
    pub(super) fn decode_copy(&self, key: &[u8], value: &[u8]) -> Result<(LayerId, u32, Copy)> {
        let (layer, page, until) = copy_of(key).ok_or_else(|| corrupt(key, "not a copy's key"))?;
        let plain = self.opener.open_one(key, value)?;
        let image = pages::decode(&plain).map_err(|error| corrupt(key, error))?;
        if !image.is_image() || image.lsn > until {
            return Err(corrupt(key, "not a copy of a page"));
        }
        Ok((layer, page, Copy { until, since: image.lsn, runs: image.runs }))
    }

    /// Up to `count_max` copies that follow `last` (from the first one on without it), in order of layer,
    /// page and LSN. One that does not open is handed on with its error.
    ///
    /// # Errors
    /// What the database says.
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

    /// Up to `count_max` pages of a layer from `first` to `last`, as they were at an LSN, and the page up to
    /// which none was left out.
    ///
    /// # Errors
    /// As [`Map::page`].
    pub async fn pages_between_at(
        &self,
        layer: LayerId,
        (first, last): (u32, u32),
        at: Lsn,
        count_max: usize,
    ) -> Result<(Vec<(u32, Arc<Page>)>, u32)> {
        let (numbers, until) = loop {
            let db = self.db();
            match self.numbers_between(&db, layer, (first, last), count_max).await {
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

    /// As [`Map::pages_between`], of a layer with a base.
    pub(super) async fn pages_between_based(
        &self,
        layer: LayerId,
        (first, last): (u32, u32),
        count_max: usize,
    ) -> Result<(Vec<(u32, Arc<Page>)>, u32)> {
        let (numbers, until) = loop {
            let db = self.db();
            match self.numbers_between(&db, layer, (first, last), count_max).await {
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

    /// Numbers of pages that are stored, or have copies, of the layer or of one that it shows something of, and
    /// the one up to which none was left out.
    pub(super) async fn numbers_between(
        &self,
        db: &super::Database,
        layer: LayerId,
        (first, last): (u32, u32),
        count_max: usize,
    ) -> Result<(BTreeSet<u32>, u32)> {
        loop {
            let bases = self.layers().bases(layer);
            let (mut numbers, mut until) =
                self.numbers_of(db, layer, (first, last), count_max).await?;
            for base in &bases {
                let (more, end) = self.numbers_of(db, *base, (first, until), count_max).await?;
                numbers.extend(more);
                until = until.min(end);
            }
            if self.layers().bases(layer) != bases {
                continue; // promoted meanwhile: what was the base's may be its own now, and not there any more
            }
            numbers.retain(|number| *number <= until);
            return Ok((numbers, until));
        }
    }

    /// Numbers of pages of a layer that are stored, or have copies, and the one up to which none was left out.
    async fn numbers_of(
        &self,
        db: &super::Database,
        layer: LayerId,
        (first, last): (u32, u32),
        count_max: usize,
    ) -> Result<(BTreeSet<u32>, u32)> {
        let mut until = last;
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
        // A page with copies and nothing else is rare: a page that is empty says so while it has any.
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

/// A copy as it is stored.
#[derive(Debug)]
pub struct StoredCopy {
    /// Its layer.
    pub layer: LayerId,
    /// The page that it is of.
    pub page: u32,
    /// LSN of the newest snapshot that shows it.
    pub until: Lsn,
    /// It.
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
