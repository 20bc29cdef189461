//! One batch: header, sealed entry table, sealed payloads, zeroes up to the next 4 KiB.
//!
//! Invariants:
//! - The batch's key comes from a fresh random salt, so no nonce repeats after a crash, a copied
//!   directory or a restored machine image. No entry can have the table's nonce.
//! - Each batch, with or without entries, has a tag that authenticates the first [`AT_HEADER_CRC`]
//!   bytes of its header. The table's seal binds the same bytes, so a header cannot be moved to
//!   another table.
//! - A batch names the chain that it belongs to and its predecessor in it, but nothing of the ring that
//!   holds it: every machine stores the same bytes.
//! - The checksum covers ciphertext, so a batch can be verified without a key.

use super::entry::{ENTRY_BYTES, EntryKind, EntryRow};
use super::header::{AT_OWN_FIELDS, HeaderFormat, SharedFields, put_algorithm};
use super::{FormatError, part, put};
use block::env::IoBuffer;
use block::seal::{Algorithm, SALT_BYTES, SealKey, TAG_BYTES};
use block::units::{array_at, crc32c_parts, u32_at};
use block::{Epoch, Lsn};

/// Batches start and end at multiples of this many bytes.
pub(crate) const BATCH_ALIGN_BYTES: usize = 4096;
/// Bytes of the header.
pub(crate) const BATCH_HEADER_BYTES: usize = 256;
/// Format version that this program writes.
pub(crate) const VERSION: u16 = 3;
/// Nonce of the table; entries count from 0 and are fewer than 2^32.
const TABLE_NONCE: u64 = u64::MAX;
/// Nonce of the header's tag.
const HEADER_NONCE: u64 = u64::MAX - 1;
/// Purpose of the derived key; see [`block::seal::PoolKey::derive`].
pub(crate) const KEY_PURPOSE: &str = "log batch";

// The fields before offset 40, except the flags, are those of format/header.rs.
const AT_FLAGS: usize = 11; //              u8, see FLAG_*
const AT_CHAIN: usize = 40; //              [u8; 16] random, made with the first log of the pool
const AT_OPEN: usize = 56; //               [u8; 16] random, one for each time the log was opened
const AT_BOOT: usize = 72; //               [u8; 16] the writer's kernel boot id
const AT_EPOCH: usize = 88; //              u64, never 0
const AT_SEQUENCE: usize = 96; //           u64, dense over the chain, first is 1
const AT_CONFIGURATION: usize = 104; //     u64, number of the manifest link with the members, or 0
const AT_FIRST_LSN: usize = 112; //         u64, LSN of the first entry, or that the next would have
const AT_DURABLE_LSN: usize = 120; //       u64, on the writer's stable storage
const AT_COMMIT_LSN: usize = 128; //        u64, on stable storage of a quorum
const AT_TRIM_LSN: usize = 136; //          u64, destaged when this was written
const AT_ENTRY_COUNT: usize = 144; //       u32
const AT_BATCH_BYTES: usize = 148; //       u32, all of it, a multiple of 4096
const AT_PAYLOAD_BYTES: usize = 152; //     u32, sealed payloads
const AT_PREVIOUS_CHECKSUM: usize = 156; // u32, of the previous batch, 0 in the first
const AT_PREVIOUS_EPOCH: usize = 160; //    u64, of the previous batch, 0 in the first
const AT_PREVIOUS_OPEN: usize = 168; //     [u8; 16] of the previous batch, 0 in the first
const AT_SALT: usize = 184; //              [u8; 16]
const AT_ZERO: usize = 200; //              32 zero bytes
const AT_HEADER_CRC: usize = 232; //        u32, CRC-32C of bytes 0..232
const AT_CRC: usize = 236; //               u32, CRC-32C of bytes 0..236 and all bytes from 240
const AT_TAG: usize = 240; //               [u8; 16] authenticates bytes 0..232
const _: () = assert!(AT_CHAIN == AT_OWN_FIELDS);
const _: () = assert!(AT_TAG + TAG_BYTES == BATCH_HEADER_BYTES && AT_CRC + 4 == AT_TAG);

