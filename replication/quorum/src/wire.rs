//! The bytes of requests and answers: docs/format-messages.md. A frame around them has their length and
//! binds them to the pool and to the member.
//!
//! Invariants:
//! - Bytes that decode encode to the same bytes: each message has one form.
//! - The bytes of a batch are neither copied nor examined.
//! - A number that decodes is within the bounds for which the state machines do their sums.
//! - A decoder never panics, and takes no more memory than a few times its input.
#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::as_conversions)]

use crate::batch::Batch;
use crate::messages::{Answer, LEASE_NS_MAX, Lease, Proof, Request};
use block::units::{u16_at, u32_at, u64_at};
use block::{Epoch, Lsn, Position};
use bytes::{BufMut, Bytes, BytesMut};

/// Version of the format.
pub const MESSAGE_VERSION: u8 = 1;
/// Most batches in one message. Chosen by hand: more than fit into a few round trips of small batches.
pub const MESSAGE_BATCHES_MAX: usize = 4096;
/// Largest epoch, sequence and run. Chosen by hand: no pool lives to see it, and sums of two fit.
pub const NUMBER_MAX: u64 = 1 << 62;

const BATCH_HEAD_BYTES: usize = 24; // epoch, sequence, length, zero

const APPEND: u8 = 1;
const RESET: u8 = 2;
const PROMISE: u8 = 3;
const READ: u8 = 4;
const RESIGN: u8 = 5;
const APPENDED: u8 = 17;
const SUPERSEDED: u8 = 18;
const LACKING: u8 = 19;
const PROMISED: u8 = 20;
const BATCHES: u8 = 21;
const FULL: u8 = 22;

const IS_SYNC: u16 = 1;
const HAS_LEASE: u16 = 2;
const HAS_PROOF: u16 = 4;

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageError {
    /// They end before the message does.
    Short,
    /// They go on behind the message.
    Long,
    /// This version is not known.
    Version(u8),
    /// This kind is not known, or is none of a request or answer.
    Kind(u8),
    /// These flags have no meaning in this kind.
    Flags(u16),
    /// A number is out of its range, or a field that has no meaning is not zero.
    Range,
}

impl std::fmt::Display for MessageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            MessageError::Short => f.write_str("the message is cut off"),
            MessageError::Long => f.write_str("bytes follow the message"),
            MessageError::Version(version) => write!(f, "version {version} is not known"),
            MessageError::Kind(kind) => write!(f, "kind {kind} is not known here"),
            MessageError::Flags(flags) => write!(f, "flags {flags} are not known here"),
            MessageError::Range => f.write_str("a number is out of range"),
        }
    }
}

impl std::error::Error for MessageError {}

/// A message that is being written: its parts so far, and the bytes of the next one.
struct Writer {
    parts: Vec<Bytes>,
    bytes: BytesMut,
}

impl Writer {
    fn new(kind: u8, flags: u16, batch_count: usize, epoch: Epoch) -> Writer {
        let mut writer = Writer { parts: Vec::new(), bytes: BytesMut::with_capacity(120) };
        writer.bytes.put_u8(MESSAGE_VERSION);
        writer.bytes.put_u8(kind);
        writer.bytes.put_u16_le(flags);
        writer.bytes.put_u32_le(u32::try_from(batch_count).unwrap_or(u32::MAX));
        writer.number(epoch.0)
    }

    fn number(mut self, number: u64) -> Writer {
        self.bytes.put_u64_le(number);
        self
    }

    fn position(self, position: Position) -> Writer {
        self.number(position.epoch.0).number(position.sequence)
    }

    fn lease(self, lease: Option<Lease>) -> Writer {
        let Lease { sent, length } = lease.unwrap_or_default();
        self.number(sent).number(length)
    }

    fn batches(mut self, batches: &[Batch]) -> Writer {
        for batch in batches {
            self = self.position(batch.position);
            self.bytes.put_u32_le(u32::try_from(batch.bytes.len()).unwrap_or(u32::MAX));
            self.bytes.put_u32_le(0);
            self.parts.extend([self.bytes.split().freeze(), batch.bytes.clone()]);
        }
        self
    }

    fn finish(mut self) -> Vec<Bytes> {
        if !self.bytes.is_empty() {
            self.parts.push(self.bytes.freeze());
        }
        self.parts
    }
}

/// A message that is being read.
struct Reader<'a> {
    bytes: &'a Bytes,
    at: usize,
    kind: u8,
    flags: u16,
    batch_count: usize,
    epoch: Epoch,
}

