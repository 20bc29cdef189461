//! Text output about the nodes of a cluster.

use super::table;
use api::node::{ClusterFounded, ClusterJoined, NodeStatus, NodesInfo, TokenInfo};
use std::fmt::Write;

/// Advice for a directory whose daemon does not serve the node yet.
const START: &str = "start `spindle serve`, or restart it, so that other nodes reach this one";

/// Describes a cluster that was founded, and the way to its second node.
#[must_use]
pub fn cluster_founded(founded: &ClusterFounded) -> String {
    let ClusterFounded { cluster, node, token, is_restart_needed } = founded;
    format!(
        "node {} has founded cluster {cluster}\n{}\n{}",
        node.name,
        served_from_now(*is_restart_needed, &node.addresses),
        next_machine(token)
    )
}

/// Describes a cluster that this directory has joined.
#[must_use]
pub fn cluster_joined(joined: &ClusterJoined) -> String {
    let ClusterJoined { cluster, node, node_count, is_restart_needed, key_file } = joined;
    let key = match key_file {
        Some(path) => format!("the pool's key is in {}, as on the other node\n", path.display()),
        None => String::new(),
    };
    format!(
        "node {} has joined cluster {cluster}, which has {node_count} nodes\n{key}{}",
        node.name,
        served_from_now(*is_restart_needed, &node.addresses)
    )
}

fn served_from_now(is_restart_needed: bool, addresses: &[String]) -> String {
    let addresses = addresses.join(", ");
    match is_restart_needed {
        true => format!("restart the daemon: only then does it serve the node at {addresses}\n"),
        false => format!("`spindle serve` will serve the node at {addresses}\n"),
    }
}

pub(super) fn token(info: &TokenInfo) -> String {
    let unserved = match info.is_served {
        true => String::new(),
        false => format!("\nNo daemon serves this node: {START}.\n"),
    };
    format!("{}{unserved}", next_machine(info))
}

fn next_machine(info: &TokenInfo) -> String {
    format!(
        "{}\n\n\
         This token admits one node within {} minutes, and is not shown again. On the machine that\n\
         is to join, with its own directory and the address where other nodes reach it:\n\
         spindle node join {} --dir DIR --address HOST:PORT\n",
        info.token.expose(),
        info.valid_seconds / 60,
        info.token.expose()
    )
}

pub(super) fn nodes(info: &NodesInfo) -> String {
    let has_zones = info.nodes.iter().any(|node| node.zone.is_some());
    let with_zone = |mut row: Vec<String>, zone: &str| {
        if has_zones {
            row.insert(2, zone.to_owned());
        }
        row
    };
    let head = ["NODE", "ID", "ADDRESSES", "CONNECTIONS"].map(str::to_owned).to_vec();
    let mut rows = vec![with_zone(head, "ZONE")];
    rows.extend(info.nodes.iter().map(|node| {
        let connections = match node.connection_count {
            _ if node.is_this => "this node".to_owned(),
            Some(count) => count.to_string(),
            None => "-".to_owned(),
        };
        let row = vec![node.name.clone(), node.id.clone(), node.addresses.join(", "), connections];
        with_zone(row, node.zone.as_deref().unwrap_or("-"))
    }));
    let mut text = format!("cluster {}\n{}", info.cluster, table(&rows, &[]));
    if !info.is_served {
        let _ = writeln!(text, "no daemon serves this node: {START}");
    }
    for warning in &info.warnings {
        let _ = writeln!(text, "warning: {warning}");
    }
    text
}

/// Describes the place of a directory in its cluster, in one line.
pub(super) fn place(status: &NodeStatus) -> String {
    let NodeStatus { name, cluster, node_count, is_admitted, is_served, .. } = status;
    let state = match (is_admitted, is_served) {
        (false, _) => "; it was removed from the cluster",
        (true, false) => "; no daemon serves it",
        (true, true) => "",
    };
    let nodes = if *node_count == 1 { "1 node" } else { &format!("{node_count} nodes") };
    format!("{name}, in cluster {cluster} of {nodes}{state}")
}
