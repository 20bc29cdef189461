//! Building a segment: turns blocks into one immutable object.
//!
//! Invariants:
//! - Frames are stored in the order of [`SegmentBuilder::push`], without gaps.
//! - A frame is stored raw unless compression saves at least an eighth of it.
//! - The object can be opened only with its keys, and only if every byte is unchanged.
//!
//! It computes and allocates, nothing else. Compressing a full frame takes some hundred
//! microseconds, so an async caller must push from a blocking thread.

use super::format::{
    BLOCK_COUNT_MAX, Codec, DIRECTORY_NONCE, DirectoryEntry, ENTRY_BYTES, ERASURE_NONE,
    FOOTER_BYTES, FRAME_BYTES_MAX, FRAME_COUNT_MAX, FRAME_HEADER_BYTES, Footer, FrameHeader,
    KEY_PURPOSE, SEGMENT_BYTES_MAX, SegmentHeader, frame_aad, frame_crc,
};
use super::read::directory_aad;
use super::{FrameAt, SegmentId, SegmentInfo, SegmentName, SegmentNumber};
use crate::keys::KeyId;
use block::Epoch;
use block::env::Random;
use block::seal::{Algorithm, PoolKey, SealKey, TAG_BYTES};
use block::units::{BLOCK_BYTES, crc32c};
use bytes::Bytes;
use std::fmt;
use zstd_safe::{CCtx, CParameter, CompressionLevel};

const BLOCK: usize = BLOCK_BYTES as usize;
const FRAME_PLAIN_BYTES_MAX: usize = BLOCK_COUNT_MAX as usize * BLOCK;
/// A compressed frame that saves less than one part in this many is stored raw, because reading it
/// would cost a decompression for little gain. Chosen by hand.
const SAVING_MIN: usize = 8;
/// Frames of fewer blocks are compressed without testing a sample first. Chosen by hand: a sample
/// is one block.
const SAMPLE_MIN_BLOCKS: usize = 4;
/// Compression level of the directory, which is small and read only by background jobs. Chosen by
/// hand.
const DIRECTORY_LEVEL: CompressionLevel = 1;

/// Overhead of a frame in the object, in bytes.
pub(crate) const FRAME_OVERHEAD_BYTES: usize = FRAME_HEADER_BYTES + TAG_BYTES + ENTRY_BYTES;

/// Identity of a segment to be built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentSeed {
    /// Identity of the pool.
    pub pool: [u8; 16],
    /// Epoch of the owner that writes the segment, not 0.
    pub epoch: Epoch,
    /// Number within the pool, not 0.
    pub number: SegmentNumber,
    /// Fresh random identity: see [`SegmentSeed::new`].
    pub id: SegmentId,
    /// Cipher of the segment.
    pub algorithm: Algorithm,
    /// Key of the frames.
    pub key: KeyId,
}

impl SegmentSeed {
    /// Creates a seed with a fresh id from `random`, for a segment under the pool's key.
    #[must_use]
    pub fn new(
        pool: [u8; 16],
        epoch: Epoch,
        number: SegmentNumber,
        algorithm: Algorithm,
        random: &dyn Random,
    ) -> Self {
        let mut id = [0; 16];
        random.fill(&mut id);
        SegmentSeed { pool, epoch, number, id, algorithm, key: KeyId::POOL }
    }

    /// Returns the name that the segment will have.
    #[must_use]
    pub fn name(&self) -> SegmentName {
        SegmentName { epoch: self.epoch, number: self.number, id: self.id }
    }

    /// Returns the same seed with another key for the frames.
    #[must_use]
    pub fn with_key(self, key: KeyId) -> Self {
        SegmentSeed { key, ..self }
    }
}

/// A segment under construction. It is `Send`, so it can be filled from a blocking thread.
pub struct SegmentBuilder {
    seed: SegmentSeed,
    /// Key of the frames.
    key: SealKey,
    directory_key: SealKey,
    compressor: CCtx<'static>,
    /// Output buffer of the compressor; as large as a compressed frame may be to be worth storing.
    scratch: Vec<u8>,
    bytes: Vec<u8>,
    entries: Vec<DirectoryEntry>,
    /// Whether the latest frame was incompressible.
    was_raw: bool,
}

impl fmt::Debug for SegmentBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, frames) = (self.seed.number, self.entries.len());
        write!(f, "SegmentBuilder({number}, {frames} frames, {} bytes)", self.bytes.len())
    }
}

/// A finished segment, to be stored.
#[derive(Clone, Debug)]
pub struct SealedSegment {
    /// The description that the map keeps.
    pub info: SegmentInfo,
    /// The object.
    pub bytes: Bytes,
}

