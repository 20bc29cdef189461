//! Opening a built segment: one frame, the directory, or a whole object.
//!
//! Invariants:
//! - Bytes are untrusted: nothing here panics, and no allocation is larger than a frame or the
//!   directory size in a verified footer.
//! - A frame is returned only if its checksum, its authentication and its decompressed size are all
//!   right and it is the requested frame.
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::as_conversions,
        clippy::unwrap_used
    )
)]

use super::format::{
    Codec, DIRECTORY_NONCE, DirectoryEntry, ENTRY_BYTES, FOOTER_BYTES, FRAME_HEADER_BYTES, Footer,
    FrameHeader, HEADER_BYTES, KEY_PURPOSE, SegmentHeader, frame_aad, frame_crc,
};
use super::{FrameAt, SegmentError, SegmentId, SegmentInfo};
use crate::keys::VolumeKeys;
use block::Result;
use block::seal::{PoolKey, SealKey};
use block::units::crc32c;
use bytes::Bytes;
use std::cell::RefCell;
use zstd_safe::DCtx;

thread_local! {
    /// Reused, because creating a context costs more than decompressing a small frame.
    static DECOMPRESSOR: RefCell<DCtx<'static>> = RefCell::new(DCtx::create());
}

/// Derives the key of a segment's directory from the pool's key, or the key of its frames from the
/// key that the segment names.
#[must_use]
pub fn segment_key(root: &PoolKey, info: &SegmentInfo) -> SealKey {
    root.derive(info.algorithm, &info.id, KEY_PURPOSE)
}

/// Verifies without any key that a frame is the one at `at` of segment `id`, and is intact.
///
/// # Errors
/// `Short`, `Magic`, `Checksum`, or `Field` if it is another frame than the requested one.
pub fn verify_frame(
    id: &SegmentId,
    at: FrameAt,
    sealed: &[u8],
) -> Result<FrameHeader, SegmentError> {
    let header = FrameHeader::decode(sealed)?;
    if usize::try_from(header.sealed_bytes) != Ok(sealed.len()) {
        return Err(SegmentError::Field("sealed bytes"));
    }
    if frame_crc(id, sealed) != header.crc {
        return Err(SegmentError::Checksum);
    }
    if header.frame_index != at.frame_index || header.sealed_bytes != at.sealed_bytes {
        return Err(SegmentError::Field("frame index or size"));
    }
    Ok(header)
}

/// Decrypts `sealed`, the whole frame as it is stored, in place, and returns its blocks.
///
/// # Errors
/// Any [`SegmentError`]; the contents of `sealed` are then undefined.
pub fn open_frame(
    key: &SealKey,
    id: &SegmentId,
    at: FrameAt,
    sealed: &mut [u8],
) -> Result<Bytes, SegmentError> {
    let header = verify_frame(id, at, sealed)?;
    let aad = frame_aad(id, sealed);
    let body = sealed.get_mut(FRAME_HEADER_BYTES..).ok_or(SegmentError::Short)?;
    let content = key
        .open(u64::from(header.frame_index), &aad, body)
        .map_err(|_| SegmentError::Authentication)?;
    expand(header.known_codec()?, content, header.plain_bytes())
}

/// Expands `content` to exactly `plain_bytes` bytes.
fn expand(codec: Codec, content: &[u8], plain_bytes: usize) -> Result<Bytes, SegmentError> {
    if codec == Codec::Raw {
        let is_complete = content.len() == plain_bytes;
        return is_complete
            .then(|| Bytes::copy_from_slice(content))
            .ok_or(SegmentError::Decompress);
    }
    let mut plain = Vec::with_capacity(plain_bytes);
    let written = DECOMPRESSOR
        .with_borrow_mut(|context| context.decompress(&mut plain, content))
        .map_err(|_| SegmentError::Decompress)?;
    if written != plain_bytes || plain.len() != plain_bytes {
        return Err(SegmentError::Decompress);
    }
    Ok(Bytes::from(plain))
}

/// An opened directory. Everything in it is authenticated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directory {
    /// Description of the segment.
    pub info: SegmentInfo,
    /// Identity of the pool.
    pub pool: [u8; 16],
    /// One entry per frame, ordered by frame index and by offset.
    pub entries: Vec<DirectoryEntry>,
}

