//! The cut of a segment's image into the pieces of its data fragments.
//!
//! Invariants:
//! - The pieces are in order, without gaps, and cover the image.
//! - No frame lies in two pieces.

use crate::scheme::{FRAGMENTS_MAX, Scheme};
use std::ops::Range;

/// Unit of the codec: 32 symbols of 16 bits. Fragments are coded as if zeroes filled the last unit.
pub const UNIT_BYTES: usize = 64;

/// Where each piece of an image ends. Not empty, in order; the last one is the length of the image.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Cuts(Vec<u32>);

impl Cuts {
    /// Cuts an image of `image_bytes` bytes into pieces of nearly equal length, one for each data
    /// fragment. `borders` are the offsets at which it may be cut: where frames begin, in order; those
    /// beyond its end are left out. Without enough of them, pieces are empty.
    #[must_use]
    pub fn new(scheme: Scheme, image_bytes: u32, borders: &[u32]) -> Cuts {
        let count = scheme.data() as u64;
        let mut ends = Vec::with_capacity(scheme.data());
        let mut begin = 0;
        for piece in 1..count {
            let wished =
                u32::try_from(u64::from(image_bytes) * piece / count).unwrap_or(image_bytes);
            let behind = borders.partition_point(|border| *border < wished);
            let near = [behind.checked_sub(1), Some(behind)].into_iter().flatten();
            let near = near.filter_map(|at| borders.get(at)).copied().chain([image_bytes]);
            let possible = near.filter(|border| (begin..=image_bytes).contains(border));
            let end = possible.min_by_key(|border| border.abs_diff(wished)).unwrap_or(image_bytes);
            ends.push(end);
            begin = end;
        }
        ends.push(image_bytes);
        Cuts(ends)
    }

    /// Returns the cuts with these ends, as they are stored; `None` if they are no cuts of `scheme`.
    #[must_use]
    pub fn from_ends(scheme: Scheme, ends: &[u32]) -> Option<Cuts> {
        let is_valid =
            ends.len() == scheme.data() && ends.len() <= FRAGMENTS_MAX && ends.is_sorted();
        is_valid.then(|| Cuts(ends.to_vec()))
    }

    /// The end of each piece.
    #[must_use]
    pub fn ends(&self) -> &[u32] {
        &self.0
    }

    /// Bytes of the image.
    #[must_use]
    pub fn image_bytes(&self) -> u32 {
        self.0.last().copied().unwrap_or(0)
    }

    /// The range of the image in a data fragment; empty for an index beyond them.
    #[must_use]
    pub fn piece(&self, index: usize) -> Range<u32> {
        let end = self.0.get(index).copied().unwrap_or(self.image_bytes());
        let begin =
            index.checked_sub(1).map_or(0, |before| self.0.get(before).copied().unwrap_or(end));
        begin..end
    }

    /// The data fragment that has the whole range, and its offset there; `None` if two have parts of it,
    /// or it is empty or beyond the end.
    #[must_use]
    pub fn locate(&self, range: &Range<u32>) -> Option<(usize, u32)> {
        let index = self.0.partition_point(|end| *end <= range.start);
        let piece = self.piece(index);
        let is_inside =
            piece.start <= range.start && range.start < range.end && range.end <= piece.end;
        is_inside.then(|| (index, range.start - piece.start))
    }

    /// Bytes of a parity fragment: those of the longest piece, in whole units.
    #[must_use]
    pub fn coded_bytes(&self) -> usize {
        let longest = (0..self.0.len()).map(|index| self.piece(index).len()).max().unwrap_or(0);
        longest.next_multiple_of(UNIT_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_frame_is_cut(
            lens in prop::collection::vec(33u32..70_000, 0..200),
            tail in 0u32..5000,
            which in 0..Scheme::ALL.len(),
        ) {
            let scheme = Scheme::ALL[which];
            let mut borders = vec![96];
            for len in &lens {
                borders.push(borders[borders.len() - 1] + len);
            }
            let image = borders[borders.len() - 1] + tail;
            let cuts = Cuts::new(scheme, image, &borders);
            prop_assert_eq!(cuts.ends().len(), scheme.data());
            prop_assert_eq!(Cuts::from_ends(scheme, cuts.ends()), Some(cuts.clone()));
            let mut begin = 0;
            for index in 0..scheme.data() {
                let piece = cuts.piece(index);
                prop_assert_eq!(piece.start, begin);
                begin = piece.end;
                let is_border = piece.end == image || borders.contains(&piece.end);
                prop_assert!(is_border, "{:?}", cuts);
            }
            prop_assert_eq!(begin, image);
            for frame in borders.windows(2) {
                let (index, offset) = cuts.locate(&(frame[0]..frame[1])).expect("within one piece");
                prop_assert_eq!(cuts.piece(index).start + offset, frame[0]);
            }
            // Nearly equal: no piece is longer than its share and the two frames at its ends.
            let longest_frame = lens.iter().copied().max().unwrap_or(0).max(tail).max(96);
            let share = image / scheme.data() as u32;
            prop_assert!(cuts.coded_bytes() as u32 <= share + 2 * longest_frame + 2 * UNIT_BYTES as u32);
        }
    }

    #[test]
    fn ranges_over_a_cut_or_outside_are_in_no_piece() {
        let scheme = Scheme::new(4, 2).expect("a scheme");
        let cuts = Cuts::from_ends(scheme, &[100, 100, 250, 400]).expect("they are in order");
        assert_eq!(cuts.locate(&(0..100)), Some((0, 0)));
        assert_eq!(cuts.locate(&(100..101)), Some((2, 0)));
        assert_eq!(cuts.locate(&(399..400)), Some((3, 149)));
        for nowhere in [99..101, 0..0, 400..401, 399..401] {
            assert_eq!(cuts.locate(&nowhere), None, "{nowhere:?}");
        }
        assert_eq!(cuts.coded_bytes(), 192);
        assert_eq!(Cuts::from_ends(scheme, &[100, 99, 250, 400]), None);
        assert_eq!(Cuts::from_ends(scheme, &[100, 250, 400]), None);
    }
}
