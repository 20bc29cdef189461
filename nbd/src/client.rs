//! The client side of negotiation, for devices of this machine whose volume another machine serves.
//!
//! Invariants:
//! - Bytes from a server are untrusted input: lengths are bounded, and nothing panics.
//! - With `nbds`, only STARTTLS is sent before encryption, and the server's certificate is verified
//!   against the CA that the user named.
//! - Replies are simple ones, because the kernel reads them.

use crate::stream::Plain;
use crate::tls;
use crate::wire::{
    self, Fields, Intent, ReservationRequest, handshake_flag, info, option, option_reply,
    transmission_flag,
};
use block::{Error, ErrorKind, Result};
use rustls::pki_types::ServerName;
use std::io;
use std::path::PathBuf;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use url::Url;

/// Default port of the protocol. Source: spec, "Introduction"; IANA.
const PORT: u16 = 10809;
/// Time limit from the first byte to transmission. Chosen by hand.
const NEGOTIATION_WAIT: Duration = Duration::from_secs(20);
/// Time limit for a TCP connection. Chosen by hand: the first three attempts of TCP, which it makes
/// within 3 s, and their answers. A machine that is off must not keep a device from its next address.
const CONNECT_WAIT: Duration = Duration::from_secs(5);
/// Silence after which an idle connection counts as lost. Chosen by hand: the users of a device
/// wait this long.
const SILENCE_MAX: Duration = Duration::from_secs(15);
/// The same limit while sent bytes are unacknowledged. Chosen by hand: longer, because a server
/// that reads nothing for a while looks the same (RFC 5482), and a slow one is worth waiting for.
const UNHEARD_MAX: Duration = Duration::from_secs(120);
/// Longest option reply that is read. Chosen by hand: errors carry text.
const REPLY_BYTES_MAX: u32 = 64 << 10;

/// The location of an export, parsed from a URI. Source: doc/uri.md of
/// github.com/NetworkBlockDevice/nbd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The URI as the user wrote it.
    uri: String,
    place: Place,
    tls_dir: Option<PathBuf>,
    /// Name of the export.
    pub export: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.uri)
    }
}

impl Target {
    /// Parses `nbd://HOST[:PORT]/EXPORT`, `nbd+unix:///EXPORT?socket=PATH`, and the same with
    /// `nbds`. The latter take `tls-certificates=DIR` with `ca-cert.pem`, and with
    /// `client-cert.pem` and `client-key.pem` if the server requires a client certificate.
    ///
    /// # Errors
    /// `Invalid`, with the mistake in the message.
    pub fn parse(uri: &str) -> Result<Target> {
        let invalid = |why: &str| {
            let what = format!(
                "read {uri}: {why}; write nbds://HOST/EXPORT?tls-certificates=DIR, nbd://HOST:PORT/EXPORT \
                 or nbd+unix:///EXPORT?socket=PATH"
            );
            Error::new(ErrorKind::Invalid, what)
        };
        let url = Url::parse(uri).map_err(|error| invalid(&error.to_string()))?;
        let (is_tls, is_unix) = match url.scheme() {
            "nbd" => (false, false),
            "nbds" => (true, false),
            "nbd+unix" => (false, true),
            "nbds+unix" => (true, true),
            other => return Err(invalid(&format!("{other} is no scheme of NBD"))),
        };
        if !url.username().is_empty() || url.password().is_some() {
            return Err(invalid("users and passwords are not part of the protocol"));
        }
        let (mut socket, mut tls_dir) = (None, None);
        for (key, value) in url.query_pairs() {
            match &*key {
                "socket" => socket = Some(PathBuf::from(&*value)),
                "tls-certificates" => tls_dir = Some(PathBuf::from(&*value)),
                other => return Err(invalid(&format!("{other} is not known"))),
            }
        }
        let place = match (is_unix, socket, url.host_str()) {
            (true, Some(socket), None | Some("")) => Place::Unix(socket),
            (true, None, _) => return Err(invalid("it names no socket")),
            (true, ..) => return Err(invalid("it names a host and a socket")),
            (false, Some(_), _) => return Err(invalid("a socket needs nbd+unix")),
            (false, None, None | Some("")) => return Err(invalid("it names no host")),
            (false, None, Some(host)) => {
                let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
                Place::Tcp { host, port: url.port().unwrap_or(PORT) }
            }
        };
        match (is_tls, &tls_dir) {
            (true, None) => return Err(invalid("nbds needs tls-certificates=DIR")),
            (false, Some(_)) => return Err(invalid("tls-certificates needs nbds")),
            _ => {}
        }
        // The first slash of the path belongs to the URI; the name of the export may contain
        // further slashes.
        let path = url.path().strip_prefix('/').unwrap_or(url.path());
        let encoded = format!("x={}", path.replace('+', "%2B").replace('&', "%26"));
        let export = url::form_urlencoded::parse(encoded.as_bytes()).next();
        let export = export.map(|(_, name)| name.into_owned()).unwrap_or_default();
        if export.len() > wire::STRING_BYTES_MAX {
            return Err(invalid("the name of the export is too long"));
        }
        Ok(Target { uri: uri.to_owned(), place, tls_dir, export })
    }

