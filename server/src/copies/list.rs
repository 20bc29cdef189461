//! Which copies a pool has: a chain of documents in its store, so that whoever owns the pool next goes on with them.
//!
//! Invariants:
//! - A document is authentic under the pool key, or it is refused as damaged.
//! - A change is the next number of the chain; of two at the same moment one wins.

use crate::chain::{Chain, Created, Format, corrupt, random_bytes, seal_document, to_hex};
use crate::store::Store;
use block::seal::PoolKey;
use block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Folder of the chain in the pool's prefix, and the purpose of its seal.
pub(crate) const FOLDER: &str = "copies";
/// Documents kept for people to look at.
const KEEP_COUNT: usize = 3;
/// Copies of a pool. Chosen by hand: each is a job.
const COUNT_MAX: usize = 16;

/// A copy of the pool as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopySpec {
    /// Where it is; holds no credentials.
    pub url: String,
    /// Settings and credentials are in variables that begin so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_prefix: Option<String>,
    /// Seconds from the beginning of one state to that of the next.
    pub interval_seconds: u64,
    /// Only when snapshots have come or gone.
    #[serde(default)]
    pub is_snapshots_only: bool,
    /// Bytes a second, at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// Seconds since 1970.
    pub created_at: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListBody {
    pub(super) format: Format,
    pub(super) pool: Uuid,
    pub(super) number: u64,
    pub(super) copies: Vec<CopySpec>,
    /// Random: tells our own create from another's after an ambiguous answer.
    pub(super) nonce: String,
}

/// The copies of the pool, and the number of the document that says so.
async fn read_numbered(store: &Store, key: &PoolKey, pool: Uuid) -> Result<(u64, Vec<CopySpec>)> {
    let chain = Chain::new(store, FOLDER);
    let newest = chain.newest_body::<ListBody>(key).await?;
    let Some((number, body)) = newest else { return Ok((0, Vec::new())) };
    if body.pool != pool || body.number != number {
        return Err(corrupt(&chain.name(number), "it belongs elsewhere"));
    }
    Ok((number, body.copies))
}

/// The copies of a pool, in the order in which they were added.
///
/// # Errors
/// `Corrupt` for a damaged document; those of reading the store.
pub async fn read(store: &Store, key: &PoolKey, pool: Uuid) -> Result<Vec<CopySpec>> {
    Ok(read_numbered(store, key, pool).await?.1)
}

/// Changes the list, durably. Returns the new one.
///
/// # Errors
/// What `change` says; `Full` for too many; `Busy` when another process has changed it at the same moment.
pub async fn change(
    store: &Store,
    key: &PoolKey,
    pool: Uuid,
    change: impl FnOnce(&mut Vec<CopySpec>) -> Result<()>,
) -> Result<Vec<CopySpec>> {
    let (number, mut copies) = read_numbered(store, key, pool).await?;
    change(&mut copies)?;
    if copies.len() > COUNT_MAX {
        let what = format!("add a copy: a pool has {COUNT_MAX} at most");
        return Err(Error::new(ErrorKind::Full, what));
    }
    let body = ListBody {
        format: Format::CURRENT,
        pool,
        number: number + 1,
        copies,
        nonce: to_hex(&random_bytes::<16>()),
    };
    let chain = Chain::new(store, FOLDER);
    if chain.create(body.number, &seal_document(key, FOLDER, &body)?).await? == Created::Lost {
        let what =
            "change the list of copies: another process did so at the same moment; try again";
        return Err(Error::new(ErrorKind::Busy, what));
    }
    if let Err(error) = chain.prune(KEEP_COUNT).await {
        tracing::debug!(error = %error.chain(), "old lists of copies were not deleted");
    }
    Ok(body.copies)
}
