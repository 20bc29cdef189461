//! Wakes the requests of a queue from any thread.
//!
//! Invariants:
//! - A wake is never lost while the queue's thread is about to sleep. The thread announces its
//!   sleep before its last check, and a waker marks its tag before it checks whether the thread
//!   sleeps.
//! - No lock and no allocation: one bit per tag, and one write to an eventfd if the thread sleeps.

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::task::{Wake, Waker};

/// State shared by the queue's thread and all threads that wake it.
pub(crate) struct Wakes {
    ready: Vec<AtomicU64>,
    is_asleep: AtomicBool,
    is_leaving: AtomicBool,
    is_leaving_now: AtomicBool,
    bell: OwnedFd,
}

impl Wakes {
    pub(crate) fn new(tag_count: u16) -> io::Result<Arc<Wakes>> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC)?;
        let ready = (0..tag_count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Ok(Arc::new(Wakes {
            ready,
            is_asleep: AtomicBool::new(false),
            is_leaving: AtomicBool::new(false),
            is_leaving_now: AtomicBool::new(false),
            bell,
        }))
    }

    /// Returns the eventfd that is written to wake the sleeping thread.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Marks a tag as ready.
    pub(crate) fn mark(&self, tag: u16) {
        self.ready[usize::from(tag) / 64].fetch_or(1 << (tag % 64), Ordering::AcqRel);
    }

    /// Asks the thread to finish its running requests and to end.
    pub(crate) fn leave(&self) {
        self.is_leaving.store(true, Ordering::Release);
        self.ring();
    }

    /// Asks the thread to end, even if running requests remain unanswered.
    pub(crate) fn leave_now(&self) {
        self.is_leaving_now.store(true, Ordering::Release);
        self.leave();
    }

    pub(crate) fn is_leaving_now(&self) -> bool {
        self.is_leaving_now.load(Ordering::Acquire)
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Acquire)
    }

    /// Takes the marks of 64 tags: bit `n` of word `w` is tag `64 * w + n`.
    pub(crate) fn take(&self, word: usize) -> u64 {
        if self.ready[word].load(Ordering::Relaxed) == 0 {
            return 0;
        }
        self.ready[word].swap(0, Ordering::AcqRel)
    }

    pub(crate) fn word_count(&self) -> usize {
        self.ready.len()
    }

    /// Announces that the thread is about to sleep. Returns false if there is work to do.
    pub(crate) fn fall_asleep(&self) -> bool {
        self.is_asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let is_any = self.ready.iter().any(|word| word.load(Ordering::Relaxed) != 0);
        if is_any {
            self.is_asleep.store(false, Ordering::Relaxed);
        }
        !is_any
    }

    /// Announces that the thread is awake.
    pub(crate) fn awake(&self) {
        self.is_asleep.store(false, Ordering::Relaxed);
    }

    fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.is_asleep.swap(false, Ordering::Relaxed) || self.is_leaving() {
            // It fails only if the counter is full, and then the thread has already been notified.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    /// Creates a waker for each tag. Call it once.
    pub(crate) fn wakers(self: &Arc<Self>, tag_count: u16) -> Vec<Waker> {
        (0..tag_count).map(|tag| Waker::from(Arc::new(Bell { wakes: self.clone(), tag }))).collect()
    }
}

struct Bell {
    wakes: Arc<Wakes>,
    tag: u16,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.wakes.mark(self.tag);
        self.wakes.ring();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_taken_once_and_sleep_needs_none() {
        let wakes = Wakes::new(130).unwrap();
        let wakers = wakes.wakers(130);
        assert_eq!((wakes.word_count(), wakers.len()), (3, 130));
        wakers[129].wake_by_ref();
        wakers[129].wake_by_ref();
        assert!(!wakes.fall_asleep());
        assert_eq!((wakes.take(0), wakes.take(2), wakes.take(2)), (0, 2, 0));
        assert!(wakes.fall_asleep());
    }

    /// Both sides act as in service. A lost wake would make the reader wait forever.
    #[test]
    fn no_wake_is_lost_between_two_threads() {
        const COUNT: u64 = 20_000;
        let wakes = Wakes::new(1).unwrap();
        let waker = wakes.wakers(1).remove(0);
        let turn = Arc::new(AtomicU64::new(0));
        let other = std::thread::spawn({
            let turn = turn.clone();
            move || {
                for round in 0..COUNT {
                    while turn.load(Ordering::Acquire) != round {
                        std::thread::yield_now();
                    }
                    waker.wake_by_ref();
                }
            }
        });
        for round in 1..=COUNT {
            while wakes.take(0) == 0 {
                if wakes.fall_asleep() {
                    rustix::io::read(wakes.bell(), &mut [0; 8]).unwrap();
                }
                wakes.awake();
            }
            turn.store(round, Ordering::Release);
        }
        other.join().unwrap();
    }
}
