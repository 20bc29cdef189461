//! Data nodes: the drives of other machines as stores of fragments.
//!
//! A data node stores objects of pools on its drives and does nothing clever: create, read a range, tell the
//! size, delete, list, verify checksums. It owns its drives, the fence of epochs, the messages and both of their
//! ends. It refuses to know pools and segments: their owner makes an object store of it. `docs/format-peer.md` has
//! the bytes.
//!
//! Invariants:
//! - A node serves admitted nodes of its cluster only, and each pool has a folder of its own on a drive.
//! - A node serves a folder only to nodes that prove that they have the key of its pool, which it has not.
//! - Nothing is changed for an owner once a later one has come: the node itself refuses, and remembers it.
//! - An unmounted drive is a drive that is away, never an empty one, and is never written.
//!
//! ```text
//! messages    requests and answers as the bodies of frames
//! fence       the newest epoch that a folder has seen, and the key of its pool
//! proof       the proof that an owner has that key
//! check       a fragment's checksums, verified where it is
//! drive       the drives of this node: identity, space, the folders of pools
//! wear        what `smartctl` says of a disk
//! smart       asks the disks below a directory with it, from time to time
//! service     the node's side of a connection
//! client      the owner's side, as an object store
//! ```
#![forbid(unsafe_code)]

mod check;
mod client;
mod drive;
mod fence;
pub mod messages;
mod proof;
mod seeded_bugs;
mod service;
mod smart;
mod wear;

pub use client::{NodeObjects, NodePlace, drives_of};
pub use drive::{Drive, DriveOptions, DriveState, Drives};
pub use proof::PoolSigner;
pub use service::DataService;
pub use smart::WearWatch;

#[cfg(test)]
mod tests;
