//! Listeners, limits and the orderly stop.
//!
//! Invariants:
//! - At most `connection_count_max` TCP connections exist, and a few more local ones (`places`).
//!   Further connections are closed at once.
//! - A client that sends nothing gets little time while many clients negotiate.
//! - A silent TCP client is disconnected after `client_timeout`, even with a reply in flight.
//! - A listener without TLS on an address that other machines can reach is refused, unless allowed.
//! - [`Server::stop`] ends every [`Server::serve`] within its grace period: no further request
//!   starts, running requests are answered, then connections close.

use crate::exports::{Access, Client, Exports, Over, Peer};
use crate::handshake::{Handshake, Terms};
use crate::kernel::Siblings;
use crate::line::{CLIENT_TIMEOUT, Line, PROBE_COUNT, Watched, probe_pause};
use crate::memory::PayloadMemory;
use crate::negotiate::{Negotiator, NoSession, Opened};
use crate::passed::{Passage, Passed, passage};
use crate::places::{From, Negotiating, Negotiations, Places, Refusals, Taken};
use crate::session::{Counters, End, Session, SessionOptions};
use crate::stopping::{grace_left, stopped};
use crate::stream::{Inbox, Plain, Stream};
use crate::tls::{self, TlsMode, TlsOptions};
use block::Line as _;
use block::env::{Clock, SystemClock};
use block::{Conditions, Error, ErrorKind, Result};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

/// Shortest `client_timeout`. Source: keep-alive options are whole seconds.
const CLIENT_TIMEOUT_MIN: Duration = Duration::from_secs(2);
/// Pause between two checks whether a silent client has used up its time. Chosen by hand.
const PRESSED_LOOK: Duration = Duration::from_millis(250);
/// Pause after a failed accept. Chosen by hand.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The settings of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Budget for payload bytes of all connections together, at least 64 MiB.
    pub payload_memory_bytes: usize,
    /// Limit of connections over all TCP listeners. [`crate::RESERVED_COUNT`] more are reserved for the
    /// unix socket and the kernel's devices.
    pub connection_count_max: usize,
    /// Limit of requests that run at the same time on one connection.
    pub request_count_max: usize,
    /// Time limit from accept to transmission.
    pub handshake_timeout: Duration,
    /// The same limit for a client that has sent nothing, while many negotiate.
    pub pressed_timeout: Duration,
    /// Time after which a TCP client that acknowledges no reply and answers no probe is
    /// disconnected; at least 2 s.
    pub client_timeout: Duration,
    /// A client that moves no byte for this long, in the middle of a payload or with unread
    /// replies, is disconnected if another connection waits for payload memory.
    pub stall_timeout: Duration,
    /// Certificates. Without them STARTTLS is refused, whatever the mode of the listener.
    pub tls: Option<TlsOptions>,
    /// Access rules by certificate name.
    pub access: Access,
    /// Offer RESIZE (an experimental extension of the protocol) on writable exports.
    pub can_resize: bool,
    /// The registry in which the server raises conditions.
    pub conditions: Conditions,
    /// The clock of the server's deadlines. The timers that wait for them are those of the runtime.
    pub clock: Arc<dyn Clock>,
}

impl Default for ServerOptions {
    /// Returns values chosen by hand: memory for eight of the largest requests, and the clients of
    /// a small cluster.
    fn default() -> Self {
        ServerOptions {
            payload_memory_bytes: 256 << 20,
            connection_count_max: 256,
            request_count_max: 256,
            handshake_timeout: Duration::from_secs(10),
            // More than a client on another continent needs to send its first bytes.
            pressed_timeout: Duration::from_secs(2),
            client_timeout: CLIENT_TIMEOUT,
            stall_timeout: Duration::from_secs(3),
            tls: None,
            access: Access::default(),
            can_resize: false,
            conditions: Conditions::default(),
            clock: Arc::new(SystemClock),
        }
    }
}

/// A place among the connections of a server; dropping it releases it.
#[derive(Debug)]
pub struct Place {
    _taken: Taken,
}

/// A connection whose other end is this machine's kernel.
pub struct KernelConnection<D> {
    /// The server's end.
    pub stream: UnixStream,
    /// The device that is served.
    pub device: Arc<D>,
    /// Its name, for the log.
    pub name: String,
    /// The counters for this connection.
    pub counters: Arc<Counters>,
    /// The device's other connections.
    pub siblings: Siblings,
}

