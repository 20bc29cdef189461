//! A guard for one spindle daemon: its directory, configuration, processes and log.
//!
//! Invariants:
//! - The daemon ends with its guard.
//! - A warning or an error in its log that the test did not announce fails the test.
//! - Its directory survives restarts. The guard uses nothing but the command line.

use crate::nbd::Endpoint;
use crate::nbd::transport::Address;
use crate::network::Space;
use crate::place::{Place, binary};
use crate::process::{Killer, Process};
use crate::torture::target::{Ask, Kill, Target};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest time to become ready. The promise is 5 s for a full log of the default size.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest time of an orderly stop, which may spend a minute on the log's tail.
const STOP_TIMEOUT: Duration = Duration::from_secs(120);

/// Settings of a pool so small that its log wraps and destages many times a second.
pub const SMALL: &str = "memory = \"416MiB\"\n\
    [log]\nsize = \"16MiB\"\nfile_size = \"4MiB\"\n\
    [cache]\nsize = \"64MiB\"\n\
    [destage]\nmax_age = \"1s\"\nsegment_size = \"1MiB\"\n";

/// The variables that switch on the bugs and fail points of a build for tests.
pub const SWITCHES: &[&str] = &["SPINDLE_SEEDED_BUGS", "SPINDLE_FAILPOINT"];

/// A daemon, running or not.
pub struct Daemon {
    place: Place,
    binary: PathBuf,
    /// Command that runs until it is stopped.
    role: &'static str,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    space: Option<Arc<Space>>,
    announced: Vec<String>,
    process: Option<Process>,
    /// Exit status of a process that ended before it was ready.
    early_end: Option<ExitStatus>,
    /// Length of the log when the newest process was started.
    log_start: usize,
    endpoints: Vec<String>,
    checked_bytes: usize,
    fail_point: Option<String>,
    is_asked_to_stop: bool,
}

impl Daemon {
    /// Makes a daemon on a directory of its own with these settings (TOML) and volumes (`name`,
    /// `size`), on a free TCP port and a unix socket. It is not started.
    #[must_use]
    pub fn new(settings: &str, volumes: &[(&str, &str)]) -> Daemon {
        let place = Place::new();
        std::fs::write(place.join("spindle.toml"), settings).expect("write the configuration");
        let mut daemon = Daemon {
            binary: binary("spindle"),
            role: "serve",
            arguments: Vec::new(),
            environment: Vec::new(),
            space: None,
            // The program logs a warning for a new pool's key file on purpose.
            announced: vec!["made a new key file".to_owned()],
            process: None,
            early_end: None,
            log_start: 0,
            endpoints: Vec::new(),
            checked_bytes: 0,
            fail_point: None,
            is_asked_to_stop: false,
            place,
        };
        let socket = daemon.place.join("nbd.sock").display().to_string();
        daemon.argue(&["--nbd", "127.0.0.1:0", "--nbd-unix", &socket]);
        for (name, size) in volumes {
            daemon.argue(&["--volume", &format!("{name}={size}")]);
        }
        daemon
    }

    /// Like [`Daemon::new`], and starts it.
    #[must_use]
    pub fn started(settings: &str, volumes: &[(&str, &str)]) -> Daemon {
        let mut daemon = Daemon::new(settings, volumes);
        daemon.restart();
        daemon
    }

    /// Makes a data node on a directory of its own, with these drives. It is not started.
    #[must_use]
    pub fn data_node(drives: &[&Path]) -> Daemon {
        let mut node = Daemon::new("", &[]);
        node.role = "dnode";
        node.arguments.clear();
        for drive in drives {
            node.argue(&["--drive", &drive.display().to_string()]);
        }
        std::fs::create_dir_all(node.dir()).expect("make a directory");
        node
    }

    /// Replaces its settings, which count from its next start.
    pub fn configure(&self, settings: &str) {
        std::fs::write(self.place.join("spindle.toml"), settings).expect("write the configuration");
    }

    /// Adds arguments to the command that serves.
    pub fn argue(&mut self, arguments: &[&str]) {
        self.arguments.extend(arguments.iter().map(|argument| (*argument).to_owned()));
    }

