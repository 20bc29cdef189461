//! A member: what it accepts, what it has to store before it answers, and what its log proves.
//!
//! Invariants:
//! - The promise never falls, and a request of an earlier epoch changes nothing.
//! - The log has no gaps: a batch is stored only behind its predecessor.
//! - What is cut from the log was never acknowledged by a quorum: only an owner that has found every
//!   acknowledged batch sends something else in its place.
//! - The lease that an owner has from this member has run out before a later epoch gets its promise.

use crate::batch::Batch;
use crate::log_index::LogIndex;
use crate::messages::{Answer, LEASE_NS_MAX, Lease, Proof, Request, hold};
use crate::seeded_bugs::{SeededBugs, seeded_bugs};
use block::{Epoch, Position};
use uuid::Uuid;

/// The small document that a member keeps beside its log, on stable storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Document {
    /// Boot id of the kernel under which the member last ran.
    pub boot: Uuid,
    /// Number of times that the member has started.
    pub run: u64,
    /// The highest epoch that it has promised.
    pub promised: Epoch,
    /// What the log proves.
    pub proof: Proof,
    /// A sequence that was on stable storage.
    pub synced: u64,
    /// The longest lease that it has accepted, in nanoseconds.
    pub lease: u64,
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
        /// Number of the member's run.
        run: u64,
        /// Position of the batch before the first one.
        previous: Position,
    },
}

/// A member of one pool's log.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Follower {
    document: Document,
    log: LogIndex,
    synced: u64,
    /// No promise is answered before this time.
    held_until: u64,
    /// Number of the newest configuration that an owner has announced.
    configuration: u64,
    seeded_bugs: SeededBugs,
}

/// What a member finds when it starts.
#[derive(Clone, Debug)]
pub struct Found {
    /// The stored document.
    pub document: Document,
    /// The batches in the ring.
    pub log: LogIndex,
    /// The log ends in bytes that are neither a batch nor free space.
    pub is_end_damaged: bool,
    /// Boot id of the running kernel.
    pub boot: Uuid,
}

impl Follower {
    /// Makes the machine of a member that has just started, at `now`, and says what to do before it
    /// takes requests. `now` is in nanoseconds of the member's monotonic clock.
    #[must_use]
    pub fn start(found: Found, now: u64) -> (Follower, Vec<Effect>) {
        Follower::start_with(found, now, seeded_bugs())
    }

    pub(crate) fn start_with(
        found: Found,
        now: u64,
        seeded_bugs: SeededBugs,
    ) -> (Follower, Vec<Effect>) {
        let Found { document: stored, log, is_end_damaged, boot } = found;
        let tail = log.tail().sequence;
        let is_same_boot = boot == stored.boot;
        // Under one kernel a write that was answered is whole. After another one it may be torn.
        let proof = if tail < stored.synced || is_same_boot && is_end_damaged {
            Proof::Nothing
        } else if is_same_boot || seeded_bugs.amnesiac_votes {
            stored.proof
        } else {
            stored.proof.min(Proof::Synced)
        };
        let document = Document { boot, run: stored.run + 1, proof, synced: tail, ..stored };
        // The member has forgotten when the last append came.
        let held_until = match seeded_bugs.lease_forgotten {
            true => now,
            false => now.saturating_add(hold(document.lease)),
        };
        let (synced, configuration) = (tail, 0);
        let follower = Follower { document, log, synced, held_until, configuration, seeded_bugs };
        // What was read may be in a cache of the disk only.
        (follower, vec![Effect::Sync, Effect::Store(document)])
    }

