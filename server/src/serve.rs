//! Serves a pool until told to stop. The module `opening` opens it, and `closing` closes it.

mod closing;
mod daemon_jobs;
mod looking;

pub(crate) use closing::{EXIT_AT_ONCE, EXIT_LOG_FAILED};

use crate::adapters::exports::PoolExports;
use crate::adapters::pool_volumes::{Attachments, PoolVolumes};
use crate::admin::{AdminHandler, AdminServer};
use crate::data_stores::pool_config;
use crate::handlers::{AdminPool, DaemonParts, MemberAdmin};
use crate::roles::{Passages, Roles, Successor, forward, keep_going, watch_members};
use crate::{limits, node};
use block::{Error, ErrorKind, Job, Result};
use config::Config;
use control::keys::KeySource;
use control::store::Store;
use daemon_jobs::{serve_listener, start_jobs};
use engine::config::PoolConfig;
use engine::copies::Copies;
use engine::jobs::Need;
use engine::marks::settle_lost_writes;
use engine::open_pool::OpenPool;
use engine::opening::Opening;
use engine::reservations::Reservations;
use engine::scrub::Scrub;
use nbd::{Access, Exports, Listener, Server, ServerOptions, TlsMode, TlsOptions};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind};
use tokio::sync::watch;

/// Time that requests in flight have to finish at an orderly stop.
const STOP_GRACE: Duration = Duration::from_secs(10);
/// Time that requests of the command line have to finish when a member takes the pool over: clients wait.
/// Chosen by hand.
const MEMBER_GRACE: Duration = Duration::from_millis(100);
/// Time for which requests get errors after the write log has failed, before connections end with the daemon. A client
/// that only loses its connection may come back and continue as if nothing had happened; one that gets an error does
/// not. Chosen by hand: most clients send a request in that time.
const LOG_FAILURE_TOLD: Duration = Duration::from_secs(3);
/// Interval of the checks for removed volumes that are due.
const PURGE_CHECK: Duration = Duration::from_secs(60);

/// The end of serving a pool.
enum Served {
    /// A stop was asked for, and the pool is closed.
    Stopped,
    /// Another node has taken the pool over.
    Fenced(Error),
    /// The pool was handed over to the node with this name.
    Moved(String),
}

/// How to open the pool, and for which part of a cluster.
struct Terms<'a> {
    pool: &'a PoolConfig,
    opening: Opening,
    roles: Option<&'a Arc<Roles>>,
}

/// Serves the configured pool until SIGTERM or SIGINT. A node of a cluster serves it while it owns it, and stores its
/// log otherwise, and passes clients on to the owner. Calls `announce` with the endpoints when everything answers, and
/// again when the node begins to own the pool.
///
/// # Errors
/// Errors that keep the pool from opening, the sockets from listening, or the end from being orderly.
pub async fn run(config: &Config, take_over: bool, announce: impl Fn(&[String])) -> Result<()> {
    let mut signals = Signals::new()?;
    check_places(config).await?;
    let opening = if take_over { Opening::TakeOver } else { Opening::OrNew };
    let Some(cluster) = node::open(config)?.filter(node::is_admitted) else {
        let pool = pool_config(config);
        let terms = Terms { pool: &pool, opening, roles: None };
        return match serve_pool(config, terms, &mut signals, &announce).await? {
            Served::Stopped | Served::Moved(_) => Ok(()),
            Served::Fenced(error) => Err(error),
        };
    };
    limits::prepare();
    let roles = Roles::start(config, cluster.clone()).await?;
    // Other nodes reach this one while the pool is still opened.
    let _serving = node::serve(&cluster).await?;
    run_node(config, &roles, opening, &mut signals, &announce).await
}

