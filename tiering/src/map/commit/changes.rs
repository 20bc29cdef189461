//! The changes of a commit, page by page: the runs that a page gets, its contents before, and the
//! resulting entries of the batch.
//!
//! Invariants:
//! - A commit adds at most one operand to a page. A page gets an image instead if it has no
//!   operands yet, is rewritten completely, or has [`OPERANDS_MIN`] operands or a few more.

use super::draft::Draft;
use super::{Change, Commit, CommitError, CommitReport, FETCHES_MAX, of_layer};
use crate::map::history::{self, History};
use crate::map::layers::LayerId;
use crate::map::pages::{self, OperandKind, PAGE_BLOCKS, Page, Run};
use crate::map::ranges::{RANGE_PAGES_MIN, Range};
use crate::map::snapshots::SnapshotList;
use crate::map::{Map, keys};
use block::{Lsn, Result};
use futures::{StreamExt, TryStreamExt};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Operands of a page before it is folded to an image. Each page adds up to the same number again,
/// depending on its own number, so that pages written together are not folded together. Chosen by
/// hand: this many operands of a few blocks take about as much space as the image.
const OPERANDS_MIN: u32 = 12;

/// Operands of a page that snapshots show and that cannot get an image for now. Chosen by hand:
/// nearly three times as many operands as the longest other page has.
const OPERANDS_MAX: u32 = 64;

/// Version of the records that say which pages keep counting replaced blocks. Byte table:
/// docs/format-map.md.
const KEPT_VERSION: u8 = 1;

/// The runs that a window assigns to one page.
pub(in crate::map) struct PageChange {
    pub layer: LayerId,
    pub page: u32,
    pub runs: Vec<Run>,
    /// The runs among them whose frame was written earlier, for other blocks.
    pub duplicates: Vec<Run>,
}

/// The contents of a page that is about to change.
pub(in crate::map) struct Before {
    pub page: Arc<Page>,
    /// All counted runs, hidden by ranges or not. Present only if some are hidden.
    pub stored: Option<Box<[Run]>>,
    /// Everything stored of the page. Present if the page is to get an image and snapshots show it
    /// or see its base hidden by a range, or if other layers share its blocks.
    pub history: Option<History>,
    /// The page of the layer's base, if it maps any blocks: see [`crate::map::layers`].
    pub base: Option<Arc<Page>>,
}

impl Before {
    /// The runs that the base counts.
    pub fn base_runs(&self) -> Option<&[Run]> {
        self.base.as_ref().map(|base| &base.runs[..])
    }
}

impl Map {
    /// The contents of the pages before the change, in the order of `changes`. A page that
    /// snapshots show, and that a change at `lsn` would give an image, comes with its history.
    pub(super) async fn pages_before(
        &self,
        changes: &[PageChange],
        snapshots: &SnapshotList,
        lsn: Lsn,
        may_copy: bool,
    ) -> Result<Vec<Before>, CommitError> {
        let mut found: Vec<Option<Before>> = Vec::with_capacity(changes.len());
        let mut missing = Vec::new();
        let layers = self.layers();
        let is_settled = |change: &PageChange, page: &Page| {
            has_past(page, snapshots.of(change.layer), lsn)
                && (gets_image(change, page) && may_copy || must_get_image(change, page))
        };
        for (index, change) in changes.iter().enumerate() {
            let cached = self.cached_page(change.layer, change.page);
            let is_usable = |page: &Arc<Page>| !page.has_hidden && !is_settled(change, page);
            let is_based = layers.base(change.layer, change.page).is_some();
            let usable = cached.filter(|page| is_usable(page) && !is_based);
            if usable.is_none() {
                missing.push(index);
            }
            found.push(usable.map(|page| Before { page, stored: None, history: None, base: None }));
        }
        let fetched: Vec<(usize, Before)> = futures::stream::iter(missing)
            .map(|index| async move {
                let change = &changes[index];
                let (layer, number) = (change.layer, change.page);
                let fetch = async {
                    let (db, cut) = self.db_and_cut(layer, number);
                    let base = self.base_page(layer, number).await?;
                    let operands = self.operands(&db, layer, number).await?;
                    let mut page = pages::fold(&operands, cut);
                    let mut is_hidden = false;
                    if let Some(base) = base.as_ref().filter(|_| operands.is_empty()) {
                        let (cuts, living) =
                            (self.ranges().cuts(layer, number), snapshots.of(layer));
                        is_hidden = !history::showing_hidden(&cuts, living, lsn).is_empty();
                        if cuts.is_empty() {
                            page.runs.clone_from(&base.runs);
                        }
                    }
                    let page = Arc::new(page);
                    let mut before = Before { page, stored: None, history: None, base };
                    if is_hidden || is_settled(change, &before.page) {
                        let copies = self.newest_copy(&db, layer, &before.page, number).await?;
                        before.history = Some(History { operands, copies });
                    } else if before.page.has_hidden {
                        before.stored = Some(pages::counted(&operands).into_boxed_slice());
                    }
                    Ok(before)
                };
                Ok::<_, CommitError>((index, fetch.await.map_err(of_layer(layer))?))
            })
            .buffer_unordered(FETCHES_MAX)
            .try_collect()
            .await?;
        for (index, before) in fetched {
            found[index] = Some(before);
        }
        Ok(found.into_iter().flatten().collect())
    }
}

