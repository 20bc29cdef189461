//! Reusable memory for payloads.
//!
//! The kernel maps and clears fresh memory page by page at first use, and an allocator that gets
//! such memory back has to decide each time whether to keep it. For a payload this costs as much as
//! sealing it. If no buffer can be reused, for example at the first load after an idle period, more
//! memory around the new buffer is mapped in one call, at a fraction of the cost of page faults.
//!
//! Invariants:
//! - Waiting buffers and buffers in use are bounded together: waiting ones make room for other
//!   sizes.
//! - Buffers that stay unused between two calls of `trim` go back to the allocator.
//! - A buffer in use belongs to its holder alone. It returns when its last reference is dropped.
//! - No call waits, neither to take a buffer nor to return one. The last reference may be dropped
//!   under locks that all writers need, and the thread that holds the list may be one that the
//!   kernel schedules last.

use bytes::Bytes;
use parking_lot::Mutex;
use std::mem::take;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Smallest payload whose memory is reused: the unit of map and segments.
const CLASS_BYTES_MIN: usize = 4096;
/// Number of size classes: 4 KiB, 8 KiB and so on up to 1 MiB, the parts in which front ends pass
/// large writes.
const CLASS_COUNT: usize = 9;

/// Returns a part of `whole` that keeps at most twice its own length in memory. A part longer than
/// half of `whole` shares its memory; a shorter one is copied. Use it for parts that outlive the
/// whole and are counted by their length.
///
/// # Panics
/// If the range exceeds `whole`.
#[must_use]
pub fn part_of(whole: &Bytes, range: Range<usize>) -> Bytes {
    match range.len() > whole.len() / 2 {
        true => whole.slice(range),
        false => Bytes::copy_from_slice(&whole[range]),
    }
}

/// Maps the full capacity of a new buffer, and perhaps the memory that its thread will get next.
/// The kernel would otherwise map them page by page at first use. A failure has no effect.
pub type MapAhead = fn(&Vec<u8>);

/// Buffers that wait to be reused, last in, first out.
#[derive(Debug, Default)]
pub struct Spare {
    buffers: Vec<Vec<u8>>,
    /// The lowest number of waiting buffers since the last trim; that many were not needed.
    idle_count: usize,
}

impl Spare {
    /// Returns the number of waiting buffers.
    #[must_use]
    pub fn count(&self) -> usize {
        self.buffers.len()
    }

    /// Adds a buffer.
    pub fn push(&mut self, buffer: Vec<u8>) {
        self.buffers.push(buffer);
    }

    /// Takes a buffer, as its last holder left it.
    pub fn pop(&mut self) -> Option<Vec<u8>> {
        let found = self.buffers.pop();
        self.idle_count = self.idle_count.min(self.buffers.len());
        found
    }

    /// Takes out the buffers that were not needed since the last call. Drop them outside of locks.
    pub fn trim(&mut self) -> Vec<Vec<u8>> {
        let dropped = self.buffers.split_off(self.buffers.len() - self.idle_count);
        self.idle_count = self.buffers.len();
        dropped
    }
}

/// Memory for the payloads of writes, which a device keeps until they are destaged.
#[derive(Debug)]
pub struct PayloadBuffers {
    classes: [Mutex<Spare>; CLASS_COUNT],
    map_ahead: MapAhead,
    /// Size of all waiting buffers and of all that may return.
    bytes: AtomicUsize,
    bytes_max: usize,
}

/// Returns the class of payloads of this length, if their memory is reused.
fn class_of(length: usize) -> Option<usize> {
    let is_kept = length.is_power_of_two() && length >= CLASS_BYTES_MIN;
    let class = (length / CLASS_BYTES_MIN).trailing_zeros() as usize;
    (is_kept && class < CLASS_COUNT).then_some(class)
}

