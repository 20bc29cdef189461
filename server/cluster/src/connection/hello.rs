//! The first message of a connection and its answer.
//!
//! Invariants:
//! - The prefix (magic, version, length) is the same in every version of the protocol, so that a
//!   program of another version gets an answer that names both versions.
//! - A body of another version is never interpreted.

#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use crate::identity::{ClusterId, Digest};
use block::ErrorKind;
use block::units::{array_at, u16_at};
use std::fmt;
use uuid::Uuid;

/// Version of the protocol between nodes.
pub const PROTOCOL_VERSION: u16 = 1;
/// Bytes of the prefix.
pub const PREFIX_BYTES: usize = 12;
/// Bytes of the longest body.
pub const BODY_BYTES_MAX: u16 = 512;
/// Bytes of the body of a hello.
const HELLO_BYTES: usize = 68;
/// Bytes of the body of an answer before its text.
const ANSWER_BYTES: usize = 36;
/// Bytes of the longest text of an answer.
const TEXT_BYTES_MAX: usize = 400;
/// First bytes of a hello.
pub const HELLO_MAGIC: &[u8; 8] = b"SPDLPEER";
/// First bytes of an answer.
pub const ANSWER_MAGIC: &[u8; 8] = b"SPDLANSR";

/// A use of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Service {
    /// A stranger asks to be admitted. Framed, at most 64 KiB.
    Join,
    /// The exchange of lists of nodes. Framed, at most a list.
    Admissions,
    /// Messages about one pool's log. Framed, at most 64 MiB and 64 KiB of headers.
    Member,
    /// A stream of bytes to a service on the peer, such as NBD. Not framed.
    Forward,
    /// Questions and orders about the roles of nodes in pools. Framed, at most 64 KiB.
    Pool,
    /// Measures the path between two nodes. Framed, at most 32 KiB and 8 bytes.
    Probe,
    /// Objects on the drives of a data node. Framed, at most a segment of the largest size and 16 MiB.
    Data,
}

impl Service {
    /// Returns the service with this number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Service> {
        match number {
            1 => Some(Service::Join),
            2 => Some(Service::Admissions),
            3 => Some(Service::Member),
            4 => Some(Service::Forward),
            5 => Some(Service::Pool),
            6 => Some(Service::Probe),
            7 => Some(Service::Data),
            _ => None,
        }
    }

    /// Returns the number of the service.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Service::Join => 1,
            Service::Admissions => 2,
            Service::Member => 3,
            Service::Forward => 4,
            Service::Pool => 5,
            Service::Probe => 6,
            Service::Data => 7,
        }
    }

    /// Returns the bytes of the longest payload of a frame.
    #[must_use]
    pub fn payload_bytes_max(self) -> u32 {
        match self {
            Service::Join => 64 << 10,
            // The reply to a request of the command line.
            Service::Pool => (32 << 20) + (64 << 10),
            Service::Admissions => 8 << 20,
            Service::Member => (64 << 20) + (64 << 10),
            Service::Forward => 0,
            Service::Probe => (32 << 10) + 8,
            Service::Data => (256 << 20) + (16 << 20),
        }
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Service::Join => "join",
            Service::Admissions => "admissions",
            Service::Member => "member",
            Service::Forward => "forward",
            Service::Pool => "pool",
            Service::Probe => "probe",
            Service::Data => "data",
        })
    }
}

/// The first message of the dialing node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The service that it wants, by number: the other program may not know it.
    pub service: u8,
    /// Its cluster, or that of its token.
    pub cluster: ClusterId,
    /// The pool that the connection is about.
    pub pool: Option<Uuid>,
    /// Digest of its list of nodes; zeros for a joiner.
    pub list: Digest,
}

/// Why a connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The versions of the protocol differ.
    Version,
    /// The answering node is in another cluster.
    Cluster,
    /// The peer is not on the list.
    NotAdmitted,
    /// The answering node does not have the service.
    Service,
    /// The answering node does not have the pool.
    Pool,
    /// The answering node cannot take the connection at this time.
    Busy,
}

const REFUSALS: [(u8, Refused, ErrorKind); 6] = [
    (1, Refused::Version, ErrorKind::Unsupported),
    (2, Refused::Cluster, ErrorKind::Denied),
    (3, Refused::NotAdmitted, ErrorKind::Denied),
    (4, Refused::Service, ErrorKind::Unsupported),
    (5, Refused::Pool, ErrorKind::NotFound),
    (6, Refused::Busy, ErrorKind::Unavailable),
];

impl Refused {
    fn number(self) -> u8 {
        REFUSALS.iter().find(|(_, refused, _)| *refused == self).map_or(6, |(number, ..)| *number)
    }

    /// Returns the kind of the error at the dialing node.
    #[must_use]
    pub fn kind(self) -> ErrorKind {
        let row = REFUSALS.iter().find(|(_, refused, _)| *refused == self);
        row.map_or(ErrorKind::Unavailable, |(.., kind)| *kind)
    }
}

/// The answer to a hello.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Why the connection is refused; `None` if it is accepted.
    pub refused: Option<Refused>,
    /// Digest of the answering node's list; zeros to a joiner.
    pub list: Digest,
    /// The reason in words, if it is refused.
    pub text: String,
}

/// Why a message is not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HelloError {
    /// The bytes are no message of this protocol.
    NotAPeer,
    /// The message is of this version of the protocol, which this program does not speak.
    Version(u16),
    /// A field is out of its range.
    Range,
}

