//! Reclaim: frees the space of blocks that were overwritten or trimmed. Live blocks of mostly dead
//! segments are written to new segments, pages are re-pointed, and the old segments are forgotten
//! and deleted.
//!
//! Invariants:
//! - Counts of live blocks nominate a segment. Its own directory and every page that it was written
//!   for decide: a segment is forgotten only when none of these pages references it.
//! - Order: the new segments are made durable, then one metadata batch that re-points pages and
//!   forgets segments, then the old objects are deleted. A crash in between leaves orphan segments,
//!   never dangling pointers.
//! - Pages that a write has changed meanwhile are left as they are: see [`crate::map::repoint`].
//! - A block is live if a snapshot shows it, or if any layer shows it that was made from the layer
//!   for which it was written. References lead from a layer down to the layers made from it, so the
//!   search for references goes the same way. A segment has each block of a layer at most once, and
//!   so do all segments together that one step rewrites; a block that was overwritten between two
//!   snapshots is in two segments.
//! - Memory is bounded: one segment being built, one being gathered, and the frames of a few
//!   requests.
//! - Dropping the future stops reclaim between two steps. A commit that has begun runs to its end.

mod liveness;
mod recount;
mod referenced;
mod relocate;
mod rewrite;
mod victims;

use crate::dedup::Dedup;
use crate::destage::write::Output;
use crate::fail_point;
use crate::map::records::SegmentRecord;
use crate::map::space::{self, Space};
use crate::map::{LayerId, Placed};
use crate::pool::{Exclusions, JobParts, Metadata, Pool, Segments};
use crate::segment::BLOCK_COUNT_MAX;
use block::conditions::Report;
use block::units::BLOCK_BYTES;
use block::{ConditionKind, Error, ErrorKind, Result};
use parking_lot::Mutex;
use recount::{Recount, Recounted};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use victims::{Pass, STUCK_MAX, Victim, worth};

/// Segments that one step of a pass examines. Chosen by hand: some milliseconds.
const PASS_STEP: usize = 2048;
/// Dead segments that are forgotten in one commit. Chosen by hand.
const DEAD_AT_ONCE: usize = 32;
/// Maximum number of segments that are rewritten in one commit. Chosen by hand.
const VICTIMS_AT_ONCE: usize = 16;
/// Approximate number of live bytes that are rewritten in one commit, though always at least one
/// segment. Chosen by hand.
const LIVE_BYTES_AT_ONCE: u64 = 32 << 20;
/// Approximate number of page states that one step re-points, including those that snapshots show.
/// Chosen by hand: at most 3 KiB each, and mostly far less.
const STATES_AT_ONCE: usize = 16_384;
/// Time for which a segment is skipped that took too long to examine. Chosen by hand.
const POSTPONED_TIME: Duration = Duration::from_secs(600);
/// Maximum size of the new segments before compression. Chosen by hand: two of them are in memory.
pub const SEGMENT_BYTES_MAX: usize = 8 << 20;
/// Maximum memory of reclaim for frames, in addition to two segments of up to [`SEGMENT_BYTES_MAX`]
/// each.
pub const READ_BYTES_MAX: u64 =
    (FRAMES_AT_ONCE * READS_AT_ONCE * BLOCK_COUNT_MAX as usize * BLOCK) as u64;
/// Frames read in one go, and the number of such reads that run concurrently. Chosen by hand: at
/// most 8 MiB.
const FRAMES_AT_ONCE: usize = 64;
const READS_AT_ONCE: usize = 2;
/// Shortest pause between two passes, and the minimum pause as a multiple of the duration of the
/// last pass. Chosen by hand.
const PASS_PAUSE: Duration = Duration::from_secs(1);
const PASS_PAUSE_PARTS: u32 = 10;
/// After this pause a pass is made even if less than a segment of blocks has died. Chosen by hand.
const PASS_PAUSE_MAX: Duration = Duration::from_secs(30);
/// While destage is urgent, rewriting waits unless the stored bytes exceed this percentage of the
/// live bytes. Chosen by hand: the log takes precedence, but not for ever.
const URGENT_PERCENT: u64 = 200;
/// Timeout of rewriting in one step. After it, only dead segments are dropped for a while, because
/// a full store accepts nothing and gets room by deletions. Chosen by hand.
const REWRITE_TIME_MAX: Duration = Duration::from_secs(120);
/// Time after which a step begins no further segment. Chosen by hand: half of that.
const VICTIMS_TIME_MAX: Duration = Duration::from_secs(60);
const REWRITE_PAUSE: Duration = Duration::from_secs(60);
/// Maximum number of pending deletions before more segments are forgotten. Chosen by hand: beyond
/// it, the store refuses or is unreachable.
const DELETIONS_MAX: usize = 1024;

