//! Encodings from the tables of the specification, and decoders on arbitrary bytes.

#![allow(clippy::indexing_slicing, clippy::unwrap_used)] // a test that panics has found something

use super::*;
use proptest::prelude::*;

#[test]
fn headers_decode_by_the_specification() {
    let mut bytes = [0; OPTION_HEADER_BYTES];
    bytes[..8].copy_from_slice(b"IHAVEOPT");
    bytes[8..].copy_from_slice(&[0, 0, 0, 7, 0, 0, 1, 2]);
    let header = OptionHeader::decode(&bytes).unwrap();
    assert_eq!(header, OptionHeader { option: option::GO, data_bytes: 0x102 });

    let compact = [
        &[0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1][..], // magic, FUA, WRITE
        &[1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 2, 0],
    ];
    let header = RequestHeader::decode(Dialect::Structured, &compact.concat()).unwrap();
    let expected = RequestHeader {
        flags: command_flag::FUA,
        command: command::WRITE,
        cookie: 0x0102_0304_0506_0708,
        offset: 4096,
        length: 512,
    };
    assert_eq!(header, expected);

    let extended = [
        &[0x21, 0xe4, 0x1c, 0x71, 0, 1, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8][..],
        &[0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 2, 0],
    ];
    assert_eq!(RequestHeader::decode(Dialect::Extended, &extended.concat()), Ok(expected));
    let wrong = RequestHeader::decode(Dialect::Simple, &extended.concat());
    assert_eq!(wrong, Err(WireError::Magic));
    let short = RequestHeader::decode(Dialect::Simple, &compact.concat()[..27]);
    assert_eq!(short, Err(WireError::Length));
}

#[test]
fn replies_encode_by_the_specification() {
    let mut out = Vec::new();
    put_simple_reply(&mut out, 5, 0x0102_0304_0506_0708);
    assert_eq!(out, [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 5, 1, 2, 3, 4, 5, 6, 7, 8]);

    let of = ChunkOf { dialect: Dialect::Structured, cookie: 9, offset: 0x77 };
    out.clear();
    put_error_chunk(&mut out, of, 28, "full");
    let expected = [
        &[0x66, 0x8e, 0x33, 0xef, 0, 1, 0x80, 1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 10][..],
        &[0, 0, 0, 28, 0, 4, b'f', b'u', b'l', b'l'],
    ];
    assert_eq!(out, expected.concat());

    let of = ChunkOf { dialect: Dialect::Extended, ..of };
    out.clear();
    put_block_status(&mut out, of, &[(1 << 33, STATE_HOLE | STATE_ZERO)]);
    let expected = [
        &[0x6e, 0x8a, 0x27, 0x8c, 0, 1, 0, 6, 0, 0, 0, 0, 0, 0, 0, 9][..],
        &[0, 0, 0, 0, 0, 0, 0, 0x77, 0, 0, 0, 0, 0, 0, 0, 24],
        &[0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3],
    ];
    assert_eq!(out, expected.concat());
}

#[test]
fn a_long_message_is_cut_at_a_character() {
    let of = ChunkOf { dialect: Dialect::Structured, cookie: 1, offset: 0 };
    let mut out = Vec::new();
    put_error_chunk(&mut out, of, 5, &"é".repeat(3000));
    let message = &out[26..];
    assert_eq!(message.len(), 4096);
    assert!(std::str::from_utf8(message).is_ok());
    out.clear();
    put_error_chunk(&mut out, of, 5, &format!("x{}", "é".repeat(3000)));
    assert_eq!(out[26..].len(), 4095);
    assert!(std::str::from_utf8(&out[26..]).is_ok());
}

#[test]
fn lengths_that_lie_are_refused() {
    let lies: [&[u8]; 5] = [
        &[],
        &[0, 0, 0, 9, b'x', 0, 0],       // the name ends past the data
        &[0, 0, 0, 1, b'x'],             // no count of requests
        &[0, 0, 0, 1, b'x', 0, 2, 0, 3], // two requests announced, one present
        &[0, 0, 0, 1, b'x', 0, 0, b'j', b'k'], // trailing bytes
    ];
    for lie in lies {
        assert_eq!(InfoRequest::decode(lie), Err(WireError::Length), "{lie:?}");
    }
    let huge_count = [0, 0, 0, 1, b'x', 0xff, 0xff, 0xff, 0xff];
    assert_eq!(MetaRequest::decode(&huge_count), Err(WireError::Length));
    let colonless = [0, 0, 0, 1, b'x', 0, 0, 0, 1, 0, 0, 0, 2, b'a', b'b'];
    assert_eq!(MetaRequest::decode(&colonless), Err(WireError::Length));
}

proptest! {
    #[test]
    fn no_bytes_panic_a_decoder(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = InfoRequest::decode(&bytes);
        let _ = MetaRequest::decode(&bytes);
        for dialect in [Dialect::Simple, Dialect::Structured, Dialect::Extended] {
            let _ = RequestHeader::decode(dialect, &bytes);
        }
        if let Some(header) = bytes.first_chunk() {
            let _ = OptionHeader::decode(header);
        }
    }

    #[test]
    fn client_requests_decode_as_encoded(
        name in "[a-z]{0,20}",
        infos in proptest::collection::vec(0u16..6, 0..8),
        queries in proptest::collection::vec("[a-z]{1,4}:[a-z]{0,4}", 0..6),
    ) {
        let mut data = u32::try_from(name.len()).unwrap().to_be_bytes().to_vec();
        data.extend_from_slice(name.as_bytes());
        let mut meta = data.clone();
        data.extend_from_slice(&u16::try_from(infos.len()).unwrap().to_be_bytes());
        infos.iter().for_each(|info| data.extend_from_slice(&info.to_be_bytes()));
        let request = InfoRequest::decode(&data).unwrap();
        prop_assert_eq!(request.name, name.as_bytes());
        prop_assert_eq!(request.wants_block_size, infos.contains(&info::BLOCK_SIZE));
        prop_assert_eq!(request.wants_name, infos.contains(&info::NAME));

        meta.extend_from_slice(&u32::try_from(queries.len()).unwrap().to_be_bytes());
        for query in &queries {
            meta.extend_from_slice(&u32::try_from(query.len()).unwrap().to_be_bytes());
            meta.extend_from_slice(query.as_bytes());
        }
        let request = MetaRequest::decode(&meta).unwrap();
        prop_assert_eq!(request.has_queries, !queries.is_empty());
        prop_assert_eq!(request.names_base, queries.iter().any(|query| query == "base:"));
    }
}
