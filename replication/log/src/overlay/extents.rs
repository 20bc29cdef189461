//! Sorted, disjoint extents of one volume in one generation.
//!
//! Invariants:
//! - Extents never overlap and are never empty; a newer one cuts the extents that it covers.
//! - A payload counts as the whole buffer that it keeps in memory, however little of it is left. A
//!   remainder of at most half its buffer is copied out, so each buffer is kept by one extent at
//!   most. Since each copy at least halves the data, all copies of one payload together move no
//!   more than its length.
//! - A cut never makes a map keep more memory than allowed: if one remainder of a cut in the middle
//!   would be copied while the buffer stays, and there is no room for both, both remainders are
//!   copied.
//! - Insert and lookup cost O(log n) plus the number of extents that they touch.

use crate::overlay::log_resident::LogResident;
use crate::overlay::spill_resident::SpillResident;
use block::Lsn;
use block::buffers::PayloadBuffers;
use block::units::SECTOR_BYTES;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The place of the contents of a range.
#[derive(Clone, Debug)]
pub enum Source {
    /// In memory: as many bytes as the range has.
    Payload(Bytes),
    /// In a log file: [`crate::Log::read`] fetches it.
    LogResident(LogResident),
    /// In a spill file: [`crate::Log::read_spilled`] fetches it.
    SpillResident(SpillResident),
    /// Lost: the only copy does not verify. Reading it is an error.
    Lost {
        /// The entry that held the data, or the newest one that may have held it.
        lsn: Lsn,
    },
    /// Zeroes, written as such and without a payload.
    Zeroes {
        /// Whether it is a hole rather than allocated zeroes.
        is_trim: bool,
    },
    /// Not in the overlay: the data tier has it.
    Beneath,
}

impl Source {
    /// Returns the part of it that starts `skip` sectors in and is `count` sectors long.
    fn part(&self, skip: u64, count: u64) -> Source {
        match self {
            Source::Payload(bytes) => {
                let from = bytes_of(skip);
                Source::Payload(bytes.slice(from..from + bytes_of(count)))
            }
            Source::LogResident(resident) => Source::LogResident(resident.part(skip, count)),
            Source::SpillResident(resident) => Source::SpillResident(resident.part(skip, count)),
            Source::Lost { lsn } => Source::Lost { lsn: *lsn },
            Source::Zeroes { is_trim } => Source::Zeroes { is_trim: *is_trim },
            Source::Beneath => Source::Beneath,
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
    /// Number of sectors, never 0.
    pub sector_count: u64,
    /// The place of its contents.
    pub source: Source,
}

#[derive(Clone, Debug)]
struct Extent {
    sector_count: u64,
    /// Length of the buffer that a payload keeps in memory; 0 for other sources.
    buffer_sectors: u32,
    source: Source,
}

impl Extent {
    /// Makes an extent; a payload must not share its buffer.
    fn new(sector_count: u64, source: Source) -> Extent {
        let buffer_sectors = match source {
            Source::Payload(_) => u32::try_from(sector_count).expect("a payload fits memory"),
            _ => 0,
        };
        Extent { sector_count, buffer_sectors, source }
    }

    /// Returns the part of it that starts `skip` sectors in and is `count` sectors long, with its
    /// buffer.
    fn slice(&self, skip: u64, count: u64, cut: &Cut<'_>) -> Extent {
        let source = self.source.part(skip, count);
        match cut.is_buffer_forgotten {
            true => Extent::new(count, source),
            false => Extent { sector_count: count, buffer_sectors: self.buffer_sectors, source },
        }
    }

    /// Like [`Extent::slice`], with a buffer of its own.
    fn copy(&self, skip: u64, count: u64, cut: &Cut<'_>) -> Extent {
        match self.source.part(skip, count) {
            Source::Payload(bytes) => Extent::new(count, Source::Payload(cut.copy_of(&bytes))),
            source => Extent::new(count, source),
        }
    }
}

/// How an insert keeps the remainders of the payloads that it cuts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cut<'a> {
    /// Source of the memory for copies; the allocator if there is none.
    pub(crate) buffers: Option<&'a Arc<PayloadBuffers>>,
    /// Bytes by which the buffers that the map keeps may grow.
    pub(crate) room_bytes: u64,
    /// A seeded bug: see [`crate::seeded_bugs::SeededBugs`].
    pub(crate) is_buffer_forgotten: bool,
}

impl Cut<'_> {
    fn copy_of(&self, bytes: &[u8]) -> Bytes {
        let Some(buffers) = self.buffers else { return Bytes::copy_from_slice(bytes) };
        let mut copy = buffers.take(bytes.len());
        copy.extend_from_slice(bytes);
        copy.into_bytes()
    }

    /// Returns the first `head` and the last `tail` sectors of an extent whose middle is removed;
    /// either may be 0.
    fn rests(&self, whole: &Extent, head: u64, tail: u64) -> (Extent, Extent) {
        let is_kept = |rest: u64| rest > u64::from(whole.buffer_sectors) / 2;
        let copied = if is_kept(head) { tail } else { head };
        let fits = copied == 0 || copied * SECTOR_BYTES <= self.room_bytes;
        let rest = |skip, count| match is_kept(count) && fits {
            true => whole.slice(skip, count, self),
            false => whole.copy(skip, count, self),
        };
        (rest(0, head), rest(whole.sector_count - tail, tail))
    }
}

