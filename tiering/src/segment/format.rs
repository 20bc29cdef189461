//! Byte formats of a segment: header, frame header, directory entry, footer. Pure logic.
//!
//! Owns every offset of docs/format-segment.md; all numbers are little-endian.
//!
//! Invariants:
//! - Decoders accept any bytes, never panic and never allocate.
//! - `decode(encode(x)) == x`, and every byte that `encode` writes is covered by a checksum.
//! - A change to these bytes requires a change of [`VERSION`] or a feature bit, and an additional
//!   golden file.
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::as_conversions,
        clippy::unwrap_used
    )
)]

use super::{FrameAt, SegmentError, SegmentId, SegmentNumber};
use crate::keys::KeyId;
use block::Epoch;
use block::seal::{Algorithm, TAG_BYTES};
use block::units::{BLOCK_BYTES, array_at, crc32c_parts, u16_at, u32_at, u64_at};

/// Version of the format that this code writes.
pub const VERSION: u16 = 1;
/// Incompatible feature bit: the frames are sealed with the key of a volume.
const FEATURE_VOLUME_KEY: u64 = 1;
/// Incompatible feature bits that this code knows.
pub const FEATURES_KNOWN: u64 = FEATURE_VOLUME_KEY;
/// Blocks in the largest frame. Chosen by hand: at 64 KiB, larger frames compress no better, and a
/// random read of one block still costs little more than its latency.
pub const BLOCK_COUNT_MAX: u8 = 16;
/// Largest object, in bytes. Chosen by hand: offsets fit 32 bits with room to spare.
pub const SEGMENT_BYTES_MAX: u32 = 1 << 30;
/// Maximum number of frames in a segment. Chosen by hand: its directory stays below 32 MiB before
/// compression.
pub const FRAME_COUNT_MAX: u32 = 1 << 20;

/// Bytes of the segment header, at the start of the object.
pub const HEADER_BYTES: usize = 96;
const MAGIC: [u8; 8] = *b"SPDLSEGM"; // [u8; 8]
const AT_VERSION: usize = 8; //         u16
const AT_ALGORITHM: usize = 10; //      u8, `block::seal::Algorithm`
/// The only erasure code that this version knows: the object is whole.
pub const ERASURE_NONE: u8 = 0;
const AT_ERASURE: usize = 11; //        u8, erasure code of its fragments: 0 = whole object
const AT_ZERO: usize = 12; //           u32, 0
const AT_COMPATIBLE: usize = 16; //     u64, feature bits that a reader and a writer may ignore
const AT_READ_ONLY: usize = 24; //      u64, feature bits that a reader may ignore
const AT_INCOMPATIBLE: usize = 32; //   u64, feature bits that must not be ignored
const AT_POOL: usize = 40; //           [u8; 16]
const AT_EPOCH: usize = 56; //          u64, never 0
const AT_NUMBER: usize = 64; //         u64, never 0
const AT_ID: usize = 72; //             [u8; 16]
const AT_KEY: usize = 88; //            u32, volume that the key of the frames was made for; 0 = the pool's key
const AT_CRC: usize = 92; //            u32, CRC-32C of bytes 0..92
const _: () = assert!(AT_CRC + 4 == HEADER_BYTES);

/// Bytes of a frame header, which precedes the frame's ciphertext.
pub const FRAME_HEADER_BYTES: usize = 16;
const FRAME_MAGIC: [u8; 2] = *b"Fr"; //   [u8; 2]
const FRAME_AT_CODEC: usize = 2; //        u8, `Codec`
const FRAME_AT_BLOCK_COUNT: usize = 3; //  u8, 1..=BLOCK_COUNT_MAX
const FRAME_AT_INDEX: usize = 4; //        u32
const FRAME_AT_SEALED_BYTES: usize = 8; // u32, header, ciphertext and tag
const FRAME_AT_CRC: usize = 12; //         u32, CRC-32C of the segment id, bytes 0..12 and all after 16
const _: () = assert!(FRAME_AT_CRC + 4 == FRAME_HEADER_BYTES);
/// Bytes of the smallest frame, which has one byte of content.
pub const FRAME_BYTES_MIN: u32 = 33;
/// Bytes of the largest frame, which is stored raw.
pub const FRAME_BYTES_MAX: u32 = 65_568;
const _: () = assert!(FRAME_BYTES_MIN == 16 + 16 + 1 && FRAME_BYTES_MAX == 16 + 16 + 16 * 4096);
const _: () = assert!(TAG_BYTES == 16 && BLOCK_BYTES == 4096);

