//! State that the volumes and the background jobs of a pool share: its log, its tier, the progress
//! of the store, and the reason why it stopped serving.
//!
//! Invariants:
//! - After a final failure, every check and every wait fails with its first reason, and the log
//!   takes nothing more.
//! - Progress, a final failure and closing the pool each wake every waiter for the store.
//! - Each volume has one change lock, shared by all holders.

mod keys;
mod progress;
mod stalled;

pub use self::progress::{DestageProgress, StalledVolume};
use self::stalled::{StalledVolumes, stalled_volumes_at_start};
use crate::conditions;
use crate::ranges::Ranges;
use crate::record::{RECORD_BYTES_MAX, VolumeRecord, VolumeState};
use block::env::Clock;
use block::units::{SECTOR_BYTES, VOLUME_BYTES_MAX};
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use tiering::Tier;
use tokio::sync::{Notify, RwLock, watch};
use wal::{EntryKind, Log, MissingSpillFile, NewEntry, Wait};

/// State shared by the volumes and the destage job.
pub(crate) struct Shared {
    pub(crate) log: Log,
    pub(crate) tier: Tier,
    /// Reason of the final failure, after which nothing is served.
    pub(crate) fatal: OnceLock<Error>,
    /// The pool is closing, so waits for the store fail.
    is_closing: AtomicBool,
    /// Highest LSN that a caller waits for in the store.
    wanted_lsn: AtomicU64,
    pub(crate) wanted: Notify,
    pub(crate) destaged: watch::Sender<Lsn>,
    pub(crate) progress: Mutex<DestageProgress>,
    /// Names of volumes, including those that are gone.
    names: Mutex<HashMap<VolumeId, String>>,
    /// One lock per volume. Changes share it; operations that must not be interleaved with any
    /// change take it exclusively.
    change_locks: Mutex<HashMap<VolumeId, Arc<RwLock<()>>>>,
    /// Sectors of each volume that are being changed.
    ranges: Mutex<HashMap<VolumeId, Arc<Ranges>>>,
    pub(crate) stalled: Mutex<StalledVolumes>,
    /// Some volume is stalled. The list is looked at only then.
    pub(crate) is_any_stalled: AtomicBool,
    pub(crate) is_catch_up_wanted: AtomicBool,
    /// Some volume's dedicated key is gone.
    pub(crate) is_any_keyless: AtomicBool,
    /// Each flush waits for the store, whatever the durability of its volume.
    pub(crate) flushes_to_store: AtomicBool,
    /// Other machines have the log, too, and serve the pool when this one cannot.
    pub(crate) is_replicated: AtomicBool,
    /// Number of rounds begun and ended in which volumes that are stalled were tried again.
    pub(crate) catch_up_begun: AtomicU64,
    pub(crate) catch_up_ended: watch::Sender<u64>,
    /// Step at which a test ends the pool.
    #[cfg(test)]
    pub(crate) ends_at: Mutex<Option<&'static str>>,
    /// Volume whose spill files cannot be written, as on a full disk.
    #[cfg(test)]
    pub(crate) spill_fails_of: Mutex<Option<VolumeId>>,
}

impl Shared {
    /// Creates the state from an opened log and tier. Volumes in `missing` lack a spill file.
    pub(crate) fn new(log: Log, tier: Tier, missing: &[MissingSpillFile]) -> Shared {
        let destaged = watch::Sender::new(tier.destaged_lsn());
        let stalled = stalled_volumes_at_start(&tier, missing);
        Shared {
            change_locks: Mutex::default(),
            names: Mutex::default(),
            ranges: Mutex::default(),
            is_any_stalled: AtomicBool::new(!stalled.volumes.is_empty()),
            stalled: Mutex::new(stalled),
            is_catch_up_wanted: AtomicBool::new(false),
            is_any_keyless: AtomicBool::new(false),
            catch_up_begun: AtomicU64::new(0),
            catch_up_ended: watch::Sender::new(0),
            #[cfg(test)]
            ends_at: Mutex::default(),
            #[cfg(test)]
            spill_fails_of: Mutex::default(),
            log,
            tier,
            fatal: OnceLock::new(),
            is_closing: AtomicBool::new(false),
            flushes_to_store: AtomicBool::new(false),
            is_replicated: AtomicBool::new(false),
            wanted_lsn: AtomicU64::new(0),
            wanted: Notify::new(),
            destaged,
            progress: Mutex::default(),
        }
    }

