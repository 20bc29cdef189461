//! The oracle: for each block, the versions that a read may show, over all clients and owners.
//!
//! Invariants:
//! - A block has one writer, which writes ascending versions, one at a time. Anybody may read it.
//! - A version that was acknowledged, or that a read has shown, is the least that later reads may show.
//! - After a write without an answer its writer reads the block before it writes again. A version that
//!   this read does not show must never appear: the request has ended by then wherever it went.
//! - Only after a loss of power may an owner report lost writes. What was flushed is the least then.

use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone, Debug, Default)]
struct Block {
    /// Newest version that was begun.
    begun: u64,
    /// Oldest version that a read may show.
    least: u64,
    /// Epoch of the owner that acknowledged or showed it.
    epoch: u64,
    flushed: u64,
    /// Versions that will never appear.
    dead: BTreeSet<u64>,
}

impl Block {
    /// An owner has acknowledged or shown a version.
    fn raise(&mut self, answered: Answered) {
        if answered.version > self.least {
            (self.least, self.epoch) = (answered.version, answered.epoch);
        }
    }
}

#[derive(Default)]
struct Known {
    blocks: BTreeMap<u64, Block>,
    /// Owners by epoch.
    openings: BTreeMap<u64, String>,
    /// A loss of power may have taken writes that were not flushed.
    may_lose: bool,
    loss_count: u64,
    failure: Option<String>,
}

/// The oracle; see the head of the file. Clones are handles to the same.
#[derive(Clone, Default)]
pub(crate) struct Oracle(Arc<Mutex<Known>>);

/// A read that is under way.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    block: u64,
    before: Block,
    loss_count: u64,
}

/// A flush that is under way: the versions that it covers.
#[derive(Clone, Debug)]
pub(crate) struct Flushing {
    covered: BTreeMap<u64, Block>,
    loss_count: u64,
}

/// The answer of an owner.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answered {
    pub(crate) node: usize,
    pub(crate) epoch: u64,
    /// The version that was written or read.
    pub(crate) version: u64,
}

impl Oracle {
    pub(crate) fn fail(&self, failure: String) {
        self.0.lock().failure.get_or_insert(failure);
    }

    pub(crate) fn failure(&self) -> Option<String> {
        self.0.lock().failure.clone()
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.0.lock().failure.is_some()
    }

    /// Returns the version to write.
    pub(crate) fn begin_write(&self, block: u64) -> u64 {
        let mut known = self.0.lock();
        let block = known.blocks.entry(block).or_default();
        block.begun += 1;
        block.begun
    }

    pub(crate) fn end_write(&self, block: u64, answered: Answered) {
        let mut known = self.0.lock();
        known.blocks.entry(block).or_default().raise(answered);
    }

    pub(crate) fn begin_flush(&self) -> Flushing {
        let known = self.0.lock();
        Flushing { covered: known.blocks.clone(), loss_count: known.loss_count }
    }

    /// A flush was answered. It covers what this owner or an earlier one had acknowledged before.
    pub(crate) fn end_flush(&self, flushing: &Flushing, answered: Answered) {
        let mut known = self.0.lock();
        if known.loss_count != flushing.loss_count {
            return;
        }
        let covered = flushing.covered.iter().filter(|(_, one)| one.epoch <= answered.epoch);
        for (block, Block { least, .. }) in covered {
            let block = known.blocks.entry(*block).or_default();
            block.flushed = block.flushed.max(*least);
        }
    }

    pub(crate) fn begin_read(&self, block: u64) -> Reading {
        let mut known = self.0.lock();
        let before = known.blocks.entry(block).or_default().clone();
        Reading { block, before, loss_count: known.loss_count }
    }

    /// Takes the version that a read has shown. `by_writer`: nothing else was under way for the block.
    pub(crate) fn end_read(
        &self,
        reading: &Reading,
        answered: Answered,
        by_writer: bool,
        at: Duration,
    ) {
        let Answered { node, epoch, version } = answered;
        let mut known = self.0.lock();
        let is_after_loss = known.loss_count != reading.loss_count;
        let Reading { block, before, .. } = reading;
        let now = known.blocks.entry(*block).or_default();
        let least = if is_after_loss { before.least.min(now.flushed) } else { before.least };
        let is_dead = before.dead.contains(&version);
        if version < least || version > now.begun || is_dead {
            let Block { begun, flushed, .. } = now;
            let failure = format!(
                "{at:?}: node {node} showed in epoch {epoch} version {version} of block {block}: the least is {least}, {flushed} was flushed, {begun} \
                 was begun, and it {} come any more",
                if is_dead { "could not" } else { "could" }
            );
            known.failure.get_or_insert(failure);
            return;
        }
        if is_after_loss {
            return;
        }
        now.raise(answered);
        if by_writer {
            now.dead.extend(version + 1..=now.begun);
        }
    }

    pub(crate) fn on_power_loss(&self) {
        self.0.lock().may_lose = true;
    }

    /// An owner has opened the log of an epoch. `is_loss`: it reports that writes may be lost.
    pub(crate) fn on_opened(&self, epoch: u64, owner: String, is_loss: bool) {
        let mut known = self.0.lock();
        if let Some(other) = known.openings.insert(epoch, owner.clone()) {
            let failure = format!("{owner} and {other} both opened epoch {epoch}");
            known.failure.get_or_insert(failure);
        }
        if !is_loss {
            return;
        }
        if !known.may_lose {
            let failure = format!("{owner} reports lost writes in epoch {epoch} without a cause");
            known.failure.get_or_insert(failure);
        }
        known.loss_count += 1;
        known.blocks.values_mut().for_each(|block| block.least = block.flushed);
    }
}
