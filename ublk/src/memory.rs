//! Memory for the payloads of requests: each queue owns a part, and all queues share the rest.
//!
//! Invariants:
//! - A queue can always serve one write and one read of the largest size at a time, independent of
//!   other queues, and of waiting requests of the other kind.
//! - All queues together hold at most the given memory, with one exception. Memory lent before a
//!   new queue takes its own part may exceed the rest until it is returned.
//! - No call waits. A request that finds no room is woken by the next return to its own queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// Payload memory of all queues of all devices.
#[derive(Debug)]
pub struct Memory {
    /// Bytes that are neither lent nor owned by a queue. Below 0 while earlier borrowers hold more
    /// than the rest.
    free: AtomicI64,
}

/// Returns the memory that a queue owns: room for one largest request of each kind.
#[must_use]
pub const fn own_bytes(io_bytes_max: u32) -> u64 {
    2 * io_bytes_max as u64
}

impl Memory {
    /// Creates `bytes` of memory for all queues.
    #[must_use]
    pub fn new(bytes: u64) -> Arc<Memory> {
        Arc::new(Memory { free: AtomicI64::new(signed(bytes)) })
    }

    /// Borrows `bytes`, if they are free. The caller must return them.
    pub(crate) fn borrow(&self, bytes: u64) -> bool {
        let bytes = signed(bytes);
        let take = |free: i64| (free >= bytes).then(|| free - bytes);
        self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }

    pub(crate) fn give_back(&self, bytes: u64) {
        self.free.fetch_add(signed(bytes), Ordering::Relaxed);
    }
}

/// The memory that a queue owns; dropping it returns the memory.
#[derive(Debug)]
pub(crate) struct Own {
    memory: Arc<Memory>,
    bytes: u64,
}

impl Own {
    pub(crate) fn of(memory: &Arc<Memory>, io_bytes_max: u32) -> Own {
        let bytes = own_bytes(io_bytes_max);
        memory.free.fetch_sub(signed(bytes), Ordering::Relaxed);
        Own { memory: memory.clone(), bytes }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.memory.give_back(self.bytes);
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_queue_memory_is_not_borrowed_by_others() {
        let memory = Memory::new(100);
        let first = Own::of(&memory, 20);
        assert!(memory.borrow(60) && !memory.borrow(1));
        let second = Own::of(&memory, 20);
        memory.give_back(40);
        assert!(!memory.borrow(1), "what the second has of its own was borrowed when it came");
        memory.give_back(20);
        assert!(memory.borrow(20) && !memory.borrow(1));
        drop((first, second));
        assert!(memory.borrow(80) && !memory.borrow(1));
    }

    #[test]
    fn a_size_that_no_memory_has_is_refused() {
        let memory = Memory::new(u64::MAX);
        assert!(memory.borrow(1 << 40));
        assert!(!memory.borrow(u64::MAX));
    }
}
