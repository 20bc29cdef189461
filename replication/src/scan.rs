//! Reading the ring: where the log begins, what follows what, where it ends and why.
//!
//! Invariants:
//! - A batch is taken only when it follows the one before: sequence, checksum link, open id, LSN.
//! - A bad batch ends the log only where nothing says that it was on stable storage; otherwise the
//!   log is refused. What the data tier holds says so too.
//! - Nothing is written.

use crate::core::LiveFile;
use crate::format::FormatError;
use crate::format::batch::{self, BATCH_HEADER_BYTES, BatchHeader};
use crate::format::entry::{EntryKind, EntryRow};
use crate::format::file::FILE_HEADER_BYTES;
use crate::overlay::{Incoming, Overlay};
use crate::recovery::OpenArgs;
use crate::resident::{BatchPlace, LogResident};
use block::env::DiskReader;
use block::{Epoch, Error, ErrorKind, Lsn, Result};
use bytes::Bytes;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

pub(crate) const FIRST_AT: u64 = FILE_HEADER_BYTES as u64;
/// Read at a time when the rest of the ring is searched. Chosen by hand.
pub(crate) const SEARCH_BYTES: usize = 4 << 20;

/// The ring as its files tell.
#[derive(Clone, Debug)]
pub(crate) struct Ring {
    pub(crate) id: [u8; 16],
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

/// The newest batch taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) header: BatchHeader,
    pub(crate) checksum: u32,
    pub(crate) at: At,
    pub(crate) end_position: u64,
}

pub(crate) struct Scan<'a> {
    pub(crate) reader: &'a dyn DiskReader,
    pub(crate) args: &'a OpenArgs<'a>,
    pub(crate) ring: Ring,
    pub(crate) overlay: Overlay,
    /// Contents of one file, the one being walked.
    pub(crate) loaded: Option<(u32, Vec<u8>)>,
    pub(crate) newest: Option<Taken>,
    pub(crate) live: VecDeque<LiveFile>,
    pub(crate) next_lsn: Lsn,
    pub(crate) position: u64,
    pub(crate) released_position: Option<u64>,
    pub(crate) entry_count: u64,
    /// Highest LSN that any batch says is on stable storage.
    pub(crate) durable_lsn: Lsn,
    /// Highest sequence of any batch header in the ring, taken or not.
    pub(crate) sequence_seen: u64,
    /// Batches that may not be on stable storage, in order.
    pub(crate) unproven: VecDeque<Taken>,
    /// Why the walk ended.
    pub(crate) end: Option<FormatError>,
    pub(crate) end_at: At,
}

impl<'a> Scan<'a> {
    pub(crate) fn new(reader: &'a dyn DiskReader, args: &'a OpenArgs<'a>, ring: Ring) -> Self {
        Scan {
            reader,
            args,
            ring,
            overlay: Overlay::new(args.destaged, args.options.payload_memory_bytes, args.planted),
            loaded: None,
            newest: None,
            live: VecDeque::new(),
            next_lsn: args.destaged.next(),
            position: FIRST_AT,
            released_position: None,
            entry_count: 0,
            durable_lsn: Lsn::NONE,
            sequence_seen: 0,
            unproven: VecDeque::new(),
            end: None,
            end_at: At { slot: 0, offset: FIRST_AT },
        }
    }

    pub(crate) fn run(&mut self) -> Result<()> {
        for start in self.find_starts()? {
            self.end_at = start;
            if self.take_next()? {
                while self.take_next()? {}
                break;
            }
        }
        self.search_rest()?;
        self.check_end()
    }

    pub(crate) fn last_lsn(&self) -> Lsn {
        self.newest.map_or(Lsn::NONE, |taken| taken.header.last_lsn())
    }

    /// The first batch of each file, where it is whole enough to be read.
    pub(crate) fn first_headers(&self) -> Result<Vec<(u32, BatchHeader)>> {
        let mut found = Vec::new();
        for slot in (0u32..).take(self.ring.is_there.len()) {
            if !self.ring.is_there[slot as usize] {
                continue;
            }
            let mut bytes = [0; BATCH_HEADER_BYTES];
            read(self.reader, slot, FIRST_AT, &mut bytes)?;
            match BatchHeader::decode(&bytes) {
                Ok(header) if self.is_ours(&header) => found.push((slot, header)),
                Err(e) if e.is_unsupported() => {
                    return Err(self.bad(ErrorKind::Unsupported, At { slot, offset: FIRST_AT }, e));
                }
                _ => {}
            }
        }
        Ok(found)
    }

    fn is_ours(&self, header: &BatchHeader) -> bool {
        header.pool == self.args.identity.pool && header.ring == self.ring.id
    }

