//! The documents of `spindle demo`.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Results of the demonstration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DemoInfo {
    /// Directory of the pool.
    pub dir: PathBuf,
    /// Name of its volume.
    pub volume: String,
    /// URIs that clients connect to.
    pub endpoints: Vec<String>,
    /// Data written before the kill, in MiB.
    pub written_mib: u64,
    /// Seconds that writing it took.
    pub write_seconds: f64,
    /// Seconds from the start after the kill until the volume was served.
    pub restart_seconds: f64,
    /// Every acknowledged write was there afterwards. Always true: otherwise the command fails.
    pub is_verified: bool,
    /// Latencies over NBD, 4 KiB, one request at a time.
    pub latencies: Vec<LatencyInfo>,
}

/// Latency of one kind of request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatencyInfo {
    /// Kind of request.
    pub what: String,
    /// Median in microseconds.
    pub median_us: f64,
    /// 99th percentile in microseconds.
    pub p99_us: f64,
}

/// Results of the demonstration on three nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailOverInfo {
    /// Directory of the nodes and their store.
    pub dir: PathBuf,
    /// Name of the volume.
    pub volume: String,
    /// Each node.
    pub nodes: Vec<DemoNodeInfo>,
    /// Name of the node that owned the pool until it was killed.
    pub owner_before: String,
    /// Name of the node that owned it afterwards.
    pub owner_after: String,
    /// Name of the node that the client was connected to.
    pub client_node: String,
    /// Writes of 4 KiB that were acknowledged.
    pub acknowledged_writes: u64,
    /// Writes that the kill left without an answer. Each may be there or not.
    pub unanswered_writes: u64,
    /// Milliseconds from the last answer of one owner to the first answer of the next.
    pub pause_ms: u64,
    /// Blocks with acknowledged writes that held an earlier content.
    pub lost_writes: u64,
    /// Blocks that held anything that was never written there.
    pub wrong_reads: u64,
    /// Nothing was lost or wrong.
    pub is_verified: bool,
    /// Acknowledged batches that the killed node lacked.
    pub missed_batches: u64,
    /// Milliseconds from its start until it had them.
    pub catch_up_ms: u64,
}

/// A node of the demonstration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DemoNodeInfo {
    /// Its name.
    pub name: String,
    /// Its directory.
    pub dir: PathBuf,
    /// URI of the volume by way of this node.
    pub endpoint: String,
    /// Number of its process.
    pub process: u32,
}

/// Results of the demonstration on data nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataNodesInfo {
    /// Directory of the nodes.
    pub dir: PathBuf,
    /// Name of the volume.
    pub volume: String,
    /// Scheme of its segments, such as `4+2`.
    pub scheme: String,
    /// Names of the data nodes, the spare one last.
    pub data_nodes: Vec<String>,
    /// Those that were killed.
    pub killed: Vec<String>,
    /// The one that took the place of the first of them.
    pub spare: String,
    /// Data written, in MiB.
    pub written_mib: u64,
    /// Blocks of 4 KiB that differed from what was written there.
    pub wrong_reads: u64,
    /// Bytes that could not be read.
    pub lost_bytes: u64,
    /// Seconds from the start of the pool with the spare node until no segment lacked a fragment.
    pub rebuild_seconds: f64,
    /// Bytes of fragments that were rebuilt meanwhile.
    pub rebuilt_bytes: u64,
    /// Median of a read of 4 KiB with all data nodes, in microseconds.
    pub read_us_p50_healthy: f64,
    /// Median of a read of 4 KiB whose fragment was decoded from others, in microseconds.
    pub read_us_p50_degraded: f64,
    /// Number of these reads.
    pub degraded_reads: u64,
}
