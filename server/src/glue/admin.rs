//! The open pool behind the admin socket and the command line.
//!
//! Invariants:
//! - Every request uses the same pool operations, whether a daemon serves the pool or the command
//!   line has opened it.
//! - Secrets are returned only to the client that asked for them.

mod answers;
mod look;
mod status;

use crate::admin::{AdminHandler, DiffExtent, DiffInfo, Reply, Request, VolumeInfo};
use crate::attach::{self, Attachments};
use crate::glue::exports::PoolExports;
use control::keys::NewKey;
use engine::claims::Unattached;
use engine::conditions;
use engine::copies::Copies;
use engine::open_pool::OpenPool;
use engine::pool::VolumeTraits;
use engine::scrub::Scrub;
use engine::snapshot::SnapshotName;
pub use look::Look;

use answers::{Held, copy_infos, list, schedule_info, scrub_info, show, snapshots, volume_info};
use block::{Error, ErrorKind, Result, VolumeId};
use nbd::Server;
use std::sync::Arc;
use std::time::Duration;
use tiering::ChangedExtent;
use tokio::sync::{Mutex, watch};

/// Approximate number of extents in one answer about the difference of two snapshots. Chosen by
/// hand: with one more page of the map, it is still far below the longest reply.
const DIFF_EXTENTS_MAX: usize = 50_000;

/// Answers admin requests.
pub struct AdminPool {
    open: Mutex<Option<Arc<OpenPool>>>,
    endpoints: Vec<String>,
    nbd: Option<Server<PoolExports>>,
    attachments: Option<Arc<Attachments>>,
    copies: Arc<Copies>,
    scrub: Arc<Scrub>,
    is_offline: bool,
    stop: watch::Sender<bool>,
}

impl AdminPool {
    /// Removes a volume whose time is over if it is not in use.
    pub(crate) async fn remove_expired(&self, id: VolumeId) -> Result<Option<String>> {
        let open = self.open().await?;
        let _kept = self.keep_id_detached(&open, "remove", "whose time is over", id).await?;
        open.pool.remove_expired(id).await
    }

    /// Makes the handler of a daemon that serves `endpoints`; a Stop request sets `stop`.
    #[must_use]
    pub fn serving(
        open: Arc<OpenPool>,
        endpoints: Vec<String>,
        nbd: Server<PoolExports>,
        attachments: Arc<Attachments>,
        (copies, scrub): (Arc<Copies>, Arc<Scrub>),
        stop: watch::Sender<bool>,
    ) -> AdminPool {
        let (open, nbd, attachments) = (Mutex::new(Some(open)), Some(nbd), Some(attachments));
        AdminPool { open, endpoints, nbd, attachments, copies, scrub, is_offline: false, stop }
    }

    /// Makes the handler for a command that has opened the pool itself and closes it with
    /// [`AdminHandler::close`].
    #[must_use]
    pub fn offline(open: OpenPool, (copies, scrub): (Copies, Scrub)) -> AdminPool {
        AdminPool {
            open: Mutex::new(Some(Arc::new(open))),
            endpoints: Vec::new(),
            nbd: None,
            attachments: None,
            copies: Arc::new(copies),
            scrub: Arc::new(scrub),
            is_offline: true,
            stop: watch::Sender::new(false),
        }
    }

    fn attachments(&self) -> Result<&Arc<Attachments>> {
        self.attachments.as_ref().ok_or_else(|| {
            let what = "attach and detach volumes: no daemon runs on this directory, and only a daemon \
                        can serve a device; start `spindle serve`";
            Error::new(ErrorKind::Unavailable, what)
        })
    }

    /// Like [`AdminPool::keep_id_detached`], if the volume exists.
    async fn keep_detached(
        &self,
        open: &OpenPool,
        what: &str,
        name: &str,
    ) -> Result<Option<Unattached>> {
        let Some(volume) = open.pool.volume(name) else { return Ok(None) };
        let id = volume.id();
        drop(volume);
        self.keep_id_detached(open, what, name, id).await
    }

    /// Checks that a volume is not attached, and keeps it so as long as the returned guard lives.
    /// `None` if no daemon runs, so that nothing can be attached.
    async fn keep_id_detached(
        &self,
        open: &OpenPool,
        what: &str,
        name: &str,
        id: VolumeId,
    ) -> Result<Option<Unattached>> {
        self.check_id_detached(open, what, name, id).await?;
        let Some(attachments) = &self.attachments else { return Ok(None) };
        attachments.end_leftovers(id).await?;
        attachments.keep_unattached(id, name).map(Some)
    }

