//! State shared by the callers and the log's core: the queue, the marks that acknowledgements wait
//! for, and the waiters.
//!
//! Invariants:
//! - An LSN is assigned under the queue's lock when the entry is queued, so LSN order is queue
//!   order.
//! - `acked` and `durable` only rise, and rise before their waiters are woken.
//! - A failure is set once and stays: every waiter and every later call gets it.
//! - An entry that is refused while it waits leaves a marker in its place, and only its own waiter
//!   gets the refusal.

use crate::options::Wait;
use crate::overlay::Overlay;
use crate::ring::batch_places::BatchPlaces;
use crate::ring::drive::DirtyMark;
use crate::ring::queue::{Group, Place, Placed, Queue, Ticket};
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

#[derive(Debug, Default)]
struct Waiters {
    /// Ordered by LSN, then by the waiter's number.
    acked: BTreeMap<(u64, u64), Waker>,
    durable: BTreeMap<(u64, u64), Waker>,
    /// Entries that left the queue unwritten, kept until the waiter of each has gone.
    refused: HashMap<u64, Error>,
    next_id: u64,
}

impl Waiters {
    fn of(&mut self, wait: Wait) -> &mut BTreeMap<(u64, u64), Waker> {
        match wait {
            Wait::Written => &mut self.acked,
            Wait::Durable => &mut self.durable,
        }
    }
}

/// Moves the waiters up to `lsn` to `due`.
fn take_due(waiters: &mut BTreeMap<(u64, u64), Waker>, lsn: Lsn, due: &mut Vec<Waker>) {
    if waiters.first_key_value().is_some_and(|((first, _), _)| *first <= lsn.0) {
        let later = waiters.split_off(&(lsn.0 + 1, 0));
        due.extend(std::mem::replace(waiters, later).into_values());
    }
}

/// The state of the log that a waiter waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) lsn: Lsn,
    pub(crate) wait: Wait,
    /// Whether the waiter has appended the entry with this LSN: then it also gets a refusal as an
    /// answer. Other waiters only wait until the log has reached the LSN.
    pub(crate) is_entry: bool,
}

/// The shared state; see the head of the file.
#[derive(Debug)]
pub(crate) struct SharedRing {
    pub(crate) queue: Mutex<Queue>,
    waiters: Mutex<Waiters>,
    pub(crate) overlay: Overlay,
    /// The batches in the ring, kept only for a log that other members have: they may need earlier ones.
    pub(crate) places: Mutex<BatchPlaces>,
    acked: AtomicU64,
    durable: AtomicU64,
    /// Newest entry that is in a batch.
    taken: AtomicU64,
    destaged: AtomicU64,
    sync_wanted: AtomicU64,
    /// Number of refused entries whose waiters have not gone; written under the waiters' lock.
    refused_count: AtomicUsize,
    /// Newest entry covered by any flush, including flushes that did not have to wait.
    flushed: AtomicU64,
    /// Whether the entries just acknowledged will probably be flushed next.
    pub(crate) is_flush_expected: AtomicBool,
    /// Set after each change that the core has to see.
    pub(crate) dirty: DirtyMark,
    failure: OnceLock<Error>,
    /// Newest entry that was acknowledged before a write or sync of the log's files failed.
    disk_failed_at: OnceLock<Lsn>,
    /// Whether the failure is an orderly end.
    is_finished: AtomicBool,
    /// Log position: bytes written over all wraps, including those skipped at the ends of files.
    pub(crate) position: AtomicU64,
    /// Log position up to which everything is destaged.
    pub(crate) released_position: AtomicU64,
    pub(crate) counters: Counters,
    /// Counts up when a generation is frozen or released and when the log becomes full, fails or
    /// closes.
    pub(crate) changed: tokio::sync::watch::Sender<u64>,
}

/// Counters since the open.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) batch_count: AtomicU64,
    pub(crate) batch_bytes: AtomicU64,
    pub(crate) entry_count: AtomicU64,
    pub(crate) sync_count: AtomicU64,
    /// Whether the core could not place a batch when it last tried.
    pub(crate) is_full: AtomicBool,
    /// Number of existing files of the ring.
    pub(crate) made_count: AtomicU32,
    /// The reason that the disk gave when it last refused another file.
    pub(crate) refusal: Mutex<Option<String>>,
}

