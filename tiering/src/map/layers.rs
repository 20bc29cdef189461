//! Layers: generations of a volume's map, and the layers that they were made from.
//!
//! Invariants:
//! - The number of a volume's first layer is the volume's id. Each rollback adds a layer whose
//!   number is `2^32` higher. No number is ever used again, and a layer's parent never changes.
//! - In every page of which it stores nothing, and that no range of its own hides, a layer with a
//!   base shows the parent as of the base's LSN. A page of which the layer stores anything is its
//!   own: the first operand is an image of the whole page, even if it is empty.
//! - Without deduplication, a page never stores blocks of a layer below its own: blocks written for
//!   a layer are named only by this layer and by layers below it, even if these no longer have a
//!   base.
//! - A former layer is no longer the current one of its volume: its snapshots can be read, but not
//!   its newest state.

use super::keys::{corrupt, layer_key};
use block::units::{array_at, u32_at, u64_at};
use block::{Lsn, Result, VolumeId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Version for layers that have no parent and are not former.
const LAYER_VERSION: u8 = 1;
const LAYER_BYTES: usize = 1 + 4 + 8;
/// Version for all other layers.
const LAYER_VERSION_BASED: u8 = 2;
const LAYER_BYTES_BASED: usize = LAYER_BYTES + 8 + 8 + 4 + 1;
const FLAG_PROMOTED: u8 = 1;
const FLAG_FORMER: u8 = 2;

/// Number of a layer within its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerId(pub u64);

impl LayerId {
    /// The first layer of a volume.
    #[must_use]
    pub fn of_volume(volume: VolumeId) -> LayerId {
        LayerId(volume.0.into())
    }

    /// The volume whose layer it is or was.
    #[must_use]
    pub fn volume(self) -> VolumeId {
        VolumeId((self.0 & u64::from(u32::MAX)) as u32)
    }

    /// The volume's layer after the next rollback; `None` after 2^32 of them.
    #[must_use]
    pub fn next(self) -> Option<LayerId> {
        self.0.checked_add(1 << 32).map(LayerId)
    }
}

impl std::fmt::Display for LayerId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// The part of its parent that a layer shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// LSN as of which the parent is shown, and at which it has or had a snapshot. Not 0.
    pub lsn: Lsn,
    /// Pages below this number are the layer's own: it is promoted up to here.
    pub next_page: u32,
    /// The layer is being promoted, which makes it independent of its parent.
    pub is_promoted: bool,
}

/// The stored record of a layer, written with the first page or range of the layer, or when it is
/// made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerRecord {
    /// The volume that the layer was made for.
    pub volume: VolumeId,
    /// The layer that it was made from.
    pub parent: Option<LayerId>,
    /// The part of the parent that it shows.
    pub base: Option<Base>,
    /// Snapshots of the volume after this LSN belong to this layer or to a later one.
    pub since: Lsn,
    /// Its newest state is not read any more: see the module.
    pub is_former: bool,
}

impl LayerRecord {
    /// The record of a volume that was not made from another one.
    #[must_use]
    pub fn plain(volume: VolumeId) -> LayerRecord {
        LayerRecord { volume, parent: None, base: None, since: Lsn::NONE, is_former: false }
    }

