//! The files of the write log, and one batch.
//!
//! Invariant: outside the bytes that readers ignore on purpose, what decodes encodes to the same
//! bytes.

use crate::seals::{Direction, key_of, put, put_checksum, turn, usize_at};
use crate::{SMALL, no_repair};
use block::seal::{PoolKey, TAG_BYTES};
use block::units::{crc32c_parts, u32_at, u64_at};
use fuzz::{Outcome, Target, corpus};
use std::ops::Range;
use wal::{LogPart, reencode};

/// Compatible features, which every header may have and a reader ignores.
const COMPATIBLE: Range<usize> = 12..16;
/// The key of the golden files.
pub fn pool_key() -> PoolKey {
    PoolKey::new([0x11; 32])
}

/// Decodes `input`, and compares the encoded bytes with it outside `ignored`.
fn decode(part: LogPart, input: &[u8], ignored: &[Range<usize>]) -> Outcome {
    let encoded = match reencode(part, input, &pool_key()) {
        Ok(encoded) => encoded,
        Err(error) => return Outcome::Refused(error.chain()),
    };
    assert_eq!(reencode(part, &encoded, &pool_key()).ok().as_ref(), Some(&encoded), "stable");
    for (at, byte) in encoded.iter().enumerate() {
        let is_ignored = ignored.iter().any(|range| range.contains(&at));
        assert!(is_ignored || input.get(at) == Some(byte), "byte {at} was {:?}", input.get(at));
    }
    Outcome::Accepted
}

fn padded(mut golden: Vec<u8>, len: usize) -> Vec<u8> {
    golden.resize(len, 0);
    golden
}

#[test]
fn log_ring_file() {
    let golden = padded(corpus::golden("replication/log/testdata/file-v2.hex"), 4096);
    Target {
        name: "log_ring_file",
        inputs: vec![golden],
        repair: &|input| put_checksum(input, 0..88, 88),
        // There is no cipher, and nothing behind the checksum.
        decode: &|input| decode(LogPart::RingFile, input, &[10..12, COMPATIBLE, 88..4096]),
        execution_count: 100_000,
        input_bytes_max: 8192,
        allocation: SMALL,
    }
    .check();
}

#[test]
fn log_file_count() {
    Target {
        name: "log_file_count",
        inputs: vec![corpus::golden("replication/log/testdata/made-v1.hex")],
        repair: &|input| put_checksum(input, 0..16, 16),
        decode: &|input| decode(LogPart::FileCount, input, &[10..12, 16..20]),
        execution_count: 100_000,
        input_bytes_max: 64,
        allocation: SMALL,
    }
    .check();
}

#[test]
fn log_state() {
    let golden = padded(corpus::golden("replication/log/testdata/state-v1.hex"), 4096);
    Target {
        name: "log_state",
        inputs: vec![golden],
        repair: &|input| put_checksum(input, 0..76, 76),
        decode: &|input| decode(LogPart::State, input, std::slice::from_ref(&(80..4096))),
        execution_count: 100_000,
        input_bytes_max: 8192,
        allocation: SMALL,
    }
    .check();
}

const BATCH_HEADER_BYTES: usize = 256;
const ROW_BYTES: usize = 32;
/// Rows that are sealed. Chosen by hand: more than any input has.
const ROW_COUNT_MAX: usize = 1024;

/// Returns where the payload area of a batch begins.
fn payloads_at(batch: &[u8]) -> Option<usize> {
    let count = usize_at(batch, 144)?;
    let table = if count == 0 { 0 } else { count.checked_mul(ROW_BYTES)? + TAG_BYTES };
    BATCH_HEADER_BYTES.checked_add(table)
}

