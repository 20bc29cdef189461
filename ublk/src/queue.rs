//! One queue: a thread that takes the kernel's requests, runs them on the device and answers them.
//!
//! Invariants:
//! - Each tag is one task that lives as long as the queue: it fetches, serves and answers in turn, so a
//!   request costs no task, and tags run side by side on the queue's own thread.
//! - Payload memory is bounded (`crate::memory`); whoever finds none waits, first come first. Writes may wait
//!   long, where the device takes no more of them: reads do not wait behind them.
//! - A request that was taken is answered once, after the device answered. When the queue leaves, what
//!   it has begun is answered, within the time that it is given, and all else is left to whoever serves
//!   the device next, who is given it again.
//! - Small payloads are copied by the ring, so that they need no call of their own: what was read before
//!   the answer, and what is written behind the fetch, where it is expected to be like the last one. The
//!   kernel has the tag's buffer until the end of that was seen: nobody touches it before, and a queue
//!   that leaves earlier never frees it.
//! - A panic ends the process: the kernel keeps the requests, and the next process answers them.

use crate::abi::{self, Descriptor, IO_DESC_BYTES, QUEUE_DEPTH_MAX, io_command};
use crate::errno;
use crate::memory::{Memory, Own};
use crate::planted::is_copy_lost;
use crate::request::{Work, judge};
use crate::wakes::Wakes;
use block::device::PAYLOAD_BYTES_KEPT;
use block::{BlockDevice, Error, ErrorKind, PayloadBuffer, Result, WriteFlags, ZeroFlags};
use bytes::Bytes;
use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::Errno;
use std::cell::{Cell, RefCell, RefMut};
use std::collections::VecDeque;
use std::fs::File;
use std::future::poll_fn;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

/// Where the ring puts what it reads of an eventfd. Nobody looks at it, and it is never freed, so that
/// a ring that is being taken down may still write there.
static BELL_SINK: AtomicU64 = AtomicU64::new(0);
/// Marks the ring's entry that waits for the eventfd; all others are tags.
const BELL: u64 = u64::MAX;
/// Set in the ring's entry that copies the payload of a tag's next write.
const TAKEN: u64 = 1 << 16;
/// Set in the ring's entry that copies what a tag has read.
const GIVEN: u64 = 1 << 17;
/// Pause where the kernel has no memory for a moment.
const MEMORY_WAIT: Duration = Duration::from_millis(1);
/// Payloads up to this size are copied by the ring. Chosen by hand: pages of databases.
const SMALL_BYTES_MAX: u32 = 16 << 10;
/// The result of a fetch that was not begun, as the copy before it has failed.
const CANCELED: i32 = -Errno::CANCELED.raw_os_error();
/// Failed requests of a device that are logged as warnings; the others count, and are for debugging.
const FAILURES_LOGGED_MAX: u64 = 100;

/// What the queues of a device have done.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) reads: AtomicU64,
    pub(crate) writes: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) discards: AtomicU64,
    pub(crate) failures: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) written_bytes: AtomicU64,
}

/// What a queue is made of.
pub(crate) struct QueueArgs<D> {
    pub(crate) device: Arc<D>,
    /// `/dev/ublkcN`.
    pub(crate) node: Arc<File>,
    pub(crate) number: u32,
    pub(crate) queue: u16,
    pub(crate) depth: u16,
    pub(crate) io_bytes_max: u32,
    pub(crate) memory: Arc<Memory>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) wakes: Arc<Wakes>,
    pub(crate) runtime: tokio::runtime::Handle,
}

struct Queue<D> {
    device: Arc<D>,
    node: Arc<File>,
    number: u32,
    queue: u16,
    io_bytes_max: u32,
    memory: Arc<Memory>,
    /// Held for [`Lane`]s.
    _own: Own,
    counters: Arc<Counters>,
    wakes: Arc<Wakes>,
    descriptors: Descriptors,
    slots: Vec<RefCell<Slot>>,
    /// Memory of the tags' buffers.
    buffer_bytes: Cell<u64>,
    /// Entries for the ring.
    entries: RefCell<Vec<squeue::Entry>>,
    busy_count: Cell<u32>,
    /// With what a fetch has ended first.
    failed_fetch: Cell<Option<i32>>,
    reads: Lane,
    writes: Lane,
}

