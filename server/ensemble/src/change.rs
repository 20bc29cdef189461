//! Changing the members of a log while its owner serves (docs/protocol.md, "Configuration").
//!
//! Invariants:
//! - A new member counts only once it has every batch that was acknowledged.
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

    /// Begins a change: from now on both configurations are held. Returns false if the quorum of `next`
    /// lacks anything that was acknowledged: bring the new member up first, and try again.
    ///
    /// # Errors
    /// `Unavailable` if the owner has ended.
    pub fn begin_change(&self, next: Configuration) -> Result<bool> {
        self.check_runs()?;
        let (has_begun, changes) = {
            let mut state = self.shared.state.lock();
            let has_begun = state.owner.begin_change(next);
            (has_begun, self.shared.publish(&state))
        };
        self.go_on(changes);
        Ok(has_begun)
    }

    /// Ends a change whose link, with this number, is in the chain.
    pub fn end_change(&self, number: u64) {
        self.change_owner(|owner| {
            owner.end_change(number);
        });
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
