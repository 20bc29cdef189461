//! Runs a test again inside a guest kernel, with `tests/guest`.
//!
//! Invariants:
//! - The same test of the same binary runs inside; its output and its failure are the outer test's.

use crate::place::skip;
use crate::process::dies_with_us;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Tells the test that it runs inside.
const INSIDE: &str = "SPINDLE_TEST_IN_GUEST";
/// Exit status of `tests/guest` where no guest can run.
const CANNOT_RUN: i32 = 77;

/// Whether this is a guest.
#[must_use]
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Runs `inside` in a guest kernel: called there it runs it, called elsewhere it starts a guest that
/// runs the test `name` (its full name in this binary). Skips where no guest can run.
pub fn run(name: &str, timeout: Duration, variables: &[(&str, String)], inside: impl FnOnce()) {
    if is_inside() {
        return inside();
    }
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let test = std::env::current_exe().expect("a running program has a path");
    let mut command = Command::new(tests.join("guest"));
    command.args(["--timeout", &timeout.as_secs().to_string(), "--"]).arg(test);
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
    command.current_dir(tests.parent().expect("in the workspace"));
    command.env(INSIDE, "1").env_remove("SPINDLE_TEST_SKIPS").stdin(Stdio::null());
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    let output = dies_with_us(&mut command).output().expect("tests/guest starts");
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.code() == Some(CANNOT_RUN) {
        return skip(err.lines().last().unwrap_or("no guest kernel"));
    }
    println!("{out}");
    assert!(output.status.success(), "in the guest: {}\n{err}", output.status);
    // A name that no test has would run nothing and pass.
    assert!(out.contains("test result: ok. 1 passed"), "{name} did not run in the guest\n{err}");
}
