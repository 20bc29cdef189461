//! A file system and a database on a volume: ext4 over a loop device over nbdfuse, PostgreSQL with
//! checksums on it, and a kill of the daemon in the middle.
//!
//! Invariants:
//! - Every mount and loop device is removed with the test, even if it fails.

use crate::postgres::Postgres;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};
use tests::daemon::{Daemon, SMALL};
use tests::place::{Place, output, run, skip};
use tests::process::Process;
use tests::torture::target::Target;
use tests::{needs, needs_root};

/// An export as a mounted ext4.
pub struct Mounted {
    /// The directory of its files.
    pub mountpoint: PathBuf,
    disk: PathBuf,
    device: String,
    fuse: Process,
    is_mounted: bool,
}

impl Mounted {
    /// Attaches the export and mounts it; makes the file system first if `is_new`.
    pub fn mount(uri: &str, place: &Place, is_new: bool) -> Mounted {
        let (mountpoint, disk) = (place.join("mnt"), place.join("disk"));
        std::fs::create_dir_all(&mountpoint).expect("make a directory");
        std::fs::write(&disk, []).expect("make a file");
        let mut command = Command::new("nbdfuse");
        command.args(["-C", "4"]).arg(&disk).arg(uri);
        let fuse = Process::start(&mut command, &place.join("nbdfuse.log")).expect("it starts");
        let deadline = Instant::now() + Duration::from_secs(20);
        while std::fs::metadata(&disk).map_or(0, |meta| meta.len()) == 0 {
            let log = || std::fs::read_to_string(place.join("nbdfuse.log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "nbdfuse does not come up: {}", log());
            std::thread::sleep(Duration::from_millis(20));
        }
        let path = disk.display().to_string();
        let device = run("losetup", &["--direct-io=on", "-f", "--show", &path]).trim().to_owned();
        let mounted = Mounted { mountpoint, disk, device, fuse, is_mounted: true };
        if is_new {
            run("mkfs.ext4", &["-q", "-F", "-E", "nodiscard", &mounted.device]);
        } else {
            // Replays the journal like a mount, and checks the rest.
            let checked = output("e2fsck", &["-fy", &mounted.device]);
            assert!(
                checked.status.code().is_some_and(|code| code < 4),
                "{}",
                String::from_utf8_lossy(&checked.stdout)
            );
        }
        run("mount", &[&mounted.device, &mounted.mountpoint.display().to_string()]);
        // The loop device detaches automatically when its mount ends.
        run("losetup", &["-d", &mounted.device]);
        mounted
    }

    /// Takes it apart in order; all data reaches the volume.
    pub fn unmount(mut self) {
        run("umount", &[&self.mountpoint.display().to_string()]);
        self.release();
        self.fuse.wait(Duration::from_secs(30)).expect("nbdfuse ends when it is unmounted");
    }

    fn release(&mut self) {
        self.is_mounted = false;
        output("umount", &["-l", &self.mountpoint.display().to_string()]);
        // Skips a loop device that is free by now; one that was never mounted is still attached.
        let attached = output("losetup", &["-j", &self.disk.display().to_string()]);
        if String::from_utf8_lossy(&attached.stdout).starts_with(&format!("{}:", self.device)) {
            output("losetup", &["-d", &self.device]);
        }
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline {
            if output("umount", &[&self.disk.display().to_string()]).status.success() {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        output("umount", &["-l", &self.disk.display().to_string()]);
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.is_mounted {
            self.release();
        }
    }
}

/// Settings of a pool whose log has room for the writes of a database.
pub fn settings() -> String {
    SMALL.replace("16MiB", "128MiB").replace("4MiB", "16MiB")
}

#[test]
fn ext4_survives_a_kill_of_the_daemon_with_all_that_was_synced() {
    needs_root!();
    needs!("nbdfuse", "mkfs.ext4", "losetup");
    let mut daemon = Daemon::started(&settings(), &[("disk", "512MiB")]);
    let place = Place::new();
    let mounted = Mounted::mount(&daemon.unix("disk").uri(), &place, true);
    let write = |name: &str, byte: u8| {
        let path = mounted.mountpoint.join(name);
        std::fs::write(&path, vec![byte; 300_000]).expect("write a file");
        std::fs::File::open(&path).and_then(|file| file.sync_all()).expect("sync a file");
    };
    for number in 0..40u8 {
        write(&format!("file{number}"), number);
    }
    std::fs::File::open(&mounted.mountpoint).and_then(|dir| dir.sync_all()).expect("sync it");
    daemon.kill();
    drop(mounted);
    daemon.restart();
    let mounted = Mounted::mount(&daemon.unix("disk").uri(), &place, false);
    for number in 0..40u8 {
        let bytes = std::fs::read(mounted.mountpoint.join(format!("file{number}")));
        assert!(bytes.expect("it is there") == vec![number; 300_000], "file{number}");
    }
    run("fstrim", &[&mounted.mountpoint.display().to_string()]);
    mounted.unmount();
    daemon.stop();
    daemon.fsck();
}

#[test]
fn postgresql_recovers_every_committed_transaction_after_a_kill_of_the_daemon() {
    needs_root!();
    needs!("nbdfuse", "mkfs.ext4", "losetup", "setpriv");
    let Some(programs) = Postgres::programs() else {
        return skip("PostgreSQL is not installed");
    };
    let mut daemon = Daemon::started(&settings(), &[("disk", "1GiB")]);
    let place = Place::new();
    let mounted = Mounted::mount(&daemon.unix("disk").uri(), &place, true);
    let mut postgres = Postgres::made(programs, &mounted.mountpoint, &place);
    postgres.bench(&["-i", "-q", "-s", "3"]);
    postgres.sql("create table seen(id bigint primary key)");
    println!("{}", postgres.bench(&["-T", "5", "-c", "4"]));
    // Commits one after the other until the daemon dies. Answered commits must be present; the one
    // in flight may be present or not.
    let killer = daemon.killer();
    let committed = postgres.commit_until(200, &place, killer);
    daemon.reap().expect("it was killed");
    println!("{committed} commits were answered");
    postgres.kill();
    drop(mounted);
    daemon.restart();
    let mounted = Mounted::mount(&daemon.unix("disk").uri(), &place, false);
    postgres.start(&place);
    let found = postgres.sql("select count(*), min(id), max(id) from seen");
    let possible = [committed, committed + 1].map(|last| format!("{last}|1|{last}"));
    assert!(possible.contains(&found), "{committed} were answered, found {found}");
    postgres.check();
    mounted.unmount();
    daemon.stop();
    daemon.fsck();
}
