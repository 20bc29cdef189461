//! Fixed replies of the golden tests of the doctor.

use super::samples::moment;
use super::{Case, reply};
use api::Reply;
use api::doctor::{
    AmountInfo, DataRiskInfo, DoctorInfo, DomainInfo, OutlookInfo, StoresGone, SurvivalCount,
    WithoutInfo, Writes,
};
use api::status::{ConditionInfo, DataStoreInfo, TierSpaceInfo};

pub(super) fn about_doctor() -> Vec<(&'static str, Vec<Case>)> {
    let of = |data| {
        let store = "s3://near/pool".to_owned();
        DoctorInfo { store, data, ..DoctorInfo::default() }
    };
    let ill = DoctorInfo { conditions: vec![condition()], ..of(Some(at_risk())) };
    let what_if = "spindle doctor --what-if node=d2 --what-if store=/mnt/nvme1/spindle --what-if domain=rack+3";
    vec![(
        "doctor",
        vec![
            case("spindle doctor", of(None)),
            case("spindle doctor", of(Some(whole()))),
            case("spindle doctor", ill),
            case(what_if, of(Some(DataRiskInfo { without: Some(without()), ..whole() }))),
        ],
    )]
}

fn case(line: &'static str, mut info: DoctorInfo) -> Case {
    info.summary = info.summarize();
    reply(line, Reply::Doctor(Box::new(info)))
}

pub(super) fn space() -> TierSpaceInfo {
    TierSpaceInfo {
        object_count: 3,
        object_bytes: 10 << 20,
        coded_count: 750,
        coded_bytes: 3 << 30,
        copied_count: 250,
        copied_bytes: 1 << 30,
        data_bytes: 3 << 30,
        parity_bytes: 3 << 29,
    }
}

fn amount(segment_count: u64, bytes: u64) -> AmountInfo {
    AmountInfo { segment_count, bytes }
}

fn class(losses: Option<u8>, segment_count: u64, bytes: u64) -> SurvivalCount {
    SurvivalCount { losses, segment_count, bytes }
}

fn domain(number: u64, away_count: u64, unavailable: AmountInfo) -> DomainInfo {
    DomainInfo { domain: format!("rack {number}"), store_count: 2, away_count, unavailable }
}

fn whole() -> DataRiskInfo {
    DataRiskInfo {
        is_complete: true,
        scheme: "4+2".to_owned(),
        domain_needed: 6,
        domain_min: 5,
        store_count: 14,
        space: space(),
        now: OutlookInfo {
            survivals: vec![class(Some(2), 750, 3 << 30)],
            room_bytes: 100 << 30,
            is_room_enough: Some(true),
            taking_domain_count: 7,
            domains: (1..=7).map(|number| domain(number, 0, amount(0, 0))).collect(),
            ..OutlookInfo::default()
        },
        ..DataRiskInfo::default()
    }
}

fn condition() -> ConditionInfo {
    ConditionInfo {
        kind: "data-store-away".to_owned(),
        subject: "/mnt/nvme1/spindle".to_owned(),
        what: "the data store /mnt/nvme1/spindle fails: a disk may not be mounted".to_owned(),
        since: moment(0),
        seconds: 7265,
        cost: "reads of its fragments are decoded".to_owned(),
        remedy: "bring the store back".to_owned(),
    }
}

/// Several domains fail, and some segments cannot be read.
fn at_risk() -> DataRiskInfo {
    let troubled = |url: &str, failure: Option<&str>| DataStoreInfo {
        url: url.to_owned(),
        domain: "rack 1".to_owned(),
        is_leaving: failure.is_none(),
        is_lost: failure.is_some(),
        failure: failure.map(str::to_owned),
        ..DataStoreInfo::default()
    };
    DataRiskInfo {
        is_complete: false,
        troubled: vec![
            troubled("/mnt/nvme0/spindle", Some("a disk may not be mounted")),
            troubled("spindle://d1/nvme0", None),
        ],
        rebuild_failure: Some("no store takes it".to_owned()),
        unknown: amount(1, 4 << 20),
        now: OutlookInfo {
            survivals: vec![
                class(None, 1, 1 << 20),
                class(Some(0), 9, 30 << 20),
                class(Some(1), 740, 3 << 30),
            ],
            lacking: amount(700, 2 << 30),
            short: amount(700, 2 << 30),
            missing_bytes: 1 << 29,
            room_bytes: 1 << 30,
            room_unknown_count: 2,
            is_room_enough: Some(true),
            taking_domain_count: 5,
            writes: Writes::Lacking,
            domains: vec![domain(2, 0, amount(9, 30 << 20)), domain(1, 2, amount(0, 0))],
            domain_excluded_count: 5,
        },
        ..whole()
    }
}

fn without() -> WithoutInfo {
    WithoutInfo {
        asked: vec![
            StoresGone::Node("d2".to_owned()),
            StoresGone::Store("/mnt/nvme1/spindle".to_owned()),
            StoresGone::Domain("rack 3".to_owned()),
        ],
        stores: ["spindle://d2/nvme0", "/mnt/nvme1/spindle", "spindle://d3/nvme0"]
            .map(str::to_owned)
            .to_vec(),
        unavailable: amount(50, 200 << 20),
        thinner: amount(600, 2 << 30),
        outlook: OutlookInfo {
            survivals: vec![class(None, 50, 200 << 20), class(Some(0), 700, 2 << 30)],
            lacking: amount(650, 2 << 30),
            short: amount(600, 2 << 30),
            missing_bytes: 1 << 30,
            room_bytes: 60 << 30,
            is_room_enough: Some(true),
            taking_domain_count: 4,
            writes: Writes::Waiting,
            domains: vec![domain(4, 0, amount(300, 1 << 30)), domain(2, 2, amount(0, 0))],
            ..OutlookInfo::default()
        },
    }
}
