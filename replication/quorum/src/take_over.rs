//! A candidate: it has won an epoch in the manifest chain, and finds the log to continue.
//!
//! Invariants:
//! - It decides only once a recovery quorum keeps its promise.
//! - A log that may lack something is evidence of what it has, not of what it lacks.
//! - Once an answer of a later run of a member has come, answers of earlier runs count no more.

use crate::batch::Batch;
use crate::log_index::LogIndex;
use crate::messages::{Answer, Proof, Request};
use crate::quorum::{Configuration, MemberId};
use crate::seeded_bugs::{SeededBugs, seeded_bugs};
use block::{Epoch, Lsn, Position};
use std::collections::BTreeMap;

/// What a member promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Promised {
    run: u64,
    tail: Position,
    proof: Proof,
}

/// What a candidate knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decision {
    /// Too few members have promised.
    Wait,
    /// The log that ends here has every acknowledged batch; this member has it.
    Continue(Position, MemberId),
    /// The log that ends here has every flushed batch. Whether it has every acknowledged one cannot
    /// be proven until more members answer. Whoever goes on with it first records the loss durably,
    /// before the opening batch is written anywhere: later candidates find that batch and nothing
    /// else.
    LossPossible(Position, MemberId),
    /// So many members have damaged logs that even flushed batches may be gone.
    Damaged,
}

/// A node that has won an epoch and is not the owner yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Candidate {
    me: MemberId,
    epoch: Epoch,
    configuration: Configuration,
    promises: BTreeMap<MemberId, Promised>,
    /// The latest run of each member that an answer has named.
    runs: BTreeMap<MemberId, u64>,
    /// The log that is being read, and the position behind which it is read next.
    reading: Option<(Position, Position)>,
    superseded_by: Option<Epoch>,
    seeded_bugs: SeededBugs,
}

impl Candidate {
    /// Makes the candidate of an epoch on the node of the member `me`, with the configuration of its
    /// link.
    #[must_use]
    pub fn new(me: MemberId, epoch: Epoch, configuration: Configuration) -> Candidate {
        Candidate::new_with(me, epoch, configuration, seeded_bugs())
    }

    pub(crate) fn new_with(
        me: MemberId,
        epoch: Epoch,
        configuration: Configuration,
        seeded_bugs: SeededBugs,
    ) -> Candidate {
        Candidate {
            me,
            epoch,
            configuration,
            promises: BTreeMap::new(),
            runs: BTreeMap::new(),
            reading: None,
            superseded_by: None,
            seeded_bugs,
        }
    }

    /// The candidate's epoch.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The configuration under which it takes over.
    #[must_use]
    pub fn configuration(&self) -> &Configuration {
        &self.configuration
    }

    /// The later epoch that ended this candidate, if one did.
    #[must_use]
    pub fn superseded_by(&self) -> Option<Epoch> {
        self.superseded_by
    }

    /// Takes an answer of a member. A later run of a member replaces what an earlier one said: it may
    /// have lost batches in between.
    pub fn on_answer(&mut self, from: MemberId, answer: &Answer) {
        if let Answer::Superseded { promised, .. } = answer {
            self.superseded_by =
                self.superseded_by.max((*promised > self.epoch).then_some(*promised));
        }
        if answer.epoch() != self.epoch || !self.configuration.members.contains(&from) {
            return;
        }
        let run = answer.run();
        let latest = self.runs.entry(from).or_insert(run);
        if run < *latest {
            return;
        }
        *latest = run;
        match *answer {
            Answer::Promised { tail, proof, .. } => {
                self.promises.insert(from, Promised { run, tail, proof });
            }
            // Its next promise says what it has now. So does that of the own member, whose log may have
            // grown above every tail that is left.
            Answer::Batches { .. } => {
                let is_later = self.promises.get(&from).is_some_and(|known| known.run < run);
                if is_later {
                    self.promises.retain(|member, _| *member != from && *member != self.me);
                }
            }
            Answer::Appended { .. }
            | Answer::Full { .. }
            | Answer::Lacking { .. }
            | Answer::Superseded { .. } => {}
        }
    }

    /// The request to the node's own member, whose log is `own`, that stores batches of
    /// [`Answer::Batches`]. If the log that is read begins behind a batch that `own` lacks, `own` begins
    /// there, too: everything before is in the store, as are the entries up to `trim_lsn`.
    #[must_use]
    pub fn store(
        &self,
        start: u64,
        previous: Position,
        batches: Vec<Batch>,
        own: &LogIndex,
        trim_lsn: Lsn,
    ) -> Request {
        let epoch = self.epoch;
        let is_released = previous.sequence.checked_add(1) == Some(start);
        if is_released && !own.has(previous) && previous.sequence >= own.start() {
            return Request::Reset { epoch, before: previous };
        }
        Request::Append {
            epoch,
            previous,
            batches,
            proven_at: None,
            is_sync: false,
            lease: None,
            configuration: self.configuration.number,
            trim_lsn,
        }
    }

    /// The request that brings more of the chosen log, which `own` lacks.
    pub fn read(&mut self, chosen: Position, own: &LogIndex) -> Request {
        let first = own.newest_up_to(chosen.sequence, chosen.epoch);
        let after = match self.reading {
            Some((of, after)) if of == chosen => after,
            _ => first,
        };
        self.reading = Some((chosen, after));
        Request::Read { epoch: self.epoch, after }
    }

