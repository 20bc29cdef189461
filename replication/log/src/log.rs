//! The log's interface to the rest of the daemon: append, flush, overlay, generations.
//!
//! Invariants:
//! - The core is stepped by the thread that needs it: the task that appends, a disk thread with a
//!   completion, or the log thread. No step waits for the core's lock: a thread that finds it taken
//!   leaves a mark, which the holder checks after releasing the lock.
//! - The log thread ticks a few times a second and does the work that no task stayed for. It
//!   records a failure of the log's disk.

mod append;
mod noting;
mod pressure;
mod sides;
mod waiting;

pub use self::noting::LogNotes;
use self::noting::Noted;
use self::pressure::Pressure;
pub use self::sides::{ObsoleteSides, SideChange, SidePart};
use self::waiting::Reached;

use crate::disk::file_disk::FileDisk;
use crate::disk::mounted::mounted;
use crate::disk::state_files::StateFiles;
use crate::options::{LogIdentity, LogOptions, Wait, payload_bytes_max};
use crate::overlay::log_resident::LogResident;
use crate::overlay::{Generation, Overlay};
use crate::planted::Planted;
use crate::ring::core::{self, Core, extents_to_freeze};
use crate::ring::layout::FileState;
use crate::ring::opening::OpenArgs;
use crate::ring::queue::closed;
use crate::ring::recovery::{self, Recovery};
use crate::ring::shared::Shared;
use crate::spill::SideReader;
use crate::spill::dir::{self as spill_dir, SidesWanted};
use block::env::{Clock, Disk, DiskReader, SystemClock, SystemRandom};
use block::seal::PoolKey;
use block::{Error, ErrorKind, Lsn, PayloadBuffer, Result, VolumeId};
use bytes::Bytes;
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// Time between two ticks of the log thread. Chosen by hand: it limits the age of unflushed data to
/// a second.
const TICK: Duration = Duration::from_millis(200);
/// Steps of the core that one task takes for others before it leaves the rest to the log thread.
const ROUNDS_MAX: usize = 2;

struct Driver {
    core: Core,
    disk: FileDisk,
}

struct Inner {
    shared: Shared,
    /// `None` after a close.
    driver: Mutex<Option<Driver>>,
    pressure: Arc<Mutex<Pressure>>,
    planted: Planted,
    reader: Arc<dyn DiskReader>,
    key: PoolKey,
    dir: PathBuf,
    identity: LogIdentity,
    options: LogOptions,
    /// Size of the existing ring without the file that is being filled.
    usable_bytes: u64,
    ring_bytes: u64,
    payload_bytes_max: usize,
    is_stopping: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
    thread_handle: std::sync::OnceLock<Thread>,
    noted: Noted,
}

/// The write log of a pool. Clones are handles to the same log.
#[derive(Clone)]
pub struct Log {
    inner: Arc<Inner>,
}

/// Status of the log. Sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogStatus {
    /// Log space from the oldest entry that is not destaged to the head.
    pub used_bytes: u64,
    /// Length of the whole ring.
    pub ring_bytes: u64,
    /// Newest entry queued.
    pub last_lsn: Lsn,
    /// Newest entry that [`Wait::Written`] answers.
    pub acked_lsn: Lsn,
    /// Newest entry on stable storage.
    pub durable_lsn: Lsn,
    /// Newest entry in the data tier.
    pub destaged_lsn: Lsn,
    /// Age of the oldest entry in the ring that is not destaged. For recovered entries it is the
    /// time since the last write, before the open, to the log file that holds them: a lower bound
    /// by the wall clock, because the log's format stores no time.
    pub oldest_undestaged_age: Option<Duration>,
    /// Age of the oldest entry that is in side files alone. After an open it is the time since the
    /// last write to the oldest side file, a lower bound as above.
    pub oldest_side_age: Option<Duration>,
    /// Bytes of data that only the log holds.
    pub undestaged_bytes: u64,
    /// Payloads held in memory.
    pub memory_bytes: u64,
    /// Extents of the ring in the overlay.
    pub extent_count: u64,
    /// Maximum number of extents; appends wait once it is reached.
    pub extent_count_max: u64,
    /// Frozen generations waiting for destage.
    pub frozen_count: u64,
    /// Batches written since the open.
    pub batch_count: u64,
    /// Bytes of those batches.
    pub batch_bytes: u64,
    /// Entries in those batches.
    pub entry_count: u64,
    /// Syncs since the open.
    pub sync_count: u64,
    /// Whether appends wait for space.
    pub is_full: bool,
    /// Whether the log has failed for good.
    pub is_failed: bool,
}

