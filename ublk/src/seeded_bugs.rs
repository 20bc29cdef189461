//! The seeded bugs of the ublk front end: failures that no test can cause from outside.
//!
//! Invariants: those of [`block::seeded_bugs`].

use std::sync::atomic::{AtomicU64, Ordering};

block::seeded_bugs! {
    /// Some copies of read data to the kernel fail.
    loses_copies: "read-not-copied",
    /// A device that a process serves is removed, as other programs can.
    removes_served: "cleanup-of-served",
    /// A device that carries another cookie is accepted.
    goes_by_number: "number-alone",
    /// A device is made before both of its ends have been read.
    leaves_table_unread: "table-unread",
}

/// One in this many copies of read data names a request that does not exist. Chosen by hand: some
/// fail, most do not.
const LOST_EACH: u64 = 50;

/// Whether this copy of read data to the kernel is to fail.
pub(crate) fn is_copy_lost() -> bool {
    static COPY_COUNT: AtomicU64 = AtomicU64::new(0);
    seeded_bugs().loses_copies
        && COPY_COUNT.fetch_add(1, Ordering::Relaxed) % LOST_EACH == LOST_EACH - 1
}
