//! Test doubles: an object store that fails on demand, and seeded randomness.
//!
//! Invariants:
//! - Everything is deterministic given the seed, which a failing test prints
//!   (`SEED=17 cargo test`).
//! - A fault is an error, a delay or a bad transfer of the call; it never changes stored bytes.
//!   Only [`FaultStore::damage`] does.

mod ill;

pub use ill::{Answer, IllStore, Rule};

use block::env::{Clock, SystemClock};
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result,
};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::watch;

/// Switches on the seeded bugs of tiers that `SPINDLE_SEEDED_BUGS` names: for tests of packages that bring the stores of
/// fragments, which are built with a data tier that has no switches.
pub fn seed_bugs_of_tiers(options: &mut crate::TierOptions) {
    let names = std::env::var("SPINDLE_SEEDED_BUGS").unwrap_or_default();
    let bugs = &mut options.seeded_bugs;
    bugs.dropped_early |= block::seeded_bugs::is_named(&names, "dropped-early");
    bugs.dropped_uncompared |= block::seeded_bugs::is_named(&names, "dropped-uncompared");
}

/// The clock of the timers of the current runtime: where it is paused, tokio moves both together.
/// The time of day is the machine's.
#[derive(Clone, Copy, Debug, Default)]
pub struct TimerClock;

#[expect(clippy::disallowed_methods, reason = "the adapter of tests that pause the timers")]
impl Clock for TimerClock {
    fn now(&self) -> Instant {
        tokio::time::Instant::now().into_std()
    }

    fn wall(&self) -> SystemTime {
        SystemClock.wall()
    }

    fn uptime(&self) -> Duration {
        SystemClock.uptime()
    }
}

/// A small seeded generator (splitmix64).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Creates a generator. The same seed gives the same numbers.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    /// Returns the next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `end`, which must not be 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next_u64() % end
    }

    /// Returns `count` bytes in pieces of 16 bytes. Each piece is random with a probability of
    /// `random_percent` percent and otherwise zero, which determines how well the bytes compress.
    pub fn bytes(&mut self, count: usize, random_percent: u64) -> Vec<u8> {
        let mut bytes = vec![0; count];
        for piece in bytes.chunks_mut(16) {
            if self.below(100) < random_percent {
                for half in piece.chunks_mut(8) {
                    half.copy_from_slice(&self.next_u64().to_le_bytes()[..half.len()]);
                }
            }
        }
        bytes
    }
}

/// Returns the seeds for a test: the one in the environment (`SEED=17`), a range
/// (`SEEDS=100..120`), or the first `count`.
#[must_use]
pub fn seeds(count: u64) -> Vec<u64> {
    if let Ok(seed) = std::env::var("SEED") {
        return vec![seed.parse().expect("SEED is a number")];
    }
    let Ok(range) = std::env::var("SEEDS") else { return (1..=count).collect() };
    let ends = range
        .split_once("..")
        .and_then(|(first, end)| Some((first.parse::<u64>().ok()?, end.parse::<u64>().ok()?)));
    let (first, end) = ends.expect("SEEDS is a range of numbers, like 100..120");
    (first..end).collect()
}

/// Kinds of calls to a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Reading an object or a range of it, or asking for its size.
    Get,
    /// Writing an object, also in parts.
    Put,
    /// Deleting an object.
    Delete,
    /// Listing.
    List,
}

/// Effect of [`FaultStore::inject`] on a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call fails like a broken connection.
    Broken,
    /// The call fails like one with refused credentials (403).
    Denied,
    /// The call fails as if there were no such object (404).
    NotFound,
    /// The call fails like an operation that the store does not support (501).
    NotImplemented,
    /// The call fails as if there were no such bucket (404).
    NoBucket,
    /// A get of bytes fails like a server error (500), but asking for the size works. The fault
    /// ends when the object is written.
    Unsent,
    /// A put takes effect but is answered like [`Fault::NotFound`].
    Unheard,
    /// A get delivers all bytes with one bit flipped.
    Flipped,
    /// A get ends one byte early.
    Short,
}

