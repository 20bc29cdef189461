//! Full disks, of the log, the cache and the store, and space that becomes free again.
//!
//! Invariants:
//! - Small file systems in memory stand in for the disks; they are removed with the test.

use crate::conditions::conditions;
use crate::copies::wait_for;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tests::daemon::{Daemon, SMALL};
use tests::nbd::wire::*;
use tests::nbd::{Connection, Wanted};
use tests::needs_root;
use tests::place::run;

/// A file system of a few MiB in memory.
pub(crate) struct Disk(PathBuf);

impl Disk {
    pub(crate) fn mount(path: PathBuf, mebibytes: u32) -> Disk {
        std::fs::create_dir_all(&path).expect("make a directory");
        let size = format!("size={mebibytes}m");
        run("mount", &["-t", "tmpfs", "-o", &size, "tmpfs", &path.display().to_string()]);
        Disk(path)
    }

    pub(crate) fn resize(&self, mebibytes: u32) {
        let option = format!("remount,size={mebibytes}m");
        run("mount", &["-o", &option, &self.0.display().to_string()]);
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        tests::place::output("umount", &["-l", &self.0.display().to_string()]);
    }
}

fn connect(daemon: &Daemon) -> Connection {
    Connection::open(&daemon.tcp("disk"), &Wanted::everything()).expect("it opens")
}

fn pattern(index: u64) -> Vec<u8> {
    let mut bytes = vec![0; 256 << 10];
    tests::seed::Random::new(index, 21).fill(&mut bytes);
    bytes
}

#[test]
fn a_full_log_disk_loses_nothing_that_was_acknowledged() {
    needs_root!();
    let settings = SMALL.replace("16MiB", "64MiB");
    let mut daemon = Daemon::new(&settings, &[("disk", "64MiB")]);
    // The store is full as well, as otherwise the log would never be.
    let disk = Disk::mount(daemon.dir(), 24);
    let store = Disk::mount(daemon.place().join("store"), 4);
    let (store_path, cache) = (store.path().display().to_string(), daemon.place().join("cache"));
    daemon.argue(&["--store", &store_path, "--cache-dir", &cache.display().to_string()]);
    daemon.announce("");
    daemon.restart();
    let mut connection = connect(&daemon);
    let acknowledged = Mutex::new(Vec::new());
    let acknowledged_count = || acknowledged.lock().expect("no panic holds it").len();
    std::thread::scope(|scope| {
        // Writes for which there is no room may wait, or fail.
        scope.spawn(|| {
            for index in 0..200u64 {
                let payload = pattern(index);
                let length = u32::try_from(payload.len()).expect("small");
                let reply = connection.call(CMD_WRITE, 0, index * (256 << 10), length, &payload);
                match reply {
                    Ok(reply) if reply.error == 0 => {
                        acknowledged.lock().expect("no panic holds it").push(index);
                    }
                    Ok(reply) => println!("write {index}: NBD error {}", reply.error),
                    Err(error) => return println!("write {index}: {error}"),
                }
            }
        });
        let deadline = Instant::now() + Duration::from_secs(60);
        let is_full = || {
            let told = conditions(&daemon, "log-space");
            let mut told = told.iter().filter_map(|condition| condition["what"].as_str());
            told.any(|what| what.contains("No space left on device"))
        };
        while !is_full() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(is_full(), "the log's disk never was full: {}", daemon.tail());
        // Long enough for all writes that fit, and for some attempts of the others.
        std::thread::sleep(Duration::from_secs(5));
        let count = acknowledged_count();
        println!("{count} of 200 writes were acknowledged while the disk was full");
        assert!((1..200).contains(&count), "{count} writes were acknowledged");
        store.resize(400);
        disk.resize(400);
    });
    let acknowledged = acknowledged.into_inner().expect("no panic held it");
    println!("{} of 200 writes were acknowledged", acknowledged.len());
    wait_for("the log has all its space", || conditions(&daemon, "log-space").is_empty());
    daemon.kill();
    daemon.restart();
    let mut connection = connect(&daemon);
    for index in acknowledged {
        assert!(connection.read(index * (256 << 10), 256 << 10) == pattern(index), "{index}");
    }
    connection.write(0, b"fits", 0);
    connection.flush();
    drop(connection);
    daemon.stop();
}

#[test]
fn a_full_cache_disk_degrades_speed_only() {
    needs_root!();
    let settings = SMALL.replace(
        "[cache]\nsize = \"64MiB\"",
        "[memory_cache]\nsize = \"0\"\n[cache]\nsize = \"1GiB\"",
    );
    let mut daemon = Daemon::new(&settings, &[("disk", "256MiB")]);
    let disk = Disk::mount(daemon.place().join("cache"), 16);
    daemon.argue(&["--cache-dir", &disk.path().display().to_string()]);
    daemon.announce("cache");
    daemon.restart();
    let mut connection = connect(&daemon);
    for index in 0..320u64 {
        connection.write(index * (256 << 10), &pattern(index), 0);
    }
    let _ = daemon.json(&["drain"]);
    for index in 0..320u64 {
        assert!(connection.read(index * (256 << 10), 256 << 10) == pattern(index), "{index}");
    }
    let told = conditions(&daemon, "cache-shrunk");
    assert!(told.len() == 1 && told[0]["what"].to_string().contains("should have"), "{told:?}");
    drop(connection);
    daemon.stop();
    daemon.fsck();
}

