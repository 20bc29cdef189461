//! The pool as its jobs share it: identity and keys, and the rights of this process.
//!
//! Invariants:
//! - Only the owner of the pool writes, and it asks whether it still is the owner before it deletes
//!   anything.
//!
//! [`Metadata`] is the map and its single writer, [`Segments`] the stored data, and [`Exclusions`]
//! the segments that are missing on purpose. A job takes those of them that it needs. None of them
//! knows a job.

mod exclusions;
mod metadata;
mod read_times;
mod segments;

pub use exclusions::Excluded;
pub(crate) use exclusions::Exclusions;
pub(crate) use metadata::Metadata;
pub(crate) use read_times::ReadTimes;
pub(crate) use segments::Segments;

use crate::keys::VolumeKeys;
use crate::seeded_bugs::SeededBugs;
use crate::segment::SegmentInfo;
use crate::segment::read::check_object;
use block::env::Clock;
use block::seal::PoolKey;
use block::{Conditions, Epoch, Error, ErrorKind, Result};
use bytes::Bytes;
use futures::future::BoxFuture;
use std::sync::Arc;
use tokio::runtime::Handle;

/// Asks the authority that grants ownership of the pool whether this process still owns it.
#[derive(Clone)]
pub struct OwnerCheck(Arc<dyn Fn() -> BoxFuture<'static, Result<()>> + Send + Sync>);

impl OwnerCheck {
    /// `check` returns `Fenced` when another owner has taken the pool, and any other error when the
    /// owner is unknown. A new owner must be visible to `check` before it opens the tier.
    pub fn new(check: impl Fn() -> BoxFuture<'static, Result<()>> + Send + Sync + 'static) -> Self {
        OwnerCheck(Arc::new(check))
    }

    pub(crate) async fn ask(&self) -> Result<()> {
        (self.0)().await
    }
}

impl std::fmt::Debug for OwnerCheck {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OwnerCheck")
    }
}

/// The parts that most jobs need.
#[derive(Clone)]
pub(crate) struct JobParts {
    pub pool: Arc<Pool>,
    pub metadata: Arc<Metadata>,
    pub segments: Arc<Segments>,
}

/// Identity and keys of the pool, and the rights of this process.
pub(crate) struct Pool {
    /// Identity of the pool.
    pub id: [u8; 16],
    /// Root key of the pool.
    pub key: PoolKey,
    /// Keys of volumes that are present now.
    pub volume_keys: VolumeKeys,
    /// Epoch of this owner.
    pub epoch: Epoch,
    /// Whether it is open without ownership.
    pub is_read_only: bool,
    pub owner_check: Option<OwnerCheck>,
    /// Registry of lasting conditions.
    pub conditions: Conditions,
    pub clock: Arc<dyn Clock>,
    /// Runtime of background work.
    pub background: Handle,
    pub seeded_bugs: SeededBugs,
}

impl Pool {
    /// Fails if the pool is open for reading only.
    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.is_read_only {
            let what = "the data tier is open for reading only";
            return Err(Error::new(ErrorKind::Denied, what));
        }
        Ok(())
    }

    /// Fails if this process no longer owns the pool: an owner of the past that resumes must not
    /// delete objects that the present one references.
    pub(crate) async fn check_owner(&self) -> Result<()> {
        match &self.owner_check {
            Some(check) => check.ask().await,
            None => Ok(()),
        }
    }

    /// Verifies the bytes of a segment. Returns a description of the damage, if any.
    pub(crate) async fn verify(
        &self,
        info: &SegmentInfo,
        object: &Bytes,
    ) -> Result<Option<String>> {
        let (key, object, info, pool) = (self.key.clone(), object.clone(), *info, self.id);
        let volume_keys = self.volume_keys.clone();
        let check = move || match check_object(&key, &volume_keys, &object) {
            Ok(found) if found.directory.info != info || found.directory.pool != pool => {
                Some("it is another one".to_owned())
            }
            Ok(found) => found.damage(),
            Err(error) => Some(error.to_string()),
        };
        let checked = tokio::task::spawn_blocking(check).await;
        checked.map_err(|cause| Error::with_source(ErrorKind::Io, "verify a segment", cause))
    }
}
