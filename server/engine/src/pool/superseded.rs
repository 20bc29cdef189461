//! Making a volume from a log that the pool went on without.
//!
//! Invariants:
//! - The snapshots of the state from which the pool goes on are made before anything else is logged: every later
//!   entry is of the new owner.
//! - A volume has its name only once it has everything. Until then its name ends in `-partial`.

use super::{NamedSnapshot, Pool, VolumeTraits};
use crate::names::check_name;
use crate::record::VolumeRecord;
use crate::snapshot::SnapshotName;
use crate::superseded::{Base, summary_of};
use crate::volume::Volume;
use async_recursion::async_recursion;
use block::seal::PoolKey;
use block::units::SECTOR_BYTES;
use block::{BlockDevice, Epoch, Error, ErrorKind, Lsn, Result, VolumeId, WriteFlags, ZeroFlags};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::mpsc;
use uuid::Uuid;
use wal::{ArchiveEnd, ArchivedEntry, EntryKind};

/// Entries that are read ahead of the writing. Chosen by hand: each has up to 32 MiB.
const AHEAD_MAX: usize = 4;

/// A log that the pool went on without, to be read.
#[derive(Clone, Debug)]
pub struct OldLog {
    /// Its directory.
    pub dir: PathBuf,
    /// The pool.
    pub pool: Uuid,
    /// The key of its batches.
    pub key: PoolKey,
}

/// A volume that was made from such a log.
#[derive(Clone, Debug)]
pub struct Recovered {
    /// Its record.
    pub record: VolumeRecord,
    /// The state to which the entries were added.
    pub base: Base,
    /// Entries of the volume that the pool went on without.
    pub entry_count: u64,
    /// Bytes of their payloads.
    pub payload_bytes: u64,
    /// What is missing, in words.
    pub warning: Option<String>,
}

/// What a log holds of one volume, beyond a base.
#[derive(Debug, Default)]
struct Contents {
    /// The record of the volume, as its last change in the log left it.
    record: Option<VolumeRecord>,
    /// End of the last range.
    end_bytes: u64,
    entry_count: u64,
    payload_bytes: u64,
}

impl Pool {
    /// Makes a snapshot of each volume in the state from which the pool goes on. Volumes that can have none are left
    /// out, and logged.
    #[async_recursion]
    pub(crate) async fn keep_base(&self, epoch: Epoch, lsn: Lsn) {
        let newest = self.volumes.lock().records.last_key_value().map(|(id, _)| *id);
        let next_volume = newest.map_or(1, |id| id.saturating_add(1));
        let name = Base { epoch, lsn, next_volume }.snapshot_name();
        let can_have = |volume: &String| match self.check_snapshot(volume, &name) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(
                    error = %error.chain(),
                    "could not keep the state of a volume from which the pool goes on"
                );
                false
            }
        };
        let names = self.volumes().into_iter().map(|volume| volume.record().name);
        let volumes: Vec<String> = names.filter(can_have).collect();
        if volumes.is_empty() {
            return;
        }
        let made = self.create_snapshots_as(&SnapshotName { volumes, name }, false).await;
        if let Err(error) = made {
            tracing::warn!(
                error = %error.chain(),
                "could not keep the state of the volumes from which the pool goes on"
            );
        }
    }

    /// Makes volume `name` with the contents that `of` has in a log that the pool went on without: the state from
    /// which the pool went on, and the entries that only this log has.
    ///
    /// # Errors
    /// `NotFound` if the directory holds no log of the pool, if no snapshot keeps the state from which the pool went
    /// on, or if the log has nothing of the volume; `Busy` if the name is taken; those of reading the log and of the
    /// store. Nothing is left of the volume then.
    #[async_recursion]
    pub async fn create_from_superseded(
        &self,
        name: &str,
        of: &str,
        log: &OldLog,
    ) -> Result<Recovered> {
        let partial = format!("{name}-partial");
        check_name(&partial)?;
        for new in [name, &partial] {
            self.volumes.lock().new_id("create", new)?;
        }
        let (dir, pool) = (log.dir.clone(), log.pool);
        let summary = blocking(move || summary_of(&dir, pool)).await?;
        let mut snapshots = self.snapshots(None)?;
        let bases = snapshots.iter().filter_map(|snapshot| {
            Base::of_snapshot(&snapshot.record.name).filter(|base| base.epoch > summary.epoch)
        });
        let base = bases.min().ok_or_else(|| no_base(&log.dir, summary.epoch.0))?;
        snapshots.retain(|snapshot| snapshot.record.name == base.snapshot_name());
        // Another volume of that name, or with that id, may have been made since.
        let named = snapshots.iter().find(|snapshot| snapshot.volume == of);
        let named = named.map(|snapshot| snapshot.record.volume);
        let (contents, end) = contents(log, base, (of, named)).await?;
        let id = named.or(contents.record.as_ref().map(|record| record.id)).map(VolumeId);
        let Some(id) = id.filter(|_| contents.entry_count > 0) else {
            let what = format!(
                "create volume {name}: the log in {} has nothing of volume {of} that the pool went on without",
                log.dir.display()
            );
            return Err(Error::new(ErrorKind::NotFound, what));
        };
        let kept = snapshots.iter().find(|snapshot| snapshot.record.volume == id.0);
        if kept.is_none() && id.0 < base.next_volume {
            let what = format!(
                "create volume {name}: no snapshot {of}@{} keeps the state from which the pool went on: it could not be \
                 made at that time, or was removed",
                base.snapshot_name()
            );
            return Err(Error::new(ErrorKind::NotFound, what));
        }
        let dir = log.dir.clone();
        let warning = blocking(move || missing(&dir, end)).await?;
        let made = async {
            let volume = self.start_partial(&partial, kept, &contents).await?;
            replay(log, base, id, &volume).await?;
            volume.flush().await?;
            // Its users keep it from being renamed.
            drop(volume);
            self.rename_volume(&partial, name, std::future::ready(Ok(()))).await
        };
        match made.await {
            Ok(record) => Ok(Recovered {
                record,
                base,
                entry_count: contents.entry_count,
                payload_bytes: contents.payload_bytes,
                warning,
            }),
            Err(error) => {
                if self.volume(&partial).is_some()
                    && let Err(error) = self.remove_volume(&partial, true).await
                {
                    tracing::warn!(
                        volume = %partial, error = %error.chain(),
                        "could not remove a volume that was made in part"
                    );
                }
                Err(error.context(format!("create volume {name} from {}", log.dir.display())))
            }
        }
    }

    /// Makes the volume to which the entries are added: a clone of the base, or an empty one if the volume was made
    /// later.
    async fn start_partial(
        &self,
        partial: &str,
        kept: Option<&NamedSnapshot>,
        contents: &Contents,
    ) -> Result<Arc<Volume>> {
        let size = contents.record.as_ref().map_or(0, |record| record.size_bytes);
        let size = size.max(contents.end_bytes);
        match (kept, &contents.record) {
            (Some(kept), _) => {
                let snapshot = &kept.record.name;
                let record = self.clone_volume(&kept.volume, snapshot, partial, None).await?;
                if size > record.size_bytes {
                    self.resize_volume(partial, size, false).await?;
                }
            }
            (None, Some(record)) => {
                let traits = VolumeTraits { dedicated_key: false, dedup: record.is_dedup };
                self.create_volume_with(partial, size, record.durability, traits).await?;
            }
            (None, None) => {
                let what =
                    format!("create volume {partial}: neither the log nor a snapshot has its size");
                return Err(Error::new(ErrorKind::Corrupt, what));
            }
        }
        self.find(partial)
    }
}

