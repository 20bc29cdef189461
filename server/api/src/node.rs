//! The nodes of a cluster, and the place of this directory among them.
//!
//! Invariant: a join token is a [`Secret`] until it is printed for the person who asked for it.

use crate::key::Secret;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A request about the nodes of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "action", deny_unknown_fields)]
pub enum NodeRequest {
    /// Issues a token that admits one node.
    Token {},
    /// Lists the nodes.
    List {},
    /// Removes a node for good.
    Remove {
        /// Its name or its id.
        node: String,
    },
}

/// A node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// Its name.
    pub name: String,
    /// Its id, a UUID.
    pub id: String,
    /// `HOST:PORT` of each of its addresses.
    pub addresses: Vec<String>,
    /// Label of its zone, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// It is the node that answers.
    pub is_this: bool,
    /// Open connections between it and this node; absent for this node, and if no daemon serves this
    /// node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection_count: Option<u64>,
}

/// The nodes of a cluster, as this node knows them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodesInfo {
    /// Id of the cluster, a UUID.
    pub cluster: String,
    /// A daemon serves this node to the others.
    pub is_served: bool,
    /// Sorted by name.
    pub nodes: Vec<NodeInfo>,
    /// Matters that an operator should settle, one line each.
    pub warnings: Vec<String>,
}

/// A token that admits one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenInfo {
    /// The word that the joining machine needs.
    pub token: Secret,
    /// Seconds for which it is valid.
    pub valid_seconds: u64,
    /// A daemon serves this node, so that the token can be used at once.
    pub is_served: bool,
}

/// A cluster that was founded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterFounded {
    /// Id of the cluster, a UUID.
    pub cluster: String,
    /// Its first node.
    pub node: NodeInfo,
    /// The token for the next machine.
    pub token: TokenInfo,
    /// A daemon runs on the directory, and has to be restarted to serve the node.
    pub is_restart_needed: bool,
}

/// A cluster that this directory has joined.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterJoined {
    /// Id of the cluster, a UUID.
    pub cluster: String,
    /// This node.
    pub node: NodeInfo,
    /// Number of nodes, this one included.
    pub node_count: u64,
    /// A daemon runs on the directory, and has to be restarted to serve the node.
    pub is_restart_needed: bool,
    /// The file with the pool's key, which the issuer of the token has sent; absent if there was one, or the issuer
    /// has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_file: Option<PathBuf>,
}

/// The place of a directory in its cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Name of this node.
    pub name: String,
    /// Its id, a UUID.
    pub id: String,
    /// Id of the cluster, a UUID.
    pub cluster: String,
    /// Number of nodes, this one included.
    pub node_count: u64,
    /// The cluster has this node: it was not removed.
    pub is_admitted: bool,
    /// A daemon serves this node to the others.
    pub is_served: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Reply;

    #[test]
    fn tokens_are_not_in_debug_texts() {
        let token = Secret::new("spindlehunter2".to_owned());
        let reply = Reply::NodeToken(TokenInfo { token, valid_seconds: 3600, is_served: true });
        assert!(!format!("{reply:?}").contains("hunter2"));
    }
}
