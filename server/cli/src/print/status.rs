//! Text output about the state of a pool.

use super::{data, member, node, pairs};
use api::restore::RestoreInfo;
use api::status::{
    CacheInfo, ConditionInfo, DataStoreInfo, DataStoresInfo, NbdInfo, RedundancyInfo, SpaceInfo,
    StatusInfo, TierSpaceInfo, TiersInfo, survival_words,
};
use block::quantities::{ByteSize, Span, utc};
use block::units::BLOCK_BYTES;
use std::fmt::Write;

pub(super) fn status(info: &StatusInfo) -> String {
    let percent = |part: u64, whole: u64| match whole {
        0 => 0,
        _ => u128::from(part) * 100 / u128::from(whole),
    };
    let size = |bytes: u64| ByteSize(bytes).rounded();
    let log = &info.log;
    let state = if info.is_offline { "no daemon runs" } else { "serving" };
    let mut text = pairs(&[
        ("pool", format!("{} ({})", info.name, info.pool)),
        ("state", state.to_owned()),
        ("store", info.store.clone()),
        (
            "owner",
            format!(
                "{} (pid {}) since {}, epoch {}",
                info.host,
                info.pid,
                utc(info.opened_at),
                info.epoch
            ),
        ),
        ("volumes", info.volume_count.to_string()),
        (
            "at risk",
            format!(
                "{:.1} s, {} ({})",
                info.at_risk.oldest_seconds,
                size(info.at_risk.bytes),
                at_risk_where(info)
            ),
        ),
        (
            "log",
            format!(
                "{} of {} used ({} %), LSN {} written, {} on stable storage, {} in the store",
                size(log.used_bytes),
                size(log.ring_bytes),
                percent(log.used_bytes, log.ring_bytes),
                log.last_lsn,
                log.durable_lsn,
                log.destaged_lsn
            ),
        ),
        (
            "destage",
            format!(
                "{} in {} windows became {}; {} attempts failed",
                size(info.destage.destaged_bytes),
                info.destage.window_count,
                size(info.destage.stored_bytes),
                info.destage.failure_count
            ),
        ),
        ("space", space(&info.space)),
        ("dedup", dedup(info)),
        (
            "reads",
            format!(
                "frames from memory {}, from the cache {}, from the store {} ({} read twice, {} bad){}",
                info.tier.memory_hit_count,
                info.tier.cache_hit_count,
                info.tier.store_frame_count,
                info.tier.store_refetch_count,
                info.tier.store_bad_count,
                match info.tier.repaired_count {
                    0 => String::new(),
                    count => format!("; {count} segments repaired from copies"),
                }
            ),
        ),
        (
            "metadata",
            format!(
                "{} commits, {} trims being folded, {} uploads tried again, opened anew {} times",
                info.tier.commit_number,
                info.tier.range_count,
                info.tier.upload_retry_count,
                info.tier.reopen_count
            ),
        ),
        ("clients", clients(info.nbd.as_ref())),
        ("cache", cache(info.cache.as_ref())),
        ("memory", size(info.memory_bytes_max)),
        ("opened by", slots(info)),
        ("version", info.version.clone()),
    ]);
    if let Some(found) = &info.data_stores {
        text.push_str(&pairs(&[("data", data_stores(found))]));
        if let Some(space) = &found.space {
            text.push_str(&pairs(&[("tiers", tiers(space))]));
        }
        if let Some(moving) = &found.tiers {
            text.push_str(&pairs(&[("moves", moves(moving))]));
        }
    }
    if let Some(restored) = &info.restored {
        text.push_str(&pairs(&[("restored", restored_from(restored))]));
    }
    if let Some(status) = &info.node {
        text.push_str(&pairs(&[("node", node::place(status))]));
    }
    if let Some(sent) = info.members.as_ref().and_then(|info| member::traffic(&info.traffic)) {
        text.push_str(&pairs(&[("sent", sent)]));
    }
    for endpoint in &info.endpoints {
        let _ = writeln!(text, "{endpoint}");
    }
    text.push_str(&conditions(&info.conditions, info.condition_excluded_count));
    text
}

/// Lists the conditions, each with its start, its cost and its remedy.
pub(super) fn conditions(conditions: &[ConditionInfo], excluded_count: u64) -> String {
    let mut text = String::new();
    for condition in conditions {
        let ConditionInfo { kind, what, since, seconds, cost, remedy, .. } = condition;
        let _ = writeln!(text, "warning: {what} ({kind})");
        let _ = writeln!(text, "  since: {}, for {}", utc(*since), lasting(*seconds));
        for (name, words) in [("cost", cost), ("to do", remedy)] {
            if !words.is_empty() {
                let _ = writeln!(text, "  {name}: {words}");
            }
        }
    }
    if excluded_count > 0 {
        let _ = writeln!(
            text,
            "warning: {excluded_count} more were raised than can be listed; see the log"
        );
    }
    text
}