/// The part of the ring that exists on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingSpace {
    /// Bytes of the ring that are still to be created.
    pub missing_bytes: u64,
    /// The reason that the disk gave when it last refused another file.
    pub refusal: Option<String>,
}

impl LogStatus {
    /// Returns the age of the oldest entry that only this machine has, in the ring or in a side
    /// file.
    #[must_use]
    pub fn oldest_age(&self) -> Option<Duration> {
        self.oldest_undestaged_age.max(self.oldest_side_age)
    }
}

impl Log {
    /// Opens the log in `dir`, or creates one. `destaged` is the LSN up to which the data tier
    /// holds everything. Blocks while the log is read back; starts the log's threads. A log that is
    /// refused keeps its contents.
    ///
    /// # Errors
    /// `Invalid`: options that cannot work, or the log of another pool. `Busy`: open elsewhere.
    /// `Fenced`: a higher epoch wrote it. `Corrupt`: damaged below the part known to be on stable
    /// storage, inconsistent with the data tier (entries missing in between, or the tier rolled
    /// back), or lacking files (see [`crate::is_incomplete`]). `Unsupported`: a later program wrote
    /// it. `Io`: the file system failed. `Full`: no room for the opening batch.
    pub fn open(
        dir: &Path,
        identity: LogIdentity,
        key: PoolKey,
        options: LogOptions,
        destaged: Lsn,
    ) -> Result<(Log, Recovery)> {
        Self::open_with_sides(dir, identity, key, options, destaged, &SidesWanted::new())
    }

    /// Like [`Log::open`], with the side files that the data tier's metadata names. Other side
    /// files are removed: their contents are in the data tier or in the ring.
    ///
    /// # Errors
    /// Those of [`Log::open`]. A missing or damaged side file is no error: it is listed in
    /// [`Recovery::missing_sides`].
    pub fn open_with_sides(
        dir: &Path,
        identity: LogIdentity,
        key: PoolKey,
        options: LogOptions,
        destaged: Lsn,
        wanted: &SidesWanted,
    ) -> Result<(Log, Recovery)> {
        Self::open_noted(dir, identity, key, options, destaged, wanted, &LogNotes::default())
    }

    /// Like [`Log::open_with_sides`], with the notes about the log that are kept outside its
    /// directory.
    ///
    /// # Errors
    /// Those of [`Log::open`].
    pub fn open_noted(
        dir: &Path,
        identity: LogIdentity,
        key: PoolKey,
        options: LogOptions,
        destaged: Lsn,
        wanted: &SidesWanted,
        notes: &LogNotes,
    ) -> Result<(Log, Recovery)> {
        let planted = Planted::from_environment();
        Self::open_planted(dir, (identity, key), options, destaged, (wanted, notes), planted)
    }

