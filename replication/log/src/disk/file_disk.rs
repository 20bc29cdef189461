//! The real disk: numbered files in one directory.
//!
//! Invariants:
//! - The caller of [`Disk::submit`] executes buffered writes itself: a copy into the page cache is
//!   faster than any hand-over. It also executes direct writes on a fast device ([`WriteLatency`]),
//!   up to the number set by [`FileDisk::wait_for`]. Other direct writes, syncs and the making of
//!   files have a thread each, so a sync never delays a write.
//! - A file with its final name is whole and on stable storage, header included, and its blocks are
//!   written: a later sync has no allocation to record.
//! - Before a file of the ring is used, `ring.made` counts it. So a file that disappears later is
//!   noticed, even one of the newest.
//! - The directory is locked, so only one process uses it.

use crate::disk::write_latency::{self, WriteLatency};
use crate::disk::{LogDisk, Notify};
use crate::format::made;
use crate::options::IoMode;
use crate::seeded_bugs::{SeededBugs, seeded_bugs};
use block::env::{Clock, Disk, DiskCompletion, DiskReader, DiskRequest, IoBuffer};
use block::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex, RwLock};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Zeroes written at a time when a file is made. Chosen by hand.
const ZERO_BYTES: usize = 1 << 20;
/// Longest sleep of [`Disk::wait`].
const WAIT: Duration = Duration::from_millis(5);

/// Pause between two tries to lock the directory, which a predecessor that is just ending may hold.
/// Chosen by hand.
const LOCK_PAUSE: Duration = Duration::from_millis(5);
/// Number of tries after the first: half a second. Chosen by hand.
const LOCK_TRIES: u32 = 100;

/// Name of the file that records how many files of the ring were made.
const MADE_NAME: &str = "ring.made";
/// Name of its next version until it is complete.
const MADE_NEXT_NAME: &str = "ring.made.tmp";

/// Returns the name of a file of the ring.
pub(crate) fn name_of(file: u32) -> String {
    format!("ring-{file:05}.log")
}

/// Returns the number of the ring file with this name; `None` for other names.
pub(crate) fn number_of(name: &str) -> Option<u32> {
    name.strip_prefix("ring-")?.strip_suffix(".log")?.parse().ok()
}

struct Files {
    dir: PathBuf,
    io_mode: IoMode,
    /// File handles for writing, by number.
    writers: RwLock<Vec<Option<Arc<File>>>>,
    readers: RwLock<Vec<Option<Arc<File>>>>,
    completions: Mutex<Vec<DiskCompletion>>,
    arrived: Condvar,
    notify: RwLock<Option<Notify>>,
    /// The count in `ring.made`; `None` if it does not exist.
    made_count: Mutex<Option<u32>>,
    /// Speed of direct writes.
    write_latency: WriteLatency,
    clock: Arc<dyn Clock>,
}

/// Files named `ring-NNNNN.log` in a directory of their own.
pub(crate) struct FileDisk {
    files: Arc<Files>,
    /// Completed inside submit and not yet reaped.
    done: Vec<DiskCompletion>,
    /// Direct writes that submit may still execute itself.
    patience: u32,
    writer: Option<Worker>,
    syncer: Option<Worker>,
    maker: Option<Worker>,
    _lock: File,
}

struct Worker {
    requests: Sender<DiskRequest>,
    thread: JoinHandle<()>,
}

