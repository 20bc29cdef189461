//! Which batch follows which. Everything that walks the ring asks here, so that no two readers of a log
//! can disagree about where it ends.
//!
//! Invariants:
//! - A sequence number alone proves nothing: a life that was cut off may have left a batch with the next
//!   number behind the batch that a later life wrote. Only the whole rule counts.

use crate::format::batch::BatchHeader;

/// Whether `next` is the batch behind `before`, whose checksum is `checksum`.
pub(crate) fn follows(before: &BatchHeader, checksum: u32, next: &BatchHeader) -> bool {
    let is_in_sequence = next.sequence == before.sequence.saturating_add(1)
        && next.previous_checksum == checksum
        && (next.pool, next.ring) == (before.pool, before.ring);
    let is_in_chain = if next.is_opening {
        next.open != before.open && next.first_lsn >= before.next_lsn()
    } else {
        next.open == before.open && next.first_lsn == before.next_lsn()
    };
    is_in_sequence && is_in_chain && next.epoch >= before.epoch
}
