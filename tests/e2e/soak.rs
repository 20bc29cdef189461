//! Load for a while: nothing grows, nothing stalls, the memory budget holds, and opening is quick.
//!
//! Invariants:
//! - `SPINDLE_TEST_SOAK_SECONDS` sets the length (default 20; nightly runs take longer).
//! - `SPINDLE_TEST_SCATTERED_GIB` sets the amount of small writes all over a huge volume. The pool
//!   then has default settings, and its budget holds to the byte (20 is the promise).
//! - `SPINDLE_TEST_FULL_LOG_MIB` sets the size of the log that is opened full (default 128; the
//!   promise is about 2048, the product's default).

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tests::cut::{Line, Proxy};
use tests::daemon::{Daemon, SMALL};
use tests::nbd::wire::*;
use tests::nbd::{Connection, Wanted};
use tests::seed::{Random, seeds};
use tests::store::Server;

/// The budget of [`SMALL`].
const BUDGET_BYTES: u64 = 400 << 20;

/// Whether the length was chosen. A soak of chosen length tests spindle's promises, on a log of 256
/// MiB. The short one, which runs beside other tests on a log of 16 MiB, tests bounds that only a
/// leak or a hang exceeds.
fn is_long() -> bool {
    std::env::var("SPINDLE_TEST_SOAK_SECONDS").is_ok()
}

/// Returns the budget plus a quarter for memory that the allocator holds back.
fn memory_bytes_max() -> u64 {
    if is_long() { BUDGET_BYTES * 5 / 4 } else { BUDGET_BYTES * 5 / 2 }
}

/// Returns the longest allowed latency of a write, given the longest raw sync of the same run.
fn stall_max(worst_sync: Duration) -> Duration {
    if is_long() { Duration::from_secs(1).max(3 * worst_sync) } else { Duration::from_secs(40) }
}

/// Longest time to open a pool after a crash, whatever its size.
const OPEN_MAX: Duration = Duration::from_secs(5);

/// Returns a number from the environment.
fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a whole number, not {text:?}")))
}

/// Measures the disk itself: writes and syncs a block of its own file now and then.
struct Probe {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

impl Probe {
    fn start(path: PathBuf) -> Probe {
        let file = std::fs::File::create(path).expect("make a file");
        let is_over = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&is_over);
        let thread = std::thread::spawn(move || {
            let mut worst = Duration::ZERO;
            while !seen.load(Ordering::SeqCst) {
                let begun = Instant::now();
                let written = file.write_all_at(&[0x5a; 4096], 0).and_then(|()| file.sync_data());
                written.expect("the probe's file can be written");
                worst = worst.max(begun.elapsed());
                std::thread::sleep(Duration::from_millis(100));
            }
            worst
        });
        Probe { is_over, thread }
    }

    /// Returns the longest time of a write and sync.
    fn stop(self) -> Duration {
        self.is_over.store(true, Ordering::SeqCst);
        self.thread.join().expect("the probe does not panic")
    }
}

fn soak_time() -> Duration {
    Duration::from_secs(number("SPINDLE_TEST_SOAK_SECONDS").unwrap_or(20))
}

/// The resources of a process.
#[derive(Clone, Copy, Debug)]
struct Usage {
    resident_bytes: u64,
    /// Highest resident memory so far.
    peak_bytes: u64,
    descriptor_count: usize,
    thread_count: u64,
    mapping_count: usize,
}

fn usage(daemon: &Daemon) -> Usage {
    let proc = format!("/proc/{}", daemon.id());
    let status = std::fs::read_to_string(format!("{proc}/status")).expect("it runs");
    let fields: BTreeMap<&str, u64> = status
        .lines()
        .filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            Some((name, value.split_whitespace().next()?.parse().ok()?))
        })
        .collect();
    let maps = std::fs::read_to_string(format!("{proc}/maps")).expect("it runs");
    Usage {
        resident_bytes: fields["VmRSS"] << 10,
        peak_bytes: fields["VmHWM"] << 10,
        descriptor_count: std::fs::read_dir(format!("{proc}/fd")).expect("it runs").count(),
        thread_count: fields["Threads"],
        mapping_count: maps.lines().count(),
    }
}