impl FileDisk {
    /// Opens the directory, creating it if missing, and locks it.
    pub(crate) fn open(dir: &Path, io_mode: IoMode, clock: Arc<dyn Clock>) -> Result<FileDisk> {
        let io = |what: &str, e| {
            Error::with_source(ErrorKind::Io, format!("{what} {}", dir.display()), e)
        };
        make_dir(dir).map_err(|e| io("make log directory", e))?;
        let lock = lock(dir)?;
        let made_count = read_made(dir)?;
        let files = Arc::new(Files {
            dir: dir.to_owned(),
            io_mode,
            writers: RwLock::default(),
            readers: RwLock::default(),
            completions: Mutex::default(),
            arrived: Condvar::new(),
            notify: RwLock::default(),
            made_count: Mutex::new(made_count),
            write_latency: WriteLatency::default(),
            clock,
        });
        if made_count == Some(0) {
            files.remove_all().map_err(|e| io("remove the dropped files of log directory", e))?;
        }
        files.open_all().map_err(|e| io("open the files of log directory", e))?;
        let start = |name| Worker::start(name, &files).map_err(|e| io("start threads for", e));
        let writer = if io_mode == IoMode::Direct { Some(start("spindle-log-wr")?) } else { None };
        Ok(FileDisk {
            writer,
            syncer: Some(start("spindle-log-syn")?),
            maker: Some(start("spindle-log-mk")?),
            files,
            done: Vec::new(),
            patience: 0,
            _lock: lock,
        })
    }

    /// Returns whether submit executes the request itself.
    fn is_done_here(&mut self, request: &DiskRequest) -> bool {
        let DiskRequest::Write { buffer, .. } = request else { return false };
        if self.writer.is_none() {
            return true;
        }
        let is_short = buffer.len() <= write_latency::BYTES_MAX;
        let is_waited_for = self.patience > 0 && is_short && self.files.write_latency.is_fast();
        self.patience -= u32::from(is_waited_for);
        is_waited_for
    }
}

impl LogDisk for FileDisk {
    #[cfg(test)]
    fn fill_up(&self, file: u32) {
        let full = OpenOptions::new().write(true).open("/dev/full").expect("it is there");
        put_at(&mut self.files.writers.write(), file, full);
    }

    fn set_notify(&self, notify: Notify) {
        *self.files.notify.write() = Some(notify);
    }

    fn wait_for(&mut self, count: u32) -> u32 {
        std::mem::replace(&mut self.patience, count)
    }

    fn written_at(&self) -> HashMap<u32, Instant> {
        let readers = self.files.readers.read();
        let files = (0u32..).zip(readers.iter());
        files
            .filter_map(|(number, file)| {
                Some((number, written_at(file.as_ref()?, &*self.files.clock)?))
            })
            .collect()
    }

    fn made_count(&self) -> Option<u32> {
        *self.files.made_count.lock()
    }

    fn note_made(&self, count: u32) -> Result<()> {
        let files = &self.files;
        files.write_made(count).and_then(|()| files.name_made(count)).map_err(|e| {
            let path = self.files.dir.join(MADE_NAME);
            Error::with_source(ErrorKind::Io, format!("write {}", path.display()), e)
        })
    }
}

/// Counts the files of the ring in a directory, for messages.
fn ring_file_count(dir: &Path) -> usize {
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten();
    names.filter(|entry| entry.file_name().to_str().and_then(number_of).is_some()).count()
}

/// Returns whether the files of the ring in `dir` are remains of one that was dropped. A `ring.made` that
/// cannot be read says nothing.
pub(crate) fn is_cleared(dir: &Path) -> bool {
    matches!(read_made(dir), Ok(Some(0)))
}

/// Reads `ring.made`. A damaged file refuses the log: no crash damages it, and in that case newer
/// files may be missing too. An operator who knows that none is missing may delete it.
fn read_made(dir: &Path) -> Result<Option<u32>> {
    let path = dir.join(MADE_NAME);
    let bytes = match std::fs::read(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => {
            let what = format!("read {}", path.display());
            return Err(Error::with_source(ErrorKind::Io, what, e));
        }
        Ok(bytes) => bytes,
    };
    made::decode(&bytes).map(Some).map_err(|e| {
        if e.is_unsupported() {
            let what = format!("open the write log: read {}", path.display());
            return Error::with_source(ErrorKind::Unsupported, what, e);
        }
        let what = format!(
            "open the write log: {} is damaged, which holds the number of the log's files; without \
             it, a missing file and its writes would go unnoticed. Bring it back; or, only if all \
             files are there ({} are), delete it: it holds nothing but their number. Nothing was \
             changed",
            path.display(),
            ring_file_count(dir)
        );
        Error::with_source(ErrorKind::Corrupt, what, e)
    })
}

