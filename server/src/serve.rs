//! Serves a pool until told to stop. The module `opening` opens it, and `closing` closes it.

mod closing;
mod daemon_jobs;
pub(crate) mod failed_log;
mod looking;
mod opening;

pub(crate) use closing::{EXIT_AT_ONCE, EXIT_LOG_FAILED};
pub(crate) use looking::look;
pub(crate) use opening::check_store_dir_exists;
#[cfg(test)]
pub(crate) use opening::sides_wanted;
pub use opening::{Opening, open};

use crate::admin::{AdminHandler, AdminServer, FsckInfo};
use crate::attach::{self, Attachments};
use crate::claims::Claims;
use crate::conditions;
use crate::config::{Config, budget};
use crate::copies::{Copies, target::Target};
use crate::glue::admin::AdminPool;
use crate::glue::exports::PoolExports;
use crate::jobs::Need;
use crate::pool::{Pool, StepBack, VolumeTraits};
use crate::record::{VolumeRecord, VolumeState};
use crate::restore::Restored;
use crate::scrub::Scrub;
use block::seal::PoolKey;
use block::{Epoch, Error, ErrorKind, Job, Result, VolumeId};
use control::keys::{KeyRing, KeySource};
use control::manifest::{NodeDir, Ownership};
use control::store::{Store, StoreOptions};
use daemon_jobs::{serve_listener, start_jobs};
use nbd::{Access, Exports, Listener, Server, ServerOptions, TlsMode, TlsOptions};
use opening::tier_options;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiering::{FsckOptions, FsckReport, Tier, TierOptions, VolumeKeys};
use tokio::signal::unix::{Signal, SignalKind};
use tokio::sync::watch;
use uuid::Uuid;

/// Longest time that an orderly stop spends on moving the log's tail to the store. The rest stays in the log, and the
/// pool stays ours.
const CLOSE_DESTAGE_MAX: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 60 });
/// Time that requests in flight have to finish at an orderly stop.
const STOP_GRACE: Duration = Duration::from_secs(10);
/// Time for which requests get errors after the write log has failed, before connections end with the daemon. A client
/// that only loses its connection may come back and continue as if nothing had happened; one that gets an error does
/// not. Chosen by hand: most clients send a request in that time.
const LOG_FAILURE_TOLD: Duration = Duration::from_secs(3);
/// Interval at which the owner checks that it still owns the pool. Chosen by hand: one listing.
const OWNERSHIP_CHECK: Duration = Duration::from_secs(5);
/// Pause between two checks for snapshots that are due.
const SCHEDULE_CHECK: Duration = Duration::from_secs(5);
/// Interval of the checks for removed volumes that are due.
const PURGE_CHECK: Duration = Duration::from_secs(60);

/// A pool that is open in this process, with everything that must live as long.
pub struct OpenPool {
    pub(crate) pool: Arc<Pool>,
    pub(crate) keys: tokio::sync::Mutex<KeyRing>,
    pub(crate) ownership: Ownership,
    pub(crate) config: Config,
    /// Lasting conditions of every part of the process.
    pub(crate) conditions: block::Conditions,
    pub(crate) recovery: wal::Recovery,
    /// The reason why answered writes may be gone, if they may.
    pub(crate) step_back: Option<StepBack>,
    pub(crate) node: NodeDir,
    pub(crate) store: Store,
    /// Present for a pool that was restored from a copy.
    pub(crate) restored: Option<Restored>,
    /// The pool has everything that it was restored from.
    pub(crate) is_whole: watch::Sender<bool>,
}

