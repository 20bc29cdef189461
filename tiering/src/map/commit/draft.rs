//! A batch that is being built, and its changes to the live blocks of segments.

use super::FETCHES_MAX;
use super::changes::PageChange;
use crate::map::Map;
use crate::map::keys::{self, ROOT_KEY, Sealer};
use crate::map::pages::{self, Run};
use crate::map::records::{Root, encode_live};
use crate::seeded_bugs::SeededBugs;
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use slatedb::WriteBatch;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// A batch that is being built.
pub(in crate::map) struct Draft<'a> {
    sealer: Sealer<'a>,
    pub batch: WriteBatch,
    pub bytes: u64,
    /// Change of each segment's live blocks.
    pub live: HashMap<u64, i64>,
    /// The sum of these changes, once they have been counted.
    pub live_delta: i64,
    pub seeded_bugs: SeededBugs,
}

impl<'a> Draft<'a> {
    pub fn new(map: &'a Map) -> Draft<'a> {
        Draft {
            sealer: map.opener.sealer(),
            batch: WriteBatch::new(),
            bytes: 0,
            live: HashMap::new(),
            live_delta: 0,
            seeded_bugs: map.seeded_bugs,
        }
    }

    pub fn put(&mut self, key: &[u8], plain: &[u8]) {
        let value = self.sealer.seal(key, plain);
        self.bytes += (key.len() + value.len()) as u64;
        self.batch.put_bytes(Bytes::copy_from_slice(key), value.into());
    }

    /// Puts the root record together with its header.
    pub fn put_root_under(&mut self, header: &keys::Header, root: &Root) {
        let value = self.sealer.seal_root(header, &root.encode());
        self.bytes += (ROOT_KEY.len() + value.len()) as u64;
        self.batch.put(keys::HEADER_KEY, header.bytes());
        self.batch.put_bytes(Bytes::from_static(ROOT_KEY), value.into());
    }

    pub(super) fn append(&mut self, key: &[u8], plain: &[u8]) {
        let value = self.sealer.seal(key, plain);
        self.bytes += (key.len() + value.len()) as u64;
        self.batch.merge(key, value);
    }

    pub fn delete(&mut self, key: &[u8]) {
        self.bytes += key.len() as u64;
        self.batch.delete(key);
    }

    /// Counts in the blocks that a page names in frames written earlier, except those that its base
    /// counts. Other blocks are counted in with the record of their segment.
    pub(super) fn gain_duplicates(&mut self, change: &PageChange, base: Option<&[Run]>) {
        let counted = pages::difference(&change.duplicates, base.unwrap_or_default());
        for run in counted {
            *self.live.entry(run.segment).or_default() += i64::from(run.count());
        }
    }

    fn lose(&mut self, segment: u64, blocks: u32) {
        let blocks = i64::from(blocks);
        *self.live.entry(segment).or_default() -=
            if self.seeded_bugs.count_out_twice { 2 * blocks } else { blocks };
    }

    /// Counts out a replaced run, except the blocks that the base counts.
    pub(super) fn lose_over(&mut self, base: Option<&[Run]>, run: Run) {
        match base.filter(|_| !self.seeded_bugs.base_uncounted) {
            None => self.lose(run.segment, run.count()),
            Some(base) => {
                for part in pages::difference(&[run], base) {
                    self.lose(part.segment, part.count());
                }
            }
        }
    }

    /// Counts out everything that a page stored, and counts in the runs that stay.
    pub fn recount(&mut self, stored: &[Run], stays: impl Iterator<Item = Run>) {
        for run in stored.iter().filter(|run| run.is_mapped()) {
            self.lose(run.segment, run.count());
        }
        for run in stays.filter(Run::is_mapped) {
            *self.live.entry(run.segment).or_default() += i64::from(run.count());
        }
    }

    /// Like [`Draft::recount`], but leaves out the blocks that the base counts.
    pub fn recount_over(&mut self, base: Option<&[Run]>, stored: &[Run], stays: &[Run]) {
        match base {
            None => self.recount(stored, stays.iter().copied()),
            Some(base) => self.recount(
                &pages::difference(stored, base),
                pages::difference(stays, base).into_iter(),
            ),
        }
    }
}

impl Map {
    /// Puts the changed live-block counts, and returns them for the cache.
    pub(in crate::map) async fn draft_live(
        &self,
        draft: &mut Draft<'_>,
    ) -> Result<Vec<(u64, u32)>> {
        let counts = self.count_live(draft).await?;
        for (number, blocks) in &counts {
            draft.put(&keys::live_key(*number), &encode_live(*blocks));
        }
        Ok(counts)
    }

    /// Computes the changed live-block counts.
    pub(in crate::map) async fn count_live(
        &self,
        draft: &mut Draft<'_>,
    ) -> Result<Vec<(u64, u32)>> {
        let deltas = std::mem::take(&mut draft.live);
        draft.live_delta = deltas.values().sum();
        let below_zero = AtomicU64::new(0);
        let below_zero = &below_zero;
        let mut counts: Vec<(u64, u32)> = futures::stream::iter(deltas)
            .filter(|(_, delta)| std::future::ready(*delta != 0))
            .map(|(number, delta)| async move {
                let before = match self.live_blocks(number).await {
                    // The count is an estimate that nothing depends on, so it must not stop a
                    // window; fsck reports it.
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        tracing::error!(segment = number, error = %error.chain(),
                            "the count of a segment's live blocks is damaged and stays as it is");
                        return Ok(None);
                    }
                    before => before?,
                };
                if before == u32::MAX {
                    return Ok(None); // the earlier count is unknown
                }
                let blocks = i64::from(before) + delta;
                if blocks < 0 {
                    below_zero.fetch_add(1, Ordering::Relaxed);
                    tracing::debug!(segment = number, blocks, "live blocks fall below zero");
                }
                Ok::<_, Error>(Some((number, u32::try_from(blocks.max(0)).unwrap_or(u32::MAX))))
            })
            .buffer_unordered(FETCHES_MAX)
            .try_filter_map(async |count| Ok(count))
            .try_collect()
            .await?;
        let below_zero = below_zero.load(Ordering::Relaxed);
        if below_zero > 0 {
            tracing::warn!(count = below_zero, "live blocks of segments fall below zero");
        }
        counts.sort_unstable();
        Ok(counts)
    }
}