/// Makes the directory durably, so that it survives a loss of power.
fn make_dir(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    let parent = match dir.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    make_dir(parent)?;
    match std::fs::create_dir(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    File::open(parent)?.sync_all()
}

fn lock(dir: &Path) -> Result<File> {
    let path = dir.join("lock");
    let open = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
    let file =
        open.map_err(|e| Error::with_source(ErrorKind::Io, format!("open {}", path.display()), e))?;
    let operation = rustix::fs::FlockOperation::NonBlockingLockExclusive;
    let mut tries_left = LOCK_TRIES;
    loop {
        match rustix::fs::flock(&file, operation) {
            Ok(()) => return Ok(file),
            Err(e) if tries_left == 0 => {
                let what = format!("lock {}: this log is open elsewhere", path.display());
                return Err(Error::with_source(ErrorKind::Busy, what, e));
            }
            Err(_) => std::thread::sleep(LOCK_PAUSE),
        }
        tries_left -= 1;
    }
}

impl Disk for FileDisk {
    fn submit(&mut self, request: DiskRequest) {
        if self.is_done_here(&request) {
            let is_measured = self.writer.is_some() && self.files.write_latency.is_measured();
            self.done.push(self.files.execute(request, is_measured));
            return;
        }
        let worker = match &request {
            DiskRequest::Write { .. } => self.writer.as_ref(),
            DiskRequest::Sync { .. } => self.syncer.as_ref(),
            DiskRequest::Create { .. } | DiskRequest::Clear { .. } => self.maker.as_ref(),
        };
        let worker =
            worker.expect("there as long as we are; writes without a writer are done here");
        worker.requests.send(request).expect("the thread lives as long as the disk");
    }

    fn reap(&mut self, completions: &mut Vec<DiskCompletion>) {
        completions.append(&mut self.done);
        completions.append(&mut self.files.completions.lock());
    }

    fn wait(&mut self) {
        let mut completions = self.files.completions.lock();
        if self.done.is_empty() && completions.is_empty() {
            self.files.arrived.wait_for(&mut completions, WAIT);
        }
    }

    fn reader(&self) -> Arc<dyn DiskReader> {
        Arc::clone(&self.files) as Arc<dyn DiskReader>
    }
}

impl Drop for FileDisk {
    fn drop(&mut self) {
        *self.files.notify.write() = None;
        for worker in [self.writer.take(), self.syncer.take(), self.maker.take()] {
            let Some(Worker { requests, thread }) = worker else { continue };
            drop(requests);
            // The last owner of the log may be dropped by one of these threads.
            if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
                tracing::error!("a thread of the log's disk has panicked");
            }
        }
    }
}

impl Worker {
    fn start(name: &str, files: &Arc<Files>) -> io::Result<Worker> {
        let (requests, inbox) = channel();
        let files = Arc::clone(files);
        let thread =
            std::thread::Builder::new().name(name.into()).spawn(move || serve(&files, &inbox))?;
        Ok(Worker { requests, thread })
    }
}

/// Serves requests until the sender is dropped. The core bounds the number of requests under way: a
/// few writes, one sync, a few files.
fn serve(files: &Files, inbox: &Receiver<DiskRequest>) {
    for request in inbox {
        let completion = files.execute(request, true);
        files.completions.lock().push(completion);
        files.arrived.notify_all();
        let notify = files.notify.read().clone();
        if let Some(notify) = notify {
            notify();
        }
    }
}

impl Files {
    fn path(&self, file: u32) -> PathBuf {
        self.dir.join(name_of(file))
    }

    /// Opens the existing files and removes the remains of files that were not completed.
    fn open_all(&self) -> io::Result<()> {
        for entry in std::fs::read_dir(&self.dir)? {
            let name = entry?.file_name();
            let Some(name) = name.to_str() else { continue };
            if name.starts_with("ring-") && name.ends_with(".tmp") {
                std::fs::remove_file(self.dir.join(name))?;
            }
            if let Some(file) = number_of(name) {
                self.open_one(file)?;
            }
        }
        Ok(())
    }

