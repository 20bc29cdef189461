//! Objects that later states have replaced. Each pass records them, and they are deleted in the
//! copy a while after a state without them was published.

use super::transfer::target_error;
use super::{Copier, damaged_path, path_of};
use crate::map::database;
use async_recursion::async_recursion;
use block::Result;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Maximum number of replaced objects that are remembered. Beyond it the oldest are left to the
/// listing of the next start. Chosen by hand: 25 MiB of names, while a reader keeps them.
const DOOMED_MAX: usize = 250_000;
/// Maximum number of objects that one call deletes. Chosen by hand, so that the caller can be
/// stopped.
const DELETES_MAX: usize = 256;

/// Failed deletions after which a call ends. Chosen by hand.
const FAILED_MAX: usize = 3;

/// An object that is no longer needed.
#[derive(Debug)]
pub(super) struct Doomed {
    path: Path,
    /// The first published state that does not reference it.
    since_state: u64,
    since: Instant,
}

/// Objects that a pass has found to be replaced, held until its state is published.
#[derive(Debug, Default)]
pub(super) struct Replaced {
    pub commit_number: u64,
    pub segments: Vec<u64>,
    pub tables: BTreeSet<Path>,
    pub manifests: BTreeSet<u64>,
    /// Other objects of the copy's folders, from the listing.
    pub strays: Vec<Path>,
}

impl Copier {
    /// Marks the state of the last pass as published, with the number `state`. Objects that it does
    /// not reference will be deleted in the copy.
    pub fn published(&mut self, state: u64) {
        let Some(replaced) = self.replaced.take() else { return };
        let Replaced { commit_number, segments, tables, manifests, strays } = replaced;
        self.last_commit = Some(commit_number);
        let mut paths = strays;
        for number in segments {
            paths.extend(self.segments.remove(&number).map(|held| path_of(number, held)));
            if self.bad.remove(&number).is_some() {
                paths.push(damaged_path(number));
            }
        }
        for path in tables {
            self.tables.remove(&path);
            paths.push(path);
        }
        for number in manifests {
            self.manifests.remove(&number);
            paths.push(database::manifest_path(number));
        }
        let since = self.source.pool.clock.now();
        let doomed = paths.into_iter().map(|path| Doomed { path, since_state: state, since });
        self.doomed.extend(doomed);
        let excess = self.doomed.len().saturating_sub(DOOMED_MAX);
        self.doomed.drain(..excess);
        self.progress.waiting_count.store(self.doomed.len() as u64, Ordering::Relaxed);
    }

    /// Deletes some of the objects that no published state has referenced for the grace period and
    /// that no pin keeps. `pinned` is the oldest state that a reader uses. Call it only while the
    /// copy is known to belong to this pool.
    ///
    /// # Errors
    /// `Unavailable` or `Denied`; the remaining objects are deleted later. `Fenced` when another
    /// process owns the pool.
    #[async_recursion]
    pub async fn collect(&mut self, pinned: Option<u64>) -> Result<u64> {
        let is_pin_ignored = self.source.pool.seeded_bugs.pin_ignored;
        let now = self.source.pool.clock.now();
        let is_free = |doomed: &Doomed| {
            now.saturating_duration_since(doomed.since) >= self.options.grace
                && (is_pin_ignored || pinned.is_none_or(|pinned| pinned >= doomed.since_state))
        };
        // In the order in which they were replaced, so that no free object is behind one that is
        // not.
        let count = self.doomed.iter().take_while(|doomed| is_free(doomed)).count();
        if count == 0 {
            return Ok(0);
        }
        self.source.pool.check_owner().await?;
        let (mut done, mut failed) = (0, Vec::new());
        for _ in 0..count.min(DELETES_MAX) {
            let Some(doomed) = self.doomed.pop_front() else { break };
            match self.target.delete(&doomed.path).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => {
                    done += 1;
                    self.progress.deleted_count.fetch_add(1, Ordering::Relaxed);
                }
                Err(cause) => {
                    let what = format!("delete {} in the copy", doomed.path);
                    failed.push((doomed, target_error(what, cause)));
                    if failed.len() >= FAILED_MAX {
                        break; // the copy refuses, or is unreachable
                    }
                }
            }
        }
        // Objects that cannot be deleted must not delay the others.
        let mut first = None;
        for (doomed, error) in failed {
            self.doomed.push_back(doomed);
            first.get_or_insert(error);
        }
        self.progress.waiting_count.store(self.doomed.len() as u64, Ordering::Relaxed);
        first.map_or(Ok(done), Err)
    }
}
