//! Decides on one request: a header and the terms of the connection in, work or an error out.
//!
//! Invariants:
//! - Pure. The resulting work lies inside the export and within the payload limit.
//! - The order of the checks is fixed: command, flags, permission, range, size.

use crate::errno::{EINVAL, ENOSPC, EPERM};
use crate::handshake::Terms;
use crate::wire::{Dialect, RequestHeader, command, command_flag};
use block::{Limits, WriteFlags, ZeroFlags};

/// A request that may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Answer with success at once: the request has length 0.
    Nothing,
    /// Read a range.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes to read, at most the payload limit.
        length: u32,
        /// Reply in one content chunk: the client asked for it, or cannot take several.
        is_complete: bool,
    },
    /// Write the payload that follows.
    Write {
        /// First byte.
        offset: u64,
        /// Bytes of payload, at most the payload limit.
        length: u32,
        /// Modifiers.
        flags: WriteFlags,
    },
    /// Make all answered writes durable.
    Flush,
    /// Discard contents.
    Discard {
        /// First byte.
        offset: u64,
        /// Length of the range in bytes.
        length: u64,
        /// Make it durable before the answer.
        fua: bool,
    },
    /// Zero a range.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Length of the range in bytes.
        length: u64,
        /// Modifiers.
        flags: ZeroFlags,
    },
    /// Prefetch.
    Prefetch {
        /// First byte.
        offset: u64,
        /// Length of the range in bytes.
        length: u64,
    },
    /// Query the allocation.
    BlockStatus {
        /// First byte.
        offset: u64,
        /// Length of the range in bytes.
        length: u64,
        /// The client wants exactly one extent.
        is_one: bool,
    },
    /// The query of an extended BLOCK_STATUS follows as a payload of `payload_bytes`.
    BlockStatusQuery {
        /// First byte.
        offset: u64,
        /// Bytes of payload: one length and some context ids.
        payload_bytes: u32,
        /// The client wants exactly one extent.
        is_one: bool,
    },
    /// Change the size of the volume.
    Resize {
        /// New size in bytes.
        size_bytes: u64,
    },
    /// Accept no more requests, and send no reply.
    Disconnect,
}

/// The decision on the header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Run this work.
    Run(Work),
    /// Drop the `payload_bytes` that follow, then answer `error`.
    Refuse {
        /// Value of [`crate::wire`]'s error field.
        error: u32,
        /// Bytes to read and drop.
        payload_bytes: u64,
    },
}

/// Largest payload of an extended BLOCK_STATUS: a length and 1024 context ids. Chosen by hand: only
/// one context exists.
pub const QUERY_BYTES_MAX: u32 = 8 + 4 * 1024;

/// The rules of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// The negotiated terms.
    pub terms: Terms,
    /// RESIZE was offered.
    pub can_resize: bool,
    /// Largest payload, already limited to the maximum of the server.
    pub payload_bytes_max: u32,
}

impl Rules {
    /// Returns the number of payload bytes after the header, whether or not the command is valid.
    /// In the extended form a flag decides; in the compact form only WRITE has a payload (spec,
    /// "Extended request message").
    fn payload_bytes(&self, header: &RequestHeader) -> u64 {
        let has_payload = match self.terms.dialect {
            Dialect::Extended => header.flags & command_flag::PAYLOAD_LEN != 0,
            Dialect::Simple | Dialect::Structured => header.command == command::WRITE,
        };
        if has_payload { header.length } else { 0 }
    }

    /// Decides on a request. `limits` are the current limits of the device.
    #[must_use]
    pub fn judge(&self, header: &RequestHeader, limits: &Limits) -> Verdict {
        match self.check(header, limits) {
            Ok(work) => Verdict::Run(work),
            Err(error) => Verdict::Refuse { error, payload_bytes: self.payload_bytes(header) },
        }
    }

