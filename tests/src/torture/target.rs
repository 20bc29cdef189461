//! The interface between the crash tester and a server.
//!
//! Invariants:
//! - `kill` gives the server no chance: SIGKILL, or its equivalent for a server inside the test.

use crate::nbd::Endpoint;
use std::process::Command;
use std::time::Duration;

/// Ends the server at once, from any thread.
pub type Kill = Box<dyn Fn() + Send + Sync>;

/// Prepares a command of the program for the running server, from any thread.
pub type Ask = Box<dyn Fn(&[&str]) -> Command + Send + Sync>;

/// A server that can be killed, and started again with the data that it left behind.
pub trait Target {
    /// Starts it and returns when it serves.
    ///
    /// # Errors
    /// When it does not come up, with all that is known about the cause.
    fn start(&mut self) -> Result<(), String>;

    /// Starts it and kills it after `delay`, whether it serves by then or not.
    ///
    /// # Errors
    /// When it ended earlier.
    fn start_and_kill(&mut self, delay: Duration) -> Result<(), String>;

    /// Returns the volume's address while the server runs.
    fn endpoint(&self, volume: &str) -> Endpoint;

    /// Returns a handle that kills the running server.
    fn killer(&self) -> Kill;

    /// Waits until the killed server is gone; returns the armed fail point if it ended there.
    ///
    /// # Errors
    /// When it ended on its own in an unexpected way.
    fn reap(&mut self) -> Result<Option<String>, String>;

    /// Begins an orderly stop.
    fn begin_stop(&mut self);

    /// Waits for the end of the orderly stop.
    ///
    /// # Errors
    /// When it does not end, or ends with an error.
    fn finish_stop(&mut self) -> Result<(), String>;

    /// Arms a fail point, a place where the server ends its process, for the next start.
    fn arm(&mut self, _fail_point: Option<String>) {}

    /// Returns the way for commands to reach it, for snapshots and clones.
    fn asker(&self) -> Option<Ask> {
        None
    }

    /// Returns the unannounced warnings and errors in its log.
    fn complaints(&mut self) -> Vec<String> {
        Vec::new()
    }
}
