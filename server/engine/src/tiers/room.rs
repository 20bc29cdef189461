//! Measures the room of the data stores for the job that moves segments between the tiers. Pure logic.
//!
//! Invariants:
//! - A new segment needs as many failure domains as it has fragments. The measure is the free part of the last of them,
//!   if it takes those with the largest free parts. A full domain beside enough others is no pressure, as new fragments
//!   go to the others. A full one that every segment needs is, however much room the others have: the sum over all
//!   stores would not show that.
//! - A domain with a store whose room is not known, such as a bucket, has room. So have all before they have told it.
//! - A store that fails counts as it was before, until it is lost: an outage of minutes must not make segments leave.
//! - Fragments that are to be deleted count as free: no segment leaves for the room that another one has made.

use crate::data_stores::DataStoresStatus;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use tiering::tiers::{TierRoom, Tiers};

/// Hundredths of the data stores by which more are free once room is not short any more. Chosen by hand: room for the
/// writes of some minutes.
const STEP: u64 = 5;

/// The room of the data stores, in bytes of segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MeasuredRoom {
    /// Room is short, whatever it was before.
    pub(super) is_low: bool,
    /// Bytes of segments to drop until room is no longer short; 0: it is not.
    pub(super) wanted_bytes: u64,
    /// Bytes of segments that may come to the data stores before room is short.
    pub(super) spare_bytes: u64,
}

impl MeasuredRoom {
    /// That of data stores whose room is not known.
    const UNKNOWN: MeasuredRoom =
        MeasuredRoom { is_low: false, wanted_bytes: 0, spare_bytes: u64::MAX };

    /// Measures the room. `leaving_bytes`: bytes of the segments that were dropped, and whose fragments are still
    /// there.
    pub(super) fn of(status: &DataStoresStatus, leaving_bytes: u64) -> MeasuredRoom {
        let low = u64::from(status.policy.free_min);
        if status.policy.tiers != Tiers::Both || low == 0 {
            return MeasuredRoom::UNKNOWN;
        }
        let domains = domains(status);
        let domain_count = domains.len() as u64;
        // With fewer domains, segments lack fragments, and the others are in all of them.
        let needed_count = (status.fragment_count as u64).min(domain_count).max(1);
        let parity_count = u64::from(status.parity_count);
        let data_count = (status.fragment_count as u64).saturating_sub(parity_count).max(1);
        // The fragments of dropped segments are spread over all domains.
        let leaving_bytes = (leaving_bytes / data_count).saturating_mul(needed_count);
        let leaving_bytes = leaving_bytes / domain_count.max(1);
        let mut known: Vec<DomainRoom> = domains.into_values().flatten().collect();
        known.iter_mut().for_each(|domain| domain.leaving_bytes = leaving_bytes);
        known.sort_by_key(|domain| Reverse(domain.free_thousandths()));
        // Those that are not known are the best ones.
        let unknown_count = domain_count - known.len() as u64;
        known.truncate(needed_count.saturating_sub(unknown_count) as usize);
        let wanted = known.iter().map(|domain| domain.below(low + STEP)).max().unwrap_or(0);
        let spare = known.iter().map(|domain| domain.above(low)).min().unwrap_or(u64::MAX);
        MeasuredRoom {
            is_low: known.iter().any(|domain| domain.below(low) > 0),
            wanted_bytes: wanted.saturating_mul(data_count * domain_count) / needed_count,
            spare_bytes: spare.saturating_mul(data_count),
        }
    }

    /// The room for a plan. `is_short`: room is short, as it was low and not enough has left since.
    pub(super) fn for_plan(self, is_short: bool) -> TierRoom {
        match is_short {
            true => TierRoom { wanted_bytes: self.wanted_bytes, spare_bytes: 0 },
            false => TierRoom { wanted_bytes: 0, spare_bytes: self.spare_bytes },
        }
    }
}

/// The room of a failure domain.
#[derive(Clone, Copy, Debug, Default)]
struct DomainRoom {
    total_bytes: u64,
    free_bytes: u64,
    /// Bytes of fragments that are to be deleted.
    leaving_bytes: u64,
}

impl DomainRoom {
    /// Free bytes once the deletions are done.
    fn accounted_bytes(&self) -> u64 {
        self.free_bytes.saturating_add(self.leaving_bytes).min(self.total_bytes)
    }

    fn free_thousandths(&self) -> u64 {
        self.accounted_bytes() / (self.total_bytes / 1000).max(1)
    }

    /// Bytes by which the free part is below so many hundredths.
    fn below(&self, percent: u64) -> u64 {
        (self.total_bytes / 100 * percent).saturating_sub(self.accounted_bytes())
    }

    /// Bytes that are free now beyond so many hundredths.
    fn above(&self, percent: u64) -> u64 {
        self.free_bytes.saturating_sub(self.total_bytes / 100 * percent)
    }
}

