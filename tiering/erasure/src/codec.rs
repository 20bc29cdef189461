//! Encoding of images, and decoding of whole fragments, for rebuilds and scrubs.

use crate::cuts::Cuts;
use crate::pattern::{Pattern, invalid};
use crate::scheme::{CodecId, Scheme};
use crate::seeded_bugs::seeded_bugs;
use block::{Error, ErrorKind, Result};
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
/// the image and the parity fragments: a second for some GiB.
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
    let pieces: Vec<&[u8]> = (0..scheme.data()).map(piece).collect();
    let sources: Vec<usize> = (0..scheme.data()).collect();
    let parity: Vec<usize> = (scheme.data()..scheme.fragments()).collect();
    let parity = Pattern::new(scheme, &parity, &sources)?.make(&pieces, cuts.coded_bytes())?;
    let mut payloads: Vec<Payload> = pieces.into_iter().map(Cow::Borrowed).collect();
    payloads.extend(parity.into_iter().map(Cow::Owned));
    if seeded_bugs().parity_of_another_row {
        payloads[scheme.data()..].rotate_left(1);
    }
    Ok(payloads)
}

/// Makes the payloads of the `wanted` fragments from those that were found, by index. At least as many
/// as there are data fragments have to be found, and each whole and right: the code detects no errors.
///
/// # Errors
/// `Corrupt` if too few were found, or one has another length than it should. `Invalid` for an index that the
/// scheme does not have.
pub fn rebuild(
    scheme: Scheme,
    cuts: &Cuts,
    found: &[Option<&[u8]>],
    wanted: &[usize],
) -> Result<Vec<Vec<u8>>> {
    check(scheme, cuts, found)?;
    if wanted.iter().any(|index| *index >= scheme.fragments()) {
        return Err(invalid("rebuild a fragment: the scheme has none with this index"));
    }
    let sources = found.iter().enumerate().filter_map(|(index, it)| Some((index, (*it)?)));
    let (sources, payloads): (Vec<usize>, Vec<&[u8]>) = sources.take(scheme.data()).unzip();
    let absent: Vec<usize> =
        wanted.iter().copied().filter(|index| found[*index].is_none()).collect();
    let made = match scheme.codec() {
        CodecId::Whole => vec![payloads[0].to_vec(); absent.len()],
        CodecId::ReedSolomon16 if absent.is_empty() => Vec::new(),
        CodecId::ReedSolomon16 => {
            Pattern::new(scheme, &absent, &sources)?.make(&payloads, cuts.coded_bytes())?
        }
    };
    let mut made = made.into_iter();
    let payload = |index: &usize| match found[*index] {
        Some(payload) => payload.to_vec(),
        None => {
            let mut payload = made.next().expect("all that are absent were made");
            payload.truncate(payload_bytes(scheme, cuts, *index));
            payload
        }
    };
    Ok(wanted.iter().map(payload).collect())
}

/// Checks that enough fragments were found, and that each has its length.
fn check(scheme: Scheme, cuts: &Cuts, found: &[Option<&[u8]>]) -> Result<()> {
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
    let (count, data) = (found.iter().flatten().count(), scheme.data());
    if count < data {
        let what =
            format!("decode a segment: {count} of its fragments are left, and {data} are needed");
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests;
