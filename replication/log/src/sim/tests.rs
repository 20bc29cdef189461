//! Thousands of seeded crashes. `SEED=17 cargo test --release -p wal sim` replays one run;
//! `SIM_SEEDS=100000` runs more, and `SIM_FIRST_SEED=1000000` begins there instead of at 0.

use super::disk::Faults;
use super::world::{Plan, Stats, World};
use crate::seeded_bugs::SeededBugs;
use std::panic::{AssertUnwindSafe, catch_unwind};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

fn run(seed: u64, plan: Plan) -> Result<Stats, String> {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new(seed, plan);
        world.run().map(|()| world.stats)
    }));
    outcome.unwrap_or_else(|_| Err("panicked".into()))
}

fn run_all(plan: Plan, seeds: u64) -> Stats {
    let (from, to) = match number("SEED") {
        Some(seed) => (seed, seed + 1),
        None => {
            let first = number("SIM_FIRST_SEED").unwrap_or(0);
            (first, first + number("SIM_SEEDS").unwrap_or(seeds))
        }
    };
    let mut sum = Stats::default();
    for seed in from..to {
        let stats = run(seed, plan).unwrap_or_else(|why| panic!("SEED={seed}: {why}"));
        sum.crashes += stats.crashes;
        sum.recovery_crashes += stats.recovery_crashes;
        sum.cuts += stats.cuts;
        sum.entries += stats.entries;
        sum.lost_unacked += stats.lost_unacked;
        sum.failures += stats.failures;
        sum.full += stats.full;
        sum.unproven += stats.unproven;
        sum.clean += stats.clean;
        sum.spilled += stats.spilled;
        sum.caught_up += stats.caught_up;
        sum.expected += stats.expected;
        sum.summaries += stats.summaries;
        sum.in_store += stats.in_store;
        sum.snapshots += stats.snapshots;
        sum.shutdowns += stats.shutdowns;
        sum.remounts += stats.remounts;
        sum.drops += stats.drops;
        sum.noted_whole += stats.noted_whole;
        sum.answered += stats.answered;
    }
    println!("{sum:?}");
    sum
}

#[test]
fn crash_at_any_moment_keeps_acknowledged_entries() {
    let plan = Plan { runs: 12, ..Plan::default() };
    let met = run_all(plan, 1500);
    if number("SEED").is_none() {
        assert!(met.crashes > 10_000 && met.cuts > 5_000 && met.recovery_crashes > 4_000);
        assert!(met.lost_unacked > 0 && met.full > 0 && met.unproven > 0 && met.clean > 0);
        assert!(met.summaries > 10_000 && met.in_store > 2);
        assert!(met.spilled > 1_000 && met.caught_up > 300);
        assert!(met.expected > 1_000 && met.snapshots > 10_000);
    }
}

#[test]
fn log_with_a_member_promises_what_both_have() {
    let met = run_all(Plan { runs: 12, has_member: true, ..Plan::default() }, 600);
    if number("SEED").is_none() {
        assert!(met.crashes > 5_000 && met.clean > 0 && met.full > 0 && met.answered > 500);
    }
    let faults = Faults { write: 2, sync: 10, create: 20, ..Faults::default() };
    run_all(Plan { runs: 12, has_member: true, faults, ..Plan::default() }, 200);
}

#[test]
fn failing_writes_and_syncs_lose_nothing_that_was_promised() {
    let faults = Faults { write: 2, sync: 10, create: 20, ..Faults::default() };
    let met = run_all(Plan { runs: 12, faults, ..Plan::default() }, 800);
    assert!(number("SEED").is_some() || (met.failures > 1_000 && met.drops > 500));
}

#[test]
fn pages_that_the_kernel_dropped_are_reported_as_lost() {
    let faults = Faults { sync: 4, write_back: 30, shutdown: 15, remount: 10, ..Faults::default() };
    let met = run_all(Plan { runs: 12, faults, ..Plan::default() }, 800);
    if number("SEED").is_none() {
        assert!(met.shutdowns > 800 && met.remounts > 1_000 && met.drops > 800);
        assert!(met.unproven > 1_000 && met.noted_whole > 100);
    }
}

fn with_quorum(seeded_bugs: SeededBugs) -> Result<(u64, u64), String> {
    let (from, to) = number("SEED").map_or((0, 400), |seed| (seed, seed + 1));
    let (mut refused, mut opened) = (0, 0);
    for seed in from..to {
        let mut world = World::new(seed, Plan { seeded_bugs, runs: 2, ..Plan::default() });
        let is_refused = world.run_with_quorum().map_err(|e| format!("SEED={seed}: {e}"))?;
        *(if is_refused { &mut refused } else { &mut opened }) += 1;
    }
    Ok((refused, opened))
}

#[test]
fn failed_write_back_refuses_a_log_that_its_members_chose() {
    let (refused, opened) = with_quorum(SeededBugs::default()).unwrap();
    assert!(number("SEED").is_some() || refused > 50 && opened > 50, "{refused}, {opened}");
    for bug in [
        SeededBugs { writeback_not_asked: true, ..SeededBugs::default() },
        SeededBugs { failure_not_noted: true, ..SeededBugs::default() },
    ] {
        assert!(number("SEED").is_some() || with_quorum(bug).is_err(), "{bug:?} goes unnoticed");
    }
}

