//! Copies in other stores and restores from them: a restored pool opens at once, shows a state that
//! the pool had, and keeps its data, whichever process is killed and whichever store is away.

use crate::conditions::conditions;
use crate::mounted::number_of;
use crate::stores::{History, VOLUMES, open};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tests::bucket::{Bucket, Care};
use tests::daemon::{Daemon, SMALL};
use tests::nbd::wire::{CMD_WRITE, EPERM};
use tests::nbd::{Connection, Endpoint, Wanted};
use tests::place::binary;
use tests::process::Process;
use tests::seed::seeds;
use tests::store::{BUCKET, environment};

pub fn refused(daemon: &Daemon, arguments: &[&str], words: &str) {
    let output = daemon.command(arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{arguments:?} is accepted");
    assert!(said.contains(words), "{arguments:?}: {said}");
}

pub fn connect(daemon: &Daemon, export: &str) -> Connection {
    Connection::open(&daemon.tcp(export), &Wanted::everything()).expect("it opens")
}

/// Returns the only copy of a pool.
pub fn copy_of(daemon: &Daemon) -> Value {
    daemon.json(&["copy", "list"])["copies"][0].clone()
}

pub fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "not in a minute: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Restores the newest state of a copy and serves it; prints the time from the command to the first
/// byte.
pub fn restored(source: &Daemon, url: &str, more: &[&str], variables: &[(&str, &str)]) -> Daemon {
    let key = source.dir().join("spindle.key").display().to_string();
    let mut daemon = Daemon::new(SMALL, &[]);
    daemon.argue(&["--key-file", &key]);
    daemon.environ(variables);
    let begun = Instant::now();
    let made = daemon.json(&[&["restore", url, "--key-file", &key], more].concat());
    daemon.restart();
    let _ = connect(&daemon, "db").read(0, 4096);
    let took = begun.elapsed();
    println!("recovery point {} was read {took:?} after the command", made["recovery_point"]);
    assert!(took < Duration::from_secs(2), "a restore serves within two seconds: {took:?}");
    daemon
}

/// Returns the paths of a copy's objects below a folder, for a copy in a directory.
pub fn names(copy: &Path, folder: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(copy.join("copy").join(folder));
    entries.map_or_else(|_| Vec::new(), |entries| entries.map(|one| one.unwrap().path()).collect())
}

/// Computes CRC-32C, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32| (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
    !bytes
        .iter()
        .fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}

#[test]
fn copy_is_a_past_state_despite_kills() {
    let rounds = number_of("SPINDLE_TEST_COPY_ROUNDS", 4);
    for seed in seeds(1) {
        let mut source = Daemon::started(SMALL, VOLUMES);
        let copy = source.place().join("copy");
        let url = copy.display().to_string();
        let _ = source.json(&["copy", "add", &url, "--interval", "1s"]);
        let mut history = History::new(seed);
        let mut floor = 0;
        for round in 0..rounds {
            history.run_for(&mut open(&source), Duration::from_millis(2500));
            if round % 2 == 0 {
                let _ = source.json(&["copy", "sync", &url]);
                floor = history.count();
                history.run_for(&mut open(&source), Duration::from_millis(500));
            }
            source.kill();
            let mut other = restored(&source, &url, &[], &[]);
            let count = history.prefix(&mut open(&other));
            println!(
                "round {round}: the copy has {count} of {} writes, at least {floor}",
                history.count()
            );
            assert!(count >= floor, "the copy went back: {count} writes of {floor}");
            floor = count;
            wait_for("the restored pool is whole", || {
                other.json(&["status"])["restored"]["is_complete"] == true
            });
            assert_eq!(history.prefix(&mut open(&other)), count);
            other.stop();
            let key = source.dir().join("spindle.key").display().to_string();
            let found = other.json(&["fsck", "--key-file", &key]);
            assert_eq!(found["problem_count"], 0, "{found}");
            source.restart();
        }
        wait_for("pins are given back", || names(&copy, "pins").is_empty());
        let _ = source.json(&["copy", "sync", &url]);
        let found = source.json(&["fsck", "--copy", &url]);
        assert_eq!(found["problem_count"], 0, "{found}");
        source.stop();
    }
}

