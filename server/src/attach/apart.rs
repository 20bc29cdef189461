//! What is asked of a block device by a process of its own.
//!
//! Invariant: no thread of a process that serves devices opens one, or changes how its queue works. The kernel reads a new
//! device's partition table when it is opened, writes back what is dirty when it is closed, and waits for requests in
//! flight when a queue changes. A thread that waits so for requests which its own process serves keeps that, killed, from
//! ever ending, and its successor from ever beginning, because the directory stays locked. A process that does nothing else
//! has nothing that others wait for; it ends when the device is served again.

use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The first argument of such a process. Not for people.
const VERB: &str = "--of-a-block-device";
const IS_FREE: &str = "is-free";
const SET: &str = "set";
/// Exit codes beside 0, and 1 for an error that is said.
const BUSY: u8 = 16;
/// How long an answer is waited for. Chosen by hand: a table of partitions comes from a store that is slow.
const ANSWER_WAIT: Duration = Duration::from_secs(5);
/// Between two looks whether it has ended: at first, and at most.
const LOOK_MIN: Duration = Duration::from_micros(200);
const LOOK_MAX: Duration = Duration::from_millis(10);

/// Whether nobody has a block device for itself.
///
/// # Errors
/// Those of opening it; `TimedOut`: it does not answer.
pub(super) fn is_free(path: &Path) -> std::io::Result<bool> {
    if crate::planted::planted().opens_own_device {
        return open_alone(path);
    }
    let (status, said) = run(&[IS_FREE.into(), path.into()])?;
    match status.code() {
        Some(0) => Ok(true),
        Some(code) if code == i32::from(BUSY) => Ok(false),
        _ => Err(std::io::Error::other(said)),
    }
}

/// Writes an attribute of a queue, a file in `/sys`. Where the kernel takes long that goes on by itself.
///
/// # Errors
/// Those of writing it.
pub(super) fn set_attribute(path: &Path, value: &str) -> std::io::Result<()> {
    let (status, said) = match run(&[SET.into(), path.into(), value.into()]) {
        Err(error) if error.kind() == std::io::ErrorKind::TimedOut => return Ok(()),
        written => written?,
    };
    match status.success() {
        true => Ok(()),
        false => Err(std::io::Error::other(said)),
    }
}

/// Does what another process of this program asks of this one; `None` where it is an ordinary one.
pub(crate) fn serve_if_asked() -> Option<ExitCode> {
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
        _ => Err(std::io::Error::other("not for people")),
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

/// Whether it could be opened with nobody else having it for itself.
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

/// What is asked and not answered yet: it is not asked again meanwhile, so that there is one process for it.
static PENDING: Mutex<BTreeSet<Vec<OsString>>> = Mutex::new(BTreeSet::new());

fn is_silent() -> std::io::Error {
    let what = "it does not answer; is its table of partitions being read, or its log full?";
    std::io::Error::new(std::io::ErrorKind::TimedOut, what)
}

/// Runs this program so, and returns how it ended and what it said.
fn run(arguments: &[OsString]) -> std::io::Result<(ExitStatus, String)> {
    if PENDING.lock().contains(arguments) {
        return Err(is_silent());
    }
    // As it is, also where an upgrade has replaced its file.
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
    let until = Instant::now() + ANSWER_WAIT;
    let mut pause = LOOK_MIN;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= until {
            return Ok(None);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LOOK_MAX);
    }
}
