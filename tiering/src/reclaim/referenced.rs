//! Reclaim of segments with back-references, which have blocks that are referenced by pages other
//! than those they were written for.
//!
//! Invariants:
//! - Liveness is determined by place: a block of the segment is live if any state of any page
//!   references it. The pages examined are those named in the directory, those with
//!   back-references, and those of all layers made from the layers of these pages.
//! - A block that only pages with back-references use is rewritten without an owner: under layer 0,
//!   which belongs to no volume, with a number that is unique within the step.
//! - Each step examines a bounded number of pages. Back-references of pages that no longer
//!   reference the segment are removed on the way, so that each step gets further.
//! - A page that references a frame, and is neither where the directory says nor has a
//!   back-reference, is damage: the segment stays.

use super::Reclaim;
use super::liveness::{Liveness, pages_of};
use super::{Live, STATES_AT_ONCE, VICTIMS_TIME_MAX};
use crate::map::dedup::BackReferences;
use crate::map::pages::{PAGE_BLOCKS, Run};
use crate::map::records::SegmentRecord;
use crate::map::repoint::{Place, SeenPage};
use crate::map::{LayerId, LayerList, Placed};
use crate::segment::{DirectoryEntry, FrameAt};
use block::{Error, ErrorKind, Result};
use futures::{StreamExt, TryStreamExt};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Instant;

/// Layer of blocks without an owner.
pub(super) const NOBODY: LayerId = LayerId(0);

/// A page that references a block which was not written for it, and for which it has a
/// back-reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Foreign {
    pub layer: LayerId,
    pub page: u32,
    pub place: Place,
}

/// Referenced blocks of a segment. The value is the layer and block that a block was written for,
/// if a page of these references it.
type LivePlaces = BTreeMap<Place, Option<(LayerId, u64)>>;

/// The pages of one number, as far as they may reference a segment.
struct PageRoots {
    page: u32,
    /// Directory entries written for the page, of layers that have an owner.
    entries: Vec<DirectoryEntry>,
    /// Layers whose page has a back-reference.
    foreign: Vec<LayerId>,
}

#[derive(Default)]
struct PageLook {
    places: LivePlaces,
    foreign: BTreeSet<Foreign>,
    /// Layers whose page references the segment.
    naming: Vec<LayerId>,
    /// Layers whose back-reference is no longer needed.
    needless: Vec<LayerId>,
    settled: Vec<LayerId>,
    has_hidden: bool,
    state_count: usize,
}

/// The back-references of a segment that one step examines.
pub(super) struct Referenced {
    pub references: BackReferences,
    /// The segment has further ones.
    pub has_more: bool,
    /// Start of the step.
    pub begun: Instant,
    pub pages_at_once: usize,
}

impl Reclaim {
    /// Like `look_into`, but for a segment that has back-references. `nobody` is the next number
    /// for a block without an owner.
    pub(super) async fn look_into_referenced(
        &self,
        record: &SegmentRecord,
        entries: Vec<DirectoryEntry>,
        its: Referenced,
        nobody: &mut u64,
    ) -> Result<Liveness> {
        let Referenced { references, has_more, begun, pages_at_once } = its;
        let own = entries.iter().filter(|entry| entry.layer != NOBODY.0).copied();
        let mut by_page = pages_of(record, own)?;
        let mut pages: BTreeMap<u32, PageRoots> = BTreeMap::new();
        let numbers: BTreeSet<u32> = by_page.keys().chain(references.keys()).copied().collect();
        for page in numbers {
            let entries = by_page.remove(&page).unwrap_or_default();
            let foreign = references.get(&page).cloned().unwrap_or_default();
            pages.insert(page, PageRoots { page, entries, foreign });
        }
        let entries = &entries;
        let mut looks = futures::stream::iter(pages.into_values())
            .map(|roots| self.look_at_referenced(record, entries, roots, has_more))
            .buffered(pages_at_once);
        let mut all = Liveness { is_cut: has_more, ..Liveness::default() };
        let mut places = LivePlaces::new();
        while let Some((page, look)) = looks.try_next().await? {
            if all.state_count > STATES_AT_ONCE || self.pool.clock.since(begun) > VICTIMS_TIME_MAX {
                all.is_cut = true;
                break;
            }
            all.state_count += look.state_count;
            all.has_hidden |= look.has_hidden;
            all.naming.extend(look.naming.into_iter().map(|layer| (layer, page)));
            all.settled.extend(look.settled.into_iter().map(|layer| (layer, page)));
            all.needless.extend(look.needless.into_iter().map(|layer| (layer, page)));
            all.foreign.extend(look.foreign);
            for (place, owner) in look.places {
                let known = places.entry(place).or_insert(owner);
                *known = known.or(owner);
            }
        }
        all.live = live_of(record, entries, places, nobody);
        all.references = Some(references);
        Ok(all)
    }

