//! The small records of the metadata: root, segment, live blocks, spill files.
//!
//! Invariants:
//! - Each begins with its version. Decoding anything that this version does not write is an error
//!   that names the key, never a panic.
//!
//! Byte tables: docs/format-map.md.

use super::keys::{ROOT_KEY, corrupt, live_key, segment_key, stalled_key};
use crate::keys::KeyId;
use crate::segment::{
    FragmentPlace, Fragments, FrameAt, FrameRef, Placement, SegmentInfo, SegmentNumber,
    StoredSegment,
};
use crate::segment_store::Leftover;
use block::seal::Algorithm;
use block::units::{array_at, u32_at, u64_at};
use block::{Epoch, Lsn, Result, VolumeId};
use std::sync::Arc;

const ROOT_VERSION: u8 = 1;
const ROOT_BYTES: usize = 1 + 8 + 8 + 8 + 8;
const SEGMENT_VERSION: u8 = 1;
const SEGMENT_BYTES: usize = 1 + 8 + 16 + 1 + 4 + 4 + 4;
/// Version for a segment whose frames are under the key of a volume.
const KEYED_SEGMENT_VERSION: u8 = 2;
const KEYED_SEGMENT_BYTES: usize = SEGMENT_BYTES + 4;
/// Version for a segment in fragments: the fields of the keyed version, and the placement.
const CODED_SEGMENT_VERSION: u8 = 3;
/// Version for a segment in fragments that the object store has, too: the fields of the coded version.
const COPIED_SEGMENT_VERSION: u8 = 4;
/// Bytes of a placement before its lists.
const PLACEMENT_BYTES: usize = 1 + 1 + 1;
/// Bytes of a place: the number of the store, and the generation.
const PLACE_BYTES: usize = 4 + 8;
/// Most fragments of a segment. Chosen by hand: above those of any scheme.
const FRAGMENTS_MAX: usize = 64;
const LIVE_VERSION: u8 = 1;
const LIVE_BYTES: usize = 1 + 4;

const STALLED_VERSION: u8 = 1;
const SPILL_FILE_REF_BYTES: usize = 8 + 8 + 16;
/// Maximum number of spill files of one volume. Chosen by hand: far above the number that the log
/// keeps.
pub const NAMED_SPILL_FILES_MAX: usize = 4096;

/// A file beside the write log of some machine, with entries of a volume that the tier lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedSpillFile {
    /// First LSN that it covers.
    pub first_lsn: Lsn,
    /// Last LSN that it covers.
    pub last_lsn: Lsn,
    /// The file's own identity.
    pub id: [u8; 16],
}

/// The stored form of the spill files of a volume.
#[must_use]
pub fn encode_stalled(files: &[NamedSpillFile]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(1 + files.len() * SPILL_FILE_REF_BYTES);
    bytes.push(STALLED_VERSION);
    for file in files {
        bytes.extend_from_slice(&file.first_lsn.0.to_le_bytes());
        bytes.extend_from_slice(&file.last_lsn.0.to_le_bytes());
        bytes.extend_from_slice(&file.id);
    }
    bytes
}

/// Decodes the spill files of a volume: oldest first, at least one.
///
/// # Errors
/// `Corrupt`, naming the volume.
pub fn decode_stalled(volume: VolumeId, bytes: &[u8]) -> Result<Vec<NamedSpillFile>> {
    let wrong = || corrupt(&stalled_key(volume), "not a list of spill files");
    let Some((&STALLED_VERSION, rest)) = bytes.split_first() else { return Err(wrong()) };
    let (rows, cut) = rest.as_chunks::<SPILL_FILE_REF_BYTES>();
    if rows.is_empty() || rows.len() > NAMED_SPILL_FILES_MAX || !cut.is_empty() {
        return Err(wrong());
    }
    let mut files: Vec<NamedSpillFile> = Vec::with_capacity(rows.len());
    for row in rows {
        let read = || {
            let (first_lsn, last_lsn) = (Lsn(u64_at(row, 0)?), Lsn(u64_at(row, 8)?));
            Some(NamedSpillFile { first_lsn, last_lsn, id: array_at(row, 16)? })
        };
        let file = read().ok_or_else(wrong)?;
        let after = files.last().map_or(Lsn::NONE, |before| before.last_lsn);
        if file.first_lsn <= after || file.last_lsn < file.first_lsn {
            return Err(wrong());
        }
        files.push(file);
    }
    Ok(files)
}

/// State of the metadata as a whole; part of every commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Root {
    /// Epoch of the owner that committed last.
    pub epoch: Epoch,
    /// Every entry of the log up to this LSN is in the data tier.
    pub destaged: Lsn,
    /// Counts commits, for status and to detect a store that was rolled back.
    pub commit_number: u64,
    /// Number of the next segment. The first is 1.
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

