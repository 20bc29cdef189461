//! Conditions: lasting states of a running pool that an operator should know about.
//!
//! Invariants:
//! - A condition is raised where it arises and cleared where it ends. Nothing recomputes the list
//!   from other state, so `status`, the counters and the log cannot disagree.
//! - One condition per kind and subject. Raising it again updates its texts and keeps the moment
//!   at which it began.
//! - The registry is bounded: past [`KIND_MAX`] a new condition of that kind is counted, but not
//!   stored.
//!
//! The registry does no I/O. The process installs an observer that turns changes into log lines.

use crate::env::{Clock, SystemClock};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

/// Most conditions of one kind that are stored at a time, so that one kind cannot displace the
/// others. Chosen by hand: longer lists are not read, and a registry stays below a few MiB of
/// memory.
pub const KIND_MAX: usize = 256;

/// Longest text of a condition, in characters. Chosen by hand: a few lines of a terminal.
const TEXT_CHARS_MAX: usize = 600;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $id:literal,)*) => {
        /// The kinds of conditions. `docs/operations.md` lists each by its id.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum ConditionKind {
            $($(#[$doc])* $name,)*
        }

        impl ConditionKind {
            /// All kinds, in the order of the enumeration.
            pub const ALL: &[ConditionKind] = &[$(ConditionKind::$name,)*];

            /// The name in JSON, metrics and documents.
            #[must_use]
            pub const fn id(self) -> &'static str {
                match self {
                    $(ConditionKind::$name => $id,)*
                }
            }
        }
    };
}

kinds! {
    /// The pool has stopped; subject: the pool.
    PoolStopped = "pool-stopped",
    /// The object store does not answer, or refuses requests; subject: the path to it (`contact`,
    /// `upload`, `read`, `metadata`).
    StoreUnavailable = "store-unavailable",
    /// The object store has no space left; subject: the path to it (`upload`, `metadata`,
    /// `restore`).
    StoreFull = "store-full",
    /// One object cannot be read while others can; subject: the object.
    ObjectUnreadable = "object-unreadable",
    /// One object cannot be deleted; subject: the object.
    ObjectUndeletable = "object-undeletable",
    /// An object that the metadata names is not in the store; subject: the object.
    ObjectMissing = "object-missing",
    /// A data store does not answer, or does not take fragments, or a drive of the media group cannot be added; subject:
    /// its URL.
    DataStoreAway = "data-store-away",
    /// A data store has been far slower than the others for a while; subject: its URL.
    DataStoreSlow = "data-store-slow",
    /// A data store has hardly any room; subject: its URL.
    DataStoreFull = "data-store-full",
    /// The drive of a data store is expected to fail; subject: the URL of the store.
    DataStoreWearing = "data-store-wearing",
    /// The data stores are too few for the scheme; subject: the pool.
    DataStoresFew = "data-stores-few",
    /// Segments lack fragments, so they survive fewer losses; subject: the pool.
    FragmentsLacking = "fragments-lacking",
    /// Data does not reach the store; subject: the pool.
    DestageFailing = "destage-failing",
    /// One volume is behind the others in the store; subject: the volume.
    VolumeStalled = "volume-stalled",
    /// Acknowledged writes of a volume may be gone; subject: the volume.
    WritesLost = "writes-lost",
    /// A log that the pool went on without has writes that nothing else has; subject: its directory.
    LogSuperseded = "log-superseded",
    /// The tail of the log could not be proven complete at the last open; subject: the log.
    LogTailUnproven = "log-tail-unproven",
    /// Parts of the log cannot be read, but none of them is needed; subject: the log.
    LogUnreadable = "log-unreadable",
    /// The write log is full; subject: the log.
    LogFull = "log-full",
    /// The ring of the log does not fit on its disk; subject: the log.
    LogSpace = "log-space",
    /// A member of the write log does not take part; subject: its node.
    MemberAway = "member-away",
    /// A member of the write log answers far later than another one.
    MemberSlow = "member-slow",
    /// Too few members of the write log answer; subject: the log.
    QuorumLost = "quorum-lost",
    /// The oldest write that exists only on this machine is too old; subject: the pool.
    DataAtRisk = "data-at-risk",
    /// The metadata database has closed and is being reopened; subject: the pool.
    MetadataReopening = "metadata-reopening",
    /// The read cache is smaller than configured; subject: its directory.
    CacheShrunk = "cache-shrunk",
    /// The read cache is off, or verification fails; subject: its directory.
    CacheFailing = "cache-failing",
    /// No recovery key was made; subject: the pool.
    NoRecoveryKey = "no-recovery-key",
    /// A copy is not kept up to date; subject: the copy.
    CopyFailing = "copy-failing",
    /// A copy may still hold keys of erased volumes; subject: the copy.
    CopyHoldsErasedKeys = "copy-holds-erased-keys",
    /// Hydration of a restored pool makes no progress; subject: the copy.
    RestoreFailing = "restore-failing",
    /// A restored pool lacks segments that its copy does not contain; subject: the copy.
    RestoreIncomplete = "restore-incomplete",
    /// The scrub makes no progress; subject: the pool.
    ScrubFailing = "scrub-failing",
    /// Segments are damaged or missing, and no copy has them intact; subject: the pool.
    SegmentsDamaged = "segments-damaged",
    /// Segments cannot be reclaimed; subject: the pool.
    ReclaimBlocked = "reclaim-blocked",
    /// Background maintenance fails; subject: the job.
    MaintenanceFailing = "maintenance-failing",
    /// A background job ended unexpectedly; subject: the job.
    JobDied = "job-died",
    /// An attached volume is not served by its kernel device; subject: the volume.
    DeviceNotServed = "device-not-served",
    /// Connections were refused because of a limit; subject: the listener.
    ConnectionsRefused = "connections-refused",
    /// The limit of file descriptors is too low for the configuration; subject: the process.
    DescriptorLimit = "descriptor-limit",
    /// A client does not answer; subject: the client.
    ClientSilent = "client-silent",
    /// The wall clock jumped; subject: the machine.
    ClockJumped = "clock-jumped",
    /// The dedicated key of a volume is missing; subject: the volume.
    KeyMissing = "key-missing",
}

