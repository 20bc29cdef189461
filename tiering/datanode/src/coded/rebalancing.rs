//! Fragments move to the stores that would get them if the segment were written now: a store that was added later
//! gets its share.
//!
//! Invariants:
//! - A fragment moves only from a store that would not get one to a store that would and has none. So a segment that
//!   has moved does not move again while the stores, their weights and the steps of their room stay as they are. No
//!   step rises while fragments are to be moved, so the moves end: what leaves a store would bring it back otherwise.
//! - The new fragments are durable before the new placement is returned. Nothing is overwritten or deleted.
//! - Fragments of a segment that lacks some stay: the rebuild comes first.
//! - A store that is away keeps its fragments until it counts as lost.

use super::CodedSegments;
use super::health::Way;
use super::reading::Coded;
use super::rebuilding::finished;
use crate::placing::{Held, StoreId, Weighed, candidates, moves};
use crate::seeded_bugs::seeded_bugs;
use object_store::Result;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tiering::segment::Fragments;
use tiering::segment_store::{Depth, Misplaced, Rebuilt};

/// The moves of a segment's fragments.
#[derive(Default)]
struct Moves {
    /// Indexes of fragments, and the stores that get them.
    now: Vec<(usize, StoreId)>,
    /// Moves that wait for a store that fails, and is not lost yet.
    waiting_count: usize,
}

impl CodedSegments {
    /// Implements [`tiering::segment_store::SegmentStore::misplaced`].
    pub(super) fn misplaced_of(&self, coded: &Coded) -> Misplaced {
        let moves = self.moves_of(coded);
        Misplaced { fragment_count: moves.now.len(), waiting_count: moves.waiting_count }
    }

    fn moves_of(&self, coded: &Coded) -> Moves {
        if !self.leaving(&coded.fragments).is_empty() {
            return Moves::default();
        }
        let stores = self.stores();
        // With those that are away for a while: they keep what they have, and get nothing now.
        let staying = stores.values().filter(|member| member.weight() > 0 && !member.is_lost());
        let weighed: Vec<Weighed> = staying.map(|member| member.weighed()).collect();
        let mut wanted = candidates(&coded.name.id, &weighed);
        wanted.truncate(coded.scheme.fragments());
        let domains: BTreeMap<StoreId, Arc<str>> =
            stores.values().map(|member| (member.id, member.domain())).collect();
        let place = |store: StoreId| {
            let domain = domains.get(&store).map_or("", |domain| &**domain);
            Held { store, domain }
        };
        let held: Vec<Held<'_>> = coded.fragments.stores().map(|id| place(StoreId(id))).collect();
        let wanted: Vec<Held<'_>> = wanted.into_iter().map(place).collect();
        let answers =
            |id: StoreId| stores.get(&id).is_some_and(|it| !it.health().is_failing(Way::Read));
        // One that took no fragment is asked again after a while: it may be full.
        let takes = |id: StoreId| stores.get(&id).is_some_and(|it| it.health().is_due(Way::Write));
        let mut found = Moves::default();
        for (index, to) in moves(&held, &wanted) {
            match answers(held[index].store) && answers(to) && takes(to) {
                true => found.now.push((index, to)),
                false => found.waiting_count += 1,
            }
        }
        found
    }

    /// Implements [`tiering::segment_store::SegmentStore::rebalance`].
    pub(super) async fn rebalance_coded(&self, coded: &Coded) -> Result<Rebuilt> {
        let moves = self.moves_of(coded).now;
        if moves.is_empty() {
            return Ok(Rebuilt::default());
        }
        let moved: BTreeSet<usize> = moves.iter().map(|(index, _)| *index).collect();
        // Damaged ones that are found by the way are left to the scrub.
        let (mut read, none) = (moved.clone(), BTreeSet::new());
        let found = self.read_sources(coded, Depth::Presence, &mut read, &none).await?;
        let made = self.made(coded, &moved, found, coded.next_generation()).await?;
        let (mut placement, mut rebuilt) = (Fragments::clone(&coded.fragments), Rebuilt::default());
        let mut failure = None;
        for (index, to) in moves {
            match self.put_made(coded, &made, index, to).await {
                Ok((place, bytes)) => {
                    let old = std::mem::replace(&mut placement.places[index], place);
                    rebuilt.fragment_count += 1;
                    rebuilt.bytes += bytes;
                    if seeded_bugs().moved_fragment_deleted_early {
                        let _ = self.delete_all(vec![(old.store, coded.fragment(index))]).await;
                    }
                }
                Err(error) => failure = Some(error),
            }
        }
        finished(rebuilt, placement, failure)
    }
}
