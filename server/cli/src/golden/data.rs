//! Fixed replies of the golden tests about data stores.

use super::{Case, done, reply};
use api::Reply;
use api::status::{
    ANY_LOSS, DataStoreInfo, DataStoresInfo, RebalanceInfo, RebuildCheckInfo, RedundancyInfo,
    SurvivalInfo, TiersInfo,
};

pub(super) fn about_data() -> Vec<(&'static str, Vec<Case>)> {
    vec![
        (
            "data-list",
            vec![
                reply("spindle data list", Reply::DataStores(Box::new(changing()))),
                reply("spindle data list", Reply::DataStores(Box::new(closed()))),
                reply("spindle data list", Reply::DataStores(Box::new(balanced()))),
                reply("spindle data list", Reply::DataStores(Box::new(in_a_group()))),
            ],
        ),
        (
            "data-drain",
            vec![done(
                "spindle data drain /mnt/nvme0/spindle d3",
                "the fragments move to other data stores; `spindle data list` shows what is left",
            )],
        ),
        (
            "data-undrain",
            vec![done(
                "spindle data undrain spindle://d3/nvme0",
                "new fragments go there again; `spindle data rebalance` moves others back",
            )],
        ),
        (
            "data-replace",
            vec![
                done(
                    "spindle data replace spindle://d3/nvme0 spindle://d4/nvme0",
                    "the fragments of spindle://d3/nvme0 move to spindle://d4/nvme0 and other data stores; name \
                     spindle://d4/nvme0 in place of spindle://d3/nvme0 in `data.stores` of every node that may own the pool",
                ),
                done(
                    "spindle data replace /mnt/nvme0 s3://far/pool --domain far --weight 2 --env-prefix FAR_",
                    "the fragments of /mnt/nvme0 move to s3://far/pool and other data stores; name s3://far/pool in place \
                     of /mnt/nvme0 in `data.stores` of every node that may own the pool",
                ),
            ],
        ),
        (
            "data-rebalance",
            vec![
                done(
                    "spindle data rebalance",
                    "fragments move to the data stores that would get them now; `spindle data list` shows how far this is",
                ),
                done("spindle data rebalance --stop", "no further fragments move"),
            ],
        ),
    ]
}

fn store(name: &str, fragment_count: u64) -> DataStoreInfo {
    DataStoreInfo {
        url: format!("spindle://{name}/nvme0"),
        domain: format!("spindle://{name}"),
        weight: 1,
        fragment_count: Some(fragment_count),
        fragment_bytes: Some(fragment_count << 20),
        ..DataStoreInfo::default()
    }
}

/// A store that has told its room.
fn roomy(total_bytes: u64, free_bytes: u64, store: DataStoreInfo) -> DataStoreInfo {
    DataStoreInfo { total_bytes: Some(total_bytes), free_bytes: Some(free_bytes), ..store }
}

fn changing() -> DataStoresInfo {
    let failure = Some("no answer in 20 s".to_owned());
    let is_draining = true;
    DataStoresInfo {
        scheme: "2+1".to_owned(),
        stores: vec![
            roomy(3 << 40, 1 << 40, store("d1", 1200)),
            DataStoreInfo { is_draining, failure: failure.clone(), ..store("d2", 700) },
            DataStoreInfo { is_draining, is_empty: true, ..store("d3", 0) },
            roomy(
                1 << 40,
                20 << 30,
                DataStoreInfo { is_added: true, weight: 2, ..store("d4", 100) },
            ),
            DataStoreInfo { is_leaving: true, failure, ..store("d5", 3) },
        ],
        rebalance: Some(RebalanceInfo {
            is_running: true,
            segment_count: 2000,
            misplaced_count: 600,
            left_count: 500,
            waiting_count: 7,
            moved_count: 110,
            moved_bytes: 110 << 20,
            left_seconds: Some(300),
            failure: Some("rebalance segment 17: the store does not answer".to_owned()),
        }),
        ..DataStoresInfo::default()
    }
}

/// Without a daemon nothing is counted.
fn closed() -> DataStoresInfo {
    let uncounted = |store| DataStoreInfo { fragment_count: None, fragment_bytes: None, ..store };
    let rebalance = RebalanceInfo { is_running: true, ..RebalanceInfo::default() };
    DataStoresInfo {
        scheme: "2+1".to_owned(),
        stores: vec![uncounted(store("d1", 0)), uncounted(store("d2", 0))],
        rebalance: Some(rebalance),
        ..DataStoresInfo::default()
    }
}

