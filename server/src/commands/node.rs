//! The commands that make a directory a node of a cluster.
//!
//! Invariants:
//! - A mistake in the arguments is found before anything is made or sent.
//! - A token is in no error and no log line.

use super::{Failure, load_pool, usage};
use crate::handlers::node::{node_info, token_info};
use crate::node::environment;
use api::Request;
use api::key::Secret;
use api::node::{ClusterFounded, ClusterJoined, NodeInfo, NodeRequest};
use block::quantities::check_name;
use block::{Error, ErrorKind, Result};
use cli::args::{Cli, NewNodeArgs, NodeCommand, PoolArgs};
use cli::{output, print};
use cluster::admission::{ADDRESS_COUNT_MAX, is_address};
use cluster::{Cluster, NewNode, Token};
use std::io::{BufRead, Read};
use std::path::Path;

/// Bytes of standard input that may hold a token. Chosen by hand: more than the longest token.
const TOKEN_LINE_BYTES_MAX: u64 = 8192;

/// Carries out `node init` or `node join`.
///
/// # Errors
/// The reason why it did not succeed.
pub(super) async fn run(cli: &Cli, command: &NodeCommand) -> Result<(), Failure> {
    match command {
        NodeCommand::Init { pool, node } => init(cli, pool, node).await,
        NodeCommand::Join { token, without_key, pool, node } => {
            join(cli, token, *without_key, pool, node).await
        }
        command => unreachable!("{command:?} is a request"),
    }
}

async fn init(cli: &Cli, pool: &PoolArgs, node: &NewNodeArgs) -> Result<(), Failure> {
    let config = load_pool(pool)?;
    let name = checked_name(node)?;
    let is_restart_needed = is_daemon_running(config.dir()).await;
    let cluster = Cluster::init(config.dir(), new_node(&name, node), environment(&config))
        .map_err(|error| error.context("found a cluster"))?;
    let founded = ClusterFounded {
        cluster: cluster.cluster_id().to_string(),
        node: own_info(&cluster),
        token: token_info(&cluster, false)?,
        is_restart_needed,
    };
    Ok(output::emit(cli.output, &founded, print::cluster_founded)?)
}

async fn join(
    cli: &Cli,
    token: &Secret,
    without_key: bool,
    pool: &PoolArgs,
    node: &NewNodeArgs,
) -> Result<(), Failure> {
    let config = load_pool(pool)?;
    let name = checked_name(node)?;
    let read = match token.expose() {
        "-" => Some(token_of_input()?),
        _ => None,
    };
    let token = read.as_ref().unwrap_or(token).expose();
    Token::parse(token).map_err(Failure::Usage)?;
    let is_restart_needed = is_daemon_running(config.dir()).await;
    let mut environment = environment(&config);
    if without_key {
        environment.key_file = None;
    }
    let wanted = environment.key_file.clone().filter(|path| !path.exists());
    let cluster = Cluster::join(config.dir(), new_node(&name, node), token, environment)
        .await
        .map_err(|error| error.context("join the cluster"))?;
    let joined = ClusterJoined {
        cluster: cluster.cluster_id().to_string(),
        node: own_info(&cluster),
        node_count: cluster.nodes().len() as u64,
        is_restart_needed,
        key_file: wanted.filter(|path| path.exists()),
    };
    Ok(output::emit(cli.output, &joined, print::cluster_joined)?)
}

fn own_info(cluster: &Cluster) -> NodeInfo {
    let own = cluster.nodes().into_iter().find(|node| node.id == cluster.node_id());
    own.map(|own| node_info(cluster, false, own)).unwrap_or_default()
}

fn new_node<'a>(name: &'a str, node: &'a NewNodeArgs) -> NewNode<'a> {
    NewNode { name, addresses: &node.address, zone: node.zone.as_deref() }
}

/// Returns the name of a new node, and checks it, the addresses and the zone.
fn checked_name(node: &NewNodeArgs) -> Result<String, Failure> {
    if node.address.len() > ADDRESS_COUNT_MAX {
        return Err(usage(format!("read --address: a node has at most {ADDRESS_COUNT_MAX}")));
    }
    if let Some(wrong) = node.address.iter().find(|address| !is_address(address)) {
        return Err(usage(format!(
            "read --address {wrong}: write HOST:PORT, like 10.0.0.1:7400 or [fd00::1]:7400"
        )));
    }
    if let Some(zone) = &node.zone {
        check_name("zone", zone).map_err(usage)?;
    }
    let (name, advice) = match &node.name {
        Some(name) => (name.clone(), ""),
        None => {
            let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
            (host, "; give the node a name with --name")
        }
    };
    check_name("node", &name).map_err(|why| usage(format!("{why}{advice}")))?;
    Ok(name)
}

/// Reads the first line of standard input.
fn token_of_input() -> Result<Secret> {
    let mut line = String::with_capacity(8192);
    let read = std::io::stdin().lock().take(TOKEN_LINE_BYTES_MAX).read_line(&mut line);
    let line = Secret::new(line);
    read.map_err(|error| {
        Error::with_source(ErrorKind::Io, "read the token from standard input", error)
    })?;
    Ok(line)
}

/// Tells whether a daemon runs on the directory. It need not be a node, or of this version.
async fn is_daemon_running(dir: &Path) -> bool {
    let asked = cli::client::call(dir, &Request::Node(NodeRequest::List {})).await;
    !matches!(asked, Ok(None))
}
