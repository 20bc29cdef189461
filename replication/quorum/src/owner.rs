//! An owner: what it sends to each member, and when a batch counts as acknowledged or flushed.
//!
//! Invariants:
//! - Nothing is acknowledged before a quorum has the opening batch of this epoch on stable storage.
//!   From then on, a batch is acknowledged, in order, when a quorum has written it.
//! - While the members are being changed, the quorum of both configurations is needed, until the
//!   chain is known to have the new one.
//! - A member that has promised a later epoch ends the owner for good.
//! - A read is served only under a lease.
//! - An owner that has resigned serves, sends and acknowledges nothing more.
//! - What is acknowledged or committed stays so, whatever changes afterwards.

use crate::batch::Batch;
use crate::log_index::LogIndex;
use crate::messages::{Answer, Lease, Request};
use crate::progress::Progress;
use crate::quorum::{Configuration, MemberId, Quorums};
use crate::seeded_bugs::{SeededBugs, seeded_bugs};
use block::{Epoch, Lsn, Position};
use std::collections::BTreeMap;

/// What a member gets next; the caller adds the bytes of the batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sending {
    /// Batches, or none.
    Append {
        /// Position of the batch before the first one.
        previous: Position,
        /// Sequence of the last batch; that of `previous` if there is none.
        last: u64,
        /// See [`Request::Append`].
        proven_at: Option<(u64, Position)>,
    },
    /// The member lacks batches that the owner's log has released.
    Reset {
        /// See [`Request::Reset`].
        before: Position,
    },
}

impl Sending {
    /// Whether it has batches.
    #[must_use]
    pub fn has_batches(&self) -> bool {
        matches!(self, Sending::Append { previous, last, .. } if *last > previous.sequence)
    }

