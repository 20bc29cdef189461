//! The outside world as traits, so that code which depends on it can be simulated from a seed.
//!
//! Invariants:
//! - Each trait has two implementations: the real machine, and a simulated twin for tests.
//! - A [`Disk`] never blocks its caller for longer than a copy into the page cache or, if it has
//!   announced that it waits, a short write to a device that takes a few hundred microseconds. It
//!   submits longer operations, and their completions are reaped.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};
use uuid::Uuid;

/// Time. All code but this file takes it from here, so that upkeep, schedules and deadlines can be
/// tested on a [`ManualClock`]; `clippy.toml` refuses the other ways.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// Returns the present moment of the monotonic clock; never goes back.
    fn now(&self) -> Instant;

    /// Returns the time of day, which may jump in both directions.
    fn wall(&self) -> SystemTime;

    /// Returns the time since the machine was started, including the time for which it was suspended.
    /// It cannot be set, and never goes back. Promises to other machines (leases) are measured with it.
    fn uptime(&self) -> Duration;

    /// Returns the time since `begun`, a moment of this clock; zero for a later one.
    fn since(&self, begun: Instant) -> Duration {
        self.now().saturating_duration_since(begun)
    }

    /// Returns the time of day in seconds since the Unix epoch; 0 before it.
    fn unix_seconds(&self) -> u64 {
        self.wall().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
    }
}

/// Unpredictable bytes, for keys, salts and identities.
pub trait Random: Send + Sync + 'static {
    /// Fills `bytes`. Never fails: without a source of randomness the process must not continue.
    fn fill(&self, bytes: &mut [u8]);
}

/// The kernel's clocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

#[expect(clippy::disallowed_methods, reason = "the adapter that all other code uses")]
impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn wall(&self) -> SystemTime {
        SystemTime::now()
    }

    fn uptime(&self) -> Duration {
        let time = boot_time();
        let (seconds, nanoseconds) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
        let is_valid = "the kernel's clock begins at zero";
        Duration::new(seconds.expect(is_valid), nanoseconds.expect(is_valid))
    }
}

/// Reads CLOCK_BOOTTIME, which Linux has since 2.6.39. rustix would panic on kernels without a vDSO (User
/// Mode Linux).
#[expect(unsafe_code, reason = "a call that no safe library makes on every kernel")]
fn boot_time() -> libc::timespec {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one `timespec` to the address, which is that of `time`.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    assert_eq!(result, 0, "the kernel has no CLOCK_BOOTTIME");
    time
}

/// A clock that stands still until a test moves it. Clones are the same clock, of a machine that was
/// started at the Unix epoch.
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<ManualTime>);

#[derive(Debug)]
struct ManualTime {
    start: Instant,
    elapsed_ns: AtomicU64,
    /// Seconds by which the time of day was set forward.
    ahead_seconds: AtomicI64,
    /// Time for which the machine was suspended.
    suspended_ns: AtomicU64,
    /// Time from the start of the clock's past to the last start of the machine.
    booted_ns: AtomicU64,
}

impl ManualClock {
    /// Makes a clock whose time of day is one hour after the Unix epoch.
    #[must_use]
    pub fn new() -> ManualClock {
        // Code that subtracts from the present moment finds a past to refer to: an `Instant` has no
        // value of its own.
        let start = SystemClock.now() + ManualClock::PAST;
        ManualClock(Arc::new(ManualTime {
            start,
            elapsed_ns: AtomicU64::new(0),
            ahead_seconds: AtomicI64::new(0),
            suspended_ns: AtomicU64::new(0),
            booted_ns: AtomicU64::new(0),
        }))
    }

    /// The time of day at the start, since the Unix epoch.
    const PAST: Duration = Duration::from_secs(3600);

    /// Moves all clocks forward. Panics after 500 years.
    pub fn advance(&self, by: Duration) {
        let by = u64::try_from(by.as_nanos()).expect("less than 500 years");
        self.0.elapsed_ns.fetch_add(by, Ordering::Relaxed);
    }

    /// Suspends the machine: the time of day and the uptime go on, and the monotonic clock stands still.
    /// Panics after 500 years.
    pub fn suspend(&self, time: Duration) {
        let time = u64::try_from(time.as_nanos()).expect("less than 500 years");
        self.0.suspended_ns.fetch_add(time, Ordering::Relaxed);
    }

    /// The time that has passed, with that of suspensions.
    fn passed(&self) -> Duration {
        self.elapsed() + Duration::from_nanos(self.0.suspended_ns.load(Ordering::Relaxed))
    }

    /// Sets the time of day forward, or back if `seconds` is negative, and leaves the others alone.
    pub fn jump(&self, seconds: i64) {
        self.0.ahead_seconds.fetch_add(seconds, Ordering::Relaxed);
    }

