//! A copy as it lies in its store: whose it is, which states it holds, who reads them.
//!
//! Everything is below the folder `copy/` of the given prefix, so that no program takes a copy for a pool. There it has
//! the names that it has in the pool, and beside it the identity, the chain of published states, and pins.
//!
//! Invariants:
//! - A prefix becomes a copy once, by the one create of its identity, and only where it is empty. It belongs to one pool.
//! - A state counts when its document is the highest of its chain; it is made when all that it names is there.
//! - A reader's pin is there before the reader relies on a state, and that state was still the newest afterwards.
//! - Its key ring is the pool's, or one of its own, which the pool's changes do not touch.
//! - Documents are authentic under the pool key. Times are for people, but for the end of a short pin.

use crate::chain::{
    Chain, Created, Document, Format, corrupt, random_bytes, seal_document, to_hex,
};
use crate::keys::{DataKey, KeyRing, KeySource};
use crate::store::{Store, StoreOptions, below, is_folder_marker};
use crate::units::unix_seconds_now;
use block::seal::PoolKey;
use block::{Error, ErrorKind, Result, VolumeId};
use futures::TryStreamExt;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tiering::listing::{self, EMPTY_LOOK_COUNT, pause_before};
use tiering::{CopiedState, LeftOut, VolumeKeys, state_view};
use uuid::Uuid;

/// Folder below the given prefix.
const FOLDER: &str = "copy";
pub(super) const IDENTITY: &str = "identity";
pub(super) const STATES: &str = "states";
pub(super) const PINS: &str = "pins";
const KEYRING: &str = "keyring";
/// Object, and the purpose of its seal.
pub(super) const HEAT: &str = "heat";
/// State documents kept for people to look at; only the newest counts.
const KEEP_COUNT: usize = 8;
/// A short pin that nobody has removed ends after so many seconds. Chosen by hand: a check of many terabytes.
const SHORT_PIN_SECONDS: i64 = 7 * 24 * 3600;
/// A short pin is renewed only so long before its end. Chosen by hand: above what clocks differ by.
const PIN_MARGIN_SECONDS: i64 = 6 * 3600;
/// Tries to pin the newest state before another one is published.
const PIN_TRIES: u32 = 8;

/// Whose copy it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    pub(crate) format: Format,
    /// The pool that is copied, as its segments name it.
    pub pool: Uuid,
    /// Tells a pool that was restored from a copy from the one that was copied.
    pub lineage: Uuid,
    /// Its name, for people.
    pub name: String,
    /// Seconds since 1970.
    pub created_at: u64,
    /// Random: tells our own create from another's after an ambiguous answer.
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
    /// When the pool was as the state says, in seconds since 1970.
    pub as_of: u64,
    /// When it was published.
    pub published_at: u64,
    /// Number of the metadata's manifest.
    pub manifest: u64,
    /// The owner's term.
    pub epoch: u64,
    /// Everything of the log up to here is in it.
    pub destaged_lsn: u64,
    /// Commits since the pool was made.
    pub commit_number: u64,
    /// Volumes of which it has an earlier state than of the others.
    pub aside_count: u64,
    /// Segments.
    pub segment_count: u64,
    /// Bytes of their objects.
    pub segment_bytes: u64,
    /// Tables of the metadata.
    pub table_count: u64,
    /// First number that no segment of it has.
    pub next_segment: u64,
    /// Ids of the volumes of which it has all segments; absent: of all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<BTreeSet<u32>>,
    /// Random, and known to the pool before the state is published: tells whether it is the pool's.
    pub(crate) nonce: String,
}

impl StateRecord {
    /// Of what was copied.
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
            aside_count: state.aside_count,
            segment_count: state.segment_count,
            segment_bytes: state.segment_bytes,
            table_count: state.table_count,
            next_segment: state.next_segment,
            volumes,
            nonce,
        }
    }

    /// What it lacks on purpose.
    pub(crate) fn left_out(&self) -> Option<LeftOut> {
        let volumes = self.volumes.as_ref()?.iter().map(|id| VolumeId(*id)).collect();
        let (below, volumes) = (self.next_segment, Arc::new(volumes));
        Some(LeftOut { below, volumes, first_new_volume: None })
    }

    /// It has all that a volume of this id needs.
    pub(crate) fn has_volume(&self, id: u32) -> bool {
        self.volumes.as_ref().is_none_or(|volumes| volumes.contains(&id))
    }
}

