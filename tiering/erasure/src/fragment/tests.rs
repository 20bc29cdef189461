//! The bytes of a fragment: strangers, damage, wrong places, golden bytes.

use super::*;
use crate::codec::{
    self,
    tests::{cuts, image},
};

fn header(scheme: Scheme, index: u8, len: usize) -> FragmentHeader {
    FragmentHeader {
        owner: FragmentOwner { pool: [1; 16], segment: [2; 16], epoch: Epoch(3), number: 4 },
        scheme,
        index,
        generation: 5,
        cuts: cuts(scheme, len),
        directory_bytes: 6,
    }
}

fn four() -> Scheme {
    Scheme::new(4, 2).expect("a scheme")
}

/// A fragment, and its payload.
fn fragment(index: u8, len: usize) -> (FragmentHeader, Vec<u8>, Vec<u8>) {
    let header = header(four(), index, len);
    let image = image(len);
    let payloads = codec::encode(four(), &header.cuts, &image).expect("the cuts are its own");
    let payload = payloads[usize::from(index)].to_vec();
    let bytes = [&header.encode()[..], &payload, &header.trailer(&payload, b"frames")].concat();
    assert_eq!(bytes.len(), header.fragment_bytes());
    (header, payload, bytes)
}

#[test]
fn header_is_read_as_it_was_written() {
    for scheme in Scheme::ALL {
        for index in [0, scheme.fragments() - 1] {
            let header = header(scheme, u8::try_from(index).expect("few"), 5000);
            assert_eq!(FragmentHeader::decode(&header.encode()).expect("it is whole"), header);
        }
    }
    let (header, _, bytes) = fragment(5, 5000);
    for at in 0..HEADER_BYTES {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        assert!(FragmentHeader::decode(&damaged).is_err(), "byte {at}");
        assert!(FragmentHeader::decode(&bytes[..at]).is_err(), "{at} bytes");
    }
    // With a right checksum, too, nothing that the writer does not write is read.
    let changed = |at: usize, byte: u8| {
        let mut changed = header.encode();
        changed[at] = byte;
        let crc = crc32c(&changed[..CRC_AT]);
        changed[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        FragmentHeader::decode(&changed).map_err(|error| error.kind())
    };
    for (at, byte) in [(8, 2), (CODEC_AT, 3), (DATA_AT, 5)] {
        assert_eq!(changed(at, byte), Err(ErrorKind::Unsupported), "byte {at}");
    }
    for (at, byte) in [
        (CODEC_AT, 1),
        (INDEX_AT, 6),
        (INDEX_AT + 1, 1),
        (GENERATION_AT, 0),
        (PAYLOAD_AT, header.encode()[PAYLOAD_AT] ^ 1),
        (ENDS_AT + 3, 1),
        (ENDS_AT + 16, 1),
        (ENDS_END, 1),
        (CRC_AT - 1, 1),
    ] {
        assert_eq!(changed(at, byte), Err(ErrorKind::Corrupt), "byte {at}");
    }
}

#[test]
fn fragment_of_another_place_or_placement_counts_for_nothing() {
    let header = header(four(), 2, 5000);
    assert!(header.is_of(&header.owner, 2, 5));
    assert!(!header.is_of(&header.owner, 1, 5));
    assert!(!header.is_of(&header.owner, 2, 4), "an earlier placement");
    assert!(!header.is_of(&header.owner, 2, 6));
    let others = [
        FragmentOwner { pool: [9; 16], ..header.owner },
        FragmentOwner { segment: [9; 16], ..header.owner },
        FragmentOwner { epoch: Epoch(9), ..header.owner },
        FragmentOwner { number: 9, ..header.owner },
    ];
    assert!(others.iter().all(|owner| !header.is_of(owner, 2, 5)));
}

#[test]
fn range_is_verified_without_the_rest() {
    let (header, payload, bytes) = fragment(4, 100_000);
    let trailer = &bytes[header.directory_range().start..];
    let checksums = header.checksums(trailer).expect("they are whole");
    let end = payload.len();
    for range in [0..1, 4095..4097, 8192..12288, end - 1..end, 0..end] {
        let checked = Checksums::checked(&range, end);
        assert!(checked.start <= range.start && range.end <= checked.end);
        let stored = &bytes[header.range_of(&checked)];
        assert_eq!(stored, &payload[checked.clone()]);
        assert!(checksums.verify(checked.start, stored), "{range:?}");
        for bit in [0, stored.len() * 4, stored.len() * 8 - 1] {
            let mut flipped = stored.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(!checksums.verify(checked.start, &flipped), "{range:?}: bit {bit}");
        }
        let other = &bytes[header.range_of(&Checksums::checked(&(20_000..20_001), end))];
        assert!(!checksums.verify(checked.start, other), "another range");
    }
    assert!(!checksums.verify(1, &payload[1..4097]));
    assert!(!checksums.verify(0, &[&payload[..], &[0; 4096]].concat()), "beyond the end");
    // The same bytes at another place of the scheme.
    let elsewhere = FragmentHeader { index: 5, ..header.clone() };
    assert!(elsewhere.checksums(trailer).is_err());
    for at in [0, 6, trailer.len() - 1] {
        let mut damaged = trailer.to_vec();
        damaged[at] ^= 1;
        assert!(header.checksums(&damaged).is_err(), "byte {at}");
    }
    assert!(header.checksums(&trailer[1..]).is_err());
}

#[test]
fn fragment_has_its_golden_bytes() {
    let (_, _, bytes) = fragment(4, 500);
    let hex: String = bytes
        .chunks(32)
        .map(|line| line.iter().map(|byte| format!("{byte:02x}")).collect::<String>() + "\n")
        .collect();
    if std::env::var_os("SPINDLE_PRINT_GOLDEN").is_some() {
        print!("{hex}");
    }
    assert_eq!(hex, include_str!("../../testdata/fragment-v1.hex"));
}
