//! The small records of the metadata: root, segment, live blocks.
//!
//! Invariants:
//! - Each begins with its version; decoding anything else than what this version writes is an error
//!   that names the key, never a panic.
//!
//! Byte tables: docs/format-map.md.

use super::keys::{ROOT_KEY, corrupt, live_key, segment_key};
use crate::segment::{SegmentInfo, SegmentNumber};
use block::seal::Algorithm;
use block::units::{array_at, u32_at, u64_at};
use block::{Epoch, Lsn, Result};

const ROOT_VERSION: u8 = 1;
const ROOT_BYTES: usize = 1 + 8 + 8 + 8 + 8;
const SEGMENT_VERSION: u8 = 1;
const SEGMENT_BYTES: usize = 1 + 8 + 16 + 1 + 4 + 4 + 4;
const LIVE_VERSION: u8 = 1;
const LIVE_BYTES: usize = 1 + 4;

/// Where the metadata stands; part of every commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Root {
    /// Epoch of the owner that committed last.
    pub epoch: Epoch,
    /// Every entry of the log up to here is in the data tier.
    pub destaged: Lsn,
    /// Counts commits, for status and for telling a store that was rolled back.
    pub commit_number: u64,
    /// The number that the next segment gets. The first is 1.
    pub next_segment: u64,
}

impl Root {
    /// The stored form.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(ROOT_BYTES);
        bytes.push(ROOT_VERSION);
        for number in [self.epoch.0, self.destaged.0, self.commit_number, self.next_segment] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// Reads the stored form.
    ///
    /// # Errors
    /// `Corrupt`.
    pub fn decode(bytes: &[u8]) -> Result<Root> {
        let read = || {
            Some(Root {
                epoch: Epoch(u64_at(bytes, 1)?),
                destaged: Lsn(u64_at(bytes, 9)?),
                commit_number: u64_at(bytes, 17)?,
                next_segment: u64_at(bytes, 25).filter(|next| *next != 0)?,
            })
        };
        match read() {
            Some(root) if bytes.len() == ROOT_BYTES && bytes[0] == ROOT_VERSION => Ok(root),
            _ => Err(corrupt(ROOT_KEY, "not a root record")),
        }
    }
}

/// A segment as the map knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentRecord {
    /// Where it is and how it opens.
    pub info: SegmentInfo,
    /// Blocks that were mapped to it when it was written.
    pub block_count: u32,
}

impl SegmentRecord {
    /// The stored form; the number is in the key.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(SEGMENT_BYTES);
        bytes.push(SEGMENT_VERSION);
        bytes.extend_from_slice(&self.info.epoch.0.to_le_bytes());
        bytes.extend_from_slice(&self.info.id);
        bytes.push(self.info.algorithm as u8);
        bytes.extend_from_slice(&self.info.object_bytes.to_le_bytes());
        bytes.extend_from_slice(&self.info.frame_count.to_le_bytes());
        bytes.extend_from_slice(&self.block_count.to_le_bytes());
        bytes
    }

    /// Reads the stored form.
    ///
    /// # Errors
    /// `Corrupt`, naming the segment.
    pub fn decode(number: u64, bytes: &[u8]) -> Result<SegmentRecord> {
        let read = || {
            Some(SegmentRecord {
                info: SegmentInfo {
                    number: SegmentNumber(number),
                    epoch: Epoch(u64_at(bytes, 1)?),
                    id: array_at(bytes, 9)?,
                    algorithm: Algorithm::from_u8(*bytes.get(25)?)?,
                    object_bytes: u32_at(bytes, 26)?,
                    frame_count: u32_at(bytes, 30)?,
                },
                block_count: u32_at(bytes, 34)?,
            })
        };
        match read() {
            Some(record) if bytes.len() == SEGMENT_BYTES && bytes[0] == SEGMENT_VERSION => {
                Ok(record)
            }
            _ => Err(corrupt(&segment_key(number), "not a segment record")),
        }
    }
}

/// The stored form of a live-block count.
#[must_use]
pub fn encode_live(blocks: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(LIVE_BYTES);
    bytes.push(LIVE_VERSION);
    bytes.extend_from_slice(&blocks.to_le_bytes());
    bytes
}

/// Reads a live-block count.
///
/// # Errors
/// `Corrupt`, naming the segment.
pub fn decode_live(number: u64, bytes: &[u8]) -> Result<u32> {
    match u32_at(bytes, 1) {
        Some(blocks) if bytes.len() == LIVE_BYTES && bytes[0] == LIVE_VERSION => Ok(blocks),
        _ => Err(corrupt(&live_key(number), "not a live-block count")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_read_back_and_nothing_else_does() {
        let root = Root { epoch: Epoch(3), destaged: Lsn(70), commit_number: 12, next_segment: 5 };
        assert_eq!(Root::decode(&root.encode()).unwrap(), root);
        let info = SegmentInfo {
            number: SegmentNumber(8),
            epoch: Epoch(2),
            id: [7; 16],
            algorithm: Algorithm::Aes256Gcm,
            object_bytes: 1_000_000,
            frame_count: 99,
        };
        let record = SegmentRecord { info, block_count: 800 };
        assert_eq!(SegmentRecord::decode(8, &record.encode()).unwrap(), record);
        assert_eq!(decode_live(8, &encode_live(77)).unwrap(), 77);
        for bytes in [root.encode(), record.encode(), encode_live(1), vec![], vec![2; 38]] {
            let short = &bytes[..bytes.len().saturating_sub(1)];
            assert!(Root::decode(short).is_err());
            assert!(SegmentRecord::decode(1, short).is_err());
            assert!(decode_live(1, short).is_err());
        }
        let mut unknown = record.encode();
        unknown[25] = 9;
        assert!(SegmentRecord::decode(8, &unknown).is_err());
    }
}