impl Fault {
    fn error(self, op: Op, path: &Path) -> Option<Error> {
        let source = || format!("injected fault of {op:?}").into();
        let path = path.to_string();
        match self {
            Fault::Broken => Some(fault(op)),
            Fault::Denied => Some(Error::PermissionDenied { path, source: source() }),
            Fault::NotFound => Some(Error::NotFound { path, source: source() }),
            Fault::NoBucket => {
                let source = "<Error><Code>NoSuchBucket</Code></Error>".into();
                Some(Error::NotFound { path, source })
            }
            Fault::Unsent => {
                let source = "500 Internal Server Error: InternalError".into();
                Some(Error::Generic { store: "FaultStore", source })
            }
            Fault::NotImplemented => Some(Error::NotImplemented {
                operation: format!("injected fault of {op:?}"),
                implementer: "FaultStore".to_owned(),
            }),
            Fault::Unheard | Fault::Flipped | Fault::Short => None,
        }
    }
}

/// Calls of one kind below a folder that are to fail.
#[derive(Debug)]
struct Injection {
    op: Op,
    folder: String,
    skipped_left: u64,
    count_left: u64,
    fault: Fault,
}

/// A recorded call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Kind of the call.
    pub op: Op,
    /// The object, or the prefix of a listing.
    pub path: Path,
    /// Requested bytes, as object_store prints them.
    pub range: Option<String>,
}

#[derive(Debug, Default)]
struct Faults {
    is_away: bool,
    calls_left: Option<u64>,
    failing: HashMap<Op, u64>,
    ambiguous: HashMap<Op, u64>,
    rules: Vec<Injection>,
    undeletable: HashSet<Path>,
    random_percent: u64,
    delay: Duration,
    calls: Vec<Call>,
    rng: Option<Rng>,
    gets_running: usize,
    gets_running_max: usize,
}

/// A wrapper of another store (in memory by default) that fails, delays or holds back calls.
#[derive(Debug)]
pub struct FaultStore {
    inner: Arc<dyn ObjectStore>,
    faults: Mutex<Faults>,
    held: watch::Sender<bool>,
}

impl Default for FaultStore {
    fn default() -> Self {
        Self::new(Arc::new(InMemory::new()))
    }
}

impl FaultStore {
    /// Creates a wrapper without faults.
    #[must_use]
    pub fn new(inner: Arc<dyn ObjectStore>) -> Self {
        FaultStore { inner, faults: Mutex::default(), held: watch::Sender::new(false) }
    }

    /// Makes every call fail, or ends that.
    pub fn set_away(&self, is_away: bool) {
        self.faults.lock().is_away = is_away;
    }

    /// Makes every call fail after `count` more calls: for the store, the process has died.
    pub fn go_away_after(&self, count: u64) {
        self.faults.lock().calls_left = Some(count);
    }

    /// Returns whether every call fails.
    #[must_use]
    pub fn is_away(&self) -> bool {
        self.faults.lock().is_away
    }

    /// Makes the next `count` calls of `op` fail without effect.
    pub fn fail_next(&self, op: Op, count: u64) {
        self.faults.lock().failing.insert(op, count);
    }

    /// Injects a fault into the next `count` calls of `op` on objects below `folder` ("" is
    /// everything).
    pub fn inject(&self, op: Op, folder: &str, count: u64, fault: Fault) {
        self.inject_after(op, folder, 0, count, fault);
    }

    /// Like [`FaultStore::inject`], but after `skipped` such calls that succeed.
    pub fn inject_after(&self, op: Op, folder: &str, skipped: u64, count: u64, fault: Fault) {
        let (folder, skipped_left) = (folder.to_owned(), skipped);
        let rule = Injection { op, folder, skipped_left, count_left: count, fault };
        self.faults.lock().rules.push(rule);
    }

    /// Removes the faults set by [`FaultStore::inject`]. Returns the number of calls that they
    /// would still have affected.
    pub fn clear_injected(&self) -> u64 {
        let rules = std::mem::take(&mut self.faults.lock().rules);
        rules.iter().fold(0, |sum: u64, rule| sum.saturating_add(rule.count_left))
    }