    fn open_one(&self, file: u32) -> io::Result<()> {
        let path = self.path(file);
        let mut writing = OpenOptions::new();
        writing.write(true);
        if self.io_mode == IoMode::Direct {
            let flag = OFlags::DIRECT.bits();
            writing.custom_flags(i32::try_from(flag).expect("a flag of open"));
        }
        put_at(&mut self.writers.write(), file, writing.open(&path)?);
        put_at(&mut self.readers.write(), file, File::open(&path)?);
        Ok(())
    }

    /// Executes the request, and measures direct writes if `is_measured`.
    fn execute(&self, request: DiskRequest, is_measured: bool) -> DiskCompletion {
        match request {
            DiskRequest::Write { token, file, offset, buffer, is_sync_next } => {
                let is_early = is_sync_next && self.io_mode == IoMode::Buffered;
                let begun = (is_measured && buffer.len() <= write_latency::BYTES_MAX)
                    .then(|| self.clock.now());
                let result = writer(&self.writers, file).and_then(|handle| {
                    handle.write_all_at(buffer.as_slice(), offset)?;
                    if is_early {
                        start_writeback(&handle, offset, buffer.len());
                    }
                    Ok(())
                });
                if let Some(begun) = begun {
                    self.write_latency.note(self.clock.now() - begun);
                }
                DiskCompletion { token, result, buffer: Some(buffer) }
            }
            DiskRequest::Sync { token, files } => {
                if let Some(pause) = sync_pause(seeded_bugs()) {
                    std::thread::sleep(pause);
                }
                let result = files.into_iter().try_for_each(|file| {
                    writer(&self.writers, file).and_then(|handle| handle.sync_data())
                });
                DiskCompletion { token, result, buffer: None }
            }
            DiskRequest::Create { token, file, len, header } => {
                let result = self.create(file, len, &header);
                DiskCompletion { token, result, buffer: None }
            }
            DiskRequest::Clear { token } => {
                DiskCompletion { token, result: self.clear(), buffer: None }
            }
        }
    }

    fn create(&self, file: u32, len: u64, header: &[u8]) -> io::Result<()> {
        let path = self.path(file);
        let making = path.with_extension("tmp");
        let made = self.create_as(&making, len, header);
        // Everything that needs space comes before the file has its name.
        let result = made.and_then(|()| self.write_made(file + 1));
        if result.is_err() {
            // Half a file is of no use, and its space may be needed.
            if let Err(error) = std::fs::remove_file(&making) {
                tracing::warn!(
                    path = %making.display(), %error,
                    "could not remove an unfinished log file"
                );
            }
            return result;
        }
        std::fs::rename(&making, &path)?;
        File::open(&self.dir)?.sync_all()?;
        self.name_made(file + 1)?;
        self.open_one(file)
    }

    /// Removes the ring. Once `ring.made` counts no file, an open removes those that a crash has left.
    fn clear(&self) -> io::Result<()> {
        *self.made_count.lock() = None;
        self.write_made(0)?;
        self.name_made(0)?;
        self.writers.write().clear();
        self.readers.write().clear();
        self.remove_all()
    }

    /// Removes the files of the ring, durably.
    fn remove_all(&self) -> io::Result<()> {
        for entry in std::fs::read_dir(&self.dir)? {
            let name = entry?.file_name();
            if name.to_str().and_then(number_of).is_some() {
                std::fs::remove_file(self.dir.join(name))?;
            }
        }
        File::open(&self.dir)?.sync_all()
    }

    fn is_noted(&self, count: u32) -> bool {
        self.made_count.lock().is_some_and(|made| made >= count)
    }

    /// Writes the next `ring.made`, under another name.
    fn write_made(&self, count: u32) -> io::Result<()> {
        if self.is_noted(count) {
            return Ok(());
        }
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let file = options.open(self.dir.join(MADE_NEXT_NAME))?;
        file.write_all_at(&made::encode(count), 0)?;
        file.sync_all()
    }

