//! The disk of a machine: its log, its document, and which of them a loss of power takes.
//!
//! Invariants:
//! - A loss of power keeps any prefix of the batches that were not synced, or brings back batches that
//!   were synced and cut since.
//! - A damaged batch stays damaged until it is cut.

use super::index;
use crate::batch::Batch;
use crate::follower::{Document, Found};
use crate::log_index::LogIndex;
use block::Position;
use uuid::Uuid;

/// A batch whose bytes are not whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Damage {
    pub(super) sequence: u64,
    /// The member has started since.
    pub(super) is_old: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Disk {
    pub(super) document: Document,
    pub(super) before: Position,
    pub(super) log: Vec<Batch>,
    /// Batches of `log` on stable storage.
    pub(super) synced: usize,
    /// Batches on stable storage behind these, which were cut.
    cut: Vec<Batch>,
    pub(super) damage: Option<Damage>,
    /// The bytes behind the log are those of a batch that was being written when the process ended.
    pub(super) is_torn: bool,
    /// The member's note of its newest batch, which a loss of power takes.
    noted: Option<u64>,
    is_note_forgotten: bool,
}

impl Disk {
    pub(super) fn new(document: Document, is_note_forgotten: bool) -> Disk {
        let (log, cut) = (Vec::new(), Vec::new());
        let (damage, is_torn, noted) = (None, false, None);
        let before = Position::START;
        let synced = 0;
        Disk { document, before, log, synced, cut, damage, is_torn, noted, is_note_forgotten }
    }

    /// Writes batches behind the newest one, and notes it.
    pub(super) fn write(&mut self, batches: impl IntoIterator<Item = Batch>) {
        self.log.extend(batches);
        self.is_torn = false;
        if !self.is_note_forgotten {
            self.noted = Some(self.index().tail().sequence);
        }
    }

    fn count(&self, sequence: u64) -> usize {
        usize::try_from(sequence.saturating_sub(self.before.sequence)).expect("small")
    }

    /// Batches behind `previous`, up to the one with the sequence `last`.
    pub(super) fn read(&self, previous: u64, last: u64) -> Option<&[Batch]> {
        self.log.get(self.count(previous)..self.count(last))
    }

    /// All batches behind `previous`.
    pub(super) fn read_all(&self, previous: u64) -> &[Batch] {
        self.log.get(self.count(previous)..).unwrap_or_default()
    }

    /// The damaged batch, if it is one of these.
    pub(super) fn damaged(&self, previous: u64, last: u64) -> Option<u64> {
        let sequence = self.damage?.sequence;
        (previous < sequence && sequence <= last).then_some(sequence)
    }

    pub(super) fn has(&self, position: Position) -> bool {
        let at = self.count(position.sequence).checked_sub(1);
        at.and_then(|at| self.log.get(at)).is_some_and(|batch| batch.position == position)
    }

    pub(super) fn index(&self) -> LogIndex {
        index(self.before, &self.log)
    }

    pub(super) fn start(&mut self, page_cache: Uuid) -> Found {
        let damaged = self.damage.as_mut().map(|damage| {
            damage.is_old = true;
            damage.sequence
        });
        let log = self.index();
        let torn = self.is_torn.then(|| log.tail().sequence + 1);
        let noted = self.noted.or(self.is_note_forgotten.then_some(0));
        let (document, damaged, has_failed) = (self.document, damaged.or(torn), false);
        Found { document, log, damaged, noted, page_cache, has_failed }
    }

    pub(super) fn cut(&mut self, sequence: u64) {
        let end = self.count(sequence).min(self.log.len());
        self.is_torn = false;
        self.noted = self.noted.map(|noted| noted.min(sequence));
        if end < self.synced {
            self.cut.splice(0..0, self.log[end..self.synced].iter().cloned());
            self.synced = end;
        }
        self.log.truncate(end);
        self.damage = self.damage.filter(|damage| damage.sequence <= sequence);
    }

    pub(super) fn reset(&mut self, before: Position) {
        self.log.clear();
        self.cut.clear();
        (self.before, self.synced, self.damage) = (before, 0, None);
        self.is_torn = false;
        self.noted = self.noted.map(|noted| noted.min(before.sequence));
    }

    pub(super) fn release(&mut self, before: Position) {
        let count = self.count(before.sequence);
        self.log.drain(..count);
        if count > self.synced {
            self.cut.clear();
        }
        self.synced = self.synced.saturating_sub(count);
        self.before = before;
        self.damage = self.damage.filter(|damage| damage.sequence > before.sequence);
    }

    pub(super) fn sync(&mut self) {
        self.synced = self.log.len();
        self.cut.clear();
    }

    /// Lengths of the log that a loss of power may leave; `None` brings back batches that were cut.
    pub(super) fn after_power_loss(&self) -> impl Iterator<Item = Option<usize>> {
        let cut = (!self.cut.is_empty()).then_some(None);
        (self.synced..=self.log.len()).map(Some).chain(cut)
    }

    /// Loses what the kernel could not write, after a failure that the document tells of. The note says
    /// what it last said on the disk, too.
    pub(super) fn fail(&mut self, document: Document, kept: Option<usize>) {
        self.lose_power(kept);
        (self.document, self.noted) = (document, Some(self.index().tail().sequence));
    }

    pub(super) fn lose_power(&mut self, kept: Option<usize>) {
        (self.is_torn, self.noted) = (false, None);
        self.log.truncate(kept.unwrap_or(self.synced));
        match kept {
            Some(_) => self.cut.clear(),
            None => self.log.append(&mut self.cut),
        }
        self.synced = self.log.len();
        let tail = self.index().tail().sequence;
        self.damage = self.damage.filter(|damage| damage.sequence <= tail);
    }
}