/// First batch after an open; its open id differs from that of the previous batch.
const FLAG_OPENING: u8 = 1;
/// Last batch of an orderly close: everything before it is on stable storage.
const FLAG_CLEAN: u8 = 2;
/// From here on writes may be acknowledged before they are on stable storage.
const FLAG_ACKS_BEFORE_SYNC: u8 = 4;
/// An earlier run may have lost acknowledged entries, and the owner has not dealt with that yet.
const FLAG_UNSETTLED: u8 = 8;
/// Incompatible feature: the batch has entries about snapshots.
const FEATURE_SNAPSHOTS: u32 = 1;
const FLAGS_KNOWN: u8 = FLAG_OPENING | FLAG_CLEAN | FLAG_ACKS_BEFORE_SYNC | FLAG_UNSETTLED;

const HEADER: HeaderFormat = HeaderFormat {
    magic: b"SPDLBTCH",
    bytes: BATCH_HEADER_BYTES,
    version: VERSION,
    incompatible_known: FEATURE_SNAPSHOTS,
    at_crc: AT_HEADER_CRC,
};

/// The header of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchHeader {
    pub(crate) algorithm: Algorithm,
    /// First batch of an open log: starts a chain with its own open id.
    pub(crate) is_opening: bool,
    /// Last batch of an orderly close.
    pub(crate) is_clean: bool,
    /// Acknowledgements may run ahead of stable storage from this batch on.
    pub(crate) acks_before_sync: bool,
    /// Whether a possible loss of an earlier run has been dealt with.
    pub(crate) is_settled: bool,
    /// Whether it has entries about snapshots, which earlier programs do not know.
    pub(crate) has_snapshots: bool,
    pub(crate) pool: [u8; 16],
    /// Identity of the chain of batches, on every machine that holds it.
    pub(crate) chain: [u8; 16],
    pub(crate) open: [u8; 16],
    pub(crate) boot: [u8; 16],
    pub(crate) epoch: Epoch,
    pub(crate) sequence: u64,
    /// Number of the manifest link whose members and quorum the writer held; 0 without members.
    pub(crate) configuration: u64,
    pub(crate) first_lsn: Lsn,
    /// Newest entry on the writer's own stable storage.
    pub(crate) durable_lsn: Lsn,
    /// Newest entry on stable storage of a quorum.
    pub(crate) commit_lsn: Lsn,
    pub(crate) trim_lsn: Lsn,
    pub(crate) entry_count: u32,
    pub(crate) batch_bytes: u32,
    pub(crate) payload_bytes: u32,
    pub(crate) previous: Predecessor,
    pub(crate) salt: [u8; SALT_BYTES],
}

/// The names by which a batch refers to the batch before it. All are zero in the first batch of a
/// chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Predecessor {
    pub(crate) epoch: Epoch,
    pub(crate) open: [u8; 16],
    pub(crate) checksum: u32,
}

impl Predecessor {
    /// Returns the names of a batch whose checksum is `checksum`.
    pub(crate) fn of(header: &BatchHeader, checksum: u32) -> Predecessor {
        Predecessor { epoch: header.epoch, open: header.open, checksum }
    }

    /// Returns whether the names could be those of a batch, or are those of no batch.
    fn is_sane(&self) -> bool {
        self.epoch.0 != 0 || *self == Predecessor::default()
    }
}

/// Returns the bytes of a batch of `entry_count` entries with `payload_bytes` of sealed payloads;
/// `None` if the header cannot express them.
pub(crate) fn batch_bytes(entry_count: usize, payload_bytes: usize) -> Option<usize> {
    let table = table_bytes(entry_count)?;
    let used = BATCH_HEADER_BYTES.checked_add(table)?.checked_add(payload_bytes)?;
    let padded = used.checked_next_multiple_of(BATCH_ALIGN_BYTES)?;
    u32::try_from(padded).ok().map(|_| padded)
}

