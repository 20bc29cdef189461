//! Reclaim: space of what was overwritten or trimmed comes back. Live blocks of segments that are mostly
//! dead are written to new segments, pages re-pointed, the old segments forgotten and deleted.
//!
//! Invariants:
//! - Counts of live blocks nominate, the segment's own directory and every page that it was written for
//!   decide: a segment is forgotten only when none of them names it.
//! - Order: new segments durable, then one metadata batch that re-points and forgets, durable, then the
//!   old objects are deleted. A crash in between leaves orphan segments, never dangling pointers.
//! - What a write has changed meanwhile stays: see [`crate::map::repoint`].
//! - What a snapshot shows is live, and what any layer shows that was made from the one that a block was written
//!   for. References go down from a layer to those made from it, and so do the looks. A segment has a block of a layer once at most, and so have all segments
//!   that one step rewrites: a block that was overwritten between two snapshots is in two of them.
//! - Memory is bounded: one segment that is built, one that is gathered, and the frames of a few requests.
//! - Dropping the future stops it between two steps; a commit that has begun ends by itself.

mod referenced;
mod victims;

use crate::dedup::Victims;
use crate::destage::pack::{Packer, Piece};
use crate::destage::write::{SegmentWriter, Written};
use crate::fail_point;
use crate::fetch::Access;
use crate::map::database::Database;
use crate::map::dedup::BackReferences;
use crate::map::pages::{PAGE_BLOCKS, Run};
use crate::map::records::SegmentRecord;
use crate::map::repoint::{Place, SeenPage};
use crate::map::space::{self, Space};
use crate::map::{LayerId, LayerList, Moved, Placed, Repoint, RepointReport};
use crate::segment::{BLOCK_COUNT_MAX, DirectoryEntry, FrameAt, FrameRef};
use crate::tier::Inner;
use block::units::BLOCK_BYTES;
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use parking_lot::Mutex;
use referenced::Foreign;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use victims::{Pass, STUCK_MAX, Victim, worth};

/// Segments that one step of a pass looks at. Chosen by hand: some milliseconds.
const PASS_STEP: usize = 2048;
/// Dead segments that are forgotten with one commit. Chosen by hand.
const DEAD_AT_ONCE: usize = 32;
/// Segments that are rewritten with one commit, at most. Chosen by hand.
const VICTIMS_AT_ONCE: usize = 16;
/// Live bytes that are rewritten with one commit, about; one segment at least. Chosen by hand.
const LIVE_BYTES_AT_ONCE: u64 = 32 << 20;
/// States of pages, those that snapshots show too, that one step re-points, about. Chosen by hand: 3 KiB each at
/// most, and mostly far less.
const STATES_AT_ONCE: usize = 16_384;
/// Back-references of a segment that one step looks at. Chosen by hand: some MiB, and as many pages.
const REFERENCES_AT_ONCE: usize = if cfg!(test) { 64 } else { 16_384 };
/// For so long a segment is passed over that took too long to look into. Chosen by hand.
const POSTPONED_TIME: Duration = Duration::from_secs(600);
/// Size of the new segments before compression, at most. Chosen by hand: two of them are in memory.
pub const SEGMENT_BYTES_MAX: usize = 8 << 20;
/// Memory that reclaim takes at most, beside twice a segment's, up to [`SEGMENT_BYTES_MAX`] each.
pub const READ_BYTES_MAX: u64 =
    (FRAMES_AT_ONCE * READS_AT_ONCE * BLOCK_COUNT_MAX as usize * BLOCK) as u64;
/// Pages looked up at the same time.
const PAGES_AT_ONCE: usize = 32;
/// Frames read in one go, and how many such reads run at the same time. Chosen by hand: 8 MiB at most.
const FRAMES_AT_ONCE: usize = 64;
const READS_AT_ONCE: usize = 2;
/// Pause between two passes, at least, and this many times as long as the last one took. Chosen by hand.
const PASS_PAUSE: Duration = Duration::from_secs(1);
const PASS_PAUSE_PARTS: u32 = 10;
/// After this time a pass is made for less than a segment of lost blocks. Chosen by hand.
const PASS_PAUSE_MAX: Duration = Duration::from_secs(30);
/// While destage is urgent, rewriting waits unless more than so many percent of the live bytes are stored.
/// Chosen by hand: the log goes first, but not for ever.
const URGENT_PERCENT: u64 = 200;
/// A step's rewriting is given up after so long, and dead segments alone are dropped for a while: a store that
/// is full takes nothing, and gets room by that. Chosen by hand.
const REWRITE_TIME_MAX: Duration = Duration::from_secs(120);
/// No further segment is begun after so long. Chosen by hand: half of that.
const VICTIMS_TIME_MAX: Duration = Duration::from_secs(60);
const REWRITE_PAUSE: Duration = Duration::from_secs(60);
/// Deletions that may wait before more segments are forgotten. Chosen by hand: the store refuses, or is
/// away.
const DELETIONS_MAX: usize = 1024;

const BLOCK: usize = BLOCK_BYTES as usize;

/// What reclaim is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReclaimOptions {
    /// Segments are rewritten while more than this part of the live bytes is stored, in percent, above
    /// 100. Dead ones are dropped at any rate.
    pub target_percent: u64,
}

