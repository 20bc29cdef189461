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

/// A store that has a fragment of a segment, or would get one, and its failure domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held<'a> {
    pub(crate) store: StoreId,
    pub(crate) domain: &'a str,
}

/// Chooses which fragments of a segment move, and where to. `held` has the store of each fragment, on distinct failure
/// domains; `wanted` the stores that would get them now, on distinct domains, too. Returns indexes of
/// fragments and their new stores: from stores that are not wanted to wanted ones without a fragment. Any part of
/// these moves leaves no two fragments in one domain.
pub(crate) fn moves(held: &[Held<'_>], wanted: &[Held<'_>]) -> Vec<(usize, StoreId)> {
    let is_wanted = |one: &Held<'_>| wanted.iter().any(|other| other.store == one.store);
    let mut from: Vec<usize> = (0..held.len()).filter(|index| !is_wanted(&held[*index])).collect();
    let lacks = |one: &&Held<'_>| held.iter().all(|other| other.store != one.store);
    let mut moves = Vec::new();
    let mut rest = Vec::new();
    // A domain that has a fragment already gets no other one.
    for to in wanted.iter().filter(lacks) {
        match from.iter().position(|index| held[*index].domain == to.domain) {
            Some(at) => moves.push((from.remove(at), to.store)),
            None => rest.push(to.store),
        }
    }
    moves.extend(from.into_iter().zip(rest));
    moves
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
    fn fragments_move_only_to_wanted_stores_and_never_into_a_taken_domain() {
        let domains = ["a", "a", "b", "c", "d", "e"];
        let held = |ids: &[u32]| -> Vec<Held<'_>> {
            let one = |id: &u32| Held { store: StoreId(*id), domain: domains[*id as usize - 1] };
            ids.iter().map(one).collect()
        };
        let moved = |from: &[u32], to: &[u32]| -> Vec<(usize, u32)> {
            let moves = moves(&held(from), &held(to));
            moves.into_iter().map(|(index, id)| (index, id.0)).collect()
        };
        assert_eq!(moved(&[1, 3, 4], &[4, 1, 3]), [], "their order does not matter");
        assert_eq!(moved(&[1, 3, 4], &[5, 3, 1]), [(2, 5)]);
        // Store 2 is in the domain of store 1: only the fragment of that one may go there.
        assert_eq!(moved(&[4, 1, 3], &[2, 5, 3]), [(1, 2), (0, 5)]);
        assert_eq!(moved(&[1, 3, 4], &[6, 2]), [(0, 2), (1, 6)], "one finds no place");
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
