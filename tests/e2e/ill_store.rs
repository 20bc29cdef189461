//! A store that answers wrongly, for a moment or for long, at any request during a pool's whole
//! run: no acknowledged write is lost, no pool ends, no message reservations another owner, and `status`
//! shows a lasting fault.
//!
//! Invariants:
//! - The store's objects stay right throughout, so everything must work again once it is healed.
//! - Each test prints how many faults it injected, by kind.

use crate::copies::wait_for;
use crate::mounted::number_of;
use crate::stores::{History, VOLUMES, on_s3, open};
use std::collections::BTreeMap;
use std::process::Output;
use std::time::{Duration, Instant};
use tests::bucket::faults::{Fault, Faults};
use tests::bucket::{Bucket, Care};
use tests::daemon::{Daemon, SMALL};
use tests::seed::{Random, seeds};
use tests::store::{BUCKET, environment};

/// How many of a hundred requests meet a passing fault.
const PASSING_PERCENT: u64 = 3;
/// Prefix of the pool's objects.
const POOL: &str = "pools/one/";
/// Attempts of a command while faults pass. A command makes a few dozen requests, and a request that is
/// refused for good reason (403) ends it, so about every second attempt fails: with eight attempts, one
/// run in some hundred did.
const ATTEMPTS_MAX: usize = 40;
/// Time within which a lasting fault appears in `status`, unless it has no effect.
const SHOWN_WITHIN: Duration = Duration::from_secs(45);
/// Explanations that are false for a store that answers wrongly, so no message may give them.
const WRONG_REASONS: &[&str] = &[
    "another node",
    "taken over",
    "take-over",
    "superseded",
    "an older copy",
    "holds no pool",
    "later key ring",
    "rolled back or emptied",
    "be created twice",
    "does not show",
    "panicked",
];

/// Makes a daemon whose reads and commits reach the store: no caches, and a log with room for the
/// duration of a fault.
fn on_ill_store(bucket: &Bucket) -> Daemon {
    let settings =
        SMALL.replace("size = \"16MiB\"\nfile_size", "size = \"128MiB\"\nfile_size").replace(
            "[cache]\nsize = \"64MiB\"",
            "[cache]\nsize = \"0\"\n[memory_cache]\nsize = \"0\"",
        );
    let mut daemon = on_s3(&settings, VOLUMES, bucket.address());
    // Warnings about faults are right; wrong reasons are searched for below.
    daemon.announce("");
    daemon
}

fn check_words(what: &str, said: &str) {
    for reason in WRONG_REASONS {
        assert!(!said.contains(reason), "{what}: {reason:?} is no reason here:\n{said}");
    }
}

