//! Crash tests: a process that is killed at any moment keeps the writes that it acknowledged.
//!
//! Invariants:
//! - The tester is proved against broken servers before its verdict on spindle counts.
#![expect(
    clippy::disallowed_methods,
    reason = "real processes and sockets are tested in real time"
)]

mod copies;
mod jobs;
mod spindle;
mod stalled;
mod toys;
