//! Writing batches behind the newest one: verification, room, and the writes.
//!
//! Invariants:
//! - The bytes come from another machine. Whatever they are, they are verified as a whole before the
//!   first one is written, and a batch that is refused changes nothing.
//! - Batches with entries leave the end of each file free, and the file behind it, like those of the
//!   owner, so that owners can open a full ring.

use super::{BLOCK_BYTES, FollowerLog, Tail};
use crate::format::FormatError;
use crate::format::batch::{self, BatchHeader};
use crate::format::succession;
use crate::options::{RESERVE_BYTES, batch_bytes_bound};
use crate::ring::walk::{At, FIRST_AT};
use block::{Error, ErrorKind, Lsn, Position, Result};
use bytes::Bytes;

/// Bytes of several batches that are written together. Chosen by hand.
const RUN_BYTES_MAX: u64 = 1 << 20;

/// A batch that was verified.
struct Verified<'a> {
    tail: Tail,
    bytes: &'a [u8],
}

impl Verified<'_> {
    fn has_entries(&self) -> bool {
        self.tail.header.entry_count > 0
    }

    /// Returns the room that the batch needs in a file, with the place that stays free behind it.
    fn room_bytes(&self) -> u64 {
        let reserve = if self.has_entries() { RESERVE_BYTES } else { BLOCK_BYTES };
        u64::from(self.tail.header.batch_bytes) + reserve
    }
}

impl FollowerLog {
    /// Writes batches, each of which follows the one before, behind the newest one. They survive a
    /// crash of the process, and a loss of power after the next [`FollowerLog::sync`].
    ///
    /// # Errors
    /// `Corrupt`: a batch is not whole. `Invalid`: a batch is of another pool or chain, or does not follow
    /// the one before. `Unsupported`: a later program made it. After these errors nothing is written.
    /// `Full`: the ring has no room for a batch, or its files are too short for it; those before it are
    /// written, see [`FollowerLog::tail`]. `Io`: see [`FollowerLog::sync`].
    pub fn write(&mut self, batches: &[Bytes]) -> Result<()> {
        self.files.check()?;
        let verified = self.verify(batches)?;
        let Some(first) = verified.first() else { return Ok(()) };
        self.clear_stale()?;
        if !self.files.is_made() {
            let (mut ring, chain) = ([0; 16], first.tail.header.chain);
            self.random.fill(&mut ring);
            self.files.make_first(ring, chain)?;
        }
        let mut rest = &verified[..];
        while let Some(first) = rest.first() {
            self.make_room(first)?;
            let (run, later) = rest.split_at(self.run_count(rest));
            self.write_run(run)?;
            rest = later;
        }
        self.files.prepare(self.head.slot);
        Ok(())
    }

