//! The identity of a data store: an object in it that names the pool and the store's number. It is no
//! secret, and protects against mistakes: a disk that is not mounted, a directory of another pool.
//!
//! Invariants:
//! - It is created only if absent, in a place that holds nothing of another pool, and never changes.

use super::list::StoreEntry;
use block::env::{random_bytes, random_uuid};
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use control::store::Store;
use engine::data_stores::FRAGMENTS;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::time::Duration;
use uuid::Uuid;

/// Name of the object.
pub(super) const PATH: &str = "spindle-data-store.json";
/// Version of the object. Format: docs/format-fragment.md.
const VERSION: u32 = 1;
/// Longest wait for a place at the opening. Chosen by hand.
const ANSWER_MAX: Duration = Duration::from_secs(20);
/// Folders that show that a place holds a pool or a copy of one.
const TAKEN: [&str; 3] = ["manifest", "keyring", "copy"];

/// The object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Identity {
    /// A reader refuses a version above its own.
    version: u32,
    /// The pool.
    pub(super) pool: Uuid,
    /// Distinguishes a pool that was restored from a copy; otherwise the same as `pool`.
    pub(super) lineage: Uuid,
    /// The number of the store in placements: random, not 0.
    pub(super) number: u32,
    /// Identity of the place: random.
    pub(super) id: String,
}

impl Identity {
    /// Makes the identity of a new store, with none of these numbers.
    pub(super) fn fresh(pool: Uuid, lineage: Uuid, numbers: &BTreeSet<u32>) -> Identity {
        let number = std::iter::repeat_with(|| u32::from_le_bytes(random_bytes()))
            .find(|number| *number != 0 && !numbers.contains(number))
            .expect("the numbers do not end");
        Identity { version: VERSION, pool, lineage, number, id: random_uuid().to_string() }
    }

    /// The identity of a store in the list.
    pub(super) fn of(pool: Uuid, lineage: Uuid, entry: &StoreEntry) -> Identity {
        let StoreEntry { number, id, .. } = entry.clone();
        Identity { version: VERSION, pool, lineage, number, id }
    }

    /// The bytes of the object: one line of JSON.
    pub(super) fn encode(&self) -> Result<Bytes> {
        let text = serde_json::to_string(self).map_err(|error| {
            Error::with_source(ErrorKind::Io, "write the identity of a data store", error)
        })?;
        Ok((text + "\n").into())
    }

    fn decode(url: &str, bytes: &[u8]) -> Result<Identity> {
        #[derive(Deserialize)]
        struct VersionOnly {
            version: u32,
        }
        let damaged = |error| {
            let what = format!("open data stores: {url}: {PATH} is damaged");
            Error::with_source(ErrorKind::Corrupt, what, error)
        };
        let version = serde_json::from_slice::<VersionOnly>(bytes).map_err(damaged)?.version;
        if version > VERSION {
            let what = format!(
                "open data stores: {url} is of version {version}, and this version of spindle knows {VERSION}; update it"
            );
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        serde_json::from_slice(bytes).map_err(damaged)
    }
}

/// Reads the identity of a place. `None` if it has none.
///
/// # Errors
/// `Corrupt` and `Unsupported` for what is there; `Unavailable` for a place that does not answer.
pub(super) async fn read(place: &Store) -> Result<Option<Identity>> {
    let path = Path::from(PATH);
    let found = async { place.control().get(&path).await?.bytes().await };
    // A drive may hang.
    let found = tokio::time::timeout(ANSWER_MAX, found).await.unwrap_or_else(|_| {
        let source = format!("no answer in {} s", ANSWER_MAX.as_secs()).into();
        Err(object_store::Error::Generic { store: "data store", source })
    });
    match found {
        Ok(bytes) => Identity::decode(place.url(), &bytes).map(Some),
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(away(place, error)),
    }
}

/// Makes a place a data store.
///
/// # Errors
/// `Invalid` for a place that holds something of another pool; `Unsupported` for a store without
/// conditional creates; `Unavailable` for one that does not answer.
pub(super) async fn make(place: &Store, identity: &Identity) -> Result<()> {
    let url = place.url();
    let listed = place.control().list_with_delimiter(None).await;
    let listed = listed.map_err(|error| away(place, error))?;
    let folders: BTreeSet<&str> =
        listed.common_prefixes.iter().filter_map(Path::filename).collect();
    if let Some(folder) = TAKEN.iter().find(|folder| folders.contains(**folder)) {
        let what = format!(
            "open data stores: {url} holds a pool or a copy of one (its folder {folder}); use another directory or prefix"
        );
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    if folders.contains(FRAGMENTS) {
        let what = format!(
            "open data stores: {url} holds fragments, and {PATH} is missing there; bring it back if the store is one \
             of this pool, otherwise use another directory or prefix"
        );
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    place.probe().await?;
    let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
    let put = place.control().put_opts(&Path::from(PATH), identity.encode()?.into(), options).await;
    // After an ambiguous answer, or beside another process, the object says whose the place is.
    match read(place).await? {
        Some(found) if found == *identity => Ok(()),
        Some(_) => {
            let what = format!(
                "open data stores: another process made a data store in {url} at the same moment; try again"
            );
            Err(Error::new(ErrorKind::Busy, what))
        }
        None => match put {
            Err(error) => Err(away(place, error)),
            Ok(_) => {
                let what =
                    format!("open data stores: {url} does not return what was written there");
                Err(Error::new(ErrorKind::Unavailable, what))
            }
        },
    }
}

fn away(place: &Store, error: object_store::Error) -> Error {
    let doing = "open data stores";
    let error = place.explain(doing, error);
    match error.kind() {
        ErrorKind::Denied | ErrorKind::Unsupported => error,
        _ => Error::with_source(ErrorKind::Unavailable, doing, error),
    }
}
