//! What identifies a batch of the log.

use block::Epoch;
use bytes::Bytes;

/// The place of a batch in the history of a pool: the epoch of the owner that wrote it, and its
/// sequence number, which is dense. An owner writes one batch at a position, so equal positions mean
/// equal batches. Positions are ordered by epoch first: see "Why no acknowledged write is lost" in
/// docs/protocol.md.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// Epoch of the owner that wrote the batch.
    pub epoch: Epoch,
    /// Sequence number; the first batch of a log is 1.
    pub sequence: u64,
}

impl Position {
    /// The place before the first batch.
    pub const START: Position = Position { epoch: Epoch(0), sequence: 0 };
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.epoch, self.sequence)
    }
}

/// A sealed batch, as the owner wrote it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Batch {
    /// Its place.
    pub position: Position,
    /// All of its bytes.
    pub bytes: Bytes,
}
