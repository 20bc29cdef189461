//! The header of one file of the ring.
//!
//! Invariants:
//! - It is written once, when the file is made, and never changes: the batches differ from wrap
//!   to wrap.
//! - `ring` names this set of files, on this machine; `chain` names the batches in it, which other
//!   machines may hold too.

use super::header::{AT_OWN_FIELDS, HeaderFormat, SharedFields};
use super::{FormatError, put};

/// Length of the header at the start of the file in bytes; batches follow.
pub(crate) const FILE_HEADER_BYTES: usize = 4096;
/// Format version that this program writes.
pub(crate) const VERSION: u16 = 2;

// The fields before offset 40 are those of format/header.rs; there is no cipher.
const AT_RING: usize = 40; //           [u8; 16] random, the same in every file of one ring
const AT_CHAIN: usize = 56; //          [u8; 16] the chain of the batches, see batch.rs
const AT_SLOT: usize = 72; //           u32, place in the ring from 0
const AT_FILE_COUNT: usize = 76; //     u32, files of the full ring
const AT_FILE_BYTES: usize = 80; //     u64, length of each file
const AT_CRC: usize = 88; //            u32, CRC-32C of bytes 0..88
const _: () = assert!(AT_RING == AT_OWN_FIELDS);
const _: () = assert!(AT_CRC + 4 <= FILE_HEADER_BYTES);

/// Maximum number of files of one ring. Chosen by hand.
pub(crate) const FILE_COUNT_MAX: u32 = 65_536;
/// Maximum length of a file in bytes: positions inside a file fit 32 bits.
pub(crate) const FILE_BYTES_MAX: u64 = 1 << 31;

const HEADER: HeaderFormat = HeaderFormat {
    magic: b"SPDLRING",
    bytes: FILE_HEADER_BYTES,
    version: VERSION,
    incompatible_known: 0,
    at_crc: AT_CRC,
};

/// The contents of a ring file's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileHeader {
    pub(crate) pool: [u8; 16],
    pub(crate) ring: [u8; 16],
    pub(crate) chain: [u8; 16],
    pub(crate) slot: u32,
    pub(crate) file_count: u32,
    pub(crate) file_bytes: u64,
}

impl FileHeader {
    /// Returns the first [`FILE_HEADER_BYTES`] of the file.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; FILE_HEADER_BYTES];
        let fields = SharedFields { incompatible: 0, pool: self.pool };
        HEADER.begin(&mut bytes, fields);
        put(&mut bytes, AT_RING, &self.ring);
        put(&mut bytes, AT_CHAIN, &self.chain);
        put(&mut bytes, AT_SLOT, &self.slot.to_le_bytes());
        put(&mut bytes, AT_FILE_COUNT, &self.file_count.to_le_bytes());
        put(&mut bytes, AT_FILE_BYTES, &self.file_bytes.to_le_bytes());
        HEADER.finish(&mut bytes);
        bytes
    }

    /// Reads the header from the first bytes of a file.
    pub(crate) fn decode(bytes: &[u8]) -> Result<FileHeader, FormatError> {
        let header = HEADER.open(bytes)?;
        let found = FileHeader {
            pool: header.fields.pool,
            ring: header.id(AT_RING)?,
            chain: header.id(AT_CHAIN)?,
            slot: header.u32(AT_SLOT)?,
            file_count: header.u32(AT_FILE_COUNT)?,
            file_bytes: header.u64(AT_FILE_BYTES)?,
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
