//! Connections between nodes: TLS, a hello and its answer, then frames or a raw stream.
//!
//! Invariants:
//! - A stream of an admitted node is in the table of links for its whole life; after a cut every
//!   read and write is an error, including bytes that had arrived before.
//! - A frame is complete or an error. A call that was dropped in the middle of a frame makes all
//!   later calls fail.
//! - Payloads go to the TLS layer from the buffers of the caller.

pub(crate) mod accept;
pub(crate) mod dial;
mod frame;
mod hello;

pub use frame::{FRAME_HEADER_BYTES, FrameError, FrameHeader};
pub use hello::{
    ANSWER_MAGIC, Answer, HELLO_MAGIC, Hello, HelloError, PREFIX_BYTES, PROTOCOL_VERSION, Refused,
    Service, decode_prefix,
};

use crate::identity::NodeId;
use crate::links::Link;
use block::{Error, ErrorKind, Result};
use bytes::{Bytes, BytesMut};
use rustix::net::sockopt;
use std::fmt;
use std::io::{Error as IoError, IoSlice, Result as IoResult};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{
    AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, ReadBuf, ReadHalf, WriteHalf,
};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;
use uuid::Uuid;

/// Time for TLS, hello and answer. Chosen by hand: a few round trips around the world and a busy
/// peer.
pub(crate) const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);
/// Silence after which the kernel asks whether the peer is there, and the time between questions.
/// Chosen by hand.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(3);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(1);
/// Longest time for which data or such a question stays unacknowledged, in milliseconds; it takes the place
/// of a number of questions (tcp(7)). Chosen by hand: a live peer that reads nothing for that long loses the
/// connection, too.
const UNHEARD_MS_MAX: u32 = 20_000;

/// Bytes that one call takes from a socket. Chosen by hand: some TLS records. Source: rustls 0.23 reads 4 KiB at a time,
/// and shrinks its buffer in between.
const SOCKET_BUFFER_BYTES: usize = 64 << 10;

/// What TLS reads from.
type Socket = BufReader<TcpStream>;

fn buffered(socket: TcpStream) -> Socket {
    BufReader::with_capacity(SOCKET_BUFFER_BYTES, socket)
}

/// Prepares a socket: small messages leave at once, and a lost peer is noticed.
fn prepare(socket: &TcpStream) -> IoResult<()> {
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_user_timeout(socket, UNHEARD_MS_MAX)?;
    Ok(())
}

/// The encrypted stream between two nodes.
pub struct PeerStream {
    tls: Box<TlsStream<Socket>>,
    /// `None` for the connection of a joiner.
    link: Option<Link>,
}

impl fmt::Debug for PeerStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerStream").field("link", &self.link).finish_non_exhaustive()
    }
}

impl PeerStream {
    pub(crate) fn new(tls: TlsStream<Socket>, link: Option<Link>) -> PeerStream {
        PeerStream { tls: Box::new(tls), link }
    }

