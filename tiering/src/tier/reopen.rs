//! Keeps the metadata database open: when it has given up, another handle replaces it.
//!
//! Invariants:
//! - Only the owner reopens the database. Every attempt repeats the checks of the first opening,
//!   and a `Fenced` result is final.
//! - The handle changes only while no commit is under way. A window whose commit failed is passed
//!   again; it then proves to be destaged already, or is destaged again from the log, but never in
//!   part.
//! - Attempts continue until one succeeds or the tier ends. The pause between attempts is bounded.

use super::opening::{close_quietly, open_database};
use super::{CLOSE_TIMEOUT, TierOptions};
use crate::pool::Metadata;
use crate::recording_store::RecordingStore;
use block::conditions::Report;
use block::{ConditionKind, Error, ErrorKind, Result};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Pause after the first failed attempt; it doubles up to [`PAUSE_MAX`]. Chosen by hand: bounds the
/// delay until the end of an outage is noticed.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// An attempt that takes longer than this raises a condition. Chosen by hand: an opening takes a
/// second, or a few on a busy machine.
const NOTICE: Duration = Duration::from_secs(5);
/// Subject of the condition.
const SUBJECT: &str = "pool";

/// The job; see the module.
pub(crate) struct Reopener {
    /// Options of the first opening, which are those of every other.
    pub options: TierOptions,
    pub metadata: Arc<Metadata>,
    /// The store, for the database.
    pub watched: Arc<RecordingStore>,
    /// Number of times that the database was reopened.
    pub reopen_count: AtomicU64,
}

/// Runs [`keep`] and restarts it if it panics. Without it, a database that has ended would stay
/// closed.
pub(super) async fn supervised(reopener: Weak<Reopener>) {
    let job = block::Job::new("metadata upkeep", "a metadata database that ends is opened late");
    while let Err(why) = block::jobs::caught(keep(reopener.clone())).await {
        let Some(this) = reopener.upgrade() else { return };
        job.raise_died(&this.options.conditions, &why);
        drop(this);
        tokio::time::sleep(PAUSE_MAX).await;
    }
}

/// Reopens the metadata database whenever it ends, for as long as the tier lives.
pub(super) async fn keep(reopener: Weak<Reopener>) {
    loop {
        let Some(mut health_watcher) =
            reopener.upgrade().map(|this| this.metadata.map.health_watcher())
        else {
            return;
        };
        if !health_watcher.ended().await {
            return;
        }
        let mut pause = PAUSE_MIN;
        loop {
            let Some(this) = reopener.upgrade() else { return };
            let reopened = tokio::select! {
                reopened = this.reopen_or_say() => reopened,
                () = health_watcher.finished() => return,
            };
            match reopened {
                Ok(()) => break,
                Err(error) if error.kind() == ErrorKind::Fenced => {
                    return this.metadata.map.set_final(error);
                }
                Err(error) => this.metadata.map.set_ended(error),
            }
            drop(this);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = health_watcher.finished() => return,
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

impl Reopener {
    /// Like [`Reopener::reopen`], but raises a condition that lasts until an attempt succeeds.
    async fn reopen_or_say(&self) -> Result<()> {
        let conditions = &self.options.conditions;
        let say = |why: &str| {
            let report = Report::new(
                format!("the metadata database has ended and is being opened again: {why}"),
                "reads and writes go on from memory and the log; nothing is destaged, and other reads wait for up to \
                 two minutes",
                "check the store; if it answers and this condition stays, run `spindle fsck`",
            );
            conditions.raise(ConditionKind::MetadataReopening, SUBJECT, report);
        };
        let mut reopening = std::pin::pin!(self.reopen());
        let reopened = match tokio::time::timeout(NOTICE, &mut reopening).await {
            Ok(reopened) => reopened,
            Err(_) => {
                let said = self.watched.last_failure();
                say(said.as_deref().unwrap_or("the store has not answered"));
                reopening.await
            }
        };
        match &reopened {
            Ok(()) => drop(conditions.clear(ConditionKind::MetadataReopening, SUBJECT)),
            Err(error) if error.kind() == ErrorKind::Fenced => {}
            Err(error) => say(&error.chain()),
        }
        reopened
    }

    /// Makes one attempt to continue with another handle of the metadata database.
    async fn reopen(&self) -> Result<()> {
        // While this lock is held, no commit is under way and none begins.
        let mut writer = self.metadata.writer.lock().await;
        let old = self.metadata.map.db();
        if let Some(error) = old.fence() {
            return Err(error);
        }
        // The background tasks of the old handle must not run beside those of the next. Data that
        // only its memory holds is still in the log.
        if let Ok(Err(error)) = tokio::time::timeout(CLOSE_TIMEOUT, old.abandon()).await {
            tracing::debug!(
                error = %error.chain(),
                "could not close a metadata database that had ended"
            );
        }
        let db = open_database(&self.options, &self.watched, true).await?;
        let reopened =
            self.metadata.map.reopen(&mut writer, db.clone(), &self.options.pool_key).await;
        if reopened.is_err() {
            close_quietly(&db).await;
            return reopened;
        }
        self.reopen_count.fetch_add(1, Ordering::Relaxed);
        tracing::info!("the data tier opened the metadata database again");
        Ok(())
    }
}

/// Interprets a failed opening that found another writer's claim, by asking
/// [`super::TierOptions::owner_check`].
pub(super) async fn fence_or_own_claim(options: &TierOptions, fenced: Error) -> Error {
    match &options.owner_check {
        // The pool is still ours, so the claim is our own, from an attempt whose answer was lost.
        Some(check) if check.ask().await.is_ok() => {
            let what = "open metadata: an earlier attempt of our own came in between";
            Error::with_source(ErrorKind::Unavailable, what, fenced)
        }
        _ => fenced,
    }
}
