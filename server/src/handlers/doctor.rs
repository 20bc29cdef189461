//! Requests to the doctor.

use super::status::{data_store_info, tier_space_info};
use api::Reply;
use api::doctor::{
    AmountInfo, DataRiskInfo, DoctorInfo, DoctorRequest, DomainInfo, OutlookInfo, StoresGone,
    SurvivalCount, WithoutInfo, Writes,
};
use api::status::ConditionInfo;
use block::{Conditions, Error, ErrorKind, Result};
use engine::closed_pool::ClosedPool;
use engine::data_stores::{DataStoreStatus, DataStoresStatus, OpenDataStores, Room};
use engine::doctor::{Findings, Without, examine};
use engine::open_pool::OpenPool;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use tiering::Tier;
use tiering::survey::{Amount, Outlook};

/// Most failure domains that are listed. Chosen by hand: a screen.
const DOMAINS_MAX: usize = 16;

/// Answers for a pool that is open.
pub(super) async fn of_open(open: &OpenPool, request: DoctorRequest) -> Result<Reply> {
    let data = open.data_stores.as_ref().map(|stores| (open.pool.tier(), &**stores));
    let (store, failure) = (&open.config.store_url, open.rebuild.status().failure);
    answer(data, store, &open.conditions, failure, request).await
}

/// Answers for a pool that was closed in order.
pub(super) async fn of_closed(pool: &ClosedPool, request: DoctorRequest) -> Result<Reply> {
    pool.raise_conditions().await?;
    let data = pool.data_stores.as_ref().map(|stores| (&pool.tier, &**stores));
    answer(data, &pool.config.store_url, &pool.conditions, None, request).await
}

async fn answer(
    data: Option<(&Tier, &dyn OpenDataStores)>,
    store: &str,
    conditions: &Conditions,
    rebuild_failure: Option<String>,
    request: DoctorRequest,
) -> Result<Reply> {
    let DoctorRequest::Examine { without } = request;
    let data = match data {
        None if without.is_empty() => None,
        None => {
            let what = format!(
                "look at the pool without data stores: it has none; its segments are objects of the store {store}"
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        Some((tier, stores)) => {
            let asked: Vec<Without> = without.iter().map(asked).collect();
            let found = examine(tier, stores, &asked).await?;
            Some(DataRiskInfo { rebuild_failure, ..data_risk(found, without) })
        }
    };
    let conditions_now = conditions.list().into_iter().map(ConditionInfo::from);
    let mut info = DoctorInfo {
        summary: String::new(),
        store: store.to_owned(),
        conditions: conditions_now.collect(),
        condition_excluded_count: conditions.excluded_count(),
        data,
    };
    info.summary = info.summarize();
    Ok(Reply::Doctor(Box::new(info)))
}

fn asked(stores: &StoresGone) -> Without {
    match stores {
        StoresGone::Node(name) => Without::Node(name.clone()),
        StoresGone::Store(url) => Without::Store(url.clone()),
        StoresGone::Domain(name) => Without::Domain(name.clone()),
    }
}

fn data_risk(found: Findings, asked: Vec<StoresGone>) -> DataRiskInfo {
    let Findings { stores, gone, survey, room, room_then } = found;
    let now = outlook_info(&survey.now, &room, &stores, &[]);
    let without = survey.then.as_ref().map(|then| WithoutInfo {
        asked,
        unavailable: amount(survey.unavailable),
        thinner: amount(survey.thinner),
        outlook: outlook_info(then, &room_then.unwrap_or_default(), &stores, &gone),
        stores: gone.clone(),
    });
    let is_troubled = |store: &DataStoreStatus| {
        store.failure.is_some() || store.is_lost || store.is_leaving || !store.is_readable
    };
    DataRiskInfo {
        is_complete: survey.is_complete,
        scheme: stores.scheme.clone(),
        domain_needed: stores.fragment_count as u64,
        domain_min: stores.written_min as u64,
        store_count: stores.stores.len() as u64,
        troubled: stores.stores.into_iter().filter(is_troubled).map(data_store_info).collect(),
        rebuild_failure: None,
        space: tier_space_info(&survey.space),
        unknown: amount(survey.unknown),
        now,
        without,
    }
}

fn amount(found: Amount) -> AmountInfo {
    AmountInfo { segment_count: found.segment_count, bytes: found.bytes }
}

fn outlook_info(
    outlook: &Outlook,
    room: &Room,
    status: &DataStoresStatus,
    gone: &[String],
) -> OutlookInfo {
    let survival = |(losses, found): (&Option<u8>, &Amount)| SurvivalCount {
        losses: *losses,
        segment_count: found.segment_count,
        bytes: found.bytes,
    };
    let taking = outlook.taking_domains.len();
    let mut domains = domain_infos(outlook, &status.stores, gone);
    let domain_excluded_count = domains.len().saturating_sub(DOMAINS_MAX) as u64;
    domains.truncate(DOMAINS_MAX);
    OutlookInfo {
        survivals: outlook.survivals.iter().map(survival).collect(),
        lacking: amount(outlook.lacking),
        short: amount(outlook.short),
        missing_bytes: outlook.missing_bytes,
        room_bytes: room.known_bytes,
        room_unknown_count: room.unknown_count as u64,
        is_room_enough: Findings::is_room_enough(outlook, room),
        taking_domain_count: taking as u64,
        writes: match taking {
            taking if taking >= status.fragment_count => Writes::Whole,
            taking if taking >= status.written_min => Writes::Lacking,
            _ => Writes::Waiting,
        },
        domains,
        domain_excluded_count,
    }
}

/// All failure domains, the worst first.
fn domain_infos(outlook: &Outlook, stores: &[DataStoreStatus], gone: &[String]) -> Vec<DomainInfo> {
    let mut counts: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for store in stores {
        let (count, away) = counts.entry(&store.domain).or_default();
        *count += 1;
        *away += u64::from(!store.is_readable || gone.contains(&store.url));
    }
    let info = |(domain, lost): (&String, &Amount)| {
        let (store_count, away_count) = counts.get(domain.as_str()).copied().unwrap_or_default();
        DomainInfo { domain: domain.clone(), store_count, away_count, unavailable: amount(*lost) }
    };
    let mut infos: Vec<DomainInfo> = outlook.domains.iter().map(info).collect();
    // Those of one size stay in the order of their names.
    infos.sort_by_key(|info| Reverse(info.unavailable.bytes));
    infos
}

#[cfg(test)]
mod tests;
