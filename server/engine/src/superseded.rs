//! Logs that the pool went on without: setting them aside, listing them, and the names of the snapshots that tell
//! from which state the pool went on.
//!
//! Invariants:
//! - A log is set aside only if no batch of it was written since its directory has the pool, and is removed only
//!   if it proves that the store has all of it.

use crate::marks::LOG_MADE;
use block::{Epoch, Error, ErrorKind, Lsn, Result};
use std::path::{Path, PathBuf};
use uuid::Uuid;
use wal::LogSummary;

/// Beginning of the names of directories of logs that were set aside.
const ASIDE: &str = "log.superseded-";
/// Beginning of the names of the snapshots that are made when the pool goes on without a log.
pub const SNAPSHOT_PREFIX: &str = "superseded-";

/// A log that was set aside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SupersededLog {
    /// Its directory.
    pub dir: PathBuf,
    /// What it holds.
    pub summary: LogSummary,
}

/// The state from which a pool went on without a log. Snapshots of its volumes keep it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Base {
    /// First epoch of the owner that went on.
    pub epoch: Epoch,
    /// Newest entry of the log that this owner had.
    pub lsn: Lsn,
    /// Volumes with this id or a higher one did not exist.
    pub next_volume: u32,
}

impl Base {
    /// Name of the snapshots.
    #[must_use]
    pub fn snapshot_name(self) -> String {
        format!("{SNAPSHOT_PREFIX}{}-{}-{}", self.epoch.0, self.lsn.0, self.next_volume)
    }

    /// The state that a snapshot of this name keeps.
    #[must_use]
    pub fn of_snapshot(name: &str) -> Option<Base> {
        let (epoch, rest) = name.strip_prefix(SNAPSHOT_PREFIX)?.split_once('-')?;
        let (lsn, next_volume) = rest.split_once('-')?;
        Some(Base {
            epoch: Epoch(epoch.parse().ok()?),
            lsn: Lsn(lsn.parse().ok()?),
            next_volume: next_volume.parse().ok()?,
        })
    }
}

/// Lists the logs of a pool that were set aside in a directory, oldest first. Those that cannot be read are left
/// out, and logged.
///
/// # Errors
/// `Io` if the directory cannot be listed.
pub fn superseded_logs(dir: &Path, pool: Uuid) -> Result<Vec<SupersededLog>> {
    let failed = |error| {
        let what = format!("list the logs that were set aside in {}", dir.display());
        Error::with_source(ErrorKind::Io, what, error)
    };
    let mut logs = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let is_log = entry.file_name().to_str().is_some_and(|name| name.starts_with(ASIDE));
        if !is_log {
            continue;
        }
        match summary_of(&entry.path(), pool) {
            Ok(summary) => logs.push(SupersededLog { dir: entry.path(), summary }),
            Err(error) => tracing::warn!(
                log = %entry.path().display(), error = %error.chain(),
                "could not read a log that was set aside; the daemon keeps it"
            ),
        }
    }
    logs.sort_by(|a, b| (a.summary.epoch, &a.dir).cmp(&(b.summary.epoch, &b.dir)));
    Ok(logs)
}

/// Returns what a log holds that is not open.
///
/// # Errors
/// `NotFound` if the directory holds no log of the pool; those of reading it.
pub fn summary_of(log_dir: &Path, pool: Uuid) -> Result<LogSummary> {
    wal::find_superseded(log_dir, pool.into_bytes(), Epoch(u64::MAX))?.ok_or_else(|| {
        let what = format!("read the log in {}: it holds no log of this pool", log_dir.display());
        Error::new(ErrorKind::NotFound, what)
    })
}

/// Moves the log of a directory out of the way if none of its batches was written in epoch `since` or a later one.
/// Removes it if the store has everything in it. Returns whether the log is gone from its place.
///
/// # Errors
/// Those of reading and moving it.
pub fn set_aside_if_superseded(log_dir: &Path, pool: Uuid, since: Epoch) -> Result<bool> {
    let Some(log) = wal::find_superseded(log_dir, pool.into_bytes(), since)? else {
        return Ok(false);
    };
    // Before the log is moved, so that a crash in between is not taken for a lost log.
    let mark = log_dir.with_file_name(LOG_MADE);
    match std::fs::remove_file(&mark) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            let what = format!("remove {}", mark.display());
            return Err(Error::with_source(ErrorKind::Io, what, error));
        }
        _ => {}
    }
    let stalled = free_name(log_dir, log.epoch.0);
    std::fs::rename(log_dir, &stalled).map_err(|error| {
        Error::with_source(ErrorKind::Io, format!("set aside {}", log_dir.display()), error)
    })?;
    if log.is_in_store && log.spill_file_count == 0 {
        // Everything in it reached the store before the pool moved to another owner.
        let removed = std::fs::remove_dir_all(&stalled).map_err(|error| {
            Error::with_source(ErrorKind::Io, format!("remove {}", stalled.display()), error)
        });
        return removed.map(|()| true);
    }
    tracing::error!(
        log_epoch = log.epoch.0,
        only_here_count = log.contents.entry_count,
        only_here_bytes = log.contents.payload_bytes + log.spill_bytes,
        spill_file_count = log.spill_file_count,
        kept_at = %stalled.display(),
        "another node has owned the pool since this directory's log was written; the daemon keeps \
         the log and does not replay it: the writes that it alone holds are not part of the pool"
    );
    Ok(true)
}

/// Reports whether the directory has a ring file. Without one there is no log, whatever else is
/// there (a lock, a lost+found). A directory that cannot be read does not count as empty.
///
/// # Errors
/// `Io` if the directory cannot be listed.
pub fn has_ring(log_dir: &Path) -> Result<bool> {
    let failed =
        |error| Error::with_source(ErrorKind::Io, format!("list {}", log_dir.display()), error);
    let entries = match std::fs::read_dir(log_dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        entries => entries.map_err(failed)?,
    };
    for entry in entries {
        if entry.map_err(failed)?.path().extension().is_some_and(|kind| kind == "log") {
            return Ok(true);
        }
    }
    Ok(false)
}

fn free_name(log_dir: &Path, epoch: u64) -> PathBuf {
    (0..)
        .map(|count| match count {
            0 => log_dir.with_file_name(format!("{ASIDE}{epoch}")),
            _ => log_dir.with_file_name(format!("{ASIDE}{epoch}-{count}")),
        })
        .find(|path| !path.exists())
        .expect("some name is free")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_snapshots_tell_the_state() {
        let base = Base { epoch: Epoch(7), lsn: Lsn(1234), next_volume: 3 };
        assert_eq!(base.snapshot_name(), "superseded-7-1234-3");
        assert_eq!(Base::of_snapshot("superseded-7-1234-3"), Some(base));
        for other in ["superseded-7-1", "superseded-7-1-x", "superseded--1-2", "auto-7-1-2", "7-1"]
        {
            assert_eq!(Base::of_snapshot(other), None, "{other}");
        }
    }
}