/// Returns the bytes of the sealed table: 0 without entries.
fn table_bytes(entry_count: usize) -> Option<usize> {
    if entry_count == 0 {
        return Some(0);
    }
    entry_count.checked_mul(ENTRY_BYTES)?.checked_add(TAG_BYTES)
}

impl BatchHeader {
    /// Returns the LSN of the entry after this batch.
    pub(crate) fn next_lsn(&self) -> Lsn {
        Lsn(self.first_lsn.0.saturating_add(u64::from(self.entry_count)))
    }

    /// Returns the LSN of the last entry up to and including this batch.
    pub(crate) fn last_lsn(&self) -> Lsn {
        Lsn(self.next_lsn().0.saturating_sub(1))
    }

    /// Returns the offset of the payload area in the batch.
    pub(crate) fn payload_at(&self) -> Option<usize> {
        let count = usize::try_from(self.entry_count).ok()?;
        BATCH_HEADER_BYTES.checked_add(table_bytes(count)?)
    }

    fn encode(&self) -> [u8; BATCH_HEADER_BYTES] {
        let mut bytes = [0; BATCH_HEADER_BYTES];
        let flag = |is_set, bit| if is_set { bit } else { 0 };
        let flags = flag(self.is_opening, FLAG_OPENING)
            | flag(self.is_clean, FLAG_CLEAN)
            | flag(self.acks_before_sync, FLAG_ACKS_BEFORE_SYNC)
            | flag(!self.is_settled, FLAG_UNSETTLED);
        let incompatible = if self.has_snapshots { FEATURE_SNAPSHOTS } else { 0 };
        HEADER.begin(&mut bytes, SharedFields { incompatible, pool: self.pool });
        put_algorithm(&mut bytes, self.algorithm);
        put(&mut bytes, AT_FLAGS, &[flags]);
        put(&mut bytes, AT_CHAIN, &self.chain);
        put(&mut bytes, AT_OPEN, &self.open);
        put(&mut bytes, AT_BOOT, &self.boot);
        put(&mut bytes, AT_EPOCH, &self.epoch.0.to_le_bytes());
        put(&mut bytes, AT_SEQUENCE, &self.sequence.to_le_bytes());
        put(&mut bytes, AT_CONFIGURATION, &self.configuration.to_le_bytes());
        put(&mut bytes, AT_FIRST_LSN, &self.first_lsn.0.to_le_bytes());
        put(&mut bytes, AT_DURABLE_LSN, &self.durable_lsn.0.to_le_bytes());
        put(&mut bytes, AT_COMMIT_LSN, &self.commit_lsn.0.to_le_bytes());
        put(&mut bytes, AT_TRIM_LSN, &self.trim_lsn.0.to_le_bytes());
        put(&mut bytes, AT_ENTRY_COUNT, &self.entry_count.to_le_bytes());
        put(&mut bytes, AT_BATCH_BYTES, &self.batch_bytes.to_le_bytes());
        put(&mut bytes, AT_PAYLOAD_BYTES, &self.payload_bytes.to_le_bytes());
        put(&mut bytes, AT_PREVIOUS_CHECKSUM, &self.previous.checksum.to_le_bytes());
        put(&mut bytes, AT_PREVIOUS_EPOCH, &self.previous.epoch.0.to_le_bytes());
        put(&mut bytes, AT_PREVIOUS_OPEN, &self.previous.open);
        put(&mut bytes, AT_SALT, &self.salt);
        HEADER.finish(&mut bytes);
        bytes
    }

