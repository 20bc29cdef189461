//! The status of the open pool: what its parts say of themselves, and what a person should know or do about it.

use super::answers::{copy_infos, dedup_info, ratio, restore_info, scrub_info};
use super::{AdminPool, name_of};
use crate::admin::{
    AsideInfo, AtRisk, CacheInfo, ConditionInfo, CopyInfo, DestageInfo, KeySlotInfo, LogInfo,
    NbdInfo, SpaceInfo, StatusInfo, TierInfo,
};
use crate::serve::OpenPool;
use tiering::ReclaimStatus;
use tiering::cache::CacheStatus;

/// Age of data that is only in the log, as a multiple of the configured one, from which the status
/// warns. Chosen by hand: a window that is just being written is not worth a warning.
const LATE_FACTOR: f64 = 2.0;

impl AdminPool {
    pub(super) async fn status(&self, open: &OpenPool) -> StatusInfo {
        let log = open.pool.log_status();
        let tier = open.pool.tier_status();
        let progress = open.pool.destage_progress();
        let manifest = open.ownership.manifest();
        let (has_recovery_key, key_slots) = {
            let keys = open.keys.lock().await;
            (keys.has_recovery(), keys.slots())
        };
        let key_slots = key_slots.into_iter();
        let key_slots: Vec<KeySlotInfo> =
            key_slots.map(|(kind, created_at)| KeySlotInfo { kind, created_at }).collect();
        let oldest_seconds = log.oldest_age().map_or(0.0, |age| age.as_secs_f64());
        let failure = open.pool.fatal().map(|error| error.chain());
        let mut warnings = Vec::new();
        if let Some(failure) = &failure {
            warnings.push(format!("the pool has stopped: {failure}; restart spindle"));
        }
        if let Some(failure) = &progress.failure {
            warnings.push(format!("data does not reach the store: {failure}"));
        }
        if let Some(failure) = &tier.metadata_failure {
            warnings.push(format!(
                "the metadata database has ended and is being opened anew; reads and writes go on \
                 from memory and the log: {failure}"
            ));
        }
        warnings.extend(store_warnings(open, &tier));
        warnings.extend(cache_warning(open, tier.frames.cache.as_ref()));
        for (volume, aside) in &progress.aside {
            warnings.push(aside_warning(&name_of(open, *volume), aside));
        }
        if !has_recovery_key {
            warnings.push("no recovery key was made: run `spindle key backup`".to_owned());
        }
        warnings.extend(self.copy_warnings(open).await);
        warnings.extend(self.scrub_warnings().await);
        let max_age = open.config.settings().destage.max_age.duration().as_secs_f64();
        if oldest_seconds > max_age * LATE_FACTOR {
            warnings.push(format!(
                "the oldest write that only this machine has is {oldest_seconds:.0} s old; \
                 destage.max_age is {max_age:.0} s"
            ));
        }
        let stuck_count = open.pool.reclaim_status().stuck_count;
        if stuck_count > 0 {
            warnings.push(format!(
                "{stuck_count} segments cannot be reclaimed: something in them is damaged; `spindle fsck` says what"
            ));
        }
        if log.is_full {
            warnings.push("the write log is full: writers wait for the store".to_owned());
        }
        if let Some(reason) = &open.recovery.lost_reason
            && !open.recovery.is_tail_proven
        {
            warnings.push(format!("writes may have been lost at the last reboot: {reason}"));
        }
        let conditions: Vec<ConditionInfo> =
            open.conditions.list().into_iter().map(ConditionInfo::from).collect();
        warnings.extend(conditions.iter().map(ConditionInfo::line));
        let side_bytes: u64 = progress.aside.values().map(|aside| aside.side_bytes).sum();
        let stepped_back = open.pool.volumes().into_iter().map(|volume| volume.record());
        for record in stepped_back.filter(|record| record.is_stepped_back) {
            let name = record.name;
            warnings.push(format!(
                "volume {name} refuses clients on other machines, because answered writes may be \
                 gone since a reboot, a take-over or the loss of the write log: restart its clients, then run \
                 `spindle volume accept {name}`"
            ));
        }
        StatusInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pool: manifest.pool.to_string(),
            name: manifest.name.clone(),
            store: open.config.store_url().to_owned(),
            epoch: manifest.epoch,
            host: manifest.owner.host.clone(),
            pid: manifest.owner.pid,
            opened_at: manifest.owner.opened_at,
            is_offline: self.is_offline,
            endpoints: self.endpoints.clone(),
            volume_count: open.pool.volumes().len() as u64,
            at_risk: AtRisk { oldest_seconds, bytes: log.undestaged_bytes + side_bytes },
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
                aside: progress
                    .aside
                    .into_iter()
                    .map(|(volume, aside)| aside_info(open, volume, aside))
                    .collect(),
            },
            tier: TierInfo {
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
                mended_count: tier.mended_count,
            },
            space: space_info(
                &open.pool.reclaim_status(),
                progress.stored_bytes,
                tier.metadata_written_bytes,
            ),
            dedup: dedup_info(open.pool.records().iter(), &open.pool.dedup_status()),
            restored: open.restored.as_ref().map(|restored| restore_info(open, restored)),
            nbd: self.nbd.as_ref().map(|server| nbd_info(server.status())),
            cache: tier.frames.cache.as_ref().map(cache_info),
            memory_bytes_max: open.config.budget().total_bytes,
            key_slots,
            has_recovery_key,
            warnings,
            conditions,
        }
    }

    /// What a person should know of the pool's copies.
    async fn copy_warnings(&self, open: &OpenPool) -> Vec<String> {
        let copies = match copy_infos(open, &self.copies).await {
            Ok(copies) => copies,
            Err(error) => return vec![format!("the copies are not known: {}", error.chain())],
        };
        let warnings = |copy: CopyInfo| {
            let CopyInfo { url, failing_seconds, .. } = copy;
            let failure = copy.failure.map(|failure| {
                let seconds = failing_seconds.unwrap_or(0);
                format!("the copy {url} is not brought up to date, for {seconds} s: {failure}")
            });
            let keys = copy.has_destroyed_keys.then(|| {
                format!("the copy {url} may still have keys of volumes that were erased: it was not reached since")
            });
            failure.into_iter().chain(keys)
        };
        copies.into_iter().flat_map(warnings).collect()
    }

    /// What a person should know of the pool's scrub.
    async fn scrub_warnings(&self) -> Vec<String> {
        let info = match scrub_info(&self.scrub).await {
            Ok(info) => info,
            Err(error) => return vec![format!("the scrub is not known: {}", error.chain())],
        };
        let mut warnings = Vec::new();
        if let Some(failure) = info.failure {
            let seconds = info.failing_seconds.unwrap_or(0);
            warnings.push(format!("the scrub waits, for {seconds} s: {failure}"));
        }
        let count = info.bad_count.max(info.bad.len() as u64);
        if count > 0 {
            warnings.push(format!(
                "the scrub has found {count} segments that are damaged or missing, and that no copy has whole: \
                 `spindle scrub status` names them"
            ));
        }
        warnings
    }
}

