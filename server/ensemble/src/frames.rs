//! The messages of the service `member`: frames between a node that owns or takes over a pool and a
//! node that has a member of its log. `docs/format-peer.md` has the kinds, and
//! `docs/format-messages.md` the payloads.
//!
//! Invariants:
//! - The node of the member speaks first: the identity of its member. The other side sends nothing
//!   before it has seen the identity that it asks for. A member that was made again on a node that has
//!   lost its disk is thus never taken for the one that it replaces.
//! - Each direction has one kind of message after that; anything else ends the connection.

#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use crate::seeded_bugs::seeded_bugs;
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use cluster::{Frame, FrameReader, FrameWriter};
use replication::{Answer, MemberId, MessageError, Request};
use uuid::Uuid;

/// Kind of the first frame, from the node of the member: 16 bytes, the identity of the member.
pub(crate) const IDENTITY: u8 = 1;
/// Kind of a request.
pub(crate) const REQUEST: u8 = 2;
/// Kind of an answer.
pub(crate) const ANSWER: u8 = 3;

/// A message of one direction.
pub(crate) trait Message: Sized {
    /// Kind of its frame.
    const KIND: u8;

    /// Returns the payload in parts.
    fn to_parts(&self) -> Vec<Bytes>;

    /// Reads the payload.
    fn from_payload(payload: &Bytes) -> std::result::Result<Self, MessageError>;
}

impl Message for Request {
    const KIND: u8 = REQUEST;

    fn to_parts(&self) -> Vec<Bytes> {
        self.encode()
    }

    fn from_payload(payload: &Bytes) -> std::result::Result<Request, MessageError> {
        Request::decode(payload)
    }
}

impl Message for Answer {
    const KIND: u8 = ANSWER;

    fn to_parts(&self) -> Vec<Bytes> {
        self.encode()
    }

    fn from_payload(payload: &Bytes) -> std::result::Result<Answer, MessageError> {
        Answer::decode(payload)
    }
}

/// Reads the next message; `None` once the peer has closed its direction.
///
/// # Errors
/// `Corrupt` for a frame that is no such message; `Unavailable` if the connection breaks.
pub(crate) async fn read<M: Message>(reader: &mut FrameReader) -> Result<Option<M>> {
    let Some(frame) = reader.read().await? else { return Ok(None) };
    decode(&frame).map(Some)
}

/// Writes a message, without copying the bytes of batches before they are encrypted.
///
/// # Errors
/// `Invalid` for a message that is longer than a frame; `Unavailable` if the connection breaks.
pub(crate) async fn write<M: Message>(writer: &mut FrameWriter, message: &M) -> Result<()> {
    writer.write(M::KIND, 0, &message.to_parts()).await
}

/// Reads the first frame.
///
/// # Errors
/// `Corrupt` for another frame; `Unavailable` if the connection ends before it.
pub(crate) async fn read_identity(reader: &mut FrameReader) -> Result<MemberId> {
    let Some(frame) = reader.read().await? else {
        let what = "read the identity of a member: the node closed the connection";
        return Err(Error::new(ErrorKind::Unavailable, what));
    };
    check(&frame, IDENTITY)?;
    Uuid::from_slice(&frame.payload).map_err(|error| {
        Error::with_source(ErrorKind::Corrupt, "read the identity of a member", error)
    })
}

/// Writes the first frame.
///
/// # Errors
/// `Unavailable` if the connection breaks.
pub(crate) async fn write_identity(writer: &mut FrameWriter, member: MemberId) -> Result<()> {
    writer.write(IDENTITY, 0, &[Bytes::copy_from_slice(member.as_bytes())]).await
}

fn decode<M: Message>(frame: &Frame) -> Result<M> {
    check(frame, M::KIND)?;
    M::from_payload(&frame.payload).map_err(|error| {
        Error::with_source(ErrorKind::Corrupt, "read a message about a write log", error)
    })
}

fn check(frame: &Frame, kind: u8) -> Result<()> {
    if (frame.kind, frame.request) == (kind, 0) || seeded_bugs().frame_kind_unchecked {
        return Ok(());
    }
    let what = format!(
        "read a message about a write log: a frame of kind {} and request {} came in place of kind \
         {kind} and request 0",
        frame.kind, frame.request
    );
    Err(Error::new(ErrorKind::Corrupt, what))
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Epoch;

    fn frame(kind: u8, request: u64, payload: &[Bytes]) -> Frame {
        Frame { kind, request, payload: payload.concat().into() }
    }

    #[test]
    fn frame_of_another_kind_or_request_is_refused() {
        let promise = Request::Promise { epoch: Epoch(3) };
        let parts = promise.to_parts();
        assert_eq!(decode::<Request>(&frame(REQUEST, 0, &parts)).unwrap(), promise);
        for wrong in [
            frame(ANSWER, 0, &parts),
            frame(IDENTITY, 0, &parts),
            frame(REQUEST, 1, &parts),
            frame(REQUEST, 0, &[]),
        ] {
            assert_eq!(decode::<Request>(&wrong).unwrap_err().kind(), ErrorKind::Corrupt);
        }
        // A request is no answer, whatever the frame says.
        let error = decode::<Answer>(&frame(ANSWER, 0, &parts)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
    }
}
