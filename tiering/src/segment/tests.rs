//! Guarantees of the segment format.

use super::build::{SealedSegment, SegmentBuilder, SegmentSeed};
use super::format::*;
use super::read::*;
use super::*;
use crate::keys::{KeyId, VolumeKeys};
use crate::testing::{Rng, seeds};
use block::env::SystemRandom;
use block::seal::PoolKey;
use object_store::path::Path;

const POOL: [u8; 16] = *b"pool identity 16";

fn pool_key() -> PoolKey {
    PoolKey::new([7; 32])
}

fn seed_of(algorithm: Algorithm) -> SegmentSeed {
    let id = *b"0123456789abcdef";
    SegmentSeed {
        pool: POOL,
        epoch: Epoch(3),
        number: SegmentNumber(17),
        id,
        algorithm,
        key: KeyId::POOL,
    }
}

/// Builds frames of every size, some of which compress.
fn build(rng: &mut Rng, algorithm: Algorithm, frames: usize) -> (SealedSegment, Vec<Built>) {
    let mut builder = SegmentBuilder::new(seed_of(algorithm), &pool_key(), 1, 1 << 20);
    let mut built = Vec::new();
    for _ in 0..frames {
        let block_count = rng.below(16) + 1;
        let random_percent = rng.below(3) * 50;
        let plain = rng.bytes(block_count as usize * 4096, random_percent);
        let (layer, first_block) = (rng.below(9), rng.next_u64());
        let at = builder.push(layer, first_block, &plain);
        built.push(Built { at, plain, layer, first_block });
    }
    (builder.finish(), built)
}

struct Built {
    at: FrameAt,
    plain: Vec<u8>,
    layer: u64,
    first_block: u64,
}

fn open(sealed: &SealedSegment, at: FrameAt) -> Result<Bytes, SegmentError> {
    let key = segment_key(&pool_key(), &sealed.info);
    let mut frame = frame_of(&sealed.bytes, at)?.to_vec();
    open_frame(&key, &sealed.info.id, at, &mut frame)
}
use bytes::Bytes;

#[test]
fn pushed_frames_read_back_and_are_listed() {
    for seed in seeds(20) {
        let mut rng = Rng::new(seed);
        let algorithm = [Algorithm::ChaCha20Poly1305, Algorithm::Aes256Gcm][(seed % 2) as usize];
        let frames = rng.below(40) as usize;
        let (sealed, built) = build(&mut rng, algorithm, frames);
        assert_eq!(sealed.info.object_bytes as usize, sealed.bytes.len(), "SEED={seed}");
        let tail_bytes = directory_tail_bytes(&sealed.bytes).unwrap();
        let tail = &sealed.bytes[sealed.bytes.len() - tail_bytes..];
        let directory = open_directory(&pool_key(), &sealed.bytes[..HEADER_BYTES], tail).unwrap();
        assert_eq!(directory.info, sealed.info, "SEED={seed}");
        assert_eq!(directory.pool, POOL);
        assert_eq!(directory.entries.len(), built.len());
        for (entry, built) in directory.entries.iter().zip(&built) {
            assert_eq!((entry.at, entry.layer), (built.at, built.layer), "SEED={seed}");
            assert_eq!(entry.first_block, built.first_block, "SEED={seed}");
            assert_eq!(usize::from(entry.block_count) * 4096, built.plain.len());
            assert!(open(&sealed, built.at).unwrap() == built.plain, "SEED={seed} {:?}", built.at);
        }
        let walked: Vec<FrameAt> =
            walk_frames(&sealed.info.id, &sealed.bytes).map(|(at, _)| at).collect();
        assert!(walked.iter().eq(built.iter().map(|built| &built.at)), "SEED={seed}");
        let report = check_object(&pool_key(), &VolumeKeys::default(), &sealed.bytes).unwrap();
        let plain_bytes: usize = built.iter().map(|built| built.plain.len()).sum();
        assert_eq!((report.plain_bytes, report.damaged.len()), (plain_bytes as u64, 0));
    }
}

#[test]
fn a_frame_that_does_not_shrink_by_an_eighth_is_stored_raw() {
    let mut builder = SegmentBuilder::new(seed_of(Algorithm::default()), &pool_key(), 3, 1 << 20);
    let random = Rng::new(1).bytes(65536, 100);
    let at = builder.push(1, 0, &random);
    assert_eq!(at.sealed_bytes, FRAME_BYTES_MAX);
    let at = builder.push(1, 16, &[0; 65536]);
    assert!(at.sealed_bytes < 100, "{at:?}");
}

