//! The end of serving a pool: the work left when a stop is requested, and closing the pool.
//!
//! Invariants:
//! - Order of closing: front ends, destage, log, metadata, ownership. A pool is released only if
//!   the store holds everything: another machine may then open it without having to accept a loss.

use super::{CLOSE_DESTAGE_MAX, OpenPool, Signals, failed_log};
use crate::pool::Pool;
use block::{Error, ErrorKind, Result};
use std::collections::HashSet;
use std::time::Duration;

/// Limit for the destage at close while devices wait for the next daemon: most data was moved
/// before they were left.
const CLOSE_DESTAGE_DEVICES_MAX: Duration = Duration::from_secs(5);
/// Exit code of a daemon that a second signal ended before its stop was complete.
pub(crate) const EXIT_AT_ONCE: i32 = 3;
/// Exit code of a daemon that ended because the disk of its write log failed.
pub(crate) const EXIT_LOG_FAILED: u8 = 5;

impl OpenPool {
    /// Stops in order: moves the missing data to the store within a bounded time, and releases the
    /// pool if the store has everything.
    ///
    /// # Errors
    /// The first failure. No acknowledged write is lost by it.
    pub async fn close(self) -> Result<()> {
        self.close_with(false).await
    }

    /// Like [`OpenPool::close`]. With `has_devices`, users wait for the next daemon, and only data
    /// that the store takes at once is moved.
    pub(super) async fn close_with(self, has_devices: bool) -> Result<()> {
        match self.close_pool(has_devices).await? {
            Closed::AllInStore | Closed::LacksLost(_) => self.ownership.release().await,
            Closed::Lacks(_) => Ok(()),
        }
    }

    /// Closes a pool whose opening has failed or was stopped after its jobs had begun. If volumes
    /// may not have recorded yet that they step back, this directory stays the owner and remembers
    /// that they have to.
    pub(super) async fn close_unserved(self) {
        let closed = match self.step_back {
            Some(_) => self.pool.close().await.map(drop),
            None => self.close().await,
        };
        if let Err(error) = closed {
            tracing::warn!(
                error = %error.chain(),
                "a pool whose opening has failed did not close in order, and stays owned by this directory"
            );
        }
    }

    /// Like [`OpenPool::close`], but removes the pool instead of releasing it. Returns the time of
    /// the removal.
    ///
    /// # Errors
    /// Also fails if the store does not hold everything; the pool is then not removed.
    pub(crate) async fn remove(self) -> Result<u64> {
        let lacks = match self.close_pool(false).await? {
            Closed::AllInStore => return self.ownership.remove(self.pool.clock().stamp()).await,
            Closed::LacksLost(lacks) => {
                // It stays released, like after a stop.
                self.ownership.release().await?;
                lacks
            }
            Closed::Lacks(lacks) => lacks,
        };
        let what = "remove the pool: the store does not hold all of it, and it was not removed. See \
             `spindle status`, and try again once the cause is gone";
        Err(Error::with_source(lacks.kind(), what, lacks))
    }

