//! Changes the places of blocks without changing their contents, and forgets segments.
//!
//! Invariants:
//! - Compare and set: a block is re-pointed only if its page still names the place that was read.
//!   Blocks that a window has written since stay as they are.
//! - One batch re-points, records the new segments and forgets the old ones: after a crash all of
//!   it is there or none of it.
//! - A segment is forgotten only if its count of live blocks is 0 and the caller found it empty.
//! - Neither the contents of a page nor the LSN of its newest operand change: a range that hides a
//!   re-pointed block hid it before.
//! - Every state of a page that names a place is re-pointed in the same batch, including states
//!   that only snapshots show, whose operands then become copies. The same holds for the page of
//!   every layer that was made from that one.

use super::commit::changes::{Before, PageChange, draft_page, has_past, page_number};
use super::commit::draft::Draft;
use super::commit::{FETCHES_MAX, Fresh, PAGES_AT_ONCE};
use super::dedup::BackReferences;
use super::history::History;
use super::pages::{self, PAGE_BLOCKS, Page, Run};
use super::preserve::{Move, Preserve};
use super::records::{Root, SegmentRecord, encode_live};
use super::snapshots::SnapshotList;
use super::{CommitReport, Forget, LayerId, Map, Placed, Writer, keys};
use crate::dedup::fingerprints::FrameFingerprints;
use crate::fail_point;
use crate::seeded_bugs::SeededBugs;
use block::{Lsn, Result};
use futures::{StreamExt, TryStreamExt};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Blocks that were written to another segment. They lie in one page, and in one frame before and
/// after the move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The layer that names them.
    pub layer: LayerId,
    /// First block.
    pub first_block: u64,
    /// Number of blocks, at least 1.
    pub block_count: u64,
    /// Their old place.
    pub from: Placed,
    /// Their new place.
    pub to: Placed,
}

/// The changes of one step of reclaim.
#[derive(Clone, Debug, Default)]
pub struct Repoint {
    /// In any order; disjoint.
    pub moved: Vec<Moved>,
    /// Pages that store blocks that no reader can see. These blocks are removed from them.
    pub settled: Vec<(LayerId, u32)>,
    /// Durable segments that `moved` or `by_place` names.
    pub segments: Vec<SegmentRecord>,
    /// Fingerprints of the segments that have any.
    pub(crate) fingerprints: Vec<(u64, Vec<FrameFingerprints>)>,
    /// Moves out of segments with back-references.
    pub(crate) by_place: ByPlace,
    /// Segments whose only references, when their pages were read, were those that `moved` takes
    /// away.
    pub emptied: Vec<SegmentRecord>,
    /// Number of the next segment.
    pub next_segment: u64,
    /// Seeded bugs, for tests.
    pub(crate) seeded_bugs: SeededBugs,
}

/// A block of a segment: its number, frame, and block within the frame.
pub(crate) type Place = (u64, u32, u8);

/// Blocks that are moved wherever they are named.
#[derive(Clone, Debug, Default)]
pub(crate) struct ByPlace {
    /// The new place of each block.
    pub places: HashMap<Place, Placed>,
    /// Pages that named some of the blocks; the same pages of layers made from theirs may name
    /// them, too.
    pub pages: Vec<(LayerId, u32)>,
    /// Back-references of the new segments.
    pub back_references: Vec<(u64, LayerId, u32)>,
    /// Back-references of the segments to be forgotten.
    pub forgotten: HashMap<u64, BackReferences>,
    /// Back-references of pages that no longer name any block of the segment, for segments to which
    /// no new references are made.
    pub needless: Vec<(u64, LayerId, u32)>,
}

/// The outcome of a [`Repoint`].
#[derive(Clone, Debug, Default)]
pub struct RepointReport {
    /// Blocks that were re-pointed.
    pub moved_block_count: u64,
    /// Blocks that were written in the meantime.
    pub superseded_block_count: u64,
    /// Segments that the map no longer names.
    pub forgotten: Vec<SegmentRecord>,
    /// New segments that the map never named, because every block of theirs was written in the
    /// meantime.
    pub unused: Vec<SegmentRecord>,
    /// Bytes of keys and values in the batch.
    pub batch_bytes: u64,
}

