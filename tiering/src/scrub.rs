//! Scrub: reads and verifies one segment after another, and repairs it if a copy has it.
//!
//! Invariants:
//! - Segments are scrubbed in the order of their numbers, so a scrub continues after the last one
//!   that it has examined.
//! - Damage is a result, not an error. Only a transient failure ends a step early, and then the
//!   same segment is examined again.

use crate::repair::Finding;
use crate::segment::SegmentInfo;
use crate::tier::Tier;
use async_recursion::async_recursion;
use block::Result;

/// A segment that was scrubbed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scrubbed {
    /// The segment.
    pub info: SegmentInfo,
    /// Its state.
    pub finding: Finding,
}

impl Tier {
    /// Verifies the first segment numbered above `last` that the metadata references. Returns
    /// `None` if there is none. Reads the whole object from the store; the caller limits the pace.
    /// Call it from the background runtime.
    ///
    /// # Errors
    /// `Unavailable` when the pool's store does not answer, `Fenced` when another process owns the
    /// pool: no segment was skipped then. A segment whose record does not open is skipped and
    /// logged.
    #[async_recursion]
    pub async fn scrub_next(&self, last: u64) -> Result<Option<Scrubbed>> {
        self.parts.pool.check_writable()?;
        let mut last = last;
        loop {
            let (found, next) = self.parts.metadata.map.live_after(last, 1).await?;
            if let Some((record, _)) = found.first() {
                let finding = self.parts.jobs.repair.heal(&record.stored()).await?;
                return Ok(Some(Scrubbed { info: record.info, finding }));
            }
            let Some(next) = next else { return Ok(None) };
            tracing::error!(
                segment = next,
                "the record of a segment is damaged, so its object cannot be verified; `spindle \
                 fsck` has details"
            );
            last = next;
        }
    }

    /// Returns the first segment number that is not yet used: a scrub that begins now ends before
    /// it.
    #[must_use]
    pub fn next_segment(&self) -> u64 {
        self.parts.metadata.next_segment.load(std::sync::atomic::Ordering::SeqCst)
    }
}
