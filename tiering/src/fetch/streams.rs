//! Detection of sequential streams among the reads of all volumes. Pure logic.
//!
//! Invariants:
//! - A bounded number of streams is remembered; the one that has been idle longest is forgotten.
//! - While a stream continues, advice never asks for a byte twice, and never for more than a window
//!   ahead of the data already read.

use super::{Access, Advice};
use block::VolumeId;

/// Maximum number of remembered streams, over all volumes. Chosen by hand.
const STREAM_COUNT_MAX: usize = 128;
/// Maximum distance between two reads of one stream, in bytes: clients send several requests
/// concurrently, and they arrive in any order. Chosen by hand, from 4 requests of 128 KiB.
const SLACK_BYTES: u64 = 512 << 10;
/// Bytes read in sequence that make a stream. Chosen by hand: one small extra read is not enough.
const RUN_BYTES_MIN: u64 = 64 << 10;
/// First window. Chosen by hand.
const WINDOW_BYTES_FIRST: u64 = 256 << 10;

#[derive(Clone, Copy, Debug)]
struct Stream {
    volume: VolumeId,
    /// End of the data read so far.
    next: u64,
    /// Bytes by which `next` has advanced in sequence.
    run_bytes: u64,
    /// Reads that belong to the stream.
    read_count: u64,
    /// End of the range for which read-ahead was advised.
    ahead: u64,
    window_bytes: u64,
    used_at: u64,
}

/// The detector; see the module.
#[derive(Debug)]
pub struct Streams {
    streams: Vec<Stream>,
    window_bytes_max: u64,
    time: u64,
}

impl Streams {
    /// Creates a detector. A `window_bytes_max` of 0 disables read-ahead.
    #[must_use]
    pub fn new(window_bytes_max: u64) -> Self {
        Streams { streams: Vec::new(), window_bytes_max, time: 0 }
    }

    /// Registers a read, in bytes of the volume, and returns advice on how to carry it out.
    pub fn on_read(&mut self, volume: VolumeId, offset: u64, length: u64) -> Advice {
        self.time += 1;
        let end = offset.saturating_add(length);
        let follows = |stream: &&mut Stream| {
            stream.volume == volume
                && offset <= stream.next.saturating_add(SLACK_BYTES)
                && end.saturating_add(SLACK_BYTES) >= stream.next
        };
        // Choose the nearest where two streams of one volume are close to each other.
        let nearest =
            self.streams.iter_mut().filter(follows).min_by_key(|s| s.next.abs_diff(offset));
        let Some(stream) = nearest else {
            self.remember(volume, end);
            return Advice::default();
        };
        stream.used_at = self.time;
        if offset > stream.next || end <= stream.next {
            // A gap, or a repeated read: this neither advances the sequence nor ends it.
            let is_late = end <= stream.next;
            stream.next = stream.next.max(end);
            stream.run_bytes = if is_late { stream.run_bytes } else { stream.run_bytes / 2 };
        } else {
            stream.run_bytes = stream.run_bytes.saturating_add(end - stream.next);
            stream.next = end;
            stream.read_count += 1;
        }
        if stream.run_bytes < RUN_BYTES_MIN || stream.read_count < 2 {
            return Advice::default();
        }
        Advice { access: Access::Sequential, ahead: stream.advance(self.window_bytes_max) }
    }

    fn remember(&mut self, volume: VolumeId, next: u64) {
        let window_bytes = WINDOW_BYTES_FIRST.min(self.window_bytes_max);
        let used_at = self.time;
        let stream =
            Stream { volume, next, run_bytes: 0, read_count: 0, ahead: 0, window_bytes, used_at };
        if self.streams.len() < STREAM_COUNT_MAX {
            self.streams.push(stream);
        } else if let Some(oldest) = self.streams.iter_mut().min_by_key(|stream| stream.used_at) {
            *oldest = stream;
        }
    }
}

impl Stream {
    /// Returns the next range to read ahead, once half of the last one has been consumed.
    fn advance(&mut self, window_bytes_max: u64) -> Option<std::ops::Range<u64>> {
        let start = self.ahead.max(self.next);
        if window_bytes_max == 0 || start - self.next > self.window_bytes / 2 {
            return None;
        }
        let end = self.next.checked_add(self.window_bytes)?;
        self.window_bytes = (self.window_bytes * 2).min(window_bytes_max);
        self.ahead = end;
        Some(start..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, seeds};

    const VOLUME: VolumeId = VolumeId(1);

    #[test]
    fn a_sequence_gets_growing_windows_that_never_overlap() {
        let mut streams = Streams::new(4 << 20);
        let mut ahead = 0;
        let mut advised_bytes = 0;
        for n in 0..1000u64 {
            let advice = streams.on_read(VOLUME, n * 65536, 65536);
            let read = (n + 1) * 65536;
            if let Some(range) = advice.ahead {
                assert_eq!(advice.access, Access::Sequential);
                assert!(range.start >= ahead.max(read), "{range:?} after {ahead}");
                assert!(range.end <= read + (4 << 20), "never more than a window ahead");
                ahead = range.end;
                advised_bytes += range.end - range.start;
            }
            assert!(n < 3 || ahead > read, "at {n}: the stream must stay ahead");
        }
        assert!(advised_bytes >= 990 * 65536, "all but the first reads are read ahead");
        assert_eq!(streams.streams.len(), 1);
    }

    #[test]
    fn requests_of_a_sequence_may_arrive_in_any_order() {
        for seed in seeds(20) {
            let mut rng = Rng::new(seed);
            let mut streams = Streams::new(4 << 20);
            let mut sequential_count = 0;
            let mut order: Vec<u64> = (0..400).collect();
            for n in 0..399 {
                if rng.below(3) == 0 {
                    order.swap(n, n + 1);
                }
            }
            for n in order {
                let advice = streams.on_read(VOLUME, n * 131_072, 131_072);
                sequential_count += u32::from(advice.access == Access::Sequential);
            }
            assert!(sequential_count > 350, "SEED={seed}: {sequential_count}");
        }
    }

    #[test]
    fn random_reads_are_not_a_stream() {
        for seed in seeds(20) {
            let mut rng = Rng::new(seed);
            let mut streams = Streams::new(4 << 20);
            let mut ahead_count = 0;
            for _ in 0..10_000 {
                let advice = streams.on_read(VOLUME, rng.below(1 << 20) * 8192, 8192);
                ahead_count += u32::from(advice.ahead.is_some());
            }
            assert!(ahead_count < 10, "SEED={seed}: {ahead_count}");
            assert!(streams.streams.len() <= STREAM_COUNT_MAX);
        }
    }

    #[test]
    fn streams_of_several_volumes_do_not_disturb_each_other_and_zero_means_never() {
        let mut streams = Streams::new(4 << 20);
        let mut never = Streams::new(0);
        let mut ahead_count = [0; 3];
        for n in 0..100u64 {
            for volume in 0..3 {
                let advice = streams.on_read(VolumeId(volume), n * 65536, 65536);
                ahead_count[volume as usize] += u32::from(advice.ahead.is_some());
                let advice = never.on_read(VolumeId(volume), n * 65536, 65536);
                assert_eq!(advice.ahead, None);
            }
        }
        assert!(ahead_count.iter().all(|&count| count > 3), "{ahead_count:?}");
        let at_the_end = streams.on_read(VolumeId(1), u64::MAX - 10, 100);
        assert_eq!(at_the_end, Advice::default());
    }
}
