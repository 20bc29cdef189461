//! Operations on a block device that run in a process of their own.
//!
//! Invariant: no thread of a process that serves devices opens one, or changes how its queue works.
//! The kernel reads the partition table of a new device when it is opened, writes back dirty pages
//! when it is closed, and waits for requests in flight when a queue changes. If a thread waits for
//! requests that its own process serves, the process cannot end when it is killed, and its
//! successor cannot start, because the directory stays locked. A process that does nothing else
//! holds nothing that others wait for, and it ends when the device is served again.

use crate::seeded_bugs::seeded_bugs;
use block::env::{Clock, SystemClock};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::Duration;

/// First argument of such a process. For internal use only.
const VERB: &str = "--of-a-block-device";
const IS_FREE: &str = "is-free";
const SET: &str = "set";
/// Exit codes besides 0, and 1 for an error with a message.
const BUSY: u8 = 16;
/// Longest wait for an answer. Chosen by hand: the partition table may come from a slow store.
const ANSWER_WAIT: Duration = Duration::from_secs(5);
/// Time between two checks whether it has ended, initially and at most.
const LOOK_MIN: Duration = Duration::from_micros(200);
const LOOK_MAX: Duration = Duration::from_millis(10);

/// Reports whether no one holds a block device exclusively.
///
/// # Errors
/// Errors opening it; `TimedOut`: it does not answer.
pub(crate) fn is_free(path: &Path) -> std::io::Result<bool> {
    if seeded_bugs().opens_own_device {
        return open_alone(path);
    }
    let (status, said) = run(&[IS_FREE.into(), path.into()])?;
    match status.code() {
        Some(0) => Ok(true),
        Some(code) if code == i32::from(BUSY) => Ok(false),
        _ => Err(std::io::Error::other(said)),
    }
}

/// Writes an attribute of a queue, a file in `/sys`. If the kernel takes long, the write continues
/// in the background.
///
/// # Errors
/// Errors writing it.
pub(crate) fn set_attribute(path: &Path, value: &str) -> std::io::Result<()> {
    let (status, said) = match run(&[SET.into(), path.into(), value.into()]) {
        Err(error) if error.kind() == std::io::ErrorKind::TimedOut => return Ok(()),
        written => written?,
    };
    match status.success() {
        true => Ok(()),
        false => Err(std::io::Error::other(said)),
    }
}

/// Runs the operation if this process was started for one; `None` in an ordinary process.
#[must_use]
pub fn serve_if_asked() -> Option<ExitCode> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).take(4).collect();
    let (verb, rest) = arguments.split_first()?;
    if verb != VERB {
        return None;
    }
    let done = match rest {
        [what, path] if what == IS_FREE => open_alone(Path::new(path)),
        [what, path, value] if what == SET => {
            std::fs::write(path, value.as_encoded_bytes()).map(|()| true)
        }
        _ => Err(std::io::Error::other("for internal use only")),
    };
    Some(match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(BUSY),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    })
}

/// Tries to open the device exclusively.
fn open_alone(path: &Path) -> std::io::Result<bool> {
    let flag = i32::try_from(rustix::fs::OFlags::EXCL.bits()).expect("a flag of open");
    match std::fs::OpenOptions::new().read(true).custom_flags(flag).open(path) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error()) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Operations without an answer yet. They are not started again meanwhile, so that each has only
/// one process.
static PENDING: Mutex<BTreeSet<Vec<OsString>>> = Mutex::new(BTreeSet::new());

fn is_silent() -> std::io::Error {
    let what = "it does not answer; is its table of partitions being read, or its log full?";
    std::io::Error::new(std::io::ErrorKind::TimedOut, what)
}

/// Runs this program with the arguments, and returns its exit status and message.
fn run(arguments: &[OsString]) -> std::io::Result<(ExitStatus, String)> {
    if PENDING.lock().contains(arguments) {
        return Err(is_silent());
    }
    // The running program, even if an upgrade has replaced its file.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("spindle").arg(VERB).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let Some(status) = wait(&mut child)? else {
        let asked = arguments.to_vec();
        PENDING.lock().insert(asked.clone());
        // It ends once the device answers.
        std::thread::spawn(move || {
            let ended = child.wait();
            PENDING.lock().remove(&asked);
            ended
        });
        return Err(is_silent());
    };
    let mut said = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        stderr.read_to_string(&mut said)?;
    }
    Ok((status, said.trim_end().to_owned()))
}

fn wait(child: &mut Child) -> std::io::Result<Option<ExitStatus>> {
    let until = SystemClock.now() + ANSWER_WAIT;
    let mut pause = LOOK_MIN;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if SystemClock.now() >= until {
            return Ok(None);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LOOK_MAX);
    }
}
