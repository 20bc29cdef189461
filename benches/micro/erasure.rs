//! Erasure codes: a segment's image to its parity, a copy of it as the limit, and the decoding of one lost
//! frame.

use ::erasure::{CodecId, Cuts, Pattern, Scheme, codec};
use criterion::{Criterion, Throughput};

/// Bytes of an image. Source: the size of segments that destage makes.
const IMAGE_BYTES: usize = 32 << 20;
/// Bytes of a frame that is read from a lost fragment.
const FRAME_BYTES: usize = 4096;

pub fn bench(criterion: &mut Criterion) {
    let image: Vec<u8> = (0..IMAGE_BYTES).map(|at| (at * 31 + at / 977) as u8).collect();
    let borders: Vec<u32> = (0..IMAGE_BYTES as u32 / 4096).map(|frame| frame * 4096).collect();
    let mut group = criterion.benchmark_group("erasure-encode");
    group.throughput(Throughput::Bytes(IMAGE_BYTES as u64)).sample_size(10);
    group.bench_function("copy", |bencher| bencher.iter(|| image.clone()));
    for scheme in coded() {
        let cuts = Cuts::new(scheme, IMAGE_BYTES as u32, &borders);
        group.bench_function(scheme.to_string(), |bencher| {
            bencher.iter(|| codec::encode(scheme, &cuts, &image).expect("the cuts are its own"));
        });
    }
    group.finish();
    let mut group = criterion.benchmark_group("erasure-decode");
    group.sample_size(10);
    for scheme in coded() {
        let cuts = Cuts::new(scheme, IMAGE_BYTES as u32, &borders);
        let payloads = codec::encode(scheme, &cuts, &image).expect("the cuts are its own");
        let mut found: Vec<Option<&[u8]>> =
            payloads.iter().map(|payload| Some(payload.as_ref())).collect();
        found[0] = None;
        group.throughput(Throughput::Bytes(IMAGE_BYTES as u64));
        group.bench_function(format!("{scheme} fragment"), |bencher| {
            bencher.iter(|| codec::rebuild(scheme, &cuts, &found, &[0]).expect("one is lost"));
        });
        let sources: Vec<usize> = (1..=scheme.data()).collect();
        group.throughput(Throughput::Elements(1));
        group.bench_function(format!("{scheme} tables"), |bencher| {
            bencher.iter(|| Pattern::new(scheme, &[0], &sources).expect("enough"));
        });
        let pattern = Pattern::new(scheme, &[0], &sources).expect("enough");
        let ranges: Vec<&[u8]> =
            sources.iter().map(|source| &payloads[*source][..FRAME_BYTES]).collect();
        group.bench_function(format!("{scheme} frame of 4 KiB"), |bencher| {
            bencher.iter(|| pattern.make(&ranges, FRAME_BYTES).expect("they fit"));
        });
    }
    group.finish();
}

fn coded() -> impl Iterator<Item = Scheme> {
    Scheme::ALL.into_iter().filter(|scheme| scheme.codec() != CodecId::Whole)
}
