//! Failures put there on purpose, which no test can bring about from outside.
//!
//! Invariants:
//! - Without the feature `planted` every switch is off and nothing of their names is in the binary.

/// Of how many copies of what was read one names a request that there is not. Chosen by hand: some fail, most do not.
#[cfg(feature = "planted")]
const LOST_EACH: u64 = 50;

/// Whether this copy of what was read into the kernel's request is to fail.
#[cfg(feature = "planted")]
pub(crate) fn is_copy_lost() -> bool {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU64, Ordering};
    static IS_ON: LazyLock<bool> = LazyLock::new(|| {
        let names = std::env::var("SPINDLE_PLANTED").unwrap_or_default();
        let has = |name: &str| names.split(',').any(|one| one == name);
        has("read-not-copied")
    });
    static COPY_COUNT: AtomicU64 = AtomicU64::new(0);
    *IS_ON && COPY_COUNT.fetch_add(1, Ordering::Relaxed) % LOST_EACH == LOST_EACH - 1
}

/// No.
#[cfg(not(feature = "planted"))]
pub(crate) const fn is_copy_lost() -> bool {
    false
}
