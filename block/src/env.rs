//! The outside world as traits, so that what depends on it can be simulated from a seed.
//!
//! Invariants:
//! - Each trait has two implementations: the real machine, and a simulated twin for tests.
//! - A [`Disk`] never blocks its caller for longer than a copy into the page cache, or, where it has said that it waits,
//!   a short write to a device that takes some hundred microseconds for one: what waits longer is submitted, and its end is reaped.

use std::io;
use std::sync::Arc;

/// Monotonic time.
pub trait Clock: Send + Sync + 'static {
    /// Nanoseconds since some fixed moment; never goes back.
    fn now_ns(&self) -> u64;
}

/// Unpredictable bytes, for keys, salts and identities.
pub trait Random: Send + Sync + 'static {
    /// Fills `bytes`. Never fails: without a source of randomness the process must not go on.
    fn fill(&self, bytes: &mut [u8]);
}

/// The kernel's monotonic clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now_ns(&self) -> u64 {
        use std::sync::OnceLock;
        use std::time::Instant;
        static START: OnceLock<Instant> = OnceLock::new();
        let elapsed = START.get_or_init(Instant::now).elapsed();
        u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX)
    }
}

/// The cipher library's random generator, reseeded from the kernel.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemRandom;

impl Random for SystemRandom {
    fn fill(&self, bytes: &mut [u8]) {
        aws_lc_rs::rand::fill(bytes).expect("the kernel gives random bytes");
    }
}

/// Alignment of every file offset, length and memory address of a [`Disk`] write, in bytes.
/// Source: the page size; O_DIRECT asks for the logical block size, 512 or 4096.
pub const IO_ALIGN_BYTES: usize = 4096;

/// A growable buffer whose first byte is aligned to [`IO_ALIGN_BYTES`]. Reused from write to write.
#[derive(Debug, Default)]
pub struct IoBuffer {
    bytes: Vec<u8>,
    /// Index in `bytes` of the first aligned byte.
    start: usize,
}

impl IoBuffer {
    /// Empties the buffer and makes room for `capacity` bytes. Until that many were pushed the
    /// buffer does not move, so it stays aligned.
    pub fn reset(&mut self, capacity: usize) {
        let wanted = capacity + IO_ALIGN_BYTES;
        self.bytes.clear();
        if self.bytes.capacity() < wanted {
            self.bytes = Vec::with_capacity(wanted);
        }
        self.start = self.bytes.as_ptr().align_offset(IO_ALIGN_BYTES).min(IO_ALIGN_BYTES);
        self.bytes.resize(self.start, 0);
    }

    /// Appends bytes. Panics past the capacity given to [`IoBuffer::reset`].
    pub fn push(&mut self, bytes: &[u8]) {
        assert!(self.bytes.len() + bytes.len() <= self.bytes.capacity(), "IoBuffer would move");
        self.bytes.extend_from_slice(bytes);
    }

    /// Appends zeroes until the buffer holds `len` bytes. Panics past the capacity.
    pub fn pad_to(&mut self, len: usize) {
        assert!(self.start + len <= self.bytes.capacity(), "IoBuffer would move");
        self.bytes.resize(self.start + len, 0);
    }

    /// What was pushed.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// What was pushed, to be changed in place.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..]
    }

    /// Bytes pushed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    /// Nothing was pushed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory held.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.bytes.capacity()
    }
}

/// What a [`Disk`] is asked to do. Files are numbered by the caller. Tokens are the caller's and
/// come back in the [`DiskCompletion`].
#[derive(Debug)]
pub enum DiskRequest {
    /// Writes all of `buffer` at `offset`; both are multiples of [`IO_ALIGN_BYTES`].
    Write {
        /// Names the completion.
        token: u64,
        /// Number of the file, which exists.
        file: u32,
        /// Byte offset in the file.
        offset: u64,
        /// Returned with the completion.
        buffer: IoBuffer,
        /// Hint: a sync of it follows at once, so that its way to the device is best begun now.
        is_sync_next: bool,
    },
    /// Puts on stable storage what writes that completed before this call wrote to these files.
    /// An error is final: a later success proves nothing about what this one was to cover.
    Sync {
        /// Names the completion.
        token: u64,
        /// Numbers of the files.
        files: Vec<u32>,
    },
    /// Makes a file of `len` zero bytes behind `header`, whole and on stable storage or not there
    /// at all.
    Create {
        /// Names the completion.
        token: u64,
        /// Number of the file, which does not exist.
        file: u32,
        /// Length of the file in bytes, header included.
        len: u64,
        /// First bytes of the file.
        header: Vec<u8>,
    },
}

/// The end of one request.
#[derive(Debug)]
pub struct DiskCompletion {
    /// As given in the request.
    pub token: u64,
    /// Whether it did what was asked, all of it.
    pub result: io::Result<()>,
    /// The buffer of a write.
    pub buffer: Option<IoBuffer>,
}

/// A small set of numbered files with asynchronous writes and syncs.
pub trait Disk: Send + 'static {
    /// Starts a request. The end is told by [`Disk::reap`], never by this call.
    fn submit(&mut self, request: DiskRequest);

    /// Appends what has ended since the last call, in any order. Never waits.
    fn reap(&mut self, completions: &mut Vec<DiskCompletion>);

    /// Blocks until there is something to reap, or for a few milliseconds: for callers that have
    /// nothing else to do.
    fn wait(&mut self);

    /// Reads, from any thread.
    fn reader(&self) -> Arc<dyn DiskReader>;
}

/// Reads of the files of a [`Disk`].
pub trait DiskReader: Send + Sync + 'static {
    /// Numbers of the files that exist with their lengths in bytes, ascending.
    ///
    /// # Errors
    /// Those of the file system.
    fn files(&self) -> io::Result<Vec<(u32, u64)>>;

    /// Fills `buf` from `offset`. Blocks.
    ///
    /// # Errors
    /// Those of the file system; `UnexpectedEof` past the end of the file.
    fn read_at(&self, file: u32, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// The file's name, for messages.
    fn name(&self, file: u32) -> String;
}
