//! Seeded bugs: the loop finds them within the budget of CI, and says how to see them again.

use super::*;
use crate::corpus::from_hex;
use block::units::{crc32c, u32_at};

const BOUND: AllocationBound = AllocationBound { fixed_bytes: 64 << 10, bytes_per_input_byte: 16 };

/// A record: magic, version, count, 16 bytes of contents, and a checksum of all before it.
fn record() -> Vec<u8> {
    let mut bytes = b"RECD\x01\x00\x00\x00\x03\x00\x00\x00sixteen bytes ..".to_vec();
    bytes.extend_from_slice(&crc32c(&bytes).to_le_bytes());
    bytes
}

fn repair(input: &mut [u8]) {
    if let Some(end) = input.len().checked_sub(4) {
        let checksum = crc32c(&input[..end]).to_le_bytes();
        input[end..].copy_from_slice(&checksum);
    }
}

/// Decodes a record. `bug` runs behind every check, with the count.
fn decode(input: &[u8], bug: impl Fn(u32)) -> Outcome {
    let refuse = |why: &str| Outcome::Refused(why.to_owned());
    if !input.starts_with(b"RECD") {
        return refuse("magic");
    }
    let Some(end) = input.len().checked_sub(4).filter(|end| *end >= 28) else {
        return refuse("length");
    };
    if u32_at(input, end) != Some(crc32c(&input[..end])) {
        return refuse("checksum");
    }
    if u32_at(input, 4) != Some(1) {
        return refuse("version");
    }
    bug(u32_at(input, 8).expect("it is long enough"));
    Outcome::Accepted
}

fn run_with(bug: &dyn Fn(u32), seed: u64) -> Result<Run, Box<Failure>> {
    run_for(20_000, bug, seed)
}

fn run_for(execution_count: u64, bug: &dyn Fn(u32), seed: u64) -> Result<Run, Box<Failure>> {
    let target = Target {
        name: "record",
        inputs: vec![record()],
        repair: &|input| repair(input),
        decode: &|input| decode(input, bug),
        execution_count,
        input_bytes_max: 4096,
        allocation: BOUND,
    };
    target.run(seed, Budget::Executions(target.execution_count))
}

#[test]
fn a_decoder_without_a_bug_passes() {
    let run = run_with(&|_| {}, 1).expect("there is no bug");
    assert_eq!(run.executions, 20_000);
    assert!(run.accepted > 1000, "{run:?}");
    assert_eq!(run.outcomes, 5, "every check refuses something, and something passes");
}

#[test]
fn a_panic_on_a_rare_value_behind_a_checksum_is_found_and_repeats() {
    for seed in 1..=20 {
        let bug = |count| assert!(count != 0x7fff_ffff, "seeded bug");
        // One value of four billion, in one of eight places: a few tens of thousands of executions each.
        let run = || run_for(400_000, &bug, seed).expect_err("the seeded bug");
        let failure = run();
        assert!(failure.why.contains("seeded bug"), "{}", failure.why);
        assert_eq!(u32_at(&failure.input, 8), Some(0x7fff_ffff));
        assert_eq!(run(), failure);
    }
}

#[test]
fn a_panic_that_a_task_swallows_is_found() {
    let bug = |count| {
        let _ = catch_unwind(|| assert!(count < 0x1_0000, "seeded bug"));
    };
    let failure = run_with(&bug, 1).expect_err("the seeded bug");
    assert!(failure.why.contains("seeded bug"), "{}", failure.why);
}

#[test]
fn an_allocation_that_a_length_field_decides_is_found() {
    let bug = |count: u32| {
        let rows: Vec<u64> = Vec::with_capacity(count.min(1 << 20) as usize);
        assert!(rows.capacity() < 1 << 21);
    };
    let failure = run_with(&bug, 1).expect_err("the seeded bug");
    assert!(failure.why.contains("the bound is"), "{}", failure.why);
}

#[test]
fn a_report_names_the_seed_and_a_file_with_the_input() {
    let failure = run_with(&|count| assert!(count == 3, "seeded bug"), 7).expect_err("a bug");
    let target = Target {
        name: "record",
        inputs: vec![record()],
        repair: &|input| repair(input),
        decode: &|_| Outcome::Accepted,
        execution_count: 1,
        input_bytes_max: 4096,
        allocation: BOUND,
    };
    let report = target.report(&failure);
    assert!(report.contains("SEED=7") && report.contains("fuzz/corpus/record/"), "{report}");
    let path = target.write(&failure);
    let text = std::fs::read_to_string(&path).expect("it was written");
    assert_eq!(from_hex(&text), failure.input);
    std::fs::remove_file(path).expect("it is there");
}

#[test]
#[should_panic(expected = "no input was accepted")]
fn a_run_that_accepts_nothing_fails() {
    let target = Target {
        name: "record",
        inputs: vec![record()],
        repair: &|_| {},
        decode: &|_| Outcome::Refused("all".to_owned()),
        execution_count: 100,
        input_bytes_max: 4096,
        allocation: BOUND,
    };
    target.check();
}
