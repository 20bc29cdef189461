//! The doctor of a pool over data stores: whether data is at risk, and what would be unavailable without some of them.
//!
//! Invariants:
//! - Nothing is changed, but that each store is looked at.
//! - The answer is counted from the records of all segments, never assumed.

use crate::data_stores::{DataStoreStatus, DataStoresStatus, OpenDataStores, Room};
use async_recursion::async_recursion;
use block::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::fmt;
use tiering::Tier;
use tiering::survey::{Outlook, Survey, SurveyedStore};

/// Most names that an error lists. Chosen by hand: a screen.
const NAMES_MAX: usize = 32;

/// Data stores that are taken as gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Without {
    /// All drives of a data node, by the name or id that their URLs have.
    Node(String),
    /// The store with this URL.
    Store(String),
    /// All stores of a failure domain.
    Domain(String),
}

impl fmt::Display for Without {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Without::Node(name) => write!(f, "data node {name}"),
            Without::Store(url) => write!(f, "data store {url}"),
            Without::Domain(name) => write!(f, "failure domain {name}"),
        }
    }
}

impl Without {
    fn takes(&self, store: &DataStoreStatus) -> bool {
        let plain = |url: &str| url.strip_suffix('/').unwrap_or(url).to_owned();
        match self {
            Without::Node(name) => store.node.as_ref() == Some(name),
            Without::Store(url) => plain(url) == plain(&store.url),
            Without::Domain(name) => store.domain == *name,
        }
    }

    /// The error if none of the stores is meant.
    fn unknown(&self, stores: &[DataStoreStatus]) -> Error {
        let names: BTreeSet<&str> = match self {
            Without::Node(_) => stores.iter().filter_map(|store| store.node.as_deref()).collect(),
            Without::Store(_) => stores.iter().map(|store| store.url.as_str()).collect(),
            Without::Domain(_) => stores.iter().map(|store| store.domain.as_str()).collect(),
        };
        let shown: Vec<&str> = names.iter().copied().take(NAMES_MAX).collect();
        let more = match names.len() - shown.len() {
            0 => String::new(),
            count => format!(" and {count} more"),
        };
        let known = match shown.is_empty() {
            true => "none".to_owned(),
            false => shown.join(", ") + &more,
        };
        let what = format!("look at the pool without {self}: it has none; known are: {known}");
        Error::new(ErrorKind::NotFound, what)
    }
}

/// Findings of [`examine`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// The data stores.
    pub stores: DataStoresStatus,
    /// URLs of those that were taken as gone.
    pub gone: Vec<String>,
    /// What the walk has counted.
    pub survey: Survey,
    /// Space that is left on the stores that take new fragments.
    pub room: Room,
    /// The same without those that were taken as gone; absent if none was.
    pub room_then: Option<Room>,
}

impl Findings {
    /// Whether there is room for the fragments that have to be rebuilt; `None` if it is unknown.
    #[must_use]
    pub fn is_room_enough(outlook: &Outlook, room: &Room) -> Option<bool> {
        match room.known_bytes >= outlook.missing_bytes {
            true => Some(true),
            false if room.unknown_count > 0 => None,
            false => Some(false),
        }
    }
}

/// Looks at the data stores, and walks the records of all segments. `without`: stores that are taken as gone, all of
/// them together.
///
/// # Errors
/// `NotFound` for a node, store or domain that the pool does not have; database errors.
#[async_recursion]
pub async fn examine(
    tier: &Tier,
    stores: &dyn OpenDataStores,
    without: &[Without],
) -> Result<Findings> {
    check(&stores.status().stores, without)?;
    stores.look().await;
    let status = stores.status();
    let is_gone = |store: &DataStoreStatus| without.iter().any(|one| one.takes(store));
    let surveyed: Vec<SurveyedStore> =
        status.stores.iter().map(|store| surveyed(store, is_gone(store))).collect();
    let gone = status.stores.iter().filter(|store| is_gone(store));
    let gone: Vec<String> = gone.map(|store| store.url.clone()).collect();
    let numbers = |is_without: bool| -> BTreeSet<u32> {
        let taking = surveyed.iter().filter(|it| it.is_taking && !(is_without && it.is_gone));
        taking.map(|store| store.number).collect()
    };
    let (now, then) = (numbers(false), numbers(true));
    let room = stores.room(&now).await;
    let room_then = match without.is_empty() {
        true => None,
        false => Some(stores.room(&then).await),
    };
    let walked = tier.clone();
    let walk = tier.background().spawn(async move { walked.survey(&surveyed).await });
    let survey = walk.await.map_err(|cause| {
        Error::with_source(ErrorKind::Unavailable, "walk through all segments", cause)
    })??;
    Ok(Findings { stores: status, gone, survey, room, room_then })
}

