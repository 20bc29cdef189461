//! Opening and closing a pool, and serving it until told to stop.
//!
//! Invariants:
//! - Order of opening: directory lock, store, keys, ownership, metadata, log. Each step refuses
//!   before the next one changes anything.
//! - A log that another owner has overtaken is never replayed: it is set aside, whole.
//! - Order of closing: front ends, destage, log, metadata, ownership. Only a pool of which the
//!   store holds everything is released: another machine may then open it without being asked
//!   whether it wants to lose something.

use crate::admin::{AdminHandler, AdminServer, FsckInfo};
use crate::config::{Config, LogIo, budget};
use crate::destage::DestageOptions;
use crate::glue::admin::AdminPool;
use crate::glue::exports::PoolExports;
use crate::keys::KeyRing;
use crate::manifest::{NodeDir, Ownership, Terms};
use crate::pool::{Pool, StepBack};
use crate::store::{Store, StoreOptions};
use block::seal::PoolKey;
use block::{Epoch, Error, ErrorKind, Lsn, Result};
use nbd::{Access, Listener, Server, ServerOptions, TlsMode, TlsOptions};
use replication::{IoMode, Log, LogIdentity, LogOptions, SideFileId, SidesWanted};
use std::collections::HashSet;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiering::cache::CacheOptions;
use tiering::{AsideFile, FsckOptions, FsckReport, OwnerCheck, Tier, TierOptions};
use tokio::signal::unix::{Signal, SignalKind};
use tokio::sync::watch;
use uuid::Uuid;

/// Longest time that an orderly stop spends on moving the log's tail to the store. What is left
/// stays in the log, and the pool stays ours.
const CLOSE_DESTAGE_MAX: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 60 });
/// Exit code of a daemon that a second signal ended before its stop was done.
const EXIT_AT_ONCE: i32 = 3;
/// Time that requests in flight have to finish at an orderly stop.
const STOP_GRACE: Duration = Duration::from_secs(10);
/// How often the owner looks whether it still is. Chosen by hand: one listing.
const OWNERSHIP_CHECK: Duration = Duration::from_secs(5);
/// How often removed volumes are looked at.
const PURGE_CHECK: Duration = Duration::from_secs(60);

/// A pool that is open in this process, with what has to be kept while it is.
pub struct OpenPool {
    pub(crate) pool: Arc<Pool>,
    pub(crate) keys: tokio::sync::Mutex<KeyRing>,
    pub(crate) ownership: Ownership,
    pub(crate) config: Config,
    pub(crate) recovery: replication::Recovery,
    /// Since when the store does not say who owns the pool, and what it said last.
    pub(crate) no_contact: parking_lot::Mutex<Option<(Instant, String)>>,
    _node: NodeDir,
}

/// What may be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// A pool that exists. Where there is none, nothing is made or written.
    Existing,
    /// As `Existing`, but one that was removed, which is in use again then.
    Removed,
    /// One is made on first use.
    OrNew,
    /// As `OrNew`, and it is taken from the node that has it open.
    TakeOver,
}

impl Opening {
    fn makes_none(self) -> bool {
        matches!(self, Opening::Existing | Opening::Removed)
    }
}