    /// Moves the missing data to the store within a bounded time, and closes everything but the
    /// ownership.
    async fn close_pool(&self, has_devices: bool) -> Result<Closed> {
        let destage_max = if has_devices { CLOSE_DESTAGE_DEVICES_MAX } else { CLOSE_DESTAGE_MAX };
        let everything = tokio::time::timeout(destage_max, self.pool.destage_all()).await;
        // With devices, the next daemon continues with the rest. Without devices, the pool may be
        // meant to move to another machine.
        let is_meant = has_devices && everything.is_err();
        let lacking = match everything {
            Ok(Ok(_)) => None,
            Ok(Err(error)) => Some(error),
            Err(_) => Some(Error::new(ErrorKind::Unavailable, "the store did not take it in time")),
        };
        if let Some(error) = &lacking
            && !is_meant
        {
            tracing::warn!(error = %error.chain(), "the log's tail was not moved to the store");
        }
        self.pool.clock().keep();
        self.pool.clock().save();
        let closed = self.pool.close().await;
        self.note_failed_log().await;
        let (last_lsn, destaged_lsn) = closed?;
        let lacks = |lacking: Option<Error>| {
            let unknown = || Error::new(ErrorKind::Unavailable, "the newest writes are not there");
            lacking.unwrap_or_else(unknown)
        };
        if destaged_lsn < last_lsn {
            if is_meant {
                tracing::info!(
                    last_lsn = last_lsn.0,
                    destaged_lsn = destaged_lsn.0,
                    "the newest writes wait in this directory's log for the next start, and the pool stays \
                     owned by it"
                );
            } else {
                tracing::warn!(
                    last_lsn = last_lsn.0,
                    destaged_lsn = destaged_lsn.0,
                    "the store does not hold the newest writes; they are in this directory's log, and \
                     the pool stays owned by it"
                );
            }
            return Ok(Closed::Lacks(lacks(lacking)));
        }
        let aside = self.pool.asides();
        let missing: HashSet<[u8; 16]> =
            self.recovery.missing_sides.iter().map(|side| side.file.id).collect();
        if aside.values().flatten().any(|file| !missing.contains(&file.id)) {
            tracing::warn!(
                volumes = ?self.names_of(aside.keys().map(|volume| volume.0)),
                "the store lacks writes of volumes that cannot be destaged; they are in side files \
                 in this directory's log, and the pool stays owned by it"
            );
            return Ok(Closed::Lacks(lacks(lacking)));
        }
        match aside.is_empty() {
            true => Ok(Closed::AllInStore),
            false => Ok(Closed::LacksLost(lacks(lacking))),
        }
    }

    /// Notes a failed write log in the store, because the directory may not take the note.
    pub(super) async fn note_failed_log(&self) {
        if let Some(note) = self.pool.log_failure_note() {
            failed_log::note(&self.store, &self.node, note).await;
        }
    }

    fn names_of(&self, ids: impl Iterator<Item = u32>) -> Vec<String> {
        let records = self.pool.records();
        let name = |id| match records.iter().find(|record| record.id == id) {
            Some(record) => record.name.clone(),
            None => format!("number {id}"),
        };
        ids.map(name).collect()
    }
}

/// Contents of the store when a pool was closed.
enum Closed {
    /// Everything.
    AllInStore,
    /// All but writes whose side files are missing here, so this directory is of no use for them.
    LacksLost(Error),
    /// Not everything: the rest is in this directory.
    Lacks(Error),
}

/// Moves the log to the store while devices are still served. From the moment a device is left
/// until the next daemon's first answer its user waits, so slow work is done before. Errors show
/// when the pool is closed. Returns why the pool is no longer ours if it was lost meanwhile or
/// before.
pub(super) async fn move_while_served(pool: &Pool) -> Option<Error> {
    let lost = tokio::select! {
        lost = pool.ended() => Some(lost),
        _ = tokio::time::timeout(CLOSE_DESTAGE_MAX, pool.destage_all()) => None,
    };
    if lost.is_some() {
        return lost;
    }
    // The loss may have ended the move first.
    tokio::select! {
        biased;
        lost = pool.ended() => Some(lost),
        () = std::future::ready(()) => None,
    }
}

/// Ends the process at the first signal after `spare_count` others, even during an orderly stop.
/// Acknowledged writes are in the write log, like after a kill.
pub(super) fn end_at_once_on_another(mut signals: Signals, spare_count: usize) {
    tokio::spawn(async move {
        for _ in 0..=spare_count {
            signals.stop().await;
        }
        tracing::warn!(
            "ended at once, because another signal came during the stop; what the store does not \
             hold is in the write log, and the pool stays owned by this directory"
        );
        std::process::exit(EXIT_AT_ONCE);
    });
}