impl OpenPool {
    /// The pool.
    #[must_use]
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Creates the configured volumes that are missing, and grows or re-configures the others as the configuration
    /// says.
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
                    let (name, size_bytes) = (&wanted.name, wanted.size.0);
                    let traits = VolumeTraits {
                        own_key: wanted.own_key.unwrap_or_default(),
                        dedup: wanted.dedup.unwrap_or_default(),
                    };
                    self.pool.create_volume_with(name, size_bytes, durability, traits).await?
                }
            };
            if self.pool.is_closed(&volume) {
                // It is not served and was reported; the others must open all the same.
                continue;
            }
            if wanted.own_key == Some(true) && volume.record().own_key == 0 {
                tracing::warn!(
                    volume = wanted.name,
                    "the volume is configured with a key of its own and has none: only a new volume gets one"
                );
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
            let (durability, read_only) = (wanted.durability, wanted.read_only);
            self.pool.configure_volume(&wanted.name, durability, read_only, wanted.dedup).await?;
        }
        Ok(())
    }

    /// Names the pool's new owner if it can be learned: the metadata knows only that there is one.
    async fn reason_of_loss(&self, found: Error) -> Error {
        if found.kind() != ErrorKind::Fenced {
            return found;
        }
        match tokio::time::timeout(STOP_GRACE, self.ownership.check()).await {
            Ok(Err(error)) if error.kind() == ErrorKind::Fenced => error,
            _ => found,
        }
    }

    /// The pool's copies, without jobs.
    async fn copies(&self) -> Copies {
        let keys = self.keys.lock().await;
        let id = keys.pool();
        let lineage = self.restored.as_ref().map_or(id, |restored| restored.origin.lineage);
        let name = self.config.settings().name.clone();
        Copies::offline(self.pool.clone(), self.store.clone(), &keys, (id, lineage), name)
    }

    /// The pool's scrub, without its job.
    async fn scrub(&self) -> Scrub {
        let (key, id) = {
            let keys = self.keys.lock().await;
            (keys.newest().key.clone(), keys.pool())
        };
        let is_whole = self.is_whole.subscribe();
        Scrub::offline(self.pool.clone(), self.store.clone(), key, id, is_whole)
    }
}