#[test]
fn restored_pool_serves_during_fetch_despite_kills_and_outages() {
    let bucket = Bucket::start(Care::Honest);
    let variables: Vec<(String, String)> = environment(bucket.address())
        .into_iter()
        .map(|(name, value)| (format!("DR_{name}"), value))
        .collect();
    let variables: Vec<(&str, &str)> =
        variables.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let url = format!("s3://{BUCKET}/dr");
    let mut source = Daemon::new(SMALL, &[("db", "32MiB")]);
    source.environ(&variables);
    source.restart();
    let mut db = connect(&source, "db");
    let mut before = Vec::new();
    for part in 0..16_u64 {
        // Random data, which does not compress.
        let mut random = tests::seed::Random::new(part, 5);
        let bytes: Vec<u8> =
            (0..1 << 17).flat_map(|_| random.below(u64::MAX).to_le_bytes()).collect();
        db.write(part << 20, &bytes, 0);
        before.extend(bytes);
    }
    let _ = source.json(&["snapshot", "create", "db@monday"]);
    let env = ["--env-prefix", "DR_"];
    let _ = source.json(&[&["copy", "add", &url, "--interval", "1s"], &env[..]].concat());
    let _ = source.json(&["copy", "sync", &url]);
    refused(&source, &["copy", "add", &url], "it is there");

    // Slow enough that most of the data is fetched on demand.
    let slow = [&env[..], &["--rate", "256K"]].concat();
    let mut other = restored(&source, &url, &slow, &variables);
    let is_pin = |key: &String| key.starts_with("dr/copy/pins/");
    assert_eq!(bucket.keys().iter().filter(|key| is_pin(key)).count(), 1);
    let whole = |daemon: &Daemon| daemon.json(&["status"])["restored"]["is_complete"] == true;
    let mut there = connect(&other, "db");
    assert!(there.read(15 << 20, 1 << 20) == before[15 << 20..]);
    there.write(0, &[9; 8192], 0);
    there.flush();
    // Meanwhile the source pool changes, and so does its copy.
    for part in 0..16_u64 {
        db.write(part << 20, &vec![part as u8 + 1; 1 << 20], 0);
    }
    let _ = source.json(&["copy", "sync", &url]);
    assert!(!whole(&other), "it cannot be, at that rate");
    drop(there);
    other.kill();
    other.restart();
    let mut expected = before.clone();
    expected[..8192].fill(9);
    let mut there = connect(&other, "db");
    assert!(there.read(0, 16 << 20) == expected);
    assert!(connect(&other, "db@monday").read(0, 16 << 20) == before);

    // When the copy's store goes away, the source reports it and keeps serving; data that has
    // arrived at the restored pool remains readable.
    source.announce("could not bring the copy");
    other.announce("still needs the copy");
    bucket.down();
    db.write(0, &[3; 4096], 0);
    wait_for("the failure is shown", || copy_of(&source).get("failure").is_some());
    let warnings = source.json(&["status"])["warnings"].to_string();
    assert!(warnings.contains("could not bring the copy"), "{warnings}");
    assert!(there.read(0, 8192) == [9; 8192]);
    bucket.up();
    wait_for("it is tried again", || copy_of(&source).get("failure").is_none());
    let _ = source.json(&["copy", "sync", &url]);
    // Reclaim may still be running.
    wait_for("the copy has everything", || copy_of(&source)["lag_seconds"] == 0);
    drop(there);
    other.stop();
    // The restart keeps the restore's rate. Reads have fetched most of the data.
    other.restart();
    wait_for("the restored pool is whole", || whole(&other));
    wait_for("the pin is given back", || !bucket.keys().iter().any(is_pin));
    bucket.down();
    other.stop();
    other.restart();
    assert!(connect(&other, "db").read(0, 16 << 20) == expected);
    assert!(connect(&other, "db@monday").read(0, 16 << 20) == before);
    other.stop();
    let key = source.dir().join("spindle.key").display().to_string();
    let found = other.json(&["fsck", "--key-file", &key]);
    assert_eq!(found["problem_count"], 0, "{found}");
    drop(db);
    source.stop();
}

