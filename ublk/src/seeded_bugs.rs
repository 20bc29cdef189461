//! Seeded failures, which no test can cause from outside.
//!
//! Invariants:
//! - Without the feature `seeded-bugs` every switch is off, and the binary contains none of their
//!   names.

/// One in this many copies of read data names a request that does not exist. Chosen by hand: some
/// fail, most do not.
#[cfg(feature = "seeded-bugs")]
const LOST_EACH: u64 = 50;

#[cfg(feature = "seeded-bugs")]
struct SeededBugs {
    loses_copies: bool,
    removes_served: bool,
    goes_by_number: bool,
    leaves_table_unread: bool,
}

#[cfg(feature = "seeded-bugs")]
fn seeded_bugs() -> &'static SeededBugs {
    static SEEDED_BUGS: std::sync::LazyLock<SeededBugs> = std::sync::LazyLock::new(|| {
        let names = std::env::var("SPINDLE_SEEDED_BUGS").unwrap_or_default();
        let has = |name: &str| names.split(',').any(|one| one == name);
        SeededBugs {
            loses_copies: has("read-not-copied"),
            removes_served: has("cleanup-of-served"),
            goes_by_number: has("number-alone"),
            leaves_table_unread: has("table-unread"),
        }
    });
    &SEEDED_BUGS
}

/// Whether this copy of read data to the kernel is to fail.
#[cfg(feature = "seeded-bugs")]
pub(crate) fn is_copy_lost() -> bool {
    use std::sync::atomic::{AtomicU64, Ordering};
    static COPY_COUNT: AtomicU64 = AtomicU64::new(0);
    seeded_bugs().loses_copies
        && COPY_COUNT.fetch_add(1, Ordering::Relaxed) % LOST_EACH == LOST_EACH - 1
}

/// Whether to remove a device that a process serves, as other programs can.
#[cfg(feature = "seeded-bugs")]
pub(crate) fn removes_served() -> bool {
    seeded_bugs().removes_served
}

/// Whether to accept a device that carries another cookie.
#[cfg(feature = "seeded-bugs")]
pub(crate) fn goes_by_number() -> bool {
    seeded_bugs().goes_by_number
}

/// Whether to make a device before both of its ends have been read.
#[cfg(feature = "seeded-bugs")]
pub(crate) fn leaves_table_unread() -> bool {
    seeded_bugs().leaves_table_unread
}

/// Always off.
#[cfg(not(feature = "seeded-bugs"))]
pub(crate) const fn is_copy_lost() -> bool {
    false
}

/// Always off.
#[cfg(not(feature = "seeded-bugs"))]
pub(crate) const fn removes_served() -> bool {
    false
}

/// Always off.
#[cfg(not(feature = "seeded-bugs"))]
pub(crate) const fn goes_by_number() -> bool {
    false
}

/// Always off.
#[cfg(not(feature = "seeded-bugs"))]
pub(crate) const fn leaves_table_unread() -> bool {
    false
}
