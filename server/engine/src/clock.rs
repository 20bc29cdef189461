//! The time of the wall clock, and how far deletions by age may rely on it.
//!
//! A wall clock jumps: a virtual machine is resumed, a battery is empty, someone sets another year. It is still good
//! enough for naming times. Data that is deleted because of its age is gone for good, so a deletion needs a second
//! opinion: the *proven* time. It advances with the kernel's steady clock, also across restarts of the daemon, and
//! follows the wall clock for as long as the two agree.
//!
//! Invariants:
//! - A deadline has passed only when both clocks say so, and a moment from which a later deletion counts is the later
//!   of both. A jump in either direction therefore deletes nothing early.
//! - After a jump the wall clock is believed again once it has run evenly for [`BELIEVED_AFTER`] while the pool was
//!   served. Otherwise a machine that was off for months would never delete anything again.
//! - [`FILE`] holds an observation, not state: without it, ages are proven later, never earlier.

use block::conditions::Report;
use block::env::Clock;
use block::quantities::utc;
use block::{ConditionKind, Conditions};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use uuid::Uuid;

/// The last run's observation, in the directory of the pool.
const FILE: &str = "clock.json";
const VERSION: u32 = 1;
/// Seconds by which two clocks may differ and still agree: the correction of a clock at a start, and the time between
/// two observations. Chosen by hand.
pub(crate) const AGREES_WITHIN: u64 = 300;
/// Seconds for which a clock that has jumped must run evenly before it is believed. Chosen by hand: a day, in which
/// someone reads the warnings of `status`.
const BELIEVED_AFTER: u64 = 24 * 3600;
/// Seconds between two observations that are saved. Chosen by hand: a loss of power hides the same time.
const SAVED_EVERY: u64 = 600;

/// A disagreement of the two clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Jump {
    /// Seconds by which the wall clock is ahead of the proven time.
    ahead_seconds: i64,
    /// Seconds for which it has been ahead by that amount.
    even_seconds: u64,
    /// The jump happened under observation. Otherwise the machine may just as well have been off.
    is_seen: bool,
}

/// The contents of [`FILE`].
#[derive(Debug, Serialize, Deserialize)]
struct Observation {
    version: u32,
    /// Boot id of the kernel that ran: its steady clock starts with it.
    boot: Uuid,
    steady_seconds: u64,
    proven_seconds: u64,
    jump: Option<Jump>,
}

#[derive(Debug)]
struct State {
    /// The proven time at the last observation.
    proven_seconds: u64,
    steady_seconds: u64,
    jump: Option<Jump>,
    saved_at: Option<u64>,
}

/// The readings of both clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Now {
    wall_seconds: u64,
    proven_seconds: u64,
}

/// A wall clock that is checked against the proven time; see the module.
pub struct ProvenClock {
    clock: Arc<dyn Clock>,
    boot: Uuid,
    path: Option<PathBuf>,
    conditions: Conditions,
    believed_after: u64,
    state: Mutex<State>,
}

impl ProvenClock {
    /// Opens the clock of a pool that is served in a directory. `newest_stamp` is the newest time that the pool's
    /// records name, in seconds since the Unix epoch. It is the only evidence if the directory has no observation.
    pub(crate) fn open(
        clock: Arc<dyn Clock>,
        dir: &Path,
        newest_stamp: u64,
        conditions: Conditions,
    ) -> ProvenClock {
        let boot = block::env::boot_id();
        let mut clock = Self::new(clock, boot, newest_stamp, Some(dir.join(FILE)));
        clock.conditions = conditions;
        clock.keep();
        clock
    }

    /// Like [`ProvenClock::open`], but for another boot. Observations are saved only if there is a path.
    pub(crate) fn new(
        clock: Arc<dyn Clock>,
        boot: Uuid,
        newest_stamp: u64,
        path: Option<PathBuf>,
    ) -> ProvenClock {
        let (wall, steady) = (clock.unix_seconds(), clock.uptime().as_secs());
        let seen = path.as_deref().and_then(read);
        let (proven_seconds, jump) = match &seen {
            Some(seen) => (proven_by(seen, boot, steady), seen.jump),
            // Records from a clock that was ahead prove nothing.
            None if newest_stamp == 0 || newest_stamp > wall => (wall, None),
            None => (newest_stamp, None),
        };
        let state = State { proven_seconds, steady_seconds: steady, jump, saved_at: None };
        let believed_after = match crate::seeded_bugs::seeded_bugs().clock_trusted {
            true => 0,
            false => BELIEVED_AFTER,
        };
        let (state, conditions) = (Mutex::new(state), Conditions::default());
        let clock = ProvenClock { clock, boot, path, conditions, believed_after, state };
        // A jump before this start was not observed, unless it happened during the life of this kernel or went back.
        let is_same_boot = seen.is_some_and(|seen| seen.boot == boot);
        clock.observe(is_same_boot || wall.saturating_add(AGREES_WITHIN) < proven_seconds);
        clock
    }

    /// The wall clock, in seconds since the Unix epoch. It serves to name times and to compare them with times that it
    /// named.
    pub(crate) fn wall(&self) -> u64 {
        self.clock.unix_seconds()
    }

    /// The moment from which a later deletion counts.
    pub(crate) fn stamp(&self) -> u64 {
        let now = self.observe(true);
        now.wall_seconds.max(now.proven_seconds)
    }

