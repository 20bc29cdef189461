//! A log that is whole as far as it goes and goes less far than it should.
//!
//! Invariants:
//! - Only what a person can mend by bringing files back, or give up, counts: not damage within a file.

use crate::contents::LogContents;
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

/// The error of opening such a log.
pub(crate) fn error_of(what: String, contents: LogContents) -> Error {
    Error::with_source(ErrorKind::Corrupt, what, Incomplete(contents))
}

/// Whether `error` says that the log lacks its newest part: somebody has to bring that back, or to give
/// the log up.
#[must_use]
pub fn is_incomplete(error: &Error) -> bool {
    std::error::Error::source(error).is_some_and(|source| source.is::<Incomplete>())
}
