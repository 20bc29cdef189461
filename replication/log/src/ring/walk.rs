//! Walking the ring: batch by batch, from a possible start to the place where nothing follows.
//! Recovery and [`crate::find_superseded`] share this walk.
//!
//! Invariants:
//! - A batch is taken only if it follows the previous one ([`crate::format::succession`]) and is whole.
//! - Nothing is written, and no key is needed.

use crate::format::FormatError;
use crate::format::batch::{self, BATCH_HEADER_BYTES, BatchHeader};
use crate::format::file::FILE_HEADER_BYTES;
use crate::format::succession;
use crate::options::batch_bytes_bound;
use crate::ring::contents::LogContents;
use crate::ring::layout::LiveFile;
use crate::ring::reads::Reads;
use crate::seeded_bugs::SeededBugs;
use block::{Epoch, Error, ErrorKind, Lsn, Position, Result};
use std::collections::VecDeque;

pub(crate) const FIRST_AT: u64 = FILE_HEADER_BYTES as u64;
/// Bytes read at a time when the rest of the ring is searched. Chosen by hand.
const SEARCH_BYTES: usize = 4 << 20;

/// The ring as its file headers describe it.
#[derive(Clone, Debug)]
pub(crate) struct Ring {
    pub(crate) id: [u8; 16],
    /// The chain of batches that it holds.
    pub(crate) chain: [u8; 16],
    pub(crate) file_count: u32,
    pub(crate) file_bytes: u64,
    pub(crate) is_there: Vec<bool>,
}

/// A place in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct At {
    pub(crate) slot: u32,
    pub(crate) offset: u64,
}

/// A batch that the walk has taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) header: BatchHeader,
    pub(crate) checksum: u32,
    pub(crate) at: At,
    pub(crate) end_position: u64,
}

impl Taken {
    /// Returns its place in the history of the pool.
    pub(crate) fn position(&self) -> Position {
        Position { epoch: self.header.epoch, sequence: self.header.sequence }
    }

    /// Returns the log position of its first byte.
    pub(crate) fn begin_position(&self) -> u64 {
        self.end_position - u64::from(self.header.batch_bytes)
    }
}

/// Totals over the headers of the ring, including batches that were not taken.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    /// Highest LSN that any batch declares to be on stable storage.
    pub(crate) durable_lsn: Lsn,
    /// Highest LSN that any batch declares to be in the data tier.
    pub(crate) trim_lsn: Lsn,
    pub(crate) sequence: u64,
    /// Epoch of the batch with that sequence, which may lie outside the log's chain.
    pub(crate) newest_epoch: Epoch,
    pub(crate) epoch: Epoch,
    /// Contents beyond the LSN that the walk was given.
    pub(crate) contents: LogContents,
}

impl Seen {
    fn add(&mut self, header: &BatchHeader) {
        self.durable_lsn = self.durable_lsn.max(header.durable_lsn);
        self.trim_lsn = self.trim_lsn.max(header.trim_lsn);
        if header.sequence > self.sequence {
            (self.sequence, self.newest_epoch) = (header.sequence, header.epoch);
        }
        self.epoch = self.epoch.max(header.epoch);
        self.contents.add(header);
    }
}

pub(crate) struct Walk<'a> {
    pub(crate) reads: &'a Reads<'a>,
    pool: [u8; 16],
    pub(crate) ring: Ring,
    seeded_bugs: SeededBugs,
    /// Contents of the file that is being walked.
    loaded: Option<(u32, Vec<u8>)>,
    pub(crate) newest: Option<Taken>,
    /// Files that the walk has entered, oldest first.
    pub(crate) live: VecDeque<LiveFile>,
    /// Bytes of log up to the place that the walk has reached.
    pub(crate) position: u64,
    /// The expected place of the next batch.
    pub(crate) end_at: At,
    /// The reason why the batch there is not the next one.
    pub(crate) end: Option<FormatError>,
    /// The place of that batch, which may be in the next file.
    pub(crate) bad_at: At,
    /// An unreadable place that may hold the next batch.
    pub(crate) unknown_at: Option<At>,
    pub(crate) seen: Seen,
}