/// Seals or opens the table and the payloads of a batch in place.
pub fn turn_batch(direction: Direction, batch: &mut [u8], pool: &PoolKey) -> Option<()> {
    let key = key_of(pool, batch.get(10), batch.get(184..200)?, "log batch");
    let (count, first_lsn) = (usize_at(batch, 144)?, u64_at(batch, 112)?);
    let head = batch.get(..232)?.to_vec();
    let table = BATCH_HEADER_BYTES..payloads_at(batch)?.saturating_sub(TAG_BYTES);
    if direction == Direction::Open && count > 0 {
        turn(direction, &key, u64::MAX, &head, batch, table.clone());
    }
    for index in 0..count.min(ROW_COUNT_MAX) {
        let row_at = BATCH_HEADER_BYTES + index * ROW_BYTES;
        let Some(row) = batch.get(row_at..row_at + ROW_BYTES) else { break };
        let (offset, bytes) = (usize_at(row, 24)?, usize_at(row, 28)?);
        let lsn = first_lsn.wrapping_add(index as u64);
        let associated = [row, &lsn.to_le_bytes()].concat();
        if bytes > 0 {
            let at = payloads_at(batch)? + offset;
            turn(direction, &key, index as u64, &associated, batch, at..at + bytes);
        }
    }
    if direction == Direction::Seal && count > 0 {
        turn(direction, &key, u64::MAX, &head, batch, table);
    }
    Some(())
}

/// Seals a batch in clear. An even checksum, which is written over, asks for lengths that fit, too.
pub fn repair_batch(batch: &mut Vec<u8>, pool: &PoolKey) -> Option<()> {
    if u32_at(batch, 232)?.is_multiple_of(2) {
        let used = payloads_at(batch)?.checked_add(usize_at(batch, 152)?)?;
        let whole = used.next_multiple_of(4096);
        if whole <= 1 << 20 {
            put(batch, 148, &u32::try_from(whole).expect("below 2^20").to_le_bytes());
            batch.resize(whole.max(batch.len()), 0);
        }
    }
    turn_batch(Direction::Seal, batch, pool);
    seal_header(batch, pool)
}

/// Puts the checksums of a batch and the tag of its header right, which needs no table in clear.
pub fn seal_header(batch: &mut [u8], pool: &PoolKey) -> Option<()> {
    put_checksum(batch, 0..232, 232);
    let key = key_of(pool, batch.get(10), batch.get(184..200)?, "log batch");
    let tag = key.seal(u64::MAX - 1, batch.get(..232)?, &mut []);
    put(batch, 240, &tag);
    let whole = batch.get(..usize_at(batch, 148)?)?;
    let checksum = crc32c_parts(&[whole.get(..236)?, whole.get(240..)?]);
    put(batch, 236, &checksum.to_le_bytes());
    Some(())
}

fn decode_batch(input: &[u8]) -> Outcome {
    let (compatible, features) = (u32_at(input, 12), u32_at(input, 20));
    let encoded = reencode(LogPart::Batch, input, &pool_key());
    let encoded_features = encoded.as_ref().ok().and_then(|encoded| u32_at(encoded, 20));
    // The seals bind the feature bits: with bits that are ignored, all of them differ.
    if let Ok(encoded) = encoded
        && (compatible != Some(0) || features != encoded_features)
    {
        assert!(reencode(LogPart::Batch, &encoded, &pool_key()).is_ok(), "it decodes again");
        return Outcome::Accepted;
    }
    let used = payloads_at(input).zip(usize_at(input, 152)).map_or(0, |(at, bytes)| at + bytes);
    decode(LogPart::Batch, input, &[236..240, used..usize::MAX])
}

#[test]
fn log_batch() {
    let mut inputs: Vec<Vec<u8>> = ["aes256gcm", "chacha20poly1305", "no-entries"]
        .into_iter()
        .map(|name| corpus::golden(&format!("replication/log/testdata/batch-v3-{name}.hex")))
        .map(|golden| padded(golden, 4096))
        .collect();
    for input in &mut inputs {
        assert_eq!(decode_batch(input), Outcome::Accepted);
        turn_batch(Direction::Open, input, &pool_key()).expect("a golden batch is whole");
    }
    Target {
        name: "log_batch",
        inputs,
        repair: &|input| {
            repair_batch(input, &pool_key());
        },
        decode: &decode_batch,
        execution_count: 60_000,
        input_bytes_max: 16 << 10,
        allocation: SMALL,
    }
    .check();
}

