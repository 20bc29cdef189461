//! Checksums and seals that the targets put right, by the documented bytes.
//!
//! Invariants:
//! - Nothing here panics for an input of any length: what does not fit is left as it is.

use block::hex::to_hex;
use block::seal::{Algorithm, PoolKey, SealKey, TAG_BYTES};
use block::units::{crc32c, u32_at};
use control::chain::ALGORITHM;
use std::ops::Range;

/// Whether bytes in clear are sealed, or sealed bytes opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Seal.
    Seal,
    /// Open, which makes an input to mutate from golden bytes.
    Open,
}

/// Returns a little-endian `u32` as a length or place.
pub fn usize_at(bytes: &[u8], at: usize) -> Option<usize> {
    u32_at(bytes, at).map(|number| usize::try_from(number).expect("32 bits fit"))
}

/// Writes `value` at `at` if it fits.
pub fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(place) = bytes.get_mut(at..).and_then(|rest| rest.get_mut(..value.len())) {
        place.copy_from_slice(value);
    }
}

/// Writes the CRC-32C of `range` at `at`.
pub fn put_checksum(bytes: &mut [u8], range: Range<usize>, at: usize) {
    if let Some(checksum) = bytes.get(range).map(crc32c) {
        put(bytes, at, &checksum.to_le_bytes());
    }
}

/// Derives the key of a container from its cipher's number and its salt; ChaCha20-Poly1305 for an
/// unknown number.
pub fn key_of(pool: &PoolKey, algorithm: Option<&u8>, salt: &[u8], purpose: &str) -> SealKey {
    let algorithm = algorithm.and_then(|number| Algorithm::from_u8(*number));
    pool.derive(algorithm.unwrap_or(Algorithm::ChaCha20Poly1305), salt, purpose)
}

/// Seals `range` of `bytes` in place and writes the tag behind it, or opens it.
pub fn turn(
    direction: Direction,
    key: &SealKey,
    nonce: u64,
    associated: &[u8],
    bytes: &mut [u8],
    range: Range<usize>,
) {
    let Some(end) = range.end.checked_add(TAG_BYTES).filter(|_| range.start <= range.end) else {
        return;
    };
    let Some(sealed) = bytes.get_mut(range.start..end) else { return };
    match direction {
        Direction::Open => {
            key.open(nonce, associated, sealed).expect("golden bytes open");
        }
        Direction::Seal => {
            let (plain, place) = sealed.split_at_mut(sealed.len() - TAG_BYTES);
            let tag = key.seal(nonce, associated, plain);
            place.copy_from_slice(&tag);
        }
    }
}

/// Gives the first line of a document a valid seal.
pub fn seal_document(input: &mut Vec<u8>, key: &PoolKey, purpose: &str) {
    let end = input.iter().position(|byte| *byte == b'\n').unwrap_or(input.len());
    input.truncate(end);
    let salt = [0xc0; 16];
    let tag = key.derive(ALGORITHM, &salt, purpose).seal(0, input, &mut []);
    let (checksum, salt, tag) = (crc32c(input), to_hex(&salt), to_hex(&tag));
    let seal =
        format!("\n{{\"crc32c\":\"{checksum:08x}\",\"salt\":\"{salt}\",\"tag\":\"{tag}\"}}\n");
    input.extend_from_slice(seal.as_bytes());
}