impl SharedRing {
    pub(crate) fn new(
        overlay: Overlay,
        last_lsn: Lsn,
        destaged: Lsn,
        queue_bytes_max: u64,
        position: u64,
    ) -> Self {
        let queue = Queue::new(last_lsn.next(), queue_bytes_max);
        SharedRing {
            queue: Mutex::new(queue),
            waiters: Mutex::default(),
            overlay,
            places: Mutex::default(),
            acked: AtomicU64::new(last_lsn.0),
            durable: AtomicU64::new(last_lsn.0),
            taken: AtomicU64::new(last_lsn.0),
            destaged: AtomicU64::new(destaged.0),
            sync_wanted: AtomicU64::new(0),
            refused_count: AtomicUsize::new(0),
            flushed: AtomicU64::new(0),
            is_flush_expected: AtomicBool::new(false),
            dirty: DirtyMark::new(),
            failure: OnceLock::new(),
            disk_failed_at: OnceLock::new(),
            is_finished: AtomicBool::new(false),
            position: AtomicU64::new(position),
            released_position: AtomicU64::new(0),
            counters: Counters::default(),
            changed: tokio::sync::watch::Sender::new(0),
        }
    }

    /// Queues a group: it gets LSNs, or waits for room.
    pub(crate) fn push(&self, group: Group) -> Result<Place> {
        let wait = group.wait();
        let place = {
            let mut queue = self.queue.lock();
            self.check()?;
            queue.add(group)?
        };
        if let Place::At(lsn) = place {
            if wait == Wait::Durable {
                self.want_sync(lsn);
            }
            self.dirty.set();
        }
        Ok(place)
    }

    /// Frees room in the queue and places the groups that wait for it.
    pub(crate) fn give_back(&self, room_bytes: u64) {
        if room_bytes > 0 {
            let placed = self.queue.lock().give_back(room_bytes);
            self.on_placed(placed);
        }
    }

    fn on_placed(&self, placed: Placed) {
        if let Some(lsn) = placed.durable_lsn {
            self.want_sync(lsn);
        }
        if placed.is_any {
            self.dirty.set();
        }
    }

    /// See [`Queue::leave`].
    pub(crate) fn leave(&self, ticket: &mut Ticket) -> Option<Lsn> {
        let mut queue = self.queue.lock();
        let placed_at = queue.leave(ticket);
        let placed = queue.give_back(0); // the next group may fit
        drop(queue);
        self.on_placed(placed);
        placed_at
    }

    /// Takes back the group whose last entry has `last_lsn`. Returns false if it is in a batch and
    /// will be written.
    pub(crate) fn withdraw(&self, last_lsn: Lsn) -> bool {
        let mut queue = self.queue.lock();
        let freed = queue.withdraw(last_lsn);
        let placed = freed.map(|freed| queue.give_back(freed)).unwrap_or_default();
        // Done under the queue's lock: another entry may get the same LSN afterwards.
        self.forget_refusal(last_lsn);
        drop(queue);
        self.on_placed(placed);
        freed.is_some()
    }

    /// See [`crate::Log::refuse`].
    pub(crate) fn refuse(&self, volume: VolumeId, error: Option<Error>) {
        let mut queue = self.queue.lock();
        let Some(error) = error else { return queue.accept(volume) };
        let (refused, freed) = queue.refuse(volume, &error);
        let mut due = Vec::new();
        {
            // Done under the queue's lock: an entry that became a marker must not be answered
            // before its refusal is visible.
            let mut waiters = self.waiters.lock();
            for lsn in refused {
                waiters.refused.insert(lsn.0, error.clone());
                for wait in [Wait::Written, Wait::Durable] {
                    let of_lsn = waiters.of(wait);
                    let ids: Vec<_> =
                        of_lsn.range((lsn.0, 0)..=(lsn.0, u64::MAX)).map(|(key, _)| *key).collect();
                    due.extend(ids.into_iter().filter_map(|key| of_lsn.remove(&key)));
                }
            }
            self.refused_count.store(waiters.refused.len(), Ordering::Release);
        }
        let placed = queue.give_back(freed);
        drop(queue);
        self.on_placed(placed);
        self.dirty.set();
        due.into_iter().for_each(Waker::wake);
    }

    /// Removes the refusal of an entry that has no waiter any more.
    pub(crate) fn forget_refusal(&self, lsn: Lsn) {
        if self.refused_count.load(Ordering::Acquire) > 0 {
            let mut waiters = self.waiters.lock();
            waiters.refused.remove(&lsn.0);
            self.refused_count.store(waiters.refused.len(), Ordering::Release);
        }
    }