    /// Starts the machine again at the present moment.
    pub fn reboot(&self) {
        let booted = ManualClock::PAST + self.passed();
        let booted_ns = u64::try_from(booted.as_nanos()).expect("less than 500 years");
        self.0.booted_ns.store(booted_ns, Ordering::Relaxed);
    }

    /// Returns the time by which the clock was moved.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.0.elapsed_ns.load(Ordering::Relaxed))
    }
}

impl Default for ManualClock {
    fn default() -> Self {
        ManualClock::new()
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        self.0.start + self.elapsed()
    }

    fn wall(&self) -> SystemTime {
        let even = SystemTime::UNIX_EPOCH + ManualClock::PAST + self.passed();
        let ahead_seconds = self.0.ahead_seconds.load(Ordering::Relaxed);
        let ahead = Duration::from_secs(ahead_seconds.unsigned_abs());
        if ahead_seconds < 0 { even - ahead } else { even + ahead }
    }

    fn uptime(&self) -> Duration {
        let booted = Duration::from_nanos(self.0.booted_ns.load(Ordering::Relaxed));
        ManualClock::PAST + self.passed() - booted
    }
}

/// The cipher library's random generator, reseeded from the kernel.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemRandom;

#[expect(clippy::disallowed_methods, reason = "the adapter that all other code uses")]
impl Random for SystemRandom {
    fn fill(&self, bytes: &mut [u8]) {
        aws_lc_rs::rand::fill(bytes).expect("the kernel gives random bytes");
    }
}

/// Draws `N` bytes from [`SystemRandom`].
#[must_use]
pub fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    SystemRandom.fill(&mut bytes);
    bytes
}

/// Makes a random identity (UUID version 4) with [`SystemRandom`].
#[must_use]
pub fn random_uuid() -> Uuid {
    uuid::Builder::from_random_bytes(random_bytes()).into_uuid()
}

/// Identifies the current boot of this machine's kernel, the same for every caller until the next.
/// Source: proc_sys_kernel(5), `random/boot_id`.
#[must_use]
pub fn boot_id() -> Uuid {
    let known = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    Uuid::new_v5(&Uuid::NAMESPACE_OID, format!("spindle {}", known.trim()).as_bytes())
}

/// Identifies the page cache of a mounted file system, which lives as long as this boot of the kernel
/// and this mount. `mount` is the number of the mount in this boot. Without one, each call returns
/// another identity: nothing proves then that the file system stayed mounted.
#[must_use]
pub fn page_cache_id(mount: Option<u64>) -> Uuid {
    match mount {
        Some(mount) => Uuid::new_v5(&boot_id(), &mount.to_le_bytes()),
        None => random_uuid(),
    }
}

/// Alignment of every file offset, length and memory address of a [`Disk`] write, in bytes. Source:
/// the page size; O_DIRECT requires the logical block size, 512 or 4096.
pub const IO_ALIGN_BYTES: usize = 4096;

/// A growable buffer whose first byte is aligned to [`IO_ALIGN_BYTES`]. Reused for many writes.
#[derive(Debug, Default)]
pub struct IoBuffer {
    bytes: Vec<u8>,
    /// Index in `bytes` of the first aligned byte.
    start: usize,
}

impl IoBuffer {
    /// Empties the buffer and makes room for `capacity` bytes. The buffer does not move until that
    /// many have been pushed, so it stays aligned.
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

    /// Returns the pushed bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// Returns the pushed bytes, to be changed in place.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..]
    }

    /// Returns the number of bytes pushed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    /// Whether no byte was pushed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes of memory held.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.bytes.capacity()
    }
}

/// A request to a [`Disk`]. The caller numbers the files and chooses the tokens, which come back in
/// the [`DiskCompletion`].
#[derive(Debug)]
pub enum DiskRequest {
    /// Writes all of `buffer` at `offset`; both are multiples of [`IO_ALIGN_BYTES`].
    Write {
        /// Identifies the completion.
        token: u64,
        /// Number of an existing file.
        file: u32,
        /// Byte offset in the file.
        offset: u64,
        /// Returned with the completion.
        buffer: IoBuffer,
        /// Hint: a sync of this file follows at once, so the device should start the write
        /// immediately.
        is_sync_next: bool,
    },
    /// Puts writes to these files that completed before this call on stable storage. An error is
    /// final: a later success proves nothing about the writes that this sync should have covered.
    Sync {
        /// Identifies the completion.
        token: u64,
        /// Numbers of the files.
        files: Vec<u32>,
    },
    /// Makes a file of `header` followed by zero bytes, `len` bytes in all. Atomic: the file is
    /// complete and on stable storage, or does not exist.
    Create {
        /// Identifies the completion.
        token: u64,
        /// Number of the file, which must not exist.
        file: u32,
        /// Length of the file in bytes, header included.
        len: u64,
        /// First bytes of the file.
        header: Vec<u8>,
    },
    /// Removes all files; no other request is under way. Atomic: after a crash all of them exist, or
    /// none does. On completion none will exist again.
    Clear {
        /// Identifies the completion.
        token: u64,
    },
}