    fn check(&self, header: &RequestHeader, limits: &Limits) -> Result<Work, u32> {
        let RequestHeader { flags, command, offset, length, .. } = *header;
        self.check_flags(header)?;
        let changes = matches!(
            command,
            command::WRITE | command::TRIM | command::WRITE_ZEROES | command::RESIZE
        );
        if changes && limits.is_read_only {
            return Err(EPERM);
        }
        let fua = flags & command_flag::FUA != 0;
        let inside = |past_the_end: u32| {
            let end = offset.checked_add(length).ok_or(past_the_end)?;
            if end > limits.size_bytes { Err(past_the_end) } else { Ok(()) }
        };
        let payload = || match u32::try_from(length) {
            Ok(length) if length <= self.payload_bytes_max => Ok(length),
            _ => Err(EINVAL),
        };
        match command {
            command::READ => {
                inside(EINVAL)?;
                let is_complete =
                    self.terms.dialect == Dialect::Simple || flags & command_flag::DF != 0;
                match payload()? {
                    0 => Ok(Work::Nothing),
                    length => Ok(Work::Read { offset, length, is_complete }),
                }
            }
            command::WRITE => {
                inside(ENOSPC)?;
                match payload()? {
                    0 => Ok(Work::Nothing),
                    length => Ok(Work::Write { offset, length, flags: WriteFlags { fua } }),
                }
            }
            command::DISC => Ok(Work::Disconnect),
            // Both fields are reserved and must be zero (spec, "NBD_CMD_FLUSH").
            command::FLUSH if offset != 0 || length != 0 => Err(EINVAL),
            command::FLUSH => Ok(Work::Flush),
            command::TRIM => {
                inside(EINVAL)?;
                Ok(if length == 0 { Work::Nothing } else { Work::Discard { offset, length, fua } })
            }
            command::WRITE_ZEROES => {
                inside(ENOSPC)?;
                let flags = ZeroFlags {
                    fua,
                    no_hole: flags & command_flag::NO_HOLE != 0,
                    fast_only: flags & command_flag::FAST_ZERO != 0,
                };
                let zeroes = Work::WriteZeroes { offset, length, flags };
                Ok(if length == 0 { Work::Nothing } else { zeroes })
            }
            command::CACHE => {
                inside(EINVAL)?;
                Ok(if length == 0 { Work::Nothing } else { Work::Prefetch { offset, length } })
            }
            command::BLOCK_STATUS => self.check_block_status(header, limits),
            command::RESIZE if self.can_resize && length == 0 => {
                Ok(Work::Resize { size_bytes: offset })
            }
            _ => Err(EINVAL),
        }
    }

    fn check_block_status(&self, header: &RequestHeader, limits: &Limits) -> Result<Work, u32> {
        let is_one = header.flags & command_flag::REQ_ONE != 0;
        let offset = header.offset;
        if !self.terms.has_allocation {
            return Err(EINVAL);
        }
        if header.flags & command_flag::PAYLOAD_LEN != 0 {
            return match u32::try_from(header.length) {
                Ok(payload_bytes) if (8..=QUERY_BYTES_MAX).contains(&payload_bytes) => {
                    Ok(Work::BlockStatusQuery { offset, payload_bytes, is_one })
                }
                _ => Err(EINVAL),
            };
        }
        check_status_range(offset, header.length, limits)?;
        Ok(Work::BlockStatus { offset, length: header.length, is_one })
    }

    /// Rejects flags that are not documented for the command with EINVAL (spec, "Command flags").
    /// FUA is accepted on every command, as the specification demands where it is advertised.
    fn check_flags(&self, header: &RequestHeader) -> Result<(), u32> {
        use command_flag::*;
        let RequestHeader { command, flags, length, .. } = *header;
        let is_extended = self.terms.dialect == Dialect::Extended;
        let allowed = FUA
            | match command {
                command::READ if self.terms.dialect != Dialect::Simple => DF,
                command::WRITE if is_extended => PAYLOAD_LEN,
                command::WRITE_ZEROES => NO_HOLE | FAST_ZERO,
                command::BLOCK_STATUS if is_extended => REQ_ONE | PAYLOAD_LEN,
                command::BLOCK_STATUS => REQ_ONE,
                _ => 0,
            };
        // An extended write without the flag carries no payload, so there is nothing to write.
        let lacks_payload =
            is_extended && command == command::WRITE && flags & PAYLOAD_LEN == 0 && length > 0;
        if flags & !allowed != 0 || lacks_payload { Err(EINVAL) } else { Ok(()) }
    }
}

fn check_status_range(offset: u64, length: u64, limits: &Limits) -> Result<(), u32> {
    match offset.checked_add(length) {
        Some(end) if end <= limits.size_bytes && length > 0 => Ok(()),
        _ => Err(EINVAL),
    }
}

/// Decides on the payload of an extended BLOCK_STATUS: the length of the range and the contexts. No
/// context, or one that was not negotiated, is EINVAL. Spec, "NBD_CMD_BLOCK_STATUS".
///
/// # Errors
/// Returns the NBD error to answer.
pub fn judge_status_query(
    payload: &[u8],
    offset: u64,
    is_one: bool,
    limits: &Limits,
) -> Result<Work, u32> {
    let (length, ids) = payload.split_first_chunk::<8>().ok_or(EINVAL)?;
    let length = u64::from_be_bytes(*length);
    let (ids, rest) = ids.as_chunks::<4>();
    let is_known = |id: &[u8; 4]| u32::from_be_bytes(*id) == crate::wire::BASE_ALLOCATION_ID;
    if !rest.is_empty() || ids.len() != 1 || !ids.iter().all(is_known) {
        return Err(EINVAL);
    }
    check_status_range(offset, length, limits)?;
    Ok(Work::BlockStatus { offset, length, is_one })
}

#[cfg(test)]
mod tests;
