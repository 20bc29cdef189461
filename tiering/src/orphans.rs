//! Segments that nothing names: what a crash or a cancelled destage left in the store.
//!
//! Invariants:
//! - Deleted is only a segment of an epoch below ours that no segment record names, and what this
//!   process uploaded and knows that it never committed. The metadata database fenced the lower
//!   epochs before we opened it, so no record of theirs can appear any more.
//! - An object whose name is not that of a segment is left alone and counted.

use crate::segment::{FOLDER, SegmentId, SegmentNumber, parse_object_path};
use crate::tier::Inner;
use block::{Error, ErrorKind, Result};
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use parking_lot::Mutex;
use std::collections::VecDeque;

/// Abandoned uploads that are remembered; beyond it the oldest are left to the next epoch's sweep.
const ABANDONED_MAX: usize = 4096;

/// What a sweep found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Objects looked at.
    pub object_count: u64,
    /// Segments deleted.
    pub deleted_count: u64,
    /// Their size.
    pub deleted_bytes: u64,
    /// Objects among the segments that are none; left alone.
    pub foreign_count: u64,
}

/// Uploads of this process that no commit will name.
#[derive(Debug, Default)]
pub(crate) struct Orphans {
    abandoned: Mutex<VecDeque<Path>>,
}

impl Orphans {
    /// Remembers objects that may have been written and are not named by the map.
    pub(crate) fn abandon(&self, names: Vec<Path>) {
        let mut abandoned = self.abandoned.lock();
        abandoned.extend(names);
        let excess = abandoned.len().saturating_sub(ABANDONED_MAX);
        abandoned.drain(..excess);
    }
}

impl Inner {
    /// See [`crate::Tier::sweep_orphans`].
    pub(crate) async fn sweep_orphans(&self) -> Result<SweepReport> {
        let failed =
            |cause| Error::with_source(ErrorKind::Unavailable, "sweep orphan segments", cause);
        let mut report = SweepReport::default();
        let abandoned = std::mem::take(&mut *self.orphans.abandoned.lock());
        for path in abandoned {
            let Some((_, number, id)) = parse_object_path(&path) else { continue };
            if self.is_named(number, id).await? {
                tracing::error!(object = %path, "an abandoned upload is named by the map");
                continue;
            }
            let deleted = self.delete(&path).await;
            if let Err(cause) = deleted {
                self.orphans.abandon(vec![path]);
                return Err(failed(cause));
            }
            report.deleted_count += 1;
        }
        let mut listing = self.store.list(Some(&Path::from(FOLDER)));
        while let Some(found) = listing.try_next().await.map_err(failed)? {
            report.object_count += 1;
            let Some((epoch, number, id)) = parse_object_path(&found.location) else {
                report.foreign_count += 1;
                continue;
            };
            if epoch >= self.options.epoch || self.is_named(number, id).await? {
                continue;
            }
            self.delete(&found.location).await.map_err(failed)?;
            tracing::info!(object = %found.location, "deleted an orphan segment");
            report.deleted_count += 1;
            report.deleted_bytes += found.size;
        }
        Ok(report)
    }

    async fn is_named(&self, number: SegmentNumber, id: SegmentId) -> Result<bool> {
        Ok(self.map.find_segment(number.0).await?.is_some_and(|record| record.info.id == id))
    }

    async fn delete(&self, path: &Path) -> object_store::Result<()> {
        match self.store.delete(path).await {
            Err(object_store::Error::NotFound { .. }) => Ok(()),
            other => other,
        }
    }
}
