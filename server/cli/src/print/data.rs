//! Text output about the data stores.

use super::table;
use api::status::{DataStoreInfo, DataStoresInfo, RebalanceInfo};
use block::quantities::{ByteSize, Span};
use std::fmt::Write;

pub(super) fn stores(info: &DataStoresInfo) -> String {
    let head =
        ["STORE", "DOMAIN", "GROUP", "WEIGHT", "FRAGMENTS", "BYTES", "FREE", "TOTAL", "STATE"];
    let head = head.map(str::to_owned).to_vec();
    let mut rows: Vec<Vec<String>> =
        std::iter::once(head).chain(info.stores.iter().map(|store| row(store, info))).collect();
    let has_groups = info.stores.iter().any(|store| store.group.is_some());
    if !has_groups {
        rows.iter_mut().for_each(|row| drop(row.remove(2)));
    }
    let mut text = table(&rows, if has_groups { &[3, 4, 5, 6, 7] } else { &[2, 3, 4, 5, 6] });
    if let Some(found) = &info.rebalance {
        let _ = writeln!(text, "rebalance: {}", rebalance(found));
    }
    text
}

fn row(store: &DataStoreInfo, info: &DataStoresInfo) -> Vec<String> {
    let figure = |figure: Option<String>| figure.unwrap_or_else(|| "-".to_owned());
    let size = |bytes: Option<u64>| figure(bytes.map(|bytes| ByteSize(bytes).rounded()));
    vec![
        store.url.clone(),
        store.domain.clone(),
        figure(store.group.clone()),
        store.weight.to_string(),
        figure(store.fragment_count.map(|count| count.to_string())),
        size(store.fragment_bytes),
        size(store.free_bytes),
        size(store.total_bytes),
        state(store, info.group.as_deref()),
    ]
}

/// Describes a store of a pool that has this media group.
fn state(store: &DataStoreInfo, group: Option<&str>) -> String {
    let goes = match (store.is_leaving, store.is_empty) {
        (true, _) if store.is_added => Some("leaving, as it is drained"),
        (true, _) => Some("leaving, as it is not configured"),
        (false, true) => Some(way_out(store, group)),
        (false, false) if store.is_draining => Some("draining"),
        (false, false) => None,
    };
    let fails = store.failure.as_ref().map(|why| format!("fails: {why}"));
    let is_shown = store.is_added && !is_of_group(store, group) && goes.is_none();
    let added = is_shown.then(|| "added by command".to_owned());
    let all: Vec<String> = goes.map(str::to_owned).into_iter().chain(added).chain(fails).collect();
    match all.is_empty() {
        true => "in use".to_owned(),
        false => all.join("; "),
    }
}

/// Whether a media group may have added a store: a drive of a data node.
fn is_of_group(store: &DataStoreInfo, group: Option<&str>) -> bool {
    store.group.is_some() || (group.is_some() && store.url.starts_with("spindle://"))
}

/// The next step for a store that is empty.
fn way_out(store: &DataStoreInfo, group: Option<&str>) -> &'static str {
    let is_in_group = group.is_some() && store.group.as_deref() == group;
    match (store.is_configured || !store.is_added, is_in_group) {
        (true, true) => {
            "empty: take it out of `data.stores`, and give it another media group on its node"
        }
        (true, false) => "empty: take it out of `data.stores`",
        (false, true) => "empty: give it another media group on its node",
        // Its node has not answered since the daemon has started, or has no such drive.
        (false, false) if store.group.is_none() && is_of_group(store, group) => {
            "empty: restart the daemon while its node answers, and it leaves"
        }
        (false, false) => "empty: restart the daemon, and it leaves",
    }
}

/// Describes how far the rebalance is.
pub(super) fn rebalance(info: &RebalanceInfo) -> String {
    let moved =
        format!("{} fragments moved ({})", info.moved_count, ByteSize(info.moved_bytes).rounded());
    let failure = info.failure.as_ref().map_or_else(String::new, |why| format!("; {why}"));
    if !info.is_running {
        return format!("{moved}, and it has ended{failure}");
    }
    if info.segment_count == 0 {
        return format!("{moved}; the segments are not counted yet");
    }
    let left = info
        .left_seconds
        .map_or_else(String::new, |left| format!(", about {} left", Span::from_secs(left)));
    let waiting = match info.waiting_count {
        0 => String::new(),
        count => format!("; {count} fragments wait for data stores that fail"),
    };
    format!(
        "{moved}, {} of {} segments to go{left}{waiting}{failure}",
        info.left_count, info.segment_count
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drained_store_is_shown_with_its_next_step() {
        let drained = |url: &str, group: Option<&str>| DataStoreInfo {
            url: url.to_owned(),
            group: group.map(str::to_owned),
            is_added: true,
            is_draining: true,
            is_empty: true,
            ..DataStoreInfo::default()
        };
        let at = |group: Option<&str>| drained("spindle://d1/nvme0", group);
        let nvme = Some("nvme");
        assert_eq!(state(&at(nvme), nvme), "empty: give it another media group on its node");
        // Its node says another group.
        assert_eq!(state(&at(Some("out")), nvme), "empty: restart the daemon, and it leaves");
        assert!(state(&at(None), nvme).contains("while its node answers"));
        let added = drained("/mnt/nvme0", None);
        assert_eq!(state(&added, nvme), "empty: restart the daemon, and it leaves");
        assert_eq!(state(&at(None), None), "empty: restart the daemon, and it leaves");
        let configured = DataStoreInfo { is_configured: true, ..at(nvme) };
        assert!(state(&configured, nvme).contains("`data.stores`, and give it another"));
        let configured = DataStoreInfo { is_configured: true, ..added.clone() };
        assert_eq!(state(&configured, nvme), "empty: take it out of `data.stores`");
        let leaving = DataStoreInfo { is_leaving: true, ..at(Some("out")) };
        assert_eq!(state(&leaving, nvme), "leaving, as it is drained");
        let leaving = DataStoreInfo { is_added: false, ..leaving };
        assert_eq!(state(&leaving, nvme), "leaving, as it is not configured");
        // A drive of the group was not added by a command, also if its node has not answered.
        let used =
            |store: DataStoreInfo| DataStoreInfo { is_draining: false, is_empty: false, ..store };
        assert_eq!(state(&used(at(None)), nvme), "in use");
        assert_eq!(state(&used(added), nvme), "added by command");
    }
}
