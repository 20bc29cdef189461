//! All requests, by noun.
//!
//! Invariant: a request names one noun and one action on it; the action carries all arguments.

use crate::copy::CopyRequest;
use crate::data::DataRequest;
use crate::device::DeviceRequest;
use crate::doctor::DoctorRequest;
use crate::key::KeyRequest;
use crate::node::NodeRequest;
use crate::pool::PoolRequest;
use crate::restore::RestoreRequest;
use crate::scrub::ScrubRequest;
use crate::snapshot::SnapshotRequest;
use crate::volume::VolumeRequest;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Longest time that a client waits for an ordinary reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest time that a client waits for a reply to a request that moves data.
const DATA_TIMEOUT: Duration = Duration::from_secs(3600);

/// A request to the daemon of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// About the pool as a whole.
    Pool(PoolRequest),
    /// About volumes.
    Volume(VolumeRequest),
    /// About snapshots and their schedules.
    Snapshot(SnapshotRequest),
    /// About copies of the pool in other stores.
    Copy(CopyRequest),
    /// About the data stores.
    Data(DataRequest),
    /// About the restore that made the pool.
    Restore(RestoreRequest),
    /// About the scrub.
    Scrub(ScrubRequest),
    /// About keys.
    Key(KeyRequest),
    /// About block devices of this machine.
    Device(DeviceRequest),
    /// About the nodes of the cluster.
    Node(NodeRequest),
    /// About risks.
    Doctor(DoctorRequest),
}

impl Request {
    /// Returns the longest time for which a client should wait for the reply. Some requests wait
    /// until the store has everything that is in the log.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        match self {
            Request::Pool(
                PoolRequest::Drain {}
                | PoolRequest::Stop {}
                | PoolRequest::Fsck {}
                | PoolRequest::AddMember { .. }
                | PoolRequest::ReplaceMember { .. }
                | PoolRequest::Move { .. }
                | PoolRequest::RepairCounts { .. },
            )
            | Request::Volume(VolumeRequest::Clone { .. } | VolumeRequest::Recover { .. })
            | Request::Snapshot(SnapshotRequest::Rollback { .. })
            | Request::Doctor(DoctorRequest::Examine { .. }) => DATA_TIMEOUT,
            _ => REPLY_TIMEOUT,
        }
    }
}
