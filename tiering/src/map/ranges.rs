//! Range records: large trims, zeroes and the end of a volume as one record each.
//!
//! A range hides what windows up to its own LSN assigned to whole pages. It is folded in the
//! background: hidden pages are deleted or rewritten, the record is shortened, at last dropped.
//!
//! Invariants:
//! - A range covers whole pages; the edges of a trim are operands of their pages.
//! - The list is bounded by [`RANGE_COUNT_MAX`]; a writer that would pass it folds first.
//! - A lookup that took the list before it read the page sees a state that once was.

use super::keys::{corrupt, range_key};
use super::layers::LayerId;
use block::units::u32_at;
use block::{Lsn, Result};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Ranges that may wait to be folded, over all layers. Chosen by hand: 24 KiB of memory, and a page
/// load that compares against all of them takes a few microseconds.
pub const RANGE_COUNT_MAX: usize = 1024;

/// Whole pages from which a trim becomes a range record rather than one change a page. Chosen by
/// hand: below it, touching the pages at once costs less than folding them later.
pub const RANGE_PAGES_MIN: u32 = 16;

const RANGE_VERSION: u8 = 1;
const RANGE_BYTES: usize = 1 + 4 + 4;

/// Pages of one layer whose operands up to `lsn` are hidden.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// LSN of the window that made it.
    pub lsn: Lsn,
    /// Tells the ranges of one window apart.
    pub ordinal: u32,
    /// First page hidden.
    pub first_page: u32,
    /// Last page hidden, inclusive.
    pub last_page: u32,
}

impl Range {
    /// The page is hidden.
    #[must_use]
    pub fn covers(&self, page: u32) -> bool {
        self.first_page <= page && page <= self.last_page
    }

    /// The stored form; LSN and ordinal are in the key. Byte table: docs/format-map.md#range-record.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(RANGE_BYTES);
        bytes.push(RANGE_VERSION);
        bytes.extend_from_slice(&self.first_page.to_le_bytes());
        bytes.extend_from_slice(&self.last_page.to_le_bytes());
        bytes
    }

    /// Reads the stored form.
    ///
    /// # Errors
    /// `Corrupt`, naming the range.
    pub fn decode(layer: LayerId, lsn: Lsn, ordinal: u32, bytes: &[u8]) -> Result<Range> {
        let wrong = || corrupt(&range_key(layer, lsn, ordinal), "not a range record");
        if bytes.first() != Some(&RANGE_VERSION) || bytes.len() != RANGE_BYTES {
            return Err(wrong());
        }
        let first_page = u32_at(bytes, 1).ok_or_else(wrong)?;
        let last_page = u32_at(bytes, 5).ok_or_else(wrong)?;
        if first_page > last_page {
            return Err(wrong());
        }
        Ok(Range { lsn, ordinal, first_page, last_page })
    }
}

/// The ranges of a pool that wait to be folded. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct RangeList {
    layers: Arc<BTreeMap<LayerId, Vec<Range>>>,
    count: usize,
}

impl RangeList {
    /// Ranges over all layers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Nothing waits to be folded.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The LSN up to which operands of the page are hidden, or `Lsn::NONE`.
    #[must_use]
    pub fn cut(&self, layer: LayerId, page: u32) -> Lsn {
        let Some(ranges) = self.layers.get(&layer) else { return Lsn::NONE };
        ranges
            .iter()
            .filter(|range| range.covers(page))
            .map(|range| range.lsn)
            .max()
            .unwrap_or_default()
    }

    /// LSNs of the ranges that hide operands of the page, ascending.
    #[must_use]
    pub fn cuts(&self, layer: LayerId, page: u32) -> Vec<Lsn> {
        let ranges = self.layers.get(&layer).map_or(&[][..], Vec::as_slice);
        ranges.iter().filter(|range| range.covers(page)).map(|range| range.lsn).collect()
    }

    /// The range to fold next: the oldest one of the first layer that has any.
    #[must_use]
    pub fn first(&self) -> Option<(LayerId, Range)> {
        self.layers.iter().find_map(|(layer, ranges)| Some((*layer, *ranges.first()?)))
    }

    /// Every range with its layer.
    pub fn iter(&self) -> impl Iterator<Item = (LayerId, Range)> + '_ {
        self.layers.iter().flat_map(|(layer, ranges)| ranges.iter().map(|range| (*layer, *range)))
    }

    /// Adds ranges, or replaces those of the same LSN and ordinal.
    #[must_use]
    pub fn with(&self, new: impl IntoIterator<Item = (LayerId, Range)>) -> RangeList {
        self.edited(|layers| {
            for (layer, range) in new {
                let ranges = layers.entry(layer).or_default();
                ranges.retain(|old| (old.lsn, old.ordinal) != (range.lsn, range.ordinal));
                let at = ranges
                    .partition_point(|old| (old.lsn, old.ordinal) < (range.lsn, range.ordinal));
                ranges.insert(at, range);
            }
        })
    }

    /// Leaves out one range.
    #[must_use]
    pub fn without(&self, layer: LayerId, range: &Range) -> RangeList {
        self.edited(|layers| {
            if let Some(ranges) = layers.get_mut(&layer) {
                ranges.retain(|old| (old.lsn, old.ordinal) != (range.lsn, range.ordinal));
                if ranges.is_empty() {
                    layers.remove(&layer);
                }
            }
        })
    }

    fn edited(&self, edit: impl FnOnce(&mut BTreeMap<LayerId, Vec<Range>>)) -> RangeList {
        let mut layers = (*self.layers).clone();
        edit(&mut layers);
        let count = layers.values().map(Vec::len).sum();
        RangeList { layers: Arc::new(layers), count }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(lsn: u64, first_page: u32, last_page: u32) -> Range {
        Range { lsn: Lsn(lsn), ordinal: 0, first_page, last_page }
    }

    #[test]
    fn the_newest_range_over_a_page_cuts_it() {
        let layer = LayerId(1);
        let list = RangeList::default().with([
            (layer, range(9, 0, 10)),
            (layer, range(5, 5, 20)),
            (LayerId(2), range(7, 0, 0)),
        ]);
        assert_eq!(list.len(), 3);
        assert_eq!(list.cut(layer, 4), Lsn(9));
        assert_eq!(list.cut(layer, 7), Lsn(9));
        assert_eq!(list.cut(layer, 15), Lsn(5));
        assert_eq!(list.cut(layer, 21), Lsn::NONE);
        assert_eq!(list.cut(LayerId(3), 0), Lsn::NONE);
        assert_eq!(list.first(), Some((layer, range(5, 5, 20))));
        let shorter = list.with([(layer, range(5, 18, 20))]);
        assert_eq!((shorter.len(), shorter.cut(layer, 15)), (3, Lsn::NONE));
        let fewer = shorter.without(layer, &range(5, 18, 20));
        assert_eq!((fewer.len(), fewer.cut(layer, 19)), (2, Lsn::NONE));
        assert_eq!(list.len(), 3, "an older snapshot does not change");
    }

    #[test]
    fn a_range_record_reads_back() {
        let range = Range { lsn: Lsn(3), ordinal: 4, first_page: 17, last_page: u32::MAX };
        let bytes = range.encode();
        assert_eq!(Range::decode(LayerId(1), Lsn(3), 4, &bytes).unwrap(), range);
        assert!(Range::decode(LayerId(1), Lsn(3), 4, &bytes[1..]).is_err());
        let backwards = Range { first_page: 2, last_page: 1, ..range }.encode();
        assert!(Range::decode(LayerId(1), Lsn(3), 4, &backwards).is_err());
    }
}