/// The moves of one page: where its blocks were, and where they are to go.
#[derive(Debug, Default)]
struct PageMove {
    from: Vec<Run>,
    to: Vec<Run>,
}

/// Everything that is to be done to one page.
#[derive(Debug)]
struct PageMoves {
    layer: LayerId,
    page: u32,
    /// Moves requested for this page.
    own: Option<Arc<PageMove>>,
    /// Moves requested for pages of layers above it, whose blocks it may name, too.
    inherited: Vec<Arc<PageMove>>,
    /// Moves by place apply to it.
    is_by_place: bool,
}

impl PageMoves {
    fn all<'a>(&'a self, by_place: &'a ByPlace) -> Vec<Move<'a>> {
        let all = self.own.iter().chain(&self.inherited);
        let by_blocks = all.map(|moved| Move::Blocks { from: &moved.from, to: &moved.to });
        let by_place = self.is_by_place.then_some(Move::Places(&by_place.places));
        by_blocks.chain(by_place).collect()
    }
}

impl Map {
    /// Re-points blocks and forgets segments. On return, the changes are durable and visible to
    /// readers.
    ///
    /// If the future is dropped, the commit may or may not have happened; run it in its own task.
    ///
    /// # Errors
    /// Like [`Map::commit`].
    pub async fn repoint(&self, writer: &mut Writer, asked: Repoint) -> Result<RepointReport> {
        self.check(writer)?;
        let mut report = RepointReport::default();
        let mut draft = Draft::new(self);
        let mut fresh = Fresh { bytes_left: self.page_retain_bytes, pages: Vec::new() };
        let snapshots = self.snapshots();
        let moves = self.with_sharers(by_page(&asked.moved, &asked.settled), &asked.by_place.pages);
        report.moved_block_count += asked.by_place.places.len() as u64;
        let numbers: HashSet<u32> = moves.iter().map(|moves| moves.page).collect();
        // Pages that snapshots show are read with all of their copies.
        let at_once = (PAGES_AT_ONCE / (1 + snapshots.count_max() / 8)).max(1);
        for moves in moves.chunks(at_once) {
            let before = self.pages_to_move(moves, &snapshots).await?;
            for (moves, before) in moves.iter().zip(before) {
                let (layer, number) = (moves.layer, moves.page);
                let counts = &mut (&mut draft, &mut report);
                let moved = match (before.history.as_ref(), &moves.own) {
                    (Some(history), _) => {
                        let all = moves.all(&asked.by_place);
                        self.move_all(counts, (moves, &all), &before, history, &snapshots)
                    }
                    (None, Some(own)) => {
                        let is_blind = asked.seeded_bugs.repoint_blindly;
                        move_one(counts, (layer, number), own, &before, is_blind)
                    }
                    (None, None) => None,
                };
                let Some(page) = moved else { continue };
                // Do not cache pages that were not cached before: they would displace pages that
                // are being read.
                match self.cached_page(layer, number) {
                    Some(_) => fresh.push((layer, number), page),
                    None => fresh.pages.push(((layer, number), None)),
                }
            }
            tokio::task::yield_now().await;
        }
        let live = self.draft_segments(&mut draft, &asked, &mut report).await?;
        let root = Root {
            commit_number: writer.root.commit_number + 1,
            next_segment: asked.next_segment.max(writer.root.next_segment),
            ..writer.root
        };
        draft.put(keys::ROOT_KEY, &root.encode());
        report.batch_bytes = draft.bytes;
        let live_delta = draft.live_delta;

        fail_point!("repoint-before-write");
        self.write(writer, draft.batch).await?;
        fail_point!("repoint-before-flush");
        self.flush(writer).await?;
        fail_point!("repoint-after-flush");

        writer.root = root;
        self.apply(fresh, &[], live, Forget::Moved(&numbers));
        let added: Vec<SegmentRecord> = asked
            .segments
            .iter()
            .filter(|record| !report.unused.iter().any(|unused| unused.is_of(&record.info)))
            .cloned()
            .collect();
        self.space.apply(&added, &report.forgotten, live_delta);
        for record in &report.forgotten {
            self.segments.remove(&record.info.number.0);
            self.live.remove(&record.info.number.0);
        }
        self.commit_number.store(root.commit_number, Ordering::Release);
        self.repoints.fetch_add(1, Ordering::SeqCst);
        Ok(report)
    }