/// Decodes a prefix. Returns the length of the body, and its version if it is not ours.
///
/// # Errors
/// [`HelloError::NotAPeer`], [`HelloError::Range`].
pub fn decode_prefix(
    bytes: &[u8; PREFIX_BYTES],
    magic: &[u8; 8],
) -> Result<(u16, Option<u16>), HelloError> {
    if !bytes.starts_with(magic) {
        return Err(HelloError::NotAPeer);
    }
    let version = u16_at(bytes, 8).ok_or(HelloError::NotAPeer)?;
    let length = u16_at(bytes, 10).ok_or(HelloError::NotAPeer)?;
    if length > BODY_BYTES_MAX {
        return Err(HelloError::Range);
    }
    Ok((length, Some(version).filter(|version| *version != PROTOCOL_VERSION)))
}

fn message(magic: &[u8; 8], body: &[u8]) -> Vec<u8> {
    let length = u16::try_from(body.len()).unwrap_or(BODY_BYTES_MAX);
    [&magic[..], &PROTOCOL_VERSION.to_le_bytes(), &length.to_le_bytes(), body].concat()
}

impl Hello {
    /// Encodes the message with its prefix.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let pool = self.pool.unwrap_or_default();
        let head = [self.service, 0, 0, 0];
        let body = [&head[..], self.cluster.0.as_bytes(), pool.as_bytes(), &self.list].concat();
        message(HELLO_MAGIC, &body)
    }

    /// Decodes the body of a message of our version.
    ///
    /// # Errors
    /// [`HelloError::Range`].
    pub fn decode(body: &[u8]) -> Result<Hello, HelloError> {
        let decode = || {
            let [service, 0, 0, 0, ..] = *body else { return None };
            let cluster = ClusterId(Uuid::from_bytes(array_at(body, 4)?));
            let pool = Uuid::from_bytes(array_at(body, 20)?);
            let pool = Some(pool).filter(|pool| !pool.is_nil());
            Some(Hello { service, cluster, pool, list: array_at(body, 36)? })
        };
        decode().filter(|_| body.len() == HELLO_BYTES).ok_or(HelloError::Range)
    }
}

impl Answer {
    /// Encodes the message with its prefix. A long text is cut.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let head = [self.refused.map_or(0, Refused::number), 0, 0, 0];
        let mut text = String::new();
        for character in self.text.chars().filter(|character| !character.is_control()) {
            if text.len().saturating_add(character.len_utf8()) > TEXT_BYTES_MAX {
                break;
            }
            text.push(character);
        }
        message(ANSWER_MAGIC, &[&head[..], &self.list, text.as_bytes()].concat())
    }

    /// Decodes the body of a message of our version.
    ///
    /// # Errors
    /// [`HelloError::Range`].
    pub fn decode(body: &[u8]) -> Result<Answer, HelloError> {
        let decode = || {
            let [number, 0, 0, 0, ..] = *body else { return None };
            let refused = match number {
                0 => None,
                _ => Some(REFUSALS.iter().find(|(known, ..)| *known == number)?.1),
            };
            let text = std::str::from_utf8(body.get(ANSWER_BYTES..)?).ok()?;
            let is_printable = !text.chars().any(char::is_control);
            let is_short = text.len() <= TEXT_BYTES_MAX;
            let list = array_at(body, 4)?;
            (is_printable && is_short).then(|| Answer { refused, list, text: text.to_owned() })
        };
        decode().ok_or(HelloError::Range)
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

    fn body(bytes: &[u8]) -> &[u8] {
        &bytes[PREFIX_BYTES..]
    }

    #[test]
    fn golden_bytes_of_hello_and_answer() {
        let hello = Hello {
            service: Service::Member.number(),
            cluster: ClusterId(Uuid::from_u128(0x1111_2222_3333_4444_5555_6666_7777_8888)),
            pool: Some(Uuid::from_u128(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10)),
            list: [0xab; 32],
        };
        let golden = crate::connection::digits(include_str!("../../testdata/hello-v1.hex"));
        assert_eq!(to_hex(&hello.encode()), golden);
        assert_eq!(Hello::decode(body(&hello.encode())), Ok(hello));
        let answer =
            Answer { refused: Some(Refused::Pool), list: [0xcd; 32], text: "no pool".to_owned() };
        let golden = crate::connection::digits(include_str!("../../testdata/answer-v1.hex"));
        assert_eq!(to_hex(&answer.encode()), golden);
        assert_eq!(Answer::decode(body(&answer.encode())), Ok(answer));
    }

    #[test]
    fn prefix_of_another_version_is_told_apart_from_noise() {
        let mut bytes = [0; PREFIX_BYTES];
        bytes[..8].copy_from_slice(HELLO_MAGIC);
        bytes[8] = 9;
        assert_eq!(decode_prefix(&bytes, HELLO_MAGIC), Ok((0, Some(9))));
        assert_eq!(decode_prefix(&bytes, ANSWER_MAGIC), Err(HelloError::NotAPeer));
        bytes[11] = 0xff;
        assert_eq!(decode_prefix(&bytes, HELLO_MAGIC), Err(HelloError::Range));
    }

    #[test]
    fn long_texts_and_control_characters_do_not_reach_the_wire() {
        let text = format!("a\n\x1b[31m{}", "é".repeat(500));
        let answer = Answer { refused: Some(Refused::Busy), list: [0; 32], text };
        let decoded = Answer::decode(body(&answer.encode())).unwrap();
        assert!(decoded.text.starts_with("a[31mé") && decoded.text.len() <= TEXT_BYTES_MAX);
        assert!(Answer::decode(&[7; 40]).is_err() && Answer::decode(&[0; 35]).is_err());
    }
}