/// Who reads a state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PinBody {
    pub(crate) format: Format,
    /// Number of the state.
    pub(super) state: u64,
    /// Nobody relies on it after a while.
    pub(super) is_short: bool,
    /// Host name, for people.
    pub(super) host: String,
    /// Seconds since 1970.
    pub(super) created_at: u64,
}

/// Bytes of the longest list of what is read most: far above what is written.
const HEAT_BYTES_MAX: u64 = 256 << 10;

/// What the pool's users read most.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HeatBody {
    pub(super) format: Format,
    /// The pool.
    pub(super) pool: Uuid,
    /// Numbers of segments, with how often each was read: most read first.
    pub(super) segments: Vec<(u64, u32)>,
}

/// Object that is there as long as the copy is.
pub(crate) const WITNESS: &str = "identity/00000000000000000001";

/// A pin, to be given back by [`Target::unpin`].
#[derive(Debug)]
pub(crate) struct Pin(ObjectPath);

impl Pin {
    /// As the link of a restored pool has it.
    pub(crate) fn named(name: &str) -> Pin {
        Pin(ObjectPath::from(name))
    }

    pub(crate) fn name(&self) -> String {
        self.0.to_string()
    }
}

/// A directory has so long to say that it is there. Chosen by hand: a disk that was asleep has woken up by then.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(20);

/// Directories that are being opened. One that does not answer, as of a file server that is away, keeps one thread
/// waiting, not one for each try.
static OPENING: Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>> = Mutex::new(BTreeMap::new());

/// What `open` returns. It may take as long as it likes where the kernel makes it wait.
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
        // Of its own: the threads for files are few, and the pool's own store needs them.
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
pub(crate) struct Target {
    url: String,
    outer: Store,
    store: Store,
    /// Pins that were there when they were looked at last.
    pins_seen: Arc<Mutex<Option<BTreeSet<ObjectPath>>>>,
}

impl Target {
    /// Nothing is sent. A local directory is made.
    ///
    /// # Errors
    /// Those of the URL and the directory; `Unavailable` where that does not answer.
    pub(crate) async fn open(url: &str, env_prefix: Option<&str>) -> Result<Target> {
        answered(url, env_prefix, Target::open_now, ANSWER_TIME_MAX).await
    }

    /// As [`Target::open`], for one that exists.
    pub(crate) async fn existing(url: &str, env_prefix: Option<&str>) -> Result<Target> {
        answered(url, env_prefix, Target::existing_now, ANSWER_TIME_MAX).await
    }

    fn open_now(url: &str, env_prefix: Option<&str>) -> Result<Target> {
        let options = StoreOptions::default();
        let outer = Store::open_as(url, &options, env_prefix)?;
        let store = Store::open_as(&below(url, FOLDER), &options, env_prefix)?;
        Ok(Target { url: url.to_owned(), outer, store, pins_seen: Arc::default() })
    }

