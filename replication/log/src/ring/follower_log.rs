//! The ring of a member that is not the owner: it stores the owner's batches byte for byte, and needs
//! no key.
//!
//! Invariants:
//! - The batches have consecutive sequences, and each follows the one before it
//!   ([`crate::format::succession`]). Nothing is written before that is verified.
//! - No header above the end of the log is in the ring when a batch is written: a batch that was cut,
//!   or that a crash left behind, cannot become the successor of a later one.
//! - A file is written over only if the newest batch or the owner ([`FollowerLog::release`]) says that
//!   all its entries are destaged, and only after its first batch is durably gone: otherwise an opening after a loss of power could begin in
//!   a file that is half written over.
//! - A file is begun only after all earlier ones are on stable storage: otherwise a loss of power could
//!   leave the later batches without the earlier.
//! - The files are those of an owner's ring: [`crate::Log::open`] reads them with the key, and a ring
//!   that it wrote can be opened here.
//!
//! One thread uses it, and each call blocks until its writes are done. Promises, proofs and the
//! choice of an owner are not its matter.

mod opening;
mod ring_files;
mod writing;

pub use opening::FollowerOpening;

use crate::format::batch::BatchHeader;
use crate::ring::batch_places::{BatchPlaces, ChainId, FoundBatch};
use crate::ring::reads::UnreadablePlace;
use crate::ring::walk::{At, FIRST_AT};
use crate::seeded_bugs::SeededBugs;
use block::env::{IO_ALIGN_BYTES, Random};
use block::{Epoch, Error, ErrorKind, Lsn, Position, Result};
use bytes::Bytes;
use ring_files::RingFiles;
use std::sync::Arc;

/// The batches that were found when the log was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FollowerFound {
    /// Position of the batch before the first one in the ring; [`Position::START`] for an empty log,
    /// also after a reset that no batch followed.
    pub before: Position,
    /// The epochs of the batches, ascending, each with the sequence of its first batch here.
    pub epochs: Vec<(Epoch, u64)>,
    /// Sequence of the newest batch; 0 for an empty log.
    pub last: u64,
    /// Whether the log ends in bytes that are neither a batch nor free space: a torn or unreadable
    /// batch, or later batches without the one between. A log whose cut was interrupted ends so too.
    pub is_end_damaged: bool,
    /// Whether this machine has recorded that a write or sync failed in the run that wrote the newest
    /// batch: an owner on these files, whose log has ended so.
    pub has_failed: bool,
    /// Places that the disk does not read.
    pub unreadable: Vec<UnreadablePlace>,
}

/// The newest batch.
#[derive(Clone, Copy, Debug)]
struct Tail {
    header: BatchHeader,
    checksum: u32,
}

/// Headers above the end of the log, which an earlier process has left.
#[derive(Clone, Debug, Default)]
struct Stale {
    places: Vec<At>,
    /// Those at which an empty log would begin if they were whole. They go last: without them another
    /// one could become the beginning of a log.
    begins: Vec<At>,
}

/// A member's ring; see the head of the file.
pub struct FollowerLog {
    files: RingFiles,
    random: Arc<dyn Random>,
    places: BatchPlaces,
    /// Place of the next batch, unless it does not fit there.
    head: At,
    tail: Option<Tail>,
    /// Position of the batch before the first one of an empty log.
    before: Position,
    stale: Stale,
    is_full: bool,
    seeded_bugs: SeededBugs,
}

impl FollowerLog {
    /// Returns the position of the newest batch. In an empty log it is the one before the first.
    #[must_use]
    pub fn tail(&self) -> Position {
        self.tail.map_or(self.before, |tail| Position {
            epoch: tail.header.epoch,
            sequence: tail.header.sequence,
        })
    }

    /// Returns the position of the batch before the oldest one that the ring holds.
    #[must_use]
    pub fn start(&self) -> Position {
        self.places.before().unwrap_or(self.before)
    }

    /// Returns the identity of the chain of batches; `None` before the first batch was written.
    #[must_use]
    pub fn chain(&self) -> Option<[u8; 16]> {
        self.files.is_made().then_some(self.files.shape.chain)
    }

