//! Processes that end with the test that started them.
//!
//! Invariants:
//! - Only processes that were started here are ever signalled: by their own handle, never by name.
//! - A child dies with the thread that started it (parent-death signal) and when its guard is
//!   dropped, so neither a panic nor Ctrl-C leaves one behind.

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A running child.
pub struct Process {
    child: Child,
    pid: Pid,
    is_reaped: Arc<Mutex<bool>>,
    lines: Option<Receiver<String>>,
}

/// Sends signals to one child, from any thread, as long as it is not reaped.
#[derive(Clone)]
pub struct Killer {
    pid: Pid,
    is_reaped: Arc<Mutex<bool>>,
    is_fired: Arc<AtomicBool>,
}

impl Killer {
    /// `kill -9`, at once.
    pub fn kill(&self) {
        self.is_fired.store(true, Ordering::SeqCst);
        self.signal(Signal::KILL);
    }

    /// Whether [`Killer::kill`] was called on this handle or a clone of it.
    #[must_use]
    pub fn is_fired(&self) -> bool {
        self.is_fired.load(Ordering::SeqCst)
    }

    /// Sends a signal, unless the child is gone and its number may belong to another.
    pub fn signal(&self, signal: Signal) {
        let is_reaped = self.is_reaped.lock().expect("no panic holds it");
        if !*is_reaped {
            let _ = kill_process(self.pid, signal);
        }
    }
}

impl Process {
    /// Starts `command` and appends its standard error to the file `errors`. Lines of standard
    /// output are read with [`Process::line`].
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(command: &mut Command, errors: &Path) -> io::Result<Process> {
        let errors = std::fs::OpenOptions::new().create(true).append(true).open(errors)?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors);
        let mut child = dies_with_us(command).spawn()?;
        let stdout = child.stdout.take().expect("piped");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { return };
                // The receiver may be gone; the pipe is drained nevertheless.
                let _ = sender.send(line);
            }
        });
        let pid = Pid::from_child(&child);
        Ok(Process { child, pid, is_reaped: Arc::new(Mutex::new(false)), lines: Some(lines) })
    }

    /// Returns a handle for signals.
    #[must_use]
    pub fn killer(&self) -> Killer {
        Killer {
            pid: self.pid,
            is_reaped: Arc::clone(&self.is_reaped),
            is_fired: Arc::new(AtomicBool::new(false)),
        }
    }

    /// Returns the number of the process, for a look at `/proc`.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the next line of standard output; `None` at its end or after `timeout`.
    pub fn line(&self, timeout: Duration) -> Option<String> {
        self.lines.as_ref()?.recv_timeout(timeout).ok()
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        self.killer().signal(Signal::TERM);
    }

    /// Returns its exit status, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        // The lock keeps a killer from signalling a number that is free again.
        let mut is_reaped = self.is_reaped.lock().expect("no panic holds it");
        let status = self.child.try_wait().expect("wait for a child of ours");
        *is_reaped = status.is_some();
        status
    }

    /// Waits for the end; `None` after `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.ended() {
                Some(status) => return Some(status),
                None if Instant::now() > deadline => return None,
                None => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    /// `kill -9`; waits until it is gone.
    pub fn kill(&mut self) -> ExitStatus {
        self.killer().kill();
        let ended = self.wait(Duration::from_secs(60));
        ended.unwrap_or_else(|| panic!("a killed process ends:\n{}", waits_of(self.child.id())))
    }
}

/// Lists where the threads of every process of this machine wait, those of the kernel included.
#[must_use]
pub fn all_waits() -> String {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let of_process = |process: std::fs::DirEntry| {
        let number = process.file_name().to_str()?.parse::<u32>().ok()?;
        let command = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        Some(format!("{number} {command}\n{}", waits_of(number)))
    };
    processes.filter_map(of_process).collect()
}

/// Lists where the threads of a process wait in the kernel, as far as that can be seen.
fn waits_of(process: u32) -> String {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let of_task = |task: std::fs::DirEntry| {
        let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let states = read("status");
        let state = states.lines().find(|line| line.starts_with("State:")).unwrap_or_default();
        let name = read("comm");
        format!(
            "{} {state} {} {}\n{}",
            name.trim(),
            read("wchan"),
            read("syscall").trim(),
            read("stack")
        )
    };
    tasks.map(of_task).collect()
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended().is_none() {
            self.killer().kill();
            self.wait(Duration::from_secs(10));
        }
    }
}

/// Makes the child of `command` die when the thread that starts it ends.
pub fn dies_with_us(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec the closure makes one system call and touches no memory that
    // another thread may hold locked.
    unsafe {
        command.pre_exec(|| {
            set_parent_process_death_signal(Some(Signal::KILL)).map_err(io::Error::from)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_dies_with_its_guard() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo started; exec sleep 1000"]);
        let process = Process::start(&mut command, &dir.path().join("errors")).unwrap();
        assert_eq!(process.line(Duration::from_secs(10)).as_deref(), Some("started"));
        let status = format!("/proc/{}", process.id());
        assert!(Path::new(&status).exists());
        drop(process);
        assert!(!Path::new(&status).exists());
    }
}
