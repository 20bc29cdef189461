//! Transfers objects between stores: a few at a time, large ones in parts, and within the requested
//! rate.

use crate::places::{OBJECTS_AT_ONCE, Places};
use block::env::Clock;
use block::{Error, ErrorKind, Result};
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, WriteMultipart};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Larger objects are copied in parts of this size. Chosen by hand: no smaller than stores require
/// parts to be.
const PART_BYTES: usize = 8 << 20;

/// An object to copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Object<'a> {
    pub path: &'a Path,
    /// Its size.
    pub bytes: u64,
}

/// Copies an object. A large object is copied in parts, because a long request
/// that waits for its turn in the middle would time out.
pub(super) async fn copy_parts(
    from: &Arc<dyn ObjectStore>,
    to: &Arc<dyn ObjectStore>,
    object: Object<'_>,
    pace: &Pace,
    places: &Places,
) -> Result<()> {
    let Object { path, bytes } = object;
    let failed = |cause| target_error(format!("copy {path}"), cause);
    let read = async |range: Range<u64>| {
        let piece = from.get_range(path, range.clone()).await;
        let piece = piece.map_err(|cause| source_error(path, cause))?;
        check_length(path, piece.len() as u64, range.end - range.start)?;
        Ok::<_, Error>(piece)
    };
    let part_bytes = PART_BYTES as u64;
    if bytes <= part_bytes {
        pace.wait(bytes).await;
        let whole = async { to.put(path, read(0..bytes).await?.into()).await.map_err(failed) };
        return places.with(whole).await.map(drop);
    }
    let upload = to.put_multipart(path).await.map_err(failed)?;
    let mut parts = WriteMultipart::new_with_chunk_size(upload, PART_BYTES);
    for start in (0..bytes).step_by(PART_BYTES) {
        let range = start..bytes.min(start + part_bytes);
        pace.wait(range.end - range.start).await;
        let next = async {
            let piece = read(range).await?;
            parts.wait_for_capacity(1).await.map_err(failed)?;
            Ok(piece)
        };
        match places.with(next).await {
            Ok(piece) => parts.put(piece),
            Err(error) => {
                // The store cleans up the remaining parts.
                let _ = parts.abort().await;
                return Err(error);
            }
        }
    }
    parts.finish().await.map(drop).map_err(failed)
}

/// Applies `of` to each element, a few at a time. Returns the results up to the first failure, and
/// that failure.
pub(super) async fn each<A, B, F>(all: Vec<A>, of: impl Fn(A) -> F) -> (Vec<B>, Result<()>)
where
    F: Future<Output = Result<B>>,
{
    let mut done = Vec::with_capacity(all.len());
    let mut running = futures::stream::iter(all).map(of).buffer_unordered(OBJECTS_AT_ONCE);
    loop {
        match running.try_next().await {
            Ok(Some(one)) => done.push(one),
            Ok(None) => return (done, Ok(())),
            Err(error) => return (done, Err(error)),
        }
    }
}

pub(super) fn check_length(path: &Path, read: u64, said: u64) -> Result<()> {
    if read == said {
        return Ok(());
    }
    let what = format!("copy {path}: {read} bytes came of {said}");
    Err(Error::new(ErrorKind::Unavailable, what))
}

pub(super) fn source_error(path: &Path, cause: object_store::Error) -> Error {
    Error::with_source(ErrorKind::Unavailable, format!("copy {path}: read it"), cause)
}

pub(super) fn target_error(doing: impl Into<String>, cause: object_store::Error) -> Error {
    let kind = match cause {
        object_store::Error::PermissionDenied { .. }
        | object_store::Error::Unauthenticated { .. } => ErrorKind::Denied,
        _ => ErrorKind::Unavailable,
    };
    Error::with_source(kind, doing, cause)
}

/// Limits the transfer rate.
#[derive(Debug)]
pub(super) struct Pace {
    /// Bytes per second.
    rate: Option<u64>,
    free_at: Mutex<Instant>,
    clock: Arc<dyn Clock>,
}

impl Pace {
    pub(super) fn new(rate: Option<u64>, clock: Arc<dyn Clock>) -> Pace {
        Pace { rate, free_at: Mutex::new(clock.now()), clock }
    }

    /// Waits until this many bytes may be sent.
    pub(super) async fn wait(&self, bytes: u64) {
        let Some(rate) = self.rate else { return };
        let pause = {
            let (mut free_at, now) = (self.free_at.lock(), self.clock.now());
            let at = (*free_at).max(now);
            *free_at = at + Duration::from_secs_f64(bytes as f64 / rate as f64);
            at - now
        };
        tokio::time::sleep(pause).await;
    }
}
