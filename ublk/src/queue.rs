//! One queue: a thread that takes the kernel's requests, runs them on the device and answers them.
//!
//! Invariants:
//! - Each tag is one task that lives as long as the queue: it fetches, serves and answers in turn, so a
//!   request costs no task, and tags run side by side on the queue's own thread.
//! - Payload memory is bounded over the tags of the queue; whoever finds none waits, first come first.
//! - A request that was taken is answered once, after the device answered. When the queue leaves, what
//!   it has begun is answered, within the time that it is given, and all else is left to whoever serves
//!   the device next, who is given it again.
//! - A panic ends the process: the kernel keeps the requests, and the next process answers them.

use crate::abi::{self, Descriptor, IO_DESC_BYTES, io_command};
use crate::errno;
use crate::request::{Work, judge};
use crate::wakes::Wakes;
use block::{BlockDevice, Error, ErrorKind, Result, WriteFlags, ZeroFlags};
use bytes::Bytes;
use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
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
/// Pause where the kernel has no memory for a moment.
const MEMORY_WAIT: Duration = Duration::from_millis(1);
/// Buffers of reads up to this size stay with their tag. Chosen by hand: pages of databases.
const KEPT_BYTES_MAX: usize = 64 << 10;
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
    pub(crate) payload_bytes_max: u64,
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
    payload_bytes_max: u64,
    counters: Arc<Counters>,
    wakes: Arc<Wakes>,
    descriptors: Descriptors,
    /// Of each tag, the result of its fetch once that has come.
    fetched: Vec<Cell<Option<i32>>>,
    /// Entries for the ring.
    entries: RefCell<Vec<squeue::Entry>>,
    busy_count: Cell<u32>,
    payload_bytes: Cell<u64>,
    /// Tags that wait for payload memory.
    waiting: RefCell<VecDeque<u16>>,
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
        payload_bytes_max: args.payload_bytes_max.max(u64::from(args.io_bytes_max)),
        device: args.device,
        node: args.node.clone(),
        counters: args.counters,
        wakes: args.wakes.clone(),
        descriptors,
        fetched: (0..depth).map(|_| Cell::new(None)).collect(),
        entries: RefCell::new(Vec::with_capacity(usize::from(depth) + 1)),
        busy_count: Cell::new(0),
        payload_bytes: Cell::new(0),
        waiting: RefCell::default(),
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
    let entries = (u32::from(depth) + 1).next_power_of_two();
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
                    tag => {
                        let tag = u16::try_from(tag).expect("we gave it");
                        self.fetched[usize::from(tag)].set(Some(entry.result()));
                        self.wakes.mark(tag);
                    }
                }
            }
        }
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
        // SAFETY: commands of tags hold no pointers, and the eventfd is read into memory that is never
        // freed. The descriptors are open for as long as `self`, which outlives the ring.
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
        let mut buffer = Vec::new();
        let mut answer = None;
        while self.next(tag, answer).await == abi::IO_RES_OK {
            if self.wakes.is_leaving() {
                // Left to the next server: it is not answered, so the kernel gives it out again.
                return;
            }
            self.busy_count.set(self.busy_count.get() + 1);
            answer = Some(self.answer(tag, &mut buffer).await);
            self.busy_count.set(self.busy_count.get() - 1);
        }
    }

    /// Answers the tag's request, if there is one, and resolves when it has the next one.
    async fn next(&self, tag: u16, answer: Option<i32>) -> i32 {
        let (operation, result) = match answer {
            None => (io_command::FETCH_REQ, 0),
            Some(result) => (io_command::COMMIT_AND_FETCH_REQ, result),
        };
        let node = types::Fd(self.node.as_raw_fd());
        let command = abi::io(self.queue, tag, result);
        let entry = opcode::UringCmd16::new(node, operation).cmd(command).build();
        self.entries.borrow_mut().push(entry.user_data(u64::from(tag)));
        let slot = &self.fetched[usize::from(tag)];
        poll_fn(|_| slot.take().map_or(Poll::Pending, Poll::Ready)).await
    }

    async fn answer(&self, tag: u16, buffer: &mut Vec<u8>) -> i32 {
        let descriptor = self.descriptors.get(tag);
        let work = match judge(&descriptor, self.io_bytes_max) {
            Ok(work) => work,
            Err(result) => {
                self.counters.failures.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(device = self.number, ?descriptor, "a ublk request was refused");
                return result;
            }
        };
        match self.perform(tag, work, buffer).await {
            Ok(bytes) => i32::try_from(bytes).expect("at most the largest payload"),
            Err(error) => self.fail(&work, &error),
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

    async fn perform(&self, tag: u16, work: Work, buffer: &mut Vec<u8>) -> Result<u32> {
        let counters = &self.counters;
        match work {
            Work::Read { offset, length } => {
                counters.reads.fetch_add(1, Ordering::Relaxed);
                counters.read_bytes.fetch_add(u64::from(length), Ordering::Relaxed);
                let _room = self.reserve(tag, length).await;
                let bytes = length as usize;
                if buffer.len() < bytes {
                    buffer.resize(bytes, 0);
                }
                let read = self.device.read(offset, &mut buffer[..bytes]).await;
                let given = read.and_then(|()| self.give(tag, &buffer[..bytes]));
                if buffer.len() > KEPT_BYTES_MAX {
                    *buffer = Vec::new();
                }
                given.map(|()| length)
            }
            Work::Write { offset, length, fua } => {
                counters.writes.fetch_add(1, Ordering::Relaxed);
                counters.written_bytes.fetch_add(u64::from(length), Ordering::Relaxed);
                let _room = self.reserve(tag, length).await;
                // Copied once, into the memory that the device keeps.
                let payload = self.take(tag, length)?;
                self.device.write(offset, payload, WriteFlags { fua }).await.map(|()| length)
            }
            Work::Flush => {
                counters.flushes.fetch_add(1, Ordering::Relaxed);
                self.device.flush().await.map(|()| 0)
            }
            Work::Discard { offset, length, fua } => {
                counters.discards.fetch_add(1, Ordering::Relaxed);
                self.device.discard(offset, length, fua).await.map(|()| 0)
            }
            Work::WriteZeroes { offset, length, no_hole, fua } => {
                counters.discards.fetch_add(1, Ordering::Relaxed);
                let flags = ZeroFlags { fua, no_hole, fast_only: false };
                self.device.write_zeroes(offset, length, flags).await.map(|()| 0)
            }
        }
    }

    /// Copies the payload of a write out of the kernel.
    fn take(&self, tag: u16, length: u32) -> Result<Bytes> {
        let mut payload = Vec::with_capacity(length as usize);
        let start = abi::payload_offset(self.queue, tag);
        while payload.len() < length as usize {
            let at = start + payload.len() as u64;
            let spare = rustix::buffer::spare_capacity(&mut payload);
            match rustix::io::pread(&*self.node, spare, at) {
                Ok(0) => return Err(short(tag)),
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(copy_failed(tag, errno)),
            }
        }
        payload.truncate(length as usize); // room may be more than was asked for
        Ok(Bytes::from(payload))
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
    async fn reserve(&self, tag: u16, length: u32) -> Room<'_, D> {
        let bytes = u64::from(length);
        let mut is_queued = false;
        poll_fn(|_| {
            let mut waiting = self.waiting.borrow_mut();
            let is_first = waiting.front().is_none_or(|first| *first == tag);
            if is_first && self.payload_bytes.get() + bytes <= self.payload_bytes_max {
                if is_queued {
                    waiting.pop_front();
                }
                self.payload_bytes.set(self.payload_bytes.get() + bytes);
                // There may be room for the next one too.
                waiting.front().into_iter().for_each(|next| self.wakes.mark(*next));
                return Poll::Ready(());
            }
            if !is_queued {
                waiting.push_back(tag);
                is_queued = true;
            }
            Poll::Pending
        })
        .await;
        Room { queue: self, bytes }
    }
}

struct Room<'a, D> {
    queue: &'a Queue<D>,
    bytes: u64,
}

impl<D> Drop for Room<'_, D> {
    fn drop(&mut self) {
        let queue = self.queue;
        queue.payload_bytes.set(queue.payload_bytes.get() - self.bytes);
        if let Some(next) = queue.waiting.borrow().front() {
            queue.wakes.mark(*next);
        }
    }
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
