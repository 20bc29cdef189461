//! Payload memory of all connections, bounded.
//!
//! Invariants:
//! - The reservations of all connections together never exceed the budget of [`PayloadMemory`].
//! - Each connection owns a private share, so that other connections, however greedy or slow,
//!   cannot keep it from its next small request.
//! - One connection holds at most a quarter of the shared part, or one largest request.
//! - The private share is plain arithmetic inside the connection's task. Only requests that exceed
//!   it use the shared semaphore, which is first come, first served.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Largest payload that the server advertises. Source: spec, "Size constraints": clients without
/// block size information may assume 32 MiB.
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// Smallest budget: half of it holds one largest request. Chosen by hand.
pub const BUDGET_BYTES_MIN: usize = 2 * PAYLOAD_BYTES_MAX as usize;
/// Largest private share of a connection. Chosen by hand: 64 requests of 4 KiB.
const PRIVATE_BYTES_MAX: usize = 256 << 10;

/// The memory budget of a server.
#[derive(Debug)]
pub struct PayloadMemory {
    shared: Arc<Semaphore>,
    shared_bytes: usize,
    private_bytes: usize,
    /// The largest part of the shared memory that one connection may hold.
    connection_bytes_max: usize,
    waiting: AtomicUsize,
}

impl PayloadMemory {
    /// Creates a budget of at least [`BUDGET_BYTES_MIN`]. At most half of it becomes private
    /// shares; the rest is shared, so that one largest request always fits.
    #[must_use]
    pub fn new(budget_bytes: usize, connection_count_max: usize) -> Self {
        let budget_bytes = budget_bytes.clamp(BUDGET_BYTES_MIN, Semaphore::MAX_PERMITS);
        let private_bytes = (budget_bytes / 2 / connection_count_max.max(1)).min(PRIVATE_BYTES_MAX);
        let shared_bytes = budget_bytes - private_bytes * connection_count_max;
        PayloadMemory {
            shared: Arc::new(Semaphore::new(shared_bytes)),
            shared_bytes,
            private_bytes,
            connection_bytes_max: (shared_bytes / 4).max(PAYLOAD_BYTES_MAX as usize),
            waiting: AtomicUsize::new(0),
        }
    }

