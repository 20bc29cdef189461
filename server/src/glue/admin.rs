//! The open pool behind the admin socket and the command line.
//!
//! Invariants:
//! - Every request goes through the same pool operations, whether a daemon serves or the command
//!   line has opened the pool for itself.
//! - Secrets go back to the client that asked and nowhere else.

use crate::admin::{
    AdminHandler, AsideInfo, AtRisk, BadSegmentInfo, CacheInfo, CopyInfo, CopyStateInfo, DedupInfo,
    DestageInfo, DiffExtent, DiffInfo, KeySlotInfo, LogInfo, NbdInfo, Reply, Request, RestoreInfo,
    ScheduleInfo, ScheduledInfo, ScrubInfo, SnapshotInfo, SpaceInfo, StatusInfo, TierInfo,
    VolumeInfo,
};
use crate::attach::{self, Attachments};
use crate::copies::{Copies, CopyStatus};
use crate::glue::exports::PoolExports;
use crate::keys::NewKey;
use crate::pool::{NamedSnapshot, SchedulePlan, VolumeTraits};
use crate::record::{VolumeRecord, VolumeState};
use crate::restore::Restored;
use crate::scrub::BadSegment;
use crate::scrub::Scrub;
use crate::serve::OpenPool;
use crate::snapshot::SnapshotName;
use block::{Error, ErrorKind, Result, VolumeId};
use nbd::Server;
use std::sync::Arc;
use std::time::Duration;
use tiering::cache::CacheStatus;
use tiering::{ChangedExtent, DedupStatus, ReclaimStatus};
use tokio::sync::{Mutex, watch};

/// Age of data that is only in the log, as a multiple of the configured one, from which the status
/// warns. Chosen by hand: a window that is just being written is not worth a warning.
const LATE_FACTOR: f64 = 2.0;

/// Extents of one answer about the difference of two snapshots, about. Chosen by hand: a page of the map more is
/// far from the longest reply.
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
    /// Removes a volume whose time is over, unless somebody uses it.
    pub(crate) async fn remove_expired(&self, id: VolumeId) -> Result<Option<String>> {
        let open = self.open().await?;
        self.check_id_detached(&open, "remove", "whose time is over", id).await?;
        open.pool.remove_expired(id).await
    }

    /// For a daemon that serves `endpoints`; a Stop request sets `stop`.
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

    /// For a command that has opened the pool itself and closes it by [`AdminHandler::close`].
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

    /// What a person should know of the pool's copies.
    async fn copy_warnings(&self) -> Vec<String> {
        let copies = match copy_infos(&self.copies).await {
            Ok(copies) => copies,
            Err(error) => return vec![format!("the copies are not known: {}", error.chain())],
        };
        let warnings = |copy: CopyInfo| {
            let CopyInfo { url, failing_seconds, .. } = copy;
            let failure = copy.failure.map(|failure| {
                let seconds = failing_seconds.unwrap_or(0);
                format!("the copy {url} is not brought up to date, for {seconds} s: {failure}")
            });
            let keys = copy.has_destroyed_keys.then(|| {
                format!("the copy {url} may still have keys of volumes that were erased: it was not reached since")
            });
            failure.into_iter().chain(keys)
        };
        copies.into_iter().flat_map(warnings).collect()
    }

    /// What a person should know of the pool's scrub.
    async fn scrub_warnings(&self) -> Vec<String> {
        let info = match scrub_info(&self.scrub).await {
            Ok(info) => info,
            Err(error) => return vec![format!("the scrub is not known: {}", error.chain())],
        };
        let mut warnings = Vec::new();
        if let Some(failure) = info.failure {
            let seconds = info.failing_seconds.unwrap_or(0);
            warnings.push(format!("the scrub waits, for {seconds} s: {failure}"));
        }
        let count = info.bad_count.max(info.bad.len() as u64);
        if count > 0 {
            warnings.push(format!(
                "the scrub has found {count} segments that are damaged or missing, and that no copy has whole: \
                 `spindle scrub status` names them"
            ));
        }
        warnings
    }

    fn attachments(&self) -> Result<&Arc<Attachments>> {
        self.attachments.as_ref().ok_or_else(|| {
            let what = "attach and detach volumes: no daemon runs on this directory, and only a daemon \
                        can serve a device; start `spindle serve`";
            Error::new(ErrorKind::Unavailable, what)
        })
    }

    async fn check_detached(&self, open: &OpenPool, what: &str, name: &str) -> Result<()> {
        let Some(volume) = open.pool.volume(name) else { return Ok(()) };
        let id = volume.id();
        drop(volume);
        self.check_id_detached(open, what, name, id).await
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

/// A record as the admin sees it.
fn volume_info(open: &OpenPool, record: &VolumeRecord) -> VolumeInfo {
    let removed_at = match record.state {
        VolumeState::Removed { removed_at } => Some(removed_at),
        VolumeState::Present | VolumeState::Purged => None,
    };
    let aside = open.pool.destage_progress().aside.remove(&record.id);
    let retention = open.config.settings().deleted_retention.duration().as_secs();
    let origin = open.pool.origin(record);
    VolumeInfo {
        id: record.id,
        name: record.name.clone(),
        size_bytes: record.size_bytes,
        durability: record.durability,
        is_read_only: record.is_read_only,
        created_at: record.created_at,
        removed_at,
        purge_at: removed_at.map(|at| at.saturating_add(retention)),
        is_stepped_back: record.is_stepped_back,
        is_closed: aside.as_ref().is_some_and(|aside| aside.is_closed)
            || open.pool.is_keyless(record),
        is_aside: aside.is_some(),
        origin: origin.as_ref().map(|origin| origin.name.clone()),
        promoted_bytes: origin.and_then(|origin| origin.promoted_bytes),
        expires_at: Some(record.expires_at).filter(|at| *at != 0),
        own_key: Some(record.own_key).filter(|id| *id != 0),
        dedup: dedup_info([record].into_iter(), &open.pool.dedup_status()),
    }
}

/// `None`: it is off, and nothing was found.
fn dedup_info<'a>(
    records: impl Iterator<Item = &'a VolumeRecord>,
    status: &DedupStatus,
) -> Option<DedupInfo> {
    let mut info = DedupInfo::default();
    for record in records {
        let found = status.found.get(&VolumeId(record.id)).copied().unwrap_or_default();
        info.is_on |= record.is_dedup;
        info.block_count += found.block_count;
        info.duplicate_count += found.duplicate_count;
    }
    info.ratio = ratio(info.block_count, info.block_count.saturating_sub(info.duplicate_count));
    Some(info).filter(|info| info.is_on || info.block_count > 0)
}

