//! Scrub finds damaged segments of the store, repairs them from a copy if one has them, and names
//! them otherwise, whichever process dies.

use crate::conditions::conditions;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tests::daemon::{Daemon, SMALL};
use tests::nbd::wire::{CMD_READ, EIO};
use tests::nbd::{Connection, Wanted};
use tests::seed::{Random, seeds};

const BYTES: u64 = 12 << 20;
const PART: u64 = 1 << 20;
const PUT_BACK: &str = "was put back from a copy";

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "not in a minute: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Makes a pool without caches, so that clients read from the store.
fn filled(seed: u64) -> (Daemon, Vec<u8>) {
    let settings = SMALL.replace(
        "[cache]\nsize = \"64MiB\"",
        "[cache]\nsize = \"0\"\n[memory_cache]\nsize = \"0\"",
    );
    let daemon = Daemon::started(&settings, &[("db", "64MiB")]);
    // Random data, which does not compress.
    let mut random = Random::new(seed, 9);
    let mut bytes = vec![0; BYTES as usize];
    random.fill(&mut bytes);
    let mut db = connect(&daemon);
    for (part, bytes) in (0..).zip(bytes.chunks(PART as usize)) {
        db.write(part * PART, bytes, 0);
    }
    let _ = daemon.command(&["drain"]);
    (daemon, bytes)
}

fn connect(daemon: &Daemon) -> Connection {
    Connection::open(&daemon.tcp("db"), &Wanted::everything()).expect("it opens")
}

fn check(daemon: &Daemon, bytes: &[u8]) {
    let mut db = connect(daemon);
    for (part, bytes) in (0..).zip(bytes.chunks(PART as usize)) {
        assert!(db.read(part * PART, PART as u32) == bytes, "part {part}");
    }
}

fn segments(folder: &Path) -> Vec<PathBuf> {
    let inside = |dir: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(dir).expect("a readable directory");
        entries.map(|entry| entry.expect("a readable entry").path()).collect()
    };
    let mut found: Vec<PathBuf> =
        inside(&folder.join("segments")).iter().flat_map(|epoch| inside(epoch)).collect();
    found.sort();
    found
}

/// Flips a bit of one object, cuts another, and removes a third. Returns their contents.
fn damage(victims: &[&PathBuf]) -> Vec<Vec<u8>> {
    let [flipped, cut, gone] = victims else { panic!("three of them") };
    let held = victims.iter().map(|path| std::fs::read(path).expect("a readable file")).collect();
    let mut bytes = std::fs::read(flipped).expect("a readable file");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    put(flipped, &bytes);
    let bytes = std::fs::read(cut).expect("a readable file");
    put(cut, &bytes[..bytes.len() - 1]);
    std::fs::remove_file(gone).expect("it can be removed");
    held
}

/// Replaces an object atomically, as an object store does: a concurrent scrub finds the old or the
/// new one, never an empty file.
fn put(path: &Path, bytes: &[u8]) {
    // The suffix marks an object that is being written, so this is no object's name.
    let staged = PathBuf::from(format!("{}#1", path.display()));
    std::fs::write(&staged, bytes).expect("a writable file");
    std::fs::rename(&staged, path).expect("it can be renamed");
}

fn status(daemon: &Daemon) -> Value {
    daemon.json(&["scrub", "status"])
}

fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or_else(|| panic!("no {name} in {value}"))
}

fn warnings(daemon: &Daemon) -> String {
    daemon.json(&["status"])["warnings"].to_string()
}

