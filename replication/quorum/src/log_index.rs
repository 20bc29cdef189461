//! The positions of the batches that a log has.
//!
//! Invariants:
//! - Sequences are dense, and epochs never fall from one batch to the next.
//! - Its size is the number of epochs in the log, not of batches.

use block::{Epoch, Position};

/// Batches of one epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Run {
    first: u64,
    epoch: Epoch,
}

/// The positions in a log.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LogIndex {
    /// Position of the batch before the first one.
    before: Position,
    runs: Vec<Run>,
    /// Sequence of the newest batch.
    last: u64,
}

impl LogIndex {
    /// Makes the index of an empty log that begins behind `before`.
    #[must_use]
    pub fn new(before: Position) -> LogIndex {
        LogIndex { before, runs: Vec::new(), last: before.sequence }
    }

    /// Position of the newest batch, or of the one before an empty log.
    #[must_use]
    pub fn tail(&self) -> Position {
        self.at(self.last).expect("the log has its tail")
    }

    /// Sequence of the first batch that the log has or will have.
    #[must_use]
    pub fn start(&self) -> u64 {
        self.before.sequence + 1
    }

    /// Position of the batch before the first one that the log has or will have.
    #[must_use]
    pub fn before(&self) -> Position {
        self.before
    }

    /// Position of the batch with this sequence, or of the one before the log.
    #[must_use]
    pub fn at(&self, sequence: u64) -> Option<Position> {
        if sequence == self.before.sequence {
            return Some(self.before);
        }
        if sequence < self.before.sequence || sequence > self.last {
            return None;
        }
        let run = self.runs.iter().rev().find(|run| run.first <= sequence)?;
        Some(Position { epoch: run.epoch, sequence })
    }

    /// Whether the log has this batch, or begins behind it.
    #[must_use]
    pub fn has(&self, position: Position) -> bool {
        self.at(position.sequence) == Some(position)
    }

    /// Newest batch that is not above `sequence` and not of a later epoch than `epoch`, or the place
    /// before the log.
    #[must_use]
    pub fn newest_up_to(&self, sequence: u64, epoch: Epoch) -> Position {
        let later = self.runs.iter().find(|run| run.epoch > epoch);
        let end = later.map_or(self.last, |run| run.first - 1);
        self.at(end.min(sequence)).unwrap_or(self.before)
    }

    /// Adds a batch behind the newest one.
    ///
    /// # Panics
    /// If the sequence is not the next one or the epoch falls.
    pub fn push(&mut self, position: Position) {
        let tail = self.tail();
        assert_eq!(position.sequence, tail.sequence + 1, "sequences are dense");
        assert!(position.epoch >= tail.epoch, "epochs never fall");
        if self.runs.last().is_none_or(|run| run.epoch != position.epoch) {
            self.runs.push(Run { first: position.sequence, epoch: position.epoch });
        }
        self.last = position.sequence;
    }

    /// Releases every batch up to `sequence`, at most the newest one.
    pub fn release(&mut self, sequence: u64) {
        let Some(before) = self.at(sequence.min(self.last)) else { return };
        self.before = before;
        let first = before.sequence + 1;
        let released = self.runs.iter().skip(1).take_while(|run| run.first <= first).count();
        self.runs.drain(..released);
        if let Some(run) = self.runs.first_mut() {
            run.first = run.first.max(first);
        }
        self.runs.retain(|run| run.first <= self.last);
    }

    /// Drops every batch above `sequence`.
    pub fn cut(&mut self, sequence: u64) {
        self.last = self.last.min(sequence.max(self.before.sequence));
        self.runs.retain(|run| run.first <= self.last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn position(epoch: u64, sequence: u64) -> Position {
        Position { epoch: Epoch(epoch), sequence }
    }

    fn log(epochs: &[u64]) -> LogIndex {
        let mut log = LogIndex::new(position(1, 10));
        for (epoch, sequence) in epochs.iter().zip(11..) {
            log.push(position(*epoch, sequence));
        }
        log
    }

    #[test]
    fn positions_are_found_and_cut() {
        let mut log = log(&[1, 1, 3, 3, 4]);
        assert_eq!((log.start(), log.tail()), (11, position(4, 15)));
        assert_eq!(log.at(10), Some(position(1, 10)));
        assert_eq!((log.at(9), log.at(16)), (None, None));
        assert_eq!(log.at(13), Some(position(3, 13)));
        assert!(log.has(position(3, 14)) && !log.has(position(2, 14)));
        assert_eq!(log.newest_up_to(99, Epoch(3)), position(3, 14));
        assert_eq!(log.newest_up_to(13, Epoch(9)), position(3, 13));
        assert_eq!(log.newest_up_to(99, Epoch(0)), position(1, 10));
        assert_eq!(log.newest_up_to(3, Epoch(9)), position(1, 10));
        log.cut(13);
        assert_eq!(log.tail(), position(3, 13));
        log.cut(3);
        assert_eq!(log.tail(), position(1, 10), "what was released is not cut");
        log.push(position(7, 11));
        assert_eq!(log.tail(), position(7, 11));
    }

    #[test]
    fn released_batches_leave_the_position_before_the_log() {
        for released in 11..=15 {
            let mut log = log(&[1, 1, 3, 3, 4]);
            let all = log.clone();
            log.release(released);
            assert_eq!((log.start(), Some(log.before())), (released + 1, all.at(released)));
            assert_eq!(log.tail(), position(4, 15));
            for sequence in 9..=16 {
                let expected = all.at(sequence).filter(|_| sequence >= released);
                assert_eq!(log.at(sequence), expected, "{sequence} after {released}");
            }
            let mut again = LogIndex::new(log.before());
            (released + 1..=15).for_each(|sequence| again.push(all.at(sequence).unwrap()));
            assert_eq!(again, log, "it equals the index of what is left");
            log.release(99);
            assert_eq!(log, LogIndex::new(position(4, 15)));
        }
    }
}
