//! An owner: what it sends to each member, and when a batch counts as acknowledged or flushed.
//!
//! Invariants:
//! - Nothing is acknowledged before a quorum has written the opening batch of this epoch. From then
//!   on, what a quorum has written is acknowledged in order.
//! - While the members are being changed, the quorum of both configurations is needed, until the
//!   chain is known to have the new one.
//! - A member that has promised a later epoch ends the owner for good.
//! - A read is served only under a lease.

use crate::log_index::LogIndex;
use crate::messages::{Answer, LeaseToken, Request};
use crate::position::{Batch, Position};
use crate::quorum::{Configuration, MemberId, Quorums};
use crate::seeded_bugs::{SeededBugs, seeded_bugs};
use block::Epoch;
use std::collections::BTreeMap;

/// What an owner knows of a member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Progress {
    /// The run of the member that answered last.
    pub run: u64,
    /// Sequence of the next batch to send.
    pub next: u64,
    /// Highest sequence that it has answered for as written.
    pub written: u64,
    /// Highest sequence that it has answered for as synced.
    pub synced: u64,
    /// Newest token that came back.
    pub lease: Option<LeaseToken>,
}

/// The batches that a member gets next; the caller adds their bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sending {
    /// Position of the batch before the first one.
    pub previous: Position,
    /// Sequence of the last batch; that of `previous` if there is none.
    pub last: u64,
    /// See [`Request::Append`].
    pub proven_at: Option<(u64, Position)>,
}

impl Sending {
    /// Makes the request of it.
    #[must_use]
    pub fn request(
        self,
        epoch: Epoch,
        batches: Vec<Batch>,
        is_sync: bool,
        lease: Option<LeaseToken>,
    ) -> Request {
        let Sending { previous, proven_at, .. } = self;
        Request::Append { epoch, previous, batches, proven_at, is_sync, lease }
    }
}

/// The owner of a pool under one epoch. Its own log belongs to the member on the same node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Owner {
    me: MemberId,
    epoch: Epoch,
    quorums: Quorums,
    /// Sequence of the opening batch.
    opening: u64,
    members: BTreeMap<MemberId, Progress>,
    /// Sequence of the newest batch when the change of members began.
    change_at: u64,
    superseded_by: Option<Epoch>,
    seeded_bugs: SeededBugs,
}

impl Owner {
    /// Makes the owner of `epoch`, whose opening batch has the sequence `opening` and is written on
    /// the node itself.
    #[must_use]
    pub fn new(me: MemberId, epoch: Epoch, configuration: Configuration, opening: u64) -> Owner {
        Owner::new_with(me, epoch, configuration, opening, seeded_bugs())
    }

    pub(crate) fn new_with(
        me: MemberId,
        epoch: Epoch,
        configuration: Configuration,
        opening: u64,
        seeded_bugs: SeededBugs,
    ) -> Owner {
        let quorums = Quorums { current: configuration, next: None };
        let mut owner = Owner {
            me,
            epoch,
            quorums,
            opening,
            members: BTreeMap::new(),
            change_at: 0,
            superseded_by: None,
            seeded_bugs,
        };
        owner.set_members();
        owner
    }

    fn set_members(&mut self) {
        let held = self.quorums.members();
        self.members.retain(|member, _| held.contains(member));
        for member in held {
            let first = Progress { next: self.opening, ..Progress::default() };
            self.members.entry(member).or_insert(first);
        }
    }

    /// The owner's epoch.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The later epoch that ended this owner, if one did.
    #[must_use]
    pub fn superseded_by(&self) -> Option<Epoch> {
        self.superseded_by
    }

    /// Ends the owner, because the member on its own node has promised a later epoch. Call this before
    /// that promise is answered: the candidate may count on this member alone to know of the lease.
    pub fn on_own_promise(&mut self, promised: Epoch) {
        if promised > self.epoch && !self.seeded_bugs.own_promise_unseen {
            self.superseded_by = self.superseded_by.max(Some(promised));
        }
    }

    /// What is known of a member.
    #[must_use]
    pub fn progress(&self, member: &MemberId) -> Option<&Progress> {
        self.members.get(member)
    }

    /// The members of the configurations that are held.
    pub fn members(&self) -> impl Iterator<Item = &MemberId> {
        self.members.keys()
    }

    /// Notes how far the node's own log is written and synced.
    pub fn on_own(&mut self, written: u64, synced: u64) {
        if let Some(own) = self.members.get_mut(&self.me) {
            own.written = own.written.max(written);
            own.synced = own.synced.max(synced);
        }
    }

    /// What to send to a member next; `None` if it has to be reset, because it lacks batches that
    /// the owner's log has released.
    #[must_use]
    pub fn sending(&self, member: &MemberId, log: &LogIndex, count_max: u64) -> Option<Sending> {
        let progress = self.members.get(member)?;
        let previous = log.at(progress.next.checked_sub(1)?)?;
        let last = log.tail().sequence.min(previous.sequence + count_max);
        let proven = self.opening.max(progress.written);
        let proven_at = match self.is_open() {
            true => log.at(proven).map(|position| (progress.run, position)),
            false => None,
        };
        Some(Sending { previous, last, proven_at })
    }