    /// Where the walk may begin, best first: the newest file that begins at or below the first
    /// entry needed, then older ones, in case the first batch of that file is torn.
    fn find_starts(&mut self) -> Result<Vec<At>> {
        let firsts = self.first_headers()?;
        let needed = self.args.destaged.next();
        let mut starts: Vec<_> =
            firsts.iter().filter(|(_, header)| header.first_lsn <= needed).collect();
        starts.sort_by_key(|(_, header)| std::cmp::Reverse(header.sequence));
        if !starts.is_empty() {
            return Ok(starts
                .iter()
                .map(|(slot, _)| At { slot: *slot, offset: FIRST_AT })
                .collect());
        }
        match firsts.iter().map(|(_, header)| header).min_by_key(|header| header.sequence) {
            None => Ok(Vec::new()),
            Some(oldest) => Err(Error::new(
                ErrorKind::Corrupt,
                format!(
                    "open the write log: the data tier holds entries up to {}, the log begins \
                     with entry {}: what lies between is missing (was the store rolled back, or \
                     is this the log of a later store?)",
                    self.args.destaged, oldest.first_lsn
                ),
            )),
        }
    }

    /// Takes the batch that follows, if there is one.
    fn take_next(&mut self) -> Result<bool> {
        let here = self.end_at;
        let room = self.ring.file_bytes - here.offset;
        let mut why = None;
        if room >= BATCH_HEADER_BYTES as u64 {
            match self.try_at(here)? {
                Ok(()) => return Ok(true),
                Err(e) => why = Some(e),
            }
        }
        // The head leaves a file when a batch does not fit; it may close the ring early.
        let next = (here.slot + 1) % self.ring.file_count;
        for slot in [next, 0] {
            let is_usable = slot != here.slot && self.ring.is_there[slot as usize];
            if !is_usable || self.live.iter().any(|file| file.slot == slot) {
                continue;
            }
            let at = At { slot, offset: FIRST_AT };
            if self.newest.is_some() && self.follows_at(at)? {
                let left = self.ring.file_bytes - here.offset;
                match self.try_at(at)? {
                    Ok(()) => {
                        self.position += left;
                        if let Some(newest) = &mut self.newest {
                            newest.end_position += left;
                        }
                        return Ok(true);
                    }
                    Err(e) => why = Some(e),
                }
            }
        }
        self.end = why;
        Ok(false)
    }

    /// Whether the header at the start of a file names the newest batch as the one before it.
    fn follows_at(&self, at: At) -> Result<bool> {
        let mut bytes = [0; BATCH_HEADER_BYTES];
        read(self.reader, at.slot, at.offset, &mut bytes)?;
        match BatchHeader::decode(&bytes) {
            Ok(header) => Ok(self.is_ours(&header) && self.is_successor(&header)),
            Err(e) if e.is_unsupported() => Err(self.bad(ErrorKind::Unsupported, at, e)),
            Err(_) => Ok(false),
        }
    }

    /// The rules of succession. The first batch of the walk has no known predecessor.
    fn is_successor(&self, header: &BatchHeader) -> bool {
        let Some(newest) = &self.newest else {
            return true;
        };
        let before = &newest.header;
        let is_in_sequence = header.sequence == before.sequence.saturating_add(1)
            && header.previous_checksum == newest.checksum;
        let is_in_chain = if header.is_opening {
            header.open != before.open && header.first_lsn >= before.next_lsn()
        } else {
            header.open == before.open && header.first_lsn == before.next_lsn()
        };
        is_in_sequence && is_in_chain && header.epoch >= before.epoch
    }

    fn load(&mut self, slot: u32) -> Result<()> {
        if self.loaded.as_ref().is_some_and(|(loaded, _)| *loaded == slot) {
            return Ok(());
        }
        let mut bytes = self.loaded.take().map_or_else(Vec::new, |(_, bytes)| bytes);
        bytes.resize(usize::try_from(self.ring.file_bytes).expect("at most 2 GiB"), 0);
        read(self.reader, slot, 0, &mut bytes)?;
        self.loaded = Some((slot, bytes));
        Ok(())
    }

    /// Takes the batch at `at`, or says why it is not the next one. `Err` ends the open.
    fn try_at(&mut self, at: At) -> Result<Result<(), FormatError>> {
        self.load(at.slot)?;
        let (_, file) = self.loaded.take().expect("just loaded");
        let from = usize::try_from(at.offset).expect("at most 2 GiB");
        let outcome = self.try_bytes(at, &file[from..]);
        self.loaded = Some((at.slot, file));
        outcome
    }

