//! Runs the other tests with bugs switched on, and demands that they notice.

use std::process::{Command, Stdio};

/// Each bug, with a test that must fail.
const FOUND_BY: [(&str, &str); 3] = [
    (
        "parity-of-another-row",
        "codec::tests::every_pattern_of_losses_gives_the_image_and_the_fragments",
    ),
    ("range-checksum-skipped", "fragment::tests::range_is_verified_without_the_rest"),
    (
        "stale-fragment-accepted",
        "fragment::tests::fragment_of_another_place_or_placement_counts_for_nothing",
    ),
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
