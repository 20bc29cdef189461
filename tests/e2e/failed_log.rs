//! A disk of the write log that fails under the daemon, and one that is unmounted while the daemon
//! is down. The disks are file systems in files of this machine.
//!
//! Invariants:
//! - An answered write reads back, or the volume says that it may be gone, also within one boot of
//!   the kernel.
//! - A restart alone, or one in another mount namespace, reports nothing.
//! - No mount and no loop device is left.

use rustix::ioctl::{Setter, ioctl, opcode};
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tests::daemon::Daemon;
use tests::nbd::client::Connection;
use tests::nbd::negotiate::Wanted;
use tests::place::{output, run};
use tests::power::device::Loop;
use tests::{Place, needs, needs_root};

/// A pool with a small log that destages nothing unless asked.
const SETTINGS: &str = "[log]\nsize = \"16MiB\"\nfile_size = \"4MiB\"\n[cache]\nsize = \"0\"\n\
    [destage]\nmax_age = \"1h\"\n";
const DISK_BYTES: u64 = 512 << 20;
/// Rounds within which a write is caught between its answer and its sync. Chosen by hand: a round
/// has a few hundred milliseconds for this, which takes a few.
const ROUNDS: u64 = 10;
/// Longest time until the daemon has ended on its own.
const END: Duration = Duration::from_secs(90);
/// Exit code of a daemon whose write log failed. Source: docs/operations.md.
const LOG_FAILED: i32 = 5;
/// `EXT4_IOC_SHUTDOWN` and `XFS_IOC_GOINGDOWN`. Source: Linux, fs/ext4/ext4.h and fs/xfs/libxfs/xfs_fs.h.
const SHUTDOWN: rustix::ioctl::Opcode = opcode::read::<u32>(b'X', 125);
/// Writes nothing that is in memory, not even the journal. Source: `EXT4_GOING_FLAGS_NOLOGFLUSH`;
/// XFS has the same flag.
const NOLOGFLUSH: u32 = 2;
/// Expected log lines.
const ANNOUNCED: [&str; 9] = [
    "could not remove an unfinished log file",
    "the pool has stopped",
    "the write log failed and accepts nothing more",
    "could not sync the log as it was found",
    "writes that were answered but never flushed may be gone",
    "clients on other machines are refused",
    "could not carry out a request",
    "could not make a log file",
    "could not destage",
];

/// Further expected log lines of a daemon whose store is on the same disk.
const STORE_IS_GONE: [&str; 5] = [
    "could not note that the write log failed",
    "could not note in the store that the write log failed",
    "condition=\"",
    "could not remove an unfinished log file",
    "could not remove a socket",
];

/// A file system in a file.
pub struct Disk {
    kind: &'static str,
    device: Loop,
    at: PathBuf,
    is_mounted: bool,
}

impl Disk {
    pub fn new(place: &Place, kind: &'static str) -> Disk {
        let (image, at) = (place.join(&format!("{kind}.image")), place.join(kind));
        File::create(&image).and_then(|file| file.set_len(DISK_BYTES)).expect("make a file");
        std::fs::create_dir_all(&at).expect("make a directory");
        let device = Loop::attach(&image);
        run(&format!("mkfs.{kind}"), &["-q", device.device()]);
        let mut disk = Disk { kind, device, at, is_mounted: false };
        disk.mount();
        disk
    }

    fn mount(&mut self) {
        run("mount", &["-t", self.kind, self.device.device(), &self.at.display().to_string()]);
        self.is_mounted = true;
    }

    fn unmount(&mut self) {
        run("umount", &[&self.at.display().to_string()]);
        self.is_mounted = false;
    }

    fn again(&mut self) {
        self.unmount();
        self.mount();
    }

    /// Returns the directory of its root.
    pub fn at(&self) -> &Path {
        &self.at
    }

    /// Lets every further access fail.
    pub fn shut_down(&self) {
        let root = File::open(&self.at).expect("it is mounted");
        // SAFETY: the kernel reads one number, which the call owns.
        unsafe { ioctl(root, Setter::<SHUTDOWN, u32>::new(NOLOGFLUSH)) }.expect("it shuts down");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if self.is_mounted {
            output("umount", &[&self.at.display().to_string()]);
        }
    }
}

fn connect(daemon: &Daemon, volume: &str) -> Connection {
    Connection::open(&daemon.unix(volume), &Wanted::default()).expect("it is served")
}

fn has_lost_writes(daemon: &Daemon, volume: &str) -> bool {
    let shown = daemon.json(&["volume", "show", volume]);
    shown["has_lost_writes"].as_bool().unwrap_or_else(|| panic!("it says so: {shown}"))
}

fn daemon_on(place: &Path, volumes: &[(&str, &str)], is_all: bool) -> Daemon {
    let mut daemon = Daemon::new(SETTINGS, volumes);
    for text in ANNOUNCED {
        daemon.announce(text);
    }
    let inner = place.join(if is_all { "dir" } else { "log" });
    std::fs::create_dir_all(&inner).expect("make a directory");
    let link = if is_all { daemon.dir() } else { daemon.dir().join("log") };
    std::fs::create_dir_all(link.parent().expect("it has one")).expect("make a directory");
    std::os::unix::fs::symlink(inner, link).expect("make a link");
    daemon
}

