//! Encoding of images, and decoding of whole fragments, for rebuilds and scrubs. A read of one frame
//! uses [`crate::pattern`] instead.

use crate::cuts::Cuts;
use crate::scheme::{CodecId, Scheme};
use crate::seeded_bugs::seeded_bugs;
use block::{Error, ErrorKind, Result};
use reed_solomon_simd::{ReedSolomonDecoder, ReedSolomonEncoder};
use std::borrow::Cow;

/// Payload of a fragment: where it is borrowed from, or its own bytes.
pub type Payload<'a> = Cow<'a, [u8]>;

/// Bytes of the payload of a fragment. Panics for an index beyond the scheme.
#[must_use]
pub fn payload_bytes(scheme: Scheme, cuts: &Cuts, index: usize) -> usize {
    assert!(index < scheme.fragments(), "fragment {index} of {scheme}");
    match scheme.codec() {
        CodecId::Whole => cuts.image_bytes() as usize,
        CodecId::ReedSolomon16 if index < scheme.data() => cuts.piece(index).len(),
        CodecId::ReedSolomon16 => cuts.coded_bytes(),
    }
}

/// Makes the payloads of all fragments of an image, in order of their indexes. Takes time in proportion to
/// the image: about a second for some GiB.
///
/// # Errors
/// `Invalid` if the cuts are not of this image.
pub fn encode<'a>(scheme: Scheme, cuts: &Cuts, image: &'a [u8]) -> Result<Vec<Payload<'a>>> {
    if image.len() != cuts.image_bytes() as usize || cuts.ends().len() != scheme.data() {
        return Err(invalid("encode a segment: its cuts are of another image"));
    }
    if scheme.codec() == CodecId::Whole {
        return Ok(vec![Cow::Borrowed(image); scheme.fragments()]);
    }
    let piece = |index| {
        let range = cuts.piece(index);
        &image[range.start as usize..range.end as usize]
    };
    let mut payloads: Vec<Payload> =
        (0..scheme.data()).map(|index| Cow::Borrowed(piece(index))).collect();
    let parity = parity_of(scheme, cuts.coded_bytes(), (0..scheme.data()).map(piece))?;
    payloads.extend(parity.into_iter().map(Cow::Owned));
    if seeded_bugs().parity_of_another_row {
        payloads[scheme.data()..].rotate_left(1);
    }
    Ok(payloads)
}

fn parity_of<'a>(
    scheme: Scheme,
    coded_bytes: usize,
    pieces: impl Iterator<Item = &'a [u8]>,
) -> Result<Vec<Vec<u8>>> {
    let (data, parity) = (scheme.data(), scheme.parity());
    if coded_bytes == 0 {
        return Ok(vec![Vec::new(); parity]);
    }
    let mut encoder = ReedSolomonEncoder::new(data, parity, coded_bytes).map_err(failed)?;
    for piece in pieces {
        encoder.add_original_shard(padded(piece, coded_bytes)).map_err(failed)?;
    }
    let encoded = encoder.encode().map_err(failed)?;
    Ok(encoded.recovery_iter().map(<[u8]>::to_vec).collect())
}

/// Makes the payloads of the `wanted` fragments from those that were found, by index. At least as many
/// as there are data fragments have to be found, and each whole and right: the code detects no errors.
///
/// # Errors
/// `Corrupt` if too few were found, or one has another length than it should.
pub fn rebuild(
    scheme: Scheme,
    cuts: &Cuts,
    found: &[Option<&[u8]>],
    wanted: &[usize],
) -> Result<Vec<Vec<u8>>> {
    let pieces = pieces(scheme, cuts, found)?;
    let is_parity = |index: &usize| *index >= scheme.data() && scheme.codec() != CodecId::Whole;
    let parity = match wanted.iter().any(is_parity) {
        true => parity_of(scheme, cuts.coded_bytes(), pieces.iter().map(AsRef::as_ref))?,
        false => Vec::new(),
    };
    let payload = |index: &usize| match is_parity(index) {
        true => parity.get(index - scheme.data()).cloned(),
        false if scheme.codec() == CodecId::Whole => Some(pieces[0].to_vec()),
        false => pieces.get(*index).map(|piece| piece.to_vec()),
    };
    let payloads: Option<Vec<Vec<u8>>> = wanted.iter().map(payload).collect();
    payloads.ok_or_else(|| invalid("rebuild a fragment: the scheme has none with this index"))
}