    fn try_bytes(&mut self, at: At, bytes: &[u8]) -> Result<Result<(), FormatError>> {
        let header = match BatchHeader::decode(bytes) {
            Ok(header) => header,
            Err(e) if e.is_unsupported() => return Err(self.bad(ErrorKind::Unsupported, at, e)),
            Err(e) => return Ok(Err(e)),
        };
        let is_next = self.is_successor(&header) || self.args.planted.stale_accepted;
        if !self.is_ours(&header) || !is_next {
            return Ok(Err(FormatError::NoMagic));
        }
        let checksum = match batch::verify(&header, bytes) {
            Ok(checksum) => checksum,
            Err(FormatError::Checksum) if self.args.planted.torn_accepted => 0,
            Err(e) => return Ok(Err(e)),
        };
        if header.epoch > self.args.identity.epoch {
            return Err(self.overtaken(header.epoch, at));
        }
        if header.trim_lsn > self.args.destaged {
            return Err(self.rolled_back(header.trim_lsn));
        }
        self.take(header, checksum, at, bytes)?;
        Ok(Ok(()))
    }

    fn take(&mut self, header: BatchHeader, checksum: u32, at: At, bytes: &[u8]) -> Result<()> {
        let needed = self.args.destaged.next();
        if self.live.back().is_none_or(|file| file.slot != at.slot) {
            self.live.push_back(LiveFile { slot: at.slot, last_lsn: Lsn::NONE });
        }
        let begin = self.position;
        self.position += u64::from(header.batch_bytes);
        self.end_at = At { slot: at.slot, offset: at.offset + u64::from(header.batch_bytes) };
        if header.last_lsn() >= needed && header.entry_count > 0 {
            if self.released_position.is_none() {
                self.released_position = Some(begin);
                self.overlay.start_at(begin);
            }
            self.take_entries(&header, at, bytes)?;
        }
        self.live.back_mut().expect("pushed above").last_lsn = header.last_lsn();
        self.durable_lsn = self.durable_lsn.max(header.durable_lsn);
        let taken = Taken { header, checksum, at, end_position: self.position };
        self.newest = Some(taken);
        self.unproven.push_back(taken);
        while self.unproven.front().is_some_and(|t| t.header.next_lsn() <= header.durable_lsn) {
            self.unproven.pop_front();
        }
        Ok(())
    }

    fn take_entries(&mut self, header: &BatchHeader, at: At, bytes: &[u8]) -> Result<()> {
        let key = self.args.key.derive(header.algorithm, &header.salt, batch::KEY_PURPOSE);
        let corrupt = |e| self.bad(ErrorKind::Corrupt, at, e);
        let rows = batch::open_table(header, bytes, &key).map_err(corrupt)?;
        let payload_at = header.payload_at().expect("decoded");
        let payloads = &bytes[payload_at..];
        let place = Arc::new(BatchPlace {
            file: at.slot,
            payload_at: at.offset + payload_at as u64,
            first_lsn: header.first_lsn,
            algorithm: header.algorithm,
            salt: header.salt,
        });
        let mut incoming = Vec::with_capacity(rows.len());
        for (row, index) in rows.iter().zip(0u32..) {
            let lsn = Lsn(header.first_lsn.0 + u64::from(index));
            if lsn <= self.args.destaged {
                continue;
            }
            let from = row.payload_offset as usize;
            let mut sealed = payloads[from..from + row.sealed_bytes()].to_vec();
            let length = match batch::open_payload(row, lsn, index, &key, &mut sealed) {
                Ok(plain) => plain.len(),
                Err(_) if self.args.planted.torn_accepted => row.payload_bytes as usize,
                Err(e) => return Err(corrupt(e)),
            };
            sealed.truncate(length);
            incoming.push(incoming_of(row, Bytes::from(sealed), &place, index));
        }
        self.entry_count += incoming.len() as u64;
        let first = Lsn(header.next_lsn().0 - incoming.len() as u64);
        let first = if self.args.planted.stale_accepted { self.next_lsn } else { first };
        if first != self.next_lsn {
            return Err(self.bad(ErrorKind::Corrupt, at, FormatError::Range));
        }
        self.next_lsn = Lsn(first.0 + incoming.len() as u64);
        let came_at = self.args.written_at.get(&at.slot).copied().unwrap_or_else(Instant::now);
        let (log_bytes, extent_count, _) =
            self.overlay.insert(first, incoming.into_iter(), self.position, || came_at);
        let options = &self.args.options;
        if log_bytes >= options.generation_bytes_max || extent_count >= options.entry_count_max / 4
        {
            self.overlay.freeze();
        }
        Ok(())
    }

