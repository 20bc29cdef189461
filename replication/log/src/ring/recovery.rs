//! Opening the log: creates the ring, or finds the log's end in it and the entries that the data
//! tier does not have.
//!
//! Invariants:
//! - A log that is refused is not changed by a byte.
//! - Before the log is served, every accepted entry is on stable storage, whatever the page cache
//!   held. Then an opening batch with a fresh open id follows, so that nothing written by an
//!   earlier run can be taken for its successor.
//! - A crash at any point of recovery is followed by a recovery with the same result.

use crate::format::batch::{self, BatchHeader, Predecessor};
use crate::format::file::{FILE_HEADER_BYTES, FileHeader};
use crate::format::state::{LogState, Standing, TailLoss};
use crate::options::RESERVE_BYTES;
use crate::overlay::Overlay;
use crate::ring::batch_places::BatchPlaces;
use crate::ring::contents::LogContents;
use crate::ring::layout::{FileState, Head, LiveFile, RingConfig, chain_of};
use crate::ring::opening::OpenArgs;
use crate::ring::reads::{Reads, UnreadablePlace};
use crate::ring::scan::Scan;
use crate::ring::tail::{Evidence, Lost};
use crate::ring::walk::{At, FIRST_AT, Ring, Walk};
use crate::spill::dir::MissingSpillFile;
use block::env::{Disk, DiskRequest, IO_ALIGN_BYTES, IoBuffer};
use block::seal::{PoolKey, SALT_BYTES};
use block::{Error, ErrorKind, Lsn, Position, Result};
use bytes::Bytes;
use std::collections::VecDeque;

/// The findings of opening the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Entries beyond the destaged LSN; they are in the overlay.
    pub entry_count: u64,
    /// Newest LSN of the log, or the destaged one if that is higher.
    pub last_lsn: Lsn,
    /// Whether the log was closed in an orderly way, or is new.
    pub was_clean: bool,
    /// Whether every entry that was ever acknowledged is there. False after an unclean stop of the
    /// machine, an unmount or a failure of the log's file system while acknowledgements ran ahead
    /// of stable storage.
    pub is_tail_proven: bool,
    /// The kind of loss that keeps [`Recovery::is_tail_proven`] from being true.
    pub tail_loss: Option<TailLoss>,
    /// The reason why [`Recovery::is_tail_proven`] is false, for people.
    pub lost_reason: Option<String>,
    /// Whether the directory held no log.
    pub is_new: bool,
    /// Newest LSN known to have been on stable storage before the open.
    pub durable_lsn: Lsn,
    /// Spill files that were asked for and are missing or damaged: all data of their volumes that no
    /// newer entry covers is lost until they come back.
    pub missing_spill_files: Vec<MissingSpillFile>,
    /// Parts of the ring that the disk does not read; none of them is needed.
    pub unreadable: Vec<UnreadablePlace>,
}

/// Everything that a core needs to continue the log.
pub(crate) struct Opened {
    pub(crate) config: RingConfig,
    pub(crate) head: Head,
    pub(crate) live: VecDeque<LiveFile>,
    pub(crate) files: Vec<FileState>,
    pub(crate) overlay: Overlay,
    pub(crate) recovery: Recovery,
    /// The recorded state of this run.
    pub(crate) state: LogState,
    /// Log position of the first entry that is not destaged.
    pub(crate) released_position: u64,
    /// The opening batch.
    pub(crate) opening: OpeningBatch,
    /// The batches in the ring, the opening batch among them.
    pub(crate) places: BatchPlaces,
}

/// The batch that opens a run of the log.
pub(crate) struct OpeningBatch {
    pub(crate) header: BatchHeader,
    pub(crate) bytes: Bytes,
}

impl OpeningBatch {
    /// Returns its place in the history of the pool.
    pub(crate) fn position(&self) -> Position {
        Position { epoch: self.header.epoch, sequence: self.header.sequence }
    }
}