    /// Reads a header. Verifies the header's checksum but not the batch's.
    pub(crate) fn decode(bytes: &[u8]) -> Result<BatchHeader, FormatError> {
        let header = HEADER.open(bytes)?;
        let SharedFields { incompatible, pool } = header.fields;
        let flags = header.u8(AT_FLAGS)?;
        let found = BatchHeader {
            algorithm: header.algorithm()?,
            is_opening: flags & FLAG_OPENING != 0,
            is_clean: flags & FLAG_CLEAN != 0,
            acks_before_sync: flags & FLAG_ACKS_BEFORE_SYNC != 0,
            is_settled: flags & FLAG_UNSETTLED == 0,
            has_snapshots: incompatible & FEATURE_SNAPSHOTS != 0,
            pool,
            chain: header.id(AT_CHAIN)?,
            open: header.id(AT_OPEN)?,
            boot: header.id(AT_BOOT)?,
            epoch: Epoch(header.u64(AT_EPOCH)?),
            sequence: header.u64(AT_SEQUENCE)?,
            configuration: header.u64(AT_CONFIGURATION)?,
            first_lsn: Lsn(header.u64(AT_FIRST_LSN)?),
            durable_lsn: Lsn(header.u64(AT_DURABLE_LSN)?),
            commit_lsn: Lsn(header.u64(AT_COMMIT_LSN)?),
            trim_lsn: Lsn(header.u64(AT_TRIM_LSN)?),
            entry_count: header.u32(AT_ENTRY_COUNT)?,
            batch_bytes: header.u32(AT_BATCH_BYTES)?,
            payload_bytes: header.u32(AT_PAYLOAD_BYTES)?,
            previous: Predecessor {
                epoch: Epoch(header.u64(AT_PREVIOUS_EPOCH)?),
                open: header.id(AT_PREVIOUS_OPEN)?,
                checksum: header.u32(AT_PREVIOUS_CHECKSUM)?,
            },
            salt: header.id(AT_SALT)?,
        };
        let is_sane = flags & !FLAGS_KNOWN == 0
            && found.epoch.0 != 0
            && found.sequence != 0
            && found.first_lsn.0 != 0
            && found.durable_lsn < found.first_lsn
            && found.commit_lsn < found.first_lsn
            && found.trim_lsn < found.first_lsn
            && found.previous.is_sane()
            && found.previous.epoch <= found.epoch
            && header.is_zero(AT_ZERO..AT_HEADER_CRC)
            && found.first_lsn.0.checked_add(u64::from(found.entry_count)).is_some()
            && (found.entry_count != 0 || found.payload_bytes == 0)
            && found.expected_bytes() == usize::try_from(found.batch_bytes).ok();
        if is_sane { Ok(found) } else { Err(FormatError::Range) }
    }

    fn expected_bytes(&self) -> Option<usize> {
        let entry_count = usize::try_from(self.entry_count).ok()?;
        batch_bytes(entry_count, usize::try_from(self.payload_bytes).ok()?)
    }
}

/// Lays out a batch in `buffer` and returns its checksum. Fills in `header.batch_bytes`,
/// `payload_bytes`, `entry_count` and `has_snapshots`, and the payload offsets of the rows. `rows`
/// and `payloads` run in parallel.
pub(crate) fn encode<'a>(
    header: &mut BatchHeader,
    rows: &mut [EntryRow],
    payloads: impl Iterator<Item = &'a [u8]>,
    key: &SealKey,
    buffer: &mut IoBuffer,
) -> Option<u32> {
    let mut payload_bytes = 0usize;
    for row in rows.iter_mut() {
        row.payload_offset = u32::try_from(payload_bytes).ok()?;
        payload_bytes = payload_bytes.checked_add(row.sealed_bytes())?;
    }
    let total = batch_bytes(rows.len(), payload_bytes)?;
    header.entry_count = u32::try_from(rows.len()).ok()?;
    header.payload_bytes = u32::try_from(payload_bytes).ok()?;
    header.batch_bytes = u32::try_from(total).ok()?;
    header.has_snapshots = rows.iter().any(|row| row.kind == EntryKind::Snapshot);
    let mut head = header.encode();
    let tag = key.seal(HEADER_NONCE, head.get(..AT_HEADER_CRC)?, &mut []);
    put(&mut head, AT_TAG, &tag);
    buffer.reset(total);
    buffer.push(&head);
    if !rows.is_empty() {
        for row in rows.iter() {
            buffer.push(&row.encode());
        }
        let table = buffer.as_mut_slice().get_mut(BATCH_HEADER_BYTES..)?;
        let tag = key.seal(TABLE_NONCE, head.get(..AT_HEADER_CRC)?, table);
        buffer.push(&tag);
    }
    let mut lsn = header.first_lsn;
    for ((index, row), payload) in (0u64..).zip(rows.iter()).zip(payloads) {
        if !payload.is_empty() {
            let at = buffer.len();
            buffer.push(payload);
            let sealed = buffer.as_mut_slice().get_mut(at..)?;
            let tag = key.seal(index, &row.associated(lsn), sealed);
            buffer.push(&tag);
        }
        lsn = lsn.next();
    }
    buffer.pad_to(total);
    let checksum = checksum(buffer.as_slice())?;
    put(buffer.as_mut_slice(), AT_CRC, &checksum.to_le_bytes());
    Some(checksum)
}

