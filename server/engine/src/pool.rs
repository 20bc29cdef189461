//! An open pool: one write log, one data tier, the volumes that share them, and the job that moves data from the log to
//! the tier.
//!
//! Invariants:
//! - The log is opened at the LSN up to which the metadata says that everything is destaged, and only by the epoch that
//!   the manifest chain granted.
//! - A generation leaves the log only after its destage is durable in the object store.
//! - Once fenced or failed, the pool acknowledges nothing; a restart is the only way back.
//! - A volume's id is never used twice, and its name by one present volume at a time.

mod clients;
mod clones;
mod dedicated_keys;
mod kept;
#[cfg(any(test, feature = "testing"))]
mod killing;
mod lost_writes;
mod ownership;
mod schedules;
mod snapshots;
mod stalled;
mod superseded;

pub use clones::NamedOrigin;
pub use lost_writes::LostWrites;
pub use schedules::SchedulePlan;
pub use snapshots::NamedSnapshot;
pub use snapshots::some_of;
pub use superseded::{OldLog, Recovered};

use crate::clock::{AGREES_WITHIN, ProvenClock};
use crate::destage::{self, DestageOptions};
use crate::jobs::{Jobs, Need};
use crate::record::{Durability, VolumeRecord, VolumeState};
use crate::report::{PoolReport, without_key};
use crate::state::{self, DestageProgress, Shared};
use crate::volume::{Volume, check_size};
use crate::volume_keys::VolumeKeyRing;
use async_recursion::async_recursion;
use block::{Epoch, Error, ErrorKind, Job, Lsn, Result, VolumeId};
use parking_lot::Mutex;
use snapshots::Snapshots;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tiering::Tier;
use tokio::sync::watch;
use wal::{Log, MissingSpillFile};

/// Longest time that closing waits for a background job. Chosen by hand: a job ends between two steps at once, unless
/// the store does not answer.
const JOB_GRACE: Duration = Duration::from_secs(10);

/// Optional traits of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeTraits {
    /// A dedicated key: destroying it makes the volume's data unreadable.
    pub dedicated_key: bool,
    /// Blocks that are stored already are not stored again.
    pub dedup: bool,
}

/// A pool that this process owns.
pub struct Pool {
    shared: Arc<Shared>,
    volume_keys: VolumeKeyRing,
    volumes: Mutex<Volumes>,
    /// Serialises creating, renaming and removing volumes.
    changes: tokio::sync::Mutex<()>,
    stop: watch::Sender<bool>,
    jobs: Mutex<Vec<tokio::task::JoinHandle<()>>>,
    /// Supervises these jobs and the other jobs of the process.
    supervisor: Jobs,
    retention: Duration,
    clock: OnceLock<ProvenClock>,
}

#[derive(Default)]
struct Volumes {
    records: BTreeMap<u32, VolumeRecord>,
    present: BTreeMap<String, Arc<Volume>>,
    snapshots: Snapshots,
    /// The volume that is being rolled back or renamed; it is not handed out.
    held: Option<String>,
    /// The last time of a volume's schedule that was dealt with.
    slots_done: BTreeMap<u32, u64>,
    /// The time for which a missing snapshot was reported.
    slots_warned: BTreeMap<u32, u64>,
}

impl Volumes {
    /// The id of the next volume. Its name must be free.
    fn new_id(&self, what: &str, name: &str) -> Result<u32> {
        crate::names::check_free_name(name)
            .map_err(|error| error.context(format!("{what} volume {name}")))?;
        if self.present.contains_key(name) || self.held.as_deref() == Some(name) {
            let what = format!("{what} volume {name}: it exists; choose another name");
            return Err(Error::new(ErrorKind::Busy, what));
        }
        let id = self.records.last_key_value().map_or(Some(1), |(id, _)| id.checked_add(1));
        id.ok_or_else(|| Error::new(ErrorKind::Full, "create volume: ids exhausted"))
    }
}

