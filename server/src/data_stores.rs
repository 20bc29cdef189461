//! The data stores of a pool: which ones it has, how a place becomes one, and how they are opened.
//!
//! Invariants:
//! - A place becomes a data store once, by the create of its identity, and only if it holds nothing of
//!   another pool. It belongs to one pool.
//! - Numbers of stores are random: those in the records of a pool that was restored from a copy are those
//!   of other stores.
//! - The list names a store before a fragment is written there.
//! - A store whose identity cannot be read is away. Nothing is ever made in its place.

mod identity;
mod list;
mod room;

use crate::node;
use async_trait::async_trait;
use block::conditions::Report;
use block::seal::PoolKey;
use block::{ConditionKind, Error, ErrorKind, Result};
use config::{Config, DataSettings, DataStoreSettings, DriveUrl};
use control::store::{Store, StoreOptions};
use datanode::{
    CodedOptions, CodedSegments, NamedStore, ObjectFragments, Scheme, StoreId, StoreInfo, Witness,
};
use dnode::{NodeObjects, NodePlace};
use engine::config::PoolConfig;
use engine::data_stores::{
    DataStoreStatus, DataStores, DataStoresAsked, DataStoresStatus, FRAGMENTS, OpenDataStores, Room,
};
use identity::Identity;
use list::{List, StoreEntry};
use object_store::path::Path;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tiering::segment_store::SegmentStore;
use uuid::Uuid;

/// Subject of the condition that the data stores are too few.
const POOL: &str = "pool";
/// Requests at a time. Chosen by hand: three drives that hang leave threads for the others; a bucket is far.
const DIRECTORY_WIDTH: usize = 4;
const BUCKET_WIDTH: usize = 64;
/// Time for which a store must have failed before segments go without the fragments that it would get. Chosen by
/// hand: longer than a connection takes to be made again, and short for a log that fills meanwhile.
const DEBT_AFTER: Duration = Duration::from_secs(10);
/// How long a look at the identity of a bucket or a drive elsewhere counts. Chosen by hand: buckets are not unmounted, and
/// a data node looks at its drives itself.
const BUCKET_LOOK: Duration = Duration::from_secs(10);

/// Returns the settings of the configured pool, with its data stores.
pub(crate) fn pool_config(config: &Config) -> PoolConfig {
    let settings = config.settings().data.clone();
    let stores = ConfiguredStores { settings, dir: config.dir().to_owned() };
    config.pool(Arc::new(stores))
}

/// The data stores that the configuration names.
#[derive(Debug)]
struct ConfiguredStores {
    settings: DataSettings,
    /// The pool's directory, which may be that of a node of a cluster.
    dir: PathBuf,
}

#[async_trait]
impl DataStores for ConfiguredStores {
    async fn open(&self, asked: DataStoresAsked<'_>) -> Result<Option<Arc<dyn OpenDataStores>>> {
        let (mut number, found) = list::read(asked.store, asked.key, asked.pool).await?;
        let list = match (asked.owner, self.settings.scheme()) {
            (Some(owner), Some(scheme)) => {
                let wanted = self.wanted(&asked, scheme, &found).await?;
                if found.as_ref() != Some(&wanted) {
                    owner.check().await?;
                    number += 1;
                    list::write(asked.store, asked.key, asked.pool, number, &wanted).await?;
                }
                Some(wanted)
            }
            _ => found,
        };
        let Some(list) = list else { return Ok(None) };
        let opened = self.open_stores(&asked, list, number)?;
        opened.show_few(&asked);
        Ok(Some(Arc::new(opened)))
    }
}

