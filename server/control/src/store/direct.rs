//! A directory as an object store. Large new objects bypass the page cache when they are written.
//!
//! A segment is written once and mostly read through the read cache, so keeping its pages in the
//! page cache would waste memory and CPU time. Everything else is done by the library.
//!
//! Invariants:
//! - An object gets its name when all of it is on stable storage, and the name is durable when the
//!   put returns; an existing name is never replaced.
//! - Objects that cannot be written this way (a file system without direct I/O) are left to the
//!   library.

use async_trait::async_trait;
use block::env::{IO_ALIGN_BYTES, IoBuffer};
use futures::stream::BoxStream;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use parking_lot::Mutex;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Size below which objects are metadata, which is read again soon. Chosen by hand.
const DIRECT_BYTES_MIN: usize = 1 << 20;
/// Bytes per write. Chosen by hand: large enough for a disk, small enough for the processor's
/// cache.
const STEP_BYTES: usize = 1 << 20;

/// A directory as an object store, with direct I/O for large new objects.
pub(super) struct DirectFiles {
    inner: LocalFileSystem,
    files: Arc<Files>,
}

struct Files {
    dir: PathBuf,
    /// Buffer of the previous put, for the next one.
    spare: Mutex<Option<IoBuffer>>,
}

/// Number of the next unfinished file of this process: two stores of one directory must not share a name.
static NEXT_STAGED: AtomicU64 = AtomicU64::new(0);

impl fmt::Debug for DirectFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DirectFiles({})", self.files.dir.display())
    }
}

impl fmt::Display for DirectFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.inner)
    }
}

impl DirectFiles {
    /// `inner` is the library's store of the same directory.
    pub(super) fn new(dir: PathBuf, inner: LocalFileSystem) -> Self {
        let files = Files { dir, spare: Mutex::default() };
        DirectFiles { inner, files: Arc::new(files) }
    }
}

/// Path of an object in a directory if its name needs no encoding.
pub(super) fn path_of(dir: &std::path::Path, location: &Path) -> Option<PathBuf> {
    let is_plain =
        |byte: u8| byte.is_ascii_alphanumeric() || [b'/', b'-', b'_', b'.'].contains(&byte);
    location.as_ref().bytes().all(is_plain).then(|| dir.join(location.as_ref()))
}

impl Files {
    /// Writes a new object. `None`: it has to be written in another way, and no part of it is left.
    fn create(&self, location: &Path, payload: &PutPayload) -> Result<Option<PutResult>> {
        let Some(path) = path_of(&self.dir, location) else { return Ok(None) };
        // Named like the library's unfinished files, which listings leave out.
        let number = NEXT_STAGED.fetch_add(1, Ordering::Relaxed);
        let number = (u64::from(std::process::id()) << 32) + number;
        let mut staged = path.clone().into_os_string();
        staged.push(format!("#{number}"));
        let staged = PathBuf::from(staged);
        let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).expect("a flag of open");
        let opened =
            OpenOptions::new().write(true).create_new(true).custom_flags(direct).open(&staged);
        let file = match opened {
            Ok(file) => file,
            // A file system without direct I/O may have made it all the same.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                let _ = std::fs::remove_file(&staged);
                return Ok(None);
            }
            // The directory does not exist yet.
            Err(_) => return Ok(None),
        };
        let written = self.write(&file, payload).and_then(|()| file.sync_all());
        drop(file);
        let sync_dir = || sync_parent(&path);
        let named = written.and_then(|()| match std::fs::hard_link(&staged, &path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                sync_existing(&path).and(Err(error))
            }
            linked => linked.and_then(|()| sync_dir()),
        });
        let _ = std::fs::remove_file(&staged);
        match named {
            Ok(()) => {
                Ok(Some(PutResult { e_tag: None, version: None, extensions: Default::default() }))
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(Error::AlreadyExists { path: location.to_string(), source: error.into() })
            }
            Err(error) => Err(Error::Generic { store: "directory", source: error.into() }),
        }
    }

    /// Writes the payload in aligned steps. The last one is padded, and the file then truncated.
    fn write(&self, file: &File, payload: &PutPayload) -> io::Result<()> {
        let mut buffer = self.spare.lock().take().unwrap_or_default();
        let written = write_steps(file, payload, &mut buffer);
        *self.spare.lock() = Some(buffer);
        written
    }
}

/// Puts an object that exists, and its name, on stable storage: they may come from a put whose sync failed or has not
/// ended, and a caller that learns that the object exists relies on it.
fn sync_existing(path: &std::path::Path) -> io::Result<()> {
    File::open(path)?.sync_all()?;
    sync_parent(path)
}

fn sync_parent(path: &std::path::Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
}

