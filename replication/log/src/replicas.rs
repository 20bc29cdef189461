//! The other machines that keep the log, as the log sees them.
//!
//! Invariants:
//! - The log hands over each batch once, in order of sequence, before it reports the batch as written
//!   on its own disk.
//! - The log neither knows how many members there are nor how batches reach them.

use crate::format::state::TailLoss;
use block::Position;
use bytes::Bytes;
use std::sync::Arc;

/// The members of a pool's log besides the disk of its owner. The log calls it with its own state
/// locked, so no method waits for a disk, a network, or the log. After a change of
/// [`Replicas::acknowledged`], [`Replicas::committed`] or [`Replicas::has_lease`] the implementation
/// calls [`Log::on_replicas`](crate::Log::on_replicas).
pub trait Replicas: Send + Sync + 'static {
    /// Takes a batch that is on its way to the own disk. `is_sync`: a client waits until it is on
    /// stable storage.
    fn append(&self, position: Position, bytes: Bytes, is_sync: bool);

    /// Takes the sequences up to which every batch has been written to the own disk, and is on its
    /// stable storage.
    fn on_own(&self, written: u64, synced: u64);

    /// Asks that the batches up to `sequence` reach the stable storage of the members.
    fn want_sync(&self, sequence: u64);

    /// Returns the sequence up to which every batch may be acknowledged. It never falls, and is at
    /// most what [`Replicas::on_own`] has reported as written.
    fn acknowledged(&self) -> u64;

    /// Returns the sequence up to which every batch is on the stable storage of a quorum. It never
    /// falls.
    fn committed(&self) -> u64;

    /// Returns whether the owner may serve reads at this moment.
    fn has_lease(&self) -> bool;
}

/// The end of a log that its members have decided on, for an open that continues it.
#[derive(Clone)]
pub struct QuorumTail {
    /// Place of the newest batch, or of the one before the first.
    pub position: Position,
    /// The batch at that position, if the log on this machine is empty and begins behind it: the next one
    /// names it, for the members that have it. Everything up to it is in the data tier.
    pub predecessor: Option<Bytes>,
    /// Acknowledged entries may be missing: too few members can prove that they have all.
    pub loss: Option<TailLoss>,
    /// The members.
    pub replicas: Arc<dyn Replicas>,
}

impl std::fmt::Debug for QuorumTail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let QuorumTail { position, predecessor: _, loss, replicas: _ } = self;
        f.debug_struct("QuorumTail").field("position", position).field("loss", loss).finish()
    }
}
