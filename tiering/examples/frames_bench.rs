//! Costs of frames: sealing and opening one, and reading one from memory, from the NVMe cache
//! (buffered and direct) and from a local directory as the store. Prints a table.
//!
//! `cargo run --release -p tiering --example frames_bench -- [--dir DIR] [--mib N] [--seconds N]`
//!
//! DIR is the place of the cache file and the store (default: a temporary directory; to measure a
//! disk, name a directory on it).
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

use block::Epoch;
use block::seal::{Algorithm, PoolKey};
use bytes::Bytes;
use object_store::local::LocalFileSystem;
use object_store::{ObjectStore, ObjectStoreExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiering::cache::{CacheIo, CacheOptions};
use tiering::fetch::{Access, Frames, FramesOptions};
use tiering::keys::PoolKeys;
use tiering::segment::read::{frame_of, segment_key};
use tiering::segment::{
    FrameRef, Placement, SealedSegment, SegmentBuilder, SegmentNumber, SegmentSeed, open_frame,
};
use tiering::segment_store::ObjectSegments;

const POOL: [u8; 16] = [1; 16];

struct Args {
    dir: Option<PathBuf>,
    mib: usize,
    seconds: f64,
}

fn args() -> Args {
    let mut args = Args { dir: None, mib: 512, seconds: 1.0 };
    let mut rest = std::env::args().skip(1);
    while let Some(name) = rest.next() {
        let mut value = || rest.next().unwrap_or_else(|| panic!("{name} needs a value"));
        match name.as_str() {
            "--dir" => args.dir = Some(value().into()),
            "--mib" => args.mib = value().parse().expect("--mib is a number"),
            "--seconds" => args.seconds = value().parse().expect("--seconds is a number"),
            _ => panic!("unknown argument {name}"),
        }
    }
    args
}

fn main() {
    let args = args();
    frame_costs(args.seconds);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(read_costs(&args));
}

/// Returns blocks that look like a database's: rows of text with counters, ratio 3 to 4 at zstd
/// level 1.
fn plausible(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(bytes + 64);
    while out.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let row = format!("{:08}|{:06}|customer-{:05}|", out.len(), state % 999_983, state % 9973);
        out.extend_from_slice(row.as_bytes());
        out.extend_from_slice(&state.to_le_bytes());
        out.extend_from_slice(&[0; 20]);
    }
    out.truncate(bytes);
    out
}

fn builder(number: u64, algorithm: Algorithm, level: i32) -> SegmentBuilder {
    let number = SegmentNumber(number);
    let random = block::env::SystemRandom;
    let seed = SegmentSeed::new(POOL, Epoch(1), number, algorithm, &random);
    SegmentBuilder::new(seed, &PoolKey::new([7; 32]), level, 40 << 20)
}

fn frame_costs(seconds: f64) {
    println!(
        "| frame | cipher | zstd | ratio | seal CPU us | open CPU us | seal GB/s | open GB/s |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for kib in [4, 8, 16, 64] {
        for algorithm in [Algorithm::ChaCha20Poly1305, Algorithm::Aes256Gcm] {
            for level in [-1, 1, 3] {
                frame_cost(kib * 1024, algorithm, level, seconds / 4.0);
            }
        }
    }
}