impl fmt::Display for ConditionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

/// The texts of a condition. Each is one sentence without a full stop, and holds no secret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// States the fact, with its cause and the names of the affected objects.
    pub what: String,
    /// States the consequence while it lasts.
    pub cost: String,
    /// States the remedy.
    pub remedy: String,
}

impl Report {
    /// Creates a report of three sentences; each is cut after 600 characters.
    pub fn new(
        what: impl Into<String>,
        cost: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Report { what: cut(what.into()), cost: cut(cost.into()), remedy: cut(remedy.into()) }
    }
}

fn cut(text: String) -> String {
    match text.char_indices().nth(TEXT_CHARS_MAX) {
        Some((at, _)) => text[..at].to_owned(),
        None => text,
    }
}

/// A condition that is currently raised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Its kind.
    pub kind: ConditionKind,
    /// Identifies the condition within its kind: a volume, an object, a copy, a job.
    pub subject: String,
    /// Its texts, as last raised.
    pub report: Report,
    /// Wall-clock time at which it was first raised: a label, never compared.
    pub since: SystemTime,
    /// Time for which it has lasted, from the monotonic clock.
    pub lasts: Duration,
}

/// A change of the registry, as the observer sees it.
#[derive(Clone, Copy, Debug)]
pub enum Change<'a> {
    /// A new condition was raised.
    Raised(&'a Condition),
    /// A condition has ended; `lasts` is its duration.
    Cleared(&'a Condition),
}

type Observer = Box<dyn Fn(Change<'_>) + Send + Sync>;

#[derive(Debug)]
struct Entry {
    report: Report,
    since: SystemTime,
    began: Instant,
}

#[derive(Debug, Default)]
struct RegistryState {
    entries: BTreeMap<(ConditionKind, String), Entry>,
    raised_counts: BTreeMap<ConditionKind, u64>,
    excluded_counts: BTreeMap<ConditionKind, u64>,
}

impl RegistryState {
    fn count_of(&self, kind: ConditionKind) -> usize {
        self.entries.range((kind, String::new())..).take_while(|((of, _), _)| *of == kind).count()
    }
}

struct Registry {
    state: Mutex<RegistryState>,
    observer: OnceLock<Observer>,
    clock: Arc<dyn Clock>,
}

/// The registry of a process, or of a pool in tests. Clones share it. Any thread may call it.
#[derive(Clone)]
pub struct Conditions(Arc<Registry>);

impl Default for Conditions {
    fn default() -> Self {
        Conditions::with_clock(Arc::new(SystemClock))
    }
}

impl fmt::Debug for Conditions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.state.lock().fmt(f)
    }
}

