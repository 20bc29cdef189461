//! Messages of generic netlink in the form of the kernel's nbd driver.
//!
//! Invariants:
//! - Pure: bytes in, bytes out. Messages from the kernel are checked like any input: lengths are
//!   verified, and nothing panics.
//! - All integers are in the byte order of the machine. Source: netlink(7);
//!   include/uapi/linux/netlink.h, genetlink.h and nbd-netlink.h of Linux 5.14 and later.

/// Messages to the controller of generic netlink, which lists the families. Source: genetlink.h.
pub(super) mod control {
    pub const FAMILY: u16 = 0x10;
    pub const GET_FAMILY: u8 = 3;
    pub const FAMILY_ID: u16 = 1;
    pub const FAMILY_NAME: u16 = 2;
}

/// Commands of the driver. Source: nbd-netlink.h.
pub(super) mod command {
    pub const CONNECT: u8 = 1;
    pub const DISCONNECT: u8 = 2;
    pub const RECONFIGURE: u8 = 3;
}

/// Attributes of the driver's commands. Source: nbd-netlink.h.
pub(super) mod attribute {
    pub const INDEX: u16 = 1;
    pub const SIZE_BYTES: u16 = 2;
    pub const BLOCK_SIZE_BYTES: u16 = 3;
    pub const TIMEOUT: u16 = 4;
    pub const SERVER_FLAGS: u16 = 5;
    pub const SOCKETS: u16 = 7;
    pub const DEAD_CONN_TIMEOUT: u16 = 8;
    pub const BACKEND_IDENTIFIER: u16 = 10;
    /// Nested in SOCKETS.
    pub const SOCK_ITEM: u16 = 1;
    /// Nested in SOCK_ITEM.
    pub const SOCK_FD: u16 = 1;
}

/// Flags of a request that wants an acknowledgement. Source: netlink.h, NLM_F_REQUEST and
/// NLM_F_ACK.
const REQUEST_WITH_ACK: u16 = 1 | 4;
/// Type of the message that ends a command. Source: netlink.h, NLMSG_ERROR.
const ERROR: u16 = 2;
/// Flag of an attribute that contains others. Source: netlink.h, NLA_F_NESTED.
const NESTED: u16 = 1 << 15;
/// Mask of an attribute's type without flags. Source: netlink.h, NLA_TYPE_MASK.
const TYPE_MASK: u16 = 0x3fff;
const MESSAGE_HEADER_BYTES: usize = 16;
const GENERIC_HEADER_BYTES: usize = 4;
const ATTRIBUTE_HEADER_BYTES: usize = 4;
/// Version of the driver's family, also used for the controller's. Source: nbd-netlink.h.
const VERSION: u8 = 1;

/// A message under construction.
pub(super) struct Request {
    bytes: Vec<u8>,
}

impl Request {
    /// Starts a message to `family`. Its answers carry the same `sequence`.
    pub(super) fn new(family: u16, command: u8, sequence: u32) -> Request {
        let mut bytes = Vec::with_capacity(128);
        bytes.extend_from_slice(&0u32.to_ne_bytes()); // the length, filled in at the end
        bytes.extend_from_slice(&family.to_ne_bytes());
        bytes.extend_from_slice(&REQUEST_WITH_ACK.to_ne_bytes());
        bytes.extend_from_slice(&sequence.to_ne_bytes());
        bytes.extend_from_slice(&0u32.to_ne_bytes()); // the kernel fills in the sender
        bytes.extend_from_slice(&[command, VERSION, 0, 0]);
        Request { bytes }
    }

    pub(super) fn u32(self, kind: u16, value: u32) -> Request {
        self.put(kind, &value.to_ne_bytes())
    }

    pub(super) fn u64(self, kind: u16, value: u64) -> Request {
        self.put(kind, &value.to_ne_bytes())
    }

    /// Adds text with the terminating zero byte that the kernel expects.
    pub(super) fn text(self, kind: u16, text: &str) -> Request {
        let bytes = [text.as_bytes(), &[0]].concat();
        self.put(kind, &bytes)
    }

    /// Adds the list of sockets of CONNECT and RECONFIGURE.
    pub(super) fn sockets(self, descriptors: &[u32]) -> Request {
        let mut list = Vec::new();
        for descriptor in descriptors {
            let mut item = Vec::new();
            put(&mut item, attribute::SOCK_FD, &descriptor.to_ne_bytes());
            put(&mut list, attribute::SOCK_ITEM | NESTED, &item);
        }
        self.put(attribute::SOCKETS | NESTED, &list)
    }

    /// Returns the complete message.
    pub(super) fn finish(mut self) -> Vec<u8> {
        let length = u32::try_from(self.bytes.len()).expect("a message is short");
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes
    }

    fn put(mut self, kind: u16, value: &[u8]) -> Request {
        put(&mut self.bytes, kind, value);
        self
    }
}

