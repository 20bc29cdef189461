//! A node of a cluster, as a process runs it.
//!
//! Invariants:
//! - A service gets connections of admitted nodes only, with the id that the handshake has proven.
//! - At most [`STRANGER_COUNT_MAX`] connections at a time have not yet proven to be of a node.
//! - Everything that `serve` started ends when its future is dropped.

use crate::admission::{AdmissionList, Conflict, NewNode, Node};
use crate::connection::accept::{Caller, Incoming, accept};
use crate::connection::dial::{Target, dial};
use crate::connection::{Connection, Hello, Refused, Service};
use crate::exchange::{self, Spread};
use crate::home;
use crate::home::refuse_member;
use crate::identity::{ClusterId, Digest, Identity, NodeId};
use crate::join::{self, Issuer, Tokens};
use crate::membership::Membership;
use crate::probe::{self, AnswerLimits, Limits, Measurement};
use crate::tls::{self, Acceptors};
use crate::token::Token;
use async_trait::async_trait;
use block::env::{Clock, Random};
use block::{Error, ErrorKind, Result};
use parking_lot::RwLock;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use uuid::Uuid;

/// Connections at a time whose peers are not proven, joiners included. Further ones wait in the
/// kernel's queue. Chosen by hand: each lasts a few round trips, and at most 40 s.
pub const STRANGER_COUNT_MAX: usize = 64;
/// Pause after the kernel could not give a connection (no file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The outside world of a node.
#[derive(Clone)]
pub struct Environment {
    /// Time: the life of tokens, the pauses between retries.
    pub clock: Arc<dyn Clock>,
    /// The secrets of tokens.
    pub random: Arc<dyn Random>,
    /// The file with the pool's key: a node that joins and has none gets a copy of the issuer's. `None` if the pool
    /// is opened in another way.
    pub key_file: Option<PathBuf>,
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Environment").field("clock", &self.clock).finish_non_exhaustive()
    }
}

/// A service of this node to the others.
#[async_trait]
pub trait Handler: Send + Sync + 'static {
    /// Decides whether a connection of this node about this pool is accepted. Must not wait.
    ///
    /// # Errors
    /// The peer gets the text: `NotFound` if this node does not have the pool, any other kind if it
    /// cannot take the connection at this time.
    fn check(&self, peer: NodeId, pool: Option<Uuid>) -> Result<()>;

    /// Serves an accepted connection until it ends. After the removal of the peer, its reads and
    /// writes are errors; the future is dropped when the cluster stops serving.
    async fn serve(&self, connection: Connection);
}

/// A node of a cluster. Clones are the same node.
#[derive(Clone)]
pub struct Cluster(Arc<Inner>);

/// A node that stays open only as long as others use it.
#[derive(Clone, Debug)]
pub struct WeakCluster(Weak<Inner>);

impl WeakCluster {
    /// Returns the node if it is still open.
    #[must_use]
    pub fn upgrade(&self) -> Option<Cluster> {
        self.0.upgrade().map(Cluster)
    }
}

struct Inner {
    membership: Arc<Membership>,
    tokens: Arc<Tokens>,
    spread: Arc<Spread>,
    acceptors: Acceptors,
    handlers: RwLock<HashMap<Service, Arc<dyn Handler>>>,
    environment: Environment,
    /// Held by the probe that this node makes.
    probing: tokio::sync::Mutex<()>,
    /// The turn of a probe that this node answers.
    answering: Semaphore,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Inner").field(self.membership.identity()).finish()
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cluster").field(self.0.membership.identity()).finish()
    }
}

impl Cluster {
    /// Founds a cluster with this node as the only one.
    ///
    /// # Errors
    /// `Busy` if the directory belongs to a cluster; `Invalid` for a name, address or zone that is not
    /// allowed; `Io`.
    pub fn init(dir: &Path, node: NewNode<'_>, environment: Environment) -> Result<Cluster> {
        refuse_member(dir)?;
        let identity = Identity::open_or_generate(dir, node.name)?;
        let list = AdmissionList::found(&identity, node.addresses, node.zone)?;
        let lock = home::claim(dir, &identity)?;
        let membership = Membership::create(dir, identity, lock, list)?;
        Cluster::new(dir, membership, environment)
    }

    /// Opens the node in `dir`.
    ///
    /// # Errors
    /// `NotFound` if the directory belongs to no cluster; `Busy` if another process has it open;
    /// `Denied` if others can read the key; `Corrupt`, `Unsupported`, `Io`.
    pub fn open(dir: &Path, environment: Environment) -> Result<Cluster> {
        Cluster::new(dir, Membership::open(dir)?, environment)
    }

    /// Joins the cluster of a token, the word that [`Token::to_word`] made.
    ///
    /// # Errors
    /// `Busy` if the directory belongs to a cluster or the name is taken; `Denied` if the token has
    /// expired or was used, or another node answers at its addresses; `Invalid` for a cut or mistyped
    /// token; `Unsupported` for another version of the program; `Unavailable` if the issuer cannot be
    /// reached; `Io`. Except for `Busy` about the directory, the same call may be repeated.
    pub async fn join(
        dir: &Path,
        node: NewNode<'_>,
        token: &str,
        environment: Environment,
    ) -> Result<Cluster> {
        let token = Token::parse(token)?;
        let membership = join::join(dir, node, &token, environment.key_file.as_deref()).await?;
        Cluster::new(dir, membership, environment)
    }

