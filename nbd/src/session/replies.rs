//! Encodes the replies to finished requests.
//!
//! Invariants:
//! - Each request gets either one simple reply, or chunks of which exactly the last is marked as
//!   such.
//! - A request in pieces is answered when its last piece has finished. One failed piece fails the
//!   request, and no contents are sent after a failure.
//! - A request that fails because the volume has another owner is not answered: the connection ends,
//!   so that the client repeats it there. A kernel device of this machine has no other server, and
//!   gets the error.

use super::{Finished, Outcome, Session, Ticket};
use crate::errno::{EIO, to_nbd_error};
use crate::memory::Reservation;
use crate::wire::{self, ChunkOf, Dialect, chunk, command};
use block::{AllocationExtent, BlockDevice, ErrorKind, Result};
use bytes::BufMut;

impl<D: BlockDevice> Session<D> {
    pub(super) fn finish(&mut self, finished: Finished) {
        let Finished { ticket, outcome, reservation } = finished;
        let is_fenced = matches!(&outcome, Err(error) if error.kind() == ErrorKind::Fenced);
        if is_fenced && self.siblings.is_none() {
            self.allotment.release(reservation);
            self.fenced_count += 1;
            return;
        }
        let outcome = outcome.map_err(|error| {
            let number = to_nbd_error(error.kind(), ticket.is_fast_zero);
            self.log_failure(ticket, &error);
            (number, error.to_string())
        });
        match ticket.split {
            Some(key) => self.finish_piece(key, ticket, outcome, reservation),
            None => match outcome {
                Ok(Outcome::Data { offset, bytes }) => {
                    self.push_data(ticket, offset, bytes, true, reservation);
                    self.answered += 1;
                }
                Ok(outcome) => {
                    self.allotment.release(reservation);
                    match outcome {
                        Outcome::Status(extents) => self.answer_status(ticket, &extents),
                        _ => self.answer_done(ticket),
                    }
                }
                Err((error, message)) => {
                    self.allotment.release(reservation);
                    self.answer_error(ticket, error, &message);
                }
            },
        }
    }

    fn finish_piece(
        &mut self,
        key: u64,
        ticket: Ticket,
        outcome: Result<Outcome, (u32, String)>,
        reservation: Reservation,
    ) {
        let split = self.splits.get_mut(&key).expect("lives until its last piece");
        split.running -= 1;
        let is_last = split.running == 0 && split.is_submitted;
        match outcome {
            // After a failed piece, a read sends no more contents: the error voids all of them.
            Ok(Outcome::Data { offset, bytes }) if split.failure.is_none() => {
                self.push_data(ticket, offset, bytes, is_last, reservation);
                if is_last {
                    self.splits.remove(&key);
                    self.answered += 1;
                }
                return;
            }
            Ok(_) => {}
            Err(failure) => {
                split.failure.get_or_insert(failure);
            }
        }
        self.allotment.release(reservation);
        if is_last {
            let split = self.splits.remove(&key).expect("seen above");
            match split.failure {
                Some((error, message)) => self.answer_error(ticket, error, &message),
                None => self.answer_done(ticket),
            }
        }
    }

    fn chunk_of(&self, ticket: Ticket) -> ChunkOf {
        let dialect = self.rules.terms.dialect;
        ChunkOf { dialect, cookie: ticket.cookie, offset: ticket.offset }
    }

    fn push_data(
        &mut self,
        ticket: Ticket,
        offset: u64,
        bytes: Vec<u8>,
        is_done: bool,
        reservation: Reservation,
    ) {
        let of = self.chunk_of(ticket);
        self.outbox.push_with(|out| match of.dialect {
            Dialect::Simple => wire::put_simple_reply(out, 0, of.cookie),
            Dialect::Structured | Dialect::Extended => {
                wire::put_chunk_header(out, of, is_done, chunk::OFFSET_DATA, bytes.len() + 8);
                out.put_u64(offset);
            }
        });
        self.outbox.push_payload(bytes, reservation);
    }

    pub(super) fn answer_done(&mut self, ticket: Ticket) {
        self.answered += 1;
        let of = self.chunk_of(ticket);
        // Only READ and BLOCK_STATUS require chunks (spec, "Structured replies").
        let is_chunk = match of.dialect {
            Dialect::Simple => false,
            Dialect::Structured => ticket.command == command::READ,
            Dialect::Extended => true,
        };
        self.outbox.push_with(|out| {
            if is_chunk {
                wire::put_chunk_header(out, of, true, chunk::NONE, 0);
            } else {
                wire::put_simple_reply(out, 0, of.cookie);
            }
        });
    }

    pub(super) fn answer_error(&mut self, ticket: Ticket, error: u32, message: &str) {
        self.answered += 1;
        self.failed += 1;
        let of = self.chunk_of(ticket);
        self.outbox.push_with(|out| match of.dialect {
            Dialect::Simple => wire::put_simple_reply(out, error, of.cookie),
            Dialect::Structured | Dialect::Extended => {
                wire::put_error_chunk(out, of, error, message);
            }
        });
    }

    fn answer_status(&mut self, ticket: Ticket, extents: &[AllocationExtent]) {
        let extents: Vec<(u64, u32)> = merged(extents);
        if extents.is_empty() {
            self.answer_error(ticket, EIO, "the device reported no extent");
            return;
        }
        self.answered += 1;
        let of = self.chunk_of(ticket);
        self.outbox.push_with(|out| wire::put_block_status(out, of, &extents));
    }

    fn log_failure(&mut self, ticket: Ticket, error: &block::Error) {
        let (command, offset) = (ticket.command, ticket.offset);
        match error.kind() {
            // The client caused the error and has received it.
            ErrorKind::Invalid | ErrorKind::Unsupported | ErrorKind::Denied => {}
            ErrorKind::Full
            | ErrorKind::NotFound
            | ErrorKind::Busy
            | ErrorKind::Fenced
            | ErrorKind::Unavailable
            | ErrorKind::Unreadable
            | ErrorKind::Corrupt
            | ErrorKind::Io => {
                self.failed_total += 1;
                // Every request on a broken volume fails, so only the 1st, 2nd, 4th, 8th… failure
                // is logged.
                if self.failed_total.is_power_of_two() {
                    let count = self.failed_total;
                    let (client, cause) = (&self.label, error.chain());
                    tracing::warn!(
                        client,
                        command,
                        offset,
                        count,
                        "could not carry out a request: {cause}"
                    );
                }
            }
        }
    }
}

/// Converts extents to (bytes, state) and merges neighbours of the same state (spec, "The `base:`
/// metadata namespace").
fn merged(extents: &[AllocationExtent]) -> Vec<(u64, u32)> {
    let mut merged: Vec<(u64, u32)> = Vec::with_capacity(extents.len());
    for extent in extents {
        let hole = if extent.is_hole { wire::STATE_HOLE } else { 0 };
        let state = hole | if extent.is_zero { wire::STATE_ZERO } else { 0 };
        match merged.last_mut() {
            Some((bytes, last)) if *last == state => *bytes += extent.length_bytes,
            _ => merged.push((extent.length_bytes, state)),
        }
    }
    merged
}
