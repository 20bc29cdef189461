//! The data stores of a pool: which ones it has, how a place becomes one, and how they are opened.
//!
//! Invariants:
//! - A place becomes a data store once, by the create of its identity, and only if it holds nothing of
//!   another pool. It belongs to one pool.
//! - Numbers of stores are random: those in the records of a pool that was restored from a copy are those
//!   of other stores.
//! - The list names a store before a fragment is written there.
//! - A store whose identity cannot be read is away. Nothing is ever made in its place.

mod changes;
mod identity;
mod list;
mod media_group;
mod opener;
mod room;

use async_trait::async_trait;
use block::conditions::Report;
use block::seal::PoolKey;
use block::{ConditionKind, Conditions, Error, ErrorKind, Result};
use changes::Newest;
use config::{Config, DataSettings, DataStoreSettings, DriveUrl};
use control::manifest::Ownership;
use control::store::Store;
use datanode::{CodedOptions, CodedSegments, Scheme, StoreId};
use engine::config::PoolConfig;
use engine::data_stores::{
    DataStoreStatus, DataStores, DataStoresAsked, DataStoresStatus, FRAGMENTS, NewDataStore,
    OpenDataStores, Room,
};
use list::{List, StoreEntry};
use media_group::MediaGroup;
use object_store::path::Path;
use opener::{Opener, entry_of};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tiering::segment_store::SegmentStore;
use tiering::tiers::{TierPolicy, Tiers};
use uuid::Uuid;

/// Subject of the condition that the data stores are too few.
const POOL: &str = "pool";
/// Time for which a store must have failed before segments go without the fragments that it would get. Chosen by
/// hand: longer than a connection takes to be made again, and short for a log that fills meanwhile.
const DEBT_AFTER: Duration = Duration::from_secs(10);

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
        let opener = Opener::new(&asked, self.dir.clone());
        let list = match (asked.owner, self.settings.scheme()) {
            (Some(owner), Some(scheme)) => {
                let mut wanted = self.wanted(&asked, &opener, scheme, &found).await?;
                self.add_group(&opener, scheme, found.as_ref(), &mut wanted).await?;
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
        let opened = self.open_stores(&asked, opener, list, number)?;
        opened.show_few();
        Ok(Some(Arc::new(opened)))
    }
}