/// Opens the configured pool.
///
/// # Errors
/// Those of each step, saying what to do.
pub async fn open(config: &Config, opening: Opening) -> Result<OpenPool> {
    raise_open_files();
    keep_pages_small();
    let dir = config.dir();
    if opening.makes_none() {
        check_dir_exists(config)?;
        check_store_dir_exists(config)?;
    }
    let open_store = || Store::open(config.store_url(), &StoreOptions::default());
    if opening.makes_none() && !KeyRing::exists(&open_store()?).await? {
        return Err(no_pool(config, "there is no pool"));
    }
    let node = NodeDir::open(dir)?;
    if let Some(pool) = node.pool() {
        // Before the probe and all else that writes: it may be a wrong or an emptied bucket.
        let is_there = store_dir_exists(config)?;
        if !is_there || !KeyRing::exists_or_refuse(&open_store()?).await? {
            return Err(other_store(config, pool));
        }
    }
    let store = open_store()?;
    store.probe().await?;
    let keys = match opening {
        Opening::Existing | Opening::Removed => KeyRing::open(&store, &config.key_source()).await?,
        Opening::OrNew | Opening::TakeOver => {
            KeyRing::open_or_create(&store, &config.key_source()).await?
        }
    };
    let retention = config.settings().deleted_retention.duration();
    let terms = Terms {
        take_over: opening == Opening::TakeOver,
        restores: opening == Opening::Removed,
        retention,
    };
    let key = keys.newest().key.clone();
    let name = &config.settings().name;
    let ownership = Ownership::acquire(&store, &node, &key, keys.pool(), name, terms).await?;
    let pool = keys.pool().into_bytes();
    let mut options = tier_options(config, &store, keys.pool(), &key, ownership.epoch());
    options.background = Some(crate::background::lane()?);
    warn_of_small_index(config);
    let owner = ownership.clone();
    options.owner_check = Some(OwnerCheck::new(move || {
        let owner = owner.clone();
        Box::pin(async move { owner.check().await })
    }));
    let tier = Tier::open(options).await?;
    let log_dir = dir.join("log");
    set_aside_if_overtaken(&log_dir, &ownership)?;
    check_log_is_there(dir, &log_dir, &ownership, tier.destaged_lsn())?;
    let identity =
        LogIdentity { pool, epoch: ownership.epoch(), boot_id: LogIdentity::kernel_boot_id()? };
    let (options, destaged) = (log_options(config), tier.destaged_lsn());
    let log_key = key.clone();
    let sides = sides_wanted(&tier);
    let opened = tokio::task::spawn_blocking(move || {
        Log::open_with_sides(&log_dir, identity, log_key, options, destaged, &sides)
    });
    let (log, recovery) = opened
        .await
        .map_err(|error| Error::with_source(ErrorKind::Io, "open the write log", error))??;
    ownership.settle(&node)?;
    store.clean_unfinished(tiering::segment::FOLDER);
    mark_log_made(dir)?;
    report_recovery(&recovery);
    let destage = DestageOptions {
        max_age: config.settings().destage.max_age.duration(),
        ..DestageOptions::default()
    };
    let pool = Pool::start(log, tier, destage, retention, &recovery.missing_sides)?;
    if ownership.is_forced() {
        pool.note_step_back(StepBack::TakeOver).await?;
    } else if !recovery.is_tail_proven {
        pool.note_step_back(StepBack::Reboot).await?;
    }
    let open = OpenPool {
        pool,
        keys: tokio::sync::Mutex::new(keys),
        ownership,
        config: config.clone(),
        recovery,
        no_contact: parking_lot::Mutex::default(),
        _node: node,
    };
    Ok(open)
}

fn warn_of_small_index(config: &Config) {
    let budget = config.budget();
    if config.cache_dir().is_some() && budget.cache_index_bytes < budget.cache_index_wanted_bytes {
        tracing::warn!(
            cache = %config.settings().cache.size,
            index_bytes = budget.cache_index_bytes,
            wanted_bytes = budget.cache_index_wanted_bytes,
            "memory is too small to index all of the read cache: small blocks may leave parts of it \
             unused"
        );
    }
}

/// Memory in use is to be memory that is needed: buffers come and go, and with huge pages each that is
/// still touched a little counts as 2 MiB. Measured with 75 s of random writes and a budget of
/// 448 MiB: 305 MiB at most instead of 478, 196 MiB at rest instead of 440, no slower.
fn keep_pages_small() {
    if let Err(error) = rustix::thread::disable_transparent_huge_pages(true) {
        tracing::debug!(%error, "huge pages stay as the system has them");
    }
}

/// Asks for as many open files as the system allows: connections, files of the log, and side files
/// must not run out of them at the same time.
fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    if let Err(error) = raised {
        tracing::warn!(%error, current = ?limit.current, "the limit of open files stays as it is");
    }
}

fn no_pool(config: &Config, why: &str) -> Error {
    let what = format!(
        "open the pool of {} in {}: {why}. Check --dir, --store and the configuration; to make a \
         pool, run `spindle serve` or `spindle volume create` there",
        config.dir().display(),
        config.store_url()
    );
    Error::new(ErrorKind::NotFound, what)
}

