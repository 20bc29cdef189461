//! The background jobs of a pool. Each is supervised, so that none ends unnoticed.
//!
//! Invariants:
//! - A job that panics raises `JobDied` with its name.
//! - If a job is vital (without it data is at risk, or no client is served), the process stops in
//!   order, as on SIGTERM, and ends with an error, so that its supervisor restarts it.

use async_recursion::async_recursion;
use block::{Conditions, Error, ErrorKind, Job};
use std::future::Future;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Whether the process can continue without a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// The process stops in order.
    Vital,
    /// The process continues, and `status` shows which work is no longer done.
    Useful,
}

/// Starts the jobs of a process and learns of their deaths. Clones share it.
#[derive(Clone, Debug)]
pub struct Jobs {
    conditions: Conditions,
    /// The reason why the process cannot continue.
    died: Arc<watch::Sender<Option<Error>>>,
}

impl Jobs {
    pub(crate) fn new(conditions: Conditions) -> Jobs {
        Jobs { conditions, died: Arc::new(watch::Sender::new(None)) }
    }

    /// Starts a job on a runtime. Its task never fails by a panic.
    pub(crate) fn spawn_on(
        &self,
        runtime: &Handle,
        need: Need,
        job: Job,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        runtime.spawn(self.clone().supervise(need, job, work))
    }

    /// Starts a job on the caller's runtime.
    pub fn spawn(
        &self,
        need: Need,
        job: Job,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        tokio::spawn(self.clone().supervise(need, job, work))
    }

    /// Runs a job whose task the caller owns.
    pub async fn supervise(self, need: Need, job: Job, work: impl Future<Output = ()>) {
        let name = job.name.clone();
        let panicking = crate::seeded_bugs::seeded_bugs().panicking_job;
        let work = async move {
            // The switch holds at most one name: the job that a test wants to die.
            if panicking.is_some_and(|panicking| name.starts_with(panicking)) {
                panic!("as the test wants it");
            }
            work.await;
        };
        if job.run(&self.conditions, work).await.is_none() {
            self.note_death(need, &job, "it panicked");
        }
    }

    /// Reports that a job has ended with an error although it was not meant to end.
    pub fn ended(&self, need: Need, job: &Job, error: &Error) {
        job.raise_died(&self.conditions, &error.chain());
        self.note_death(need, job, &error.chain());
    }

    fn note_death(&self, need: Need, job: &Job, why: &str) {
        if need == Need::Vital {
            let what = format!(
                "the background job {} has ended ({why}), without which {}: the daemon stops; start it again, and \
                 report this as a bug",
                job.name, job.cost
            );
            self.died.send_if_modified(|died| {
                let is_first = died.is_none();
                died.get_or_insert_with(|| Error::new(ErrorKind::Io, what));
                is_first
            });
        }
    }

    /// The reason why the process cannot continue, once a vital job has died.
    pub fn death(&self) -> Option<Error> {
        self.died.borrow().clone()
    }

    /// Resolves when a vital job has died.
    #[async_recursion]
    pub async fn vital_died(&self) {
        let mut died = self.died.subscribe();
        // The sender lives as long as `self` does.
        let _ = died.wait_for(Option::is_some).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::ConditionKind;

    #[tokio::test]
    async fn only_a_vital_job_ends_the_process_by_panic() {
        let conditions = Conditions::default();
        let jobs = Jobs::new(conditions.clone());
        let useful = Job::new("purge", "removed volumes are not purged");
        let task = jobs.spawn(Need::Useful, useful, async { panic!("first") });
        task.await.expect("a panic does not leave the task");
        assert!(conditions.is_raised(ConditionKind::JobDied, "purge"));
        assert!(jobs.death().is_none());
        let vital = Job::new("destage", "no data reaches the store");
        let task = jobs.spawn_on(&Handle::current(), Need::Vital, vital, async { panic!("next") });
        jobs.vital_died().await;
        task.await.expect("a panic does not leave the task");
        let error = jobs.death().expect("it is known").to_string();
        assert!(
            error.contains("destage") && error.contains("no data reaches the store"),
            "{error}"
        );
        let ended = Job::new("listener", "no client can connect");
        jobs.ended(Need::Vital, &ended, &Error::new(ErrorKind::Io, "no certificate"));
        assert!(conditions.is_raised(ConditionKind::JobDied, "listener"));
        assert!(jobs.death().expect("the first one stays").to_string().contains("destage"));
    }
}
