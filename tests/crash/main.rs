//! Crash tests: a process killed at any moment keeps what it acknowledged.
//!
//! Invariants:
//! - The tester is proved against broken servers before it is believed about spindle.

mod aside;
mod copies;
mod jobs;
mod spindle;
mod toys;