    /// Renames the file written by [`Files::write_made`] to `ring.made`.
    fn name_made(&self, count: u32) -> io::Result<()> {
        if self.is_noted(count) {
            return Ok(());
        }
        std::fs::rename(self.dir.join(MADE_NEXT_NAME), self.dir.join(MADE_NAME))?;
        File::open(&self.dir)?.sync_all()?;
        *self.made_count.lock() = Some(count);
        Ok(())
    }

    /// Writes the file past the page cache if the file system supports it: the zeroes are not worth
    /// caching.
    fn create_as(&self, path: &Path, len: u64, header: &[u8]) -> io::Result<()> {
        let part_bytes = usize::try_from(len).unwrap_or(usize::MAX).min(ZERO_BYTES);
        let mut buffer = IoBuffer::default();
        buffer.reset(part_bytes);
        buffer.push(header);
        buffer.pad_to(part_bytes);
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let flag = i32::try_from(OFlags::DIRECT.bits()).expect("a flag of open");
        let direct = options.clone().custom_flags(flag).open(path).and_then(|file| {
            file.write_all_at(buffer.as_slice(), 0)?;
            Ok(file)
        });
        let handle = match direct {
            Err(e) if e.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
                let file = options.open(path)?;
                file.write_all_at(buffer.as_slice(), 0)?;
                file
            }
            other => other?,
        };
        buffer.as_mut_slice()[..header.len()].fill(0);
        let mut at = part_bytes as u64;
        while at < len {
            let part = usize::try_from(len - at).unwrap_or(usize::MAX).min(part_bytes);
            handle.write_all_at(&buffer.as_slice()[..part], at)?;
            at += part as u64;
        }
        handle.sync_all()
    }
}

/// Returns the time that a seeded bug adds to each sync. Writes do not wait for it.
fn sync_pause(seeded_bugs: SeededBugs) -> Option<Duration> {
    let pause_ms = seeded_bugs.log_sync_late?;
    Some(Duration::from_millis(pause_ms.parse().expect("a number of milliseconds")))
}

/// Starts writing the given range from the page cache to the device, without waiting and without
/// any promise: the sync that follows finds the first half of its work under way. Errors are
/// ignored here because that sync reports them.
#[expect(unsafe_code, reason = "a system call that no safe library offers")]
fn start_writeback(file: &File, offset: u64, len: usize) {
    let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else { return };
    // SAFETY: the descriptor is open for as long as `file` is borrowed; no memory is passed.
    unsafe {
        libc::sync_file_range(file.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE);
    }
}

/// Returns the time of the last write to the file, by its modification time and the wall clock. It
/// is a moment of this process's clock and may be before the machine started. `None` if the file
/// system does not say or the moment lies in the future.
pub(crate) fn written_at(file: &File, clock: &dyn Clock) -> Option<Instant> {
    let age = clock.wall().duration_since(file.metadata().ok()?.modified().ok()?).ok()?;
    clock.now().checked_sub(age)
}

fn put_at(files: &mut Vec<Option<Arc<File>>>, index: u32, file: File) {
    let index = index as usize;
    if files.len() <= index {
        files.resize_with(index + 1, || None);
    }
    files[index] = Some(Arc::new(file));
}

fn writer(files: &RwLock<Vec<Option<Arc<File>>>>, file: u32) -> io::Result<Arc<File>> {
    let found = files.read().get(file as usize).cloned().flatten();
    found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no such log file"))
}

impl DiskReader for Files {
    fn files(&self) -> io::Result<Vec<(u32, u64)>> {
        let readers = self.readers.read();
        let mut found = Vec::new();
        for (file, handle) in (0u32..).zip(readers.iter()) {
            if let Some(handle) = handle {
                found.push((file, handle.metadata()?.len()));
            }
        }
        Ok(found)
    }

    fn read_at(&self, file: u32, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        writer(&self.readers, file)?.read_exact_at(buf, offset)
    }

    fn name(&self, file: u32) -> String {
        self.path(file).display().to_string()
    }
}

#[cfg(test)]
mod tests;
