//! The exact examination of a segment: finds the pages that reference it, from its own directory
//! and the states of these pages.

use super::Reclaim;
use super::referenced::{Foreign, Referenced};
use super::{Live, STATES_AT_ONCE};
use crate::map::dedup::BackReferences;
use crate::map::pages::{PAGE_BLOCKS, Run};
use crate::map::records::SegmentRecord;
use crate::map::repoint::SeenPage;
use crate::map::{LayerId, LayerList, Placed};
use crate::segment::{DirectoryEntry, FrameAt};
use block::{Error, ErrorKind, Result};
use futures::{StreamExt, TryStreamExt};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Instant;

/// Back-references of a segment that one step examines. Chosen by hand: some MiB, and as many
/// pages.
pub(super) const REFERENCES_AT_ONCE: usize = if cfg!(test) { 64 } else { 16_384 };
/// Pages looked up concurrently.
pub(super) const PAGES_AT_ONCE: usize = 32;

/// Findings about a segment that was examined.
#[derive(Default)]
pub(super) struct Liveness {
    pub live: Vec<Live>,
    /// Pages that a range hides reference it too.
    pub has_hidden: bool,
    /// Pages that store invisible references to it.
    pub settled: Vec<(LayerId, u32)>,
    /// Number of page states that reference it, or may: re-pointing has to write them.
    pub state_count: usize,
    /// There are more pages than one step may write; later steps handle the rest.
    pub is_cut: bool,
    /// For a segment with back-references: these, the pages that reference it, and their references
    /// to blocks that were written for others.
    pub references: Option<BackReferences>,
    pub naming: Vec<(LayerId, u32)>,
    pub foreign: Vec<Foreign>,
    pub needless: Vec<(LayerId, u32)>,
}

impl Reclaim {
    /// Finds the references of pages to a segment, from its own directory and its back-references.
    /// `nobody` is the next number for a block without an owner.
    pub(super) async fn look_into(
        &self,
        record: &SegmentRecord,
        nobody: &mut u64,
        begun: Instant,
    ) -> Result<Option<Liveness>> {
        let found = self.metadata.map.find_segment(record.info.number.0).await?;
        if found.is_none_or(|found| !found.is_of(&record.info)) {
            return Ok(None);
        }
        let entries = self.segments.frames.read_directory(&record.stored()).await?;
        let (references, has_more) =
            self.metadata.map.back_references(record.info.number.0, REFERENCES_AT_ONCE).await?;
        let snapshot_count = self.metadata.map.snapshots().count_max();
        // Each page is taken with all of its copies, and with the copies of all layers below.
        let written_for = entries.iter().map(|entry| entry.layer);
        let written_for: BTreeSet<u64> =
            written_for.chain(references.values().flatten().map(|layer| layer.0)).collect();
        let holders = self.holders(&self.metadata.map.layers(), &written_for);
        let pages_at_once = (PAGES_AT_ONCE / (1 + snapshot_count / 32 + holders.len() / 32)).max(1);
        if !references.is_empty() {
            let its = Referenced { references, has_more, begun, pages_at_once };
            let look = self.look_into_referenced(record, entries, its, nobody);
            return look.await.map(Some);
        }
        let mut looks = futures::stream::iter(pages_of(record, entries)?)
            .map(|(page, entries)| self.look_at_page(record, page, entries))
            .buffered(pages_at_once);
        let mut all = Liveness::default();
        while let Some(look) = looks.try_next().await? {
            if all.state_count > STATES_AT_ONCE {
                all.is_cut = true;
                break;
            }
            all.state_count += look.state_count;
            all.has_hidden |= look.has_hidden;
            all.live.extend(look.live);
            all.settled.extend(look.settled);
        }
        all.live.sort_unstable_by_key(|one| (one.layer, one.first_block));
        Ok(Some(all))
    }

    /// Returns the findings for a segment that a copy of some volumes lacks on purpose and whose
    /// count of live blocks is 0: no page references it, and its back-references are dropped with
    /// it. The count is trusted, because its directory cannot be read.
    pub(super) async fn look_at_excluded(&self, record: &SegmentRecord) -> Result<Liveness> {
        let number = record.info.number.0;
        let (references, is_cut) =
            self.metadata.map.back_references(number, REFERENCES_AT_ONCE).await?;
        let mut look = Liveness { is_cut, ..Liveness::default() };
        if is_cut {
            let pages = references.iter();
            let pages = pages.flat_map(|(page, layers)| layers.iter().map(|layer| (*layer, *page)));
            look.needless = pages.collect();
        }
        look.references = Some(references).filter(|references| !references.is_empty());
        Ok(look)
    }

    /// Finds the references to a segment in all pages of one number: those of the layers that its
    /// frames were written for, and of all layers that were made from these.
    async fn look_at_page(
        &self,
        record: &SegmentRecord,
        page: u32,
        entries: Vec<DirectoryEntry>,
    ) -> Result<Liveness> {
        let written_for: BTreeSet<u64> = entries.iter().map(|entry| entry.layer).collect();
        let layers = self.metadata.map.layers();
        let holders = self.holders(&layers, &written_for);
        let mut seen = Vec::with_capacity(holders.len());
        for holder in holders {
            let its: Vec<DirectoryEntry> = entries
                .iter()
                .filter(|entry| layers.is_below(holder, LayerId(entry.layer)))
                .copied()
                .collect();
            seen.push((holder, its, self.metadata.map.page_for_reclaim(holder, page).await?));
        }
        look_at(record, page, &seen)
    }

