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

mod look;
mod moves;
mod recount;
mod referenced;
mod rewrite;
mod victims;

use crate::fail_point;
use crate::map::records::SegmentRecord;
use crate::map::space::{self, Space};
use crate::map::{LayerId, Placed};
use crate::segment::BLOCK_COUNT_MAX;
use crate::tier::Inner;
use block::conditions::Report;
use block::units::BLOCK_BYTES;
use block::{ConditionKind, Conditions, Error, ErrorKind, Result};
use parking_lot::Mutex;
use recount::{Recount, Recounted};
use std::collections::{HashMap, HashSet};
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
/// For so long a segment is passed over that took too long to look into. Chosen by hand.
const POSTPONED_TIME: Duration = Duration::from_secs(600);
/// Size of the new segments before compression, at most. Chosen by hand: two of them are in memory.
pub const SEGMENT_BYTES_MAX: usize = 8 << 20;
/// Memory that reclaim takes at most, beside twice a segment's, up to [`SEGMENT_BYTES_MAX`] each.
pub const READ_BYTES_MAX: u64 =
    (FRAMES_AT_ONCE * READS_AT_ONCE * BLOCK_COUNT_MAX as usize * BLOCK) as u64;
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
    /// The newest of them, and what is wrong with it.
    stuck_why: String,
    /// Segments that could not be read while others could: left alone for as long as that lasts.
    unreadable: HashSet<u64>,
    /// The segment that is being looked into.
    looking: Option<u64>,
    /// Segments that took too long to look into, and when.
    postponed: HashMap<u64, Instant>,
    /// Segments that are named more often than they have blocks, the one that is named most last.
    crowded: Vec<SegmentRecord>,
    /// The one whose pages are being looked at.
    recount: Option<Recount>,
    /// Those whose pages were.
    recounted: HashMap<u64, Recounted>,
}

/// Reclaim of a tier.
#[derive(Debug, Default)]
pub(crate) struct Reclaim {
    turn: tokio::sync::Mutex<()>,
    state: Mutex<State>,
    counters: Counters,
    conditions: Conditions,
}

impl Reclaim {
    pub(crate) fn new(conditions: Conditions) -> Reclaim {
        Reclaim { conditions, ..Reclaim::default() }
    }

    /// `may_be_well`: of a stuck one that counts as dead by now, what was wrong with it may be over. `is_unreadable`: it
    /// still cannot be read.
    fn next_victim(
        &self,
        may_be_well: impl Fn(&SegmentRecord) -> bool,
        is_unreadable: impl Fn(&SegmentRecord) -> bool,
    ) -> Option<Victim> {
        let mut state = self.state.lock();
        loop {
            let victim = state.victims.pop()?;
            let number = victim.record.info.number.0;
            let is_postponed =
                state.postponed.get(&number).is_some_and(|at| at.elapsed() < POSTPONED_TIME);
            let is_stuck =
                state.stuck.contains(&number) && (victim.live > 0 || !may_be_well(&victim.record));
            let is_unreadable = state.unreadable.contains(&number) && is_unreadable(&victim.record);
            if !is_postponed && !is_stuck && !is_unreadable {
                state.unreadable.remove(&number);
                return Some(victim);
            }
        }
    }

    /// Nothing is wrong with this segment any more: the next pass may take it.
    pub(crate) fn note_well(&self, number: u64) {
        let mut state = self.state.lock();
        let was_unreadable = state.unreadable.remove(&number);
        state.is_pass_wanted |= was_unreadable;
        if state.stuck.remove(&number) {
            self.show_stuck(&state);
        }
    }

    /// The condition follows the list. Its lock is held, so that an earlier list is never shown after a later one.
    fn show_stuck(&self, state: &State) {
        let report = (!state.stuck.is_empty()).then(|| {
            let count = state.stuck.len();
            let (noun, them) = if count == 1 { ("segment", "it") } else { ("segments", "them") };
            Report::new(
                format!(
                    "{count} {noun} cannot be reclaimed, because something in {them} is damaged; the latest: {}",
                    state.stuck_why
                ),
                "their space in the store does not come back; what of them can be read is served",
                "`spindle fsck` says what is wrong",
            )
        });
        self.conditions.set(ConditionKind::ReclaimBlocked, "pool", report);
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
            stuck_count: {
                let state = self.reclaim.state.lock();
                (state.stuck.len() + state.unreadable.len()) as u64
            },
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
            Ok(victims) if victims.is_empty() => return self.recount_step().await,
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
        let has_dedup = self.map.has_dedup();
        for (record, live) in &found {
            let number = record.info.number.0;
            let places = state.live_places(number, *live);
            pass.add(record, places, *live, next_segment);
            let is_full = worth(record, places, next_segment).is_none();
            if has_dedup && is_full && state.is_recount_due(number, *live) {
                pass.add_crowded(record, *live);
            }
        }
        if let Some(next) = next {
            pass.last = next;
            state.pass = Some(pass);
            return Ok(());
        }
        self.map.space.end_pass(pass.space);
        state.crowded = pass.end_crowded();
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
        // It was missing on purpose, or volumes went with their key.
        let may_be_well = |record: &SegmentRecord| {
            let info = &record.info;
            self.may_be_left_out(info.number.0) || !self.options.volume_keys.has(info.key)
        };
        let is_unreadable = |record: &SegmentRecord| self.frames.store().is_judged(&record.info);
        while let Some(victim) = self.reclaim.next_victim(may_be_well, is_unreadable) {
            let number = victim.record.info.number.0;
            // What was counted in the pass may have changed.
            let live = self.map.live_blocks(number).await?;
            let live = self.reclaim.state.lock().live_places(number, live);
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
            self.reclaim.note_well(record.info.number.0);
        }
        let counters = &self.reclaim.counters;
        counters.forgotten_count.fetch_add(report.forgotten_count, Ordering::Relaxed);
        counters.forgotten_bytes.fetch_add(report.forgotten_bytes, Ordering::Relaxed);
        counters.moved_block_count.fetch_add(report.moved_block_count, Ordering::Relaxed);
        counters.written_bytes.fetch_add(report.written_bytes, Ordering::Relaxed);
        Ok(report)
    }

    /// A segment that is damaged is left alone until the next start, and one that cannot be read while others can, as long
    /// as that lasts; what does not answer ends the step.
    fn leave_alone(&self, record: &SegmentRecord, error: Error) -> Result<()> {
        if error.kind() == ErrorKind::Unreadable {
            let mut state = self.reclaim.state.lock();
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
        let mut state = self.reclaim.state.lock();
        let is_known = state.stuck.contains(&record.info.number.0);
        if state.stuck.len() < STUCK_MAX && state.stuck.insert(record.info.number.0) {
            state.stuck_why = format!("segment {}: {}", record.info.number.0, error.chain());
            self.reclaim.show_stuck(&state);
        }
        drop(state);
        if !is_known {
            tracing::info!(
                segment = record.info.number.0, error = %error.chain(),
                "a segment is left alone by reclaim"
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
