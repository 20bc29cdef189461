//! Which stored block may be equal to one that is written: fingerprints in memory. Pure.
//!
//! Invariants:
//! - Memory is bounded. What does not fit is thinned out by the value of the fingerprints, one in 2, 4, 8 …, so that what is
//!   kept is spread over all that is stored; the lists of the segments that it leads to give the neighbours back.
//! - What it says nominates only: the segment may be gone, and the block another one.
//!
//! Source: Lillibridge and others, Sparse Indexing: Large Scale, Inline Deduplication Using Sampling and Locality, FAST 2009.

use super::fingerprints::FrameFingerprints;
use crate::segment::FrameAt;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

/// Lists of segments that are kept whole, beside the index. Chosen by hand: 5 MiB for segments of the default size.
const LISTS_MAX: usize = 16;

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Location {
    pub segment: u64,
    pub at: FrameAt,
    pub within: u8,
}

/// A fingerprint is a hash already.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, number: u64) {
        // Those that are kept have the lowest bits in common.
        self.0 = number.rotate_right(32);
    }
}

pub(crate) type ByFingerprint<V> = HashMap<u64, V, BuildHasherDefault<AsItIs>>;

/// See the module.
#[derive(Debug)]
pub(crate) struct Index {
    capacity: usize,
    /// One in 2^so many fingerprints is kept.
    thinned_by: u32,
    entries: ByFingerprint<Location>,
    lists: VecDeque<(u64, ByFingerprint<Location>)>,
}

impl Index {
    /// For so many blocks at most, at least one.
    pub fn new(capacity: usize) -> Index {
        Index {
            capacity: capacity.max(1),
            thinned_by: 0,
            entries: ByFingerprint::default(),
            lists: VecDeque::new(),
        }
    }

    fn is_kept(&self, fingerprint: u64) -> bool {
        fingerprint.trailing_zeros() >= self.thinned_by
    }

    /// Where a block with this fingerprint was written last, as far as is known.
    pub fn find(&self, fingerprint: u64) -> Option<Location> {
        let in_list = || self.lists.iter().find_map(|(_, list)| list.get(&fingerprint));
        self.entries.get(&fingerprint).or_else(in_list).copied()
    }

    /// The segments whose lists are worth reading for what is written together: those that one of the fingerprints leads
    /// to, while there are fingerprints that are not kept.
    pub fn lists_wanted(
        &self,
        fingerprints: impl Iterator<Item = u64>,
        count_max: usize,
    ) -> Vec<u64> {
        if self.thinned_by == 0 {
            return Vec::new();
        }
        let mut hits: HashMap<u64, usize> = HashMap::new();
        for fingerprint in fingerprints {
            if let Some(found) = self.entries.get(&fingerprint) {
                *hits.entry(found.segment).or_default() += 1;
            }
        }
        let known: HashSet<u64> = self.lists.iter().map(|(segment, _)| *segment).collect();
        let mut wanted: Vec<(usize, u64)> = hits
            .into_iter()
            .filter(|(segment, _)| !known.contains(segment))
            .map(|(segment, count)| (count, segment))
            .collect();
        wanted.sort_unstable_by(|a, b| b.cmp(a));
        wanted.into_iter().take(count_max).map(|(_, segment)| segment).collect()
    }

    /// Adds a segment's fingerprints. What was known under one of them is known no more.
    pub fn add(&mut self, segment: u64, frames: &[FrameFingerprints]) {
        for (fingerprint, location) in locations(segment, frames) {
            if !self.is_kept(fingerprint) {
                continue;
            }
            self.entries.insert(fingerprint, location);
            while self.entries.len() > self.capacity {
                self.thinned_by += 1;
                let bits = self.thinned_by;
                self.entries.retain(|fingerprint, _| fingerprint.trailing_zeros() >= bits);
            }
        }
    }

    /// Keeps all fingerprints of a segment for a while.
    pub fn add_list(&mut self, segment: u64, frames: &[FrameFingerprints]) {
        if self.lists.len() >= LISTS_MAX {
            self.lists.pop_back();
        }
        self.lists.push_front((segment, locations(segment, frames).collect()));
    }

