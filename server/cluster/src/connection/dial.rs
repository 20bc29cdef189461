//! The dialing side of a connection.
//!
//! Invariants:
//! - Every step has a deadline; the addresses of a node are tried in turn.
//! - The error says which side refused, and names both versions if they differ.

use super::{
    ANSWER_MAGIC, Answer, HANDSHAKE_TIME_MAX, Hello, HelloError, PROTOCOL_VERSION, PeerStream,
    buffered, prepare, read_message,
};
use crate::identity::Digest;
use crate::links::Link;
use block::{Error, ErrorKind, Result};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// Time for a name and a TCP connection. Chosen by hand: several retransmissions of the first packet.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);

/// The peer that is dialed.
pub(crate) struct Target<'a> {
    /// For messages, such as "node db2".
    pub peer: String,
    /// Its addresses, in the order in which they are tried.
    pub addresses: &'a [String],
    /// TLS, with the certificate that it must have.
    pub config: Arc<ClientConfig>,
    /// The cause if it has another certificate.
    pub impostor: &'a str,
}

/// Dials the first address that answers, and sends the hello. `enter` gets the socket before any
/// byte of the service. Returns the stream and the digest of the peer's list.
///
/// # Errors
/// Those of the last address; `Unavailable` if the peer cannot be reached, else the peer's refusal.
pub(crate) async fn dial(
    target: &Target<'_>,
    hello: &Hello,
    enter: impl Fn(&TcpStream) -> Result<Option<Link>>,
) -> Result<(PeerStream, Digest)> {
    let peer = &target.peer;
    let mut is_refused = false;
    let mut last = Error::new(ErrorKind::Unavailable, format!("{peer} has no address"));
    for address in target.addresses {
        let attempt = async {
            let socket = connect(address).await?;
            let link = enter(&socket)?;
            let shaken = timeout(HANDSHAKE_TIME_MAX, shake(target, address, hello, socket, link));
            shaken.await.unwrap_or_else(|_| Err(late(&format!("answer of {peer} at {address}"))))
        };
        match attempt.await {
            Ok(connected) => return Ok(connected),
            // A refusal says more than an address that does not answer.
            Err(error) if error.kind() == ErrorKind::Unavailable && is_refused => {}
            Err(error) => {
                is_refused = error.kind() != ErrorKind::Unavailable;
                last = error;
            }
        }
    }
    Err(last)
}

fn late(of: &str) -> Error {
    Error::new(ErrorKind::Unavailable, format!("wait for the {of}: it took too long"))
}

async fn connect(address: &str) -> Result<TcpStream> {
    let failed =
        |error| Error::with_source(ErrorKind::Unavailable, format!("connect to {address}"), error);
    let connected = timeout(CONNECT_TIME_MAX, TcpStream::connect(address)).await;
    let socket = connected.map_err(|_| late(&format!("connection to {address}")))?;
    let socket = socket.map_err(failed)?;
    prepare(&socket).map_err(failed)?;
    Ok(socket)
}

async fn shake(
    target: &Target<'_>,
    address: &str,
    hello: &Hello,
    socket: TcpStream,
    link: Option<Link>,
) -> Result<(PeerStream, Digest)> {
    let peer = &target.peer;
    let name = ServerName::try_from("spindle").expect("a valid name");
    let connector = TlsConnector::from(Arc::clone(&target.config));
    let failed = |error: std::io::Error| match tls_error(&error) {
        Some(rustls::Error::InvalidCertificate(_)) => {
            let context = format!("the process at {address} {}", target.impostor);
            Error::new(ErrorKind::Denied, context)
        }
        Some(rustls::Error::AlertReceived(_)) => {
            let context = format!(
                "{peer} at {address} does not admit this node: it was removed, or {peer} does not \
                 know it yet"
            );
            Error::with_source(ErrorKind::Denied, context, error)
        }
        _ => {
            let context = format!("shake hands with {peer} at {address}");
            Error::with_source(ErrorKind::Unavailable, context, error)
        }
    };
    let tls = connector.connect(name, buffered(socket)).await.map_err(failed)?;
    let mut stream = PeerStream::new(tls.into(), link);
    stream.write_all(&hello.encode()).await.map_err(failed)?;
    stream.flush().await.map_err(failed)?;
    let answer = read_message(&mut stream, ANSWER_MAGIC).await.map_err(failed)?;
    let odd = |_: HelloError| {
        let context = format!("{peer} at {address} gave an answer that is not of this protocol");
        Error::new(ErrorKind::Corrupt, context)
    };
    let (version, body) = answer.map_err(odd)?;
    if let Some(version) = version {
        let context = format!(
            "{peer} at {address} speaks version {version} of the protocol, and this program \
             version {PROTOCOL_VERSION}: run the same version of the program on all nodes"
        );
        return Err(Error::new(ErrorKind::Unsupported, context));
    }
    let answer = Answer::decode(&body).map_err(odd)?;
    match answer.refused {
        None => Ok((stream, answer.list)),
        Some(refused) => {
            let context = format!("{peer} at {address} refused the connection: {}", answer.text);
            Err(Error::new(refused.kind(), context))
        }
    }
}

/// Returns the TLS error in an I/O error.
fn tls_error(error: &std::io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}
