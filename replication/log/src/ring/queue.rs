//! The queue in front of the log: entries that wait for a batch, and entries that wait for room in
//! the queue.
//!
//! Invariants:
//! - LSN order is the order of the calls. An entry that waits for room is placed by the caller that
//!   makes the room, before any entry that came later. Its own task does not have to run first.
//! - The entries of a group have consecutive LSNs, go into one batch, and are withdrawn or refused
//!   together.
//! - An entry that is not in a batch can be withdrawn and leaves a marker. Withdrawing the newest
//!   entry leaves nothing, and its LSN is assigned again, so clients that connect and disconnect
//!   while the log is full do not fill the queue.

use crate::format::entry::{EntryKind, EntryRow};
use crate::options::{NewEntry, Wait};
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use std::collections::{HashMap, VecDeque};
use tokio::sync::oneshot;

/// Room that an entry takes in addition to its payload, in bytes. The marker of a withdrawn entry keeps it, so markers
/// are bounded like entries. Source: the size of a queued entry, rounded.
pub(crate) const ENTRY_OVERHEAD_BYTES: u64 = 64;
/// Maximum entries of one group. Chosen by hand: the head, the range and the tail of an unaligned
/// request are three.
const GROUP_ENTRIES_MAX: usize = 4;

/// An entry that waits for a batch.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) entry: NewEntry,
    pub(crate) row: EntryRow,
    pub(crate) wait: Wait,
    /// Its part of the queue's room, in bytes; given back when it leaves the queue.
    pub(crate) room: u32,
    /// This is the last entry of its group.
    pub(crate) is_last: bool,
    /// The entry was taken back and is a marker now.
    pub(crate) is_withdrawn: bool,
}

/// Entries that are one step in the history.
#[derive(Debug)]
pub(crate) struct Group {
    first: Pending,
    /// Empty for most groups, which then need no allocation.
    rest: Vec<Pending>,
}

impl Group {
    /// Makes a group for a log whose entries hold at most `payload_bytes_max` bytes of payload and whose queue has
    /// `room_bytes_max` bytes of room.
    ///
    /// # Errors
    /// `Invalid`: an entry is out of range, or the entries are too many or too large for one batch.
    pub(crate) fn new(
        first: NewEntry,
        rest: Vec<NewEntry>,
        wait: Wait,
        payload_bytes_max: usize,
        room_bytes_max: u64,
    ) -> Result<Group> {
        let refuse =
            |why: String| Error::new(ErrorKind::Invalid, format!("append to the write log: {why}"));
        let payload_bytes = rest.iter().map(|entry| entry.payload.len()).sum::<usize>();
        let payload_bytes = payload_bytes + first.payload.len();
        if payload_bytes > payload_bytes_max {
            return Err(refuse(format!(
                "{payload_bytes} bytes in one entry, at most {payload_bytes_max} fit"
            )));
        }
        let count = 1 + rest.len();
        if count > GROUP_ENTRIES_MAX {
            return Err(refuse(format!(
                "{count} entries in one group, at most {GROUP_ENTRIES_MAX} are taken"
            )));
        }
        let pending = |entry: NewEntry| match entry.row() {
            Some(row) => {
                Ok(Pending { entry, row, wait, room: 0, is_last: false, is_withdrawn: false })
            }
            None => Err(refuse(format!("{:?} entry out of range", entry.kind))),
        };
        let mut group = Group {
            first: pending(first)?,
            rest: rest.into_iter().map(pending).collect::<Result<_>>()?,
        };
        let room = payload_bytes as u64 + count as u64 * ENTRY_OVERHEAD_BYTES;
        let room = room.min(room_bytes_max).min(u64::from(u32::MAX));
        group.first.room = u32::try_from(room).expect("bounded above");
        group.rest.last_mut().unwrap_or(&mut group.first).is_last = true;
        Ok(group)
    }

    /// Like [`Group::new`], for one entry of a test that takes `room` bytes of the queue.
    #[cfg(test)]
    pub(crate) fn one(entry: NewEntry, wait: Wait, room: u32) -> Group {
        let row = entry.row().expect("it makes sense");
        let (is_last, is_withdrawn) = (true, false);
        Group { first: Pending { entry, row, wait, room, is_last, is_withdrawn }, rest: Vec::new() }
    }

