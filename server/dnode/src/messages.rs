//! The messages between an owner and a data node, as the bodies of frames. Pure logic.
//!
//! Invariants:
//! - A decoder never panics, and reads only within the body. A body with anything behind its end is refused.
//! - The bytes of an object are the rest of their body: neither end copies them.
//!
//! Byte table: docs/format-peer.md, "Service 7: data".

#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use block::Epoch;
use block::quantities::{NAME_BYTES_MAX, check_name};
use block::units::{array_at, u16_at, u64_at};
use bytes::{BufMut, Bytes, BytesMut};
use erasure::fragment::HEADER_BYTES;
use std::ops::Range;
use uuid::Uuid;

/// Version of the messages, which the first one of a connection names.
pub const VERSION: u16 = 1;
/// Most objects in one answer to a listing. Chosen by hand: 100 KiB.
pub const LISTED_MAX: usize = 1000;
/// Longest path of an object, in bytes. Chosen by hand: those of fragments have about 100.
pub const PATH_BYTES_MAX: usize = 400;
/// Most drives in one answer: `dnode.drives` has as many at most.
pub const DRIVE_COUNT_MAX: usize = 128;
/// Longest text of a refusal, and of a drive's wear, in bytes. Chosen by hand.
const TEXT_BYTES_MAX: usize = 1000;

/// A request of an owner, or of a command that reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The first one of a connection.
    Open(Open, Proof),
    /// Create an object, whose bytes are the rest of the body, and put it on stable storage.
    Put(String, Bytes),
    /// Read a range. It may end behind the object.
    Read(String, Range<u64>),
    /// Tell the size.
    Size(String),
    /// Delete.
    Delete(String),
    /// Verify the checksums of a fragment.
    Check(String),
    /// List the objects below a folder; with an empty path, all. The last request of its connection.
    List(String),
    /// Tell the room of the drive.
    Room,
    /// Tell the drives of the node, in this version of the messages. The only request of its connection.
    Drives(u16),
}

/// The folder that a connection is about, for whom, and in which version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Open {
    /// Version of the messages.
    pub version: u16,
    /// The owner of this epoch writes. Absent for a command that only reads.
    pub owner: Option<Epoch>,
    /// No client waits for the requests of this connection: others come first.
    pub is_bulk: bool,
    /// Lineage of the pool: the name of its folder.
    pub lineage: Uuid,
    /// Name of the drive; empty for the only one.
    pub drive: String,
}

/// Bytes of a public key. Source: RFC 8032, section 5.1.5.
pub const KEY_BYTES: usize = 32;
/// Bytes of a signature. Source: RFC 8032, section 5.1.6.
pub const SIGNATURE_BYTES: usize = 64;

/// The proof that whoever opens a folder has the key of its pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// Public key of the pool.
    pub key: [u8; KEY_BYTES],
    /// The signature by it.
    pub signature: [u8; SIGNATURE_BYTES],
}

/// An object in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its path.
    pub path: String,
    /// Its size in bytes.
    pub bytes: u64,
}

/// The room of a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriveRoom {
    /// Bytes that it can store; 0 if that is not known.
    pub total_bytes: u64,
    /// Bytes that it still takes.
    pub free_bytes: u64,
    /// Why it is expected to fail; empty if it is not.
    pub wear: String,
}

/// A drive of a data node, as the node reports it to the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriveOffer {
    /// Its identity.
    pub id: Uuid,
    /// Its name.
    pub name: String,
    /// Its media group, if it has one.
    pub group: Option<String>,
    /// The label of its failure domain, if it has one.
    pub domain: Option<String>,
}

/// The answer of a data node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Done.
    Done,
    /// The size of the object, and the bytes of the range.
    Read(u64, Bytes),
    /// The size of the object.
    Size(u64),
    /// The header of a fragment all of which verifies; empty for another one.
    Checked(Bytes),
    /// A part of a listing, and whether another one follows.
    Listed(Vec<Listed>, bool),
    /// The room of the drive.
    Room(DriveRoom),
    /// The request was not carried out, and why.
    Refused(Refusal, String),
    /// The drives of the node.
    Drives(Vec<DriveOffer>),
}

/// Why a request was not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The object is not stored.
    NotFound = 1,
    /// An object is stored under its name.
    Exists = 2,
    /// A later owner has come, or the sender is none.
    Fenced = 3,
    /// There is no room.
    Full = 4,
    /// The drive is away, or fails.
    Unavailable = 5,
    /// The request is not understood.
    Invalid = 6,
    /// The sender has not proven that it has the key of the pool.
    Denied = 7,
}

impl Refusal {
    fn from_number(number: u8) -> Option<Refusal> {
        use Refusal::{Denied, Exists, Fenced, Full, Invalid, NotFound, Unavailable};
        let all = [NotFound, Exists, Fenced, Full, Unavailable, Invalid, Denied];
        all.into_iter().find(|refusal| *refusal as u8 == number)
    }
}

