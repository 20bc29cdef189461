//! The NVMe read cache: frames on a local disk, in their stored form.
//!
//! Owns one file of equal regions, which are filled in turn. When all are full, the oldest is
//! emptied and filled again; frames of it that were read in the meantime move on, within bounds.
//! Frames are kept as ciphertext, so the disk holds no secrets beyond those in the store, and a
//! reader verifies a frame as it would verify the store's copy.
//!
//! Invariants:
//! - Callers wait for the cache only when they read from it: inserts go through a bounded queue to
//!   one writer thread, and inserts that do not fit are dropped and counted.
//! - Memory is bounded: index, waiting frames, and one pack.
//! - The worst effect of any failure of the file or the disk is that frames come from the store
//!   again. The first failing write turns the cache off until a restart.
//! - On a disk without space, the cache keeps its current size, and grows again once there is
//!   space.
//! - Nothing is ever invalidated: a key names bytes that never change.

pub mod file;
pub mod format;
pub mod index;
mod rejected;
mod writer;

#[cfg(test)]
mod tests;

pub use file::AlignedBuffer;
pub use index::key_of;

use crate::seeded_bugs::{SeededBugs, seeded_bugs};
use crate::segment::{FrameAt, FrameRef, SegmentError, SegmentId, SegmentInfo};
use block::conditions::Report;
use block::env::{Clock, SystemClock};
use block::{ConditionKind, Conditions};
use bytes::Bytes;
use file::CacheFile;
use format::ALIGN;
use index::Index;
use parking_lot::Mutex;
use rejected::Rejected;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Read mode of the cache file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheIo {
    /// Through the kernel's page cache, which keeps the hottest frames in otherwise idle memory.
    #[default]
    Buffered,
    /// Past the page cache (`O_DIRECT`), if the file system supports it.
    Direct,
}

/// Location and limits of the NVMe cache.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// Directory of the cache; created with mode 0700 if missing.
    pub dir: PathBuf,
    /// Maximum size on disk, in bytes.
    pub bytes: u64,
    /// Memory for the index, in bytes: 20 per frame. It bounds the number of cached frames.
    pub index_bytes: u64,
    /// Memory for frames that wait to be written, in bytes; frames beyond that are not cached.
    pub pending_bytes_max: u64,
    /// Buffered or direct reads.
    pub io: CacheIo,
    /// Registry in which the cache raises lasting conditions; their subject is its directory.
    pub conditions: Conditions,
    /// Time for pauses and for the end of conditions.
    pub clock: Arc<dyn Clock>,
}

impl CacheOptions {
    /// Options for a cache of `bytes` in `dir`; the other values are those that measured best.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>, bytes: u64) -> Self {
        CacheOptions {
            dir: dir.into(),
            bytes,
            index_bytes: 64 << 20,
            pending_bytes_max: 96 << 20,
            io: CacheIo::default(),
            conditions: Conditions::default(),
            clock: Arc::new(SystemClock),
        }
    }
}

/// Largest region, in bytes. Chosen by hand: evicting one costs a thousandth of a 32 GiB cache.
const REGION_BYTES_MAX: u64 = 32 << 20;
/// Smallest region, in bytes: it must hold a pack of one frame with room to spare.
const REGION_BYTES_MIN: u64 = 512 << 10;
/// Minimum number of regions, even in a small cache. Chosen by hand.
const REGION_COUNT_MIN: u64 = 8;
/// Inserts that may wait. Chosen by hand; [`CacheOptions::pending_bytes_max`] bounds their bytes.
const QUEUE_COUNT_MAX: usize = 4096;
/// Number of failed reads that turns the cache off. Chosen by hand.
const READ_ERROR_COUNT_MAX: u64 = 16;
/// Time without further frames that fail to verify after which their condition ends. Chosen by
/// hand: a failing disk shows it again.
const BAD_LASTS: Duration = Duration::from_secs(3600);

