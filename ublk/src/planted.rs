//! Failures put there on purpose, which no test can bring about from outside.
//!
//! Invariants:
//! - Without the feature `planted` every switch is off and nothing of their names is in the binary.

/// Of how many copies of what was read one names a request that there is not. Chosen by hand: some fail, most do not.
#[cfg(feature = "planted")]
const LOST_EACH: u64 = 50;

#[cfg(feature = "planted")]
struct Planted {
    loses_copies: bool,
    removes_served: bool,
    goes_by_number: bool,
    leaves_table_unread: bool,
}

#[cfg(feature = "planted")]
fn planted() -> &'static Planted {
    static PLANTED: std::sync::LazyLock<Planted> = std::sync::LazyLock::new(|| {
        let names = std::env::var("SPINDLE_PLANTED").unwrap_or_default();
        let has = |name: &str| names.split(',').any(|one| one == name);
        Planted {
            loses_copies: has("read-not-copied"),
            removes_served: has("cleanup-of-served"),
            goes_by_number: has("number-alone"),
            leaves_table_unread: has("table-unread"),
        }
    });
    &PLANTED
}

/// Whether this copy of what was read into the kernel's request is to fail.
#[cfg(feature = "planted")]
pub(crate) fn is_copy_lost() -> bool {
    use std::sync::atomic::{AtomicU64, Ordering};
    static COPY_COUNT: AtomicU64 = AtomicU64::new(0);
    planted().loses_copies
        && COPY_COUNT.fetch_add(1, Ordering::Relaxed) % LOST_EACH == LOST_EACH - 1
}

/// Whether a device is removed though a process serves it, as other programs can.
#[cfg(feature = "planted")]
pub(crate) fn removes_served() -> bool {
    planted().removes_served
}

/// Whether a device that carries another cookie is taken for ours.
#[cfg(feature = "planted")]
pub(crate) fn goes_by_number() -> bool {
    planted().goes_by_number
}

/// Whether a device is made before what may be its table of partitions was read.
#[cfg(feature = "planted")]
pub(crate) fn leaves_table_unread() -> bool {
    planted().leaves_table_unread
}

/// No.
#[cfg(not(feature = "planted"))]
pub(crate) const fn is_copy_lost() -> bool {
    false
}

/// No.
#[cfg(not(feature = "planted"))]
pub(crate) const fn removes_served() -> bool {
    false
}

/// No.
#[cfg(not(feature = "planted"))]
pub(crate) const fn goes_by_number() -> bool {
    false
}

/// No.
#[cfg(not(feature = "planted"))]
pub(crate) const fn leaves_table_unread() -> bool {
    false
}