/// The completion of one request.
#[derive(Debug)]
pub struct DiskCompletion {
    /// The token of the request.
    pub token: u64,
    /// Success if the whole request was carried out.
    pub result: io::Result<()>,
    /// The buffer of a write.
    pub buffer: Option<IoBuffer>,
}

/// A small set of numbered files with asynchronous writes and syncs.
pub trait Disk: Send + 'static {
    /// Starts a request. [`Disk::reap`] reports its completion, never this call.
    fn submit(&mut self, request: DiskRequest);

    /// Appends the completions since the last call, in any order. Never waits.
    fn reap(&mut self, completions: &mut Vec<DiskCompletion>);

    /// Blocks until there is a completion to reap, or for a few milliseconds. For callers that have
    /// no other work.
    fn wait(&mut self);

    /// Returns a reader that any thread may use.
    fn reader(&self) -> Arc<dyn DiskReader>;
}

/// Reads from the files of a [`Disk`].
pub trait DiskReader: Send + Sync + 'static {
    /// Lists the numbers of the existing files with their lengths in bytes, ascending.
    ///
    /// # Errors
    /// Those of the file system.
    fn files(&self) -> io::Result<Vec<(u32, u64)>>;

    /// Fills `buf` from `offset`. Blocks.
    ///
    /// # Errors
    /// Those of the file system; `UnexpectedEof` past the end of the file.
    fn read_at(&self, file: u32, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Returns the file's name, for messages.
    fn name(&self, file: u32) -> String;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manual_clock_stands_still_until_it_is_moved_and_clones_move_together() {
        let clock = ManualClock::new();
        let (now, wall) = (clock.now(), clock.wall());
        assert_eq!((clock.now(), clock.wall()), (now, wall));
        clock.clone().advance(Duration::from_millis(1500));
        assert_eq!(clock.now() - now, Duration::from_millis(1500));
        assert_eq!(clock.wall(), wall + Duration::from_millis(1500));
        assert!(clock.now().checked_sub(Duration::from_secs(3600)).is_some(), "it has a past");
    }

    #[test]
    fn uptime_counts_suspensions_and_the_monotonic_clock_does_not() {
        let clock = ManualClock::new();
        let (now, wall, uptime) = (clock.now(), clock.wall(), clock.uptime());
        let night = Duration::from_secs(30_000);
        clock.suspend(night);
        assert_eq!(clock.since(now), Duration::ZERO);
        assert_eq!((clock.wall(), clock.uptime()), (wall + night, uptime + night));
    }

    #[test]
    fn uptime_of_the_kernel_is_fine_grained() {
        let (begun, began) = (SystemClock.uptime(), SystemClock.now());
        while SystemClock.since(began) < Duration::from_millis(2) {}
        let passed = SystemClock.uptime() - begun;
        assert!(
            passed >= Duration::from_millis(2) && passed < Duration::from_secs(60),
            "{passed:?}"
        );
        let text = std::fs::read_to_string("/proc/uptime").unwrap();
        let shown: f64 = text.split(' ').next().unwrap().parse().unwrap();
        let difference = shown - SystemClock.uptime().as_secs_f64();
        assert!(difference.abs() < 60.0, "{difference}");
    }

    #[test]
    fn page_cache_lives_as_long_as_a_known_mount() {
        assert_eq!(page_cache_id(Some(7)), page_cache_id(Some(7)));
        assert_ne!(page_cache_id(Some(7)), page_cache_id(Some(8)));
        assert_ne!(page_cache_id(None), page_cache_id(None));
    }

    #[test]
    fn manual_clock_sets_the_time_of_day_and_restarts_the_machine_alone() {
        let clock = ManualClock::new();
        let (now, uptime) = (clock.now(), clock.uptime());
        clock.jump(-3000);
        assert_eq!((clock.unix_seconds(), clock.uptime()), (600, uptime));
        clock.jump(3100);
        clock.reboot();
        assert_eq!((clock.unix_seconds(), clock.uptime()), (3700, Duration::ZERO));
        clock.advance(Duration::from_secs(5));
        assert_eq!((clock.since(now), clock.uptime()), (clock.elapsed(), clock.elapsed()));
        assert_eq!(clock.since(clock.now() + Duration::from_secs(1)), Duration::ZERO);
    }
}