fn no_base(dir: &Path, epoch: u64) -> Error {
    let what = format!(
        "read the log in {}: its last owner had epoch {epoch}, and no snapshot keeps the state from which the pool went on \
         without it: either the pool did not, or the snapshots were removed",
        dir.display()
    );
    Error::new(ErrorKind::NotFound, what)
}

/// Reads what the log has of a volume: of that with the id `named`, or of one with this name that only the log has.
async fn contents(
    log: &OldLog,
    base: Base,
    (of, named): (&str, Option<u32>),
) -> Result<(Contents, ArchiveEnd)> {
    let (log, of) = (log.clone(), of.to_owned());
    blocking(move || {
        let (mut found, mut id) = (Contents::default(), named);
        let end = read(&log, base, &mut |entry| {
            if entry.kind == EntryKind::VolumeRecord {
                let record = VolumeRecord::decode(&entry.payload)?;
                if id.is_none() && record.name == of {
                    id = Some(record.id);
                }
                if id == Some(record.id) {
                    (found.record, found.entry_count) = (Some(record), found.entry_count + 1);
                }
            } else if id == Some(entry.volume.0) {
                found.entry_count += 1;
                found.payload_bytes += entry.payload.len() as u64;
                let end = (entry.start_sector + entry.sector_count) * SECTOR_BYTES;
                found.end_bytes = found.end_bytes.max(end);
            }
            Ok(())
        })?;
        Ok((found, end))
    })
    .await
}

/// Writes the entries of a volume to another one, in their order.
async fn replay(log: &OldLog, base: Base, of: VolumeId, to: &Volume) -> Result<()> {
    let (send, mut entries) = mpsc::channel(AHEAD_MAX);
    let log = log.clone();
    let reading = tokio::spawn(blocking(move || {
        read(&log, base, &mut |entry| match entry.volume == of {
            true => send.blocking_send(entry).map_err(|_| {
                Error::new(ErrorKind::Unavailable, "the writing has ended before the log")
            }),
            false => Ok(()),
        })
    }));
    while let Some(entry) = entries.recv().await {
        let offset = entry.start_sector * SECTOR_BYTES;
        let length = entry.sector_count * SECTOR_BYTES;
        match entry.kind {
            EntryKind::Write => to.write(offset, entry.payload, WriteFlags::default()).await?,
            EntryKind::Zero => {
                let flags = ZeroFlags { no_hole: true, ..ZeroFlags::default() };
                to.write_zeroes(offset, length, flags).await?;
            }
            EntryKind::Trim => to.discard(offset, length, false).await?,
            EntryKind::VolumeRecord | EntryKind::Marker | EntryKind::Snapshot => {}
        }
    }
    reading.await.map_err(|e| Error::with_source(ErrorKind::Io, "read a log", e))?.map(drop)
}

fn read(
    log: &OldLog,
    base: Base,
    visit: &mut dyn FnMut(ArchivedEntry) -> Result<()>,
) -> Result<ArchiveEnd> {
    wal::read_entries(&log.dir, log.pool.into_bytes(), &log.key, base.lsn, visit)
}

/// Says what the log lacks.
fn missing(dir: &Path, end: ArchiveEnd) -> Result<Option<String>> {
    let ArchiveEnd { last_lsn, durable_lsn } = end;
    let mut lacks = Vec::new();
    if durable_lsn > last_lsn {
        lacks.push(format!(
            "the log is damaged: its entries after LSN {last_lsn} cannot be read, and those up to LSN {durable_lsn} were \
             on stable storage"
        ));
    }
    let (count, bytes) = wal::weigh_spill_files(dir)?;
    if count > 0 {
        lacks.push(format!("its {count} spill files, with {bytes} bytes, were not read"));
    }
    Ok((!lacks.is_empty()).then(|| lacks.join("; ")))
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| Error::with_source(ErrorKind::Io, "read a log", error))?
}
