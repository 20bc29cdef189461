//! Numbers of the NBD protocol that the test client uses. Source of all: NetworkBlockDevice/nbd,
//! doc/proto.md, "Values".
//!
//! Invariants:
//! - Integers are big-endian on the wire, as the protocol says.

#![allow(missing_docs, reason = "the names are those of the protocol document")]

pub const MAGIC_NBD: u64 = 0x4e42_444d_4147_4943;
pub const MAGIC_OPTION: u64 = 0x4948_4156_454f_5054;
pub const MAGIC_OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
pub const MAGIC_REQUEST: u32 = 0x2560_9513;
pub const MAGIC_SIMPLE: u32 = 0x6744_6698;
pub const MAGIC_STRUCTURED: u32 = 0x668e_33ef;

pub const MAGIC_EXTENDED_REQUEST: u32 = 0x21e4_1c71;
pub const MAGIC_EXTENDED_REPLY: u32 = 0x6e8a_278c;

pub const FLAG_FIXED_NEWSTYLE: u16 = 1;
pub const FLAG_NO_ZEROES: u16 = 2;

pub const OPT_EXPORT_NAME: u32 = 1;
pub const OPT_ABORT: u32 = 2;
pub const OPT_LIST: u32 = 3;
pub const OPT_STARTTLS: u32 = 5;
pub const OPT_INFO: u32 = 6;
pub const OPT_GO: u32 = 7;
pub const OPT_STRUCTURED_REPLY: u32 = 8;
pub const OPT_SET_META_CONTEXT: u32 = 10;
pub const OPT_EXTENDED_HEADERS: u32 = 11;

pub const REP_ACK: u32 = 1;
pub const REP_SERVER: u32 = 2;
pub const REP_INFO: u32 = 3;
pub const REP_META_CONTEXT: u32 = 4;
pub const REP_ERROR: u32 = 1 << 31;
pub const REP_ERR_UNSUP: u32 = REP_ERROR + 1;
pub const REP_ERR_POLICY: u32 = REP_ERROR + 2;
pub const REP_ERR_INVALID: u32 = REP_ERROR + 3;
pub const REP_ERR_TLS_REQD: u32 = REP_ERROR + 5;
pub const REP_ERR_UNKNOWN: u32 = REP_ERROR + 6;

pub const INFO_EXPORT: u16 = 0;
pub const INFO_BLOCK_SIZE: u16 = 3;

pub const CAN_FLUSH: u16 = 1 << 2;
pub const CAN_FUA: u16 = 1 << 3;
pub const CAN_TRIM: u16 = 1 << 5;
pub const CAN_WRITE_ZEROES: u16 = 1 << 6;
pub const CAN_DF: u16 = 1 << 7;
pub const CAN_MULTI_CONN: u16 = 1 << 8;
/// Branch `extension-resize` of the protocol document.
pub const CAN_RESIZE: u16 = 1 << 9;
pub const CAN_CACHE: u16 = 1 << 10;
pub const CAN_FAST_ZERO: u16 = 1 << 11;
pub const IS_READ_ONLY: u16 = 1 << 1;

pub const CMD_READ: u16 = 0;
pub const CMD_WRITE: u16 = 1;
pub const CMD_DISC: u16 = 2;
pub const CMD_FLUSH: u16 = 3;
pub const CMD_TRIM: u16 = 4;
pub const CMD_CACHE: u16 = 5;
pub const CMD_WRITE_ZEROES: u16 = 6;
pub const CMD_BLOCK_STATUS: u16 = 7;
/// Branch `extension-resize` of the protocol document: the offset carries the size.
pub const CMD_RESIZE: u16 = 8;

pub const CMD_FLAG_FUA: u16 = 1;
pub const CMD_FLAG_NO_HOLE: u16 = 2;
pub const CMD_FLAG_DF: u16 = 4;
pub const CMD_FLAG_REQ_ONE: u16 = 8;
pub const CMD_FLAG_FAST_ZERO: u16 = 16;
pub const CMD_FLAG_PAYLOAD_LEN: u16 = 32;

pub const CHUNK_DONE: u16 = 1;
pub const CHUNK_NONE: u16 = 0;
pub const CHUNK_OFFSET_DATA: u16 = 1;
pub const CHUNK_OFFSET_HOLE: u16 = 2;
pub const CHUNK_BLOCK_STATUS: u16 = 5;
pub const CHUNK_BLOCK_STATUS_EXT: u16 = 6;
pub const CHUNK_ERROR: u16 = (1 << 15) + 1;
pub const CHUNK_ERROR_OFFSET: u16 = (1 << 15) + 2;

pub const STATE_HOLE: u64 = 1;
pub const STATE_ZERO: u64 = 2;

pub const EPERM: u32 = 1;
pub const EIO: u32 = 5;
pub const ENOMEM: u32 = 12;
pub const EINVAL: u32 = 22;
pub const ENOSPC: u32 = 28;
pub const EOVERFLOW: u32 = 75;
pub const ENOTSUP: u32 = 95;
pub const ESHUTDOWN: u32 = 108;

/// Bytes of a compact request header.
pub const REQUEST_BYTES: usize = 28;

/// Builds a compact request header.
#[must_use]
pub fn request(command: u16, flags: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(REQUEST_BYTES);
    bytes.extend_from_slice(&MAGIC_REQUEST.to_be_bytes());
    bytes.extend_from_slice(&flags.to_be_bytes());
    bytes.extend_from_slice(&command.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes.extend_from_slice(&offset.to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes
}

/// Builds an extended request header. The caller sets the flag that announces a payload.
#[must_use]
pub fn extended_request(
    command: u16,
    flags: u16,
    cookie: u64,
    offset: u64,
    length: u64,
) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(REQUEST_BYTES + 4);
    bytes.extend_from_slice(&MAGIC_EXTENDED_REQUEST.to_be_bytes());
    bytes.extend_from_slice(&flags.to_be_bytes());
    bytes.extend_from_slice(&command.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes.extend_from_slice(&offset.to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes
}
