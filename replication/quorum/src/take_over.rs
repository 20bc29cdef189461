//! A candidate: it has won an epoch in the manifest chain, and finds the log to continue.
//!
//! Invariants:
//! - It decides only once a recovery quorum keeps its promise.
//! - A log that may lack something is evidence of what it has, not of what it lacks.

use crate::log_index::LogIndex;
use crate::messages::{Answer, Proof, Request};
use crate::quorum::{Configuration, MemberId};
use crate::seeded_bugs::{SeededBugs, seeded_bugs};
use block::{Epoch, Position};
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
    epoch: Epoch,
    configuration: Configuration,
    promises: BTreeMap<MemberId, Promised>,
    /// The log that is being read, and the position behind which it is read next.
    reading: Option<(Position, Position)>,
    superseded_by: Option<Epoch>,
    seeded_bugs: SeededBugs,
}

impl Candidate {
    /// Makes the candidate of an epoch, with the configuration of the link that it replaced.
    #[must_use]
    pub fn new(epoch: Epoch, configuration: Configuration) -> Candidate {
        Candidate::new_with(epoch, configuration, seeded_bugs())
    }

    pub(crate) fn new_with(
        epoch: Epoch,
        configuration: Configuration,
        seeded_bugs: SeededBugs,
    ) -> Candidate {
        Candidate {
            epoch,
            configuration,
            promises: BTreeMap::new(),
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
        if let Answer::Promised { run, tail, proof, .. } = *answer
            && self.promises.get(&from).is_none_or(|known| known.run <= run)
        {
            self.promises.insert(from, Promised { run, tail, proof });
        }
        if let Answer::Batches { run, .. } = answer {
            // Its next promise says what it has now.
            self.promises.retain(|member, known| *member != from || known.run >= *run);
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
            Answer::Superseded { .. } | Answer::Promised { .. } | Answer::Batches { .. } => {}
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