fn frame_cost(plain_bytes: usize, algorithm: Algorithm, level: i32, seconds: f64) {
    let plain: Vec<Vec<u8>> = (0..64).map(|n| plausible(plain_bytes, n + 1)).collect();
    let mut segment = builder(1, algorithm, level);
    let (mut frames, started, cpu_started) = (Vec::new(), Instant::now(), cpu());
    while frames.len() < 64 || (started.elapsed().as_secs_f64() < seconds && !segment.is_full()) {
        frames.push(segment.push(1, 0, &plain[frames.len() % 64]));
    }
    let seal_us = (cpu() - cpu_started).as_secs_f64() * 1e6 / frames.len() as f64;
    let ratio = (frames.len() * plain_bytes) as f64 / segment.bytes_so_far() as f64;
    let sealed = segment.finish();
    let key = segment_key(&PoolKey::new([7; 32]), &sealed.info);
    let (mut count, mut buffer) = (0, Vec::new());
    let (started, cpu_started) = (Instant::now(), cpu());
    while count < 64 || started.elapsed().as_secs_f64() < seconds {
        let at = frames[count % frames.len()];
        buffer.clear();
        buffer.extend_from_slice(frame_of(&sealed.bytes, at).expect("it is there"));
        let opened = open_frame(&key, &sealed.info.id, at, &mut buffer).expect("it opens");
        assert_eq!(opened.len(), plain_bytes);
        count += 1;
    }
    let open_us = (cpu() - cpu_started).as_secs_f64() * 1e6 / count as f64;
    let rate = |us: f64| plain_bytes as f64 / us / 1e3;
    println!(
        "| {} KiB | {algorithm:?} | {level} | {ratio:.2} | {seal_us:.1} | {open_us:.2} | {:.2} | {:.2} |",
        plain_bytes / 1024,
        rate(seal_us),
        rate(open_us)
    );
}

/// Returns the CPU time of the whole process so far, in steps of 10 ms. Source: proc_pid_stat(5),
/// fields utime and stime, in clock ticks; every Linux reports 100 per second.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    let (_, fields) = stat.rsplit_once(") ").expect("the name ends");
    let fields: Vec<&str> = fields.split(' ').collect();
    let ticks = |at: usize| fields[at].parse::<u64>().expect("a number");
    Duration::from_millis((ticks(11) + ticks(12)) * 10)
}

async fn read_costs(args: &Args) {
    let temporary = tempfile::tempdir().expect("a directory");
    let dir = args.dir.clone().unwrap_or_else(|| temporary.path().to_path_buf());
    println!("\n| frames | from | depth | reads/s | us/read | CPU us/read | plain MB/s |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for kib in [8usize, 64] {
        let store_dir = dir.join(format!("store-{kib}"));
        std::fs::create_dir_all(&store_dir).expect("a directory");
        let store: Arc<dyn ObjectStore> =
            Arc::new(LocalFileSystem::new_with_prefix(&store_dir).expect("a store"));
        let (segments, refs) = fill(&store, kib * 1024, args.mib).await;
        for (name, io) in
            [("cache, buffered", CacheIo::Buffered), ("cache, direct", CacheIo::Direct)]
        {
            let cache_dir = dir.join(format!("cache-{kib}"));
            let frames = open(&store, Some((&cache_dir, io, args.mib)), 0);
            let started = Instant::now();
            for segment in &segments {
                frames.insert_segment(&segment.info, segment.bytes.clone());
                frames.flush_cache().await;
            }
            let bytes: usize = segments.iter().map(|segment| segment.bytes.len()).sum();
            let rate = bytes as f64 / started.elapsed().as_secs_f64() / 1e6;
            for depth in [1, 32] {
                forget_pages(&cache_dir);
                measure(
                    &format!("{name}, cold"),
                    kib,
                    &frames,
                    &refs,
                    depth,
                    1,
                    args.seconds / 4.0,
                )
                .await;
            }
            for run in refs.chunks(64) {
                frames.read_many(run, Access::Random).await.expect("it reads");
            }
            for depth in [1, 32] {
                measure(name, kib, &frames, &refs, depth, 1, args.seconds).await;
            }
            measure(name, kib, &frames, &refs, 1, 1024 / kib, args.seconds).await;
            println!("| {kib} KiB | {name}: written at {rate:.0} MB/s |||||");
            frames.close().await;
            drop(frames);
            let _ = std::fs::remove_dir_all(&cache_dir);
        }
        let frames = open(&store, None, (args.mib as u64) << 21);
        for run in refs.chunks(64) {
            frames.read_many(run, Access::Random).await.expect("it reads");
        }
        for depth in [1, 32] {
            measure("memory", kib, &frames, &refs, depth, 1, args.seconds).await;
        }
        let frames = open(&store, None, 0);
        for depth in [1, 32] {
            measure("local store", kib, &frames, &refs, depth, 1, args.seconds).await;
        }
        let _ = std::fs::remove_dir_all(&store_dir);
    }
}