/// Bytes of a directory entry, before the directory is compressed and sealed.
pub const ENTRY_BYTES: usize = 32;
const ENTRY_AT_LAYER: usize = 0; //         u64
const ENTRY_AT_FIRST_BLOCK: usize = 8; //   u64
const ENTRY_AT_OFFSET: usize = 16; //       u32
const ENTRY_AT_SEALED_BYTES: usize = 20; // u32
const ENTRY_AT_CRC: usize = 24; //          u32, the frame's
const ENTRY_AT_BLOCK_COUNT: usize = 28; //  u8, then 3 zero bytes
const ENTRY_AT_ZERO: usize = 29;
const _: () = assert!(ENTRY_AT_ZERO + 3 == ENTRY_BYTES);

/// Bytes of the footer, at the end of the object.
pub const FOOTER_BYTES: usize = 64;
const FOOTER_MAGIC: [u8; 8] = *b"SPDLSEGF"; // [u8; 8]
const FOOTER_AT_FRAME_COUNT: usize = 8; //      u32, at most FRAME_COUNT_MAX
const FOOTER_AT_DIRECTORY: usize = 12; //       u32, offset of the sealed directory
const FOOTER_AT_DIRECTORY_BYTES: usize = 16; // u32, ciphertext and tag
const FOOTER_AT_OBJECT_BYTES: usize = 20; //    u32, the whole object
const FOOTER_AT_NUMBER: usize = 24; //          u64
const FOOTER_AT_ID: usize = 32; //              [u8; 16]
const FOOTER_AT_DIRECTORY_CRC: usize = 48; //   u32, CRC-32C of the sealed directory
const FOOTER_AT_DIRECTORY_CODEC: usize = 52; // u8, `Codec`, then 7 zero bytes
const FOOTER_AT_ZERO: usize = 53;
const FOOTER_AT_CRC: usize = 60; //             u32, CRC-32C of bytes 0..60
const _: () = assert!(FOOTER_AT_ZERO + 7 == FOOTER_AT_CRC && FOOTER_AT_CRC + 4 == FOOTER_BYTES);

/// Nonce of the directory, above every frame index.
pub const DIRECTORY_NONCE: u64 = 1 << 32;
/// Purpose string for deriving the key of a segment.
pub const KEY_PURPOSE: &str = "segment";

/// Compression of content before it was sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Codec {
    /// Uncompressed.
    Raw = 0,
    /// One zstd frame. Source: RFC 8878.
    Zstd = 1,
}

impl Codec {
    fn from_u8(value: u8) -> Result<Self, SegmentError> {
        match value {
            0 => Ok(Codec::Raw),
            1 => Ok(Codec::Zstd),
            other => Err(SegmentError::Codec(other)),
        }
    }

    fn to_u8(self) -> u8 {
        match self {
            Codec::Raw => 0,
            Codec::Zstd => 1,
        }
    }
}

/// Contents of the first bytes of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The pool it belongs to.
    pub pool: [u8; 16],
    /// Epoch of the segment's writer.
    pub epoch: Epoch,
    /// Number within the pool.
    pub number: SegmentNumber,
    /// Random identity.
    pub id: SegmentId,
    /// Cipher of the rest of the object.
    pub algorithm: Algorithm,
    /// Key of the frames.
    pub key: KeyId,
    /// Erasure code of the fragments; 0 means that the object is whole.
    pub erasure_codec: u8,
    /// Feature bits that may be ignored.
    pub features_compatible: u64,
    /// Feature bits that a reader may ignore, but a rewriter of the segment may not.
    pub features_read_only: u64,
}

