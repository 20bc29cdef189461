//! The options, the identity and the entries that a caller hands to the log.
//!
//! Invariants:
//! - [`LogOptions::check`] refuses options that cannot work; they are never adjusted silently.

use crate::format::entry::{EntryKind, EntryRow};
use crate::format::{batch, file};
use block::seal::{Algorithm, TAG_BYTES};
use block::{Epoch, Error, ErrorKind, Result, VolumeId};
use bytes::Bytes;

/// Files from which on one is kept free for openings, in the ring of a log with several members. In a
/// smaller one the entries would have no second file.
pub(crate) const SPARE_FILES_MIN: usize = 3;

/// How batches reach the log files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoMode {
    /// `pwrite` into the page cache, made durable by `fdatasync`. An acknowledgement that need not
    /// be durable costs no device I/O. The default, measured by `examples/log_bench.rs`.
    #[default]
    Buffered,
    /// `O_DIRECT`: each write is a device I/O, and memory holds no second copy of the log.
    Direct,
}

/// Sizes and limits of a log. All sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogOptions {
    /// Length of the whole ring: a multiple of `file_bytes`, at least two files. An existing ring
    /// keeps its length.
    pub ring_bytes: u64,
    /// Length of one file: a multiple of 4096, at most 2 GiB.
    pub file_bytes: u64,
    /// How batches are written.
    pub io_mode: IoMode,
    /// A batch takes no further entry once it holds this much payload.
    pub batch_bytes_max: usize,
    /// AEAD of batches written from now on; existing batches keep theirs.
    pub algorithm: Algorithm,
    /// Log space after which the log freezes the active generation.
    pub generation_bytes_max: u64,
    /// Payloads kept in memory; further payloads are read back from the log files.
    pub payload_memory_bytes: u64,
    /// Maximum number of extents in the overlay over all generations. Their share of it slows
    /// writers like used log space; see [`LogOptions::slow_from_percent`].
    pub entry_count_max: u64,
    /// Payloads queued and not yet written; `append` waits before it queues more.
    pub queue_bytes_max: u64,
    /// Bytes written since the last sync after which the log starts one unasked.
    pub unsynced_bytes_max: u64,
    /// Part of the ring or of `entry_count_max` in use, in percent, from which writers are slowed.
    pub slow_from_percent: u8,
}

impl Default for LogOptions {
    fn default() -> Self {
        LogOptions {
            ring_bytes: 1 << 30,
            file_bytes: 64 << 20,
            io_mode: IoMode::default(),
            batch_bytes_max: 1 << 20,
            algorithm: Algorithm::default(),
            generation_bytes_max: 128 << 20,
            payload_memory_bytes: 256 << 20,
            entry_count_max: 1 << 20,
            queue_bytes_max: 64 << 20,
            unsynced_bytes_max: 8 << 20,
            slow_from_percent: 50,
        }
    }
}

impl LogOptions {
    /// Refuses options that cannot work.
    ///
    /// # Errors
    /// `Invalid`, naming the option.
    pub fn check(&self) -> Result<()> {
        let refuse = |why: &str| Err(Error::new(ErrorKind::Invalid, format!("log options: {why}")));
        if !self.file_bytes.is_multiple_of(4096) || self.file_bytes < MIN_FILE_BYTES {
            return refuse("file_bytes must be a multiple of 4096 and at least 256 KiB");
        }
        if self.file_bytes > file::FILE_BYTES_MAX {
            return refuse("file_bytes must be at most 2 GiB");
        }
        let file_count = self.ring_bytes / self.file_bytes;
        if !self.ring_bytes.is_multiple_of(self.file_bytes) || file_count < 2 {
            return refuse("ring_bytes must be a multiple of file_bytes and at least two files");
        }
        if file_count > u64::from(file::FILE_COUNT_MAX) {
            return refuse("ring_bytes is more than 65536 files");
        }
        if self.batch_bytes_max == 0 || self.batch_bytes_max > 64 << 20 {
            return refuse("batch_bytes_max must be between 1 and 64 MiB");
        }
        if self.entry_count_max < 64 || self.queue_bytes_max == 0 || self.unsynced_bytes_max == 0 {
            return refuse("entry_count_max, queue_bytes_max or unsynced_bytes_max is too small");
        }
        if self.slow_from_percent > 99 {
            return refuse("slow_from_percent must be at most 99");
        }
        if self.generation_bytes_max == 0 || self.generation_bytes_max > self.ring_bytes / 2 {
            return refuse("generation_bytes_max must be at most half of ring_bytes");
        }
        Ok(())
    }

    /// Number of files of a new ring of a log with several members, one of which is kept for openings.
    pub(crate) fn file_count_of_member(&self) -> u32 {
        self.file_count().max(u32::try_from(SPARE_FILES_MIN).expect("a few"))
    }

