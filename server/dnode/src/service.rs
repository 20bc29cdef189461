//! The service of this node to owners of pools: carries out their requests on its drives.
//!
//! Invariants:
//! - Only a node that has proven that it has the key of a pool reaches the folder of that pool. Any node of the cluster
//!   learns which drives there are.
//! - A change begins only while its owner is the newest, and a later owner waits for its end. It ends on the
//!   disk whatever becomes of its connection.
//! - A connection has at most [`REQUEST_COUNT_MAX`] requests under way, whose answers wait for a peer that reads
//!   slowly: it holds up itself only.

use crate::check;
use crate::drive::{Drive, Drives, Folder, is_changeable};
use crate::messages::{
    Answer, LISTED_MAX, Listed, Open, PATH_BYTES_MAX, Proof, Refusal, Request, VERSION,
};
use crate::proof;
use async_trait::async_trait;
use block::{Epoch, Error, ErrorKind, Result};
use bytes::Bytes;
use cluster::{Cluster, Connection, Frame, FrameReader, FrameWriter, Handler, NodeId, Service};
use futures::{FutureExt, StreamExt};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions};
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};
use tokio::time::timeout;
use uuid::Uuid;

/// Requests of a connection under way. Chosen by hand: a queue for a drive.
pub const REQUEST_COUNT_MAX: usize = 32;
/// Answers that wait for the connection.
const ANSWER_COUNT_MAX: usize = 8;
/// Longest time for one answer to leave but for its bytes, and the slowest transfer in bytes a second. Chosen by hand.
const WRITE_MAX: Duration = Duration::from_secs(30);
const RATE_MIN: u64 = 1 << 20;
/// Longest wait for the first message. Chosen by hand.
const FIRST_MAX: Duration = Duration::from_secs(10);
/// Longest time for opening a folder, and for a request to wait for its place at the drive. Chosen by hand: peers wait
/// for longer.
const PLACE_MAX: Duration = Duration::from_secs(20);

/// Serves the drives of this node.
#[derive(Debug)]
pub struct DataService {
    /// This node.
    node: NodeId,
    drives: Arc<Drives>,
    /// Serves the connections that no client waits for.
    background: Handle,
}

/// The folder that a connection is about, and the owner that it serves.
#[derive(Clone)]
struct Opened {
    drive: Arc<Drive>,
    folder: Arc<Folder>,
    owner: Option<Epoch>,
    /// The times that the drive has gone away, when the folder was opened.
    absences: u64,
}

impl DataService {
    /// Registers the service with the cluster. The runtime `background` serves the connections that no client waits for.
    pub fn register(cluster: &Cluster, drives: Arc<Drives>, background: Handle) {
        let service = DataService { node: cluster.node_id(), drives, background };
        cluster.register(Service::Data, Arc::new(service));
    }

    async fn open(&self, open: Open, proof: Proof, peer: NodeId) -> Result<Opened> {
        check_version(open.version)?;
        proof::check(&proof, &open, peer, self.node)?;
        let Open { version: _, owner, is_bulk: _, lineage, drive } = open;
        let drive = Arc::clone(self.drives.find(&drive)?);
        let (folder, absences) = drive.folder(lineage, owner.is_some()).await?;
        match owner {
            Some(epoch) => folder.fence.enter(epoch, proof.key).await?,
            None => folder.fence.admit(&proof.key).await?,
        }
        Ok(Opened { drive, folder, owner, absences })
    }