    fn check(&self) -> IoResult<()> {
        match &self.link {
            Some(link) if link.is_cut() => {
                let why = "the node was removed from the cluster";
                Err(IoError::new(std::io::ErrorKind::ConnectionAborted, why))
            }
            _ => Ok(()),
        }
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<IoResult<()>> {
        let polled = Pin::new(&mut self.tls).poll_read(cx, buf);
        self.check()?;
        polled
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<IoResult<usize>> {
        self.check()?;
        Pin::new(&mut self.tls).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<IoResult<usize>> {
        self.check()?;
        Pin::new(&mut self.tls).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.tls.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<IoResult<()>> {
        self.check()?;
        Pin::new(&mut self.tls).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<IoResult<()>> {
        Pin::new(&mut self.tls).poll_shutdown(cx)
    }
}

/// An accepted connection to an admitted node.
#[derive(Debug)]
pub struct Connection {
    peer: NodeId,
    peer_name: String,
    service: Service,
    pool: Option<Uuid>,
    stream: PeerStream,
}

impl Connection {
    /// Returns the node at the other end, which the handshake has proven.
    #[must_use]
    pub fn peer(&self) -> NodeId {
        self.peer
    }

    /// Returns the name of that node, for messages.
    #[must_use]
    pub fn peer_name(&self) -> &str {
        &self.peer_name
    }

    /// Returns the service.
    #[must_use]
    pub fn service(&self) -> Service {
        self.service
    }

    /// Returns the pool that the connection is about.
    #[must_use]
    pub fn pool(&self) -> Option<Uuid> {
        self.pool
    }

    /// Returns the raw stream, for the service `forward`.
    #[must_use]
    pub fn into_stream(self) -> PeerStream {
        self.stream
    }

    /// Returns the two directions as frames, for all other services.
    #[must_use]
    pub fn into_frames(self) -> (FrameReader, FrameWriter) {
        frames(self.stream, self.service, format!("node {}", self.peer_name))
    }
}

/// Divides a stream into frames. `peer` is for messages.
pub(crate) fn frames(
    stream: PeerStream,
    service: Service,
    peer: String,
) -> (FrameReader, FrameWriter) {
    let (read, write) = tokio::io::split(stream);
    let max = service.payload_bytes_max();
    let reader = FrameReader { stream: read, max, peer: peer.clone(), is_broken: false };
    (reader, FrameWriter { stream: write, max, peer, is_broken: false })
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Kind of the message, to the service.
    pub kind: u8,
    /// Request that the message belongs to, to the service.
    pub request: u64,
    /// The rest.
    pub payload: Bytes,
}

/// Reads the frames of the peer.
#[derive(Debug)]
pub struct FrameReader {
    stream: ReadHalf<PeerStream>,
    max: u32,
    peer: String,
    is_broken: bool,
}

impl FrameReader {
    /// Refuses payloads longer than this from now on, where the caller knows that its peer sends none. The bound of the
    /// service holds, too.
    pub fn limit(&mut self, payload_bytes_max: u32) {
        self.max = self.max.min(payload_bytes_max);
    }

    /// Reads the next frame; `None` once the peer has closed its direction between two frames.
    /// Dropping the call before it returns makes the connection unusable.
    ///
    /// # Errors
    /// `Unavailable` if the connection breaks; `Corrupt` for bytes that are no frame.
    pub async fn read(&mut self) -> Result<Option<Frame>> {
        refuse_broken(self.is_broken, &self.peer)?;
        self.is_broken = true;
        let frame = self.read_frame().await?;
        self.is_broken = false;
        Ok(frame)
    }

    async fn read_frame(&mut self) -> Result<Option<Frame>> {
        let mut header = [0; FRAME_HEADER_BYTES];
        let peer = &self.peer;
        let failed = |error| lost(format!("read a message of {peer}"), error);
        let first_bytes = self.stream.read(&mut header).await.map_err(failed)?;
        if first_bytes == 0 {
            return Ok(None);
        }
        let (_, rest) = header.split_at_mut(first_bytes);
        self.stream.read_exact(rest).await.map_err(failed)?;
        let header = FrameHeader::decode(&header, self.max).map_err(|error| {
            Error::with_source(ErrorKind::Corrupt, format!("read a message of {peer}"), error)
        })?;
        let length = usize::try_from(header.payload_bytes).unwrap_or(usize::MAX);
        let mut payload = BytesMut::with_capacity(length);
        let mut rest = (&mut self.stream).take(u64::from(header.payload_bytes));
        while payload.len() < length {
            if rest.read_buf(&mut payload).await.map_err(failed)? == 0 {
                return Err(failed(std::io::ErrorKind::UnexpectedEof.into()));
            }
        }
        Ok(Some(Frame { kind: header.kind, request: header.request, payload: payload.freeze() }))
    }
}

/// Writes frames to the peer.
#[derive(Debug)]
pub struct FrameWriter {
    stream: WriteHalf<PeerStream>,
    max: u32,
    peer: String,
    is_broken: bool,
}

impl FrameWriter {
    /// Writes a frame whose payload is the concatenation of `parts`. It returns when the kernel has
    /// all of it. Dropping the call before it returns makes the connection unusable.
    ///
    /// # Errors
    /// `Invalid` for a payload longer than the service allows; `Unavailable` if the connection
    /// breaks.
    pub async fn write(&mut self, kind: u8, request: u64, parts: &[Bytes]) -> Result<()> {
        refuse_broken(self.is_broken, &self.peer)?;
        let total_bytes: usize = parts.iter().map(Bytes::len).sum();
        let payload_bytes = u32::try_from(total_bytes)
            .ok()
            .filter(|length| *length <= self.max)
            .ok_or_else(|| {
                let max = self.max;
                let context = format!("a message of {total_bytes} bytes is longer than {max}");
                Error::new(ErrorKind::Invalid, context)
            })?;
        self.is_broken = true;
        let header = FrameHeader { payload_bytes, kind, request }.encode();
        let mut slices = vec![IoSlice::new(&header)];
        slices.extend(parts.iter().filter(|part| !part.is_empty()).map(|part| IoSlice::new(part)));
        let peer = &self.peer;
        let failed = |error| lost(format!("write a message to {peer}"), error);
        let mut rest = &mut slices[..];
        while !rest.is_empty() {
            let count = self.stream.write_vectored(rest).await.map_err(failed)?;
            if count == 0 {
                return Err(failed(std::io::ErrorKind::WriteZero.into()));
            }
            IoSlice::advance_slices(&mut rest, count);
        }
        self.stream.flush().await.map_err(failed)?;
        self.is_broken = false;
        Ok(())
    }

    /// Allows payloads as long as those of `service`, which the peer expects.
    pub(crate) fn allow(&mut self, service: Service) {
        self.max = service.payload_bytes_max();
    }

    /// Closes this direction: the peer's reader sees the end after the frames that were written.
    ///
    /// # Errors
    /// `Unavailable` if the connection is broken.
    pub async fn close(&mut self) -> Result<()> {
        let peer = &self.peer;
        let closed = self.stream.shutdown().await;
        closed.map_err(|error| lost(format!("close the connection to {peer}"), error))
    }
}

fn refuse_broken(is_broken: bool, peer: &str) -> Result<()> {
    match is_broken {
        false => Ok(()),
        true => {
            let context = format!("the connection to {peer} broke in the middle of a message");
            Err(Error::new(ErrorKind::Unavailable, context))
        }
    }
}

fn lost(context: String, error: IoError) -> Error {
    Error::with_source(ErrorKind::Unavailable, context, error)
}

/// Reads a hello or an answer: the version if it is not ours, and the body.
async fn read_message<S: AsyncRead + Unpin>(
    stream: &mut S,
    magic: &[u8; 8],
) -> IoResult<Result<(Option<u16>, Vec<u8>), HelloError>> {
    let mut prefix = [0; PREFIX_BYTES];
    stream.read_exact(&mut prefix).await?;
    let (length, version) = match decode_prefix(&prefix, magic) {
        Ok(decoded) => decoded,
        Err(error) => return Ok(Err(error)),
    };
    let mut body = vec![0; usize::from(length)];
    stream.read_exact(&mut body).await?;
    Ok(Ok((version, body)))
}

/// Returns the digits of a golden file: `#` starts a comment.
#[cfg(test)]
pub(crate) fn digits(text: &str) -> String {
    let lines = text.lines().filter_map(|line| line.split('#').next());
    lines.flat_map(str::chars).filter(|character| !character.is_whitespace()).collect()
}