    /// Adds the names of the clients that have a volume open to a refusal caused by them.
    fn name_users(&self, id: VolumeId, error: Error) -> Error {
        let attachments = self.attachments.as_ref().filter(|_| error.kind() == ErrorKind::Busy);
        match attachments.and_then(|attachments| attachments.connections_of(id)) {
            Some(users) => error.context(format!("NBD connections have it open, of {users}")),
            None => error,
        }
    }

    async fn check_id_detached(
        &self,
        open: &OpenPool,
        what: &str,
        name: &str,
        id: VolumeId,
    ) -> Result<()> {
        let (user, first) = match &self.attachments {
            Some(attachments) => (attachments.user_of(id).await?, "detach it first"),
            None => (attach::user_in(open.config.dir(), Some(id.0))?, attach::FREE_OFFLINE),
        };
        let Some(user) = user else { return Ok(()) };
        let what = format!(
            "{what} volume {name}: it is attached as {user}; {first}: spindle detach {name}"
        );
        Err(Error::new(ErrorKind::Busy, what))
    }

    async fn open(&self) -> Result<Arc<OpenPool>> {
        self.open.lock().await.clone().ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, "answer an admin request: the pool is closing")
        })
    }
}

impl AdminHandler for AdminPool {
    async fn handle(&self, request: Request) -> Result<Reply> {
        let open = self.open().await?;
        let pool = &open.pool;
        match request {
            Request::VolumeCreate { name, size_bytes, durability, own_key, dedup } => {
                let traits = VolumeTraits { own_key, dedup };
                let made = pool.create_volume_with(&name, size_bytes, durability, traits);
                let volume = made.await?;
                Ok(Reply::Volume(volume_info(&open, &volume.record())))
            }
            Request::VolumeList => Ok(Reply::Volumes { volumes: list(&open) }),
            Request::VolumeShow { name } => Ok(Reply::Volume(show(&open, &name)?)),
            Request::VolumeResize { name, size_bytes, shrink } => {
                let volume = pool.volume(&name).map(|volume| volume.record().size_bytes);
                let is_smaller = shrink && volume.is_some_and(|now| size_bytes < now);
                let _kept = match is_smaller {
                    true => self.keep_detached(&open, "shrink", &name).await?,
                    false => None,
                };
                // Not `shrink`: the volume may have been enlarged since.
                let record = pool.resize_volume(&name, size_bytes, is_smaller).await?;
                let warning = match &self.attachments {
                    Some(attachments) => attachments.why_size_stays(VolumeId(record.id)).await,
                    None => None,
                };
                Ok(Reply::Volume(VolumeInfo { warning, ..volume_info(&open, &record) }))
            }
            Request::VolumeSet { name, durability, is_read_only, dedup } => {
                let set = pool.configure_volume(&name, durability, is_read_only, dedup);
                let record = set.await?;
                Ok(Reply::Volume(volume_info(&open, &record)))
            }
            Request::VolumeRemove { name, erase: true, .. } => {
                let _kept = self.keep_detached(&open, "erase", &name).await?;
                pool.erase_volume(&name).await?;
                let mut message = format!("volume {name} is erased: its key is destroyed");
                let copies = self.copies.wait_without_destroyed_keys().await;
                let copies = copies.unwrap_or_else(|error| vec![error.chain()]);
                if !copies.is_empty() {
                    message.push_str(&format!(
                        "; copies still have it until they are brought up to date next, which `spindle status` \
                         tells: {}",
                        copies.join(", ")
                    ));
                }
                Ok(Reply::Done { message })
            }
            Request::VolumeRemove { name, now, erase: false } => {
                let _kept = self.keep_detached(&open, "remove", &name).await?;
                let record = pool.remove_volume(&name, now).await?;
                Ok(Reply::Volume(volume_info(&open, &record)))
            }
            Request::VolumeRestore { name } => {
                let record = pool.restore_volume(&name).await?;
                Ok(Reply::Volume(volume_info(&open, &record)))
            }
            Request::VolumeAccept { name, give_up_writes } => {
                let record = pool.accept_step_back(&name, give_up_writes).await?;
                Ok(Reply::Volume(volume_info(&open, &record)))
            }
            Request::VolumeRename { name, new_name } => {
                let _kept = self.keep_detached(&open, "rename", &name).await?;
                if open.config.volumes.iter().any(|volume| volume.name == name) {
                    let what = format!(
                        "rename volume {name}: the configuration names it, so the next start would make an empty one; \
                         change the configuration first"
                    );
                    return Err(Error::new(ErrorKind::Invalid, what));
                }
                let id = pool.volume(&name).map(|volume| volume.id()).unwrap_or_default();
                let check = self.check_id_detached(&open, "rename", &name, id);
                let renamed = pool.rename_volume(&name, &new_name, check).await;
                let record = renamed.map_err(|error| self.name_users(id, error))?;
                Ok(Reply::Volume(volume_info(&open, &record)))
            }
            Request::VolumePromote { name } => {
                let record = pool.promote_volume(&name).await?;
                Ok(Reply::Volume(volume_info(&open, &record)))
            }
            Request::Clone { snapshot, name, ttl_seconds } => {
                let of: SnapshotName = snapshot.parse()?;
                let (source, snapshot) = of.single()?;
                let ttl = ttl_seconds.map(Duration::from_secs);
                let record = pool.clone_volume(source, snapshot, &name, ttl).await?;
                Ok(Reply::Volume(volume_info(&open, &record)))
            }
            Request::SnapshotRollback { snapshot } => {
                let of: SnapshotName = snapshot.parse()?;
                let (volume, snapshot) = of.single()?;
                let _kept = self.keep_detached(&open, "roll back", volume).await?;
                let id = VolumeId(pool.snapshot(volume, snapshot)?.record.volume);
                let check = self.check_id_detached(&open, "roll back", volume, id);
                let rolled_back = pool.roll_back(volume, snapshot, check).await;
                let record = rolled_back.map_err(|error| self.name_users(id, error))?;
                Ok(Reply::Volume(volume_info(&open, &record)))
            }
            Request::SnapshotCreate { snapshot } => {
                let made = pool.create_snapshots(&snapshot.parse()?).await?;
                Ok(snapshots(&open, &made, &Held::new()))
            }
            Request::SnapshotList { volume, space } => {
                let found = pool.snapshots(volume.as_deref())?;
                let held = if space { pool.held_by(&found).await? } else { Held::new() };
                Ok(snapshots(&open, &found, &held))
            }
            Request::SnapshotSchedule { volume, set, off } => {
                match (&set, off) {
                    (Some(set), false) => {
                        pool.set_schedule(&volume, Some((&set.cron, set.keep))).await?;
                    }
                    (None, true) => pool.set_schedule(&volume, None).await?,
                    (None, false) => {}
                    (Some(_), true) => {
                        let what = format!("schedule snapshots of {volume}: set or off, not both");
                        return Err(Error::new(ErrorKind::Invalid, what));
                    }
                }
                let plan = pool.schedule_plan(&volume)?;
                Ok(Reply::Schedule(schedule_info(volume, plan)))
            }
            Request::SnapshotDiff { older, newer, offset } => {
                let names = (older.parse()?, newer.parse()?);
                let (found, next_offset) = pool
                    .snapshot_differences((&names.0, &names.1), offset, DIFF_EXTENTS_MAX)
                    .await?;
                let extent = |one: ChangedExtent| DiffExtent {
                    offset: one.offset,
                    length: one.length_bytes,
                    is_hole: one.is_hole,
                };
                let extents = found.into_iter().map(extent).collect();
                Ok(Reply::SnapshotDiff(DiffInfo { extents, next_offset }))
            }
            Request::SnapshotRemove { snapshot } => {
                let name: SnapshotName = snapshot.parse()?;
                let (volume, name) = name.single()?;
                pool.remove_snapshot(volume, name).await?;
                let message = format!(
                    "snapshot {volume}@{name} is removed; the store gets back in the background what only it \
                     showed"
                );
                Ok(Reply::Done { message })
            }
            Request::CopyAdd(new) => {
                self.copies.add(new).await?;
                Ok(Reply::Copies { copies: copy_infos(&open, &self.copies).await? })
            }
            Request::CopyRemove { url } => {
                self.copies.remove(&url).await?;
                let message = format!(
                    "{url} is brought up to date no more; what is there stays, and can be restored or deleted"
                );
                Ok(Reply::Done { message })
            }
            Request::CopyList => {
                Ok(Reply::Copies { copies: copy_infos(&open, &self.copies).await? })
            }
            Request::CopySync { url } => {
                let state = self.copies.sync(&url).await?;
                let message = format!(
                    "{url} holds everything up to LSN {}, as its state {}",
                    state.destaged_lsn, state.number
                );
                Ok(Reply::Done { message })
            }
            Request::RestoreGiveUpMissing => {
                let restored = open.restored.as_ref().filter(|_| !*open.is_whole.borrow());
                let Some(restored) = restored.filter(|_| !self.is_offline) else {
                    let what =
                        "give up what the copy lacks: no daemon is fetching this pool from a copy";
                    return Err(Error::new(ErrorKind::Invalid, what));
                };
                Ok(Reply::Done { message: restored.give_up_missing(pool.tier())? })
            }
            Request::ScrubStart { bytes_per_second, every_seconds } => {
                self.scrub.begin(bytes_per_second, every_seconds).await?;
                Ok(Reply::Scrub(scrub_info(&self.scrub).await?))
            }
            Request::ScrubStop => {
                self.scrub.end().await?;
                let message = "the scrub is stopped; `spindle scrub start` goes on where it was, if it was under way";
                Ok(Reply::Done { message: message.to_owned() })
            }
            Request::ScrubStatus => Ok(Reply::Scrub(scrub_info(&self.scrub).await?)),
            Request::Status => Ok(Reply::Status(Box::new(self.status(&open).await))),
            Request::Flush => {
                let lsn = pool.destage_all().await.map_err(|error| name_asides(&open, error))?;
                Ok(Reply::Done { message: format!("the store holds everything up to LSN {lsn}") })
            }
            // Next to the open pool, not through it: a walk of hours must not delay destage.
            Request::Fsck => {
                let (pool, key) = {
                    let keys = open.keys.lock().await;
                    (keys.pool(), keys.newest().key.clone())
                };
                let found = engine::fsck::fsck_of(&open.config, pool, &key).await?;
                Ok(Reply::Fsck(crate::serve::fsck_info(found)))
            }
            Request::RepairCounts { segments } => {
                let repaired = pool.tier().repair_counts(&segments).await?;
                let said = |(number, was, is): &(u64, u32, u32)| {
                    format!("segment {number}: {was} is now {is}")
                };
                let each: Vec<String> = repaired.iter().map(said).collect();
                let message = match each.is_empty() {
                    true => "every count is right by now".to_owned(),
                    false => format!(
                        "counts of live blocks that were wrong are put right: {}",
                        each.join(", ")
                    ),
                };
                Ok(Reply::Done { message })
            }
            Request::KeyBackup { replace } => {
                let key = {
                    let mut keys = open.keys.lock().await;
                    let added = keys.add_recovery(replace).await;
                    conditions::show_recovery_key(&open.conditions, keys.has_recovery());
                    added?
                };
                Ok(Reply::RecoveryKey { key })
            }
            Request::KeyRotate { new } => {
                let new = match new {
                    Some(new) => new,
                    None => NewKey::File { path: key_file(&open)? },
                };
                let rotated = {
                    let mut keys = open.keys.lock().await;
                    let rotated = keys.rotate(&new).await;
                    conditions::show_recovery_key(&open.conditions, keys.has_recovery());
                    rotated?
                };
                Ok(Reply::KeyRotated { kind: rotated.kind, message: rotated.message })
            }
            Request::Attach { name, options } => {
                Ok(Reply::Attached(self.attachments()?.attach(&name, options).await?))
            }
            Request::Detach { target, force } => {
                let name = self.attachments()?.detach(&target, force).await?;
                Ok(Reply::Done { message: format!("volume {name} is detached") })
            }
            Request::AttachList => {
                let all = self.attachments()?;
                Ok(Reply::Attachments { attachments: all.list().await?, clients: all.clients() })
            }
            Request::Stop => {
                self.stop.send_replace(true);
                Ok(Reply::Done { message: "stopping".to_owned() })
            }
        }
    }

