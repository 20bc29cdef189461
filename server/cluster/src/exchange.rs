//! The exchange of lists of nodes, so that a change on one node reaches all that are up, and the
//! others when they come back.
//!
//! Invariants:
//! - A node is dialed while its list is not known to be ours: at the start, after each change here,
//!   and when a hello or an answer shows another digest.
//! - Retries are spaced further and further, up to [`PAUSE_MAX`], and at most [`DIAL_COUNT_MAX`]
//!   dials run at a time.

use crate::connection::Connection;
use crate::identity::{Digest, NodeId};
use crate::membership::Membership;
use block::env::Clock;
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio::task::{self, JoinSet};
use tokio::time::{sleep, timeout};

/// Kind of the frame with a list.
const LIST: u8 = 1;
/// Time for one exchange.
const EXCHANGE_TIME_MAX: Duration = Duration::from_secs(20);
/// Dials at a time. Chosen by hand.
const DIAL_COUNT_MAX: usize = 16;
/// Pause after the first failure; it doubles each time.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// Longest pause. Chosen by hand: a node that comes back dials the others itself.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Time between two looks for nodes that are due.
const LOOK_TIME: Duration = Duration::from_secs(1);

/// What this node knows of the lists of the others.
#[derive(Debug, Default)]
pub struct Spread {
    peers: Mutex<HashMap<NodeId, Peer>>,
    wake: Notify,
}

#[derive(Clone, Copy, Debug, Default)]
struct Peer {
    /// Digest of its list, as last seen.
    theirs: Option<Digest>,
    /// Our digest at the last attempt, and its time.
    tried: Option<(Digest, Instant)>,
    /// Attempts with this digest.
    attempt_count: u32,
}

impl Peer {
    fn is_due(&self, ours: Digest, clock: &dyn Clock) -> bool {
        if self.theirs == Some(ours) {
            return false;
        }
        match self.tried {
            Some((digest, at)) if digest == ours => {
                let doublings = self.attempt_count.saturating_sub(1).min(6);
                clock.since(at) >= PAUSE_MAX.min(PAUSE_MIN.saturating_mul(1 << doublings))
            }
            _ => true,
        }
    }
}

impl Spread {
    /// Notes the digest of a node's list, from a hello or an answer.
    pub fn saw(&self, node: NodeId, theirs: Digest) {
        self.peers.lock().entry(node).or_default().theirs = Some(theirs);
        self.wake.notify_one();
    }

    /// Returns the nodes to dial, except those in `busy`, and notes the attempts.
    fn due(
        &self,
        membership: &Membership,
        clock: &dyn Clock,
        busy: &HashSet<NodeId>,
    ) -> Vec<NodeId> {
        let list = membership.list();
        let (ours, own) = (list.digest(), membership.identity().id());
        let mut peers = self.peers.lock();
        peers.retain(|node, _| list.nodes().contains_key(node));
        let mut due = Vec::new();
        // A removed node finds out by itself: nothing that it dials accepts it.
        let others = list.nodes().keys().filter(|node| **node != own && !busy.contains(node));
        for node in others {
            if due.len() + busy.len() >= DIAL_COUNT_MAX {
                break;
            }
            let peer = peers.entry(*node).or_default();
            if peer.is_due(ours, clock) {
                let is_repeated = peer.tried.is_some_and(|(digest, _)| digest == ours);
                peer.attempt_count =
                    if is_repeated { peer.attempt_count.saturating_add(1) } else { 1 };
                peer.tried = Some((ours, clock.now()));
                due.push(*node);
            }
        }
        due
    }
}

/// Keeps the lists of all nodes equal. `dial` connects to the service `admissions` of a node. Runs
/// until it is dropped.
pub async fn run<D, F>(
    membership: &Arc<Membership>,
    spread: &Arc<Spread>,
    clock: &dyn Clock,
    dial: D,
) where
    D: Fn(NodeId) -> F,
    F: Future<Output = Result<Connection>> + Send + 'static,
{
    let mut changed = membership.watch();
    let mut dials = JoinSet::new();
    let mut busy: HashMap<task::Id, NodeId> = HashMap::new();
    loop {
        for node in spread.due(membership, clock, &busy.values().copied().collect()) {
            let (dialing, membership) = (dial(node), Arc::clone(membership));
            let spread = Arc::clone(spread);
            let started = dials.spawn(async move {
                let exchanged = match dialing.await {
                    Ok(connection) => offer(&membership, connection).await,
                    Err(error) => Err(error),
                };
                match exchanged {
                    Ok(theirs) => spread.saw(node, theirs),
                    Err(error) => {
                        tracing::debug!(%node, error = %error.chain(), "could not exchange lists");
                    }
                }
            });
            busy.insert(started.id(), node);
        }
        tokio::select! {
            Some(ended) = dials.join_next_with_id() => {
                busy.remove(&ended.map_or_else(|error| error.id(), |(id, ())| id));
            }
            _ = changed.changed() => {}
            () = spread.wake.notified() => {}
            () = sleep(LOOK_TIME) => {}
        }
    }
}

fn late<T>(_: T) -> Error {
    Error::new(ErrorKind::Unavailable, "exchange lists of nodes: it took too long")
}

/// Sends our list and merges the one that comes back. Returns the digest of the peer's list.
async fn offer(membership: &Arc<Membership>, connection: Connection) -> Result<Digest> {
    let exchange = async {
        let sent = membership.list();
        let (mut reader, mut writer) = connection.into_frames();
        writer.write(LIST, 0, &[Bytes::from(sent.encode())]).await?;
        let reply = list_in(reader.read().await?)?;
        let membership = Arc::clone(membership);
        blocking(move || {
            membership.merge(&reply)?;
            // The peer has merged ours before it answered.
            let mut theirs = (*sent).clone();
            theirs.merge_bytes(&reply)?;
            Ok(theirs.digest())
        })
        .await
    };
    timeout(EXCHANGE_TIME_MAX, exchange).await.map_err(late)?
}

/// Serves one exchange: merges the peer's list and answers with ours.
///
/// # Errors
/// For messages: `Unavailable` if the connection breaks, those of a merge.
pub async fn answer(membership: &Arc<Membership>, connection: Connection) -> Result<()> {
    let exchange = async {
        let (mut reader, mut writer) = connection.into_frames();
        let theirs = list_in(reader.read().await?)?;
        let merging = Arc::clone(membership);
        blocking(move || merging.merge(&theirs).map(drop)).await?;
        writer.write(LIST, 0, &[Bytes::from(membership.list().encode())]).await?;
        writer.close().await
    };
    timeout(EXCHANGE_TIME_MAX, exchange).await.map_err(late)?
}

fn list_in(frame: Option<crate::connection::Frame>) -> Result<Bytes> {
    match frame {
        Some(frame) if frame.kind == LIST => Ok(frame.payload),
        Some(_) => Err(Error::new(ErrorKind::Corrupt, "a node sent a message that is no list")),
        None => Err(Error::new(ErrorKind::Unavailable, "a node closed before it sent its list")),
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| {
        Err(Error::with_source(ErrorKind::Unavailable, "merge a list of nodes", error))
    })
}