    /// Makes the request of it. `configuration` is the number that the owner announces:
    /// [`Owner::configuration`]. Everything up to `trim_lsn` is in the store. A reset has none of the
    /// others.
    #[must_use]
    pub fn request(
        self,
        epoch: Epoch,
        configuration: u64,
        batches: Vec<Batch>,
        is_sync: bool,
        lease: Option<Lease>,
        trim_lsn: Lsn,
    ) -> Request {
        match self {
            Sending::Append { previous, proven_at, .. } => Request::Append {
                epoch,
                previous,
                batches,
                proven_at,
                is_sync,
                lease,
                configuration,
                trim_lsn,
            },
            Sending::Reset { before } => Request::Reset { epoch, before },
        }
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
    /// A node that is brought up before it becomes a member; it does not count.
    learner: Option<MemberId>,
    /// The link of the change that is under way may exist.
    is_recording: bool,
    acknowledged: u64,
    committed: u64,
    superseded_by: Option<Epoch>,
    has_resigned: bool,
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
            learner: None,
            is_recording: false,
            acknowledged: 0,
            committed: 0,
            superseded_by: None,
            has_resigned: false,
            seeded_bugs,
        };
        owner.set_members();
        owner
    }

    fn set_members(&mut self) {
        let mut held = self.quorums.members();
        held.extend(self.learner);
        self.members.retain(|member, _| held.contains(member));
        for member in held {
            let first = Progress::new(self.opening);
            self.members.entry(member).or_insert(first);
        }
    }

    /// The owner's epoch.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Number of the configuration that the chain is known to have.
    #[must_use]
    pub fn configuration(&self) -> u64 {
        self.quorums.current.number
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

    /// The members of the configurations that are held, and the learner.
    pub fn members(&self) -> impl Iterator<Item = &MemberId> {
        self.members.keys()
    }

    /// Notes how far the node's own log is written and synced.
    pub fn on_own(&mut self, written: u64, synced: u64) {
        if let Some(own) = self.members.get_mut(&self.me) {
            own.on_own(written, synced);
        }
        self.advance();
    }

    /// What to send to a member next, with at most `count_max` batches; with none, it only extends the
    /// lease and may be sent at any time. `None` if the member has to answer first
    /// ([`Progress::may_send`]). The caller bounds what is under way for a member
    /// ([`Progress::batches_under_way`]), and calls [`Owner::on_sent`].
    #[must_use]
    pub fn sending(&self, member: &MemberId, log: &LogIndex, count_max: u64) -> Option<Sending> {
        let progress = self.members.get(member).filter(|_| !self.has_ended())?;
        let Some(previous) = log.at(progress.next.checked_sub(1)?) else {
            let before = match self.seeded_bugs.reset_above_released {
                true => log.tail(),
                false => log.before(),
            };
            let is_possible = progress.may_send() && count_max > 0;
            return is_possible.then_some(Sending::Reset { before });
        };
        let last = log.tail().sequence.min(previous.sequence.saturating_add(count_max));
        if last > previous.sequence && !progress.may_send() {
            return None;
        }
        let proven = match self.seeded_bugs.proven_too_early {
            true => self.opening,
            false => self.opening.max(progress.written),
        };
        let proven_at = match self.is_open() {
            true => log.at(proven).map(|position| (progress.run, position)),
            false => None,
        };
        Some(Sending::Append { previous, last, proven_at })
    }

    /// Notes that this was sent to a member, so that the next request goes on behind it.
    pub fn on_sent(&mut self, member: &MemberId, sending: &Sending) {
        let Some(progress) = self.members.get_mut(member) else { return };
        match *sending {
            Sending::Append { last, .. } => progress.on_sent(last, sending.has_batches()),
            Sending::Reset { .. } => progress.on_reset_sent(),
        }
        if let Sending::Append { last, .. } = sending
            && self.seeded_bugs.sent_is_written
        {
            progress.written = progress.written.max(*last);
            self.advance();
        }
    }

    /// Notes that the connection to a member was lost: what it has not answered is sent again. Requests
    /// and answers of that connection may still arrive.
    pub fn on_disconnected(&mut self, member: &MemberId) {
        if let Some(progress) = self.members.get_mut(member) {
            progress.on_disconnected();
        }
    }

    /// Takes an answer of a member. `log` is the log on the owner's node.
    pub fn on_answer(&mut self, from: &MemberId, answer: &Answer, log: &LogIndex) {
        if let Answer::Superseded { promised, .. } = answer {
            self.superseded_by =
                self.superseded_by.max((*promised > self.epoch).then_some(*promised));
        }
        if answer.epoch() != self.epoch {
            return;
        }
        let Some(progress) = self.members.get_mut(from) else { return };
        progress.on_answer(answer, log);
        self.advance();
    }

    /// Acknowledges and commits what has come that far.
    fn advance(&mut self) {
        if self.has_ended() {
            return;
        }
        let written = self.own().written.min(self.reached(|member| self.of(member).written));
        let synced = match self.seeded_bugs.own_sync_is_commit && self.is_open() {
            true => self.own().synced.min(written),
            false => self.reached(|member| self.of(member).synced),
        };
        // Batches of earlier epochs count only together with the opening batch: until a quorum has that
        // one, a later owner may still choose a log without them.
        if synced >= self.opening {
            self.committed = self.committed.max(synced);
        }
        if self.is_open() {
            self.acknowledged = self.acknowledged.max(written);
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
        self.acknowledged
    }

    /// Every batch up to this sequence is on stable storage of a quorum. 0 before the opening batch
    /// is.
    #[must_use]
    pub fn committed(&self) -> u64 {
        self.committed
    }

    fn reached(&self, has: impl Fn(&MemberId) -> u64) -> u64 {
        match (&self.quorums.next, self.seeded_bugs.unrecorded_configuration) {
            (Some(next), true) => next.reached(has),
            _ => self.quorums.reached(has),
        }
    }

    fn own(&self) -> Progress {
        self.of(&self.me)
    }

    fn of(&self, member: &MemberId) -> Progress {
        self.members.get(member).copied().unwrap_or_default()
    }

    // --- lease ---

    /// The time until which the owner may answer reads, by its own monotonic clock in nanoseconds.
    /// `None` without a lease; `u64::MAX` if no other member has to grant one.
    #[must_use]
    pub fn lease_until(&self) -> Option<u64> {
        if self.superseded_by.is_some() || self.has_resigned && !self.seeded_bugs.resigned_reads {
            return None;
        }
        if self.seeded_bugs.read_without_lease {
            return Some(u64::MAX);
        }
        // A quorum with the owner itself, as it is needed for a batch: both configurations, too.
        let until = self.quorums.reached(|member| match *member == self.me {
            true => u64::MAX,
            false => self.of(member).lease_until,
        });
        (until > 0).then_some(until)
    }

    /// Gives the lease up for good: from now on a [`Request::Resign`] may be sent to each other member,
    /// so that a successor need not wait for its end. Returns false, without effect, if the owner has
    /// not opened, has ended, or changes the members.
    pub fn resign(&mut self) -> bool {
        let may_resign = self.is_open() && !self.has_ended() && self.quorums.next.is_none();
        self.has_resigned |= may_resign;
        may_resign
    }

    /// Whether the owner has given its lease up.
    #[must_use]
    pub fn has_resigned(&self) -> bool {
        self.has_resigned
    }

    /// Whether the owner serves, sends and acknowledges nothing more.
    fn has_ended(&self) -> bool {
        self.superseded_by.is_some() || self.has_resigned
    }

    // --- changing the members ---

    /// Begins to bring up a node that is to become a member, in place of an earlier learner. It does not
    /// count yet.
    pub fn add_learner(&mut self, node: MemberId) {
        self.learner = Some(node);
        self.set_members();
    }

    /// Begins to change the members: from now on both configurations are held, and what is acknowledged
    /// needs the quorum of each. Returns false, without effect, if a change is under way, the owner has not
    /// opened or has ended, or `next` is not valid. Bring a new member up first ([`Owner::add_learner`]):
    /// clients wait for it.
    pub fn begin_change(&mut self, next: Configuration) -> bool {
        let is_possible = self.is_open() && next.is_valid() && next.members.contains(&self.me);
        if self.quorums.next.is_some() || self.has_ended() || !is_possible {
            return false;
        }
        self.quorums.next = Some(next);
        self.set_members();
        true
    }

    /// Whether the link of the change that is under way may be created: the quorum of the new configuration
    /// has everything that was acknowledged or committed without it. Later batches need it.
    #[must_use]
    pub fn may_record_change(&self) -> bool {
        let has_all = |next: &Configuration| {
            next.reached(|member| self.of(member).written) >= self.acknowledged
                && next.reached(|member| self.of(member).synced) >= self.committed
        };
        let next = self.quorums.next.as_ref().filter(|_| !self.has_ended());
        let is_early =
            self.seeded_bugs.unrecorded_configuration || self.seeded_bugs.recorded_too_early;
        next.is_some_and(|next| self.is_recording || has_all(next) || is_early)
    }

    /// The configuration whose link is created now, if it may be ([`Owner::may_record_change`]). The change
    /// cannot be given up any more.
    pub fn change_to_record(&mut self) -> Option<&Configuration> {
        let may_record = self.may_record_change();
        self.is_recording |= may_record;
        self.quorums.next.as_ref().filter(|_| may_record)
    }

    /// Number of the configuration that the members are being changed to, if they are.
    #[must_use]
    pub fn change(&self) -> Option<u64> {
        self.quorums.next.as_ref().map(|next| next.number)
    }

    /// Gives up the change to the configuration with this number; without effect on another one, or if
    /// its link may exist.
    pub fn give_up_change(&mut self, number: u64) {
        let is_it = self.quorums.next.as_ref().is_some_and(|next| next.number == number);
        if is_it && (!self.is_recording || self.seeded_bugs.recording_given_up) {
            self.quorums.next = None;
            self.is_recording = false;
            self.set_members();
            self.advance();
        }
    }

    /// Ends a change whose link, with this number, is in the chain. Returns false, without effect, for
    /// another number.
    pub fn end_change(&mut self, number: u64) -> bool {
        match self.quorums.next.take_if(|next| next.number == number) {
            Some(next) => {
                self.is_recording = false;
                self.learner = self.learner.filter(|learner| !next.members.contains(learner));
                self.quorums.current = next;
                self.set_members();
                self.advance();
                true
            }
            None => false,
        }
    }

    /// Gives a learner up. A configuration that is held keeps it.
    pub fn remove_learner(&mut self, node: MemberId) {
        self.learner = self.learner.filter(|learner| *learner != node);
        self.set_members();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    #[test]
    fn member_without_the_released_batches_is_reset() {
        let position = |sequence| Position { epoch: Epoch(2), sequence };
        let mut log = LogIndex::new(position(10));
        (11..=13).for_each(|sequence| log.push(position(sequence)));
        let [me, member] = [1, 2].map(Uuid::from_u128);
        let configuration = Configuration { number: 1, members: [me, member].into(), quorum: 2 };
        let mut owner = Owner::new(me, Epoch(2), configuration, 11);
        let append = Sending::Append { previous: position(10), last: 13, proven_at: None };
        assert_eq!(owner.sending(&member, &log, 9), Some(append));
        owner.on_sent(&member, &append);
        let may_match = Position { epoch: Epoch(1), sequence: 4 };
        let (epoch, run) = (Epoch(2), 1);
        let lacking = Answer::Lacking { epoch, run, sequence: 10, may_match, start: 1 };
        owner.on_answer(&member, &lacking, &log);
        let reset = Sending::Reset { before: position(10) };
        assert_eq!(owner.sending(&member, &log, 9), Some(reset));
        assert_eq!(owner.sending(&member, &log, 0), None, "there is no lease without a log");
        owner.on_sent(&member, &reset);
        assert_eq!(owner.sending(&member, &log, 9), None, "it has to answer first");
        log.release(12);
        let answer = Answer::Appended { epoch, run: 2, written: 10, synced: 10, lease: None };
        owner.on_answer(&member, &answer, &log);
        let again = Sending::Reset { before: position(12) };
        assert_eq!(owner.sending(&member, &log, 9), Some(again), "the log has moved on");
    }

    #[test]
    fn new_member_that_is_always_a_little_behind_is_waited_for() {
        let position = |sequence| Position { epoch: Epoch(1), sequence };
        let mut log = LogIndex::new(Position::START);
        (1..=40).for_each(|sequence| log.push(position(sequence)));
        let [me, new] = [1, 2].map(Uuid::from_u128);
        let configuration = |number, members: &[Uuid]| Configuration {
            number,
            members: members.iter().copied().collect(),
            quorum: members.len() / 2 + 1,
        };
        let mut owner = Owner::new(me, Epoch(1), configuration(1, &[me]), 1);
        owner.on_own(1, 1);
        owner.add_learner(new);
        let has = |owner: &mut Owner, written: u64| {
            let epoch = Epoch(1);
            let answer = Answer::Appended { epoch, run: 1, written, synced: written, lease: None };
            owner.on_answer(&new, &answer, &log);
        };
        let all = Sending::Append { previous: Position::START, last: 40, proven_at: None };
        owner.on_sent(&new, &all);
        for sequence in 6..=10 {
            owner.on_own(sequence, sequence);
            has(&mut owner, sequence - 5);
        }
        assert_eq!((owner.acknowledged(), owner.progress(&new).unwrap().written), (10, 5));
        assert!(owner.begin_change(configuration(2, &[me, new])));
        assert!(!owner.begin_change(configuration(3, &[me, new])), "one at a time");
        for sequence in 11..=14 {
            owner.on_own(sequence, sequence);
            has(&mut owner, sequence - 5);
            assert_eq!((owner.acknowledged(), owner.may_record_change()), (10, false));
        }
        // Given up, it needs the new one no more.
        let mut other = owner.clone();
        other.give_up_change(3);
        assert_eq!(other.change(), Some(2));
        other.give_up_change(2);
        assert_eq!((other.acknowledged(), other.change()), (14, None));
        owner.on_own(15, 15);
        has(&mut owner, 10);
        assert!(owner.change_to_record().is_some());
        owner.on_own(16, 16);
        has(&mut owner, 11);
        assert!(owner.may_record_change(), "what is acknowledged by both leaves it so");
        owner.give_up_change(2);
        assert_eq!((owner.acknowledged(), owner.change()), (11, Some(2)), "its link may exist");
        assert!(!owner.end_change(3) && owner.end_change(2));
    }
}
