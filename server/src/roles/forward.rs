//! Passes connections of NBD clients on from a node that does not own the pool to the one that does.
//!
//! Invariants:
//! - The bytes are passed as they are, so TLS and its certificates are between the client and the owner.
//! - The rules of the owner's TCP socket apply to a connection that came over TCP; those of either socket to one
//!   that came over a unix socket. The owner refuses a connection without such a socket.
//! - The owner's server knows that another node passes a client on.
//! - A client waits a bounded time for an owner. The number of clients is bounded.
//! - A client's connection ends when another owner comes, also if the old one is only out of reach.

use super::Roles;
use async_trait::async_trait;
use block::{Epoch, Error, ErrorKind, Result};
use cluster::{Connection, Handler, NodeId, PeerStream, Service};
use nbd::{CLIENT_TIMEOUT, Listener, Passage, Plain};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use uuid::Uuid;

/// First byte of a connection: how the client has reached the other node.
const OVER_TCP: u8 = 1;
const OVER_UNIX: u8 = 2;
/// Longest wait of a client for an owner. Chosen by hand: several times as long as a take-over.
const OWNER_WAIT: Duration = Duration::from_secs(15);
/// Pause before the owner is looked for again. Chosen by hand: it adds to the pause of a client.
const LOOK_PAUSE: Duration = Duration::from_millis(100);
/// Longest time to connect to an owner. Chosen by hand: the pool may have another one.
const CONNECT_MAX: Duration = Duration::from_secs(1);
/// Pause after the kernel could not give a connection (no file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The ways into the NBD server of the owner of the pool, by the kind of socket.
#[derive(Clone, Debug, Default)]
pub(crate) struct Passages {
    tcp: Option<Passage>,
    unix: Option<Passage>,
}

impl Passages {
    /// Makes a passage for each kind among `listeners`. Returns their listeners, too.
    pub(crate) fn of(listeners: &[Listener]) -> (Vec<Listener>, Passages) {
        let is_tcp = |listener: &&Listener| listener.tcp_address().is_some();
        let of = |listener: Option<&Listener>| listener.map(Listener::passage).unzip();
        let (tcp_listener, tcp) = of(listeners.iter().find(is_tcp));
        let (unix_listener, unix) = of(listeners.iter().find(|listener| !is_tcp(listener)));
        (tcp_listener.into_iter().chain(unix_listener).collect(), Passages { tcp, unix })
    }

    /// Connects a client that used a socket of `kind` at the node called `by`.
    async fn open(&self, kind: u8, by: &str) -> Result<UnixStream> {
        match (kind, &self.tcp, &self.unix) {
            (OVER_UNIX, _, Some(passage)) | (OVER_TCP | OVER_UNIX, Some(passage), _) => {
                passage.open(by).await
            }
            _ => {
                let what = "pass a client on: the owner of the pool serves no socket of its kind";
                Err(Error::new(ErrorKind::Unsupported, what))
            }
        }
    }
}

/// A listener whose socket is removed when this is dropped.
struct Bound(Option<Listener>);

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(listener) = self.0.take() {
            listener.close();
        }
    }
}

/// Passes the clients of `listeners` on, at most `client_count_max` at a time. Their connections end
/// when this is dropped.
pub(crate) fn forward(
    roles: &Arc<Roles>,
    listeners: Vec<Listener>,
    client_count_max: usize,
) -> JoinSet<()> {
    let permits = Arc::new(Semaphore::new(client_count_max));
    let mut tasks = JoinSet::new();
    let epoch = watch::Sender::new(Epoch(0));
    for listener in listeners {
        let (roles, permits) = (Arc::clone(roles), Arc::clone(&permits));
        tasks.spawn(accept_all(roles, Bound(Some(listener)), permits, epoch.subscribe()));
    }
    tasks.spawn(watch_epoch(Arc::clone(roles), epoch));
    tasks
}

/// Sets `epoch` to the one that the member on this node has promised.
async fn watch_epoch(roles: Arc<Roles>, epoch: watch::Sender<Epoch>) {
    loop {
        if let Some(member) = roles.member()
            && let Ok((document, _)) = member.local().state().await
            && *epoch.borrow() != document.promised
        {
            // The link of its owner is in the chain by now.
            *roles.owner.lock().await = None;
            epoch.send_replace(document.promised);
        }
        tokio::time::sleep(LOOK_PAUSE).await;
    }
}

