//! What a log in a directory says about itself, without a key and without opening it.
//!
//! Invariants:
//! - Reads only; nothing is locked, verified beyond headers, or changed.
//! - Errs to the side of "older": a damaged end hides newer batches, never invents any.

use crate::format::batch::{BATCH_HEADER_BYTES, BatchHeader};
use crate::format::file::FILE_HEADER_BYTES;
use block::{Epoch, Error, ErrorKind, Lsn, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The newest batch of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogSummary {
    /// Epoch of the owner that wrote it.
    pub epoch: Epoch,
    /// Newest entry.
    pub last_lsn: Lsn,
    /// Newest entry that was in the data tier when that batch was written.
    pub destaged_lsn: Lsn,
    /// Side files beside the ring: what they hold may be nowhere else.
    pub side_file_count: u64,
}

/// Looks at the log in `dir`. `None` where there is none, or none that ever held a batch.
///
/// # Errors
/// `Io` when the directory or a file cannot be read.
pub fn summarize(dir: &Path) -> Result<Option<LogSummary>> {
    let failed = |error| {
        Error::with_source(ErrorKind::Io, format!("look at the log in {}", dir.display()), error)
    };
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut newest: Option<BatchHeader> = None;
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_none_or(|extension| extension != "log") {
            continue;
        }
        let last = last_header(&File::open(&path).map_err(failed)?).map_err(failed)?;
        if last.is_some_and(|last| newest.is_none_or(|newest| newest.sequence < last.sequence)) {
            newest = last;
        }
    }
    let side_file_count = crate::side_dir::count(dir)?;
    Ok(newest.map(|header| LogSummary {
        side_file_count,
        epoch: header.epoch,
        last_lsn: header.last_lsn(),
        destaged_lsn: header.trim_lsn,
    }))
}

/// Header of the last batch of the newest lap in a file.
fn last_header(file: &File) -> std::io::Result<Option<BatchHeader>> {
    let len = file.metadata()?.len();
    let mut offset = FILE_HEADER_BYTES as u64;
    let mut last: Option<BatchHeader> = None;
    let mut bytes = [0; BATCH_HEADER_BYTES];
    while offset.saturating_add(BATCH_HEADER_BYTES as u64) <= len {
        file.read_exact_at(&mut bytes, offset)?;
        let Ok(header) = BatchHeader::decode(&bytes) else { break };
        // What follows the end is of an earlier lap.
        let is_next = last.is_none_or(|last| {
            header.ring == last.ring && header.sequence == last.sequence.saturating_add(1)
        });
        if !is_next || header.batch_bytes == 0 {
            break;
        }
        offset = offset.saturating_add(u64::from(header.batch_bytes));
        last = Some(header);
    }
    Ok(last)
}