/// Longest pause before a member that could not open the pool tries again. Chosen by hand.
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Changes between the roles of a node until a stop is asked for.
async fn run_node(
    config: &Config,
    roles: &Arc<Roles>,
    mut opening: Opening,
    signals: &mut Signals,
    announce: &impl Fn(&[String]),
) -> Result<()> {
    let mut opens_at_once = roles.prepare().await? || opening == Opening::TakeOver;
    let was_ready = std::cell::Cell::new(false);
    let announce = |endpoints: &[String]| {
        was_ready.set(true);
        announce(endpoints);
    };
    let mut pause = Duration::from_millis(500);
    loop {
        if !opens_at_once {
            let turn = be_member(config, roles, signals, |endpoints| {
                if !was_ready.get() {
                    announce(endpoints);
                }
            });
            let Some(turn) = turn.await? else { return Ok(()) };
            opening = turn;
        }
        roles.leave_dir();
        let pool = roles.pool_config();
        let terms = Terms { pool: &pool, opening, roles: Some(roles) };
        let is_forced = opening == Opening::TakeOver;
        let begun = pool_config(config).clock.now();
        let served = serve_pool(config, terms, signals, &announce).await;
        roles.set_passages(None);
        roles.close_desk().await;
        roles.lock_dir().await?;
        (opens_at_once, opening) = (false, Opening::OrNew);
        if pool_config(config).clock.since(begun) > RETRY_MAX {
            pause = Duration::from_millis(500);
        }
        let error = match served {
            Ok(Served::Stopped) => return Ok(()),
            Ok(Served::Moved(node)) => {
                tracing::info!(node, "this node has handed the pool over; it stores its log");
                continue;
            }
            Ok(Served::Fenced(error)) => {
                tracing::warn!(
                    error = %error.chain(),
                    "another node owns the pool from now on; this node stores its log"
                );
                continue;
            }
            Err(error) if wal::is_log_failure(&error) => return Err(error),
            // Another node may have taken the pool over while this one opened it, or members have gone.
            Err(error) if !was_ready.get() && is_forced => return Err(error),
            Err(error) if !was_ready.get() && !roles.is_owned_elsewhere().await => {
                if !roles.lacks_quorum().await {
                    return Err(error);
                }
                error
            }
            Err(error) => error,
        };
        tracing::error!(
            error = %error.chain(),
            "could not serve the pool; this node goes on storing its log, and tries again when it has to"
        );
        tokio::select! {
            () = signals.stop() => return Ok(()),
            () = tokio::time::sleep(pause) => {}
        }
        pause = (2 * pause).min(RETRY_MAX);
    }
}

/// Stores the log of the pool until this node is to open it, and returns the way; `None` if a stop was asked for.
async fn be_member(
    config: &Config,
    roles: &Arc<Roles>,
    signals: &mut Signals,
    announce: impl FnOnce(&[String]),
) -> Result<Option<Opening>> {
    let (asked, ended) = (watch::Sender::new(false), watch::Sender::new(false));
    let socket = AdminServer::bind(config.dir())?;
    let handler = Arc::new(MemberAdmin::new(Arc::clone(roles), asked.clone()));
    let settings = config.settings();
    let names: Vec<String> = settings.volumes.iter().map(|volume| volume.name.clone()).collect();
    let sockets =
        (settings.nbd.listen.as_deref().unwrap_or_default(), settings.nbd.unix.as_deref());
    let (listeners, endpoints) = listen(config, sockets, &names).await?;
    let mut clients = forward(roles, listeners, settings.nbd.connection_count_max as usize);
    let mut end = ended.subscribe();
    let admin = tokio::spawn(async move {
        let stopped = async move { drop(end.wait_for(|end| *end).await) };
        socket.serve(handler, stopped, MEMBER_GRACE).await;
    });
    announce(&endpoints);
    let mut asked = asked.subscribe();
    let turn = tokio::select! {
        () = signals.stop() => None,
        _ = asked.wait_for(|asked| *asked) => None,
        opening = roles.turn() => Some(opening),
    };
    // Their sockets are free for the owner then.
    clients.shutdown().await;
    ended.send_replace(true);
    admin.await.map_err(|error| Error::with_source(ErrorKind::Io, "stop a job", error))?;
    Ok(turn)
}

