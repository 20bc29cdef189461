//! Links to devices that keep their names, whatever number the kernel chooses.
//!
//! Invariant: a link that leads to a device of another pool is neither replaced nor removed.

use super::{Attachments, udev};
use block::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

impl Attachments {
    /// The device that the link of a volume leads to, where it is there and is not `own`: it is that of
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

    /// A link that people and `fstab` can name, whatever number the kernel chose.
    pub(super) fn link(&self, name: &str, device: &Path) {
        let link = self.links.join(name);
        if let Some(other) = self.linked_elsewhere(name, Some(device)) {
            let error = format!("it leads to {}, which is not this pool's", other.display());
            tracing::warn!(link = %link.display(), error, "no link to a device was made");
            return;
        }
        let made = std::fs::create_dir_all(&self.links).and_then(|()| {
            let fresh = self.links.join(format!(".{name}.new"));
            let _ = std::fs::remove_file(&fresh); // of a daemon that ended here
            std::os::unix::fs::symlink(device, &fresh)?;
            std::fs::rename(&fresh, &link)
        });
        if let Err(error) = made {
            tracing::warn!(link = %link.display(), %error, "no link to a device was made");
        }
        udev::forget(&link, Some(device)); // somebody else removed an earlier one
        udev::tell(&link, device);
    }

    /// Takes the link of a volume away that leads to its `device`, or nowhere.
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