    /// The number of entries.
    pub(crate) fn count(&self) -> u64 {
        1 + self.rest.len() as u64
    }

    /// The state that the caller waits for.
    pub(crate) fn wait(&self) -> Wait {
        self.first.wait
    }

    fn room(&self) -> u64 {
        u64::from(self.first.room)
    }

    fn entries(&self) -> impl Iterator<Item = &Pending> {
        std::iter::once(&self.first).chain(&self.rest)
    }

    /// Whether the group writes to `volume`.
    fn writes_to(&self, volume: VolumeId) -> bool {
        self.entries().any(|pending| pending.writes_to(volume))
    }
}

impl Pending {
    fn writes_to(&self, volume: VolumeId) -> bool {
        self.entry.kind == EntryKind::Write && self.entry.volume == volume
    }

    /// Turns the entry into a marker. Returns the room that this frees, in bytes.
    fn empty(&mut self) -> u64 {
        self.entry = NewEntry::marker();
        self.row = self.entry.row().expect("a marker makes sense");
        let kept = u64::from(self.room).min(ENTRY_OVERHEAD_BYTES);
        let freed = u64::from(self.room) - kept;
        self.room = u32::try_from(kept).expect("less than before");
        freed
    }
}

/// A group that waits for room.
#[derive(Debug)]
struct Waiting {
    number: u64,
    group: Group,
    placed: oneshot::Sender<Result<Lsn>>,
}

/// Held by the task whose group waits for room.
#[derive(Debug)]
pub(crate) struct Ticket {
    number: u64,
    /// Receives the LSN of the group's last entry, or the reason for a refusal. The channel closes when the log ends.
    pub(crate) placed: oneshot::Receiver<Result<Lsn>>,
}

/// The outcome of queueing a group.
#[derive(Debug)]
pub(crate) enum Place {
    /// The LSN of its last entry.
    At(Lsn),
    /// There is no room yet.
    Waits(Ticket),
}

/// The effect of freeing room.
#[derive(Debug, Default)]
pub(crate) struct Placed {
    /// At least one group was placed.
    pub(crate) is_any: bool,
    /// The newest entry whose caller waits for stable storage.
    pub(crate) durable_lsn: Option<Lsn>,
}

/// The entries of the next batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BatchSize {
    pub(crate) count: usize,
    /// Bytes that the entries add to the batch.
    pub(crate) bytes: usize,
    /// Bytes of their sealed payloads.
    pub(crate) sealed_bytes: usize,
}

impl BatchSize {
    fn add(&mut self, other: BatchSize) {
        self.count += other.count;
        self.bytes += other.bytes;
        self.sealed_bytes += other.sealed_bytes;
    }
}

/// The queue; see the head of the file.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) next_lsn: Lsn,
    pub(crate) pending: VecDeque<Pending>,
    pub(crate) is_closed: bool,
    /// Volumes whose writes are refused, with the reason.
    refused: HashMap<VolumeId, Error>,
    /// Room that is free, in bytes.
    room_bytes: u64,
    /// Served in order of arrival. Bounded by the requests that the front ends run at once.
    waiting: VecDeque<Waiting>,
    next_ticket: u64,
}

impl Queue {
    pub(crate) fn new(next_lsn: Lsn, room_bytes: u64) -> Queue {
        Queue {
            next_lsn,
            pending: VecDeque::new(),
            is_closed: false,
            refused: HashMap::new(),
            room_bytes,
            waiting: VecDeque::new(),
            next_ticket: 0,
        }
    }

    /// Takes a group.
    ///
    /// # Errors
    /// `Unavailable`: the log is closed. The error of [`Queue::refuse`].
    pub(crate) fn add(&mut self, group: Group) -> Result<Place> {
        self.check(&group)?;
        if self.waiting.is_empty() && group.room() <= self.room_bytes {
            return Ok(Place::At(self.place(group)));
        }
        let (placed, receiver) = oneshot::channel();
        let number = self.next_ticket;
        self.next_ticket += 1;
        self.waiting.push_back(Waiting { number, group, placed });
        Ok(Place::Waits(Ticket { number, placed: receiver }))
    }

