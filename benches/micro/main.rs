//! The cost of one call: log append, overlay lookup, frame seal and open, map lookup and update,
//! destage, erasure codes.
//!
//! `cargo bench -p benches`; `cargo bench -p benches -- --test` runs each once. TMPDIR chooses the
//! disk of the log. If the unit is bytes, criterion prints MiB/s or GiB/s of one caller.
//!
//! Invariants:
//! - Data compresses about as well as that of a database, and no two parts are equal.
//! - Only the log touches a disk: the store is in memory, so that only spindle's own cost counts.
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

mod destage;
mod erasure;
mod frames;
mod log;
mod map;
mod plausible;

use criterion::{criterion_group, criterion_main};

criterion_group!(benches, log::bench, frames::bench, map::bench, destage::bench, erasure::bench);
criterion_main!(benches);