impl Default for ReclaimOptions {
    fn default() -> Self {
        // Source: with uniformly random overwrites, space s costs a write amplification of 1/(1-u)
        // where 1/s = (u-1)/ln u; 1.30 gives u = 0.58 and 2.4.
        ReclaimOptions { target_percent: 130 }
    }
}

/// What one step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReclaimReport {
    /// There is nothing to do for now.
    pub is_idle: bool,
    /// Bytes of frames that were read, from whichever tier.
    pub read_bytes: u64,
    /// Bytes of new segments.
    pub written_bytes: u64,
    /// Blocks that are re-pointed.
    pub moved_block_count: u64,
    /// Segments forgotten.
    pub forgotten_count: u64,
    /// Bytes of their objects.
    pub forgotten_bytes: u64,
}

/// Counts since the start, and gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReclaimStatus {
    /// What the segments hold; `None` until all of them were looked at once.
    pub space: Option<Space>,
    /// Segments forgotten.
    pub forgotten_count: u64,
    /// Bytes of their objects.
    pub forgotten_bytes: u64,
    /// Blocks written anew.
    pub moved_block_count: u64,
    /// Bytes of the segments that they were written to.
    pub written_bytes: u64,
    /// Segments that could not be read, and are left alone.
    pub stuck_count: u64,
    /// Segments that are forgotten and not deleted yet, because copies still need them.
    pub held_count: u64,
}

#[derive(Debug, Default)]
struct Counters {
    forgotten_count: AtomicU64,
    forgotten_bytes: AtomicU64,
    moved_block_count: AtomicU64,
    written_bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    pass: Option<Pass>,
    pass_begun: Option<Instant>,
    pass_ended: Option<Instant>,
    pass_took: Duration,
    /// Segments were nominated, or would have been, that nobody has reclaimed.
    is_pass_wanted: bool,
    /// Nothing is rewritten before.
    rewrite_not_before: Option<Instant>,
    /// The best one last.
    victims: Vec<Victim>,
    stuck: HashSet<u64>,
    /// The segment that is being looked into.
    looking: Option<u64>,
    /// Segments that took too long to look into, and when.
    postponed: HashMap<u64, Instant>,
}

/// Reclaim of a tier.
#[derive(Debug, Default)]
pub(crate) struct Reclaim {
    turn: tokio::sync::Mutex<()>,
    state: Mutex<State>,
    counters: Counters,
}

impl Reclaim {
    fn next_victim(&self) -> Option<Victim> {
        let mut state = self.state.lock();
        loop {
            let victim = state.victims.pop()?;
            let number = victim.record.info.number.0;
            let is_postponed =
                state.postponed.get(&number).is_some_and(|at| at.elapsed() < POSTPONED_TIME);
            if !is_postponed && !state.stuck.contains(&number) {
                return Some(victim);
            }
        }
    }

    /// Nothing is wrong with this segment any more: the next pass may take it.
    pub(crate) fn note_well(&self, number: u64) {
        self.state.lock().stuck.remove(&number);
    }

    /// As after a while: a pass is due at once.
    #[cfg(test)]
    pub(crate) fn look_again(&self) {
        let mut state = self.state.lock();
        state.pass.get_or_insert_default();
        state.pass_begun.get_or_insert_with(Instant::now);
    }
}

/// Live blocks of a segment, in one page and one frame.
#[derive(Clone, Copy, Debug)]
struct Live {
    layer: LayerId,
    first_block: u64,
    block_count: u64,
    from: Placed,
}

/// Live blocks that were written anew, and the segments that nothing else is in.
struct Rewritten {
    live: Vec<Live>,
    settled: Vec<(LayerId, u32)>,
    emptied: Vec<SegmentRecord>,
    written: Written,
    /// Of frames.
    read_bytes: u64,
    /// What is done by place: see [`referenced`].
    by_place: ByPlace,
}

/// What is done for the segments of a step that have back-references.
#[derive(Debug, Default)]
struct ByPlace {
    /// Their back-references.
    references: HashMap<u64, BackReferences>,
    /// Those of which something is live.
    live: HashSet<u64>,
    naming: Vec<(LayerId, u32)>,
    foreign: Vec<Foreign>,
    /// Back-references that have become needless.
    needless: Vec<(u64, LayerId, u32)>,
}

/// Why a segment could not be rewritten.
enum Stopped {
    /// It cannot be read.
    Reading(Error),
    /// Another one cannot be written.
    Writing(Error),
}

/// What is known of a segment that was looked into.
#[derive(Default)]
struct Look {
    live: Vec<Live>,
    /// Pages that a range hides name it, too.
    has_hidden: bool,
    /// Pages that store places of it which nobody can see.
    settled: Vec<(LayerId, u32)>,
    /// States of pages that name it, or may: what re-pointing has to write.
    state_count: usize,
    /// There are more pages than one step may write: it is the turn of the rest after that.
    is_cut: bool,
    /// Of a segment with back-references: these, the pages that name it, and what they name of others' blocks.
    references: Option<BackReferences>,
    naming: Vec<(LayerId, u32)>,
    foreign: Vec<Foreign>,
    needless: Vec<(LayerId, u32)>,
}

