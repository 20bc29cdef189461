//! One connection in the transmission phase, with any number of requests in flight.
//!
//! Invariants:
//! - The owner submits and receives on one thread. A reply names its request.
//! - A reply to a request that was not sent, an overlapping or missing read chunk, and any length
//!   that does not fit are errors.
//! - Replies that the server sent before it died are still received: they were acknowledged.

use super::negotiate::{ExportInfo, Haggle, Wanted, at, wrong};
use super::transport::{Endpoint, Stream, take, take_array};
use super::wire::*;
use std::collections::HashMap;
use std::io::{self, BufReader, Write};
use std::time::Duration;

/// The answer to one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// The request's cookie.
    pub cookie: u64,
    /// 0 or an NBD error number.
    pub error: u32,
    /// The bytes that were read.
    pub payload: Vec<u8>,
    /// Runs of (bytes, `STATE_…` flags).
    pub extents: Vec<(u64, u64)>,
    /// Chunks of the reply.
    pub chunk_count: u32,
}

struct Pending {
    command: u16,
    offset: u64,
    reply: Reply,
    received: Vec<(usize, usize)>,
}

/// A connection to one export.
pub struct Connection {
    stream: BufReader<Stream>,
    info: ExportInfo,
    is_structured: bool,
    is_extended: bool,
    allocation: Option<u32>,
    next_cookie: u64,
    pending: HashMap<u64, Pending>,
}

impl Connection {
    /// Connects and negotiates.
    ///
    /// # Errors
    /// When the stream breaks, the server breaks the protocol, or it refuses the export.
    pub fn open(endpoint: &Endpoint, wanted: &Wanted) -> io::Result<Connection> {
        Connection::negotiate(endpoint.connect()?, endpoint, wanted)
    }

    /// Like [`Connection::open`]. Each wait for the server lasts at most this long, later ones too.
    ///
    /// # Errors
    /// Those of [`Connection::open`].
    pub fn open_within(
        timeout: Duration,
        endpoint: &Endpoint,
        wanted: &Wanted,
    ) -> io::Result<Connection> {
        Connection::negotiate(endpoint.connect_within(timeout)?, endpoint, wanted)
    }

    fn negotiate(stream: Stream, endpoint: &Endpoint, wanted: &Wanted) -> io::Result<Connection> {
        let mut haggle = Haggle::greet(stream)?;
        if let Some(tls) = &wanted.tls {
            haggle = haggle.start_tls(tls)?;
        }
        if wanted.is_extended {
            haggle.extended()?;
        }
        let is_structured = wanted.is_extended || (wanted.is_structured && haggle.structured()?);
        let allocation = if is_structured && wanted.is_allocation {
            haggle.allocation(&endpoint.export)?
        } else {
            None
        };
        let info = haggle.open(OPT_GO, &endpoint.export)?.map_err(|kind| {
            wrong(format!("the server refuses export {:?}: {kind:#x}", endpoint.export))
        })?;
        Ok(Connection {
            stream: BufReader::with_capacity(256 << 10, haggle.stream),
            info,
            is_structured,
            is_extended: wanted.is_extended,
            allocation,
            next_cookie: 1,
            pending: HashMap::new(),
        })
    }

    /// Returns the server's description of the export.
    #[must_use]
    pub fn info(&self) -> ExportInfo {
        self.info
    }

    /// Whether block status can be asked for.
    #[must_use]
    pub fn has_allocation(&self) -> bool {
        self.allocation.is_some()
    }

    /// Whether replies are structured.
    #[must_use]
    pub fn is_structured(&self) -> bool {
        self.is_structured
    }

    /// Whether headers are extended.
    #[must_use]
    pub fn is_extended(&self) -> bool {
        self.is_extended
    }

    /// Builds a request header of this connection's kind.
    #[must_use]
    pub fn header(
        &self,
        command: u16,
        flags: u16,
        cookie: u64,
        offset: u64,
        length: u64,
    ) -> Vec<u8> {
        if !self.is_extended {
            let length = u32::try_from(length).expect("lengths of compact headers have 32 bits");
            return request(command, flags, cookie, offset, length);
        }
        let announces = if command == CMD_WRITE { CMD_FLAG_PAYLOAD_LEN } else { 0 };
        extended_request(command, flags | announces, cookie, offset, length)
    }

