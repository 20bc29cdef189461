//! Bytes of the owner's log: those that were written, and those that were sent for them.
//!
//! Invariants:
//! - A batch counts as written once, when it is acknowledged.
//! - Batches that wait for that are as many as the log has in flight: the log bounds them.

use std::collections::VecDeque;

/// Bytes since this node became the owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogTraffic {
    /// Batches that were acknowledged.
    pub written_bytes: u64,
    /// Batches sent to members in the zone of this node, repeated ones included.
    pub sent_within_bytes: u64,
    /// Batches sent to members in other zones, repeated ones included.
    pub sent_across_bytes: u64,
}

/// Counts the bytes; see the head of the file.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    counted: LogTraffic,
    /// Sequence and bytes of each batch that is not acknowledged, as far as is known.
    waiting: VecDeque<(u64, u64)>,
}

impl Traffic {
    /// Takes a batch that is about to be written, while those up to `acknowledged` are.
    pub(crate) fn on_batch(&mut self, sequence: u64, bytes: usize, acknowledged: u64) {
        self.waiting.push_back((sequence, bytes as u64));
        self.on_acknowledged(acknowledged);
    }

    /// Takes batches that were sent to a member.
    pub(crate) fn on_sent(&mut self, bytes: usize, is_in_own_zone: bool) {
        let counter = match is_in_own_zone {
            true => &mut self.counted.sent_within_bytes,
            false => &mut self.counted.sent_across_bytes,
        };
        *counter += bytes as u64;
    }

    /// Returns the bytes, while batches up to `acknowledged` are.
    pub(crate) fn counted(&mut self, acknowledged: u64) -> LogTraffic {
        self.on_acknowledged(acknowledged);
        self.counted
    }

    fn on_acknowledged(&mut self, acknowledged: u64) {
        while let Some((_, bytes)) =
            self.waiting.pop_front_if(|(sequence, _)| *sequence <= acknowledged)
        {
            self.counted.written_bytes += bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_counts_as_written_when_it_is_acknowledged() {
        let mut traffic = Traffic::default();
        traffic.on_batch(5, 100, 4);
        traffic.on_batch(6, 20, 4);
        assert_eq!(traffic.counted(4), LogTraffic::default());
        assert_eq!(traffic.counted(5).written_bytes, 100);
        traffic.on_batch(7, 3, 7);
        assert_eq!(traffic.counted(7).written_bytes, 123);
        assert!(traffic.waiting.is_empty());
        traffic.on_sent(100, true);
        traffic.on_sent(7, false);
        let sent = traffic.counted(7);
        assert_eq!((sent.sent_within_bytes, sent.sent_across_bytes), (100, 7));
    }
}
