//! The store of a pool that was restored from a copy: what it has not got yet is read from there.
//!
//! Invariants:
//! - Only objects that never change are read from the copy: segments and tables of the metadata. Their names hold random
//!   ids, so that what the pool writes is never taken for what the copy has, or the reverse.
//! - That the copy lacks something is believed only where its witness is: a folder that is not mounted, or a bucket that
//!   is gone, has nothing either.
//! - Everything is written, listed and deleted in the pool's own store only.

use crate::fetch::store::{OF_COPY, OF_COPY_OBJECT, StoreReader};
use crate::map::database;
use crate::segment::parse_object_path;
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Objects of the copy whose reads are counted. Chosen by hand: 16 MiB of names.
const COUNTED_MAX: usize = 100_000;

/// Longest wait for the witness. Chosen by hand: much longer than a store takes for one byte.
const WITNESS_TIMEOUT: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Debug)]
pub struct RestoredStore {
    own: Arc<dyn ObjectStore>,
    copy: Arc<dyn ObjectStore>,
    /// An object that is in the copy as long as that is there.
    witness: Path,
    /// First number that no segment of the copy has.
    below: u64,
    /// Objects that were read from the copy and that the pool's own store does not have, with how often.
    read: Mutex<HashMap<Path, u64>>,
    is_whole: AtomicBool,
    started: Instant,
    /// What hydration reads the copy with; it remembers what could not be read.
    reader: OnceLock<StoreReader>,
    /// When somebody read from the copy last, in milliseconds since `started`, or 0.
    last_read_ms: AtomicU64,
}

impl RestoredStore {
    /// `own` before `copy`, which is a [`crate::map::view::state_view`] with the object `witness`, and has no segment of the
    /// number `below` or a later one.
    #[must_use]
    pub fn new(
        own: Arc<dyn ObjectStore>,
        copy: Arc<dyn ObjectStore>,
        witness: Path,
        below: u64,
    ) -> RestoredStore {
        RestoredStore {
            own,
            copy,
            witness,
            below,
            read: Mutex::default(),
            is_whole: AtomicBool::new(false),
            started: Instant::now(),
            reader: OnceLock::new(),
            last_read_ms: AtomicU64::new(0),
        }
    }

    pub(crate) fn own(&self) -> &Arc<dyn ObjectStore> {
        &self.own
    }

    /// Without the witness.
    pub(crate) fn of_copy(&self) -> &Arc<dyn ObjectStore> {
        &self.copy
    }

    pub(crate) fn below(&self) -> u64 {
        self.below
    }

    /// Of the copy. What is not there is `NotFound` only if the copy itself is.
    pub(crate) async fn get_of_copy(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        let missing = match self.copy.get_opts(path, options).await {
            Err(error @ Error::NotFound { .. }) => error,
            other => return other,
        };
        match self.read_witness().await {
            Ok(()) => Err(missing),
            Err(error) => {
                let source = format!("the copy is not there ({error})").into();
                Err(Error::Generic { store: OF_COPY, source })
            }
        }
    }

    /// As [`RestoredStore::get_of_copy`], for the pool's reads: a failure says whether it is that of one object, or of the
    /// copy.
    async fn read_of_copy(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        let error = match self.get_of_copy(path, options).await {
            Err(error @ Error::NotFound { .. }) => return Err(error),
            Err(error) => error,
            got => return got,
        };
        let is_away = matches!(&error, Error::Generic { store, .. } if *store == OF_COPY);
        let store = match is_away || self.read_witness().await.is_err() {
            true => OF_COPY,
            false => OF_COPY_OBJECT,
        };
        Err(Error::Generic { store, source: Box::new(error) })
    }

    /// Whether the copy is there and is read.
    pub(super) async fn read_witness(&self) -> Result<()> {
        let read = self.copy.get_range(&self.witness, 0..1);
        let read = tokio::time::timeout(WITNESS_TIMEOUT, read).await;
        read.unwrap_or_else(|elapsed| {
            Err(Error::Generic { store: OF_COPY, source: Box::new(elapsed) })
        })
        .map(drop)
    }

    pub(crate) fn reader(&self, make: impl FnOnce() -> StoreReader) -> &StoreReader {
        self.reader.get_or_init(make)
    }

    /// The pool's own store has everything.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.is_whole.load(Ordering::SeqCst)
    }

    pub(crate) fn witness(&self) -> &Path {
        &self.witness
    }

    /// The pool's own store has everything: the copy is not asked any more.
    pub(crate) fn set_whole(&self) {
        self.is_whole.store(true, Ordering::SeqCst);
        self.read.lock().clear();
    }

    /// Of these, the one that was read from the copy most often, and the pool's own store has not got yet.
    pub(crate) fn most_read(&self, is_wanted: impl Fn(&Path) -> bool) -> Option<Path> {
        let read = self.read.lock();
        let wanted = read.iter().filter(|(path, _)| is_wanted(path));
        wanted.max_by_key(|(_, count)| **count).map(|(path, _)| path.clone())
    }

    /// The pool's own store has it now, or nobody needs it.
    pub(crate) fn forget(&self, path: &Path) {
        self.read.lock().remove(path);
    }

    /// Somebody waited for the copy within this time.
    pub(crate) fn is_read_within(&self, time: Duration) -> bool {
        let last = self.last_read_ms.load(Ordering::Relaxed);
        let now = self.started.elapsed().as_millis() as u64;
        last > 0 && Duration::from_millis(now.saturating_sub(last)) < time
    }

    fn is_shared(&self, path: &Path) -> bool {
        match parse_object_path(path) {
            Some((_, number, _)) => number.0 < self.below,
            None => path.prefix_matches(&database::table_folder()),
        }
    }

    fn note_read(&self, path: &Path) {
        let now = self.started.elapsed().as_millis() as u64;
        self.last_read_ms.store(now.max(1), Ordering::Relaxed);
        let mut read = self.read.lock();
        if read.len() >= COUNTED_MAX && !read.contains_key(path) {
            read.clear();
        }
        *read.entry(path.clone()).or_default() += 1;
    }
}

impl std::fmt::Display for RestoredStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.own)
    }
}

#[async_trait::async_trait]
impl ObjectStore for RestoredStore {
    async fn put_opts(
        &self,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let put = self.own.put_opts(path, payload, options).await;
        if put.is_ok() {
            self.forget(path);
        }
        put
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.own.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        if self.is_whole.load(Ordering::SeqCst) || !self.is_shared(path) {
            return self.own.get_opts(path, options).await;
        }
        // Asking both for each read would double the requests.
        if !self.read.lock().contains_key(path) {
            match self.own.get_opts(path, options.clone()).await {
                Err(Error::NotFound { .. }) => {}
                other => return other,
            }
        }
        match self.read_of_copy(path, options.clone()).await {
            Ok(got) => {
                self.note_read(path);
                Ok(got)
            }
            // It came to the pool's own store meanwhile, and then nothing kept it in the copy.
            Err(Error::NotFound { .. }) => {
                self.forget(path);
                self.own.get_opts(path, options).await
            }
            Err(error) => Err(error),
        }
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.own.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.own.list(prefix).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.own.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.own.copy_opts(from, to, options).await
    }
}