#[test]
fn a_full_store_makes_writers_wait_and_loses_nothing() {
    needs_root!();
    let mut daemon = Daemon::new(SMALL, &[("disk", "256MiB")]);
    let disk = Disk::mount(daemon.place().join("store"), 20);
    daemon.argue(&["--store", &disk.path().display().to_string()]);
    for words in ["destage", "store", "space", "slatedb", "full"] {
        daemon.announce(words);
    }
    daemon.restart();
    let mut connection = connect(&daemon);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let mut status = daemon.prepare(&["status", "-o", "json"]);
        let disk = &disk;
        scope.spawn(move || {
            wait_for("the store is full", || {
                let said = status.output().expect("the program runs").stdout;
                String::from_utf8_lossy(&said).contains("the store is full, and takes no more")
            });
            std::thread::sleep(Duration::from_secs(5));
            disk.resize(400);
        });
        for index in 0..240u64 {
            let payload = pattern(index);
            let length = u32::try_from(payload.len()).expect("small");
            let reply = connection.call(CMD_WRITE, 0, index * (256 << 10), length, &payload);
            let reply = reply.unwrap_or_else(|error| panic!("write {index}: {error}"));
            assert_eq!(reply.error, 0, "write {index} after {:?}", begun.elapsed());
        }
    });
    for index in 0..240u64 {
        assert!(connection.read(index * (256 << 10), 256 << 10) == pattern(index), "{index}");
    }
    let _ = daemon.json(&["drain"]);
    assert_eq!(conditions(&daemon, "store-full"), Vec::<serde_json::Value>::new());
    drop(connection);
    daemon.stop();
    daemon.fsck();
}

/// Returns the bytes of all files below a directory.
fn bytes_below(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => bytes_below(&entry.path()),
        // A file that is deleted at this moment counts as 0.
        _ => entry.metadata().map_or(0, |meta| meta.len()),
    });
    sizes.sum()
}

/// Waits until the status of the store's space is as wanted.
fn space_until(daemon: &Daemon, what: &str, is_so: impl Fn(&serde_json::Value) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let space = daemon.json(&["status"])["space"].clone();
        if is_so(&space) {
            return println!("{what}: {space}");
        }
        assert!(Instant::now() < deadline, "not {what}: {space}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn overwritten_and_trimmed_space_comes_back_while_the_daemon_is_killed() {
    const BLOCKS: u64 = 16 << 10;
    let block = |index: u64, turn: u64| {
        let mut bytes = vec![0; 4096];
        tests::seed::Random::new(index, turn).fill(&mut bytes);
        bytes
    };
    for seed in tests::seed::seeds(1) {
        println!("SEED={seed}");
        let mut random = tests::seed::Random::new(seed, 31);
        let mut daemon = Daemon::started(SMALL, &[("disk", "64MiB")]);
        let mut turns = vec![0u64; usize::try_from(BLOCKS).expect("few")];
        // Writes ten times its size, all over it, with a kill now and then.
        for life in 0..5 {
            let mut connection = connect(&daemon);
            let mut in_flight = std::collections::HashSet::new();
            for turn in 1..=2 * BLOCKS {
                let turn = life * 2 * BLOCKS + turn;
                // Writes in flight have no order, so no two of them share a block.
                let index = loop {
                    let index = random.below(BLOCKS);
                    if in_flight.insert(index) {
                        break index;
                    }
                };
                turns[usize::try_from(index).expect("few")] = turn;
                connection
                    .submit(CMD_WRITE, 0, index * 4096, 4096, &block(index, turn))
                    .expect("sent");
                if in_flight.len() == 64 {
                    for _ in in_flight.drain() {
                        assert_eq!(connection.receive().expect("a reply").error, 0);
                    }
                }
            }
            connection.flush();
            drop(connection);
            daemon.kill();
            daemon.restart();
        }
        let _ = daemon.json(&["drain"]);
        space_until(&daemon, "settled", |space| {
            space["is_known"] == true
                && space["space_amplification"].as_f64().is_some_and(|part| part <= 1.35)
        });
        let stored = daemon.json(&["status"])["space"]["stored_bytes"].as_u64().expect("a number");
        let deadline = Instant::now() + Duration::from_secs(60);
        let segments = daemon.dir().join("store/segments");
        while bytes_below(&segments) > stored + stored / 20 {
            let found = bytes_below(&segments);
            assert!(Instant::now() < deadline, "{found} bytes of segments, {stored} are known");
            std::thread::sleep(Duration::from_millis(100));
        }
        let mut connection = connect(&daemon);
        for (index, turn) in turns.iter().enumerate() {
            let index = index as u64;
            let expected = if *turn == 0 { vec![0; 4096] } else { block(index, *turn) };
            assert!(connection.read(index * 4096, 4096) == expected, "block {index}, turn {turn}");
        }
        connection.trim(0, u32::try_from(BLOCKS * 4096).expect("64 MiB"));
        let _ = daemon.json(&["drain"]);
        space_until(&daemon, "empty", |space| space["stored_bytes"] == 0);
        assert!(connection.read(0, 1 << 20).iter().all(|byte| *byte == 0));
        drop(connection);
        daemon.stop();
        let found = daemon.fsck();
        assert_eq!(found["segment_count"], 0, "{found}");
        assert_eq!(bytes_below(&segments), 0, "objects are left");
    }
}
