//! Copies in other stores and restores from them: what is there opens at once, is a state that the pool had, and stays,
//! whoever is killed and whichever store is away.

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

/// The one copy of a pool.
fn copy_of(daemon: &Daemon) -> Value {
    daemon.json(&["copy", "list"])["copies"][0].clone()
}

pub fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "not in a minute: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A pool that shows the newest state of a copy, served, and the time from the command to the first byte.
fn restored(source: &Daemon, url: &str, more: &[&str], variables: &[(&str, &str)]) -> Daemon {
    let key = source.dir().join("spindle.key").display().to_string();
    let mut daemon = Daemon::new(SMALL, &[]);
    daemon.argue(&["--key-file", &key]);
    daemon.environ(variables);
    let begun = Instant::now();
    let made = daemon.json(&[&["restore", url, "--key-file", &key], more].concat());
    daemon.restart();
    let _ = connect(&daemon, "db").read(0, 4096);
    let took = begun.elapsed();
    println!("state {} was read {took:?} after the command", made["state"]);
    assert!(took < Duration::from_secs(2), "a restore serves within two seconds: {took:?}");
    daemon
}

/// Names of the objects of a copy in a directory, below a folder.
fn names(copy: &Path, folder: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(copy.join("copy").join(folder));
    entries.map_or_else(|_| Vec::new(), |entries| entries.map(|one| one.unwrap().path()).collect())
}

/// CRC-32C, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32| (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
    !bytes
        .iter()
        .fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}

