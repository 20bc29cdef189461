//! The child process that serves a pool of the demo.
//!
//! Invariants:
//! - It is this very binary, started with `serve` as by any user.
//! - It ends with its guard.

use block::{Error, ErrorKind, Result};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Name of the volume that the demo writes to.
pub(super) const VOLUME: &str = "demo";
/// Size of that volume.
pub(super) const VOLUME_SIZE: &str = "1G";

pub(super) struct Daemon {
    child: Child,
    pub(super) address: String,
    pub(super) endpoints: Vec<String>,
}

impl Daemon {
    pub(super) fn start(binary: &Path, dir: &Path, address: &str) -> Result<Daemon> {
        let failed = |what: &str, error| Error::with_source(ErrorKind::Io, what, error);
        let mut child = Command::new(binary)
            .arg("serve")
            .args(["--nbd", address, "--volume", &format!("{VOLUME}={VOLUME_SIZE}")])
            .arg("--dir")
            .arg(dir)
            .arg("--nbd-unix")
            .arg(dir.join("nbd.sock"))
            .env("SPINDLE_LOG", std::env::var("SPINDLE_LOG").unwrap_or_else(|_| "error".into()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            // Ctrl-C in a terminal goes to a whole process group. The demo stops the daemon itself,
            // and a second signal would make it leave at once.
            .process_group(0)
            .spawn()
            .map_err(|error| failed("start the daemon", error))?;
        let out = child.stdout.take().expect("stdout is piped");
        let mut endpoints = Vec::new();
        for line in BufReader::new(out).lines() {
            let line = line.map_err(|error| failed("read the daemon's endpoints", error))?;
            if line == "ready" {
                break;
            }
            endpoints.push(line);
        }
        let tcp = endpoints.iter().find_map(|uri| {
            uri.strip_prefix("nbd://")?.strip_suffix(&format!("/{VOLUME}")).map(str::to_owned)
        });
        let Some(address) = tcp else {
            let status = child.wait().map_err(|error| failed("wait for the daemon", error))?;
            let what = format!("start the daemon: it did not become ready ({status})");
            return Err(Error::new(ErrorKind::Unavailable, what));
        };
        Ok(Daemon { child, address, endpoints })
    }

    pub(super) fn kill(&mut self) -> Result<()> {
        let killed = self.child.kill().and_then(|()| self.child.wait());
        killed
            .map(drop)
            .map_err(|error| Error::with_source(ErrorKind::Io, "kill the daemon", error))
    }

    pub(super) fn check_running(&mut self) -> Result<()> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => {
                let what = format!("serve the demo: the daemon ended ({status})");
                Err(Error::new(ErrorKind::Unavailable, what))
            }
            Err(error) => Err(Error::with_source(ErrorKind::Io, "watch the daemon", error)),
        }
    }

    pub(super) fn stop(&mut self) -> Result<()> {
        let pid = rustix::process::Pid::from_child(&self.child);
        let stopped = rustix::process::kill_process(pid, rustix::process::Signal::TERM)
            .map_err(std::io::Error::from)
            .and_then(|()| self.child.wait());
        match stopped {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => {
                let what = format!("stop the daemon: it ended with {status}");
                Err(Error::new(ErrorKind::Io, what))
            }
            Err(error) => Err(Error::with_source(ErrorKind::Io, "stop the daemon", error)),
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // After an orderly stop there is nothing left to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
