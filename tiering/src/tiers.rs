//! Tiers: segments in fragments on data stores, as objects of the pool's object store, or both.
//!
//! Invariants:
//! - A segment leaves a tier only once the other one has all of it, durably and verified.
//! - The policy is a setting. What a segment is in is in its record alone, so a change of the setting loses nothing.

use crate::survey::Amount;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Where the segments of a pool with data stores are to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tiers {
    /// In data stores. Objects that exist stay until they are reclaimed.
    #[default]
    DataStores,
    /// In data stores, and copied to the object store. Cold ones are in the object store alone.
    Both,
    /// In the object store.
    ObjectStore,
}

impl Tiers {
    /// The names, as the configuration has them.
    pub const NAMES: [&str; 3] = ["data-stores", "both", "object-store"];

    /// The name, as the configuration has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Tiers::DataStores => Self::NAMES[0],
            Tiers::Both => Self::NAMES[1],
            Tiers::ObjectStore => Self::NAMES[2],
        }
    }

    /// Whether segments move between the tiers.
    #[must_use]
    pub fn is_moving(self) -> bool {
        self != Tiers::DataStores
    }
}

impl fmt::Display for Tiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The name is none of [`Tiers::NAMES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be one of \"data-stores\", \"both\" and \"object-store\"")]
pub struct UnknownTiers;

impl FromStr for Tiers {
    type Err = UnknownTiers;

    fn from_str(name: &str) -> Result<Tiers, UnknownTiers> {
        let all = [Tiers::DataStores, Tiers::Both, Tiers::ObjectStore];
        all.into_iter().find(|tiers| tiers.name() == name).ok_or(UnknownTiers)
    }
}

/// The policy for the segments of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierPolicy {
    /// Where they are to be.
    pub tiers: Tiers,
    /// One that was not read for this long is cold. Counted is the time for which the pool is open.
    pub cold_after: Duration,
    /// Hundredths of the data stores that are to stay free: below, segments are dropped before they are cold.
    pub free_min: u8,
}

/// The room of the data stores, as far as it decides which segments leave them or come back: in bytes of segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierRoom {
    /// Bytes of segments that are to be dropped, even if they are not cold; 0 while there is room.
    pub wanted_bytes: u64,
    /// Bytes of segments that may be brought back.
    pub spare_bytes: u64,
}

impl Default for TierRoom {
    /// That of data stores whose room is not known: there is enough.
    fn default() -> TierRoom {
        TierRoom { wanted_bytes: 0, spare_bytes: u64::MAX }
    }
}

/// The change of the tiers of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TierStep {
    /// From data stores to both.
    Copy,
    /// From both to the object store.
    Drop,
    /// From the object store to both.
    BringBack,
}

/// The outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TierOutcome {
    /// The record has changed. The bytes of the segment.
    Done(u64),
    /// The object was not the segment, and was rewritten from the fragments, which stay.
    Rewritten(u64),
    /// The map no longer has the segment there.
    Needless,
}

/// The segments that are not where they are to be: the numbers of those that a walk remembers, and all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierPlan {
    /// For [`TierStep::Copy`].
    pub copy: Vec<u64>,
    /// For [`TierStep::Drop`].
    pub drop: Vec<u64>,
    /// For [`TierStep::BringBack`].
    pub bring_back: Vec<u64>,
    /// All that are to be copied.
    pub to_copy: Amount,
    /// All that are to be dropped.
    pub to_drop: Amount,
    /// All that are to be brought back.
    pub to_bring_back: Amount,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for name in Tiers::NAMES {
            assert_eq!(name.parse::<Tiers>().unwrap().to_string(), name);
        }
        assert_eq!("".parse::<Tiers>(), Err(UnknownTiers));
        assert!(!Tiers::default().is_moving());
    }
}
