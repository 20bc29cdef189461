//! Fragments that a segment lacks are rebuilt from others.
//!
//! Invariants:
//! - A fragment is made only from fragments whose header and checksums verify.
//! - No two fragments of the new placement are in one failure domain because of it. New ones have a generation
//!   above all of the segment. Nothing that is stored is overwritten or deleted.
//! - A fragment that is known to be damaged or missing, and that no store takes anew, is not in the new placement: what a
//!   segment survives is counted from its placement.

use super::health::Way;
use super::image::{RebuiltFragments, Source};
use super::reading::{Coded, is_damage};
use super::{CodedSegments, names, unknown_store};
use crate::placing::{StoreId, Weighed, candidates};
use crate::seeded_bugs::seeded_bugs;
use erasure::fragment::HEADER_BYTES;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use object_store::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tiering::segment::{FragmentPlace, Fragments, Placement, StoredSegment};
use tiering::segment_store::{ANY_LOSS, Depth, Rebuilt, RedundancyOf};
use tiering::survey::further_losses;

/// Fragments of a segment that are read at a time. Chosen by hand: each is in memory.
const READS_AT_ONCE: usize = 8;

impl CodedSegments {
    /// Whether a fragment counts as stored for good: its store is one of the pool that stays and is not lost.
    pub(super) fn stays(&self, place: &FragmentPlace) -> bool {
        self.member(place.store).is_some_and(|member| member.weight() > 0 && !member.is_lost())
    }

    pub(super) fn domain(&self, place: &FragmentPlace) -> Option<Arc<str>> {
        self.member(place.store).map(|member| member.domain())
    }

    /// The fragments that do not stay where they are: their store does not, or has another fragment of the segment
    /// in its failure domain.
    pub(super) fn leaving(&self, fragments: &Fragments) -> BTreeSet<usize> {
        let mut domains = BTreeSet::new();
        let mut leaves = |place: &FragmentPlace| {
            !self.stays(place) || self.domain(place).is_none_or(|domain| !domains.insert(domain))
        };
        (0..fragments.places.len()).filter(|index| leaves(&fragments.places[*index])).collect()
    }

    /// Implements [`tiering::segment_store::SegmentStore::redundancy`].
    pub(super) fn redundancy_of(&self, segment: &StoredSegment) -> Option<RedundancyOf> {
        let coded = self.coded(segment).ok()??;
        // A failure domain is lost as a whole.
        let mut domains: BTreeMap<Arc<str>, usize> = BTreeMap::new();
        for place in &coded.fragments.places {
            let member = self.member(place.store);
            if let Some(member) = member.filter(|it| !it.health().is_failing(Way::Read)) {
                *domains.entry(member.domain()).or_default() += 1;
            }
        }
        let spare = match coded.fragments.is_copied {
            true => Some(ANY_LOSS),
            false => further_losses(coded.scheme.data(), domains.into_values().collect()),
        };
        let is_lacking =
            !self.is_leaving_tier(&coded.fragments) && !self.leaving(&coded.fragments).is_empty();
        Some(RedundancyOf { spare, is_lacking })
    }

    /// Implements [`tiering::segment_store::SegmentStore::rebuild`].
    pub(super) async fn rebuild_coded(&self, coded: &Coded, depth: Depth) -> Result<Rebuilt> {
        let mut wanted = self.leaving(&coded.fragments);
        if depth == Depth::Presence {
            if !wanted.is_empty() && self.free(coded, &wanted).is_empty() {
                return Ok(Rebuilt { is_lacking: true, ..Rebuilt::default() });
            }
            let is_unsure = self.find_absent(coded, &mut wanted).await;
            if wanted.is_empty() {
                return Ok(Rebuilt { is_unsure, ..Rebuilt::default() });
            }
        }
        // Stores that verify fragments themselves send none of them.
        let verified = match depth {
            Depth::Checksums => self.verified(coded, &wanted).await,
            Depth::Presence => BTreeSet::new(),
        };
        let found = self.read_sources(coded, depth, &mut wanted, &verified).await?;
        if wanted.is_empty() {
            let is_seen = |index| verified.contains(&index) || found[index].is_some();
            let is_unsure = !(0..coded.scheme.fragments()).all(is_seen);
            return Ok(Rebuilt { is_unsure, ..Rebuilt::default() });
        }
        self.write_wanted(coded, &wanted, found).await
    }