    fn check(&self, group: &Group) -> Result<()> {
        if self.is_closed {
            return Err(closed());
        }
        let mut refused = self.refused.iter();
        match refused.find(|(volume, _)| group.writes_to(**volume)) {
            Some((_, error)) => Err(error.clone()),
            None => Ok(()),
        }
    }

    fn place(&mut self, group: Group) -> Lsn {
        self.room_bytes -= group.room();
        self.next_lsn = Lsn(self.next_lsn.0 + group.count());
        self.pending.push_back(group.first);
        self.pending.extend(group.rest);
        Lsn(self.next_lsn.0 - 1)
    }

    /// Frees room and places the groups that have waited for it.
    pub(crate) fn give_back(&mut self, room_bytes: u64) -> Placed {
        self.room_bytes += room_bytes;
        let mut placed = Placed::default();
        while let Some(first) = self.waiting.front()
            && (self.is_closed || first.group.room() <= self.room_bytes)
        {
            let Waiting { group, placed: sender, .. } =
                self.waiting.pop_front().expect("seen above");
            let wait = group.first.wait;
            let outcome = self.check(&group).map(|()| self.place(group));
            if let Ok(lsn) = outcome {
                placed.is_any = true;
                if wait == Wait::Durable {
                    placed.durable_lsn = Some(lsn);
                }
            }
            // A task that stops waiting calls `Queue::leave` under the same lock, so the message is
            // not lost.
            let _ = sender.send(outcome);
        }
        placed
    }

    /// Removes the group of a task that stops waiting for room. Returns the LSN of its last entry
    /// if the group was already placed.
    pub(crate) fn leave(&mut self, ticket: &mut Ticket) -> Option<Lsn> {
        match self.waiting.binary_search_by_key(&ticket.number, |waiting| waiting.number) {
            Ok(index) => {
                self.waiting.remove(index);
                None
            }
            Err(_) => ticket.placed.try_recv().ok().and_then(Result::ok),
        }
    }

    /// Takes back the group whose last entry has `last_lsn`. Returns the room that this frees, in
    /// bytes, or `None` if the group is in a batch and will be written.
    pub(crate) fn withdraw(&mut self, last_lsn: Lsn) -> Option<u64> {
        let last = self.index_of(last_lsn)?;
        let first = self.first_of(last);
        let mut freed = 0;
        for pending in self.pending.range_mut(first..=last) {
            freed += pending.empty();
            (pending.is_last, pending.is_withdrawn) = (true, true);
        }
        while let Some(newest) = self.pending.pop_back_if(|newest| newest.is_withdrawn) {
            freed += u64::from(newest.room);
            self.next_lsn = Lsn(self.next_lsn.0 - 1);
        }
        Some(freed)
    }

    /// Refuses writes of `volume` from now on, and those in the queue. Returns the LSN of the last
    /// entry of each refused group, and the room that this frees, in bytes.
    pub(crate) fn refuse(&mut self, volume: VolumeId, error: &Error) -> (Vec<Lsn>, u64) {
        self.refused.insert(volume, error.clone());
        let first_lsn = self.next_lsn.0 - self.pending.len() as u64;
        let (mut refused, mut freed, mut first) = (Vec::new(), 0, 0);
        while first < self.pending.len() {
            let is_last = |index: &usize| self.pending[*index].is_last;
            let last = (first..self.pending.len()).find(is_last).expect("each group has an end");
            if self.pending.range(first..=last).any(|pending| pending.writes_to(volume)) {
                for pending in self.pending.range_mut(first..=last) {
                    freed += pending.empty();
                    pending.is_last = true;
                }
                refused.push(Lsn(first_lsn + last as u64));
            }
            first = last + 1;
        }
        let waiting = std::mem::take(&mut self.waiting);
        for waiting in waiting {
            if waiting.group.writes_to(volume) {
                let _ = waiting.placed.send(Err(error.clone())); // the task may be stopping
            } else {
                self.waiting.push_back(waiting);
            }
        }
        (refused, freed)
    }

