//! Tells a change whether the client that asked for it still waits.
//!
//! A change of a volume's record or of snapshots may wait for log space for a long time. If its client disconnects
//! meanwhile, the change is dropped: another client may have asked for another change since, or may rely on the volume as
//! it is.
//!
//! Invariants:
//! - Once the asker has disconnected, its change is in a batch of the log or is never made.
//! - A task without an asker, such as a job of the daemon, is never given up.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::watch;

/// Pause between two looks at a client's socket. Chosen by hand: most requests are answered before the second look.
const LOOK_PAUSE: Duration = Duration::from_millis(250);

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
    /// Looks at `socket` periodically and reports a client that has disconnected. A client that has closed only its sending
    /// direction still receives the answer.
    pub async fn end_with(&self, socket: &UnixStream) -> Infallible {
        while !is_hung_up(socket) {
            tokio::time::sleep(LOOK_PAUSE).await;
        }
        self.0.send_replace(true);
        std::future::pending().await
    }
}

fn is_hung_up(socket: &UnixStream) -> bool {
    // A hang-up is reported whether it is asked for or not (poll(2)).
    let mut asked = [PollFd::new(socket, PollFlags::empty())];
    let found = poll(&mut asked, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    found.is_ok() && asked[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
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
