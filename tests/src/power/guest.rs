//! Runs a test again inside a guest kernel, with `tests/guest`.
//!
//! Invariants:
//! - The same test of the same binary runs inside; its output and its failure are the outer test's.
//! - SPINDLE_TEST_GUEST_ENGINE chooses another guest than the default of `tests/guest`; qemu has an
//!   older kernel.

use crate::place::{run as run_program, skip};
use crate::process::dies_with_us;
use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

/// Tells the test that it runs inside.
const INSIDE: &str = "SPINDLE_TEST_IN_GUEST";
/// Exit status of `tests/guest` when no guest can run.
const CANNOT_RUN: i32 = 77;
/// Exit status of `tests/guest` when the guest ended before its command did.
const DIED: i32 = 125;
/// A file of the shared directory. It exists if the guest was stopped on purpose.
const STOPPED: &str = "stopped";

/// Whether the test runs in a guest.
#[must_use]
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Returns the first two numbers of the kernel's release, or 0 where it has none.
#[must_use]
pub fn release() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("it has a release");
    let mut numbers = release.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Runs `inside` in a guest kernel. Inside a guest it calls `inside`; elsewhere it starts a guest
/// that runs the test `name` (its full name in this binary). Skips the test if no guest can run.
pub fn run(name: &str, timeout: Duration, variables: &[(&str, String)], inside: impl FnOnce()) {
    run_in(root(), name, timeout, variables, inside);
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("in the workspace")
}

/// Like [`run`], with `dir`, which the guest shares with this machine, as its current directory.
pub fn run_in(
    dir: &Path,
    name: &str,
    timeout: Duration,
    variables: &[(&str, String)],
    inside: impl FnOnce(),
) {
    if is_inside() {
        return inside();
    }
    let Some((status, out, err)) = start(dir, name, timeout, variables) else { return };
    assert!(status.success(), "in the guest: {status}\n{err}");
    // With a name that no test has, the guest would run nothing and pass.
    assert!(out.contains("test result: ok. 1 passed"), "{name} did not run in the guest\n{err}");
}

/// Like [`run_in`], for a guest that must end by [`stop_machine`]. Returns false if no guest can
/// run.
pub fn run_until_stopped(
    dir: &Path,
    name: &str,
    timeout: Duration,
    variables: &[(&str, String)],
    inside: impl FnOnce(),
) -> bool {
    if is_inside() {
        inside();
        return true;
    }
    let Some((status, _, err)) = start(dir, name, timeout, variables) else { return false };
    let is_stopped = std::fs::remove_file(dir.join(STOPPED)).is_ok();
    assert!(is_stopped, "the guest was not stopped: {status}\n{err}");
    assert_eq!(status.code(), Some(DIED), "{err}");
    true
}

/// Ends the guest at once, like a loss of power: everything that only its memory holds is lost.
pub fn stop_machine() -> ! {
    assert!(is_inside(), "this machine is not stopped");
    File::create(STOPPED).and_then(|mark| mark.sync_all()).expect("the directory is shared");
    // reboot(2): power off without writing anything.
    run_program("perl", &["-e", "syscall(169, 0xfee1dead, 672274793, 0x4321fedc)"]);
    unreachable!("the machine is off");
}

/// Runs the test `name` in a guest; `None` if it was skipped.
fn start(
    dir: &Path,
    name: &str,
    timeout: Duration,
    variables: &[(&str, String)],
) -> Option<(ExitStatus, String, String)> {
    let test = std::env::current_exe().expect("a running program has a path");
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("guest"));
    let engine = std::env::var("SPINDLE_TEST_GUEST_ENGINE").unwrap_or_else(|_| "uml".into());
    command
        .args(["--engine", &engine, "--timeout", &timeout.as_secs().to_string(), "--"])
        .arg(test);
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
    command.current_dir(dir);
    // The directory of the binaries, which may be anywhere.
    command.env("SPINDLE_TEST_GUEST_ALSO", root());
    command.env(INSIDE, "1").env_remove("SPINDLE_TEST_SKIPS").stdin(Stdio::null());
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    let output = dies_with_us(&mut command).output().expect("tests/guest starts");
    let [out, err] =
        [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into());
    let err: String = err;
    if output.status.code() == Some(CANNOT_RUN) {
        skip(err.lines().last().unwrap_or("no guest kernel"));
        return None;
    }
    println!("{out}");
    Some((output.status, out, err))
}
