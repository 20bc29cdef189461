//! The files of a test, and its demands on the machine.
//!
//! Invariants:
//! - A place vanishes with its test. If the test fails, the place stays and its path is printed.
//! - A test that cannot run says so in one line, which tests/run counts; it never passes silently.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The directory of one test.
pub struct Place(Option<tempfile::TempDir>);

impl Place {
    /// Makes a directory; paths in it are short enough for unix sockets.
    #[must_use]
    pub fn new() -> Place {
        let dir = tempfile::Builder::new().prefix("sp.").rand_bytes(4).tempdir();
        Place(Some(dir.expect("a directory for temporary files")))
    }

    /// Returns its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.as_ref().expect("taken on drop only").path()
    }

    /// Returns a path in it.
    #[must_use]
    pub fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }
}

impl Default for Place {
    fn default() -> Self {
        Place::new()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Some(dir) = self.0.take()
        {
            println!("kept for a look: {}", dir.keep().display());
        }
    }
}

/// Returns the binary under test: `SPINDLE_BIN`, or `name` beside the test binaries.
#[must_use]
pub fn binary(name: &str) -> PathBuf {
    if let Some(path) = std::env::var_os("SPINDLE_BIN").filter(|_| name == "spindle") {
        return PathBuf::from(path);
    }
    let test = std::env::current_exe().expect("a running program has a path");
    let profile = test.parent().and_then(Path::parent).expect("target/PROFILE/deps/TEST");
    profile.join(name)
}

/// Notes that the running test cannot run. Use as `return skip("…")`.
pub fn skip(why: &str) {
    let thread = std::thread::current();
    let line = format!("{}: {why}\n", thread.name().unwrap_or("a test"));
    print!("skipped: {line}");
    if let Some(path) = std::env::var_os("SPINDLE_TEST_SKIPS") {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
        let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
        written.expect("the list of skipped tests can be written");
    }
}

/// Whether the test runs as root.
#[must_use]
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Returns the first of `programs` that is not installed.
#[must_use]
pub fn missing<'a>(programs: &[&'a str]) -> Option<&'a str> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there = |program: &str| {
        std::env::split_paths(&path)
            .chain(["/usr/sbin".into(), "/sbin".into()])
            .any(|dir| dir.join(program).exists())
    };
    programs.iter().copied().find(|program| !is_there(program))
}

/// Leaves the test unless all programs are installed.
#[macro_export]
macro_rules! needs {
    ($($program:expr),+ $(,)?) => {
        if let Some(program) = $crate::place::missing(&[$($program),+]) {
            return $crate::place::skip(&format!("{program} is not installed"));
        }
    };
}

/// Leaves the test unless it runs as root.
#[macro_export]
macro_rules! needs_root {
    () => {
        if !$crate::place::is_root() {
            return $crate::place::skip("needs root");
        }
    };
}

/// Runs a program to its end and returns its output.
pub fn output(program: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    let output = crate::process::dies_with_us(&mut command).output();
    output.unwrap_or_else(|error| panic!("start {program}: {error}"))
}

/// Runs a program, insists on success, and returns its standard output.
#[track_caller]
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = output(program, arguments);
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {arguments:?}: {}\n{out}\n{err}", output.status);
    out.into_owned()
}