    /// Returns the reason why the entry was not written, if it was refused. Call it after the entry
    /// counts as answered.
    fn refusal(&self, lsn: Lsn) -> Result<()> {
        if self.refused_count.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        self.waiters.lock().refused.get(&lsn.0).cloned().map_or(Ok(()), Err)
    }

    /// Requests that everything up to `lsn` reach stable storage.
    pub(crate) fn want_sync(&self, lsn: Lsn) {
        self.sync_wanted.fetch_max(lsn.0, Ordering::AcqRel);
        self.dirty.set();
    }

    /// Returns the newest entry that a flush beginning here covers, and records it for
    /// [`SharedRing::flushed`].
    pub(crate) fn begin_flush(&self) -> Lsn {
        let target = self.acked();
        self.flushed.fetch_max(target.0, Ordering::Relaxed);
        target
    }

    /// Returns the newest entry that any flush has covered.
    pub(crate) fn flushed(&self) -> Lsn {
        Lsn(self.flushed.load(Ordering::Relaxed))
    }

    pub(crate) fn sync_wanted(&self) -> Lsn {
        Lsn(self.sync_wanted.load(Ordering::Acquire))
    }

    /// Returns the newest entry for which [`Wait::Written`] is answered.
    pub(crate) fn acked(&self) -> Lsn {
        Lsn(self.acked.load(Ordering::Acquire))
    }

    /// Returns the newest entry for which [`Wait::Durable`] is answered.
    pub(crate) fn durable(&self) -> Lsn {
        Lsn(self.durable.load(Ordering::Acquire))
    }

    /// Returns the newest entry that is in a batch.
    pub(crate) fn taken(&self) -> Lsn {
        Lsn(self.taken.load(Ordering::Acquire))
    }

    /// Returns whether the entry is in a batch, whose driver then does the rest.
    pub(crate) fn is_taken(&self, lsn: Lsn) -> bool {
        lsn.0 <= self.taken.load(Ordering::Acquire)
    }

    pub(crate) fn set_taken(&self, lsn: Lsn) {
        self.taken.store(lsn.0, Ordering::Release);
    }

    pub(crate) fn destaged(&self) -> Lsn {
        Lsn(self.destaged.load(Ordering::Acquire))
    }

    pub(crate) fn set_destaged(&self, lsn: Lsn, position: u64) {
        self.destaged.fetch_max(lsn.0, Ordering::AcqRel);
        self.released_position.fetch_max(position, Ordering::AcqRel);
        self.dirty.set();
    }

    /// Returns the LSN of the newest queued entry.
    pub(crate) fn last_lsn(&self) -> Lsn {
        Lsn(self.queue.lock().next_lsn.0 - 1)
    }

