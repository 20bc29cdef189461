//! The data stores of a pool, as the engine sees them: where the segments are, if not in the pool's object store.
//!
//! Invariants:
//! - The data stores are opened after the pool is taken and before its metadata, which names them.
//! - Only the owner changes which stores a pool has.

use async_trait::async_trait;
use block::env::Clock;
use block::seal::PoolKey;
use block::{Conditions, Epoch, Result};
use control::manifest::Ownership;
use control::store::Store;
use object_store::path::Path;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tiering::segment_store::{ObjectSegments, SegmentStore};
use tiering::tiers::TierPolicy;
use uuid::Uuid;

/// Everything that the opening of the data stores depends on.
#[derive(Clone, Debug)]
pub struct DataStoresAsked<'a> {
    /// The pool's object store, which has the list of its data stores.
    pub store: &'a Store,
    /// Key of the list.
    pub key: &'a PoolKey,
    /// The pool.
    pub pool: Uuid,
    /// Distinguishes a pool that was restored from a copy from the one that was copied: that one's stores are not its own.
    pub lineage: Uuid,
    /// Segments that are objects.
    pub objects: ObjectSegments,
    /// Present if the owner opens the pool: it may change the list.
    pub owner: Option<&'a Ownership>,
    /// Epoch under which the stores are changed: that of the owner, or of a removed pool that is purged. Absent for
    /// commands that only read.
    pub writer: Option<Epoch>,
    /// Registry for stores that are away, and for too few of them.
    pub conditions: Conditions,
    /// Time for pauses and latencies.
    pub clock: Arc<dyn Clock>,
}

/// Folder of the chain of documents that lists them, in the pool's object store.
pub const FOLDER: &str = "data-stores";
/// Folder of fragments in a data store. Source: docs/format-fragment.md.
pub const FRAGMENTS: &str = "fragments";

/// The configured data stores.
#[async_trait]
pub trait DataStores: Send + Sync + std::fmt::Debug + 'static {
    /// Opens the data stores of a pool. `None` if its segments are objects.
    ///
    /// # Errors
    /// `Invalid` for stores that cannot be those of the pool; those of reading and changing the list.
    async fn open(&self, asked: DataStoresAsked<'_>) -> Result<Option<Arc<dyn OpenDataStores>>>;
}

/// The open data stores of a pool.
#[async_trait]
pub trait OpenDataStores: Send + Sync + std::fmt::Debug + 'static {
    /// The segments.
    fn segments(&self) -> Arc<dyn SegmentStore>;

    /// Looks at every store, and shows those that are away as conditions. To be called every few seconds.
    async fn look(&self);

    /// Removes what interrupted writes left. The owner calls it before its first write. Blocks.
    fn clean_unfinished(&self);

    /// The places of the stores, and the object in each that makes it one: to be deleted with the pool.
    fn places(&self) -> Vec<(Store, Path)>;

    /// Forgets the stores that are no longer configured and of which no segment has a fragment: `named` are the
    /// numbers of those that have one, found by a complete walk. Only for the owner of the pool.
    ///
    /// # Errors
    /// Those of changing the list.
    async fn forget_unnamed(&self, named: &BTreeSet<u32>) -> Result<()>;

    /// Lets stores get no new fragments, so that the rebuild moves those that they have. A store is named by its URL, or
    /// with all drives of a data node by the URL or the name of that. Only for the owner of the pool.
    ///
    /// # Errors
    /// `NotFound` for a store that the pool does not have; `Invalid` if the others would be in too few failure domains;
    /// those of changing the list.
    async fn drain(&self, stores: &[String]) -> Result<()>;

    /// Lets stores get new fragments again.
    ///
    /// # Errors
    /// Like [`OpenDataStores::drain`]; `Invalid` for a store that is no longer configured.
    async fn undrain(&self, stores: &[String]) -> Result<()>;

    /// Adds a store, and drains another one, which may be away.
    ///
    /// # Errors
    /// Like [`OpenDataStores::drain`], and those of [`DataStores::open`] for a place that cannot be a store.
    async fn replace(&self, old: &str, new: &NewDataStore) -> Result<()>;

    /// Adds the drives of the pool's media group that the list lacks, at once and from then on. It returns if the pool has
    /// no media group, or another owner; otherwise it runs until it is dropped. Only for the owner of the pool.
    async fn watch_media_group(&self);

    /// Notes in the list whether fragments are to be moved to where they would be if their segments were written now.
    ///
    /// # Errors
    /// Those of changing the list.
    async fn set_rebalancing(&self, is_rebalancing: bool) -> Result<()>;

    /// Returns the state of the stores.
    fn status(&self) -> DataStoresStatus;

    /// Returns the space that the stores with these numbers have left. The answer comes within seconds: a store that does
    /// not answer is one of unknown space.
    async fn room(&self, numbers: &BTreeSet<u32>) -> Room;
}