    /// Returns the number of requests that are not answered yet.
    #[must_use]
    pub fn pending_count(&self) -> usize {
        self.pending.len()
    }

    /// Sends a request and returns its cookie. `payload` belongs to `CMD_WRITE` only.
    ///
    /// # Errors
    /// When the stream breaks; the request may have reached the server nevertheless.
    pub fn submit(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        length: u32,
        payload: &[u8],
    ) -> io::Result<u64> {
        self.submit_long(command, flags, offset, u64::from(length), payload)
    }

    /// Like [`Connection::submit`], but a length of more than 32 bits needs extended headers.
    ///
    /// # Errors
    /// Those of [`Connection::submit`].
    pub fn submit_long(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        length: u64,
        payload: &[u8],
    ) -> io::Result<u64> {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let is_read = command == CMD_READ;
        let bytes = if is_read { usize::try_from(length).expect("64 bits fit") } else { 0 };
        let reply = Reply { cookie, payload: vec![0; bytes], ..Reply::default() };
        self.pending.insert(cookie, Pending { command, offset, reply, received: Vec::new() });
        let mut bytes = self.header(command, flags, cookie, offset, length);
        bytes.extend_from_slice(payload);
        self.stream.get_mut().write_all(&bytes)?;
        Ok(cookie)
    }

    /// Waits for the next complete reply, to any request.
    ///
    /// # Errors
    /// When the stream ends or breaks, or the server breaks the protocol (`InvalidData`).
    pub fn receive(&mut self) -> io::Result<Reply> {
        loop {
            let done = match u32::from_be_bytes(take_array(&mut self.stream)?) {
                MAGIC_SIMPLE if !self.is_extended => Some(self.receive_simple()?),
                MAGIC_STRUCTURED if self.is_structured && !self.is_extended => {
                    self.receive_chunk()?
                }
                MAGIC_EXTENDED_REPLY if self.is_extended => self.receive_chunk()?,
                magic => return Err(wrong(format!("reply magic {magic:#x}"))),
            };
            if let Some(cookie) = done {
                let pending = self.pending.remove(&cookie).expect("looked up just before");
                return complete(pending);
            }
        }
    }

    /// Sends one request and waits for its reply.
    ///
    /// # Errors
    /// Those of [`Connection::receive`], and when another request is in flight.
    pub fn call(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        length: u32,
        payload: &[u8],
    ) -> io::Result<Reply> {
        self.call_long(command, flags, offset, u64::from(length), payload)
    }

    /// Like [`Connection::call`], but a length of more than 32 bits needs extended headers.
    ///
    /// # Errors
    /// Those of [`Connection::call`].
    pub fn call_long(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        length: u64,
        payload: &[u8],
    ) -> io::Result<Reply> {
        assert!(self.pending.is_empty(), "call is for one request at a time");
        self.submit_long(command, flags, offset, length, payload)?;
        self.receive()
    }

    /// Writes and insists on success.
    pub fn write(&mut self, offset: u64, payload: &[u8], flags: u16) {
        let length = u32::try_from(payload.len()).expect("a payload fits 32 bits");
        let reply = self.call(CMD_WRITE, flags, offset, length, payload);
        expect_success("write", offset, reply);
    }

    /// Reads and insists on success.
    pub fn read(&mut self, offset: u64, length: u32) -> Vec<u8> {
        expect_success("read", offset, self.call(CMD_READ, 0, offset, length, &[])).payload
    }

    /// Flushes and insists on success.
    pub fn flush(&mut self) {
        expect_success("flush", 0, self.call(CMD_FLUSH, 0, 0, 0, &[]));
    }

    /// Trims and insists on success.
    pub fn trim(&mut self, offset: u64, length: u32) {
        expect_success("trim", offset, self.call(CMD_TRIM, 0, offset, length, &[]));
    }

