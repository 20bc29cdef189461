//! NBD bytes <-> types. Everything on the wire is big-endian.
//!
//! Invariants:
//! - Pure: no I/O, and no allocation whose size a length field alone decides.
//! - Decoders never panic, whatever the bytes are: a wrong length is an error.
//! - Every constant names its section of the specification (`doc/proto.md`).
#![deny(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::unwrap_used
)]

mod reservation;

pub use reservation::{Intent, LABEL_BYTES_MAX, ReservationRequest};
/// First 8 bytes that the server sends. Spec, "Newstyle negotiation".
pub const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second 8 bytes that the server sends, and the start of each option. Spec, "Newstyle
/// negotiation".
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// Start of each option reply. Spec, "Fixed newstyle negotiation".
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Start of a compact request. Spec, "Compact request message".
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Start of an extended request. Spec, "Extended request message".
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Start of a simple reply. Spec, "Simple reply message".
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Start of a structured reply chunk. Spec, "Structured reply chunk message".
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// Start of an extended reply chunk. Spec, "Extended reply chunk message".
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Bytes of an option header: magic, option, length.
pub const OPTION_HEADER_BYTES: usize = 16;
/// Bytes of the client flags that follow the greeting.
pub const CLIENT_FLAGS_BYTES: usize = 4;
/// Zero bytes after the answer to EXPORT_NAME. Spec, "Newstyle negotiation".
pub const EXPORT_NAME_PADDING_BYTES: usize = 124;
/// Longest name, description or query. Spec, "Values": strings of at most 4096 bytes.
pub const STRING_BYTES_MAX: usize = 4096;

/// Handshake flags, shared by server and client. Spec, "Handshake flags", "Client flags".
pub mod handshake_flag {
    /// Fixed newstyle.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// No padding after EXPORT_NAME.
    pub const NO_ZEROES: u16 = 2;
}

/// Options. Spec, "Option types".
pub mod option {
    /// Choose an export in the old way, which has no error reply.
    pub const EXPORT_NAME: u32 = 1;
    /// End the negotiation.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Continue under TLS.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Describe an export and start transmission.
    pub const GO: u32 = 7;
    /// Use structured replies from here on.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List the metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Select metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use 64-bit lengths in requests and replies.
    pub const EXTENDED_HEADERS: u32 = 11;
    /// An extension of this server, see [`super::ReservationRequest`]. Other servers reply that they do
    /// not know it.
    pub const RESERVATION: u32 = 0x7370_0001;
}

/// Option replies. Spec, "Option reply types".
pub mod option_reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// One export of LIST.
    pub const SERVER: u32 = 2;
    /// One piece of information of INFO or GO.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Unknown option.
    pub const ERR_UNSUP: u32 = (1 << 31) | 1;
    /// Forbidden to this client.
    pub const ERR_POLICY: u32 = (1 << 31) | 2;
    /// Malformed, or not allowed at this time.
    pub const ERR_INVALID: u32 = (1 << 31) | 3;
    /// TLS is required.
    pub const ERR_TLS_REQD: u32 = (1 << 31) | 5;
    /// No such export.
    pub const ERR_UNKNOWN: u32 = (1 << 31) | 6;
    /// The server is stopping.
    pub const ERR_SHUTDOWN: u32 = (1 << 31) | 7;
    /// Too long.
    pub const ERR_TOO_BIG: u32 = (1 << 31) | 9;
    /// Extended headers, which include structured replies, were already negotiated.
    pub const ERR_EXT_HEADER_REQD: u32 = (1 << 31) | 10;
    /// An extension of this server: the attachment of CLAIM was ended, and this client is refused
    /// permanently.
    pub const ERR_FENCED: u32 = (1 << 31) | 0x7370_0001;
}

/// Information types of INFO and GO. Spec, "NBD_OPT_INFO".
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Canonical name.
    pub const NAME: u16 = 1;
    /// Text for a person.
    pub const DESCRIPTION: u16 = 2;
    /// Minimum and preferred block size, largest payload.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags of an export. Spec, "Transmission flags".
pub mod transmission_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1;
    /// Writes fail with EPERM.
    pub const READ_ONLY: u16 = 1 << 1;
    /// FLUSH is supported.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// FUA is honoured.
    pub const SEND_FUA: u16 = 1 << 3;
    /// TRIM is supported.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// WRITE_ZEROES is supported.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// DF is honoured.
    pub const SEND_DF: u16 = 1 << 7;
    /// FLUSH covers all connections.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// RESIZE is supported (branch `extension-resize` of the specification).
    pub const SEND_RESIZE: u16 = 1 << 9;
    /// CACHE is supported.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// FAST_ZERO is honoured.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    /// BLOCK_STATUS accepts a payload.
    pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// Command flags. Spec, "Command flags".
