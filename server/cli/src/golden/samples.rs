//! Fixed replies for the golden tests, by noun.

use super::nodes::data_nodes;
use super::{Case, case, done, reply, serving};
use crate::print;
use api::Reply;
use api::config::{ConfigInfo, ConfigRow, ExampleInfo, OptionInfo, VersionInfo};
use api::copy::{CopyInfo, RecoveryPointInfo};
use api::demo::{DemoInfo, DemoNodeInfo, FailOverInfo, LatencyInfo};
use api::device::{AttachOptions, AttachmentInfo, ClientInfo, Driver, RemoteDeviceInfo};
use api::drill::{DrillInfo, DrillMove};
use api::key::{KeySlotInfo, Secret, SlotKind};
use api::node::NodeStatus;
use api::pool::{FsckInfo, PoolPurged, PoolRemoved, PoolRestored};
use api::restore::{PoolFromCopy, RestoreInfo};
use api::scrub::{BadSegmentInfo, ScrubInfo};
use api::snapshot::{DiffExtent, DiffInfo, Keep, ScheduleInfo, ScheduledInfo, SnapshotInfo};
use api::status::{
    AtRisk, CacheInfo, ConditionCount, ConditionInfo, DataStoreInfo, DataStoresInfo, DestageInfo,
    LogInfo, NbdInfo, RedundancyInfo, SpaceInfo, StalledInfo, StatusInfo, SurvivalInfo, TierInfo,
};
use api::volume::{DedupInfo, Durability, RecoveredInfo, VolumeInfo};
use std::collections::BTreeMap;
use std::path::Path;

