//! Restoring: a new pool that shows the contents of a copy at once, and fetches them in the background.
//!
//! The new pool gets the copy's key ring, the root of its metadata, and a link to the copy. Data that it reads and has
//! not fetched yet comes from the copy. Its own writes go to its own store from the first one on.
//!
//! Invariants:
//! - The state is pinned at the copy before anything relies on it, and the link durably names the pin. The pin is given
//!   back when the pool has everything.
//! - Order: pin, link, metadata, manifest, keys of volumes, key ring. A pool exists once its key ring does. Before
//!   that, a restore that was cut short is repeated with the same pin.
//! - A pool that is restored in part, or as of a snapshot, is served only once the link records that this was carried
//!   out. The log names each volume that cannot show the snapshot, with the reason. Data written to the new pool is
//!   never rolled back or dropped.
//! - The new pool has an identity of its own beside the one that its segments name, so that its copies are never taken
//!   for those of the pool from which it was restored.

mod choice;
mod incomplete;

pub use choice::Asked;
pub(crate) use choice::apply_choice;

use crate::config::PoolConfig;
use crate::copies::StateRecord;
use crate::copies::target::{Pin, Target, WITNESS};
use crate::names::check_name;
use crate::pool::Pool;
use async_recursion::async_recursion;
use block::env::{Clock, random_bytes, random_uuid};
use block::hex::to_hex;
use block::seal::PoolKey;
use block::{ConditionKind, Error, ErrorKind, Result, VolumeId};
use choice::choose;
use control::chain::{Chain, Created, Format, corrupt, seal_document};
use control::keys::KeyRing;
use control::manifest::{self, NodeDir};
use control::store::{Store, StoreOptions};
use incomplete::{Decision, pin_stays};
use object_store::ObjectStoreExt;
use object_store::path::Path as ObjectPath;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tiering::fail_point;
use tiering::listing::{EMPTY_LOOK_COUNT, HELD_COUNT_MAX, list_all, pause_before};
use tiering::map::database::{manifest_folder, manifest_path};
use tiering::{
    Excluded, HydrateCounts, HydrateOptions, HydrateProgress, Lacking, RestoredStore, Tier,
};
use tokio::sync::watch;
use uuid::Uuid;

/// Folder of the link's chain in the pool's prefix, and the purpose of its seal.
pub const FOLDER: &str = "origin";
/// Pause after a failure; it doubles up to the maximum.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Longest time that fetching waits, after volumes were dropped, until nothing names data that only they used. Chosen
/// by hand: after that, more is fetched than is needed.
const DROPPED_PATIENCE: Duration = Duration::from_secs(600);
/// Longest time, in the same case, before a segment that the copy lacks counts as lost, if the copy was to omit data
/// that only dropped volumes used. Damaged metadata of a dropped volume may keep the segment from ever being counted
/// out.
const COUNTING_PATIENCE: Duration = Duration::from_secs(3600);
/// Longest time, in the same case, in which reclaim must drop another segment without live data.
const DEAD_PATIENCE: Duration = Duration::from_secs(120);
const DROPPED_LOOK: Duration = Duration::from_millis(200);
/// Interval of the checks whether fetching makes progress.
const PROGRESS_LOOK: Duration = Duration::from_secs(1);

/// The origin of a restored pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    pub(crate) format: Format,
    /// The pool that was copied. Its identity is in the segments.
    pub pool: Uuid,
    /// The restored pool's own identity.
    pub lineage: Uuid,
    /// URL of the copy.
    pub url: String,
    /// Prefix of the variables that hold settings and credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_prefix: Option<String>,
    /// The state that the pool shows.
    pub state: StateRecord,
    /// Volumes with a snapshot of this name must show that snapshot before anything is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// All other volumes are dropped before anything is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only: Option<BTreeSet<u32>>,
    /// New name of the only volume in `only`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_name: Option<String>,
    /// The choice was carried out, and volumes that were made afterwards have this id or a later one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_new_volume: Option<u32>,
    /// First number that no segment of the state has.
    pub next_segment: u64,
    /// Object at the copy that preserves the state; empty once the pin was given back.
    pub(crate) pin: String,
    /// Most bytes per second that are fetched in the background.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// Seconds since 1970.
    pub created_at: u64,
    /// The pool has everything that the copy has, and no longer needs it.
    pub is_complete: bool,
    /// Segments that the copy lacked.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lost_count: u64,
    pub(crate) nonce: String,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Reads the link of a restored pool; `None` for other pools.