impl<'a> Walk<'a> {
    /// Makes a walk that has not begun. `stored` is the LSN up to which the data tier holds
    /// everything.
    pub(crate) fn new(
        reads: &'a Reads<'a>,
        pool: [u8; 16],
        ring: Ring,
        stored: Lsn,
        seeded_bugs: SeededBugs,
    ) -> Self {
        Walk {
            reads,
            pool,
            ring,
            seeded_bugs,
            loaded: None,
            newest: None,
            live: VecDeque::new(),
            position: FIRST_AT,
            end_at: At { slot: 0, offset: FIRST_AT },
            end: None,
            bad_at: At { slot: 0, offset: FIRST_AT },
            unknown_at: None,
            seen: Seen { contents: LogContents::beyond(stored), ..Seen::default() },
        }
    }

    /// Returns the newest entry of the batches taken.
    pub(crate) fn last_lsn(&self) -> Lsn {
        self.newest.map_or(Lsn::NONE, |taken| taken.header.last_lsn())
    }

    /// Returns the header of each file's first batch, if it is whole.
    pub(crate) fn first_headers(&self) -> Result<Vec<(u32, BatchHeader)>> {
        let mut found = Vec::new();
        for slot in (0u32..).take(self.ring.is_there.len()) {
            if !self.ring.is_there[slot as usize] {
                continue;
            }
            let at = At { slot, offset: FIRST_AT };
            if let Some(header) = self.header_at(at)? {
                found.push((slot, header));
            }
        }
        Ok(found)
    }

    /// Returns the header at `at`, if there is one of this ring's chain.
    fn header_at(&self, at: At) -> Result<Option<BatchHeader>> {
        let mut bytes = [0; BATCH_HEADER_BYTES];
        self.reads.read(at.slot, at.offset, &mut bytes)?;
        match BatchHeader::decode(&bytes) {
            Ok(header) => Ok(Some(header).filter(|header| self.is_ours(header))),
            Err(e) if e.is_unsupported() => Err(self.bad(ErrorKind::Unsupported, at, e)),
            Err(_) => Ok(None),
        }
    }

    fn is_ours(&self, header: &BatchHeader) -> bool {
        header.pool == self.pool && header.chain == self.ring.chain
    }

    /// Lists the places where a walk to the end of the log may begin, best first, if the entries
    /// from `needed` on are required. The newest file that begins at or below `needed` comes first,
    /// then older ones in case the first batch of that file is torn. If there is none, the list
    /// holds the files whose first batch cannot be read. Returns `Err` with the oldest header if
    /// every file begins later, and an empty list for an empty ring.
    pub(crate) fn starts(&self, needed: Lsn) -> Result<std::result::Result<Vec<At>, BatchHeader>> {
        let firsts = self.first_headers()?;
        let at = |slot: u32| At { slot, offset: FIRST_AT };
        let mut starts: Vec<_> =
            firsts.iter().filter(|(_, header)| header.first_lsn <= needed).collect();
        starts.sort_by_key(|(_, header)| std::cmp::Reverse(header.sequence));
        if !starts.is_empty() {
            return Ok(Ok(starts.iter().map(|(slot, _)| at(*slot)).collect()));
        }
        let slots = (0u32..).take(self.ring.is_there.len());
        let unreadable: Vec<_> = slots
            .filter(|slot| self.reads.is_unreadable(*slot, FIRST_AT, BATCH_HEADER_BYTES))
            .map(at)
            .collect();
        if unreadable.is_empty()
            && let Some((_, oldest)) = firsts.iter().min_by_key(|(_, header)| header.sequence)
        {
            return Ok(Err(*oldest));
        }
        Ok(Ok(unreadable))
    }