#[test]
fn every_flipped_bit_of_a_small_segment_is_found_where_it_lies() {
    let mut rng = Rng::new(5);
    let mut builder = SegmentBuilder::new(seed_of(Algorithm::default()), &pool_key(), 1, 0);
    let frames: Vec<FrameAt> = [0, 60, 100]
        .into_iter()
        .map(|percent| builder.push(2, 9, &rng.bytes(4096, percent)))
        .collect();
    let sealed = builder.finish();
    for byte in 0..sealed.bytes.len() {
        for bit in 0..8 {
            let mut damaged = sealed.bytes.to_vec();
            damaged[byte] ^= 1 << bit;
            let damaged = SealedSegment { info: sealed.info, bytes: damaged.into() };
            let mut is_in_frame = false;
            for &at in &frames {
                let range = at.offset as usize..(at.offset + at.sealed_bytes) as usize;
                let is_here = range.contains(&byte);
                is_in_frame |= is_here;
                assert_eq!(open(&damaged, at).is_err(), is_here, "byte {byte}, bit {bit}, {at:?}");
            }
            let directory = open_directory(&pool_key(), &damaged.bytes, &damaged.bytes);
            assert_eq!(directory.is_err(), !is_in_frame, "byte {byte}, bit {bit}");
            let clean = check_object(&pool_key(), &VolumeKeys::default(), &damaged.bytes)
                .is_ok_and(|report| report.damaged.is_empty());
            assert!(!clean, "byte {byte}, bit {bit}");
        }
    }
}

#[test]
fn a_forged_checksum_does_not_help() {
    let (sealed, built) = build(&mut Rng::new(2), Algorithm::Aes256Gcm, 3);
    let key = segment_key(&pool_key(), &sealed.info);
    let at = built[1].at;
    let whole = frame_of(&sealed.bytes, at).unwrap();
    for byte in (0..whole.len()).filter(|byte| !(12..16).contains(byte)).step_by(7) {
        let mut frame = whole.to_vec();
        frame[byte] ^= 0x10;
        let crc = frame_crc(&sealed.info.id, &frame);
        frame[12..16].copy_from_slice(&crc.to_le_bytes());
        assert!(open_frame(&key, &sealed.info.id, at, &mut frame).is_err(), "byte {byte}");
    }
}

#[test]
fn a_frame_opens_only_in_its_own_place_with_its_dedicated_key() {
    let (sealed, built) = build(&mut Rng::new(3), Algorithm::default(), 4);
    let key = segment_key(&pool_key(), &sealed.info);
    let frame = |at| frame_of(&sealed.bytes, at).unwrap().to_vec();
    let wrong_index = FrameAt { frame_index: 2, ..built[1].at };
    let error = open_frame(&key, &sealed.info.id, wrong_index, &mut frame(built[1].at));
    assert_eq!(error, Err(SegmentError::Field("frame index or size")));
    let error = open_frame(&key, b"another identity", built[1].at, &mut frame(built[1].at));
    assert_eq!(error, Err(SegmentError::Checksum), "even without a key");
    let other_key = segment_key(&PoolKey::new([8; 32]), &sealed.info);
    let error = open_frame(&other_key, &sealed.info.id, built[1].at, &mut frame(built[1].at));
    assert_eq!(error, Err(SegmentError::Authentication));
    let error = SegmentError::Authentication.into_error("open frame 1".into());
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert_eq!(SegmentError::Codec(9).into_error("".into()).kind(), ErrorKind::Unsupported);
}