mod kind {
    pub(super) const OPEN: u8 = 1;
    pub(super) const PUT: u8 = 2;
    pub(super) const READ: u8 = 3;
    pub(super) const SIZE: u8 = 4;
    pub(super) const DELETE: u8 = 5;
    pub(super) const LIST: u8 = 6;
    pub(super) const CHECK: u8 = 7;
    pub(super) const ROOM: u8 = 8;
    pub(super) const DRIVES: u8 = 9;
    pub(super) const DONE: u8 = 0x81;
    pub(super) const BYTES: u8 = 0x82;
    pub(super) const SIZED: u8 = 0x83;
    pub(super) const LISTED: u8 = 0x84;
    pub(super) const REFUSED: u8 = 0x85;
    pub(super) const CHECKED: u8 = 0x86;
    pub(super) const TOLD: u8 = 0x87;
    pub(super) const OFFERED: u8 = 0x88;
}

/// Bytes of an open before the name of the drive.
const OPEN_BYTES: usize = 2 + 1 + 8 + 16 + KEY_BYTES + SIGNATURE_BYTES;

fn text_of(bytes: &[u8], max: usize) -> Option<String> {
    (bytes.len() <= max).then(|| std::str::from_utf8(bytes).ok().map(str::to_owned)).flatten()
}

/// The beginning of a text for people, as it is sent.
fn cut(text: &str) -> &[u8] {
    text.get(..text.floor_char_boundary(TEXT_BYTES_MAX)).unwrap_or_default().as_bytes()
}

/// Takes a name behind its length off the beginning. It may be empty.
fn take_name(rest: &mut &[u8]) -> Option<String> {
    let (length, behind) = rest.split_first()?;
    let (name, behind) = behind.split_at_checked(usize::from(*length))?;
    *rest = behind;
    let name = text_of(name, NAME_BYTES_MAX)?;
    (name.is_empty() || check_name("drive", &name).is_ok()).then_some(name)
}

impl Request {
    /// Returns the kind of the frame, and the parts of its body.
    #[must_use]
    pub fn encode(&self) -> (u8, Vec<Bytes>) {
        let mut body = BytesMut::new();
        let kind = match self {
            Request::Open(open, Proof { key, signature }) => {
                let Open { version, owner, is_bulk, lineage, drive } = open;
                body.put_u16_le(*version);
                body.put_u8(u8::from(owner.is_some()) | u8::from(*is_bulk) << 1);
                body.put_u64_le(owner.map_or(0, |epoch| epoch.0));
                body.put_slice(lineage.as_bytes());
                body.put_slice(key);
                body.put_slice(signature);
                body.put_slice(drive.as_bytes());
                kind::OPEN
            }
            Request::Put(path, bytes) => {
                let length = u16::try_from(path.len()).unwrap_or(u16::MAX);
                body.put_u16_le(length);
                body.put_slice(path.as_bytes());
                return (kind::PUT, vec![body.freeze(), bytes.clone()]);
            }
            Request::Read(path, range) => {
                body.put_u64_le(range.start);
                body.put_u64_le(range.end);
                body.put_slice(path.as_bytes());
                kind::READ
            }
            Request::Size(path) => {
                body.put_slice(path.as_bytes());
                kind::SIZE
            }
            Request::Delete(path) => {
                body.put_slice(path.as_bytes());
                kind::DELETE
            }
            Request::List(path) => {
                body.put_slice(path.as_bytes());
                kind::LIST
            }
            Request::Check(path) => {
                body.put_slice(path.as_bytes());
                kind::CHECK
            }
            Request::Room => kind::ROOM,
            Request::Drives(version) => {
                body.put_u16_le(*version);
                kind::DRIVES
            }
        };
        (kind, vec![body.freeze()])
    }

    /// Reads a frame; `None` if it is no request of this version.
    #[must_use]
    pub fn decode(kind: u8, body: &Bytes) -> Option<Request> {
        let path = |bytes: &[u8]| text_of(bytes, PATH_BYTES_MAX);
        Some(match kind {
            kind::OPEN => {
                let flags = *body.get(2)?;
                let owner = match (flags, Epoch(u64_at(body, 3)?)) {
                    (0 | 2, Epoch(0)) => None,
                    (1 | 3, epoch) => Some(epoch),
                    _ => return None,
                };
                let open = Open {
                    version: u16_at(body, 0)?,
                    owner,
                    is_bulk: flags & 2 != 0,
                    lineage: Uuid::from_bytes(array_at(body, 11)?),
                    drive: path(body.get(OPEN_BYTES..)?)?,
                };
                let (key, signature) = (array_at(body, 27)?, array_at(body, 59)?);
                Request::Open(open, Proof { key, signature })
            }
            kind::PUT => {
                let end = usize::from(u16_at(body, 0)?).checked_add(2)?;
                Request::Put(path(body.get(2..end)?)?, body.slice(end..))
            }
            kind::READ => {
                let range = u64_at(body, 0)?..u64_at(body, 8)?;
                let range = (range.start <= range.end).then_some(range)?;
                Request::Read(path(body.get(16..)?)?, range)
            }
            kind::SIZE => Request::Size(path(body)?),
            kind::DELETE => Request::Delete(path(body)?),
            kind::LIST => Request::List(path(body)?),
            kind::CHECK => Request::Check(path(body)?),
            kind::ROOM => body.is_empty().then_some(Request::Room)?,
            kind::DRIVES => Request::Drives((body.len() == 2).then(|| u16_at(body, 0)).flatten()?),
            _ => return None,
        })
    }
}

