//! One object of the store that exists but is never sent, or that is not found for a while, while
//! everything else is answered: only its dependents wait, and a condition names it.
//!
//! Invariants:
//! - The store's objects stay right throughout, so everything must work again once it is healed.

use crate::copies::{copy_of, names, refused, restored, wait_for};
use crate::stores::on_s3;
use serde_json::Value;
use std::time::{Duration, Instant};
use tests::bucket::faults::{Fault, Faults};
use tests::bucket::{Bucket, Care};
use tests::daemon::{Daemon, SMALL};
use tests::nbd::wire::CMD_READ;
use tests::nbd::{Connection, Wanted};
use tests::seed::{Random, seeds};

const VOLUMES: &[(&str, &str)] = &[("db", "64MiB"), ("log", "64MiB")];
const PART: usize = 512 << 10;
/// More than the log holds.
const WRITTEN_BYTES: usize = 40 << 20;
/// Longest time to write that much beside one bad object, including the verdict on the object.
const WRITTEN_WITHIN: Duration = Duration::from_secs(90);

/// Makes a pool without caches, with random bytes in `db`, and restarts it so that nothing is in
/// memory. Returns the bytes.
fn filled(bucket: &Bucket, seed: u64) -> (Daemon, Vec<u8>) {
    let settings = SMALL.replace(
        "[cache]\nsize = \"64MiB\"",
        "[cache]\nsize = \"0\"\n[memory_cache]\nsize = \"0\"",
    );
    let mut daemon = on_s3(&settings, VOLUMES, bucket.address());
    daemon.announce("");
    daemon.restart();
    let mut bytes = vec![0; 4 << 20];
    Random::new(seed, 31).fill(&mut bytes);
    let mut db = connect(&daemon, "db");
    for (part, bytes) in (0..).zip(bytes.chunks(PART)) {
        db.write(part * PART as u64, bytes, 0);
    }
    assert!(daemon.command(&["drain"]).status.success());
    drop(db);
    daemon.stop();
    daemon.restart();
    (daemon, bytes)
}

fn connect(daemon: &Daemon, volume: &str) -> Connection {
    Connection::open(&daemon.tcp(volume), &Wanted::everything()).expect("it opens")
}

fn segment(bucket: &Bucket) -> String {
    let keys = bucket.keys();
    keys.into_iter().find(|key| key.contains("segments/")).expect("there is a segment")
}

fn has_condition(daemon: &Daemon, kind: &str, text: &str) -> bool {
    let status = daemon.json(&["status"]);
    let conditions = status["conditions"].as_array().expect("a list");
    conditions.iter().any(|one| one["kind"] == kind && one.to_string().contains(text))
}

#[test]
fn one_object_that_is_never_sent_does_not_stop_other_volumes() {
    for seed in seeds(1) {
        let bucket = Bucket::start(Care::Honest);
        let (mut daemon, mut bytes) = filled(&bucket, seed);
        let key = segment(&bucket);
        bucket.inject(Faults::Lasting { fault: Fault::Unsent, part: key.clone() });
        // Parts of blocks, which have to be completed from the object's data.
        let mut db = connect(&daemon, "db");
        for block in 0..bytes.len() / 4096 {
            db.write(block as u64 * 4096 + 1024, &[7; 512], 0);
            bytes[block * 4096 + 1024..block * 4096 + 1536].fill(7);
        }
        let (mut log, begun) = (connect(&daemon, "log"), Instant::now());
        let mut written = vec![0; WRITTEN_BYTES];
        Random::new(seed, 32).fill(&mut written);
        for (part, bytes) in (0..).zip(written.chunks(PART)) {
            log.write(part * PART as u64, bytes, 0);
        }
        log.flush();
        println!("SEED={seed}: written in {:?}", begun.elapsed());
        assert!(begun.elapsed() < WRITTEN_WITHIN, "{:?}", begun.elapsed());
        let name = key.rsplit('/').next().expect("a name");
        assert!(has_condition(&daemon, "object-unreadable", name), "{}", status(&daemon));
        // No message advises to give up data that may come back.
        let said = daemon.log() + &status(&daemon);
        assert!(!said.contains("volume rm"), "{said}");
        // All other objects are scrubbed and copied.
        let url = format!("s3://{}/copies/one", tests::store::BUCKET);
        assert!(daemon.command(&["copy", "add", &url, "--interval", "5s"]).status.success());
        wait_for("a state is published", || copy_of(&daemon)["recovery_point"].is_object());
        assert!(daemon.command(&["scrub", "start"]).status.success());
        let scrub = || daemon.json(&["scrub", "status"]);
        wait_for("the scrub ends", || scrub()["ended_at"].is_u64());
        assert_eq!(scrub()["bad_count"], 1, "{}", scrub());
        bucket.inject(Faults::None);
        wait_for("the object is read again, and the volume is back", || {
            let status = daemon.json(&["status"]);
            let kinds = ["object-unreadable", "volume-stalled", "store-unavailable"];
            let has = |kind: &&str| has_condition(&daemon, kind, "");
            !kinds.iter().any(has)
                && status["destage"]["stalled"].as_array().is_none_or(Vec::is_empty)
        });
        drop((db, log));
        daemon.stop();
        daemon.restart();
        let mut db = connect(&daemon, "db");
        for (part, bytes) in (0..).zip(bytes.chunks(PART)) {
            assert!(db.read(part * PART as u64, PART as u32) == bytes, "part {part} of db");
        }
        daemon.stop();
        daemon.fsck();
    }
}

