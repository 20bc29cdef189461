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
//! A store refuses to know the map, volumes, keys and the contents of segments: it moves sealed bytes by
//! name and placement. It does not retry, limit or time out requests; [`crate::fetch`] and the jobs do.
//!
//! [`ObjectSegments`] stores a segment as one object. A store of fragments (`k + m` pieces on other
//! stores) needs more than is used today: a policy for [`SegmentStore::put`], the [`Access`](crate::fetch::Access) of a reader and the
//! fragments to avoid for [`SegmentStore::read`], an outcome for each fragment, and a repair from
//! the fragments that are left. Its [`SegmentStore::replace`] and [`SegmentStore::restore`] return a
//! placement that differs from the recorded one, which their callers then commit to the map.

use crate::create::create;
use crate::listing::{first, list_at_most};
use crate::segment::{
    FOLDER, FragmentPlace, Placement, SealedSegment, SegmentInfo, SegmentName, SegmentNumber,
    StoredSegment,
};
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
        /// Where the listing found it; `None` for parts from which a store does not tell.
        placement: Option<Placement>,
        /// Bytes stored.
        bytes: u64,
    },
    /// An object whose name is not that of a segment.
    Foreign,
}

/// In place of a number of losses: of all data stores, because the object store has the segment, too.
pub const ANY_LOSS: u8 = u8::MAX;

/// How a segment would survive losses, from what its store knows without asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RedundancyOf {
    /// The number of further stores that may be lost, at worst, without losing the segment; [`ANY_LOSS`]: all of them.
    /// `None`: it cannot be read now.
    pub spare: Option<u8>,
    /// It lacks fragments, or has some on stores that leave.
    pub is_lacking: bool,
}

/// How thoroughly [`SegmentStore::rebuild`] looks for what a segment lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// Fragments that are there count as whole, except those from which others are made.
    Presence,
    /// Every fragment is verified: by its store, or else read.
    Checksums,
}

/// The outcome of [`SegmentStore::rebuild`].
#[derive(Clone, Debug, Default)]
pub struct Rebuilt {
    /// The new placement, whose fragments are durable, to be committed; absent if nothing has changed.
    pub placement: Option<Placement>,
    /// Fragments rebuilt.
    pub fragment_count: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Some are still lacking: no store was left for them.
    pub is_lacking: bool,
    /// Nothing was found lacking, but not every store said whether it has its fragment.
    pub is_unsure: bool,
}

/// Fragments of a segment that are not where they would be if it were written now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Misplaced {
    /// Those that [`SegmentStore::rebalance`] would move now.
    pub fragment_count: usize,
    /// Those that wait for a store that fails, and is not lost yet.
    pub waiting_count: usize,
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

/// A fragment where it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StoredFragment {
    /// The segment.
    pub segment: SegmentName,
    /// Its index among the fragments of the segment.
    pub index: u8,
    /// Its store and generation.
    pub place: FragmentPlace,
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

    /// Reads a range of the segment's bytes that did not verify before: from elsewhere, if the store has
    /// them elsewhere.
    async fn read_again(&self, segment: &StoredSegment, range: Range<u64>) -> Result<Bytes> {
        self.read(segment, range).await
    }

    /// Reads everything that is stored, whatever its size.
    async fn read_whole(&self, segment: &StoredSegment) -> Result<Bytes>;

    /// Tells how a segment would survive losses; `None` if the store has no redundancy of its own.
    fn redundancy(&self, _: &StoredSegment) -> Option<RedundancyOf> {
        None
    }

    /// Whether a segment in fragments has too few of them on stores that are not lost, whatever the others may still have.
    fn is_lost(&self, _: &StoredSegment) -> bool {
        false
    }

    /// Whether a segment is an object of the object store, whatever its placement names.
    fn is_object(&self, _: &StoredSegment) -> bool {
        true
    }

    /// Makes anew what a segment lacks, from what is left of it and verifies. Nothing is deleted or overwritten.
    ///
    /// # Errors
    /// Those of a store, if too little of the segment can be had: `NotFound` if what is left is too little and all stores
    /// that have some of it answer.
    async fn rebuild(&self, _: &StoredSegment, _: Depth) -> Result<Rebuilt> {
        Ok(Rebuilt::default())
    }

    /// Counts the fragments that are not where they would be if the segment were written now, without asking a store.
    fn misplaced(&self, _: &StoredSegment) -> Misplaced {
        Misplaced::default()
    }

    /// Moves fragments to where they would be if the segment were written now. Nothing is deleted or overwritten.
    ///
    /// # Errors
    /// Those of a store, if too little of the segment can be had, or no fragment could be written.
    async fn rebalance(&self, _: &StoredSegment) -> Result<Rebuilt> {
        Ok(Rebuilt::default())
    }

    /// Reads the whole segment from its fragments alone, which are verified by their checksums.
    ///
    /// # Errors
    /// Those of a store, if too little of the segment can be had; `NotImplemented` if it is not in fragments.
    async fn read_fragments(&self, _: &StoredSegment) -> Result<Bytes> {
        Err(no_fragments())
    }

    /// Reads the whole object of a segment, which may be in fragments, too.
    async fn read_object(&self, segment: &StoredSegment) -> Result<Bytes> {
        self.read_whole(segment).await
    }

    /// Writes the object of a segment, over other bytes that may be there. Its fragments stay as they are.
    async fn put_object(&self, info: &SegmentInfo, object: Bytes) -> Result<()> {
        self.replace(&StoredSegment::from(*info), object).await.map(drop)
    }

    /// Writes all fragments of a segment anew, of which the object store has the object. `generation` is above that of
    /// every fragment of the segment that was ever written from other cuts.
    ///
    /// # Errors
    /// Those of a store, if too few of them take a fragment; `NotImplemented` without stores of fragments.
    async fn put_fragments(
        &self,
        _: &SegmentInfo,
        _object: Bytes,
        _generation: u64,
    ) -> Result<Placement> {
        Err(no_fragments())
    }

    /// Lists the fragments that one of the stores has, by its number, and ends with an error if that does not answer. Without
    /// a number, lists those of all stores that answer.
    fn list_fragments(&self, _store: Option<u32>) -> BoxStream<'static, Result<StoredFragment>> {
        futures::stream::empty().boxed()
    }

    /// Deletes a fragment, which no placement may name. It succeeds if there is none.
    async fn delete_fragment(&self, _: &StoredFragment) -> Result<()> {
        Ok(())
    }

    /// From now on, a segment in fragments may be an object, too, even if its placement does not say so: the commit
    /// that says so may have been lost.
    fn expect_objects(&self) {}

    /// The segments of which something is stored that no placement may name: it arrived after others had taken its place.
    fn strays(&self) -> Vec<SegmentNumber> {
        Vec::new()
    }

    /// Deletes what is stored of a segment beside its placement, which is the one that the map has now.
    async fn delete_strays(&self, _: &StoredSegment) -> Result<()> {
        Ok(())
    }

    /// Deletes what a segment has at its placement and not at the one that is `kept`.
    async fn delete_moved(&self, _: &StoredSegment, _kept: &Placement) -> Result<()> {
        Ok(())
    }

    /// Returns the size of a segment in bytes, without reading it. The placement is `None` if its
    /// upload did not end.
    async fn size(&self, name: &SegmentName, placement: Option<&Placement>) -> Result<u64>;

    /// Deletes everything that is stored of a segment. It succeeds if nothing is.
    async fn delete(&self, segment: &Leftover) -> Result<()>;

    /// Lists everything that is stored. The listing ends with an error beyond `count_max` objects;
    /// see [`crate::listing`].
    fn list(&self, count_max: u64) -> BoxStream<'static, Result<Listed>>;

    /// Returns whether anything is stored. The answer is no once `look_count` listings agree.
    async fn has_any(&self, look_count: u32) -> Result<bool>;
}

