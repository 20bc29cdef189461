//! Bugs seeded in the engine on purpose, so that the crash tester can show that it notices them.
//! Other packages have their own.
//!
//! Invariants:
//! - Without the feature `seeded-bugs` every switch is off, and the binary contains none of their
//!   names.

/// The bugs that are switched on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SeededBugs {
    /// A write is answered when it is queued, before it is submitted to the log's files.
    pub(crate) ack_before_submit: bool,
    /// A trim or write-zeroes is answered but not logged.
    pub(crate) trim_lost: bool,
    /// A generation leaves the overlay, and its log space is given back, before its window is
    /// durable in the store.
    pub(crate) overlay_dropped_early: bool,
    /// A wall clock that jumps is believed at once.
    pub(crate) clock_trusted: bool,
    /// Background jobs whose names begin with this text panic when they start.
    pub(crate) panicking_job: Option<&'static str>,
    /// The ends of an unaligned range and the part between them are logged one after the other.
    pub(crate) step_torn: bool,
    /// Requests of an ended connection are not finished before the next one is served.
    pub(crate) leftovers_kept: bool,
}

/// The bugs that the environment variable SPINDLE_SEEDED_BUGS named, separated by commas, at the first
/// call.
#[cfg(feature = "seeded-bugs")]
pub(crate) fn seeded_bugs() -> SeededBugs {
    static SEEDED_BUGS: std::sync::OnceLock<SeededBugs> = std::sync::OnceLock::new();
    *SEEDED_BUGS.get_or_init(|| {
        let names: &'static str = std::env::var("SPINDLE_SEEDED_BUGS").unwrap_or_default().leak();
        let has = |name: &str| names.split(',').any(|one| one == name);
        SeededBugs {
            ack_before_submit: has("ack-before-submit"),
            trim_lost: has("trim-lost"),
            overlay_dropped_early: has("overlay-dropped-early"),
            clock_trusted: has("clock-trusted"),
            panicking_job: names.split(',').find_map(|one| one.strip_prefix("panicking-job=")),
            step_torn: has("step-torn"),
            leftovers_kept: has("leftovers-kept"),
        }
    })
}

/// No bugs.
#[cfg(not(feature = "seeded-bugs"))]
pub(crate) const fn seeded_bugs() -> SeededBugs {
    SeededBugs {
        ack_before_submit: false,
        trim_lost: false,
        overlay_dropped_early: false,
        clock_trusted: false,
        panicking_job: None,
        step_torn: false,
        leftovers_kept: false,
    }
}
