//! Finds objects that the map references, to compare with an object that cannot be read.

use crate::copier::RestoredStore;
use crate::fetch::peers::{Peer, Peers};
use crate::map::database;
use crate::pool::Exclusions;
use crate::segment::{SegmentId, SegmentInfo, StoredSegment};
use block::Result;
use object_store::ObjectStore;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Maximum number of segments that are examined to find such an object. Chosen by hand.
const LOOK: usize = 16;

/// Peers from the map; see the module.
pub(super) struct MapPeers {
    exclusions: Weak<Exclusions>,
    /// The store of the metadata.
    objects: Arc<dyn ObjectStore>,
    restored: Option<Arc<RestoredStore>>,
    /// Number of the segment that was returned last.
    last: AtomicU64,
}

impl std::fmt::Debug for MapPeers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MapPeers")
    }
}

impl MapPeers {
    pub(super) fn new(
        exclusions: &Arc<Exclusions>,
        objects: Arc<dyn ObjectStore>,
        restored: Option<Arc<RestoredStore>>,
    ) -> MapPeers {
        let exclusions = Arc::downgrade(exclusions);
        MapPeers { exclusions, objects, restored, last: AtomicU64::new(0) }
    }
}

#[async_trait::async_trait]
impl Peers for MapPeers {
    async fn is_named(&self, info: &SegmentInfo) -> bool {
        match self.exclusions.upgrade() {
            Some(exclusions) => exclusions.is_wanted(info).await,
            None => false,
        }
    }

    async fn another(&self, info: &SegmentInfo, suspects: &HashSet<SegmentId>) -> Option<Peer> {
        let exclusions = self.exclusions.upgrade()?;
        // While a copy is behind the store, a readable segment proves nothing about the store
        // itself, because it may come from the copy.
        let is_behind = self.restored.as_ref().is_some_and(|store| !store.is_complete());
        if !is_behind {
            let last = self.last.load(Ordering::Relaxed);
            let mut others = other_segments(&exclusions, last, info).await.ok()?;
            others.extend(other_segments(&exclusions, 0, info).await.ok()?);
            let known = others.iter().find(|other| !suspects.contains(&other.info.id));
            if let Some(other) = known.or(others.first()) {
                self.last.store(other.info.number.0, Ordering::Relaxed);
                return Some(Peer::Segment(other.clone()));
            }
        }
        let manifest = database::manifest_path(exclusions.metadata.map.db().objects().manifest);
        Some(Peer::Object(self.objects.clone(), manifest))
    }
}

/// Returns some segments numbered above `after` that should exist in the store.
async fn other_segments(
    exclusions: &Exclusions,
    after: u64,
    info: &SegmentInfo,
) -> Result<Vec<StoredSegment>> {
    let (found, _) = exclusions.metadata.map.live_after(after, LOOK).await?;
    let others = found.into_iter().map(|(record, _)| record.stored());
    let is_other = |StoredSegment { info: other, .. }: &StoredSegment| {
        other.id != info.id && !exclusions.may_be_excluded(other.number.0)
    };
    Ok(others.filter(is_other).collect())
}