pub mod command_flag {
    /// Write to stable storage before the reply.
    pub const FUA: u16 = 1;
    /// Keep the zeroed range allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Return a single content chunk.
    pub const DF: u16 = 1 << 2;
    /// Return a single extent.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Zero fast or not at all.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// A payload follows the extended header.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Commands. Spec, "Request types".
pub mod command {
    /// Read.
    pub const READ: u16 = 0;
    /// Write; a payload follows.
    pub const WRITE: u16 = 1;
    /// Finish outstanding requests and close; there is no reply.
    pub const DISC: u16 = 2;
    /// Make all answered writes durable.
    pub const FLUSH: u16 = 3;
    /// Drop contents.
    pub const TRIM: u16 = 4;
    /// Prefetch.
    pub const CACHE: u16 = 5;
    /// Zero without a payload.
    pub const WRITE_ZEROES: u16 = 6;
    /// Query the allocation.
    pub const BLOCK_STATUS: u16 = 7;
    /// Change the size (branch `extension-resize` of the specification).
    pub const RESIZE: u16 = 8;
}

/// Types of reply chunks. Spec, "Structured reply types".
pub mod chunk {
    /// Flag of the last chunk of a reply.
    pub const FLAG_DONE: u16 = 1;
    /// No content.
    pub const NONE: u16 = 0;
    /// Offset and bytes.
    pub const OFFSET_DATA: u16 = 1;
    /// Extents with 32-bit lengths.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents with 64-bit lengths.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// Error and message.
    pub const ERROR: u16 = (1 << 15) | 1;
}

/// The only metadata context that is offered. Spec, "The `base:` metadata namespace".
pub const BASE_ALLOCATION: &[u8] = b"base:allocation";
/// Its id on every connection that selected it. Chosen by hand.
pub const BASE_ALLOCATION_ID: u32 = 1;
/// `base:allocation`: nothing is stored.
pub const STATE_HOLE: u32 = 1;
/// `base:allocation`: reads as zeroes.
pub const STATE_ZERO: u32 = 2;

/// An error in the bytes from a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireError {
    /// The magic number is wrong: client and server are out of step.
    Magic,
    /// A length field points outside its container.
    Length,
}

/// Reads fields off the front of a slice. A read past the end is [`WireError::Length`].
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    /// Starts at the front of `bytes`.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Fields(bytes)
    }

    /// Takes the next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (head, tail) = self.0.split_first_chunk::<N>().ok_or(WireError::Length)?;
        self.0 = tail;
        Ok(*head)
    }

    /// Takes the next two bytes.
    pub fn u16(&mut self) -> Result<u16, WireError> {
        self.array().map(u16::from_be_bytes)
    }

    /// Takes the next four bytes.
    pub fn u32(&mut self) -> Result<u32, WireError> {
        self.array().map(u32::from_be_bytes)
    }

    /// Takes the next eight bytes.
    pub fn u64(&mut self) -> Result<u64, WireError> {
        self.array().map(u64::from_be_bytes)
    }

    /// Takes a 32-bit length and that many bytes.
    pub fn string(&mut self) -> Result<&'a [u8], WireError> {
        let length = usize::try_from(self.u32()?).map_err(|_| WireError::Length)?;
        let (head, tail) = self.0.split_at_checked(length).ok_or(WireError::Length)?;
        self.0 = tail;
        Ok(head)
    }

    /// Checks that everything was read.
    pub fn end(self) -> Result<(), WireError> {
        if self.0.is_empty() { Ok(()) } else { Err(WireError::Length) }
    }
}

/// The form of requests and replies on a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// Compact requests, simple replies.
    #[default]
    Simple,
    /// Compact requests, structured replies.
    Structured,
    /// Extended requests and replies.
    Extended,
}

impl Dialect {
    /// Returns the size of a request header in bytes.
    #[must_use]
    pub fn request_header_bytes(self) -> usize {
        match self {
            Dialect::Simple | Dialect::Structured => 28,
            Dialect::Extended => 32,
        }
    }
}

/// Header of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// See [`option`].
    pub option: u32,
    /// Bytes of data that follow.
    pub data_bytes: u32,
}