/// Counters since the start, and gauges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheStatus {
    /// The cache is in use. Once false, it stays false until a restart.
    pub is_on: bool,
    /// Frames in the index.
    pub frame_count: u64,
    /// Bytes of regions in use.
    pub used_bytes: u64,
    /// Bytes of memory that wait to be written.
    pub pending_bytes: u64,
    /// Frames written.
    pub insert_count: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Inserts dropped because too much was waiting.
    pub dropped_count: u64,
    /// Regions emptied to be filled again.
    pub evicted_region_count: u64,
    /// Frames moved on because they had been read.
    pub reinserted_count: u64,
    /// Frames whose cached copy did not verify; each was read from the store again.
    pub bad_count: u64,
    /// Failed reads and writes.
    pub error_count: u64,
    /// Bytes of the configured size for which the disk has not given space yet.
    pub unreserved_bytes: u64,
}

#[derive(Debug, Default)]
struct Counters {
    unreserved_bytes: AtomicU64,
    insert_count: AtomicU64,
    written_bytes: AtomicU64,
    dropped_count: AtomicU64,
    evicted_region_count: AtomicU64,
    reinserted_count: AtomicU64,
    bad_count: AtomicU64,
    error_count: AtomicU64,
    read_error_count: AtomicU64,
}

/// Frames that wait to be written, and are read from here until then.
#[derive(Default)]
struct Pending {
    frames: Mutex<HashMap<u64, Bytes>>,
    segments: Mutex<HashMap<SegmentId, Bytes>>,
    bytes: AtomicU64,
}

/// State that the readers and the writer share.
struct Shared {
    file: CacheFile,
    index: Index,
    region_bytes: u64,
    /// Lap of each region; 0 while it is empty or being emptied.
    sequences: Vec<AtomicU64>,
    pending: Pending,
    pending_bytes_max: u64,
    is_on: AtomicBool,
    counters: Counters,
    /// Frames of wraps before this one come from a run that did not close the cache, and may be
    /// missing. Set once the file has been scanned.
    proven_from: AtomicU32,
    rejected: Rejected,
    dir: PathBuf,
    conditions: Conditions,
    clock: Arc<dyn Clock>,
    /// When a cached frame last failed to verify.
    bad_at: Mutex<Option<Instant>>,
}

/// A message to the writer.
enum Work {
    Frame { key: u64, sealed: Bytes },
    Segment { id: SegmentId, object: Bytes },
    Flush(tokio::sync::oneshot::Sender<()>),
    Stop,
}

/// The read cache: see the module. If it is dropped without [`FrameCache::close`], its thread
/// writes the waiting frames and ends.
pub struct FrameCache {
    shared: Arc<Shared>,
    queue: mpsc::SyncSender<Work>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Position of a frame in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Byte offset in the file.
    pub at: u64,
    sequence: u64,
}

impl Place {
    /// Whether both lie in the same wrap of the same region.
    #[must_use]
    pub fn is_same_lap(&self, other: &Place) -> bool {
        self.sequence == other.sequence
    }
}

/// Location of a frame that was found.
pub enum Found {
    /// In memory, waiting to be written. The caller should read it at once, because a frame of a
    /// whole object keeps the entire object in memory.
    Memory(Bytes),
    /// In the file.
    Disk(Place),
}

impl FrameCache {
    /// Opens the cache and starts its thread, which finds the frames of the last run in the
    /// background. Blocks briefly.
    ///
    /// # Errors
    /// File system errors, or `InvalidInput` if the budget is below 4 MiB. The caller continues
    /// without the cache.
    pub fn open(options: &CacheOptions, pool: [u8; 16]) -> io::Result<Self> {
        Self::open_seeded(options, pool, seeded_bugs())
    }

