//! The state of a data node.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A data node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DnodeInfo {
    /// Version of the program.
    pub version: String,
    /// Name of the node.
    pub name: String,
    /// Its id, a UUID.
    pub id: String,
    /// Id of its cluster, a UUID.
    pub cluster: String,
    /// Its drives, in the order in which they are configured.
    pub drives: Vec<DriveInfo>,
}

/// A drive of a data node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveInfo {
    /// The URL with which pools name it.
    pub url: String,
    /// Its directory.
    pub dir: PathBuf,
    /// Its media group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The label of its failure domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Why it is away, or the cause of its last failure, while it fails.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Bytes that it can store.
    pub capacity_bytes: u64,
    /// Bytes that it stores.
    pub used_bytes: u64,
    /// Bytes that it still takes.
    pub available_bytes: u64,
    /// Pools that have a folder on it.
    pub pool_count: u64,
    /// Why its disk should be replaced; absent if none is known to need it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wear: Option<String>,
}
