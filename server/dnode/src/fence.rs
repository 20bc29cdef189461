//! The fence of a pool's folder: the newest epoch whose owner has come and the key of the pool, on stable storage.
//!
//! Invariants:
//! - An epoch counts once it is on stable storage, and never falls, also over restarts of the node.
//! - The key is that of the first owner, and never changes.
//! - A later epoch waits for the changes of an earlier one that are under way; after that, none of them begins. Only an
//!   absence of the drive ends the wait: what was opened before it is void.

use crate::messages::KEY_BYTES;
use crate::seeded_bugs::seeded_bugs;
use block::hex::{from_hex, to_hex};
use block::{Epoch, Error, ErrorKind, Result};
use parking_lot::Mutex;
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
    /// Public key of the pool, as hexadecimal digits.
    key: String,
}

/// The owner that has come, and the key of the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Owner {
    epoch: Epoch,
    /// Absent while no owner has come.
    key: Option<[u8; KEY_BYTES]>,
}

/// The fence of a folder.
#[derive(Debug)]
pub(crate) struct Fence {
    path: PathBuf,
    newest: Arc<RwLock<Owner>>,
    /// Held while a fence of the drive is written.
    turn: Arc<Mutex<()>>,
}

/// Keeps a later owner from coming while a change is under way.
#[derive(Debug)]
pub(crate) struct Passed {
    _newest: Option<OwnedRwLockReadGuard<Owner>>,
}

impl Fence {
    /// Reads the fence of the folder `dir`. Waits for the disk.
    ///
    /// # Errors
    /// `Corrupt`, `Unsupported`, `Io`.
    pub(crate) fn open(dir: &Path, turn: Arc<Mutex<()>>) -> Result<Fence> {
        let path = dir.join(FILE);
        let newest = Arc::new(RwLock::new(Owner::read(&path)?));
        Ok(Fence { path, newest, turn })
    }

    /// Lets a reader in who has proven this key.
    ///
    /// # Errors
    /// `Denied` if it is not the key of the pool; `Unavailable` if no owner has come yet.
    pub(crate) async fn admit(&self, key: &[u8; KEY_BYTES]) -> Result<()> {
        let newest = self.newest.read().await;
        match newest.key {
            Some(_) => newest.check_key(key),
            None => {
                Err(Error::new(ErrorKind::Unavailable, "no owner of the pool has used the folder"))
            }
        }
    }

