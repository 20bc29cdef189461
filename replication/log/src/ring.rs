//! The ring of log files: the state machine that fills it, and recovery, which finds its end.
//!
//! Invariants:
//! - The state machine ([`core`]) and recovery reach the files only through the traits of
//!   [`block::env`], so the simulation steps the same code as the daemon.
//! - All readers of the ring share one walk ([`walk`]), so that no two of them can disagree about
//!   the end of a log.

pub(crate) mod archive;
pub(crate) mod batch_places;
pub(crate) mod contents;
pub(crate) mod core;
pub(crate) mod drive;
pub(crate) mod follower_log;
pub(crate) mod incomplete;
pub(crate) mod inspect;
pub(crate) mod layout;
pub(crate) mod opening;
pub(crate) mod queue;
pub(crate) mod reads;
pub(crate) mod recovery;
pub(crate) mod scan;
pub(crate) mod shared_ring;
pub(crate) mod tail;
pub(crate) mod walk;