impl OptionHeader {
    /// Decodes [`OPTION_HEADER_BYTES`].
    pub fn decode(bytes: &[u8; OPTION_HEADER_BYTES]) -> Result<Self, WireError> {
        let mut fields = Fields::new(bytes);
        if fields.u64()? != IHAVEOPT {
            return Err(WireError::Magic);
        }
        Ok(OptionHeader { option: fields.u32()?, data_bytes: fields.u32()? })
    }
}

/// Header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// See [`command_flag`].
    pub flags: u16,
    /// See [`command`].
    pub command: u16,
    /// Identifies the request; the reply repeats it.
    pub cookie: u64,
    /// Bytes from the start of the export.
    pub offset: u64,
    /// Length of the payload or of the affected range, in bytes.
    pub length: u64,
}

impl RequestHeader {
    /// Decodes the first [`Dialect::request_header_bytes`] bytes and ignores the rest.
    pub fn decode(dialect: Dialect, bytes: &[u8]) -> Result<Self, WireError> {
        let mut fields = Fields::new(bytes);
        let magic =
            if dialect == Dialect::Extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        if fields.u32()? != magic {
            return Err(WireError::Magic);
        }
        Ok(RequestHeader {
            flags: fields.u16()?,
            command: fields.u16()?,
            cookie: fields.u64()?,
            offset: fields.u64()?,
            length: match dialect {
                Dialect::Extended => fields.u64()?,
                Dialect::Simple | Dialect::Structured => u64::from(fields.u32()?),
            },
        })
    }
}

/// Data of INFO and GO.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// Name of the export.
    pub name: &'a [u8],
    /// The client asked for the canonical name.
    pub wants_name: bool,
    /// The client asked for the description.
    pub wants_description: bool,
    /// The client asked for the block sizes.
    pub wants_block_size: bool,
}

impl<'a> InfoRequest<'a> {
    /// Decodes the data of an INFO or GO option. Spec, "NBD_OPT_INFO".
    pub fn decode(data: &'a [u8]) -> Result<Self, WireError> {
        let mut fields = Fields::new(data);
        let name = fields.string()?;
        let (mut wants_name, mut wants_description, mut wants_block_size) = (false, false, false);
        for _ in 0..fields.u16()? {
            match fields.u16()? {
                info::NAME => wants_name = true,
                info::DESCRIPTION => wants_description = true,
                info::BLOCK_SIZE => wants_block_size = true,
                _ => {} // the size is always sent; unknown items are not answered
            }
        }
        fields.end()?;
        Ok(InfoRequest { name, wants_name, wants_description, wants_block_size })
    }
}

/// Data of LIST_META_CONTEXT and SET_META_CONTEXT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaRequest<'a> {
    /// Name of the export.
    pub name: &'a [u8],
    /// The client sent queries; LIST without one returns every context.
    pub has_queries: bool,
    /// The client named `base:allocation` in full.
    pub names_allocation: bool,
    /// The client named the namespace `base:`, which only LIST answers.
    pub names_base: bool,
}

impl<'a> MetaRequest<'a> {
    /// Decodes and matches in one pass, so that no query is stored. A query without a colon is an
    /// error (spec, "NBD_OPT_LIST_META_CONTEXT").
    pub fn decode(data: &'a [u8]) -> Result<Self, WireError> {
        let mut fields = Fields::new(data);
        let name = fields.string()?;
        let query_count = fields.u32()?;
        let (mut names_allocation, mut names_base) = (false, false);
        for _ in 0..query_count {
            let query = fields.string()?;
            if query.len() > STRING_BYTES_MAX || !query.contains(&b':') {
                return Err(WireError::Length);
            }
            names_allocation |= query == BASE_ALLOCATION;
            names_base |= query == b"base:";
        }
        fields.end()?;
        Ok(MetaRequest { name, has_queries: query_count > 0, names_allocation, names_base })
    }
}

/// Appends the greeting. Spec, "Newstyle negotiation".
pub fn put_greeting(out: &mut Vec<u8>) {
    out.extend_from_slice(&NBDMAGIC.to_be_bytes());
    out.extend_from_slice(&IHAVEOPT.to_be_bytes());
    let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
    out.extend_from_slice(&flags.to_be_bytes());
}