    /// As [`Target::existing`], for one that may be away for now. Nothing is sent or looked at.
    ///
    /// # Errors
    /// Those of the URL and of settings.
    pub(crate) fn awaited(url: &str, env_prefix: Option<&str>) -> Result<Target> {
        let options = StoreOptions::default();
        let outer = Store::await_as(url, &options, env_prefix)?;
        let store = Store::await_as(&below(url, FOLDER), &options, env_prefix)?;
        Ok(Target { url: url.to_owned(), outer, store, pins_seen: Arc::default() })
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

    /// The store as the state has it.
    pub(crate) fn view(&self, state: &StateRecord) -> Store {
        let view = state_view(self.store.bulk(), state.manifest);
        Store::from_objects(self.store.url(), view)
    }

    async fn identity(&self) -> Result<Option<(String, bytes::Bytes)>> {
        let chain = Chain::new(&self.store, IDENTITY);
        let found = chain.newest().await?;
        Ok(found.map(|(number, bytes)| (chain.name(number), bytes)))
    }

    /// Makes it the pool's copy, or finds that it is.
    ///
    /// # Errors
    /// `Busy` where the prefix has something else in it, or is another pool's; `Unsupported` where a newer version has
    /// written it, or the store lacks conditional creates.
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

    /// The copy is there, and the pool's. One that is not there any more may be a folder that is not mounted: nothing of
    /// what is known of it counts then.
    ///
    /// # Errors
    /// `NotFound`, and those of [`Target::claim`].
    pub(crate) async fn check_there(
        &self,
        key: &PoolKey,
        (pool, lineage): (Uuid, Uuid),
    ) -> Result<()> {
        let Some((object, bytes)) = self.identity().await? else { return Err(no_copy(&self.url)) };
        self.check_identity(&object, &bytes, key, (pool, Some(lineage)))
    }

    /// A copy is there, whoever's.
    ///
    /// # Errors
    /// `NotFound`; those of reading its store.
    pub(crate) async fn check_exists(&self) -> Result<()> {
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
                // Of a store whose probe was cut short.
                let is_of_probe = path.starts_with("probe/") || path.starts_with("copy/probe/");
                if is_of_probe || is_folder_marker(&found) {
                    continue;
                }
                return Err(self.refused(&format!("it is not empty (it holds {path})")));
            }
        }
        Ok(())
    }

    /// Opens the copy's key ring with what opens the pool, and checks that the copy is of its pool.
    pub(crate) async fn open_keys(&self, source: &KeySource) -> Result<KeyRing> {
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
    pub(crate) async fn newest(&self, key: &PoolKey, pool: Uuid) -> Result<Option<StateRecord>> {
        let chain = Chain::new(&self.store, STATES);
        let newest = chain.newest_body::<StateRecord>(key).await?;
        let Some((number, state)) = newest else { return Ok(None) };
        if state.pool != pool || state.number != number {
            return Err(corrupt(&chain.name(number), "it belongs elsewhere"));
        }
        Ok(Some(state))
    }

    /// The newest state counts from here on. `Busy`: somebody else publishes states here.
    pub(crate) async fn publish(&self, key: &PoolKey, state: &StateRecord) -> Result<()> {
        let chain = Chain::new(&self.store, STATES);
        let bytes = seal_document(key, STATES, state)?;
        if chain.create(state.number, &bytes).await? == Created::Lost {
            let what = format!("copy to {}: another process publishes states there", self.url);
            return Err(Error::new(ErrorKind::Busy, what));
        }
        if let Err(error) = chain.prune(KEEP_COUNT).await {
            tracing::debug!(error = %error.chain(), "old states of a copy are still listed");
        }
        Ok(())
    }

    /// Gives the copy the pool's key ring: what opens the pool opens the copy, and what was revoked does not.
    pub(crate) async fn copy_keys(&self, pool: &Store, key: &PoolKey) -> Result<()> {
        let (from, to) = (Chain::new(pool, KEYRING), Chain::new(&self.store, KEYRING));
        let Some((number, bytes)) = from.newest().await? else {
            let what = "copy the key ring: the pool's is gone";
            return Err(Error::new(ErrorKind::Corrupt, what));
        };
        if to.newest().await? == Some((number, bytes.clone())) {
            // Also where this was cut short before.
            return to.delete_below(number).await;
        }
        // The pool's list may not know: it was put back, or the copy was added twice at the same time.
        if self.is_apart(key).await? == Some(true) {
            let what = format!(
                "copy to {}: it has a key of its own, which the pool's list of copies does not say; end it with `spindle copy \
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

    /// Whether the copy has a key ring of its own; `None`: it has none at all.
    pub(crate) async fn is_apart(&self, key: &PoolKey) -> Result<Option<bool>> {
        KeyRing::is_apart(&self.store, key).await
    }

    /// The copy has the key ring of its own that it was given.
    pub(crate) async fn check_apart(&self, key: &PoolKey) -> Result<()> {
        if self.is_apart(key).await? == Some(true) {
            // Of a change that was cut short: what was revoked opens it no more.
            return Chain::new(&self.store, KEYRING).prune(1).await;
        }
        let what = format!(
            "copy to {}: its own key ring is gone; put the objects below copy/keyring/ back, or put its key file in place, \
             end it with `spindle copy rm`, and add it again with --copy-key-file",
            self.url
        );
        Err(Error::new(ErrorKind::Corrupt, what))
    }

    /// What the pool's users read most: a hint, in place of the one before.
    pub(crate) async fn put_heat(
        &self,
        key: &PoolKey,
        pool: Uuid,
        segments: Vec<(u64, u32)>,
    ) -> Result<()> {
        let bytes =
            seal_document(key, HEAT, &HeatBody { format: Format::CURRENT, pool, segments })?;
        let put = self.store.control().put(&ObjectPath::from(HEAT), bytes.into()).await;
        put.map(drop).map_err(|error| self.store.explain("write what is read most", error))
    }

    /// What the pool's users read most, as far as the copy says so. What is damaged is a hint less.
    ///
    /// # Errors
    /// Those of reading the store.
    pub(crate) async fn heat(&self, key: &PoolKey, pool: Uuid) -> Result<Vec<(u64, u32)>> {
        let read = async || -> Result<HeatBody> {
            let failed = |error| self.store.explain("read what is read most", error);
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
                tracing::debug!(error = %error.chain(), "a copy says nothing of what is read most");
                Ok(Vec::new())
            }
            Err(error) => Err(error),
        }
    }

    /// Gives the copy the keys of the pool's volumes: those that a state needs before it is published, and none that was
    /// destroyed. Returns the number of the document.
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

    /// The keys of volumes that the copy has.
    pub(crate) async fn volume_keys(&self, key: &PoolKey, pool: Uuid) -> Result<VolumeKeys> {
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

    /// Keeps the newest state until the pin is given back; a `is_short` one for a week at most.
    ///
    /// # Errors
    /// `NotFound` where no state was published yet; `Denied` with credentials that may only read.
    pub(crate) async fn pin_newest(
        &self,
        key: &PoolKey,
        pool: Uuid,
        is_short: bool,
    ) -> Result<(Pin, StateRecord)> {
        for _ in 0..PIN_TRIES {
            let Some(state) = self.newest(key, pool).await? else {
                return Err(no_state(&self.url));
            };
            let pin = Pin(ObjectPath::from(format!("{PINS}/{}", Uuid::new_v4().simple())));
            if let Err(error) = self.put_pin(key, &pin, state.number, is_short).await {
                // It may be there all the same.
                self.unpin(pin).await;
                return Err(error);
            }
            // Whoever has published another one since looks for pins before it deletes anything.
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

    /// Writes a pin, again or anew.
    pub(crate) async fn put_pin(
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

    /// Whether a pin is there, and keeps its state for a while yet: one that is about to end may be gone already for
    /// whoever deletes.
    pub(crate) async fn has_pin(&self, key: &PoolKey, pin: &Pin) -> Result<bool> {
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

    /// Gives a pin back; what fails is said.
    pub(crate) async fn unpin(&self, pin: Pin) {
        if let Err(error) = self.try_unpin(&pin).await {
            tracing::warn!(
                pin = %pin.0, error = %error.chain(),
                "a pin stays at the copy, which keeps the state that was read; delete that object, which holds no data"
            );
        }
    }

    /// Gives a pin back.
    ///
    /// # Errors
    /// `NotFound` where the copy itself is not there, which says nothing of the pin; those of deleting it.
    pub(crate) async fn try_unpin(&self, pin: &Pin) -> Result<()> {
        self.check_exists().await?;
        match self.store.control().delete(&pin.0).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.store.explain("give a pin back", error)),
        }
    }

    /// Where it is, as the user wrote it.
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

    /// How often the directory was asked, and whether it answers.
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
    fn a_directory_that_does_not_answer_holds_nobody_up_and_one_thread() {
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
