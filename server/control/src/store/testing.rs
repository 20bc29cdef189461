//! A store that misbehaves on request, for tests of code that uses stores.

use super::Store;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::watch;

/// Kind of misbehaviour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// None.
    #[default]
    None,
    /// A create overwrites.
    IgnoresConditions,
    /// Creates are not supported.
    LacksConditions,
    /// Listings show nothing.
    ListsNothing,
    /// Seeded: a create fails, with or without having had its effect.
    Ambiguous(u64),
    /// The deletion with this number fails, counted from 0. Listings are in reverse order, because
    /// their order is not guaranteed.
    RefusesDelete(u64),
}

/// A memory store with a fault.
pub struct FaultyStore {
    inner: InMemory,
    fault: Fault,
    count: Arc<AtomicU64>,
}

impl FaultyStore {
    /// Makes an empty store with this fault.
    pub fn new(fault: Fault) -> Arc<FaultyStore> {
        Arc::new(FaultyStore { inner: InMemory::new(), fault, count: Arc::default() })
    }

    /// A store for the code under test.
    pub fn store(self: &Arc<Self>) -> Store {
        Store::from_objects("memory", Arc::clone(self) as Arc<dyn ObjectStore>)
    }

    /// Names of all objects.
    pub async fn names(&self) -> Vec<String> {
        let mut names: Vec<String> =
            self.inner.list(None).map(|meta| meta.unwrap().location.to_string()).collect().await;
        names.sort();
        names
    }

    /// Contents of an object, which must exist.
    pub async fn bytes(&self, name: &str) -> Bytes {
        self.inner.get(&Path::from(name)).await.unwrap().bytes().await.unwrap()
    }

    /// Puts bytes without any fault.
    pub async fn set(&self, name: &str, bytes: impl Into<PutPayload>) {
        self.inner.put(&Path::from(name), bytes.into()).await.unwrap();
    }

    /// Removes an object without any fault.
    pub async fn remove(&self, name: &str) {
        self.inner.delete(&Path::from(name)).await.unwrap();
    }

    /// 0: works; 1: fails without effect; 2: has its effect and fails.
    fn chance(&self, seed: u64) -> u64 {
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        // splitmix64
        let mut z = (seed << 32 | count).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % 3
    }
}

fn lost_answer() -> object_store::Error {
    object_store::Error::Generic { store: "faulty", source: "the answer was lost".into() }
}

impl fmt::Debug for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FaultyStore({:?})", self.fault)
    }
}

impl fmt::Display for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FaultyStore({:?})", self.fault)
    }
}

/// Written without the `async_trait` macro, which is no dependency of this package.
impl ObjectStore for FaultyStore {
    fn put_opts<'a, 'b, 'c>(
        &'a self,
        location: &'b Path,
        payload: PutPayload,
        mut options: PutOptions,
    ) -> BoxFuture<'c, Result<PutResult>>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async move {
            let is_create = options.mode == PutMode::Create;
            match self.fault {
                Fault::IgnoresConditions if is_create => options.mode = PutMode::Overwrite,
                Fault::LacksConditions if is_create => {
                    return Err(object_store::Error::NotImplemented {
                        operation: "conditional put".into(),
                        implementer: "faulty".into(),
                    });
                }
                Fault::Ambiguous(seed) if is_create => match self.chance(seed) {
                    1 => return Err(lost_answer()),
                    2 => {
                        self.inner.put_opts(location, payload, options).await?;
                        return Err(lost_answer());
                    }
                    _ => {}
                },
                _ => {}
            }
            tokio::task::yield_now().await;
            self.inner.put_opts(location, payload, options).await
        })
    }

    fn put_multipart_opts<'a, 'b, 'c>(
        &'a self,
        location: &'b Path,
        options: PutMultipartOptions,
    ) -> BoxFuture<'c, Result<Box<dyn MultipartUpload>>>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        self.inner.put_multipart_opts(location, options)
    }

    fn get_opts<'a, 'b, 'c>(
        &'a self,
        location: &'b Path,
        options: GetOptions,
    ) -> BoxFuture<'c, Result<GetResult>>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async move {
            tokio::task::yield_now().await;
            self.inner.get_opts(location, options).await
        })
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let Fault::RefusesDelete(refused) = self.fault else {
            return self.inner.delete_stream(locations);
        };
        let count = Arc::clone(&self.count);
        let locations = locations.map(move |location| {
            let number = count.fetch_add(1, Ordering::Relaxed);
            if number == refused { Err(lost_answer()) } else { location }
        });
        self.inner.delete_stream(locations.boxed())
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        if self.fault == Fault::ListsNothing {
            return futures::stream::empty().boxed();
        }
        let listed = self.inner.list(prefix);
        if !matches!(self.fault, Fault::RefusesDelete(_)) {
            return listed;
        }
        let all = listed.collect::<Vec<_>>();
        all.map(|all| futures::stream::iter(all.into_iter().rev())).flatten_stream().boxed()
    }

    fn list_with_delimiter<'a, 'b, 'c>(
        &'a self,
        prefix: Option<&'b Path>,
    ) -> BoxFuture<'c, Result<ListResult>>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        self.inner.list_with_delimiter(prefix)
    }

    fn copy_opts<'a, 'b, 'd, 'c>(
        &'a self,
        from: &'b Path,
        to: &'d Path,
        options: CopyOptions,
    ) -> BoxFuture<'c, Result<()>>
    where
        'a: 'c,
        'b: 'c,
        'd: 'c,
        Self: 'c,
    {
        self.inner.copy_opts(from, to, options)
    }
}

