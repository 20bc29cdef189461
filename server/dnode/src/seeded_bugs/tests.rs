//! Runs the other tests with bugs switched on, and demands that they notice.

use std::process::{Command, Stdio};

/// Each bug, with a test that must fail.
const FOUND_BY: [(&str, &str); 7] = [
    ("fence-unchecked", "tests::later_owner_shuts_an_earlier_one_out_for_good"),
    ("fence-forgotten", "tests::later_owner_shuts_an_earlier_one_out_for_good"),
    ("fence-early", "fence::tests::later_owner_waits_for_changes_under_way"),
    ("proof-unchecked", "tests::opening_needs_a_proof_for_these_two_nodes"),
    ("key-unchecked", "tests::folder_is_served_to_the_key_of_its_pool_only"),
    ("payload-unchecked", "tests::fragment_is_verified_where_it_is"),
    ("drive-unchecked", "tests::unmounted_drive_is_away_and_is_not_written"),
];

fn is_passed(bug: &str, test: &str) -> bool {
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    command.args(["--exact", test]).env("SPINDLE_SEEDED_BUGS", bug);
    let output = command.stderr(Stdio::null()).output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("running 1 test"), "there is no test {test}: {text}");
    output.status.success()
}

#[test]
fn seeded_bugs_are_found() {
    for (bug, test) in FOUND_BY {
        assert!(is_passed("", test), "{test} fails without a bug");
        assert!(!is_passed(bug, test), "{test} does not find {bug}");
    }
}