    async fn converse(&self, connection: Connection) -> Result<()> {
        let peer = connection.peer();
        let (mut reader, mut writer) = connection.into_frames();
        let first = timeout(FIRST_MAX, reader.read()).await.map_err(|_| late("first message"))?;
        let Some(Frame { kind, request, payload }) = first? else { return Ok(()) };
        let (open, proof) = match Request::decode(kind, &payload) {
            Some(Request::Open(open, proof)) => (open, proof),
            // Which drives there are is no secret of a pool.
            Some(Request::Drives(version)) => {
                let answer = check_version(version).map(|()| Answer::Drives(self.drives.offers()));
                let answer = answer.unwrap_or_else(|error| refused(&error));
                write(&mut writer, request, &answer).await?;
                return writer.close().await;
            }
            _ => return Err(Error::new(ErrorKind::Corrupt, "the first message opens nothing")),
        };
        let is_bulk = open.is_bulk;
        let opening = timeout(PLACE_MAX, self.open(open, proof, peer)).await;
        let opened = match opening.unwrap_or_else(|_| Err(late("drive"))) {
            Ok(opened) => opened,
            Err(error) => {
                write(&mut writer, request, &refused(&error)).await?;
                return writer.close().await;
            }
        };
        write(&mut writer, request, &Answer::Done).await?;
        if !is_bulk {
            return opened.serve(reader, writer).await;
        }
        let serving = self.background.spawn(opened.serve(reader, writer));
        let _end = AbortOnDrop(serving.abort_handle());
        serving.await.unwrap_or_else(|cause| {
            Err(Error::with_source(ErrorKind::Unavailable, "serve a connection", cause))
        })
    }
}

/// Ends a task with the future that waits for it.
struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Opened {
    /// Carries out the requests of a connection until it ends.
    async fn serve(self, mut reader: FrameReader, mut writer: FrameWriter) -> Result<()> {
        let opened = self;
        let (answers, mut to_write) = mpsc::channel::<(u64, Answer)>(ANSWER_COUNT_MAX);
        let under_way = Arc::new(Semaphore::new(REQUEST_COUNT_MAX));
        let (drive, absences) = (Arc::clone(&opened.drive), opened.absences);
        let reading = async move {
            loop {
                let permit = Arc::clone(&under_way).acquire_owned().await;
                let permit = permit.expect("the semaphore is never closed");
                let Some(frame) = reader.read().await? else { return Ok(()) };
                let Some(request) = Request::decode(frame.kind, &frame.payload) else {
                    let what = format!("a message of kind {} is no request", frame.kind);
                    return Err(Error::new(ErrorKind::Corrupt, what));
                };
                let (opened, answers) = (opened.clone(), answers.clone());
                // A change must hold the fence until the disk has answered, also without a connection.
                tokio::spawn(async move {
                    let _permit = permit;
                    let carried = opened.carry_out(request, frame.request, &answers);
                    let answer =
                        AssertUnwindSafe(carried).catch_unwind().await.unwrap_or_else(|_| {
                            tracing::error!(
                                "could not answer a request for a drive: its task panicked"
                            );
                            Some(Answer::Refused(
                                Refusal::Unavailable,
                                "the request panicked".to_owned(),
                            ))
                        });
                    if let Some(answer) = answer {
                        // Without the connection, there is no one to tell.
                        let _ = answers.send((frame.request, answer)).await;
                    }
                });
            }
        };
        let writing = async {
            while let Some((request, answer)) = to_write.recv().await {
                write(&mut writer, request, &answer).await?;
            }
            writer.close().await
        };
        // In order, the reader ends first, and then the writer, behind the last answer.
        tokio::select! {
            ended = async { tokio::try_join!(reading, writing).map(drop) } => ended,
            () = drive.gone_since(absences) => {
                Err(Error::new(ErrorKind::Unavailable, "the drive has gone away"))
            }
        }
    }
}

fn check_version(version: u16) -> Result<()> {
    match version == VERSION {
        true => Ok(()),
        false => {
            let what =
                format!("this node speaks version {VERSION} of these messages, and not {version}");
            Err(Error::new(ErrorKind::Unsupported, what))
        }
    }
}

async fn write(writer: &mut FrameWriter, request: u64, answer: &Answer) -> Result<()> {
    let (kind, parts) = answer.encode();
    let bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
    let time_max = WRITE_MAX + Duration::from_secs(bytes / RATE_MIN);
    let written = timeout(time_max, writer.write(kind, request, &parts)).await;
    written.map_err(|_| late("peer, which does not read"))?
}

