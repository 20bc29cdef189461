//! A batch of the log, as the machines exchange it.

use block::Position;
use bytes::Bytes;

/// A sealed batch, as the owner wrote it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Batch {
    /// Its place.
    pub position: Position,
    /// All of its bytes.
    pub bytes: Bytes,
}