/// A memory store whose segments can be kept from being written and from being read: callers wait.
pub struct GatedStore {
    inner: InMemory,
    writes: watch::Sender<bool>,
    reads: watch::Sender<bool>,
    waiting_reads: AtomicU64,
}

impl GatedStore {
    /// Makes an empty store that keeps nothing waiting.
    pub fn new() -> Arc<GatedStore> {
        let (writes, reads) = (watch::Sender::new(true), watch::Sender::new(true));
        Arc::new(GatedStore {
            inner: InMemory::new(),
            writes,
            reads,
            waiting_reads: AtomicU64::new(0),
        })
    }

    /// Sets whether segments can be written.
    pub fn set_writes(&self, are_open: bool) {
        self.writes.send_replace(are_open);
    }

    /// Sets whether segments can be read.
    pub fn set_reads(&self, are_open: bool) {
        self.reads.send_replace(are_open);
    }

    /// Number of reads of segments that have had to wait.
    pub fn waiting_reads(&self) -> u64 {
        self.waiting_reads.load(Ordering::SeqCst)
    }
}

fn is_segment(location: &Path) -> bool {
    location.as_ref().starts_with("segments/")
}

impl fmt::Debug for GatedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GatedStore")
    }
}

impl fmt::Display for GatedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GatedStore")
    }
}

impl ObjectStore for GatedStore {
    fn put_opts<'a, 'b, 'c>(
        &'a self,
        location: &'b Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> BoxFuture<'c, Result<PutResult>>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async move {
            if is_segment(location) {
                let _ = self.writes.subscribe().wait_for(|are_open| *are_open).await;
            }
            self.inner.put_opts(location, payload, options).await
        })
    }

    fn put_multipart_opts<'a, 'b, 'c>(
        &'a self,
        location: &'b Path,
        options: PutMultipartOptions,
    ) -> BoxFuture<'c, Result<Box<dyn MultipartUpload>>>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async move {
            if is_segment(location) {
                let _ = self.writes.subscribe().wait_for(|are_open| *are_open).await;
            }
            self.inner.put_multipart_opts(location, options).await
        })
    }

    fn get_opts<'a, 'b, 'c>(
        &'a self,
        location: &'b Path,
        options: GetOptions,
    ) -> BoxFuture<'c, Result<GetResult>>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async move {
            if is_segment(location) && !*self.reads.borrow() {
                self.waiting_reads.fetch_add(1, Ordering::SeqCst);
                let _ = self.reads.subscribe().wait_for(|are_open| *are_open).await;
            }
            self.inner.get_opts(location, options).await
        })
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    fn list_with_delimiter<'a, 'b, 'c>(
        &'a self,
        prefix: Option<&'b Path>,
    ) -> BoxFuture<'c, Result<ListResult>>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        self.inner.list_with_delimiter(prefix)
    }

    fn copy_opts<'a, 'b, 'd, 'c>(
        &'a self,
        from: &'b Path,
        to: &'d Path,
        options: CopyOptions,
    ) -> BoxFuture<'c, Result<()>>
    where
        'a: 'c,
        'b: 'c,
        'd: 'c,
        Self: 'c,
    {
        self.inner.copy_opts(from, to, options)
    }
}
