//! The admin protocol: one JSON request line and one JSON reply line over `DIR/admin.sock`.
//!
//! Invariants:
//! - The socket has mode 0600 from the moment it can be connected to.
//! - Every line, every connection count and every wait on the peer is bounded.
//! - A received request is carried out completely, even if its client disconnects. Only a request
//!   that waits for space in the write log is dropped then. At a stop, a request has a bounded time
//!   to end, and is then aborted with an answer that says so.
//! - The reply types are also the output of `-o json`: see [`info`].
//! - Requests and replies that hold a secret are never logged.

pub mod info;

pub use info::*;

use crate::attach::{AttachOptions, AttachmentInfo};
use block::{Error, ErrorKind, Result};
use control::keys::{NewKey, Secret, SlotKind};
use engine::asker::Asker;
use engine::claims::ClientInfo;
use engine::copies::NewCopy;
use engine::record::Durability;
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
/// Maximum number of connections at a time; further ones wait.
pub const CONNECTION_COUNT_MAX: usize = 32;
/// Longest time that either side waits for the other to read or write a line.
const LINE_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time that a client waits for an ordinary reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest time that a client waits for a reply to a request that moves data.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3600);
/// Name of the socket in DIR.
const SOCKET_NAME: &str = "admin.sock";

/// A request to a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "request", deny_unknown_fields)]
pub enum Request {
    /// Makes a volume. `Busy` if it exists.
    VolumeCreate {
        /// Its name.
        name: String,
        /// Its size in bytes, a multiple of 512.
        size_bytes: u64,
        /// Durability of acknowledged writes.
        #[serde(default)]
        durability: Durability,
        /// Give it a key of its own.
        #[serde(default)]
        own_key: bool,
        /// Do not store blocks again that are already stored.
        #[serde(default)]
        dedup: bool,
    },
    /// Lists all volumes, including removed ones that can be restored.
    VolumeList,
    /// Shows one volume.
    VolumeShow {
        /// Its name.
        name: String,
    },
    /// Resizes a volume.
    VolumeResize {
        /// Its name.
        name: String,
        /// The new size in bytes.
        size_bytes: u64,
        /// Allow it to become smaller; the data beyond the new end is lost. Without this, shrinking
        /// is `Invalid`.
        #[serde(default)]
        shrink: bool,
    },
    /// Changes settings of a volume. Absent fields stay as they are.
    VolumeSet {
        /// Its name.
        name: String,
        /// Durability of acknowledged writes.
        #[serde(default)]
        durability: Option<Durability>,
        /// Refuse writes.
        #[serde(default)]
        is_read_only: Option<bool>,
        /// Do not store blocks again that are already stored.
        #[serde(default)]
        dedup: Option<bool>,
    },
    /// Removes a volume; it can be restored for the configured time, unless `now`.
    VolumeRemove {
        /// Its name.
        name: String,
        /// Remove it at once, beyond recovery.
        #[serde(default)]
        now: bool,
        /// Like `now`, and destroy its own key. `Invalid` for a volume without one, `Busy` if
        /// others need it.
        #[serde(default)]
        erase: bool,
    },
    /// Brings a removed volume back.
    VolumeRestore {
        /// Its name.
        name: String,
    },
    /// Confirms that no client from before the volume stepped back is still running, and serves
    /// remote clients again. `Invalid` if it has not stepped back.
    VolumeAccept {
        /// Its name.
        name: String,
        /// Give up the writes that only a missing side file holds.
        #[serde(default)]
        give_up_writes: bool,
    },
    /// Renames a volume. `Busy` if the name is taken, or the volume is in use.
    VolumeRename {
        /// Its name.
        name: String,
        /// Its new name.
        new_name: String,
    },
    /// Makes a clone independent of its origin, in the background. `Invalid` if it already is.
    VolumePromote {
        /// Its name.
        name: String,
    },
    /// Makes a volume with the contents of a snapshot. `Busy` if a volume of that name exists.
    Clone {
        /// `VOLUME@NAME`.
        snapshot: String,
        /// Name of the new volume.
        name: String,
        /// Seconds after which it is removed automatically; absent: never.
        #[serde(default)]
        ttl_seconds: Option<u64>,
    },
    /// Rolls a volume back to one of its snapshots. `Busy` while it is in use.
    SnapshotRollback {
        /// `VOLUME@NAME`.
        snapshot: String,
    },
    /// Makes a snapshot of each of several volumes, at the same instant. `Busy` if one of that name
    /// exists.
    SnapshotCreate {
        /// `VOLUME@NAME`, or several volumes before the `@`, separated by commas.
        snapshot: String,
    },
    /// Lists all snapshots, or those of one volume.
    SnapshotList {
        /// Name of the volume.
        #[serde(default)]
        volume: Option<String>,
        /// Include the space that each alone holds, which requires a walk of the changed metadata.
        #[serde(default)]
        space: bool,
    },
    /// Lists the changes from one snapshot to a later one of the same volume.
    SnapshotDiff {
        /// `VOLUME@NAME`, the older one.
        older: String,
        /// `VOLUME@NAME`.
        newer: String,
        /// Start at this byte.
        #[serde(default)]
        offset: u64,
    },
    /// Shows the next actions of a volume's schedule of snapshots, after changing it if requested.
    SnapshotSchedule {
        /// Its name.
        volume: String,
        /// The new schedule.
        #[serde(default)]
        set: Option<ScheduleSet>,
        /// Remove the schedule.
        #[serde(default)]
        off: bool,
    },
    /// Removes a snapshot. `Busy` while a client has it open, or a clone depends on it.
    SnapshotRemove {
        /// `VOLUME@NAME`.
        snapshot: String,
    },
    /// Starts copying the pool to another store. `Busy` if that is not empty, or is another pool's.
    CopyAdd(NewCopy),
    /// Ends a copy; its objects stay.
    CopyRemove {
        /// URL of the copy.
        url: String,
    },
    /// Shows the state of the copies.
    CopyList,
    /// Waits until a copy has everything that was written before.
    CopySync {
        /// URL of the copy.
        url: String,
    },
    /// Gives up the segments that are missing in the copy that the pool was restored from.
    RestoreGiveUpMissing,
    /// Verifies all segments, and replaces bad ones from copies.
    ScrubStart {
        /// Pace; absent: the default.
        #[serde(default)]
        bytes_per_second: Option<u64>,
        /// Repeat after this many seconds.
        #[serde(default)]
        every_seconds: Option<u64>,
    },
    /// Stops verifying.
    ScrubStop,
    /// Shows the progress and the findings.
    ScrubStatus,
    /// Shows the state of the pool.
    Status,
    /// Moves everything to the store, and answers when it is there.
    Flush,
    /// Verifies everything in the store. Changes nothing.
    Fsck,
    /// Corrects the counts of live blocks of these segments, as reported by `fsck`.
    RepairCounts {
        /// Their numbers.
        segments: Vec<u64>,
    },
    /// Makes a recovery key.
    KeyBackup {
        /// Revoke earlier recovery keys.
        #[serde(default)]
        replace: bool,
    },
    /// Replaces the secret that opens the pool. Without `new`, the configured key file is replaced
    /// in place.
    KeyRotate {
        /// Secret that opens it from now on.
        new: Option<NewKey>,
    },
    /// Attaches a volume as a device of this machine's kernel.
    Attach {
        /// Its name.
        name: String,
        /// Options of the device.
        options: AttachOptions,
    },
    /// Removes the device of a volume from the kernel.
    Detach {
        /// The volume's name, the link to its device, or the device.
        target: String,
        /// Remove it even if it is in use; its users then get errors.
        #[serde(default)]
        force: bool,
    },
    /// Lists the attached volumes.
    AttachList,
    /// Stops the daemon in order. The answer comes before it has ended.
    Stop,
}

