//! The tools of the tests that treat spindle as a box: an NBD client, a guard for the daemon, a
//! model of what may be read, a crash tester, and stand-ins for the world outside.
//!
//! Invariants:
//! - Nothing here depends on the packages under test: what they say of themselves is what is
//!   being checked.
//! - Whatever is started here ends with the test, also when that fails.

pub mod azurite;
pub mod bucket;
pub mod cut;
pub mod daemon;
pub mod gcs;
pub mod http;
pub mod model;
pub mod nbd;
pub mod place;
pub mod power;
pub mod process;
pub mod provider;
pub mod seed;
pub mod stamp;
pub mod store;
pub mod torture;

pub use daemon::Daemon;
pub use place::Place;