type Cases = Vec<(&'static str, Vec<Case>)>;

const POOL: &str = "11112222-3333-4444-5555-666677778888";
const COPY: &str = "s3://far/copy";

fn fail_over(lost_writes: u64) -> FailOverInfo {
    let node = |name: &str, process| DemoNodeInfo {
        name: name.to_owned(),
        dir: Path::new("/d").join(name),
        endpoint: format!("nbd://127.0.0.1:1080{process}/demo"),
        process,
    };
    FailOverInfo {
        dir: "/d".into(),
        volume: "demo".to_owned(),
        nodes: vec![node("a", 1), node("b", 2), node("c", 3)],
        owner_before: "a".to_owned(),
        owner_after: "c".to_owned(),
        client_node: "b".to_owned(),
        acknowledged_writes: 12_345,
        unanswered_writes: 16,
        pause_ms: 1530,
        lost_writes,
        wrong_reads: 0,
        is_verified: lost_writes == 0,
        missed_batches: 812,
        catch_up_ms: 420,
    }
}

/// A fixed moment, some seconds later than 2026-01-02 03:04:05 UTC.
pub(super) fn moment(seconds: u64) -> u64 {
    1_767_323_045 + seconds
}

fn volume() -> VolumeInfo {
    VolumeInfo {
        id: 7,
        name: "db".to_owned(),
        size_bytes: 100 << 30,
        created_at: moment(0),
        ..VolumeInfo::default()
    }
}

fn shown(info: VolumeInfo) -> Reply {
    Reply::Volume(info)
}

/// A volume of which every field is set.
fn eventful() -> VolumeInfo {
    VolumeInfo {
        durability: Durability::Write,
        is_read_only: true,
        has_lost_writes: true,
        is_stalled: true,
        is_closed: true,
        origin: Some("main@monday".to_owned()),
        promoted_bytes: Some(25 << 30),
        expires_at: Some(moment(28_800)),
        dedicated_key: Some(5),
        dedup: Some(DedupInfo { is_on: true, block_count: 30, duplicate_count: 10, ratio: 1.5 }),
        warning: Some("could not resize device /dev/ublkb0".to_owned()),
        ..volume()
    }
}

fn removed() -> VolumeInfo {
    VolumeInfo { removed_at: Some(moment(60)), purge_at: Some(moment(604_860)), ..volume() }
}

pub(super) fn about_volumes() -> Cases {
    let cloned = VolumeInfo {
        id: 9,
        name: "test".to_owned(),
        origin: Some("db@monday".to_owned()),
        expires_at: Some(moment(28_800)),
        ..volume()
    };
    vec![
        (
            "volume-create",
            vec![
                reply(
                    "spindle volume create db-old --from-superseded db --log /old/log",
                    Reply::Recovered(recovered()),
                ),
                reply("spindle volume create db 100G --dir /d", shown(volume())),
                reply(
                    "spindle volume create db 100G --durability store --dedicated-key --dedup",
                    shown(VolumeInfo {
                        durability: Durability::Store,
                        dedicated_key: Some(7),
                        dedup: Some(DedupInfo { is_on: true, ..DedupInfo::default() }),
                        ..volume()
                    }),
                ),
            ],
        ),
        (
            "volume-list",
            vec![
                reply("spindle volume list", Reply::Volumes { volumes: Vec::new() }),
                reply(
                    "spindle volume list",
                    Reply::Volumes { volumes: vec![volume(), eventful(), removed()] },
                ),
            ],
        ),
        ("volume-show", vec![reply("spindle volume show db", shown(eventful()))]),
        (
            "volume-resize",
            vec![
                reply("spindle volume resize db 100G", shown(volume())),
                reply("spindle volume resize db 50G --shrink", shown(eventful())),
            ],
        ),
        (
            "volume-set",
            vec![
                reply("spindle volume set db --durability flush", shown(volume())),
                reply("spindle volume set db --read-only true --dedup false", shown(eventful())),
            ],
        ),
        (
            "volume-rm",
            vec![
                reply("spindle volume rm db", shown(removed())),
                reply(
                    "spindle volume rm db --now",
                    shown(VolumeInfo { removed_at: Some(moment(60)), ..volume() }),
                ),
                done("spindle volume rm db --erase", "volume db is erased: its key is destroyed"),
            ],
        ),
        ("volume-restore", vec![reply("spindle volume restore db", shown(volume()))]),
        ("volume-rename", vec![reply("spindle volume rename old db", shown(volume()))]),
        ("volume-promote", vec![reply("spindle volume promote test", shown(cloned.clone()))]),
        (
            "volume-accept-loss",
            vec![
                reply("spindle volume accept-loss db", shown(volume())),
                reply("spindle volume accept-loss db --discard-local-writes", shown(volume())),
            ],
        ),
        ("clone", vec![reply("spindle clone db@monday test --ttl 8h", shown(cloned))]),
    ]
}

fn snapshot(name: &str, is_in_store: bool, held_bytes: Option<u64>) -> SnapshotInfo {
    SnapshotInfo {
        volume: "db".to_owned(),
        name: name.to_owned(),
        lsn: 4711,
        size_bytes: 100 << 30,
        created_at: moment(0),
        is_in_store,
        held_bytes,
    }
}

pub(super) fn about_snapshots() -> Cases {
    let snapshots = |snapshots: Vec<SnapshotInfo>| Reply::Snapshots { snapshots };
    let (one, other) = (snapshot("monday", true, None), snapshot("tuesday", false, None));
    let extents = vec![
        DiffExtent { offset: 4096, length: 65_536, is_hole: false },
        DiffExtent { offset: 1 << 30, length: 4096, is_hole: true },
    ];
    let planned = |name: &str, kept_as: Option<&str>| ScheduledInfo {
        name: name.to_owned(),
        created_at: moment(0),
        kept_as: kept_as.map(str::to_owned),
    };
    let schedule = ScheduleInfo {
        volume: "db".to_owned(),
        cron: Some("@hourly".to_owned()),
        keep: Some(Keep::default()),
        next_at: Some(moment(3600)),
        snapshots: vec![planned("auto-1", Some("daily")), planned("auto-2", None)],
    };
    let none = ScheduleInfo { volume: "db".to_owned(), ..ScheduleInfo::default() };
    vec![
        (
            "snapshot-create",
            vec![
                reply("spindle snapshot create db@tuesday", snapshots(vec![other.clone()])),
                reply("spindle snapshot create db,wal@tuesday", snapshots(vec![other.clone()])),
            ],
        ),
        (
            "snapshot-list",
            vec![
                reply("spindle snapshot list", snapshots(Vec::new())),
                reply("spindle snapshot list db", snapshots(vec![one, other.clone()])),
                reply(
                    "spindle snapshot list db --space",
                    snapshots(vec![snapshot("monday", true, Some(3 << 20)), other]),
                ),
            ],
        ),
        (
            "snapshot-diff",
            vec![
                case("spindle snapshot diff db@a db@b", &DiffInfo::default(), print::diff),
                case(
                    "spindle snapshot diff db@a db@b",
                    &DiffInfo { extents, next_offset: None },
                    print::diff,
                ),
            ],
        ),
        (
            "snapshot-schedule",
            vec![
                reply("spindle snapshot schedule db", Reply::Schedule(none.clone())),
                reply("spindle snapshot schedule db @hourly", Reply::Schedule(schedule.clone())),
                reply(
                    "spindle snapshot schedule db 0+*+*+*+* --hourly 48 --monthly 3",
                    Reply::Schedule(schedule),
                ),
                reply("spindle snapshot schedule db --off", Reply::Schedule(none)),
            ],
        ),
        ("snapshot-rollback", vec![reply("spindle snapshot rollback db@a", shown(volume()))]),
        ("snapshot-rm", vec![done("spindle snapshot rm db@a", "snapshot db@a is removed")]),
    ]
}

fn copy() -> CopyInfo {
    CopyInfo {
        url: COPY.to_owned(),
        interval_seconds: 60,
        created_at: moment(0),
        ..CopyInfo::default()
    }
}

/// A copy of which every field is set.
fn busy_copy() -> CopyInfo {
    CopyInfo {
        env_prefix: Some("DR_".to_owned()),
        is_snapshots_only: true,
        bytes_per_second: Some(50 << 20),
        has_dedicated_key: true,
        volumes: Some(vec!["db".to_owned(), "wal".to_owned()]),
        is_running: true,
        recovery_point: Some(RecoveryPointInfo {
            number: 12,
            as_of: moment(0),
            destaged_lsn: 4711,
            segment_count: 40,
            segment_bytes: 1 << 30,
            stalled_count: 1,
        }),
        lag_seconds: Some(30),
        lag_bytes: 3 << 20,
        has_destroyed_keys: true,
        pass_permille: Some(420),
        copied_bytes: 1 << 30,
        copied_count: 45,
        deleted_count: 2,
        waiting_count: 3,
        damaged_count: 1,
        ..copy()
    }
}

pub(super) fn about_copies() -> Cases {
    let copies = |copies: Vec<CopyInfo>| Reply::Copies { copies };
    let failing = CopyInfo {
        failure: Some("the bucket does not exist".to_owned()),
        failing_seconds: Some(90),
        ..busy_copy()
    };
    let waiting = CopyInfo { pass_permille: None, lag_seconds: Some(0), ..busy_copy() };
    let restored = PoolFromCopy {
        url: COPY.to_owned(),
        recovery_point: 12,
        as_of: moment(0),
        segment_bytes: 1 << 30,
        ..PoolFromCopy::default()
    };
    let restored_in_part = PoolFromCopy {
        stalled_count: 1,
        snapshot: Some("monday".to_owned()),
        without_snapshot: vec!["wal".to_owned()],
        volume_name: Some("db2".to_owned()),
        excluded: ["a", "b", "c", "d", "e", "f"].map(str::to_owned).to_vec(),
        ..restored.clone()
    };
    vec![
        (
            "copy-add",
            vec![
                reply("spindle copy add s3://far/copy", copies(vec![copy()])),
                reply(
                    "spindle copy add s3://far/copy --volume db --volume wal --snapshots-only --rate 50M \
                     --env-prefix DR_ --copy-key-file /k --replace-copy-key",
                    copies(vec![busy_copy()]),
                ),
            ],
        ),
        (
            "copy-list",
            vec![
                reply("spindle copy list", copies(Vec::new())),
                reply("spindle copy list", copies(vec![copy(), busy_copy(), failing, waiting])),
            ],
        ),
        (
            "copy-sync",
            vec![done(
                "spindle copy sync /copy",
                "/copy holds everything up to LSN 4711, as its recovery point 12",
            )],
        ),
        (
            "copy-give-up-missing",
            vec![done("spindle copy give-up-missing", "2 segments are given up")],
        ),
        (
            "copy-open",
            vec![serving(
                "spindle copy open s3://far/copy --nbd 127.0.0.1:0 --key-file /k",
                &["nbd://127.0.0.1:10809/db"],
            )],
        ),
        ("copy-rm", vec![done("spindle copy rm s3://far/copy/", "s3://far/copy is ended")]),
        (
            "restore",
            vec![
                case("spindle restore s3://far/copy --dir /new", &restored, print::restored_copy),
                case(
                    "spindle restore s3://far/copy@monday --dir /new --volume db --as db2 --rate 50M",
                    &restored_in_part,
                    print::restored_copy,
                ),
            ],
        ),
    ]
}

fn status() -> StatusInfo {
    StatusInfo {
        version: "0.1.0".to_owned(),
        pool: POOL.to_owned(),
        name: "main".to_owned(),
        store: "s3://near/pool".to_owned(),
        epoch: 3,
        host: "alpha".to_owned(),
        pid: 4242,
        opened_at: moment(0),
        is_offline: true,
        memory_bytes_max: 1 << 30,
        key_slots: vec![KeySlotInfo { kind: SlotKind::KeyFile, created_at: moment(0) }],
        ..StatusInfo::default()
    }
}

/// The state of a pool that is served and to which everything has happened.
fn eventful_status() -> StatusInfo {
    let condition = ConditionInfo {
        kind: "pool-stopped".to_owned(),
        subject: "pool".to_owned(),
        what: "disk on fire".to_owned(),
        since: moment(0),
        seconds: 7265,
        cost: "nothing is served".to_owned(),
        remedy: "call the fire brigade".to_owned(),
    };
    let count = ConditionCount { raised_count: 2, lasting_count: 1 };
    StatusInfo {
        is_offline: false,
        endpoints: vec!["nbd://127.0.0.1:10809/db".to_owned()],
        volume_count: 3,
        at_risk: AtRisk { oldest_seconds: 12.34, bytes: 3 << 20 },
        log: LogInfo {
            used_bytes: 1 << 30,
            ring_bytes: 4 << 30,
            last_lsn: 4720,
            durable_lsn: 4715,
            destaged_lsn: 4711,
            failure: Some("write log: input/output error".to_owned()),
        },
        destage: DestageInfo {
            window_count: 12,
            destaged_bytes: 3 << 30,
            stored_bytes: 1 << 30,
            failure_count: 1,
            failure: Some("no space".to_owned()),
            stalled: vec![StalledInfo {
                volume: 7,
                name: "db".to_owned(),
                since_lsn: 4000,
                log_bytes: 1 << 20,
                spill_bytes: 2 << 20,
                spill_file_count: 2,
                is_refusing_writes: true,
                is_closed: true,
                reason: "segment 17 cannot be read".to_owned(),
            }],
        },
        tier: TierInfo {
            commit_number: 280,
            range_count: 1,
            upload_retry_count: 4,
            upload_failure: Some("timeout".to_owned()),
            read_failure: Some("timeout".to_owned()),
            reopen_count: 1,
            memory_hit_count: 1000,
            cache_hit_count: 200,
            store_frame_count: 30,
            store_refetch_count: 2,
            store_bad_count: 1,
            repaired_count: 1,
        },
        space: SpaceInfo {
            is_known: true,
            segment_count: 40,
            stored_bytes: 3 << 30,
            live_bytes: 2 << 30,
            space_amplification: 1.5,
            reclaimed_bytes: 1 << 30,
            moved_bytes: 1 << 20,
            metadata_bytes: 1 << 20,
            write_amplification: 1.02,
            stuck_count: 1,
            held_count: 2,
        },
        data_stores: Some(DataStoresInfo {
            scheme: "4+2".to_owned(),
            stores: vec![
                DataStoreInfo {
                    url: "/mnt/nvme0/spindle".to_owned(),
                    domain: "drive 0".to_owned(),
                    ..DataStoreInfo::default()
                },
                DataStoreInfo {
                    url: "/mnt/nvme1/spindle".to_owned(),
                    domain: "drive 1".to_owned(),
                    is_leaving: true,
                    is_lost: true,
                    failure: Some("a disk may not be mounted".to_owned()),
                },
            ],
            read_count: 100,
            degraded_read_count: 20,
            hedged_read_count: 3,
            written_bytes: 3 << 20,
            missing_write_count: 4,
            redundancy: Some(RedundancyInfo {
                survivals: vec![
                    SurvivalInfo { losses: None, bytes: 1 << 20 },
                    SurvivalInfo { losses: Some(1), bytes: 1 << 30 },
                    SurvivalInfo { losses: Some(2), bytes: 2 << 30 },
                ],
                lacking_count: 32,
                lacking_bytes: 1 << 30,
            }),
            space: Some(super::doctor::space()),
            rebuild_left_count: 30,
            rebuilt_count: 2,
            rebuilt_bytes: 16 << 20,
            rebuild_failure: Some("no store takes it".to_owned()),
        }),
        dedup: Some(DedupInfo {
            is_on: true,
            block_count: 3000,
            duplicate_count: 1000,
            ratio: 1.5,
        }),
        restored: Some(RestoreInfo {
            url: COPY.to_owned(),
            recovery_point: 12,
            as_of: moment(0),
            is_complete: false,
            left_bytes: 1 << 30,
            done_bytes: 1 << 20,
            left_seconds: Some(600),
            bad_count: 1,
        }),
        nbd: Some(NbdInfo {
            connection_count: 2,
            refused_count: 1,
            request_count: 100_000,
            error_count: 3,
            payload_bytes: 1 << 20,
        }),
        cache: Some(CacheInfo {
            is_on: true,
            frame_count: 5000,
            used_bytes: 1 << 30,
            pending_bytes: 1 << 20,
            insert_count: 6000,
            dropped_count: 5,
            bad_count: 1,
            error_count: 2,
        }),
        node: Some(NodeStatus {
            name: "n1".to_owned(),
            id: "aaaaaaaa-bbbb-8ccc-9ddd-eeeeeeeeeee1".to_owned(),
            cluster: "99998888-7777-8666-9555-444433332222".to_owned(),
            node_count: 3,
            is_admitted: true,
            is_served: true,
        }),
        has_recovery_key: true,
        warnings: vec![condition.line()],
        conditions: vec![condition],
        condition_counts: BTreeMap::from([("pool-stopped".to_owned(), count)]),
        condition_excluded_count: 3,
        ..status()
    }
}

fn scrub() -> ScrubInfo {
    ScrubInfo {
        is_served: true,
        is_running: true,
        started_at: Some(moment(0)),
        permille: 420,
        bytes_per_second: 32 << 20,
        segment_count: 17,
        frame_count: 12_345,
        object_bytes: 1 << 30,
        ..ScrubInfo::default()
    }
}

/// Scrubs, restores, keys and the pool as a whole.
pub(super) fn about_pools() -> Cases {
    let ended = ScrubInfo {
        is_running: false,
        ended_at: Some(moment(600)),
        next_at: Some(moment(2_592_000)),
        permille: 1000,
        every_seconds: Some(2_592_000),
        repaired_count: 2,
        bad_count: 1,
        bad: vec![BadSegmentInfo {
            number: 17,
            object: "segments/17".to_owned(),
            why: "the checksum differs; no copy has it".to_owned(),
        }],
        ..scrub()
    };
    let waiting = ScrubInfo {
        failure: Some("the store does not answer".to_owned()),
        failing_seconds: Some(90),
        ..scrub()
    };
    let fine = FsckInfo {
        volume_count: 3,
        segment_count: 40,
        object_bytes: 1 << 30,
        frame_count: 12_345,
        page_count: 17,
        block_count: 100_000,
        ..FsckInfo::default()
    };
    let bad = FsckInfo {
        reclaimed_count: 1,
        problem_count: 3,
        problems: vec!["segment 17: the count of live blocks is 3, not 2".to_owned()],
        miscounted: vec![17],
        ..fine.clone()
    };
    let gone = PoolRemoved {
        name: "main".to_owned(),
        pool: POOL.to_owned(),
        removed_at: moment(0),
        purge_at: moment(604_800),
    };
    let back = PoolRestored { name: "main".to_owned(), pool: POOL.to_owned(), volume_count: 3 };
    let purged = PoolPurged {
        name: "main".to_owned(),
        pool: POOL.to_owned(),
        object_count: 45,
        object_bytes: 1 << 30,
    };
    let purged_text = |purged: &PoolPurged| print::pool_purged(purged, Path::new("/d"));
    let rotated = Reply::KeyRotated {
        kind: SlotKind::Passphrase,
        message: "the passphrase opens the pool now".to_owned(),
    };
    let recovery = Reply::RecoveryKey { key: Secret::new("SPINDLE-RECOVERY-1-ABCD".to_owned()) };
    vec![
        (
            "scrub-start",
            vec![
                reply("spindle scrub start", Reply::Scrub(scrub())),
                reply("spindle scrub start --rate 50M --every 30d", Reply::Scrub(ended.clone())),
            ],
        ),
        ("scrub-stop", vec![done("spindle scrub stop", "the scrub is stopped")]),
        (
            "scrub-status",
            vec![
                reply("spindle scrub status", Reply::Scrub(ScrubInfo::default())),
                reply("spindle scrub status", Reply::Scrub(ended)),
                reply("spindle scrub status", Reply::Scrub(waiting)),
                reply(
                    "spindle scrub status",
                    Reply::Scrub(ScrubInfo { is_served: false, ..scrub() }),
                ),
                reply(
                    "spindle scrub status",
                    Reply::Scrub(ScrubInfo { is_running: false, is_stopped: true, ..scrub() }),
                ),
            ],
        ),
        (
            "status",
            vec![
                reply("spindle status", Reply::Status(Box::new(status()))),
                reply("spindle status", Reply::Status(Box::new(eventful_status()))),
            ],
        ),
        ("drain", vec![done("spindle drain", "the store holds everything up to LSN 4711")]),
        ("stop", vec![done("spindle stop", "stopping")]),
        (
            "fsck",
            vec![
                case("spindle fsck", &fine, print::fsck),
                case("spindle fsck --repair-counts", &bad, print::fsck),
                case("spindle fsck --copy s3://far/copy --env-prefix DR_", &fine, print::fsck),
            ],
        ),
        ("pool-rm", vec![case("spindle pool rm", &gone, print::pool_removed)]),
        ("pool-restore", vec![case("spindle pool restore", &back, print::pool_restored)]),
        ("pool-purge", vec![case("spindle pool purge --now", &purged, purged_text)]),
        ("key-backup", vec![reply("spindle key backup --replace", recovery)]),
        ("key-rotate", vec![reply("spindle key rotate --new-passphrase-env P", rotated)]),
    ]
}

fn recovered() -> RecoveredInfo {
    RecoveredInfo {
        name: "db-old".to_owned(),
        size_bytes: 100 << 30,
        of: "db".to_owned(),
        log: "/old/log".into(),
        base: "superseded-7-12345-3".to_owned(),
        entry_count: 150,
        written_bytes: 3 << 20,
        warning: Some("its 2 spill files, with 4096 bytes, were not read".to_owned()),
    }
}

fn drill() -> DrillInfo {
    let one = |from: &str, to: &str, pause_ms| DrillMove {
        from: from.to_owned(),
        to: to.to_owned(),
        pause_ms,
    };
    let moves =
        vec![one("a", "b", 212), one("b", "a", 198), one("a", "c", 240), one("c", "a", 205)];
    DrillInfo::new("a".to_owned(), moves, 1000)
}

pub(super) fn about_devices() -> Cases {
    let options = AttachOptions {
        driver: Driver::Ublk,
        queue_count: 4,
        queue_depth: 64,
        logical_block_bytes: 4096,
        is_shared: false,
        dead_timeout_seconds: 0,
    };
    let attached = AttachmentInfo {
        volume: "db".to_owned(),
        device: Some("/dev/ublkb0".into()),
        link: "/dev/spindle/main/db".into(),
        options,
        is_in_use: true,
        read_count: 1000,
        write_count: 200,
        flush_count: 30,
        discard_count: 4,
        read_bytes: 1 << 30,
        written_bytes: 1 << 20,
        failure_count: 0,
        failure: None,
    };
    let over_nbd = AttachmentInfo {
        volume: "wal".to_owned(),
        device: None,
        options: AttachOptions {
            driver: Driver::Nbd,
            queue_count: 1,
            queue_depth: 128,
            is_shared: true,
            dead_timeout_seconds: 86_400,
            ..options
        },
        failure: Some("the volume is not served".to_owned()),
        ..attached.clone()
    };
    let client = ClientInfo {
        volume: "db".to_owned(),
        label: "far-away".to_owned(),
        is_shared: true,
        connection_count: 2,
        attached_at: moment(0),
    };
    let elsewhere = |device: &str, address: Option<&str>, is_served| RemoteDeviceInfo {
        device: device.into(),
        addresses: vec!["nbd://far/db".to_owned(), "nbd://farther/db".to_owned()],
        address: address.map(str::to_owned),
        is_served,
    };
    let elsewhere = vec![
        elsewhere("/dev/nbd0", Some("nbd://farther/db"), Some(true)),
        elsewhere("/dev/nbd1", None, Some(false)),
        RemoteDeviceInfo {
            addresses: vec!["nbd://far/db".to_owned()],
            ..elsewhere("/dev/nbd2", Some("nbd://far/db"), None)
        },
    ];
    let remote = |devices| Reply::RemoteDevices { devices };
    let list = |attachments, clients| Reply::Attachments { attachments, clients };
    vec![
        (
            "attach",
            vec![
                reply("spindle attach db", Reply::Attached(attached.clone())),
                reply(
                    "spindle attach db --queues 2 --depth 32 --logical-block 512 --shared",
                    Reply::Attached(attached.clone()),
                ),
                reply(
                    "spindle attach wal --nbd --connections 2 --dead-timeout 1h",
                    Reply::Attached(over_nbd.clone()),
                ),
                reply("spindle attach list", list(Vec::new(), Vec::new())),
                reply("spindle attach list", list(vec![attached, over_nbd], vec![client])),
                serving("spindle attach nbd://far/db --nbd", &["/dev/nbd0", "/dev/spindle/far/db"]),
                reply("spindle attach list --nbd", remote(Vec::new())),
                reply("spindle attach list --nbd", remote(elsewhere)),
                done("spindle attach --cleanup", "removed 2 devices"),
            ],
        ),
        ("detach", vec![done("spindle detach db --force", "volume db is detached")]),
    ]
}

pub(super) fn about_the_program() -> Cases {
    let latency = |what: &str, median_us: f64, p99_us: f64| LatencyInfo {
        what: what.to_owned(),
        median_us,
        p99_us,
    };
    let demo = DemoInfo {
        dir: "/d".into(),
        volume: "demo".to_owned(),
        endpoints: vec!["nbd://127.0.0.1:10809/demo".to_owned()],
        written_mib: 64,
        write_seconds: 0.25,
        restart_seconds: 0.5,
        is_verified: true,
        latencies: vec![latency("write", 30.4, 99.6), latency("read", 20.0, 40.0)],
    };
    let row = |key: &str, value: Option<&str>, origin: &str| ConfigRow {
        key: key.to_owned(),
        value: value.map(str::to_owned),
        origin: origin.to_owned(),
    };
    let config = ConfigInfo {
        options: vec![
            row("dir", Some("\"/d\""), "flag --dir"),
            row("memory", Some("\"1GiB\""), "default"),
            row("tls.cert", None, "default"),
        ],
    };
    let example = ExampleInfo {
        text: "# Directory of the pool.\ndir = \"/d\"\n".to_owned(),
        options: vec![OptionInfo {
            key: "dir".to_owned(),
            kind: "path".to_owned(),
            range: "a local directory".to_owned(),
            default: "(none: required)".to_owned(),
            example: "\"/d\"".to_owned(),
            about: "Directory of the pool.".to_owned(),
        }],
    };
    let version = VersionInfo {
        version: "0.1.0".to_owned(),
        formats: vec![("write log".to_owned(), 2), ("manifest".to_owned(), 1)],
    };
    vec![
        (
            "serve",
            vec![serving(
                "spindle serve --dir /d --volume db=100G",
                &["nbd://127.0.0.1:10809/db", "nbd+unix:///db?socket=/d/nbd.sock"],
            )],
        ),
        ("drill-fail-over", vec![case("spindle drill fail-over", &drill(), print::drill)]),
        (
            "demo",
            vec![
                case("spindle demo --exit", &demo, print::demo),
                case("spindle demo --nodes 3 --exit", &fail_over(0), print::fail_over),
                case("spindle demo --nodes 3 --exit", &fail_over(2), print::fail_over),
                case(
                    "spindle demo --dnodes 6 --scheme 4+2 --exit",
                    &data_nodes(0),
                    print::data_nodes,
                ),
                case("spindle demo --dnodes 6 --exit", &data_nodes(1), print::data_nodes),
            ],
        ),
        ("config-show", vec![case("spindle config show --dir /d", &config, print::config)]),
        ("config-example", vec![case("spindle config example", &example, print::example)]),
        ("version", vec![case("spindle version", &version, print::version)]),
    ]
}
