//! Records that the log's disk has failed, so that the next open does not mistake the remaining
//! contents of the page cache for the acknowledged entries.
//!
//! Invariants:
//! - The note is made once, by the log thread, which holds no shared lock meanwhile: the disk may
//!   never answer.
//! - Closing waits for the note, for a bounded time.

use super::{Log, LogInner};
use crate::disk::state_files::StateKeeper;
use crate::format::state::{self, LogState, Standing};
use crate::ring::tail::{note_failure_of, warn_unnoted};
use block::Error;
use parking_lot::{Condvar, Mutex};
use std::path::PathBuf;
use std::time::Duration;

/// Longest time that closing waits for the note of a failure. Chosen by hand: a disk that has not
/// written 4 KiB by then will hardly do so.
const NOTE_WAIT: Duration = Duration::from_secs(5);

/// Notes about a log outside its own directory, whose file system may be the one that fails.
#[derive(Clone, Debug, Default)]
pub struct LogNotes {
    /// Paths of files, preferably on another file system. They are created with the log and must be
    /// kept like it.
    pub beside: Vec<PathBuf>,
    /// Notes that an earlier process got from [`Log::failure_note`] and kept elsewhere.
    pub heard: Vec<Vec<u8>>,
}

/// The state and the note of the open log.
pub(super) struct Noted {
    keeper: Box<dyn StateKeeper>,
    state: LogState,
    is_made: Mutex<bool>,
    made: Condvar,
}

impl Noted {
    pub(super) fn new(keeper: Box<dyn StateKeeper>, state: LogState) -> Noted {
        Noted { keeper, state, is_made: Mutex::new(false), made: Condvar::new() }
    }
}

impl Log {
    /// Returns the reason why the log takes nothing more, unless it was closed in order.
    /// [`crate::is_log_failure`] tells a failure of its disk from a reason given to [`Log::fail`].
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.inner.shared.failure().cloned()
    }

    /// Returns a note once the log's disk has failed. Pass it to an open that cannot read this
    /// machine's notes, see [`LogNotes::heard`].
    #[must_use]
    pub fn failure_note(&self) -> Option<Vec<u8>> {
        let acked = self.inner.shared.disk_failed_at()?;
        let standing = Standing::Failed { acked: Some(acked) };
        let bytes = state::encode(&LogState { standing, ..self.inner.noted.state });
        Some(bytes.get(..state::STATE_BYTES)?.to_vec())
    }
}

impl LogInner {
    /// Makes the note if the disk has failed. Called by the log thread only.
    pub(super) fn note_failure(&self) {
        let Some(acked) = self.shared.disk_failed_at() else { return };
        if *self.noted.is_made.lock() {
            return;
        }
        let Noted { keeper, state, is_made, made } = &self.noted;
        if let Err(error) =
            note_failure_of(state, acked, &**keeper, self.seeded_bugs.failure_not_noted)
        {
            warn_unnoted(&error);
        }
        *is_made.lock() = true;
        made.notify_all();
    }

    /// Returns whether there is nothing to note or the attempt was made.
    pub(super) fn is_noted(&self) -> bool {
        self.shared.disk_failed_at().is_none() || *self.noted.is_made.lock()
    }

    pub(super) fn wait_noted(&self) {
        if block::simulated::simulated().is_some() {
            return self.note_failure();
        }
        self.thread.nudge();
        let mut is_made = self.noted.is_made.lock();
        if self.shared.disk_failed_at().is_some() {
            let is_waiting = |is_made: &mut bool| !*is_made;
            self.noted.made.wait_while_for(&mut is_made, is_waiting, NOTE_WAIT);
        }
    }
}