#[test]
fn a_copy_is_a_state_that_the_pool_had_whoever_dies() {
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
                other.json(&["status"])["restored"]["is_whole"] == true
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
fn a_restored_pool_serves_at_once_and_fetches_the_rest_over_deaths_and_outages() {
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
        // It does not compress.
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

    // Slowly, so that most of it is fetched when somebody asks.
    let slow = [&env[..], &["--rate", "256K"]].concat();
    let mut other = restored(&source, &url, &slow, &variables);
    let is_pin = |key: &String| key.starts_with("dr/copy/pins/");
    assert_eq!(bucket.keys().iter().filter(|key| is_pin(key)).count(), 1);
    let whole = |daemon: &Daemon| daemon.json(&["status"])["restored"]["is_whole"] == true;
    let mut there = connect(&other, "db");
    assert!(there.read(15 << 20, 1 << 20) == before[15 << 20..]);
    there.write(0, &[9; 8192], 0);
    there.flush();
    // The pool goes its own way meanwhile, and its copy, too.
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

    // The copy's store goes away: the source says so and goes on, and so does what is here already.
    source.announce("a copy is not brought up to date");
    other.announce("still needs the copy");
    other.announce("tried again");
    bucket.down();
    db.write(0, &[3; 4096], 0);
    wait_for("the failure is shown", || copy_of(&source).get("failure").is_some());
    let warnings = source.json(&["status"])["warnings"].to_string();
    assert!(warnings.contains("is not brought up to date"), "{warnings}");
    assert!(there.read(0, 8192) == [9; 8192]);
    bucket.up();
    wait_for("it is tried again", || copy_of(&source).get("failure").is_none());
    let _ = source.json(&["copy", "sync", &url]);
    // Reclaim may still be at work.
    wait_for("the copy has everything", || copy_of(&source)["lag_seconds"] == 0);
    drop(there);
    other.stop();
    // As fast as it can from here on is not asked for: the rate is the restore's. Most is fetched by reading.
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
fn a_destination_that_is_not_mounted_is_not_taken_for_an_empty_copy() {
    let mut source = Daemon::started(SMALL, &[("db", "8MiB")]);
    source.announce("a copy is not brought up to date");
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
        let _ = source.json(&["flush"]);
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
fn what_makes_no_copy_and_what_cannot_be_restored_is_said() {
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

    // Snapshots only: what comes after one is not there.
    let _ = source.json(&["copy", "add", &at("copy"), "--snapshots-only"]);
    let spelled = format!("file://{}/../copy/", place.join("dir").display());
    std::fs::create_dir_all(place.join("dir")).unwrap();
    refused(&source, &["copy", "add", &spelled], "it is there");
    refused(&stranger, &["copy", "add", &at("copy")], "it is a copy of pool");
    let _ = source.json(&["snapshot", "create", "db@monday"]);
    let _ = source.json(&["flush"]);
    let newest = || copy_of(&source)["state"]["destaged_lsn"].as_u64().unwrap_or(0);
    let lsn = source.json(&["snapshot", "list"])["snapshots"][0]["lsn"].as_u64().unwrap();
    wait_for("the snapshot is there", || newest() >= lsn);
    connect(&source, "db").write(0, &[8; 4096], 0);
    let _ = source.json(&["flush"]);
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
    // One of a later version.
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

    // It ends, and is the next owner's no more.
    let _ = source.json(&["copy", "rm", &at("copy")]);
    source.kill();
    source.restart();
    assert_eq!(source.json(&["copy", "list"])["copies"], Value::Array(Vec::new()));
    // And can be gone on with, as what is there is this pool's.
    let _ = source.json(&["copy", "add", &at("copy")]);
    let _ = source.json(&["copy", "sync", &at("copy")]);
    source.stop();
    let found = source.json(&["copy", "list"]);
    assert_eq!(found["copies"][0]["is_running"], false, "{found}");
    refused(&source, &["copy", "sync", &at("copy")], "no daemon runs");
    stranger.stop();
    drop(other);
}

/// `copy open`, until it is ready, and where it serves a name.
fn opened(source: &Daemon, url: &str, log: &str) -> (Process, Endpoint) {
    // As on a machine that has nothing else of the pool.
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
fn a_copy_is_read_where_it_lies_while_copying_to_it_goes_on() {
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
    // It goes on, far beyond.
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
    // The pool's death is nothing to a reader.
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
    // Reads are counted where the store has the data.
    let _ = source.json(&["flush"]);
    let _ = db.read(0, 65536);
    let copy = source.place().join("copy");
    let url = copy.display().to_string();
    let dr_key = source.place().join("dr.key");
    let own_key = source.dir().join("spindle.key").display().to_string();
    let dr = dr_key.display().to_string();
    let add = ["copy", "add", &url, "--interval", "1s", "--copy-key-file", &dr];
    let added = source.json(&add);
    assert_eq!(added["copies"][0]["has_own_key"], true);
    let _ = source.json(&["copy", "sync", &url]);
    wait_for("it says what is read most", || copy.join("copy/heat").exists());
    // It goes on without the file, which is at the other site now, and whatever happens to the pool's key.
    let there = source.place().join("elsewhere.key");
    std::fs::rename(&dr_key, &there).expect("the key file was made");
    let there = there.display().to_string();
    let _ = source.json(&["key", "rotate"]);
    db.write(1 << 20, &[0x5b; 4096], 0);
    let _ = source.json(&["copy", "sync", &url]);
    assert!(!dr_key.exists(), "a key file was made anew");

    let mut other = Daemon::new(SMALL, &[]);
    refused(&other, &["restore", &url, "--key-file", &own_key], "wrong key file");
    other.argue(&["--key-file", &there]);
    let _ = other.json(&["restore", &url, "--key-file", &there]);
    other.restart();
    let bytes = connect(&other, "db").read(0, (1 << 20) + 4096);
    assert!(bytes[..1 << 20].iter().all(|byte| *byte == 0x5a));
    assert!(bytes[1 << 20..].iter().all(|byte| *byte == 0x5b));
    // The new pool's ring is its own: it is changed, and copied, as any pool's.
    let again = other.place().join("again").display().to_string();
    let _ = other.json(&["copy", "add", &again, "--interval", "1s"]);
    let _ = other.json(&["copy", "sync", &again]);
    let next = other.place().join("next.key").display().to_string();
    let _ = other.json(&["key", "rotate", "--new-key-file", &next]);
    let _ = other.json(&["copy", "sync", &again]);
    wait_for("the restored pool is whole", || {
        other.json(&["status"])["restored"]["is_whole"] == true
    });
    other.stop();
    let found = other.json(&["fsck", "--copy", &again, "--key-file", &next]);
    assert_eq!(found["problem_count"], 0, "{found}");

    // It stays so until somebody says that another one is to open it.
    let _ = source.json(&["copy", "rm", &url]);
    let again = source.json(&["copy", "add", &url, "--interval", "1s"]);
    assert_eq!(again["copies"][0]["has_own_key"], true);
    let _ = source.json(&["copy", "sync", &url]);
    let found = source.json(&["fsck", "--copy", &url, "--key-file", &there]);
    assert_eq!(found["problem_count"], 0, "{found}");
    let _ = source.json(&["copy", "rm", &url]);
    refused(&source, &add, "is not there");
    assert!(!dr_key.exists(), "a key file was made");
    std::fs::copy(&own_key, &dr_key).expect("another key");
    refused(&source, &add, "is another");
    let _ = source.json(&[&add[..], &["--replace-copy-key"]].concat());
    let _ = source.json(&["copy", "sync", &url]);
    let found = source.json(&["fsck", "--copy", &url, "--key-file", &dr]);
    assert_eq!(found["problem_count"], 0, "{found}");
    refused(&source, &["fsck", "--copy", &url, "--key-file", &there], "wrong key file");
    assert!(names(&copy, "keyring").len() == 1, "an earlier key ring is left");
}

/// The bucket is put back to an earlier state, and the pool goes on from there: the copy keeps the later one.
#[test]
fn a_pool_that_was_put_back_never_replaces_its_copy() {
    let mut source = Daemon::started(SMALL, &[("db", "8MiB")]);
    let copy = source.place().join("copy");
    let url = copy.display().to_string();
    let _ = source.json(&["copy", "add", &url, "--interval", "1s"]);
    let write = |daemon: &Daemon, block: u64, byte: u8| {
        connect(daemon, "db").write(block * 4096, &[byte; 4096], 0);
        let _ = daemon.json(&["flush"]);
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
    let newest = copy_of(&source)["state"].clone();
    source.stop();
    let before = names(&copy, "segments");
    let key = source.dir().join("spindle.key").display().to_string();

    let mut later = Daemon::new(SMALL, &[]);
    later.argue(&["--key-file", &key, "--store", &earlier.display().to_string(), "--take-over"]);
    later.announce("a copy is not brought up to date");
    later.restart();
    assert!(connect(&later, "db").read(4096, 4096) == [0; 4096], "it was put back");
    // Past everything that the later life had.
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
    assert_eq!(other.json(&["status"])["restored"]["state"], newest["number"]);
    for block in 1..4 {
        assert!(connect(&other, "db").read(block * 4096, 4096) == [2; 4096], "block {block}");
    }
    other.stop();
    // Ended, it can be copied elsewhere.
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

/// `URL@SNAPSHOT`: who has the snapshot shows it, and what is written from then on stays.
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
    // It is done once: what is written from here on stays.
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

/// Blocks that do not compress, and are another's for each seed.
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

/// `--volume` and `--as`: the others are gone before anything is served, and what a clone shows of them is not.
#[test]
fn some_volumes_of_a_copy_are_restored() {
    const MIB: usize = 1 << 20;
    let volumes = [("db", "8MiB"), ("wal", "8MiB"), ("plain", "8MiB")];
    let mut source = Daemon::started(SMALL, &volumes);
    let url = source.place().join("copy").display().to_string();
    let (first, second) = (noise(1, 4 * MIB), noise(2, MIB));
    connect(&source, "db").write(0, &first, 0);
    let _ = source.json(&["flush"]);
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
    assert_eq!(made["left_out"], serde_json::json!(["wal", "plain", "test"]), "{made}");
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
    // What was made since is nobody's to drop.
    assert!(connect(&one, "later").read(0, 4096) == [8; 4096]);
    let _ = one.json(&["volume", "rm", "later", "--now"]);
    check(&one, &expected);
    wait_for("everything is here", || one.json(&["status"])["restored"]["is_whole"] == true);

    let mut two = new();
    let made = restore(&two, &[&url, "--volume", "wal", "--volume", "test"]);
    assert_eq!(made["left_out"], serde_json::json!(["db", "plain"]), "{made}");
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
    wait_for("everything is here", || two.json(&["status"])["restored"]["is_whole"] == true);
    let all = segment_bytes(&source.place().join("copy/copy/segments"));
    for (daemon, bytes) in [(&one, 5 * MIB), (&two, 5 * MIB)] {
        let own = segment_bytes(&daemon.dir().join("store/segments"));
        println!("{own} bytes of {all}, {bytes} are of the volumes");
        assert!(own < all - 6 * MIB as u64, "{own} bytes were fetched of {all}");
    }
    // Alone, without the copy.
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

/// A snapshot under as many volumes as may depend on one another cannot be rolled back to: said before anything is made.
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

/// `copy add --volume`: the copy has what these volumes show, whatever they were made from, and nothing else of size.
#[test]
fn a_copy_of_some_volumes() {
    const MIB: usize = 1 << 20;
    let volumes = [("db", "8MiB"), ("wal", "8MiB"), ("plain", "8MiB")];
    let mut source = Daemon::started(SMALL, &volumes);
    let url = source.place().join("copy").display().to_string();
    let (first, second) = (noise(1, 4 * MIB), noise(2, MIB));
    connect(&source, "db").write(0, &first, 0);
    let _ = source.json(&["flush"]);
    connect(&source, "plain").write(0, &noise(3, 8 * MIB), 0);
    let _ = source.json(&["flush"]);
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
    // Nothing of a volume that is written to beside them, whoever dies.
    connect(&source, "plain").write(0, &noise(4, 4 * MIB), 0);
    let _ = source.json(&["flush"]);
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
    wait_for("everything is here", || other.json(&["status"])["restored"]["is_whole"] == true);
    shown(&other);
    other.stop();
    let found = other.json(&["fsck", "--key-file", &key]);
    assert_eq!(found["problem_count"], 0, "{found}");
    other.restart();
    shown(&other);
    let status = other.json(&["status"]);
    assert_eq!(status["space"]["stuck_count"], 0, "{status}");

    // It becomes one of all, in the same place.
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

/// A clone that is dropped keeps pages of what it was made from until it is retired: nothing of that is missed, or fetched.
#[test]
fn what_only_dropped_clones_were_made_from_is_not_missed() {
    const MIB: usize = 1 << 20;
    let mut source = Daemon::started(SMALL, &[("a", "8MiB"), ("x", "8MiB")]);
    connect(&source, "a").write(0, &noise(1, 4 * MIB), 0);
    let _ = source.json(&["flush"]);
    let _ = source.json(&["snapshot", "create", "a@s"]);
    let _ = source.json(&["clone", "a@s", "d"]);
    connect(&source, "a").write(0, &noise(2, 4 * MIB), 0);
    // One that was rolled back depends on its former layer in the same way.
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
        wait_for("everything is here", || other.json(&["status"])["restored"]["is_whole"] == true);
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

/// One volume whose own key is gone does not keep the others of a pool that is restored as of a snapshot from being served.
#[test]
fn a_pool_restored_as_of_a_snapshot_opens_without_the_key_of_one_volume() {
    let mut source = Daemon::started(SMALL, &[("x", "1MiB")]);
    let _ = source.json(&["volume", "create", "secret", "1MiB", "--own-key"]);
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
    other.announce("its own key");
    other.announce("the volume's own key is not in the store");
    other.announce("does not show the snapshot that was asked for");
    other.restart();
    assert!(connect(&other, "x").read(0, 4096) == [1; 4096]);
    other.stop();
    source.stop();
}
