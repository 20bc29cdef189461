//! Numbers with a meaning: sector and block sizes, identities, and byte readers (little-endian).
//!
//! Invariants:
//! - [`Lsn`] and [`Epoch`] are never compared or mixed with plain integers by accident.
//! - The byte readers never panic: out of range is `None`.

/// Bytes per sector: the unit in which log entries and the overlay address a volume. Source:
/// docs/format.md, and the unit of every kernel's block layer.
pub const SECTOR_BYTES: u64 = 512;

/// Bytes per map block: the granularity of the volume map and of segments. Source: the page size of
/// x86-64 and the block size of ext4, XFS and NVMe.
pub const BLOCK_BYTES: u64 = 4096;

/// Sectors per map block.
pub const SECTORS_PER_BLOCK: u64 = BLOCK_BYTES / SECTOR_BYTES;

/// Largest volume, in bytes: 1 PiB. Chosen by hand: the sum of two offsets never overflows 64 bits.
pub const VOLUME_BYTES_MAX: u64 = 1 << 50;

/// Log sequence number of an entry: dense, the first is 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(pub u64);

impl Lsn {
    /// The position before the first entry.
    pub const NONE: Lsn = Lsn(0);

    /// Returns the following LSN. Panics after 2^64 entries, more than any device lives to see.
    #[must_use]
    pub fn next(self) -> Lsn {
        Lsn(self.0.checked_add(1).expect("LSN space exhausted"))
    }
}

impl std::fmt::Display for Lsn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// One owner's term over a pool; a higher epoch wins. The first is 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

impl std::fmt::Display for Epoch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// The place of a batch of the write log in the history of a pool: the epoch of the owner that wrote
/// it, and its sequence number, which is dense. An owner writes one batch at a position, so equal
/// positions mean equal batches. Positions are ordered by epoch first: see "Why no acknowledged write
/// is lost" in docs/protocol.md.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// Epoch of the owner that wrote the batch.
    pub epoch: Epoch,
    /// Sequence number; the first batch of a log is 1.
    pub sequence: u64,
}

impl Position {
    /// The place before the first batch.
    pub const START: Position = Position { epoch: Epoch(0), sequence: 0 };
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.epoch, self.sequence)
    }
}

/// Identity of a volume within its pool. Never reused, never 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(pub u32);

impl std::fmt::Display for VolumeId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Reads `N` bytes at `at`; `None` past the end.
#[must_use]
pub fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// Reads a little-endian `u16` at `at`; `None` past the end.
#[must_use]
pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    array_at(bytes, at).map(u16::from_le_bytes)
}

/// Reads a little-endian `u32` at `at`; `None` past the end.
#[must_use]
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    array_at(bytes, at).map(u32::from_le_bytes)
}

/// Reads a little-endian `u64` at `at`; `None` past the end.
#[must_use]
pub fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    array_at(bytes, at).map(u64::from_le_bytes)
}

/// Reads a little-endian `u128` at `at`; `None` past the end.
#[must_use]
pub fn u128_at(bytes: &[u8], at: usize) -> Option<u128> {
    array_at(bytes, at).map(u128::from_le_bytes)
}

/// Computes CRC-32C (Castagnoli, RFC 3720 appendix B.4), the checksum of every format.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc32c_parts(&[bytes])
}

/// Computes the CRC-32C of the concatenation of `parts`.
#[must_use]
pub fn crc32c_parts(parts: &[&[u8]]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    for part in parts {
        digest.update(part);
    }
    u32::try_from(digest.finalize() & 0xffff_ffff).expect("masked to 32 bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_matches_the_check_value_of_rfc_3720() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c_parts(&[b"1234", b"", b"56789"]), 0xe306_9283);
        assert_eq!(crc32c(&[0u8; 32]), 0x8a91_36aa);
    }

    #[test]
    fn reads_past_the_end_return_none() {
        let bytes = [1, 0, 0, 0, 2, 0, 0, 0];
        assert_eq!(u32_at(&bytes, 4), Some(2));
        assert_eq!(u64_at(&bytes, 0), Some(0x2_0000_0001));
        assert_eq!(u64_at(&bytes, 1), None);
        assert_eq!(u16_at(&bytes, usize::MAX), None);
    }
}