    /// Tells whether a deadline, in seconds since the Unix epoch, has passed.
    pub(crate) fn is_past(&self, deadline: u64) -> bool {
        let now = self.observe(true);
        now.wall_seconds.min(now.proven_seconds) >= deadline
    }

    /// Tells whether the wall clock agrees with the proven time, so that ages that others measure by it may count.
    pub(crate) fn is_even(&self) -> bool {
        self.observe(true);
        self.state.lock().jump.is_none()
    }

    /// Reads the clocks and from time to time saves an observation. Call this every minute or so.
    pub fn keep(&self) {
        self.observe(true);
        let state = self.state.lock();
        let steady = state.steady_seconds;
        let is_due = state.saved_at.is_none_or(|at| steady.saturating_sub(at) >= SAVED_EVERY);
        drop(state);
        if is_due {
            self.save();
        }
    }

    /// Saves an observation. After a failure the next call tries again.
    pub(crate) fn save(&self) {
        let Some(path) = &self.path else { return };
        let observation = {
            let mut state = self.state.lock();
            state.saved_at = Some(state.steady_seconds);
            Observation {
                version: VERSION,
                boot: self.boot,
                steady_seconds: state.steady_seconds,
                proven_seconds: state.proven_seconds,
                jump: state.jump,
            }
        };
        let Ok(text) = serde_json::to_string(&observation) else { return };
        // A loss of power may lose the file, which does no harm.
        let next = path.with_extension("json.tmp");
        let written = std::fs::write(&next, text).and_then(|()| std::fs::rename(&next, path));
        if let Err(error) = written {
            tracing::debug!(%error, "could not record the times of the clocks");
        }
    }

    /// Reads both clocks. `is_seen`: the clock has been watched without a gap since the last observation.
    fn observe(&self, is_seen: bool) -> Now {
        let mut state = self.state.lock();
        let (wall_seconds, steady) = (self.clock.unix_seconds(), self.clock.uptime().as_secs());
        let passed = steady.saturating_sub(state.steady_seconds);
        state.steady_seconds = steady;
        state.proven_seconds += passed;
        let ahead_seconds = difference(wall_seconds, state.proven_seconds);
        let was_jump = state.jump;
        state.jump = match state.jump {
            _ if ahead_seconds.unsigned_abs() <= AGREES_WITHIN => None,
            Some(jump) if is_close(jump.ahead_seconds, ahead_seconds) => {
                let even_seconds = jump.even_seconds.saturating_add(passed);
                (even_seconds < self.believed_after).then_some(Jump { even_seconds, ..jump })
            }
            _ => {
                let jump = Jump { ahead_seconds, even_seconds: 0, is_seen };
                (self.believed_after > 0).then_some(jump)
            }
        };
        if state.jump.is_none() {
            state.proven_seconds = wall_seconds;
        }
        let now = Now { wall_seconds, proven_seconds: state.proven_seconds };
        let jump = state.jump;
        drop(state);
        if jump != was_jump || jump.is_some() {
            let report = jump.filter(|jump| jump.is_seen).map(|jump| self.report(jump, now));
            self.conditions.set(ConditionKind::ClockJumped, "machine", report);
        }
        now
    }

    fn report(&self, jump: Jump, now: Now) -> Report {
        let way = if jump.ahead_seconds > 0 { "forward" } else { "back" };
        let by = span(jump.ahead_seconds.unsigned_abs());
        let (wall, proven) = (utc(now.wall_seconds), utc(now.proven_seconds));
        let left = span(self.believed_after.saturating_sub(jump.even_seconds));
        Report::new(
            format!(
                "the clock of this machine jumped {way} by {by}: it shows {wall}, but by the time \
                 that has passed it should show {proven}"
            ),
            "removed volumes are not purged, and clones are not removed by age, before their time has passed by both \
             clocks; names of scheduled snapshots follow the clock of the machine",
            format!(
                "check the time of this machine, for example with `timedatectl`; if the clock \
                 stays as it is, spindle accepts it in {left}"
            ),
        )
    }
}

/// The time that a run in this directory has proven, if the kernel of that run is still running: the time that has
/// passed since is known whatever happened to the wall clock. In seconds since the Unix epoch.
pub(crate) fn proven_in(clock: &dyn Clock, dir: &Path) -> Option<u64> {
    let boot = block::env::boot_id();
    let seen = read(&dir.join(FILE)).filter(|seen| seen.boot == boot)?;
    Some(proven_by(&seen, boot, clock.uptime().as_secs()))
}

fn read(path: &Path) -> Option<Observation> {
    let text = std::fs::read(path).ok()?;
    let seen: Observation = serde_json::from_slice(&text).ok()?;
    (seen.version == VERSION).then_some(seen)
}

fn proven_by(seen: &Observation, boot: Uuid, steady: u64) -> u64 {
    let passed = match seen.boot == boot {
        true => steady.saturating_sub(seen.steady_seconds),
        false => 0,
    };
    seen.proven_seconds.saturating_add(passed)
}

fn difference(a: u64, b: u64) -> i64 {
    let size = i64::try_from(a.abs_diff(b)).unwrap_or(i64::MAX);
    if a < b { -size } else { size }
}

fn is_close(a: i64, b: i64) -> bool {
    a.abs_diff(b) <= AGREES_WITHIN
}

/// A length of time in words.
fn span(seconds: u64) -> String {
    match seconds {
        0..7200 => format!("{} minutes", seconds.div_ceil(60)),
        7200..172_800 => format!("{} hours", seconds.div_ceil(3600)),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
pub(crate) mod tests;