    /// Keeps its TCP port from here on, so that clients find it after a restart. For use only where
    /// no other process takes a port: in a guest, or a network namespace.
    pub fn keep_port(&mut self) {
        let Address::Tcp(address) = self.tcp("").address else { panic!("it serves over TCP") };
        self.listen(&address);
    }

    /// Serves over TCP at this address instead of any free port of this machine.
    pub fn listen(&mut self, address: &str) {
        let any = self.arguments.iter_mut().find(|argument| *argument == "127.0.0.1:0");
        address.clone_into(any.expect("it takes a free port"));
    }

    /// Runs it, and its other commands, in this network namespace.
    pub fn enter(&mut self, space: Arc<Space>) {
        self.space = Some(space);
    }

    /// Adds environment variables.
    pub fn environ(&mut self, variables: &[(&str, &str)]) {
        let owned = variables.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        self.environment.extend(owned);
    }

    /// Uses another binary of the build. With the ordinary one, the variables that name seeded bugs
    /// and fail points are removed: both may be the same program.
    pub fn use_binary(&mut self, name: &str) {
        self.binary = binary(name);
        if name == "spindle" {
            self.environment.retain(|(variable, _)| !SWITCHES.contains(&variable.as_str()));
        }
    }

    /// Expects warnings and errors that contain this text.
    pub fn announce(&mut self, text: &str) {
        self.announced.push(text.to_owned());
    }

    /// Returns its directory.
    #[must_use]
    pub fn dir(&self) -> PathBuf {
        self.place.join("dir")
    }

    /// Returns the place of its files, where the test may keep its own.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }

    fn log_path(&self) -> PathBuf {
        self.place.join("spindle.log")
    }

