//! The crash tester against spindle: after kill -9 at hostile moments, every acknowledged write is
//! present, flushed or not.
//!
//! Invariants:
//! - The log is small, so that it wraps and destages many times in a round.
//! - `SPINDLE_TEST_ROUNDS` sets the number of rounds, for long runs at night.

use crate::copies::{OF_COPIES, OF_PARTS, OF_RESTORED, OF_RESTORES};
use crate::stalled::WITH_SPILL_FILES;
use std::collections::BTreeSet;
use std::time::Duration;
use tests::daemon::{self, Daemon, SMALL, SWITCHES};
use tests::place::{binary, skip};
use tests::seed::seeds;
use tests::torture::{Plan, Totals, VolumePlan, torture};

/// Fail points that every destage passes, so that each ends the daemon in a run of default length.
const EVERY_DESTAGE: [&str; 10] = [
    "destage-start",
    "destage-segment-built",
    "destage-segment-uploaded",
    "destage-before-commit",
    "commit-before-write",
    "commit-before-flush",
    "commit-after-flush",
    "destage-committed",
    "spill-committed",
    "spill-released",
];

/// Fail points of the steps of reclaim that drop or rewrite segments.
const EVERY_RECLAIM: [&str; 6] = [
    "reclaim-start",
    "reclaim-before-commit",
    "repoint-before-write",
    "repoint-before-flush",
    "repoint-after-flush",
    "reclaim-committed",
];

/// Fail points that each clone, rollback and promotion passes.
const EVERY_LAYER: [&str; 3] = ["layers-before-write", "layers-before-flush", "layers-after-flush"];

/// Fail points of the background work for snapshots, clones, trims and deduplication. The amount of
/// this work is random, so a run insists on some of them only.
const IN_THE_BACKGROUND: [&str; 5] =
    ["promote-written", "forget-written", "prune-written", "fold-written", "sweep-written"];
/// Smallest number of these that end the daemon in a run of the default length.
const IN_THE_BACKGROUND_MIN: usize = 2;

/// The names differ in length by one, so that both kinds of sockets are used.
const VOLUMES: &[(&str, &str)] = &[("db", "64MiB"), ("log", "8MiB"), ("huge", "1TiB")];

fn plan(seed: u64, round_count: u64) -> Plan {
    let volume = |name: &str, start_sector, bytes: usize| VolumePlan {
        name: name.to_owned(),
        start_sector,
        sector_count: bytes / 512,
    };
    let rounds = std::env::var("SPINDLE_TEST_ROUNDS").ok();
    let round_count = rounds.map_or(round_count, |text| text.parse().expect("a number"));
    Plan {
        seed,
        round_count,
        round: Duration::from_millis(400),
        time: Duration::from_secs(round_count * 10),
        volumes: vec![
            volume("db", 0, 24 << 20),
            volume("log", 0, 8 << 20),
            // Neither its start nor its end is aligned to anything.
            volume("huge", (64 << 30) / 512 - 777, 12 << 20),
        ],
        fail_points: Vec::new(),
        fail_point_percent: 60,
        // Time for six destages of an idle pool on a busy machine.
        fail_point_time: Duration::from_secs(30),
        fail_point_nth_max: 6,
        has_states: false,
        pattern_percent: 0,
    }
}

/// Settings under which hardly any dead data is left, and the volumes deduplicate.
fn settings_of_states() -> String {
    format!(
        "{SMALL}[reclaim]\nspace_percent = 105\n\
         [[volumes]]\nname = \"db\"\nsize = \"64MiB\"\ndedup = true\n\
         [[volumes]]\nname = \"log\"\nsize = \"8MiB\"\ndedup = true\n"
    )
}

/// Makes a plan in which snapshots and clones come and go while the volumes are written.
fn plan_of_states(seed: u64, round_count: u64) -> Plan {
    let mut plan = plan(seed, round_count);
    plan.volumes.truncate(2);
    plan.volumes[0].sector_count = (8 << 20) / 512;
    plan.volumes[1].sector_count = (4 << 20) / 512;
    // A clone waits for a destage.
    plan.round = Duration::from_millis(1500);
    // Some background work happens only now and then.
    plan.fail_point_time = Duration::from_secs(20);
    plan.fail_point_nth_max = if plan.round_count > 100 { 4 } else { 1 };
    (plan.has_states, plan.pattern_percent) = (true, 30);
    plan
}

fn survives(daemon: Daemon, seed: u64, round_count: u64) {
    survives_plan(daemon, &plan(seed, round_count));
}

fn survives_plan(mut daemon: Daemon, plan: &Plan) -> Totals {
    let seed = plan.seed;
    println!("SEED={seed}");
    let totals = torture(&mut daemon, plan);
    let totals = totals.unwrap_or_else(|found| panic!("{found}"));
    daemon.fsck();
    println!("{totals:?}");
    // The promise is 5 s on a quiet machine with a log of the default size; this one is small.
    assert!(totals.start_ms_max < 10_000, "SEED={seed}: a start took {} ms", totals.start_ms_max);
    totals
}

