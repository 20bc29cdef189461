//! Dropping what only removed snapshots showed, a little at a time.
//!
//! Invariants:
//! - A copy is dropped only when no living snapshot shows it, by what is stored and nothing else.
//! - What a copy counts as live is counted out in the batch that deletes it, unless the copy before it
//!   has the same.
//! - The prune record says where to go on: a restart repeats a step at most.

use super::commit::{Draft, Fresh};
use super::history::{self, Copy, History};
use super::keys::{copy_key, page_key, prune_key};
use super::pages::{self, Run};
use super::snapshots::Prune;
use super::{LayerId, Map, State, Writer};
use block::{Lsn, Result};
use std::ops::Bound;

/// What a step of pruning did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PruneReport {
    /// Copies that were looked at.
    pub copy_count: u64,
    /// Copies dropped.
    pub dropped_count: u64,
    /// Layers that are still to be pruned.
    pub layers_left: usize,
}

/// The copies of one page, oldest first.
struct PageCopies {
    page: u32,
    copies: Vec<Copy>,
}

impl Map {
    /// Looks at the copies of some pages, about `copy_budget`, of a layer of which a snapshot was removed. What it
    /// drops is durably gone with the next commit; a crash before only repeats the work.
    ///
    /// # Errors
    /// As [`Map::commit`].
    pub async fn prune(&self, writer: &mut Writer, copy_budget: usize) -> Result<PruneReport> {
        self.check(writer)?;
        let first = self.prunes.lock().first_key_value().map(|(layer, prune)| (*layer, *prune));
        let Some((layer, prune)) = first else { return Ok(PruneReport::default()) };
        let snapshots = self.snapshots();
        let living = snapshots.of(layer);
        let State { db, ranges, .. } = self.state.borrow().clone();
        let (found, next_page) = self.copies_from(&db, layer, prune.next_page, copy_budget).await?;
        let mut draft = Draft::new(self);
        let mut report = PruneReport::default();
        let mut touched = Vec::new();
        for PageCopies { page, copies } in found {
            report.copy_count += copies.len() as u64;
            let left = needed(&copies, living, self.planted.pruned_too_much);
            if left.len() == copies.len() {
                continue;
            }
            report.dropped_count += (copies.len() - left.len()) as u64;
            let operands = self.operands(&db, layer, page).await?;
            let base = history::base(&operands);
            let before = history::counted_copies(&copies, base);
            let after = history::counted_copies(&left, base);
            draft.recount(&before, after.into_iter());
            for copy in copies.iter().filter(|copy| !left.contains(copy)) {
                draft.delete(&copy_key(layer, page, copy.until));
            }
            // A page that is empty says so only while it has copies.
            let history = History { operands, copies: left };
            if is_only_empty(&history) && ranges.cut(layer, page) == Lsn::NONE {
                draft.delete(&page_key(layer, page));
                touched.push(((layer, page), None));
            }
        }
        let after = match next_page {
            Some(next_page) => Some(Prune { next_page, ..prune }),
            None => prune.is_again.then(Prune::default),
        };
        match after {
            Some(after) => draft.put(&prune_key(layer), &after.encode()),
            None => draft.delete(&prune_key(layer)),
        }
        let live = self.draft_live(&mut draft).await?;
        let live_delta = draft.live_delta;
        self.write(writer, draft.batch).await?;
        self.space.apply(&[], &[], live_delta);
        self.apply(Fresh { bytes_left: 0, pages: touched }, &[], live);
        let mut prunes = self.prunes.lock();
        match after {
            Some(after) => prunes.insert(layer, after),
            None => prunes.remove(&layer),
        };
        report.layers_left = prunes.len();
        Ok(report)
    }

    /// The copies of some pages from `first` on, and the page to go on with, if there may be more.
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

/// Those that living snapshots show.
fn needed(copies: &[Copy], living: &[Lsn], is_planted: bool) -> Vec<Copy> {
    let mut before = Lsn::NONE;
    let mut left = Vec::with_capacity(copies.len());
    for copy in copies {
        // A copy that goes leaves its snapshots to nobody: it has none.
        let is_its = living.contains(&copy.until);
        if history::is_shown(copy, before, living) && (is_its || !is_planted) {
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
