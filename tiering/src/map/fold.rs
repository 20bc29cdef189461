//! Folds ranges in the background, a few pages at a time.
//!
//! Invariants:
//! - The pages that a range hides are deleted or rewritten before its record is removed. In a layer
//!   with a base, pages that would then show the base get an operand that says that they are empty.
//! - Each step becomes durable with the next commit; a crash before that only repeats the work.

use super::commit::changes::{has_past, put_image};
use super::commit::draft::Draft;
use super::commit::{Fresh, PAGES_AT_ONCE, Writer};
use super::history::{self, History};
use super::keys;
use super::layers::LayerId;
use super::pages;
use super::preserve::Preserve;
use super::ranges::{Range, RunLimit};
use super::{CommitReport, FoldReport, Forget, Map, State};
use crate::fail_point;
use block::{ErrorKind, Lsn, Result};
use bytes::Bytes;
use std::ops::Bound;

/// Number of ranges that are folded at once, and number of pages that may lie between two of them.
/// Chosen by hand: on a device with scattered trims and later writes, searching for pages costs
/// more than folding them.
const RUN_MAX: RunLimit = RunLimit { count_max: 256, gap_pages: 64 };

/// Pages to fold with their stored values, and the page to continue with if there are more.
type Hidden = (Vec<(u32, Option<Bytes>)>, Option<u32>);

impl Map {
    /// Folds part of the oldest range records: rewrites or deletes up to `page_budget` pages that
    /// they hide, and shortens or drops the records. The step becomes durable with the next commit;
    /// a crash before that only repeats the work.
    ///
    /// # Errors
    /// Like [`Map::commit`].
    pub async fn fold_ranges(&self, writer: &mut Writer, page_budget: usize) -> Result<FoldReport> {
        self.check(writer)?;
        let ranges = self.ranges();
        // Layers that failed come last, so that they do not keep the others from being folded.
        let sound = ranges.iter().find(|(layer, _)| !writer.unfoldable.contains(layer));
        let Some((layer, range)) = sound.or_else(|| ranges.first()) else {
            return Ok(FoldReport::default());
        };
        let run = match self.layers().get(layer).is_some_and(|record| record.base.is_some()) {
            true => vec![range],
            false => ranges.run_from(layer, &range, RUN_MAX),
        };
        let mut folded = self.fold_run(writer, page_budget, layer, &run).await;
        // The damaged page may belong to a later range, so fold the first one alone.
        if run.len() > 1 && folded.as_ref().is_err_and(|error| error.kind() == ErrorKind::Corrupt) {
            folded = self.fold_run(writer, page_budget, layer, &[range]).await;
        }
        match &folded {
            Ok(_) => writer.unfoldable.remove(&layer),
            Err(error) if error.kind() == ErrorKind::Corrupt => writer.unfoldable.insert(layer),
            Err(_) => false,
        };
        folded
    }

