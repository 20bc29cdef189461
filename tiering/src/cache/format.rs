//! Byte format of the cache file: file header and packs. This code is pure.
//!
//! The file consists of one header block followed by regions of equal size. A region is filled
//! front to back with *packs*. A pack is one write, and its directory names the frames that follow,
//! so that a region can be walked after a restart, whether or not it was full.
//!
//! Invariants:
//! - Decoders accept any bytes, never panic, and allocate at most what [`PACK_BYTES_MAX`] can hold.
//! - After a loss of power, a valid directory may name damaged frames. Readers verify every frame,
//!   here as everywhere.
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::as_conversions,
        clippy::unwrap_used
    )
)]

use block::units::{array_at, crc32c_parts, u16_at, u32_at, u64_at};

/// Alignment of packs and regions in bytes, as `O_DIRECT` requires.
pub const ALIGN: usize = 4096;
/// Version of the cache file; files of other versions are discarded.
pub const VERSION: u16 = 1;

/// Bytes of the file header; the rest of its first [`ALIGN`] bytes is zero.
const FILE_HEADER_BYTES: usize = 40;
const FILE_MAGIC: [u8; 8] = *b"SPDLCACH"; // [u8; 8]
const FILE_AT_VERSION: usize = 8; //         u16
const FILE_AT_CLOSED: usize = 10; //         u8, 1 after an orderly end, else 0; then a zero byte
const FILE_AT_REGION_BYTES: usize = 12; //   u32
const FILE_AT_POOL: usize = 16; //           [u8; 16]
const FILE_AT_PROVEN_FROM: usize = 32; //    u32, first wrap whose frames are proven to be there
const FILE_AT_CRC: usize = 36; //            u32, CRC-32C of bytes 0..36
const _: () =
    assert!(FILE_AT_PROVEN_FROM + 4 == FILE_AT_CRC && FILE_AT_CRC + 4 == FILE_HEADER_BYTES);

/// Bytes of a pack's header; its entries follow, then its frames, then zeroes up to [`ALIGN`].
pub const PACK_HEADER_BYTES: usize = 32;
const PACK_MAGIC: [u8; 4] = *b"SPCP"; //  [u8; 4]
const PACK_AT_ENTRY_COUNT: usize = 4; //   u32, never 0
const PACK_AT_SEQUENCE: usize = 8; //      u64, of the region's wrap, never 0
const PACK_AT_PACK_BYTES: usize = 16; //   u32, a multiple of ALIGN
const PACK_AT_POSITION: usize = 20; //     u32, where the pack starts in its region
const PACK_AT_ENTRIES_CRC: usize = 24; //  u32, CRC-32C of the entries
const PACK_AT_CRC: usize = 28; //          u32, CRC-32C of bytes 0..28
const _: () = assert!(PACK_AT_CRC + 4 == PACK_HEADER_BYTES);

/// Bytes of an entry: key u64, offset in the pack u32, sealed bytes u32.
pub const PACK_ENTRY_BYTES: usize = 16;
/// Largest pack. Chosen by hand: writes this long reach the bandwidth of any drive.
pub const PACK_BYTES_MAX: usize = 4 << 20;

/// State in which the file was left. It affects only how frames that do not verify are reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileState {
    /// The file was closed in an orderly way, with everything written on stable storage.
    pub is_closed: bool,
    /// Frames of wraps before this one may be named although they never reached the disk.
    pub proven_from: u32,
}

/// Encodes the first block of the file.
#[must_use]
pub fn encode_file_header(pool: &[u8; 16], region_bytes: u32, state: FileState) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(ALIGN);
    bytes.extend_from_slice(&FILE_MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.push(u8::from(state.is_closed));
    bytes.resize(FILE_AT_REGION_BYTES, 0);
    bytes.extend_from_slice(&region_bytes.to_le_bytes());
    bytes.extend_from_slice(pool);
    bytes.extend_from_slice(&state.proven_from.to_le_bytes());
    let crc = crc32c_parts(&[&bytes]);
    bytes.extend_from_slice(&crc.to_le_bytes());
    bytes.resize(ALIGN, 0);
    bytes
}

