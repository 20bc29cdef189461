//! Space held by a single snapshot: the blocks that would be freed if it alone were removed. This
//! is information for people; nothing depends on it.
//!
//! A block that has the same place in two states of a page has it in all states between them, so
//! each state is compared only with the one before and the one after. With deduplication all states
//! are compared. Other volumes are not examined.

use super::history::{self, Copy, History};
use super::keys::{self, copy_key, copy_of, kept_key};
use super::layers::LayerId;
use super::pages::{self, Operand, Run};
use super::{Map, entries};
use block::{ErrorKind, Lsn, Result};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;

/// Keys read at a time.
const KEYS_AT_ONCE: usize = 1024;

/// One state of a page, and the snapshots that show it.
struct Shown {
    snapshots: Vec<Lsn>,
    runs: Vec<Run>,
}

impl Map {
    /// Bytes in the store that each snapshot of a layer holds alone, estimated from the average
    /// block of each segment. Walks the pages that have changed since the oldest snapshot. Blocks
    /// that are hidden by a range which is not folded yet are not found.
    ///
    /// # Errors
    /// Like [`Map::page`].
    pub async fn held_bytes(&self, layer: LayerId) -> Result<BTreeMap<Lsn, u64>> {
        let living = self.snapshots().of(layer).to_vec();
        let blocks = self.held_blocks(layer, &living).await?;
        let mut held: BTreeMap<Lsn, u64> = living.into_iter().map(|lsn| (lsn, 0)).collect();
        for ((snapshot, segment), count) in blocks {
            let record = match self.segment(segment).await {
                Ok(record) => record,
                // It was reclaimed after the page was read.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            let bytes = u64::from(record.info.object_bytes) * count;
            *held.entry(snapshot).or_default() += bytes / u64::from(record.block_count.max(1));
        }
        Ok(held)
    }

    /// Blocks that each snapshot holds alone, by segment.
    pub(crate) async fn held_blocks(
        &self,
        layer: LayerId,
        living: &[Lsn],
    ) -> Result<HashMap<(Lsn, u64), u64>> {
        let mut blocks: HashMap<(Lsn, u64), u64> = HashMap::new();
        let mut next = Some(0);
        while let Some(first) = next {
            let (numbers, after) = self.changed_pages(layer, first).await?;
            for number in numbers {
                let (before, history) = self.history(layer, number, true).await?;
                let cuts = self.ranges().cuts(layer, number);
                let mut all = shown(&history, &cuts, living);
                // The newest state is shown, too.
                all.push(Shown { snapshots: Vec::new(), runs: before.page.runs.to_vec() });
                let base = before.base_runs().unwrap_or_default();
                for (index, one) in all.iter().enumerate() {
                    let [snapshot] = one.snapshots[..] else { continue };
                    let mut only = pages::difference(&one.runs, base);
                    let is_compared = |other: usize| {
                        other != index && (self.has_dedup() || other.abs_diff(index) == 1)
                    };
                    let mut others: Vec<usize> =
                        (0..all.len()).filter(|other| is_compared(*other)).collect();
                    // Start with the nearest states, which have the most in common.
                    others.sort_by_key(|other| other.abs_diff(index));
                    for other in others {
                        if only.is_empty() {
                            break;
                        }
                        only = pages::difference(&only, &all[other].runs);
                    }
                    for run in only {
                        *blocks.entry((snapshot, run.segment)).or_default() +=
                            u64::from(run.count());
                    }
                }
            }
            next = after;
        }
        Ok(blocks)
    }

    /// Some pages from `first` on whose snapshots may show more than the newest state, and the page
    /// to continue with.
    async fn changed_pages(
        &self,
        layer: LayerId,
        first: u32,
    ) -> Result<(BTreeSet<u32>, Option<u32>)> {
        let db = self.db();
        let mut numbers = BTreeSet::new();
        let mut until = u32::MAX;
        let families = [
            (
                copy_key(layer, first, Lsn::NONE).to_vec(),
                copy_key(layer, u32::MAX, Lsn(u64::MAX)).to_vec(),
            ),
            (kept_key(layer, first).to_vec(), kept_key(layer, u32::MAX).to_vec()),
        ];
        for (from, end) in families {
            let found =
                entries(&db, Bound::Included(from), Bound::Included(end), KEYS_AT_ONCE).await?;
            let page = |key: &[u8]| {
                copy_of(key).map(|(_, page, _)| page).or_else(|| Some(keys::page_of(key)?.1))
            };
            if let Some((last, _)) = found.last().filter(|_| found.len() == KEYS_AT_ONCE) {
                until = until.min(page(last).unwrap_or(u32::MAX));
            }
            numbers.extend(found.iter().filter_map(|(key, _)| page(key)));
        }
        numbers.retain(|number| *number <= until);
        Ok((numbers, until.checked_add(1).filter(|_| until < u32::MAX)))
    }
}

/// The states of a page that snapshots (ascending) show, oldest first. Snapshots for which the page
/// has no state of its own are excluded.
fn shown(history: &History, ranges: &[Lsn], living: &[Lsn]) -> Vec<Shown> {
    let mut all: Vec<Shown> = Vec::new();
    let mut last: Option<State> = None;
    for snapshot in living.iter().copied() {
        let state = state_of(history, ranges, snapshot);
        match all.last_mut().filter(|_| last == state && state.is_some()) {
            Some(same) => same.snapshots.push(snapshot),
            None if state.is_some() => {
                let runs = match state {
                    Some(State::Copy(index)) => history.copies[index].runs.clone(),
                    _ => history::state_at(&history.operands, ranges, snapshot),
                };
                all.push(Shown { snapshots: vec![snapshot], runs });
            }
            None => {}
        }
        last = state;
    }
    all
}

/// Identifies the state that a snapshot shows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// The state of a copy.
    Copy(usize),
    /// The state of the operands up to this LSN.
    Operands(Lsn),
}

fn state_of(history: &History, ranges: &[Lsn], snapshot: Lsn) -> Option<State> {
    let is_first = |copy: &Copy| copy.until >= snapshot;
    if let Some(index) = history.copies.iter().position(is_first) {
        return Some(State::Copy(index)).filter(|_| history.copies[index].since <= snapshot);
    }
    let operands: &[Operand] = &history.operands;
    let newest = operands.partition_point(|operand| operand.lsn <= snapshot);
    let operand = operands[..newest].last().map(|operand| operand.lsn);
    let range = ranges.iter().rev().find(|range| **range <= snapshot).copied();
    operand.max(range).map(State::Operands)
}
