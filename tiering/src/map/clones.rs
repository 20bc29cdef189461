//! Layers made from other layers (clones and rollbacks), and how they become independent again.
//!
//! Invariants:
//! - A layer is made in one durable batch with everything that belongs to it. For a clone this is
//!   the volume's record; for a rollback, the mark of the previous layer as former, and the range
//!   that hides its newest state.
//! - The base of a layer is kept like a snapshot, whether or not the snapshot still exists.
//! - A page is promoted in the batch that moves the layer's record past it, so either the base or a
//!   copy of its contents is there at every moment.

use super::commit::draft::Draft;
use super::commit::{Fresh, Writer};
use super::history::Copy;
use super::keys::ROOT_KEY;
use super::keys::{self, family};
use super::layers::{Base, LayerId, LayerRecord};
use super::pages::{self, OperandKind, Page};
use super::preserve::{Preserve, put_copy};
use super::ranges::Range;
use super::snapshots::Prune;
use super::{CommitReport, Forget, Map, State, entries};
use crate::fail_point;
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use bytes::Bytes;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Layers that may show parts of one another. Chosen by hand: the first read of a page looks into
/// each of them.
pub const BASES_MAX: usize = 16;
/// Layers in one chain of descent, however long ago they were made. Chosen by hand: reclaim follows
/// the chain.
pub const PARENTS_MAX: usize = 1024;

/// A request to make a layer from another one.
#[derive(Clone, Debug)]
pub struct NewLayer {
    /// The volume that gets the layer: the source itself for a rollback, or a volume that does not
    /// exist yet for a clone.
    pub volume: VolumeId,
    /// The volume that it is made from.
    pub source: VolumeId,
    /// LSN of the source's snapshot that the layer starts from.
    pub at: Lsn,
    /// For a rollback, an LSN after every earlier write, and not above the destaged LSN.
    pub since: Lsn,
    /// The volume's record afterwards.
    pub record: Option<Bytes>,
    /// Make the layer independent at once.
    pub is_promoted: bool,
}

/// A change to the layer of a volume.
#[derive(Clone, Debug)]
pub enum LayerChange {
    /// See [`Map::make_layer`].
    Make(NewLayer),
    /// See [`Map::promote`].
    Promote(VolumeId),
    /// See [`Map::retire`].
    Retire(VolumeId),
}

/// The result of one step of promoting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromoteReport {
    /// Pages visited.
    pub page_count: u64,
    /// Layers that still have to be promoted.
    pub layers_left: usize,
}

impl Map {
    /// The page of a layer's base, if it maps any blocks.
    pub(crate) async fn base_page(&self, layer: LayerId, page: u32) -> Result<Option<Arc<Page>>> {
        let Some((parent, at)) = self.layers().base(layer, page) else { return Ok(None) };
        let base = self.page_at(parent, page, at).await?;
        Ok(Some(base).filter(|base| base.mapped_count() > 0))
    }

    /// Changes layers. Returns `false` if there was nothing to do.
    ///
    /// # Errors
    /// Those of the requested change.
    pub async fn change_layers(&self, writer: &mut Writer, asked: LayerChange) -> Result<bool> {
        match asked {
            LayerChange::Make(new) => self.make_layer(writer, new).await.map(|()| true),
            LayerChange::Promote(volume) => self.promote(writer, volume).await,
            LayerChange::Retire(volume) => self.retire(writer, volume).await.map(|()| true),
        }
    }