const BLOCK: usize = BLOCK_BYTES as usize;

/// Options for reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReclaimOptions {
    /// Segments are rewritten while the stored bytes exceed this percentage of the live bytes;
    /// above 100. Dead segments are always dropped.
    pub target_percent: u64,
}

impl Default for ReclaimOptions {
    fn default() -> Self {
        // Source: with uniformly random overwrites, space s costs a write amplification of 1/(1-u)
        // where 1/s = (u-1)/ln u; 1.30 gives u = 0.58 and 2.4.
        ReclaimOptions { target_percent: 130 }
    }
}

/// Work done by one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReclaimReport {
    /// There is nothing to do for now.
    pub is_idle: bool,
    /// Bytes of frames that were read, from any tier.
    pub read_bytes: u64,
    /// Bytes of new segments.
    pub written_bytes: u64,
    /// Blocks that were re-pointed.
    pub moved_block_count: u64,
    /// Segments forgotten.
    pub forgotten_count: u64,
    /// Bytes of their objects.
    pub forgotten_bytes: u64,
}

/// Counts since the start, and gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReclaimStatus {
    /// Usage of the segments; `None` until all of them were examined once.
    pub space: Option<Space>,
    /// Segments forgotten.
    pub forgotten_count: u64,
    /// Bytes of their objects.
    pub forgotten_bytes: u64,
    /// Blocks that were rewritten.
    pub moved_block_count: u64,
    /// Bytes of the segments that they were written to.
    pub written_bytes: u64,
    /// Segments that could not be read and are left alone.
    pub stuck_count: u64,
    /// Segments that are forgotten but not yet deleted, because copies still need them.
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
    /// Segments were nominated, or could have been, that were not reclaimed.
    is_pass_wanted: bool,
    /// Time before which nothing is rewritten.
    rewrite_not_before: Option<Instant>,
    /// Victims in ascending order of worth; the best is last.
    victims: Vec<Victim>,
    stuck: HashSet<u64>,
    /// Description of the newest stuck segment and its damage.
    stuck_why: String,
    /// Segments that could not be read while others could. They are left alone for as long as that
    /// lasts.
    unreadable: HashSet<u64>,
    /// The segment that is being examined.
    looking: Option<u64>,
    /// Segments that took too long to examine, and when.
    postponed: HashMap<u64, Instant>,
    /// Segments with more references than blocks, in ascending order of references.
    crowded: Vec<SegmentRecord>,
    /// The segment whose pages are being examined.
    recount: Option<Recount>,
    /// Segments whose pages were examined.
    recounted: HashMap<u64, Recounted>,
}

/// The job; see the module.
pub(crate) struct Reclaim {
    pool: Arc<Pool>,
    metadata: Arc<Metadata>,
    segments: Arc<Segments>,
    exclusions: Arc<Exclusions>,
    dedup: Arc<Dedup>,
    output: Arc<Output>,
    turn: tokio::sync::Mutex<()>,
    state: Mutex<State>,
    counters: Counters,
}

impl Reclaim {
    pub(crate) fn new(
        parts: &JobParts,
        exclusions: &Arc<Exclusions>,
        dedup: &Arc<Dedup>,
        output: &Arc<Output>,
    ) -> Reclaim {
        let JobParts { pool, metadata, segments } = parts.clone();
        Reclaim {
            pool,
            metadata,
            segments,
            exclusions: exclusions.clone(),
            dedup: dedup.clone(),
            output: output.clone(),
            turn: tokio::sync::Mutex::default(),
            state: Mutex::default(),
            counters: Counters::default(),
        }
    }

