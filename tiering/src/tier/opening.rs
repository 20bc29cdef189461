//! Opens the tier for its owner or for a reader, within a time limit and only if no later owner has
//! opened it.

use super::hints::Prefetch;
use super::marks::Marks;
use super::peers::MapPeers;
use super::reopen::{self, Reopener};
use super::{Jobs, Parts, Tier, TierOptions};
use crate::copier::CopySource;
use crate::copier::hydrate::Hydrator;
use crate::dedup::Dedup;
use crate::destage::Destage;
use crate::destage::buffers::Buffers;
use crate::destage::write::{Output, WriteSettings};
use crate::fetch::{Frames, FramesOptions};
use crate::fsck::Fsck;
use crate::heat::Heat;
use crate::keys::PoolKeys;
use crate::leftovers::Leftovers;
use crate::listing::{self, EMPTY_LOOK_COUNT};
use crate::map::database::{self, Database};
use crate::map::{Map, Writer};
use crate::orphans::Sweeper;
use crate::outage::{Outage, Way};
use crate::places::OBJECTS_AT_ONCE;
use crate::pool::ReadTimes;
use crate::pool::{Exclusions, JobParts, Metadata, Pool, Segments};
use crate::read::Reader;
use crate::reclaim::Reclaim;
use crate::recording_store::RecordingStore;
use crate::repair::Repair;
use crate::segment::BLOCK_COUNT_MAX;
use crate::segment_store::{ObjectSegments, SegmentStore};
use block::{Error, ErrorKind, Result};
use object_store::ObjectStore;
use parking_lot::RwLock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

/// Interval at which a waiting opening checks whether to log, and the time after which it logs even
/// though no call has failed. Chosen by hand: an opening takes a second, or a few on a busy
/// machine.
const OPEN_LOOK: Duration = Duration::from_secs(5);
const OPEN_SILENCE_MAX: Duration = Duration::from_secs(20);

/// Purpose for which a tier is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Writing, by the owner.
    Own,
    /// Reading, without a time limit.
    Read,
    /// Reading, for less than 15 minutes.
    Look,
}

impl Tier {
    pub(super) async fn open_as(options: TierOptions, purpose: Purpose) -> Result<Tier> {
        let is_read_only = purpose != Purpose::Own;
        check(&options)?;
        let background = options.background.clone().unwrap_or_else(Handle::current);
        let conditions = options.conditions.clone();
        let watched = Arc::new(RecordingStore::new(
            options.store.clone(),
            conditions.clone(),
            options.clock.clone(),
        ));
        let (opening, store) = (options.clone(), watched.clone());
        let open = async move {
            match purpose {
                Purpose::Own => open_map(&opening, &store).await,
                Purpose::Read | Purpose::Look => read_map(&opening, &store, purpose).await,
            }
        };
        let (timeout, store) = (options.open_timeout, watched.clone());
        let task = background.spawn(async move {
            tokio::select! {
                opened = tokio::time::timeout(timeout, open) => opened,
                never = tell_of_waiting(&store) => match never {},
            }
        });
        // If the caller drops the opening, the metadata must not be claimed later.
        let _abort = AbortOnDrop(task.abort_handle());
        let (mut map, writer) = match task.await {
            Ok(Ok(opened)) => opened?,
            Ok(Err(_)) => {
                let what = match watched.last_failure() {
                    Some(why) => format!("open data tier: not open after {timeout:?}: {why}"),
                    None => format!("open data tier: no answer from the store in {timeout:?}"),
                };
                return Err(Error::new(ErrorKind::Unavailable, what));
            }
            Err(cause) => return Err(Error::with_source(ErrorKind::Io, "open data tier", cause)),
        };
        map.seeded_bugs = options.seeded_bugs;
        let pool = Pool {
            id: options.pool,
            key: options.pool_key.clone(),
            volume_keys: options.volume_keys.clone(),
            epoch: options.epoch,
            is_read_only,
            owner_check: options.owner_check.clone(),
            conditions,
            clock: options.clock.clone(),
            background,
            seeded_bugs: options.seeded_bugs,
        };
        let shared = JobParts {
            segments: Arc::new(open_segments(&options).await?),
            metadata: Arc::new(Metadata::new(map, writer)),
            pool: Arc::new(pool),
        };
        if shared.metadata.map.has_tiers() {
            shared.segments.store.expect_objects();
        }
        if options.map.in_tiers && !is_read_only {
            shared.segments.read_times.begin(shared.metadata.map.open_time().await?);
        }
        let tier = Tier { parts: Arc::new(assemble(options, watched, shared)) };
        if !is_read_only {
            let reopener = Arc::downgrade(&tier.parts.jobs.reopener);
            tier.parts.pool.background.spawn(reopen::supervised(reopener));
        }
        Ok(tier)
    }
}

/// The store of the pool's segments.
fn segment_store(options: &TierOptions) -> Arc<dyn SegmentStore> {
    let objects = || Arc::new(ObjectSegments::new(options.store.clone())) as Arc<dyn SegmentStore>;
    options.segments.clone().unwrap_or_else(objects)
}

