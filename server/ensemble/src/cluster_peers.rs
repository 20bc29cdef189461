//! Connections to members on other nodes of the cluster, as the owner and a candidate use them.
//!
//! Invariants:
//! - A link speaks to the member that was asked for: its node has named it before the first request
//!   leaves.
//! - A link has one task and two bounded queues. An error on either side ends the task and the link,
//!   and the log names the node.
//! - A link to a node that has ceased to be that of its member ends.

use crate::frames;
use crate::peers::{Link, Peers};
use crate::seeded_bugs::seeded_bugs;
use async_trait::async_trait;
use block::{Error, ErrorKind, Result};
use cluster::{Cluster, FrameReader, FrameWriter, NodeId, Service};
use replication::{Answer, MemberId, Request};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use uuid::Uuid;

/// Requests that wait for the connection. Chosen by hand: the owner bounds their bytes.
const REQUESTS_MAX: usize = 16;
/// Answers that wait for their reader. Chosen by hand: as many as one owner has requests under way.
const ANSWERS_MAX: usize = 64;
/// Longest time for a connection. Chosen by hand: an address that does not answer costs 5 s, and the
/// next one may.
const CONNECT_MAX: Duration = Duration::from_secs(8);
/// Longest time for the last bytes of a connection. Chosen by hand.
const CLOSE_MAX: Duration = Duration::from_secs(1);

/// The node of each member.
pub type MemberNodes = BTreeMap<MemberId, NodeId>;

/// The members of one pool's log, over the connections of the cluster.
#[derive(Debug)]
pub struct ClusterPeers {
    cluster: Cluster,
    pool: Uuid,
    nodes: watch::Sender<MemberNodes>,
}

/// One end of an open connection, with the names of the other for messages.
struct Conversation {
    pool: Uuid,
    member: MemberId,
    node: NodeId,
    name: String,
    reader: FrameReader,
    writer: FrameWriter,
}

impl ClusterPeers {
    /// Makes the way to the members of `pool`. `nodes` says which node each of them is on; the member
    /// of this node may be absent.
    #[must_use]
    pub fn new(cluster: Cluster, pool: Uuid, nodes: MemberNodes) -> ClusterPeers {
        ClusterPeers { cluster, pool, nodes: watch::Sender::new(nodes) }
    }

    /// Replaces the nodes, because the configuration has changed. The links of members that are on
    /// another node now, or on none, end.
    pub fn set_nodes(&self, nodes: MemberNodes) {
        self.nodes.send_replace(nodes);
    }

    async fn open(&self, member: MemberId, node: NodeId) -> Result<Conversation> {
        let pool = self.pool;
        let connection = self.cluster.connect(node, Service::Member, Some(pool)).await?;
        let name = connection.peer_name().to_owned();
        let (mut reader, writer) = connection.into_frames();
        let found = frames::read_identity(&mut reader).await?;
        if found != member && !seeded_bugs().identity_unchecked {
            let what = format!(
                "connect to member {member} of pool {pool}: node {name} has member {found} in its \
                 place; replace the member in the configuration"
            );
            return Err(Error::new(ErrorKind::Denied, what));
        }
        Ok(Conversation { pool, member, node, name, reader, writer })
    }
}

#[async_trait]
impl Peers for ClusterPeers {
    async fn connect(&self, member: MemberId) -> Result<Link> {
        let node = self.nodes.borrow().get(&member).copied().ok_or_else(|| {
            let what =
                format!("connect to member {member} of pool {}: its node is not known", self.pool);
            Error::new(ErrorKind::NotFound, what)
        })?;
        let opened = timeout(CONNECT_MAX, self.open(member, node)).await;
        let conversation = opened.unwrap_or_else(|_| {
            let what = format!("connect to member {member} on node {node}: it took too long");
            Err(Error::new(ErrorKind::Unavailable, what))
        })?;
        let (requests, to_send) = mpsc::channel(REQUESTS_MAX);
        let (to_receive, answers) = mpsc::channel(ANSWERS_MAX);
        tokio::spawn(converse(conversation, to_send, to_receive, self.nodes.subscribe()));
        Ok(Link { requests, answers })
    }

    fn name_of(&self, member: MemberId) -> String {
        let node = self.nodes.borrow().get(&member).copied();
        let known = self.cluster.nodes().into_iter().find(|known| Some(known.id) == node);
        known.map_or_else(|| member.to_string(), |known| known.name)
    }

    fn is_in_own_zone(&self, member: MemberId) -> bool {
        let node = self.nodes.borrow().get(&member).copied();
        node.is_none_or(|node| {
            self.cluster.zone_of(node) == self.cluster.zone_of(self.cluster.node_id())
        })
    }
}

/// Carries the messages of a link until either side ends.
async fn converse(
    conversation: Conversation,
    mut requests: mpsc::Receiver<Request>,
    answers: mpsc::Sender<Answer>,
    mut nodes: watch::Receiver<MemberNodes>,
) {
    let Conversation { pool, member, node, name, mut reader, mut writer } = conversation;
    tracing::debug!(%pool, %member, %node, name, "connected to the node of a member");
    let ended = {
        let writing = async {
            while let Some(request) = requests.recv().await {
                frames::write(&mut writer, &request).await?;
            }
            Ok(())
        };
        let reading = async {
            while let Some(answer) = frames::read::<Answer>(&mut reader).await? {
                if answers.send(answer).await.is_err() {
                    return Ok(());
                }
            }
            Err(Error::new(ErrorKind::Unavailable, "the node of the member closed the connection"))
        };
        let moved = async {
            // The sender may be gone before the link: the nodes then stay.
            let is_moved = nodes.wait_for(|nodes| nodes.get(&member) != Some(&node)).await.is_ok();
            if !is_moved || seeded_bugs().moved_member_kept {
                std::future::pending::<()>().await;
            }
            Err(Error::new(ErrorKind::Unavailable, "the member is on this node no longer"))
        };
        tokio::select! {
            ended = writing => ended,
            ended = reading => ended,
            ended = moved => ended,
            () = answers.closed() => Ok(()),
        }
    };
    // The owner learns of the end before the node does.
    drop((requests, answers));
    match ended {
        Ok(()) => {
            tracing::debug!(%pool, %member, %node, name, "closed the connection to the node of a member");
        }
        Err(error) => {
            let error = error.chain();
            tracing::warn!(%pool, %member, %node, name, error, "the connection to the node of a member ended");
        }
    }
    // A connection that is broken needs no end.
    let _ = timeout(CLOSE_MAX, writer.close()).await;
}
