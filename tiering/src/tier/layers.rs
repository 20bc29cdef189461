//! Clones and rollbacks as the daemon asks for them: layers are made, promoted and retired, and say what they depend on.

use super::{Inner, Origin, PAGE_BYTES, Tier};
use crate::copier::LeftOut;
use crate::map::{Health, LayerChange, LayerId, LayerRecord, NewLayer};
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use bytes::Bytes;

impl Inner {
    /// As [`Tier::is_dropping`].
    pub(crate) fn is_dropping(&self, is_one: impl Fn(VolumeId) -> bool) -> bool {
        // The layers first: one that lets go what it was made from has that pruned before it says so.
        let layers = self.map.layers();
        let others =
            layers.iter().map(|(layer, _)| layer.volume()).filter(|volume| !is_one(*volume));
        let needed = layers.needed_by(&others.collect(), false);
        // It is not retired yet, or not forgotten: what it shows of others is kept for its sake.
        let is_based = |(layer, record): (LayerId, &LayerRecord)| {
            record.base.is_some() && is_one(layer.volume()) && !needed.contains(&layer)
        };
        if layers.iter().any(is_based) {
            return true;
        }
        let (ranges, to_prune) = (self.map.ranges(), self.map.layers_to_prune());
        let mut layers = ranges.iter().map(|(layer, _)| layer).chain(to_prune);
        layers.any(|layer| is_one(layer.volume()))
    }
}

impl Tier {
    /// Makes a volume that shows what another one did at an LSN at which that one has a snapshot, and that can be
    /// written. Durable, with the new volume's `record`, when this returns. The snapshot is destaged, also of what
    /// was aside.
    ///
    /// # Errors
    /// `NotFound` without that snapshot; `Busy` where the volume is there already, or too many are made from one
    /// another; as [`Tier::destage`]. Nothing was made then.
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

    /// The volume shows what its snapshot at an LSN shows, and its snapshots stay. Durable, with the volume's `record`,
    /// when this returns. `since`
    /// is an LSN of the log behind everything that the volume was written, and destaged; nobody reads or writes it
    /// meanwhile.
    ///
    /// # Errors
    /// As [`Tier::clone_volume`].
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
        let next = self.inner.map.layers().current(volume).next();
        self.make_layer(new, next).await
    }

    /// Makes a clone independent of what it was made from, in the background. `false`: it is.
    ///
    /// # Errors
    /// As [`Tier::destage`].
    pub async fn promote(&self, volume: VolumeId) -> Result<bool> {
        self.change_layers(LayerChange::Promote(volume)).await
    }

    /// Nobody reads what the volume holds any more: what it was made from is not kept for its sake, once
    /// its own pages are gone.
    ///
    /// # Errors
    /// As [`Tier::destage`].
    pub async fn retire(&self, volume: VolumeId) -> Result<()> {
        self.change_layers(LayerChange::Retire(volume)).await.map(drop)
    }

    /// Makes a layer, and says for sure whether it is there: where a commit has failed, the metadata as it is opened
    /// anew tells, however long that takes. Only where it is not opened any more, nobody knows.
    async fn make_layer(&self, new: NewLayer, made: Option<LayerId>) -> Result<()> {
        let Err(error) = self.change_layers(LayerChange::Make(new)).await else { return Ok(()) };
        let is_refused = matches!(
            error.kind(),
            ErrorKind::Busy | ErrorKind::NotFound | ErrorKind::Invalid | ErrorKind::Full
        );
        while !is_refused && matches!(self.inner.map.health(), Health::Ended(_)) {
            self.inner.map.wait_well().await;
        }
        let layers = self.inner.map.layers();
        match made.filter(|layer| !is_refused && layers.get(*layer).is_some()) {
            Some(_) => Ok(()),
            None => Err(error),
        }
    }

    /// In a task of its own: a call that is dropped does not leave the map halfway.
    async fn change_layers(&self, asked: LayerChange) -> Result<bool> {
        self.inner.check_writable()?;
        let inner = self.inner.clone();
        let task = self.inner.background.spawn(async move {
            let mut writer = inner.writer.lock().await;
            inner.map.change_layers(&mut writer, asked).await
        });
        task.await.map_err(|cause| Error::with_source(ErrorKind::Io, "change layers", cause))?
    }

    /// The volume has a layer that was made from another one, and [`Tier::retire`] was not called for it.
    #[must_use]
    pub fn is_retirable(&self, volume: VolumeId) -> bool {
        let layers = self.inner.map.layers();
        let record = layers.get(layers.current(volume));
        record.is_some_and(|record| record.parent.is_some() && !record.is_former)
    }

    /// What a volume shows at an LSN can be cloned or rolled back to, as far as it is not made from too many others.
    ///
    /// # Errors
    /// `Busy` or `Full`, saying what to do.
    pub fn check_depth(&self, volume: VolumeId, at: Lsn) -> Result<()> {
        self.inner.map.check_depth(self.inner.map.layers().at(volume, at))
    }

    /// This process still owns the pool, as far as can be told.
    ///
    /// # Errors
    /// `Fenced` where another one has taken it; those of asking.
    pub async fn check_owner(&self) -> Result<()> {
        match &self.inner.options.owner_check {
            Some(check) => check.ask().await,
            None => Ok(()),
        }
    }

    /// What a copy lacks on purpose is known better now.
    pub fn set_left_out(&self, left_out: Option<LeftOut>) {
        *self.inner.left_out.write() = left_out;
    }

    /// What removed snapshots or a trim of these volumes hid from everybody is still being dropped from the metadata, or is
    /// still kept for what one of them was made from.
    #[must_use]
    pub fn is_dropping(&self, is_one: impl Fn(VolumeId) -> bool) -> bool {
        self.inner.is_dropping(is_one)
    }

    /// What a volume was made from and still depends on.
    #[must_use]
    pub fn origin(&self, volume: VolumeId) -> Option<Origin> {
        let layers = self.inner.map.layers();
        let record = layers.get(layers.current(volume))?;
        let (base, parent) = (record.base?, record.parent?);
        Some(Origin {
            volume: parent.volume(),
            at: base.lsn,
            is_promoted: base.is_promoted,
            done_bytes: u64::from(base.next_page) * PAGE_BYTES,
        })
    }

    /// Volumes whose newest state depends on what a volume's snapshot at an LSN shows, in order of id. What only
    /// their snapshots of before a rollback show is kept without it.
    #[must_use]
    pub fn dependents(&self, volume: VolumeId, at: Lsn) -> Vec<VolumeId> {
        let layers = self.inner.map.layers();
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