/// Memory for the payloads of one kind of requests.
#[derive(Default)]
struct Lane {
    /// Of what the queue has of its own: at most the largest request's.
    own_bytes: Cell<u64>,
    /// Tags that wait.
    waiting: RefCell<VecDeque<u16>>,
}

/// What the ring and the task of a tag share.
#[derive(Default)]
struct Slot {
    /// The result of the fetch once that has come.
    fetched: Option<i32>,
    /// For a small payload.
    buffer: PayloadBuffer,
    lent: Lent,
    /// Length of the last write, or 0 where another is not to be expected.
    expected_bytes: u32,
    /// What the copy behind the fetch came to: bytes, or a negative error number.
    taken: i32,
    /// Why what was read was not copied, and thus the request not answered.
    give_failure: Option<i32>,
}

/// Whether the kernel has the buffer.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Lent {
    #[default]
    No,
    /// It reads it, until it has answered.
    Giving,
    /// It writes to it, behind the fetch.
    Taking,
}

/// How a request is answered.
#[derive(Clone, Copy)]
struct Answer {
    result: i32,
    /// The payload that the tag's buffer has.
    payload_bytes: u32,
}

impl From<i32> for Answer {
    fn from(result: i32) -> Answer {
        Answer { result, payload_bytes: 0 }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.lent != Lent::No {
            // The ring goes, but what it has begun may still come to its end.
            std::mem::forget(std::mem::take(&mut *self.buffer));
        }
    }
}

/// Serves a queue until its device is stopped or [`Wakes::leave`]. To be called on a thread of its
/// own; calls `announce` once, before the first request can come, with what keeps it from serving.
pub(crate) fn serve<D: BlockDevice>(args: QueueArgs<D>, announce: impl FnOnce(Result<()>)) {
    let _abort = AbortOnPanic;
    let QueueArgs { depth, runtime, .. } = &args;
    let (depth, _context) = (*depth, runtime.enter());
    let opened = open_ring(depth)
        .and_then(|ring| Ok((ring, Descriptors::map(&args.node, args.queue, depth)?)));
    let (ring, descriptors) = match opened {
        Ok(opened) => opened,
        Err(error) => return announce(Err(error)),
    };
    let queue = Queue {
        number: args.number,
        queue: args.queue,
        io_bytes_max: args.io_bytes_max,
        _own: Own::of(&args.memory, args.io_bytes_max),
        memory: args.memory,
        device: args.device,
        node: args.node.clone(),
        counters: args.counters,
        wakes: args.wakes.clone(),
        descriptors,
        slots: (0..depth).map(|_| RefCell::default()).collect(),
        buffer_bytes: Cell::new(0),
        entries: RefCell::new(Vec::with_capacity(3 * usize::from(depth) + 1)),
        busy_count: Cell::new(0),
        failed_fetch: Cell::new(None),
        reads: Lane::default(),
        writes: Lane::default(),
    };
    announce(Ok(()));
    if let Err(error) = queue.run(ring, depth) {
        // The kernel sees that nobody serves the queue any more when the process ends.
        tracing::error!(
            device = queue.number, queue = queue.queue, error = %error.chain(),
            "a queue of a ublk device cannot go on; the process ends, so that the next one takes the \
             device over"
        );
        std::process::abort();
    }
}

fn open_ring(depth: u16) -> Result<IoUring> {
    let entries = (3 * u32::from(depth) + 1).next_power_of_two();
    let mut builder = IoUring::builder();
    builder.setup_coop_taskrun().setup_single_issuer();
    builder.build(entries).map_err(|error| {
        Error::with_source(ErrorKind::Unsupported, "set up io_uring for a ublk queue", error)
    })
}

