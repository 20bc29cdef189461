//! The list of a pool's data stores: a chain of documents in its store, so that each owner of the pool
//! knows them.
//!
//! Invariants:
//! - A document is authentic under the pool key, or it is refused as damaged.
//! - A store stays in the list while a record may name it.

use block::env::random_bytes;
use block::hex::to_hex;
use block::seal::PoolKey;
use block::{Error, ErrorKind, Result};
use control::chain::{Chain, Created, Format, corrupt, seal_document};
use control::store::Store;
use datanode::Scheme;
use engine::data_stores::FOLDER;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use uuid::Uuid;

/// Feature of a document with fields that commands have set: [`StoreEntry::is_draining`], [`StoreEntry::is_added`],
/// [`StoreEntry::is_domain_given`] and [`List::is_rebalancing`]. A program that does not know them would write to stores
/// that are drained, and drop added ones. Format: docs/format.md.
const FEATURE_COMMANDS: u64 = 1;
/// Documents kept for inspection.
const KEEP_COUNT: usize = 3;

/// The data stores of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct List {
    /// Scheme of new segments.
    pub(super) scheme: String,
    /// The stores, in the order of their numbers.
    pub(super) stores: Vec<StoreEntry>,
    /// Fragments move to where they would be if their segments were written now.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) is_rebalancing: bool,
}

/// A data store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoreEntry {
    /// The number in the placements of segments: random, not 0.
    pub(super) number: u32,
    /// Identity of the place, random.
    pub(super) id: String,
    /// URL, without credentials.
    pub(super) url: String,
    /// Prefix of the variables with settings and credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) env_prefix: Option<String>,
    /// Failure domain.
    pub(super) domain: String,
    /// Share of new fragments, relative to the others.
    pub(super) weight: u32,
    /// It is no longer configured, and gets no new fragments.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) is_leaving: bool,
    /// A command has taken new fragments from it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) is_draining: bool,
    /// A command or the media group has added it: it stays without being configured.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) is_added: bool,
    /// A command has named its failure domain, which its node does not change.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) is_domain_given: bool,
}

impl StoreEntry {
    /// Share of new fragments: none for a store that is to be empty.
    pub(super) fn present_weight(&self) -> u32 {
        if self.is_leaving || self.is_draining { 0 } else { self.weight }
    }
}

impl List {
    /// Scheme of new segments.
    ///
    /// # Errors
    /// `Unsupported` for one of a later version.
    pub(super) fn scheme(&self) -> Result<Scheme> {
        self.scheme.parse().map_err(|_| {
            let what = format!(
                "open data stores: the pool uses the scheme {}, which this version does not know; update it",
                self.scheme
            );
            Error::new(ErrorKind::Unsupported, what)
        })
    }

    /// Number of stores that take new fragments, of which a pool has a limited number.
    pub(super) fn in_use_count(&self) -> usize {
        self.stores.iter().filter(|entry| entry.present_weight() > 0).count()
    }

    /// Number of failure domains with a store that takes new fragments.
    pub(super) fn domain_count(&self) -> usize {
        self.domain_count_without(&BTreeSet::new())
    }

    /// The same without some stores, by their numbers.
    pub(super) fn domain_count_without(&self, failing: &BTreeSet<u32>) -> usize {
        let taking = self
            .stores
            .iter()
            .filter(|entry| entry.present_weight() > 0 && !failing.contains(&entry.number));
        taking.map(|entry| entry.domain.as_str()).collect::<BTreeSet<_>>().len()
    }

    /// The format of its document.
    pub(super) fn format(&self) -> Format {
        let of_command =
            |entry: &StoreEntry| entry.is_draining || entry.is_added || entry.is_domain_given;
        match self.is_rebalancing || self.stores.iter().any(of_command) {
            true => Format::with_incompatible(FEATURE_COMMANDS),
            false => Format::CURRENT,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Body {
    pub(super) format: Format,
    pub(super) pool: Uuid,
    pub(super) number: u64,
    pub(super) list: List,
    /// Random: distinguishes our own create from another's after an ambiguous answer.
    pub(super) nonce: String,
}

/// Reads the list, and the number of its document; 0 if there is none.
///
/// # Errors
/// `Corrupt` for a damaged document; those of reading the store.
pub(super) async fn read(store: &Store, key: &PoolKey, pool: Uuid) -> Result<(u64, Option<List>)> {
    let chain = Chain::new(store, FOLDER);
    let newest = chain.newest_body_with::<Body>(key, FEATURE_COMMANDS).await?;
    let Some((number, body)) = newest else { return Ok((0, None)) };
    if body.pool != pool || body.number != number {
        return Err(corrupt(&chain.name(number), "it belongs elsewhere"));
    }
    Ok((number, Some(body.list)))
}

/// Writes the list under the next number of the chain.
///
/// # Errors
/// `Busy` if another process has changed it at the same moment; those of the store.
pub(super) async fn write(
    store: &Store,
    key: &PoolKey,
    pool: Uuid,
    number: u64,
    list: &List,
) -> Result<()> {
    let chain = Chain::new(store, FOLDER);
    let (format, nonce) = (list.format(), to_hex(&random_bytes::<16>()));
    let body = Body { format, pool, number, list: list.clone(), nonce };
    if chain.create(number, &seal_document(key, FOLDER, &body)?).await? == Created::Lost {
        let what =
            "change the list of data stores: another process did so at the same moment; try again";
        return Err(Error::new(ErrorKind::Busy, what));
    }
    if let Err(error) = chain.prune(KEEP_COUNT).await {
        tracing::debug!(error = %error.chain(), "could not delete old lists of data stores");
    }
    Ok(())
}
