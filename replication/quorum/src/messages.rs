//! The messages between an owner or candidate and a member. Each carries the sender's epoch, and a
//! member answers nothing of an epoch below its promise with anything but a refusal.

use crate::batch::Batch;
use block::{Epoch, Lsn, Position};

/// Longest lease that a member accepts: one minute, in nanoseconds. Chosen by hand: a take-over waits
/// for the longest lease that a member has ever accepted.
pub const LEASE_NS_MAX: u64 = 60_000_000_000;

/// A lease for which an owner asks. It comes back with the answer, so that the owner knows when it
/// had asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lease {
    /// Time of the request: nanoseconds of the owner's monotonic clock. Only the owner interprets it.
    pub sent: u64,
    /// Length in nanoseconds, at most [`LEASE_NS_MAX`].
    pub length: u64,
}

impl Lease {
    /// Returns the end of the lease by the owner's clock.
    #[must_use]
    pub fn until(&self) -> u64 {
        self.sent.saturating_add(self.length)
    }
}

/// Returns for how long a member that has accepted leases of `length` answers no promise: one percent
/// longer, because the rates of two clocks differ by at most that. Both are in nanoseconds.
#[must_use]
pub fn hold(length: u64) -> u64 {
    length.saturating_add(length / 100)
}

/// What of everything that a member has ever answered for is certainly in its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Proof {
    /// Nothing: a part of the log that was on stable storage is damaged or gone.
    Nothing,
    /// What was on stable storage: the machine has lost power, or its kernel ended.
    Synced,
    /// All of it.
    All,
}

/// From an owner or a candidate to a member.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Request {
    /// Store these batches behind `previous`. Without batches it asks whether the member has
    /// `previous`, and extends the lease.
    Append {
        /// The sender's epoch.
        epoch: Epoch,
        /// Position of the batch before the first one.
        previous: Position,
        /// Consecutive batches.
        batches: Vec<Batch>,
        /// The owner has found everything that any member may have answered for, and a member that has
        /// all batches up to this one lacks nothing of it, if this is still its run.
        proven_at: Option<(u64, Position)>,
        /// Put everything that is written on stable storage before answering.
        is_sync: bool,
        /// `None` from a candidate, which has no lease.
        lease: Option<Lease>,
        /// Number of the newest configuration that the sender knows. A member reports it, and no rule
        /// depends on it.
        configuration: u64,
        /// Everything in the sender's log up to this entry is in the store. The member needs room, and
        /// releases what is there: batches that are sent again say what was in the store when they
        /// were made.
        trim_lsn: Lsn,
    },
    /// Drop the log, and begin behind `before`: the sender's log has released everything up to it,
    /// because it is in the store. A member that has this batch, or begins behind it, changes nothing.
    Reset {
        /// The sender's epoch.
        epoch: Epoch,
        /// Position of the batch before the first one that the log will have.
        before: Position,
    },
    /// Accept nothing of an earlier epoch from now on.
    Promise {
        /// The candidate's epoch.
        epoch: Epoch,
    },
    /// The sender, which has opened, serves no read any more: its lease from the member ends. Not
    /// answered; without it the lease runs out.
    Resign {
        /// The sender's epoch.
        epoch: Epoch,
    },
    /// Send batches.
    Read {
        /// The candidate's epoch, which the member has promised.
        epoch: Epoch,
        /// The sender's newest batch that the member may have. The member sends what follows its own
        /// newest batch that is not above it and not of a later epoch.
        after: Position,
    },
}

impl Request {
    /// Returns the sender's epoch.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        match self {
            Request::Append { epoch, .. }
            | Request::Reset { epoch, .. }
            | Request::Promise { epoch }
            | Request::Resign { epoch }
            | Request::Read { epoch, .. } => *epoch,
        }
    }
}

/// From a member to the sender of a request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Answer {
    /// The member has every batch up to `written`, equal to the sender's.
    Appended {
        /// Epoch of the request.
        epoch: Epoch,
        /// Number of the member's run: see [`Document::run`](crate::Document::run).
        run: u64,
        /// Sequence of the last batch of the request, or of its predecessor without batches.
        written: u64,
        /// Highest sequence up to `written` that is on stable storage.
        synced: u64,
        /// That of the request.
        lease: Option<Lease>,
    },
    /// The member has no room for a batch of the request. It has every batch up to `written`, equal to
    /// the sender's, and all of them are on stable storage: the store can only take what is.
    Full {
        /// Epoch of the request.
        epoch: Epoch,
        /// Number of the member's run: see [`Document::run`](crate::Document::run).
        run: u64,
        /// Sequence of the last batch for which there was room.
        written: u64,
        /// That of the request: the lease does not depend on room.
        lease: Option<Lease>,
    },
    /// The member has promised a later epoch: the sender is no owner and no candidate any more.
    Superseded {
        /// Epoch of the request.
        epoch: Epoch,
        /// The promise.
        promised: Epoch,
    },
    /// The member has no batch at the position that the request names as predecessor.
    Lacking {
        /// Epoch of the request.
        epoch: Epoch,
        /// Number of the member's run: see [`Document::run`](crate::Document::run).
        run: u64,
        /// Sequence of the predecessor that it lacks.
        sequence: u64,
        /// Newest batch of the member below that predecessor which the sender may have. The sender goes
        /// on behind its own newest batch that is not above it and not of a later epoch.
        may_match: Position,
        /// First sequence that the member could have: earlier ones were released.
        start: u64,
    },
    /// The member accepts nothing of an earlier epoch.
    Promised {
        /// Epoch of the request.
        epoch: Epoch,
        /// Number of the member's run: see [`Document::run`](crate::Document::run).
        run: u64,
        /// Position of the newest batch, or of the one before the log's start.
        tail: Position,
        /// What of everything that the member ever answered for is certainly in its log.
        proof: Proof,
    },
    /// Batches behind the one that was asked for; empty at the end of the log.
    Batches {
        /// Epoch of the request.
        epoch: Epoch,
        /// Number of the member's run: see [`Document::run`](crate::Document::run).
        run: u64,
        /// First sequence that the member could have: earlier ones were released.
        start: u64,
        /// Position of the batch before the first one.
        previous: Position,
        /// Consecutive batches.
        batches: Vec<Batch>,
    },
}

impl Answer {
    /// Returns the epoch of the request that it answers.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        match self {
            Answer::Appended { epoch, .. }
            | Answer::Full { epoch, .. }
            | Answer::Superseded { epoch, .. }
            | Answer::Lacking { epoch, .. }
            | Answer::Promised { epoch, .. }
            | Answer::Batches { epoch, .. } => *epoch,
        }
    }

    /// Returns the member's run, or 0 for an answer that does not depend on it.
    #[must_use]
    pub fn run(&self) -> u64 {
        match self {
            Answer::Appended { run, .. }
            | Answer::Full { run, .. }
            | Answer::Lacking { run, .. }
            | Answer::Promised { run, .. }
            | Answer::Batches { run, .. } => *run,
            Answer::Superseded { .. } => 0,
        }
    }
}
