//! A client with its own encoder, so that tests can send requests that no normal client would.
//!
//! Invariants:
//! - Every reply is checked against the rules of the specification while it is read.

use nbd::wire::{self, Dialect, command_flag, option, option_reply};
use std::collections::HashMap;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

pub trait Socket: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Socket for S {}

/// Longest wait for a reply.
const PATIENCE: Duration = Duration::from_secs(20);

pub struct Client {
    pub socket: Box<dyn Socket>,
    pub dialect: Dialect,
    pub has_allocation: bool,
    pub size_bytes: u64,
    pub flags: u16,
    cookie: u64,
    /// Ranges of the reads in flight, because a simple reply does not contain its length.
    reads: HashMap<u64, (u64, u64)>,
    replies: HashMap<u64, Reply>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    pub error: u32,
    pub message: String,
    /// (offset, bytes) of each content chunk.
    pub contents: Vec<(u64, Vec<u8>)>,
    pub extents: Vec<(u64, u64)>,
    is_done: bool,
}

impl Reply {
    pub fn bytes(mut self) -> Vec<u8> {
        assert_eq!(self.error, 0, "{}", self.message);
        self.contents.sort();
        let mut bytes = Vec::new();
        let start = self.contents.first().map_or(0, |first| first.0);
        for (offset, content) in self.contents {
            assert_eq!(offset, start + bytes.len() as u64, "a gap or an overlap");
            bytes.extend_from_slice(&content);
        }
        bytes
    }
}

pub fn named(name: &str, rest: &[u8]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend_from_slice(name.as_bytes());
    data.extend_from_slice(rest);
    data
}

impl Client {
    /// Reads the greeting and sends the client flags.
    pub async fn greet(socket: impl Socket + 'static) -> Self {
        let mut client = Self::over(socket);
        let mut greeting = [0; 18];
        client.socket.read_exact(&mut greeting).await.unwrap();
        assert_eq!(greeting[..16], *b"NBDMAGICIHAVEOPT");
        assert_eq!(greeting[16..], [0, 3]);
        client.socket.write_all(&3u32.to_be_bytes()).await.unwrap();
        client
    }

    /// Wraps a socket whose greeting is over.
    pub fn over(socket: impl Socket + 'static) -> Self {
        Client {
            socket: Box::new(socket),
            dialect: Dialect::Simple,
            has_allocation: false,
            size_bytes: 0,
            flags: 0,
            cookie: 0,
            reads: HashMap::new(),
            replies: HashMap::new(),
        }
    }

    pub async fn send_option(&mut self, option: u32, data: &[u8]) {
        let mut bytes = wire::IHAVEOPT.to_be_bytes().to_vec();
        bytes.extend_from_slice(&option.to_be_bytes());
        bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
        bytes.extend_from_slice(data);
        self.socket.write_all(&bytes).await.unwrap();
        self.socket.flush().await.unwrap(); // TLS buffers bytes that the socket did not take
    }

    /// Sends an option and returns the type of the final reply, and the replies before it.
    pub async fn option(&mut self, option: u32, data: &[u8]) -> (u32, Vec<(u32, Vec<u8>)>) {
        self.send_option(option, data).await;
        let mut before = Vec::new();
        loop {
            let mut header = [0; 20];
            self.read(&mut header).await;
            assert_eq!(header[..8], wire::OPTION_REPLY_MAGIC.to_be_bytes());
            assert_eq!(header[8..12], option.to_be_bytes());
            let kind = u32::from_be_bytes(header[12..16].try_into().unwrap());
            let length = u32::from_be_bytes(header[16..].try_into().unwrap());
            let mut data = vec![0; length as usize];
            self.read(&mut data).await;
            if kind == option_reply::ACK || kind & (1 << 31) != 0 {
                return (kind, before);
            }
            before.push((kind, data));
        }
    }

    async fn read(&mut self, to: &mut [u8]) {
        let read = tokio::time::timeout(PATIENCE, self.socket.read_exact(to)).await;
        read.expect("no reply in time").expect("the server closed the connection");
    }

