//! The daemon's end of the admin socket: one JSON request line and one JSON reply line over
//! `DIR/admin.sock`. The crate `api` owns the lines, and `cli` the client's end.
//!
//! Invariants:
//! - The socket has mode 0600 from the moment it can be connected to.
//! - Every line, every connection count and every wait on the peer is bounded.
//! - A received request is carried out completely, even if its client disconnects. Only a request
//!   that waits for space in the write log is dropped then. At a stop, a request has a bounded time
//!   to end, and is then aborted with an answer that says so.
//! - Requests and replies that hold a secret are never logged.

use api::message::{REQUEST_BYTES_MAX, SOCKET_NAME, decode_request, encode_outcome};
use api::{Reply, Request};
use block::{Error, ErrorKind, Result};
use cli::line::{self, LINE_TIMEOUT};
use engine::asker::{Asker, Waits};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::convert::Infallible;
use std::future::Future;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};

/// Maximum number of connections at a time; further ones wait.
pub const CONNECTION_COUNT_MAX: usize = 32;
/// Pause between two looks at a client's socket. Chosen by hand: most requests are answered before
/// the second look.
const LOOK_PAUSE: Duration = Duration::from_millis(250);

/// A pool that answers requests.
pub trait AdminHandler: Send + Sync + 'static {
    /// Carries out one request. Several may run at a time.
    fn handle(&self, request: Request) -> impl Future<Output = Result<Reply>> + Send;

    /// Closes the pool in order, after the last request, if it was opened for requests only.
    fn close(&self) -> impl Future<Output = Result<()>> + Send {
        async { Ok(()) }
    }
}

/// The listening end. The socket is removed when it is dropped.
#[derive(Debug)]
pub struct AdminServer {
    listener: UnixListener,
    path: PathBuf,
}

impl AdminServer {
    /// Listens in `dir`, which the caller has locked: an existing socket is a leftover.
    ///
    /// # Errors
    /// `Io`, for example if the path is longer than a socket's may be (107 bytes).
    pub fn bind(dir: &Path) -> Result<AdminServer> {
        let path = dir.join(SOCKET_NAME);
        let fresh = dir.join("admin.sock.new");
        let bind = || -> std::io::Result<UnixListener> {
            for old in [&fresh, &path] {
                match std::fs::remove_file(old) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        return Err(error);
                    }
                    _ => {}
                }
            }
            // Clients do not know the first name, so none connects before the mode is set.
            let listener = UnixListener::bind(&fresh)?;
            std::fs::set_permissions(&fresh, std::fs::Permissions::from_mode(0o600))?;
            std::fs::rename(&fresh, &path)?;
            Ok(listener)
        };
        let listener = bind().map_err(|error| {
            Error::with_source(ErrorKind::Io, format!("listen on {}", path.display()), error)
        })?;
        Ok(AdminServer { listener, path })
    }

    /// Answers until `stop` resolves. Running requests then have `grace` to end, and are aborted
    /// after that (for example a flush while the store is away).
    pub async fn serve<H: AdminHandler>(
        self,
        handler: Arc<H>,
        stop: impl Future<Output = ()>,
        grace: Duration,
    ) {
        let given_up = watch::Sender::new(false);
        let permits = Arc::new(Semaphore::new(CONNECTION_COUNT_MAX));
        let mut tasks = tokio::task::JoinSet::new();
        tokio::pin!(stop);
        loop {
            let accept = async {
                let permit = Arc::clone(&permits).acquire_owned().await;
                (permit, self.listener.accept().await)
            };
            let (permit, accepted) = tokio::select! {
                () = &mut stop => break,
                Some(ended) = tasks.join_next() => {
                    if let Err(error) = ended {
                        tracing::error!(%error, "could not answer an admin request: its task panicked");
                    }
                    continue;
                }
                accepted = accept => accepted,
            };
            match (permit, accepted) {
                (Ok(permit), Ok((stream, _))) => {
                    let handler = Arc::clone(&handler);
                    let given_up = given_up.subscribe();
                    tasks.spawn(async move {
                        if let Err(error) = answer(stream, &*handler, given_up).await {
                            tracing::debug!(%error, "an admin connection ended early");
                        }
                        drop(permit);
                    });
                }
                (_, Err(error)) => {
                    tracing::warn!(%error, "could not accept an admin connection");
                    // Out of descriptors, most likely: do not spin.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                (Err(_), _) => break, // the semaphore is never closed
            }
        }
        let ended = async { while tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(grace, ended).await.is_err() {
            tracing::warn!(
                count = tasks.len(),
                "the daemon has given up admin requests that did not end"
            );
            given_up.send_replace(true);
            // Telling their clients is bounded itself.
            while tasks.join_next().await.is_some() {}
        }
    }
}

impl Drop for AdminServer {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path); // a leftover is removed by the next bind
    }
}

async fn answer<H: AdminHandler>(
    stream: UnixStream,
    handler: &H,
    mut given_up: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let (read, mut write) = stream.into_split();
    let line = match line::timeout(LINE_TIMEOUT, line::read(read, REQUEST_BYTES_MAX)).await {
        Ok(line) => line,
        Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
            let refused = Err(Error::new(ErrorKind::Invalid, error.to_string()));
            return send(&mut write, &refused).await;
        }
        Err(error) => return Err(error),
    };
    let decoded = decode_request(&line);
    drop(line); // may hold a secret
    let outcome = match decoded {
        Ok(request) => {
            let (waits, asker) = Asker::new();
            tokio::select! {
                outcome = asker.scope(handler.handle(request)) => outcome,
                never = note_hang_up(&waits, write.as_ref()) => match never {},
                _ = given_up.wait_for(|given_up| *given_up) => Err(Error::new(
                    ErrorKind::Unavailable,
                    "the daemon stopped before the request was carried out to its end; ask again \
                     when it runs",
                )),
            }
        }
        Err(error) => Err(error),
    };
    send(&mut write, &outcome).await
}

/// Resolves never: when the client has hung up, it tells the request so. A client that has closed
/// only its sending direction still receives the answer.
async fn note_hang_up(asker: &Waits, socket: &UnixStream) -> Infallible {
    while !is_hung_up(socket) {
        tokio::time::sleep(LOOK_PAUSE).await;
    }
    asker.end();
    std::future::pending().await
}

fn is_hung_up(socket: &UnixStream) -> bool {
    // A hang-up is reported whether it is asked for or not (poll(2)).
    let mut asked = [PollFd::new(socket, PollFlags::empty())];
    let found = poll(&mut asked, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    found.is_ok() && asked[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

async fn send(write: &mut OwnedWriteHalf, outcome: &Result<Reply>) -> std::io::Result<()> {
    let encoded = encode_outcome(outcome).map_err(std::io::Error::other)?;
    line::write(write, &encoded).await
}

#[cfg(test)]
mod tests;
