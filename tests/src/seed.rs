//! Repeatable randomness: every random decision of a test comes from one printed number.
//!
//! Invariants:
//! - The same seed gives the same numbers on every machine and in every release.
//! - `SEED=n` in the environment replays one run; without it every run is a different one.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the seeds of a test: only `SEED` if it is set, otherwise `count` fresh ones.
///
/// # Panics
/// When `SEED` is not a number, so that a typing error does not silently test nothing.
#[must_use]
pub fn seeds(count: u64) -> Vec<u64> {
    if let Ok(text) = std::env::var("SEED") {
        return vec![text.parse().expect("SEED is a decimal number")];
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970");
    let first = u64::try_from(now.as_nanos() & 0xffff_ffff).expect("masked to 32 bits");
    (0..count).map(|index| first + index).collect()
}

/// Takes one step of SplitMix64 without state: a hash of `value` that is uniform in all bits.
/// Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
#[must_use]
pub const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Makes a generator for `seed`; `stream` separates several users of one seed.
    #[must_use]
    pub fn new(seed: u64, stream: u64) -> Self {
        Random(mix(seed) ^ mix(stream.wrapping_mul(0x1000_0001)))
    }

    /// Returns 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a number in `0..end`; `end` is above 0. The bias is below 2^-32 for the ranges of
    /// tests.
    pub fn below(&mut self, end: u64) -> u64 {
        assert!(end > 0, "an empty range has no random number");
        self.bits() % end
    }

    /// Returns a number in `start..=last`.
    pub fn between(&mut self, start: u64, last: u64) -> u64 {
        start + self.below(last - start + 1)
    }

    /// Returns true `percent` times of a hundred.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Returns one of `choices`, which is not empty.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        let index = self.below(u64::try_from(choices.len()).expect("fits"));
        &choices[usize::try_from(index).expect("below a length")]
    }

    /// Fills `bytes` with random bytes, which do not compress.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for part in bytes.chunks_mut(8) {
            let word = self.bits().to_le_bytes();
            part.copy_from_slice(&word[..part.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_numbers() {
        let mut one = Random::new(17, 3);
        let mut two = Random::new(17, 3);
        let mut other = Random::new(17, 4);
        let ones: Vec<u64> = (0..50).map(|_| one.bits()).collect();
        assert_eq!(ones, (0..50).map(|_| two.bits()).collect::<Vec<_>>());
        assert_ne!(ones, (0..50).map(|_| other.bits()).collect::<Vec<_>>());
        assert_eq!(Random::new(1, 0).bits(), Random::new(1, 0).bits());
    }

    #[test]
    fn ranges_are_kept_and_filled() {
        let mut random = Random::new(1, 0);
        let mut seen = [false; 5];
        for _ in 0..1000 {
            let number = random.between(3, 7);
            seen[usize::try_from(number - 3).unwrap()] = true;
        }
        assert_eq!(seen, [true; 5]);
    }
}
