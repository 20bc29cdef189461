//! TLS: required, optional, mutual, and access by certificate.

use crate::client::{Client, named};
use crate::memory::MemoryDevice;
use crate::{SIZE, World, pattern};
use nbd::wire::{Dialect, option, option_reply};
use nbd::{Access, ServerOptions, TlsMode, TlsOptions};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// A certificate authority, and a directory with the server's files.
struct Pki {
    directory: TempDir,
    ca: CertifiedIssuer<'static, KeyPair>,
}

impl Pki {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let pki = Pki { directory: tempfile::tempdir().unwrap(), ca };
        let (certificate, key) = pki.issue("localhost", "server");
        pki.save("ca.pem", &pki.ca.pem());
        pki.save("server.pem", &pem("CERTIFICATE", &certificate));
        pki.save("server.key", &key.serialize_pem());
        pki
    }

    fn save(&self, name: &str, text: &str) {
        std::fs::write(self.directory.path().join(name), text).unwrap();
    }

    fn issue(&self, dns_name: &str, common_name: &str) -> (CertificateDer<'static>, KeyPair) {
        let mut params = CertificateParams::new(vec![dns_name.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, common_name);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.ca).unwrap();
        (certificate.der().clone(), key)
    }

    fn options(&self, is_mutual: bool) -> TlsOptions {
        let path = |name: &str| self.directory.path().join(name);
        TlsOptions {
            certificate: path("server.pem"),
            key: path("server.key"),
            client_ca: is_mutual.then(|| path("ca.pem")),
        }
    }

    /// Makes the client's side. `names` are its certificate's DNS name and common name.
    fn connector(&self, names: Option<(&str, &str)>) -> TlsConnector {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut roots = rustls::RootCertStore::empty();
        roots.add(self.ca.der().clone()).unwrap();
        let builder = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = match names {
            None => builder.with_no_client_auth(),
            Some((dns_name, common_name)) => {
                let (certificate, key) = self.issue(dns_name, common_name);
                let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
                builder.with_client_auth_cert(vec![certificate], key).unwrap()
            }
        };
        TlsConnector::from(Arc::new(config))
    }
}

/// Encodes PEM: base64 in lines of 64 characters.
fn pem(label: &str, der: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in der.chunks(3) {
        let mut bits = [0u8; 4];
        bits[1..=three.len()].copy_from_slice(three);
        let bits = u32::from_be_bytes(bits);
        for digit in 0..4 {
            let is_padding = digit > three.len();
            let value = (bits >> (18 - 6 * digit)) as usize & 63;
            text.push(if is_padding { '=' } else { char::from(DIGITS[value]) });
        }
    }
    let lines: Vec<&str> =
        text.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).unwrap()).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

async fn world(pki: &Pki, mode: TlsMode, is_mutual: bool, access: Access) -> World {
    let tls = Some(pki.options(is_mutual));
    let options = ServerOptions { tls, access, ..ServerOptions::default() };
    World::with(options, mode, MemoryDevice::new(SIZE)).await
}

/// Greets in clear text and continues under TLS.
async fn encrypted(world: &World, connector: TlsConnector) -> std::io::Result<Client> {
    let mut socket: TcpStream = world.socket().await;
    use tokio::io::AsyncReadExt;
    socket.read_exact(&mut [0; 18]).await?;
    socket.write_all(&3u32.to_be_bytes()).await?;
    let mut starttls = nbd::wire::IHAVEOPT.to_be_bytes().to_vec();
    starttls.extend_from_slice(&[0, 0, 0, 5, 0, 0, 0, 0]);
    socket.write_all(&starttls).await?;
    let mut reply = [0; 20];
    socket.read_exact(&mut reply).await?;
    assert_eq!(reply[12..16], option_reply::ACK.to_be_bytes());
    let name = ServerName::try_from("localhost").unwrap();
    Ok(Client::over(connector.connect(name, socket).await?))
}

#[tokio::test]
async fn required_tls_serves_only_inside_it() {
    let pki = Pki::new();
    let world = world(&pki, TlsMode::Required, false, Access::default()).await;
    let mut plain = world.greet().await;
    for option in [option::LIST, option::INFO, option::GO, option::STRUCTURED_REPLY, 0x7777] {
        assert_eq!(plain.option(option, &[]).await.0, option_reply::ERR_TLS_REQD);
    }
    plain.send_option(option::EXPORT_NAME, b"disk").await;
    assert!(plain.is_closed_within(Duration::from_secs(5)).await);

    let mut client = encrypted(&world, pki.connector(None)).await.unwrap();
    assert_eq!(client.option(option::STARTTLS, &[]).await.0, option_reply::ERR_INVALID);
    let mut client = client.go("disk", Dialect::Extended).await;
    let data = pattern(11, 5 << 20);
    assert_eq!(client.write_at(3, &data).await, 0);
    assert!(client.read_at(3, data.len() as u64).await == data);
    let mut cookies = Vec::new();
    for index in 0..200 {
        cookies.push((index, client.send(0, 0, 3 + index * 4096, 4096, &[]).await));
    }
    for (index, cookie) in cookies {
        let at = index as usize * 4096;
        assert!(client.reply(cookie).await.bytes() == data[at..at + 4096]);
    }
}