    fn open_planted(
        dir: &Path,
        (identity, key): (LogIdentity, PoolKey),
        options: LogOptions,
        destaged: Lsn,
        (wanted, notes): (&SidesWanted, &LogNotes),
        planted: Planted,
    ) -> Result<(Log, Recovery)> {
        options.check()?;
        let mut disk = FileDisk::open(dir, options.io_mode)?;
        let reader = SideReader { pool: identity.pool, epoch: identity.epoch, key: &key };
        let mut sides = spill_dir::find(dir, wanted, &reader)?;
        let keeper = StateFiles::new(dir, &notes.beside, &notes.heard);
        let args = OpenArgs {
            identity,
            key: key.clone(),
            options,
            destaged,
            random: &SystemRandom,
            planted,
            // Taken before recovery rewrites the tail of the log.
            written_at: disk.written_at(),
            made_count: disk.made_count(),
            keeper: &keeper,
            mount: mounted(dir),
        };
        let mut opened = recovery::open(&mut disk, &args)?;
        // An earlier program or a crash may have left ready files unrecorded; record them before
        // anything is written there.
        let is_ready = |state: &&FileState| **state == FileState::Ready;
        let ready = opened.files.iter().filter(is_ready).count();
        disk.note_made(u32::try_from(ready).expect("file count"))?;
        sides.clean();
        opened.overlay.set_sides(std::mem::take(&mut sides.sides));
        opened.recovery.missing_sides = std::mem::take(&mut sides.missing);
        let recovery = opened.recovery.clone();
        let (file_bytes, file_count) = (opened.config.file_bytes, opened.config.file_count);
        if (file_bytes, file_bytes * u64::from(file_count))
            != (options.file_bytes, options.ring_bytes)
        {
            tracing::warn!(
                ring_bytes = file_bytes * u64::from(file_count),
                file_bytes,
                asked_ring_bytes = options.ring_bytes,
                asked_file_bytes = options.file_bytes,
                "the write log keeps the size that it was made with"
            );
        }
        let shared = Shared::new(
            opened.overlay,
            recovery.last_lsn,
            destaged,
            options.queue_bytes_max,
            opened.head.position,
        );
        shared.set_destaged(destaged, opened.released_position);
        shared
            .counters
            .made_count
            .store(u32::try_from(ready).expect("file count"), Ordering::Relaxed);
        let is_settled = recovery.is_tail_proven;
        let random = Arc::new(SystemRandom);
        let (head, live, files) = (opened.head, opened.live, opened.files);
        let mut core = Core::new(opened.config, random, head, live, files, is_settled);
        core.prepare_files(&mut disk);
        let ring_bytes = file_bytes * u64::from(file_count);
        let inner = Arc::new(Inner {
            shared,
            reader: disk.reader(),
            driver: Mutex::new(Some(Driver { core, disk })),
            pressure: Pressure::new(&options),
            planted,
            key,
            dir: dir.to_owned(),
            identity,
            options,
            usable_bytes: ring_bytes - file_bytes,
            ring_bytes,
            payload_bytes_max: payload_bytes_max(file_bytes),
            is_stopping: AtomicBool::new(false),
            thread: Mutex::new(None),
            thread_handle: std::sync::OnceLock::new(),
            noted: Noted::new(keeper, opened.state),
        });
        start_thread(&inner)?;
        Ok((Log { inner }, recovery))
    }

    /// Resolves once everything answered before the call is on stable storage, with the LSN up to
    /// which the log is durable. Concurrent flushes share one sync.
    ///
    /// # Errors
    /// `Io`: the log has failed; entries not yet on stable storage may be lost.
    pub fn flush(&self) -> impl Future<Output = Result<Lsn>> + Send + use<> {
        let inner = Arc::clone(&self.inner);
        let target = inner.shared.begin_flush();
        async move {
            inner.shared.check()?;
            if !inner.shared.is_reached(target, Wait::Durable) {
                inner.sync_to(target).await?;
            }
            Ok(inner.shared.durable())
        }
    }

    /// Resolves once everything up to `lsn`, an entry that was answered or is in a frozen
    /// generation, is on stable storage.
    ///
    /// # Errors
    /// `Io`: the log failed before it reached `lsn`.
    pub async fn make_durable(&self, lsn: Lsn) -> Result<()> {
        if self.inner.shared.is_reached(lsn, Wait::Durable) {
            return Ok(());
        }
        self.inner.sync_to(lsn).await
    }

    /// Resolves once all entries that were in a batch at the call are visible. An entry whose
    /// append was dropped earlier is then either visible or taken back. Does not wait for log
    /// space.
    ///
    /// # Errors
    /// `Io`: the log has failed. `Unavailable`: it was closed.
    pub fn settle(&self) -> impl Future<Output = Result<()>> + Send + use<> {
        let inner = Arc::clone(&self.inner);
        let lsn = inner.shared.taken();
        async move {
            inner.drive();
            let inner = &*inner;
            Reached { inner, lsn, wait: Wait::Written, is_entry: false, id: None }.await
        }
    }

    /// Sets the volumes that have a living snapshot at `lsn`; the list may be empty. Side files of
    /// these volumes do not join data from before `lsn` with data from after it. Until this is
    /// called, an entry about snapshots counts for all volumes.
    pub fn set_snapshots(&self, lsn: Lsn, volumes: Vec<VolumeId>) {
        self.inner.shared.overlay.set_snapshots(lsn, volumes);
    }

    /// Returns the overlay: the data that is not yet in the data tier.
    #[must_use]
    pub fn overlay(&self) -> &Overlay {
        &self.inner.shared.overlay
    }

