//! The room of the stores, as they last told it: it decides how much of its share a store gets, and a store that is nearly
//! full, or whose drive wears out, is shown.
//!
//! Invariants:
//! - The stores are asked by the look from time to time, never by a request that waits for the answer.
//! - A store that has told nothing has room.

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
    pub(super) is_nearly_full: bool,
    /// When it was last asked.
    pub(super) asked_at: Option<Instant>,
}

impl Told {
    /// Notes an answer.
    pub(super) fn note(&mut self, room: Option<Room>) {
        let before = self.room.as_ref().map(|_| self.level);
        self.level = room.as_ref().map(|room| Level::after(before, room)).unwrap_or_default();
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
