//! An open pool with everything that must live as long: its keys, its ownership and its store; how
//! it gets its configured volumes, and how it is closed.
//!
//! Invariants:
//! - Order of closing: destage, log, metadata, ownership. The front ends have ended before. A pool
//!   is released only if the store holds everything: another machine may then open it without having
//!   to accept a loss.

use crate::client_record::ClientRecord;
use crate::conditions;
use crate::config::PoolConfig;
use crate::copies::Copies;
use crate::data_stores::OpenDataStores;
use crate::failed_log;
use crate::log_members::OwnerRole;
use crate::marks::settle_lost_writes;
use crate::pool::{LostWrites, Pool, VolumeTraits};
use crate::rebalance::RebalanceState;
use crate::rebuild::RebuildState;
use crate::record::VolumeRecord;
use crate::reservations::Reservations;
use crate::restore::Restored;
use crate::scrub::Scrub;
use crate::steps::Steps;
use crate::superseded::superseded_logs;
use crate::tiers::TiersState;
use async_recursion::async_recursion;
use block::{Epoch, Error, ErrorKind, Result, VolumeId};
use control::keys::KeyRing;
use control::manifest::{NodeDir, Ownership};
use control::store::Store;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use uuid::Uuid;

/// Longest time that an orderly stop spends on moving the log's tail to the store. The rest stays in the log, and the
/// pool stays ours.
pub const CLOSE_DESTAGE_MAX: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 60 });
/// Limit for the destage at close while devices wait for the next daemon: most data was moved
/// before they were left.
const CLOSE_DESTAGE_DEVICES_MAX: Duration = Duration::from_secs(5);
/// Longest wait for the store to name the pool's new owner.
const OWNER_ANSWER_MAX: Duration = Duration::from_secs(10);

/// A pool that is open in this process, with everything that must live as long.
pub struct OpenPool {
    /// The pool itself.
    pub pool: Arc<Pool>,
    /// Its key ring.
    pub keys: tokio::sync::Mutex<KeyRing>,
    /// This process's term over it.
    pub ownership: Ownership,
    /// The settings that it was opened with.
    pub config: PoolConfig,
    /// Lasting conditions of every part of the process.
    pub conditions: block::Conditions,
    /// Findings of the opening of the write log.
    pub recovery: wal::Recovery,
    /// The reason why answered writes may be gone, if they may.
    pub lost_writes: Option<LostWrites>,
    /// The directory of this node, which stays locked.
    pub node: NodeDir,
    /// The store of the pool.
    pub store: Store,
    /// Present for a pool that was restored from a copy.
    pub restored: Option<Restored>,
    /// The data stores, if the pool's segments are there.
    pub data_stores: Option<Arc<dyn OpenDataStores>>,
    /// The state of the job that makes fragments anew.
    pub rebuild: Arc<RebuildState>,
    /// The state of the job that moves fragments to where they would be now.
    pub rebalance: Arc<RebalanceState>,
    /// The state of the job that moves segments between data stores and the object store.
    pub tiers: Arc<TiersState>,
    /// The pool has everything that it was restored from.
    pub is_complete: watch::Sender<bool>,
    /// The role of the owner among the members of the log, if it has several.
    pub role: Option<Box<dyn OwnerRole>>,
    /// The times of the steps of its opening.
    pub steps: Steps,
}

impl OpenPool {
    /// Makes the configured volumes, and settles what earlier losses and take-overs have left to do.
    ///
    /// # Errors
    /// Those of making a volume and of the log.
    #[async_recursion]
    pub async fn make_configured(&self) -> Result<()> {
        self.make_volumes().await?;
        // A volume that the store did not know was just created again: its earlier clients see an empty one.
        if let Some(cause @ (LostWrites::LostLog | LostWrites::TakeOver)) = self.lost_writes {
            self.pool.note_lost_writes(cause, self.ownership.epoch()).await?;
        }
        settle_lost_writes(&self.config.dir)
    }

