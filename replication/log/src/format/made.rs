//! `ring.made`: the number of files of a ring that were made, so that a missing file is noticed.
//!
//! Invariants:
//! - It is replaced whole, never changed in place: a crash leaves the old or the new version.

use super::{FormatError, put};
use crate::format::file::FILE_COUNT_MAX;
use block::units::{crc32c, u16_at, u32_at};

/// Bytes of the file.
pub(crate) const MADE_BYTES: usize = 20;
/// Format version that this program writes.
const VERSION: u16 = 1;

const MAGIC: &[u8; 8] = b"SPDLMADE";
const AT_VERSION: usize = 8; // u16, then 2 zero bytes
const AT_COUNT: usize = 12; //  u32; 0: files that exist are remains of a ring that was dropped
const AT_CRC: usize = 16; //    u32, CRC-32C of bytes 0..16
const _: () = assert!(AT_CRC + 4 == MADE_BYTES);

/// Returns the contents of a file that counts the ring files below `count` as made.
pub(crate) fn encode(count: u32) -> [u8; MADE_BYTES] {
    let mut bytes = [0; MADE_BYTES];
    put(&mut bytes, 0, MAGIC);
    put(&mut bytes, AT_VERSION, &VERSION.to_le_bytes());
    put(&mut bytes, AT_COUNT, &count.to_le_bytes());
    let crc = crc32c(bytes.get(..AT_CRC).unwrap_or_default());
    put(&mut bytes, AT_CRC, &crc.to_le_bytes());
    bytes
}

/// Reads the count.
pub(crate) fn decode(bytes: &[u8]) -> Result<u32, FormatError> {
    if !bytes.starts_with(MAGIC) {
        return Err(FormatError::NoMagic);
    }
    let found = bytes.get(..AT_CRC).ok_or(FormatError::Short)?;
    if u32_at(bytes, AT_CRC).ok_or(FormatError::Short)? != crc32c(found) {
        return Err(FormatError::Checksum);
    }
    let version = u16_at(found, AT_VERSION).ok_or(FormatError::Short)?;
    if version != VERSION {
        return Err(FormatError::Version(version));
    }
    let count = u32_at(found, AT_COUNT).ok_or(FormatError::Short)?;
    let is_sane = count <= FILE_COUNT_MAX && bytes.len() == MADE_BYTES;
    if is_sane { Ok(count) } else { Err(FormatError::Range) }
}
