//! The stored data of the pool: its segments, the reader of their frames, and what is left over.

use super::read_times::ReadTimes;
use crate::fetch::Frames;
use crate::heat::Heat;
use crate::leftovers::Leftovers;
use crate::segment_store::SegmentStore;
use std::sync::Arc;

/// The segments; see the module.
pub(crate) struct Segments {
    pub store: Arc<dyn SegmentStore>,
    /// The reader, with its caches.
    pub frames: Frames,
    /// Segments that wait to be deleted.
    pub leftovers: Leftovers,
    /// Read counts.
    pub heat: Heat,
    /// When each segment was last read.
    pub read_times: ReadTimes,
}
