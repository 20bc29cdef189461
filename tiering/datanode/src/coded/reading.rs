//! Reads of segments in fragments.

use super::image::{CodedImage, failed, failed_by};
use super::{CodedSegments, PATTERNS_MAX, unknown_store};
use crate::fragment_store::FragmentName;
use crate::seeded_bugs::seeded_bugs;
use bytes::Bytes;
use erasure::fragment::{Checksums, FragmentHeader, HEADER_BYTES};
use erasure::{CodecId, Cuts, Pattern, Scheme, codec};
use futures::StreamExt;
use futures::future::try_join_all;
use futures::stream::FuturesUnordered;
use object_store::{Error, Result};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tiering::segment::{Fragments, Placement, SegmentName, StoredSegment};

/// A segment in fragments, of a scheme that this version knows.
pub(super) struct Coded {
    name: SegmentName,
    scheme: Scheme,
    cuts: Cuts,
    fragments: Arc<Fragments>,
}

impl Coded {
    /// `None` for a segment that is an object.
    ///
    /// # Errors
    /// `NotImplemented` for a scheme or codec of a later version.
    pub(super) fn of(segment: &StoredSegment) -> Result<Option<Coded>> {
        Coded::of_placement(&segment.info.name(), &segment.placement)
    }

    /// Like [`Coded::of`].
    pub(super) fn of_placement(name: &SegmentName, placement: &Placement) -> Result<Option<Coded>> {
        let Placement::Fragments(fragments) = placement else { return Ok(None) };
        let known = || {
            let scheme = Scheme::new(fragments.data, fragments.parity)?;
            let is_known = CodecId::from_number(fragments.codec) == Some(scheme.codec())
                && fragments.stores.len() == scheme.fragments();
            let cuts = Cuts::from_ends(scheme, &fragments.ends).filter(|_| is_known)?;
            Some(Coded { name: *name, scheme, cuts, fragments: Arc::clone(fragments) })
        };
        let later = || Error::NotImplemented {
            operation: "read the fragments of a later version".to_owned(),
            implementer: "this version of spindle".to_owned(),
        };
        known().map(Some).ok_or_else(later)
    }

    fn fragment(&self, index: usize) -> FragmentName {
        let index = u8::try_from(index).expect("a scheme has few fragments");
        FragmentName { segment: self.name, generation: self.fragments.generation, index }
    }

    fn payload_bytes(&self, index: usize) -> usize {
        codec::payload_bytes(self.scheme, &self.cuts, index)
    }

    fn not_found(&self) -> Error {
        let what = "too few of its fragments are left".into();
        Error::NotFound { path: self.name.object_path().to_string(), source: what }
    }
}

impl CodedSegments {
    /// Reads a range of the image. `is_verified`: bytes that a fragment's checksums do not confirm count as lost.
    pub(super) async fn read_range(
        &self,
        coded: &Coded,
        range: Range<u64>,
        is_verified: bool,
    ) -> Result<Bytes> {
        let at = |at: u64| u32::try_from(at).map_err(|_| failed("a range is beyond any segment"));
        let range = at(range.start)?..at(range.end)?.min(coded.cuts.image_bytes());
        if coded.scheme.codec() == CodecId::Whole {
            return self
                .read_copy(coded, range.start as usize..range.end as usize, is_verified)
                .await;
        }
        // Frames beside each other are read at once, and may be in two pieces.
        let mut parts = Vec::new();
        for index in 0..coded.scheme.data() {
            let piece = coded.cuts.piece(index);
            let part = range.start.max(piece.start)..range.end.min(piece.end);
            if part.start < part.end {
                let within = (part.start - piece.start) as usize..(part.end - piece.start) as usize;
                parts.push(self.read_piece(coded, index, within, is_verified));
            }
        }
        let mut parts = try_join_all(parts).await?;
        Ok(match parts.len() {
            1 => parts.remove(0),
            _ => parts.concat().into(),
        })
    }

