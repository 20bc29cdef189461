//! Reusable memory for segments under construction. The kernel clears fresh memory page by page,
//! which costs as much as sealing the data that is put there.
//!
//! Invariants:
//! - At most `count_max` buffers are kept. Buffers that stay unused between two calls of
//!   [`Buffers::trim`] are returned to the system.

use block::buffers::Spare;
use bytes::Bytes;
use parking_lot::Mutex;
use std::sync::Arc;

/// The pool of buffers; see the module.
#[derive(Debug)]
pub(crate) struct Buffers {
    spare: Mutex<Spare>,
    count_max: usize,
}

/// A buffer that returns to the pool when its last reference is dropped.
struct Borrowed {
    bytes: Vec<u8>,
    home: Arc<Buffers>,
}

impl AsRef<[u8]> for Borrowed {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        let mut spare = self.home.spare.lock();
        if spare.count() < self.home.count_max {
            spare.push(std::mem::take(&mut self.bytes));
        }
    }
}

impl Buffers {
    pub(crate) fn new(count_max: usize) -> Arc<Buffers> {
        Arc::new(Buffers { spare: Mutex::default(), count_max })
    }

    /// Returns an empty buffer with room for `room` bytes.
    pub(crate) fn take(&self, room: usize) -> Vec<u8> {
        let found = self.spare.lock().pop();
        match found {
            Some(mut buffer) if buffer.capacity() >= room => {
                buffer.clear();
                buffer
            }
            _ => Vec::with_capacity(room),
        }
    }

    /// Shares the contents of a buffer. The buffer is reused afterwards.
    pub(crate) fn share(self: &Arc<Self>, bytes: Vec<u8>) -> Bytes {
        Bytes::from_owner(Borrowed { bytes, home: self.clone() })
    }

    /// Frees the buffers that were not needed since the last call. Call it every few seconds.
    pub(crate) fn trim(&self) {
        let dropped = self.spare.lock().trim();
        drop(dropped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_is_reused_and_freed_when_idle() {
        let buffers = Buffers::new(2);
        let mut first = buffers.take(1000);
        first.extend_from_slice(b"segment");
        let address = first.as_ptr();
        let shared = buffers.share(first);
        let part = shared.slice(2..4);
        drop(shared);
        assert_eq!(buffers.spare.lock().count(), 0, "a part is still out");
        assert_eq!(&part[..], b"gm");
        drop(part);
        let again = buffers.take(800);
        assert_eq!((again.as_ptr(), again.len()), (address, 0));
        let other = buffers.take(1);
        assert!(other.as_ptr() != address);
        let larger = buffers.share(again);
        drop(larger);
        assert!(buffers.take(5000).capacity() >= 5000, "one that is too small is not used");
        for _ in 0..3 {
            let three: Vec<Bytes> = (0..3).map(|_| buffers.share(buffers.take(10))).collect();
            drop(three);
            assert_eq!(buffers.spare.lock().count(), 2, "no more than asked for");
            buffers.trim();
            assert_eq!(buffers.spare.lock().count(), 2, "they were in use");
        }
        buffers.trim();
        assert_eq!(buffers.spare.lock().count(), 0, "they were not");
    }
}
