//! Measures the write log beside the raw disk, in one run:
//! `cargo run --release -p wal --example log_bench -- [DIR] [SECONDS]`
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

use block::seal::{Algorithm, KEY_BYTES, PoolKey};
use block::{Epoch, Lsn, VolumeId};
use bytes::Bytes;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use wal::{EntryKind, IoMode, Log, LogIdentity, LogOptions, NewEntry, Wait};

fn main() {
    let mut args = std::env::args().skip(1);
    let dir = PathBuf::from(args.next().unwrap_or_else(|| ".".into()));
    let seconds: f64 = args.next().and_then(|text| text.parse().ok()).unwrap_or(1.0);
    let time = Duration::from_secs_f64(seconds);
    let scratch = dir.join("log_bench.tmp");
    let _ = std::fs::remove_dir_all(&scratch);
    std::fs::create_dir_all(&scratch).expect("make the scratch directory");
    println!(
        "{:44} {:>10} {:>9} {:>9} {:>9} {:>9}",
        "", "ops/s", "p50 us", "p99 us", "CPU us", "ent/batch"
    );
    for round in 0..3 {
        println!("round {round}");
        raw(&scratch, time, true);
        raw(&scratch, time, false);
        for (io_mode, algorithm) in [
            (IoMode::Buffered, Algorithm::ChaCha20Poly1305),
            (IoMode::Buffered, Algorithm::Aes256Gcm),
            (IoMode::Direct, Algorithm::ChaCha20Poly1305),
        ] {
            for (writers, wait) in
                [(1, Wait::Durable), (1, Wait::Written), (32, Wait::Durable), (32, Wait::Written)]
            {
                log(&scratch, time, io_mode, algorithm, writers, wait, 4096);
            }
            log(&scratch, time, io_mode, algorithm, 8, Wait::Written, 1 << 20);
        }
    }
    open_full(&scratch);
    std::fs::remove_dir_all(&scratch).expect("remove the scratch directory");
}

/// Fills a log of the default size as far as possible and opens it again.
fn open_full(dir: &Path) {
    let dir = dir.join("full");
    let identity = LogIdentity {
        pool: [1; 16],
        epoch: Epoch(1),
        boot_id: [1; 16],
        served_epoch: Epoch(0),
        configuration: 0,
    };
    let options = LogOptions { slow_from_percent: 99, ..LogOptions::default() };
    let open = || {
        let key = PoolKey::new([1; KEY_BYTES]);
        Log::open(&dir, identity, key, options, Lsn(0)).expect("open")
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
    let (log, _) = open();
    runtime.block_on(async {
        let payload = Bytes::from(vec![0x5a; 8192]);
        let mut n = 0;
        while !log.status().is_full {
            let entry = NewEntry {
                volume: VolumeId(1),
                kind: EntryKind::Write,
                start_sector: n * 16,
                sector_count: 16,
                payload: payload.clone(),
            };
            let append = log.append(entry, Wait::Written);
            let _ = tokio::time::timeout(Duration::from_secs(1), append).await;
            n += 1;
        }
    });
    drop(log);
    drop(runtime);
    let started = Instant::now();
    let (log, recovery) = open();
    println!(
        "open after a crash of a full log of {} MiB, {} entries: {:.2} s",
        log.status().ring_bytes >> 20,
        recovery.entry_count,
        started.elapsed().as_secs_f64()
    );
}

/// Returns the user and system time of this process.
fn cpu() -> Duration {
    let usage = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(usage.tv_sec as u64, usage.tv_nsec as u32)
}

fn print(what: &str, mut latencies: Vec<u64>, wall: Duration, cpu: Duration, per_batch: f64) {
    latencies.sort_unstable();
    let count = latencies.len() as f64;
    let at = |part: f64| latencies[((count * part) as usize).min(latencies.len() - 1)] as f64 / 1e3;
    println!(
        "{what:44} {:>10.0} {:>9.1} {:>9.1} {:>9.2} {per_batch:>9.1}",
        count / wall.as_secs_f64(),
        at(0.5),
        at(0.99),
        cpu.as_secs_f64() * 1e6 / count
    );
}

fn raw(dir: &Path, time: Duration, is_direct: bool) {
    let path = dir.join("raw");
    std::fs::write(&path, vec![0; 64 << 20]).expect("write");
    let mut options = OpenOptions::new();
    options.write(true);
    if is_direct {
        options.custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32);
    }
    let file = options.open(&path).expect("open");
    file.sync_all().expect("sync");
    let mut buffer = block::env::IoBuffer::default();
    buffer.reset(4096);
    buffer.pad_to(4096);
    let (started, cpu_before) = (Instant::now(), cpu());
    let mut latencies = Vec::new();
    let mut at = 0;
    while started.elapsed() < time {
        let begin = Instant::now();
        file.write_all_at(buffer.as_slice(), at % (64 << 20)).expect("write");
        file.sync_data().expect("sync");
        latencies.push(begin.elapsed().as_nanos() as u64);
        at += 4096;
    }
    let mode = if is_direct { "direct" } else { "buffered" };
    print(
        &format!("raw {mode} pwrite+fdatasync 4 KiB"),
        latencies,
        started.elapsed(),
        cpu() - cpu_before,
        1.0,
    );
}