impl Pool {
    /// Takes over an opened log and tier, finds the volumes and starts the destage job. Volumes with a `missing` spill
    /// file are not served.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported` if a volume's record cannot be read.
    pub(crate) fn start(
        log: Log,
        (tier, volume_keys): (Tier, VolumeKeyRing),
        options: DestageOptions,
        retention: Duration,
        missing: &[MissingSpillFile],
    ) -> Result<Arc<Pool>> {
        let mut records = BTreeMap::new();
        let in_tier = tier.volume_records();
        let in_log = log.overlay().volume_records();
        for (id, bytes) in in_tier.into_iter().chain(in_log) {
            let record = VolumeRecord::decode(&bytes)
                .map_err(|error| error.context(format!("open volume {id}")))?;
            if record.id != id.0 {
                let what = format!("open volume {id}: its record names volume {}", record.id);
                return Err(Error::new(ErrorKind::Corrupt, what));
            }
            records.insert(record.id, record);
        }
        let snapshots = Snapshots::find(&log, &tier)?;
        let shared = Arc::new(Shared::new(log, tier, missing));
        shared.register_volumes(records.values());
        shared.update_stalled_quota();
        let mut volumes =
            Volumes { records, present: BTreeMap::new(), snapshots, ..Volumes::default() };
        for record in volumes.records.values() {
            if record.state == VolumeState::Present {
                let volume = Volume::new(shared.clone(), record.clone());
                volumes.present.insert(record.name.clone(), volume);
            }
        }
        let stop = watch::Sender::new(false);
        let supervisor = Jobs::new(shared.tier.conditions().clone());
        let jobs = start_jobs(&supervisor, &shared, options, &stop);
        Ok(Arc::new(Pool {
            shared,
            volume_keys,
            volumes: Mutex::new(volumes),
            changes: tokio::sync::Mutex::new(()),
            stop,
            jobs: Mutex::new(jobs),
            supervisor,
            retention,
            clock: OnceLock::new(),
        }))
    }

    /// Sets the clock. Call this before anything is served; a pool without one believes the clock of
    /// its jobs.
    pub(crate) fn set_clock(&self, clock: ProvenClock) {
        let is_first = self.clock.set(clock).is_ok();
        debug_assert!(is_first, "it has told the time before");
    }

    /// The clock of the pool.
    pub fn clock(&self) -> &ProvenClock {
        let believed = || ProvenClock::new(self.shared.clock().clone(), uuid::Uuid::nil(), 0, None);
        self.clock.get_or_init(believed)
    }

    /// The newest time that a record names, in seconds since the Unix epoch, ignoring times that are still in the
    /// future at `now`; 0 if there is none.
    pub(crate) fn newest_stamp(&self, now: u64) -> u64 {
        let volumes = self.volumes.lock();
        let of_volumes = volumes.records.values().flat_map(|record| {
            let removed_at = match record.state {
                VolumeState::Removed { removed_at } => removed_at,
                VolumeState::Present | VolumeState::Purged => 0,
            };
            [record.created_at, removed_at]
        });
        let of_snapshots = volumes.snapshots.records.values().map(|record| record.created_at);
        let latest = now.saturating_add(AGREES_WITHIN);
        of_volumes.chain(of_snapshots).filter(|at| *at <= latest).max().unwrap_or(0).min(now)
    }

    /// Starts jobs beside the pool's own, and knows when a vital one has died.
    pub fn supervisor(&self) -> &Jobs {
        &self.supervisor
    }

    /// Marks the volumes that may have lost answered writes. Call this before anything is served. A client on the
    /// machine that stopped ended with it. A client on another machine continues as if nothing had happened, and to the
    /// file system that it has mounted a silent loss of writes is corruption: the client is refused, durably, until
    /// [`Pool::accept_loss`]. Happens once per `epoch`, which is the owner's.
    ///
    /// # Errors
    /// Those of writing the log.
    #[async_recursion]
    pub async fn note_lost_writes(&self, cause: LostWrites, epoch: Epoch) -> Result<()> {
        let is_concerned = |record: &VolumeRecord| {
            let may_lack_writes = match cause {
                // With the other durabilities remote clients wait for stable storage.
                LostWrites::Reboot => {
                    matches!(record.durability, Durability::Flush | Durability::Store)
                }
                // This machine kept running, and so did clients on it.
                LostWrites::FailedLog | LostWrites::Remount => {
                    record.durability != Durability::Write
                }
                LostWrites::TakeOver | LostWrites::LostLog => true,
            };
            may_lack_writes && record.lost_writes_in != epoch.0
        };
        // A removed volume may be restored.
        for mut record in self.records() {
            if record.state != VolumeState::Present && is_concerned(&record) {
                (record.has_lost_writes, record.lost_writes_in) = (true, epoch.0);
                self.shared.log_record(&record).await?;
                self.volumes.lock().records.insert(record.id, record);
            }
        }
        for volume in self.volumes() {
            let record = volume.record();
            if !is_concerned(&record) {
                continue;
            }
            tracing::info!(
                volume = %record.name, why = cause.why(),
                "the volume may have lost writes"
            );
            self.update_lost_writes(&volume, Some(epoch)).await?;
        }
        self.shared.log.settle_tail();
        Ok(())
    }

