//! Writes pages that snapshots show. Copies are made only here.
//!
//! Invariants:
//! - Copies are put in the batch that replaces the operands they are made of.
//! - The same batch changes the live counts, from those of the previous contents to those of the
//!   new ones.
//! - A page that has copies is never deleted: when it becomes empty, it gets an image that says so.

use super::commit::changes::Before;
use super::commit::draft::Draft;
use super::database::Database;
use super::history::{self, Copy, History};
use super::keys::{self, copy_key};
use super::pages::{self, OperandKind, Page, Run};
use super::repoint::Place;
use super::{CommitReport, LayerId, Map, Placed};
use block::{Lsn, Result};
use std::collections::HashMap;
use std::ops::Bound;
use std::sync::Arc;

/// Blocks that have moved.
pub(super) enum Move<'a> {
    /// Blocks of the page at their old and at their new places, both sorted.
    Blocks { from: &'a [Run], to: &'a [Run] },
    /// Old and new places, whichever blocks of the page are there.
    Places(&'a HashMap<Place, Placed>),
}

/// A page with a past that is to get an image.
pub(super) struct Preserve<'a> {
    pub layer: LayerId,
    pub page: u32,
    /// LSN of the image: at least that of every operand and of every range that hides some.
    pub lsn: Lsn,
    /// The new contents of the page; unmapped blocks may be excluded.
    pub runs: Vec<Run>,
    /// LSNs of the range records that cover the page, ascending.
    pub ranges: Vec<Lsn>,
    /// The layer's living snapshots, ascending.
    pub living: &'a [Lsn],
    /// Moves to apply to the copies, too; `runs` already includes them.
    pub moved: &'a [Move<'a>],
    /// The page of the layer's base, if it maps any blocks.
    pub base: Option<Arc<Page>>,
    /// The layer is former: no reader sees `runs`.
    pub is_former: bool,
    /// From here on, the base no longer belongs to the page. If the page is empty, it keeps an
    /// image that says so, because a reader that still uses the previous layer record would show
    /// the base instead.
    pub is_promoted: bool,
}

impl Draft<'_> {
    /// Puts an image of a page, and copies of the replaced states that snapshots show. With
    /// `moved`, `history` must contain every copy; otherwise the newest is enough.
    pub(super) fn preserve(
        &mut self,
        report: &mut CommitReport,
        history: &History,
        preserve: Preserve<'_>,
    ) -> Page {
        let Preserve { layer, page, lsn, mut runs, ranges, living, moved, .. } = preserve;
        let base = preserve.base.as_ref().map(|base| &base.runs[..]);
        let before = history.counted();
        runs.retain(Run::is_mapped);
        let now = pages::fold(&history.operands, Lsn::NONE);
        let shown = match history.operands.is_empty() && base.is_some() {
            true => history::showing_hidden(&ranges, living, lsn),
            false => history::showing(&now, living, lsn),
        };
        let mut copies = history.copies.clone();
        let made_from = copies.len();
        if !self.seeded_bugs.versions_forgotten {
            let has_base = base.is_some();
            copies.extend(history::copies_needed(&history.operands, &ranges, shown, has_base));
        }
        for (index, copy) in copies.iter_mut().enumerate() {
            let is_moved = Move::apply_all(moved, &mut copy.runs);
            if index >= made_from || is_moved {
                put_copy(self, layer, page, copy);
                report.copy_count += 1;
            }
        }
        let mut after = history::counted_copies(&copies, &runs);
        after.extend(&runs);
        // The base moves, too, where it shares blocks with the page.
        let mut base_after = base.filter(|_| !preserve.is_promoted).map(<[Run]>::to_vec);
        if let Some(base) = &mut base_after {
            Move::apply_all(moved, base);
        }
        let counted = |runs: Vec<Run>, base: Option<&[Run]>| match base {
            Some(base) => pages::difference(&runs, base),
            None => runs,
        };
        let after = counted(after, base_after.as_deref());
        self.recount(&counted(before, base), after.into_iter());
        if now.has_kept {
            self.delete(&keys::kept_key(layer, page));
        }

        let copy = copies.last().map_or(Lsn::NONE, |copy| copy.until);
        let key = keys::page_key(layer, page);
        let is_kept =
            !runs.is_empty() || copy != Lsn::NONE || (base.is_some() && !preserve.is_former);
        if is_kept {
            let mut plain = Vec::with_capacity(32 + 12 * runs.len());
            pages::encode(lsn, OperandKind::Image { copy }, &runs, &mut plain);
            self.put(&key, &plain);
            report.image_count += 1;
        } else if !history.operands.is_empty() {
            self.delete(&key);
            report.deleted_count += 1;
        }
        let lsn = if is_kept { lsn } else { Lsn::NONE };
        Page {
            runs: runs.into_boxed_slice(),
            first_lsn: lsn,
            last_lsn: lsn,
            operand_count: is_kept.into(),
            has_hidden: false,
            has_kept: false,
            copy,
        }
    }
}

