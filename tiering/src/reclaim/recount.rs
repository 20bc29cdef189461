//! Examines all pages that may reference a segment, in bounded parts. It finds how many blocks are
//! live when the count is higher because pages share blocks, and determines the correct count.
//!
//! The count says how often blocks are referenced. For a segment with duplicates it may therefore
//! be far above the number of live blocks. Such a segment is nominated once its pages have been
//! examined.
//!
//! Invariants:
//! - Findings of this module only nominate, as counts do; `look` and `referenced` decide whether a
//!   segment is forgotten.
//! - A part is [`REFERENCES_AT_ONCE`] back-references, or the pages of the directory. Rewriting
//!   processes the segment in the same parts, and writes for each part the blocks that are live by
//!   it.
//! - A count is corrected only while nothing is committed, and only if every page opens.

use super::Reclaim;
use super::liveness::{PAGES_AT_ONCE, REFERENCES_AT_ONCE, pages_of};
use super::referenced::NOBODY;
use super::{POSTPONED_TIME, ReclaimReport, State};
use crate::map::LayerId;
use crate::map::records::SegmentRecord;
use crate::segment::DirectoryEntry;
use block::{Error, ErrorKind, Result};
use futures::{StreamExt, TryStreamExt};
use std::collections::{BTreeSet, HashSet};
use std::time::Instant;

/// Segments with examined pages that are remembered. Chosen by hand: 200 KiB.
const RECOUNTED_MAX: usize = 4096;
/// Cost of examining a page, in bytes read, for the pace of reclaim. Chosen by hand: most are
/// smaller.
const PAGE_BYTES: u64 = 3072;
/// Maximum number of pages of one segment that are examined to correct its count. Chosen by hand:
/// 100 MiB of memory.
const NAMERS_MAX: usize = 4 << 20;

/// Result of examining the pages of a segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recounted {
    /// The count of the segment at that time.
    live: u32,
    /// Blocks that rewriting the segment would write.
    places: u32,
    at: Instant,
}

/// A segment whose pages are being examined.
#[derive(Debug)]
pub(super) struct Recount {
    record: SegmentRecord,
    live: u32,
    entries: Vec<DirectoryEntry>,
    cursor: Cursor,
    places: u64,
}

/// Position in the pages to examine.
#[derive(Clone, Copy, Debug)]
enum Cursor {
    /// The pages named in the directory.
    Own,
    /// The pages with back-references, after this one.
    After(Option<(LayerId, u32)>),
    Done,
}

impl State {
    /// Returns the number of live blocks of a segment as far as it is known, given its count.
    pub(super) fn live_places(&self, number: u64, live: u32) -> u32 {
        match self.recounted.get(&number) {
            Some(known) if live <= known.live => known.places.min(live),
            _ => live,
        }
    }

    /// Returns whether the pages should be examined again.
    pub(super) fn is_recount_due(&self, number: u64, live: u32, now: Instant) -> bool {
        self.recounted.get(&number).is_none_or(|known| {
            let is_old = now.saturating_duration_since(known.at) >= POSTPONED_TIME;
            known.live != live && (cfg!(test) || is_old)
        })
    }

    fn note_recounted(&mut self, number: u64, known: Recounted) {
        if self.recounted.len() >= RECOUNTED_MAX && !self.recounted.contains_key(&number) {
            let oldest = self.recounted.iter().min_by_key(|(_, known)| known.at);
            if let Some(oldest) = oldest.map(|(number, _)| *number) {
                self.recounted.remove(&oldest);
            }
        }
        self.recounted.insert(number, known);
    }
}

impl Reclaim {
    /// Examines the next part of a segment that has more references than blocks, if there is one.
    pub(super) async fn recount_step(&self) -> Result<ReclaimReport> {
        let begun = self.state.lock().recount.take();
        let mut recount = match begun {
            Some(recount) => recount,
            None => match self.begin_recount().await? {
                Some(recount) => recount,
                None => return Ok(ReclaimReport { is_idle: true, ..ReclaimReport::default() }),
            },
        };
        let number = recount.record.info.number.0;
        let found = self.recount_part(&mut recount).await;
        let mut state = self.state.lock();
        let page_count = match found {
            Ok(page_count) => page_count,
            // Rewriting it would fail in the same way. It is not examined again before its count
            // changes.
            Err(error) if error.kind() != ErrorKind::Unavailable => {
                tracing::debug!(
                    segment = number,
                    error = %error.chain(),
                    "could not count the live blocks of a segment that many pages name"
                );
                let (live, at) = (recount.live, self.pool.clock.now());
                state.note_recounted(number, Recounted { live, places: live, at });
                return Ok(ReclaimReport::default());
            }
            Err(error) => {
                // The next pass starts it again from the beginning.
                state.is_pass_wanted = true;
                return Err(error);
            }
        };
        let report = ReclaimReport {
            read_bytes: page_count as u64 * PAGE_BYTES,
            ..ReclaimReport::default()
        };
        if !matches!(recount.cursor, Cursor::Done) {
            state.recount = Some(recount);
            return Ok(report);
        }
        let places = u32::try_from(recount.places).unwrap_or(u32::MAX);
        let (live, at) = (recount.live, self.pool.clock.now());
        state.note_recounted(number, Recounted { live, places, at });
        if places < live {
            // It may be worth rewriting.
            state.is_pass_wanted = true;
        }
        Ok(report)
    }

