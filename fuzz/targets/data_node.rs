//! The messages between an owner and a data node.
//!
//! Invariant: a message that is read is written again as the same bytes.

use crate::{SMALL, no_repair};
use bytes::Bytes;
use dnode::messages::{Answer, Request};
use fuzz::{Outcome, Target};

/// The messages of the golden file: the kind, and the body.
fn golden() -> Vec<Vec<u8>> {
    let text = include_str!("../../server/dnode/testdata/messages-v1.hex");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let bytes = |line: &str| {
        let digits: String = line.split_whitespace().collect();
        let pairs = (0..digits.len()).step_by(2);
        pairs.map(|at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hexadecimal")).collect()
    };
    lines.map(bytes).collect()
}

#[test]
fn data_node_messages() {
    let decode = |input: &[u8]| {
        let Some((kind, body)) = input.split_first() else {
            return Outcome::Refused("no kind".to_owned());
        };
        let body = Bytes::copy_from_slice(body);
        let request = Request::decode(*kind, &body);
        let answer = Answer::decode(*kind, &body);
        assert!(request.is_none() || answer.is_none(), "a message has one sender");
        let again = request.map(|one| one.encode()).or_else(|| answer.map(|one| one.encode()));
        match again {
            Some((again, parts)) => {
                assert_eq!((again, parts.concat()), (*kind, body.to_vec()));
                Outcome::Accepted
            }
            None => Outcome::Refused("no message".to_owned()),
        }
    };
    Target {
        name: "data_node_messages",
        inputs: golden(),
        repair: &no_repair,
        decode: &decode,
        execution_count: 200_000,
        input_bytes_max: 4 << 10,
        allocation: SMALL,
    }
    .check();
}
