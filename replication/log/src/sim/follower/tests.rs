//! Many seeded runs of a member's ring. `SEED=17 cargo test --release -p wal sim::follower` replays
//! one; `SIM_SEEDS=100000` runs more.

use super::{FollowerWorld, Stats};
use crate::seeded_bugs::SeededBugs;
use crate::sim::disk::Faults;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Crashes of one run.
const CRASHES: u64 = 12;
/// Number of seeds within which a seeded bug must be found.
const FOUND_WITHIN: u64 = 400;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

fn run(seed: u64, seeded_bugs: SeededBugs, faults: Faults) -> Result<Stats, String> {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let mut world = FollowerWorld::new(seed, seeded_bugs, faults);
        world.run(CRASHES).map(|()| world.stats)
    }));
    outcome.unwrap_or_else(|_| Err("panicked".into()))
}

fn run_all(faults: Faults, seeds: u64) -> Stats {
    let (from, to) = match number("SEED") {
        Some(seed) => (seed, seed + 1),
        None => (0, number("SIM_SEEDS").unwrap_or(seeds)),
    };
    let mut sum = Stats::default();
    for seed in from..to {
        let stats = run(seed, SeededBugs::default(), faults);
        let stats = stats.unwrap_or_else(|why| panic!("SEED={seed}: {why}"));
        sum.batches += stats.batches;
        sum.crashes += stats.crashes;
        sum.cuts += stats.cuts;
        sum.resets += stats.resets;
        sum.full += stats.full;
        sum.released += stats.released;
        sum.released_by_owner += stats.released_by_owner;
        sum.refused += stats.refused;
        sum.written_again += stats.written_again;
        sum.damaged += stats.damaged;
    }
    println!("{sum:?}");
    sum
}

#[test]
fn a_members_log_is_what_was_written_after_any_crash() {
    let met = run_all(Faults::default(), 1500);
    if number("SEED").is_none() {
        assert!(met.batches > 100_000 && met.crashes > 15_000 && met.damaged > 500);
        assert!(met.cuts > 10_000 && met.resets > 2_000 && met.written_again > 2_000);
        assert!(met.released_by_owner > 500);
        assert!(met.full > 1_000 && met.released > 10_000 && met.refused > 10_000);
    }
}

#[test]
fn failing_writes_and_syncs_end_a_members_process_and_lose_nothing_synced() {
    let faults = Faults { write: 2, sync: 5, create: 20, ..Faults::default() };
    let met = run_all(faults, 800);
    assert!(number("SEED").is_some() || met.damaged > 100);
}

fn finds(name: &str, seeded_bugs: SeededBugs, faults: Faults) {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let fails = |seed| run(seed, seeded_bugs, faults).err().map(|why| (seed, why));
    let found = (0..FOUND_WITHIN).find_map(fails);
    std::panic::set_hook(hook);
    let (seed, why) = found.unwrap_or_else(|| panic!("{name} was not found"));
    println!("{name}: found by seed {seed}: {why}");
}

#[test]
fn seeded_bugs_of_a_members_ring_are_found() {
    let (off, none) = (SeededBugs::default(), Faults::default());
    finds("cut not cleared", SeededBugs { cut_not_cleared: true, ..off }, none);
    finds("reset not cleared", SeededBugs { reset_not_cleared: true, ..off }, none);
    finds("stale batches kept", SeededBugs { stale_kept: true, ..off }, none);
    finds("released early", SeededBugs { released_early: true, ..off }, none);
    finds("file entered at once", SeededBugs { entered_at_once: true, ..off }, none);
    finds("successor not checked", SeededBugs { successor_not_checked: true, ..off }, none);
    finds("flush ignored", SeededBugs { flush_ignored: true, ..off }, none);
    finds("torn batch accepted", SeededBugs { torn_accepted: true, ..off }, none);
    finds("stale wrap accepted", SeededBugs { stale_accepted: true, ..off }, none);
    let failing = Faults { sync: 20, ..none };
    finds("tail not rewritten", SeededBugs { tail_not_rewritten: true, ..off }, failing);
}