/// Totals of an extent map, or their increase by an insert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Weight {
    pub(crate) extent_count: u64,
    /// Bytes of the buffers that payloads keep in memory.
    pub(crate) memory_bytes: u64,
    /// Bytes of payload, in memory or in files.
    pub(crate) payload_bytes: u64,
}

impl Weight {
    fn add(&mut self, extent: &Extent) {
        let bytes = extent.sector_count * SECTOR_BYTES;
        self.extent_count += 1;
        match extent.source {
            Source::Payload(_) => {
                self.memory_bytes += u64::from(extent.buffer_sectors) * SECTOR_BYTES;
                self.payload_bytes += bytes;
            }
            Source::LogResident(_) | Source::SpillResident(_) => self.payload_bytes += bytes,
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
    /// Puts `source` over the range and cuts away everything that was there. Keeps `weight` up to
    /// date. A payload must not share its buffer.
    pub(crate) fn insert(
        &mut self,
        (start, count): (u64, u64),
        source: Source,
        weight: &mut Weight,
        cut: &Cut<'_>,
    ) {
        let end = start + count;
        // The one extent that begins before the range may reach into it, or beyond it.
        if let Some((&left_start, left)) = self.by_start.range_mut(..start).next_back() {
            let left_end = left_start + left.sector_count;
            if left_end > start {
                weight.remove(left);
                let (head, tail) =
                    cut.rests(left, start - left_start, left_end.saturating_sub(end));
                weight.add(&head);
                *left = head;
                if left_end > end {
                    self.put(end, tail, weight);
                }
            }
        }
        while let Some((&at, _)) = self.by_start.range(start..end).next() {
            let covered = self.by_start.remove(&at).expect("just seen");
            weight.remove(&covered);
            let covered_end = at + covered.sector_count;
            if covered_end > end {
                let (_, tail) = cut.rests(&covered, 0, covered_end - end);
                self.put(end, tail, weight);
            }
        }
        self.put(start, Extent::new(count, source), weight);
    }

    fn put(&mut self, start: u64, extent: Extent, weight: &mut Weight) {
        weight.add(&extent);
        let replaced = self.by_start.insert(start, extent);
        assert!(replaced.is_none(), "extents overlap at sector {start}");
    }

    /// Calls `found` for each piece of the range, in order: with a source if an extent covers it,
    /// otherwise with `None`.
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECTORS: u64 = 40;

    /// The daemon's memory budget counts on this size (`server/config/src/budget.rs`).
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

        /// Compares the map with an array of one tag per sector.
        #[test]
        fn newer_extent_hides_exactly_its_own_sectors(
            inserts in prop::collection::vec((0..SECTORS, 1..SECTORS, 0u8..=255), 1..60),
            lookups in prop::collection::vec((0..SECTORS, 1..SECTORS), 20),
        ) {
            let mut map = ExtentMap::default();
            let mut weight = Weight::default();
            let mut naive = vec![None; 2 * SECTORS as usize];
            for (start, count, tag) in inserts {
                let cut = Cut { room_bytes: u64::from(tag) * 64, ..Cut::default() };
                map.insert((start, count), source(tag, count), &mut weight, &cut);
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
        map.insert((0, sectors), Source::Zeroes { is_trim: true }, &mut weight, &Cut::default());
        assert_eq!(weight.extent_count, 1);
        map.insert((1 << 30, 8), source(7, 8), &mut weight, &Cut::default());
        assert_eq!((weight.extent_count, weight.memory_bytes), (3, 4096));
    }

    #[test]
    fn a_payload_that_is_cut_again_and_again_lets_its_buffer_go() {
        let mut map = ExtentMap::default();
        let mut weight = Weight::default();
        let cut = Cut { room_bytes: u64::MAX, ..Cut::default() };
        let zeroes = || Source::Zeroes { is_trim: false };
        let large = Bytes::from(vec![1; 1 << 20]);
        map.insert((0, 2048), Source::Payload(large.clone()), &mut weight, &cut);
        // Each cut leaves more than half of the previous remainder.
        map.insert((1500, 548), zeroes(), &mut weight, &cut);
        assert_eq!((weight.memory_bytes, weight.payload_bytes), (1 << 20, 1500 * 512));
        assert!(!large.is_unique(), "most of it is left: it is not copied");
        map.insert((1000, 500), zeroes(), &mut weight, &cut);
        assert_eq!((weight.memory_bytes, weight.payload_bytes), (1000 * 512, 1000 * 512));
        assert!(large.is_unique(), "a rest of less than half keeps the whole buffer");
    }

    #[test]
    fn a_cut_in_the_middle_copies_both_rests_where_there_is_no_room_for_the_buffer() {
        for (room_bytes, memory_bytes) in [(20 * 512, 120 * 512), (19 * 512, 95 * 512)] {
            let mut map = ExtentMap::default();
            let mut weight = Weight::default();
            let cut = Cut { room_bytes, ..Cut::default() };
            map.insert((0, 100), source(1, 100), &mut weight, &cut);
            map.insert((75, 5), Source::Zeroes { is_trim: true }, &mut weight, &cut);
            assert_eq!((weight.memory_bytes, weight.payload_bytes), (memory_bytes, 95 * 512));
        }
    }
}
