//! The fragments of a segment, before they are written.

use crate::fragment_store::FragmentName;
use bytes::Bytes;
use erasure::fragment::{FragmentHeader, FragmentOwner};
use erasure::{Cuts, Scheme, codec};
use object_store::{Error, Result};
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
    generations: Vec<u64>,
    pub(super) fragments: Vec<CodedFragment>,
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
        CodedImage::with_cuts(scheme, cuts, vec![generation; scheme.fragments()], owner, &object)
    }

    /// Codes a segment for a placement that is known, with the generation of each fragment.
    pub(super) fn with_cuts(
        scheme: Scheme,
        cuts: Cuts,
        generations: Vec<u64>,
        owner: FragmentOwner,
        object: &Bytes,
    ) -> Result<CodedImage> {
        let directory = directory_of(object);
        let payloads = codec::encode(scheme, &cuts, object).map_err(failed_by)?;
        let fragment = |(index, payload): (usize, codec::Payload)| {
            let header = FragmentHeader {
                owner,
                scheme,
                index: u8::try_from(index).expect("a scheme has few fragments"),
                generation: generations[index],
                cuts: cuts.clone(),
                directory_bytes: u32::try_from(directory.len()).expect("within the segment"),
            };
            let trailer = header.trailer(&payload, directory);
            let payload = match payload {
                std::borrow::Cow::Borrowed(part) => object.slice_ref(part),
                std::borrow::Cow::Owned(parity) => parity.into(),
            };
            let header = Bytes::copy_from_slice(&header.encode());
            CodedFragment { header, payload, trailer: trailer.into() }
        };
        let fragments = payloads.into_iter().enumerate().map(fragment).collect();
        Ok(CodedImage { scheme, cuts, generations, fragments })
    }

    pub(super) fn name(&self, segment: &SegmentName, index: usize) -> FragmentName {
        let generation = self.generations[index];
        let index = u8::try_from(index).expect("a scheme has few fragments");
        FragmentName { segment: *segment, generation, index }
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
                .zip(&self.generations)
                .map(|(store, generation)| FragmentPlace { store, generation: *generation })
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
