//! Limits on the number of connections.
//!
//! Invariants:
//! - TCP clients never take all places: some are reserved for the unix socket and the kernel's
//!   devices, and some of these for the kernel's devices alone.
//! - On each listener, negotiating connections take only part of the places, so clients that send
//!   nothing cannot keep out other clients.

use block::conditions::{ConditionKind, Conditions, Report};
use block::env::Clock;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Places beyond the configured ones for the unix socket and the kernel's devices. Chosen by hand:
/// a few clients, or one device with all its connections.
pub(crate) const LOCAL_RESERVE: usize = 16;
/// Further places for the kernel's devices alone. Chosen by hand: one device with all its
/// connections.
pub(crate) const KERNEL_RESERVE: usize = 16;
/// Connections that may exist beyond [`crate::ServerOptions::connection_count_max`].
pub const RESERVED_COUNT: usize = LOCAL_RESERVE + KERNEL_RESERVE;
/// Fraction of the configured places that may negotiate on one listener: one in this many, rounded
/// up. Chosen by hand: half is enough for a hundred clients that connect at once.
const NEGOTIATING_PART: usize = 2;
/// Silent clients get less time when one in this many of the negotiating places is taken. Chosen by
/// hand.
const PRESSED_PART: usize = 2;
/// The condition ends after this time without a refusal. Chosen by hand: a refused client retries
/// sooner.
const REFUSALS_OVER: Duration = Duration::from_secs(30);

/// The origin of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    Tcp,
    Unix,
    Kernel,
}

/// The places of a server.
#[derive(Debug)]
pub(crate) struct Places {
    configured_count: usize,
    count: AtomicUsize,
}

/// A place; dropping it releases it.
#[derive(Debug)]
pub(crate) struct Taken(Arc<Places>);

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Places {
    pub(crate) fn new(configured_count: usize) -> Arc<Places> {
        Arc::new(Places { configured_count, count: AtomicUsize::new(0) })
    }

    /// The number of places, reserves included.
    pub(crate) fn count_max(&self) -> usize {
        self.configured_count + RESERVED_COUNT
    }

    /// The number of places in use.
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Takes a place, or returns `None` if none is left for this kind of connection.
    pub(crate) fn take(self: &Arc<Self>, from: From) -> Option<Taken> {
        let count_max = self.configured_count
            + match from {
                From::Tcp => 0,
                From::Unix => LOCAL_RESERVE,
                From::Kernel => RESERVED_COUNT,
            };
        let more = |count| (count < count_max).then_some(count + 1);
        let taken = self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.is_ok().then(|| Taken(Arc::clone(self)))
    }
}

/// The negotiating connections of one listener.
#[derive(Debug)]
pub(crate) struct Negotiations {
    count: AtomicUsize,
    count_max: usize,
}

/// A negotiation in progress; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Negotiating(Arc<Negotiations>);

impl Drop for Negotiating {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Negotiating {
    /// Whether enough connections negotiate to give silent clients less time.
    pub(crate) fn is_pressed(&self) -> bool {
        let Negotiations { count, count_max } = &*self.0;
        count.load(Ordering::Relaxed) >= count_max.div_ceil(PRESSED_PART)
    }
}

impl Negotiations {
    pub(crate) fn new(configured_count: usize) -> Arc<Negotiations> {
        let count_max = configured_count.div_ceil(NEGOTIATING_PART);
        Arc::new(Negotiations { count: AtomicUsize::new(0), count_max })
    }

    /// Begins a negotiation, or returns `None` if there are too many.
    pub(crate) fn begin(self: &Arc<Self>) -> Option<Negotiating> {
        let more = |count| (count < self.count_max).then_some(count + 1);
        let begun = self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        begun.is_ok().then(|| Negotiating(Arc::clone(self)))
    }
}

/// Raises the condition for refused connections of one listener. Dropping it clears the condition.
#[derive(Debug)]
pub(crate) struct Refusals {
    conditions: Conditions,
    listener: String,
    count: u64,
    newest: Option<Instant>,
    clock: Arc<dyn Clock>,
}

impl Refusals {
    pub(crate) fn new(conditions: Conditions, listener: String, clock: Arc<dyn Clock>) -> Refusals {
        Refusals { conditions, listener, count: 0, newest: None, clock }
    }

