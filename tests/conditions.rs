//! The conditions: the operator's guide lists every kind, and a test raises every kind.
//!
//! Invariants:
//! - The guide's table and the list in `block/src/conditions.rs` name the same kinds, in both
//!   directions.
//! - Each kind has a test that raises it by the same mechanism as in a daemon; the test's file
//!   names the kind.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The test that raises each kind: its file, from the workspace's root, and its name. A kind that
/// depends only on a limit or an age may be raised by a test of its texts.
const RAISED_BY: &[(&str, &str, &str)] = &[
    ("PoolStopped", "server/engine/src/opening/tests.rs", "a_pool_that_stops_is_a_condition"),
    (
        "StoreUnavailable",
        "tests/e2e/conditions.rs",
        "unreachable_store_is_reported_with_its_consequences",
    ),
    ("StoreFull", "tests/e2e/space.rs", "a_full_store_makes_writers_wait_and_loses_nothing"),
    (
        "ObjectUndeletable",
        "tiering/src/tier/tests/store.rs",
        "undeletable_object_delays_nothing_and_is_retried",
    ),
    (
        "DataStoreAway",
        "server/src/data_stores/tests.rs",
        "pool_over_directories_survives_the_loss_of_any_and_one_more_heals",
    ),
    (
        "DataStoresFew",
        "server/src/data_stores/tests.rs",
        "domains_that_have_become_too_few_are_a_condition",
    ),
    (
        "FragmentsLacking",
        "tests/e2e/data_stores.rs",
        "fragments_of_a_drive_that_is_lost_are_made_anew_on_others",
    ),
    (
        "DataStoreSlow",
        "tiering/datanode/src/coded/tests/slow.rs",
        "store_that_stays_slow_is_a_condition_until_it_is_quick_again",
    ),
    (
        "DataStoreFull",
        "tiering/datanode/src/coded/tests/room.rs",
        "store_that_is_nearly_full_is_a_condition_until_it_has_room",
    ),
    (
        "DataStoreWearing",
        "tiering/datanode/src/coded/tests/room.rs",
        "drive_that_wears_out_is_a_condition",
    ),
    (
        "DestageFailing",
        "server/engine/src/pool/tests/stalled.rs",
        "a_spill_file_that_cannot_be_written_leaves_nothing_behind",
    ),
    (
        "VolumeStalled",
        "server/engine/src/pool/tests/stalled.rs",
        "a_volume_that_is_stalled_is_a_condition",
    ),
    (
        "WritesLost",
        "server/engine/src/opening/tests.rs",
        "a_log_that_was_given_up_makes_every_volume_lose_writes",
    ),
    (
        "LogSuperseded",
        "server/engine/src/conditions/tests.rs",
        "log_that_the_pool_went_on_without_is_a_condition_while_it_has_writes",
    ),
    (
        "LogTailUnproven",
        "server/engine/src/conditions/tests.rs",
        "unproven_tail_is_a_condition_until_the_next_opening",
    ),
    ("LogFull", "tests/e2e/conditions.rs", "unreachable_store_is_reported_with_its_consequences"),
    (
        "LogSpace",
        "server/engine/src/opening/tests.rs",
        "a_ring_that_is_larger_than_its_disk_is_a_condition",
    ),
    ("MemberAway", "tests/e2e/fail_over.rs", "missing_members_are_conditions_until_they_are_back"),
    (
        "MemberSlow",
        "server/src/roles/watching.rs",
        "slow_member_is_a_condition_until_it_is_quick_again",
    ),
    ("QuorumLost", "tests/e2e/fail_over.rs", "missing_members_are_conditions_until_they_are_back"),
    (
        "DataAtRisk",
        "tests/e2e/conditions.rs",
        "unreachable_store_is_reported_with_its_consequences",
    ),
    (
        "MetadataReopening",
        "tiering/src/tier/tests/keep.rs",
        "failing_reopening_of_the_database_is_a_condition",
    ),
    (
        "CacheShrunk",
        "tiering/src/cache/tests.rs",
        "full_cache_disk_is_reported_until_the_cache_grows",
    ),
    ("CacheFailing", "tiering/src/cache/tests.rs", "frames_that_do_not_verify_are_a_condition"),
    (
        "NoRecoveryKey",
        "server/src/serve/tests.rs",
        "missing_recovery_key_is_a_condition_until_created",
    ),
    (
        "CopyFailing",
        "tests/e2e/dedicated_keys.rs",
        "unreachable_copy_keeps_the_key_and_shows_in_status",
    ),
    (
        "CopyHoldsErasedKeys",
        "tests/e2e/dedicated_keys.rs",
        "unreachable_copy_keeps_the_key_and_shows_in_status",
    ),
    (
        "RestoreFailing",
        "tests/e2e/copies.rs",
        "restored_pool_reports_a_missing_copy_until_it_returns",
    ),
    (
        "ScrubFailing",
        "server/engine/src/opening/tests.rs",
        "a_scrub_whose_record_cannot_be_read_is_a_condition",
    ),
    ("SegmentsDamaged", "tests/e2e/scrub.rs", "reads_use_copies_and_missing_objects_stay_reported"),
    (
        "ReclaimBlocked",
        "tiering/src/tier/tests/reclaim.rs",
        "segment_with_a_damaged_frame_is_left_alone",
    ),
    (
        "MaintenanceFailing",
        "server/engine/src/destage/upkeep.rs",
        "a_job_that_fails_for_long_is_a_condition_until_it_succeeds",
    ),
    ("JobDied", "server/engine/src/jobs.rs", "only_a_vital_job_ends_the_process_by_panic"),
    (
        "DeviceNotServed",
        "server/devices/src/attachments/tests.rs",
        "an_attached_volume_that_is_not_served_is_a_condition",
    ),
    (
        "DescriptorLimit",
        "server/engine/src/conditions/tests.rs",
        "descriptor_limit_below_the_configured_need_is_a_condition",
    ),
    (
        "ClockJumped",
        "server/engine/src/clock/tests.rs",
        "jumped_clock_is_trusted_after_a_steady_day",
    ),
    (
        "ClientSilent",
        "server/engine/src/reservations/silent.rs",
        "a_client_that_does_not_answer_is_a_condition_until_it_does",
    ),
    (
        "ConnectionsRefused",
        "nbd/tests/server/limits.rs",
        "silent_clients_do_not_keep_others_out_for_long",
    ),
    (
        "LogUnreadable",
        "server/engine/src/conditions/tests.rs",
        "unreadable_parts_of_the_log_are_a_condition",
    ),
    (
        "ObjectMissing",
        "tiering/src/tier/tests/objects.rs",
        "a_missing_object_is_lost_once_that_is_confirmed",
    ),
    (
        "ObjectUnreadable",
        "tiering/src/tier/tests/objects.rs",
        "unreadable_object_is_named_and_affects_nothing_else",
    ),
    (
        "RestoreIncomplete",
        "server/engine/src/restore/incomplete.rs",
        "the_condition_names_objects_and_stays_short",
    ),
    (
        "KeyMissing",
        "server/engine/src/conditions/tests.rs",
        "a_volume_without_its_dedicated_key_is_a_condition_under_its_present_name",
    ),
];

