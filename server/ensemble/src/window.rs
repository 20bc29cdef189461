//! The newest batches of the owner's log, in memory, for members that keep up.
//!
//! Invariants:
//! - Sequences are dense, and the bytes are bounded: the oldest batches leave first. A member that
//!   needs them gets them from the ring.

use block::Position;
use bytes::Bytes;
use replication::Batch;
use std::collections::VecDeque;

/// The newest batches; see the head of the file.
#[derive(Debug)]
pub(crate) struct Window {
    batches: VecDeque<Batch>,
    bytes: usize,
    bytes_max: usize,
}

impl Window {
    /// Makes a window of at most `bytes_max` bytes; it holds at least the newest batch.
    pub(crate) fn new(bytes_max: usize) -> Window {
        Window { batches: VecDeque::new(), bytes: 0, bytes_max }
    }

    /// Adds the batch that follows the newest one.
    ///
    /// # Panics
    /// If it does not follow.
    pub(crate) fn push(&mut self, position: Position, bytes: Bytes) {
        if let Some(newest) = self.batches.back() {
            assert_eq!(position.sequence, newest.position.sequence + 1, "sequences are dense");
        }
        self.bytes += bytes.len();
        self.batches.push_back(Batch { position, bytes });
        while self.bytes > self.bytes_max && self.batches.len() > 1 {
            self.bytes -= self.batches.pop_front().map_or(0, |oldest| oldest.bytes.len());
        }
    }

    /// Returns the batches from `first` to `last`, as many as fit `bytes_max`, at least one. `None` if
    /// the window does not have `first`.
    pub(crate) fn batches(&self, first: u64, last: u64, bytes_max: usize) -> Option<Vec<Batch>> {
        let oldest = self.batches.front()?.position.sequence;
        let skipped = usize::try_from(first.checked_sub(oldest)?).ok()?;
        if skipped >= self.batches.len() {
            return None;
        }
        let (mut found, mut bytes) = (Vec::new(), 0);
        for batch in self.batches.range(skipped..) {
            bytes += batch.bytes.len();
            let is_past = batch.position.sequence > last;
            if is_past || !found.is_empty() && bytes > bytes_max {
                break;
            }
            found.push(batch.clone());
        }
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Epoch;

    #[test]
    fn window_keeps_the_newest_batches_that_fit() {
        let mut window = Window::new(10);
        let position = |sequence| Position { epoch: Epoch(1), sequence };
        let sequences = |found: Option<Vec<Batch>>| -> Option<Vec<u64>> {
            found.map(|found| found.iter().map(|batch| batch.position.sequence).collect())
        };
        assert_eq!(sequences(window.batches(5, 9, 100)), None);
        for sequence in 5..10 {
            window.push(position(sequence), Bytes::from_static(b"four"));
        }
        assert_eq!(sequences(window.batches(7, 9, 100)), None, "it left");
        assert_eq!(sequences(window.batches(8, 9, 100)), Some(vec![8, 9]));
        assert_eq!(sequences(window.batches(8, 8, 100)), Some(vec![8]));
        assert_eq!(sequences(window.batches(8, 9, 1)), Some(vec![8]), "at least one");
        assert_eq!(sequences(window.batches(10, 10, 100)), None);
        window.push(position(10), Bytes::from(vec![0; 40]));
        assert_eq!(sequences(window.batches(10, 10, 1)), Some(vec![10]), "a large one is kept");
    }
}