    /// Returns the layers that may reference blocks written for the given layers.
    pub(super) fn holders(&self, layers: &LayerList, written_for: &BTreeSet<u64>) -> Vec<LayerId> {
        let mut holders: HashSet<LayerId> = HashSet::new();
        for layer in written_for.iter().copied().map(LayerId) {
            holders.insert(layer);
            if !self.pool.seeded_bugs.reclaim_without_clones {
                holders.extend(layers.descendants(layer));
            }
        }
        let mut holders: Vec<LayerId> = holders.into_iter().collect();
        // A layer comes after the one it was made from, so that references it takes over meanwhile
        // are seen.
        holders.sort_by_cached_key(|holder| (layers.height(*holder), *holder));
        holders
    }
}

/// Groups the entries of a directory by page.
pub(super) fn pages_of(
    record: &SegmentRecord,
    entries: impl IntoIterator<Item = DirectoryEntry>,
) -> Result<BTreeMap<u32, Vec<DirectoryEntry>>> {
    let mut pages: BTreeMap<u32, Vec<DirectoryEntry>> = BTreeMap::new();
    for entry in entries {
        let last = entry.first_block + u64::from(entry.block_count) - 1;
        for page in entry.first_block / PAGE_BLOCKS..=last / PAGE_BLOCKS {
            let page = u32::try_from(page).map_err(|_| {
                let what = format!("{}: its directory names block {last}", record.info);
                Error::new(ErrorKind::Corrupt, what)
            })?;
            pages.entry(page).or_default().push(entry);
        }
    }
    Ok(pages)
}

/// Finds the references to a segment in the pages of one number. Each layer comes with the frames
/// that it may reference, and its page.
fn look_at(
    record: &SegmentRecord,
    page: u32,
    seen: &[(LayerId, Vec<DirectoryEntry>, SeenPage)],
) -> Result<Liveness> {
    let number = record.info.number.0;
    let page_block = u64::from(page) * PAGE_BLOCKS;
    // By the layer that the frames were written for.
    let mut places: BTreeMap<u64, Places> = BTreeMap::new();
    let mut look = Liveness::default();
    for (layer, entries, seen) in seen {
        let wrong = |run: &Run, what: &str| {
            let what = format!(
                "{}: page {page} of layer {layer} names frame {} for block {}, and {what}",
                record.info,
                run.frame_index,
                page_block + u64::from(run.first)
            );
            Error::new(ErrorKind::Corrupt, what)
        };
        let mut own: [bool; PAGE_BLOCKS as usize] = [false; PAGE_BLOCKS as usize];
        for run in seen.states.iter().flatten().filter(|run| run.segment == number) {
            let first_block = page_block + u64::from(run.first);
            let at = FrameAt {
                frame_index: run.frame_index,
                offset: run.offset,
                sealed_bytes: run.sealed_bytes,
            };
            let is_its = |entry: &&DirectoryEntry| {
                entry.at == at
                    && entry.first_block + u64::from(run.within) == first_block
                    && u32::from(run.within) + run.count() <= u32::from(entry.block_count)
            };
            let Some(entry) = entries.iter().find(is_its) else {
                return Err(wrong(run, "its directory does not"));
            };
            let places = places.entry(entry.layer).or_insert([None; PAGE_BLOCKS as usize]);
            for (block, within) in (run.first..=run.last).zip(run.within..) {
                own[usize::from(block)] = true;
                let place = places[usize::from(block)].get_or_insert((at, within));
                if *place != (at, within) {
                    return Err(wrong(run, "another frame for it elsewhere"));
                }
            }
        }
        let of_it = |runs: &[Run]| -> u32 {
            runs.iter().filter(|run| run.segment == number).map(Run::count).sum()
        };
        let shown = seen.states.first().map_or(0, |newest| of_it(newest));
        look.has_hidden |= of_it(&seen.hidden) > shown;
        let is_unseen = |run: &Run| {
            run.segment == number && (run.first..=run.last).any(|block| !own[usize::from(block)])
        };
        if seen.unseen.iter().any(is_unseen) {
            look.settled.push((*layer, page));
        }
    }
    for (layer, places) in places {
        let mut live: Vec<Live> = Vec::new();
        for (block, place) in (page_block..).zip(&places) {
            let Some((at, within)) = *place else { continue };
            match live.last_mut() {
                Some(last)
                    if last.first_block + last.block_count == block
                        && last.from.at == at
                        && u64::from(last.from.within) + last.block_count == u64::from(within) =>
                {
                    last.block_count += 1;
                }
                _ => live.push(Live {
                    layer: LayerId(layer),
                    first_block: block,
                    block_count: 1,
                    from: Placed { segment: number, at, within },
                }),
            }
        }
        look.live.extend(live);
    }
    if !look.live.is_empty() || !look.settled.is_empty() {
        look.state_count = seen.iter().map(|(_, _, seen)| seen.states.len()).sum();
    }
    Ok(look)
}

/// Place in a segment of each block of a page.
type Places = [Option<(FrameAt, u8)>; PAGE_BLOCKS as usize];
