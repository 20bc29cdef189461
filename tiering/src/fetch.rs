//! Reading frames: from memory, then the NVMe cache, then the object store.
//!
//! Invariants:
//! - Every returned frame was verified by checksum, authentication and size, whatever its source.
//!   Only memory holds frames that were verified earlier.
//! - A frame that several readers want is fetched from the store once. The fetch runs in a task of
//!   its own and continues when its readers lose interest.
//! - A bad copy in the NVMe cache is dropped and fetched again. Data from the store that does not
//!   verify is read from the store once more, because the transfer may have been bad. If that does
//!   not verify either, the error is final and names segment, frame and object.
//! - Everything is bounded: memory by budgets, store reads by a count, read-ahead by bytes.
//!
//! This module does not know volumes or maps. Its caller says which frames to read, and whether
//! they are a stream.

pub mod flights;
mod local;
pub mod memory;
mod options;
pub(crate) mod peers;
pub mod store;
pub mod streams;
mod suspects;

#[cfg(test)]
mod tests;

pub use options::{Access, Advice, FramesOptions, FramesStatus};

use crate::cache::FrameCache;
use crate::keys::PoolKeys;
use crate::seeded_bugs::SeededBugs;
use crate::segment::read::{Directory, ObjectReport, check_object, directory_tail_bytes};
use crate::segment::{
    DirectoryEntry, FrameRef, SegmentError, SegmentInfo, StoredSegment, format, open_directory,
    open_frame,
};
use crate::segment_store::SegmentStore;
use block::{Error, ErrorKind, Result, VolumeId};
use bytes::Bytes;
use flights::{Flights, Ticket};
use memory::{FrameKey, Keys, Memory, key_of};
use parking_lot::Mutex;
use std::error::Error as StdError;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use store::StoreReader;
use streams::Streams;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

/// Frames of one segment that lie closer together than this are read from the store in one request,
/// because transferring the gap costs less than a second request. Chosen by hand, from 20 ms per
/// request at 10 MiB/s.
const STORE_GAP_BYTES: u32 = 64 << 10;
/// Longest request to the store. Chosen by hand: longer requests gain nothing, as several run
/// concurrently.
const STORE_RUN_BYTES: u32 = 4 << 20;
/// Runs with more sealed bytes than this are opened on a blocking thread. Chosen by hand: 50 us.
const INLINE_BYTES_MAX: usize = 64 << 10;
/// Maximum number of concurrent store reads for read-ahead. Chosen by hand: leaves most places to
/// readers.
const AHEAD_READ_COUNT_MAX: usize = 16;
/// First guess at the size of a segment's directory and footer, in bytes. Chosen by hand.
const TAIL_BYTES_FIRST: u64 = 64 << 10;

#[derive(Debug, Default)]
struct Counters {
    memory_hit_count: AtomicU64,
    cache_hit_count: AtomicU64,
    store_frame_count: AtomicU64,
    store_bad_count: AtomicU64,
    store_refetch_count: AtomicU64,
    ahead_frame_count: AtomicU64,
    ahead_dropped_count: AtomicU64,
}

struct Inner {
    pool: [u8; 16],
    keys: Keys,
    memory: Memory,
    cache: Option<FrameCache>,
    flights: Arc<Flights>,
    store: StoreReader,
    streams: Mutex<Streams>,
    /// Sealed bytes of read-ahead under way.
    ahead_bytes: AtomicU64,
    ahead_bytes_max: u64,
    ahead_places: Semaphore,
    /// Blocking reads of the cache file under way.
    disk_places: Arc<Semaphore>,
    counters: Counters,
}

/// The reader of frames; every read of a frame passes through it. It is cheap to clone, and any
/// method may be called from any task at any time.
#[derive(Clone)]
pub struct Frames(Arc<Inner>);

impl std::fmt::Debug for Frames {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Frames({:?})", self.status())
    }
}

