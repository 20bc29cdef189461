//! A member: what it accepts, what it has to store before it answers, and what its log proves.
//!
//! Invariants:
//! - The promise never falls, and a request of an earlier epoch changes nothing.
//! - The log has no gaps: a batch is stored only behind its predecessor.
//! - What is cut from the log was never acknowledged by a quorum: only an owner that has found every
//!   acknowledged batch sends something else in its place.
//! - The lease that an owner has from this member has run out before a later epoch gets its promise.

use crate::log_index::LogIndex;
use crate::messages::{Answer, Proof, Request};
use crate::position::{Batch, Position};
use crate::seeded_bugs::{SeededBugs, seeded_bugs};
use block::Epoch;

/// The small document that a member keeps beside its log, on stable storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Document {
    /// Number of times that the member has started.
    pub run: u64,
    /// The highest epoch that it has promised.
    pub promised: Epoch,
    /// What the log proves.
    pub proof: Proof,
    /// A sequence that was on stable storage.
    pub synced: u64,
}

/// What the caller has to do, in this order. Each step is complete before the next one begins.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Effect {
    /// Put the document on stable storage.
    Store(Document),
    /// Take every batch above this sequence from the log.
    Cut(u64),
    /// Write batches behind the newest one.
    Write(Vec<Batch>),
    /// Put everything that was written on stable storage.
    Sync,
    /// Send the answer.
    Answer(Answer),
    /// Read batches behind `previous` from the log, and send them as [`Answer::Batches`].
    Send {
        /// Epoch of the request.
        epoch: Epoch,
        /// Position of the batch before the first one.
        previous: Position,
    },
}

/// The present time and the time for which an append holds back promises, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lease {
    pub(crate) now: u64,
    pub(crate) hold: u64,
}

/// A member of one pool's log.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Follower {
    document: Document,
    log: LogIndex,
    synced: u64,
    /// No promise is answered before this time.
    held_until: u64,
    /// Time for which an append holds back promises, in nanoseconds.
    hold: u64,
    seeded_bugs: SeededBugs,
}

impl Follower {
    /// Makes the machine of a member that has just started, with the document for the caller to
    /// store before it answers anything. `log` is what the ring has, `is_same_boot` tells whether
    /// everything that was written before is in it; `hold` is the lease's length and one percent.
    #[must_use]
    pub fn start(
        stored: Document,
        log: LogIndex,
        is_same_boot: bool,
        now: u64,
        hold: u64,
    ) -> (Follower, Effect) {
        Follower::start_with(stored, log, is_same_boot, Lease { now, hold }, seeded_bugs())
    }

    pub(crate) fn start_with(
        stored: Document,
        log: LogIndex,
        is_same_boot: bool,
        Lease { now, hold }: Lease,
        seeded_bugs: SeededBugs,
    ) -> (Follower, Effect) {
        let tail = log.tail().sequence;
        let proof = match is_same_boot || seeded_bugs.amnesiac_votes {
            true => stored.proof,
            false => stored.proof.min(Proof::Synced),
        };
        let is_damaged = tail < stored.synced;
        let document = Document {
            run: stored.run + 1,
            proof: if is_damaged { Proof::Nothing } else { proof },
            synced: stored.synced.min(tail),
            ..stored
        };
        // What is read after a loss of power was on stable storage.
        let synced = if is_same_boot { document.synced } else { tail };
        // The member has forgotten when the last append came.
        let held_until = now.saturating_add(hold);
        let follower = Follower { document, log, synced, held_until, hold, seeded_bugs };
        (follower, Effect::Store(document))
    }

    /// The document as it was last given to the caller to store.
    #[must_use]
    pub fn document(&self) -> &Document {
        &self.document
    }

    /// The positions in the member's log.
    #[must_use]
    pub fn log(&self) -> &LogIndex {
        &self.log
    }

    /// Takes a request at `now`, in nanoseconds of the member's monotonic clock.
    pub fn on_request(&mut self, now: u64, request: Request) -> Vec<Effect> {
        let epoch = request.epoch();
        if epoch < self.document.promised {
            let promised = self.document.promised;
            return vec![Effect::Answer(Answer::Superseded { epoch, promised })];
        }
        match request {
            Request::Promise { .. } => self.on_promise(now, epoch),
            Request::Read { after, .. } => self.on_read(epoch, after),
            Request::Append { previous, batches, proven_at, is_sync, lease, .. } => {
                if !is_chain(previous, &batches, epoch) {
                    return Vec::new(); // no owner sends this
                }
                let mut effects = self.raise_promise(epoch);
                if lease.is_some() {
                    self.held_until = self.held_until.max(now.saturating_add(self.hold));
                }
                if !self.log.has(previous) {
                    effects.push(Effect::Answer(self.lacking(epoch, previous)));
                    return effects;
                }
                let written =
                    batches.last().map_or(previous.sequence, |batch| batch.position.sequence);
                self.store(batches, &mut effects);
                let is_proven = proven_at
                    .is_some_and(|(run, at)| run == self.document.run && at.sequence <= written);
                if is_proven && self.document.proof != Proof::All {
                    self.document.proof = Proof::All;
                    effects.push(Effect::Store(self.document));
                }
                if is_sync {
                    effects.push(Effect::Sync);
                    self.synced = self.log.tail().sequence;
                    self.document.synced = self.synced;
                }
                effects.push(Effect::Answer(Answer::Appended {
                    epoch,
                    run: self.document.run,
                    written,
                    synced: self.synced.min(written),
                    lease,
                }));
                effects
            }
        }
    }

