//! Crash tests: a process that is killed at any moment keeps the writes that it acknowledged.
//!
//! Invariants:
//! - The tester is proved against broken servers before its verdict on spindle counts.

mod aside;
mod copies;
mod jobs;
mod spindle;
mod toys;
