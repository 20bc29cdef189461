//! The cache file: its header, and the directory of a pack.
//!
//! Invariant: the entries that are read lie inside their pack.

use crate::SMALL;
use crate::seals::{put_checksum, usize_at};
use fuzz::{Outcome, Target, corpus};
use tiering::cache::format::{
    PACK_BYTES_MAX, PACK_ENTRY_BYTES, PACK_HEADER_BYTES, PackHeader, encode_directory,
    encode_file_header, file_state, is_file_header,
};

const POOL: [u8; 16] = *b"0123456789abcdef";
const REGION_BYTES: u32 = 0x0040_0000;
/// Bytes of the file header in the golden file, before the pack.
const FILE_HEADER_BYTES: usize = 40;

fn decode_pack(input: &[u8]) -> Outcome {
    let Some(header) = PackHeader::decode(input) else {
        return Outcome::Refused("header".to_owned());
    };
    assert!(header.directory_bytes() <= PACK_BYTES_MAX && header.entry_count > 0);
    let Some(entries) = header.decode_entries(input) else {
        return Outcome::Refused("entries".to_owned());
    };
    assert_eq!(entries.len(), header.entry_count as usize);
    for entry in &entries {
        assert!(entry.offset + entry.sealed_bytes <= header.pack_bytes);
    }
    let frames: Vec<(u64, u32)> =
        entries.iter().map(|entry| (entry.key, entry.sealed_bytes)).collect();
    // The encoder places frames without gaps; if these are, there is only one form.
    if let Some((bytes, encoded)) = encode_directory(header.sequence, header.position, &frames)
        && encoded == entries
        && PackHeader::decode(&bytes).expect("just encoded").pack_bytes == header.pack_bytes
    {
        assert_eq!(bytes[..], input[..bytes.len()]);
    }
    Outcome::Accepted
}

#[test]
fn cache_pack() {
    let golden = corpus::golden("tiering/testdata/cache-v1.hex");
    let many: Vec<(u64, u32)> = (0..40).map(|key| (key * 77, 100)).collect();
    let repair = |input: &mut Vec<u8>| {
        let count = usize_at(input, 4).unwrap_or(0);
        let end = count.saturating_mul(PACK_ENTRY_BYTES).saturating_add(PACK_HEADER_BYTES);
        put_checksum(input, PACK_HEADER_BYTES..end, 24);
        put_checksum(input, 0..28, 28);
    };
    Target {
        name: "cache_pack",
        inputs: vec![
            golden[FILE_HEADER_BYTES..].to_vec(),
            encode_directory(5, 8192, &many).expect("it fits a pack").0,
        ],
        repair: &repair,
        decode: &decode_pack,
        execution_count: 100_000,
        input_bytes_max: 8192,
        allocation: SMALL,
    }
    .check();
}

#[test]
fn cache_file() {
    let golden = corpus::golden("tiering/testdata/cache-v1.hex");
    Target {
        name: "cache_file",
        inputs: vec![golden[..FILE_HEADER_BYTES].to_vec()],
        repair: &|input| put_checksum(input, 0..36, 36),
        decode: &|input| {
            let state = file_state(input);
            if !is_file_header(input, &POOL, REGION_BYTES) {
                return Outcome::Refused(String::new());
            }
            let encoded = encode_file_header(&POOL, REGION_BYTES, state);
            assert_eq!(file_state(&encoded), state);
            // A flag of another value than 1 counts as not closed, and a byte beside it as nothing.
            assert_eq!(encoded[12..36], input[12..36]);
            Outcome::Accepted
        },
        execution_count: 100_000,
        input_bytes_max: 128,
        allocation: SMALL,
    }
    .check();
}
