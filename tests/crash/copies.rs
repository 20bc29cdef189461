//! Deaths between two steps of a copy, of a restore, and of the background work of a restored pool.
//! The copy remains a state that the pool had, the same command repeats a restore, and no pin is
//! left.
//!
//! Invariants:
//! - Writes are sent one at a time, so each state shows a prefix of them.
//! - Each test ends the process at one fail point, and insists that it was this one.

use std::path::PathBuf;
use std::time::{Duration, Instant};
use tests::daemon::{Daemon, SMALL};
use tests::nbd::wire::CMD_WRITE;
use tests::nbd::{Connection, Wanted};
use tests::place::{binary, skip};
use tests::torture::Target;

/// Fail points that each state of a copy passes.
pub const OF_COPIES: &[&str] = &[
    "copy-tables-copied",
    "copy-segments-copied",
    "copy-manifest-written",
    "copy-noted",
    "copy-published",
];
/// Fail points of `spindle restore`.
pub const OF_RESTORES: &[&str] = &[
    "restore-pinned",
    "restore-linked",
    "restore-pin-kept",
    "restore-manifests-brought",
    "restore-manifest-made",
    "restore-volume-keys-brought",
];
/// Fail points of a restored pool.
pub const OF_RESTORED: &[&str] = &["restore-fetched", "restore-whole", "restore-pin-removed"];
/// Fail points of the first start of a pool that was restored in part or from a snapshot.
pub const OF_PARTS: &[&str] = &["restore-rolled-back", "restore-others-dropped", "restore-chosen"];

const BLOCK: usize = 4096;
/// Number of blocks that are written in turn, again and again.
const BLOCKS: u64 = 1024;
/// Longest wait for a state, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A pool with a copy, and its number of answered writes.
struct World {
    source: Daemon,
    url: String,
    written: u64,
}

fn connect(daemon: &Daemon) -> std::io::Result<Connection> {
    Connection::open(&daemon.tcp("db"), &Wanted::everything())
}

/// Returns the contents of the `number`-th write, counted from 1.
fn block(number: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    tests::seed::Random::new(number, 17).fill(&mut bytes);
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// Returns how many of the writes a volume shows, in their order.
fn shown(daemon: &Daemon) -> u64 {
    let mut connection = connect(daemon).expect("it opens");
    let part = 64;
    let mut found = Vec::new();
    for first in (0..BLOCKS).step_by(part) {
        let bytes = connection.read(first * BLOCK as u64, (part * BLOCK) as u32);
        let number = |block: &[u8]| u64::from_le_bytes(block[..8].try_into().expect("8 bytes"));
        for (one, at) in bytes.chunks(BLOCK).zip(first..) {
            let number = number(one);
            let is_complete =
                if number == 0 { one.iter().all(|byte| *byte == 0) } else { one == block(number) };
            assert!(is_complete && (number == 0 || number % BLOCKS == at), "block {at} is torn");
            found.push(number);
        }
    }
    let count = found.iter().copied().max().unwrap_or(0);
    for (number, at) in found.into_iter().zip(0..) {
        let newest = (1..=count).rev().take(BLOCKS as usize).find(|number| number % BLOCKS == at);
        assert_eq!(number, newest.unwrap_or(0), "block {at}, of {count} writes");
    }
    count
}

impl World {
    fn new() -> World {
        let mut source = Daemon::new(SMALL, &[("db", "8MiB")]);
        source.use_binary("spindle-faulty");
        source.restart();
        let url = source.place().join("copy").display().to_string();
        let mut world = World { source, url: url.clone(), written: 0 };
        world.write(BLOCKS / 2);
        let _ = world.source.json(&["copy", "add", &url, "--interval", "1s"]);
        let _ = world.source.json(&["copy", "sync", &url]);
        world
    }

    /// Writes until `count` more writes are answered; returns false if the daemon ends first.
    fn write(&mut self, count: u64) -> bool {
        let Ok(mut connection) = connect(&self.source) else { return false };
        for _ in 0..count {
            let number = self.written + 1;
            let offset = number % BLOCKS * BLOCK as u64;
            match connection.call(CMD_WRITE, 0, offset, BLOCK as u32, &block(number)) {
                Ok(reply) if reply.error == 0 => self.written = number,
                _ => return false,
            }
        }
        true
    }

    fn pins(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.source.place().join("copy/copy/pins"));
        entries.map_or_else(
            |_| Vec::new(),
            |all| all.map(|one| one.expect("an entry").path()).collect(),
        )
    }

    /// Makes a daemon for a pool of the copy, which is not restored yet.
    fn other(&self) -> (Daemon, Vec<String>) {
        let key = self.source.dir().join("spindle.key").display().to_string();
        let mut other = Daemon::new(SMALL, &[]);
        other.use_binary("spindle-faulty");
        other.argue(&["--key-file", &key]);
        let words = ["restore", &self.url, "--key-file", &key].map(str::to_owned);
        (other, words.to_vec())
    }

    /// Restores a pool of the copy and serves it.
    fn restored(&self) -> Daemon {
        let (mut other, words) = self.other();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let _ = other.json(&words);
        other.restart();
        other
    }

    fn wait_without_pins(&self, other: &Daemon) {
        wait_for("the restored pool is whole", || {
            other.json(&["status"])["restored"]["is_complete"] == true
        });
        wait_for("the pin is given back", || self.pins().is_empty());
    }

    /// Checks that a restored pool becomes whole, and has no fault.
    fn check(&self, mut other: Daemon) {
        self.wait_without_pins(&other);
        assert!(shown(&other) <= self.written);
        other.stop();
        let key = self.source.dir().join("spindle.key").display().to_string();
        let found = other.json(&["fsck", "--key-file", &key]);
        assert_eq!(found["problem_count"], 0, "{found}");
    }
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "not in {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn is_faulty_built() -> bool {
    let is_built = binary("spindle-faulty").exists();
    if !is_built {
        skip("the build with fail points is missing (tests/run makes it)");
    }
    is_built
}

