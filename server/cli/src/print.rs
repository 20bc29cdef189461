//! Text output for people: tables and sentences made from the types of `api`, one module a noun.
//!
//! Invariant: text is made from a reply alone: no clock, no file, no environment.

mod config;
mod copy;
mod data;
mod demo;
mod device;
mod dnode;
mod doctor;
mod drill;
mod member;
mod node;
mod pool;
mod scrub;
mod snapshot;
mod status;
mod volume;

pub use config::{config, example, version};
pub use copy::restored_copy;
pub use demo::{data_nodes, demo, fail_over};
pub use drill::drill;
pub use node::{cluster_founded, cluster_joined};
pub use pool::{fsck, pool_purged, pool_removed, pool_restored};
pub use snapshot::diff;

use api::Reply;
use std::fmt::Write;

/// Formats a reply of the daemon.
#[must_use]
pub fn reply(reply: &Reply) -> String {
    match reply {
        Reply::Volume(info) => volume::volume(info),
        Reply::Recovered(info) => volume::recovered(info),
        Reply::Volumes { volumes: infos } => volume::volumes(infos),
        Reply::Snapshots { snapshots: infos } => snapshot::snapshots(infos),
        Reply::Schedule(info) => snapshot::schedule(info),
        Reply::Copies { copies: infos } => copy::copies(infos),
        Reply::Scrub(info) => scrub::scrub(info),
        Reply::SnapshotDiff(found) => diff(found),
        Reply::Status(info) => status::status(info),
        Reply::Fsck(found) => fsck(found),
        Reply::DataStores(info) => data::stores(info),
        Reply::Members(info) => member::members(info),
        Reply::MemberAdded(added) => member::added(added),
        Reply::Moved(info) => pool::moved(info),
        Reply::Done { message } => format!("{message}\n"),
        Reply::RecoveryKey { key } => format!(
            "{}\n\n\
             This key opens the pool when its key file or passphrase is lost. It is not stored\n\
             anywhere and not shown again. Print it, or keep it where the pool's directory is not.\n\
             To use it: put it in a file and start spindle with --recovery-key-file FILE.\n",
            key.expose()
        ),
        Reply::Attached(info) => device::attached(info),
        Reply::Attachments { attachments, clients } => device::list(attachments, clients),
        Reply::RemoteDevices { devices } => device::remote_devices(devices),
        Reply::Dnode(info) => dnode::dnode(info),
        Reply::Doctor(info) => doctor::doctor(info),
        Reply::Nodes(info) => node::nodes(info),
        Reply::NodeToken(info) => node::token(info),
        Reply::KeyRotated { message, .. } => format!("{message}\n"),
    }
}

/// Formats columns two spaces apart, left-aligned except those named in `right`.
fn table(rows: &[Vec<String>], right: &[usize]) -> String {
    let column_count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..column_count)
        .map(|column| {
            rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
        })
        .map(|width| width.unwrap_or(0))
        .collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            // Writing to a string cannot fail.
            let _ = if right.contains(&column) {
                write!(line, "{cell:>width$}  ")
            } else {
                write!(line, "{cell:<width$}  ")
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn pairs(pairs: &[(&str, String)]) -> String {
    let rows: Vec<Vec<String>> =
        pairs.iter().map(|(key, value)| vec![format!("{key}:"), value.clone()]).collect();
    table(&rows, &[])
}
