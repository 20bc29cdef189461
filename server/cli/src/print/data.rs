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
        std::iter::once(head).chain(info.stores.iter().map(row)).collect();
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

fn row(store: &DataStoreInfo) -> Vec<String> {
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
        state(store),
    ]
}

fn state(store: &DataStoreInfo) -> String {
    let goes = match (store.is_leaving, store.is_empty) {
        (true, _) => Some("leaving, as it is not configured"),
        (false, true) if store.group.is_some() => {
            Some("empty: give it another media group on its node")
        }
        (false, true) => Some("empty: take it out of `data.stores`"),
        (false, false) if store.is_draining => Some("draining"),
        (false, false) => None,
    };
    let fails = store.failure.as_ref().map(|why| format!("fails: {why}"));
    let is_shown = store.is_added && store.group.is_none() && goes.is_none();
    let added = is_shown.then(|| "added by command".to_owned());
    let all: Vec<String> = goes.map(str::to_owned).into_iter().chain(added).chain(fails).collect();
    match all.is_empty() {
        true => "in use".to_owned(),
        false => all.join("; "),
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