/// Appends an option reply whose data is the concatenation of `parts`. A total length of 2^32 bytes
/// or more is a programmer error.
pub fn put_option_reply(out: &mut Vec<u8>, option: u32, reply: u32, parts: &[&[u8]]) {
    let data_bytes: usize = parts.iter().map(|part| part.len()).sum();
    let data_bytes =
        u32::try_from(data_bytes).expect("option replies are built here, far below 4 GiB");
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&reply.to_be_bytes());
    out.extend_from_slice(&data_bytes.to_be_bytes());
    for part in parts {
        out.extend_from_slice(part);
    }
}

/// Appends a simple reply; the data of a read follows it. Spec, "Simple reply message".
pub fn put_simple_reply(out: &mut Vec<u8>, error: u32, cookie: u64) {
    out.extend_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&error.to_be_bytes());
    out.extend_from_slice(&cookie.to_be_bytes());
}

/// The request that a chunk answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkOf {
    /// Structured or extended; a connection with simple replies has no chunks.
    pub dialect: Dialect,
    /// The cookie of the request.
    pub cookie: u64,
    /// The offset of the request; extended replies repeat it.
    pub offset: u64,
}

/// Appends the header of a chunk. The caller then appends the payload of `payload_bytes`. Spec,
/// "Structured reply chunk message", "Extended reply chunk message".
pub fn put_chunk_header(
    out: &mut Vec<u8>,
    of: ChunkOf,
    is_done: bool,
    chunk_type: u16,
    payload_bytes: usize,
) {
    let flags: u16 = if is_done { chunk::FLAG_DONE } else { 0 };
    let is_extended = of.dialect == Dialect::Extended;
    let magic = if is_extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
    out.extend_from_slice(&magic.to_be_bytes());
    out.extend_from_slice(&flags.to_be_bytes());
    out.extend_from_slice(&chunk_type.to_be_bytes());
    out.extend_from_slice(&of.cookie.to_be_bytes());
    let length = u32::try_from(payload_bytes).expect("a chunk is at most one payload, 32 MiB");
    if is_extended {
        out.extend_from_slice(&of.offset.to_be_bytes());
        out.extend_from_slice(&u64::from(length).to_be_bytes());
    } else {
        out.extend_from_slice(&length.to_be_bytes());
    }
}

/// Appends an error chunk, the last chunk of its reply. `message` is cut to at most 4096 bytes at a
/// character boundary. Spec, "NBD_REPLY_TYPE_ERROR".
pub fn put_error_chunk(out: &mut Vec<u8>, of: ChunkOf, error: u32, message: &str) {
    let mut end = message.len().min(STRING_BYTES_MAX);
    while !message.is_char_boundary(end) {
        end = end.saturating_sub(1);
    }
    let message = message.get(..end).unwrap_or_default().as_bytes();
    let message_bytes = u16::try_from(message.len()).expect("cut to 4096");
    put_chunk_header(out, of, true, chunk::ERROR, message.len().saturating_add(6));
    out.extend_from_slice(&error.to_be_bytes());
    out.extend_from_slice(&message_bytes.to_be_bytes());
    out.extend_from_slice(message);
}

/// Appends the single chunk that answers BLOCK_STATUS. `extents` are (bytes, state) and not empty.
/// Spec, "NBD_REPLY_TYPE_BLOCK_STATUS", "NBD_REPLY_TYPE_BLOCK_STATUS_EXT".
pub fn put_block_status(out: &mut Vec<u8>, of: ChunkOf, extents: &[(u64, u32)]) {
    let count = u32::try_from(extents.len()).expect("bounded by the extents asked for");
    if of.dialect == Dialect::Extended {
        let payload_bytes = extents.len().saturating_mul(16).saturating_add(8);
        put_chunk_header(out, of, true, chunk::BLOCK_STATUS_EXT, payload_bytes);
        out.extend_from_slice(&BASE_ALLOCATION_ID.to_be_bytes());
        out.extend_from_slice(&count.to_be_bytes());
        for (bytes, state) in extents {
            out.extend_from_slice(&bytes.to_be_bytes());
            out.extend_from_slice(&u64::from(*state).to_be_bytes());
        }
    } else {
        let payload_bytes = extents.len().saturating_mul(8).saturating_add(4);
        put_chunk_header(out, of, true, chunk::BLOCK_STATUS, payload_bytes);
        out.extend_from_slice(&BASE_ALLOCATION_ID.to_be_bytes());
        for (bytes, state) in extents {
            let bytes = u32::try_from(*bytes).expect("clipped to a 32-bit request");
            out.extend_from_slice(&bytes.to_be_bytes());
            out.extend_from_slice(&state.to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests;
