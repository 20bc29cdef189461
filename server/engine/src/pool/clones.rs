//! Volumes made from snapshots: clones and rollbacks, and making them independent.
//!
//! Invariants:
//! - The origin of a clone is in the store before the clone is made, and so is everything that a
//!   rollback leaves behind. One batch of the store's metadata then adds the clone, or changes what
//!   the volume shows.
//! - A volume that is being rolled back or renamed has no user and gets none meanwhile.
//! - A snapshot that a clone depends on is not removed, and neither is its volume.

use super::snapshots::some_of;
use super::{Pool, Volumes};
use crate::names::check_name;
use crate::record::{VolumeRecord, VolumeState};
use crate::volume::Volume;
use async_recursion::async_recursion;
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use std::sync::Arc;
use std::time::Duration;

/// Time between checks for a user that may be just leaving, and the number of checks.
const USER_GRACE: Duration = Duration::from_millis(50);
const USER_LOOKS: u32 = 20;
/// Longest time that a volume is not served while its last writes go to the store before a
/// rollback. Chosen by hand.
const HELD_MAX: Duration = Duration::from_secs(30);

/// Origin that a volume still depends on, with the names shown to operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedOrigin {
    /// `VOLUME@NAME`, also for a snapshot that is gone.
    pub name: String,
    /// Progress in bytes of its address space while the volume is being made independent.
    pub promoted_bytes: Option<u64>,
}

impl Volumes {
    /// Name of the snapshot of a volume at an LSN, as shown to operators.
    fn snapshot_name(&self, volume: u32, at: Lsn) -> String {
        let name = self.records.get(&volume).map_or("?", |record| &record.name[..]);
        match self.snapshots.records.get(&(volume, at)) {
            Some(snapshot) => format!("{name}@{}", snapshot.name),
            None => format!("{name} at LSN {at}"),
        }
    }
}

impl Pool {
    /// Makes a writable volume that shows the contents of a snapshot. Waits until the store has all
    /// of the snapshot. With `ttl`, the volume is removed automatically after that time, once it is
    /// not in use.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if the name is taken, or if the chain of clones is too long;
    /// `Unavailable` while the store does not answer or lacks part of the snapshot.
    #[async_recursion]
    pub async fn clone_volume(
        &self,
        source: &str,
        snapshot: &str,
        name: &str,
        ttl: Option<Duration>,
    ) -> Result<VolumeRecord> {
        check_name(name)?;
        self.check_store("clone a snapshot")?;
        let found = self.snapshot(source, snapshot)?;
        let of = VolumeId(found.record.volume);
        self.volumes.lock().new_id("clone", name)?;
        // Wait for the store before taking the lock that others wait for.
        self.shared.wait_destaged_of(of, found.lsn).await?;
        let _one_at_a_time = self.changes.lock().await;
        self.check_store("clone a snapshot")?;
        if self.snapshot(source, snapshot)? != found {
            let what = format!("clone {source}@{snapshot}: it is another one by now; try again");
            return Err(Error::new(ErrorKind::Busy, what));
        }
        let parent = self.find(source)?.record();
        let id = self.volumes.lock().new_id("clone", name)?;
        let now = self.clock().wall();
        let mut record =
            VolumeRecord::new(id, name, found.record.size_bytes, parent.durability, now)
                .with_dedicated_key(parent.dedicated_key);
        record.is_dedup = parent.is_dedup;
        self.shared.check_key(of)?;
        self.shared.register_volumes([&record].into_iter());
        let until = |ttl: Duration| self.clock().stamp().saturating_add(ttl.as_secs().max(1));
        record.expires_at = ttl.map_or(0, until);
        let made = self.shared.tier.clone_volume((of, found.lsn), VolumeId(id), record.encode());
        made.await.map_err(|error| {
            error.context(format!("clone {source}@{snapshot} as volume {name}"))
        })?;
        let volume = Volume::new(self.shared.clone(), record.clone());
        let mut volumes = self.volumes.lock();
        volumes.records.insert(id, record.clone());
        volumes.present.insert(name.to_owned(), volume);
        Ok(record)
    }

