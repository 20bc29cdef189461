//! What is stored of a page that snapshots show, too. Pure: lists in, lists out.
//!
//! The operands of a page go on as if there were no snapshots, and an operand keeps its LSN: what a snapshot
//! at LSN `s` shows of the page is what the operands up to `s` assign, as long as they are there. Before
//! they are replaced by an image, the states that snapshots still need are put into *copies*. A copy shows
//! the page as it was from one LSN (`since`) to another (`until`), both included.
//!
//! Invariants:
//! - A snapshot at `s` shows the first copy whose `until` is not below `s`, if its `since` is not above `s`;
//!   where it is above, the page was empty. Without such a copy it shows the operands up to `s`.
//! - A block is counted as live once for each place that it has in the states of a page: by the newest
//!   state that has it there. The newest copy is followed by the first image of the operands, and operands
//!   that [keep](pages::OperandKind::Delta) count what they replace until an image takes their place. So what is
//!   counted follows from what is stored, and from nothing else.

use super::pages::{self, Operand, Page, Run};
use block::Lsn;

/// A page as it was for a while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copy {
    /// LSN of the newest snapshot that shows it.
    pub until: Lsn,
    /// LSN of what changed the page last before that.
    pub since: Lsn,
    /// Sorted and disjoint.
    pub runs: Vec<Run>,
}

/// A page with its past.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// Everything that is stored under the page's own key, oldest first.
    pub operands: Vec<Operand>,
    /// Copies, oldest first: all of them, or the newest.
    pub copies: Vec<Copy>,
}

impl History {
    /// Runs whose blocks are counted as live, in no order.
    #[must_use]
    pub fn counted(&self) -> Vec<Run> {
        let mut runs = counted_copies(&self.copies, base(&self.operands));
        runs.extend(pages::counted(&self.operands));
        runs
    }

    /// Every run that is stored, in no order, some of them more than once.
    #[must_use]
    pub fn stored(&self) -> Vec<Run> {
        let mut runs = pages::counted(&self.operands);
        for copy in &self.copies {
            runs.extend(copy.runs.iter().filter(|run| run.is_mapped()));
        }
        runs
    }
}

/// What follows the newest copy.
#[must_use]
pub fn base(operands: &[Operand]) -> &[Run] {
    match operands.first() {
        Some(first) if first.is_image() => &first.runs,
        _ => &[],
    }
}

/// Runs whose blocks copies count as live, where `base` follows the newest.
#[must_use]
pub fn counted_copies(copies: &[Copy], base: &[Run]) -> Vec<Run> {
    let mut runs = Vec::new();
    for (index, copy) in copies.iter().enumerate() {
        let next = copies.get(index + 1).map_or(base, |next| &next.runs);
        runs.extend(pages::difference(&copy.runs, next));
    }
    runs
}

/// Snapshots among `living`, ascending, that show operands of the page which are not its newest state at
/// `lsn`.
#[must_use]
pub fn showing<'a>(page: &Page, living: &'a [Lsn], lsn: Lsn) -> &'a [Lsn] {
    let end = living.partition_point(|snapshot| *snapshot < lsn);
    let start = living.partition_point(|snapshot| *snapshot < page.first_lsn).min(end);
    if page.operand_count == 0 { &[] } else { &living[start..end] }
}

/// As [`showing`], of a page over a base of which nothing is stored: those that see it hidden by a range.
#[must_use]
pub fn showing_hidden<'a>(ranges: &[Lsn], living: &'a [Lsn], lsn: Lsn) -> &'a [Lsn] {
    let Some(first) = ranges.first() else { return &[] };
    let end = living.partition_point(|snapshot| *snapshot < lsn);
    let start = living.partition_point(|snapshot| *snapshot < *first).min(end);
    &living[start..end]
}

/// Whether a page stores anything that was there at an LSN, and be it that it was empty: otherwise it shows
/// what is beneath its layer.
#[must_use]
pub fn is_own_at(operands: &[Operand], ranges: &[Lsn], at: Lsn) -> bool {
    operands.first().is_some_and(|first| first.lsn <= at)
        || ranges.first().is_some_and(|range| *range <= at)
}

/// What the operands show at an LSN; `ranges` are the LSNs of the range records that cover the page,
/// ascending.
#[must_use]
pub fn state_at(operands: &[Operand], ranges: &[Lsn], at: Lsn) -> Vec<Run> {
    let count = operands.partition_point(|operand| operand.lsn <= at);
    let cut = ranges.iter().rev().find(|range| **range <= at).copied().unwrap_or_default();
    let mut runs = pages::fold_runs(&operands[..count], cut);
    runs.retain(Run::is_mapped);
    runs
}

/// The copies without which these snapshots, ascending, would lose what operands show them. Over a base, they
/// say of a page that it was empty, too.
#[must_use]
pub fn copies_needed(
    operands: &[Operand],
    ranges: &[Lsn],
    snapshots: &[Lsn],
    has_base: bool,
) -> Vec<Copy> {
    let since = |snapshot: Lsn| {
        let count = operands.partition_point(|operand| operand.lsn <= snapshot);
        let operand = operands[..count].last().map_or(Lsn::NONE, |last| last.lsn);
        let range = ranges.iter().rev().find(|range| **range <= snapshot);
        operand.max(range.copied().unwrap_or_default())
    };
    let mut copies: Vec<Copy> = Vec::new();
    for (index, snapshot) in snapshots.iter().copied().enumerate() {
        let from = since(snapshot);
        let next = snapshots.get(index + 1).map(|next| since(*next));
        if next == Some(from) {
            continue; // the later one's copy serves both
        }
        let runs = state_at(operands, ranges, snapshot);
        if !runs.is_empty() || (has_base && from != Lsn::NONE) {
            copies.push(Copy { until: snapshot, since: from, runs });
        }
    }
    copies
}

/// Some living snapshot, ascending, shows a copy; `before` is the `until` of the copy before it.
#[must_use]
pub fn is_shown(copy: &Copy, before: Lsn, living: &[Lsn]) -> bool {
    let first = copy.since.max(before.next());
    let start = living.partition_point(|snapshot| *snapshot < first);
    living.get(start).is_some_and(|snapshot| *snapshot <= copy.until)
}

#[cfg(test)]
mod tests;
