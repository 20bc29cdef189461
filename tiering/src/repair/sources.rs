//! The copies that segments are restored from, queried such that one that hangs or fails causes
//! only a short delay.
//!
//! Invariants:
//! - The first copy is asked first. If it has not answered after [`HEDGE`], the next one is asked
//!   in parallel, and so on. The first intact segment is used.
//! - A copy whose last request failed or hung is asked last, until a request succeeds or [`REST`]
//!   has passed.
//! - Each copy has at most [`READS_AT_ONCE`] requests under way. A request that was given up counts
//!   for as long as it actually runs: a read of a file in a directory that hangs occupies a thread
//!   and cannot be cancelled.

use super::Repair;
use crate::outage::public_text;
use crate::segment::SegmentInfo;
use block::env::Clock;
use bytes::Bytes;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// Longest wait for one copy to send a segment. Chosen by hand: 16 MiB at 2 Mbit/s.
const SOURCE_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 60 });
/// After this long without an answer the next copy is asked as well. Chosen by hand: longer than
/// most stores take for a segment.
pub(super) const HEDGE: Duration = Duration::from_millis(if cfg!(test) { 200 } else { 3_000 });
/// Time for which a copy that failed is asked last. Chosen by hand.
const REST: Duration = Duration::from_secs(600);
/// Maximum number of requests to one copy under way. Chosen by hand: the segments repaired
/// concurrently for readers, plus a scrub.
const READS_AT_ONCE: usize = 3;

/// A copy of the pool in another store.
#[derive(Clone, Debug)]
pub struct RepairSource {
    /// Name for messages: its URL.
    pub name: String,
    /// The store, with the prefix of the copy.
    pub store: Arc<dyn ObjectStore>,
}

/// A copy, and whether it answers.
#[derive(Debug)]
pub(super) struct Source {
    copy: RepairSource,
    places: Arc<Semaphore>,
    clock: Arc<dyn Clock>,
    failed_at: Mutex<Option<Instant>>,
}

/// The object that a copy sent, or the reason why it did not.
type Sent = Result<Bytes, String>;

impl Source {
    pub(super) fn new(copy: RepairSource, clock: Arc<dyn Clock>) -> Source {
        let places = Arc::new(Semaphore::new(READS_AT_ONCE));
        Source { copy, places, clock, failed_at: Mutex::default() }
    }

    /// Returns whether its last request failed or is overdue.
    pub(super) fn is_failing(&self) -> bool {
        self.failed_at.lock().is_some_and(|at| self.clock.since(at) < REST)
    }

    fn note_failing(&self) {
        *self.failed_at.lock() = Some(self.clock.now());
    }

    /// Like [`Source::get`], within a time limit.
    async fn get_within(&self, path: &Path, object_bytes: u64) -> Sent {
        let get = self.get(path, object_bytes);
        tokio::pin!(get);
        if let Ok(sent) = tokio::time::timeout(HEDGE, &mut get).await {
            return sent;
        }
        // The mark is removed if the copy answers after all.
        self.note_failing();
        let rest = SOURCE_TIMEOUT.saturating_sub(HEDGE);
        let late = tokio::time::timeout(rest, get).await;
        late.unwrap_or_else(|_| Err(format!("not sent in {SOURCE_TIMEOUT:?}")))
    }

    /// Returns the whole object, unverified.
    async fn get(&self, path: &Path, object_bytes: u64) -> Sent {
        let Ok(place) = self.places.clone().acquire_owned().await else {
            return Err("closed".to_owned());
        };
        let (store, path) = (self.copy.store.clone(), path.clone());
        // Runs in a task of its own, which holds the permit until it ends.
        let sent = tokio::spawn(async move {
            let _place = place;
            let got = store.get(&path).await?;
            if got.meta.size != object_bytes {
                return Ok(None);
            }
            got.bytes().await.map(Some)
        });
        match sent.await {
            Ok(Ok(sent)) => {
                *self.failed_at.lock() = None;
                sent.ok_or_else(|| "it has another size there".to_owned())
            }
            Ok(Err(object_store::Error::NotFound { .. })) => {
                *self.failed_at.lock() = None;
                Err("not there".to_owned())
            }
            Ok(Err(cause)) => {
                self.note_failing();
                Err(public_text(&cause))
            }
            Err(cause) => Err(cause.to_string()),
        }
    }
}

impl Repair {
    /// Returns a segment that verifies and the name of the copy that had it, or the state of each
    /// copy.
    pub(super) async fn fetch_from_sources(
        &self,
        info: &SegmentInfo,
    ) -> Result<(Bytes, String), Vec<String>> {
        let mut sources: Vec<Arc<Source>> = self.sources().to_vec();
        sources.sort_by_key(|source| source.is_failing());
        let hedge = if self.pool.seeded_bugs.repair_in_turn { SOURCE_TIMEOUT } else { HEDGE };
        let ask = |source| Box::pin(self.ask(source, info)) as BoxFuture<'_, (Arc<Source>, Sent)>;
        let mut next = sources.into_iter().map(ask).peekable();
        let mut asked: FuturesUnordered<_> = next.next().into_iter().collect();
        let mut said = Vec::new();
        while !asked.is_empty() {
            tokio::select! {
                Some((source, sent)) = asked.next() => match sent {
                    Ok(object) => return Ok((object, source.copy.name.clone())),
                    Err(wrong) => said.push(format!("in the copy {}: {wrong}", source.copy.name)),
                },
                () = tokio::time::sleep(hedge), if next.peek().is_some() => {}
            }
            asked.extend(next.next());
        }
        Err(said)
    }

    async fn ask(&self, source: Arc<Source>, info: &SegmentInfo) -> (Arc<Source>, Sent) {
        let sent = source.get_within(&info.object_path(), u64::from(info.object_bytes)).await;
        let verified = match sent {
            Err(wrong) => Err(wrong),
            Ok(object) => match self.pool.verify(info, &object).await {
                Ok(Some(why)) if !self.pool.seeded_bugs.repair_unverified => {
                    Err(format!("damaged too, {why}"))
                }
                Ok(_) => Ok(object),
                Err(error) => Err(error.chain()),
            },
        };
        (source, verified)
    }
}
