//! The volumes and snapshots of a state of a copy as NBD exports.
//!
//! Invariants:
//! - They have the same names as the pool's exports, and are read-only.
//! - A volume whose dedicated key the copy lacks is refused by name. So is a volume whose state in the
//!   copy is older than that of the others, with its snapshots from then on: their contents would
//!   be wrong. The others are served.

use block::{
    AllocationExtent, BlockDevice, Error, ErrorKind, Limits, Lsn, Result, VolumeId, WriteFlags,
    ZeroFlags,
};
use bytes::Bytes;
use engine::record::{VolumeRecord, VolumeState};
use engine::snapshot::SnapshotRecord;
use engine::volume::PAYLOAD_BYTES_MAX;
use nbd::{Client, Export, Exports};
use std::collections::BTreeMap;
use std::sync::Arc;
use tiering::Tier;

/// Contents behind an export name.
#[derive(Clone, Debug)]
struct Shown {
    volume: VolumeId,
    /// `None`: the volume's newest contents in the state.
    at: Option<Lsn>,
    size_bytes: u64,
    description: &'static str,
    /// Reason why it is not served.
    refusal: Option<&'static str>,
}

const KEYLESS: &str = "the copy lacks the volume's dedicated key";
const BEHIND: &str = "the copy does not have all that the volume was written up to then, but an earlier state of it than of the \
                      other volumes; restore the copy, and take it as it is there with `spindle volume accept-loss`";
/// Snapshots listed to a client that asks for all exports. Chosen by hand: a snapshot is found by
/// its name whether it is in the list or not.
const LISTED_SNAPSHOTS_MAX: usize = 1000;

/// Exports of a copy for the NBD server.
pub(crate) struct CopyExports {
    tier: Tier,
    shown: BTreeMap<String, Shown>,
}

impl CopyExports {
    /// Makes the exports of a tier that was opened for reading. `has_volume` says whether the copy
    /// has everything of a volume.
    ///
    /// # Errors
    /// `Corrupt` and `Unsupported` for records that cannot be read.
    pub(crate) fn new(tier: Tier, has_volume: impl Fn(u32) -> bool) -> Result<CopyExports> {
        let (keys, stalled_volumes) = (tier.volume_keys().clone(), tier.stalled_volumes());
        let (mut shown, mut names) = (BTreeMap::new(), BTreeMap::new());
        for (volume, record) in tier.volume_records() {
            let record = VolumeRecord::decode(&record)?;
            if record.state != VolumeState::Present || !has_volume(record.id) {
                continue;
            }
            let keyless = (!keys.has(record.key())).then_some(KEYLESS);
            let behind_from = stalled_volumes
                .get(&volume)
                .and_then(|files| files.first())
                .map(|file| file.first_lsn);
            let refusal = keyless.or(behind_from.map(|_| BEHIND));
            if let Some(why) = refusal {
                tracing::warn!(volume = %record.name, why, "could not serve a volume of the copy");
            }
            let size_bytes = record.size_bytes;
            names.insert(volume, (record.name.clone(), keyless, behind_from));
            let one = Shown { volume, at: None, size_bytes, description: "of a copy", refusal };
            shown.insert(record.name, one);
        }
        for (volume, lsn, record) in tier.snapshots() {
            let record = SnapshotRecord::decode(&record)?;
            let Some((name, keyless, behind_from)) = names.get(&volume) else { continue };
            // The volume lacks writes from `behind_from` on, so snapshots from there on are
            // incomplete.
            let behind = behind_from.filter(|from| *from <= lsn).map(|_| BEHIND);
            let (at, size_bytes, refusal) = (Some(lsn), record.size_bytes, keyless.or(behind));
            let description = "a snapshot of a copy";
            let one = Shown { volume, at, size_bytes, description, refusal };
            shown.insert(format!("{name}@{}", record.name), one);
        }
        Ok(CopyExports { tier, shown })
    }

    /// Names of the volumes that are served, without snapshots.
    pub(crate) fn volume_names(&self) -> Vec<String> {
        let is_served = |shown: &Shown| shown.at.is_none() && shown.refusal.is_none();
        let volumes = self.shown.iter().filter(|(_, shown)| is_served(shown));
        volumes.map(|(name, _)| name.clone()).collect()
    }

