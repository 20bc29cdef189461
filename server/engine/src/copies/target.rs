//! A copy in its store: its owner, its states and its readers.
//!
//! Everything is below the folder `copy/` of the given prefix, so that no program takes a copy for
//! a pool. Objects have the same names there as in the pool. Next to them are the identity, the
//! chain of published states, and pins.
//!
//! Invariants:
//! - A prefix becomes a copy once, by the single create of its identity, and only if it is empty.
//!   It belongs to one pool.
//! - A state counts if its document is the highest of its chain; it is made when everything that it
//!   names is there.
//! - A reader's pin exists before the reader relies on a state, and that state was still the newest
//!   afterwards.
//! - Its key ring is either the pool's, or one of its own, which changes of the pool do not touch.
//! - Documents are authentic under the pool key. Times are only for display, except for the end of
//!   a short pin.

use async_recursion::async_recursion;
use block::env::{random_bytes, random_uuid};
use block::hex::to_hex;
use block::quantities::unix_seconds_now;
use block::seal::PoolKey;
use block::{Error, ErrorKind, Result, VolumeId};
use control::chain::{Chain, Created, Document, Format, corrupt, seal_document};
use control::keys::{DataKey, KeyRing, KeySource};
use control::store::{Store, StoreOptions, below, is_folder_marker};
use futures::TryStreamExt;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tiering::listing::{self, EMPTY_LOOK_COUNT, pause_before};
use tiering::{CopiedState, Excluded, VolumeKeys, state_view};
use uuid::Uuid;

/// Folder below the given prefix.
const FOLDER: &str = "copy";
pub(super) const IDENTITY: &str = "identity";
pub(super) const STATES: &str = "states";
pub(super) const PINS: &str = "pins";
const KEYRING: &str = "keyring";
/// Object, and the purpose of its seal.
pub(super) const HEAT: &str = "heat";
/// State documents kept for inspection; only the newest counts.
const KEEP_COUNT: usize = 8;
/// Time after which a short pin ends if it is not removed. Chosen by hand: a check of many
/// terabytes.
const SHORT_PIN_SECONDS: i64 = 7 * 24 * 3600;
/// A short pin is renewed only this long before its end. Chosen by hand: more than clocks differ
/// by.
const PIN_MARGIN_SECONDS: i64 = 6 * 3600;
/// Maximum number of tries to pin the newest state before another one is published.
const PIN_TRIES: u32 = 8;

/// Identity of a copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    pub(crate) format: Format,
    /// Id of the copied pool, as in its segments.
    pub pool: Uuid,
    /// Distinguishes a pool that was restored from a copy from the one that was copied.
    pub lineage: Uuid,
    /// Name of the pool, for display.
    pub name: String,
    /// Seconds since 1970.
    pub created_at: u64,
    /// Random: distinguishes our own create from another's after an ambiguous answer.
    pub(crate) nonce: String,
}

/// A published state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateRecord {
    pub(crate) format: Format,
    /// The pool.
    pub pool: Uuid,
    /// Number in the chain.
    pub number: u64,
    /// Time of the pool's state, in seconds since 1970.
    pub as_of: u64,
    /// Time of publication.
    pub published_at: u64,
    /// Number of the metadata's manifest.
    pub manifest: u64,
    /// The owner's term.
    pub epoch: u64,
    /// The state contains everything in the log up to here.
    pub destaged_lsn: u64,
    /// Number of commits since the pool was made.
    pub commit_number: u64,
    /// Number of volumes whose state here is older than that of the others.
    pub stalled_count: u64,
    /// Number of segments.
    pub segment_count: u64,
    /// Bytes of their objects.
    pub segment_bytes: u64,
    /// Number of tables of the metadata.
    pub table_count: u64,
    /// First number above those of its segments.
    pub next_segment: u64,
    /// Ids of the volumes whose segments are all there; absent: all volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<BTreeSet<u32>>,
    /// Random, and known to the pool before the state is published: tells whether the pool made
    /// this state.
    pub(crate) nonce: String,
}