#[test]
fn restored_pool_reports_a_missing_copy_until_it_returns() {
    let mut source = Daemon::started(SMALL, &[("db", "32MiB")]);
    let copy = source.place().join("copy");
    let url = copy.display().to_string();
    let mut db = connect(&source, "db");
    for block in 0..128u64 {
        let payload: Vec<u8> =
            (0..256 << 10u32).map(|at: u32| (at / 7 + block as u32) as u8).collect();
        db.write(block * (256 << 10), &payload, 0);
    }
    drop(db);
    let _ = source.json(&["copy", "add", &url]);
    let _ = source.json(&["copy", "sync", &url]);
    source.stop();
    // So slow that most of the data is yet to be fetched.
    let mut other = restored(&source, &url, &["--rate", "64k"], &[]);
    assert_eq!(conditions(&other, "restore-failing"), Vec::<Value>::new());
    // Compaction of its metadata reads from the copy.
    for text in ["still needs the copy", "slatedb", "metadata"] {
        other.announce(text);
    }
    let away = source.place().join("away");
    std::fs::rename(&copy, &away).unwrap();
    wait_for("it is told", || !conditions(&other, "restore-failing").is_empty());
    let told = conditions(&other, "restore-failing").remove(0);
    assert_eq!(told["subject"], *url, "{told}");
    assert!(told["what"].as_str().unwrap().contains("still needs the copy"), "{told}");
    assert_eq!(conditions(&other, "store-full"), Vec::<Value>::new());
    std::fs::rename(&away, &copy).unwrap();
    wait_for("it has ended", || conditions(&other, "restore-failing").is_empty());
    other.stop();
}

#[test]
fn unmounted_destination_is_not_mistaken_for_an_empty_copy() {
    let mut source = Daemon::started(SMALL, &[("db", "8MiB")]);
    source.announce("could not bring the copy");
    let place = source.place().path().to_owned();
    let (mount, disk) = (place.join("mount"), place.join("disk"));
    let url = mount.join("dr").display().to_string();
    std::fs::create_dir(&mount).unwrap();
    connect(&source, "db").write(0, &[7; 4096], 0);
    let _ = source.json(&["copy", "add", &url, "--interval", "1s"]);
    let _ = source.json(&["copy", "sync", &url]);
    for is_restarted in [false, true] {
        std::fs::rename(&mount, &disk).unwrap();
        std::fs::create_dir(&mount).unwrap();
        if is_restarted {
            source.kill();
            source.restart();
        }
        connect(&source, "db").write(8192, &[8 + u8::from(is_restarted); 4096], 0);
        let _ = source.json(&["drain"]);
        wait_for("it is missed", || {
            copy_of(&source)["failure"].as_str().is_some_and(|why| why.contains("there is none"))
        });
        assert!(names(&mount.join("dr"), "identity").is_empty(), "no copy is made of it");
        assert!(names(&mount.join("dr"), "states").is_empty(), "and no state published");
        std::fs::remove_dir_all(&mount).unwrap();
        std::fs::rename(&disk, &mount).unwrap();
        let _ = source.command(&["copy", "sync", &url]);
        wait_for("it goes on", || copy_of(&source).get("failure").is_none());
        let _ = source.json(&["copy", "sync", &url]);
        let found = source.json(&["fsck", "--copy", &url]);
        assert_eq!(found["problem_count"], 0, "{found}");
    }
    let other = restored(&source, &url, &[], &[]);
    assert!(connect(&other, "db").read(0, 12288) == [[7; 4096], [0; 4096], [9; 4096]].concat());
    source.stop();
}