    fn open_seeded(
        options: &CacheOptions,
        pool: [u8; 16],
        seeded_bugs: SeededBugs,
    ) -> io::Result<Self> {
        let region_bytes =
            (options.bytes / REGION_COUNT_MIN / ALIGN as u64 * ALIGN as u64).min(REGION_BYTES_MAX);
        if region_bytes < REGION_BYTES_MIN {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "less than 4 MiB"));
        }
        let region_count = (options.bytes - ALIGN as u64) / region_bytes;
        let file = CacheFile::open(options, &pool, region_bytes as u32)?;
        file.shrink(ALIGN as u64 + region_count * region_bytes)?;
        let shared = Arc::new(Shared {
            file,
            index: Index::new(options.index_bytes as usize),
            region_bytes,
            sequences: (0..region_count).map(|_| AtomicU64::new(0)).collect(),
            pending: Pending::default(),
            pending_bytes_max: options.pending_bytes_max,
            is_on: AtomicBool::new(true),
            counters: Counters::default(),
            proven_from: AtomicU32::new(0),
            rejected: Rejected::default(),
            dir: options.dir.clone(),
            conditions: options.conditions.clone(),
            clock: options.clock.clone(),
            bad_at: Mutex::default(),
        });
        let (queue, work) = mpsc::sync_channel(QUEUE_COUNT_MAX);
        let writer = writer::Writer::new(shared.clone(), seeded_bugs);
        let thread = std::thread::Builder::new().name("cache-writer".into()).spawn({
            let shared = shared.clone();
            move || {
                let run = std::panic::AssertUnwindSafe(|| writer.run(&work));
                if let Err(payload) = std::panic::catch_unwind(run) {
                    let why = io::Error::other(block::jobs::text_of(&*payload));
                    shared.turn_off("write the cache file", &why);
                }
            }
        })?;
        Ok(FrameCache { shared, queue, thread: Mutex::new(Some(thread)) })
    }

    /// The location of the frame, if it is cached.
    #[must_use]
    pub fn find(&self, id: &SegmentId, at: FrameAt) -> Option<Found> {
        let shared = &*self.shared;
        let key = key_of(id, at.offset);
        if shared.pending.bytes.load(Ordering::Acquire) > 0
            && let Some(sealed) = shared.find_pending(id, key, at)
        {
            return Some(Found::Memory(sealed));
        }
        if !shared.is_on.load(Ordering::Relaxed) {
            return None;
        }
        let at = shared.index.get(key)?;
        let sequence = shared.sequence_at(at);
        (sequence != 0).then_some(Found::Disk(Place { at, sequence }))
    }

    /// Reads without waiting for the disk. Returns `false` if that is not possible.
    pub fn read_now(&self, place: Place, bytes: &mut [u8]) -> bool {
        self.shared.file.read_now(bytes, place.at)
    }

    /// Reads `count` bytes starting at `place`. Blocking. Returns `None` if the disk fails, which
    /// is counted.
    pub fn read<'a>(
        &self,
        place: Place,
        buffer: &'a mut AlignedBuffer,
        count: usize,
    ) -> Option<&'a mut [u8]> {
        match self.shared.file.read(buffer, place.at, count) {
            Ok(bytes) => Some(bytes),
            Err(error) => {
                let count = &self.shared.counters.read_error_count;
                self.shared.counters.error_count.fetch_add(1, Ordering::Relaxed);
                if count.fetch_add(1, Ordering::Relaxed) + 1 >= READ_ERROR_COUNT_MAX {
                    self.shared.turn_off("read the cache file", &error);
                }
                None
            }
        }
    }

    /// Forgets a frame that was read from `place` and did not verify. Counts and reports it, unless
    /// the region was being refilled at the same time.
    pub fn reject(&self, frame: &FrameRef, place: Place, error: &SegmentError) {
        let shared = &self.shared;
        shared.index.remove(key_of(&frame.info.id, frame.at.offset), place.at);
        if shared.sequence_at(place.at) != place.sequence {
            return;
        }
        let count = shared.counters.bad_count.fetch_add(1, Ordering::Relaxed) + 1;
        let is_proven = place.sequence >= u64::from(shared.proven_from.load(Ordering::Relaxed));
        if is_proven {
            shared.note_bad(count);
        }
        let due = shared.rejected.note(is_proven, frame, place.at, error, shared.clock.now());
        if let Some(wait) = due
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let shared = Arc::downgrade(shared);
            runtime.spawn(async move {
                tokio::time::sleep(wait).await;
                if let Some(shared) = shared.upgrade() {
                    shared.rejected.tell(shared.clock.now());
                }
            });
        }
    }

    /// Queues a copy of one frame in its stored form, which the caller has verified. Never waits.
    /// It takes a copy because the frame may be a small part of a response from the store, all of
    /// which would stay in memory while the frame waits.
    pub fn insert(&self, id: &SegmentId, at: FrameAt, sealed: &[u8]) {
        let key = key_of(id, at.offset);
        let shared = &*self.shared;
        if shared.index.contains(key) || !shared.reserve(sealed.len()) {
            return;
        }
        let bytes = sealed.len();
        let sealed = Bytes::copy_from_slice(sealed);
        match shared.pending.frames.lock().entry(key) {
            Entry::Vacant(place) => drop(place.insert(sealed.clone())),
            // It is already waiting.
            Entry::Occupied(_) => return shared.release(bytes),
        }
        if self.queue.try_send(Work::Frame { key, sealed }).is_err() {
            shared.pending.frames.lock().remove(&key);
            shared.release(bytes);
            shared.counters.dropped_count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Queues all frames of a whole object. Never waits.
    pub fn insert_segment(&self, info: &SegmentInfo, object: Bytes) {
        let shared = &*self.shared;
        let bytes = object.len();
        if !shared.reserve(bytes) {
            return;
        }
        if shared.pending.segments.lock().insert(info.id, object.clone()).is_some() {
            shared.release(bytes);
            return;
        }
        if self.queue.try_send(Work::Segment { id: info.id, object }).is_err() {
            shared.pending.segments.lock().remove(&info.id);
            shared.release(bytes);
            shared.counters.dropped_count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Resolves when the frames of the last run are known, and everything inserted before this call
    /// is written or dropped.
    pub async fn flush(&self) {
        let (done, wait) = tokio::sync::oneshot::channel();
        let queue = self.queue.clone();
        let sent = tokio::task::spawn_blocking(move || queue.send(Work::Flush(done)).is_ok()).await;
        if sent.is_ok_and(|is_sent| is_sent) {
            // An error means that the thread has ended, and with it the waiting frames.
            let _ = wait.await;
        }
    }

    /// Writes the waiting frames and ends the thread. Frames can still be found afterwards.
    pub async fn close(&self) {
        let Some(thread) = self.thread.lock().take() else { return };
        self.shared.rejected.tell(self.shared.clock.now());
        let queue = self.queue.clone();
        let joined = tokio::task::spawn_blocking(move || {
            let _ = queue.send(Work::Stop);
            thread.join()
        });
        if !matches!(joined.await, Ok(Ok(()))) {
            tracing::error!("the cache's thread panicked");
        }
    }

    /// Counters and gauges.
    #[must_use]
    pub fn status(&self) -> CacheStatus {
        let shared = &*self.shared;
        let counters = &shared.counters;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let used = shared.sequences.iter().filter(|sequence| load(sequence) != 0).count() as u64;
        CacheStatus {
            is_on: shared.is_on.load(Ordering::Relaxed),
            frame_count: shared.index.entry_count() as u64,
            used_bytes: used * shared.region_bytes,
            pending_bytes: load(&shared.pending.bytes),
            insert_count: load(&counters.insert_count),
            written_bytes: load(&counters.written_bytes),
            dropped_count: load(&counters.dropped_count),
            evicted_region_count: load(&counters.evicted_region_count),
            reinserted_count: load(&counters.reinserted_count),
            bad_count: load(&counters.bad_count),
            error_count: load(&counters.error_count),
            unreserved_bytes: load(&counters.unreserved_bytes),
        }
    }
}

impl std::fmt::Debug for FrameCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FrameCache({:?})", self.status())
    }
}

impl Shared {
    /// Lap of the region that contains byte `at` of the file.
    fn sequence_at(&self, at: u64) -> u64 {
        let region = at.saturating_sub(ALIGN as u64) / self.region_bytes;
        let sequence = usize::try_from(region).ok().and_then(|region| self.sequences.get(region));
        sequence.map_or(0, |sequence| sequence.load(Ordering::Acquire))
    }

    fn find_pending(&self, id: &SegmentId, key: u64, at: FrameAt) -> Option<Bytes> {
        let sealed = self.pending.frames.lock().get(&key).cloned();
        sealed.or_else(|| {
            let segments = self.pending.segments.lock();
            let object = segments.get(id)?;
            let end = at.offset.checked_add(at.sealed_bytes)? as usize;
            (end <= object.len()).then(|| object.slice(at.offset as usize..end))
        })
    }

    /// Reserves room for bytes that wait. Returns `false` if the cache is off or too much waits.
    fn reserve(&self, bytes: usize) -> bool {
        if !self.is_on.load(Ordering::Relaxed) {
            return false;
        }
        let before = self.pending.bytes.fetch_add(bytes as u64, Ordering::AcqRel);
        let fits = before + bytes as u64 <= self.pending_bytes_max;
        if !fits {
            self.release(bytes);
            self.counters.dropped_count.fetch_add(1, Ordering::Relaxed);
        }
        fits
    }

    fn release(&self, bytes: usize) {
        self.pending.bytes.fetch_sub(bytes as u64, Ordering::AcqRel);
    }

    /// Turns the cache off, once.
    fn turn_off(&self, action: &str, error: &io::Error) {
        if self.is_on.swap(false, Ordering::AcqRel) {
            let report = Report::new(
                format!(
                    "the read cache in {} is off until the next start: {action}: {error}",
                    self.dir.display()
                ),
                "reads come from the store and take longer; nothing is lost",
                "check the disk of the cache, then restart spindle",
            );
            self.conditions.raise(ConditionKind::CacheFailing, &self.subject(), report);
        }
    }

    fn note_bad(&self, count: u64) {
        let mut bad_at = self.bad_at.lock();
        *bad_at = Some(self.clock.now());
        if self.is_on.load(Ordering::Acquire) {
            let report = Report::new(
                format!(
                    "the read cache in {} gave {count} frames since the start that do not verify",
                    self.dir.display()
                ),
                "each was read from the store instead; nothing is lost",
                "after a loss of power, nothing; otherwise check the disk of the cache",
            );
            self.conditions.raise(ConditionKind::CacheFailing, &self.subject(), report);
        }
    }

    /// Clears the condition for frames that do not verify once none has been found for
    /// [`BAD_LASTS`].
    fn look_at_bad(&self) {
        let mut bad_at = self.bad_at.lock();
        if bad_at.is_some_and(|at| self.clock.since(at) >= BAD_LASTS) {
            *bad_at = None;
            if self.is_on.load(Ordering::Acquire) {
                self.conditions.clear(ConditionKind::CacheFailing, &self.subject());
            }
        }
    }

    /// Subject of its conditions.
    fn subject(&self) -> String {
        self.dir.display().to_string()
    }
}

/// Raises the condition for a cache that could not be opened: reads go to the store until the next
/// start.
pub(crate) fn report_not_opened(options: &CacheOptions, error: &io::Error) {
    let dir = options.dir.display();
    let report = Report::new(
        format!(
            "could not open the read cache in {dir}, which is off until the next start: {error}"
        ),
        "reads come from the store and take longer; nothing is lost",
        "remove the cause, then restart spindle",
    );
    options.conditions.raise(ConditionKind::CacheFailing, &dir.to_string(), report);
}
