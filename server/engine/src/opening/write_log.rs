//! Opening the write log: checks before it whether another owner has superseded the log of the
//! directory, and whether it is there; or asks the members of the log.
//!
//! Invariants:
//! - A log is set aside only if no batch of it was written since this directory has the pool, and
//!   is removed only if it proves that the store has all of it.
//! - Advice to give a log up always says what the log holds.

use super::{Taken, spill_files_wanted};
use crate::config::PoolConfig;
use crate::failed_log;
use crate::log_members::{LogMembers, LogTaken, OwnerRole};
use crate::marks::{LOG_LOST, LOG_MADE, make_mark};
use crate::restore::Restored;
use crate::steps::Steps;
use crate::superseded::has_ring;
use block::{Epoch, Error, ErrorKind, Lsn, Result};
use control::manifest::{NodeDir, Ownership};
use std::path::Path;
use tiering::Tier;
use wal::{Log, LogIdentity, LogNotes, LogSources, Recovery};

/// State of the write log. It is outside the log's own directory, which may be on another disk.
const LOG_STATE: &str = "log.state";

/// The log of a directory.
pub(super) struct LogFound {
    pub(super) log: Log,
    pub(super) recovery: Recovery,
    /// The previous log was lost.
    pub(super) is_log_lost: bool,
    /// The store had a note that it has failed.
    pub(super) is_heard: bool,
    /// The role of the owner among the log's members.
    pub(super) role: Option<Box<dyn OwnerRole>>,
}

/// Opens the log of the directory.
pub(super) async fn open_log(
    config: &PoolConfig,
    taken: &Taken,
    (tier, restored): (&Tier, Option<&Restored>),
    steps: &mut Steps,
) -> Result<LogFound> {
    let Taken { node, dir, store, keys, key, ownership, .. } = taken;
    if let Some(restored) = restored {
        restored.keep_apart(tier);
    }
    // Must follow `keep_apart`, which sets the same bound: if the findings are unknown, the bound
    // set here is higher.
    crate::scrub::keep_from_bad(tier, store, key, keys.pool()).await;
    let log_dir = dir.join("log");
    let members = config.log_members.as_ref().filter(|_| ownership.is_by_quorum());
    let (decided, is_log_lost) = match members {
        Some(members) => {
            steps.end("scrub findings");
            let taken = ask(&**members, ownership, tier.destaged_lsn()).await?;
            steps.end("members");
            (Some(taken), false)
        }
        None => {
            set_aside_if_superseded(&log_dir, ownership, node)?;
            let destaged = tier.destaged_lsn();
            (None, check_log_is_there(dir, &log_dir, ownership, node, destaged)?)
        }
    };
    open_at(config, taken, tier, (decided, is_log_lost), steps).await
}

/// Opens the log where the members have decided that it ends, or by what the directory tells.
async fn open_at(
    config: &PoolConfig,
    taken: &Taken,
    tier: &Tier,
    (decided, is_log_lost): (Option<LogTaken>, bool),
    steps: &mut Steps,
) -> Result<LogFound> {
    let Taken { node, dir, store, keys, key, ownership, .. } = taken;
    if is_log_lost {
        make_mark(dir, LOG_LOST)?;
    }
    let log_dir = dir.join("log");
    // The log is dropped before the role, whose end then finds the directory free.
    let (role, quorum) = decided.map(|LogTaken { quorum, role }| (role, quorum)).unzip();
    let identity = LogIdentity {
        pool: keys.pool().into_bytes(),
        epoch: ownership.epoch(),
        boot_id: LogIdentity::kernel_boot_id()?,
        served_epoch: node.epoch(),
        configuration: quorum.as_ref().map_or(0, |_| ownership.manifest().number),
    };
    let (options, destaged) = (config.log, tier.destaged_lsn());
    let log_key = key.clone();
    let spills = spill_files_wanted(tier);
    let advice = giving_up_the_log(dir, &log_dir);
    let heard = failed_log::heard(store, node).await;
    let is_heard = heard.is_some();
    let notes = LogNotes { beside: vec![dir.join(LOG_STATE)], heard: heard.into_iter().collect() };
    let sources = LogSources { wanted: spills, notes, quorum };
    let opened = tokio::task::spawn_blocking(move || {
        Log::open_from(&log_dir, identity, log_key, options, destaged, &sources)
    });
    let name = &config.name;
    let (log, recovery) = opened
        .await
        .map_err(|error| Error::with_source(ErrorKind::Io, "open the write log", error))?
        .map_err(|error| match wal::is_incomplete(&error) {
            // The error says what this log holds.
            true => error.context(format!("pool {name} does not open with this log. {advice}")),
            false => error,
        })?;
    steps.end("log");
    if let Some(role) = &role {
        role.opened(&log).await?;
        steps.end("opening batch");
    }
    store.clean_unfinished(tiering::segment::FOLDER);
    make_mark(dir, LOG_MADE)?;
    report_recovery(&recovery);
    Ok(LogFound { log, recovery, is_log_lost, is_heard, role })
}

/// Asks the members of the log where it ends.
async fn ask(members: &dyn LogMembers, ownership: &Ownership, destaged: Lsn) -> Result<LogTaken> {
    let manifest = ownership.manifest();
    let Some(configuration) = &manifest.configuration else {
        let what =
            "open the write log: the pool was taken by a quorum, and its manifest names no members";
        return Err(Error::new(ErrorKind::Corrupt, what));
    };
    members.take_over(ownership.epoch(), manifest.number, configuration, destaged).await
}

/// Logs the result of opening the log.
fn report_recovery(recovery: &wal::Recovery) {
    tracing::info!(
        entry_count = recovery.entry_count,
        last_lsn = recovery.last_lsn.0,
        was_clean = recovery.was_clean,
        "the pool opened its write log"
    );
}

/// Moves a log that this directory may not replay out of the way. Never moves one that was written
/// since the directory has the pool: whatever its end looks like, it may hold the only copy of some
/// writes.
fn set_aside_if_superseded(log_dir: &Path, ownership: &Ownership, node: &NodeDir) -> Result<()> {
    let manifest = ownership.manifest();
    let since = Epoch(manifest.owner_since_epoch);
    if node.epoch() >= since {
        return Ok(());
    }
    crate::superseded::set_aside_if_superseded(log_dir, manifest.pool, since).map(drop)
}

/// Checks for a log that was here and is gone. It held acknowledged writes unless the pool was
/// released. Returns true if it is gone and an operator chose to continue without it.
fn check_log_is_there(
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

/// Advice for a log that is gone or lacks its end. The caller must also say what `log_dir` holds.
fn giving_up_the_log(dir: &Path, log_dir: &Path) -> String {
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
