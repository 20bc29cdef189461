//! The line to a client, as far as it tells whether the client is still there.

use std::fmt;
use std::time::Duration;

/// The silence of a client that should have answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Silence {
    /// Time since the last packet from the client.
    pub lasts: Duration,
    /// Remaining time until the connection is closed, unless the client answers.
    pub gives_up_in: Duration,
}

impl fmt::Display for Silence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (lasts, rest) = (self.lasts.as_secs(), self.gives_up_in.as_secs());
        write!(f, "silent for {lasts} s, given up within {rest} s")
    }
}

/// A connection to a client. The caller may outlive the connection.
pub trait Line: fmt::Debug + Send + Sync + 'static {
    /// Whether the connection has ended, or its client has closed it or its sending direction.
    fn is_over(&self) -> bool;

    /// Returns the silence of the client, or `None` if it answers or has nothing to answer.
    fn silence(&self) -> Option<Silence>;
}