    fn injected(&self, op: Op, path: &Path, is_head: bool) -> Option<Fault> {
        let mut faults = self.faults.lock();
        let hits = |rule: &&mut Injection| {
            rule.op == op
                && rule.count_left > 0
                && path.as_ref().starts_with(&rule.folder)
                && !(is_head && rule.fault == Fault::Unsent)
        };
        let rule = faults.rules.iter_mut().find(hits)?;
        if rule.skipped_left > 0 {
            rule.skipped_left -= 1;
            return None;
        }
        rule.count_left -= 1;
        Some(rule.fault)
    }

    /// Refuses to delete this object, without any other fault.
    pub fn inject_refusal(&self, path: &Path) {
        self.faults.lock().undeletable.insert(path.clone());
    }

    /// Ends all refusals to delete.
    pub fn clear_refusals(&self) {
        self.faults.lock().undeletable.clear();
    }

    /// Makes the next `count` calls of `op` take effect but report a failure.
    pub fn make_ambiguous(&self, op: Op, count: u64) {
        self.faults.lock().ambiguous.insert(op, count);
    }

    /// Makes `percent` percent of the calls fail without effect, chosen by `seed`.
    pub fn fail_randomly(&self, seed: u64, percent: u64) {
        let mut faults = self.faults.lock();
        faults.rng = Some(Rng::new(seed));
        faults.random_percent = percent;
    }

    /// Delays every call by this duration.
    pub fn set_delay(&self, delay: Duration) {
        self.faults.lock().delay = delay;
    }

    /// Holds back gets, or releases them.
    pub fn hold_gets(&self, is_held: bool) {
        self.held.send_replace(is_held);
    }

    /// Returns and clears the list of calls so far.
    pub fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.faults.lock().calls)
    }

    /// Returns the number of calls of `op` since the last [`FaultStore::take_calls`].
    #[must_use]
    pub fn call_count(&self, op: Op) -> usize {
        self.faults.lock().calls.iter().filter(|call| call.op == op).count()
    }

    /// Returns the highest number of gets that ran concurrently.
    #[must_use]
    pub fn gets_running_max(&self) -> usize {
        self.faults.lock().gets_running_max
    }

    /// Changes the stored bytes of an object with `change`. Panics if it does not exist.
    pub async fn damage(&self, path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
        let got = self.inner.get(path).await.expect("the object to damage exists");
        let mut bytes = got.bytes().await.expect("it can be read").to_vec();
        change(&mut bytes);
        self.inner.put(path, bytes.into()).await.expect("it can be written");
    }

    /// Records the call, and fails if a fault says so. Returns the fault of its transfer, if any.
    async fn enter(&self, op: Op, path: &Path, range: Option<String>) -> Result<Option<Fault>> {
        self.enter_as(op, path, range, false).await
    }

    async fn enter_as(
        &self,
        op: Op,
        path: &Path,
        range: Option<String>,
        is_head: bool,
    ) -> Result<Option<Fault>> {
        let (delay, fails) = {
            let mut faults = self.faults.lock();
            faults.calls.push(Call { op, path: path.clone(), range });
            faults.is_away |= faults.calls_left == Some(0);
            faults.calls_left = faults.calls_left.map(|left| left.saturating_sub(1));
            let percent = faults.random_percent;
            let is_unlucky = faults.rng.as_mut().is_some_and(|rng| rng.below(100) < percent);
            (faults.delay, faults.is_away || is_unlucky || take_one(&mut faults.failing, op))
        };
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        if op == Op::Get {
            let mut held = self.held.subscribe();
            let _ = held.wait_for(|is_held| !is_held).await;
        }
        if fails {
            return Err(fault(op));
        }
        let injected = self.injected(op, path, is_head);
        injected.and_then(|fault| fault.error(op, path)).map_or(Ok(injected), Err)
    }

    fn leave<T>(&self, op: Op, result: Result<T>) -> Result<T> {
        if take_one(&mut self.faults.lock().ambiguous, op) { Err(fault(op)) } else { result }
    }
}

/// Counts a get for as long as it runs, even if it is dropped.
struct Running<'a>(&'a Mutex<Faults>);

impl<'a> Running<'a> {
    fn new(faults: &'a Mutex<Faults>) -> Self {
        let mut counts = faults.lock();
        counts.gets_running += 1;
        counts.gets_running_max = counts.gets_running_max.max(counts.gets_running);
        Running(faults)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.lock().gets_running -= 1;
    }
}