    /// Takes what the node's own member said to batches that were read, and its log.
    pub fn on_own_answer(&mut self, answer: &Answer, own: &LogIndex) {
        let Some((_, after)) = &mut self.reading else { return };
        match answer {
            _ if answer.epoch() != self.epoch => {}
            Answer::Appended { written, .. } => *after = own.at(*written).unwrap_or(*after),
            Answer::Lacking { may_match, .. } => *after = *may_match,
            Answer::Full { .. }
            | Answer::Superseded { .. }
            | Answer::Promised { .. }
            | Answer::Batches { .. } => {}
        }
    }

    /// Whether the owner may open on `own`, the log of the node's own member: it is the chosen one.
    #[must_use]
    pub fn may_open(&self, own: &LogIndex) -> bool {
        let chosen = match self.decide() {
            Decision::Continue(tail, _) | Decision::LossPossible(tail, _) => tail,
            Decision::Wait | Decision::Damaged => return false,
        };
        self.superseded_by.is_none() && own.tail() == chosen
    }

    /// Whether a member has promised.
    #[must_use]
    pub fn has_promise(&self, member: &MemberId) -> bool {
        self.promises.contains_key(member)
    }

    /// Whether the member on the candidate's node is to be asked for its promise, at first or again.
    #[must_use]
    pub fn lacks_own_promise(&self) -> bool {
        self.configuration.members.contains(&self.me) && !self.has_promise(&self.me)
    }

    /// Says which log to continue.
    #[must_use]
    pub fn decide(&self) -> Decision {
        let recovery_quorum = self.configuration.recovery_quorum();
        let count = |proof| self.promises.values().filter(|one| one.proof >= proof).count();
        if count(Proof::Synced) < recovery_quorum {
            let unknown = self.configuration.members.len().saturating_sub(self.promises.len());
            let is_damaged = count(Proof::Synced) + unknown < recovery_quorum;
            return if is_damaged { Decision::Damaged } else { Decision::Wait };
        }
        let by_rule = |one: &Promised| (one.tail.epoch, one.tail.sequence);
        let by_length = |one: &Promised| (Epoch(0), one.tail.sequence);
        let key = if self.seeded_bugs.tail_by_length { by_length } else { by_rule };
        let Some((member, best)) = self.promises.iter().max_by_key(|(_, one)| key(one)) else {
            return Decision::Wait;
        };
        match count(Proof::All) >= recovery_quorum {
            true => Decision::Continue(best.tail, *member),
            false => Decision::LossPossible(best.tail, *member),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn position(epoch: u64, sequence: u64) -> Position {
        Position { epoch: Epoch(epoch), sequence }
    }

    fn candidate() -> (Candidate, [MemberId; 3]) {
        let ids = [1, 2, 3].map(Uuid::from_u128);
        let configuration = Configuration { number: 4, members: ids.into(), quorum: 2 };
        (Candidate::new(ids[0], Epoch(3), configuration), ids)
    }

    fn promised(run: u64, tail: Position, proof: Proof) -> Answer {
        Answer::Promised { epoch: Epoch(3), run, tail, proof }
    }

    #[test]
    fn own_log_begins_where_the_log_that_is_read_begins() {
        let (candidate, _) = candidate();
        let mut own = LogIndex::new(Position::START);
        (1..=9).for_each(|sequence| own.push(position(1, sequence)));
        let is_reset = |start, previous, own: &LogIndex| {
            let request = candidate.store(start, previous, Vec::new(), own, Lsn::NONE);
            matches!(request, Request::Reset { before, .. } if before == previous)
        };
        assert!(is_reset(21, position(2, 20), &own), "the batches up to 20 were released");
        assert!(is_reset(9, position(2, 8), &own), "the logs differ where the other one begins");
        assert!(!is_reset(5, position(1, 4), &own), "the own log has that batch");
        assert!(!is_reset(15, position(2, 20), &own), "the other log has it, and may lose it");
        own.release(9);
        assert!(!is_reset(5, position(1, 4), &own), "the own log begins behind it");
    }

    #[test]
    fn later_run_of_a_member_takes_back_its_promise_and_the_own_one() {
        let (mut candidate, [me, other, third]) = candidate();
        candidate.on_answer(me, &promised(1, position(1, 5), Proof::All));
        candidate.on_answer(third, &promised(1, position(1, 4), Proof::All));
        candidate.on_answer(other, &promised(1, position(2, 9), Proof::All));
        assert_eq!(candidate.decide(), Decision::Continue(position(2, 9), other));
        let batches = |run| Answer::Batches {
            epoch: Epoch(3),
            run,
            start: 1,
            previous: position(1, 5),
            batches: Vec::new(),
        };
        candidate.on_answer(other, &batches(1));
        assert!(candidate.has_promise(&other));
        candidate.on_answer(other, &batches(2));
        assert!(!candidate.has_promise(&other) && candidate.lacks_own_promise());
        assert_eq!(candidate.decide(), Decision::Wait);
        // An answer that was under way, from before the damage.
        candidate.on_answer(other, &promised(1, position(2, 9), Proof::All));
        assert!(!candidate.has_promise(&other));
        // A part of the damaged log was copied before: the own log is the longest one.
        candidate.on_answer(me, &promised(1, position(2, 8), Proof::All));
        candidate.on_answer(other, &promised(2, position(2, 7), Proof::Nothing));
        assert_eq!(candidate.decide(), Decision::Continue(position(2, 8), me));
    }
}