/// Opens the log on `disk`, which must do nothing else meanwhile. Blocks.
pub(crate) fn open(disk: &mut dyn Disk, args: &OpenArgs<'_>) -> Result<Opened> {
    args.options.check()?;
    let reader = disk.reader();
    let files =
        reader.files().map_err(|e| Error::with_source(ErrorKind::Io, "list the log's files", e))?;
    let reads = Reads::new(&*reader);
    let ring = if files.is_empty() {
        check_none_missing(&reads, None, args)?;
        make_first_file(disk, args)?
    } else {
        let ring = read_ring(&reads, &files, args.identity.pool)?;
        check_none_missing(&reads, Some(&ring), args)?;
        ring
    };
    let states = args.keeper.found()?;
    let written_back = match args.seeded_bugs.writeback_not_asked {
        true => Ok(()),
        false => write_back(disk, &files),
    };
    let evidence = Evidence { states, has_writeback_failed: written_back.is_err() };
    let mut scan = Scan::new(&reads, args, ring);
    let scanned = scan.run();
    match (written_back, args.quorum) {
        (Err(error), Some(_)) => return Err(scan.refuse_unwritten(&evidence, error)),
        (Err(error), None) => tracing::warn!(
            error = %error.chain(),
            "could not sync the log as it was found; earlier writes to it may not have reached its disk"
        ),
        (Ok(()), _) => {}
    }
    scanned?;
    scan.finish(disk, files.is_empty(), &evidence)
}

/// Waits until the kernel has written everything that earlier processes wrote to the files. It reports
/// a failure only to the first caller that asks, and may have dropped the data that it could not write.
fn write_back(disk: &mut dyn Disk, files: &[(u32, u64)]) -> Result<()> {
    let files: Vec<u32> = files.iter().map(|(file, _)| *file).collect();
    run(disk, DiskRequest::Sync { token: 8, files }, "sync the log as it was found")
}

fn make_first_file(disk: &mut dyn Disk, args: &OpenArgs<'_>) -> Result<Ring> {
    let (mut id, chain) = ([0; 16], chain_of(args.identity.pool));
    args.random.fill(&mut id);
    let header = FileHeader {
        pool: args.identity.pool,
        ring: id,
        chain,
        slot: 0,
        file_count: match args.quorum {
            Some(_) => args.options.file_count_of_member(),
            None => args.options.file_count(),
        },
        file_bytes: args.options.file_bytes,
    };
    let (len, bytes) = (header.file_bytes, header.encode());
    run(disk, DiskRequest::Create { token: 1, file: 0, len, header: bytes }, "make a log file")?;
    let mut is_there = vec![false; header.file_count as usize];
    is_there[0] = true;
    Ok(Ring { id, chain, file_count: header.file_count, file_bytes: len, is_there })
}

/// Reads the headers of the files, which must agree. They differ only in the file's number, so one
/// readable header is enough: a file of another ring has no batch of this one.
pub(crate) fn read_ring(reads: &Reads<'_>, files: &[(u32, u64)], pool: [u8; 16]) -> Result<Ring> {
    let mut ring: Option<Ring> = None;
    let mut unread = Vec::new();
    for &(slot, len) in files {
        let name = reads.name(slot);
        let mut bytes = vec![0; FILE_HEADER_BYTES];
        if len >= FIRST_AT {
            reads.read(slot, 0, &mut bytes)?;
            if reads.is_unreadable(slot, 0, FILE_HEADER_BYTES) {
                unread.push((slot, len));
                continue;
            }
        }
        let header = FileHeader::decode(&bytes).map_err(|e| {
            let (kind, what) = match e.is_unsupported() {
                true => (ErrorKind::Unsupported, "read its header"),
                false => (ErrorKind::Corrupt, "it is damaged at its start; nothing was changed"),
            };
            Error::with_source(kind, format!("open log file {name}: {what}"), e)
        })?;
        let refuse =
            |kind, why: String| Err(Error::new(kind, format!("open log file {name}: {why}")));
        if header.pool != pool {
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
            chain: header.chain,
            file_count: header.file_count,
            file_bytes: header.file_bytes,
            is_there: vec![false; header.file_count as usize],
        });
        let is_same = (ring.id, ring.chain) == (header.ring, header.chain)
            && ring.file_count == header.file_count
            && ring.file_bytes == header.file_bytes;
        if !is_same {
            return refuse(ErrorKind::Corrupt, "it is of another ring than the first file".into());
        }
        ring.is_there[slot as usize] = true;
    }
    let Some(mut ring) = ring else {
        let what = "open the write log: the disk does not read the header of any of its files. Nothing was changed. \
                    Keep the log, and try again: the disk may read it later";
        return Err(Error::new(ErrorKind::Corrupt, what));
    };
    for (slot, len) in unread {
        let is_there = ring.is_there.get_mut(slot as usize).filter(|_| len == ring.file_bytes);
        let Some(is_there) = is_there else {
            let name = reads.name(slot);
            let why = format!(
                "open log file {name}: the disk does not read its header, and its length is wrong"
            );
            return Err(Error::new(ErrorKind::Corrupt, why));
        };
        *is_there = true;
    }
    // Files are created in order, so a gap in the numbers is a file that was taken away.
    let count = ring.is_there.iter().take_while(|is_there| **is_there).count();
    if count != files.len() {
        let name = reads.name(u32::try_from(count).expect("file count"));
        let why = format!("open the write log: {name} is missing and later files are there");
        return Err(Error::new(ErrorKind::Corrupt, why));
    }
    Ok(ring)
}

