//! A candidate: it has won an epoch in the manifest chain, and finds the log to continue.
//!
//! Invariants:
//! - It decides only once a recovery quorum keeps its promise.
//! - A log that may lack something is evidence of what it has, not of what it lacks.

use crate::log_index::LogIndex;
use crate::messages::{Answer, Proof, Request};
use crate::position::Position;
use crate::quorum::{Configuration, MemberId};
use crate::seeded_bugs::{SeededBugs, seeded_bugs};
use block::Epoch;
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
    /// be proven until more members answer.
    LossPossible(Position, MemberId),
}

/// A node that has won an epoch and is not the owner yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Candidate {
    epoch: Epoch,
    configuration: Configuration,
    promises: BTreeMap<MemberId, Promised>,
    /// Sequence behind which the chosen log is read next; `None` before the first read.
    read_after: Option<u64>,
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
            read_after: None,
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
        let is_member = self.configuration.members.contains(&from);
        if let Answer::Promised { epoch, run, tail, proof } = *answer
            && is_member
            && epoch == self.epoch
            && self.promises.get(&from).is_none_or(|known| known.run <= run)
        {
            self.promises.insert(from, Promised { run, tail, proof });
        }
    }

    /// The request that brings more of the chosen log, which `own` lacks.
    #[must_use]
    pub fn reading(&self, chosen: Position, own: &LogIndex) -> Request {
        let first = own.tail().sequence.min(chosen.sequence);
        Request::Read { epoch: self.epoch, after: self.read_after.unwrap_or(first) }
    }

    /// Takes what the node's own member said to batches that were read.
    pub fn on_own_answer(&mut self, answer: &Answer) {
        match answer {
            Answer::Appended { written, .. } => self.read_after = Some(*written),
            Answer::Lacking { may_match, .. } => self.read_after = Some(*may_match),
            Answer::Superseded { .. } | Answer::Promised { .. } | Answer::Batches { .. } => {}
        }
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
            return Decision::Wait;
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
