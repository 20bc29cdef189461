//! Links to the devices of a pool, with names that do not depend on the number that the kernel
//! chooses.
//!
//! Invariant: a link that leads to a device of another pool is neither replaced nor removed.

use crate::udev;
use block::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

/// Directory of the links to devices. Source: udev rules of disks also put their links below
/// `/dev`.
pub(crate) const DIR: &str = "/dev/spindle";

/// The links of a pool.
#[derive(Debug)]
pub(crate) struct Links {
    /// Its own folder of links.
    dir: PathBuf,
}

impl Links {
    /// The links of the pool with a name.
    pub(crate) fn of_pool(name: &str) -> Links {
        Links { dir: Path::new(DIR).join(name) }
    }

    /// Links in another folder.
    #[cfg(test)]
    pub(crate) fn below(dir: PathBuf) -> Links {
        Links { dir }
    }

    /// Path of the link of a volume.
    pub(crate) fn path_of(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Device that the link of a volume leads to, if it exists and is not `own`. It then belongs to
    /// another pool of the same name.
    fn linked_elsewhere(&self, name: &str, own: Option<&Path>) -> Option<PathBuf> {
        let link = self.path_of(name);
        let device = udev::device_of(&link)?;
        (Some(&*device) != own && udev::is_of(&link, &device)).then_some(device)
    }

    /// Checks that the link of a volume does not lead to a device of another pool.
    ///
    /// # Errors
    /// `Busy`: it does.
    pub(crate) fn check(&self, name: &str) -> Result<()> {
        let Some(device) = self.linked_elsewhere(name, None) else { return Ok(()) };
        let what = format!(
            "attach volume {name}: {} leads to {}, which is not this pool's; detach that, or tell the pools \
             apart by `name` in spindle.toml",
            self.path_of(name).display(),
            device.display()
        );
        Err(Error::new(ErrorKind::Busy, what))
    }

    /// Makes a link with a stable name, for people and `fstab`.
    pub(crate) fn make(&self, name: &str, device: &Path) {
        let link = self.path_of(name);
        if let Some(other) = self.linked_elsewhere(name, Some(device)) {
            let error = format!("it leads to {}, which is not this pool's", other.display());
            tracing::warn!(link = %link.display(), error, "could not make the link to a device");
            return;
        }
        let made = std::fs::create_dir_all(&self.dir).and_then(|()| {
            let fresh = self.dir.join(format!(".{name}.new"));
            let _ = std::fs::remove_file(&fresh); // left by a daemon that ended here
            std::os::unix::fs::symlink(device, &fresh)?;
            std::fs::rename(&fresh, &link)
        });
        if let Err(error) = made {
            tracing::warn!(link = %link.display(), %error, "could not make the link to a device");
        }
        udev::forget(&link, Some(device)); // an earlier link may have been removed by others
        udev::announce(&link, device);
    }

    /// Removes the link of a volume if it leads to its `device`, or nowhere.
    pub(crate) fn remove(&self, name: &str, device: Option<&Path>) {
        let link = self.path_of(name);
        if self.linked_elsewhere(name, device).is_some() {
            return;
        }
        udev::forget(&link, None);
        match std::fs::remove_file(&link) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(link = %link.display(), %error, "could not remove the link to a device");
            }
            _ => {}
        }
        let _ = std::fs::remove_dir(&self.dir); // once it is empty
    }
}
