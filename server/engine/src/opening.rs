//! Opening a pool: the checks before anything is written, and then directory, store, keys,
//! ownership, metadata and log, one after the other.
//!
//! Invariants:
//! - Order of opening: directory lock, store, keys, ownership, metadata, log. Each step refuses
//!   before the next one changes anything.
//! - An opening that fails or is stopped gives the pool back to its previous owner: unchanged if
//!   nothing of the pool was written yet, and by an orderly stop otherwise.
//! - A log that another owner has superseded is never replayed: it is set aside, whole.
//! - A log that was here and is gone counts as missing unless the pool was released since: it may
//!   hold the only copy of some writes, and the pool does not open without it. Once an operator has
//!   given it up, every volume loses writes.

mod write_log;

use self::write_log::{LogFound, open_log};
use crate::clock::ProvenClock;
use crate::config::PoolConfig;
use crate::data_stores::OpenDataStores;
use crate::failed_log;
use crate::log_members::OwnerRole;
use crate::lookout::Lookout;
use crate::marks::{TAKEN_OVER, make_mark, remove_mark};
use crate::open_pool::OpenPool;
use crate::pool::{LostWrites, Pool};
use crate::restore::{self, Restored};
use crate::steps::Steps;
use crate::tier_options::{check_data_stores, open_data_stores, tier_options};
use crate::volume_keys::VolumeKeyRing;
use async_recursion::async_recursion;
use block::conditions::Report;
use block::quantities::ByteSize;
use block::seal::PoolKey;
use block::{ConditionKind, Conditions, Error, ErrorKind, Result};
use control::keys::KeyRing;
use control::manifest::{Configuration, NodeDir, Ownership, TakeOver, Terms};
use control::store::{Store, StoreOptions};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tiering::{NamedSpillFile, OwnerCheck, Tier};
use tokio::sync::watch;
use uuid::Uuid;
use wal::{Log, Recovery, SpillFileId, SpillFilesWanted};

/// Longest time that a failed opening waits for the metadata to close. Chosen by hand.
const CLOSE_GRACE: Duration = Duration::from_secs(10);

/// Kind of opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// Opens an existing pool. If there is none, nothing is made or written.
    Existing,
    /// Like `Existing`, but opens a removed pool, which is in use again afterwards.
    Removed,
    /// Makes the pool on first use.
    OrNew,
    /// Like `OrNew`, and takes the pool from the node that has it open.
    TakeOver,
    /// Like `OrNew`, as the only member of the pool's log from then on. The caller has proof that the
    /// member lacks nothing, and the pool may go on alone.
    Alone,
}

impl Opening {
    fn makes_none(self) -> bool {
        matches!(self, Opening::Existing | Opening::Removed)
    }
}

/// Opens the configured pool.
///
/// # Errors
/// Errors of each step, with advice. The previous owner of the pool then has it as before.
#[async_recursion]
pub async fn open(config: &PoolConfig, opening: Opening) -> Result<OpenPool> {
    let opened = open_until(config, opening, std::pin::pin!(std::future::pending())).await?;
    Ok(opened.expect("nothing has stopped it"))
}

/// Like [`open`], but returns `None` if `stop` comes first.
pub async fn open_until<S: Future<Output = ()>>(
    config: &PoolConfig,
    opening: Opening,
    stop: Pin<&mut S>,
) -> Result<Option<OpenPool>> {
    let (had_dir, had_store) = (config.dir.exists(), store_dir_exists(config)?);
    let opened = open_pool(config, opening, stop).await;
    if opened.is_err() {
        leave(config, had_dir, had_store);
    }
    opened
}

/// Removes the directories that were made for a refused pool if they are empty.
fn leave(config: &PoolConfig, had_dir: bool, had_store: bool) {
    if !had_store && let Ok(Some(store)) = Store::dir_of(&config.store_url) {
        for folder in ["probe", "keyring"] {
            let _ = std::fs::remove_dir(store.join(folder));
        }
        let _ = std::fs::remove_dir(store);
    }
    if !had_dir {
        let _ = std::fs::remove_dir(&config.dir);
    }
}