/// This directory knows of a pool that the store knows nothing of.
fn other_store(config: &Config, pool: Uuid) -> Error {
    let what = format!(
        "directory {} belongs to pool {pool}, but store {} holds no pool: it is another one, or was \
         emptied, and nothing was written there. Use the right --store, bring the objects back, or, \
         for a new pool, use another --dir",
        config.dir().display(),
        config.store_url()
    );
    Error::new(ErrorKind::NotFound, what)
}

fn check_dir_exists(config: &Config) -> Result<()> {
    match config.dir().is_dir() {
        true => Ok(()),
        false => Err(no_pool(config, "the directory does not exist")),
    }
}

/// Opening a store in a directory would make the directory.
pub(crate) fn check_store_dir_exists(config: &Config) -> Result<()> {
    match store_dir_exists(config)? {
        true => Ok(()),
        false => Err(no_pool(config, "the store does not exist")),
    }
}

fn store_dir_exists(config: &Config) -> Result<bool> {
    Ok(Store::dir_of(config.store_url())?.is_none_or(|dir| dir.is_dir()))
}

/// The side files that the metadata names, in the words of the log.
pub(crate) fn sides_wanted(tier: &Tier) -> SidesWanted {
    let file = |file: AsideFile| SideFileId {
        first_lsn: file.first_lsn,
        last_lsn: file.last_lsn,
        id: file.id,
    };
    let asides = tier.asides().into_iter();
    asides.map(|(volume, files)| (volume, files.into_iter().map(file).collect())).collect()
}

fn log_options(config: &Config) -> LogOptions {
    let log = &config.settings().log;
    let default = LogOptions::default();
    LogOptions {
        ring_bytes: log.size.0,
        file_bytes: log.file_size.0,
        io_mode: match log.io {
            LogIo::Auto => IoMode::default(),
            LogIo::Buffered => IoMode::Buffered,
            LogIo::Direct => IoMode::Direct,
        },
        algorithm: config.settings().encryption.cipher.algorithm(),
        payload_memory_bytes: config.budget().log_payload_bytes,
        entry_count_max: config.budget().extent_count_max,
        generation_bytes_max: default.generation_bytes_max.min(log.size.0 / 8),
        ..default
    }
}

fn tier_options(
    config: &Config,
    store: &Store,
    pool: Uuid,
    key: &PoolKey,
    epoch: Epoch,
) -> TierOptions {
    let (settings, budget) = (config.settings(), config.budget());
    let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut options = TierOptions::new(store.bulk(), pool.into_bytes(), key.clone(), epoch);
    options.algorithm = settings.encryption.cipher.algorithm();
    options.zstd_level = settings.destage.compression_level;
    options.segment_bytes = bytes(settings.destage.segment_size.0);
    options.frames.memory_bytes = budget.memory_cache_bytes;
    options.frames.stream_bytes = budget.stream_bytes;
    options.frames.cache = config.cache_dir().map(|dir| CacheOptions {
        index_bytes: budget.cache_index_bytes,
        pending_bytes_max: budget.cache_pending_bytes,
        ..CacheOptions::new(dir, settings.cache.size.0)
    });
    options.map.page_cache_bytes = bytes(budget.map_cache_bytes);
    options.database.cache_bytes = budget.metadata_cache_bytes;
    options.database.has_conditional_update = store.local_dir().is_none();
    options
}

/// Reports what the log had for us; the numbers are also in the status.
fn report_recovery(recovery: &replication::Recovery) {
    tracing::info!(
        entry_count = recovery.entry_count,
        last_lsn = recovery.last_lsn.0,
        was_clean = recovery.was_clean,
        "write log opened"
    );
    if !recovery.is_tail_proven {
        tracing::warn!(
            reason = recovery.lost_reason.as_deref().unwrap_or("unknown"),
            "the machine stopped while writes were answered ahead of stable storage: some that \
             were answered but never flushed may be gone"
        );
    }
}