#[test]
fn a_long_load_is_bounded_and_stalls_no_client() {
    for seed in seeds(1) {
        println!("SEED={seed}");
        let log_mib = if is_long() { 256 } else { 16 };
        let log = format!("size = \"{log_mib}MiB\"\nfile_size = \"{}MiB\"", log_mib / 4);
        let settings = SMALL.replace("size = \"16MiB\"\nfile_size = \"4MiB\"", &log);
        let mut daemon = Daemon::started(&settings, &[("disk", "1GiB")]);
        let endpoint = daemon.unix("disk");
        let mut connection = Connection::open(&endpoint, &Wanted::everything()).expect("it opens");
        let mut random = Random::new(seed, 31);
        let mut payload = vec![0; 64 << 10];
        random.fill(&mut payload);
        let (begun, time) = (Instant::now(), soak_time());
        let mut sent: BTreeMap<u64, Instant> = BTreeMap::new();
        let (mut slowest, mut bytes, mut early) = (Duration::ZERO, 0u64, None);
        let probe = Probe::start(daemon.place().join("probe"));
        while begun.elapsed() < time {
            while sent.len() < 32 {
                let length = u32::try_from(random.between(1, 128) * 512).expect("small");
                let offset = random.below((1 << 30) / 512 - 128) * 512;
                let part = &payload[..usize::try_from(length).expect("small")];
                let cookie = connection.submit(CMD_WRITE, 0, offset, length, part);
                sent.insert(cookie.expect("sent"), Instant::now());
                bytes += u64::from(length);
            }
            let reply = connection.receive().expect("a reply");
            assert_eq!(reply.error, 0);
            let waited = sent.remove(&reply.cookie).expect("it was sent").elapsed();
            slowest = slowest.max(waited);
            // The files of the log are made as it grows, and take descriptors from then on.
            let is_lapped = bytes > log_mib << 20;
            if early.is_none() && begun.elapsed() > time / 4 && is_lapped {
                early = Some(usage(&daemon));
            }
        }
        let (early, late) = (early.expect("the time was long enough"), usage(&daemon));
        let worst_sync = probe.stop();
        println!(
            "{} MiB, slowest answer {slowest:?}, slowest raw sync {worst_sync:?}",
            bytes >> 20
        );
        println!("{early:?}\n{late:?}");
        let wraps_wanted = (time.as_secs() / 60).max(2);
        assert!(
            bytes > wraps_wanted * (log_mib << 20),
            "fewer than {wraps_wanted} wraps of the log"
        );
        assert!(slowest < stall_max(worst_sync), "a write waited {slowest:?}");
        assert!(late.resident_bytes < memory_bytes_max(), "{late:?} is over the budget");
        assert!(late.descriptor_count <= early.descriptor_count + 8, "{early:?} {late:?}");
        let threads_more = if is_long() { 8 } else { 40 };
        assert!(late.thread_count <= early.thread_count + threads_more, "{early:?} {late:?}");
        assert!(late.mapping_count <= early.mapping_count * 3 / 2 + 64, "{early:?} {late:?}");
        while !sent.is_empty() {
            sent.remove(&connection.receive().expect("a reply").cookie);
        }
        connection.flush();
        drop(connection);
        daemon.stop();
        daemon.fsck();
    }
}

#[test]
fn small_writes_all_over_a_huge_volume_stay_inside_the_memory_budget() {
    for seed in seeds(1) {
        println!("SEED={seed}");
        // By default a thousand 4 KiB writes for every second of the soak. If the promised amount
        // is requested, the pool has default settings, and the limit is its budget of 1 GiB without
        // a margin.
        let scattered_gib = number("SPINDLE_TEST_SCATTERED_GIB");
        let count = scattered_gib.map_or(soak_time().as_secs() * 1000, |gib| gib << 18);
        let bytes_max = scattered_gib.map_or(memory_bytes_max(), |_| 1 << 30);
        let settings = if scattered_gib.is_some() { "" } else { SMALL };
        let mut daemon = Daemon::started(settings, &[("huge", "100TiB")]);
        let endpoint = daemon.unix("huge");
        let mut connection = Connection::open(&endpoint, &Wanted::everything()).expect("it opens");
        let places = || {
            let mut random = Random::new(seed, 32);
            (0..count).map(move |_| random.below((100 << 40) / 4096) * 4096)
        };
        let block = |offset: u64| {
            let mut block = [0; 4096];
            Random::new(offset, 33).fill(&mut block);
            block
        };
        let mut flying = 0;
        for offset in places() {
            connection.submit(CMD_WRITE, 0, offset, 4096, &block(offset)).expect("sent");
            flying += 1;
            while flying >= 32 {
                assert_eq!(connection.receive().expect("a reply").error, 0);
                flying -= 1;
            }
        }
        while flying > 0 {
            assert_eq!(connection.receive().expect("a reply").error, 0);
            flying -= 1;
        }
        drop(connection);
        let _ = daemon.json(&["drain"]);
        let peak = usage(&daemon).peak_bytes;
        daemon.kill();
        let begun = Instant::now();
        daemon.restart();
        let opened = begun.elapsed();
        println!("{count} writes, at most {} MiB, opened in {opened:?}", peak >> 20);
        assert!(peak < bytes_max, "{} MiB are over the budget", peak >> 20);
        assert!(opened < OPEN_MAX, "opening took {opened:?}");
        let endpoint = daemon.unix("huge");
        let mut connection = Connection::open(&endpoint, &Wanted::everything()).expect("it opens");
        for offset in places().step_by(7) {
            assert!(connection.read(offset, 4096) == block(offset), "at {offset}");
        }
        drop(connection);
        daemon.stop();
    }
}

