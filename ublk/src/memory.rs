//! Memory for the payloads of requests: a part that each queue has of its own, and one that all share.
//!
//! Invariants:
//! - A queue can always serve a write and a read of the largest size at a time, whatever other queues do
//!   and whatever its own requests of the other kind wait for.
//! - All queues together hold no more than what was given, except that what was borrowed before a queue
//!   came may be more than what is left without its part, until it is given back.
//! - Nothing here waits: who finds no room is woken by what its own queue gives back.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// What all queues of all devices share.
#[derive(Debug)]
pub struct Memory {
    /// Bytes that are neither borrowed nor a queue's own; below 0 for as long as those who borrowed before
    /// have more than was left.
    free: AtomicI64,
}

/// What a queue takes for itself: requests of each kind have room for the largest one.
#[must_use]
pub const fn own_bytes(io_bytes_max: u32) -> u64 {
    2 * io_bytes_max as u64
}

impl Memory {
    /// `bytes` for all queues.
    #[must_use]
    pub fn new(bytes: u64) -> Arc<Memory> {
        Arc::new(Memory { free: AtomicI64::new(signed(bytes)) })
    }

    /// Whether so much was to be had; to be given back then.
    pub(crate) fn borrow(&self, bytes: u64) -> bool {
        let bytes = signed(bytes);
        let take = |free: i64| (free >= bytes).then(|| free - bytes);
        self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }

    pub(crate) fn give_back(&self, bytes: u64) {
        self.free.fetch_add(signed(bytes), Ordering::Relaxed);
    }
}

/// What a queue has of its own, until it is dropped.
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
    fn what_queues_have_of_their_own_is_not_borrowed_by_others() {
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
