//! The bytes of a fragment: header, payload, a copy of the segment's directory, and checksums.
//!
//! Invariants:
//! - A fragment says of which segment, place and placement it is, so one in a wrong place counts for
//!   nothing.
//! - A range of the payload is verified without the rest of it, and without a key.
//!
//! Byte tables: docs/format-fragment.md. All numbers are little-endian.

use crate::codec::payload_bytes;
use crate::cuts::Cuts;
use crate::scheme::{CodecId, FRAGMENTS_MAX, Scheme};
use crate::seeded_bugs::seeded_bugs;
use block::units::{array_at, crc32c, crc32c_parts, u32_at, u64_at};
use block::{Epoch, Error, ErrorKind, Result};
use std::ops::Range;

/// Bytes of the header.
pub const HEADER_BYTES: usize = 256;
/// Bytes of the payload that one checksum covers; the last one covers the rest. Chosen by hand: a frame
/// of 4 KiB lies in two of them at most, and the checksums are a thousandth of the payload.
pub const CHECKED_BYTES: usize = 4096;
/// Most bytes of a directory's copy: above those of any segment.
const DIRECTORY_BYTES_MAX: u32 = 1 << 26;
/// Bytes of a checksum.
const CHECKSUM_BYTES: usize = 4;

const MAGIC: &[u8; 8] = b"SPDLFRAG";
const VERSION: u16 = 1;
const CODEC_AT: usize = 10;
const DATA_AT: usize = 11;
const PARITY_AT: usize = 12;
const INDEX_AT: usize = 13;
const POOL_AT: usize = 16;
const SEGMENT_AT: usize = 32;
const EPOCH_AT: usize = 48;
const NUMBER_AT: usize = 56;
const GENERATION_AT: usize = 64;
const PAYLOAD_AT: usize = 72;
const DIRECTORY_AT: usize = 76;
const ENDS_AT: usize = 80;
const ENDS_END: usize = ENDS_AT + 4 * FRAGMENTS_MAX;
const CRC_AT: usize = HEADER_BYTES - 4;

/// The segment of a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FragmentOwner {
    /// The pool.
    pub pool: [u8; 16],
    /// Random identity of the segment.
    pub segment: [u8; 16],
    /// Epoch of the owner that wrote the segment.
    pub epoch: Epoch,
    /// Number of the segment within the pool.
    pub number: u64,
}

/// All that a fragment says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FragmentHeader {
    /// The segment.
    pub owner: FragmentOwner,
    /// Its scheme, which has the codec.
    pub scheme: Scheme,
    /// Its place in the scheme: below [`Scheme::fragments`].
    pub index: u8,
    /// Counts the placements of the segment; the first is 1.
    pub generation: u64,
    /// The cuts of the image.
    pub cuts: Cuts,
    /// Bytes of the copy of the segment's directory; 0 for none.
    pub directory_bytes: u32,
}

