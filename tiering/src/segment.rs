//! Segments: immutable objects that hold destaged blocks as compressed, sealed frames.
//!
//! Owns the identities ([`SegmentNumber`], [`SegmentInfo`], [`FrameAt`]) that the map, the cache
//! and the store use for segments and frames.
//!
//! Invariants:
//! - A finished segment never changes. Rewriting its blocks makes another segment with another
//!   random id, hence another key, so no nonce is ever used twice.
//! - A frame is one contiguous range of the object: reading it takes one ranged read of exactly
//!   [`FrameAt::offset`], [`FrameAt::sealed_bytes`].
//! - Decoding a frame returns either exactly the data that was pushed, or an error.
//!
//! This module does no I/O; `fetch` does. The byte tables are in docs/format-segment.md.

pub mod build;
pub mod format;
pub mod read;

#[cfg(test)]
mod tests;

pub use build::{SealedSegment, SegmentBuilder, SegmentSeed};
pub use format::{BLOCK_COUNT_MAX, DirectoryEntry, FRAME_COUNT_MAX, SEGMENT_BYTES_MAX};
pub use read::{Directory, open_directory, open_frame, verify_frame};

use crate::keys::KeyId;
use block::seal::Algorithm;
use block::{Epoch, Error, ErrorKind};
use object_store::path::Path;
use std::fmt;
use std::sync::Arc;

/// Folder of all segment objects within the pool's prefix.
pub const FOLDER: &str = "segments";

/// Number of a segment within its pool, as the map stores it: dense, never 0. An upload that was
/// never committed may have used the same number; the id tells the two apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentNumber(pub u64);

impl fmt::Display for SegmentNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Random 128-bit identity of a segment: the salt of its key and the first half of a cache key.
pub type SegmentId = [u8; 16];

/// Identity of a segment, as the names of its objects show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentName {
    /// Epoch of the owner that wrote it.
    pub epoch: Epoch,
    /// Number within the pool.
    pub number: SegmentNumber,
    /// Random identity.
    pub id: SegmentId,
}

impl SegmentName {
    /// Returns the path of the object within the pool's prefix:
    /// `segments/<epoch:016x>/<number:016x>-<id as 32 hexadecimal digits>`.
    #[must_use]
    pub fn object_path(&self) -> Path {
        Path::from(format!(
            "{FOLDER}/{:016x}/{:016x}-{:032x}",
            self.epoch.0,
            self.number.0,
            u128::from_be_bytes(self.id)
        ))
    }

    /// Parses a path made by [`SegmentName::object_path`], for listings. Returns `None` for a path
    /// that is not exactly of that form.
    #[must_use]
    pub fn parse(path: &Path) -> Option<SegmentName> {
        let mut parts = path.as_ref().split('/');
        if parts.next()? != FOLDER {
            return None;
        }
        let epoch = parse_hex(parts.next()?, 16)?;
        let (number, id) = parts.next()?.split_once('-')?;
        if parts.next().is_some() {
            return None;
        }
        let epoch = Epoch(u64::try_from(epoch).ok()?);
        let number = SegmentNumber(u64::try_from(parse_hex(number, 16)?).ok()?);
        Some(SegmentName { epoch, number, id: parse_hex(id, 32)?.to_be_bytes() })
    }
}

/// Formats for messages: the path of the object.
impl fmt::Display for SegmentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.object_path().fmt(f)
    }
}

/// Where the bytes of a segment are. Unlike [`SegmentInfo`] it may change while the segment exists,
/// so it is not a part of a segment's identity, and is compared only where it is changed.
#[derive(Clone, Debug)]
pub enum Placement {
    /// One object, [`SegmentName::object_path`], in the object store of the pool. Records on disk
    /// store nothing for it.
    Object,
    /// Fragments on several stores, and perhaps an object beside them.
    Fragments(Arc<Fragments>),
}

impl Placement {
    /// Whether there are fragments, and an object beside them.
    #[must_use]
    pub fn is_copied(&self) -> bool {
        matches!(self, Placement::Fragments(fragments) if fragments.is_copied)
    }

    /// Whether this is the same place, with the same fragments.
    #[must_use]
    pub fn is(&self, other: &Placement) -> bool {
        match (self, other) {
            (Placement::Object, Placement::Object) => true,
            (Placement::Fragments(these), Placement::Fragments(those)) => these == those,
            _ => false,
        }
    }
}

/// The fragments of a segment. The data tier keeps these numbers; the store that made them reads them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fragments {
    /// Number of data fragments, at least 1.
    pub data: u8,
    /// Number of parity fragments, at least 1.
    pub parity: u8,
    /// How they are made: see docs/format-fragment.md.
    pub codec: u8,
    /// The end of the piece of each data fragment, in order; the last one is the object's length.
    pub ends: Vec<u32>,
    /// The place of each fragment, by index.
    pub places: Vec<FragmentPlace>,
    /// The object store of the pool has the whole segment, too: [`SegmentName::object_path`].
    pub is_copied: bool,
}

/// Where a fragment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FragmentPlace {
    /// The number of its store; [`Fragments::NOWHERE`] if it is not stored.
    pub store: u32,
    /// Counts the places where the fragments of the segment have been, from 1. It is part of the fragment's
    /// name, so a late deletion of an earlier place does not find a fragment that has come back.
    pub generation: u64,
}

impl Fragments {
    /// In place of the number of a store: the fragment is not stored, and has to be made.
    pub const NOWHERE: u32 = 0;

    /// The numbers of the stores, by the index of the fragment.
    pub fn stores(&self) -> impl Iterator<Item = u32> + '_ {
        self.places.iter().map(|place| place.store)
    }
}