    /// Walks from the first possible start to the end.
    pub(crate) fn walk_to_end(&mut self) -> Result<()> {
        let starts = self.starts(self.needed())?;
        for start in starts.unwrap_or_default() {
            self.begin(start);
            while self.advance()? {}
            if self.newest.is_some() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Returns the first entry that is missing from the data tier.
    fn needed(&self) -> Lsn {
        self.seen.contents.stored_lsn.next()
    }

    /// Begins the walk at `at`, before any batch was taken.
    pub(crate) fn begin(&mut self, at: At) {
        self.end_at = at;
    }

    /// Takes the next batch. An unreadable place is skipped if none of its entries is needed.
    /// Returns false at the end of the log.
    pub(crate) fn advance(&mut self) -> Result<bool> {
        Ok(self.next()? || self.resume(self.needed())?)
    }

    /// Takes the batch that follows. Returns false if no readable batch follows; [`Walk::end`] then
    /// gives the reason, and [`Walk::unknown_at`] the unreadable place that may hold one.
    fn next(&mut self) -> Result<bool> {
        let here = self.end_at;
        let room = self.ring.file_bytes - here.offset;
        (self.end, self.unknown_at) = (None, None);
        if room >= BATCH_HEADER_BYTES as u64 && self.is_next_at(here, 0)? {
            return Ok(true);
        }
        if self.newest.is_none() {
            return Ok(false);
        }
        // The head leaves a file when a batch does not fit; it may close the ring early.
        let next = (here.slot + 1) % self.ring.file_count;
        for slot in [next, 0] {
            let is_usable = slot != here.slot && self.ring.is_there[slot as usize];
            if !is_usable || self.live.iter().any(|file| file.slot == slot) {
                continue;
            }
            let at = At { slot, offset: FIRST_AT };
            if self.is_unreadable(at, BATCH_HEADER_BYTES)? {
                // As long as any batch fits at the current place, the head has not moved here.
                let has_left = room < batch_bytes_bound(self.ring.file_bytes);
                let is_head = slot == next || !self.ring.is_there[next as usize];
                if has_left && is_head {
                    self.unknown_at = self.unknown_at.or(Some(at));
                }
                continue;
            }
            let is_next = self.header_at(at)?.is_some_and(|header| self.is_successor(&header));
            if is_next && self.is_next_at(at, room)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Takes the batch at `at`, `skipped` bytes behind the previous one, if it is the next;
    /// otherwise records why it is not.
    fn is_next_at(&mut self, at: At, skipped: u64) -> Result<bool> {
        match self.try_at(at, skipped)? {
            Ok(()) => {
                self.unknown_at = None;
                return Ok(true);
            }
            Err(FormatError::Unreadable) => {
                self.unknown_at = Some(at);
                self.end = Some(FormatError::Unreadable);
            }
            Err(e) => (self.end, self.bad_at) = (Some(e), at),
        }
        Ok(false)
    }

    fn is_unreadable(&self, at: At, len: usize) -> Result<bool> {
        // Reads it first, as the place may not have been read yet.
        self.reads.read(at.slot, at.offset, &mut [0; BATCH_HEADER_BYTES])?;
        Ok(self.reads.is_unreadable(at.slot, at.offset, len))
    }

    /// Continues behind an unreadable place, at the first batch of the same file before which only
    /// entries below `needed` are missing. This batch has no known predecessor, so the caller must
    /// check the result against other knowledge of the log. Returns false if there is no such
    /// batch.
    fn resume(&mut self, needed: Lsn) -> Result<bool> {
        let Some(unknown) = self.unknown_at else { return Ok(false) };
        let mut offset = unknown.offset;
        let before = self.end_at;
        let step = batch::BATCH_ALIGN_BYTES as u64;
        while offset + 2 * step <= self.ring.file_bytes {
            offset += step;
            let at = At { slot: unknown.slot, offset };
            let Some(header) = self.header_at(at)? else { continue };
            let is_behind = self.newest.is_none_or(|newest| {
                header.sequence > newest.header.sequence
                    && header.epoch >= newest.header.epoch
                    && header.first_lsn >= newest.header.next_lsn()
            });
            if !is_behind || header.first_lsn > needed {
                continue;
            }
            let skipped = match unknown.slot == before.slot {
                true => offset - before.offset,
                false => self.ring.file_bytes - before.offset + offset - FIRST_AT,
            };
            let newest = self.newest.take();
            if self.is_next_at(at, skipped)? {
                return Ok(true);
            }
            (self.newest, self.unknown_at) = (newest, Some(unknown));
        }
        self.end = Some(FormatError::Unreadable);
        Ok(false)
    }

    /// Returns whether part of the file behind a bad batch cannot be read.
    pub(crate) fn is_unreadable_behind_bad(&self) -> bool {
        let At { slot, offset } = self.bad_at;
        let left = usize::try_from(self.ring.file_bytes - offset).unwrap_or(usize::MAX);
        self.reads.is_unreadable(slot, offset, left)
    }

    /// Returns whether `header` follows the newest batch. The first batch of a walk has no known
    /// predecessor.
    fn is_successor(&self, header: &BatchHeader) -> bool {
        self.newest
            .is_none_or(|newest| succession::follows(&newest.header, newest.checksum, header))
    }

    fn load(&mut self, slot: u32) -> Result<()> {
        if self.loaded.as_ref().is_some_and(|(loaded, _)| *loaded == slot) {
            return Ok(());
        }
        let mut bytes = self.loaded.take().map_or_else(Vec::new, |(_, bytes)| bytes);
        bytes.resize(usize::try_from(self.ring.file_bytes).expect("at most 2 GiB"), 0);
        self.reads.read(slot, 0, &mut bytes)?;
        self.loaded = Some((slot, bytes));
        Ok(())
    }

    /// Takes the batch at `at`, `skipped` bytes behind the previous one, or returns the reason why
    /// it is not the next.
    fn try_at(&mut self, at: At, skipped: u64) -> Result<std::result::Result<(), FormatError>> {
        self.load(at.slot)?;
        let (_, file) = self.loaded.as_ref().expect("just loaded");
        let bytes = &file[usize::try_from(at.offset).expect("at most 2 GiB")..];
        if self.reads.is_unreadable(at.slot, at.offset, BATCH_HEADER_BYTES) {
            return Ok(Err(FormatError::Unreadable));
        }
        let header = match BatchHeader::decode(bytes) {
            Ok(header) => header,
            Err(e) if e.is_unsupported() => return Err(self.bad(ErrorKind::Unsupported, at, e)),
            Err(e) => return Ok(Err(e)),
        };
        let is_next = self.is_successor(&header) || self.seeded_bugs.stale_accepted;
        if !self.is_ours(&header) || !is_next {
            return Ok(Err(FormatError::NoMagic));
        }
        if self.reads.is_unreadable(at.slot, at.offset, header.batch_bytes as usize) {
            return Ok(Err(FormatError::Unreadable));
        }
        let checksum = match batch::verify(&header, bytes) {
            Ok(checksum) => checksum,
            Err(FormatError::Checksum) if self.seeded_bugs.torn_accepted => 0,
            Err(e) => return Ok(Err(e)),
        };
        self.take(header, checksum, at, skipped);
        Ok(Ok(()))
    }

    fn take(&mut self, header: BatchHeader, checksum: u32, at: At, skipped: u64) {
        if self.live.back().is_none_or(|file| file.slot != at.slot) {
            self.live.push_back(LiveFile { slot: at.slot, last_lsn: Lsn::NONE });
        }
        self.live.back_mut().expect("pushed above").last_lsn = header.last_lsn();
        let bytes = u64::from(header.batch_bytes);
        self.position += skipped + bytes;
        self.end_at = At { slot: at.slot, offset: at.offset + bytes };
        self.newest = Some(Taken { header, checksum, at, end_position: self.position });
        self.seen.add(&header);
    }

    /// Returns the bytes of the newest batch taken.
    pub(crate) fn newest_bytes(&self) -> &[u8] {
        let (newest, (_, file)) =
            self.newest.zip(self.loaded.as_ref()).expect("a batch was taken from a loaded file");
        let from = usize::try_from(newest.at.offset).expect("at most 2 GiB");
        &file[from..from + newest.header.batch_bytes as usize]
    }

    /// Looks at every place outside the walk where a batch may begin, and adds the headers there to
    /// [`Walk::seen`].
    pub(crate) fn search_rest(&mut self) -> Result<()> {
        let mut seen = self.seen;
        self.visit_rest(&mut |_, header| seen.add(header))?;
        self.seen = seen;
        Ok(())
    }

    /// Shows every header of this ring's chain outside the walk, with its place.
    pub(crate) fn visit_rest(&self, visit: &mut dyn FnMut(At, &BatchHeader)) -> Result<()> {
        let mut bytes = vec![0; SEARCH_BYTES];
        for slot in (0u32..).take(self.ring.is_there.len()) {
            let is_walked = self.live.iter().any(|f| f.slot == slot) && slot != self.end_at.slot;
            if is_walked || !self.ring.is_there[slot as usize] {
                continue;
            }
            let is_end = self.newest.is_some() && slot == self.end_at.slot;
            let mut offset = if is_end { self.end_at.offset } else { FIRST_AT };
            while offset < self.ring.file_bytes {
                let left = self.ring.file_bytes - offset;
                let part = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                self.reads.read(slot, offset, &mut bytes[..part])?;
                let blocks = bytes[..part].chunks(batch::BATCH_ALIGN_BYTES);
                let offsets = (offset..).step_by(batch::BATCH_ALIGN_BYTES);
                for (block, offset) in blocks.zip(offsets) {
                    if let Ok(header) = BatchHeader::decode(block)
                        && self.is_ours(&header)
                    {
                        visit(At { slot, offset }, &header);
                    }
                }
                offset += part as u64;
            }
        }
        Ok(())
    }

    pub(crate) fn bad(&self, kind: ErrorKind, at: At, error: FormatError) -> Error {
        let name = self.reads.name(at.slot);
        let what = format!("open the write log: batch in {name} at offset {}", at.offset);
        Error::with_source(kind, what, error)
    }
}
