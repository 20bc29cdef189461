//! Tells udev and systemd about a device, so that units and `fstab` can wait for its link
//! (`packaging/60-spindle.rules`).
//!
//! Invariants:
//! - Nothing depends on it: the link is made even without udev.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

/// Folder that the rules read. It has one file per device, named like the device, with
/// `SPINDLE_LINK=` and a path in `/dev`.
const DEVICES: &str = "/run/spindle/devices";

/// Records the link of a device, and makes the kernel announce the device again.
pub(crate) fn announce(link: &Path, device: &Path) {
    let (Some(name), Ok(link)) = (device.file_name(), link.strip_prefix("/dev")) else { return };
    let announced = std::fs::create_dir_all(DEVICES).and_then(|()| {
        let text = format!("SPINDLE_LINK={}\n", link.display());
        let file = Path::new(DEVICES).join(name);
        // Do not rewrite it without a change: udev may be reading it, and takes an empty file for
        // no link.
        if recorded_link(&file).as_deref() != Some(&*Path::new("/dev").join(link)) {
            std::fs::write(file, text)?;
        }
        announce_again(name)
    });
    if let Err(error) = announced {
        tracing::debug!(device = %device.display(), %error, "could not announce a device to udev");
    }
}

/// Makes the kernel announce a device, which udev then looks at again.
fn announce_again(name: &OsStr) -> io::Result<()> {
    std::fs::write(Path::new("/sys/block").join(name).join("uevent"), "change\n")
}

/// Reports whether a device exists and no other link is recorded for it.
pub(crate) fn is_of(link: &Path, device: &Path) -> bool {
    let Some(name) = device.file_name() else { return false };
    let system = Path::new("/sys/block").join(name);
    // The nbd driver keeps devices that are not connected.
    let is_idle = name.to_string_lossy().starts_with("nbd") && !system.join("pid").exists();
    if !system.exists() || is_idle {
        return false;
    }
    recorded_link(&Path::new(DEVICES).join(name)).is_none_or(|recorded| recorded == link)
}

/// Reads the link from a file written by [`announce`].
fn recorded_link(file: &Path) -> Option<PathBuf> {
    let text = std::fs::read_to_string(file).ok()?;
    Some(Path::new("/dev").join(text.trim_end().strip_prefix("SPINDLE_LINK=")?))
}

/// Device that a link leads to. The links that udev makes are relative to their own directory.
pub(crate) fn device_of(link: &Path) -> Option<PathBuf> {
    let device = std::fs::read_link(link).ok()?;
    Some(Path::new("/dev").join(device.file_name()?))
}

/// Removes the link of a device that goes or has gone. It would lead nowhere, or to another
/// program's device that gets the same number.
pub(crate) fn gone(device: &Path) {
    let Some(name) = device.file_name() else { return };
    let file = Path::new(DEVICES).join(name);
    if let Some(link) = recorded_link(&file)
        && device_of(&link).as_deref() == Some(device)
    {
        let _ = std::fs::remove_file(link); // udev may have been faster
    }
    let _ = std::fs::remove_file(file); // there may be none
}

/// Like [`gone`], for a device whose end the kernel has announced already. The nbd driver keeps the
/// device, and udev may be making the link of a record that it read before, so it has to look again.
pub(crate) fn gone_already(device: &Path) {
    gone(device);
    if let Some(name) = device.file_name() {
        let _ = announce_again(name); // the ublk driver keeps no device
    }
}

/// Removes the records of a link that is about to go. With udev it may have gone already, together
/// with its device. The record of device `but` stays.
pub(crate) fn forget(link: &Path, but: Option<&Path>) {
    let files = std::fs::read_dir(DEVICES).into_iter().flatten().flatten();
    let is_meant = |file: &PathBuf| {
        recorded_link(file).as_deref() == Some(link)
            && file.file_name() != but.and_then(Path::file_name)
    };
    for file in files.map(|entry| entry.path()).filter(is_meant) {
        let _ = std::fs::remove_file(file); // another daemon may record the same link
    }
}
