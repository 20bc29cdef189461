//! The fragments of a segment, before they are written.

use super::reading::Coded;
use crate::fragment_store::FragmentName;
use bytes::Bytes;
use erasure::fragment::{FragmentHeader, FragmentOwner};
use erasure::{Cuts, Scheme, codec};
use object_store::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use tiering::segment::read::walk_frames;
use tiering::segment::{FragmentPlace, Fragments, SegmentId, SegmentName};

/// A segment below this number of bytes for each data fragment is stored whole on several stores. Chosen by
/// hand: a few frames in each fragment.
const CODED_BYTES_MIN: usize = 64 << 10;

/// A fragment.
pub(super) struct CodedFragment {
    header: Bytes,
    payload: Bytes,
    trailer: Bytes,
}

impl CodedFragment {
    /// Its bytes, in order.
    pub(super) fn parts(&self) -> Vec<Bytes> {
        vec![self.header.clone(), self.payload.clone(), self.trailer.clone()]
    }

    pub(super) fn bytes(&self) -> u64 {
        self.parts().iter().map(|part| part.len() as u64).sum()
    }
}

/// The fragments of a segment.
pub(super) struct CodedImage {
    pub(super) scheme: Scheme,
    cuts: Cuts,
    generation: u64,
    pub(super) fragments: Vec<CodedFragment>,
}

/// All that the fragments of one placement share.
struct Coding<'a> {
    scheme: Scheme,
    cuts: &'a Cuts,
    generation: u64,
    owner: FragmentOwner,
}

impl Coding<'_> {
    fn fragment(&self, index: usize, payload: Bytes, directory: &[u8]) -> CodedFragment {
        let header = FragmentHeader {
            owner: self.owner,
            scheme: self.scheme,
            index: u8::try_from(index).expect("a scheme has few fragments"),
            generation: self.generation,
            cuts: self.cuts.clone(),
            directory_bytes: u32::try_from(directory.len()).expect("within the segment"),
        };
        let trailer = header.trailer(&payload, directory).into();
        let header = Bytes::copy_from_slice(&header.encode());
        CodedFragment { header, payload, trailer }
    }
}

/// A fragment that was read and verified.
#[derive(Clone, Debug)]
pub(super) struct Source {
    pub(super) payload: Bytes,
    /// The copy of the segment's directory.
    pub(super) directory: Bytes,
}

/// Some fragments of a segment, made from others.
pub(super) struct RebuiltFragments {
    generation: u64,
    fragments: BTreeMap<usize, CodedFragment>,
}

impl RebuiltFragments {
    /// Makes the wanted fragments, all of a generation, from those that were read: themselves, or enough others.
    /// Blocks for as long as it takes to compute.
    pub(super) fn new(
        coded: &Coded,
        generation: u64,
        owner: FragmentOwner,
        found: &[Option<Source>],
        wanted: &BTreeSet<usize>,
    ) -> Result<RebuiltFragments> {
        let coding = Coding { scheme: coded.scheme, cuts: &coded.cuts, generation, owner };
        let payload_of = |index: usize| found[index].as_ref().map(|source| source.payload.clone());
        let (there, absent): (Vec<usize>, Vec<usize>) =
            wanted.iter().partition(|index| found[**index].is_some());
        let mut payloads: Vec<(usize, Bytes)> =
            there.into_iter().filter_map(|index| Some((index, payload_of(index)?))).collect();
        if !absent.is_empty() {
            let sources: Vec<Option<&[u8]>> =
                found.iter().map(|it| it.as_ref().map(|source| &*source.payload)).collect();
            let made = codec::rebuild(coded.scheme, &coded.cuts, &sources, &absent);
            let made = made.map_err(failed_by)?.into_iter().map(Bytes::from);
            payloads.extend(absent.into_iter().zip(made));
        }
        let directory = found.iter().flatten().next().map(|source| source.directory.clone());
        let directory = directory.unwrap_or_default();
        let fragment = |(index, payload)| (index, coding.fragment(index, payload, &directory));
        let fragments = payloads.into_iter().map(fragment).collect();
        Ok(RebuiltFragments { generation, fragments })
    }

    /// The name and the contents of a fragment. Panics for one that was not wanted.
    pub(super) fn get(
        &self,
        segment: &SegmentName,
        index: usize,
    ) -> (FragmentName, &CodedFragment) {
        (name(segment, self.generation, index), &self.fragments[&index])
    }
}

fn name(segment: &SegmentName, generation: u64, index: usize) -> FragmentName {
    let index = u8::try_from(index).expect("a scheme has few fragments");
    FragmentName { segment: *segment, generation, index }
}

impl CodedImage {
    /// Codes a segment for a placement of its own. Blocks for as long as it takes to compute.
    pub(super) fn new(
        scheme: Scheme,
        generation: u64,
        owner: FragmentOwner,
        id: &SegmentId,
        object: Bytes,
    ) -> Result<CodedImage> {
        let is_small = object.len() < scheme.data() * CODED_BYTES_MIN;
        let scheme = if is_small { Scheme::whole(scheme.parity()) } else { scheme };
        let mut borders = Vec::new();
        let mut end = 0;
        for (at, _) in walk_frames(id, &object) {
            borders.push(at.offset);
            end = at.offset.saturating_add(at.sealed_bytes);
        }
        borders.push(end);
        let len = u32::try_from(object.len()).map_err(|_| failed("a segment is too long"))?;
        let cuts = Cuts::new(scheme, len, &borders);
        let directory = directory_of(&object);
        let payloads = codec::encode(scheme, &cuts, &object).map_err(failed_by)?;
        let coded = Coding { scheme, cuts: &cuts, generation, owner };
        let fragment = |(index, payload): (usize, codec::Payload)| {
            let payload = match payload {
                std::borrow::Cow::Borrowed(part) => object.slice_ref(part),
                std::borrow::Cow::Owned(parity) => parity.into(),
            };
            coded.fragment(index, payload, directory)
        };
        let fragments = payloads.into_iter().enumerate().map(fragment).collect();
        Ok(CodedImage { scheme, cuts, generation, fragments })
    }

    pub(super) fn name(&self, segment: &SegmentName, index: usize) -> FragmentName {
        name(segment, self.generation, index)
    }

    pub(super) fn placement(&self, stores: Vec<u32>) -> Fragments {
        let count = |count: usize| u8::try_from(count).expect("a scheme has few fragments");
        Fragments {
            data: count(self.scheme.data()),
            parity: count(self.scheme.parity()),
            codec: self.scheme.codec() as u8,
            ends: self.cuts.ends().to_vec(),
            places: stores
                .into_iter()
                .map(|store| FragmentPlace { store, generation: self.generation })
                .collect(),
            is_copied: false,
        }
    }
}

/// The sealed directory and the footer of a segment; nothing of bytes that are no segment.
fn directory_of(object: &Bytes) -> &[u8] {
    let bytes = tiering::segment::read::directory_tail_bytes(object).unwrap_or(0);
    &object[object.len().saturating_sub(bytes)..]
}

pub(super) fn failed(what: &str) -> Error {
    Error::Generic { store: "fragments", source: what.into() }
}

pub(super) fn failed_by(error: block::Error) -> Error {
    Error::Generic { store: "fragments", source: Box::new(error) }
}
