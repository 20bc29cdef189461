//! The directory of a node: its identity, its lock, and what it remembers of the pool that it has held.
//!
//! Invariants:
//! - One process at a time uses a directory (`DIR/lock`).
//! - The identity is written twice, and the backup first: either file is enough.
//! - A copied directory is told from its original by inode and creation time.
//! - A store that shows less than the directory has held is refused as rolled back.

use super::Manifest;
use super::found::{Found, lock};
use crate::chain::Format;
use block::durable_file::write_durably;
use block::env::random_uuid;
use block::{Epoch, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;
use uuid::Uuid;

/// The contents of `DIR/node.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NodeFile {
    pub(super) format: Format,
    pub(super) node_id: Uuid,
    /// Inode of DIR. Another inode means that DIR was copied, and the original may be running.
    pub(super) directory_inode: u64,
    /// Creation time of DIR, ns since 1970, if the file system knows it: a copy may get the inode of an original that
    /// was deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) directory_made_at: Option<u64>,
    /// Pool last opened from this directory.
    pub(super) pool: Option<Uuid>,
    /// Highest epoch held from this directory: a store that shows less was rolled back.
    pub(super) epoch: u64,
    /// Number of the manifest of that epoch, or 0 if it is not known. If the store has that object, it was not rolled
    /// back, whatever it lists.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) manifest: u64,
    /// Nonces of the manifests last attempted from this directory, oldest first. One of them may have been created
    /// without this process learning of it.
    pub(super) attempts: Vec<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it so")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

pub(super) const NODE: &str = "node.json";
pub(super) const NODE_BACKUP: &str = "node.backup.json";

/// Attempts remembered. Chosen by hand: each is forgotten once a later one has succeeded.
pub(super) const ATTEMPT_COUNT_MAX: usize = 8;

/// A pool's local directory, locked for this process until dropped.
#[derive(Debug)]
pub struct NodeDir {
    path: PathBuf,
    _lock: File,
    pub(super) file: parking_lot::Mutex<NodeFile>,
    is_copy: bool,
    pub(super) found: Found,
}

impl NodeDir {
    /// Creates the directory if it is missing (mode 0700), locks it and reads or creates its identity.
    ///
    /// # Errors
    /// `Busy` with the process id if another process has it; `Corrupt` for a damaged identity.
    pub fn open(path: &Path) -> Result<NodeDir> {
        let failed = |error| {
            Error::with_source(ErrorKind::Io, format!("open directory {}", path.display()), error)
        };
        let found = Found::look(path);
        make_private_dir(path).map_err(failed)?;
        let lock = lock(path)?;
        let (inode, made_at) = identity(path).map_err(failed)?;
        let known = read_node_file(path)?;
        let mut file = match known.clone() {
            Some(file) => file,
            None => NodeFile {
                format: Format::CURRENT,
                node_id: random_uuid(),
                directory_inode: inode,
                directory_made_at: made_at,
                pool: None,
                epoch: 0,
                manifest: 0,
                attempts: Vec::new(),
            },
        };
        let was_made_at_another_time =
            file.directory_made_at.zip(made_at).is_some_and(|(known, now)| known != now);
        let is_copy =
            file.pool.is_some() && (file.directory_inode != inode || was_made_at_another_time);
        if file.pool.is_none() {
            (file.directory_inode, file.directory_made_at) = (inode, made_at);
        }
        // True as well if only one of the two files is intact.
        let is_new = known.as_ref() != Some(&file)
            || [NODE, NODE_BACKUP]
                .iter()
                .any(|name| !matches!(read_node_file_at(&path.join(name)), Ok(Some(found)) if found == file));
        let node =
            NodeDir { path: path.to_owned(), _lock: lock, file: file.into(), is_copy, found };
        if is_new {
            node.save()?;
        }
        Ok(node)
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Identity of the directory.
    #[must_use]
    pub fn node_id(&self) -> Uuid {
        self.file.lock().node_id
    }

    /// The pool last opened from this directory.
    #[must_use]
    pub fn pool(&self) -> Option<Uuid> {
        self.file.lock().pool
    }

    /// Highest epoch held from this directory with everything of the pool open.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        Epoch(self.file.lock().epoch)
    }

    /// Tells whether the directory was copied from another place since a pool was last opened from it.
    #[must_use]
    pub fn is_copy(&self) -> bool {
        self.is_copy
    }

    /// Refuses a store that shows less than this directory has seen.
    pub(super) fn check_not_rolled_back(
        &self,
        pool: Uuid,
        newest: Option<&Manifest>,
    ) -> Result<()> {
        let file = self.file.lock();
        let Some(known) = file.pool else { return Ok(()) };
        if known != pool {
            return Err(self.other_pool(known, pool));
        }
        let epoch = newest.map_or(0, |manifest| manifest.epoch);
        if epoch < file.epoch {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!(
                    "the store was rolled back: it shows epoch {epoch}, but {} has held epoch {}. \
                     Restore the newer state of the store; to open the old state as it is, use an \
                     empty --dir",
                    self.path.display(),
                    file.epoch
                ),
            ));
        }
        Ok(())
    }

    /// Tells whether `manifest` was created from this very directory, not from its original or a copy of it.
    pub(super) fn has_witnessed(&self, manifest: &Manifest) -> bool {
        let file = self.file.lock();
        manifest.owner.node_id == file.node_id
            && (manifest.held_epoch() == file.epoch || file.attempts.contains(&manifest.nonce))
    }

    pub(super) fn record_attempt(&self, nonce: &str) -> Result<()> {
        {
            let mut file = self.file.lock();
            let old_count = (file.attempts.len() + 1).saturating_sub(ATTEMPT_COUNT_MAX);
            file.attempts.drain(..old_count);
            file.attempts.push(nonce.to_owned());
        }
        self.save()
    }

    pub(super) fn record(&self, pool: Uuid, epoch: u64, manifest: u64) -> Result<()> {
        {
            let mut file = self.file.lock();
            file.attempts.clear();
            file.pool = Some(pool);
            (file.epoch, file.manifest) = (epoch, manifest);
            if let Ok((inode, made_at)) = identity(&self.path) {
                (file.directory_inode, file.directory_made_at) = (inode, made_at);
            }
        }
        self.save()
    }

    /// Records the number of a later manifest of the epoch that the directory has held. Returns
    /// false, without effect, if it has not recorded that epoch.
    pub(super) fn note_manifest(&self, epoch: u64, number: u64) -> Result<bool> {
        {
            let mut file = self.file.lock();
            if file.epoch != epoch {
                return Ok(false);
            }
            file.manifest = file.manifest.max(number);
        }
        self.save().map(|()| true)
    }

    /// Binds the directory to a pool whose log it stores, before it answers for anything. From then
    /// on a copy of the directory is told from it, and it refuses other pools.
    ///
    /// # Errors
    /// `Denied` if it belongs to another pool; `Io` if node.json cannot be written.
    pub fn join(&self, pool: Uuid) -> Result<()> {
        {
            let mut file = self.file.lock();
            match file.pool {
                Some(known) if known == pool => return Ok(()),
                Some(known) => return Err(self.other_pool(known, pool)),
                None => file.pool = Some(pool),
            }
        }
        self.save()
    }

    fn other_pool(&self, known: Uuid, pool: Uuid) -> Error {
        Error::new(
            ErrorKind::Denied,
            format!(
                "directory {} belongs to pool {known}, but the store holds pool {pool}; \
                 use the right --store or another --dir",
                self.path.display()
            ),
        )
    }

    fn save(&self) -> Result<()> {
        let text = serde_json::to_string_pretty(&*self.file.lock())
            .map_err(|error| Error::with_source(ErrorKind::Invalid, "encode node.json", error))?;
        // The copy is written first, so that it is never older than the original.
        for name in [NODE_BACKUP, NODE] {
            let path = self.path.join(name);
            match write_durably(&path, text.as_bytes(), 0o600) {
                // A pool whose log's disk is full must open, so that the log drains. A crash may leave a mixture here, and then
                // the other file counts.
                Err(error) if tiering::is_store_full(&error) => {
                    write_over(&path, text.as_bytes()).map_err(|_| error)?;
                }
                written => written?,
            }
        }
        Ok(())
    }
}