/// Seals or opens payloads and table of a spill file in place.
fn turn_spill_file(direction: Direction, file: &mut [u8]) -> Option<()> {
    let key = key_of(&pool_key(), file.get(10), file.get(40..56)?, "side file");
    let count = usize_at(file, 84)?;
    let payload_bytes = usize::try_from(u64_at(file, 88)?).ok()?;
    let table_at = payload_bytes.checked_add(128)?;
    let table = table_at..table_at.checked_add(count.checked_mul(ROW_BYTES)?)?;
    // The seal binds the header without the features that are ignored.
    let mut head = file.get(..96)?.to_vec();
    head[COMPATIBLE].fill(0);
    if direction == Direction::Open {
        turn(direction, &key, u64::MAX, &head, file, table.clone());
    }
    for index in 0..count.min(ROW_COUNT_MAX) {
        let row_at = table_at.checked_add(index * ROW_BYTES)?;
        let Some(row) = file.get(row_at..row_at.checked_add(ROW_BYTES)?) else { break };
        let (place, bytes) = (u64_at(row, 16)?, usize_at(row, 24)?);
        let row = row.to_vec();
        if row.get(28) == Some(&1) {
            let Ok(place) = usize::try_from(place) else { continue };
            let Some(at) = place.checked_add(128) else { continue };
            let Some(end) = at.checked_add(bytes) else { continue };
            turn(direction, &key, index as u64, &row, file, at..end);
        }
    }
    if direction == Direction::Seal {
        turn(direction, &key, u64::MAX, &head, file, table.clone());
        put_checksum(file, table.start..table.end.checked_add(TAG_BYTES)?, 96);
    }
    Some(())
}

#[test]
fn spill_file() {
    let mut inputs: Vec<Vec<u8>> = ["aes256gcm", "chacha20poly1305"]
        .into_iter()
        .map(|name| corpus::golden(&format!("replication/log/testdata/spill-v1-{name}.hex")))
        .collect();
    for input in &mut inputs {
        turn_spill_file(Direction::Open, input).expect("a golden file is whole");
    }
    Target {
        name: "spill_file",
        inputs,
        repair: &|input| {
            turn_spill_file(Direction::Seal, input);
            put_checksum(input, 0..100, 100);
        },
        decode: &|input| decode(LogPart::SpillFile, input, &[COMPATIBLE, 100..104]),
        execution_count: 100_000,
        input_bytes_max: 16 << 10,
        allocation: SMALL,
    }
    .check();
}

/// The decoders under bytes that nothing has repaired, with every kind of magic.
#[test]
fn log_any_bytes() {
    let dir = "replication/log/testdata";
    let names = ["file-v2", "made-v1", "state-v1", "batch-v3-aes256gcm", "spill-v1-aes256gcm"];
    let parts =
        [LogPart::RingFile, LogPart::FileCount, LogPart::State, LogPart::Batch, LogPart::SpillFile];
    Target {
        name: "log_any_bytes",
        inputs: names
            .into_iter()
            .map(|name| padded(corpus::golden(&format!("{dir}/{name}.hex")), 20))
            .chain([corpus::golden(&format!("{dir}/made-v1.hex"))])
            .collect(),
        repair: &no_repair,
        decode: &|input| {
            let outcomes = parts.map(|part| reencode(part, input, &pool_key()).is_ok());
            match outcomes.contains(&true) {
                true => Outcome::Accepted,
                false => Outcome::Refused(String::new()),
            }
        },
        execution_count: 50_000,
        input_bytes_max: 8192,
        allocation: SMALL,
    }
    .check();
}
