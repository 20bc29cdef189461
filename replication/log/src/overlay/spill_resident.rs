//! Payloads that are only in a spill file: the identity of the file, its place in it, and the key
//! that opens it.
//!
//! Invariants:
//! - Data read back is authenticated.
//! - A handle keeps its file open, so removing the name of the file does not disturb a reader.

use crate::disk::unreadable;
use crate::format::spill::{SPILL_HEADER_BYTES, SpillContent, SpillRow, open_spill_payload};
use block::buffers::part_of;
use block::seal::{SALT_BYTES, SealKey};
use block::units::SECTOR_BYTES;
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use bytes::Bytes;
use std::fmt;
use std::io;
use std::sync::Arc;

/// The identity of one spill file of a volume.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpillFileId {
    /// First LSN of the generations that it stands for.
    pub first_lsn: Lsn,
    /// Last LSN of those generations.
    pub last_lsn: Lsn,
    /// Random, fresh for each file.
    pub id: [u8; SALT_BYTES],
}

impl fmt::Debug for SpillFileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id: String = self.id.iter().map(|byte| format!("{byte:02x}")).collect();
        write!(f, "{}..{}-{id}", self.first_lsn, self.last_lsn)
    }
}

impl SpillFileId {
    /// Returns the name of the file in the log's directory.
    #[must_use]
    pub fn file_name(&self, volume: VolumeId) -> String {
        let id: String = self.id.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("spill-{volume}-{}-{id}.{SPILL_EXTENSION}", self.last_lsn)
    }
}

/// Extension of spill files. It differs from that of ring files, because those are counted by
/// theirs.
pub(crate) const SPILL_EXTENSION: &str = "spill";

/// The source of a spill file's bytes.
pub(crate) trait SpillBytes: Send + Sync + 'static {
    /// Fills `buf` from `offset`. Blocks.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;
}

/// An open spill file.
pub(crate) struct SpillFile {
    pub(crate) name: String,
    pub(crate) id: SpillFileId,
    pub(crate) key: SealKey,
    pub(crate) bytes: Box<dyn SpillBytes>,
}

/// A payload, or a part of one, in a spill file.
#[derive(Clone)]
pub struct SpillResident {
    file: Arc<SpillFile>,
    row: SpillRow,
    index: u32,
    skip_sectors: u32,
    sector_count: u32,
}

impl SpillResident {
    /// Makes the handle of the payload of `row`, which is at `index` in the table of the file.
    pub(crate) fn new(file: Arc<SpillFile>, row: SpillRow, index: u32) -> Self {
        let sector_count = u32::try_from(row.sector_count).expect("a payload is bounded");
        SpillResident { file, row, index, skip_sectors: 0, sector_count }
    }

    pub(crate) fn part(&self, skip: u64, count: u64) -> Self {
        assert!(skip + count <= u64::from(self.sector_count), "part of a spill file's payload");
        let small = |sectors| u32::try_from(sectors).expect("within a payload");
        SpillResident {
            file: Arc::clone(&self.file),
            row: self.row,
            index: self.index,
            skip_sectors: self.skip_sectors + small(skip),
            sector_count: small(count),
        }
    }

    /// Returns the last LSN of the file; the payload is at most this new.
    #[must_use]
    pub fn last_lsn(&self) -> Lsn {
        self.file.id.last_lsn
    }

    /// Reads, verifies and decrypts. Blocks.
    pub(crate) fn read(&self) -> Result<Bytes> {
        let SpillContent::Write { offset } = self.row.content else {
            unreachable!("only a payload is read")
        };
        let offset = SPILL_HEADER_BYTES as u64 + offset;
        let place = || format!("spill file {} at offset {offset}", self.file.name);
        let mut sealed = vec![0; usize::try_from(self.row.sealed_bytes()).expect("a payload")];
        let read = self.file.bytes.read_at(offset, &mut sealed);
        read.map_err(|e| unreadable::error_of(format!("read {}", place()), e))?;
        let length = open_spill_payload(&self.row, self.index, &self.file.key, &mut sealed)
            .map_err(|e| Error::with_source(ErrorKind::Corrupt, format!("open {}", place()), e))?
            .len();
        sealed.truncate(length);
        let bytes_of = |sectors: u32| {
            usize::try_from(u64::from(sectors) * SECTOR_BYTES).expect("within a payload")
        };
        let from = bytes_of(self.skip_sectors);
        Ok(part_of(&Bytes::from(sealed), from..from + bytes_of(self.sector_count)))
    }
}

impl fmt::Debug for SpillResident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SpillResident({}, row {}, +{})", self.file.name, self.index, self.skip_sectors)
    }
}
