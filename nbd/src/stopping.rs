//! The stop of a server, as its listeners and sessions see it.

use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Resolves when the server stops; returns the end of the grace period, or `None` if the server was
/// dropped, which is a stop without one.
pub(crate) async fn stopped(stop: &mut watch::Receiver<Option<Instant>>) -> Option<Instant> {
    stop.wait_for(Option::is_some).await.ok().and_then(|deadline| *deadline)
}

/// Returns the rest of a grace period that ends at `deadline`.
pub(crate) fn grace_left(deadline: Option<Instant>, now: Instant) -> Duration {
    deadline.map_or(Duration::ZERO, |deadline| deadline.saturating_duration_since(now))
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::env::{Clock, ManualClock};

    #[tokio::test]
    async fn grace_of_a_stop_runs_by_the_clock_of_the_server() {
        let clock = ManualClock::new();
        let sender = watch::Sender::new(None);
        let mut stop = sender.subscribe();
        sender.send_replace(Some(clock.now() + Duration::from_secs(10)));
        let deadline = stopped(&mut stop).await;
        clock.advance(Duration::from_secs(4));
        assert_eq!(grace_left(deadline, clock.now()), Duration::from_secs(6));
        clock.advance(Duration::from_secs(60));
        assert_eq!(grace_left(deadline, clock.now()), Duration::ZERO);
    }

    #[tokio::test]
    async fn server_that_is_dropped_gives_no_grace() {
        let sender = watch::Sender::new(None);
        let mut stop = sender.subscribe();
        drop(sender);
        assert_eq!(stopped(&mut stop).await, None);
        assert_eq!(grace_left(None, ManualClock::new().now()), Duration::ZERO);
    }
}