/// The map's record of a segment. Records are compared by [`SegmentRecord::is_of`], never whole: the
/// placement may change while readers hold an earlier one.
#[derive(Clone, Debug)]
pub struct SegmentRecord {
    /// Identity of the segment, and the data needed to open it.
    pub info: SegmentInfo,
    /// Where the segment is stored.
    pub placement: Placement,
    /// Blocks that were mapped to it when it was written.
    pub block_count: u32,
}

impl From<&SegmentRecord> for Leftover {
    fn from(record: &SegmentRecord) -> Leftover {
        Leftover::from(&record.stored())
    }
}

impl SegmentRecord {
    /// Returns whether this is a record of the segment: number and id are equal.
    #[must_use]
    pub fn is_of(&self, info: &SegmentInfo) -> bool {
        (self.info.number, self.info.id) == (info.number, info.id)
    }

    /// Returns the segment and its placement.
    #[must_use]
    pub fn stored(&self) -> StoredSegment {
        StoredSegment { info: self.info, placement: self.placement.clone() }
    }

    /// Returns a frame of the segment.
    #[must_use]
    pub fn frame(&self, at: FrameAt) -> FrameRef {
        FrameRef { info: self.info, placement: self.placement.clone(), at }
    }

    /// The stored form; the number is in the key.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(KEYED_SEGMENT_BYTES);
        let is_pool = self.info.key.is_pool();
        bytes.push(match &self.placement {
            Placement::Fragments(fragments) if fragments.is_copied => COPIED_SEGMENT_VERSION,
            Placement::Fragments(_) => CODED_SEGMENT_VERSION,
            Placement::Object if is_pool => SEGMENT_VERSION,
            Placement::Object => KEYED_SEGMENT_VERSION,
        });
        bytes.extend_from_slice(&self.info.epoch.0.to_le_bytes());
        bytes.extend_from_slice(&self.info.id);
        bytes.push(self.info.algorithm as u8);
        bytes.extend_from_slice(&self.info.object_bytes.to_le_bytes());
        bytes.extend_from_slice(&self.info.frame_count.to_le_bytes());
        bytes.extend_from_slice(&self.block_count.to_le_bytes());
        if bytes[0] != SEGMENT_VERSION {
            bytes.extend_from_slice(&self.info.key.0.to_le_bytes());
        }
        if let Placement::Fragments(fragments) = &self.placement {
            bytes.extend_from_slice(&[fragments.data, fragments.parity, fragments.codec]);
            for end in &fragments.ends {
                bytes.extend_from_slice(&end.to_le_bytes());
            }
            for place in &fragments.places {
                bytes.extend_from_slice(&place.store.to_le_bytes());
                bytes.extend_from_slice(&place.generation.to_le_bytes());
            }
        }
        bytes
    }

    /// Reads the stored form.
    ///
    /// # Errors
    /// `Corrupt`, naming the segment.
    pub fn decode(number: u64, bytes: &[u8]) -> Result<SegmentRecord> {
        let key = match (bytes.first(), bytes.len()) {
            (Some(&SEGMENT_VERSION), SEGMENT_BYTES) => Some(KeyId::POOL),
            (Some(&KEYED_SEGMENT_VERSION), KEYED_SEGMENT_BYTES) => {
                u32_at(bytes, SEGMENT_BYTES).map(KeyId).filter(|key| !key.is_pool())
            }
            (Some(&(CODED_SEGMENT_VERSION | COPIED_SEGMENT_VERSION)), _) => {
                u32_at(bytes, SEGMENT_BYTES).map(KeyId)
            }
            _ => None,
        };
        let read = || {
            Some(SegmentRecord {
                info: SegmentInfo {
                    key: key?,
                    number: SegmentNumber(number),
                    epoch: Epoch(u64_at(bytes, 1)?),
                    id: array_at(bytes, 9)?,
                    algorithm: Algorithm::from_u8(*bytes.get(25)?)?,
                    object_bytes: u32_at(bytes, 26)?,
                    frame_count: u32_at(bytes, 30)?,
                },
                placement: match bytes.first() {
                    Some(version @ &(CODED_SEGMENT_VERSION | COPIED_SEGMENT_VERSION)) => {
                        let is_copied = *version == COPIED_SEGMENT_VERSION;
                        let placement = bytes.get(KEYED_SEGMENT_BYTES..)?;
                        let fragments = decode_fragments(placement, is_copied)?;
                        let is_whole = fragments.ends.last() == Some(&u32_at(bytes, 26)?);
                        is_whole.then(|| Placement::Fragments(Arc::new(fragments)))?
                    }
                    _ => Placement::Object,
                },
                block_count: u32_at(bytes, 34)?,
            })
        };
        read().ok_or_else(|| corrupt(&segment_key(number), "not a segment record"))
    }
}