#[test]
fn decoders_take_any_bytes() {
    for seed in seeds(300) {
        let mut rng = Rng::new(seed);
        let (sealed, built) = build(&mut rng, Algorithm::default(), 3);
        let count = rng.below(200) as usize;
        let random = rng.bytes(count, 100);
        assert!(SegmentHeader::decode(&random).is_err(), "SEED={seed}");
        assert!(Footer::decode(&random).is_err(), "SEED={seed}");
        assert!(check_object(&pool_key(), &VolumeKeys::default(), &random).is_err(), "SEED={seed}");
        let _ = (FrameHeader::decode(&random), DirectoryEntry::decode(0, &random));
        let key = segment_key(&pool_key(), &sealed.info);
        assert!(open_frame(&key, &sealed.info.id, built[0].at, &mut random.clone()).is_err());
        // Truncate the object or overwrite a part of it, then fix the checksums of header and
        // footer.
        let mut bytes = sealed.bytes.to_vec();
        bytes.truncate(bytes.len() - rng.below(64) as usize);
        for _ in 0..rng.below(8) {
            let at = rng.below(bytes.len() as u64) as usize;
            bytes[at] = rng.next_u64() as u8;
        }
        if bytes != sealed.bytes {
            let is_clean = check_object(&pool_key(), &VolumeKeys::default(), &bytes)
                .is_ok_and(|r| r.damaged.is_empty());
            assert!(!is_clean, "SEED={seed}");
        }
        let mut footer = sealed.bytes[sealed.bytes.len() - FOOTER_BYTES..].to_vec();
        footer[8 + rng.below(44) as usize] = rng.next_u64() as u8;
        let crc = block::units::crc32c(&footer[..60]);
        footer[60..].copy_from_slice(&crc.to_le_bytes());
        let tail_start = sealed.bytes.len() - directory_tail_bytes(&sealed.bytes).unwrap();
        let mut tail = sealed.bytes[tail_start..].to_vec();
        let end = tail.len() - FOOTER_BYTES;
        let is_same = tail[end..] == footer[..];
        tail[end..].copy_from_slice(&footer);
        let opened = open_directory(&pool_key(), &sealed.bytes, &tail);
        assert_eq!(opened.is_ok(), is_same, "SEED={seed}: the footer is authenticated");
    }
}

#[test]
fn unknown_versions_and_features_are_named_not_guessed() {
    let (sealed, _) = build(&mut Rng::new(4), Algorithm::default(), 1);
    let with = |at: usize, value: u8| {
        let mut header = sealed.bytes[..HEADER_BYTES].to_vec();
        header[at] = value;
        let crc = block::units::crc32c(&header[..92]);
        header[92..].copy_from_slice(&crc.to_le_bytes());
        SegmentHeader::decode(&header)
    };
    assert_eq!(with(8, 2), Err(SegmentError::Version(2)));
    assert_eq!(with(32, 4), Err(SegmentError::Features(4)));
    assert_eq!(with(10, 77), Err(SegmentError::Field("algorithm")));
    for code in [1, 0x80, 0xff] {
        assert_eq!(with(11, code), Err(SegmentError::Erasure(code)));
        assert!(SegmentError::Erasure(code).is_unsupported(), "no byte is wrong");
    }
    assert_eq!(with(16, 4).unwrap().features_compatible, 4);
    assert_eq!(with(24, 4).unwrap().features_read_only, 4);
}

#[test]
fn a_bomb_is_not_inflated() {
    // A valid frame whose content decompresses to more than its header says.
    let (sealed, _) = build(&mut Rng::new(6), Algorithm::default(), 0);
    let key = segment_key(&pool_key(), &sealed.info);
    for (plain_bytes, block_count) in [(1 << 20, 1), (4097, 1), (4095, 1), (4096, 2)] {
        let mut content = Vec::with_capacity(1 << 16);
        zstd_safe::compress(&mut content, &vec![0u8; plain_bytes], 1).unwrap();
        let sealed_bytes = (content.len() + 32) as u32;
        let header = FrameHeader { codec: 1, block_count, frame_index: 0, sealed_bytes, crc: 0 };
        let mut frame = [&header.encode()[..], &content].concat();
        let aad = frame_aad(&sealed.info.id, &frame);
        let tag = key.seal(0, &aad, &mut frame[16..]);
        frame.extend_from_slice(&tag);
        let crc = frame_crc(&sealed.info.id, &frame);
        frame[12..16].copy_from_slice(&crc.to_le_bytes());
        let at = FrameAt { frame_index: 0, offset: 96, sealed_bytes };
        let opened = open_frame(&key, &sealed.info.id, at, &mut frame);
        assert_eq!(opened, Err(SegmentError::Decompress), "{plain_bytes}");
    }
}

