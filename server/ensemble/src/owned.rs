//! The log of a pool that this node owns: hands sealed batches to the members, and turns their answers
//! into acknowledgements.
//!
//! Invariants:
//! - No lock is held while the log is called, because the log calls this under a lock of its own.
//! - What the log may read without a lock ([`Replicas::acknowledged`], [`Replicas::committed`]) is
//!   published under the lock, and only rises.
//! - An owner that a member reports as superseded fails its log at once.

use crate::note::Note;
use crate::peers::Peers;
use crate::seeded_bugs::seeded_bugs;
use crate::traffic::{LogTraffic, Traffic};
use crate::window::Window;
use block::env::Clock;
use block::{Epoch, Error, ErrorKind, Lsn, Position, Result};
use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use replication::{Answer, Batch, Configuration, LEASE_NS_MAX, LogIndex, MemberId, Owner};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use wal::Replicas;

/// Times and bounds of an owner. All bounds are for each member, except that of the window.
#[derive(Clone, Copy, Debug)]
pub struct OwnedOptions {
    /// Time for which an answer of a member lets the owner serve reads.
    pub lease: Duration,
    /// Time after which a member without new batches gets an empty request: a fraction of the lease.
    pub heartbeat: Duration,
    /// Newest batches kept in memory, in bytes, for members that keep up.
    pub window_bytes: usize,
    /// Batches in one request, in bytes.
    pub request_bytes: usize,
    /// Batches that are under way, in bytes.
    pub under_way_bytes: usize,
    /// Requests that are under way.
    pub under_way_count: usize,
    /// Pause between two attempts to connect.
    pub reconnect: Duration,
    /// Longest wait for an answer before the connection counts as lost.
    pub silence: Duration,
}

impl OwnedOptions {
    /// Returns the times for members that take the silence of an owner for its end after `detection`.
    #[must_use]
    pub fn for_detection(detection: Duration) -> OwnedOptions {
        OwnedOptions { lease: detection, heartbeat: detection / 5, ..OwnedOptions::default() }
    }
}

impl Default for OwnedOptions {
    /// Chosen by hand, for a take-over within three seconds.
    fn default() -> OwnedOptions {
        OwnedOptions {
            lease: Duration::from_secs(1),
            heartbeat: Duration::from_millis(200),
            window_bytes: 32 << 20,
            // Measured: a processor's cache holds what is encrypted, copied and sent.
            request_bytes: 256 << 10,
            under_way_bytes: 8 << 20,
            under_way_count: 64,
            reconnect: Duration::from_millis(250),
            silence: Duration::from_secs(5),
        }
    }
}

/// Silence of a connected member that is shown. Chosen by hand: a disk that syncs a lot takes less.
pub const SILENCE_SHOWN: Duration = Duration::from_secs(2);

/// Whether the pool may be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// No quorum has the opening batch yet.
    Opening,
    /// A quorum has it.
    Open,
    /// A member has promised this later epoch: the node is no owner any more.
    Superseded(Epoch),
}

/// What is known of a member.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemberStatus {
    /// Whether there is a connection.
    pub is_connected: bool,
    /// The reason why there is none.
    pub error: Option<String>,
    /// Sequence up to which it has written the log.
    pub written: u64,
    /// Sequence up to which the log is on its stable storage.
    pub synced: u64,
    /// Its ring has no room for the next batch: the store takes nothing, or the ring is smaller than the
    /// owner's.
    pub is_full: bool,
    /// Number of times that it was reset, because it lacked batches that the owner's log had released.
    pub resets: u64,
    /// Bytes of batches sent to it, repeated ones included.
    pub sent_bytes: u64,
    /// Time from a request to its answer, on average over about the last ten; `None` before the first.
    pub answer_time: Option<Duration>,
    /// Time for which requests have waited without an answer, over all connections; zero if none waits.
    pub silence: Duration,
}

impl MemberStatus {
    /// Takes the time of one more answer.
    pub(crate) fn on_answer(&mut self, took: Duration) {
        let average = self.answer_time.map_or(took, |average| (average * 7 + took) / 8);
        self.answer_time = Some(average);
    }

