//! The status of the open pool: the reports of its parts, and the current conditions.

use super::restore::restore_info;
use super::volume::{dedup_info, ratio};
use super::{AdminPool, convert, name_of, node};
use crate::roles::members_of;
use api::status::{
    AtRisk, CacheInfo, ConditionCount, ConditionInfo, DataStoreInfo, DataStoresInfo, DestageInfo,
    LogInfo, NbdInfo, RebalanceInfo, RebuildCheckInfo, RedundancyInfo, SpaceInfo, StalledInfo,
    StatusInfo, SurvivalInfo, TierInfo, TierSpaceInfo, TiersInfo,
};
use block::{ConditionKind, Conditions};
use engine::data_stores::{DataStoreStatus, DataStoresStatus};
use engine::open_pool::OpenPool;
use engine::rebalance::RebalanceStatus;
use engine::rebuild::{CheckStatus, RebuildStatus};
use engine::state::StalledVolume;
use engine::tiers::TiersStatus;
use std::collections::BTreeMap;
use tiering::cache::CacheStatus;
use tiering::rebuild::Redundancy;
use tiering::survey::TierSpace;
use tiering::tiers::TierPolicy;
use tiering::{ReclaimStatus, TierStatus};

impl AdminPool {
    pub(super) async fn status(&self, open: &OpenPool) -> StatusInfo {
        if self.is_offline {
            // No job has read their state in the store yet. If it cannot be read, a condition says
            // so.
            let _ = (self.scrub.status().await, self.copies.status().await);
        }
        let log = open.pool.log_status();
        let tier = open.pool.tier_status();
        let progress = open.pool.destage_progress();
        let manifest = open.ownership.manifest();
        let (has_recovery_key, key_slots) = {
            let keys = open.keys.lock().await;
            (keys.has_recovery(), keys.slots())
        };
        let oldest_seconds = log.oldest_age().map_or(0.0, |age| age.as_secs_f64());
        let failure = open.pool.fatal().map(|error| error.chain());
        let conditions: Vec<ConditionInfo> =
            open.conditions.list().into_iter().map(ConditionInfo::from).collect();
        let mut warnings: Vec<String> = conditions.iter().map(ConditionInfo::line).collect();
        let node = node::status(self.cluster(), &open.config.dir).await;
        let node = node.unwrap_or_else(|error| {
            warnings.push(error.context("show the node").chain());
            None
        });
        let members = match &self.roles {
            Some(roles) if manifest.configuration.is_some() => members_of(roles, open).await.ok(),
            _ => None,
        };
        let spill_bytes: u64 = progress.stalled.values().map(|stalled| stalled.spill_bytes).sum();
        StatusInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pool: manifest.pool.to_string(),
            name: manifest.name.clone(),
            store: open.config.store_url.to_owned(),
            epoch: manifest.epoch,
            host: manifest.owner.host.clone(),
            pid: manifest.owner.pid,
            opened_at: manifest.owner.opened_at,
            is_offline: self.is_offline,
            endpoints: self.endpoints.clone(),
            volume_count: open.pool.volumes().len() as u64,
            at_risk: AtRisk { oldest_seconds, bytes: log.undestaged_bytes + spill_bytes },
            members,
            log: LogInfo {
                used_bytes: log.used_bytes,
                ring_bytes: log.ring_bytes,
                last_lsn: log.last_lsn.0,
                durable_lsn: log.durable_lsn.0,
                destaged_lsn: log.destaged_lsn.0,
                failure,
            },
            destage: DestageInfo {
                window_count: progress.window_count,
                destaged_bytes: progress.destaged_bytes,
                stored_bytes: progress.stored_bytes,
                failure_count: progress.failure_count,
                failure: progress.failure,
                stalled: progress
                    .stalled
                    .into_iter()
                    .map(|(volume, stalled)| stalled_info(open, volume, stalled))
                    .collect(),
            },
            space: space_info(
                &open.pool.reclaim_status(),
                progress.stored_bytes,
                tier.metadata_written_bytes,
            ),
            data_stores: open_data_stores_info(open),
            dedup: dedup_info(open.pool.records().iter(), &open.pool.dedup_status()),
            restored: open
                .restored
                .as_ref()
                .map(|restored| restore_info(restored, *open.is_complete.borrow())),
            nbd: self.nbd.as_ref().map(|server| nbd_info(server.status())),
            cache: tier.frames.cache.as_ref().map(cache_info),
            tier: tier_info(tier),
            node,
            memory_bytes_max: open.config.memory_bytes_max,
            key_slots: convert::key_slots(key_slots),
            has_recovery_key,
            warnings,
            conditions,
            condition_counts: condition_counts(&open.conditions),
            condition_excluded_count: open.conditions.excluded_count(),
        }
    }
}

