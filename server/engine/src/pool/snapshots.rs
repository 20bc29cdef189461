//! Snapshots of an open pool: creates, lists, serves and removes them.
//!
//! Invariants:
//! - A snapshot exists once its log entry is on stable storage. It contains every write that was
//!   acknowledged before that entry, and none that comes after it.
//! - A snapshot is not removed while it is served.
//! - A volume with snapshots is not removed.

use super::{Pool, Volumes};
use crate::record::VolumeState;
use crate::snapshot::{Removed, SnapshotEntry, SnapshotName, SnapshotRecord};
use crate::volume::Volume;
use async_recursion::async_recursion;
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use tiering::{ChangedExtent, Tier};
use wal::{EntryKind, Log, NewEntry};

/// Maximum number of snapshots of one volume. Chosen by hand: hourly snapshots for five months.
pub const SNAPSHOTS_OF_VOLUME_MAX: usize = 4096;
/// Maximum number of snapshots of a pool. Chosen by hand: a few MiB of memory.
pub const SNAPSHOTS_MAX: usize = 32_768;
/// Generations of the log waiting for the store above which no snapshot is made, because each
/// snapshot adds one. Chosen by hand.
const FROZEN_MAX: u64 = 256;

/// Spill files of a volume above which no snapshot of it is made. Chosen by hand: each is an open
/// file.
const SPILL_FILES_MAX: usize = 256;

/// Snapshots of a pool, by volume and LSN.
#[derive(Default)]
pub(super) struct Snapshots {
    pub(super) records: BTreeMap<(u32, Lsn), SnapshotRecord>,
    /// Read-only volumes that serve the snapshots, as long as they are in use.
    views: BTreeMap<(u32, Lsn), Weak<Volume>>,
}

impl Snapshots {
    /// Collects the snapshots that the tier and the log know.
    pub(super) fn find(log: &Log, tier: &Tier) -> Result<Snapshots> {
        let mut records = BTreeMap::new();
        for (volume, lsn, bytes) in tier.snapshots() {
            let record = SnapshotRecord::decode(&bytes)
                .map_err(|error| error.context(format!("open a snapshot of volume {volume}")))?;
            records.insert((volume.0, lsn), record);
        }
        // The log is newer than the tier: apply its entries on top, both created and removed
        // snapshots.
        let mut passed = Vec::new();
        for (lsn, bytes) in log.overlay().snapshots() {
            let entry = SnapshotEntry::decode(&bytes)?;
            records.extend(entry.made.into_iter().map(|record| ((record.volume, lsn), record)));
            for one in entry.removed {
                records.remove(&(one.volume, Lsn(one.lsn)));
                passed.push(Lsn(one.lsn));
            }
            passed.push(lsn);
        }
        let found = Snapshots { records, views: BTreeMap::new() };
        let mut at: BTreeMap<Lsn, Vec<VolumeId>> =
            passed.into_iter().map(|lsn| (lsn, Vec::new())).collect();
        for (volume, lsn) in found.records.keys() {
            at.entry(*lsn).or_default().push(VolumeId(*volume));
        }
        for (lsn, volumes) in at {
            log.set_snapshots(lsn, volumes);
        }
        Ok(found)
    }

    /// Volumes that have a snapshot at an LSN.
    fn volumes_at(&self, at: Lsn) -> Vec<VolumeId> {
        let of_it = self.records.keys().filter(|(_, lsn)| *lsn == at);
        of_it.map(|(volume, _)| VolumeId(*volume)).collect()
    }

    pub(super) fn of(&self, volume: u32) -> impl Iterator<Item = (Lsn, &SnapshotRecord)> {
        let of_it = self.records.range((volume, Lsn::NONE)..=(volume, Lsn(u64::MAX)));
        of_it.map(|((_, lsn), record)| (*lsn, record))
    }

    fn named(&self, volume: u32, name: &str) -> Option<(Lsn, &SnapshotRecord)> {
        self.of(volume).find(|(_, record)| record.name == name)
    }

    /// Returns the view of a snapshot if it is still in use.
    fn user(&mut self, key: (u32, Lsn)) -> Option<Arc<Volume>> {
        let view = self.views.get(&key)?.upgrade();
        if view.is_none() {
            self.views.remove(&key);
        }
        view
    }
}

/// A snapshot with the name of its volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedSnapshot {
    /// Name of the volume.
    pub volume: String,
    /// Position in the history of the pool.
    pub lsn: Lsn,
    /// Record of the snapshot.
    pub record: SnapshotRecord,
}