#[test]
fn copy_stays_consistent_after_a_crash_between_its_steps() {
    if !is_faulty_built() {
        return;
    }
    let mut world = World::new();
    let mut floor = world.written;
    for (point, nth) in OF_COPIES.iter().flat_map(|point| [(point, 1), (point, 2)]) {
        println!("{point}, {nth}");
        world.source.kill();
        world.source.arm(Some(format!("{point}:{nth}")));
        let started = world.source.try_start();
        world.source.arm(None);
        let deadline = Instant::now() + PATIENCE;
        while started.is_ok() && world.write(20) {
            assert!(Instant::now() < deadline, "it does not come to {point}");
            std::thread::sleep(Duration::from_millis(10));
        }
        let died = world.source.reap().unwrap_or_else(|ended| panic!("{started:?}: {ended}"));
        assert_eq!(died.as_deref(), Some(*point));
        let other = world.restored();
        let count = shown(&other);
        println!("the copy has {count} of {} writes, at least {floor}", world.written);
        assert!((floor..=world.written + 1).contains(&count), "the copy went back");
        // The write that was in flight at the death may be included.
        world.written = world.written.max(count);
        world.check(other);
        // The source continues from its own state.
        world.source.restart();
        world.written = shown(&world.source);
        let _ = world.source.json(&["copy", "sync", &world.url]);
        floor = world.written;
        let found = world.source.json(&["fsck", "--copy", &world.url]);
        assert_eq!(found["problem_count"], 0, "{found}");
    }
    let other = world.restored();
    assert_eq!(shown(&other), world.written);
    world.check(other);
    world.source.stop();
    world.source.fsck();
}

#[test]
fn interrupted_restore_is_completed_by_the_same_command() {
    if !is_faulty_built() {
        return;
    }
    let mut world = World::new();
    for point in OF_RESTORES {
        println!("{point}");
        let (mut other, words) = world.other();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut command = other.prepare(&words);
        let output = command.env("SPINDLE_FAILPOINT", point).output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(&format!("fail point {point}")), "{point}: {said}");
        // Another command cannot continue this restore, and the refusal names the pin that keeps
        // its state at the copy.
        if *point != "restore-pinned" {
            let pins = world.pins();
            let name = pins.last().and_then(|pin| pin.file_name()).expect("it has a pin");
            let otherwise = [&words[..], &["--volume", "db"]].concat();
            let output = other.command(&otherwise);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success(), "{said}");
            assert!(said.contains(&*name.to_string_lossy()), "{said}");
            assert_eq!(world.pins(), pins);
        }
        // The copy continues meanwhile.
        assert!(world.write(50));
        let _ = world.source.json(&["copy", "sync", &world.url]);
        let _ = other.json(&words);
        other.restart();
        let count = shown(&other);
        println!("it shows {count} of {} writes", world.written);
        assert!(count > 0);
        // The pin of the first try has no owner yet, and would expire after a week.
        if *point == "restore-pinned" {
            wait_for("the restored pool is whole", || world.pins().len() == 1);
            std::fs::remove_file(&world.pins()[0]).expect("the pin is a file");
        }
        world.check(other);
    }
    world.source.stop();
}

