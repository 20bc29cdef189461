//! Copies of some volumes, and restores of some volumes or as of a snapshot: the pool contains only
//! these volumes, lacks nothing that they need, and is in this state before anything is served.

use crate::copies::{connect, copy_of, names, opened, refused, restored, wait_for};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;
use tests::daemon::{Daemon, SMALL};
use tests::nbd::{Connection, Wanted};

/// `URL@SNAPSHOT`: the volumes of the snapshot show its contents, and later writes stay.
#[test]
fn a_pool_is_restored_as_of_a_snapshot() {
    let mut source = Daemon::started(SMALL, &[("db", "8MiB"), ("wal", "8MiB"), ("plain", "8MiB")]);
    let url = source.place().join("copy").display().to_string();
    let mut clients: Vec<_> =
        ["db", "wal", "plain"].map(|volume| connect(&source, volume)).into_iter().collect();
    for client in &mut clients {
        client.write(0, &[1; 1 << 20], 0);
    }
    let _ = source.json(&["snapshot", "create", "db,wal@monday"]);
    for client in &mut clients {
        client.write(0, &[2; 1 << 20], 0);
    }
    let _ = source.json(&["snapshot", "create", "db@tuesday"]);
    clients[0].write(0, &[3; 4096], 0);
    let _ = source.json(&["copy", "add", &url, "--interval", "1h"]);
    let _ = source.json(&["copy", "sync", &url]);
    let key = source.dir().join("spindle.key").display().to_string();

    let mut other = Daemon::new(SMALL, &[]);
    other.argue(&["--key-file", &key]);
    let nowhere = format!("{url}@sunday");
    let said = other.command(&["restore", &nowhere, "--key-file", &key]);
    let text = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(!said.status.success() && text.contains("it has monday, tuesday"), "{text}");
    let monday = format!("{url}@monday");
    let made = other.json(&["restore", &monday, "--key-file", &key]);
    assert_eq!(made["snapshot"], "monday");
    assert_eq!(made["without_snapshot"], serde_json::json!(["plain"]));
    other.restart();
    let check = |other: &Daemon, first: u8| {
        let mut expected = vec![1; 1 << 20];
        assert!(connect(other, "wal").read(0, 1 << 20) == expected);
        expected[..4096].fill(first);
        assert!(connect(other, "db").read(0, 1 << 20) == expected);
        assert!(connect(other, "plain").read(0, 1 << 20) == [2; 1 << 20]);
        assert!(connect(other, "db@tuesday").read(0, 1 << 20) == [2; 1 << 20]);
    };
    check(&other, 1);
    // This happens once: later writes stay.
    connect(&other, "db").write(0, &[4; 4096], 0);
    for _ in 0..2 {
        other.kill();
        other.restart();
        check(&other, 4);
    }
    other.stop();
    let found = other.json(&["fsck", "--key-file", &key]);
    assert_eq!(found["problem_count"], 0, "{found}");
    drop(clients);
    source.stop();
}

/// Returns blocks that do not compress and differ for each seed.
fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..bytes / 8).flat_map(|_| next()).collect()
}

fn segment_bytes(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).map_or_else(|_| Vec::new(), |all| all.collect());
    entries
        .into_iter()
        .map(|entry| {
            let entry = entry.unwrap();
            match entry.file_type().unwrap().is_dir() {
                true => segment_bytes(&entry.path()),
                false => entry.metadata().unwrap().len(),
            }
        })
        .sum()
}

fn volume_names(daemon: &Daemon) -> Vec<String> {
    let list = daemon.json(&["volume", "list"]);
    let volumes = list["volumes"].as_array().unwrap().iter();
    volumes.map(|volume| volume["name"].as_str().unwrap().to_owned()).collect()
}

