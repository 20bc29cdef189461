//! Several connections of one device, and which of them the kernel has given up.
//!
//! With several connections the kernel takes one that owes an answer for long for dead: it closes it,
//! then sends what was unanswered by another. What still lies in the closed one is older than what comes
//! by the others from then on.
//!
//! Invariants:
//! - No request that was received by one connection starts while another one is closed by the kernel and
//!   still served. What the kernel sends again comes after the close, so that a look after the receipt
//!   sees it.

use crate::stream::is_hung_up;
use parking_lot::Mutex;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use tokio::net::UnixStream;

/// The connections of a device.
pub(super) struct Group {
    links: Mutex<Links>,
}

struct Links {
    /// Of those that are served: a second descriptor of each, to look at.
    served: Vec<Option<OwnedFd>>,
    /// Connections that wait for the end of another.
    waiting: Vec<Waker>,
}

/// One connection's view of the others. Dropped when it is served no more.
pub struct Siblings {
    group: Arc<Group>,
    index: usize,
}

impl Group {
    pub(super) fn new(connection_count: u16) -> Arc<Group> {
        let served = (0..connection_count).map(|_| None).collect();
        Arc::new(Group { links: Mutex::new(Links { served, waiting: Vec::new() }) })
    }

    /// For connection `index`, which is about to be served.
    pub(super) fn join(self: &Arc<Self>, index: u16, stream: &UnixStream) -> io::Result<Siblings> {
        let descriptor = stream.as_fd().try_clone_to_owned()?;
        let index = usize::from(index);
        self.links.lock().served[index] = Some(descriptor);
        Ok(Siblings { group: self.clone(), index })
    }
}

/// What a look came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// What was received may start.
    Go,
    /// The kernel has closed this connection: nothing that was received by it may start.
    Over,
}

impl Siblings {
    /// To be asked after requests were received and before they start. Pending while another connection
    /// that the kernel has closed is still served.
    pub(crate) fn poll_look(&self, cx: &mut Context<'_>) -> Poll<Look> {
        let mut links = self.group.links.lock();
        if links.served.len() == 1 {
            return Poll::Ready(Look::Go); // the kernel never closes its only one by itself
        }
        let is_closed =
            |link: &Option<OwnedFd>| link.as_ref().is_some_and(|fd| is_hung_up(fd.as_fd()));
        if is_closed(&links.served[self.index]) {
            return Poll::Ready(Look::Over);
        }
        if links.served.iter().any(is_closed) {
            links.waiting.push(cx.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(Look::Go)
    }
}

impl Drop for Siblings {
    fn drop(&mut self) {
        let mut links = self.group.links.lock();
        links.served[self.index] = None;
        links.waiting.drain(..).for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_closed_connection_is_waited_for_and_starts_nothing() {
        let group = Group::new(2);
        let ((first, first_kernel), (second, _second_kernel)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let one = group.join(0, &first).unwrap();
        let two = group.join(1, &second).unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        assert_eq!(two.poll_look(&mut cx), Poll::Ready(Look::Go));
        drop(first_kernel);
        assert_eq!(one.poll_look(&mut cx), Poll::Ready(Look::Over));
        assert_eq!(two.poll_look(&mut cx), Poll::Pending, "what it left may still start");
        let waits = std::future::poll_fn(|cx| two.poll_look(cx));
        let (look, ()) = tokio::join!(waits, async { drop(one) });
        assert_eq!(look, Look::Go);
    }
}