#[test]
fn impossible_copies_and_restores_are_refused_with_the_reason() {
    let mut source = Daemon::started(SMALL, &[("db", "8MiB")]);
    let place = source.place().path().to_owned();
    let at = |name: &str| place.join(name).display().to_string();
    let key = source.dir().join("spindle.key").display().to_string();
    connect(&source, "db").write(0, &[7; 4096], 0);
    std::fs::create_dir(place.join("full")).unwrap();
    std::fs::write(place.join("full/letter"), b"x").unwrap();
    refused(&source, &["copy", "add", &at("full")], "it is not empty (it holds letter)");
    let own = source.dir().join("store").display().to_string();
    refused(&source, &["copy", "add", &own], "in the pool's own prefix");
    refused(&source, &["copy", "add", &format!("{own}/x")], "in the pool's own prefix");
    refused(&source, &["copy", "add", "ftp://x/y"], "the scheme is not known");
    refused(&source, &["copy", "add", &at("x"), "--interval", "0s"], "at least 1s");
    refused(&source, &["copy", "add", &at("x"), "--rate", "10"], "1K a second");
    refused(&source, &["copy", "add", &at("x"), "--env-prefix", "A-B"], "variable's name");
    refused(&source, &["copy", "sync", &at("x")], "the pool has none there");
    refused(&source, &["copy", "rm", &at("x")], "the pool has none there");
    let within = format!("file://{own}/copy");
    refused(&source, &["copy", "add", &within], "it is in the pool's own prefix");
    assert_eq!(source.json(&["copy", "list"])["copies"], Value::Array(Vec::new()));

    let mut stranger = Daemon::started(SMALL, &[("db", "8MiB")]);
    refused(
        &source,
        &["copy", "add", &stranger.dir().join("store").display().to_string()],
        "a pool is there",
    );
    let careless = Bucket::start(Care::IgnoresConditions);
    let variables = environment(careless.address());
    let pairs: Vec<(&str, &str)> =
        variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    source.stop();
    source.environ(&pairs);
    source.restart();
    refused(&source, &["copy", "add", &format!("s3://{BUCKET}/x")], "created twice");

    // A copy of snapshots only: writes after a snapshot are not in it.
    let _ = source.json(&["copy", "add", &at("copy"), "--snapshots-only"]);
    let spelled = format!("file://{}/../copy/", place.join("dir").display());
    std::fs::create_dir_all(place.join("dir")).unwrap();
    refused(&source, &["copy", "add", &spelled], "it is there");
    refused(&stranger, &["copy", "add", &at("copy")], "it is a copy of pool");
    let _ = source.json(&["snapshot", "create", "db@monday"]);
    let _ = source.json(&["drain"]);
    let newest = || copy_of(&source)["recovery_point"]["destaged_lsn"].as_u64().unwrap_or(0);
    let lsn = source.json(&["snapshot", "list"])["snapshots"][0]["lsn"].as_u64().unwrap();
    wait_for("the snapshot is there", || newest() >= lsn);
    connect(&source, "db").write(0, &[8; 4096], 0);
    let _ = source.json(&["drain"]);
    let other = restored(&source, &at("copy"), &[], &[]);
    assert!(connect(&other, "db").read(0, 4096) == [7; 4096]);
    assert!(connect(&other, "db@monday").read(0, 4096) == [7; 4096]);
    refused(&other, &["copy", "add", &at("copy")], "of which one was restored from a copy");
    refused(&other, &["restore", &at("copy"), "--key-file", &key], "a pool is there");

    let empty = Daemon::new(SMALL, &[]);
    refused(&empty, &["restore", &at("nowhere"), "--key-file", &key], "there is none");
    refused(&empty, &["restore", &own, "--key-file", &key], "there is none");
    let wrong = stranger.dir().join("spindle.key").display().to_string();
    refused(&empty, &["restore", &at("copy"), "--key-file", &wrong], "key");
    assert!(!empty.dir().join("store/keyring").exists(), "nothing was made");
    refused(&empty, &["fsck", "--copy", &at("nowhere"), "--key-file", &key], "there is none");
    // An identity of a later version.
    let identity = names(&place.join("copy"), "identity").remove(0);
    let text = std::fs::read_to_string(&identity).unwrap();
    let body = text.lines().next().unwrap().replace("\"version\":1", "\"version\":2");
    let checksum = format!("{:08x}", crc32c(body.as_bytes()));
    let seal = text.lines().nth(1).unwrap();
    let at_checksum = seal.find("\"crc32c\":\"").unwrap() + 10;
    let seal = format!("{}{checksum}{}", &seal[..at_checksum], &seal[at_checksum + 8..]);
    std::fs::write(&identity, format!("{body}\n{seal}\n")).unwrap();
    refused(&empty, &["restore", &at("copy"), "--key-file", &key], "newer spindle");
    std::fs::write(&identity, text).unwrap();

    // The copy ends, and the next daemon does not continue it.
    let _ = source.json(&["copy", "rm", &at("copy")]);
    source.kill();
    source.restart();
    assert_eq!(source.json(&["copy", "list"])["copies"], Value::Array(Vec::new()));
    // It can be added again, as its objects belong to this pool.
    let _ = source.json(&["copy", "add", &at("copy")]);
    let _ = source.json(&["copy", "sync", &at("copy")]);
    source.stop();
    let found = source.json(&["copy", "list"]);
    assert_eq!(found["copies"][0]["is_running"], false, "{found}");
    refused(&source, &["copy", "sync", &at("copy")], "no daemon runs");
    stranger.stop();
    drop(other);
}

