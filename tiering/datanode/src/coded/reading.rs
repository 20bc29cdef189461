//! Reads of segments in fragments.

use super::health::{LATE_MIN, Way};
use super::image::{Source, failed, failed_by};
use super::member::Member;
use super::{CodedSegments, PATTERNS_MAX, unknown_store};
use crate::fragment_store::{Check, FragmentName};
use crate::seeded_bugs::seeded_bugs;
use bytes::Bytes;
use erasure::fragment::{Checksums, FragmentHeader, HEADER_BYTES};
use erasure::{CodecId, Cuts, Pattern, Scheme, codec};
use futures::StreamExt;
use futures::future::{Either, select, try_join_all};
use futures::stream::FuturesUnordered;
use object_store::{Error, Result};
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tiering::segment::{Fragments, Placement, SegmentName};

/// Bytes a second of a transfer that is not late. Chosen by hand: slow for a network of data nodes.
const RATE: u64 = 256 << 20;
/// Time after which a whole fragment is read another way, but for its bytes. Chosen by hand.
const WHOLE_PATIENCE: Duration = Duration::from_secs(1);

/// A segment in fragments, of a scheme that this version knows.
#[derive(Clone)]
pub(super) struct Coded {
    pub(super) name: SegmentName,
    pub(super) scheme: Scheme,
    pub(super) cuts: Cuts,
    pub(super) fragments: Arc<Fragments>,
}

impl Coded {
    /// `None` for a segment that is an object.
    ///
    /// # Errors
    /// `NotImplemented` for a scheme or codec of a later version.
    pub(super) fn of_placement(name: &SegmentName, placement: &Placement) -> Result<Option<Coded>> {
        let Placement::Fragments(fragments) = placement else { return Ok(None) };
        let known = || {
            let scheme = Scheme::new(fragments.data, fragments.parity)?;
            let is_known = CodecId::from_number(fragments.codec) == Some(scheme.codec())
                && fragments.places.len() == scheme.fragments();
            let cuts = Cuts::from_ends(scheme, &fragments.ends).filter(|_| is_known)?;
            Some(Coded { name: *name, scheme, cuts, fragments: Arc::clone(fragments) })
        };
        let later = || Error::NotImplemented {
            operation: "read the fragments of a later version".to_owned(),
            implementer: "this version of spindle".to_owned(),
        };
        known().map(Some).ok_or_else(later)
    }

    pub(super) fn fragment(&self, index: usize) -> FragmentName {
        let generation = self.fragments.places[index].generation;
        let index = u8::try_from(index).expect("a scheme has few fragments");
        FragmentName { segment: self.name, generation, index }
    }

    pub(super) fn payload_bytes(&self, index: usize) -> usize {
        codec::payload_bytes(self.scheme, &self.cuts, index)
    }

    /// A generation above all of the segment.
    pub(super) fn next_generation(&self) -> u64 {
        self.fragments.places.iter().map(|place| place.generation).max().unwrap_or(0) + 1
    }