/// To three digits; 0 of nothing.
fn ratio(part: u64, whole: u64) -> f64 {
    match whole {
        0 => 0.0,
        _ => (part as f64 / whole as f64 * 1000.0).round() / 1000.0,
    }
}

/// `held`: bytes that each alone holds, by volume and LSN, as far as that is known.
fn snapshots(open: &OpenPool, found: &[NamedSnapshot], held: &Held) -> Reply {
    let destaged = open.pool.log_status().destaged_lsn;
    let aside = open.pool.destage_progress().aside;
    let is_whole = |one: &NamedSnapshot| {
        aside.get(&one.record.volume).is_none_or(|aside| one.lsn.0 < aside.since_lsn)
    };
    let info = |one: &NamedSnapshot| SnapshotInfo {
        volume: one.volume.clone(),
        name: one.record.name.clone(),
        lsn: one.lsn.0,
        size_bytes: one.record.size_bytes,
        created_at: one.record.created_at,
        is_in_store: one.lsn <= destaged && is_whole(one),
        held_bytes: held.get(&(one.record.volume, one.lsn.0)).copied(),
    };
    Reply::Snapshots { snapshots: found.iter().map(info).collect() }
}

fn restore_info(open: &OpenPool, restored: &Restored) -> RestoreInfo {
    let (origin, counts) = (&restored.origin, restored.counts());
    RestoreInfo {
        url: origin.url.clone(),
        state: origin.state.number,
        as_of: origin.state.as_of,
        is_whole: *open.is_whole.borrow(),
        left_bytes: counts.left_bytes,
        done_bytes: counts.done_bytes,
        left_seconds: counts.left_seconds,
        bad_count: counts.bad_count.max(origin.lost_count),
    }
}