    /// The block is not there any more.
    pub fn forget(&mut self, fingerprint: u64, location: &Location) {
        if self.entries.get(&fingerprint) == Some(location) {
            self.entries.remove(&fingerprint);
        }
        self.lists.retain(|(segment, _)| *segment != location.segment);
    }

    /// These segments are gone.
    pub fn forget_segments(&mut self, segments: &HashSet<u64>) {
        self.entries.retain(|_, location| !segments.contains(&location.segment));
        self.lists.retain(|(segment, _)| !segments.contains(segment));
        // What is written from here on is kept in part more often again.
        if self.entries.len() < self.capacity / 4 {
            self.thinned_by = self.thinned_by.saturating_sub(1);
        }
    }

    /// Blocks that are known, and one in how many is.
    pub fn status(&self) -> (usize, u64) {
        (self.entries.len(), 1u64.checked_shl(self.thinned_by).unwrap_or(u64::MAX))
    }
}

fn locations(
    segment: u64,
    frames: &[FrameFingerprints],
) -> impl Iterator<Item = (u64, Location)> + '_ {
    frames.iter().flat_map(move |frame| {
        let at = frame.at;
        let blocks = frame.fingerprints.iter().zip(0u8..);
        blocks.map(move |(fingerprint, within)| (*fingerprint, Location { segment, at, within }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    fn segment_of(fingerprints: &[u64]) -> Vec<FrameFingerprints> {
        let frames = fingerprints.chunks(8).zip(0u32..).map(|(these, index)| FrameFingerprints {
            at: FrameAt { frame_index: index, offset: 96 + 1000 * index, sealed_bytes: 1000 },
            fingerprints: these.to_vec(),
        });
        frames.collect()
    }

    #[test]
    fn what_was_written_last_is_found() {
        let mut index = Index::new(100);
        index.add(1, &segment_of(&[10, 11, 12]));
        index.add(2, &segment_of(&[20, 11]));
        let found = index.find(11).unwrap();
        assert_eq!((found.segment, found.within), (2, 1));
        assert_eq!(index.find(12).unwrap().segment, 1);
        index.forget(11, &index.find(12).unwrap());
        assert!(index.find(11).is_some(), "another place");
        index.forget(11, &found);
        assert_eq!(index.find(11), None);
        index.forget_segments(&[1].into());
        assert!(index.find(10).is_none() && index.find(20).is_some());
    }

    /// Segments come and go, and what is stored at a time is not much more than fits.
    #[test]
    fn what_is_gone_takes_no_place_for_long() {
        let mut rng = Rng::new(5);
        let mut index = Index::new(1000);
        for number in 1..400 {
            let fingerprints: Vec<u64> = (0..500).map(|_| rng.below(u64::MAX)).collect();
            index.add(number, &segment_of(&fingerprints));
            if number > 3 {
                index.forget_segments(&[number - 3].into());
            }
            let (_, one_in) = index.status();
            assert!(one_in <= 8, "{number}: one in {one_in}");
        }
    }

    /// Far more is stored than fits, and what comes in sequence is found all the same.
    #[test]
    fn neighbours_are_found_where_the_index_is_thin() {
        let mut rng = Rng::new(3);
        let mut index = Index::new(500);
        let segments: Vec<Vec<u64>> =
            (0..40).map(|_| (0..800).map(|_| rng.below(u64::MAX)).collect()).collect();
        for (number, fingerprints) in (1..).zip(&segments) {
            index.add(number, &segment_of(fingerprints));
            let (count, one_in) = index.status();
            assert!(count <= 500 && one_in.is_power_of_two());
        }
        let (_, one_in) = index.status();
        assert!((64..=256).contains(&one_in), "32,000 in 500: one in {one_in}");
        let mut found_count = 0;
        for (number, fingerprints) in (1..).zip(&segments) {
            let wanted = index.lists_wanted(fingerprints.iter().copied(), 4);
            assert!(wanted.iter().all(|segment| *segment == number), "{wanted:?}");
            for segment in wanted {
                index.add_list(segment, &segment_of(&segments[segment as usize - 1]));
            }
            let found = fingerprints.iter().filter(|&&one| index.find(one).is_some());
            found_count += usize::from(found.count() == fingerprints.len());
            assert!(index.lists.len() <= LISTS_MAX);
        }
        assert!(found_count >= 38, "{found_count} of 40 segments");
    }
}