/// Serves the pool until a stop is asked for or the pool is lost.
async fn serve_pool(
    config: &Config,
    terms: Terms<'_>,
    signals: &mut Signals,
    announce: &impl Fn(&[String]),
) -> Result<Served> {
    let hangups = watch_signal(SignalKind::hangup())?;
    let mut early = Signals::new()?;
    let early_stop = async move {
        early.stop().await;
        closing::end_at_once_on_another(early, 0);
    };
    let Terms { pool, opening, roles } = terms;
    let Some(mut open) = open_with_volumes(pool, opening, early_stop).await? else {
        return Ok(Served::Stopped);
    };
    // The first says that a stop was asked for, the second that it has come far enough for jobs to end.
    let (asked, stop) = (watch::Sender::new(false), watch::Sender::new(false));
    let front = match open_front(config, &open).await {
        Ok(front) => front,
        Err((error, has_devices)) => {
            if let Err(error) = open.close_with(has_devices).await {
                tracing::warn!(
                    error = %error.chain(),
                    "could not close a pool that could not be served"
                );
            }
            return Err(error);
        }
    };
    let Front { server, attachments, copies, scrub, mut listeners, endpoints, socket } = front;
    if let Some(roles) = roles {
        let (passed, passages) = Passages::of(&listeners);
        listeners.extend(passed);
        roles.set_passages(Some(passages));
    }
    open.steps.end("sockets and devices");
    let mut serving = tokio::task::JoinSet::new();
    let jobs = open.pool.supervisor().clone();
    for listener in listeners {
        serving.spawn(serve_listener(jobs.clone(), server.clone(), listener, stop.subscribe()));
    }
    let open = Arc::new(open);
    let parts = DaemonParts {
        endpoints: endpoints.clone(),
        nbd: server.clone(),
        attachments: attachments.clone(),
        copies: copies.clone(),
        scrub: scrub.clone(),
        roles: roles.cloned(),
        stop: asked.clone(),
    };
    let handler = AdminPool::serving(open.clone(), parts);
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
    let members = roles.map(|roles| {
        let job = Job::new("members", "a member of the write log that is missing is not reported");
        jobs.spawn(Need::Useful, job, watch_members(roles.clone(), open.clone(), stop.subscribe()))
    });
    let quorum = roles.map(|roles| {
        let job = Job::new(
            "quorum",
            "the pool waits when too few members answer, and takes no member back",
        );
        jobs.spawn(Need::Useful, job, keep_going(roles.clone(), open.clone(), stop.subscribe()))
    });
    if let Some(roles) = roles {
        roles.open_desk(handler.clone()).await;
    }
    announce(&endpoints);
    tracing::info!(
        epoch = open.ownership.epoch().0,
        total_ms = u64::try_from(open.steps.total().as_millis()).unwrap_or(u64::MAX),
        steps = %open.steps,
        "the daemon serves the pool"
    );
    let mut stopped = asked.subscribe();
    // A supervisor sends its signal beside or after `spindle stop`: both mean the same stop.
    let mut successor = None;
    let (lost, spare_count) = tokio::select! {
        () = signals.stop() => (None, 0),
        _ = stopped.wait_for(|stop| *stop) => (None, 1),
        lost = open.pool.ended() => (Some(lost), 1),
        // An orderly stop: the next daemon continues where this one ends.
        () = jobs.vital_died() => (None, 1),
        found = successor_of(roles) => {
            successor = Some(found);
            (None, 1)
        }
    };
    let moved_to = successor.as_ref().map(|successor| successor.name.clone());
    let lost = match (successor, roles) {
        (Some(successor), Some(roles)) => {
            let clock = Arc::clone(&open.config.clock);
            let paused_at = clock.now();
            // From now on stand-ins do not wait for this node, and clients are not sent here.
            roles.set_passages(None);
            stop.send_replace(true);
            server.stop(STOP_GRACE);
            while let Some(ended) = serving.join_next().await {
                ended.map_err(|error| Error::with_source(ErrorKind::Io, "serve NBD", error))?;
            }
            Some(roles.hand_over(successor, clock, paused_at).await)
        }
        _ => lost,
    };
    if let Some(roles) = roles.filter(|_| lost.is_some()) {
        roles.set_passages(None);
    }
    let is_fenced = lost.as_ref().is_some_and(|lost| lost.kind() == ErrorKind::Fenced);
    if roles.is_none() || !is_fenced {
        closing::end_at_once_on_another(std::mem::replace(signals, Signals::new()?), spare_count);
        tracing::info!("the daemon is stopping");
    }
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
        let begun = open.config.clock.now();
        open.note_failed_log().await;
        attachments.leave().await;
        // Where another member takes the pool over, clients get no errors.
        if !open.pool.is_replicated() {
            let spent = open.config.clock.since(begun);
            tokio::time::sleep(LOG_FAILURE_TOLD.saturating_sub(spent)).await;
        }
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
    for task in others.into_iter().chain([admin]).chain(members).chain(quorum) {
        task.await.map_err(|error| Error::with_source(ErrorKind::Io, "stop a job", error))?;
    }
    if let Some(roles) = roles {
        roles.close_desk().await;
    }
    handler.close().await?;
    drop((handler, copies, scrub));
    let Some(open) = Arc::into_inner(open) else {
        return Err(Error::new(ErrorKind::Io, "close the pool: it is still in use"));
    };
    let Some(lost) = lost else {
        let is_short = has_devices || jobs.death().is_some();
        let closed = open.close_with(is_short).await;
        return jobs.death().map_or(closed, Err).map(|()| Served::Stopped);
    };
    // The pool is no longer ours, or has no log: none of its data is moved to the store, and it is not released.
    if let Err(error) = open.pool.close().await {
        tracing::debug!(error = %error.chain(), "could not close a pool that was lost");
    }
    if wal::is_log_failure(&lost) {
        return Err(lost.context(format!(
            "check the disk of {} (space, cables, the kernel's log), then start spindle again, \
             which names the volumes that may have lost acknowledged writes",
            open.config.dir.join("log").display()
        )));
    }
    if let Some(node) = moved_to {
        return Ok(Served::Moved(node));
    }
    let reason = open.reason_of_loss(lost).await;
    if is_fenced { Ok(Served::Fenced(reason)) } else { Err(reason) }
}