fn read(path: &str) -> String {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in it");
    std::fs::read_to_string(workspace.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the names of the kinds, with their ids.
fn kinds() -> BTreeMap<String, String> {
    let source = read("block/src/conditions.rs");
    let list = source.split("\nkinds! {\n").nth(1).expect("the list is there");
    let list = list.split("\n}\n").next().expect("it has an end");
    let rows = list.lines().filter_map(|line| line.trim().split_once(" = "));
    let kinds: BTreeMap<String, String> =
        rows.map(|(name, id)| (name.to_owned(), id.trim_matches(['"', ',']).to_owned())).collect();
    assert!(kinds.len() > 30, "{kinds:?}");
    kinds
}

#[test]
fn the_guide_lists_every_kind_of_condition_and_no_other() {
    let guide = read("docs/operations.md");
    let section = guide.split("\n## ").find(|part| part.starts_with("Conditions that last"));
    let mut listed = BTreeSet::new();
    for row in section.expect("the section is there").lines().filter(|row| row.starts_with("| `")) {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let [id, meaning, cost, remedy] = cells[..] else { panic!("not four cells: {row}") };
        let is_filled = [meaning, cost, remedy].iter().all(|cell| !cell.is_empty());
        assert!(is_filled, "an empty cell: {row}");
        assert!(listed.insert(id.trim_matches('`').to_owned()), "listed twice: {id}");
    }
    let ids: BTreeSet<String> = kinds().into_values().collect();
    let unlisted: Vec<_> = ids.difference(&listed).collect();
    assert!(unlisted.is_empty(), "the guide does not list {unlisted:?}");
    let unknown: Vec<_> = listed.difference(&ids).collect();
    assert!(unknown.is_empty(), "the guide lists what there is not: {unknown:?}");
}

#[test]
fn a_test_raises_every_kind_of_condition() {
    let kinds = kinds();
    for (name, path, test) in RAISED_BY {
        let id = kinds.get(*name).unwrap_or_else(|| panic!("there is no kind {name}"));
        let source = read(path);
        assert!(source.contains(&format!("fn {test}(")), "{path} has no {test}");
        let is_named = source.contains(&format!("\"{id}\""))
            || source.contains(&format!("ConditionKind::{name}"));
        assert!(is_named, "{path} does not name {name} or {id}");
    }
    let raised: BTreeSet<&str> = RAISED_BY.iter().map(|(name, ..)| *name).collect();
    assert_eq!(raised.len(), RAISED_BY.len(), "a kind has two rows");
    let silent: Vec<_> = kinds.keys().filter(|name| !raised.contains(name.as_str())).collect();
    assert!(silent.is_empty(), "no test raises {silent:?}: add one, and a row");
}
