//! The bytes between the nodes of a cluster, and the documents of a node.
//!
//! Invariants:
//! - A list that is accepted is signed, so no mutation of a signed part is: what is accepted encodes
//!   to bytes that decode to the same list.
//! - Messages and tokens that are accepted have one form.

use crate::{LARGE, SMALL, no_repair};
use block::units::crc32c;
use cluster::Token;
use cluster::admission::AdmissionList;
use cluster::connection::{
    ANSWER_MAGIC, Answer, FRAME_HEADER_BYTES, FrameHeader, HELLO_MAGIC, Hello, PREFIX_BYTES,
    decode_prefix,
};
use cluster::identity::Identity;
use cluster::probe::message::{REQUEST_HEAD_BYTES, Reply, Request};
use fuzz::{Outcome, Target, corpus};

#[test]
fn node_list() {
    let golden = corpus::text("server/cluster/testdata/cluster-v1.json").trim_end().to_owned();
    let known = AdmissionList::decode(golden.as_bytes(), None).expect("the golden list");
    let with_zone = corpus::text("server/cluster/testdata/cluster-v2.json").trim_end().to_owned();
    let decode = |input: &[u8]| {
        let mut merged = known.clone();
        if merged.merge_bytes(input).is_ok() {
            // A forged record would have added a node or a removal.
            let is_known = merged.nodes() == known.nodes() && merged.removed() == known.removed();
            // The other golden list has the same founder, and the node was removed from this one.
            assert!(is_known, "{:?}", merged.nodes());
        }
        match AdmissionList::decode(input, None) {
            Ok(list) => {
                let again = AdmissionList::decode(&list.encode(), Some(list.cluster()));
                assert_eq!(again.as_ref(), Ok(&list));
                Outcome::Accepted
            }
            Err(refusal) => Outcome::Refused(refusal.to_string()),
        }
    };
    Target {
        name: "node_list",
        inputs: vec![golden.into_bytes(), with_zone.into_bytes()],
        repair: &no_repair,
        decode: &decode,
        execution_count: 5000,
        input_bytes_max: 16 << 10,
        allocation: LARGE,
    }
    .check();
}

#[test]
fn peer_messages() {
    let decode = |input: &[u8]| {
        let Some((prefix, body)) = input.split_first_chunk::<PREFIX_BYTES>() else {
            return Outcome::Refused("short".to_owned());
        };
        let encoded = match prefix.starts_with(HELLO_MAGIC) {
            true => decode_prefix(prefix, HELLO_MAGIC)
                .and_then(|found| Ok((found, Hello::decode(body)?.encode()))),
            false => decode_prefix(prefix, ANSWER_MAGIC)
                .and_then(|found| Ok((found, Answer::decode(body)?.encode()))),
        };
        match encoded {
            Ok(((length, None), bytes)) if usize::from(length) == body.len() => {
                assert_eq!(bytes, input);
                Outcome::Accepted
            }
            Ok(((_, version), _)) => Outcome::Refused(format!("length, or version {version:?}")),
            Err(error) => Outcome::Refused(format!("{error:?}")),
        }
    };
    // The magic and the version are put right in most inputs.
    let repair = |input: &mut Vec<u8>| {
        let length = u16::try_from(input.len().saturating_sub(PREFIX_BYTES)).unwrap_or(u16::MAX);
        if let Some(prefix) = input.first_chunk_mut::<PREFIX_BYTES>() {
            let magic = if prefix[4] == b'P' { HELLO_MAGIC } else { ANSWER_MAGIC };
            prefix[..8].copy_from_slice(magic);
            prefix[8..10].copy_from_slice(&[1, 0]);
            prefix[10..].copy_from_slice(&length.to_le_bytes());
        }
    };
    let golden = |name: &str| corpus::golden(&format!("server/cluster/testdata/{name}-v1.hex"));
    Target {
        name: "peer_messages",
        inputs: vec![golden("hello"), golden("answer")],
        repair: &repair,
        decode: &decode,
        execution_count: 200_000,
        input_bytes_max: 1024,
        allocation: SMALL,
    }
    .check();
}

