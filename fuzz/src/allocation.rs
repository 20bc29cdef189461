//! Memory that a decoder takes: an allocator that counts the bytes of each thread.
//!
//! Invariants:
//! - Counting costs two additions in thread-local memory, and never allocates.
//! - Memory that another thread frees is not subtracted, so a peak is never too low.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static LIVE_BYTES: Cell<usize> = const { Cell::new(0) };
    static PEAK_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// The most memory that one execution may hold at a time, beyond what was held before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocationBound {
    /// Bytes for an empty input.
    pub fixed_bytes: usize,
    /// Bytes more for each byte of the input.
    pub bytes_per_input_byte: usize,
}

impl AllocationBound {
    /// Returns the bound for an input of this length, in bytes.
    #[must_use]
    pub fn of(self, input_bytes: usize) -> usize {
        self.fixed_bytes.saturating_add(self.bytes_per_input_byte.saturating_mul(input_bytes))
    }
}

/// The allocator of the system, with a count for each thread.
#[derive(Debug)]
pub struct CountingAllocator;

/// Runs `work` and returns its result and the most bytes that this thread held during it, beyond
/// those that it held before.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE_BYTES.get();
    PEAK_BYTES.set(before);
    let result = work();
    (result, PEAK_BYTES.get().saturating_sub(before))
}

fn add(bytes: usize) {
    let live = LIVE_BYTES.get().saturating_add(bytes);
    LIVE_BYTES.set(live);
    if live > PEAK_BYTES.get() {
        PEAK_BYTES.set(live);
    }
}

fn subtract(bytes: usize) {
    LIVE_BYTES.set(LIVE_BYTES.get().saturating_sub(bytes));
}

// SAFETY: every call is passed on to `System` unchanged, and the counters do not allocate: they are
// constants without a destructor in the memory of the thread.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`, which is that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: as in `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        subtract(layout.size());
        // SAFETY: `memory` came from `System` with this layout, as every call is passed on.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size);
        // SAFETY: as in `dealloc`; the caller keeps the contract for `size`.
        let moved = unsafe { System.realloc(memory, layout, size) };
        subtract(layout.size());
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_counts_only_the_measured_work() {
        let kept = vec![1u8; 4096];
        let (sum, peak) = peak_of(|| {
            let large: Vec<u8> = vec![1; 100_000];
            let small: Vec<u8> = vec![1; 10_000];
            large.len() + small.len()
        });
        assert_eq!(sum, 110_000);
        assert!((110_000..120_000).contains(&peak), "{peak} bytes");
        assert_eq!(kept.len(), 4096);
        let bound = AllocationBound { fixed_bytes: 100, bytes_per_input_byte: 3 };
        assert_eq!(bound.of(10), 130);
    }
}