    /// Notes in the document how far the log is synced; a few times a second. A log that later ends
    /// before that is known to be damaged.
    pub fn on_tick(&mut self) -> Option<Effect> {
        let is_further = self.synced > self.document.synced;
        self.document.synced = self.synced;
        is_further.then_some(Effect::Store(self.document))
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

    /// Number of the newest configuration that an owner has announced since this start; 0 before.
    #[must_use]
    pub fn configuration(&self) -> u64 {
        self.configuration
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
            Request::Append {
                previous, batches, proven_at, is_sync, lease, configuration, ..
            } => {
                let is_short = lease.is_none_or(|lease| lease.length <= LEASE_NS_MAX);
                if !is_short || !is_chain(previous, &batches, epoch) {
                    return Vec::new(); // no owner sends this
                }
                let mut effects = Vec::new();
                self.grant(now, epoch, lease, &mut effects);
                self.configuration = self.configuration.max(configuration);
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

    /// Stores the promise of the sender's epoch, and a lease that is longer than any before, and holds
    /// back promises of later epochs from now on.
    fn grant(&mut self, now: u64, epoch: Epoch, lease: Option<Lease>, effects: &mut Vec<Effect>) {
        let length = lease.map_or(0, |lease| lease.length);
        let is_longer = length > self.document.lease;
        let is_later = epoch > self.document.promised;
        self.document.lease = self.document.lease.max(length);
        self.document.promised = self.document.promised.max(epoch);
        let is_stored = is_later && !self.seeded_bugs.promise_not_stored
            || is_longer && !self.seeded_bugs.lease_not_stored;
        if is_stored {
            effects.push(Effect::Store(self.document));
        }
        if lease.is_some() {
            self.held_until = self.held_until.max(now.saturating_add(hold(self.document.lease)));
        }
    }

    /// The promise is kept from now on, and answered once no owner can have a lease from here.
    fn on_promise(&mut self, now: u64, epoch: Epoch) -> Vec<Effect> {
        let mut effects = Vec::new();
        if !self.seeded_bugs.promise_not_kept {
            self.grant(now, epoch, None, &mut effects);
        }
        if now >= self.held_until {
            effects.push(Effect::Answer(Answer::Promised {
                epoch,
                run: self.document.run,
                tail: self.log.tail(),
                proof: self.document.proof,
            }));
        }
        effects
    }

    fn on_read(&self, epoch: Epoch, after: Position) -> Vec<Effect> {
        let is_promised = epoch == self.document.promised || self.seeded_bugs.promise_not_kept;
        let previous = self.log.newest_up_to(after.sequence, after.epoch);
        let send = Effect::Send { epoch, run: self.document.run, previous };
        if is_promised { vec![send] } else { Vec::new() }
    }

    fn lacking(&self, epoch: Epoch, previous: Position) -> Answer {
        let below = previous.sequence.saturating_sub(1);
        Answer::Lacking {
            epoch,
            run: self.document.run,
            sequence: previous.sequence,
            may_match: self.log.newest_up_to(below, previous.epoch),
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

    const BOOT: Uuid = Uuid::from_u128(1);
    const FRESH: Document =
        Document { boot: BOOT, run: 0, promised: Epoch(0), proof: Proof::All, synced: 0, lease: 0 };

    fn found(document: Document, log: LogIndex) -> Found {
        Found { document, log, is_end_damaged: false, boot: BOOT }
    }

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
            configuration: 1,
        }
    }

    fn follower() -> Follower {
        let log = LogIndex::new(Position::START);
        let (mut follower, effects) = Follower::start(found(FRESH, log), 0);
        assert_eq!(effects, [Effect::Sync, Effect::Store(Document { run: 1, ..FRESH })]);
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
        let noted = follower.on_tick();
        assert!(matches!(noted, Some(Effect::Store(Document { synced: 2, .. }))), "{noted:?}");
        assert_eq!(follower.on_tick(), None);
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
    fn damaged_log_proves_nothing_and_a_reboot_only_what_was_synced() {
        let mut follower = follower();
        let Some(Effect::Store(stored)) = follower.on_tick() else { panic!("it has synced") };
        let mut log = LogIndex::new(Position::START);
        log.push(position(2, 1));
        let proof = |log: &LogIndex, boot: u128, is_end_damaged: bool| {
            let boot = Uuid::from_u128(boot);
            let found = Found { document: stored, log: log.clone(), is_end_damaged, boot };
            Follower::start(found, 0).0.document().proof
        };
        assert_eq!(proof(&log, 1, false), Proof::Nothing, "it ends below what was synced");
        assert_eq!(proof(&log, 2, false), Proof::Nothing);
        log.push(position(2, 2));
        assert_eq!(proof(&log, 1, false), Proof::All);
        assert_eq!(proof(&log, 1, true), Proof::Nothing, "a whole batch was there");
        assert_eq!(proof(&log, 2, true), Proof::Synced, "a torn write is no damage");
    }

    #[test]
    fn promise_waits_for_the_longest_lease_also_after_a_start() {
        let mut follower = follower();
        let lease = |length| {
            let request = append(2, position(2, 2), &[]);
            let Request::Append { epoch, previous, batches, proven_at, is_sync, .. } = request
            else {
                panic!("it is an append");
            };
            let lease = Some(Lease { sent: 7, length });
            Request::Append {
                epoch,
                previous,
                batches,
                proven_at,
                is_sync,
                lease,
                configuration: 1,
            }
        };
        let effects = follower.on_request(1000, lease(300));
        assert!(matches!(effects[0], Effect::Store(Document { lease: 300, .. })), "{effects:?}");
        assert_eq!(follower.on_request(1000, lease(200)).len(), 2, "a shorter one is not stored");
        assert_eq!(follower.on_request(1000, lease(LEASE_NS_MAX + 1)), Vec::new());
        let promise = Request::Promise { epoch: Epoch(3) };
        let is_answered = |effects: Vec<Effect>| {
            effects.iter().any(|effect| matches!(effect, Effect::Answer(Answer::Promised { .. })))
        };
        assert!(!is_answered(follower.on_request(1302, promise.clone())), "the margin of clocks");
        assert!(is_answered(follower.on_request(1303, promise.clone())));
        let stored = *follower.document();
        let (mut follower, _) = Follower::start(found(stored, follower.log().clone()), 5);
        assert!(!is_answered(follower.on_request(307, promise.clone())));
        assert!(is_answered(follower.on_request(308, promise)));
    }
}
