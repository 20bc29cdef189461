//! The members of a pool's write log at run time, on one node: the member's log and its rules, the
//! owner's senders, and the steps of a take-over. `docs/protocol.md` defines the protocol; its rules
//! are the state machines of the crate `replication`.
//!
//! It owns the threads, tasks, queues and timers between these machines, a log on disk and the
//! connections of the crate `cluster`. It refuses to know sockets and certificates, the manifest chain
//! (its callers say which configuration holds, and on which node each member is), and the contents of
//! batches.
//!
//! Invariants:
//! - Every queue between owner and members is bounded, and a full one holds up nobody else.
//! - A member answers after the effects that the answer depends on.
#![deny(unsafe_code)]

mod change;
mod cluster_peers;
mod disk_log;
mod document;
mod frames;
mod local;
mod member;
mod member_service;
mod note;
mod owned;
mod peers;
mod seeded_bugs;
mod sender;
mod take_over;
mod tasks;
#[cfg(test)]
mod tests;
mod traffic;
mod window;

pub use change::{CatchUp, Change};
pub use cluster_peers::{ClusterPeers, MemberNodes};
pub use disk_log::{member_log, open_ring, page_cache_of};
pub use local::{LocalMember, LocalOptions, OpenLog, OwnerRole};
pub use member::{FoundLog, Member, MemberLog};
pub use member_service::MemberService;
pub use owned::{MemberStatus, OwnedLog, OwnedOptions, OwnersLog, SILENCE_SHOWN, Standing};
pub use peers::{Link, Peers};
pub use take_over::{TakeOver, Taken};
pub use traffic::LogTraffic;
