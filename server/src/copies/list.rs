//! Which copies a pool has: a chain of documents in its store, so that whoever owns the pool next goes on with them.
//!
//! Invariants:
//! - A document is authentic under the pool key, or it is refused as damaged.
//! - A change is the next number of the chain; of two at the same moment one wins.

use super::target::StateRecord;
use crate::chain::{Chain, Created, Format, corrupt, random_bytes, seal_document, to_hex};
use crate::store::Store;
use block::seal::PoolKey;
use block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
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
    /// The copy has a key ring of its own: what opens the pool does not open it.
    #[serde(default, skip_serializing_if = "crate::record::is_false")]
    pub has_own_key: bool,
    /// Ids of the volumes that it is of; absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<BTreeSet<u32>>,
    /// Seconds since 1970.
    pub created_at: u64,
    /// The newest state that the pool has made there, or was about to; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<Published>,
}

/// The newest state of a copy, as the pool knows it: written before the state is published. A copy that has another one was
/// made by a later life of the pool, which was put back since.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// Its number.
    pub number: u64,
    /// The nonce of its document; of a try that failed, too.
    pub nonce: String,
    /// That of the state before; empty where there was none.
    pub previous_nonce: String,
    /// Commits that the pool had then.
    pub commit_number: u64,
    /// The process that wrote this.
    pub term: String,
    /// The pool was put back to before this state: nothing is copied there any more.
    #[serde(default, skip_serializing_if = "crate::record::is_false")]
    pub is_refused: bool,
}

impl Published {
    /// A state that is there, of which only this is known.
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

    /// With a state that is about to be published.
    pub(super) fn next(before: Option<Published>, number: u64, commit: u64, term: &str) -> Self {
        let fresh = || to_hex(&random_bytes::<16>());
        let (nonce, previous_nonce) = match before {
            // A try before has failed, or nobody has heard of its end.
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

    /// This state is it, or the one before.
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

/// So many copies are allowed.
///
/// # Errors
/// `Full` where they are not.
pub(super) fn check_count(count: usize) -> Result<()> {
    match count <= COUNT_MAX {
        true => Ok(()),
        false => {
            let what = format!("add a copy: a pool has {COUNT_MAX} at most");
            Err(Error::new(ErrorKind::Full, what))
        }
    }
}

/// Changes the list, durably. Returns the new one.
///
/// # Errors
/// What `owner` and `change` say; `Full` for too many; `Busy` when another process has changed it at the same moment.
pub async fn change(
    store: &Store,
    key: &PoolKey,
    pool: Uuid,
    owner: impl Future<Output = Result<()>>,
    change: impl FnOnce(&mut Vec<CopySpec>) -> Result<()>,
) -> Result<Vec<CopySpec>> {
    let (number, mut copies) = read_numbered(store, key, pool).await?;
    // In this order: what a successor has changed since it was read makes this lose.
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
        tracing::debug!(error = %error.chain(), "old lists of copies were not deleted");
    }
    Ok(body.copies)
}
