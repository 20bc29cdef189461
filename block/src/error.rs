//! The error type that crosses the borders of packages.
//!
//! Invariants:
//! - [`ErrorKind`] tells the caller what to do; the context and the source tell a person why.
//! - The source is kept as an error, never formatted into a string.
//! - A context is a bare verb and its object ("open log /dir"), or a sentence with the object as its
//!   subject ("the passphrase file is empty"). It never begins with "could not": the code that
//!   prints the chain states the failure. A log line reads "could not VERB OBJECT" and has the chain
//!   in its field `error`; the command line prints `spindle: ` and then the chain, unchanged.

use std::error::Error as StdError;
use std::fmt;

/// The caller's instruction. Exhaustive on purpose: a new kind breaks every front end at compile
/// time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request is wrong (alignment, range, size): do not send it again.
    Invalid,
    /// This export does not support the operation (for example a fast zero that would be slow).
    Unsupported,
    /// The export is read-only, or the client is not permitted to do this.
    Denied,
    /// No space: free some, then retry.
    Full,
    /// The named object does not exist.
    NotFound,
    /// The named object already exists, or is in use.
    Busy,
    /// Another epoch owns the pool, or another incarnation owns the volume: attach again.
    Fenced,
    /// An external service does not answer (object store, replica): a retry may succeed later.
    Unavailable,
    /// One object of the store repeatedly fails to be read while others succeed: continue with the
    /// others. A retry may succeed later.
    Unreadable,
    /// Bytes at rest or on the wire failed verification: do not retry, and do not return them.
    Corrupt,
    /// A local device failed (log or cache disk).
    Io,
}

/// Result of an operation that can fail across the border of a package.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A kind, the failed operation (verb + object, with names and offsets), and the cause.
pub struct Error {
    kind: ErrorKind,
    context: String,
    source: Option<std::sync::Arc<dyn StdError + Send + Sync>>,
}

impl Error {
    /// Creates an error. `context` is verb + object, for example "read segment 17, frame 3:
    /// checksum differs".
    pub fn new(kind: ErrorKind, context: impl Into<String>) -> Self {
        Error { kind, context: context.into(), source: None }
    }

    /// Like [`Error::new`], but keeps the cause.
    pub fn with_source(
        kind: ErrorKind,
        context: impl Into<String>,
        source: impl StdError + Send + Sync + 'static,
    ) -> Self {
        Error { kind, context: context.into(), source: Some(std::sync::Arc::new(source)) }
    }

    /// Returns the kind, which tells the caller what to do.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Prefixes the context: "attach volume db: open map: …". The cause stays.
    #[must_use]
    pub fn context(mut self, outer: impl fmt::Display) -> Self {
        self.context = format!("{outer}: {}", self.context);
        self
    }

    /// Returns the whole chain of causes as one line, for logs and `-o text`.
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

/// Several waiters may receive the same error (a batch, a single-flight fetch), so errors can be
/// cloned.
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
