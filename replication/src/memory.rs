//! Memory that is mapped before it is used.
//!
//! Invariants:
//! - Only pages that lie within the capacity of a buffer that the caller has are asked for, and what they hold stays.

use rustix::mm::{Advice, madvise};
use std::sync::LazyLock;

/// Maps what the buffers have room for: for a page a fraction of what its fault costs, which would come when it is first
/// written to. Buffers that lie side by side are mapped in one call; they are sorted for that. Where the kernel cannot
/// (before Linux 5.14), or has no memory, the faults come as ever.
///
/// See [`block::buffers::MapAhead`].
pub(crate) fn map_ahead(buffers: &mut [Vec<u8>]) {
    buffers.sort_unstable_by_key(|buffer| buffer.as_ptr().addr());
    let mut runs = buffers.iter().map(|buffer| {
        let start = buffer.as_ptr().addr();
        start..start + buffer.capacity()
    });
    let Some(mut run) = runs.next() else { return };
    for next in runs {
        if next.start == run.end {
            run.end = next.end;
        } else {
            map(&run);
            run = next;
        }
    }
    map(&run);
}

#[expect(unsafe_code, reason = "the kernel is told an address")]
fn map(run: &std::ops::Range<usize>) {
    static PAGE_BYTES: LazyLock<usize> = LazyLock::new(rustix::param::page_size);
    let start = run.start.next_multiple_of(*PAGE_BYTES);
    let end = run.end - run.end % *PAGE_BYTES;
    if start >= end {
        return;
    }
    let pages = std::ptr::without_provenance_mut(start);
    // SAFETY: the pages are part of allocations that the caller has. The kernel maps them as a write would, and
    // changes nothing that they hold; nothing is read or written through the pointer. Source: madvise(2),
    // `MADV_POPULATE_WRITE`.
    let mapped = unsafe { madvise(pages, end - start, Advice::LinuxPopulateWrite) };
    if let Err(error) = mapped {
        tracing::debug!(%error, "memory is not mapped ahead");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Page faults of this thread that needed no disk.
    fn fault_count() -> u64 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").expect("the kernel has it");
        // `minflt` is the tenth; the name before it may hold anything. Source: proc_pid_stat(5).
        let (_, rest) = stat.rsplit_once(')').expect("a name");
        rest.split_whitespace().nth(7).and_then(|text| text.parse().ok()).expect("a number")
    }

    #[test]
    fn memory_that_was_mapped_ahead_takes_no_faults_and_keeps_what_it_holds() {
        const LENGTH: usize = 8 << 20;
        let faults = |is_ahead: bool| {
            // So large that it comes fresh from the kernel.
            let mut buffers = vec![Vec::with_capacity(LENGTH), vec![7u8; 3]];
            if is_ahead {
                map_ahead(&mut buffers);
            }
            let before = fault_count();
            buffers.iter_mut().for_each(|buffer: &mut Vec<u8>| {
                let length = buffer.capacity();
                buffer.resize(length, 1);
            });
            let count = fault_count() - before;
            assert!(buffers.iter().any(|buffer| buffer.starts_with(&[7, 7, 7])));
            count
        };
        let (without, with) = (faults(false), faults(true));
        // Huge pages make them fewer on both sides.
        assert!(without > 0 && with <= without / 2, "{with} faults instead of {without}");
    }
}
