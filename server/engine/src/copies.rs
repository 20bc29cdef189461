//! Copies of the pool in other stores. A job for each copy brings it up to one state of the pool after another.
//!
//! Invariants:
//! - A job that fails tries again, with pauses that grow up to a bound; data that was copied stays. Nothing waits for
//!   the job, and a copy whose store is away costs the pool nothing but the deletions that must be deferred for it.
//! - Jobs run in the background runtime. One job at a time publishes states of a copy: a job that finds another's state starts
//!   over.

#[cfg(test)]
mod golden;
pub mod list;
mod running;
pub mod target;

pub use list::CopySpec;
pub use target::StateRecord;

use crate::pool::Pool;
use async_recursion::async_recursion;
use block::conditions::Report;
use block::env::random_bytes;
use block::hex::to_hex;
use block::seal::PoolKey;
use block::{ConditionKind, Conditions, Error, ErrorKind, Lsn, Result};
use control::keys::{DataKey, KeyRing};
use control::store::{Store, check_url, is_within};
use list::Published;
use parking_lot::Mutex;
use running::Running;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use target::Target;
use tiering::{CopyCounts, CopyProgress, RepairSource};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use uuid::Uuid;

/// Shortest interval. Chosen by hand: making a state involves a look at all segment records.
pub const INTERVAL_MIN: Duration = Duration::from_secs(1);
/// Longest time that an orderly stop waits for a job. Chosen by hand: a job ends between two requests.
const STOP_GRACE: Duration = Duration::from_secs(10);
/// Time for which the end of one copy waits for a state that is being published. Chosen by hand: longer than requests
/// for documents take with their retries.
const REMOVE_GRACE: Duration = Duration::from_secs(60);
/// Time for which the start of a pool waits for directories of copies to answer. Chosen by hand.
const OFFER_TIME_MAX: Duration = Duration::from_secs(2);
/// Longest time that an erasure of a volume waits for copies. Chosen by hand.
const KEYS_PATIENCE: Duration = Duration::from_secs(10);

/// Pause before the list of copies is read again; it doubles up to the maximum.
const LIST_PAUSE: Duration = Duration::from_secs(1);
const LIST_PAUSE_MAX: Duration = Duration::from_secs(60);
/// Subject of the condition that the list of copies cannot be read.
const LIST: &str = "the list of copies";

/// The state of a copy.
#[derive(Clone, Debug, Default)]
pub struct CopyState {
    /// The newest state at the copy.
    pub newest: Option<StateRecord>,
    /// Time until which the pool has not changed since the newest state, in seconds since 1970.
    pub unchanged_until: u64,
    /// Bytes of segments that the pool had written, since the start, when the newest state was begun.
    stored_before: u64,
    /// Reason for the failure of the last attempt, and the time since which attempts fail.
    failure: Option<(String, Instant)>,
    /// Attempts that have ended since the start, whether they succeeded or failed.
    attempt_count: u64,
    /// Attempts that have begun.
    begun_count: u64,
    /// Number of the copy's document of keys of volumes; `None` until it was read.
    volume_keys: Option<u64>,
}

impl CopyState {
    fn has_destroyed_keys(&self, pool: &Pool) -> bool {
        self.volume_keys.unwrap_or(0) < pool.keys_destroyed_in()
    }
}

/// A request for a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewCopy {
    /// URL of the copy, without credentials.
    pub url: String,
    /// Prefix of the variables that hold settings and credentials.
    pub env_prefix: Option<String>,
    /// Seconds from the beginning of one state to the beginning of the next.
    pub interval_seconds: u64,
    /// States are published only when snapshots were made or removed.
    pub is_snapshots_only: bool,
    /// Most bytes per second.
    pub bytes_per_second: Option<u64>,
    /// Names of the volumes to copy; empty for all.
    pub volumes: Vec<String>,
    /// Key file on the machine of the daemon that alone opens the copy. It is created if it is missing.
    pub key_file: Option<PathBuf>,
    /// Replaces the copy's dedicated key if it has one; the old key stops working.
    pub is_key_replaced: bool,
    /// Seconds since 1970.
    pub created_at: u64,
}