fn lasting(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, ..) => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
}

fn restored_from(info: &RestoreInfo) -> String {
    let from =
        format!("from {}, recovery point {} of {}", info.url, info.recovery_point, utc(info.as_of));
    let size = |bytes: u64| ByteSize(bytes).rounded();
    if info.is_complete {
        return format!("{from}; everything is here");
    }
    let left = info.left_seconds.map_or_else(String::new, |left| format!(", {left} s left"));
    let bad = match info.bad_count {
        0 => String::new(),
        count => format!("; {count} segments are bad there, see the log"),
    };
    format!(
        "{from}; {} fetched since the start, {} to go{left}{bad}",
        size(info.done_bytes),
        size(info.left_bytes)
    )
}

fn clients(nbd: Option<&NbdInfo>) -> String {
    let Some(nbd) = nbd else { return "none, nothing is served".to_owned() };
    format!(
        "{} connections ({} refused), {} requests ({} failed)",
        nbd.connection_count, nbd.refused_count, nbd.request_count, nbd.error_count
    )
}

fn cache(cache: Option<&CacheInfo>) -> String {
    let Some(cache) = cache else { return "none".to_owned() };
    format!(
        "{}, {} in {} frames ({} bad, {} not kept, {} errors)",
        if cache.is_on { "on" } else { "OFF" },
        ByteSize(cache.used_bytes).rounded(),
        cache.frame_count,
        cache.bad_count,
        cache.dropped_count,
        cache.error_count
    )
}

fn dedup(info: &StatusInfo) -> String {
    match &info.dedup {
        None => "no volume has it".to_owned(),
        Some(found) => format!(
            "x {:.2}: {} destaged, {} of it stored already",
            found.ratio,
            ByteSize(found.block_count * BLOCK_BYTES).rounded(),
            ByteSize(found.duplicate_count * BLOCK_BYTES).rounded()
        ),
    }
}

fn data_stores(found: &DataStoresInfo) -> String {
    let answering = found.stores.iter().filter(|store| store.failure.is_none()).count();
    let risk = found.redundancy.as_ref().map_or_else(String::new, survival);
    let rebuilt = rebuild(found);
    let leaving = match found.stores.iter().filter(|store| store.is_leaving).count() {
        0 => String::new(),
        count => format!(", {count} no longer configured"),
    };
    let draining: Vec<&DataStoreInfo> =
        found.stores.iter().filter(|store| store.is_draining && !store.is_leaving).collect();
    let draining = match draining.len() {
        0 => String::new(),
        count => {
            let bytes: Option<u64> = draining.iter().map(|store| store.fragment_bytes).sum();
            let left = bytes.map(|bytes| format!(" with {} left", ByteSize(bytes).rounded()));
            format!(", {count} draining{}", left.unwrap_or_default())
        }
    };
    let rebalance = found
        .rebalance
        .as_ref()
        .map_or_else(String::new, |info| format!("; rebalance: {}", data::rebalance(info)));
    let objects = match found.object_read_count {
        0 => String::new(),
        count => format!(", {count} of objects instead"),
    };
    format!(
        "{} over {} data stores, {answering} of which answer{leaving}{draining}{risk}{rebuilt}{rebalance}; {} reads, {} decoded, \
         {} hedged{objects}; {} writes hedged",
        found.scheme,
        found.stores.len(),
        found.read_count,
        found.degraded_read_count,
        found.hedged_read_count,
        found.hedged_write_count
    )
}

/// Tells how far the rebuild is. It says "rebuilt" only once the stores were asked for all fragments.
fn rebuild(found: &DataStoresInfo) -> String {
    let made = format!(
        "{} fragments made anew ({})",
        found.rebuilt_count,
        ByteSize(found.rebuilt_bytes).rounded()
    );
    let left = |seconds: Option<u64>| {
        seconds.map_or_else(String::new, |seconds| format!(", {} left", lasting(seconds)))
    };
    match (&found.rebuild_check, found.rebuild_left_count) {
        (_, 1..) => format!(
            "; {made}, {} segments to go{}",
            found.rebuild_left_count,
            left(found.rebuild_left_seconds)
        ),
        (None, 0) if found.rebuilt_count == 0 => String::new(),
        (None, 0) => format!("; {made}"),
        (Some(check), 0) if check.is_whole => format!(
            "; rebuilt: {made}; the stores have listed all fragments of {} segments, {} of which were verified",
            check.segment_count, check.verified_count
        ),
        (Some(check), 0) => format!(
            "; {made}; {} of {} stores have listed theirs, {} of {} segments were verified{}",
            check.listed_count,
            check.store_count,
            check.verified_count,
            check.segment_count,
            left(check.left_seconds)
        ),
    }
}