#[test]
fn a_flipped_bit_is_refused_or_harmless_and_never_wrong_data() {
    let (from, to) = number("SEED").map_or((0, 1000), |seed| (seed, seed + 1));
    let mut refused = 0;
    for seed in from..to {
        let mut world = World::new(seed, Plan { runs: 2, ..Plan::default() });
        let is_refused = world.run_with_damage().unwrap_or_else(|why| panic!("SEED={seed}: {why}"));
        refused += u64::from(is_refused);
    }
    println!("refused {refused} of {}", to - from);
    assert!(number("SEED").is_some() || refused > 200);
}

/// Runs with `count` unreadable sectors. Returns the numbers of refused and of opened logs.
fn unreadable(seeded_bugs: SeededBugs, count: u64, seeds: u64) -> Result<(u64, u64), String> {
    let (from, to) = number("SEED").map_or((0, seeds), |seed| (seed, seed + 1));
    let (mut refused, mut opened, mut had_to) = (0, 0, 0);
    for seed in from..to {
        let mut world = World::new(seed, Plan { runs: 3, seeded_bugs, ..Plan::default() });
        let found = world.run_with_unreadable(count);
        let (is_refused, must_open) = found.map_err(|why| format!("SEED={seed}: {why}"))?;
        if must_open == Some(is_refused) {
            return Err(format!("SEED={seed}: refused: {is_refused}"));
        }
        had_to += u64::from(must_open == Some(true));
        *if is_refused { &mut refused } else { &mut opened } += 1;
    }
    println!("{count} unreadable: refused {refused}, opened {opened}, {had_to} had to");
    Ok((refused, opened))
}

#[test]
fn an_unreadable_sector_keeps_the_log_from_opening_only_where_it_is_needed() {
    for count in [1, 3] {
        let (refused, opened) = unreadable(SeededBugs::default(), count, 1500).unwrap();
        assert!(number("SEED").is_some() || refused > 50 && opened > 500);
    }
}

#[test]
fn unreadable_end_is_not_mistaken_for_the_end() {
    let seeded_bugs = SeededBugs { unreadable_ends: true, ..SeededBugs::default() };
    let why = unreadable(seeded_bugs, 1, 1500).expect_err("the seeded bug was not found");
    println!("found: {why}");
    assert!(why.contains("the log ends at") || why.contains("refused: false"));
}

/// Forges batches without entries. Returns how many recovery refused and how many it took.
fn forgeries(seeded_bugs: SeededBugs) -> (u64, u64) {
    let (mut refused, mut taken) = (0, 0);
    for seed in 0..200 {
        let mut world = World::new(seed, Plan { runs: 2, seeded_bugs, ..Plan::default() });
        match world.run_with_forgery().unwrap_or_else(|why| panic!("SEED={seed}: {why}")) {
            Some(true) => refused += 1,
            Some(false) => taken += 1,
            None => {}
        }
    }
    println!("refused {refused}, taken {taken}");
    (refused, taken)
}

#[test]
fn a_forged_batch_without_entries_is_refused() {
    let (refused, taken) = forgeries(SeededBugs::default());
    assert!(refused > 50 && taken == 0);
    let (refused, taken) = forgeries(SeededBugs { tag_ignored: true, ..SeededBugs::default() });
    assert!(refused == 0 && taken > 50, "the seeded bug was not found");
}

/// Number of seeds within which a seeded bug must be found.
const FOUND_WITHIN: u64 = 50;

fn finds(name: &str, seeded_bugs: SeededBugs, faults: Faults) {
    finds_in(name, Plan { seeded_bugs, faults, runs: 12, has_member: false });
}

fn finds_in(name: &str, plan: Plan) {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let found = (0..FOUND_WITHIN).find_map(|seed| run(seed, plan).err().map(|why| (seed, why)));
    std::panic::set_hook(hook);
    let (seed, why) = found.unwrap_or_else(|| panic!("{name} was not found"));
    println!("{name}: found by seed {seed}: {why}");
}

#[test]
fn seeded_bugs_are_found() {
    let none = Faults::default();
    let off = SeededBugs::default();
    finds("ack before write", SeededBugs { ack_before_write: true, ..off }, none);
    finds("flush ignored", SeededBugs { flush_ignored: true, ..off }, none);
    finds("torn batch accepted", SeededBugs { torn_accepted: true, ..off }, none);
    finds("stale wrap accepted", SeededBugs { stale_accepted: true, ..off }, none);
    finds("newest by sequence", SeededBugs { newest_by_sequence: true, ..off }, none);
    finds("snapshot not frozen", SeededBugs { snapshot_not_frozen: true, ..off }, none);
    finds("sides joined", SeededBugs { sides_joined: true, ..off }, none);
    let failing = Faults { sync: 20, ..none };
    finds("tail not rewritten", SeededBugs { tail_not_rewritten: true, ..off }, failing);
    finds("failure not noted", SeededBugs { failure_not_noted: true, ..off }, failing);
    let shutting = Faults { shutdown: 30, ..none };
    finds("remount not seen", SeededBugs { remount_not_seen: true, ..off }, shutting);
    let unheard = Faults { write_back: 50, ..none };
    finds("writeback not asked", SeededBugs { writeback_not_asked: true, ..off }, unheard);
    let of_members = |seeded_bugs| Plan { seeded_bugs, runs: 12, has_member: true, faults: none };
    let early = SeededBugs { ack_without_quorum: true, ..off };
    finds_in("ack without quorum", of_members(early));
    let own = SeededBugs { commit_by_own_sync: true, ..off };
    finds_in("commit by own sync", of_members(own));
}

#[test]
fn an_idle_log_makes_the_rest_of_its_ring() {
    for seed in 0..20 {
        let (made, wanted) = World::new(seed, Plan::default()).files_after_idleness();
        assert_eq!(made, wanted, "SEED={seed}");
    }
}
