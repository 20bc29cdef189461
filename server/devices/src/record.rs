//! `attachments.json`: the volumes of a pool that are attached to this machine's kernel.
//!
//! Invariants:
//! - A list of a later version, or with unknown contents, is refused: nothing is known about how to
//!   keep a device of an unknown kind safe.

use block::durable_file::write_durably;
use block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Name of the list in the pool's directory.
pub const FILE: &str = "attachments.json";
const VERSION: u32 = 1;

/// Kernel driver of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Driver {
    /// The ublk driver: the shortest way from the kernel to the daemon.
    #[default]
    Ublk,
    /// The client of the NBD protocol that kernels have had for a long time.
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
    /// ublk: hardware queues of the device, each with a thread; 0 in a request to attach lets the
    /// daemon choose. nbd: connections.
    pub queue_count: u16,
    /// ublk: requests in flight per queue. nbd: the kernel's 128.
    pub queue_depth: u16,
    /// 512 or 4096 bytes.
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

/// One attached volume in `attachments.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeviceRecord {
    pub(crate) volume: u32,
    /// The kernel's number of the device; absent until it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) number: Option<u32>,
    /// Number that the kernel keeps with the device, to recognize it later.
    pub(crate) cookie: u64,
    /// Newest epoch of the pool in which this process or an earlier one served the device.
    pub(crate) epoch: u64,
    /// The volume had lost writes before the device was made, so its users have not seen any other
    /// state.
    #[serde(default)]
    pub(crate) had_lost_writes: bool,
    /// The kernel was told that the device has no volatile cache, and never flushes it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) is_write_through: bool,
    pub(crate) options: AttachOptions,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: u32,
    attachments: Vec<DeviceRecord>,
}

pub(crate) fn read(path: &Path) -> Result<Vec<DeviceRecord>> {
    let damaged = |why: String| {
        let what = format!(
            "read {}: {why}. It says which devices of the kernel belong to this pool, and holds no data of \
             volumes; to start without them, move it away, and remove them by name: `spindle attach --cleanup /dev/ublkb0` (or \
             /dev/nbd0; `ls /sys/block` shows all devices)",
            path.display()
        );
        Error::new(ErrorKind::Corrupt, what)
    };
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(damaged(error.to_string())),
    };
    let document: Document =
        serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
    if document.version != VERSION {
        return Err(damaged(format!("its version is {}, not {VERSION}", document.version)));
    }
    Ok(document.attachments)
}

pub(crate) fn write(path: &Path, attachments: Vec<DeviceRecord>) -> Result<()> {
    let document = Document { version: VERSION, attachments };
    let mut bytes = serde_json::to_vec_pretty(&document)
        .map_err(|error| Error::with_source(ErrorKind::Io, "encode attachments", error))?;
    bytes.push(b'\n');
    write_durably(path, &bytes, 0o600)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(driver: Driver, dead_timeout_seconds: u64) -> DeviceRecord {
        let options = AttachOptions {
            driver,
            queue_count: 2,
            queue_depth: 64,
            logical_block_bytes: 512,
            is_shared: false,
            dead_timeout_seconds,
        };
        let (number, cookie) = (Some(7), u64::MAX);
        DeviceRecord {
            volume: 3,
            number,
            cookie,
            epoch: 9,
            had_lost_writes: false,
            is_write_through: false,
            options,
        }
    }

    #[test]
    fn the_list_is_read_back_and_damage_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        assert_eq!(read(&path).unwrap(), []);
        let records = [record(Driver::Ublk, 0), record(Driver::Nbd, 60)];
        write(&path, records.to_vec()).unwrap();
        assert_eq!(read(&path).unwrap(), records);
        let write_through = DeviceRecord { is_write_through: true, ..record(Driver::Ublk, 0) };
        write(&path, vec![write_through.clone()]).unwrap();
        assert_eq!(read(&path).unwrap(), [write_through]);
        write(&path, records.to_vec()).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("\"version\": 1", "\"version\": 2")).unwrap();
        let error = read(&path).unwrap_err();
        assert!(error.to_string().contains("its version is 2"), "{error}");
        std::fs::write(&path, text.replace("\"nbd\"", "\"other\"")).unwrap();
        assert!(read(&path).is_err(), "an unknown driver");
        std::fs::write(&path, &text[..text.len() / 2]).unwrap();
        let error = read(&path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("--cleanup /dev/ublkb0"), "{error}");
    }

    /// The format written before there was another driver.
    #[test]
    fn a_list_without_drivers_is_one_of_ublk() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        let text = r#"{"version": 1, "attachments": [{"volume": 3, "number": 7,
            "cookie": 18446744073709551615, "epoch": 9, "had_lost_writes": false, "options":
            {"queue_count": 2, "queue_depth": 64, "logical_block_bytes": 512, "is_shared": false}}]}"#;
        std::fs::write(&path, text).unwrap();
        assert_eq!(read(&path).unwrap(), [record(Driver::Ublk, 0)]);
    }
}