impl Inner {
    /// See [`crate::Tier::reclaim_status`].
    pub(crate) fn reclaim_status(&self) -> ReclaimStatus {
        let counters = &self.reclaim.counters;
        ReclaimStatus {
            space: self.map.space.get(),
            forgotten_count: counters.forgotten_count.load(Ordering::Relaxed),
            forgotten_bytes: counters.forgotten_bytes.load(Ordering::Relaxed),
            moved_block_count: counters.moved_block_count.load(Ordering::Relaxed),
            written_bytes: counters.written_bytes.load(Ordering::Relaxed),
            stuck_count: self.reclaim.state.lock().stuck.len() as u64,
            held_count: self.orphans.held_count() as u64,
        }
    }

    /// See [`crate::Tier::reclaim_step`].
    pub(crate) async fn reclaim_step(
        self: &Arc<Self>,
        options: ReclaimOptions,
    ) -> Result<ReclaimReport> {
        let _turn = self.reclaim.turn.lock().await;
        let next_segment = {
            let writer = self.writer.lock().await;
            self.map.check(&writer)?;
            writer.root().next_segment
        };
        let idle = ReclaimReport { is_idle: true, ..ReclaimReport::default() };
        if self.orphans.abandoned_count() > DELETIONS_MAX {
            return Ok(idle);
        }
        if self.is_pass_due() {
            self.pass_step(next_segment).await?;
            return Ok(ReclaimReport::default());
        }
        let done = match self.next_victims(options, next_segment).await {
            Ok(victims) if victims.is_empty() => return Ok(idle),
            Ok(victims) => self.reclaim_victims(victims).await,
            Err(error) => Err(error),
        };
        if done.is_err() {
            // What was nominated is not any more.
            self.reclaim.state.lock().is_pass_wanted = true;
        }
        done
    }

    fn is_pass_due(&self) -> bool {
        let state = self.reclaim.state.lock();
        if state.pass.is_some() || self.map.space.get().is_none() {
            return true;
        }
        let since = state.pass_ended.map_or(Duration::MAX, |ended| ended.elapsed());
        let lost = self.map.space.lost_block_count();
        let segment_blocks = (self.options.segment_bytes as u64 / BLOCK_BYTES).max(1);
        let is_worth_it = state.is_pass_wanted || lost >= segment_blocks;
        let pause = match state.victims.is_empty() && is_worth_it {
            true => PASS_PAUSE,
            false if lost > 0 => PASS_PAUSE_MAX,
            false => return false,
        };
        since >= pause.max(state.pass_took * PASS_PAUSE_PARTS)
    }

    /// Looks at some more segments.
    async fn pass_step(&self, next_segment: u64) -> Result<()> {
        let last = {
            let mut state = self.reclaim.state.lock();
            if state.pass.is_none() {
                self.map.space.begin_pass();
                state.pass = Some(Pass::default());
                state.pass_begun = Some(Instant::now());
                state.is_pass_wanted = false;
            }
            state.pass.as_ref().map_or(0, |pass| pass.last)
        };
        let (found, next) = self.map.live_after(last, PASS_STEP).await?;
        let mut state = self.reclaim.state.lock();
        let Some(mut pass) = state.pass.take() else { return Ok(()) };
        for (record, live) in &found {
            pass.add(record, *live, next_segment);
        }
        if let Some(next) = next {
            pass.last = next;
            state.pass = Some(pass);
            return Ok(());
        }
        self.map.space.end_pass(pass.space);
        state.victims = pass.end(next_segment);
        state.is_pass_wanted |= pass.has_more;
        state.pass_ended = Some(Instant::now());
        state.pass_took = state.pass_begun.map_or(Duration::ZERO, |begun| begun.elapsed());
        Ok(())
    }

    /// Takes what is to be reclaimed next: some dead segments, or some to be rewritten.
    async fn next_victims(
        &self,
        options: ReclaimOptions,
        next_segment: u64,
    ) -> Result<Vec<Victim>> {
        // Bytes that are stored beyond so many percent of the live ones.
        let excess = |percent: u64| {
            let space = self.map.space.get().unwrap_or_default();
            let allowed = u128::from(space.live_bytes) * u128::from(percent) / 100;
            space.object_bytes.saturating_sub(u64::try_from(allowed).unwrap_or(u64::MAX))
        };
        let is_urgent = self.is_urgent.load(Ordering::Relaxed);
        let is_paused = {
            let state = self.reclaim.state.lock();
            state.rewrite_not_before.is_some_and(|until| Instant::now() < until)
        };
        let may_rewrite = !is_paused
            && excess(options.target_percent) > 0
            && (!is_urgent || excess(URGENT_PERCENT.max(options.target_percent)) > 0);
        let mut chosen = Vec::new();
        let (mut live_bytes, mut freed_bytes) = (0, 0);
        while let Some(victim) = self.reclaim.next_victim() {
            let number = victim.record.info.number.0;
            // What was counted in the pass may have changed.
            let live = self.map.live_blocks(number).await?;
            let victim = Victim { live, ..victim };
            let is_dead = live == 0;
            let has_dead = chosen.first().is_some_and(|first: &Victim| first.live == 0);
            let bytes = u64::from(live) * BLOCK_BYTES;
            let is_full = match has_dead {
                true => chosen.len() >= DEAD_AT_ONCE,
                false => {
                    chosen.len() >= VICTIMS_AT_ONCE
                        || freed_bytes >= excess(options.target_percent)
                        || live_bytes + bytes > LIVE_BYTES_AT_ONCE
                }
            };
            let is_other = !chosen.is_empty() && (is_full || has_dead != is_dead);
            if is_other || (!is_dead && !may_rewrite) {
                self.reclaim.state.lock().victims.push(victim);
                break;
            }
            if worth(&victim.record, live, next_segment).is_some() {
                chosen.push(victim);
                live_bytes += bytes;
                let kept_bytes = space::live_bytes(&victim.record, live);
                freed_bytes += u64::from(victim.record.info.object_bytes) - kept_bytes;
            }
        }
        Ok(chosen)
    }

