//! In-memory index of fingerprints: finds stored blocks that may be equal to a new one. Pure logic.
//!
//! Invariants:
//! - Memory is bounded. When it is full, the index is thinned out by the value of the fingerprints,
//!   to one in 2, 4, 8 and so on. So the kept ones are spread over all stored data, and the lists
//!   of the segments that they lead to recover the neighbours.
//! - Results only nominate: the segment may be gone, and the block may be a different one.
//!
//! Source: Lillibridge and others, Sparse Indexing: Large Scale, Inline Deduplication Using
//! Sampling and Locality, FAST 2009.

use super::fingerprints::FrameFingerprints;
use crate::segment::FrameAt;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

/// Lists of segments that are kept complete, in addition to the index. Chosen by hand: 5 MiB for
/// segments of the default size.
const LISTS_MAX: usize = 16;

/// Place of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Location {
    pub segment: u64,
    pub at: FrameAt,
    pub within: u8,
}

/// Identity hasher, because a fingerprint is a hash already.
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
        // The kept fingerprints share their lowest bits.
        self.0 = number.rotate_right(32);
    }
}

pub(crate) type ByFingerprint<V> = HashMap<u64, V, BuildHasherDefault<AsItIs>>;

/// The index; see the module.
#[derive(Debug)]
pub(crate) struct Index {
    capacity: usize,
    /// One in 2 to the power of this many fingerprints is kept.
    thinned_by: u32,
    entries: ByFingerprint<Location>,
    lists: VecDeque<(u64, ByFingerprint<Location>)>,
}

impl Index {
    /// Creates an index for at most `capacity` blocks, at least one.
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

    /// Returns the latest known place of a block with this fingerprint.
    pub fn find(&self, fingerprint: u64) -> Option<Location> {
        let in_list = || self.lists.iter().find_map(|(_, list)| list.get(&fingerprint));
        self.entries.get(&fingerprint).or_else(in_list).copied()
    }

    /// Returns the segments whose lists are worth reading for blocks that are written together:
    /// those that one of the fingerprints leads to, if the index is thinned out.
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

    /// Adds a segment's fingerprints. An existing entry of the same fingerprint is replaced.
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

    /// Removes a block that is no longer there.
    pub fn forget(&mut self, fingerprint: u64, location: &Location) {
        if self.entries.get(&fingerprint) == Some(location) {
            self.entries.remove(&fingerprint);
        }
        self.lists.retain(|(segment, _)| *segment != location.segment);
    }

    /// Removes segments that are gone.
    pub fn forget_segments(&mut self, segments: &HashSet<u64>) {
        self.entries.retain(|_, location| !segments.contains(&location.segment));
        self.lists.retain(|(segment, _)| !segments.contains(segment));
        // There is room again to keep a larger part of new fingerprints.
        if self.entries.len() < self.capacity / 4 {
            self.thinned_by = self.thinned_by.saturating_sub(1);
        }
    }

    /// Returns the number of entries, and how many blocks there are for one entry.
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
    fn latest_writes_are_found() {
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

    /// Segments come and go, and the data stored at any time is not much more than fits.
    #[test]
    fn removed_segments_soon_free_their_places() {
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

    /// Far more is stored than fits, yet sequential data is found.
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
