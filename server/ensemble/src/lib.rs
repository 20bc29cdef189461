//! The members of a pool's write log at run time, on one node: the member's log and its rules, the
//! owner's senders, and the steps of a take-over. `docs/protocol.md` defines the protocol; its rules
//! are the state machines of the crate `replication`.
//!
//! It owns the threads, tasks, queues and timers between these machines and a log on disk. It refuses
//! to know sockets and certificates (its callers bring connections), the manifest chain (its callers
//! say which configuration holds), and the contents of batches.
//!
//! Invariants:
//! - Every queue between owner and members is bounded, and a full one holds up nobody else.
//! - A member answers after the effects that the answer depends on.
#![deny(unsafe_code)]

mod disk_log;
mod document;
mod local;
mod member;
mod owned;
mod peers;
mod sender;
mod take_over;
#[cfg(test)]
mod tests;
mod window;

pub use disk_log::open_ring;
pub use local::{LocalMember, LocalOptions, OpenLog};
pub use member::{FoundLog, Member, MemberLog};
pub use owned::{MemberStatus, OwnedLog, OwnedOptions, OwnersLog, Standing};
pub use peers::{Link, Peers};
pub use take_over::{TakeOver, Taken};
