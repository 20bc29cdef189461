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

use crate::stream::any_hung_up;
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
    /// The kernel has closed this connection and another one: it ends at once, so that they do not wait
    /// for each other.
    Over,
}

impl Siblings {
    /// To be asked after something was received and before it starts: pending while another connection
    /// that the kernel has closed is served. What lies in that one runs before its end, which is waited
    /// for; so it may start what it has without a further look.
    pub(crate) fn poll_look(&self, cx: &mut Context<'_>) -> Poll<Look> {
        let mut links = self.group.links.lock();
        if links.served.len() == 1 {
            return Poll::Ready(Look::Go); // the kernel never closes its only one by itself
        }
        let others = links.served.iter().enumerate().filter(|(index, _)| *index != self.index);
        if !any_hung_up(others.filter_map(|(_, link)| Some(link.as_ref()?.as_fd()))) {
            return Poll::Ready(Look::Go);
        }
        if any_hung_up(links.served[self.index].iter().map(AsFd::as_fd)) {
            return Poll::Ready(Look::Over);
        }
        links.waiting.push(cx.waker().clone());
        Poll::Pending
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
    async fn a_connection_that_the_kernel_has_closed_is_waited_for() {
        let group = Group::new(3);
        let ((first, first_kernel), (second, second_kernel), (third, _third_kernel)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let one = group.join(0, &first).unwrap();
        let two = group.join(1, &second).unwrap();
        let three = group.join(2, &third).unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        assert_eq!(two.poll_look(&mut cx), Poll::Ready(Look::Go));
        drop(first_kernel);
        assert_eq!(one.poll_look(&mut cx), Poll::Ready(Look::Go), "it goes on with what it has");
        assert_eq!(two.poll_look(&mut cx), Poll::Pending, "what it left may still start");
        drop(second_kernel);
        assert_eq!(
            one.poll_look(&mut cx),
            Poll::Ready(Look::Over),
            "two would wait for each other"
        );
        assert_eq!(two.poll_look(&mut cx), Poll::Ready(Look::Over));
        assert_eq!(three.poll_look(&mut cx), Poll::Pending);
        let waits = std::future::poll_fn(|cx| three.poll_look(cx));
        let (look, ()) = tokio::join!(waits, async { drop((one, two)) });
        assert_eq!(look, Look::Go);
    }
}
