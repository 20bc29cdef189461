//! Full disks: the log's, the cache's, the store's.
//!
//! Invariants:
//! - Small file systems in memory stand for the disks; they go with the test.

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
    // The store is full as well, or the log would never be.
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
        // What does not fit may wait, or fail.
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
            let log = daemon.log();
            let mut lines =
                log.lines().filter(|line| line.contains("a log file could not be made"));
            lines.any(|line| line.contains("No space left on device"))
        };
        while !is_full() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(is_full(), "the log's disk never was full: {}", daemon.tail());
        // Long enough for all that fits, and for some tries of what does not.
        std::thread::sleep(Duration::from_secs(5));
        let count = acknowledged_count();
        println!("{count} of 200 writes were acknowledged while the disk was full");
        assert!((1..200).contains(&count), "{count} writes were acknowledged");
        store.resize(400);
        disk.resize(400);
    });
    let acknowledged = acknowledged.into_inner().expect("no panic held it");
    println!("{} of 200 writes were acknowledged", acknowledged.len());
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
    let _ = daemon.json(&["flush"]);
    for index in 0..320u64 {
        assert!(connection.read(index * (256 << 10), 256 << 10) == pattern(index), "{index}");
    }
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
        scope.spawn(|| {
            std::thread::sleep(Duration::from_secs(8));
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
    drop(connection);
    daemon.stop();
    daemon.fsck();
}
