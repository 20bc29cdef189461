//! The two messages of the service `probe`: a request with bytes that only fill it, and its reply.
//! docs/format-peer.md has their tables.
//!
//! Invariants:
//! - A message has one form, but for the bytes that fill a request, which are not examined.
//! - Decoding trusts nothing: a stranger's bytes are a message or an error.

#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use block::units::{array_at, u32_at};
use std::fmt;

/// Kind of the frame of a request.
pub const REQUEST: u8 = 1;
/// Kind of the frame of a reply.
pub const REPLY: u8 = 2;
/// Bytes of a request before those that fill it.
pub const REQUEST_HEAD_BYTES: usize = 8;
/// Bytes of a reply.
pub const REPLY_BYTES: usize = 16;
/// Most bytes that fill a request. Chosen by hand: two records of TLS, so that a slow network answers
/// several within the time of a probe.
pub const FILL_BYTES_MAX: u32 = 32 << 10;
/// Version of both messages.
const VERSION: u8 = 1;

/// The head of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Bytes that follow, without a meaning.
    pub fill_bytes: u32,
}

/// The reply to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Bytes that have filled the requests of this connection so far.
    pub received_bytes: u64,
}

/// Why a message is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageError {
    /// It is too short, or bytes that must be zero are not.
    Form,
    /// It is of this version, which this program does not know.
    Version(u8),
    /// Its length is not what it says, or more than a request may have.
    Length,
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MessageError::Form => write!(f, "the bytes are no message of a probe"),
            MessageError::Version(version) => {
                write!(f, "the message of a probe has version {version}, and not {VERSION}")
            }
            MessageError::Length => write!(f, "the length of a probe's message is wrong"),
        }
    }
}

impl std::error::Error for MessageError {}

fn check_version(payload: &[u8]) -> Result<(), MessageError> {
    match *payload {
        [VERSION, 0, 0, 0, ..] => Ok(()),
        [VERSION, ..] | [] => Err(MessageError::Form),
        [version, ..] => Err(MessageError::Version(version)),
    }
}

impl Request {
    /// Encodes the head.
    #[must_use]
    pub fn encode(&self) -> [u8; REQUEST_HEAD_BYTES] {
        let [a, b, c, d] = self.fill_bytes.to_le_bytes();
        [VERSION, 0, 0, 0, a, b, c, d]
    }

    /// Decodes the payload of a frame.
    ///
    /// # Errors
    /// Those of [`MessageError`].
    pub fn decode(payload: &[u8]) -> Result<Request, MessageError> {
        check_version(payload)?;
        let fill_bytes = u32_at(payload, 4).ok_or(MessageError::Form)?;
        let filled = payload.len().checked_sub(REQUEST_HEAD_BYTES).ok_or(MessageError::Form)?;
        match u32::try_from(filled) {
            Ok(length) if length == fill_bytes && length <= FILL_BYTES_MAX => {
                Ok(Request { fill_bytes })
            }
            _ => Err(MessageError::Length),
        }
    }
}

impl Reply {
    /// Encodes the reply.
    #[must_use]
    pub fn encode(&self) -> [u8; REPLY_BYTES] {
        let [a, b, c, d, e, f, g, h] = self.received_bytes.to_le_bytes();
        [VERSION, 0, 0, 0, 0, 0, 0, 0, a, b, c, d, e, f, g, h]
    }

    /// Decodes the payload of a frame.
    ///
    /// # Errors
    /// Those of [`MessageError`].
    pub fn decode(payload: &[u8]) -> Result<Reply, MessageError> {
        check_version(payload)?;
        if payload.len() != REPLY_BYTES {
            return Err(MessageError::Length);
        }
        if array_at(payload, 4) != Some([0; 4]) {
            return Err(MessageError::Form);
        }
        let received_bytes = array_at(payload, 8).map(u64::from_le_bytes);
        received_bytes.map(|received_bytes| Reply { received_bytes }).ok_or(MessageError::Form)
    }
}

#[cfg(test)]
mod tests {
    #![allow(
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        reason = "a panic fails the test"
    )]

    use super::*;
    use block::hex::to_hex;

    #[test]
    fn golden_bytes_of_request_and_reply() {
        let request = Request { fill_bytes: 3 };
        let bytes = [&request.encode()[..], &[7, 8, 9]].concat();
        let golden = crate::connection::digits(include_str!("../../testdata/probe-request-v1.hex"));
        assert_eq!(to_hex(&bytes), golden);
        assert_eq!(Request::decode(&bytes), Ok(request));
        let reply = Reply { received_bytes: 0x0102_0304_0506_0708 };
        let golden = crate::connection::digits(include_str!("../../testdata/probe-reply-v1.hex"));
        assert_eq!(to_hex(&reply.encode()), golden);
        assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
    }

    #[test]
    fn other_versions_lengths_and_forms_are_refused() {
        assert_eq!(Request::decode(&[]), Err(MessageError::Form));
        assert_eq!(Request::decode(&[1, 0, 0, 0, 0, 0, 0]), Err(MessageError::Form));
        assert_eq!(Request::decode(&[2, 0, 0, 0, 0, 0, 0, 0]), Err(MessageError::Version(2)));
        assert_eq!(Request::decode(&[1, 0, 1, 0, 0, 0, 0, 0]), Err(MessageError::Form));
        assert_eq!(Request::decode(&[1, 0, 0, 0, 1, 0, 0, 0]), Err(MessageError::Length));
        let filled = |fill_bytes: u32| {
            let mut bytes = Request { fill_bytes }.encode().to_vec();
            bytes.resize(REQUEST_HEAD_BYTES + usize::try_from(fill_bytes).unwrap(), 0);
            Request::decode(&bytes)
        };
        assert_eq!(filled(FILL_BYTES_MAX), Ok(Request { fill_bytes: FILL_BYTES_MAX }));
        assert_eq!(filled(FILL_BYTES_MAX + 1), Err(MessageError::Length));
        let mut reply = Reply { received_bytes: 1 }.encode();
        assert_eq!(Reply::decode(&reply[..15]), Err(MessageError::Length));
        reply[7] = 1;
        assert_eq!(Reply::decode(&reply), Err(MessageError::Form));
        reply[0] = 3;
        assert_eq!(Reply::decode(&reply), Err(MessageError::Version(3)));
    }
}
