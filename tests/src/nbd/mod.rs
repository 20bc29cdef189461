//! An NBD client for tests, which can behave well or badly.
//!
//! Invariants:
//! - It is written from the protocol document alone and shares no line with the server under test,
//!   so that both cannot be wrong in the same way.
//! - It checks every byte of a reply; a server that breaks a rule fails the test.

pub mod client;
pub mod negotiate;
pub mod transport;
pub mod wire;

pub use client::{Connection, Reply};
pub use negotiate::Wanted;
pub use transport::{Endpoint, TlsClient};
