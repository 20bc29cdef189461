//! The log's directory and its device: ring files, state files, and the errors of the device.
//!
//! Invariants:
//! - The code of this folder moves bytes. It does not interpret batches and does not decide where
//!   the log ends.

use block::Result;
use block::env::Disk;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

pub(crate) mod failure;
pub(crate) mod file_disk;
pub(crate) mod mounted;
pub(crate) mod state_files;
pub(crate) mod unreadable;
pub(crate) mod write_latency;

/// Is called, from any thread, when a request has ended.
pub(crate) type Notify = Arc<dyn Fn() + Send + Sync>;

/// The disk of an open log, whose completions step the log.
pub(crate) trait LogDisk: Disk {
    /// Makes writes to the file fail for lack of space from now on.
    #[cfg(test)]
    fn fill_up(&self, file: u32);

    /// Sets the callback of completions.
    fn set_notify(&self, notify: Notify);

    /// Sets how many direct writes to a fast device [`Disk::submit`] executes itself from now on;
    /// returns how many were left of the previous number.
    fn wait_for(&mut self, count: u32) -> u32;

    /// Returns the time of the last write to each file of the ring, by number.
    fn written_at(&self) -> HashMap<u32, Instant>;

    /// Returns the number of ring files that were made, including in earlier runs; `None` if no
    /// record exists.
    fn made_count(&self) -> Option<u32>;

    /// Makes sure that the record counts at least `count` files.
    ///
    /// # Errors
    /// `Io`.
    fn note_made(&self, count: u32) -> Result<()>;
}
