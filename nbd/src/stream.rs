//! The three kinds of byte stream of a client, and the buffer in front of them.
//!
//! Invariants:
//! - [`Inbox`] never grows: its size bounds the unsolicited bytes that one connection buffers.
//! - No byte that arrived before encryption is interpreted after it.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::server::TlsStream;

/// A connection without TLS, or the transport under it.
#[derive(Debug)]
pub enum Plain {
    /// TCP.
    Tcp(TcpStream),
    /// Unix socket.
    Unix(UnixStream),
}

/// A connection as sessions see it.
#[derive(Debug)]
pub enum Stream {
    /// Without encryption.
    Plain(Plain),
    /// With encryption.
    Tls(Box<TlsStream<Plain>>),
}

impl AsFd for Plain {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Plain::Tcp(stream) => stream.as_fd(),
            Plain::Unix(stream) => stream.as_fd(),
        }
    }
}

impl Stream {
    /// Returns the connection itself, or the one under TLS.
    pub(crate) fn plain(&self) -> &Plain {
        match self {
            Stream::Plain(plain) => plain,
            Stream::Tls(stream) => stream.get_ref().0,
        }
    }

    /// Whether the peer has closed the connection or its sending direction. Earlier bytes of the
    /// peer may still be unread.
    pub(crate) fn is_closed_by_peer(&self) -> bool {
        is_closed(self.plain().as_fd())
    }
}

/// Whether the peer of a socket has closed it or its sending direction.
pub(crate) fn is_closed(socket: BorrowedFd<'_>) -> bool {
    let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::RDHUP;
    let mut asked = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
    let found = poll(&mut asked, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    found.is_ok() && asked[0].revents().intersects(gone)
}

/// Whether a peer of one of the sockets has closed both directions or has died, and so receives no
/// more. Earlier bytes of that peer may still be unread.
pub fn any_hung_up<'a>(sockets: impl Iterator<Item = BorrowedFd<'a>>) -> bool {
    // poll(2) reports a hang-up whether or not it was asked for.
    let mut asked: Vec<PollFd<'_>> =
        sockets.map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::empty())).collect();
    let found = poll(&mut asked, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    let gone = PollFlags::HUP | PollFlags::ERR;
    found.is_ok() && asked.iter().any(|asked| asked.revents().intersects(gone))
}

macro_rules! each {
    ($self:expr, $kind:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            $kind::Tcp($stream) => $call,
            $kind::Unix($stream) => $call,
        }
    };
}

impl AsyncRead for Plain {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        each!(self, Plain, stream => Pin::new(stream).poll_read(cx, buf))
    }
}

impl AsyncWrite for Plain {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        each!(self, Plain, stream => Pin::new(stream).poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        each!(self, Plain, stream => Pin::new(stream).poll_write_vectored(cx, parts))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, Plain, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, Plain, stream => Pin::new(stream).poll_shutdown(cx))
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, parts),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_write_vectored(cx, parts),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Stream::Plain(_) => true,
            Stream::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
        }
    }
}

/// Bytes that have arrived and not been consumed, in a buffer of fixed size.
#[derive(Debug)]
pub struct Inbox {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Inbox {
    /// Creates an empty inbox for `capacity_bytes`.
    pub fn new(capacity_bytes: usize) -> Self {
        Inbox { buffer: vec![0; capacity_bytes].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Returns a larger inbox with the same bytes.
    pub fn grown(&self, capacity_bytes: usize) -> Self {
        let bytes = self.bytes();
        let mut grown = Inbox::new(capacity_bytes.max(bytes.len()));
        grown.buffer[..bytes.len()].copy_from_slice(bytes);
        grown.end = bytes.len();
        grown
    }

    /// Returns the bytes that have arrived.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Drops the first `count` of [`Inbox::bytes`].
    pub fn consume(&mut self, count: usize) {
        assert!(count <= self.end - self.start, "consumed bytes that never arrived");
        self.start += count;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Reads once from `stream` into the free space; 0 is the end of the stream. There must be free
    /// space, which holds if the caller waits for less than half of the capacity.
    pub fn poll_fill<S: AsyncRead + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut S,
    ) -> Poll<io::Result<usize>> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let mut buf = ReadBuf::new(&mut self.buffer[self.end..]);
        assert!(buf.capacity() > 0, "a full inbox is never filled");
        ready!(Pin::new(stream).poll_read(cx, &mut buf))?;
        let count = buf.filled().len();
        self.end += count;
        Poll::Ready(Ok(count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    #[tokio::test]
    async fn vanished_peer_is_distinguished_from_a_silent_one() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let is_gone = || any_hung_up(std::iter::once(ours.as_fd()));
        assert!(!is_gone());
        theirs.write_all(b"unread").await.unwrap();
        theirs.shutdown().await.unwrap();
        assert!(!is_gone(), "it still takes replies");
        drop(theirs);
        assert!(is_gone());
    }
}
