//! A member: what it accepts, what it has to store before it answers, and what its log proves.
//!
//! Invariants:
//! - The promise never falls, and a request of an earlier epoch changes nothing.
//! - The log has no gaps: a batch is stored only behind its predecessor.
//! - What is cut from the log was never acknowledged by a quorum: only an owner that has found every
//!   acknowledged batch sends something else in its place.
//! - The log is dropped only where it lacks a batch up to which everything is in the store.
//! - A log that is shorter than it was begins another run, so that neither a proof nor an answer that
//!   is still under way counts for batches that are gone.
//! - The lease that an owner has from this member has run out before a later epoch gets its promise.

use crate::batch::Batch;
use crate::log_index::LogIndex;
use crate::messages::{Answer, LEASE_NS_MAX, Lease, Proof, Request, hold};
use crate::quorum::{Configuration, MemberId};
use crate::seeded_bugs::{SeededBugs, seeded_bugs};
use block::{Epoch, Lsn, Position};
use uuid::Uuid;

/// The small document that a member keeps beside its log, on stable storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Document {
    /// Identity of the page cache in which the member last ran: of the boot of its kernel and of the
    /// mounted file system of its log.
    pub page_cache: Uuid,
    /// Number of times that the member has started or has lost a part of its log.
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
    /// Take every batch above this sequence from the log, and any damaged bytes behind it. After a loss
    /// of power they may be there again.
    Cut(u64),
    /// Drop the log and begin behind this position, on stable storage.
    Reset(Position),
    /// Release what is in the store: the entries up to `trim_lsn`, in batches up to the sequence `last`
    /// ([`Follower::on_released`] follows). The owner's entries are those of this log only up to there.
    Release {
        /// Everything in the owner's log up to this entry is in the store.
        trim_lsn: Lsn,
        /// Newest batch that is known to be the owner's.
        last: u64,
    },
    /// Write batches behind the newest one. If the log has no room for one of them, nothing that follows
    /// is done, but what [`Follower::on_full`] says.
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
        /// First sequence that the log could have.
        start: u64,
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
    /// Epoch of the owner for which promises are held back. Owners of earlier epochs have no lease by
    /// then: it sends nothing before a recovery quorum has promised, which waits for the ends of theirs.
    held_for: Epoch,
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
    /// Sequence of the first batch whose bytes are not whole, if the log does not end in free space.
    /// `log` may have it, and batches behind it.
    pub damaged: Option<u64>,
    /// Every batch that the member has answered for in this page cache is at or below this sequence:
    /// the member notes its newest batch, where the note survives the process, after a write and before
    /// the answer. `None` without a note of this page cache.
    pub noted: Option<u64>,
    /// Identity of the present page cache.
    pub page_cache: Uuid,
    /// A write or sync of the owner that last ran on this log has failed, and no later owner has sent
    /// a batch since.
    pub has_failed: bool,
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
        let Found { document: stored, mut log, damaged, noted, page_cache, has_failed } = found;
        let damaged = damaged.filter(|_| !seeded_bugs.damage_skipped);
        if let Some(damaged) = damaged {
            log.cut(damaged.saturating_sub(1));
        }
        let tail = log.tail().sequence;
        // A member that never ran has answered for nothing.
        let is_same_cache = page_cache == stored.page_cache || stored.run == 0;
        // In one page cache a write that was answered is whole, and one that was not may be torn, because
        // the process was killed. In another one any may be torn.
        let is_short = noted.map_or(damaged.is_some(), |noted| tail < noted);
        let is_lost = tail < stored.synced || is_same_cache && is_short;
        let proof = if is_lost && !seeded_bugs.damage_unseen {
            Proof::Nothing
        } else if is_same_cache && !has_failed || seeded_bugs.amnesiac_votes {
            stored.proof
        } else {
            stored.proof.min(Proof::Synced)
        };
        let document = Document { page_cache, run: stored.run + 1, proof, synced: tail, ..stored };
        // The member has forgotten when the last append came.
        let held_until = match seeded_bugs.lease_forgotten {
            true => now,
            false => now.saturating_add(hold(document.lease)),
        };
        let (synced, configuration) = (tail, 0);
        let held_for = document.promised;
        let follower =
            Follower { document, log, synced, held_until, held_for, configuration, seeded_bugs };
        // What was read may be in a cache of the disk only.
        let mut effects = vec![Effect::Sync, Effect::Store(document)];
        effects.extend(damaged.map(|_| Effect::Cut(tail)));
        (follower, effects)
    }

    /// Returns the document to store in place of `stored` after a write or sync of the log or the note
    /// has failed: the kernel may drop what it could not write, now or later, while the page cache, the
    /// note and every later sync seem to be in order. What an earlier sync has covered is there. The
    /// member ends, and answers nothing more.
    #[must_use]
    pub fn on_failure(&self, stored: Document) -> Document {
        let proof = stored.proof.min(self.document.proof).min(Proof::Synced);
        if self.seeded_bugs.failure_not_stored { stored } else { Document { proof, ..stored } }
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
        if let Request::Resign { .. } = request {
            self.on_resign(now, epoch);
            return Vec::new();
        }
        if epoch < self.document.promised {
            let promised = self.document.promised;
            return vec![Effect::Answer(Answer::Superseded { epoch, promised })];
        }
        match request {
            Request::Promise { .. } => self.on_promise(now, epoch),
            Request::Resign { .. } => Vec::new(), // heeded above
            Request::Read { after, .. } => self.on_read(epoch, after),
            Request::Reset { before, .. } => self.on_reset(now, epoch, before),
            Request::Append {
                previous,
                batches,
                proven_at,
                is_sync,
                lease,
                configuration,
                trim_lsn,
                ..
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
                self.store((previous, trim_lsn), batches, &mut effects);
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
            self.held_for = self.held_for.max(epoch);
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

    /// Ends the lease of the sender, also where its successor asked for a promise first.
    fn on_resign(&mut self, now: u64, epoch: Epoch) {
        if epoch == self.held_for || self.seeded_bugs.resign_of_any_epoch {
            self.held_until = self.held_until.min(now);
        }
    }

    fn on_read(&self, epoch: Epoch, after: Position) -> Vec<Effect> {
        let is_promised = epoch == self.document.promised || self.seeded_bugs.promise_not_kept;
        let previous = self.log.newest_up_to(after.sequence, after.epoch);
        let (run, start) = (self.document.run, self.log.start());
        let send = Effect::Send { epoch, run, start, previous };
        if is_promised { vec![send] } else { Vec::new() }
    }

    /// Drops the log, unless it has `before` or begins behind it: such a request is late, and the owner
    /// may have counted what the log has since. Any batch at `before` or below that was acknowledged is
    /// in the store, and a log without `before` has nothing of the owner's log above it. So the log lacks
    /// nothing that it did not lack before, and keeps its proof.
    fn on_reset(&mut self, now: u64, epoch: Epoch, before: Position) -> Vec<Effect> {
        if before.epoch > epoch {
            return Vec::new(); // no owner sends this
        }
        let mut effects = Vec::new();
        self.grant(now, epoch, None, &mut effects);
        let is_late = self.log.has(before) || before.sequence < self.log.start();
        if !is_late || self.seeded_bugs.late_reset_obeyed {
            self.document =
                Document { run: self.document.run + 1, synced: before.sequence, ..self.document };
            self.log = LogIndex::new(before);
            self.synced = before.sequence;
            effects.extend([Effect::Store(self.document), Effect::Reset(before)]);
        }
        effects.push(Effect::Answer(Answer::Appended {
            epoch,
            run: self.document.run,
            written: before.sequence,
            synced: self.synced.min(before.sequence),
            lease: None,
        }));
        effects
    }

    /// Notes that the batch with this sequence could not be read, because its bytes are not whole. The
    /// log ends before it; an owner brings the rest again. Call it before an answer that has the
    /// batches before the damaged one, which belongs to the next run. An owner on the same node ends.
    pub fn on_damage(&mut self, sequence: u64) -> Vec<Effect> {
        if sequence < self.log.start() || sequence > self.log.tail().sequence {
            return Vec::new(); // it was released or replaced meanwhile
        }
        let end = sequence - 1;
        self.log.cut(end);
        self.synced = self.synced.min(end);
        self.document.synced = self.document.synced.min(end);
        self.document.run += 1;
        if !self.seeded_bugs.damage_unseen {
            self.document.proof = Proof::Nothing;
        }
        vec![Effect::Store(self.document), Effect::Cut(end)]
    }

    /// Notes that the log had no room for the batches above `sequence`, and says what to do in place of
    /// `undone`, the effects behind [`Effect::Write`]. `stored` is the document that was stored last. The
    /// owner moves only synced batches to the store, and so makes room: what is here gets synced.
    pub fn on_full(
        &mut self,
        stored: Document,
        sequence: u64,
        undone: impl IntoIterator<Item = Effect>,
    ) -> Vec<Effect> {
        self.document = stored; // a proof that the rest of the request would have given is not stored
        self.log.cut(sequence);
        let written = self.log.tail().sequence;
        self.synced = written;
        let mut effects = vec![Effect::Sync];
        effects.extend(undone.into_iter().filter_map(|effect| match effect {
            Effect::Answer(Answer::Appended { epoch, run, lease, .. }) => {
                Some(Effect::Answer(Answer::Full { epoch, run, written, lease }))
            }
            _ => None,
        }));
        effects
    }

    /// Notes that the ring has released every batch up to `sequence`, because it is in the store.
    pub fn on_released(&mut self, sequence: u64) {
        self.log.release(sequence);
    }

    /// Notes that the owner on the same node writes a batch behind the newest one of this log, which it
    /// shares with the member. Returns false, without effect, if a later epoch was promised: the owner
    /// has ended and does not write it.
    ///
    /// # Panics
    /// If the batch does not follow the newest one.
    pub fn on_own_written(&mut self, position: Position) -> bool {
        if position.epoch < self.document.promised {
            return false;
        }
        self.log.push(position);
        true
    }

    /// Notes that every batch up to `sequence` is on stable storage, which the owner on the same node
    /// has done.
    pub fn on_own_synced(&mut self, sequence: u64) {
        self.synced = self.synced.max(sequence.min(self.log.tail().sequence));
    }

    /// Notes that the owner of `epoch` on the same node has opened on this log: it has found everything
    /// that any member may have answered for, so this log lacks nothing.
    pub fn on_own_open(&mut self, epoch: Epoch) -> Option<Effect> {
        let is_news = epoch == self.document.promised && self.document.proof != Proof::All;
        is_news.then(|| {
            self.document.proof = Proof::All;
            Effect::Store(self.document)
        })
    }

    /// Whether this member, `me`, may create a link whose configuration contains only itself, in place
    /// of `newest`, the configuration of the newest link: every batch that was acknowledged is on every
    /// member, and this log lacks nothing. Only then are the other members not needed.
    #[must_use]
    pub fn may_go_alone(&self, me: &MemberId, newest: &Configuration) -> bool {
        let is_on_all = newest.recovery_quorum() == 1 || self.seeded_bugs.alone_below_all;
        let is_proven = self.document.proof == Proof::All || self.seeded_bugs.alone_unproven;
        newest.members.contains(me) && is_on_all && is_proven
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
    fn store(
        &mut self,
        (previous, trim_lsn): (Position, Lsn),
        mut batches: Vec<Batch>,
        effects: &mut Vec<Effect>,
    ) {
        let known = batches.iter().take_while(|batch| self.log.has(batch.position)).count();
        let new = batches.split_off(known);
        let end = batches.last().map_or(previous, |batch| batch.position).sequence;
        if !new.is_empty() && self.log.tail().sequence > end {
            self.log.cut(end);
            self.synced = self.synced.min(end);
            if self.document.synced > end {
                // Otherwise a later start would take the log for damaged.
                self.document.synced = end;
                effects.push(Effect::Store(self.document));
            }
            effects.push(Effect::Cut(end));
        }
        // Behind `end` the log may be that of an owner whose entries were others.
        if trim_lsn > Lsn::NONE {
            effects.push(Effect::Release { trim_lsn, last: end });
        }
        if !new.is_empty() {
            new.iter().for_each(|batch| self.log.push(batch.position));
            effects.push(Effect::Write(new));
        }
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
mod tests;