async fn open_pool<S: Future<Output = ()>>(
    config: &PoolConfig,
    opening: Opening,
    mut stop: Pin<&mut S>,
) -> Result<Option<OpenPool>> {
    let mut steps = Steps::begin(&config.clock);
    let prepared = tokio::select! {
        prepared = prepare(config, opening) => prepared?,
        () = &mut stop => return Ok(None),
    };
    steps.end("store and keys");
    // Not interrupted by the stop: the outcome would be unknown.
    let taken = prepared.take().await?;
    steps.end("manifest");
    let parts = tokio::select! {
        parts = open_parts(config, &taken, &mut steps) => parts.map(Some),
        () = &mut stop => Ok(None),
    };
    let is_heard = matches!(&parts, Ok(Some(parts)) if parts.is_heard);
    let started = match parts {
        Ok(Some(parts)) => start(config, &taken, parts).map(Some),
        Ok(None) => Ok(None),
        Err(error) => Err(error),
    };
    let (pool, parts) = match started {
        Ok(Some(started)) => started,
        Ok(None) => {
            taken.give_back().await;
            return Ok(None);
        }
        Err(error) => {
            taken.give_back().await;
            return Err(error);
        }
    };
    let mut open = taken.into_open(config, pool, parts, steps);
    let settled = tokio::select! {
        settled = settle(&mut open, is_heard) => settled.map(|()| true),
        () = &mut stop => Ok(false),
    };
    open.steps.end("volumes");
    match settled {
        Ok(true) => Ok(Some(open)),
        Ok(false) => {
            open.close_unserved().await;
            Ok(None)
        }
        Err(error) => {
            open.close_unserved().await;
            Err(error)
        }
    }
}

fn open_store(config: &PoolConfig) -> Result<Store> {
    Store::open(&config.store_url, &StoreOptions::default())
}

/// Takes the directory of an existing pool. Writes nothing to the store.
pub(crate) async fn check_pool_is_there(config: &PoolConfig) -> Result<NodeDir> {
    check_dir_exists(config)?;
    check_store_dir_exists(config)?;
    if !KeyRing::exists(&open_store(config)?).await? {
        return Err(no_pool(config, "there is no pool"));
    }
    open_node(config).await
}

/// Takes the directory. If a pool was opened from it before, checks that the store has a pool.
async fn open_node(config: &PoolConfig) -> Result<NodeDir> {
    let node = NodeDir::open(&config.dir)?;
    if let Some(pool) = node.pool() {
        // Before the probe and all other writes: it may be a wrong or an emptied bucket.
        let is_there = store_dir_exists(config)?;
        if !is_there || !KeyRing::exists_or_refuse(&open_store(config)?).await? {
            return Err(other_store(config, pool));
        }
    }
    Ok(node)
}

/// State before the pool is taken.
struct Prepared<'a> {
    config: &'a PoolConfig,
    node: NodeDir,
    store: Store,
    keys: KeyRing,
    terms: Terms,
}

async fn prepare(config: &PoolConfig, opening: Opening) -> Result<Prepared<'_>> {
    let node = match opening.makes_none() {
        true => check_pool_is_there(config).await?,
        false => open_node(config).await?,
    };
    let store = open_store(config)?;
    store.probe().await?;
    let keys = match opening {
        Opening::Existing | Opening::Removed => KeyRing::open(&store, &config.keys).await?,
        Opening::OrNew | Opening::TakeOver | Opening::Alone => {
            KeyRing::open_or_create(&store, &config.keys).await?
        }
    };
    let terms = Terms {
        take_over: match opening {
            Opening::TakeOver => TakeOver::Forced,
            Opening::Alone => TakeOver::Alone,
            _ if config.log_members.is_some() => TakeOver::ByQuorum,
            Opening::Existing | Opening::Removed | Opening::OrNew => TakeOver::No,
        },
        restores: opening == Opening::Removed,
        retention: config.retention,
    };
    Ok(Prepared { config, node, store, keys, terms })
}

impl Prepared<'_> {
    async fn take(self) -> Result<Taken> {
        let Prepared { config, node, store, keys, terms } = self;
        let key = keys.newest().key.clone();
        let name = &config.name;
        let owed = LossOwed::before(&config.dir, terms)?;
        let was_owed = owed.was_owed;
        let taken = Ownership::acquire(&store, &node, &key, keys.pool(), name, terms).await;
        let is_taken_over = owed.after(&taken);
        let ownership = taken?;
        let dir = config.dir.to_owned();
        let taken =
            Taken { node, dir, store, keys, key, ownership, was_owed, is_taken_over: false };
        match is_taken_over {
            Ok(is_taken_over) => Ok(Taken { is_taken_over, ..taken }),
            Err(error) => {
                taken.give_back().await;
                Err(error)
            }
        }
    }
}