    async fn reclaim_victims(self: &Arc<Self>, mut victims: Vec<Victim>) -> Result<ReclaimReport> {
        fail_point!("reclaim-start");
        // From here on nothing in them is taken for a duplicate. Those that a destage uses wait for the next pass.
        let numbers = victims.iter().map(|victim| victim.record.info.number.0);
        let taken = self.dedup.take_victims(numbers);
        let count = victims.len();
        victims.retain(|victim| taken.has(victim.record.info.number.0));
        if victims.len() < count {
            self.reclaim.state.lock().is_pass_wanted = true;
        }
        // What is seen of the map is worth nothing once its database was opened anew: a commit that was
        // visible may be undone by that.
        let seen = self.map.db();
        let snapshots = self.map.snapshots();
        let rewritten =
            tokio::time::timeout(REWRITE_TIME_MAX, self.rewrite_victims(&victims)).await;
        let rewritten = rewritten.unwrap_or_else(|_| {
            let mut state = self.reclaim.state.lock();
            state.rewrite_not_before = Some(Instant::now() + REWRITE_PAUSE);
            if let Some(number) = state.looking.take() {
                // Not the same one first of all again.
                state.postponed.retain(|_, at| at.elapsed() < POSTPONED_TIME);
                if state.postponed.len() < STUCK_MAX {
                    state.postponed.insert(number, Instant::now());
                }
            }
            let what = format!("rewrite segments: not done in {REWRITE_TIME_MAX:?}");
            Err(Error::new(ErrorKind::Unavailable, what))
        })?;
        let mut report =
            ReclaimReport { read_bytes: rewritten.read_bytes, ..ReclaimReport::default() };
        let is_nothing = rewritten.live.is_empty()
            && rewritten.emptied.is_empty()
            && rewritten.settled.is_empty()
            && rewritten.by_place.needless.is_empty();
        if is_nothing {
            return Ok(report);
        }
        report.written_bytes = rewritten.written.report.object_bytes;
        let emptied = rewritten.emptied.clone();
        // What of these was overtaken is not counted: they are looked at again.
        let is_by_place = rewritten.by_place.live.clone();
        fail_point!("reclaim-before-commit");
        let done = self.commit_moves(seen, rewritten, taken).await?;
        fail_point!("reclaim-committed");
        // What was overtaken may be hidden by a range now, which is not counted out before it is folded.
        // A snapshot that was made meanwhile shows what is overwritten since.
        if done.overtaken_block_count == 0 && snapshots.is_same(&self.map.snapshots()) {
            let is_left = |record: &&SegmentRecord| {
                !done.forgotten.contains(record) && !is_by_place.contains(&record.info.number.0)
            };
            for record in emptied.iter().filter(is_left) {
                let what = "its count of live blocks is not 0, though no page names it";
                self.leave_alone(record, Error::new(ErrorKind::Corrupt, what))?;
            }
        }
        report.moved_block_count = done.moved_block_count;
        report.forgotten_count = done.forgotten.len() as u64;
        let sizes = done.forgotten.iter().map(|record| u64::from(record.info.object_bytes));
        report.forgotten_bytes = sizes.sum();
        let counters = &self.reclaim.counters;
        counters.forgotten_count.fetch_add(report.forgotten_count, Ordering::Relaxed);
        counters.forgotten_bytes.fetch_add(report.forgotten_bytes, Ordering::Relaxed);
        counters.moved_block_count.fetch_add(report.moved_block_count, Ordering::Relaxed);
        counters.written_bytes.fetch_add(report.written_bytes, Ordering::Relaxed);
        Ok(report)
    }

