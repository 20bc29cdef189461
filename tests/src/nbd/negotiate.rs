//! The handshake, in steps that a test can take in any order and get wrong on purpose.
//!
//! Invariants:
//! - The magic numbers and lengths that the server sends are checked here, in one place.

use super::transport::{Stream, TlsClient, take, take_array};
use super::wire::*;
use std::io::{self, Write};

/// The features that a connection should negotiate.
#[derive(Clone, Default)]
pub struct Wanted {
    /// Structured replies; simple ones if the server does not have them.
    pub is_structured: bool,
    /// The `base:allocation` context, which needs structured replies.
    pub is_allocation: bool,
    /// Extended headers, which include structured replies. The connection fails if the server does
    /// not have them.
    pub is_extended: bool,
    /// TLS before any other option.
    pub tls: Option<TlsClient>,
}

impl Wanted {
    /// Asks for structured replies and allocation.
    #[must_use]
    pub fn everything() -> Wanted {
        Wanted { is_structured: true, is_allocation: true, ..Wanted::default() }
    }

    /// Asks for these and for extended headers.
    #[must_use]
    pub fn extended() -> Wanted {
        Wanted { is_extended: true, ..Wanted::everything() }
    }
}

/// The server's description of the export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportInfo {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Transmission flags (`CAN_…`).
    pub flags: u16,
    /// Minimum, preferred and maximum block size in bytes, if the server has sent them.
    pub block_sizes: Option<(u32, u32, u32)>,
}

/// One reply to an option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptionReply {
    /// `REP_…`.
    pub kind: u32,
    /// Its bytes.
    pub payload: Vec<u8>,
}

/// A stream in the option phase.
pub struct Haggle {
    /// The stream; a test may write garbage to it.
    pub stream: Stream,
}

