//! The error of a log whose files could not be written or synced.
//!
//! Invariants:
//! - Only errors of the running log's own writes and syncs count; such an error is final for the
//!   owner.

use block::{Error, ErrorKind};
use std::fmt;
use std::io;

/// The cause of such an error.
#[derive(Debug)]
struct Failed(io::Error);

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the disk of the write log failed")
    }
}

impl std::error::Error for Failed {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

/// Builds the error of a failed request to the log's disk.
pub(crate) fn error_of(what: String, error: io::Error) -> Error {
    Error::with_source(ErrorKind::Io, what, Failed(error))
}

/// Returns whether `error` says that the files of the write log could not be written or synced.
#[must_use]
pub fn is_log_failure(error: &Error) -> bool {
    let mut cause = std::error::Error::source(error);
    while let Some(source) = cause {
        if source.is::<Failed>() {
            return true;
        }
        cause = source.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_failure_is_recognized_through_added_contexts() {
        let eio = || io::Error::from(io::ErrorKind::WriteZero);
        let failed = error_of("sync the write log".into(), eio());
        assert!(is_log_failure(&failed) && is_log_failure(&failed.clone().context("serve")));
        let outer = Error::with_source(ErrorKind::Io, "serve the pool", failed);
        assert!(is_log_failure(&outer), "{}", outer.chain());
        assert!(!is_log_failure(&Error::with_source(ErrorKind::Io, "sync the cache", eio())));
    }
}
