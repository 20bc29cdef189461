//! Drops contents that only removed snapshots showed, a few pages at a time: first the copies that
//! no snapshot shows any more, then the replaced blocks that pages still count as live for them.
//!
//! Invariants:
//! - A copy is dropped only if no living snapshot shows it, judged by the stored contents alone.
//! - The blocks that a copy counts as live are counted out in the batch that deletes it, unless the
//!   previous copy has them, too.
//! - The prune record says where to continue, so a restart repeats at most one step.
//! - A layer with contents that do not verify does not hold up the others.

use super::commit::draft::Draft;
use super::commit::{Fresh, PageId};
use super::history::{self, Copy, History};
use super::keys::{self, copy_key, page_key, prune_key};
use super::pages::{self, Page, Run};
use super::preserve::Preserve;
use super::snapshots::Prune;
use super::{CommitReport, Forget, LayerId, Map, State, Writer, entries};
use crate::fail_point;
use block::{ErrorKind, Lsn, Result};
use std::ops::Bound;
use std::sync::Arc;

/// Counts of one step of pruning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PruneReport {
    /// Copies and pages visited.
    pub looked_count: u64,
    /// Copies dropped.
    pub dropped_count: u64,
    /// Pages that now count only the blocks that they have.
    pub settled_count: u64,
    /// Layers that still have to be pruned.
    pub layers_left: usize,
}

/// The copies of one page, oldest first.
struct PageCopies {
    page: u32,
    copies: Vec<Copy>,
}

type Touched = Vec<(PageId, Option<Arc<Page>>)>;

impl Map {
    /// Visits the copies of some pages, about `budget`, or some pages, of a layer that lost a
    /// snapshot. Deletions become durable with the next commit; a crash before that only repeats
    /// the work.
    ///
    /// # Errors
    /// Like [`Map::commit`].
    pub async fn prune(&self, writer: &mut Writer, budget: usize) -> Result<PruneReport> {
        self.check(writer)?;
        let next = {
            let prunes = self.prunes.lock();
            let is_sound = |(layer, _): &(&LayerId, &Prune)| !writer.unprunable.contains(layer);
            let sound = prunes.iter().find(is_sound).or_else(|| prunes.iter().next());
            sound.map(|(layer, prune)| (*layer, *prune))
        };
        let Some((layer, prune)) = next else { return Ok(PruneReport::default()) };
        let pruned = self.prune_layer(writer, layer, prune, budget).await;
        match &pruned {
            Err(error) if error.kind() == ErrorKind::Corrupt => writer.unprunable.insert(layer),
            Ok(_) => writer.unprunable.remove(&layer),
            Err(_) => false,
        };
        pruned
    }

    async fn prune_layer(
        &self,
        writer: &mut Writer,
        layer: LayerId,
        prune: Prune,
        budget: usize,
    ) -> Result<PruneReport> {
        let mut draft = Draft::new(self);
        let mut report = PruneReport::default();
        let (next_page, touched) = match prune.is_kept {
            false => self.prune_copies(&mut draft, &mut report, layer, prune, budget).await?,
            true => self.settle_kept(&mut draft, &mut report, layer, prune, budget).await?,
        };
        let after = match next_page {
            Some(next_page) => Some(Prune { next_page, ..prune }),
            None if !prune.is_kept => Some(Prune { next_page: 0, is_kept: true, ..prune }),
            None => prune.is_again.then(Prune::default),
        };
        match after {
            Some(after) => draft.put(&prune_key(layer), &after.encode()),
            None => draft.delete(&prune_key(layer)),
        }
        let live = self.draft_live(&mut draft).await?;
        let live_delta = draft.live_delta;
        self.write(writer, draft.batch).await?;
        fail_point!("prune-written");
        self.space.apply(&[], &[], live_delta);
        self.apply(Fresh { bytes_left: 0, pages: touched }, &[], live, Forget::Nothing);
        let mut prunes = self.prunes.lock();
        match after {
            Some(after) => prunes.insert(layer, after),
            None => prunes.remove(&layer),
        };
        report.layers_left = prunes.len();
        Ok(report)
    }

