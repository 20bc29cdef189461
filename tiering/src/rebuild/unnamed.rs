//! Fragments that no record names, of segments that exist: they moved or were dropped while their store was away, or
//! their owner ended before it deleted them.
//!
//! Invariants:
//! - A fragment is deleted only while no job changes where its segment is, if the record does not name it then, and if
//!   none of its generation will be written: a deletion that is late must not find what the next attempt has written.
//! - Fragments that readers and copies of before may still need stay, like those that have just moved.
//! - Fragments of segments without a record are left to the sweep of orphans.

use super::Rebuild;
use crate::segment::Placement;
use crate::segment_store::StoredFragment;
use block::{Error, ErrorKind, Result};
use futures::TryStreamExt;

impl Rebuild {
    /// Deletes the fragments that no record names, of segments that exist. Returns their number.
    ///
    /// # Errors
    /// `Unavailable` if a listing ends early; `Fenced` when another process owns the pool; database errors.
    pub(crate) async fn sweep_unnamed(&self) -> Result<u64> {
        let mut listing = self.segments.store.list_fragments(None);
        let failed = |cause| {
            Error::with_source(
                ErrorKind::Unavailable,
                "list the fragments of the data stores",
                cause,
            )
        };
        let mut deleted_count = 0;
        while let Some(found) = listing.try_next().await.map_err(failed)? {
            let record = match self.metadata.map.find_segment(found.segment.number.0).await {
                // `fsck` reports it.
                Err(error) if error.kind() == ErrorKind::Corrupt => continue,
                record => record?,
            };
            let is_needless = record.is_some_and(|record| {
                record.info.id == found.segment.id && !names(&record.placement, &found)
            });
            if !is_needless {
                continue;
            }
            if deleted_count == 0 {
                self.pool.check_owner().await?;
            }
            deleted_count += u64::from(self.delete_if_unnamed(&found).await?);
        }
        Ok(deleted_count)
    }

    async fn delete_if_unnamed(&self, found: &StoredFragment) -> Result<bool> {
        let number = found.segment.number;
        let _turn = self.turn(number).await;
        let is_leaving = self.moved.lock().iter().any(|moved| moved.segment.info.number == number);
        if is_leaving || self.segments.leftovers.is_held(number) {
            return Ok(false);
        }
        let current = match self.current(number).await {
            Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(false),
            current => current?,
        };
        let Some(current) = current else { return Ok(false) };
        let newest = match &current.placement {
            // That of an attempt to bring it back is higher.
            Placement::Object => self.metadata.writer.lock().await.root().commit_number,
            Placement::Fragments(fragments) => {
                fragments.places.iter().map(|place| place.generation).max().unwrap_or(0)
            }
        };
        let is_unnamed = current.info.id == found.segment.id && !names(&current.placement, found);
        if !is_unnamed || found.place.generation > newest {
            return Ok(false);
        }
        match self.segments.store.delete_fragment(found).await {
            Ok(()) => Ok(true),
            Err(error) => {
                tracing::debug!(segment = %found.segment, %error, "could not delete a fragment");
                Ok(false)
            }
        }
    }
}

fn names(placement: &Placement, found: &StoredFragment) -> bool {
    match placement {
        Placement::Object => false,
        Placement::Fragments(fragments) => {
            fragments.places.get(usize::from(found.index)) == Some(&found.place)
        }
    }
}
