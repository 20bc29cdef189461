//! One member as its owner sees it: what it has answered for, and what was sent to it.
//!
//! Invariants:
//! - Only answers count towards a quorum. What was sent decides only what is sent next.
//! - Until the member has answered an append with `Appended`, one request with batches is under way
//!   for it, because the owner does not know yet where the logs agree. From then on the owner sends
//!   without waiting.
//! - Answers of an earlier run of the member change nothing.

use crate::log_index::LogIndex;
use crate::messages::Answer;

/// How an owner sends to a member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Flow {
    /// The next request shows whether the logs agree.
    #[default]
    Probing,
    /// That request is under way.
    Waiting,
    /// The logs agree: requests follow each other.
    Streaming,
}

/// What an owner knows of a member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Progress {
    /// The run of the member that answered last.
    pub run: u64,
    /// Sequence of the next batch to send.
    pub next: u64,
    /// Sequence of the first batch that was sent and not answered; `next` without one.
    pub unanswered: u64,
    /// Highest sequence that it has answered for as written.
    pub written: u64,
    /// Highest sequence that it has answered for as synced.
    pub synced: u64,
    /// End of the longest lease that it has granted, by the owner's clock; 0 without one.
    pub lease_until: u64,
    /// It has no room for the next batch. It counts for those that it has, and the caller sends it
    /// batches only now and then.
    pub is_full: bool,
    flow: Flow,
}

impl Progress {
    /// A member of which nothing is known; the first batch that is sent has the sequence `next`.
    pub(crate) fn new(next: u64) -> Progress {
        Progress { next, unanswered: next, ..Progress::default() }
    }

    /// Number of batches that are under way. The caller bounds it, and their bytes.
    #[must_use]
    pub fn batches_under_way(&self) -> u64 {
        self.next.saturating_sub(self.unanswered)
    }

    /// Whether a request with batches may be sent now.
    #[must_use]
    pub fn may_send(&self) -> bool {
        self.flow != Flow::Waiting
    }

    /// Notes that a request whose last batch is `last` was sent; it has batches if `has_batches`.
    pub(crate) fn on_sent(&mut self, last: u64, has_batches: bool) {
        self.next = self.next.max(last.saturating_add(1));
        if has_batches && self.flow == Flow::Probing {
            self.flow = Flow::Waiting;
        }
    }

    /// Notes how far the log on the owner's own node is written and synced.
    pub(crate) fn on_own(&mut self, written: u64, synced: u64) {
        self.written = self.written.max(written);
        self.synced = self.synced.max(synced);
        self.unanswered = self.unanswered.max(written.saturating_add(1));
        self.next = self.next.max(self.unanswered);
    }

    /// Notes that a reset was sent.
    pub(crate) fn on_reset_sent(&mut self) {
        self.flow = Flow::Waiting;
    }

    /// Goes back to behind what was answered: what was sent since may be lost.
    pub(crate) fn on_disconnected(&mut self) {
        self.next = self.unanswered;
        self.flow = Flow::Probing;
    }

    /// Takes an answer of the member to this owner. `log` is the log on the owner's node.
    pub(crate) fn on_answer(&mut self, answer: &Answer, log: &LogIndex) {
        let run = answer.run();
        if run < self.run {
            return;
        }
        self.run = run;
        match answer {
            // No member has more than it was sent.
            Answer::Appended { written, .. } if *written > log.tail().sequence => {}
            Answer::Appended { written, synced, lease, .. } => {
                self.is_full &= *written <= self.written;
                self.written = self.written.max(*written);
                self.synced = self.synced.max(*synced);
                self.unanswered = self.unanswered.max(written + 1); // at most the tail's, from above
                self.next = self.next.max(self.unanswered);
                let until = lease.map_or(0, |lease| lease.until());
                self.lease_until = self.lease_until.max(until);
                self.flow = Flow::Streaming;
            }
            Answer::Full { written, .. } if *written > log.tail().sequence => {}
            Answer::Full { written, lease, .. } => {
                self.written = self.written.max(*written);
                self.synced = self.synced.max(*written);
                self.unanswered = self.unanswered.max(written + 1); // at most the tail's, from above
                // Whatever was sent behind it is refused too.
                self.next = self.unanswered;
                let until = lease.map_or(0, |lease| lease.until());
                self.lease_until = self.lease_until.max(until);
                self.is_full = true;
                self.flow = Flow::Probing;
            }
            Answer::Lacking { sequence, may_match, start, .. } => {
                if self.is_current(*sequence) {
                    let common = log.newest_up_to(may_match.sequence, may_match.epoch);
                    let next = if *sequence < start.saturating_sub(1) {
                        *start
                    } else if may_match.sequence < common.sequence {
                        may_match.sequence + 1 // below the log: the member has to be reset
                    } else {
                        common.sequence + 1
                    };
                    self.next = next.min(log.tail().sequence + 1);
                    self.unanswered = self.next;
                    self.flow = Flow::Probing;
                }
            }
            Answer::Superseded { .. } | Answer::Promised { .. } | Answer::Batches { .. } => {}
        }
    }