    /// Writes zeroes and insists on success.
    pub fn write_zeroes(&mut self, offset: u64, length: u32, flags: u16) {
        let reply = self.call(CMD_WRITE_ZEROES, flags, offset, length, &[]);
        expect_success("write zeroes", offset, reply);
    }

    /// Ends the session in good order, so that the server does not log a lost connection.
    ///
    /// # Errors
    /// When the stream breaks.
    pub fn disconnect(mut self) -> io::Result<()> {
        let goodbye = self.header(CMD_DISC, 0, 0, 0, 0);
        self.stream.get_mut().write_all(&goodbye)?;
        // The server closes the connection once it has answered all requests.
        match take_array::<1>(&mut self.stream) {
            Ok(_) => Err(wrong("bytes after the last reply")),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Err(wrong("the connection stays open after a goodbye"))
            }
            Err(_) => Ok(()),
        }
    }

    /// Returns the raw stream, for tests that send garbage.
    pub fn stream(&mut self) -> &mut Stream {
        self.stream.get_mut()
    }

    fn receive_simple(&mut self) -> io::Result<u64> {
        let error = u32::from_be_bytes(take_array(&mut self.stream)?);
        let cookie = u64::from_be_bytes(take_array(&mut self.stream)?);
        let pending = lookup(&mut self.pending, cookie)?;
        if pending.command == CMD_READ && self.is_structured {
            return Err(wrong("a simple reply to a read after structured ones were agreed on"));
        }
        pending.reply.error = error;
        if pending.command == CMD_READ && error == 0 {
            let length = pending.reply.payload.len();
            pending.reply.payload = take(&mut self.stream, length)?;
            pending.received.push((0, length));
        }
        Ok(cookie)
    }

    fn receive_chunk(&mut self) -> io::Result<Option<u64>> {
        let flags = u16::from_be_bytes(take_array(&mut self.stream)?);
        let kind = u16::from_be_bytes(take_array(&mut self.stream)?);
        let cookie = u64::from_be_bytes(take_array(&mut self.stream)?);
        let offset = if self.is_extended {
            Some(u64::from_be_bytes(take_array(&mut self.stream)?))
        } else {
            None
        };
        let length = if self.is_extended {
            u64::from_be_bytes(take_array(&mut self.stream)?)
        } else {
            u64::from(u32::from_be_bytes(take_array(&mut self.stream)?))
        };
        if length > 65 << 20 {
            return Err(wrong(format!("a chunk of {length} bytes")));
        }
        let bytes = take(&mut self.stream, usize::try_from(length).expect("bounded"))?;
        let allocation = self.allocation;
        let pending = lookup(&mut self.pending, cookie)?;
        pending.reply.chunk_count += 1;
        // "Extended reply chunk message": the offset is the request's.
        if offset.is_some_and(|offset| offset != pending.offset) {
            return Err(wrong(format!("chunk for offset {offset:?}, asked at {}", pending.offset)));
        }
        match kind {
            CHUNK_NONE if bytes.is_empty() && flags & CHUNK_DONE != 0 => {}
            CHUNK_OFFSET_DATA => {
                let offset = u64::from_be_bytes(at(&bytes, 0)?);
                pending.place(offset, bytes.len() - 8, Some(&bytes[8..]))?;
            }
            CHUNK_OFFSET_HOLE => {
                let offset = u64::from_be_bytes(at(&bytes, 0)?);
                let hole = u32::from_be_bytes(at(&bytes, 8)?);
                pending.place(offset, usize::try_from(hole).expect("32 bits fit"), None)?;
            }
            // Each kind of headers has its own chunk.
            CHUNK_BLOCK_STATUS | CHUNK_BLOCK_STATUS_EXT
                if self.is_extended == (kind == CHUNK_BLOCK_STATUS_EXT) =>
            {
                let context = u32::from_be_bytes(at(&bytes, 0)?);
                if pending.command != CMD_BLOCK_STATUS || Some(context) != allocation {
                    return Err(wrong(format!("block status of context {context}")));
                }
                pending.reply.extents.extend(extents_of(&bytes, self.is_extended)?);
            }
            CHUNK_ERROR | CHUNK_ERROR_OFFSET => {
                let error = u32::from_be_bytes(at(&bytes, 0)?);
                let message = u16::from_be_bytes(at(&bytes, 4)?);
                let rest = bytes.len() - 6 - usize::from(message);
                if error == 0 || rest != if kind == CHUNK_ERROR { 0 } else { 8 } {
                    return Err(wrong(format!("error chunk {error} of {} bytes", bytes.len())));
                }
                pending.reply.error = error;
            }
            _ => return Err(wrong(format!("chunk kind {kind} flags {flags}"))),
        }
        Ok((flags & CHUNK_DONE != 0).then_some(cookie))
    }
}