    /// Takes the best victim. `may_be_well` says of a stuck segment that counts as dead now whether
    /// its damage may no longer matter. `is_unreadable` says whether a segment still cannot be
    /// read.
    fn next_victim(
        &self,
        may_be_well: impl Fn(&SegmentRecord) -> bool,
        is_unreadable: impl Fn(&SegmentRecord) -> bool,
    ) -> Option<Victim> {
        let mut state = self.state.lock();
        loop {
            let victim = state.victims.pop()?;
            let number = victim.record.info.number.0;
            let is_postponed = state
                .postponed
                .get(&number)
                .is_some_and(|at| self.pool.clock.since(*at) < POSTPONED_TIME);
            let is_stuck =
                state.stuck.contains(&number) && (victim.live > 0 || !may_be_well(&victim.record));
            let is_unreadable = state.unreadable.contains(&number) && is_unreadable(&victim.record);
            if !is_postponed && !is_stuck && !is_unreadable {
                state.unreadable.remove(&number);
                return Some(victim);
            }
        }
    }

    /// Records that a segment is readable again, so that the next pass may take it.
    pub(crate) fn note_well(&self, number: u64) {
        let mut state = self.state.lock();
        let was_unreadable = state.unreadable.remove(&number);
        state.is_pass_wanted |= was_unreadable;
        if state.stuck.remove(&number) {
            self.show_stuck(&state);
        }
    }

    /// Updates the condition from the list. The caller holds the lock of the list, so that an
    /// earlier list is never shown after a later one.
    fn show_stuck(&self, state: &State) {
        let report = (!state.stuck.is_empty()).then(|| {
            let count = state.stuck.len();
            let (noun, them) = if count == 1 { ("segment", "it") } else { ("segments", "them") };
            Report::new(
                format!(
                    "{count} {noun} cannot be reclaimed, because something in {them} is damaged; the latest: {}",
                    state.stuck_why
                ),
                "their space in the store does not return; their readable data is served",
                "`spindle fsck` names the damage",
            )
        });
        self.pool.conditions.set(ConditionKind::ReclaimBlocked, "pool", report);
    }

    /// Makes a pass due at once, as if the pause were over.
    #[cfg(test)]
    pub(crate) fn look_again(&self) {
        let mut state = self.state.lock();
        state.pass.get_or_insert_default();
        state.pass_begun.get_or_insert_with(|| self.pool.clock.now());
    }
}

/// Live blocks of a segment within one page and one frame.
#[derive(Clone, Copy, Debug)]
struct Live {
    layer: LayerId,
    first_block: u64,
    block_count: u64,
    from: Placed,
}

impl Reclaim {
    /// Implements [`crate::Tier::reclaim_status`].
    pub(crate) fn status(&self) -> ReclaimStatus {
        let counters = &self.counters;
        ReclaimStatus {
            space: self.metadata.map.space.get(),
            forgotten_count: counters.forgotten_count.load(Ordering::Relaxed),
            forgotten_bytes: counters.forgotten_bytes.load(Ordering::Relaxed),
            moved_block_count: counters.moved_block_count.load(Ordering::Relaxed),
            written_bytes: counters.written_bytes.load(Ordering::Relaxed),
            stuck_count: {
                let state = self.state.lock();
                (state.stuck.len() + state.unreadable.len()) as u64
            },
            held_count: self.segments.leftovers.held_count() as u64,
        }
    }

    /// Implements [`crate::Tier::reclaim_step`].
    pub(crate) async fn step(self: &Arc<Self>, options: ReclaimOptions) -> Result<ReclaimReport> {
        let _turn = self.turn.lock().await;
        let next_segment = {
            let writer = self.metadata.writer.lock().await;
            self.metadata.map.check(&writer)?;
            writer.root().next_segment
        };
        let idle = ReclaimReport { is_idle: true, ..ReclaimReport::default() };
        if self.segments.leftovers.abandoned_count() > DELETIONS_MAX {
            return Ok(idle);
        }
        if self.is_pass_due() {
            self.pass_step(next_segment).await?;
            return Ok(ReclaimReport::default());
        }
        let done = match self.next_victims(options, next_segment).await {
            Ok(victims) if victims.is_empty() => return self.recount_step().await,
            Ok(victims) => self.reclaim_victims(victims).await,
            Err(error) => Err(error),
        };
        if done.is_err() {
            // The chosen victims are no longer nominated.
            self.state.lock().is_pass_wanted = true;
        }
        done
    }

