//! The node of a cluster in this directory.

use block::env::{SystemClock, SystemRandom};
use block::{Error, ErrorKind, Result};
use cluster::{Cluster, Environment};
use config::Config;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::TcpListener;

/// Returns the directory of the node's identity.
pub(crate) fn home(config: &Config) -> PathBuf {
    config.dir().join("node")
}

/// Opens the node; `None` if the directory belongs to no cluster.
pub(crate) fn open(config: &Config) -> Result<Option<Cluster>> {
    let home = home(config);
    if !cluster::is_member(&home) {
        return Ok(None);
    }
    let environment = Environment { clock: Arc::new(SystemClock), random: Arc::new(SystemRandom) };
    Cluster::open(&home, environment).map(Some)
}

/// Listens on the addresses under which the cluster knows this node.
pub(crate) async fn bind(cluster: &Cluster) -> Result<Vec<TcpListener>> {
    let own = cluster.nodes().into_iter().find(|node| node.id == cluster.node_id());
    let mut listeners = Vec::new();
    for address in own.map(|node| node.addresses).unwrap_or_default() {
        let bound = TcpListener::bind(&address).await;
        listeners.push(bound.map_err(|error| {
            let what = format!("listen on {address}, the address of this node in its cluster");
            Error::with_source(ErrorKind::Io, what, error)
        })?);
    }
    Ok(listeners)
}