///
/// # Errors
/// `Corrupt` for a damaged link; those of reading the store.
#[async_recursion]
pub async fn read(store: &Store, key: &PoolKey, pool: Uuid) -> Result<Option<Origin>> {
    let chain = Chain::new(store, FOLDER);
    let Some((number, origin)) = chain.newest_body::<Origin>(key).await? else {
        // The first link stays. A restored pool that was taken for another one would lack the data that only the copy
        // has.
        return match chain.read(1).await? {
            None => Ok(None),
            Some(_) => Err(chain.unlisted(1)),
        };
    };
    if origin.pool != pool {
        return Err(corrupt(&chain.name(number), "it is of another pool"));
    }
    Ok(Some(origin))
}

/// Returns the store as the data tier sees it: with the copy behind it until the pool is whole.
#[async_recursion]
pub async fn store_of(
    store: Store,
    key: &PoolKey,
    pool: Uuid,
    clock: &Arc<dyn Clock>,
) -> Result<(Store, Option<Restored>)> {
    let Some(origin) = read(&store, key, pool).await? else { return Ok((store, None)) };
    if origin.is_complete {
        let (progress, decision) = (Arc::default(), Decision::default());
        let clock = clock.clone();
        return Ok((store, Some(Restored { origin, objects: None, progress, clock, decision })));
    }
    let target = Target::awaited(&origin.url, origin.env_prefix.as_deref())?;
    let (view, witness) = (target.view(&origin.state).bulk(), ObjectPath::from(WITNESS));
    let (bulk, below, clock) = (store.bulk(), origin.next_segment, clock.clone());
    let objects = Arc::new(RestoredStore::new(bulk, view, witness, below, clock.clone()));
    let with_copy = store.with_bulk(objects.clone());
    let progress = Arc::new(HydrateProgress::of_state(origin.state.segment_bytes));
    let (objects, decision) = (Some(objects), Decision::default());
    Ok((with_copy, Some(Restored { origin, objects, progress, clock, decision })))
}

/// An open pool that was restored.
#[derive(Clone, Debug)]
pub struct Restored {
    /// The link to the copy.
    pub origin: Origin,
    /// `None` if it is whole.
    objects: Option<Arc<RestoredStore>>,
    progress: Arc<HydrateProgress>,
    clock: Arc<dyn Clock>,
    decision: Decision,
}

impl Restored {
    /// Keeps new data independent of the copy: blocks that only the copy has are not used as duplicates.
    pub(crate) fn keep_apart(&self, tier: &Tier) {
        if self.objects.is_some() {
            tier.set_dedup_floor(self.origin.next_segment);
        }
    }

    /// Segments that the copy lacked on purpose.
    pub fn excluded(&self) -> Option<Excluded> {
        let excluded = self.origin.state.excluded()?;
        let first_new_volume = self.origin.first_new_volume.map(VolumeId);
        Some(Excluded { first_new_volume, ..excluded })
    }

    /// Like [`Restored::excluded`], for a check: a whole pool must lack nothing.
    pub fn lacks(&self) -> Option<Excluded> {
        self.excluded().filter(|_| !self.origin.is_complete)
    }

    /// Progress of fetching since the start.
    pub fn counts(&self) -> HydrateCounts {
        self.progress.counts(self.clock.now())
    }