#[test]
fn object_paths_are_parsed_back_and_nothing_else_is() {
    let (sealed, _) = build(&mut Rng::new(4), Algorithm::default(), 0);
    let path = sealed.info.object_path();
    let text = "segments/0000000000000003/0000000000000011-30313233343536373839616263646566";
    assert_eq!(path.as_ref(), text);
    let parsed = SegmentName::parse(&path);
    assert_eq!(parsed, Some(sealed.info.name()));
    for wrong in [
        "segment/0000000000000003/0000000000000011-30313233343536373839616263646566",
        "segments/0000000000000003/0000000000000011-30313233343536373839616263646566/x",
        "segments/000000000000003/0000000000000011-30313233343536373839616263646566",
        "segments/0000000000000003/+000000000000011-30313233343536373839616263646566",
        "segments/0000000000000003/0000000000000011-3031323334353637383961626364656F",
        "segments/0000000000000003/0000000000000011",
        "segments",
    ] {
        assert_eq!(SegmentName::parse(&Path::from(wrong)), None, "{wrong}");
    }
}

#[test]
fn seeds_have_fresh_ids() {
    let make =
        || SegmentSeed::new(POOL, Epoch(1), SegmentNumber(1), Algorithm::default(), &SystemRandom);
    assert_ne!(make().id, make().id);
}

/// Golden bytes: data that version 1 wrote must stay readable, and this code must write version 1.
/// Only zstd's output may differ between its releases, so writing is compared for raw frames only.
/// To see the differences: `SPINDLE_PRINT_GOLDEN=1 cargo test golden -- --nocapture`.
#[test]
fn golden_segments_of_version_1_are_read_and_written() {
    for (name, text, algorithm) in [
        (
            "chacha",
            include_str!("../../testdata/segment-v1-chacha.hex"),
            Algorithm::ChaCha20Poly1305,
        ),
        ("aes", include_str!("../../testdata/segment-v1-aes.hex"), Algorithm::Aes256Gcm),
    ] {
        let raw = Rng::new(11).bytes(4096, 100);
        let mut text_block = vec![0; 8192];
        text_block[..5].copy_from_slice(b"hello");
        let mut builder = SegmentBuilder::new(seed_of(algorithm), &pool_key(), 1, 0);
        let frames = [builder.push(1, 2, &raw), builder.push(5, 1 << 40, &text_block)];
        let written = builder.finish();
        if std::env::var_os("SPINDLE_PRINT_GOLDEN").is_some() {
            println!("GOLDEN {name}\n{}", annotate(&written.bytes, &frames));
            continue;
        }
        let golden = from_hex(text);
        let directory = open_directory(&pool_key(), &golden, &golden).unwrap();
        assert_eq!(directory.entries.len(), 2, "{name}");
        assert_eq!(directory.entries[1].first_block, 1 << 40);
        let golden = SealedSegment { info: directory.info, bytes: golden.into() };
        assert!(open(&golden, directory.entries[0].at).unwrap() == raw, "{name}");
        assert!(open(&golden, directory.entries[1].at).unwrap() == text_block, "{name}");
        let end_of_raw = (frames[0].offset + frames[0].sealed_bytes) as usize;
        assert_eq!(written.bytes[..end_of_raw], golden.bytes[..end_of_raw], "{name}");
    }
}