    /// Looks at every other place of the ring where a batch may begin for one that says that more
    /// was on stable storage than was taken.
    fn search_rest(&mut self) -> Result<()> {
        let mut bytes = vec![0; SEARCH_BYTES];
        for slot in (0u32..).take(self.ring.is_there.len()) {
            let is_walked = self.live.iter().any(|f| f.slot == slot) && slot != self.end_at.slot;
            if is_walked || !self.ring.is_there[slot as usize] {
                continue;
            }
            let mut offset = if slot == self.end_at.slot { self.end_at.offset } else { FIRST_AT };
            while offset < self.ring.file_bytes {
                let part =
                    bytes.len().min(usize::try_from(self.ring.file_bytes - offset).expect(""));
                read(self.reader, slot, offset, &mut bytes[..part])?;
                for block in bytes[..part].chunks(batch::BATCH_ALIGN_BYTES) {
                    if let Ok(header) = BatchHeader::decode(block)
                        && self.is_ours(&header)
                    {
                        self.durable_lsn = self.durable_lsn.max(header.durable_lsn);
                        self.sequence_seen = self.sequence_seen.max(header.sequence);
                        if header.trim_lsn > self.args.destaged {
                            return Err(self.rolled_back(header.trim_lsn));
                        }
                    }
                }
                offset += part as u64;
            }
        }
        Ok(())
    }

    /// Nothing below a durable LSN may be missing.
    fn check_end(&self) -> Result<()> {
        if self.durable_lsn <= self.last_lsn().max(self.args.destaged) {
            return self.check_reaches_tier();
        }
        Err(self.damaged(self.durable_lsn))
    }

    /// The log does not go on at its end, though entries up to `known` were on stable storage.
    fn damaged(&self, known: Lsn) -> Error {
        let what = match self.end {
            Some(FormatError::NoMagic) | None => "the batch that belongs there is not there".into(),
            Some(e) => e.to_string(),
        };
        Error::new(
            ErrorKind::Corrupt,
            format!(
                "open the write log: {} is damaged at offset {}: {what}; entries up to {} were on \
                 stable storage and only those up to {} can be read. Nothing was changed",
                self.reader.name(self.end_at.slot),
                self.end_at.offset,
                known,
                self.last_lsn()
            ),
        )
    }

    /// Entries are in the data tier only once they are on stable storage here, so a log of this
    /// directory reaches as far. One that does not may lack entries beyond as well.
    fn check_reaches_tier(&self) -> Result<()> {
        let (last, destaged) = (self.last_lsn(), self.args.destaged);
        // A ring that was made and never served holds at most one opening batch, which may be torn.
        let is_fresh = self.newest.is_none() && self.sequence_seen <= 1;
        if last >= destaged || is_fresh {
            return Ok(());
        }
        if self.newest.is_none_or(|newest| newest.header.sequence < self.sequence_seen) {
            return Err(self.damaged(destaged));
        }
        let why = format!(
            "open the write log: it ends at LSN {last}, in {} at offset {}, but the store holds \
             entries up to LSN {destaged}, and those were on stable storage in the log before",
            self.reader.name(self.end_at.slot),
            self.end_at.offset
        );
        Err(crate::incomplete::error_of(why))
    }

    fn bad(&self, kind: ErrorKind, at: At, error: FormatError) -> Error {
        let name = self.reader.name(at.slot);
        let what = format!("open the write log: batch in {name} at offset {}", at.offset);
        Error::with_source(kind, what, error)
    }

    fn overtaken(&self, epoch: Epoch, at: At) -> Error {
        Error::new(
            ErrorKind::Fenced,
            format!(
                "open the write log: {} at offset {} was written in epoch {epoch}, this is epoch \
                 {}: another owner has taken the pool over",
                self.reader.name(at.slot),
                at.offset,
                self.args.identity.epoch
            ),
        )
    }

    fn rolled_back(&self, trim_lsn: Lsn) -> Error {
        Error::new(
            ErrorKind::Corrupt,
            format!(
                "open the write log: its entries up to {trim_lsn} were destaged, but the data tier \
                 holds entries only up to {}: the store was rolled back to an older state",
                self.args.destaged
            ),
        )
    }
}

pub(crate) fn incoming_of(
    row: &EntryRow,
    payload: Bytes,
    place: &Arc<BatchPlace>,
    index: u32,
) -> Incoming {
    let resident =
        (row.kind == EntryKind::Write).then(|| LogResident::new(Arc::clone(place), *row, index));
    Incoming {
        volume: row.volume,
        kind: row.kind,
        start_sector: row.start_sector,
        sector_count: row.sector_count,
        payload,
        resident,
    }
}

pub(crate) fn read(reader: &dyn DiskReader, slot: u32, offset: u64, buf: &mut [u8]) -> Result<()> {
    reader.read_at(slot, offset, buf).map_err(|e| {
        let what = format!("read log file {} at offset {offset}", reader.name(slot));
        Error::with_source(ErrorKind::Io, what, e)
    })
}