/// Checks that each of them means a store.
fn check(stores: &[DataStoreStatus], without: &[Without]) -> Result<()> {
    match without.iter().find(|one| !stores.iter().any(|store| one.takes(store))) {
        Some(unknown) => Err(unknown.unknown(stores)),
        None => Ok(()),
    }
}

fn surveyed(store: &DataStoreStatus, is_gone: bool) -> SurveyedStore {
    SurveyedStore {
        number: store.number,
        domain: store.domain.clone(),
        is_readable: store.is_readable,
        is_taking: store.is_taking,
        is_staying: store.is_staying,
        is_gone,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(number: u32, url: &str, node: Option<&str>, domain: &str) -> DataStoreStatus {
        DataStoreStatus {
            number,
            url: url.to_owned(),
            node: node.map(str::to_owned),
            domain: domain.to_owned(),
            ..DataStoreStatus::default()
        }
    }

    fn stores() -> Vec<DataStoreStatus> {
        vec![
            store(1, "spindle://b/nvme0", Some("b"), "spindle://b"),
            store(2, "spindle://b/nvme1", Some("b"), "spindle://b"),
            store(3, "spindle://bb", Some("bb"), "rack 2"),
            store(4, "/mnt/b/", None, "rack 2"),
        ]
    }

    #[test]
    fn stores_are_chosen_by_node_url_and_failure_domain() {
        let chosen = |one: Without| -> Vec<u32> {
            let stores = stores();
            stores.iter().filter(|store| one.takes(store)).map(|store| store.number).collect()
        };
        assert_eq!(chosen(Without::Node("b".to_owned())), [1, 2]);
        assert_eq!(chosen(Without::Node("bb".to_owned())), [3]);
        assert_eq!(chosen(Without::Store("/mnt/b".to_owned())), [4]);
        assert_eq!(chosen(Without::Store("spindle://b/nvme1/".to_owned())), [2]);
        assert_eq!(chosen(Without::Domain("rack 2".to_owned())), [3, 4]);
        assert_eq!(chosen(Without::Domain("spindle://b".to_owned())), [1, 2]);
    }

    #[test]
    fn unknown_store_is_an_error_with_those_that_are_known() {
        let refused = |one: Without| {
            let error = check(&stores(), &[Without::Node("b".to_owned()), one]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFound);
            error.to_string()
        };
        let said = refused(Without::Node("c".to_owned()));
        assert!(
            said.contains("without data node c") && said.ends_with("known are: b, bb"),
            "{said}"
        );
        let said = refused(Without::Domain("b".to_owned()));
        assert!(said.ends_with("known are: rack 2, spindle://b"), "{said}");
        let said = refused(Without::Store("/mnt".to_owned()));
        assert!(said.contains("/mnt/b/, spindle://b/nvme0"), "{said}");
        let many: Vec<DataStoreStatus> =
            (0..40).map(|number| store(number, "/x", None, &format!("{number:02}"))).collect();
        let said = check(&many, &[Without::Node("c".to_owned())]).unwrap_err().to_string();
        assert!(said.ends_with("known are: none"), "{said}");
        let said = check(&many, &[Without::Domain("c".to_owned())]).unwrap_err().to_string();
        assert!(said.ends_with("30, 31 and 8 more"), "{said}");
    }

    #[test]
    fn room_is_unknown_only_while_the_known_part_is_too_small() {
        let outlook = Outlook { missing_bytes: 100, ..Outlook::default() };
        let room = |known_bytes, unknown_count| {
            Findings::is_room_enough(&outlook, &Room { known_bytes, unknown_count })
        };
        assert_eq!((room(100, 0), room(100, 3)), (Some(true), Some(true)));
        assert_eq!((room(99, 0), room(99, 3)), (Some(false), None));
    }
}
