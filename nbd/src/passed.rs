//! Connections that another part of the process hands to the server, for clients of other nodes.
//!
//! Invariants:
//! - The server treats such a client as one on another machine, whatever socket it used there.
//! - A bounded number of connections waits for the server.

use crate::exports::Peer;
use crate::server::{Listener, Socket};
use block::{Error, ErrorKind, Result};
use tokio::net::UnixStream;
use tokio::sync::{Mutex, mpsc};

/// Connections that may wait for the server. Chosen by hand: it takes them as fast as they come.
const WAITING_MAX: usize = 64;

/// The kind of socket that a client used at the other node. The rules of that kind apply to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// TCP.
    Tcp,
    /// A unix socket.
    Unix,
}

impl std::fmt::Display for Over {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Over::Tcp => "TCP",
            Over::Unix => "unix socket",
        })
    }
}

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

impl Listener {
    /// Makes a listener for clients that used a socket of this kind at another node: their rules are the same.
    #[must_use]
    pub fn passage(&self) -> (Listener, Passage) {
        let over = if self.tcp_address().is_some() { Over::Tcp } else { Over::Unix };
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        let socket = Socket::Passed(Passed { over, receiver: Mutex::new(receiver) });
        (Listener { socket, tls: self.tls }, Passage { over, sender })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::TlsMode;

    #[tokio::test]
    async fn passed_client_has_the_kind_and_mode_of_the_socket() {
        let dir = tempfile::tempdir().unwrap();
        let unix = Listener::unix(&dir.path().join("s"), 0o600, TlsMode::On).await.unwrap();
        let tcp = Listener::tcp("127.0.0.1:0".parse().unwrap(), TlsMode::Required).await.unwrap();
        for (socket, over, tls) in
            [(unix, Over::Unix, TlsMode::On), (tcp, Over::Tcp, TlsMode::Required)]
        {
            let (listener, passage) = socket.passage();
            assert_eq!(listener.tls, tls);
            let _end = passage.open("b").await.unwrap();
            let Socket::Passed(passed) = &listener.socket else { panic!("{listener:?}") };
            let (_, peer) = passed.accept().await;
            assert_eq!(peer, Peer::Node { name: "b".into(), over });
            drop(listener);
            assert_eq!(passage.open("b").await.unwrap_err().kind(), ErrorKind::Unavailable);
        }
    }
}