    /// The stored form. Byte table: docs/format-map.md#layer-record.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let is_plain = *self == LayerRecord::plain(self.volume);
        let mut bytes = Vec::with_capacity(LAYER_BYTES_BASED);
        bytes.push(if is_plain { LAYER_VERSION } else { LAYER_VERSION_BASED });
        bytes.extend_from_slice(&self.volume.0.to_le_bytes());
        bytes.extend_from_slice(&self.parent.map_or(0, |parent| parent.0).to_le_bytes());
        if is_plain {
            return bytes;
        }
        let base = self.base.unwrap_or(Base { lsn: Lsn::NONE, next_page: 0, is_promoted: false });
        bytes.extend_from_slice(&base.lsn.0.to_le_bytes());
        bytes.extend_from_slice(&self.since.0.to_le_bytes());
        bytes.extend_from_slice(&base.next_page.to_le_bytes());
        let flag = |is_set, bit| if is_set { bit } else { 0 };
        bytes.push(flag(base.is_promoted, FLAG_PROMOTED) | flag(self.is_former, FLAG_FORMER));
        bytes
    }

    /// Reads the stored form.
    ///
    /// # Errors
    /// `Corrupt`, naming the layer.
    pub fn decode(layer: LayerId, bytes: &[u8]) -> Result<LayerRecord> {
        let wrong = || corrupt(&layer_key(layer), "not a layer record");
        let (version, rest) = bytes.split_first().ok_or_else(wrong)?;
        let volume = VolumeId(u32_at(rest, 0).ok_or_else(wrong)?);
        let parent = u64_at(rest, 4).ok_or_else(wrong)?;
        let parent = Some(LayerId(parent)).filter(|parent| parent.0 != 0);
        match (*version, bytes.len()) {
            (LAYER_VERSION, LAYER_BYTES) if parent.is_none() => Ok(LayerRecord::plain(volume)),
            (LAYER_VERSION_BASED, LAYER_BYTES_BASED) => {
                let read = || {
                    let (lsn, since) = (Lsn(u64_at(rest, 12)?), Lsn(u64_at(rest, 20)?));
                    let (next_page, [flags]) = (u32_at(rest, 28)?, array_at(rest, 32)?);
                    if flags & !(FLAG_PROMOTED | FLAG_FORMER) != 0
                        || volume != layer.volume()
                        || parent.is_some_and(|parent| parent == layer)
                        || (lsn != Lsn::NONE && parent.is_none())
                    {
                        return None;
                    }
                    let is_promoted = flags & FLAG_PROMOTED != 0;
                    let base = Base { lsn, next_page, is_promoted };
                    Some(LayerRecord {
                        volume,
                        parent,
                        base: Some(base).filter(|base| base.lsn != Lsn::NONE),
                        since,
                        is_former: flags & FLAG_FORMER != 0,
                    })
                };
                read().ok_or_else(wrong)
            }
            _ => Err(wrong()),
        }
    }
}

/// The layers of a pool that have a record. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct LayerList(Arc<Layers>);

#[derive(Debug, Default)]
struct Layers {
    records: BTreeMap<LayerId, LayerRecord>,
    children: BTreeMap<LayerId, Vec<LayerId>>,
    /// The newest layer of each volume that has more than its first.
    current: BTreeMap<VolumeId, LayerId>,
}

impl LayerList {
    pub(super) fn new(records: BTreeMap<LayerId, LayerRecord>) -> LayerList {
        let mut children: BTreeMap<LayerId, Vec<LayerId>> = BTreeMap::new();
        let mut current = BTreeMap::new();
        for (layer, record) in &records {
            if let Some(parent) = record.parent {
                children.entry(parent).or_default().push(*layer);
            }
            if *layer != LayerId::of_volume(record.volume) {
                // Ascending, so that the last one stays.
                current.insert(record.volume, *layer);
            }
        }
        LayerList(Arc::new(Layers { records, children, current }))
    }

    /// A list with these records added or replaced.
    pub(super) fn with(
        &self,
        records: impl IntoIterator<Item = (LayerId, LayerRecord)>,
    ) -> LayerList {
        let mut all = self.0.records.clone();
        all.extend(records);
        LayerList::new(all)
    }

    pub(super) fn without(&self, layer: LayerId) -> LayerList {
        let mut all = self.0.records.clone();
        all.remove(&layer);
        LayerList::new(all)
    }

    /// The record of a layer, if it has one.
    #[must_use]
    pub fn get(&self, layer: LayerId) -> Option<&LayerRecord> {
        self.0.records.get(&layer)
    }