    async fn look_at_referenced(
        &self,
        record: &SegmentRecord,
        entries: &[DirectoryEntry],
        mut roots: PageRoots,
        has_more: bool,
    ) -> Result<(u32, PageLook)> {
        let written_for = roots.entries.iter().map(|entry| entry.layer);
        let written_for: BTreeSet<u64> =
            written_for.chain(roots.foreign.iter().map(|layer| layer.0)).collect();
        let layers = self.metadata.map.layers();
        let mut seen = Vec::new();
        for holder in self.holders(&layers, &written_for) {
            seen.push((holder, self.metadata.map.page_for_reclaim(holder, roots.page).await?));
        }
        if has_more {
            // Some of the page's back-references may come after those that were read.
            let number = record.info.number.0;
            let names = |page: &SeenPage| page.stored().any(|run| run.segment == number);
            for (holder, _) in seen.iter().filter(|(_, page)| names(page)) {
                let parent = |layer: &LayerId| layers.get(*layer).and_then(|record| record.parent);
                for layer in std::iter::successors(Some(*holder), parent) {
                    if !roots.foreign.contains(&layer)
                        && self.metadata.map.has_back_reference(number, layer, roots.page).await?
                    {
                        roots.foreign.push(layer);
                    }
                }
            }
        }
        Ok((roots.page, look_at(record, entries, &roots, &layers, &seen)?))
    }
}

/// Finds the references to a segment in the pages of one number.
fn look_at(
    record: &SegmentRecord,
    entries: &[DirectoryEntry],
    roots: &PageRoots,
    layers: &LayerList,
    seen: &[(LayerId, SeenPage)],
) -> Result<PageLook> {
    let number = record.info.number.0;
    let page_block = u64::from(roots.page) * PAGE_BLOCKS;
    let mut look = PageLook::default();
    let parent = |layer: &LayerId| layers.get(*layer).and_then(|record| record.parent);
    let foreign: HashSet<LayerId> = roots.foreign.iter().copied().collect();
    let mut needed: HashSet<LayerId> = HashSet::new();
    for (layer, page) in seen {
        // The nearest layer that has a back-reference.
        let root =
            std::iter::successors(Some(*layer), parent).find(|layer| foreign.contains(layer));
        let mut shown: HashSet<(u8, Place)> = HashSet::new();
        for run in page.states.iter().flatten().filter(|run| run.segment == number) {
            let at = FrameAt {
                frame_index: run.frame_index,
                offset: run.offset,
                sealed_bytes: run.sealed_bytes,
            };
            let wrong = |what: &str| {
                let what = format!(
                    "{}: page {} of layer {layer} names frame {}, and {what}",
                    record.info, roots.page, run.frame_index
                );
                Error::new(ErrorKind::Corrupt, what)
            };
            let end = u32::from(run.within) + run.count();
            let entry = entries
                .get(run.frame_index as usize)
                .filter(|entry| entry.at == at && end <= u32::from(entry.block_count))
                .ok_or_else(|| wrong("its directory does not"))?;
            let first_block = page_block + u64::from(run.first);
            let owner = LayerId(entry.layer);
            let is_own = owner != NOBODY
                && layers.is_below(*layer, owner)
                && entry.first_block + u64::from(run.within) == first_block;
            if !is_own && root.is_none() {
                return Err(wrong("it has no back-reference"));
            }
            for (position, within) in run.blocks() {
                let place = (number, run.frame_index, within);
                shown.insert((position, place));
                let its = is_own.then(|| (owner, page_block + u64::from(position)));
                let known = look.places.entry(place).or_insert(its);
                *known = known.or(its);
                if !is_own && let Some(root) = root {
                    look.foreign.insert(Foreign { layer: root, page: roots.page, place });
                }
            }
        }
        let of_it = |runs: &[Run]| -> u32 {
            runs.iter().filter(|run| run.segment == number).map(Run::count).sum()
        };
        let newest = page.states.first().map_or(0, |newest| of_it(newest));
        look.has_hidden |= of_it(&page.hidden) > newest;
        let is_unseen = |run: &Run| {
            let mut blocks = run.blocks();
            run.segment == number
                && blocks.any(|(position, within)| {
                    !shown.contains(&(position, (number, run.frame_index, within)))
                })
        };
        let is_settled = page.unseen.iter().any(is_unseen);
        if is_settled {
            look.settled.push(*layer);
        }
        if !shown.is_empty() {
            look.naming.push(*layer);
        }
        if is_settled || !shown.is_empty() {
            look.state_count += page.states.len();
        }
        if is_settled || !shown.is_empty() || of_it(&page.hidden) > 0 {
            for above in std::iter::successors(Some(*layer), parent) {
                if !needed.insert(above) {
                    break; // then the layers above are included already
                }
            }
        }
    }
    look.needless = foreign.difference(&needed).copied().collect();
    Ok(look)
}

/// Returns the live blocks of a segment, those with an owner first, each list in order.
fn live_of(
    record: &SegmentRecord,
    entries: &[DirectoryEntry],
    places: LivePlaces,
    nobody: &mut u64,
) -> Vec<Live> {
    let mut owned: Vec<((LayerId, u64), Place)> = Vec::new();
    let mut others: Vec<((LayerId, u64), Place)> = Vec::new();
    for (place, owner) in places {
        match owner {
            Some(owner) => owned.push((owner, place)),
            None => {
                others.push(((NOBODY, *nobody), place));
                *nobody += 1;
            }
        }
    }
    owned.sort_unstable();
    let mut live: Vec<Live> = Vec::new();
    for ((layer, block), (_, frame_index, within)) in owned.into_iter().chain(others) {
        let at = entries[frame_index as usize].at;
        match live.last_mut() {
            Some(last)
                if last.layer == layer
                    && last.first_block + last.block_count == block
                    && last.from.at == at
                    && u64::from(last.from.within) + last.block_count == u64::from(within) =>
            {
                last.block_count += 1;
            }
            _ => {
                let from = Placed { segment: record.info.number.0, at, within };
                live.push(Live { layer, first_block: block, block_count: 1, from });
            }
        }
    }
    live
}