    /// Returns the reason why the member does not take part; `None` if it answers.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        let is_silent = self.silence >= SILENCE_SHOWN;
        let hangs = || {
            let seconds = self.silence.as_secs();
            format!(
                "it has not answered for {seconds} s, although it is connected: look at its disk"
            )
        };
        self.error.clone().or_else(|| is_silent.then(hangs))
    }

    /// Whether the member takes part: it is connected, and has left no request without an answer for `silence_max`.
    /// A member whose disk hangs stays connected.
    #[must_use]
    pub fn answers_within(&self, silence_max: Duration) -> bool {
        self.is_connected && self.silence < silence_max
    }
}

/// What changes with each batch and answer.
pub(crate) struct State {
    pub(crate) owner: Owner,
    pub(crate) index: LogIndex,
    pub(crate) window: Window,
    pub(crate) traffic: Traffic,
    pub(crate) sync_wanted: u64,
    pub(crate) statuses: BTreeMap<MemberId, MemberStatus>,
    /// Since when a request of a member has waited for an answer, in nanoseconds of [`Shared::now`].
    pub(crate) waits: BTreeMap<MemberId, u64>,
}

/// What the handles and the senders share.
pub(crate) struct Shared {
    /// The member on this node.
    pub(crate) me: MemberId,
    pub(crate) options: OwnedOptions,
    pub(crate) peers: Arc<dyn Peers>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) state: Mutex<State>,
    acknowledged: AtomicU64,
    committed: AtomicU64,
    /// Sequence up to which the own log is written.
    own_written: AtomicU64,
    /// The end of the lease, in nanoseconds of [`Shared::now`].
    lease_until: AtomicU64,
    standing: watch::Sender<Standing>,
    pub(crate) stop: watch::Sender<bool>,
    log: OnceLock<Box<dyn OwnersLog>>,
    /// The failure of the note, which ends the owner.
    failure: OnceLock<Error>,
    /// The note of the member on this node, whose log this is.
    note: Mutex<Option<Note>>,
    /// Of each sender: notified when there is something to send.
    pub(crate) wakes: RwLock<BTreeMap<MemberId, Arc<Notify>>>,
}

/// The owner's side of a log that several members keep. Clones are handles to the same.
#[derive(Clone)]
pub struct OwnedLog {
    pub(crate) shared: Arc<Shared>,
}

impl OwnedLog {
    /// Makes the owner of `epoch`, on the node of the member `me`, whose log `index` shows; the next
    /// batch is the opening batch. Nothing is sent before [`OwnedLog::start`].
    #[must_use]
    pub fn new(
        me: MemberId,
        epoch: Epoch,
        configuration: Configuration,
        index: LogIndex,
        peers: Arc<dyn Peers>,
        clock: Arc<dyn Clock>,
        options: OwnedOptions,
    ) -> OwnedLog {
        let others = configuration.members.iter().filter(|member| **member != me);
        let wakes = others.map(|member| (*member, Arc::default())).collect();
        let opening = index.tail().sequence + 1;
        let owner = Owner::new(me, epoch, configuration, opening);
        let shared = Shared {
            me,
            options,
            peers,
            clock,
            state: Mutex::new(State {
                owner,
                index,
                window: Window::new(options.window_bytes),
                traffic: Traffic::default(),
                sync_wanted: opening,
                statuses: BTreeMap::new(),
                waits: BTreeMap::new(),
            }),
            acknowledged: AtomicU64::new(0),
            committed: AtomicU64::new(0),
            own_written: AtomicU64::new(opening - 1),
            lease_until: AtomicU64::new(0),
            standing: watch::Sender::new(Standing::Opening),
            stop: watch::Sender::new(false),
            log: OnceLock::new(),
            failure: OnceLock::new(),
            note: Mutex::new(None),
            wakes: RwLock::new(wakes),
        };
        let owned = OwnedLog { shared: Arc::new(shared) };
        // An owner without other members has its lease from the start.
        let _ = owned.shared.publish(&owned.shared.state.lock()); // there is no log yet
        owned
    }

