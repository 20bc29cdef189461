//! The member of a log on this node: a thread that applies the rules of [`Follower`] to a log on disk.
//!
//! Invariants:
//! - Effects are carried out in order, each completely, before the answer that follows them leaves. Requests
//!   that wait share a sync, which comes after their writes and before their answers.
//! - An effect that fails ends the member: nothing is answered afterwards. Its next start finds what is
//!   on disk, and a document that says so if the disk may have lost something.
//! - One thread has the log. Requests wait in a bounded queue. The thread waits for no connection.

use crate::document::DocumentFile;
use crate::note::Note;
use crate::seeded_bugs::seeded_bugs;
use crate::tasks;
use block::env::Clock;
use block::{Error, ErrorKind, Lsn, Position, Result};
use bytes::Bytes;
use replication::{Answer, Batch, Document, Effect, Follower, Found, LogIndex, MemberId, Request};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

/// Requests that wait for the member's thread. Chosen by hand: as many as one owner has under way.
pub(crate) const QUEUE_MAX: usize = 64;
/// Batches in one answer, in bytes. Chosen by hand.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Time between two notes of how far the log is synced. Chosen by hand.
const TICK: Duration = Duration::from_millis(500);
/// Room for answers to one connection: more than an owner has requests under way.
pub(crate) const ANSWERS_MAX: usize = 4 * QUEUE_MAX;

/// The log of a member on disk. One thread uses it. Every method blocks.
pub trait MemberLog: Send + 'static {
    /// Writes batches behind the newest one.
    ///
    /// # Errors
    /// `Full` if there is no room for one of them; those before it are written. After other errors the
    /// member ends: `Corrupt` for batches that are damaged or do not follow, `Io`.
    fn write(&mut self, batches: &[Batch]) -> Result<()>;

    /// Gives up batches whose entries are all at or below `trim_lsn`, which are in the store, as far as
    /// their sequences are not above `last`.
    fn release(&mut self, trim_lsn: Lsn, last: u64);

    /// Drops every batch above `sequence`.
    ///
    /// # Errors
    /// `Io`.
    fn cut(&mut self, sequence: u64) -> Result<()>;

    /// Drops every batch. The log begins behind `before` from now on, also after a loss of power.
    ///
    /// # Errors
    /// `Io`.
    fn reset(&mut self, before: Position) -> Result<()>;

    /// Puts everything that was written on stable storage.
    ///
    /// # Errors
    /// `Io`.
    fn sync(&mut self) -> Result<()>;

    /// Reads batches behind `sequence`, as many as fit `bytes_max`, at least one if there is one.
    ///
    /// # Errors
    /// `Corrupt` if the batch behind `sequence` is damaged; a later one ends the list. `Io`.
    fn read(&self, sequence: u64, bytes_max: usize) -> Result<Vec<(Position, Bytes)>>;

    /// Sequence of the first batch that the log has or will have; earlier ones were released.
    fn start(&self) -> u64;

    /// Sequence of the newest batch; in an empty log that of the batch before the first one.
    fn last(&self) -> u64;
}

/// What the log on disk holds at the start of a member.
#[derive(Clone, Debug)]
pub struct FoundLog {
    /// The positions in it.
    pub index: LogIndex,
    /// Sequence of the first batch whose bytes are not whole, if the log does not end in free space.
    pub damaged: Option<u64>,
    /// Identity of the page cache that it was read from.
    pub page_cache: Uuid,
    /// A write or sync of the owner that last ran on the log has failed, and no later owner has sent a
    /// batch since.
    pub has_failed: bool,
}

enum Job {
    Request(Request, mpsc::Sender<Answer>),
    Index(oneshot::Sender<(Document, LogIndex)>),
    Tick,
    /// Ends the thread. Requests behind it are not answered.
    Close,
}

/// What the thread and the handles share.
#[derive(Debug)]
struct Shared {
    clock: Arc<dyn Clock>,
    /// Time of the newest append, or of the start, in nanoseconds of [`Shared::now`].
    appended_at: AtomicU64,
}