#[test]
fn every_acknowledged_write_survives_kill_9() {
    for seed in seeds(1) {
        survives(Daemon::new(SMALL, VOLUMES), seed, 25);
    }
}

#[test]
fn every_acknowledged_write_survives_kill_9_when_every_write_is_synced() {
    for seed in seeds(1) {
        let settings = format!(
            "{SMALL}[[volumes]]\nname = \"db\"\nsize = \"64MiB\"\ndurability = \"write\"\n\
             [[volumes]]\nname = \"log\"\nsize = \"8MiB\"\ndurability = \"store\"\n"
        );
        survives(Daemon::new(&settings, &[("huge", "1TiB")]), seed, 10);
    }
}

#[test]
fn every_acknowledged_write_survives_a_crash_between_destage_steps() {
    if !binary("spindle-faulty").exists() {
        return skip("the build with fail points is missing (tests/run makes it)");
    }
    for seed in seeds(1) {
        survives_deaths(SMALL, seed, &EVERY_DESTAGE, 25);
    }
}

#[test]
fn every_acknowledged_write_survives_a_crash_between_reclaim_steps() {
    if !binary("spindle-faulty").exists() {
        return skip("the build with fail points is missing (tests/run makes it)");
    }
    // Hardly any dead data is left, and each start looks for it.
    let settings = format!("{SMALL}[reclaim]\nspace_percent = 105\n");
    for seed in seeds(1) {
        survives_deaths(&settings, seed, &EVERY_RECLAIM, 20);
    }
}

#[test]
fn every_snapshot_and_clone_survives_kill_9() {
    for seed in seeds(1) {
        let daemon = Daemon::new(&settings_of_states(), &[]);
        let totals = survives_plan(daemon, &plan_of_states(seed, 20));
        // Without these the run would prove nothing.
        for wanted in ["snapshot", "clone", "written clone", "removed snapshot"] {
            assert!(totals.states.contains_key(wanted), "SEED={seed}: no {wanted}: {totals:?}");
        }
    }
}

#[test]
fn every_snapshot_and_clone_survives_a_crash_between_steps() {
    if !binary("spindle-faulty").exists() {
        return skip("the build with fail points is missing (tests/run makes it)");
    }
    for seed in seeds(1) {
        let daemon = Daemon::new(&settings_of_states(), &[]);
        let plan = plan_of_states(seed, 16);
        let totals = dies_at_each(daemon, plan, &EVERY_LAYER, &IN_THE_BACKGROUND);
        let fired = IN_THE_BACKGROUND.iter().filter(|name| totals.fired.contains_key(**name));
        assert!(fired.count() >= IN_THE_BACKGROUND_MIN, "SEED={seed}: {totals:?}");
    }
}

/// Ends the daemon at each of the fail points.
fn survives_deaths(settings: &str, seed: u64, fail_points: &[&str], round_count: u64) {
    let _ = dies_at_each(Daemon::new(settings, VOLUMES), plan(seed, round_count), fail_points, &[]);
}

/// Like [`survives_deaths`], but arms the fail points `others`, too, without insisting on them.
fn dies_at_each(
    mut daemon: Daemon,
    mut plan: Plan,
    fail_points: &[&str],
    others: &[&str],
) -> Totals {
    let seed = plan.seed;
    daemon.use_binary("spindle-faulty");
    plan.fail_points = fail_points.iter().chain(others).map(|name| (*name).to_owned()).collect();
    // The time limit ends no run before each fail point has had its round.
    plan.time += plan.fail_point_time * u32::try_from(plan.round_count).expect("few");
    let totals = survives_plan(daemon, &plan);
    let wanted = fail_points.len().min(usize::try_from(plan.round_count).expect("few"));
    let fired = fail_points.iter().filter(|name| totals.fired.contains_key(**name)).count();
    assert!(fired >= wanted, "SEED={seed}: {fired} of {wanted} fail points: {totals:?}");
    totals
}

#[test]
fn unreached_fail_point_does_not_count_as_fired() {
    if !binary("spindle-faulty").exists() {
        return skip("the build with fail points is missing (tests/run makes it)");
    }
    let mut daemon = Daemon::new(SMALL, VOLUMES);
    daemon.use_binary("spindle-faulty");
    let mut plan = Plan { fail_points: vec!["nowhere".to_owned()], ..plan(1, 1) };
    (plan.round_count, plan.fail_point_time) = (1, Duration::from_secs(2));
    assert!(survives_plan(daemon, &plan).fired.is_empty());
}

#[test]
fn every_fail_point_of_the_source_is_armed_by_a_test() {
    let all = EVERY_DESTAGE
        .iter()
        .chain(&EVERY_RECLAIM)
        .chain(&EVERY_LAYER)
        .chain(&IN_THE_BACKGROUND)
        .chain(WITH_SPILL_FILES);
    let all = all.chain(OF_COPIES).chain(OF_RESTORES).chain(OF_RESTORED).chain(OF_PARTS);
    let mut armed: Vec<_> = all.copied().collect();
    armed.sort_unstable();
    armed.dedup();
    assert_eq!(armed, daemon::fail_points_of_the_source());
}

