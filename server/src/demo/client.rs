//! An NBD client, as small as the demo's needs.

use super::daemon::VOLUME;
use block::{Error, ErrorKind, Result};
use nbd::wire::{self, command, handshake_flag, option};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// A connection to the demo's volume: one request at a time, or several writes in flight.
pub(super) struct Client {
    stream: TcpStream,
    /// Cookie of the newest request.
    cookie: u64,
}

fn broken(what: &str) -> Error {
    Error::new(ErrorKind::Unavailable, format!("talk NBD to the daemon: {what}"))
}

impl Client {
    pub(super) fn connect(address: &str) -> Result<Client> {
        let failed =
            |error| Error::with_source(ErrorKind::Unavailable, "connect to the daemon", error);
        let stream = TcpStream::connect(address).map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        stream.set_read_timeout(Some(Duration::from_secs(60))).map_err(failed)?;
        let mut client = Client { stream, cookie: 0 };
        let greeting: [u8; 18] = client.take()?;
        if greeting[..8] != wire::NBDMAGIC.to_be_bytes() {
            return Err(broken("this is no NBD server"));
        }
        let flags = u32::from(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
        let mut hello = flags.to_be_bytes().to_vec();
        hello.extend(wire::IHAVEOPT.to_be_bytes());
        hello.extend(option::EXPORT_NAME.to_be_bytes());
        hello.extend((VOLUME.len() as u32).to_be_bytes());
        hello.extend(VOLUME.as_bytes());
        client.put(&hello)?;
        let _size_and_flags: [u8; 10] = client.take()?;
        Ok(client)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).map_err(|error| {
            Error::with_source(ErrorKind::Unavailable, "send to the daemon", error)
        })
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.stream.read_exact(bytes).map_err(|error| {
            Error::with_source(ErrorKind::Unavailable, "receive from the daemon", error)
        })
    }

    /// Sends a request, and returns its cookie.
    fn send(&mut self, kind: u16, offset: u64, length: usize, payload: &[u8]) -> Result<u64> {
        self.cookie += 1;
        let mut header = wire::REQUEST_MAGIC.to_be_bytes().to_vec();
        header.extend(0u16.to_be_bytes()); // no flags
        header.extend(kind.to_be_bytes());
        header.extend(self.cookie.to_be_bytes());
        header.extend(offset.to_be_bytes());
        header.extend(u32::try_from(length).expect("a demo request is small").to_be_bytes());
        header.extend_from_slice(payload);
        self.put(&header)?;
        Ok(self.cookie)
    }

    /// Receives the header of the next reply, and returns its cookie.
    fn receive(&mut self) -> Result<u64> {
        let reply: [u8; 16] = self.take()?;
        let [m0, m1, m2, m3, e0, e1, e2, e3, cookie @ ..] = reply;
        if [m0, m1, m2, m3] != wire::SIMPLE_REPLY_MAGIC.to_be_bytes() {
            return Err(broken("this is no reply"));
        }
        match u32::from_be_bytes([e0, e1, e2, e3]) {
            0 => Ok(u64::from_be_bytes(cookie)),
            error => Err(broken(&format!("request failed with error {error}"))),
        }
    }

    fn request(&mut self, kind: u16, offset: u64, length: usize, payload: &[u8]) -> Result<()> {
        let sent = self.send(kind, offset, length, payload)?;
        match self.receive()? == sent {
            true => Ok(()),
            false => Err(broken("the reply is for another request")),
        }
    }

    /// Sends a write without waiting for its reply, and returns its cookie. [`Client::finish_write`]
    /// receives the replies.
    pub(super) fn begin_write(&mut self, offset: u64, payload: &[u8]) -> Result<u64> {
        self.send(command::WRITE, offset, payload.len(), payload)
    }

    /// Receives the reply to any of the writes begun, and returns its cookie.
    pub(super) fn finish_write(&mut self) -> Result<u64> {
        self.receive()
    }

    pub(super) fn write(&mut self, offset: u64, payload: &[u8]) -> Result<()> {
        self.request(command::WRITE, offset, payload.len(), payload)
    }

    pub(super) fn read(&mut self, offset: u64, payload: &mut [u8]) -> Result<()> {
        self.request(command::READ, offset, payload.len(), &[])?;
        self.fill(payload)
    }

    pub(super) fn flush(&mut self) -> Result<()> {
        self.request(command::FLUSH, 0, 0, &[])
    }
}
