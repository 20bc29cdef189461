//! The directory of the write log before the log is opened: checks whether another owner has
//! superseded the log, and whether it is there.
//!
//! Invariants:
//! - A log is set aside only if no batch of it was written since this directory has the pool, and
//!   is removed only if it proves that the store has all of it.
//! - Advice to give a log up always says what the log holds.

use crate::marks::{LOG_LOST, LOG_MADE};
use block::{Epoch, Error, ErrorKind, Lsn, Result};
use control::manifest::{NodeDir, Ownership};
use std::path::{Path, PathBuf};

/// Moves a log that this directory may not replay out of the way. Never moves one that was written
/// since the directory has the pool: whatever its end looks like, it may hold the only copy of some
/// writes.
pub(super) fn set_aside_if_superseded(
    log_dir: &Path,
    ownership: &Ownership,
    node: &NodeDir,
) -> Result<()> {
    let manifest = ownership.manifest();
    let since = Epoch(manifest.owner_since_epoch);
    if node.epoch() >= since {
        return Ok(());
    }
    let pool = manifest.pool.into_bytes();
    let Some(log) = wal::find_superseded(log_dir, pool, since)? else { return Ok(()) };
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
        return std::fs::remove_dir_all(&stalled).map_err(|error| {
            Error::with_source(ErrorKind::Io, format!("remove {}", stalled.display()), error)
        });
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
    Ok(())
}

fn free_name(log_dir: &Path, epoch: u64) -> PathBuf {
    (0..)
        .map(|count| match count {
            0 => log_dir.with_file_name(format!("log.superseded-{epoch}")),
            _ => log_dir.with_file_name(format!("log.superseded-{epoch}-{count}")),
        })
        .find(|path| !path.exists())
        .expect("some name is free")
}

/// Checks for a log that was here and is gone. It held acknowledged writes unless the pool was
/// released. Returns true if it is gone and an operator chose to continue without it.
pub(super) fn check_log_is_there(
    dir: &Path,
    log_dir: &Path,
    ownership: &Ownership,
    node: &NodeDir,
    destaged: Lsn,
) -> Result<bool> {
    let was_made = dir.join(LOG_MADE).exists();
    let is_ours = ownership.previous().is_some_and(|previous| {
        !previous.is_released && ownership.manifest().owner_since_epoch <= previous.epoch
    });
    let has_ring = has_ring(log_dir)?;
    if was_made && is_ours && !has_ring {
        let what = format!(
            "open the write log: {} holds no log, {}; this directory had a log when the pool was last \
             open and the pool was not closed in order, so writes after LSN {destaged} are in that \
             log only. {}",
            log_dir.display(),
            rest_of_log(log_dir)?,
            giving_up_the_log(dir, log_dir)
        );
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    // An opening that was interrupted before it reached the log has served nothing.
    let has_served = node.epoch().0 >= ownership.manifest().owner_since_epoch;
    let is_lost = dir.join(LOG_LOST).exists() || (is_ours && has_served && !has_ring);
    if is_lost {
        tracing::warn!(
            destaged_lsn = destaged.0,
            "the write log of this directory is gone and the pool was not closed in order: \
             acknowledged writes that had not reached the store are lost"
        );
    }
    Ok(is_lost)
}

/// Reports whether the directory has a ring file. Without one there is no log, whatever else is
/// there (a lock, a lost+found). A directory that cannot be read does not count as empty.
fn has_ring(log_dir: &Path) -> Result<bool> {
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

/// Advice for a log that is gone or lacks its end. The caller must also say what `log_dir` holds.
pub(super) fn giving_up_the_log(dir: &Path, log_dir: &Path) -> String {
    format!(
        "Bring the newest log back. Only if it is gone for good, and you give its writes up, move \
         {} away and delete {}, which is an empty mark; keep the moved log, which may hold writes \
         that exist nowhere else",
        log_dir.display(),
        dir.join(LOG_MADE).display()
    )
}

/// Describes what a directory without a ring still holds.
fn rest_of_log(log_dir: &Path) -> Result<String> {
    let (count, bytes) = wal::weigh_spill_files(log_dir)?;
    Ok(match count {
        0 => "and no spill files either".to_owned(),
        _ => format!("but {count} spill files of {bytes} bytes, which may be nowhere else"),
    })
}