/// `--volume` and `--as`: the other volumes are gone before anything is served, but the blocks that
/// a clone shares with them stay.
#[test]
fn some_volumes_of_a_copy_are_restored() {
    const MIB: usize = 1 << 20;
    let volumes = [("db", "8MiB"), ("wal", "8MiB"), ("plain", "8MiB")];
    let mut source = Daemon::started(SMALL, &volumes);
    let url = source.place().join("copy").display().to_string();
    let (first, second) = (noise(1, 4 * MIB), noise(2, MIB));
    connect(&source, "db").write(0, &first, 0);
    let _ = source.json(&["drain"]);
    connect(&source, "plain").write(0, &noise(3, 8 * MIB), 0);
    connect(&source, "wal").write(0, &second, 0);
    let _ = source.json(&["snapshot", "create", "db,plain@monday"]);
    let _ = source.json(&["clone", "db@monday", "test"]);
    let _ = source.json(&["snapshot", "create", "test@own"]);
    connect(&source, "test").write(0, &second[..4096], 0);
    connect(&source, "db").write(0, &second, 0);
    let _ = source.json(&["snapshot", "create", "db@tuesday"]);
    let _ = source.json(&["volume", "create", "gone", "1MiB"]);
    let _ = source.json(&["volume", "rm", "gone"]);
    let _ = source.json(&["copy", "add", &url, "--interval", "1h"]);
    let _ = source.json(&["copy", "sync", &url]);
    let key = source.dir().join("spindle.key").display().to_string();
    let new = || {
        let mut other = Daemon::new(SMALL, &[]);
        other.argue(&["--key-file", &key]);
        other
    };
    let restore = |other: &Daemon, more: &[&str]| {
        other.json(&[&["restore"], more, &["--key-file", &key]].concat())
    };

    let mut one = new();
    let monday = format!("{url}@monday");
    let sunday = format!("{url}@sunday");
    for (arguments, words) in [
        (&[&url[..], "--volume", "nobody"][..], "it has db, wal, plain, test"),
        (&[&url, "--volume", "gone"], "no volume gone"),
        (&[&url, "--as", "new"], "choose one with --volume"),
        (&[&url, "--volume", "db", "--volume", "wal", "--as", "new"], "a name for one volume"),
        (&[&sunday, "--volume", "db"], "volume db does not have a snapshot sunday"),
        (&[&monday, "--volume", "wal"], "it has no snapshots"),
        (&[&url, "--volume", "db", "--as", "other/new"], "the new pool is called"),
        (&[&url, "--volume", "db", "--as", ".new"], "check name"),
    ] {
        refused(&one, &[&["restore"], arguments, &["--key-file", &key]].concat(), words);
    }
    let made = restore(&one, &[&monday, "--volume", "db", "--as", "old"]);
    assert_eq!(made["excluded"], serde_json::json!(["wal", "plain", "test"]), "{made}");
    assert_eq!(made["volume_name"], "old");
    one.restart();
    let mut expected = first.clone();
    let check = |one: &Daemon, expected: &[u8]| {
        assert_eq!(volume_names(one), ["old"]);
        assert!(connect(one, "old").read(0, 4 * MIB as u32) == expected);
        assert!(connect(one, "old@tuesday").read(0, MIB as u32) == second);
        let listed = one.json(&["snapshot", "list"]);
        assert_eq!(listed["snapshots"].as_array().unwrap().len(), 2, "{listed}");
    };
    check(&one, &expected);
    connect(&one, "old").write(4096, &[7; 4096], 0);
    expected[4096..8192].fill(7);
    let _ = one.json(&["volume", "create", "later", "1MiB"]);
    connect(&one, "later").write(0, &[8; 4096], 0);
    one.kill();
    one.restart();
    // A volume that was created since must not be dropped.
    assert!(connect(&one, "later").read(0, 4096) == [8; 4096]);
    let _ = one.json(&["volume", "rm", "later", "--now"]);
    check(&one, &expected);
    wait_for("everything is here", || one.json(&["status"])["restored"]["is_complete"] == true);

    let mut two = new();
    let made = restore(&two, &[&url, "--volume", "wal", "--volume", "test"]);
    assert_eq!(made["excluded"], serde_json::json!(["db", "plain"]), "{made}");
    two.restart();
    let shown = |two: &Daemon| {
        assert_eq!(volume_names(two), ["test", "wal"]);
        let mut test = first.clone();
        assert!(connect(two, "test@own").read(0, 4 * MIB as u32) == test);
        test[..4096].copy_from_slice(&second[..4096]);
        assert!(connect(two, "test").read(0, 4 * MIB as u32) == test);
        assert!(connect(two, "wal").read(0, MIB as u32) == second);
    };
    shown(&two);
    two.kill();
    two.restart();
    wait_for("everything is here", || two.json(&["status"])["restored"]["is_complete"] == true);
    let all = segment_bytes(&source.place().join("copy/copy/segments"));
    for (daemon, bytes) in [(&one, 5 * MIB), (&two, 5 * MIB)] {
        let own = segment_bytes(&daemon.dir().join("store/segments"));
        println!("{own} bytes of {all}, {bytes} are of the volumes");
        assert!(own < all - 6 * MIB as u64, "{own} bytes were fetched of {all}");
    }
    // The restored pools work alone, without the copy.
    source.stop();
    std::fs::remove_dir_all(source.place().join("copy")).unwrap();
    for daemon in [&mut one, &mut two] {
        daemon.stop();
        let found = daemon.json(&["fsck", "--key-file", &key]);
        assert_eq!(found["problem_count"], 0, "{found}");
        daemon.restart();
    }
    check(&one, &expected);
    shown(&two);
    let _ = two.json(&["volume", "promote", "test"]);
}