    /// Fetches the data that only the copy has, until the pool is whole, and gives the pin back. Dropping the future
    /// stops it.
    #[async_recursion]
    pub async fn hydrate(
        &self,
        pool: &Pool,
        store: &Store,
        key: &PoolKey,
        whole: &watch::Sender<bool>,
    ) {
        let mut pause = PAUSE;
        let mut origin = self.origin.clone();
        let tier = pool.tier();
        let mut options = HydrateOptions {
            bytes_per_second: origin.bytes_per_second,
            ..HydrateOptions::default()
        };
        if origin.only.is_some() && !origin.is_complete {
            options.dead_patience = DEAD_PATIENCE;
            options.counting_patience = COUNTING_PATIENCE;
            let first_new = origin.first_new_volume.map(VolumeId);
            let dropped = tokio::time::timeout(DROPPED_PATIENCE, wait_dropped(pool, first_new));
            match dropped.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(
                    error = %error.chain(),
                    "could not wait for dropped volumes; the restore may fetch more"
                ),
                Err(_) => {
                    tracing::debug!("dropping volumes takes long; the restore may fetch more")
                }
            }
        }
        if self.objects.is_some()
            && let Ok(target) = Target::existing(&origin.url, origin.env_prefix.as_deref()).await
        {
            tier.warm(&target.heat(key, origin.pool).await.unwrap_or_default());
        }
        loop {
            let done = match &self.objects {
                Some(objects) if !origin.is_complete => {
                    options.given_up = self.decision.given_up();
                    match self.fetch(tier, objects, options.clone()).await {
                        Ok(lacking) if !objects.is_complete() => {
                            self.wait_lacking(tier, &lacking).await;
                            continue;
                        }
                        Ok(lacking) => {
                            fail_point!("restore-fetched");
                            let lost_count = lacking.missing.len() as u64;
                            let ended = match tier.check_owner().await {
                                Ok(()) => end(store, key, &mut origin, lost_count).await,
                                fenced => fenced,
                            };
                            if ended.is_ok() {
                                fail_point!("restore-whole");
                                self.end_lacking(tier);
                                tier.set_dedup_floor(0);
                                whole.send_replace(true);
                                pause = PAUSE;
                                continue;
                            }
                            ended
                        }
                        Err(error) => Err(error),
                    }
                }
                // This includes an end that was cut short.
                _ if !origin.pin.is_empty() => match tier.check_owner().await {
                    Ok(()) => give_back(store, key, &mut origin).await,
                    fenced => fenced,
                },
                _ => return,
            };
            match done {
                Ok(()) => {
                    tier.conditions().clear(ConditionKind::RestoreFailing, &origin.url);
                    return;
                }
                Err(error) if error.kind() == ErrorKind::Fenced => {
                    // The previous owner may have changed the link last.
                    let is_fenced = |error: &Error| error.kind() == ErrorKind::Fenced;
                    if tier.check_owner().await.is_err_and(|error| is_fenced(&error)) {
                        return;
                    }
                    if let Ok(Some(newest)) = read(store, key, origin.pool).await {
                        origin = newest;
                    }
                    if origin.is_complete {
                        tier.set_dedup_floor(0);
                        whole.send_replace(true);
                    }
                }
                Err(error) if origin.is_complete => {
                    let report = pin_stays(&origin, &error);
                    tier.conditions().raise(ConditionKind::RestoreFailing, &origin.url, report);
                }
                Err(error) => self.show_failure(tier, &error),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

impl Restored {
    /// Makes one attempt to fetch the missing data. The failure of the previous attempt is over once some data has
    /// arrived.
    async fn fetch(
        &self,
        tier: &Tier,
        objects: &Arc<RestoredStore>,
        options: HydrateOptions,
    ) -> Result<Lacking> {
        let before = self.counts().done_bytes;
        let mut fetching = std::pin::pin!(tier.hydrate(objects, options, &self.progress));
        loop {
            match tokio::time::timeout(PROGRESS_LOOK, &mut fetching).await {
                Ok(Err(error)) => return Err(error),
                Ok(Ok(lacking)) => {
                    self.show_progress(tier);
                    return Ok(lacking);
                }
                Err(_) if self.counts().done_bytes > before => self.show_progress(tier),
                Err(_) => {}
            }
        }
    }
}

/// Returns once nothing in the store's metadata, except clones, names data of purged volumes.
async fn wait_dropped(pool: &Pool, first_new: Option<VolumeId>) -> Result<()> {
    pool.wait_logged_in_store().await?;
    let kept: BTreeSet<VolumeId> =
        pool.records().into_iter().map(|record| VolumeId(record.id)).collect();
    let is_old = |volume: VolumeId| first_new.is_none_or(|first| volume < first);
    while pool.tier().is_dropping(|volume| is_old(volume) && !kept.contains(&volume)) {
        tokio::time::sleep(DROPPED_LOOK).await;
    }
    Ok(())
}

/// Splits `URL@SNAPSHOT`. An `@` that belongs to the place itself, before the first `/` of its path or in the name of
/// an existing directory, does not count.
#[must_use]
pub fn split_snapshot(place: &str) -> (&str, Option<&str>) {
    let path_at = match place.find("://") {
        Some(at) => at + 3 + place[at + 3..].find('/').unwrap_or(place.len()),
        None => 0,
    };
    if matches!(Store::dir_of(place), Ok(Some(dir)) if dir.exists()) {
        return (place, None);
    }
    match place.rsplit_once('@') {
        Some((url, name)) if url.len() > path_at && check_name(name).is_ok() => (url, Some(name)),
        _ => (place, None),
    }
}

async fn note(store: &Store, key: &PoolKey, origin: &mut Origin, next: Origin) -> Result<()> {
    let chain = Chain::new(store, FOLDER);
    let number = match chain.newest_body::<Origin>(key).await? {
        Some((number, newest)) if newest.nonce == origin.nonce => number,
        // An attempt of ours whose answer was lost has succeeded.
        Some((_, newest))
            if newest
                == (Origin {
                    nonce: newest.nonce.clone(),
                    // Each attempt counts again, and an object may have been put back meanwhile.
                    lost_count: newest.lost_count,
                    ..next.clone()
                }) =>
        {
            *origin = newest;
            return Ok(());
        }
        // The knowledge of an superseded owner must not replace that of its successor.
        _ => {
            let what = "change the link of a restored pool: another owner has changed it since";
            return Err(Error::new(ErrorKind::Fenced, what));
        }
    };
    let next = Origin { nonce: to_hex(&random_bytes::<16>()), ..next };
    if chain.create(number + 1, &seal_document(key, FOLDER, &next)?).await? == Created::Lost {
        let what = "end a restore: another process changed the link at the same moment";
        return Err(Error::new(ErrorKind::Busy, what));
    }
    *origin = next;
    Ok(())
}

/// Records durably that the copy is no longer needed.
async fn end(store: &Store, key: &PoolKey, origin: &mut Origin, lost_count: u64) -> Result<()> {
    let whole = Origin { is_complete: true, lost_count, ..origin.clone() };
    note(store, key, origin, whole).await?;
    if lost_count == 0 {
        tracing::info!(
            copy = %origin.url,
            "the restored pool has everything, and no longer needs the copy"
        );
    } else {
        tracing::error!(
            copy = %origin.url, lost_count,
            "the restored pool has everything but segments that the copy lacked"
        );
    }
    Ok(())
}

/// Gives the pin back, and records that.
async fn give_back(store: &Store, key: &PoolKey, origin: &mut Origin) -> Result<()> {
    let target = Target::existing(&origin.url, origin.env_prefix.as_deref()).await?;
    target.try_unpin(&Pin::named(&origin.pin)).await?;
    fail_point!("restore-pin-removed");
    let without = Origin { pin: String::new(), ..origin.clone() };
    note(store, key, origin, without).await
}

/// Gives back the pin of a pool that is purged; a failure is only logged.
#[async_recursion]
pub async fn leave(origin: &Origin) {
    if origin.pin.is_empty() {
        return;
    }
    match Target::existing(&origin.url, origin.env_prefix.as_deref()).await {
        Ok(target) => target.unpin(Pin::named(&origin.pin)).await,
        Err(error) => {
            tracing::warn!(
                pin = %origin.pin, error = %error.chain(),
                "could not delete a pin at the copy, which keeps the state that was read; delete \
                 that object"
            );
        }
    }
}

/// The result of a restore, for the person who asked for it.
#[derive(Clone, Debug)]
pub struct PoolOfCopy {
    /// URL of the copy.
    pub url: String,
    /// Number of the state.
    pub state: u64,
    /// Time at which the pool was in this state, in seconds since 1970.
    pub as_of: u64,
    /// Bytes of segments in the state.
    pub segment_bytes: u64,
    /// Volumes that are behind the others in the state.
    pub stalled_count: u64,
    /// The snapshot that the volumes will show.
    pub snapshot: Option<String>,
    /// Volumes that have no such snapshot, and stay as they are in the state.
    pub without_snapshot: Vec<String>,
    /// New name of the only volume, if it differs from the name in the copy.
    pub volume_name: Option<String>,
    /// Volumes of the state that the pool will not have.
    pub excluded: Vec<String>,
}

/// Turns the configured store into a pool that shows the newest state of a copy, or the requested part of it. The next
/// command serves it.
///
/// # Errors
/// `NotFound` if there is no copy, no whole state, or no such volume or snapshot in it; `Invalid` if the request cannot
/// be carried out; `Busy` if the store or the directory has a pool; `Denied` for a wrong key, or for credentials that
/// may not pin the state.
pub async fn restore(
    config: &PoolConfig,
    (url, asked): (&str, Asked<'_>),
    env_prefix: Option<&str>,
    bytes_per_second: Option<u64>,
) -> Result<PoolOfCopy> {
    let store = Store::open(&config.store_url, &StoreOptions::default())?;
    if KeyRing::exists(&store).await? {
        let what = format!(
            "restore to {}: a pool is there; choose an empty prefix or directory with --store and --dir",
            store.url()
        );
        return Err(Error::new(ErrorKind::Busy, what));
    }
    let target = Target::existing(url, env_prefix).await?;
    let keys = target.open_keys(&config.keys).await?;
    let (pool, key) = (keys.pool(), keys.newest().key.clone());
    store.probe().await?;
    let node = NodeDir::open(&config.dir)?;
    if let Some(other) = node.pool() {
        let what = format!(
            "restore to {}: the directory belongs to pool {other}; choose another one with --dir",
            config.dir.display()
        );
        return Err(Error::new(ErrorKind::Busy, what));
    }
    let looked = (pool, &key);
    let (origin, choice) = match read(&store, &key, pool).await? {
        // A restore was cut short here.
        Some(origin) if origin.url == url && origin.snapshot.as_deref() == asked.snapshot => {
            check_kept(&target, &key, &origin).await?;
            let choice = choose(config, (&target, &origin.state), looked, (url, asked)).await?;
            let is_as_before = (&choice.only, &choice.volume_name)
                == (&origin.only, &origin.volume_name)
                && (env_prefix, bytes_per_second)
                    == (origin.env_prefix.as_deref(), origin.bytes_per_second);
            if !is_as_before {
                return Err(begun_otherwise(&store, &origin));
            }
            resume_pin(&target, &key, &origin).await?;
            (origin, choice)
        }
        Some(origin) => return Err(begun_otherwise(&store, &origin)),
        None => {
            check_empty(&store).await?;
            let (pin, state) = target.pin_newest(&key, pool, true).await?;
            fail_point!("restore-pinned");
            let choice = match choose(config, (&target, &state), looked, (url, asked)).await {
                Ok(choice) => choice,
                Err(error) => {
                    target.unpin(pin).await;
                    return Err(error);
                }
            };
            let origin = Origin {
                format: Format::CURRENT,
                pool,
                lineage: random_uuid(),
                url: url.to_owned(),
                env_prefix: env_prefix.map(str::to_owned),
                next_segment: state.next_segment,
                state,
                snapshot: asked.snapshot.map(str::to_owned),
                only: choice.only.clone(),
                volume_name: choice.volume_name.clone(),
                first_new_volume: None,
                pin: pin.name(),
                bytes_per_second,
                created_at: config.clock.unix_seconds(),
                is_complete: false,
                lost_count: 0,
                nonce: to_hex(&random_bytes::<16>()),
            };
            let bytes = seal_document(&key, FOLDER, &origin)?;
            // If the outcome is unknown the pin stays: either the next attempt finds the link, or the pin ends.
            if Chain::new(&store, FOLDER).create(1, &bytes).await? == Created::Lost {
                target.unpin(pin).await;
                let what = format!("restore to {}: another restore began there", store.url());
                return Err(Error::new(ErrorKind::Busy, what));
            }
            fail_point!("restore-linked");
            target.put_pin(&key, &pin, origin.state.number, false).await?;
            fail_point!("restore-pin-kept");
            (origin, choice)
        }
    };
    bring_manifests(&target, &origin.state, &store).await?;
    fail_point!("restore-manifests-brought");
    let name = &config.name;
    manifest::begin_restored(&store, &key, pool, name, &node, origin.state.epoch).await?;
    fail_point!("restore-manifest-made");
    target.bring_volume_keys_to(&store, &key, pool, origin.state.epoch).await?;
    fail_point!("restore-volume-keys-brought");
    target.copy_keys_to(&store, &keys).await?;
    Ok(PoolOfCopy {
        url: url.to_owned(),
        state: origin.state.number,
        as_of: origin.state.as_of,
        segment_bytes: origin.state.segment_bytes,
        stalled_count: origin.state.stalled_count,
        snapshot: origin.snapshot,
        without_snapshot: choice.without_snapshot,
        volume_name: choice.volume_name,
        excluded: choice.excluded,
    })
}

fn begun_otherwise(store: &Store, origin: &Origin) -> Error {
    let part = match origin.only.is_some() || origin.volume_name.is_some() {
        true => " of some volumes",
        false => "",
    };
    let option = |name: &str, value: Option<String>| {
        value.map_or_else(String::new, |value| format!(" {name} {value}"))
    };
    let what = format!(
        "restore to {}: a restore{part} from {}{}{}{} was begun there; finish that one, with the same options, or choose \
         another store, and delete {}, which keeps its state, from the copy",
        store.url(),
        origin.url,
        origin.snapshot.as_ref().map_or_else(String::new, |name| format!("@{name}")),
        option("--rate", origin.bytes_per_second.map(|rate| rate.to_string())),
        option("--env-prefix", origin.env_prefix.clone()),
        origin.pin
    );
    Error::new(ErrorKind::Busy, what)
}

/// Makes the pin of an interrupted restore permanent.
async fn resume_pin(target: &Target, key: &PoolKey, origin: &Origin) -> Result<()> {
    let (pin, state) = (Pin::named(&origin.pin), origin.state.number);
    let was_there = target.has_pin(key, &pin).await?;
    target.put_pin(key, &pin, state, false).await?;
    if was_there || is_newest(target, key, origin).await? {
        return Ok(());
    }
    target.unpin(pin).await;
    Err(not_kept(origin))
}

/// Checks that the copy still has the state of an interrupted restore. Changes nothing there, as another restore may
/// have been asked for.
async fn check_kept(target: &Target, key: &PoolKey, origin: &Origin) -> Result<()> {
    let is_kept = target.has_pin(key, &Pin::named(&origin.pin)).await?
        || is_newest(target, key, origin).await?;
    if is_kept { Ok(()) } else { Err(not_kept(origin)) }
}

async fn is_newest(target: &Target, key: &PoolKey, origin: &Origin) -> Result<bool> {
    let newest = target.newest(key, origin.pool).await?;
    Ok(newest.is_some_and(|newest| newest.number == origin.state.number))
}

fn not_kept(origin: &Origin) -> Error {
    let what = format!(
        "restore from {}: state {}, with which this restore was begun, is no longer kept there; \
         choose another --store and --dir",
        origin.url, origin.state.number
    );
    Error::new(ErrorKind::NotFound, what)
}

/// Copies the root of the state's metadata and the manifests that it names.
async fn bring_manifests(target: &Target, state: &StateRecord, store: &Store) -> Result<()> {
    let failed = |error| target.explain("read the root of the metadata", error);
    let own = manifest_path(state.manifest);
    let view = target.view(state).bulk();
    let mut paths = BTreeSet::new();
    for look in 0..EMPTY_LOOK_COUNT {
        pause_before(look).await;
        let listed = list_all(&view, Some(&manifest_folder()), HELD_COUNT_MAX).await;
        paths = listed.map_err(failed)?.into_iter().map(|meta| meta.location).collect();
        if paths.contains(&own) {
            break;
        }
    }
    // Without its own root the pool would be a new and empty one.
    if !paths.contains(&own) {
        let what = format!(
            "restore from the copy {}: its store does not list {own}, which its newest state names; repeat the \
             restore once it does",
            target.url()
        );
        return Err(Error::new(ErrorKind::Unavailable, what));
    }
    for path in paths {
        let bytes = match view.get(&path).await {
            Ok(got) => got.bytes().await.map_err(failed)?,
            // It belongs to another state and was deleted meanwhile.
            Err(object_store::Error::NotFound { .. }) if path != own => continue,
            Err(error) => return Err(failed(error)),
        };
        let put = store.bulk().put(&path, bytes.into()).await;
        put.map_err(|error| store.explain("write the root of the metadata", error))?;
    }
    Ok(())
}

async fn check_empty(store: &Store) -> Result<()> {
    let parts = ["manifest", "segments", "metadata", "copies", "copy", crate::volume_keys::FOLDER];
    let Some((_, found)) = store.first_below(&parts).await? else { return Ok(()) };
    let what = format!(
        "restore to {}: it is not empty (it holds {}); choose an empty prefix or directory",
        store.url(),
        found.location
    );
    Err(Error::new(ErrorKind::Busy, what))
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::store::testing::{Fault, FaultyStore};

    /// A link like that of `restore`, number 1 of its chain.
    async fn linked(store: &Store, key: &PoolKey) -> Origin {
        let state = StateRecord {
            format: Format::CURRENT,
            pool: Uuid::from_u128(1),
            number: 7,
            as_of: 1_700_000_000,
            published_at: 1_700_000_009,
            manifest: 300,
            epoch: 9,
            destaged_lsn: 123_456,
            commit_number: 280,
            stalled_count: 0,
            segment_count: 40,
            segment_bytes: 1 << 30,
            table_count: 5,
            next_segment: 77,
            volumes: None,
            nonce: to_hex(&random_bytes::<16>()),
        };
        let origin = Origin {
            format: Format::CURRENT,
            pool: Uuid::from_u128(1),
            lineage: Uuid::from_u128(2),
            url: "/copy".to_owned(),
            env_prefix: None,
            next_segment: state.next_segment,
            state,
            snapshot: None,
            only: Some(BTreeSet::from([2])),
            volume_name: Some("new".to_owned()),
            first_new_volume: None,
            pin: "copy/pins/1".to_owned(),
            bytes_per_second: None,
            created_at: 1,
            is_complete: false,
            lost_count: 0,
            nonce: to_hex(&random_bytes::<16>()),
        };
        let bytes = seal_document(key, FOLDER, &origin).unwrap();
        assert_eq!(Chain::new(store, FOLDER).create(1, &bytes).await.unwrap(), Created::Ours);
        origin
    }

    #[tokio::test]
    async fn an_owner_that_was_superseded_does_not_take_the_link_back() {
        let (faulty, key) = (FaultyStore::new(Fault::None), PoolKey::new([7; 32]));
        let store = faulty.store();
        let mut old = linked(&store, &key).await;
        // A machine that takes the pool over carries the choice out, while the old owner is paused before it records
        // that.
        let mut new = old.clone();
        let chosen = Origin { first_new_volume: Some(5), ..new.clone() };
        note(&store, &key, &mut new, chosen).await.unwrap();
        let whole = Origin { is_complete: true, ..new.clone() };
        note(&store, &key, &mut new, whole).await.unwrap();
        let late = Origin { first_new_volume: Some(4), ..old.clone() };
        let refused = note(&store, &key, &mut old, late).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Fenced);
        let found = read(&store, &key, new.pool).await.unwrap().unwrap();
        assert_eq!(found, new);
        // An attempt whose answer was lost is recognised by everything except its nonce.
        let mut before = new.clone();
        let without = Origin { pin: String::new(), ..new.clone() };
        note(&store, &key, &mut new, without.clone()).await.unwrap();
        note(&store, &key, &mut before, without).await.unwrap();
        assert_eq!(before, new);
        assert_eq!(Chain::new(&store, FOLDER).newest_number().await.unwrap(), Some(4));
    }

    #[test]
    fn snapshot_name_follows_the_last_at_sign() {
        let dir = tempfile::tempdir().unwrap();
        let odd = dir.path().join("a@b");
        std::fs::create_dir(&odd).unwrap();
        let odd = odd.display().to_string();
        for (place, url, snapshot) in [
            ("s3://dr/prefix@monday", "s3://dr/prefix", Some("monday")),
            ("s3://dr/@monday", "s3://dr/", Some("monday")),
            ("s3://dr/prefix", "s3://dr/prefix", None),
            (
                "abfss://container@account.dfs.example.net/p",
                "abfss://container@account.dfs.example.net/p",
                None,
            ),
            (
                "abfss://container@account.dfs.example.net",
                "abfss://container@account.dfs.example.net",
                None,
            ),
            ("abfss://c@account.example.net/p@v1", "abfss://c@account.example.net/p", Some("v1")),
            ("s3://dr/a@b/c", "s3://dr/a@b/c", None),
            ("/no/such/copy@monday", "/no/such/copy", Some("monday")),
            ("s3://dr/p@-bad", "s3://dr/p@-bad", None),
            (&odd, &odd, None),
        ] {
            assert_eq!(split_snapshot(place), (url, snapshot), "{place}");
        }
        let as_url = format!("file://{odd}");
        assert_eq!(split_snapshot(&as_url), (&*as_url, None));
        let of_odd = format!("{odd}@monday");
        assert_eq!(split_snapshot(&of_odd), (&*odd, Some("monday")));
    }
}
