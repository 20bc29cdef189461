//! Load for a while: nothing grows, nothing stalls, and the memory budget holds.
//!
//! Invariants:
//! - `SPINDLE_TEST_SOAK_SECONDS` sets the length (default 20; nightly runs take longer).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tests::daemon::{Daemon, SMALL};
use tests::nbd::wire::*;
use tests::nbd::{Connection, Wanted};
use tests::seed::{Random, seeds};

/// The budget of [`SMALL`].
const BUDGET_BYTES: u64 = 400 << 20;

/// A soak of chosen length holds spindle to its promises; the short one, which runs beside other
/// tests on a log of 16 MiB, to bounds that only a leak or a hang exceeds.
fn is_long() -> bool {
    std::env::var("SPINDLE_TEST_SOAK_SECONDS").is_ok()
}

/// The budget, and a quarter for what the allocator holds back.
fn memory_bytes_max() -> u64 {
    if is_long() { BUDGET_BYTES * 5 / 4 } else { BUDGET_BYTES * 5 / 2 }
}

/// Longest answer to one write. The promise is one second on a quiet machine.
fn stall_max() -> Duration {
    Duration::from_secs(if is_long() { 4 } else { 40 })
}

fn soak_time() -> Duration {
    let seconds = std::env::var("SPINDLE_TEST_SOAK_SECONDS").ok();
    Duration::from_secs(seconds.map_or(20, |text| text.parse().expect("a number of seconds")))
}

/// What a process holds.
#[derive(Clone, Copy, Debug)]
struct Usage {
    resident_bytes: u64,
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
        descriptor_count: std::fs::read_dir(format!("{proc}/fd")).expect("it runs").count(),
        thread_count: fields["Threads"],
        mapping_count: maps.lines().count(),
    }
}

#[test]
fn a_long_load_grows_nothing_and_stalls_nobody() {
    for seed in seeds(1) {
        println!("SEED={seed}");
        let mut daemon = Daemon::started(SMALL, &[("disk", "1GiB")]);
        let endpoint = daemon.unix("disk");
        let mut connection = Connection::open(&endpoint, &Wanted::everything()).expect("it opens");
        let mut random = Random::new(seed, 31);
        let mut payload = vec![0; 64 << 10];
        random.fill(&mut payload);
        let (begun, time) = (Instant::now(), soak_time());
        let mut sent: BTreeMap<u64, Instant> = BTreeMap::new();
        let (mut slowest, mut bytes, mut early) = (Duration::ZERO, 0u64, None);
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
            if early.is_none() && begun.elapsed() > time / 4 {
                early = Some(usage(&daemon));
            }
        }
        let (early, late) = (early.expect("the time was long enough"), usage(&daemon));
        println!("{} MiB, slowest answer {slowest:?}\n{early:?}\n{late:?}", bytes >> 20);
        let laps_wanted = if is_long() { 10 } else { 2 };
        assert!(bytes > laps_wanted * (16 << 20), "{laps_wanted} laps of the log of 16 MiB");
        assert!(slowest < stall_max(), "a write waited {slowest:?}");
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
        // A thousand 4 KiB writes for every second of the soak.
        let count = soak_time().as_secs() * 1000;
        let mut daemon = Daemon::started(SMALL, &[("huge", "100TiB")]);
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
        let mut peak = 0;
        for (index, offset) in places().enumerate() {
            connection.submit(CMD_WRITE, 0, offset, 4096, &block(offset)).expect("sent");
            flying += 1;
            while flying >= 32 {
                assert_eq!(connection.receive().expect("a reply").error, 0);
                flying -= 1;
            }
            if index % 1000 == 0 {
                peak = peak.max(usage(&daemon).resident_bytes);
            }
        }
        while flying > 0 {
            assert_eq!(connection.receive().expect("a reply").error, 0);
            flying -= 1;
        }
        drop(connection);
        let _ = daemon.json(&["flush"]);
        peak = peak.max(usage(&daemon).resident_bytes);
        daemon.kill();
        let begun = Instant::now();
        daemon.restart();
        println!("{count} writes, at most {} MiB, opened in {:?}", peak >> 20, begun.elapsed());
        assert!(peak < memory_bytes_max(), "{} MiB are over the budget", peak >> 20);
        let endpoint = daemon.unix("huge");
        let mut connection = Connection::open(&endpoint, &Wanted::everything()).expect("it opens");
        for offset in places().step_by(7) {
            assert!(connection.read(offset, 4096) == block(offset), "at {offset}");
        }
        drop(connection);
        daemon.stop();
    }
}
