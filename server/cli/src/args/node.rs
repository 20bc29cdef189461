//! Commands about the nodes of a cluster, and the requests that they send.
//!
//! Invariant: a join token is a [`Secret`] from the moment it is read.

use super::PoolArgs;
use api::Request;
use api::key::Secret;
use api::node::NodeRequest;
use clap::{Args, Subcommand};
use std::convert::Infallible;

/// Commands about the nodes of a cluster.
#[derive(Clone, Debug, Subcommand)]
pub enum NodeCommand {
    /// Found a cluster with this machine as its first node, and print the command for the next one
    Init {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// The new node.
        #[command(flatten)]
        node: NewNodeArgs,
    },
    /// Join a cluster with a token that one of its nodes has issued
    ///
    /// A token admits one node, and expires after an hour, so it may be an argument even where
    /// other users can read the arguments of processes. With `-`, the first line of standard input
    /// is the token
    Join {
        /// The token, or `-` to read it from standard input
        #[arg(value_parser = secret)]
        token: Secret,
        /// Do not ask for the pool's key: a data node stores fragments, which it cannot read
        #[arg(long)]
        without_key: bool,
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// The new node.
        #[command(flatten)]
        node: NewNodeArgs,
    },
    /// Print a token with which another machine can join within an hour
    Token {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// List the nodes of the cluster, with their addresses and connections
    List {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Remove another node for good, and close its connections
    ///
    /// Its machine can join again only from a directory without `node/`
    Remove {
        /// Name or id of the node
        node: String,
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
}

/// A node to make.
#[derive(Clone, Debug, Args)]
pub struct NewNodeArgs {
    /// Address where the daemon listens, and where the other nodes reach it; may be repeated
    #[arg(long, value_name = "HOST:PORT", required = true)]
    pub address: Vec<String>,
    /// Name of the node; the machine's host name by default
    #[arg(long)]
    pub name: Option<String>,
    /// Zone of the node, such as a data center; traffic within and across zones is counted
    #[arg(long)]
    pub zone: Option<String>,
}

#[expect(clippy::unnecessary_wraps, reason = "clap takes a parser that may fail")]
fn secret(text: &str) -> Result<Secret, Infallible> {
    Ok(Secret::new(text.to_owned()))
}

impl NodeCommand {
    /// Returns the request; `None` for a command about the directory itself.
    pub(super) fn request(&self) -> Option<(&PoolArgs, Request)> {
        let (pool, request) = match self {
            NodeCommand::Init { .. } | NodeCommand::Join { .. } => return None,
            NodeCommand::Token { pool } => (pool, NodeRequest::Token {}),
            NodeCommand::List { pool } => (pool, NodeRequest::List {}),
            NodeCommand::Remove { node, pool } => {
                (pool, NodeRequest::Remove { node: node.clone() })
            }
        };
        Some((pool, Request::Node(request)))
    }
}