/// Starts `copy open` and waits until it is ready; returns the process and an endpoint.
pub fn opened(source: &Daemon, url: &str, log: &str) -> (Process, Endpoint) {
    // The key file is given explicitly, as on a machine that has no other file of the pool.
    let key = source.dir().join("spindle.key").display().to_string();
    let mut command = Command::new(binary("spindle"));
    command.args(["copy", "open", url, "--nbd", "127.0.0.1:0", "--key-file", &key]);
    let mut process = Process::start(&mut command, &source.place().join(log)).expect("it starts");
    let mut endpoint = None;
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        assert!(Instant::now() < deadline, "it is not ready: see {log}");
        match process.line(Duration::from_millis(100)) {
            Some(line) if line == "ready" => break,
            Some(line) => endpoint = endpoint.or(Endpoint::parse(&line)),
            None => assert!(process.ended().is_none(), "it has ended: see {log}"),
        }
    }
    (process, endpoint.expect("it serves a volume"))
}

#[test]
fn copy_is_readable_in_place_during_further_copying() {
    let mut source = Daemon::started(SMALL, &[("db", "16MiB"), ("log", "8MiB")]);
    let block = |seed: u64| {
        let mut random = tests::seed::Random::new(seed, 7);
        let mut bytes = vec![0; 256 << 10];
        random.fill(&mut bytes);
        bytes
    };
    let mut db = connect(&source, "db");
    db.write(4096, &block(1), 0);
    let _ = source.json(&["snapshot", "create", "db@monday"]);
    db.write(8192, &block(2), 0);
    let copy = source.place().join("copy");
    let url = copy.display().to_string();
    refused(&source, &["copy", "open", &url, "--nbd", "127.0.0.1:0"], "there is none");
    refused(&source, &["copy", "open", &url], "--nbd");
    let _ = source.json(&["copy", "add", &url, "--interval", "1s"]);
    let _ = source.json(&["copy", "sync", &url]);
    let (mut early, endpoint) = opened(&source, &url, "early.log");
    let open = |endpoint: &Endpoint, export: &str| {
        Connection::open(&endpoint.with_export(export), &Wanted::everything()).expect("it opens")
    };
    // The copy continues, far beyond that state.
    for round in 3..8 {
        db.write(8192, &block(round), 0);
        let _ = source.json(&["copy", "sync", &url]);
    }
    assert_eq!(names(&copy, "pins").len(), 1);
    let (mut late, late_endpoint) = opened(&source, &url, "late.log");
    assert_eq!(names(&copy, "pins").len(), 2);
    // Any offset and length.
    let mut expected = vec![0; 16 << 20];
    expected[4096..4096 + (256 << 10)].copy_from_slice(&block(1));
    let monday = expected.clone();
    expected[8192..8192 + (256 << 10)].copy_from_slice(&block(2));
    for (endpoint, newest) in [(&endpoint, 2), (&late_endpoint, 7)] {
        expected[8192..8192 + (256 << 10)].copy_from_slice(&block(newest));
        let (mut volume, mut snapshot) = (open(endpoint, "db"), open(endpoint, "db@monday"));
        for (offset, length) in [(0, 1 << 20), (5000, 7), (8191, 4098), (300_001, 99_999)] {
            let range = offset..offset + length;
            assert_eq!(volume.read(offset as u64, length as u32), expected[range.clone()]);
            assert_eq!(snapshot.read(offset as u64, length as u32), monday[range]);
        }
        assert!(open(endpoint, "log").read(0, 65536).iter().all(|byte| *byte == 0));
        let reply = volume.call(CMD_WRITE, 0, 0, 4096, &[1; 4096]).expect("it is answered");
        assert_eq!(reply.error, EPERM);
    }
    // The death of the source does not affect a reader of the copy.
    source.kill();
    assert_eq!(open(&endpoint, "db").read(8192, 4096), block(2)[..4096]);
    for process in [&mut early, &mut late] {
        process.terminate();
        let status = process.wait(Duration::from_secs(20)).expect("it ends");
        assert!(status.success(), "{status}");
    }
    assert!(names(&copy, "pins").is_empty(), "a pin is left");
    source.restart();
}

