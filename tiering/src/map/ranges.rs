//! Range records: large trims, zeroes and the end of a volume as one record each.
//!
//! A range hides blocks that windows up to its own LSN assigned to whole pages. It is folded in the
//! background: hidden pages are deleted or rewritten, and the record is shortened and finally
//! dropped.
//!
//! Invariants:
//! - A range covers whole pages; the edges of a trim are operands of their pages.
//! - [`RANGE_COUNT_MAX`] and [`WINDOW_COUNT_MAX`] bound the list; a writer that would exceed them
//!   folds first.
//! - A lookup that takes the list before it reads the page sees a state that once existed.

use super::keys::{corrupt, range_key};
use super::layers::LayerId;
use block::units::u32_at;
use block::{Lsn, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Ranges that may wait to be folded, over all layers; the newest window may exceed it. Chosen by
/// hand: 1.3 MiB of memory.
pub const RANGE_COUNT_MAX: usize = 65_536;

/// Windows whose ranges may wait, over all layers; loading a page searches each of them. Chosen by
/// hand: about 10 us.
pub const WINDOW_COUNT_MAX: usize = 1024;

/// Whole pages from which a trim becomes a range record instead of one change per page. Chosen by
/// hand: below it, changing the pages at once costs less than folding them later.
pub const RANGE_PAGES_MIN: u32 = 16;

const RANGE_VERSION: u8 = 1;
const RANGE_BYTES: usize = 1 + 4 + 4;

/// Pages of one layer whose operands up to `lsn` are hidden.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// LSN of the window that made it.
    pub lsn: Lsn,
    /// Distinguishes the ranges of one window.
    pub ordinal: u32,
    /// First page hidden.
    pub first_page: u32,
    /// Last page hidden, inclusive.
    pub last_page: u32,
}

impl Range {
    /// Whether the page is hidden.
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

/// The remaining ranges of one window in a layer. Cheap to clone.
#[derive(Clone, Debug)]
struct WindowRanges {
    /// The first remaining range, which may have been shortened.
    first: Range,
    /// All ranges of the window, by page.
    all: Arc<[Range]>,
    /// Index of the first remaining range in `all`.
    at: usize,
    /// No two ranges share a page. This holds for every set of ranges that one window makes.
    is_disjoint: bool,
}

impl WindowRanges {
    fn new(mut ranges: Vec<Range>) -> Option<WindowRanges> {
        ranges.sort_unstable_by_key(|range| (range.first_page, range.ordinal));
        let first = *ranges.first()?;
        let is_disjoint = ranges.windows(2).all(|two| two[0].last_page < two[1].first_page);
        Some(WindowRanges { first, all: ranges.into(), at: 0, is_disjoint })
    }

    fn rest(&self) -> &[Range] {
        self.all.get(self.at + 1..).unwrap_or_default()
    }

    fn len(&self) -> usize {
        self.all.len() - self.at
    }

    fn iter(&self) -> impl Iterator<Item = Range> + '_ {
        std::iter::once(self.first).chain(self.rest().iter().copied())
    }

    fn covers(&self, page: u32) -> bool {
        if !self.is_disjoint {
            return self.iter().any(|range| range.covers(page));
        }
        let rest = self.rest();
        let next = rest.partition_point(|range| range.last_page < page);
        self.first.covers(page) || rest.get(next).is_some_and(|range| range.covers(page))
    }

    /// The ranges without the first one; `None` if that was the last.
    fn shifted(&self) -> Option<WindowRanges> {
        let first = *self.rest().first()?;
        Some(WindowRanges { first, at: self.at + 1, ..self.clone() })
    }
}

type Windows = BTreeMap<Lsn, WindowRanges>;

/// The ranges of a pool that wait to be folded. Cheap to clone. Looking up a page and shortening or
/// dropping the first range of a window cost little however many ranges there are.
#[derive(Clone, Debug, Default)]
pub struct RangeList {
    layers: Arc<BTreeMap<LayerId, Windows>>,
    count: usize,
    window_count: usize,
}

/// Limits of [`RangeList::run_from`].
#[derive(Clone, Copy, Debug)]
pub struct RunLimit {
    /// Maximum number of ranges.
    pub count_max: usize,
    /// Maximum number of pages between one range and the next.
    pub gap_pages: u32,
}

