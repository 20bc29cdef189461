//! Tests of the texts of conditions.

use super::*;
use crate::record::Durability;

fn one(conditions: &Conditions) -> block::Condition {
    let list = conditions.list();
    assert_eq!(list.len(), 1, "{list:?}");
    list.into_iter().next().expect("one")
}

#[test]
fn descriptor_limit_below_the_configured_need_is_a_condition() {
    let conditions = Conditions::default();
    show_descriptors(&conditions, Some(1024), 1000, 32);
    assert_eq!(one(&conditions).kind, ConditionKind::DescriptorLimit);
    let report = one(&conditions).report;
    assert!(report.what.contains("1024") && report.remedy.contains("2320"), "{report:?}");
    for enough in [Some(2320), None] {
        show_descriptors(&conditions, Some(1024), 1000, 32);
        show_descriptors(&conditions, enough, 1000, 32);
        assert_eq!(conditions.list(), []);
    }
}

#[test]
fn unproven_tail_is_a_condition_until_the_next_opening() {
    let conditions = Conditions::default();
    let lost = wal::Recovery {
        lost_reason: Some("the kernel was started since".to_owned()),
        ..wal::Recovery::default()
    };
    show_recovery(&conditions, &lost);
    assert_eq!(one(&conditions).kind, ConditionKind::LogTailUnproven);
    let what = one(&conditions).report.what;
    assert!(what.contains("the kernel was started since"), "{what}");
    show_recovery(&conditions, &wal::Recovery { is_tail_proven: true, ..lost });
    assert_eq!(conditions.list(), []);
}

#[test]
fn log_that_the_pool_went_on_without_is_a_condition_while_it_has_writes() {
    let conditions = Conditions::default();
    let of = |entry_count| {
        let contents = wal::LogContents { entry_count, payload_bytes: 4096, ..Default::default() };
        let summary = wal::LogSummary {
            epoch: block::Epoch(3),
            contents,
            is_in_store: false,
            spill_file_count: 0,
            spill_bytes: 0,
        };
        SupersededLog { dir: "/pool/log.superseded-3".into(), summary }
    };
    show_superseded(&conditions, &[of(0)]);
    assert_eq!(conditions.list(), []);
    show_superseded(&conditions, &[of(7)]);
    assert_eq!(one(&conditions).kind, ConditionKind::LogSuperseded);
    let report = one(&conditions).report;
    assert!(report.what.contains("/pool/log.superseded-3, which holds up to 7"), "{report:?}");
}

#[test]
fn unreadable_parts_of_the_log_are_a_condition() {
    let conditions = Conditions::default();
    let place =
        |offset| wal::UnreadablePlace { file: "ring-00003.log".to_owned(), offset, len: 4096 };
    let spotted = wal::Recovery {
        is_tail_proven: true,
        unreadable: vec![place(8192), place(40960)],
        ..wal::Recovery::default()
    };
    show_recovery(&conditions, &spotted);
    assert_eq!(one(&conditions).kind, ConditionKind::LogUnreadable);
    let what = one(&conditions).report.what;
    assert!(
        what.contains("8192 bytes") && what.contains("ring-00003.log at offset 8192"),
        "{what}"
    );
    show_recovery(&conditions, &wal::Recovery { unreadable: Vec::new(), ..spotted });
    assert_eq!(conditions.list(), []);
}

#[test]
fn a_volume_without_its_dedicated_key_is_a_condition_under_its_present_name() {
    let conditions = Conditions::default();
    let mut record = VolumeRecord::new(1, "own", 1 << 20, Durability::Flush, 0);
    show_record(&conditions, &record, true);
    assert_eq!(conditions.list(), []);
    show_record(&conditions, &record, false);
    assert_eq!(
        (one(&conditions).kind, &*one(&conditions).subject),
        (ConditionKind::KeyMissing, "own")
    );
    forget_volume(&conditions, "own");
    record.name = "other".to_owned();
    show_record(&conditions, &record, false);
    assert_eq!(one(&conditions).subject, "other");
    record.state = VolumeState::Purged;
    show_record(&conditions, &record, false);
    assert_eq!(conditions.list(), []);
}

#[test]
fn condition_of_lost_writes_names_the_remedy() {
    let conditions = Conditions::default();
    let mut record = VolumeRecord::new(1, "db", 1 << 20, Durability::Flush, 0);
    record.has_lost_writes = true;
    show_record(&conditions, &record, true);
    assert_eq!(one(&conditions).kind, ConditionKind::WritesLost);
    assert!(one(&conditions).report.remedy.contains("spindle volume accept-loss db"));
}

#[test]
fn condition_texts_end_without_a_full_stop() {
    let conditions = Conditions::default();
    show_descriptors(&conditions, Some(1), 256, 32);
    show_recovery(&conditions, &wal::Recovery::default());
    show_recovery_key(&conditions, false);
    show_stopped(&conditions, "another owner has it");
    show_contact(&conditions, Some("no route"));
    let list = conditions.list();
    assert_eq!(list.len(), 5);
    for condition in list {
        let block::conditions::Report { what, cost, remedy } = &condition.report;
        for text in [what, cost, remedy] {
            assert!(!text.is_empty() && !text.ends_with('.'), "{condition:?}");
        }
    }
}
