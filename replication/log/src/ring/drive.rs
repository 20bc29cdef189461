//! The protocol by which many threads step one value and none waits for another: a lock that is
//! only tried, and a dirty mark.
//!
//! Invariants:
//! - No caller of [`StepLock::step`] waits. A caller that finds the lock taken leaves its mark,
//!   which the holder checks after it has released the lock: no change stays unseen.
//! - The mark is set before the lock is tried, and read after the lock is released. Two fences
//!   order these steps against each other.
//! - A caller steps at most [`ROUNDS_MAX`] times for others and leaves the rest to a thread.

use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// Steps that one caller takes for others before it leaves the rest to the log thread. Chosen by
/// hand.
const ROUNDS_MAX: usize = 2;

/// Whether something changed that the stepped value has not seen.
#[derive(Debug)]
pub(crate) struct DirtyMark(AtomicBool);

impl DirtyMark {
    /// Makes a mark that is set.
    pub(crate) fn new() -> DirtyMark {
        DirtyMark(AtomicBool::new(true))
    }

    /// Records a change. Follow it by [`StepLock::step`], or leave it to a caller that will step.
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The result of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stepped {
    /// Look for more changes.
    Again,
    /// The rest is for the log thread, whatever the mark says.
    LeaveToThread,
}

/// The work that a caller of [`StepLock::step`] leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the log thread must learn of the rest"]
pub(crate) enum Left {
    /// None: everything was seen, or the holder of the lock will see it.
    Nothing,
    /// Some, for the log thread.
    ToThread,
}

/// A value that is stepped by the thread that needs it. `None` after a close.
pub(crate) struct StepLock<T>(Mutex<Option<T>>);

impl<T> StepLock<T> {
    pub(crate) fn new(value: T) -> StepLock<T> {
        StepLock(Mutex::new(Some(value)))
    }

    /// Steps the value, unless another thread does, until `mark` stays clear or enough was done.
    pub(crate) fn step(&self, mark: &DirtyMark, mut step: impl FnMut(&mut T) -> Stepped) -> Left {
        for _ in 0..ROUNDS_MAX {
            // Orders the caller's mark before the look at the lock; pairs with the fence below.
            fence(Ordering::SeqCst);
            let Some(mut guard) = self.0.try_lock() else { return Left::Nothing };
            let Some(value) = &mut *guard else { return Left::Nothing };
            mark.0.store(false, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            let stepped = step(value);
            drop(guard);
            if stepped == Stepped::LeaveToThread {
                return Left::ToThread;
            }
            // Orders the release of the lock before the look at the mark.
            fence(Ordering::SeqCst);
            if !mark.0.load(Ordering::Relaxed) {
                return Left::Nothing;
            }
        }
        Left::ToThread
    }

    /// Locks the value, and waits for the lock: for callers that must reach it. Call
    /// [`StepLock::step`] afterwards, for others that found the lock taken.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn change_made_during_a_step_is_seen_by_a_further_step() {
        let (lock, mark) = (StepLock::new(0), DirtyMark::new());
        let left = lock.step(&mark, |count| {
            *count += 1;
            if *count == 1 {
                mark.set();
                // Another caller with a change finds the lock taken and does not wait.
                assert_eq!(lock.step(&mark, |_| unreachable!("it is taken")), Left::Nothing);
            }
            Stepped::Again
        });
        assert_eq!((left, *lock.lock()), (Left::Nothing, Some(2)));
    }

    #[test]
    fn caller_leaves_the_rest_to_the_thread_and_a_closed_value_is_not_stepped() {
        let (lock, mark) = (StepLock::new(0), DirtyMark::new());
        let busy = |count: &mut usize| {
            *count += 1;
            mark.set();
            Stepped::Again
        };
        assert_eq!(lock.step(&mark, busy), Left::ToThread);
        assert_eq!(*lock.lock(), Some(ROUNDS_MAX));
        assert_eq!(lock.step(&mark, |_| Stepped::LeaveToThread), Left::ToThread);
        *lock.lock() = None;
        assert_eq!(lock.step(&mark, |_| unreachable!("it is closed")), Left::Nothing);
    }

    #[test]
    fn changes_of_many_threads_are_all_seen_without_a_later_step() {
        const CHANGES: u64 = 20_000;
        let (lock, mark, made) = (StepLock::new(0), DirtyMark::new(), AtomicU64::new(0));
        let drive = || {
            while lock.step(&mark, |seen| {
                *seen = made.load(Ordering::Acquire);
                Stepped::Again
            }) == Left::ToThread
            {}
        };
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..CHANGES {
                        made.fetch_add(1, Ordering::AcqRel);
                        mark.set();
                        drive();
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), Some(3 * CHANGES));
    }
}
