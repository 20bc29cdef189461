//! Fragments of a data store: anybody who can write to the store may have written them.
//!
//! Invariant: a header that decodes is encoded to the same bytes; checksums are read only within what is there.

use crate::SMALL;
use crate::seals::{put, put_checksum, usize_at};
use block::Epoch;
use block::units::crc32c;
use erasure::fragment::{Checksums, FragmentHeader, FragmentOwner, HEADER_BYTES};
use erasure::{Cuts, Scheme, codec};
use fuzz::{Outcome, Target};

/// Fragments of an image, the first and the last of a scheme.
fn fragments(scheme: Scheme) -> Vec<Vec<u8>> {
    let image: Vec<u8> = (0..9000u32).map(|at| (at % 251) as u8).collect();
    let cuts = Cuts::new(scheme, 9000, &[0, 2000, 4100, 6500, 9000]);
    let payloads = codec::encode(scheme, &cuts, &image).expect("the cuts are its own");
    [0, scheme.fragments() - 1]
        .map(|index| {
            let header = FragmentHeader {
                owner: FragmentOwner {
                    pool: [1; 16],
                    segment: [2; 16],
                    epoch: Epoch(3),
                    number: 4,
                },
                scheme,
                index: u8::try_from(index).expect("a scheme has few fragments"),
                generation: 5,
                cuts: cuts.clone(),
                directory_bytes: 6,
            };
            let trailer = header.trailer(&payloads[index], b"frames");
            [&header.encode()[..], &payloads[index], &trailer].concat()
        })
        .to_vec()
}

/// Puts the checksums of header and trailer right, by the documented bytes.
fn repair(fragment: &mut [u8]) {
    put_checksum(fragment, 0..252, 252);
    let payload_bytes = usize_at(fragment, 72).unwrap_or(0);
    let (begin, end) = (256 + payload_bytes, fragment.len().saturating_sub(4));
    if let (Some(salt), Some(trailer)) = (fragment.get(252..256), fragment.get(begin..end)) {
        let checksum = crc32c(&[salt, trailer].concat());
        put(fragment, end, &checksum.to_le_bytes());
    }
}

#[test]
fn fragment() {
    let decode = |input: &[u8]| {
        let header = match FragmentHeader::decode(input) {
            Ok(header) => header,
            Err(error) => return Outcome::Refused(error.chain()),
        };
        assert_eq!(header.encode()[..], input[..HEADER_BYTES]);
        let trailer = input.get(header.directory_range().start..).unwrap_or_default();
        let checksums = match header.checksums(trailer) {
            Ok(checksums) => checksums,
            Err(error) => return Outcome::Refused(error.chain()),
        };
        let whole = Checksums::checked(&(0..header.payload_bytes()), header.payload_bytes());
        assert_eq!(whole, 0..header.payload_bytes());
        let _ = checksums.verify(0, &input[header.range_of(&whole)]);
        Outcome::Accepted
    };
    let schemes = ["1+1", "4+2", "21+3"].map(|text| text.parse().expect("a scheme"));
    Target {
        name: "fragment",
        inputs: schemes.into_iter().flat_map(fragments).collect(),
        repair: &|input| repair(input),
        decode: &decode,
        execution_count: 20_000,
        input_bytes_max: 32 << 10,
        allocation: SMALL,
    }
    .check();
}