    /// Reads a payload that is only in a log file; verifies and decrypts it. `None` if it has been
    /// destaged and released meanwhile: look the range up again.
    ///
    /// # Errors
    /// `Corrupt`, naming file and offset, if it does not verify; `Io` if it cannot be read.
    pub async fn read(&self, resident: &LogResident) -> Result<Option<Bytes>> {
        let inner = Arc::clone(&self.inner);
        let resident = resident.clone();
        let lsn = resident.lsn();
        let read = tokio::task::spawn_blocking(move || {
            if lsn <= inner.shared.destaged() {
                return Ok(None);
            }
            match resident.read(&*inner.reader, &inner.key) {
                Ok(bytes) => Ok(Some(bytes)),
                // The entry was released during the read, and perhaps overwritten.
                Err(_) if lsn <= inner.shared.destaged() => Ok(None),
                Err(error) => Err(error),
            }
        });
        read.await.map_err(|e| Error::with_source(ErrorKind::Io, "read from the write log", e))?
    }

    /// Freezes everything visible at this moment into a generation of its own, unless nothing was
    /// added since the last freeze. The log also freezes unasked when a generation is large or the
    /// log is full.
    pub fn freeze(&self) -> Option<Arc<Generation>> {
        core::freeze(&self.inner.shared)
    }

    /// Returns the oldest frozen generation, the next one to destage.
    #[must_use]
    pub fn next_frozen(&self) -> Option<Arc<Generation>> {
        self.inner.shared.overlay.next_frozen()
    }

    /// Releases `generation`, the oldest frozen one, once all of it is in the data tier and the
    /// data tier's metadata durably says so. It leaves the overlay, and its log space is reused.
    /// Panics if it is not the oldest.
    pub fn release(&self, generation: &Arc<Generation>) {
        let obsolete = self.release_with(generation, Vec::new());
        assert!(obsolete.0.is_empty(), "side files change only by a change");
    }

    /// Like [`Log::release`], once the data tier's metadata also durably names the side files of
    /// `changes`, which replace the generation's data of their volumes. Returns the files that
    /// nothing names any more, for [`Log::remove_sides`].
    pub fn release_with(
        &self,
        generation: &Arc<Generation>,
        changes: Vec<SideChange>,
    ) -> ObsoleteSides {
        let inner = &self.inner;
        let (changes, obsolete) = self.take_changes(changes);
        inner.shared.overlay.release(generation, changes);
        inner.shared.set_destaged(generation.last_lsn(), generation.end_position);
        {
            let options = &inner.options;
            let bytes = generation.log_bytes as f64 / options.generation_bytes_max as f64;
            let extents = generation.extent_count() as f64 / extents_to_freeze(options) as f64;
            let is_idle = inner.shared.overlay.next_frozen().is_none();
            let fill = inner.fill();
            let mut pressure = inner.pressure.lock();
            let now_ns = SystemClock.now_ns();
            pressure.pace.on_release(now_ns, generation.log_bytes, bytes.max(extents));
            pressure.pace.on_fill(fill);
            if is_idle {
                pressure.pace.on_idle();
            }
        }
        inner.shared.tell_changed();
        inner.drive();
        obsolete
    }

    /// Tells the pace that the caller waits before it destages the next frozen generation: the time
    /// until the next release then says nothing about the speed of destage.
    pub fn rest(&self) {
        self.inner.pressure.lock().pace.on_rest(SystemClock.now_ns());
    }

    /// Makes writes of `volume` fail with `error` from this call on, including those that wait for
    /// log space: they leave the queue, and the writes behind them move up. Entries without payload
    /// are still taken. `None` allows writes again.
    pub fn refuse(&self, volume: VolumeId, error: Option<Error>) {
        self.inner.shared.refuse(volume, error);
        self.inner.drive();
    }

    /// Returns the status of the log.
    #[must_use]
    pub fn status(&self) -> LogStatus {
        self.inner.status()
    }

    /// Returns how much of the ring exists on disk.
    #[must_use]
    pub fn ring_space(&self) -> RingSpace {
        let counters = &self.inner.shared.counters;
        let made_bytes =
            u64::from(counters.made_count.load(Ordering::Relaxed)) * self.inner.file_bytes();
        RingSpace {
            missing_bytes: self.inner.ring_bytes.saturating_sub(made_bytes),
            refusal: counters.refusal.lock().clone(),
        }
    }

