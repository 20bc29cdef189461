//! Tells a change whether the client that asked for it still waits.
//!
//! A change of a volume's record or of snapshots may wait for log space for a long time. If its client disconnects
//! meanwhile, the change is dropped: another client may have asked for another change since, or may rely on the volume as
//! it is.
//!
//! Invariants:
//! - Once the asker has disconnected, its change is in a batch of the log or is never made.
//! - A task without an asker, such as a job of the daemon, is never given up.

use std::future::Future;
use tokio::sync::watch;

tokio::task_local! {
    static ASKER: Asker;
}

/// A handle to the state of the client, for the task that makes the change.
#[derive(Clone, Debug)]
pub struct Asker(watch::Receiver<bool>);

/// Held on behalf of the client. When it is dropped, the client counts as disconnected.
#[derive(Debug)]
pub struct Waits(watch::Sender<bool>);

impl Waits {
    /// Reports that the client has disconnected.
    pub fn end(&self) {
        self.0.send_replace(true);
    }
}

impl Asker {
    /// Makes the two ends of one request.
    #[must_use]
    pub fn new() -> (Waits, Asker) {
        let (sender, receiver) = watch::channel(false);
        (Waits(sender), Asker(receiver))
    }

    /// Runs `work` for this asker. Tasks that `work` spawns have no asker.
    pub fn scope<F: Future>(self, work: F) -> impl Future<Output = F::Output> {
        ASKER.scope(self, work)
    }
}

/// Resolves when the asker of this task has disconnected.
pub fn gone() -> impl Future<Output = ()> + Send {
    let asker = ASKER.try_with(Clone::clone).ok();
    async move {
        match asker {
            // A dropped sender means the same.
            Some(Asker(mut receiver)) => drop(receiver.wait_for(|is_gone| *is_gone).await),
            None => std::future::pending().await,
        }
    }
}