fn late(of: &str) -> Error {
    Error::new(ErrorKind::Unavailable, format!("wait for the {of}: it took too long"))
}

#[async_trait]
impl Handler for DataService {
    fn check(&self, _peer: NodeId, _pool: Option<Uuid>) -> Result<()> {
        Ok(())
    }

    async fn serve(&self, connection: Connection) {
        let (node, name) = (connection.peer(), connection.peer_name().to_owned());
        match self.converse(connection).await {
            Ok(()) => tracing::debug!(%node, name, "a node closed its connection to a drive"),
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                let error = error.chain();
                tracing::warn!(%node, name, error, "could not read the messages of a node");
            }
            Err(error) => {
                let error = error.chain();
                tracing::info!(%node, name, error, "the connection of a node to a drive ended");
            }
        }
    }
}

impl Opened {
    /// Carries out a request. `None` if its answers were sent.
    async fn carry_out(
        &self,
        request: Request,
        number: u64,
        answers: &mpsc::Sender<(u64, Answer)>,
    ) -> Option<Answer> {
        if let Request::List(path) = request {
            let listed = self.list(&path, number, answers).await;
            return listed.err().map(|error| refused(&error));
        }
        // It is known without a request to the drive.
        if let Request::Room = request {
            return Some(self.room().await.unwrap_or_else(|error| refused(&error)));
        }
        // A request that waits for a drive that hangs ends with its connection, or in time.
        let place = tokio::select! {
            place = self.place() => place,
            () = answers.closed() => return None,
        };
        let _place = match place {
            Ok(place) => place,
            Err(error) => return Some(refused(&error)),
        };
        let answer = match request {
            Request::Open(..) | Request::List(_) | Request::Room | Request::Drives(_) => {
                Err(Error::new(ErrorKind::Invalid, "the request is out of place"))
            }
            Request::Put(path, bytes) => self.put(&path, bytes).await,
            Request::Read(path, range) => self.read(&path, range).await,
            Request::Size(path) => self.size(&path).await,
            Request::Delete(path) => self.delete(&path).await,
            Request::Check(path) => self.check(&path).await,
        };
        Some(answer.unwrap_or_else(|error| refused(&error)))
    }