impl NewCopy {
    fn spec(&self) -> CopySpec {
        CopySpec {
            url: self.url.clone(),
            env_prefix: self.env_prefix.clone(),
            interval_seconds: self.interval_seconds,
            is_snapshots_only: self.is_snapshots_only,
            bytes_per_second: self.bytes_per_second,
            has_dedicated_key: false,
            volumes: None,
            created_at: self.created_at,
            published: None,
        }
    }
}

struct Job {
    spec: CopySpec,
    state: watch::Receiver<CopyState>,
    progress: Arc<CopyProgress>,
    wake: Arc<Notify>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

/// A copy as shown to users.
#[derive(Clone, Debug)]
pub struct CopyStatus {
    /// The copy as it was requested.
    pub spec: CopySpec,
    /// Its state; `None` if no daemon runs.
    pub state: Option<CopyState>,
    /// Work done since the start.
    pub counts: CopyCounts,
    /// Seconds by which the copy is behind the pool, 0 if it has everything; `None` before the first state.
    pub lag_seconds: Option<u64>,
    /// Estimated bytes that the pool's store and its log have received since the copy's state.
    pub lag_bytes: u64,
    /// The copy may hold keys of volumes that were destroyed since.
    pub has_destroyed_keys: bool,
    /// Reason for the failure of the last attempt, and the time for which attempts have failed.
    pub failure: Option<(String, Duration)>,
}

impl CopyStatus {
    /// The status of a copy that no daemon serves.
    pub fn unserved(spec: CopySpec, has_destroyed_keys: bool) -> CopyStatus {
        CopyStatus {
            spec,
            state: None,
            counts: CopyCounts::default(),
            lag_seconds: None,
            lag_bytes: 0,
            has_destroyed_keys,
            failure: None,
        }
    }
}

/// Sets or clears the condition that the copy may still have keys of erased volumes.
pub(crate) fn show_erased_keys(conditions: &Conditions, url: &str, has_keys: bool) {
    let report = has_keys.then(|| {
        Report::new(
            format!(
                "the copy {url} may still have keys of volumes that were erased: the pool has not \
                 reached it since"
            ),
            "the data of these volumes can be read with the keys",
            "let the pool reach the copy, or end it with `spindle copy rm` and delete the keys \
             there",
        )
    });
    conditions.set(ConditionKind::CopyHoldsErasedKeys, url, report);
}

/// Raises the condition that the list of copies cannot be read.
pub(crate) fn show_unreadable(conditions: &Conditions, error: &Error) {
    let what = format!("could not read the list of the pool's copies: {}", error.chain());
    let report = match is_for_good(error) {
        true => Report::new(
            what,
            "no copy is brought up to date until the next start",
            "bring the named object below copies/ back from a version of the bucket, and restart \
             spindle",
        ),
        false => Report::new(
            what,
            "no copy is brought up to date until it can be read",
            "check the store; the daemon reads the list again every minute at the latest",
        ),
    };
    conditions.raise(ConditionKind::CopyFailing, LIST, report);
}

/// Whether a list that could not be read will not become readable without a person.
fn is_for_good(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported)
}

/// The parts of the pool that jobs need.
#[derive(Clone)]
struct Source {
    pool: Arc<Pool>,
    store: Store,
    key: PoolKey,
    /// The data keys of the pool's ring.
    data_keys: Arc<[DataKey]>,
    id: Uuid,
    /// See [`target::Identity`].
    lineage: Uuid,
    name: String,
    /// Random identity of this process.
    term: String,
    /// Serialises changes of the list.
    list_turn: Arc<tokio::sync::Mutex<()>>,
    /// Copies whose store was available, by URL. Damaged objects of the pool's store are looked up in them.
    repair_sources: Arc<Mutex<BTreeMap<String, RepairSource>>>,
}

/// The copies of an open pool, with their jobs if a daemon serves it.
pub struct Copies {
    source: Source,
    jobs: Arc<tokio::sync::Mutex<Vec<Job>>>,
    /// Serialises the addition and removal of copies.
    changes: tokio::sync::Mutex<()>,
    is_serving: bool,
    /// The list could not be read yet: nothing is copied.
    failure: Arc<Mutex<Option<Error>>>,
    /// The job that reads the list again.
    reading: Mutex<Option<JoinHandle<()>>>,
}

