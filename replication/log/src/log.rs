//! The log's interface to the rest of the daemon: append, flush, overlay, generations.
//!
//! Invariants:
//! - The core is stepped by the thread that needs it: the task that appends, a disk thread with a
//!   completion, or the log thread ([`crate::ring::drive`]).
//! - After a failure nothing is answered as done.

mod append;
mod members;
mod noting;
pub(crate) mod opening;
mod spilling;
mod status;
mod thread;
mod waiting;

use self::members::{QUORUM_WAIT, without_quorum};
pub use self::noting::LogNotes;
use self::noting::Noted;
pub use self::opening::LogSources;
pub use self::spilling::{ObsoleteSpillFiles, SpillChange, SpillPart};
pub use self::status::{LogStatus, RingSpace};
use self::thread::{FailOnPanic, LogThread};
use self::waiting::Reached;

use crate::disk::LogDisk;
use crate::options::{LogIdentity, LogOptions, Wait};
use crate::overlay::log_resident::LogResident;
use crate::overlay::{Generation, Overlay};
use crate::replicas::Replicas;
use crate::ring::batch_places::ChainId;
use crate::ring::core::{self, Core, extents_to_freeze};
use crate::ring::drive::{Left, StepLock, Stepped};
use crate::ring::queue::closed;
use crate::ring::shared_ring::{SharedRing, Target};
use crate::seeded_bugs::SeededBugs;
use crate::throttle::gate::{Release, ThrottleGate};
use block::env::{Clock, DiskReader, Random};
use block::seal::PoolKey;
use block::{Error, ErrorKind, Lsn, PayloadBuffer, Result, VolumeId};
use bytes::Bytes;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

/// The core with the disk that it works on.
struct DrivenCore {
    core: Core,
    disk: Box<dyn LogDisk>,
}

/// The parts of an open log that its handles share.
struct LogInner {
    shared: SharedRing,
    driven: StepLock<DrivenCore>,
    gate: ThrottleGate,
    seeded_bugs: SeededBugs,
    reader: Arc<dyn DiskReader>,
    clock: Arc<dyn Clock>,
    random: Arc<dyn Random>,
    key: PoolKey,
    dir: PathBuf,
    identity: LogIdentity,
    options: LogOptions,
    /// Size of the existing ring without the file that is being filled.
    usable_bytes: u64,
    file_bytes: u64,
    ring_bytes: u64,
    payload_bytes_max: usize,
    replicas: Option<Arc<dyn Replicas>>,
    chain: ChainId,
    /// Notified when the members have answered.
    lease: tokio::sync::Notify,
    thread: LogThread,
    noted: Noted,
}

/// The write log of a pool. Clones are handles to the same log.
#[derive(Clone)]
pub struct Log {
    inner: Arc<LogInner>,
}

/// A handle that does not keep the log open.
#[derive(Clone)]
pub struct WeakLog {
    inner: Weak<LogInner>,
}

impl WeakLog {
    /// Returns the log, if it is still open.
    #[must_use]
    pub fn upgrade(&self) -> Option<Log> {
        self.inner.upgrade().map(|inner| Log { inner })
    }
}

