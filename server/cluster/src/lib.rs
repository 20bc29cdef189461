//! The nodes of a cluster: who they are, which of them are admitted, and the connections between
//! them. `docs/format-peer.md` has the bytes.
//!
//! It owns the identity of a node, the signed list of admitted nodes, join tokens, mutual TLS and the
//! framing of messages. It refuses to know pools, logs and the contents of the messages: a service
//! registers a [`Handler`] and gets connections.
//!
//! Invariants:
//! - A connection carries data only between two nodes that are both on the list of the other; a
//!   stranger reaches nothing but the join service.
//! - A record of the list is believed only if signatures lead from it to the founder of the cluster.
//! - One process at a time has a node's files open.
//! - The private key and the secrets of tokens are in no log line, error or `Debug` output.
//!
//! ```text
//! identity    key pair and certificate of this node, in DIR/node/identity.json
//! home        the lock of DIR/node
//! admission   the list: signed records, their merge, and which of them count
//! membership  the list of this process: on disk, in memory, and the watchers of its changes
//! links       the open connections of each node, so that removal closes them
//! token       a join token as one word
//! tls         configurations that accept admitted nodes only
//! connection  dialing, accepting, the hello, frames
//! join        both sides of joining
//! exchange    both sides of the exchange of lists
//! probe       both sides of a measurement of the path between two nodes
//! cluster     the whole, as a process runs it
//! ```
#![forbid(unsafe_code)]

pub mod admission;
mod cluster;
pub mod connection;
mod exchange;
mod home;
pub mod identity;
mod join;
mod links;
mod membership;
pub mod probe;
mod seeded_bugs;
mod tls;
pub mod token;

pub use admission::{Conflict, NewNode, Node};
pub use cluster::{Cluster, Environment, Handler, WeakCluster};
pub use connection::{Connection, Frame, FrameReader, FrameWriter, PeerStream, Service};
pub use home::is_member;
pub use identity::{ClusterId, NodeId, node_dir};
pub use join::TOKEN_LIFE_SECONDS;
pub use probe::Measurement;
pub use token::Token;
