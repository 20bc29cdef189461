//! The fence of a pool's folder: the newest epoch whose owner has come, on stable storage.
//!
//! Invariants:
//! - An epoch counts once it is on stable storage, and never falls, also over restarts of the node.
//! - A later epoch waits for the changes of an earlier one that are under way; after that, none of them begins. Only an
//!   absence of the drive ends the wait: what was opened before it is void.

use crate::seeded_bugs::seeded_bugs;
use block::{Epoch, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::{OwnedRwLockReadGuard, RwLock};

/// Name of the file in the folder. Format: docs/format-peer.md.
pub(crate) const FILE: &str = "spindle-fence.json";
const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: u32,
    epoch: u64,
}

/// The fence of a folder.
#[derive(Debug)]
pub(crate) struct Fence {
    path: PathBuf,
    newest: Arc<RwLock<Epoch>>,
}

/// Keeps a later owner from coming while a change is under way.
#[derive(Debug)]
pub(crate) struct Passed {
    _newest: Option<OwnedRwLockReadGuard<Epoch>>,
}

impl Fence {
    /// Reads the fence of the folder `dir`. Waits for the disk.
    ///
    /// # Errors
    /// `Corrupt`, `Unsupported`, `Io`.
    pub(crate) fn open(dir: &Path) -> Result<Fence> {
        let path = dir.join(FILE);
        let doing = || format!("read {}", path.display());
        let newest = match std::fs::read(&path) {
            Ok(text) => {
                let document: Document = serde_json::from_slice(&text)
                    .map_err(|error| Error::with_source(ErrorKind::Corrupt, doing(), error))?;
                if document.version != VERSION {
                    let what = format!("{}: it is of another version: update spindle", doing());
                    return Err(Error::new(ErrorKind::Unsupported, what));
                }
                Epoch(document.epoch)
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Epoch(0),
            Err(error) => return Err(Error::with_source(ErrorKind::Io, doing(), error)),
        };
        Ok(Fence { path, newest: Arc::new(RwLock::new(newest)) })
    }

    /// Lets the owner of `epoch` in, and shuts earlier ones out.
    ///
    /// # Errors
    /// `Fenced` if a later one has come; `Io` if the disk did not take the epoch, which then does not count.
    pub(crate) async fn enter(&self, epoch: Epoch) -> Result<()> {
        if *self.newest.read().await == epoch {
            return Ok(());
        }
        if seeded_bugs().fence_early && self.newest.try_write().is_err() {
            return Ok(());
        }
        let mut newest = Arc::clone(&self.newest).write_owned().await;
        check(*newest, epoch)?;
        let path = self.path.clone();
        // The lock is held until the disk has answered, even if the request is given up meanwhile.
        let written = tokio::task::spawn_blocking(move || {
            let document = Document { version: VERSION, epoch: epoch.0 };
            let text = serde_json::to_string(&document).expect("two numbers are JSON") + "\n";
            if !seeded_bugs().fence_forgotten {
                block::durable_file::write_durably(&path, text.as_bytes(), 0o600)?;
            }
            *newest = epoch;
            Ok(())
        });
        written
            .await
            .map_err(|error| Error::with_source(ErrorKind::Io, "wait for a drive", error))?
    }

    /// Lets a request of the owner of `epoch` pass; it may change things until the result is dropped.
    ///
    /// # Errors
    /// `Fenced` if a later owner has come.
    pub(crate) async fn pass(&self, epoch: Epoch) -> Result<Passed> {
        if seeded_bugs().fence_unchecked {
            return Ok(Passed { _newest: None });
        }
        let newest = Arc::clone(&self.newest).read_owned().await;
        check(*newest, epoch)?;
        Ok(Passed { _newest: Some(newest) })
    }
}

fn check(newest: Epoch, epoch: Epoch) -> Result<()> {
    match epoch >= newest {
        true => Ok(()),
        false => {
            let what =
                format!("the owner of epoch {newest} has come, and this is that of epoch {epoch}");
            Err(Error::new(ErrorKind::Fenced, what))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::timeout;

    #[tokio::test]
    async fn epoch_is_kept_over_restarts_and_never_falls() {
        let dir = tempfile::tempdir().unwrap();
        let fence = Fence::open(dir.path()).unwrap();
        fence.enter(Epoch(3)).await.unwrap();
        fence.enter(Epoch(3)).await.unwrap();
        drop(fence.pass(Epoch(3)).await.unwrap());
        fence.enter(Epoch(5)).await.unwrap();
        assert_eq!(fence.pass(Epoch(3)).await.unwrap_err().kind(), ErrorKind::Fenced);
        let again = Fence::open(dir.path()).unwrap();
        assert_eq!(again.enter(Epoch(4)).await.unwrap_err().kind(), ErrorKind::Fenced);
        again.enter(Epoch(5)).await.unwrap();
        std::fs::write(dir.path().join(FILE), "{}").unwrap();
        assert_eq!(Fence::open(dir.path()).unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[tokio::test(start_paused = true)]
    async fn later_owner_waits_for_changes_under_way() {
        let dir = tempfile::tempdir().unwrap();
        let fence = Fence::open(dir.path()).unwrap();
        fence.enter(Epoch(1)).await.unwrap();
        let passed = fence.pass(Epoch(1)).await.unwrap();
        let entering = timeout(Duration::from_secs(60), fence.enter(Epoch(2))).await;
        assert!(entering.is_err(), "a change of the earlier owner is under way");
        drop(passed);
        fence.enter(Epoch(2)).await.unwrap();
        assert!(fence.pass(Epoch(1)).await.is_err());
    }

    #[tokio::test]
    async fn epoch_that_the_disk_did_not_take_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let fence = Fence::open(dir.path()).unwrap();
        fence.enter(Epoch(1)).await.unwrap();
        std::fs::remove_dir_all(dir.path()).unwrap();
        assert_eq!(fence.enter(Epoch(2)).await.unwrap_err().kind(), ErrorKind::Io);
        drop(fence.pass(Epoch(1)).await.unwrap());
    }
}