/// Serves the configured pool until SIGTERM or SIGINT. Calls `announce` with the endpoints when everything answers.
///
/// # Errors
/// Errors that keep the pool from opening, the sockets from listening, or the end from being orderly.
pub async fn run(config: &Config, take_over: bool, announce: impl FnOnce(&[String])) -> Result<()> {
    let mut signals = Signals::new()?;
    check_places(config).await?;
    let hangups = watch_signal(SignalKind::hangup())?;
    let opening = if take_over { Opening::TakeOver } else { Opening::OrNew };
    let mut early = Signals::new()?;
    let early_stop = async move {
        early.stop().await;
        closing::end_at_once_on_another(early, 0);
    };
    let Some(open) = open_with_volumes(config, opening, early_stop).await? else { return Ok(()) };
    // The first says that a stop was asked for, the second that it has come far enough for jobs to end.
    let (asked, stop) = (watch::Sender::new(false), watch::Sender::new(false));
    let front = match open_front(config, &open).await {
        Ok(front) => front,
        Err((error, has_devices)) => {
            if let Err(error) = open.close_with(has_devices).await {
                tracing::warn!(error = %error.chain(), "a pool that could not be served did not close in order");
            }
            return Err(error);
        }
    };
    let Front { server, attachments, copies, scrub, listeners, endpoints, socket } = front;
    let mut serving = tokio::task::JoinSet::new();
    let jobs = open.pool.supervisor().clone();
    for listener in listeners {
        serving.spawn(serve_listener(jobs.clone(), server.clone(), listener, stop.subscribe()));
    }
    let open = Arc::new(open);
    let handler = AdminPool::serving(
        open.clone(),
        endpoints.clone(),
        server.clone(),
        attachments.clone(),
        (copies.clone(), scrub.clone()),
        asked.clone(),
    );
    let handler = Arc::new(handler);
    let admin = Job::new("admin socket", "no command is answered");
    let admin = jobs.spawn(Need::Vital, admin, {
        let (handler, mut stopped) = (handler.clone(), stop.subscribe());
        async move {
            let stopped = async move {
                // A sender that is gone means the same.
                let _ = stopped.wait_for(|stop| *stop).await;
            };
            socket.serve(handler, stopped, STOP_GRACE).await;
        }
    });
    let others =
        start_jobs(&jobs, &open, (&handler, &attachments), (server.clone(), hangups), &stop);
    announce(&endpoints);
    let mut stopped = asked.subscribe();
    // A supervisor sends its signal beside or after `spindle stop`: both mean the same stop.
    let (lost, spare_count) = tokio::select! {
        () = signals.stop() => (None, 0),
        _ = stopped.wait_for(|stop| *stop) => (None, 1),
        lost = open.pool.ended() => (Some(lost), 1),
        // An orderly stop: the next daemon continues where this one ends.
        () = jobs.vital_died() => (None, 1),
    };
    closing::end_at_once_on_another(signals, spare_count);
    tracing::info!("stopping");
    let lost = match lost {
        // Without the job that moves data, this would have no effect.
        None if attachments.has_users() && jobs.death().is_none() => {
            closing::move_while_served(&open.pool).await
        }
        lost => lost,
    };
    let has_devices = lost.is_none() && attachments.has_users();
    if lost.as_ref().is_some_and(wal::is_log_failure) {
        // The pool still belongs to this directory, and the next daemon finds out whether data was lost. Devices wait
        // for it.
        let begun = Instant::now();
        open.note_failed_log().await;
        attachments.leave().await;
        tokio::time::sleep(LOG_FAILURE_TOLD.saturating_sub(begun.elapsed())).await;
    }
    stop.send_replace(true);
    server.stop(STOP_GRACE);
    match &lost {
        None => attachments.leave().await,
        Some(error) if wal::is_log_failure(error) => {}
        Some(_) => attachments.abandon().await,
    }
    scrub.stop(lost.is_some()).await;
    copies.stop().await;
    while let Some(ended) = serving.join_next().await {
        ended.map_err(|error| Error::with_source(ErrorKind::Io, "serve NBD", error))?;
    }
    for task in others.into_iter().chain([admin]) {
        task.await.map_err(|error| Error::with_source(ErrorKind::Io, "stop a job", error))?;
    }
    handler.close().await?;
    drop((handler, copies, scrub));
    let Some(open) = Arc::into_inner(open) else {
        return Err(Error::new(ErrorKind::Io, "close the pool: it is still in use"));
    };
    let Some(lost) = lost else {
        let is_short = has_devices || jobs.death().is_some();
        let closed = open.close_with(is_short).await;
        return jobs.death().map_or(closed, Err);
    };
    // The pool is no longer ours, or has no log: none of its data is moved to the store, and it is not released.
    if let Err(error) = open.pool.close().await {
        tracing::debug!(error = %error.chain(), "a pool that was lost did not close in order");
    }
    if wal::is_log_failure(&lost) {
        return Err(lost.context(format!(
            "the disk of {} is to be looked at (space, cables, the kernel's log); then start spindle again, which finds \
             out whether anything that was answered is gone, and tells which volumes it concerns",
            open.config.dir().join("log").display()
        )));
    }
    Err(open.reason_of_loss(lost).await)
}

/// The parts that answer clients and administrators.
struct Front {
    server: Server<PoolExports>,
    attachments: Arc<Attachments>,
    copies: Arc<Copies>,
    scrub: Arc<Scrub>,
    listeners: Vec<Listener>,
    endpoints: Vec<String>,
    socket: AdminServer,
}

