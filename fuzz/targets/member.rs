//! The ring of a member: batches of strangers, as an owner would send them.
//!
//! Invariant: batches that are refused change nothing, and those that are stored are found again, byte
//! for byte.

use crate::ring::{BATCH_ALIGN_BYTES, POOL, owners_files, repair};
use crate::seals::usize_at;
use crate::{LARGE, dir_in_memory};
use block::Position;
use bytes::Bytes;
use fuzz::{AllocationBound, Outcome, Target};
use std::path::Path;
use wal::{FollowerFound, FollowerLog, LogOptions};

fn open(dir: &Path) -> (FollowerLog, FollowerFound) {
    let (ring_bytes, file_bytes) = (512 << 10, 256 << 10);
    let options = LogOptions {
        ring_bytes,
        file_bytes,
        generation_bytes_max: file_bytes,
        ..LogOptions::default()
    };
    FollowerLog::open(dir, POOL, options).expect("what was stored opens")
}

/// Cuts bytes into batches by the lengths in their headers.
fn batches(mut bytes: &[u8]) -> Vec<Bytes> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let len = usize_at(bytes, 148).unwrap_or(0).clamp(1, 1 << 20).min(bytes.len());
        found.push(Bytes::copy_from_slice(&bytes[..len.max(BATCH_ALIGN_BYTES).min(bytes.len())]));
        bytes = &bytes[found.last().map_or(bytes.len(), Bytes::len)..];
    }
    found
}

#[test]
fn log_member() {
    let place = dir_in_memory();
    // One path for all, as errors name it.
    let dir = place.path().join("log");
    let decode = |input: &[u8]| {
        let _ = std::fs::remove_dir_all(&dir); // absent before the first
        let batches = batches(input.get(BATCH_ALIGN_BYTES..).unwrap_or_default());
        let (mut log, _) = open(&dir);
        let outcome = log.write(&batches);
        let is_stored = outcome.is_ok();
        drop(log);
        let (log, found) = open(&dir);
        assert!(!found.is_end_damaged, "a batch is whole or not there");
        let Err(error) = outcome else {
            let read = log.read(log.start().sequence, usize::MAX).expect("it is whole");
            let read: Vec<Bytes> = read.into_iter().map(|(_, bytes)| bytes).collect();
            assert_eq!(read, batches[batches.len() - read.len()..]);
            return Outcome::Accepted;
        };
        assert!(is_stored || log.tail() == Position::START, "a refusal changes nothing");
        Outcome::Refused(error.chain())
    };
    Target {
        name: "log_member",
        inputs: owners_files(),
        repair: &|input| repair(input),
        decode: &decode,
        execution_count: 400,
        input_bytes_max: 128 << 10,
        // A file is read whole.
        allocation: AllocationBound { fixed_bytes: 32 << 20, ..LARGE },
    }
    .check();
}