    /// Returns the whole log so far.
    #[must_use]
    pub fn log(&self) -> String {
        let bytes = std::fs::read(self.log_path()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn serve(&self) -> Command {
        let mut command = Command::new(&self.binary);
        let config = self.place.join("spindle.toml");
        command.arg(self.role).arg("--dir").arg(self.dir()).arg("--config").arg(config);
        command.args(&self.arguments).env("SPINDLE_LOG", "info").env("RUST_BACKTRACE", "0");
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        if let Some(point) = &self.fail_point {
            command.env("SPINDLE_FAILPOINT", point);
        }
        if let Some(space) = &self.space {
            space.enter(&mut command);
        }
        command
    }

    /// Starts it, and does not wait until it is ready; see [`Daemon::wait_until_ready`].
    ///
    /// # Errors
    /// When there is no such program.
    pub fn spawn(&mut self) -> Result<(), String> {
        assert!(self.process.is_none(), "it runs already");
        self.is_asked_to_stop = false;
        self.early_end = None;
        self.endpoints.clear();
        self.log_start = self.log().len();
        let process = Process::start(&mut self.serve(), &self.log_path());
        let failed = |error| format!("start {}: {error}", self.binary.display());
        self.process = Some(process.map_err(failed)?);
        Ok(())
    }

    /// Starts it and waits until it is ready.
    ///
    /// # Errors
    /// When it ends first, or is not ready in time; with the end of its log.
    pub fn try_start(&mut self) -> Result<(), String> {
        self.spawn()?;
        self.wait_until_ready()
    }

    /// Waits until the process that was started is ready.
    ///
    /// # Errors
    /// Those of [`Daemon::try_start`].
    pub fn wait_until_ready(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + READY_TIMEOUT;
        while Instant::now() < deadline {
            let process = self.process.as_mut().expect("started above");
            match process.line(Duration::from_millis(100)) {
                Some(line) if line == "ready" => return Ok(()),
                Some(line) => self.endpoints.push(line),
                None => {
                    if let Some(status) = process.ended() {
                        self.process = None;
                        self.early_end = Some(status);
                        return Err(format!("it ended with {status}:\n{}", self.tail()));
                    }
                }
            }
        }
        Err(format!("not ready after {READY_TIMEOUT:?}:\n{}", self.tail()))
    }

    /// Starts it if it is not running, and insists that it becomes ready.
    #[track_caller]
    pub fn restart(&mut self) {
        self.try_start().unwrap_or_else(|error| panic!("{error}"));
    }

    /// Runs `serve` to its end, which must be a failure, and returns its output.
    #[track_caller]
    pub fn refuses_to_start(&mut self) -> String {
        let error = self.try_start().expect_err("it must refuse to start");
        assert!(self.process.is_none(), "{error}");
        error
    }

    /// Returns the end of the log.
    #[must_use]
    pub fn tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    /// Returns the fail point at which the newest process says that it ends.
    fn fail_point_said(&self) -> Option<String> {
        let log = self.log();
        let fresh = log.get(self.log_start..).unwrap_or_default();
        let rest = fresh.lines().find_map(|line| line.strip_prefix("fail point "))?;
        rest.split_once(": the process ends here").map(|(name, _)| name.to_owned())
    }

    /// Returns a volume's address over TCP.
    #[must_use]
    pub fn tcp(&self, volume: &str) -> Endpoint {
        self.find(volume, "nbd://").or_else(|| self.find(volume, "nbds://")).expect("over TCP")
    }

    /// Returns a volume's address on the unix socket.
    #[must_use]
    pub fn unix(&self, volume: &str) -> Endpoint {
        self.find(volume, "nbd+unix://").expect("served over a unix socket")
    }

    fn find(&self, volume: &str, scheme: &str) -> Option<Endpoint> {
        let uris = self.endpoints.iter().filter(|uri| uri.starts_with(scheme));
        let mut endpoints = uris.filter_map(|uri| Endpoint::parse(uri));
        // A volume made later is served at the same addresses.
        endpoints.next().map(|endpoint| endpoint.with_export(volume))
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill();
        }
    }

    /// `kill -9`; returns false if it has not ended after `timeout`.
    pub fn is_killed_within(&mut self, timeout: Duration) -> bool {
        let process = self.process.as_mut().expect("it runs");
        process.killer().kill();
        let has_ended = process.wait(timeout).is_some();
        if has_ended {
            self.process = None;
        }
        has_ended
    }

    /// Sends SIGTERM and insists on an orderly end.
    #[track_caller]
    pub fn stop(&mut self) {
        self.begin_stop();
        self.finish_stop().unwrap_or_else(|error| panic!("{error}"));
    }

    /// Sends SIGTERM and does not wait.
    pub fn ask_to_stop(&self) {
        self.process.as_ref().expect("it runs").terminate();
    }

    /// Sends SIGHUP.
    pub fn hang_up(&self) {
        let process = self.process.as_ref().expect("it runs");
        process.killer().signal(rustix::process::Signal::HUP);
    }

    /// Waits until it ends on its own.
    #[track_caller]
    pub fn wait(&mut self, timeout: Duration) -> ExitStatus {
        let process = self.process.as_mut().expect("it runs");
        let status = process.wait(timeout).expect("it ends in time");
        self.process = None;
        status
    }

    /// Stops the process (SIGSTOP) until [`Daemon::resume`].
    pub fn pause(&self) {
        let process = self.process.as_ref().expect("it runs");
        process.killer().signal(rustix::process::Signal::STOP);
    }

    /// Ends a pause.
    pub fn resume(&self) {
        let process = self.process.as_ref().expect("it runs");
        process.killer().signal(rustix::process::Signal::CONT);
    }

    /// Returns a handle for signals to the running process.
    #[must_use]
    pub fn signals(&self) -> Killer {
        self.process.as_ref().expect("it runs").killer()
    }

    /// Returns the status with which it ended on its own, if it did. It is not running then.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        let status = self.process.as_mut()?.ended()?;
        self.process = None;
        Some(status)
    }