/// Makes the image from the fragments that were found; as for [`rebuild`].
///
/// # Errors
/// As for [`rebuild`].
pub fn decode(scheme: Scheme, cuts: &Cuts, found: &[Option<&[u8]>]) -> Result<Vec<u8>> {
    Ok(pieces(scheme, cuts, found)?.concat())
}

/// The payloads of the data fragments; for copies, one of the whole.
fn pieces<'a>(scheme: Scheme, cuts: &Cuts, found: &[Option<&'a [u8]>]) -> Result<Vec<Payload<'a>>> {
    let (data, coded_bytes) = (scheme.data(), cuts.coded_bytes());
    if found.len() != scheme.fragments() {
        return Err(invalid("decode a segment: the list of its fragments has another length"));
    }
    for (index, payload) in found.iter().enumerate() {
        let expected = payload_bytes(scheme, cuts, index);
        if payload.is_some_and(|payload| payload.len() != expected) {
            let what = format!("decode a segment: fragment {index} has not its {expected} bytes");
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
    }
    let count = found.iter().flatten().count();
    if count < data {
        let what =
            format!("decode a segment: {count} of its fragments are left, and {data} are needed");
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    if scheme.codec() == CodecId::Whole {
        return Ok(found.iter().flatten().take(1).map(|whole| Cow::Borrowed(*whole)).collect());
    }
    let is_whole = found[..data].iter().all(Option::is_some);
    if is_whole || coded_bytes == 0 {
        return Ok(found[..data]
            .iter()
            .map(|piece| Cow::Borrowed(piece.unwrap_or_default()))
            .collect());
    }
    let mut decoder =
        ReedSolomonDecoder::new(data, scheme.parity(), coded_bytes).map_err(failed)?;
    for (index, payload) in found.iter().enumerate() {
        match payload {
            Some(piece) if index < data => {
                decoder.add_original_shard(index, padded(piece, coded_bytes)).map_err(failed)?;
            }
            Some(parity) => decoder.add_recovery_shard(index - data, parity).map_err(failed)?,
            None => {}
        }
    }
    let decoded = decoder.decode().map_err(failed)?;
    let piece = |index: usize| match found[index] {
        Some(piece) => Some(Cow::Borrowed(piece)),
        None => {
            let padded = decoded.restored_original(index)?;
            Some(Cow::Owned(padded[..cuts.piece(index).len()].to_vec()))
        }
    };
    let pieces: Option<Vec<Payload>> = (0..data).map(piece).collect();
    pieces
        .ok_or_else(|| Error::new(ErrorKind::Corrupt, "decode a segment: a piece was not restored"))
}

/// The bytes, followed by zeroes up to a length.
fn padded(bytes: &[u8], len: usize) -> Payload<'_> {
    match bytes.len() == len {
        true => Cow::Borrowed(bytes),
        false => {
            let mut padded = Vec::with_capacity(len);
            padded.extend_from_slice(bytes);
            padded.resize(len, 0);
            Cow::Owned(padded)
        }
    }
}

pub(crate) fn failed(error: reed_solomon_simd::Error) -> Error {
    Error::with_source(ErrorKind::Invalid, "compute an erasure code", error)
}

pub(crate) fn invalid(what: &str) -> Error {
    Error::new(ErrorKind::Invalid, what)
}

#[cfg(test)]
pub(crate) mod tests;
