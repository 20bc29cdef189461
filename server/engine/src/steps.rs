//! The times of the steps of an opening: they add up to the pause that clients see when another node
//! takes a pool over.
//!
//! Invariant: the times of all steps add up to the time since the first one began.

use block::env::Clock;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The steps of an opening that have ended, with their times.
#[derive(Clone, Debug)]
pub struct Steps {
    clock: Arc<dyn Clock>,
    begun_at: Instant,
    last_at: Instant,
    ended: Vec<(&'static str, Duration)>,
}

impl Steps {
    /// Begins the first step.
    #[must_use]
    pub fn begin(clock: &Arc<dyn Clock>) -> Steps {
        let now = clock.now();
        Steps { clock: Arc::clone(clock), begun_at: now, last_at: now, ended: Vec::new() }
    }

    /// Ends a step, and begins the next one.
    pub fn end(&mut self, name: &'static str) {
        let now = self.clock.now();
        self.ended.push((name, now.saturating_duration_since(self.last_at)));
        self.last_at = now;
    }

    /// Time since the first step began, up to the end of the last one.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.last_at.saturating_duration_since(self.begun_at)
    }
}

/// Each step with its time: `store 12 ms, keys 3 ms`.
impl fmt::Display for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (name, time)) in self.ended.iter().enumerate() {
            let separator = if number == 0 { "" } else { ", " };
            write!(f, "{separator}{name} {} ms", time.as_millis())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::env::ManualClock;

    #[test]
    fn times_of_all_steps_add_up() {
        let clock = ManualClock::new();
        let shared: Arc<dyn Clock> = Arc::new(clock.clone());
        let mut steps = Steps::begin(&shared);
        clock.advance(Duration::from_millis(12));
        steps.end("store");
        steps.end("keys");
        clock.advance(Duration::from_millis(5));
        steps.end("log");
        clock.advance(Duration::from_millis(1));
        assert_eq!(steps.to_string(), "store 12 ms, keys 0 ms, log 5 ms");
        assert_eq!(steps.total(), Duration::from_millis(17));
    }
}
