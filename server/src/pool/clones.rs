//! Volumes made from snapshots: clones, and volumes that are rolled back; and making them independent.
//!
//! Invariants:
//! - What a clone is made from is in the store before the clone is made: so is all that a rollback leaves behind.
//!   The metadata of the store then says in one batch that it is there, or what the volume shows from now on.
//! - A volume that is rolled back or renamed has no user, and gets none meanwhile.
//! - A snapshot that a clone depends on is not removed, and neither is its volume.

use super::{Pool, Volumes, unix_seconds};
use crate::record::{VolumeRecord, VolumeState, check_name};
use crate::volume::Volume;
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use std::sync::Arc;
use std::time::Duration;

/// How long a user of a volume that may be just going is waited for, and how often.
const USER_GRACE: Duration = Duration::from_millis(50);
const USER_LOOKS: u32 = 20;

/// What a volume was made from and still depends on, in the words of people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedOrigin {
    /// `VOLUME@NAME`, also of a snapshot that is gone.
    pub name: String,
    /// It is being made independent: bytes of its address space that are done.
    pub promoted_bytes: Option<u64>,
}

impl Volumes {
    /// How people call the snapshot of a volume at an LSN.
    fn snapshot_name(&self, volume: u32, at: Lsn) -> String {
        let name = self.records.get(&volume).map_or("?", |record| &record.name[..]);
        match self.snapshots.records.get(&(volume, at)) {
            Some(snapshot) => format!("{name}@{}", snapshot.name),
            None => format!("{name} at LSN {at}"),
        }
    }
}

impl Pool {
    /// Makes a volume that shows what a snapshot shows, and that can be written. Waits until the store has all of
    /// the snapshot. With `ttl` it is removed by itself after that time, once nobody uses it.
    ///
    /// # Errors
    /// `NotFound`; `Busy` when the name is taken, or when too many volumes are made from one another; `Unavailable`
    /// while the store does not answer, or lacks some of the snapshot.
    pub async fn clone_volume(
        &self,
        source: &str,
        snapshot: &str,
        name: &str,
        ttl: Option<Duration>,
    ) -> Result<VolumeRecord> {
        check_name(name)?;
        let _one_at_a_time = self.changes.lock().await;
        let found = self.snapshot(source, snapshot)?;
        let of = VolumeId(found.record.volume);
        let durability = self.find(source)?.record().durability;
        let id = self.volumes.lock().new_id("clone", name)?;
        self.shared.wait_destaged_of(of, found.lsn).await?;
        let now = unix_seconds();
        let mut record = VolumeRecord::new(id, name, found.record.size_bytes, durability, now);
        record.expires_at = ttl.map_or(0, |ttl| now.saturating_add(ttl.as_secs().max(1)));
        let made = self.shared.tier.clone_volume((of, found.lsn), VolumeId(id), record.encode());
        if let Err(error) = made.await {
            if !matches!(error.kind(), ErrorKind::Busy | ErrorKind::NotFound) {
                // It may be there, or come to be: the id is never used again. A restart shows it.
                record.state = VolumeState::Purged;
                self.volumes.lock().records.insert(id, record);
            }
            return Err(error.context(format!("clone {source}@{snapshot} as volume {name}")));
        }
        let volume = Volume::new(self.shared.clone(), record.clone());
        let mut volumes = self.volumes.lock();
        volumes.records.insert(id, record.clone());
        volumes.present.insert(name.to_owned(), volume);
        Ok(record)
    }

    /// The volume shows what a snapshot of it shows, and has the size of then. All of its snapshots stay, so that this
    /// can be taken back if there is one of before.
    ///
    /// # Errors
    /// `NotFound`; `Busy` while somebody uses the volume, or after too many rollbacks in a short time; `Unavailable`
    /// while the store does not answer, or lacks some of the volume.
    pub async fn roll_back(&self, name: &str, snapshot: &str) -> Result<VolumeRecord> {
        let _one_at_a_time = self.changes.lock().await;
        let found = self.snapshot(name, snapshot)?;
        let id = VolumeId(found.record.volume);
        // Most of the waiting, while it still is served.
        let lsn = self.shared.log.flush().await?;
        self.shared.wait_destaged_of(id, lsn).await?;
        let volume = self.hold("roll back", name).await?;
        let done = self.roll_back_alone(&volume, found.lsn, found.record.size_bytes).await;
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
        // An LSN behind everything that was ever written to it.
        let since = self.shared.append_record(&record).await?;
        self.shared.wait_destaged_of(volume.id(), since).await?;
        record.size_bytes = size_bytes;
        self.shared.tier.roll_back(volume.id(), at, since, Some(record.encode())).await?;
        Ok(record)
    }