    /// Writes what is live of the victims to new segments.
    async fn rewrite_victims(self: &Arc<Self>, victims: &[Victim]) -> Result<Rewritten> {
        let segment_bytes = self.options.segment_bytes.min(SEGMENT_BYTES_MAX);
        let mut writer = SegmentWriter::new(self, 1, segment_bytes);
        // Those under one key one after the other, so that they share segments.
        let mut victims: Vec<&Victim> = victims.iter().collect();
        victims.sort_by_key(|victim| victim.record.info.key);
        let (mut live, mut emptied, mut read_bytes) = (Vec::new(), Vec::new(), 0);
        let (mut settled, mut blocks) = (Vec::new(), HashSet::new());
        let (mut state_count, mut nobody) = (0, 0);
        let mut by_place = ByPlace::default();
        let mut later = Vec::new();
        let begun = Instant::now();
        // Also after a step that was dropped.
        self.reclaim.state.lock().looking = None;
        for victim @ Victim { record, .. } in victims {
            if begun.elapsed() > VICTIMS_TIME_MAX {
                later.push(*victim); // what is done so far is not to be in vain
                continue;
            }
            if self.options.planted.forget_unchecked {
                emptied.push(*record);
                continue;
            }
            self.reclaim.state.lock().looking = Some(record.info.number.0);
            let look = self.look_into(record, &mut nobody, begun).await;
            self.reclaim.state.lock().looking = None;
            let look = match look {
                Ok(Some(look)) => look,
                Ok(None) => continue, // forgotten meanwhile
                Err(error) => {
                    self.leave_alone(record, error)?;
                    continue;
                }
            };
            let is_too_much = state_count > 0 && state_count + look.state_count > STATES_AT_ONCE;
            if is_too_much || overlaps(&look.live, &blocks) {
                // Or another version of a block. It is the turn of this one after that.
                later.push(*victim);
                continue;
            }
            for one in &look.live {
                blocks.extend(one.blocks());
            }
            match self.rewrite(record, &look.live, &mut writer).await {
                Ok(bytes) => read_bytes += bytes,
                // What was read of it is not moved either.
                Err(Stopped::Reading(error)) => {
                    self.leave_alone(record, error)?;
                    continue;
                }
                Err(Stopped::Writing(error)) => return Err(error),
            }
            state_count += look.state_count;
            let is_step =
                !look.live.is_empty() || !look.settled.is_empty() || !look.needless.is_empty();
            match look.is_cut {
                true if is_step => later.push(*victim),
                // Only ranges that are to be folded hide it.
                true => self.reclaim.state.lock().is_pass_wanted = true,
                false if look.has_hidden => {}
                false => emptied.push(*record),
            }
            if let Some(references) = look.references {
                let number = record.info.number.0;
                if !look.live.is_empty() {
                    by_place.live.insert(number);
                }
                by_place.references.insert(number, references);
                let needless = look.needless.into_iter();
                by_place.needless.extend(needless.map(|(layer, page)| (number, layer, page)));
                by_place.naming.extend(look.naming);
                by_place.foreign.extend(look.foreign);
            }
            live.extend(look.live);
            settled.extend(look.settled);
        }
        settled.sort_unstable();
        settled.dedup();
        self.reclaim.state.lock().victims.extend(later.into_iter().rev());
        let written = writer.finish().await?;
        Ok(Rewritten { live, settled, emptied, written, read_bytes, by_place })
    }

    /// A segment that cannot be read is left alone until the next start; what does not answer ends the
    /// step.
    fn leave_alone(&self, record: &SegmentRecord, error: Error) -> Result<()> {
        if !matches!(
            error.kind(),
            ErrorKind::Corrupt | ErrorKind::NotFound | ErrorKind::Unsupported
        ) {
            return Err(error);
        }
        tracing::error!(
            segment = record.info.number.0, error = %error.chain(),
            "a segment is not reclaimed: something is wrong with it; `spindle fsck` says what"
        );
        let mut state = self.reclaim.state.lock();
        if state.stuck.len() < STUCK_MAX {
            state.stuck.insert(record.info.number.0);
        }
        Ok(())
    }

    /// What pages name of a segment, by its own directory and its back-references. `nobody` is the next number of a block
    /// that is written for nobody.
    async fn look_into(
        &self,
        record: &SegmentRecord,
        nobody: &mut u64,
        begun: Instant,
    ) -> Result<Option<Look>> {
        if self.map.find_segment(record.info.number.0).await? != Some(*record) {
            return Ok(None);
        }
        let entries = self.frames.read_directory(&record.info).await?;
        let references = self.map.back_references(record.info.number.0, REFERENCES_AT_ONCE).await?;
        let snapshot_count = self.map.snapshots().count_max();
        // Each page with all of its copies, and with those of all layers below.
        let written_for = entries.iter().map(|entry| entry.layer);
        let written_for: BTreeSet<u64> =
            written_for.chain(references.0.values().flatten().map(|layer| layer.0)).collect();
        let holders = self.holders(&self.map.layers(), &written_for);
        let pages_at_once = (PAGES_AT_ONCE / (1 + snapshot_count / 32 + holders.len() / 32)).max(1);
        if !references.0.is_empty() {
            let look = self.look_into_referenced(
                record,
                entries,
                references,
                nobody,
                (begun, pages_at_once),
            );
            return look.await.map(Some);
        }
        let mut looks = futures::stream::iter(pages_of(record, entries)?)
            .map(|(page, entries)| self.look_at_page(record, page, entries))
            .buffered(pages_at_once);
        let mut all = Look::default();
        while let Some(look) = looks.try_next().await? {
            if all.state_count > STATES_AT_ONCE {
                all.is_cut = true;
                break;
            }
            all.state_count += look.state_count;
            all.has_hidden |= look.has_hidden;
            all.live.extend(look.live);
            all.settled.extend(look.settled);
        }
        all.live.sort_unstable_by_key(|one| (one.layer, one.first_block));
        Ok(Some(all))
    }