    /// Whether the server closes within `limit`, after any number of bytes.
    pub async fn is_closed_within(&mut self, limit: Duration) -> bool {
        let mut buffer = vec![0; 64 << 10];
        let drain = async {
            while matches!(self.socket.read(&mut buffer).await, Ok(count) if count > 0) {}
        };
        tokio::time::timeout(limit, drain).await.is_ok()
    }

    /// Whether the server closes within `limit`, before any byte.
    pub async fn is_closed_unanswered_within(&mut self, limit: Duration) -> bool {
        let read = tokio::time::timeout(limit, self.socket.read(&mut [0])).await;
        // Requests that the server has not read make the end a reset.
        matches!(read, Ok(Ok(0) | Err(_)))
    }

    /// Negotiates `dialect`, then `base:allocation` if the dialect has it, then GO.
    pub async fn go(mut self, name: &str, dialect: Dialect) -> Self {
        match dialect {
            Dialect::Simple => {}
            Dialect::Structured => {
                let (kind, _) = self.option(option::STRUCTURED_REPLY, &[]).await;
                assert_eq!(kind, option_reply::ACK);
            }
            Dialect::Extended => {
                let (kind, _) = self.option(option::EXTENDED_HEADERS, &[]).await;
                assert_eq!(kind, option_reply::ACK);
            }
        }
        if dialect != Dialect::Simple {
            let query = named("base:allocation", &[]);
            let rest = [&1u32.to_be_bytes()[..], &query].concat();
            let (kind, contexts) = self.option(option::SET_META_CONTEXT, &named(name, &rest)).await;
            assert_eq!((kind, contexts.len()), (option_reply::ACK, 1));
            self.has_allocation = true;
        }
        let (kind, infos) = self.option(option::GO, &named(name, &[0, 0])).await;
        assert_eq!(kind, option_reply::ACK);
        let export = &infos[0].1;
        self.size_bytes = u64::from_be_bytes(export[2..10].try_into().unwrap());
        self.flags = u16::from_be_bytes(export[10..12].try_into().unwrap());
        self.dialect = dialect;
        self
    }

    /// Encodes the header of a request.
    pub fn header(&self, flags: u16, command: u16, cookie: u64, at: u64, length: u64) -> Vec<u8> {
        let is_extended = self.dialect == Dialect::Extended;
        let magic = if is_extended { wire::EXTENDED_REQUEST_MAGIC } else { wire::REQUEST_MAGIC };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend_from_slice(&flags.to_be_bytes());
        bytes.extend_from_slice(&command.to_be_bytes());
        bytes.extend_from_slice(&cookie.to_be_bytes());
        bytes.extend_from_slice(&at.to_be_bytes());
        match is_extended {
            true => bytes.extend_from_slice(&length.to_be_bytes()),
            false => bytes.extend_from_slice(&(length as u32).to_be_bytes()),
        }
        bytes
    }

    /// Sends a request without waiting, and returns its cookie. `payload` is only for requests with
    /// one.
    pub async fn send(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        length: u64,
        payload: &[u8],
    ) -> u64 {
        self.cookie += 1;
        let cookie = self.cookie;
        let mut flags = flags;
        if self.dialect == Dialect::Extended && !payload.is_empty() {
            flags |= command_flag::PAYLOAD_LEN;
        }
        if command == wire::command::READ {
            self.reads.insert(cookie, (offset, length));
        }
        let mut bytes = self.header(flags, command, cookie, offset, length);
        bytes.extend_from_slice(payload);
        self.socket.write_all(&bytes).await.unwrap();
        self.socket.flush().await.unwrap();
        cookie
    }

    /// Returns the complete reply to `cookie`; replies to other requests are kept.
    pub async fn reply(&mut self, cookie: u64) -> Reply {
        loop {
            if self.replies.get(&cookie).is_some_and(|reply| reply.is_done) {
                return self.replies.remove(&cookie).unwrap();
            }
            self.chunk().await;
        }
    }