/// Reports on the data stores; `None` if segments are objects.
pub(super) fn open_data_stores_info(open: &OpenPool) -> Option<DataStoresInfo> {
    let status = open.data_stores.as_ref()?.status();
    let (is_running, rebalance) = (status.is_rebalancing, open.rebalance.status());
    let policy = status.policy;
    let mut info = data_stores_info(status, open.rebuild.status());
    info.rebalance =
        (is_running || rebalance.fragment_count > 0).then(|| rebalance_info(rebalance, is_running));
    info.tiers = policy.tiers.is_moving().then(|| tiers_info(policy, open.tiers.status()));
    Some(info)
}

fn tiers_info(policy: TierPolicy, status: TiersStatus) -> TiersInfo {
    TiersInfo {
        tiers: policy.tiers.to_string(),
        cold_after_seconds: policy.cold_after.as_secs(),
        to_copy_count: status.to_copy.segment_count,
        to_copy_bytes: status.to_copy.bytes,
        to_drop_count: status.to_drop.segment_count,
        to_drop_bytes: status.to_drop.bytes,
        to_bring_back_count: status.to_bring_back.segment_count,
        to_bring_back_bytes: status.to_bring_back.bytes,
        copied_count: status.copied.segment_count,
        copied_bytes: status.copied.bytes,
        dropped_count: status.dropped.segment_count,
        dropped_bytes: status.dropped.bytes,
        brought_back_count: status.brought_back.segment_count,
        brought_back_bytes: status.brought_back.bytes,
        rewritten_count: status.rewritten_count,
        is_short: status.is_short,
        failure: status.failure,
    }
}

fn rebalance_info(status: RebalanceStatus, is_running: bool) -> RebalanceInfo {
    RebalanceInfo {
        is_running,
        segment_count: status.segment_count,
        misplaced_count: status.misplaced_count,
        left_count: status.left_count,
        waiting_count: status.waiting_count,
        moved_count: status.fragment_count,
        moved_bytes: status.bytes,
        left_seconds: status.left_seconds,
        failure: status.failure,
    }
}

/// Reports on the data stores without the rebalance.
pub(super) fn data_stores_info(status: DataStoresStatus, rebuild: RebuildStatus) -> DataStoresInfo {
    let counted = rebuild.redundancy.as_ref().map(|found| &found.stores);
    let store = |store: DataStoreStatus| {
        let contents = counted.map(|stores| stores.get(&store.number).copied().unwrap_or_default());
        DataStoreInfo {
            is_empty: rebuild.empty.contains(&store.number)
                && (store.is_draining || store.is_leaving),
            fragment_count: contents.map(|contents| contents.fragment_count),
            fragment_bytes: contents.map(|contents| contents.bytes),
            ..data_store_info(store)
        }
    };
    let rebalance = status.is_rebalancing.then(|| rebalance_info(RebalanceStatus::default(), true));
    DataStoresInfo {
        scheme: status.scheme,
        group: status.group,
        stores: status.stores.into_iter().map(store).collect(),
        rebalance,
        read_count: status.read_count,
        degraded_read_count: status.degraded_read_count,
        hedged_read_count: status.hedged_read_count,
        hedged_write_count: status.hedged_write_count,
        object_read_count: status.object_read_count,
        tiers: None,
        written_bytes: status.written_bytes,
        missing_write_count: status.missing_write_count,
        space: rebuild.redundancy.as_ref().map(|found| tier_space_info(&found.space)),
        redundancy: rebuild.redundancy.map(redundancy_info),
        rebuild_left_count: rebuild.left_count,
        rebuild_left_seconds: rebuild.left_seconds,
        rebuild_check: rebuild.check.map(rebuild_check_info),
        rebuilt_count: rebuild.fragment_count,
        rebuilt_bytes: rebuild.bytes,
        rebuild_failure: rebuild.failure,
    }
}

fn rebuild_check_info(check: CheckStatus) -> RebuildCheckInfo {
    RebuildCheckInfo {
        is_whole: check.is_whole,
        store_count: check.store_count,
        listed_count: check.listed_count,
        segment_count: check.segment_count,
        verified_count: check.verified_count,
        found_count: check.found_count,
        left_seconds: check.left_seconds,
    }
}