    /// Returns the failure as an error, if there was one.
    pub(crate) fn check(&self) -> Result<()> {
        self.failure.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Like [`SharedRing::check`], but an orderly end is no failure: entries that reached the log
    /// before it are there.
    pub(crate) fn check_unfailed(&self) -> Result<()> {
        if self.is_finished.load(Ordering::Acquire) { Ok(()) } else { self.check() }
    }

    pub(crate) fn is_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// Fails the log for good. All present and later waiters get the error.
    pub(crate) fn fail(&self, error: Error) {
        if self.failure.set(error.clone()).is_err() {
            return;
        }
        match error.kind() {
            ErrorKind::Fenced => {
                tracing::info!(error = %error.chain(), "the write log accepts nothing more");
            }
            _ => {
                tracing::error!(error = %error.chain(), "the write log failed and accepts nothing more");
            }
        }
        self.queue.lock().clear();
        self.wake_all();
    }

    /// Like [`SharedRing::fail`], after a failed write or sync of the log's files. Called by the thread
    /// that raises the marks, which raises none from then on.
    pub(crate) fn fail_of_disk(&self, error: Error) {
        let _ = self.disk_failed_at.set(self.acked());
        self.fail(error);
    }

    /// Returns the newest entry that was acknowledged before a write or sync of the log's files
    /// failed; `None` if none failed.
    pub(crate) fn disk_failed_at(&self) -> Option<Lsn> {
        self.disk_failed_at.get().copied()
    }

    /// Returns the reason why the log takes nothing more, unless it was closed in order.
    pub(crate) fn failure(&self) -> Option<&Error> {
        self.failure.get().filter(|_| !self.is_finished.load(Ordering::Acquire))
    }

    pub(crate) fn wake_all(&self) {
        let mut waiters = self.waiters.lock();
        let acked = std::mem::take(&mut waiters.acked);
        let durable = std::mem::take(&mut waiters.durable);
        drop(waiters);
        acked.into_values().chain(durable.into_values()).for_each(Waker::wake);
        self.notify_changed();
    }

    pub(crate) fn notify_changed(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    /// Like [`SharedRing::fail`], for an orderly end.
    pub(crate) fn finish(&self, error: Error) {
        if self.failure.set(error).is_ok() {
            self.is_finished.store(true, Ordering::Release);
            self.queue.lock().clear();
            self.wake_all();
        }
    }

    /// Raises the marks and wakes the waiters that they answer. Does nothing once the disk has
    /// failed.
    pub(crate) fn advance(&self, acked: Lsn, durable: Lsn) {
        if self.disk_failed_at().is_some() {
            return;
        }
        let acked_before = self.acked.fetch_max(acked.0, Ordering::AcqRel);
        let durable_before = self.durable.fetch_max(durable.0, Ordering::AcqRel);
        if acked_before >= acked.0 && durable_before >= durable.0 {
            return;
        }
        let mut due = Vec::new();
        {
            let mut waiters = self.waiters.lock();
            take_due(&mut waiters.acked, acked, &mut due);
            take_due(&mut waiters.durable, durable, &mut due);
        }
        due.into_iter().for_each(Waker::wake);
    }

    /// Returns whether `lsn` is answered.
    pub(crate) fn is_reached(&self, lsn: Lsn, wait: Wait) -> bool {
        lsn <= match wait {
            Wait::Written => self.acked(),
            Wait::Durable => self.durable(),
        }
    }

    /// Ready when `target` is answered or the log failed; otherwise `context` is woken at that time.
    /// `id` is the waiter's own, assigned at the first call.
    pub(crate) fn poll_reached(
        &self,
        target: Target,
        id: &mut Option<u64>,
        context: &mut Context<'_>,
    ) -> Poll<Result<()>> {
        let Target { lsn, wait, is_entry } = target;
        if self.is_reached(lsn, wait) {
            return Poll::Ready(if is_entry { self.refusal(lsn) } else { Ok(()) });
        }
        let mut waiters = self.waiters.lock();
        if is_entry && let Some(error) = waiters.refused.get(&lsn.0) {
            return Poll::Ready(Err(error.clone()));
        }
        // The marks rise before a waker takes this lock, so a check under the lock misses nothing.
        if self.is_reached(lsn, wait) {
            return Poll::Ready(Ok(()));
        }
        if let Err(error) = self.check() {
            return Poll::Ready(Err(error));
        }
        let id = *id.get_or_insert_with(|| {
            waiters.next_id += 1;
            waiters.next_id
        });
        waiters.of(wait).insert((lsn.0, id), context.waker().clone());
        Poll::Pending
    }

    /// Removes the wake-up of a waiter that went away.
    pub(crate) fn forget(&self, lsn: Lsn, wait: Wait, id: u64) {
        self.waiters.lock().of(wait).remove(&(lsn.0, id));
    }

    /// Returns the log space from the oldest entry that is not destaged to the head.
    pub(crate) fn used_bytes(&self) -> u64 {
        let position = self.position.load(Ordering::Acquire);
        position.saturating_sub(self.released_position.load(Ordering::Acquire))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::entry::EntryKind;
    use crate::options::NewEntry;
    use crate::seeded_bugs::SeededBugs;

    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn entry(lsn: Lsn) -> Target {
        Target { lsn, wait: Wait::Written, is_entry: true }
    }

    fn shared() -> SharedRing {
        SharedRing::new(
            Overlay::new(Lsn(10), 0, SeededBugs::default()),
            Lsn(10),
            Lsn(10),
            1 << 20,
            4096,
        )
    }

    #[test]
    fn mark_wakes_only_the_waiters_that_it_answers() {
        let (shared, count) = (shared(), Arc::new(Count(AtomicUsize::new(0))));
        let waker = Waker::from(Arc::clone(&count));
        let mut context = Context::from_waker(&waker);
        let mut poll = |lsn, wait, id: &mut Option<u64>| {
            shared
                .poll_reached(Target { lsn: Lsn(lsn), wait, is_entry: true }, id, &mut context)
                .is_ready()
        };
        let mut ids = [None; 4];
        assert!(poll(10, Wait::Durable, &mut None));
        assert!(!poll(11, Wait::Written, &mut ids[0]));
        assert!(!poll(11, Wait::Durable, &mut ids[1]));
        assert!(!poll(12, Wait::Written, &mut ids[2]));
        assert!(!poll(13, Wait::Written, &mut ids[3]));
        shared.forget(Lsn(13), Wait::Written, ids[3].expect("waits"));
        shared.advance(Lsn(11), Lsn(10));
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        shared.advance(Lsn(13), Lsn(13));
        assert_eq!(count.0.load(Ordering::Relaxed), 3, "the one that was forgotten is not woken");
    }

    #[test]
    fn refused_writes_leave_the_queue_and_their_places_stay() {
        let (shared, count) = (shared(), Arc::new(Count(AtomicUsize::new(0))));
        let waker = Waker::from(Arc::clone(&count));
        let mut context = Context::from_waker(&waker);
        let push = |volume, kind| {
            let payload = bytes::Bytes::from(vec![1; 512 * usize::from(kind == EntryKind::Write)]);
            let volume = VolumeId(volume);
            let entry = NewEntry { volume, kind, start_sector: 8, sector_count: 1, payload };
            match shared.push(Group::one(entry, Wait::Written, 512))? {
                Place::At(lsn) => Ok::<Lsn, Error>(lsn),
                Place::Waits(_) => panic!("there is room"),
            }
        };
        let lsns = [
            push(1, EntryKind::Write).unwrap(),
            push(2, EntryKind::Write).unwrap(),
            push(1, EntryKind::Trim).unwrap(),
        ];
        assert_eq!(lsns, [Lsn(11), Lsn(12), Lsn(13)]);
        let mut ids = [None; 3];
        for (lsn, id) in lsns.iter().zip(&mut ids) {
            assert!(shared.poll_reached(entry(*lsn), id, &mut context).is_pending());
        }
        shared.refuse(VolumeId(1), Some(Error::new(ErrorKind::Unavailable, "too much of it")));
        assert_eq!(count.0.load(Ordering::Relaxed), 1, "the one writer wakes");
        let kinds: Vec<_> = shared.queue.lock().pending.iter().map(|p| p.entry.kind).collect();
        assert_eq!(kinds, [EntryKind::Marker, EntryKind::Write, EntryKind::Trim]);
        assert!(push(1, EntryKind::Write).is_err());
        // It stays refused although its place in the log is written and answered.
        shared.advance(Lsn(13), Lsn(13));
        for (lsn, is_refused) in lsns.into_iter().zip([true, false, false]) {
            let polled = shared.poll_reached(entry(lsn), &mut None, &mut context);
            let Poll::Ready(answer) = polled else { panic!("{lsn} still waits") };
            assert_eq!(answer.is_err(), is_refused, "{lsn}");
            let place = Target { is_entry: false, ..entry(lsn) };
            let polled = shared.poll_reached(place, &mut None, &mut context);
            assert!(matches!(polled, Poll::Ready(Ok(()))), "the log has come to {lsn}");
        }
        shared.forget_refusal(Lsn(11));
        assert_eq!(shared.refused_count.load(Ordering::Relaxed), 0);
        shared.refuse(VolumeId(1), None);
        assert_eq!(push(1, EntryKind::Write).unwrap(), Lsn(14));
        // Without a waiter no refusal may be recorded, as nothing would remove it.
        assert!(shared.withdraw(Lsn(14)));
        shared.refuse(VolumeId(1), Some(Error::new(ErrorKind::Unavailable, "too much of it")));
        assert_eq!(shared.refused_count.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn failure_reaches_present_and_later_waiters() {
        let (shared, count) = (shared(), Arc::new(Count(AtomicUsize::new(0))));
        let waker = Waker::from(Arc::clone(&count));
        let mut context = Context::from_waker(&waker);
        let mut id = None;
        assert!(shared.poll_reached(entry(Lsn(11)), &mut id, &mut context).is_pending());
        shared.finish(Error::new(ErrorKind::Io, "sync the write log"));
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        let Poll::Ready(Err(error)) = shared.poll_reached(entry(Lsn(11)), &mut id, &mut context)
        else {
            panic!("still waits");
        };
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(shared.check().is_err());
    }
}