    /// Accepts writes of `volume` again.
    pub(crate) fn accept(&mut self, volume: VolumeId) {
        self.refused.remove(&volume);
    }

    /// Drops all entries. Tasks that wait for room see the channel close.
    pub(crate) fn clear(&mut self) {
        self.pending.clear();
        self.waiting.clear();
    }

    /// Returns the entries of a batch of at most `bytes_max` bytes: whole groups, at least one.
    pub(crate) fn next_batch(&self, bytes_max: usize) -> BatchSize {
        let (mut batch, mut group) = (BatchSize::default(), BatchSize::default());
        for pending in &self.pending {
            group.add(BatchSize {
                count: 1,
                bytes: pending.entry.batch_bytes(),
                sealed_bytes: pending.row.sealed_bytes(),
            });
            if !pending.is_last {
                continue;
            }
            if batch.count > 0 && batch.bytes + group.bytes > bytes_max {
                break;
            }
            batch.add(std::mem::take(&mut group));
        }
        batch
    }

    /// Returns the index of an entry in the queue; `None` if it is in a batch.
    fn index_of(&self, lsn: Lsn) -> Option<usize> {
        let first_lsn = self.next_lsn.0 - self.pending.len() as u64;
        let index = usize::try_from(lsn.0.checked_sub(first_lsn)?).ok()?;
        (index < self.pending.len()).then_some(index)
    }

    /// Returns the index of the first entry of the group whose last entry is at `last`.
    fn first_of(&self, last: usize) -> usize {
        let before = self.pending.range(..last).rposition(|pending| pending.is_last);
        before.map_or(0, |before| before + 1)
    }
}