    fn is_pass_due(&self) -> bool {
        let state = self.state.lock();
        if state.pass.is_some() || self.metadata.map.space.get().is_none() {
            return true;
        }
        let since = state.pass_ended.map_or(Duration::MAX, |ended| self.pool.clock.since(ended));
        let lost = self.metadata.map.space.lost_block_count();
        let segment_blocks = (self.output.settings.segment_bytes as u64 / BLOCK_BYTES).max(1);
        let is_worth_it = state.is_pass_wanted || lost >= segment_blocks;
        let pause = match state.victims.is_empty() && is_worth_it {
            true => PASS_PAUSE,
            false if lost > 0 => PASS_PAUSE_MAX,
            false => return false,
        };
        since >= pause.max(state.pass_took * PASS_PAUSE_PARTS)
    }

    /// Examines some more segments.
    async fn pass_step(&self, next_segment: u64) -> Result<()> {
        let last = {
            let mut state = self.state.lock();
            if state.pass.is_none() {
                self.metadata.map.space.begin_pass();
                state.pass = Some(Pass::default());
                state.pass_begun = Some(self.pool.clock.now());
                state.is_pass_wanted = false;
            }
            state.pass.as_ref().map_or(0, |pass| pass.last)
        };
        let (found, next) = self.metadata.map.live_after(last, PASS_STEP).await?;
        let mut state = self.state.lock();
        let Some(mut pass) = state.pass.take() else { return Ok(()) };
        let now = self.pool.clock.now();
        let has_dedup = self.metadata.map.has_dedup();
        for (record, live) in &found {
            let number = record.info.number.0;
            let places = state.live_places(number, *live);
            pass.add(record, places, *live, next_segment);
            let is_full = worth(record, places, next_segment).is_none();
            if has_dedup && is_full && state.is_recount_due(number, *live, now) {
                pass.add_crowded(record, *live);
            }
        }
        if let Some(next) = next {
            pass.last = next;
            state.pass = Some(pass);
            return Ok(());
        }
        self.metadata.map.space.end_pass(pass.space);
        state.crowded = pass.end_crowded();
        state.victims = pass.end(next_segment);
        state.is_pass_wanted |= pass.has_more;
        state.pass_ended = Some(self.pool.clock.now());
        state.pass_took =
            state.pass_begun.map_or(Duration::ZERO, |begun| self.pool.clock.since(begun));
        Ok(())
    }

