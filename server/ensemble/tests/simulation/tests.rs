//! The runs, and the proof that they find bugs.

use crate::report::{Counts, Outcome};
use crate::run::run;
use std::io::Write;
use std::time::Duration;

/// Seeds of a run in CI.
const SEEDS: u64 = 300;

fn seeds() -> Vec<u64> {
    let number = |name: &str| {
        let text = std::env::var(name).ok()?;
        Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
    };
    match number("SEED") {
        Some(seed) => vec![seed],
        None => {
            let first = number("NODE_FIRST_SEED").unwrap_or(1);
            (first..first + number("NODE_SEEDS").unwrap_or(SEEDS)).collect()
        }
    }
}

#[test]
fn nodes_keep_every_promise_under_faults() {
    let (counts, mut simulated, mut failures) = (Counts::default(), Duration::ZERO, Vec::new());
    let seeds = seeds();
    for seed in &seeds {
        let Outcome { failure, simulated: time, counts: of_run, trace, .. } = run(*seed);
        counts.take_in(&of_run);
        simulated += time;
        if seeds.len() == 1 {
            println!("SEED={seed}: trace {trace:016x}");
        }
        if let Some(failure) = failure {
            println!("SEED={seed}: {failure}");
            failures.push(*seed);
            if std::env::var_os("NODE_ALL").is_none() {
                break;
            }
        }
    }
    assert!(failures.is_empty(), "these seeds fail: {failures:?}");
    let hours = simulated.as_secs_f64() / 3600.0;
    // To standard error itself: the figures are part of every run's output.
    let figures = format!("done: {} seeds, {hours:.1} simulated hours: {counts}", seeds.len());
    let _ = writeln!(std::io::stderr(), "{figures}");
}

#[test]
fn seed_repeats_the_same_events() {
    for seed in 1..=5 {
        let (first, second) = (run(seed), run(seed));
        assert_eq!(first.trace, second.trace, "SEED={seed}: {} {}", first.counts, second.counts);
        assert_eq!(first.seed, second.seed);
    }
}

/// Bugs of the data stores and of their owner, which are a model here.
const BUGS_OF_DATA_STORES: [&str; 6] = [
    "store-without-fence",
    "record-before-fragments",
    "old-deleted-before-record",
    "checksum-skipped",
    "stale-fragment-accepted",
    "two-in-one-domain",
];

/// Runs this program's test of the nodes with a bug, and demands that it fails.
fn assert_found(variable: &str, bug: &str, seeds: &str) {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "tests::nodes_keep_every_promise_under_faults", "--nocapture"]);
    command.env(variable, bug).env("NODE_SEEDS", seeds);
    let output = command.env_remove("SEED").env_remove("NODE_FIRST_SEED").output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let found = text.lines().find(|line| line.starts_with("SEED="));
    println!("{bug}: {}", found.unwrap_or("not found"));
    assert!(!output.status.success() && found.is_some(), "{bug} is not found: {text}");
}

#[test]
fn bugs_of_data_stores_are_found() {
    for bug in BUGS_OF_DATA_STORES {
        assert_found("SPINDLE_SIM_BUG", bug, "200");
    }
}

/// Bugs of the protocol, each with the number of seeds within which it must be found. A long end of a deposed
/// owner's log beside a short successor is rare: clients wait for their answers.
#[cfg(feature = "seeded-bugs")]
const BUGS: [(&str, &str); 10] = [
    ("promise-not-kept", "200"),
    ("unrecorded-configuration", "200"),
    ("opening-replaced", "200"),
    ("ack-without-quorum", "200"),
    ("sent-is-written", "200"),
    ("amnesiac-votes", "200"),
    ("damage-unseen", "200"),
    ("tail-by-length", "1000"),
    ("promise-not-stored", "200"),
    ("read-without-lease", "200"),
];

/// The features `seeded-bugs` of the packages `replication` and `wal` are needed, too, as in `tests/run`.
#[cfg(feature = "seeded-bugs")]
#[test]
fn seeded_bugs_are_found() {
    for (bug, seeds) in BUGS {
        assert_found("SPINDLE_SEEDED_BUGS", bug, seeds);
    }
}
