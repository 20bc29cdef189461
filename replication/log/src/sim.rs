//! The log under a simulated disk, driven from a seed: the core, recovery and overlay of the
//! product, without threads.
//!
//! Invariants:
//! - A run is a function of its seed and options; every failure names the seed.

mod disk;
mod follower;
mod member;
mod tests;
mod world;

use crate::overlay::spill_resident::SpillBytes;
use crate::spill::SpillSink;
use block::env::Random;
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;

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

/// A spill file in memory. It is durable as soon as it is written, like the real one once it has its
/// name.
#[derive(Clone, Debug, Default)]
pub(crate) struct SimSpill(pub(crate) Arc<Mutex<Vec<u8>>>);

impl SpillSink for SimSpill {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let (mut held, at) = (self.0.lock(), offset as usize);
        let len = held.len().max(at + bytes.len());
        held.resize(len, 0);
        held[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

impl SpillBytes for SimSpill {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let (held, at) = (self.0.lock(), offset as usize);
        let found = held.get(at..at + buf.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.copy_from_slice(found);
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.lock().len() as u64)
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