/// Returns the marks that tell a directory from its copies: its inode and its creation time.
fn identity(dir: &Path) -> std::io::Result<(u64, Option<u64>)> {
    let metadata = std::fs::metadata(dir)?;
    let since = metadata.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    Ok((metadata.ino(), since.and_then(|since| u64::try_from(since.as_nanos()).ok())))
}

/// Reads the identity of a directory. If it is damaged or missing, its copy counts: without an identity the write log beside
/// it would be worthless. It is missing only if both are.
fn read_node_file(dir: &Path) -> Result<Option<NodeFile>> {
    let damage = match read_node_file_at(&dir.join(NODE)) {
        Ok(Some(file)) => return Ok(Some(file)),
        Ok(None) => None,
        Err(error) => Some(error),
    };
    match (read_node_file_at(&dir.join(NODE_BACKUP)), damage) {
        (Ok(Some(file)), Some(damage)) => {
            tracing::warn!(
                error = %damage.chain(),
                "node.json is damaged; spindle uses its backup: check the disk"
            );
            Ok(Some(file))
        }
        (Ok(Some(file)), None) => {
            tracing::warn!(dir = %dir.display(), "node.json is missing; spindle uses its backup");
            Ok(Some(file))
        }
        (_, Some(damage)) => Err(damage),
        (other, None) => other,
    }
}

/// Writes over an existing file, which takes no space on most file systems.
fn write_over(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    use std::os::unix::fs::FileExt;
    let file = OpenOptions::new().write(true).open(path)?;
    file.write_all_at(bytes, 0)?;
    file.set_len(bytes.len() as u64)?;
    file.sync_all()
}

fn read_node_file_at(path: &Path) -> Result<Option<NodeFile>> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => {
            let context = format!("read {}", path.display());
            return Err(Error::with_source(ErrorKind::Io, context, error));
        }
    };
    serde_json::from_slice(&text).map(Some).map_err(|error| {
        Error::with_source(
            ErrorKind::Corrupt,
            format!(
                "{} is damaged, and so is its copy. If the write log in this directory is not needed, use another \
                 --dir (with --take-over)",
                path.display()
            ),
            error,
        )
    })
}

pub(super) fn make_private_dir(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}