async fn scrub_info(scrub: &Scrub) -> Result<ScrubInfo> {
    let status = scrub.status().await?;
    let mut info = ScrubInfo {
        is_served: status.is_serving,
        failing_seconds: status.failure.as_ref().map(|(_, since)| since.elapsed().as_secs()),
        failure: status.failure.map(|(why, _)| why),
        ..ScrubInfo::default()
    };
    let Some(record) = status.record else { return Ok(info) };
    let bad = |bad: BadSegment| {
        let BadSegment { number, object, why } = bad;
        BadSegmentInfo { number, object, why }
    };
    info.is_running = record.is_running();
    info.is_stopped = record.is_stopped;
    info.started_at = Some(record.started_at);
    info.ended_at = record.ended_at;
    info.next_at = record.next_at();
    info.permille = match record.ended_at {
        Some(_) => 1000,
        None => record.position * 1000 / record.until.max(1),
    };
    info.bytes_per_second = record.bytes_per_second;
    info.every_seconds = record.every_seconds;
    info.segment_count = record.segment_count;
    info.frame_count = record.frame_count;
    info.object_bytes = record.object_bytes;
    info.mended_count = record.mended_count;
    info.bad_count = record.bad_count;
    info.bad = record.bad.into_iter().map(bad).collect();
    Ok(info)
}

async fn copy_infos(copies: &Copies) -> Result<Vec<CopyInfo>> {
    let info = |status: CopyStatus| {
        let (spec, counts) = (status.spec, status.counts);
        let newest = status.state.as_ref().and_then(|state| state.newest.as_ref());
        let failure = status.state.as_ref().and_then(|state| state.failure.as_ref());
        CopyInfo {
            url: spec.url,
            env_prefix: spec.env_prefix,
            interval_seconds: spec.interval_seconds,
            is_snapshots_only: spec.is_snapshots_only,
            bytes_per_second: spec.bytes_per_second,
            created_at: spec.created_at,
            is_running: status.state.is_some(),
            state: newest.map(|newest| CopyStateInfo {
                number: newest.number,
                as_of: newest.as_of,
                destaged_lsn: newest.destaged_lsn,
                segment_count: newest.segment_count,
                segment_bytes: newest.segment_bytes,
                aside_count: newest.aside_count,
            }),
            lag_seconds: status.lag_seconds,
            lag_bytes: status.lag_bytes,
            has_destroyed_keys: status.has_destroyed_keys,
            pass_permille: counts.pass_permille,
            copied_bytes: counts.copied_bytes,
            copied_count: counts.copied_count,
            deleted_count: counts.deleted_count,
            waiting_count: counts.waiting_count,
            damaged_count: counts.damaged_count + counts.missing_count,
            failure: failure.map(|(why, _)| why.clone()),
            failing_seconds: failure.map(|(_, since)| since.elapsed().as_secs()),
        }
    };
    Ok(copies.status().await?.into_iter().map(info).collect())
}

type Held = std::collections::BTreeMap<(u32, u64), u64>;

fn schedule_info(volume: String, plan: SchedulePlan) -> ScheduleInfo {
    let one = |(one, why): (NamedSnapshot, Option<&'static str>)| ScheduledInfo {
        name: one.record.name,
        created_at: one.record.created_at,
        kept_as: why.map(str::to_owned),
    };
    ScheduleInfo {
        volume,
        cron: plan.schedule.as_ref().map(|schedule| schedule.cron.clone()),
        keep: plan.schedule.map(|schedule| schedule.keep),
        next_at: plan.next_at,
        snapshots: plan.snapshots.into_iter().map(one).collect(),
    }
}

fn list(open: &OpenPool) -> Vec<VolumeInfo> {
    let mut volumes: Vec<VolumeInfo> =
        open.pool.records().iter().map(|record| volume_info(open, record)).collect();
    volumes.sort_by(|a, b| (&a.name, a.id).cmp(&(&b.name, b.id)));
    volumes
}