    /// Takes the note of the member on this node. From now on the owner writes it before it counts a
    /// batch as written here.
    pub(crate) fn keep(&self, note: Note) {
        *self.shared.note.lock() = Some(note);
    }

    /// Names the log that is told of answers. Called once, as soon as the log is open.
    pub fn attach(&self, log: Box<dyn OwnersLog>) {
        let _ = self.shared.log.set(log);
        self.shared.notify_log();
    }

    /// Resolves once clients may be served: a quorum has the opening batch.
    ///
    /// # Errors
    /// `Fenced` if another owner came first; `Unavailable` after [`OwnedLog::stop`]; the failure of the
    /// member's note.
    pub async fn opened(&self) -> Result<()> {
        let (mut standing, mut stop) =
            (self.shared.standing.subscribe(), self.shared.stop.subscribe());
        let standing = async {
            let ended = standing.wait_for(|standing| *standing != Standing::Opening).await;
            ended.map_or(Standing::Opening, |standing| *standing)
        };
        tokio::select! {
            biased;
            standing = standing => match standing {
                Standing::Open => Ok(()),
                Standing::Superseded(epoch) => Err(superseded(epoch)),
                Standing::Opening => Err(stopped()),
            },
            _ = stop.wait_for(|stop| *stop) => {
                Err(self.shared.failure.get().cloned().unwrap_or_else(stopped))
            }
        }
    }

    /// Returns a receiver of the owner's standing.
    #[must_use]
    pub fn standing(&self) -> watch::Receiver<Standing> {
        self.shared.standing.subscribe()
    }

    /// Ends the owner, because the member on its own node has promised `epoch`. Called before that
    /// promise is answered.
    pub fn on_own_promise(&self, epoch: Epoch) {
        let changes = {
            let mut state = self.shared.state.lock();
            state.owner.on_own_promise(epoch);
            self.shared.publish(&state)
        };
        self.shared.react(changes);
    }

    /// Gives the lease up for good, so that a successor need not wait for its end: each member that is
    /// connected is told. The log ends with `Fenced`. Returns false, without effect, if the owner has not
    /// opened, has ended, or changes the members. No client is served any more.
    pub fn resign(&self) -> bool {
        let changes = {
            let mut state = self.shared.state.lock();
            if !state.owner.resign() {
                return false;
            }
            self.shared.publish(&state)
        };
        self.shared.react(changes);
        self.shared.wake_all();
        if let Some(log) = self.shared.log.get() {
            let what = "serve the pool: this node has handed it over to another one";
            log.fail(Error::new(ErrorKind::Fenced, what));
        }
        true
    }

    /// Ends the senders.
    pub fn stop(&self) {
        self.shared.stop.send_replace(true);
    }

    /// Returns the sequence up to which batches are acknowledged.
    #[must_use]
    pub fn acknowledged(&self) -> u64 {
        self.shared.acknowledged.load(Ordering::Acquire)
    }

    /// Returns the bytes that were written and sent.
    #[must_use]
    pub fn traffic(&self) -> LogTraffic {
        let state = &mut *self.shared.state.lock();
        state.traffic.counted(state.owner.acknowledged())
    }

    /// Returns what is known of the other members.
    #[must_use]
    pub fn statuses(&self) -> BTreeMap<MemberId, MemberStatus> {
        let now = self.shared.now();
        let state = self.shared.state.lock();
        let status = |member: &MemberId| {
            let mut status = state.statuses.get(member).cloned().unwrap_or_default();
            if let Some(progress) = state.owner.progress(member) {
                (status.written, status.synced) = (progress.written, progress.synced);
                status.is_full = progress.is_full;
            }
            let since = state.waits.get(member).copied().unwrap_or(now);
            status.silence = Duration::from_nanos(now.saturating_sub(since));
            (*member, status)
        };
        state.owner.members().filter(|member| **member != self.shared.me).map(status).collect()
    }
}

/// What a change of the state requires of the log.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Changes {
    is_further: bool,
    superseded_by: Option<Epoch>,
}

