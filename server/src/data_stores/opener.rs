//! How a place becomes a data store of a pool, and how it is opened: at the opening of the pool and later, by command.
//!
//! Invariants:
//! - A place that has an identity is the store of that identity, or it is refused.

use super::identity::{self, Identity};
use super::list::{List, StoreEntry};
use super::room::Directory;
use crate::node;
use async_trait::async_trait;
use block::env::Clock;
use block::{Epoch, Error, ErrorKind, Result};
use bytes::Bytes;
use cluster::Cluster;
use config::{DataStoreSettings, DriveUrl};
use control::store::{Store, StoreOptions};
use datanode::{
    NamedStore, ObjectFragments, Room, RoomTeller, StoreId, StoreInfo, Verifier, Witness,
};
use dnode::messages::DriveRoom;
use dnode::{NodeObjects, NodePlace, PoolSigner};
use engine::data_stores::DataStoresAsked;
use object_store::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

/// Requests at a time. Chosen by hand: three drives that hang leave threads for the others; a bucket is far.
const DIRECTORY_WIDTH: usize = 4;
const BUCKET_WIDTH: usize = 64;
/// How long a look at the identity of a bucket or a drive elsewhere counts. Chosen by hand: buckets are not unmounted, and
/// a data node looks at its drives itself.
const BUCKET_LOOK: Duration = Duration::from_secs(10);

/// Opens the places of a pool's data stores.
#[derive(Debug)]
pub(super) struct Opener {
    /// The pool's directory, which may be that of a node of a cluster.
    dir: PathBuf,
    pool: Uuid,
    lineage: Uuid,
    /// Epoch under which the stores are changed; absent for commands that only read.
    writer: Option<Epoch>,
    signer: PoolSigner,
    clock: Arc<dyn Clock>,
}

/// A drive of a data node, which verifies fragments where they are, and knows its room.
#[derive(Debug)]
struct NodeDrive(NodeObjects);

#[async_trait]
impl RoomTeller for NodeDrive {
    async fn room(&self) -> object_store::Result<Option<Room>> {
        let DriveRoom { total_bytes, free_bytes, wear } = self.0.room().await?;
        let wear = (!wear.is_empty()).then_some(wear);
        Ok((total_bytes > 0).then_some(Room { total_bytes, free_bytes, wear }))
    }
}

#[async_trait]
impl Verifier for NodeDrive {
    async fn verify(&self, path: &Path, bytes: u64) -> object_store::Result<Option<Bytes>> {
        self.0.check(path, bytes).await
    }
}

impl Opener {
    pub(super) fn new(asked: &DataStoresAsked<'_>, dir: PathBuf) -> Opener {
        let DataStoresAsked { pool, lineage, writer, .. } = *asked;
        let (signer, clock) = (PoolSigner::new(asked.key, lineage), asked.clock.clone());
        Opener { dir, pool, lineage, writer, signer, clock }
    }

