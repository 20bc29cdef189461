//! How much of a log the data tier lacks, as its batch headers tell: for messages about a log that does
//! not open, which may be the only copy of what it holds.
//!
//! Invariants:
//! - Never less than there is: what is overwritten within the log, and batches of a life that was cut
//!   off, count too.

use crate::format::batch::BatchHeader;
use block::Lsn;
use std::fmt;

/// What a log holds beyond an LSN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogContents {
    /// Entries up to it are in the data tier, and are not counted.
    pub stored_lsn: Lsn,
    /// Newest entry of any batch whose header can be read.
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