    fn verify<'a>(&self, batches: &'a [Bytes]) -> Result<Vec<Verified<'a>>> {
        let mut verified: Vec<Verified<'a>> = Vec::with_capacity(batches.len());
        for bytes in batches {
            let before = verified.last().map(|batch| batch.tail).or(self.tail);
            let tail = self.verify_one(before, bytes)?;
            verified.push(Verified { tail, bytes });
        }
        Ok(verified)
    }

    fn verify_one(&self, before: Option<Tail>, bytes: &[u8]) -> Result<Tail> {
        let refuse = |kind, why: &str| {
            let what = format!("could not store the batch behind {}: {why}", self.tail());
            Err(Error::new(kind, what))
        };
        let decoded = BatchHeader::decode(bytes).and_then(|header| {
            let is_exact = usize::try_from(header.batch_bytes) == Ok(bytes.len());
            let checksum = batch::verify(&header, bytes)?;
            if is_exact { Ok(Tail { header, checksum }) } else { Err(FormatError::Range) }
        });
        let tail = match decoded {
            Ok(tail) => tail,
            Err(error) => {
                let kind = match error.is_unsupported() {
                    true => ErrorKind::Unsupported,
                    false => ErrorKind::Corrupt,
                };
                let what = format!("could not store the batch behind {}", self.tail());
                return Err(Error::with_source(kind, what, error));
            }
        };
        let header = &tail.header;
        if header.pool != self.files.shape.pool {
            return refuse(ErrorKind::Invalid, "it belongs to another pool");
        }
        if self.chain().is_some_and(|chain| chain != header.chain) {
            return refuse(
                ErrorKind::Invalid,
                "it belongs to another chain; remove this member's log if the pool began a new one",
            );
        }
        let is_next = match before {
            Some(before) => succession::follows(&before.header, before.checksum, header),
            None => is_first(self.before, header),
        };
        if !is_next && !self.seeded_bugs.successor_not_checked {
            return refuse(ErrorKind::Invalid, "it does not follow it");
        }
        Ok(tail)
    }

    /// Moves the head to a place where the batch fits.
    fn make_room(&mut self, batch: &Verified<'_>) -> Result<()> {
        // Entries that the owner has destaged are in the data tier, whether or not this batch arrives.
        self.places.release(self.released_by(&batch.tail));
        let file_bytes = self.files.shape.file_bytes;
        let bytes_max = batch_bytes_bound(file_bytes) - RESERVE_BYTES;
        if batch.bytes.len() as u64 > bytes_max {
            self.is_full = true;
            let why = format!(
                "could not store the batch behind {}: it has {} bytes, and the files of this ring take at \
                 most {bytes_max}; give the member a ring with files as long as the owner's",
                self.tail(),
                batch.bytes.len()
            );
            return Err(Error::new(ErrorKind::Full, why));
        }
        let (places, head) = (&self.places, self.head.slot);
        let is_live = |slot| slot == head || places.has_file(slot);
        let is_here = self.head.offset + batch.room_bytes() <= file_bytes;
        let slot = if is_here { Some(head) } else { self.files.next_slot(head, is_live) };
        // Also in the head's file: an opening may have begun it, because the ring was full.
        let needs_spare = batch.has_entries() && !self.seeded_bugs.spare_used;
        let Some(slot) = slot.filter(|slot| !needs_spare || self.files.has_spare(*slot, is_live))
        else {
            self.is_full = true;
            let why = format!(
                "could not store the batch behind {}: the ring is full; it has room once the owner has \
                 moved the entries of its oldest file to the data tier",
                self.tail()
            );
            return Err(Error::new(ErrorKind::Full, why));
        };
        self.is_full = false;
        if is_here {
            return Ok(());
        }
        let first = At { slot, offset: FIRST_AT };
        if !self.seeded_bugs.entered_at_once {
            self.files.sync()?;
            if !self.files.is_blank(first)? {
                self.files.clear_header(first)?;
                self.files.sync()?;
            }
        }
        self.head = first;
        self.files.prepare(slot);
        Ok(())
    }

    /// Returns the LSN up to which entries are released once `newest` has arrived.
    fn released_by(&self, newest: &Tail) -> Lsn {
        match self.seeded_bugs.released_early {
            true => newest.header.last_lsn(),
            false => newest.header.trim_lsn,
        }
    }

    /// Returns how many of the batches go into one write at the head, at least one.
    fn run_count(&self, batches: &[Verified<'_>]) -> usize {
        let (mut end, mut run_bytes) = (self.head.offset, 0);
        let first_has_entries = batches.first().is_some_and(Verified::has_entries);
        let fits = |batch: &&Verified<'_>| {
            // There is room for the first one: entries need more.
            if batch.has_entries() && !first_has_entries {
                return false;
            }
            let is_fitting = end + batch.room_bytes() <= self.files.shape.file_bytes;
            end += batch.bytes.len() as u64;
            run_bytes += batch.bytes.len() as u64;
            is_fitting && run_bytes <= RUN_BYTES_MAX
        };
        batches.iter().take_while(fits).count().max(1)
    }

    fn write_run(&mut self, run: &[Verified<'_>]) -> Result<()> {
        let len = run.iter().map(|batch| batch.bytes.len()).sum();
        self.files.write(self.head, len, run.iter().map(|batch| batch.bytes))?;
        for batch in run {
            self.places.push(self.head, &batch.tail.header);
            self.head.offset += batch.bytes.len() as u64;
            self.tail = Some(batch.tail);
        }
        let newest = run.last().expect("at least one").tail;
        self.places.release(self.released_by(&newest));
        Ok(())
    }
}

/// Returns whether a batch follows the position `before`, of a batch that the ring does not have.
fn is_first(before: Position, header: &BatchHeader) -> bool {
    header.sequence.checked_sub(1) == Some(before.sequence) && header.previous.epoch == before.epoch
}