    /// Returns the work that shows the logs in the directory that the pool went on without. It blocks while it reads them,
    /// and the pool may be closed meanwhile.
    pub fn show_superseded_logs(&self) -> impl FnOnce() + Send + 'static {
        let (dir, pool) = (self.config.dir.clone(), self.ownership.manifest().pool);
        let conditions = self.conditions.clone();
        move || match superseded_logs(&dir, pool) {
            Ok(logs) => conditions::show_superseded(&conditions, &logs),
            Err(error) => tracing::warn!(
                error = %error.chain(),
                "could not look for logs that the pool went on without"
            ),
        }
    }

    /// Opens the reservations, with the clients that had volumes when the pool was last served, except those of volumes
    /// that have lost writes: they have seen writes that are gone.
    #[must_use]
    pub fn open_reservations(&self) -> Reservations {
        let pool_id = self.ownership.manifest().pool;
        let found =
            self.pool.records().into_iter().flat_map(|record| current_clients(&record, pool_id));
        let records = self.pool.clone();
        let record = move |volume, clients| {
            let pool = records.clone();
            async move { pool.record_clients(VolumeId(volume), clients).await }
        };
        let pool = self.pool.clone();
        Reservations::new(pool_id, self.ownership.epoch(), found, record).settled_by(
            move |_volume| {
                let pool = pool.clone();
                async move { pool.settle().await }
            },
        )
    }

    /// Creates the configured volumes that are missing, and grows or re-configures the others as the configuration
    /// says.
    async fn make_volumes(&self) -> Result<()> {
        for wanted in &self.config.volumes {
            let volume = match self.pool.volume(&wanted.name) {
                Some(volume) => volume,
                None if self.pool.is_removed(&wanted.name) => {
                    // An empty volume in its place would look like lost data to its clients.
                    tracing::warn!(
                        volume = wanted.name,
                        "the volume is configured but was removed, and the daemon does not make it \
                         anew: bring it back with `spindle volume restore`, or take it out of the \
                         configuration"
                    );
                    continue;
                }
                None => {
                    let durability = wanted.durability.unwrap_or_default();
                    let (name, size_bytes) = (&wanted.name, wanted.size_bytes);
                    let traits = VolumeTraits {
                        dedicated_key: wanted.dedicated_key.unwrap_or_default(),
                        dedup: wanted.dedup.unwrap_or_default(),
                    };
                    self.pool.create_volume_with(name, size_bytes, durability, traits).await?
                }
            };
            if self.pool.is_closed(&volume) {
                // It is not served and was reported; the others must open all the same.
                continue;
            }
            if wanted.dedicated_key == Some(true) && volume.record().dedicated_key == 0 {
                tracing::warn!(
                    volume = wanted.name,
                    "the volume is configured with a dedicated key and has none: only a new volume gets one"
                );
            }
            let size_bytes = volume.record().size_bytes;
            if size_bytes < wanted.size_bytes {
                self.pool.resize_volume(&wanted.name, wanted.size_bytes, false).await?;
            } else if size_bytes > wanted.size_bytes {
                tracing::warn!(
                    volume = wanted.name,
                    size_bytes,
                    configured_bytes = wanted.size_bytes,
                    "the volume is larger than configured and stays so; `spindle volume resize \
                     --shrink` makes it smaller"
                );
            }
            let (durability, is_read_only) = (wanted.durability, wanted.is_read_only);
            self.pool
                .configure_volume(&wanted.name, durability, is_read_only, wanted.dedup)
                .await?;
        }
        Ok(())
    }

    /// Names the pool's new owner if it can be learned: the metadata knows only that there is one.
    #[async_recursion]
    pub async fn reason_of_loss(&self, found: Error) -> Error {
        if found.kind() != ErrorKind::Fenced {
            return found;
        }
        match tokio::time::timeout(OWNER_ANSWER_MAX, self.ownership.check()).await {
            Ok(Err(error)) if error.kind() == ErrorKind::Fenced => error,
            _ => found,
        }
    }

    /// The pool's copies, without jobs.
    #[async_recursion]
    pub async fn copies(&self) -> Copies {
        let keys = self.keys.lock().await;
        let id = keys.pool();
        let lineage = self.restored.as_ref().map_or(id, |restored| restored.origin.lineage);
        let name = self.config.name.clone();
        Copies::offline(self.pool.clone(), self.store.clone(), &keys, (id, lineage), name)
    }

    /// The pool's scrub, without its job.
    #[async_recursion]
    pub async fn scrub(&self) -> Scrub {
        let (key, id) = {
            let keys = self.keys.lock().await;
            (keys.newest().key.clone(), keys.pool())
        };
        let is_complete = self.is_complete.subscribe();
        Scrub::offline(self.pool.clone(), self.store.clone(), key, id, is_complete)
    }
}

impl OpenPool {
    /// Stops in order: moves the missing data to the store within a bounded time, and releases the
    /// pool if the store has everything.
    ///
    /// # Errors
    /// The first failure. No acknowledged write is lost by it.
    #[async_recursion]
    pub async fn close(self) -> Result<()> {
        self.close_with(false).await
    }

    /// Like [`OpenPool::close`]. With `has_devices`, users wait for the next daemon, and only data
    /// that the store takes at once is moved.
    #[async_recursion]
    pub async fn close_with(self, has_devices: bool) -> Result<()> {
        match self.close_pool(has_devices).await? {
            Closed::AllInStore | Closed::LacksLost(_) => self.ownership.release().await,
            Closed::Lacks(_) => Ok(()),
        }
    }

    /// Closes a pool whose opening has failed or was stopped after its jobs had begun. If volumes
    /// may not have recorded yet that they lose writes, this directory stays the owner and remembers
    /// that they have to.
    #[async_recursion]
    pub async fn close_unserved(self) {
        let closed = match self.lost_writes {
            Some(_) => self.pool.close().await.map(drop),
            None => self.close().await,
        };
        if let Err(error) = closed {
            tracing::warn!(
                error = %error.chain(),
                "could not close a pool whose opening had failed; this directory still owns it"
            );
        }
    }