impl Shared {
    /// Nanoseconds since the machine was started, with the time for which it was suspended: a lease runs
    /// out meanwhile.
    pub(crate) fn now(&self) -> u64 {
        u64::try_from(self.clock.uptime().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Length of a lease in nanoseconds.
    pub(crate) fn lease_ns(&self) -> u64 {
        u64::try_from(self.options.lease.as_nanos()).unwrap_or(u64::MAX).min(LEASE_NS_MAX)
    }

    /// Takes an answer of a member, which came at `now`, `took` after its request. `is_next_waiting` tells that the
    /// owner waits for another one.
    pub(crate) fn on_answer(
        &self,
        member: &MemberId,
        answer: &Answer,
        (now, took, is_next_waiting): (u64, Option<Duration>, bool),
    ) {
        let (changes, fullness) = {
            let state = &mut *self.state.lock();
            if let Some((status, took)) = state.statuses.get_mut(member).zip(took) {
                status.on_answer(took);
            }
            match is_next_waiting {
                true => drop(state.waits.insert(*member, now)),
                false => drop(state.waits.remove(member)),
            }
            let was_full = state.owner.progress(member).is_some_and(|progress| progress.is_full);
            state.owner.on_answer(member, answer, &state.index);
            let is_full = state.owner.progress(member).is_some_and(|progress| progress.is_full);
            (self.publish(state), (was_full, is_full))
        };
        match fullness {
            (false, true) => {
                tracing::warn!(%member, "the ring of a member of the write log is full")
            }
            (true, false) => {
                tracing::info!(%member, "the ring of a member of the write log has room again")
            }
            (false, false) | (true, true) => {}
        }
        self.react(changes);
        // An answer may let the next request go.
        self.wake(member);
    }

    /// Makes the state visible to those who do not lock it.
    pub(crate) fn publish(&self, state: &State) -> Changes {
        let lease_until = state.owner.lease_until().unwrap_or(0);
        let had_lease = self.now() < self.lease_until.swap(lease_until, Ordering::AcqRel);
        let (acknowledged, committed) = (state.owner.acknowledged(), state.owner.committed());
        let acknowledged_before = self.acknowledged.fetch_max(acknowledged, Ordering::AcqRel);
        let committed_before = self.committed.fetch_max(committed, Ordering::AcqRel);
        let superseded_by = state.owner.superseded_by();
        let standing = match superseded_by {
            Some(epoch) => Standing::Superseded(epoch),
            None if state.owner.is_open() => Standing::Open,
            None => Standing::Opening,
        };
        let is_new = self.standing.send_if_modified(|known| {
            let is_new = *known != standing;
            *known = standing;
            is_new
        });
        Changes {
            is_further: acknowledged > acknowledged_before
                || committed > committed_before
                || !had_lease && self.has_lease(),
            superseded_by: superseded_by.filter(|_| is_new),
        }
    }

    /// Tells the log of changes. The caller holds no lock.
    pub(crate) fn react(&self, changes: Changes) {
        if let Some(epoch) = changes.superseded_by {
            self.stop.send_replace(true);
            if let Some(log) = self.log.get() {
                log.fail(superseded(epoch));
            }
        }
        if changes.is_further {
            self.notify_log();
        }
    }

    /// LSN up to which everything is in the store. The caller holds no lock.
    pub(crate) fn trim_lsn(&self) -> Lsn {
        self.log.get().map_or(Lsn::NONE, |log| log.trim_lsn())
    }

    fn notify_log(&self) {
        if let Some(log) = self.log.get() {
            log.on_replicas();
        }
    }

    /// Reads batches behind `after` from the log's ring; none if they were released. Blocks.
    pub(crate) fn read(&self, after: u64, bytes_max: usize) -> Result<Vec<Batch>> {
        let log = self.log.get().ok_or_else(stopped)?;
        let start = log.start();
        let read = match after + 1 < start {
            true => Vec::new(),
            false => log
                .read_batches(after, bytes_max)
                .inspect_err(|error| self.on_damage(error, after + 1))?,
        };
        self.state.lock().index.release(start - 1);
        Ok(read.into_iter().map(|(position, bytes)| Batch { position, bytes }).collect())
    }

    pub(crate) fn wake_all(&self) {
        self.wakes.read().values().for_each(|wake| wake.notify_one());
    }

    /// Ends the owner if the batch that could not be read is damaged: the next owner of the pool gets it
    /// from another member. It is not if it was released meanwhile, or is not yet written.
    fn on_damage(&self, error: &Error, sequence: u64) {
        let Some(log) = self.log.get() else { return };
        let is_written = sequence <= self.own_written.load(Ordering::Acquire);
        let is_damaged = error.kind() == ErrorKind::Corrupt && is_written;
        if is_damaged && sequence >= log.start() && !seeded_bugs().own_damage_unseen {
            tracing::error!(error = %error.chain(), "a batch in the owner's write log is damaged; the owner ends");
            log.fail(error.clone());
        }
    }

    fn wake(&self, member: &MemberId) {
        if let Some(wake) = self.wakes.read().get(member) {
            wake.notify_one();
        }
    }
}

/// The write log of the owner, as its members' answers reach it. It does not keep the log open.
pub trait OwnersLog: Send + Sync + 'static {
    /// See [`Log::on_replicas`](wal::Log::on_replicas).
    fn on_replicas(&self);

    /// See [`Log::fail`](wal::Log::fail).
    fn fail(&self, error: Error);

    /// Sequence of the first batch that the ring has; earlier ones were released.
    fn start(&self) -> u64;

    /// LSN up to which everything is in the store; 0 if the log is closed.
    fn trim_lsn(&self) -> Lsn;

    /// Reads batches behind `sequence` from the ring, as many as fit `bytes_max`, at least one if there
    /// is one. Blocks.
    ///
    /// # Errors
    /// `Corrupt` if the batch behind `sequence` is damaged; a later one ends the list. `Io`; `Unavailable`
    /// if the log is closed.
    fn read_batches(&self, sequence: u64, bytes_max: usize) -> Result<Vec<(Position, Bytes)>>;
}

impl Replicas for Shared {
    fn append(&self, position: Position, bytes: Bytes, is_sync: bool) {
        {
            let state = &mut *self.state.lock();
            state.index.push(position);
            let acknowledged = state.owner.acknowledged();
            state.traffic.on_batch(position.sequence, bytes.len(), acknowledged);
            state.window.push(position, bytes);
            if is_sync {
                state.sync_wanted = position.sequence;
            }
        }
        self.wake_all();
    }

