//! Manifests that mark a pool as being purged.

use super::{Manifest, PURPOSE, successor};
use crate::chain::{Chain, Created, Document, seal_document};
use crate::store::Store;
use async_recursion::async_recursion;
use block::seal::PoolKey;
use block::{Error, ErrorKind, Result};

/// Marks the beginning of the purge of a removed pool, which cannot be opened or restored from here
/// on.
///
/// # Errors
/// `Busy` if it was restored at the same moment, or another purge has begun.
#[async_recursion]
pub async fn begin_purge(store: &Store, key: &PoolKey, newest: &Manifest) -> Result<Manifest> {
    let mut purging = successor(newest);
    purging.is_purging = true;
    let bytes = seal_document(key, PURPOSE, &purging)?;
    match Chain::new(store, "manifest").create(purging.number, &bytes).await? {
        Created::Ours => Ok(purging),
        Created::Lost => Err(Error::new(
            ErrorKind::Busy,
            format!(
                "purge pool {}: it was restored, or another purge began, at the same moment; \
                 nothing was deleted here",
                newest.name
            ),
        )),
    }
}

/// Reads the newest manifest without its key ring, so that a forged one is not detected. This
/// suffices to finish a purge, which has deleted everything but manifests by then.
#[async_recursion]
pub async fn read_unverified(store: &Store) -> Result<Option<Manifest>> {
    let chain = Chain::new(store, "manifest");
    let Some((number, bytes)) = chain.newest().await? else { return Ok(None) };
    Document::parse(&chain.name(number), &bytes)?.body().map(Some)
}
