//! Changing where blocks are without changing what they hold, and forgetting segments.
//!
//! Invariants:
//! - Compare and set: a block is re-pointed only if its page still names the place that was read. What
//!   a window has written since stays.
//! - One batch re-points, records the new segments and forgets the old ones: after a crash it is all
//!   there, or nothing of it.
//! - A segment is forgotten only where its count of live blocks is 0 as well as what the caller saw.
//! - What a page holds does not change, and neither does the LSN of its newest operand: a range that
//!   hides what is re-pointed hid the block before.

use super::commit::{Draft, Fresh, PAGES_AT_ONCE, PageChange, draft_page, page_number};
use super::pages::{self, PAGE_BLOCKS, Page, Run};
use super::records::{Root, SegmentRecord, encode_live};
use super::{CommitReport, LayerId, Map, Placed, Writer, keys};
use crate::fail_point;
use crate::planted::Planted;
use block::Result;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Blocks that were written to another segment. They lie in one page, and in one frame before and
/// after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The layer that names them.
    pub layer: LayerId,
    /// First block.
    pub first_block: u64,
    /// Blocks, at least 1.
    pub block_count: u64,
    /// Where they were.
    pub from: Placed,
    /// Where they are now.
    pub to: Placed,
}

/// What reclaim changes at a time.
#[derive(Clone, Debug, Default)]
pub struct Repoint {
    /// In any order; disjoint.
    pub moved: Vec<Moved>,
    /// Segments that are durable and that `moved` names.
    pub segments: Vec<SegmentRecord>,
    /// Segments that no page named but for what `moved` takes away, when their pages were looked at.
    pub emptied: Vec<SegmentRecord>,
    /// What the next segment will be numbered.
    pub next_segment: u64,
    /// Bugs, in tests.
    pub(crate) planted: Planted,
}

/// What became of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RepointReport {
    /// Blocks that are re-pointed.
    pub moved_block_count: u64,
    /// Blocks that somebody wrote meanwhile.
    pub overtaken_block_count: u64,
    /// Segments that the map names no more.
    pub forgotten: Vec<SegmentRecord>,
    /// New segments of which every block was written meanwhile: the map never named them.
    pub unused: Vec<SegmentRecord>,
    /// Bytes of keys and values in the batch.
    pub batch_bytes: u64,
}

/// One page: where its blocks were, and where they are to be.
#[derive(Default)]
struct PageMove {
    from: Vec<Run>,
    to: Vec<Run>,
}

impl Map {
    /// Re-points blocks and forgets segments. When it returns, that is durable, and readers see it.
    ///
    /// A dropped future may or may not have committed; run it in a task of its own.
    ///
    /// # Errors
    /// As [`Map::commit`].
    pub async fn repoint(&self, writer: &mut Writer, asked: Repoint) -> Result<RepointReport> {
        self.check(writer)?;
        let mut report = RepointReport::default();
        let mut draft = Draft::new(self);
        let mut fresh = Fresh { bytes_left: self.page_retain_bytes, pages: Vec::new() };
        let moves = by_page(&asked.moved);
        for moves in moves.chunks(PAGES_AT_ONCE) {
            let mut changes: Vec<PageChange> = moves
                .iter()
                .map(|((layer, page), _)| PageChange {
                    layer: *layer,
                    page: *page,
                    runs: Vec::new(),
                })
                .collect();
            let before = self.pages_before(&changes).await.map_err(|failed| failed.error)?;
            for ((change, before), (_, moved)) in changes.iter_mut().zip(before).zip(moves) {
                change.runs = match asked.planted.repoint_blindly {
                    true => moved.to.clone(),
                    false => pages::unchanged(&before.page.runs, &moved.from, &moved.to),
                };
                let moved_count: u32 = change.runs.iter().map(Run::count).sum();
                let asked_count: u32 = moved.to.iter().map(Run::count).sum();
                report.moved_block_count += u64::from(moved_count);
                report.overtaken_block_count += u64::from(asked_count - moved_count);
                if change.runs.is_empty() {
                    continue;
                }
                for run in &change.runs {
                    *draft.live.entry(run.segment).or_default() += i64::from(run.count());
                }
                let mut drafted = CommitReport::default();
                let lsn = before.page.last_lsn;
                let page = draft_page(&mut draft, &mut drafted, lsn, change, &before);
                let key = (change.layer, change.page);
                // What nobody had read lately is not put before what somebody has.
                match self.cached_page(change.layer, change.page) {
                    Some(_) => fresh.push(key, page),
                    None => fresh.pages.push((key, None)),
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
        self.apply(fresh, &[], live);
        let added: Vec<SegmentRecord> = asked
            .segments
            .iter()
            .filter(|record| !report.unused.contains(record))
            .copied()
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
                report.unused.push(*record);
            }
        }
        let mut counts: BTreeMap<u64, u32> = self.count_live(draft).await?.into_iter().collect();
        for record in &asked.emptied {
            let number = record.info.number.0;
            let live = match counts.get(&number) {
                Some(live) => *live,
                None => self.live_blocks(number).await?,
            };
            if live != 0 && !asked.planted.forget_unchecked {
                // Pages that a range hides still name it, or the count is wrong, which fsck tells.
                continue;
            }
            counts.remove(&number);
            draft.delete(&keys::segment_key(number));
            draft.delete(&keys::live_key(number));
            report.forgotten.push(*record);
        }
        for (number, blocks) in &counts {
            draft.put(&keys::live_key(*number), &encode_live(*blocks));
        }
        Ok(counts.into_iter().collect())
    }

    /// What a page stores, also what ranges hide of it, and what readers see of it.
    ///
    /// # Errors
    /// As [`Map::page`].
    pub(crate) async fn page_and_hidden(
        &self,
        layer: LayerId,
        page: u32,
    ) -> Result<(Arc<Page>, Option<Box<[Run]>>)> {
        if let Some(page) = self.cached_page(layer, page).filter(|page| !page.has_hidden) {
            return Ok((page, None));
        }
        let before = self.page_before(layer, page).await?;
        Ok((before.page, before.stored))
    }
}

/// Sorted by page, each page's runs sorted.
fn by_page(moved: &[Moved]) -> Vec<((LayerId, u32), PageMove)> {
    let mut moves: BTreeMap<(LayerId, u32), PageMove> = BTreeMap::new();
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