    /// Resets the volume to the contents and the size of one of its snapshots. All of its snapshots
    /// stay, so the rollback can be undone if there is a snapshot of the latest state.
    ///
    /// # Errors
    /// `NotFound`; `Busy` while the volume is in use, or after too many rollbacks in a short time;
    /// `Unavailable` while the store does not answer or lacks part of the volume; errors of
    /// `check`, which runs once the volume cannot be opened any more.
    pub async fn roll_back(
        &self,
        name: &str,
        snapshot: &str,
        check: impl Future<Output = Result<()>> + Send,
    ) -> Result<VolumeRecord> {
        self.check_store("roll a volume back")?;
        let id = VolumeId(self.snapshot(name, snapshot)?.record.volume);
        // Do most of the waiting while the volume is still served and before others have to wait.
        let lsn = self.shared.log.flush().await?;
        self.shared.wait_destaged_of(id, lsn).await?;
        let _one_at_a_time = self.changes.lock().await;
        self.check_store("roll a volume back")?;
        let found = self.snapshot(name, snapshot)?;
        let volume = self.hold("roll back", name).await?;
        let done = async {
            // The volume may have been attached during the wait.
            check.await?;
            self.roll_back_alone(&volume, found.lsn, found.record.size_bytes).await
        };
        let done = done.await;
        let mut volumes = self.volumes.lock();
        volumes.held = None;
        let record = match done {
            Ok(record) => record,
            Err(error) => {
                volumes.present.insert(name.to_owned(), volume);
                return Err(error.context(format!("roll volume {name} back to {snapshot}")));
            }
        };
        volume.retire();
        let volume = Volume::new(self.shared.clone(), record.clone());
        volumes.records.insert(record.id, record.clone());
        volumes.present.insert(name.to_owned(), volume);
        Ok(record)
    }

    async fn roll_back_alone(
        &self,
        volume: &Volume,
        at: Lsn,
        size_bytes: u64,
    ) -> Result<VolumeRecord> {
        let lock = self.shared.change_lock(volume.id());
        let _alone = lock.write().await;
        self.shared.check_open(volume.id())?;
        let mut record = volume.record();
        // An LSN after every write to the volume.
        let since = self.shared.append_record(&record).await?;
        let destaged = self.shared.wait_destaged_of(volume.id(), since);
        tokio::time::timeout(HELD_MAX, destaged).await.map_err(|_| {
            let what = format!(
                "the store did not receive the last writes within {HELD_MAX:?}; the volume stays \
                 as it is"
            );
            Error::new(ErrorKind::Unavailable, what)
        })??;
        record.size_bytes = size_bytes;
        self.shared.tier.roll_back(volume.id(), at, since, Some(record.encode())).await?;
        Ok(record)
    }

    /// Takes an unused volume out of service until the caller ends that.
    async fn hold(&self, what: &str, name: &str) -> Result<Arc<Volume>> {
        for look in 0..USER_LOOKS {
            if look > 0 {
                tokio::time::sleep(USER_GRACE).await;
            }
            let mut volumes = self.volumes.lock();
            let Some(volume) = volumes.present.remove(name) else { break };
            // Every user holds a reference, and no new one can come while the list is locked.
            if Arc::strong_count(&volume) == 1 {
                volumes.held = Some(name.to_owned());
                return Ok(volume);
            }
            volumes.present.insert(name.to_owned(), volume);
        }
        let volume = self.find(name)?;
        let name = volume.record().name;
        let what = format!(
            "{what} volume {name}: a client has it open; unmount it and disconnect that client first"
        );
        Err(Error::new(ErrorKind::Busy, what))
    }

    /// Renames a volume.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if the name is taken, or the volume is in use by its old name; errors of
    /// `check`, which runs once the volume cannot be opened any more.
    pub async fn rename_volume(
        &self,
        name: &str,
        new: &str,
        check: impl Future<Output = Result<()>> + Send,
    ) -> Result<VolumeRecord> {
        check_name(new)?;
        let _one_at_a_time = self.changes.lock().await;
        self.find(name)?;
        self.volumes.lock().new_id("rename", new)?;
        let volume = self.hold("rename", name).await?;
        let renamed = async {
            check.await?;
            volume.update_record_of_any(|record| new.clone_into(&mut record.name)).await
        };
        let renamed = renamed.await.map_err(|error| error.context(format!("rename volume {name}")));
        let mut volumes = self.volumes.lock();
        volumes.held = None;
        let name = if renamed.is_ok() { new } else { name };
        volumes.present.insert(name.to_owned(), volume);
        let record = renamed?;
        volumes.records.insert(record.id, record.clone());
        Ok(record)
    }

    /// Starts to make a volume independent of its origin, in the background.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` if it is independent already; store errors.
    #[async_recursion]
    pub async fn promote_volume(&self, name: &str) -> Result<VolumeRecord> {
        self.check_store("promote a volume")?;
        let volume = self.find(name)?;
        if self.shared.tier.promote(volume.id()).await? {
            return Ok(volume.record());
        }
        let what = format!("promote volume {name}: it depends on no snapshot");
        Err(Error::new(ErrorKind::Invalid, what))
    }