fn balanced() -> DataStoresInfo {
    let rebalance =
        RebalanceInfo { moved_count: 9, moved_bytes: 9 << 20, ..RebalanceInfo::default() };
    DataStoresInfo {
        scheme: "1+1".to_owned(),
        stores: vec![store("d1", 9), store("d2", 9), store("d3", 9)],
        rebalance: Some(rebalance),
        ..DataStoresInfo::default()
    }
}

fn in_a_group() -> DataStoresInfo {
    let group = Some("nvme".to_owned());
    let is_added = true;
    DataStoresInfo {
        scheme: "1+1".to_owned(),
        group: group.clone(),
        stores: vec![
            DataStoreInfo { group: group.clone(), is_added, ..store("d1", 9) },
            DataStoreInfo {
                group,
                domain: "rack-a".to_owned(),
                is_added,
                is_draining: true,
                is_empty: true,
                ..store("d2", 0)
            },
            store("d3", 9),
        ],
        ..DataStoresInfo::default()
    }
}

/// Those of `status`.
pub(super) fn in_status() -> DataStoresInfo {
    DataStoresInfo {
        scheme: "4+2".to_owned(),
        group: None,
        stores: vec![
            DataStoreInfo {
                url: "/mnt/nvme0/spindle".to_owned(),
                domain: "drive 0".to_owned(),
                weight: 1,
                is_draining: true,
                fragment_count: Some(7),
                fragment_bytes: Some(7 << 20),
                total_bytes: Some(2 << 40),
                free_bytes: Some(1 << 40),
                ..DataStoreInfo::default()
            },
            DataStoreInfo {
                url: "/mnt/nvme1/spindle".to_owned(),
                domain: "drive 1".to_owned(),
                weight: 2,
                is_leaving: true,
                is_lost: true,
                failure: Some("a disk may not be mounted".to_owned()),
                ..DataStoreInfo::default()
            },
        ],
        space: Some(super::doctor::space()),
        read_count: 100,
        degraded_read_count: 20,
        hedged_read_count: 3,
        hedged_write_count: 5,
        object_read_count: 5,
        written_bytes: 3 << 20,
        missing_write_count: 4,
        redundancy: Some(RedundancyInfo {
            survivals: vec![
                SurvivalInfo { losses: None, bytes: 1 << 20 },
                SurvivalInfo { losses: Some(1), bytes: 1 << 30 },
                SurvivalInfo { losses: Some(2), bytes: 2 << 30 },
                SurvivalInfo { losses: Some(ANY_LOSS), bytes: 1 << 30 },
            ],
            lacking_count: 32,
            lacking_bytes: 1 << 30,
        }),
        rebuild_left_count: 30,
        rebuild_left_seconds: Some(90),
        rebuilt_count: 2,
        rebuilt_bytes: 16 << 20,
        rebuild_failure: Some("no store takes it".to_owned()),
        rebuild_check: Some(RebuildCheckInfo {
            is_whole: false,
            store_count: 7,
            listed_count: 7,
            segment_count: 40,
            verified_count: 1,
            found_count: 2,
            left_seconds: Some(7),
        }),
        rebalance: Some(RebalanceInfo {
            is_running: true,
            segment_count: 40,
            misplaced_count: 30,
            left_count: 20,
            moved_count: 12,
            moved_bytes: 12 << 20,
            left_seconds: Some(40),
            ..RebalanceInfo::default()
        }),
        tiers: Some(TiersInfo {
            tiers: "both".to_owned(),
            cold_after_seconds: 7 * 86_400,
            to_copy_count: 40,
            to_copy_bytes: 640 << 20,
            to_drop_count: 3,
            to_drop_bytes: 48 << 20,
            to_bring_back_count: 1,
            to_bring_back_bytes: 16 << 20,
            copied_count: 250,
            copied_bytes: 1 << 30,
            dropped_count: 2,
            dropped_bytes: 32 << 20,
            brought_back_count: 1,
            brought_back_bytes: 16 << 20,
            rewritten_count: 1,
            is_short: true,
            failure: Some("write the object of segment 17: the store does not answer".to_owned()),
        }),
    }
}