/// The error of calls on a closed log.
pub(crate) fn closed() -> Error {
    Error::new(ErrorKind::Unavailable, "append to the write log: it is closed")
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn entry(volume: u32, kind: EntryKind) -> NewEntry {
        let payload = Bytes::from(vec![1; 512 * usize::from(kind == EntryKind::Write)]);
        NewEntry { volume: VolumeId(volume), kind, start_sector: 8, sector_count: 1, payload }
    }

    fn write(volume: u32, room: u32) -> Group {
        Group::one(entry(volume, EntryKind::Write), Wait::Written, room)
    }

    /// A write, a trim and a write.
    fn group(volume: u32) -> Group {
        let kinds = [EntryKind::Trim, EntryKind::Write].map(|kind| entry(volume, kind));
        let first = entry(volume, EntryKind::Write);
        Group::new(first, kinds.into(), Wait::Durable, 4096, 1 << 20).unwrap()
    }

    fn at(place: Result<Place>) -> Lsn {
        match place.unwrap() {
            Place::At(lsn) => lsn,
            Place::Waits(_) => panic!("there is room"),
        }
    }

    fn waits(place: Result<Place>) -> Ticket {
        match place.unwrap() {
            Place::At(lsn) => panic!("it passed the waiting groups, at {lsn}"),
            Place::Waits(ticket) => ticket,
        }
    }

    fn kinds(queue: &Queue) -> Vec<EntryKind> {
        queue.pending.iter().map(|pending| pending.entry.kind).collect()
    }

    #[test]
    fn writers_that_wait_for_room_keep_their_order() {
        let mut queue = Queue::new(Lsn(11), 1000);
        assert_eq!(at(queue.add(write(1, 600))), Lsn(11));
        let mut large = waits(queue.add(write(1, 800)));
        let mut small = waits(queue.add(write(2, 100)));
        assert!(!queue.give_back(300).is_any, "the small one would fit, but it came later");
        assert!(queue.give_back(300).is_any);
        // They are placed before a later call although their tasks have not run.
        let later = at(queue.add(write(3, 100)));
        assert_eq!(large.placed.try_recv().unwrap().unwrap(), Lsn(12));
        assert_eq!(small.placed.try_recv().unwrap().unwrap(), Lsn(13));
        assert_eq!(later, Lsn(14));
    }

    #[test]
    fn a_writer_that_leaves_is_never_placed_and_lets_the_next_one_through() {
        let mut queue = Queue::new(Lsn(11), 1000);
        at(queue.add(write(1, 600)));
        let mut large = waits(queue.add(write(1, 800)));
        let mut small = waits(queue.add(write(2, 100)));
        assert_eq!(queue.leave(&mut large), None);
        assert!(queue.give_back(0).is_any);
        assert_eq!(queue.leave(&mut small), Some(Lsn(12)), "it was placed before it left");
        assert_eq!(queue.withdraw(Lsn(12)), Some(100));
    }

    #[test]
    fn a_withdrawn_entry_leaves_a_marker_only_before_later_entries() {
        let mut queue = Queue::new(Lsn(11), 10_000);
        let lsns = [1, 1, 2].map(|volume| at(queue.add(write(volume, 576))));
        assert_eq!(queue.withdraw(lsns[1]), Some(512));
        assert_eq!(kinds(&queue), [EntryKind::Write, EntryKind::Marker, EntryKind::Write]);
        assert_eq!(queue.next_lsn, Lsn(14));
        assert_eq!(queue.withdraw(lsns[2]), Some(512 + 64 + 64));
        assert_eq!(kinds(&queue), [EntryKind::Write]);
        assert_eq!(at(queue.add(write(3, 576))), Lsn(12), "the LSN is given to the next one");
        queue.pending.pop_front();
        assert_eq!(queue.withdraw(lsns[0]), None, "it is in a batch");
        assert_eq!(queue.withdraw(Lsn(12)), Some(576));
        assert_eq!((queue.next_lsn, queue.pending.len()), (Lsn(12), 0));
    }

    #[test]
    fn reconnecting_clients_do_not_fill_the_queue_of_a_full_log() {
        let mut queue = Queue::new(Lsn(11), 1 << 20);
        at(queue.add(write(9, 576)));
        for _ in 0..10_000 {
            let lsns = [(); 3].map(|()| at(queue.add(group(1))));
            for lsn in lsns {
                let freed = queue.withdraw(lsn).expect("it is in no batch");
                queue.give_back(freed);
            }
        }
        assert!(queue.pending.len() <= 7, "{} entries are left", queue.pending.len());
    }

    #[test]
    fn a_group_is_one_step_in_the_history() {
        let mut queue = Queue::new(Lsn(11), 1 << 20);
        assert_eq!(at(queue.add(group(1))), Lsn(13));
        assert_eq!(at(queue.add(group(1))), Lsn(16));
        // Room for four entries, not for two groups.
        let bytes_max = 2 * (2 * 512 + 3 * 48) - 1;
        assert_eq!(queue.next_batch(bytes_max).count, 3);
        assert_eq!(queue.next_batch(bytes_max + 1).count, 6);
        assert_eq!(queue.next_batch(1).count, 3, "at least one");
        assert!(queue.withdraw(Lsn(13)).is_some());
        assert_eq!(kinds(&queue)[..3], [EntryKind::Marker; 3]);
        let (refused, _) = queue.refuse(VolumeId(1), &closed());
        assert_eq!(refused, [Lsn(16)]);
        assert_eq!(kinds(&queue), [EntryKind::Marker; 6], "not its trim alone");
        assert!(queue.add(group(1)).is_err());
        let trim = Group::one(entry(1, EntryKind::Trim), Wait::Written, 64);
        assert_eq!(at(queue.add(trim)), Lsn(17), "an entry without payload is still taken");
    }

    #[test]
    fn writers_that_wait_learn_of_a_refusal_and_of_the_end() {
        let mut queue = Queue::new(Lsn(11), 100);
        at(queue.add(write(1, 100)));
        let [mut refused, mut closed_out] =
            [2, 3].map(|volume| waits(queue.add(write(volume, 50))));
        queue.refuse(VolumeId(2), &Error::new(ErrorKind::Unavailable, "too much of it"));
        let error = refused.placed.try_recv().unwrap().unwrap_err();
        assert!(error.to_string().contains("too much"), "{error}");
        queue.is_closed = true;
        queue.give_back(0);
        assert!(closed_out.placed.try_recv().unwrap().is_err());
    }
}