impl Pending {
    /// Puts a piece of a read into its place; `None` is a hole.
    fn place(&mut self, offset: u64, length: usize, bytes: Option<&[u8]>) -> io::Result<()> {
        let start = offset.checked_sub(self.offset).and_then(|start| usize::try_from(start).ok());
        let range = start.and_then(|start| Some(start..start.checked_add(length)?));
        let target = range.clone().and_then(|range| self.reply.payload.get_mut(range));
        let (Some(target), Some(range)) = (target, range) else {
            return Err(wrong(format!("read chunk {offset}+{length} outside of the request")));
        };
        if self.command != CMD_READ || length == 0 {
            return Err(wrong(format!("read chunk of {length} bytes to {}", self.command)));
        }
        if self.received.iter().any(|(start, end)| range.start < *end && *start < range.end) {
            return Err(wrong(format!("read chunk {offset}+{length} overlaps another")));
        }
        match bytes {
            Some(bytes) => target.copy_from_slice(bytes),
            None => target.fill(0),
        }
        self.received.push((range.start, range.end));
        Ok(())
    }
}

/// Decodes the extents of a block status: 8 bytes each after 4 bytes, or with extended headers 16
/// bytes each after 8 bytes, which include their number.
fn extents_of(bytes: &[u8], is_extended: bool) -> io::Result<Vec<(u64, u64)>> {
    let (head_bytes, extent_bytes) = if is_extended { (8, 16) } else { (4, 8) };
    let extents = bytes.get(head_bytes..).unwrap_or_default();
    if extents.is_empty() || !extents.len().is_multiple_of(extent_bytes) {
        return Err(wrong(format!("block status of {} bytes", bytes.len())));
    }
    let extents: Vec<(u64, u64)> = extents
        .chunks(extent_bytes)
        .map(|extent| match is_extended {
            true => Ok((u64::from_be_bytes(at(extent, 0)?), u64::from_be_bytes(at(extent, 8)?))),
            false => {
                let half = |index| at(extent, index).map(u32::from_be_bytes).map(u64::from);
                Ok((half(0)?, half(4)?))
            }
        })
        .collect::<io::Result<_>>()?;
    if is_extended {
        let count = usize::try_from(u32::from_be_bytes(at(bytes, 4)?)).expect("32 bits fit");
        if count != extents.len() {
            return Err(wrong(format!("{} extents, announced as {count}", extents.len())));
        }
    }
    Ok(extents)
}

fn lookup(pending: &mut HashMap<u64, Pending>, cookie: u64) -> io::Result<&mut Pending> {
    pending.get_mut(&cookie).ok_or_else(|| wrong(format!("a reply to unknown cookie {cookie}")))
}

fn complete(pending: Pending) -> io::Result<Reply> {
    let received: usize = pending.received.iter().map(|(start, end)| end - start).sum();
    let reply = pending.reply;
    if reply.error == 0 && received != reply.payload.len() {
        return Err(wrong(format!("{received} of {} bytes were sent", reply.payload.len())));
    }
    Ok(reply)
}

#[track_caller]
fn expect_success(what: &str, offset: u64, reply: io::Result<Reply>) -> Reply {
    match reply {
        Ok(reply) if reply.error == 0 => reply,
        Ok(reply) => panic!("{what} at {offset}: NBD error {}", reply.error),
        Err(error) => panic!("{what} at {offset}: {error}"),
    }
}
