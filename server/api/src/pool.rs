//! A pool as a whole: its daemon, its contents in the store, and its removal.

use crate::member::Degraded;
use serde::{Deserialize, Serialize};

/// A request about the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "action", deny_unknown_fields)]
pub enum PoolRequest {
    /// Shows the state of the pool.
    Status {},
    /// Moves everything to the store, and answers when it is there.
    Drain {},
    /// Verifies everything in the store. Changes nothing.
    Fsck {},
    /// Corrects the counts of live blocks of these segments, as reported by `Fsck`.
    RepairCounts {
        /// Their numbers.
        segments: Vec<u64>,
    },
    /// Stops the daemon in order. The answer comes before it has ended.
    Stop {},
    /// Lists the members of the write log.
    Members {},
    /// Makes a node a member of the write log, and answers once it counts.
    AddMember {
        /// Name or id of the node.
        node: String,
        /// Also if the network to it is far slower than that to the other members.
        #[serde(default)]
        force: bool,
    },
    /// Makes a node a member of the write log in place of another one, and answers once it counts.
    ReplaceMember {
        /// Name or id of the node whose place it takes.
        node: String,
        /// Name or id of the new node; absent if it has the name of the other.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        with: Option<String>,
        /// Also if the network to it is far slower than that to the other members.
        #[serde(default)]
        force: bool,
    },
    /// Removes a node from the members of the write log.
    RemoveMember {
        /// Name or id of the node.
        node: String,
    },
    /// Sets the conduct of the owner without a quorum of the write log.
    SetDegraded {
        /// The conduct.
        degraded: Degraded,
    },
    /// Lets this node, which is a member, take the pool over. The answer comes before it has.
    TakeOver {},
    /// Hands the pool over to a node, which is a member. The answer comes once the hand-over has begun.
    Move {
        /// Name or id of the node.
        node: String,
    },
    /// Shows how the last hand-over from this node went.
    LastMove {},
}

/// A hand-over of the pool to another node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveInfo {
    /// Name of the node that gets the pool.
    pub node: String,
    /// Milliseconds from the moment at which the old owner takes no more requests until the new one
    /// serves the pool; absent before it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_ms: Option<u64>,
    /// Why the node does not serve the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A daemon, or a command that serves, answers on all of its endpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadyInfo {
    /// Always true.
    pub is_ready: bool,
    /// URIs and paths that clients connect to, or a device and the link to it.
    pub endpoints: Vec<String>,
}

/// Findings of `spindle fsck`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsckInfo {
    /// Volumes that are present or can be restored.
    pub volume_count: u64,
    /// Segments that the metadata names.
    pub segment_count: u64,
    /// Bytes of their objects, all of them read.
    pub object_bytes: u64,
    /// Frames verified.
    pub frame_count: u64,
    /// Map pages walked.
    pub page_count: u64,
    /// Blocks stored by volumes.
    pub block_count: u64,
    /// Segments that were reclaimed during the check; their contents were not checked again.
    pub reclaimed_count: u64,
    /// Number of problems. 0: the pool is consistent.
    pub problem_count: u64,
    /// The first of them, one sentence each.
    pub problems: Vec<String>,
    /// Numbers of segments with wrong counts of live blocks, to be passed to `RepairCounts`.
    pub miscounted: Vec<u64>,
}

/// A pool that was removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolRemoved {
    /// Its name.
    pub name: String,
    /// Its identity, a UUID.
    pub pool: String,
    /// Time of the removal, in seconds since 1970.
    pub removed_at: u64,
    /// Earliest time of a purge, unless `--now` asks for it.
    pub purge_at: u64,
}

/// A removed pool that was brought back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolRestored {
    /// Its name.
    pub name: String,
    /// Its identity, a UUID.
    pub pool: String,
    /// Volumes in it, without removed ones.
    pub volume_count: u64,
}

/// A pool that was deleted for good.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolPurged {
    /// Its name.
    pub name: String,
    /// Its identity, a UUID.
    pub pool: String,
    /// Objects that this purge deleted.
    pub object_count: u64,
    /// Their bytes.
    pub object_bytes: u64,
}