    /// Waits for a place at the drive.
    ///
    /// # Errors
    /// `Unavailable` if none is free in time.
    async fn place(&self) -> Result<SemaphorePermit<'_>> {
        let place = timeout(PLACE_MAX, self.drive.width.acquire()).await;
        Ok(place.map_err(|_| late("drive"))?.expect("the semaphore is never closed"))
    }

    /// Lets a change of this owner begin.
    async fn change(&self, path: &str) -> Result<(Path, crate::fence::Passed)> {
        let path = path_of(path)?;
        let Some(epoch) = self.owner else {
            return Err(Error::new(
                ErrorKind::Fenced,
                "only the owner of the pool changes anything",
            ));
        };
        if !is_changeable(&path) {
            return Err(Error::new(ErrorKind::Invalid, format!("{path} belongs to the node")));
        }
        Ok((path, self.folder.fence.pass(epoch).await?))
    }

    /// Refuses an owner that another one has followed.
    async fn look(&self, path: &str) -> Result<Path> {
        if let Some(epoch) = self.owner {
            self.folder.fence.pass(epoch).await?;
        }
        path_of(path)
    }

    async fn put(&self, path: &str, bytes: Bytes) -> Result<Answer> {
        let (path, _passed) = self.change(path).await?;
        let Some(_writing) = self.folder.begin_write(&path) else {
            // The earlier attempt may still be at the disk.
            let what = format!("object {path}: it is being written at this moment");
            return Err(Error::new(ErrorKind::Unavailable, what));
        };
        let (length, drive) = (bytes.len() as u64, Arc::clone(&self.drive));
        let absences = self.absences;
        let reserved = blocking(move || {
            drive.check_there(absences)?;
            drive.reserve(length)
        });
        let room = match reserved.await {
            Ok(room) => room,
            // The answer to an earlier attempt may have been lost: the put that finds the object makes it durable.
            Err(error)
                if error.kind() == ErrorKind::Full && self.size_of(&path).await.is_some() =>
            {
                self.drive.reserve_nothing()
            }
            Err(error) => return Err(error),
        };
        let was_stored = self.size_of(&path).await.is_some();
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let put = self.folder.objects.put_opts(&path, bytes.into(), options).await;
        let is_stored = match &put {
            Ok(_) => true,
            Err(object_store::Error::AlreadyExists { .. }) => false,
            // It may have its name all the same.
            Err(_) => !was_stored && self.size_of(&path).await.is_some(),
        };
        room.end(is_stored);
        self.judge(&path, put)?;
        let drive = Arc::clone(&self.drive);
        blocking(move || drive.check_there(absences)).await?;
        Ok(Answer::Done)
    }

    async fn size_of(&self, path: &Path) -> Option<u64> {
        self.folder.objects.head(path).await.ok().map(|found| found.size)
    }

    async fn read(&self, path: &str, range: Range<u64>) -> Result<Answer> {
        let path = self.look(path).await?;
        let (dir, name, wanted) = (self.folder.dir.clone(), path.clone(), range.clone());
        let read = async {
            // One visit to the disk, where the object store makes two.
            let reading = tokio::task::spawn_blocking(move || read_file(&dir, &name, wanted));
            reading.await.map_err(|cause| object_store::Error::JoinError { source: cause })?
        };
        let read = read.await;
        if let Err(object_store::Error::NotFound { .. }) = &read {
            // What a drive that is away does not have is not missing.
            let (drive, absences) = (Arc::clone(&self.drive), self.absences);
            blocking(move || drive.check_there(absences)).await?;
        }
        if let Err(object_store::Error::Generic { .. }) = &read
            && let Some(size) = self.size_of(&path).await
            && range.start >= size
        {
            let what =
                format!("object {path} has {size} bytes, and bytes {range:?} were asked for");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        self.judge(&path, read)
    }

    async fn size(&self, path: &str) -> Result<Answer> {
        let path = self.look(path).await?;
        let found = self.folder.objects.head(&path).await;
        self.judge(&path, found).map(|found| Answer::Size(found.size))
    }

    async fn delete(&self, path: &str) -> Result<Answer> {
        let (path, _passed) = self.change(path).await?;
        let (drive, absences) = (Arc::clone(&self.drive), self.absences);
        blocking(move || drive.check_there(absences)).await?;
        let objects = &self.folder.objects;
        let deleted = async {
            let size = objects.head(&path).await?.size;
            objects.delete(&path).await?;
            Ok(size)
        };
        let deleted = deleted.await;
        self.judge(&path, deleted).map(|size| {
            self.drive.release(size);
            Answer::Done
        })
    }

    async fn check(&self, path: &str) -> Result<Answer> {
        let path = self.look(path).await?;
        let checked = check::check(&*self.folder.objects, &path).await;
        self.judge(&path, checked).map(|header| Answer::Checked(header.unwrap_or_default()))
    }

    async fn room(&self) -> Result<Answer> {
        if let Some(epoch) = self.owner {
            self.folder.fence.pass(epoch).await?;
        }
        Ok(Answer::Room(self.drive.room()))
    }

    async fn list(
        &self,
        path: &str,
        number: u64,
        answers: &mpsc::Sender<(u64, Answer)>,
    ) -> Result<()> {
        let folder = self.look(path).await?;
        let folder = (!path.is_empty()).then_some(folder);
        let mut listing = self.folder.objects.list(folder.as_ref()).chunks(LISTED_MAX);
        loop {
            // A peer that reads slowly keeps no place at the drive.
            let place = self.place().await?;
            let next = listing.next().await;
            drop(place);
            let has_more = next.is_some();
            let next: Result<Vec<_>, _> = next.unwrap_or_default().into_iter().collect();
            let found = self.judge(&Path::from(path), next)?;
            // Names that no owner can have given are those of strangers.
            let is_ours = |found: &ObjectMeta| found.location.as_ref().len() <= PATH_BYTES_MAX;
            let listed = found
                .into_iter()
                .filter(is_ours)
                .map(|found| Listed { path: found.location.into(), bytes: found.size });
            let answer = Answer::Listed(listed.collect(), has_more);
            if answers.send((number, answer)).await.is_err() || !has_more {
                return Ok(());
            }
        }
    }

    /// Converts an answer of the drive, and notes its failures.
    fn judge<T>(&self, path: &Path, result: object_store::Result<T>) -> Result<T> {
        use object_store::Error as StoreError;
        let kind = match &result {
            Ok(_) | Err(StoreError::AlreadyExists { .. } | StoreError::NotFound { .. }) => {
                self.drive.note(None);
                match &result {
                    Err(StoreError::AlreadyExists { .. }) => ErrorKind::Busy,
                    _ => ErrorKind::NotFound,
                }
            }
            Err(error) if is_full(error) => ErrorKind::Full,
            Err(error) => {
                self.drive.note(Some(&error.to_string()));
                ErrorKind::Unavailable
            }
        };
        result.map_err(|error| Error::with_source(kind, format!("object {path}"), error))
    }
}

