//! Opening the log: makes the ring, or finds in it where the log goes on and what it holds beyond
//! the data tier.
//!
//! Invariants:
//! - A batch is taken only when it follows the one before: sequence, checksum link, open id, LSN.
//! - A bad batch ends the log only where nothing says that it was on stable storage; otherwise the
//!   log is refused, and not a byte of it is changed.
//! - Before the log is served, everything that was taken is on stable storage, whatever the page
//!   cache held; then an opening batch with a fresh open id follows it, so that nothing written by
//!   an earlier life can ever be taken for its successor.
//! - A crash at any point of recovery is followed by a recovery with the same result.

use crate::core::{Config, FileState, Head, LiveFile};
use crate::format::FormatError;
use crate::format::batch::{self, BATCH_HEADER_BYTES, BatchHeader};
use crate::format::entry::{EntryKind, EntryRow};
use crate::format::file::{FILE_HEADER_BYTES, FileHeader};
use crate::options::{LogIdentity, LogOptions, RESERVE_BYTES};
use crate::overlay::{Incoming, Overlay};
use crate::planted::Planted;
use crate::resident::{BatchPlace, LogResident};
use block::env::{Disk, DiskReader, DiskRequest, IO_ALIGN_BYTES, IoBuffer, Random};
use block::seal::{PoolKey, SALT_BYTES};
use block::{Epoch, Error, ErrorKind, Lsn, Result};
use bytes::Bytes;
use std::collections::VecDeque;
use std::sync::Arc;

const FIRST_AT: u64 = FILE_HEADER_BYTES as u64;
/// Read at a time when the rest of the ring is searched. Chosen by hand.
const SEARCH_BYTES: usize = 4 << 20;

/// What opening the log found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Entries beyond the destaged LSN; they are in the overlay.
    pub entry_count: u64,
    /// Newest LSN of the log, or the destaged one if that is higher.
    pub last_lsn: Lsn,
    /// The log was closed in an orderly way, or is new.
    pub was_clean: bool,
    /// Everything that was ever acknowledged is there. False after an unclean stop of the machine
    /// while acknowledgements ran ahead of stable storage.
    pub is_tail_proven: bool,
    /// For people: why [`Recovery::is_tail_proven`] is false.
    pub lost_reason: Option<String>,
    /// The directory held no log.
    pub is_new: bool,
    /// Newest LSN that was known to be on stable storage before the open.
    pub durable_lsn: Lsn,
}

/// Everything that a core needs to go on.
pub(crate) struct Opened {
    pub(crate) config: Config,
    pub(crate) head: Head,
    pub(crate) live: VecDeque<LiveFile>,
    pub(crate) files: Vec<FileState>,
    pub(crate) overlay: Overlay,
    pub(crate) recovery: Recovery,
    /// Log position of the first entry that is not destaged.
    pub(crate) released_position: u64,
}

/// What the caller of [`open`] knows.
pub(crate) struct OpenArgs<'a> {
    pub(crate) identity: LogIdentity,
    pub(crate) key: PoolKey,
    pub(crate) options: LogOptions,
    pub(crate) destaged: Lsn,
    pub(crate) random: &'a dyn Random,
    pub(crate) planted: Planted,
}

/// Opens the log on `disk`, which must do nothing else meanwhile. Blocks.
pub(crate) fn open(disk: &mut dyn Disk, args: &OpenArgs<'_>) -> Result<Opened> {
    args.options.check()?;
    let reader = disk.reader();
    let files =
        reader.files().map_err(|e| Error::with_source(ErrorKind::Io, "list the log's files", e))?;
    let ring = if files.is_empty() {
        make_first_file(disk, args)?
    } else {
        read_headers(&*reader, &files, args)?
    };
    let mut scan = Scan::new(&*reader, args, ring);
    scan.run()?;
    scan.finish(disk, files.is_empty())
}

fn make_first_file(disk: &mut dyn Disk, args: &OpenArgs<'_>) -> Result<Ring> {
    let mut id = [0; 16];
    args.random.fill(&mut id);
    let header = FileHeader {
        pool: args.identity.pool,
        ring: id,
        slot: 0,
        file_count: args.options.file_count(),
        file_bytes: args.options.file_bytes,
    };
    let (len, bytes) = (header.file_bytes, header.encode());
    run(disk, DiskRequest::Create { token: 1, file: 0, len, header: bytes }, "make a log file")?;
    let mut is_there = vec![false; header.file_count as usize];
    is_there[0] = true;
    Ok(Ring { id, file_count: header.file_count, file_bytes: len, is_there })
}

/// The ring as its files tell.
#[derive(Clone, Debug)]
struct Ring {
    id: [u8; 16],
    file_count: u32,
    file_bytes: u64,
    is_there: Vec<bool>,
}

