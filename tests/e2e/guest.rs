//! The guest kernel of other tests: it behaves as `tests/guest` documents.
//!
//! Invariants:
//! - No change from inside is left on this machine.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tests::place::skip;
use tests::process::dies_with_us;
use tests::{Place, needs_root};

fn guest(place: &Place, timeout: &str, script: &str) -> Output {
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("guest"));
    command.args(["--timeout", timeout, "--", "bash", "-c", script, "bash", "an argument"]);
    command.current_dir(place.path()).env("A_VARIABLE", "two\nlines").stdin(Stdio::null());
    dies_with_us(&mut command).output().expect("tests/guest starts")
}

#[test]
fn a_guest_runs_a_command_and_leaves_nothing_behind() {
    needs_root!();
    let place = Place::new();
    let script = "printf '%s|%s|%s' \"$1\" \"$A_VARIABLE\" \"$PWD\"; echo aside >&2; \
         echo kept > kept; touch /usr/left /tmp/left 2>/dev/null; \
         ls /dev/nbd0 /dev/ublk-control /dev/mapper/control /dev/loop-control >/dev/null && \
         dmsetup targets | grep -c -E '^(linear|flakey|log-writes) ' >&2; \
         grep -c -E '\\b(ext4|xfs|btrfs)$' /proc/filesystems >&2; exit 7";
    let output = guest(&place, "120", script);
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.code() == Some(77) {
        return skip(err.lines().last().unwrap_or("no guest kernel"));
    }
    assert_eq!(output.status.code(), Some(7), "{out}\n{err}");
    assert_eq!(out, format!("an argument|two\nlines|{}", place.path().display()));
    assert_eq!(err, "aside\n3\n3\n");
    assert_eq!(std::fs::read_to_string(place.join("kept")).expect("written inside"), "kept\n");
    assert!(!Path::new("/usr/left").exists() && !Path::new("/tmp/left").exists());
    let begun = Instant::now();
    let late = guest(&place, "3", "sleep 100");
    assert_eq!(late.status.code(), Some(124), "{late:?}");
    assert!(begun.elapsed() < Duration::from_secs(30));
    // The exit status distinguishes a dead kernel from a failed command.
    let dead = guest(
        &place,
        "60",
        "kill -9 1; sleep 1; perl -e 'syscall(169, 0xfee1dead, 672274793, 0x4321fedc)'; sleep 30",
    );
    assert_eq!(dead.status.code(), Some(125), "{dead:?}");
    assert!(String::from_utf8_lossy(&dead.stderr).contains("the guest died"), "{dead:?}");
    let left = std::fs::read_dir(place.path()).expect("it is there");
    let left: Vec<_> = left.map(|entry| entry.expect("it is there").file_name()).collect();
    assert_eq!(left, ["kept"]);
}