/// Returns the associated data of the directory: the whole header, and the footer without its two
/// checksums.
pub(super) fn directory_aad(header: &[u8; HEADER_BYTES], footer: &Footer) -> Vec<u8> {
    let footer = Footer { directory_crc: 0, ..*footer }.encode();
    let footer = footer.get(..56).unwrap_or_default();
    [&header[..], footer].concat()
}

/// Returns the number of bytes at the end of an object that [`open_directory`] needs, according to
/// the footer at the end of `tail`. If `tail` is shorter, the caller must read that many.
///
/// # Errors
/// Those of [`Footer::decode`].
pub fn directory_tail_bytes(tail: &[u8]) -> Result<usize, SegmentError> {
    let footer = footer_of(tail)?;
    let directory_bytes = usize::try_from(footer.directory_bytes).unwrap_or(usize::MAX);
    Ok(directory_bytes.saturating_add(FOOTER_BYTES))
}

fn footer_of(tail: &[u8]) -> Result<Footer, SegmentError> {
    let start = tail.len().checked_sub(FOOTER_BYTES).ok_or(SegmentError::Short)?;
    Footer::decode(tail.get(start..).unwrap_or_default())
}

/// Opens the directory from the first [`HEADER_BYTES`] of an object and from its end (at least
/// [`directory_tail_bytes`]). It needs only the pool's key, so a segment can be walked even when
/// the map is lost.
///
/// # Errors
/// Any [`SegmentError`].
pub fn open_directory(
    pool_key: &PoolKey,
    head: &[u8],
    tail: &[u8],
) -> Result<Directory, SegmentError> {
    let head: &[u8; HEADER_BYTES] = head.first_chunk().ok_or(SegmentError::Short)?;
    let header = SegmentHeader::decode(head)?;
    let footer = footer_of(tail)?;
    if footer.number != header.number || footer.id != header.id {
        return Err(SegmentError::Field("number or id of the footer"));
    }
    let directory_bytes =
        usize::try_from(footer.directory_bytes).map_err(|_| SegmentError::Short)?;
    let end = tail.len().checked_sub(FOOTER_BYTES).ok_or(SegmentError::Short)?;
    let start = end.checked_sub(directory_bytes).ok_or(SegmentError::Short)?;
    let mut sealed = tail.get(start..end).ok_or(SegmentError::Short)?.to_vec();
    if crc32c(&sealed) != footer.directory_crc {
        return Err(SegmentError::Checksum);
    }
    let info = SegmentInfo {
        number: header.number,
        epoch: header.epoch,
        id: header.id,
        algorithm: header.algorithm,
        key: header.key,
        object_bytes: footer.object_bytes,
        frame_count: footer.frame_count,
    };
    let content = segment_key(pool_key, &info)
        .open(DIRECTORY_NONCE, &directory_aad(head, &footer), &mut sealed)
        .map_err(|_| SegmentError::Authentication)?;
    let frame_count = usize::try_from(footer.frame_count).map_err(|_| SegmentError::Short)?;
    let plain = expand(footer.directory_codec, content, frame_count.saturating_mul(ENTRY_BYTES))?;
    let entries = decode_entries(&plain, &footer)?;
    Ok(Directory { info, pool: header.pool, entries })
}

/// Decodes the entries, and checks that they are in order, do not overlap, and end before the
/// directory.
fn decode_entries(plain: &[u8], footer: &Footer) -> Result<Vec<DirectoryEntry>, SegmentError> {
    let mut entries = Vec::with_capacity(plain.len().checked_div(ENTRY_BYTES).unwrap_or(0));
    let mut end = u32::try_from(HEADER_BYTES).unwrap_or(u32::MAX);
    for (frame_index, bytes) in (0..).zip(plain.chunks_exact(ENTRY_BYTES)) {
        let entry = DirectoryEntry::decode(frame_index, bytes)?;
        let entry_end = entry.at.offset.checked_add(entry.at.sealed_bytes);
        match entry_end {
            Some(next) if entry.at.offset >= end && next <= footer.directory_offset => end = next,
            _ => return Err(SegmentError::Field("a directory entry")),
        }
        entries.push(entry);
    }
    Ok(entries)
}