    async fn read_piece(
        &self,
        coded: &Coded,
        index: usize,
        range: Range<usize>,
        is_verified: bool,
    ) -> Result<Bytes> {
        let lost = match self.read_fragment(coded, index, range.clone(), is_verified).await {
            Ok(bytes) => return Ok(bytes),
            Err(lost) => lost,
        };
        self.counters.degraded_reads.fetch_add(1, Ordering::Relaxed);
        let units = Pattern::units_of(&range);
        let others = (0..coded.scheme.fragments()).filter(|other| *other != index);
        let read = self.read_enough(coded, others, &units, is_verified, lost).await?;
        let sources: Vec<usize> = read.iter().map(|(source, _)| *source).collect();
        let pattern = self.pattern(coded.scheme, index, sources)?;
        let ranges: Vec<&[u8]> = read.iter().map(|(_, bytes)| bytes.as_ref()).collect();
        let decoded = Bytes::from(pattern.decode(&ranges, units.len()).map_err(failed_by)?);
        Ok(decoded.slice(range.start - units.start..range.end - units.start))
    }

    /// Reads a segment of which each fragment is a copy, from the first store that has it.
    async fn read_copy(
        &self,
        coded: &Coded,
        range: Range<usize>,
        is_verified: bool,
    ) -> Result<Bytes> {
        let mut lost = coded.not_found();
        for index in 0..coded.scheme.fragments() {
            match self.read_fragment(coded, index, range.clone(), is_verified).await {
                Ok(bytes) => {
                    let is_degraded = u64::from(index > 0);
                    self.counters.degraded_reads.fetch_add(is_degraded, Ordering::Relaxed);
                    return Ok(bytes);
                }
                Err(error) => lost = worse(lost, error),
            }
        }
        Err(lost)
    }

    /// Reads the same range of as many fragments as are needed, each up to its end, and returns them in
    /// order of their indexes. `lost` is the failure before.
    async fn read_enough(
        &self,
        coded: &Coded,
        mut others: impl Iterator<Item = usize>,
        range: &Range<usize>,
        is_verified: bool,
        mut lost: Error,
    ) -> Result<Vec<(usize, Bytes)>> {
        let read = |index: usize| async move {
            let len = coded.payload_bytes(index);
            let part = range.start.min(len)..range.end.min(len);
            match part.is_empty() {
                true => (index, Ok(Bytes::new())),
                false => (index, self.read_fragment(coded, index, part, is_verified).await),
            }
        };
        let mut reading: FuturesUnordered<_> =
            others.by_ref().take(coded.scheme.data()).map(read).collect();
        let mut found = Vec::new();
        while let Some((index, bytes)) = reading.next().await {
            match bytes {
                Ok(bytes) => found.push((index, bytes)),
                Err(error) => {
                    lost = worse(lost, error);
                    match others.next() {
                        Some(another) => reading.push(read(another)),
                        None => return Err(lost),
                    }
                }
            }
        }
        if found.len() < coded.scheme.data() {
            return Err(lost);
        }
        found.sort_unstable_by_key(|(index, _)| *index);
        Ok(found)
    }

    /// Reads a range of the payload of a fragment: all of it, or it fails.
    async fn read_fragment(
        &self,
        coded: &Coded,
        index: usize,
        range: Range<usize>,
        is_verified: bool,
    ) -> Result<Bytes> {
        let id = coded.fragments.stores[index];
        if id == Fragments::NOWHERE {
            return Err(coded.not_found());
        }
        let member = self.member(id).ok_or_else(|| unknown_store(id))?;
        let name = coded.fragment(index);
        let stored = |range: &Range<usize>| {
            (HEADER_BYTES + range.start) as u64..(HEADER_BYTES + range.end) as u64
        };
        if !is_verified {
            self.counters.reads.fetch_add(1, Ordering::Relaxed);
            let bytes = member.store.read(&name, stored(&range)).await?;
            return match bytes.len() == range.len() {
                true => Ok(bytes),
                false => Err(failed("a transfer ended early")),
            };
        }
        // The whole fragment: this is rare, and its header, checksums and payload are needed.
        self.counters.reads.fetch_add(1, Ordering::Relaxed);
        let whole = member.store.read_whole(&name).await?;
        let header = self.verified_header(coded, index, &whole)?;
        let trailer = whole.get(header.directory_range().start..).unwrap_or_default();
        let checksums = header.checksums(trailer).map_err(failed_by)?;
        let checked = Checksums::checked(&range, header.payload_bytes());
        let bytes = whole.slice(header.range_of(&checked));
        match checksums.verify(checked.start, &bytes) {
            true => Ok(bytes.slice(range.start - checked.start..range.end - checked.start)),
            false => Err(failed("the checksum of a fragment differs")),
        }
    }