#[test]
fn a_log_that_is_full_opens_in_time() {
    /// The log size to which the promise of [`OPEN_MAX`] applies.
    const DEFAULT_MIB: u64 = 2048;
    const BLOCK_BYTES: u64 = 4096;
    let log_mib = number("SPINDLE_TEST_FULL_LOG_MIB").unwrap_or(128);
    // A second for everything that does not depend on the log, the rest in proportion.
    let second = Duration::from_secs(1);
    let open_max = second + (OPEN_MAX - second).mul_f64(log_mib as f64 / DEFAULT_MIB as f64);
    let settings = format!("[log]\nsize = \"{log_mib}MiB\"\nfile_size = \"{}MiB\"\n", log_mib / 32);
    let server = Server::start();
    let proxy = Proxy::start(server.address()).expect("a proxy");
    let mut daemon = super::stores::on_s3(&settings, &[("disk", "16GiB")], proxy.address());
    for word in ["destage", "store", "slatedb", "full"] {
        daemon.announce(word);
    }
    daemon.restart();
    proxy.set(Line::Cut);
    let block = |index: u64| {
        let mut block = [0; 4096];
        Random::new(index, 34).fill(&mut block);
        block
    };
    // Small writes that do not touch each other, which make recovery as long as possible.
    let place = |index: u64| index * 2 * BLOCK_BYTES;
    let endpoint = daemon.unix("disk");
    let mut connection = Connection::open(&endpoint, &Wanted::everything()).expect("it opens");
    let fill = || {
        let log = &daemon.json(&["status"])["log"];
        log["used_bytes"].as_f64().expect("a number") / log["ring_bytes"].as_f64().expect("one")
    };
    let (mut sent, mut answered) = (0u64, 0);
    // Writers are throttled as the log fills, and since the store is away, a writer that fills it
    // up waits for ever. So the fill level is checked every half percent, with as much again in
    // flight.
    let per_look = (log_mib << 20) / BLOCK_BYTES / 200;
    while fill() < 0.94 {
        for _ in 0..per_look {
            while sent < answered + per_look.min(256) {
                connection.submit(CMD_WRITE, 0, place(sent), 4096, &block(sent)).expect("sent");
                sent += 1;
            }
            assert_eq!(connection.receive().expect("a reply").error, 0);
            answered += 1;
        }
    }
    while answered < sent {
        assert_eq!(connection.receive().expect("a reply").error, 0);
        answered += 1;
    }
    let fill = fill();
    drop(connection);
    daemon.kill();
    proxy.set(Line::Open);
    let begun = Instant::now();
    daemon.restart();
    let opened = begun.elapsed();
    println!("{sent} writes, log {:.1} % full, opened in {opened:?}", 100.0 * fill);
    assert!(opened < open_max, "opening a full log of {log_mib} MiB took {opened:?}");
    let endpoint = daemon.unix("disk");
    let mut connection = Connection::open(&endpoint, &Wanted::everything()).expect("it opens");
    for index in (0..sent).step_by(101) {
        assert!(connection.read(place(index), 4096) == block(index), "write {index} of {sent}");
    }
    drop(connection);
    daemon.kill();
}