fn checksum(batch: &[u8]) -> Option<u32> {
    Some(crc32c_parts(&[batch.get(..AT_CRC)?, batch.get(AT_TAG..)?]))
}

/// Verifies all of a batch whose header was decoded from the same bytes; returns its checksum,
/// which the next batch names. Needs no key.
pub(crate) fn verify(header: &BatchHeader, bytes: &[u8]) -> Result<u32, FormatError> {
    let len = usize::try_from(header.batch_bytes).map_err(|_| FormatError::Range)?;
    let batch = part(bytes, 0, len)?;
    let stored = u32_at(batch, AT_CRC).ok_or(FormatError::Short)?;
    if checksum(batch) == Some(stored) { Ok(stored) } else { Err(FormatError::Checksum) }
}

/// Verifies that the holder of the key wrote the header at the start of `bytes`.
pub(crate) fn authenticate(bytes: &[u8], key: &SealKey) -> Result<(), FormatError> {
    let mut tag = array_at::<TAG_BYTES>(bytes, AT_TAG).ok_or(FormatError::Short)?;
    let opened = key.open(HEADER_NONCE, part(bytes, 0, AT_HEADER_CRC)?, &mut tag);
    opened.map(|_| ()).map_err(|_| FormatError::Seal)
}

/// Opens the entry table of a verified batch.
pub(crate) fn open_table(
    header: &BatchHeader,
    bytes: &[u8],
    key: &SealKey,
) -> Result<Vec<EntryRow>, FormatError> {
    let count = usize::try_from(header.entry_count).map_err(|_| FormatError::Range)?;
    let len = table_bytes(count).ok_or(FormatError::Range)?;
    if len == 0 {
        return Ok(Vec::new());
    }
    let mut table = part(bytes, BATCH_HEADER_BYTES, len)?.to_vec();
    let table = key
        .open(TABLE_NONCE, part(bytes, 0, AT_HEADER_CRC)?, &mut table)
        .map_err(|_| FormatError::Seal)?;
    let mut rows = Vec::with_capacity(count);
    let mut expected_offset = 0usize;
    for at in (0..table.len()).step_by(ENTRY_BYTES) {
        let row = EntryRow::decode(table, at)?;
        if usize::try_from(row.payload_offset) != Ok(expected_offset) {
            return Err(FormatError::Range);
        }
        expected_offset =
            expected_offset.checked_add(row.sealed_bytes()).ok_or(FormatError::Range)?;
        rows.push(row);
    }
    if rows.len() != count || u32::try_from(expected_offset) != Ok(header.payload_bytes) {
        return Err(FormatError::Range);
    }
    Ok(rows)
}

/// Opens one payload in place, given exactly its sealed bytes.
pub(crate) fn open_payload<'a>(
    row: &EntryRow,
    lsn: Lsn,
    index: u32,
    key: &SealKey,
    sealed: &'a mut [u8],
) -> Result<&'a mut [u8], FormatError> {
    if sealed.len() != row.sealed_bytes() {
        return Err(FormatError::Short);
    }
    if sealed.is_empty() {
        return Ok(sealed);
    }
    key.open(u64::from(index), &row.associated(lsn), sealed)
        .map(|bytes| &mut *bytes)
        .map_err(|_| FormatError::Seal)
}