impl FragmentHeader {
    /// Bytes of the payload, which follow the header.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        payload_bytes(self.scheme, &self.cuts, usize::from(self.index))
    }

    /// The range of the fragment that holds a range of the payload.
    #[must_use]
    pub fn range_of(&self, payload: &Range<usize>) -> Range<usize> {
        HEADER_BYTES + payload.start..HEADER_BYTES + payload.end
    }

    /// The range of the fragment that holds the copy of the directory.
    #[must_use]
    pub fn directory_range(&self) -> Range<usize> {
        let begin = HEADER_BYTES + self.payload_bytes();
        begin..begin + self.directory_bytes as usize
    }

    /// The range of the fragment that holds the checksums.
    #[must_use]
    pub fn checksums_range(&self) -> Range<usize> {
        let begin = self.directory_range().end;
        let count = self.payload_bytes().div_ceil(CHECKED_BYTES) + 1;
        begin..begin + count * CHECKSUM_BYTES
    }

    /// Bytes of the whole fragment.
    #[must_use]
    pub fn fragment_bytes(&self) -> usize {
        self.checksums_range().end
    }

    /// The stored form.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        let count = |count: usize| u8::try_from(count).expect("a scheme has few fragments");
        let payload = u32::try_from(self.payload_bytes()).expect("shorter than an image");
        put(0, MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(CODEC_AT, &[self.scheme.codec() as u8]);
        put(DATA_AT, &[count(self.scheme.data())]);
        put(PARITY_AT, &[count(self.scheme.parity())]);
        put(INDEX_AT, &[self.index]);
        put(POOL_AT, &self.owner.pool);
        put(SEGMENT_AT, &self.owner.segment);
        put(EPOCH_AT, &self.owner.epoch.0.to_le_bytes());
        put(NUMBER_AT, &self.owner.number.to_le_bytes());
        put(GENERATION_AT, &self.generation.to_le_bytes());
        put(PAYLOAD_AT, &payload.to_le_bytes());
        put(DIRECTORY_AT, &self.directory_bytes.to_le_bytes());
        for (place, end) in self.cuts.ends().iter().enumerate() {
            put(ENDS_AT + 4 * place, &end.to_le_bytes());
        }
        let crc = crc32c(&bytes[..CRC_AT]);
        bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads the stored form; bytes behind the header are ignored.
    ///
    /// # Errors
    /// `Unsupported` for one of a later version; `Corrupt`.
    pub fn decode(bytes: &[u8]) -> Result<FragmentHeader> {
        let corrupt = || Error::new(ErrorKind::Corrupt, "read a fragment: its header is damaged");
        let bytes = bytes.get(..HEADER_BYTES).ok_or_else(corrupt)?;
        let is_whole =
            bytes[..8] == *MAGIC && u32_at(bytes, CRC_AT) == Some(crc32c(&bytes[..CRC_AT]));
        if !is_whole {
            return Err(corrupt());
        }
        let scheme = Scheme::new(bytes[DATA_AT], bytes[PARITY_AT]);
        let codec = CodecId::from_number(bytes[CODEC_AT]);
        let is_known = bytes[8..10] == VERSION.to_le_bytes();
        let (Some(scheme), Some(codec), true) = (scheme, codec, is_known) else {
            let what = "read a fragment: it was written by a later version of spindle";
            return Err(Error::new(ErrorKind::Unsupported, what));
        };
        let read = || {
            let ends: Option<Vec<u32>> =
                (0..scheme.data()).map(|place| u32_at(bytes, ENDS_AT + 4 * place)).collect();
            let header = FragmentHeader {
                owner: FragmentOwner {
                    pool: array_at(bytes, POOL_AT)?,
                    segment: array_at(bytes, SEGMENT_AT)?,
                    epoch: Epoch(u64_at(bytes, EPOCH_AT)?),
                    number: u64_at(bytes, NUMBER_AT)?,
                },
                scheme,
                index: bytes[INDEX_AT],
                generation: u64_at(bytes, GENERATION_AT).filter(|generation| *generation != 0)?,
                cuts: Cuts::from_ends(scheme, &ends?)?,
                directory_bytes: u32_at(bytes, DIRECTORY_AT)
                    .filter(|len| *len <= DIRECTORY_BYTES_MAX)?,
            };
            let is_place =
                usize::from(header.index) < scheme.fragments() && codec == scheme.codec();
            let is_empty = |range: Range<usize>| bytes[range].iter().all(|byte| *byte == 0);
            let is_padded = is_empty(INDEX_AT + 1..POOL_AT)
                && is_empty(ENDS_AT + 4 * scheme.data()..ENDS_END)
                && is_empty(ENDS_END..CRC_AT);
            let payload = u32_at(bytes, PAYLOAD_AT)? as usize;
            (is_place && is_padded && header.payload_bytes() == payload).then_some(header)
        };
        read().ok_or_else(corrupt)
    }

    /// Whether the fragment is the one with this place in this placement of the segment.
    #[must_use]
    pub fn is_of(&self, owner: &FragmentOwner, index: u8, generation: u64) -> bool {
        let is_current = self.generation == generation || seeded_bugs().stale_fragment_accepted;
        self.owner == *owner && self.index == index && is_current
    }

    /// Makes what follows the payload: the copy of the directory, and the checksums.
    ///
    /// Panics if the payload or the directory has another length than the header says.
    #[must_use]
    pub fn trailer(&self, payload: &[u8], directory: &[u8]) -> Vec<u8> {
        assert_eq!(payload.len(), self.payload_bytes(), "the payload of {self:?}");
        assert_eq!(directory.len(), self.directory_bytes as usize, "the directory of {self:?}");
        let salt = self.salt();
        let mut trailer = directory.to_vec();
        for (place, checked) in payload.chunks(CHECKED_BYTES).enumerate() {
            trailer.extend_from_slice(&checksum(salt, place, checked).to_le_bytes());
        }
        let crc = crc32c_parts(&[&salt, &trailer]);
        trailer.extend_from_slice(&crc.to_le_bytes());
        trailer
    }

    /// Verifies what follows the payload.
    ///
    /// # Errors
    /// `Corrupt`.
    pub fn checksums<'a>(&self, trailer: &'a [u8]) -> Result<Checksums<'a>> {
        let expected = self.checksums_range().end - self.directory_range().start;
        let split = trailer.split_last_chunk::<CHECKSUM_BYTES>();
        let (rest, crc) = split
            .filter(|_| trailer.len() == expected)
            .filter(|(rest, crc)| crc32c_parts(&[&self.salt(), rest]).to_le_bytes() == **crc)
            .ok_or_else(|| {
                Error::new(ErrorKind::Corrupt, "read a fragment: its checksums are damaged")
            })?;
        let _ = crc;
        Ok(Checksums { salt: self.salt(), table: &rest[self.directory_bytes as usize..] })
    }

    /// The header's checksum: a range of another fragment has other checksums.
    fn salt(&self) -> [u8; 4] {
        let bytes = self.encode();
        array_at(&bytes, CRC_AT).expect("within the header")
    }
}

/// The checksums of a fragment's payload.
#[derive(Clone, Copy, Debug)]
pub struct Checksums<'a> {
    salt: [u8; 4],
    table: &'a [u8],
}

impl Checksums<'_> {
    /// The range of the payload that has to be read to verify `range` of it, in a payload of `payload_bytes`
    /// bytes.
    #[must_use]
    pub fn checked(range: &Range<usize>, payload_bytes: usize) -> Range<usize> {
        let end = range.end.next_multiple_of(CHECKED_BYTES).min(payload_bytes);
        range.start / CHECKED_BYTES * CHECKED_BYTES..end
    }

    /// Whether `bytes` are those of the payload from `begin` on, which is where a checked part begins, up
    /// to where one ends.
    #[must_use]
    pub fn verify(&self, begin: usize, bytes: &[u8]) -> bool {
        let first = begin / CHECKED_BYTES;
        let is_right = |(place, checked): (usize, &[u8])| {
            let stored = u32_at(self.table, (first + place) * CHECKSUM_BYTES);
            stored == Some(checksum(self.salt, first + place, checked))
        };
        begin.is_multiple_of(CHECKED_BYTES)
            && (bytes.chunks(CHECKED_BYTES).enumerate().all(is_right)
                || seeded_bugs().range_checksum_skipped)
    }
}

fn checksum(salt: [u8; 4], place: usize, checked: &[u8]) -> u32 {
    let place = u32::try_from(place).expect("a payload is shorter than an image").to_le_bytes();
    crc32c_parts(&[&salt, &place, checked])
}

#[cfg(test)]
mod tests;