impl ConfiguredStores {
    /// Brings the list in line with the configuration.
    async fn wanted(
        &self,
        asked: &DataStoresAsked<'_>,
        scheme: Scheme,
        found: &Option<List>,
    ) -> Result<List> {
        let known = found.as_ref().map_or(&[][..], |list| &list.stores);
        let mut list = List { scheme: scheme.to_string(), stores: Vec::new() };
        let identities = self.settings.stores.iter().map(|settings| async move {
            let place = self.open_place(asked, &settings.url, settings.env_prefix.as_deref())?;
            let identity = identity::read(&place).await;
            Ok::<_, Error>((settings, place, identity))
        });
        let mut unnamed = Vec::new();
        // A store is known by its identity, whatever place it has now.
        for looked in futures::future::join_all(identities).await {
            let (settings, place, identity) = looked?;
            match identity {
                Ok(Some(identity)) => {
                    let entry = named(asked, settings, known, &identity)?;
                    if let Some(twin) = list.stores.iter().find(|it| it.number == entry.number) {
                        let what = format!(
                            "open data stores: {} and {} are the same place; name each store once",
                            twin.url, entry.url
                        );
                        return Err(Error::new(ErrorKind::Invalid, what));
                    }
                    list.stores.push(entry);
                }
                other => unnamed.push((settings, place, other.err())),
            }
        }
        for (settings, place, error) in unnamed {
            let is_free = |entry: &&StoreEntry| {
                entry.url == settings.url && list.stores.iter().all(|it| it.number != entry.number)
            };
            // Its disk may not be mounted: it is away.
            if let Some(entry) = known.iter().find(is_free) {
                list.stores.push(entry_of(settings, entry.number, &entry.id));
                continue;
            }
            // A place where a store was, and which has another place now: a mount point without its disk, perhaps.
            let was_store = known.iter().any(|entry| entry.url == settings.url);
            let made = match error {
                Some(error) => Err(error),
                None if was_store => {
                    let what = "its data store is elsewhere now, and it is not made one again by itself; name another \
                                directory of the drive";
                    Err(Error::new(ErrorKind::Unavailable, what))
                }
                None => make(asked, settings, &place, known, &list).await,
            };
            match made {
                Ok(entry) => list.stores.push(entry),
                // The pool has other stores to go on with.
                Err(error) if found.is_some() && error.kind() == ErrorKind::Unavailable => {
                    let what = format!(
                        "the data store {} could not be added: {}",
                        settings.url,
                        error.chain()
                    );
                    let report = Report::new(
                        what,
                        "it gets no fragments",
                        "correct the cause, and restart the daemon",
                    );
                    asked.conditions.raise(ConditionKind::DataStoreAway, &settings.url, report);
                }
                Err(error) => return Err(error),
            }
        }
        let kept: BTreeSet<u32> = list.stores.iter().map(|entry| entry.number).collect();
        let leaving = known.iter().filter(|entry| !kept.contains(&entry.number));
        list.stores.extend(leaving.map(|entry| StoreEntry { is_leaving: true, ..entry.clone() }));
        // The order of their numbers, so that the same stores are the same list.
        list.stores.sort_unstable_by_key(|entry| entry.number);
        Ok(list)
    }
}

/// The entry of a configured store.
fn entry_of(settings: &DataStoreSettings, number: u32, id: &str) -> StoreEntry {
    StoreEntry {
        number,
        id: id.to_owned(),
        url: settings.url.clone(),
        env_prefix: settings.env_prefix.clone(),
        domain: settings.domain().to_owned(),
        weight: settings.weight(),
        is_leaving: false,
    }
}

/// The entry of a place that has an identity.
///
/// # Errors
/// `Invalid` for the store of another pool.
fn named(
    asked: &DataStoresAsked<'_>,
    settings: &DataStoreSettings,
    known: &[StoreEntry],
    identity: &Identity,
) -> Result<StoreEntry> {
    let refused = |why: String| Err(Error::new(ErrorKind::Invalid, why));
    if (identity.pool, identity.lineage) != (asked.pool, asked.lineage) {
        let restored = match identity.pool == asked.pool {
            true => {
                ", or was restored from a copy of it: a restored pool has data stores of its own"
            }
            false => "",
        };
        return refused(format!(
            "open data stores: {} belongs to pool {}{restored}; this is pool {}. Use another directory or prefix",
            settings.url, identity.pool, asked.pool
        ));
    }
    let twin = known.iter().find(|entry| entry.number == identity.number);
    match twin.is_none_or(|entry| entry.id == identity.id) {
        true => Ok(entry_of(settings, identity.number, &identity.id)),
        false => refused(format!(
            "open data stores: {} is another store than the one of its number; use another directory or prefix",
            settings.url
        )),
    }
}

/// Makes a place a data store.
async fn make(
    asked: &DataStoresAsked<'_>,
    settings: &DataStoreSettings,
    place: &Store,
    known: &[StoreEntry],
    list: &List,
) -> Result<StoreEntry> {
    let numbers = known.iter().chain(&list.stores).map(|entry| entry.number).collect();
    let identity = Identity::fresh(asked.pool, asked.lineage, &numbers);
    identity::make(place, &identity).await?;
    tracing::info!(store = settings.url, "spindle made a data store");
    Ok(entry_of(settings, identity.number, &identity.id))
}