/// Moves a log that this directory may not replay out of the way.
fn set_aside_if_overtaken(log_dir: &Path, ownership: &Ownership) -> Result<()> {
    let Some(log) = replication::summarize(log_dir)? else { return Ok(()) };
    if ownership.may_replay(log.epoch) {
        return Ok(());
    }
    // Before the log goes, so that a crash in between is not taken for a lost log.
    let mark = log_dir.with_file_name(LOG_MADE);
    match std::fs::remove_file(&mark) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            let what = format!("remove {}", mark.display());
            return Err(Error::with_source(ErrorKind::Io, what, error));
        }
        _ => {}
    }
    let aside = free_name(log_dir, log.epoch.0);
    std::fs::rename(log_dir, &aside).map_err(|error| {
        Error::with_source(ErrorKind::Io, format!("set aside {}", log_dir.display()), error)
    })?;
    let only_here_count = log.last_lsn.0.saturating_sub(log.destaged_lsn.0);
    if only_here_count == 0 && log.side_file_count == 0 {
        // Everything in it reached the store before the pool moved on.
        return std::fs::remove_dir_all(&aside).map_err(|error| {
            Error::with_source(ErrorKind::Io, format!("remove {}", aside.display()), error)
        });
    }
    tracing::error!(
        log_epoch = log.epoch.0,
        only_here_count,
        side_file_count = log.side_file_count,
        kept_at = %aside.display(),
        "another node has owned the pool since this directory's log was written; the log is kept \
         and not replayed: the writes that it alone holds are not part of the pool"
    );
    Ok(())
}

fn free_name(log_dir: &Path, epoch: u64) -> PathBuf {
    (0..)
        .map(|count| match count {
            0 => log_dir.with_file_name(format!("log.overtaken-{epoch}")),
            _ => log_dir.with_file_name(format!("log.overtaken-{epoch}-{count}")),
        })
        .find(|path| !path.exists())
        .expect("some name is free")
}

const LOG_MADE: &str = "log.made";

