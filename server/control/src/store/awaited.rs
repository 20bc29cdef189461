//! A store in a directory that may be missing for now: a disk or file server that is not mounted
//! yet.
//!
//! Invariants:
//! - The directory is never made. One in its place would keep the real one from being moved or
//!   mounted there, and would look like an empty store.
//! - While it is missing, every request fails like one to a store that does not answer, so that
//!   callers wait.

use super::direct::path_of;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetRange, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result,
};
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
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
        let opened = tokio::task::spawn_blocking(move || match std::fs::metadata(&dir) {
            Ok(found) if found.is_dir() => {
                super::open_existing_directory(&dir).map_err(|error| error.chain())
            }
            Ok(_) => Err(format!(
                "{} is no directory: name the directory where the file system of the disk is mounted",
                dir.display()
            )),
            Err(_) => Err(format!("directory {} is not there", dir.display())),
        });
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| Error::Generic {
            store: "directory",
            source,
        };
        opened.await.map_err(|error| failed(error.into()))?.map_err(|why| failed(why.into()))
    }
}

/// The range of a read that asks for nothing else.
fn range_of(options: &GetOptions) -> Option<Range<u64>> {
    let is_plain = !options.head
        && options.if_match.is_none()
        && options.if_none_match.is_none()
        && options.if_modified_since.is_none()
        && options.if_unmodified_since.is_none()
        && options.version.is_none();
    match &options.range {
        Some(GetRange::Bounded(range)) if is_plain => Some(range.clone()),
        _ => None,
    }
}

/// Reads a range of an object, which may end behind it. One turn of a blocking thread, where the library needs three:
/// this is what a read of a frame waits for.
fn read_range(
    dir: &std::path::Path,
    file: &std::path::Path,
    path: &Path,
    range: Range<u64>,
) -> Result<GetResult> {
    let failed = |source: Box<dyn std::error::Error + Send + Sync>| Error::Generic {
        store: "directory",
        source,
    };
    // Before and after: what is absent while the directory is mounted says nothing.
    let was_there = dir.is_dir();
    let opened = File::open(file).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound if was_there && dir.is_dir() => {
            Error::NotFound { path: path.to_string(), source: error.into() }
        }
        io::ErrorKind::NotFound => {
            failed(format!("directory {} is not there", dir.display()).into())
        }
        _ => failed(error.into()),
    })?;
    let found = opened.metadata().map_err(|error| failed(error.into()))?;
    if found.is_dir() {
        let source = io::Error::from(io::ErrorKind::IsADirectory).into();
        return Err(Error::NotFound { path: path.to_string(), source });
    }
    let size = found.len();
    if range.start >= size || range.start >= range.end {
        let why = format!("{path} has {size} bytes, and bytes {range:?} of it were asked for");
        return Err(failed(why.into()));
    }
    let range = range.start..range.end.min(size);
    let length = usize::try_from(range.end - range.start).map_err(|error| failed(error.into()))?;
    let mut bytes = vec![0; length];
    opened.read_exact_at(&mut bytes, range.start).map_err(|error| failed(error.into()))?;
    let last_modified = found.modified().map_err(|error| failed(error.into()))?.into();
    let meta =
        ObjectMeta { location: path.clone(), last_modified, size, e_tag: None, version: None };
    let payload = futures::stream::iter([Ok(Bytes::from(bytes))]).boxed();
    Ok(GetResult {
        payload: GetResultPayload::Stream(payload),
        meta,
        range,
        attributes: Default::default(),
        extensions: Default::default(),
    })
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
        if let Some(range) = range_of(&options)
            && let Some(file) = path_of(&self.dir, path)
        {
            let (dir, path) = (self.dir.clone(), path.clone());
            let read = tokio::task::spawn_blocking(move || read_range(&dir, &file, &path, range));
            return read
                .await
                .map_err(|error| Error::Generic { store: "directory", source: error.into() })?;
        }
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
    async fn ranges_are_those_of_the_library() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().to_str().unwrap();
        let options = StoreOptions::default();
        let ours = Store::await_as(dir, &options, None).unwrap().bulk();
        let library = Store::open(dir, &options).unwrap().bulk();
        for name in ["segments/plain", "segments/with space"] {
            let (path, empty) = (Path::from(name), Path::from(format!("{name}.empty")));
            library.put(&path, "0123456789".into()).await.unwrap();
            library.put(&empty, "".into()).await.unwrap();
            for range in [0..10, 0..1, 9..10, 3..7, 5..100, 9..11, 10..11, 10..10, 3..3, 11..20] {
                for path in [&path, &empty, &Path::from("segments/none"), &Path::from("segments")] {
                    let (a, b) = (
                        ours.get_range(path, range.clone()).await,
                        library.get_range(path, range.clone()).await,
                    );
                    match (a, b) {
                        (Ok(a), Ok(b)) => assert_eq!(a, b, "{path} {range:?}"),
                        (Err(a), Err(b)) => {
                            let is_absent = |error: &object_store::Error| {
                                matches!(error, object_store::Error::NotFound { .. })
                            };
                            assert_eq!(is_absent(&a), is_absent(&b), "{path} {range:?}: {a} {b}");
                        }
                        (a, b) => panic!("{path} {range:?}: {a:?} {b:?}"),
                    }
                }
            }
        }
    }

    #[tokio::test]
    async fn disk_in_place_of_a_directory_is_named() {
        let disk = tempfile::NamedTempFile::new().unwrap();
        let url = disk.path().to_str().unwrap();
        let store = Store::await_as(url, &StoreOptions::default(), None).unwrap();
        let error = store.bulk().get(&Path::from("segments/1")).await.unwrap_err();
        assert!(error.to_string().contains("is no directory: name the directory"), "{error}");
    }

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