impl SegmentBuilder {
    /// Creates an empty segment under the pool's key. `zstd_level` is clamped to the range of zstd
    /// (negative levels are faster); `target_bytes` is a hint of the final size, for the
    /// allocation.
    ///
    /// Panics if the seed's epoch or number is 0, or its key is another one.
    #[must_use]
    pub fn new(
        seed: SegmentSeed,
        pool_key: &PoolKey,
        zstd_level: i32,
        target_bytes: usize,
    ) -> Self {
        let bytes = Vec::with_capacity(target_bytes.min(SEGMENT_BYTES_MAX as usize));
        assert!(seed.key.is_pool(), "the key of a volume is given to new_in");
        Self::new_in(seed, pool_key, pool_key, zstd_level, bytes)
    }

    /// Like [`SegmentBuilder::new`], but with the key that the seed names, and in a buffer of the
    /// caller. Panics if the buffer is not empty.
    #[must_use]
    pub fn new_in(
        seed: SegmentSeed,
        pool_key: &PoolKey,
        frame_root: &PoolKey,
        zstd_level: i32,
        mut bytes: Vec<u8>,
    ) -> Self {
        assert!(seed.epoch.0 != 0 && seed.number.0 != 0, "epochs and segment numbers start at 1");
        assert!(bytes.is_empty(), "a segment starts at the start");
        bytes.extend_from_slice(&header_of(&seed).encode());
        SegmentBuilder {
            key: frame_root.derive(seed.algorithm, &seed.id, KEY_PURPOSE),
            directory_key: pool_key.derive(seed.algorithm, &seed.id, KEY_PURPOSE),
            compressor: compressor(zstd_level),
            scratch: vec![0; FRAME_PLAIN_BYTES_MAX - FRAME_PLAIN_BYTES_MAX / SAVING_MIN],
            bytes,
            entries: Vec::new(),
            was_raw: false,
            seed,
        }
    }

