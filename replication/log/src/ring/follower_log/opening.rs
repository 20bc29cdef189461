//! Opening a member's ring: finds the batches that it holds and the place of the next one.
//!
//! Invariants:
//! - Nothing is written. Headers that lie above the end of the log are listed, and are destroyed
//!   before the log is first changed: until then a later opening finds the same.
//! - The log is the one that the owner's recovery would find, if the data tier held the entries that
//!   the newest headers say: one walk serves both.

use super::ring_files::RingFiles;
use super::{FollowerFound, FollowerLog, Stale, Tail};
use crate::disk::LogDisk;
use crate::disk::file_disk::FileDisk;
use crate::disk::state_files::{FoundState, StateFiles, StateKeeper};
use crate::format::FormatError;
use crate::format::file::FileHeader;
use crate::format::state::{LogState, Standing};
use crate::options::LogOptions;
use crate::ring::batch_places::BatchPlaces;
use crate::ring::reads::Reads;
use crate::ring::recovery::read_ring;
use crate::ring::walk::{At, FIRST_AT, Ring, Walk};
use crate::seeded_bugs::{SeededBugs, seeded_bugs};
use block::env::{Disk, DiskReader, Random, SystemClock, SystemRandom};
use block::{Epoch, Error, ErrorKind, Lsn, Position, Result};
use std::path::Path;
use std::sync::Arc;

/// The parts of an opening that do not come from the ring.
pub struct FollowerOpening {
    /// The disk with the files of the ring, which nothing else uses.
    pub disk: Box<dyn Disk>,
    /// Source of the identity of a new ring.
    pub random: Arc<dyn Random>,
    /// Id of the pool.
    pub pool: [u8; 16],
    /// Sizes of a new ring; only `ring_bytes` and `file_bytes` count.
    pub options: LogOptions,
    /// Number of files that were made for the ring, if the directory records it.
    pub made_count: Option<u32>,
}

impl FollowerLog {
    /// Opens the ring in `dir`, makes the directory if it does not exist, and locks it. A directory
    /// without a log is an empty log. Reads the whole ring and changes nothing in it.
    ///
    /// # Errors
    /// `Invalid`: options that cannot work, or the log of another pool. `Busy`: open elsewhere.
    /// `Corrupt`: a file is missing or has another header than the others. `Unsupported`: a later
    /// program wrote it. `Io`: the file system failed.
    pub fn open(
        dir: &Path,
        pool: [u8; 16],
        options: LogOptions,
    ) -> Result<(FollowerLog, FollowerFound)> {
        options.check()?;
        let disk = FileDisk::open(dir, options.io_mode, Arc::new(SystemClock))?;
        let reader = disk.reader();
        let found = list(&*reader)?.len();
        let made_count = disk.made_count();
        if found > 0 && made_count.is_none_or(|made| (made as usize) < found) {
            disk.note_made(u32::try_from(found).expect("file count"))?;
        }
        let (disk, random) = (Box::new(disk), Arc::new(SystemRandom));
        let states = StateFiles::new(dir, &[], &[]).found()?;
        let opening = FollowerOpening { disk, random, pool, options, made_count };
        let (log, mut found) = opening.open()?;
        found.has_failed = log.has_failed(&states);
        Ok((log, found))
    }

    /// Returns whether one of these states says that the run that wrote the newest batch has failed. A
    /// later run, here or on another machine, has found out what is there, and its batches are newer.
    pub(crate) fn has_failed(&self, states: &[FoundState]) -> bool {
        let Some(tail) = &self.tail else { return false };
        let is_failure =
            |state: &LogState| state.open == tail.header.open && state.standing != Standing::Open;
        // A damaged state may have said so.
        let is_failed = |one: &FoundState| one.state.as_ref().is_none_or(is_failure);
        !self.seeded_bugs.failure_not_noted && states.iter().any(is_failed)
    }
}

impl FollowerOpening {
    /// Opens the ring; see [`FollowerLog::open`].
    ///
    /// # Errors
    /// Those of [`FollowerLog::open`], except `Busy`.
    pub fn open(self) -> Result<(FollowerLog, FollowerFound)> {
        self.open_with(seeded_bugs())
    }

    pub(crate) fn open_with(self, seeded_bugs: SeededBugs) -> Result<(FollowerLog, FollowerFound)> {
        self.options.check()?;
        let reader = self.disk.reader();
        let files = list(&*reader)?;
        self.check_none_missing(&*reader, files.len())?;
        if files.is_empty() {
            return Ok(self.empty(seeded_bugs));
        }
        let reads = Reads::new(&*reader);
        let ring = read_ring(&reads, &files, self.pool)?;
        let walked = Walked::new(&reads, self.pool, ring, seeded_bugs)?;
        Ok(self.finish(walked, files.len(), seeded_bugs))
    }

    fn check_none_missing(&self, reader: &dyn DiskReader, found: usize) -> Result<()> {
        let Some(made) = self.made_count.filter(|made| *made as usize > found) else {
            return Ok(());
        };
        let name = reader.name(u32::try_from(found).expect("file count"));
        let why = format!(
            "could not open the write log: {name} is missing, and {made} files were made; bring it \
             back, or remove this member's log"
        );
        Err(Error::new(ErrorKind::Corrupt, why))
    }