    /// Records a refused connection, with its cause and the remedy.
    pub(crate) fn add(&mut self, why: &str, remedy: &str) {
        self.count += 1;
        self.newest = Some(self.clock.now());
        let what = format!(
            "connections to {} are refused ({} since the start of the daemon): {why}",
            self.listener, self.count
        );
        let report = Report::new(what, "new clients get no connection there", remedy);
        self.conditions.raise(ConditionKind::ConnectionsRefused, &self.listener, report);
    }

    /// Resolves when the condition has ended.
    pub(crate) async fn over(&self) {
        match self.left() {
            Some(left) => tokio::time::sleep(left).await,
            None => std::future::pending().await,
        }
    }

    /// Returns the time until the condition ends; `None` if it is not raised.
    fn left(&self) -> Option<Duration> {
        let end = self.newest? + REFUSALS_OVER;
        Some(end.saturating_duration_since(self.clock.now()))
    }

    /// Clears the condition.
    pub(crate) fn end(&mut self) {
        self.newest = None;
        self.conditions.clear(ConditionKind::ConnectionsRefused, &self.listener);
    }
}

impl Drop for Refusals {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::env::ManualClock;

    #[test]
    fn local_clients_and_the_kernel_have_reserved_places() {
        let places = Places::new(3);
        let take = |from, count: usize| -> Vec<Taken> {
            (0..count).map_while(|_| places.take(from)).collect()
        };
        let remote = take(From::Tcp, 100);
        assert_eq!(remote.len(), 3);
        let local = take(From::Unix, 100);
        assert_eq!(local.len(), LOCAL_RESERVE);
        let kernel = take(From::Kernel, 100);
        assert_eq!(kernel.len(), KERNEL_RESERVE);
        assert_eq!(places.count(), places.count_max());
        drop(local);
        assert!(places.take(From::Tcp).is_none());
        drop((remote, kernel));
        assert_eq!(take(From::Tcp, 100).len(), 3);
    }

    #[test]
    fn negotiations_have_limited_places_and_end_sooner_under_pressure() {
        let negotiations = Negotiations::new(8);
        let first = negotiations.begin().unwrap();
        assert!(!first.is_pressed());
        let second = negotiations.begin().unwrap();
        assert!(first.is_pressed());
        let rest: Vec<_> = (0..9).map_while(|_| negotiations.begin()).collect();
        assert_eq!(rest.len(), 2);
        drop((second, rest));
        assert!(!first.is_pressed() && negotiations.begin().is_some());
        assert!(Negotiations::new(1).begin().is_some());
    }

    #[tokio::test(start_paused = true)]
    #[expect(clippy::disallowed_methods, reason = "it reads the paused clock of the runtime")]
    async fn refusals_are_a_condition_until_there_is_none_for_a_while() {
        let conditions = Conditions::default();
        let clock = ManualClock::new();
        let here = "here".to_owned();
        let mut refusals = Refusals::new(conditions.clone(), here, Arc::new(clock.clone()));
        let is_raised = || conditions.is_raised(ConditionKind::ConnectionsRefused, "here");
        assert_eq!(refusals.left(), None);
        refusals.add("all places are taken", "close some");
        clock.advance(REFUSALS_OVER / 2);
        refusals.add("all places are taken", "close some");
        assert!(is_raised());
        clock.advance(REFUSALS_OVER - Duration::from_secs(1));
        assert_eq!(refusals.left(), Some(Duration::from_secs(1)), "it counts from the newest one");
        assert!(conditions.list()[0].report.what.contains("(2 since"));
        let begun = tokio::time::Instant::now();
        refusals.over().await;
        assert_eq!(begun.elapsed(), Duration::from_secs(1));
        refusals.end();
        assert!(!is_raised());
        refusals.add("all places are taken", "close some");
        drop(refusals);
        assert!(!is_raised());
    }
}
