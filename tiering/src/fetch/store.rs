//! Ranged reads of segment objects: bounded, retried, and told apart into passing and final failures.
//!
//! Invariants:
//! - At most `read_count_max` requests are under way; who waits to try again holds no place.
//! - A read ends: with the bytes, with a final error, or when it has failed for too long.
//! - The bytes are exactly as many as were asked for; a body that ends early counts as a failed
//!   transfer. Whether they are the right ones, the caller finds out.

use super::FramesOptions;
use crate::outage::{Outage, StoreFailure, Way};
use crate::segment::SegmentInfo;
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use object_store::{ObjectStore, ObjectStoreExt};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// Wait before the second attempt; doubles from then on. Chosen by hand.
const BACKOFF_FIRST: Duration = Duration::from_millis(50);
/// Longest wait between two attempts: how late an outage's end is noticed. Chosen by hand.
const BACKOFF_MAX: Duration = Duration::from_secs(3);

/// See the module.
#[derive(Debug)]
pub struct StoreReader {
    store: Arc<dyn ObjectStore>,
    places: Semaphore,
    attempt_timeout: Duration,
    retry_duration_max: Duration,
    outage: Outage,
    /// Requests sent, of any outcome.
    pub request_count: AtomicU64,
    /// Requests that failed for a passing reason.
    pub retry_count: AtomicU64,
    /// Bytes that arrived.
    pub read_bytes: AtomicU64,
}

impl StoreReader {
    /// Reads through `store`, which is prefixed to the pool.
    #[must_use]
    pub fn new(store: Arc<dyn ObjectStore>, options: &FramesOptions) -> Self {
        StoreReader {
            store,
            places: Semaphore::new(options.store_read_count_max.max(1)),
            attempt_timeout: options.attempt_timeout,
            retry_duration_max: options.retry_duration_max,
            outage: Outage::new(Way::Read, options.conditions.clone()),
            request_count: AtomicU64::new(0),
            retry_count: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
        }
    }

    /// Bytes `range` of a segment's object.
    ///
    /// # Errors
    /// `NotFound` when there is no such object, `Corrupt` when it is not as long as `info` says,
    /// `Unavailable` when the store kept failing.
    pub async fn get(&self, info: &SegmentInfo, range: Range<u64>) -> Result<Bytes> {
        let started = Instant::now();
        let mut backoff = BACKOFF_FIRST;
        loop {
            let source = match self.attempt(info, range.clone()).await {
                Ok(bytes) => return Ok(self.accept(bytes)),
                Err(error) if is_final(&error) => return Err(final_error(info, error)),
                Err(error) => error,
            };
            self.retry_count.fetch_add(1, Ordering::Relaxed);
            if backoff == BACKOFF_FIRST {
                self.check_size(info).await?;
            }
            self.outage.note(&source);
            if started.elapsed() + backoff > self.retry_duration_max {
                let what = format!("read {info}: the object store does not answer");
                return Err(Error::with_source(ErrorKind::Unavailable, what, source));
            }
            tokio::time::sleep(jittered(backoff)).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }

    /// Why the last read failed for a passing reason, until one succeeds.
    #[must_use]
    pub fn failure(&self) -> Option<StoreFailure> {
        self.outage.status()
    }

    async fn attempt(
        &self,
        info: &SegmentInfo,
        range: Range<u64>,
    ) -> Result<Bytes, object_store::Error> {
        let _place = self.places.acquire().await.expect("never closed");
        self.request_count.fetch_add(1, Ordering::Relaxed);
        let path = info.object_path();
        let timeout = self.attempt_timeout + Duration::from_secs((range.end - range.start) >> 20);
        let wanted_bytes = range.end - range.start;
        let read = self.store.get_range(&path, range);
        let bytes = tokio::time::timeout(timeout, read).await.unwrap_or_else(|elapsed| {
            Err(object_store::Error::Generic { store: "timeout", source: Box::new(elapsed) })
        })?;
        if bytes.len() as u64 != wanted_bytes {
            let source = format!("{} bytes arrived instead of {wanted_bytes}", bytes.len()).into();
            return Err(object_store::Error::Generic { store: "short body", source });
        }
        Ok(bytes)
    }

    fn accept(&self, bytes: Bytes) -> Bytes {
        self.outage.clear();
        self.read_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        bytes
    }

    /// Stores report a range past the end in the same way as an outage: a cut object must not be
    /// waited for.
    async fn check_size(&self, info: &SegmentInfo) -> Result<()> {
        let path = info.object_path();
        let Ok(head) = tokio::time::timeout(self.attempt_timeout, self.store.head(&path)).await
        else {
            return Ok(());
        };
        match head {
            Ok(meta) if meta.size != u64::from(info.object_bytes) => {
                let size = meta.size;
                let what = format!("read {info}: {size} bytes instead of {}", info.object_bytes);
                Err(Error::new(ErrorKind::Corrupt, what))
            }
            Err(error) if is_final(&error) => Err(final_error(info, error)),
            Ok(_) | Err(_) => Ok(()),
        }
    }
}

/// Trying again cannot help. Refused credentials are not among these: they may be renewed, and a
/// read that waits harms less than a file system that was told of an I/O error.
fn is_final(error: &object_store::Error) -> bool {
    use object_store::Error as E;
    matches!(
        error,
        E::NotFound { .. }
            | E::InvalidPath { .. }
            | E::NotSupported { .. }
            | E::NotImplemented { .. }
    )
}

fn final_error(info: &SegmentInfo, error: object_store::Error) -> Error {
    match error {
        object_store::Error::NotFound { .. } => {
            let what = format!("read {info}: the object is not in the store");
            Error::with_source(ErrorKind::NotFound, what, error)
        }
        _ => Error::with_source(ErrorKind::Unsupported, format!("read {info}"), error),
    }
}

/// Between half and all of `backoff`, so that many readers do not come back at the same instant.
fn jittered(backoff: Duration) -> Duration {
    use std::hash::{BuildHasher, RandomState};
    let random = RandomState::new().hash_one(0u8) % 512;
    backoff / 2 + backoff / 1024 * u32::try_from(random).expect("below 512")
}