/// Opens the read cache on the segments.
async fn open_segments(options: &TierOptions) -> Result<Segments> {
    let store = segment_store(options);
    let (segments, keys) = (store.clone(), keys_of(options));
    let frames = FramesOptions {
        conditions: options.conditions.clone(),
        clock: options.clock.clone(),
        ..options.frames.clone()
    };
    let open = move || Frames::open(segments, keys, frames);
    let frames = tokio::task::spawn_blocking(open)
        .await
        .map_err(|cause| Error::with_source(ErrorKind::Io, "open read cache", cause))?;
    let heat = Heat::new(options.clock.now());
    let read_times = ReadTimes::new(options.clock.clone());
    Ok(Segments { store, frames, leftovers: Leftovers::default(), heat, read_times })
}

fn keys_of(options: &TierOptions) -> PoolKeys {
    PoolKeys {
        pool: options.pool,
        pool_key: options.pool_key.clone(),
        volume_keys: options.volume_keys.clone(),
    }
}

/// Makes the jobs, each of the parts that it needs.
fn assemble(options: TierOptions, watched: Arc<RecordingStore>, shared: JobParts) -> Parts {
    let JobParts { pool, metadata, segments } = shared.clone();
    let (seeded_bugs, objects) = (options.seeded_bugs, options.store.clone());
    let exclusions = Arc::new(Exclusions {
        excluded: RwLock::new(options.excluded.clone()),
        metadata: metadata.clone(),
        is_read_only: pool.is_read_only,
        seeded_bugs,
    });
    let mut dedup = Dedup::new(options.dedup_index_bytes, keys_of(&options), seeded_bugs);
    dedup.mask = options.fingerprint_mask;
    dedup.is_forced = options.is_dedup;
    let dedup = Arc::new(dedup);
    let output = Arc::new(Output {
        pool: pool.clone(),
        metadata: metadata.clone(),
        segments: segments.clone(),
        settings: WriteSettings {
            algorithm: options.algorithm,
            zstd_level: options.zstd_level,
            segment_bytes: options.segment_bytes,
            frame_blocks: options.frame_blocks,
            segments_in_flight_max: options.segments_in_flight_max,
        },
        buffers: Buffers::new(options.segments_in_flight_max),
        uploads: Outage::new(Way::Upload, pool.conditions.clone(), pool.clock.clone()),
        upload_retry_count: AtomicU64::new(0),
        is_urgent: AtomicBool::new(false),
    });
    let reclaim = Arc::new(Reclaim::new(&shared, &exclusions, &dedup, &output));
    let places = Arc::new(Semaphore::new(OBJECTS_AT_ONCE));
    let marks = Arc::new(Marks { dedup: dedup.clone(), reclaim: reclaim.clone() });
    let repair = Arc::new(Repair::new(&shared, marks, places.clone()));
    let reader = Arc::new(Reader {
        metadata: metadata.clone(),
        segments: segments.clone(),
        repair: repair.clone(),
        dedup: dedup.clone(),
    });
    let peers = MapPeers::new(&exclusions, objects.clone(), options.restored.clone());
    segments.frames.set_peers(Arc::new(peers), seeded_bugs);
    let fsck = Fsck {
        pool: pool.clone(),
        metadata: metadata.clone(),
        segments: segments.clone(),
        exclusions: exclusions.clone(),
        objects: objects.clone(),
        database: options.database.clone(),
    };
    let copies = CopySource {
        pool: pool.clone(),
        metadata: metadata.clone(),
        segments: segments.clone(),
        exclusions: exclusions.clone(),
        repair: repair.clone(),
        objects,
        database: options.database.clone(),
        places: places.clone(),
    };
    let hydrator = Hydrator {
        pool: pool.clone(),
        metadata: metadata.clone(),
        segments: segments.clone(),
        exclusions: exclusions.clone(),
        dedup: dedup.clone(),
        frames: FramesOptions { clock: pool.clock.clone(), ..options.frames.clone() },
        places,
    };
    let reopener =
        Reopener { options, metadata: metadata.clone(), watched, reopen_count: AtomicU64::new(0) };
    let sweeper =
        Sweeper { pool: pool.clone(), metadata: metadata.clone(), segments: segments.clone() };
    let jobs = Jobs {
        destage: Arc::new(Destage::new(&shared, &reader, &output)),
        prefetch: Prefetch::new(reader.clone()),
        reader,
        repair,
        output,
        reclaim,
        sweeper,
        fsck,
        copies,
        hydrator,
        reopener: Arc::new(reopener),
    };
    Parts { pool, metadata, segments, exclusions, dedup, jobs }
}

/// Aborts a task when the last interest in it is dropped.
struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn check(options: &TierOptions) -> Result<()> {
    let wrong = |what: &str| Err(Error::new(ErrorKind::Invalid, format!("open data tier: {what}")));
    if options.epoch.0 == 0 {
        return wrong("epochs start at 1");
    }
    if options.frame_blocks == 0 || options.frame_blocks > BLOCK_COUNT_MAX {
        return wrong("a frame has 1 to 16 blocks");
    }
    if options.segment_bytes < 1 << 16 || options.segment_bytes > 256 << 20 {
        return wrong("a segment has 64 KiB to 256 MiB");
    }
    Ok(())
}

