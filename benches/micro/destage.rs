//! Destage: from a window of the log to segments and a committed map, per MiB.

use crate::plausible::{Rng, plausible};
use block::seal::{KEY_BYTES, PoolKey};
use block::units::{BLOCK_BYTES, SECTORS_PER_BLOCK};
use block::{Epoch, Lsn, Result, VolumeId};
use bytes::Bytes;
use criterion::{Criterion, Throughput};
use object_store::memory::InMemory;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiering::{ExtentContent, LogSource, Tier, TierOptions, Window, WindowExtent};

const WINDOW_MIB: u64 = 32;
const BLOCKS_PER_MIB: u64 = (1 << 20) / BLOCK_BYTES;
/// Blocks of the volume into which random windows fall: 10 GiB.
const VOLUME_BLOCKS: u64 = 10 << 18;
/// Number of distinct payloads; together they exceed a compressor's window.
const PAYLOAD_COUNT: usize = 512;

/// Payloads that are in memory already, as those of the log usually are.
struct Payloads;

impl LogSource for Payloads {
    type Handle = Bytes;

    async fn read(&self, handle: &Bytes) -> Result<Bytes> {
        Ok(handle.clone())
    }
}

/// Opens a tier over an empty store in memory.
pub async fn open_tier() -> Tier {
    let key = PoolKey::new([1; KEY_BYTES]);
    let options = TierOptions::new(Arc::new(InMemory::new()), [1; 16], key, Epoch(1));
    Tier::open(options).await.expect("an empty store opens")
}

/// Destages a window and returns how many blocks it stored.
pub async fn destage_window(tier: &Tier, window: Window<Bytes>) -> u64 {
    tier.destage(window, &Payloads).await.expect("it destages").stored_block_count
}

fn window(lsn: u64, extents: Vec<WindowExtent<Bytes>>) -> Window<Bytes> {
    let volumes = vec![(VolumeId(1), extents)];
    Window {
        last_lsn: Lsn(lsn),
        volume_records: Vec::new(),
        volumes,
        stalled_volumes: Vec::new(),
        late: None,
        snapshots: Vec::new(),
    }
}

fn extent(first_block: u64, payload: Bytes) -> WindowExtent<Bytes> {
    WindowExtent {
        start_sector: first_block * SECTORS_PER_BLOCK,
        sector_count: payload.len() as u64 / 512,
        content: ExtentContent::Data(payload),
    }
}

/// Makes a window of about `count` single blocks, scattered over a volume. All have the same
/// payload.
pub fn random_window(
    rng: &mut Rng,
    lsn: u64,
    count: u64,
    volume_blocks: u64,
    payload: &Bytes,
) -> Window<Bytes> {
    scattered(rng, lsn, count, volume_blocks, std::slice::from_ref(payload))
}

fn scattered(
    rng: &mut Rng,
    lsn: u64,
    count: u64,
    volume_blocks: u64,
    payloads: &[Bytes],
) -> Window<Bytes> {
    let mut blocks: Vec<u64> = (0..count).map(|_| rng.below(volume_blocks)).collect();
    blocks.sort_unstable();
    blocks.dedup();
    let payloads = payloads.iter().cycle();
    window(
        lsn,
        blocks.into_iter().zip(payloads).map(|(at, data)| extent(at, data.clone())).collect(),
    )
}

/// Makes a window of `count` consecutive blocks, in extents of 128 KiB.
fn sequential(rng: &mut Rng, lsn: u64, count: u64, payloads: &[Bytes]) -> Window<Bytes> {
    let start = rng.below(VOLUME_BLOCKS - count);
    let extents = (0..count / 32).zip(payloads.iter().cycle());
    window(lsn, extents.map(|(at, data)| extent(start + at * 32, data.clone())).collect())
}

/// Measures time and bytes of destage for scattered 4 KiB blocks and for sequential data.
pub fn bench(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let small: Vec<Bytes> = (0..PAYLOAD_COUNT as u64)
        .map(|seed| plausible(BLOCK_BYTES as usize, seed).into())
        .collect();
    let large: Vec<Bytes> =
        (0..PAYLOAD_COUNT as u64 / 8).map(|seed| plausible(128 << 10, seed).into()).collect();
    let mut group = criterion.benchmark_group("destage");
    // One window is a whole sample: it takes tens of milliseconds.
    group.sample_size(10).throughput(Throughput::Bytes(WINDOW_MIB << 20));
    let count = WINDOW_MIB * BLOCKS_PER_MIB;
    group.bench_function("32 MiB of scattered 4 KiB blocks", |bencher| {
        bencher.iter_custom(|rounds| {
            time(&runtime, rounds, |rng, lsn| scattered(rng, lsn, count, VOLUME_BLOCKS, &small))
        });
    });
    group.bench_function("32 MiB in sequence", |bencher| {
        bencher.iter_custom(|rounds| {
            time(&runtime, rounds, |rng, lsn| sequential(rng, lsn, count, &large))
        });
    });
    group.finish();
}

fn time(
    runtime: &tokio::runtime::Runtime,
    rounds: u64,
    mut make: impl FnMut(&mut Rng, u64) -> Window<Bytes>,
) -> Duration {
    runtime.block_on(async {
        let tier = open_tier().await;
        let mut rng = Rng(42);
        let mut total = Duration::ZERO;
        for lsn in 1..=rounds {
            let window = make(&mut rng, lsn);
            let started = Instant::now();
            destage_window(&tier, window).await;
            total += started.elapsed();
        }
        tier.close().await.expect("it closes");
        total
    })
}