impl Copies {
    /// Returns the copies for requests only: the list may be changed, but nothing is copied.
    pub(crate) fn offline(
        pool: Arc<Pool>,
        store: Store,
        keys: &KeyRing,
        (id, lineage): (Uuid, Uuid),
        name: String,
    ) -> Copies {
        let source = Source {
            pool,
            store,
            key: keys.newest().key.clone(),
            data_keys: keys.data_keys().into(),
            id,
            lineage,
            name,
            term: to_hex(&random_bytes::<16>()),
            list_turn: Arc::default(),
            repair_sources: Arc::default(),
        };
        Copies {
            source,
            jobs: Arc::default(),
            changes: tokio::sync::Mutex::default(),
            is_serving: false,
            failure: Arc::default(),
            reading: Mutex::default(),
        }
    }

    /// Starts a job for each copy of the list. Volumes are served even if the list cannot be read.
    #[async_recursion]
    pub async fn start(mut self) -> Copies {
        self.is_serving = true;
        match self.specs().await {
            Ok(specs) => *self.jobs.lock().await = self.source.start_jobs(specs).await,
            Err(error) => {
                self.source.show_unreadable(&error);
                let is_for_good = is_for_good(&error);
                *self.failure.lock() = Some(error);
                if !is_for_good {
                    self.read_later();
                }
            }
        }
        self
    }

    /// Reads the list until that succeeds, and then starts the jobs.
    fn read_later(&self) {
        let (source, jobs) = (self.source.clone(), self.jobs.clone());
        let failure = self.failure.clone();
        let reading = async move {
            let mut pause = LIST_PAUSE;
            loop {
                tokio::time::sleep(pause).await;
                match list::read(&source.store, &source.key, source.id).await {
                    Ok(specs) => {
                        let started = source.start_jobs(specs).await;
                        jobs.lock().await.extend(started);
                        *failure.lock() = None;
                        source.pool.tier().conditions().clear(ConditionKind::CopyFailing, LIST);
                        return;
                    }
                    Err(error) => {
                        source.show_unreadable(&error);
                        *failure.lock() = Some(error);
                    }
                }
                pause = (pause * 2).min(LIST_PAUSE_MAX);
            }
        };
        let pool = &self.source.pool;
        let job = block::Job::new("list of copies", "no copy is brought up to date");
        let need = crate::jobs::Need::Useful;
        let task = pool.supervisor().spawn_on(pool.tier().background(), need, job, reading);
        *self.reading.lock() = Some(task);
    }

    async fn specs(&self) -> Result<Vec<CopySpec>> {
        if let Some(error) = &*self.failure.lock() {
            return Err(error.clone());
        }
        let Source { store, key, id, .. } = &self.source;
        list::read(store, key, *id).await
    }

