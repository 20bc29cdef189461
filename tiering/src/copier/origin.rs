//! The store of a pool that was restored from a copy: objects that are not here yet are read from
//! the copy.
//!
//! Invariants:
//! - Only objects that never change are read from the copy: segments and tables of the metadata.
//!   Their names contain random ids, so an object that the pool writes is never confused with one
//!   of the copy.
//! - An object counts as missing in the copy only if the copy's witness can be read: an unmounted
//!   folder or a deleted bucket also has no objects.
//! - All writes, listings and deletions affect only the pool's own store.

use crate::fetch::store::{OF_COPY, OF_COPY_OBJECT, StoreReader};
use crate::map::database;
use crate::segment::SegmentName;
use crate::segment_store::ObjectSegments;
use block::env::Clock;
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

/// Maximum number of objects of the copy whose reads are counted. Chosen by hand: 16 MiB of names.
const COUNTED_MAX: usize = 100_000;

/// Longest wait for the witness. Chosen by hand: much longer than a store takes for one byte.
const WITNESS_TIMEOUT: Duration = Duration::from_secs(5);

/// The combined store; see the module.
#[derive(Debug)]
pub struct RestoredStore {
    own: Arc<dyn ObjectStore>,
    copy: Arc<dyn ObjectStore>,
    /// An object that exists in the copy as long as the copy does.
    witness: Path,
    /// The first segment number above all segments of the copy.
    below: u64,
    /// Read counts of objects that were read from the copy and that the pool's own store does not
    /// have.
    read: Mutex<HashMap<Path, u64>>,
    is_complete: AtomicBool,
    clock: Arc<dyn Clock>,
    started: Instant,
    /// Reader with which hydration reads the copy; it remembers objects that could not be read.
    reader: OnceLock<StoreReader>,
    /// Time of the last read from the copy, in milliseconds since `started`, or 0.
    last_read_ms: AtomicU64,
}

impl RestoredStore {
    /// Creates a store that reads from `own` before `copy`. `copy` is a
    /// [`crate::map::snapshot_store::state_view`] that contains the object `witness` and has no segment
    /// numbered `below` or higher.
    #[must_use]
    pub fn new(
        own: Arc<dyn ObjectStore>,
        copy: Arc<dyn ObjectStore>,
        witness: Path,
        below: u64,
        clock: Arc<dyn Clock>,
    ) -> RestoredStore {
        RestoredStore {
            own,
            copy,
            witness,
            below,
            read: Mutex::default(),
            is_complete: AtomicBool::new(false),
            started: clock.now(),
            clock,
            reader: OnceLock::new(),
            last_read_ms: AtomicU64::new(0),
        }
    }

    /// Returns the segments of the pool's own store.
    pub(crate) fn own_segments(&self) -> ObjectSegments {
        ObjectSegments::new(self.own.clone())
    }

    pub(crate) fn own(&self) -> &Arc<dyn ObjectStore> {
        &self.own
    }

    /// Returns the copy's store, without the check of the witness.
    pub(crate) fn of_copy(&self) -> &Arc<dyn ObjectStore> {
        &self.copy
    }

    pub(crate) fn below(&self) -> u64 {
        self.below
    }

    /// Reads from the copy. A missing object is `NotFound` only if the witness can be read.
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

    /// Like [`RestoredStore::get_of_copy`], for the pool's reads: the error says whether it
    /// concerns one object, or the copy as a whole.
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

    /// Checks that the copy exists and can be read.
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

    /// Returns whether the pool's own store has everything.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.is_complete.load(Ordering::SeqCst)
    }

    pub(crate) fn witness(&self) -> &Path {
        &self.witness
    }

    /// Marks the pool's own store as complete; the copy is no longer read.
    pub(crate) fn set_whole(&self) {
        self.is_complete.store(true, Ordering::SeqCst);
        self.read.lock().clear();
    }

    /// Returns the wanted object that was read from the copy most often and is not yet in the
    /// pool's own store.
    pub(crate) fn most_read(&self, is_wanted: impl Fn(&Path) -> bool) -> Option<Path> {
        let read = self.read.lock();
        let wanted = read.iter().filter(|(path, _)| is_wanted(path));
        wanted.max_by_key(|(_, count)| **count).map(|(path, _)| path.clone())
    }

    /// Stops counting reads of an object that the pool's own store has now, or that is no longer
    /// needed.
    pub(crate) fn forget(&self, path: &Path) {
        self.read.lock().remove(path);
    }

    /// Returns whether a client waited for the copy within this time.
    pub(crate) fn is_read_within(&self, time: Duration) -> bool {
        let last = self.last_read_ms.load(Ordering::Relaxed);
        let now = self.clock.since(self.started).as_millis() as u64;
        last > 0 && Duration::from_millis(now.saturating_sub(last)) < time
    }

    fn is_shared(&self, path: &Path) -> bool {
        match SegmentName::parse(path) {
            Some(name) => name.number.0 < self.below,
            None => path.prefix_matches(&database::table_folder()),
        }
    }

    fn note_read(&self, path: &Path) {
        let now = self.clock.since(self.started).as_millis() as u64;
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
        if self.is_complete.load(Ordering::SeqCst) || !self.is_shared(path) {
            return self.own.get_opts(path, options).await;
        }
        // Asking both stores for each read would double the requests.
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
            // It was added to the pool's own store meanwhile, and from then on nothing kept it in
            // the copy.
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