    /// The placement without those of the fragments `left` that their stores do not have, or have damaged, so that what
    /// is counted from it is true. Absent if there are none, or too few others are left: parts of a damaged one may be
    /// what a read needs.
    async fn without_lost(
        &self,
        coded: &Coded,
        placement: &Fragments,
        left: &BTreeSet<usize>,
    ) -> Option<Placement> {
        let (leaving, mut without) = (self.leaving(&coded.fragments), placement.clone());
        for index in left.difference(&leaving) {
            let read = self.read_verified(coded, *index).await;
            if read.is_err_and(|error| is_damage(&error)) {
                without.places[*index].store = Fragments::NOWHERE;
            }
        }
        let stored = without.stores().filter(|store| *store != Fragments::NOWHERE).count();
        let is_changed = without != *placement && stored >= coded.scheme.data();
        is_changed.then(|| Placement::Fragments(Arc::new(without)))
    }

    /// The fragments that their stores have verified, of those that stay.
    async fn verified(&self, coded: &Coded, wanted: &BTreeSet<usize>) -> BTreeSet<usize> {
        let stay = (0..coded.scheme.fragments()).filter(|index| !wanted.contains(index));
        futures::stream::iter(stay)
            .map(|index| async move { self.is_checked(coded, index).await.then_some(index) })
            .buffered(READS_AT_ONCE)
            .filter_map(std::future::ready)
            .collect()
            .await
    }

    /// Reads and verifies the wanted fragments, or else as many as are needed to make them, or all that are not verified,
    /// and adds to the wanted ones those that do not verify.
    pub(super) async fn read_sources(
        &self,
        coded: &Coded,
        depth: Depth,
        wanted: &mut BTreeSet<usize>,
        verified: &BTreeSet<usize>,
    ) -> Result<Vec<Option<Source>>> {
        let (count, data) = (coded.scheme.fragments(), coded.scheme.data());
        let mut found: Vec<Option<Source>> = vec![None; count];
        let is_enough = |found: &[Option<Source>], wanted: &BTreeSet<usize>| {
            found.iter().flatten().count() >= data || wanted.iter().all(|it| found[*it].is_some())
        };
        let mut lost = coded.not_found();
        let order = self.well_first(coded, 0..count);
        // A fragment that only moves is made from itself.
        let is_first = |index: &usize| match depth {
            Depth::Checksums => !verified.contains(index),
            Depth::Presence => wanted.contains(index) && self.is_well(coded, *index),
        };
        let (first, rest): (Vec<_>, Vec<_>) = order.into_iter().partition(is_first);
        for (order, is_all) in [(first, true), (rest, false)] {
            let (mut order, mut reading) = (order.into_iter(), FuturesUnordered::new());
            loop {
                // Verified fragments are read only to make others of them.
                if !is_all && is_enough(&found, wanted) {
                    break;
                }
                let needed = match is_all {
                    true => READS_AT_ONCE,
                    false => data.saturating_sub(found.iter().flatten().count()).min(READS_AT_ONCE),
                };
                while reading.len() < needed
                    && let Some(index) = order.next()
                {
                    reading.push(async move { (index, self.read_verified(coded, index).await) });
                }
                let Some((index, source)) = reading.next().await else { break };
                match source {
                    Ok(source) => found[index] = Some(source),
                    // A store that is away for now may still have it.
                    Err(error) => {
                        if is_damage(&error) || self.is_unreadable(coded, index).await {
                            wanted.insert(index);
                        }
                        // One that says less about the segment counts more.
                        if !is_damage(&error) || is_damage(&lost) {
                            lost = error;
                        }
                    }
                }
            }
        }
        match is_enough(&found, wanted) {
            true => Ok(found),
            false if is_damage(&lost) => Err(coded.not_found()),
            false => Err(lost),
        }
    }

    /// Whether a fragment cannot be read while its store answers: a bad sector, for instance.
    async fn is_unreadable(&self, coded: &Coded, index: usize) -> bool {
        let Some(member) = self.member(coded.fragments.places[index].store) else { return false };
        member.look().await.is_ok() && self.read_verified(coded, index).await.is_err()
    }

    /// Adds the fragments whose stores answer that they do not have them. Returns whether a store did not answer.
    async fn find_absent(&self, coded: &Coded, wanted: &mut BTreeSet<usize>) -> bool {
        let present = (0..coded.scheme.fragments()).filter(|index| !wanted.contains(index));
        let sizes = present.filter_map(|index| {
            let member = self.member(coded.fragments.places[index].store)?;
            Some(async move { (index, member.size(&coded.fragment(index)).await) })
        });
        let mut is_unsure = false;
        for (index, size) in futures::future::join_all(sizes).await {
            match size {
                Ok(bytes) if bytes > (HEADER_BYTES + coded.payload_bytes(index)) as u64 => {}
                Ok(_) | Err(Error::NotFound { .. }) => drop(wanted.insert(index)),
                Err(_) => is_unsure = true,
            }
        }
        is_unsure
    }

