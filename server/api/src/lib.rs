//! The typed requests, replies and errors of the daemon, as the admin socket, the command line and
//! other front ends exchange them.
//!
//! It owns the names and the JSON of every field that a client sees, one module a noun. It refuses
//! to know the engine, the object store, files, sockets, clap and any async runtime: server's
//! handlers convert between these types and the engine's.
//!
//! Invariants:
//! - Every message carries [`VERSION`]. A message of another version is refused with an error that
//!   says so, whatever else is in it.
//! - A request is refused if it has an unknown field.
//! - A reply is also the document that `-o json` prints.
//! - A secret is a [`key::Secret`]: it is wiped when it is dropped, and `Debug` does not print it.
//! - Times are seconds since 1970 UTC; sizes are bytes.
#![forbid(unsafe_code)]

pub mod config;
pub mod copy;
pub mod data;
pub mod demo;
pub mod device;
pub mod dnode;
pub mod doctor;
pub mod drill;
pub mod error;
pub mod key;
pub mod member;
pub mod message;
pub mod node;
pub mod pool;
pub mod reply;
pub mod request;
pub mod restore;
pub mod scrub;
pub mod snapshot;
pub mod status;
pub mod volume;

pub use error::Failure;
pub use message::VERSION;
pub use reply::Reply;
pub use request::Request;

/// Tells serde to skip a flag that is not set.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
pub(crate) fn is_false(flag: &bool) -> bool {
    !*flag
}