    /// What pages of this number name of a segment: those of the layers that its frames were written for, and of
    /// all layers that were made from these.
    async fn look_at_page(
        &self,
        record: &SegmentRecord,
        page: u32,
        entries: Vec<DirectoryEntry>,
    ) -> Result<Look> {
        let written_for: BTreeSet<u64> = entries.iter().map(|entry| entry.layer).collect();
        let layers = self.map.layers();
        let holders = self.holders(&layers, &written_for);
        let mut seen = Vec::with_capacity(holders.len());
        for holder in holders {
            let its: Vec<DirectoryEntry> = entries
                .iter()
                .filter(|entry| layers.is_below(holder, LayerId(entry.layer)))
                .copied()
                .collect();
            seen.push((holder, its, self.map.page_for_reclaim(holder, page).await?));
        }
        look_at(record, page, &seen)
    }

    /// The layers that may name blocks that were written for these.
    fn holders(&self, layers: &LayerList, written_for: &BTreeSet<u64>) -> Vec<LayerId> {
        let mut holders: HashSet<LayerId> = HashSet::new();
        for layer in written_for.iter().copied().map(LayerId) {
            holders.insert(layer);
            if !self.options.planted.reclaim_without_clones {
                holders.extend(layers.descendants(layer));
            }
        }
        let mut holders: Vec<LayerId> = holders.into_iter().collect();
        // Who was made from another one comes after it: what it takes from there meanwhile is seen.
        holders.sort_by_cached_key(|holder| (layers.height(*holder), *holder));
        holders
    }

    /// Puts the live blocks of a segment, sorted, into new ones. Returns the bytes of their frames.
    async fn rewrite(
        &self,
        record: &SegmentRecord,
        live: &[Live],
        writer: &mut SegmentWriter,
    ) -> Result<u64, Stopped> {
        let key = record.info.key;
        if !live.is_empty() && !self.options.volume_keys.has(key) {
            let what = format!("{}: volumes still name it, but {key} is not there", record.info);
            return Err(Stopped::Reading(Error::new(ErrorKind::NotFound, what)));
        }
        writer.set_key(key).await.map_err(Stopped::Writing)?;
        // What was nominated for duplicates goes on being so.
        let number = record.info.number.0;
        let fingerprinter = match live.is_empty() {
            true => None,
            false => match self.map.fingerprints(number).await {
                Ok(found) => found.and_then(|_| self.fingerprinter(key)),
                // They decide nothing.
                Err(error) if error.kind() == ErrorKind::Corrupt => None,
                Err(error) => return Err(Stopped::Reading(error)),
            },
        };
        let mut frames: Vec<FrameRef> = Vec::new();
        for one in live {
            let frame = FrameRef { info: record.info, at: one.from.at };
            if frames.last() != Some(&frame) {
                frames.push(frame);
            }
        }
        let read_bytes = frames.iter().map(|frame| u64::from(frame.at.sealed_bytes)).sum();
        let local_count = frames.iter().filter(|frame| self.frames.is_local(frame)).count();
        writer.set_cached(2 * local_count > frames.len());
        let mut packer: Option<(LayerId, Packer)> = None;
        let mut pieces: Vec<Piece> = Vec::new();
        let mut rest = live;
        let mut reads =
            futures::stream::iter(frames.chunks(FRAMES_AT_ONCE).map(<[FrameRef]>::to_vec))
                .map(|frames| async move {
                    let read = self.frames.read_many(&frames, Access::Once).await?;
                    Ok::<_, Error>((frames, read))
                })
                .buffered(READS_AT_ONCE);
        while let Some((frames, read)) = reads.try_next().await.map_err(Stopped::Reading)? {
            for (frame, plain) in frames.iter().zip(read) {
                let count = rest.iter().take_while(|one| one.from.at == frame.at).count();
                let (now, later) = rest.split_at(count);
                rest = later;
                for one in now {
                    if packer.as_ref().is_some_and(|(layer, _)| *layer != one.layer) {
                        pieces.extend(packer.take().and_then(|(_, mut packer)| packer.end()));
                    }
                    let (_, packer) = packer.get_or_insert_with(|| {
                        (one.layer, Packer::new(one.layer, self.options.frame_blocks))
                    });
                    let bytes = blocks_of(record, frame, &plain, one).map_err(Stopped::Reading)?;
                    let fingerprints: Vec<u64> = fingerprinter
                        .map(|fingerprinter| fingerprinter.of_blocks(&bytes).collect())
                        .unwrap_or_default();
                    packer.add(one.first_block, bytes, &fingerprints, &mut pieces);
                }
            }
            for piece in pieces.drain(..) {
                writer.add(piece).await.map_err(Stopped::Writing)?;
            }
        }
        pieces.extend(packer.and_then(|(_, mut packer)| packer.end()));
        for piece in pieces {
            writer.add(piece).await.map_err(Stopped::Writing)?;
        }
        Ok(read_bytes)
    }

