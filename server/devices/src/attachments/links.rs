//! Links to devices, with names that do not depend on the number that the kernel chooses.
//!
//! Invariant: a link that leads to a device of another pool is neither replaced nor removed.

use super::Attachments;
use crate::udev;
use crate::volumes::Volumes;
use block::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

impl<V: Volumes> Attachments<V> {
    /// Device that the link of a volume leads to, if it exists and is not `own`. It then belongs to
    /// another pool of the same name.
    fn linked_elsewhere(&self, name: &str, own: Option<&Path>) -> Option<PathBuf> {
        let link = self.links.join(name);
        let device = udev::device_of(&link)?;
        (Some(&*device) != own && udev::is_of(&link, &device)).then_some(device)
    }

    pub(super) fn check_link(&self, name: &str) -> Result<()> {
        let Some(device) = self.linked_elsewhere(name, None) else { return Ok(()) };
        let what = format!(
            "attach volume {name}: {} leads to {}, which is not this pool's; detach that, or tell the pools \
             apart by `name` in spindle.toml",
            self.links.join(name).display(),
            device.display()
        );
        Err(Error::new(ErrorKind::Busy, what))
    }

    /// Makes a link with a stable name, for people and `fstab`.
    pub(super) fn link(&self, name: &str, device: &Path) {
        let link = self.links.join(name);
        if let Some(other) = self.linked_elsewhere(name, Some(device)) {
            let error = format!("it leads to {}, which is not this pool's", other.display());
            tracing::warn!(link = %link.display(), error, "no link to a device was made");
            return;
        }
        let made = std::fs::create_dir_all(&self.links).and_then(|()| {
            let fresh = self.links.join(format!(".{name}.new"));
            let _ = std::fs::remove_file(&fresh); // left by a daemon that ended here
            std::os::unix::fs::symlink(device, &fresh)?;
            std::fs::rename(&fresh, &link)
        });
        if let Err(error) = made {
            tracing::warn!(link = %link.display(), %error, "no link to a device was made");
        }
        udev::forget(&link, Some(device)); // an earlier link may have been removed by others
        udev::tell(&link, device);
    }

    /// Removes the link of a volume if it leads to its `device`, or nowhere.
    pub(super) fn unlink(&self, name: &str, device: Option<&Path>) {
        let link = self.links.join(name);
        if self.linked_elsewhere(name, device).is_some() {
            return;
        }
        udev::forget(&link, None);
        match std::fs::remove_file(&link) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(link = %link.display(), %error, "the link to a device stays");
            }
            _ => {}
        }
        let _ = std::fs::remove_dir(&self.links); // once it is empty
    }
}
