//! A spill file: the data of one volume from one or more generations that were destaged without it.
//!
//! Invariants:
//! - The file's key comes from a fresh random salt, which is also its id, so no nonce repeats. No
//!   row can have the table's nonce.
//! - The table's seal binds the header up to its checksum, and each payload's seal binds its row:
//!   nothing can be moved within a file or between files.
//! - The table comes last, because only reading the payloads shows which of them are lost.

use super::header::{AT_OWN_FIELDS, HeaderFormat, SharedFields, put_algorithm};
use super::{FormatError, part, put};
use block::seal::{Algorithm, SALT_BYTES, SealKey, TAG_BYTES};
use block::units::{SECTOR_BYTES, array_at, crc32c, u32_at, u64_at};
use block::{Epoch, Lsn, VolumeId};

/// Bytes of the header; payloads follow.
pub(crate) const SPILL_HEADER_BYTES: usize = 128;
/// Bytes of one row of the table.
pub(crate) const SPILL_ROW_BYTES: usize = 32;
/// Purpose of the derived key; see [`block::seal::PoolKey::derive`].
pub(crate) const SPILL_KEY_PURPOSE: &str = "side file";
/// Largest payload of one row, which is that of a log entry. Source: `options::payload_bytes_max`.
pub(crate) const SPILL_PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// Format version that this program writes.
const VERSION: u16 = 1;
/// Nonce of the table; rows count from 0 and are fewer than 2^32.
const TABLE_NONCE: u64 = u64::MAX;

// The fields before offset 40 are those of format/header.rs; the byte after the cipher is zero.
const AT_ZERO_BYTE: usize = 11; //     u8
const AT_ID: usize = 40; //            [u8; 16] random: salt of the key, and the file's identity
const AT_EPOCH: usize = 56; //         u64, never 0
const AT_FIRST_LSN: usize = 64; //     u64, never 0
const AT_LAST_LSN: usize = 72; //      u64
const AT_VOLUME: usize = 80; //        u32, never 0
const AT_ROW_COUNT: usize = 84; //     u32
const AT_PAYLOAD_BYTES: usize = 88; // u64, sealed payloads
const AT_TABLE_CRC: usize = 96; //     u32, CRC-32C of the sealed table and its tag
const AT_CRC: usize = 100; //          u32, CRC-32C of bytes 0..100
const AT_ZERO: usize = 104; //         24 zero bytes
const _: () = assert!(AT_ID == AT_OWN_FIELDS);
const _: () = assert!(AT_ZERO + 24 == SPILL_HEADER_BYTES);

const ROW_AT_SECTOR_COUNT: usize = 8; //   u64
const ROW_AT_PLACE: usize = 16; //         u64, payload offset, or LSN of a lost entry
const ROW_AT_PAYLOAD_BYTES: usize = 24; // u32, before sealing
const ROW_AT_KIND: usize = 28; //          u8, then 3 zero bytes
const _: () = assert!(ROW_AT_KIND + 4 == SPILL_ROW_BYTES);

const KIND_WRITE: u8 = 1;
const KIND_ZERO: u8 = 2;
const KIND_TRIM: u8 = 3;
const KIND_LOST: u8 = 4;

const HEADER: HeaderFormat = HeaderFormat {
    magic: b"SPDLSIDE",
    bytes: SPILL_HEADER_BYTES,
    version: VERSION,
    incompatible_known: 0,
    at_crc: AT_CRC,
};

/// The header of a spill file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpillHeader {
    pub(crate) algorithm: Algorithm,
    pub(crate) pool: [u8; 16],
    pub(crate) id: [u8; SALT_BYTES],
    pub(crate) epoch: Epoch,
    pub(crate) first_lsn: Lsn,
    pub(crate) last_lsn: Lsn,
    pub(crate) volume: VolumeId,
    pub(crate) row_count: u32,
    pub(crate) payload_bytes: u64,
    pub(crate) table_checksum: u32,
}

/// Returns the bytes of the sealed table.
fn table_bytes(row_count: u32) -> Option<u64> {
    let row_bytes = u64::try_from(SPILL_ROW_BYTES).ok()?;
    u64::from(row_count).checked_mul(row_bytes)?.checked_add(u64::try_from(TAG_BYTES).ok()?)
}

impl SpillHeader {
    /// Returns the offset and the length of the sealed table; `None` if it ends beyond 2^62 bytes.
    pub(crate) fn table(&self) -> Option<(u64, u64)> {
        let at = u64::try_from(SPILL_HEADER_BYTES).ok()?.checked_add(self.payload_bytes)?;
        let bytes = table_bytes(self.row_count)?;
        at.checked_add(bytes).filter(|end| *end <= 1 << 62).map(|_| (at, bytes))
    }

    /// Returns the length of the whole file.
    pub(crate) fn file_bytes(&self) -> Option<u64> {
        self.table().and_then(|(at, bytes)| at.checked_add(bytes))
    }