    async fn close(&self) -> Result<()> {
        let Some(open) = self.open.lock().await.take() else { return Ok(()) };
        match (self.is_offline, Arc::into_inner(open)) {
            (true, Some(open)) => open.close().await,
            // The daemon closes its pool itself.
            (false, _) => Ok(()),
            (true, None) => {
                Err(Error::new(ErrorKind::Busy, "close the pool: a request is still running"))
            }
        }
    }
}

/// The configured key file, for a rotation without an explicit key source.
fn key_file(open: &OpenPool) -> Result<std::path::PathBuf> {
    open.config.key_file.clone().ok_or_else(|| {
        let what = "rotate the key: the pool is not opened by a key file; say what opens it from \
                    now on (see `spindle key rotate --help`)";
        Error::new(ErrorKind::Invalid, what)
    })
}

/// Name of the volume as operators know it, or its number if it has none.
fn name_of(open: &OpenPool, volume: u32) -> String {
    let records = open.pool.records();
    let record = records.into_iter().find(|record| record.id == volume);
    record.map_or_else(|| format!("number {volume}"), |record| record.name)
}

/// Adds the names of the volumes that keep the store from holding everything.
fn name_asides(open: &OpenPool, error: Error) -> Error {
    let aside = open.pool.destage_progress().aside;
    if aside.is_empty() {
        return error;
    }
    let names: Vec<String> = aside.keys().map(|volume| name_of(open, *volume)).collect();
    error.context(format!(
        "not everything of volume {} can be copied to the store; `spindle status` says why and what \
         to do",
        names.join(", ")
    ))
}