    fn verified_header(
        &self,
        coded: &Coded,
        index: usize,
        whole: &Bytes,
    ) -> Result<FragmentHeader> {
        let header = FragmentHeader::decode(whole).map_err(failed_by)?;
        let place = u8::try_from(index).expect("a scheme has few fragments");
        let owner = self.owner(&coded.name);
        let is_it = header.is_of(&owner, place, coded.fragments.generation)
            && (header.scheme, &header.cuts) == (coded.scheme, &coded.cuts);
        match (is_it || seeded_bugs().header_unchecked) && whole.len() == header.fragment_bytes() {
            true => Ok(header),
            false => Err(failed("a fragment is another one")),
        }
    }

    /// Reads the whole image: the data fragments, or any others that are enough.
    pub(super) async fn read_image(&self, coded: &Coded) -> Result<Bytes> {
        let whole = 0..u64::from(coded.cuts.image_bytes());
        self.read_range(coded, whole, false).await
    }

    /// Writes the fragments of a placement again that are not as they should be.
    pub(super) async fn write_again(&self, coded: &Coded, object: Bytes) -> Result<()> {
        let (scheme, cuts, generation) =
            (coded.scheme, coded.cuts.clone(), coded.fragments.generation);
        let owner = self.owner(&coded.name);
        let coding = tokio::task::spawn_blocking(move || {
            CodedImage::with_cuts(scheme, cuts, generation, owner, &object)
        });
        let image = coding.await.map_err(|cause| Error::JoinError { source: cause })??;
        for (index, fragment) in image.fragments.iter().enumerate() {
            let Some(member) = self.member(coded.fragments.stores[index]) else { continue };
            let (name, parts) = (coded.fragment(index), fragment.parts());
            match member.store.put(&name, parts.clone()).await {
                Err(Error::AlreadyExists { .. }) => {
                    member.store.delete(&name).await?;
                    member.store.put(&name, parts).await?;
                }
                put => put?,
            }
        }
        Ok(())
    }

    /// The length of the image, if enough fragments are there with their lengths.
    pub(super) async fn size_of(&self, coded: &Coded) -> Result<u64> {
        let mut lost = coded.not_found();
        let mut count = 0;
        for (index, id) in coded.fragments.stores.iter().enumerate() {
            let Some(member) = self.member(*id) else { continue };
            match member.store.size(&coded.fragment(index)).await {
                Ok(_) => count += 1,
                Err(error) => lost = worse(lost, error),
            }
        }
        match count >= coded.scheme.data() {
            true => Ok(u64::from(coded.cuts.image_bytes())),
            false => Err(lost),
        }
    }

    fn pattern(&self, scheme: Scheme, lost: usize, sources: Vec<usize>) -> Result<Arc<Pattern>> {
        let key = (scheme, lost, sources);
        if let Some(pattern) = self.patterns.lock().get(&key) {
            return Ok(Arc::clone(pattern));
        }
        let pattern = Arc::new(Pattern::new(scheme, lost, &key.2).map_err(failed_by)?);
        let mut patterns = self.patterns.lock();
        if patterns.len() >= PATTERNS_MAX {
            patterns.clear(); // the stores have changed, or many are lost
        }
        patterns.insert(key, Arc::clone(&pattern));
        Ok(pattern)
    }
}

/// Of two failures, the one that says less about the segment: one that is not stored may only be claimed if
/// every store that answers says so.
fn worse(one: Error, other: Error) -> Error {
    match one {
        Error::NotFound { .. } => other,
        one => one,
    }
}
