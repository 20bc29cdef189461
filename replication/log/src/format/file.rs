//! The header of one file of the ring.
//!
//! Invariants:
//! - It is written once, when the file is made, and never changes: the batches tell laps apart.

use super::{FormatError, put};
use block::units::{array_at, crc32c, u16_at, u32_at, u64_at};

/// Length of the header at the start of the file in bytes; batches follow.
pub(crate) const FILE_HEADER_BYTES: usize = 4096;
/// Format version that this program writes.
pub(crate) const VERSION: u16 = 1;

const MAGIC: &[u8; 8] = b"SPDLRING";
const AT_VERSION: usize = 8; //         u16, then 2 zero bytes
const AT_COMPATIBLE: usize = 12; //     u32 feature bits
const AT_READ_ONLY: usize = 16; //      u32 read-only-compatible feature bits
const AT_INCOMPATIBLE: usize = 20; //   u32 feature bits
const AT_POOL: usize = 24; //           [u8; 16]
const AT_RING: usize = 40; //           [u8; 16] random, the same in every file of one ring
const AT_SLOT: usize = 56; //           u32, place in the ring from 0
const AT_FILE_COUNT: usize = 60; //     u32, files of the full ring
const AT_FILE_BYTES: usize = 64; //     u64, length of each file
const AT_CRC: usize = 72; //            u32, CRC-32C of bytes 0..72
const _: () = assert!(AT_CRC + 4 <= FILE_HEADER_BYTES);

/// Maximum number of files of one ring. Chosen by hand.
pub(crate) const FILE_COUNT_MAX: u32 = 65_536;
/// Maximum length of a file in bytes: positions inside a file fit 32 bits.
pub(crate) const FILE_BYTES_MAX: u64 = 1 << 31;

/// The contents of a ring file's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileHeader {
    pub(crate) pool: [u8; 16],
    pub(crate) ring: [u8; 16],
    pub(crate) slot: u32,
    pub(crate) file_count: u32,
    pub(crate) file_bytes: u64,
}

impl FileHeader {
    /// Returns the first [`FILE_HEADER_BYTES`] of the file.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; FILE_HEADER_BYTES];
        put(&mut bytes, 0, MAGIC);
        put(&mut bytes, AT_VERSION, &VERSION.to_le_bytes());
        put(&mut bytes, AT_POOL, &self.pool);
        put(&mut bytes, AT_RING, &self.ring);
        put(&mut bytes, AT_SLOT, &self.slot.to_le_bytes());
        put(&mut bytes, AT_FILE_COUNT, &self.file_count.to_le_bytes());
        put(&mut bytes, AT_FILE_BYTES, &self.file_bytes.to_le_bytes());
        let crc = crc32c(bytes.get(..AT_CRC).unwrap_or_default());
        put(&mut bytes, AT_CRC, &crc.to_le_bytes());
        bytes
    }

    /// Reads the header from the first bytes of a file.
    pub(crate) fn decode(bytes: &[u8]) -> Result<FileHeader, FormatError> {
        let header = bytes.get(..FILE_HEADER_BYTES).ok_or(FormatError::Short)?;
        if !header.starts_with(MAGIC) {
            return Err(FormatError::NoMagic);
        }
        if u32_at(header, AT_CRC) != header.get(..AT_CRC).map(crc32c) {
            return Err(FormatError::HeaderChecksum);
        }
        let version = u16_at(header, AT_VERSION).ok_or(FormatError::Short)?;
        if version != VERSION {
            return Err(FormatError::Version(version));
        }
        let read_only = u32_at(header, AT_READ_ONLY).ok_or(FormatError::Short)?;
        let incompatible = u32_at(header, AT_INCOMPATIBLE).ok_or(FormatError::Short)?;
        let _compatible = u32_at(header, AT_COMPATIBLE).ok_or(FormatError::Short)?;
        if read_only | incompatible != 0 {
            return Err(FormatError::Features(read_only | incompatible));
        }
        let found = FileHeader {
            pool: array_at(header, AT_POOL).ok_or(FormatError::Short)?,
            ring: array_at(header, AT_RING).ok_or(FormatError::Short)?,
            slot: u32_at(header, AT_SLOT).ok_or(FormatError::Short)?,
            file_count: u32_at(header, AT_FILE_COUNT).ok_or(FormatError::Short)?,
            file_bytes: u64_at(header, AT_FILE_BYTES).ok_or(FormatError::Short)?,
        };
        let is_sane = found.file_count >= 2
            && found.file_count <= FILE_COUNT_MAX
            && found.slot < found.file_count
            && found.file_bytes <= FILE_BYTES_MAX
            && found.file_bytes.is_multiple_of(4096)
            && found.file_bytes > 4096;
        if is_sane { Ok(found) } else { Err(FormatError::Range) }
    }
}