/// Resolves when the pool is to be handed over to another node.
async fn successor_of(roles: Option<&Arc<Roles>>) -> Successor {
    match roles {
        Some(roles) => roles.successor().await,
        None => std::future::pending().await,
    }
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
    let reservations = Arc::new(open.open_reservations());
    let server = nbd_server(config, open, reservations.clone()).map_err(unused)?;
    let attachments =
        open_attachments(config, open, reservations, server.clone()).map_err(unused)?;
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
    pool: &PoolConfig,
    opening: Opening,
    stop: impl Future<Output = ()>,
) -> Result<Option<OpenPool>> {
    limits::prepare();
    let mut stop = std::pin::pin!(stop);
    let opened = engine::opening::open_until(pool, opening, stop.as_mut()).await?;
    let Some(open) = opened else { return Ok(None) };
    let made = tokio::select! {
        made = open.make_configured() => made.map(|()| true),
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
    devices::blocking(move || devices::stacked::check(&places)).await
}

/// Opens the pool for requests of the command line while no daemon has it. Configured volumes are left to the daemon.
///
/// # Errors
/// Those of [`open`].
pub async fn open_offline(config: &Config, opening: Opening) -> Result<OpenPool> {
    let open = open(config, opening).await?;
    let is_known = |name: &str| open.pool.volume(name).is_some() || open.pool.is_removed(name);
    // A volume that the next daemon creates again must be marked as lost writes, too.
    let settled = match config.settings().volumes.iter().all(|wanted| is_known(&wanted.name)) {
        true => settle_lost_writes(config.dir()),
        false => Ok(()),
    };
    if let Err(error) = settled {
        open.close_unserved().await;
        return Err(error);
    }
    Ok(open)
}

/// Opens the configured pool in this process.
///
/// # Errors
/// Those of [`engine::opening::open`].
pub async fn open(config: &Config, opening: Opening) -> Result<OpenPool> {
    limits::prepare();
    engine::opening::open(&pool_config(config), opening).await
}

fn open_attachments(
    config: &Config,
    open: &OpenPool,
    reservations: Arc<Reservations>,
    server: Server<PoolExports>,
) -> Result<Arc<Attachments>> {
    let options = devices::AttachmentsOptions {
        dir: config.dir().to_owned(),
        pool_name: config.settings().name.clone(),
        server,
        epoch: open.ownership.epoch(),
        payload_bytes_max: config.budget().device_payload_bytes,
        conditions: open.conditions.clone(),
    };
    Attachments::open(PoolVolumes::new(open.pool.clone(), reservations), options).map(Arc::new)
}

fn nbd_server(
    config: &Config,
    open: &OpenPool,
    reservations: Arc<Reservations>,
) -> Result<Server<PoolExports>> {
    let options = ServerOptions { conditions: open.conditions.clone(), ..server_options(config) };
    Server::new(Arc::new(PoolExports::new(open.pool.clone(), reservations)), options)
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
        Ok(()) => {
            tracing::info!("the daemon has read the TLS certificates again, for new connections")
        }
        Err(error) => tracing::error!(
            error = %error.chain(),
            "could not read the TLS certificates again; the earlier ones stay in use: correct the \
             file and send SIGHUP again"
        ),
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
                    tracing::info!(
                        volume = %name,
                        "the daemon removed a volume whose time was over"
                    )
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(
                        error = %error.chain(),
                        "could not remove a volume whose time is over"
                    );
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
            Ok(count) => tracing::info!(count, "the daemon purged removed volumes"),
            Err(error) => tracing::warn!(error = %error.chain(), "could not purge removed volumes"),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