impl RangeList {
    /// Number of ranges over all layers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether nothing waits to be folded.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether these ranges of one window fit.
    #[must_use]
    pub fn has_room_for(&self, new: &[(LayerId, Range)]) -> bool {
        let layers: BTreeSet<LayerId> = new.iter().map(|(layer, _)| *layer).collect();
        self.count + new.len() <= RANGE_COUNT_MAX
            && self.window_count + layers.len() <= WINDOW_COUNT_MAX
    }

    fn windows(&self, layer: LayerId) -> impl DoubleEndedIterator<Item = (Lsn, &WindowRanges)> {
        self.layers.get(&layer).into_iter().flatten().map(|(lsn, ranges)| (*lsn, ranges))
    }

    /// The LSN up to which operands of the page are hidden, or `Lsn::NONE`.
    #[must_use]
    pub fn cut(&self, layer: LayerId, page: u32) -> Lsn {
        let newest = self.windows(layer).rev().find(|(_, ranges)| ranges.covers(page));
        newest.map_or(Lsn::NONE, |(lsn, _)| lsn)
    }

    /// LSNs of the ranges that hide operands of the page, ascending.
    #[must_use]
    pub fn cuts(&self, layer: LayerId, page: u32) -> Vec<Lsn> {
        let covering = self.windows(layer).filter(|(_, ranges)| ranges.covers(page));
        covering.map(|(lsn, _)| lsn).collect()
    }

    /// The range to fold next: one of the oldest of the first layer that has any.
    #[must_use]
    pub fn first(&self) -> Option<(LayerId, Range)> {
        self.iter().next()
    }