    /// Returns a receiver of a number that changes when a generation is frozen or released and when
    /// the log becomes full, fails or closes. Look at the state after each change: changes may be
    /// merged.
    #[must_use]
    pub fn changes(&self) -> tokio::sync::watch::Receiver<u64> {
        self.inner.shared.changed.subscribe()
    }

    /// Confirms that the loss of acknowledged entries has been recorded durably wherever it must be
    /// known (see [`Recovery::is_tail_proven`]). Until then every open reports it again.
    pub fn settle_tail(&self) {
        if let Some(driver) = &mut *self.inner.driver.lock() {
            driver.core.settle();
        }
        self.inner.drive(); // for a caller that found the lock taken
    }

    /// Stops the log for good, for a reason that only the caller knows (the pool belongs to another
    /// epoch): every waiter and every later call gets `error`. Acknowledged entries stay.
    pub fn fail(&self, error: Error) {
        self.inner.shared.fail(error);
    }

    /// Largest payload of one entry, in bytes.
    #[must_use]
    pub fn payload_bytes_max(&self) -> usize {
        self.inner.payload_bytes_max
    }

    /// Returns an empty buffer for a payload of `length` bytes: see
    /// [`block::BlockDevice::payload`]. Memory kept for these buffers counts as memory of payloads.
    #[must_use]
    pub fn payload(&self, length: usize) -> PayloadBuffer {
        self.inner.shared.overlay.payloads().take(length)
    }

    /// Gives payload memory that was unused since the last call back to the allocator. Call it
    /// every few seconds, at an interval longer than destage takes for the writes of a busy volume,
    /// from a thread that nothing waits for: there may be many buffers.
    pub fn trim_payloads(&self) {
        self.inner.shared.overlay.payloads().trim();
    }

    /// Closes the log in an orderly way: writes the queue, syncs everything, writes a clean mark
    /// and ends the threads. Blocks. Later calls on other handles get `Unavailable`; so do entries
    /// that found no room in a full log, which are not acknowledged.
    ///
    /// # Errors
    /// `Io` if the log has failed, now or earlier.
    pub fn close(self) -> Result<()> {
        self.inner.close()
    }
}

impl Inner {
    /// Returns the reason why nothing is queued any more.
    fn gone(&self) -> Error {
        self.shared.check().err().unwrap_or_else(closed)
    }

    /// Waits until everything up to `lsn` is on stable storage.
    async fn sync_to(&self, lsn: Lsn) -> Result<()> {
        self.shared.want_sync(lsn);
        self.drive();
        Reached { inner: self, lsn, wait: Wait::Durable, is_entry: false, id: None }.await
    }

    /// Steps the core, or makes sure that the thread stepping it takes another step. Never waits
    /// for a device: a caller from the slow lane would keep all others waiting.
    fn drive(&self) {
        self.drive_patiently(0);
    }