    fn on_own(&self, written: u64, synced: u64) {
        // It ends in the page cache, as the log's own writes do.
        let noted = self.note.lock().as_mut().map_or(Ok(()), |note| note.write(written));
        if let Err(error) = noted {
            if let Some(log) = self.log.get() {
                log.fail(error.clone());
            }
            // The opening batch is written before the log is named.
            let _ = self.failure.set(error);
            self.stop.send_replace(true);
            return;
        }
        self.own_written.fetch_max(written, Ordering::AcqRel);
        let mut state = self.state.lock();
        state.owner.on_own(written, synced);
        // The log looks at the marks after this call.
        let _ = self.publish(&state);
    }

    fn want_sync(&self, sequence: u64) {
        {
            let mut state = self.state.lock();
            if state.sync_wanted >= sequence {
                return;
            }
            state.sync_wanted = sequence;
        }
        self.wake_all();
    }

    fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Acquire)
    }

    fn committed(&self) -> u64 {
        self.committed.load(Ordering::Acquire)
    }

    fn has_lease(&self) -> bool {
        self.now() < self.lease_until.load(Ordering::Acquire)
    }
}

impl OwnedLog {
    /// Returns the members, as the log sees them.
    #[must_use]
    pub fn replicas(&self) -> Arc<dyn Replicas> {
        Arc::clone(&self.shared) as _
    }
}

fn superseded(epoch: Epoch) -> Error {
    let what = format!(
        "serve the pool: another node has taken it over with epoch {epoch}. Writes that were not answered \
         stay in this node's log"
    );
    Error::new(ErrorKind::Fenced, what)
}

fn stopped() -> Error {
    Error::new(ErrorKind::Unavailable, "open the pool: the node stopped serving it")
}
