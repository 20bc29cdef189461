//! The write log: the cost of an append to its caller, alone and among others, and the cost of a
//! lookup in the overlay.

use crate::plausible::{Rng, plausible};
use block::seal::{Algorithm, KEY_BYTES, PoolKey};
use block::{Epoch, Lsn, VolumeId};
use bytes::Bytes;
use criterion::{Criterion, Throughput};
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use wal::{EntryKind, Log, LogIdentity, LogOptions, NewEntry, Wait};

const VOLUME: VolumeId = VolumeId(1);
const EXTENT_COUNT: u64 = 16_384;

fn open(dir: &Path, algorithm: Algorithm) -> Log {
    let identity = LogIdentity {
        pool: [1; 16],
        epoch: Epoch(1),
        boot_id: [1; 16],
        served_epoch: Epoch(0),
        configuration: 0,
    };
    let options = LogOptions {
        ring_bytes: 256 << 20,
        file_bytes: 32 << 20,
        generation_bytes_max: 64 << 20,
        payload_memory_bytes: 128 << 20,
        algorithm,
        ..LogOptions::default()
    };
    Log::open(dir, identity, PoolKey::new([1; KEY_BYTES]), options, Lsn::NONE).expect("open").0
}

/// Frees log space like a destage without cost.
fn release_at_once(runtime: &Runtime, log: &Log) -> JoinHandle<()> {
    let log = log.clone();
    runtime.spawn(async move {
        let mut changes = log.changes();
        loop {
            while let Some(generation) = log.next_frozen() {
                log.release(&generation);
            }
            if changes.changed().await.is_err() {
                return;
            }
        }
    })
}

fn entry(rng: &mut Rng, payload: &Bytes) -> NewEntry {
    let sector_count = payload.len() as u64 / 512;
    NewEntry {
        volume: VOLUME,
        kind: EntryKind::Write,
        start_sector: rng.below(EXTENT_COUNT) * sector_count,
        sector_count,
        payload: payload.clone(),
    }
}

/// Makes `count` appends, `depth` of them in flight at a time.
async fn append(log: &Log, payload: &Bytes, depth: usize, wait: Wait, count: u64) -> Duration {
    let mut rng = Rng(17);
    let started = Instant::now();
    let mut left = count;
    while left > 0 {
        let now = left.min(depth as u64);
        left -= now;
        // Each append is queued at the call, so these share batches as those of many clients do.
        let waiters: Vec<_> =
            (0..now).map(|_| log.append(entry(&mut rng, payload), wait)).collect();
        for waiter in waiters {
            waiter.await.expect("append");
        }
    }
    started.elapsed()
}

/// Measures log appends, and lookups in an overlay of [`EXTENT_COUNT`] extents.
pub fn bench(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("runtime");
    let mut group = criterion.benchmark_group("log append");
    for algorithm in [Algorithm::ChaCha20Poly1305, Algorithm::Aes256Gcm] {
        for (bytes, depth, wait) in [
            (4096, 1, Wait::Written),
            (4096, 32, Wait::Written),
            (4096, 1, Wait::Durable),
            (4096, 32, Wait::Durable),
            (1 << 20, 4, Wait::Written),
        ] {
            let dir = tempfile::tempdir().expect("temporary directory");
            let log = open(dir.path(), algorithm);
            let releaser = release_at_once(&runtime, &log);
            let payload = Bytes::from(plausible(bytes, 1));
            let name = format!("{} KiB x{depth} {wait:?} {algorithm:?}", bytes >> 10);
            group.throughput(Throughput::Bytes(bytes as u64));
            group.bench_function(name, |bencher| {
                bencher.iter_custom(|count| {
                    runtime.block_on(append(&log, &payload, depth, wait, count))
                });
            });
            releaser.abort();
            log.close().expect("close");
        }
    }
    group.finish();
    lookups(criterion, &runtime);
}

fn lookups(criterion: &mut Criterion, runtime: &Runtime) {
    let dir = tempfile::tempdir().expect("temporary directory");
    let log = open(dir.path(), Algorithm::default());
    let payload = Bytes::from(plausible(4096, 1));
    runtime.block_on(append(&log, &payload, 32, Wait::Written, EXTENT_COUNT / 2));
    let mut rng = Rng(23);
    criterion.bench_function("overlay lookup, 8 KiB among thousands of extents", |bencher| {
        bencher.iter(|| {
            let start_sector = rng.below(EXTENT_COUNT - 1) * 8;
            black_box(log.overlay().lookup(VOLUME, start_sector, 16))
        });
    });
    log.close().expect("close");
}
