//! The demonstration on three nodes, as a user sees it, and the processes that it leaves: none.
//!
//! Invariants:
//! - A process of the demonstration is recognised by its arguments, which name a directory of the test.

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::Value;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use tests::Place;
use tests::place::{binary, output};
use tests::process::Process;

const NAMES: [&str; 3] = ["a", "b", "c"];
/// Longest pause of the client, on a machine that does other work beside. Detection takes a second of
/// it.
const PAUSE_MAX_MS: u64 = 10_000;
/// Longest wait for anything that the demonstration does.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Returns the arguments of all processes that name `dir`.
fn processes_of(dir: &Path) -> Vec<String> {
    let dir = dir.display().to_string();
    let processes = std::fs::read_dir("/proc").expect("the kernel lists processes");
    let arguments = |entry: std::fs::DirEntry| {
        // Not a process, or it has ended.
        let bytes = std::fs::read(entry.path().join("cmdline")).ok()?;
        Some(String::from_utf8_lossy(&bytes).replace('\0', " "))
    };
    processes.flatten().filter_map(arguments).filter(|text| text.contains(&dir)).collect()
}

fn started(place: &Place, errors: &Path, arguments: &[&str]) -> Process {
    let mut command = Command::new(binary("spindle"));
    command.args(["demo", "--nodes", "3"]).args(arguments).env("TMPDIR", place.join("temporary"));
    std::fs::create_dir(place.join("temporary")).expect("make a directory");
    Process::start(command.process_group(0), errors).expect("it starts")
}

/// Reads lines to the first that contains `word`.
#[track_caller]
fn line_with(demo: &Process, word: &str) -> String {
    let mut lines = std::iter::from_fn(|| demo.line(WAIT_MAX));
    lines.find(|line| line.contains(word)).unwrap_or_else(|| panic!("it does not say {word:?}"))
}

fn number_after(line: &str, words: &str) -> i32 {
    let (_, rest) = line.split_once(words).expect("it has the words");
    rest.split_whitespace().next().and_then(|word| word.parse().ok()).expect("a number")
}

/// Whether nodes have reported nothing but that another one took the pool from them: on a machine too
/// busy for heartbeats, the owner counts as silent.
fn has_only_fences(errors: &str) -> bool {
    errors.lines().all(|line| line.contains("Fenced") || line.contains("another node"))
}

/// Kills a node, whose number the demonstration has printed.
fn kill(process: i32) {
    kill_process(Pid::from_raw(process).expect("a process"), Signal::KILL).expect("it runs");
}

#[test]
fn fail_over_of_the_demonstration_loses_nothing() {
    let place = Place::new();
    let (path, dir) = (binary("spindle").display().to_string(), place.join("demo"));
    let arguments = ["demo", "--nodes", "3", "--exit", "-o", "json", "--dir"];
    let arguments = [&arguments[..], &[dir.to_str().expect("plain")]].concat();
    let shown = output(&path, &arguments);
    let (out, err) =
        (String::from_utf8_lossy(&shown.stdout), String::from_utf8_lossy(&shown.stderr));
    assert!(shown.status.success() && has_only_fences(&err), "{out}\n{err}");
    let info: Value = serde_json::from_str(&out).expect("one JSON document");
    println!("{info}");
    assert_eq!((&info["lost_writes"], &info["wrong_reads"]), (&0.into(), &0.into()), "{info}");
    assert!(info["acknowledged_writes"].as_u64() > Some(1000), "{info}");
    assert!(info["pause_ms"].as_u64().is_some_and(|pause| pause < PAUSE_MAX_MS), "{info}");
    assert!(info["owner_before"] == "a" && info["client_node"] == "b", "{info}");
    assert!(info["owner_after"] != "a" && info["missed_batches"].as_u64() > Some(0), "{info}");
    assert_eq!(processes_of(&dir), Vec::<String>::new());
    // A directory that was named is kept, and not used again.
    for name in NAMES.into_iter().chain(["store"]) {
        assert!(dir.join(name).is_dir(), "{name}");
    }
    let again = output(&path, &arguments);
    assert!(!again.status.success());
    assert!(String::from_utf8_lossy(&again.stderr).contains("not empty"), "{again:?}");
}

/// A terminal sends SIGINT to the whole process group: to the demonstration and its child
/// processes.
#[test]
fn interrupted_demonstration_leaves_no_node_and_no_directory() {
    let place = Place::new();
    let errors = place.join("errors");
    let mut demo = started(&place, &errors, &[]);
    let owner = number_after(&line_with(&demo, "kill -9 "), "kill -9 ");
    let _ = line_with(&demo, "take-over");
    assert_eq!(processes_of(&place.join("temporary")).len(), 3);
    kill(owner);
    let _ = line_with(&demo, "owns the pool");
    let _ = line_with(&demo, "Started node");
    assert_eq!(processes_of(&place.join("temporary")).len(), 3);
    let group = Pid::from_raw(demo.id().cast_signed()).expect("a process");
    kill_process_group(group, Signal::INT).expect("it is there");
    let status = demo.wait(WAIT_MAX).expect("it ends");
    let said = std::fs::read_to_string(&errors).expect("read a file");
    assert!(status.success() && has_only_fences(&said), "{status}: {said}");
    assert_eq!(processes_of(&place.join("temporary")), Vec::<String>::new());
    let left = std::fs::read_dir(place.join("temporary")).expect("it is there").count();
    assert_eq!(left, 0, "files are left");
}

#[test]
fn nodes_end_with_a_demonstration_that_is_killed_or_fails() {
    // In the middle of the demonstration, with all nodes there.
    let place = Place::new();
    let mut demo = started(&place, &place.join("errors"), &[]);
    let _ = line_with(&demo, "Three nodes");
    assert_eq!(processes_of(&place.join("temporary")).len(), 3);
    demo.kill();
    let begun = Instant::now();
    while !processes_of(&place.join("temporary")).is_empty() {
        assert!(begun.elapsed() < WAIT_MAX, "a node outlives the demonstration");
        std::thread::sleep(Duration::from_millis(10));
    }
    // It fails without a majority. The owner dies first, so that it is not there to restart a member.
    let place = Place::new();
    let mut demo = started(&place, &place.join("errors"), &[]);
    let members: Vec<i32> = NAMES
        .iter()
        .map(|name| number_after(&line_with(&demo, &format!("node {name}, process ")), "process "))
        .collect();
    let owner = number_after(&line_with(&demo, "kill -9 "), "kill -9 ");
    let others = members.into_iter().filter(|member| *member != owner);
    for process in std::iter::once(owner).chain(others) {
        kill(process);
    }
    let status = demo.wait(WAIT_MAX).expect("it ends");
    let said = std::fs::read_to_string(place.join("errors")).expect("read a file");
    assert!(status.code() == Some(1) && said.contains("too few nodes"), "{status}: {said}");
    assert_eq!(processes_of(&place.join("temporary")), Vec::<String>::new());
    let left = std::fs::read_dir(place.join("temporary")).expect("it is there").count();
    assert_eq!(left, 0, "files are left");
}
