//! Segments that are objects, too, or are to be.
//!
//! Invariants:
//! - The object of a segment is asked only if too few of its fragments can be had. What it has is verified by the caller,
//!   like every other answer.
//! - Fragments are written beside an object, never in its place.

use super::health::Way;
use super::image::CodedImage;
use super::reading::Coded;
use super::{CodedSegments, unknown_store};
use crate::fragment_store::{FragmentName, ListedFragment};
use crate::seeded_bugs::seeded_bugs;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::{Error, Result};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tiering::listing::OBJECT_COUNT_MAX;
use tiering::segment::{
    FragmentPlace, Fragments, Placement, SealedSegment, SegmentInfo, StoredSegment,
};
use tiering::segment_store::{SegmentStore, StoredFragment};

impl CodedSegments {
    /// Whether the fragments are to be dropped: nothing is rebuilt of them.
    pub(super) fn is_leaving_tier(&self, fragments: &Fragments) -> bool {
        self.is_emptying && fragments.is_copied
    }

    /// Reads a range of the image from fragments, or from the object if there may be one.
    pub(super) async fn read_either(
        &self,
        segment: &StoredSegment,
        coded: &Coded,
        range: Range<u64>,
        is_verified: bool,
    ) -> Result<Bytes> {
        let is_copied = coded.fragments.is_copied;
        // Stores that fail are not waited for: the object is there.
        if is_copied && self.is_short(coded) {
            match self.read_from_object(segment, range.clone()).await {
                Ok(bytes) => return Ok(bytes),
                Err(error) => tracing::debug!(
                    segment = %coded.name,
                    %error,
                    "could not read the object of a segment whose data stores fail"
                ),
            }
        }
        let lost = match self.read_range(coded, range.clone(), is_verified).await {
            Err(lost) if is_copied || self.may_be_both.load(Ordering::Relaxed) => lost,
            read => return read,
        };
        match self.read_from_object(segment, range).await {
            Ok(bytes) => Ok(bytes),
            // One whose placement does not name an object need not have one.
            Err(Error::NotFound { .. }) if !is_copied => Err(lost),
            // Both have to be gone for the segment to be gone.
            Err(error @ Error::NotFound { .. }) => match lost {
                Error::NotFound { .. } => Err(error),
                lost => Err(lost),
            },
            Err(error) => Err(error),
        }
    }

    async fn read_from_object(&self, segment: &StoredSegment, range: Range<u64>) -> Result<Bytes> {
        let read = self.objects.read(segment, range).await?;
        self.counters.object_reads.fetch_add(1, Ordering::Relaxed);
        Ok(read)
    }

    /// Whether too few of the stores that have fragments of a segment answer.
    fn is_short(&self, coded: &Coded) -> bool {
        let answers =
            |id: &u32| self.member(*id).is_some_and(|member| member.health().is_due(Way::Read));
        coded.fragments.stores().filter(answers).count() < coded.scheme.data()
    }

    /// Implements [`SegmentStore::put_object`].
    pub(super) async fn put_as_object(&self, info: &SegmentInfo, object: Bytes) -> Result<()> {
        let sealed = SealedSegment { info: *info, bytes: object.clone() };
        match self.objects.put(&sealed).await {
            Err(Error::AlreadyExists { .. }) => {
                self.objects.replace(&StoredSegment::from(*info), object).await.map(drop)
            }
            put => put.map(drop),
        }
    }

    /// Implements [`SegmentStore::put_fragments`].
    pub(super) async fn put_beside_object(
        &self,
        info: &SegmentInfo,
        object: Bytes,
        generation: u64,
    ) -> Result<Placement> {
        let written = match seeded_bugs().fragments_unawaited {
            true => self.unawaited(info, object, generation)?,
            false => self.write(info, object, generation).await?,
        };
        Ok(Placement::Fragments(Arc::new(Fragments { is_copied: true, ..written })))
    }

    /// Implements [`SegmentStore::list_fragments`].
    pub(super) fn list_stored(
        &self,
        of: Option<u32>,
    ) -> BoxStream<'static, Result<StoredFragment>> {
        let members = match of {
            None => self.in_list(),
            Some(id) => match self.member(id) {
                Some(member) => vec![member],
                None => return futures::stream::iter([Err(unknown_store(id))]).boxed(),
            },
        };
        let listings = members.into_iter().map(move |member| {
            let store = member.id.0;
            let listing = member.list(None, OBJECT_COUNT_MAX).filter_map(move |listed| {
                std::future::ready(match listed {
                    Ok(ListedFragment::Fragment(name, _)) => {
                        let place = FragmentPlace { store, generation: name.generation };
                        let FragmentName { segment, index, .. } = name;
                        Some(Ok(StoredFragment { segment, index, place }))
                    }
                    Ok(ListedFragment::Foreign) => None,
                    Err(error) if of.is_some() => Some(Err(error)),
                    // What it has is found once it is back.
                    Err(error) => {
                        tracing::debug!(store, %error, "could not list a data store");
                        None
                    }
                })
            });
            listing.boxed()
        });
        futures::stream::iter(listings.collect::<Vec<_>>()).flatten().boxed()
    }

    /// The placement that the stores would have if they took all fragments; only a seeded bug needs it.
    fn unawaited(&self, info: &SegmentInfo, object: Bytes, generation: u64) -> Result<Fragments> {
        let owner = self.owner(&info.name());
        let image = CodedImage::new(self.scheme, generation, owner, &info.id, object)?;
        let free = self.candidates(&info.id, image.scheme.fragments());
        Ok(image.placement(free.iter().take(image.scheme.fragments()).map(|id| id.0).collect()))
    }
}
