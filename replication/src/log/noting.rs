//! Noting that the log's disk has failed, so that the next opening does not take what the page cache still shows for what
//! was acknowledged.
//!
//! Invariants:
//! - The note is made once, by the log thread, which holds no lock of others meanwhile: the disk may never answer.
//! - Closing waits for it, for a bounded time.

use super::{Inner, Log};
use crate::format::state::{self, LogState, Standing};
use crate::state_files::StateFiles;
use crate::tail::{note_failure_of, tell_unnoted};
use block::Error;
use parking_lot::{Condvar, Mutex};
use std::path::PathBuf;
use std::time::Duration;

/// How long closing waits for the note of a failure. Chosen by hand: a disk that has not written 4 KiB by then will
/// hardly do so.
const NOTE_WAIT: Duration = Duration::from_secs(5);

/// What is noted of a log beside its own directory, whose file system may be the one that fails.
#[derive(Clone, Debug, Default)]
pub struct LogNotes {
    /// Paths of files, best on another file system. They are made with the log and are needed as it is.
    pub beside: Vec<PathBuf>,
    /// What [`Log::failure_note`] gave an earlier process and was kept elsewhere.
    pub heard: Vec<Vec<u8>>,
}

/// What is noted of the log that is open.
pub(super) struct Noted {
    keeper: StateFiles,
    state: LogState,
    is_made: Mutex<bool>,
    made: Condvar,
}

impl Noted {
    pub(super) fn new(keeper: StateFiles, state: LogState) -> Noted {
        Noted { keeper, state, is_made: Mutex::new(false), made: Condvar::new() }
    }
}

impl Log {
    /// Why the log takes nothing more, where that is no orderly end. [`crate::is_log_failure`] tells a failure of its
    /// disk from a reason that [`Log::fail`] was given.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.inner.shared.failure().cloned()
    }

    /// Once the log's disk has failed: what an opening that cannot read this machine's notes should hear, see
    /// [`LogNotes::heard`].
    #[must_use]
    pub fn failure_note(&self) -> Option<Vec<u8>> {
        let acked = self.inner.shared.disk_failed_at()?;
        let standing = Standing::Failed { acked: Some(acked) };
        let bytes = state::encode(&LogState { standing, ..self.inner.noted.state });
        Some(bytes.get(..state::STATE_BYTES)?.to_vec())
    }
}

impl Inner {
    /// By the log thread only.
    pub(super) fn note_failure(&self) {
        let Some(acked) = self.shared.disk_failed_at() else { return };
        if *self.noted.is_made.lock() {
            return;
        }
        let Noted { keeper, state, is_made, made } = &self.noted;
        if let Err(error) = note_failure_of(state, acked, keeper, self.planted.failure_not_noted) {
            tell_unnoted(&error);
        }
        *is_made.lock() = true;
        made.notify_all();
    }

    /// Nothing is to be noted, or it was tried.
    pub(super) fn is_noted(&self) -> bool {
        self.shared.disk_failed_at().is_none() || *self.noted.is_made.lock()
    }

    pub(super) fn wait_noted(&self) {
        self.nudge();
        let mut is_made = self.noted.is_made.lock();
        if self.shared.disk_failed_at().is_some() {
            let is_waiting = |is_made: &mut bool| !*is_made;
            self.noted.made.wait_while_for(&mut is_made, is_waiting, NOTE_WAIT);
        }
    }
}