fn put(bytes: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = u16::try_from(ATTRIBUTE_HEADER_BYTES + value.len()).expect("values are short");
    bytes.extend_from_slice(&length.to_ne_bytes());
    bytes.extend_from_slice(&kind.to_ne_bytes());
    bytes.extend_from_slice(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

/// One message from the kernel.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer<'a> {
    /// The command has ended: 0, or an errno as a positive number.
    End(i32),
    /// A message with attributes.
    Data(Attributes<'a>),
}

/// The attributes of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Attributes<'a>(&'a [u8]);

impl<'a> Attributes<'a> {
    pub(super) fn u16(self, kind: u16) -> Option<u16> {
        self.find(kind)?.get(..2)?.try_into().ok().map(u16::from_ne_bytes)
    }

    pub(super) fn u32(self, kind: u16) -> Option<u32> {
        self.find(kind)?.get(..4)?.try_into().ok().map(u32::from_ne_bytes)
    }

    fn find(self, kind: u16) -> Option<&'a [u8]> {
        let mut rest = self.0;
        loop {
            let length = usize::from(u16::from_ne_bytes(rest.get(..2)?.try_into().ok()?));
            let found = u16::from_ne_bytes(rest.get(2..4)?.try_into().ok()?) & TYPE_MASK;
            let value = rest.get(ATTRIBUTE_HEADER_BYTES..length)?;
            if found == kind {
                return Some(value);
            }
            rest = rest.get(length.next_multiple_of(4)..)?;
        }
    }
}

/// Returns the messages in `bytes` that answer request `sequence`. The first unreadable one ends
/// the list.
pub(super) fn answers(bytes: &[u8], sequence: u32) -> Vec<Answer<'_>> {
    let mut answers = Vec::new();
    let mut rest = bytes;
    while let Some((message, more)) = first(rest) {
        rest = more;
        let kind = u16::from_ne_bytes([message[4], message[5]]);
        let numbered = u32::from_ne_bytes([message[8], message[9], message[10], message[11]]);
        let body = &message[MESSAGE_HEADER_BYTES..];
        if numbered != sequence {
            continue; // an answer to an abandoned request
        }
        if kind == ERROR {
            let Some(code) = body.get(..4).and_then(|code| code.try_into().ok()) else { break };
            answers.push(Answer::End(i32::from_ne_bytes(code).saturating_neg()));
        } else if let Some(attributes) = body.get(GENERIC_HEADER_BYTES..) {
            answers.push(Answer::Data(Attributes(attributes)));
        }
    }
    answers
}

/// Splits off the first message.
fn first(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    if length < MESSAGE_HEADER_BYTES {
        return None;
    }
    let message = bytes.get(..length)?;
    Some((message, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The bytes were written out by hand from the kernel's headers.
    #[test]
    #[cfg(target_endian = "little")]
    fn a_request_has_the_bytes_that_the_kernel_takes() {
        let request = Request::new(0x1c, command::RECONFIGURE, 7)
            .u32(attribute::INDEX, 3)
            .u64(attribute::TIMEOUT, 5)
            .text(attribute::BACKEND_IDENTIFIER, "spindle")
            .sockets(&[9, 10]);
        let wanted: &[&[u8]] = &[
            &[80, 0, 0, 0, 0x1c, 0, 5, 0, 7, 0, 0, 0, 0, 0, 0, 0], // netlink header
            &[3, 1, 0, 0],                                         // generic header
            &[8, 0, 1, 0, 3, 0, 0, 0],
            &[12, 0, 4, 0, 5, 0, 0, 0, 0, 0, 0, 0],
            &[12, 0, 10, 0],
            b"spindle\0",
            &[28, 0, 7, 0x80],
            &[12, 0, 1, 0x80, 8, 0, 1, 0, 9, 0, 0, 0],
            &[12, 0, 1, 0x80, 8, 0, 1, 0, 10, 0, 0, 0],
        ];
        assert_eq!(request.finish(), wanted.concat());
    }

    /// The input is an answer of the controller, followed by the acknowledgement.
    #[test]
    fn answers_are_read_and_those_of_others_are_not() {
        let mut data = Request::new(control::FAMILY, 1, 5)
            .text(control::FAMILY_NAME, "nbd")
            .put(control::FAMILY_ID, &0x1cu16.to_ne_bytes())
            .finish();
        let acknowledged = |code: i32, sequence: u32| {
            let mut bytes = Vec::new();
            bytes.extend_from_slice(&36u32.to_ne_bytes());
            bytes.extend_from_slice(&ERROR.to_ne_bytes());
            bytes.extend_from_slice(&[0; 2]);
            bytes.extend_from_slice(&sequence.to_ne_bytes());
            bytes.extend_from_slice(&[0; 4]);
            bytes.extend_from_slice(&(-code).to_ne_bytes());
            bytes.resize(36, 0);
            bytes
        };
        data.extend(acknowledged(22, 4));
        data.extend(acknowledged(0, 5));
        let found = answers(&data, 5);
        let [Answer::Data(attributes), Answer::End(0)] = found[..] else { panic!("{found:?}") };
        assert_eq!(attributes.u16(control::FAMILY_ID), Some(0x1c));
        assert_eq!(attributes.u32(control::FAMILY_ID), None, "it is shorter");
        assert_eq!(answers(&data, 4), [Answer::End(22)]);
    }

    proptest! {
        #[test]
        fn bytes_that_make_no_sense_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            for answer in answers(&bytes, 0) {
                if let Answer::Data(attributes) = answer {
                    let _ = (attributes.u16(1), attributes.u32(2));
                }
            }
        }
    }
}