    async fn begin_recount(&self) -> Result<Option<Recount>> {
        loop {
            let next = self.state.lock().crowded.pop();
            let Some(record) = next else { return Ok(None) };
            let number = record.info.number.0;
            let live = self.metadata.map.live_blocks(number).await?;
            let has_references = !self.metadata.map.back_references(number, 1).await?.0.is_empty();
            let found = self.metadata.map.find_segment(number).await?;
            if found.is_none_or(|found| !found.is_of(&record.info)) {
                continue; // forgotten meanwhile
            }
            let entries = match has_references {
                true => self.segments.frames.read_directory(&record.stored()).await,
                false => Ok(Vec::new()),
            };
            match entries {
                Ok(entries) if has_references => {
                    let (cursor, places) = (Cursor::Own, 0);
                    return Ok(Some(Recount { record, live, entries, cursor, places }));
                }
                Err(error) if error.kind() == ErrorKind::Unavailable => return Err(error),
                // Each block is referenced once, or the number is unknown.
                _ => {
                    let known = Recounted { live, places: live, at: self.pool.clock.now() };
                    self.state.lock().note_recounted(number, known);
                }
            }
        }
    }

    /// Examines one part, and returns the number of pages examined.
    async fn recount_part(&self, recount: &mut Recount) -> Result<usize> {
        let number = recount.record.info.number.0;
        let (namers, next) = self.namers(&recount.record, &recount.entries, recount.cursor).await?;
        let page_count = namers.len();
        let mut places: HashSet<(u32, u8)> = HashSet::new();
        let mut seen = futures::stream::iter(namers)
            .map(|(layer, page)| self.metadata.map.page_for_reclaim(layer, page))
            .buffer_unordered(PAGES_AT_ONCE);
        while let Some(page) = seen.try_next().await? {
            for run in page.states.iter().flatten().filter(|run| run.segment == number) {
                places.extend(run.blocks().map(|(_, within)| (run.frame_index, within)));
            }
        }
        recount.places += places.len() as u64;
        recount.cursor = next;
        Ok(page_count)
    }

    /// Returns some of the pages that may reference a segment, and the position at which to
    /// continue.
    async fn namers(
        &self,
        record: &SegmentRecord,
        entries: &[DirectoryEntry],
        cursor: Cursor,
    ) -> Result<(Vec<(LayerId, u32)>, Cursor)> {
        let layers = self.metadata.map.layers();
        let mut namers: BTreeSet<(LayerId, u32)> = BTreeSet::new();
        let mut add = |layer: LayerId, page: u32| {
            let holders = self.holders(&layers, &BTreeSet::from([layer.0]));
            namers.extend(holders.into_iter().map(|holder| (holder, page)));
        };
        let next = match cursor {
            Cursor::Own => {
                let own = entries.iter().filter(|entry| entry.layer != NOBODY.0).copied();
                for (page, entries) in pages_of(record, own)? {
                    let of: BTreeSet<u64> = entries.iter().map(|entry| entry.layer).collect();
                    of.into_iter().for_each(|layer| add(LayerId(layer), page));
                }
                Cursor::After(None)
            }
            Cursor::After(last) => {
                let number = record.info.number.0;
                let found = self
                    .metadata
                    .map
                    .back_references_after(number, last, REFERENCES_AT_ONCE)
                    .await?;
                found.iter().for_each(|(layer, page)| add(*layer, *page));
                match found.last() {
                    Some(last) if found.len() == REFERENCES_AT_ONCE => Cursor::After(Some(*last)),
                    _ => Cursor::Done,
                }
            }
            Cursor::Done => Cursor::Done,
        };
        Ok((namers.into_iter().collect(), next))
    }

    /// Determines the correct count of a segment's live blocks. The caller must hold the writer, so
    /// that nothing changes.
    ///
    /// # Errors
    /// `Corrupt` when a page or the directory does not open; `Full` when too many pages reference
    /// it.
    pub(crate) async fn exact_count(&self, record: &SegmentRecord) -> Result<u64> {
        let entries = self.segments.frames.read_directory(&record.stored()).await?;
        let number = record.info.number.0;
        let mut known: HashSet<(LayerId, u32)> = HashSet::new();
        let (mut cursor, mut count) = (Cursor::Own, 0);
        while !matches!(cursor, Cursor::Done) {
            let (mut namers, next) = self.namers(record, &entries, cursor).await?;
            cursor = next;
            namers.retain(|namer| known.insert(*namer));
            if known.len() > NAMERS_MAX {
                let what =
                    format!("count the live blocks of segment {number}: too many pages name it");
                return Err(Error::new(ErrorKind::Full, what));
            }
            let mut counts = futures::stream::iter(namers)
                .map(|(layer, page)| self.metadata.map.counted_of(layer, page, number))
                .buffer_unordered(PAGES_AT_ONCE);
            while let Some(blocks) = counts.try_next().await? {
                count += blocks;
            }
        }
        Ok(count)
    }

    /// Implements [`crate::Tier::repair_counts`].
    pub(crate) async fn repair_counts(&self, numbers: &[u64]) -> Result<Vec<(u64, u32, u32)>> {
        let mut repaired = Vec::new();
        for number in numbers {
            // The lock prevents commits during one segment, and is released between two so that
            // destage has its turn.
            let mut writer = self.metadata.writer.lock().await;
            self.metadata.map.check(&writer)?;
            let Some(record) = self.metadata.map.find_segment(*number).await? else { continue };
            let live = self.metadata.map.live_blocks(*number).await?;
            let count = u32::try_from(self.exact_count(&record).await?).unwrap_or(u32::MAX);
            if count == live {
                continue;
            }
            self.metadata.map.set_live(&mut writer, &[(*number, count)]).await?;
            drop(writer);
            self.note_well(*number);
            self.state.lock().is_pass_wanted = true;
            tracing::warn!(
                segment = number,
                was = live,
                is = count,
                "the count of a segment's live blocks was wrong; `spindle fsck` corrected it"
            );
            repaired.push((*number, live, count));
        }
        Ok(repaired)
    }
}