impl SegmentHeader {
    /// Encodes the header.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        put(&mut bytes, 0, &MAGIC);
        put(&mut bytes, AT_VERSION, &VERSION.to_le_bytes());
        put(&mut bytes, AT_ALGORITHM, &[algorithm_to_u8(self.algorithm)]);
        put(&mut bytes, AT_ERASURE, &[self.erasure_codec]);
        put(&mut bytes, AT_COMPATIBLE, &self.features_compatible.to_le_bytes());
        put(&mut bytes, AT_READ_ONLY, &self.features_read_only.to_le_bytes());
        put(&mut bytes, AT_POOL, &self.pool);
        put(&mut bytes, AT_EPOCH, &self.epoch.0.to_le_bytes());
        put(&mut bytes, AT_NUMBER, &self.number.0.to_le_bytes());
        put(&mut bytes, AT_ID, &self.id);
        put(&mut bytes, AT_KEY, &self.key.0.to_le_bytes());
        if !self.key.is_pool() {
            put(&mut bytes, AT_INCOMPATIBLE, &FEATURE_VOLUME_KEY.to_le_bytes());
        }
        let crc = crc_of(&bytes, AT_CRC);
        put(&mut bytes, AT_CRC, &crc.to_le_bytes());
        bytes
    }

    /// Decodes the header from the first bytes of an object. Checks, in this order, the magic
    /// bytes, the version, the checksum, the features, and the values of fields.
    ///
    /// # Errors
    /// Any [`SegmentError`] except those of the cipher.
    pub fn decode(bytes: &[u8]) -> Result<Self, SegmentError> {
        let bytes = bytes.get(..HEADER_BYTES).ok_or(SegmentError::Short)?;
        if !bytes.starts_with(&MAGIC) {
            return Err(SegmentError::Magic);
        }
        let version = u16_at(bytes, AT_VERSION).ok_or(SegmentError::Short)?;
        if version != VERSION {
            return Err(SegmentError::Version(version));
        }
        if u32_at(bytes, AT_CRC) != Some(crc_of(bytes, AT_CRC)) {
            return Err(SegmentError::Checksum);
        }
        let incompatible = read_u64(bytes, AT_INCOMPATIBLE)?;
        if incompatible & !FEATURES_KNOWN != 0 {
            return Err(SegmentError::Features(incompatible & !FEATURES_KNOWN));
        }
        let erasure = read_u8(bytes, AT_ERASURE)?;
        if erasure != ERASURE_NONE {
            return Err(SegmentError::Erasure(erasure));
        }
        let algorithm = read_u8(bytes, AT_ALGORITHM)?;
        let header = SegmentHeader {
            pool: read_array(bytes, AT_POOL)?,
            epoch: Epoch(read_u64(bytes, AT_EPOCH)?),
            number: SegmentNumber(read_u64(bytes, AT_NUMBER)?),
            id: read_array(bytes, AT_ID)?,
            algorithm: Algorithm::from_u8(algorithm).ok_or(SegmentError::Field("algorithm"))?,
            key: KeyId(read_u32(bytes, AT_KEY)?),
            erasure_codec: erasure,
            features_compatible: read_u64(bytes, AT_COMPATIBLE)?,
            features_read_only: read_u64(bytes, AT_READ_ONLY)?,
        };
        if header.epoch.0 == 0 || header.number.0 == 0 {
            return Err(SegmentError::Field("epoch or number"));
        }
        if read_u32(bytes, AT_ZERO)? != 0 {
            return Err(SegmentError::Field("a reserved field"));
        }
        if header.key.is_pool() != (incompatible & FEATURE_VOLUME_KEY == 0) {
            return Err(SegmentError::Field("key"));
        }
        Ok(header)
    }
}

/// Header that precedes each frame's ciphertext.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Compression of its blocks. It is a byte because code without a key need not know the codec.
    pub codec: u8,
    /// Number of blocks in the frame.
    pub block_count: u8,
    /// Number within the segment.
    pub frame_index: u32,
    /// Bytes of header, ciphertext and tag.
    pub sealed_bytes: u32,
    /// CRC-32C over the segment's id and the frame without this field.
    pub crc: u32,
}