/// Takes every socket and device, and starts the jobs beside them. On an error it leaves nothing running, and tells
/// with the error whether devices wait for the next daemon.
async fn open_front(config: &Config, open: &OpenPool) -> std::result::Result<Front, (Error, bool)> {
    let unused = |error| (error, false);
    let claims = Arc::new(open_claims(config, open).map_err(unused)?);
    let server = nbd_server(config, open, claims.clone()).map_err(unused)?;
    let attachments = open_attachments(config, open, claims, server.clone()).map_err(unused)?;
    let copies = Arc::new(open.copies().await.start().await);
    let scrub = Arc::new(open.scrub().await.start().await);
    let bound = async {
        // NBD clients must not take volumes that were attached.
        attachments.recover(|epoch| open.ownership.may_replay(epoch)).await?;
        let names: Vec<String> =
            open.pool.volumes().iter().map(|volume| volume.record().name).collect();
        let nbd = &config.settings().nbd;
        let sockets = (nbd.listen.as_deref().unwrap_or_default(), nbd.unix.as_deref());
        let (listeners, endpoints) = listen(config, sockets, &names).await?;
        Ok((listeners, endpoints, AdminServer::bind(config.dir())?))
    };
    match bound.await {
        Ok((listeners, endpoints, socket)) => {
            Ok(Front { server, attachments, copies, scrub, listeners, endpoints, socket })
        }
        Err(error) => {
            let has_devices = attachments.has_users();
            attachments.leave().await;
            scrub.stop(false).await;
            copies.stop().await;
            Err((error, has_devices))
        }
    }
}