    pub(super) fn not_found(&self) -> Error {
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
            let range = range.start as usize..range.end as usize;
            let first = self.well_first(coded, 0..coded.scheme.fragments())[0];
            return self.read_piece(coded, first, range, is_verified).await;
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

    /// The fragments, those on stores that work first.
    pub(super) fn well_first(
        &self,
        coded: &Coded,
        fragments: impl Iterator<Item = usize>,
    ) -> Vec<usize> {
        let (well, failing): (Vec<_>, Vec<_>) =
            fragments.partition(|index| self.is_well(coded, *index));
        well.into_iter().chain(failing).collect()
    }

    /// Whether the store of a fragment works.
    pub(super) fn is_well(&self, coded: &Coded, index: usize) -> bool {
        let member = self.member(coded.fragments.places[index].store);
        member.is_some_and(|member| !member.health().is_avoided())
    }

    /// Reads a range of a fragment. If its store is late or fails, others are asked; the first answer counts.
    async fn read_piece(
        &self,
        coded: &Coded,
        index: usize,
        range: Range<usize>,
        is_verified: bool,
    ) -> Result<Bytes> {
        let member = self.member(coded.fragments.places[index].store);
        let Some(member) = member.filter(|member| member.health().may_ask(Way::Read)) else {
            // Nothing of the store is known, or it fails: it is asked only if the others are not enough.
            let lost = match self.recover(coded, index, &range, is_verified).await {
                Ok(bytes) => return Ok(bytes),
                Err(lost) => lost,
            };
            let read = self.read_fragment(coded, index, range, is_verified).await;
            return read.map_err(|error| worse(lost, error));
        };
        let mut reading = pin!(self.read_fragment(coded, index, range.clone(), is_verified));
        self.hedges.note_read();
        let begun = self.clock.now();
        loop {
            // The estimate is that of small reads.
            let sending = Duration::from_nanos(range.len() as u64 * 1_000_000_000 / RATE);
            let patience = match is_verified {
                true => WHOLE_PATIENCE,
                false => member.health().patience(),
            };
            match tokio::time::timeout(patience + sending, &mut reading).await {
                Ok(Ok(bytes)) => return Ok(bytes),
                Ok(Err(lost)) => {
                    let recovered = self.recover(coded, index, &range, is_verified).await;
                    return recovered.map_err(|error| worse(lost, error));
                }
                // No client waits for a whole fragment. What it says of the store is little.
                Err(_late) if is_verified => break,
                Err(_late) => {
                    member.health().note_late();
                    if self.clock.since(begun) >= LATE_MIN
                        || member.health().is_avoided()
                        || self.hedges.take()
                    {
                        break;
                    }
                }
            }
        }
        self.counters.hedged_reads.fetch_add(1, Ordering::Relaxed);
        let recovering = pin!(self.recover(coded, index, &range, is_verified));
        match select(reading, recovering).await {
            Either::Left((Ok(bytes), _)) | Either::Right((Ok(bytes), _)) => Ok(bytes),
            Either::Left((Err(lost), other)) => other.await.map_err(|error| worse(lost, error)),
            Either::Right((Err(lost), other)) => other.await.map_err(|error| worse(lost, error)),
        }
    }

    /// Makes a range of a fragment from others.
    async fn recover(
        &self,
        coded: &Coded,
        index: usize,
        range: &Range<usize>,
        is_verified: bool,
    ) -> Result<Bytes> {
        self.counters.degraded_reads.fetch_add(1, Ordering::Relaxed);
        let others = (0..coded.scheme.fragments()).filter(|other| *other != index);
        let others = self.well_first(coded, others);
        if coded.scheme.codec() == CodecId::Whole {
            let read = self.read_enough(coded, others, range, is_verified).await?;
            return Ok(read.into_iter().next().map(|(_, bytes)| bytes).unwrap_or_default());
        }
        let units = Pattern::units_of(range);
        let read = self.read_enough(coded, others, &units, is_verified).await?;
        let sources: Vec<usize> = read.iter().map(|(source, _)| *source).collect();
        let pattern = self.pattern(coded.scheme, index, sources)?;
        let ranges: Vec<&[u8]> = read.iter().map(|(_, bytes)| bytes.as_ref()).collect();
        let made = pattern.make(&ranges, units.len()).map_err(failed_by)?;
        let decoded = Bytes::from(made.into_iter().next().unwrap_or_default());
        Ok(decoded.slice(range.start - units.start..range.end - units.start))
    }

    /// Reads the same range of as many fragments as are needed, each up to its end, and returns them in
    /// order of their indexes. One that is late is passed over if there is another.
    async fn read_enough(
        &self,
        coded: &Coded,
        others: Vec<usize>,
        range: &Range<usize>,
        is_verified: bool,
    ) -> Result<Vec<(usize, Bytes)>> {
        let read = |index: usize| async move {
            let len = coded.payload_bytes(index);
            let part = range.start.min(len)..range.end.min(len);
            match part.is_empty() {
                true => (index, Ok(Bytes::new())),
                false => (index, self.read_fragment(coded, index, part, is_verified).await),
            }
        };
        let patience = |indexes: &[usize]| {
            let members = indexes.iter().filter_map(|index| {
                self.member(coded.fragments.places[*index].store).map(|it| it.health().patience())
            });
            members.max().unwrap_or_default()
        };
        let wanted = coded.scheme.data();
        let (first, mut more) = others.split_at(wanted.min(others.len()));
        let mut late_after = patience(first);
        let mut reading: FuturesUnordered<_> = first.iter().copied().map(read).collect();
        let mut found = Vec::new();
        let mut lost = coded.not_found();
        while found.len() < wanted {
            let next = reading.next();
            let answer = match more.is_empty() {
                true => Ok(next.await),
                false => tokio::time::timeout(late_after, next).await,
            };
            match answer {
                Ok(Some((index, Ok(bytes)))) => {
                    found.push((index, bytes));
                    continue;
                }
                Ok(Some((_, Err(error)))) => lost = worse(lost, error),
                Ok(None) if more.is_empty() => return Err(lost),
                Ok(None) => {}
                Err(_late) => drop(self.counters.hedged_reads.fetch_add(1, Ordering::Relaxed)),
            }
            if let Some((another, rest)) = more.split_first() {
                (more, late_after) = (rest, patience(&[*another]));
                reading.push(read(*another));
            }
        }
        found.sort_unstable_by_key(|(index, _)| *index);
        Ok(found)
    }

    /// Reads a range of the payload of a fragment: all of it, or it fails.
    pub(super) async fn read_fragment(
        &self,
        coded: &Coded,
        index: usize,
        range: Range<usize>,
        is_verified: bool,
    ) -> Result<Bytes> {
        let id = coded.fragments.places[index].store;
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
            let bytes = member.read(&name, stored(&range)).await?;
            return match bytes.len() == range.len() {
                true => Ok(bytes),
                false => Err(failed("a transfer ended early")),
            };
        }
        // The whole fragment: this is rare, and its header, checksums and payload are needed.
        let whole = self.read_whole(coded, index, &member).await?;
        let header = self.verified_header(coded, index, &whole)?;
        verified_range(&whole, &header, range)
    }

