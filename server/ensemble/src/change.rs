//! Changing the members of a log while its owner serves (docs/protocol.md, "Configuration").
//!
//! Invariants:
//! - A new configuration counts only once its quorum has every batch that was acknowledged.
//! - The caller creates the link of the manifest chain between the begin and the end of a change, and
//!   holds both configurations while the outcome is unknown.

use crate::owned::{Changes, OwnedLog};
use crate::sender;
use crate::tasks;
use block::{Error, ErrorKind, Result};
use replication::{Configuration, MemberId};
use std::sync::Arc;

/// How far a member has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CatchUp {
    /// Sequence up to which it has written the log.
    pub written: u64,
    /// Sequence up to which batches are acknowledged.
    pub acknowledged: u64,
}

/// A change of the members that is under way. Without [`Change::may_record`] it is given up when it is
/// dropped; after it, both configurations are held until [`Change::end`], also if that is never called.
pub struct Change<'a> {
    owned: &'a OwnedLog,
    number: u64,
}

impl Change<'_> {
    /// Whether the link may be created: the quorum of the new configuration has everything that was
    /// acknowledged or committed without it. Once it is true, the change cannot be given up.
    ///
    /// # Errors
    /// `Unavailable` if the owner has ended.
    pub fn may_record(&self) -> Result<bool> {
        self.owned.check_runs()?;
        Ok(self.owned.shared.state.lock().owner.change_to_record().is_some())
    }

    /// Ends the change, whose link is in the chain with this number.
    ///
    /// # Errors
    /// `Invalid` for another number than it was begun with: both configurations stay held.
    pub fn end(self, number: u64) -> Result<()> {
        let mut has_ended = false;
        self.owned.change_owner(|owner| has_ended = owner.end_change(number));
        match has_ended || self.owned.shared.state.lock().owner.superseded_by().is_some() {
            true => Ok(()),
            false => {
                let what = format!(
                    "change the members: link {number} of the manifest chain has them instead of link {}",
                    self.number
                );
                Err(Error::new(ErrorKind::Invalid, what))
            }
        }
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.owned.change_owner(|owner| owner.give_up_change(self.number));
    }
}

impl OwnedLog {
    /// Begins to bring a node's log up, which is to become a member. It does not count yet. One at a
    /// time: another one takes the place of the one before. Called on a runtime.
    ///
    /// # Errors
    /// `Invalid` for a member; `Unavailable` if the owner has ended.
    pub fn bring_up(&self, member: MemberId) -> Result<()> {
        self.check_runs()?;
        let wake = {
            let mut state = self.shared.state.lock();
            if state.owner.progress(&member).is_some() {
                let what = format!("bring up {member}: it is a member of the log already");
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            state.owner.add_learner(member);
            let wake = Arc::default();
            let mut wakes = self.shared.wakes.write();
            wakes.retain(|member, _| state.owner.progress(member).is_some());
            wakes.insert(member, Arc::clone(&wake));
            wake
        };
        drop(tasks::spawn(sender::run(Arc::clone(&self.shared), member, wake)));
        Ok(())
    }

    /// Returns how far a member has come; `None` if it is neither a member nor brought up.
    #[must_use]
    pub fn catch_up(&self, member: MemberId) -> Option<CatchUp> {
        let state = self.shared.state.lock();
        let written = state.owner.progress(&member)?.written;
        Some(CatchUp { written, acknowledged: state.owner.acknowledged() })
    }

    /// Begins a change: from now on both configurations are held, and clients wait for the quorum of each.
    /// `None` if another change is under way, or the owner has not opened. Bring a new member up first.
    ///
    /// # Errors
    /// `Unavailable` if the owner has ended.
    pub fn begin_change(&self, next: Configuration) -> Result<Option<Change<'_>>> {
        self.check_runs()?;
        let number = next.number;
        let (has_begun, changes) = {
            let mut state = self.shared.state.lock();
            let has_begun = state.owner.begin_change(next);
            // The own disk may have synced more than any client wanted; the new quorum needs it, too.
            state.sync_wanted = state.sync_wanted.max(state.owner.committed());
            (has_begun, self.shared.publish(&state))
        };
        self.go_on(changes);
        // Made only then: dropped, it would give up the other change.
        Ok(has_begun.then(|| Change { owned: self, number }))
    }

    /// Gives up a node that was brought up and is no member, nor becomes one by the change that is under
    /// way.
    pub fn give_up(&self, member: MemberId) {
        self.change_owner(|owner| owner.remove_learner(member));
    }

    fn change_owner(&self, change: impl FnOnce(&mut replication::Owner)) {
        let changes = {
            let mut state = self.shared.state.lock();
            change(&mut state.owner);
            let changes = self.shared.publish(&state);
            let mut wakes = self.shared.wakes.write();
            // Those that are no members any more see it when they are woken.
            wakes.values().for_each(|wake| wake.notify_one());
            wakes.retain(|member, _| state.owner.progress(member).is_some());
            changes
        };
        self.go_on(changes);
    }

    fn go_on(&self, changes: Changes) {
        self.shared.react(changes);
        self.shared.wake_all();
    }

    fn check_runs(&self) -> Result<()> {
        match *self.shared.stop.borrow() {
            true => {
                Err(Error::new(ErrorKind::Unavailable, "change the members: the owner has ended"))
            }
            false => Ok(()),
        }
    }
}
