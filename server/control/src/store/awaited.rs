//! A store in a directory that may be missing for now: a disk or file server that is not mounted
//! yet.
//!
//! Invariants:
//! - The directory is never made. One in its place would keep the real one from being moved or
//!   mounted there, and would look like an empty store.
//! - While it is missing, every request fails like one to a store that does not answer, so that
//!   callers wait.

use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// A store in a directory that may be missing for now. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct AwaitedDirectory {
    dir: PathBuf,
}

impl AwaitedDirectory {
    /// Does not look at the directory yet.
    pub(super) fn new(dir: PathBuf) -> AwaitedDirectory {
        AwaitedDirectory { dir }
    }

    /// Opens the directory as a store if it exists at this moment.
    async fn objects(&self) -> Result<Arc<dyn ObjectStore>> {
        let dir = self.dir.clone();
        let opened = tokio::task::spawn_blocking(move || match dir.is_dir() {
            true => super::open_directory(&dir).map_err(|error| error.chain()),
            false => Err(format!("directory {} is not there", dir.display())),
        });
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| Error::Generic {
            store: "directory",
            source,
        };
        opened.await.map_err(|error| failed(error.into()))?.map_err(|why| failed(why.into()))
    }
}

impl fmt::Display for AwaitedDirectory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AwaitedDirectory({})", self.dir.display())
    }
}

#[async_trait::async_trait]
impl ObjectStore for AwaitedDirectory {
    async fn put_opts(
        &self,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        self.objects().await?.put_opts(path, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.objects().await?.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        self.objects().await?.get_opts(path, options).await
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let this = self.clone();
        let deleted =
            async move { this.objects().await.map(|objects| objects.delete_stream(paths)) };
        deleted.into_stream().try_flatten().boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (this, prefix) = (self.clone(), prefix.cloned());
        let listed =
            async move { this.objects().await.map(|objects| objects.list(prefix.as_ref())) };
        listed.into_stream().try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.objects().await?.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.objects().await?.copy_opts(from, to, options).await
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Store, StoreOptions};
    use object_store::ObjectStoreExt;
    use object_store::path::Path;

    #[tokio::test]
    async fn absent_directory_is_not_created_but_awaited() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("copy");
        let store = Store::await_as(dir.to_str().unwrap(), &StoreOptions::default(), None).unwrap();
        let (objects, path) = (store.bulk(), Path::from("segments/1"));
        for _ in 0..2 {
            let error = objects.get(&path).await.unwrap_err();
            assert!(error.to_string().contains("is not there"), "{error}");
            assert!(
                !matches!(error, object_store::Error::NotFound { .. }),
                "nothing is known of it"
            );
            objects.put(&path, "x".into()).await.unwrap_err();
            objects.delete(&path).await.unwrap_err();
            assert!(objects.list_with_delimiter(None).await.is_err());
            assert!(!dir.exists());
        }
        let away = place.path().join("away/segments");
        std::fs::create_dir_all(&away).unwrap();
        std::fs::write(away.join("1"), "one").unwrap();
        std::fs::rename(place.path().join("away"), &dir).unwrap();
        assert_eq!(objects.get(&path).await.unwrap().bytes().await.unwrap().as_ref(), b"one");
        std::fs::rename(&dir, place.path().join("away")).unwrap();
        objects.get(&path).await.unwrap_err();
        assert!(!dir.exists());
    }
}