/// Opens the pool with its configured volumes; `None` if `stop` came first.
async fn open_with_volumes(
    config: &Config,
    opening: Opening,
    stop: impl Future<Output = ()>,
) -> Result<Option<OpenPool>> {
    let mut stop = std::pin::pin!(stop);
    let opened = opening::open_until(config, opening, stop.as_mut()).await?;
    let Some(open) = opened else { return Ok(None) };
    let made = tokio::select! {
        made = make_configured(config, &open) => made.map(|()| true),
        () = stop => Ok(false),
    };
    match made {
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

async fn make_configured(config: &Config, open: &OpenPool) -> Result<()> {
    open.make_volumes().await?;
    // A volume that the store did not know was just created again: its earlier clients see an empty one.
    if let Some(cause @ (StepBack::LostLog | StepBack::TakeOver)) = open.step_back {
        open.pool.note_step_back(cause, open.ownership.epoch()).await?;
    }
    opening::settle_step_back(config.dir())
}

/// Refuses places for which this daemon would wait forever.
async fn check_places(config: &Config) -> Result<()> {
    let keys = match config.key_source() {
        KeySource::File(path) | KeySource::PassphraseFile(path) | KeySource::RecoveryFile(path) => {
            Some(path)
        }
        _ => None,
    };
    let store = Store::dir_of(config.store_url())?;
    let (dir, cache) = (config.dir().to_owned(), config.cache_dir().map(Path::to_owned));
    let tls = config.settings().nbd.tls.iter();
    let tls = tls.flat_map(|tls| [Some(&tls.cert), Some(&tls.key), tls.client_ca.as_ref()]);
    let log = dir.join("log"); // which may be a link to another place
    let places: Vec<_> = [Some(dir), Some(log), cache, store, keys]
        .into_iter()
        .chain(tls.map(Option::<&_>::cloned))
        .flatten()
        .collect();
    attach::blocking(move || attach::stacked::check(&places)).await
}

/// Opens the pool for requests of the command line while no daemon has it. Configured volumes are left to the daemon.
///
/// # Errors
/// Those of [`open`].
pub async fn offline(config: &Config, opening: Opening) -> Result<AdminPool> {
    let open = open(config, opening).await?;
    let is_known = |name: &str| open.pool.volume(name).is_some() || open.pool.is_removed(name);
    // A volume that the next daemon creates again must be marked as stepped back, too.
    let settled = match config.settings().volumes.iter().all(|wanted| is_known(&wanted.name)) {
        true => opening::settle_step_back(config.dir()),
        false => Ok(()),
    };
    if let Err(error) = settled {
        open.close_unserved().await;
        return Err(error);
    }
    let jobs = (open.copies().await, open.scrub().await);
    Ok(AdminPool::offline(open, jobs))
}

/// Sets up the process for serving.
pub(crate) fn prepare_process() {
    opening::raise_open_files();
    opening::keep_pages_small();
}

/// Walks the contents of the store without opening the pool: its owner is not disturbed, and nothing is changed. Data
/// that only a write log holds is not checked.
///
/// # Errors
/// `NotFound` for a store without a pool; those of reading the store and the key.
pub async fn fsck(config: &Config) -> Result<FsckInfo> {
    check_store_dir_exists(config)?;
    let store = Store::open(config.store_url(), &StoreOptions::default())?;
    let keys = KeyRing::open(&store, &config.key_source()).await?;
    fsck_of(config, keys.pool(), &keys.newest().key).await
}

/// Like [`fsck`], with an open key ring: the secret that opened it may be gone or replaced by now.
pub(crate) async fn fsck_of(config: &Config, pool: Uuid, key: &PoolKey) -> Result<FsckInfo> {
    check_store_dir_exists(config)?;
    let store = Store::open(config.store_url(), &StoreOptions::default())?;
    let Some(manifest) = control::manifest::read(&store, key).await? else {
        let what = format!("check the pool in {}: it was never opened", store.url());
        return Err(Error::new(ErrorKind::NotFound, what));
    };
    // A restored pool may still have parts that only the copy holds.
    let volume_keys = crate::volume_keys::load(&store, key, pool).await?;
    let (store, restored) = crate::restore::store_of(store, key, pool).await?;
    let mut options = look_options(config, &store, pool, key, manifest.epoch);
    options.restored = restored.as_ref().and_then(Restored::objects);
    options.left_out = restored.and_then(|restored| restored.lacks());
    options.volume_keys = volume_keys;
    fsck_store(options).await
}

/// Options to look into a data tier that this process does not serve.
pub(crate) fn look_options(
    config: &Config,
    store: &Store,
    pool: Uuid,
    key: &PoolKey,
    epoch: u64,
) -> TierOptions {
    let mut options = reading_options(config, store, pool, key, epoch);
    // A walk reads everything once. It may run in a daemon whose own caches have the memory.
    options.frames.memory_bytes = 0;
    options.frames.stream_bytes = 0;
    options.map.page_cache_bytes = usize::try_from(budget::MAP_BYTES_MIN).expect("it is small");
    options.database.cache_bytes = budget::METADATA_BYTES_MIN;
    options
}

/// Options to serve a data tier that has no writer: with memory, but without the cache on disk, which belongs to the
/// daemon of the configured directory.
pub(crate) fn reading_options(
    config: &Config,
    store: &Store,
    pool: Uuid,
    key: &PoolKey,
    epoch: u64,
) -> TierOptions {
    let mut options = tier_options(config, store, pool, key, Epoch(epoch));
    options.frames.cache = None;
    options
}

async fn fsck_store(options: TierOptions) -> Result<FsckInfo> {
    let tier = Tier::open_read_only(options).await?;
    let report = tier.fsck(FsckOptions::default()).await?;
    let volumes = tier.volume_records();
    let without_key = without_key(&volumes, tier.volume_keys());
    tier.close().await?;
    Ok(fsck_info(volumes.len(), report, without_key))
}

/// Like [`fsck`], for the newest state of a copy, which a pin preserves meanwhile.
///
/// # Errors
/// `NotFound` if there is no copy, or no whole state yet; those of reading the store and the key.
pub async fn fsck_copy(config: &Config, url: &str, env_prefix: Option<&str>) -> Result<FsckInfo> {
    let target = Target::existing(url, env_prefix).await?;
    let keys = target.open_keys(&config.key_source()).await?;
    let (pool, key) = (keys.pool(), keys.newest().key.clone());
    let (pin, state) = match target.pin_newest(&key, pool, true).await {
        Ok((pin, state)) => (Some(pin), state),
        Err(error) if error.kind() == ErrorKind::Denied => {
            // The state can be read for as long as replaced objects stay.
            let state = target.newest(&key, pool).await?;
            (None, state.ok_or(error)?)
        }
        Err(error) => return Err(error),
    };
    let mut options = look_options(config, &target.view(&state), pool, &key, state.epoch);
    options.left_out = state.left_out();
    let checked = async {
        options.volume_keys = target.volume_keys(&key, pool).await?;
        fsck_store(options).await
    };
    let checked = checked.await;
    if let Some(pin) = pin {
        target.unpin(pin).await;
    }
    checked
}

/// Descriptions of the volumes whose own key is missing.
pub(crate) fn without_key(records: &[(VolumeId, bytes::Bytes)], keys: &VolumeKeys) -> Vec<String> {
    let named = |(_, bytes): &(VolumeId, bytes::Bytes)| {
        let record = VolumeRecord::decode(bytes).ok()?;
        let is_lost = record.state != VolumeState::Purged && !keys.has(record.key());
        is_lost.then(|| {
            format!(
                "volume {}: its own key is not below volumekeys/: nothing of it can be read",
                record.name
            )
        })
    };
    records.iter().filter_map(named).collect()
}

/// The report of the data tier in the form of the command line, with the other problems.
#[must_use]
pub fn fsck_info(volume_count: usize, report: FsckReport, without_key: Vec<String>) -> FsckInfo {
    let mut problems = report.differences;
    let problem_count = report.difference_count + without_key.len() as u64;
    problems.extend(without_key);
    FsckInfo {
        volume_count: volume_count as u64,
        segment_count: report.segment_count,
        object_bytes: report.object_bytes,
        frame_count: report.frame_count,
        page_count: report.page_count,
        block_count: report.block_count,
        reclaimed_count: report.reclaimed_count,
        problem_count,
        problems,
        miscounted: report.miscounted,
    }
}

/// Opens the claims without the clients of volumes that have stepped back: they have seen writes that are gone.
fn open_claims(config: &Config, open: &OpenPool) -> Result<Claims> {
    let (records, now) = (open.pool.records(), open.ownership.epoch());
    let claims = Claims::open(
        config.dir(),
        now,
        open.node.clients_epoch(),
        |volume, epoch, was_stepped_back| {
            let is_as_it_was = |record: &VolumeRecord| {
                record.id == volume && !record.has_stepped_back_since(epoch, was_stepped_back)
            };
            open.ownership.may_replay(epoch) && records.iter().any(is_as_it_was)
        },
    )?;
    // The order matters: a list is never older than the epoch recorded for it.
    if claims.is_written() && open.node.clients_epoch() < now {
        open.node.note_clients_epoch(now)?;
    }
    let pool = open.pool.clone();
    Ok(claims.settled_by(move |_volume| {
        let pool = pool.clone();
        async move { pool.settle().await }
    }))
}

fn open_attachments(
    config: &Config,
    open: &OpenPool,
    claims: Arc<Claims>,
    server: Server<PoolExports>,
) -> Result<Arc<Attachments>> {
    let attachments = Attachments::open(
        config.dir(),
        &config.settings().name,
        open.pool.clone(),
        claims,
        server,
        open.ownership.epoch(),
        config.budget().device_payload_bytes,
    );
    attachments.map(Arc::new)
}

fn nbd_server(
    config: &Config,
    open: &OpenPool,
    claims: Arc<Claims>,
) -> Result<Server<PoolExports>> {
    let options = ServerOptions { conditions: open.conditions.clone(), ..server_options(config) };
    Server::new(Arc::new(PoolExports::new(open.pool.clone(), claims)), options)
}

/// Options for serving exports.
pub(crate) fn server_options(config: &Config) -> ServerOptions {
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
    ServerOptions {
        payload_memory_bytes: memory_bytes,
        connection_count_max: settings.connection_count_max as usize,
        tls,
        access,
        can_resize: settings.allow_resize,
        ..ServerOptions::default()
    }
}

/// Binds every configured socket. Returns them with the URIs of these exports.
pub(crate) async fn listen(
    config: &Config,
    (addresses, unix): (&[String], Option<&Path>),
    names: &[String],
) -> Result<(Vec<Listener>, Vec<String>)> {
    let settings = &config.settings().nbd;
    let (tcp_tls, unix_tls) = match settings.tls {
        Some(_) => (TlsMode::Required, TlsMode::On),
        None => (TlsMode::Off, TlsMode::Off),
    };
    let (mut listeners, mut endpoints) = (Vec::new(), Vec::new());
    for text in addresses {
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
    if let Some(path) = unix {
        listeners.push(Listener::unix(path, 0o600, unix_tls).await?);
        let socket = path.display();
        endpoints.extend(names.iter().map(|name| format!("nbd+unix:///{name}?socket={socket}")));
    }
    Ok((listeners, endpoints))
}

/// SIGTERM and SIGINT.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    pub(crate) fn new() -> Result<Self> {
        Ok(Signals {
            terminate: watch_signal(SignalKind::terminate())?,
            interrupt: watch_signal(SignalKind::interrupt())?,
        })
    }

    pub(crate) async fn stop(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

pub(crate) fn watch_signal(kind: SignalKind) -> Result<Signal> {
    tokio::signal::unix::signal(kind)
        .map_err(|error| Error::with_source(ErrorKind::Io, "watch for signals", error))
}

/// Reads the TLS certificates again at each SIGHUP.
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
        reload_tls(&server);
    }
}

/// Reads the TLS certificates again. After a failure, which is only logged, the certificates in use stay.
pub(crate) fn reload_tls<E: Exports>(server: &Server<E>) {
    match server.reload_tls() {
        Ok(()) => tracing::info!("TLS certificates are read anew, for connections from here on"),
        Err(error) => tracing::error!(
            error = %error.chain(),
            "TLS certificates were not read anew; those from before stay in use: correct the file and send SIGHUP again"
        ),
    }
}

/// Checks from time to time that the pool is still ours, and otherwise stops acknowledging.
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
            Ok(()) => conditions::show_contact(&open.conditions, None),
            Err(error) if matches!(error.kind(), ErrorKind::Fenced | ErrorKind::Corrupt) => {
                open.pool.fence(error);
                return;
            }
            // Nothing is known; a store that is away must not stop the writers.
            Err(error) => {
                conditions::show_contact(&open.conditions, Some(&error.chain()));
            }
        }
    }
}