    /// Makes a clone or rolls a volume back. The change is durable on return.
    ///
    /// # Errors
    /// `NotFound` if the snapshot does not exist; `Busy` if the volume of a clone exists already,
    /// or if too many layers lie on top of each other; those of [`Map::commit`].
    pub async fn make_layer(&self, writer: &mut Writer, new: NewLayer) -> Result<()> {
        self.check(writer)?;
        let layers = self.layers();
        let parent = layers.at(new.source, new.at);
        let is_there = self.snapshots().iter().any(|(key, _)| key == (parent, new.at));
        if !is_there {
            let what = format!("make a layer: volume {} has no snapshot at {}", new.source, new.at);
            return Err(Error::new(ErrorKind::NotFound, what));
        }
        self.check_depth(parent)?;
        self.check_whole(new.source, new.at)?;
        let old = layers.current(new.volume);
        let is_clone = new.volume != new.source;
        if is_clone && (layers.get(old).is_some() || self.has_volume(new.volume)) {
            let what = format!("make a layer: volume {} is there already", new.volume);
            return Err(Error::new(ErrorKind::Busy, what));
        }
        let layer = if is_clone { Some(old) } else { old.next() };
        let layer =
            layer.ok_or_else(|| Error::new(ErrorKind::Full, "make a layer: ids exhausted"))?;
        let base = Base { lsn: new.at, next_page: 0, is_promoted: new.is_promoted };
        // Windows do not end at `since`: earlier writes may have any LSN up to the destaged one.
        let since = if is_clone { Lsn::NONE } else { new.since.max(writer.root.destaged) };
        let record = LayerRecord {
            volume: new.volume,
            parent: Some(parent),
            base: Some(base),
            since,
            is_former: false,
        };
        let mut records = vec![(layer, record)];
        let mut ranges = Vec::new();
        if !is_clone {
            self.check_whole(new.volume, Lsn(u64::MAX))?;
            self.check_above_snapshots(old, since)?;
            let before = layers.get(old).copied();
            let before = before.unwrap_or_else(|| LayerRecord::plain(new.volume));
            records.push((old, LayerRecord { is_former: true, ..before }));
            let (first_page, last_page) = (0, u32::MAX);
            ranges.push((old, Range { lsn: since, ordinal: u32::MAX, first_page, last_page }));
            self.make_room_for(writer, &ranges).await.map_err(|failed| failed.error)?;
        }
        let mut draft = Draft::new(self);
        for (layer, range) in &ranges {
            draft.put(&keys::range_key(*layer, range.lsn, range.ordinal), &range.encode());
        }
        if let Some(record) = &new.record {
            draft.put(&keys::volume_key(new.volume), record);
        }
        self.write_layers(writer, draft, &records).await?;
        if let Some(record) = new.record {
            self.volume_records.write().insert(new.volume, record);
        }
        self.apply(
            Fresh { bytes_left: 0, pages: Vec::new() },
            &ranges,
            Vec::new(),
            Forget::Nothing,
        );
        // A reader may have looked for the layer before it existed.
        self.pages.retain(|(of, _, _)| *of != layer);
        Ok(())
    }

    /// Checks that one more layer can be made from this one.
    ///
    /// # Errors
    /// `Busy` or `Full` if too many layers were made from one another; the message says what to do.
    pub fn check_depth(&self, parent: LayerId) -> Result<()> {
        let layers = self.layers();
        if layers.bases(parent).len() + 1 >= BASES_MAX {
            let what = format!(
                "make a layer: {BASES_MAX} depend on one another already; promote one of the volumes first, and wait \
                 until it is independent"
            );
            return Err(Error::new(ErrorKind::Busy, what));
        }
        if layers.height(parent) + 1 >= PARENTS_MAX {
            let what = format!(
                "make a layer: {PARENTS_MAX} were made from one another; copy the volume to a new one by its clients"
            );
            return Err(Error::new(ErrorKind::Full, what));
        }
        Ok(())
    }

    /// Checks that no write of the volume up to an LSN is missing from the store and comes late.
    fn check_whole(&self, volume: VolumeId, until: Lsn) -> Result<()> {
        let stalled_volumes = self.stalled_volumes.read();
        let first = stalled_volumes.get(&volume).and_then(|files| files.first());
        match first.filter(|file| file.first_lsn <= until) {
            None => Ok(()),
            Some(file) => {
                let since = file.first_lsn;
                let what = format!(
                    "make a layer: the store lacks writes of volume {volume} since {since}"
                );
                Err(Error::new(ErrorKind::Unavailable, what))
            }
        }
    }