    /// Returns the bytes of the batches that the ring holds.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.places.used_bytes()
    }

    /// Returns the length of the whole ring in bytes.
    #[must_use]
    pub fn ring_bytes(&self) -> u64 {
        u64::from(self.files.shape.file_count) * self.files.shape.file_bytes
    }

    /// Returns whether the last batch was refused because the ring had no room for it.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// Reads consecutive batches behind `after`: at most `bytes_max` bytes, but at least one batch. The
    /// list is empty if the log has none behind it.
    ///
    /// # Errors
    /// `NotFound`: the ring does not hold the batch behind `after`, which was released. `Corrupt`: that
    /// batch is damaged; a later one ends the list. `Io`: the disk does not read one.
    pub fn read(&self, after: u64, bytes_max: usize) -> Result<Vec<(Position, Bytes)>> {
        let found = self.found(after, bytes_max)?;
        Ok(found.into_iter().map(|batch| (batch.position(), batch.bytes)).collect())
    }

    fn found(&self, after: u64, bytes_max: usize) -> Result<Vec<FoundBatch>> {
        let shape = &self.files.shape;
        let chain = ChainId { pool: shape.pool, chain: shape.chain };
        self.places.read(&*self.files.reader, chain, after, bytes_max)
    }

    /// Puts everything that was written on stable storage. The first call after an opening covers the
    /// batches of earlier processes too.
    ///
    /// # Errors
    /// `Io`: final, like that of a failed write (see [`crate::is_log_failure`]). The member must open
    /// its ring again and treat what was not synced as lost.
    pub fn sync(&mut self) -> Result<()> {
        self.files.check()?;
        if self.seeded_bugs.flush_ignored {
            return Ok(());
        }
        self.files.sync()
    }

    /// Writes the batches behind `sequence` again, with the same bytes at the same places, for the next
    /// sync; also the free space behind the newest one and the beginning of each file without batches,
    /// or the whole ring if the log is empty.
    /// Call it after an opening, with the sequence that is known to be on stable storage: the page
    /// cache may hold batches and cuts that an earlier process could not sync.
    ///
    /// # Errors
    /// Those of [`FollowerLog::read`] and [`FollowerLog::sync`].
    pub fn rewrite(&mut self, sequence: u64) -> Result<()> {
        self.files.check()?;
        if self.seeded_bugs.tail_not_rewritten {
            return Ok(());
        }
        let mut after = sequence.max(self.start().sequence);
        while let Some(batch) = self.found(after, 1)?.pop() {
            let bytes = &batch.bytes[..];
            self.files.write(batch.at, bytes.len(), std::iter::once(bytes))?;
            after = batch.header.sequence;
        }
        if self.tail.is_some() {
            self.files.write_as_read(self.head, self.files.shape.file_bytes)?;
        }
        let free = self.files.made().filter(|slot| !self.places.has_file(*slot));
        for slot in free.collect::<Vec<u32>>() {
            let first = At { slot, offset: FIRST_AT };
            let is_reset = self.tail.is_none();
            let end = if is_reset { self.files.shape.file_bytes } else { FIRST_AT + BLOCK_BYTES };
            self.files.write_as_read(first, end)?;
        }
        Ok(())
    }

    /// Gives the files up whose entries are all destaged: those up to `trim_lsn`, in batches up to the
    /// sequence `last`. The owner says so, whose entries are those of the log up to that batch. The file
    /// of the newest batch stays.
    pub fn release(&mut self, trim_lsn: Lsn, last: u64) {
        self.places.release_up_to(trim_lsn, last);
    }

    /// Drops all batches above `sequence`. They are durably gone when this returns. After a crash in
    /// between, the log has some of them, without a gap.
    ///
    /// # Errors
    /// `Invalid`: the batches up to a higher sequence were released. `Corrupt`: the batch that would be
    /// the newest one is damaged. `Io`: see [`FollowerLog::sync`].
    pub fn cut(&mut self, sequence: u64) -> Result<()> {
        self.files.check()?;
        self.clear_stale()?;
        if sequence >= self.tail().sequence {
            return Ok(());
        }
        let start = self.start();
        if sequence < start.sequence {
            let why = format!(
                "could not cut the write log behind {sequence}: the batches up to {} were released",
                start.sequence
            );
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        if sequence == start.sequence {
            return self.reset(start);
        }
        let kept = self.found(sequence - 1, 1)?.pop().expect("it is above the start");
        let end = At { offset: kept.at.offset + kept.bytes.len() as u64, ..kept.at };
        if !self.seeded_bugs.cut_not_cleared {
            for (slot, from, to) in self.places.ranges_from(end) {
                self.files.zero(slot, from, to)?;
            }
            self.files.sync()?;
        }
        self.places.cut_behind(&kept);
        (self.head, self.is_full) = (end, false);
        self.tail = Some(Tail { header: kept.header, checksum: kept.checksum });
        Ok(())
    }

    /// Drops all batches: the log begins behind `before`, in a new ring. They are gone when this returns,
    /// durably: the files are removed. After a crash in between, the log has all of them. The first batch
    /// that is written records `before`; until then an opening finds an empty log.
    ///
    /// # Errors
    /// `Io`: see [`FollowerLog::sync`].
    pub fn reset(&mut self, before: Position) -> Result<()> {
        self.files.check()?;
        if !self.seeded_bugs.reset_not_cleared {
            self.files.clear()?;
        }
        self.places.clear();
        self.stale = Stale::default();
        self.head = At { slot: 0, offset: FIRST_AT };
        (self.tail, self.before, self.is_full) = (None, before, false);
        Ok(())
    }

    /// Destroys the headers above the end of the log that an earlier process has left.
    fn clear_stale(&mut self) -> Result<()> {
        if self.seeded_bugs.stale_kept {
            return Ok(());
        }
        let Stale { places, begins } = std::mem::take(&mut self.stale);
        for places in [places, begins] {
            let is_any = !places.is_empty();
            for at in places {
                self.files.clear_header(at)?;
            }
            if is_any {
                self.files.sync()?;
            }
        }
        Ok(())
    }
}

/// Bytes that hold the header of a batch. Batches begin at multiples of it.
const BLOCK_BYTES: u64 = IO_ALIGN_BYTES as u64;