    /// Whether a connection is waiting for memory that others hold.
    #[must_use]
    pub fn is_contended(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Returns the shared bytes that are reserved at the moment.
    #[must_use]
    pub fn reserved_bytes(&self) -> usize {
        self.shared_bytes.saturating_sub(self.shared.available_permits())
    }
}

/// Payload bytes that a request holds. Return it with [`Allotment::release`]. Dropping it returns
/// the shared part; the private part is lost until the connection ends.
#[derive(Debug, Default)]
pub struct Reservation {
    private_bytes: usize,
    shared: Option<OwnedSemaphorePermit>,
}

impl Reservation {
    /// Merges `other` into this reservation.
    pub fn merge(&mut self, other: Reservation) {
        self.private_bytes += other.private_bytes;
        match (&mut self.shared, other.shared) {
            (Some(mine), Some(theirs)) => mine.merge(theirs),
            (mine @ None, theirs) => *mine = theirs,
            (Some(_), None) => {}
        }
    }
}

type Acquire = Pin<Box<dyn Future<Output = OwnedSemaphorePermit> + Send>>;

/// One connection's view of the budget.
pub struct Allotment {
    memory: Arc<PayloadMemory>,
    private_free_bytes: usize,
    shared_held_bytes: usize,
    waiting: Option<(u32, Waiting, Acquire)>,
}

/// Counts as waiting while it exists.
struct Waiting(Arc<PayloadMemory>);

impl Waiting {
    fn new(memory: Arc<PayloadMemory>) -> Self {
        memory.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(memory)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Allotment {
    /// Creates the view of one connection, with its private share.
    #[must_use]
    pub fn new(memory: Arc<PayloadMemory>) -> Self {
        let private_free_bytes = memory.private_bytes;
        Allotment { memory, private_free_bytes, shared_held_bytes: 0, waiting: None }
    }

    /// Returns the underlying budget.
    #[must_use]
    pub fn memory(&self) -> &PayloadMemory {
        &self.memory
    }

    /// Reserves `bytes`, at most [`PAYLOAD_BYTES_MAX`]. While it is pending, call it again with the
    /// same `bytes` whenever the waker is called, and after each [`Allotment::release`].
    pub fn poll_reserve(&mut self, cx: &mut Context<'_>, bytes: u32) -> Poll<Reservation> {
        assert!(bytes <= PAYLOAD_BYTES_MAX, "requests are checked before memory is reserved");
        let wanted = bytes as usize;
        if wanted <= self.private_free_bytes {
            self.waiting = None;
            self.private_free_bytes -= wanted;
            return Poll::Ready(Reservation { private_bytes: wanted, shared: None });
        }
        // Only this connection's own releases can change this, so no waker is needed.
        let held_bytes = self.shared_held_bytes;
        if held_bytes > 0 && held_bytes + wanted > self.memory.connection_bytes_max {
            self.waiting = None;
            return Poll::Pending;
        }
        if self.waiting.is_none() {
            let shared = Arc::clone(&self.memory.shared);
            if let Ok(permit) = Arc::clone(&shared).try_acquire_many_owned(bytes) {
                self.shared_held_bytes += wanted;
                return Poll::Ready(Reservation { private_bytes: 0, shared: Some(permit) });
            }
            let acquire: Acquire = Box::pin(async move {
                shared.acquire_many_owned(bytes).await.expect("the semaphore is never closed")
            });
            self.waiting = Some((bytes, Waiting::new(Arc::clone(&self.memory)), acquire));
        }
        let (waits_for, _, acquire) = self.waiting.as_mut().expect("set above");
        assert_eq!(*waits_for, bytes, "one reservation at a time");
        let permit = ready!(acquire.as_mut().poll(cx));
        self.waiting = None;
        self.shared_held_bytes += wanted;
        Poll::Ready(Reservation { private_bytes: 0, shared: Some(permit) })
    }

    /// Returns a reservation.
    pub fn release(&mut self, reservation: Reservation) {
        self.private_free_bytes += reservation.private_bytes;
        if let Some(permit) = reservation.shared {
            self.shared_held_bytes -= permit.num_permits();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Waker;

    #[test]
    fn a_greedy_connection_leaves_others_their_private_share() {
        let memory = Arc::new(PayloadMemory::new(64 << 20, 16));
        let mut cx = Context::from_waker(Waker::noop());
        // Two connections are needed: a single one gets no more than 32 MiB.
        let mut greedy = [(); 2].map(|()| (Allotment::new(Arc::clone(&memory)), Vec::new()));
        for (greedy, held) in &mut greedy {
            while let Poll::Ready(reservation) = greedy.poll_reserve(&mut cx, 1 << 20) {
                held.push(reservation);
                assert!(held.len() <= 32, "more than one connection's part was handed out");
            }
        }
        assert!(memory.is_contended());
        let [(first, first_held), (second, second_held)] = &mut greedy;
        assert_eq!((first_held.len(), second_held.len()), (32, 28), "60 MiB are shared");
        let mut modest = Allotment::new(Arc::clone(&memory));
        let Poll::Ready(small) = modest.poll_reserve(&mut cx, 4096) else {
            panic!("a small request waited behind a greedy connection");
        };
        modest.release(small);
        first.release(first_held.pop().unwrap());
        second_held.extend(match second.poll_reserve(&mut cx, 1 << 20) {
            Poll::Ready(reservation) => Some(reservation),
            Poll::Pending => panic!("the released part must reach who waits"),
        });
        assert!(!memory.is_contended());
        drop(greedy);
        assert_eq!(memory.reserved_bytes(), 0);
    }

    #[test]
    fn the_largest_request_fits_in_the_smallest_budget() {
        let memory = Arc::new(PayloadMemory::new(0, 1024));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(Allotment::new(memory).poll_reserve(&mut cx, PAYLOAD_BYTES_MAX).is_ready());
    }
}