/// Tells what each part of the data survives.
fn survival(found: &RedundancyInfo) -> String {
    let parts = found.survivals.iter().map(|part| (part.losses, part.bytes));
    survival_words(parts).map_or_else(String::new, |words| format!("; {words}"))
}

/// Describes the space that segments take, by tier.
pub(super) fn tiers(found: &TierSpaceInfo) -> String {
    let size = |bytes: u64| ByteSize(bytes).rounded();
    let both = match found.copied_count {
        0 => String::new(),
        count => format!("; {} in {count} of them are objects, too", size(found.copied_bytes)),
    };
    format!(
        "{} in {} segments of fragments take {} of data and {} of parity{both}; {} in {} objects of the store",
        size(found.coded_bytes),
        found.coded_count,
        size(found.data_bytes),
        size(found.parity_bytes),
        size(found.object_bytes),
        found.object_count
    )
}

/// Describes how far the moves between the tiers are.
fn moves(info: &TiersInfo) -> String {
    let part = |verb: &str, count: u64, bytes: u64| match count {
        0 => None,
        count => Some(format!("{count} {verb} ({})", ByteSize(bytes).rounded())),
    };
    let left = [
        part("to copy", info.to_copy_count, info.to_copy_bytes),
        part("to drop", info.to_drop_count, info.to_drop_bytes),
        part("to bring back", info.to_bring_back_count, info.to_bring_back_bytes),
    ];
    let done = [
        part("copied", info.copied_count, info.copied_bytes),
        part("dropped", info.dropped_count, info.dropped_bytes),
        part("brought back", info.brought_back_count, info.brought_back_bytes),
    ];
    let all = |parts: [Option<String>; 3], none: &str| {
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        if parts.is_empty() { none.to_owned() } else { parts.join(", ") }
    };
    let cold = match info.tiers == "both" {
        true => format!(", cold after {}", Span::from_secs(info.cold_after_seconds)),
        false => String::new(),
    };
    let short = match info.is_short {
        true => ", dropped earlier as the data stores have little room",
        false => "",
    };
    let rewritten = match info.rewritten_count {
        0 => String::new(),
        count => format!("; {count} damaged objects written anew"),
    };
    let failure = info.failure.as_ref().map_or_else(String::new, |why| format!("; {why}"));
    format!(
        "{}{cold}{short}: {}; {}{rewritten}{failure}",
        info.tiers,
        all(left, "no segments to go"),
        all(done, "none moved yet")
    )
}

fn space(space: &SpaceInfo) -> String {
    let size = |bytes: u64| ByteSize(bytes).rounded();
    let held = match space.is_known {
        true => format!(
            "{} stored, {} of it live (x {:.2}) in {} segments",
            size(space.stored_bytes),
            size(space.live_bytes),
            space.space_amplification,
            space.segment_count
        ),
        false => "not counted yet".to_owned(),
    };
    let waiting = match space.held_count {
        0 => String::new(),
        count => format!("; {count} reclaimed segments wait for copies"),
    };
    format!(
        "{held}; {} reclaimed, {} moved, written x {:.2}{waiting}",
        size(space.reclaimed_bytes),
        size(space.moved_bytes),
        space.write_amplification
    )
}

fn slots(info: &StatusInfo) -> String {
    let slots: Vec<String> = info.key_slots.iter().map(|slot| slot.kind.to_string()).collect();
    slots.join(", ")
}