impl Answer {
    /// Returns the kind of the frame, and the parts of its body.
    #[must_use]
    pub fn encode(&self) -> (u8, Vec<Bytes>) {
        let mut body = BytesMut::new();
        let kind = match self {
            Answer::Done => kind::DONE,
            Answer::Read(size, bytes) => {
                body.put_u64_le(*size);
                return (kind::BYTES, vec![body.freeze(), bytes.clone()]);
            }
            Answer::Size(bytes) => {
                body.put_u64_le(*bytes);
                kind::SIZED
            }
            Answer::Checked(header) => return (kind::CHECKED, vec![header.clone()]),
            Answer::Listed(objects, has_more) => {
                body.put_u8(u8::from(*has_more));
                for Listed { path, bytes } in objects {
                    body.put_u64_le(*bytes);
                    body.put_u16_le(u16::try_from(path.len()).unwrap_or(u16::MAX));
                    body.put_slice(path.as_bytes());
                }
                kind::LISTED
            }
            Answer::Room(DriveRoom { total_bytes, free_bytes, wear }) => {
                body.put_u64_le(*total_bytes);
                body.put_u64_le(*free_bytes);
                body.put_slice(cut(wear));
                kind::TOLD
            }
            Answer::Refused(refusal, text) => {
                body.put_u8(*refusal as u8);
                body.put_slice(cut(text));
                kind::REFUSED
            }
            Answer::Drives(drives) => {
                for DriveOffer { id, name, group, domain } in drives {
                    body.put_slice(id.as_bytes());
                    for text in [Some(name), group.as_ref(), domain.as_ref()] {
                        let text = text.map_or("", String::as_str);
                        body.put_u8(u8::try_from(text.len()).unwrap_or(u8::MAX));
                        body.put_slice(text.as_bytes());
                    }
                }
                kind::OFFERED
            }
        };
        (kind, vec![body.freeze()])
    }

    /// Reads a frame; `None` if it is no answer of this version.
    #[must_use]
    pub fn decode(kind: u8, body: &Bytes) -> Option<Answer> {
        Some(match kind {
            kind::DONE => body.is_empty().then_some(Answer::Done)?,
            kind::BYTES => Answer::Read(u64_at(body, 0)?, body.slice(8..)),
            kind::SIZED => Answer::Size((body.len() == 8).then(|| u64_at(body, 0)).flatten()?),
            kind::CHECKED => {
                let is_whole = body.is_empty() || body.len() == HEADER_BYTES;
                is_whole.then(|| Answer::Checked(body.clone()))?
            }
            kind::LISTED => {
                let (has_more, mut rest) = body.split_first().filter(|(more, _)| **more < 2)?;
                let mut objects = Vec::new();
                while !rest.is_empty() {
                    if objects.len() == LISTED_MAX {
                        return None;
                    }
                    let end = usize::from(u16_at(rest, 8)?).checked_add(10)?;
                    let path = text_of(rest.get(10..end)?, PATH_BYTES_MAX)?;
                    objects.push(Listed { path, bytes: u64_at(rest, 0)? });
                    rest = rest.get(end..)?;
                }
                Answer::Listed(objects, *has_more == 1)
            }
            kind::TOLD => Answer::Room(DriveRoom {
                total_bytes: u64_at(body, 0)?,
                free_bytes: u64_at(body, 8)?,
                wear: text_of(body.get(16..)?, TEXT_BYTES_MAX)?,
            }),
            kind::REFUSED => {
                let (refusal, text) = body.split_first()?;
                Answer::Refused(Refusal::from_number(*refusal)?, text_of(text, TEXT_BYTES_MAX)?)
            }
            kind::OFFERED => {
                let (mut rest, mut drives): (&[u8], _) = (body, Vec::new());
                while !rest.is_empty() {
                    let id = Uuid::from_bytes(array_at(rest, 0)?);
                    rest = rest.get(16..)?;
                    let name = take_name(&mut rest).filter(|name| !name.is_empty())?;
                    let label = |text: String| (!text.is_empty()).then_some(text);
                    let group = label(take_name(&mut rest)?);
                    let domain = label(take_name(&mut rest)?);
                    if drives.len() == DRIVE_COUNT_MAX {
                        return None;
                    }
                    drives.push(DriveOffer { id, name, group, domain });
                }
                Answer::Drives(drives)
            }
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests;
