//! Whether a client still waits for the change that it has asked for.
//!
//! A change of a volume's record, or of snapshots, may wait long for log space. When the client that asked for it has
//! gone by then, the change does not happen any more: somebody else may have asked for another one since, or use the
//! volume as it is.
//!
//! Invariants:
//! - What an asker that has gone wanted is in a batch of the log, or never comes.
//! - A task that nobody has asked for anything, as a job of the daemon, is never given up.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::watch;

/// Pause between two looks at the socket of a client. Chosen by hand: most requests are answered before the first.
const LOOK_PAUSE: Duration = Duration::from_millis(250);

tokio::task_local! {
    static ASKER: Asker;
}

/// Who waits for a change.
#[derive(Clone, Debug)]
pub(crate) struct Asker(watch::Receiver<bool>);

/// Held by who asks. Its end means that nobody waits any more.
#[derive(Debug)]
pub(crate) struct Waits(watch::Sender<bool>);

impl Waits {
    /// Looks from time to time whether the client on `socket` is there, and ends the wait when it is not. A client that has
    /// closed one direction only still takes the answer.
    pub(crate) async fn end_with(&self, socket: &UnixStream) -> Infallible {
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
    pub(crate) fn new() -> (Waits, Asker) {
        let (sender, receiver) = watch::channel(false);
        (Waits(sender), Asker(receiver))
    }

    /// Runs `work`, which this one has asked for. What `work` spawns is not given up with it.
    pub(crate) fn scope<F: Future>(self, work: F) -> impl Future<Output = F::Output> {
        ASKER.scope(self, work)
    }
}

/// Resolves when whoever asked for what this task does has gone.
pub(crate) fn gone() -> impl Future<Output = ()> + Send {
    let asker = ASKER.try_with(Clone::clone).ok();
    async move {
        match asker {
            // A sender that is gone means the same.
            Some(Asker(mut receiver)) => drop(receiver.wait_for(|is_gone| *is_gone).await),
            None => std::future::pending().await,
        }
    }
}
