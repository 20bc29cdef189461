//! Bugs put there on purpose, so that tests can show that they would notice.
//!
//! Invariants:
//! - Without the feature `planted` (or a test build) every switch is off and cannot be turned on.

/// Which bugs are in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Planted {
    /// Reclaim re-points a block though somebody has written it meanwhile.
    pub(crate) repoint_blindly: bool,
    /// Reclaim forgets a segment without a look at the pages that name it.
    pub(crate) forget_unchecked: bool,
    /// Reclaim deletes a segment before the metadata without it is durable.
    pub(crate) delete_first: bool,
    /// What is overwritten is counted out twice.
    pub(crate) count_out_twice: bool,
    /// What to delete is asked while a commit is under way.
    pub(crate) sweep_unlocked: bool,
}

impl Planted {
    /// As the environment variable SPINDLE_PLANTED names them, separated by commas.
    #[cfg(any(test, feature = "planted"))]
    pub(crate) fn from_environment() -> Self {
        let names = std::env::var("SPINDLE_PLANTED").unwrap_or_default();
        let has = |name: &str| names.split(',').any(|one| one == name);
        Planted {
            repoint_blindly: has("repoint-blindly"),
            forget_unchecked: has("forget-unchecked"),
            delete_first: has("delete-first"),
            count_out_twice: has("count-out-twice"),
            sweep_unlocked: has("sweep-unlocked"),
        }
    }

    /// None.
    #[cfg(not(any(test, feature = "planted")))]
    pub(crate) fn from_environment() -> Self {
        Planted::default()
    }
}