    /// Appends one frame of 1 to [`BLOCK_COUNT_MAX`] whole blocks and returns its place. `layer`
    /// and `first_block` go to the directory.
    ///
    /// Panics if `plaintext` has another size, or if the segment [is full](Self::is_full).
    pub fn push(&mut self, layer: u64, first_block: u64, plaintext: &[u8]) -> FrameAt {
        let is_complete = plaintext.len().is_multiple_of(BLOCK) && !plaintext.is_empty();
        assert!(is_complete && plaintext.len() <= FRAME_PLAIN_BYTES_MAX, "1 to 16 whole blocks");
        assert!(!self.is_full(), "the caller finishes a full segment");
        let block_count = u8::try_from(plaintext.len() / BLOCK).expect("at most 16");
        let frame_index = u32::try_from(self.entries.len()).expect("at most FRAME_COUNT_MAX");
        let compressed = match self.is_worth_a_try(plaintext) {
            true => compress(&mut self.compressor, &mut self.scratch, plaintext),
            false => None,
        };
        self.was_raw = compressed.is_none();
        let (codec, content) = match compressed {
            Some(bytes) => (Codec::Zstd, &self.scratch[..bytes]),
            None => (Codec::Raw, plaintext),
        };
        let sealed_bytes = FRAME_HEADER_BYTES + content.len() + TAG_BYTES;
        let sealed_bytes = u32::try_from(sealed_bytes).expect("at most FRAME_BYTES_MAX");
        let header =
            FrameHeader { codec: codec as u8, block_count, frame_index, sealed_bytes, crc: 0 };
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&header.encode());
        self.bytes.extend_from_slice(content);
        let aad = frame_aad(&self.seed.id, &self.bytes[start..]);
        let body = &mut self.bytes[start + FRAME_HEADER_BYTES..];
        let tag = self.key.seal(u64::from(frame_index), &aad, body);
        self.bytes.extend_from_slice(&tag);
        let crc = frame_crc(&self.seed.id, &self.bytes[start..]);
        let header = FrameHeader { crc, ..header };
        self.bytes[start..start + FRAME_HEADER_BYTES].copy_from_slice(&header.encode());
        let offset = u32::try_from(start).expect("at most SEGMENT_BYTES_MAX");
        let at = FrameAt { frame_index, offset, sealed_bytes };
        self.entries.push(DirectoryEntry { layer, first_block, block_count, at, crc });
        at
    }

    /// Returns whether compressing the frame is worth a try. After an incompressible frame, a
    /// sample of one block decides: incompressible data mostly comes in long runs (compressed,
    /// encrypted, media), and trying to compress it costs more than sealing it.
    fn is_worth_a_try(&mut self, plaintext: &[u8]) -> bool {
        let block_count = plaintext.len() / BLOCK;
        if !self.was_raw || block_count < SAMPLE_MIN_BLOCKS {
            return true;
        }
        // Sample a different block in each frame, so that a pattern in the data does not hide
        // compressible blocks.
        let at = self.entries.len() % block_count * BLOCK;
        compress(&mut self.compressor, &mut self.scratch, &plaintext[at..at + BLOCK]).is_some()
    }

    /// Returns the bytes of header and frames so far; the finished object is a little larger.
    #[must_use]
    pub fn bytes_so_far(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Returns the number of frames pushed so far.
    #[must_use]
    pub fn frame_count(&self) -> u32 {
        u32::try_from(self.entries.len()).expect("at most FRAME_COUNT_MAX")
    }

    /// Returns whether the segment can take no further frame. The limit is far above any sensible
    /// target size.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let tail_bytes = (self.entries.len() + 1) * ENTRY_BYTES + TAG_BYTES + FOOTER_BYTES + 1024;
        let after_one_more = self.bytes.len() + FRAME_BYTES_MAX as usize + tail_bytes;
        self.entries.len() >= FRAME_COUNT_MAX as usize
            || after_one_more > SEGMENT_BYTES_MAX as usize
    }

    /// Returns the identity of the segment.
    #[must_use]
    pub fn seed(&self) -> &SegmentSeed {
        &self.seed
    }

    /// Appends directory and footer. An empty segment is legal, though useless.
    #[must_use]
    pub fn finish(self) -> SealedSegment {
        let (info, bytes) = self.finish_in();
        SealedSegment { info, bytes: Bytes::from(bytes) }
    }

    /// Like [`SegmentBuilder::finish`], but returns the buffer to the caller.
    #[must_use]
    pub fn finish_in(mut self) -> (SegmentInfo, Vec<u8>) {
        let plain: Vec<u8> = self.entries.iter().flat_map(DirectoryEntry::encode).collect();
        let (codec, mut directory) = compress_directory(plain);
        let directory_offset = self.bytes.len();
        let directory_bytes = directory.len() + TAG_BYTES;
        let object_bytes = directory_offset + directory_bytes + FOOTER_BYTES;
        let object_bytes = u32::try_from(object_bytes).expect("is_full keeps room for the tail");
        let mut footer = Footer {
            frame_count: self.frame_count(),
            directory_offset: u32::try_from(directory_offset).expect("below object_bytes"),
            directory_bytes: u32::try_from(directory_bytes).expect("below object_bytes"),
            object_bytes,
            number: self.seed.number,
            id: self.seed.id,
            directory_crc: 0,
            directory_codec: codec,
        };
        let aad = directory_aad(&header_of(&self.seed).encode(), &footer);
        let tag = self.directory_key.seal(DIRECTORY_NONCE, &aad, &mut directory);
        directory.extend_from_slice(&tag);
        footer.directory_crc = crc32c(&directory);
        self.bytes.extend_from_slice(&directory);
        self.bytes.extend_from_slice(&footer.encode());
        let info = SegmentInfo {
            number: self.seed.number,
            epoch: self.seed.epoch,
            id: self.seed.id,
            algorithm: self.seed.algorithm,
            key: self.seed.key,
            object_bytes,
            frame_count: footer.frame_count,
        };
        (info, self.bytes)
    }
}

fn header_of(seed: &SegmentSeed) -> SegmentHeader {
    SegmentHeader {
        pool: seed.pool,
        epoch: seed.epoch,
        number: seed.number,
        id: seed.id,
        algorithm: seed.algorithm,
        key: seed.key,
        erasure_codec: ERASURE_NONE,
        features_compatible: 0,
        features_read_only: 0,
    }
}

/// Compresses into `scratch`. Returns the length, or `None` if compression saves too little.
fn compress(compressor: &mut CCtx<'_>, scratch: &mut [u8], plain: &[u8]) -> Option<usize> {
    let limit = plain.len() - plain.len() / SAVING_MIN;
    // Any failure means that the result did not fit, and storing raw is always correct.
    compressor.compress2(&mut scratch[..limit], plain).ok()
}

fn compressor(level: i32) -> CCtx<'static> {
    let level = level.clamp(zstd_safe::min_c_level(), zstd_safe::max_c_level());
    let mut context = CCtx::create();
    context
        .set_parameter(CParameter::CompressionLevel(level))
        .expect("a clamped level is always accepted");
    context
}

fn compress_directory(plain: Vec<u8>) -> (Codec, Vec<u8>) {
    let mut compressed = Vec::with_capacity(zstd_safe::compress_bound(plain.len()));
    match compressor(DIRECTORY_LEVEL).compress2(&mut compressed, &plain) {
        Ok(bytes) if bytes < plain.len() => (Codec::Zstd, compressed),
        _ => (Codec::Raw, plain),
    }
}