pub(super) fn put_copy(draft: &mut Draft<'_>, layer: LayerId, page: u32, copy: &Copy) {
    let mut plain = Vec::with_capacity(32 + 12 * copy.runs.len());
    pages::encode(copy.since, OperandKind::Image { copy: Lsn::NONE }, &copy.runs, &mut plain);
    draft.put(&copy_key(layer, page, copy.until), &plain);
}

impl Move<'_> {
    /// Re-points the runs that are at the old places of `moves`. Returns `false` if none is.
    pub(super) fn apply_all(moves: &[Move<'_>], runs: &mut Vec<Run>) -> bool {
        let mut is_any = false;
        for one in moves {
            is_any |= one.apply(runs);
        }
        is_any
    }

    /// The parts of these runs that have moved, at their new places.
    pub(super) fn moved(&self, runs: &[Run]) -> Vec<Run> {
        match self {
            Move::Blocks { from, to } => pages::unchanged(runs, from, to),
            Move::Places(places) => pages::relocated(runs, |place| places.get(&place).copied()),
        }
    }

    fn apply(&self, runs: &mut Vec<Run>) -> bool {
        let to = self.moved(runs);
        if to.is_empty() {
            return false;
        }
        *runs = pages::assign(runs, &to);
        true
    }
}

impl Map {
    /// The newest stored copy of a page, if any.
    pub(super) async fn newest_copy(
        &self,
        db: &Database,
        layer: LayerId,
        page: &Page,
        number: u32,
    ) -> Result<Vec<Copy>> {
        if page.copy == Lsn::NONE {
            return Ok(Vec::new());
        }
        let key = copy_key(layer, number, page.copy);
        if let Some(value) = super::get(db, &key).await? {
            return Ok(vec![self.decode_copy(&key, &value)?.2]);
        }
        // It has been dropped since, and an older copy may exist.
        let from = Bound::Included(copy_key(layer, number, Lsn::NONE).to_vec());
        let until = Bound::Excluded(key.to_vec());
        let failed = |cause| db.failed(format!("scan copies of layer {layer}"), cause);
        let mut scan = db.scan((from, until)).await.map_err(failed)?;
        let mut last = None;
        while let Some(entry) = scan.next().await.map_err(failed)? {
            last = Some(entry);
        }
        match last {
            Some(entry) => Ok(vec![self.decode_copy(&entry.key, &entry.value)?.2]),
            None => Ok(Vec::new()),
        }
    }

    /// A page with its newest copy, or with all of them.
    pub(super) async fn history(
        &self,
        layer: LayerId,
        number: u32,
        has_all: bool,
    ) -> Result<(Before, History)> {
        let (db, cut) = self.db_and_cut(layer, number);
        let operands = self.operands(&db, layer, number).await?;
        let page = pages::fold(&operands, cut);
        let copies = match has_all {
            true => self.copies(&db, layer, number).await?,
            false => self.newest_copy(&db, layer, &page, number).await?,
        };
        let base = self.base_page(layer, number).await?;
        let before = Before { page: page.into(), stored: None, history: None, base };
        Ok((before, History { operands, copies }))
    }
}
