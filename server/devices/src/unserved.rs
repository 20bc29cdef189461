//! Devices that no process serves: found, and removed from the kernel.
//!
//! Invariant: a device that a process serves is never removed here. Everything here blocks.

use crate::device::path_of;
use crate::locks::{is_served, lock_unserved};
use crate::record::{DeviceRecord, Driver, FILE, read, write};
use crate::{identifiers, in_use, udev};
use block::{Error, ErrorKind, Result, VolumeId};
use std::path::{Path, PathBuf};

/// Describes the device of a volume according to directory `dir`; `None` if it has none. Without
/// `volume`, any volume counts. For a process that has the directory while no daemon runs.
///
/// # Errors
/// `Corrupt`: the list is damaged, or of a later version.
pub fn device_in(dir: &Path, volume: Option<VolumeId>) -> Result<Option<String>> {
    let records = read(&dir.join(FILE))?;
    let is_meant = |record: &&DeviceRecord| volume.is_none_or(|volume| volume.0 == record.volume);
    let Some(record) = records.iter().find(is_meant) else { return Ok(None) };
    let device = record.number.map(|number| path_of(record.options.driver, number));
    let device = device.unwrap_or_else(|| "a device".into());
    Ok(Some(format!("{}, which waits for the daemon", device.display())))
}

/// Removes the device at a path from the kernel, whichever process made it. Returns a message for a
/// person. Blocks.
///
/// # Errors
/// `Busy`: a process serves it. `Invalid`: it is no such device.
pub fn clean_up_device(device: &str) -> Result<String> {
    delete_any(device)?;
    Ok(format!("{device} is removed"))
}

/// Removes the devices that a daemon on `dir` left from the kernel. Returns a message for a person.
/// Blocks. The caller holds the directory, so that no daemon starts meanwhile.
///
/// # Errors
/// `Busy`: a process serves some of the devices, for example if `dir` is a copy: those stay.
pub fn clean_up(dir: &Path) -> Result<String> {
    clean_up_list(&dir.join(FILE), delete)
}

/// Removes the devices of a list with `delete`, and takes each from the list.
fn clean_up_list(
    path: &Path,
    delete: impl Fn(&DeviceRecord) -> Result<Option<PathBuf>>,
) -> Result<String> {
    let mut records = read(path)?;
    let (mut removed, mut left) = (Vec::new(), Vec::new());
    let mut served = Vec::new();
    while let Some(record) = records.pop() {
        match delete(&record) {
            Ok(path) => removed.extend(path.map(|path| path.display().to_string())),
            Err(error) if error.kind() == ErrorKind::Busy => {
                left.push(error.chain());
                served.push(record);
                continue;
            }
            Err(error) => return Err(error),
        }
        write(path, records.iter().chain(&served).cloned().collect())?;
    }
    let removed = (!removed.is_empty()).then(|| format!("{} removed", removed.join(", ")));
    if left.is_empty() {
        return Ok(removed.unwrap_or_else(|| "no device was left".to_owned()));
    }
    left.extend(removed);
    Err(Error::new(ErrorKind::Busy, left.join("; ")))
}

/// Removes the device that an earlier process left for a record from the kernel. Returns the
/// device's path if there was one.
///
/// # Errors
/// `Busy`: a process serves it, for example because `attachments.json` was copied from elsewhere.
pub(crate) fn delete(record: &DeviceRecord) -> Result<Option<PathBuf>> {
    let deleted = delete_unserved(record)?;
    deleted.iter().for_each(|path| udev::gone_already(path));
    Ok(deleted)
}

fn delete_unserved(record: &DeviceRecord) -> Result<Option<PathBuf>> {
    match record.options.driver {
        Driver::Nbd => {
            let identifier = identifiers::of_volume(record.cookie);
            let Some(number) = nbd::kernel::find(&identifier)? else { return Ok(None) };
            let _lock = lock_unserved(&nbd::kernel::block_path(number), &identifier)?;
            let deleted = nbd::kernel::delete(&identifier)?;
            Ok(deleted.map(nbd::kernel::block_path))
        }
        Driver::Ublk => {
            let number = match record.number {
                Some(number) => Some(number),
                None => ublk::find(record.cookie)?,
            };
            let Some(number) = number else { return Ok(None) };
            match ublk::delete(number, Some(record.cookie)) {
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
                Ok(()) => Ok(Some(path_of(Driver::Ublk, number))),
            }
        }
    }
}

