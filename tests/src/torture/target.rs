//! What the crash tester needs of a server.
//!
//! Invariants:
//! - `kill` gives the server no chance: SIGKILL, or its equal for a server inside the test.

use crate::nbd::Endpoint;
use std::process::Command;
use std::time::Duration;

/// Ends the server at once, from any thread.
pub type Kill = Box<dyn Fn() + Send + Sync>;

/// Prepares a command of the program that asks the running server for something, from any thread.
pub type Ask = Box<dyn Fn(&[&str]) -> Command + Send + Sync>;

/// A server that can be killed and started again on what it left behind.
pub trait Target {
    /// Starts it and returns when it serves.
    ///
    /// # Errors
    /// When it does not come up, with all that is known of why.
    fn start(&mut self) -> Result<(), String>;

    /// Starts it and kills it after `delay`, served or not.
    ///
    /// # Errors
    /// When it ended by itself before.
    fn start_and_kill(&mut self, delay: Duration) -> Result<(), String>;

    /// Where the volume is served while it runs.
    fn endpoint(&self, volume: &str) -> Endpoint;

    /// A handle that kills the running server.
    fn killer(&self) -> Kill;

    /// Returns when the killed server is gone, with the armed fail point where that ended it.
    ///
    /// # Errors
    /// When it ended by itself in a way that nobody asked for.
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

    /// How commands reach it: for snapshots and clones.
    fn asker(&self) -> Option<Ask> {
        None
    }

    /// What it logged that nobody announced.
    fn complaints(&mut self) -> Vec<String> {
        Vec::new()
    }
}
