//! The bytes of the write log: ring file header, batch header, entry table, count of files, state,
//! spill files. Pure functions without I/O and clock; the only cipher state is a derived key.
//!
//! Invariants:
//! - Decoders take any bytes and never panic; they accept only bytes that the encoders could have
//!   written.
//! - Every number is little-endian; byte tables are in docs/format-log.md and docs/format-spill.md,
//!   golden bytes in `testdata/`.
//! - Unknown compatible features are ignored. Unknown read-only-compatible or incompatible features
//!   refuse the log; they never end it.
#![deny(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::unwrap_used
)]

pub(crate) mod batch;
pub(crate) mod entry;
pub(crate) mod file;
mod header;
pub(crate) mod made;
pub(crate) mod reencode;
pub(crate) mod spill;
pub(crate) mod state;
pub(crate) mod succession;
#[cfg(test)]
mod tests;

/// Newest version of the log's formats (ring files and batches) that this program writes.
pub const VERSION: u16 =
    if batch::VERSION > file::VERSION { batch::VERSION } else { file::VERSION };

/// The reason why bytes were not accepted. The caller knows whether that ends the log or is damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FormatError {
    /// Not ours at all: zeroes, or other data.
    #[error("no header here")]
    NoMagic,
    /// The fixed header does not match its checksum.
    #[error("header checksum differs")]
    HeaderChecksum,
    /// The remaining bytes do not match their checksum.
    #[error("checksum differs")]
    Checksum,
    /// A later format version.
    #[error("format version {0} is not known to this program")]
    Version(u16),
    /// Features of a later program.
    #[error("incompatible feature bits {0:#x} are not known to this program")]
    Features(u32),
    /// An AEAD that this program does not have.
    #[error("cipher {0} is not known to this program")]
    Algorithm(u8),
    /// A number outside its range.
    #[error("a field is out of range")]
    Range,
    /// Fewer bytes than the header declares.
    #[error("cut short")]
    Short,
    /// The disk does not read some of the bytes.
    #[error("the disk does not read it")]
    Unreadable,
    /// The authentication tag does not match: another key, or damage that the checksum missed.
    #[error("authentication failed: damaged, or written with another key")]
    Seal,
}

impl FormatError {
    /// Returns whether a later program wrote the bytes: they are intact, but this program cannot
    /// read them.
    pub(crate) fn is_unsupported(self) -> bool {
        matches!(
            self,
            FormatError::Version(_) | FormatError::Features(_) | FormatError::Algorithm(_)
        )
    }
}

/// Copies `value` to `at`. `bytes` is a header of fixed size that this package lays out, so a field
/// outside it is a programmer's error.
pub(crate) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    at.checked_add(value.len())
        .and_then(|end| bytes.get_mut(at..end))
        .expect("the field lies inside its header")
        .copy_from_slice(value);
}

/// Returns the `len` bytes of `bytes` from `at`; `Short` if there are fewer.
pub(crate) fn part(bytes: &[u8], at: usize, len: usize) -> Result<&[u8], FormatError> {
    at.checked_add(len).and_then(|end| bytes.get(at..end)).ok_or(FormatError::Short)
}
