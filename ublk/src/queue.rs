//! One queue: a thread that takes requests from the kernel, runs them on the device and answers
//! them.
//!
//! Invariants:
//! - Each tag has one task that lives as long as the queue. It fetches, serves and answers in turn,
//!   so a request costs no task, and tags run concurrently on the queue's own thread.
//! - Payload memory is bounded (`crate::memory`). Requests that find none wait, first come first
//!   served. Writes may wait long if the device accepts no more of them; reads do not wait behind
//!   them.
//! - A request that was taken is answered once, after the device has answered. When the queue
//!   leaves, requests in progress are answered within the time allowed. The kernel gives all others
//!   to the next server of the device.
//! - The ring copies small payloads, so that they need no system call of their own: those of reads
//!   before the answer, and those of expected writes after the fetch. A write is expected if the
//!   last request was one. The kernel owns the tag's buffer until the end of that copy has been
//!   seen. Until then the buffer is not touched, and a queue that leaves earlier never frees it.
//! - A panic ends the process: the kernel keeps the requests, and the next process answers them.

use crate::abi::{self, Descriptor, IO_DESC_BYTES, QUEUE_DEPTH_MAX, io_command};
use crate::errno;
use crate::memory::{Memory, Own};
use crate::request::{Work, judge};
use crate::seeded_bugs::is_copy_lost;
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

/// Destination of the ring's reads of an eventfd. The value is never used. The memory is never
/// freed, so that a ring that is being taken down may still write to it.
static BELL_SINK: AtomicU64 = AtomicU64::new(0);
/// Marks the ring entry that waits for the eventfd; all other entries are tags.
const BELL: u64 = u64::MAX;
/// Set in the ring entry that copies the payload of a tag's next write from the kernel.
const TAKEN: u64 = 1 << 16;
/// Set in the ring entry that copies the data of a tag's read to the kernel.
const GIVEN: u64 = 1 << 17;
/// Pause if the kernel is temporarily out of memory.
const MEMORY_WAIT: Duration = Duration::from_millis(1);
/// Payloads up to this size are copied by the ring. Chosen by hand: pages of databases.
const SMALL_BYTES_MAX: u32 = 16 << 10;
/// Result of a fetch that was not started because the copy before it failed.
const CANCELED: i32 = -Errno::CANCELED.raw_os_error();
/// Failed requests of a device that are logged as warnings; later ones are counted, and logged for
/// debugging.
const FAILURES_LOGGED_MAX: u64 = 100;

/// Totals over the queues of a device.
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

/// The parts of a queue.
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
    /// The memory that the [`Lane`]s divide.
    _own: Own,
    counters: Arc<Counters>,
    wakes: Arc<Wakes>,
    descriptors: Descriptors,
    slots: Vec<RefCell<Slot>>,
    /// Size of the tags' buffers.
    buffer_bytes: Cell<u64>,
    /// Entries to submit to the ring.
    entries: RefCell<Vec<squeue::Entry>>,
    busy_count: Cell<u32>,
    /// Result of the first fetch that failed.
    failed_fetch: Cell<Option<i32>>,
    reads: Lane,
    writes: Lane,
}

/// Payload memory for one kind of request.
#[derive(Default)]
struct Lane {
    /// Used part of the queue's own memory: at most one largest request.
    own_bytes: Cell<u64>,
    /// Tags that wait for memory.
    waiting: RefCell<VecDeque<u16>>,
}

/// State that the ring and the task of a tag share.
#[derive(Default)]
struct Slot {
    /// Result of the fetch, once it has completed.
    fetched: Option<i32>,
    /// Buffer for a small payload.
    buffer: PayloadBuffer,
    lent: Lent,
    /// Length of the last write, or 0 if no write is expected next.
    expected_bytes: u32,
    /// Result of the copy after the fetch: bytes, or a negative error number.
    taken: i32,
    /// Error of the copy of a read, which left the request unanswered.
    give_failure: Option<i32>,
}

/// Whether the kernel owns the buffer.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Lent {
    #[default]
    No,
    /// The kernel reads it until the request is answered.
    Giving,
    /// The kernel writes to it after the fetch.
    Taking,
}

/// The answer to a request.
#[derive(Clone, Copy)]
struct Answer {
    result: i32,
    /// Payload in the tag's buffer.
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
            // The ring ends, but its operations in progress may still complete.
            std::mem::forget(std::mem::take(&mut *self.buffer));
        }
    }
}

