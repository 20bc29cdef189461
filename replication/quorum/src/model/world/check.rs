//! The rules that hold in every state.
//!
//! Invariants:
//! - The record of what was acknowledged, flushed and destaged is apart from the machines.

use super::{Bounds, Node, Role, World};
use crate::log_index::LogIndex;
use block::Position;

impl World {
    /// Whether the loss of a batch was recorded by an operator.
    fn is_forgiven(&self, position: &Position) -> bool {
        self.forced.iter().any(|(epoch, log)| position.epoch < *epoch && !self.holds(log, position))
    }

    /// Whether an owner with this log has a batch: in the log, or in the store below it.
    fn holds(&self, log: &LogIndex, position: &Position) -> bool {
        log.has(*position) || position.sequence < log.start() && self.destaged.contains(position)
    }

    fn lacks_acknowledged(&self, log: &LogIndex) -> bool {
        self.acknowledged.iter().any(|one| !self.is_forgiven(one) && !self.holds(log, one))
    }

    pub(super) fn check(&mut self, bounds: &Bounds) {
        let wrong = self.check_opening();
        self.note_acknowledged();
        let wrong = wrong
            .or_else(|| self.check_owners(bounds))
            .or_else(|| self.check_logs())
            .or_else(|| self.check_copies(bounds));
        self.wrong = self.wrong.or(wrong);
    }

    fn check_opening(&mut self) -> Option<&'static str> {
        let mut wrong = None;
        for at in 0..self.machines.len() {
            let machine = &self.machines[at];
            let Some(Node { follower, role: Role::Owner(owner) }) = &machine.node else { continue };
            let epoch = owner.epoch();
            if owner.superseded_by().is_some() || !owner.is_open() || self.opened.contains(&epoch) {
                continue;
            }
            let log = follower.log();
            let before = log.before();
            let is_unread = |damage: super::Damage| {
                let position = log.at(damage.sequence);
                damage.is_old && position.is_some_and(|one| self.acknowledged.contains(&one))
            };
            let is_late = self.opened.last().is_some_and(|last| *last > epoch);
            if is_late {
                // A deposed owner gets a late answer: a later owner has what it acknowledges.
            } else if self.flushed.iter().any(|one| !self.holds(log, one)) {
                wrong = Some("a flushed write is lost");
            } else if self.lacks_acknowledged(log) {
                wrong = Some("an acknowledged write is lost");
            } else if before != Position::START && !self.destaged.contains(&before) {
                wrong = Some("a log begins behind a batch that is not in the store");
            } else if machine.disk.damage.is_some_and(is_unread) {
                wrong = Some("an acknowledged write cannot be read");
            }
            self.opened.insert(epoch);
        }
        wrong
    }

    fn note_acknowledged(&mut self) {
        for machine in &self.machines {
            let Some(Node { follower, role: Role::Owner(owner) }) = &machine.node else { continue };
            if owner.superseded_by().is_some() {
                continue;
            }
            let log = follower.log();
            for sequence in log.before().sequence.max(1)..=owner.acknowledged() {
                self.acknowledged.extend(log.at(sequence));
            }
            for sequence in log.before().sequence.max(1)..=owner.committed() {
                self.flushed.extend(log.at(sequence));
            }
        }
    }

    fn check_owners(&self, bounds: &Bounds) -> Option<&'static str> {
        for machine in &self.machines {
            let Some(Node { follower, role: Role::Owner(owner) }) = &machine.node else { continue };
            let is_served = bounds.lease > 0
                && owner.is_open()
                && owner.lease_until().is_some_and(|until| self.now < until);
            let is_stale = self.acknowledged.iter().any(|position| {
                let is_shown = position.sequence <= owner.acknowledged()
                    && self.holds(follower.log(), position);
                !is_shown && !self.is_forgiven(position)
            });
            let is_last = self.opened.last() == Some(&owner.epoch());
            if is_last && is_stale && owner.is_open() && owner.superseded_by().is_none() {
                return Some("an acknowledged write is lost");
            }
            if is_served && is_stale {
                return Some("a read is stale");
            }
        }
        None
    }

    fn check_logs(&self) -> Option<&'static str> {
        for (at, one) in self.machines.iter().enumerate() {
            for other in &self.machines[at + 1..] {
                let (one, other) = (&one.disk, &other.disk);
                let first = one.before.sequence.max(other.before.sequence);
                let behind = |disk: &super::Disk| {
                    usize::try_from(first - disk.before.sequence).expect("small")
                };
                let one = one.log.get(behind(one)..).unwrap_or_default();
                let other = other.log.get(behind(other)..).unwrap_or_default();
                let mut pairs = one.iter().zip(other.iter());
                let equal =
                    pairs.rposition(|(a, b)| a.position == b.position).map_or(0, |at| at + 1);
                if one[..equal] != other[..equal] {
                    return Some("logs differ below an equal position");
                }
            }
        }
        None
    }

    /// While no machine loses anything, every acknowledged batch is on a quorum.
    fn check_copies(&self, bounds: &Bounds) -> Option<&'static str> {
        let losses =
            bounds.reboots + bounds.failures + bounds.wipes + bounds.changes + bounds.damages;
        if losses > 0 || bounds.is_alone {
            return None;
        }
        let copies = |position| self.machines.iter().filter(|one| one.disk.has(position)).count();
        let mut kept = self.acknowledged.iter().filter(|one| !self.destaged.contains(one));
        kept.any(|position| copies(*position) < bounds.quorum)
            .then_some("an acknowledged write has fewer copies than the quorum")
    }

    /// Whether a log that is to be the only one lacks an acknowledged batch.
    pub(super) fn check_alone(&mut self, at: usize) {
        let log = self.machines[at].node.as_ref().map(|node| node.follower.log().clone());
        if log.is_some_and(|log| self.lacks_acknowledged(&log)) {
            self.wrong = Some("the only member lacks an acknowledged write");
        }
    }
}