/// Makes the error for a server that breaks the protocol.
pub fn wrong(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

impl Haggle {
    /// Reads the greeting and answers with fixed newstyle and no zeroes.
    ///
    /// # Errors
    /// When the server does not offer fixed newstyle, or the stream breaks.
    pub fn greet(mut stream: Stream) -> io::Result<Haggle> {
        let magic = u64::from_be_bytes(take_array(&mut stream)?);
        let option = u64::from_be_bytes(take_array(&mut stream)?);
        let flags = u16::from_be_bytes(take_array(&mut stream)?);
        if magic != MAGIC_NBD || option != MAGIC_OPTION {
            return Err(wrong(format!("greeting {magic:#x} {option:#x}")));
        }
        if flags & (FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES) != 3 {
            return Err(wrong(format!("handshake flags {flags:#x}")));
        }
        stream.write_all(&u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes())?;
        Ok(Haggle { stream })
    }

    /// Sends an option.
    ///
    /// # Errors
    /// When the stream breaks.
    pub fn send(&mut self, option: u32, payload: &[u8]) -> io::Result<()> {
        let mut bytes = MAGIC_OPTION.to_be_bytes().to_vec();
        bytes.extend_from_slice(&option.to_be_bytes());
        bytes.extend_from_slice(&u32::try_from(payload.len()).expect("small").to_be_bytes());
        bytes.extend_from_slice(payload);
        self.stream.write_all(&bytes)
    }

    /// Receives one reply, which must be to `option`.
    ///
    /// # Errors
    /// When the server breaks the format, or the stream breaks.
    pub fn reply(&mut self, option: u32) -> io::Result<OptionReply> {
        let magic = u64::from_be_bytes(take_array(&mut self.stream)?);
        let echoed = u32::from_be_bytes(take_array(&mut self.stream)?);
        let kind = u32::from_be_bytes(take_array(&mut self.stream)?);
        let length = u32::from_be_bytes(take_array(&mut self.stream)?);
        if magic != MAGIC_OPTION_REPLY || echoed != option || length > 1 << 20 {
            return Err(wrong(format!("option reply {magic:#x} to {echoed} of {length} bytes")));
        }
        let payload = take(&mut self.stream, usize::try_from(length).expect("bounded"))?;
        Ok(OptionReply { kind, payload })
    }

    /// Sends an option and collects its replies up to the acknowledgement or an error.
    ///
    /// # Errors
    /// Those of [`Haggle::reply`].
    pub fn ask(&mut self, option: u32, payload: &[u8]) -> io::Result<Vec<OptionReply>> {
        self.send(option, payload)?;
        let mut replies = Vec::new();
        loop {
            let reply = self.reply(option)?;
            let is_last = reply.kind == REP_ACK || reply.kind & REP_ERROR != 0;
            replies.push(reply);
            if is_last {
                return Ok(replies);
            }
        }
    }

    /// Asks for TLS and continues the option phase under it.
    ///
    /// # Errors
    /// When the server refuses, or the handshake fails.
    pub fn start_tls(mut self, tls: &TlsClient) -> io::Result<Haggle> {
        let replies = self.ask(OPT_STARTTLS, &[])?;
        if replies.last().map(|reply| reply.kind) != Some(REP_ACK) {
            return Err(wrong(format!("STARTTLS answered {replies:?}")));
        }
        Ok(Haggle { stream: self.stream.start_tls(tls)? })
    }

    /// Lists the names of the exports.
    ///
    /// # Errors
    /// When the server refuses or breaks the format.
    pub fn list(&mut self) -> io::Result<Vec<String>> {
        let mut replies = self.ask(OPT_LIST, &[])?;
        let last = replies.pop().expect("there is a last reply");
        if last.kind != REP_ACK {
            return Err(wrong(format!("LIST answered {last:?}")));
        }
        let name_of = |reply: OptionReply| {
            let length = reply.payload.first_chunk().map(|bytes| u32::from_be_bytes(*bytes));
            let length = usize::try_from(length.ok_or_else(|| wrong("short SERVER reply"))?);
            let name = length.ok().and_then(|length| reply.payload.get(4..4 + length));
            let name = name.ok_or_else(|| wrong("short SERVER reply"))?;
            String::from_utf8(name.to_vec()).map_err(|_| wrong("a name that is not UTF-8"))
        };
        replies.into_iter().map(name_of).collect()
    }

    /// Sends `GO` (or `INFO`) for an export and asks for block sizes. A refusal returns the error
    /// kind.
    ///
    /// # Errors
    /// When the stream breaks or the server breaks the format; a refusal is `Ok(Err(kind))`.
    pub fn open(&mut self, option: u32, export: &str) -> io::Result<Result<ExportInfo, u32>> {
        let replies = self.ask(option, &open_payload(export, &[INFO_BLOCK_SIZE]))?;
        let mut info = None;
        let mut block_sizes = None;
        for reply in replies {
            match reply.kind {
                REP_INFO => match u16::from_be_bytes(at(&reply.payload, 0)?) {
                    INFO_EXPORT => {
                        let size_bytes = u64::from_be_bytes(at(&reply.payload, 2)?);
                        let flags = u16::from_be_bytes(at(&reply.payload, 10)?);
                        info = Some(ExportInfo { size_bytes, flags, block_sizes: None });
                    }
                    INFO_BLOCK_SIZE => {
                        let size = |index| at(&reply.payload, index).map(u32::from_be_bytes);
                        block_sizes = Some((size(2)?, size(6)?, size(10)?));
                    }
                    _ => {}
                },
                REP_ACK => {
                    let info = info.ok_or_else(|| wrong("no INFO_EXPORT before the end"))?;
                    return Ok(Ok(ExportInfo { block_sizes, ..info }));
                }
                kind => return Ok(Err(kind)),
            }
        }
        Err(wrong("no last reply"))
    }

    /// Asks for structured replies; returns whether the server has them.
    ///
    /// # Errors
    /// When the stream breaks or the server breaks the format.
    pub fn structured(&mut self) -> io::Result<bool> {
        let replies = self.ask(OPT_STRUCTURED_REPLY, &[])?;
        Ok(replies.last().map(|reply| reply.kind) == Some(REP_ACK))
    }

    /// Asks for extended headers.
    ///
    /// # Errors
    /// When the server does not have them or breaks the format, or the stream breaks.
    pub fn extended(&mut self) -> io::Result<()> {
        match self.ask(OPT_EXTENDED_HEADERS, &[])?.last() {
            Some(OptionReply { kind: REP_ACK, payload }) if payload.is_empty() => Ok(()),
            last => Err(wrong(format!("EXTENDED_HEADERS answered {last:?}"))),
        }
    }

    /// Selects `base:allocation`; returns its id if the server has it.
    ///
    /// # Errors
    /// When the stream breaks or the server breaks the format.
    pub fn allocation(&mut self, export: &str) -> io::Result<Option<u32>> {
        let context = b"base:allocation";
        let mut payload = length_of(export.len());
        payload.extend_from_slice(export.as_bytes());
        payload.extend_from_slice(&1u32.to_be_bytes());
        payload.extend_from_slice(&length_of(context.len()));
        payload.extend_from_slice(context);
        let replies = self.ask(OPT_SET_META_CONTEXT, &payload)?;
        for reply in &replies {
            if reply.kind == REP_META_CONTEXT {
                if reply.payload.get(4..) != Some(context) {
                    return Err(wrong(format!("another context: {reply:?}")));
                }
                return Ok(Some(u32::from_be_bytes(at(&reply.payload, 0)?)));
            }
        }
        Ok(None)
    }
}

/// Builds the payload of `GO` and `INFO`.
#[must_use]
pub fn open_payload(export: &str, infos: &[u16]) -> Vec<u8> {
    let mut payload = length_of(export.len());
    payload.extend_from_slice(export.as_bytes());
    payload.extend_from_slice(&u16::try_from(infos.len()).expect("few").to_be_bytes());
    for info in infos {
        payload.extend_from_slice(&info.to_be_bytes());
    }
    payload
}

fn length_of(length: usize) -> Vec<u8> {
    u32::try_from(length).expect("small").to_be_bytes().to_vec()
}

/// Returns `N` bytes of a payload.
pub(super) fn at<const N: usize>(bytes: &[u8], index: usize) -> io::Result<[u8; N]> {
    let part = bytes.get(index..index + N).and_then(|part| part.try_into().ok());
    part.ok_or_else(|| wrong(format!("reply of {} bytes is too short", bytes.len())))
}