fn show(open: &OpenPool, name: &str) -> Result<VolumeInfo> {
    // A present volume comes before a removed one of the same name.
    let mut found: Vec<VolumeInfo> =
        list(open).into_iter().filter(|volume| volume.name == name).collect();
    found.sort_by_key(|volume| volume.removed_at.is_some());
    found.into_iter().next().ok_or_else(|| {
        let what = format!("show volume {name}: there is none; `spindle volume list` shows all");
        Error::new(ErrorKind::NotFound, what)
    })
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
                if shrink && volume.is_some_and(|now| size_bytes < now) {
                    self.check_detached(&open, "shrink", &name).await?;
                }
                let record = pool.resize_volume(&name, size_bytes, shrink).await?;
                Ok(Reply::Volume(volume_info(&open, &record)))
            }
            Request::VolumeSet { name, durability, is_read_only, dedup } => {
                let set = pool.configure_volume(&name, durability, is_read_only, dedup);
                let record = set.await?;
                Ok(Reply::Volume(volume_info(&open, &record)))
            }
            Request::VolumeRemove { name, erase: true, .. } => {
                self.check_detached(&open, "erase", &name).await?;
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
                self.check_detached(&open, "remove", &name).await?;
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
                self.check_detached(&open, "rename", &name).await?;
                if open.config.settings().volumes.iter().any(|volume| volume.name == name) {
                    let what = format!(
                        "rename volume {name}: the configuration names it, so the next start would make an empty one; \
                         change the configuration first"
                    );
                    return Err(Error::new(ErrorKind::Invalid, what));
                }
                let id = pool.volume(&name).map(|volume| volume.id()).unwrap_or_default();
                let check = self.check_id_detached(&open, "rename", &name, id);
                let record = pool.rename_volume(&name, &new_name, check).await?;
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
                self.check_detached(&open, "roll back", volume).await?;
                let id = VolumeId(pool.snapshot(volume, snapshot)?.record.volume);
                let check = self.check_id_detached(&open, "roll back", volume, id);
                let record = pool.roll_back(volume, snapshot, check).await?;
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
            Request::CopyAdd(spec) => {
                self.copies.add(spec).await?;
                Ok(Reply::Copies { copies: copy_infos(&self.copies).await? })
            }
            Request::CopyRemove { url } => {
                self.copies.remove(&url).await?;
                let message = format!(
                    "{url} is brought up to date no more; what is there stays, and can be restored or deleted"
                );
                Ok(Reply::Done { message })
            }
            Request::CopyList => Ok(Reply::Copies { copies: copy_infos(&self.copies).await? }),
            Request::CopySync { url } => {
                let state = self.copies.sync(&url).await?;
                let message = format!(
                    "{url} holds everything up to LSN {}, as its state {}",
                    state.destaged_lsn, state.number
                );
                Ok(Reply::Done { message })
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
            // Beside the open pool, not through it: a walk of hours must not hold up destage.
            Request::Fsck => {
                let (pool, key) = {
                    let keys = open.keys.lock().await;
                    (keys.pool(), keys.newest().key.clone())
                };
                Ok(Reply::Fsck(crate::serve::fsck_of(&open.config, pool, &key).await?))
            }
            Request::KeyBackup { replace } => {
                let key = open.keys.lock().await.add_recovery(replace).await?;
                Ok(Reply::RecoveryKey { key })
            }
            Request::KeyRotate { new } => {
                let new = match new {
                    Some(new) => new,
                    None => NewKey::File { path: key_file(&open)? },
                };
                let rotated = open.keys.lock().await.rotate(&new).await?;
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

/// The configured key file, for a rotation that names nothing else.
fn key_file(open: &OpenPool) -> Result<std::path::PathBuf> {
    open.config.settings().keys.file.clone().ok_or_else(|| {
        let what = "rotate the key: the pool is not opened by a key file; say what opens it from \
                    now on (see `spindle key rotate --help`)";
        Error::new(ErrorKind::Invalid, what)
    })
}

fn aside_info(open: &OpenPool, volume: u32, aside: crate::destage::Aside) -> AsideInfo {
    AsideInfo {
        volume,
        name: name_of(open, volume),
        since_lsn: aside.since_lsn,
        log_bytes: aside.log_bytes,
        side_bytes: aside.side_bytes,
        side_file_count: aside.side_file_count,
        is_refusing_writes: aside.is_refusing_writes,
        is_closed: aside.is_closed,
        reason: aside.reason,
    }
}

/// The name of a volume that people know; its number where it has none.
fn name_of(open: &OpenPool, volume: u32) -> String {
    let records = open.pool.records();
    let record = records.into_iter().find(|record| record.id == volume);
    record.map_or_else(|| format!("number {volume}"), |record| record.name)
}

/// Says by name which volumes keep the store from holding everything.
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

fn aside_warning(volume: &str, aside: &crate::destage::Aside) -> String {
    if aside.is_closed {
        return format!("volume {volume} is not served: {}", aside.reason);
    }
    let refusing = if aside.is_refusing_writes { "; it refuses writes" } else { "" };
    format!(
        "volume {volume} cannot be destaged: its writes since LSN {} are on this machine only, {} \
         bytes in {} side files and {} bytes in the log{refusing}: {}. Bring the damaged object of the store \
         back, or write over what is damaged, or give the volume up with `spindle volume rm --now \
         {volume}`",
        aside.since_lsn, aside.side_bytes, aside.side_file_count, aside.log_bytes, aside.reason
    )
}

fn nbd_info(status: nbd::Status) -> NbdInfo {
    NbdInfo {
        connection_count: status.connection_count as u64,
        refused_count: status.refused_count as u64,
        request_count: status.request_count,
        error_count: status.error_count,
        payload_bytes: status.payload_bytes as u64,
    }
}

fn cache_info(status: &CacheStatus) -> CacheInfo {
    CacheInfo {
        is_on: status.is_on,
        frame_count: status.frame_count,
        used_bytes: status.used_bytes,
        pending_bytes: status.pending_bytes,
        insert_count: status.insert_count,
        dropped_count: status.dropped_count,
        bad_count: status.bad_count,
        error_count: status.error_count,
    }
}

/// What is wrong with the read cache: it costs speed, nothing else.
fn cache_warning(open: &OpenPool, status: Option<&CacheStatus>) -> Option<String> {
    let dir = open.config.cache_dir()?.display();
    match status {
        None => Some(format!(
            "the read cache in {dir} could not be opened, and reads come from the store: see the log, \
             and restart spindle once the cause is gone"
        )),
        Some(status) if !status.is_on => Some(format!(
            "the read cache in {dir} has turned itself off after {} errors, and reads come from the \
             store: check the disk and its space, then restart spindle",
            status.error_count
        )),
        Some(status) if status.bad_count > 0 => Some(format!(
            "the read cache in {dir} gave {} frames that do not verify; each was read from the store \
             instead: check its disk",
            status.bad_count
        )),
        Some(_) => None,
    }
}

/// What does not come through to the store or from it, at this moment.
fn store_warnings(open: &OpenPool, tier: &tiering::TierStatus) -> Vec<String> {
    let mut warnings = Vec::new();
    if let Some((since, error)) = &*open.no_contact.lock() {
        warnings.push(format!(
            "the store has not answered for {} s, or refuses: {error}; writes go on until the log is \
             full",
            since.elapsed().as_secs()
        ));
    }
    if let Some(failure) = &tier.upload_failure {
        warnings.push(format!(
            "uploads to the store have failed for {} s and are tried again; writes go on until the \
             log is full; check the store, the network and the credentials: {}",
            failure.lasts.as_secs(),
            failure.error
        ));
    }
    if let Some(failure) = &tier.frames.store_failure {
        warnings.push(format!(
            "the last read from the store failed, {} s ago; reads wait for up to two minutes; check \
             the store, the network and the credentials: {}",
            failure.age.as_secs(),
            failure.error
        ));
    }
    warnings
}

fn space_info(reclaim: &ReclaimStatus, destaged_bytes: u64, metadata_bytes: u64) -> SpaceInfo {
    let space = reclaim.space.unwrap_or_default();
    let written_bytes = destaged_bytes + reclaim.written_bytes + metadata_bytes;
    SpaceInfo {
        is_known: reclaim.space.is_some(),
        segment_count: space.segment_count,
        stored_bytes: space.object_bytes,
        live_bytes: space.live_bytes,
        space_amplification: ratio(space.object_bytes, space.live_bytes),
        reclaimed_bytes: reclaim.forgotten_bytes,
        moved_bytes: reclaim.written_bytes,
        metadata_bytes,
        write_amplification: ratio(written_bytes, destaged_bytes),
        stuck_count: reclaim.stuck_count,
        held_count: reclaim.held_count,
    }
}

impl AdminPool {
    async fn status(&self, open: &OpenPool) -> StatusInfo {
        let log = open.pool.log_status();
        let tier = open.pool.tier_status();
        let progress = open.pool.destage_progress();
        let manifest = open.ownership.manifest();
        let (has_recovery_key, key_slots) = {
            let keys = open.keys.lock().await;
            (keys.has_recovery(), keys.slots())
        };
        let key_slots = key_slots.into_iter();
        let key_slots: Vec<KeySlotInfo> =
            key_slots.map(|(kind, created_at)| KeySlotInfo { kind, created_at }).collect();
        let oldest_seconds = log.oldest_age().map_or(0.0, |age| age.as_secs_f64());
        let failure = open.pool.fatal().map(|error| error.chain());
        let mut warnings = Vec::new();
        if let Some(failure) = &failure {
            warnings.push(format!("the pool has stopped: {failure}; restart spindle"));
        }
        if let Some(failure) = &progress.failure {
            warnings.push(format!("data does not reach the store: {failure}"));
        }
        if let Some(failure) = &tier.metadata_failure {
            warnings.push(format!(
                "the metadata database has ended and is being opened anew; reads and writes go on \
                 from memory and the log: {failure}"
            ));
        }
        warnings.extend(store_warnings(open, &tier));
        warnings.extend(cache_warning(open, tier.frames.cache.as_ref()));
        for (volume, aside) in &progress.aside {
            warnings.push(aside_warning(&name_of(open, *volume), aside));
        }
        if !has_recovery_key {
            warnings.push("no recovery key was made: run `spindle key backup`".to_owned());
        }
        warnings.extend(self.copy_warnings().await);
        warnings.extend(self.scrub_warnings().await);
        let max_age = open.config.settings().destage.max_age.duration().as_secs_f64();
        if oldest_seconds > max_age * LATE_FACTOR {
            warnings.push(format!(
                "the oldest write that only this machine has is {oldest_seconds:.0} s old; \
                 destage.max_age is {max_age:.0} s"
            ));
        }
        let stuck_count = open.pool.reclaim_status().stuck_count;
        if stuck_count > 0 {
            warnings.push(format!(
                "{stuck_count} segments cannot be reclaimed: something in them is damaged; `spindle fsck` says what"
            ));
        }
        if log.is_full {
            warnings.push("the write log is full: writers wait for the store".to_owned());
        }
        if let Some(reason) = &open.recovery.lost_reason
            && !open.recovery.is_tail_proven
        {
            warnings.push(format!("writes may have been lost at the last reboot: {reason}"));
        }
        let side_bytes: u64 = progress.aside.values().map(|aside| aside.side_bytes).sum();
        let stepped_back = open.pool.volumes().into_iter().map(|volume| volume.record());
        for record in stepped_back.filter(|record| record.is_stepped_back) {
            let name = record.name;
            warnings.push(format!(
                "volume {name} refuses clients on other machines, because answered writes may be \
                 gone since a reboot, a take-over or the loss of the write log: restart its clients, then run \
                 `spindle volume accept {name}`"
            ));
        }
        StatusInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pool: manifest.pool.to_string(),
            name: manifest.name.clone(),
            store: open.config.store_url().to_owned(),
            epoch: manifest.epoch,
            host: manifest.owner.host.clone(),
            pid: manifest.owner.pid,
            opened_at: manifest.owner.opened_at,
            is_offline: self.is_offline,
            endpoints: self.endpoints.clone(),
            volume_count: open.pool.volumes().len() as u64,
            at_risk: AtRisk { oldest_seconds, bytes: log.undestaged_bytes + side_bytes },
            log: LogInfo {
                used_bytes: log.used_bytes,
                ring_bytes: log.ring_bytes,
                last_lsn: log.last_lsn.0,
                durable_lsn: log.durable_lsn.0,
                destaged_lsn: log.destaged_lsn.0,
                failure,
            },
            destage: DestageInfo {
                window_count: progress.window_count,
                destaged_bytes: progress.destaged_bytes,
                stored_bytes: progress.stored_bytes,
                failure_count: progress.failure_count,
                failure: progress.failure,
                aside: progress
                    .aside
                    .into_iter()
                    .map(|(volume, aside)| aside_info(open, volume, aside))
                    .collect(),
            },
            tier: TierInfo {
                commit_number: tier.map.commit_number,
                range_count: tier.map.range_count as u64,
                upload_retry_count: tier.upload_retry_count,
                upload_failure: tier.upload_failure.map(|failure| failure.error),
                read_failure: tier.frames.store_failure.map(|failure| failure.error),
                reopen_count: tier.reopen_count,
                memory_hit_count: tier.frames.memory_hit_count,
                cache_hit_count: tier.frames.cache_hit_count,
                store_frame_count: tier.frames.store_frame_count,
                store_refetch_count: tier.frames.store_refetch_count,
                store_bad_count: tier.frames.store_bad_count,
                mended_count: tier.mended_count,
            },
            space: space_info(
                &open.pool.reclaim_status(),
                progress.stored_bytes,
                tier.metadata_written_bytes,
            ),
            dedup: dedup_info(open.pool.records().iter(), &open.pool.dedup_status()),
            restored: open.restored.as_ref().map(|restored| restore_info(open, restored)),
            nbd: self.nbd.as_ref().map(|server| nbd_info(server.status())),
            cache: tier.frames.cache.as_ref().map(cache_info),
            memory_bytes_max: open.config.budget().total_bytes,
            key_slots,
            has_recovery_key,
            warnings,
        }
    }
}