    /// Commits in a task of its own: a step that is dropped does not leave the map halfway.
    async fn commit_moves(
        self: &Arc<Self>,
        seen: Arc<Database>,
        rewritten: Rewritten,
        taken: Victims,
    ) -> Result<RepointReport> {
        let Rewritten { live, settled, emptied, written, by_place, .. } = rewritten;
        let path = |record: &SegmentRecord| record.info.object_path();
        let new: Vec<Path> = written.segments.iter().map(path).collect();
        let old: Vec<Path> = emptied.iter().map(path).collect();
        if self.options.planted.delete_first {
            for path in &old {
                self.delete(path).await.map_err(|error| {
                    Error::with_source(ErrorKind::Unavailable, "delete a segment", error)
                })?;
            }
        }
        let moved = match moves_of(live, &written) {
            Ok(moved) => moved,
            Err(error) => {
                self.orphans.abandon(new);
                for record in &emptied {
                    self.leave_alone(record, error.clone())?;
                }
                return Err(error);
            }
        };
        let (by_place, moved) = by_place.split(moved);
        let asked = Repoint {
            moved,
            settled,
            segments: written.segments,
            fingerprints: written.fingerprints,
            by_place,
            emptied,
            next_segment: self.next_segment.load(Ordering::SeqCst),
            planted: self.options.planted,
        };
        let inner = self.clone();
        let task = self.background.spawn(async move {
            let _taken = taken; // until it is over
            let mut writer = inner.writer.lock().await;
            let mut lists = asked.fingerprints.clone();
            if !Arc::ptr_eq(&seen, &inner.map.db()) {
                inner.orphans.abandon(new);
                let what = "reclaim segments: the metadata database was opened anew meanwhile";
                return Err(Error::new(ErrorKind::Unavailable, what));
            }
            let done = inner.map.repoint(&mut writer, asked).await;
            match &done {
                Ok(report) => {
                    let is_unused = |number: u64| {
                        report.unused.iter().any(|record| record.info.number.0 == number)
                    };
                    lists.retain(|(number, _)| !is_unused(*number));
                    inner.dedup.add(&lists);
                    inner.dedup.forget(report.forgotten.iter().map(|record| record.info.number.0));
                    let gone = report.forgotten.iter().chain(&report.unused);
                    inner.orphans.abandon(gone.map(|record| record.info.object_path()).collect());
                }
                // Nobody knows which of them the map names: each is deleted only if it does not.
                Err(_) => inner.orphans.abandon(new.into_iter().chain(old).collect()),
            }
            done
        });
        task.await.map_err(|cause| Error::with_source(ErrorKind::Io, "commit reclaim", cause))?
    }
}

impl ByPlace {
    /// Takes what was moved of segments with back-references out of `moved`; the rest goes by blocks.
    fn split(self, moved: Vec<Moved>) -> (crate::map::repoint::ByPlace, Vec<Moved>) {
        let is_its = |one: &Moved| self.references.contains_key(&one.from.segment);
        let (its, rest): (Vec<Moved>, Vec<Moved>) = moved.into_iter().partition(is_its);
        let mut places: HashMap<Place, Placed> = HashMap::new();
        for Moved { block_count, from, to, .. } in its {
            let count = u8::try_from(block_count).expect("a frame has 16 blocks at most");
            places.extend((0..count).map(|block| {
                let from = (from.segment, from.at.frame_index, from.within + block);
                (from, Placed { within: to.within + block, ..to })
            }));
        }
        let references: BTreeSet<(u64, LayerId, u32)> = self
            .foreign
            .iter()
            .filter_map(|one| Some((places.get(&one.place)?.segment, one.layer, one.page)))
            .collect();
        let all = crate::map::repoint::ByPlace {
            places,
            pages: self.naming,
            back_references: references.into_iter().collect(),
            forgotten: self.references,
            needless: self.needless,
        };
        (all, rest)
    }
}

/// What a directory says, by page.
fn pages_of(
    record: &SegmentRecord,
    entries: impl IntoIterator<Item = DirectoryEntry>,
) -> Result<BTreeMap<u32, Vec<DirectoryEntry>>> {
    let mut pages: BTreeMap<u32, Vec<DirectoryEntry>> = BTreeMap::new();
    for entry in entries {
        let last = entry.first_block + u64::from(entry.block_count) - 1;
        for page in entry.first_block / PAGE_BLOCKS..=last / PAGE_BLOCKS {
            let page = u32::try_from(page).map_err(|_| {
                let what = format!("{}: its directory names block {last}", record.info);
                Error::new(ErrorKind::Corrupt, what)
            })?;
            pages.entry(page).or_default().push(entry);
        }
    }
    Ok(pages)
}

impl Live {
    fn blocks(&self) -> impl Iterator<Item = (LayerId, u64)> {
        let layer = self.layer;
        (self.first_block..self.first_block + self.block_count).map(move |block| (layer, block))
    }
}

fn overlaps(live: &[Live], blocks: &HashSet<(LayerId, u64)>) -> bool {
    live.iter().any(|one| one.blocks().any(|block| blocks.contains(&block)))
}