impl PayloadBuffers {
    /// Keeps at most `bytes_max`, buffers in use included. `map_ahead` is called for every new
    /// buffer that will be reused, on the thread that takes it, and must not wait for locks.
    #[must_use]
    pub fn new(bytes_max: usize, map_ahead: MapAhead) -> Arc<PayloadBuffers> {
        Arc::new(PayloadBuffers {
            classes: std::array::from_fn(|_| Mutex::default()),
            map_ahead,
            bytes: AtomicUsize::new(0),
            bytes_max,
        })
    }

    /// Takes an empty buffer with room for `length` bytes. Reuses memory if a buffer of exactly
    /// this size is waiting.
    #[must_use]
    pub fn take(self: &Arc<Self>, length: usize) -> PayloadBuffer {
        let class = class_of(length);
        let home = || Some(Home { buffers: self.clone(), class, length });
        let spare = class.and_then(|class| self.classes[class].try_lock()?.pop());
        if let Some(bytes) = spare {
            return PayloadBuffer { bytes, home: home() };
        }
        if !self.is_room_made(length) {
            return PayloadBuffer::fresh(length);
        }
        let bytes = Vec::with_capacity(length);
        if class.is_some() {
            (self.map_ahead)(&bytes);
        }
        PayloadBuffer { bytes, home: home() }
    }

    /// Tries to count `length` more bytes, and drops waiting buffers to make room for them.
    fn is_room_made(&self, length: usize) -> bool {
        let mut bytes = self.bytes.fetch_add(length, Ordering::Relaxed) + length;
        for class in (0..CLASS_COUNT).rev() {
            while bytes > self.bytes_max
                && let Some(spare) = self.classes[class].try_lock().and_then(|mut of| of.pop())
            {
                drop(spare);
                let class_bytes = CLASS_BYTES_MIN << class;
                bytes = self.bytes.fetch_sub(class_bytes, Ordering::Relaxed) - class_bytes;
            }
        }
        let is_room = bytes <= self.bytes_max;
        if !is_room {
            self.bytes.fetch_sub(length, Ordering::Relaxed);
        }
        is_room
    }

    /// Returns the size of all waiting buffers and of all that may return, in bytes.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns to the allocator the buffers that were not needed since the last call. Call it every
    /// few seconds.
    pub fn trim(&self) {
        for (class, spare) in self.classes.iter().enumerate() {
            let dropped = spare.lock().trim();
            self.bytes.fetch_sub(dropped.len() * (CLASS_BYTES_MIN << class), Ordering::Relaxed);
        }
    }
}

/// Memory for one payload, as a [`Vec`]. It must not grow beyond the requested length.
#[derive(Debug, Default)]
pub struct PayloadBuffer {
    bytes: Vec<u8>,
    home: Option<Home>,
}

#[derive(Debug)]
struct Home {
    buffers: Arc<PayloadBuffers>,
    /// The class to which it returns. A buffer without a class is only counted while in use.
    class: Option<usize>,
    length: usize,
}

impl PayloadBuffer {
    /// Creates an empty buffer with room for `length` bytes, whose memory is not reused.
    #[must_use]
    pub fn fresh(length: usize) -> PayloadBuffer {
        PayloadBuffer { bytes: Vec::with_capacity(length), home: None }
    }

    /// Returns the contents for sharing. The memory is reused once the last reference is dropped.
    #[must_use]
    pub fn into_bytes(mut self) -> Bytes {
        match self.home {
            None => Bytes::from(take(&mut self.bytes)),
            Some(_) => Bytes::from_owner(self),
        }
    }
}

impl Deref for PayloadBuffer {
    type Target = Vec<u8>;

    fn deref(&self) -> &Vec<u8> {
        &self.bytes
    }
}

impl DerefMut for PayloadBuffer {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }
}