    /// The stores that may get wanted fragments, the best first: those that take some, in other failure domains than
    /// the fragments that stay.
    fn free(&self, coded: &Coded, wanted: &BTreeSet<usize>) -> Vec<StoreId> {
        let places = coded.fragments.places.iter().enumerate();
        let stay = places.filter(|(index, _)| !wanted.contains(index));
        let domains: BTreeSet<Arc<str>> =
            stay.filter_map(|(_, place)| self.domain(place)).collect();
        let stores = self.stores();
        let takes = stores.values().filter(|member| {
            let health = member.health();
            !domains.contains(&member.domain())
                && !health.is_failing(Way::Read)
                && health.is_due(Way::Write)
        });
        let weighed: Vec<Weighed> = takes.map(|member| member.weighed()).collect();
        candidates(&coded.name.id, &weighed)
    }

    /// Writes the wanted fragments to stores in free failure domains.
    async fn write_wanted(
        &self,
        coded: &Coded,
        wanted: &BTreeSet<usize>,
        found: Vec<Option<Source>>,
    ) -> Result<Rebuilt> {
        let mut free = self.free(coded, wanted);
        if free.is_empty() {
            let placement = self.without_lost(coded, &coded.fragments, wanted).await;
            return Ok(Rebuilt { placement, is_lacking: true, ..Rebuilt::default() });
        }
        let next = coded.next_generation();
        let made = self.made(coded, wanted, found, next).await?;
        let (mut placement, mut rebuilt) = (Fragments::clone(&coded.fragments), Rebuilt::default());
        let (mut left, mut failure) = (wanted.clone(), None);
        // A fragment that moves may leave a failure domain to another one.
        loop {
            let fits = |index: &usize, id: &StoreId| {
                let domain = self.member(id.0).map(|member| member.domain());
                let mut others = placement.places.iter().enumerate();
                seeded_bugs().domain_shared
                    || !others.any(|(other, place)| other != *index && self.domain(place) == domain)
            };
            let pair = left.iter().find_map(|index| {
                let at = free.iter().position(|id| fits(index, id))?;
                Some((*index, at))
            });
            let Some((index, at)) = pair else { break };
            match self.put_made(coded, &made, index, free.remove(at)).await {
                Ok((place, bytes)) => {
                    placement.places[index] = place;
                    left.remove(&index);
                    rebuilt.fragment_count += 1;
                    rebuilt.bytes += bytes;
                }
                Err(error) => failure = Some(error),
            }
        }
        rebuilt.is_lacking = !left.is_empty();
        if let Some(without) = self.without_lost(coded, &placement, &left).await {
            rebuilt.placement = Some(without);
            return Ok(rebuilt);
        }
        finished(rebuilt, placement, failure)
    }

    /// Writes a fragment to a store. Returns its place and its bytes.
    pub(super) async fn put_made(
        &self,
        coded: &Coded,
        made: &RebuiltFragments,
        index: usize,
        id: StoreId,
    ) -> Result<(FragmentPlace, u64)> {
        let (name, fragment) = made.get(&coded.name, index);
        let member = self.member(id.0).ok_or_else(|| unknown_store(id.0))?;
        // One that was not answered may arrive after all.
        member.put(&name, fragment.parts()).await.inspect_err(|_| self.strays.add(id.0, name))?;
        Ok((FragmentPlace { store: id.0, generation: name.generation }, fragment.bytes()))
    }

    /// Makes the wanted fragments of a segment, of generation `next`.
    pub(super) async fn made(
        &self,
        coded: &Coded,
        wanted: &BTreeSet<usize>,
        found: Vec<Option<Source>>,
        next: u64,
    ) -> Result<RebuiltFragments> {
        let (coded, wanted, owner) = (coded.clone(), wanted.clone(), self.owner(&coded.name));
        let coding = tokio::task::spawn_blocking(move || {
            RebuiltFragments::new(&coded, next, owner, &found, &wanted)
        });
        coding.await.map_err(|cause| Error::JoinError { source: cause })?
    }

    /// Deletes the fragments at places that the kept placement does not have.
    pub(super) async fn delete_places(&self, coded: &Coded, kept: &Placement) -> Result<()> {
        let kept = match kept {
            Placement::Fragments(kept) => names(&coded.name, kept),
            Placement::Object => Vec::new(),
        };
        let all = names(&coded.name, &coded.fragments);
        self.delete_all(all.into_iter().filter(|one| !kept.contains(one)).collect()).await
    }
}

/// The outcome once the fragments are written: an error only if none was.
pub(super) fn finished(
    mut rebuilt: Rebuilt,
    placement: Fragments,
    failure: Option<Error>,
) -> Result<Rebuilt> {
    match (rebuilt.fragment_count, failure) {
        (0, Some(error)) => Err(error),
        (0, None) => Ok(rebuilt),
        _ => {
            rebuilt.placement = Some(Placement::Fragments(Arc::new(placement)));
            Ok(rebuilt)
        }
    }
}
