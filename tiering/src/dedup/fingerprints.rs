//! Fingerprints of blocks, which nominate stored blocks that may be equal. Pure logic.
//!
//! Invariants:
//! - A fingerprint nominates and never decides: two blocks with the same fingerprint need not be
//!   equal.
//! - Fingerprints of blocks under different keys are unrelated, and reveal nothing about a block
//!   without its key.
//!
//! Byte table: docs/format-map.md#fingerprints.

use crate::segment::{BLOCK_COUNT_MAX, FrameAt};
use crate::varint::{get_varint, put_varint};
use block::seal::PoolKey;
use block::units::{BLOCK_BYTES, u64_at};
use twox_hash::XxHash64;

/// Version of the fingerprint hash and of the record.
const VERSION: u8 = 1;
/// Purpose string for deriving the seed.
const PURPOSE: &str = "fingerprint";

/// Computes fingerprints of the blocks under one key.
#[derive(Clone, Copy)]
pub(crate) struct Fingerprinter {
    seed: u64,
    mask: u64,
}

impl Fingerprinter {
    /// Creates a fingerprinter. `mask` reduces the number of distinct fingerprints in tests.
    pub fn new(key: &PoolKey, pool: &[u8; 16], mask: u64) -> Fingerprinter {
        Fingerprinter { seed: key.derive_seed(pool, PURPOSE), mask }
    }

    /// Returns one fingerprint per block of `bytes`, which contains whole blocks.
    pub fn of_blocks(self, bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
        let blocks = bytes.chunks_exact(BLOCK_BYTES as usize);
        blocks.map(move |block| XxHash64::oneshot(self.seed, block) & self.mask)
    }
}

/// The fingerprints of the blocks of one frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FrameFingerprints {
    pub at: FrameAt,
    /// One for each block of the frame.
    pub fingerprints: Vec<u64>,
}

/// Encodes frames, in the order of the segment, to the stored form.
#[must_use]
pub(crate) fn encode(frames: &[FrameFingerprints]) -> Vec<u8> {
    let count: usize = frames.iter().map(|frame| frame.fingerprints.len()).sum();
    let mut bytes = Vec::with_capacity(1 + 8 * count + 6 * frames.len());
    bytes.push(VERSION);
    let (mut next_index, mut next_offset) = (0, 0);
    for FrameFingerprints { at, fingerprints } in frames {
        put_varint(&mut bytes, u64::from(at.frame_index - next_index));
        put_varint(&mut bytes, u64::from(at.offset - next_offset));
        put_varint(&mut bytes, at.sealed_bytes.into());
        bytes.push(u8::try_from(fingerprints.len()).expect("a frame has 16 blocks at most"));
        for fingerprint in fingerprints {
            bytes.extend_from_slice(&fingerprint.to_le_bytes());
        }
        (next_index, next_offset) = (at.frame_index + 1, at.offset + at.sealed_bytes);
    }
    bytes
}

/// Decodes the stored form; `None` for any other bytes.
pub(crate) fn decode(bytes: &[u8]) -> Option<Vec<FrameFingerprints>> {
    let mut rest = bytes.strip_prefix(&[VERSION])?;
    let number = |rest: &mut &[u8]| {
        let (value, taken) = get_varint(rest)?;
        *rest = rest.get(taken..)?;
        u32::try_from(value).ok()
    };
    let mut frames = Vec::new();
    let (mut next_index, mut next_offset) = (0u32, 0u32);
    while !rest.is_empty() {
        let frame_index = next_index.checked_add(number(&mut rest)?)?;
        let offset = next_offset.checked_add(number(&mut rest)?)?;
        let sealed_bytes = number(&mut rest)?;
        (next_index, next_offset) =
            (frame_index.checked_add(1)?, offset.checked_add(sealed_bytes)?);
        let (&count, after) = rest.split_first()?;
        if count == 0 || count > BLOCK_COUNT_MAX {
            return None;
        }
        let (these, after) = after.split_at_checked(8 * usize::from(count))?;
        rest = after;
        let each = (0..usize::from(count)).map(|index| u64_at(these, 8 * index));
        let fingerprints = each.collect::<Option<Vec<u64>>>()?;
        let at = FrameAt { frame_index, offset, sealed_bytes };
        frames.push(FrameFingerprints { at, fingerprints });
    }
    Some(frames)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, seeds};

    fn frame(frame_index: u32, offset: u32, fingerprints: &[u64]) -> FrameFingerprints {
        let at = FrameAt { frame_index, offset, sealed_bytes: 0x1234 };
        FrameFingerprints { at, fingerprints: fingerprints.to_vec() }
    }

    #[test]
    fn the_stored_form_reads_back_and_nothing_else_does() {
        let frames = [frame(0, 96, &[1, 0x0102_0304_0506_0708]), frame(2, 0x9000, &[u64::MAX])];
        assert_eq!(decode(&encode(&frames)).unwrap(), frames);
        let bytes = encode(&frames);
        for at in 0..bytes.len() {
            // A list may end where a frame ends.
            if let Some(read) = decode(&bytes[..at]) {
                assert!(read.len() < 2 && at > 0, "{at}");
            }
        }
    }

    #[test]
    fn no_bytes_make_it_panic() {
        for seed in seeds(300) {
            let mut rng = Rng::new(seed);
            let mut bytes = encode(&[frame(3, 96, &[5, 6, 7]), frame(4, 0xffff, &[8])]);
            for _ in 0..1 + rng.below(4) {
                let at = rng.below(bytes.len() as u64) as usize;
                bytes[at] = rng.below(256) as u8;
            }
            let _ = decode(&bytes);
        }
    }

    #[test]
    fn they_are_of_one_key_and_one_pool() {
        let block = [7u8; BLOCK_BYTES as usize];
        let of = |key: u8, pool: u8| {
            let fingerprinter = Fingerprinter::new(&PoolKey::new([key; 32]), &[pool; 16], u64::MAX);
            fingerprinter.of_blocks(&block).next().unwrap()
        };
        assert_eq!(of(1, 1), of(1, 1));
        assert!(of(1, 1) != of(2, 1) && of(1, 1) != of(1, 2));
        assert_eq!(
            of(1, 1),
            0x7b7b_c31f_f069_4f3e,
            "the bytes of fingerprints have changed: a new version is needed"
        );
    }
}