    /// Every range with its layer.
    pub fn iter(&self) -> impl Iterator<Item = (LayerId, Range)> + '_ {
        self.layers.iter().flat_map(|(layer, windows)| {
            windows.values().flat_map(|ranges| ranges.iter().map(|range| (*layer, range)))
        })
    }

    /// Adds ranges, or replaces those of the same LSN and ordinal.
    #[must_use]
    pub fn with(&self, new: impl IntoIterator<Item = (LayerId, Range)>) -> RangeList {
        let mut added: BTreeMap<(LayerId, Lsn), BTreeMap<u32, Range>> = BTreeMap::new();
        for (layer, range) in new {
            added.entry((layer, range.lsn)).or_default().insert(range.ordinal, range);
        }
        self.edited(|layers| {
            for ((layer, lsn), mut ranges) in added {
                let windows = layers.entry(layer).or_default();
                let only = ranges.values().next().filter(|_| ranges.len() == 1).copied();
                match (windows.get_mut(&lsn), only) {
                    // The first range was shortened.
                    (Some(old), Some(new))
                        if new.ordinal == old.first.ordinal
                            && old.first.covers(new.first_page)
                            && new.last_page == old.first.last_page =>
                    {
                        old.first = new;
                    }
                    (old, _) => {
                        for range in old.iter().flat_map(|old| old.iter()) {
                            ranges.entry(range.ordinal).or_insert(range);
                        }
                        let all = WindowRanges::new(ranges.into_values().collect());
                        windows.extend(all.map(|all| (lsn, all)));
                    }
                }
            }
        })
    }

    /// Removes some ranges of a layer.
    #[must_use]
    pub fn without(&self, layer: LayerId, gone: &[Range]) -> RangeList {
        self.edited(|layers| {
            let Some(windows) = layers.get_mut(&layer) else { return };
            for range in gone {
                let Some(old) = windows.get(&range.lsn) else { continue };
                let left = match old.first.ordinal == range.ordinal {
                    true => old.shifted(),
                    false => WindowRanges::new(
                        old.iter().filter(|old| old.ordinal != range.ordinal).collect(),
                    ),
                };
                match left {
                    Some(left) => drop(windows.insert(range.lsn, left)),
                    None => drop(windows.remove(&range.lsn)),
                }
            }
            if windows.is_empty() {
                layers.remove(&layer);
            }
        })
    }

    /// A range and those of its window that follow it closely, ascending.
    #[must_use]
    pub fn run_from(&self, layer: LayerId, range: &Range, limit: RunLimit) -> Vec<Range> {
        let window = self.layers.get(&layer).and_then(|windows| windows.get(&range.lsn));
        let mut run = vec![*range];
        let Some(window) = window.filter(|window| window.is_disjoint) else { return run };
        let mut end = range.last_page;
        let behind = window.iter().skip_while(|next| next.first_page <= range.last_page);
        for next in behind.take(limit.count_max.saturating_sub(1)) {
            if next.first_page - end > limit.gap_pages {
                break;
            }
            end = next.last_page;
            run.push(next);
        }
        run
    }

    fn edited(&self, edit: impl FnOnce(&mut BTreeMap<LayerId, Windows>)) -> RangeList {
        let mut layers = (*self.layers).clone();
        edit(&mut layers);
        let count = layers.values().flat_map(BTreeMap::values).map(WindowRanges::len).sum();
        let window_count = layers.values().map(BTreeMap::len).sum();
        RangeList { layers: Arc::new(layers), count, window_count }
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
        let fewer = shorter.without(layer, &[range(5, 18, 20)]);
        assert_eq!((fewer.len(), fewer.cut(layer, 19)), (2, Lsn::NONE));
        assert_eq!(list.len(), 3, "an older snapshot does not change");
    }

    /// Compares with a plain list: random windows, shortened and dropped in any order, including
    /// overlapping ranges, which should not occur.
    #[test]
    fn lookups_are_those_of_a_plain_list() {
        for seed in crate::testing::seeds(20) {
            println!("SEED={seed}");
            let mut rng = crate::testing::Rng::new(seed);
            let mut below = |end: u32| u32::try_from(rng.below(u64::from(end))).unwrap();
            let (mut list, mut plain) = (RangeList::default(), Vec::<(LayerId, Range)>::new());
            for turn in 0..60 {
                let layer = LayerId(1 + u64::from(below(2)));
                match below(3) {
                    0 => {
                        let lsn = Lsn(u64::from(turn / (1 + below(3))));
                        let mut page = below(20);
                        let mut new = Vec::new();
                        for ordinal in 0..1 + below(12) {
                            let last_page = page + below(6);
                            new.push((layer, Range { lsn, ordinal, first_page: page, last_page }));
                            page = if below(20) == 0 { page } else { last_page + 1 + below(4) };
                        }
                        let is_new = |(other, old): &(LayerId, Range)| {
                            let same = |(_, new): &(LayerId, Range)| {
                                (new.lsn, new.ordinal) == (old.lsn, old.ordinal)
                            };
                            *other == layer && new.iter().any(same)
                        };
                        plain.retain(|old| !is_new(old));
                        plain.extend(new.iter().copied());
                        list = list.with(new);
                    }
                    1 if !plain.is_empty() => {
                        let any = below(plain.len() as u32) as usize;
                        let victim = if below(2) == 0 { list.first().unwrap() } else { plain[any] };
                        plain.retain(|old| *old != victim);
                        list = list.without(victim.0, &[victim.1]);
                    }
                    _ if !plain.is_empty() => {
                        let any = below(plain.len() as u32) as usize;
                        let old = if below(2) == 0 { list.first().unwrap() } else { plain[any] };
                        let pages = old.1.last_page - old.1.first_page + 1;
                        let new = Range { first_page: old.1.first_page + below(pages), ..old.1 };
                        let at = plain.iter().position(|one| *one == old).unwrap();
                        plain[at] = (old.0, new);
                        list = list.with([(old.0, new)]);
                    }
                    _ => {}
                }
                assert_eq!(list.len(), plain.len());
                let sorted = |mut all: Vec<(LayerId, Range)>| {
                    all.sort_by_key(|(layer, range)| (*layer, range.lsn, range.ordinal));
                    all
                };
                assert_eq!(sorted(list.iter().collect()), sorted(plain.clone()));
                if let Some((layer, range)) = list.first() {
                    let run = list.run_from(layer, &range, RunLimit { count_max: 3, gap_pages: 2 });
                    assert!((1..=3).contains(&run.len()) && run[0] == range);
                    let is_next =
                        |two: &[Range]| (1..=2).contains(&(two[1].first_page - two[0].last_page));
                    assert!(run.windows(2).all(is_next), "{run:?}");
                    assert!(run.iter().all(|range| plain.contains(&(layer, *range))), "{run:?}");
                }
                let oldest = plain.iter().map(|(layer, range)| (*layer, range.lsn)).min();
                assert_eq!(list.first().map(|(layer, range)| (layer, range.lsn)), oldest);
                for layer in [LayerId(1), LayerId(2)] {
                    for page in 0..60 {
                        let covering =
                            plain.iter().filter(|one| one.0 == layer && one.1.covers(page));
                        let mut cuts: Vec<Lsn> = covering.map(|one| one.1.lsn).collect();
                        cuts.sort_unstable();
                        cuts.dedup();
                        assert_eq!(list.cut(layer, page), cuts.last().copied().unwrap_or_default());
                        assert_eq!(list.cuts(layer, page), cuts);
                    }
                }
            }
        }
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
