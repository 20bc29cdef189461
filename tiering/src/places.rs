//! Permits for objects in transit between stores.
//!
//! Invariants:
//! - Each destination has permits of its own: one that hangs does not take permits of another.
//! - In addition there are a few shared permits for the whole process, which bound the memory in
//!   normal operation. An object that takes longer than [`LEND_MAX`] returns its shared permit and
//!   keeps the one of its destination. So each destination that is slow or hangs holds at most
//!   [`OBJECTS_AT_ONCE`] objects beyond the shared bound.

use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Maximum number of objects, over all copies of a process, that are in transit concurrently.
/// Chosen by hand: one is read while the previous one is written.
pub const OBJECTS_AT_ONCE: usize = 2;

/// Longest time for which an object in transit holds a shared permit. Chosen by hand: 16 MiB at 13
/// Mbit/s.
const LEND_MAX: Duration = Duration::from_secs(10);

/// Permits of one destination. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    shared: Arc<Semaphore>,
    own: Arc<Semaphore>,
}

impl Places {
    pub(crate) fn new(shared: &Arc<Semaphore>) -> Places {
        Places { shared: shared.clone(), own: Arc::new(Semaphore::new(OBJECTS_AT_ONCE)) }
    }

    /// Runs `work` with a permit of the destination and, for at most [`LEND_MAX`], a shared permit.
    pub(crate) async fn with<T>(&self, work: impl Future<Output = T>) -> T {
        let _own = self.own.acquire().await.expect("never closed");
        lend(&self.shared, work).await
    }
}

/// Runs `work`, holding a shared permit for at most [`LEND_MAX`].
pub(crate) async fn lend<T>(shared: &Semaphore, work: impl Future<Output = T>) -> T {
    let place = shared.acquire().await.expect("never closed");
    tokio::pin!(work);
    match tokio::time::timeout(LEND_MAX, &mut work).await {
        Ok(done) => done,
        Err(_) => {
            drop(place);
            work.await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TimerClock;
    use block::env::Clock;

    #[tokio::test(start_paused = true)]
    async fn a_destination_that_hangs_does_not_keep_another_one_waiting() {
        let shared = Arc::new(Semaphore::new(OBJECTS_AT_ONCE));
        let (hung, well) = (Places::new(&shared), Places::new(&shared));
        for _ in 0..2 * OBJECTS_AT_ONCE {
            let hung = hung.clone();
            tokio::spawn(async move { hung.with(std::future::pending::<()>()).await });
        }
        tokio::task::yield_now().await;
        let begun = TimerClock.now();
        well.with(async {}).await;
        assert!(TimerClock.since(begun) <= LEND_MAX, "{:?}", TimerClock.since(begun));
        let again = TimerClock.now();
        for _ in 0..100 {
            well.with(async {}).await;
        }
        assert_eq!(
            TimerClock.since(again),
            Duration::ZERO,
            "what hangs holds its own permits only"
        );
        assert_eq!(shared.available_permits(), OBJECTS_AT_ONCE);
    }
}