    /// Like [`Inner::drive`], but waits for at most `patience` direct writes to a quick device.
    /// Appends pass one, which is usually their own write.
    fn drive_patiently(&self, mut patience: u32) {
        for _ in 0..ROUNDS_MAX {
            // Orders the caller's mark before the look at the lock; pairs with the fence below.
            fence(Ordering::SeqCst);
            let Some(mut driver) = self.driver.try_lock() else { return };
            let Some(Driver { core, disk }) = &mut *driver else { return };
            self.shared.is_dirty.store(false, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            let guard = FailOnPanic(&self.shared);
            disk.wait_for(patience);
            core.step(disk, &self.shared);
            patience = disk.wait_for(0);
            drop(guard);
            drop(driver);
            if self.shared.disk_failed_at().is_some() {
                return self.nudge(); // the log thread records it
            }
            // Orders the release of the lock before the look at the mark.
            fence(Ordering::SeqCst);
            if !self.shared.is_dirty.load(Ordering::Relaxed) {
                return;
            }
        }
        self.nudge();
    }

    /// Leaves the rest to the log thread.
    fn nudge(&self) {
        if let Some(thread) = self.thread_handle.get() {
            thread.unpark();
        }
    }

    fn tick(&self) {
        if let Some(Driver { core, disk }) = &mut *self.driver.lock() {
            let _guard = FailOnPanic(&self.shared);
            core.tick(disk, &self.shared);
        }
        self.drive();
    }

    fn file_bytes(&self) -> u64 {
        self.ring_bytes - self.usable_bytes
    }

    /// Part of the log in use; the overlay's extents count like space.
    fn fill(&self) -> f64 {
        let log = self.shared.used_bytes() as f64 / self.usable_bytes as f64;
        let extents =
            self.shared.overlay.extent_count() as f64 / self.options.entry_count_max as f64;
        log.max(extents)
    }

    fn status(&self) -> LogStatus {
        let overlay = self.shared.overlay.status();
        let counters = &self.shared.counters;
        let now = Instant::now();
        LogStatus {
            used_bytes: self.shared.used_bytes(),
            ring_bytes: self.ring_bytes,
            last_lsn: self.shared.last_lsn(),
            acked_lsn: self.shared.acked(),
            durable_lsn: self.shared.durable(),
            destaged_lsn: self.shared.destaged(),
            oldest_undestaged_age: overlay.since.map(|since| now.duration_since(since)),
            oldest_side_age: overlay.side_since.map(|since| now.duration_since(since)),
            undestaged_bytes: overlay.undestaged_bytes,
            memory_bytes: overlay.memory_bytes,
            extent_count: overlay.extent_count,
            extent_count_max: self.options.entry_count_max,
            frozen_count: overlay.frozen_count,
            batch_count: counters.batch_count.load(Ordering::Relaxed),
            batch_bytes: counters.batch_bytes.load(Ordering::Relaxed),
            entry_count: counters.entry_count.load(Ordering::Relaxed),
            sync_count: counters.sync_count.load(Ordering::Relaxed),
            is_full: counters.is_full.load(Ordering::Relaxed),
            is_failed: self.shared.is_failed(),
        }
    }

    fn close(&self) -> Result<()> {
        {
            let mut queue = self.shared.queue.lock();
            queue.is_closed = true;
            queue.give_back(0); // tells the tasks that wait for room
        }
        let driver = {
            let mut slot = self.driver.lock();
            let Some(Driver { core, disk }) = &mut *slot else { return Err(closed()) };
            let _guard = FailOnPanic(&self.shared);
            core.close();
            while !self.shared.is_failed() {
                core.step(disk, &self.shared);
                if core.is_closed() {
                    break;
                }
                disk.wait();
            }
            slot.take()
        };
        drop(driver); // joins the disk's threads, which may be waiting for the lock
        self.wait_noted();
        let outcome = self.shared.check();
        self.shared.finish(closed());
        self.stop_thread();
        outcome
    }

    fn stop_thread(&self) {
        self.is_stopping.store(true, Ordering::Release);
        self.nudge();
        let thread = self.thread.lock().take();
        let Some(thread) = thread else { return };
        let is_own = thread.thread().id() == std::thread::current().id();
        // A thread that is recording a failure may be waiting for the disk that has failed.
        if !is_own && self.is_noted() && thread.join().is_err() {
            tracing::error!("the log thread has panicked");
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.stop_thread();
    }
}

fn start_thread(inner: &Arc<Inner>) -> Result<()> {
    let weak = Arc::downgrade(inner);
    if let Some(Driver { disk, .. }) = &*inner.driver.lock() {
        let weak = Weak::clone(&weak);
        disk.set_notify(Arc::new(move || {
            if let Some(inner) = weak.upgrade() {
                inner.shared.is_dirty.store(true, Ordering::Release);
                inner.drive();
            }
        }));
    }
    let thread = std::thread::Builder::new()
        .name("spindle-log".into())
        .spawn(move || {
            loop {
                let started = Instant::now();
                std::thread::park_timeout(TICK);
                let Some(inner) = weak.upgrade() else { return };
                inner.note_failure();
                if inner.is_stopping.load(Ordering::Acquire) {
                    return;
                }
                if started.elapsed() >= TICK { inner.tick() } else { inner.drive() }
            }
        })
        .map_err(|e| Error::with_source(ErrorKind::Io, "start the log thread", e))?;
    let _ = inner.thread_handle.set(thread.thread().clone());
    *inner.thread.lock() = Some(thread);
    inner.drive();
    Ok(())
}

/// Fails the log when a step panics: the core is then in an unknown state, and nothing more may be
/// answered.
struct FailOnPanic<'a>(&'a Shared);

impl Drop for FailOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let what = "step the write log: a check of its own state failed";
            self.0.fail(Error::new(ErrorKind::Io, what));
        }
    }
}

#[cfg(test)]
mod tests;