/// The failure domains in which fragments stay. A domain is `None` if the room of one of its stores is not known.
fn domains(status: &DataStoresStatus) -> BTreeMap<&str, Option<DomainRoom>> {
    let mut domains: BTreeMap<&str, Option<DomainRoom>> = BTreeMap::new();
    for store in status.stores.iter().filter(|store| store.is_staying) {
        let domain = domains.entry(&store.domain).or_insert(Some(DomainRoom::default()));
        let told = store.total_bytes.zip(store.free_bytes);
        *domain = domain.zip(told).map(|(domain, (total_bytes, free_bytes))| DomainRoom {
            total_bytes: domain.total_bytes.saturating_add(total_bytes),
            free_bytes: domain.free_bytes.saturating_add(free_bytes),
            ..domain
        });
    }
    domains
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data_stores::DataStoreStatus;
    use tiering::tiers::TierPolicy;

    const TIB: u64 = 1 << 40;
    const PERCENT: u64 = TIB / 100;

    /// The data stores of a pool of 2+1. Each store is a TiB in a failure domain of its own, and has this many
    /// hundredths free, if that is known.
    fn stores(free: &[Option<u64>]) -> DataStoresStatus {
        let store = |(number, free): (u32, &Option<u64>)| DataStoreStatus {
            number,
            domain: format!("node {number}"),
            is_staying: true,
            total_bytes: free.map(|_| TIB),
            free_bytes: free.map(|percent| percent * PERCENT),
            ..DataStoreStatus::default()
        };
        DataStoresStatus {
            fragment_count: 3,
            parity_count: 1,
            stores: (1..).zip(free).map(store).collect(),
            policy: TierPolicy { tiers: Tiers::Both, free_min: 20, ..TierPolicy::default() },
            ..DataStoresStatus::default()
        }
    }

    fn measured(free: &[Option<u64>]) -> MeasuredRoom {
        MeasuredRoom::of(&stores(free), 0)
    }

    #[test]
    fn room_is_short_when_a_new_segment_needs_a_store_with_little() {
        let roomy = measured(&[Some(60), Some(40), Some(30)]);
        let expected =
            MeasuredRoom { is_low: false, wanted_bytes: 0, spare_bytes: 2 * 10 * PERCENT };
        assert_eq!(roomy, expected);
        // Between the marks it depends on what was before.
        let between = measured(&[Some(60), Some(40), Some(22)]);
        assert!(!between.is_low, "{between:?}");
        assert_eq!(between.wanted_bytes, 2 * 3 * PERCENT);
        assert_eq!(between.for_plan(false).wanted_bytes, 0);
        let short = measured(&[Some(60), Some(40), Some(15)]);
        assert!(short.is_low && short.spare_bytes == 0, "{short:?}");
        assert_eq!(short.wanted_bytes, 2 * 10 * PERCENT);
        let for_plan = TierRoom { wanted_bytes: short.wanted_bytes, spare_bytes: 0 };
        assert_eq!(short.for_plan(true), for_plan);
        // A full one beside enough others.
        assert!(!measured(&[Some(60), Some(40), Some(1), Some(30)]).is_low);
        // Each segment that leaves has a fragment in three of the four.
        let four = measured(&[Some(10), Some(10), Some(10), Some(10)]);
        assert_eq!(four.wanted_bytes, 2 * 15 * PERCENT * 4 / 3);
        // Two domains are too few, and all that there are.
        assert!(measured(&[Some(60), Some(10)]).is_low);
    }

    #[test]
    fn store_of_unknown_room_has_room() {
        assert_eq!(measured(&[]), MeasuredRoom::UNKNOWN);
        assert_eq!(measured(&[None, None, None]), MeasuredRoom::UNKNOWN);
        assert!(measured(&[None, None, Some(10)]).is_low, "each segment needs it");
        assert!(!measured(&[None, None, None, Some(10)]).is_low);
    }

    #[test]
    fn stores_of_a_domain_count_together_and_those_that_leave_do_not_count() {
        let mut status = stores(&[Some(60), Some(40), Some(5), Some(47)]);
        status.stores[3].domain = status.stores[2].domain.clone();
        assert_eq!(MeasuredRoom::of(&status, 0).wanted_bytes, 0);
        status.stores[3].is_staying = false;
        assert!(MeasuredRoom::of(&status, 0).is_low);
        // One that fails counts as it was.
        let mut status = stores(&[Some(60), Some(40), Some(5), Some(47)]);
        status.stores[0].failure = Some("away".to_owned());
        assert!(!MeasuredRoom::of(&status, 0).is_low);
    }

    #[test]
    fn what_is_to_be_deleted_counts_as_free_and_not_as_room_for_others() {
        let status = stores(&[Some(60), Some(40), Some(15)]);
        let wanted = MeasuredRoom::of(&status, 0).wanted_bytes;
        let half = MeasuredRoom::of(&status, wanted / 2);
        assert_eq!((half.is_low, half.wanted_bytes), (false, wanted / 2));
        let all = MeasuredRoom::of(&status, wanted);
        assert_eq!((all.wanted_bytes, all.spare_bytes), (0, 0));
    }

    #[test]
    fn other_tiers_have_no_measure() {
        for tiers in [Tiers::DataStores, Tiers::ObjectStore] {
            let mut status = stores(&[Some(1), Some(1), Some(1)]);
            status.policy.tiers = tiers;
            assert_eq!(MeasuredRoom::of(&status, 0), MeasuredRoom::UNKNOWN);
        }
        let mut status = stores(&[Some(1), Some(1), Some(1)]);
        status.policy.free_min = 0;
        assert_eq!(MeasuredRoom::of(&status, 0), MeasuredRoom::UNKNOWN, "it was not asked for");
    }
}