    /// Returns the server's host and port, or the path of the socket.
    #[must_use]
    pub fn place_name(&self) -> (&str, Option<u16>) {
        match &self.place {
            Place::Unix(path) => (path.to_str().unwrap_or_default(), None),
            Place::Tcp { host, port } => (host, Some(*port)),
        }
    }
}

/// A byte stream in both directions.
pub trait Wire: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Wire for T {}

/// A connection in transmission.
pub struct Reached {
    /// Requests go in, simple replies come out.
    pub wire: Box<dyn Wire>,
    /// Size of the export.
    pub size_bytes: u64,
    /// See the specification, "Transmission flags".
    pub transmission_flags: u16,
    /// The server supports attachments: see [`ReservationRequest`].
    pub has_reservation: bool,
}

/// Connects to an export.
///
/// # Errors
/// `Fenced`: the attachment was ended on the server. `Busy`: the server refuses this client, for
/// now or permanently. `Unavailable`: the server does not answer, or is not ready. `NotFound`:
/// there is no such export. `Denied`: the server requires TLS. `Invalid`: a TLS file is wrong.
/// `Io`: any other error.
pub async fn open(target: &Target, reservation: &ReservationRequest) -> Result<Reached> {
    within(target, async {
        let (mut wire, has_reservation) = greeted(target, reservation).await?;
        // Request no information beyond the size of the export, which is always sent.
        let name = target.export.as_bytes();
        let length = u32::try_from(name.len()).expect("checked when it was read");
        let data = [&length.to_be_bytes()[..], name, &[0, 0]].concat();
        send_option(&mut wire, option::GO, &data).await?;
        let mut found = None;
        loop {
            let (reply, data) = read_reply(&mut wire, option::GO).await?;
            match reply {
                option_reply::ACK => break,
                option_reply::INFO => {
                    let mut fields = Fields::new(&data);
                    if fields.u16().map_err(senseless)? == info::EXPORT {
                        let size_bytes = fields.u64().map_err(senseless)?;
                        found = Some((size_bytes, fields.u16().map_err(senseless)?));
                    }
                }
                code => return Err(refusal(code, &data)),
            }
        }
        let (size_bytes, transmission_flags) = found.ok_or_else(|| senseless("no size"))?;
        if transmission_flags & transmission_flag::HAS_FLAGS == 0 {
            return Err(senseless("no flags"));
        }
        Ok(Reached { wire, size_bytes, transmission_flags, has_reservation })
    })
    .await
}

/// Tells the server that an attachment has ended.
///
/// # Errors
/// Those of [`open`], and `Unsupported` if the server does not support attachments.
pub async fn release(target: &Target, reservation: &ReservationRequest) -> Result<()> {
    within(target, async {
        let reservation = ReservationRequest { intent: Intent::Release, ..reservation.clone() };
        match greeted(target, &reservation).await? {
            (_, true) => Ok(()),
            (_, false) => {
                Err(Error::new(ErrorKind::Unsupported, "the server knows no attachments"))
            }
        }
    })
    .await
}