/// Runs a command until it succeeds; each failure must have a right reason.
fn insist(daemon: &Daemon, arguments: &[&str]) -> Output {
    for _ in 0..ATTEMPTS_MAX {
        let output = daemon.command(arguments);
        if output.status.success() {
            return output;
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        println!("{arguments:?}: {}", said.trim());
        check_words(&format!("{arguments:?}"), &said);
    }
    panic!("{arguments:?} fails again and again");
}

/// Purges a removed pool. If an attempt fails after it has deleted the last object, the next one finds
/// no pool, which is right.
fn purge(daemon: &Daemon) {
    for attempt in 0..ATTEMPTS_MAX {
        let output = daemon.command(&["pool", "purge", "--now"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() || attempt > 0 && said.contains("the store holds no pool") {
            return;
        }
        println!("purge: {}", said.trim());
        check_words("purge", &said);
    }
    panic!("purging fails again and again");
}

/// Starts the daemon; an attempt may fail, for a right reason.
fn start(daemon: &mut Daemon) {
    for _ in 0..ATTEMPTS_MAX {
        match daemon.try_start() {
            Ok(()) => return,
            Err(error) => {
                println!("a start failed: {error}");
                check_words("start", &error);
            }
        }
    }
    panic!("the daemon does not come up");
}

fn print_counts(counts: &BTreeMap<Fault, u64>) {
    println!("faults injected: {} ({counts:?})", counts.values().sum::<u64>());
}

#[test]
fn passing_faults_at_any_request_of_a_run_lose_nothing() {
    for seed in seeds(number_of("SPINDLE_TEST_PASSING_RUNS", 1)) {
        let bucket = Bucket::start(Care::Honest);
        let passing =
            || Faults::Passing { random: Random::new(seed, 21), percent: PASSING_PERCENT };
        let mut daemon = on_ill_store(&bucket);
        bucket.inject(passing());
        let mut history = History::new(seed);
        start(&mut daemon);
        history.run_for(&mut open(&daemon), Duration::from_secs(2));
        insist(&daemon, &["snapshot", "create", "db,log@one"]);
        let url = copy_url();
        insist(&daemon, &["copy", "add", &url, "--interval", "1h"]);
        history.run_for(&mut open(&daemon), Duration::from_secs(1));
        insist(&daemon, &["drain"]);
        insist(&daemon, &["copy", "sync", &url]);
        let copied = history.count();
        insist(&daemon, &["scrub", "start"]);
        history.run_for(&mut open(&daemon), Duration::from_secs(1));
        insist(&daemon, &["clone", "db@one", "test"]);
        insist(&daemon, &["volume", "rm", "test"]);
        insist(&daemon, &["snapshot", "rm", "log@one"]);
        daemon.stop();
        start(&mut daemon);
        assert_eq!(history.prefix(&mut open(&daemon)), history.count(), "after an orderly stop");
        history.run_for(&mut open(&daemon), Duration::from_secs(1));
        daemon.kill();
        start(&mut daemon);
        assert_eq!(history.prefix(&mut open(&daemon)), history.count(), "after a kill");
        let mut other = restored(&bucket, &daemon, &url);
        assert!(history.prefix(&mut open(&other)) >= copied, "the copy has less than was copied");
        other.stop();
        check_words("log of the restored pool", &other.log());
        bucket.inject(Faults::None);
        daemon.stop();
        daemon.fsck();
        check_words("log", &daemon.log());
        bucket.inject(passing());
        insist(&daemon, &["pool", "rm"]);
        purge(&daemon);
        let left = bucket.keys().into_iter().filter(|key| key.starts_with(POOL));
        assert_eq!(left.collect::<Vec<_>>(), Vec::<String>::new(), "the pool was purged");
        print_counts(&bucket.injected());
    }
}

/// Makes a daemon with a store of its own, which can reach the bucket.
fn stranger(bucket: &Bucket) -> Daemon {
    let mut daemon = Daemon::new(SMALL, &[]);
    daemon.announce("");
    let variables = environment(bucket.address());
    let pairs: Vec<(&str, &str)> =
        variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    daemon.environ(&pairs);
    daemon
}

/// Restores a pool from the copy and serves it, while faults pass.
fn restored(bucket: &Bucket, source: &Daemon, url: &str) -> Daemon {
    let key = source.dir().join("spindle.key").display().to_string();
    let mut daemon = stranger(bucket);
    daemon.argue(&["--key-file", &key]);
    insist(&daemon, &["restore", url, "--key-file", &key]);
    start(&mut daemon);
    daemon
}

/// Parts of the store that a lasting fault may hit: everything, or the objects of one folder.
/// [`ONE_OBJECT`] stands for one object of the pool, drawn at random.
const PARTS: &[&str] =
    &["", "segments/", "metadata/", "manifest/", "keyring/", "copies/", ONE_OBJECT];
const ONE_OBJECT: &str = "one object";

/// Work during a lasting fault, in addition to writes.
#[derive(Clone, Copy, Debug)]
enum Work {
    Serve,
    Restart,
    Copy,
    Scrub,
    Restore,
}

const WORK: [Work; 5] = [Work::Serve, Work::Restart, Work::Copy, Work::Scrub, Work::Restore];

/// Longest time of a command, a stop or a start during a fault. Chosen by hand: above the two
/// minutes for which an opening waits for its store.
const WORK_TIME_MAX: Duration = Duration::from_secs(150);

#[test]
fn lasting_faults_are_shown_and_end_with_their_cause() {
    let count = number_of("SPINDLE_TEST_LASTING_FAULTS", 2);
    for seed in seeds(1) {
        println!("SEED={seed}");
        let mut random = Random::new(seed, 22);
        let bucket = Bucket::start(Care::Honest);
        let mut daemon = on_ill_store(&bucket);
        // From the start, listings have pages.
        bucket.inject(Faults::None);
        daemon.restart();
        let mut history = History::new(seed);
        history.run_for(&mut open(&daemon), Duration::from_secs(1));
        insist(&daemon, &["copy", "add", &copy_url(), "--interval", "1h"]);
        insist(&daemon, &["copy", "sync", &copy_url()]);
        let mut pairs: Vec<(Fault, &str)> =
            Fault::ALL.iter().flat_map(|fault| PARTS.iter().map(|part| (*fault, *part))).collect();
        for _ in 0..count.min(pairs.len() as u64) {
            let at = usize::try_from(random.below(pairs.len() as u64)).expect("small");
            let (fault, part) = pairs.swap_remove(at);
            let part = match part {
                ONE_OBJECT => {
                    let mut keys = bucket.keys();
                    keys.retain(|key| key.starts_with(POOL));
                    random.pick(&keys).clone()
                }
                part => part.to_owned(),
            };
            let work = *random.pick(&WORK);
            println!("{fault:?} on every key with {part:?}: {work:?}");
            meet(&bucket, &mut daemon, &mut history, (fault, &part), work);
        }
        daemon.stop();
        daemon.restart();
        assert_eq!(history.prefix(&mut open(&daemon)), history.count());
        daemon.stop();
        daemon.fsck();
        check_words("log", &daemon.log());
        print_counts(&bucket.injected());
    }
}

fn copy_url() -> String {
    format!("s3://{BUCKET}/copies/one")
}

/// Runs a command that may fail during a fault, for a right reason and in bounded time. Returns its error.
fn attempt(daemon: &Daemon, arguments: &[&str]) -> String {
    let begun = Instant::now();
    let mut command = daemon.prepare(arguments);
    let output = command.output().expect("the program runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    println!("{arguments:?} after {:?}: {} {}", begun.elapsed(), output.status, said.trim());
    assert!(begun.elapsed() < WORK_TIME_MAX, "{arguments:?} took {:?}", begun.elapsed());
    said
}

/// Does the work while the fault lasts. The daemon may not be running afterwards.
fn work_on(bucket: &Bucket, daemon: &mut Daemon, work: Work) {
    match work {
        Work::Serve => {}
        Work::Copy => check_words("copy", &attempt(daemon, &["copy", "sync", &copy_url()])),
        Work::Scrub => check_words("scrub", &attempt(daemon, &["scrub", "start"])),
        Work::Restore => {
            let key = daemon.dir().join("spindle.key").display().to_string();
            let said = attempt(&stranger(bucket), &["restore", &copy_url(), "--key-file", &key]);
            // A place that shows nothing is empty, as far as a directory that never saw it can tell.
            if !said.contains("holds no pool") {
                check_words("restore", &said);
            }
        }
        Work::Restart => {
            let begun = Instant::now();
            daemon.ask_to_stop();
            let status = daemon.wait(WORK_TIME_MAX);
            println!("the stop ended with {status} after {:?}", begun.elapsed());
            match daemon.try_start() {
                Ok(()) => {}
                Err(error) => {
                    println!("no start: {}", error.lines().last().unwrap_or_default());
                    check_words("start", &error);
                    daemon.kill();
                }
            }
        }
    }
}

/// Runs one lasting fault, from its beginning until the pool is healthy again.
fn meet(
    bucket: &Bucket,
    daemon: &mut Daemon,
    history: &mut History,
    (fault, part): (Fault, &str),
    work: Work,
) {
    bucket.inject(Faults::Lasting { fault, part: part.to_owned() });
    let before = bucket.injected();
    // Writes are acknowledged during the fault: the log has room.
    history.run_for(&mut open(daemon), Duration::from_secs(1));
    let destaged = |daemon: &Daemon| daemon.json(&["status"])["log"]["destaged_lsn"].clone();
    let (mark, begun) = (daemon.json(&["status"])["log"]["last_lsn"].clone(), Instant::now());
    let is_shown = |daemon: &Daemon| {
        let status = daemon.json(&["status"]);
        let conditions = status["conditions"].as_array().expect("a list");
        conditions.iter().any(|one| one["kind"] != "no-recovery-key")
    };
    let has_passed = |daemon: &Daemon| destaged(daemon).as_u64() >= mark.as_u64();
    while !is_shown(daemon) && !has_passed(daemon) {
        assert!(begun.elapsed() < SHOWN_WITHIN, "{fault:?} {part:?} is in no status, nor destaged");
        std::thread::sleep(Duration::from_millis(200));
    }
    let (shown, passed) = (is_shown(daemon), has_passed(daemon));
    println!("after {:?}: shown {shown}, destaged {passed}", begun.elapsed());
    history.run_for(&mut open(daemon), Duration::from_millis(500));
    work_on(bucket, daemon, work);
    bucket.inject(Faults::None);
    let count = bucket.injected().get(&fault).copied().unwrap_or(0);
    println!("injected: {}", count - before.get(&fault).copied().unwrap_or(0));
    if !daemon.is_running() {
        start(daemon);
    }
    assert_eq!(history.prefix(&mut open(daemon)), history.count(), "{fault:?} {part:?} {work:?}");
    wait_for("the healed store takes everything", || {
        let _ = daemon.command(&["drain"]);
        let _ = daemon.command(&["copy", "sync", &copy_url()]);
        let status = daemon.json(&["status"]);
        let conditions = status["conditions"].as_array().expect("a list");
        let left: Vec<_> =
            conditions.iter().filter(|one| one["kind"] != "no-recovery-key").collect();
        left.is_empty() && status["at_risk"]["bytes"] == 0
    });
}
