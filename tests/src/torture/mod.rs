//! The crash tester: random requests, a kill at a hostile moment, a restart, and a check of every
//! sector, again and again from one seed.
//!
//! Invariants:
//! - It knows the server only through NBD, signals and restarts, so it tests the shipped binary.
//! - Every decision comes from the seed; only the timing of the machine does not.
//! - It is itself tested, against servers that are broken on purpose (see [`toy`]).

pub mod profile;
pub mod rounds;
pub mod states;
pub mod target;
pub mod toy;
pub mod worker;

pub use profile::Profile;
pub use rounds::{Plan, Totals, VolumePlan, torture};
pub use target::Target;
