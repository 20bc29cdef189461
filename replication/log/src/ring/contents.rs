//! How much of a log is missing from the data tier, according to its batch headers. Used in
//! messages about a log that does not open and may be the only copy of its data.
//!
//! Invariants:
//! - The figures are upper bounds: they include entries overwritten later in the log, and batches
//!   of a run that was cut off.

use crate::format::batch::BatchHeader;
use block::Lsn;
use std::fmt;

/// The contents of a log beyond an LSN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogContents {
    /// Entries up to this LSN are in the data tier and are not counted.
    pub stored_lsn: Lsn,
    /// Newest entry of any batch with a readable header.
    pub last_lsn: Lsn,
    /// Entries beyond [`LogContents::stored_lsn`], at most.
    pub entry_count: u64,
    /// Bytes of their payloads, at most.
    pub payload_bytes: u64,
}

impl LogContents {
    pub(crate) fn beyond(stored_lsn: Lsn) -> Self {
        LogContents { stored_lsn, ..LogContents::default() }
    }

    pub(crate) fn add(&mut self, header: &BatchHeader) {
        let last_lsn = header.last_lsn();
        self.last_lsn = self.last_lsn.max(last_lsn);
        let beyond = last_lsn.0.saturating_sub(self.stored_lsn.0);
        let entry_count = u64::from(header.entry_count).min(beyond);
        if entry_count > 0 {
            self.entry_count += entry_count;
            self.payload_bytes += u64::from(header.payload_bytes);
        }
    }
}

impl fmt::Display for LogContents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LogContents { stored_lsn, last_lsn, entry_count, payload_bytes } = self;
        match entry_count {
            0 => write!(
                f,
                "it holds no entries after LSN {stored_lsn}, up to which the store has all"
            ),
            _ => write!(
                f,
                "it holds up to {entry_count} entries after LSN {stored_lsn} (to LSN {last_lsn}, at most \
                 {payload_bytes} bytes of data) that are not in the store"
            ),
        }
    }
}
