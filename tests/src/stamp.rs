//! The bytes that tests write. They name their place, so that a wrong byte names its origin.
//!
//! Invariants:
//! - A sector is 32 units of 16 bytes. Each unit alone tells volume, sector and sequence number,
//!   and proves that this run wrote it and that it is in its place in the sector.
//! - Half of each unit looks random, so the bytes compress badly, but they do compress.

use crate::seed::mix;

/// Bytes per sector: the unit that a write changes wholly or not at all.
pub const SECTOR_BYTES: usize = 512;
/// Bytes per unit.
const UNIT_BYTES: usize = 16;
/// Bits for the sector and for the sequence number. Chosen by hand: 128 GiB volumes, 268 million
/// requests a run.
const FIELD_BITS: u32 = 28;
const FIELD_MASK: u64 = (1 << FIELD_BITS) - 1;

/// The origin of a unit and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp {
    /// Number of the volume in the test.
    pub volume: u8,
    /// Sector in the volume, below 2^28.
    pub sector: u64,
    /// Number of the request in the run, below 2^28; the first is 1.
    pub sequence: u64,
}

impl Stamp {
    fn tag(self) -> u64 {
        assert!(self.sector <= FIELD_MASK && self.sequence <= FIELD_MASK, "field out of range");
        u64::from(self.volume) << (2 * FIELD_BITS) | self.sector << FIELD_BITS | self.sequence
    }

    /// Fills one sector. `run` separates the runs of a test.
    pub fn fill(self, run: u64, sector: &mut [u8]) {
        assert_eq!(sector.len(), SECTOR_BYTES, "a stamp fills one sector");
        let tag = self.tag();
        let units = sector.chunks_exact_mut(UNIT_BYTES).zip(0u64..);
        for (unit, index) in units {
            unit[..8].copy_from_slice(&tag.to_be_bytes());
            unit[8..].copy_from_slice(&proof(run, tag, index).to_be_bytes());
        }
    }
}

fn proof(run: u64, tag: u64, index: u64) -> u64 {
    mix(tag ^ mix(run ^ index << 56))
}

/// Returns the bytes of consecutive sectors, all of one request.
#[must_use]
pub fn stamped(run: u64, first: Stamp, sector_count: usize) -> Vec<u8> {
    let mut bytes = vec![0; sector_count * SECTOR_BYTES];
    for (sector, index) in bytes.chunks_exact_mut(SECTOR_BYTES).zip(0u64..) {
        Stamp { sector: first.sector + index, ..first }.fill(run, sector);
    }
    bytes
}

/// Returns the stamp of a unit, if it is one of this run in its place.
fn identify(run: u64, unit: &[u8], index: u64) -> Option<Stamp> {
    let tag = u64::from_be_bytes(unit.get(..8)?.try_into().ok()?);
    let found = u64::from_be_bytes(unit.get(8..16)?.try_into().ok()?);
    let volume = u8::try_from(tag >> (2 * FIELD_BITS)).ok()?;
    let stamp =
        Stamp { volume, sector: tag >> FIELD_BITS & FIELD_MASK, sequence: tag & FIELD_MASK };
    (found == proof(run, tag, index)).then_some(stamp)
}

/// Describes the contents of a sector: stamps with the bytes that they cover, zeroes, or garbage.
#[must_use]
pub fn describe(run: u64, sector: &[u8]) -> Vec<(Option<Stamp>, String)> {
    let mut runs: Vec<(Option<Stamp>, &str, usize, usize)> = Vec::new();
    for (index, unit) in sector.chunks(UNIT_BYTES).enumerate() {
        let stamp = identify(run, unit, u64::try_from(index).expect("small"));
        let kind = match stamp {
            Some(_) => "",
            None if unit.iter().all(|byte| *byte == 0) => "zeroes",
            None => "bytes of no request",
        };
        let start = index * UNIT_BYTES;
        match runs.last_mut() {
            Some(last) if last.0 == stamp && last.1 == kind => last.3 = start + unit.len(),
            _ => runs.push((stamp, kind, start, start + unit.len())),
        }
    }
    let words = |(stamp, kind, start, end): (Option<Stamp>, &str, usize, usize)| {
        (stamp, format!("{start}..{end} {kind}"))
    };
    runs.into_iter().map(words).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_names_its_origin_and_a_flipped_bit_does_not() {
        let stamp = Stamp { volume: 3, sector: 77, sequence: 12345 };
        let bytes = stamped(9, stamp, 2);
        assert_eq!(describe(9, &bytes[..512]), vec![(Some(stamp), "0..512 ".to_owned())]);
        let next = Stamp { sector: 78, ..stamp };
        assert_eq!(describe(9, &bytes[512..]), vec![(Some(next), "0..512 ".to_owned())]);
        let mut flipped = bytes[..512].to_vec();
        flipped[100] ^= 1;
        assert_eq!(describe(9, &flipped)[1], (None, "96..112 bytes of no request".to_owned()));
        assert_eq!(describe(8, &bytes[..512])[0].0, None, "another run's stamp is not ours");
        assert_eq!(describe(9, &bytes[16..32])[0].0, None, "a unit at another place is not whole");
    }
}