    /// Puts the records and live counts of the segments; returns the counts for the cache.
    async fn draft_segments(
        &self,
        draft: &mut Draft<'_>,
        asked: &Repoint,
        report: &mut RepointReport,
    ) -> Result<Vec<(u64, u32)>> {
        for record in &asked.segments {
            let number = record.info.number.0;
            if draft.live.contains_key(&number) {
                draft.put(&keys::segment_key(number), &record.encode());
            } else {
                report.unused.push(record.clone());
            }
        }
        let is_used = |number: u64| {
            asked.segments.iter().any(|record| record.info.number.0 == number)
                && !report.unused.iter().any(|record| record.info.number.0 == number)
        };
        for (segment, frames) in asked.fingerprints.iter().filter(|(number, _)| is_used(*number)) {
            draft.put_fingerprints(*segment, frames);
        }
        for (segment, layer, page) in &asked.by_place.back_references {
            if is_used(*segment) && !asked.seeded_bugs.unreferenced_back {
                draft.put_back_reference(*segment, *layer, *page);
            }
        }
        for (segment, layer, page) in &asked.by_place.needless {
            draft.delete(&keys::back_reference_key(*segment, *layer, *page));
        }
        let mut counts: BTreeMap<u64, u32> = self.count_live(draft).await?.into_iter().collect();
        for record in &asked.emptied {
            let number = record.info.number.0;
            let live = match counts.get(&number) {
                Some(live) => *live,
                None => self.live_blocks(number).await?,
            };
            if live != 0 && !asked.seeded_bugs.forget_unchecked {
                // Pages that a range hides still name it, or the count is wrong, which fsck
                // reports.
                continue;
            }
            counts.remove(&number);
            draft.delete(&keys::segment_key(number));
            draft.delete(&keys::live_key(number));
            if self.has_dedup() {
                draft.forget_dedup(number, asked.by_place.forgotten.get(&number));
            }
            // Its fragments may have moved since the caller read the record.
            let current = self.find_segment(number).await?;
            report.forgotten.push(current.unwrap_or_else(|| record.clone()));
        }
        for (number, blocks) in &counts {
            draft.put(&keys::live_key(*number), &encode_live(*blocks));
        }
        Ok(counts.into_iter().collect())
    }

    /// Everything stored of a page, and every state of it that a reader can see.
    ///
    /// # Errors
    /// Like [`Map::page`].
    pub(crate) async fn page_for_reclaim(&self, layer: LayerId, page: u32) -> Result<SeenPage> {
        let snapshots = self.snapshots();
        let living = snapshots.of(layer);
        let is_own = self.layers().base(layer, page).is_none();
        let is_plain = |page: &Arc<Page>| {
            !page.has_hidden
                && (is_own || page.operand_count > 0)
                && (self.seeded_bugs.reclaim_without_snapshots
                    || !has_past(page, living, page.last_lsn))
        };
        if let Some(page) = self.cached_page(layer, page).filter(is_plain) {
            let live = page.runs.to_vec();
            return Ok(SeenPage { states: vec![live], ..SeenPage::default() });
        }
        let db = self.db();
        let operands = self.operands(&db, layer, page).await?;
        if operands.is_empty() {
            // A page without operands has no copies either.
            return Ok(SeenPage { states: vec![Vec::new()], ..SeenPage::default() });
        }
        let copies = self.copies(&db, layer, page).await?;
        let history = History { operands, copies };
        let folded = pages::fold(&history.operands, self.cut(layer, page));
        let mut states = vec![folded.runs.to_vec()];
        if self.seeded_bugs.reclaim_without_snapshots
            || !has_past(&folded, living, folded.last_lsn.max(self.cut(layer, page)))
        {
            let hidden = folded.has_hidden.then(|| pages::counted(&history.operands));
            return Ok(SeenPage { states, hidden: hidden.unwrap_or_default(), unseen: Vec::new() });
        }
        let ranges = self.ranges().cuts(layer, page);
        let shown = super::history::showing(&folded, living, Lsn(u64::MAX));
        states.extend(
            super::history::copies_needed(&history.operands, &ranges, shown, false)
                .into_iter()
                .map(|copy| copy.runs),
        );
        states.extend(history.copies.iter().map(|copy| copy.runs.clone()));
        Ok(SeenPage { states, hidden: Vec::new(), unseen: history.stored() })
    }

