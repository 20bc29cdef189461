//! A store of fragments with what is known of it: every request goes through here and is noted.
//!
//! Invariants:
//! - Every request ends for its caller: after the store's own limits, or after those here.
//! - A request that was sent keeps its place until the store has answered it. A drive that hangs keeps a
//!   thread for each, so there are few places: see [`NamedStore::width`](super::NamedStore::width).

use super::NamedStore;
use super::health::{Health, Way};
use super::room::Told;
use crate::fragment_store::{Check, FragmentName, FragmentStore, ListedFragment, Room};
use crate::placing::{Level, StoreId, StoreInfo, Weighed};
use block::env::Clock;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::{Error, Result};
use parking_lot::{Mutex, RwLock};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tiering::segment::SegmentName;
use tokio::sync::Semaphore;

/// Longest request but for its bytes. Chosen by hand.
const TIME_MAX: Duration = Duration::from_secs(20);
/// Slowest transfer that is waited for, in bytes per second. Chosen by hand.
const RATE_MIN: u64 = 1 << 20;
/// Pause between two questions for the room. Chosen by hand: a store takes a few GiB meanwhile.
const ROOM_PAUSE: Duration = Duration::from_secs(10);

/// A store of fragments; see the module.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) id: StoreId,
    /// What fails together with it; it changes while the pool runs.
    domain: RwLock<Arc<str>>,
    /// Share of new fragments; it changes while the pool runs.
    weight: AtomicU32,
    /// Its URL, for people.
    pub(super) name: String,
    store: Arc<dyn FragmentStore>,
    places: Arc<Semaphore>,
    health: Health,
    clock: Arc<dyn Clock>,
    /// Time after which a store that is away counts as lost.
    lost_after: Duration,
    is_forgotten: AtomicBool,
    /// When it was last asked to take a fragment, or has answered that.
    written: Mutex<Option<Instant>>,
    /// Since when it is slow.
    slow_since: Mutex<Option<Instant>>,
    told: Mutex<Told>,
}

impl Member {
    pub(super) fn new(named: NamedStore, clock: Arc<dyn Clock>, lost_after: Duration) -> Member {
        let NamedStore { info, name, store, width } = named;
        let StoreInfo { id, domain, weight } = info;
        Member {
            id,
            domain: RwLock::new(Arc::from(domain)),
            weight: AtomicU32::new(weight),
            name,
            store,
            places: Arc::new(Semaphore::new(width)),
            health: Health::new(Arc::clone(&clock)),
            clock,
            lost_after,
            is_forgotten: AtomicBool::new(false),
            written: Mutex::default(),
            slow_since: Mutex::default(),
            told: Mutex::default(),
        }
    }

    /// What the choice of stores knows of it now.
    pub(super) fn info(&self) -> StoreInfo {
        StoreInfo { id: self.id, domain: self.domain().to_string(), weight: self.weight() }
    }

    /// The same, with the part of its share that its room leaves.
    pub(super) fn weighed(&self) -> Weighed {
        Weighed { info: self.info(), level: self.level() }
    }

    /// The part of its share that its room leaves.
    pub(super) fn level(&self) -> Level {
        self.told.lock().level
    }

    /// Its room, as it was last told.
    pub(super) fn room(&self) -> Option<Room> {
        self.told.lock().room.clone()
    }

    /// Whether it had hardly any room when it was last told.
    pub(super) fn is_nearly_full(&self) -> bool {
        self.told.lock().is_nearly_full
    }

    /// What fails together with it.
    pub(super) fn domain(&self) -> Arc<str> {
        Arc::clone(&self.domain.read())
    }

    pub(super) fn set_domain(&self, domain: &str) {
        let mut present = self.domain.write();
        if **present != *domain {
            *present = Arc::from(domain);
        }
    }

    /// Share of new fragments; with 0 it gets none.
    pub(super) fn weight(&self) -> u32 {
        self.weight.load(Ordering::Relaxed)
    }

    pub(super) fn set_weight(&self, weight: u32) {
        self.weight.store(weight, Ordering::Relaxed);
    }

    /// Whether the store has been away for so long that its fragments are rebuilt elsewhere.
    pub(super) fn is_lost(&self) -> bool {
        self.health.away_for() >= self.lost_after
    }

    /// Time since the store was last asked to take a fragment; the longest time if it never was.
    pub(super) fn quiet_for(&self) -> Duration {
        let written = *self.written.lock();
        written.map_or(Duration::MAX, |written| self.clock.since(written))
    }

    /// Notes whether the store is slow now. Returns for how long it has been.
    pub(super) fn slow_for(&self, is_slow: bool) -> Duration {
        let mut since = self.slow_since.lock();
        match is_slow {
            true => self.clock.since(*since.get_or_insert_with(|| self.clock.now())),
            false => {
                *since = None;
                Duration::ZERO
            }
        }
    }