    /// Accepts a loss of writes, once a person confirms that no client from before it is still running: clients are served
    /// again. With `give_up_writes` a volume with a missing spill file goes back to its data in the store.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` if there is nothing to accept or `give_up_writes` is missing; those of writing the log and
    /// the store.
    #[async_recursion]
    pub async fn accept_loss(&self, name: &str, give_up_writes: bool) -> Result<VolumeRecord> {
        let volume = self.find(name)?;
        let closed = self.shared.check_open(volume.id()).err();
        if let Some(error) = closed {
            self.give_up_writes(&volume, give_up_writes, error).await?;
        } else if !volume.record().has_lost_writes {
            let what = format!("accept volume {name}: it has not lost writes, nothing to accept");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        self.update_lost_writes(&volume, None).await
    }

    /// Sets the epoch of a loss of writes; `None` accepts it.
    async fn update_lost_writes(
        &self,
        volume: &Volume,
        epoch: Option<Epoch>,
    ) -> Result<VolumeRecord> {
        let _one_at_a_time = self.changes.lock().await;
        let change = |record: &mut VolumeRecord| {
            record.has_lost_writes = epoch.is_some();
            record.lost_writes_in = epoch.map_or(record.lost_writes_in, |epoch| epoch.0);
        };
        let record = volume.update_record_of_any(change).await?;
        self.volumes.lock().records.insert(record.id, record.clone());
        Ok(record)
    }

    /// Lets each flush wait for the store from now on, or no longer, whatever the durability of its volume.
    pub fn set_flushes_to_store(&self, is_on: bool) {
        self.shared.flushes_to_store.store(is_on, Ordering::Release);
    }

    /// Tells whether other machines have the log, too. If the log of this one fails, clients then get no error but look
    /// for the pool elsewhere.
    pub fn set_replicated(&self, is_on: bool) {
        self.shared.is_replicated.store(is_on, Ordering::Release);
    }

    /// Whether other machines have the log, too.
    #[must_use]
    pub fn is_replicated(&self) -> bool {
        self.shared.is_replicated.load(Ordering::Acquire)
    }

    /// The volume that is served under `name`.
    #[must_use]
    pub fn volume(&self, name: &str) -> Option<Arc<Volume>> {
        self.volumes.lock().present.get(name).cloned()
    }

    /// All volumes that are served, by name.
    #[must_use]
    pub fn volumes(&self) -> Vec<Arc<Volume>> {
        self.volumes.lock().present.values().cloned().collect()
    }

    /// Records of all volumes that are served or can be restored, by id.
    #[must_use]
    pub fn records(&self) -> Vec<VolumeRecord> {
        let volumes = self.volumes.lock();
        volumes.records.values().filter(|r| r.state != VolumeState::Purged).cloned().collect()
    }

    /// Creates a thin volume, durably.
    ///
    /// # Errors
    /// `Invalid` for a bad size, `Busy` if the name is taken.
    #[async_recursion]
    pub async fn create_volume(
        &self,
        name: &str,
        size_bytes: u64,
        durability: Durability,
    ) -> Result<Arc<Volume>> {
        self.create_volume_with(name, size_bytes, durability, VolumeTraits::default()).await
    }

    /// Like [`Pool::create_volume`], with optional traits.
    ///
    /// # Errors
    /// Also `Full` if too many volumes have a key of their own, and those of the store.
    #[async_recursion]
    pub async fn create_volume_with(
        &self,
        name: &str,
        size_bytes: u64,
        durability: Durability,
        traits: VolumeTraits,
    ) -> Result<Arc<Volume>> {
        check_size(size_bytes)?;
        crate::names::check_name(name)?;
        let _one_at_a_time = self.changes.lock().await;
        let id = self.volumes.lock().new_id("create", name)?;
        let dedicated_key =
            if traits.dedicated_key { self.volume_keys.make(id).await?.0 } else { 0 };
        let mut record = VolumeRecord::new(id, name, size_bytes, durability, self.clock().wall())
            .with_dedicated_key(dedicated_key);
        record.is_dedup = traits.dedup;
        self.shared.register_volumes([&record].into_iter());
        self.shared.log_record(&record).await?;
        let volume = Volume::new(self.shared.clone(), record.clone());
        let mut volumes = self.volumes.lock();
        volumes.records.insert(id, record);
        volumes.present.insert(name.to_owned(), volume.clone());
        Ok(volume)
    }

    /// Changes the size of a volume in use. Shrinking drops everything past the new end for good.
    ///
    /// # Errors
    /// `NotFound`, `Invalid`; `Denied` if it would shrink and `may_shrink` is false.
    #[async_recursion]
    pub async fn resize_volume(
        &self,
        name: &str,
        size_bytes: u64,
        may_shrink: bool,
    ) -> Result<VolumeRecord> {
        check_size(size_bytes)?;
        let _one_at_a_time = self.changes.lock().await;
        let volume = self.find(name)?;
        let record = volume
            .update_record(|record| {
                if size_bytes < record.size_bytes && !may_shrink {
                    let what = format!(
                        "resize volume {name}: {size_bytes} is less than its {} bytes and would \
                         destroy the data past it; use --shrink if you mean it",
                        record.size_bytes
                    );
                    return Err(Error::new(ErrorKind::Denied, what));
                }
                record.size_bytes = size_bytes;
                Ok(())
            })
            .await?;
        self.volumes.lock().records.insert(record.id, record.clone());
        Ok(record)
    }

    /// Changes durability, read-only and deduplication of a volume in use; `None` keeps the current value.
    ///
    /// # Errors
    /// `NotFound`; those of writing the log.
    #[async_recursion]
    pub async fn configure_volume(
        &self,
        name: &str,
        durability: Option<Durability>,
        is_read_only: Option<bool>,
        is_dedup: Option<bool>,
    ) -> Result<VolumeRecord> {
        let _one_at_a_time = self.changes.lock().await;
        let volume = self.find(name)?;
        let before = volume.record();
        let durability = durability.unwrap_or(before.durability);
        let is_read_only = is_read_only.unwrap_or(before.is_read_only);
        let is_dedup = is_dedup.unwrap_or(before.is_dedup);
        let of_before = (before.durability, before.is_read_only, before.is_dedup);
        if of_before == (durability, is_read_only, is_dedup) {
            return Ok(before);
        }
        if before.durability != Durability::Write {
            // A flush under `write` is answered at once because every answer has waited. Earlier answers must be made
            // durable first.
            self.shared.log.flush().await?;
        }
        let record = volume
            .update_record(|record| {
                record.durability = durability;
                record.is_read_only = is_read_only;
                record.is_dedup = is_dedup;
                Ok(())
            })
            .await?;
        self.shared.register_volumes([&record].into_iter());
        tracing::info!(
            volume = %name,
            durability = ?durability,
            durability_before = ?before.durability,
            is_read_only,
            is_read_only_before = before.is_read_only,
            is_dedup,
            is_dedup_before = before.is_dedup,
            "the options of the volume have changed"
        );
        self.volumes.lock().records.insert(record.id, record.clone());
        Ok(record)
    }

    /// Stops serving a volume. With `now` its contents are dropped at once, otherwise it can be restored for the
    /// retention time.
    ///
    /// # Errors
    /// `NotFound`; `Busy` while it has snapshots.
    #[async_recursion]
    pub async fn remove_volume(&self, name: &str, now: bool) -> Result<VolumeRecord> {
        let _one_at_a_time = self.changes.lock().await;
        self.remove_alone(name, now).await
    }

    /// Like [`Pool::remove_volume`], for a caller that holds the lock of the changes.
    async fn remove_alone(&self, name: &str, now: bool) -> Result<VolumeRecord> {
        if now
            && self.volume(name).is_none()
            && let Some(record) = self.removed(name)
        {
            return self.purge(record).await;
        }
        let volume = self.find(name)?;
        self.volumes.lock().check_no_snapshots(volume.id().0, name)?;
        let lock = self.shared.change_lock(volume.id());
        let record = {
            // No write or resize is under way, and a waiting one does not get past `retire`.
            let _alone = lock.write().await;
            let mut record = volume.record();
            record.state = VolumeState::Removed { removed_at: self.clock().stamp() };
            record.clients.clear();
            volume.retire();
            // If this fails the log does not have the removal, so the volume is served as before.
            if let Err(error) = self.shared.log_record(&record).await {
                volume.unretire();
                return Err(error.context(format!("remove volume {name}")));
            }
            record
        };
        {
            let mut volumes = self.volumes.lock();
            volumes.present.remove(name);
            volumes.records.insert(record.id, record.clone());
        }
        if now { self.purge(record).await } else { Ok(record) }
    }

    /// Serves a removed volume again.
    ///
    /// # Errors
    /// `NotFound` if there is none of that name, `Busy` if another volume has the name.
    #[async_recursion]
    pub async fn restore_volume(&self, name: &str) -> Result<VolumeRecord> {
        let _one_at_a_time = self.changes.lock().await;
        let Some(mut record) = self.removed(name) else {
            let what = format!("restore volume {name}: no removed volume has that name");
            return Err(Error::new(ErrorKind::NotFound, what));
        };
        if self.volume(name).is_some() {
            let what = format!("restore volume {name}: a volume of that name is in use");
            return Err(Error::new(ErrorKind::Busy, what));
        }
        record.state = VolumeState::Present;
        record.expires_at = 0; // otherwise it would be removed again
        self.shared.log_record(&record).await?;
        let mut volumes = self.volumes.lock();
        volumes.records.insert(record.id, record.clone());
        let volume = Volume::new(self.shared.clone(), record.clone());
        volumes.present.insert(name.to_owned(), volume);
        Ok(record)
    }

    /// Drops the contents of volumes that were removed longer ago than the retention time.
    ///
    /// # Errors
    /// Those of the log.
    #[async_recursion]
    pub async fn purge_expired(&self) -> Result<usize> {
        let purged = self.purge_old().await;
        // This may wait for the store, and nothing waits for it.
        self.retire_purged().await;
        purged
    }

    async fn purge_old(&self) -> Result<usize> {
        let _one_at_a_time = self.changes.lock().await;
        let expired: Vec<VolumeRecord> = {
            let volumes = self.volumes.lock();
            let is_expired = |record: &&VolumeRecord| match record.state {
                VolumeState::Removed { removed_at } => {
                    self.clock().is_past(removed_at.saturating_add(self.retention.as_secs()))
                }
                VolumeState::Present | VolumeState::Purged => false,
            };
            volumes.records.values().filter(is_expired).cloned().collect()
        };
        let count = expired.len();
        for record in expired {
            self.purge(record).await?;
        }
        self.destroy_unused_keys().await?;
        Ok(count)
    }

    /// Tells whether a volume of that name was removed and can be restored.
    #[must_use]
    pub fn is_removed(&self, name: &str) -> bool {
        self.removed(name).is_some()
    }

    /// Latest removed volume of that name.
    fn removed(&self, name: &str) -> Option<VolumeRecord> {
        let volumes = self.volumes.lock();
        let is_it = |record: &&VolumeRecord| {
            record.name == name && matches!(record.state, VolumeState::Removed { .. })
        };
        volumes.records.values().rfind(is_it).cloned()
    }

    async fn purge(&self, mut record: VolumeRecord) -> Result<VolumeRecord> {
        // Both entries are one step, and the record comes first: a volume that can be restored but reads as zeroes
        // never exists.
        record.state = VolumeState::Purged;
        let entry = self.shared.record_entry(&record)?;
        self.shared.append_change(entry, vec![state::trim_of_all(VolumeId(record.id))]).await?;
        self.shared.show_record(&record);
        self.volumes.lock().records.insert(record.id, record.clone());
        Ok(record)
    }

    fn find(&self, name: &str) -> Result<Arc<Volume>> {
        self.volume(name).ok_or_else(|| self.why_not(name))
    }

    /// Tells whether a volume is held back at the moment.
    #[must_use]
    pub fn is_any_held(&self) -> bool {
        self.volumes.lock().held.is_some()
    }

    /// The error that explains why there is no volume of that name.
    #[must_use]
    pub fn why_not(&self, name: &str) -> Error {
        if self.volumes.lock().held.as_deref() == Some(name) {
            let what = format!("find volume {name}: it is being changed; try again in a moment");
            return Error::new(ErrorKind::Busy, what);
        }
        let what = format!("find volume {name}: there is none; `spindle volume list` shows all");
        Error::new(ErrorKind::NotFound, what)
    }

    /// Resolves when all data answered before the call is in the object store.
    ///
    /// # Errors
    /// Those of the log and of the pool's end.
    #[async_recursion]
    pub async fn destage_all(&self) -> Result<Lsn> {
        self.destage_those(|_| true).await
    }

    /// Like [`Pool::destage_all`], for the data of some volumes.
    ///
    /// # Errors
    /// Those of [`Pool::destage_all`].
    pub(crate) async fn destage_volumes(&self, volumes: &BTreeSet<u32>) -> Result<Lsn> {
        self.destage_those(|volume| volumes.contains(&volume.0)).await
    }

    async fn destage_those(&self, is_one: impl Fn(VolumeId) -> bool) -> Result<Lsn> {
        let lsn = self.shared.log.flush().await?;
        self.shared.wait_destaged(lsn).await?;
        if self.shared.stalled_volumes().into_iter().any(&is_one) {
            self.shared.try_catch_up().await?;
        }
        match self.shared.stalled.lock().first(is_one) {
            None => Ok(lsn),
            Some((volume, reason)) => {
                let what = format!(
                    "move everything to the store: volume {volume} cannot be destaged, the others \
                     are there: {reason}"
                );
                Err(Error::new(ErrorKind::Unavailable, what))
            }
        }
    }

    /// Resolves when all entries that dropped requests have left in the log are visible, without waiting for log space.
    ///
    /// # Errors
    /// Those of the log.
    #[async_recursion]
    pub async fn settle(&self) -> Result<()> {
        self.shared.log.settle().await
    }

    /// Walks everything that the store holds and verifies it; changes nothing.
    ///
    /// # Errors
    /// Those that prevent the walk. Problems of the pool are in the report.
    #[async_recursion]
    pub async fn fsck(&self) -> Result<PoolReport> {
        let report = self.shared.tier.fsck(tiering::FsckOptions::default()).await?;
        let records = self.shared.tier.volume_records();
        let without_key = without_key(&records, self.shared.tier.volume_keys());
        Ok(PoolReport { volume_count: self.records().len(), report, without_key })
    }

    /// Volumes that are behind the others in the store, with the spill files that hold the rest.
    #[must_use]
    pub fn stalled_volumes(&self) -> BTreeMap<VolumeId, Vec<tiering::NamedSpillFile>> {
        self.shared.tier.stalled_volumes()
    }

    /// Tells whether the volume is not served because a spill file of it is missing here.
    #[must_use]
    pub fn is_closed(&self, volume: &Volume) -> bool {
        self.shared.check_open(volume.id()).is_err()
    }

    /// The state of the write log.
    #[must_use]
    pub fn log_status(&self) -> wal::LogStatus {
        self.shared.log.status()
    }

    /// Progress of the creation of the write log's ring.
    #[must_use]
    pub fn ring_space(&self) -> wal::RingSpace {
        self.shared.log.ring_space()
    }

    /// The data tier.
    #[must_use]
    pub fn tier(&self) -> &Tier {
        &self.shared.tier
    }

    /// The state of deduplication.
    #[must_use]
    pub fn dedup_status(&self) -> tiering::DedupStatus {
        self.shared.tier.dedup_status()
    }

    /// The contents of the store, and the work of reclaim.
    #[must_use]
    pub fn reclaim_status(&self) -> tiering::ReclaimStatus {
        self.shared.tier.reclaim_status()
    }

    /// The state of the data tier.
    #[must_use]
    pub fn tier_status(&self) -> tiering::TierStatus {
        self.shared.tier.status()
    }

    /// The work of the destage job.
    #[must_use]
    pub fn destage_progress(&self) -> DestageProgress {
        self.shared.progress.lock().clone()
    }

    /// Stops acknowledging, as another epoch owns the pool.
    pub fn fence(&self, error: Error) {
        self.shared.fail(error);
    }

    /// Resolves when the pool has stopped for good (another owner has it, the store lost it, or the disk of its write
    /// log failed), with the reason.
    #[async_recursion]
    pub async fn ended(&self) -> Error {
        let mut destaged = self.shared.destaged.subscribe();
        // The sender lives as long as the pool.
        tokio::select! {
            biased;
            _ = destaged.wait_for(|_| self.shared.is_stopped()) => {}
            error = self.log_failed() => self.shared.fail(error),
        }
        let closed = || Error::new(ErrorKind::Unavailable, "serve the pool: it was closed");
        self.shared.fatal.get().cloned().unwrap_or_else(closed)
    }

    /// Resolves when the write log has failed. Earlier data is no longer served, because the kernel may drop it.
    async fn log_failed(&self) -> Error {
        let mut changes = self.shared.log.changes();
        loop {
            if let Some(error) = self.shared.log.failure() {
                return error.context("serve the pool: its write log failed");
            }
            if changes.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// The note for the next opening, once the disk of the write log has failed.
    pub(crate) fn log_failure_note(&self) -> Option<Vec<u8>> {
        self.shared.log.failure_note()
    }

    /// The error of a pool that no longer serves anything, otherwise `None`.
    #[must_use]
    pub fn fatal(&self) -> Option<Error> {
        self.shared.check_serving().err()
    }

    /// Stops the pool in order. Front ends must have finished their requests. Data that the store does not hold yet
    /// stays in the log and is destaged after the next start. Returns the last LSN and the last destaged one.
    ///
    /// # Errors
    /// The first failure; the log is then marked unclean, and the next start recovers it.
    #[async_recursion]
    pub async fn close(&self) -> Result<(Lsn, Lsn)> {
        self.shared.begin_closing();
        let flushed = self.shared.log.flush().await;
        self.stop.send_replace(true);
        let jobs = std::mem::take(&mut *self.jobs.lock());
        for mut job in jobs {
            let Ok(ended) = tokio::time::timeout(JOB_GRACE, &mut job).await else {
                // It waits for the store; its current step is repeated after the next start.
                job.abort();
                continue;
            };
            ended.map_err(|error| {
                Error::with_source(ErrorKind::Io, "stop a background job", error)
            })?;
        }
        let destaged_lsn = self.shared.tier.destaged_lsn();
        let tier_closed = self.shared.tier.close().await;
        let log = self.shared.log.clone();
        let log_closed = tokio::task::spawn_blocking(move || log.close())
            .await
            .map_err(|error| Error::with_source(ErrorKind::Io, "close the log", error))?;
        let last_lsn = flushed?;
        log_closed?;
        match tier_closed {
            // Data that the store lacks is in the log, which is closed in order.
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                tracing::warn!(
                    error = %error.chain(),
                    "could not note in the store that the pool has closed"
                );
            }
            closed => closed?,
        }
        Ok((last_lsn, destaged_lsn))
    }
}

fn start_jobs(
    supervisor: &Jobs,
    shared: &Arc<Shared>,
    options: DestageOptions,
    stop: &watch::Sender<bool>,
) -> Vec<tokio::task::JoinHandle<()>> {
    let lane = shared.tier.background();
    let destage = Job::new("destage", "no data reaches the store, and the write log fills");
    let upkeep = Job::new("upkeep", "trims are not folded, and orphan segments stay in the store");
    let reclaim = Job::new("reclaim", "space of overwritten data stays in use");
    let fingerprints =
        Job::new("fingerprints", "blocks that are stored already are not all found again");
    let run = destage::run(shared.clone(), options, stop.subscribe());
    let maintain = destage::maintain(shared.clone(), stop.subscribe());
    let reclaims = destage::reclaim(shared.clone(), options.reclaim, stop.subscribe());
    let load = destage::load_fingerprints(shared.clone(), stop.subscribe());
    vec![
        supervisor.spawn_on(lane, Need::Vital, destage, run),
        supervisor.spawn_on(lane, Need::Useful, upkeep, maintain),
        supervisor.spawn_on(lane, Need::Useful, reclaim, reclaims),
        supervisor.spawn_on(lane, Need::Useful, fingerprints, load),
    ]
}

#[cfg(test)]
mod tests;
