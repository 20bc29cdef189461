//! The shape of the ring: its files, the place of the next batch, and its fixed parameters.
//! Recovery fills these in, and the state machine continues from them.
//!
//! Invariants:
//! - The geometry of an existing ring is that of its file headers; it never follows the options.

use crate::format::batch::Predecessor;
use crate::options::{LogIdentity, LogOptions};
use crate::seeded_bugs::SeededBugs;
use block::Lsn;
use block::seal::PoolKey;

/// Returns the chain of the batches in a new ring of a pool. It follows from the pool alone: two members
/// with empty logs may both come to begin the pool's log, and each has to take the other's batches. Their
/// epochs tell these apart.
pub(crate) fn chain_of(pool: [u8; 16]) -> [u8; 16] {
    pool
}

/// The place of the next batch and its predecessor in the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) slot: u32,
    pub(crate) offset: u64,
    /// Sequence of the next batch.
    pub(crate) sequence: u64,
    /// The batch before the next one.
    pub(crate) previous: Predecessor,
    /// LSN of the next entry.
    pub(crate) next_lsn: Lsn,
    /// Bytes of log over all wraps.
    pub(crate) position: u64,
}

/// A file between the tail of the log and its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LiveFile {
    pub(crate) slot: u32,
    /// Newest entry in this file, or in an earlier one.
    pub(crate) last_lsn: Lsn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileState {
    Absent,
    /// Carries the token of the request.
    Creating(u64),
    /// The file could not be made; it is requested again at the next tick.
    Refused,
    Ready,
}

/// The parts that do not change while the log is open.
pub(crate) struct RingConfig {
    pub(crate) identity: LogIdentity,
    pub(crate) key: PoolKey,
    pub(crate) options: LogOptions,
    /// Geometry of the ring, which may differ from the options.
    pub(crate) ring: [u8; 16],
    /// Identity of the chain of batches in the ring.
    pub(crate) chain: [u8; 16],
    pub(crate) file_count: u32,
    pub(crate) file_bytes: u64,
    pub(crate) open: [u8; 16],
    pub(crate) seeded_bugs: SeededBugs,
}