fn no_volume(name: &str) -> Error {
    let what = format!("find volume {name}: there is none; `spindle volume list` shows all");
    Error::new(ErrorKind::NotFound, what)
}

fn no_snapshot(volume: &str, name: &str) -> Error {
    let what = format!(
        "find snapshot {volume}@{name}: there is none; `spindle snapshot list {volume}` shows all"
    );
    Error::new(ErrorKind::NotFound, what)
}

/// Lists the first few names and the number of the others.
pub fn some_of(names: &[String]) -> String {
    let shown = names.iter().take(5).cloned().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(5) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

impl Volumes {
    /// Fails if the volume cannot be removed because it has snapshots, and names them.
    pub(super) fn check_no_snapshots(&self, id: u32, name: &str) -> Result<()> {
        let names: Vec<String> =
            self.snapshots.of(id).map(|(_, record)| format!("{name}@{}", record.name)).collect();
        if names.is_empty() {
            return Ok(());
        }
        let names = some_of(&names);
        let what = format!(
            "remove volume {name}: it has snapshots ({names}); remove them first, with `spindle \
             snapshot rm`"
        );
        Err(Error::new(ErrorKind::Busy, what))
    }
}

impl Pool {
    /// Tells of each snapshot whether the store has it. Until then it exists only on this machine.
    #[must_use]
    pub fn are_in_store(&self, snapshots: &[NamedSnapshot]) -> Vec<bool> {
        let destaged = self.log_status().destaged_lsn;
        let stalled = self.destage_progress().stalled;
        let is_in_store = |one: &NamedSnapshot| {
            let of_volume = stalled.get(&one.record.volume);
            one.lsn <= destaged && of_volume.is_none_or(|stalled| one.lsn.0 < stalled.since_lsn)
        };
        snapshots.iter().map(is_in_store).collect()
    }

    /// Like [`Pool::create_snapshots`], also for schedules.
    pub(super) async fn create_snapshots_as(
        &self,
        asked: &SnapshotName,
        is_scheduled: bool,
    ) -> Result<Vec<NamedSnapshot>> {
        let _one_at_a_time = self.changes.lock().await;
        self.check_not_too_many("make")?;
        let now = self.clock().wall();
        let mut made = Vec::new();
        // A client may enlarge its volume meanwhile: data that it writes there before the instant
        // of the snapshot is in it.
        let mut unchanged = Vec::new();
        for name in &asked.volumes {
            let volume = self.find(name)?;
            unchanged.push(self.shared.change_lock(volume.id()).read_owned().await);
            self.check_snapshot(name, &asked.name)?;
            let record = volume.record();
            let mut snapshot = SnapshotRecord::new(record.id, &asked.name, record.size_bytes, now);
            snapshot.is_scheduled = is_scheduled;
            made.push(snapshot);
        }
        let lsn = self.log_snapshots(&SnapshotEntry::making(made.clone())).await?;
        drop(unchanged);
        let of = made.iter().map(|record| VolumeId(record.volume)).collect();
        self.shared.log.set_snapshots(lsn, of);
        let mut volumes = self.volumes.lock();
        for record in &made {
            volumes.snapshots.records.insert((record.volume, lsn), record.clone());
        }
        let named = asked.volumes.iter().zip(made);
        Ok(named
            .map(|(volume, record)| NamedSnapshot { volume: volume.clone(), lsn, record })
            .collect())
    }

    /// Checks that a volume can have a snapshot of that name now.
    ///
    /// # Errors
    /// Like [`Pool::create_snapshots`].
    pub(super) fn check_snapshot(&self, name: &str, snapshot: &str) -> Result<()> {
        let volume = self.find(name)?;
        self.check_stalled(&volume, name)?;
        // The contents of a volume are unknown while a spill file of it is missing.
        self.shared.check_open(volume.id())?;
        let volumes = self.volumes.lock();
        let snapshots = &volumes.snapshots;
        if snapshots.named(volume.id().0, snapshot).is_some() {
            let what = format!(
                "make snapshot {name}@{snapshot}: it exists; choose another name, or remove it first"
            );
            return Err(Error::new(ErrorKind::Busy, what));
        }
        let count = snapshots.of(volume.id().0).count();
        if count >= SNAPSHOTS_OF_VOLUME_MAX || snapshots.records.len() >= SNAPSHOTS_MAX {
            let what = format!(
                "make snapshot {name}@{snapshot}: a volume has at most {SNAPSHOTS_OF_VOLUME_MAX} and a pool \
                 {SNAPSHOTS_MAX}; remove some first"
            );
            return Err(Error::new(ErrorKind::Full, what));
        }
        Ok(())
    }

    /// Removes exactly the snapshot that was listed before, not another one of the same name.
    ///
    /// # Errors
    /// Like [`Pool::remove_snapshot`].
    pub(super) async fn remove_this(
        &self,
        volume: &str,
        one: &NamedSnapshot,
    ) -> Result<NamedSnapshot> {
        let _one_at_a_time = self.changes.lock().await;
        let name = &one.record.name;
        let found = self.snapshot(volume, name)?;
        if (found.record.volume, found.lsn) != (one.record.volume, one.lsn) {
            return Err(no_snapshot(volume, name));
        }
        self.remove_snapshot_alone(volume, name).await
    }

    /// Removes a snapshot. The data that only it showed is dropped from the store in the
    /// background.
    ///
    /// # Errors
    /// `NotFound`; `Busy` while it is served or a clone depends on it.
    #[async_recursion]
    pub async fn remove_snapshot(&self, volume: &str, name: &str) -> Result<NamedSnapshot> {
        let _one_at_a_time = self.changes.lock().await;
        self.remove_snapshot_alone(volume, name).await
    }

    async fn remove_snapshot_alone(&self, volume: &str, name: &str) -> Result<NamedSnapshot> {
        self.check_not_too_many("remove")?;
        let found = self.snapshot(volume, name)?;
        let key = (found.record.volume, found.lsn);
        self.check_no_dependents((volume, name), key.0, key.1)?;
        {
            // From here on it cannot be opened any more.
            let mut volumes = self.volumes.lock();
            if volumes.snapshots.user(key).is_some() {
                let what = format!("remove snapshot {volume}@{name}: a client has it open");
                return Err(Error::new(ErrorKind::Busy, what));
            }
            volumes.snapshots.records.remove(&key);
        }
        let removed = Removed { volume: key.0, lsn: key.1.0 };
        let logged = self.log_snapshots(&SnapshotEntry::removing(vec![removed])).await;
        let lsn = match logged {
            Ok(lsn) => lsn,
            Err(error) => {
                // Keep it: the log has failed, or the client that asked for the removal has
                // disconnected.
                self.volumes.lock().snapshots.records.insert(key, found.record);
                return Err(error.context(format!("remove snapshot {volume}@{name}")));
            }
        };
        let left = self.volumes.lock().snapshots.volumes_at(key.1);
        self.shared.log.set_snapshots(key.1, left);
        self.shared.log.set_snapshots(lsn, Vec::new());
        Ok(found)
    }

    /// Fails if too many generations of the log wait for the store. Each entry about snapshots ends
    /// a generation, which then waits for the store.
    fn check_not_too_many(&self, what: &str) -> Result<()> {
        if self.shared.log.status().frozen_count < FROZEN_MAX {
            return Ok(());
        }
        let what = format!(
            "{what} a snapshot: {FROZEN_MAX} generations of the log wait for the store; try again in a moment"
        );
        Err(Error::new(ErrorKind::Busy, what))
    }

    /// Fails if the volume has too many spill files. Spill files from before and after a snapshot are
    /// not joined, so each snapshot may add one.
    fn check_stalled(&self, volume: &Volume, name: &str) -> Result<()> {
        let count = self.shared.log.overlay().spill_file_count(volume.id());
        if count < SPILL_FILES_MAX {
            return Ok(());
        }
        let what = format!(
            "make a snapshot of volume {name}: it is behind the others in the store, and has \
             {count} spill files; `spindle status` shows the remedy"
        );
        Err(Error::new(ErrorKind::Busy, what))
    }

    pub(super) async fn log_snapshots(&self, entry: &SnapshotEntry) -> Result<Lsn> {
        let entry = NewEntry {
            volume: VolumeId(0),
            kind: EntryKind::Snapshot,
            start_sector: 0,
            sector_count: 0,
            payload: entry.encode(),
        };
        self.shared.append_change(entry, Vec::new()).await
    }

    /// Lists all snapshots, or those of one volume, by volume and age.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn snapshots(&self, volume: Option<&str>) -> Result<Vec<NamedSnapshot>> {
        let volumes = self.volumes.lock();
        if let Some(name) = volume
            && !volumes.present.contains_key(name)
        {
            return Err(no_volume(name));
        }
        let mut found = Vec::new();
        for (name, present) in &volumes.present {
            if volume.is_some_and(|wanted| wanted != name) {
                continue;
            }
            found.extend(volumes.snapshots.of(present.id().0).map(|(lsn, record)| NamedSnapshot {
                volume: name.clone(),
                lsn,
                record: record.clone(),
            }));
        }
        Ok(found)
    }

    /// Returns the bytes in the store that each of these snapshots alone holds, by volume and LSN.
    /// Data that is not in the store yet does not count.
    ///
    /// # Errors
    /// Errors reading the metadata.
    #[async_recursion]
    pub async fn held_by(&self, found: &[NamedSnapshot]) -> Result<BTreeMap<(u32, u64), u64>> {
        let volumes: std::collections::BTreeSet<u32> =
            found.iter().map(|one| one.record.volume).collect();
        let mut all = BTreeMap::new();
        for volume in volumes {
            let held = self.shared.tier.held_bytes(VolumeId(volume)).await?;
            all.extend(held.into_iter().map(|(lsn, bytes)| ((volume, lsn.0), bytes)));
        }
        Ok(all)
    }

    /// Finds one snapshot.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn snapshot(&self, volume: &str, name: &str) -> Result<NamedSnapshot> {
        let volumes = self.volumes.lock();
        let present = volumes.present.get(volume).ok_or_else(|| no_volume(volume))?;
        let (lsn, record) = volumes
            .snapshots
            .named(present.id().0, name)
            .ok_or_else(|| no_snapshot(volume, name))?;
        Ok(NamedSnapshot { volume: volume.to_owned(), lsn, record: record.clone() })
    }

    /// Lists the extents that changed between two snapshots of a volume, starting at `offset`:
    /// about `count_max` extents at most, and the offset to continue at if there may be more. Waits
    /// until the store has both snapshots.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` if the snapshots are in the wrong order or of two volumes;
    /// `Unavailable` while the volume is behind the others in the store; errors reading the
    /// metadata.
    #[async_recursion]
    pub async fn snapshot_differences(
        &self,
        (older, newer): (&SnapshotName, &SnapshotName),
        offset: u64,
        count_max: usize,
    ) -> Result<(Vec<ChangedExtent>, Option<u64>)> {
        let ((volume, old_name), (other, new_name)) = (older.single()?, newer.single()?);
        // Held until the end, so that neither is removed meanwhile.
        let views = (self.snapshot_view(volume, old_name)?, self.snapshot_view(other, new_name)?);
        let (old, new) = (self.snapshot(volume, old_name)?, self.snapshot(other, new_name)?);
        if volume != other || old.lsn > new.lsn {
            let what = format!(
                "compare {volume}@{old_name} with {other}@{new_name}: name an older and a newer snapshot of one volume"
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        self.shared.wait_destaged(new.lsn).await?;
        let id = VolumeId(new.record.volume);
        if self.shared.is_stalled(id) {
            let what = format!(
                "compare snapshots of volume {volume}: it is behind the others in the store; `spindle status` says why"
            );
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        // Data that the volume lost by shrinking has changed, too.
        let end = old.record.size_bytes.max(new.record.size_bytes);
        let lsns = (old.lsn, new.lsn);
        let found = self.shared.tier.differences(id, lsns, offset..end, count_max).await;
        drop(views);
        found
    }

    /// Returns a read-only volume that serves a snapshot. The snapshot is in use as long as this
    /// volume is held.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn snapshot_view(&self, volume: &str, name: &str) -> Result<Arc<Volume>> {
        let found = self.snapshot(volume, name)?;
        let key = (found.record.volume, found.lsn);
        let mut volumes = self.volumes.lock();
        if !volumes.snapshots.records.contains_key(&key) {
            return Err(no_snapshot(volume, name));
        }
        if let Some(view) = volumes.snapshots.user(key) {
            return Ok(view);
        }
        let present = volumes.present.get(volume).ok_or_else(|| no_volume(volume))?;
        let record = present.record().of_snapshot(&found.record);
        debug_assert_eq!(record.state, VolumeState::Present);
        let view = Volume::snapshot(self.shared.clone(), record, found.lsn);
        volumes.snapshots.views.insert(key, Arc::downgrade(&view));
        Ok(view)
    }
}