    pub(crate) fn encode(&self) -> [u8; SPILL_HEADER_BYTES] {
        let mut bytes = [0; SPILL_HEADER_BYTES];
        let fields = SharedFields { incompatible: 0, pool: self.pool };
        HEADER.begin(&mut bytes, fields);
        put_algorithm(&mut bytes, self.algorithm);
        put(&mut bytes, AT_ID, &self.id);
        put(&mut bytes, AT_EPOCH, &self.epoch.0.to_le_bytes());
        put(&mut bytes, AT_FIRST_LSN, &self.first_lsn.0.to_le_bytes());
        put(&mut bytes, AT_LAST_LSN, &self.last_lsn.0.to_le_bytes());
        put(&mut bytes, AT_VOLUME, &self.volume.0.to_le_bytes());
        put(&mut bytes, AT_ROW_COUNT, &self.row_count.to_le_bytes());
        put(&mut bytes, AT_PAYLOAD_BYTES, &self.payload_bytes.to_le_bytes());
        put(&mut bytes, AT_TABLE_CRC, &self.table_checksum.to_le_bytes());
        HEADER.finish(&mut bytes);
        bytes
    }

    /// Reads a header from the first bytes of a file.
    pub(crate) fn decode(bytes: &[u8]) -> Result<SpillHeader, FormatError> {
        let header = HEADER.open(bytes)?;
        let found = SpillHeader {
            algorithm: header.algorithm()?,
            pool: header.fields.pool,
            id: header.id(AT_ID)?,
            epoch: Epoch(header.u64(AT_EPOCH)?),
            first_lsn: Lsn(header.u64(AT_FIRST_LSN)?),
            last_lsn: Lsn(header.u64(AT_LAST_LSN)?),
            volume: VolumeId(header.u32(AT_VOLUME)?),
            row_count: header.u32(AT_ROW_COUNT)?,
            payload_bytes: header.u64(AT_PAYLOAD_BYTES)?,
            table_checksum: header.u32(AT_TABLE_CRC)?,
        };
        let is_sane = header.u8(AT_ZERO_BYTE)? == 0
            && header.is_zero(AT_ZERO..SPILL_HEADER_BYTES)
            && found.epoch.0 != 0
            && found.first_lsn.0 != 0
            && found.first_lsn <= found.last_lsn
            && found.volume.0 != 0
            && found.file_bytes().is_some();
        if is_sane { Ok(found) } else { Err(FormatError::Range) }
    }

    /// Returns the bytes that the table's seal binds: the header up to the table's checksum.
    fn associated(&self) -> [u8; AT_TABLE_CRC] {
        let mut bytes = [0; AT_TABLE_CRC];
        let header = self.encode();
        put(&mut bytes, 0, header.get(..AT_TABLE_CRC).unwrap_or_default());
        bytes
    }
}

/// The contents of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpillContent {
    /// A payload of the row's sectors.
    Write {
        /// Offset of the sealed payload from the start of the payloads.
        offset: u64,
    },
    /// Reads as zeroes and counts as allocated.
    Zero,
    /// Reads as zeroes and is a hole.
    Trim,
    /// Lost: the data did not verify when the file was made.
    Lost {
        /// The entry that held the data, or the newest one that may have held it.
        lsn: Lsn,
    },
}

/// A row of the table: consecutive sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpillRow {
    pub(crate) start_sector: u64,
    pub(crate) sector_count: u64,
    pub(crate) content: SpillContent,
}

impl SpillRow {
    /// Returns the bytes of the payload before sealing.
    pub(crate) fn payload_bytes(&self) -> u32 {
        match self.content {
            SpillContent::Write { .. } => {
                let bytes = self.sector_count.saturating_mul(SECTOR_BYTES);
                u32::try_from(bytes).unwrap_or(u32::MAX)
            }
            SpillContent::Zero | SpillContent::Trim | SpillContent::Lost { .. } => 0,
        }
    }

    /// Returns the bytes that the row takes among the payloads.
    pub(crate) fn sealed_bytes(&self) -> u64 {
        let tag_bytes = u64::try_from(TAG_BYTES).unwrap_or(u64::MAX);
        match self.content {
            SpillContent::Write { .. } => u64::from(self.payload_bytes()).saturating_add(tag_bytes),
            _ => 0,
        }
    }

    /// Returns the stored form, which the payload's seal binds too.
    pub(crate) fn encode(&self) -> [u8; SPILL_ROW_BYTES] {
        let (kind, place) = match self.content {
            SpillContent::Write { offset } => (KIND_WRITE, offset),
            SpillContent::Zero => (KIND_ZERO, 0),
            SpillContent::Trim => (KIND_TRIM, 0),
            SpillContent::Lost { lsn } => (KIND_LOST, lsn.0),
        };
        let mut bytes = [0; SPILL_ROW_BYTES];
        put(&mut bytes, 0, &self.start_sector.to_le_bytes());
        put(&mut bytes, ROW_AT_SECTOR_COUNT, &self.sector_count.to_le_bytes());
        put(&mut bytes, ROW_AT_PLACE, &place.to_le_bytes());
        put(&mut bytes, ROW_AT_PAYLOAD_BYTES, &self.payload_bytes().to_le_bytes());
        put(&mut bytes, ROW_AT_KIND, &[kind]);
        bytes
    }