    /// Lets the owner of `epoch` in, who has proven this key, and shuts earlier ones out.
    ///
    /// # Errors
    /// `Denied` if it is not the key of the pool; `Fenced` if a later owner has come; `Io` if the disk did not take the
    /// epoch, which then does not count.
    pub(crate) async fn enter(&self, epoch: Epoch, key: [u8; KEY_BYTES]) -> Result<()> {
        {
            let newest = self.newest.read().await;
            newest.check_key(&key)?;
            if newest.epoch == epoch && newest.key.is_some() {
                return Ok(());
            }
        }
        if seeded_bugs().fence_early && self.newest.try_write().is_err() {
            return Ok(());
        }
        let mut newest = Arc::clone(&self.newest).write_owned().await;
        newest.check_key(&key)?;
        check(newest.epoch, epoch)?;
        let (path, turn) = (self.path.clone(), Arc::clone(&self.turn));
        // The lock is held until the disk has answered, even if the request is given up meanwhile.
        let written = tokio::task::spawn_blocking(move || {
            let document = Document { version: VERSION, epoch: epoch.0, key: to_hex(&key) };
            let text = serde_json::to_string(&document).expect("numbers and text are JSON") + "\n";
            let _turn = turn.lock();
            if !seeded_bugs().fence_forgotten {
                // While this request waited, the drive may have gone away and come back, and a later owner too.
                if Owner::read(&path)? != *newest {
                    let what = format!("{} has changed: the drive was away", path.display());
                    return Err(Error::new(ErrorKind::Unavailable, what));
                }
                block::durable_file::write_durably(&path, text.as_bytes(), 0o600)?;
            }
            *newest = Owner { epoch, key: Some(key) };
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
        check(newest.epoch, epoch)?;
        Ok(Passed { _newest: Some(newest) })
    }
}

impl Owner {
    /// Reads the file. Waits for the disk.
    fn read(path: &Path) -> Result<Owner> {
        let doing = || format!("read {}", path.display());
        let document: Document = match std::fs::read(path) {
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|error| Error::with_source(ErrorKind::Corrupt, doing(), error))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Owner::default());
            }
            Err(error) => return Err(Error::with_source(ErrorKind::Io, doing(), error)),
        };
        if document.version != VERSION {
            let what = format!("{}: it is of another version: update spindle", doing());
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let key = from_hex(&document.key).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, format!("{}: its key is none", doing()))
        })?;
        Ok(Owner { epoch: Epoch(document.epoch), key: Some(key) })
    }

    /// Checks that this is the key of the pool, or that no owner has come.
    fn check_key(&self, key: &[u8; KEY_BYTES]) -> Result<()> {
        match self.key.is_none_or(|known| known == *key) || seeded_bugs().key_unchecked {
            true => Ok(()),
            false => Err(Error::new(
                ErrorKind::Denied,
                "its folder on the drive is that of another key than the pool's; another node may have made it: \
                 docs/operations.md, \"Data nodes\"",
            )),
        }
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

    fn open(dir: &Path) -> Result<Fence> {
        Fence::open(dir, Arc::default())
    }

    const KEY: [u8; KEY_BYTES] = [7; KEY_BYTES];

    #[tokio::test]
    async fn epoch_is_kept_over_restarts_and_never_falls() {
        let dir = tempfile::tempdir().unwrap();
        let fence = open(dir.path()).unwrap();
        fence.enter(Epoch(3), KEY).await.unwrap();
        fence.enter(Epoch(3), KEY).await.unwrap();
        drop(fence.pass(Epoch(3)).await.unwrap());
        fence.enter(Epoch(5), KEY).await.unwrap();
        assert_eq!(fence.pass(Epoch(3)).await.unwrap_err().kind(), ErrorKind::Fenced);
        let again = open(dir.path()).unwrap();
        assert_eq!(again.enter(Epoch(4), KEY).await.unwrap_err().kind(), ErrorKind::Fenced);
        again.enter(Epoch(5), KEY).await.unwrap();
        for damaged in ["{}", r#"{"version":1,"epoch":5,"key":"77"}"#] {
            std::fs::write(dir.path().join(FILE), damaged).unwrap();
            assert_eq!(open(dir.path()).unwrap_err().kind(), ErrorKind::Corrupt);
        }
    }

    #[tokio::test]
    async fn key_of_the_first_owner_is_that_of_the_folder_for_good() {
        let dir = tempfile::tempdir().unwrap();
        let fence = open(dir.path()).unwrap();
        assert_eq!(fence.admit(&KEY).await.unwrap_err().kind(), ErrorKind::Unavailable);
        fence.enter(Epoch(0), KEY).await.unwrap();
        for fence in [fence, open(dir.path()).unwrap()] {
            fence.admit(&KEY).await.unwrap();
            let other = [8; KEY_BYTES];
            assert_eq!(fence.admit(&other).await.unwrap_err().kind(), ErrorKind::Denied);
            for epoch in [Epoch(0), Epoch(9)] {
                let refused = fence.enter(epoch, other).await.unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::Denied);
            }
            drop(fence.pass(Epoch(0)).await.unwrap());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn later_owner_waits_for_changes_under_way() {
        let dir = tempfile::tempdir().unwrap();
        let fence = open(dir.path()).unwrap();
        fence.enter(Epoch(1), KEY).await.unwrap();
        let passed = fence.pass(Epoch(1)).await.unwrap();
        let entering = timeout(Duration::from_secs(60), fence.enter(Epoch(2), KEY)).await;
        assert!(entering.is_err(), "a change of the earlier owner is under way");
        drop(passed);
        fence.enter(Epoch(2), KEY).await.unwrap();
        assert!(fence.pass(Epoch(1)).await.is_err());
    }

    #[tokio::test]
    async fn epoch_that_the_disk_did_not_take_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let fence = open(dir.path()).unwrap();
        fence.enter(Epoch(1), KEY).await.unwrap();
        std::fs::remove_dir_all(dir.path()).unwrap();
        assert_eq!(fence.enter(Epoch(2), KEY).await.unwrap_err().kind(), ErrorKind::Unavailable);
        drop(fence.pass(Epoch(1)).await.unwrap());
    }

    #[tokio::test]
    async fn fence_from_before_an_absence_does_not_write_over_a_later_owner() {
        let dir = tempfile::tempdir().unwrap();
        let before = open(dir.path()).unwrap();
        before.enter(Epoch(1), KEY).await.unwrap();
        let after = open(dir.path()).unwrap();
        after.enter(Epoch(3), KEY).await.unwrap();
        let refused = before.enter(Epoch(2), KEY).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unavailable);
        let again = open(dir.path()).unwrap();
        assert_eq!(again.enter(Epoch(2), KEY).await.unwrap_err().kind(), ErrorKind::Fenced);
    }
}
