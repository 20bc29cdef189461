//! Control of a pool: its object store, its owner, its keys, and the directory of the node that
//! opens it.
//!
//! Owns the access to object stores (settings, credentials, probes of the guarantees that are
//! relied on), the chains of numbered documents, the manifest that says who owns a pool, the key
//! ring, and the identity in a node's directory.
//!
//! Refuses to know volumes, snapshots, the write log and the front ends: it decides who may open a
//! pool and with which keys, never what the pool contains.
//!
//! Invariants:
//! - A document takes effect by the creation of an object that was absent; of a chain, only the
//!   highest number counts.
//! - No answer of the store is relied on that a wrong or late store could give: creations whose
//!   outcome is unknown are read back.
//! - No secret reaches a log line, an error or a document in clear.

pub mod chain;
pub mod keys;
pub mod manifest;
pub mod store;
