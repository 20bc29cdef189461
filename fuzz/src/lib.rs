//! The loop of the fuzz targets: it runs a decoder on mutated inputs and reports the first input
//! that breaks a promise, with the seed that leads to it.
//!
//! It owns the mutators, the kept inputs in `corpus/` and the report. It refuses to know any format:
//! a target brings its valid inputs, the repair of their checksums and seals, and the decoder.
//!
//! Invariants:
//! - A run is decided by its seed, which is printed: the same seed and the same code give the same
//!   inputs in the same order.
//! - Kept inputs run before all others.
//! - A panic, also one that a task of a runtime on the same thread swallowed, and an allocation
//!   beyond the target's bound end the run.
//! - A run that never got an input accepted fails: it would only prove that a checksum works.

mod allocation;
pub mod corpus;
pub mod mutate;
mod run;

pub use allocation::{AllocationBound, CountingAllocator, peak_of};
pub use run::{Budget, Failure, Outcome, Run, Target};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