    /// Folds a run of ranges. `run` is not empty; its ranges belong to one window, ascending and
    /// disjoint. In a layer with a base it is a single range.
    pub(super) async fn fold_run(
        &self,
        writer: &mut Writer,
        page_budget: usize,
        layer: LayerId,
        run: &[Range],
    ) -> Result<FoldReport> {
        // The caller holds the writer, so the ranges have not changed since it read them.
        let State { ranges, layers, .. } = self.state.borrow().clone();
        let snapshots = self.snapshots();
        let living = snapshots.of(layer);
        let is_former = layers.get(layer).is_some_and(|record| record.is_former);
        let (hidden, next_page) = self.pages_hidden(layer, run, page_budget).await?;
        let mut draft = Draft::new(self);
        let mut report = CommitReport::default();
        let mut touched = Vec::new();
        // A dropped record counts as one page, so that the caller continues with the next one.
        let page_count = (hidden.len() as u64).max(1);
        for (index, (page, value)) in hidden.into_iter().enumerate() {
            let key = keys::page_key(layer, page);
            let operands = match value {
                Some(value) => self.decode_operands(&key, &value)?,
                None => Vec::new(),
            };
            let (cut, cuts) = (ranges.cut(layer, page), ranges.cuts(layer, page));
            let base = self.base_page(layer, page).await?;
            let folded = pages::fold(&operands, cut);
            // Without the range it would show the base, in a former layer only to snapshots.
            let is_over =
                operands.is_empty() && base.is_some() && !self.seeded_bugs.range_uncovers_base;
            let is_shown =
                is_over && !history::showing_hidden(&cuts, living, Lsn(u64::MAX)).is_empty();
            let is_bare = is_over && (!is_former || is_shown);
            if folded.has_hidden || is_bare {
                let lsn = folded.last_lsn.max(cut);
                let shows_more = is_bare && !history::showing_hidden(&cuts, living, lsn).is_empty();
                if shows_more || has_past(&folded, living, lsn) {
                    let copies = self.newest_copy(&self.db(), layer, &folded, page).await?;
                    let preserve = Preserve {
                        layer,
                        page,
                        lsn,
                        runs: folded.runs.to_vec(),
                        ranges: cuts,
                        living,
                        moved: &[],
                        base,
                        is_former,
                        is_promoted: false,
                    };
                    draft.preserve(&mut report, &History { operands, copies }, preserve);
                } else {
                    let stored = pages::counted(&operands);
                    let base = base.as_ref().map(|base| &base.runs[..]);
                    draft.recount_over(base, &stored, &folded.runs);
                    // A page without newer operands was emptied by the range, so it gets the
                    // range's LSN.
                    let lsn = if folded.runs.is_empty() { lsn } else { folded.last_lsn };
                    let keeps_empty = base.is_some() && (!is_former || is_shown);
                    put_image(&mut draft, &key, lsn, &folded.runs, keeps_empty);
                }
                touched.push((layer, page));
            }
            if index.is_multiple_of(PAGES_AT_ONCE) {
                tokio::task::yield_now().await;
            }
        }
        let done = |range: &&Range| next_page.is_none_or(|next| range.last_page < next);
        let (gone, rest) = run.split_at(run.iter().take_while(done).count());
        let key_of = |range: &Range| keys::range_key(layer, range.lsn, range.ordinal);
        for range in gone {
            draft.delete(&key_of(range));
        }
        let mut left = ranges.without(layer, gone);
        if let (Some(range), Some(next)) = (rest.first(), next_page) {
            let shorter = Range { first_page: next.max(range.first_page), ..*range };
            draft.put(&key_of(range), &shorter.encode());
            left = left.with([(layer, shorter)]);
        }
        let live = self.draft_live(&mut draft).await?;
        let live_delta = draft.live_delta;
        self.write(writer, draft.batch).await?;
        fail_point!("fold-written");
        self.space.apply(&[], &[], live_delta);
        let ranges_left = left.len();
        // Update the counts first: an observer that sees no ranges left must see the counts without
        // their blocks.
        let none = Fresh { bytes_left: 0, pages: Vec::new() };
        self.apply(none, &[], live, Forget::Nothing);
        self.set_ranges(left);
        let pages = touched.into_iter().map(|key| (key, None)).collect();
        self.apply(Fresh { bytes_left: 0, pages }, &[], Vec::new(), Forget::Nothing);
        Ok(FoldReport { page_count, ranges_left, ..FoldReport::default() })
    }

    /// The first pages of a run, at most about `page_budget`: those that are stored, and in a layer
    /// with a base also those that would show it.
    async fn pages_hidden(
        &self,
        layer: LayerId,
        run: &[Range],
        page_budget: usize,
    ) -> Result<Hidden> {
        let State { db, layers, .. } = self.state.borrow().clone();
        let mut found = Vec::new();
        let Some((range, last)) = run.first().zip(run.last()) else { return Ok((found, None)) };
        let snapshots = self.snapshots();
        let is_shown = snapshots.of(layer).last().is_some_and(|newest| *newest >= range.lsn);
        let is_over = layers.base(layer, range.last_page).is_some() && is_shown;
        if layers.shows_base(layer, range.last_page) || is_over {
            let pages = range.first_page..=range.last_page;
            let (numbers, until) =
                self.numbers_between(&db, layer, pages, page_budget.max(1)).await?;
            for number in numbers {
                found.push((number, super::get(&db, &keys::page_key(layer, number)).await?));
            }
            let next = until.checked_add(1).filter(|next| *next <= range.last_page);
            return Ok((found, next));
        }
        let from = Bound::Included(keys::page_key(layer, range.first_page).to_vec());
        let until = Bound::Included(keys::page_key(layer, last.last_page).to_vec());
        let failed = |cause| db.failed(format!("scan pages of layer {layer}"), cause);
        let mut scan = db.scan((from, until)).await.map_err(failed)?;
        while let Some(entry) = scan.next().await.map_err(failed)? {
            let (_, page) = keys::page_of(&entry.key)
                .ok_or_else(|| keys::corrupt(&entry.key, "not a page key"))?;
            // Skip pages between the ranges.
            let over = run.partition_point(|range| range.last_page < page);
            if !run.get(over).is_some_and(|range| range.covers(page)) {
                continue;
            }
            if found.len() >= page_budget {
                return Ok((found, Some(page)));
            }
            found.push((page, Some(entry.value)));
        }
        Ok((found, None))
    }
}
