//! The lines of the admin socket, from a client and from a daemon.
//!
//! Invariant: a request or reply that is read is written as a line that reads as the same.

use crate::{SMALL, no_repair};
use api::message::{decode_outcome, decode_request, encode_outcome, encode_request};
use fuzz::{AllocationBound, Outcome, Target, corpus};

/// A reply holds strings and lists of small numbers, each of which takes more than its text.
const REPLY: AllocationBound = AllocationBound { bytes_per_input_byte: 256, ..SMALL };

/// Returns the parts of the golden files of the command line under this heading, each as one line.
fn golden(heading: &str) -> Vec<String> {
    let dir = corpus::workspace().join("server/cli/testdata");
    let mut paths: Vec<_> = std::fs::read_dir(dir)
        .expect("the golden files are there")
        .map(|entry| entry.expect("a readable entry").path())
        .collect();
    paths.sort();
    let mut parts = Vec::new();
    for path in paths {
        let text = std::fs::read_to_string(path).expect("a readable file");
        for rest in text.split(&format!("-- {heading}\n")).skip(1) {
            let end = rest.find("\n-- ").or_else(|| rest.find("\n$ ")).unwrap_or(rest.len());
            let part = &rest[..end];
            let part = part.split("\n$ ").next().expect("the first part");
            let read = serde_json::from_str::<serde_json::Value>(part);
            parts.extend(read.ok().map(|value| value.to_string()));
        }
    }
    parts
}

fn text_of(line: &[u8]) -> &str {
    std::str::from_utf8(line).expect("lines are text").strip_suffix('\n').expect("a whole line")
}

#[test]
fn admin_request() {
    let requests = golden("request");
    assert!(requests.len() > 20, "{} golden requests", requests.len());
    let line = |request: String| format!("{{\"version\":1,\"request\":{request}}}").into_bytes();
    Target {
        name: "admin_request",
        inputs: requests.into_iter().map(line).collect(),
        repair: &no_repair,
        decode: &|input| {
            let Ok(text) = std::str::from_utf8(input) else {
                return Outcome::Refused("not text".to_owned());
            };
            match decode_request(text) {
                Ok(request) => {
                    let line = encode_request(&request).expect("it is as short as the input");
                    let again = decode_request(text_of(&line)).map_err(|error| error.chain());
                    assert_eq!(again.as_ref(), Ok(&request));
                    assert!(!request.timeout().is_zero());
                    Outcome::Accepted
                }
                Err(error) => Outcome::Refused(error.chain()),
            }
        },
        execution_count: 60_000,
        input_bytes_max: 4096,
        allocation: SMALL,
    }
    .check();
}

#[test]
fn admin_reply() {
    let replies = golden("json");
    assert!(replies.len() > 20, "{} golden replies", replies.len());
    let line = |reply: String| format!("{{\"version\":1,\"ok\":{reply}}}").into_bytes();
    let failure = br#"{"version":1,"error":{"kind":"fenced","message":"taken over"}}"#;
    Target {
        name: "admin_reply",
        inputs: replies.into_iter().map(line).chain([failure.to_vec()]).collect(),
        repair: &no_repair,
        decode: &|input| {
            let Ok(text) = std::str::from_utf8(input) else {
                return Outcome::Refused("not text".to_owned());
            };
            match decode_outcome(text) {
                Ok(reply) => {
                    let line = encode_outcome(&Ok(reply.clone())).expect("a reply can be encoded");
                    let again = decode_outcome(text_of(&line)).map_err(|error| error.chain());
                    assert_eq!(again.as_ref(), Ok(&reply));
                    Outcome::Accepted
                }
                Err(error) => Outcome::Refused(error.chain()),
            }
        },
        execution_count: 30_000,
        input_bytes_max: 16 << 10,
        allocation: REPLY,
    }
    .check();
}