fn read_headers(
    reader: &dyn DiskReader,
    files: &[(u32, u64)],
    args: &OpenArgs<'_>,
) -> Result<Ring> {
    let mut ring: Option<Ring> = None;
    for &(slot, len) in files {
        let name = reader.name(slot);
        let mut bytes = vec![0; FILE_HEADER_BYTES];
        if len >= FIRST_AT {
            read(reader, slot, 0, &mut bytes)?;
        }
        let header = FileHeader::decode(&bytes).map_err(|e| {
            let kind = if e.is_unsupported() { ErrorKind::Unsupported } else { ErrorKind::Corrupt };
            Error::with_source(kind, format!("open log file {name}: read its header"), e)
        })?;
        let refuse =
            |kind, why: String| Err(Error::new(kind, format!("open log file {name}: {why}")));
        if header.pool != args.identity.pool {
            return refuse(ErrorKind::Invalid, "it belongs to another pool".into());
        }
        if header.slot != slot {
            let why = format!("its header says that it is file {} of the ring", header.slot);
            return refuse(ErrorKind::Corrupt, why);
        }
        if len != header.file_bytes {
            let why = format!("it has {len} bytes and should have {}", header.file_bytes);
            return refuse(ErrorKind::Corrupt, why);
        }
        let ring = ring.get_or_insert_with(|| Ring {
            id: header.ring,
            file_count: header.file_count,
            file_bytes: header.file_bytes,
            is_there: vec![false; header.file_count as usize],
        });
        let is_same = ring.id == header.ring
            && ring.file_count == header.file_count
            && ring.file_bytes == header.file_bytes;
        if !is_same {
            return refuse(ErrorKind::Corrupt, "it is of another ring than the first file".into());
        }
        ring.is_there[slot as usize] = true;
    }
    let ring = ring.expect("at least one file");
    // Files are made in order, so a hole in the numbers is a file that was taken away.
    let count = ring.is_there.iter().take_while(|is_there| **is_there).count();
    if count != files.len() {
        let name = reader.name(u32::try_from(count).expect("file count"));
        let why = format!("open the write log: {name} is missing and later files are there");
        return Err(Error::new(ErrorKind::Corrupt, why));
    }
    Ok(ring)
}

/// A place in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct At {
    slot: u32,
    offset: u64,
}

/// The newest batch taken.
#[derive(Clone, Copy, Debug)]
struct Taken {
    header: BatchHeader,
    checksum: u32,
    at: At,
    end_position: u64,
}

struct Scan<'a> {
    reader: &'a dyn DiskReader,
    args: &'a OpenArgs<'a>,
    ring: Ring,
    overlay: Overlay,
    /// Contents of one file, the one being walked.
    loaded: Option<(u32, Vec<u8>)>,
    newest: Option<Taken>,
    live: VecDeque<LiveFile>,
    next_lsn: Lsn,
    position: u64,
    released_position: Option<u64>,
    entry_count: u64,
    /// Highest LSN that any batch says is on stable storage.
    durable_lsn: Lsn,
    /// Highest sequence of any batch header in the ring, taken or not.
    sequence_seen: u64,
    /// Batches that may not be on stable storage, in order.
    unproven: VecDeque<Taken>,
    /// Why the walk ended.
    end: Option<FormatError>,
    end_at: At,
}