impl StateRecord {
    /// Makes the record of a copied state.
    pub(crate) fn new(
        pool: Uuid,
        (number, nonce): (u64, String),
        as_of: u64,
        state: &CopiedState,
        volumes: Option<BTreeSet<u32>>,
    ) -> StateRecord {
        StateRecord {
            format: Format::CURRENT,
            pool,
            number,
            as_of,
            published_at: unix_seconds_now(),
            manifest: state.manifest,
            epoch: state.epoch.0,
            destaged_lsn: state.destaged_lsn.0,
            commit_number: state.commit_number,
            stalled_count: state.stalled_count,
            segment_count: state.segment_count,
            segment_bytes: state.segment_bytes,
            table_count: state.table_count,
            next_segment: state.next_segment,
            volumes,
            nonce,
        }
    }

    /// Segments that are excluded on purpose.
    pub fn excluded(&self) -> Option<Excluded> {
        let volumes = self.volumes.as_ref()?.iter().map(|id| VolumeId(*id)).collect();
        let (below, volumes) = (self.next_segment, Arc::new(volumes));
        Some(Excluded { below, volumes, first_new_volume: None })
    }

    /// Reports whether it has everything that a volume with this id needs.
    pub fn has_volume(&self, id: u32) -> bool {
        self.volumes.as_ref().is_none_or(|volumes| volumes.contains(&id))
    }
}

/// Reader of a state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PinBody {
    pub(crate) format: Format,
    /// Number of the state.
    pub(super) state: u64,
    /// The pin ends after a while.
    pub(super) is_short: bool,
    /// Host name, for display.
    pub(super) host: String,
    /// Seconds since 1970.
    pub(super) created_at: u64,
}

/// Maximum length of the list of data that is read most: far above the length that is written.
const HEAT_BYTES_MAX: u64 = 256 << 10;

/// Data that the pool's users read most.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HeatBody {
    pub(super) format: Format,
    /// The pool.
    pub(super) pool: Uuid,
    /// Numbers of segments and how often each was read, most read first.
    pub(super) segments: Vec<(u64, u32)>,
}

/// Object that exists as long as the copy does.
pub(crate) const WITNESS: &str = "identity/00000000000000000001";

/// A pin, to be released with [`Target::unpin`].
#[derive(Debug)]
pub struct Pin(ObjectPath);

impl Pin {
    /// Makes a pin from its name in the link of a restored pool.
    pub(crate) fn named(name: &str) -> Pin {
        Pin(ObjectPath::from(name))
    }

    pub(crate) fn name(&self) -> String {
        self.0.to_string()
    }
}

/// Time that a directory has to answer. Chosen by hand: a sleeping disk has woken up by then.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(20);

/// Directories that are being opened. One that does not answer, for example on an unreachable file
/// server, keeps only one thread waiting, not one per try.
static OPENING: Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>> = Mutex::new(BTreeMap::new());

/// Returns the result of `open`, or an error after `time_max`. The open itself may take as long as
/// the kernel makes it wait.
async fn answered(
    url: &str,
    env_prefix: Option<&str>,
    open: fn(&str, Option<&str>) -> Result<Target>,
    time_max: Duration,
) -> Result<Target> {
    if Store::dir_of(url)?.is_none() {
        return open(url, env_prefix);
    }
    let turn = OPENING.lock().entry(url.to_owned()).or_default().clone();
    let (wanted, env_prefix) = (url.to_owned(), env_prefix.map(str::to_owned));
    let opened = async move {
        let turn = turn.lock_owned().await;
        let (sender, opened) = tokio::sync::oneshot::channel();
        // A thread of its own: the threads for files are few, and the pool's own store needs them.
        std::thread::spawn(move || {
            let _turn = turn; // until it is over
            let _ = sender.send(open(&wanted, env_prefix.as_deref()));
        });
        opened.await
    };
    match tokio::time::timeout(time_max, opened).await {
        Ok(Ok(target)) => target,
        Ok(Err(cause)) => Err(Error::with_source(ErrorKind::Io, format!("open copy {url}"), cause)),
        Err(_) => {
            let what = format!(
                "open copy {url}: the directory has not answered for {time_max:?}; look after the disk or file \
                 server that it is on"
            );
            Err(Error::new(ErrorKind::Unavailable, what))
        }
    }
}

