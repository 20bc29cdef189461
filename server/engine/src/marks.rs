//! Marks in a node's directory: empty files that say what an opening has begun.
//!
//! Invariants:
//! - A mark is on stable storage before what it announces begins, and goes when that is settled.

use block::{Error, ErrorKind, Result};
use std::path::Path;

/// The directory has held a write log.
pub(crate) const LOG_MADE: &str = "log.made";
/// Mark in DIR, from before a new log replaces a lost one until every volume has recorded the loss.
pub(crate) const LOG_LOST: &str = "log.lost";
/// Mark in DIR, from before the pool is taken from another node until every volume has recorded it.
pub(crate) const TAKEN_OVER: &str = "taken.over";

/// Removes the marks. To be called when the volumes of the configuration exist and have recorded
/// that they lost writes, if they did.
///
/// # Errors
/// `Io`.
pub fn settle_lost_writes(dir: &Path) -> Result<()> {
    remove_mark(dir, LOG_LOST)?;
    remove_mark(dir, TAKEN_OVER)
}

/// Removes a mark, durably; there may be none.
pub(crate) fn remove_mark(dir: &Path, name: &str) -> Result<()> {
    let path = dir.join(name);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        outcome => outcome.and_then(|()| std::fs::File::open(dir)?.sync_all()).map_err(|error| {
            Error::with_source(ErrorKind::Io, format!("remove {}", path.display()), error)
        }),
    }
}

/// Makes an empty file in `dir`, on stable storage.
pub(crate) fn make_mark(dir: &Path, name: &str) -> Result<()> {
    let path = dir.join(name);
    let failed =
        |error| Error::with_source(ErrorKind::Io, format!("write {}", path.display()), error);
    // An existing file may be from a process that ended before it was on stable storage.
    let file = std::fs::OpenOptions::new().write(true).create(true).truncate(false).open(&path);
    file.and_then(|file| file.sync_all()).map_err(failed)?;
    std::fs::File::open(dir).and_then(|dir| dir.sync_all()).map_err(failed)
}