    fn find(&self, name: &str) -> Result<&Shown> {
        let only = match &self.volume_names()[..] {
            [only] if name.is_empty() => Some(only.clone()),
            _ => None,
        };
        let found = self.shown.get(only.as_deref().unwrap_or(name));
        let found = found.ok_or_else(|| {
            let what = format!("open export {name:?}: the copy has no such volume or snapshot");
            Error::new(ErrorKind::NotFound, what)
        })?;
        match found.refusal {
            None => Ok(found),
            Some(why) => Err(Error::new(ErrorKind::Denied, format!("open export {name:?}: {why}"))),
        }
    }
}

impl Exports for CopyExports {
    type Device = CopyView;

    async fn list(&self, _client: &Client) -> Vec<Export> {
        let export = |(name, shown): (&String, &Shown)| Export {
            name: name.clone(),
            description: shown.description.to_owned(),
        };
        let (volumes, snapshots): (Vec<_>, Vec<_>) =
            self.shown.iter().partition(|(_, shown)| shown.at.is_none());
        volumes
            .into_iter()
            .chain(snapshots.into_iter().take(LISTED_SNAPSHOTS_MAX))
            .map(export)
            .collect()
    }

    async fn open(&self, name: &str, client: &Client) -> Result<Arc<CopyView>> {
        if client.reservation.is_some() {
            let what = format!(
                "open export {name:?}: a copy is read-only, so there is nothing to reserve; \
                 connect without a reservation"
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let shown = self.find(name)?.clone();
        Ok(Arc::new(CopyView { tier: self.tier.clone(), shown }))
    }
}

/// A volume or snapshot as seen by one connection.
pub(crate) struct CopyView {
    tier: Tier,
    shown: Shown,
}

impl CopyView {
    fn check_range(&self, offset: u64, length: u64) -> Result<()> {
        match offset.checked_add(length) {
            Some(end) if end <= self.shown.size_bytes => Ok(()),
            _ => {
                let what = format!("{length} bytes at {offset}: beyond the end of the volume");
                Err(Error::new(ErrorKind::Invalid, what))
            }
        }
    }
}

fn denied<T>() -> Result<T> {
    let what = "change a copy: it is shown as it is; restore it to a pool to write";
    Err(Error::new(ErrorKind::Denied, what))
}

impl BlockDevice for CopyView {
    fn limits(&self) -> Limits {
        Limits {
            size_bytes: self.shown.size_bytes,
            preferred_block_bytes: 4096,
            payload_bytes_max: PAYLOAD_BYTES_MAX,
            is_read_only: true,
            is_multi_conn: true,
            has_volatile_cache: true,
        }
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.check_range(offset, buf.len() as u64)?;
        match self.shown.at {
            _ if buf.is_empty() => Ok(()),
            None => self.tier.read(self.shown.volume, offset, buf).await,
            Some(at) => self.tier.read_at(self.shown.volume, at, offset, buf).await,
        }
    }

    async fn write(&self, _offset: u64, _payload: Bytes, _flags: WriteFlags) -> Result<()> {
        denied()
    }

    async fn flush(&self) -> Result<()> {
        Ok(())
    }

    async fn discard(&self, _offset: u64, _length: u64, _fua: bool) -> Result<()> {
        denied()
    }

    async fn write_zeroes(&self, _offset: u64, _length: u64, _flags: ZeroFlags) -> Result<()> {
        denied()
    }

    async fn allocation(
        &self,
        offset: u64,
        length: u64,
        extent_count_max: usize,
    ) -> Result<Vec<AllocationExtent>> {
        self.check_range(offset, length)?;
        let volume = self.shown.volume;
        match self.shown.at {
            None => self.tier.allocation(volume, offset, length, extent_count_max).await,
            Some(at) => {
                self.tier.allocation_at(volume, at, (offset, length), extent_count_max).await
            }
        }
    }

    async fn prefetch(&self, offset: u64, length: u64) -> Result<()> {
        self.check_range(offset, length)?;
        if self.shown.at.is_none() {
            self.tier.prefetch(self.shown.volume, offset, length);
        }
        Ok(())
    }

    async fn resize(&self, _size_bytes: u64) -> Result<()> {
        denied()
    }
}
