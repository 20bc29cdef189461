//! Questions that a reader of objects asks about other objects, answered by the map of the pool or
//! by the list of a copy.

use crate::segment::{SegmentId, SegmentInfo, StoredSegment};
use object_store::ObjectStore;
use object_store::path::Path;
use std::collections::HashSet;
use std::sync::Arc;

/// An object that exists as far as is known.
#[derive(Debug)]
pub(crate) enum Peer {
    /// A segment of the same store.
    Segment(StoredSegment),
    /// An object that is not a segment, of a store that is reached in the same way.
    Object(Arc<dyn ObjectStore>, Path),
}

/// Knows whether an object is wanted, and which others exist.
#[async_trait::async_trait]
pub(crate) trait Peers: std::fmt::Debug + Send + Sync {
    /// Returns whether the segment is still referenced. An unreferenced segment may be gone and is
    /// not waited for. Returns true if this cannot be determined.
    async fn is_named(&self, info: &SegmentInfo) -> bool;

    /// Returns another object. Successive calls return different objects where there are several.
    /// `suspects` are the segments whose last read failed; other segments are preferred.
    async fn another(&self, info: &SegmentInfo, suspects: &HashSet<SegmentId>) -> Option<Peer>;
}