/// A copy in a store. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Target {
    url: String,
    outer: Store,
    store: Store,
    /// Pins found in the last look.
    pins_seen: Arc<Mutex<Option<BTreeSet<ObjectPath>>>>,
}

impl Target {
    /// Opens a copy. Sends nothing; makes a local directory.
    ///
    /// # Errors
    /// Errors of the URL and the directory; `Unavailable` if the directory does not answer.
    pub(crate) async fn open(url: &str, env_prefix: Option<&str>) -> Result<Target> {
        answered(url, env_prefix, Target::open_now, ANSWER_TIME_MAX).await
    }

    /// Like [`Target::open`], for an existing copy.
    #[async_recursion]
    pub async fn existing(url: &str, env_prefix: Option<&str>) -> Result<Target> {
        answered(url, env_prefix, Target::existing_now, ANSWER_TIME_MAX).await
    }

    fn open_now(url: &str, env_prefix: Option<&str>) -> Result<Target> {
        let options = StoreOptions::default();
        let outer = Store::open_as(url, &options, env_prefix)?;
        let store = Store::open_as(&below(url, FOLDER), &options, env_prefix)?;
        Ok(Target { url: url.to_owned(), outer, store, pins_seen: Arc::default() })
    }

    /// Like [`Target::existing`], for a copy that may be unreachable for now. Sends and checks
    /// nothing.
    ///
    /// # Errors
    /// Errors of the URL and the settings.
    pub(crate) fn awaited(url: &str, env_prefix: Option<&str>) -> Result<Target> {
        let options = StoreOptions::default();
        let outer = Store::await_as(url, &options, env_prefix)?;
        let store = Store::await_as(&below(url, FOLDER), &options, env_prefix)?;
        Ok(Target { url: url.to_owned(), outer, store, pins_seen: Arc::default() })
    }