    /// Opens the place of a data store, which must exist.
    ///
    /// # Errors
    /// `Invalid` for a URL that names none, and for a drive of a data node if the directory belongs to no cluster, or is
    /// that node.
    pub(super) fn open_place(&self, url: &str, env_prefix: Option<&str>) -> Result<Store> {
        if let Some(drive) = DriveUrl::parse(url)? {
            self.check_spelling(url, &drive)?;
            let objects = self.open_drive(url, drive)?;
            return Ok(Store::from_objects(url, Arc::new(objects)));
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

    /// Refuses the id of a node that has a name of its own: under two spellings, its drives would be in two failure
    /// domains, and a command that names it would mean some of them.
    fn check_spelling(&self, url: &str, drive: &DriveUrl) -> Result<()> {
        let (Ok(id), Some(cluster)) = (Uuid::parse_str(&drive.node), node::open_in(&self.dir)?)
        else {
            return Ok(());
        };
        let nodes = cluster.nodes();
        let Some(found) = nodes.iter().find(|node| node.id.0 == id) else { return Ok(()) };
        match nodes.iter().filter(|node| node.name == found.name).count() {
            1 => {
                let what = format!(
                    "open data stores: {url}: name the node by its name, {}, so that its drives are in one failure domain",
                    found.name
                );
                Err(Error::new(ErrorKind::Invalid, what))
            }
            _ => Ok(()),
        }
    }

    /// The cluster of the pool's directory, which `what` needs.
    ///
    /// # Errors
    /// `Invalid` if it belongs to none.
    pub(super) fn cluster(&self, what: &str) -> Result<Cluster> {
        node::open_in(&self.dir)?.ok_or_else(|| {
            let dir = self.dir.display();
            let what = format!(
                "open data stores: {what}: {dir} belongs to no cluster; found one with `spindle node init`, and let \
                 the data nodes join it"
            );
            Error::new(ErrorKind::Invalid, what)
        })
    }

    fn open_drive(&self, url: &str, drive: DriveUrl) -> Result<NodeObjects> {
        let cluster = self.cluster(url)?;
        let DriveUrl { node, drive } = drive;
        if [cluster.node_name(), &cluster.node_id().to_string()].contains(&&*node) {
            let what = format!(
                "open data stores: {url}: it is this node; name the directory of a drive of this machine, or another \
                 node"
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let (pool, lineage, owner) = (self.pool, self.lineage, self.writer);
        let place = NodePlace { node, drive, pool, lineage, owner, signer: self.signer.clone() };
        Ok(NodeObjects::new(cluster, place))
    }

    /// Opens a data store of the list, and its place.
    ///
    /// # Errors
    /// Like [`Opener::open_place`].
    pub(super) fn open_store(&self, entry: &StoreEntry) -> Result<(NamedStore, Store)> {
        let (place, drive) = match DriveUrl::parse(&entry.url)? {
            Some(drive) => {
                let objects = self.open_drive(&entry.url, drive)?;
                let place = Store::from_objects(&entry.url, Arc::new(objects.clone()));
                (place, Some(Arc::new(NodeDrive(objects))))
            }
            None => (self.open_place(&entry.url, entry.env_prefix.as_deref())?, None),
        };
        let dir = place.local_dir().map(std::path::Path::to_path_buf);
        let is_local = dir.is_some();
        let lasts = if is_local { Duration::ZERO } else { BUCKET_LOOK };
        let identity = Identity::of(self.pool, self.lineage, entry);
        let witness = Witness { path: identity::PATH.into(), bytes: identity.encode()?, lasts };
        let mut store = ObjectFragments::new(place.bulk(), witness, self.clock.clone());
        if let Some(drive) = drive {
            store = store.with_room(Arc::clone(&drive) as Arc<dyn RoomTeller>).with_verifier(drive);
        }
        if let Some(dir) = dir {
            store = store.with_room(Arc::new(Directory::new(dir, self.clock.clone())));
        }
        let info = StoreInfo {
            id: StoreId(entry.number),
            domain: entry.domain.clone(),
            weight: entry.present_weight(),
        };
        let width = if is_local { DIRECTORY_WIDTH } else { BUCKET_WIDTH };
        let (name, store) = (entry.url.clone(), Arc::new(store));
        Ok((NamedStore { info, name, store, width }, place))
    }

    /// The entry of a place that has an identity.
    ///
    /// # Errors
    /// `Invalid` for the store of another pool.
    pub(super) fn named(
        &self,
        settings: &DataStoreSettings,
        known: &[StoreEntry],
        identity: &Identity,
    ) -> Result<StoreEntry> {
        let refused = |why: String| Err(Error::new(ErrorKind::Invalid, why));
        if (identity.pool, identity.lineage) != (self.pool, self.lineage) {
            let restored = match identity.pool == self.pool {
                true => {
                    ", or was restored from a copy of it: a restored pool has data stores of its own"
                }
                false => "",
            };
            return refused(format!(
                "open data stores: {} belongs to pool {}{restored}; this is pool {}. Use another directory or prefix",
                settings.url, identity.pool, self.pool
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
    pub(super) async fn make(
        &self,
        settings: &DataStoreSettings,
        place: &Store,
        known: &[StoreEntry],
        list: &List,
    ) -> Result<StoreEntry> {
        let numbers = known.iter().chain(&list.stores).map(|entry| entry.number).collect();
        let identity = Identity::fresh(self.pool, self.lineage, &numbers);
        identity::make(place, &identity).await?;
        tracing::info!(store = settings.url, "spindle made a data store");
        Ok(entry_of(settings, identity.number, &identity.id))
    }
}

/// The entry of a configured store.
pub(super) fn entry_of(settings: &DataStoreSettings, number: u32, id: &str) -> StoreEntry {
    StoreEntry {
        number,
        id: id.to_owned(),
        url: settings.url.clone(),
        env_prefix: settings.env_prefix.clone(),
        domain: settings.domain().to_owned(),
        weight: settings.weight(),
        is_leaving: false,
        is_draining: false,
        is_added: false,
        is_domain_given: false,
    }
}