impl Shared {
    /// Nanoseconds since the machine was started, with the time for which it was suspended: the lease of
    /// an owner runs out meanwhile.
    fn now(&self) -> u64 {
        u64::try_from(self.clock.uptime().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// A running member. Dropping it, and all handles to its queue, ends the thread once it has finished the
/// requests that it has.
#[derive(Debug)]
pub struct Member {
    jobs: Jobs,
    shared: Arc<Shared>,
    /// Brings what the thread leaves at its end.
    closed: oneshot::Receiver<Result<Closed>>,
    id: MemberId,
}

/// The queue of a member.
#[derive(Clone, Debug)]
pub(crate) struct Jobs(mpsc::Sender<Job>);

/// What a member leaves at its end. The log is closed.
#[derive(Debug)]
pub(crate) struct Closed {
    pub(crate) file: DocumentFile,
    pub(crate) index: LogIndex,
}

impl<L: MemberLog + ?Sized> MemberLog for Box<L> {
    fn write(&mut self, batches: &[Batch]) -> Result<()> {
        (**self).write(batches)
    }

    fn cut(&mut self, sequence: u64) -> Result<()> {
        (**self).cut(sequence)
    }

    fn reset(&mut self, before: Position) -> Result<()> {
        (**self).reset(before)
    }

    fn sync(&mut self) -> Result<()> {
        (**self).sync()
    }

    fn read(&self, sequence: u64, bytes_max: usize) -> Result<Vec<(Position, Bytes)>> {
        (**self).read(sequence, bytes_max)
    }

    fn release(&mut self, trim_lsn: Lsn, last: u64) {
        (**self).release(trim_lsn, last);
    }

    fn start(&self) -> u64 {
        (**self).start()
    }

    fn last(&self) -> u64 {
        (**self).last()
    }
}

/// The state of a member.
struct Running<L> {
    follower: Follower,
    log: L,
    file: DocumentFile,
    note: Note,
    shared: Arc<Shared>,
    /// The last batch had no room.
    is_full: bool,
    /// Answers that wait for a sync, with their ways; `None` if none is owed.
    owed: Option<Vec<(mpsc::Sender<Answer>, Answer)>>,
}

impl Member {
    /// Starts the member of `file` on `log`. Blocks until the log is synced and the start is stored.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn start<L: MemberLog>(
        (file, note): (DocumentFile, Note),
        log: L,
        found: FoundLog,
        clock: Arc<dyn Clock>,
    ) -> Result<Member> {
        let id = file.stored.member;
        let shared = Arc::new(Shared { clock, appended_at: AtomicU64::new(0) });
        shared.appended_at.store(shared.now(), Ordering::Relaxed);
        let (FoundLog { index: log_index, damaged, page_cache, has_failed }, noted) =
            (found, note.noted());
        let document = file.stored.document;
        let found = Found { document, log: log_index, damaged, noted, page_cache, has_failed };
        let (follower, effects) = Follower::start(found, shared.now());
        let mut running = Running {
            follower,
            log,
            file,
            note,
            shared: Arc::clone(&shared),
            is_full: false,
            owed: None,
        };
        if let Err(error) = running.carry_out(effects, None).and_then(|()| running.settle()) {
            running.on_failure(&error);
            return Err(error);
        }
        let (jobs, queue) = mpsc::channel(QUEUE_MAX);
        let (ended, closed) = oneshot::channel();
        let run = async move {
            let _ = ended.send(running.run(queue).await); // nobody waits for a member that was dropped
        };
        tasks::spawn_thread("spindle-member", run)
            .map_err(|e| Error::with_source(ErrorKind::Io, "start the thread of a member", e))?;
        Ok(Member { jobs: Jobs(jobs), shared, closed, id })
    }

    /// Identity of the member.
    #[must_use]
    pub fn id(&self) -> MemberId {
        self.id
    }

    /// Time since an owner last sent a request of the newest epoch, since a candidate first asked for the promise of a
    /// later one, or since the start.
    #[must_use]
    pub fn silence(&self) -> Duration {
        let at = self.shared.appended_at.load(Ordering::Relaxed);
        Duration::from_nanos(self.shared.now().saturating_sub(at))
    }

    /// Returns a handle to the queue.
    #[must_use]
    pub(crate) fn jobs(&self) -> Jobs {
        self.jobs.clone()
    }

    /// Reports whether the thread has ended, as it does after a failure.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.jobs.0.is_closed()
    }

    /// Notes in the document how far the log is synced, unless the member is busy. Called about twice a
    /// second.
    pub fn tick(&self) {
        let _ = self.jobs.0.try_send(Job::Tick);
    }

    /// Time between two calls of [`Member::tick`].
    pub const TICK: Duration = TICK;

    /// Ends the member after the requests that it has. The log is closed afterwards.
    ///
    /// # Errors
    /// The failure that ended it earlier.
    pub(crate) async fn close(self) -> Result<Closed> {
        let _ = self.jobs.0.send(Job::Close).await; // one that has ended needs none
        drop(self.jobs);
        self.closed.await.unwrap_or_else(|_| Err(ended()))
    }
}

impl Jobs {
    /// Hands a request to the member. Its answer, if it has one, comes through `answers`.
    ///
    /// # Errors
    /// `Unavailable` if the member has ended.
    pub(crate) async fn request(
        &self,
        request: Request,
        answers: &mpsc::Sender<Answer>,
    ) -> Result<()> {
        self.0.send(Job::Request(request, answers.clone())).await.map_err(|_| ended())
    }