/// A pool that is owned, before anything of it is written.
struct Taken {
    node: NodeDir,
    dir: PathBuf,
    store: Store,
    keys: KeyRing,
    key: PoolKey,
    ownership: Ownership,
    /// Volumes still have to lose writes because of an earlier take-over.
    was_owed: bool,
    is_taken_over: bool,
}

/// Parts of an open pool before its jobs run.
struct Parts {
    tier: Tier,
    volume_keys: VolumeKeyRing,
    log: Log,
    recovery: Recovery,
    restored: Option<Restored>,
    data_stores: Option<Arc<dyn OpenDataStores>>,
    conditions: Conditions,
    is_log_lost: bool,
    /// The store had a note that the log has failed.
    is_heard: bool,
    role: Option<Box<dyn OwnerRole>>,
}

/// The same for a pool whose jobs run.
struct Opened {
    recovery: Recovery,
    restored: Option<Restored>,
    data_stores: Option<Arc<dyn OpenDataStores>>,
    conditions: Conditions,
    lost_writes: Option<LostWrites>,
    role: Option<Box<dyn OwnerRole>>,
}

impl Taken {
    /// Gives the pool back after a failed opening. Logs errors.
    async fn give_back(&self) {
        let given_back = match self.ownership.give_back(&self.node).await {
            Ok(true) if self.is_taken_over && !self.was_owed => remove_mark(&self.dir, TAKEN_OVER),
            Ok(_) => return,
            Err(error) => Err(error),
        };
        if let Err(error) = given_back {
            tracing::warn!(
                error = %error.chain(),
                "could not give the pool back after an opening that failed; open it from here once \
                 the cause is gone, as it may count as open in this directory"
            );
        }
    }

    fn into_open(
        self,
        config: &PoolConfig,
        pool: Arc<Pool>,
        opened: Opened,
        steps: Steps,
    ) -> OpenPool {
        let Opened { recovery, restored, data_stores, conditions, lost_writes, role } = opened;
        OpenPool {
            pool,
            lost_writes,
            keys: tokio::sync::Mutex::new(self.keys),
            ownership: self.ownership,
            config: config.clone(),
            conditions,
            recovery,
            node: self.node,
            store: self.store,
            is_complete: watch::Sender::new(
                restored.as_ref().is_none_or(|one| one.origin.is_complete),
            ),
            restored,
            data_stores,
            rebuild: Arc::default(),
            rebalance: Arc::default(),
            tiers: Arc::default(),
            role,
            steps,
        }
    }
}

/// Opens metadata and log.
async fn open_parts(config: &PoolConfig, taken: &Taken, steps: &mut Steps) -> Result<Parts> {
    let (ownership, keys, key) = (&taken.ownership, &taken.keys, &taken.key);
    if taken.node.is_copy() {
        leave_attachments(config)?;
    }
    let (store, restored) =
        restore::store_of(taken.store.clone(), key, keys.pool(), &config.clock).await?;
    let mut options = tier_options(config, &store, keys.pool(), key, ownership.epoch());
    options.background = Some(crate::background::lane()?);
    let conditions = Conditions::default();
    conditions.observe(crate::conditions::log);
    options.conditions = conditions.clone();
    show_small_index(config, &conditions);
    let owner = ownership.clone();
    options.owner_check = Some(OwnerCheck::new(move || {
        let owner = owner.clone();
        Box::pin(async move { owner.check().await })
    }));
    let volume_keys =
        VolumeKeyRing::open(&taken.store, key, keys.pool(), ownership.epoch()).await?;
    options.volume_keys = volume_keys.table().clone();
    options.excluded = restored.as_ref().and_then(Restored::excluded);
    options.restored = restored.as_ref().and_then(Restored::objects);
    let lineage = restored.as_ref().map(|restored| restored.origin.lineage);
    let data_stores =
        open_data_stores(config, &store, &mut options, lineage, Some(ownership)).await?;
    let tier = Tier::open(options).await?;
    if let Err(error) = check_data_stores(&tier, data_stores.is_some(), restored.is_some()) {
        close_quietly(tier).await;
        return Err(error);
    }
    steps.end("metadata");
    let opened = open_log(config, taken, (&tier, restored.as_ref()), steps).await;
    if let (Ok(_), Some(stores)) = (&opened, &data_stores) {
        stores.clean_unfinished();
    }
    match opened {
        Ok(LogFound { log, recovery, is_log_lost, is_heard, role }) => Ok(Parts {
            tier,
            volume_keys,
            log,
            recovery,
            restored,
            data_stores,
            conditions,
            is_log_lost,
            is_heard,
            role,
        }),
        Err(error) => {
            close_quietly(tier).await;
            Err(error)
        }
    }
}