impl<'a> Reader<'a> {
    fn new(bytes: &'a Bytes) -> Result<Reader<'a>, MessageError> {
        let [version, kind, ..] = bytes[..] else { return Err(MessageError::Short) };
        if version != MESSAGE_VERSION {
            return Err(MessageError::Version(version));
        }
        let flags = u16_at(bytes, 2).ok_or(MessageError::Short)?;
        let batch_count = u32_at(bytes, 4).ok_or(MessageError::Short)?;
        let batch_count = usize::try_from(batch_count).map_err(|_| MessageError::Range)?;
        let mut reader = Reader { bytes, at: 8, kind, flags, batch_count, epoch: Epoch(0) };
        reader.epoch = Epoch(reader.number()?);
        Ok(reader)
    }

    fn u64(&mut self) -> Result<u64, MessageError> {
        let number = u64_at(self.bytes, self.at).ok_or(MessageError::Short)?;
        self.at = self.at.saturating_add(8);
        Ok(number)
    }

    fn number(&mut self) -> Result<u64, MessageError> {
        self.u64().and_then(|number| match number <= NUMBER_MAX {
            true => Ok(number),
            false => Err(MessageError::Range),
        })
    }

    fn position(&mut self) -> Result<Position, MessageError> {
        Ok(Position { epoch: Epoch(self.number()?), sequence: self.number()? })
    }

    /// A value that the flag announces; without it, its bytes are zero.
    fn optional<T: Default + PartialEq>(
        &self,
        flag: u16,
        value: T,
    ) -> Result<Option<T>, MessageError> {
        match (self.flags & flag != 0, value == T::default()) {
            (true, _) => Ok(Some(value)),
            (false, true) => Ok(None),
            (false, false) => Err(MessageError::Range),
        }
    }

    fn lease(&mut self) -> Result<Option<Lease>, MessageError> {
        let lease = Lease { sent: self.u64()?, length: self.u64()? };
        if lease.length > LEASE_NS_MAX {
            return Err(MessageError::Range);
        }
        self.optional(HAS_LEASE, lease)
    }

    fn batches(&mut self) -> Result<Vec<Batch>, MessageError> {
        let left = self.bytes.len().saturating_sub(self.at);
        if self.batch_count > MESSAGE_BATCHES_MAX {
            return Err(MessageError::Range);
        }
        if self.batch_count.saturating_mul(BATCH_HEAD_BYTES) > left {
            return Err(MessageError::Short);
        }
        let mut batches = Vec::with_capacity(self.batch_count);
        for _ in 0..self.batch_count {
            let position = self.position()?;
            let length = u32_at(self.bytes, self.at).ok_or(MessageError::Short)?;
            let zero = u32_at(self.bytes, self.at.saturating_add(4)).ok_or(MessageError::Short)?;
            if length == 0 || zero != 0 {
                return Err(MessageError::Range);
            }
            let first = self.at.saturating_add(8);
            let length = usize::try_from(length).map_err(|_| MessageError::Range)?;
            self.at = first.checked_add(length).ok_or(MessageError::Short)?;
            if self.at > self.bytes.len() {
                return Err(MessageError::Short);
            }
            batches.push(Batch { position, bytes: self.bytes.slice(first..self.at) });
        }
        Ok(batches)
    }

    /// Verifies the end, the flags and that batches are announced only where there may be some.
    fn finish<T>(&self, message: T, flags: u16, has_batches: bool) -> Result<T, MessageError> {
        let unknown = self.flags & !flags;
        if unknown != 0 {
            return Err(MessageError::Flags(unknown));
        }
        if self.batch_count > 0 && !has_batches {
            return Err(MessageError::Range);
        }
        match self.at == self.bytes.len() {
            true => Ok(message),
            false => Err(MessageError::Long),
        }
    }
}

fn flag(flag: u16, is_set: bool) -> u16 {
    if is_set { flag } else { 0 }
}

impl Request {
    /// Returns the bytes of the request, in parts to send one after the other: the bytes of batches are
    /// not copied. The caller sends at most [`MESSAGE_BATCHES_MAX`] batches, of less than 4 GiB each.
    #[must_use]
    pub fn encode(&self) -> Vec<Bytes> {
        match self {
            Request::Append {
                epoch,
                previous,
                batches,
                proven_at,
                is_sync,
                lease,
                configuration,
                trim_lsn,
            } => {
                let flags = flag(IS_SYNC, *is_sync)
                    | flag(HAS_LEASE, lease.is_some())
                    | flag(HAS_PROOF, proven_at.is_some());
                let (run, proven) = proven_at.unwrap_or_default();
                Writer::new(APPEND, flags, batches.len(), *epoch)
                    .position(*previous)
                    .number(run)
                    .position(proven)
                    .lease(*lease)
                    .number(*configuration)
                    .number(trim_lsn.0)
                    .batches(batches)
            }
            Request::Reset { epoch, before } => Writer::new(RESET, 0, 0, *epoch).position(*before),
            Request::Promise { epoch } => Writer::new(PROMISE, 0, 0, *epoch),
            Request::Resign { epoch } => Writer::new(RESIGN, 0, 0, *epoch),
            Request::Read { epoch, after } => Writer::new(READ, 0, 0, *epoch).position(*after),
        }
        .finish()
    }

