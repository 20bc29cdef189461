//! The places of batches in a ring, kept sparsely, and the reading of consecutive batches from them.
//!
//! Invariants:
//! - The files are in the order of their batches, and the batches have consecutive sequences.
//! - Memory holds a place for each [`CHECKPOINT_BYTES`] of the ring, and one for each file. A walk over
//!   headers finds the batches in between.
//! - A batch that is read is verified: its header, its checksum, its pool and chain, its sequence, and
//!   that it follows the one before it. So a reader that races with the writer of the ring gets an
//!   error, never other bytes.

use crate::format::FormatError;
use crate::format::batch::{self, BATCH_HEADER_BYTES, BatchHeader};
use crate::format::succession;
use crate::ring::walk::{At, FIRST_AT};
use block::env::DiskReader;
use block::{Error, ErrorKind, Lsn, Position, Result};
use bytes::Bytes;
use std::collections::VecDeque;

/// Bytes of a file between two places that are kept. Chosen by hand: a walk from one to the next reads
/// at most 64 headers.
const CHECKPOINT_BYTES: u64 = 256 << 10;

/// The place of a batch in its file.
#[derive(Clone, Copy, Debug)]
struct Checkpoint {
    sequence: u64,
    offset: u64,
}

/// The batches in one file.
#[derive(Clone, Debug)]
struct FilePlaces {
    slot: u32,
    /// Position of the batch before the first one.
    before: Position,
    /// Ascending; the first one is that of the first batch.
    checkpoints: Vec<Checkpoint>,
    last_sequence: u64,
    /// Newest entry in the file, or in an earlier one.
    last_lsn: Lsn,
    /// Offset behind the last batch.
    end: u64,
}

/// The batches in a ring, oldest first.
#[derive(Clone, Debug, Default)]
pub(crate) struct BatchPlaces {
    files: VecDeque<FilePlaces>,
}

/// The identity of the batches that a reader accepts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChainId {
    pub(crate) pool: [u8; 16],
    pub(crate) chain: [u8; 16],
}

/// A batch that was read and verified.
#[derive(Clone, Debug)]
pub(crate) struct FoundBatch {
    pub(crate) header: BatchHeader,
    pub(crate) checksum: u32,
    pub(crate) at: At,
    /// All of its bytes.
    pub(crate) bytes: Bytes,
}

impl FoundBatch {
    /// Returns its place in the history of the pool.
    pub(crate) fn position(&self) -> Position {
        Position { epoch: self.header.epoch, sequence: self.header.sequence }
    }
}

impl BatchPlaces {
    /// Adds the batch at `at`, which follows the newest one.
    pub(crate) fn push(&mut self, at: At, header: &BatchHeader) {
        let sequence = header.sequence;
        if self.files.back().is_none_or(|file| file.slot != at.slot) {
            self.files.push_back(FilePlaces {
                slot: at.slot,
                before: Position { epoch: header.previous.epoch, sequence: sequence - 1 },
                checkpoints: vec![Checkpoint { sequence, offset: at.offset }],
                last_sequence: sequence,
                last_lsn: header.last_lsn(),
                end: at.offset,
            });
        }
        let file = self.files.back_mut().expect("pushed above");
        let newest = file.checkpoints.last().expect("a file has one");
        if at.offset >= newest.offset + CHECKPOINT_BYTES {
            file.checkpoints.push(Checkpoint { sequence, offset: at.offset });
        }
        file.last_sequence = sequence;
        file.last_lsn = header.last_lsn();
        file.end = at.offset + u64::from(header.batch_bytes);
    }

    /// Drops the oldest files whose entries are all at or below `trim_lsn`, but never the newest file.
    pub(crate) fn release(&mut self, trim_lsn: Lsn) {
        self.release_up_to(trim_lsn, u64::MAX);
    }