/// A segment, and where its bytes are: all that is needed to read it.
#[derive(Clone, Debug)]
pub struct StoredSegment {
    /// The segment.
    pub info: SegmentInfo,
    /// Its placement, as far as the caller knows.
    pub placement: Placement,
}

impl From<SegmentInfo> for StoredSegment {
    /// A segment in an object store.
    fn from(info: SegmentInfo) -> StoredSegment {
        StoredSegment { info, placement: Placement::Object }
    }
}

/// All that a reader needs to open the frames of a segment, as stored in the map's record of the
/// segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    /// Number within the pool.
    pub number: SegmentNumber,
    /// Epoch of the owner that wrote it.
    pub epoch: Epoch,
    /// Random identity.
    pub id: SegmentId,
    /// Cipher of its frames and its directory.
    pub algorithm: Algorithm,
    /// Key of its frames.
    pub key: KeyId,
    /// Size of the whole object, in bytes: at most [`SEGMENT_BYTES_MAX`].
    pub object_bytes: u32,
    /// Number of frames: at most [`FRAME_COUNT_MAX`].
    pub frame_count: u32,
}

impl SegmentInfo {
    /// Returns the name of the segment.
    #[must_use]
    pub fn name(&self) -> SegmentName {
        SegmentName { epoch: self.epoch, number: self.number, id: self.id }
    }

    /// Returns [`SegmentName::object_path`] of the segment.
    #[must_use]
    pub fn object_path(&self) -> Path {
        self.name().object_path()
    }
}

/// Formats for messages: "segment 17 (segments/…)".
impl fmt::Display for SegmentInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "segment {} ({})", self.number, self.object_path())
    }
}

/// Parses exactly `digit_count` lower-case hexadecimal digits.
fn parse_hex(text: &str, digit_count: usize) -> Option<u128> {
    let is_plain = text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    if text.len() != digit_count || !is_plain {
        return None;
    }
    u128::from_str_radix(text, 16).ok()
}

/// Place of a frame in its segment, as the map stores it for the frame's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrameAt {
    /// Number of the frame within its segment, from 0.
    pub frame_index: u32,
    /// First byte of its header in the object.
    pub offset: u32,
    /// Bytes of header, ciphertext and tag together.
    pub sealed_bytes: u32,
}

/// A frame together with its segment: the unit of a read.
#[derive(Clone, Debug)]
pub struct FrameRef {
    /// The segment.
    pub info: SegmentInfo,
    /// The placement of the segment, as far as the caller knows.
    pub placement: Placement,
    /// The frame.
    pub at: FrameAt,
}

/// Two references are equal if they name the same frame, wherever the segment is stored.
impl PartialEq for FrameRef {
    fn eq(&self, other: &FrameRef) -> bool {
        (self.info.number, self.info.id, self.at) == (other.info.number, other.info.id, other.at)
    }
}

impl Eq for FrameRef {}

impl FrameRef {
    /// Returns the segment.
    #[must_use]
    pub fn segment(&self) -> StoredSegment {
        StoredSegment { info: self.info, placement: self.placement.clone() }
    }

    /// Returns whether such a frame can exist: its size is that of a frame, and it lies within the
    /// segment's object.
    #[must_use]
    pub fn is_possible(&self) -> bool {
        let end = u64::from(self.at.offset) + u64::from(self.at.sealed_bytes);
        (format::FRAME_BYTES_MIN..=format::FRAME_BYTES_MAX).contains(&self.at.sealed_bytes)
            && end <= u64::from(self.info.object_bytes)
    }
}

/// Reason why bytes are rejected as part of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// The bytes are fewer than required.
    #[error("it is cut short")]
    Short,
    /// The magic bytes differ: not a part of a segment.
    #[error("the magic bytes differ")]
    Magic,
    /// Written by a version that this one does not know.
    #[error("version {0} is not known to this release")]
    Version(u16),
    /// Uses a feature that this version must know in order to read it.
    #[error("it needs features {0:#x}, which this release does not have")]
    Features(u64),
    /// Split into fragments by an erasure code that this version does not know.
    #[error("erasure code {0} is not known to this release")]
    Erasure(u8),
    /// Compressed with a codec that this version does not know.
    #[error("codec {0} is not known to this release")]
    Codec(u8),
    /// The bytes have changed since they were written.
    #[error("the checksum differs")]
    Checksum,
    /// The checksum is right, but a field is impossible or not the expected one.
    #[error("{0} is not what it should be")]
    Field(&'static str),
    /// Authentication failed: another key, another place, or a forgery.
    #[error("authentication failed")]
    Authentication,
    /// The plaintext does not decompress to the expected size.
    #[error("it does not decompress")]
    Decompress,
    /// The data can no longer be read: its key was destroyed.
    #[error("{0} was destroyed, or is missing")]
    NoKey(KeyId),
}

impl SegmentError {
    /// Returns whether a later release could read it although this one cannot; no byte is wrong.
    #[must_use]
    pub fn is_unsupported(self) -> bool {
        matches!(self, Self::Version(_) | Self::Features(_) | Self::Codec(_) | Self::Erasure(_))
    }

    /// Converts to the error that leaves this crate. `what` is verb + object.
    #[must_use]
    pub fn into_error(self, what: String) -> Error {
        let kind = match self {
            Self::NoKey(_) => ErrorKind::Denied,
            _ if self.is_unsupported() => ErrorKind::Unsupported,
            _ => ErrorKind::Corrupt,
        };
        Error::with_source(kind, what, self)
    }
}