    /// Whether a predecessor that the member lacks is that of a request under way. An answer to an
    /// earlier request says nothing about the present ones, and requests that were sent behind a
    /// probe that failed are answered in the same way.
    fn is_current(&self, predecessor: u64) -> bool {
        let Some(first) = self.unanswered.checked_sub(1) else { return false };
        match self.flow {
            Flow::Probing | Flow::Waiting => predecessor == first,
            Flow::Streaming => (first..self.next).contains(&predecessor),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::Lease;
    use block::{Epoch, Position};

    fn position(epoch: u64, sequence: u64) -> Position {
        Position { epoch: Epoch(epoch), sequence }
    }

    fn log() -> LogIndex {
        let mut log = LogIndex::new(Position::START);
        (1..=4).for_each(|sequence| log.push(position(1, sequence)));
        (5..=20).for_each(|sequence| log.push(position(2, sequence)));
        log
    }

    fn appended(run: u64, written: u64) -> Answer {
        Answer::Appended { epoch: Epoch(2), run, written, synced: 0, lease: None }
    }

    fn lacking(sequence: u64, may_match: Position) -> Answer {
        Answer::Lacking { epoch: Epoch(2), run: 1, sequence, may_match, start: 1 }
    }

    #[test]
    fn requests_follow_each_other_once_the_logs_agree() {
        let mut progress = Progress::new(11);
        progress.on_sent(12, true);
        assert!(!progress.may_send(), "the first request is a probe");
        progress.on_answer(&appended(1, 12), &log());
        for last in [13, 15] {
            assert!(progress.may_send());
            progress.on_sent(last, true);
        }
        assert_eq!((progress.next, progress.batches_under_way()), (16, 3));
        progress.on_answer(&appended(1, 13), &log());
        assert_eq!(progress.batches_under_way(), 2);
        progress.on_disconnected();
        assert_eq!((progress.next, progress.batches_under_way()), (14, 0));
        progress.on_answer(&appended(1, 15), &log());
        assert_eq!(progress.next, 16, "an answer of the lost connection counts");
    }

    #[test]
    fn full_member_counts_for_what_it_has_and_is_asked_again() {
        let mut progress = Progress::new(11);
        progress.on_answer(&appended(1, 10), &log());
        for last in 11..=13 {
            progress.on_sent(last, true);
        }
        let lease = Some(Lease { sent: 7, length: 30 });
        let full = |written| Answer::Full { epoch: Epoch(2), run: 1, written, lease };
        progress.on_answer(&full(11), &log());
        // Those that were sent behind it.
        progress.on_answer(&lacking(12, position(2, 11)), &log());
        assert_eq!((progress.written, progress.synced, progress.next), (11, 11, 12));
        assert!(progress.is_full && progress.may_send() && progress.lease_until == 37);
        progress.on_answer(&appended(1, 11), &log());
        assert!(progress.is_full, "an empty request has said nothing about room");
        progress.on_sent(12, true);
        progress.on_answer(&full(11), &log());
        assert_eq!((progress.is_full, progress.next), (true, 12));
        progress.on_sent(12, true);
        progress.on_answer(&appended(1, 12), &log());
        assert_eq!((progress.is_full, progress.next), (false, 13));
        progress.on_answer(&full(99), &log());
        assert_eq!((progress.is_full, progress.written), (false, 12), "no member has more");
    }

    #[test]
    fn requests_behind_a_failed_one_do_not_move_the_owner_again() {
        let mut progress = Progress::new(11);
        progress.on_answer(&appended(1, 10), &log());
        for last in 11..=13 {
            progress.on_sent(last, true);
        }
        // The member lost its log behind 4 in a later run, and lacks the predecessors of all three.
        progress.on_answer(&lacking(10, position(1, 4)), &log());
        assert_eq!((progress.next, progress.may_send()), (5, true));
        progress.on_sent(20, true);
        for sequence in [11, 12] {
            progress.on_answer(&lacking(sequence, position(1, 4)), &log());
            assert_eq!((progress.next, progress.may_send()), (21, false));
        }
        progress.on_answer(&appended(1, 20), &log());
        assert_eq!((progress.next, progress.may_send()), (21, true));
    }
}
