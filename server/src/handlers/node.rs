//! Requests about the nodes of the cluster.
//!
//! Invariant: without a daemon that serves the node, a request opens it for itself alone.

use crate::node::{is_admitted, open_in};
use api::Reply;
use api::key::Secret;
use api::node::{NodeInfo, NodeRequest, NodeStatus, NodesInfo, TokenInfo};
use block::{Error, ErrorKind, Result};
use cluster::{Cluster, Conflict, Node, NodeId, TOKEN_LIFE_SECONDS};
use std::path::Path;
use uuid::Uuid;

/// Answers a request about the node in `dir`, the directory of a pool. `served` is the node that
/// this process serves, if any.
///
/// # Errors
/// `NotFound` if the directory belongs to no cluster; those of the request.
pub(crate) async fn answer(
    served: Option<&Cluster>,
    dir: &Path,
    request: NodeRequest,
) -> Result<Reply> {
    in_node(served, dir, move |node| match node {
        Some((cluster, is_served)) => handle(&cluster, is_served, &request),
        None => {
            let what = "find the node: the directory belongs to no cluster; found one with \
                        `spindle node init`, or join one with `spindle node join`";
            Err(Error::new(ErrorKind::NotFound, what))
        }
    })
    .await
}

/// Returns the place of `dir` in its cluster; `None` if it belongs to none.
///
/// # Errors
/// Those of [`Cluster::open`].
pub(crate) async fn status(served: Option<&Cluster>, dir: &Path) -> Result<Option<NodeStatus>> {
    let place = |(cluster, is_served): (Cluster, bool)| NodeStatus {
        name: cluster.node_name().to_owned(),
        id: cluster.node_id().to_string(),
        cluster: cluster.cluster_id().to_string(),
        node_count: cluster.nodes().len() as u64,
        is_admitted: is_admitted(&cluster),
        is_served,
    };
    in_node(served, dir, move |node| Ok(node.map(place))).await
}

/// Runs `work`, which may wait for the disk, with the node and whether it is served.
async fn in_node<T: Send + 'static>(
    served: Option<&Cluster>,
    dir: &Path,
    work: impl FnOnce(Option<(Cluster, bool)>) -> Result<T> + Send + 'static,
) -> Result<T> {
    let (served, dir) = (served.cloned(), dir.to_owned());
    let done = tokio::task::spawn_blocking(move || match served {
        Some(cluster) => {
            let is_served = is_admitted(&cluster);
            work(Some((cluster, is_served)))
        }
        None => work(open_in(&dir)?.map(|cluster| (cluster, false))),
    });
    done.await.map_err(|error| Error::with_source(ErrorKind::Io, "ask the node", error))?
}

fn handle(cluster: &Cluster, is_served: bool, request: &NodeRequest) -> Result<Reply> {
    match request {
        NodeRequest::Token {} => Ok(Reply::NodeToken(token_info(cluster, is_served)?)),
        NodeRequest::List {} => Ok(Reply::Nodes(nodes_info(cluster, is_served))),
        NodeRequest::Remove { node } => {
            let id = find(cluster, node).map_err(|error| removing(node, error))?;
            cluster.remove(id).map_err(|error| removing(node, error))?;
            let message = match is_served {
                true => format!("node {node} is removed, and its connections are closed"),
                false => format!(
                    "node {node} is removed; the other nodes hear of it when `spindle serve` runs \
                     on this one"
                ),
            };
            Ok(Reply::Done { message })
        }
    }
}

fn removing(node: &str, error: Error) -> Error {
    error.context(format!("remove node {node}"))
}

/// Issues a token.
///
/// # Errors
/// Those of [`Cluster::issue_token`].
pub(crate) fn token_info(cluster: &Cluster, is_served: bool) -> Result<TokenInfo> {
    let token = cluster.issue_token().map_err(|error| error.context("issue a token"))?;
    let token = Secret::new(token.to_word().as_str().to_owned());
    Ok(TokenInfo { token, valid_seconds: TOKEN_LIFE_SECONDS, is_served })
}

/// Finds a node by its id or its name.
fn find(cluster: &Cluster, text: &str) -> Result<NodeId> {
    let nodes = cluster.nodes();
    let by_id = Uuid::parse_str(text).ok();
    if let Some(node) = by_id.and_then(|id| nodes.iter().find(|node| node.id.0 == id)) {
        return Ok(node.id);
    }
    let named: Vec<NodeId> =
        nodes.iter().filter(|node| node.name == text).map(|node| node.id).collect();
    match named[..] {
        [id] => Ok(id),
        [] => {
            let what = "there is none in the cluster; `spindle node list` shows all";
            Err(Error::new(ErrorKind::NotFound, what))
        }
        _ => {
            let what = format!("{} nodes have that name; give an id: {}", named.len(), ids(&named));
            Err(Error::new(ErrorKind::Invalid, what))
        }
    }
}

fn ids(nodes: &[NodeId]) -> String {
    nodes.iter().map(NodeId::to_string).collect::<Vec<_>>().join(", ")
}

fn nodes_info(cluster: &Cluster, is_served: bool) -> NodesInfo {
    let mut nodes: Vec<NodeInfo> =
        cluster.nodes().into_iter().map(|node| node_info(cluster, is_served, node)).collect();
    nodes.sort_by(|a, b| (&a.name, &a.id).cmp(&(&b.name, &b.id)));
    let mut warnings: Vec<String> = cluster.conflicts().iter().map(conflict_line).collect();
    if !is_admitted(cluster) {
        warnings.push(format!(
            "this node, {}, was removed from the cluster: delete its directory `node`, and join \
             again with a new token",
            cluster.node_name()
        ));
    }
    NodesInfo { cluster: cluster.cluster_id().to_string(), is_served, nodes, warnings }
}

/// Describes a node of a cluster.
pub(crate) fn node_info(cluster: &Cluster, is_served: bool, node: Node) -> NodeInfo {
    let is_this = node.id == cluster.node_id();
    let count = (is_served && !is_this).then(|| cluster.connection_count(node.id) as u64);
    NodeInfo {
        name: node.name,
        id: node.id.to_string(),
        addresses: node.addresses,
        zone: node.zone,
        is_this,
        connection_count: count,
    }
}

fn conflict_line(conflict: &Conflict) -> String {
    match conflict {
        Conflict::SameName { name, nodes } => format!(
            "{} nodes are called {name}: remove all but one by their ids, and join them again under \
             other names: {}",
            nodes.len(),
            ids(nodes)
        ),
        Conflict::LaterSignature { node, signer, is_removal: false } => format!(
            "node {node} does not count as a node, because node {signer}, which admitted it, had \
             been removed: let it join again with a token of another node"
        ),
        Conflict::LaterSignature { node, signer, is_removal: true } => format!(
            "node {node} is still in the cluster, because node {signer}, which removed it, had been \
             removed itself: remove it again if it is to go"
        ),
    }
}
