//! The log under a simulated disk, driven from a seed: the core, recovery and overlay of the
//! product, without threads.
//!
//! Invariants:
//! - A run is a function of its seed and options; every failure names the seed.

#[cfg_attr(not(test), allow(dead_code, reason = "the log's own simulation uses all of it"))]
mod disk;
#[cfg(test)]
mod follower;
#[cfg(feature = "testing")]
pub(crate) mod machine;
#[cfg(test)]
mod member;
#[cfg(test)]
mod spill;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;

use block::env::Random;
use parking_lot::Mutex;
#[cfg(test)]
pub(crate) use spill::SimSpill;

/// SplitMix64 (Steele, Lea, Flood 2014): tiny, and good enough to choose faults.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Rng(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number from 0 up to but not including `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// Returns true in `percent` of 100 cases.
    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// Seeded bytes in place of unpredictable ones.
pub(crate) struct SimRandom(Mutex<Rng>);

impl SimRandom {
    pub(crate) fn new(seed: u64) -> Self {
        SimRandom(Mutex::new(Rng::new(seed)))
    }
}

impl Random for SimRandom {
    fn fill(&self, bytes: &mut [u8]) {
        let mut rng = self.0.lock();
        bytes.fill_with(|| rng.next() as u8);
    }
}
