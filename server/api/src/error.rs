//! Errors as a client sees them: a kind, which says what to do, and a sentence for a person.
//!
//! Invariant: every kind of [`ErrorKind`] has one name, and the name leads back to the kind.

use block::{Error, ErrorKind};
use serde::{Deserialize, Serialize};

const KINDS: [ErrorKind; 11] = [
    ErrorKind::Invalid,
    ErrorKind::Unsupported,
    ErrorKind::Denied,
    ErrorKind::Full,
    ErrorKind::NotFound,
    ErrorKind::Busy,
    ErrorKind::Fenced,
    ErrorKind::Unavailable,
    ErrorKind::Unreadable,
    ErrorKind::Corrupt,
    ErrorKind::Io,
];

/// Returns the name of a kind, as in replies and in `-o json`.
#[must_use]
pub fn kind_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Invalid => "invalid",
        ErrorKind::Unsupported => "unsupported",
        ErrorKind::Denied => "denied",
        ErrorKind::Full => "full",
        ErrorKind::NotFound => "not_found",
        ErrorKind::Busy => "busy",
        ErrorKind::Fenced => "fenced",
        ErrorKind::Unavailable => "unavailable",
        ErrorKind::Unreadable => "unreadable",
        ErrorKind::Corrupt => "corrupt",
        ErrorKind::Io => "io",
    }
}

/// A request that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Name of the kind, see [`kind_name`].
    pub kind: String,
    /// The failed operation and its causes, in one line.
    pub message: String,
}

impl From<&Error> for Failure {
    fn from(error: &Error) -> Failure {
        Failure { kind: kind_name(error.kind()).to_owned(), message: error.chain() }
    }
}

impl From<Failure> for Error {
    /// An unknown kind becomes `Io`.
    fn from(failure: Failure) -> Error {
        let kind = KINDS.into_iter().find(|kind| kind_name(*kind) == failure.kind);
        Error::new(kind.unwrap_or(ErrorKind::Io), failure.message)
    }
}

/// The document that a command prints with `-o json` if it failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureDocument {
    /// The failure.
    pub error: Failure,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_the_wire() {
        for kind in KINDS {
            let failure = Failure::from(&Error::new(kind, "x"));
            let text = serde_json::to_string(&failure).unwrap();
            let back: Failure = serde_json::from_str(&text).unwrap();
            assert_eq!(Error::from(back).kind(), kind);
        }
    }
}
