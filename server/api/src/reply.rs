//! All replies.
//!
//! Invariant: the field `reply` of the JSON names the shape of the document.

use crate::copy::CopyInfo;
use crate::device::{AttachmentInfo, ClientInfo, RemoteDeviceInfo};
use crate::dnode::DnodeInfo;
use crate::doctor::DoctorInfo;
use crate::key::{Secret, SlotKind};
use crate::member::{MemberAdded, MembersInfo};
use crate::node::{NodesInfo, TokenInfo};
use crate::pool::{FsckInfo, MoveInfo};
use crate::scrub::ScrubInfo;
use crate::snapshot::{DiffInfo, ScheduleInfo, SnapshotInfo};
use crate::status::{DataStoresInfo, StatusInfo};
use crate::volume::{RecoveredInfo, VolumeInfo};
use serde::{Deserialize, Serialize};

/// A reply to a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "reply")]
pub enum Reply {
    /// One volume.
    Volume(VolumeInfo),
    /// Several volumes.
    Volumes {
        /// Sorted by name.
        volumes: Vec<VolumeInfo>,
    },
    /// A volume that was made from a log that the pool went on without.
    Recovered(RecoveredInfo),
    /// Snapshots.
    Snapshots {
        /// Sorted by volume and age.
        snapshots: Vec<SnapshotInfo>,
    },
    /// A schedule of snapshots, and its next actions.
    Schedule(ScheduleInfo),
    /// Differences between two snapshots.
    SnapshotDiff(DiffInfo),
    /// Copies in other stores.
    Copies {
        /// In the order in which they were added.
        copies: Vec<CopyInfo>,
    },
    /// State of the scrub.
    Scrub(ScrubInfo),
    /// The state of the pool.
    Status(Box<StatusInfo>),
    /// The data stores.
    DataStores(Box<DataStoresInfo>),
    /// Members of the write log.
    Members(MembersInfo),
    /// A new member of the write log.
    MemberAdded(MemberAdded),
    /// A hand-over of the pool.
    Moved(MoveInfo),
    /// The request was carried out.
    Done {
        /// Result, in a sentence.
        message: String,
    },
    /// Findings of a walk of the pool.
    Fsck(FsckInfo),
    /// A recovery key, printed only this once.
    RecoveryKey {
        /// The key.
        key: Secret,
    },
    /// A volume that is attached.
    Attached(AttachmentInfo),
    /// Volumes that are attached.
    Attachments {
        /// Sorted by name.
        attachments: Vec<AttachmentInfo>,
        /// Clients on other machines, or other programs on this one, that have devices.
        clients: Vec<ClientInfo>,
    },
    /// Devices of this machine for exports elsewhere.
    RemoteDevices {
        /// Sorted by device.
        devices: Vec<RemoteDeviceInfo>,
    },
    /// The nodes of the cluster.
    Nodes(NodesInfo),
    /// The state of a data node.
    Dnode(DnodeInfo),
    /// The findings of the doctor.
    Doctor(Box<DoctorInfo>),
    /// A token that admits a node, printed only this once.
    NodeToken(TokenInfo),
    /// The key was replaced.
    KeyRotated {
        /// Kind of the secret that opens the pool now.
        kind: SlotKind,
        /// Action to take from now on.
        message: String,
    },
}
