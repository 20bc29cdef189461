//! Segments: header, frames, directory and footer.
//!
//! Invariants:
//! - What a decoder of one part takes, the encoder of that part writes as the same bytes.
//! - A frame that opens has exactly the size that its header names.

use crate::SMALL;
use crate::seals::{Direction, key_of, put, put_checksum, turn, usize_at};
use block::Epoch;
use block::seal::{Algorithm, PoolKey, TAG_BYTES};
use block::units::u32_at;
use fuzz::{AllocationBound, Outcome, Target, corpus};
use std::ops::Range;
use tests::seed::Random;
use tiering::segment::format::{
    Codec, DIRECTORY_NONCE, DirectoryEntry, ENTRY_BYTES, FOOTER_BYTES, FRAME_HEADER_BYTES, Footer,
    FrameHeader, HEADER_BYTES, KEY_PURPOSE, SegmentHeader, frame_aad, frame_crc,
};
use tiering::segment::read::{check_object, walk_frames};
use tiering::segment::{SegmentBuilder, SegmentNumber, SegmentSeed, open_directory};
use tiering::{KeyId, VolumeKeys, segment};

/// The pool's key of the golden files, which is also that of the frames here.
fn pool_key() -> PoolKey {
    PoolKey::new([7; 32])
}

/// Returns the place of the directory without its tag, according to the footer.
fn directory_range(object: &[u8]) -> Option<Range<usize>> {
    let footer = object.get(object.len().checked_sub(FOOTER_BYTES)?..)?;
    let (at, len) = (usize_at(footer, 12)?, usize_at(footer, 16)?);
    Some(at..at.checked_add(len)?.checked_sub(TAG_BYTES)?)
}

/// Seals or opens frames and directory of an object in place.
fn turn_object(direction: Direction, object: &mut [u8]) -> Option<()> {
    let key = key_of(&pool_key(), object.get(10), object.get(72..88)?, KEY_PURPOSE);
    let id = object.get(72..88)?.try_into().ok()?;
    let end = object.len().checked_sub(FOOTER_BYTES)?;
    let directory = directory_range(object)?;
    let mut at = HEADER_BYTES;
    while object.get(at..at + 2).is_some_and(|magic| magic == b"Fr") {
        let (index, bytes) = (usize_at(object, at + 4)?, usize_at(object, at + 8)?);
        let body = at + FRAME_HEADER_BYTES..at.checked_add(bytes)?.checked_sub(TAG_BYTES)?;
        if body.start > body.end || body.end + TAG_BYTES > end {
            break;
        }
        let associated = frame_aad(&id, object.get(at..body.start)?);
        turn(direction, &key, index as u64, &associated, object, body.clone());
        at = body.end + TAG_BYTES;
    }
    if direction == Direction::Seal {
        put_frame_checksums(object, &id, directory.clone());
        put_checksum(object, 0..92, 92);
    }
    let mut footer = object.get(end..end + 56)?.to_vec();
    footer[48..52].fill(0);
    let associated = [object.get(..HEADER_BYTES)?, &footer].concat();
    turn(direction, &key, DIRECTORY_NONCE, &associated, object, directory.clone());
    if direction == Direction::Seal {
        put_checksum(object, directory.start..directory.end + TAG_BYTES, end + 48);
        put_checksum(object, end..end + 60, end + 60);
    }
    Some(())
}

/// Writes the checksum of each frame to its header and, in a directory that is not compressed, to
/// its entry.
fn put_frame_checksums(object: &mut [u8], id: &[u8; 16], directory: Range<usize>) {
    let mut at = HEADER_BYTES;
    while let Some(bytes) = usize_at(object, at + 8) {
        let Some(frame) = object.get(at..at.saturating_add(bytes)) else { break };
        if !frame.starts_with(b"Fr") || bytes < FRAME_HEADER_BYTES {
            break;
        }
        let checksum = frame_crc(id, frame).to_le_bytes();
        put(object, at + 12, &checksum);
        at += bytes;
    }
    if object.get(object.len() - FOOTER_BYTES + 52) != Some(&0) {
        return;
    }
    for entry_at in directory.step_by(ENTRY_BYTES) {
        let Some(frame_at) = usize_at(object, entry_at + 16) else { break };
        if let Some(checksum) = u32_at(object, frame_at.saturating_add(12)) {
            put(object, entry_at + 24, &checksum.to_le_bytes());
        }
    }
}

/// Seals an object in clear. An even checksum of the footer asks for a length that fits, too.
fn repair(object: &mut [u8]) {
    let end = object.len();
    if let Some(footer) = end.checked_sub(FOOTER_BYTES)
        && usize_at(object, footer + 60).is_some_and(|checksum| checksum.is_multiple_of(2))
        && let Ok(len) = u32::try_from(end)
    {
        put(object, footer + 20, &len.to_le_bytes());
        let directory = usize_at(object, footer + 12).unwrap_or(0);
        let bytes = u32::try_from(footer.saturating_sub(directory)).unwrap_or(0);
        put(object, footer + 16, &bytes.to_le_bytes());
    }
    turn_object(Direction::Seal, object);
}