async fn within<T>(target: &Target, work: impl Future<Output = Result<T>>) -> Result<T> {
    let done = tokio::time::timeout(NEGOTIATION_WAIT, work).await.unwrap_or_else(|_| {
        let what = format!("no answer in {} s", NEGOTIATION_WAIT.as_secs());
        Err(Error::new(ErrorKind::Unavailable, what))
    });
    done.map_err(|error| error.context(format!("reach {target}")))
}

/// Connects, encrypts and reserves. The flag says whether the server supports reservations.
async fn greeted(
    target: &Target,
    reservation: &ReservationRequest,
) -> Result<(Box<dyn Wire>, bool)> {
    let mut plain = connect(&target.place).await?;
    greet(&mut plain).await?;
    let mut wire: Box<dyn Wire> = match &target.tls_dir {
        None => Box::new(plain),
        Some(dir) => {
            send_option(&mut plain, option::STARTTLS, &[]).await?;
            match read_reply(&mut plain, option::STARTTLS).await? {
                (option_reply::ACK, _) => {}
                (code, data) => return Err(refusal(code, &data)),
            }
            let host = match &target.place {
                Place::Tcp { host, .. } => host.clone(),
                Place::Unix(_) => "localhost".to_owned(),
            };
            let name = ServerName::try_from(host).map_err(|error| {
                Error::with_source(ErrorKind::Invalid, "verify the server's name", error)
            })?;
            let connector = tls::connector(dir)?;
            Box::new(connector.connect(name, plain).await.map_err(lost)?)
        }
    };
    send_option(&mut wire, option::RESERVATION, &reservation.encode()).await?;
    let has_reservation = match read_reply(&mut wire, option::RESERVATION).await? {
        (option_reply::ACK, _) => true,
        (option_reply::ERR_UNSUP, _) => false,
        (code, data) => return Err(refusal(code, &data)),
    };
    Ok((wire, has_reservation))
}

async fn connect(place: &Place) -> Result<Plain> {
    match place {
        Place::Unix(path) => Ok(Plain::Unix(UnixStream::connect(path).await.map_err(lost)?)),
        Place::Tcp { host, port } => {
            use rustix::net::sockopt;
            let connecting = TcpStream::connect((host.as_str(), *port));
            let connected = tokio::time::timeout(CONNECT_WAIT, connecting).await.map_err(|_| {
                let what = format!("no connection in {} s", CONNECT_WAIT.as_secs());
                Error::new(ErrorKind::Unavailable, what)
            })?;
            let stream = connected.map_err(lost)?;
            let set = stream.set_nodelay(true).and_then(|()| {
                sockopt::set_socket_keepalive(&stream, true)?;
                sockopt::set_tcp_keepidle(&stream, SILENCE_MAX / 3)?;
                sockopt::set_tcp_keepintvl(&stream, SILENCE_MAX / 6)?;
                sockopt::set_tcp_keepcnt(&stream, 4)?;
                let unheard = u32::try_from(UNHEARD_MAX.as_millis()).expect("it is short");
                sockopt::set_tcp_user_timeout(&stream, unheard)?;
                Ok(())
            });
            set.map_err(lost)?;
            Ok(Plain::Tcp(stream))
        }
    }
}