/// Drops the cache file's pages from the kernel's memory.
fn forget_pages(cache_dir: &Path) {
    let file = std::fs::File::open(cache_dir.join("frames.cache")).expect("the cache file");
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("a hint");
}

fn open(
    store: &Arc<dyn ObjectStore>,
    cache: Option<(&Path, CacheIo, usize)>,
    memory_bytes: u64,
) -> Frames {
    let cache = cache
        .map(|(dir, io, mib)| CacheOptions { io, ..CacheOptions::new(dir, (mib as u64) << 20) });
    let options =
        FramesOptions { memory_bytes, stream_bytes: 0, cache, ..FramesOptions::default() };
    Frames::open(
        Arc::new(ObjectSegments::new(store.clone())),
        PoolKeys {
            pool: POOL,
            pool_key: PoolKey::new([7; 32]),
            volume_keys: tiering::VolumeKeys::default(),
        },
        options,
    )
}

/// Writes `mib` of plaintext in segments of 32 MiB.
async fn fill(
    store: &Arc<dyn ObjectStore>,
    bytes: usize,
    mib: usize,
) -> (Vec<SealedSegment>, Vec<FrameRef>) {
    let (mut segments, mut refs) = (Vec::new(), Vec::new());
    let mut left = (mib << 20) / bytes;
    while left > 0 {
        let mut segment = builder(segments.len() as u64 + 1, Algorithm::default(), 1);
        let mut places = Vec::new();
        while left > 0 && segment.bytes_so_far() < 32 << 20 {
            places.push(segment.push(1, 0, &plausible(bytes, left as u64)));
            left -= 1;
        }
        let sealed = segment.finish();
        let frame = |&at| FrameRef { info: sealed.info, placement: Placement::Object, at };
        refs.extend(places.iter().map(frame));
        let payload: Bytes = sealed.bytes.clone();
        store.put(&sealed.info.object_path(), payload.into()).await.expect("it is written");
        segments.push(sealed);
    }
    (segments, refs)
}

/// Measures `depth` tasks that read `run` frames at a time, at random (in sequence if `run` is
/// above 1).
async fn measure(
    name: &str,
    kib: usize,
    frames: &Frames,
    refs: &[FrameRef],
    depth: usize,
    run: usize,
    seconds: f64,
) {
    let refs: Arc<[FrameRef]> = refs.into();
    let (started, cpu_started) = (Instant::now(), cpu());
    let tasks: Vec<_> = (0..depth as u64)
        .map(|n| {
            let (frames, refs) = (frames.clone(), refs.clone());
            tokio::spawn(async move {
                let mut state = n * 77 + 12345;
                let (mut count, mut next) = (0u64, 0);
                while started.elapsed().as_secs_f64() < seconds {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let random = (state >> 33) as usize % (refs.len() - run);
                    let first = if run > 1 { next } else { random };
                    next = (next + run) % (refs.len() - run);
                    let access = Access::Random;
                    frames.read_many(&refs[first..first + run], access).await.expect("it reads");
                    count += 1;
                }
                count
            })
        })
        .collect();
    let mut count = 0;
    for task in tasks {
        count += task.await.expect("it runs");
    }
    let wall_us = started.elapsed().as_secs_f64() * 1e6;
    let cpu_us = (cpu() - cpu_started).as_secs_f64() * 1e6 / count as f64;
    let per_read_us = wall_us * depth as f64 / count as f64;
    let rate = count as f64 / wall_us * 1e6;
    let plain_rate = rate * (kib * run) as f64 * 1024.0 / 1e6;
    let what = if run > 1 { "1 MiB in sequence from " } else { "" };
    println!(
        "| {kib} KiB | {what}{name} | {depth} | {rate:.0} | {per_read_us:.1} | {cpu_us:.1} | {plain_rate:.0} |"
    );
}