    /// Reads a request, which shares the memory of `bytes`.
    ///
    /// # Errors
    /// If the bytes are not exactly one request.
    pub fn decode(bytes: &Bytes) -> Result<Request, MessageError> {
        let mut reader = Reader::new(bytes)?;
        let epoch = reader.epoch;
        match reader.kind {
            APPEND => {
                let previous = reader.position()?;
                let proven = (reader.number()?, reader.position()?);
                let proven_at = reader.optional(HAS_PROOF, proven)?;
                let lease = reader.lease()?;
                let configuration = reader.number()?;
                let trim_lsn = Lsn(reader.number()?);
                let is_sync = reader.flags & IS_SYNC != 0;
                let batches = reader.batches()?;
                let request = Request::Append {
                    epoch,
                    previous,
                    batches,
                    proven_at,
                    is_sync,
                    lease,
                    configuration,
                    trim_lsn,
                };
                reader.finish(request, IS_SYNC | HAS_LEASE | HAS_PROOF, true)
            }
            RESET => {
                let before = reader.position()?;
                reader.finish(Request::Reset { epoch, before }, 0, false)
            }
            PROMISE => reader.finish(Request::Promise { epoch }, 0, false),
            RESIGN => reader.finish(Request::Resign { epoch }, 0, false),
            READ => {
                let after = reader.position()?;
                reader.finish(Request::Read { epoch, after }, 0, false)
            }
            kind => Err(MessageError::Kind(kind)),
        }
    }
}

impl Answer {
    /// Returns the bytes of the answer, in parts: see [`Request::encode`].
    #[must_use]
    pub fn encode(&self) -> Vec<Bytes> {
        match self {
            Answer::Appended { epoch, run, written, synced, lease } => {
                Writer::new(APPENDED, flag(HAS_LEASE, lease.is_some()), 0, *epoch)
                    .number(*run)
                    .number(*written)
                    .number(*synced)
                    .lease(*lease)
            }
            Answer::Full { epoch, run, written, lease } => {
                Writer::new(FULL, flag(HAS_LEASE, lease.is_some()), 0, *epoch)
                    .number(*run)
                    .number(*written)
                    .lease(*lease)
            }
            Answer::Superseded { epoch, promised } => {
                Writer::new(SUPERSEDED, 0, 0, *epoch).number(promised.0)
            }
            Answer::Lacking { epoch, run, sequence, may_match, start } => {
                Writer::new(LACKING, 0, 0, *epoch)
                    .number(*run)
                    .number(*sequence)
                    .position(*may_match)
                    .number(*start)
            }
            Answer::Promised { epoch, run, tail, proof } => {
                let proof = match proof {
                    Proof::Nothing => 1,
                    Proof::Synced => 2,
                    Proof::All => 3,
                };
                Writer::new(PROMISED, 0, 0, *epoch).number(*run).position(*tail).number(proof)
            }
            Answer::Batches { epoch, run, start, previous, batches } => {
                Writer::new(BATCHES, 0, batches.len(), *epoch)
                    .number(*run)
                    .number(*start)
                    .position(*previous)
                    .batches(batches)
            }
        }
        .finish()
    }

    /// Reads an answer, which shares the memory of `bytes`.
    ///
    /// # Errors
    /// If the bytes are not exactly one answer.
    pub fn decode(bytes: &Bytes) -> Result<Answer, MessageError> {
        let mut reader = Reader::new(bytes)?;
        let epoch = reader.epoch;
        match reader.kind {
            APPENDED => {
                let (run, written, synced) = (reader.number()?, reader.number()?, reader.number()?);
                let lease = reader.lease()?;
                let answer = Answer::Appended { epoch, run, written, synced, lease };
                reader.finish(answer, HAS_LEASE, false)
            }
            FULL => {
                let (run, written) = (reader.number()?, reader.number()?);
                let lease = reader.lease()?;
                reader.finish(Answer::Full { epoch, run, written, lease }, HAS_LEASE, false)
            }
            SUPERSEDED => {
                let promised = Epoch(reader.number()?);
                reader.finish(Answer::Superseded { epoch, promised }, 0, false)
            }
            LACKING => {
                let (run, sequence) = (reader.number()?, reader.number()?);
                let (may_match, start) = (reader.position()?, reader.number()?);
                let answer = Answer::Lacking { epoch, run, sequence, may_match, start };
                reader.finish(answer, 0, false)
            }
            PROMISED => {
                let (run, tail) = (reader.number()?, reader.position()?);
                let proof = match reader.number()? {
                    1 => Proof::Nothing,
                    2 => Proof::Synced,
                    3 => Proof::All,
                    _ => return Err(MessageError::Range),
                };
                reader.finish(Answer::Promised { epoch, run, tail, proof }, 0, false)
            }
            BATCHES => {
                let (run, start) = (reader.number()?, reader.number()?);
                let previous = reader.position()?;
                let batches = reader.batches()?;
                let answer = Answer::Batches { epoch, run, start, previous, batches };
                reader.finish(answer, 0, true)
            }
            kind => Err(MessageError::Kind(kind)),
        }
    }
}

#[cfg(test)]
#[allow(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    reason = "a test that panics fails"
)]
mod tests;