    /// Drops the oldest files whose entries are all at or below `trim_lsn` and whose batches are all at or
    /// below the sequence `last`, but never the newest file.
    pub(crate) fn release_up_to(&mut self, trim_lsn: Lsn, last: u64) {
        let is_released =
            |file: &FilePlaces| file.last_lsn <= trim_lsn && file.last_sequence <= last;
        while self.files.len() > 1 && is_released(&self.files[0]) {
            self.files.pop_front();
        }
    }

    /// Drops the batches behind `kept`, which is among them.
    pub(crate) fn cut_behind(&mut self, kept: &FoundBatch) {
        let sequence = kept.header.sequence;
        self.files.retain(|file| file.before.sequence < sequence);
        let Some(file) = self.files.back_mut() else { return };
        file.checkpoints.retain(|checkpoint| checkpoint.sequence <= sequence);
        file.last_sequence = sequence;
        file.last_lsn = kept.header.last_lsn();
        file.end = kept.at.offset + u64::from(kept.header.batch_bytes);
    }

    /// Drops all batches.
    pub(crate) fn clear(&mut self) {
        self.files.clear();
    }

    /// Returns the position of the batch before the oldest one; `None` without batches.
    pub(crate) fn before(&self) -> Option<Position> {
        self.files.front().map(|file| file.before)
    }

    /// Returns the sequence of the newest batch; `None` without batches.
    pub(crate) fn last_sequence(&self) -> Option<u64> {
        self.files.back().map(|file| file.last_sequence)
    }

    /// Returns whether the file has a batch.
    pub(crate) fn has_file(&self, slot: u32) -> bool {
        self.files.iter().any(|file| file.slot == slot)
    }

    /// Lists the ranges of the files that hold batches with a higher sequence, as slot and offsets.
    /// `from` is the place of the first of them.
    pub(crate) fn ranges_from(&self, from: At) -> Vec<(u32, u64, u64)> {
        let files = self.files.iter().skip_while(|file| file.slot != from.slot);
        let begins = std::iter::once(from.offset).chain(std::iter::repeat(FIRST_AT));
        files.zip(begins).map(|(file, begin)| (file.slot, begin, file.end)).collect()
    }

    /// Returns the bytes of all batches.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.end - file.checkpoints[0].offset).sum()
    }

    /// Reads consecutive batches behind `after`: at most `bytes_max` bytes, but at least one batch. The
    /// list is empty if none is behind.
    ///
    /// # Errors
    /// `NotFound`: the ring no longer holds the batch behind `after`. `Io`: the disk does not read one.
    /// `Corrupt`: the batch behind `after` is not whole, or is another one. A later one ends the list.
    pub(crate) fn read(
        &self,
        reader: &dyn DiskReader,
        chain: ChainId,
        after: u64,
        bytes_max: usize,
    ) -> Result<Vec<FoundBatch>> {
        let mut found: Vec<FoundBatch> = Vec::new();
        let (Some(before), Some(last)) = (self.before(), self.last_sequence()) else {
            return Ok(found);
        };
        if after >= last {
            return Ok(found);
        }
        if after < before.sequence {
            let why = format!(
                "could not read the batch behind {after} of the write log: the batches up to {} were \
                 released",
                before.sequence
            );
            return Err(Error::new(ErrorKind::NotFound, why));
        }
        let mut left = bytes_max;
        for file in self.files.iter().skip_while(|file| file.last_sequence <= after) {
            let source = FileReader { file, reader, chain };
            let first = source.place_behind(after)?;
            match source.read(first, &mut left, &mut found) {
                Ok(is_last) if is_last || left == 0 => break,
                Ok(_) => {}
                // The whole ones before it are not to be taken for damaged, and dropped with it.
                Err(error) if error.kind() == ErrorKind::Corrupt && !found.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }
}

/// Reads batches of one file.
struct FileReader<'a> {
    file: &'a FilePlaces,
    reader: &'a dyn DiskReader,
    chain: ChainId,
}

