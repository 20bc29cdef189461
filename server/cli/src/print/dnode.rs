//! Text about a data node.

use super::{pairs, table};
use api::dnode::{DnodeInfo, DriveInfo};
use block::quantities::ByteSize;
use std::fmt::Write;

/// Describes a data node and its drives.
pub(super) fn dnode(info: &DnodeInfo) -> String {
    let DnodeInfo { version, name, id, cluster, drives } = info;
    let mut text = pairs(&[
        ("data node", format!("{name} ({id})")),
        ("cluster", cluster.clone()),
        ("version", version.clone()),
    ]);
    let head = ["DRIVE", "DIRECTORY", "GROUP", "DOMAIN", "USED", "CAPACITY", "AVAILABLE", "POOLS"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let size = |bytes: u64| ByteSize(bytes).rounded();
    let label = |label: &Option<String>| label.clone().unwrap_or_else(|| "-".to_owned());
    rows.extend(drives.iter().map(|drive| {
        vec![
            drive.url.clone(),
            drive.dir.display().to_string(),
            label(&drive.group),
            label(&drive.domain),
            size(drive.used_bytes),
            size(drive.capacity_bytes),
            size(drive.available_bytes),
            drive.pool_count.to_string(),
        ]
    }));
    text.push_str(&table(&rows, &[4, 5, 6, 7]));
    for DriveInfo { url, failure, wear, .. } in drives {
        // Writing to a string cannot fail.
        if let Some(failure) = failure {
            let _ = writeln!(text, "warning: {url} is away: {failure}");
        }
        if let Some(why) = wear {
            let _ = writeln!(text, "warning: {url} is wearing out: {why}");
        }
    }
    text
}