/// Describes the loss that would take the data that the store lacks.
fn at_risk_where(info: &StatusInfo) -> String {
    let Some(members) = &info.members else { return "only on this machine".to_owned() };
    let count = members.members.len();
    let safety = match members.losses() {
        0 if members.flushes_to_store() => {
            "alone: a loss of this machine loses what was not flushed".to_owned()
        }
        0 => "alone: a loss of this machine loses it".to_owned(),
        losses => format!("survives the loss of any {losses} of {count} machines"),
    };
    let away: Vec<&str> = members
        .members
        .iter()
        .filter(|member| !member.is_connected)
        .map(|member| &member.node)
        .chain(&members.away)
        .map(String::as_str)
        .collect();
    match away.is_empty() {
        true => safety,
        false => format!("{safety}; away: {}", away.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::member::{Degraded, MemberInfo, MembersInfo, TrafficInfo};
    use api::status::RebuildCheckInfo;

    #[test]
    fn status_says_which_losses_the_log_survives() {
        let member = |node: &str, is_connected| MemberInfo {
            node: node.to_owned(),
            id: String::new(),
            zone: None,
            is_owner: node == "a",
            is_connected,
            error: None,
            behind: 0,
            sent_bytes: 0,
            answer_us: None,
        };
        let of = |members: Vec<MemberInfo>, quorum| {
            let (degraded, away, traffic) = (Degraded::Block, Vec::new(), TrafficInfo::default());
            let members =
                Some(MembersInfo { members, quorum, degraded, away, joining: None, traffic });
            at_risk_where(&StatusInfo { members, ..StatusInfo::default() })
        };
        let alone = |degraded| {
            let (members, away) = (vec![member("a", true)], vec!["b".to_owned()]);
            let traffic = TrafficInfo::default();
            let members =
                Some(MembersInfo { members, quorum: 1, degraded, away, joining: None, traffic });
            at_risk_where(&StatusInfo { members, ..StatusInfo::default() })
        };
        assert_eq!(alone(Degraded::Solo), "alone: a loss of this machine loses it; away: b");
        let of_store = "alone: a loss of this machine loses what was not flushed; away: b";
        assert_eq!(alone(Degraded::Store), of_store);
        assert_eq!(at_risk_where(&StatusInfo::default()), "only on this machine");
        assert_eq!(of(vec![member("a", true)], 1), "alone: a loss of this machine loses it");
        let three = |last| vec![member("a", true), member("b", true), member("c", last)];
        assert_eq!(of(three(true), 2), "survives the loss of any 1 of 3 machines");
        assert_eq!(of(three(false), 2), "survives the loss of any 1 of 3 machines; away: c");
    }

    #[test]
    fn status_shows_data_at_risk_and_every_warning() {
        let mut info = StatusInfo { name: "main".to_owned(), ..StatusInfo::default() };
        info.at_risk.bytes = 3 << 20;
        info.at_risk.oldest_seconds = 12.34;
        info.conditions.push(ConditionInfo {
            kind: "pool-stopped".to_owned(),
            what: "disk on fire".to_owned(),
            since: 1_700_000_000,
            seconds: 7265,
            cost: "nothing is served".to_owned(),
            remedy: "call the fire brigade".to_owned(),
            ..ConditionInfo::default()
        });
        info.condition_excluded_count = 3;
        let text = status(&info);
        assert!(text.contains("12.3 s, 3.00 MiB"), "{text}");
        let shown = "warning: disk on fire (pool-stopped)\n  since: 2023-11-14 22:13:20 UTC, for 2 h 1 min\n  \
                     cost: nothing is served\n  to do: call the fire brigade\nwarning: 3 more were raised";
        assert!(text.contains(shown), "{text}");
    }

    #[test]
    fn rebuild_is_said_to_be_done_once_all_fragments_were_asked_for() {
        let check = RebuildCheckInfo {
            store_count: 7,
            listed_count: 7,
            segment_count: 40,
            verified_count: 1,
            left_seconds: Some(7),
            ..RebuildCheckInfo::default()
        };
        let whole = RebuildCheckInfo { is_whole: true, left_seconds: None, ..check.clone() };
        let state = |left, count, check: Option<&RebuildCheckInfo>| {
            rebuild(&DataStoresInfo {
                rebuild_left_count: left,
                rebuild_left_seconds: (left > 0).then_some(90),
                rebuilt_count: count,
                rebuilt_bytes: count << 20,
                rebuild_check: check.cloned(),
                ..DataStoresInfo::default()
            })
        };
        assert_eq!(state(0, 0, None), "");
        let made = "; 2 fragments made anew (2.00 MiB)";
        assert_eq!(state(30, 2, None), format!("{made}, 30 segments to go, 1 min 30 s left"));
        assert_eq!(state(0, 2, None), made);
        let asked = "; 7 of 7 stores have listed theirs, 1 of 40 segments were verified, 7 s left";
        assert_eq!(state(0, 2, Some(&check)), format!("{made}{asked}"));
        let have =
            "; the stores have listed all fragments of 40 segments, 1 of which were verified";
        assert_eq!(
            state(0, 2, Some(&whole)),
            format!("; rebuilt{}{have}", made.replacen(';', ":", 1))
        );
        // Stores have gone since.
        assert!(!state(3, 2, Some(&whole)).contains("rebuilt"));
    }
}