async fn greet(wire: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> Result<()> {
    let mut greeting = [0; 18];
    wire.read_exact(&mut greeting).await.map_err(lost)?;
    let mut fields = Fields::new(&greeting);
    let magics = (fields.u64().map_err(senseless)?, fields.u64().map_err(senseless)?);
    let flags = fields.u16().map_err(senseless)?;
    if magics != (wire::NBDMAGIC, wire::IHAVEOPT) || flags & handshake_flag::FIXED_NEWSTYLE == 0 {
        return Err(senseless("it is no NBD server of the fixed newstyle protocol"));
    }
    let ours = u32::from(flags & (handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES));
    wire.write_all(&ours.to_be_bytes()).await.map_err(lost)
}

async fn send_option(wire: &mut (impl AsyncWrite + Unpin), option: u32, data: &[u8]) -> Result<()> {
    let length = u32::try_from(data.len()).expect("options are short");
    let head =
        [&wire::IHAVEOPT.to_be_bytes()[..], &option.to_be_bytes(), &length.to_be_bytes(), data];
    wire.write_all(&head.concat()).await.map_err(lost)?;
    wire.flush().await.map_err(lost)
}

async fn read_reply(wire: &mut (impl AsyncRead + Unpin), option: u32) -> Result<(u32, Vec<u8>)> {
    let mut head = [0; 20];
    wire.read_exact(&mut head).await.map_err(lost)?;
    let mut fields = Fields::new(&head);
    let magic = fields.u64().map_err(senseless)?;
    let (of, reply) = (fields.u32().map_err(senseless)?, fields.u32().map_err(senseless)?);
    let length = fields.u32().map_err(senseless)?;
    if magic != wire::OPTION_REPLY_MAGIC || of != option || length > REPLY_BYTES_MAX {
        return Err(senseless("a reply that makes no sense"));
    }
    let mut data = vec![0; length as usize];
    wire.read_exact(&mut data).await.map_err(lost)?;
    Ok((reply, data))
}

/// Converts an error reply. The text comes from the server and is only displayed.
fn refusal(code: u32, data: &[u8]) -> Error {
    let kind = match code {
        option_reply::ERR_FENCED => ErrorKind::Fenced,
        option_reply::ERR_POLICY => ErrorKind::Busy,
        option_reply::ERR_SHUTDOWN => ErrorKind::Unavailable,
        option_reply::ERR_UNKNOWN => ErrorKind::NotFound,
        option_reply::ERR_TLS_REQD => {
            return Error::new(ErrorKind::Denied, "the server requires TLS: write nbds://");
        }
        _ => ErrorKind::Io,
    };
    let text: String =
        String::from_utf8_lossy(data).chars().filter(|c| !c.is_control()).take(500).collect();
    Error::new(kind, format!("the server refuses: {text}"))
}

fn lost(error: io::Error) -> Error {
    Error::with_source(ErrorKind::Unavailable, "the connection failed", error)
}

fn senseless(why: impl std::fmt::Debug) -> Error {
    Error::new(ErrorKind::Io, format!("the server breaks the protocol: {why:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_are_read_as_the_protocol_writes_them() {
        let tcp = |host: &str, port| Place::Tcp { host: host.to_owned(), port };
        for (uri, place, tls_dir, export) in [
            ("nbd://db1/pg", tcp("db1", 10809), None, "pg"),
            ("nbd://10.0.0.1:7000/", tcp("10.0.0.1", 7000), None, ""),
            ("nbd://[::1]:7000/a%20b+c%2Fd", tcp("::1", 7000), None, "a b+c/d"),
            ("nbd+unix:///pg?socket=/run/x", Place::Unix("/run/x".into()), None, "pg"),
            ("nbds://db1/pg?tls-certificates=/etc/t", tcp("db1", 10809), Some("/etc/t"), "pg"),
        ] {
            let target = Target::parse(uri).unwrap();
            assert_eq!(target.place, place, "{uri}");
            assert_eq!(target.tls_dir, tls_dir.map(PathBuf::from), "{uri}");
            assert_eq!(target.export, export, "{uri}");
        }
    }

    #[test]
    fn meaningless_uris_are_refused_with_a_hint() {
        for (uri, why) in [
            ("db1/pg", "relative URL"),
            ("http://db1/pg", "http is no scheme"),
            ("nbd:///pg", "it names no host"),
            ("nbd://db1/pg?socket=/x", "needs nbd+unix"),
            ("nbd+unix:///pg", "it names no socket"),
            ("nbds://db1/pg", "needs tls-certificates"),
            ("nbd://db1/pg?tls-certificates=/x", "needs nbds"),
            ("nbd://user@db1/pg", "users and passwords"),
            ("nbd://db1/pg?other=1", "other is not known"),
        ] {
            let error = Target::parse(uri).unwrap_err();
            assert!(error.to_string().contains(why), "{uri}: {error}");
            assert!(error.to_string().contains("write nbds://"), "{error}");
        }
    }
}