impl FrameHeader {
    /// Encodes the header, including `crc` as it is.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_HEADER_BYTES] {
        let mut bytes = [0; FRAME_HEADER_BYTES];
        put(&mut bytes, 0, &FRAME_MAGIC);
        put(&mut bytes, FRAME_AT_CODEC, &[self.codec]);
        put(&mut bytes, FRAME_AT_BLOCK_COUNT, &[self.block_count]);
        put(&mut bytes, FRAME_AT_INDEX, &self.frame_index.to_le_bytes());
        put(&mut bytes, FRAME_AT_SEALED_BYTES, &self.sealed_bytes.to_le_bytes());
        put(&mut bytes, FRAME_AT_CRC, &self.crc.to_le_bytes());
        bytes
    }

    /// Decodes the header from the first bytes of a frame. Only the structure is checked;
    /// [`frame_crc`] covers the rest.
    ///
    /// # Errors
    /// `Short`, `Magic`, or `Field` for sizes that no frame has.
    pub fn decode(bytes: &[u8]) -> Result<Self, SegmentError> {
        let bytes = bytes.get(..FRAME_HEADER_BYTES).ok_or(SegmentError::Short)?;
        if !bytes.starts_with(&FRAME_MAGIC) {
            return Err(SegmentError::Magic);
        }
        let header = FrameHeader {
            codec: read_u8(bytes, FRAME_AT_CODEC)?,
            block_count: read_u8(bytes, FRAME_AT_BLOCK_COUNT)?,
            frame_index: read_u32(bytes, FRAME_AT_INDEX)?,
            sealed_bytes: read_u32(bytes, FRAME_AT_SEALED_BYTES)?,
            crc: read_u32(bytes, FRAME_AT_CRC)?,
        };
        if !(1..=BLOCK_COUNT_MAX).contains(&header.block_count) {
            return Err(SegmentError::Field("block count"));
        }
        if !(FRAME_BYTES_MIN..=FRAME_BYTES_MAX).contains(&header.sealed_bytes) {
            return Err(SegmentError::Field("sealed bytes"));
        }
        Ok(header)
    }

    /// Returns the size of the plaintext, in bytes.
    #[must_use]
    pub fn plain_bytes(&self) -> usize {
        usize::from(self.block_count).saturating_mul(4096)
    }

    /// Returns the codec, if this version knows it.
    ///
    /// # Errors
    /// `Codec` if it does not.
    pub fn known_codec(&self) -> Result<Codec, SegmentError> {
        Codec::from_u8(self.codec)
    }
}

/// Bytes of a frame's associated data.
pub const FRAME_AAD_BYTES: usize = 28;

/// Returns the associated data to which the cipher binds a frame: the segment's id and the frame's
/// header without its checksum.
#[must_use]
pub fn frame_aad(id: &SegmentId, header: &[u8]) -> [u8; FRAME_AAD_BYTES] {
    let mut aad = [0; FRAME_AAD_BYTES];
    put(&mut aad, 0, id);
    put(&mut aad, 16, header.get(..FRAME_AT_CRC).unwrap_or_default());
    aad
}

/// Returns the checksum of a whole frame, over the segment's id, the header without the checksum,
/// and the ciphertext with its tag. It detects a frame that was changed or moved, without a key.
#[must_use]
pub fn frame_crc(id: &SegmentId, frame: &[u8]) -> u32 {
    let header = frame.get(..FRAME_AT_CRC).unwrap_or_default();
    let sealed = frame.get(FRAME_HEADER_BYTES..).unwrap_or_default();
    crc32c_parts(&[id, header, sealed])
}

/// Directory entry of one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryEntry {
    /// Map layer for which the frame was written.
    pub layer: u64,
    /// First block of the frame in that layer's address range, in blocks of 4 KiB.
    pub first_block: u64,
    /// Number of blocks in the frame.
    pub block_count: u8,
    /// Place of the frame.
    pub at: FrameAt,
    /// Checksum of the frame.
    pub crc: u32,
}

