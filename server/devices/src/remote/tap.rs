//! Relays a connection and notices when the server owes an answer and stays silent.
//!
//! Invariants:
//! - Bytes pass unchanged and in order.
//! - A server that owes nothing is never silent, however long nothing is asked.

use super::relay::RELAY_BYTES;
use super::traffic::{Senseless, Traffic};
use nbd::client::Wire;
use parking_lot::Mutex;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;

/// Looks at a connection during the longest permitted silence.
const LOOK_COUNT: u32 = 10;

/// Reason for the end of a relay.
pub(super) enum Ended {
    /// An end was closed or has failed, or broke the protocol.
    Closed(io::Result<(u64, u64)>),
    /// The server owes an answer and has sent nothing for too long.
    Silent,
}

/// Side of a connection.
#[derive(Clone, Copy)]
enum Side {
    Kernel,
    Server,
}

/// A stream whose incoming bytes are followed.
struct Tap<S> {
    inner: S,
    side: Side,
    traffic: Arc<Mutex<Traffic>>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Tap<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let tap = self.get_mut();
        let before = buffer.filled().len();
        ready!(Pin::new(&mut tap.inner).poll_read(cx, buffer))?;
        let bytes = buffer.filled().get(before..).unwrap_or_default();
        let mut traffic = tap.traffic.lock();
        let followed = match tap.side {
            Side::Kernel => traffic.sent(bytes),
            Side::Server => traffic.received(bytes),
        };
        Poll::Ready(followed.map_err(|Senseless| {
            io::Error::new(io::ErrorKind::InvalidData, "bytes that the protocol does not permit")
        }))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Tap<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}

/// A connection of the kernel and one of the server.
pub(super) struct Tapped {
    kernel: Tap<UnixStream>,
    server: Tap<Box<dyn Wire>>,
    traffic: Arc<Mutex<Traffic>>,
}

impl Tapped {
    /// Joins the two connections, of which nothing was read yet.
    pub fn new(kernel: UnixStream, server: Box<dyn Wire>) -> Tapped {
        let traffic = Arc::<Mutex<Traffic>>::default();
        Tapped {
            kernel: Tap { inner: kernel, side: Side::Kernel, traffic: traffic.clone() },
            server: Tap { inner: server, side: Side::Server, traffic: traffic.clone() },
            traffic,
        }
    }

    /// Relays until an end closes, or until the server owes an answer and has sent nothing for
    /// `silence_max`. Both connections are closed when this returns or is dropped.
    pub async fn run(mut self, silence_max: Duration) -> Ended {
        let relayed = tokio::io::copy_bidirectional_with_sizes(
            &mut self.kernel,
            &mut self.server,
            RELAY_BYTES,
            RELAY_BYTES,
        );
        tokio::select! {
            ended = relayed => Ended::Closed(ended),
            () = silence(&self.traffic, silence_max) => Ended::Silent,
        }
    }
}

/// Resolves when the server has owed an answer and sent nothing for `silence_max`.
async fn silence(traffic: &Mutex<Traffic>, silence_max: Duration) {
    let (mut seen, mut silent_count) = (0, 0);
    while silent_count < LOOK_COUNT {
        tokio::time::sleep(silence_max / LOOK_COUNT).await;
        let (progress, is_awaited) = {
            let traffic = traffic.lock();
            (traffic.progress(), traffic.is_awaited())
        };
        silent_count = if is_awaited && progress == seen { silent_count + 1 } else { 0 };
        seen = progress;
    }
}