    /// Reads one simple reply or one chunk.
    async fn chunk(&mut self) {
        let mut magic = [0; 4];
        self.read(&mut magic).await;
        match u32::from_be_bytes(magic) {
            wire::SIMPLE_REPLY_MAGIC => self.simple_reply().await,
            wire::STRUCTURED_REPLY_MAGIC => {
                assert_eq!(self.dialect, Dialect::Structured);
                let mut rest = [0; 16];
                self.read(&mut rest).await;
                let length = u32::from_be_bytes(rest[12..].try_into().unwrap());
                self.chunk_payload(&rest[..12], u64::from(length)).await;
            }
            wire::EXTENDED_REPLY_MAGIC => {
                assert_eq!(self.dialect, Dialect::Extended);
                let mut rest = [0; 28];
                self.read(&mut rest).await;
                let length = u64::from_be_bytes(rest[20..].try_into().unwrap());
                self.chunk_payload(&rest[..12], length).await;
            }
            other => panic!("reply magic {other:#x}"),
        }
    }

    async fn simple_reply(&mut self) {
        assert_ne!(self.dialect, Dialect::Extended);
        let mut rest = [0; 12];
        self.read(&mut rest).await;
        let error = u32::from_be_bytes(rest[..4].try_into().unwrap());
        let cookie = u64::from_be_bytes(rest[4..].try_into().unwrap());
        let mut reply = Reply { error, is_done: true, ..Reply::default() };
        if let Some((offset, length)) = self.reads.remove(&cookie) {
            assert_eq!(self.dialect, Dialect::Simple, "a read is answered by chunks");
            if error == 0 && length > 0 {
                let mut bytes = vec![0; length as usize];
                self.read(&mut bytes).await;
                reply.contents.push((offset, bytes));
            }
        }
        self.replies.insert(cookie, reply);
    }

    async fn chunk_payload(&mut self, header: &[u8], length: u64) {
        let mut payload = vec![0; length as usize];
        self.read(&mut payload).await;
        let (flags, kind) = (header[1], u16::from_be_bytes([header[2], header[3]]));
        let cookie = u64::from_be_bytes(header[4..].try_into().unwrap());
        let is_extended = self.dialect == Dialect::Extended;
        let reply = self.replies.entry(cookie).or_default();
        assert!(!reply.is_done, "a chunk behind the last one");
        let u32_at = |at: usize| u32::from_be_bytes(payload[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_be_bytes(payload[at..at + 8].try_into().unwrap());
        match kind {
            wire::chunk::NONE => assert!(payload.is_empty() && flags == 1),
            wire::chunk::OFFSET_DATA => {
                assert!(payload.len() > 8);
                reply.contents.push((u64_at(0), payload[8..].to_vec()));
            }
            wire::chunk::BLOCK_STATUS => {
                assert!(!is_extended && u32_at(0) == wire::BASE_ALLOCATION_ID);
                for at in (4..payload.len()).step_by(8) {
                    reply.extents.push((u32_at(at).into(), u32_at(at + 4).into()));
                }
            }
            wire::chunk::BLOCK_STATUS_EXT => {
                assert!(is_extended && u32_at(0) == wire::BASE_ALLOCATION_ID);
                for at in (8..payload.len()).step_by(16) {
                    reply.extents.push((u64_at(at), u64_at(at + 8)));
                }
                assert_eq!(u32_at(4) as usize, reply.extents.len());
            }
            wire::chunk::ERROR => {
                reply.error = u32_at(0);
                reply.message = String::from_utf8(payload[6..].to_vec()).unwrap();
                assert_eq!(
                    usize::from(payload[4]) << 8 | usize::from(payload[5]),
                    payload.len() - 6
                );
            }
            other => panic!("chunk type {other}"),
        }
        reply.is_done = flags & 1 == 1;
        if reply.is_done {
            self.reads.remove(&cookie);
        }
    }

    pub async fn call(&mut self, command: u16, flags: u16, offset: u64, length: u64) -> Reply {
        let cookie = self.send(command, flags, offset, length, &[]).await;
        self.reply(cookie).await
    }

    pub async fn read_at(&mut self, offset: u64, length: u64) -> Vec<u8> {
        self.call(wire::command::READ, 0, offset, length).await.bytes()
    }

    pub async fn write_at(&mut self, offset: u64, payload: &[u8]) -> u32 {
        let cookie =
            self.send(wire::command::WRITE, 0, offset, payload.len() as u64, payload).await;
        self.reply(cookie).await.error
    }
}