impl Conditions {
    /// Makes an empty registry that takes the ages of its conditions from `clock`.
    #[must_use]
    pub fn with_clock(clock: Arc<dyn Clock>) -> Conditions {
        let (state, observer) = (Mutex::default(), OnceLock::new());
        Conditions(Arc::new(Registry { state, observer, clock }))
    }

    /// Installs the observer, which is called after each change, without the lock of the registry
    /// held. The first call wins; later ones are ignored.
    pub fn observe(&self, observer: impl Fn(Change<'_>) + Send + Sync + 'static) {
        let _ = self.0.observer.set(Box::new(observer));
    }

    /// Raises a condition, or updates the texts of a current one. Returns whether it is new.
    pub fn raise(&self, kind: ConditionKind, subject: &str, report: Report) -> bool {
        let raised = {
            let mut state = self.0.state.lock();
            let key = (kind, subject.to_owned());
            if let Some(entry) = state.entries.get_mut(&key) {
                entry.report = report;
                return false;
            }
            let has_room = state.count_of(kind) < KIND_MAX;
            if !has_room {
                let excluded_count = state.excluded_counts.entry(kind).or_default();
                *excluded_count += 1;
                // It is raised again and again, because nothing knows that it was raised before.
                if !excluded_count.is_power_of_two() {
                    return false;
                }
            }
            *state.raised_counts.entry(kind).or_default() += 1;
            let entry = Entry { report, since: self.0.clock.wall(), began: self.0.clock.now() };
            let raised = condition(&key, &entry, entry.began);
            if has_room {
                state.entries.insert(key, entry);
            }
            raised
        };
        self.tell(Change::Raised(&raised));
        true
    }

    /// Ends a condition. Returns whether it was raised.
    pub fn clear(&self, kind: ConditionKind, subject: &str) -> bool {
        let key = (kind, subject.to_owned());
        let Some(entry) = self.0.state.lock().entries.remove(&key) else { return false };
        self.tell(Change::Cleared(&condition(&key, &entry, self.0.clock.now())));
        true
    }

    /// Raises the condition if there is a report, and ends it otherwise.
    pub fn set(&self, kind: ConditionKind, subject: &str, report: Option<Report>) {
        match report {
            Some(report) => drop(self.raise(kind, subject, report)),
            None => drop(self.clear(kind, subject)),
        }
    }

    /// Ends the conditions of a kind whose subject fails `is_kept`.
    pub fn retain(&self, kind: ConditionKind, mut is_kept: impl FnMut(&str) -> bool) {
        let ended: Vec<String> = {
            let state = self.0.state.lock();
            let of_kind =
                state.entries.keys().filter(|(key, subject)| *key == kind && !is_kept(subject));
            of_kind.map(|(_, subject)| subject.clone()).collect()
        };
        for subject in ended {
            self.clear(kind, &subject);
        }
    }

    /// Lists the current conditions, the oldest first.
    #[must_use]
    pub fn list(&self) -> Vec<Condition> {
        let state = self.0.state.lock();
        let now = self.0.clock.now();
        let mut list: Vec<Condition> =
            state.entries.iter().map(|(key, entry)| condition(key, entry, now)).collect();
        list.sort_by_key(|condition| std::cmp::Reverse(condition.lasts));
        list
    }

    /// Whether a condition is raised.
    #[must_use]
    pub fn is_raised(&self, kind: ConditionKind, subject: &str) -> bool {
        self.0.state.lock().entries.contains_key(&(kind, subject.to_owned()))
    }

    /// Returns the number of conditions of each kind that were raised since the start of the
    /// process.
    #[must_use]
    pub fn raised_counts(&self) -> BTreeMap<ConditionKind, u64> {
        self.0.state.lock().raised_counts.clone()
    }

    /// Returns the number of attempts to raise a condition that was not stored because its kind was
    /// full.
    #[must_use]
    pub fn excluded_count(&self) -> u64 {
        self.0.state.lock().excluded_counts.values().sum()
    }

    fn tell(&self, change: Change<'_>) {
        if let Some(observer) = self.0.observer.get() {
            observer(change);
        }
    }
}

fn condition(key: &(ConditionKind, String), entry: &Entry, now: Instant) -> Condition {
    Condition {
        kind: key.0,
        subject: key.1.clone(),
        report: entry.report.clone(),
        since: entry.since,
        lasts: now.saturating_duration_since(entry.began),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::ManualClock;

    fn report(what: &str) -> Report {
        Report::new(what, "writes wait", "check the store")
    }

    #[test]
    fn a_condition_lasts_from_raise_to_clear_and_the_observer_sees_both_once() {
        let conditions = Conditions::default();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&seen);
        conditions.observe(move |change| {
            sink.lock().push(match change {
                Change::Raised(condition) => format!("+{}", condition.subject),
                Change::Cleared(condition) => format!("-{}", condition.subject),
            });
        });
        let kind = ConditionKind::CopyFailing;
        assert!(conditions.raise(kind, "a", report("first")));
        assert!(!conditions.raise(kind, "a", report("second")));
        let list = conditions.list();
        assert_eq!(list.len(), 1);
        assert_eq!(list[0].report.what, "second");
        assert!(conditions.is_raised(kind, "a") && !conditions.is_raised(kind, "b"));
        assert!(conditions.clear(kind, "a") && !conditions.clear(kind, "a"));
        assert_eq!(conditions.raised_counts()[&kind], 1);
        assert_eq!(*seen.lock(), ["+a", "-a"]);
    }

    #[test]
    fn the_registry_and_its_texts_are_bounded() {
        let conditions = Conditions::default();
        let told = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counter = told.clone();
        conditions.observe(move |_| {
            counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        });
        for number in 0..KIND_MAX + 100 {
            conditions.raise(ConditionKind::ObjectMissing, &number.to_string(), report("x"));
        }
        assert_eq!(conditions.list().len(), KIND_MAX);
        assert_eq!(conditions.excluded_count(), 100);
        let told = told.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(told, KIND_MAX + 7, "1, 2, 4 … 64 of a hundred");
        // A full kind does not keep other kinds out.
        assert!(conditions.raise(ConditionKind::LogFull, "pool", report("x")));
        assert!(conditions.clear(ConditionKind::LogFull, "pool"));
        assert_eq!(Report::new("é".repeat(9000), "", "").what.chars().count(), TEXT_CHARS_MAX);
        conditions.retain(ConditionKind::ObjectMissing, |subject| subject == "7");
        assert_eq!(conditions.list().len(), 1);
    }

    #[test]
    fn ages_and_order_of_conditions_follow_the_clock() {
        let clock = ManualClock::new();
        let conditions = Conditions::with_clock(Arc::new(clock.clone()));
        let lasted = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&lasted);
        conditions.observe(move |change| {
            if let Change::Cleared(condition) = change {
                sink.lock().push(condition.lasts);
            }
        });
        conditions.raise(ConditionKind::LogFull, "old", report("x"));
        let raised_at = clock.wall();
        clock.advance(Duration::from_secs(60));
        conditions.raise(ConditionKind::CopyFailing, "young", report("x"));
        clock.advance(Duration::from_secs(5));
        conditions.raise(ConditionKind::LogFull, "old", report("an update does not restart it"));
        let ages: Vec<_> = conditions.list().iter().map(|one| one.lasts.as_secs()).collect();
        assert_eq!(ages, [65, 5]);
        assert_eq!(conditions.list()[0].since, raised_at);
        clock.advance(Duration::from_secs(1));
        conditions.clear(ConditionKind::CopyFailing, "young");
        assert_eq!(*lasted.lock(), [Duration::from_secs(6)]);
    }

    #[test]
    fn ids_are_unique() {
        let mut ids: Vec<&str> = ConditionKind::ALL.iter().map(|kind| kind.id()).collect();
        ids.sort_unstable();
        let count = ids.len();
        ids.dedup();
        assert_eq!(ids.len(), count);
    }
}
