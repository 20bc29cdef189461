//! Sorted, disjoint extents of one volume in one generation.
//!
//! Invariants:
//! - Extents never overlap and are never empty; a newer one cuts what it covers.
//! - A piece that is left of a cut payload pins at most twice its own length of memory: smaller
//!   rests are copied out, and since each copy at least halves, all copies of one payload together
//!   move no more than its length.
//! - Insert and lookup cost O(log n) and what they touch.

use crate::resident::LogResident;
use crate::side::SideResident;
use block::Lsn;
use block::units::SECTOR_BYTES;
use bytes::Bytes;
use std::collections::BTreeMap;

/// Where the contents of a range are.
#[derive(Clone, Debug)]
pub enum Source {
    /// Here: as many bytes as the range has.
    Payload(Bytes),
    /// In a log file: [`crate::Log::read`] fetches it.
    LogResident(LogResident),
    /// In a side file: [`crate::Log::read_side`] fetches it.
    SideResident(SideResident),
    /// Nowhere any more: the only copy does not verify. Reading it is an error.
    Lost {
        /// The entry that held it, or the newest one that may have.
        lsn: Lsn,
    },
    /// Zeroes by decree.
    Zeroes {
        /// A hole, rather than allocated zeroes.
        is_trim: bool,
    },
    /// Not in the overlay: the data tier has it.
    Beneath,
}

impl Source {
    /// The part of it that starts `skip` sectors in and is `count` long.
    fn part(&self, skip: u64, count: u64) -> Source {
        match self {
            Source::Payload(bytes) => {
                let from = bytes_of(skip);
                Source::Payload(bytes.slice(from..from + bytes_of(count)))
            }
            Source::LogResident(resident) => Source::LogResident(resident.part(skip, count)),
            Source::SideResident(resident) => Source::SideResident(resident.part(skip, count)),
            Source::Lost { lsn } => Source::Lost { lsn: *lsn },
            Source::Zeroes { is_trim } => Source::Zeroes { is_trim: *is_trim },
            Source::Beneath => Source::Beneath,
        }
    }

    /// As [`Source::part`] of an extent of `whole` sectors that is being cut for good.
    fn rest(&self, skip: u64, count: u64, whole: u64) -> Source {
        match self.part(skip, count) {
            Source::Payload(bytes) if count <= whole / 2 => {
                Source::Payload(Bytes::copy_from_slice(&bytes))
            }
            part => part,
        }
    }
}

fn bytes_of(sectors: u64) -> usize {
    usize::try_from(sectors * SECTOR_BYTES).expect("a payload fits memory")
}

/// A run of sectors with one source.
#[derive(Clone, Debug)]
pub struct Piece {
    /// First sector in the volume.
    pub start_sector: u64,
    /// Sectors, never 0.
    pub sector_count: u64,
    /// Where its contents are.
    pub source: Source,
}

#[derive(Clone, Debug)]
struct Extent {
    sector_count: u64,
    source: Source,
}

/// What an extent map holds, or how much more an insert made it hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Weight {
    pub(crate) extent_count: u64,
    /// Bytes of payload in memory.
    pub(crate) memory_bytes: u64,
    /// Bytes of payload, wherever they are.
    pub(crate) payload_bytes: u64,
}

impl Weight {
    fn add(&mut self, extent: &Extent) {
        let bytes = extent.sector_count * SECTOR_BYTES;
        self.extent_count += 1;
        match extent.source {
            Source::Payload(_) => {
                self.memory_bytes += bytes;
                self.payload_bytes += bytes;
            }
            Source::LogResident(_) | Source::SideResident(_) => self.payload_bytes += bytes,
            Source::Zeroes { .. } | Source::Lost { .. } | Source::Beneath => {}
        }
    }

    fn remove(&mut self, extent: &Extent) {
        let mut removed = Weight::default();
        removed.add(extent);
        self.extent_count -= removed.extent_count;
        self.memory_bytes -= removed.memory_bytes;
        self.payload_bytes -= removed.payload_bytes;
    }
}

/// The extents of one volume.
#[derive(Debug, Default)]
pub(crate) struct ExtentMap {
    by_start: BTreeMap<u64, Extent>,
}

impl ExtentMap {
    /// Puts `source` over the range; whatever was there is cut away. `weight` is kept up to date.
    pub(crate) fn insert(&mut self, start: u64, count: u64, source: Source, weight: &mut Weight) {
        let end = start + count;
        // The one extent that begins before the range may reach into it, or beyond it.
        if let Some((&left_start, left)) = self.by_start.range_mut(..start).next_back() {
            let left_end = left_start + left.sector_count;
            if left_end > start {
                let whole = left.clone();
                weight.remove(&whole);
                left.sector_count = start - left_start;
                left.source = whole.source.rest(0, left.sector_count, whole.sector_count);
                weight.add(left);
                if left_end > end {
                    let skip = end - left_start;
                    self.put(end, tail_of(&whole, skip), weight);
                }
            }
        }
        while let Some((&at, _)) = self.by_start.range(start..end).next() {
            let covered = self.by_start.remove(&at).expect("just seen");
            weight.remove(&covered);
            if at + covered.sector_count > end {
                self.put(end, tail_of(&covered, end - at), weight);
            }
        }
        self.put(start, Extent { sector_count: count, source }, weight);
    }

