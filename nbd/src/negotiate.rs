//! The handshake's I/O: drives [`Handshake`] over a stream, up to an open export.
//!
//! Invariants:
//! - The whole negotiation, TLS included, ends within the caller's time limit or the connection is
//!   closed. Memory per connection is at most one option and its reply.
//! - An export is looked up only after [`Access`] has allowed it.

use crate::exports::{Access, Client, Export, Exports};
use crate::handshake::{Action, Admission, Handshake, Lookup, MetaLookup, Terms};
use crate::memory::PAYLOAD_BYTES_MAX;
use crate::stream::{Inbox, Stream};
use crate::tls;
use crate::wire::{self, Intent, OptionHeader, ReservationRequest};
use block::{BlockDevice, Error, ErrorKind, Limits, Result};
use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::io::AsyncWriteExt;
use tokio_rustls::TlsAcceptor;

/// Buffer for reading options. Chosen by hand: options are short, and longer ones take more reads.
const INBOX_BYTES: usize = 4 << 10;

/// A connection that reached transmission.
pub struct Opened<D> {
    /// The source of requests.
    pub stream: Stream,
    /// Bytes that arrived after the last option.
    pub inbox: Inbox,
    /// The client.
    pub client: Client,
    /// The opened export.
    pub device: Arc<D>,
    /// The name of the export.
    pub name: String,
    /// The negotiated terms.
    pub terms: Terms,
}

/// The reason why a connection never reached transmission.
#[derive(Debug)]
pub enum NoSession {
    /// The client left, with or without ABORT.
    Left,
    /// The client violated the protocol, or was refused by closing the connection.
    Closed(&'static str),
    /// The socket or TLS failed.
    Io(io::Error),
}

impl From<io::Error> for NoSession {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => NoSession::Left,
            _ => NoSession::Io(error),
        }
    }
}

/// The settings for negotiations on one listener.
pub struct Negotiator<'a, E> {
    pub exports: &'a E,
    pub access: &'a Access,
    pub tls: Option<TlsAcceptor>,
    /// Set when the client has sent its first bytes.
    pub has_spoken: &'a AtomicBool,
}

impl<E: Exports> Negotiator<'_, E> {
    /// Runs the handshake.
    pub async fn run(
        &self,
        stream: Stream,
        client: Client,
        handshake: Handshake,
    ) -> Result<Opened<E::Device>, NoSession> {
        let mut io = Io { stream: Some(stream), inbox: Inbox::new(INBOX_BYTES), client };
        let mut handshake = handshake;
        io.send(&handshake.greeting()).await?;
        let flags = io.take().await?;
        self.has_spoken.store(true, Ordering::Relaxed);
        if handshake.on_client_flags(flags).is_err() {
            return Err(NoSession::Closed("unknown client flags"));
        }
        loop {
            let Some((option, data)) = io.option(&handshake).await? else { continue };
            match handshake.on_option(option, &data) {
                Action::Reply(reply) => io.send(&reply).await?,
                Action::Close(reply) => {
                    io.close(&reply).await;
                    return Err(NoSession::Left);
                }
                Action::StartTls(reply) => {
                    io.send(&reply).await?;
                    io.encrypt(self.tls.as_ref()).await?;
                    handshake.on_tls();
                    io.client.reservation = None; // anyone could have sent it in clear text
                }
                Action::List => {
                    let exports = self.list(&io.client).await;
                    let pairs = exports.iter().map(|e| (e.name.as_str(), e.description.as_str()));
                    io.send(&handshake.list(pairs)).await?;
                }
                Action::Meta(lookup) => {
                    let reply = self.meta(&mut handshake, &lookup, &io.client).await;
                    io.send(&reply).await?;
                }
                Action::Describe(lookup) => {
                    let reply = match self.describe(&lookup.name, &io.client).await {
                        Ok((export, limits)) => {
                            handshake.described(&lookup, &export.description, &limits)
                        }
                        Err(error) => refuse(&mut io, &handshake, &lookup, &error).await?,
                    };
                    io.send(&reply).await?;
                }
                Action::Reservation(reservation) => {
                    let outcome = self.reservation(reservation, &mut io.client).await;
                    let outcome = outcome.map_err(|error| (error.kind(), error.to_string()));
                    io.send(&handshake.claimed(outcome)).await?;
                }
                Action::Open(lookup) => match self.open(&lookup, &io.client).await {
                    Ok((device, description)) => {
                        let limits = advertised(device.limits());
                        let (reply, terms) = handshake.opened(&lookup, &description, &limits);
                        io.send(&reply).await?;
                        let Io { stream, inbox, client } = io;
                        let stream = stream.expect("present outside of encrypt");
                        return Ok(Opened {
                            stream,
                            inbox,
                            client,
                            device,
                            name: lookup.name,
                            terms,
                        });
                    }
                    Err(error) => {
                        let reply = refuse(&mut io, &handshake, &lookup, &error).await?;
                        io.send(&reply).await?;
                    }
                },
            }
        }
    }

    async fn list(&self, client: &Client) -> Vec<Export> {
        let mut exports = self.exports.list(client).await;
        exports.retain(|export| self.access.allows(client, &export.name));
        exports
    }

    async fn meta(
        &self,
        handshake: &mut Handshake,
        lookup: &MetaLookup,
        client: &Client,
    ) -> Vec<u8> {
        let found = self.describe(&lookup.name, client).await;
        handshake.meta(lookup, found.map(|_| ()).map_err(|error| (error.kind(), error.to_string())))
    }

    async fn describe(&self, name: &str, client: &Client) -> Result<(Export, Limits)> {
        self.check_access(name, client)?;
        let (export, limits) = self.exports.describe(name, client).await?;
        Ok((export, advertised(limits)))
    }

    async fn reservation(
        &self,
        reservation: ReservationRequest,
        client: &mut Client,
    ) -> Result<()> {
        self.check_access(&reservation.export, client)?;
        if reservation.intent == Intent::Release {
            return self.exports.release(&reservation, client).await;
        }
        client.reservation = Some(reservation);
        Ok(())
    }

    async fn open(&self, lookup: &Lookup, client: &Client) -> Result<(Arc<E::Device>, String)> {
        self.check_access(&lookup.name, client)?;
        let description = match lookup.wants_description() {
            true => self.exports.describe(&lookup.name, client).await?.0.description,
            false => String::new(),
        };
        Ok((self.exports.open(&lookup.name, client).await?, description))
    }

    fn check_access(&self, name: &str, client: &Client) -> Result<()> {
        if self.access.allows(client, name) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Denied, "this client may not open this export"))
    }
}