    /// Checks that a range at an LSN hides nothing that a snapshot of the layer, or a layer made
    /// from it, shows.
    fn check_above_snapshots(&self, layer: LayerId, since: Lsn) -> Result<()> {
        match self.snapshots().of(layer).last().filter(|newest| **newest >= since) {
            None => Ok(()),
            Some(newest) => {
                let what = format!("end layer {layer} at {since}: something shows it at {newest}");
                Err(Error::new(ErrorKind::Invalid, what))
            }
        }
    }

    fn has_volume(&self, volume: VolumeId) -> bool {
        self.volume_records.read().contains_key(&volume)
    }

    /// Marks the layer of a volume to be made independent of its base in the background. Returns
    /// `false` if it has no base.
    ///
    /// # Errors
    /// Like [`Map::commit`].
    pub async fn promote(&self, writer: &mut Writer, volume: VolumeId) -> Result<bool> {
        self.check(writer)?;
        let layers = self.layers();
        let layer = layers.current(volume);
        let Some(record) = layers.get(layer) else { return Ok(false) };
        let Some(base) = record.base else { return Ok(false) };
        if !base.is_promoted {
            let base = Some(Base { is_promoted: true, ..base });
            let record = LayerRecord { base, ..*record };
            self.write_layers(writer, Draft::new(self), &[(layer, record)]).await?;
        }
        Ok(true)
    }