    fn empty(self, seeded_bugs: SeededBugs) -> (FollowerLog, FollowerFound) {
        let shape = FileHeader {
            pool: self.pool,
            ring: [0; 16],
            chain: [0; 16],
            slot: 0,
            file_count: self.options.file_count_of_member(),
            file_bytes: self.options.file_bytes,
        };
        let log = FollowerLog {
            files: RingFiles::new(self.disk, shape, 0),
            random: self.random,
            places: BatchPlaces::default(),
            head: At { slot: 0, offset: FIRST_AT },
            tail: None,
            before: Position::START,
            stale: Stale::default(),
            is_full: false,
            seeded_bugs,
        };
        (log, FollowerFound::default())
    }

    fn finish(
        self,
        walked: Walked,
        made: usize,
        seeded_bugs: SeededBugs,
    ) -> (FollowerLog, FollowerFound) {
        let Walked { ring, places, head, tail, stale, found } = walked;
        let shape = FileHeader {
            pool: self.pool,
            ring: ring.id,
            chain: ring.chain,
            slot: 0,
            file_count: ring.file_count,
            file_bytes: ring.file_bytes,
        };
        let mut files = RingFiles::new(self.disk, shape, made);
        // The page cache may hold writes that an earlier process did not sync.
        files.mark_all_dirty();
        let log = FollowerLog {
            files,
            random: self.random,
            places,
            head,
            tail,
            before: found.before,
            stale,
            is_full: false,
            seeded_bugs,
        };
        (log, found)
    }
}

fn list(reader: &dyn DiskReader) -> Result<Vec<(u32, u64)>> {
    reader.files().map_err(|e| Error::with_source(ErrorKind::Io, "list the log's files", e))
}

/// The findings of the walk through the ring.
struct Walked {
    ring: Ring,
    places: BatchPlaces,
    head: At,
    tail: Option<Tail>,
    stale: Stale,
    found: FollowerFound,
}

impl Walked {
    fn new(
        reads: &Reads<'_>,
        pool: [u8; 16],
        ring: Ring,
        seeded_bugs: SeededBugs,
    ) -> Result<Walked> {
        let walk_to = |stored| Walk::new(reads, pool, ring.clone(), stored, seeded_bugs);
        let mut all = walk_to(Lsn::NONE);
        all.search_rest()?;
        let mut walk = walk_to(all.seen.trim_lsn);
        let mut places = BatchPlaces::default();
        let mut epochs: Vec<(Epoch, u64)> = Vec::new();
        let begins = starts(&walk, all.seen.trim_lsn)?;
        for start in &begins {
            walk.begin(*start);
            while walk.advance()? {
                let taken = walk.newest.expect("the walk has taken one");
                let (epoch, sequence) = (taken.header.epoch, taken.header.sequence);
                if places.last_sequence().is_some_and(|last| last + 1 != sequence) {
                    // The walk has skipped an unreadable place before which all is released.
                    (places, epochs) = (BatchPlaces::default(), Vec::new());
                }
                places.push(taken.at, &taken.header);
                if epochs.last().is_none_or(|(last, _)| *last != epoch) {
                    epochs.push((epoch, sequence));
                }
            }
            if walk.newest.is_some() {
                break;
            }
        }
        let tail = walk.newest.map(|taken| Tail { header: taken.header, checksum: taken.checksum });
        let last = tail.as_ref().map_or(0, |tail| tail.header.sequence);
        let mut stale = Stale::default();
        walk.visit_rest(&mut |at, header| {
            if header.sequence > last {
                let is_begin = last == 0 && begins.contains(&at);
                if is_begin { &mut stale.begins } else { &mut stale.places }.push(at);
            }
        })?;
        let is_torn = !matches!(walk.end, None | Some(FormatError::NoMagic));
        let found = FollowerFound {
            before: places.before().unwrap_or(Position::START),
            epochs,
            last,
            has_failed: false,
            is_end_damaged: is_torn
                || walk.unknown_at.is_some()
                || !(stale.places.is_empty() && stale.begins.is_empty()),
            unreadable: reads.places(),
        };
        let head = if tail.is_some() { walk.end_at } else { At { slot: 0, offset: FIRST_AT } };
        Ok(Walked { ring, places, head, tail, stale, found })
    }
}

/// Lists the places where the log may begin, best first. Entries up to `trim_lsn` are released. If no
/// file begins at or below the first other one, the ring was reset, and its oldest batch is the first.
fn starts(walk: &Walk<'_>, trim_lsn: Lsn) -> Result<Vec<At>> {
    match walk.starts(trim_lsn.next())? {
        Ok(starts) => Ok(starts),
        Err(_) => {
            let firsts = walk.first_headers()?;
            let oldest = firsts.iter().min_by_key(|(_, header)| header.sequence);
            Ok(oldest.map(|(slot, _)| At { slot: *slot, offset: FIRST_AT }).into_iter().collect())
        }
    }
}
