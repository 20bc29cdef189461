//! Bugs seeded in this crate on purpose, so that tests can show that they notice them.
//!
//! Invariants:
//! - Without the feature `seeded-bugs` every switch is off, and the binary contains none of their
//!   names.

/// The bugs that are switched on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SeededBugs {
    /// A device is detached while data written to it before it was closed is still on its way.
    pub(crate) detached_at_once: bool,
    /// The daemon exits after the kernel has given a device its number and before the number is
    /// recorded.
    pub(crate) ends_in_attach: bool,
    /// The record that a device has no volatile cache is written only together with its number.
    pub(crate) cache_noted_late: bool,
    /// The daemon itself opens its device to find out whether it is in use.
    pub(crate) opens_own_device: bool,
}

/// The bugs that the environment variable SPINDLE_SEEDED_BUGS named, separated by commas, at the first
/// call.
#[cfg(feature = "seeded-bugs")]
pub(crate) fn seeded_bugs() -> SeededBugs {
    static SEEDED_BUGS: std::sync::OnceLock<SeededBugs> = std::sync::OnceLock::new();
    *SEEDED_BUGS.get_or_init(|| {
        let names = std::env::var("SPINDLE_SEEDED_BUGS").unwrap_or_default();
        let has = |name: &str| names.split(',').any(|one| one == name);
        SeededBugs {
            detached_at_once: has("detached-at-once"),
            ends_in_attach: has("ends-in-attach"),
            cache_noted_late: has("cache-noted-late"),
            opens_own_device: has("opens-own-device"),
        }
    })
}

/// No bugs.
#[cfg(not(feature = "seeded-bugs"))]
pub(crate) const fn seeded_bugs() -> SeededBugs {
    SeededBugs {
        detached_at_once: false,
        ends_in_attach: false,
        cache_noted_late: false,
        opens_own_device: false,
    }
}
