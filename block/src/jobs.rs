//! Background jobs: a panic in one of them becomes a visible error.
//!
//! Invariants:
//! - A panic of a supervised job does not leave its task or thread. It becomes a text, and a
//!   condition if the caller has a registry.
//! - The name of a job is the subject of its condition, so that two jobs of one kind are distinct.

use crate::conditions::{ConditionKind, Conditions, Report};
use std::any::Any;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;

/// Remedy for a job that has died and that only a new process starts again.
const RESTART: &str = "restart the daemon, and report the error above as a bug";

/// A job's name, and the consequence of its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Its name for people, unique within the process: `copy to s3://bucket/dr`.
    pub name: String,
    /// The work that stops when it has died, as a sentence without a full stop.
    pub cost: String,
}

impl Job {
    /// Creates a job. `cost` is the consequence of its end.
    pub fn new(name: impl Into<String>, cost: impl Into<String>) -> Self {
        Job { name: name.into(), cost: cost.into() }
    }

    /// Raises [`ConditionKind::JobDied`]: the job ended unexpectedly because of `why`.
    pub fn raise_died(&self, conditions: &Conditions, why: &str) {
        let what = format!("the background job {} has ended: {why}", self.name);
        conditions.raise(
            ConditionKind::JobDied,
            &self.name,
            Report::new(what, self.cost.clone(), RESTART),
        );
    }

    /// Runs `job` and returns its output. If it panics, raises the condition and returns `None`.
    pub async fn run<F: Future>(&self, conditions: &Conditions, job: F) -> Option<F::Output> {
        // A restarted job is alive.
        conditions.clear(ConditionKind::JobDied, &self.name);
        match caught(job).await {
            Ok(output) => Some(output),
            Err(why) => {
                self.raise_died(conditions, &why);
                None
            }
        }
    }

    /// Like [`Job::run`], but runs a closure on the calling thread.
    pub fn run_here<T>(&self, conditions: &Conditions, job: impl FnOnce() -> T) -> Option<T> {
        conditions.clear(ConditionKind::JobDied, &self.name);
        match catch_unwind(AssertUnwindSafe(job)) {
            Ok(output) => Some(output),
            Err(payload) => {
                self.raise_died(conditions, &text_of(&*payload));
                None
            }
        }
    }
}

/// Returns the output of `future`, or the reason of its panic. After a panic, state that the future
/// shared with others may be half changed: the caller must end its users, or restart them from
/// their beginning.
///
/// # Errors
/// The message of the panic.
pub async fn caught<F: Future>(future: F) -> Result<F::Output, String> {
    let mut future = pin!(future);
    poll_fn(move |context| {
        let polled = catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context)));
        match polled {
            Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
            Ok(Poll::Pending) => Poll::Pending,
            Err(payload) => Poll::Ready(Err(text_of(&*payload))),
        }
    })
    .await
}

/// Returns the message of a panic as one line.
#[must_use]
pub fn text_of(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let words = text.unwrap_or("no message").split_whitespace();
    format!("it panicked: {}", words.collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::{Context, Waker};

    /// Returns the output of a future that never waits for another task.
    fn now<F: Future>(future: F) -> F::Output {
        let mut future = pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return output;
            }
        }
    }

    /// Becomes ready at the second poll, so that the panic follows a wait.
    async fn one_wait() {
        let mut is_ready = false;
        poll_fn(|_| match std::mem::replace(&mut is_ready, true) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
    }

    #[test]
    fn a_panic_of_a_job_raises_a_condition_and_a_new_start_clears_it() {
        let conditions = Conditions::default();
        let job = Job::new("copy to a", "the copy is not brought up to date");
        let died = now(job.run(&conditions, async {
            one_wait().await;
            panic!("no scheme\n  in {}", "x");
        }));
        assert_eq!(died, None::<()>);
        let list = conditions.list();
        assert_eq!((list.len(), list[0].kind), (1, ConditionKind::JobDied));
        assert_eq!(list[0].subject, "copy to a");
        assert!(list[0].report.what.ends_with("it panicked: no scheme in x"), "{list:?}");
        assert_eq!(list[0].report.cost, "the copy is not brought up to date");
        assert_eq!(now(job.run(&conditions, async { 7 })), Some(7));
        assert!(conditions.list().is_empty());
    }

    #[test]
    fn a_panic_of_a_thread_raises_a_condition() {
        let conditions = Conditions::default();
        let job = Job::new("cache writer", "frames are not cached on disk");
        let died = std::thread::scope(|scope| {
            scope.spawn(|| job.run_here(&conditions, || panic!("bad {}", 1))).join()
        });
        assert_eq!(died.expect("the thread returns"), None::<()>);
        assert!(conditions.is_raised(ConditionKind::JobDied, "cache writer"));
    }
}