/// Checks that every file that was created exists: the newest ones may hold the last flushed
/// entries.
fn check_none_missing(reads: &Reads<'_>, ring: Option<&Ring>, args: &OpenArgs<'_>) -> Result<()> {
    let found = ring.map_or(0, |ring| ring.is_there.iter().filter(|is_there| **is_there).count());
    let found = u32::try_from(found).expect("file count");
    let made = match args.made_count {
        Some(made) if made > found => made,
        _ => return Ok(()),
    };
    let (name, s) = (reads.name(found), if made == 1 { " was" } else { "s were" });
    let why = format!("open the write log: {name} is missing: {made} file{s} made");
    let contents = match ring {
        Some(ring) => {
            let (pool, ring) = (args.identity.pool, ring.clone());
            let mut walk = Walk::new(reads, pool, ring, args.destaged, args.seeded_bugs);
            walk.walk_to_end()?;
            walk.search_rest()?;
            walk.seen.contents
        }
        None => LogContents::beyond(args.destaged),
    };
    Err(crate::ring::incomplete::error_of(why, contents))
}

/// Prepares the log for service once the scan has found its end.
impl Scan<'_> {
    fn finish(mut self, disk: &mut dyn Disk, is_new: bool, evidence: &Evidence) -> Result<Opened> {
        let was_clean = match &self.walk.newest {
            Some(newest) => newest.header.is_clean,
            None => self.walk.seen.sequence == 0,
        };
        if self.released_position.is_none() {
            self.overlay.start_at(self.walk.position);
        }
        let lost = self.judge_tail(evidence);
        self.note_writeback_failure(evidence, lost.as_ref())?;
        // Done after an orderly close too: the sync of its clean mark may have failed.
        if !self.args.seeded_bugs.tail_not_rewritten {
            self.note_before_rewriting(evidence, lost.as_ref())?;
            self.rewrite_tail(disk)?;
        }
        self.drop_stale_firsts(disk)?;
        let last_lsn = self.walk.last_lsn().max(self.args.destaged);
        let mut open = [0; 16];
        self.args.random.fill(&mut open);
        let mut head = self.next_head(last_lsn)?;
        let header = self.opening_header(&head, open, lost.is_none());
        let mut live = self.walk.live.clone();
        if live.back().is_none_or(|file| file.slot != head.slot) {
            live.push_back(LiveFile { slot: head.slot, last_lsn });
        }
        let mut places = std::mem::take(&mut self.places);
        let at = At { slot: head.slot, offset: head.offset };
        let opening = write_opening(disk, header, &mut head, &self.args.key)?;
        if places.last_sequence().is_none_or(|last| last < opening.header.sequence) {
            places.push(at, &opening.header);
        }
        // Not earlier: the notes of the last run count until this one has its opening batch.
        let state = self.state_of(open, lost.as_ref());
        self.args.keeper.replace(&state)?;
        let is_there = self.walk.ring.is_there.iter();
        let files = is_there
            .map(|is_there| if *is_there { FileState::Ready } else { FileState::Absent })
            .collect();
        let recovery = Recovery {
            entry_count: self.entry_count,
            last_lsn,
            was_clean,
            is_tail_proven: lost.is_none(),
            tail_loss: lost.as_ref().map(|lost| lost.loss),
            lost_reason: lost.map(|lost| lost.reason),
            is_new,
            durable_lsn: self.walk.seen.durable_lsn,
            missing_spill_files: Vec::new(),
            unreadable: self.walk.reads.places(),
        };
        Ok(Opened {
            config: RingConfig {
                identity: self.args.identity,
                key: self.args.key.clone(),
                options: self.args.options,
                ring: self.walk.ring.id,
                chain: self.walk.ring.chain,
                file_count: self.walk.ring.file_count,
                file_bytes: self.walk.ring.file_bytes,
                open,
                seeded_bugs: self.args.seeded_bugs,
            },
            released_position: self.released_position.unwrap_or(head.position),
            head,
            live,
            files,
            overlay: self.overlay,
            recovery,
            state,
            opening,
            places,
        })
    }

    fn state_of(&self, open: [u8; 16], lost: Option<&Lost>) -> LogState {
        let (boot, mount) = (self.args.identity.boot_id, self.args.mount);
        LogState { standing: Standing::Open, owed: lost.map(|lost| lost.loss), open, boot, mount }
    }

    /// Rewrites the batches that no batch declares durable, with the same bytes at the same places,
    /// and syncs them: the page cache may hold data that a failed sync lost.
    fn rewrite_tail(&self, disk: &mut dyn Disk) -> Result<()> {
        let mut files = Vec::new();
        for taken in &self.unproven {
            let len = taken.header.batch_bytes as usize;
            let mut buffer = IoBuffer::default();
            buffer.reset(len);
            buffer.pad_to(len);
            let (file, offset) = (taken.at.slot, taken.at.offset);
            self.walk.reads.reader.read_at(file, offset, buffer.as_mut_slice()).map_err(|e| {
                let name = self.walk.reads.name(file);
                let what = format!("read {name} at offset {offset} to write it again");
                Error::with_source(ErrorKind::Io, what, e)
            })?;
            let write = DiskRequest::Write { token: 2, file, offset, buffer, is_sync_next: false };
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

    /// Clears files whose first batch comes after the end of the log: they were begun by a run
    /// that lost that batch. The log may reach their sequence number again, so the batch must be
    /// gone when the log is next opened.
    fn drop_stale_firsts(&self, disk: &mut dyn Disk) -> Result<()> {
        let sequence = self.walk.newest.map_or(0, |newest| newest.header.sequence);
        let mut files = Vec::new();
        for (file, header) in self.walk.first_headers()? {
            if header.sequence <= sequence {
                continue;
            }
            let mut buffer = IoBuffer::default();
            buffer.reset(IO_ALIGN_BYTES);
            buffer.pad_to(IO_ALIGN_BYTES);
            let write = DiskRequest::Write {
                token: 4,
                file,
                offset: FIRST_AT,
                buffer,
                is_sync_next: false,
            };
            run(disk, write, "clear a stale log file")?;
            files.push(file);
        }
        if files.is_empty() {
            return Ok(());
        }
        run(disk, DiskRequest::Sync { token: 5, files }, "sync a stale log file")
    }

    /// Chooses the place of the opening batch. It replaces an opening batch that nothing follows,
    /// so that a crash loop does not fill a full ring. In a log that other members have, it replaces
    /// nothing: they may have acknowledged that batch.
    fn next_head(&self, last_lsn: Lsn) -> Result<Head> {
        let next_lsn = last_lsn.next();
        let Some(newest) = &self.walk.newest else {
            if let Some(head) = self.head_behind_predecessor(next_lsn)? {
                return Ok(head);
            }
            // The opening batch of a new ring may be torn; it is written again, as the first of its chain.
            let before = if self.walk.seen.sequence <= 1 { 0 } else { self.walk.seen.sequence };
            return Ok(Head {
                slot: 0,
                offset: FIRST_AT,
                sequence: before + 1,
                previous: Predecessor::default(),
                next_lsn,
                position: FIRST_AT,
            });
        };
        let header = &newest.header;
        let is_shared = self.args.quorum.is_some() && !self.args.seeded_bugs.opening_replaced;
        if header.is_opening && header.entry_count == 0 && !is_shared {
            return Ok(Head {
                slot: newest.at.slot,
                offset: newest.at.offset,
                sequence: header.sequence,
                previous: header.previous,
                next_lsn,
                position: newest.end_position - u64::from(header.batch_bytes),
            });
        }
        let mut head = Head {
            slot: self.walk.end_at.slot,
            offset: self.walk.end_at.offset,
            sequence: header.sequence + 1,
            previous: Predecessor::of(header, newest.checksum),
            next_lsn,
            position: self.walk.position,
        };
        let batch_bytes = batch::BATCH_ALIGN_BYTES;
        let is_last = head.offset + batch_bytes as u64 > self.walk.ring.file_bytes;
        // An unreadable place is avoided if possible, and used if there is no other.
        let is_bad = self.walk.reads.is_unreadable(head.slot, head.offset, batch_bytes);
        if is_last || is_bad {
            let ring = &self.walk.ring;
            let next = (head.slot + 1) % ring.file_count;
            // A ring whose next file could not be made continues in the first one.
            let next = if ring.is_there[next as usize] { next } else { 0 };
            let is_free = next != head.slot
                && !self
                    .walk
                    .live
                    .iter()
                    .any(|file| file.slot == next && file.last_lsn > self.args.destaged);
            if !is_free && !is_last {
                return Ok(head);
            }
            if !is_free {
                let why = "open the write log: no room is left in it for an opening batch";
                return Err(Error::new(ErrorKind::Full, why));
            }
            head.position += self.walk.ring.file_bytes - head.offset;
            (head.slot, head.offset) = (next, FIRST_AT);
        }
        Ok(head)
    }

    /// Returns the place of the first batch of an empty log that begins behind a batch of other machines.
    fn head_behind_predecessor(&self, next_lsn: Lsn) -> Result<Option<Head>> {
        let Some(quorum) = self.args.quorum else { return Ok(None) };
        let Some(bytes) = &quorum.predecessor else { return Ok(None) };
        let decoded = BatchHeader::decode(bytes)
            .and_then(|header| batch::verify(&header, bytes).map(|checksum| (header, checksum)));
        let what = || format!("open the write log behind batch {} of its members", quorum.position);
        let (header, checksum) =
            decoded.map_err(|e| Error::with_source(ErrorKind::Corrupt, what(), e))?;
        let is_it = (header.epoch, header.sequence)
            == (quorum.position.epoch, quorum.position.sequence)
            && (header.pool, header.chain) == (self.args.identity.pool, self.walk.ring.chain)
            && header.next_lsn() <= next_lsn;
        if !is_it {
            let why = format!("{}: it is another one, or the store lacks entries of it", what());
            return Err(Error::new(ErrorKind::Corrupt, why));
        }
        Ok(Some(Head {
            slot: 0,
            offset: FIRST_AT,
            sequence: header.sequence + 1,
            previous: Predecessor::of(&header, checksum),
            next_lsn,
            position: FIRST_AT,
        }))
    }

    fn opening_header(&self, head: &Head, open: [u8; 16], is_settled: bool) -> BatchHeader {
        let mut salt = [0; SALT_BYTES];
        self.args.random.fill(&mut salt);
        BatchHeader {
            algorithm: self.args.options.algorithm,
            is_opening: true,
            is_clean: false,
            acks_before_sync: false,
            is_settled,
            has_snapshots: false,
            pool: self.args.identity.pool,
            chain: self.walk.ring.chain,
            open,
            boot: self.args.identity.boot_id,
            epoch: self.args.identity.epoch,
            sequence: head.sequence,
            configuration: self.args.identity.configuration,
            first_lsn: head.next_lsn,
            durable_lsn: Lsn(head.next_lsn.0 - 1),
            commit_lsn: Lsn(head.next_lsn.0 - 1),
            trim_lsn: self.args.destaged,
            entry_count: 0,
            batch_bytes: 0,
            payload_bytes: 0,
            previous: head.previous,
            salt,
        }
    }
}

fn write_opening(
    disk: &mut dyn Disk,
    mut header: BatchHeader,
    head: &mut Head,
    key: &PoolKey,
) -> Result<OpeningBatch> {
    let mut buffer = IoBuffer::default();
    let batch_key = key.derive(header.algorithm, &header.salt, batch::KEY_PURPOSE);
    let checksum = batch::encode(&mut header, &mut [], std::iter::empty(), &batch_key, &mut buffer)
        .expect("a batch without entries is 4 KiB");
    let opening = OpeningBatch { header, bytes: Bytes::copy_from_slice(buffer.as_slice()) };
    let (file, offset) = (head.slot, head.offset);
    let write = DiskRequest::Write { token: 6, file, offset, buffer, is_sync_next: false };
    run(disk, write, "write the log's opening batch")?;
    run(disk, DiskRequest::Sync { token: 7, files: vec![file] }, "sync the log's opening batch")?;
    head.offset += u64::from(header.batch_bytes);
    head.position += u64::from(header.batch_bytes);
    head.sequence += 1;
    head.previous = Predecessor::of(&header, checksum);
    Ok(opening)
}

/// Runs one request and waits for its completion.
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

/// The reserve has room for at least sixteen batches without entries.
const _: () = assert!(RESERVE_BYTES >= 16 * batch::BATCH_ALIGN_BYTES as u64);