/// Closes a data tier of a pool that does not open, because its jobs write to the store.
async fn close_quietly(tier: Tier) {
    if let Ok(Err(closing)) = tokio::time::timeout(CLOSE_GRACE, tier.close()).await {
        tracing::debug!(
            error = %closing.chain(),
            "could not close a data tier that is no longer needed"
        );
    }
}

/// Records that the directory holds the pool, and starts its jobs.
fn start(config: &PoolConfig, taken: &Taken, parts: Parts) -> Result<(Arc<Pool>, Opened)> {
    let Parts { tier, volume_keys, log, recovery, conditions, is_log_lost, role, .. } = parts;
    let Parts { restored, data_stores, .. } = parts;
    taken.ownership.settle(&taken.node)?;
    crate::conditions::show_recovery(&conditions, &recovery);
    let pool = Pool::start(
        log,
        (tier, volume_keys),
        config.destage,
        config.retention,
        &recovery.missing_spill_files,
    )?;
    // Before the first flush of a client.
    let manifest = taken.ownership.manifest();
    let configuration = manifest.configuration.as_ref();
    pool.set_flushes_to_store(configuration.is_some_and(Configuration::flushes_to_store));
    pool.set_replicated(configuration.is_some_and(|one| one.members.len() > 1));
    let clock = &config.clock;
    let newest_stamp = pool.newest_stamp(clock.unix_seconds());
    pool.set_clock(ProvenClock::open(clock.clone(), &taken.dir, newest_stamp, conditions.clone()));
    let lost_writes = match () {
        () if taken.is_taken_over => Some(LostWrites::TakeOver),
        () if is_log_lost => Some(LostWrites::LostLog),
        () => recovery.tail_loss.map(LostWrites::from),
    };
    Ok((pool, Opened { recovery, restored, data_stores, conditions, lost_writes, role }))
}

/// Brings an opened pool into the state that is needed before anything of it is served.
async fn settle(open: &mut OpenPool, is_heard: bool) -> Result<()> {
    if let Some(cause) = open.lost_writes {
        if matches!(cause, LostWrites::TakeOver | LostWrites::LostLog) {
            // Before the first entry of this owner.
            open.pool.keep_base(open.ownership.epoch(), open.recovery.last_lsn).await;
        }
        open.pool.note_lost_writes(cause, open.ownership.epoch()).await?;
    }
    if is_heard {
        failed_log::forget(&open.store, &open.node).await;
    }
    let key = open.keys.get_mut().newest().key.clone();
    if let Some(restored) = &mut open.restored {
        restore::apply_choice(restored, &open.pool, &open.store, &key).await?;
        // The metadata knows the volumes that are made from here on.
        open.pool.tier().set_excluded(restored.excluded());
    }
    crate::conditions::show_recovery_key(&open.conditions, open.keys.get_mut().has_recovery());
    show_descriptors(open);
    Lookout::new(open).look(open);
    Ok(())
}

/// The subject is not the directory of the cache, which the cache itself uses.
fn show_small_index(config: &PoolConfig, conditions: &Conditions) {
    let Some(cache) = &config.data.cache else { return };
    let wanted_bytes = config.data.cache_index_wanted_bytes;
    let is_small = cache.index_bytes < wanted_bytes;
    let report = is_small.then(|| {
        Report::new(
            format!(
                "memory is too small to index all of the read cache of {}: its index has {} MiB and would take \
                 {}",
                ByteSize(cache.bytes),
                cache.index_bytes >> 20,
                wanted_bytes >> 20
            ),
            "small blocks may leave parts of the cache unused",
            "raise `memory`, or lower `cache.size`",
        )
    });
    let subject = format!("index of {}", cache.dir.display());
    conditions.set(ConditionKind::CacheShrunk, &subject, report);
}

fn show_descriptors(open: &OpenPool) {
    use rustix::process::{Resource, getrlimit};
    let log = &open.config.log;
    let ring_file_count = log.ring_bytes / log.file_bytes.max(1);
    let limit = getrlimit(Resource::Nofile).current;
    let connections = open.config.connection_count_max;
    crate::conditions::show_descriptors(&open.conditions, limit, connections, ring_file_count);
}

