//! Finds objects that the map references, to compare with an object that cannot be read.

use super::Inner;
use crate::fetch::peers::{Peer, Peers};
use crate::map::database;
use crate::segment::{SegmentId, SegmentInfo, StoredSegment};
use block::Result;
use std::collections::HashSet;
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum number of segments that are examined to find such an object. Chosen by hand.
const LOOK: usize = 16;

/// Peers from the map; see the module.
pub(super) struct MapPeers {
    inner: Weak<Inner>,
    /// Number of the segment that was returned last.
    last: AtomicU64,
}

impl std::fmt::Debug for MapPeers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MapPeers")
    }
}

impl MapPeers {
    pub(super) fn new(inner: Weak<Inner>) -> MapPeers {
        MapPeers { inner, last: AtomicU64::new(0) }
    }
}

#[async_trait::async_trait]
impl Peers for MapPeers {
    async fn is_named(&self, info: &SegmentInfo) -> bool {
        match self.inner.upgrade() {
            Some(inner) => inner.is_wanted(info).await,
            None => false,
        }
    }

    async fn another(&self, info: &SegmentInfo, suspects: &HashSet<SegmentId>) -> Option<Peer> {
        let inner = self.inner.upgrade()?;
        // While a copy is behind the store, a readable segment proves nothing about the store
        // itself, because it may come from the copy.
        let is_behind = inner.options.restored.as_ref().is_some_and(|store| !store.is_whole());
        if !is_behind {
            let last = self.last.load(Ordering::Relaxed);
            let mut others = inner.other_segments(last, info).await.ok()?;
            others.extend(inner.other_segments(0, info).await.ok()?);
            let known = others.iter().find(|other| !suspects.contains(&other.info.id));
            if let Some(other) = known.or(others.first()) {
                self.last.store(other.info.number.0, Ordering::Relaxed);
                return Some(Peer::Segment(other.clone()));
            }
        }
        let manifest = database::manifest_path(inner.map.db().objects().manifest);
        Some(Peer::Object(inner.store.clone(), manifest))
    }
}

impl Inner {
    /// Returns whether the map references a segment that is not missing on purpose.
    pub(crate) async fn is_wanted(&self, info: &SegmentInfo) -> bool {
        match self.map.find_segment(info.number.0).await {
            Ok(Some(record)) if record.is_of(info) => !self.may_be_missing(info.number.0).await,
            Ok(_) => false,
            // The answer is unknown; assume it is wanted.
            Err(_) => true,
        }
    }

    /// Returns some segments numbered above `after` that should exist in the store.
    async fn other_segments(&self, after: u64, info: &SegmentInfo) -> Result<Vec<StoredSegment>> {
        let (found, _) = self.map.live_after(after, LOOK).await?;
        let others = found.into_iter().map(|(record, _)| record.stored());
        let is_other = |StoredSegment { info: other, .. }: &StoredSegment| {
            other.id != info.id && !self.may_be_left_out(other.number.0)
        };
        Ok(others.filter(is_other).collect())
    }
}
