//! Requests about volumes.

use super::{AdminPool, convert};
use api::Reply;
use api::volume::{DedupInfo, RecoveredInfo, RemoveMode, VolumeInfo, VolumeRequest};
use block::{Error, ErrorKind, Result, VolumeId};
use engine::open_pool::OpenPool;
use engine::pool::{NamedOrigin, OldLog, VolumeTraits};
use engine::record::{VolumeRecord, VolumeState};
use engine::snapshot::SnapshotName;
use engine::superseded::superseded_logs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tiering::DedupStatus;
use uuid::Uuid;

impl AdminPool {
    pub(super) async fn volume(&self, open: &OpenPool, request: VolumeRequest) -> Result<Reply> {
        let pool = &open.pool;
        let record = match request {
            VolumeRequest::Create { name, size_bytes, durability, dedicated_key, dedup } => {
                let traits = VolumeTraits { dedicated_key, dedup };
                let durability = convert::durability_in(durability);
                let made = pool.create_volume_with(&name, size_bytes, durability, traits);
                made.await?.record()
            }
            VolumeRequest::List {} => return Ok(Reply::Volumes { volumes: list(open) }),
            VolumeRequest::Show { name } => {
                return Ok(Reply::Volume(named_volume(list(open), &name)?));
            }
            VolumeRequest::Resize { name, size_bytes, shrink } => {
                return self.resize(open, &name, size_bytes, shrink).await;
            }
            VolumeRequest::Set { name, durability, is_read_only, dedup } => {
                let durability = durability.map(convert::durability_in);
                pool.configure_volume(&name, durability, is_read_only, dedup).await?
            }
            VolumeRequest::Remove { name, mode: RemoveMode::Erase } => {
                return self.erase(open, &name).await;
            }
            VolumeRequest::Remove { name, mode } => {
                let _kept = self.guard_detached(open, "remove", &name).await?;
                pool.remove_volume(&name, mode == RemoveMode::Now).await?
            }
            VolumeRequest::Restore { name } => pool.restore_volume(&name).await?,
            VolumeRequest::AcceptLoss { name, discard_local_writes } => {
                pool.accept_loss(&name, discard_local_writes).await?
            }
            VolumeRequest::Rename { name, new_name } => self.rename(open, &name, &new_name).await?,
            VolumeRequest::Promote { name } => pool.promote_volume(&name).await?,
            VolumeRequest::Recover { name, of, log } => return recover(open, name, of, log).await,
            VolumeRequest::Clone { snapshot, name, ttl_seconds } => {
                let of: SnapshotName = snapshot.parse()?;
                let (source, snapshot) = of.single()?;
                let ttl = ttl_seconds.map(Duration::from_secs);
                pool.clone_volume(source, snapshot, &name, ttl).await?
            }
        };
        Ok(reply(open, &record))
    }

    async fn resize(
        &self,
        open: &OpenPool,
        name: &str,
        size_bytes: u64,
        shrink: bool,
    ) -> Result<Reply> {
        let volume = open.pool.volume(name).map(|volume| volume.record().size_bytes);
        let is_smaller = shrink && volume.is_some_and(|now| size_bytes < now);
        let _kept = match is_smaller {
            true => self.guard_detached(open, "shrink", name).await?,
            false => None,
        };
        // Not `shrink`: the volume may have been enlarged since.
        let record = open.pool.resize_volume(name, size_bytes, is_smaller).await?;
        let warning = match &self.attachments {
            Some(attachments) => attachments.why_size_stays(VolumeId(record.id)).await,
            None => None,
        };
        Ok(Reply::Volume(VolumeInfo { warning, ..volume_info(open, &record) }))
    }

    async fn erase(&self, open: &OpenPool, name: &str) -> Result<Reply> {
        let _kept = self.guard_detached(open, "erase", name).await?;
        open.pool.erase_volume(name).await?;
        let mut message = format!("volume {name} is erased: its key is destroyed");
        let copies = self.copies.wait_without_destroyed_keys().await;
        let copies = copies.unwrap_or_else(|error| vec![error.chain()]);
        if !copies.is_empty() {
            message.push_str(&format!(
                "; these copies keep it until they are next brought up to date, which `spindle status` shows: {}",
                copies.join(", ")
            ));
        }
        Ok(Reply::Done { message })
    }