    /// Drops copies. Returns the page to continue with, if there may be more.
    async fn prune_copies(
        &self,
        draft: &mut Draft<'_>,
        report: &mut PruneReport,
        layer: LayerId,
        prune: Prune,
        budget: usize,
    ) -> Result<(Option<u32>, Touched)> {
        let snapshots = self.snapshots();
        let living = snapshots.of(layer);
        let State { db, ranges, layers, .. } = self.state.borrow().clone();
        let is_former = layers.get(layer).is_some_and(|record| record.is_former);
        let (found, next_page) = self.copies_from(&db, layer, prune.next_page, budget).await?;
        let mut touched = Vec::new();
        for PageCopies { page, copies } in found {
            report.looked_count += copies.len() as u64;
            let left = needed(&copies, living, self.seeded_bugs.pruned_too_much);
            if left.len() == copies.len() {
                continue;
            }
            report.dropped_count += (copies.len() - left.len()) as u64;
            let operands = self.operands(&db, layer, page).await?;
            let base = history::base(&operands);
            let before = history::counted_copies(&copies, base);
            let after = history::counted_copies(&left, base);
            let base_page = self.base_page(layer, page).await?;
            draft.recount_over(base_page.as_ref().map(|page| &page.runs[..]), &before, &after);
            for copy in copies.iter().filter(|copy| !left.contains(copy)) {
                draft.delete(&copy_key(layer, page, copy.until));
            }
            // An operand that says that a page is empty is needed only while the page has copies,
            // or while a base would show instead.
            let history = History { operands, copies: left };
            let is_unseen = || {
                let first = history.operands.first().map(|image| image.lsn);
                first.is_none_or(|first| living.last().is_none_or(|newest| *newest < first))
            };
            let is_needless = base_page.is_none() || (is_former && is_unseen());
            if is_needless && is_only_empty(&history) && ranges.cut(layer, page) == Lsn::NONE {
                draft.delete(&page_key(layer, page));
                touched.push(((layer, page), None));
            }
        }
        Ok((next_page, touched))
    }

    /// Gives an image to pages that count blocks which no snapshot shows any more. Returns the page
    /// to continue with.
    async fn settle_kept(
        &self,
        draft: &mut Draft<'_>,
        report: &mut PruneReport,
        layer: LayerId,
        prune: Prune,
        budget: usize,
    ) -> Result<(Option<u32>, Touched)> {
        let snapshots = self.snapshots();
        let living = snapshots.of(layer);
        let is_former = self.layers().get(layer).is_some_and(|record| record.is_former);
        let from = Bound::Included(keys::kept_key(layer, prune.next_page).to_vec());
        let until = Bound::Included(keys::kept_key(layer, u32::MAX).to_vec());
        let found = entries(&self.db(), from, until, budget.max(1)).await?;
        let mut touched = Vec::new();
        let mut last = None;
        for (key, _) in &found {
            let (_, page) =
                keys::page_of(key).ok_or_else(|| keys::corrupt(key, "not a page key"))?;
            last = Some(page);
            report.looked_count += 1;
            let (before, history) = self.history(layer, page, false).await?;
            let lsn = before.page.last_lsn.max(self.ranges().cut(layer, page));
            if !history::showing(&before.page, living, lsn).is_empty() {
                continue;
            }
            report.settled_count += 1;
            let preserve = Preserve {
                layer,
                page,
                lsn,
                runs: before.page.runs.to_vec(),
                ranges: self.ranges().cuts(layer, page),
                living,
                moved: &[],
                base: before.base.clone(),
                is_former,
                is_promoted: false,
            };
            draft.preserve(&mut CommitReport::default(), &history, preserve);
            // Delete the record even if the page has no keeping operand.
            draft.delete(key);
            touched.push(((layer, page), None));
        }
        let next = last.filter(|_| found.len() >= budget).and_then(|last| last.checked_add(1));
        Ok((next, touched))
    }

    /// The copies of some pages from `first` on, and the page to continue with, if there may be
    /// more.
    async fn copies_from(
        &self,
        db: &super::Database,
        layer: LayerId,
        first: u32,
        copy_budget: usize,
    ) -> Result<(Vec<PageCopies>, Option<u32>)> {
        let from = Bound::Included(copy_key(layer, first, Lsn::NONE).to_vec());
        let until = Bound::Included(copy_key(layer, u32::MAX, Lsn(u64::MAX)).to_vec());
        let failed = |cause| db.failed(format!("scan copies of layer {layer}"), cause);
        let mut scan = db.scan((from, until)).await.map_err(failed)?;
        let mut found: Vec<PageCopies> = Vec::new();
        let mut count = 0;
        while let Some(entry) = scan.next().await.map_err(failed)? {
            let (_, page, copy) = self.decode_copy(&entry.key, &entry.value)?;
            match found.last_mut().filter(|last| last.page == page) {
                Some(last) => last.copies.push(copy),
                None if count >= copy_budget => return Ok((found, Some(page))),
                None => found.push(PageCopies { page, copies: vec![copy] }),
            }
            count += 1;
        }
        Ok((found, None))
    }
}

/// The copies that living snapshots show.
fn needed(copies: &[Copy], living: &[Lsn], is_seeded: bool) -> Vec<Copy> {
    let mut before = Lsn::NONE;
    let mut left = Vec::with_capacity(copies.len());
    for copy in copies {
        let is_its = living.contains(&copy.until);
        // A dropped copy has no snapshots that the next copy could take over.
        if history::is_shown(copy, before, living) && (is_its || !is_seeded) {
            left.push(copy.clone());
        }
        before = copy.until;
    }
    left
}

fn is_only_empty(history: &History) -> bool {
    let is_empty = |runs: &[Run]| !runs.iter().any(Run::is_mapped);
    history.copies.is_empty()
        && history.operands.len() == 1
        && is_empty(&pages::counted(&history.operands))
}