/// Fetches the data of a restored pool that only the copy has, in the slow lane.
async fn hydrate(open: Arc<OpenPool>, mut stop: watch::Receiver<bool>) {
    let Some(restored) = open.restored.clone() else { return };
    let (pool, store) = (open.pool.clone(), open.store.clone());
    let key = open.keys.lock().await.newest().key.clone();
    let is_whole = open.is_whole.clone();
    drop(open);
    let lane = pool.tier().background().clone();
    let fetching = lane.spawn(async move {
        tokio::select! {
            () = restored.hydrate(&pool, &store, &key, &is_whole) => {}
            _ = stop.wait_for(|stop| *stop) => {}
        }
    });
    if let Err(error) = fetching.await
        && error.is_panic()
    {
        // The supervisor of this job handles it.
        std::panic::resume_unwind(error.into_panic());
    }
}

async fn run_schedules(open: Arc<OpenPool>, mut stop: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(SCHEDULE_CHECK) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
        let (made, removed) = tokio::select! {
            done = open.pool.run_schedules() => done,
            _ = stop.wait_for(|stop| *stop) => return,
        };
        if made + removed > 0 {
            tracing::info!(made, removed, "snapshots by schedule");
        }
    }
}

async fn purge_removed(
    open: Arc<OpenPool>,
    admin: Arc<AdminPool>,
    mut stop: watch::Receiver<bool>,
) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(PURGE_CHECK) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
        open.pool.clock().keep();
        for id in open.pool.expired() {
            let removed = tokio::select! {
                removed = admin.remove_expired(id) => removed,
                _ = stop.wait_for(|stop| *stop) => return,
            };
            match removed {
                Ok(Some(name)) => {
                    tracing::info!(volume = %name, "removed a volume whose time is over")
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(error = %error.chain(), "a volume whose time is over stays");
                }
            }
        }
        // It waits while the log is full.
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