impl<'a> Scan<'a> {
    fn new(reader: &'a dyn DiskReader, args: &'a OpenArgs<'a>, ring: Ring) -> Self {
        Scan {
            reader,
            args,
            ring,
            overlay: Overlay::new(args.destaged, args.options.payload_memory_bytes),
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

    fn run(&mut self) -> Result<()> {
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

    fn last_lsn(&self) -> Lsn {
        self.newest.map_or(Lsn::NONE, |taken| taken.header.last_lsn())
    }

    /// The first batch of each file, where it is whole enough to be read.
    fn first_headers(&self) -> Result<Vec<(u32, BatchHeader)>> {
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
            return Ok(starts.iter().map(|(slot, _)| At { slot: *slot, offset: FIRST_AT }).collect());
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
        if self.newest.is_none() || at.offset == FIRST_AT {
            if self.live.back().is_none_or(|file| file.slot != at.slot) {
                self.live.push_back(LiveFile { slot: at.slot, last_lsn: Lsn::NONE });
            }
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
        self.next_lsn = Lsn(first.0 + incoming.len() as u64);
        let (log_bytes, extent_count) =
            self.overlay.insert(first, incoming.into_iter(), self.position);
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
            return Ok(());
        }
        let what = match self.end {
            Some(FormatError::NoMagic) | None => "the batch that belongs there is not there".into(),
            Some(e) => e.to_string(),
        };
        Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "open the write log: {} is damaged at offset {}: {what}; entries up to {} were on \
                 stable storage and only those up to {} can be read. Nothing was changed",
                self.reader.name(self.end_at.slot),
                self.end_at.offset,
                self.durable_lsn,
                self.last_lsn()
            ),
        ))
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

    // --- making it ready ---

    fn finish(self, disk: &mut dyn Disk, is_new: bool) -> Result<Opened> {
        let was_clean = match &self.newest {
            Some(newest) => newest.header.is_clean,
            None => self.sequence_seen == 0,
        };
        if self.released_position.is_none() {
            self.overlay.start_at(self.position);
        }
        if !was_clean && !self.args.planted.tail_not_rewritten {
            self.rewrite_tail(disk)?;
        }
        self.drop_stale_firsts(disk)?;
        let (is_tail_proven, lost_reason) = self.judge_tail();
        let last_lsn = self.last_lsn().max(self.args.destaged);
        let mut open = [0; 16];
        self.args.random.fill(&mut open);
        let mut head = self.next_head(last_lsn)?;
        let header = self.opening_header(&head, open, is_tail_proven);
        let mut live = self.live.clone();
        if live.back().is_none_or(|file| file.slot != head.slot) {
            live.push_back(LiveFile { slot: head.slot, last_lsn });
        }
        write_opening(disk, header, &mut head, &self.args.key)?;
        let is_there = self.ring.is_there.iter();
        let files = is_there
            .map(|is_there| if *is_there { FileState::Ready } else { FileState::Absent })
            .collect();
        let recovery = Recovery {
            entry_count: self.entry_count,
            last_lsn,
            was_clean,
            is_tail_proven,
            lost_reason,
            is_new,
            durable_lsn: self.durable_lsn,
        };
        Ok(Opened {
            config: Config {
                identity: self.args.identity,
                key: self.args.key.clone(),
                options: self.args.options,
                ring: self.ring.id,
                file_count: self.ring.file_count,
                file_bytes: self.ring.file_bytes,
                open,
                planted: self.args.planted,
            },
            released_position: self.released_position.unwrap_or(head.position),
            head,
            live,
            files,
            overlay: self.overlay,
            recovery,
        })
    }

    /// The page cache may hold what a failed sync lost, so what no batch says is durable is written
    /// again, the same bytes at the same places, and synced.
    fn rewrite_tail(&self, disk: &mut dyn Disk) -> Result<()> {
        let mut files = Vec::new();
        for taken in &self.unproven {
            let len = taken.header.batch_bytes as usize;
            let mut buffer = IoBuffer::default();
            buffer.reset(len);
            buffer.pad_to(len);
            read(self.reader, taken.at.slot, taken.at.offset, buffer.as_mut_slice())?;
            let (file, offset) = (taken.at.slot, taken.at.offset);
            let write = DiskRequest::Write { token: 2, file, offset, buffer };
            run(disk, write, "rewrite the log's tail")?;
            if files.last() != Some(&file) {
                files.push(file);
            }
        }
        if files.is_empty() {
            return Ok(());
        }
        run(disk, DiskRequest::Sync { token: 3, files }, "sync the log's tail")
    }

    /// A file whose first batch comes after the end of the log was begun by a life that lost it.
    /// Its sequence may be reached again, so it must not be there when the log is next opened.
    fn drop_stale_firsts(&self, disk: &mut dyn Disk) -> Result<()> {
        let sequence = self.newest.map_or(0, |newest| newest.header.sequence);
        let mut files = Vec::new();
        for (file, header) in self.first_headers()? {
            if header.sequence <= sequence {
                continue;
            }
            let mut buffer = IoBuffer::default();
            buffer.reset(IO_ALIGN_BYTES);
            buffer.pad_to(IO_ALIGN_BYTES);
            let write = DiskRequest::Write { token: 4, file, offset: FIRST_AT, buffer };
            run(disk, write, "clear a stale log file")?;
            files.push(file);
        }
        if files.is_empty() {
            return Ok(());
        }
        run(disk, DiskRequest::Sync { token: 5, files }, "sync a stale log file")
    }

    fn judge_tail(&self) -> (bool, Option<String>) {
        let is_proven = match self.newest.map(|newest| newest.header) {
            Some(header) => {
                let is_same_boot = header.boot == self.args.identity.boot_id;
                header.is_settled && (header.is_clean || !header.is_loud || is_same_boot)
            }
            // Only the opening batch of a new ring may be torn without loss.
            None => self.sequence_seen <= 1,
        };
        let reason = format!(
            "the machine stopped while writes were acknowledged before they were on stable \
             storage: entries after {} may be lost, those after {} are",
            self.durable_lsn,
            self.last_lsn()
        );
        (is_proven, (!is_proven).then_some(reason))
    }

    /// Where the opening batch goes. It takes the place of an opening batch that nothing follows,
    /// so that a crash loop does not fill a full ring.
    fn next_head(&self, last_lsn: Lsn) -> Result<Head> {
        let next_lsn = last_lsn.next();
        let Some(newest) = &self.newest else {
            return Ok(Head {
                slot: 0,
                offset: FIRST_AT,
                sequence: self.sequence_seen + 1,
                previous_checksum: 0,
                next_lsn,
                position: FIRST_AT,
            });
        };
        let header = &newest.header;
        if header.is_opening && header.entry_count == 0 {
            return Ok(Head {
                slot: newest.at.slot,
                offset: newest.at.offset,
                sequence: header.sequence,
                previous_checksum: header.previous_checksum,
                next_lsn,
                position: newest.end_position - u64::from(header.batch_bytes),
            });
        }
        let mut head = Head {
            slot: self.end_at.slot,
            offset: self.end_at.offset,
            sequence: header.sequence + 1,
            previous_checksum: newest.checksum,
            next_lsn,
            position: self.position,
        };
        if head.offset + batch::BATCH_ALIGN_BYTES as u64 > self.ring.file_bytes {
            let next = (head.slot + 1) % self.ring.file_count;
            let is_free = self.ring.is_there[next as usize]
                && !self
                    .live
                    .iter()
                    .any(|file| file.slot == next && file.last_lsn > self.args.destaged);
            if !is_free {
                let why = "open the write log: no room is left in it for an opening batch";
                return Err(Error::new(ErrorKind::Full, why));
            }
            head.position += self.ring.file_bytes - head.offset;
            (head.slot, head.offset) = (next, FIRST_AT);
        }
        Ok(head)
    }

    fn opening_header(&self, head: &Head, open: [u8; 16], is_settled: bool) -> BatchHeader {
        let mut salt = [0; SALT_BYTES];
        self.args.random.fill(&mut salt);
        BatchHeader {
            algorithm: self.args.options.algorithm,
            is_opening: true,
            is_clean: false,
            is_loud: false,
            is_settled,
            pool: self.args.identity.pool,
            ring: self.ring.id,
            open,
            boot: self.args.identity.boot_id,
            epoch: self.args.identity.epoch,
            sequence: head.sequence,
            first_lsn: head.next_lsn,
            durable_lsn: Lsn(head.next_lsn.0 - 1),
            trim_lsn: self.args.destaged,
            entry_count: 0,
            batch_bytes: 0,
            payload_bytes: 0,
            previous_checksum: head.previous_checksum,
            salt,
        }
    }
}

fn incoming_of(row: &EntryRow, payload: Bytes, place: &Arc<BatchPlace>, index: u32) -> Incoming {
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

fn write_opening(
    disk: &mut dyn Disk,
    mut header: BatchHeader,
    head: &mut Head,
    key: &PoolKey,
) -> Result<()> {
    let mut buffer = IoBuffer::default();
    let batch_key = key.derive(header.algorithm, &header.salt, batch::KEY_PURPOSE);
    let checksum = batch::encode(&mut header, &mut [], std::iter::empty(), &batch_key, &mut buffer)
        .expect("a batch without entries is 4 KiB");
    let (file, offset) = (head.slot, head.offset);
    let write = DiskRequest::Write { token: 6, file, offset, buffer };
    run(disk, write, "write the log's opening batch")?;
    run(disk, DiskRequest::Sync { token: 7, files: vec![file] }, "sync the log's opening batch")?;
    head.offset += u64::from(header.batch_bytes);
    head.position += u64::from(header.batch_bytes);
    head.sequence += 1;
    head.previous_checksum = checksum;
    Ok(())
}

fn read(reader: &dyn DiskReader, slot: u32, offset: u64, buf: &mut [u8]) -> Result<()> {
    reader.read_at(slot, offset, buf).map_err(|e| {
        let what = format!("read log file {} at offset {offset}", reader.name(slot));
        Error::with_source(ErrorKind::Io, what, e)
    })
}

/// Does one request and waits for its end.
fn run(disk: &mut dyn Disk, request: DiskRequest, what: &str) -> Result<()> {
    disk.submit(request);
    let mut completions = Vec::new();
    loop {
        disk.reap(&mut completions);
        if let Some(completion) = completions.pop() {
            return completion
                .result
                .map_err(|e| Error::with_source(ErrorKind::Io, what.to_owned(), e));
        }
        disk.wait();
    }
}

/// The reserve holds at least this many batches without entries.
const _: () = assert!(RESERVE_BYTES >= 16 * batch::BATCH_ALIGN_BYTES as u64);
