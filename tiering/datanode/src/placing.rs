//! The choice of the stores for the fragments of a segment. Pure logic.
//!
//! Invariants:
//! - No two fragments of a segment are on stores of one failure domain.
//! - The choice is a function of the segment and the stores, so a repeated attempt chooses the same ones
//!   while the stores are as well as before.

use crate::seeded_bugs::seeded_bugs;
use std::collections::BTreeSet;
use std::fmt;
use twox_hash::XxHash64;

/// Number of a store within its pool, never 0: the order in which stores were added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreId(pub u32);

impl fmt::Display for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// All that decides whether a store gets a fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreInfo {
    /// Its number.
    pub id: StoreId,
    /// What fails together with it: a drive, node, rack, zone or provider.
    pub domain: String,
    /// Its share of new fragments, relative to the others: its capacity, for instance. With 0 it gets none.
    pub weight: u32,
}

/// Orders the stores that may get fragments of a segment, the best first: weighted rendezvous hashing over
/// the segment's random id (Schindelhauer and Schomaker, "Weighted Distributed Hash Tables", 2005).
/// Of each failure domain only the best store is in the list, so the first ones of the list are on
/// distinct domains.
#[must_use]
pub fn candidates(segment: &[u8; 16], stores: &[StoreInfo]) -> Vec<StoreId> {
    let mut scored: Vec<(f64, &StoreInfo)> = stores
        .iter()
        .filter(|store| store.weight > 0)
        .map(|store| (score(segment, store), store))
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.id.cmp(&b.1.id)));
    let mut domains = BTreeSet::new();
    scored.retain(|(_, store)| domains.insert(&store.domain) || seeded_bugs().domain_shared);
    scored.into_iter().map(|(_, store)| store.id).collect()
}

fn score(segment: &[u8; 16], store: &StoreInfo) -> f64 {
    let hash = XxHash64::oneshot(u64::from(store.id.0), segment);
    // In (0, 1): both ends are excluded.
    let uniform = ((hash >> 12) as f64 + 0.5) / (1u64 << 52) as f64;
    f64::from(store.weight) / -uniform.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stores(count: u32) -> Vec<StoreInfo> {
        let store = |id| StoreInfo { id: StoreId(id), domain: format!("node {id}"), weight: 100 };
        (1..=count).map(store).collect()
    }

    fn segment(number: u32) -> [u8; 16] {
        let mut id = [7; 16];
        id[..4].copy_from_slice(&number.wrapping_mul(2_654_435_761).to_le_bytes());
        id
    }

    #[test]
    fn fragments_are_spread_by_weight_over_distinct_domains() {
        let mut stores = stores(8);
        stores[7].weight = 300;
        stores[0].domain = stores[1].domain.clone();
        stores[2].weight = 0;
        let mut counts = [0u32; 9];
        for number in 0..4000 {
            let chosen = candidates(&segment(number), &stores);
            assert_eq!(chosen, candidates(&segment(number), &stores));
            assert_eq!(chosen.len(), 6, "two share a domain, and one is closed");
            assert!(!(chosen.contains(&StoreId(1)) && chosen.contains(&StoreId(2))), "{chosen:?}");
            chosen[..2].iter().for_each(|id| counts[id.0 as usize] += 1);
        }
        assert_eq!(counts[3], 0);
        for id in [4, 5, 6, 7] {
            // Of 8 tickets: three of the heavy one, and one of each of the others.
            assert!((700..1300).contains(&counts[id]), "{counts:?}");
        }
        assert!(counts[8] > 2 * counts[4], "{counts:?}");
    }

    #[test]
    fn few_segments_move_when_a_store_comes() {
        let (before, after) = (stores(10), stores(11));
        let moved = |number: &u32| {
            let four = |stores: &[StoreInfo]| -> BTreeSet<StoreId> {
                candidates(&segment(*number), stores).into_iter().take(4).collect()
            };
            let kept = four(&before).intersection(&four(&after)).count();
            assert!(kept >= 3, "at most one fragment moves to the new store");
            kept == 3
        };
        let count = (0..1000).filter(moved).count();
        assert!((250..500).contains(&count), "4 of 11, and {count} of 1000 have moved");
    }
}