    /// Like [`OpenPool::close`], but removes the pool instead of releasing it. Returns the time of
    /// the removal.
    ///
    /// # Errors
    /// Also fails if the store does not hold everything; the pool is then not removed.
    #[async_recursion]
    pub async fn remove(self) -> Result<u64> {
        let lacks = match self.close_pool(false).await? {
            Closed::AllInStore => return self.ownership.remove(self.pool.clock().stamp()).await,
            Closed::LacksLost(lacks) => {
                // It stays released, like after a stop.
                self.ownership.release().await?;
                lacks
            }
            Closed::Lacks(lacks) => lacks,
        };
        let what = "remove the pool: the store does not hold all of it, and it was not removed. See \
             `spindle status`, and try again once the cause is gone";
        Err(Error::with_source(lacks.kind(), what, lacks))
    }

    /// Moves the missing data to the store within a bounded time, and closes everything but the
    /// ownership.
    async fn close_pool(&self, has_devices: bool) -> Result<Closed> {
        let destage_max = if has_devices { CLOSE_DESTAGE_DEVICES_MAX } else { CLOSE_DESTAGE_MAX };
        let everything = tokio::time::timeout(destage_max, self.pool.destage_all()).await;
        // With devices, the next daemon continues with the rest. Without devices, the pool may be
        // meant to move to another machine.
        let is_meant = has_devices && everything.is_err();
        let lacking = match everything {
            Ok(Ok(_)) => None,
            Ok(Err(error)) => Some(error),
            Err(_) => Some(Error::new(ErrorKind::Unavailable, "the store did not take it in time")),
        };
        if let Some(error) = &lacking
            && !is_meant
        {
            tracing::warn!(error = %error.chain(), "could not move the log's tail to the store");
        }
        self.pool.clock().keep();
        self.pool.clock().save();
        let closed = self.pool.close().await;
        self.note_failed_log().await;
        let (last_lsn, destaged_lsn) = closed?;
        let lacks = |lacking: Option<Error>| {
            let unknown = || Error::new(ErrorKind::Unavailable, "the newest writes are not there");
            lacking.unwrap_or_else(unknown)
        };
        if destaged_lsn < last_lsn {
            if is_meant {
                tracing::info!(
                    last_lsn = last_lsn.0,
                    destaged_lsn = destaged_lsn.0,
                    "the newest writes wait in this directory's log for the next start; the \
                     directory still owns the pool"
                );
            } else {
                tracing::warn!(
                    last_lsn = last_lsn.0,
                    destaged_lsn = destaged_lsn.0,
                    "the store does not hold the newest writes; they are in the log of this \
                     directory, which still owns the pool"
                );
            }
            return Ok(Closed::Lacks(lacks(lacking)));
        }
        let stalled = self.pool.stalled_volumes();
        let missing: HashSet<[u8; 16]> =
            self.recovery.missing_spill_files.iter().map(|spill| spill.file.id).collect();
        if stalled.values().flatten().any(|file| !missing.contains(&file.id)) {
            tracing::warn!(
                volumes = ?self.names_of(stalled.keys().map(|volume| volume.0)),
                "the store lacks writes of volumes that cannot be destaged; they are in spill \
                 files in the log of this directory, which still owns the pool"
            );
            return Ok(Closed::Lacks(lacks(lacking)));
        }
        match stalled.is_empty() {
            true => Ok(Closed::AllInStore),
            false => Ok(Closed::LacksLost(lacks(lacking))),
        }
    }

    /// Notes a failed write log in the store, because the directory may not take the note.
    #[async_recursion]
    pub async fn note_failed_log(&self) {
        if let Some(note) = self.pool.log_failure_note() {
            failed_log::note(&self.store, &self.node, note).await;
        }
    }

    fn names_of(&self, ids: impl Iterator<Item = u32>) -> Vec<String> {
        let records = self.pool.records();
        let name = |id| match records.iter().find(|record| record.id == id) {
            Some(record) => record.name.clone(),
            None => format!("number {id}"),
        };
        ids.map(name).collect()
    }
}

/// Clients that have the volume in pool `pool`, and have seen nothing that it lacks.
fn current_clients(record: &VolumeRecord, pool: Uuid) -> Vec<(u32, ClientRecord)> {
    let (of_pool, foreign): (Vec<_>, Vec<_>) =
        record.clients.iter().cloned().partition(|client| client.pool == pool);
    if !foreign.is_empty() {
        tracing::info!(
            volume = record.name,
            count = foreign.len(),
            "clients of the pool that this volume was copied from have no part in this one"
        );
    }
    let (current, over): (Vec<_>, Vec<_>) = of_pool.into_iter().partition(|client| {
        !record.has_lost_writes_since(Epoch(client.epoch), client.has_lost_writes)
    });
    for client in over {
        tracing::warn!(
            volume = record.name,
            client = client.label,
            "a client's attachment is over: the volume may have lost writes that the client has seen; the client has \
             to attach again"
        );
    }
    current.into_iter().map(|client| (record.id, client)).collect()
}

/// Contents of the store when a pool was closed.
enum Closed {
    /// Everything.
    AllInStore,
    /// All but writes whose spill files are missing here, so this directory is of no use for them.
    LacksLost(Error),
    /// Not everything: the rest is in this directory.
    Lacks(Error),
}