/// A reply to a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "reply")]
pub enum Reply {
    /// One volume.
    Volume(VolumeInfo),
    /// Several volumes.
    Volumes {
        /// Sorted by name.
        volumes: Vec<VolumeInfo>,
    },
    /// Snapshots.
    Snapshots {
        /// Sorted by volume and age.
        snapshots: Vec<SnapshotInfo>,
    },
    /// A schedule of snapshots, and its next actions.
    Schedule(ScheduleInfo),
    /// Differences between two snapshots.
    SnapshotDiff(DiffInfo),
    /// Copies in other stores.
    Copies {
        /// In the order in which they were added.
        copies: Vec<CopyInfo>,
    },
    /// State of the scrub.
    Scrub(ScrubInfo),
    /// The state of the pool.
    Status(Box<StatusInfo>),
    /// The request was carried out.
    Done {
        /// Result, in a sentence.
        message: String,
    },
    /// Findings of a walk of the pool.
    Fsck(FsckInfo),
    /// A recovery key, printed only this once.
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
        /// Clients on other machines, or other programs on this one, that have devices.
        #[serde(default)]
        clients: Vec<ClientInfo>,
    },
    /// The key was replaced.
    KeyRotated {
        /// Kind of the secret that opens the pool now.
        kind: SlotKind,
        /// Action to take from now on.
        message: String,
    },
}

/// A pool that answers requests.
pub trait AdminHandler: Send + Sync + 'static {
    /// Carries out one request. Several may run at a time.
    fn handle(&self, request: Request) -> impl Future<Output = Result<Reply>> + Send;

    /// Closes the pool in order, after the last request, if it was opened for requests only.
    fn close(&self) -> impl Future<Output = Result<()>> + Send {
        async { Ok(()) }
    }
}

/// Message on the socket.
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

/// Name of an error kind, as in replies and `-o json`.
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

/// Reads one line, without its end. `InvalidData` if it is too long, incomplete or not text.
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

/// Sends one request to the daemon that runs on `dir`. `None` if there is none: the socket is
/// absent or has no listener.
///
/// # Errors
/// The error in the daemon's answer, or `Unavailable` if it does not answer.
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
        // These may wait until the store has everything in the log.
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
