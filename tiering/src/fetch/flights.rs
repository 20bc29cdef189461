//! Single flight: a frame that is being fetched is fetched only once, however many readers want it.
//!
//! Invariants:
//! - There is at most one [`Ticket`] per frame; all other readers wait for its result.
//! - Only the waiters at that time receive a failure; a reader that comes after the failure starts
//!   a new fetch.
//! - A ticket that is dropped without a result wakes its waiters with an error, and the next reader
//!   starts a new fetch. So no reader waits for a task that is gone.

use super::memory::FrameKey;
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::watch;

type Landed = Option<Result<Bytes>>;

/// The fetches under way.
#[derive(Debug, Default)]
pub struct Flights {
    waiting: Mutex<HashMap<FrameKey, watch::Receiver<Landed>>>,
    count: AtomicUsize,
}

/// The right and the duty to fetch a frame.
#[derive(Debug)]
pub struct Ticket {
    flights: Arc<Flights>,
    key: FrameKey,
    landed: watch::Sender<Landed>,
    /// Whether other readers find this fetch in the list.
    is_listed: bool,
}

/// A wait for the ticket of another reader.
#[derive(Debug)]
pub struct Wait(watch::Receiver<Landed>);

impl Flights {
    /// Returns whether this frame is being fetched.
    #[must_use]
    pub fn contains(&self, key: &FrameKey) -> bool {
        self.count.load(Ordering::Acquire) > 0 && self.waiting.lock().contains_key(key)
    }

    /// Returns the number of fetches under way.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns a wait for the frame, and the ticket if the frame is not being fetched yet.
    pub fn join(self: &Arc<Self>, key: FrameKey) -> (Option<Ticket>, Wait) {
        match self.waiting.lock().entry(key) {
            Entry::Occupied(flight) => (None, Wait(flight.get().clone())),
            Entry::Vacant(place) => {
                let (landed, wait) = watch::channel(None);
                place.insert(wait.clone());
                self.count.fetch_add(1, Ordering::Release);
                (Some(Ticket { flights: self.clone(), key, landed, is_listed: true }), Wait(wait))
            }
        }
    }
}

impl Ticket {
    /// Delivers the result to all waiters. The caller must have filled the caches before, so that
    /// later readers find the frame there.
    pub fn land(mut self, result: Result<Bytes>) {
        if result.is_err() {
            self.unlist();
        }
        self.landed.send_replace(Some(result));
    }

    fn unlist(&mut self) {
        // Remove the entry only once: later it may belong to another ticket.
        if std::mem::take(&mut self.is_listed) {
            self.flights.waiting.lock().remove(&self.key);
        }
    }

    /// Returns the key of the frame.
    #[must_use]
    pub fn key(&self) -> FrameKey {
        self.key
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.unlist();
        self.flights.count.fetch_sub(1, Ordering::Release);
    }
}

impl Wait {
    /// Waits for the result of the ticket.
    ///
    /// # Errors
    /// The error of the fetch; `Unavailable` when the fetch ended without a result (the runtime is
    /// stopping).
    pub async fn landed(mut self) -> Result<Bytes> {
        let landed = match self.0.wait_for(Option::is_some).await {
            Ok(landed) => landed.clone(),
            Err(_) => None,
        };
        landed.unwrap_or_else(|| {
            Err(Error::new(
                ErrorKind::Unavailable,
                "fetch frame: given up, the process is stopping",
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::task::{Context, Wake};

    #[tokio::test]
    async fn one_leads_and_all_get_the_result() {
        let flights = Arc::new(Flights::default());
        let (ticket, first) = flights.join((1, 2));
        let (none, second) = flights.join((1, 2));
        assert!(none.is_none() && flights.contains(&(1, 2)) && !flights.contains(&(1, 3)));
        ticket.unwrap().land(Ok(Bytes::from_static(b"frame")));
        assert_eq!(first.landed().await.unwrap(), "frame");
        assert_eq!(second.landed().await.unwrap(), "frame");
        assert_eq!(flights.count(), 0);
        assert!(flights.join((1, 2)).0.is_some(), "a later reader leads again");
    }

    /// A waker that joins at the moment it is woken.
    struct Joins {
        flights: Arc<Flights>,
        has_led: AtomicBool,
    }

    impl Wake for Joins {
        fn wake(self: Arc<Self>) {
            let (ticket, _) = self.flights.join((1, 2));
            self.has_led.store(ticket.is_some(), Ordering::Relaxed);
        }
    }

    #[test]
    fn request_after_a_failure_starts_a_new_fetch() {
        let flights = Arc::new(Flights::default());
        let (ticket, wait) = flights.join((1, 2));
        let joins = Arc::new(Joins { flights: flights.clone(), has_led: AtomicBool::new(false) });
        let waker = joins.clone().into();
        let mut wait = std::pin::pin!(wait.landed());
        assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        ticket.unwrap().land(Err(Error::new(ErrorKind::Corrupt, "bad")));
        assert!(joins.has_led.load(Ordering::Relaxed), "it was given the failure of before");
        assert_eq!(flights.count(), 0);
    }

    #[tokio::test]
    async fn lost_ticket_wakes_its_waiters() {
        let flights = Arc::new(Flights::default());
        let (ticket, wait) = flights.join((1, 2));
        drop(ticket);
        assert_eq!(wait.landed().await.unwrap_err().kind(), ErrorKind::Unavailable);
        assert!(flights.join((1, 2)).0.is_some());
    }
}
