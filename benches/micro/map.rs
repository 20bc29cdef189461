//! The volume map: finding and changing runs in one page, encoding and decoding the values of the
//! database, and whole lookups and reads through the tier.

use crate::destage::{destage_window, open_tier, random_window};
use crate::plausible::{Rng, plausible};
use block::units::BLOCK_BYTES;
use block::{Lsn, VolumeId};
use bytes::Bytes;
use criterion::{Criterion, Throughput};
use std::hint::black_box;
use tiering::map::pages::{self, Page, Run};

const PAGE_BLOCKS: u64 = pages::PAGE_BLOCKS;
/// Blocks of the volume behind the lookups: 32 MiB, nearly all of it mapped.
const VOLUME_BLOCKS: u64 = 1 << 13;
const BLOCK_COUNT: u64 = 4 * VOLUME_BLOCKS;

fn run(block: u8, index: u32) -> Run {
    Run {
        segment: 7,
        frame_index: index,
        offset: index * 2048,
        sealed_bytes: 2100,
        first: block,
        last: block,
        within: 0,
    }
}

/// Makes a page whose blocks were all written one by one.
fn scattered() -> Vec<Run> {
    (0..=u8::MAX).map(|block| run(block, u32::from(block) * 7 % 251)).collect()
}

/// Measures map lookup and update.
pub fn bench(criterion: &mut Criterion) {
    in_a_page(criterion);
    through_the_tier(criterion);
}

fn in_a_page(criterion: &mut Criterion) {
    let mut rng = Rng(5);
    let mut block = move || u8::try_from(rng.below(PAGE_BLOCKS)).expect("256 blocks a page");
    let runs = scattered();
    let page = Page { runs: runs.clone().into_boxed_slice(), ..Page::default() };
    let mut group = criterion.benchmark_group("map page of 256 runs");
    group.bench_function("lookup", |bencher| {
        bencher.iter(|| {
            let block = block();
            black_box(page.runs_between(block, block).next())
        });
    });
    let few: Vec<Run> = (0..8).map(|index| run(index * 30, 1000 + u32::from(index))).collect();
    group.bench_function("update, 8 blocks", |bencher| {
        bencher.iter(|| black_box(pages::assign(&runs, &few)));
    });
    let mut bytes = Vec::new();
    group.bench_function("encode, 8 blocks", |bencher| {
        bencher.iter(|| {
            bytes.clear();
            pages::encode(Lsn(99), pages::OperandKind::Delta { keeps: false }, &few, &mut bytes);
            black_box(bytes.len())
        });
    });
    let mut image = Vec::new();
    pages::encode(Lsn(99), pages::OperandKind::Image { copy: Lsn::NONE }, &runs, &mut image);
    group.bench_function("decode image", |bencher| {
        bencher.iter(|| black_box(pages::decode(&image).expect("it decodes")));
    });
    group.finish();
}

fn through_the_tier(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let mut rng = Rng(11);
    let payload = Bytes::from(plausible(BLOCK_BYTES as usize, 3));
    let tier = runtime.block_on(async {
        let tier = open_tier().await;
        let window = random_window(&mut rng, 1, BLOCK_COUNT, VOLUME_BLOCKS, &payload);
        destage_window(&tier, window).await;
        tier
    });
    let mut group = criterion.benchmark_group("tier");
    group.bench_function("lookup of 4 KiB in the map", |bencher| {
        bencher.iter(|| {
            let offset = rng.below(VOLUME_BLOCKS) * BLOCK_BYTES;
            let found = tier.allocation(VolumeId(1), offset, BLOCK_BYTES, 1);
            black_box(runtime.block_on(found).expect("it is found"))
        });
    });
    let mut buffer = vec![0; 8192];
    group.throughput(Throughput::Bytes(8192));
    group.bench_function("read of 8 KiB from memory", |bencher| {
        bencher.iter(|| {
            let offset = rng.below(VOLUME_BLOCKS - 1) * BLOCK_BYTES;
            runtime.block_on(tier.read(VolumeId(1), offset, &mut buffer)).expect("it reads");
        });
    });
    group.finish();
    runtime.block_on(tier.close()).expect("it closes");
}