/// Returns the bytes of frame `at` within a whole object.
///
/// # Errors
/// `Short` if the object ends earlier.
pub fn frame_of(object: &[u8], at: FrameAt) -> Result<&[u8], SegmentError> {
    let start = usize::try_from(at.offset).map_err(|_| SegmentError::Short)?;
    let bytes = usize::try_from(at.sealed_bytes).map_err(|_| SegmentError::Short)?;
    let end = start.checked_add(bytes).ok_or(SegmentError::Short)?;
    object.get(start..end).ok_or(SegmentError::Short)
}

/// Walks the frames of a whole object without any key and without its directory: the header, then
/// frame after frame, each verified by its checksum. Ends at the first bytes that are not a frame
/// of this segment, which is the directory or damage; the caller compares with the footer.
pub fn walk_frames<'a>(
    id: &'a SegmentId,
    object: &'a [u8],
) -> impl Iterator<Item = (FrameAt, &'a [u8])> + 'a {
    let mut offset = u32::try_from(HEADER_BYTES).unwrap_or(u32::MAX);
    let mut frame_index = 0u32;
    std::iter::from_fn(move || {
        let rest = object.get(usize::try_from(offset).ok()?..)?;
        let sealed_bytes = FrameHeader::decode(rest).ok()?.sealed_bytes;
        let at = FrameAt { frame_index, offset, sealed_bytes };
        let frame = frame_of(object, at).ok()?;
        verify_frame(id, at, frame).ok()?;
        offset = offset.checked_add(sealed_bytes)?;
        frame_index = frame_index.checked_add(1)?;
        Some((at, frame))
    })
}

/// Result of [`check_object`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectReport {
    /// The directory, which is intact.
    pub directory: Directory,
    /// Frames that do not open, with the reason.
    pub damaged: Vec<(FrameAt, SegmentError)>,
    /// Bytes of blocks in the frames that open.
    pub plain_bytes: u64,
    /// The key of the frames is gone, so only their checksums were verified.
    pub is_erased: bool,
}

impl ObjectReport {
    /// Describes the damage, if any frame is damaged.
    #[must_use]
    pub fn damage(&self) -> Option<String> {
        self.damaged.first().map(|(at, why)| {
            format!("{} frames, the first at {}: {why}", self.damaged.len(), at.offset)
        })
    }
}

/// Opens everything in a whole object. If the key of its frames is gone, their checksums still show
/// whether they are unchanged.
///
/// # Errors
/// Any [`SegmentError`] of the directory; damaged frames are part of the report.
pub fn check_object(
    pool_key: &PoolKey,
    volume_keys: &VolumeKeys,
    object: &[u8],
) -> Result<ObjectReport, SegmentError> {
    let directory = open_directory(pool_key, object, object)?;
    if usize::try_from(directory.info.object_bytes) != Ok(object.len()) {
        return Err(SegmentError::Field("object bytes"));
    }
    let root = volume_keys.root(directory.info.key, pool_key);
    let key = root.map(|root| segment_key(&root, &directory.info));
    let is_erased = key.is_none();
    let mut report = ObjectReport { damaged: Vec::new(), plain_bytes: 0, is_erased, directory };
    let mut buffer = Vec::new();
    for entry in &report.directory.entries {
        let opened = frame_of(object, entry.at).and_then(|sealed| {
            buffer.clear();
            buffer.extend_from_slice(sealed);
            let header = verify_frame(&report.directory.info.id, entry.at, sealed)?;
            if header.crc != entry.crc || header.block_count != entry.block_count {
                return Err(SegmentError::Field("the frame beside its directory entry"));
            }
            let Some(key) = &key else { return Ok(header.plain_bytes()) };
            open_frame(key, &report.directory.info.id, entry.at, &mut buffer)
                .map(|plain| plain.len())
        });
        match opened {
            Ok(plain_bytes) => {
                let bytes = u64::try_from(plain_bytes).unwrap_or(u64::MAX);
                report.plain_bytes = report.plain_bytes.saturating_add(bytes);
            }
            Err(error) => report.damaged.push((entry.at, error)),
        }
    }
    Ok(report)
}
