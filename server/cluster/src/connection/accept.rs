//! The accepting side of a connection.
//!
//! Invariants:
//! - A stranger gets as far as the join service, within a deadline, and no further.
//! - The kind of the peer (admitted node or joiner) comes from the handshake, never from its hello.

use super::{
    Answer, Connection, HANDSHAKE_TIME_MAX, HELLO_MAGIC, Hello, HelloError, PROTOCOL_VERSION,
    PeerStream, Refused, Service, buffered, prepare, read_message,
};
use crate::identity::NodeId;
use crate::membership::Membership;
use crate::tls::{Acceptors, JOINERS};
use block::{Error, ErrorKind, Result};
use rustls::pki_types::CertificateDer;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::LazyConfigAcceptor;

/// Time for which a refused peer may still send, so that it reads the refusal. Chosen by hand.
const LINGER: Duration = Duration::from_secs(1);
/// Bytes that are read from it meanwhile.
const LINGER_BYTES_MAX: u64 = 64 << 10;

/// The peer, as the handshake has proven it.
#[derive(Debug)]
pub(crate) enum Caller {
    /// An admitted node.
    Node(NodeId),
    /// The owner of this certificate, which wants to join.
    Joiner(CertificateDer<'static>),
}

/// A connection whose hello was read and not answered.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub caller: Caller,
    pub service: Service,
    pub hello: Hello,
    stream: PeerStream,
}

fn failed(error: std::io::Error) -> Error {
    Error::with_source(ErrorKind::Unavailable, "shake hands with a peer", error)
}

/// Performs the handshake and reads the hello. A peer that is refused has its answer when this
/// returns.
///
/// # Errors
/// For messages only: the connection is gone.
pub(crate) async fn accept(
    socket: TcpStream,
    membership: &Membership,
    acceptors: &Acceptors,
) -> Result<Incoming> {
    let accepted = timeout(HANDSHAKE_TIME_MAX, shake(socket, membership, acceptors)).await;
    let late = |_| Err(Error::new(ErrorKind::Unavailable, "wait for a peer's hello: too long"));
    accepted.unwrap_or_else(late)
}

async fn shake(
    socket: TcpStream,
    membership: &Membership,
    acceptors: &Acceptors,
) -> Result<Incoming> {
    prepare(&socket).map_err(failed)?;
    let start = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), buffered(socket));
    let start = start.await.map_err(failed)?;
    let is_joiner = start
        .client_hello()
        .alpn()
        .is_some_and(|mut protocols| protocols.any(|protocol| protocol == JOINERS));
    let config = if is_joiner { &acceptors.joiners } else { &acceptors.nodes };
    let shaken = start.into_stream(Arc::clone(config)).into_fallible().await;
    let tls = match shaken {
        Ok(tls) => tls,
        Err((error, socket)) => {
            linger(socket).await;
            return Err(failed(error));
        }
    };
    let certificate = tls.get_ref().1.peer_certificates().and_then(<[_]>::first).cloned();
    let unknown = || Error::new(ErrorKind::Denied, "a peer has no certificate");
    let certificate = certificate.ok_or_else(unknown)?;
    let (caller, link) = match is_joiner {
        true => (Caller::Joiner(certificate.into_owned()), None),
        false => {
            let node = NodeId::of(&certificate);
            let link = membership.links().enter(node, tls.get_ref().0.get_ref())?;
            // A removal between the handshake and the entry cut no link of ours.
            if membership.admitted(&certificate).is_none() {
                return Err(Error::new(ErrorKind::Denied, format!("node {node} was removed")));
            }
            (Caller::Node(node), Some(link))
        }
    };
    let mut stream = PeerStream::new(tls.into(), link);
    let (version, body) = match read_message(&mut stream, HELLO_MAGIC).await.map_err(failed)? {
        Ok(message) => message,
        Err(error) => return Err(odd(error)),
    };
    if let Some(version) = version {
        let text = format!("this node speaks version {PROTOCOL_VERSION}, and not {version}");
        return Err(refuse(stream, Refused::Version, text).await);
    }
    let hello = Hello::decode(&body).map_err(odd)?;
    let ours = membership.cluster();
    if hello.cluster != ours {
        let text = format!("this node is in cluster {ours}, and not in {}", hello.cluster);
        return Err(refuse(stream, Refused::Cluster, text).await);
    }
    let Some(service) = Service::from_number(hello.service) else {
        let text = format!("this node has no service {}", hello.service);
        return Err(refuse(stream, Refused::Service, text).await);
    };
    if is_joiner != (service == Service::Join) {
        let text = "strangers may join, and admitted nodes may do everything else".to_owned();
        return Err(refuse(stream, Refused::NotAdmitted, text).await);
    }
    Ok(Incoming { caller, service, hello, stream })
}

fn odd(error: HelloError) -> Error {
    Error::new(ErrorKind::Corrupt, format!("a peer sent no hello of this protocol ({error:?})"))
}

/// Answers with a refusal. Returns it as an error, for messages.
async fn refuse(mut stream: PeerStream, refused: Refused, text: String) -> Error {
    let error = Error::new(refused.kind(), format!("refused a connection: {text}"));
    let answer = Answer { refused: Some(refused), list: [0; 32], text };
    if stream.write_all(&answer.encode()).await.is_ok() {
        linger(stream).await;
    }
    error
}

/// Ends our direction and reads on for a moment. Closing a socket with unread bytes would reset the
/// connection, and the peer might never read the last message.
async fn linger<S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin>(mut stream: S) {
    let read_to_end = async {
        if stream.shutdown().await.is_ok() {
            let mut rest = stream.take(LINGER_BYTES_MAX);
            let _ = tokio::io::copy(&mut rest, &mut tokio::io::sink()).await;
        }
    };
    let _ = timeout(LINGER, read_to_end).await;
}

impl Incoming {
    /// Accepts the connection. Returns its stream.
    ///
    /// # Errors
    /// `Unavailable` if the connection is broken.
    pub async fn accept(mut self, membership: &Membership) -> Result<PeerStream> {
        let list = match self.caller {
            Caller::Node(_) => membership.list().digest(),
            Caller::Joiner(_) => [0; 32],
        };
        let answer = Answer { refused: None, list, text: String::new() };
        let written = timeout(HANDSHAKE_TIME_MAX, async {
            self.stream.write_all(&answer.encode()).await?;
            self.stream.flush().await
        });
        let late = |_| failed(std::io::ErrorKind::TimedOut.into());
        written.await.map_err(late)?.map_err(failed)?;
        Ok(self.stream)
    }

    /// Refuses the connection.
    pub async fn refuse(self, refused: Refused, text: String) {
        let _ = timeout(HANDSHAKE_TIME_MAX, refuse(self.stream, refused, text)).await;
    }
}

impl Connection {
    /// Makes the connection of a service from an accepted stream.
    pub(crate) fn new(
        (peer, peer_name): (NodeId, String),
        service: Service,
        pool: Option<uuid::Uuid>,
        stream: PeerStream,
    ) -> Connection {
        Connection { peer, peer_name, service, pool, stream }
    }
}