/// Runs work that waits for the disk.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Error::with_source(ErrorKind::Unavailable, "wait for the drive", error))?
}

/// Reads a range of an object below the folder of a pool, which may end behind the object. Waits for the disk.
fn read_file(
    dir: &std::path::Path,
    path: &Path,
    range: Range<u64>,
) -> object_store::Result<Answer> {
    let failed = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => {
            object_store::Error::NotFound { path: path.to_string(), source: error.into() }
        }
        _ => object_store::Error::Generic { store: "drive", source: error.into() },
    };
    let file = std::fs::File::open(dir.join(path.as_ref())).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    if !found.is_file() {
        return Err(failed(std::io::ErrorKind::NotFound.into()));
    }
    let size = found.len();
    if range.start >= size.max(1) {
        return Err(failed(std::io::ErrorKind::InvalidInput.into()));
    }
    let wanted = range.end.min(size).saturating_sub(range.start);
    let mut bytes = Vec::with_capacity(usize::try_from(wanted).unwrap_or_default());
    let mut reading = FileAt { file: &file, at: range.start }.take(wanted);
    reading.read_to_end(&mut bytes).map_err(failed)?;
    Ok(Answer::Read(size, bytes.into()))
}

/// A file from a place on, without a system call that moves there.
struct FileAt<'a> {
    file: &'a std::fs::File,
    at: u64,
}

impl Read for FileAt<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let read = self.file.read_at(into, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

fn path_of(text: &str) -> Result<Path> {
    let invalid =
        |error| Error::with_source(ErrorKind::Invalid, "read the path of an object", error);
    Path::parse(text).map_err(invalid)
}

/// Whether the file system has no room.
fn is_full(error: &object_store::Error) -> bool {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = cause {
        let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        if let Some(std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded) = kind {
            return true;
        }
        cause = error.source();
    }
    false
}

/// The answer to a request that was not carried out.
fn refused(error: &Error) -> Answer {
    let refusal = match error.kind() {
        ErrorKind::NotFound => Refusal::NotFound,
        ErrorKind::Busy => Refusal::Exists,
        ErrorKind::Fenced => Refusal::Fenced,
        ErrorKind::Full => Refusal::Full,
        ErrorKind::Denied => Refusal::Denied,
        ErrorKind::Invalid | ErrorKind::Unsupported => Refusal::Invalid,
        _ => Refusal::Unavailable,
    };
    Answer::Refused(refusal, error.chain())
}