impl DirectoryEntry {
    /// Encodes the entry. The frame's index is the entry's position.
    #[must_use]
    pub fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        put(&mut bytes, ENTRY_AT_LAYER, &self.layer.to_le_bytes());
        put(&mut bytes, ENTRY_AT_FIRST_BLOCK, &self.first_block.to_le_bytes());
        put(&mut bytes, ENTRY_AT_OFFSET, &self.at.offset.to_le_bytes());
        put(&mut bytes, ENTRY_AT_SEALED_BYTES, &self.at.sealed_bytes.to_le_bytes());
        put(&mut bytes, ENTRY_AT_CRC, &self.crc.to_le_bytes());
        put(&mut bytes, ENTRY_AT_BLOCK_COUNT, &[self.block_count]);
        bytes
    }

    /// Decodes the entry `frame_index`.
    ///
    /// # Errors
    /// `Short`, or `Field` for values that no entry has.
    pub fn decode(frame_index: u32, bytes: &[u8]) -> Result<Self, SegmentError> {
        let at = FrameAt {
            frame_index,
            offset: read_u32(bytes, ENTRY_AT_OFFSET)?,
            sealed_bytes: read_u32(bytes, ENTRY_AT_SEALED_BYTES)?,
        };
        let entry = DirectoryEntry {
            layer: read_u64(bytes, ENTRY_AT_LAYER)?,
            first_block: read_u64(bytes, ENTRY_AT_FIRST_BLOCK)?,
            block_count: read_u8(bytes, ENTRY_AT_BLOCK_COUNT)?,
            at,
            crc: read_u32(bytes, ENTRY_AT_CRC)?,
        };
        let is_zero = read_array::<3>(bytes, ENTRY_AT_ZERO)? == [0; 3];
        let is_frame = (1..=BLOCK_COUNT_MAX).contains(&entry.block_count)
            && (FRAME_BYTES_MIN..=FRAME_BYTES_MAX).contains(&at.sealed_bytes);
        if !is_zero || !is_frame {
            return Err(SegmentError::Field("a directory entry"));
        }
        Ok(entry)
    }
}

/// Contents of the last bytes of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footer {
    /// Number of frames, and of entries in the directory.
    pub frame_count: u32,
    /// First byte of the sealed directory.
    pub directory_offset: u32,
    /// Bytes of the sealed directory, with its tag.
    pub directory_bytes: u32,
    /// Bytes of the whole object.
    pub object_bytes: u32,
    /// Number within the pool.
    pub number: SegmentNumber,
    /// Random identity.
    pub id: SegmentId,
    /// CRC-32C of the sealed directory.
    pub directory_crc: u32,
    /// Compression of the directory.
    pub directory_codec: Codec,
}

impl Footer {
    /// Encodes the footer.
    #[must_use]
    pub fn encode(&self) -> [u8; FOOTER_BYTES] {
        let mut bytes = [0; FOOTER_BYTES];
        put(&mut bytes, 0, &FOOTER_MAGIC);
        put(&mut bytes, FOOTER_AT_FRAME_COUNT, &self.frame_count.to_le_bytes());
        put(&mut bytes, FOOTER_AT_DIRECTORY, &self.directory_offset.to_le_bytes());
        put(&mut bytes, FOOTER_AT_DIRECTORY_BYTES, &self.directory_bytes.to_le_bytes());
        put(&mut bytes, FOOTER_AT_OBJECT_BYTES, &self.object_bytes.to_le_bytes());
        put(&mut bytes, FOOTER_AT_NUMBER, &self.number.0.to_le_bytes());
        put(&mut bytes, FOOTER_AT_ID, &self.id);
        put(&mut bytes, FOOTER_AT_DIRECTORY_CRC, &self.directory_crc.to_le_bytes());
        put(&mut bytes, FOOTER_AT_DIRECTORY_CODEC, &[self.directory_codec.to_u8()]);
        let crc = crc_of(&bytes, FOOTER_AT_CRC);
        put(&mut bytes, FOOTER_AT_CRC, &crc.to_le_bytes());
        bytes
    }

