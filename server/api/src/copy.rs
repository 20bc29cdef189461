//! Copies of a pool in other stores.

use crate::is_false;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A request about copies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "action", deny_unknown_fields)]
pub enum CopyRequest {
    /// Starts copying the pool to another store. `Busy` if that is not empty, or is another pool's.
    Add {
        /// The copy.
        copy: NewCopy,
    },
    /// Ends a copy; its objects stay.
    Remove {
        /// URL of the copy.
        url: String,
    },
    /// Shows the state of the copies.
    List {},
    /// Waits until a copy has everything that was written before.
    Sync {
        /// URL of the copy.
        url: String,
    },
}

/// A copy to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewCopy {
    /// URL of the copy, without credentials.
    pub url: String,
    /// Prefix of the variables that hold settings and credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_prefix: Option<String>,
    /// Seconds from the start of one recovery point to the start of the next.
    pub interval_seconds: u64,
    /// Recovery points are made only when snapshots were made or removed.
    #[serde(default)]
    pub is_snapshots_only: bool,
    /// Maximum bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// Names of the volumes to copy; empty for all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<String>,
    /// Key file on the machine of the daemon that alone opens the copy. It is created if it is
    /// missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_file: Option<PathBuf>,
    /// Replaces the copy's dedicated key if it has one; the old key stops working.
    #[serde(default, skip_serializing_if = "is_false")]
    pub is_key_replaced: bool,
    /// Seconds since 1970.
    pub created_at: u64,
}

/// A copy in reports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyInfo {
    /// URL of the copy.
    pub url: String,
    /// Prefix of the variables with settings and credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_prefix: Option<String>,
    /// Seconds from the start of one recovery point to the start of the next.
    pub interval_seconds: u64,
    /// Recovery points are made only when snapshots were made or removed.
    pub is_snapshots_only: bool,
    /// Maximum bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// It has a dedicated key: the keys of the pool do not open it.
    pub has_dedicated_key: bool,
    /// Names of the volumes that it contains; absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<Vec<String>>,
    /// Seconds since 1970.
    pub created_at: u64,
    /// A daemon keeps it up to date; otherwise the fields below are unknown.
    pub is_running: bool,
    /// Newest complete recovery point; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery_point: Option<RecoveryPointInfo>,
    /// Seconds by which it is behind the pool; 0 if it has everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lag_seconds: Option<u64>,
    /// Estimated bytes written to the pool since the recovery point.
    pub lag_bytes: u64,
    /// It may have keys of volumes that were destroyed since.
    pub has_destroyed_keys: bool,
    /// Progress of the current pass, in thousandths.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass_permille: Option<u64>,
    /// Bytes copied since the start.
    pub copied_bytes: u64,
    /// Objects copied since the start.
    pub copied_count: u64,
    /// Objects deleted in the copy since the start.
    pub deleted_count: u64,
    /// Objects there that no newer recovery point needs but that are not deleted yet.
    pub waiting_count: u64,
    /// Segments that were damaged, or missing, in the pool's store.
    pub damaged_count: u64,
    /// Reason why it is not being brought up to date.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Duration of the failure in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing_seconds: Option<u64>,
}

/// A complete recovery point of a copy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryPointInfo {
    /// Its number, counting up.
    pub number: u64,
    /// Time at which the pool was as it is there, in seconds since 1970.
    pub as_of: u64,
    /// It contains everything in the pool's history up to here.
    pub destaged_lsn: u64,
    /// Number of segments.
    pub segment_count: u64,
    /// Bytes of the segments.
    pub segment_bytes: u64,
    /// Number of volumes that are behind the others in it.
    pub stalled_count: u64,
}