fn no_pool(config: &PoolConfig, why: &str) -> Error {
    let what = format!(
        "open the pool of {} in {}: {why}. Check --dir, --store and the configuration; to make a \
         pool, run `spindle serve` or `spindle volume create` there",
        config.dir.display(),
        &config.store_url
    );
    Error::new(ErrorKind::NotFound, what)
}

/// Error for a directory that belongs to a pool that is not in the store.
fn other_store(config: &PoolConfig, pool: Uuid) -> Error {
    let what = format!(
        "directory {} belongs to pool {pool}, but store {} holds no pool: it is another one, or was \
         emptied, and nothing was written there. Use the right --store, bring the objects back, or, \
         for a new pool, use another --dir",
        config.dir.display(),
        &config.store_url
    );
    Error::new(ErrorKind::NotFound, what)
}

fn check_dir_exists(config: &PoolConfig) -> Result<()> {
    match config.dir.is_dir() {
        true => Ok(()),
        false => Err(no_pool(config, "the directory does not exist")),
    }
}

/// Checks that a local store exists, because opening it would make its directory.
pub fn check_store_dir_exists(config: &PoolConfig) -> Result<()> {
    match store_dir_exists(config)? {
        true => Ok(()),
        false => Err(no_pool(config, "the store does not exist")),
    }
}

fn store_dir_exists(config: &PoolConfig) -> Result<bool> {
    Ok(Store::dir_of(&config.store_url)?.is_none_or(|dir| dir.is_dir()))
}

/// Spill files that the metadata names, as types of the log.
pub(crate) fn spill_files_wanted(tier: &Tier) -> SpillFilesWanted {
    let file = |file: NamedSpillFile| SpillFileId {
        first_lsn: file.first_lsn,
        last_lsn: file.last_lsn,
        id: file.id,
    };
    let stalled_volumes = tier.stalled_volumes().into_iter();
    stalled_volumes.map(|(volume, files)| (volume, files.into_iter().map(file).collect())).collect()
}

/// Duty of the volumes to lose writes after a take-over, kept across a crash until they have recorded
/// it.
struct LossOwed<'a> {
    dir: &'a Path,
    /// An earlier take-over left this duty.
    was_owed: bool,
}

impl LossOwed<'_> {
    /// Records the duty if this is a take-over by force: another one gives up no write. To be called
    /// before the pool is taken.
    fn before(dir: &Path, terms: Terms) -> Result<LossOwed<'_>> {
        let was_owed = dir.join(TAKEN_OVER).exists();
        if terms.take_over == TakeOver::Forced {
            make_mark(dir, TAKEN_OVER)?;
        }
        Ok(LossOwed { dir, was_owed })
    }

    /// Evaluates the result of taking the pool. Returns true if the volumes have to lose writes.
    fn after(&self, taken: &Result<Ownership>) -> Result<bool> {
        use ErrorKind::{Busy, Denied, Invalid, NotFound};
        let is_owed = self.was_owed
            || match taken {
                Ok(ownership) => ownership.is_forced(),
                // In other cases the pool may have been taken although the answer was lost.
                Err(error) => !matches!(error.kind(), Busy | Denied | Invalid | NotFound),
            };
        if !is_owed {
            remove_mark(self.dir, TAKEN_OVER)?;
        }
        Ok(is_owed)
    }
}

/// Sets the lists of devices aside in a copied directory. They belong to the original,
/// which may come back, and they may have seen newer data than the copy has.
fn leave_attachments(config: &PoolConfig) -> Result<()> {
    let dir = &config.dir;
    for name in &config.machine_files {
        let (path, left) = (dir.join(name), dir.join(format!("{name}.of-the-original")));
        match std::fs::rename(&path, &left) {
            Ok(()) => {
                tracing::error!(
                    kept_at = %left.display(),
                    "this directory is a copy, or was restored: the daemon does not take over \
                     devices of the original. If the original is gone for good, remove \
                     its devices with `spindle attach --cleanup /dev/DEVICE`, and attach the \
                     volumes again"
                );
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => {
                let what = format!("rename {}", path.display());
                return Err(Error::with_source(ErrorKind::Io, what, error));
            }
        }
    }
    std::fs::File::open(dir).and_then(|dir| dir.sync_all()).map_err(|error| {
        Error::with_source(ErrorKind::Io, format!("sync {}", dir.display()), error)
    })
}

#[cfg(test)]
mod tests;