    /// Origin of a volume that it still depends on.
    #[must_use]
    pub fn origin(&self, record: &VolumeRecord) -> Option<NamedOrigin> {
        let origin = self.shared.tier.origin(VolumeId(record.id))?;
        let name = self.volumes.lock().snapshot_name(origin.volume.0, origin.at);
        let promoted_bytes = origin.is_promoted.then_some(origin.done_bytes.min(record.size_bytes));
        Some(NamedOrigin { name, promoted_bytes })
    }

    /// Checks that no clone depends on a snapshot.
    ///
    /// # Errors
    /// `Busy`, naming the clones.
    pub(super) fn check_no_dependents(
        &self,
        (volume, name): (&str, &str),
        id: u32,
        at: Lsn,
    ) -> Result<()> {
        let dependents = self.shared.tier.dependents(VolumeId(id), at);
        let volumes = self.volumes.lock();
        let named = |dependent: &VolumeId| {
            let record = volumes.records.get(&dependent.0)?;
            match record.state {
                // A volume that was rolled back is made independent automatically.
                _ if dependent.0 == id => None,
                VolumeState::Present => Some(record.name.clone()),
                VolumeState::Removed { .. } => {
                    Some(format!("{} (removed, restorable)", record.name))
                }
                VolumeState::Purged => None,
            }
        };
        let names: Vec<String> = dependents.iter().filter_map(named).collect();
        if names.is_empty() {
            return Ok(());
        }
        let names = some_of(&names);
        let what = format!(
            "remove snapshot {volume}@{name}: clones depend on it ({names}); remove them with `spindle volume \
             rm NAME --now`, or make them independent with `spindle volume promote`, first"
        );
        Err(Error::new(ErrorKind::Busy, what))
    }

    /// Volumes whose time is over and that are not in use.
    #[must_use]
    pub fn expired(&self) -> Vec<VolumeId> {
        let volumes = self.volumes.lock();
        volumes
            .present
            .values()
            .filter(|volume| self.is_over(volume))
            .map(|volume| volume.id())
            .collect()
    }

    /// Removes a volume if its time is still over. Returns its name.
    ///
    /// # Errors
    /// Like [`Pool::remove_volume`].
    #[async_recursion]
    pub async fn remove_expired(&self, id: VolumeId) -> Result<Option<String>> {
        let _one_at_a_time = self.changes.lock().await;
        let name = {
            let volumes = self.volumes.lock();
            let is_it = |volume: &&Arc<Volume>| volume.id() == id && self.is_over(volume);
            volumes.present.values().find(is_it).map(|volume| volume.record().name)
        };
        match name {
            Some(name) => self.remove_alone(&name, false).await.map(|record| Some(record.name)),
            None => Ok(None),
        }
    }

    /// Its time is over, and only the list holds it.
    fn is_over(&self, volume: &Arc<Volume>) -> bool {
        let expires_at = volume.record().expires_at;
        expires_at != 0 && Arc::strong_count(volume) == 1 && self.clock().is_past(expires_at)
    }

    /// Checks that the store answers, as far as is known, so that callers do not wait for one that
    /// does not.
    pub(super) fn check_store(&self, what: &str) -> Result<()> {
        let status = self.shared.tier.status();
        let failure = status.upload_failure.map(|failure| failure.error);
        match failure.or(status.metadata_failure) {
            None => Ok(()),
            Some(failure) => {
                let what = format!("{what}: the store does not answer; try again later: {failure}");
                Err(Error::new(ErrorKind::Unavailable, what))
            }
        }
    }

    /// Stops keeping the origins of purged volumes for their sake. Each purge tries this again.
    pub(super) async fn retire_purged(&self) {
        // Go by the records in the store: if the log is lost after this, the volume must not come
        // back empty.
        for (id, bytes) in self.shared.tier.volume_records() {
            let is_purged = || {
                let record = VolumeRecord::decode(&bytes);
                record.is_ok_and(|record| record.state == VolumeState::Purged)
            };
            if !self.shared.tier.is_retirable(id) || !is_purged() {
                continue;
            }
            match self.shared.tier.retire(id).await {
                Ok(()) => {}
                Err(error)
                    if matches!(error.kind(), ErrorKind::Fenced | ErrorKind::Unavailable) =>
                {
                    return;
                }
                Err(error) => {
                    tracing::debug!(
                        error = %error.chain(),
                        "could not release the origin of a purged volume; it stays for now"
                    );
                }
            }
        }
    }
}
