//! The log's directory and its device: ring files, state files, and the errors of the device.
//!
//! Invariants:
//! - The code of this folder moves bytes. It does not interpret batches and does not decide where
//!   the log ends.

pub(crate) mod failure;
pub(crate) mod file_disk;
pub(crate) mod mounted;
pub(crate) mod state_files;
pub(crate) mod unreadable;
pub(crate) mod write_latency;