/// Bugs that the source can be told to have and that `kill -9` shows, with the number of rounds
/// within which each must be found. Bugs that only a loss of power shows are found elsewhere. The
/// simulation of package `wal` finds a torn or stale batch that is accepted, an answer
/// between submission and completion, and an ignored flush; the test of power cuts
/// (tests/e2e/power.rs) also finds the last.
const SEEDED_BUGS: &[(&str, u64)] =
    &[("ack-before-submit", 60), ("trim-lost", 30), ("overlay-dropped-early", 60)];

/// Like [`SEEDED_BUGS`], for bugs that snapshots and clones show. Rarer ones are found by the models of
/// package `tiering`.
const SEEDED_BUGS_IN_STATES: &[(&str, u64)] =
    &[("versions-forgotten", 100), ("promoted-over-newer", 100)];

/// Texts with which the crash tester reports wrong data.
const WHAT_IS_WRONG: &[&str] =
    &["sector(s) read wrong", "sector(s) recovered wrong", "is of no moment"];
/// Text with which the daemon itself reports wrong data: the log has released entries that the
/// store lacks.
const LOG_IS_AHEAD: (&str, &str) = ("overlay-dropped-early", "the store was rolled back");

#[test]
fn a_binary_that_people_run_has_no_switch_to_break_it() {
    let bytes = |program: &str| std::fs::read(binary(program)).expect("the program was built");
    // One pass for all names: the binary has more than a hundred MiB.
    let found_in = |bytes: &[u8], names: &BTreeSet<String>| {
        let firsts: BTreeSet<u8> = names.iter().map(|name| name.as_bytes()[0]).collect();
        let mut is_first = [false; 256];
        firsts.iter().for_each(|byte| is_first[usize::from(*byte)] = true);
        let places = bytes.iter().enumerate().filter(|(_, byte)| is_first[usize::from(**byte)]);
        let names_at = |(at, _): (usize, &u8)| {
            names.iter().filter(move |name| bytes[at..].starts_with(name.as_bytes()))
        };
        places.flat_map(names_at).cloned().collect::<BTreeSet<String>>()
    };
    let switches: BTreeSet<String> = SWITCHES.iter().map(|name| (*name).to_owned()).collect();
    if binary("spindle-faulty").exists() {
        // Comparisons with the names of bugs may be compiled to plain numbers; the names of variables
        // remain. `tests/run --plain` makes the other check.
        let found = found_in(&bytes("spindle-faulty"), &switches);
        assert_eq!(found, switches, "all are seen where they are");
        return;
    }
    let mut names = daemon::seeded_bugs_of_the_source();
    names.extend(daemon::fail_points_of_the_source());
    names.extend(switches);
    assert_eq!(found_in(&bytes("spindle"), &names), BTreeSet::new(), "these are in the binary");
}

#[test]
fn seeded_bugs_are_found_within_their_number_of_rounds() {
    let known = daemon::seeded_bugs_of_the_source();
    for (name, _) in SEEDED_BUGS.iter().chain(SEEDED_BUGS_IN_STATES) {
        assert!(known.contains(*name), "the source knows no bug {name:?}, only {known:?}");
    }
    if !binary("spindle-faulty").exists() {
        return skip("the build with seeded bugs is missing (tests/run makes it)");
    }
    for seed in seeds(1) {
        for (name, round_count) in SEEDED_BUGS {
            is_found(name, Daemon::new(SMALL, VOLUMES), &plan(seed, *round_count));
        }
        for (name, round_count) in SEEDED_BUGS_IN_STATES {
            let daemon = Daemon::new(&settings_of_states(), &[]);
            let mut plan = plan_of_states(seed, *round_count);
            plan.fail_points = EVERY_LAYER
                .iter()
                .chain(&IN_THE_BACKGROUND)
                .map(|name| (*name).to_owned())
                .collect();
            is_found(name, daemon, &plan);
        }
    }
}

fn is_found(name: &str, mut daemon: Daemon, plan: &Plan) {
    println!("{name}: SEED={}", plan.seed);
    daemon.use_binary("spindle-faulty");
    daemon.environ(&[("SPINDLE_SEEDED_BUGS", name)]);
    daemon.announce("");
    match torture(&mut daemon, plan) {
        Err(found) => {
            println!("{found}");
            // A daemon that does not start, or a broken rig, proves nothing.
            let is_of_data = WHAT_IS_WRONG.iter().any(|words| found.contains(words))
                || name == LOG_IS_AHEAD.0 && found.contains(LOG_IS_AHEAD.1);
            assert!(is_of_data, "SEED={}: {name} ended for another reason: {found}", plan.seed);
        }
        Ok(totals) => panic!("SEED={}: {name} was not found: {totals:?}", plan.seed),
    }
}
