//! Devices whose writes wait for room in the log, because the store is full.
//!
//! - A program that has closed its device may still have writes under way: it counts as a user.

use crate::devices::{SETTINGS, attach, refused, variables, wait_for_full_log};
use crate::space::Disk;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tests::daemon::Daemon;
use tests::needs_root;
use tests::place::{binary, run};
use tests::power::guest;
use tests::process::dies_with_us;
use tests::seed::{Random, seeds};

#[test]
fn detach_is_refused_while_a_closing_program_still_writes() {
    needs_root!();
    let name = "devices_full_log::detach_is_refused_while_a_closing_program_still_writes";
    let seed = seeds(1)[0];
    guest::run(name, Duration::from_secs(240), &variables(seed), || {
        closed(seed);
        if binary("spindle-faulty").exists() {
            detached_at_once(seed);
        }
    });
}

/// A program that has written to a device of a full log and closed it: its close waits.
struct WaitingWriter {
    daemon: Daemon,
    store: Disk,
    writer: std::process::Child,
    given: String,
}

fn waiting_writer(seed: u64, driver: &[&str], environment: &[(&str, &str)]) -> WaitingWriter {
    let mut daemon = Daemon::new(SETTINGS, &[("db", "256M")]);
    if !environment.is_empty() {
        daemon.use_binary("spindle-faulty");
        daemon.environ(environment);
    }
    let store = Disk::mount(daemon.place().join("store"), 4);
    daemon.argue(&["--store", &store.path().display().to_string()]);
    daemon.announce("");
    daemon.restart();
    let device = attach(&daemon, driver);
    let mut bytes = vec![0; 112 << 20];
    Random::new(seed, 0).fill(&mut bytes);
    let given = daemon.place().join("given");
    std::fs::write(&given, &bytes).expect("write a file");
    drop(bytes);
    let given = given.display().to_string();
    let mut writer = Command::new("dd");
    writer.args([&format!("if={given}"), &format!("of={device}"), "bs=1M", "conv=notrunc"]);
    writer.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut writer = dies_with_us(&mut writer).spawn().expect("dd starts");
    wait_for_full_log(&daemon);
    assert!(writer.try_wait().expect("look").is_none(), "{driver:?}: the writer waits");
    WaitingWriter { daemon, store, writer, given }
}

/// The test detects a daemon that does not look for writes under way.
fn detached_at_once(seed: u64) {
    let bug = [("SPINDLE_SEEDED_BUGS", "detached-at-once")];
    let WaitingWriter { daemon, mut writer, .. } = waiting_writer(seed, &["--nbd"], &bug);
    let said = daemon.command(&["detach", "db"]);
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(!said.contains("still on its way"), "the bug goes unnoticed: {said}");
    let _ = writer.kill();
    let _ = writer.wait();
}

/// A program that closes a device waits until its writes are done, here for room in the log, and no
/// longer counts as a user.
fn closed(seed: u64) {
    for driver in [&[][..], &["--nbd"]] {
        let WaitingWriter { mut daemon, store, mut writer, given } =
            waiting_writer(seed, driver, &[]);
        refused(&daemon, &["detach", "db"], "still on its way");
        assert!(writer.try_wait().expect("look").is_none(), "{driver:?}: the writer waits");
        store.resize(400);
        assert!(writer.wait().expect("dd ends").success(), "{driver:?}");
        let until = Instant::now() + Duration::from_secs(60);
        while !daemon.command(&["detach", "db"]).status.success() {
            assert!(Instant::now() < until, "{driver:?}: {}", daemon.tail());
        }
        let again = attach(&daemon, driver);
        run("cmp", &["-n", &(112 << 20).to_string(), &given, &again]);
        let _ = daemon.json(&["detach", "db"]);
        daemon.stop();
        daemon.fsck();
    }
}