fn decode_fragments(bytes: &[u8], is_copied: bool) -> Option<Fragments> {
    let (data, parity, codec) = (*bytes.first()?, *bytes.get(1)?, *bytes.get(2)?);
    let (data_count, count) = (usize::from(data), usize::from(data) + usize::from(parity));
    let is_possible = data > 0 && parity > 0 && count <= FRAGMENTS_MAX;
    let (ends, places) = bytes.get(PLACEMENT_BYTES..)?.split_at_checked(4 * data_count)?;
    let (ends, places) = (ends.as_chunks::<4>().0, places.as_chunks::<PLACE_BYTES>());
    if !is_possible || places.0.len() != count || !places.1.is_empty() {
        return None;
    }
    let ends: Vec<u32> = ends.iter().map(|end| u32::from_le_bytes(*end)).collect();
    let place = |place: &[u8; PLACE_BYTES]| {
        let generation = u64_at(place, 4).filter(|generation| *generation != 0)?;
        Some(FragmentPlace { store: u32_at(place, 0)?, generation })
    };
    Some(Fragments {
        data,
        parity,
        codec,
        ends: ends.is_sorted().then_some(ends)?,
        places: places.0.iter().map(place).collect::<Option<Vec<_>>>()?,
        is_copied,
    })
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
    fn a_list_of_spill_files_reads_back_and_nothing_else_does() {
        let file = |first, last| NamedSpillFile {
            first_lsn: Lsn(first),
            last_lsn: Lsn(last),
            id: [0x5a; 16],
        };
        let files = [file(5, 9), file(10, 10), file(40, 0x0102_0304)];
        let bytes = encode_stalled(&files);
        let hex: String = bytes[..33].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            "0105000000000000000900000000000000\
             5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a",
            "the bytes have changed: a new version is needed"
        );
        assert_eq!(decode_stalled(VolumeId(3), &bytes).unwrap(), files);
        for wrong in [&bytes[..0], &bytes[..1], &bytes[..40], &[2; 33]] {
            let error = decode_stalled(VolumeId(3), wrong).unwrap_err();
            assert!(error.to_string().contains("spill files of volume 3"), "{error}");
        }
        for wrong in [vec![file(0, 4)], vec![file(9, 8)], vec![file(1, 5), file(5, 6)]] {
            assert!(decode_stalled(VolumeId(3), &encode_stalled(&wrong)).is_err(), "{wrong:?}");
        }
        let many: Vec<_> =
            (1..=NAMED_SPILL_FILES_MAX as u64 + 1).map(|lsn| file(lsn, lsn)).collect();
        assert!(decode_stalled(VolumeId(3), &encode_stalled(&many)).is_err());
        assert!(decode_stalled(VolumeId(3), &encode_stalled(&many[1..])).is_ok());
    }

    #[test]
    fn records_read_back_and_nothing_else_does() {
        let root = Root { epoch: Epoch(3), destaged: Lsn(70), commit_number: 12, next_segment: 5 };
        assert_eq!(Root::decode(&root.encode()).unwrap(), root);
        let info = SegmentInfo {
            number: SegmentNumber(8),
            epoch: Epoch(2),
            id: [7; 16],
            algorithm: Algorithm::Aes256Gcm,
            key: KeyId::POOL,
            object_bytes: 1_000_000,
            frame_count: 99,
        };
        let record = SegmentRecord { info, placement: Placement::Object, block_count: 800 };
        let read = SegmentRecord::decode(8, &record.encode()).unwrap();
        assert_eq!((read.info, read.block_count), (record.info, record.block_count));
        assert_eq!(decode_live(8, &encode_live(77)).unwrap(), 77);
        let fragments = Fragments {
            data: 4,
            parity: 2,
            codec: 2,
            ends: vec![250_000, 250_000, 700_000, 1_000_000],
            places: [3, 1, 2, 9, Fragments::NOWHERE, 7]
                .map(|store| FragmentPlace { store, generation: 9 })
                .to_vec(),
            is_copied: false,
        };
        for (key, is_copied) in
            [(KeyId::POOL, false), (KeyId(5), false), (KeyId::POOL, true), (KeyId(5), true)]
        {
            let info = SegmentInfo { key, ..info };
            let fragments = Fragments { is_copied, ..fragments.clone() };
            let placement = Placement::Fragments(Arc::new(fragments.clone()));
            let coded = SegmentRecord { info, placement, block_count: 800 };
            let bytes = coded.encode();
            let read = SegmentRecord::decode(8, &bytes).unwrap();
            let Placement::Fragments(found) = read.placement else { panic!("{read:?}") };
            assert_eq!((read.info, &*found), (info, &fragments));
            assert!(SegmentRecord::decode(8, &bytes[..bytes.len() - 1]).is_err());
            assert!(SegmentRecord::decode(8, &[&bytes[..], &[0]].concat()).is_err());
            // No data, too many fragments, ends out of order or of another object, no generation.
            for (at, byte) in [(42, 0), (43, 0), (43, 80), (48, 1), (57, 9), (65, 0)] {
                let mut wrong = bytes.clone();
                wrong[at] = byte;
                assert!(SegmentRecord::decode(8, &wrong).is_err(), "byte {at}");
            }
        }
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