    /// Returns the document and the positions in the log.
    ///
    /// # Errors
    /// `Unavailable` if the member has ended.
    pub(crate) async fn state(&self) -> Result<(Document, LogIndex)> {
        let (sender, state) = oneshot::channel();
        self.0.send(Job::Index(sender)).await.map_err(|_| ended())?;
        state.await.map_err(|_| ended())
    }
}

/// Sends an answer. Its channel has room for everything that an owner has under way, and one that has ended needs
/// none.
fn send(to: &mpsc::Sender<Answer>, answer: Answer) {
    let _ = to.try_send(answer);
}

pub(crate) fn ended() -> Error {
    Error::new(ErrorKind::Unavailable, "ask the member of the write log on this node: it has ended")
}

impl<L: MemberLog> Running<L> {
    async fn run(mut self, mut queue: mpsc::Receiver<Job>) -> Result<Closed> {
        let mut is_closing = false;
        while !is_closing && let Some(job) = queue.recv().await {
            let mut done = self.on_job(job);
            // Requests that wait share the sync of the first one.
            for _ in 1..QUEUE_MAX {
                if self.owed.is_none() || !matches!(done, Ok(false)) {
                    break;
                }
                let Ok(job) = queue.try_recv() else { break };
                done = self.on_job(job);
            }
            match done.and_then(|ends| self.settle().map(|()| ends)) {
                Ok(ends) => is_closing = ends,
                Err(error) => {
                    tracing::error!(
                        error = %error.chain(),
                        "the member of the write log on this node has failed and answers nothing more"
                    );
                    self.on_failure(&error);
                    return Err(error);
                }
            }
        }
        Ok(Closed { index: self.follower.log().clone(), file: self.file })
    }

    /// Does a job, but for a sync that it needs. Returns whether the member ends.
    fn on_job(&mut self, job: Job) -> Result<bool> {
        match job {
            Job::Close => return Ok(true),
            Job::Request(request, answers) => self.on_request(request, &answers)?,
            Job::Index(sender) => {
                self.settle()?;
                // A caller that is gone needs no answer.
                let _ = sender.send((*self.follower.document(), self.follower.log().clone()));
            }
            Job::Tick => {
                let effects = self.follower.on_tick().into_iter().collect();
                self.carry_out(effects, None)?;
            }
        }
        Ok(false)
    }

    /// Carries out the sync that is owed, and sends the answers that wait for it.
    fn settle(&mut self) -> Result<()> {
        let Some(answers) = self.owed.take() else { return Ok(()) };
        self.log.sync()?;
        for (to, answer) in answers {
            send(&to, answer);
        }
        Ok(())
    }

    /// Sends an answer, once the sync that is owed is done.
    fn answer(&mut self, to: Option<&mpsc::Sender<Answer>>, answer: Answer) {
        let Some(to) = to else { return };
        match &mut self.owed {
            Some(owed) if !seeded_bugs().shared_sync_answered_early => {
                owed.push((to.clone(), answer));
            }
            Some(_) | None => send(to, answer),
        }
    }