    /// Takes the next victims to reclaim: either some dead segments, or some to be rewritten.
    async fn next_victims(
        &self,
        options: ReclaimOptions,
        next_segment: u64,
    ) -> Result<Vec<Victim>> {
        // Bytes that are stored beyond the given percentage of the live bytes.
        let excess = |percent: u64| {
            let space = self.metadata.map.space.get().unwrap_or_default();
            let allowed = u128::from(space.live_bytes) * u128::from(percent) / 100;
            space.object_bytes.saturating_sub(u64::try_from(allowed).unwrap_or(u64::MAX))
        };
        let is_urgent = self.output.is_urgent.load(Ordering::Relaxed);
        let is_paused = {
            let state = self.state.lock();
            state.rewrite_not_before.is_some_and(|until| self.pool.clock.now() < until)
        };
        let may_rewrite = !is_paused
            && excess(options.target_percent) > 0
            && (!is_urgent || excess(URGENT_PERCENT.max(options.target_percent)) > 0);
        let mut chosen = Vec::new();
        let (mut live_bytes, mut freed_bytes) = (0, 0);
        // The segment was missing on purpose, or its volumes were dropped together with their key.
        let may_be_well = |record: &SegmentRecord| {
            let info = &record.info;
            self.exclusions.may_be_excluded(info.number.0) || !self.pool.volume_keys.has(info.key)
        };
        let is_unreadable =
            |record: &SegmentRecord| self.segments.frames.store().is_judged(&record.info);
        while let Some(victim) = self.next_victim(may_be_well, is_unreadable) {
            let number = victim.record.info.number.0;
            // The count may have changed since the pass.
            let live = self.metadata.map.live_blocks(number).await?;
            let live = self.state.lock().live_places(number, live);
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
                self.state.lock().victims.push(victim);
                break;
            }
            if worth(&victim.record, live, next_segment).is_some() {
                live_bytes += bytes;
                let kept_bytes = space::live_bytes(&victim.record, live);
                freed_bytes += u64::from(victim.record.info.object_bytes) - kept_bytes;
                chosen.push(victim);
            }
        }
        Ok(chosen)
    }

    async fn reclaim_victims(self: &Arc<Self>, mut victims: Vec<Victim>) -> Result<ReclaimReport> {
        fail_point!("reclaim-start");
        // From here on no block in them is used as a duplicate. Victims that a destage uses wait
        // for the next pass.
        let numbers = victims.iter().map(|victim| victim.record.info.number.0);
        let taken = self.dedup.take_victims(numbers);
        let count = victims.len();
        victims.retain(|victim| taken.has(victim.record.info.number.0));
        if victims.len() < count {
            self.state.lock().is_pass_wanted = true;
        }
        // Lookups in the map become invalid when its database is reopened: a commit that was
        // visible may be undone by that.
        let seen = self.metadata.map.db();
        let snapshots = self.metadata.map.snapshots();
        let rewritten =
            tokio::time::timeout(REWRITE_TIME_MAX, self.rewrite_victims(&victims)).await;
        let rewritten = rewritten.unwrap_or_else(|_| {
            let mut state = self.state.lock();
            state.rewrite_not_before = Some(self.pool.clock.now() + REWRITE_PAUSE);
            if let Some(number) = state.looking.take() {
                // Do not start with the same segment again.
                state.postponed.retain(|_, at| self.pool.clock.since(*at) < POSTPONED_TIME);
                if state.postponed.len() < STUCK_MAX {
                    state.postponed.insert(number, self.pool.clock.now());
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
        // Overtaken references to these segments are not counted, so the segments are examined
        // again.
        let is_by_place = rewritten.by_place.live.clone();
        fail_point!("reclaim-before-commit");
        let done = self.commit_moves(seen, rewritten, taken).await?;
        fail_point!("reclaim-committed");
        // If pages were superseded, a range may hide references now, and these are subtracted only
        // when the range is folded. A snapshot that was made meanwhile shows blocks that were
        // overwritten since.
        if done.superseded_block_count == 0 && snapshots.is_same(&self.metadata.map.snapshots()) {
            let is_left = |record: &&SegmentRecord| {
                !done.forgotten.iter().any(|one| one.is_of(&record.info))
                    && !is_by_place.contains(&record.info.number.0)
            };
            for record in emptied.iter().filter(is_left) {
                let what = "its count of live blocks is not 0, though no page names it; `spindle fsck --repair-counts` \
                            puts that right";
                self.leave_alone(record, Error::new(ErrorKind::Corrupt, what))?;
            }
        }
        report.moved_block_count = done.moved_block_count;
        report.forgotten_count = done.forgotten.len() as u64;
        let sizes = done.forgotten.iter().map(|record| u64::from(record.info.object_bytes));
        report.forgotten_bytes = sizes.sum();
        for record in &done.forgotten {
            self.note_well(record.info.number.0);
        }
        let counters = &self.counters;
        counters.forgotten_count.fetch_add(report.forgotten_count, Ordering::Relaxed);
        counters.forgotten_bytes.fetch_add(report.forgotten_bytes, Ordering::Relaxed);
        counters.moved_block_count.fetch_add(report.moved_block_count, Ordering::Relaxed);
        counters.written_bytes.fetch_add(report.written_bytes, Ordering::Relaxed);
        Ok(report)
    }

    /// Leaves a segment alone: a damaged one until the next start, and one that cannot be read
    /// while others can for as long as that lasts. A segment that does not answer ends the step
    /// with the error.
    fn leave_alone(&self, record: &SegmentRecord, error: Error) -> Result<()> {
        if error.kind() == ErrorKind::Unreadable {
            let mut state = self.state.lock();
            if state.unreadable.len() < STUCK_MAX {
                state.unreadable.insert(record.info.number.0);
            }
            return Ok(());
        }
        if !matches!(
            error.kind(),
            ErrorKind::Corrupt | ErrorKind::NotFound | ErrorKind::Unsupported
        ) {
            return Err(error);
        }
        let mut state = self.state.lock();
        let is_known = state.stuck.contains(&record.info.number.0);
        if state.stuck.len() < STUCK_MAX && state.stuck.insert(record.info.number.0) {
            state.stuck_why = format!("segment {}: {}", record.info.number.0, error.chain());
            self.show_stuck(&state);
        }
        drop(state);
        if !is_known {
            tracing::info!(
                segment = record.info.number.0, error = %error.chain(),
                "could not reclaim a segment; it stays"
            );
        }
        Ok(())
    }
}

impl Live {
    fn blocks(&self) -> impl Iterator<Item = (LayerId, u64)> {
        let layer = self.layer;
        (self.first_block..self.first_block + self.block_count).map(move |block| (layer, block))
    }
}