    async fn rename(&self, open: &OpenPool, name: &str, new_name: &str) -> Result<VolumeRecord> {
        let _kept = self.guard_detached(open, "rename", name).await?;
        if open.config.volumes.iter().any(|volume| volume.name == name) {
            let what = format!(
                "rename volume {name}: the configuration names it, so the next start would make an empty one; \
                 change the configuration first"
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let id = open.pool.volume(name).map(|volume| volume.id()).unwrap_or_default();
        let check = self.check_id_detached(open, "rename", name, id);
        let renamed = open.pool.rename_volume(name, new_name, check).await;
        renamed.map_err(|error| self.name_users(id, error))
    }
}

/// Returns the reply with one volume.
/// Makes a volume from a log that the pool went on without: the given one, or the only one that was set aside here.
async fn recover(open: &OpenPool, name: String, of: String, log: Option<PathBuf>) -> Result<Reply> {
    let (pool, key) = {
        let keys = open.keys.lock().await;
        (keys.pool(), keys.newest().key.clone())
    };
    let dir = match log {
        Some(dir) => dir,
        None => only_log_aside(&open.config.dir, pool)?,
    };
    let log = OldLog { dir, pool, key };
    let made = open.pool.create_from_superseded(&name, &of, &log).await?;
    Ok(Reply::Recovered(RecoveredInfo {
        name,
        size_bytes: made.record.size_bytes,
        of,
        log: log.dir,
        base: made.base.snapshot_name(),
        entry_count: made.entry_count,
        written_bytes: made.payload_bytes,
        warning: made.warning,
    }))
}

fn only_log_aside(dir: &Path, pool: Uuid) -> Result<PathBuf> {
    let logs = superseded_logs(dir, pool)?;
    let what = match logs.as_slice() {
        [one] => return Ok(one.dir.clone()),
        [] => format!(
            "find a log that the pool went on without: {} has none; name its directory with --log",
            dir.display()
        ),
        several => {
            let names = several.iter().map(|log| log.dir.display().to_string());
            format!(
                "choose a log that the pool went on without: there are {}; name one with --log",
                names.collect::<Vec<_>>().join(", ")
            )
        }
    };
    Err(Error::new(ErrorKind::NotFound, what))
}

pub(super) fn reply(open: &OpenPool, record: &VolumeRecord) -> Reply {
    Reply::Volume(volume_info(open, record))
}

/// State of a volume besides its record.
pub(super) struct VolumeSeen {
    /// It is not served.
    pub(super) is_closed: bool,
    /// The store has an older state of it than of the others.
    pub(super) is_stalled: bool,
    pub(super) origin: Option<NamedOrigin>,
    /// Time for which it is kept once it is removed.
    pub(super) retention: Duration,
}

/// Reports on a record.
fn volume_info(open: &OpenPool, record: &VolumeRecord) -> VolumeInfo {
    let stalled = open.pool.destage_progress().stalled.remove(&record.id);
    let seen = VolumeSeen {
        is_closed: stalled.as_ref().is_some_and(|stalled| stalled.is_closed)
            || open.pool.is_keyless(record),
        is_stalled: stalled.is_some(),
        origin: open.pool.origin(record),
        retention: open.config.retention,
    };
    volume_info_of(record, seen, &open.pool.dedup_status())
}

/// Like [`volume_info`], from collected state.
pub(super) fn volume_info_of(
    record: &VolumeRecord,
    seen: VolumeSeen,
    dedup: &DedupStatus,
) -> VolumeInfo {
    let VolumeSeen { is_closed, is_stalled, origin, retention } = seen;
    let removed_at = match record.state {
        VolumeState::Removed { removed_at } => Some(removed_at),
        VolumeState::Present | VolumeState::Purged => None,
    };
    VolumeInfo {
        id: record.id,
        name: record.name.clone(),
        size_bytes: record.size_bytes,
        durability: convert::durability_out(record.durability),
        is_read_only: record.is_read_only,
        created_at: record.created_at,
        removed_at,
        purge_at: removed_at.map(|at| at.saturating_add(retention.as_secs())),
        has_lost_writes: record.has_lost_writes,
        is_closed,
        is_stalled,
        origin: origin.as_ref().map(|origin| origin.name.clone()),
        promoted_bytes: origin.and_then(|origin| origin.promoted_bytes),
        expires_at: Some(record.expires_at).filter(|at| *at != 0),
        dedicated_key: Some(record.dedicated_key).filter(|id| *id != 0),
        dedup: dedup_info([record].into_iter(), dedup),
        warning: None,
    }
}

/// Reports on deduplication. `None`: deduplication is off, and no duplicates were found.
pub(super) fn dedup_info<'a>(
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

/// Returns the ratio rounded to three decimals; 0 if the whole is 0.
pub(super) fn ratio(part: u64, whole: u64) -> f64 {
    match whole {
        0 => 0.0,
        _ => (part as f64 / whole as f64 * 1000.0).round() / 1000.0,
    }
}

fn list(open: &OpenPool) -> Vec<VolumeInfo> {
    by_name(open.pool.records().iter().map(|record| volume_info(open, record)).collect())
}

pub(super) fn by_name(mut volumes: Vec<VolumeInfo>) -> Vec<VolumeInfo> {
    volumes.sort_by(|a, b| (&a.name, a.id).cmp(&(&b.name, b.id)));
    volumes
}

/// Finds the volume of this name.
///
/// # Errors
/// `NotFound`.
pub(super) fn named_volume(volumes: Vec<VolumeInfo>, name: &str) -> Result<VolumeInfo> {
    // A present volume takes precedence over a removed one of the same name.
    let mut found: Vec<VolumeInfo> =
        volumes.into_iter().filter(|volume| volume.name == name).collect();
    found.sort_by_key(|volume| volume.removed_at.is_some());
    found.into_iter().next().ok_or_else(|| {
        let what = format!("show volume {name}: there is none; `spindle volume list` shows all");
        Error::new(ErrorKind::NotFound, what)
    })
}