impl<D: BlockDevice> Queue<D> {
    fn run(&self, mut ring: IoUring, depth: u16) -> Result<()> {
        let wakers = self.wakes.wakers(depth);
        let mut tags: Vec<Option<Pin<Box<_>>>> =
            (0..depth).map(|tag| Some(Box::pin(self.serve_tag(tag)))).collect();
        (0..depth).for_each(|tag| self.wakes.mark(tag));
        self.listen();
        let mut living = depth;
        loop {
            for word in 0..self.wakes.word_count() {
                let mut ready = self.wakes.take(word);
                while ready != 0 {
                    let index = word * 64 + ready.trailing_zeros() as usize;
                    ready &= ready - 1;
                    let Some(task) = &mut tags[index] else { continue };
                    if task.as_mut().poll(&mut Context::from_waker(&wakers[index])).is_ready() {
                        tags[index] = None;
                        living -= 1;
                    }
                }
            }
            if let Some(result) = self.failed_fetch.get()
                && result != abi::IO_RES_ABORT
                && !self.wakes.is_leaving()
            {
                // Whoever made this tag's request would wait for ever.
                let error = std::io::Error::from_raw_os_error(-result);
                let what = "fetch a ublk request";
                return Err(Error::with_source(ErrorKind::Io, what, error));
            }
            let is_left = self.wakes.is_leaving()
                && (self.busy_count.get() == 0 || self.wakes.is_leaving_now());
            let is_over = living == 0 || is_left;
            let is_sleeping = !is_over && self.wakes.fall_asleep();
            self.submit(&mut ring, is_sleeping)?;
            self.wakes.awake();
            if is_over {
                return Ok(());
            }
            for entry in ring.completion() {
                match entry.user_data() {
                    BELL => self.listen(),
                    data => self.note(data, entry.result()),
                }
            }
        }
    }

    /// Notes how an entry of a tag has ended. The tag goes on when it has its request, and the payload.
    fn note(&self, data: u64, result: i32) {
        let tag = u16::try_from(data & !(TAKEN | GIVEN)).expect("we gave it");
        let mut slot = self.slot(tag);
        match data & (TAKEN | GIVEN) {
            TAKEN => (slot.lent, slot.taken) = (Lent::No, result),
            // Only of a failure. The fetch behind it was not begun, and the kernel does not say so: what
            // is linked to an entry that asked for no completion gets none. Source: io_uring_enter(2),
            // `IOSQE_CQE_SKIP_SUCCESS`.
            GIVEN => {
                slot.give_failure = Some(result);
                (slot.lent, slot.fetched) = (Lent::No, Some(CANCELED));
            }
            _ => {
                slot.fetched = Some(result);
                if slot.lent == Lent::Giving {
                    slot.lent = Lent::No;
                }
            }
        }
        if slot.fetched.is_some() && slot.lent == Lent::No {
            self.wakes.mark(tag);
        }
    }

