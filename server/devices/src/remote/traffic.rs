//! Follows the requests and simple replies that pass through a relay, and tells how many requests
//! wait for their reply.
//!
//! Invariants:
//! - Bytes of a server are untrusted input: nothing panics, and memory is bounded by the requests in
//!   flight.
//! - It changes no byte. Bytes that it does not understand end the connection.

use nbd::wire::{REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, command};
use std::collections::HashMap;

/// Most requests in flight. Source: the kernel's queue of one connection has 128.
const UNANSWERED_COUNT_MAX: usize = 1024;
/// Source: spec, "Request message".
const REQUEST_BYTES: usize = 28;
/// Source: spec, "Simple reply message".
const REPLY_BYTES: usize = 16;

/// The requests in flight of one connection.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    /// Bytes of data in the reply of each request without an answer.
    unanswered: HashMap<u64, u64>,
    requests: Cut<REQUEST_BYTES>,
    replies: Cut<REPLY_BYTES>,
    /// Replies, and parts of replies, that have arrived.
    progress: u64,
}

/// Bytes that make no sense in their place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Senseless;

/// Cuts a stream into headers and the data that follows each.
#[derive(Debug)]
struct Cut<const HEADER_BYTES: usize> {
    header: [u8; HEADER_BYTES],
    header_bytes: usize,
    /// Data that is still to come.
    data_bytes: u64,
}

impl<const HEADER_BYTES: usize> Default for Cut<HEADER_BYTES> {
    fn default() -> Self {
        Cut { header: [0; HEADER_BYTES], header_bytes: 0, data_bytes: 0 }
    }
}

impl<const HEADER_BYTES: usize> Cut<HEADER_BYTES> {
    /// Takes bytes up to the end of the next header, which it returns once it is complete, and
    /// removes them from `bytes`.
    fn next(&mut self, bytes: &mut &[u8]) -> Option<[u8; HEADER_BYTES]> {
        let skipped = usize::try_from(self.data_bytes).unwrap_or(usize::MAX).min(bytes.len());
        self.data_bytes = self.data_bytes.saturating_sub(skipped as u64);
        *bytes = bytes.get(skipped..).unwrap_or_default();
        let wanted = HEADER_BYTES.saturating_sub(self.header_bytes).min(bytes.len());
        let (taken, rest) = bytes.split_at_checked(wanted)?;
        let end = self.header_bytes.saturating_add(wanted);
        self.header.get_mut(self.header_bytes..end)?.copy_from_slice(taken);
        self.header_bytes = end;
        *bytes = rest;
        if self.header_bytes < HEADER_BYTES {
            return None;
        }
        self.header_bytes = 0;
        Some(self.header)
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |field| u16::from_be_bytes(*field))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |field| u32::from_be_bytes(*field))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |field| u64::from_be_bytes(*field))
}

impl Traffic {
    /// Follows bytes of the kernel.
    ///
    /// # Errors
    /// [`Senseless`] for anything but requests.
    pub fn sent(&mut self, mut bytes: &[u8]) -> Result<(), Senseless> {
        while let Some(header) = self.requests.next(&mut bytes) {
            if u32_at(&header, 0) != REQUEST_MAGIC {
                return Err(Senseless);
            }
            let (kind, cookie) = (u16_at(&header, 6), u64_at(&header, 8));
            let length = u64::from(u32_at(&header, 24));
            if kind == command::WRITE {
                self.requests.data_bytes = length;
            }
            if kind != command::DISC {
                self.unanswered.insert(cookie, if kind == command::READ { length } else { 0 });
            }
            if self.unanswered.len() > UNANSWERED_COUNT_MAX {
                return Err(Senseless);
            }
        }
        Ok(())
    }

    /// Follows bytes of the server.
    ///
    /// # Errors
    /// [`Senseless`] for anything but one simple reply to each request.
    pub fn received(&mut self, mut bytes: &[u8]) -> Result<(), Senseless> {
        self.progress = self.progress.wrapping_add(u64::from(!bytes.is_empty()));
        while let Some(header) = self.replies.next(&mut bytes) {
            if u32_at(&header, 0) != SIMPLE_REPLY_MAGIC {
                return Err(Senseless);
            }
            let data_bytes = self.unanswered.remove(&u64_at(&header, 8)).ok_or(Senseless)?;
            if u32_at(&header, 4) == 0 {
                self.replies.data_bytes = data_bytes;
            }
        }
        Ok(())
    }

    /// Tells whether the server owes something: a reply, or the rest of one.
    pub fn is_awaited(&self) -> bool {
        !self.unanswered.is_empty() || self.replies.data_bytes > 0
    }

    /// A number that changes whenever something arrives.
    pub fn progress(&self) -> u64 {
        self.progress
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(kind: u16, cookie: u64, length: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
        bytes.extend([0, 0]);
        bytes.extend(kind.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(7u64.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes.extend(data);
        bytes
    }

    fn reply(error: u32, cookie: u64, data: &[u8]) -> Vec<u8> {
        let mut bytes = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
        bytes.extend(error.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(data);
        bytes
    }

    #[test]
    fn requests_wait_until_the_last_byte_of_their_reply() {
        // The data of a write looks like a request, and that of a read like a reply.
        let inner = request(command::READ, 99, 5, &[]);
        let length = u32::try_from(inner.len()).unwrap();
        let sent = [
            request(command::WRITE, 1, length, &inner),
            request(command::READ, 2, 16, &[]),
            request(command::FLUSH, 3, 0, &[]),
            request(command::READ, 4, 9, &[]),
            request(command::DISC, 5, 0, &[]),
        ]
        .concat();
        let received =
            [reply(0, 3, &[]), reply(5, 4, &[]), reply(0, 1, &[]), reply(0, 2, &reply(0, 7, &[]))];
        let received = received.concat();
        for step in 1..sent.len() {
            let mut traffic = Traffic::default();
            assert!(!traffic.is_awaited());
            for part in sent.chunks(step) {
                traffic.sent(part).unwrap();
            }
            let mut left = received.len();
            for part in received.chunks(step) {
                assert!(traffic.is_awaited(), "{left} bytes are missing");
                let before = traffic.progress();
                traffic.received(part).unwrap();
                assert_ne!(traffic.progress(), before);
                left -= part.len();
            }
            assert!(!traffic.is_awaited());
        }
    }

    #[test]
    fn bytes_that_make_no_sense_are_noticed() {
        let mut traffic = Traffic::default();
        assert_eq!(traffic.sent(&[0; REQUEST_BYTES]), Err(Senseless));
        let mut traffic = Traffic::default();
        assert_eq!(traffic.received(&[0; REPLY_BYTES]), Err(Senseless));
        let mut traffic = Traffic::default();
        traffic.sent(&request(command::FLUSH, 1, 0, &[])).unwrap();
        assert_eq!(traffic.received(&reply(0, 2, &[])), Err(Senseless), "nothing asked for it");
        let mut traffic = Traffic::default();
        traffic.sent(&request(command::FLUSH, 1, 0, &[])).unwrap();
        let twice = [reply(0, 1, &[]), reply(0, 1, &[])].concat();
        assert_eq!(traffic.received(&twice), Err(Senseless), "one reply is enough");
        let mut traffic = Traffic::default();
        let many: Vec<u8> =
            (0..2000).flat_map(|cookie| request(command::FLUSH, cookie, 0, &[])).collect();
        assert_eq!(traffic.sent(&many), Err(Senseless));
    }
}