/// Builds an object in clear, with a directory that is not compressed.
fn built(algorithm: Algorithm, frames: &[(u64, Vec<u8>)]) -> Vec<u8> {
    let seed = SegmentSeed {
        pool: *b"pool identity 16",
        epoch: Epoch(3),
        number: SegmentNumber(17),
        id: *b"0123456789abcdef",
        algorithm,
        key: KeyId::POOL,
    };
    let mut builder = SegmentBuilder::new(seed, &pool_key(), 1, 0);
    for (first_block, plain) in frames {
        builder.push(1, *first_block, plain);
    }
    let sealed = builder.finish();
    let directory = open_directory(&pool_key(), &sealed.bytes, &sealed.bytes).expect("just built");
    let raw: Vec<u8> = directory.entries.iter().flat_map(DirectoryEntry::encode).collect();
    let end = directory_range(&sealed.bytes).expect("just built").start;
    let mut object = sealed.bytes.to_vec();
    turn_object(Direction::Open, &mut object).expect("just built");
    object.truncate(end);
    object.extend_from_slice(&raw);
    object.extend_from_slice(&[0; TAG_BYTES]);
    let footer = Footer {
        frame_count: sealed.info.frame_count,
        directory_offset: u32::try_from(end).expect("small"),
        directory_bytes: u32::try_from(raw.len() + TAG_BYTES).expect("small"),
        object_bytes: u32::try_from(object.len() + FOOTER_BYTES).expect("small"),
        number: SegmentNumber(17),
        id: seed.id,
        directory_crc: 0,
        directory_codec: Codec::Raw,
    };
    object.extend_from_slice(&footer.encode());
    object
}

fn decode(object: &[u8]) -> Outcome {
    if let Ok(header) = SegmentHeader::decode(object) {
        assert_eq!(header.encode()[..], object[..HEADER_BYTES]);
        for (at, frame) in walk_frames(&header.id, object) {
            assert_eq!(frame.len(), at.sealed_bytes as usize);
            let found = FrameHeader::decode(frame).expect("it was verified");
            assert_eq!(found.encode()[..], frame[..FRAME_HEADER_BYTES]);
        }
    }
    if let Some(start) = object.len().checked_sub(FOOTER_BYTES)
        && let Ok(footer) = Footer::decode(&object[start..])
    {
        assert_eq!(footer.encode()[..], object[start..]);
    }
    let report = match check_object(&pool_key(), &VolumeKeys::default(), object) {
        Ok(report) => report,
        Err(error) => return Outcome::Refused(error.to_string()),
    };
    let entries = &report.directory.entries;
    assert_eq!(entries.len(), report.directory.info.frame_count as usize);
    let plain_bytes: u64 = entries.iter().map(|entry| u64::from(entry.block_count) * 4096).sum();
    match report.damaged.first() {
        None => {
            assert_eq!(report.plain_bytes, plain_bytes);
            Outcome::Accepted
        }
        Some((_, why)) => {
            assert!(report.plain_bytes <= plain_bytes && report.damage().is_some());
            Outcome::Refused(format!("a frame: {why}"))
        }
    }
}

#[test]
fn segment() {
    let mut random = Random::new(1, 0);
    let mut noise = vec![0; 4096];
    random.fill(&mut noise);
    let text = b"hello ".repeat(4096 * 3 / 6 + 1)[..4096 * 3].to_vec();
    let mut inputs = vec![
        built(Algorithm::Aes256Gcm, &[(2, noise.clone()), (1 << 40, text.clone())]),
        built(Algorithm::ChaCha20Poly1305, &[(0, text), (9, vec![0; 16 * 4096])]),
        built(Algorithm::Aes256Gcm, &[]),
    ];
    for name in ["aes", "chacha"] {
        let mut golden = corpus::golden(&format!("tiering/testdata/segment-v1-{name}.hex"));
        assert_eq!(decode(&golden), Outcome::Accepted);
        turn_object(Direction::Open, &mut golden).expect("a golden segment is whole");
        inputs.push(golden);
    }
    // Its frames are under another key, so only their checksums are read.
    inputs.push(corpus::golden("tiering/testdata/segment-v1-volume-key.hex"));
    Target {
        name: "segment",
        inputs,
        repair: &|input| repair(input),
        decode: &decode,
        execution_count: 25_000,
        input_bytes_max: 64 << 10,
        // An entry of the directory takes 32 bytes in the object and 40 in memory; a frame of 33
        // bytes may expand to 64 KiB, one at a time. A directory expands by the factor of zstd.
        allocation: AllocationBound { fixed_bytes: 512 << 10, ..SMALL },
    }
    .check();
}

/// The name of an object in a listing.
#[test]
fn segment_name() {
    let name = segment::SegmentName {
        epoch: Epoch(3),
        number: SegmentNumber(17),
        id: *b"0123456789abcdef",
    };
    let path = name.object_path().to_string();
    Target {
        name: "segment_name",
        inputs: vec![path.into_bytes()],
        repair: &crate::no_repair,
        decode: &|input| {
            let text = String::from_utf8_lossy(input);
            let path = object_store::path::Path::from(text.as_ref());
            match segment::SegmentName::parse(&path) {
                Some(name) => {
                    assert_eq!(name.object_path(), path);
                    Outcome::Accepted
                }
                None => Outcome::Refused(String::new()),
            }
        },
        execution_count: 50_000,
        input_bytes_max: 512,
        allocation: SMALL,
    }
    .check();
}