    /// Notes in the document that the member's files could not be written or synced.
    fn on_failure(&mut self, error: &Error) {
        // Others concern the batches, or the room for them.
        let is_of_disk = error.kind() == ErrorKind::Io;
        if !is_of_disk || seeded_bugs().failure_not_stored {
            return;
        }
        let document = self.follower.on_failure(self.file.stored.document);
        if let Err(error) = self.file.store_failure(document) {
            tracing::error!(
                error = %error.chain(),
                "could not note that the member's files failed; unmount and mount the file system of the \
                 log before the next start, which then takes what was not synced for lost"
            );
        }
    }

    fn on_request(&mut self, request: Request, answers: &mpsc::Sender<Answer>) -> Result<()> {
        let now = self.shared.now();
        let is_append = matches!(&request, Request::Append { lease: Some(_), .. });
        let promised = self.follower.document().promised;
        let is_current = request.epoch() >= promised;
        // A candidate gets the time to open the pool before this node tries to.
        let is_candidate =
            matches!(&request, Request::Promise { .. }) && request.epoch() > promised;
        if (is_append && is_current) || is_candidate {
            self.shared.appended_at.store(now, Ordering::Relaxed);
        }
        let effects = self.follower.on_request(now, request);
        self.carry_out(effects, Some(answers))
    }

    /// Carries effects out, but for the last sync, which is owed from then on, and the answers behind it.
    fn carry_out(
        &mut self,
        effects: Vec<Effect>,
        answers: Option<&mpsc::Sender<Answer>>,
    ) -> Result<()> {
        let mut effects = effects.into_iter();
        while let Some(effect) = effects.next() {
            match &effect {
                Effect::Sync | Effect::Write(_) | Effect::Release { .. } | Effect::Answer(_) => {}
                _ => self.settle()?,
            }
            match effect {
                Effect::Store(document) => self.file.store(document)?,
                Effect::Cut(sequence) => {
                    self.note.lower(sequence)?;
                    self.log.cut(sequence)?;
                }
                Effect::Reset(before) => {
                    self.note.lower(before.sequence)?;
                    self.log.reset(before)?;
                }
                Effect::Release { .. } if seeded_bugs().trim_unheard => {}
                Effect::Release { trim_lsn, last } => {
                    self.log.release(trim_lsn, last);
                    self.follower.on_released(self.log.start() - 1);
                }
                Effect::Write(batches) => {
                    let written = self.log.write(&batches);
                    let full = match &written {
                        Err(error) if error.kind() == ErrorKind::Full => {
                            self.settle()?;
                            Some(self.on_full(error, effects.by_ref()))
                        }
                        _ => None,
                    };
                    if full.is_none() {
                        written?;
                        self.is_full = false;
                    }
                    self.note.write(self.follower.log().tail().sequence)?;
                    self.follower.on_released(self.log.start() - 1);
                    if let Some(instead) = full {
                        return self.carry_out(instead, answers);
                    }
                }
                Effect::Sync => {
                    self.owed.get_or_insert_default();
                }
                Effect::Answer(answer) => self.answer(answers, answer),
                Effect::Send { epoch, run, start, previous } => {
                    match self.log.read(previous.sequence, ANSWER_BYTES_MAX) {
                        Ok(read) => {
                            let batch = |(position, bytes)| Batch { position, bytes };
                            let batches = read.into_iter().map(batch).collect();
                            let read = Answer::Batches { epoch, run, start, previous, batches };
                            self.answer(answers, read);
                        }
                        Err(error) if error.kind() == ErrorKind::Corrupt => {
                            tracing::error!(
                                error = %error.chain(),
                                "a batch in this member's log is damaged; an owner brings it again"
                            );
                            let effects = self.follower.on_damage(previous.sequence + 1);
                            self.carry_out(effects, answers)?;
                            // The candidate asks again, and learns what the log has now.
                            let (run, batches) = (self.follower.document().run, Vec::new());
                            let read = Answer::Batches { epoch, run, start, previous, batches };
                            self.answer(answers, read);
                        }
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns what to do in place of the effects behind a write for which the log had no room.
    fn on_full(&mut self, error: &Error, undone: impl Iterator<Item = Effect>) -> Vec<Effect> {
        if !std::mem::replace(&mut self.is_full, true) {
            tracing::warn!(
                error = %error.chain(),
                "the ring of the member on this node is full; it takes the owner's batches once the store has \
                 the oldest ones"
            );
        }
        self.follower.on_full(self.file.stored.document, self.log.last(), undone)
    }
}