    /// Marks the store as one that no segment names any more.
    pub(super) fn forget(&self) {
        self.is_forgotten.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_forgotten(&self) -> bool {
        self.is_forgotten.load(Ordering::Relaxed)
    }

    pub(super) fn health(&self) -> &Health {
        &self.health
    }

    /// Writes a fragment.
    pub(super) async fn put(&self, name: &FragmentName, parts: Vec<Bytes>) -> Result<()> {
        let bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
        let (store, name) = (Arc::clone(&self.store), *name);
        *self.written.lock() = Some(self.clock.now());
        let put = self.noted(Way::Write, bytes, async move { store.put(&name, parts).await }).await;
        *self.written.lock() = Some(self.clock.now());
        put
    }

    /// Reads a range; its time counts.
    pub(super) async fn read(&self, name: &FragmentName, range: Range<u64>) -> Result<Bytes> {
        let begun = self.clock.now();
        let bytes = range.end - range.start;
        let (store, name) = (Arc::clone(&self.store), *name);
        let read = self.noted(Way::Read, bytes, async move { store.read(&name, range).await });
        let read = read.await;
        if read.is_ok() {
            self.health.note_time(self.clock.since(begun));
        }
        read
    }

    /// Reads a fragment of about this many bytes.
    pub(super) async fn read_whole(&self, name: &FragmentName, bytes: u64) -> Result<Bytes> {
        let (store, name) = (Arc::clone(&self.store), *name);
        self.noted(Way::Read, bytes, async move { store.read_whole(&name).await }).await
    }

    /// Lets the store verify a fragment of about this many bytes.
    pub(super) async fn check(&self, name: &FragmentName, bytes: u64) -> Result<Check> {
        let (store, name) = (Arc::clone(&self.store), *name);
        self.noted(Way::Read, bytes, async move { store.check(&name, bytes).await }).await
    }

    pub(super) async fn size(&self, name: &FragmentName) -> Result<u64> {
        let (store, name) = (Arc::clone(&self.store), *name);
        self.noted(Way::Read, 0, async move { store.size(&name).await }).await
    }

    /// Deletes a fragment, of a full store, too.
    pub(super) async fn delete(&self, name: &FragmentName) -> Result<()> {
        let (store, name) = (Arc::clone(&self.store), *name);
        self.noted(Way::Read, 0, async move { store.delete(&name).await }).await
    }

    /// Lists the fragments of a segment, or all of them.
    pub(super) fn list(
        self: &Arc<Self>,
        segment: Option<&SegmentName>,
        count_max: u64,
    ) -> BoxStream<'static, Result<ListedFragment>> {
        if !self.health.may_ask(Way::Read) {
            let why = self.health.failure().unwrap_or_default();
            return futures::stream::iter([Err(failed(format!("{} is away: {why}", self.name)))])
                .boxed();
        }
        let listing = self.store.list(segment, count_max);
        let listed = futures::stream::unfold(
            (Some(listing), Arc::clone(self)),
            |(listing, member)| async move {
                let mut listing = listing?;
                let next = tokio::time::timeout(TIME_MAX, listing.next()).await;
                let next = next.unwrap_or_else(|_| Some(Err(late(TIME_MAX))))?;
                if let Err(error) = &next {
                    let _ = member.health.fail(Way::Read, &error.to_string());
                }
                let rest = next.is_ok().then_some(listing);
                Some((next, (rest, member)))
            },
        );
        listed.boxed()
    }

    /// Checks that the store is there.
    pub(super) async fn look(&self) -> Result<()> {
        let store = Arc::clone(&self.store);
        self.noted(Way::Read, 0, async move { store.look().await }).await
    }

    /// Asks the store for its room, unless that was done a short while ago. That it does not say is no failure of the
    /// store: the look tells whether it fails. What it said before counts until it says something else. The part of its
    /// share that the room leaves rises only if it may.
    pub(super) async fn ask_room(&self, may_rise: bool) {
        let now = self.clock.now();
        {
            let mut told = self.told.lock();
            if told.asked_at.is_some_and(|asked_at| now < asked_at + ROOM_PAUSE) {
                return;
            }
            told.asked_at = Some(now);
        }
        let store = Arc::clone(&self.store);
        match self.sent(0, async move { store.room().await }).await {
            Ok(room) => self.told.lock().note(room, may_rise),
            Err(error) => {
                tracing::debug!(store = self.name, %error, "a data store did not tell its room");
            }
        }
    }

    async fn noted<T: Send + 'static>(
        &self,
        way: Way,
        bytes: u64,
        request: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let result = self.sent(bytes, request).await;
        if self.health.note(way, &result)
            && let Err(error) = &result
        {
            tracing::warn!(store = self.name, error = %error, "a data store fails");
        }
        result
    }

    /// Sends a request when there is a place for it, and waits for its answer for a limited time.
    async fn sent<T: Send + 'static>(
        &self,
        bytes: u64,
        request: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let time_max = TIME_MAX + Duration::from_secs(bytes / RATE_MIN);
        let places = Arc::clone(&self.places);
        let answered = async move {
            let place = places.acquire_owned().await;
            // A task of its own: dropping the wait does not give the place to another request.
            let sent = tokio::spawn(async move {
                let _place = place;
                request.await
            });
            sent.await.unwrap_or_else(|cause| Err(Error::JoinError { source: cause }))
        };
        let result = tokio::time::timeout(time_max, answered).await;
        result.unwrap_or_else(|_| Err(late(time_max)))
    }
}

fn late(time_max: Duration) -> Error {
    failed(format!("no answer in {} s", time_max.as_secs()))
}

fn failed(why: String) -> Error {
    Error::Generic { store: "fragments", source: why.into() }
}
