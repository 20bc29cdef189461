//! Wrapper of the object store for the metadata database: it remembers the latest failure, and
//! makes a truncated object a final error.
//!
//! The database retries a failing call for ever, even where no retry can help, and reports nothing.
//!
//! Invariants:
//! - Requests and answers are passed on unchanged, except for a range that begins past an object's
//!   end.
//! - Failures that are legitimate answers (no such object, created by another process) are not
//!   recorded.

use crate::answer::is_answer;
use crate::listing;
use crate::outage::{Outage, Way, public_text};
use block::Conditions;
use block::env::Clock;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetRange, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions,
    PutPayload, PutResult, Result, UploadPart,
};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// An object that ends before data that the metadata places in it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "object {path} is shorter than the metadata says: it has {bytes} bytes, and {range} of it were asked for"
)]
pub(crate) struct Shorter {
    path: Path,
    bytes: u64,
    range: String,
}

/// The wrapper; see the module.
#[derive(Debug)]
pub(crate) struct RecordingStore {
    inner: Arc<dyn ObjectStore>,
    newest: Arc<Newest>,
    written_bytes: Arc<AtomicU64>,
    /// Failures of writing whole objects: the database waits for these writes, and retries them for
    /// as long as they fail.
    puts: Arc<Outage>,
}

/// The latest failure: object, cause and time.
#[derive(Debug)]
struct Newest {
    failure: Mutex<Option<(Path, String, Instant)>>,
    clock: Arc<dyn Clock>,
}

impl Newest {
    fn note(&self, path: &Path, error: &Error) {
        if !is_answer(error) {
            // An error found by this wrapper is shown without the error kind that the database
            // needs.
            let shorter = std::error::Error::source(error).filter(|source| source.is::<Shorter>());
            let text = public_text(shorter.unwrap_or(error));
            *self.failure.lock() = Some((path.clone(), text, self.clock.now()));
        }
    }
}

impl RecordingStore {
    pub(crate) fn new(
        inner: Arc<dyn ObjectStore>,
        conditions: Conditions,
        clock: Arc<dyn Clock>,
    ) -> RecordingStore {
        let puts = Arc::new(Outage::new(Way::Metadata, conditions, clock.clone()));
        let newest = Arc::new(Newest { failure: Mutex::default(), clock });
        RecordingStore { inner, newest, written_bytes: Arc::default(), puts }
    }

    /// Returns a description of the latest failure with its object, for people. It remains when
    /// other calls succeed.
    pub(crate) fn last_failure(&self) -> Option<String> {
        let newest = self.newest.failure.lock();
        let (path, text, at) = newest.as_ref()?;
        let age = self.newest.clock.since(*at).as_secs();
        Some(format!("the store's last failure, {age} s ago, was of {path}: {text}"))
    }

    /// Returns the number of bytes sent to the store in writes, including failed ones.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.written_bytes.load(Ordering::Relaxed)
    }

    fn noted<T>(&self, path: &Path, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| self.newest.note(path, error))
    }

    /// Returns an error if a get failed because the object is too short. Stores report this in many
    /// ways, so this asks for the object's length.
    async fn shorter(&self, path: &Path, range: Option<&GetRange>) -> Option<Error> {
        let (range, start, is_empty) = match range? {
            range @ GetRange::Bounded(bytes) => (range, bytes.start, bytes.end <= bytes.start),
            range @ GetRange::Offset(start) => (range, *start, false),
            GetRange::Suffix(_) => return None,
        };
        let bytes = self.inner.head(path).await.ok()?.size;
        let shorter = Shorter { path: path.clone(), bytes, range: range.to_string() };
        // A senseless range was computed from bytes in the place of the footer.
        let is_shorter = start >= bytes || is_empty;
        // The database returns this kind of error instead of retrying.
        is_shorter.then(|| Error::NotSupported { source: Box::new(shorter) })
    }
}

/// An upload in parts whose bytes are counted.
#[derive(Debug)]
struct Counted {
    inner: Box<dyn MultipartUpload>,
    written_bytes: Arc<AtomicU64>,
    puts: Arc<Outage>,
}

#[async_trait::async_trait]
impl MultipartUpload for Counted {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.written_bytes.fetch_add(data.content_length() as u64, Ordering::Relaxed);
        self.inner.put_part(data)
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let outcome = self.inner.complete().await;
        self.puts.note_outcome(&outcome);
        outcome
    }

    async fn abort(&mut self) -> Result<()> {
        self.inner.abort().await
    }
}

impl std::fmt::Display for RecordingStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.inner)
    }
}

#[async_trait::async_trait]
impl ObjectStore for RecordingStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let has_attributes = !options.attributes.is_empty();
        self.written_bytes.fetch_add(payload.content_length() as u64, Ordering::Relaxed);
        match self.inner.put_opts(location, payload, options).await {
            // The database tries attributes where a store may support them, and continues without.
            Err(error @ Error::NotImplemented { .. }) if has_attributes => Err(error),
            outcome => {
                self.puts.note_outcome(&outcome);
                self.noted(location, outcome)
            }
        }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let begun = self.inner.put_multipart_opts(location, options).await;
        if let Err(error) = &begun {
            self.puts.note(error);
        }
        let inner = self.noted(location, begun)?;
        let (written_bytes, puts) = (self.written_bytes.clone(), self.puts.clone());
        Ok(Box::new(Counted { inner, written_bytes, puts }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let range = options.range.clone();
        let mut got = match self.inner.get_opts(location, options).await {
            Ok(got) => got,
            Err(error @ Error::NotFound { .. }) => return Err(error),
            Err(error) => {
                let error = self.shorter(location, range.as_ref()).await.unwrap_or(error);
                return self.noted(location, Err(error));
            }
        };
        if let GetResultPayload::Stream(body) = got.payload {
            let (newest, path) = (self.newest.clone(), location.clone());
            let body = body.inspect_err(move |error| newest.note(&path, error));
            got.payload = GetResultPayload::Stream(body.boxed());
        }
        Ok(got)
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (newest, path) = (self.newest.clone(), prefix.cloned().unwrap_or_default());
        listing::list(&self.inner, prefix)
            .inspect_err(move |error| newest.note(&path, error))
            .boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let path = prefix.cloned().unwrap_or_default();
        self.noted(&path, self.inner.list_with_delimiter(prefix).await)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.noted(from, self.inner.copy_opts(from, to, options).await)
    }
}
