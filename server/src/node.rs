//! The directory of a daemon as a node of a cluster: opening it, and serving it to the other nodes.
//!
//! Invariants:
//! - A daemon listens on every address of its node, or does not start.
//! - A process has a node open once: the pool's data stores and the requests of the command line share it.
//! - The service ends with its guard, and so with the daemon.

use block::env::{SystemClock, SystemRandom};
use block::{Error, ErrorKind, Result};
use cluster::{Cluster, Environment, WeakCluster};
use config::Config;
use control::keys::KeySource;
use futures::FutureExt;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::{TcpListener, lookup_host};
use tokio::task::JoinHandle;

/// Returns the place of the node's identity and of its list of nodes, `DIR/node`.
#[must_use]
pub(crate) fn home(config: &Config) -> PathBuf {
    cluster::node_dir(config.dir())
}

/// Returns the clock and the randomness of this machine, and the file with the pool's key if it is opened with
/// one.
#[must_use]
pub(crate) fn environment(config: &Config) -> Environment {
    let key_file = match config.key_source() {
        KeySource::File(path) => Some(path),
        _ => None,
    };
    Environment { key_file, ..bare_environment() }
}

pub(crate) fn bare_environment() -> Environment {
    Environment { clock: Arc::new(SystemClock), random: Arc::new(SystemRandom), key_file: None }
}

/// Opens the node of the configured directory; `None` if it belongs to no cluster. Waits for the
/// disk.
///
/// # Errors
/// Those of [`Cluster::open`].
pub(crate) fn open(config: &Config) -> Result<Option<Cluster>> {
    let opened = open_with(config.dir(), environment(config));
    opened.map_err(|error| error.context(format!("open node {}", home(config).display())))
}

/// Opens the node in `dir`, the directory of a pool; `None` if it belongs to no cluster. It admits no
/// nodes. Waits for the disk.
///
/// # Errors
/// Those of [`Cluster::open`].
pub(crate) fn open_in(dir: &Path) -> Result<Option<Cluster>> {
    open_with(dir, bare_environment())
}

/// The nodes that this process has open, by directory.
static OPEN: Mutex<BTreeMap<PathBuf, WeakCluster>> = Mutex::new(BTreeMap::new());

fn open_with(dir: &Path, environment: Environment) -> Result<Option<Cluster>> {
    if !cluster::is_member(dir) {
        return Ok(None);
    }
    let mut open = OPEN.lock();
    open.retain(|_, node| node.upgrade().is_some());
    // A second opening would find the lock of the first.
    if let Some(node) = open.get(dir).and_then(WeakCluster::upgrade) {
        return Ok(Some(node));
    }
    let node = Cluster::open(dir, environment)?;
    open.insert(dir.to_owned(), node.downgrade());
    Ok(Some(node))
}

/// Tells whether the cluster has this node: it was not removed, as far as this node knows.
#[must_use]
pub(crate) fn is_admitted(cluster: &Cluster) -> bool {
    cluster.nodes().iter().any(|node| node.id == cluster.node_id())
}

/// The service of a node to the others, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Serving(JoinHandle<()>);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Serves a node on its addresses. `None` if it was removed from the cluster.
///
/// # Errors
/// `Invalid` for an address that has no resolution; `Io` if it cannot be bound.
pub(crate) async fn serve(cluster: &Cluster) -> Result<Option<Serving>> {
    let nodes = cluster.nodes();
    let Some(own) = nodes.iter().find(|node| node.id == cluster.node_id()) else {
        tracing::warn!(
            node = %cluster.node_name(),
            "this node was removed from the cluster; the daemon serves its pool without it"
        );
        return Ok(None);
    };
    let listeners = listen(&own.addresses).await?;
    tracing::info!(
        node = %own.name,
        addresses = own.addresses.join(", "),
        "the daemon serves other nodes"
    );
    let serving = cluster.clone();
    let task = tokio::spawn(async move {
        let served = AssertUnwindSafe(serving.serve(listeners)).catch_unwind().await;
        if served.is_err() {
            tracing::error!("the daemon no longer serves other nodes: their service has panicked");
        }
    });
    Ok(Some(Serving(task)))
}

/// Listens on all addresses, each once.
async fn listen(addresses: &[String]) -> Result<Vec<TcpListener>> {
    let (mut listeners, mut bound) = (Vec::new(), BTreeSet::new());
    for text in addresses {
        let resolved = lookup_host(text).await.map_err(|error| {
            let context = format!("listen for other nodes on {text}: it has no address");
            Error::with_source(ErrorKind::Invalid, context, error)
        })?;
        for address in resolved.filter(|address| bound.insert(*address)) {
            listeners.push(listen_on(text, address).await?);
        }
    }
    Ok(listeners)
}

async fn listen_on(text: &str, address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| {
        let shown = address.to_string();
        let resolved = if shown == text { String::new() } else { format!(" ({shown})") };
        let context = format!(
            "listen for other nodes on {text}{resolved}, an address of this node; see `spindle node \
             list`"
        );
        Error::with_source(ErrorKind::Io, context, error)
    })
}

#[cfg(test)]
mod tests;