    /// Whether it was started and has not been stopped or killed since.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.process.is_some()
    }

    /// Returns the number of the running process.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.process.as_ref().expect("it runs").id()
    }

    /// Runs another command of the program with the same directory, configuration and environment.
    #[must_use]
    pub fn command(&self, arguments: &[&str]) -> Output {
        self.prepare(arguments).output().expect("the program runs")
    }

    /// Like [`Daemon::command`], but does not start it.
    #[must_use]
    pub fn prepare(&self, arguments: &[&str]) -> Command {
        self.preparer()(arguments)
    }

    fn preparer(&self) -> Ask {
        let (binary, dir) = (self.binary.clone(), self.dir());
        let config = self.place.join("spindle.toml");
        let (store, environment) = (self.store().map(str::to_owned), self.environment.clone());
        let space = self.space.clone();
        Box::new(move |arguments| {
            let mut command = Command::new(&binary);
            command.args(arguments).arg("--dir").arg(&dir).arg("--config").arg(&config);
            if let Some(store) = &store {
                command.args(["--store", store]);
            }
            command.envs(environment.iter().map(|(name, value)| (name, value)));
            command.stdin(Stdio::null());
            if let Some(space) = &space {
                space.enter(&mut command);
            }
            crate::process::dies_with_us(&mut command);
            command
        })
    }

    fn store(&self) -> Option<&str> {
        let at = self.arguments.iter().position(|argument| argument == "--store")?;
        self.arguments.get(at + 1).map(String::as_str)
    }

    /// Like [`Daemon::command`], with `-o json`; insists on success.
    #[track_caller]
    #[must_use]
    pub fn json(&self, arguments: &[&str]) -> Value {
        let output = self.command(&[arguments, &["-o", "json"]].concat());
        let (out, err) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{arguments:?}: {}\n{out}\n{err}", output.status);
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {out}"))
    }

    /// Walks the stopped pool and insists that it is consistent.
    #[track_caller]
    pub fn fsck(&self) -> Value {
        let found = self.json(&["fsck"]);
        let problems = found["problems"].as_array().expect("fsck lists problems");
        assert!(problems.is_empty(), "fsck: {found}");
        found
    }

    /// Returns the unannounced warnings and errors since the last call.
    pub fn unannounced(&mut self) -> Vec<String> {
        let log = self.log();
        let fresh = log.get(self.checked_bytes..).unwrap_or_default();
        self.checked_bytes = log.len();
        fresh
            .lines()
            .filter(|line| is_complaint(line, &self.announced))
            .map(str::to_owned)
            .collect()
    }
}

fn is_complaint(line: &str, announced: &[String]) -> bool {
    let level = line.split_whitespace().nth(1).unwrap_or_default();
    let is_loud = level == "WARN" || level == "ERROR" || line.contains("panicked at");
    is_loud && !announced.iter().any(|text| line.contains(text))
}

impl Target for Daemon {
    fn start(&mut self) -> Result<(), String> {
        self.try_start()
    }

    fn start_and_kill(&mut self, delay: Duration) -> Result<(), String> {
        self.spawn()?;
        std::thread::sleep(delay);
        let mut process = self.process.take().expect("spawned above");
        if let Some(status) = process.ended() {
            return Err(format!("it ended by itself with {status}:\n{}", self.tail()));
        }
        process.kill();
        Ok(())
    }

    fn endpoint(&self, volume: &str) -> Endpoint {
        // Spreads the names over both kinds of socket.
        if volume.len().is_multiple_of(2) { self.tcp(volume) } else { self.unix(volume) }
    }

    fn killer(&self) -> Kill {
        let killer = self.process.as_ref().expect("it runs").killer();
        Box::new(move || killer.kill())
    }

    fn reap(&mut self) -> Result<Option<String>, String> {
        use std::os::unix::process::ExitStatusExt;
        let status = match self.process.take() {
            Some(mut process) => process.wait(Duration::from_secs(60)),
            None => self.early_end.take(),
        };
        let status = status.ok_or("a killed process ends")?;
        match (status.signal(), self.fail_point_said()) {
            (Some(9), _) => Ok(None),
            // An abort is an expected end only at the armed fail point.
            (Some(6), Some(name)) => Ok(Some(name)),
            _ if self.is_asked_to_stop && status.success() => Ok(None),
            _ => Err(format!("it ended by itself with {status}:\n{}", self.tail())),
        }
    }

    fn begin_stop(&mut self) {
        self.is_asked_to_stop = true;
        self.process.as_ref().expect("it runs").terminate();
    }

    fn finish_stop(&mut self) -> Result<(), String> {
        let mut process = self.process.take().expect("it runs");
        match process.wait(STOP_TIMEOUT) {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(format!("the stop ended with {status}:\n{}", self.tail())),
            None => Err(format!("no end {STOP_TIMEOUT:?} after SIGTERM:\n{}", self.tail())),
        }
    }

    fn arm(&mut self, fail_point: Option<String>) {
        self.fail_point = fail_point;
    }

    fn asker(&self) -> Option<Ask> {
        Some(self.preparer())
    }

    fn complaints(&mut self) -> Vec<String> {
        self.unannounced()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
        if !std::thread::panicking() {
            let complaints = self.unannounced();
            assert!(complaints.is_empty(), "log lines that nobody announced: {complaints:#?}");
        }
    }
}

