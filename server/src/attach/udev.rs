//! What udev and systemd learn of a device, so that units and `fstab` can wait for its link
//! (`packaging/60-spindle.rules`).
//!
//! Invariants:
//! - Nothing depends on it: where there is no udev, the link is made all the same.

use std::path::{Path, PathBuf};

/// Where the rules look. One file a device, named like it, with `SPINDLE_LINK=` and a path in `/dev`.
const DEVICES: &str = "/run/spindle/devices";

/// Says which link a device has, and has the kernel announce the device again.
pub(super) fn tell(link: &Path, device: &Path) {
    let (Some(name), Ok(link)) = (device.file_name(), link.strip_prefix("/dev")) else { return };
    let told = std::fs::create_dir_all(DEVICES).and_then(|()| {
        let text = format!("SPINDLE_LINK={}\n", link.display());
        let file = Path::new(DEVICES).join(name);
        // Not written anew where nothing changes: udev may be reading it, and takes an empty one for no link.
        if told(&file).as_deref() != Some(&*Path::new("/dev").join(link)) {
            std::fs::write(file, text)?;
        }
        std::fs::write(Path::new("/sys/block").join(name).join("uevent"), "change\n")
    });
    if let Err(error) = told {
        tracing::debug!(device = %device.display(), %error, "udev was not told of a device");
    }
}

/// Whether a device is there, and nobody says that it has another link than this.
pub(super) fn is_of(link: &Path, device: &Path) -> bool {
    let Some(name) = device.file_name() else { return false };
    let system = Path::new("/sys/block").join(name);
    // The nbd driver keeps devices that are not connected.
    let is_idle = name.to_string_lossy().starts_with("nbd") && !system.join("pid").exists();
    if !system.exists() || is_idle {
        return false;
    }
    told(&Path::new(DEVICES).join(name)).is_none_or(|told| told == link)
}

/// The link that a file names, as `tell` wrote it.
fn told(file: &Path) -> Option<PathBuf> {
    let text = std::fs::read_to_string(file).ok()?;
    Some(Path::new("/dev").join(text.trim_end().strip_prefix("SPINDLE_LINK=")?))
}

/// The device that a link leads to. The links that udev makes name it by a path that begins where they lie.
pub(super) fn device_of(link: &Path) -> Option<PathBuf> {
    let device = std::fs::read_link(link).ok()?;
    Some(Path::new("/dev").join(device.file_name()?))
}

/// A device goes, or has gone: its link would lead nowhere, or to another program's device that has its number next.
pub(super) fn gone(device: &Path) {
    let Some(name) = device.file_name() else { return };
    let file = Path::new(DEVICES).join(name);
    if let Some(link) = told(&file)
        && device_of(&link).as_deref() == Some(device)
    {
        let _ = std::fs::remove_file(link); // udev may have been faster
    }
    let _ = std::fs::remove_file(file); // there may be none
}

/// What was told of a link is not true any more: it is about to go. Where there is udev it may have gone already, with its
/// device. What was told of `but` stays.
pub(super) fn forget(link: &Path, but: Option<&Path>) {
    let files = std::fs::read_dir(DEVICES).into_iter().flatten().flatten();
    let is_meant = |file: &PathBuf| {
        told(file).as_deref() == Some(link) && file.file_name() != but.and_then(Path::file_name)
    };
    for file in files.map(|entry| entry.path()).filter(is_meant) {
        let _ = std::fs::remove_file(file); // another daemon's way to say the same
    }
}
