//! Connections that another part of the process hands to the server, for clients of other nodes.
//!
//! Invariants:
//! - The server treats such a client as one on another machine, whatever socket it used there.
//! - A bounded number of connections waits for the server.

use crate::exports::{Over, Peer};
use block::{Error, ErrorKind, Result};
use tokio::net::UnixStream;
use tokio::sync::{Mutex, mpsc};

/// Connections that may wait for the server. Chosen by hand: it takes them as fast as they come.
const WAITING_MAX: usize = 64;

/// The way into a server for the connections of one kind.
#[derive(Clone, Debug)]
pub struct Passage {
    over: Over,
    sender: mpsc::Sender<(UnixStream, Peer)>,
}

impl Passage {
    /// Hands a connection to the server, and returns the other end of it. `by` names the node that the client
    /// is connected to. Waits while the server has too many that it did not take yet.
    ///
    /// # Errors
    /// `Unavailable` if the server has stopped, `Io` if the process has no file descriptor left.
    pub async fn open(&self, by: &str) -> Result<UnixStream> {
        let failed = |e| Error::with_source(ErrorKind::Io, "connect a passed-on client", e);
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let peer = Peer::Node { name: by.into(), over: self.over };
        self.sender.send((theirs, peer)).await.map_err(|_| {
            Error::new(ErrorKind::Unavailable, "connect a passed-on client: the server has stopped")
        })?;
        Ok(ours)
    }
}

/// The server's end of a [`Passage`].
#[derive(Debug)]
pub(crate) struct Passed {
    over: Over,
    receiver: Mutex<mpsc::Receiver<(UnixStream, Peer)>>,
}

impl Passed {
    /// Waits for a connection; forever once every [`Passage`] is gone.
    pub(crate) async fn accept(&self) -> (UnixStream, Peer) {
        match self.receiver.lock().await.recv().await {
            Some(passed) => passed,
            None => std::future::pending().await,
        }
    }
}

impl std::fmt::Display for Passed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "clients of other nodes ({})", self.over)
    }
}

/// Makes the two ends for the clients that used a socket of this kind at another node.
pub(crate) fn passage(over: Over) -> (Passed, Passage) {
    let (sender, receiver) = mpsc::channel(WAITING_MAX);
    (Passed { over, receiver: Mutex::new(receiver) }, Passage { over, sender })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn passed_client_has_the_name_of_its_node_until_the_server_stops() {
        for over in [Over::Unix, Over::Tcp] {
            let (passed, passage) = passage(over);
            let _end = passage.open("b").await.unwrap();
            let (_, peer) = passed.accept().await;
            assert_eq!(peer, Peer::Node { name: "b".into(), over });
            drop(passed);
            assert_eq!(passage.open("b").await.unwrap_err().kind(), ErrorKind::Unavailable);
        }
    }
}
