//! The state of a connection for code outside its session: whether the client has closed it, and
//! how long the client has been silent.
//!
//! Invariants:
//! - Asking has no effect on the connection: no byte is read, and a [`Line`] does not keep its
//!   connection open.

use crate::stream::{Plain, Stream, is_closed};
use block::Silence;
use block::units::array_at;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Time after which a silent TCP client is disconnected, whether or not a reply to it is in flight.
/// Chosen by hand: long enough for a switch to restart or a virtual machine to migrate, and short
/// enough to wait for when a client has died.
pub const CLIENT_TIMEOUT: Duration = Duration::from_secs(120);
/// Keep-alive probes in the second half of that time. Chosen by hand: one or two lost packets must
/// not matter.
pub(crate) const PROBE_COUNT: u32 = 6;
/// Shorter silences are not reported. Chosen by hand: longer than a retransmission on a bad
/// network.
const SILENCE_MIN: Duration = Duration::from_secs(5);

/// The second descriptor of a connection, held by its session.
#[derive(Debug)]
pub(crate) struct Watched {
    socket: OwnedFd,
    is_tcp: bool,
    /// See [`crate::ServerOptions::client_timeout`].
    client_timeout: Duration,
}

/// The state of a connection. The default belongs to no connection.
#[derive(Clone, Debug, Default)]
pub struct Line(Option<Weak<Watched>>);

impl PartialEq for Line {
    fn eq(&self, other: &Line) -> bool {
        match (&self.0, &other.0) {
            (Some(mine), Some(theirs)) => mine.ptr_eq(theirs),
            (mine, theirs) => mine.is_none() && theirs.is_none(),
        }
    }
}

impl Eq for Line {}

impl Watched {
    /// Duplicates the descriptor of the connection.
    pub(crate) fn new(
        stream: &Stream,
        client_timeout: Duration,
    ) -> io::Result<(Arc<Watched>, Line)> {
        let plain = stream.plain();
        let is_tcp = matches!(plain, Plain::Tcp(_));
        let socket = plain.as_fd().try_clone_to_owned()?;
        let watched = Arc::new(Watched { socket, is_tcp, client_timeout });
        let line = Line(Some(Arc::downgrade(&watched)));
        Ok((watched, line))
    }
}

impl block::Line for Line {
    /// Whether the connection has ended, or its client has closed it or its sending direction.
    fn is_over(&self) -> bool {
        match &self.0 {
            None => false,
            Some(watched) => {
                watched.upgrade().is_none_or(|watched| is_closed(watched.socket.as_fd()))
            }
        }
    }

    /// Returns the silence of the client, or `None` if it answers or has nothing to answer.
    fn silence(&self) -> Option<Silence> {
        let watched = self.0.as_ref()?.upgrade()?;
        if !watched.is_tcp {
            return None; // the client runs on this machine
        }
        Progress::of(watched.socket.as_fd())?.silence(watched.client_timeout)
    }
}

/// The kernel's view of a TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Progress {
    /// Keep-alive probes without an answer.
    probe_count: u8,
    /// Retransmissions of the oldest unacknowledged segment. Each pause is twice the one before.
    retransmit_count: u8,
    /// Pause from the last retransmission to the next.
    retransmit_pause: Duration,
    last_received: Duration,
}

/// Bytes of `struct tcp_info` up to the last field that is read here. Source: linux/tcp.h.
const TCP_INFO_BYTES: usize = 60;
const AT_RETRANSMITS: usize = 2; //     u8
const AT_PROBES: usize = 3; //          u8
const AT_RTO: usize = 8; //             u32, us
const AT_LAST_DATA_RECV: usize = 52; // u32, ms
const AT_LAST_ACK_RECV: usize = 56; //  u32, ms

impl Progress {
    fn of(socket: BorrowedFd<'_>) -> Option<Progress> {
        let info = tcp_info(socket)?;
        let number = |at| array_at(&info, at).map(u32::from_ne_bytes);
        let time = |at| number(at).map(|ms| Duration::from_millis(u64::from(ms)));
        Some(Progress {
            probe_count: info[AT_PROBES],
            retransmit_count: info[AT_RETRANSMITS],
            retransmit_pause: Duration::from_micros(u64::from(number(AT_RTO)?)),
            last_received: time(AT_LAST_DATA_RECV)?.min(time(AT_LAST_ACK_RECV)?),
        })
    }