    /// Takes a volume that nobody uses out of what is served, until somebody ends that.
    async fn hold(&self, what: &str, name: &str) -> Result<Arc<Volume>> {
        for look in 0..USER_LOOKS {
            if look > 0 {
                tokio::time::sleep(USER_GRACE).await;
            }
            let mut volumes = self.volumes.lock();
            let Some(volume) = volumes.present.remove(name) else { break };
            // Whoever serves it holds it, and nobody else gets it while the list is locked.
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

    /// Gives a volume another name.
    ///
    /// # Errors
    /// `NotFound`; `Busy` when the name is taken, or somebody uses the volume by the old one.
    pub async fn rename_volume(&self, name: &str, new: &str) -> Result<VolumeRecord> {
        check_name(new)?;
        let _one_at_a_time = self.changes.lock().await;
        self.find(name)?;
        self.volumes.lock().new_id("rename", new)?;
        let volume = self.hold("rename", name).await?;
        let renamed = volume
            .update_record_of_any(|record| new.clone_into(&mut record.name))
            .await
            .map_err(|error| error.context(format!("rename volume {name}")));
        let mut volumes = self.volumes.lock();
        volumes.held = None;
        let name = if renamed.is_ok() { new } else { name };
        volumes.present.insert(name.to_owned(), volume);
        let record = renamed?;
        volumes.records.insert(record.id, record.clone());
        Ok(record)
    }

    /// Makes a volume independent of what it was made from, in the background.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` where it is independent; those of the store.
    pub async fn promote_volume(&self, name: &str) -> Result<VolumeRecord> {
        let _one_at_a_time = self.changes.lock().await;
        let volume = self.find(name)?;
        if self.shared.tier.promote(volume.id()).await? {
            return Ok(volume.record());
        }
        let what = format!("promote volume {name}: it depends on no snapshot");
        Err(Error::new(ErrorKind::Invalid, what))
    }

    /// What a volume was made from and still depends on.
    #[must_use]
    pub fn origin(&self, record: &VolumeRecord) -> Option<NamedOrigin> {
        let origin = self.shared.tier.origin(VolumeId(record.id))?;
        let name = self.volumes.lock().snapshot_name(origin.volume.0, origin.at);
        let promoted_bytes = origin.is_promoted.then_some(origin.done_bytes.min(record.size_bytes));
        Some(NamedOrigin { name, promoted_bytes })
    }

    /// Names of clones that depend on a snapshot.
    ///
    /// # Errors
    /// `Busy`, naming them, if there are any.
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
                // One that was rolled back is made independent by itself.
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
        let shown = names.iter().take(5).cloned().collect::<Vec<_>>().join(", ");
        let more = match names.len().saturating_sub(5) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let what = format!(
            "remove snapshot {volume}@{name}: clones depend on it ({shown}{more}); remove them with `spindle volume \
             rm NAME --now`, or make them independent with `spindle volume promote`, first"
        );
        Err(Error::new(ErrorKind::Busy, what))
    }

    /// Names of volumes whose time is over and that nobody uses.
    #[must_use]
    pub fn expired(&self) -> Vec<String> {
        let now = unix_seconds();
        let volumes = self.volumes.lock();
        let is_over = |volume: &&Arc<Volume>| {
            let expires_at = volume.record().expires_at;
            expires_at != 0 && expires_at <= now && Arc::strong_count(volume) == 1
        };
        volumes.present.values().filter(is_over).map(|volume| volume.record().name).collect()
    }

    /// What purged volumes were made from is kept no longer for their sake. Tried again with every purge.
    pub(super) async fn retire_purged(&self) {
        let purged: Vec<u32> = {
            let volumes = self.volumes.lock();
            let is_purged = |record: &&VolumeRecord| record.state == VolumeState::Purged;
            volumes.records.values().filter(is_purged).map(|record| record.id).collect()
        };
        for id in purged.into_iter().map(VolumeId) {
            if self.shared.tier.is_retirable(id)
                && let Err(error) = self.shared.tier.retire(id).await
            {
                tracing::debug!(error = %error.chain(), "what a purged volume was made from stays for now");
                return;
            }
        }
    }
}
