//! A file system and a database on a volume: ext4 over a loop device over nbdfuse, PostgreSQL with
//! checksums on it, and the daemon killed in the middle.
//!
//! Invariants:
//! - Every mount and loop device goes with the test, also when it fails.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tests::daemon::{Daemon, SMALL};
use tests::place::{Place, output, run, skip};
use tests::process::Process;
use tests::torture::target::{Kill, Target};
use tests::{needs, needs_root};

/// An export as a mounted ext4.
struct Mounted {
    mountpoint: PathBuf,
    disk: PathBuf,
    device: String,
    fuse: Process,
    is_mounted: bool,
}

impl Mounted {
    /// Attaches the export; makes the file system first where `is_new`.
    fn mount(uri: &str, place: &Place, is_new: bool) -> Mounted {
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
            // Replays the journal as a mount would, and checks the rest.
            let checked = output("e2fsck", &["-fy", &mounted.device]);
            assert!(
                checked.status.code().is_some_and(|code| code < 4),
                "{}",
                String::from_utf8_lossy(&checked.stdout)
            );
        }
        run("mount", &[&mounted.device, &mounted.mountpoint.display().to_string()]);
        // Detaches by itself from here on, when the mount goes, whoever ends it.
        run("losetup", &["-d", &mounted.device]);
        mounted
    }

    /// Takes it apart in order; everything reaches the volume.
    fn unmount(mut self) {
        run("umount", &[&self.mountpoint.display().to_string()]);
        self.release();
        self.fuse.wait(Duration::from_secs(30)).expect("nbdfuse ends when it is unmounted");
    }

    fn release(&mut self) {
        self.is_mounted = false;
        output("umount", &["-l", &self.mountpoint.display().to_string()]);
        // A device that was never mounted, or one that is free by now.
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

fn settings() -> String {
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

/// A PostgreSQL server on a mounted volume.
struct Postgres {
    programs: PathBuf,
    data: PathBuf,
    sockets: PathBuf,
    server: Option<Process>,
}

impl Postgres {
    fn programs() -> Option<PathBuf> {
        let versions = std::fs::read_dir("/usr/lib/postgresql").ok()?;
        let dirs = versions.filter_map(|entry| Some(entry.ok()?.path().join("bin")));
        dirs.filter(|dir| dir.join("initdb").exists()).max()
    }

    /// A command line as the database's own user, because it refuses to run as root.
    fn command(&self, program: &str, arguments: &[&str]) -> Vec<String> {
        let program = self.programs.join(program).display().to_string();
        let mut line: Vec<String> = [
            "--reuid=postgres",
            "--regid=postgres",
            "--init-groups",
            "--pdeathsig=KILL",
            "--",
            &program,
        ]
        .iter()
        .map(|word| (*word).to_owned())
        .collect();
        line.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        line
    }

    #[track_caller]
    fn run(&self, program: &str, arguments: &[&str]) -> String {
        let line = self.command(program, arguments);
        run("setpriv", &line.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn sql(&self, text: &str) -> String {
        let sockets = self.sockets.display().to_string();
        self.run("psql", &["-h", &sockets, "-d", "postgres", "-XAtqc", text]).trim().to_owned()
    }

    /// Commits 1, 2, 3, … into `seen`, pulls `trigger` when `count` of them were answered, and goes on
    /// until the database is gone; returns the last that was answered.
    fn commit_until(&self, count: u64, place: &Place, trigger: Kill) -> u64 {
        let script = place.join("commits.sql");
        let inserts =
            (1..=100_000).map(|id| format!("insert into seen values ({id}) returning id;\n"));
        std::fs::write(&script, inserts.collect::<String>()).expect("write the script");
        let (sockets, file) = (self.sockets.display().to_string(), script.display().to_string());
        let psql =
            ["-h", &sockets, "-d", "postgres", "-XAtq", "-v", "ON_ERROR_STOP=1", "-f", &file];
        let mut command = Command::new("setpriv");
        command.args(self.command("psql", &psql));
        let log = place.join("psql.log");
        let mut client = Process::start(&mut command, &log).expect("it starts");
        let (mut last, mut trigger) = (0, Some(trigger));
        // The pipe ends with the client, and that when its server has lost its disk.
        while let Some(line) = client.line(Duration::from_secs(60)) {
            assert_eq!(line, (last + 1).to_string(), "answers come in order");
            last += 1;
            if last >= count
                && let Some(trigger) = trigger.take()
            {
                trigger();
            }
        }
        let status = client.wait(Duration::from_secs(10)).expect("the client ends");
        let said = std::fs::read_to_string(&log).unwrap_or_default();
        assert!(trigger.is_none() && !status.success(), "after {last} commits: {status} {said}");
        last
    }

    fn start(&mut self, place: &Place) {
        let data = self.data.display().to_string();
        let sockets = format!("unix_socket_directories={}", self.sockets.display());
        let line = self.command(
            "postgres",
            &[
                "-D",
                &data,
                "-c",
                &sockets,
                "-c",
                "listen_addresses=",
                "-c",
                "shared_buffers=32MB",
                "-c",
                "checkpoint_timeout=30s",
                "-c",
                "max_wal_size=64MB",
            ],
        );
        let mut command = Command::new("setpriv");
        command.args(line);
        let server = Process::start(&mut command, &place.join("postgres.log")).expect("it starts");
        self.server = Some(server);
        let deadline = Instant::now() + Duration::from_secs(60);
        let sockets = self.sockets.display().to_string();
        let line = self.command("pg_isready", &["-q", "-h", &sockets]);
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        while !output("setpriv", &line).status.success() {
            let log = || std::fs::read_to_string(place.join("postgres.log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "PostgreSQL does not come up: {}", log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Ends it at once, without a checkpoint: recovery is for the next start.
    fn kill(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.killer().signal(rustix::process::Signal::QUIT);
            server.wait(Duration::from_secs(20));
        }
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.kill();
    }
}

fn give_to_postgres(path: &Path) {
    run("chown", &["postgres", &path.display().to_string()]);
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
    run("chmod", &["755", &place.path().display().to_string()]);
    let mounted = Mounted::mount(&daemon.unix("disk").uri(), &place, true);
    let (data, sockets) = (mounted.mountpoint.join("data"), place.join("sockets"));
    std::fs::create_dir_all(&data).expect("make a directory");
    std::fs::create_dir_all(&sockets).expect("make a directory");
    give_to_postgres(&data);
    give_to_postgres(&sockets);
    let mut postgres = Postgres { programs, data, sockets, server: None };
    let path = postgres.data.display().to_string();
    postgres.run("initdb", &["-D", &path, "--data-checksums", "-A", "trust", "-U", "postgres"]);
    postgres.start(&place);
    let socket = postgres.sockets.display().to_string();
    let database = ["-h", &socket, "postgres"];
    postgres.run("pgbench", &[&["-i", "-q", "-s", "3"][..], &database].concat());
    postgres.sql("create table seen(id bigint primary key)");
    let before = postgres.run("pgbench", &[&["-T", "5", "-c", "4"][..], &database].concat());
    println!("{before}");
    // Commits one after the other until the daemon dies under them: what was answered must be there.
    // Of the one that was under way nobody knows.
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
    let balance = postgres.sql(
        "select (select sum(abalance) from pgbench_accounts) = \
         (select coalesce(sum(delta), 0) from pgbench_history)",
    );
    assert_eq!(balance, "t", "accounts and history disagree");
    postgres.sql("create extension if not exists amcheck");
    postgres.run("pg_amcheck", &["-h", &socket, "-d", "postgres"]);
    postgres.run("pg_ctl", &["-D", &path, "stop", "-m", "fast"]);
    postgres.server = None;
    postgres.run("pg_checksums", &["--check", "-D", &path]);
    mounted.unmount();
    daemon.stop();
    daemon.fsck();
}
