//! A model of the metadata database: where blocks and the fragments of segments are.
//!
//! Invariants:
//! - Each change is atomic, and refused unless it is of the owner that opened the database last.
//! - The generations of a fragment ascend, so a place that was left is never named again.
//! - The record of a segment goes before its fragments do, and only when no block names it.

use block::{Epoch, Error, ErrorKind, Lsn, Result};
use erasure::{Cuts, Scheme};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Where a fragment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) store: usize,
    pub(crate) generation: u64,
}

/// The record of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) number: u64,
    pub(crate) scheme: Scheme,
    pub(crate) cuts: Cuts,
    /// Of each fragment, by index; `None` for one that was never written.
    pub(crate) places: Vec<Option<Place>>,
}

#[derive(Default)]
struct TierState {
    opened: Epoch,
    destaged: Lsn,
    /// Of each block, the segment and the offset in its image.
    blocks: BTreeMap<u64, (u64, u32)>,
    records: BTreeMap<u64, Record>,
}

impl TierState {
    fn check(&self, epoch: Epoch) -> Result<()> {
        let what = "change the metadata: a later owner has it";
        match epoch == self.opened {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Fenced, what)),
        }
    }
}

/// The metadata database. Clones are handles to the same.
#[derive(Clone, Default)]
pub(crate) struct Tier(Arc<Mutex<TierState>>);

impl Tier {
    /// Opens the metadata, which fences the owners of earlier epochs. Returns the destaged LSN.
    pub(crate) fn open(&self, epoch: Epoch) -> Result<Lsn> {
        let mut tier = self.0.lock();
        if epoch < tier.opened {
            return Err(Error::new(ErrorKind::Fenced, "open the metadata: a later owner has it"));
        }
        tier.opened = epoch;
        Ok(tier.destaged)
    }

    /// Takes the blocks of a generation up to an LSN, with the segment that has them, if there are any.
    pub(crate) fn commit_segment(
        &self,
        epoch: Epoch,
        record: Option<Record>,
        blocks: &[(u64, u32)],
        up_to: Lsn,
    ) -> Result<()> {
        let mut tier = self.0.lock();
        tier.check(epoch)?;
        if let Some(record) = record {
            let number = record.number;
            let before = tier.records.insert(number, record);
            assert!(before.is_none(), "segment {number} is committed twice");
            tier.blocks.extend(blocks.iter().map(|(block, at)| (*block, (number, *at))));
        }
        tier.destaged = tier.destaged.max(up_to);
        Ok(())
    }

    /// Names another place of a fragment if it has still the old one.
    pub(crate) fn set_placement(
        &self,
        epoch: Epoch,
        (number, index): (u64, usize),
        old: Option<Place>,
        new: Place,
    ) -> Result<bool> {
        let mut tier = self.0.lock();
        tier.check(epoch)?;
        let Some(record) = tier.records.get_mut(&number) else { return Ok(false) };
        let is_old = record.places[index] == old;
        if is_old {
            record.places[index] = Some(new);
        }
        Ok(is_old)
    }

    /// Removes the segments that no block names any more, and returns them.
    pub(crate) fn remove_unnamed(&self, epoch: Epoch) -> Result<Vec<Record>> {
        let mut tier = self.0.lock();
        let named: BTreeSet<u64> = tier.blocks.values().map(|(number, _)| *number).collect();
        let numbers = tier.records.keys().copied();
        let unnamed: Vec<u64> = numbers.filter(|number| !named.contains(number)).collect();
        // Without a change, an owner does not learn of a later one.
        if !unnamed.is_empty() {
            tier.check(epoch)?;
        }
        Ok(unnamed.iter().filter_map(|number| tier.records.remove(number)).collect())
    }

    /// Returns the segment of a block, and the block's offset in its image.
    pub(crate) fn find(&self, block: u64) -> Option<(Record, u32)> {
        let tier = self.0.lock();
        let (number, at) = tier.blocks.get(&block)?;
        let record = tier.records.get(number).expect("a block names a segment that is there");
        Some((record.clone(), *at))
    }

    pub(crate) fn record(&self, number: u64) -> Option<Record> {
        self.0.lock().records.get(&number).cloned()
    }

    /// Returns all records, in order.
    pub(crate) fn records(&self) -> Vec<Record> {
        self.0.lock().records.values().cloned().collect()
    }

    /// Returns the blocks that name a segment, with their offsets.
    pub(crate) fn blocks_of(&self, number: u64) -> Vec<(u64, u32)> {
        let tier = self.0.lock();
        let of_it = tier.blocks.iter().filter(|(_, (segment, _))| *segment == number);
        of_it.map(|(block, (_, at))| (*block, *at)).collect()
    }
}
