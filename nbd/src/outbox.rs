//! Replies ready to send, gathered so that one system call sends many.
//!
//! Invariants:
//! - Bytes leave in the order in which they were pushed.
//! - The reservation of a payload is held until its last byte has been handed to the socket. Bytes
//!   without a reservation are counted, so that the session can bound them.

use crate::memory::{Allotment, Reservation};
use std::collections::VecDeque;
use std::io::IoSlice;

/// Payloads up to this size are copied after their header; larger ones are sent from their own
/// buffer. Chosen by hand: copying 4 KiB costs about as much as one more entry of a writev.
const COPY_BYTES_MAX: usize = 16 << 10;
/// A gathering segment is closed at this size. Chosen by hand: 16 copied replies of 4 KiB.
const GATHER_BYTES_MAX: usize = 64 << 10;
/// Parts of one writev. Source: `IOV_MAX` is 1024; more than 16 large parts fill any socket.
const PARTS_MAX: usize = 16;

#[derive(Default)]
struct Segment {
    bytes: Vec<u8>,
    reservation: Reservation,
    /// The part of `bytes` that no reservation covers.
    unreserved_bytes: usize,
    is_gathering: bool,
}

/// Outgoing bytes of one connection.
#[derive(Default)]
pub struct Outbox {
    segments: VecDeque<Segment>,
    /// Bytes of the first segment that have been sent.
    sent_bytes: usize,
    unsent_bytes: usize,
    unreserved_bytes: usize,
    /// An empty gathering buffer, kept for its capacity.
    spare: Vec<u8>,
}

impl Outbox {
    /// Returns the number of bytes that wait to be sent.
    pub fn unsent_bytes(&self) -> usize {
        self.unsent_bytes
    }

    /// Returns the bytes in memory that no reservation covers: headers, messages, extents.
    pub fn unreserved_bytes(&self) -> usize {
        self.unreserved_bytes
    }

    /// Whether nothing waits to be sent.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Adds the bytes that `encode` appends, such as headers and small replies.
    pub fn push_with(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        let segment = self.gathering();
        let before = segment.bytes.len();
        encode(&mut segment.bytes);
        let added_bytes = segment.bytes.len() - before;
        segment.unreserved_bytes += added_bytes;
        self.unreserved_bytes += added_bytes;
        self.unsent_bytes += added_bytes;
    }

    /// Adds a payload after the bytes pushed last. `reservation` covers it.
    pub fn push_payload(&mut self, payload: Vec<u8>, reservation: Reservation) {
        self.unsent_bytes += payload.len();
        if payload.len() <= COPY_BYTES_MAX {
            let segment = self.gathering();
            segment.bytes.extend_from_slice(&payload);
            segment.reservation.merge(reservation);
            return;
        }
        self.segments.push_back(Segment { bytes: payload, reservation, ..Segment::default() });
    }

    fn gathering(&mut self) -> &mut Segment {
        let has_room = self
            .segments
            .back()
            .is_some_and(|last| last.is_gathering && last.bytes.len() < GATHER_BYTES_MAX);
        if !has_room {
            let bytes = std::mem::take(&mut self.spare);
            self.segments.push_back(Segment { bytes, is_gathering: true, ..Segment::default() });
        }
        self.segments.back_mut().expect("pushed above")
    }

    /// Fills `parts` with the unsent bytes in order, as far as they fit, and returns the number of
    /// parts.
    pub fn parts<'a>(&'a self, parts: &mut [IoSlice<'a>; PARTS_MAX]) -> usize {
        let mut skip = self.sent_bytes;
        let mut count = 0;
        for (part, segment) in parts.iter_mut().zip(&self.segments) {
            *part = IoSlice::new(&segment.bytes[skip..]);
            skip = 0;
            count += 1;
        }
        count
    }

    /// Returns an empty array for [`Outbox::parts`].
    pub fn no_parts<'a>() -> [IoSlice<'a>; PARTS_MAX] {
        [IoSlice::new(&[]); PARTS_MAX]
    }

    /// Records that the socket has taken `bytes` more.
    pub fn advance(&mut self, bytes: usize, allotment: &mut Allotment) {
        self.unsent_bytes -= bytes;
        self.sent_bytes += bytes;
        while let Some(first) = self.segments.front() {
            if self.sent_bytes < first.bytes.len() {
                return;
            }
            self.sent_bytes -= first.bytes.len();
            let mut segment = self.segments.pop_front().expect("seen above");
            self.unreserved_bytes -= segment.unreserved_bytes;
            allotment.release(std::mem::take(&mut segment.reservation));
            if segment.is_gathering && segment.bytes.capacity() <= 2 * GATHER_BYTES_MAX {
                segment.bytes.clear();
                self.spare = segment.bytes;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::PayloadMemory;
    use std::sync::Arc;

    #[test]
    fn bytes_leave_in_order_despite_partial_writes() {
        let mut allotment = Allotment::new(Arc::new(PayloadMemory::new(64 << 20, 4)));
        for step in [61, 4096, 100_000, usize::MAX] {
            let mut outbox = Outbox::default();
            let (mut expected, mut sent) = (Vec::new(), Vec::new());
            for (index, size) in
                [0usize, 5, 40_000, 4096, 16_384, 16_385, 70_000].iter().enumerate()
            {
                let header = [index as u8; 16];
                outbox.push_with(|out| out.extend_from_slice(&header));
                let payload: Vec<u8> = (0..*size).map(|at| (at * 31 + index) as u8).collect();
                expected.extend_from_slice(&header);
                expected.extend_from_slice(&payload);
                outbox.push_payload(payload, Reservation::default());
            }
            while !outbox.is_empty() {
                let mut parts = Outbox::no_parts();
                let count = outbox.parts(&mut parts);
                let offered = parts[..count].iter().flat_map(|part| part.iter().copied());
                let before = sent.len();
                sent.extend(offered.take(step));
                outbox.advance(sent.len() - before, &mut allotment);
            }
            assert_eq!((outbox.unsent_bytes(), outbox.unreserved_bytes()), (0, 0));
            assert!(sent == expected, "step {step}");
        }
    }
}
