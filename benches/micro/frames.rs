//! Frames: compress and seal on the way out, verify, open and expand on the way in.

use crate::plausible::plausible;
use block::Epoch;
use block::env::SystemRandom;
use block::seal::{Algorithm, KEY_BYTES, PoolKey};
use criterion::{BatchSize, BenchmarkGroup, Criterion, Throughput, measurement::WallTime};
use std::hint::black_box;
use tiering::segment::read::{frame_of, segment_key};
use tiering::segment::{SegmentBuilder, SegmentNumber, SegmentSeed, open_frame};

const ZSTD_LEVEL: i32 = 1;
const SEGMENT_BYTES: usize = 16 << 20;
const FRAME_COUNT: usize = 64;

fn key() -> PoolKey {
    PoolKey::new([7; KEY_BYTES])
}

fn builder(algorithm: Algorithm) -> SegmentBuilder {
    let seed = SegmentSeed::new([1; 16], Epoch(1), SegmentNumber(1), algorithm, &SystemRandom);
    SegmentBuilder::new(seed, &key(), ZSTD_LEVEL, SEGMENT_BYTES)
}

/// Measures sealing and opening, by frame size and cipher.
pub fn bench(criterion: &mut Criterion) {
    let mut seals = criterion.benchmark_group("frame seal");
    for_each(|bytes, algorithm, name| seal(&mut seals, bytes, algorithm, name));
    seals.finish();
    let mut opens = criterion.benchmark_group("frame open");
    for_each(|bytes, algorithm, name| open(&mut opens, bytes, algorithm, name));
    opens.finish();
}

fn for_each(mut bench: impl FnMut(usize, Algorithm, String)) {
    for algorithm in [Algorithm::ChaCha20Poly1305, Algorithm::Aes256Gcm] {
        for bytes in [4 << 10, 8 << 10, 32 << 10, 64 << 10] {
            bench(bytes, algorithm, format!("{} KiB {algorithm:?}", bytes >> 10));
        }
    }
}

fn blocks(bytes: usize) -> Vec<Vec<u8>> {
    (0..FRAME_COUNT as u64).map(|seed| plausible(bytes, seed + 1)).collect()
}

fn seal(
    group: &mut BenchmarkGroup<'_, WallTime>,
    bytes: usize,
    algorithm: Algorithm,
    name: String,
) {
    let plain = blocks(bytes);
    let (mut segment, mut at) = (builder(algorithm), 0);
    group.throughput(Throughput::Bytes(bytes as u64));
    group.bench_function(name, |bencher| {
        bencher.iter(|| {
            // A new segment now and then, as in the daemon: its cost is part of the frame's.
            if segment.is_full() || segment.bytes_so_far() > SEGMENT_BYTES as u64 {
                segment = builder(algorithm);
            }
            at = (at + 1) % plain.len();
            black_box(segment.push(1, at as u64, &plain[at]))
        });
    });
}

fn open(
    group: &mut BenchmarkGroup<'_, WallTime>,
    bytes: usize,
    algorithm: Algorithm,
    name: String,
) {
    let mut segment = builder(algorithm);
    let places: Vec<_> = blocks(bytes).iter().map(|plain| segment.push(1, 0, plain)).collect();
    let sealed = segment.finish();
    let segment_key = segment_key(&key(), &sealed.info);
    let mut at = 0;
    group.throughput(Throughput::Bytes(bytes as u64));
    group.bench_function(name, |bencher| {
        bencher.iter_batched(
            || {
                at = (at + 1) % places.len();
                let frame = frame_of(&sealed.bytes, places[at]).expect("it is there").to_vec();
                (places[at], frame)
            },
            |(place, mut frame)| {
                open_frame(&segment_key, &sealed.info.id, place, &mut frame).expect("it opens")
            },
            BatchSize::SmallInput,
        );
    });
}
