//! The scan of a ring: a directory whose first file holds the input, as opening a pool and moving a
//! superseded log away read it.

use crate::log::{pool_key, seal_header};
use crate::seals::{put, put_checksum, usize_at};
use crate::{LARGE, dir_in_memory, runtime, write};
use block::seal::Algorithm;
use block::units::array_at;
use block::{Epoch, Lsn, VolumeId};
use fuzz::{AllocationBound, Outcome, Target};
use std::path::Path;
use wal::{EntryKind, Log, LogIdentity, LogOptions, NewEntry, Wait, find_superseded};

pub const POOL: [u8; 16] = *b"pool-pool-pool-p";
const FIRST: &str = "ring-00000.log";
pub const BATCH_ALIGN_BYTES: usize = 4096;
/// One in this many inputs is also opened, which starts threads and writes.
const OPEN_EACH: usize = 8;

fn options(algorithm: Algorithm) -> LogOptions {
    LogOptions {
        ring_bytes: 512 << 10,
        file_bytes: 256 << 10,
        generation_bytes_max: 256 << 10,
        payload_memory_bytes: 1 << 20,
        algorithm,
        ..LogOptions::default()
    }
}

fn open(dir: &Path, algorithm: Algorithm) -> block::Result<(Log, wal::Recovery)> {
    let identity = LogIdentity {
        pool: POOL,
        epoch: Epoch(9),
        boot_id: [7; 16],
        served_epoch: Epoch(0),
        configuration: 0,
    };
    Log::open(dir, identity, pool_key(), options(algorithm), Lsn::NONE)
}

/// Writes a log with some entries and returns its directory.
fn written(algorithm: Algorithm) -> tempfile::TempDir {
    let dir = dir_in_memory();
    let (log, _) = open(dir.path(), algorithm).expect("an empty directory");
    runtime().block_on(async {
        for index in 0..6u64 {
            let entry = NewEntry {
                volume: VolumeId(7),
                kind: if index % 3 == 2 { EntryKind::Trim } else { EntryKind::Write },
                start_sector: index * 8,
                sector_count: 8,
                payload: match index % 3 {
                    2 => bytes::Bytes::new(),
                    _ => vec![index as u8; 4096].into(),
                },
            };
            log.append(entry, Wait::Written).await.expect("there is room");
        }
        log.flush().await.expect("the directory works");
    });
    log.close().expect("the directory works");
    dir
}

/// Returns the contents of a file up to the last byte that is not zero.
fn contents(path: &Path) -> Vec<u8> {
    let mut bytes = std::fs::read(path).expect("the log made it");
    let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    bytes.truncate(end.next_multiple_of(BATCH_ALIGN_BYTES));
    bytes
}

/// Puts the checksums of the file's header and of each batch, wherever it is, right, and lets each
/// batch name the one before it.
pub fn repair(input: &mut [u8]) {
    put_checksum(input, 0..88, 88);
    let mut at = BATCH_ALIGN_BYTES;
    // Epoch, open id and checksum.
    let mut previous: Option<([u8; 8], [u8; 16], [u8; 4])> = None;
    while at < input.len() {
        let batch = &mut input[at..];
        if batch.starts_with(b"SPDLBTCH") {
            let bytes = usize_at(batch, 148).unwrap_or(0).clamp(BATCH_ALIGN_BYTES, 1 << 20);
            let end = bytes.min(batch.len());
            if let Some((epoch, open, checksum)) = previous {
                put(batch, 156, &checksum);
                put(batch, 160, &epoch);
                put(batch, 168, &open);
            }
            seal_header(&mut batch[..end], &pool_key());
            let names = (array_at(batch, 88), array_at(batch, 56), array_at(batch, 236));
            previous = match names {
                (Some(epoch), Some(open), Some(checksum)) => Some((epoch, open, checksum)),
                _ => None,
            };
        }
        at += BATCH_ALIGN_BYTES;
    }
}

/// Returns the first file of a log, for each cipher.
pub fn owners_files() -> Vec<Vec<u8>> {
    let dirs = [Algorithm::ChaCha20Poly1305, Algorithm::Aes256Gcm].map(written);
    dirs.iter().map(|dir| contents(&dir.path().join(FIRST))).collect()
}

#[test]
fn log_ring() {
    let dirs = [Algorithm::ChaCha20Poly1305, Algorithm::Aes256Gcm].map(written);
    let inputs: Vec<Vec<u8>> = dirs.iter().map(|dir| contents(&dir.path().join(FIRST))).collect();
    let other_files: Vec<(String, Vec<u8>)> = std::fs::read_dir(dirs[0].path())
        .expect("the log made it")
        .map(|entry| entry.expect("a readable entry"))
        .filter(|entry| entry.file_name() != FIRST)
        .map(|entry| {
            let name = entry.file_name().into_string().expect("plain names");
            (name, std::fs::read(entry.path()).unwrap_or_default())
        })
        .collect();
    let place = dir_in_memory();
    // One path for all, as errors name it.
    let dir = place.path().join("log");
    let decode = |input: &[u8]| {
        let _ = std::fs::remove_dir_all(&dir); // absent before the first
        std::fs::create_dir(&dir).expect("the place is ours");
        let mut first = input.to_vec();
        first.resize(256 << 10, 0);
        write(dir.join(FIRST), &first);
        for (name, bytes) in &other_files {
            write(dir.join(name), bytes);
        }
        let found = find_superseded(&dir, POOL, Epoch(u64::MAX));
        if input.iter().map(|byte| usize::from(*byte)).sum::<usize>().is_multiple_of(OPEN_EACH) {
            return match open(&dir, Algorithm::default()) {
                Ok((log, _)) => {
                    log.close().expect("the directory works");
                    Outcome::Accepted
                }
                Err(error) => Outcome::Refused(format!("open: {:?}", error.kind())),
            };
        }
        match found {
            Ok(Some(_)) => Outcome::Accepted,
            Ok(None) => Outcome::Refused("nothing was found".to_owned()),
            Err(error) => Outcome::Refused(error.chain()),
        }
    };
    Target {
        name: "log_ring",
        inputs,
        repair: &|input| repair(input),
        decode: &decode,
        execution_count: 400,
        input_bytes_max: 256 << 10,
        // The files are written from memory, and read whole.
        allocation: AllocationBound { fixed_bytes: 32 << 20, ..LARGE },
    }
    .check();
}
