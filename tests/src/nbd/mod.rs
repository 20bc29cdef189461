//! An NBD client for tests: it can do what a good client does, and what a bad one does.
//!
//! Invariants:
//! - Written from the protocol document alone and shares no line with the server it tests, so that
//!   both cannot be wrong in the same way.
//! - Every byte of a reply is checked; a server that breaks a rule fails the test.

pub mod client;
pub mod negotiate;
pub mod transport;
pub mod wire;

pub use client::{Connection, Reply};
pub use negotiate::Wanted;
pub use transport::{Endpoint, TlsClient};