    /// Returns the clock of the pool's jobs.
    pub(crate) fn clock(&self) -> &Arc<dyn Clock> {
        self.tier.clock()
    }

    /// Makes a volume's record durable in the log.
    pub(crate) async fn log_record(&self, record: &VolumeRecord) -> Result<()> {
        self.append_record(record).await.map(drop)
    }

    /// Like [`Shared::log_record`], and returns the LSN of the record.
    pub(crate) async fn append_record(&self, record: &VolumeRecord) -> Result<Lsn> {
        let lsn = self.append_change(self.record_entry(record)?, Vec::new()).await?;
        self.show_record(record);
        Ok(lsn)
    }

    /// Makes entries durable in the log as one step: a record with the trim that belongs to it, or
    /// a change of snapshots. Returns the LSN of the last one.
    ///
    /// # Errors
    /// `Unavailable`: the client that asked for the change disconnected while the log had no room.
    /// Nothing was changed then.
    pub(crate) async fn append_change(&self, first: NewEntry, rest: Vec<NewEntry>) -> Result<Lsn> {
        self.log.append_unless(first, rest, Wait::Durable, crate::asker::gone()).await
    }

    /// Builds the entry that replaces the record of the volume.
    pub(crate) fn record_entry(&self, record: &VolumeRecord) -> Result<NewEntry> {
        // A record that cannot be read back would keep the pool from opening.
        if record.encode().len() > RECORD_BYTES_MAX {
            let what = format!("change volume {}: its record becomes too long", record.name);
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        Ok(NewEntry {
            volume: VolumeId(record.id),
            kind: EntryKind::VolumeRecord,
            start_sector: 0,
            sector_count: 0,
            payload: record.encode(),
        })
    }

    /// Publishes the newest record of a volume: updates its conditions, and its name from now on.
    pub(crate) fn show_record(&self, record: &VolumeRecord) {
        let (id, conditions) = (VolumeId(record.id), self.tier.conditions());
        let (before, is_another) = {
            let mut names = self.names.lock();
            let before = names.insert(id, record.name.clone());
            let mut others = names.iter().filter(|(other, _)| **other != id);
            (before, others.any(|(_, name)| *name == record.name))
        };
        if let Some(before) = before.filter(|before| *before != record.name) {
            conditions::forget_volume(conditions, &before);
        }
        if record.state != VolumeState::Present && is_another {
            return; // the conditions are those of the other volume
        }
        let has_key = self.tier.volume_keys().has(record.key());
        conditions::show_record(conditions, record, has_key);
    }

    /// Name of the volume as operators know it, or its number if it has none.
    pub(crate) fn name_of(&self, volume: VolumeId) -> String {
        let name = self.names.lock().get(&volume).cloned();
        name.unwrap_or_else(|| format!("number {volume}"))
    }

    /// Change lock of the volume, the same for every holder.
    pub(crate) fn change_lock(&self, volume: VolumeId) -> Arc<RwLock<()>> {
        self.change_locks.lock().entry(volume).or_default().clone()
    }

    /// Sectors of the volume that are being changed, the same for every holder.
    pub(crate) fn ranges(&self, volume: VolumeId) -> Arc<Ranges> {
        self.ranges.lock().entry(volume).or_default().clone()
    }

    /// Lets a test end the pool between any two steps.
    #[cfg(test)]
    pub(crate) fn pass(&self, name: &'static str) -> Result<()> {
        if *self.ends_at.lock() != Some(name) {
            return Ok(());
        }
        let error = Error::new(ErrorKind::Io, format!("ended by the test at {name}"));
        self.fail(error.clone());
        Err(error)
    }

    /// See [`crate::destage`].
    #[cfg(not(test))]
    #[expect(
        clippy::unused_self,
        clippy::unnecessary_wraps,
        reason = "the twin of the tests looks at the pool and fails"
    )]
    pub(crate) fn pass(&self, _name: &'static str) -> Result<()> {
        Ok(())
    }

    /// Lets a test keep spill files from being written.
    #[cfg(test)]
    pub(crate) fn check_spill(&self, volume: VolumeId) -> Result<()> {
        match *self.spill_fails_of.lock() == Some(volume) {
            true => Err(Error::new(ErrorKind::Io, "no space for it")),
            false => Ok(()),
        }
    }

    /// See [`crate::destage`].
    #[cfg(not(test))]
    #[expect(
        clippy::unused_self,
        clippy::unnecessary_wraps,
        reason = "the twin of the tests looks at the pool and fails"
    )]
    pub(crate) fn check_spill(&self, _volume: VolumeId) -> Result<()> {
        Ok(())
    }

    /// Fails once the pool is fenced or its log has failed.
    pub(crate) fn check_serving(&self) -> Result<()> {
        self.fatal.get().cloned().or_else(|| self.log.failure()).map_or(Ok(()), Err)
    }

    /// Resolves when the object store holds everything up to `lsn`.
    pub(crate) async fn wait_destaged(&self, lsn: Lsn) -> Result<()> {
        let mut destaged = self.destaged.subscribe();
        if *destaged.borrow() >= lsn {
            return self.check_serving();
        }
        self.wanted_lsn.fetch_max(lsn.0, Ordering::AcqRel);
        self.wanted.notify_one();
        let reached = destaged.wait_for(|destaged| *destaged >= lsn || self.is_ending()).await;
        self.check_serving()?;
        match reached {
            Ok(destaged) if *destaged >= lsn => Ok(()),
            _ => Err(Error::new(ErrorKind::Unavailable, "wait for destage: the pool is closing")),
        }
    }

    /// Reports whether a caller waits for data that is not in the store yet.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted_lsn.load(Ordering::Acquire) > self.destaged.borrow().0
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.fatal.get().is_some()
    }

    /// Reports whether waits can only fail from now on.
    pub(crate) fn is_ending(&self) -> bool {
        self.is_stopped() || self.is_closing.load(Ordering::Acquire)
    }

    /// Ends every wait for the store, now and later.
    pub(crate) fn begin_closing(&self) {
        self.is_closing.store(true, Ordering::Release);
        self.destaged.send_modify(|_| ());
        self.catch_up_ended.send_modify(|_| ());
    }

    /// Stops acknowledging: another epoch owns the pool, or the log cannot be trusted.
    pub(crate) fn fail(&self, error: Error) {
        conditions::show_stopped(self.tier.conditions(), &error.chain());
        // Set this first, so that no further read starts. A second reason changes nothing.
        let _ = self.fatal.set(error.clone());
        self.log.fail(error);
        // Wakes all waiters: the progress that they wait for will not come.
        self.destaged.send_modify(|_| ());
        self.catch_up_ended.send_modify(|_| ());
    }
}

/// The error for sectors whose data is lost.
pub(crate) fn lost(volume: VolumeId, start_sector: u64, sector_count: u64, lsn: Lsn) -> Error {
    let what = format!(
        "read volume {volume}: {sector_count} sectors from sector {start_sector} are lost: the \
         data that LSN {lsn} wrote there was damaged in the write log before the store had it; \
         write them again"
    );
    Error::new(ErrorKind::Corrupt, what)
}

/// Builds the entry that trims all of a volume.
pub(crate) fn trim_of_all(volume: VolumeId) -> NewEntry {
    NewEntry {
        volume,
        kind: EntryKind::Trim,
        start_sector: 0,
        sector_count: VOLUME_BYTES_MAX / SECTOR_BYTES,
        payload: bytes::Bytes::new(),
    }
}
