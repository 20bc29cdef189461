//! The document of `spindle demo`.

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