pub(super) fn data_store_info(store: DataStoreStatus) -> DataStoreInfo {
    DataStoreInfo {
        url: store.url,
        domain: store.domain,
        group: store.group,
        weight: store.weight,
        is_draining: store.is_draining,
        is_added: store.is_added,
        is_configured: store.is_configured,
        is_leaving: store.is_leaving,
        is_lost: store.is_lost,
        failure: store.failure,
        total_bytes: store.total_bytes,
        free_bytes: store.free_bytes,
        ..DataStoreInfo::default()
    }
}

pub(super) fn tier_space_info(space: &TierSpace) -> TierSpaceInfo {
    TierSpaceInfo {
        object_count: space.objects.segment_count,
        object_bytes: space.objects.bytes,
        coded_count: space.coded.segment_count,
        coded_bytes: space.coded.bytes,
        copied_count: space.copied.segment_count,
        copied_bytes: space.copied.bytes,
        data_bytes: space.data_bytes,
        parity_bytes: space.parity_bytes,
    }
}

fn redundancy_info(found: Redundancy) -> RedundancyInfo {
    let survival = |(losses, bytes)| SurvivalInfo { losses, bytes };
    RedundancyInfo {
        survivals: found.bytes.into_iter().map(survival).collect(),
        lacking_count: found.lacking_count,
        lacking_bytes: found.lacking_bytes,
    }
}

pub(super) fn tier_info(tier: TierStatus) -> TierInfo {
    TierInfo {
        commit_number: tier.map.commit_number,
        range_count: tier.map.range_count as u64,
        upload_retry_count: tier.upload_retry_count,
        upload_failure: tier.upload_failure.map(|failure| failure.error),
        read_failure: tier.frames.store_failure.map(|failure| failure.error),
        reopen_count: tier.reopen_count,
        memory_hit_count: tier.frames.memory_hit_count,
        cache_hit_count: tier.frames.cache_hit_count,
        store_frame_count: tier.frames.store_frame_count,
        store_refetch_count: tier.frames.store_refetch_count,
        store_bad_count: tier.frames.store_bad_count,
        repaired_count: tier.repaired_count,
    }
}

/// Number of times each kind of condition was raised, and how many of it are current.
pub(super) fn condition_counts(conditions: &Conditions) -> BTreeMap<String, ConditionCount> {
    let (raised, lasting) = (conditions.raised_counts(), conditions.list());
    let counts = ConditionKind::ALL.iter().map(|kind| {
        let lasting = lasting.iter().filter(|condition| condition.kind == *kind);
        let count = ConditionCount {
            raised_count: raised.get(kind).copied().unwrap_or_default(),
            lasting_count: lasting.count() as u64,
        };
        (kind.id().to_owned(), count)
    });
    counts.collect()
}

fn stalled_info(open: &OpenPool, volume: u32, stalled: StalledVolume) -> StalledInfo {
    StalledInfo {
        volume,
        name: name_of(open, volume),
        since_lsn: stalled.since_lsn,
        log_bytes: stalled.log_bytes,
        spill_bytes: stalled.spill_bytes,
        spill_file_count: stalled.spill_file_count,
        is_refusing_writes: stalled.is_refusing_writes,
        is_closed: stalled.is_closed,
        reason: stalled.reason,
    }
}

fn nbd_info(status: nbd::Status) -> NbdInfo {
    NbdInfo {
        connection_count: status.connection_count as u64,
        refused_count: status.refused_count as u64,
        request_count: status.request_count,
        error_count: status.error_count,
        payload_bytes: status.payload_bytes as u64,
    }
}

fn cache_info(status: &CacheStatus) -> CacheInfo {
    CacheInfo {
        is_on: status.is_on,
        frame_count: status.frame_count,
        used_bytes: status.used_bytes,
        pending_bytes: status.pending_bytes,
        insert_count: status.insert_count,
        dropped_count: status.dropped_count,
        bad_count: status.bad_count,
        error_count: status.error_count,
    }
}

pub(super) fn space_info(
    reclaim: &ReclaimStatus,
    destaged_bytes: u64,
    metadata_bytes: u64,
) -> SpaceInfo {
    let space = reclaim.space.unwrap_or_default();
    let written_bytes = destaged_bytes + reclaim.written_bytes + metadata_bytes;
    SpaceInfo {
        is_known: reclaim.space.is_some(),
        segment_count: space.segment_count,
        stored_bytes: space.object_bytes,
        live_bytes: space.live_bytes,
        space_amplification: ratio(space.object_bytes, space.live_bytes),
        reclaimed_bytes: reclaim.forgotten_bytes,
        moved_bytes: reclaim.written_bytes,
        metadata_bytes,
        write_amplification: ratio(written_bytes, destaged_bytes),
        stuck_count: reclaim.stuck_count,
        held_count: reclaim.held_count,
    }
}
