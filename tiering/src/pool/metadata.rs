//! The metadata of the pool: the map and its single writer.
//!
//! Invariants:
//! - A commit is made while the writer is locked. While another task holds the lock, no commit is
//!   under way and none begins.

use crate::map::{LayerId, LayerRecord, Map, Writer};
use crate::segment::{SegmentId, SegmentNumber};
use block::{Result, VolumeId};
use std::sync::atomic::AtomicU64;

/// The map and its writer; see the module.
pub(crate) struct Metadata {
    pub map: Map,
    pub writer: tokio::sync::Mutex<Writer>,
    /// Number of the next new segment.
    pub next_segment: AtomicU64,
    /// Number of commits when the metadata was opened.
    pub opened_at_commit: u64,
}

impl Metadata {
    pub(crate) fn new(map: Map, writer: Writer) -> Metadata {
        let root = *writer.root();
        Metadata {
            map,
            writer: tokio::sync::Mutex::new(writer),
            next_segment: AtomicU64::new(root.next_segment),
            opened_at_commit: root.commit_number,
        }
    }

    /// Returns whether the map references a segment, waiting for a commit that is under way. An
    /// unreferenced segment will never be referenced again. Fails while the outcome of a failed
    /// commit is unknown.
    pub(crate) async fn is_named(&self, number: SegmentNumber, id: SegmentId) -> Result<bool> {
        if self.map.seeded_bugs.sweep_unlocked {
            return self.has_record(number, id).await;
        }
        let writer = self.writer.lock().await;
        self.map.check(&writer)?;
        self.has_record(number, id).await
    }

    /// Like [`Metadata::is_named`], but without waiting for commits.
    pub(crate) async fn has_record(&self, number: SegmentNumber, id: SegmentId) -> Result<bool> {
        Ok(self.map.find_segment(number.0).await?.is_some_and(|record| record.info.id == id))
    }

    /// Implements [`crate::Tier::is_dropping`].
    pub(crate) fn is_dropping(&self, is_one: impl Fn(VolumeId) -> bool) -> bool {
        // Read the layers first: a layer that releases its source queues the source for pruning
        // before its own record changes.
        let layers = self.map.layers();
        let others =
            layers.iter().map(|(layer, _)| layer.volume()).filter(|volume| !is_one(*volume));
        let needed = layers.needed_by(&others.collect(), false);
        // The layer is not yet retired or forgotten, so pages of its source are kept for it.
        let is_based = |(layer, record): (LayerId, &LayerRecord)| {
            record.base.is_some() && is_one(layer.volume()) && !needed.contains(&layer)
        };
        if layers.iter().any(is_based) {
            return true;
        }
        let (ranges, to_prune) = (self.map.ranges(), self.map.layers_to_prune());
        let mut layers = ranges.iter().map(|(layer, _)| layer).chain(to_prune);
        layers.any(|layer| is_one(layer.volume()))
    }
}
