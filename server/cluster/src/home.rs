//! The lock of `DIR/node`: one process at a time uses a node's files.
//!
//! Invariants:
//! - A process that has the list of a node in memory holds the lock, so no change of another process
//!   is overwritten.
//! - An identity that waits for its list is replaced by no other.

use crate::identity::{Identity, node_dir};
use block::{Error, ErrorKind, Result};
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Returns the path of the list of nodes.
pub fn path_of(dir: &Path) -> PathBuf {
    node_dir(dir).join("cluster.json")
}

/// Whether the directory belongs to a cluster.
#[must_use]
pub fn is_member(dir: &Path) -> bool {
    path_of(dir).exists()
}

/// Refuses a directory that belongs to a cluster.
///
/// # Errors
/// `Busy`.
pub fn refuse_member(dir: &Path) -> Result<()> {
    if !is_member(dir) {
        return Ok(());
    }
    let context = format!(
        "directory {} already belongs to a cluster: choose another, or remove this node on another \
         node and delete {}",
        dir.display(),
        node_dir(dir).display()
    );
    Err(Error::new(ErrorKind::Busy, context))
}

/// Locks the node in `dir` until the file is dropped. The directory `DIR/node` must exist.
///
/// # Errors
/// `Busy` if another process has it; `Io`.
pub fn lock(dir: &Path) -> Result<File> {
    let path = node_dir(dir).join("lock");
    let failed = |error: std::io::Error| {
        Error::with_source(ErrorKind::Io, format!("lock {}", path.display()), error)
    };
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = options.open(&path).map_err(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let context = format!(
                "node {} is in use by another process: a daemon on {}, or another command; try again",
                node_dir(dir).display(),
                dir.display()
            );
            Err(Error::new(ErrorKind::Busy, context))
        }
        Err(error) => Err(failed(error.into())),
    }
}

/// Stores the identity of a node that has no list yet, and locks the node.
///
/// # Errors
/// `Busy` if the directory belongs to a cluster, or another process makes a node of it; `Io`.
pub fn claim(dir: &Path, identity: &Identity) -> Result<File> {
    Identity::make_dir(dir)?;
    let lock = lock(dir)?;
    refuse_member(dir)?;
    match Identity::open(dir) {
        Ok(found) if found.id() != identity.id() => {
            let context =
                format!("another process has made a node of {}: try again", dir.display());
            return Err(Error::new(ErrorKind::Busy, context));
        }
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    identity.store(dir)?;
    Ok(lock)
}
