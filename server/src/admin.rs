//! Owns the admin protocol: one JSON request line and one JSON reply line over `DIR/admin.sock`.
//!
//! Invariants:
//! - The socket is of mode 0600 from the moment it can be connected to.
//! - Every line, every connection count and every wait on the peer is bounded.
//! - A request that was read is carried to its end, even when its client disconnects. Only one that waits for space in the
//!   write log is dropped then. At a stop a request has a bounded time to end, and is then given up with an answer that
//!   says so.
//! - The reply types are also what `-o json` prints: see [`info`].
//! - Requests and replies that hold a secret are never logged.

pub mod info;

pub use info::*;

use crate::asker::Asker;
use crate::attach::{AttachOptions, AttachmentInfo};
use crate::claims::ClientInfo;
use crate::copies::NewCopy;
use crate::keys::{NewKey, Secret, SlotKind};
use crate::record::Durability;
use block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::future::Future;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use zeroize::Zeroizing;

/// Longest request line, in bytes.
pub const REQUEST_BYTES_MAX: u64 = 64 << 10;
/// Longest reply line, in bytes: 100,000 volumes.
pub const REPLY_BYTES_MAX: u64 = 32 << 20;
/// Connections at a time; further ones wait.
pub const CONNECTION_COUNT_MAX: usize = 32;
/// Longest that either side waits for the other to read or write a line.
const LINE_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest a client waits for an ordinary reply, and for one that moves data.
const REPLY_TIMEOUT: Duration = Duration::from_secs(120);
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3600);
/// Name of the socket in DIR.
const SOCKET_NAME: &str = "admin.sock";