/// What the pages of one number name of a segment: of each layer the frames that it may name, and its page.
fn look_at(
    record: &SegmentRecord,
    page: u32,
    seen: &[(LayerId, Vec<DirectoryEntry>, SeenPage)],
) -> Result<Look> {
    let number = record.info.number.0;
    let page_block = u64::from(page) * PAGE_BLOCKS;
    // By the layer that they were written for.
    let mut places: BTreeMap<u64, Places> = BTreeMap::new();
    let mut look = Look::default();
    for (layer, entries, seen) in seen {
        let wrong = |run: &Run, what: &str| {
            let what = format!(
                "{}: page {page} of layer {layer} names frame {} for block {}, and {what}",
                record.info,
                run.frame_index,
                page_block + u64::from(run.first)
            );
            Error::new(ErrorKind::Corrupt, what)
        };
        let mut own: [bool; PAGE_BLOCKS as usize] = [false; PAGE_BLOCKS as usize];
        for run in seen.states.iter().flatten().filter(|run| run.segment == number) {
            let first_block = page_block + u64::from(run.first);
            let at = FrameAt {
                frame_index: run.frame_index,
                offset: run.offset,
                sealed_bytes: run.sealed_bytes,
            };
            let is_its = |entry: &&DirectoryEntry| {
                entry.at == at
                    && entry.first_block + u64::from(run.within) == first_block
                    && u32::from(run.within) + run.count() <= u32::from(entry.block_count)
            };
            let Some(entry) = entries.iter().find(is_its) else {
                return Err(wrong(run, "its directory does not"));
            };
            let places = places.entry(entry.layer).or_insert([None; PAGE_BLOCKS as usize]);
            for (block, within) in (run.first..=run.last).zip(run.within..) {
                own[usize::from(block)] = true;
                let place = places[usize::from(block)].get_or_insert((at, within));
                if *place != (at, within) {
                    return Err(wrong(run, "another frame for it elsewhere"));
                }
            }
        }
        let of_it = |runs: &[Run]| -> u32 {
            runs.iter().filter(|run| run.segment == number).map(Run::count).sum()
        };
        let shown = seen.states.first().map_or(0, |newest| of_it(newest));
        look.has_hidden |= of_it(&seen.hidden) > shown;
        let is_unseen = |run: &Run| {
            run.segment == number && (run.first..=run.last).any(|block| !own[usize::from(block)])
        };
        if seen.unseen.iter().any(is_unseen) {
            look.settled.push((*layer, page));
        }
    }
    for (layer, places) in places {
        let mut live: Vec<Live> = Vec::new();
        for (block, place) in (page_block..).zip(&places) {
            let Some((at, within)) = *place else { continue };
            match live.last_mut() {
                Some(last)
                    if last.first_block + last.block_count == block
                        && last.from.at == at
                        && u64::from(last.from.within) + last.block_count == u64::from(within) =>
                {
                    last.block_count += 1;
                }
                _ => live.push(Live {
                    layer: LayerId(layer),
                    first_block: block,
                    block_count: 1,
                    from: Placed { segment: number, at, within },
                }),
            }
        }
        look.live.extend(live);
    }
    if !look.live.is_empty() || !look.settled.is_empty() {
        look.state_count = seen.iter().map(|(_, _, seen)| seen.states.len()).sum();
    }
    Ok(look)
}

/// Where each block of a page is in a segment.
type Places = [Option<(FrameAt, u8)>; PAGE_BLOCKS as usize];

/// The bytes of live blocks within their frame.
fn blocks_of(record: &SegmentRecord, frame: &FrameRef, plain: &Bytes, one: &Live) -> Result<Bytes> {
    let start = usize::from(one.from.within) * BLOCK;
    let end = start + one.block_count as usize * BLOCK;
    if end > plain.len() {
        let index = frame.at.frame_index;
        let what =
            format!("{}, frame {index}: it holds fewer blocks than the map says", record.info);
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    Ok(plain.slice(start..end))
}

/// Pairs where blocks were with where they are now.
fn moves_of(mut live: Vec<Live>, written: &Written) -> Result<Vec<Moved>> {
    live.sort_unstable_by_key(|one| (one.layer, one.first_block));
    let overlaps = |pair: &[Live]| {
        pair[0].layer == pair[1].layer
            && pair[0].first_block + pair[0].block_count > pair[1].first_block
    };
    if live.windows(2).any(overlaps) {
        let what = "reclaim segments: two of them hold the same block";
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    let live_count: u64 = live.iter().map(|one| one.block_count).sum();
    let mut changes: Vec<_> = written.changes.iter().collect();
    changes.sort_unstable_by_key(|change| (change.layer, change.first_block));
    let mut moved = Vec::with_capacity(changes.len());
    let mut at = 0;
    for change in changes {
        let Some(to) = change.placed else { continue };
        let end = change.first_block + change.block_count;
        let is_before = |one: &Live| {
            (one.layer, one.first_block + one.block_count) <= (change.layer, change.first_block)
        };
        while live.get(at).is_some_and(is_before) {
            at += 1;
        }
        let mut index = at;
        while let Some(one) = live.get(index) {
            if one.layer != change.layer || one.first_block >= end {
                break;
            }
            let first_block = one.first_block.max(change.first_block);
            let last = (one.first_block + one.block_count).min(end);
            let part = |placed: Placed, start: u64| Placed {
                within: placed.within + (first_block - start) as u8,
                ..placed
            };
            moved.push(Moved {
                layer: one.layer,
                first_block,
                block_count: last - first_block,
                from: part(one.from, one.first_block),
                to: part(to, change.first_block),
            });
            index += 1;
        }
    }
    if moved.iter().map(|one| one.block_count).sum::<u64>() != live_count {
        let what = "reclaim segments: not everything that is live in them was written anew";
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    Ok(moved)
}
