//! Maps memory before it is used.
//!
//! Invariants:
//! - The contents of the mapped pages stay unchanged, whoever owns them.

use rustix::mm::{Advice, madvise};
use std::cell::Cell;
use std::ops::Range;
use std::sync::LazyLock;

/// Size of a region that is mapped together: the binary's allocator gets it from the kernel as a
/// whole and hands out small buffers from it, one page at a time. Source: mimalloc 3, types.h,
/// `MI_ARENA_SLICE_SIZE`.
const REGION_BYTES: usize = 64 << 10;

/// Maps the capacity of the buffer, and for a small buffer the [`REGION_BYTES`] around it. Mapping
/// a page here costs a fraction of the page fault that its first write would cause. An allocator
/// writes into each small buffer before it hands it out, so this thread's next buffers have to be
/// mapped together with this one. If the kernel cannot do it (before Linux 5.14) or has no memory,
/// the faults come as usual.
///
/// See [`block::buffers::MapAhead`].
pub(crate) fn map_ahead(buffer: &Vec<u8>) {
    thread_local! {
        static LAST_START: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    let pages = pages_of(buffer.as_ptr().addr(), buffer.capacity());
    let is_mapped = LAST_START.replace(pages.start) == pages.start;
    if !is_mapped || buffer.capacity() >= REGION_BYTES {
        map(&pages);
    }
}

/// Returns the range to map for a buffer: for a large one only its own whole pages, for a small one
/// the regions around it, which other buffers may share.
fn pages_of(start: usize, length: usize) -> Range<usize> {
    static PAGE_BYTES: LazyLock<usize> = LazyLock::new(rustix::param::page_size);
    let end = start + length;
    if length < REGION_BYTES {
        start - start % REGION_BYTES..end.next_multiple_of(REGION_BYTES)
    } else {
        start.next_multiple_of(*PAGE_BYTES)..end - end % *PAGE_BYTES
    }
}

#[expect(unsafe_code, reason = "the kernel is told an address")]
fn map(range: &Range<usize>) {
    let pages = std::ptr::without_provenance_mut(range.start);
    // SAFETY: the kernel maps pages as a write to them would and does not change their contents,
    // whoever owns them; nothing is read or written through the pointer. For an address range
    // without memory it returns an error. Source: madvise(2), `MADV_POPULATE_WRITE`.
    let mapped = unsafe { madvise(pages, range.len(), Advice::LinuxPopulateWrite) };
    if let Err(error) = mapped {
        tracing::debug!(%error, "could not map memory ahead of its use");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the page faults of this thread that needed no disk.
    fn fault_count() -> u64 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").expect("the kernel has it");
        // `minflt` is the tenth; the name before it may hold anything. Source: proc_pid_stat(5).
        let (_, rest) = stat.rsplit_once(')').expect("a name");
        rest.split_whitespace().nth(7).and_then(|text| text.parse().ok()).expect("a number")
    }

    /// Counts the faults of filling a buffer that comes fresh from the kernel: the allocator never
    /// reuses memory for one of this size. Source: mallopt(3), `DEFAULT_MMAP_THRESHOLD_MAX`, 32
    /// MiB.
    fn faults_of_filling(prepare: impl FnOnce(&mut Vec<u8>)) -> u64 {
        let mut buffer = Vec::with_capacity(48 << 20);
        prepare(&mut buffer);
        let before = fault_count();
        buffer.resize(buffer.capacity(), 1);
        std::hint::black_box(&buffer);
        fault_count() - before
    }

    #[test]
    fn mapped_memory_takes_no_faults_and_keeps_its_contents() {
        let without = faults_of_filling(|_| ());
        let with = faults_of_filling(|buffer| {
            buffer.extend_from_slice(&[7; 3]);
            map_ahead(buffer);
            assert_eq!(buffer[..], [7; 3]);
        });
        // Huge pages reduce the faults on both sides.
        assert!(without > 0 && with <= without / 2, "{with} faults instead of {without}");
    }

    #[test]
    fn region_around_a_small_buffer_is_mapped_with_it() {
        let without = faults_of_filling(|_| ());
        let with = faults_of_filling(|buffer| {
            let start = buffer.as_ptr().addr();
            for at in (start..start + buffer.capacity()).step_by(REGION_BYTES) {
                map(&pages_of(at, 4096));
            }
        });
        assert!(without > 0 && with <= without / 2, "{with} faults instead of {without}");
        assert_eq!(pages_of(0x7_0000, 0x1000), 0x7_0000..0x8_0000);
        assert_eq!(pages_of(0x7_f000, 0x1000), 0x7_0000..0x8_0000);
        assert_eq!(pages_of(0x7_f000, 0x1001), 0x7_0000..0x9_0000);
        assert_eq!(pages_of(0x7_ffff, 0x3_0001), 0x8_0000..0xb_0000, "only what is its own");
    }
}