    /// Every layer with its record, ascending.
    pub fn iter(&self) -> impl Iterator<Item = (LayerId, &LayerRecord)> + '_ {
        self.0.records.iter().map(|(layer, record)| (*layer, record))
    }

    /// Whether some volume has more than its first layer.
    #[must_use]
    pub(super) fn has_later(&self) -> bool {
        !self.0.current.is_empty()
    }

    /// The layer that a volume's writes go to.
    #[must_use]
    pub fn current(&self, volume: VolumeId) -> LayerId {
        let newest = self.0.current.get(&volume).copied();
        newest.unwrap_or_else(|| LayerId::of_volume(volume))
    }

    /// The layer of a volume's snapshot at an LSN.
    #[must_use]
    pub fn at(&self, volume: VolumeId, at: Lsn) -> LayerId {
        let mut found = LayerId::of_volume(volume);
        if let Some(current) = self.0.current.get(&volume) {
            let mut next = found.next();
            while let Some(layer) = next.filter(|layer| layer <= current) {
                if self.get(layer).is_some_and(|record| record.since < at) {
                    found = layer;
                }
                next = layer.next();
            }
        }
        found
    }

    /// The layer, and the LSN in it, of the page that a layer shows if it has no page of its own.
    #[must_use]
    pub fn base(&self, layer: LayerId, page: u32) -> Option<(LayerId, Lsn)> {
        let record = self.get(layer)?;
        let base = record.base.filter(|base| page >= base.next_page)?;
        Some((record.parent?, base.lsn))
    }

    /// Whether the newest state of a page may show blocks although the layer stores nothing of the
    /// page.
    #[must_use]
    pub fn shows_base(&self, layer: LayerId, page: u32) -> bool {
        self.get(layer).is_some_and(|record| !record.is_former) && self.base(layer, page).is_some()
    }

    /// The layers that a layer shows parts of, from its parent upwards.
    #[must_use]
    pub fn bases(&self, layer: LayerId) -> Vec<LayerId> {
        let mut found = Vec::new();
        let mut next = self.base(layer, u32::MAX);
        while let Some((parent, _)) = next {
            found.push(parent);
            next = self.base(parent, u32::MAX);
        }
        found
    }

    /// The layers that the volumes' blocks may have been written for: those of the volumes, and the
    /// layers these were made from.
    pub(crate) fn needed_by(
        &self,
        volumes: &BTreeSet<VolumeId>,
        is_seeded_without_bases: bool,
    ) -> BTreeSet<LayerId> {
        let mut needed: BTreeSet<LayerId> =
            volumes.iter().map(|volume| LayerId::of_volume(*volume)).collect();
        for layer in self.0.records.keys().filter(|layer| volumes.contains(&layer.volume())) {
            let parent = |layer: &LayerId| self.get(*layer).and_then(|record| record.parent);
            match is_seeded_without_bases {
                true => drop(needed.insert(*layer)),
                false => needed.extend(std::iter::successors(Some(*layer), parent)),
            }
        }
        needed
    }

    /// Whether a layer is another one or was made from it, directly or not.
    #[must_use]
    pub fn is_below(&self, layer: LayerId, above: LayerId) -> bool {
        let mut next = Some(layer);
        while let Some(layer) = next {
            if layer == above {
                return true;
            }
            next = self.get(layer).and_then(|record| record.parent);
        }
        false
    }

    /// Number of ancestors of a layer.
    #[must_use]
    pub fn height(&self, layer: LayerId) -> usize {
        let parent = |layer: &LayerId| self.get(*layer).and_then(|record| record.parent);
        std::iter::successors(parent(&layer), parent).count()
    }

    /// The layers that were made from a layer, directly or not, parents before their children.
    #[must_use]
    pub fn descendants(&self, layer: LayerId) -> Vec<LayerId> {
        let mut found = Vec::new();
        let mut waiting = VecDeque::from([layer]);
        while let Some(layer) = waiting.pop_front() {
            let children = self.0.children.get(&layer).map_or(&[][..], Vec::as_slice);
            found.extend(children);
            waiting.extend(children);
        }
        found
    }

    /// LSNs at which a layer is the base of another one, ascending.
    pub(super) fn pins(&self, layer: LayerId) -> Vec<Lsn> {
        let children = self.0.children.get(&layer).map_or(&[][..], Vec::as_slice);
        let of = |child: &LayerId| self.get(*child)?.base.map(|base| base.lsn);
        let mut pins: Vec<Lsn> = children.iter().filter_map(of).collect();
        pins.sort_unstable();
        pins.dedup();
        pins
    }

    /// Layers that others were made from.
    pub(super) fn parents(&self) -> impl Iterator<Item = LayerId> + '_ {
        self.0.children.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clone_of(parent: u64, lsn: u64, layer: LayerId) -> LayerRecord {
        LayerRecord {
            volume: layer.volume(),
            parent: Some(LayerId(parent)),
            base: Some(Base { lsn: Lsn(lsn), next_page: 0, is_promoted: false }),
            since: Lsn::NONE,
            is_former: false,
        }
    }

    #[test]
    fn records_read_back_and_nothing_else_does() {
        let plain = LayerRecord::plain(VolumeId(9));
        let bytes = plain.encode();
        assert_eq!(LayerRecord::decode(LayerId(9), &bytes).unwrap(), plain);
        let mut wrong = bytes.clone();
        wrong[5] = 1;
        assert!(LayerRecord::decode(LayerId(9), &wrong).is_err(), "version 1 has no parent");
        assert!(LayerRecord::decode(LayerId(9), &bytes[1..]).is_err());

        let layer = LayerId(9).next().unwrap();
        let mut record = clone_of(9, 77, layer);
        record.base.as_mut().unwrap().next_page = 5;
        (record.since, record.is_former) = (Lsn(80), true);
        let bytes = record.encode();
        assert_eq!(LayerRecord::decode(layer, &bytes).unwrap(), record);
        assert!(LayerRecord::decode(LayerId(8), &bytes).is_err(), "another volume's");
        for at in 0..bytes.len() {
            assert!(LayerRecord::decode(layer, &bytes[..at]).is_err());
        }
        let mut flags = bytes.clone();
        *flags.last_mut().unwrap() = 4;
        assert!(LayerRecord::decode(layer, &flags).is_err());
    }

    #[test]
    fn list_knows_the_origin_of_each_layer() {
        // 1 -> 2 -> 3, 1 -> 4; volume 2 was rolled back to a snapshot of its own at 30.
        let again = LayerId(2).next().unwrap();
        let records = [
            (LayerId(1), LayerRecord::plain(VolumeId(1))),
            (LayerId(2), clone_of(1, 10, LayerId(2))),
            (LayerId(3), clone_of(2, 20, LayerId(3))),
            (LayerId(4), clone_of(1, 5, LayerId(4))),
            (again, LayerRecord { since: Lsn(40), ..clone_of(2, 30, again) }),
        ];
        let list = LayerList::new(records.into());
        assert_eq!(list.descendants(LayerId(1)), [LayerId(2), LayerId(4), LayerId(3), again]);
        assert_eq!(list.bases(LayerId(3)), [LayerId(2), LayerId(1)]);
        assert!(list.is_below(again, LayerId(1)) && !list.is_below(LayerId(1), again));
        assert_eq!((list.current(VolumeId(2)), list.current(VolumeId(9))), (again, LayerId(9)));
        assert_eq!(list.at(VolumeId(2), Lsn(30)), LayerId(2));
        assert_eq!(list.at(VolumeId(2), Lsn(41)), again);
        assert_eq!(list.pins(LayerId(1)), [Lsn(5), Lsn(10)]);
        assert_eq!(list.base(LayerId(3), 0), Some((LayerId(2), Lsn(20))));
        let mut promoted = clone_of(2, 20, LayerId(3));
        promoted.base = Some(Base { lsn: Lsn(20), next_page: 8, is_promoted: true });
        let list = list.with([(LayerId(3), promoted)]);
        assert_eq!(list.base(LayerId(3), 7), None);
        assert!(list.shows_base(LayerId(3), 8));
        promoted.base = None;
        let list = list.with([(LayerId(3), promoted)]);
        assert!(list.bases(LayerId(3)).is_empty() && list.is_below(LayerId(3), LayerId(1)));
        assert_eq!(list.without(LayerId(4)).descendants(LayerId(1)).len(), 3);
    }
}
