//! NBD front end: a server of the Network Block Device protocol for any [`block::BlockDevice`], and
//! block devices on this machine through the kernel's NBD client.
//!
//! Invariants:
//! - Bytes from a client are untrusted input: they never panic the process, make it reserve memory
//!   beyond [`ServerOptions::payload_memory_bytes`], or touch data outside the request's range.
//! - A reply is sent only after the device has answered. Requests of a connection run concurrently
//!   and are answered in the order in which they finish.
//! - The specification is `doc/proto.md` of github.com/NetworkBlockDevice/nbd. Comments call it
//!   "spec" and give the title of the section.
//!
//! ```text
//! server    listeners, limits, stop
//! negotiate the handshake's I/O       handshake  the same as a pure state machine
//! session   requests and replies      request    checks of one request (pure)
//! wire      bytes <-> types (pure)    errno      ErrorKind -> NBD error
//! memory    payload bytes, bounded    tls        certificates, names, STARTTLS
//! line      state of a connection     places     limits on the number of connections
//! kernel    devices of this machine through the kernel's nbd driver
//! client    negotiation as a client, for devices whose volume another machine serves
//! ```
#![deny(unsafe_code)]

pub mod client;
mod errno;
mod exports;
pub mod handshake;
pub mod kernel;
mod line;
mod memory;
mod negotiate;
mod outbox;
mod passed;
mod places;
pub mod request;
mod server;
mod session;
mod stopping;
mod stream;
pub mod tls;
pub mod wire;

pub use exports::{Access, Client, Export, Exports, Over, Peer};
pub use line::{CLIENT_TIMEOUT, Line};
pub use passed::Passage;
pub use places::RESERVED_COUNT;
pub use server::{
    KernelConnection, Listener, Place, Server, ServerOptions, Status, check_listen_address,
};
pub use session::Counters;
pub use stream::Plain;
pub use tls::{TlsMode, TlsOptions};