/// The parts of an accepted connection.
struct Admitted {
    _place: Taken,
    negotiating: Negotiating,
    /// Held until the end of the connection: see [`Line`].
    _watched: Arc<Watched>,
    line: Line,
}

/// Current counts of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Open connections, negotiating ones included.
    pub connection_count: usize,
    /// Connections closed because there were too many.
    pub refused_count: usize,
    /// Requests answered since the start.
    pub request_count: u64,
    /// Requests answered with an error since the start.
    pub error_count: u64,
    /// Shared payload memory in use, in bytes.
    pub payload_bytes: usize,
}

/// Refuses an address that other machines can reach, unless every connection is encrypted or
/// `is_plain_allowed` is set.
///
/// # Errors
/// `Denied`, with the remedy in the message.
pub fn check_listen_address(
    address: &SocketAddr,
    tls: TlsMode,
    is_plain_allowed: bool,
) -> Result<()> {
    if address.ip().to_canonical().is_loopback() || tls == TlsMode::Required || is_plain_allowed {
        return Ok(());
    }
    let context = format!(
        "listen on {address}: other machines can reach it, and NBD without TLS lets anyone read \
         and write; require TLS, listen on 127.0.0.1, or allow plain connections explicitly"
    );
    Err(Error::new(ErrorKind::Denied, context))
}

/// A bound socket, or the end of a [`crate::Passage`].
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    tls: TlsMode,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Unix { listener: UnixListener, path: PathBuf, inode: u64 },
    Passed(Passed),
}

impl std::fmt::Display for Listener {
    /// Writes the address, or the path of the unix socket.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.socket {
            Socket::Tcp(listener) => match listener.local_addr() {
                Ok(address) => address.fmt(f),
                Err(_) => f.write_str("an unknown address"),
            },
            Socket::Unix { path, .. } => path.display().fmt(f),
            Socket::Passed(passed) => passed.fmt(f),
        }
    }
}

impl Listener {
    /// Binds `address`; port 0 picks a free one. The caller must have called
    /// [`check_listen_address`].
    ///
    /// # Errors
    /// `Io`, naming the address.
    pub async fn tcp(address: SocketAddr, tls: TlsMode) -> Result<Self> {
        let listener = TcpListener::bind(address).await.map_err(|error| {
            Error::with_source(ErrorKind::Io, format!("listen on {address}"), error)
        })?;
        Ok(Listener { socket: Socket::Tcp(listener), tls })
    }

    /// Binds `path` with `mode` as its permissions. A socket left by a dead process is replaced.
    /// [`Server::serve`] removes the socket at the end.
    ///
    /// # Errors
    /// `Busy` if a process answers there, `Invalid` if another kind of file is in the way, `Io`
    /// otherwise.
    pub async fn unix(path: &Path, mode: u32, tls: TlsMode) -> Result<Self> {
        let context = || format!("listen on {}", path.display());
        let failed = |error: io::Error| Error::with_source(ErrorKind::Io, context(), error);
        check_free(path).await.map_err(|error| error.context(context()))?;
        // Bind under another name until the mode is set, so that no client connects in between. The
        // name is short, because the path of a socket has at most 107 bytes (unix(7), `sun_path`).
        static DRAFT_COUNT: AtomicUsize = AtomicUsize::new(0);
        let draft_index = DRAFT_COUNT.fetch_add(1, Ordering::Relaxed);
        let draft = path.with_file_name(format!(".{:x}-{draft_index:x}", std::process::id()));
        match std::fs::remove_file(&draft) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let listener = UnixListener::bind(&draft).map_err(failed)?;
        std::fs::set_permissions(&draft, std::fs::Permissions::from_mode(mode)).map_err(failed)?;
        let inode = std::fs::symlink_metadata(&draft).map_err(failed)?.ino();
        std::fs::rename(&draft, path).map_err(failed)?;
        let socket = Socket::Unix { listener, path: path.to_owned(), inode };
        Ok(Listener { socket, tls })
    }