#[test]
fn a_copy_with_a_key_of_its_own_opens_with_that_alone() {
    let mut source = Daemon::started(SMALL, &[("db", "16MiB")]);
    source.announce("made a new key file for a copy");
    let mut db = connect(&source, "db");
    db.write(0, &[0x5a; 1 << 20], 0);
    // Only reads from the store are counted.
    let _ = source.json(&["drain"]);
    let _ = db.read(0, 65536);
    let copy = source.place().join("copy");
    let url = copy.display().to_string();
    let dr_key = source.place().join("dr.key");
    let dedicated_key = source.dir().join("spindle.key").display().to_string();
    let dr = dr_key.display().to_string();
    let add = ["copy", "add", &url, "--interval", "1s", "--copy-key-file", &dr];
    let added = source.json(&add);
    assert_eq!(added["copies"][0]["has_dedicated_key"], true);
    let _ = source.json(&["copy", "sync", &url]);
    wait_for("it says what is read most", || copy.join("copy/heat").exists());
    // The copy continues without the key file, which is at the other site now, and when the pool's
    // key changes.
    let there = source.place().join("elsewhere.key");
    std::fs::rename(&dr_key, &there).expect("the key file was made");
    let there = there.display().to_string();
    let _ = source.json(&["key", "rotate"]);
    db.write(1 << 20, &[0x5b; 4096], 0);
    let _ = source.json(&["copy", "sync", &url]);
    assert!(!dr_key.exists(), "a key file was made anew");

    let mut other = Daemon::new(SMALL, &[]);
    refused(&other, &["restore", &url, "--key-file", &dedicated_key], "wrong key file");
    other.argue(&["--key-file", &there]);
    let _ = other.json(&["restore", &url, "--key-file", &there]);
    other.restart();
    let bytes = connect(&other, "db").read(0, (1 << 20) + 4096);
    assert!(bytes[..1 << 20].iter().all(|byte| *byte == 0x5a));
    assert!(bytes[1 << 20..].iter().all(|byte| *byte == 0x5b));
    // The new pool has a key ring of its own, which can be rotated and copied like any other.
    let again = other.place().join("again").display().to_string();
    let _ = other.json(&["copy", "add", &again, "--interval", "1s"]);
    let _ = other.json(&["copy", "sync", &again]);
    let next = other.place().join("next.key").display().to_string();
    let _ = other.json(&["key", "rotate", "--new-key-file", &next]);
    let _ = other.json(&["copy", "sync", &again]);
    wait_for("the restored pool is whole", || {
        other.json(&["status"])["restored"]["is_complete"] == true
    });
    other.stop();
    let found = other.json(&["fsck", "--copy", &again, "--key-file", &next]);
    assert_eq!(found["problem_count"], 0, "{found}");

    // The copy keeps its dedicated key until a command chooses another.
    let _ = source.json(&["copy", "rm", &url]);
    let again = source.json(&["copy", "add", &url, "--interval", "1s"]);
    assert_eq!(again["copies"][0]["has_dedicated_key"], true);
    let _ = source.json(&["copy", "sync", &url]);
    let found = source.json(&["fsck", "--copy", &url, "--key-file", &there]);
    assert_eq!(found["problem_count"], 0, "{found}");
    let _ = source.json(&["copy", "rm", &url]);
    refused(&source, &add, "is not there");
    assert!(!dr_key.exists(), "a key file was made");
    std::fs::copy(&dedicated_key, &dr_key).expect("another key");
    refused(&source, &add, "is another");
    let _ = source.json(&[&add[..], &["--replace-copy-key"]].concat());
    let _ = source.json(&["copy", "sync", &url]);
    let found = source.json(&["fsck", "--copy", &url, "--key-file", &dr]);
    assert_eq!(found["problem_count"], 0, "{found}");
    refused(&source, &["fsck", "--copy", &url, "--key-file", &there], "wrong key file");
    assert!(names(&copy, "keyring").len() == 1, "an earlier key ring is left");
}