/// Removes the device at a path from the kernel, even if another program made it.
///
/// # Errors
/// `Invalid`: it is not the path of a device. `Busy`: a process serves it, or it is in use and its
/// server cannot be determined.
pub(crate) fn delete_any(path: &str) -> Result<()> {
    delete_any_unserved(path)?;
    udev::gone_already(Path::new(path));
    Ok(())
}

fn delete_any_unserved(path: &str) -> Result<()> {
    let number = |prefix: &str| path.strip_prefix(prefix)?.parse::<u32>().ok();
    match (number("/dev/ublkb"), number("/dev/nbd")) {
        (Some(number), _) => ublk::delete(number, None),
        (None, Some(number)) => {
            let identifier = nbd::kernel::identifier_of(number);
            let Some(identifier) = identifier.filter(|text| identifiers::is_ours(text)) else {
                // Another program's device. The program that connected it may have ended while the
                // kernel keeps serving it.
                if in_use::is_in_use(Path::new(path))? {
                    let what = format!(
                        "disconnect {path}: it is in use (`findmnt {path}`, `lsblk {path}` show by what), and not a \
                         device of spindle"
                    );
                    return Err(Error::new(ErrorKind::Busy, what));
                }
                return nbd::kernel::delete_any(number);
            };
            let _lock = lock_unserved(Path::new(path), &identifier)?;
            nbd::kernel::delete(&identifier).map(drop)
        }
        (None, None) => {
            let what =
                format!("clean up {path}: name a device like /dev/ublkb0 or /dev/nbd0, or none");
            Err(Error::new(ErrorKind::Invalid, what))
        }
    }
}

/// Reports whether a device belongs to one of spindle's drivers and its requests wait because no
/// process serves it. False if that cannot be determined.
pub(crate) fn is_waiting(path: &Path) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return false };
    let number = |prefix: &str| name.strip_prefix(prefix)?.parse::<u32>().ok();
    if let Some(number) = number("ublkb") {
        return ublk::is_waiting(number).unwrap_or(false);
    }
    let identifier = number("nbd").and_then(nbd::kernel::identifier_of);
    let Some(identifier) = identifier.filter(|text| identifiers::is_ours(text)) else {
        return false;
    };
    !is_served(&identifier).unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::AttachOptions;

    #[test]
    fn a_device_is_named_by_its_path() {
        for wrong in ["", "db", "/dev/sda", "/dev/nbd", "/dev/nbd0p1", "/dev/ublkbx", "/dev/nbd-1"]
        {
            let error = delete_any(wrong).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{wrong}");
        }
    }

    #[test]
    fn cleanup_keeps_devices_that_a_process_serves() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        let record = |volume| DeviceRecord {
            volume,
            number: Some(volume),
            cookie: 9,
            epoch: 1,
            had_lost_writes: false,
            is_write_through: false,
            options: AttachOptions {
                driver: Driver::Ublk,
                queue_count: 1,
                queue_depth: 64,
                logical_block_bytes: 512,
                is_shared: false,
                dead_timeout_seconds: 0,
            },
        };
        write(&path, vec![record(1), record(2), record(3)]).unwrap();
        let delete = |record: &DeviceRecord| match record.volume {
            2 => Err(Error::new(ErrorKind::Busy, "remove /dev/ublkb2: process 12 serves it")),
            number => Ok(Some(path_of(Driver::Ublk, number))),
        };
        let error = clean_up_list(&path, delete).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        for word in ["process 12 serves it", "/dev/ublkb3, /dev/ublkb1 removed"] {
            assert!(error.to_string().contains(word), "it does not say {word:?}: {error}");
        }
        assert_eq!(read(&path).unwrap(), [record(2)]);
        let none = clean_up_list(&path, |_| Ok(None)).unwrap();
        assert_eq!((none.as_str(), read(&path).unwrap()), ("no device was left", vec![]));
    }
}