/// What can be asked of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "request", deny_unknown_fields)]
pub enum Request {
    /// Makes a volume. `Busy` when it exists.
    VolumeCreate {
        /// Its name.
        name: String,
        /// Its size in bytes, a multiple of 512.
        size_bytes: u64,
        /// What its answers promise.
        #[serde(default)]
        durability: Durability,
        /// It gets a key of its own.
        #[serde(default)]
        own_key: bool,
        /// Blocks that are stored already are not stored again.
        #[serde(default)]
        dedup: bool,
    },
    /// All volumes, removed ones that can be restored included.
    VolumeList,
    /// One volume.
    VolumeShow {
        /// Its name.
        name: String,
    },
    /// Gives a volume another size.
    VolumeResize {
        /// Its name.
        name: String,
        /// The new size in bytes.
        size_bytes: u64,
        /// It may become smaller; what lies beyond is gone. Otherwise that is `Invalid`.
        #[serde(default)]
        shrink: bool,
    },
    /// Changes what a volume promises. What is absent stays as it is.
    VolumeSet {
        /// Its name.
        name: String,
        /// What its answers promise.
        #[serde(default)]
        durability: Option<Durability>,
        /// Whether it refuses writes.
        #[serde(default)]
        is_read_only: Option<bool>,
        /// Whether blocks that are stored already are not stored again.
        #[serde(default)]
        dedup: Option<bool>,
    },
    /// Removes a volume; it can be restored for the configured time, unless `now`.
    VolumeRemove {
        /// Its name.
        name: String,
        /// Beyond recovery, at once.
        #[serde(default)]
        now: bool,
        /// As `now`, and its own key is destroyed. `Invalid` for a volume without one, `Busy` where others need it.
        #[serde(default)]
        erase: bool,
    },
    /// Brings a removed volume back.
    VolumeRestore {
        /// Its name.
        name: String,
    },
    /// No client of before the volume stepped back goes on: serve remote clients again. `Invalid`
    /// when it has not stepped back.
    VolumeAccept {
        /// Its name.
        name: String,
        /// Writes that only a missing side file holds are given up.
        #[serde(default)]
        give_up_writes: bool,
    },
    /// Gives a volume another name. `Busy` when that is taken, or somebody uses the volume.
    VolumeRename {
        /// Its name.
        name: String,
        /// The new one.
        new_name: String,
    },
    /// Makes a clone independent of what it was made from, in the background. `Invalid` when it is.
    VolumePromote {
        /// Its name.
        name: String,
    },
    /// Makes a volume of what a snapshot shows. `Busy` when one of that name exists.
    Clone {
        /// `VOLUME@NAME`.
        snapshot: String,
        /// Name of the new volume.
        name: String,
        /// It is removed by itself after so long; absent: never.
        #[serde(default)]
        ttl_seconds: Option<u64>,
    },
    /// A volume is to show what a snapshot of it shows. `Busy` while somebody uses it.
    SnapshotRollback {
        /// `VOLUME@NAME`.
        snapshot: String,
    },
    /// Makes a snapshot of each of some volumes, of the same instant. `Busy` when one of that name exists.
    SnapshotCreate {
        /// `VOLUME@NAME`, or several volumes before the `@`, separated by commas.
        snapshot: String,
    },
    /// All snapshots, or those of one volume.
    SnapshotList {
        /// Its name.
        #[serde(default)]
        volume: Option<String>,
        /// With the space that each alone holds, which takes a walk of the metadata of what has changed.
        #[serde(default)]
        space: bool,
    },
    /// What has changed from one snapshot to a later one of the same volume.
    SnapshotDiff {
        /// `VOLUME@NAME`, the older one.
        older: String,
        /// `VOLUME@NAME`.
        newer: String,
        /// From this byte on.
        #[serde(default)]
        offset: u64,
    },
    /// What a volume's schedule of snapshots does next, after a change if there is one.
    SnapshotSchedule {
        /// Its name.
        volume: String,
        /// The new schedule.
        #[serde(default)]
        set: Option<ScheduleSet>,
        /// There is to be none.
        #[serde(default)]
        off: bool,
    },
    /// Removes a snapshot. `Busy` while a client has it open, or a clone depends on it.
    SnapshotRemove {
        /// `VOLUME@NAME`.
        snapshot: String,
    },
    /// Copies the pool to another store from now on. `Busy` where that is not empty, or another pool's.
    CopyAdd(NewCopy),
    /// Ends a copy; what is there stays.
    CopyRemove {
        /// Where it is.
        url: String,
    },
    /// How the copies stand.
    CopyList,
    /// Answers when a copy has everything that was written before.
    CopySync {
        /// Where it is.
        url: String,
    },
    /// Segments that the copy lacks from which the pool was restored are given up.
    RestoreGiveUpMissing,
    /// Verifies all segments, and puts back from copies what is bad.
    ScrubStart {
        /// Pace; the usual one without it.
        #[serde(default)]
        bytes_per_second: Option<u64>,
        /// Again each time after so many seconds.
        #[serde(default)]
        every_seconds: Option<u64>,
    },
    /// Stops verifying.
    ScrubStop,
    /// How far it is, and what it has found.
    ScrubStatus,
    /// The state of the pool.
    Status,
    /// Copies everything to the store, and answers when it is there.
    Flush,
    /// Walks everything that the store holds and verifies it. Changes nothing.
    Fsck,
    /// Puts the counts of live blocks of these segments right, as `fsck` names them.
    RepairCounts {
        /// Their numbers.
        segments: Vec<u64>,
    },
    /// Makes a recovery key.
    KeyBackup {
        /// Earlier recovery keys stop working.
        #[serde(default)]
        replace: bool,
    },
    /// Replaces what opens the pool. Without `new`, the configured key file is replaced in place.
    KeyRotate {
        /// What opens it from now on.
        new: Option<NewKey>,
    },
    /// Makes a volume a device of this machine's kernel.
    Attach {
        /// Its name.
        name: String,
        /// How.
        options: AttachOptions,
    },
    /// Takes the device of a volume out of the kernel.
    Detach {
        /// The volume's name, the link to its device, or the device.
        target: String,
        /// Also while something uses it, which gets errors then.
        #[serde(default)]
        force: bool,
    },
    /// Which volumes are attached.
    AttachList,
    /// Stops the daemon in order. Answered before it is gone.
    Stop,
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "reply")]
pub enum Reply {
    /// One volume.
    Volume(VolumeInfo),
    /// Several.
    Volumes {
        /// Sorted by name.
        volumes: Vec<VolumeInfo>,
    },
    /// Snapshots.
    Snapshots {
        /// By volume and age.
        snapshots: Vec<SnapshotInfo>,
    },
    /// A schedule of snapshots, and what it does next.
    Schedule(ScheduleInfo),
    /// What differs between two snapshots.
    SnapshotDiff(DiffInfo),
    /// Copies in other stores.
    Copies {
        /// In the order in which they were added.
        copies: Vec<CopyInfo>,
    },
    /// How the scrub stands.
    Scrub(ScrubInfo),
    /// The state of the pool.
    Status(Box<StatusInfo>),
    /// It was done.
    Done {
        /// What, in a sentence.
        message: String,
    },
    /// What a walk of the pool found.
    Fsck(FsckInfo),
    /// A recovery key, printed this once.
    RecoveryKey {
        /// The key.
        key: Secret,
    },
    /// A volume that is attached.
    Attached(AttachmentInfo),
    /// Volumes that are attached.
    Attachments {
        /// Sorted by name.
        attachments: Vec<AttachmentInfo>,
        /// Those that other machines, or programs of this one, have as devices of theirs.
        #[serde(default)]
        clients: Vec<ClientInfo>,
    },
    /// The key was replaced.
    KeyRotated {
        /// Kind of what opens the pool now.
        kind: SlotKind,
        /// What to do from now on.
        message: String,
    },
}

