//! Examines a log that another owner has superseded, before it is moved away: whether it was
//! superseded, and what it holds. Needs no key and does not open the log.
//!
//! Invariants:
//! - Nothing is locked or changed.
//! - A log is superseded only if none of its batches, wherever in the ring and whatever it follows,
//!   was written since the pool's directory belongs to the present owner. A single such batch makes
//!   it a log to replay or to refuse, which recovery decides.
//! - Its contents are reported as stored only if the log itself proves it.

use crate::disk::file_disk::{is_cleared, number_of};
use crate::ring::contents::LogContents;
use crate::ring::reads::Reads;
use crate::ring::recovery::read_ring;
use crate::ring::walk::Walk;
use crate::seeded_bugs::{SeededBugs, seeded_bugs};
use crate::spill::dir as spill_dir;
use block::env::DiskReader;
use block::{Epoch, Error, ErrorKind, Lsn, Result};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A log that was superseded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogSummary {
    /// Highest epoch of the owners that wrote it.
    pub epoch: Epoch,
    /// Contents beyond the newest entry that the log knows to be in the data tier.
    pub contents: LogContents,
    /// Whether the log was closed in order and is whole, and the data tier held all of it at that
    /// time.
    pub is_in_store: bool,
    /// Number of spill files beside the ring; their contents may exist nowhere else.
    pub spill_file_count: u64,
    /// Length of those files, in bytes.
    pub spill_bytes: u64,
}

/// Checks whether the log in `dir` was written only by owners before epoch `since`. Returns `None`
/// if it was not, if there is no log, if it never held a batch, or if the files do not tell;
/// opening it then refuses it with a reason.
///
/// # Errors
/// `Io` if the directory or a file cannot be read. `Unsupported`: a later program wrote it.
pub fn find_superseded(dir: &Path, pool: [u8; 16], since: Epoch) -> Result<Option<LogSummary>> {
    let failed = |error| {
        Error::with_source(ErrorKind::Io, format!("look at the log in {}", dir.display()), error)
    };
    let reader = DirReader::open(dir).map_err(failed)?;
    let Some(summary) = superseded(&reader, pool, since, seeded_bugs())? else {
        return Ok(None);
    };
    let (spill_file_count, spill_bytes) = spill_dir::weigh(dir)?;
    Ok(Some(LogSummary { spill_file_count, spill_bytes, ..summary }))
}

/// Like [`find_superseded`], without the spill files.
pub(crate) fn superseded(
    reader: &dyn DiskReader,
    pool: [u8; 16],
    since: Epoch,
    seeded_bugs: SeededBugs,
) -> Result<Option<LogSummary>> {
    let files =
        reader.files().map_err(|e| Error::with_source(ErrorKind::Io, "list the log's files", e))?;
    if files.is_empty() {
        return Ok(None);
    }
    let reads = Reads::new(reader);
    let ring = match read_ring(&reads, &files, pool) {
        Ok(ring) => ring,
        Err(error) if matches!(error.kind(), ErrorKind::Io | ErrorKind::Unsupported) => {
            return Err(error);
        }
        Err(_) => return Ok(None),
    };
    let mut all = Walk::new(&reads, pool, ring.clone(), Lsn::NONE, seeded_bugs);
    // The usual case: the log is ours, and one look at each file proves it.
    if all.first_headers()?.iter().any(|(_, header)| header.epoch >= since) {
        return Ok(None);
    }
    all.search_rest()?;
    let seen = all.seen;
    if seen.sequence == 0 || seen.epoch >= since {
        return Ok(None);
    }
    let mut walk = Walk::new(&reads, pool, ring, seen.trim_lsn, seeded_bugs);
    walk.walk_to_end()?;
    walk.search_rest()?;
    let is_in_store = walk.newest.is_some_and(|newest| {
        newest.header.is_clean
            && newest.header.sequence == seen.sequence
            && newest.header.trim_lsn == newest.header.last_lsn()
            && walk.seen.contents.entry_count == 0
            && reads.places().is_empty()
    });
    let (epoch, contents) = (seen.epoch, walk.seen.contents);
    Ok(Some(LogSummary { epoch, contents, is_in_store, spill_file_count: 0, spill_bytes: 0 }))
}

/// The files of a ring that is not open, for reading.
pub(crate) struct DirReader {
    dir: PathBuf,
    files: Vec<(u32, File)>,
}

impl DirReader {
    pub(crate) fn open(dir: &Path) -> io::Result<DirReader> {
        let mut files = Vec::new();
        let entries = match std::fs::read_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            entries => Some(entries?),
        };
        // What a member's reset has left is no log.
        let entries = entries.filter(|_| !is_cleared(dir));
        for entry in entries.into_iter().flatten() {
            let name = entry?.file_name();
            if let Some(number) = name.to_str().and_then(number_of) {
                files.push((number, File::open(dir.join(&name))?));
            }
        }
        files.sort_by_key(|(number, _)| *number);
        Ok(DirReader { dir: dir.to_owned(), files })
    }

    fn file(&self, number: u32) -> io::Result<&File> {
        let found = self.files.iter().find(|(of, _)| *of == number);
        found.map(|(_, file)| file).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl DiskReader for DirReader {
    fn files(&self) -> io::Result<Vec<(u32, u64)>> {
        self.files.iter().map(|(number, file)| Ok((*number, file.metadata()?.len()))).collect()
    }

    fn read_at(&self, file: u32, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file(file)?.read_exact_at(buf, offset)
    }

    fn name(&self, file: u32) -> String {
        self.dir.join(crate::disk::file_disk::name_of(file)).display().to_string()
    }
}