/// Serves a queue until its device is stopped or [`Wakes::leave`] is called. Call it on a thread of
/// its own. It calls `announce` once, before the first request can arrive, with the error that
/// keeps it from serving, if any.
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
        // The kernel notices the missing server only when the process ends.
        tracing::error!(
            device = queue.number, queue = queue.queue, error = %error.chain(),
            "could not go on with a queue of a ublk device; the process ends, so that the next one \
             takes the device over"
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
                // The user of this tag's request would wait forever.
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

    /// Records the end of a tag's entry. Wakes the tag once it has both its request and the
    /// payload.
    fn note(&self, data: u64, result: i32) {
        let tag = u16::try_from(data & !(TAKEN | GIVEN)).expect("we gave it");
        let mut slot = self.slot(tag);
        match data & (TAKEN | GIVEN) {
            TAKEN => (slot.lent, slot.taken) = (Lent::No, result),
            // Reported only on failure. The linked fetch was then not started, and gets no
            // completion either, because the entry before it asked for none. Source:
            // io_uring_enter(2), `IOSQE_CQE_SKIP_SUCCESS`.
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

    /// Makes the ring wait for the eventfd.
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
            // Completions are seen at the next call; tasks that are ready run first.
            return Ok(());
        }
        // SAFETY: commands of tags hold no pointers. The buffer of a slot is not touched while it
        // is lent, and `Slot::drop` does not free it then. The eventfd is read into memory that is
        // never freed. The descriptors are open for as long as `self`, which outlives the ring.
        let pushed = unsafe { ring.submission().push_multiple(&entries) };
        pushed.expect("the ring has an entry for each tag and one for the eventfd");
        entries.clear();
        drop(entries);
        let Err(error) = ring.submit_and_wait(usize::from(is_waiting)) else { return Ok(()) };
        match Errno::from_io_error(&error) {
            // Entries that were not submitted remain for the next call.
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
                // The linked copy failed, so the answer was not sent either.
                self.counters.failures.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(
                    device = self.number,
                    tag,
                    failure,
                    "could not copy the data of a read to the kernel"
                );
                answer = Some(errno::to_result(ErrorKind::Io).into());
                continue;
            }
            if self.wakes.is_leaving() {
                // Left to the next server: it is unanswered, so the kernel hands it out again.
                return;
            }
            self.busy_count.set(self.busy_count.get() + 1);
            answer = Some(self.answer(tag).await);
            self.busy_count.set(self.busy_count.get() - 1);
        }
    }

    /// Answers the tag's request, if there is one, and resolves when the next one has arrived.
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
            // The copy starts when the fetch has brought a request.
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

    /// Returns the ring entry that copies the payload of the tag's next request, in case it is a
    /// write like the last one. It has no effect otherwise.
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

    /// Gives the tag a large enough buffer. Returns false if no memory is left for it.
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

    /// Returns the memory of a tag's buffer.
    fn let_go(&self, capacity: usize) {
        self.buffer_bytes.set(self.buffer_bytes.get() - capacity as u64);
        self.memory.give_back(capacity as u64);
    }

    /// Predicts the next request of a tag from the last one. A flush does not change the
    /// prediction.
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
                tracing::warn!(
                    device = self.number,
                    ?descriptor,
                    "the queue refused a ublk request"
                );
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
            tracing::warn!(
                device = self.number, ?work, error = %error.chain(),
                "could not carry out a request"
            );
        } else {
            tracing::debug!(
                device = self.number, ?work, error = %error.chain(),
                "could not carry out a request"
            );
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
        // Wait for all parts even if one fails: no part may still run when the request is answered.
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
            // The memory is counted as the tag's.
            self.slot(tag).buffer = buffer;
            return read.map(|()| Answer { payload_bytes: length, ..whole(length) });
        }
        read?;
        self.give(tag, &buffer)?;
        Ok(whole(length))
    }

    /// Returns the payload of a write, if the ring copied it after the fetch.
    #[expect(unsafe_code, reason = "memory that the kernel has written")]
    fn taken(&self, tag: u16, length: u32) -> Option<Bytes> {
        let mut slot = self.slot(tag);
        if u32::try_from(slot.taken) != Ok(length) {
            return None; // no copy, or one of another length
        }
        // SAFETY: the kernel has written the first `taken` bytes of the buffer, whose capacity is
        // at least the length of the copy. The buffer is no longer lent.
        unsafe { slot.buffer.set_len(length as usize) };
        if slot.buffer.capacity() > slot.buffer.len() {
            // The device keeps the payload for long, so it must not occupy more memory than it
            // needs.
            let mut payload = self.device.payload(length as usize);
            payload.extend_from_slice(&slot.buffer);
            return Some(payload.into_bytes());
        }
        self.let_go(slot.buffer.capacity());
        Some(std::mem::take(&mut slot.buffer).into_bytes())
    }

    /// Copies a part of the payload of a write, starting at `skip`, out of the kernel.
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
        payload.truncate(length as usize); // the buffer may be larger than requested
        Ok(payload.into_bytes())
    }

    /// Copies the data of a read into the kernel.
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

    /// Waits for room for a payload. Dropping the value frees the room.
    async fn reserve<'a>(&'a self, lane: &'a Lane, tag: u16, length: u32) -> Room<'a, D> {
        let mut is_queued = false;
        poll_fn(|_| {
            let mut waiting = lane.waiting.borrow_mut();
            let is_first = waiting.front().is_none_or(|first| *first == tag);
            if is_first && let Some(room) = self.room(lane, u64::from(length)) {
                if is_queued {
                    waiting.pop_front();
                }
                // The next tag may find room as well.
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

    /// Takes room for a payload. Returns `None` if other requests of the runtime use the queue's own
    /// memory, and the shared memory is exhausted.
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

/// Returns the answer to a request whose whole payload was transferred.
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

/// The requests of a queue, in memory that the kernel writes.
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
        // SAFETY: a new mapping at an address of the kernel's choice, where nothing else is mapped.
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

    /// Returns the request of a tag whose fetch has completed. The kernel does not change it until
    /// it is answered.
    #[expect(unsafe_code, reason = "memory shared with the kernel")]
    fn get(&self, tag: u16) -> Descriptor {
        assert!(tag < self.depth, "tags are below the depth");
        // SAFETY: the mapping has room for `depth` descriptors and lives as long as `self`; the
        // driver wrote this one before it completed the fetch.
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
        // SAFETY: this type made the mapping with this length, and nothing borrows from it.
        let unmapped = unsafe { rustix::mm::munmap(self.start.cast_mut().cast(), self.bytes) };
        if let Err(error) = unmapped {
            tracing::debug!(%error, "could not unmap the requests of a ublk queue");
        }
    }
}

/// Aborts on a panic: a queue that ended without notice to its device would hang its users.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("a thread of a ublk device has panicked: the process ends");
            std::process::abort();
        }
    }
}