/// A pool that answers requests.
pub trait AdminHandler: Send + Sync + 'static {
    /// Carries out one request. Several may run at a time.
    fn handle(&self, request: Request) -> impl Future<Output = Result<Reply>> + Send;

    /// Closes the pool in order, after the last request, where it was opened for requests only.
    fn close(&self) -> impl Future<Output = Result<()>> + Send {
        async { Ok(()) }
    }
}

/// What goes over the socket.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Ok(Reply),
    Error(Failure),
}

#[derive(Serialize, Deserialize)]
struct Failure {
    kind: String,
    message: String,
}

const KINDS: [ErrorKind; 11] = [
    ErrorKind::Invalid,
    ErrorKind::Unsupported,
    ErrorKind::Denied,
    ErrorKind::Full,
    ErrorKind::NotFound,
    ErrorKind::Busy,
    ErrorKind::Fenced,
    ErrorKind::Unavailable,
    ErrorKind::Unreadable,
    ErrorKind::Corrupt,
    ErrorKind::Io,
];

/// The word for a kind, as replies and `-o json` spell it.
#[must_use]
pub fn kind_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Invalid => "invalid",
        ErrorKind::Unsupported => "unsupported",
        ErrorKind::Denied => "denied",
        ErrorKind::Full => "full",
        ErrorKind::NotFound => "not_found",
        ErrorKind::Busy => "busy",
        ErrorKind::Fenced => "fenced",
        ErrorKind::Unavailable => "unavailable",
        ErrorKind::Unreadable => "unreadable",
        ErrorKind::Corrupt => "corrupt",
        ErrorKind::Io => "io",
    }
}

impl From<Result<Reply>> for Answer {
    fn from(outcome: Result<Reply>) -> Answer {
        match outcome {
            Ok(reply) => Answer::Ok(reply),
            Err(error) => Answer::Error(Failure {
                kind: kind_name(error.kind()).to_owned(),
                message: error.chain(),
            }),
        }
    }
}

impl From<Answer> for Result<Reply> {
    fn from(answer: Answer) -> Result<Reply> {
        match answer {
            Answer::Ok(reply) => Ok(reply),
            Answer::Error(failure) => {
                let kind = KINDS.into_iter().find(|kind| kind_name(*kind) == failure.kind);
                Err(Error::new(kind.unwrap_or(ErrorKind::Io), failure.message))
            }
        }
    }
}

/// The listening end. The socket is removed when it is dropped.
#[derive(Debug)]
pub struct AdminServer {
    listener: UnixListener,
    path: PathBuf,
}

impl AdminServer {
    /// Listens in `dir`, which the caller has locked: a socket that is there is a leftover.
    ///
    /// # Errors
    /// `Io`, for example when the path is longer than a socket's may be (107 bytes).
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
            // Nobody connects under the first name, so nobody does before the mode is set.
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

    /// Answers until `stop` resolves. The requests that are being carried out then have `grace` to
    /// end; what has not by then (a flush while the store is away) is given up.
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
                    tracing::warn!(%error, "accept an admin connection");
                    // Out of descriptors, most likely: do not spin.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                (Err(_), _) => break, // the semaphore is never closed
            }
        }
        let ended = async { while tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(grace, ended).await.is_err() {
            tracing::warn!(count = tasks.len(), "admin requests that did not end are given up");
            given_up.send_replace(true);
            // Telling their clients is bounded in itself.
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
    let line = match timeout(LINE_TIMEOUT, read_line(read, REQUEST_BYTES_MAX)).await {
        Ok(line) => line,
        Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
            return send(
                &mut write,
                &Err(Error::new(ErrorKind::Invalid, error.to_string())).into(),
            )
            .await;
        }
        Err(error) => return Err(error),
    };
    let outcome = match serde_json::from_str::<Request>(&line) {
        Ok(request) => {
            drop(line); // may hold a secret
            let (waits, asker) = Asker::new();
            tokio::select! {
                outcome = asker.scope(handler.handle(request)) => outcome,
                never = waits.end_with(write.as_ref()) => match never {},
                _ = given_up.wait_for(|given_up| *given_up) => Err(Error::new(
                    ErrorKind::Unavailable,
                    "the daemon stopped before the request was carried out to its end; ask again \
                     when it runs",
                )),
            }
        }
        // Serde's message quotes unknown names, never the values of known ones.
        Err(error) => Err(Error::new(
            ErrorKind::Invalid,
            format!("admin request not understood at column {}", error.column()),
        )),
    };
    send(&mut write, &outcome.into()).await
}

