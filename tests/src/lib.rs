//! The tools of the tests that treat spindle as a box: an NBD client, a guard for the daemon, a
//! model of readable contents, a crash tester, and stand-ins for the outside world.
//!
//! Invariants:
//! - Nothing here depends on the packages under test, as the tests check their reservations.
//! - Everything that is started here ends with the test, even when the test fails.
#![expect(
    clippy::disallowed_methods,
    reason = "real processes and sockets are tested in real time"
)]

pub mod azurite;
pub mod bucket;
pub mod cut;
pub mod daemon;
pub mod gcs;
pub mod http;
pub mod model;
pub mod nbd;
pub mod network;
pub mod place;
pub mod power;
pub mod process;
pub mod provider;
pub mod registers;
pub mod seed;
pub mod stamp;
pub mod store;
pub mod torture;

pub use daemon::Daemon;
pub use place::Place;