/// If the bucket is put back to an earlier state and the pool continues from there, the copy keeps
/// the later state.
#[test]
fn rolled_back_pool_never_replaces_its_copy() {
    let mut source = Daemon::started(SMALL, &[("db", "8MiB")]);
    let copy = source.place().join("copy");
    let url = copy.display().to_string();
    let _ = source.json(&["copy", "add", &url, "--interval", "1s"]);
    let write = |daemon: &Daemon, block: u64, byte: u8| {
        connect(daemon, "db").write(block * 4096, &[byte; 4096], 0);
        let _ = daemon.json(&["drain"]);
    };
    write(&source, 0, 1);
    let _ = source.json(&["copy", "sync", &url]);
    source.stop();
    let (store, earlier) = (source.dir().join("store"), source.place().join("earlier"));
    copy_tree(&store, &earlier);
    source.restart();
    for block in 1..4 {
        write(&source, block, 2);
    }
    let _ = source.json(&["copy", "sync", &url]);
    let newest = copy_of(&source)["recovery_point"].clone();
    source.stop();
    let before = names(&copy, "segments");
    let key = source.dir().join("spindle.key").display().to_string();

    let mut later = Daemon::new(SMALL, &[]);
    later.argue(&["--key-file", &key, "--store", &earlier.display().to_string(), "--take-over"]);
    later.announce("could not bring the copy");
    later.restart();
    assert!(connect(&later, "db").read(4096, 4096) == [0; 4096], "it was put back");
    // Writes beyond the position that the replaced history reached.
    for turn in 0..3 {
        for block in 0..6 {
            write(&later, block, 3 + turn);
        }
        refused(&later, &["copy", "sync", &url], "put back to an earlier state");
        later.kill();
        later.restart();
    }
    refused(&later, &["copy", "sync", &url], "put back to an earlier state");
    let warnings = later.json(&["status"])["warnings"].to_string();
    assert!(warnings.contains("put back to an earlier state"), "{warnings}");
    assert_eq!(names(&copy, "segments"), before);
    later.stop();

    let mut other = restored(&source, &url, &[], &[]);
    assert_eq!(other.json(&["status"])["restored"]["recovery_point"], newest["number"]);
    for block in 1..4 {
        assert!(connect(&other, "db").read(block * 4096, 4096) == [2; 4096], "block {block}");
    }
    other.stop();
    // Once the copy is removed, the pool can be copied elsewhere.
    later.restart();
    let _ = later.json(&["copy", "rm", &url]);
    let fresh = later.place().join("fresh").display().to_string();
    let _ = later.json(&["copy", "add", &fresh]);
    let _ = later.json(&["copy", "sync", &fresh]);
    later.stop();
}

pub fn copy_tree(from: &Path, to: &Path) {
    let status = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status();
    assert!(status.expect("cp runs").success());
}