/// A snapshot below the largest allowed number of dependent volumes cannot be rolled back to; the
/// refusal comes before anything is made.
#[test]
fn a_snapshot_that_is_too_deep_is_refused_and_the_newest_state_is_not() {
    let mut source = Daemon::started(SMALL, &[("v0", "1MiB")]);
    connect(&source, "v0").write(0, &[5; 4096], 0);
    let mut deepest = 0;
    loop {
        let _ = source.json(&["snapshot", "create", &format!("v{deepest}@deep{deepest}")]);
        let next = format!("v{}", deepest + 1);
        let output = source.command(&["clone", &format!("v{deepest}@deep{deepest}"), &next]);
        if !output.status.success() {
            break;
        }
        deepest += 1;
        assert!(deepest < 64, "there is a bound");
    }
    let url = source.place().join("copy").display().to_string();
    let _ = source.json(&["copy", "add", &url, "--interval", "1h"]);
    let _ = source.json(&["copy", "sync", &url]);
    let key = source.dir().join("spindle.key").display().to_string();
    let mut other = Daemon::new(SMALL, &[]);
    other.argue(&["--key-file", &key]);
    let deep = format!("{url}@deep{deepest}");
    for more in [&[][..], &["--volume", &format!("v{deepest}")]] {
        let arguments = [&["restore", &deep, "--key-file", &key], more].concat();
        refused(&other, &arguments, &format!("volume v{deepest} cannot be rolled back to"));
    }
    assert_eq!(names(&source.place().join("copy"), "pins").len(), 0);
    let above = format!("{url}@deep{}", deepest - 1);
    let name = format!("v{}", deepest - 1);
    let _ = other.json(&["restore", &above, "--volume", &name, "--as", "kept", "--key-file", &key]);
    other.restart();
    assert!(connect(&other, "kept").read(0, 4096) == [5; 4096]);
    other.stop();
    source.stop();
}