    fn decode(table: &[u8], at: usize) -> Result<SpillRow, FormatError> {
        let row: [u8; SPILL_ROW_BYTES] = array_at(table, at).ok_or(FormatError::Short)?;
        let u64_of = |at| u64_at(&row, at).ok_or(FormatError::Short);
        let [kind, 0, 0, 0] = array_at(&row, ROW_AT_KIND).ok_or(FormatError::Short)? else {
            return Err(FormatError::Range);
        };
        let place = u64_of(ROW_AT_PLACE)?;
        let content = match kind {
            KIND_WRITE => SpillContent::Write { offset: place },
            KIND_ZERO if place == 0 => SpillContent::Zero,
            KIND_TRIM if place == 0 => SpillContent::Trim,
            KIND_LOST => SpillContent::Lost { lsn: Lsn(place) },
            _ => return Err(FormatError::Range),
        };
        let row_of = SpillRow { start_sector: u64_of(0)?, sector_count: u64_of(8)?, content };
        let payload_bytes = u32_at(&row, ROW_AT_PAYLOAD_BYTES).ok_or(FormatError::Short)?;
        let is_sane = row_of.payload_bytes() == payload_bytes
            && payload_bytes <= SPILL_PAYLOAD_BYTES_MAX
            && row_of.sector_count > 0
            && row_of
                .start_sector
                .checked_add(row_of.sector_count)
                .is_some_and(|end| end <= super::entry::SECTORS_MAX);
        if is_sane { Ok(row_of) } else { Err(FormatError::Range) }
    }
}

/// Seals the table and completes the header: row count, payload bytes and checksum. `None` if the
/// header cannot express them.
pub(crate) fn seal_table(
    header: &mut SpillHeader,
    rows: &[SpillRow],
    key: &SealKey,
) -> Option<Vec<u8>> {
    header.row_count = u32::try_from(rows.len()).ok()?;
    header.payload_bytes =
        rows.iter().try_fold(0u64, |sum, row| sum.checked_add(row.sealed_bytes()))?;
    header.file_bytes()?;
    let mut table: Vec<u8> = rows.iter().flat_map(SpillRow::encode).collect();
    let tag = key.seal(TABLE_NONCE, &header.associated(), &mut table);
    table.extend_from_slice(&tag);
    header.table_checksum = crc32c(&table);
    Some(table)
}

/// Opens the sealed table that belongs to `header`. Checks that rows are in order and disjoint, and
/// that their payloads have no gaps.
pub(crate) fn open_table(
    header: &SpillHeader,
    sealed: &mut [u8],
    key: &SealKey,
) -> Result<Vec<SpillRow>, FormatError> {
    let len = table_bytes(header.row_count).and_then(|bytes| usize::try_from(bytes).ok());
    let len = len.ok_or(FormatError::Range)?;
    if part(sealed, 0, len)?.len() != sealed.len() {
        return Err(FormatError::Range);
    }
    if crc32c(sealed) != header.table_checksum {
        return Err(FormatError::Checksum);
    }
    let table =
        key.open(TABLE_NONCE, &header.associated(), sealed).map_err(|_| FormatError::Seal)?;
    let mut rows = Vec::with_capacity(table.len().div_ceil(SPILL_ROW_BYTES));
    let (mut end_sector, mut payload_end) = (0u64, 0u64);
    for at in (0..table.len()).step_by(SPILL_ROW_BYTES) {
        let row = SpillRow::decode(table, at)?;
        let is_placed = match row.content {
            SpillContent::Write { offset } => offset == payload_end,
            _ => true,
        };
        if row.start_sector < end_sector || !is_placed {
            return Err(FormatError::Range);
        }
        end_sector = row.start_sector.saturating_add(row.sector_count);
        payload_end = payload_end.checked_add(row.sealed_bytes()).ok_or(FormatError::Range)?;
        rows.push(row);
    }
    if payload_end == header.payload_bytes { Ok(rows) } else { Err(FormatError::Range) }
}

/// Opens one payload in place, given exactly its sealed bytes.
pub(crate) fn open_spill_payload<'a>(
    row: &SpillRow,
    index: u32,
    key: &SealKey,
    sealed: &'a mut [u8],
) -> Result<&'a mut [u8], FormatError> {
    if u64::try_from(sealed.len()) != Ok(row.sealed_bytes()) {
        return Err(FormatError::Short);
    }
    key.open(u64::from(index), &row.encode(), sealed)
        .map(|bytes| &mut *bytes)
        .map_err(|_| FormatError::Seal)
}