impl ConfiguredStores {
    /// Brings the list in line with the configuration.
    async fn wanted(
        &self,
        asked: &DataStoresAsked<'_>,
        opener: &Opener,
        scheme: Scheme,
        found: &Option<List>,
    ) -> Result<List> {
        let known = found.as_ref().map_or(&[][..], |list| &list.stores);
        let is_rebalancing = found.as_ref().is_some_and(|list| list.is_rebalancing);
        let mut list = List { scheme: scheme.to_string(), stores: Vec::new(), is_rebalancing };
        let identities = self.settings.stores.iter().map(|settings| async move {
            let place = opener.open_place(&settings.url, settings.env_prefix.as_deref())?;
            let identity = identity::read(&place).await;
            Ok::<_, Error>((settings, place, identity))
        });
        let mut unnamed = Vec::new();
        // A store is known by its identity, whatever place it has now.
        for looked in futures::future::join_all(identities).await {
            let (settings, place, identity) = looked?;
            match identity {
                Ok(Some(identity)) => {
                    let entry = opener.named(settings, known, &identity)?;
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
                None => opener.make(settings, &place, known, &list).await,
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
        let others = known.iter().filter(|entry| !kept.contains(&entry.number));
        list.stores.extend(others.map(|entry| {
            // One that a command has added stays until another one drains it.
            let is_leaving = !entry.is_added || entry.is_draining;
            StoreEntry { is_leaving, ..entry.clone() }
        }));
        // What commands have set stays.
        for entry in &mut list.stores {
            if let Some(earlier) = known.iter().find(|earlier| earlier.number == entry.number) {
                (entry.is_draining, entry.is_added) = (earlier.is_draining, earlier.is_added);
                self.keep_domain(entry, earlier);
            }
        }
        // The order of their numbers, so that the same stores are the same list.
        list.stores.sort_unstable_by_key(|entry| entry.number);
        Ok(list)
    }

    /// Lets a drive of a data node keep its failure domain unless the configuration names one: its node may have told
    /// it. Only with a media group, in which the node tells it again soon.
    fn keep_domain(&self, entry: &mut StoreEntry, earlier: &StoreEntry) {
        let is_explicit =
            |store: &DataStoreSettings| store.url == entry.url && store.domain.is_some();
        let is_of_node = self.settings.group.is_some()
            && entry.url == earlier.url
            && DriveUrl::parse(&entry.url).is_ok_and(|url| url.is_some())
            && !self.settings.stores.iter().any(is_explicit);
        if is_of_node {
            entry.domain.clone_from(&earlier.domain);
            entry.is_domain_given = earlier.is_domain_given;
        }
    }
}

/// The way of an owner to change the list.
#[derive(Debug)]
struct ListWriter {
    store: Store,
    key: PoolKey,
    pool: Uuid,
    owner: Ownership,
    /// One change is made at a time.
    newest: tokio::sync::Mutex<Newest>,
}

/// The open data stores.
#[derive(Debug)]
struct OpenedStores {
    segments: Arc<CodedSegments>,
    list: Mutex<List>,
    /// Present for the owner of the pool.
    writer: Option<ListWriter>,
    places: Mutex<Vec<Store>>,
    opener: Opener,
    /// The configuration names the pool's data stores, so that one that it does not name may leave.
    is_configured: bool,
    /// URLs of the stores that the configuration names.
    configured: BTreeSet<String>,
    /// Present for the owner of a pool that has one.
    group: Option<MediaGroup>,
    /// Where the segments are to be.
    policy: TierPolicy,
    conditions: Conditions,
}

impl ConfiguredStores {
    fn open_stores(
        &self,
        asked: &DataStoresAsked<'_>,
        opener: Opener,
        list: List,
        number: u64,
    ) -> Result<OpenedStores> {
        let scheme = list.scheme()?;
        let (mut stores, mut places) = (Vec::new(), Vec::new());
        for entry in &list.stores {
            let (store, place) = opener.open_store(entry)?;
            stores.push(store);
            places.push(place);
        }
        let options = CodedOptions {
            pool: asked.pool.into_bytes(),
            scheme,
            stores,
            objects: asked.objects.clone(),
            is_emptying: self.settings.tiers == Tiers::ObjectStore,
            clock: asked.clock.clone(),
            conditions: asked.conditions.clone(),
            debt_after: DEBT_AFTER,
            lost_after: self.settings.lost_after.duration(),
        };
        let writer = asked.owner.map(|owner| ListWriter {
            store: asked.store.clone(),
            key: asked.key.clone(),
            pool: asked.pool,
            owner: owner.clone(),
            newest: tokio::sync::Mutex::new(Newest { number, is_unsure: false }),
        });
        let segments = CodedSegments::new(options);
        segments.set_rebalancing(list.is_rebalancing);
        Ok(OpenedStores {
            segments: Arc::new(segments),
            list: Mutex::new(list),
            writer,
            places: Mutex::new(places),
            opener,
            is_configured: self.settings.scheme().is_some(),
            configured: self.settings.stores.iter().map(|store| store.url.clone()).collect(),
            group: asked.owner.and_then(|_| MediaGroup::of(&self.settings)),
            policy: self.settings.policy(),
            conditions: asked.conditions.clone(),
        })
    }
}

impl OpenedStores {
    /// Shows as a condition that the stores are in too few failure domains.
    fn show_few(&self) {
        let scheme = self.segments.scheme();
        let domain_count = self.list.lock().domain_count();
        let is_few = self.policy.tiers != Tiers::ObjectStore && domain_count < scheme.fragments();
        let report = is_few.then(|| {
            Report::new(
                format!(
                    "the data stores are in {domain_count} failure domains, and {scheme} needs {}",
                    scheme.fragments()
                ),
                "new segments lack fragments, so fewer losses are survived",
                "add data stores in other failure domains",
            )
        });
        self.conditions.set(ConditionKind::DataStoresFew, POOL, report);
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
        self.places.lock().iter().for_each(|place| place.clean_unfinished(FRAGMENTS));
    }

    fn places(&self) -> Vec<(Store, Path)> {
        let places = self.places.lock();
        places.iter().map(|place| (place.clone(), Path::from(identity::PATH))).collect()
    }

    async fn forget_unnamed(&self, named: &BTreeSet<u32>) -> Result<()> {
        let Some(writer) = &self.writer else { return Ok(()) };
        let mut newest = writer.newest.lock().await;
        let mut list = self.list.lock().clone();
        let is_done = |entry: &StoreEntry| entry.is_leaving && !named.contains(&entry.number);
        let forgotten: Vec<StoreEntry> =
            list.stores.extract_if(.., |entry| is_done(entry)).collect();
        if forgotten.is_empty() {
            return Ok(());
        }
        writer.write(&mut newest, &list).await?;
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

    async fn drain(&self, stores: &[String]) -> Result<()> {
        self.set_draining(stores, true).await
    }

    async fn undrain(&self, stores: &[String]) -> Result<()> {
        self.set_draining(stores, false).await
    }

    async fn replace(&self, old: &str, new: &NewDataStore) -> Result<()> {
        self.replace_store(old, new).await
    }

    async fn watch_media_group(&self) {
        self.watch_group().await;
    }

    async fn set_rebalancing(&self, is_rebalancing: bool) -> Result<()> {
        self.change(|list| {
            list.is_rebalancing = is_rebalancing;
            Ok(())
        })
        .await
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
                group: self.group.as_ref().and_then(|group| group.group_at(&entry.url)),
                weight: entry.weight,
                is_leaving: entry.is_leaving,
                is_draining: entry.is_draining,
                is_added: entry.is_added,
                is_configured: self.configured.contains(&entry.url),
                failure: state.and_then(|state| state.failure.clone()),
                is_lost: state.is_some_and(|state| state.is_lost),
                is_readable: state.is_some_and(|state| state.is_readable),
                is_taking: state.is_some_and(|state| state.is_taking),
                is_staying: state.is_some_and(|state| state.is_staying),
                quiet_for: state.map_or(Duration::MAX, |state| state.quiet_for),
                total_bytes: state.and_then(|state| Some(state.room.as_ref()?.total_bytes)),
                free_bytes: state.and_then(|state| Some(state.room.as_ref()?.free_bytes)),
            }
        };
        let (counts, scheme) = (self.segments.counts(), self.segments.scheme());
        let list = self.list.lock();
        DataStoresStatus {
            scheme: list.scheme.clone(),
            is_rebalancing: list.is_rebalancing,
            group: self.group.as_ref().map(|group| group.name.clone()),
            policy: self.policy,
            fragment_count: scheme.fragments(),
            written_min: scheme.written_min(),
            parity_count: u8::try_from(scheme.parity()).unwrap_or(u8::MAX),
            stores: list.stores.iter().map(store).collect(),
            read_count: counts.reads,
            degraded_read_count: counts.degraded_reads,
            hedged_read_count: counts.hedged_reads,
            hedged_write_count: counts.hedged_writes,
            object_read_count: counts.object_reads,
            written_bytes: counts.written_bytes,
            missing_write_count: counts.missing_writes,
        }
    }

    async fn room(&self, numbers: &BTreeSet<u32>) -> Room {
        let stores = self.status().stores.into_iter();
        let chosen = stores.filter(|store| numbers.contains(&store.number));
        room::of_stores(chosen.map(|store| (store.url, store.free_bytes)).collect()).await
    }
}

#[cfg(test)]
mod tests;
