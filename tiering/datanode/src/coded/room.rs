//! The room of the stores, as they last told it: it decides how much of its share a store gets, and a store that is nearly
//! full, or whose drive wears out, is shown.
//!
//! Invariants:
//! - The stores are asked by the look from time to time, never by a request that waits for the answer.
//! - A store that has told nothing has room.
//! - No store gets a larger part of its share while a rebalance is under way.

use super::CodedSegments;
use crate::fragment_store::Room;
use crate::placing::Level;
use block::ConditionKind;
use block::conditions::Report;
use block::quantities::ByteSize;
use std::time::Instant;

/// Hundredths of a store below which it is nearly full, and from which it is not any more. Chosen by hand: time is left to
/// add a store, and a deletion does not end the condition for a moment.
const NEARLY_FULL: u64 = 5;
const NOT_FULL: u64 = 6;

/// What a store has told of its room.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) room: Option<Room>,
    /// The part of its share that this leaves.
    pub(super) level: Level,
    /// The level follows from what the store has told, so that it may not rise at any time.
    is_told: bool,
    pub(super) is_nearly_full: bool,
    /// When it was last asked.
    pub(super) asked_at: Option<Instant>,
}

impl Told {
    /// Notes an answer. Unless the level may rise, it stays or falls.
    pub(super) fn note(&mut self, room: Option<Room>, may_rise: bool) {
        let before = self.is_told.then_some(self.level);
        self.level = Level::told(before, room.as_ref(), may_rise);
        self.is_told = room.is_some() || (self.is_told && !may_rise);
        let percent = if self.is_nearly_full { NOT_FULL } else { NEARLY_FULL };
        self.is_nearly_full =
            room.as_ref().is_some_and(|room| room.free_bytes < room.total_bytes / 100 * percent);
        self.room = room;
    }
}

impl CodedSegments {
    /// Shows the stores that are nearly full, and those whose drives wear out, as conditions. To be called every few
    /// seconds.
    pub(super) fn show_rooms(&self) {
        for member in self.in_list() {
            let room = member.room().unwrap_or_default();
            let size = |bytes: u64| ByteSize(bytes).rounded();
            let full = member.is_nearly_full().then(|| {
                let (free, total) = (size(room.free_bytes), size(room.total_bytes));
                Report::new(
                    format!("the data store {} is nearly full: {free} of {total} are free", member.name),
                    "new fragments go to other stores while these have room. Once too few stores take any, destage waits, \
                     and writers when the log is full",
                    "add data stores, and move fragments there with `spindle data rebalance`, or make room on its file system",
                )
            });
            let wearing = room.wear.map(|why| {
                Report::new(
                    format!("the drive of the data store {} is wearing out: {why}", member.name),
                    "none yet, but the drive may fail soon, and segments then lack its fragments until these are rebuilt",
                    "replace it while it can be read, with `spindle data replace`",
                )
            });
            for (kind, report) in
                [(ConditionKind::DataStoreFull, full), (ConditionKind::DataStoreWearing, wearing)]
            {
                let report = report.filter(|_| !member.is_forgotten());
                self.conditions.set(kind, &member.name, report);
            }
        }
    }
}
