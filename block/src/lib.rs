//! The leaf vocabulary of spindle: units, the block device, errors, sealing, and the traits of the
//! outside world.
//!
//! Invariants:
//! - No async runtime, and no `unsafe` but the call that reads a clock of the kernel: every other package may depend on this one.
//! - No I/O, except in [`durable_file`] and in the system's implementations of [`mod@env`].
//! - A word has one meaning here and everywhere (see docs/glossary.md).
#![deny(unsafe_code)]

pub mod buffers;
pub mod conditions;
pub mod device;
pub mod durable_file;
pub mod env;
pub mod error;
pub mod hex;
pub mod jobs;
pub mod line;
pub mod quantities;
pub mod seal;
pub mod seeded_bugs;
pub mod simulated;
pub mod units;

pub use buffers::{PayloadBuffer, PayloadBuffers};
pub use conditions::{Condition, ConditionKind, Conditions};
pub use device::{AllocationExtent, BlockDevice, Limits, WriteFlags, ZeroFlags};
pub use error::{Error, ErrorKind, Result};
pub use jobs::Job;
pub use line::{Line, Silence};
pub use units::{Epoch, Lsn, Position, VolumeId};
