//! What a reader of objects asks those who know the others: the map of the pool, or the list of a copy.

use crate::segment::{SegmentId, SegmentInfo};
use object_store::path::Path;
use std::collections::HashSet;

/// Whether an object is wanted, and which others there are.
#[async_trait::async_trait]
pub(crate) trait Peers: std::fmt::Debug + Send + Sync {
    /// Whether the segment is still named. One that is not may be gone, and is not waited for. True where that cannot be
    /// found out.
    async fn is_named(&self, info: &SegmentInfo) -> bool;

    /// Another object of the same store, which is there as far as is known, a different one each time where there are
    /// several; with what it is, if it is a segment. `suspects` are the segments whose last read failed: others come first.
    async fn another(
        &self,
        info: &SegmentInfo,
        suspects: &HashSet<SegmentId>,
    ) -> Option<(Path, Option<SegmentInfo>)>;
}