async fn accept_all(
    roles: Arc<Roles>,
    bound: Bound,
    permits: Arc<Semaphore>,
    epoch: watch::Receiver<Epoch>,
) {
    let Some(listener) = &bound.0 else { return };
    let kind = if listener.tcp_address().is_some() { OVER_TCP } else { OVER_UNIX };
    let mut clients = JoinSet::new();
    while let Ok(permit) = Arc::clone(&permits).acquire_owned().await {
        while clients.try_join_next().is_some() {}
        match listener.accept_stream(CLIENT_TIMEOUT).await {
            Ok(client) => {
                let (roles, mut epoch) = (Arc::clone(&roles), epoch.clone());
                clients.spawn(async move {
                    if let Err(error) = pass_on(&roles, client, kind, &mut epoch).await {
                        tracing::info!(
                            error = %error.chain(),
                            "the connection of a client to the owner of the pool ended"
                        );
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "could not accept a client");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn pass_on(
    roles: &Roles,
    mut client: Plain,
    kind: u8,
    epoch: &mut watch::Receiver<Epoch>,
) -> Result<()> {
    epoch.mark_unchanged();
    let connecting = timeout(OWNER_WAIT, connect_to_owner(roles, epoch)).await;
    let (node, mut owner) = connecting.unwrap_or_else(|_| {
        let what = format!("pass a client on: no node has served the pool for {OWNER_WAIT:?}");
        Err(Error::new(ErrorKind::Unavailable, what))
    })?;
    let passing = async {
        owner.write_all(&[kind]).await?;
        owner.flush().await?;
        copy_bidirectional(&mut client, &mut owner).await
    };
    let passed = tokio::select! {
        passed = passing => passed,
        () = replaced(roles, node, epoch) => {
            let what = "pass a client on: the pool gets another owner";
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
    };
    passed.map(drop).map_err(|e| Error::with_source(ErrorKind::Io, "pass a client on", e))
}

/// Resolves once another node than `node` owns the pool.
async fn replaced(roles: &Roles, node: NodeId, epoch: &mut watch::Receiver<Epoch>) {
    while epoch.changed().await.is_ok() {
        let owner = loop {
            match owner_of(roles).await {
                (Some(owner), _) => break owner,
                (None, _) => tokio::time::sleep(CONNECT_MAX).await,
            }
        };
        if owner != node {
            return;
        }
    }
    // The node gives the clients up itself.
    std::future::pending().await
}

/// Connects to the node that owns the pool, and waits for one.
async fn connect_to_owner(
    roles: &Roles,
    epoch: &mut watch::Receiver<Epoch>,
) -> Result<(NodeId, PeerStream)> {
    loop {
        let (owner, pool) = owner_of(roles).await;
        if let Some(node) = owner {
            let connecting = roles.cluster().connect(node, Service::Forward, pool);
            let connected = tokio::select! {
                connected = timeout(CONNECT_MAX, connecting) => connected.unwrap_or_else(|_| {
                    let what = "connect to the owner: it does not answer";
                    Err(Error::new(ErrorKind::Unavailable, what))
                }),
                // An earlier owner may be out of reach, so that it does not refuse either.
                Ok(()) = epoch.changed() => continue,
            };
            match connected {
                Ok(connection) => return Ok((node, connection.into_stream())),
                Err(error) => {
                    tracing::debug!(%node, error = %error.chain(), "the pool has another owner");
                    let mut known = roles.owner.lock().await;
                    if known.is_some_and(|(known, _)| known == node) {
                        *known = None;
                    }
                }
            }
        }
        tokio::time::sleep(LOOK_PAUSE).await;
    }
}

/// Returns the node that owns the pool, as far as it is known, and the pool.
async fn owner_of(roles: &Roles) -> (Option<NodeId>, Option<Uuid>) {
    // One look at the store serves all clients that wait.
    let mut known = roles.owner.lock().await;
    if known.is_none() {
        match roles.manifest().await {
            Ok(Some(manifest)) => {
                let configuration = manifest.configuration.as_ref();
                let member = configuration.and_then(|one| one.member(manifest.owner.node_id));
                *known = member.map(|member| (NodeId(member.node), manifest.pool));
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(error = %error.chain(), "could not read who owns the pool");
            }
        }
    }
    known.map_or((None, None), |(node, pool)| (Some(node), Some(pool)))
}

/// Serves the connections that other nodes pass on.
pub(super) struct Passed(pub(super) Weak<Roles>);

#[async_trait]
impl Handler for Passed {
    fn check(&self, _peer: NodeId, pool: Option<Uuid>) -> Result<()> {
        let roles = self.0.upgrade();
        let is_here = roles.is_some_and(|roles| {
            let is_pool = roles.member().is_some_and(|member| Some(member.local().pool()) == pool);
            is_pool && roles.passages.lock().is_some()
        });
        match is_here {
            true => Ok(()),
            false => {
                let what = "pass a client on: this node does not serve the pool";
                Err(Error::new(ErrorKind::Unavailable, what))
            }
        }
    }

    async fn serve(&self, connection: Connection) {
        let passages = self.0.upgrade().and_then(|roles| roles.passages.lock().clone());
        let Some(passages) = passages else { return };
        let node = connection.peer_name().to_owned();
        let mut stream = connection.into_stream();
        let passing = async {
            let kind = timeout(OWNER_WAIT, stream.read_u8()).await??;
            let mut server = passages.open(kind, &node).await.map_err(std::io::Error::other)?;
            copy_bidirectional(&mut stream, &mut server).await
        };
        if let Err(error) = passing.await {
            tracing::info!(%node, %error, "a connection that a node had passed on ended");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nbd::TlsMode;

    #[tokio::test]
    async fn client_of_a_tcp_socket_never_reaches_a_unix_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nbd.sock");
        let unix = Listener::unix(&path, 0o600, TlsMode::Off).await.unwrap();
        let tcp = Listener::tcp("127.0.0.1:0".parse().unwrap(), TlsMode::Off).await.unwrap();
        let (_listeners, passages) = Passages::of(&[unix]);
        assert!(passages.open(OVER_TCP, "b").await.is_err());
        assert!(passages.open(7, "b").await.is_err());
        assert!(passages.open(OVER_UNIX, "b").await.is_ok());
        let (_listeners, passages) = Passages::of(&[tcp]);
        assert!(passages.open(OVER_TCP, "b").await.is_ok());
        assert!(passages.open(OVER_UNIX, "b").await.is_ok());
    }
}
