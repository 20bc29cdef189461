//! The choice of the stores for the fragments of a segment. Pure logic.
//!
//! Invariants:
//! - No two fragments of a segment are on stores of one failure domain.
//! - The choice is a function of the segment and the stores, so a repeated attempt chooses the same ones
//!   while the stores are as well as before, and have room by the same steps.
//! - A store that is full comes behind the others, and is never left out: the store itself refuses what it cannot take.

use crate::fragment_store::Room;
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

/// Steps from a full store to one that gets its whole share. Chosen by hand: few, as each changes the choice of stores.
const LEVEL_MAX: u32 = 8;
/// The part of a store that must be free for its whole share: a quarter. Chosen by hand.
const WHOLE_DIVISOR: u64 = 4;
/// A store with less than this part of it free comes last: a fiftieth. Chosen by hand: above the hundredth that a drive
/// of a data node keeps.
const LAST_DIVISOR: u64 = 50;
/// A store with fewer bytes free comes last. Chosen by hand: four fragments of 64 MiB, the largest that there are.
const LAST_BYTES: u64 = 4 * (64 << 20);

/// The part of its share of new fragments that a store gets, by its room, in steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Level(u32);

impl Default for Level {
    /// The whole share, as for a store whose room is not known.
    fn default() -> Level {
        Level(LEVEL_MAX)
    }
}

impl Level {
    const LAST: Level = Level(0);

    /// Bytes of a step, for a store of this size.
    fn step_bytes(total_bytes: u64) -> u64 {
        (total_bytes / WHOLE_DIVISOR / u64::from(LEVEL_MAX)).max(1)
    }

    fn of(total_bytes: u64, free_bytes: u64) -> Level {
        if free_bytes < LAST_BYTES || free_bytes < total_bytes / LAST_DIVISOR {
            return Level::LAST;
        }
        let steps = free_bytes / Level::step_bytes(total_bytes);
        Level(u32::try_from(steps).unwrap_or(LEVEL_MAX).clamp(1, LEVEL_MAX))
    }

    /// The level for this room. One that rises above the level `before` does so half a step late: the fragments of a few
    /// new segments must not be what changes it.
    fn after(before: Option<Level>, room: &Room) -> Level {
        let Room { total_bytes, free_bytes, .. } = *room;
        let level = Level::of(total_bytes, free_bytes);
        match before {
            Some(before) if level > before => {
                let margin = Level::step_bytes(total_bytes) / 2;
                Level::of(total_bytes, free_bytes.saturating_sub(margin)).max(before)
            }
            _ => level,
        }
    }

    /// The level for what a store has told. One that may not rise above the level `before` does not.
    pub(crate) fn told(before: Option<Level>, room: Option<&Room>, may_rise: bool) -> Level {
        let level = room.map(|room| Level::after(before, room)).unwrap_or_default();
        before.filter(|before| !may_rise && *before < level).unwrap_or(level)
    }

    /// Whether the store comes behind all others.
    pub(crate) fn is_last(self) -> bool {
        self == Level::LAST
    }
}

/// A store, and the part of its share that its room leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Weighed {
    pub(crate) info: StoreInfo,
    pub(crate) level: Level,
}