/// Whether a living snapshot shows an older state of the page than the newest one at `lsn`, or any
/// snapshot ever has.
pub(in crate::map) fn has_past(page: &Page, living: &[Lsn], lsn: Lsn) -> bool {
    page.copy != Lsn::NONE || page.has_kept || !history::showing(page, living, lsn).is_empty()
}

/// Whether the change cannot be appended to a page that snapshots show.
fn must_get_image(change: &PageChange, old: &Page) -> bool {
    old.operand_count >= OPERANDS_MAX || old.has_hidden || is_emptied(change, old)
}

/// Whether the change gives the page an image or unmaps all of it.
fn gets_image(change: &PageChange, old: &Page) -> bool {
    let is_full = old.operand_count >= OPERANDS_MIN + change.page % OPERANDS_MIN;
    is_full || is_complete(change) || old.has_hidden || is_emptied(change, old)
}

fn is_complete(change: &PageChange) -> bool {
    u64::from(change.runs.iter().map(Run::count).sum::<u32>()) == PAGE_BLOCKS
}

fn is_emptied(change: &PageChange, old: &Page) -> bool {
    !pages::assign(&old.runs, &change.runs).iter().any(Run::is_mapped)
}

/// Adds the change of one page to the batch and returns the page as it is afterwards. For pages
/// that snapshots show or have shown, it takes only changes that are appended; `Draft::settle`
/// takes the others.
pub(in crate::map) fn draft_page(
    draft: &mut Draft<'_>,
    report: &mut CommitReport,
    lsn: Lsn,
    change: &PageChange,
    before: &Before,
    living: &[Lsn],
) -> Page {
    let old = &before.page;
    let mut runs = pages::assign(&old.runs, &change.runs);
    // A page that stores anything is complete, so it need not say that a block is unmapped.
    runs.retain(Run::is_mapped);
    let base = before.base_runs();
    let keeps = old.copy != Lsn::NONE || !history::showing(old, living, lsn).is_empty();
    match &before.stored {
        Some(stored) => {
            // Assign holes instead of the new runs, because a new run may extend a remaining run
            // that ends where it begins.
            let replaced = change.runs.iter().map(|run| Run::hole(run.first, run.last));
            let replaced: Vec<Run> = replaced.collect();
            let mut stays = pages::assign(&old.runs, &replaced);
            stays.retain(Run::is_mapped);
            draft.recount_over(base, stored, &stays);
        }
        None if keeps && !draft.seeded_bugs.kept_uncounted => {}
        None => {
            pages::for_each_replaced(&old.runs, &change.runs, |run| draft.lose_over(base, run));
        }
    }
    let key = keys::page_key(change.layer, change.page);
    let has_operands = old.operand_count > 0;
    let mut page = Page { first_lsn: lsn, last_lsn: lsn, ..Page::default() };
    if runs.is_empty() && old.copy == Lsn::NONE && base.is_none() {
        if has_operands {
            draft.delete(&key);
            report.deleted_count += 1;
        }
    } else if !has_operands || (gets_image(change, old) && !has_past(old, living, lsn)) {
        put_image(draft, &key, lsn, &runs, base.is_some());
        report.image_count += 1;
        page.operand_count = 1;
    } else {
        let mut plain = Vec::with_capacity(32 + 12 * change.runs.len());
        pages::encode(lsn, OperandKind::Delta { keeps }, &change.runs, &mut plain);
        draft.append(&key, &plain);
        report.operand_count += 1;
        if keeps && !old.has_kept {
            draft.put(&keys::kept_key(change.layer, change.page), &[KEPT_VERSION]);
        }
        page = Page {
            first_lsn: old.first_lsn,
            operand_count: old.operand_count + 1,
            has_kept: old.has_kept || keeps,
            copy: old.copy,
            ..page
        };
    }
    Page { runs: runs.into_boxed_slice(), ..page }
}