fn take_one(counts: &mut HashMap<Op, u64>, op: Op) -> bool {
    let count = counts.entry(op).or_default();
    let is_left = *count > 0;
    *count = count.saturating_sub(1);
    is_left
}

fn fault(op: Op) -> Error {
    Error::Generic { store: "FaultStore", source: format!("injected fault of {op:?}").into() }
}

/// Delivers an object like a bad transfer.
async fn garble(got: GetResult, fault: Fault) -> Result<GetResult> {
    let (meta, range) = (got.meta.clone(), got.range.clone());
    let (attributes, extensions) = (got.attributes.clone(), got.extensions.clone());
    let mut bytes = got.bytes().await?.to_vec();
    let middle = bytes.len() / 2;
    match (fault, bytes.get_mut(middle)) {
        (Fault::Flipped, Some(byte)) => *byte ^= 0x10,
        _ => bytes.truncate(bytes.len().saturating_sub(1)),
    }
    let body = futures::stream::once(async move { Ok(bytes.into()) }).boxed();
    Ok(GetResult { payload: GetResultPayload::Stream(body), meta, range, attributes, extensions })
}

impl std::fmt::Display for FaultStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FaultStore({})", self.inner)
    }
}

#[async_trait::async_trait]
impl ObjectStore for FaultStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let fault = self.enter(Op::Put, location, None).await?;
        let is_ended =
            |rule: &Injection| rule.fault == Fault::Unsent && rule.folder == location.as_ref();
        self.faults.lock().rules.retain(|rule| !is_ended(rule));
        let result = self.inner.put_opts(location, payload, options).await;
        if fault == Some(Fault::Unheard) {
            return Err(Fault::NotFound.error(Op::Put, location).expect("it is an error"));
        }
        self.leave(Op::Put, result)
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.enter(Op::Put, location, None).await?;
        self.inner.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let range = options.range.as_ref().map(ToString::to_string);
        let _running = Running::new(&self.faults);
        let fault = self.enter_as(Op::Get, location, range, options.head).await?;
        let result = self.inner.get_opts(location, options).await;
        let result = match (fault, result) {
            (Some(fault), Ok(got)) => garble(got, fault).await,
            (_, result) => result,
        };
        self.leave(Op::Get, result)
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        if self.faults.lock().is_away {
            return futures::stream::iter([Err(fault(Op::Delete))]).boxed();
        }
        let fails = take_one(&mut self.faults.lock().failing, Op::Delete);
        if fails {
            return futures::stream::iter([Err(fault(Op::Delete))]).boxed();
        }
        // The path is not known yet, so a rule for deletes applies to all of them.
        let injected = self.injected(Op::Delete, &Path::default(), false);
        if let Some(error) = injected.and_then(|fault| fault.error(Op::Delete, &Path::default())) {
            return futures::stream::iter([Err(error)]).boxed();
        }
        let undeletable = self.faults.lock().undeletable.clone();
        if undeletable.is_empty() {
            return self.inner.delete_stream(locations);
        }
        let inner = self.inner.clone();
        let deleted = locations.and_then(move |path| {
            let (inner, is_refused) = (inner.clone(), undeletable.contains(&path));
            async move {
                match is_refused {
                    true => Err(fault(Op::Delete)),
                    false => inner.delete(&path).await.map(|()| path),
                }
            }
        });
        deleted.boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let mut faults = self.faults.lock();
        let path = prefix.cloned().unwrap_or_default();
        faults.calls.push(Call { op: Op::List, path, range: None });
        if faults.is_away || take_one(&mut faults.failing, Op::List) {
            return futures::stream::iter([Err(fault(Op::List))]).boxed();
        }
        drop(faults);
        let path = prefix.cloned().unwrap_or_default();
        let injected = self.injected(Op::List, &path, false);
        if let Some(error) = injected.and_then(|fault| fault.error(Op::List, &path)) {
            return futures::stream::iter([Err(error)]).boxed();
        }
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.enter(Op::List, &prefix.cloned().unwrap_or_default(), None).await?;
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.enter(Op::Put, to, None).await?;
        self.inner.copy_opts(from, to, options).await
    }
}