/// Returns the fail points that the source names, so that the list cannot become stale.
#[must_use]
pub fn fail_points_of_the_source() -> Vec<String> {
    // Those of all packages, and the steps of `server/engine/src/destage.rs`.
    let mut names = quoted_after("fail_point!(\"");
    names.extend(quoted_after("step(shared, \""));
    names.sort_unstable();
    names
}

/// Returns the names of the seeded bugs that the packages list, without those that take a text.
#[must_use]
pub fn seeded_bugs_of_the_source() -> BTreeSet<String> {
    sources().iter().flat_map(|text| seeded_bugs_in(text)).collect()
}

/// Returns the names in the lists that `block::seeded_bugs!` gets in a source text: those of the
/// lines `FIELD: "NAME",`.
fn seeded_bugs_in(text: &str) -> Vec<String> {
    let lists = text.split("\nblock::seeded_bugs! {\n").skip(1);
    let lines = lists.flat_map(|list| list.lines().take_while(|line| *line != "}"));
    let entries = lines.map(str::trim).filter(|line| !line.starts_with("//"));
    let name_of = |line: &str| {
        let (_, name) = line.split_once(": ").expect("a field and its name");
        Some(name.strip_prefix('"')?.strip_suffix("\",")?.to_owned())
    };
    entries.filter_map(name_of).collect()
}

/// Returns the folders of the workspace's packages, as the manifest in `root` lists them.
fn members_of(root: &Path) -> Vec<String> {
    let manifest = std::fs::read_to_string(root.join("Cargo.toml")).expect("a readable manifest");
    let list = manifest.lines().find(|line| line.starts_with("members = ")).expect("one line");
    list.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Returns the texts between `before` and the next quotation mark, in all packages.
fn quoted_after(before: &str) -> Vec<String> {
    let mut names = Vec::new();
    for text in sources() {
        let rests = text.match_indices(before).map(|(at, found)| &text[at + found.len()..]);
        let quoted = rests.filter_map(|rest| rest.split_once('"'));
        names.extend(quoted.map(|(name, _)| name.to_owned()));
    }
    names.sort();
    names.dedup();
    names
}

/// Returns the text of each source file of all packages but the tests, which quote the same texts.
fn sources() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("in the workspace");
    let mut texts = Vec::new();
    let mut todo: Vec<PathBuf> = members_of(root)
        .into_iter()
        .filter(|dir| dir != "tests")
        .map(|dir| root.join(dir).join("src"))
        .collect();
    while let Some(path) = todo.pop() {
        if path.is_dir() {
            let entries = std::fs::read_dir(&path).expect("a readable directory");
            todo.extend(entries.map(|entry| entry.expect("a readable entry").path()));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            texts.push(std::fs::read_to_string(&path).expect("a readable file"));
        }
    }
    texts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loud_lines_are_found_unless_announced() {
        let announced = vec!["store is away".to_owned()];
        let is_loud = |line| is_complaint(line, &announced);
        assert!(is_loud("2026-01-01T00:00:00Z  WARN server::pool: odd"));
        assert!(is_loud("2026-01-01T00:00:00Z ERROR server::pool: bad"));
        assert!(is_loud("thread 'main' panicked at src/main.rs:1:1:"));
        assert!(!is_loud("2026-01-01T00:00:00Z  INFO server::pool: a WARN inside"));
        assert!(!is_loud("2026-01-01T00:00:00Z  WARN tiering: the store is away"));
    }

    #[test]
    fn listed_seeded_bugs_are_found() {
        let text = r#"
block::seeded_bugs! {
    /// A "comment": text.
    one: "one-bug",
    job: "job" = text,
    two: "two-bugs",
}
const WORD: &str = "no-bug";
"#;
        assert_eq!(seeded_bugs_in(text), ["one-bug", "two-bugs"]);
    }

    #[test]
    fn every_package_with_seeded_bugs_lists_them() {
        let list_count = sources().iter().filter(|text| !seeded_bugs_in(text).is_empty()).count();
        let packages = "wal, replication, ensemble, cluster, erasure, datanode, tiering, ublk, engine, devices, dnode";
        assert_eq!(list_count, 11, "packages: {packages}");
    }
}