fn status(daemon: &Daemon) -> String {
    let status: Value = daemon.json(&["status"]);
    status["conditions"].to_string()
}

#[test]
fn a_bucket_that_is_not_found_for_a_while_is_waited_for() {
    for fault in [Fault::NoBucket, Fault::NoKey] {
        let bucket = Bucket::start(Care::Honest);
        let (mut daemon, bytes) = filled(&bucket, 1);
        bucket.inject(Faults::Lasting { fault, part: "segments/".to_owned() });
        let mut db = connect(&daemon, "db");
        let _ = db.submit(CMD_READ, 0, 0, 4096, &[]).expect("it is sent");
        let begun = Instant::now();
        // The only possible answer would be an error, as nothing can be read.
        std::thread::sleep(Duration::from_secs(15));
        assert!(!has_condition(&daemon, "object-missing", ""), "{}", status(&daemon));
        assert!(has_condition(&daemon, "store-unavailable", "read"), "{}", status(&daemon));
        bucket.inject(Faults::None);
        let reply = db.receive().expect("an answer");
        println!("{fault:?}: answered after {:?}", begun.elapsed());
        assert_eq!((reply.error, &reply.payload[..]), (0, &bytes[..4096]));
        daemon.stop();
        daemon.fsck();
    }
}

#[test]
fn restored_pool_retries_missing_objects_until_told_to_stop() {
    let mut source = Daemon::started(SMALL, VOLUMES);
    let copy = source.place().join("copy");
    let url = copy.display().to_string();
    let mut db = connect(&source, "db");
    let mut bytes = vec![0; 4 << 20];
    Random::new(1, 33).fill(&mut bytes);
    for (part, bytes) in (0..).zip(bytes.chunks(PART)) {
        db.write(part * PART as u64, bytes, 0);
    }
    drop(db);
    let _ = source.json(&["copy", "add", &url, "--interval", "1h"]);
    let _ = source.json(&["copy", "sync", &url]);
    source.kill();
    let mut segments = Vec::new();
    for epoch in std::fs::read_dir(copy.join("copy/segments")).expect("a folder") {
        let inside = std::fs::read_dir(epoch.expect("an entry").path()).expect("a folder");
        segments.extend(inside.map(|entry| entry.expect("an entry").path()));
    }
    segments.sort_by_key(|path| path.file_name().map(ToOwned::to_owned));
    let lost = segments.pop().expect("there is a segment");
    assert!(!segments.is_empty(), "others are fetched");
    let name = lost.file_name().expect("a name").to_string_lossy().into_owned();
    std::fs::remove_file(&lost).expect("it is there");
    let mut daemon = restored(&source, &url, &[], &[]);
    daemon.announce("");
    refused(&daemon, &["copy", "give-up-missing"], "is not known to lack any");
    wait_for("what is missing is named", || has_condition(&daemon, "restore-incomplete", &name));
    let is_complete = || daemon.json(&["status"])["restored"]["is_complete"] == true;
    // The copy still keeps the state.
    assert!(!is_complete() && !names(&copy, "pins").is_empty());
    assert!(daemon.command(&["copy", "give-up-missing"]).status.success());
    wait_for("the pool does not need the copy any more", is_complete);
    wait_for("the pin is given back", || names(&copy, "pins").is_empty());
    assert!(!has_condition(&daemon, "restore-incomplete", ""), "{}", status(&daemon));
    daemon.stop();
}
