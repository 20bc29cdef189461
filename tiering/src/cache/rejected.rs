//! Counts frames of the cache file that do not verify, and logs many of them in one line.
//!
//! After a loss of power, the disk may hold a directory without the frames that it names. For a
//! cache that was not closed this is expected: it costs one read from the store per frame and needs
//! no warning. If the frames were proven to be on the disk, the disk loses data, which does need
//! one.
//!
//! Invariants:
//! - A line gives the number of frames since the previous line. The first line comes
//!   [`AFTER_FIRST`] after the first frame, and lines are [`BETWEEN`] apart, however many frames
//!   are rejected.

use crate::segment::{FrameRef, SegmentError};
use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Time to wait for more frames before the first line. Chosen by hand: reading a volume after a
/// loss of power meets most of them within seconds.
const AFTER_FIRST: Duration = Duration::from_secs(10);
/// Minimum time between two lines. Chosen by hand: people still read a day of them.
const BETWEEN: Duration = Duration::from_secs(600);

/// The frames rejected since the last line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Rejects {
    /// Frames of wraps from a run that did not close the cache.
    pub unproven_count: u64,
    /// All other frames.
    pub proven_count: u64,
    /// Names the first proven frame and the reason for its rejection.
    pub example: Option<String>,
}

#[derive(Debug, Default)]
struct State {
    rejects: Rejects,
    is_due: bool,
    told_at: Option<Instant>,
}

/// Collects rejected frames until the next line: see the module.
#[derive(Debug, Default)]
pub(super) struct Rejected(Mutex<State>);

impl Rejected {
    /// Counts a frame. Returns the time after which the caller must call [`Rejected::tell`], unless
    /// a call is already pending.
    pub fn note(
        &self,
        is_proven: bool,
        frame: &FrameRef,
        at: u64,
        error: &SegmentError,
        now: Instant,
    ) -> Option<Duration> {
        let mut state = self.0.lock();
        let rejects = &mut state.rejects;
        if is_proven {
            rejects.proven_count += 1;
            let (segment, index) = (frame.info.number.0, frame.at.frame_index);
            let name = || format!("segment {segment}, frame {index}, at byte {at}: {error}");
            rejects.example.get_or_insert_with(name);
        } else {
            rejects.unproven_count += 1;
        }
        if std::mem::replace(&mut state.is_due, true) {
            return None;
        }
        let next = state
            .told_at
            .map_or(Duration::ZERO, |told_at| (told_at + BETWEEN).saturating_duration_since(now));
        Some(next.max(AFTER_FIRST))
    }

    /// Takes the frames counted since the last call.
    pub fn take(&self, now: Instant) -> Rejects {
        let mut state = self.0.lock();
        (state.is_due, state.told_at) = (false, Some(now));
        std::mem::take(&mut state.rejects)
    }

    /// Logs the result of [`Rejected::take`], if it is not empty.
    pub fn tell(&self, now: Instant) {
        let Rejects { unproven_count, proven_count, example } = self.take(now);
        if unproven_count > 0 {
            tracing::info!(
                count = unproven_count,
                "the read cache was not closed before it was opened; it dropped frames that had \
                 not reached its disk, which are read from the store"
            );
        }
        // The condition is the warning; this line gives the numbers.
        if proven_count > 0 {
            tracing::info!(
                count = proven_count,
                example,
                "frames of the read cache do not verify; it dropped them, and they are read from \
                 the store"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::tests::segment;
    use crate::testing::Rng;
    use block::env::{Clock, ManualClock};

    #[test]
    fn many_rejected_frames_share_one_log_line_per_period() {
        let (info, _, frames) = segment(&mut Rng::new(1), 3);
        let frame = FrameRef { info, placement: crate::segment::Placement::Object, at: frames[2] };
        let rejected = Rejected::default();
        let start = ManualClock::new().now();
        let note = |is_proven, seconds| {
            let now = start + Duration::from_secs(seconds);
            rejected.note(is_proven, &frame, 4096, &SegmentError::Decompress, now)
        };
        assert_eq!(note(false, 0), Some(AFTER_FIRST));
        assert!((0..1000).all(|_| note(false, 1).is_none()), "one call is under way");
        let told = rejected.take(start + AFTER_FIRST);
        assert_eq!(told, Rejects { unproven_count: 1001, ..Rejects::default() });
        assert_eq!(note(true, 20), Some(BETWEEN - Duration::from_secs(10)));
        assert_eq!(note(true, 21), None);
        let told = rejected.take(start + BETWEEN);
        assert_eq!((told.unproven_count, told.proven_count), (0, 2));
        let example = told.example.expect("the first one is named");
        assert!(example.contains("frame 2, at byte 4096"), "{example}");
        assert_eq!(note(true, 100_000), Some(AFTER_FIRST));
    }
}