    fn cut(&self, layer: LayerId, page: u32) -> Lsn {
        self.ranges().cut(layer, page)
    }

    /// The contents of the pages, in the order of `moves`, with the history of those that snapshots
    /// show or that share blocks with other layers.
    async fn pages_to_move(
        &self,
        moves: &[PageMoves],
        snapshots: &SnapshotList,
    ) -> Result<Vec<Before>> {
        let layers = self.layers();
        let pages: Vec<(LayerId, u32, bool)> = moves
            .iter()
            .map(|moves| {
                let is_based = layers.base(moves.layer, moves.page).is_some();
                let is_sharing = !moves.inherited.is_empty() || moves.is_by_place;
                (moves.layer, moves.page, is_based || is_sharing)
            })
            .collect();
        futures::stream::iter(pages)
            .map(|(layer, number, is_sharing)| async move {
                let living = snapshots.of(layer);
                let is_plain =
                    |page: &Arc<Page>| !page.has_hidden && !has_past(page, living, page.last_lsn);
                if !is_sharing && let Some(page) = self.cached_page(layer, number).filter(is_plain)
                {
                    return Ok(Before { page, stored: None, history: None, base: None });
                }
                let (mut before, history) = self.history(layer, number, true).await?;
                let lsn = before.page.last_lsn.max(self.cut(layer, number));
                if is_sharing || has_past(&before.page, living, lsn) {
                    before.history = Some(history);
                } else if before.page.has_hidden {
                    before.stored = Some(pages::counted(&history.operands).into_boxed_slice());
                }
                Ok(before)
            })
            .buffered(FETCHES_MAX.min(moves.len().max(1)))
            .try_collect()
            .await
    }

    /// The moves, together with those of pages of other layers that may name the same places.
    fn with_sharers(
        &self,
        moves: Vec<((LayerId, u32), PageMove)>,
        by_place: &[(LayerId, u32)],
    ) -> Vec<PageMoves> {
        let layers = self.layers();
        let mut all: BTreeMap<(LayerId, u32), PageMoves> = BTreeMap::new();
        let entry = |layer, page| {
            let (own, inherited, is_by_place) = (None, Vec::new(), false);
            PageMoves { layer, page, own, inherited, is_by_place }
        };
        for ((layer, page), moved) in moves {
            let moved = Arc::new(moved);
            if !self.seeded_bugs.reclaim_without_clones {
                for below in layers.descendants(layer) {
                    let sharer = all.entry((below, page)).or_insert_with(|| entry(below, page));
                    sharer.inherited.push(moved.clone());
                }
            }
            all.entry((layer, page)).or_insert_with(|| entry(layer, page)).own = Some(moved);
        }
        for (layer, page) in by_place {
            let below = match self.seeded_bugs.reclaim_without_clones {
                true => Vec::new(),
                false => layers.descendants(*layer),
            };
            for layer in below.into_iter().chain([*layer]) {
                let sharer = all.entry((layer, *page)).or_insert_with(|| entry(layer, *page));
                sharer.is_by_place = true;
            }
        }
        all.into_values().collect()
    }