    /// Takes `store` as the folder of a copy, for tests of other packages.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn of_store(store: &Store) -> Target {
        let (url, pins_seen) = (store.url().to_owned(), Arc::default());
        Target { url, outer: store.clone(), store: store.clone(), pins_seen }
    }

    fn existing_now(url: &str, env_prefix: Option<&str>) -> Result<Target> {
        if let Some(dir) = Store::dir_of(&below(url, FOLDER))?
            && !dir.is_dir()
        {
            return Err(no_copy(url));
        }
        Target::open_now(url, env_prefix)
    }

    pub(crate) fn objects(&self) -> Arc<dyn ObjectStore> {
        self.store.bulk()
    }

    pub(crate) fn explain(&self, doing: &str, error: object_store::Error) -> Error {
        self.store.explain(doing, error)
    }

    /// View of the store in a given state.
    pub fn view(&self, state: &StateRecord) -> Store {
        let view = state_view(self.store.bulk(), state.manifest);
        Store::from_objects(self.store.url(), view)
    }

    async fn identity(&self) -> Result<Option<(String, bytes::Bytes)>> {
        let chain = Chain::new(&self.store, IDENTITY);
        let found = chain.newest().await?;
        Ok(found.map(|(number, bytes)| (chain.name(number), bytes)))
    }

    /// Claims the prefix as the pool's copy, or checks that it already is.
    ///
    /// # Errors
    /// `Busy` if the prefix has other contents or belongs to another pool; `Unsupported` if a newer
    /// version wrote it, or the store lacks conditional creates.
    pub(crate) async fn claim(
        &self,
        key: &PoolKey,
        (pool, lineage): (Uuid, Uuid),
        name: &str,
    ) -> Result<()> {
        if let Some((object, bytes)) = self.identity().await? {
            return self.check_identity(&object, &bytes, key, (pool, Some(lineage)));
        }
        self.check_empty().await?;
        self.store.probe().await?;
        let identity = Identity {
            format: Format::CURRENT,
            pool,
            lineage,
            name: name.to_owned(),
            created_at: unix_seconds_now(),
            nonce: to_hex(&random_bytes::<16>()),
        };
        let chain = Chain::new(&self.store, IDENTITY);
        match chain.create(1, &seal_document(key, IDENTITY, &identity)?).await? {
            Created::Ours => Ok(()),
            Created::Lost => match self.identity().await? {
                Some((object, bytes)) => {
                    self.check_identity(&object, &bytes, key, (pool, Some(lineage)))
                }
                None => Err(self.refused("another process is making a copy there")),
            },
        }
    }

    fn check_identity(
        &self,
        object: &str,
        bytes: &[u8],
        key: &PoolKey,
        (pool, lineage): (Uuid, Option<Uuid>),
    ) -> Result<()> {
        let document = Document::parse(object, bytes)?;
        let identity: Identity = document.body()?;
        if identity.pool == pool && lineage.is_some_and(|lineage| lineage != identity.lineage) {
            let what = format!(
                "it is a copy of pool {}, of which one was restored from a copy",
                identity.name
            );
            return Err(self.refused(&what));
        }
        if identity.pool != pool {
            let what = format!("it is a copy of pool {} ({})", identity.name, identity.pool);
            return Err(self.refused(&what));
        }
        document.verify(key, IDENTITY)
    }

    fn refused(&self, why: &str) -> Error {
        let what = format!("copy to {}: {why}; choose an empty prefix", self.url);
        Error::new(ErrorKind::Busy, what)
    }

    /// Checks that the copy is there and belongs to the pool. A copy that has disappeared may be a
    /// folder that is not mounted; everything known about it is then invalid.
    ///
    /// # Errors
    /// `NotFound`, and errors of [`Target::claim`].
    pub(crate) async fn check_there(
        &self,
        key: &PoolKey,
        (pool, lineage): (Uuid, Uuid),
    ) -> Result<()> {
        let Some((object, bytes)) = self.identity().await? else { return Err(no_copy(&self.url)) };
        self.check_identity(&object, &bytes, key, (pool, Some(lineage)))
    }

    /// Checks that there is a copy, of any pool.
    ///
    /// # Errors
    /// `NotFound`; errors reading its store.
    #[async_recursion]
    pub async fn check_exists(&self) -> Result<()> {
        self.identity().await?.map(drop).ok_or_else(|| no_copy(&self.url))
    }

    async fn check_empty(&self) -> Result<()> {
        if KeyRing::exists(&self.outer).await? {
            return Err(self.refused("a pool is there"));
        }
        let objects = self.outer.control();
        let failed = |error| self.outer.explain("list the prefix", error);
        let look_count = if self.outer.local_dir().is_some() { 1 } else { EMPTY_LOOK_COUNT };
        for look in 0..look_count {
            pause_before(look).await;
            let mut listed = listing::list(&objects, None);
            while let Some(found) = listed.try_next().await.map_err(failed)? {
                let path = found.location.as_ref();
                // Left by an interrupted probe of the store.
                let is_of_probe = path.starts_with("probe/") || path.starts_with("copy/probe/");
                if is_of_probe || is_folder_marker(&found) {
                    continue;
                }
                return Err(self.refused(&format!("it is not empty (it holds {path})")));
            }
        }
        Ok(())
    }

    /// Opens the copy's key ring with the key source of the pool, and checks that the copy belongs
    /// to its pool.
    #[async_recursion]
    pub async fn open_keys(&self, source: &KeySource) -> Result<KeyRing> {
        let Some((object, bytes)) = self.identity().await? else { return Err(no_copy(&self.url)) };
        let identity: Identity = Document::parse(&object, &bytes)?.body()?;
        let keys = KeyRing::open(&self.store, source).await?;
        self.check_identity(&object, &bytes, &keys.newest().key, (identity.pool, None))?;
        if keys.pool() != identity.pool {
            return Err(corrupt(KEYRING, "it is of another pool than the copy"));
        }
        Ok(keys)
    }

    /// The newest state, if there is one yet.
    #[async_recursion]
    pub async fn newest(&self, key: &PoolKey, pool: Uuid) -> Result<Option<StateRecord>> {
        let chain = Chain::new(&self.store, STATES);
        let newest = chain.newest_body::<StateRecord>(key).await?;
        let Some((number, state)) = newest else { return Ok(None) };
        if state.pool != pool || state.number != number {
            return Err(corrupt(&chain.name(number), "it belongs elsewhere"));
        }
        Ok(Some(state))
    }

    /// Makes this the newest state. `Busy`: another process publishes states here.
    pub(crate) async fn publish(&self, key: &PoolKey, state: &StateRecord) -> Result<()> {
        let chain = Chain::new(&self.store, STATES);
        let bytes = seal_document(key, STATES, state)?;
        if chain.create(state.number, &bytes).await? == Created::Lost {
            let what = format!("copy to {}: another process publishes states there", self.url);
            return Err(Error::new(ErrorKind::Busy, what));
        }
        if let Err(error) = chain.prune(KEEP_COUNT).await {
            tracing::debug!(error = %error.chain(), "could not delete old states of a copy");
        }
        Ok(())
    }

    /// Gives the copy the pool's key ring: the keys that open the pool open the copy, and revoked
    /// ones do not.
    pub(crate) async fn copy_keys(&self, pool: &Store, key: &PoolKey) -> Result<()> {
        let (from, to) = (Chain::new(pool, KEYRING), Chain::new(&self.store, KEYRING));
        let Some((number, bytes)) = from.newest().await? else {
            let what = "copy the key ring: the pool's is gone";
            return Err(Error::new(ErrorKind::Corrupt, what));
        };
        if to.newest().await? == Some((number, bytes.clone())) {
            // Also if this was interrupted before.
            return to.delete_below(number).await;
        }
        // The pool's list may not know of it: it was put back to an earlier state, or the copy was
        // added twice at the same time.
        if self.is_apart(key).await? == Some(true) {
            let what = format!(
                "copy to {}: it has a dedicated key, which the pool's list of copies does not say; end it with `spindle copy \
                 rm` and add it again",
                self.url
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        if to.create(number, &bytes).await? == Created::Lost {
            let what = format!("copy to {}: it has a later key ring than the pool", self.url);
            return Err(Error::new(ErrorKind::Busy, what));
        }
        to.delete_below(number).await
    }

    /// Gives the copy a key ring that only this key file opens.
    pub(crate) async fn give_key(
        &self,
        keys: (Uuid, &[DataKey]),
        path: &std::path::Path,
        may_make: bool,
        is_to_replace: bool,
    ) -> Result<()> {
        KeyRing::give_apart(&self.store, keys, path, (may_make, is_to_replace)).await
    }

    /// Reports whether the copy has a key ring of its own; `None` if it has none at all.
    pub(crate) async fn is_apart(&self, key: &PoolKey) -> Result<Option<bool>> {
        KeyRing::is_apart(&self.store, key).await
    }

    /// Checks that the copy still has its dedicated key ring.
    pub(crate) async fn check_apart(&self, key: &PoolKey) -> Result<()> {
        if self.is_apart(key).await? == Some(true) {
            // Clean up after an interrupted change, so that revoked keys no longer open it.
            return Chain::new(&self.store, KEYRING).prune(1).await;
        }
        let what = format!(
            "copy to {}: its dedicated key ring is gone; put the objects below copy/keyring/ back, or put its key file in place, \
             end it with `spindle copy rm`, and add it again with --copy-key-file",
            self.url
        );
        Err(Error::new(ErrorKind::Corrupt, what))
    }

    /// Writes the list of data that is read most, replacing the previous one. It is only a hint.
    pub(crate) async fn put_heat(
        &self,
        key: &PoolKey,
        pool: Uuid,
        segments: Vec<(u64, u32)>,
    ) -> Result<()> {
        let bytes =
            seal_document(key, HEAT, &HeatBody { format: Format::CURRENT, pool, segments })?;
        let put = self.store.control().put(&ObjectPath::from(HEAT), bytes.into()).await;
        put.map(drop).map_err(|error| {
            self.store.explain("write the list of the data that is read most", error)
        })
    }

    /// Reads the list of data that is read most. A damaged list is ignored, since it is only a
    /// hint.
    ///
    /// # Errors
    /// Errors reading the store.
    pub(crate) async fn heat(&self, key: &PoolKey, pool: Uuid) -> Result<Vec<(u64, u32)>> {
        let read = async || -> Result<HeatBody> {
            let failed =
                |error| self.store.explain("read the list of the data that is read most", error);
            let got = self.store.control().get(&ObjectPath::from(HEAT)).await.map_err(failed)?;
            if got.meta.size > HEAT_BYTES_MAX {
                return Err(corrupt(HEAT, "it is too long"));
            }
            let bytes = got.bytes().await.map_err(failed)?;
            let document = Document::parse(HEAT, &bytes)?;
            document.verify(key, HEAT)?;
            document.body()
        };
        use ErrorKind::{Corrupt, Denied, NotFound, Unsupported};
        let is_none = |kind| matches!(kind, Corrupt | Denied | NotFound | Unsupported);
        match read().await {
            Ok(heat) if heat.pool == pool => Ok(heat.segments),
            Ok(_) => Ok(Vec::new()),
            Err(error) if is_none(error.kind()) => {
                tracing::debug!(
                    error = %error.chain(),
                    "could not read which data of a copy is read most"
                );
                Ok(Vec::new())
            }
            Err(error) => Err(error),
        }
    }

    /// Gives the copy the keys of the pool's volumes: before a state is published it has the keys
    /// that the state needs, and no destroyed ones. Returns the number of the document.
    pub(crate) async fn copy_volume_keys(&self, pool: &Store) -> Result<Option<u64>> {
        crate::volume_keys::copy(pool, &self.store).await
    }

    /// Gives a restored pool the keys of its volumes.
    pub(crate) async fn bring_volume_keys_to(
        &self,
        store: &Store,
        key: &PoolKey,
        pool: Uuid,
        epoch: u64,
    ) -> Result<()> {
        crate::volume_keys::bring(&self.store, store, (key, pool), epoch).await
    }

    /// Reads the keys of volumes from the copy.
    #[async_recursion]
    pub async fn volume_keys(&self, key: &PoolKey, pool: Uuid) -> Result<VolumeKeys> {
        crate::volume_keys::load(&self.store, key, pool).await
    }

    /// Gives a restored pool the copy's key ring.
    pub(crate) async fn copy_keys_to(&self, pool: &Store, keys: &KeyRing) -> Result<()> {
        let (number, bytes) = keys.for_pool()?;
        match Chain::new(pool, KEYRING).create(number, &bytes).await? {
            Created::Ours => Ok(()),
            Created::Lost => {
                let what = format!("restore to {}: another pool was made there", pool.url());
                Err(Error::new(ErrorKind::Busy, what))
            }
        }
    }

    /// Pins the newest state until the pin is released; with `is_short`, for a week at most.
    ///
    /// # Errors
    /// `NotFound` if no state has been published yet; `Denied` with read-only credentials.
    #[async_recursion]
    pub async fn pin_newest(
        &self,
        key: &PoolKey,
        pool: Uuid,
        is_short: bool,
    ) -> Result<(Pin, StateRecord)> {
        for _ in 0..PIN_TRIES {
            let Some(state) = self.newest(key, pool).await? else {
                return Err(no_state(&self.url));
            };
            let pin = Pin(ObjectPath::from(format!("{PINS}/{}", random_uuid().simple())));
            if let Err(error) = self.put_pin(key, &pin, state.number, is_short).await {
                // The pin may exist in spite of the error.
                self.unpin(pin).await;
                return Err(error);
            }
            // A process that has published another state since looks for pins before it deletes
            // anything.
            match self.newest(key, pool).await {
                Ok(now) if now.as_ref().map(|now| now.number) == Some(state.number) => {
                    return Ok((pin, state));
                }
                Ok(_) => self.unpin(pin).await,
                Err(error) => {
                    self.unpin(pin).await;
                    return Err(error);
                }
            }
        }
        let what = format!("read the copy {}: its states change too fast to pin one", self.url);
        Err(Error::new(ErrorKind::Unavailable, what))
    }

    /// Writes a pin for the first time, or renews it.
    #[async_recursion]
    pub async fn put_pin(
        &self,
        key: &PoolKey,
        pin: &Pin,
        state: u64,
        is_short: bool,
    ) -> Result<()> {
        let body = PinBody {
            format: Format::CURRENT,
            state,
            is_short,
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            created_at: unix_seconds_now(),
        };
        let bytes = seal_document(key, PINS, &body)?;
        let put = self.store.control().put(&pin.0, bytes.into()).await;
        put.map(drop).map_err(|error| self.store.explain("pin a state of the copy", error))
    }

    /// Reports whether a pin exists and keeps its state for a while: one that is about to end may
    /// already count as gone for a process that deletes.
    #[async_recursion]
    pub async fn has_pin(&self, key: &PoolKey, pin: &Pin) -> Result<bool> {
        let failed = |error| self.store.explain("look for a pin", error);
        let Some(got) = self.get_pin(&pin.0).await? else { return Ok(false) };
        let age = unix_seconds_now() as i64 - got.meta.last_modified.timestamp();
        let bytes = got.bytes().await.map_err(failed)?;
        let name = pin.name();
        let document = Document::parse(&name, &bytes)?;
        document.verify(key, PINS)?;
        let body: PinBody = document.body()?;
        Ok(!body.is_short || age < SHORT_PIN_SECONDS - PIN_MARGIN_SECONDS)
    }

    /// Releases a pin; logs a failure.
    #[async_recursion]
    pub async fn unpin(&self, pin: Pin) {
        if let Err(error) = self.try_unpin(&pin).await {
            tracing::warn!(
                pin = %pin.0, error = %error.chain(),
                "could not delete a pin at the copy, which keeps the state that was read; delete \
                 that object, which holds no data"
            );
        }
    }

    /// Releases a pin.
    ///
    /// # Errors
    /// `NotFound` if the copy itself is not there, which says nothing about the pin; errors
    /// deleting it.
    pub(crate) async fn try_unpin(&self, pin: &Pin) -> Result<()> {
        self.check_exists().await?;
        match self.store.control().delete(&pin.0).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.store.explain("give a pin back", error)),
        }
    }

    /// URL as the user wrote it.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

