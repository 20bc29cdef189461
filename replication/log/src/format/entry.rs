//! One row of a batch's entry table.
//!
//! Invariants:
//! - A row is 32 bytes; the table is sealed as a whole.
//! - A payload of `n` bytes takes `n + 16` bytes in the batch (its tag follows); an empty payload
//!   takes none.
//! - Row `i` has LSN `first_lsn + i` and seals its payload under nonce `i`.

use super::{FormatError, put};
use block::seal::TAG_BYTES;
use block::units::{SECTOR_BYTES, VOLUME_BYTES_MAX, array_at, u32_at, u64_at};
use block::{Lsn, VolumeId};

/// Bytes of one row.
pub(crate) const ENTRY_BYTES: usize = 32;

const AT_VOLUME: usize = 0; //          u32, 0 only for a marker and for snapshots
const AT_KIND: usize = 4; //            u8, then 3 zero bytes
const AT_START_SECTOR: usize = 8; //    u64
const AT_SECTOR_COUNT: usize = 16; //   u64
const AT_PAYLOAD_OFFSET: usize = 24; // u32, from the start of the payload area
const AT_PAYLOAD_BYTES: usize = 28; //  u32, before sealing
const _: () = assert!(AT_PAYLOAD_BYTES + 4 == ENTRY_BYTES);

/// Maximum number of sectors in a range: no volume is larger.
pub(crate) const SECTORS_MAX: u64 = VOLUME_BYTES_MAX / SECTOR_BYTES;
/// Largest record of a volume, in bytes. Chosen by hand: a record is a few hundred bytes.
pub const RECORD_BYTES_MAX: usize = 1 << 20;

/// The kind of change that an entry makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum EntryKind {
    /// The payload replaces the range.
    Write = 1,
    /// The range reads as zeroes and counts as allocated.
    Zero = 2,
    /// The range reads as zeroes and is a hole.
    Trim = 3,
    /// The payload is the whole record of the volume; it is logged for create, resize and remove.
    VolumeRecord = 4,
    /// Only marks a place in the order.
    Marker = 5,
    /// The payload lists the snapshots that are made or removed at exactly this place: the
    /// generation ends here. It belongs to the pool, not to a volume.
    Snapshot = 6,
}

impl EntryKind {
    fn from_u8(value: u8) -> Option<Self> {
        match value {
            1 => Some(EntryKind::Write),
            2 => Some(EntryKind::Zero),
            3 => Some(EntryKind::Trim),
            4 => Some(EntryKind::VolumeRecord),
            5 => Some(EntryKind::Marker),
            6 => Some(EntryKind::Snapshot),
            _ => None,
        }
    }

    fn code(self) -> u8 {
        match self {
            EntryKind::Write => 1,
            EntryKind::Zero => 2,
            EntryKind::Trim => 3,
            EntryKind::VolumeRecord => 4,
            EntryKind::Marker => 5,
            EntryKind::Snapshot => 6,
        }
    }
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryRow {
    pub(crate) volume: VolumeId,
    pub(crate) kind: EntryKind,
    pub(crate) start_sector: u64,
    pub(crate) sector_count: u64,
    pub(crate) payload_offset: u32,
    pub(crate) payload_bytes: u32,
}

impl EntryRow {
    pub(crate) fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        put(&mut bytes, AT_VOLUME, &self.volume.0.to_le_bytes());
        put(&mut bytes, AT_KIND, &[self.kind.code()]);
        put(&mut bytes, AT_START_SECTOR, &self.start_sector.to_le_bytes());
        put(&mut bytes, AT_SECTOR_COUNT, &self.sector_count.to_le_bytes());
        put(&mut bytes, AT_PAYLOAD_OFFSET, &self.payload_offset.to_le_bytes());
        put(&mut bytes, AT_PAYLOAD_BYTES, &self.payload_bytes.to_le_bytes());
        bytes
    }

    /// Reads the row at `at` of a decrypted table.
    pub(crate) fn decode(table: &[u8], at: usize) -> Result<EntryRow, FormatError> {
        let row: [u8; ENTRY_BYTES] = array_at(table, at).ok_or(FormatError::Short)?;
        let [kind, 0, 0, 0] = array_at(&row, AT_KIND).ok_or(FormatError::Short)? else {
            return Err(FormatError::Range);
        };
        let row = EntryRow {
            volume: VolumeId(u32_at(&row, AT_VOLUME).ok_or(FormatError::Short)?),
            kind: EntryKind::from_u8(kind).ok_or(FormatError::Range)?,
            start_sector: u64_at(&row, AT_START_SECTOR).ok_or(FormatError::Short)?,
            sector_count: u64_at(&row, AT_SECTOR_COUNT).ok_or(FormatError::Short)?,
            payload_offset: u32_at(&row, AT_PAYLOAD_OFFSET).ok_or(FormatError::Short)?,
            payload_bytes: u32_at(&row, AT_PAYLOAD_BYTES).ok_or(FormatError::Short)?,
        };
        if row.is_sane() { Ok(row) } else { Err(FormatError::Range) }
    }

    /// Checks the rules for entries, which also apply to appends.
    pub(crate) fn is_sane(&self) -> bool {
        let has_volume = self.volume != VolumeId(0);
        let has_range = self.sector_count > 0
            && self.start_sector.checked_add(self.sector_count).is_some_and(|e| e <= SECTORS_MAX);
        let no_range = self.sector_count == 0 && self.start_sector == 0;
        let payload_bytes = u64::from(self.payload_bytes);
        match self.kind {
            EntryKind::Write => {
                has_volume
                    && has_range
                    && self.sector_count.checked_mul(SECTOR_BYTES) == Some(payload_bytes)
            }
            EntryKind::Zero | EntryKind::Trim => has_volume && has_range && payload_bytes == 0,
            EntryKind::VolumeRecord => {
                has_volume
                    && no_range
                    && usize::try_from(payload_bytes).is_ok_and(|b| b <= RECORD_BYTES_MAX)
            }
            EntryKind::Marker => no_range && payload_bytes == 0,
            EntryKind::Snapshot => {
                !has_volume
                    && no_range
                    && usize::try_from(payload_bytes).is_ok_and(|b| b <= RECORD_BYTES_MAX)
            }
        }
    }

    /// Returns the bytes of the sealed payload in the batch.
    pub(crate) fn sealed_bytes(&self) -> usize {
        match usize::try_from(self.payload_bytes) {
            Ok(0) | Err(_) => 0,
            Ok(bytes) => bytes.saturating_add(TAG_BYTES),
        }
    }

    /// Returns the bytes that the payload's seal binds, besides the batch's key and the nonce.
    pub(crate) fn associated(&self, lsn: Lsn) -> [u8; 40] {
        let mut bytes = [0; 40];
        put(&mut bytes, 0, &self.encode());
        put(&mut bytes, ENTRY_BYTES, &lsn.0.to_le_bytes());
        bytes
    }
}
