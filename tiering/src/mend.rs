//! Puts back segments that are damaged or missing in the pool's store, from copies of the pool that have them.
//!
//! Invariants:
//! - What is put back verifies as that very segment, in every frame: a copy is not trusted. Where the key of the frames was
//!   destroyed, that is by their checksums, which the directory has under the pool's key.
//! - Only what the map names is put back, and only by the pool's owner. It is held meanwhile ([`crate::orphans::Hold`]),
//!   and deleted where the map has forgotten it all the same.
//! - What no copy has whole is changed in no way.
//! - Readers mend one segment at a time, and none that could not be mended within [`TRY_AGAIN`].

use crate::copier::verify;
use crate::segment::SegmentInfo;
use crate::tier::{Inner, Tier};
use block::{Error, ErrorKind, Result};
use object_store::{ObjectStore, ObjectStoreExt};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest wait for one copy to send a segment. Chosen by hand: 16 MiB at 2 Mbit/s.
const SOURCE_TIMEOUT: Duration = Duration::from_secs(60);
/// A reader whose segment could not be mended does not ask the copies again for so long. Chosen by hand.
const TRY_AGAIN: Duration = Duration::from_secs(3600);
/// Longest that a reader waits for copies. Chosen by hand: as for a store that does not answer.
const READER_PATIENCE: Duration = Duration::from_secs(120);
/// Segments of which is remembered that they could not be mended. Chosen by hand; beyond it all are forgotten.
const TRIED_MAX: usize = 4096;

/// A copy of the pool in another store.
#[derive(Clone, Debug)]
pub struct MendSource {
    /// For messages: its URL.
    pub name: String,
    /// Prefixed to the copy.
    pub store: Arc<dyn ObjectStore>,
}

/// Where segments can be had from, and what came of it.
#[derive(Debug, Default)]
pub(crate) struct Mending {
    sources: Mutex<Arc<[MendSource]>>,
    /// When a reader found that no copy has it.
    tried: Mutex<HashMap<u64, Instant>>,
    turn: tokio::sync::Mutex<()>,
    mended_count: AtomicU64,
}

/// How a segment is in the pool's store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Every frame opens.
    Whole {
        /// Frames.
        frame_count: u64,
    },
    /// It was not, and now it is.
    Mended {
        /// What was wrong.
        why: String,
        /// The copy that had it.
        source: String,
    },
    /// It is not.
    Bad {
        /// What is wrong, and what each copy has.
        why: String,
    },
    /// The map does not name it any more.
    Gone,
}

impl Mending {
    /// Segments put back since the start.
    pub(crate) fn mended_count(&self) -> u64 {
        self.mended_count.load(Ordering::Relaxed)
    }

    fn sources(&self) -> Arc<[MendSource]> {
        self.sources.lock().clone()
    }

    fn was_tried(&self, number: u64) -> bool {
        self.tried.lock().get(&number).is_some_and(|at| at.elapsed() < TRY_AGAIN)
    }

    fn note_tried(&self, number: u64) {
        let mut tried = self.tried.lock();
        if tried.len() >= TRIED_MAX {
            tried.clear();
        }
        tried.insert(number, Instant::now());
    }
}

impl Tier {
    /// From now on, what is damaged or missing in the pool's store is looked for in these copies, in this order.
    pub fn set_mend_sources(&self, sources: Vec<MendSource>) {
        *self.inner.mending.sources.lock() = sources.into();
        self.inner.mending.tried.lock().clear();
    }
}

/// The data cannot be had, however often it is asked for.
pub(crate) fn is_lost(error: &Error) -> bool {
    use ErrorKind::{Corrupt, NotFound, Unsupported};
    matches!(error.kind(), Corrupt | NotFound | Unsupported)
}

impl Inner {
    /// Reads a segment whole, past every cache, and puts it back where it is damaged or missing. Holds one segment in
    /// memory, in the place of one that goes to a copy.
    ///
    /// # Errors
    /// `Unavailable` when the pool's store does not answer, or the metadata database is being opened anew; `Fenced`
    /// when the pool is not ours any more.
    pub(crate) async fn heal(&self, info: &SegmentInfo) -> Result<Finding> {
        let _place = self.copy_places.acquire().await;
        let why = match self.frames.check_segment(info).await {
            Ok(report) => match report.damage() {
                None => {
                    self.reclaim.note_well(info.number.0);
                    self.dedup.note_well(info.number.0);
                    let frame_count = report.directory.entries.len() as u64;
                    return Ok(Finding::Whole { frame_count });
                }
                Some(why) => why,
            },
            Err(error) if is_lost(&error) => error.chain(),
            Err(error) => return Err(error),
        };
        // Until it is put back.
        self.dedup.note_bad(info.number.0);
        self.mend(info, why).await
    }

