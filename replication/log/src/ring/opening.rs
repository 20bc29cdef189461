//! The arguments of opening a log, which recovery and its scan of the ring share.
//!
//! Invariants:
//! - Everything that recovery learns from outside the ring is here, so that the simulation decides
//!   all of it.

use crate::disk::state_files::StateKeeper;
use crate::options::{LogIdentity, LogOptions};
use crate::replicas::QuorumTail;
use crate::seeded_bugs::SeededBugs;
use block::Lsn;
use block::env::{Clock, Random};
use block::seal::PoolKey;
use std::collections::HashMap;
use std::time::Instant;

/// The arguments of [`crate::ring::recovery::open`].
pub(crate) struct OpenArgs<'a> {
    pub(crate) identity: LogIdentity,
    pub(crate) key: PoolKey,
    pub(crate) options: LogOptions,
    pub(crate) destaged: Lsn,
    pub(crate) random: &'a dyn Random,
    pub(crate) clock: &'a dyn Clock,
    pub(crate) seeded_bugs: SeededBugs,
    /// Time of the last write to each file of the ring before this open, by number: no entry in the
    /// file is younger. The format stores no time. A file without a time counts as written at the
    /// open.
    pub(crate) written_at: HashMap<u32, Instant>,
    /// Number of files created for the ring, if the directory records it.
    pub(crate) made_count: Option<u32>,
    /// Keeper of the recorded state of the log.
    pub(crate) keeper: &'a dyn StateKeeper,
    /// The mounted file system that holds the log; `None` if it is not known.
    pub(crate) mount: Option<u64>,
    /// The end of the log, if its members have decided on it.
    pub(crate) quorum: Option<&'a QuorumTail>,
}
