//! The list of this process: on disk, in memory, and its watchers.
//!
//! Invariants:
//! - The list in memory is on stable storage before any caller sees it.
//! - Once a removal is in memory, the connections of that node are cut; a connection is entered in
//!   the table before the list is consulted, so none escapes.

use crate::admission::{AdmissionList, DOCUMENT_BYTES_MAX, Merged, Node};
use crate::home::{self, path_of, refuse_member};
use crate::identity::{ClusterId, Digest, Identity, NodeId};
use crate::links::Links;
use crate::seeded_bugs::seeded_bugs;
use block::durable_file::write_durably;
use block::{Error, ErrorKind, Result};
use parking_lot::{Mutex, RwLock};
use rustls::pki_types::CertificateDer;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::watch;

/// This node's place in its cluster. The calls that change the list wait for the disk.
#[derive(Debug)]
pub struct Membership {
    identity: Identity,
    path: PathBuf,
    /// Held while the list changes, so that no change is lost.
    changing: Mutex<()>,
    list: RwLock<Arc<AdmissionList>>,
    changed: watch::Sender<Digest>,
    links: Links,
    /// Held for as long as the list is in memory.
    _lock: File,
}

impl Membership {
    /// Opens the list in `dir`.
    ///
    /// # Errors
    /// `NotFound` if the directory belongs to no cluster; `Busy` if another process has it open;
    /// `Corrupt`, `Unsupported`, `Io`.
    pub fn open(dir: &Path) -> Result<Membership> {
        let identity = Identity::open(dir)?;
        let lock = home::lock(dir)?;
        let path = path_of(dir);
        let shown = path.display();
        let io = |error: std::io::Error| {
            let kind = match error.kind() {
                std::io::ErrorKind::NotFound => ErrorKind::NotFound,
                _ => ErrorKind::Io,
            };
            Error::with_source(kind, format!("read the list of nodes {shown}"), error)
        };
        let length = std::fs::metadata(&path).map_err(io)?.len();
        if length > u64::try_from(DOCUMENT_BYTES_MAX).unwrap_or(u64::MAX) {
            return Err(Error::new(ErrorKind::Corrupt, format!("{shown} is longer than a list")));
        }
        let bytes = std::fs::read(&path).map_err(io)?;
        let list = AdmissionList::decode(&bytes, None)
            .map_err(|refusal| Error::from(refusal).context(shown))?;
        Ok(Membership::new(identity, lock, path, list))
    }

    /// Stores the first list of a node in `dir`, which the caller has claimed.
    ///
    /// # Errors
    /// `Denied` if the list does not admit this node; `Busy` if the directory belongs to a cluster;
    /// `Io`.
    pub fn create(
        dir: &Path,
        identity: Identity,
        lock: File,
        list: AdmissionList,
    ) -> Result<Membership> {
        refuse_member(dir)?;
        if list.node_with(identity.certificate()).is_none() {
            let context = "the list of nodes does not have this node";
            return Err(Error::new(ErrorKind::Denied, context));
        }
        let path = path_of(dir);
        write_durably(&path, &list.encode(), 0o600)?;
        Ok(Membership::new(identity, lock, path, list))
    }

    fn new(identity: Identity, lock: File, path: PathBuf, list: AdmissionList) -> Membership {
        Membership {
            identity,
            path,
            changing: Mutex::new(()),
            changed: watch::Sender::new(list.digest()),
            list: RwLock::new(Arc::new(list)),
            links: Links::default(),
            _lock: lock,
        }
    }

    /// Returns the identity of this node.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Returns the cluster.
    #[must_use]
    pub fn cluster(&self) -> ClusterId {
        self.list.read().cluster()
    }

    /// Returns the list.
    #[must_use]
    pub fn list(&self) -> Arc<AdmissionList> {
        Arc::clone(&self.list.read())
    }

    /// Returns the open connections.
    #[must_use]
    pub fn links(&self) -> &Links {
        &self.links
    }

    /// Returns a watcher of the list's digest.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Digest> {
        self.changed.subscribe()
    }

    /// Returns the admitted node with this certificate.
    #[must_use]
    pub fn admitted(&self, certificate: &CertificateDer<'_>) -> Option<NodeId> {
        let list = self.list.read();
        if seeded_bugs().removed_still_accepted {
            let node = NodeId::of(certificate);
            return (list.nodes().contains_key(&node) || list.removed().contains(&node))
                .then_some(node);
        }
        list.node_with(certificate).map(|node| node.id)
    }

    /// Returns the admitted node with this id.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn node(&self, node: NodeId) -> Result<Node> {
        self.list.read().nodes().get(&node).cloned().ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("node {node} is not in the cluster"))
        })
    }

    /// Changes the list by `change`, makes it durable, and cuts the connections of removed nodes.
    ///
    /// # Errors
    /// Those of `change`; `Io`. The list is then as before.
    pub fn change<T>(&self, change: impl FnOnce(&mut AdmissionList) -> Result<T>) -> Result<T> {
        let _changing = self.changing.lock();
        let before = self.list();
        let mut list = AdmissionList::clone(&before);
        let value = change(&mut list)?;
        if list == *before {
            return Ok(value);
        }
        write_durably(&self.path, &list.encode(), 0o600)?;
        let list = Arc::new(list);
        *self.list.write() = Arc::clone(&list);
        for node in before.nodes().keys().filter(|node| !list.nodes().contains_key(node)) {
            if !seeded_bugs().connections_stay {
                let count = self.links.cut(*node);
                tracing::info!(%node, count, "closed the connections of a removed node");
            }
        }
        self.changed.send_replace(list.digest());
        Ok(value)
    }

    /// Merges the bytes of another node's list.
    ///
    /// # Errors
    /// Those of a document that is no list of this cluster; `Full`; `Io`.
    pub fn merge(&self, bytes: &[u8]) -> Result<Merged> {
        let merged = self.change(|list| list.merge_bytes(bytes).map_err(Error::from))?;
        if merged.refused_count > 0 {
            let count = merged.refused_count;
            tracing::warn!(
                count,
                "left out records of a list of nodes: not signed by a node of it"
            );
        }
        Ok(merged)
    }
}
