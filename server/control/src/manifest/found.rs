//! The lock of a directory. Remembers what the directory held before a command took it, and
//! restores that state if the command was refused.
//!
//! Invariants:
//! - Only files that this process has made are removed, and only under the lock, while they are not
//!   in use.
//! - Once a pool was opened from here, or an opening was tried, nothing is removed.

use super::node_dir::{NODE, NODE_BACKUP, NodeDir, make_private_dir};
use block::{Error, ErrorKind, Result};
use rustix::fs::FlockOperation;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

const LOCK: &str = "lock";

/// Contents of the directory before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    is_dir: bool,
    is_lock: bool,
    is_identity: bool,
}

impl Found {
    pub fn look(dir: &Path) -> Found {
        let has = |name: &str| dir.join(name).symlink_metadata().is_ok();
        Found {
            is_dir: dir.is_dir(),
            is_lock: has(LOCK),
            is_identity: has(NODE) || has(NODE_BACKUP),
        }
    }
}

impl Drop for NodeDir {
    fn drop(&mut self) {
        let file = self.file.lock();
        if self.found.is_identity || file.pool.is_some() || !file.attempts.is_empty() {
            return;
        }
        // Ignore failures: a file that stays is useless but harmless.
        for name in [NODE, NODE_BACKUP] {
            let _ = std::fs::remove_file(self.path().join(name));
        }
        if !self.found.is_lock {
            // A process that waits for the lock checks again once it has it.
            let _ = std::fs::remove_file(self.path().join(LOCK));
        }
        if !self.found.is_dir {
            let _ = std::fs::remove_dir(self.path()); // only an empty one goes
        }
    }
}

/// Takes `DIR/lock`. The kernel releases it when the process ends, in whatever way.
pub(super) fn lock(dir: &Path) -> Result<File> {
    loop {
        let file = lock_once(dir)?;
        // A lock file that a refused command has removed meanwhile does not exclude anyone.
        if file.metadata().is_ok_and(|metadata| metadata.nlink() > 0) {
            return Ok(file);
        }
        make_private_dir(dir).map_err(|error| {
            Error::with_source(ErrorKind::Io, format!("open directory {}", dir.display()), error)
        })?;
    }
}

fn lock_once(dir: &Path) -> Result<File> {
    let path = dir.join(LOCK);
    let failed = |error: std::io::Error| {
        Error::with_source(ErrorKind::Io, format!("lock {}", path.display()), error)
    };
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(failed)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut pid = String::new();
            let _ = (&file).take(32).read_to_string(&mut pid); // only for the message
            return Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "directory {} is in use by process {}; stop that one first",
                    dir.display(),
                    if pid.trim().is_empty() { "(unknown)" } else { pid.trim() }
                ),
            ));
        }
        Err(error) => return Err(failed(error.into())),
    }
    file.set_len(0).map_err(failed)?;
    file.seek(SeekFrom::Start(0)).map_err(failed)?;
    writeln!(file, "{}", std::process::id()).map_err(failed)?;
    Ok(file)
}
