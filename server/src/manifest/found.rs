//! What a directory held before a command looked at it, and leaving it so where the command was refused.
//!
//! Invariants:
//! - Only what this process has made is removed, and only while it has the lock: nobody uses it.
//! - Once a pool was opened from here, or tried to be, nothing is removed.

use super::{LOCK, NODE, NODE_COPY, NodeDir};
use std::path::Path;

/// What was there before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    is_dir: bool,
    is_lock: bool,
    is_identity: bool,
}

impl Found {
    pub(super) fn look(dir: &Path) -> Found {
        let has = |name: &str| dir.join(name).symlink_metadata().is_ok();
        Found { is_dir: dir.is_dir(), is_lock: has(LOCK), is_identity: has(NODE) || has(NODE_COPY) }
    }
}

impl Drop for NodeDir {
    fn drop(&mut self) {
        let file = self.file.lock();
        if self.found.is_identity || file.pool.is_some() || !file.attempts.is_empty() {
            return;
        }
        // What fails stays: it is of no use, and does no harm.
        for name in [NODE, NODE_COPY] {
            let _ = std::fs::remove_file(self.path.join(name));
        }
        if !self.found.is_lock {
            // Whoever waits for it looks again once it has it.
            let _ = std::fs::remove_file(self.path.join(LOCK));
        }
        if !self.found.is_dir {
            let _ = std::fs::remove_dir(&self.path); // only an empty one goes
        }
    }
}
