//! PostgreSQL for tests: a server of this machine's version on a directory of the test.
//!
//! Invariants:
//! - It listens only on a unix socket of the test, and ends with the test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tests::place::{Place, output, run};
use tests::process::Process;
use tests::torture::target::Kill;

/// A PostgreSQL server on a mounted volume.
pub struct Postgres {
    programs: PathBuf,
    data: PathBuf,
    sockets: PathBuf,
    server: Option<Process>,
}

impl Postgres {
    /// Returns the directory of its programs; `None` if it is not installed.
    pub fn programs() -> Option<PathBuf> {
        let versions = std::fs::read_dir("/usr/lib/postgresql").ok()?;
        let dirs = versions.filter_map(|entry| Some(entry.ok()?.path().join("bin")));
        dirs.filter(|dir| dir.join("initdb").exists()).max()
    }

    /// Makes a database with checksums on the mounted `disk`, and starts it.
    #[track_caller]
    pub fn made(programs: PathBuf, disk: &Path, place: &Place) -> Postgres {
        let mut postgres = Postgres::at(programs, disk, place);
        let path = postgres.data.display().to_string();
        postgres.run("initdb", &["-D", &path, "--data-checksums", "-A", "trust", "-U", "postgres"]);
        postgres.start(place);
        postgres
    }

    /// Starts the database on the mounted `disk`, which [`Postgres::made`] has made.
    #[track_caller]
    pub fn found(programs: PathBuf, disk: &Path, place: &Place) -> Postgres {
        assert!(disk.join("data/PG_VERSION").exists(), "a database is there");
        let mut postgres = Postgres::at(programs, disk, place);
        // Removes the file of a server that runs elsewhere or ended abruptly.
        let _ = std::fs::remove_file(postgres.data.join("postmaster.pid"));
        postgres.start(place);
        postgres
    }

    fn at(programs: PathBuf, disk: &Path, place: &Place) -> Postgres {
        run("chmod", &["755", &place.path().display().to_string()]);
        let (data, sockets) = (disk.join("data"), place.join("sockets"));
        for dir in [&data, &sockets] {
            std::fs::create_dir_all(dir).expect("make a directory");
            run("chown", &["postgres", &dir.display().to_string()]);
        }
        Postgres { programs, data, sockets, server: None }
    }

    /// Runs `pgbench`, insists on success, and returns its output.
    #[track_caller]
    pub fn bench(&self, arguments: &[&str]) -> String {
        let sockets = self.sockets.display().to_string();
        self.run("pgbench", &[arguments, &["-h", &sockets, "postgres"]].concat())
    }

    /// Like [`Postgres::bench`], for a call on another thread.
    pub fn load(&self, arguments: &[&str]) -> impl FnOnce() -> String + Send + 'static {
        let sockets = self.sockets.display().to_string();
        let line = self.command("pgbench", &[arguments, &["-h", &sockets, "postgres"]].concat());
        move || run("setpriv", &line.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Insists that accounts and history of `pgbench` agree and that indexes and tables are whole;
    /// then stops the server and checks every page.
    #[track_caller]
    pub fn check(&mut self) {
        self.check_running();
        self.stop();
        let path = self.data.display().to_string();
        self.run("pg_checksums", &["--check", "-D", &path]);
    }

    /// Stops the server in order.
    #[track_caller]
    pub fn stop(&mut self) {
        let path = self.data.display().to_string();
        self.run("pg_ctl", &["-D", &path, "stop", "-m", "fast"]);
        self.server = None;
    }

    /// Insists that accounts and history of `pgbench` agree, and that indexes and tables are whole.
    #[track_caller]
    pub fn check_running(&self) {
        let balance = self.sql(
            "select (select sum(abalance) from pgbench_accounts) = \
             (select coalesce(sum(delta), 0) from pgbench_history)",
        );
        assert_eq!(balance, "t", "accounts and history disagree");
        self.sql("create extension if not exists amcheck");
        let sockets = self.sockets.display().to_string();
        self.run("pg_amcheck", &["-h", &sockets, "-d", "postgres"]);
    }

    /// Makes a command line that runs as the database's own user, because the server refuses to run
    /// as root.
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

    /// Returns the answer to a query.
    #[track_caller]
    pub fn sql(&self, text: &str) -> String {
        let sockets = self.sockets.display().to_string();
        self.run("psql", &["-h", &sockets, "-d", "postgres", "-XAtqc", text]).trim().to_owned()
    }

    /// Commits 1, 2, 3, … into `seen` and pulls `trigger` once `count` of them are answered.
    /// Continues until the database is gone, and returns the last answered number.
    pub fn commit_until(&self, count: u64, place: &Place, trigger: Kill) -> u64 {
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
        // The pipe ends with the client, which ends when its server has lost its disk.
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

    /// Starts it and waits until it answers.
    #[track_caller]
    pub fn start(&mut self, place: &Place) {
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

    /// Ends it at once, without a checkpoint, so that the next start recovers.
    pub fn kill(&mut self) {
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
