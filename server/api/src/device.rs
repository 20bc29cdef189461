//! Block devices of this machine: volumes that are attached, and clients that have devices
//! elsewhere.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A request about devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "action", deny_unknown_fields)]
pub enum DeviceRequest {
    /// Attaches a volume as a device of this machine's kernel.
    Attach {
        /// Its name.
        name: String,
        /// Options of the device.
        options: AttachOptions,
    },
    /// Removes the device of a volume from the kernel.
    Detach {
        /// The volume's name, the link to its device, or the device.
        target: String,
        /// Removes it even if it is in use; its users then get errors.
        #[serde(default)]
        force: bool,
    },
    /// Lists the attached volumes.
    List {},
}

/// Kernel driver of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Driver {
    /// The ublk driver.
    #[default]
    Ublk,
    /// The kernel's client of the NBD protocol.
    Nbd,
}

impl Driver {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
    fn is_ublk(&self) -> bool {
        *self == Driver::Ublk
    }
}

/// Options of an attached volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachOptions {
    /// Kernel driver.
    #[serde(default, skip_serializing_if = "Driver::is_ublk")]
    pub driver: Driver,
    /// ublk: hardware queues of the device, each with a thread; 0 in a request lets the daemon
    /// choose. nbd: connections.
    pub queue_count: u16,
    /// ublk: requests in flight per queue. nbd: the kernel's 128.
    pub queue_depth: u16,
    /// 512 or 4096 bytes; nbd: also 1024 and 2048.
    pub logical_block_bytes: u32,
    /// NBD clients may write to the volume, too.
    pub is_shared: bool,
    /// nbd: time that requests wait while no daemon serves them, before they fail. ublk: 0, they
    /// wait for ever.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub dead_timeout_seconds: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// An attached volume in reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentInfo {
    /// Name of the volume.
    pub volume: String,
    /// The block device; absent if it is not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<PathBuf>,
    /// The link with a stable name that leads to it.
    pub link: PathBuf,
    /// The options with which it was attached.
    pub options: AttachOptions,
    /// The device has an exclusive user: a mounted file system, swap, a RAID.
    pub is_in_use: bool,
    /// Read requests since this daemon began to serve it.
    pub read_count: u64,
    /// Write requests since this daemon began to serve it.
    pub write_count: u64,
    /// Flush requests since this daemon began to serve it.
    pub flush_count: u64,
    /// Discard requests since this daemon began to serve it. They include requests to write zeroes
    /// if the driver counts those as discards.
    pub discard_count: u64,
    /// Bytes read since this daemon began to serve it.
    pub read_bytes: u64,
    /// Bytes of write requests since this daemon began to serve it, including requests that failed.
    pub written_bytes: u64,
    /// Requests that failed.
    pub failure_count: u64,
    /// Reason why it is not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// A device of this machine for an export elsewhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteDeviceInfo {
    /// Path of the device.
    pub device: PathBuf,
    /// Addresses of the export that the device was made with, in the user's order.
    pub addresses: Vec<String>,
    /// The address in use; absent while none is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// A process serves the device; absent if that cannot be found out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_served: Option<bool>,
}

/// A client on another machine, or another program on this one, that has a volume attached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientInfo {
    /// Name of the volume.
    pub volume: String,
    /// Label that the client gives itself.
    pub label: String,
    /// Other writers are allowed.
    pub is_shared: bool,
    /// Number of open connections.
    pub connection_count: u64,
    /// Seconds since 1970.
    pub attached_at: u64,
}