    fn slot(&self, tag: u16) -> RefMut<'_, Slot> {
        self.slots[usize::from(tag)].borrow_mut()
    }

    /// Has the ring wait for the eventfd.
    fn listen(&self) {
        let bell = types::Fd(self.wakes.bell().as_raw_fd());
        let entry = opcode::Read::new(bell, BELL_SINK.as_ptr().cast(), 8).build().user_data(BELL);
        self.entries.borrow_mut().push(entry);
    }

    #[expect(unsafe_code, reason = "a ring's entries are unsafe to submit")]
    fn submit(&self, ring: &mut IoUring, is_waiting: bool) -> Result<()> {
        let mut entries = self.entries.borrow_mut();
        let is_any = !entries.is_empty() || !ring.submission().is_empty();
        if !is_any && !is_waiting {
            // What the kernel has to say comes at the next call: whoever was made ready goes first.
            return Ok(());
        }
        // SAFETY: commands of tags hold no pointers. The buffer of a slot is not touched while it is
        // lent, and not freed by `Slot::drop` then. The eventfd is read into memory that is never freed.
        // The descriptors are open for as long as `self`, which outlives the ring.
        let pushed = unsafe { ring.submission().push_multiple(&entries) };
        pushed.expect("the ring has an entry for each tag and one for the eventfd");
        entries.clear();
        drop(entries);
        let Err(error) = ring.submit_and_wait(usize::from(is_waiting)) else { return Ok(()) };
        match Errno::from_io_error(&error) {
            // What was not submitted is submitted next time.
            Some(Errno::INTR | Errno::BUSY) => Ok(()),
            Some(Errno::AGAIN | Errno::NOMEM) => {
                std::thread::sleep(MEMORY_WAIT);
                Ok(())
            }
            _ => Err(Error::with_source(ErrorKind::Io, "wait for ublk requests", error)),
        }
    }

    // --- one tag ---

    async fn serve_tag(&self, tag: u16) {
        let mut answer: Option<Answer> = None;
        loop {
            let result = self.next(tag, answer).await;
            if result != abi::IO_RES_OK {
                let failure = self.slot(tag).give_failure.take();
                let Some(failure) = failure.filter(|_| result == CANCELED) else {
                    self.failed_fetch.set(self.failed_fetch.get().or(Some(result)));
                    return;
                };
                // Its answer went with the copy.
                self.counters.failures.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(device = self.number, tag, failure, "what was read was not copied");
                answer = Some(errno::to_result(ErrorKind::Io).into());
                continue;
            }
            if self.wakes.is_leaving() {
                // Left to the next server: it is not answered, so the kernel gives it out again.
                return;
            }
            self.busy_count.set(self.busy_count.get() + 1);
            answer = Some(self.answer(tag).await);
            self.busy_count.set(self.busy_count.get() - 1);
        }
    }

    /// Answers the tag's request, if there is one, and resolves when it has the next one.
    async fn next(&self, tag: u16, answer: Option<Answer>) -> i32 {
        let (operation, result) = match answer {
            None => (io_command::FETCH_REQ, 0),
            Some(answer) => (io_command::COMMIT_AND_FETCH_REQ, answer.result),
        };
        let node = types::Fd(self.node.as_raw_fd());
        let command = abi::io(self.queue, tag, result);
        let fetch = opcode::UringCmd16::new(node, operation).cmd(command).build();
        let fetch = fetch.user_data(u64::from(tag));
        let payload_bytes = answer.map_or(0, |answer| answer.payload_bytes);
        if payload_bytes > 0 {
            let mut slot = self.slot(tag);
            slot.lent = Lent::Giving;
            let payload = opcode::Write::new(node, slot.buffer.as_ptr(), payload_bytes);
            let place = if is_copy_lost() { QUEUE_DEPTH_MAX } else { tag };
            let payload = payload.offset(abi::payload_offset(self.queue, place)).build();
            let flags = squeue::Flags::IO_LINK | squeue::Flags::SKIP_SUCCESS;
            let payload = payload.user_data(u64::from(tag) | GIVEN).flags(flags);
            self.entries.borrow_mut().extend([payload, fetch]);
        } else if let Some(copy) = self.take_next(tag) {
            // It begins when the fetch has brought a request.
            self.entries.borrow_mut().extend([fetch.flags(squeue::Flags::IO_LINK), copy]);
        } else {
            self.entries.borrow_mut().push(fetch);
        }
        poll_fn(|_| {
            let mut slot = self.slot(tag);
            let fetched = if slot.lent == Lent::No { slot.fetched.take() } else { None };
            fetched.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// The ring's entry that copies the payload of the tag's next request, should it be a write like
    /// the last one. Nothing comes of it otherwise.
    fn take_next(&self, tag: u16) -> Option<squeue::Entry> {
        let mut slot = self.slot(tag);
        slot.taken = 0;
        let bytes = slot.expected_bytes;
        if bytes == 0 || !self.make_room(&mut slot, bytes) {
            return None;
        }
        slot.lent = Lent::Taking;
        let node = types::Fd(self.node.as_raw_fd());
        let copy = opcode::Read::new(node, slot.buffer.as_mut_ptr(), bytes)
            .offset(abi::payload_offset(self.queue, tag));
        Some(copy.build().user_data(u64::from(tag) | TAKEN))
    }

    /// False: the tags' buffers have all that they may have.
    fn make_room(&self, slot: &mut Slot, bytes: u32) -> bool {
        if slot.buffer.capacity() < bytes as usize {
            self.let_go(slot.buffer.capacity());
            slot.buffer = PayloadBuffer::default();
            let buffer = self.device.payload(bytes as usize);
            let capacity = buffer.capacity() as u64;
            if !self.memory.borrow(capacity) {
                return false;
            }
            slot.buffer = buffer;
            self.buffer_bytes.set(self.buffer_bytes.get() + capacity);
        }
        true
    }

    /// A tag has a buffer no more.
    fn let_go(&self, capacity: usize) {
        self.buffer_bytes.set(self.buffer_bytes.get() - capacity as u64);
        self.memory.give_back(capacity as u64);
    }

    /// What kind of request comes next on a tag, by the last one. A flush says nothing of it.
    fn expect(&self, tag: u16, work: &Work) {
        let mut slot = self.slot(tag);
        slot.expected_bytes = match *work {
            Work::Write { length, .. } if length <= SMALL_BYTES_MAX => length,
            Work::Flush => slot.expected_bytes,
            _ => 0,
        };
    }

    async fn answer(&self, tag: u16) -> Answer {
        let descriptor = self.descriptors.get(tag);
        let work = match judge(&descriptor, self.io_bytes_max) {
            Ok(work) => work,
            Err(result) => {
                self.counters.failures.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(device = self.number, ?descriptor, "a ublk request was refused");
                return result.into();
            }
        };
        self.expect(tag, &work);
        match self.perform(tag, work).await {
            Ok(answer) => answer,
            Err(error) => self.fail(&work, &error).into(),
        }
    }

    fn fail(&self, work: &Work, error: &Error) -> i32 {
        let count = self.counters.failures.fetch_add(1, Ordering::Relaxed);
        if count < FAILURES_LOGGED_MAX {
            tracing::warn!(device = self.number, ?work, error = %error.chain(), "request failed");
        } else {
            tracing::debug!(device = self.number, ?work, error = %error.chain(), "request failed");
        }
        errno::to_result(error.kind())
    }

    async fn perform(&self, tag: u16, work: Work) -> Result<Answer> {
        let counters = &self.counters;
        let done = Answer::from(0);
        match work {
            Work::Read { offset, length } => {
                counters.reads.fetch_add(1, Ordering::Relaxed);
                counters.read_bytes.fetch_add(u64::from(length), Ordering::Relaxed);
                let _room = self.reserve(&self.reads, tag, length).await;
                self.read(tag, offset, length).await
            }
            Work::Write { offset, length, fua } => {
                counters.writes.fetch_add(1, Ordering::Relaxed);
                counters.written_bytes.fetch_add(u64::from(length), Ordering::Relaxed);
                let _room = self.reserve(&self.writes, tag, length).await;
                self.write(tag, (offset, length), WriteFlags { fua }).await.map(|()| whole(length))
            }
            Work::Flush => {
                counters.flushes.fetch_add(1, Ordering::Relaxed);
                self.device.flush().await.map(|()| done)
            }
            Work::Discard { offset, length, fua } => {
                counters.discards.fetch_add(1, Ordering::Relaxed);
                self.device.discard(offset, length, fua).await.map(|()| done)
            }
            Work::WriteZeroes { offset, length, no_hole, fua } => {
                counters.discards.fetch_add(1, Ordering::Relaxed);
                let flags = ZeroFlags { fua, no_hole, fast_only: false };
                self.device.write_zeroes(offset, length, flags).await.map(|()| done)
            }
        }
    }

    /// Copies each part once, into the memory that the device keeps.
    async fn write(&self, tag: u16, range: (u64, u32), flags: WriteFlags) -> Result<()> {
        let (offset, length) = range;
        if length <= PAYLOAD_BYTES_KEPT {
            let payload = match self.taken(tag, length) {
                Some(payload) => payload,
                None => self.take(tag, 0, length)?,
            };
            return self.device.write(offset, payload, flags).await;
        }
        let mut parts = Vec::with_capacity(length.div_ceil(PAYLOAD_BYTES_KEPT) as usize);
        for start in (0..length).step_by(PAYLOAD_BYTES_KEPT as usize) {
            let payload = self.take(tag, start, PAYLOAD_BYTES_KEPT.min(length - start))?;
            parts.push(self.device.write(offset + u64::from(start), payload, flags));
        }
        // All of them, also where one fails: the request is answered when nothing of it is under way.
        futures::future::join_all(parts).await.into_iter().collect()
    }

    async fn read(&self, tag: u16, offset: u64, length: u32) -> Result<Answer> {
        let bytes = length as usize;
        let is_small = length <= SMALL_BYTES_MAX && self.make_room(&mut self.slot(tag), length);
        let mut buffer = match is_small {
            true => std::mem::take(&mut self.slot(tag).buffer),
            false => PayloadBuffer::fresh(bytes),
        };
        if buffer.len() < bytes {
            buffer.resize(bytes, 0);
        }
        let read = self.device.read(offset, &mut buffer[..bytes]).await;
        if is_small {
            // Its memory is counted as the tag's.
            self.slot(tag).buffer = buffer;
            return read.map(|()| Answer { payload_bytes: length, ..whole(length) });
        }
        read?;
        self.give(tag, &buffer)?;
        Ok(whole(length))
    }

    /// The payload of a write, if it was copied behind the fetch.
    #[expect(unsafe_code, reason = "memory that the kernel has written")]
    fn taken(&self, tag: u16, length: u32) -> Option<Bytes> {
        let mut slot = self.slot(tag);
        if u32::try_from(slot.taken) != Ok(length) {
            return None; // there was none, or it was not for so many bytes
        }
        // SAFETY: the kernel has written the first `taken` bytes of the buffer, which has room for as
        // many as were asked for, at least those; it is not lent any more.
        unsafe { slot.buffer.set_len(length as usize) };
        if slot.buffer.capacity() > slot.buffer.len() {
            // What is kept for long takes no more room than it needs.
            let mut payload = self.device.payload(length as usize);
            payload.extend_from_slice(&slot.buffer);
            return Some(payload.into_bytes());
        }
        self.let_go(slot.buffer.capacity());
        Some(std::mem::take(&mut slot.buffer).into_bytes())
    }

    /// Copies the part of the payload of a write that begins at `skip` out of the kernel.
    fn take(&self, tag: u16, skip: u32, length: u32) -> Result<Bytes> {
        let mut payload = self.device.payload(length as usize);
        let start = abi::payload_offset(self.queue, tag) + u64::from(skip);
        while payload.len() < length as usize {
            let at = start + payload.len() as u64;
            let spare = rustix::buffer::spare_capacity(&mut *payload);
            match rustix::io::pread(&*self.node, spare, at) {
                Ok(0) => return Err(short(tag)),
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(copy_failed(tag, errno)),
            }
        }
        payload.truncate(length as usize); // room may be more than was asked for
        Ok(payload.into_bytes())
    }

    /// Copies what was read into the kernel.
    fn give(&self, tag: u16, bytes: &[u8]) -> Result<()> {
        let start = abi::payload_offset(self.queue, tag);
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::pwrite(&*self.node, &bytes[done..], start + done as u64) {
                Ok(0) => return Err(short(tag)),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(copy_failed(tag, errno)),
            }
        }
        Ok(())
    }

    // --- memory ---

    /// Resolves when there is room for a payload; the room is free again when the value is dropped.
    async fn reserve<'a>(&'a self, lane: &'a Lane, tag: u16, length: u32) -> Room<'a, D> {
        let mut is_queued = false;
        poll_fn(|_| {
            let mut waiting = lane.waiting.borrow_mut();
            let is_first = waiting.front().is_none_or(|first| *first == tag);
            if is_first && let Some(room) = self.room(lane, u64::from(length)) {
                if is_queued {
                    waiting.pop_front();
                }
                // There may be room for the next one too.
                waiting.front().into_iter().for_each(|next| self.wakes.mark(*next));
                return Poll::Ready(room);
            }
            if !is_queued {
                waiting.push_back(tag);
                is_queued = true;
            }
            Poll::Pending
        })
        .await
    }

    /// `None`: others of the lane have what the queue has of its own, and what all share is out.
    fn room<'a>(&'a self, lane: &'a Lane, bytes: u64) -> Option<Room<'a, D>> {
        let own_bytes = lane.own_bytes.get() + bytes;
        let is_borrowed = own_bytes > u64::from(self.io_bytes_max);
        if is_borrowed && !self.memory.borrow(bytes) {
            return None;
        }
        if !is_borrowed {
            lane.own_bytes.set(own_bytes);
        }
        Some(Room { queue: self, lane, bytes, is_borrowed })
    }
}

impl<D> Drop for Queue<D> {
    fn drop(&mut self) {
        self.memory.give_back(self.buffer_bytes.get());
    }
}

struct Room<'a, D> {
    queue: &'a Queue<D>,
    lane: &'a Lane,
    bytes: u64,
    is_borrowed: bool,
}

