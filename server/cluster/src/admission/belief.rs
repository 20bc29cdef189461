//! Which records of a list count: a function of the set alone, so that every node that has the same
//! records sees the same cluster, whatever order they came in.
//!
//! A record counts if its signer has an admission that counts, and no removal of the signer that
//! counts leaves it out (`kept`). The founder's own record always counts. Removals that leave each
//! other out make this circular, as when two nodes remove each other, or a removed node signs a
//! removal of its remover. The well-founded model of these rules tells the records that count, those
//! that do not, and the contested ones. A contest is settled for the node nearer to the founder: what
//! others say in the contest leaves out none of its statements.
//!
//! Invariants:
//! - The result depends on the set of records only.
//! - A record that a removed node signs after its removal counts for nothing, unless it contests the
//!   removal and the removed node is nearer to the founder than its remover.

use super::record::{Record, Statement};
use crate::identity::{Digest, NodeId};
use crate::seeded_bugs::seeded_bugs;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The records that count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Belief {
    /// Admissions.
    pub admissions: BTreeSet<Digest>,
    /// Removals.
    pub removals: BTreeSet<Digest>,
}

/// Evaluates the records, each under its digest.
#[must_use]
pub fn evaluate(records: &BTreeMap<Digest, Record>) -> Belief {
    let mut rules = Rules::of(records);
    let (certain, possible) = loop {
        let (certain, possible) = rules.well_founded();
        let contested: BTreeSet<Digest> = possible.difference(&certain).copied().collect();
        if !rules.settle(&contested) {
            break (certain, possible);
        }
    };
    // Removals win: one that no settlement reached still removes.
    let removals = possible.into_iter().filter(|digest| rules.is_removal(digest)).collect();
    let admissions = certain.into_iter().filter(|digest| !rules.is_removal(digest)).collect();
    Belief { admissions, removals }
}

/// A node's place in the order of nearness to the founder.
type Rank = (usize, NodeId);

struct Rules<'a> {
    records: &'a BTreeMap<Digest, Record>,
    /// The removals that leave a record out.
    excluded_by: BTreeMap<Digest, Vec<Digest>>,
    /// The records that each node signed.
    signed_by: BTreeMap<NodeId, Vec<Digest>>,
    /// The length of the shortest chain of admissions from the founder to each node, and its id.
    ranks: BTreeMap<NodeId, Rank>,
}

impl<'a> Rules<'a> {
    fn of(records: &'a BTreeMap<Digest, Record>) -> Rules<'a> {
        let mut signed_by: BTreeMap<NodeId, Vec<Digest>> = BTreeMap::new();
        for (digest, record) in records {
            signed_by.entry(record.signer).or_default().push(*digest);
        }
        let mut excluded_by: BTreeMap<Digest, Vec<Digest>> = BTreeMap::new();
        for (removal, record) in records {
            let Statement::Removal { kept } = &record.statement else { continue };
            if seeded_bugs().later_signatures_count {
                continue;
            }
            for digest in signed_by.get(&record.node).into_iter().flatten() {
                let is_kept = kept.binary_search(digest).is_ok();
                if !is_kept && digest != removal && !records[digest].is_founding() {
                    excluded_by.entry(*digest).or_default().push(*removal);
                }
            }
        }
        let mut rules = Rules { records, excluded_by, signed_by, ranks: BTreeMap::new() };
        rules.ranks = rules.rank();
        rules
    }

    fn is_removal(&self, digest: &Digest) -> bool {
        matches!(self.records[digest].statement, Statement::Removal { .. })
    }

    /// Ranks the nodes, breadth first over all admissions, also those that do not count: a node
    /// cannot make itself or those that it admits nearer than its own admission does.
    fn rank(&self) -> BTreeMap<NodeId, Rank> {
        let founding = self.records.values().filter(|record| record.is_founding());
        let mut ranks: BTreeMap<NodeId, Rank> =
            founding.map(|record| (record.node, (0, record.node))).collect();
        let mut todo: VecDeque<NodeId> = ranks.keys().copied().collect();
        while let Some(node) = todo.pop_front() {
            let (depth, _) = ranks[&node];
            for digest in self.signed_by.get(&node).into_iter().flatten() {
                let admitted = self.records[digest].node;
                if !self.is_removal(digest) && !ranks.contains_key(&admitted) {
                    ranks.insert(admitted, (depth + 1, admitted));
                    todo.push_back(admitted);
                }
            }
        }
        ranks
    }

    fn rank_of_signer(&self, digest: &Digest) -> Rank {
        let signer = self.records[digest].signer;
        self.ranks.get(&signer).copied().unwrap_or((usize::MAX, signer))
    }

    /// Returns the records that certainly count, and those that may count, by the alternating
    /// fixpoint: the first set grows and the second shrinks. Source: A. Van Gelder, "The alternating
    /// fixpoint of logic programs with negation", 1993.
    fn well_founded(&self) -> (BTreeSet<Digest>, BTreeSet<Digest>) {
        let mut certain = BTreeSet::new();
        loop {
            let possible = self.derive(&certain);
            let next = self.derive(&possible);
            if next == certain {
                return (certain, possible);
            }
            certain = next;
        }
    }

    /// Settles one contest for the nearest node that signed a contested removal: the others in it
    /// leave out no statement of that node or of a nearer one. Returns false if nothing changed.
    fn settle(&mut self, contested: &BTreeSet<Digest>) -> bool {
        let removals = contested.iter().filter(|digest| self.is_removal(digest));
        let Some(winner) = removals.map(|digest| self.rank_of_signer(digest)).min() else {
            return false;
        };
        let ranks: BTreeMap<Digest, Rank> =
            self.records.keys().map(|digest| (*digest, self.rank_of_signer(digest))).collect();
        let mut has_changed = false;
        for (digest, removals) in &mut self.excluded_by {
            if ranks[digest] <= winner {
                let before = removals.len();
                removals.retain(|one| !contested.contains(one) || ranks[one] <= winner);
                has_changed |= removals.len() < before;
            }
        }
        has_changed
    }

    /// Returns the records that follow if exactly the removals in `assumed` exclude others.
    fn derive(&self, assumed: &BTreeSet<Digest>) -> BTreeSet<Digest> {
        let is_excluded = |digest: &Digest| {
            let removals = self.excluded_by.get(digest);
            removals.is_some_and(|removals| removals.iter().any(|one| assumed.contains(one)))
        };
        let founding = self.records.iter().filter(|(_, record)| record.is_founding());
        let mut todo: Vec<Digest> = founding.map(|(digest, _)| *digest).collect();
        let mut derived: BTreeSet<Digest> = todo.iter().copied().collect();
        let mut signers = BTreeSet::new();
        while let Some(digest) = todo.pop() {
            let record = &self.records[&digest];
            if self.is_removal(&digest) || !signers.insert(record.node) {
                continue;
            }
            for next in self.signed_by.get(&record.node).into_iter().flatten() {
                if !is_excluded(next) && derived.insert(*next) {
                    todo.push(*next);
                }
            }
        }
        derived
    }
}