/// Orders the stores that may get fragments of a segment, the best first: weighted rendezvous hashing over
/// the segment's random id (Schindelhauer and Schomaker, "Weighted Distributed Hash Tables", 2005).
/// Of each failure domain only the best store is in the list, so the first ones of the list are on
/// distinct domains.
#[must_use]
pub(crate) fn candidates(segment: &[u8; 16], stores: &[Weighed]) -> Vec<StoreId> {
    let mut scored: Vec<(f64, &Weighed)> = stores
        .iter()
        .filter(|store| store.info.weight > 0)
        .map(|store| (score(segment, store), store))
        .collect();
    scored.sort_by(|a, b| {
        let by_room = a.1.level.is_last().cmp(&b.1.level.is_last());
        by_room.then(b.0.total_cmp(&a.0)).then(a.1.info.id.cmp(&b.1.info.id))
    });
    let mut domains = BTreeSet::new();
    scored.retain(|(_, store)| domains.insert(&store.info.domain) || seeded_bugs().domain_shared);
    scored.into_iter().map(|(_, store)| store.info.id).collect()
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

fn score(segment: &[u8; 16], store: &Weighed) -> f64 {
    let Weighed { info, level } = store;
    let hash = XxHash64::oneshot(u64::from(info.id.0), segment);
    // In (0, 1): both ends are excluded.
    let uniform = ((hash >> 12) as f64 + 0.5) / (1u64 << 52) as f64;
    // Stores that come last are compared with each other only.
    f64::from(info.weight) * f64::from(level.0.max(1)) / -uniform.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stores(count: u32) -> Vec<Weighed> {
        let info = |id| StoreInfo { id: StoreId(id), domain: format!("node {id}"), weight: 100 };
        (1..=count).map(|id| Weighed { info: info(id), level: Level::default() }).collect()
    }

    const TIB: u64 = 1 << 40;

    /// The level of a store of a TiB of which this many thousandths are free.
    fn level(before: Option<Level>, thousandths: u64) -> Level {
        let free_bytes = TIB / 1000 * thousandths;
        Level::after(before, &Room { total_bytes: TIB, free_bytes, wear: None })
    }

    fn segment(number: u32) -> [u8; 16] {
        let mut id = [7; 16];
        id[..4].copy_from_slice(&number.wrapping_mul(2_654_435_761).to_le_bytes());
        id
    }

    #[test]
    fn fragments_are_spread_by_weight_over_distinct_domains() {
        let mut stores = stores(8);
        stores[7].info.weight = 300;
        stores[0].info.domain = stores[1].info.domain.clone();
        stores[2].info.weight = 0;
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
            let four = |stores: &[Weighed]| -> BTreeSet<StoreId> {
                candidates(&segment(*number), stores).into_iter().take(4).collect()
            };
            let kept = four(&before).intersection(&four(&after)).count();
            assert!(kept >= 3, "at most one fragment moves to the new store");
            kept == 3
        };
        let count = (0..1000).filter(moved).count();
        assert!((250..500).contains(&count), "4 of 11, and {count} of 1000 have moved");
    }

    #[test]
    fn share_falls_in_steps_with_the_room_and_rises_late() {
        assert_eq!(level(None, 1000), Level::default());
        assert_eq!(level(None, 251), Level::default());
        assert_eq!(level(None, 249), Level(7));
        assert_eq!(level(None, 126), Level(4));
        assert_eq!(level(None, 21), Level(1), "the smallest share");
        assert_eq!(level(None, 19), Level::LAST);
        let falling: Vec<Level> = (0..=1000).map(|free| level(None, free)).collect();
        assert!(falling.is_sorted(), "more room is never a smaller share");
        // A step of a TiB is 31 thousandths, and half of it is the margin of a rise.
        assert_eq!(level(Some(Level(3)), 126), Level(3));
        assert_eq!(level(Some(Level(3)), 142), Level(4));
        assert_eq!(level(Some(Level::LAST), 21), Level::LAST);
        assert_eq!(level(Some(Level::LAST), 50), Level(1));
        assert_eq!(level(Some(Level(7)), 126), Level(4), "a fall counts at once");
        assert_eq!(level(Some(Level(3)), 1000), Level::default());
        // A small store is full when a few fragments do not fit.
        let small = |free_bytes| Room { total_bytes: 1 << 30, free_bytes, wear: None };
        assert_eq!(Level::after(None, &small(LAST_BYTES - 1)), Level::LAST);
        assert_eq!(Level::after(None, &small(LAST_BYTES)), Level::default());
    }

    /// Moves the fragments of a small pool that has got an empty store, until a pass finds nothing to move. Returns the
    /// number of passes, if they end soon. The stores tell their room after every few moves.
    fn passes(may_rise: bool) -> Option<usize> {
        const FRAGMENT_BYTES: u64 = 64 << 20;
        const TOTAL_BYTES: u64 = 16 << 30;
        let (mut stores, mut used) = (stores(5), [0u64; 5]);
        let two = |segment: &[u8; 16], stores: &[Weighed]| -> BTreeSet<StoreId> {
            candidates(segment, stores).into_iter().take(2).collect()
        };
        let at = |id: &StoreId| id.0 as usize - 1;
        let mut placed: Vec<([u8; 16], BTreeSet<StoreId>)> =
            (0..490).map(|number| (segment(number), two(&segment(number), &stores[..4]))).collect();
        placed.iter().flat_map(|(_, ids)| ids).for_each(|id| used[at(id)] += 1);
        let mut levels: [Option<Level>; 5] = [None; 5];
        for pass in 1..100 {
            let mut move_count = 0;
            for (segment, ids) in &mut placed {
                if move_count % 8 == 0 {
                    for (index, store) in stores.iter_mut().enumerate() {
                        let free_bytes = TOTAL_BYTES.saturating_sub(used[index] * FRAGMENT_BYTES);
                        let room = Room { total_bytes: TOTAL_BYTES, free_bytes, wear: None };
                        store.level = Level::told(levels[index], Some(&room), may_rise);
                        levels[index] = Some(store.level);
                    }
                }
                let wanted = two(segment, &stores);
                move_count += wanted.difference(ids).count();
                ids.iter().for_each(|id| used[at(id)] -= 1);
                wanted.iter().for_each(|id| used[at(id)] += 1);
                *ids = wanted;
            }
            if move_count == 0 {
                return Some(pass);
            }
        }
        None
    }

    #[test]
    fn rebalance_ends_as_no_share_rises_meanwhile() {
        assert_eq!(passes(true), None, "what leaves a store makes room that brings it back");
        let count = passes(false).expect("the moves end");
        // Each of the steps that five stores can fall brings moves in two passes at most.
        assert!(count <= 2 * 5 * LEVEL_MAX as usize + 2, "{count}");
    }

    #[test]
    fn stores_with_little_room_get_less_and_full_ones_come_last() {
        let mut stores = stores(8);
        stores[0].level = Level(2);
        stores[1].level = Level::LAST;
        stores[2].info.domain = stores[1].info.domain.clone();
        let mut counts = [0u32; 9];
        for number in 0..4000 {
            let chosen = candidates(&segment(number), &stores);
            assert_eq!(chosen.len(), 7, "two share a domain");
            assert!(!chosen.contains(&StoreId(2)), "another store of its domain has room");
            chosen[..2].iter().for_each(|id| counts[id.0 as usize] += 1);
        }
        assert!(counts[1] * 3 < counts[4] && counts[1] > counts[4] / 6, "{counts:?}");
        stores[2].level = Level::LAST;
        for number in 0..400 {
            let chosen = candidates(&segment(number), &stores);
            assert!([StoreId(2), StoreId(3)].contains(&chosen[6]), "{chosen:?}");
        }
        // Full or not, they are all that there is.
        stores.iter_mut().for_each(|store| store.level = Level::LAST);
        assert_eq!(candidates(&segment(1), &stores).len(), 7);
    }

    #[test]
    fn only_fragments_of_the_store_that_has_less_room_move() {
        let before = stores(10);
        let mut after = before.clone();
        after[4].level = Level(7);
        let four = |number: u32, stores: &[Weighed]| -> BTreeSet<StoreId> {
            candidates(&segment(number), stores).into_iter().take(4).collect()
        };
        let mut moved = 0;
        for number in 0..1000 {
            let (had, has) = (four(number, &before), four(number, &after));
            let left: Vec<&StoreId> = had.difference(&has).collect();
            assert!(left.is_empty() || left == [&StoreId(5)], "{left:?}");
            moved += left.len();
        }
        assert!((10..100).contains(&moved), "an eighth of a tenth of 4000, and {moved} have moved");
    }
}