    fn raise_promise(&mut self, epoch: Epoch) -> Vec<Effect> {
        if epoch == self.document.promised {
            return Vec::new();
        }
        self.document.promised = epoch;
        match self.seeded_bugs.promise_not_stored {
            true => Vec::new(),
            false => vec![Effect::Store(self.document)],
        }
    }

    /// The promise is kept from now on, and answered once no owner can have a lease from here.
    fn on_promise(&mut self, now: u64, epoch: Epoch) -> Vec<Effect> {
        let mut effects = match self.seeded_bugs.promise_not_kept {
            true => Vec::new(),
            false => self.raise_promise(epoch),
        };
        if now >= self.held_until || self.seeded_bugs.read_without_lease {
            effects.push(Effect::Answer(Answer::Promised {
                epoch,
                run: self.document.run,
                tail: self.log.tail(),
                proof: self.document.proof,
            }));
        }
        effects
    }

    fn on_read(&self, epoch: Epoch, after: u64) -> Vec<Effect> {
        let is_promised = epoch == self.document.promised || self.seeded_bugs.promise_not_kept;
        match self.log.at(after) {
            Some(previous) if is_promised => vec![Effect::Send { epoch, previous }],
            _ => Vec::new(),
        }
    }

    fn lacking(&self, epoch: Epoch, previous: Position) -> Answer {
        let below = previous.sequence.saturating_sub(1);
        Answer::Lacking {
            epoch,
            run: self.document.run,
            sequence: previous.sequence,
            may_match: self.log.highest_up_to(below, previous.epoch),
            start: self.log.start(),
        }
    }

    /// Stores the batches that the log does not have, in place of others at the same sequences.
    fn store(&mut self, batches: Vec<Batch>, effects: &mut Vec<Effect>) {
        let known = batches.iter().take_while(|batch| self.log.has(batch.position)).count();
        let new: Vec<Batch> = batches.into_iter().skip(known).collect();
        let Some(first) = new.first() else { return };
        let end = first.position.sequence - 1;
        if self.log.tail().sequence > end {
            self.log.cut(end);
            self.synced = self.synced.min(end);
            if self.document.synced > end {
                // Otherwise a later start would take the log for damaged.
                self.document.synced = end;
                effects.push(Effect::Store(self.document));
            }
            effects.push(Effect::Cut(end));
        }
        new.iter().for_each(|batch| self.log.push(batch.position));
        effects.push(Effect::Write(new));
    }
}

/// Whether the batches follow each other and `previous`, and none is later than the sender.
fn is_chain(previous: Position, batches: &[Batch], epoch: Epoch) -> bool {
    let mut before = previous;
    batches.iter().all(|Batch { position, .. }| {
        let follows = before.sequence.checked_add(1) == Some(position.sequence)
            && (before.epoch..=epoch).contains(&position.epoch);
        before = *position;
        follows
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    const FRESH: Document = Document { run: 0, promised: Epoch(0), proof: Proof::All, synced: 0 };

    fn position(epoch: u64, sequence: u64) -> Position {
        Position { epoch: Epoch(epoch), sequence }
    }

    fn append(epoch: u64, previous: Position, positions: &[Position]) -> Request {
        let batch = |position: &Position| Batch { position: *position, bytes: Bytes::new() };
        Request::Append {
            epoch: Epoch(epoch),
            previous,
            batches: positions.iter().map(batch).collect(),
            proven_at: None,
            is_sync: true,
            lease: None,
        }
    }

    fn follower() -> Follower {
        let log = LogIndex::new(Position::START);
        let (mut follower, effect) = Follower::start(FRESH, log, true, 0, 10);
        assert_eq!(effect, Effect::Store(Document { run: 1, ..FRESH }));
        let effects =
            follower.on_request(0, append(2, Position::START, &[position(2, 1), position(2, 2)]));
        assert_eq!(effects.len(), 4, "promise, write, sync, answer: {effects:?}");
        follower
    }

    #[test]
    fn batches_that_do_not_follow_each_other_change_nothing() {
        let first = follower();
        let wrong = [
            append(3, position(2, 2), &[position(3, 4)]),
            append(3, position(2, 2), &[position(1, 3)]),
            append(3, position(2, 2), &[position(4, 3)]),
            append(3, position(2, 2), &[position(3, 3), position(2, 4)]),
            append(3, position(2, u64::MAX), &[position(3, 0)]),
        ];
        for request in wrong {
            let mut follower = first.clone();
            assert_eq!(follower.on_request(0, request), Vec::new());
            assert_eq!(follower, first);
        }
    }

    #[test]
    fn replaced_suffix_lowers_the_synced_position_before_it_is_cut() {
        let mut follower = follower();
        let effects = follower.on_request(0, append(3, position(2, 1), &[position(3, 2)]));
        let stored = |effect: &Effect| match effect {
            Effect::Store(document) => Some(document.synced),
            _ => None,
        };
        let cut = effects.iter().position(|effect| *effect == Effect::Cut(1)).unwrap();
        assert_eq!(effects[..cut].iter().filter_map(stored).next_back(), Some(1));
        assert_eq!(follower.log().tail(), position(3, 2));
    }

    #[test]
    fn log_that_ends_below_its_synced_position_proves_nothing() {
        let stored = *follower().document();
        assert_eq!(stored.synced, 2);
        let mut log = LogIndex::new(Position::START);
        log.push(position(2, 1));
        let proof = |is_same_boot, log: &LogIndex| {
            let (follower, _) = Follower::start(stored, log.clone(), is_same_boot, 0, 10);
            follower.document().proof
        };
        assert_eq!(proof(true, &log), Proof::Nothing);
        assert_eq!(proof(false, &log), Proof::Nothing);
        log.push(position(2, 2));
        assert_eq!(proof(true, &log), Proof::All);
        assert_eq!(proof(false, &log), Proof::Synced);
    }
}