/// Reports whether a file name belongs to an unfinished object.
fn is_unfinished(name: &str) -> bool {
    let number = name.rsplit_once('#').map(|(_, number)| number);
    number.is_some_and(|number| {
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

/// Removes the unfinished files in a directory and in its direct subdirectories.
pub(super) fn clean_unfinished(dir: &std::path::Path) {
    let mut dirs = vec![(dir.to_owned(), 0)];
    while let Some((dir, depth)) = dirs.pop() {
        let Ok(entries) = std::fs::read_dir(&dir) else { continue };
        for entry in entries.flatten() {
            let path = entry.path();
            let name = entry.file_name();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) && depth == 0 {
                dirs.push((path, 1));
            } else if name.to_str().is_some_and(is_unfinished) {
                match std::fs::remove_file(&path) {
                    Ok(()) => {
                        tracing::info!(
                            path = %path.display(),
                            "spindle removed an unfinished object"
                        )
                    }
                    Err(error) => {
                        tracing::debug!(
                            path = %path.display(), %error,
                            "could not remove an unfinished object"
                        );
                    }
                }
            }
        }
    }
}

fn write_steps(file: &File, payload: &PutPayload, buffer: &mut IoBuffer) -> io::Result<()> {
    let mut at = 0;
    buffer.reset(STEP_BYTES);
    for part in payload {
        let mut rest = &part[..];
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(STEP_BYTES - buffer.len()));
            buffer.push(now);
            rest = later;
            if buffer.len() == STEP_BYTES {
                file.write_all_at(buffer.as_slice(), at)?;
                at += STEP_BYTES as u64;
                buffer.reset(STEP_BYTES);
            }
        }
    }
    let left = buffer.len();
    if left > 0 {
        buffer.pad_to(left.next_multiple_of(IO_ALIGN_BYTES));
        file.write_all_at(buffer.as_slice(), at)?;
    }
    file.set_len(at + left as u64)
}

#[async_trait]
impl ObjectStore for DirectFiles {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let is_direct =
            options.mode == PutMode::Create && payload.content_length() >= DIRECT_BYTES_MIN;
        if is_direct {
            let (files, at, bytes) = (Arc::clone(&self.files), location.clone(), payload.clone());
            let created = tokio::task::spawn_blocking(move || files.create(&at, &bytes)).await;
            let created = created
                .map_err(|error| Error::Generic { store: "directory", source: error.into() })?;
            if let Some(result) = created? {
                return Ok(result);
            }
        }
        let is_create = options.mode == PutMode::Create;
        let put = self.inner.put_opts(location, payload, options).await;
        if is_create
            && let Err(Error::AlreadyExists { .. }) = &put
            && let Some(path) = path_of(&self.files.dir, location)
        {
            let synced = tokio::task::spawn_blocking(move || sync_existing(&path)).await;
            let synced = synced.unwrap_or_else(|error| Err(io::Error::other(error)));
            synced.map_err(|error| Error::Generic { store: "directory", source: error.into() })?;
        }
        put
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.inner.get_opts(location, options).await
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

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::TryStreamExt;
    use object_store::ObjectStoreExt;

    fn store(dir: &std::path::Path) -> DirectFiles {
        let inner = LocalFileSystem::new_with_prefix(dir).unwrap().with_fsync(true);
        DirectFiles::new(dir.to_owned(), inner)
    }

    fn bytes(seed: u8, len: usize) -> Vec<u8> {
        (0..len).map(|at| (at / 7) as u8 ^ (at / 4096) as u8 ^ seed).collect()
    }

    #[tokio::test]
    async fn large_objects_of_any_length_read_back_and_are_created_once() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let create = || PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let mib = 1 << 20;
        let mut names = Vec::new();
        for (index, len) in [mib, mib + 1, mib + 4095, 2 * mib, 3 * mib + 512, 4096, 5 * mib - 1]
            .into_iter()
            .enumerate()
        {
            // Parts of arbitrary length.
            let whole = bytes(index as u8, len);
            let (first, second) = whole.split_at(len / 3);
            let payload =
                PutPayload::from_iter([first.to_vec(), second.to_vec()].map(bytes::Bytes::from));
            let name = Path::from(format!("segments/{index:04x}-a_b.seg"));
            store.put_opts(&name, payload, create()).await.unwrap();
            let found = store.get(&name).await.unwrap().bytes().await.unwrap();
            assert!(found == whole, "{len} bytes");
            let again = store.put_opts(&name, bytes(99, len).into(), create()).await.unwrap_err();
            assert!(matches!(again, Error::AlreadyExists { .. }), "{again}");
            let found = store.get(&name).await.unwrap().bytes().await.unwrap();
            assert!(found == whole, "{len} bytes");
            names.push(name);
        }
        let listed: Vec<Path> =
            store.list(None).map_ok(|meta| meta.location).try_collect().await.unwrap();
        assert_eq!(listed.len(), names.len());
        // No unfinished file is left.
        let files = std::fs::read_dir(dir.path().join("segments")).unwrap().count();
        assert_eq!(files, names.len());
    }

    #[test]
    fn partially_written_objects_are_unlisted_and_removable() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let folder = dir.path().join("segments");
        std::fs::create_dir_all(folder.join("0001")).unwrap();
        // Killed before the link, or before the removal.
        for name in ["0001#4711", "0001/0002#3", "0001/0003#", "0001/0004#a", "0001/0005"] {
            std::fs::write(folder.join(name), b"half").unwrap();
        }
        let list =
            || futures::executor::block_on(store.list(None).try_collect::<Vec<_>>()).unwrap();
        assert_eq!(list().len(), 3);
        clean_unfinished(&folder);
        assert_eq!(list().len(), 3);
        let mut left: Vec<_> = std::fs::read_dir(folder.join("0001"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["0003#", "0004#a", "0005"]);
        assert!(!folder.join("0001#4711").exists());
        clean_unfinished(&folder.join("nothing"));
    }
}
