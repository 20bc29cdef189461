//! Deduplication from the user's side: equal data is stored once, over kills, restarts and a copy.

use crate::copies::{connect, wait_for};
use serde_json::Value;
use tests::daemon::{Daemon, SMALL};

const MIB: usize = 1 << 20;

fn random(seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = tests::seed::Random::new(seed, 11);
    (0..bytes / 8).flat_map(|_| random.below(u64::MAX).to_le_bytes()).collect()
}

fn stored(daemon: &Daemon) -> u64 {
    let _ = daemon.json(&["drain"]);
    daemon.json(&["status"])["destage"]["stored_bytes"].as_u64().unwrap()
}

fn found(info: &Value) -> (u64, u64) {
    let of = |field: &str| info["dedup"][field].as_u64().unwrap();
    (of("block_count"), of("duplicate_count"))
}

#[test]
fn clones_that_are_updated_alike_store_it_once() {
    let mut daemon = Daemon::started(SMALL, &[("plain", "16MiB")]);
    let made = daemon.json(&["volume", "create", "template", "16MiB", "--dedup"]);
    assert_eq!(made["dedup"]["is_on"], true);
    let base = random(1, 4 * MIB);
    connect(&daemon, "template").write(0, &base, 0);
    let _ = daemon.json(&["snapshot", "create", "template@v1"]);
    for clone in ["a", "b"] {
        let made = daemon.json(&["clone", "template@v1", clone]);
        assert_eq!(made["dedup"]["is_on"], true, "a clone does as its template");
    }
    let before = stored(&daemon);
    assert!(before > 4 * MIB as u64);

    // The same update of both volumes, one after the other, and repeated pages.
    let update = random(2, 2 * MIB);
    connect(&daemon, "a").write(MIB as u64, &update, 0);
    let first = stored(&daemon) - before;
    connect(&daemon, "b").write(MIB as u64, &update, 0);
    let second = stored(&daemon) - before - first;
    assert!(first > 2 * MIB as u64 && second < 64 << 10, "{first}, then {second}");
    let page = random(3, 4096).repeat(512);
    connect(&daemon, "b").write(8 * MIB as u64, &page, 0);
    let third = stored(&daemon) - before - first - second;
    assert!(third < 64 << 10, "a page 512 times: {third}");
    // A volume without deduplication stores it once more.
    connect(&daemon, "plain").write(0, &update, 0);
    let plain = stored(&daemon) - before - first - second - third;
    assert!(plain > 2 * MIB as u64, "{plain}");
    assert_eq!(found(&daemon.json(&["volume", "show", "b"])), (1024, 512 + 511));
    let status = daemon.json(&["status"]);
    assert_eq!(found(&status), (1024 + 512 + 1024, 512 + 511));
    assert_eq!(status["dedup"]["ratio"], 1.666);

    // After a kill the index is filled again from the store.
    daemon.kill();
    daemon.restart();
    wait_for("the fingerprints are read", || {
        let before = found(&daemon.json(&["volume", "show", "b"])).1;
        connect(&daemon, "b").write(12 * MIB as u64, &base[..4096], 0);
        let _ = daemon.json(&["drain"]);
        found(&daemon.json(&["volume", "show", "b"])).1 > before
    });
    let before = stored(&daemon);
    connect(&daemon, "template").write(0, &update, 0);
    assert!(stored(&daemon) - before < 64 << 10);

    // The volume that wrote it first drops it, and the shared data moves.
    connect(&daemon, "a").write(MIB as u64, &random(5, 2 * MIB), 0);
    let _ = daemon.json(&["volume", "set", "b", "--dedup", "false"]);
    let _ = daemon.json(&["drain"]);
    let copy = daemon.place().join("copy").display().to_string();
    let _ = daemon.json(&["copy", "add", &copy, "--interval", "1h"]);
    let _ = daemon.json(&["copy", "sync", &copy]);
    for check in [vec!["fsck"], vec!["fsck", "--copy", &copy]] {
        let found = daemon.json(&check);
        assert_eq!(found["problem_count"], 0, "{found}");
    }
    let check = |daemon: &Daemon| {
        let mut b = connect(daemon, "b");
        assert!(b.read(MIB as u64, 2 * MIB as u32) == update);
        assert!(b.read(8 * MIB as u64, 2 * MIB as u32) == page);
        assert!(b.read(0, MIB as u32) == base[..MIB]);
        assert!(connect(daemon, "template").read(0, 2 * MIB as u32) == update);
        assert!(connect(daemon, "plain").read(0, 2 * MIB as u32) == update);
    };
    check(&daemon);
    let key = daemon.dir().join("spindle.key").display().to_string();
    let mut other = Daemon::new(SMALL, &[]);
    other.argue(&["--key-file", &key]);
    let _ = other.json(&["restore", &copy, "--key-file", &key]);
    other.restart();
    check(&other);
    other.stop();
    daemon.stop();
}