/// Opens the map for writing, unless a later epoch has opened it.
async fn open_map(options: &TierOptions, store: &Arc<RecordingStore>) -> Result<(Map, Writer)> {
    let db = open_database(options, store, false).await?;
    let (key, algorithm) = (&options.pool_key, options.algorithm);
    let opened = Map::open(db.clone(), key, algorithm, options.epoch, options.map).await;
    if opened.is_err() {
        close_quietly(&db).await;
    }
    opened
}

/// Claims the metadata database, unless a later owner has opened it.
pub(super) async fn open_database(
    options: &TierOptions,
    watched: &Arc<RecordingStore>,
    must_exist: bool,
) -> Result<Arc<Database>> {
    let store: Arc<dyn ObjectStore> = watched.clone();
    let key = &options.pool_key;
    let mut seen = None;
    // The first owner creates the database. If a later owner created a second one, all existing
    // data would be hidden.
    let is_believed = (options.epoch.0 == 1 && !must_exist) || options.seeded_bugs.listing_believed;
    let look_count = if is_believed { 1 } else { EMPTY_LOOK_COUNT };
    if probe(&store, look_count).await? {
        // An owner of the past that resumes here must not fence the present one. So it looks before
        // it claims, and claims only if no other claim has come in between.
        let reader = Database::read_only(store.clone(), &options.database).await?;
        let checked = Map::check_owner(&reader, key, options.epoch).await;
        seen = Some(reader.seen());
        close_quietly(&reader).await;
        checked?;
        // The order matters. A later owner takes the pool before it claims the metadata: either the
        // check finds it here, or its claim is not yet counted and ours fails.
        if let Some(check) = &options.owner_check {
            check.ask().await?;
        }
    } else if must_exist {
        let what = "open metadata: it is gone from the store; bring it back, spindle tries again";
        return Err(Error::new(ErrorKind::Corrupt, what));
    } else if !is_believed
        && segment_store(options).has_any(EMPTY_LOOK_COUNT).await.map_err(not_listed)?
    {
        // A new database would reference none of the segments, and unreferenced segments are
        // deleted.
        let what = "open data tier: the store holds segments, and no metadata that names them: its objects below \
                    metadata/ are gone. Bring them back; nothing was changed";
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    match Database::open(store.clone(), &options.database, seen).await {
        Ok(db) => Ok(Arc::new(db)),
        Err(error) if error.kind() == ErrorKind::Fenced => {
            Err(reopen::fence_or_own_claim(options, error).await)
        }
        Err(error) => Err(error),
    }
}

/// Logs from time to time that an opening is waiting, and for which call.
async fn tell_of_waiting(store: &RecordingStore) -> std::convert::Infallible {
    let mut waited = Duration::ZERO;
    loop {
        tokio::time::sleep(OPEN_LOOK).await;
        waited += OPEN_LOOK;
        let failure = store.last_failure();
        if failure.is_some() || waited >= OPEN_SILENCE_MAX {
            let failure = failure.as_deref().unwrap_or("the store has not answered");
            tracing::warn!(waited_s = waited.as_secs(), failure, "the data tier is not open yet");
        }
    }
}

async fn read_map(
    options: &TierOptions,
    store: &Arc<RecordingStore>,
    purpose: Purpose,
) -> Result<(Map, Writer)> {
    let store: Arc<dyn ObjectStore> = store.clone();
    if !probe(&store, EMPTY_LOOK_COUNT).await? {
        return Err(Error::new(ErrorKind::NotFound, "open data tier: the store holds no pool"));
    }
    let db = match purpose {
        Purpose::Look => Database::read_only(store, &options.database).await?,
        Purpose::Own | Purpose::Read => Database::read_pinned(store, &options.database).await?,
    };
    Map::read_only(Arc::new(db), &options.pool_key, options.map).await
}

pub(super) async fn close_quietly(db: &Database) {
    if let Err(error) = db.close().await {
        tracing::debug!(%error, "could not close a database that is no longer needed");
    }
}

/// Asks the store whether there is a database, because opening a missing one would wait for it
/// forever. Only an object counts: in a local directory, an interrupted first start leaves empty
/// folders. The answer is no once `look_count` listings agree.
async fn probe(store: &Arc<dyn ObjectStore>, look_count: u32) -> Result<bool> {
    let prefix = object_store::path::Path::from(database::FOLDER);
    let found = listing::first(store, Some(&prefix), look_count).await.map_err(not_listed)?;
    Ok(found.is_some())
}

fn not_listed(cause: object_store::Error) -> Error {
    let kind = match cause {
        object_store::Error::PermissionDenied { .. }
        | object_store::Error::Unauthenticated { .. } => ErrorKind::Denied,
        _ => ErrorKind::Unavailable,
    };
    Error::with_source(kind, "open data tier: list the store", cause)
}