/// The error of a store without fragments.
fn no_fragments() -> Error {
    Error::NotImplemented {
        operation: "use the fragments of a segment".to_owned(),
        implementer: "a store of objects".to_owned(),
    }
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

    async fn size(&self, name: &SegmentName, _: Option<&Placement>) -> Result<u64> {
        self.0.head(&name.object_path()).await.map(|found| found.size)
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
                    Listed::Segment { name, placement: Some(Placement::Object), bytes: found.size }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::KeyId;
    use crate::segment::SegmentNumber;
    use block::Epoch;
    use futures::TryStreamExt;
    use object_store::memory::InMemory;

    fn segment(number: u64, bytes: &'static [u8]) -> SealedSegment {
        let info = SegmentInfo {
            number: SegmentNumber(number),
            epoch: Epoch(3),
            id: [7; 16],
            algorithm: block::seal::Algorithm::default(),
            key: KeyId::POOL,
            object_bytes: bytes.len() as u32,
            frame_count: 1,
        };
        SealedSegment { info, bytes: Bytes::from_static(bytes) }
    }

    #[tokio::test]
    async fn put_repeats_itself_and_never_overwrites_other_bytes() {
        let segments = ObjectSegments::new(Arc::new(InMemory::new()));
        assert!(!segments.has_any(1).await.unwrap());
        let one = segment(1, b"segment");
        segments.put(&one).await.unwrap();
        segments.put(&one).await.unwrap();
        let other = SealedSegment { bytes: Bytes::from_static(b"another"), ..one.clone() };
        let refused = segments.put(&other).await.unwrap_err();
        assert!(matches!(refused, Error::AlreadyExists { .. }), "{refused}");
        segments.restore(&one.info, other.bytes.clone()).await.unwrap();
        let stored = StoredSegment::from(one.info);
        assert_eq!(segments.read_whole(&stored).await.unwrap(), one.bytes);
        segments.replace(&stored, other.bytes.clone()).await.unwrap();
        assert_eq!(segments.read(&stored, 1..4).await.unwrap(), other.bytes.slice(1..4));
        assert_eq!(segments.size(&one.info.name(), None).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn listing_distinguishes_segments_and_deletion_is_repeatable() {
        let store = Arc::new(InMemory::new());
        let segments = ObjectSegments::new(store.clone());
        let one = segment(1, b"segment");
        segments.put(&one).await.unwrap();
        store.put(&Path::from("segments/notes"), "kept".into()).await.unwrap();
        let listed: Vec<Listed> = segments.list(9).try_collect().await.unwrap();
        let is_one = |listed: &&Listed| matches!(listed, Listed::Segment { name, bytes: 7, .. } if *name == one.info.name());
        assert_eq!((listed.len(), listed.iter().filter(is_one).count()), (2, 1));
        let leftover = Leftover { name: one.info.name(), placement: None };
        segments.delete(&leftover).await.unwrap();
        segments.delete(&leftover).await.unwrap();
        let gone = segments.size(&leftover.name, None).await.unwrap_err();
        assert!(matches!(gone, Error::NotFound { .. }), "{gone}");
        assert_eq!(segments.list(9).count().await, 1);
    }
}
