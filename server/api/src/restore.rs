//! Pools that were made from a copy, and the fetching of what they still lack.

use serde::{Deserialize, Serialize};

/// A request about the restore that made the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "action", deny_unknown_fields)]
pub enum RestoreRequest {
    /// Gives up the segments that are missing in the copy that the pool was restored from.
    GiveUpMissing {},
}

/// Origin of a restored pool, and the progress of fetching.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreInfo {
    /// URL of the copy.
    pub url: String,
    /// Number of the recovery point.
    pub recovery_point: u64,
    /// Time at which the copied pool was as it is there, in seconds since 1970.
    pub as_of: u64,
    /// The pool has everything, and does not need the copy any more.
    pub is_complete: bool,
    /// Bytes that are still to be fetched; an upper bound until the metadata is here.
    pub left_bytes: u64,
    /// Bytes fetched since the start.
    pub done_bytes: u64,
    /// Estimated seconds left, from the pace since the start, once there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_seconds: Option<u64>,
    /// Segments that were damaged, or missing, in the copy.
    pub bad_count: u64,
}

/// The result of `spindle restore`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolFromCopy {
    /// URL of the copy.
    pub url: String,
    /// Number of the recovery point.
    pub recovery_point: u64,
    /// Time at which the copied pool was as it is there, in seconds since 1970.
    pub as_of: u64,
    /// Bytes of segments in the recovery point.
    pub segment_bytes: u64,
    /// Volumes that are behind the others in it.
    pub stalled_count: u64,
    /// The snapshot that the volumes show.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Volumes that have no such snapshot, and stay as they are in the recovery point.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without_snapshot: Vec<String>,
    /// New name of the only volume, if it differs from the name in the copy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_name: Option<String>,
    /// Volumes of the recovery point that the pool does not have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub excluded: Vec<String>,
}