/// First only the disk of the log fails, then that of the whole directory, so that nothing can be
/// noted there.
#[test]
fn a_write_that_vanished_with_the_logs_disk_is_reported_and_the_daemon_ends() {
    needs_root!();
    needs!("mkfs.ext4", "losetup");
    for is_all in [false, true] {
        let place = Place::new();
        let mut disk = Disk::new(&place, "ext4");
        let mut daemon = daemon_on(&disk.at, &[("db", "64M"), ("synced", "64M")], is_all);
        if is_all {
            for text in STORE_IS_GONE {
                daemon.announce(text);
            }
        }
        daemon.restart();
        let _ = daemon.json(&["volume", "set", "synced", "--durability", "write"]);
        let mut lost_count = 0;
        for round in 1..=ROUNDS {
            let fill = [u8::try_from(round).expect("few"); 4096];
            let (mut db, mut synced) = (connect(&daemon, "db"), connect(&daemon, "synced"));
            db.write(0, &fill, 0);
            db.flush();
            synced.write(0, &fill, 0);
            db.write(8192, &fill, 0);
            disk.shut_down();
            let begun = Instant::now();
            let status = daemon.wait(END);
            println!("round {round}: it ended after {:?} with {status}", begun.elapsed());
            assert_eq!(status.code(), Some(LOG_FAILED), "{}", daemon.tail());
            drop((db, synced));
            disk.again();
            daemon.restart();
            let (mut db, mut synced) = (connect(&daemon, "db"), connect(&daemon, "synced"));
            assert_eq!(db.read(0, 4096), fill, "it was flushed");
            assert_eq!(synced.read(0, 4096), fill, "its answer had waited for the disk");
            let is_kept = db.read(8192, 4096) == fill;
            let is_reported = has_lost_writes(&daemon, "db");
            println!("round {round}: kept {is_kept}, reported {is_reported}");
            assert!(is_kept || is_reported, "an answered write is gone, and nothing tells");
            // The note beside the log records how far the daemon had answered.
            assert!(is_all || is_kept != is_reported, "nothing is gone, and a loss is reported");
            assert!(!has_lost_writes(&daemon, "synced"), "nothing of it can be gone");
            lost_count += u64::from(!is_kept);
            if is_reported {
                let _ = daemon.json(&["volume", "accept-loss", "db"]);
            }
            if lost_count > 0 && round > 1 {
                break;
            }
        }
        assert!(lost_count > 0, "no write was caught before it was synced");
        daemon.stop();
        daemon.fsck();
        drop(daemon);
        disk.unmount();
    }
}

/// The daemon is dead, so it cannot note that its log is lost.
#[test]
fn remount_after_a_kill_counts_as_lost_writes() {
    needs_root!();
    needs!("mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "losetup");
    for kind in ["ext4", "xfs", "btrfs"] {
        let place = Place::new();
        let mut disk = Disk::new(&place, kind);
        let mut daemon = daemon_on(&disk.at, &[("db", "64M")], true);
        daemon.restart();
        for is_remounted in [false, true, false] {
            let mut db = connect(&daemon, "db");
            db.write(0, &[1; 4096], 0);
            daemon.kill();
            drop(db);
            if is_remounted {
                disk.again();
            } else {
                let at = disk.at.display().to_string();
                run("mount", &["-o", "remount,noatime", &at]);
            }
            daemon.restart();
            assert_eq!(has_lost_writes(&daemon, "db"), is_remounted, "{kind}");
            if is_remounted {
                let _ = daemon.json(&["volume", "accept-loss", "db"]);
            }
        }
        daemon.stop();
        daemon.fsck();
        drop(daemon);
        disk.unmount();
    }
}

/// Writes to a file until the disk is full.
fn fill(path: &Path) {
    let mut file = File::create(path).expect("a new file");
    for piece in [1 << 20, 4096, 1] {
        let bytes = vec![0; piece];
        let full = std::iter::repeat_with(|| file.write_all(&bytes)).find_map(Result::err);
        assert_eq!(full.map(|error| error.kind()), Some(ErrorKind::StorageFull));
    }
    file.sync_all().expect("it is written");
}

/// The log cannot drain while its pool is closed, so the pool must open.
#[test]
fn pool_opens_although_its_log_disk_is_full() {
    needs_root!();
    needs!("mkfs.ext4", "losetup");
    let place = Place::new();
    let mut disk = Disk::new(&place, "ext4");
    let mut daemon = daemon_on(&disk.at, &[("db", "64M")], false);
    daemon.announce("condition=\"log-space\"");
    daemon.restart();
    let mut db = connect(&daemon, "db");
    db.write(0, &[1; 4096], 0);
    db.flush();
    drop(db);
    daemon.kill();
    fill(&disk.at.join("filler"));
    for _ in 0..2 {
        daemon.restart();
        assert_eq!(connect(&daemon, "db").read(0, 4096), [1; 4096]);
        daemon.kill();
    }
    std::fs::remove_file(disk.at.join("filler")).expect("it is there");
    daemon.restart();
    daemon.stop();
    daemon.fsck();
    drop(daemon);
    disk.unmount();
}
