//! A note in the store that the write log of a directory has failed. It is for the next opening, in
//! case the directory did not take the note, for example because its disk has become read-only.
//!
//! Invariants:
//! - It is tried once and for a bounded time; nothing depends on it.
//! - It may report a loss and never rules one out (see [`wal::LogNotes`]).

use control::manifest::NodeDir;
use control::store::{Reason, Store};
use object_store::ObjectStoreExt;
use object_store::path::Path as ObjectPath;
use std::time::Duration;

/// Folder of the notes, one object per directory.
pub const FOLDER: &str = "failed-logs";
/// Time that the store has for one request. Chosen by hand: a store that answers at all does so in
/// that time, and the daemon should end soon.
const WAIT: Duration = Duration::from_secs(5);

fn path(node: &NodeDir) -> ObjectPath {
    ObjectPath::from(format!("{FOLDER}/{}", node.node_id()))
}

/// Writes the note.
pub(super) async fn note(store: &Store, node: &NodeDir, note: Vec<u8>) {
    let objects = store.control();
    let (path, payload) = (path(node), note.into());
    let put = objects.put(&path, payload);
    let why = match tokio::time::timeout(WAIT, put).await {
        Ok(Ok(_)) => return,
        Ok(Err(error)) => store.explain(&format!("write {path}"), error).chain(),
        Err(_) => "the store did not answer in time".to_owned(),
    };
    tracing::warn!(why, "could not note in the store that the write log failed");
}

/// Reads the note if there is one.
pub(super) async fn heard(store: &Store, node: &NodeDir) -> Option<Vec<u8>> {
    let (objects, path) = (store.control(), path(node));
    let got = async { objects.get(&path).await?.bytes().await };
    let why = match tokio::time::timeout(WAIT, got).await {
        Ok(Ok(bytes)) => return Some(bytes.to_vec()),
        Ok(Err(error)) if Reason::of(&error) == Reason::NotFound => return None,
        Ok(Err(error)) => store.explain(&format!("read {path}"), error).chain(),
        Err(_) => "the store did not answer in time".to_owned(),
    };
    tracing::warn!(why, "could not ask the store for a note that the write log failed");
    None
}

/// Deletes the note. To be called when every volume has recorded what the note was for. A note that
/// stays belongs to an earlier log and is harmless.
pub(super) async fn forget(store: &Store, node: &NodeDir) {
    let (objects, path) = (store.control(), path(node));
    if let Ok(Err(error)) = tokio::time::timeout(WAIT, objects.delete(&path)).await {
        tracing::debug!(
            %error,
            "could not delete the note about a failed write log; it stays for now"
        );
    }
}