impl FileReader<'_> {
    /// Returns the place of the first batch of the file behind `after`.
    fn place_behind(&self, after: u64) -> Result<Checkpoint> {
        let sequence = after.saturating_add(1).max(self.file.before.sequence + 1);
        let known = self.file.checkpoints.partition_point(|one| one.sequence <= sequence);
        let mut place = self.file.checkpoints[known - 1];
        while place.sequence < sequence {
            let header = self.header_at(place)?;
            place.offset += u64::from(header.batch_bytes);
            place.sequence += 1;
        }
        Ok(place)
    }

    /// Appends the batches from `first` on to `found` while they fit into `left` bytes, but at least
    /// one in all. Returns whether there was one that did not fit.
    fn read(
        &self,
        first: Checkpoint,
        left: &mut usize,
        found: &mut Vec<FoundBatch>,
    ) -> Result<bool> {
        let in_file = usize::try_from(self.file.end - first.offset).unwrap_or(usize::MAX);
        let mut len = in_file.min(*left);
        if found.is_empty() {
            len = len.max(self.header_at(first)?.batch_bytes as usize);
        }
        let mut bytes = vec![0; len];
        self.read_at(first.offset, &mut bytes)?;
        let (bytes, mut place, mut at) = (Bytes::from(bytes), first, 0);
        while bytes.len() - at >= BATCH_HEADER_BYTES {
            let header = self.header(place, &bytes[at..])?;
            let end = at + header.batch_bytes as usize;
            if end > bytes.len() {
                return Ok(true);
            }
            let batch = self.verified(place, header, bytes.slice(at..end), found.last())?;
            *left = left.saturating_sub(batch.bytes.len());
            found.push(batch);
            place.sequence += 1;
            place.offset += (end - at) as u64;
            at = end;
        }
        Ok(len < in_file)
    }

    /// Verifies a batch whose header is the expected one, behind `before` if that was read too.
    fn verified(
        &self,
        place: Checkpoint,
        header: BatchHeader,
        bytes: Bytes,
        before: Option<&FoundBatch>,
    ) -> Result<FoundBatch> {
        let corrupt = |e| self.corrupt(place.offset, e);
        let checksum = batch::verify(&header, &bytes).map_err(corrupt)?;
        if let Some(before) = before
            && !succession::follows(&before.header, before.checksum, &header)
        {
            return Err(corrupt(FormatError::Range));
        }
        let at = At { slot: self.file.slot, offset: place.offset };
        Ok(FoundBatch { header, checksum, at, bytes })
    }

    fn header_at(&self, place: Checkpoint) -> Result<BatchHeader> {
        let mut bytes = [0; BATCH_HEADER_BYTES];
        self.read_at(place.offset, &mut bytes)?;
        self.header(place, &bytes)
    }

    /// Decodes the header of the batch at `place`, which has to be the one that is expected there.
    fn header(&self, place: Checkpoint, bytes: &[u8]) -> Result<BatchHeader> {
        let corrupt = |e| self.corrupt(place.offset, e);
        let header = BatchHeader::decode(bytes).map_err(corrupt)?;
        let is_expected = (header.pool, header.chain) == (self.chain.pool, self.chain.chain)
            && header.sequence == place.sequence
            && place.offset + u64::from(header.batch_bytes) <= self.file.end;
        if is_expected { Ok(header) } else { Err(corrupt(FormatError::Range)) }
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.reader.read_at(self.file.slot, offset, bytes).map_err(|e| {
            let name = self.reader.name(self.file.slot);
            Error::with_source(ErrorKind::Io, format!("read {name} at offset {offset}"), e)
        })
    }

    fn corrupt(&self, offset: u64, error: FormatError) -> Error {
        let name = self.reader.name(self.file.slot);
        let what = format!("could not read the batch in {name} at offset {offset}");
        Error::with_source(ErrorKind::Corrupt, what, error)
    }
}