/// A segment whose frames are under the key of a volume, and its directory under the pool's.
#[test]
fn golden_segment_under_the_key_of_a_volume_is_read_and_written() {
    let (id, own) = (KeyId(0x0102_0304), PoolKey::new([0x77; 32]));
    let seed = seed_of(Algorithm::Aes256Gcm).with_key(id);
    let raw = Rng::new(11).bytes(4096, 100);
    let mut builder = SegmentBuilder::new_in(seed, &pool_key(), &own, 1, Vec::new());
    let at = builder.push(1, 2, &raw);
    let written = builder.finish();
    if std::env::var_os("SPINDLE_PRINT_GOLDEN").is_some() {
        println!("GOLDEN volume-key\n{}", annotate(&written.bytes, &[at]));
        return;
    }
    let golden = from_hex(include_str!("../../testdata/segment-v1-volume-key.hex"));
    let end_of_raw = (at.offset + at.sealed_bytes) as usize;
    assert_eq!(written.bytes[..end_of_raw], golden[..end_of_raw]);
    let directory = open_directory(&pool_key(), &golden, &golden).unwrap();
    assert_eq!((directory.info.key, directory.entries.len()), (id, 1));
    let frame = frame_of(&golden, at).unwrap();
    let opened = |root: &PoolKey| {
        open_frame(&segment_key(root, &directory.info), &directory.info.id, at, &mut frame.to_vec())
    };
    assert!(opened(&own).unwrap() == raw);
    assert_eq!(opened(&pool_key()).unwrap_err(), SegmentError::Authentication);
    let keys = VolumeKeys::default();
    let report = check_object(&pool_key(), &keys, &golden).unwrap();
    assert!(report.is_erased && report.damaged.is_empty() && report.plain_bytes == 4096);
    let mut damaged = golden.clone();
    damaged[200] ^= 1;
    assert_eq!(check_object(&pool_key(), &keys, &damaged).unwrap().damaged.len(), 1);
    keys.insert(id, own);
    let report = check_object(&pool_key(), &keys, &golden).unwrap();
    assert!(!report.is_erased && report.damaged.is_empty());
    // The key number and the feature bit must match.
    for (at, byte) in [(32, 0), (88, 0)] {
        let mut header: [u8; HEADER_BYTES] = golden[..HEADER_BYTES].try_into().unwrap();
        header[at..at + 4].fill(byte);
        let crc = block::units::crc32c(&header[..92]);
        header[92..].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(SegmentHeader::decode(&header), Err(SegmentError::Field("key")), "{at}");
    }
}

fn from_hex(text: &str) -> Vec<u8> {
    let digits: String = text
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default())
        .flat_map(str::chars)
        .filter(|c| !c.is_whitespace())
        .collect();
    (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap())
        .collect()
}

fn annotate(bytes: &[u8], frames: &[FrameAt]) -> String {
    let footer = bytes.len() - FOOTER_BYTES;
    let mut marks = vec![
        (0, "header: magic"),
        (8, "version, algorithm, erasure codec, zero"),
        (16, "compatible, read-only compatible, incompatible features"),
        (40, "pool"),
        (56, "epoch"),
        (64, "number"),
        (72, "id"),
        (88, "zero, checksum"),
    ];
    for at in frames {
        let start = at.offset as usize;
        marks.push((start, "frame: magic, codec, block count"));
        marks.push((start + 4, "index, sealed bytes, checksum"));
        marks.push((start + 16, "ciphertext and tag"));
    }
    let last = frames.last().unwrap();
    marks.push(((last.offset + last.sealed_bytes) as usize, "directory, ciphertext and tag"));
    marks.extend([
        (footer, "footer: magic"),
        (footer + 8, "frame count, directory offset, directory bytes, object bytes"),
        (footer + 24, "number"),
        (footer + 32, "id"),
        (footer + 48, "directory checksum, directory codec, zero"),
        (footer + 60, "checksum"),
        (bytes.len(), ""),
    ]);
    let mut text = String::new();
    for pair in marks.windows(2) {
        text.push_str(&format!("# {} at {}\n", pair[0].1, pair[0].0));
        for line in bytes[pair[0].0..pair[1].0].chunks(48) {
            text.extend(line.iter().map(|byte| format!("{byte:02x}")));
            text.push('\n');
        }
    }
    text
}

#[test]
fn compressible_frames_after_an_incompressible_run_are_compressed() {
    for seed in seeds(10) {
        let mut rng = Rng::new(seed);
        let algorithm = Algorithm::ChaCha20Poly1305;
        let mut builder = SegmentBuilder::new(seed_of(algorithm), &pool_key(), 1, 1 << 20);
        let (mut raw, mut small) = (0, 0);
        for frame in 0..60u64 {
            let block_count = 1 + rng.below(16) as usize;
            let is_random = frame % 20 < 12;
            let percent = if is_random { 100 } else { 50 };
            let plain = rng.bytes(block_count * 4096, percent);
            let at = builder.push(1, frame * 16, &plain);
            let is_raw = at.sealed_bytes as usize > plain.len();
            assert_eq!(is_raw, is_random, "SEED={seed}, frame {frame} of {block_count} blocks");
            raw += usize::from(is_raw);
            small += usize::from(!is_raw);
        }
        assert!(raw > 30 && small > 20, "SEED={seed}");
    }
}
