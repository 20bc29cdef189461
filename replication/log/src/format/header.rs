//! The frame that the headers of ring files, batches and spill files share: magic, version, cipher,
//! feature bits, pool, and a checksum over everything before it.
//!
//! Invariants:
//! - Checks run in this order: length, magic, checksum, version, features. So a header with other
//!   bits than this program knows is reported as that of a later program only if it is intact.
//! - A field that is read lies inside the header, or the header is `Short`.

use super::{FormatError, put};
use block::seal::Algorithm;
use block::units::{array_at, crc32c, u16_at, u32_at, u64_at};
use std::ops::Range;

// [u8; 8] magic comes first.
const AT_VERSION: usize = 8; //       u16
const AT_ALGORITHM: usize = 10; //    u8, in headers of sealed contents
const AT_COMPATIBLE: usize = 12; //   u32 feature bits
const AT_READ_ONLY: usize = 16; //    u32 read-only-compatible feature bits
const AT_INCOMPATIBLE: usize = 20; // u32 feature bits
const AT_POOL: usize = 24; //         [u8; 16]
/// Offset of the first field that differs between the headers.
pub(super) const AT_OWN_FIELDS: usize = 40;

/// The parameters of one kind of header.
pub(super) struct HeaderFormat {
    pub(super) magic: &'static [u8; 8],
    /// Length of the header in bytes.
    pub(super) bytes: usize,
    /// The version that this program reads and writes.
    pub(super) version: u16,
    /// The incompatible features that this program knows.
    pub(super) incompatible_known: u32,
    /// Offset of the CRC-32C of all bytes before it.
    pub(super) at_crc: usize,
}

/// The values of the shared fields.
#[derive(Clone, Copy)]
pub(super) struct SharedFields {
    pub(super) incompatible: u32,
    pub(super) pool: [u8; 16],
}

/// A header whose shared fields were verified.
pub(super) struct HeaderReader<'a> {
    pub(super) fields: SharedFields,
    bytes: &'a [u8],
}

impl HeaderFormat {
    /// Writes the shared fields to `bytes`, a header that is zero so far.
    pub(super) fn begin(&self, bytes: &mut [u8], fields: SharedFields) {
        put(bytes, 0, self.magic);
        put(bytes, AT_VERSION, &self.version.to_le_bytes());
        put(bytes, AT_INCOMPATIBLE, &fields.incompatible.to_le_bytes());
        put(bytes, AT_POOL, &fields.pool);
    }

    /// Writes the checksum to a header that is otherwise complete.
    pub(super) fn finish(&self, bytes: &mut [u8]) {
        let crc = crc32c(bytes.get(..self.at_crc).unwrap_or_default());
        put(bytes, self.at_crc, &crc.to_le_bytes());
    }

    /// Verifies the header at the start of `bytes`.
    pub(super) fn open<'a>(&self, bytes: &'a [u8]) -> Result<HeaderReader<'a>, FormatError> {
        let header = bytes.get(..self.bytes).ok_or(FormatError::Short)?;
        if !header.starts_with(self.magic) {
            return Err(FormatError::NoMagic);
        }
        if u32_at(header, self.at_crc) != header.get(..self.at_crc).map(crc32c) {
            return Err(FormatError::HeaderChecksum);
        }
        let version = u16_at(header, AT_VERSION).ok_or(FormatError::Short)?;
        if version != self.version {
            return Err(FormatError::Version(version));
        }
        let read_only = u32_at(header, AT_READ_ONLY).ok_or(FormatError::Short)?;
        let incompatible = u32_at(header, AT_INCOMPATIBLE).ok_or(FormatError::Short)?;
        let _compatible = u32_at(header, AT_COMPATIBLE).ok_or(FormatError::Short)?;
        let unknown = read_only | (incompatible & !self.incompatible_known);
        if unknown != 0 {
            return Err(FormatError::Features(unknown));
        }
        let pool = array_at(header, AT_POOL).ok_or(FormatError::Short)?;
        Ok(HeaderReader { fields: SharedFields { incompatible, pool }, bytes: header })
    }
}

/// Writes the cipher of the contents that the header describes.
pub(super) fn put_algorithm(bytes: &mut [u8], algorithm: Algorithm) {
    let number = match algorithm {
        Algorithm::ChaCha20Poly1305 => 1,
        Algorithm::Aes256Gcm => 2,
    };
    put(bytes, AT_ALGORITHM, &[number]);
}

impl HeaderReader<'_> {
    /// Returns the cipher of the contents that the header describes.
    pub(super) fn algorithm(&self) -> Result<Algorithm, FormatError> {
        let number = self.u8(AT_ALGORITHM)?;
        Algorithm::from_u8(number).ok_or(FormatError::Algorithm(number))
    }

    pub(super) fn u8(&self, at: usize) -> Result<u8, FormatError> {
        self.bytes.get(at).copied().ok_or(FormatError::Short)
    }

    pub(super) fn u32(&self, at: usize) -> Result<u32, FormatError> {
        u32_at(self.bytes, at).ok_or(FormatError::Short)
    }

    pub(super) fn u64(&self, at: usize) -> Result<u64, FormatError> {
        u64_at(self.bytes, at).ok_or(FormatError::Short)
    }

    pub(super) fn id(&self, at: usize) -> Result<[u8; 16], FormatError> {
        array_at(self.bytes, at).ok_or(FormatError::Short)
    }

    /// Returns whether all bytes of the header in `range` are zero.
    pub(super) fn is_zero(&self, range: Range<usize>) -> bool {
        self.bytes.get(range).is_some_and(|part| part.iter().all(|byte| *byte == 0))
    }
}
