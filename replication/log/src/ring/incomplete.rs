//! A log that is intact but ends earlier than it should.
//!
//! Invariants:
//! - Only a loss that an operator can repair by bringing files back, or accept, counts. Damage
//!   within a file does not.

use crate::ring::contents::LogContents;
use block::{Error, ErrorKind};
use std::fmt;

/// The cause of such an error.
#[derive(Debug)]
struct Incomplete(LogContents);

impl fmt::Display for Incomplete {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "this is an older copy of the log, or it has lost its newest files; nothing was changed; keep \
             it: {}",
            self.0
        )
    }
}

impl std::error::Error for Incomplete {}

/// Builds the error of opening such a log.
pub(crate) fn error_of(what: String, contents: LogContents) -> Error {
    Error::with_source(ErrorKind::Corrupt, what, Incomplete(contents))
}

/// Returns whether `error` says that the log lacks its newest part. An operator has to bring that
/// part back or give the log up.
#[must_use]
pub fn is_incomplete(error: &Error) -> bool {
    std::error::Error::source(error).is_some_and(|source| source.is::<Incomplete>())
}
