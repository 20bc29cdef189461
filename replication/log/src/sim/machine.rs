//! The log's disk of one machine, for simulations of whole nodes in other packages.
//!
//! Invariants:
//! - It outlives the processes that use it. A process that was killed changes nothing any more; its
//!   writes under way reach the page cache in whole, in part or not at all.
//! - Requests that do not complete at once complete after a time of the simulation, in any order.

use super::disk::{Faults, Platter, SimDisk};
use super::{Rng, SimRandom};
use crate::disk::state_files::StateKeeper;
use crate::disk::{LogDisk, Notify};
use crate::log::opening::{LogDevice, LogOpening};
use crate::log::{Log, LogSources};
use crate::options::{LogIdentity, LogOptions};
use crate::ring::follower_log::{FollowerFound, FollowerLog, FollowerOpening};
use crate::ring::recovery::Recovery;
use crate::seeded_bugs::seeded_bugs;
use crate::spill::dir::FoundSpills;
use block::env::{Clock, Disk, DiskCompletion, DiskReader, DiskRequest};
use block::seal::PoolKey;
use block::simulated::simulated;
use block::{Error, ErrorKind, Lsn, Result};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest time of a request that does not complete at once, in microseconds. Chosen by hand: a sync of a
/// slow disk.
const REQUEST_US_MAX: u64 = 4000;

/// The disk of one machine; see the head of the file. Clones are the same disk.
#[derive(Clone)]
pub struct MachineDisk {
    platter: Arc<Mutex<Platter>>,
    rng: Arc<Mutex<Rng>>,
}

/// The disk as one process uses it. Clones are handles of the same process.
#[derive(Clone)]
pub struct ProcessDisk {
    machine: MachineDisk,
    is_killed: Arc<AtomicBool>,
    /// A log is open on it: the lock of the directory.
    is_open: Arc<AtomicBool>,
    is_immediate: bool,
    /// Percent of its writes and syncs that fail.
    faults_percent: Arc<AtomicU64>,
}

impl MachineDisk {
    /// Makes an empty disk, whose faults follow from the seed.
    #[must_use]
    pub fn new(seed: u64) -> MachineDisk {
        MachineDisk { platter: Arc::default(), rng: Arc::new(Mutex::new(Rng::new(seed))) }
    }

    /// Returns the disk for another process. No earlier one runs.
    #[must_use]
    pub fn process(&self) -> ProcessDisk {
        let is_immediate = self.rng.lock().chance(50);
        let (is_killed, is_open, faults_percent) = Default::default();
        ProcessDisk { machine: self.clone(), is_killed, is_open, is_immediate, faults_percent }
    }

    /// Cuts the power: what was not synced survives by chance, sector by sector. No process runs.
    pub fn cut_power(&self) {
        self.platter.lock().cut_power(&mut self.rng.lock());
    }

    /// Unmounts the file system in order, and mounts it again. No process runs.
    pub fn remount(&self) {
        self.platter.lock().remount();
    }

    /// Lets the kernel write some of the pages back.
    pub fn write_back(&self) {
        self.platter.lock().write_back(&mut self.rng.lock(), 0);
    }

    /// Flips a bit of the log. Returns false if there is no log.
    pub fn flip(&self) -> bool {
        let mut platter = self.platter.lock();
        if platter.made_count().is_none() {
            return false;
        }
        let _place = platter.flip(&mut self.rng.lock());
        true
    }

    /// Flips a bit of the newest batch of the log. Returns false if there is none.
    pub fn flip_newest(&self) -> bool {
        self.platter.lock().flip_newest(&mut self.rng.lock())
    }

    /// Replaces the disk by an empty one.
    pub fn wipe(&self) {
        let mut platter = self.platter.lock();
        let mount = platter.mount + 1;
        *platter = Platter::default();
        platter.mount = mount;
    }

    /// Number of the present mount of the file system, which identifies its page cache.
    #[must_use]
    pub fn mount(&self) -> u64 {
        self.platter.lock().mount
    }
}

impl ProcessDisk {
    /// Kills the process, whose parts are dropped afterwards.
    pub fn kill(&self) {
        self.is_killed.store(true, Ordering::Relaxed);
    }

    /// Lets some percent of the writes and syncs fail that are opened from now on.
    pub fn fail(&self, percent: u64) {
        self.faults_percent.store(percent, Ordering::Relaxed);
    }

    /// Opens the ring of a member, as [`FollowerLog::open`] does in a directory.
    ///
    /// # Errors
    /// Those of [`FollowerLog::open`].
    pub fn open_follower(
        &self,
        pool: [u8; 16],
        options: LogOptions,
    ) -> Result<(FollowerLog, FollowerFound)> {
        let made_count = self.machine.platter.lock().made_count();
        let disk = self.disk()?;
        let states = disk.keeper().found()?;
        let random = Arc::new(SimRandom::new(self.seed()));
        let disk = Box::new(disk);
        let (log, mut found) =
            FollowerOpening { disk, random, pool, options, made_count }.open()?;
        found.has_failed = log.has_failed(&states);
        Ok((log, found))
    }

