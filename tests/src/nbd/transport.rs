//! The address of a server, and a byte stream to it: TCP, unix socket, and TLS over TCP.
//!
//! Invariants:
//! - Every stream has a timeout: a server that hangs fails the test instead of hanging it.

use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Longest wait for any reply. Chosen by hand: an order of magnitude above the worst promised.
pub const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// Address of one export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Where to connect.
    pub address: Address,
    /// Name of the export, as sent in the negotiation.
    pub export: String,
}

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// `host:port`.
    Tcp(String),
    /// Path of a unix socket.
    Unix(PathBuf),
}

impl Endpoint {
    /// Parses `nbd://host:port/name`, `nbds://…` and `nbd+unix:///name?socket=path`.
    #[must_use]
    pub fn parse(uri: &str) -> Option<Endpoint> {
        if let Some(rest) = uri.strip_prefix("nbd+unix:///") {
            let (export, path) = rest.split_once("?socket=")?;
            let address = Address::Unix(PathBuf::from(path));
            return Some(Endpoint { address, export: export.to_owned() });
        }
        let rest = uri.strip_prefix("nbd://").or_else(|| uri.strip_prefix("nbds://"))?;
        let (host, export) = rest.split_once('/').unwrap_or((rest, ""));
        Some(Endpoint { address: Address::Tcp(host.to_owned()), export: export.to_owned() })
    }

    /// Returns the URI in the form that other clients take.
    #[must_use]
    pub fn uri(&self) -> String {
        match &self.address {
            Address::Tcp(host) => format!("nbd://{host}/{}", self.export),
            Address::Unix(path) => format!("nbd+unix:///{}?socket={}", self.export, path.display()),
        }
    }

    /// Returns the address of another export of the same server.
    #[must_use]
    pub fn with_export(&self, export: &str) -> Endpoint {
        Endpoint { address: self.address.clone(), export: export.to_owned() }
    }

    /// Opens a stream.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn connect(&self) -> io::Result<Stream> {
        self.connect_within(REPLY_TIMEOUT)
    }

    /// Like [`Endpoint::connect`]. Each step waits for at most this long, then and later.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn connect_within(&self, timeout: Duration) -> io::Result<Stream> {
        match &self.address {
            Address::Tcp(host) => {
                let address = host.to_socket_addrs()?.next();
                let address = address.ok_or_else(|| io::Error::other("a name without address"))?;
                let stream = TcpStream::connect_timeout(&address, timeout)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(timeout))?;
                stream.set_write_timeout(Some(timeout))?;
                Ok(Stream::Tcp(stream))
            }
            Address::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(Some(timeout))?;
                stream.set_write_timeout(Some(timeout))?;
                Ok(Stream::Unix(stream))
            }
        }
    }
}

/// The identity of a TLS client and the authority that it trusts.
#[derive(Clone)]
pub struct TlsClient {
    /// The authority that signs the server's certificate.
    pub authority: CertificateDer<'static>,
    /// Certificate and key of the client, if the server asks for one.
    pub identity: Option<(CertificateDer<'static>, Arc<PrivateKeyDer<'static>>)>,
    /// The name that the server's certificate must carry.
    pub server_name: String,
}

impl TlsClient {
    fn config(&self) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        roots.add(self.authority.clone()).expect("a certificate that the test made");
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the provider has the default versions")
            .with_root_certificates(roots);
        match &self.identity {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => builder
                .with_client_auth_cert(vec![certificate.clone()], key.clone_key())
                .expect("a key that the test made"),
        }
    }
}

/// A connected byte stream.
pub enum Stream {
    /// TCP without Nagle's delay.
    Tcp(TcpStream),
    /// Unix socket.
    Unix(UnixStream),
    /// TLS over TCP.
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

impl Stream {
    /// Continues under TLS, after the server agreed to `STARTTLS`.
    ///
    /// # Errors
    /// When the handshake fails, for example because either side refuses the other's certificate.
    pub fn start_tls(self, tls: &TlsClient) -> io::Result<Stream> {
        let Stream::Tcp(stream) = self else {
            return Err(io::Error::other("TLS is tested over TCP only"));
        };
        let name = ServerName::try_from(tls.server_name.clone()).map_err(io::Error::other)?;
        let connection = ClientConnection::new(Arc::new(tls.config()), name);
        let mut stream = StreamOwned::new(connection.map_err(io::Error::other)?, stream);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock)?;
        }
        Ok(Stream::Tls(Box::new(stream)))
    }

    /// Sets how long a read waits; `None` waits for ever.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.set_read_timeout(timeout),
            Stream::Unix(stream) => stream.set_read_timeout(timeout),
            Stream::Tls(stream) => stream.sock.set_read_timeout(timeout),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(buf),
            Stream::Unix(stream) => stream.read(buf),
            Stream::Tls(stream) => stream.read(buf),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write(buf),
            Stream::Unix(stream) => stream.write(buf),
            Stream::Tls(stream) => stream.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.flush(),
            Stream::Unix(stream) => stream.flush(),
            Stream::Tls(stream) => stream.flush(),
        }
    }
}

/// Receives `count` bytes.
///
/// # Errors
/// The end of the stream, or errors of the kernel.
pub fn take(stream: &mut impl Read, count: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; count];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Receives `N` bytes.
///
/// # Errors
/// Those of [`take`].
pub fn take_array<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_are_read_and_written() {
        for uri in ["nbd://127.0.0.1:10809/disk", "nbd+unix:///db?socket=/tmp/x.sock"] {
            assert_eq!(Endpoint::parse(uri).unwrap().uri(), uri);
        }
        assert_eq!(Endpoint::parse("http://a/b"), None);
    }
}