#[test]
fn scrub_repairs_from_a_copy_despite_kills_and_stops() {
    for seed in seeds(1) {
        println!("SEED={seed}");
        let (mut daemon, bytes) = filled(seed);
        daemon.announce(PUT_BACK);
        daemon.announce("reading it once more");
        daemon.announce("object-missing");
        let copy = daemon.place().join("copy").display().to_string();
        let _ = daemon.json(&["copy", "add", &copy, "--interval", "1s"]);
        let _ = daemon.json(&["copy", "sync", &copy]);
        let all = segments(&daemon.dir().join("store"));
        assert!(all.len() >= 9, "{all:?}");
        let last = all.len() - 1;
        let victims = [&all[1], &all[last / 2], &all[last]];
        let held = damage(&victims);

        let begun = daemon.json(&["scrub", "start", "--rate", "2M"]);
        assert_eq!(
            (begun["is_running"].as_bool(), number(&begun, "repaired_count")),
            (Some(true), 0)
        );
        wait_for("it has begun", || number(&status(&daemon), "segment_count") >= 2);
        // An orderly stop loses no progress, a kill at most a minute of it; both resume without a
        // command.
        daemon.stop();
        let before = status(&daemon);
        assert_eq!(
            (before["is_running"].as_bool(), before["is_served"].as_bool()),
            (Some(true), Some(false))
        );
        let done = number(&before, "segment_count");
        assert!((2..all.len() as u64).contains(&done), "{before}");
        daemon.restart();
        assert!(number(&status(&daemon), "segment_count") >= done);
        daemon.kill();
        daemon.restart();
        let after = status(&daemon);
        assert!(after["is_running"] == true && number(&after, "segment_count") >= done, "{after}");
        // A scrub that the user has stopped resumes only on request.
        let _ = daemon.command(&["scrub", "stop"]);
        let stopped = status(&daemon);
        assert_eq!(
            (stopped["is_running"].as_bool(), stopped["is_stopped"].as_bool()),
            (Some(false), Some(true))
        );
        daemon.stop();
        daemon.restart();
        assert_eq!(status(&daemon)["is_stopped"], true);
        let again = daemon.json(&["scrub", "start", "--rate", "2M"]);
        assert!(number(&again, "segment_count") >= done, "{again}");
        // The running scrub adopts the new rate.
        let _ = daemon.json(&["scrub", "start", "--rate", "10G"]);
        wait_for("it has ended", || status(&daemon)["ended_at"].is_u64());
        let ended = status(&daemon);
        assert_eq!((number(&ended, "bad_count"), number(&ended, "permille")), (0, 1000), "{ended}");
        // Some may have been repaired before the kill, after which the scrub reads them again.
        assert!((1..=3).contains(&number(&ended, "repaired_count")), "{ended}");
        for (path, held) in victims.iter().zip(held) {
            assert!(std::fs::read(path).expect("it is back") == held, "{}", path.display());
        }
        check(&daemon, &bytes);
        daemon.fsck();
        assert!(!warnings(&daemon).contains("scrub"));
        daemon.stop();
    }
}

#[test]
fn reads_use_copies_and_missing_objects_stay_reported() {
    for seed in seeds(1) {
        println!("SEED={seed}");
        let (mut daemon, bytes) = filled(seed);
        for text in [PUT_BACK, "segment", "frame", "orrupt"] {
            daemon.announce(text);
        }
        let all = segments(&daemon.dir().join("store"));
        let victims = [&all[2], &all[4], &all[6]];
        let held = damage(&victims);
        let refused = daemon.command(&["scrub", "stop"]);
        assert!(String::from_utf8_lossy(&refused.stderr).contains("none runs"), "{refused:?}");
        let _ = daemon.json(&["scrub", "start", "--every", "1s", "--rate", "10G"]);
        wait_for("all three are named", || status(&daemon)["bad"].as_array().unwrap().len() == 3);
        assert!(warnings(&daemon).contains("3 segments that are damaged or missing"));
        assert_eq!(conditions(&daemon, "segments-damaged").len(), 1);
        let named = status(&daemon)["bad"].to_string();
        for victim in victims {
            assert!(named.contains(victim.file_name().unwrap().to_str().unwrap()), "{named}");
        }
        let failed = |daemon: &Daemon| {
            let mut db = connect(daemon);
            let blocks = (0..BYTES).step_by(64 << 10);
            let failing = blocks.filter(|start| {
                let reply = db.call(CMD_READ, 0, *start, 64 << 10, &[]).expect("a reply");
                assert!(reply.error == 0 || reply.error == EIO, "{}", reply.error);
                reply.error != 0
            });
            failing.count()
        };
        assert!(failed(&daemon) > 0, "three segments are bad and nobody notices");
        // The next scheduled run finds the objects that were put back by hand.
        put(victims[0], &held[0]);
        wait_for("two are named", || status(&daemon)["bad"].as_array().unwrap().len() == 2);
        put(victims[1], &held[1]);
        put(victims[2], &held[2]);
        wait_for("none is named", || status(&daemon)["bad"].as_array().unwrap().is_empty());
        assert!(!warnings(&daemon).contains("scrub"), "{}", warnings(&daemon));
        let _ = daemon.command(&["scrub", "stop"]);
        assert!(status(&daemon)["next_at"].is_null());
        check(&daemon, &bytes);

        // With a copy, a reader does not wait for a scrub.
        let copy = daemon.place().join("copy").display().to_string();
        let _ = daemon.json(&["copy", "add", &copy, "--interval", "1s"]);
        let _ = daemon.json(&["copy", "sync", &copy]);
        daemon.stop();
        let held = damage(&victims);
        daemon.restart();
        check(&daemon, &bytes);
        // The reader needs only data that the cut object still has, so it is not repaired.
        assert_eq!(daemon.json(&["status"])["tier"]["repaired_count"], 2);
        let mut repaired = 0;
        // The first run may be the rest of the stopped one.
        for _ in 0..2 {
            let _ = daemon.json(&["scrub", "start", "--rate", "10G"]);
            wait_for("it has ended", || status(&daemon)["ended_at"].is_u64());
            repaired += number(&status(&daemon), "repaired_count");
        }
        assert_eq!(repaired, 1);
        for (path, held) in victims.iter().zip(held) {
            assert!(std::fs::read(path).expect("it is back") == held, "{}", path.display());
        }
        daemon.fsck();
        daemon.stop();
    }
}
