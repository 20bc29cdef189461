//! A store of fragments with what is known of it: every request goes through here and is noted.
//!
//! Invariants:
//! - Every request ends: after the store's own limits, or after those here.
//! - A store that fails is not waited for: its requests fail at once, except for the one whose turn it is.

use super::health::{Health, Way};
use crate::fragment_store::{FragmentName, FragmentStore, ListedFragment};
use crate::placing::StoreInfo;
use block::env::Clock;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use object_store::{Error, Result};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tiering::segment::SegmentName;

/// Longest request but for its bytes. Chosen by hand.
const TIME_MAX: Duration = Duration::from_secs(20);
/// Slowest transfer that is waited for, in bytes per second. Chosen by hand.
const RATE_MIN: u64 = 1 << 20;

/// A store of fragments; see the module.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) info: StoreInfo,
    /// Its URL, for people.
    pub(super) name: String,
    store: Arc<dyn FragmentStore>,
    health: Health,
    clock: Arc<dyn Clock>,
}

impl Member {
    pub(super) fn new(
        info: StoreInfo,
        name: String,
        store: Arc<dyn FragmentStore>,
        clock: Arc<dyn Clock>,
    ) -> Member {
        let health = Health::new(Arc::clone(&clock));
        Member { info, name, store, health, clock }
    }

    pub(super) fn health(&self) -> &Health {
        &self.health
    }

    /// Writes a fragment.
    pub(super) async fn put(&self, name: &FragmentName, parts: Vec<Bytes>) -> Result<()> {
        let bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
        self.noted(Way::Write, bytes, self.store.put(name, parts)).await
    }

    /// Reads a range; its time counts.
    pub(super) async fn read(&self, name: &FragmentName, range: Range<u64>) -> Result<Bytes> {
        let begun = self.clock.now();
        let bytes = range.end - range.start;
        let read = self.noted(Way::Read, bytes, self.store.read(name, range)).await;
        if read.is_ok() {
            self.health.note_time(self.clock.since(begun));
        }
        read
    }

    /// Reads a fragment of about this many bytes.
    pub(super) async fn read_whole(&self, name: &FragmentName, bytes: u64) -> Result<Bytes> {
        self.noted(Way::Read, bytes, self.store.read_whole(name)).await
    }

    pub(super) async fn size(&self, name: &FragmentName) -> Result<u64> {
        self.noted(Way::Read, 0, self.store.size(name)).await
    }

    pub(super) async fn delete(&self, name: &FragmentName) -> Result<()> {
        self.patient(Way::Write)?;
        self.noted(Way::Write, 0, self.store.delete(name)).await
    }

    /// Lists the fragments of a segment, or all of them.
    pub(super) fn list(
        self: &Arc<Self>,
        segment: Option<&SegmentName>,
        count_max: u64,
    ) -> BoxStream<'static, Result<ListedFragment>> {
        if let Err(error) = self.patient(Way::Read) {
            return futures::stream::iter([Err(error)]).boxed();
        }
        let member = Arc::clone(self);
        let listing = self.store.list(segment, count_max);
        let failed = move |error: &Error| {
            let _ = member.health.fail(Way::Read, &error.to_string());
        };
        listing.inspect_err(failed).boxed()
    }

    /// Checks that the store is there.
    pub(super) async fn look(&self) -> Result<()> {
        self.noted(Way::Read, 0, self.store.look()).await
    }

    /// Fails at once while the store fails and it is not time to ask it again.
    fn patient(&self, way: Way) -> Result<()> {
        match self.health.may_ask(way) {
            true => Ok(()),
            false => {
                let why = self.health.failure().unwrap_or_default();
                let source = format!("{} is away: {why}", self.name).into();
                Err(Error::Generic { store: "fragments", source })
            }
        }
    }

    async fn noted<T>(
        &self,
        way: Way,
        bytes: u64,
        request: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let time_max = TIME_MAX + Duration::from_secs(bytes / RATE_MIN);
        let result = match tokio::time::timeout(time_max, request).await {
            Ok(result) => result,
            Err(_) => {
                let source = format!("no answer in {} s", time_max.as_secs()).into();
                Err(Error::Generic { store: "fragments", source })
            }
        };
        if self.health.note(way, &result)
            && let Err(error) = &result
        {
            tracing::warn!(store = self.name, error = %error, "a data store fails");
        }
        result
    }
}
