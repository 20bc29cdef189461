//! The header of a frame: a length, a kind and the id of a request. The service gives kinds and ids
//! their meaning.
//!
//! Invariants:
//! - A header is 16 bytes; a longer payload than the service allows is refused before it is read.

#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use block::units::{array_at, u32_at};
use std::fmt;

/// Bytes of a header.
pub const FRAME_HEADER_BYTES: usize = 16;

/// The header of a frame; docs/format-peer.md has its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Length of the payload in bytes.
    pub payload_bytes: u32,
    /// Kind of the message, to the service.
    pub kind: u8,
    /// Request that the message belongs to, to the service.
    pub request: u64,
}

/// Why a header is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameError {
    /// Bytes that must be zero are not.
    Reserved,
    /// The payload is longer than the service allows.
    TooLong {
        /// Bytes of the payload.
        payload_bytes: u32,
        /// Bytes that the service allows.
        max: u32,
    },
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FrameError::Reserved => write!(f, "reserved bytes of a frame are not zero"),
            FrameError::TooLong { payload_bytes, max } => {
                write!(
                    f,
                    "a frame of {payload_bytes} bytes is longer than the {max} of its service"
                )
            }
        }
    }
}

impl std::error::Error for FrameError {}

impl FrameHeader {
    /// Encodes the header.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_HEADER_BYTES] {
        let mut bytes = [0; FRAME_HEADER_BYTES];
        let (length, rest) = bytes.split_at_mut(4);
        length.copy_from_slice(&self.payload_bytes.to_le_bytes());
        let (kind, rest) = rest.split_at_mut(4);
        kind.fill(0);
        if let Some(first) = kind.first_mut() {
            *first = self.kind;
        }
        rest.copy_from_slice(&self.request.to_le_bytes());
        bytes
    }

    /// Decodes a header of a service whose payloads have at most `max` bytes.
    ///
    /// # Errors
    /// Those of [`FrameError`]; the connection cannot be used afterwards.
    pub fn decode(bytes: &[u8; FRAME_HEADER_BYTES], max: u32) -> Result<FrameHeader, FrameError> {
        let [_, _, _, _, kind, 0, 0, 0, ..] = *bytes else { return Err(FrameError::Reserved) };
        let payload_bytes = u32_at(bytes, 0).unwrap_or(u32::MAX);
        if payload_bytes > max {
            return Err(FrameError::TooLong { payload_bytes, max });
        }
        let request = array_at(bytes, 8).map_or(0, u64::from_le_bytes);
        Ok(FrameHeader { payload_bytes, kind, request })
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
    fn golden_bytes_of_a_frame_header() {
        let header =
            FrameHeader { payload_bytes: 0x0102_0304, kind: 5, request: 0x1112_1314_1516_1718 };
        let bytes = header.encode();
        let golden = include_str!("../../testdata/frame-header-v1.hex");
        assert_eq!(crate::connection::digits(golden), to_hex(&bytes));
        assert_eq!(FrameHeader::decode(&bytes, u32::MAX), Ok(header));
        assert!(FrameHeader::decode(&bytes, 0x0102_0304).is_ok());
        let error = FrameError::TooLong { payload_bytes: 0x0102_0304, max: 0x0102_0303 };
        assert_eq!(FrameHeader::decode(&bytes, 0x0102_0303), Err(error));
        for at in 5..8 {
            let mut wrong = bytes;
            wrong[at] = 1;
            assert_eq!(FrameHeader::decode(&wrong, u32::MAX), Err(FrameError::Reserved));
        }
    }
}