    /// Makes a listener for clients that used a socket of this kind at another node: their rules are the same.
    #[must_use]
    pub fn passage(&self) -> (Listener, Passage) {
        let over = if self.tcp_address().is_some() { Over::Tcp } else { Over::Unix };
        let (passed, passage) = passage(over);
        (Listener { socket: Socket::Passed(passed), tls: self.tls }, passage)
    }

    /// Returns the TCP address with the actual port.
    #[must_use]
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        match &self.socket {
            Socket::Tcp(listener) => listener.local_addr().ok(),
            Socket::Unix { .. } | Socket::Passed(_) => None,
        }
    }

    /// Returns the name of the listener for messages.
    fn name(&self) -> String {
        match &self.socket {
            Socket::Tcp(listener) => {
                let address = listener.local_addr();
                address.map_or_else(|_| "a TCP socket".to_owned(), |address| address.to_string())
            }
            Socket::Unix { path, .. } => path.display().to_string(),
            Socket::Passed(passed) => passed.to_string(),
        }
    }

    async fn accept(&self, client_timeout: Duration) -> io::Result<(Stream, Peer)> {
        match &self.socket {
            Socket::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                stream.set_nodelay(true)?;
                watch_peer(&stream, client_timeout)?;
                Ok((Stream::Plain(Plain::Tcp(stream)), Peer::Tcp(address)))
            }
            Socket::Unix { listener, .. } => {
                let (stream, _) = listener.accept().await?;
                let uid = stream.peer_cred().ok().map(|peer| peer.uid());
                Ok((Stream::Plain(Plain::Unix(stream)), Peer::Unix { uid }))
            }
            Socket::Passed(passed) => {
                let (stream, peer) = passed.accept().await;
                Ok((Stream::Plain(Plain::Unix(stream)), peer))
            }
        }
    }

    /// Accepts a connection for a caller that passes its bytes on instead of serving it.
    ///
    /// # Errors
    /// Those of accept(2).
    pub async fn accept_stream(&self, client_timeout: Duration) -> io::Result<Plain> {
        match self.accept(client_timeout).await? {
            (Stream::Plain(stream), _) => Ok(stream),
            (Stream::Tls(_), _) => Err(io::Error::other("a connection begins without TLS")),
        }
    }

    /// Closes a listener that no server has, and removes its unix socket.
    pub fn close(self) {
        self.remove();
    }

    /// Removes the socket's name, if it still belongs to this socket.
    fn remove(self) {
        if let Socket::Unix { path, inode, .. } = &self.socket
            && std::fs::symlink_metadata(path).is_ok_and(|found| found.ino() == *inode)
            && let Err(error) = std::fs::remove_file(path)
        {
            tracing::warn!(path = %path.display(), %error, "could not remove a socket");
        }
    }
}

/// Makes the kernel give up a silent peer after `client_timeout`: by keep-alive probes if no reply
/// is in flight, and by TCP_USER_TIMEOUT otherwise. Without the latter the kernel would retransmit
/// a reply for 15 minutes.
fn watch_peer(stream: &tokio::net::TcpStream, client_timeout: Duration) -> io::Result<()> {
    use rustix::net::sockopt;
    let client_timeout = client_timeout.max(CLIENT_TIMEOUT_MIN);
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs((client_timeout / 2).as_secs()))?;
    sockopt::set_tcp_keepintvl(stream, probe_pause(client_timeout))?;
    sockopt::set_tcp_keepcnt(stream, PROBE_COUNT)?;
    let timeout_ms = u32::try_from(client_timeout.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(stream, timeout_ms)?;
    Ok(())
}

async fn check_free(path: &Path) -> Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(_) => Ok(()), // it is absent, or the bind reports the error better
        Ok(found) if !found.file_type().is_socket() => {
            Err(Error::new(ErrorKind::Invalid, "something that is no socket is in the way"))
        }
        Ok(_) if tokio::net::UnixStream::connect(path).await.is_ok() => {
            Err(Error::new(ErrorKind::Busy, "another process serves this socket"))
        }
        Ok(_) => Ok(()),
    }
}

/// An NBD server. All clones share one state.
pub struct Server<E> {
    shared: Arc<Shared<E>>,
}

impl<E> Clone for Server<E> {
    fn clone(&self) -> Self {
        Server { shared: Arc::clone(&self.shared) }
    }
}