/// The space that several stores have left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Bytes, of the stores of which that is known. A file system that several of them share counts once.
    pub known_bytes: u64,
    /// Number of the other stores: buckets, and stores that did not tell it.
    pub unknown_count: usize,
}

/// A place that is to become a data store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewDataStore {
    /// Its URL, or the absolute path of a directory.
    pub url: String,
    /// Prefix of the variables with its settings and credentials.
    pub env_prefix: Option<String>,
    /// Its failure domain; absent: as for a store in the configuration.
    pub domain: Option<String>,
    /// Its share of new fragments, 1 to 1000; absent: 1.
    pub weight: Option<u32>,
}

/// The state of the data stores of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DataStoresStatus {
    /// Scheme of new segments, such as `4+2`.
    pub scheme: String,
    /// Fragments of a segment of the scheme.
    pub fragment_count: usize,
    /// The fewest of them with which a segment is written while stores fail.
    pub written_min: usize,
    /// Losses of stores that a whole segment of the scheme survives.
    pub parity_count: u8,
    /// The stores, in the order of their numbers.
    pub stores: Vec<DataStoreStatus>,
    /// Fragments are to be moved to where they would be if their segments were written now.
    pub is_rebalancing: bool,
    /// The media group of the pool, for its owner.
    pub group: Option<String>,
    /// Where the segments are to be.
    pub policy: TierPolicy,
    /// Requests for ranges of fragments.
    pub read_count: u64,
    /// Reads whose fragment was not had in time, and was made from others.
    pub degraded_read_count: u64,
    /// Reads that were tried another way because the answer was late.
    pub hedged_read_count: u64,
    /// Fragments that another store was asked to take, too, because one was late.
    pub hedged_write_count: u64,
    /// Reads of the object of a segment in fragments, too few of which were had.
    pub object_read_count: u64,
    /// Bytes of fragments written.
    pub written_bytes: u64,
    /// Fragments for which no store was left.
    pub missing_write_count: u64,
}

/// The state of a data store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DataStoreStatus {
    /// Its number in the placements of segments.
    pub number: u32,
    /// Its URL.
    pub url: String,
    /// Name or id of the data node that has it, if one has.
    pub node: Option<String>,
    /// What fails together with it.
    pub domain: String,
    /// The media group of a drive of a data node, if it is known.
    pub group: Option<String>,
    /// Its share of new fragments, unless it is leaving or draining.
    pub weight: u32,
    /// It is no longer configured, and gets no new fragments.
    pub is_leaving: bool,
    /// A command has taken new fragments from it.
    pub is_draining: bool,
    /// A command or the media group has added it.
    pub is_added: bool,
    /// The configuration names it.
    pub is_configured: bool,
    /// The cause of its last failure, while it fails.
    pub failure: Option<String>,
    /// It has been away for so long that its fragments are rebuilt elsewhere.
    pub is_lost: bool,
    /// Its reads do not fail.
    pub is_readable: bool,
    /// It takes new fragments.
    pub is_taking: bool,
    /// Its fragments stay there.
    pub is_staying: bool,
    /// Time since it was last asked to take a fragment; the longest time if it never was.
    pub quiet_for: Duration,
    /// Bytes that it can hold, as it was last asked; absent if it does not know.
    pub total_bytes: Option<u64>,
    /// Bytes of them that are free.
    pub free_bytes: Option<u64>,
}

/// No data stores: segments are objects of the pool's store.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoDataStores;

#[async_trait]
impl DataStores for NoDataStores {
    async fn open(&self, _: DataStoresAsked<'_>) -> Result<Option<Arc<dyn OpenDataStores>>> {
        Ok(None)
    }
}