/// The way of an owner to change the list.
#[derive(Debug)]
struct ListWriter {
    store: Store,
    key: PoolKey,
    pool: Uuid,
    /// Number of the newest document of the chain.
    number: tokio::sync::Mutex<u64>,
}

/// The open data stores.
#[derive(Debug)]
struct OpenedStores {
    segments: Arc<CodedSegments>,
    list: Mutex<List>,
    /// Present for the owner of the pool.
    writer: Option<ListWriter>,
    places: Vec<Store>,
}

impl ConfiguredStores {
    /// Opens the place of a data store, which must exist.
    ///
    /// # Errors
    /// `Invalid` for a URL that names none, and for a drive of a data node if the directory belongs to no cluster, or is
    /// that node.
    fn open_place(
        &self,
        asked: &DataStoresAsked<'_>,
        url: &str,
        env_prefix: Option<&str>,
    ) -> Result<Store> {
        if let Some(drive) = DriveUrl::parse(url)? {
            return self.open_drive(asked, url, drive);
        }
        // Other stores have what this one does not send in time.
        let options = StoreOptions {
            bulk_timeout: Duration::from_secs(30),
            bulk_retry_count_max: 1,
            bulk_retry_timeout: Duration::from_secs(10),
            ..StoreOptions::default()
        };
        Store::await_as(url, &options, env_prefix)
    }

    fn open_drive(&self, asked: &DataStoresAsked<'_>, url: &str, drive: DriveUrl) -> Result<Store> {
        let invalid = |why: String| {
            Err(Error::new(ErrorKind::Invalid, format!("open data stores: {url}: {why}")))
        };
        let Some(cluster) = node::open_in(&self.dir)? else {
            let dir = self.dir.display();
            return invalid(format!(
                "{dir} belongs to no cluster; found one with `spindle node init`, and let the data nodes join it"
            ));
        };
        let DriveUrl { node, drive } = drive;
        if [cluster.node_name(), &cluster.node_id().to_string()].contains(&&*node) {
            let what =
                "it is this node; name the directory of a drive of this machine, or another node";
            return invalid(what.to_owned());
        }
        let (pool, lineage, owner) = (asked.pool, asked.lineage, asked.writer);
        let place = NodePlace { node, drive, pool, lineage, owner };
        Ok(Store::from_objects(url, Arc::new(NodeObjects::new(cluster, place))))
    }

    fn open_stores(
        &self,
        asked: &DataStoresAsked<'_>,
        list: List,
        number: u64,
    ) -> Result<OpenedStores> {
        let scheme = list.scheme()?;
        let (mut stores, mut places) = (Vec::new(), Vec::new());
        for entry in &list.stores {
            let place = self.open_place(asked, &entry.url, entry.env_prefix.as_deref())?;
            let lasts = if place.local_dir().is_some() { Duration::ZERO } else { BUCKET_LOOK };
            let identity = Identity::of(asked.pool, asked.lineage, entry);
            let witness = Witness { path: identity::PATH.into(), bytes: identity.encode()?, lasts };
            let store = ObjectFragments::new(place.bulk(), witness, asked.clock.clone());
            let info = StoreInfo {
                id: StoreId(entry.number),
                domain: entry.domain.clone(),
                weight: if entry.is_leaving { 0 } else { entry.weight },
            };
            let width = if place.local_dir().is_some() { DIRECTORY_WIDTH } else { BUCKET_WIDTH };
            let name = entry.url.clone();
            stores.push(NamedStore { info, name, store: Arc::new(store), width });
            places.push(place);
        }
        let options = CodedOptions {
            pool: asked.pool.into_bytes(),
            scheme,
            stores,
            objects: asked.objects.clone(),
            clock: asked.clock.clone(),
            conditions: asked.conditions.clone(),
            debt_after: DEBT_AFTER,
            lost_after: self.settings.lost_after.duration(),
        };
        let writer = asked.owner.map(|_| ListWriter {
            store: asked.store.clone(),
            key: asked.key.clone(),
            pool: asked.pool,
            number: tokio::sync::Mutex::new(number),
        });
        let segments = Arc::new(CodedSegments::new(options));
        Ok(OpenedStores { segments, list: Mutex::new(list), writer, places })
    }
}