struct Shared<E> {
    exports: Arc<E>,
    options: ServerOptions,
    /// Replaced by [`Server::reload_tls`]; each connection uses the value at its start.
    acceptor: RwLock<Option<TlsAcceptor>>,
    memory: Arc<PayloadMemory>,
    counters: Arc<Counters>,
    places: Arc<Places>,
    refused_count: AtomicUsize,
    stop: watch::Sender<Option<Instant>>,
}

impl<E: Exports> Server<E> {
    /// Reads the certificates and creates a server that serves nothing yet.
    ///
    /// # Errors
    /// `Invalid` if a TLS file is wrong (the error names it), or if there are rules for
    /// certificates but no client CA, so that no client could present one.
    pub fn new(exports: Arc<E>, options: ServerOptions) -> Result<Self> {
        let has_client_ca = options.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
        if options.access.has_rules() && !has_client_ca {
            let context = "set access by certificate: no client CA is set to verify certificates";
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        let acceptor = RwLock::new(options.tls.as_ref().map(tls::acceptor).transpose()?);
        let count_max = options.connection_count_max.max(1);
        let places = Places::new(count_max);
        let memory = PayloadMemory::new(options.payload_memory_bytes, places.count_max());
        let memory = Arc::new(memory);
        let shared = Shared {
            exports,
            acceptor,
            memory,
            counters: Arc::default(),
            places,
            refused_count: AtomicUsize::new(0),
            stop: watch::Sender::new(None),
            options: ServerOptions { connection_count_max: count_max, ..options },
        };
        Ok(Server { shared: Arc::new(shared) })
    }

    /// Reads the certificates again, for future connections.
    ///
    /// # Errors
    /// `Invalid`, naming the bad file; the earlier certificates stay in use.
    pub fn reload_tls(&self) -> Result<()> {
        let acceptor = self.shared.options.tls.as_ref().map(tls::acceptor).transpose()?;
        *self.shared.acceptor.write().unwrap_or_else(PoisonError::into_inner) = acceptor;
        Ok(())
    }

    fn acceptor(&self) -> Option<TlsAcceptor> {
        self.shared.acceptor.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Accepts connections until [`Server::stop`], then waits for the open ones. Call it once per
    /// listener, each in its own task.
    ///
    /// # Errors
    /// `Invalid` if the listener wants TLS and there are no certificates.
    pub async fn serve(&self, listener: Listener) -> Result<()> {
        if listener.tls != TlsMode::Off && self.acceptor().is_none() {
            return Err(Error::new(ErrorKind::Invalid, "serve with TLS: no certificate is set"));
        }
        let mut stop = self.shared.stop.subscribe();
        let mut connections = JoinSet::new();
        let options = &self.shared.options;
        let negotiations = Negotiations::new(options.connection_count_max);
        let mut refusals =
            Refusals::new(options.conditions.clone(), listener.name(), Arc::clone(&options.clock));
        let deadline = loop {
            tokio::select! {
                deadline = stopped(&mut stop) => break deadline,
                accepted = listener.accept(options.client_timeout) => match accepted {
                    Ok((stream, peer)) => match self.admit(&stream, &peer, &negotiations) {
                        Ok(admitted) => {
                            let (server, tls) = (self.clone(), listener.tls);
                            connections.spawn(async move {
                                server.connection(stream, peer, tls, admitted).await;
                            });
                        }
                        Err((why, remedy)) => {
                            self.shared.refused_count.fetch_add(1, Ordering::Relaxed);
                            refusals.add(&why, remedy);
                        }
                    },
                    Err(error) => {
                        if is_shortage(&error) {
                            let remedy = "check the limits of the process (open files, memory)";
                            refusals.add(&format!("could not accept one: {error}"), remedy);
                        }
                        // An immediate retry would spin.
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
                Some(ended) = connections.join_next() => report(ended),
                () = refusals.over() => refusals.end(),
            }
        };
        drop(refusals);
        listener.remove();
        let drain = async {
            while let Some(ended) = connections.join_next().await {
                report(ended);
            }
        };
        let grace = grace_left(deadline, options.clock.now());
        if tokio::time::timeout(grace, drain).await.is_err() {
            tracing::warn!(
                count = connections.len(),
                "the server closes connections that did not finish"
            );
            connections.shutdown().await;
        }
        Ok(())
    }

    /// Stops accepting connections and requests. Running requests have `grace` to finish. Does not
    /// wait: the futures of [`Server::serve`] end.
    pub fn stop(&self, grace: Duration) {
        self.shared.stop.send_replace(Some(self.shared.options.clock.now() + grace));
    }

    /// Returns the current counts.
    #[must_use]
    pub fn status(&self) -> Status {
        let shared = &self.shared;
        Status {
            connection_count: shared.places.count(),
            refused_count: shared.refused_count.load(Ordering::Relaxed),
            request_count: shared.counters.requests.load(Ordering::Relaxed),
            error_count: shared.counters.errors.load(Ordering::Relaxed),
            payload_bytes: shared.memory.reserved_bytes(),
        }
    }

    /// Takes a place among the connections, for one without negotiation.
    ///
    /// # Errors
    /// `Full` if there are too many.
    pub fn place(&self) -> Result<Place> {
        let taken = self.shared.places.take(From::Kernel).ok_or_else(|| {
            let what = format!(
                "take a connection: all {} are in use; close some, or allow more (`connection_count_max` in \
                 [nbd])",
                self.shared.places.count_max()
            );
            Error::new(ErrorKind::Full, what)
        })?;
        Ok(Place { _taken: taken })
    }

    /// Serves a connection of this machine's kernel until it ends or `stop` changes: simple
    /// replies, no negotiation, no access rules. Counts into the connection's own counters.
    pub async fn serve_kernel(
        &self,
        _place: &Place,
        kernel: KernelConnection<E::Device>,
        stop: watch::Receiver<Option<Instant>>,
    ) {
        let shared = &*self.shared;
        let opened = Opened {
            stream: Stream::Plain(Plain::Unix(kernel.stream)),
            inbox: Inbox::new(0),
            client: Client {
                peer: Peer::Kernel,
                is_tls: false,
                names: Vec::new(),
                reservation: None,
                line: Line::default(),
            },
            device: kernel.device,
            name: kernel.name.clone(),
            terms: Terms::default(),
        };
        let options = SessionOptions {
            request_count_max: shared.options.request_count_max,
            stall_timeout: shared.options.stall_timeout,
            can_resize: false,
            memory: Arc::clone(&shared.memory),
            counters: kernel.counters,
            stop,
            siblings: Some(kernel.siblings),
        };
        let export = kernel.name;
        match Session::new(opened, options).run().await {
            End::Orderly => tracing::debug!(export, "a connection of the kernel ended"),
            End::Protocol(why) => tracing::warn!(export, why, "the server disconnected the kernel"),
            End::Stalled => {
                tracing::warn!(export, "the server disconnected the kernel, which had stalled")
            }
            End::Gone { request_count } => tracing::info!(
                export,
                request_count,
                "the kernel closed a connection; the server dropped its requests"
            ),
            // The kernel gets the error.
            End::Fenced { .. } => tracing::debug!(export, "a connection of the kernel ended"),
            End::Io(error) => tracing::info!(export, %error, "a connection of the kernel broke"),
        }
    }

    /// Accepts a connection. The error holds the cause of a refusal and its remedy.
    fn admit(
        &self,
        stream: &Stream,
        peer: &Peer,
        negotiations: &Arc<Negotiations>,
    ) -> std::result::Result<Admitted, (String, &'static str)> {
        let shared = &*self.shared;
        let is_tcp = matches!(peer, Peer::Tcp(_) | Peer::Node { over: Over::Tcp, .. });
        let from = if is_tcp { From::Tcp } else { From::Unix };
        let place = shared.places.take(from).ok_or_else(|| {
            let count = shared.places.count();
            let why = format!("all places are taken, by {count} connections");
            (why, "close connections, or raise `connection_count_max` in [nbd]")
        })?;
        let negotiating = negotiations.begin().ok_or_else(|| {
            let why = "too many clients negotiate, or send nothing".to_owned();
            (why, "find the clients that connect there, and restrict access by a firewall")
        })?;
        let watched = Watched::new(stream, shared.options.client_timeout);
        let (watched, line) = watched.map_err(|error| {
            (format!("no descriptor is left: {error}"), "raise the limit of open files")
        })?;
        Ok(Admitted { _place: place, negotiating, _watched: watched, line })
    }

    /// Resolves when a client has used up its time for the handshake.
    async fn patience(&self, negotiating: &Negotiating, has_spoken: &AtomicBool) {
        let options = &self.shared.options;
        let mut spent = options.pressed_timeout.min(options.handshake_timeout);
        tokio::time::sleep(spent).await;
        while spent < options.handshake_timeout {
            if negotiating.is_pressed() && !has_spoken.load(Ordering::Relaxed) {
                return;
            }
            let pause = PRESSED_LOOK.min(options.handshake_timeout - spent);
            tokio::time::sleep(pause).await;
            spent += pause;
        }
    }

    async fn connection(&self, stream: Stream, peer: Peer, tls: TlsMode, admitted: Admitted) {
        let Admitted { _place, negotiating, _watched, line } = admitted;
        let shared = &*self.shared;
        let has_spoken = AtomicBool::new(false);
        let negotiator = Negotiator {
            exports: &*shared.exports,
            access: &shared.options.access,
            tls: self.acceptor(),
            has_spoken: &has_spoken,
        };
        let (names, reservation) = (Vec::new(), None);
        let client =
            Client { peer: peer.clone(), is_tls: false, names, reservation, line: line.clone() };
        let handshake = Handshake::new(tls, shared.options.can_resize);
        let negotiation = negotiator.run(stream, client, handshake);
        let mut stop = shared.stop.subscribe();
        let opened = tokio::select! {
            opened = negotiation => Ok(opened),
            () = self.patience(&negotiating, &has_spoken) => Err(()),
            _ = stopped(&mut stop) => return,
        };
        drop(negotiating);
        let opened = match opened {
            Ok(Ok(opened)) => opened,
            Ok(Err(NoSession::Left)) => return,
            Ok(Err(NoSession::Closed(why))) => {
                tracing::debug!(%peer, why, "the server closed a connection during negotiation");
                return;
            }
            Ok(Err(NoSession::Io(error))) => {
                tracing::info!(%peer, %error, "could not negotiate with a client");
                return;
            }
            Err(()) => {
                tracing::info!(%peer, "a client took too long to negotiate");
                return;
            }
        };
        let (export, client) = (opened.name.clone(), opened.client.label());
        tracing::info!(export, client, is_tls = opened.client.is_tls, "a client attached");
        let options = SessionOptions {
            request_count_max: shared.options.request_count_max,
            stall_timeout: shared.options.stall_timeout,
            can_resize: shared.options.can_resize,
            memory: Arc::clone(&shared.memory),
            counters: Arc::clone(&shared.counters),
            stop: shared.stop.subscribe(),
            siblings: None,
        };
        let device = Arc::clone(&opened.device);
        let end = tokio::select! {
            // The order matters: a client whose connection was replaced repeats its unanswered
            // requests on the new one. It would take a refusal on the old connection for an answer
            // of the device.
            biased;
            () = shared.exports.revoked(&device) => {
                if line.is_over() {
                    tracing::info!(
                        export, client,
                        "a client disconnected and another connected; the server dropped the \
                         requests of the first"
                    );
                    return;
                }
                tracing::warn!(
                    export, client,
                    "the server disconnected a client: its connection was replaced, or ended"
                );
                return;
            }
            end = Session::new(opened, options).run() => end,
        };
        match end {
            End::Orderly => tracing::info!(export, client, "a client detached"),
            End::Protocol(why) => {
                tracing::warn!(export, client, why, "the server disconnected a client")
            }
            End::Stalled => {
                tracing::warn!(
                    export,
                    client,
                    "the server disconnected a client that stalled with memory short"
                );
            }
            End::Gone { request_count } => tracing::info!(
                export,
                client,
                request_count,
                "a client disconnected; the server dropped its requests"
            ),
            End::Fenced { request_count } => tracing::info!(
                export,
                client,
                request_count,
                "the server disconnected a client, whose unanswered requests are for another owner"
            ),
            End::Io(error) => tracing::info!(
                export, client, %error,
                "the connection of a client broke"
            ),
        }
    }
}

/// Whether descriptors or memory are short. Other errors concern a connection that has already
/// ended.
fn is_shortage(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let shortages = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|errno| shortages.contains(&errno))
}

fn report(ended: std::result::Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!("a connection's task panicked: {error}");
    }
}