    fn new(dir: &Path, membership: Membership, environment: Environment) -> Result<Cluster> {
        let membership = Arc::new(membership);
        Ok(Cluster(Arc::new(Inner {
            tokens: Arc::new(Tokens::open(dir, Arc::clone(&environment.clock))?),
            spread: Arc::default(),
            acceptors: tls::acceptors(&membership)?,
            handlers: RwLock::default(),
            membership,
            environment,
            probing: tokio::sync::Mutex::default(),
            answering: Semaphore::new(1),
        })))
    }

    /// Returns a handle that does not keep the node open.
    #[must_use]
    pub fn downgrade(&self) -> WeakCluster {
        WeakCluster(Arc::downgrade(&self.0))
    }

    /// Returns the id of the cluster.
    #[must_use]
    pub fn cluster_id(&self) -> ClusterId {
        self.0.membership.cluster()
    }

    /// Returns the id of this node.
    #[must_use]
    pub fn node_id(&self) -> NodeId {
        self.0.membership.identity().id()
    }

    /// Returns the name of this node.
    #[must_use]
    pub fn node_name(&self) -> &str {
        self.0.membership.identity().name()
    }

    /// Returns the admitted nodes in the order of their ids, this one included.
    #[must_use]
    pub fn nodes(&self) -> Vec<Node> {
        self.0.membership.list().nodes().values().cloned().collect()
    }

    /// Returns the names and the ids of the nodes that were removed. A node that is admitted may have the name of one.
    #[must_use]
    pub fn removed_names(&self) -> BTreeSet<String> {
        self.0.membership.list().removed_names()
    }

    /// Returns the zone of a node; `None` without one, or without such a node.
    #[must_use]
    pub fn zone_of(&self, node: NodeId) -> Option<String> {
        self.0.membership.list().nodes().get(&node).and_then(|found| found.zone.clone())
    }

    /// Returns the matters of the list that an operator should settle.
    #[must_use]
    pub fn conflicts(&self) -> Vec<Conflict> {
        self.0.membership.list().conflicts().to_vec()
    }

    /// Returns the number of open connections with a node.
    #[must_use]
    pub fn connection_count(&self, node: NodeId) -> usize {
        self.0.membership.links().count(node)
    }

