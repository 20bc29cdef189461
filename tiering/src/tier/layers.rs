//! Clones and rollbacks for the daemon: making, promoting and retiring layers, and reporting
//! dependencies between them.

use super::{Origin, Tier};
use crate::map::pages::PAGE_BYTES;
use crate::map::{Health, LayerChange, LayerId, LayerRecord, NewLayer};
use crate::pool::Excluded;
use async_recursion::async_recursion;
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use bytes::Bytes;

impl Tier {
    /// Makes a writable volume that shows the state of `source` at the LSN `at`, at which `source`
    /// has a snapshot. The new volume, with its `record`, is durable when this returns. The
    /// snapshot must be destaged, including entries that were stalled.
    ///
    /// # Errors
    /// `NotFound` if there is no such snapshot; `Busy` if the volume exists already or the chain of
    /// volumes made from one another is too long; those of [`Tier::destage`]. After an error
    /// nothing was made.
    #[async_recursion]
    pub async fn clone_volume(
        &self,
        (source, at): (VolumeId, Lsn),
        volume: VolumeId,
        record: Bytes,
    ) -> Result<()> {
        let (record, since, is_promoted) = (Some(record), Lsn::NONE, false);
        let new = NewLayer { volume, source, at, since, record, is_promoted };
        self.make_layer(new, Some(LayerId::of_volume(volume))).await
    }

    /// Rolls a volume back to its snapshot at the LSN `at`; its snapshots are retained. The
    /// rollback is durable, with the volume's `record`, when this returns. `since` is an LSN of the
    /// log behind every write to the volume, and must be destaged. The caller must prevent reads
    /// and writes of the volume meanwhile.
    ///
    /// # Errors
    /// Those of [`Tier::clone_volume`].
    #[async_recursion]
    pub async fn roll_back(
        &self,
        volume: VolumeId,
        at: Lsn,
        since: Lsn,
        record: Option<Bytes>,
    ) -> Result<()> {
        if since > self.destaged_lsn() {
            let what = format!("roll volume {volume} back: {since} is not destaged");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let new = NewLayer { volume, source: volume, at, since, record, is_promoted: true };
        let next = self.parts.metadata.map.layers().current(volume).next();
        self.make_layer(new, next).await
    }

    /// Makes a clone independent of its source, in the background. Returns `false` if it is
    /// independent already.
    ///
    /// # Errors
    /// Those of [`Tier::destage`].
    #[async_recursion]
    pub async fn promote(&self, volume: VolumeId) -> Result<bool> {
        self.change_layers(LayerChange::Promote(volume)).await
    }

    /// Marks a volume whose contents are no longer read. Once its own pages are gone, its source is
    /// no longer kept for it.
    ///
    /// # Errors
    /// Those of [`Tier::destage`].
    #[async_recursion]
    pub async fn retire(&self, volume: VolumeId) -> Result<()> {
        self.change_layers(LayerChange::Retire(volume)).await.map(drop)
    }

    /// Makes a layer and determines for certain whether it exists. If the commit failed, it waits
    /// until the metadata is open again and looks there, however long that takes. The outcome stays
    /// unknown only if the metadata never opens again.
    async fn make_layer(&self, new: NewLayer, made: Option<LayerId>) -> Result<()> {
        let Err(error) = self.change_layers(LayerChange::Make(new)).await else { return Ok(()) };
        let is_refused = matches!(
            error.kind(),
            ErrorKind::Busy | ErrorKind::NotFound | ErrorKind::Invalid | ErrorKind::Full
        );
        while !is_refused && matches!(self.parts.metadata.map.health(), Health::Ended(_)) {
            self.parts.metadata.map.wait_well().await;
        }
        let layers = self.parts.metadata.map.layers();
        match made.filter(|layer| !is_refused && layers.get(*layer).is_some()) {
            Some(_) => Ok(()),
            None => Err(error),
        }
    }

    /// Runs in a task of its own, so that dropping the call does not leave the map half changed.
    async fn change_layers(&self, asked: LayerChange) -> Result<bool> {
        self.parts.pool.check_writable()?;
        let metadata = self.parts.metadata.clone();
        let task = self.parts.pool.background.spawn(async move {
            let mut writer = metadata.writer.lock().await;
            metadata.map.change_layers(&mut writer, asked).await
        });
        task.await.map_err(|cause| Error::with_source(ErrorKind::Io, "change layers", cause))?
    }

    /// Returns whether the volume has a layer that was made from another one and [`Tier::retire`]
    /// was not yet called for it.
    #[must_use]
    pub fn is_retirable(&self, volume: VolumeId) -> bool {
        let layers = self.parts.metadata.map.layers();
        let record = layers.get(layers.current(volume));
        record.is_some_and(|record| record.parent.is_some() && !record.is_former)
    }

    /// Checks that the volume's state at an LSN can be cloned or rolled back to, given the limit on
    /// the length of a chain of clones.
    ///
    /// # Errors
    /// `Busy` or `Full`, with advice for the user.
    pub fn check_depth(&self, volume: VolumeId, at: Lsn) -> Result<()> {
        self.parts.metadata.map.check_depth(self.parts.metadata.map.layers().at(volume, at))
    }

    /// Checks, as far as possible, that this process still owns the pool.
    ///
    /// # Errors
    /// `Fenced` if another process has taken it; those of the owner check.
    #[async_recursion]
    pub async fn check_owner(&self) -> Result<()> {
        self.parts.pool.check_owner().await
    }

    /// Updates the set of segments that a copy lacks on purpose.
    pub fn set_excluded(&self, excluded: Option<Excluded>) {
        *self.parts.exclusions.excluded.write() = excluded;
    }

    /// Returns whether the metadata still holds pages that removed snapshots or a trim of these
    /// volumes made unreachable, or still keeps pages of a source for one of these volumes.
    #[must_use]
    pub fn is_dropping(&self, is_one: impl Fn(VolumeId) -> bool) -> bool {
        self.parts.metadata.is_dropping(is_one)
    }

    /// Returns the source that a volume was made from and still depends on.
    #[must_use]
    pub fn origin(&self, volume: VolumeId) -> Option<Origin> {
        let layers = self.parts.metadata.map.layers();
        let record = layers.get(layers.current(volume))?;
        let (base, parent) = (record.base?, record.parent?);
        Some(Origin {
            volume: parent.volume(),
            at: base.lsn,
            is_promoted: base.is_promoted,
            done_bytes: u64::from(base.next_page) * PAGE_BYTES,
        })
    }

    /// Returns the volumes whose newest state depends on a volume's snapshot at an LSN, in order of
    /// id. Volumes that depend on it only through snapshots from before a rollback are not
    /// included: their data is kept without the snapshot.
    #[must_use]
    pub fn dependents(&self, volume: VolumeId, at: Lsn) -> Vec<VolumeId> {
        let layers = self.parts.metadata.map.layers();
        let parent = layers.at(volume, at);
        let depends = |record: &LayerRecord| {
            !record.is_former
                && record.parent == Some(parent)
                && record.base.is_some_and(|base| base.lsn == at)
        };
        layers
            .iter()
            .filter(|(_, record)| depends(record))
            .map(|(layer, _)| layer.volume())
            .collect()
    }
}
