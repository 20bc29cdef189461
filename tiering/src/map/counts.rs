//! Live counts, one page at a time: computes the correct counts and replaces wrong ones.
//!
//! Invariants:
//! - A page counts for a segment the blocks that it and its copies store there, except those that
//!   the base of its layer counts. Commits change the counts by the same rule.

use super::commit::Fresh;
use super::commit::draft::Draft;
use super::history;
use super::pages::{self, Run};
use super::records::{Root, encode_live};
use super::{Forget, LayerId, Map, Writer, keys};
use block::Result;
use std::sync::atomic::Ordering;

impl Map {
    /// Blocks of a segment that the page of a layer counts as live.
    ///
    /// # Errors
    /// `Corrupt` if the page or its base does not open; database errors.
    pub(crate) async fn counted_of(&self, layer: LayerId, page: u32, segment: u64) -> Result<u64> {
        let operands = self.stored_operands(layer, page).await?;
        if operands.is_empty() {
            return Ok(0); // a page without operands has no copies either
        }
        let copies = self.copies(&self.db(), layer, page).await?;
        let mut runs = pages::counted(&operands);
        runs.extend(history::counted_copies(&copies, history::base(&operands)));
        if !runs.iter().any(|run| run.segment == segment) {
            return Ok(0);
        }
        let base = self.base_page(layer, page).await?;
        let of = |runs: Vec<Run>| -> u64 {
            let its = runs.iter().filter(|run| run.is_mapped() && run.segment == segment);
            its.map(|run| u64::from(run.count())).sum()
        };
        Ok(match base {
            Some(base) => of(pages::difference(&runs, &base.runs)),
            None => of(runs),
        })
    }

    /// Sets live counts durably.
    ///
    /// # Errors
    /// Like [`Map::commit`].
    pub(crate) async fn set_live(&self, writer: &mut Writer, counts: &[(u64, u32)]) -> Result<()> {
        self.check(writer)?;
        let mut draft = Draft::new(self);
        for (number, blocks) in counts {
            draft.put(&keys::live_key(*number), &encode_live(*blocks));
        }
        let root = Root { commit_number: writer.root.commit_number + 1, ..writer.root };
        draft.put(keys::ROOT_KEY, &root.encode());
        self.write(writer, draft.batch).await?;
        self.flush(writer).await?;
        writer.root = root;
        let fresh = Fresh { bytes_left: 0, pages: Vec::new() };
        self.apply(fresh, &[], counts.to_vec(), Forget::Nothing);
        self.commit_number.store(root.commit_number, Ordering::Release);
        Ok(())
    }
}
