//! Judges the end of the log that was found: whether every acknowledged entry is there.
//!
//! Invariants:
//! - A running kernel is no proof that entries are there: its page cache may have lost data that a
//!   failed sync or an unmounted file system could not write.
//! - Evidence of a loss is made durable before any step that could destroy it.

use crate::disk::state_files::{FoundState, StateKeeper};
use crate::format::state::{LogState, Standing, TailLoss};
use crate::ring::scan::Scan;
use block::{Error, Lsn, Result};

/// Evidence from outside the log itself.
pub(crate) struct Evidence {
    /// The recorded states that were found.
    pub(crate) states: Vec<FoundState>,
    /// Writing back the page cache has failed, and no earlier process was told.
    pub(crate) has_writeback_failed: bool,
}

/// The kind of loss, and its reason for people.
pub(crate) struct Lost {
    pub(crate) loss: TailLoss,
    pub(crate) reason: String,
}

impl Scan<'_> {
    /// Returns the loss of acknowledged entries that cannot be ruled out.
    pub(crate) fn judge_tail(&self, evidence: &Evidence) -> Option<Lost> {
        let loss = self.loss(evidence)?;
        let (last, durable) =
            (self.walk.last_lsn().max(self.args.destaged), self.walk.seen.durable_lsn);
        let cause = match loss {
            TailLoss::Reboot => "the machine stopped",
            TailLoss::Remount => "the file system of the log was unmounted and mounted again",
            TailLoss::Failure => "a write or sync of the log's files failed",
        };
        let reason = match self.acked_before_failure(evidence) {
            _ if self.args.quorum.is_some() => format!(
                "too few members of the log can prove that they have all of it: entries after {last} may be lost"
            ),
            Some(acked) if loss == TailLoss::Failure && acked > last => {
                format!("{cause}: entries after {last} up to {acked} were answered and are lost")
            }
            _ => format!(
                "{cause} while writes were answered ahead of stable storage: entries after {durable} may \
                 be lost, those after {last} are"
            ),
        };
        Some(Lost { loss, reason })
    }

    fn loss(&self, evidence: &Evidence) -> Option<TailLoss> {
        let Some(newest) = self.walk.newest.map(|newest| newest.header) else {
            if let Some(quorum) = self.args.quorum {
                return quorum.loss;
            }
            // Only the opening batch of a new ring may be torn without loss.
            return (self.walk.seen.sequence > 1).then_some(TailLoss::Reboot);
        };
        let own = || self.states_of_newest(evidence).filter(|(_, is_own)| *is_own);
        if !newest.is_settled {
            // If the kind is not known, the most serious one is assumed.
            return own().find_map(|(state, _)| state.owed).or(Some(TailLoss::Failure));
        }
        if let Some(quorum) = self.args.quorum {
            return quorum.loss;
        }
        if newest.is_clean || !newest.acks_before_sync {
            return None;
        }
        let last = self.walk.last_lsn().max(self.args.destaged);
        if let Some(acked) = self.acked_before_failure(evidence) {
            return (acked > last).then_some(TailLoss::Failure);
        }
        let is_failed = |state: &LogState, is_own| match state.standing {
            Standing::Open => false,
            Standing::Failed { acked } => is_own || acked.is_none_or(|acked| acked > last),
        };
        let is_damaged = evidence.states.iter().any(|one| one.is_own && one.state.is_none());
        if is_damaged
            || evidence.has_writeback_failed
            || self.states_of_newest(evidence).any(|(state, is_own)| is_failed(state, is_own))
        {
            return Some(TailLoss::Failure);
        }
        if newest.boot != self.args.identity.boot_id {
            return Some(TailLoss::Reboot);
        }
        let is_remounted = !self.args.seeded_bugs.remount_not_seen
            && own().any(|(state, _)| state.mount.is_some() && state.mount != self.args.mount);
        is_remounted.then_some(TailLoss::Remount)
    }

    /// Lists the states of the run that wrote the newest batch, each with whether it comes from
    /// this machine. Other states are outdated: a later run has opened the log.
    fn states_of_newest<'e>(
        &self,
        evidence: &'e Evidence,
    ) -> impl Iterator<Item = (&'e LogState, bool)> {
        let open = self.walk.newest.map(|newest| newest.header.open);
        let states =
            evidence.states.iter().filter_map(|one| Some((one.state.as_ref()?, one.is_own)));
        states.filter(move |(state, _)| Some(state.open) == open)
    }

    /// Returns the newest entry that was acknowledged before the log failed, if this machine has
    /// recorded it. A log that holds this entry has lost nothing; a log that does not has.
    fn acked_before_failure(&self, evidence: &Evidence) -> Option<Lsn> {
        let acked = |(state, is_own): (&LogState, bool)| match state.standing {
            Standing::Failed { acked } if is_own => acked,
            _ => None,
        };
        self.states_of_newest(evidence).filter_map(acked).max()
    }

    /// Records for the member on these files that batches may be missing which only the page cache
    /// shows, and returns the error of the open. Its owner would count all of them as synced, although
    /// it knows only what the members say of theirs.
    pub(crate) fn refuse_unwritten(&self, evidence: &Evidence, error: Error) -> Error {
        if let Err(error) = self.note_failure(evidence, None) {
            warn_unnoted(&error);
        }
        error.context(
            "open the write log: its disk has failed to write a part of it, and the log is as it was. Look for \
             the disk in the kernel's messages, and open the pool again: this node's member then proves what it \
             had synced, and gets the rest from the others",
        )
    }

    /// Records a loss of which the next open has no other evidence: the kernel reports a write-back
    /// error only once.
    pub(crate) fn note_writeback_failure(
        &self,
        evidence: &Evidence,
        lost: Option<&Lost>,
    ) -> Result<()> {
        let is_new = evidence.has_writeback_failed
            && lost.is_some_and(|lost| lost.loss == TailLoss::Failure)
            && !self.states_of_newest(evidence).any(|(state, _)| state.standing != Standing::Open);
        if is_new { self.note_failure(evidence, None) } else { Ok(()) }
    }

    /// Records how far the log reaches before its intact tail is written again: the page cache may
    /// hold the only copy and may lose it if the write fails.
    pub(crate) fn note_before_rewriting(
        &self,
        evidence: &Evidence,
        lost: Option<&Lost>,
    ) -> Result<()> {
        let newest = self.walk.newest.map(|newest| newest.header);
        let is_at_risk = newest.is_some_and(|newest| newest.acks_before_sync && !newest.is_clean)
            && !self.unproven.is_empty();
        // A loss is already recorded, or will be just as visible at the next open.
        let has_others = self.args.quorum.is_some();
        if lost.is_some()
            || !is_at_risk
            || has_others
            || self.acked_before_failure(evidence).is_some()
        {
            return Ok(());
        }
        self.note_failure(evidence, Some(self.walk.last_lsn().max(self.args.destaged)))
    }

    fn note_failure(&self, evidence: &Evidence, acked: Option<Lsn>) -> Result<()> {
        let Some(newest) = self.walk.newest.map(|newest| newest.header) else { return Ok(()) };
        let (open, boot, mount) = (newest.open, newest.boot, self.args.mount);
        let bare = LogState { standing: Standing::Open, owed: None, open, boot, mount };
        let mut own = self.states_of_newest(evidence).filter(|(_, is_own)| *is_own);
        let state = own.next().map_or(bare, |(state, _)| *state);
        let failed = LogState { standing: Standing::Failed { acked }, ..state };
        let is_excluded = self.args.seeded_bugs.failure_not_noted;
        if is_excluded { Ok(()) } else { self.args.keeper.replace(&failed) }
    }
}

/// Records that the log of the run of `open` has failed after acknowledging the entries up to
/// `acked`.
///
/// # Errors
/// `Io` if no place took the note.
pub(crate) fn note_failure_of(
    open: &LogState,
    acked: Lsn,
    keeper: &dyn StateKeeper,
    is_excluded: bool,
) -> Result<()> {
    let standing = Standing::Failed { acked: Some(acked) };
    if is_excluded { Ok(()) } else { keeper.write_over(&LogState { standing, ..*open }) }
}

/// Logs for the operator that a failure could not be recorded.
pub(crate) fn warn_unnoted(error: &block::Error) {
    tracing::error!(
        error = %error.chain(),
        "could not note that the write log failed; unmount and mount the file system of the log \
         before the next start, which then looks for lost writes"
    );
}
