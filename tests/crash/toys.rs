//! The crash tester against servers that are broken on purpose: it finds each fault, and none in a
//! correct server.
//!
//! Invariants:
//! - The number of rounds within which each fault must be found is stated beside it. It is several
//!   times the number that 20 runs with different seeds needed.

use std::time::Duration;
use tests::seed::seeds;
use tests::torture::toy::{Fault, Toy};
use tests::torture::{Plan, Totals, VolumePlan, torture};

fn run(fault: Fault, seed: u64, round_count: u64) -> Result<Totals, String> {
    println!("SEED={seed}");
    const BYTES: usize = 4 << 20;
    let volume = |number: usize| VolumePlan {
        name: format!("v{number}"),
        start_sector: 0,
        sector_count: BYTES / 512,
    };
    let plan = Plan {
        seed,
        round_count,
        round: Duration::from_millis(60),
        time: Duration::from_secs(120),
        volumes: (0..2).map(volume).collect(),
        fail_points: Vec::new(),
        fail_point_percent: 0,
        fail_point_time: Duration::ZERO,
        fail_point_nth_max: 1,
        has_states: false,
        pattern_percent: 0,
    };
    torture(&mut Toy::new(fault, seed, 2, BYTES), &plan)
}

fn must_be_found(fault: Fault, round_count: u64) {
    for seed in seeds(1) {
        match run(fault, seed, round_count) {
            Err(found) => println!("{found}"),
            Ok(totals) => panic!("SEED={seed}: {fault:?} was not found: {totals:?}"),
        }
    }
}

#[test]
fn a_server_that_keeps_its_promises_passes() {
    for seed in seeds(1) {
        let totals = run(Fault::None, seed, 60).unwrap_or_else(|found| panic!("{found}"));
        println!("{totals:?}");
        assert!(totals.acknowledged_count > 1000, "too few requests to prove anything: {totals:?}");
    }
}

#[test]
fn a_write_acknowledged_early_is_found_within_30_rounds() {
    must_be_found(Fault::AcknowledgeEarly, 30);
}

#[test]
fn a_lost_trim_is_found_within_20_rounds() {
    must_be_found(Fault::TrimLost, 20);
}

#[test]
fn a_rounded_write_zeroes_is_found_within_10_rounds() {
    must_be_found(Fault::ZeroRounded, 10);
}

#[test]
fn a_dropped_write_is_found_within_20_rounds() {
    must_be_found(Fault::WriteDropped, 20);
}

#[test]
fn a_torn_write_is_found_within_20_rounds() {
    must_be_found(Fault::WriteTorn, 20);
}

#[test]
fn a_stale_sector_is_found_within_400_rounds() {
    must_be_found(Fault::StaleSector, 400);
}

#[test]
fn a_misdirected_write_is_found_within_20_rounds() {
    must_be_found(Fault::Misdirected, 20);
}

#[test]
fn a_write_that_comes_back_later_is_found_within_100_rounds() {
    must_be_found(Fault::LateWrite, 100);
}

#[test]
fn an_ignored_flush_is_found_within_40_rounds() {
    must_be_found(Fault::FlushIgnored, 40);
}

#[test]
fn a_read_behind_a_write_is_found_within_20_rounds() {
    must_be_found(Fault::ReadBehind, 20);
}