/// Whether the first block of a file belongs to a cache of this version, pool and region size. Any
/// other file is discarded: it holds nothing that the store does not have.
#[must_use]
pub fn is_file_header(bytes: &[u8], pool: &[u8; 16], region_bytes: u32) -> bool {
    bytes.starts_with(&FILE_MAGIC)
        && u16_at(bytes, FILE_AT_VERSION) == Some(VERSION)
        && u32_at(bytes, FILE_AT_REGION_BYTES) == Some(region_bytes)
        && array_at(bytes, FILE_AT_POOL) == Some(*pool)
        && u32_at(bytes, FILE_AT_CRC).is_some_and(|checksum| {
            bytes.get(..FILE_AT_CRC).is_some_and(|head| crc32c_parts(&[head]) == checksum)
        })
}

/// The state recorded in a file header for which [`is_file_header`] is true. A header written by a
/// program that did not record it reads as not closed.
#[must_use]
pub fn file_state(header: &[u8]) -> FileState {
    FileState {
        is_closed: header.get(FILE_AT_CLOSED) == Some(&1),
        proven_from: u32_at(header, FILE_AT_PROVEN_FROM).unwrap_or(u32::MAX),
    }
}

/// One frame in a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackEntry {
    /// Key of the frame in the index.
    pub key: u64,
    /// Offset of its first byte from the start of the pack.
    pub offset: u32,
    /// Its length.
    pub sealed_bytes: u32,
}

/// The header of a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackHeader {
    /// Frames in the pack.
    pub entry_count: u32,
    /// Lap of the region: shared by all packs of one wrap, and different from all other wraps.
    pub sequence: u64,
    /// Bytes of the whole pack.
    pub pack_bytes: u32,
    /// Offset of the pack in its region.
    pub position: u32,
    entries_crc: u32,
}

impl PackHeader {
    /// Bytes of header and entries.
    #[must_use]
    pub fn directory_bytes(&self) -> usize {
        let entry_count = usize::try_from(self.entry_count).unwrap_or(usize::MAX);
        entry_count.saturating_mul(PACK_ENTRY_BYTES).saturating_add(PACK_HEADER_BYTES)
    }

    /// Decodes the first bytes of a pack. Returns `None` for anything else.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..PACK_HEADER_BYTES)?;
        let crc = crc32c_parts(&[bytes.get(..PACK_AT_CRC)?]);
        if !bytes.starts_with(&PACK_MAGIC) || u32_at(bytes, PACK_AT_CRC)? != crc {
            return None;
        }
        let header = PackHeader {
            entry_count: u32_at(bytes, PACK_AT_ENTRY_COUNT)?,
            sequence: u64_at(bytes, PACK_AT_SEQUENCE)?,
            pack_bytes: u32_at(bytes, PACK_AT_PACK_BYTES)?,
            position: u32_at(bytes, PACK_AT_POSITION)?,
            entries_crc: u32_at(bytes, PACK_AT_ENTRIES_CRC)?,
        };
        let pack_bytes = usize::try_from(header.pack_bytes).ok()?;
        let is_sane = header.entry_count > 0
            && header.sequence > 0
            && pack_bytes <= PACK_BYTES_MAX
            && pack_bytes.is_multiple_of(ALIGN)
            && header.directory_bytes() <= pack_bytes;
        is_sane.then_some(header)
    }

    /// Decodes the entries of this pack from its first [`PackHeader::directory_bytes`] bytes.
    /// Returns `None` if they are damaged.
    #[must_use]
    pub fn decode_entries(&self, directory: &[u8]) -> Option<Vec<PackEntry>> {
        let entries = directory.get(PACK_HEADER_BYTES..self.directory_bytes())?;
        if crc32c_parts(&[entries]) != self.entries_crc {
            return None;
        }
        entries
            .chunks_exact(PACK_ENTRY_BYTES)
            .map(|entry| {
                let entry = PackEntry {
                    key: u64_at(entry, 0)?,
                    offset: u32_at(entry, 8)?,
                    sealed_bytes: u32_at(entry, 12)?,
                };
                let end = entry.offset.checked_add(entry.sealed_bytes)?;
                (end <= self.pack_bytes).then_some(entry)
            })
            .collect()
    }
}