impl AsRef<[u8]> for PayloadBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for PayloadBuffer {
    fn drop(&mut self) {
        let Some(Home { buffers, class, length }) = self.home.take() else { return };
        let mut bytes = take(&mut self.bytes);
        // A holder that took the memory out or extended it broke the rules: do not reuse it.
        let class = class.filter(|_| bytes.capacity() == length);
        match class.and_then(|class| buffers.classes[class].try_lock()) {
            Some(mut spare) => {
                bytes.clear();
                spare.push(bytes);
            }
            None => drop(buffers.bytes.fetch_sub(length, Ordering::Relaxed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: usize = 1 << 10;

    /// Creates buffers that map nothing ahead, and otherwise behave the same.
    fn buffers_of(bytes_max: usize) -> Arc<PayloadBuffers> {
        PayloadBuffers::new(bytes_max, |_| ())
    }

    fn spare_count(buffers: &PayloadBuffers) -> usize {
        buffers.classes.iter().map(|spare| spare.lock().count()).sum()
    }

    #[test]
    fn memory_returns_with_the_last_reference_and_is_reused() {
        let buffers = buffers_of(64 * KIB);
        let mut first = buffers.take(4 * KIB);
        first.extend_from_slice(&[7; 4096]);
        let address = first.as_ptr();
        let shared = first.into_bytes();
        assert_eq!(shared.as_ptr(), address, "nothing is copied");
        let part = shared.slice(512..1024);
        drop(shared);
        assert_eq!((spare_count(&buffers), &part[..]), (0, &[7; 512][..]), "a part is still out");
        drop(part);
        assert_eq!(spare_count(&buffers), 1);
        let again = buffers.take(4 * KIB);
        assert_eq!((again.as_ptr(), again.len(), again.capacity()), (address, 0, 4 * KIB));
        let other = buffers.take(8 * KIB);
        assert!(other.capacity() == 8 * KIB && other.as_ptr() != address);
    }

    #[test]
    fn a_small_part_does_not_keep_the_whole_in_memory() {
        let whole = Bytes::from(vec![7; 64 * KIB]);
        let most = part_of(&whole, 0..32 * KIB + 1);
        assert_eq!(most.as_ptr(), whole.as_ptr(), "a part that is most of it is not copied");
        drop(most);
        let half = part_of(&whole, 32 * KIB..64 * KIB);
        assert!(half == whole[32 * KIB..] && whole.is_unique());
    }

    #[test]
    fn unpooled_sizes_are_allocated_exactly() {
        let buffers = buffers_of(usize::MAX);
        for length in [1, 512, 4095, 4097, 12 * KIB, 2 << 20] {
            let buffer = buffers.take(length);
            assert_eq!(
                (buffer.capacity(), buffers.bytes.load(Ordering::Relaxed)),
                (length, length)
            );
            drop(buffer.into_bytes());
            assert_eq!((spare_count(&buffers), buffers.bytes.load(Ordering::Relaxed)), (0, 0));
        }
        for class in 0..CLASS_COUNT {
            drop(buffers.take(CLASS_BYTES_MIN << class).into_bytes());
            assert_eq!(spare_count(&buffers), class + 1);
        }
    }

    #[test]
    fn spare_and_taken_buffers_share_one_bound() {
        let buffers = buffers_of(64 * KIB);
        let many: Vec<_> = (0..32).map(|_| buffers.take(4 * KIB)).collect();
        assert!(many.iter().all(|buffer| buffer.capacity() == 4 * KIB), "nobody goes without");
        assert_eq!(buffers.bytes.load(Ordering::Relaxed), 64 * KIB);
        drop(many);
        assert_eq!(spare_count(&buffers), 16);
        // Another size takes the place of waiting buffers.
        let large = buffers.take(32 * KIB);
        assert_eq!(spare_count(&buffers), 8);
        let larger = buffers.take(64 * KIB);
        assert!(larger.home.is_none() && larger.capacity() == 64 * KIB, "too much is out");
        drop((large, larger));
        assert_eq!(buffers.bytes.load(Ordering::Relaxed), 32 * KIB);
        // So does a size that is not reused.
        drop((0..16).map(|_| buffers.take(4 * KIB)).collect::<Vec<_>>());
        assert_eq!(spare_count(&buffers), 16);
        let odd = buffers.take(12 * KIB);
        assert_eq!((spare_count(&buffers), buffers.bytes.load(Ordering::Relaxed)), (13, 64 * KIB));
        drop(odd);
        assert_eq!(buffers.bytes.load(Ordering::Relaxed), 52 * KIB);
    }

    #[test]
    fn new_buffers_are_mapped_ahead_once() {
        static MAPPED: Mutex<Vec<usize>> = Mutex::new(Vec::new());
        let buffers = PayloadBuffers::new(64 * KIB, |made| {
            assert!(made.is_empty());
            MAPPED.lock().push(made.capacity() / KIB);
        });
        drop((buffers.take(4 * KIB), buffers.take(8 * KIB), buffers.take(4 * KIB)));
        assert_eq!(take(&mut *MAPPED.lock()), [4, 8, 4]);
        drop((buffers.take(4 * KIB), buffers.take(8 * KIB), buffers.take(4 * KIB)));
        assert!(MAPPED.lock().is_empty(), "they are used again");
        drop(buffers.take(12 * KIB));
        assert!(MAPPED.lock().is_empty(), "of a size that is not kept");
        assert!(buffers.take(128 * KIB).home.is_none() && MAPPED.lock().is_empty(), "no room");
    }

    #[test]
    fn busy_list_delays_no_caller() {
        let buffers = buffers_of(usize::MAX);
        let (first, second) = (buffers.take(4 * KIB), buffers.take(4 * KIB));
        drop(first);
        let at_the_list = buffers.classes[0].lock();
        let third = buffers.take(4 * KIB);
        drop((second, third));
        drop(at_the_list);
        assert_eq!((spare_count(&buffers), buffers.bytes.load(Ordering::Relaxed)), (1, 4 * KIB));
    }

    #[test]
    fn trim_frees_buffers_unused_since_the_last_trim() {
        let buffers = buffers_of(usize::MAX);
        let four = || (0..4).map(|_| buffers.take(4 * KIB)).collect::<Vec<_>>();
        drop(four());
        buffers.trim();
        assert_eq!(spare_count(&buffers), 4, "they were out");
        for _ in 0..3 {
            drop(four());
            buffers.trim();
            assert_eq!(spare_count(&buffers), 4, "they were of use");
        }
        drop(buffers.take(4 * KIB));
        buffers.trim();
        assert_eq!(spare_count(&buffers), 1);
        buffers.trim();
        assert_eq!((spare_count(&buffers), buffers.bytes.load(Ordering::Relaxed)), (0, 0));
    }

    #[test]
    fn grown_and_emptied_buffers_are_not_kept() {
        let buffers = buffers_of(usize::MAX);
        let mut grown = buffers.take(4 * KIB);
        grown.resize(5 * KIB, 1);
        let mut emptied = buffers.take(8 * KIB);
        drop(take(&mut *emptied));
        drop((grown, emptied));
        assert_eq!((spare_count(&buffers), buffers.bytes.load(Ordering::Relaxed)), (0, 0));
    }

    #[test]
    fn concurrent_takes_and_returns_keep_the_count_exact() {
        let buffers = buffers_of(256 * KIB);
        std::thread::scope(|scope| {
            let (send, receive) = std::sync::mpsc::sync_channel::<Bytes>(64);
            let buffers = &buffers;
            scope.spawn(move || {
                for round in 0..20_000_u32 {
                    let length = CLASS_BYTES_MIN << (round % 3);
                    let mut buffer = buffers.take(length);
                    buffer.resize(length, round as u8);
                    send.send(buffer.into_bytes()).unwrap();
                }
            });
            scope.spawn(move || {
                for (round, bytes) in (0_u32..).zip(receive) {
                    assert!(bytes.iter().all(|byte| *byte == round as u8), "used by two");
                    if round % 1000 == 0 {
                        buffers.trim();
                    }
                }
            });
        });
        for _ in 0..2 {
            buffers.trim();
        }
        assert_eq!((spare_count(&buffers), buffers.bytes.load(Ordering::Relaxed)), (0, 0));
    }
}