    /// Adds a copy, durably, and begins to make it.
    ///
    /// # Errors
    /// `Busy` if the copy exists already, or the destination is not empty or another pool's; `Invalid` for the pool's
    /// own prefix; `Unsupported` for a store without conditional creates; `Denied`, `NotFound`, `Unavailable` of its
    /// store.
    #[async_recursion]
    pub async fn add(&self, new: NewCopy) -> Result<()> {
        let spec = new.spec();
        check_url(&spec.url)?;
        // A job that another change of the list is about to end must not change the findings below.
        let _one_at_a_time = self.changes.lock().await;
        let Source { store, key, id, lineage, name, pool, .. } = &self.source;
        let url = &spec.url;
        let (wanted, own) = (spec.url.clone(), store.url().to_owned());
        let others: Vec<String> = self.specs().await?.into_iter().map(|copy| copy.url).collect();
        let looked = tokio::task::spawn_blocking(move || {
            let is_it = |url: &String| is_within(url, &wanted) && is_within(&wanted, url);
            (is_within(&wanted, &own), others.iter().any(is_it))
        });
        let looked = looked.await;
        let (is_own, is_there) = looked.map_err(|error| {
            Error::with_source(ErrorKind::Io, "compare the places of copies", error)
        })?;
        if is_own {
            let what =
                format!("copy to {url}: it is in the pool's own prefix; a copy is to survive that");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        if spec.interval_seconds < INTERVAL_MIN.as_secs() {
            let what = format!("copy to {url}: the interval is at least {INTERVAL_MIN:?}");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let there = |url: &str| {
            let what = format!("copy to {url}: it is there; `spindle copy rm` ends it");
            Error::new(ErrorKind::Busy, what)
        };
        let mut volumes = BTreeSet::new();
        for name in &new.volumes {
            let volume = pool.volume(name).ok_or_else(|| pool.why_not(name))?;
            volumes.insert(volume.id().0);
        }
        let copies = self.specs().await?;
        if is_there || copies.iter().any(|copy| same_place(&copy.url, &spec.url)) {
            return Err(there(&spec.url));
        }
        list::check_count(copies.len() + 1)?;
        let target = Target::open(&spec.url, spec.env_prefix.as_deref()).await?;
        target.claim(key, (*id, *lineage), name).await?;
        let mut spec = spec;
        if !new.volumes.is_empty() {
            spec.volumes = Some(volumes);
        }
        if let Some(newest) = target.newest(key, *id).await? {
            if newest.commit_number > self.source.pool.tier_status().map.commit_number {
                return Err(put_back(&spec.url, &newest));
            }
            // Adding the copy again confirms that its states are the pool's.
            let term = self.source.term.clone();
            spec.published = Some(Published { term, ..Published::found(&newest) });
        }
        // This is the last step that may be refused, as it may change the keys that open the copy.
        let has_states = spec.published.is_some();
        spec.has_dedicated_key = self.source.give_keys(&target, &new, has_states).await?;
        // A request for the status of the copies must not wait for that store.
        let mut jobs = self.jobs.lock().await;
        let added = spec.clone();
        let _list_turn = self.source.list_turn.lock().await;
        list::change(store, key, *id, pool.tier().check_owner(), |copies| {
            if copies.iter().any(|copy| same_place(&copy.url, &added.url)) {
                return Err(there(&added.url));
            }
            copies.push(added);
            Ok(())
        })
        .await?;
        if self.is_serving {
            self.source.offer(&spec.url, &target);
            jobs.push(self.source.job(spec));
        }
        Ok(())
    }

    /// Ends a copy. The objects in its store stay.
    ///
    /// # Errors
    /// `NotFound` if there is none; those of changing the list.
    #[async_recursion]
    pub async fn remove(&self, url: &str) -> Result<()> {
        let _one_at_a_time = self.changes.lock().await;
        let mut jobs = self.jobs.lock().await;
        let Source { store, key, id, pool, .. } = &self.source;
        let list_turn = self.source.list_turn.lock().await;
        list::change(store, key, *id, pool.tier().check_owner(), |copies| {
            let before = copies.len();
            copies.retain(|copy| !same_place(&copy.url, url));
            match copies.len() == before {
                true => Err(no_copy(url)),
                false => Ok(()),
            }
        })
        .await?;
        let at = jobs.iter().position(|job| same_place(&job.spec.url, url));
        let ended = at.map(|at| jobs.remove(at));
        drop((jobs, list_turn));
        if let Some(job) = ended {
            let url = job.spec.url.clone();
            job.end(REMOVE_GRACE).await;
            self.source.withdraw(&url);
            let conditions = self.source.pool.tier().conditions();
            conditions.clear(ConditionKind::CopyFailing, &url);
            conditions.clear(ConditionKind::CopyHoldsErasedKeys, &url);
            conditions.clear(ConditionKind::ObjectUndeletable, &url);
        }
        Ok(())
    }

    /// Returns the status of the copies.
    ///
    /// # Errors
    /// Those of reading the list, if no daemon runs.
    #[async_recursion]
    pub async fn status(&self) -> Result<Vec<CopyStatus>> {
        if !self.is_serving || self.failure.lock().is_some() {
            let none = |spec| CopyStatus::unserved(spec, self.source.pool.keys_destroyed_in() > 0);
            let specs = self.specs().await;
            let specs = specs.inspect_err(|error| self.source.show_unreadable(error))?;
            let copies: Vec<CopyStatus> = specs.into_iter().map(none).collect();
            for copy in &copies {
                self.source.show_erased_keys(&copy.spec.url, copy.has_destroyed_keys);
            }
            return Ok(copies);
        }
        let jobs = self.jobs.lock().await;
        Ok(jobs.iter().map(|job| self.source.status(job)).collect())
    }

    /// Waits for a while, after a key of a volume was destroyed, until no copy has it. Returns the copies that may
    /// still have it.
    ///
    /// # Errors
    /// Those of reading the list.
    #[async_recursion]
    pub async fn wait_without_destroyed_keys(&self) -> Result<Vec<String>> {
        let states: Vec<_> = {
            let jobs = self.jobs.lock().await;
            jobs.iter().for_each(|job| job.wake.notify_one());
            jobs.iter().map(|job| job.state.clone()).collect()
        };
        let done = states.into_iter().map(async |mut state| {
            let is_gone = |state: &CopyState| !state.has_destroyed_keys(&self.source.pool);
            let gone = async { drop(state.wait_for(is_gone).await) };
            let _ = tokio::time::timeout(KEYS_PATIENCE, gone).await;
        });
        futures::future::join_all(done).await;
        let with: Vec<CopyStatus> =
            self.status().await?.into_iter().filter(|copy| copy.has_destroyed_keys).collect();
        for copy in &with {
            self.source.show_erased_keys(&copy.spec.url, true);
        }
        Ok(with.into_iter().map(|copy| copy.spec.url).collect())
    }

    /// Waits until a copy has everything that was written before the call.
    ///
    /// # Errors
    /// `NotFound` if there is no such copy; the reason why the attempt failed; `Unavailable` if no daemon runs.
    #[async_recursion]
    pub async fn sync(&self, url: &str) -> Result<StateRecord> {
        if !self.is_serving {
            let what = "copy now: no daemon runs on this directory; start `spindle serve`";
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        let (mut state, wake, volumes) = {
            let jobs = self.jobs.lock().await;
            let job = jobs.iter().find(|job| same_place(&job.spec.url, url));
            let job = job.ok_or_else(|| no_copy(url))?;
            (job.state.clone(), job.wake.clone(), job.spec.volumes.clone())
        };
        let lsn = match &volumes {
            None => self.source.pool.destage_all().await?,
            Some(volumes) => self.source.pool.destage_volumes(volumes).await?,
        };
        // An attempt that has already begun may have read the pool before the call.
        let begun = state.borrow().begun_count;
        wake.notify_one();
        let ended = state.wait_for(|state| state.attempt_count > begun).await;
        let ended =
            ended.map_err(|_| Error::new(ErrorKind::Unavailable, "copy now: the job has ended"))?;
        match (&ended.newest, &ended.failure) {
            (Some(newest), None) if Lsn(newest.destaged_lsn) >= lsn => Ok(newest.clone()),
            (_, Some((why, _))) => {
                Err(Error::new(ErrorKind::Unavailable, format!("copy to {url}: {why}")))
            }
            _ => Err(Error::new(ErrorKind::Unavailable, format!("copy to {url}: it is behind"))),
        }
    }

    /// Ends the jobs.
    #[async_recursion]
    pub async fn stop(&self) {
        let reading = self.reading.lock().take();
        if let Some(reading) = reading {
            reading.abort();
            let _ = reading.await; // it starts no job from here on
        }
        let jobs = std::mem::take(&mut *self.jobs.lock().await);
        for job in &jobs {
            job.stop.send_replace(true);
        }
        futures::future::join_all(jobs.into_iter().map(|job| job.end(STOP_GRACE))).await;
    }
}

fn same_place(one: &str, other: &str) -> bool {
    one.trim_end_matches('/') == other.trim_end_matches('/')
}

fn put_back(url: &str, newest: &StateRecord) -> Error {
    let what = format!(
        "copy to {url}: it has state {} of {}, which this pool has not made, or does not remember: \
         the pool was put back to an earlier state. Nothing more is copied there, and its contents \
         stay: restore missing data from it, end it with `spindle copy rm`, and copy to an empty \
         prefix",
        newest.number,
        block::quantities::utc(newest.as_of)
    );
    Error::new(ErrorKind::Invalid, what)
}

fn no_copy(url: &str) -> Error {
    let what =
        format!("find the copy {url}: the pool has none there; `spindle copy list` shows all");
    Error::new(ErrorKind::NotFound, what)
}

impl Job {
    async fn end(mut self, grace: Duration) {
        self.stop.send_replace(true);
        if tokio::time::timeout(grace, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}

impl Source {
    /// Gives a new copy the keys that open the pool, or a dedicated key that alone opens it. Returns whether it has
    /// its own.
    async fn give_keys(&self, target: &Target, new: &NewCopy, has_states: bool) -> Result<bool> {
        match &new.key_file {
            Some(path) => {
                let keys = (self.id, &self.data_keys[..]);
                // The ring that seals the states may be gone, and its key elsewhere.
                let may_make = !has_states || target.is_apart(&self.key).await?.is_some();
                target.give_key(keys, path, may_make, new.is_key_replaced).await?;
                Ok(true)
            }
            None if target.is_apart(&self.key).await? == Some(true) => {
                target.check_apart(&self.key).await.map(|()| true)
            }
            None => target.copy_keys(&self.store, &self.key).await.map(|()| false),
        }
    }

    /// Updates the copy's key ring from the pool's. A ring of the copy's own is left alone.
    async fn follow_keys(&self, target: &Target, spec: &CopySpec) -> Result<()> {
        match spec.has_dedicated_key {
            true => target.check_apart(&self.key).await,
            false => target.copy_keys(&self.store, &self.key).await,
        }
    }

    /// Sets the condition that the copy is not brought up to date, for this reason, or clears it.
    fn show_failure(&self, url: &str, error: Option<&Error>) {
        let report = error.map(|error| {
            Report::new(
                format!("could not bring the copy {url} up to date: {}", error.chain()),
                "the copy falls behind the pool, and segments that it still needs stay in the pool's store",
                "check its store, its credentials and the network; spindle tries again \
                 automatically, and `spindle copy list` shows the progress",
            )
        });
        self.pool.tier().conditions().set(ConditionKind::CopyFailing, url, report);
    }

    fn show_erased_keys(&self, url: &str, has_keys: bool) {
        show_erased_keys(self.pool.tier().conditions(), url, has_keys);
    }

    fn show_unreadable(&self, error: &Error) {
        show_unreadable(self.pool.tier().conditions(), error);
    }

    /// Adds this copy to those in which damaged objects of the pool's store are looked up.
    fn offer(&self, url: &str, target: &Target) {
        let mut sources = self.repair_sources.lock();
        if !sources.contains_key(url) {
            let source = RepairSource { name: url.to_owned(), store: target.objects() };
            sources.insert(url.to_owned(), source);
            self.pool.tier().set_repair_sources(sources.values().cloned().collect());
        }
    }

    fn withdraw(&self, url: &str) {
        let mut sources = self.repair_sources.lock();
        sources.retain(|other, _| !same_place(other, url));
        self.pool.tier().set_repair_sources(sources.values().cloned().collect());
    }

    /// The state of a copy that the pool knows of.
    async fn published(&self, url: &str) -> Result<Option<Published>> {
        let copies = list::read(&self.store, &self.key, self.id).await?;
        let spec = copies.into_iter().find(|copy| copy.url == url);
        Ok(spec.ok_or_else(|| no_copy(url))?.published)
    }

    /// Changes that state, durably.
    async fn set_published(
        &self,
        url: &str,
        change: impl FnOnce(Option<Published>) -> Option<Published>,
    ) -> Result<Option<Published>> {
        let _one_at_a_time = self.list_turn.lock().await;
        // A superseded owner would take its successor's states for those of another run.
        let check = self.pool.tier().check_owner();
        let copies = list::change(&self.store, &self.key, self.id, check, |copies| {
            let spec = copies.iter_mut().find(|copy| copy.url == url);
            let spec = spec.ok_or_else(|| no_copy(url))?;
            spec.published = change(spec.published.take());
            Ok(())
        })
        .await?;
        Ok(copies.into_iter().find(|copy| copy.url == url).and_then(|copy| copy.published))
    }

    /// Checks that the newest state of a copy was made by this pool, in this run.
    async fn check_known(&self, url: &str, newest: Option<&StateRecord>) -> Result<()> {
        let known = self.published(url).await?;
        let is_known = match &known {
            // A state made by another process was in the metadata when this process opened it.
            Some(known) => {
                let is_ours = known.term == self.term
                    || known.commit_number <= self.pool.tier().opened_at_commit();
                !known.is_refused && is_ours && known.knows(newest)
            }
            None => newest.is_none(),
        };
        if is_known {
            return Ok(());
        }
        let Some(found) = newest.map(Published::found).or_else(|| known.clone()) else {
            return Ok(());
        };
        if known.is_none_or(|known| !known.is_refused) {
            let refused = |known: Option<Published>| {
                Some(Published { is_refused: true, ..known.unwrap_or(found) })
            };
            self.set_published(url, refused).await?;
        }
        match newest {
            Some(newest) => Err(put_back(url, newest)),
            None => {
                let what = format!(
                    "copy to {url}: the states that the pool made there are gone; end it with `spindle copy rm`, and copy \
                     to an empty prefix"
                );
                Err(Error::new(ErrorKind::Invalid, what))
            }
        }
    }

    async fn offer_existing(&self, spec: &CopySpec) {
        if let Ok(target) = Target::existing(&spec.url, spec.env_prefix.as_deref()).await {
            self.offer(&spec.url, &target);
        }
    }

    async fn start_jobs(&self, specs: Vec<CopySpec>) -> Vec<Job> {
        // A reader may need a copy before its job has looked at it.
        let offers = specs.iter().map(|spec| self.offer_existing(spec));
        // The others are offered when they answer.
        let _ = tokio::time::timeout(OFFER_TIME_MAX, futures::future::join_all(offers)).await;
        specs.into_iter().map(|spec| self.job(spec)).collect()
    }

    fn job(&self, spec: CopySpec) -> Job {
        let (state, stop) = (watch::Sender::new(CopyState::default()), watch::Sender::new(false));
        let (progress, wake) = (Arc::new(CopyProgress::default()), Arc::new(Notify::new()));
        let running = Running {
            source: self.clone(),
            spec: spec.clone(),
            progress: progress.clone(),
            wake: wake.clone(),
            publishing: Arc::default(),
        };
        let publishing = running.publishing.clone();
        let (seen, mut stopped) = (state.subscribe(), stop.subscribe());
        let job =
            block::Job::new(format!("copy to {}", spec.url), "the copy is not brought up to date");
        let (jobs, lane) = (self.pool.supervisor(), self.pool.tier().background());
        let task = jobs.spawn_on(lane, crate::jobs::Need::Useful, job, async move {
            tokio::select! {
                never = running.run(&state) => match never {},
                _ = stopped.wait_for(|stop| *stop) => {}
            }
            // Nothing arrives at the copy after the job has ended, so adding the copy again finds its final contents.
            drop(publishing.lock().await);
        });
        Job { spec, state: seen, progress, wake, stop, task }
    }

    fn status(&self, job: &Job) -> CopyStatus {
        let state = job.state.borrow().clone();
        let log = self.pool.log_status();
        let stored = self.pool.destage_progress().stored_bytes.saturating_sub(state.stored_before);
        // Clones and rollbacks are commits without an entry of the log.
        let commit_number = self.pool.tier_status().map.commit_number;
        let is_behind = |newest: &StateRecord| {
            log.last_lsn.0 > newest.destaged_lsn || commit_number != newest.commit_number
        };
        let clock = self.pool.tier().clock();
        let now = clock.unix_seconds();
        let lag_seconds = state.newest.as_ref().map(|newest| match is_behind(newest) {
            true => now.saturating_sub(newest.as_of.max(state.unchanged_until)),
            false => 0,
        });
        let lag_bytes = match state.newest.as_ref().is_some_and(|newest| !is_behind(newest)) {
            true => 0,
            false => stored + log.undestaged_bytes,
        };
        let (spec, counts) = (job.spec.clone(), job.progress.counts());
        let has_destroyed_keys = state.has_destroyed_keys(&self.pool);
        let failure = state.failure.as_ref().map(|(why, since)| (why.clone(), clock.since(*since)));
        CopyStatus {
            spec,
            state: Some(state),
            counts,
            lag_seconds,
            lag_bytes,
            has_destroyed_keys,
            failure,
        }
    }
}