    /// Drops the newest state of a volume that is no longer read or written.
    ///
    /// # Errors
    /// `Invalid` until an LSN after its newest snapshot is destaged; those of [`Map::commit`].
    pub async fn retire(&self, writer: &mut Writer, volume: VolumeId) -> Result<()> {
        self.check(writer)?;
        let layers = self.layers();
        let layer = layers.current(volume);
        match layers.get(layer).filter(|record| !record.is_former && record.parent.is_some()) {
            Some(record) => {
                let record = LayerRecord { is_former: true, ..*record };
                // The range also hides operands that only say that a page is empty, which were put
                // there when the page was hidden before.
                let lsn = writer.root.destaged;
                self.check_above_snapshots(layer, lsn)?;
                let ordinal = u32::MAX; // a window may have made a range at this LSN
                let range = Range { lsn, ordinal, first_page: 0, last_page: u32::MAX };
                let ranges = [(layer, range)];
                self.make_room_for(writer, &ranges).await.map_err(|failed| failed.error)?;
                let mut draft = Draft::new(self);
                draft.put(&keys::range_key(layer, lsn, ordinal), &range.encode());
                self.write_layers(writer, draft, &[(layer, record)]).await?;
                let fresh = Fresh { bytes_left: 0, pages: Vec::new() };
                self.apply(fresh, &ranges, Vec::new(), Forget::Nothing);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Commits records of layers together with the rest of the batch; durable on return.
    async fn write_layers(
        &self,
        writer: &mut Writer,
        mut draft: Draft<'_>,
        records: &[(LayerId, LayerRecord)],
    ) -> Result<()> {
        for (layer, record) in records {
            draft.put(&keys::layer_key(*layer), &record.encode());
        }
        let mut root = writer.root;
        root.commit_number += 1;
        // A version without support for bases must not open a map that has any.
        let header = self.opener.header();
        let header = (!header.has_bases()).then(|| header.with_bases());
        match &header {
            Some(header) => draft.put_root_under(header, &root),
            None => draft.put(ROOT_KEY, &root.encode()),
        }
        fail_point!("layers-before-write");
        self.write(writer, draft.batch).await?;
        fail_point!("layers-before-flush");
        self.flush(writer).await?;
        fail_point!("layers-after-flush");
        writer.root = root;
        if let Some(header) = header {
            self.opener.set_header(header);
        }
        self.commit_number.store(root.commit_number, Ordering::Release);
        self.set_layers(self.layers().with(records.iter().copied()));
        Ok(())
    }

    fn set_layers(&self, layers: super::LayerList) {
        let mut snapshots = self.snapshots.write();
        *snapshots = snapshots.with_layers(&layers);
        self.has_later_layers.store(layers.has_later(), Ordering::Release);
        self.state.send_modify(|state| state.layers = layers);
    }

    /// Number of layers that are being promoted.
    pub(crate) fn promote_count(&self) -> usize {
        self.layers().iter().filter(|(_, record)| is_promoted(record)).count()
    }

    /// Promotes about `budget` pages of a layer by giving it the contents of its base. The step is
    /// durable with the next commit; a crash before that only repeats the work.
    ///
    /// # Errors
    /// Like [`Map::commit`].
    pub async fn promote_step(&self, writer: &mut Writer, budget: usize) -> Result<PromoteReport> {
        self.check(writer)?;
        let State { db, layers, .. } = self.state.borrow().clone();
        let waiting = || layers.iter().filter(|(_, record)| is_promoted(record));
        let sound = waiting().find(|(layer, _)| !writer.unpromotable.contains(layer));
        let Some((layer, record)) = sound.or_else(|| waiting().next()) else {
            return Ok(PromoteReport::default());
        };
        let Some(base) = record.base else { return Ok(PromoteReport::default()) };
        let promoted = self.promote_some(writer, &db, layer, *record, base, budget).await;
        match &promoted {
            Err(error) if error.kind() == ErrorKind::Corrupt => writer.unpromotable.insert(layer),
            Ok(_) => writer.unpromotable.remove(&layer),
            Err(_) => false,
        };
        let page_count = promoted?;
        Ok(PromoteReport { page_count, layers_left: self.promote_count() })
    }

    async fn promote_some(
        &self,
        writer: &mut Writer,
        db: &super::Database,
        layer: LayerId,
        record: LayerRecord,
        base: Base,
        budget: usize,
    ) -> Result<u64> {
        let pages = base.next_page..=u32::MAX;
        let (numbers, until) = self.numbers_between(db, layer, pages, budget.max(1)).await?;
        let mut draft = Draft::new(self);
        let mut touched = Vec::new();
        for number in &numbers {
            if let Some(under) = self.base_page(layer, *number).await? {
                self.promote_page(&mut draft, layer, *number, base.lsn, under).await?;
                touched.push(((layer, *number), None));
            }
        }
        let next = until.checked_add(1);
        let base = next.map(|next_page| Base { next_page, ..base });
        let record = LayerRecord { base, ..record };
        draft.put(&keys::layer_key(layer), &record.encode());
        let mut prune = None;
        if let Some(parent) = record.parent.filter(|_| base.is_none()) {
            // Blocks that were kept only for this layer may go.
            let before = self.prunes.lock().get(&parent).copied();
            let again = Prune::again(before);
            draft.put(&keys::prune_key(parent), &again.encode());
            prune = Some((parent, again));
        }
        let live = self.draft_live(&mut draft).await?;
        let live_delta = draft.live_delta;
        self.write(writer, draft.batch).await?;
        fail_point!("promote-written");
        self.space.apply(&[], &[], live_delta);
        self.prunes.lock().extend(prune);
        self.set_layers(self.layers().with([(layer, record)]));
        self.apply(Fresh { bytes_left: 0, pages: touched }, &[], live, Forget::Nothing);
        Ok(numbers.len() as u64)
    }

    /// Gives a page of a layer the contents of its base, for all readers including those of
    /// snapshots.
    async fn promote_page(
        &self,
        draft: &mut Draft<'_>,
        layer: LayerId,
        number: u32,
        base_lsn: Lsn,
        under: Arc<Page>,
    ) -> Result<()> {
        let (before, mut history) = self.history(layer, number, true).await?;
        let (snapshots, ranges) = (self.snapshots(), self.ranges().cuts(layer, number));
        let living = snapshots.of(layer);
        let first = [
            history.copies.first().map(|copy| copy.since),
            history.operands.first().map(|operand| operand.lsn),
            ranges.first().copied(),
        ];
        let first = first.into_iter().flatten().min();
        // The newest snapshot that shows the base here.
        let shown_to = first.map(|first| living.partition_point(|snapshot| *snapshot < first));
        let last = shown_to.map(|end| living[..end].last().copied());
        let is_plain = history.operands.is_empty() || self.seeded_bugs.promoted_over_newer;
        if is_plain {
            if last != Some(None) || self.seeded_bugs.promoted_over_newer {
                let mut plain = Vec::with_capacity(32 + 12 * under.runs.len());
                let kind = OperandKind::Image { copy: Lsn::NONE };
                pages::encode(base_lsn, kind, &under.runs, &mut plain);
                draft.put(&keys::page_key(layer, number), &plain);
                draft.recount(&[], under.runs.iter().copied());
            }
            return Ok(());
        }
        if let Some(until) = last.flatten() {
            let copy = Copy { until, since: base_lsn, runs: under.runs.to_vec() };
            put_copy(draft, layer, number, &copy);
            history.copies.insert(0, copy);
        }
        let preserve = Preserve {
            layer,
            page: number,
            lsn: before.page.last_lsn.max(ranges.last().copied().unwrap_or_default()),
            runs: before.page.runs.to_vec(),
            ranges,
            living,
            moved: &[],
            base: Some(under),
            is_former: false,
            is_promoted: true,
        };
        draft.preserve(&mut CommitReport::default(), &history, preserve);
        Ok(())
    }

    /// Releases one former layer that shows nothing any more, so that its base is no longer kept
    /// for it. A layer without children is forgotten. Returns `false` if there is none.
    ///
    /// # Errors
    /// Like [`Map::commit`].
    pub async fn forget_layer(&self, writer: &mut Writer) -> Result<bool> {
        self.check(writer)?;
        let State { db, layers, ranges, .. } = self.state.borrow().clone();
        let snapshots = self.snapshots();
        for (layer, record) in layers.iter().filter(|(_, record)| record.is_former) {
            let has_children = layers.parents().any(|parent| parent == layer);
            let is_needed = (has_children && record.base.is_none())
                || !snapshots.of(layer).is_empty()
                || ranges.iter().any(|(of, _)| of == layer)
                || self.prunes.lock().contains_key(&layer);
            if is_needed || self.has_pages(&db, layer).await? {
                continue;
            }
            let mut draft = Draft::new(self);
            let left = has_children.then_some(LayerRecord { base: None, ..*record });
            match &left {
                Some(record) => draft.put(&keys::layer_key(layer), &record.encode()),
                None => draft.delete(&keys::layer_key(layer)),
            }
            let mut prune = None;
            if let Some(parent) = record.parent.filter(|_| record.base.is_some()) {
                let again = Prune::again(self.prunes.lock().get(&parent).copied());
                draft.put(&keys::prune_key(parent), &again.encode());
                prune = Some((parent, again));
            }
            self.write(writer, draft.batch).await?;
            fail_point!("forget-written");
            // Must precede the release of the layer: an observer in between must see that work is
            // left.
            self.prunes.lock().extend(prune);
            match left {
                Some(record) => self.set_layers(layers.with([(layer, record)])),
                None => {
                    writer.forget_known(layer);
                    self.set_layers(layers.without(layer));
                }
            }
            return Ok(true);
        }
        Ok(false)
    }

    /// Whether any page or copy of the layer is stored.
    async fn has_pages(&self, db: &super::Database, layer: LayerId) -> Result<bool> {
        let pages = (keys::page_key(layer, 0), keys::page_key(layer, u32::MAX));
        let copies =
            (keys::copy_key(layer, 0, Lsn::NONE), keys::copy_key(layer, u32::MAX, Lsn(u64::MAX)));
        let all = [(pages.0.to_vec(), pages.1.to_vec()), (copies.0.to_vec(), copies.1.to_vec())];
        debug_assert!(all[0].0[0] == family::PAGE && all[1].0[0] == family::COPY);
        for (from, until) in all {
            let found = entries(db, Bound::Included(from), Bound::Included(until), 1).await?;
            if !found.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Whether the layer is being made independent. Former layers never are: they go with their last
/// snapshot.
fn is_promoted(record: &LayerRecord) -> bool {
    !record.is_former && record.base.is_some_and(|base| base.is_promoted)
}
