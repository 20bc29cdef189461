//! Tasks, timers and threads of the members: tokio's and the machine's, or those of a simulation
//! ([`block::simulated`]).
//!
//! Invariants:
//! - Nothing else of this package starts a task or a thread, or waits for a time, but the connections of
//!   the crate `cluster`.

use block::simulated::{Executor, simulated};
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;
use tokio::sync::{oneshot, watch};

/// The task has ended without a result: it has panicked, or its runtime or process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TaskEnded;

impl fmt::Display for TaskEnded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the task has ended without a result")
    }
}

impl std::error::Error for TaskEnded {}

/// A task that runs, or has run. It goes on when this is dropped.
#[derive(Debug)]
pub(crate) struct Task<T>(TaskKind<T>);

#[derive(Debug)]
enum TaskKind<T> {
    Runtime(tokio::task::JoinHandle<T>),
    Simulated(oneshot::Receiver<T>),
}

impl<T> Future for Task<T> {
    type Output = Result<T, TaskEnded>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.get_mut().0 {
            TaskKind::Runtime(handle) => Pin::new(handle).poll(context).map_err(|_| TaskEnded),
            TaskKind::Simulated(result) => Pin::new(result).poll(context).map_err(|_| TaskEnded),
        }
    }
}

/// Starts tasks on the runtime, or in the simulated process, in which it was made.
#[derive(Clone)]
pub(crate) struct Spawner(SpawnerKind);

#[derive(Clone)]
enum SpawnerKind {
    Runtime(tokio::runtime::Handle),
    Simulated(Arc<dyn Executor>),
}

impl fmt::Debug for Spawner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spawner").finish_non_exhaustive()
    }
}

impl Spawner {
    /// Returns the spawner of the caller's runtime or process.
    ///
    /// # Panics
    /// Outside of a runtime and a simulation.
    #[must_use]
    pub(crate) fn current() -> Spawner {
        Spawner(match simulated() {
            Some(executor) => SpawnerKind::Simulated(executor),
            None => SpawnerKind::Runtime(tokio::runtime::Handle::current()),
        })
    }

    /// Starts a task.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Task<T> {
        match &self.0 {
            SpawnerKind::Runtime(runtime) => Task(TaskKind::Runtime(runtime.spawn(task))),
            SpawnerKind::Simulated(executor) => {
                let (sender, result) = oneshot::channel();
                executor.spawn(Box::pin(async move {
                    let _ = sender.send(task.await); // nobody waits for a task that was let go
                }));
                Task(TaskKind::Simulated(result))
            }
        }
    }
}

/// Starts a task on the caller's runtime or in its simulated process.
///
/// # Panics
/// Outside of a runtime and a simulation.
pub(crate) fn spawn<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> Task<T> {
    Spawner::current().spawn(task)
}

/// Tasks that end when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct TaskSet(watch::Sender<()>);

impl TaskSet {
    /// Starts a task on the caller's runtime or in its simulated process.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut dropped = self.0.subscribe();
        spawn(async move {
            tokio::select! {
                biased;
                _ = dropped.changed() => {}
                () = task => {}
            }
        });
    }
}

/// Resolves after a time.
pub(crate) async fn sleep(time: Duration) {
    match simulated() {
        Some(executor) => executor.sleep(time).await,
        None => tokio::time::sleep(time).await,
    }
}

/// The time of [`timeout`] is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimeIsOver;

/// Waits for a result, for at most a time.
///
/// # Errors
/// The time is over; the future was dropped.
pub(crate) async fn timeout<T>(
    time: Duration,
    result: impl Future<Output = T>,
) -> Result<T, TimeIsOver> {
    tokio::select! {
        biased;
        result = result => Ok(result),
        () = sleep(time) => Err(TimeIsOver),
    }
}

/// Runs work that blocks, away from the tasks of the runtime.
///
/// # Errors
/// The work has panicked, or the runtime ends.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, TaskEnded> {
    match simulated().is_some() {
        true => Ok(work()),
        false => tokio::task::spawn_blocking(work).await.map_err(|_| TaskEnded),
    }
}

/// Runs a task on a thread of its own, on which it may block.
///
/// # Errors
/// The thread could not be started.
pub(crate) fn spawn_thread(
    name: &str,
    task: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    match simulated() {
        Some(executor) => executor.spawn(Box::pin(task)),
        None => {
            let thread = std::thread::Builder::new().name(name.to_owned());
            thread.spawn(move || block_on(task))?;
        }
    }
    Ok(())
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on(task: impl Future<Output = ()>) {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let (mut context, mut task) = (Context::from_waker(&waker), pin!(task));
    while task.as_mut().poll(&mut context).is_pending() {
        std::thread::park();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_runs_its_task_to_the_end() {
        let (sender, receiver) = oneshot::channel();
        let (done, is_done) = std::sync::mpsc::channel();
        let task = async move { done.send(receiver.await).unwrap() };
        spawn_thread("spindle-test", task).unwrap();
        sender.send(5).unwrap();
        assert_eq!(is_done.recv().unwrap(), Ok(5));
    }
}
