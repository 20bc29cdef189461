//! The copies of a pool: a chain of documents in its store, so that the next owner of the pool
//! continues them.
//!
//! Invariants:
//! - A document is authentic under the pool key, or it is refused as damaged.
//! - A change is the next number of the chain; of two at the same moment one wins.

use super::target::StateRecord;
use async_recursion::async_recursion;
use block::env::random_bytes;
use block::hex::to_hex;
use block::seal::PoolKey;
use block::{Error, ErrorKind, Result};
use control::chain::{Chain, Created, Format, corrupt, seal_document};
use control::store::Store;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use uuid::Uuid;

/// Folder of the chain in the pool's prefix, and the purpose of its seal.
pub const FOLDER: &str = "copies";
/// Documents kept for inspection.
const KEEP_COUNT: usize = 3;
/// Maximum number of copies of a pool. Chosen by hand: each is a job.
const COUNT_MAX: usize = 16;

/// Settings of a copy of the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopySpec {
    /// URL of the copy, without credentials.
    pub url: String,
    /// Prefix of the variables with settings and credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_prefix: Option<String>,
    /// Seconds from the start of one state to the start of the next.
    pub interval_seconds: u64,
    /// Make a state only when snapshots have come or gone.
    #[serde(default)]
    pub is_snapshots_only: bool,
    /// Maximum bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// The copy has a key ring of its own: the keys of the pool do not open it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_dedicated_key: bool,
    /// Ids of the volumes that it contains; absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<BTreeSet<u32>>,
    /// Seconds since 1970.
    pub created_at: u64,
    /// Newest state that the pool has made there, or was about to make; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<Published>,
}

/// Newest state of a copy, as the pool knows it: written before the state is published. If a copy
/// has another one, it was made by a later run of the pool, whose store was put back to an earlier
/// state since.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// Its number.
    pub number: u64,
    /// Nonce of its document, also for a failed try.
    pub nonce: String,
    /// Nonce of the previous state; empty if there was none.
    pub previous_nonce: String,
    /// Number of commits of the pool at that time.
    pub commit_number: u64,
    /// Process that wrote this.
    pub term: String,
    /// The pool was put back to a state before this one: nothing more is copied there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_refused: bool,
}

impl Published {
    /// Makes a record for a state that was found there, without further knowledge.
    pub(super) fn found(newest: &StateRecord) -> Published {
        Published {
            number: newest.number,
            nonce: newest.nonce.clone(),
            previous_nonce: String::new(),
            commit_number: newest.commit_number,
            term: String::new(),
            is_refused: false,
        }
    }

    /// Makes the record for a state that is about to be published.
    pub(super) fn next(before: Option<Published>, number: u64, commit: u64, term: &str) -> Self {
        let fresh = || to_hex(&random_bytes::<16>());
        let (nonce, previous_nonce) = match before {
            // An earlier try has failed, or its outcome is unknown.
            Some(before) if before.number == number => (before.nonce, before.previous_nonce),
            Some(before) => (fresh(), before.nonce),
            None => (fresh(), String::new()),
        };
        Published {
            number,
            nonce,
            previous_nonce,
            commit_number: commit,
            term: term.to_owned(),
            is_refused: false,
        }
    }

    /// Reports whether `newest` is this state or the one before.
    pub(super) fn knows(&self, newest: Option<&StateRecord>) -> bool {
        match newest {
            None => self.number == 1 && self.previous_nonce.is_empty(),
            Some(newest) if newest.number == self.number => newest.nonce == self.nonce,
            Some(newest) => newest.number + 1 == self.number && newest.nonce == self.previous_nonce,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListBody {
    pub(super) format: Format,
    pub(super) pool: Uuid,
    pub(super) number: u64,
    pub(super) copies: Vec<CopySpec>,
    /// Random: distinguishes our own create from another's after an ambiguous answer.
    pub(super) nonce: String,
}

/// Reads the copies of the pool, and the number of their document.
async fn read_numbered(store: &Store, key: &PoolKey, pool: Uuid) -> Result<(u64, Vec<CopySpec>)> {
    let chain = Chain::new(store, FOLDER);
    let newest = chain.newest_body::<ListBody>(key).await?;
    let Some((number, body)) = newest else { return Ok((0, Vec::new())) };
    if body.pool != pool || body.number != number {
        return Err(corrupt(&chain.name(number), "it belongs elsewhere"));
    }
    Ok((number, body.copies))
}

/// Reads the copies of a pool, in the order in which they were added.
///
/// # Errors
/// `Corrupt` for a damaged document; errors reading the store.
#[async_recursion]
pub async fn read(store: &Store, key: &PoolKey, pool: Uuid) -> Result<Vec<CopySpec>> {
    Ok(read_numbered(store, key, pool).await?.1)
}

/// Checks that this many copies are allowed.
///
/// # Errors
/// `Full` if there are too many.
pub(super) fn check_count(count: usize) -> Result<()> {
    match count <= COUNT_MAX {
        true => Ok(()),
        false => {
            let what = format!("add a copy: a pool has {COUNT_MAX} at most");
            Err(Error::new(ErrorKind::Full, what))
        }
    }
}

/// Changes the list durably. Returns the new one.
///
/// # Errors
/// Errors of `owner` and `change`; `Full` for too many; `Busy` if another process has changed it at
/// the same moment.
pub async fn change(
    store: &Store,
    key: &PoolKey,
    pool: Uuid,
    owner: impl Future<Output = Result<()>>,
    change: impl FnOnce(&mut Vec<CopySpec>) -> Result<()>,
) -> Result<Vec<CopySpec>> {
    let (number, mut copies) = read_numbered(store, key, pool).await?;
    // Keep this order: if a successor has changed the list since it was read, this change fails.
    owner.await?;
    change(&mut copies)?;
    check_count(copies.len())?;
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
        tracing::debug!(error = %error.chain(), "could not delete old lists of copies");
    }
    Ok(body.copies)
}