#[tokio::test]
async fn optional_tls_discards_earlier_negotiation() {
    let pki = Pki::new();
    let world = world(&pki, TlsMode::On, false, Access::default()).await;
    let mut plain = world.open(Dialect::Structured).await;
    assert_eq!(plain.read_at(0, 512).await, [0; 512]);
    let client = encrypted(&world, pki.connector(None)).await.unwrap();
    let mut client = client.go("disk", Dialect::Simple).await;
    assert_eq!(client.read_at(0, 512).await, [0; 512]);
}

#[tokio::test]
async fn certificates_are_replaced_while_serving() {
    let pki = Pki::new();
    let world = world(&pki, TlsMode::Required, false, Access::default()).await;
    let old = encrypted(&world, pki.connector(None)).await.unwrap();
    let other = Pki::new();
    for name in ["server.pem", "server.key"] {
        std::fs::copy(other.directory.path().join(name), pki.directory.path().join(name)).unwrap();
    }
    world.server.reload_tls().unwrap();
    assert!(encrypted(&world, pki.connector(None)).await.is_err(), "another authority");
    encrypted(&world, other.connector(None)).await.unwrap().go("disk", Dialect::Simple).await;
    pki.save("server.key", "no key");
    let error = world.server.reload_tls().unwrap_err();
    assert!(error.chain().contains("server.key"), "{}", error.chain());
    encrypted(&world, other.connector(None)).await.unwrap().go("disk", Dialect::Simple).await;
    old.go("disk", Dialect::Simple).await;
}

#[tokio::test]
async fn rules_that_no_certificate_can_match_are_refused() {
    let pki = Pki::new();
    let access = Access::by_certificate([("db1".to_owned(), vec!["*".to_owned()])]);
    let options =
        ServerOptions { tls: Some(pki.options(false)), access, ..ServerOptions::default() };
    let exports = Arc::new(crate::MemoryExports::default());
    let refused = nbd::Server::new(exports, options).err().unwrap();
    assert_eq!(refused.kind(), block::ErrorKind::Invalid);
}

#[tokio::test]
async fn bytes_behind_starttls_close_the_connection() {
    let pki = Pki::new();
    let world = world(&pki, TlsMode::On, false, Access::default()).await;
    let mut client = world.greet().await;
    let option = |option: u8| [&b"IHAVEOPT"[..], &[0, 0, 0, option, 0, 0, 0, 0]].concat();
    client.socket.write_all(&[option(5), option(3)].concat()).await.unwrap();
    assert!(client.is_closed_within(Duration::from_secs(5)).await);
}

#[tokio::test]
async fn certificate_opens_only_the_exports_of_its_name() {
    let pki = Pki::new();
    let access = Access::by_certificate([
        ("db1.example".to_owned(), vec!["disk".to_owned()]),
        ("auditor".to_owned(), vec!["fi*".to_owned()]),
    ]);
    let world = world(&pki, TlsMode::Required, true, access).await;
    for (names, opens, refuses) in [
        (("db1.example", "whoever"), "disk", "fixed"),
        (("other.example", "auditor"), "fixed", "disk"),
    ] {
        let mut client = encrypted(&world, pki.connector(Some(names))).await.unwrap();
        let listed = client.option(option::LIST, &[]).await.1;
        assert_eq!(listed, [(option_reply::SERVER, named(opens, &[]))]);
        for name in [refuses, "nothing"] {
            let refused = client.option(option::GO, &named(name, &[0, 0])).await.0;
            assert_eq!(refused, option_reply::ERR_POLICY, "the same for what does not exist");
        }
        let mut client = client.go(opens, Dialect::Structured).await;
        assert_eq!(client.read_at(0, 512).await, [0; 512]);
    }
    let stranger = pki.connector(Some(("other.example", "stranger")));
    let mut client = encrypted(&world, stranger).await.unwrap();
    assert_eq!(client.option(option::LIST, &[]).await, (option_reply::ACK, Vec::new()));

    // No certificate, or one of another authority. With TLS 1.3 the client learns it at its first
    // read.
    for connector in [pki.connector(None), {
        let other = Pki::new();
        let mut config = (**pki.connector(None).config()).clone();
        let (certificate, key) = other.issue("db1.example", "db1");
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        let key = provider.key_provider.load_private_key(key).unwrap();
        let certified = rustls::sign::CertifiedKey::new(vec![certificate], key);
        config.client_auth_cert_resolver =
            Arc::new(rustls::sign::SingleCertAndKey::from(certified));
        TlsConnector::from(Arc::new(config))
    }] {
        if let Ok(mut client) = encrypted(&world, connector).await {
            assert!(client.is_closed_within(Duration::from_secs(5)).await);
        }
    }
}