/// `copy add --volume`: the copy has the blocks that these volumes show, whatever they were made
/// from, and little else.
#[test]
fn a_copy_of_some_volumes() {
    const MIB: usize = 1 << 20;
    let volumes = [("db", "8MiB"), ("wal", "8MiB"), ("plain", "8MiB")];
    let mut source = Daemon::started(SMALL, &volumes);
    let url = source.place().join("copy").display().to_string();
    let (first, second) = (noise(1, 4 * MIB), noise(2, MIB));
    connect(&source, "db").write(0, &first, 0);
    let _ = source.json(&["drain"]);
    connect(&source, "plain").write(0, &noise(3, 8 * MIB), 0);
    let _ = source.json(&["drain"]);
    connect(&source, "wal").write(0, &second, 0);
    let _ = source.json(&["snapshot", "create", "db,plain@monday"]);
    let _ = source.json(&["clone", "db@monday", "test"]);
    let _ = source.json(&["snapshot", "create", "test@own"]);
    connect(&source, "test").write(0, &second[..4096], 0);
    let add = ["copy", "add", &url, "--interval", "1h", "--volume"];
    refused(&source, &[&add[..], &["nobody"]].concat(), "there is none");
    let _ = source.json(&[&add[..], &["test", "--volume", "wal"]].concat());
    let _ = source.json(&["copy", "sync", &url]);
    assert_eq!(copy_of(&source)["volumes"], serde_json::json!(["wal", "test"]));
    // No data of another volume is copied, whichever process dies.
    connect(&source, "plain").write(0, &noise(4, 4 * MIB), 0);
    let _ = source.json(&["drain"]);
    source.kill();
    source.restart();
    connect(&source, "wal").write(0, &first[..4096], 0);
    let _ = source.json(&["copy", "sync", &url]);
    let segments = source.place().join("copy/copy/segments");
    let bytes = segment_bytes(&segments);
    println!("{bytes} bytes are copied of {}", 5 * MIB);
    assert!(bytes > 5 * MIB as u64 && bytes < 6 * MIB as u64, "{bytes} bytes are copied");
    let found = source.json(&["fsck", "--copy", &url]);
    assert_eq!(found["problem_count"], 0, "{found}");

    let (mut reader, endpoint) = opened(&source, &url, "open.log");
    let open =
        |export: &str| Connection::open(&endpoint.with_export(export), &Wanted::everything());
    assert!(open("test@own").expect("it opens").read(0, 4 * MIB as u32) == first);
    assert!(open("plain").is_err() && open("db@monday").is_err());
    reader.terminate();
    assert!(reader.wait(Duration::from_secs(20)).expect("it ends").success());

    let key = source.dir().join("spindle.key").display().to_string();
    let mut other = Daemon::new(SMALL, &[]);
    other.argue(&["--key-file", &key]);
    let plain = ["restore", &url, "--key-file", &key, "--volume", "plain"];
    refused(&other, &plain, "it has wal, test");
    let _ = other.json(&["restore", &url, "--key-file", &key]);
    other.restart();
    let shown = |other: &Daemon| {
        assert_eq!(volume_names(other), ["test", "wal"]);
        let mut test = first.clone();
        assert!(connect(other, "test@own").read(0, 4 * MIB as u32) == test);
        test[..4096].copy_from_slice(&second[..4096]);
        assert!(connect(other, "test").read(0, 4 * MIB as u32) == test);
        let mut wal = second.clone();
        wal[..4096].copy_from_slice(&first[..4096]);
        assert!(connect(other, "wal").read(0, MIB as u32) == wal);
    };
    shown(&other);
    other.kill();
    other.restart();
    wait_for("everything is here", || other.json(&["status"])["restored"]["is_complete"] == true);
    shown(&other);
    other.stop();
    let found = other.json(&["fsck", "--key-file", &key]);
    assert_eq!(found["problem_count"], 0, "{found}");
    other.restart();
    shown(&other);
    let status = other.json(&["status"]);
    assert_eq!(status["space"]["stuck_count"], 0, "{status}");

    // It becomes a copy of all volumes, in the same place.
    let _ = source.json(&["copy", "rm", &url]);
    let _ = source.json(&["copy", "add", &url, "--interval", "1h"]);
    let _ = source.json(&["copy", "sync", &url]);
    assert_eq!(copy_of(&source)["volumes"], Value::Null);
    let found = source.json(&["fsck", "--copy", &url]);
    assert_eq!(found["problem_count"], 0, "{found}");
    let mut all = restored(&source, &url, &[], &[]);
    assert!(connect(&all, "plain").read(0, 4 * MIB as u32) == noise(4, 4 * MIB));
    all.stop();
    source.stop();
}