mod pins;

fn no_copy(url: &str) -> Error {
    let what = format!(
        "open the copy {url}: there is none; `spindle copy list` shows the copies of a pool"
    );
    Error::new(ErrorKind::NotFound, what)
}

fn no_state(url: &str) -> Error {
    let what = format!(
        "open the copy {url}: it holds no whole state yet; `spindle copy list` shows how far it is"
    );
    Error::new(ErrorKind::NotFound, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// Number of times the directory was asked, and whether it answers.
    static ASKED_COUNT: AtomicU32 = AtomicU32::new(0);
    static ANSWERS: (Mutex<bool>, parking_lot::Condvar) =
        (Mutex::new(false), parking_lot::Condvar::new());

    fn open_slowly(url: &str, _: Option<&str>) -> Result<Target> {
        ASKED_COUNT.fetch_add(1, Ordering::SeqCst);
        ANSWERS.1.wait_while(&mut ANSWERS.0.lock(), |answers| !*answers);
        Err(no_copy(url))
    }

    #[tokio::test]
    async fn a_prefix_with_nothing_but_folder_markers_is_empty() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("folder");
        std::fs::create_dir_all(place.join("segments")).unwrap();
        std::fs::write(place.join("marker"), b"").unwrap();
        std::fs::write(place.join("segments/marker"), b"").unwrap();
        let claim = async || {
            let target = Target::open(place.to_str().unwrap(), None).await?;
            let ids = (Uuid::from_u128(1), Uuid::from_u128(2));
            target.claim(&PoolKey::new([1; 32]), ids, "pool").await
        };
        std::fs::write(place.join("segments/data"), b"x").unwrap();
        let error = claim().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        assert!(error.to_string().contains("segments/data"), "{error}");
        std::fs::remove_file(place.join("segments/data")).unwrap();
        claim().await.unwrap();
    }

    #[test]
    fn hanging_directory_blocks_one_thread_and_no_caller() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let ask =
            |time| runtime.block_on(answered("/a/directory/of/a/copy", None, open_slowly, time));
        for _ in 0..3 {
            let error = ask(Duration::from_millis(20)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert!(error.to_string().contains("/a/directory/of/a/copy"), "{error}");
        }
        assert_eq!(ASKED_COUNT.load(Ordering::SeqCst), 1);
        *ANSWERS.0.lock() = true;
        ANSWERS.1.notify_all();
        let error = ask(Duration::from_secs(60)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert_eq!(ASKED_COUNT.load(Ordering::SeqCst), 2);
    }
}
