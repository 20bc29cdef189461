//! The child process that serves a pool of the demo.
//!
//! Invariants:
//! - It is this very binary, started with `serve` as by any user.
//! - It ends with its guard, and with the thread that started it.

use super::stop::Stop;
use block::env::{Clock, SystemClock};
use block::{Error, ErrorKind, Result};
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// Name of the volume that the demo writes to.
pub(super) const VOLUME: &str = "demo";
/// Size of that volume.
pub(super) const VOLUME_SIZE: &str = "1G";

/// Longest wait until a daemon is ready. Chosen by hand: many times as long as an empty pool takes.
const READY_MAX: Duration = Duration::from_secs(120);
/// Pause between two looks for a signal while a daemon starts. Chosen by hand.
const LINE_WAIT: Duration = Duration::from_millis(100);

/// How to start a child: the arguments of `serve` or `dnode`, and where it is reached.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    /// Path of this binary.
    pub(super) binary: PathBuf,
    /// Directory of the pool or of the node.
    pub(super) dir: PathBuf,
    /// Address of its NBD server, `HOST:PORT`.
    pub(super) address: String,
    /// Further arguments.
    pub(super) arguments: Vec<OsString>,
    /// It serves drives, and no volume.
    pub(super) is_data_node: bool,
}

pub(super) struct Daemon {
    child: Child,
    /// Address at which it serves the volume over TCP.
    pub(super) address: String,
    pub(super) endpoints: Vec<String>,
}

impl Daemon {
    /// Starts the child, and waits until it is ready.
    ///
    /// # Errors
    /// `Unavailable` if it ends first, is not ready in time, or the demo is to end.
    pub(super) fn start(launch: &Launch, stop: &Stop) -> Result<Daemon> {
        let mut command = Command::new(&launch.binary);
        match launch.is_data_node {
            true => command.arg("dnode"),
            false => command
                .args(["serve", "--nbd", &launch.address])
                .args(["--volume", &format!("{VOLUME}={VOLUME_SIZE}")])
                .arg("--nbd-unix")
                .arg(launch.dir.join("nbd.sock")),
        };
        command
            .arg("--dir")
            .arg(&launch.dir)
            .args(&launch.arguments)
            .env("SPINDLE_LOG", std::env::var("SPINDLE_LOG").unwrap_or_else(|_| "error".into()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            // Ctrl-C in a terminal goes to a whole process group. The demo stops the daemon itself,
            // and a second signal would make it leave at once.
            .process_group(0);
        let mut child = ends_with_this_thread(&mut command)
            .spawn()
            .map_err(|error| Error::with_source(ErrorKind::Io, "start the daemon", error))?;
        let lines = lines_of(child.stdout.take().expect("stdout is piped"));
        let mut daemon = Daemon { child, address: String::new(), endpoints: Vec::new() };
        daemon.wait_until_ready(&lines, launch.is_data_node, stop)?;
        Ok(daemon)
    }

    fn wait_until_ready(
        &mut self,
        lines: &Receiver<String>,
        is_data_node: bool,
        stop: &Stop,
    ) -> Result<()> {
        let begun = SystemClock.now();
        loop {
            match lines.recv_timeout(LINE_WAIT) {
                Ok(line) if line == "ready" => break,
                Ok(line) => self.endpoints.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => stop.pause(Duration::ZERO)?,
            }
            if SystemClock.since(begun) > READY_MAX {
                let what = format!("start the daemon: it is not ready after {READY_MAX:?}");
                return Err(Error::new(ErrorKind::Unavailable, what));
            }
        }
        let tcp = self.endpoints.iter().find_map(|uri| {
            uri.strip_prefix("nbd://")?.strip_suffix(&format!("/{VOLUME}")).map(str::to_owned)
        });
        if is_data_node && !self.endpoints.is_empty() {
            return Ok(());
        }
        let Some(address) = tcp else {
            let status = self.reap()?;
            let what = format!("start the daemon: it did not become ready ({status})");
            return Err(Error::new(ErrorKind::Unavailable, what));
        };
        self.address = address;
        Ok(())
    }

    /// Returns the number of the process.
    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    fn reap(&mut self) -> Result<ExitStatus> {
        self.child
            .wait()
            .map_err(|error| Error::with_source(ErrorKind::Io, "wait for the daemon", error))
    }

    /// Sends SIGKILL, and does not wait for the end.
    pub(super) fn begin_kill(&mut self) -> Result<()> {
        self.child
            .kill()
            .map_err(|error| Error::with_source(ErrorKind::Io, "kill the daemon", error))
    }

    /// Kills the process hard (`kill -9`).
    pub(super) fn kill(&mut self) -> Result<()> {
        self.begin_kill()?;
        self.reap().map(drop)
    }

    /// Returns the exit status of a process that has ended.
    pub(super) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child
            .try_wait()
            .map_err(|error| Error::with_source(ErrorKind::Io, "watch the daemon", error))
    }

    pub(super) fn check_running(&mut self) -> Result<()> {
        match self.ended()? {
            None => Ok(()),
            Some(status) => {
                let what = format!("serve the demo: the daemon ended ({status})");
                Err(Error::new(ErrorKind::Unavailable, what))
            }
        }
    }

    /// Sends SIGTERM, and does not wait for the end.
    pub(super) fn begin_stop(&self) -> Result<()> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)
            .map_err(|error| Error::with_source(ErrorKind::Io, "stop the daemon", error))
    }

    /// Stops the process in order.
    pub(super) fn stop(&mut self) -> Result<()> {
        self.begin_stop()?;
        self.finish_stop()
    }

    /// Waits for the end of a stop.
    pub(super) fn finish_stop(&mut self) -> Result<()> {
        let status = self.reap()?;
        if status.success() {
            return Ok(());
        }
        let what = format!("stop the daemon: it ended with {status}");
        Err(Error::new(ErrorKind::Io, what))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // After an orderly stop there is nothing left to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes the child die with the thread that starts it, so that none is left behind if the demo itself
/// is killed.
#[expect(unsafe_code, reason = "no safe interface runs code between fork and exec")]
fn ends_with_this_thread(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec the closure makes one system call, and touches no memory that
    // another thread may hold locked.
    unsafe {
        command.pre_exec(|| {
            use rustix::process::{Signal, set_parent_process_death_signal};
            set_parent_process_death_signal(Some(Signal::KILL)).map_err(std::io::Error::from)
        })
    }
}

/// Reads the lines of standard output in a thread, to their end.
fn lines_of(out: ChildStdout) -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines() {
            let Ok(line) = line else { return };
            // The receiver is gone once the daemon is ready; a node prints its endpoints again when its role changes.
            let _ = sender.send(line);
        }
    });
    lines
}