    /// Reads a fragment, all of which verifies.
    pub(super) async fn read_verified(&self, coded: &Coded, index: usize) -> Result<Source> {
        let id = coded.fragments.places[index].store;
        if id == Fragments::NOWHERE {
            return Err(coded.not_found());
        }
        let member = self.member(id).ok_or_else(|| unknown_store(id))?;
        let whole = self.read_whole(coded, index, &member).await?;
        let header = self.verified_header(coded, index, &whole)?;
        let payload = verified_range(&whole, &header, 0..header.payload_bytes())?;
        Ok(Source { payload, directory: whole.slice(header.directory_range()) })
    }

    async fn read_whole(&self, coded: &Coded, index: usize, member: &Member) -> Result<Bytes> {
        self.counters.reads.fetch_add(1, Ordering::Relaxed);
        let bytes = coded.payload_bytes(index) as u64;
        member.read_whole(&coded.fragment(index), bytes).await
    }

    /// Whether the store of a fragment has verified all of it, and has that one. False too if it does not say.
    pub(super) async fn is_checked(&self, coded: &Coded, index: usize) -> bool {
        let member = self.member(coded.fragments.places[index].store);
        let Some(member) = member.filter(|member| !member.health().is_avoided()) else {
            return false;
        };
        let bytes = coded.payload_bytes(index) as u64;
        match member.check(&coded.fragment(index), bytes).await {
            Ok(Check::Whole(header)) => self.header_of(coded, index, &header).is_ok(),
            Ok(Check::Damaged | Check::Unknown) | Err(_) => false,
        }
    }

    fn verified_header(
        &self,
        coded: &Coded,
        index: usize,
        whole: &Bytes,
    ) -> Result<FragmentHeader> {
        let header = self.header_of(coded, index, whole)?;
        match whole.len() == header.fragment_bytes() {
            true => Ok(header),
            false => Err(damaged("a fragment has another length than its header says")),
        }
    }

    /// Reads the header at the beginning of `bytes`, which must be that of this fragment.
    fn header_of(&self, coded: &Coded, index: usize, bytes: &Bytes) -> Result<FragmentHeader> {
        let header = FragmentHeader::decode(bytes).map_err(damaged)?;
        let place = u8::try_from(index).expect("a scheme has few fragments");
        let owner = self.owner(&coded.name);
        let is_it = header.is_of(&owner, place, coded.fragments.places[index].generation)
            && (header.scheme, &header.cuts) == (coded.scheme, &coded.cuts);
        match is_it || seeded_bugs().header_unchecked {
            true => Ok(header),
            false => Err(damaged("a fragment is another one")),
        }
    }

    /// The length of the image, if enough fragments are there with their lengths.
    pub(super) async fn size_of(&self, coded: &Coded) -> Result<u64> {
        let sizes = coded.fragments.stores().enumerate().map(|(index, id)| async move {
            match self.member(id) {
                Some(member) => member.size(&coded.fragment(index)).await,
                None if id == Fragments::NOWHERE => Err(coded.not_found()),
                None => Err(unknown_store(id)),
            }
        });
        let mut lost = coded.not_found();
        let mut count = 0;
        for size in futures::future::join_all(sizes).await {
            match size {
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
        let pattern = Arc::new(Pattern::new(scheme, &[lost], &key.2).map_err(failed_by)?);
        let mut patterns = self.patterns.lock();
        if patterns.len() >= PATTERNS_MAX {
            patterns.clear(); // the stores have changed, or many are lost
        }
        patterns.insert(key, Arc::clone(&pattern));
        Ok(pattern)
    }
}

/// A range of the payload of a whole fragment, whose header verifies, if the checksums confirm it.
fn verified_range(whole: &Bytes, header: &FragmentHeader, range: Range<usize>) -> Result<Bytes> {
    let trailer = whole.get(header.directory_range().start..).unwrap_or_default();
    let checksums = header.checksums(trailer).map_err(damaged)?;
    let checked = Checksums::checked(&range, header.payload_bytes());
    let bytes = whole.slice(header.range_of(&checked));
    match checksums.verify(checked.start, &bytes) {
        true => Ok(bytes.slice(range.start - checked.start..range.end - checked.start)),
        false => Err(damaged("the checksum of a fragment differs")),
    }
}

/// In errors, the name of the store: a fragment was read and is not right.
const DAMAGED: &str = "damaged fragment";

fn damaged(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Generic { store: DAMAGED, source: why.into() }
}

/// Whether the store has answered that a fragment is not there, or has sent one that is not right.
pub(super) fn is_damage(error: &Error) -> bool {
    matches!(error, Error::NotFound { .. } | Error::Generic { store: DAMAGED, .. })
}

/// Of two failures, the one that says less about the segment: one that is not stored may only be claimed if
/// every store that answers says so.
fn worse(one: Error, other: Error) -> Error {
    match one {
        Error::NotFound { .. } => other,
        one => one,
    }
}