    /// Returns a watcher that holds the digest of the list of nodes. It sees every change after this
    /// call, so a caller subscribes first and reads [`Cluster::nodes`] afterwards.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Digest> {
        self.0.membership.watch()
    }

    /// Issues a token that admits one node within an hour. Waits for the disk.
    ///
    /// # Errors
    /// `Denied` if this node was removed; `Full` with too many valid tokens; `Io`.
    pub fn issue_token(&self) -> Result<Token> {
        self.0.tokens.issue(&self.0.membership, &*self.0.environment.random)
    }

    /// Removes a node from the cluster: its connections here close before this returns, and those on
    /// other nodes when they hear of it. Waits for the disk. A removed node never comes back; its
    /// machine may join again from an empty directory.
    ///
    /// # Errors
    /// `NotFound` for a node that is not admitted; `Invalid` for this node; `Denied` if this node was
    /// removed; `Full`, `Io`.
    pub fn remove(&self, node: NodeId) -> Result<()> {
        let membership = &self.0.membership;
        membership.change(|list| list.remove(membership.identity(), node))
    }

    /// Registers the handler of a service, in place of an earlier one.
    ///
    /// # Panics
    /// For `join`, `admissions` and `probe`, which the cluster serves itself.
    pub fn register(&self, service: Service, handler: Arc<dyn Handler>) {
        let is_own = matches!(service, Service::Join | Service::Admissions | Service::Probe);
        assert!(!is_own, "{service} has a handler");
        self.0.handlers.write().insert(service, handler);
    }

    /// Connects to a service of another node, about a pool or none.
    ///
    /// # Errors
    /// `NotFound` if the node is not in the cluster, or does not have the pool; `Denied` if it does
    /// not admit this node; `Unsupported` for another version of the program or an unknown service;
    /// `Invalid` for this node itself; `Unavailable` if it cannot be reached.
    pub async fn connect(
        &self,
        node: NodeId,
        service: Service,
        pool: Option<Uuid>,
    ) -> Result<Connection> {
        let membership = &self.0.membership;
        if node == self.node_id() {
            return Err(Error::new(ErrorKind::Invalid, "a node does not connect to itself"));
        }
        let peer = membership.node(node)?;
        let target = Target {
            peer: format!("node {}", peer.name),
            addresses: &peer.addresses,
            config: tls::dialer(membership, node)?,
            impostor: "is not the node that was dialed",
        };
        let (number, list) = (service.number(), membership.list().digest());
        let hello = Hello { service: number, cluster: self.cluster_id(), pool, list };
        let enter = |socket: &TcpStream| {
            let link = membership.links().enter(node, socket)?;
            // A removal before the entry cut no link of ours.
            membership.node(node).map(|_| Some(link))
        };
        let (stream, theirs) = dial(&target, &hello, enter).await?;
        if theirs != list {
            self.0.spread.saw(node, theirs);
        }
        Ok(Connection::new((node, peer.name), service, pool, stream))
    }

    /// Measures the path to another node, over a connection of its own. Waits until no other probe of this
    /// node runs; a probe takes less than a second, and ten seconds at most.
    ///
    /// # Errors
    /// Those of [`Cluster::connect`]; `Unavailable` if the node does not answer in time.
    pub async fn measure(&self, node: NodeId) -> Result<Measurement> {
        let _one_at_a_time = self.0.probing.lock().await;
        let connection = self.connect(node, Service::Probe, None).await?;
        probe::measure(connection, &*self.0.environment.clock, Limits::DEFAULT).await
    }

    /// Serves the connections of these listeners, and exchanges lists with the other nodes. Runs until
    /// it is dropped.
    pub async fn serve(&self, listeners: Vec<TcpListener>) {
        let dialing = self.clone();
        let dial = move |node| {
            let cluster = dialing.clone();
            async move { cluster.connect(node, Service::Admissions, None).await }
        };
        let clock = Arc::clone(&self.0.environment.clock);
        let exchange = exchange::run(&self.0.membership, &self.0.spread, &*clock, dial);
        let strangers = Arc::new(Semaphore::new(STRANGER_COUNT_MAX));
        let accepting = listeners.into_iter().map(|listener| {
            let (cluster, strangers) = (self.clone(), Arc::clone(&strangers));
            async move { cluster.accept_all(listener, strangers).await }
        });
        let accepting: JoinSet<()> = accepting.collect();
        tokio::join!(exchange, accepting.join_all());
    }

    async fn accept_all(&self, listener: TcpListener, strangers: Arc<Semaphore>) {
        let mut tasks = JoinSet::new();
        loop {
            let permit = Arc::clone(&strangers).acquire_owned().await;
            let permit = permit.expect("the semaphore is never closed");
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                Some(_) = tasks.join_next() => continue,
            };
            match accepted {
                Ok((socket, address)) => {
                    let cluster = self.clone();
                    tasks.spawn(async move {
                        if let Err(error) = cluster.serve_one(socket, permit).await {
                            let error = error.chain();
                            tracing::debug!(%address, error, "a connection of a node ended");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "could not accept a connection of a node");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn serve_one(&self, socket: TcpStream, permit: OwnedSemaphorePermit) -> Result<()> {
        let membership = &self.0.membership;
        let incoming = accept(socket, membership, &self.0.acceptors).await?;
        let node = match &incoming.caller {
            Caller::Node(node) => *node,
            Caller::Joiner(certificate) => {
                let certificate = certificate.to_vec();
                let stream = incoming.accept(membership).await?;
                let (membership, tokens) = (Arc::clone(membership), Arc::clone(&self.0.tokens));
                let issuer =
                    Issuer { membership, tokens, key_file: self.0.environment.key_file.clone() };
                let joined = join::serve(stream, certificate, issuer).await;
                match &joined {
                    Ok(node) => tracing::info!(%node, "admitted a node"),
                    Err(error) => {
                        tracing::warn!(error = %error.chain(), "could not admit a node");
                    }
                }
                return joined.map(drop);
            }
        };
        drop(permit);
        if incoming.hello.list != membership.list().digest() {
            self.0.spread.saw(node, incoming.hello.list);
        }
        if incoming.service == Service::Admissions {
            let stream = incoming.accept(membership).await?;
            let connection = Connection::new(self.named(node), Service::Admissions, None, stream);
            return exchange::answer(membership, connection).await;
        }
        if incoming.service == Service::Probe {
            let stream = incoming.accept(membership).await?;
            let connection = Connection::new(self.named(node), Service::Probe, None, stream);
            return probe::answer(connection, &self.0.answering, AnswerLimits::DEFAULT).await;
        }
        self.serve_handler(node, incoming).await
    }

    /// Returns a node with its name. A node that was removed meanwhile is named by its id.
    fn named(&self, node: NodeId) -> (NodeId, String) {
        let found = self.0.membership.node(node);
        (node, found.map_or_else(|_| node.to_string(), |found| found.name))
    }

    async fn serve_handler(&self, node: NodeId, incoming: Incoming) -> Result<()> {
        let (service, pool) = (incoming.service, incoming.hello.pool);
        let handler = self.0.handlers.read().get(&service).cloned();
        let Some(handler) = handler else {
            let text = format!("this node does not serve {service}");
            incoming.refuse(Refused::Service, text).await;
            return Ok(());
        };
        if let Err(error) = handler.check(node, pool) {
            let refused = match error.kind() {
                ErrorKind::NotFound => Refused::Pool,
                _ => Refused::Busy,
            };
            incoming.refuse(refused, error.to_string()).await;
            return Ok(());
        }
        let stream = incoming.accept(&self.0.membership).await?;
        handler.serve(Connection::new(self.named(node), service, pool, stream)).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