    async fn mend(&self, info: &SegmentInfo, why: String) -> Result<Finding> {
        let planted = self.options.planted;
        // In this order: whatever forgets it from now on, its object is not deleted before we are done.
        let hold = (!planted.mend_unheld).then(|| self.orphans.hold_one(info.number));
        if !self.is_named(info.number, info.id).await? {
            return Ok(Finding::Gone);
        }
        let path = info.object_path();
        let mut said = Vec::new();
        for source in self.mending.sources().iter() {
            let wanted = async {
                let got = source.store.get(&path).await?;
                if got.meta.size != u64::from(info.object_bytes) {
                    return Ok(Err("it has another size there".to_owned()));
                }
                got.bytes().await.map(Ok)
            };
            let object = match tokio::time::timeout(SOURCE_TIMEOUT, wanted).await {
                Ok(Ok(Ok(object))) => match verify(self, info, &object).await? {
                    Some(why) if !planted.mend_unverified => Err(format!("damaged too, {why}")),
                    _ => Ok(object),
                },
                Ok(Ok(Err(wrong))) => Err(wrong),
                Ok(Err(object_store::Error::NotFound { .. })) => Err("not there".to_owned()),
                Ok(Err(cause)) => Err(cause.to_string()),
                Err(_) => Err(format!("not sent in {SOURCE_TIMEOUT:?}")),
            };
            let object = match object {
                Ok(object) => object,
                Err(wrong) => {
                    said.push(format!("in the copy {}: {wrong}", source.name));
                    continue;
                }
            };
            self.check_owner().await?;
            let put = self.store.put(&path, object.into()).await;
            put.map_err(|cause| {
                let what = format!("put {info} back");
                Error::with_source(ErrorKind::Unavailable, what, cause)
            })?;
            if !planted.mend_unheld && !self.is_named(info.number, info.id).await? {
                self.orphans.abandon(vec![path]);
                return Ok(Finding::Gone);
            }
            drop(hold);
            match self.frames.check_segment(info).await {
                Ok(report) if report.damage().is_none() || planted.mend_unverified => {}
                Ok(_) => return Ok(Finding::Bad { why: format!("{why}; put back in vain") }),
                Err(error) => return Err(error),
            }
            self.reclaim.note_well(info.number.0);
            self.dedup.note_well(info.number.0);
            self.mending.mended_count.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                object = %path, why, copy = source.name,
                "a segment was damaged or missing in the pool's store, and was put back from a copy"
            );
            return Ok(Finding::Mended { why, source: source.name.clone() });
        }
        said.insert(0, why);
        Ok(Finding::Bad { why: said.join("; ") })
    }

    /// Whether copies have given back what a reader lacks of these segments: then it is worth reading again.
    pub(crate) async fn mend_for_reader(&self, lacking: &[SegmentInfo]) -> bool {
        let mend = async {
            let mut is_mended = false;
            for info in lacking {
                let _turn = self.mending.turn.lock().await;
                if self.mending.was_tried(info.number.0) {
                    continue;
                }
                match self.heal(info).await {
                    // By somebody else meanwhile, or the way was bad.
                    Ok(Finding::Whole { .. } | Finding::Mended { .. } | Finding::Gone) => {
                        is_mended = true;
                    }
                    Ok(Finding::Bad { why }) => {
                        self.mending.note_tried(info.number.0);
                        tracing::error!(
                            object = %info.object_path(), why,
                            "a segment is damaged or missing, and no copy of the pool has it whole"
                        );
                    }
                    Err(error) => {
                        tracing::debug!(error = %error.chain(), "a segment could not be mended");
                    }
                }
            }
            is_mended
        };
        tokio::time::timeout(READER_PATIENCE, mend).await.unwrap_or(false)
    }

    /// Nothing could be mended, or everything was tried lately.
    pub(crate) fn is_mending_vain(&self, info: &SegmentInfo) -> bool {
        self.mending.sources().is_empty() || self.mending.was_tried(info.number.0)
    }
}