    fn silence(self, client_timeout: Duration) -> Option<Silence> {
        let lasts = self.last_received;
        // The kernel counts from the last packet received, or from the first transmission of an
        // unacknowledged reply. A single lost packet does not count.
        let counted = match (self.retransmit_count, self.probe_count) {
            (0 | 1, 0 | 1) => return None,
            (0 | 1, _) => lasts,
            // The sum of the pauses so far.
            (count, _) => {
                lasts.min(self.retransmit_pause - self.retransmit_pause / (1 << count.min(16)))
            }
        };
        if lasts < SILENCE_MIN {
            return None;
        }
        // The kernel checks the limit only when it sends a probe.
        let gives_up_in = client_timeout.saturating_sub(counted) + probe_pause(client_timeout);
        Some(Silence { lasts, gives_up_in })
    }
}

/// Pause between two keep-alive probes, in whole seconds.
pub(crate) fn probe_pause(client_timeout: Duration) -> Duration {
    Duration::from_secs((client_timeout / 2 / PROBE_COUNT).as_secs().max(1))
}

#[expect(unsafe_code, reason = "no safe library reads TCP_INFO")]
fn tcp_info(socket: BorrowedFd<'_>) -> Option<[u8; TCP_INFO_BYTES]> {
    let mut info = [0u8; TCP_INFO_BYTES];
    let mut length = TCP_INFO_BYTES as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `info`, which has that many, and the new
    // length to `length`. The descriptor is borrowed.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    (outcome == 0 && length as usize == TCP_INFO_BYTES).then_some(info)
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Line as _;
    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, TcpStream, UnixStream};

    async fn tcp() -> (Stream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let theirs = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (ours, _) = listener.accept().await.unwrap();
        (Stream::Plain(Plain::Tcp(ours)), theirs)
    }

    /// Waits until the kernel has noticed that the other end has closed.
    async fn over(line: &Line) {
        while !line.is_over() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn closed_connection_is_noticed_despite_unread_bytes() {
        let (ours, mut theirs) = tcp().await;
        let (_watched, line) = Watched::new(&ours, CLIENT_TIMEOUT).unwrap();
        theirs.write_all(b"unread").await.unwrap();
        assert!(!line.is_over());
        assert_eq!(line.silence(), None);
        drop(theirs);
        over(&line).await;
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let ours = Stream::Plain(Plain::Unix(ours));
        let (watched, line) = Watched::new(&ours, CLIENT_TIMEOUT).unwrap();
        assert!(!line.is_over());
        theirs.shutdown().await.unwrap();
        assert!(line.is_over());
        drop((watched, theirs));
        assert!(line.is_over() && !Line::default().is_over());
    }

    #[tokio::test]
    async fn a_line_keeps_no_connection_open() {
        let (ours, mut theirs) = tcp().await;
        let (watched, line) = Watched::new(&ours, CLIENT_TIMEOUT).unwrap();
        drop((ours, watched));
        let mut byte = [0];
        assert_eq!(tokio::io::AsyncReadExt::read(&mut theirs, &mut byte).await.unwrap(), 0);
        assert!(line.is_over());
    }

    #[test]
    fn silence_is_reported_with_the_time_left() {
        let seconds = Duration::from_secs;
        let idle = Progress {
            probe_count: 0,
            retransmit_count: 0,
            retransmit_pause: Duration::from_millis(200),
            last_received: seconds(50),
        };
        let silence = |progress: Progress| {
            let silence = progress.silence(seconds(120));
            silence.map(|silence| (silence.lasts.as_secs(), silence.gives_up_in.as_secs()))
        };
        assert_eq!(silence(idle), None, "it need not answer");
        let probed = Progress { probe_count: 2, last_received: seconds(75), ..idle };
        assert_eq!(silence(probed), Some((75, 55)));
        // The kernel retransmitted after 5, 10 and 20 seconds.
        let owing = Progress { retransmit_count: 3, retransmit_pause: seconds(40), ..idle };
        assert_eq!(silence(owing), Some((50, 95)));
        for brief in [
            Progress { last_received: seconds(1), ..owing },
            Progress { retransmit_count: 1, ..owing },
            Progress { probe_count: 1, ..probed },
        ] {
            assert_eq!(silence(brief), None, "{brief:?}");
        }
    }
}