/// A log that was here and is gone held acknowledged writes unless the pool was released.
fn check_log_is_there(
    dir: &Path,
    log_dir: &Path,
    ownership: &Ownership,
    destaged: Lsn,
) -> Result<()> {
    let was_made = dir.join(LOG_MADE).exists();
    let is_ours = ownership.previous().is_some_and(|previous| {
        !previous.is_released && ownership.manifest().owner_since_epoch <= previous.epoch
    });
    // Whatever else lies there (a lock, a lost+found): without a ring file there is no log.
    let has_ring = std::fs::read_dir(log_dir).is_ok_and(|entries| {
        entries.flatten().any(|entry| entry.path().extension().is_some_and(|kind| kind == "log"))
    });
    if was_made && is_ours && !has_ring {
        let what = format!(
            "open the write log: {} holds no log, but this directory had a log when the pool was last \
             open and the pool was not closed in order; writes after LSN {destaged} are in that \
             log only. Bring it back; or, to go on without them, delete {}",
            log_dir.display(),
            dir.join(LOG_MADE).display()
        );
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    Ok(())
}

fn mark_log_made(dir: &Path) -> Result<()> {
    let path = dir.join(LOG_MADE);
    let failed =
        |error| Error::with_source(ErrorKind::Io, format!("write {}", path.display()), error);
    if path.exists() {
        return Ok(());
    }
    let file = std::fs::File::create(&path).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    std::fs::File::open(dir).and_then(|dir| dir.sync_all()).map_err(failed)
}

impl OpenPool {
    /// The pool.
    #[must_use]
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Creates the configured volumes that are missing, and grows or re-configures those that the
    /// configuration says so of.
    async fn make_volumes(&self) -> Result<()> {
        for wanted in &self.config.settings().volumes {
            let volume = match self.pool.volume(&wanted.name) {
                Some(volume) => volume,
                None if self.pool.is_removed(&wanted.name) => {
                    // An empty volume in its place would look like lost data to its clients.
                    tracing::warn!(
                        volume = wanted.name,
                        "the volume is configured but was removed, and is not made anew: bring it \
                         back with `spindle volume restore`, or take it out of the configuration"
                    );
                    continue;
                }
                None => {
                    let durability = wanted.durability.unwrap_or_default();
                    self.pool.create_volume(&wanted.name, wanted.size.0, durability).await?
                }
            };
            if self.pool.is_closed(&volume) {
                // It is not served and was reported; the others must open all the same.
                continue;
            }
            let size_bytes = volume.record().size_bytes;
            if size_bytes < wanted.size.0 {
                self.pool.resize_volume(&wanted.name, wanted.size.0, false).await?;
            } else if size_bytes > wanted.size.0 {
                tracing::warn!(
                    volume = wanted.name,
                    size_bytes,
                    configured_bytes = wanted.size.0,
                    "the volume is larger than configured and stays so; `spindle volume resize \
                     --shrink` makes it smaller"
                );
            }
            self.pool.configure_volume(&wanted.name, wanted.durability, wanted.read_only).await?;
        }
        Ok(())
    }

    /// Who has the pool, where that can be learned: the metadata knows only that somebody has.
    async fn reason_of_loss(&self, found: Error) -> Error {
        if found.kind() != ErrorKind::Fenced {
            return found;
        }
        match tokio::time::timeout(STOP_GRACE, self.ownership.check()).await {
            Ok(Err(error)) if error.kind() == ErrorKind::Fenced => error,
            _ => found,
        }
    }

    fn names_of(&self, ids: impl Iterator<Item = u32>) -> Vec<String> {
        let records = self.pool.records();
        let name = |id| match records.iter().find(|record| record.id == id) {
            Some(record) => record.name.clone(),
            None => format!("number {id}"),
        };
        ids.map(name).collect()
    }

    /// Orderly stop: the store gets what it lacks, within a bounded time, and the pool is released
    /// if it got everything.
    ///
    /// # Errors
    /// The first failure; nothing that was promised is lost by it.
    pub async fn close(self) -> Result<()> {
        match self.close_pool().await? {
            Closed::AllInStore | Closed::LacksLost(_) => self.ownership.release().await,
            Closed::Lacks(_) => Ok(()),
        }
    }

    /// As [`OpenPool::close`], and the pool is removed instead of released. Returns when.
    ///
    /// # Errors
    /// Also where the store does not hold everything: the pool is then not removed.
    pub(crate) async fn remove(self) -> Result<u64> {
        let lacks = match self.close_pool().await? {
            Closed::AllInStore => return self.ownership.remove().await,
            Closed::LacksLost(lacks) => {
                // It stays released, as a stop leaves it.
                self.ownership.release().await?;
                lacks
            }
            Closed::Lacks(lacks) => lacks,
        };
        let what = "remove the pool: the store does not hold all of it, and it was not removed. See \
             `spindle status`, and try again once the cause is gone";
        Err(Error::with_source(lacks.kind(), what, lacks))
    }

    /// Moves what the store lacks there, within a bounded time, and closes all but the ownership.
    async fn close_pool(&self) -> Result<Closed> {
        let everything = tokio::time::timeout(CLOSE_DESTAGE_MAX, self.pool.destage_all()).await;
        let lacking = match everything {
            Ok(Ok(_)) => None,
            Ok(Err(error)) => Some(error),
            Err(_) => Some(Error::new(ErrorKind::Unavailable, "the store did not take it in time")),
        };
        if let Some(error) = &lacking {
            tracing::warn!(error = %error.chain(), "the log's tail was not moved to the store");
        }
        let (last_lsn, destaged_lsn) = self.pool.close().await?;
        let lacks = |lacking: Option<Error>| {
            let unknown = || Error::new(ErrorKind::Unavailable, "the newest writes are not there");
            lacking.unwrap_or_else(unknown)
        };
        if destaged_lsn < last_lsn {
            tracing::warn!(
                last_lsn = last_lsn.0,
                destaged_lsn = destaged_lsn.0,
                "the store does not hold the newest writes; they are in this directory's log, and \
                 the pool stays owned by it"
            );
            return Ok(Closed::Lacks(lacks(lacking)));
        }
        let aside = self.pool.asides();
        let missing: HashSet<[u8; 16]> =
            self.recovery.missing_sides.iter().map(|side| side.file.id).collect();
        if aside.values().flatten().any(|file| !missing.contains(&file.id)) {
            tracing::warn!(
                volumes = ?self.names_of(aside.keys().map(|volume| volume.0)),
                "the store lacks writes of volumes that cannot be destaged; they are in side files \
                 in this directory's log, and the pool stays owned by it"
            );
            return Ok(Closed::Lacks(lacks(lacking)));
        }
        match aside.is_empty() {
            true => Ok(Closed::AllInStore),
            false => Ok(Closed::LacksLost(lacks(lacking))),
        }
    }
}

/// What the store held when a pool was closed.
enum Closed {
    /// Everything.
    AllInStore,
    /// All but writes whose side files are missing here, so that this directory is of no use to them.
    LacksLost(Error),
    /// Not all: the rest is in this directory.
    Lacks(Error),
}

/// Serves the configured pool until SIGTERM or SIGINT. Calls `announce` with the endpoints when
/// everything answers.
///
/// # Errors
/// Whatever keeps the pool from opening, the sockets from listening, or the end from being orderly.
pub async fn run(config: &Config, take_over: bool, announce: impl FnOnce(&[String])) -> Result<()> {
    let mut signals = Signals::new()?;
    let opening = if take_over { Opening::TakeOver } else { Opening::OrNew };
    let open = tokio::select! {
        open = open_with_volumes(config, opening) => open?,
        () = signals.stop() => return Ok(()),
    };
    let hangups = watch_signal(SignalKind::hangup())?;
    let stop = watch::Sender::new(false);
    let server = nbd_server(config, &open)?;
    let (listeners, endpoints) = listen(config, &open).await?;
    let mut serving = tokio::task::JoinSet::new();
    for listener in listeners {
        let server = server.clone();
        serving.spawn(async move { server.serve(listener).await });
    }
    let open = Arc::new(open);
    let handler = AdminPool::serving(open.clone(), endpoints.clone(), server.clone(), stop.clone());
    let handler = Arc::new(handler);
    let admin = tokio::spawn({
        let (handler, mut stopped) = (handler.clone(), stop.subscribe());
        let socket = AdminServer::bind(config.dir())?;
        async move {
            let stopped = async move {
                // A sender that is gone means the same.
                let _ = stopped.wait_for(|stop| *stop).await;
            };
            socket.serve(handler, stopped, STOP_GRACE).await;
        }
    });
    let watch = tokio::spawn(watch_ownership(open.clone(), stop.subscribe()));
    let purge = tokio::spawn(purge_removed(open.clone(), stop.subscribe()));
    let reload = tokio::spawn(reload_certificates(server.clone(), hangups, stop.subscribe()));
    announce(&endpoints);
    let mut stopped = stop.subscribe();
    // A supervisor sends its signal beside or after `spindle stop`: that one means the same stop.
    let (lost, spare_count) = tokio::select! {
        () = signals.stop() => (None, 0),
        _ = stopped.wait_for(|stop| *stop) => (None, 1),
        lost = open.pool.ended() => (Some(lost), 1),
    };
    end_at_once_on_another(signals, spare_count);
    tracing::info!("stopping");
    stop.send_replace(true);
    server.stop(STOP_GRACE);
    while let Some(ended) = serving.join_next().await {
        ended.map_err(|error| Error::with_source(ErrorKind::Io, "serve NBD", error))??;
    }
    for task in [admin, watch, purge, reload] {
        task.await.map_err(|error| Error::with_source(ErrorKind::Io, "stop a job", error))?;
    }
    handler.close().await?;
    drop(handler);
    let Some(open) = Arc::into_inner(open) else {
        return Err(Error::new(ErrorKind::Io, "close the pool: it is still in use"));
    };
    let Some(lost) = lost else { return open.close().await };
    // Not ours any more: nothing of it is moved to the store or released.
    if let Err(error) = open.pool.close().await {
        tracing::debug!(error = %error.chain(), "a pool that was lost did not close in order");
    }
    Err(open.reason_of_loss(lost).await)
}

/// Ends the process at the next signal but `spare_count`, whatever an orderly stop waits for. What
/// was answered is in the write log, as after a kill.
fn end_at_once_on_another(mut signals: Signals, spare_count: usize) {
    tokio::spawn(async move {
        for _ in 0..=spare_count {
            signals.stop().await;
        }
        tracing::warn!(
            "ended at once, because another signal came during the stop; what the store does not \
             hold is in the write log, and the pool stays owned by this directory"
        );
        std::process::exit(EXIT_AT_ONCE);
    });
}

async fn open_with_volumes(config: &Config, opening: Opening) -> Result<OpenPool> {
    let open = open(config, opening).await?;
    open.make_volumes().await?;
    Ok(open)
}

/// Opens the pool for requests of the command line while no daemon has it. Configured volumes are
/// left to the daemon.
///
/// # Errors
/// As [`open`].
pub async fn offline(config: &Config, opening: Opening) -> Result<AdminPool> {
    Ok(AdminPool::offline(open(config, opening).await?))
}

/// Walks what the store holds without opening the pool: whoever owns it is not disturbed, and
/// nothing is changed. What is only in a write log is not looked at.
///
/// # Errors
/// `NotFound` for a store without a pool; those of reading the store and the key.
pub async fn fsck(config: &Config) -> Result<FsckInfo> {
    check_store_dir_exists(config)?;
    let store = Store::open(config.store_url(), &StoreOptions::default())?;
    let keys = KeyRing::open(&store, &config.key_source()).await?;
    fsck_of(config, keys.pool(), &keys.newest().key).await
}

/// As [`fsck`], with a key ring that is open: what opened it may be gone or another by now.
pub(crate) async fn fsck_of(config: &Config, pool: Uuid, key: &PoolKey) -> Result<FsckInfo> {
    let store = Store::open(config.store_url(), &StoreOptions::default())?;
    let Some(manifest) = crate::manifest::read(&store, key).await? else {
        let what = format!("check the pool in {}: it was never opened", store.url());
        return Err(Error::new(ErrorKind::NotFound, what));
    };
    let mut options = tier_options(config, &store, pool, key, Epoch(manifest.epoch));
    // A walk reads everything once. It may run in a daemon whose own caches have the memory, and the
    // cache on disk belongs to that daemon.
    options.frames.cache = None;
    options.frames.memory_bytes = 0;
    options.frames.stream_bytes = 0;
    options.map.page_cache_bytes = usize::try_from(budget::MAP_BYTES_MIN).expect("it is small");
    options.database.cache_bytes = budget::METADATA_BYTES_MIN;
    let tier = Tier::open_read_only(options).await?;
    let report = tier.fsck(FsckOptions::default()).await?;
    let volume_count = tier.volume_records().len();
    tier.close().await?;
    Ok(fsck_info(volume_count, report))
}

/// The report of the data tier as the command line prints it.
#[must_use]
pub fn fsck_info(volume_count: usize, report: FsckReport) -> FsckInfo {
    FsckInfo {
        volume_count: volume_count as u64,
        segment_count: report.segment_count,
        object_bytes: report.object_bytes,
        frame_count: report.frame_count,
        page_count: report.page_count,
        block_count: report.block_count,
        problem_count: report.difference_count,
        problems: report.differences,
    }
}

fn nbd_server(config: &Config, open: &OpenPool) -> Result<Server<PoolExports>> {
    let settings = &config.settings().nbd;
    let tls = settings.tls.as_ref().map(|tls| TlsOptions {
        certificate: tls.cert.clone(),
        key: tls.key.clone(),
        client_ca: tls.client_ca.clone(),
    });
    let access = match &settings.tls {
        Some(tls) if !tls.clients.is_empty() => Access::by_certificate(tls.clients.clone()),
        _ => Access::default(),
    };
    let memory_bytes = usize::try_from(config.budget().nbd_payload_bytes).unwrap_or(usize::MAX);
    let options = ServerOptions {
        payload_memory_bytes: memory_bytes,
        connection_count_max: settings.connection_count_max as usize,
        tls,
        access,
        can_resize: settings.allow_resize,
        ..ServerOptions::default()
    };
    Server::new(Arc::new(PoolExports::new(open.pool.clone())), options)
}

/// Binds every configured socket. Returns them with the URIs of all present volumes.
async fn listen(config: &Config, open: &OpenPool) -> Result<(Vec<Listener>, Vec<String>)> {
    let settings = &config.settings().nbd;
    let (tcp_tls, unix_tls) = match settings.tls {
        Some(_) => (TlsMode::Required, TlsMode::On),
        None => (TlsMode::Off, TlsMode::Off),
    };
    let names: Vec<String> =
        open.pool.volumes().iter().map(|volume| volume.record().name).collect();
    let (mut listeners, mut endpoints) = (Vec::new(), Vec::new());
    for text in settings.listen.as_deref().unwrap_or_default() {
        let resolved: Vec<SocketAddr> = text
            .to_socket_addrs()
            .map_err(|error| {
                Error::with_source(ErrorKind::Invalid, format!("listen on {text}"), error)
            })?
            .collect();
        for address in resolved {
            nbd::check_listen_address(&address, tcp_tls, settings.allow_plain_remote)?;
            let listener = Listener::tcp(address, tcp_tls).await?;
            let scheme = if tcp_tls == TlsMode::Off { "nbd" } else { "nbds" };
            let bound = listener.tcp_address().expect("a TCP listener has an address");
            endpoints.extend(names.iter().map(|name| format!("{scheme}://{bound}/{name}")));
            listeners.push(listener);
        }
    }
    if let Some(path) = &settings.unix {
        listeners.push(Listener::unix(path, 0o600, unix_tls).await?);
        let socket = path.display();
        endpoints.extend(names.iter().map(|name| format!("nbd+unix:///{name}?socket={socket}")));
    }
    Ok((listeners, endpoints))
}

/// SIGTERM and SIGINT.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self> {
        Ok(Signals {
            terminate: watch_signal(SignalKind::terminate())?,
            interrupt: watch_signal(SignalKind::interrupt())?,
        })
    }

    async fn stop(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

fn watch_signal(kind: SignalKind) -> Result<Signal> {
    tokio::signal::unix::signal(kind)
        .map_err(|error| Error::with_source(ErrorKind::Io, "watch for signals", error))
}

/// Reads the TLS certificates anew at each SIGHUP.
async fn reload_certificates(
    server: Server<PoolExports>,
    mut hangups: Signal,
    mut stop: watch::Receiver<bool>,
) {
    loop {
        tokio::select! {
            _ = hangups.recv() => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
        match server.reload_tls() {
            Ok(()) => {
                tracing::info!("TLS certificates are read anew, for connections from here on")
            }
            Err(error) => tracing::error!(
                error = %error.chain(),
                "TLS certificates were not read anew; those from before stay in use: correct the \
                 file and send SIGHUP again"
            ),
        }
    }
}

/// Looks from time to time whether the pool is still ours, and stops acknowledging if not.
async fn watch_ownership(open: Arc<OpenPool>, mut stop: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(OWNERSHIP_CHECK) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
        let checked = tokio::select! {
            checked = open.ownership.check() => checked,
            _ = stop.wait_for(|stop| *stop) => return,
        };
        match checked {
            Ok(()) => *open.no_contact.lock() = None,
            Err(error) if matches!(error.kind(), ErrorKind::Fenced | ErrorKind::Corrupt) => {
                open.pool.fence(error);
                return;
            }
            // Nothing is known; the store being away must not stop the writers.
            Err(error) => {
                tracing::debug!(error = %error.chain(), "ownership could not be checked");
                let mut no_contact = open.no_contact.lock();
                let since = no_contact.as_ref().map_or_else(Instant::now, |(since, _)| *since);
                *no_contact = Some((since, error.chain()));
            }
        }
    }
}

async fn purge_removed(open: Arc<OpenPool>, mut stop: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(PURGE_CHECK) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
        // It waits where the log is full.
        let purged = tokio::select! {
            purged = open.pool.purge_expired() => purged,
            _ = stop.wait_for(|stop| *stop) => return,
        };
        match purged {
            Ok(0) => {}
            Ok(count) => tracing::info!(count, "purged removed volumes"),
            Err(error) => tracing::warn!(error = %error.chain(), "removed volumes were not purged"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_off_in_a_process_that_opens_pools() {
        keep_pages_small();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        // Kernels before 5.0 do not say.
        let said = status.lines().find(|line| line.starts_with("THP_enabled:"));
        assert!(said.is_none_or(|line| line.ends_with('0')), "{said:?}");
    }
}
