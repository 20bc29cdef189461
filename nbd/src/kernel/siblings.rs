//! Tracks the connections of one device, and which of them the kernel has given up.
//!
//! If a device has several connections, the kernel declares one dead that owes an answer for too
//! long. It closes that connection, then sends the unanswered requests on another one. Requests
//! still unread in the closed connection are therefore older than those that later arrive on the
//! others.
//!
//! Invariants:
//! - No request received on one connection starts while another one is closed by the kernel and
//!   still served. The kernel repeats requests only after the close, so a look after the receipt
//!   sees the close.

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
    /// A second descriptor of each connection that is served, to look at.
    served: Vec<Option<OwnedFd>>,
    /// Connections that wait for the end of another one.
    waiting: Vec<Waker>,
}

/// One connection's view of the others. Dropping it records that the connection is no longer
/// served.
pub struct Siblings {
    group: Arc<Group>,
    index: usize,
}

impl Group {
    pub(super) fn new(connection_count: u16) -> Arc<Group> {
        let served = (0..connection_count).map(|_| None).collect();
        Arc::new(Group { links: Mutex::new(Links { served, waiting: Vec::new() }) })
    }

    /// Registers connection `index`, which is about to be served.
    pub(super) fn join(self: &Arc<Self>, index: u16, stream: &UnixStream) -> io::Result<Siblings> {
        let descriptor = stream.as_fd().try_clone_to_owned()?;
        let index = usize::from(index);
        self.links.lock().served[index] = Some(descriptor);
        Ok(Siblings { group: self.clone(), index })
    }
}

/// The result of a look at the other connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// The received requests may start.
    Go,
    /// The kernel has closed this connection and another one. This one ends at once, so that they
    /// do not wait for each other.
    Over,
}

impl Siblings {
    /// Looks at the other connections; call it after bytes have arrived and before their requests
    /// start. It is pending while another connection that the kernel has closed is served. That
    /// connection runs its remaining requests before it ends, so it may start them without a
    /// further look.
    pub(crate) fn poll_look(&self, cx: &mut Context<'_>) -> Poll<Look> {
        let mut links = self.group.links.lock();
        if links.served.len() == 1 {
            return Poll::Ready(Look::Go); // the kernel does not give up its only connection
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