/// A dropped clone keeps pages of its origin until it is retired: these pages are neither missed
/// nor fetched.
#[test]
fn origins_of_dropped_clones_are_not_missed() {
    const MIB: usize = 1 << 20;
    let mut source = Daemon::started(SMALL, &[("a", "8MiB"), ("x", "8MiB")]);
    connect(&source, "a").write(0, &noise(1, 4 * MIB), 0);
    let _ = source.json(&["drain"]);
    let _ = source.json(&["snapshot", "create", "a@s"]);
    let _ = source.json(&["clone", "a@s", "d"]);
    connect(&source, "a").write(0, &noise(2, 4 * MIB), 0);
    // A rolled-back volume depends on its former layer in the same way.
    let _ = source.json(&["volume", "create", "r", "8MiB"]);
    connect(&source, "r").write(0, &noise(3, MIB), 0);
    let _ = source.json(&["snapshot", "create", "r@s"]);
    connect(&source, "r").write(0, &noise(4, MIB), 0);
    let _ = source.json(&["snapshot", "rollback", "r@s"]);
    let kept = noise(5, 2 * MIB);
    connect(&source, "x").write(0, &kept, 0);
    let place = source.place();
    let (some, all) = (place.join("some"), place.join("all"));
    let (some, all) = (some.display().to_string(), all.display().to_string());
    let _ = source.json(&["copy", "add", &some, "--interval", "1h", "--volume", "x"]);
    let _ = source.json(&["copy", "add", &all, "--interval", "1h"]);
    for url in [&some, &all] {
        let _ = source.json(&["copy", "sync", url]);
    }
    let key = source.dir().join("spindle.key").display().to_string();
    for (url, more) in [(&some, &[][..]), (&all, &["--volume", "x"])] {
        let mut other = Daemon::new(SMALL, &[]);
        other.argue(&["--key-file", &key]);
        let _ = other.json(&[&["restore", url, "--key-file", &key], more].concat());
        // An error in its log fails the test.
        other.restart();
        assert!(connect(&other, "x").read(0, 2 * MIB as u32) == kept);
        wait_for("everything is here", || {
            other.json(&["status"])["restored"]["is_complete"] == true
        });
        let restored = other.json(&["status"])["restored"].clone();
        assert_eq!(restored["bad_count"].as_u64().unwrap_or(0), 0, "{restored}");
        let bytes = segment_bytes(&other.dir().join("store/segments"));
        println!("{bytes} bytes were fetched");
        assert!(bytes < 3 * MIB as u64, "{bytes} bytes were fetched");
        let found = other.json(&["fsck"]);
        assert_eq!(found["problem_count"], 0, "{found}");
        let onward = other.place().join("onward").display().to_string();
        let _ = other.json(&["copy", "add", &onward, "--interval", "1h"]);
        let _ = other.json(&["copy", "sync", &onward]);
        let found = other.json(&["fsck", "--copy", &onward, "--key-file", &key]);
        assert_eq!(found["problem_count"], 0, "{found}");
        other.stop();
    }
    source.stop();
}

/// If the dedicated key of one volume is gone, the other volumes of a pool restored as of a snapshot are
/// served.
#[test]
fn a_pool_restored_as_of_a_snapshot_opens_without_the_key_of_one_volume() {
    let mut source = Daemon::started(SMALL, &[("x", "1MiB")]);
    let _ = source.json(&["volume", "create", "secret", "1MiB", "--dedicated-key"]);
    connect(&source, "x").write(0, &[1; 4096], 0);
    connect(&source, "secret").write(0, &[2; 4096], 0);
    let _ = source.json(&["snapshot", "create", "x,secret@s"]);
    connect(&source, "x").write(0, &[3; 4096], 0);
    let url = source.place().join("copy").display().to_string();
    let _ = source.json(&["copy", "add", &url, "--interval", "1h"]);
    let _ = source.json(&["copy", "sync", &url]);
    let key = source.dir().join("spindle.key").display().to_string();
    let mut other = Daemon::new(SMALL, &[]);
    other.argue(&["--key-file", &key]);
    let _ = other.json(&["restore", &format!("{url}@s"), "--key-file", &key]);
    std::fs::remove_dir_all(other.dir().join("store/volumekeys")).unwrap();
    other.announce("its dedicated key");
    other.announce("the volume's dedicated key is not in the store");
    other.announce("does not show the snapshot that was asked for");
    other.restart();
    assert!(connect(&other, "x").read(0, 4096) == [1; 4096]);
    other.stop();
    source.stop();
}