fn aside_info(open: &OpenPool, volume: u32, aside: crate::destage::Aside) -> AsideInfo {
    AsideInfo {
        volume,
        name: name_of(open, volume),
        since_lsn: aside.since_lsn,
        log_bytes: aside.log_bytes,
        side_bytes: aside.side_bytes,
        side_file_count: aside.side_file_count,
        is_refusing_writes: aside.is_refusing_writes,
        is_closed: aside.is_closed,
        reason: aside.reason,
    }
}

fn aside_warning(volume: &str, aside: &crate::destage::Aside) -> String {
    if aside.is_closed {
        return format!("volume {volume} is not served: {}", aside.reason);
    }
    let refusing = if aside.is_refusing_writes { "; it refuses writes" } else { "" };
    format!(
        "volume {volume} cannot be destaged: its writes since LSN {} are on this machine only, {} \
         bytes in {} side files and {} bytes in the log{refusing}: {}. Bring the damaged object of the store \
         back, or write over what is damaged, or give the volume up with `spindle volume rm --now \
         {volume}`",
        aside.since_lsn, aside.side_bytes, aside.side_file_count, aside.log_bytes, aside.reason
    )
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

/// What is wrong with the read cache: it costs speed, nothing else.
fn cache_warning(open: &OpenPool, status: Option<&CacheStatus>) -> Option<String> {
    let dir = open.config.cache_dir()?.display();
    match status {
        None => Some(format!(
            "the read cache in {dir} could not be opened, and reads come from the store: see the log, \
             and restart spindle once the cause is gone"
        )),
        Some(status) if !status.is_on => Some(format!(
            "the read cache in {dir} has turned itself off after {} errors, and reads come from the \
             store: check the disk and its space, then restart spindle",
            status.error_count
        )),
        Some(status) if status.bad_count > 0 => Some(format!(
            "the read cache in {dir} gave {} frames that do not verify; each was read from the store \
             instead: check its disk",
            status.bad_count
        )),
        Some(_) => None,
    }
}

/// What does not come through to the store or from it, at this moment.
fn store_warnings(open: &OpenPool, tier: &tiering::TierStatus) -> Vec<String> {
    let mut warnings = Vec::new();
    if let Some((since, error)) = &*open.no_contact.lock() {
        warnings.push(format!(
            "the store has not answered for {} s, or refuses: {error}; writes go on until the log is \
             full",
            since.elapsed().as_secs()
        ));
    }
    if let Some(failure) = &tier.upload_failure {
        warnings.push(format!(
            "uploads to the store have failed for {} s and are tried again; writes go on until the \
             log is full; check the store, the network and the credentials: {}",
            failure.lasts.as_secs(),
            failure.error
        ));
    }
    if let Some(failure) = &tier.frames.store_failure {
        warnings.push(format!(
            "the last read from the store failed, {} s ago; reads wait for up to two minutes; check \
             the store, the network and the credentials: {}",
            failure.age.as_secs(),
            failure.error
        ));
    }
    warnings
}

fn space_info(reclaim: &ReclaimStatus, destaged_bytes: u64, metadata_bytes: u64) -> SpaceInfo {
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
