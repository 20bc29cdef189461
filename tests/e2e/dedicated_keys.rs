//! Volumes with a key of their own: once erased, here and in copies, they cannot be read from
//! objects that were kept elsewhere.

use crate::conditions::conditions;
use crate::copies::{connect, copy_tree, refused, wait_for};
use std::path::Path;
use std::time::{Duration, Instant};
use tests::daemon::{Daemon, SMALL};

const BYTES: u32 = 1 << 20;

fn random(seed: u64) -> Vec<u8> {
    let mut random = tests::seed::Random::new(seed, 5);
    (0..BYTES / 8).flat_map(|_| random.below(u64::MAX).to_le_bytes()).collect()
}

/// Returns the key documents below a store.
fn keys(store: &Path) -> Vec<(String, Vec<u8>)> {
    let Ok(entries) = std::fs::read_dir(store.join("volumekeys")) else { return Vec::new() };
    let read = |entry: std::fs::DirEntry| {
        (entry.file_name().to_string_lossy().into_owned(), std::fs::read(entry.path()).unwrap())
    };
    let mut found: Vec<_> = entries.map(|entry| read(entry.unwrap())).collect();
    found.sort();
    found
}

#[test]
fn an_erased_volume_is_gone_from_every_copy_and_its_neighbours_stay() {
    let mut daemon = Daemon::started(SMALL, &[("plain", "8MiB")]);
    let _ = daemon.json(&["volume", "create", "own", "8MiB", "--dedicated-key"]);
    let (plain_bytes, own_bytes) = (random(1), random(2));
    connect(&daemon, "plain").write(0, &plain_bytes, 0);
    connect(&daemon, "own").write(0, &own_bytes, 0);
    let info = daemon.json(&["volume", "show", "own"]);
    assert_eq!(info["dedicated_key"], info["id"]);
    refused(&daemon, &["volume", "rm", "plain", "--erase"], "no dedicated key");
    let _ = daemon.json(&["snapshot", "create", "own@monday"]);
    let clone = daemon.json(&["clone", "own@monday", "clone"]);
    assert_eq!(clone["dedicated_key"], info["id"], "a clone shares the key");
    let copy = daemon.place().join("copy");
    let url = copy.display().to_string();
    let _ = daemon.json(&["copy", "add", &url, "--interval", "1h"]);
    let _ = daemon.json(&["copy", "sync", &url]);
    let store = daemon.dir().join("store");
    assert_eq!(keys(&copy.join("copy")), keys(&store)[keys(&store).len() - 1..]);

    // A restore from the copy alone yields both volumes whole.
    let key = daemon.dir().join("spindle.key").display().to_string();
    let mut other = Daemon::new(SMALL, &[]);
    other.argue(&["--key-file", &key]);
    let _ = other.json(&["restore", &url, "--key-file", &key]);
    other.restart();
    assert!(connect(&other, "own").read(0, BYTES) == own_bytes);
    assert!(connect(&other, "clone").read(0, BYTES) == own_bytes);
    other.stop();

    // A stranger keeps all earlier objects except for the keys.
    let kept = daemon.place().join("kept");
    daemon.stop();
    copy_tree(&store, &kept);
    daemon.restart();
    refused(&daemon, &["volume", "rm", "own", "--erase"], "clone");
    let _ = daemon.json(&["volume", "rm", "clone", "--now"]);
    refused(&daemon, &["volume", "rm", "own", "--erase"], "own@monday");
    let _ = daemon.json(&["snapshot", "rm", "own@monday"]);
    let before = keys(&store);
    let done = daemon.json(&["volume", "rm", "own", "--erase"]);
    let message = done["message"].as_str().unwrap();
    assert!(message.contains("destroyed") && !message.contains("copies"), "{message}");
    let after = keys(&store);
    assert_eq!((after.len(), keys(&copy.join("copy")) == after), (1, true));
    assert!(after[0].0 > before[before.len() - 1].0, "{after:?}");
    refused(&daemon, &["volume", "show", "own"], "there is none");
    let found = daemon.json(&["fsck"]);
    assert_eq!(found["problem_count"], 0, "{found}");
    assert!(connect(&daemon, "plain").read(0, BYTES) == plain_bytes);
    let _ = daemon.json(&["copy", "sync", &url]);
    let found = daemon.json(&["fsck", "--copy", &url]);
    assert_eq!(found["problem_count"], 0, "{found}");

    std::fs::remove_dir_all(kept.join("volumekeys")).unwrap();
    copy_tree(&store.join("volumekeys"), &kept.join("volumekeys"));
    let mut thief = Daemon::new(SMALL, &[]);
    let kept = kept.display().to_string();
    thief.argue(&["--key-file", &key, "--store", &kept, "--take-over"]);
    thief.announce("the volume's dedicated key is not in the store");
    // The kept objects are an earlier state of the pool.
    thief.announce("could not bring the copy");
    thief.announce("may still have keys of volumes that were erased");
    thief.restart();
    let listed = thief.json(&["volume", "show", "own"]);
    assert_eq!(listed["is_closed"], true, "{listed}");
    let found = thief.command(&["fsck", "--key-file", &key, "-o", "json"]);
    let found = String::from_utf8_lossy(&found.stdout).into_owned();
    assert!(found.contains("volume own") && found.contains("volume clone"), "{found}");
    assert!(connect(&thief, "plain").read(0, BYTES) == plain_bytes);
    thief.stop();
    daemon.stop();
}

/// A copy that cannot be reached is named until it is reached.
#[test]
fn unreachable_copy_keeps_the_key_and_shows_in_status() {
    let mut daemon = Daemon::started(SMALL, &[("plain", "8MiB")]);
    let _ = daemon.json(&["volume", "create", "own", "8MiB", "--dedicated-key"]);
    connect(&daemon, "own").write(0, &random(3), 0);
    let copy = daemon.place().join("copy");
    let url = copy.display().to_string();
    let _ = daemon.json(&["copy", "add", &url]);
    let _ = daemon.json(&["copy", "sync", &url]);
    daemon.announce("could not bring the copy");
    daemon.announce("may still have keys of volumes that were erased");
    let away = daemon.place().join("away");
    std::fs::rename(&copy, &away).unwrap();
    let done = daemon.json(&["volume", "rm", "own", "--erase"]);
    assert!(done["message"].as_str().unwrap().contains(&url), "{done}");
    let warns =
        |daemon: &Daemon| daemon.json(&["status"])["warnings"].to_string().contains("erased");
    assert!(warns(&daemon));
    assert_eq!(conditions(&daemon, "copy-holds-erased-keys")[0]["subject"], *url);
    // The same after a restart.
    daemon.kill();
    daemon.restart();
    wait_for("it is told again", || warns(&daemon));
    wait_for("why", || !conditions(&daemon, "copy-failing").is_empty());
    std::fs::rename(&away, &copy).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let _ = daemon.json(&["copy", "sync", &url]);
    while warns(&daemon) {
        assert!(Instant::now() < deadline, "the copy is there, and still warned of");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(keys(&copy.join("copy")).last(), keys(&daemon.dir().join("store")).last());
    daemon.stop();
}
