//! Requests about the restore that made the pool.

use super::AdminPool;
use api::Reply;
use api::restore::{RestoreInfo, RestoreRequest};
use block::{Error, ErrorKind, Result};
use engine::open_pool::OpenPool;
use engine::restore::Restored;

impl AdminPool {
    pub(super) fn restore(&self, open: &OpenPool, request: RestoreRequest) -> Result<Reply> {
        let RestoreRequest::GiveUpMissing {} = request;
        let restored = open.restored.as_ref().filter(|_| !*open.is_complete.borrow());
        let Some(restored) = restored.filter(|_| !self.is_offline) else {
            let what = "give up missing segments: no daemon is fetching this pool from a copy";
            return Err(Error::new(ErrorKind::Invalid, what));
        };
        Ok(Reply::Done { message: restored.give_up_missing(open.pool.tier())? })
    }
}

/// Report on a restore. `is_complete`: the pool has everything that the copy has.
pub(super) fn restore_info(restored: &Restored, is_complete: bool) -> RestoreInfo {
    let (origin, counts) = (&restored.origin, restored.counts());
    RestoreInfo {
        url: origin.url.clone(),
        recovery_point: origin.state.number,
        as_of: origin.state.as_of,
        is_complete,
        left_bytes: counts.left_bytes,
        done_bytes: counts.done_bytes,
        left_seconds: counts.left_seconds,
        bad_count: counts.bad_count.max(origin.lost_count),
    }
}