    pub(crate) fn file_count(&self) -> u32 {
        u32::try_from(self.ring_bytes / self.file_bytes).expect("checked")
    }
}

/// Smallest file: the header, the reserve for batches without entries, and room for entries.
const MIN_FILE_BYTES: u64 = 256 << 10;

/// Room at the end of each file that only batches without entries may use, so that a full log can
/// still be opened and closed. Chosen by hand: sixteen such batches.
pub(crate) const RESERVE_BYTES: u64 = 64 << 10;

/// Largest payload of one entry in a ring of such files: half of the room in a file, at most 32
/// MiB.
pub(crate) fn payload_bytes_max(file_bytes: u64) -> usize {
    usize::try_from(((file_bytes - RESERVE_BYTES - 4096) / 2).min(32 << 20)).expect("32 MiB")
}

/// Room in a file, in bytes, that suffices for any batch, so that none moves on to the next file.
/// The largest batch is one entry of [`payload_bytes_max`] with header, table, tags and padding,
/// for which 8 KiB are enough.
pub(crate) fn batch_bytes_bound(file_bytes: u64) -> u64 {
    payload_bytes_max(file_bytes) as u64 + (8 << 10) + RESERVE_BYTES
}

/// The owner that writes the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogIdentity {
    /// The pool that owns the log.
    pub pool: [u8; 16],
    /// This owner's term; a log written in a higher epoch is refused.
    pub epoch: Epoch,
    /// The kernel's boot id, which tells a restart from a reboot.
    pub boot_id: [u8; 16],
    /// Highest epoch known to have been served with this log; 0 if none is known. A log that ends
    /// in a lower epoch is an older copy and is refused.
    pub served_epoch: Epoch,
    /// Number of the link of the pool's manifest whose members and quorum the owner holds; 0 for a
    /// pool without members.
    pub configuration: u64,
}

impl LogIdentity {
    /// Returns the boot id of the running kernel.
    ///
    /// # Errors
    /// `Io` if the kernel does not tell.
    pub fn kernel_boot_id() -> Result<[u8; 16]> {
        const PATH: &str = "/proc/sys/kernel/random/boot_id";
        let text = std::fs::read_to_string(PATH)
            .map_err(|e| Error::with_source(ErrorKind::Io, format!("read {PATH}"), e))?;
        let digits: Vec<u8> =
            text.chars().filter_map(|c| c.to_digit(16)).map(|d| d as u8).collect();
        let mut id = [0; 16];
        if digits.len() != 32 {
            return Err(Error::new(ErrorKind::Io, format!("read {PATH}: not a UUID")));
        }
        for (byte, pair) in id.iter_mut().zip(digits.chunks(2)) {
            *byte = pair[0] << 4 | pair[1];
        }
        Ok(id)
    }
}

/// An entry to be logged.
#[derive(Clone, Debug)]
pub struct NewEntry {
    /// The volume; 0 only for a marker or an entry about snapshots.
    pub volume: VolumeId,
    /// The kind of change.
    pub kind: EntryKind,
    /// First sector of the range; 0 if the kind has no range.
    pub start_sector: u64,
    /// Sectors of the range, in a write as many as the payload has; 0 if the kind has no range.
    pub sector_count: u64,
    /// Data of a write, a volume's record, or the contents of an entry about snapshots; empty
    /// otherwise. The overlay keeps the payload of a write and counts its length, so the payload
    /// must not share its memory with other buffers.
    pub payload: Bytes,
}

impl NewEntry {
    /// Makes an entry that only marks a place in the order.
    pub(crate) fn marker() -> NewEntry {
        NewEntry {
            volume: VolumeId(0),
            kind: EntryKind::Marker,
            start_sector: 0,
            sector_count: 0,
            payload: Bytes::new(),
        }
    }

    pub(crate) fn row(&self) -> Option<EntryRow> {
        let row = EntryRow {
            volume: self.volume,
            kind: self.kind,
            start_sector: self.start_sector,
            sector_count: self.sector_count,
            payload_offset: 0,
            payload_bytes: u32::try_from(self.payload.len()).ok()?,
        };
        row.is_sane().then_some(row)
    }

    /// Bytes that the entry adds to a batch, not counting the batch's own header.
    pub(crate) fn batch_bytes(&self) -> usize {
        crate::format::entry::ENTRY_BYTES + TAG_BYTES + self.payload.len()
    }
}

/// Bytes of a batch that holds exactly these entries.
pub(crate) fn batch_bytes(entry_count: usize, sealed_payload_bytes: usize) -> usize {
    batch::batch_bytes(entry_count, sealed_payload_bytes).expect("a batch is at most a file")
}

/// The point at which an append is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The writes of this entry and of every earlier one to the log file have completed: safe if
    /// the process crashes.
    Written,
    /// The entry is also on stable storage: safe if the machine loses power.
    Durable,
}
