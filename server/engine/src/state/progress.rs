//! The work of the destage job so far, and the volumes that it left behind.

use std::collections::BTreeMap;

/// Work done by the job so far, for status and metrics.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct DestageProgress {
    /// Windows made durable in the store.
    pub window_count: u64,
    /// Bytes of volume data that these windows held.
    pub destaged_bytes: u64,
    /// Segments written.
    pub segment_count: u64,
    /// Bytes of these segments.
    pub stored_bytes: u64,
    /// Time spent, in milliseconds.
    pub busy_ms: u64,
    /// Reason why the latest attempt failed, until one succeeds.
    pub failure: Option<String>,
    /// Attempts that failed.
    pub failure_count: u64,
    /// Volumes that are behind the others in the store.
    pub stalled: BTreeMap<u32, StalledVolume>,
}

/// A volume that could not be destaged at the last attempt.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct StalledVolume {
    /// First LSN of the volume that the store may lack.
    pub since_lsn: u64,
    /// Bytes of the volume that only the log holds.
    pub log_bytes: u64,
    /// Bytes of the volume that only spill files hold.
    pub spill_bytes: u64,
    /// Its spill files.
    pub spill_file_count: u64,
    /// The volume has too many bytes there and accepts no more writes.
    pub is_refusing_writes: bool,
    /// A spill file of the volume is missing here: it accepts no requests.
    pub is_closed: bool,
    /// The reason for both.
    pub reason: String,
}
