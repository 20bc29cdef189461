//! Memory for segments under construction, used again: memory that is fresh from the kernel is
//! cleared page by page first, which costs as much as sealing what is put there.
//!
//! Invariants:
//! - At most `count_max` buffers wait; what nobody used between two calls of [`Buffers::trim`] goes
//!   back to the system.

use block::buffers::Spare;
use bytes::Bytes;
use parking_lot::Mutex;
use std::sync::Arc;

/// See the module.
#[derive(Debug)]
pub(crate) struct Buffers {
    spare: Mutex<Spare>,
    count_max: usize,
}

/// A buffer that comes home when the last reference to it is gone.
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

    /// An empty buffer with room for `room` bytes.
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

    /// Shares what was built in a buffer; the buffer is used again afterwards.
    pub(crate) fn share(self: &Arc<Self>, bytes: Vec<u8>) -> Bytes {
        Bytes::from_owner(Borrowed { bytes, home: self.clone() })
    }

    /// Gives back what was of no use since the last call. To be called every few seconds.
    pub(crate) fn trim(&self) {
        let dropped = self.spare.lock().trim();
        drop(dropped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_comes_home_is_used_again_and_goes_when_idle() {
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