    /// Takes an answer of a member.
    pub fn on_answer(&mut self, from: &MemberId, answer: &Answer) {
        if let Answer::Superseded { promised, .. } = answer {
            self.superseded_by =
                self.superseded_by.max((*promised > self.epoch).then_some(*promised));
        }
        let Some(progress) = self.members.get_mut(from) else { return };
        let run = answer.run();
        if answer.epoch() != self.epoch || run < progress.run {
            return;
        }
        progress.run = run;
        match answer {
            Answer::Appended { written, synced, lease, .. } => {
                progress.written = progress.written.max(*written);
                progress.synced = progress.synced.max(*synced);
                progress.next = progress.next.max(written + 1);
                progress.lease = progress.lease.max(*lease);
            }
            Answer::Lacking { sequence, may_match, start, .. } => {
                // An answer to an earlier sending says nothing about the present one.
                if *sequence + 1 == progress.next {
                    progress.next = if sequence + 1 < *start { *start } else { may_match + 1 };
                }
            }
            Answer::Superseded { .. } | Answer::Promised { .. } | Answer::Batches { .. } => {}
        }
    }

    /// Whether clients may be served: a quorum has the opening batch on stable storage.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.committed() >= self.opening
    }

    /// Every batch up to this sequence is acknowledged. 0 before the opening batch is.
    #[must_use]
    pub fn acknowledged(&self) -> u64 {
        let (own, quorum) = (self.own().written, self.counting().reached(|m| self.of(m).written));
        self.if_opened(own.min(quorum))
    }

    /// Every batch up to this sequence is on stable storage of a quorum. 0 before the opening batch
    /// is.
    #[must_use]
    pub fn committed(&self) -> u64 {
        if self.seeded_bugs.own_sync_is_commit && self.acknowledged() > self.opening {
            return self.own().synced;
        }
        self.if_opened(self.counting().reached(|member| self.of(member).synced))
    }

    /// Batches of earlier epochs count only together with the opening batch: until a quorum has that
    /// one, a later owner may still choose a log without them.
    fn if_opened(&self, sequence: u64) -> u64 {
        if sequence >= self.opening { sequence } else { 0 }
    }

    fn counting(&self) -> Quorums {
        match (&self.quorums.next, self.seeded_bugs.unrecorded_configuration) {
            (Some(next), true) => Quorums { current: next.clone(), next: None },
            _ => self.quorums.clone(),
        }
    }

    fn own(&self) -> Progress {
        self.of(&self.me)
    }

    fn of(&self, member: &MemberId) -> Progress {
        self.members.get(member).copied().unwrap_or_default()
    }

    // --- lease ---

    /// The time until which the owner may answer reads, by its own monotonic clock in nanoseconds,
    /// for leases of `length`. `None` without a lease.
    #[must_use]
    pub fn lease_until(&self, length: u64) -> Option<u64> {
        if self.superseded_by.is_some() {
            return None;
        }
        if self.seeded_bugs.read_without_lease {
            return Some(u64::MAX);
        }
        let held = [Some(&self.quorums.current), self.quorums.next.as_ref()];
        held.into_iter().flatten().map(|held| self.lease_of(held, length)).min().flatten()
    }

    fn lease_of(&self, configuration: &Configuration, length: u64) -> Option<u64> {
        let needed = configuration.quorum.checked_sub(1)?;
        if needed == 0 {
            return Some(u64::MAX); // nobody else can have taken part in a promise
        }
        let others = configuration.members.iter().filter(|member| **member != self.me);
        let mut tokens: Vec<LeaseToken> =
            others.filter_map(|member| self.of(member).lease).collect();
        tokens.sort_unstable_by(|a, b| b.cmp(a));
        tokens.get(needed - 1).map(|token| token.0.saturating_add(length))
    }

    // --- changing the members ---

    /// Begins to change the members: from now on both configurations are held. Returns false,
    /// without effect, if a change is under way or `next` is not valid.
    pub fn begin_change(&mut self, next: Configuration, log: &LogIndex) -> bool {
        if self.quorums.next.is_some() || !next.is_valid() || !next.members.contains(&self.me) {
            return false;
        }
        self.quorums.next = Some(next);
        self.change_at = log.tail().sequence;
        self.set_members();
        true
    }

    /// The configuration whose link may be created now, because its quorum has every batch that was
    /// acknowledged without it.
    #[must_use]
    pub fn change_to_record(&self) -> Option<&Configuration> {
        let next = self.quorums.next.as_ref()?;
        let is_caught_up = next.reached(|member| self.of(member).synced) >= self.change_at;
        let is_ready = self.is_open() && is_caught_up;
        (is_ready || self.seeded_bugs.unrecorded_configuration).then_some(next)
    }

    /// Ends a change whose link is in the chain.
    pub fn end_change(&mut self) {
        if let Some(next) = self.quorums.next.take() {
            self.quorums.current = next;
            self.set_members();
        }
    }
}