fn log(
    dir: &Path,
    time: Duration,
    io_mode: IoMode,
    algorithm: Algorithm,
    writers: u64,
    wait: Wait,
    bytes: usize,
) {
    let dir = dir.join(format!("log-{io_mode:?}"));
    let identity = LogIdentity {
        pool: [1; 16],
        epoch: Epoch(1),
        boot_id: [1; 16],
        served_epoch: Epoch(0),
        configuration: 0,
    };
    let options = LogOptions { io_mode, algorithm, ..LogOptions::default() };
    let _ = std::fs::remove_dir_all(&dir);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("runtime");
    let key = PoolKey::new([1; KEY_BYTES]);
    let (log, _) = Log::open(&dir, identity, key, options, Lsn(0)).expect("open");
    std::thread::sleep(Duration::from_millis(500)); // the next files are being made
    let is_done = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let released = Arc::new(AtomicU64::new(0));
    runtime.block_on(async {
        let releaser = tokio::spawn({
            let (log, is_done) = (log.clone(), Arc::clone(&is_done));
            async move {
                let mut changes = log.changes();
                while !is_done.load(Ordering::Relaxed) {
                    while let Some(generation) = log.next_frozen() {
                        log.release(&generation);
                        released.fetch_add(1, Ordering::Relaxed);
                    }
                    let _ =
                        tokio::time::timeout(Duration::from_millis(50), changes.changed()).await;
                }
            }
        });
        let payload = Bytes::from(vec![0x5a; bytes]);
        let (started, cpu_before) = (Instant::now(), cpu());
        let tasks: Vec<_> = (0..writers)
            .map(|writer| {
                let (log, payload) = (log.clone(), payload.clone());
                tokio::spawn(async move {
                    let mut latencies = Vec::new();
                    let sectors = payload.len() as u64 / 512;
                    let mut n = 0;
                    while started.elapsed() < time {
                        let entry = NewEntry {
                            volume: VolumeId(1),
                            kind: EntryKind::Write,
                            start_sector: (n * writers + writer) % 16384 * sectors,
                            sector_count: sectors,
                            payload: payload.clone(),
                        };
                        let begin = Instant::now();
                        log.append(entry, wait).await.expect("append");
                        latencies.push(begin.elapsed().as_nanos() as u64);
                        n += 1;
                    }
                    latencies
                })
            })
            .collect();
        let mut latencies = Vec::new();
        for task in tasks {
            latencies.extend(task.await.expect("writer"));
        }
        let (wall, used) = (started.elapsed(), cpu() - cpu_before);
        let status = log.status();
        let per_batch = status.entry_count as f64 / status.batch_count as f64;
        let name = match algorithm {
            Algorithm::ChaCha20Poly1305 => "chacha",
            Algorithm::Aes256Gcm => "aes",
        };
        let what = format!("log {io_mode:?} {name} {} KiB x{writers} {wait:?}", bytes >> 10);
        print(&what, latencies, wall, used, per_batch);
        is_done.store(true, Ordering::Relaxed);
        releaser.await.expect("releaser");
    });
    log.close().expect("close");
}