impl<D> Drop for Room<'_, D> {
    fn drop(&mut self) {
        let Room { queue, lane, bytes, is_borrowed } = *self;
        match is_borrowed {
            true => queue.memory.give_back(bytes),
            false => lane.own_bytes.set(lane.own_bytes.get() - bytes),
        }
        if let Some(next) = lane.waiting.borrow().front() {
            queue.wakes.mark(*next);
        }
    }
}

/// The answer to a request whose payload went through.
fn whole(length: u32) -> Answer {
    i32::try_from(length).expect("at most the largest payload").into()
}

fn short(tag: u16) -> Error {
    Error::new(ErrorKind::Io, format!("copy the payload of ublk request {tag}: it is cut short"))
}

fn copy_failed(tag: u16, errno: Errno) -> Error {
    let what = format!("copy the payload of ublk request {tag}");
    Error::with_source(ErrorKind::Io, what, std::io::Error::from(errno))
}

/// The requests of a queue, written by the kernel.
struct Descriptors {
    start: *const u8,
    bytes: usize,
    depth: u16,
}

impl Descriptors {
    #[expect(unsafe_code, reason = "memory shared with the kernel")]
    fn map(node: &File, queue: u16, depth: u16) -> Result<Descriptors> {
        let page_bytes = rustix::param::page_size();
        let bytes = (usize::from(depth) * IO_DESC_BYTES).next_multiple_of(page_bytes);
        let offset = abi::descriptors_offset(queue, page_bytes as u64);
        // SAFETY: a new mapping at a place of the kernel's choice; nothing else lies there.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                rustix::mm::ProtFlags::READ,
                rustix::mm::MapFlags::SHARED | rustix::mm::MapFlags::POPULATE,
                node,
                offset,
            )
        };
        let start = start.map_err(|errno| {
            let what = "map the requests of a ublk queue";
            Error::with_source(ErrorKind::Io, what, std::io::Error::from(errno))
        })?;
        Ok(Descriptors { start: start.cast_const().cast(), bytes, depth })
    }

    /// The request of a tag whose fetch has completed: the kernel does not touch it until it is
    /// answered.
    #[expect(unsafe_code, reason = "memory shared with the kernel")]
    fn get(&self, tag: u16) -> Descriptor {
        assert!(tag < self.depth, "tags are below the depth");
        // SAFETY: the mapping has room for `depth` descriptors and lives as long as `self`; the driver
        // wrote this one before it completed the fetch.
        let bytes = unsafe {
            let at = self.start.add(usize::from(tag) * IO_DESC_BYTES);
            at.cast::<[u8; IO_DESC_BYTES]>().read_volatile()
        };
        Descriptor::decode(&bytes)
    }
}

impl Drop for Descriptors {
    #[expect(unsafe_code, reason = "memory shared with the kernel")]
    fn drop(&mut self) {
        // SAFETY: mapped by us with this length; nothing borrows from it.
        let unmapped = unsafe { rustix::mm::munmap(self.start.cast_mut().cast(), self.bytes) };
        if let Err(error) = unmapped {
            tracing::debug!(%error, "the requests of a ublk queue stay mapped");
        }
    }
}

/// A queue that ends without its device being told would hang whoever uses it.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("a thread of a ublk device has panicked: the process ends");
            std::process::abort();
        }
    }
}