/// Limits the advertised payload of a device to the largest payload that the server takes.
pub fn advertised(limits: Limits) -> Limits {
    let payload_bytes_max = limits.payload_bytes_max.clamp(1, PAYLOAD_BYTES_MAX);
    Limits { payload_bytes_max, ..limits }
}

async fn refuse(
    io: &mut Io,
    handshake: &Handshake,
    lookup: &Lookup,
    error: &Error,
) -> Result<Vec<u8>, NoSession> {
    let client = io.client.label();
    tracing::info!(
        export = %lookup.name, client, error = %error.chain(),
        "the server refused to open an export"
    );
    match handshake.refused(lookup, error.kind(), &error.to_string()) {
        Action::Reply(reply) => Ok(reply),
        _ => Err(NoSession::Closed("EXPORT_NAME of an export that may not be opened")),
    }
}

struct Io {
    /// `None` only during encryption.
    stream: Option<Stream>,
    inbox: Inbox,
    client: Client,
}

impl Io {
    fn stream(&mut self) -> &mut Stream {
        self.stream.as_mut().expect("present outside of encrypt")
    }

    async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream().write_all(bytes).await?;
        self.stream().flush().await
    }

    async fn close(&mut self, bytes: &[u8]) {
        // The client may already be gone; closing is the only step left in any case.
        let sent = self.send(bytes).await;
        let closed = self.stream().shutdown().await;
        tracing::debug!(?sent, ?closed, "the server closed a connection during negotiation");
    }

    /// Reads at least one more byte.
    async fn fill(&mut self) -> io::Result<()> {
        let stream = self.stream.as_mut().expect("present outside of encrypt");
        match poll_fn(|cx| self.inbox.poll_fill(cx, stream)).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    async fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        loop {
            if let Some(head) = self.inbox.bytes().first_chunk::<N>() {
                let head = *head;
                self.inbox.consume(N);
                return Ok(head);
            }
            self.fill().await?;
        }
    }

    /// Passes the next `count` bytes to `sink` as they arrive.
    async fn pass(&mut self, count: u32, mut sink: impl FnMut(&[u8])) -> io::Result<()> {
        let mut remaining = count as usize;
        while remaining > 0 {
            let have = self.inbox.bytes().len().min(remaining);
            if have == 0 {
                self.fill().await?;
                continue;
            }
            sink(&self.inbox.bytes()[..have]);
            self.inbox.consume(have);
            remaining -= have;
        }
        Ok(())
    }

    /// Reads the next option and its data. Returns `None` if it was too long and has been answered.
    async fn option(&mut self, handshake: &Handshake) -> Result<Option<(u32, Vec<u8>)>, NoSession> {
        let header = self.take::<{ wire::OPTION_HEADER_BYTES }>().await?;
        let header =
            OptionHeader::decode(&header).map_err(|_| NoSession::Closed("bad option magic"))?;
        match handshake.admit(header) {
            Admission::Read => {
                let mut data = Vec::new();
                self.pass(header.data_bytes, |bytes| data.extend_from_slice(bytes)).await?;
                Ok(Some((header.option, data)))
            }
            Admission::Skip(reply) => {
                self.pass(header.data_bytes, |_| ()).await?;
                self.send(&reply).await?;
                Ok(None)
            }
            Admission::Close => Err(NoSession::Closed("option data is too long to skip")),
        }
    }

    async fn encrypt(&mut self, acceptor: Option<&TlsAcceptor>) -> Result<(), NoSession> {
        // A man in the middle could have appended options in clear text after STARTTLS.
        if !self.inbox.bytes().is_empty() {
            return Err(NoSession::Closed("bytes behind STARTTLS"));
        }
        let Some(Stream::Plain(plain)) = self.stream.take() else {
            return Err(NoSession::Closed("TLS inside TLS"));
        };
        let Some(acceptor) = acceptor else {
            return Err(NoSession::Closed("STARTTLS without a certificate"));
        };
        let stream = acceptor.accept(plain).await?;
        let (_, session) = stream.get_ref();
        let certificate = session.peer_certificates().and_then(<[_]>::first);
        self.client.names = certificate.map(|der| tls::certificate_names(der)).unwrap_or_default();
        self.client.is_tls = true;
        self.stream = Some(Stream::Tls(Box::new(stream)));
        Ok(())
    }
}
