//! Checks whether a copy belongs to the history of the pool, before a pass writes anything to
//! either store.
//!
//! Invariants:
//! - The check only reads the pool. The checkpoint of a pass takes a manifest number of its own, so
//!   a pass that is refused again and again would otherwise advance beyond the number for which it
//!   is refused.
//! - A manifest is immutable, so two different manifests of the same number belong to two
//!   histories. A manifest that cannot be read proves nothing.

use super::Copier;
use crate::map::database;
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use std::sync::Arc;

async fn read(store: &Arc<dyn ObjectStore>, path: &Path) -> Option<Bytes> {
    store.get(path).await.ok()?.bytes().await.ok()
}

impl Copier {
    /// Refuses a copy whose newest manifest the pool does not have yet, or has with other contents.
    ///
    /// # Errors
    /// `Invalid` for a copy that is later than the pool; `Corrupt` for one of another history;
    /// `Unavailable` when the pool's store cannot be listed.
    pub(super) async fn check_lineage(&mut self) -> Result<()> {
        let Some(newest) = self.manifests.last().copied() else { return Ok(()) };
        let pools = database::newest_manifest(&self.source.objects).await?;
        if newest > pools {
            let what = format!(
                "copy the pool: the copy holds state {newest}, which is later than the pool's {pools}: the pool was put \
                 back to an earlier state, or it is not the one that the copy was made of. Nothing was changed there; \
                 copy to another prefix"
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        if self.known_manifest == Some(newest) {
            return Ok(());
        }
        let path = database::manifest_path(newest);
        let (ours, theirs) =
            futures::join!(read(&self.source.objects, &path), read(&self.target, &path));
        match (ours, theirs) {
            (Some(ours), Some(theirs)) if ours != theirs => Err(Error::new(
                ErrorKind::Corrupt,
                format!(
                    "copy the pool: the copy holds another {path}: another pool was copied there, or this one in \
                     another life. Nothing was changed there; copy to another prefix"
                ),
            )),
            (Some(_), Some(_)) => {
                self.known_manifest = Some(newest);
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