async fn send(
    write: &mut (impl tokio::io::AsyncWrite + Unpin),
    answer: &Answer,
) -> std::io::Result<()> {
    let mut line = Zeroizing::new(serde_json::to_vec(answer)?);
    line.push(b'\n');
    timeout(LINE_TIMEOUT, async {
        write.write_all(&line).await?;
        write.flush().await
    })
    .await
}

async fn timeout<T>(
    limit: Duration,
    work: impl Future<Output = std::io::Result<T>>,
) -> std::io::Result<T> {
    match tokio::time::timeout(limit, work).await {
        Ok(outcome) => outcome,
        Err(_) => Err(std::io::Error::new(
            std::io::ErrorKind::TimedOut,
            format!("no progress within {} s", limit.as_secs()),
        )),
    }
}

/// One line, without its end. `InvalidData` when it is too long, cut short or not text.
async fn read_line(
    read: impl tokio::io::AsyncRead + Unpin,
    bytes_max: u64,
) -> std::io::Result<Zeroizing<String>> {
    let wrong = |why: &str| std::io::Error::new(std::io::ErrorKind::InvalidData, why.to_owned());
    let mut line = Zeroizing::new(Vec::new());
    BufReader::new(read.take(bytes_max)).read_until(b'\n', &mut line).await?;
    if line.pop() != Some(b'\n') {
        return Err(wrong("a line is too long or cut short"));
    }
    let text = std::str::from_utf8(&line).map_err(|_| wrong("a line is not text"))?;
    Ok(Zeroizing::new(text.to_owned()))
}

/// Sends one request to the daemon that runs on `dir`. `None` when none does: the socket is absent
/// or nobody listens.
///
/// # Errors
/// What the daemon answered, or `Unavailable` when it does not answer.
pub async fn call(dir: &Path, request: &Request) -> Result<Option<Reply>> {
    let path = dir.join(SOCKET_NAME);
    let failed = |error: std::io::Error| {
        Error::with_source(
            ErrorKind::Unavailable,
            format!("ask the daemon at {}", path.display()),
            error,
        )
    };
    let stream = match timeout(LINE_TIMEOUT, UnixStream::connect(&path)).await {
        Ok(stream) => stream,
        Err(error) => {
            return match error.kind() {
                std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused => Ok(None),
                std::io::ErrorKind::PermissionDenied => Err(Error::with_source(
                    ErrorKind::Denied,
                    format!("ask the daemon at {}: run as the daemon's user", path.display()),
                    error,
                )),
                _ => Err(failed(error)),
            };
        }
    };
    let (read, mut write) = stream.into_split();
    let mut line =
        Zeroizing::new(serde_json::to_vec(request).map_err(|error| failed(error.into()))?);
    line.push(b'\n');
    if line.len() as u64 > REQUEST_BYTES_MAX {
        return Err(Error::new(ErrorKind::Invalid, "the request is too long"));
    }
    timeout(LINE_TIMEOUT, async {
        write.write_all(&line).await?;
        write.flush().await
    })
    .await
    .map_err(failed)?;
    let limit = match request {
        // These may wait until the store has what is in the log.
        Request::Flush
        | Request::Stop
        | Request::Fsck
        | Request::RepairCounts { .. }
        | Request::Clone { .. }
        | Request::SnapshotRollback { .. } => FLUSH_TIMEOUT,
        _ => REPLY_TIMEOUT,
    };
    let line = timeout(limit, read_line(read, REPLY_BYTES_MAX)).await.map_err(failed)?;
    let answer: Answer = serde_json::from_str(&line).map_err(|error| {
        // Without the cause: it could quote a part of the reply.
        Error::new(
            ErrorKind::Unavailable,
            format!("the daemon's reply is not understood (column {})", error.column()),
        )
    })?;
    Result::from(answer).map(Some)
}

#[cfg(test)]
mod tests;
