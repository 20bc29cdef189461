//! Questions and orders about the roles of nodes in a pool, over the service `pool` of the cluster.
//! The bytes are described in docs/format-peer.md, "Pool".
//!
//! Invariants:
//! - A connection carries one question and one reply.
//! - A node answers at once or refuses; nothing waits but the order to become a member, a measurement and
//!   a request of the command line.

use api::error::Failure;
use api::pool::MoveInfo;
use api::{Reply, Request};
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use cluster::{Cluster, Connection, NodeId, Service};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use tokio::time::timeout;
use uuid::Uuid;

/// Kind of the frame of a question or an order.
const QUESTION: u8 = 1;
/// Kind of the frame of a reply.
const REPLY: u8 = 2;
/// Longest time for an exchange. Chosen by hand: a member's first start makes files.
const EXCHANGE_MAX: Duration = Duration::from_secs(20);

/// What one node asks another about a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Question {
    /// Makes the node a member of the log of this pool, unless it is one.
    Join {
        /// The pool.
        pool: Uuid,
        /// Its name.
        name: String,
    },
    /// Asks for the node's role.
    Role {
        /// The pool.
        pool: Uuid,
    },
    /// Lets the node take the pool over, from the owner of this epoch.
    TakeOver {
        /// The pool.
        pool: Uuid,
        /// The epoch.
        epoch: u64,
    },
    /// A request of the command line to the owner of the pool.
    Ask {
        /// The pool.
        pool: Uuid,
        /// The request.
        request: Box<Request>,
    },
    /// Asks how the last hand-over from the node went.
    LastMove {},
    /// Lets the node measure its path to another one.
    Measure {
        /// Id of the other node.
        node: Uuid,
    },
}

impl Question {
    /// Longest time for which the node may think about it.
    fn time_max(&self) -> Duration {
        match self {
            Question::Ask { request, .. } => request.timeout(),
            _ => EXCHANGE_MAX,
        }
    }
}

/// The reply.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Answer {
    /// The node is a member, with this identity.
    Member {
        /// The identity.
        id: Uuid,
    },
    /// The node's role.
    Role(Role),
    /// The order is carried out in the background.
    Begun {},
    /// The reply to a request of the command line.
    Reply {
        /// The reply.
        reply: Box<Reply>,
    },
    /// A request of the command line failed.
    Failed {
        /// The failure.
        failure: Failure,
    },
    /// The last hand-over.
    Moved {
        /// How it went.
        info: MoveInfo,
    },
    /// The path to another node.
    Measured {
        /// Median time of a small request and its answer, in microseconds.
        round_trip_us: u64,
        /// Bytes that reached the other node in a second.
        bytes_per_second: u64,
    },
    /// The node refuses.
    Refused {
        /// The reason.
        text: String,
    },
}

/// The role of a node in a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Role {
    /// It owns the pool, or takes it over.
    Owner {
        /// It accepts clients.
        is_serving: bool,
    },
    /// It stores the log.
    Member {
        /// Milliseconds since it heard of an owner.
        silence_ms: u64,
    },
    /// It does not have the pool, or its member has failed.
    None {},
}

/// Asks a node. Gives up after some seconds.
pub(crate) async fn ask(cluster: &Cluster, node: NodeId, question: &Question) -> Result<Answer> {
    let exchange = async {
        let connection = cluster.connect(node, Service::Pool, None).await?;
        let name = connection.peer_name().to_owned();
        let (mut reader, mut writer) = connection.into_frames();
        writer.write(QUESTION, 0, &[encode(question)?]).await?;
        let frame = reader.read().await?;
        match frame.filter(|frame| frame.kind == REPLY) {
            Some(frame) => match decode(&frame.payload)? {
                Answer::Refused { text } => {
                    let what = format!("ask node {name}: {text}");
                    Err(Error::new(ErrorKind::Denied, what))
                }
                answer => Ok(answer),
            },
            None => {
                let what = format!("ask node {name}: it ended the connection");
                Err(Error::new(ErrorKind::Unavailable, what))
            }
        }
    };
    timeout(question.time_max(), exchange).await.unwrap_or_else(|_| {
        Err(Error::new(ErrorKind::Unavailable, "ask a node: it does not answer"))
    })
}

/// Answers the question of a connection.
pub(crate) async fn answer<F>(
    connection: Connection,
    reply: impl FnOnce(Question) -> F,
) -> Result<()>
where
    F: Future<Output = Result<Answer>>,
{
    let (mut reader, mut writer) = connection.into_frames();
    let frame = timeout(EXCHANGE_MAX, reader.read()).await.unwrap_or_else(|_| {
        Err(Error::new(ErrorKind::Unavailable, "answer a node: it sends no question"))
    })?;
    let Some(frame) = frame.filter(|frame| frame.kind == QUESTION) else { return Ok(()) };
    let answer = match decode::<Question>(&frame.payload) {
        Ok(question) => {
            let time_max = question.time_max();
            timeout(time_max, reply(question)).await.unwrap_or_else(|_| {
                Err(Error::new(ErrorKind::Unavailable, "answer a node: it took too long"))
            })
        }
        Err(error) => Err(error),
    };
    let answer = answer.unwrap_or_else(|error| Answer::Refused { text: error.chain() });
    let writing = async {
        writer.write(REPLY, 0, &[encode(&answer)?]).await?;
        writer.close().await
    };
    timeout(EXCHANGE_MAX, writing).await.unwrap_or_else(|_| {
        Err(Error::new(ErrorKind::Unavailable, "answer a node: it does not read"))
    })
}

fn encode(message: &impl Serialize) -> Result<Bytes> {
    let encoded = serde_json::to_vec(message);
    encoded
        .map(Bytes::from)
        .map_err(|error| Error::with_source(ErrorKind::Invalid, "encode a message", error))
}

fn decode<'a, T: Deserialize<'a>>(payload: &'a [u8]) -> Result<T> {
    serde_json::from_slice(payload).map_err(|error| {
        Error::with_source(ErrorKind::Unsupported, "read a message of another node", error)
    })
}