/// Length in bytes of a pack of `entry_count` frames with a total length of `frame_bytes`.
#[must_use]
pub fn pack_bytes(entry_count: usize, frame_bytes: usize) -> usize {
    entry_count
        .saturating_mul(PACK_ENTRY_BYTES)
        .saturating_add(PACK_HEADER_BYTES)
        .saturating_add(frame_bytes)
        .checked_next_multiple_of(ALIGN)
        .unwrap_or(usize::MAX)
}

/// Encodes header and entries of a pack whose frames have these keys and lengths and follow the
/// entries one after the other. Returns `None` if they exceed the size of a pack.
#[must_use]
pub fn encode_directory(
    sequence: u64,
    position: u32,
    frames: &[(u64, u32)],
) -> Option<(Vec<u8>, Vec<PackEntry>)> {
    let entry_count = u32::try_from(frames.len()).ok()?;
    let directory_bytes =
        frames.len().checked_mul(PACK_ENTRY_BYTES)?.checked_add(PACK_HEADER_BYTES)?;
    let mut offset = u32::try_from(directory_bytes).ok()?;
    let mut entries = Vec::with_capacity(frames.len());
    let mut entry_bytes = Vec::with_capacity(directory_bytes);
    for &(key, sealed_bytes) in frames {
        entries.push(PackEntry { key, offset, sealed_bytes });
        entry_bytes.extend_from_slice(&key.to_le_bytes());
        entry_bytes.extend_from_slice(&offset.to_le_bytes());
        entry_bytes.extend_from_slice(&sealed_bytes.to_le_bytes());
        offset = offset.checked_add(sealed_bytes)?;
    }
    let whole = usize::try_from(offset).ok()?.checked_next_multiple_of(ALIGN)?;
    if whole > PACK_BYTES_MAX {
        return None;
    }
    let mut bytes = Vec::with_capacity(directory_bytes);
    bytes.extend_from_slice(&PACK_MAGIC);
    bytes.extend_from_slice(&entry_count.to_le_bytes());
    bytes.extend_from_slice(&sequence.to_le_bytes());
    bytes.extend_from_slice(&u32::try_from(whole).ok()?.to_le_bytes());
    bytes.extend_from_slice(&position.to_le_bytes());
    bytes.extend_from_slice(&crc32c_parts(&[&entry_bytes]).to_le_bytes());
    let crc = crc32c_parts(&[&bytes]);
    bytes.extend_from_slice(&crc.to_le_bytes());
    bytes.extend_from_slice(&entry_bytes);
    Some((bytes, entries))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::golden::{Fields, Golden};
    use crate::testing::{Rng, seeds};

    const FILE_FIELDS: Fields = &[
        ("magic", 8),
        ("version", 2),
        ("zero", 2),
        ("region bytes", 4),
        ("pool", 16),
        ("zero", 4),
        ("CRC", 4),
    ];
    const PACK_FIELDS: Fields = &[
        ("magic", 4),
        ("entry count", 4),
        ("sequence", 8),
        ("pack bytes", 4),
        ("position in the region", 4),
        ("CRC of the entries", 4),
        ("CRC of the header", 4),
        ("key", 8),
        ("offset", 4),
        ("sealed bytes", 4),
        ("key", 8),
        ("offset", 4),
        ("sealed bytes", 4),
    ];

    #[test]
    fn a_directory_is_read_back_and_any_flipped_bit_is_found() {
        let frames: Vec<(u64, u32)> = (0..9).map(|n| (n * 77, 100 + n as u32)).collect();
        let (bytes, entries) = encode_directory(5, 8192, &frames).unwrap();
        let header = PackHeader::decode(&bytes).unwrap();
        assert_eq!((header.sequence, header.position, header.entry_count), (5, 8192, 9));
        assert_eq!(header.pack_bytes as usize, pack_bytes(9, (0..9).map(|n| 100 + n).sum()));
        assert_eq!(header.decode_entries(&bytes).unwrap(), entries);
        for at in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[at / 8] ^= 1 << (at % 8);
            let read = PackHeader::decode(&damaged).and_then(|h| h.decode_entries(&damaged));
            assert_eq!(read, None, "bit {at}");
        }
    }

    /// Bytes of version 1, annotated in `testdata/`; never edited.
    #[test]
    fn golden_cache_file_of_version_1() {
        let text = include_str!("../../testdata/cache-v1.hex");
        let mut golden = Golden::new("cache", text);
        let state = FileState::default();
        let header = encode_file_header(b"0123456789abcdef", 0x0040_0000, state);
        assert!(header[FILE_HEADER_BYTES..].iter().all(|byte| *byte == 0));
        let header = golden.take("file header", &header[..FILE_HEADER_BYTES], FILE_FIELDS);
        assert!(is_file_header(&header, b"0123456789abcdef", 0x0040_0000));
        assert_eq!(file_state(&header), state);
        let frames = [(0x0102_0304_0506_0708, 5000), (0x1112_1314_1516_1718, 600)];
        let (directory, entries) = encode_directory(0x0a0b_0c0d, 0x8000, &frames).unwrap();
        let directory = golden.take("pack", &directory, PACK_FIELDS);
        let pack = PackHeader::decode(&directory).unwrap();
        assert_eq!((pack.entry_count, pack.sequence), (2, 0x0a0b_0c0d));
        assert_eq!((pack.pack_bytes, pack.position), (8192, 0x8000));
        assert_eq!(pack.decode_entries(&directory).unwrap(), entries);
        assert_eq!((entries[1].offset, entries[1].sealed_bytes), (5064, 600));
        golden.end();
    }

    #[test]
    fn a_file_of_another_pool_version_or_shape_is_not_ours() {
        let state = FileState { is_closed: true, proven_from: 0x0102_0304 };
        let bytes = encode_file_header(&[7; 16], 1 << 20, state);
        assert_eq!(file_state(&bytes), state);
        assert_eq!(bytes.len(), ALIGN);
        assert!(is_file_header(&bytes, &[7; 16], 1 << 20));
        assert!(!is_file_header(&bytes, &[8; 16], 1 << 20));
        assert!(!is_file_header(&bytes, &[7; 16], 2 << 20));
        for at in 0..FILE_HEADER_BYTES * 8 {
            let mut damaged = bytes.clone();
            damaged[at / 8] ^= 1 << (at % 8);
            assert!(!is_file_header(&damaged, &[7; 16], 1 << 20), "bit {at}");
        }
        for len in 0..FILE_HEADER_BYTES {
            assert!(!is_file_header(&bytes[..len], &[7; 16], 1 << 20), "{len} bytes");
        }
    }

    #[test]
    fn decoders_take_any_bytes() {
        for seed in seeds(200) {
            let mut rng = Rng::new(seed);
            let count = rng.below(300) as usize;
            let mut bytes = rng.bytes(count, 100);
            assert!(!is_file_header(&bytes, &[0; 16], 1), "SEED={seed}");
            assert_eq!(PackHeader::decode(&bytes), None, "SEED={seed}");
            // Even with a correct checksum, only sane sizes pass.
            if bytes.len() >= PACK_HEADER_BYTES {
                bytes[..4].copy_from_slice(&PACK_MAGIC);
                let crc = crc32c_parts(&[&bytes[..PACK_AT_CRC]]);
                bytes[PACK_AT_CRC..PACK_HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
                if let Some(header) = PackHeader::decode(&bytes) {
                    assert!(header.directory_bytes() <= PACK_BYTES_MAX, "SEED={seed}");
                    let _ = header.decode_entries(&bytes);
                }
            }
        }
    }

    #[test]
    fn a_pack_that_would_be_too_large_is_refused() {
        assert!(encode_directory(1, 0, &[(1, 65_568); 64]).is_none());
        assert!(encode_directory(1, 0, &[(1, u32::MAX); 3]).is_none());
        assert!(encode_directory(1, 0, &[(1, 65_568); 63]).is_some());
    }
}
