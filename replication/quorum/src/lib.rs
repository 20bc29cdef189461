//! The protocol that keeps a pool's write log on several machines, as state machines without I/O.
//! `docs/protocol.md` says what each message means and why no acknowledged write is lost.
//!
//! It owns the rules: what a member accepts, when a batch counts as acknowledged or flushed, which
//! log a new owner continues, and how the members of a pool change. It refuses to know sockets,
//! files, threads and the contents of a batch. Its callers bring messages, completions and the time,
//! and do what it returns.
//!
//! Invariants:
//! - A batch that is acknowledged is in the log of every later owner.
//! - A member's document is on stable storage before an answer that depends on it leaves.
//! - No machine reads a clock: the time comes in as an argument, from a monotonic clock of the node
//!   that counts the time for which its machine was suspended.
//!
//! ```text
//! batch     a batch, sealed             follower  a member's rules
//! messages  what the machines exchange  owner     appends, quorum, lease
//! log_index the positions in a log      progress  one member as the owner sees it
//! quorum    who has to have a batch     take_over the choice of a log to continue
//! wire      the bytes of messages       model     all of it under a model checker (tests)
//! ```
#![deny(unsafe_code)]

mod batch;
mod follower;
mod log_index;
mod messages;
#[cfg(test)]
mod model;
mod owner;
mod progress;
mod quorum;
mod seeded_bugs;
mod take_over;
mod wire;

pub use batch::Batch;
pub use follower::{Document, Effect, Follower, Found};
pub use log_index::LogIndex;
pub use messages::{Answer, LEASE_NS_MAX, Lease, Proof, Request, hold};
pub use owner::{Owner, Sending};
pub use progress::Progress;
pub use quorum::{Configuration, MemberId, Quorums};
pub use take_over::{Candidate, Decision};
pub use wire::{MESSAGE_BATCHES_MAX, MESSAGE_VERSION, MessageError, NUMBER_MAX};