impl Log {
    /// Returns a handle that does not keep the log open.
    #[must_use]
    pub fn downgrade(&self) -> WeakLog {
        WeakLog { inner: Arc::downgrade(&self.inner) }
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
            let target = Target { lsn, wait: Wait::Written, is_entry: false };
            Reached { inner, target, id: None }.await
        }
    }

    /// Sets the volumes that have a living snapshot at `lsn`; the list may be empty. Spill files of
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
        let read = move || {
            if lsn <= inner.shared.destaged() {
                return Ok(None);
            }
            match resident.read(&*inner.reader, &inner.key) {
                Ok(bytes) => Ok(Some(bytes)),
                // The entry was released during the read, and perhaps overwritten.
                Err(_) if lsn <= inner.shared.destaged() => Ok(None),
                Err(error) => Err(error),
            }
        };
        if block::simulated::simulated().is_some() {
            return read();
        }
        let read = tokio::task::spawn_blocking(read);
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
        assert!(obsolete.0.is_empty(), "spill files change only by a change");
    }

    /// Like [`Log::release`], once the data tier's metadata also durably names the spill files of
    /// `changes`, which replace the generation's data of their volumes. Returns the files that
    /// nothing names any more, for [`Log::remove_spill_files`].
    pub fn release_with(
        &self,
        generation: &Arc<Generation>,
        changes: Vec<SpillChange>,
    ) -> ObsoleteSpillFiles {
        let inner = &self.inner;
        let (changes, obsolete) = self.take_changes(changes);
        inner.shared.overlay.release(generation, changes);
        inner.shared.set_destaged(generation.last_lsn(), generation.end_position);
        {
            let options = &inner.options;
            let bytes = generation.log_bytes as f64 / options.generation_bytes_max as f64;
            let extents = generation.extent_count() as f64 / extents_to_freeze(options) as f64;
            inner.gate.on_release(Release {
                bytes: generation.log_bytes,
                share: bytes.max(extents),
                fill: inner.fill(),
                is_last: inner.shared.overlay.next_frozen().is_none(),
            });
        }
        inner.shared.notify_changed();
        inner.drive();
        obsolete
    }

    /// Notes that the caller waits before it destages the next frozen generation: the time
    /// until the next release then says nothing about the speed of destage.
    pub fn note_destage_pause(&self) {
        self.inner.gate.on_pause();
    }

    /// Makes writes of `volume` fail with `error` from this call on, including those that wait for
    /// log space: they leave the queue, and the writes behind them move up. Entries without payload
    /// are still taken. `None` allows writes again.
    pub fn refuse(&self, volume: VolumeId, error: Option<Error>) {
        self.inner.shared.refuse(volume, error);
        self.inner.drive();
    }

    /// Returns a receiver of a number that changes when a generation is frozen or released and when
    /// the log becomes full, fails or closes. Look at the state after each change: changes may be
    /// merged.
    #[must_use]
    pub fn changes(&self) -> tokio::sync::watch::Receiver<u64> {
        self.inner.shared.changed.subscribe()
    }

    /// Confirms that the loss of acknowledged entries has been recorded durably wherever it must be
    /// known (see [`Recovery::is_tail_proven`](crate::Recovery::is_tail_proven)). Until then every open reports it again.
    pub fn settle_tail(&self) {
        if let Some(driven) = &mut *self.inner.driven.lock() {
            driven.core.settle();
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

impl LogInner {
    /// Returns the reason why nothing is queued any more.
    fn gone(&self) -> Error {
        self.shared.check().err().unwrap_or_else(closed)
    }

    /// Waits until everything up to `lsn` is on stable storage.
    async fn sync_to(&self, lsn: Lsn) -> Result<()> {
        self.shared.want_sync(lsn);
        self.drive();
        let target = Target { lsn, wait: Wait::Durable, is_entry: false };
        Reached { inner: self, target, id: None }.await
    }

    /// Steps the core, or makes sure that the thread stepping it takes another step. Never waits
    /// for a device: a caller from the background runtime would keep all others waiting.
    fn drive(&self) {
        self.drive_patiently(0);
    }

    /// Like [`LogInner::drive`], but waits for at most `patience` direct writes to a fast device.
    /// Appends pass one, which is usually their own write.
    fn drive_patiently(&self, mut patience: u32) {
        let left = self.driven.step(&self.shared.dirty, |DrivenCore { core, disk }| {
            let guard = FailOnPanic(&self.shared);
            disk.wait_for(patience);
            core.step(&mut **disk, &self.shared);
            patience = disk.wait_for(0);
            drop(guard);
            match self.shared.disk_failed_at() {
                Some(_) => Stepped::LeaveToThread, // which records it
                None => Stepped::Again,
            }
        });
        if left == Left::ToThread {
            self.thread.nudge();
        }
    }

    /// Part of the log in use; the overlay's extents count like space.
    fn fill(&self) -> f64 {
        let log = self.shared.used_bytes() as f64 / self.usable_bytes as f64;
        let extents =
            self.shared.overlay.extent_count() as f64 / self.options.entry_count_max as f64;
        log.max(extents)
    }

    fn close(&self) -> Result<()> {
        {
            let mut queue = self.shared.queue.lock();
            queue.is_closed = true;
            queue.give_back(0); // tells the tasks that wait for room
        }
        let driven = {
            let mut slot = self.driven.lock();
            let Some(DrivenCore { core, disk }) = &mut *slot else { return Err(closed()) };
            let _guard = FailOnPanic(&self.shared);
            core.close();
            let begun = self.clock.now();
            while !self.shared.is_failed() {
                core.step(&mut **disk, &self.shared);
                if core.is_closed() {
                    break;
                }
                disk.wait();
                if core.awaits_members() && self.clock.since(begun) >= QUORUM_WAIT {
                    self.shared.fail(without_quorum());
                }
            }
            slot.take()
        };
        drop(driven); // joins the disk's threads, which may be waiting for the lock
        self.wait_noted();
        let outcome = self.shared.check();
        self.shared.finish(closed());
        self.stop_thread();
        outcome
    }
}

#[cfg(test)]
mod tests;