    /// Re-points every state of a page. Returns `None` if it names none of the moved blocks.
    fn move_all(
        &self,
        (draft, report): &mut (&mut Draft<'_>, &mut RepointReport),
        (moves, asked): (&PageMoves, &[Move<'_>]),
        before: &Before,
        history: &History,
        snapshots: &SnapshotList,
    ) -> Option<Page> {
        let (layer, number) = (moves.layer, moves.page);
        if let Some(own) = &moves.own {
            let count = own.to.iter().map(|run| u64::from(run.count())).sum::<u64>();
            report.moved_block_count += count;
        }
        let is_own = !history.operands.is_empty() || !history.copies.is_empty();
        if !is_own || !(moves.own.is_some() || history.stored().iter().any(|run| names(asked, run)))
        {
            return None;
        }
        let mut runs = before.page.runs.to_vec();
        Move::apply_all(asked, &mut runs);
        let preserve = Preserve {
            layer,
            page: number,
            lsn: before.page.last_lsn.max(self.cut(layer, number)),
            runs,
            ranges: self.ranges().cuts(layer, number),
            living: snapshots.of(layer),
            moved: asked,
            base: before.base.clone(),
            is_former: self.layers().get(layer).is_some_and(|record| record.is_former),
            is_promoted: false,
        };
        Some(draft.preserve(&mut CommitReport::default(), history, preserve))
    }
}

/// Whether some of the run's blocks are to move.
fn names(asked: &[Move<'_>], run: &Run) -> bool {
    asked.iter().any(|moved| !moved.moved(&[*run]).is_empty())
}

/// Re-points the only state of a page. Returns `None` if all of the blocks were written in the
/// meantime.
fn move_one(
    (draft, report): &mut (&mut Draft<'_>, &mut RepointReport),
    (layer, page): (LayerId, u32),
    moved: &PageMove,
    before: &Before,
    is_blind: bool,
) -> Option<Page> {
    let runs = match is_blind {
        true => moved.to.clone(),
        false => pages::unchanged(&before.page.runs, &moved.from, &moved.to),
    };
    let moved_count: u32 = runs.iter().map(Run::count).sum();
    let asked_count: u32 = moved.to.iter().map(Run::count).sum();
    report.moved_block_count += u64::from(moved_count);
    report.superseded_block_count += u64::from(asked_count - moved_count);
    if runs.is_empty() {
        return None;
    }
    for run in &runs {
        *draft.live.entry(run.segment).or_default() += i64::from(run.count());
    }
    let change = PageChange { layer, page, runs, duplicates: Vec::new() };
    let lsn = before.page.last_lsn;
    Some(draft_page(draft, &mut CommitReport::default(), lsn, &change, before, &[]))
}

/// The stored runs of a page, as reclaim sees them.
#[derive(Debug, Default)]
pub(crate) struct SeenPage {
    /// Every state that a reader can see, the newest first.
    pub states: Vec<Vec<Run>>,
    /// All stored runs, including those that a range hides. Empty unless a range hides some and no
    /// snapshot shows the page.
    pub hidden: Vec<Run>,
    /// All stored runs, if snapshots show the page or have shown it; otherwise empty.
    pub unseen: Vec<Run>,
}

impl SeenPage {
    /// Every stored run, some of them more than once.
    pub fn stored(&self) -> impl Iterator<Item = &Run> {
        self.states.iter().flatten().chain(&self.hidden).chain(&self.unseen)
    }
}

/// Groups the moves by page, in order, with each page's runs sorted.
fn by_page(moved: &[Moved], settled: &[(LayerId, u32)]) -> Vec<((LayerId, u32), PageMove)> {
    let mut moves: BTreeMap<(LayerId, u32), PageMove> = BTreeMap::new();
    moves.extend(settled.iter().map(|page| (*page, PageMove::default())));
    for one in moved {
        let page = page_number(one.first_block / PAGE_BLOCKS);
        let first = (one.first_block % PAGE_BLOCKS) as u8;
        let last = ((one.first_block + one.block_count - 1) % PAGE_BLOCKS) as u8;
        let run = |placed: Placed| Run {
            segment: placed.segment,
            frame_index: placed.at.frame_index,
            offset: placed.at.offset,
            sealed_bytes: placed.at.sealed_bytes,
            first,
            last,
            within: placed.within,
        };
        let page = moves.entry((one.layer, page)).or_default();
        page.from.push(run(one.from));
        page.to.push(run(one.to));
    }
    let mut moves: Vec<_> = moves.into_iter().collect();
    for (_, page) in &mut moves {
        pages::normalize(&mut page.from);
        pages::normalize(&mut page.to);
    }
    moves
}
