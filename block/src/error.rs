//! The only error type that crosses the border of a package.
//!
//! Invariants:
//! - [`ErrorKind`] tells the caller what to do; the context and the source tell a person why.
//! - The source is kept as it is, never formatted into a string.

use std::error::Error as StdError;
use std::fmt;

/// What the caller should do about it. Exhaustive on purpose: a kind that is added breaks every
/// front end at compile time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request is wrong (alignment, range, size): do not send it again.
    Invalid,
    /// The operation is not offered by this export (for example a fast zero that cannot be fast).
    Unsupported,
    /// The export is read-only, or the client may not do this.
    Denied,
    /// No space: free some, then retry.
    Full,
    /// The named thing does not exist.
    NotFound,
    /// The named thing exists already, or is in use.
    Busy,
    /// Another epoch owns the pool, or another incarnation the volume: attach anew.
    Fenced,
    /// Something outside does not answer (object store, replica): may work later.
    Unavailable,
    /// One object of the store cannot be read, again and again, while others can: go on with the
    /// others. It may work later.
    Unreadable,
    /// Bytes at rest or on the wire failed verification: never retried, never returned.
    Corrupt,
    /// A local device failed (log or cache disk).
    Io,
}

/// Result of anything that can fail across a package border.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A kind, what was being done (verb + object, with names and offsets), and the cause.
pub struct Error {
    kind: ErrorKind,
    context: String,
    source: Option<std::sync::Arc<dyn StdError + Send + Sync>>,
}

impl Error {
    /// `context` is verb + object, for example "read segment 17, frame 3: checksum differs".
    pub fn new(kind: ErrorKind, context: impl Into<String>) -> Self {
        Error { kind, context: context.into(), source: None }
    }

    /// As [`Error::new`], keeping the cause.
    pub fn with_source(
        kind: ErrorKind,
        context: impl Into<String>,
        source: impl StdError + Send + Sync + 'static,
    ) -> Self {
        Error { kind, context: context.into(), source: Some(std::sync::Arc::new(source)) }
    }

    /// What the caller should do.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The same cause with more words in front: "attach volume db: open map: …".
    #[must_use]
    pub fn context(mut self, outer: impl fmt::Display) -> Self {
        self.context = format!("{outer}: {}", self.context);
        self
    }

    /// The whole chain of causes in one line, for logs and `-o text`.
    #[must_use]
    pub fn chain(&self) -> String {
        let mut line = self.to_string();
        let mut cause = self.source();
        while let Some(source) = cause {
            line.push_str(": ");
            line.push_str(&source.to_string());
            cause = source.source();
        }
        line
    }
}

/// Errors are answered to several waiters at once (a batch, a single-flight fetch), so they clone.
impl Clone for Error {
    fn clone(&self) -> Self {
        Error { kind: self.kind, context: self.context.clone(), source: self.source.clone() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.context)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.chain())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|source| &**source as &(dyn StdError + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chain_keeps_every_cause() {
        let io = std::io::Error::other("disk on fire");
        let error = Error::with_source(ErrorKind::Io, "write log batch 7", io).context("pool p");
        assert_eq!(error.clone().chain(), "pool p: write log batch 7: disk on fire");
        assert_eq!(error.kind(), ErrorKind::Io);
    }
}
