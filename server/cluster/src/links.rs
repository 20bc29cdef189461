//! The open connections of each node, so that the removal of a node closes them.
//!
//! Invariants:
//! - A link is in the table from before the first byte of a service until its stream is dropped.
//! - A cut link returns errors only, and a task that waits for it wakes up.
//! - A node has at most [`LINK_COUNT_MAX`] links.

use crate::identity::NodeId;
use block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustix::net::{Shutdown, shutdown};
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Connections of one node at a time. Chosen by hand: a few for each pool that it shares with this
/// node, and its NBD clients.
pub const LINK_COUNT_MAX: usize = 256;

/// All links of this process. Clones are the same table.
#[derive(Clone, Debug, Default)]
pub struct Links(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    next: u64,
    open: HashMap<NodeId, HashMap<u64, Open>>,
}

#[derive(Debug)]
struct Open {
    socket: OwnedFd,
    is_cut: Arc<AtomicBool>,
}

/// Keeps a connection in the table until it is dropped.
#[derive(Debug)]
pub struct Link {
    node: NodeId,
    number: u64,
    is_cut: Arc<AtomicBool>,
    links: Links,
}

impl Links {
    /// Enters a connection with this node.
    ///
    /// # Errors
    /// `Unavailable` if the node has too many; `Io` without a file descriptor.
    pub fn enter(&self, node: NodeId, socket: impl AsFd) -> Result<Link> {
        let socket = socket.as_fd().try_clone_to_owned().map_err(|error| {
            Error::with_source(ErrorKind::Io, "duplicate the socket of a connection", error)
        })?;
        let mut table = self.0.lock();
        let number = table.next;
        table.next = table.next.wrapping_add(1);
        let of_node = table.open.entry(node).or_default();
        if of_node.len() >= LINK_COUNT_MAX {
            let context =
                format!("node {node} has {LINK_COUNT_MAX} connections, which is the most");
            return Err(Error::new(ErrorKind::Unavailable, context));
        }
        let is_cut = Arc::new(AtomicBool::new(false));
        of_node.insert(number, Open { socket, is_cut: Arc::clone(&is_cut) });
        Ok(Link { node, number, is_cut, links: self.clone() })
    }

    /// Closes all connections with this node. Returns their number.
    pub fn cut(&self, node: NodeId) -> usize {
        let table = self.0.lock();
        let Some(of_node) = table.open.get(&node) else { return 0 };
        for open in of_node.values() {
            open.is_cut.store(true, Ordering::Release);
            // An error means that the peer has closed it already.
            let _ = shutdown(&open.socket, Shutdown::Both);
        }
        of_node.len()
    }

    /// Returns the number of connections with this node.
    #[must_use]
    pub fn count(&self, node: NodeId) -> usize {
        self.0.lock().open.get(&node).map_or(0, HashMap::len)
    }
}

impl Link {
    /// Whether the node was removed.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::Acquire)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let mut table = self.links.0.lock();
        if let Some(of_node) = table.open.get_mut(&self.node) {
            of_node.remove(&self.number);
            if of_node.is_empty() {
                table.open.remove(&self.node);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use uuid::Uuid;

    #[test]
    fn cut_wakes_the_reader_of_that_node_only() {
        let links = Links::default();
        let (first, second) = (NodeId(Uuid::from_u128(1)), NodeId(Uuid::from_u128(2)));
        let (mut near, _far) = UnixStream::pair().unwrap();
        let (other, _other_far) = UnixStream::pair().unwrap();
        let link = links.enter(first, &near).unwrap();
        let untouched = links.enter(second, &other).unwrap();
        let reader = std::thread::spawn(move || near.read(&mut [0; 1]));
        assert_eq!(links.cut(first), 1);
        assert_eq!(reader.join().unwrap().unwrap(), 0, "end of stream");
        assert!(link.is_cut() && !untouched.is_cut());
        drop(link);
        assert_eq!((links.count(first), links.count(second)), (0, 1));
    }

    #[test]
    fn node_with_too_many_connections_is_refused() {
        let links = Links::default();
        let node = NodeId(Uuid::from_u128(1));
        let (socket, _peer) = UnixStream::pair().unwrap();
        let held: Vec<Link> =
            (0..LINK_COUNT_MAX).map(|_| links.enter(node, &socket).unwrap()).collect();
        assert_eq!(links.enter(node, &socket).unwrap_err().kind(), ErrorKind::Unavailable);
        drop(held);
        assert!(links.enter(node, &socket).is_ok());
    }
}
