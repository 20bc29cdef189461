//! The stored contents of a page, including those that only snapshots show. This code is pure:
//! lists in, lists out.
//!
//! Operands are added to a page as if there were no snapshots, and an operand keeps its LSN. A
//! snapshot at LSN `s` shows the result of the operands up to `s` as long as they are there. Before
//! they are replaced by an image, the states that snapshots still need are put into *copies*. A
//! copy shows the page as it was from one LSN (`since`) to another (`until`), both included.
//!
//! Invariants:
//! - A snapshot at `s` shows the first copy whose `until` is not below `s`. If the copy's `since`
//!   is above `s`, the page was empty. Without such a copy, the snapshot shows the operands up to
//!   `s`.
//! - A block is counted as live once for each place that it has in the states of a page, by the
//!   newest state that has it there. The first image of the operands follows the newest copy, and
//!   operands that [keep](pages::OperandKind::Delta) count the blocks that they replace until an
//!   image takes their place. The counts thus follow from the stored contents alone.

use super::pages::{self, Operand, Page, Run};
use block::Lsn;

/// A page as it was for some time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copy {
    /// LSN of the newest snapshot that shows it.
    pub until: Lsn,
    /// LSN of the change that produced this state.
    pub since: Lsn,
    /// Sorted and disjoint.
    pub runs: Vec<Run>,
}

/// A page with its past.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// All operands under the page's dedicated key, oldest first.
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

    /// Every stored run, in no order, some of them more than once.
    #[must_use]
    pub fn stored(&self) -> Vec<Run> {
        let mut runs = pages::counted(&self.operands);
        for copy in &self.copies {
            runs.extend(copy.runs.iter().filter(|run| run.is_mapped()));
        }
        runs
    }
}

/// The state that follows the newest copy.
#[must_use]
pub fn base(operands: &[Operand]) -> &[Run] {
    match operands.first() {
        Some(first) if first.is_image() => &first.runs,
        _ => &[],
    }
}

/// Runs whose blocks copies count as live, if `base` follows the newest copy.
#[must_use]
pub fn counted_copies(copies: &[Copy], base: &[Run]) -> Vec<Run> {
    let mut runs = Vec::new();
    for (index, copy) in copies.iter().enumerate() {
        let next = copies.get(index + 1).map_or(base, |next| &next.runs);
        runs.extend(pages::difference(&copy.runs, next));
    }
    runs
}

/// Snapshots among `living` (ascending) that show operands of the page other than its newest state
/// at `lsn`.
#[must_use]
pub fn showing<'a>(page: &Page, living: &'a [Lsn], lsn: Lsn) -> &'a [Lsn] {
    let end = living.partition_point(|snapshot| *snapshot < lsn);
    let start = living.partition_point(|snapshot| *snapshot < page.first_lsn).min(end);
    if page.operand_count == 0 { &[] } else { &living[start..end] }
}

/// Like [`showing`], for a page over a base of which nothing is stored: the snapshots that see it
/// hidden by a range.
#[must_use]
pub fn showing_hidden<'a>(ranges: &[Lsn], living: &'a [Lsn], lsn: Lsn) -> &'a [Lsn] {
    let Some(first) = ranges.first() else { return &[] };
    let end = living.partition_point(|snapshot| *snapshot < lsn);
    let start = living.partition_point(|snapshot| *snapshot < *first).min(end);
    &living[start..end]
}

/// Whether a page had a state of its own at an LSN, even an empty one. Otherwise it shows the base
/// of its layer.
#[must_use]
pub fn is_own_at(operands: &[Operand], ranges: &[Lsn], at: Lsn) -> bool {
    operands.first().is_some_and(|first| first.lsn <= at)
        || ranges.first().is_some_and(|range| *range <= at)
}

/// The state that the operands show at an LSN. `ranges` are the LSNs of the range records that
/// cover the page, ascending.
#[must_use]
pub fn state_at(operands: &[Operand], ranges: &[Lsn], at: Lsn) -> Vec<Run> {
    let count = operands.partition_point(|operand| operand.lsn <= at);
    let cut = ranges.iter().rev().find(|range| **range <= at).copied().unwrap_or_default();
    let mut runs = pages::fold_runs(&operands[..count], cut);
    runs.retain(Run::is_mapped);
    runs
}

/// The copies needed to preserve the states that operands show to these snapshots (ascending). Over
/// a base, a copy may also say that the page was empty.
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

/// Whether a living snapshot (ascending) shows a copy. `before` is the `until` of the previous
/// copy.
#[must_use]
pub fn is_shown(copy: &Copy, before: Lsn, living: &[Lsn]) -> bool {
    let first = copy.since.max(before.next());
    let start = living.partition_point(|snapshot| *snapshot < first);
    living.get(start).is_some_and(|snapshot| *snapshot <= copy.until)
}

#[cfg(test)]
mod tests;
