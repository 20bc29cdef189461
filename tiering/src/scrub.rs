//! Scrub: one segment after the other is read whole and verified, and mended where a copy has it.
//!
//! Invariants:
//! - The order is that of the numbers, so that a scrub goes on behind the last one that it has looked at.
//! - Damage is an answer, not an error: only what may pass ends a step early, and then the same one is looked at again.

use crate::mend::Finding;
use crate::segment::SegmentInfo;
use crate::tier::Tier;
use block::Result;

/// A segment that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scrubbed {
    /// Which one.
    pub info: SegmentInfo,
    /// How it is.
    pub finding: Finding,
}

impl Tier {
    /// Verifies the first segment behind number `last`, of those that the metadata names. `None`: there is none. Reads the
    /// whole object from the store; the caller keeps the pace. Call it from the background runtime.
    ///
    /// # Errors
    /// `Unavailable` when the pool's store does not answer, `Fenced` when the pool is not ours any more: nothing was skipped
    /// then. A segment whose record does not open is passed over, and named in the log.
    pub async fn scrub_next(&self, last: u64) -> Result<Option<Scrubbed>> {
        self.inner.check_writable()?;
        let mut last = last;
        loop {
            let (found, next) = self.inner.map.live_after(last, 1).await?;
            if let Some((record, _)) = found.first() {
                let finding = self.inner.heal(&record.info).await?;
                return Ok(Some(Scrubbed { info: record.info, finding }));
            }
            let Some(next) = next else { return Ok(None) };
            tracing::error!(
                segment = next,
                "the record of a segment is damaged: its object cannot be verified; `spindle fsck` says more"
            );
            last = next;
        }
    }

    /// First number that no segment has yet: a scrub that begins now ends before it.
    #[must_use]
    pub fn next_segment(&self) -> u64 {
        self.inner.next_segment.load(std::sync::atomic::Ordering::SeqCst)
    }
}
