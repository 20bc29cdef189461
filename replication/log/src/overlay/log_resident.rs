//! Payloads that are only in a log file: their place and the key that opens them.
//!
//! Invariants:
//! - Data read back is authenticated; a handle never yields bytes of a later wrap.

use crate::disk::unreadable;
use crate::format::batch;
use crate::format::entry::EntryRow;
use block::buffers::part_of;
use block::env::DiskReader;
use block::seal::{Algorithm, PoolKey, SALT_BYTES};
use block::units::SECTOR_BYTES;
use block::{Error, ErrorKind, Lsn, Result};
use bytes::Bytes;
use std::fmt;
use std::sync::Arc;

/// The place of a batch and the inputs of its key; shared by its entries.
#[derive(Debug)]
pub(crate) struct BatchPlace {
    pub(crate) file: u32,
    /// Byte offset of the payload area in the file.
    pub(crate) payload_at: u64,
    pub(crate) first_lsn: Lsn,
    pub(crate) algorithm: Algorithm,
    pub(crate) salt: [u8; SALT_BYTES],
}

/// A payload, or a part of one, in a log file.
#[derive(Clone)]
pub struct LogResident {
    batch: Arc<BatchPlace>,
    row: EntryRow,
    index: u32,
    skip_sectors: u32,
    sector_count: u32,
}

impl LogResident {
    pub(crate) fn new(batch: Arc<BatchPlace>, row: EntryRow, index: u32) -> Self {
        // Only writes are read back, and a payload of 2^32 sectors fits no file.
        let sector_count = u32::try_from(row.sector_count).unwrap_or(u32::MAX);
        LogResident { batch, row, index, skip_sectors: 0, sector_count }
    }

    pub(crate) fn part(&self, skip: u64, count: u64) -> Self {
        assert!(skip + count <= u64::from(self.sector_count), "part of a log entry");
        let small = |sectors| u32::try_from(sectors).expect("within a payload");
        LogResident {
            batch: Arc::clone(&self.batch),
            row: self.row,
            index: self.index,
            skip_sectors: self.skip_sectors + small(skip),
            sector_count: small(count),
        }
    }

    /// Returns the LSN of the entry.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        Lsn(self.batch.first_lsn.0 + u64::from(self.index))
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        u64::from(self.sector_count) * SECTOR_BYTES
    }

    /// Reads, verifies and decrypts. Blocks.
    pub(crate) fn read(&self, reader: &dyn DiskReader, key: &PoolKey) -> Result<Bytes> {
        let mut sealed = vec![0; self.row.sealed_bytes()];
        let offset = self.batch.payload_at + u64::from(self.row.payload_offset);
        let place = || format!("log {} at offset {offset}", reader.name(self.batch.file));
        let read = reader.read_at(self.batch.file, offset, &mut sealed);
        read.map_err(|e| unreadable::error_of(format!("read {}", place()), e))?;
        let batch_key = key.derive(self.batch.algorithm, &self.batch.salt, batch::KEY_PURPOSE);
        let length =
            batch::open_payload(&self.row, self.lsn(), self.index, &batch_key, &mut sealed)
                .map_err(|e| {
                    let what = format!("open {}, entry {}", place(), self.lsn());
                    Error::with_source(ErrorKind::Corrupt, what, e)
                })?
                .len();
        sealed.truncate(length);
        let from = usize::try_from(u64::from(self.skip_sectors) * SECTOR_BYTES).expect("payload");
        let length = usize::try_from(self.payload_bytes()).expect("payload");
        Ok(part_of(&Bytes::from(sealed), from..from + length))
    }
}

impl fmt::Debug for LogResident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LogResident(lsn {}, +{} sectors)", self.lsn(), self.skip_sectors)
    }
}