    fn put(&mut self, start: u64, extent: Extent, weight: &mut Weight) {
        weight.add(&extent);
        let replaced = self.by_start.insert(start, extent);
        assert!(replaced.is_none(), "extents overlap at sector {start}");
    }

    /// Calls `found` for each piece of the range, in order: with the source where an extent covers
    /// it, with `None` where none does.
    pub(crate) fn walk(
        &self,
        start: u64,
        count: u64,
        mut found: impl FnMut(u64, u64, Option<Source>),
    ) {
        let end = start + count;
        let first = match self.by_start.range(..start).next_back() {
            Some((&at, extent)) if at + extent.sector_count > start => at,
            _ => start,
        };
        let mut at = start;
        for (&extent_start, extent) in self.by_start.range(first..end) {
            if extent_start > at {
                found(at, extent_start - at, None);
                at = extent_start;
            }
            let skip = at - extent_start;
            let length = (extent.sector_count - skip).min(end - at);
            found(at, length, Some(extent.source.part(skip, length)));
            at += length;
        }
        if at < end {
            found(at, end - at, None);
        }
    }

    /// All extents, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Piece> + '_ {
        self.by_start.iter().map(|(&start_sector, extent)| Piece {
            start_sector,
            sector_count: extent.sector_count,
            source: extent.source.clone(),
        })
    }
}

fn tail_of(whole: &Extent, skip: u64) -> Extent {
    let sector_count = whole.sector_count - skip;
    Extent { sector_count, source: whole.source.rest(skip, sector_count, whole.sector_count) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECTORS: u64 = 40;

    /// The daemon's memory budget counts on it (`server/src/config/budget.rs`).
    #[test]
    fn an_extent_is_small() {
        let bytes = size_of::<u64>() + size_of::<Extent>();
        assert!(bytes <= 104, "key and extent take {bytes} bytes");
    }

    fn source(tag: u8, count: u64) -> Source {
        match tag % 5 {
            0 => Source::Zeroes { is_trim: true },
            _ => Source::Payload(Bytes::from(vec![tag; bytes_of(count)])),
        }
    }

    fn tag_of(source: &Source, count: u64) -> u8 {
        match source {
            Source::Zeroes { .. } => 0,
            Source::Payload(bytes) => {
                assert_eq!(bytes.len(), bytes_of(count));
                assert!(bytes.iter().all(|byte| *byte == bytes[0]));
                bytes[0]
            }
            other => panic!("{other:?} was never inserted"),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None,
            ..ProptestConfig::default() })]

        /// Against one tag a sector.
        #[test]
        fn a_newer_extent_hides_what_it_covers_and_nothing_else(
            inserts in prop::collection::vec((0..SECTORS, 1..SECTORS, 0u8..=255), 1..60),
            lookups in prop::collection::vec((0..SECTORS, 1..SECTORS), 20),
        ) {
            let mut map = ExtentMap::default();
            let mut weight = Weight::default();
            let mut naive = vec![None; 2 * SECTORS as usize];
            for (start, count, tag) in inserts {
                map.insert(start, count, source(tag, count), &mut weight);
                let seen = if tag % 5 == 0 { 0 } else { tag };
                naive[start as usize..(start + count) as usize].fill(Some(seen));
                let mut counted = Weight::default();
                map.by_start.values().for_each(|extent| counted.add(extent));
                prop_assert_eq!(counted, weight);
            }
            for (start, count) in lookups {
                let mut at = start;
                map.walk(start, count, |piece_start, piece_count, source| {
                    assert_eq!(piece_start, at, "pieces are in order and without gaps");
                    assert!(piece_count > 0);
                    let tag = source.map(|source| tag_of(&source, piece_count));
                    let sectors = piece_start as usize..(piece_start + piece_count) as usize;
                    assert!(naive[sectors].iter().all(|expected| *expected == tag));
                    at += piece_count;
                });
                prop_assert_eq!(at, start + count);
            }
            let mut last_end = 0;
            for piece in map.iter() {
                prop_assert!(piece.start_sector >= last_end);
                last_end = piece.start_sector + piece.sector_count;
            }
        }
    }

    #[test]
    fn a_trim_of_100_tib_is_one_extent_and_is_cut_by_one_write() {
        let mut map = ExtentMap::default();
        let mut weight = Weight::default();
        let sectors = (100 << 40) / SECTOR_BYTES;
        map.insert(0, sectors, Source::Zeroes { is_trim: true }, &mut weight);
        assert_eq!(weight.extent_count, 1);
        map.insert(1 << 30, 8, source(7, 8), &mut weight);
        assert_eq!((weight.extent_count, weight.memory_bytes), (3, 4096));
    }

    #[test]
    fn what_is_left_of_a_large_payload_does_not_pin_it() {
        let mut map = ExtentMap::default();
        let mut weight = Weight::default();
        let large = Bytes::from(vec![1; 1 << 20]);
        map.insert(0, 2048, Source::Payload(large.clone()), &mut weight);
        map.insert(8, 2048, source(2, 2048), &mut weight);
        assert_eq!(weight.memory_bytes, (1 << 20) + 8 * 512);
        assert!(large.is_unique(), "a rest of 4 KiB keeps 1 MiB in memory");
    }
}