#[test]
fn partial_restore_is_limited_before_serving_despite_crashes() {
    if !is_faulty_built() {
        return;
    }
    let mut world = World::new();
    let _ = world.source.json(&["volume", "create", "other", "8MiB"]);
    let _ = world.source.json(&["snapshot", "create", "db,other@then"]);
    let then = world.written;
    assert!(world.write(50));
    let _ = world.source.json(&["clone", "other@then", "more"]);
    let _ = world.source.json(&["snapshot", "create", "db,more@later"]);
    let _ = world.source.json(&["copy", "sync", &world.url]);
    for point in OF_PARTS {
        println!("{point}");
        let (mut other, mut words) = world.other();
        words[1] += "@then";
        words.extend(["--volume", "db"].map(str::to_owned));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let _ = other.json(&words);
        other.arm(Some((*point).to_owned()));
        let started = other.try_start();
        other.arm(None);
        let died = other.reap().unwrap_or_else(|ended| panic!("{started:?}: {ended}"));
        assert_eq!(died.as_deref(), Some(*point));
        other.restart();
        let check = |other: &Daemon, volumes: usize| {
            assert_eq!(shown(other), then);
            let listed = other.json(&["volume", "list"]);
            assert_eq!(listed["volumes"].as_array().map(Vec::len), Some(volumes), "{listed}");
            let listed = other.json(&["snapshot", "list"]);
            assert_eq!(listed["snapshots"].as_array().map(Vec::len), Some(2), "{listed}");
        };
        check(&other, 1);
        // The first start chooses only once: objects that are made from here on stay.
        let _ = other.json(&["volume", "create", "new", "1MiB"]);
        other.kill();
        other.restart();
        check(&other, 2);
        world.check(other);
    }
    world.source.stop();
}

/// A step that the link records as done is in the store, for a machine that takes over the pool
/// with the store alone.
#[test]
fn renamed_restored_pool_keeps_its_name_without_its_machine() {
    if !is_faulty_built() {
        return;
    }
    let mut world = World::new();
    let _ = world.source.json(&["snapshot", "create", "db@then"]);
    let _ = world.source.json(&["clone", "db@then", "short", "--ttl", "1h"]);
    let _ = world.source.json(&["copy", "sync", &world.url]);
    let (mut lost, mut words) = world.other();
    words.extend(["--volume", "short", "--as", "kept"].map(str::to_owned));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let _ = lost.json(&words);
    lost.arm(Some("restore-chosen".to_owned()));
    let started = lost.try_start();
    let died = lost.reap().unwrap_or_else(|ended| panic!("{started:?}: {ended}"));
    assert_eq!(died.as_deref(), Some("restore-chosen"));

    let key = world.source.dir().join("spindle.key").display().to_string();
    let store = lost.dir().join("store").display().to_string();
    let mut next = Daemon::new(SMALL, &[]);
    next.argue(&["--key-file", &key, "--store", &store, "--take-over"]);
    next.announce("take-over");
    next.announce("spindle volume accept-loss");
    next.restart();
    let listed = next.json(&["volume", "list"]);
    let volumes = listed["volumes"].as_array().expect("a list");
    assert_eq!(volumes.len(), 1, "{listed}");
    assert_eq!(volumes[0]["name"], "kept", "{listed}");
    // The volume was asked for by name, so it does not expire with the clone.
    assert!(volumes[0]["expires_at"].as_u64().unwrap_or(0) == 0, "{listed}");
    wait_for("the pool is whole", || next.json(&["status"])["restored"]["is_complete"] == true);
    next.stop();
    world.source.stop();
}

#[test]
fn restored_pool_survives_a_crash_as_fetching_ends() {
    if !is_faulty_built() {
        return;
    }
    let mut world = World::new();
    for point in OF_RESTORED {
        println!("{point}");
        let (mut other, words) = world.other();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let _ = other.json(&words);
        other.arm(Some((*point).to_owned()));
        let started = other.try_start();
        other.arm(None);
        if started.is_ok() {
            wait_for("it dies", || connect(&other).is_err());
        }
        let died = other.reap().unwrap_or_else(|ended| panic!("{started:?}: {ended}"));
        assert_eq!(died.as_deref(), Some(*point));
        other.restart();
        assert_eq!(shown(&other), world.written);
        world.check(other);
        assert!(world.write(50));
        let _ = world.source.json(&["copy", "sync", &world.url]);
    }
    world.source.stop();
}