#[test]
fn probe_messages() {
    let decode = |input: &[u8]| {
        let request = Request::decode(input);
        let reply = Reply::decode(input);
        match (request, reply) {
            (Ok(request), _) => {
                assert_eq!(&request.encode()[..], &input[..REQUEST_HEAD_BYTES]);
                assert_eq!(input.len() - REQUEST_HEAD_BYTES, request.fill_bytes as usize);
                Outcome::Accepted
            }
            (Err(_), Ok(reply)) => {
                assert_eq!(&reply.encode()[..], input);
                Outcome::Accepted
            }
            (Err(request), Err(reply)) => Outcome::Refused(format!("{request}, {reply}")),
        }
    };
    let repair = |input: &mut Vec<u8>| {
        input.iter_mut().take(4).zip([1, 0, 0, 0]).for_each(|(byte, is)| *byte = is)
    };
    let golden = |name: &str| corpus::golden(&format!("server/cluster/testdata/{name}-v1.hex"));
    Target {
        name: "probe_messages",
        inputs: vec![golden("probe-request"), golden("probe-reply")],
        repair: &repair,
        decode: &decode,
        execution_count: 200_000,
        input_bytes_max: 1024,
        allocation: SMALL,
    }
    .check();
}

#[test]
fn peer_frame() {
    let decode = |input: &[u8]| {
        let Some(header) = input.first_chunk::<FRAME_HEADER_BYTES>() else {
            return Outcome::Refused("short".to_owned());
        };
        let max = 64 << 20;
        match FrameHeader::decode(header, max) {
            Ok(decoded) => {
                assert!(decoded.payload_bytes <= max);
                assert_eq!(&decoded.encode(), header);
                Outcome::Accepted
            }
            Err(error) => Outcome::Refused(error.to_string()),
        }
    };
    Target {
        name: "peer_frame",
        inputs: vec![corpus::golden("server/cluster/testdata/frame-header-v1.hex")],
        repair: &no_repair,
        decode: &decode,
        execution_count: 200_000,
        input_bytes_max: 64,
        allocation: SMALL,
    }
    .check();
}

/// The digits of a token. Source: docs/format-peer.md.
const DIGITS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";

fn from_digits(digits: &[u8]) -> Vec<u8> {
    let (mut bits, mut bit_count, mut bytes) = (0u64, 0, Vec::new());
    for digit in digits {
        let value = DIGITS.iter().position(|one| one == digit).unwrap_or(0);
        bits = (bits << 5 | value as u64) & 0xffff;
        bit_count += 5;
        if bit_count >= 8 {
            bit_count -= 8;
            bytes.push((bits >> bit_count) as u8);
        }
    }
    bytes
}

fn to_digits(bytes: &[u8]) -> Vec<u8> {
    let (mut bits, mut bit_count, mut digits) = (0u64, 0, Vec::new());
    for byte in bytes.iter().copied() {
        bits = (bits << 8 | u64::from(byte)) & 0xffff;
        bit_count += 8;
        while bit_count >= 5 {
            bit_count -= 5;
            digits.push(DIGITS[(bits >> bit_count) as usize & 31]);
        }
    }
    if bit_count > 0 {
        digits.push(DIGITS[(bits << (5 - bit_count)) as usize & 31]);
    }
    digits
}

#[test]
fn join_token() {
    const PREFIX: &str = "spindle";
    let word = corpus::text("server/cluster/testdata/token-v1.txt").trim().to_owned();
    let bytes = from_digits(word.strip_prefix(PREFIX).expect("a token").as_bytes());
    assert_eq!(to_digits(&bytes), &word.as_bytes()[PREFIX.len()..]);
    let decode = |input: &[u8]| {
        let word = format!("{PREFIX}{}", String::from_utf8_lossy(&to_digits(input)));
        match Token::parse(&word) {
            Ok(token) => {
                assert_eq!(token.to_word().as_str(), word);
                Outcome::Accepted
            }
            Err(error) => Outcome::Refused(error.to_string()),
        }
    };
    let repair = |input: &mut Vec<u8>| {
        if let Some((body, checksum)) = input.split_last_chunk_mut::<4>() {
            *checksum = crc32c(body).to_le_bytes();
        }
    };
    Target {
        name: "join_token",
        inputs: vec![bytes],
        repair: &repair,
        decode: &decode,
        execution_count: 50_000,
        input_bytes_max: 1024,
        allocation: SMALL,
    }
    .check();
}

#[test]
fn node_identity() {
    let dir = crate::dir_in_memory();
    Identity::generate("n1").and_then(|made| made.store(dir.path())).expect("an identity");
    let good = std::fs::read(dir.path().join("node/identity.json")).expect("a readable file");
    let decode =
        |input: &[u8]| Outcome::of(Identity::decode(input).map_err(|kind| format!("{kind:?}")));
    Target {
        name: "node_identity",
        inputs: vec![good],
        repair: &no_repair,
        decode: &decode,
        execution_count: 5000,
        input_bytes_max: 4096,
        allocation: LARGE,
    }
    .check();
}
