//! Reading frames from the NVMe cache.
//!
//! Invariants:
//! - A copy that does not verify is dropped and counts as not found.
//! - A frame that the kernel holds in memory is read without a change of thread. Other frames are
//!   read and opened on blocking threads, of which a bounded number is busy.

use super::memory::key_of;
use super::{Access, INLINE_BYTES_MAX, Inner};
use crate::cache::{AlignedBuffer, Found, Place};
use crate::segment::FrameRef;
use bytes::Bytes;
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Maximum number of concurrent blocking reads. Chosen by hand: the queue depth at which NVMe
/// drives level out. Each read holds a buffer of up to [`RUN_BYTES_MAX`].
pub(super) const DISK_READ_COUNT_MAX: usize = 64;
/// Longest read. Several reads run concurrently, so that several threads open the frames of a large
/// request.
const RUN_BYTES_MAX: u64 = 256 << 10;
/// Frames closer together than this are read in one go. Chosen by hand: one block.
const GAP_BYTES_MAX: u64 = 4096;

thread_local! {
    static BUFFER: RefCell<AlignedBuffer> = RefCell::default();
}

/// Frames that are read from the file in one go. `n` is the frame's position in the request.
#[derive(Debug)]
struct Run {
    place: Place,
    bytes: u64,
    frames: Vec<(usize, Place, FrameRef)>,
}

type Opened = Vec<(usize, Bytes)>;

impl Inner {
    /// Fills `found[n]` for each `n` in `wanted` whose frame is in the NVMe cache. For background
    /// reads, nothing is opened on the calling thread.
    pub(super) async fn read_local(
        self: &Arc<Self>,
        frames: &[FrameRef],
        wanted: &[usize],
        found: &mut [Option<Bytes>],
        access: Access,
        is_background: bool,
    ) {
        let Some(cache) = &self.cache else { return };
        let mut places = Vec::with_capacity(wanted.len());
        for &n in wanted {
            let frame = &frames[n];
            match cache.find(&frame.info.id, frame.at) {
                Some(Found::Memory(sealed)) => found[n] = self.open_waiting(frame, &sealed, access),
                Some(Found::Disk(place)) => places.push((n, place, frame.clone())),
                None => {}
            }
        }
        let runs = runs_of(places);
        let is_large = runs.len() > 1
            && runs.iter().map(|run| run.bytes).sum::<u64>() > INLINE_BYTES_MAX as u64;
        let mut slow = Vec::new();
        for run in runs {
            if is_background || is_large {
                slow.push(run);
                continue;
            }
            match self.open_now(&run, access) {
                Some(opened) => keep(found, opened),
                None => slow.push(run),
            }
        }
        let reads = slow.into_iter().map(|run| self.clone().open_slow(run, access));
        for opened in futures::future::join_all(reads).await {
            keep(found, opened);
        }
    }

    fn open_waiting(&self, frame: &FrameRef, sealed: &Bytes, access: Access) -> Option<Bytes> {
        let plain = self.open_sealed(frame, &mut sealed.to_vec()).ok()?;
        self.counters.cache_hit_count.fetch_add(1, Ordering::Relaxed);
        self.remember(key_of(frame), &plain, access);
        Some(plain)
    }

    /// Opens the run on this thread, if the kernel holds it in memory.
    fn open_now(&self, run: &Run, access: Access) -> Option<Opened> {
        let cache = self.cache.as_ref()?;
        BUFFER.with_borrow_mut(|buffer| {
            let bytes = buffer.room(run.bytes as usize);
            cache.read_now(run.place, bytes).then(|| self.open_disk_run(run, bytes, access))
        })
    }

    /// Opens the run on a blocking thread.
    async fn open_slow(self: Arc<Self>, run: Run, access: Access) -> Opened {
        let place = self.disk_places.clone().acquire_owned().await.expect("never closed");
        let read = tokio::task::spawn_blocking(move || {
            let _place = place;
            BUFFER.with_borrow_mut(|buffer| {
                let cache = self.cache.as_ref().expect("the run was found there");
                let bytes = cache.read(run.place, buffer, run.bytes as usize);
                bytes.map(|bytes| self.open_disk_run(&run, bytes, access)).unwrap_or_default()
            })
        });
        read.await.unwrap_or_default()
    }

    /// Opens each frame of a run that was read into `bytes`.
    fn open_disk_run(&self, run: &Run, bytes: &mut [u8], access: Access) -> Opened {
        let mut opened = Vec::with_capacity(run.frames.len());
        for (n, place, frame) in &run.frames {
            let start = (place.at - run.place.at) as usize;
            let sealed = &mut bytes[start..start + frame.at.sealed_bytes as usize];
            match self.open_sealed(frame, sealed) {
                Ok(plain) => {
                    self.remember(key_of(frame), &plain, access);
                    opened.push((*n, plain));
                }
                Err(error) => {
                    if let Some(cache) = &self.cache {
                        cache.reject(frame, *place, &error);
                    }
                }
            }
        }
        self.counters.cache_hit_count.fetch_add(opened.len() as u64, Ordering::Relaxed);
        opened
    }
}

fn keep(found: &mut [Option<Bytes>], opened: Opened) {
    for (n, plain) in opened {
        found[n] = Some(plain);
    }
}

/// Groups places into few reads.
fn runs_of(mut places: Vec<(usize, Place, FrameRef)>) -> Vec<Run> {
    places.sort_by_key(|(_, place, _)| place.at);
    let mut runs: Vec<Run> = Vec::new();
    for (n, place, frame) in places {
        let end = place.at + u64::from(frame.at.sealed_bytes);
        if let Some(run) = runs.last_mut() {
            let run_end = run.place.at + run.bytes;
            let bytes = end - run.place.at;
            let is_near = place.at >= run_end && place.at - run_end <= GAP_BYTES_MAX;
            if is_near && bytes <= RUN_BYTES_MAX && place.is_same_lap(&run.place) {
                run.bytes = bytes;
                run.frames.push((n, place, frame));
                continue;
            }
        }
        let bytes = u64::from(frame.at.sealed_bytes);
        runs.push(Run { place, bytes, frames: vec![(n, place, frame)] });
    }
    runs
}