    /// Opens the write log of an owner, as [`Log::open_from`] does in a directory.
    ///
    /// # Errors
    /// Those of [`Log::open_from`].
    pub fn open_log(
        &self,
        identity: LogIdentity,
        key: PoolKey,
        options: LogOptions,
        destaged: Lsn,
        sources: &LogSources,
        clock: Arc<dyn Clock>,
    ) -> Result<(Log, Recovery)> {
        let mount = Some(self.machine.mount());
        let disk = self.disk()?;
        let keeper = disk.keeper();
        let device = LogDevice { disk: Box::new(disk), keeper, spills: FoundSpills::none(), mount };
        let (dir, random) = (Path::new("/nonexistent"), Arc::new(SimRandom::new(self.seed())));
        let seeded_bugs = seeded_bugs();
        LogOpening { dir, identity, key, options, destaged, sources, seeded_bugs, clock, random }
            .open_on(device)
    }

    fn seed(&self) -> u64 {
        self.machine.rng.lock().next()
    }

    fn disk(&self) -> Result<TimedDisk> {
        if self.is_open.swap(true, Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Busy, "lock the log: it is open"));
        }
        let platter = Arc::clone(&self.machine.platter);
        let mut disk = SimDisk::new(platter, self.seed(), self.is_immediate);
        let percent = self.faults_percent.load(Ordering::Relaxed);
        disk.faults = Faults { write: percent, sync: percent, ..Faults::default() };
        let disk = Arc::new(Mutex::new(Some(disk)));
        Ok(TimedDisk { process: self.clone(), disk, notify: Arc::default() })
    }
}

/// A disk whose requests complete in the time of the simulation, or when a caller waits.
struct TimedDisk {
    process: ProcessDisk,
    disk: Arc<Mutex<Option<SimDisk>>>,
    notify: Arc<Mutex<Option<Notify>>>,
}

impl TimedDisk {
    fn with<T>(&self, call: impl FnOnce(&mut SimDisk) -> T) -> T {
        call(self.disk.lock().as_mut().expect("it is there until this is dropped"))
    }

    /// Lets one request complete after a while.
    fn complete_later(&self) {
        let Some(executor) = simulated() else { return };
        let (disk, notify) = (Arc::clone(&self.disk), Arc::clone(&self.notify));
        let time_us = self.process.machine.rng.lock().below(REQUEST_US_MAX);
        let done = executor.sleep(Duration::from_micros(time_us));
        executor.spawn(Box::pin(async move {
            done.await;
            let is_any = disk.lock().as_mut().is_some_and(SimDisk::run_one);
            let notify = notify.lock().clone();
            if let Some(notify) = notify.filter(|_| is_any) {
                notify();
            }
        }));
    }

    fn keeper(&self) -> Box<dyn StateKeeper> {
        Box::new(self.with(|disk| disk.keeper(false)))
    }
}

impl Disk for TimedDisk {
    fn submit(&mut self, request: DiskRequest) {
        self.with(|disk| disk.submit(request));
        // A caller that waits completes its requests itself.
        if self.notify.lock().is_some() {
            self.complete_later();
        }
    }

    fn reap(&mut self, completions: &mut Vec<DiskCompletion>) {
        self.with(|disk| disk.reap(completions));
    }

    fn wait(&mut self) {
        self.with(|disk| disk.wait());
    }

    fn reader(&self) -> Arc<dyn DiskReader> {
        self.with(|disk| disk.reader())
    }
}

impl LogDisk for TimedDisk {
    #[cfg(test)]
    fn fill_up(&self, _file: u32) {
        self.with(|disk| disk.faults.write = 100);
    }

    fn set_notify(&self, notify: Notify) {
        *self.notify.lock() = Some(notify);
        (0..self.with(|disk| disk.pending_count())).for_each(|_| self.complete_later());
    }

    fn wait_for(&mut self, _count: u32) -> u32 {
        0
    }

    fn written_at(&self) -> HashMap<u32, Instant> {
        HashMap::new()
    }

    fn made_count(&self) -> Option<u32> {
        self.process.machine.platter.lock().made_count()
    }

    fn note_made(&self, _count: u32) -> Result<()> {
        Ok(())
    }
}

impl Drop for TimedDisk {
    fn drop(&mut self) {
        let Some(mut disk) = self.disk.lock().take() else { return };
        self.process.is_open.store(false, Ordering::Relaxed);
        match self.process.is_killed.load(Ordering::Relaxed) {
            true => disk.kill(),
            // The threads of a disk finish what they have.
            false => while disk.run_one() {},
        }
    }
}