    /// Decodes the footer from the last bytes of an object (exactly [`FOOTER_BYTES`]). On success
    /// the sizes are consistent: header, frames, directory and footer fill the object exactly.
    ///
    /// # Errors
    /// `Short`, `Magic`, `Checksum`, `Codec`, or `Field`.
    pub fn decode(bytes: &[u8]) -> Result<Self, SegmentError> {
        let bytes = bytes.get(..FOOTER_BYTES).ok_or(SegmentError::Short)?;
        if !bytes.starts_with(&FOOTER_MAGIC) {
            return Err(SegmentError::Magic);
        }
        if u32_at(bytes, FOOTER_AT_CRC) != Some(crc_of(bytes, FOOTER_AT_CRC)) {
            return Err(SegmentError::Checksum);
        }
        let footer = Footer {
            frame_count: read_u32(bytes, FOOTER_AT_FRAME_COUNT)?,
            directory_offset: read_u32(bytes, FOOTER_AT_DIRECTORY)?,
            directory_bytes: read_u32(bytes, FOOTER_AT_DIRECTORY_BYTES)?,
            object_bytes: read_u32(bytes, FOOTER_AT_OBJECT_BYTES)?,
            number: SegmentNumber(read_u64(bytes, FOOTER_AT_NUMBER)?),
            id: read_array(bytes, FOOTER_AT_ID)?,
            directory_crc: read_u32(bytes, FOOTER_AT_DIRECTORY_CRC)?,
            directory_codec: Codec::from_u8(read_u8(bytes, FOOTER_AT_DIRECTORY_CODEC)?)?,
        };
        if read_array::<7>(bytes, FOOTER_AT_ZERO)? != [0; 7] {
            return Err(SegmentError::Field("a reserved field"));
        }
        footer.check_sizes().ok_or(SegmentError::Field("sizes"))?;
        Ok(footer)
    }

    fn check_sizes(&self) -> Option<()> {
        let directory_end = self.directory_offset.checked_add(self.directory_bytes)?;
        let end = directory_end.checked_add(u32::try_from(FOOTER_BYTES).ok()?)?;
        let frame_bytes = self.directory_offset.checked_sub(u32::try_from(HEADER_BYTES).ok()?)?;
        let frame_bytes_min = self.frame_count.checked_mul(FRAME_BYTES_MIN)?;
        let is_sane = end == self.object_bytes
            && self.frame_count <= FRAME_COUNT_MAX
            && frame_bytes >= frame_bytes_min
            && self.object_bytes <= SEGMENT_BYTES_MAX;
        is_sane.then_some(())
    }
}

/// Copies `value` to `at`. The callers are the encoders above, whose offsets are constants.
fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(place) = bytes.get_mut(at..).and_then(|rest| rest.get_mut(..value.len())) {
        place.copy_from_slice(value);
    } else {
        unreachable!("an encoder writes inside its own array");
    }
}

fn crc_of(bytes: &[u8], end: usize) -> u32 {
    crc32c_parts(&[bytes.get(..end).unwrap_or_default()])
}

fn algorithm_to_u8(algorithm: Algorithm) -> u8 {
    match algorithm {
        Algorithm::ChaCha20Poly1305 => 1,
        Algorithm::Aes256Gcm => 2,
    }
}

fn read_array<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], SegmentError> {
    array_at(bytes, at).ok_or(SegmentError::Short)
}

fn read_u8(bytes: &[u8], at: usize) -> Result<u8, SegmentError> {
    bytes.get(at).copied().ok_or(SegmentError::Short)
}

fn read_u32(bytes: &[u8], at: usize) -> Result<u32, SegmentError> {
    u32_at(bytes, at).ok_or(SegmentError::Short)
}

fn read_u64(bytes: &[u8], at: usize) -> Result<u64, SegmentError> {
    u64_at(bytes, at).ok_or(SegmentError::Short)
}
