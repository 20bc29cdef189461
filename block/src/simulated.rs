//! The executor of a simulation, by which code that runs tasks, timers and threads can be simulated from a
//! seed.
//!
//! Invariants:
//! - A simulation runs on one thread, which is inside [`enter`] whenever it runs simulated code. Work
//!   that blocks then runs at once, and a loop with a thread of its own is a task like any other.
//! - Outside a simulation [`simulated`] is `None`, and a package uses its runtime and its threads.
//! - Code that may be simulated chooses between several futures in a fixed order (`biased`), because
//!   tokio's choice is random.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// A task without a result.
pub type BoxTask = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Runs the tasks of one simulated process.
pub trait Executor: Send + Sync + 'static {
    /// Starts a task. One of a process that has ended is dropped.
    fn spawn(&self, task: BoxTask);

    /// Resolves after a time of the simulation.
    fn sleep(&self, time: Duration) -> BoxTask;
}

thread_local! {
    static SIMULATED: RefCell<Option<Arc<dyn Executor>>> = const { RefCell::new(None) };
}

/// Runs `run` as a part of a simulated process on this thread.
pub fn enter<T>(executor: &Arc<dyn Executor>, run: impl FnOnce() -> T) -> T {
    /// Also after a panic.
    struct Leave(Option<Arc<dyn Executor>>);
    impl Drop for Leave {
        fn drop(&mut self) {
            SIMULATED.with(|simulated| *simulated.borrow_mut() = self.0.take());
        }
    }
    let before = SIMULATED.with(|simulated| simulated.borrow_mut().replace(Arc::clone(executor)));
    let _leave = Leave(before);
    run()
}

/// Returns the executor of the simulated process to which the caller belongs, if it is simulated.
#[must_use]
pub fn simulated() -> Option<Arc<dyn Executor>> {
    SIMULATED.with(|simulated| simulated.borrow().clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;

    #[derive(Default)]
    struct Collected(Mutex<Vec<BoxTask>>);

    impl Executor for Collected {
        fn spawn(&self, task: BoxTask) {
            self.0.lock().push(task);
        }

        fn sleep(&self, _time: Duration) -> BoxTask {
            Box::pin(std::future::ready(()))
        }
    }

    #[test]
    fn only_code_inside_a_simulation_is_simulated() {
        let collected = Arc::new(Collected::default());
        let executor: Arc<dyn Executor> = Arc::clone(&collected) as _;
        assert!(simulated().is_none());
        enter(&executor, || simulated().unwrap().spawn(Box::pin(async {})));
        let panicked = std::panic::AssertUnwindSafe(|| enter(&executor, || panic!("on purpose")));
        std::panic::catch_unwind(panicked).unwrap_err();
        assert!(simulated().is_none());
        assert_eq!(collected.0.lock().len(), 1);
    }
}