impl OpenedStores {
    /// Shows as a condition that the stores are in too few failure domains.
    fn show_few(&self, asked: &DataStoresAsked<'_>) {
        let scheme = self.segments.scheme();
        let list = self.list.lock();
        let in_use = list.stores.iter().filter(|entry| !entry.is_leaving);
        let domains: BTreeSet<&str> = in_use.map(|entry| entry.domain.as_str()).collect();
        let report = (domains.len() < scheme.fragments()).then(|| {
            Report::new(
                format!(
                    "the data stores are in {} failure domains, and {scheme} needs {}",
                    domains.len(),
                    scheme.fragments()
                ),
                "new segments lack fragments, so fewer losses are survived",
                "add data stores in other failure domains",
            )
        });
        asked.conditions.set(ConditionKind::DataStoresFew, POOL, report);
    }
}

#[async_trait]
impl OpenDataStores for OpenedStores {
    fn segments(&self) -> Arc<dyn SegmentStore> {
        Arc::clone(&self.segments) as Arc<dyn SegmentStore>
    }

    async fn look(&self) {
        self.segments.look().await;
    }

    fn clean_unfinished(&self) {
        self.places.iter().for_each(|place| place.clean_unfinished(FRAGMENTS));
    }

    fn places(&self) -> Vec<(Store, Path)> {
        self.places.iter().map(|place| (place.clone(), Path::from(identity::PATH))).collect()
    }

    async fn forget_unnamed(&self, named: &BTreeSet<u32>) -> Result<()> {
        let Some(writer) = &self.writer else { return Ok(()) };
        let mut number = writer.number.lock().await;
        let mut list = self.list.lock().clone();
        let is_done = |entry: &StoreEntry| entry.is_leaving && !named.contains(&entry.number);
        let forgotten: Vec<StoreEntry> =
            list.stores.extract_if(.., |entry| is_done(entry)).collect();
        if forgotten.is_empty() {
            return Ok(());
        }
        let written =
            list::write(&writer.store, &writer.key, writer.pool, *number + 1, &list).await;
        if written.is_err() {
            // The answer to an earlier attempt may have been lost.
            let (newest, found) = list::read(&writer.store, &writer.key, writer.pool).await?;
            if found.as_ref() != Some(&list) {
                return written;
            }
            *number = newest;
        } else {
            *number += 1;
        }
        *self.list.lock() = list;
        for entry in forgotten {
            self.segments.forget(StoreId(entry.number));
            tracing::info!(
                store = entry.url,
                "a data store that is no longer configured has nothing that is needed, and is forgotten"
            );
        }
        Ok(())
    }

    fn status(&self) -> DataStoresStatus {
        let states = self.segments.states();
        let store = |entry: &StoreEntry| {
            let state = states.iter().find(|state| state.info.id == StoreId(entry.number));
            DataStoreStatus {
                number: entry.number,
                url: entry.url.clone(),
                node: DriveUrl::parse(&entry.url).ok().flatten().map(|drive| drive.node),
                domain: entry.domain.clone(),
                is_leaving: entry.is_leaving,
                failure: state.and_then(|state| state.failure.clone()),
                is_lost: state.is_some_and(|state| state.is_lost),
                is_readable: state.is_some_and(|state| state.is_readable),
                is_taking: state.is_some_and(|state| state.is_taking),
                is_staying: state.is_some_and(|state| state.is_staying),
            }
        };
        let (counts, scheme) = (self.segments.counts(), self.segments.scheme());
        let list = self.list.lock();
        DataStoresStatus {
            scheme: list.scheme.clone(),
            fragment_count: scheme.fragments(),
            written_min: scheme.written_min(),
            stores: list.stores.iter().map(store).collect(),
            read_count: counts.reads,
            degraded_read_count: counts.degraded_reads,
            hedged_read_count: counts.hedged_reads,
            written_bytes: counts.written_bytes,
            missing_write_count: counts.missing_writes,
        }
    }

    async fn room(&self, numbers: &BTreeSet<u32>) -> Room {
        let urls = {
            let list = self.list.lock();
            let chosen = list.stores.iter().filter(|entry| numbers.contains(&entry.number));
            chosen.map(|entry| entry.url.clone()).collect()
        };
        room::of_stores(urls).await
    }
}

#[cfg(test)]
mod tests;