/// Replaces a whole page, or deletes it if it maps nothing and hides no base.
pub(in crate::map) fn put_image(
    draft: &mut Draft<'_>,
    key: &[u8],
    lsn: Lsn,
    runs: &[Run],
    has_base: bool,
) {
    if has_base || runs.iter().any(Run::is_mapped) {
        let mut plain = Vec::with_capacity(32 + 12 * runs.len());
        pages::encode(lsn, OperandKind::Image { copy: Lsn::NONE }, runs, &mut plain);
        draft.put(key, &plain);
    } else {
        draft.delete(key);
    }
}

/// Sorts changes into the runs of each page, and into ranges if they unmap many whole pages.
pub(super) fn split(commit: &Commit) -> (Vec<PageChange>, Vec<(LayerId, Range)>) {
    let mut runs: BTreeMap<(LayerId, u32), [Vec<Run>; 2]> = BTreeMap::new();
    let mut ranges = Vec::new();
    for change in &commit.changes {
        let end = change.first_block + change.block_count;
        let whole_first = change.first_block.div_ceil(PAGE_BLOCKS);
        let whole_end = end / PAGE_BLOCKS;
        let is_range = change.placed.is_none()
            && whole_end.saturating_sub(whole_first) >= u64::from(RANGE_PAGES_MIN);
        if is_range {
            ranges.push((
                change.layer,
                Range {
                    lsn: commit.lsn,
                    ordinal: u32::try_from(ranges.len()).unwrap_or(u32::MAX),
                    first_page: page_number(whole_first),
                    last_page: page_number(whole_end - 1),
                },
            ));
            add_runs(&mut runs, change, change.first_block, whole_first * PAGE_BLOCKS);
            add_runs(&mut runs, change, whole_end * PAGE_BLOCKS, end);
        } else {
            add_runs(&mut runs, change, change.first_block, end);
        }
    }
    let pages = runs.into_iter().map(|((layer, page), [mut runs, duplicates])| {
        pages::normalize(&mut runs);
        PageChange { layer, page, runs, duplicates }
    });
    (pages.collect(), ranges)
}

pub(in crate::map) fn page_number(page: u64) -> u32 {
    u32::try_from(page).expect("a volume of 1 PiB has 2^30 pages")
}

fn add_runs(
    runs: &mut BTreeMap<(LayerId, u32), [Vec<Run>; 2]>,
    change: &Change,
    mut block: u64,
    end: u64,
) {
    while block < end {
        let page = block / PAGE_BLOCKS;
        let page_end = ((page + 1) * PAGE_BLOCKS).min(end);
        let (first, last) = ((block % PAGE_BLOCKS) as u8, ((page_end - 1) % PAGE_BLOCKS) as u8);
        let run = match change.placed {
            Some(placed) => Run {
                segment: placed.segment,
                frame_index: placed.at.frame_index,
                offset: placed.at.offset,
                sealed_bytes: placed.at.sealed_bytes,
                first,
                last,
                within: placed.within + (block - change.first_block) as u8,
            },
            None => Run::hole(first, last),
        };
        let [all, duplicates] = runs.entry((change.layer, page_number(page))).or_default();
        all.push(run);
        if change.is_duplicate {
            duplicates.push(run);
        }
        block = page_end;
    }
}
