//! Storage of segments: the seam between the data tier, which says which segment and where it is,
//! and the stores that hold the bytes.
//!
//! Invariants:
//! - The bytes of a segment never change. A store may move them; the map then records another
//!   [`Placement`], and readers may use an earlier one for a while.
//! - A store returns bytes unverified. The caller verifies them.
//! - Errors are those of the object store, because callers classify them: `NotFound` means that the
//!   segment is not stored, and any other error may concern the store as a whole.
//!
//! The trait does not retry, limit or time out requests; [`crate::fetch`] and the jobs do.
//!
//! [`ObjectSegments`] stores a segment as one object. A store of fragments (`k + m` pieces on other stores) needs more than is used today: a
//! policy for [`SegmentStore::put`], the [`Access`](crate::fetch::Access) of a reader and the
//! fragments to avoid for [`SegmentStore::read`], an outcome for each fragment, and a repair from
//! the fragments that are left. Its [`SegmentStore::replace`] and [`SegmentStore::restore`] return a
//! placement that differs from the recorded one, which their callers then commit to the map.

use crate::create::create;
use crate::listing::{first, list_at_most};
use crate::segment::{FOLDER, Placement, SealedSegment, SegmentInfo, SegmentName, StoredSegment};
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, Result};
use std::ops::Range;
use std::sync::Arc;

/// A stored object among the segments.
#[derive(Clone, Debug)]
pub enum Listed {
    /// A segment, or what an unfinished upload left of it.
    Segment {
        /// The name.
        name: SegmentName,
        /// Where the listing found it.
        placement: Placement,
        /// Bytes stored.
        bytes: u64,
    },
    /// An object whose name is not that of a segment.
    Foreign,
}

/// A segment that the map does not reference, or no longer.
#[derive(Clone, Debug)]
pub struct Leftover {
    /// The name.
    pub name: SegmentName,
    /// Its placement; `None` if its upload did not end.
    pub placement: Option<Placement>,
}

impl From<&StoredSegment> for Leftover {
    fn from(segment: &StoredSegment) -> Leftover {
        Leftover { name: segment.info.name(), placement: Some(segment.placement.clone()) }
    }
}

/// A store of segments; see the module. Any method may be called from any task at any time.
#[async_trait::async_trait]
pub trait SegmentStore: std::fmt::Debug + Send + Sync {
    /// Writes a new segment, in one attempt. It succeeds if the same bytes are stored already: the
    /// answer to an earlier attempt may have been lost.
    ///
    /// # Errors
    /// `AlreadyExists` if other bytes were read back under its name.
    async fn put(&self, segment: &SealedSegment) -> Result<Placement>;

    /// Writes the bytes of a segment that a copy of the pool has, unless the store has the segment.
    async fn restore(&self, info: &SegmentInfo, object: Bytes) -> Result<Placement>;

    /// Writes the bytes of a segment over what is stored of it.
    async fn replace(&self, segment: &StoredSegment, object: Bytes) -> Result<Placement>;

    /// Reads a range of the segment's bytes. The result may be shorter if a transfer ends early.
    async fn read(&self, segment: &StoredSegment, range: Range<u64>) -> Result<Bytes>;

    /// Reads everything that is stored, whatever its size.
    async fn read_whole(&self, segment: &StoredSegment) -> Result<Bytes>;

    /// Returns the size of the segment in bytes, without reading it.
    async fn size(&self, segment: &Leftover) -> Result<u64>;

    /// Deletes everything that is stored of a segment. It succeeds if nothing is.
    async fn delete(&self, segment: &Leftover) -> Result<()>;

    /// Lists everything that is stored. The listing ends with an error beyond `count_max` objects;
    /// see [`crate::listing`].
    fn list(&self, count_max: u64) -> BoxStream<'static, Result<Listed>>;

    /// Returns whether anything is stored. The answer is no once `look_count` listings agree.
    async fn has_any(&self, look_count: u32) -> Result<bool>;
}

/// Segments as objects of an object store; see [`SegmentName::object_path`]. It is cheap to clone.
#[derive(Clone, Debug)]
pub struct ObjectSegments(Arc<dyn ObjectStore>);

impl ObjectSegments {
    /// Creates the store of the segments in `store`, which has the prefix of the pool or copy.
    #[must_use]
    pub fn new(store: Arc<dyn ObjectStore>) -> ObjectSegments {
        ObjectSegments(store)
    }
}

#[async_trait::async_trait]
impl SegmentStore for ObjectSegments {
    async fn put(&self, segment: &SealedSegment) -> Result<Placement> {
        let path = segment.info.object_path();
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let payload = PutPayload::from_bytes(segment.bytes.clone());
        match self.0.put_opts(&path, payload, options).await {
            Ok(_) => Ok(Placement::Object),
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => {
                let found = self.0.get(&path).await?.bytes().await?;
                if found == segment.bytes {
                    return Ok(Placement::Object);
                }
                let source = "other bytes were read back".into();
                Err(Error::AlreadyExists { path: path.to_string(), source })
            }
            Err(failed) => Err(failed),
        }
    }

    async fn restore(&self, info: &SegmentInfo, object: Bytes) -> Result<Placement> {
        create(&*self.0, &info.object_path(), &object).await.map(|_| Placement::Object)
    }

    async fn replace(&self, segment: &StoredSegment, object: Bytes) -> Result<Placement> {
        let put = self.0.put(&segment.info.object_path(), object.into()).await;
        put.map(|_| Placement::Object)
    }

    async fn read(&self, segment: &StoredSegment, range: Range<u64>) -> Result<Bytes> {
        self.0.get_range(&segment.info.object_path(), range).await
    }

    async fn read_whole(&self, segment: &StoredSegment) -> Result<Bytes> {
        self.0.get(&segment.info.object_path()).await?.bytes().await
    }

    async fn size(&self, segment: &Leftover) -> Result<u64> {
        self.0.head(&segment.name.object_path()).await.map(|found| found.size)
    }

    async fn delete(&self, segment: &Leftover) -> Result<()> {
        match self.0.delete(&segment.name.object_path()).await {
            Err(Error::NotFound { .. }) => Ok(()),
            other => other,
        }
    }

    fn list(&self, count_max: u64) -> BoxStream<'static, Result<Listed>> {
        let listing = list_at_most(&*self.0, Some(&Path::from(FOLDER)), count_max);
        let listed = listing.map(|found| {
            let found = found?;
            Ok(match SegmentName::parse(&found.location) {
                Some(name) => {
                    Listed::Segment { name, placement: Placement::Object, bytes: found.size }
                }
                None => Listed::Foreign,
            })
        });
        listed.boxed()
    }

    async fn has_any(&self, look_count: u32) -> Result<bool> {
        let folder = Path::from(FOLDER);
        first(&*self.0, Some(&folder), look_count).await.map(|found| found.is_some())
    }
}