/// Accounts for the bytes of a read-ahead until it ends, in whatever way.
struct Ahead {
    inner: Arc<Inner>,
    bytes: u64,
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.inner.ahead_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Frames {
    /// Opens the reader of `segments`. Opening the NVMe cache blocks for a short time. A cache that cannot be opened is reported once and not used;
    /// it never fails the caller.
    #[must_use]
    pub fn open(
        segments: Arc<dyn SegmentStore>,
        keys: PoolKeys,
        mut options: FramesOptions,
    ) -> Self {
        let PoolKeys { pool, pool_key, volume_keys } = keys;
        if let Some(cache) = &mut options.cache {
            cache.conditions = options.conditions.clone();
            cache.clock = options.clock.clone();
        }
        let cache = options.cache.as_ref().filter(|cache| cache.bytes > 0).and_then(|cache| {
            let opened = FrameCache::open(cache, pool);
            opened.inspect_err(|error| crate::cache::report_not_opened(cache, error)).ok()
        });
        Frames(Arc::new(Inner {
            pool,
            keys: Keys::new(pool_key, volume_keys),
            memory: Memory::new(options.memory_bytes, options.stream_bytes),
            cache,
            flights: Arc::default(),
            store: StoreReader::new(segments, &options),
            streams: Mutex::new(Streams::new(
                options.window_bytes_max.min(options.stream_bytes / 4),
            )),
            ahead_bytes: AtomicU64::new(0),
            ahead_bytes_max: options.stream_bytes / 2,
            ahead_places: Semaphore::new(AHEAD_READ_COUNT_MAX),
            disk_places: Arc::new(Semaphore::new(local::DISK_READ_COUNT_MAX)),
            counters: Counters::default(),
        }))
    }

    /// Reads the blocks of one frame. Must be called from a tokio runtime.
    ///
    /// # Errors
    /// `Corrupt` when the store's copy does not verify in two reads, or when no frame can be at
    /// this place; `NotFound` when the object is not in the store. Both are final and name segment,
    /// frame and object. `Unreadable` when the object repeatedly cannot be read while others can.
    /// `Unavailable` when the store did not answer for [`FramesOptions::retry_duration_max`].
    pub async fn read(&self, frame: &FrameRef) -> Result<Bytes> {
        let mut frames = self.read_many(std::slice::from_ref(frame), Access::Random).await?;
        Ok(frames.pop().expect("one frame was asked for"))
    }

    /// Reads the blocks of several frames of any segments, and returns them in the requested order.
    /// Adjacent frames are read from disk or store in one request, and all requests run
    /// concurrently.
    ///
    /// # Errors
    /// Those of [`Frames::read`]: the first error.
    pub async fn read_many(&self, frames: &[FrameRef], access: Access) -> Result<Vec<Bytes>> {
        let inner = &self.0;
        if let Some(wrong) = frames.iter().find(|frame| !frame.is_possible()) {
            let what = format!("read {}: no frame can lie at {:?}", wrong.info, wrong.at);
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        let mut found: Vec<Option<Bytes>> =
            frames.iter().map(|frame| inner.memory.get(&key_of(frame))).collect();
        let mut missing: Vec<usize> = (0..frames.len()).filter(|&n| found[n].is_none()).collect();
        let hit_count = (frames.len() - missing.len()) as u64;
        inner.counters.memory_hit_count.fetch_add(hit_count, Ordering::Relaxed);
        if !missing.is_empty() && inner.cache.is_some() {
            missing.retain(|&n| !inner.flights.contains(&key_of(&frames[n])));
            inner.read_local(frames, &missing, &mut found, access, false).await;
            missing.clear();
            missing.extend((0..frames.len()).filter(|&n| found[n].is_none()));
        }
        if !missing.is_empty() {
            inner.read_store(frames, &missing, &mut found, access).await?;
        }
        Ok(found.into_iter().map(|plain| plain.expect("all were found or failed")).collect())
    }

    /// Discards all derived keys, after a key of a volume was destroyed.
    pub fn forget_keys(&self) {
        self.0.keys.clear();
    }

    /// Returns whether a frame is in memory or in the NVMe cache.
    #[must_use]
    pub fn is_local(&self, frame: &FrameRef) -> bool {
        let is_cached = |cache: &FrameCache| cache.find(&frame.info.id, frame.at).is_some();
        self.0.memory.contains(&key_of(frame)) || self.0.cache.as_ref().is_some_and(is_cached)
    }

    /// Registers a read of a volume before it is carried out, and returns advice on how to carry it
    /// out. Streams are detected per volume; offset and length are bytes of the volume.
    #[must_use]
    pub fn on_read(&self, volume: VolumeId, offset: u64, length: u64) -> Advice {
        self.0.streams.lock().on_read(volume, offset, length)
    }

    /// Reads frames into the stream cache in the background. Never waits and never fails; frames
    /// beyond the budget are dropped and counted. Must be called from a tokio runtime. Returns the
    /// fetching task if there is anything to fetch; the task also completes if it is not awaited.
    pub fn read_ahead(&self, frames: &[FrameRef]) -> Option<JoinHandle<()>> {
        let inner = &self.0;
        let mut wanted = Vec::new();
        let mut bytes = 0;
        for frame in frames.iter().filter(|frame| frame.is_possible()) {
            let key = key_of(frame);
            if inner.memory.contains(&key) || inner.flights.contains(&key) {
                continue;
            }
            if !inner.reserve_ahead(u64::from(frame.at.sealed_bytes)) {
                inner.counters.ahead_dropped_count.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            bytes += u64::from(frame.at.sealed_bytes);
            if let (Some(ticket), _) = inner.flights.join(key) {
                wanted.push((frame.clone(), ticket));
            }
        }
        if wanted.is_empty() {
            inner.ahead_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return None;
        }
        let reserved = Ahead { inner: inner.clone(), bytes };
        Some(tokio::spawn(async move {
            let inner = &reserved.inner;
            inner.counters.ahead_frame_count.fetch_add(wanted.len() as u64, Ordering::Relaxed);
            inner.clone().fetch_ahead(wanted).await;
        }))
    }

    /// Inserts the frames of a segment into the NVMe cache in the background, after its upload.
    /// They can be read from memory until they are in the cache. Never waits and never fails.
    /// `object` is the whole object.
    pub fn insert_segment(&self, info: &SegmentInfo, object: Bytes) {
        if let Some(cache) = &self.0.cache {
            cache.insert_segment(info, object);
        }
    }

    /// Reads and opens the directory of a segment from the store, for reclaim and repair.
    ///
    /// # Errors
    /// Those of [`Frames::read`]; also `Corrupt` when the directory belongs to another segment or
    /// another pool.
    pub async fn read_directory(&self, segment: &StoredSegment) -> Result<Vec<DirectoryEntry>> {
        match self.0.read_directory(segment, false).await {
            Err(error) if is_bad(&error) => {
                self.0.note_refetch(&segment.info, None, &error);
                self.0.read_directory(segment, true).await
            }
            read => read,
        }
    }

    /// Reads a whole segment from the store, bypassing every cache, and opens everything in it, for
    /// fsck and scrub. Holds the object in memory meanwhile.
    ///
    /// # Errors
    /// `Corrupt` when the directory does not open or belongs to another segment; `NotFound` and
    /// `Unavailable` like [`Frames::read`]. Damaged frames are part of the report.
    pub async fn check_segment(&self, segment: &StoredSegment) -> Result<ObjectReport> {
        let first = self.0.check_segment(segment, false).await;
        match &first {
            Ok(report) => match report.damaged.first() {
                Some((at, why)) => self.0.note_refetch(&segment.info, Some(at.frame_index), why),
                None => return first,
            },
            Err(error) if is_bad(error) => self.0.note_refetch(&segment.info, None, error),
            Err(_) => return first,
        }
        self.0.check_segment(segment, true).await
    }

    /// Reads the whole object of a segment from the store, bypassing every cache and without
    /// verifying it, for copies.
    ///
    /// # Errors
    /// Those of [`StoreReader::get`].
    pub async fn read_object(&self, segment: &StoredSegment) -> Result<Bytes> {
        self.0.store.get(segment, 0..u64::from(segment.info.object_bytes)).await
    }

    /// Sets the source that tells whether a segment is wanted and which others exist. Without it,
    /// an object that is not found counts as missing, and any other failure is attributed to the
    /// store.
    pub(crate) fn set_peers(&self, peers: Arc<dyn peers::Peers>, seeded_bugs: SeededBugs) {
        self.0.store.set_peers(peers, seeded_bugs);
    }

    /// Returns the reader of the store.
    pub(crate) fn store(&self) -> &StoreReader {
        &self.0.store
    }

    /// Returns counters and gauges.
    #[must_use]
    pub fn status(&self) -> FramesStatus {
        let (inner, counters) = (&self.0, &self.0.counters);
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        FramesStatus {
            memory_hit_count: load(&counters.memory_hit_count),
            cache_hit_count: load(&counters.cache_hit_count),
            store_frame_count: load(&counters.store_frame_count),
            store_request_count: load(&inner.store.request_count),
            store_retry_count: load(&inner.store.retry_count),
            store_failure: inner.store.failure(),
            store_read_bytes: load(&inner.store.read_bytes),
            store_bad_count: load(&counters.store_bad_count),
            store_refetch_count: load(&counters.store_refetch_count),
            ahead_frame_count: load(&counters.ahead_frame_count),
            ahead_dropped_count: load(&counters.ahead_dropped_count),
            memory_used_bytes: inner.memory.used_bytes(),
            flight_count: inner.flights.count() as u64,
            cache: inner.cache.as_ref().map(FrameCache::status),
        }
    }

    /// Waits until the NVMe cache has loaded the frames of the last run and written the frames that
    /// were inserted before the call.
    pub async fn flush_cache(&self) {
        if let Some(cache) = &self.0.cache {
            cache.flush().await;
        }
    }

    /// Writes the pending frames to the NVMe cache and stops its thread. Reads still work
    /// afterwards.
    pub async fn close(&self) {
        if let Some(cache) = &self.0.cache {
            cache.close().await;
        }
    }
}

/// Frames of one segment that one request reads, each with the duty to deliver it.
struct StoreRun {
    segment: StoredSegment,
    range: Range<u32>,
    frames: Vec<(FrameRef, Ticket)>,
}

/// A frame from the store that did not verify.
struct Bad {
    frame: FrameRef,
    ticket: Ticket,
    error: SegmentError,
}

/// Returns whether data was read but does not verify, or cannot be read by this release. A bit that
/// flipped in transfer may look like either.
fn is_bad(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported)
}

impl Inner {
    /// Fetches frames, or waits for the tasks that are fetching them already.
    async fn read_store(
        self: &Arc<Self>,
        frames: &[FrameRef],
        missing: &[usize],
        found: &mut [Option<Bytes>],
        access: Access,
    ) -> Result<()> {
        let mut waits = Vec::with_capacity(missing.len());
        let mut leading = Vec::new();
        for &n in missing {
            let key = key_of(&frames[n]);
            let (ticket, wait) = self.flights.join(key);
            if let Some(ticket) = ticket {
                // The frame may have been delivered after memory was checked.
                if let Some(plain) = self.memory.get(&key) {
                    found[n] = Some(plain);
                    continue;
                }
                leading.push((frames[n].clone(), ticket));
            }
            waits.push((n, wait));
        }
        for run in store_runs(leading) {
            tokio::spawn(self.clone().fetch_run(run, access));
        }
        for (n, wait) in waits {
            found[n] = Some(wait.landed().await?);
        }
        Ok(())
    }

    /// Fetches a run, then fetches its frames that do not verify once more.
    async fn fetch_run(self: Arc<Self>, run: StoreRun, access: Access) {
        let bad = self.clone().fetch_once(run, access, false).await;
        let mut again = Vec::with_capacity(bad.len());
        for Bad { frame, ticket, error } in bad {
            self.note_refetch(&frame.info, Some(frame.at.frame_index), &error);
            again.push((frame, ticket));
        }
        for run in store_runs(again) {
            for Bad { frame, ticket, error } in self.clone().fetch_once(run, access, true).await {
                self.counters.store_bad_count.fetch_add(1, Ordering::Relaxed);
                let what = format!("read {}, frame {}", frame.info, frame.at.frame_index);
                ticket.land(Err(error.into_error(what)));
            }
        }
    }

    /// Performs one request to the store. Delivers the frames that verify, or the error to all of
    /// them if the request fails; returns the frames that do not verify.
    async fn fetch_once(
        self: Arc<Self>,
        run: StoreRun,
        access: Access,
        is_again: bool,
    ) -> Vec<Bad> {
        let range = u64::from(run.range.start)..u64::from(run.range.end);
        let read = match is_again {
            true => self.store.get_again(&run.segment, range).await,
            false => self.store.get(&run.segment, range).await,
        };
        match read {
            Err(error) => {
                for (frame, ticket) in run.frames {
                    ticket.land(Err(error
                        .clone()
                        .context(format!("frame {}", frame.at.frame_index))));
                }
                Vec::new()
            }
            Ok(bytes) if bytes.len() > INLINE_BYTES_MAX => {
                // A failed task has panicked, and its dropped tickets have informed the waiters.
                let opened =
                    tokio::task::spawn_blocking(move || self.open_run(run, &bytes, access)).await;
                opened.unwrap_or_default()
            }
            Ok(bytes) => self.open_run(run, &bytes, access),
        }
    }

    /// Opens the frames in the store's answer, fills the caches, and delivers the frames that
    /// verify.
    fn open_run(&self, run: StoreRun, bytes: &Bytes, access: Access) -> Vec<Bad> {
        let mut bad = Vec::new();
        let mut buffer = Vec::new();
        for (frame, ticket) in run.frames {
            let start = (frame.at.offset - run.range.start) as usize;
            let sealed = &bytes[start..start + frame.at.sealed_bytes as usize];
            buffer.clear();
            buffer.extend_from_slice(sealed);
            self.counters.store_frame_count.fetch_add(1, Ordering::Relaxed);
            match self.open_sealed(&frame, &mut buffer) {
                Ok(plain) => {
                    if let Some(cache) = &self.cache
                        && access != Access::Once
                    {
                        cache.insert(&frame.info.id, frame.at, sealed);
                    }
                    self.remember(ticket.key(), &plain, access);
                    ticket.land(Ok(plain));
                }
                Err(error) => bad.push(Bad { frame, ticket, error }),
            }
        }
        bad
    }

    fn open_sealed(&self, frame: &FrameRef, sealed: &mut [u8]) -> Result<Bytes, SegmentError> {
        open_frame(&*self.keys.of(&frame.info)?, &frame.info.id, frame.at, sealed)
    }

    fn remember(&self, key: FrameKey, plain: &Bytes, access: Access) {
        match access {
            Access::Random => self.memory.insert_main(key, plain.clone()),
            Access::Sequential => self.memory.insert_stream(key, plain.clone()),
            Access::Once => {}
        }
    }

    fn reserve_ahead(&self, bytes: u64) -> bool {
        let before = self.ahead_bytes.fetch_add(bytes, Ordering::Relaxed);
        let fits = before + bytes <= self.ahead_bytes_max;
        if !fits {
            self.ahead_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        fits
    }

    /// Reads frames into the stream cache from the NVMe cache or the store, and delivers them.
    async fn fetch_ahead(self: Arc<Self>, wanted: Vec<(FrameRef, Ticket)>) {
        let frames: Vec<FrameRef> = wanted.iter().map(|(frame, _)| frame.clone()).collect();
        let mut found = vec![None; frames.len()];
        if self.cache.is_some() {
            let all: Vec<usize> = (0..frames.len()).collect();
            self.read_local(&frames, &all, &mut found, Access::Sequential, true).await;
        }
        let mut missing = Vec::new();
        for ((frame, ticket), plain) in wanted.into_iter().zip(found) {
            match plain {
                Some(plain) => ticket.land(Ok(plain)),
                None => missing.push((frame, ticket)),
            }
        }
        let fetches = store_runs(missing).into_iter().map(|run| {
            let inner = self.clone();
            async move {
                let _place = inner.ahead_places.acquire().await.expect("never closed");
                inner.clone().fetch_run(run, Access::Sequential).await;
            }
        });
        futures::future::join_all(fetches).await;
    }

    async fn read_directory(
        &self,
        segment: &StoredSegment,
        is_again: bool,
    ) -> Result<Vec<DirectoryEntry>> {
        let info = &segment.info;
        let get = async |range| match is_again {
            true => self.store.get_again(segment, range).await,
            false => self.store.get(segment, range).await,
        };
        let object_bytes = u64::from(info.object_bytes);
        let what = || format!("open directory of {info}");
        let first = object_bytes.saturating_sub(TAIL_BYTES_FIRST);
        let head = get(0..object_bytes.min(format::HEADER_BYTES as u64));
        let (head, tail) = tokio::join!(head, get(first..object_bytes));
        let (head, mut tail) = (head?, tail?);
        let tail_bytes = directory_tail_bytes(&tail).map_err(|error| error.into_error(what()))?;
        if tail_bytes > tail.len() {
            let start = object_bytes.saturating_sub(tail_bytes as u64);
            tail = get(start..object_bytes).await?;
        }
        let directory = open_directory(self.keys.pool_key(), &head, &tail)
            .map_err(|error| error.into_error(what()))?;
        self.check_identity(info, &directory)?;
        Ok(directory.entries)
    }

    async fn check_segment(&self, segment: &StoredSegment, is_again: bool) -> Result<ObjectReport> {
        let info = &segment.info;
        let whole = 0..u64::from(info.object_bytes);
        let object = match is_again {
            true => self.store.get_again(segment, whole).await?,
            false => self.store.get(segment, whole).await?,
        };
        let (pool_key, volume_keys) =
            (self.keys.pool_key().clone(), self.keys.volume_keys().clone());
        let check = move || check_object(&pool_key, &volume_keys, &object);
        let checked = tokio::task::spawn_blocking(check).await;
        let report = checked
            .map_err(|error| Error::with_source(ErrorKind::Io, format!("check {info}"), error))?
            .map_err(|error| error.into_error(format!("check {info}")))?;
        self.check_identity(info, &report.directory)?;
        Ok(report)
    }

    /// Counts each second read after a failed verification, and logs the 1st, 2nd, 4th, 8th and so
    /// on.
    fn note_refetch(
        &self,
        info: &SegmentInfo,
        frame_index: Option<u32>,
        error: &(dyn StdError + 'static),
    ) {
        let count = self.counters.store_refetch_count.fetch_add(1, Ordering::Relaxed) + 1;
        if !count.is_power_of_two() {
            return;
        }
        tracing::warn!(
            error,
            count,
            object = %info.object_path(),
            frame_index,
            "a frame from the store does not verify; reading it once more"
        );
    }

    fn check_identity(&self, info: &SegmentInfo, directory: &Directory) -> Result<()> {
        if directory.info == *info && directory.pool == self.pool {
            return Ok(());
        }
        let what = format!("open directory of {info}: the object is {}", directory.info);
        Err(Error::new(ErrorKind::Corrupt, what))
    }
}

/// Groups frames into few requests: sorts them and joins frames that are close to each other.
fn store_runs(mut frames: Vec<(FrameRef, Ticket)>) -> Vec<StoreRun> {
    frames.sort_by_key(|(frame, _)| (frame.info.id, frame.at.offset));
    let mut runs: Vec<StoreRun> = Vec::new();
    for (frame, ticket) in frames {
        let start = frame.at.offset;
        let end = start.saturating_add(frame.at.sealed_bytes);
        let joins = |run: &&mut StoreRun| {
            run.segment.info.id == frame.info.id
                && start >= run.range.end
                && start - run.range.end <= STORE_GAP_BYTES
                && end - run.range.start <= STORE_RUN_BYTES
        };
        if let Some(run) = runs.last_mut().filter(joins) {
            run.range.end = end;
            run.frames.push((frame, ticket));
        } else {
            runs.push(StoreRun {
                segment: frame.segment(),
                range: start..end,
                frames: vec![(frame, ticket)],
            });
        }
    }
    runs
}
