//! NBD under TLS: the whole protocol again, the clients that are accepted, and the exports that
//! each may open.
//!
//! Invariants:
//! - Without TLS a client of a TLS server sees nothing but the greeting.

use crate::conformance::Way;
use rcgen::{CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use std::path::Path;
use std::sync::Arc;
use tests::daemon::{Daemon, SMALL};
use tests::nbd::negotiate::Haggle;
use tests::nbd::wire::*;
use tests::nbd::{Connection, Endpoint, TlsClient, Wanted};
use tests::place::run;

pub(crate) struct Authority {
    certificate: rcgen::Certificate,
    issuer: Issuer<'static, KeyPair>,
}

type Identity = (CertificateDer<'static>, Arc<PrivateKeyDer<'static>>, String, String);

impl Authority {
    pub(crate) fn new(name: &str) -> Authority {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("a certificate");
        Authority { certificate, issuer: Issuer::new(params, key) }
    }

    /// Issues a certificate for a name: as bytes, and as PEM with its key.
    fn issue(&self, name: &str) -> Identity {
        let params = CertificateParams::new(vec![name.to_owned()]).expect("a DNS name");
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        let bytes = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        (certificate.der().clone(), Arc::new(bytes), certificate.pem(), key.serialize_pem())
    }

    /// Writes the authority's certificate under the name that clients on the command line expect.
    pub(crate) fn write_for_clients(&self, dir: &Path) {
        std::fs::write(dir.join("ca-cert.pem"), self.certificate.pem())
            .expect("write a certificate");
    }

    fn client(&self, identity: Option<&Identity>) -> TlsClient {
        TlsClient {
            authority: self.certificate.der().clone(),
            identity: identity.map(|identity| (identity.0.clone(), Arc::clone(&identity.1))),
            server_name: "localhost".to_owned(),
        }
    }
}

/// Makes a TLS server with certificates of `authority`; `clients` is TOML for `[nbd.tls]`.
pub(crate) fn daemon(authority: &Authority, clients: &str) -> Daemon {
    let (_, _, certificate, key) = authority.issue("localhost");
    let mut daemon = Daemon::new(SMALL, &[("disk", "96MiB"), ("other", "8MiB")]);
    let (cert_path, key_path) =
        (daemon.place().join("server.crt"), daemon.place().join("server.key"));
    let authority_path = daemon.place().join("ca.crt");
    std::fs::write(&cert_path, certificate).expect("write a certificate");
    std::fs::write(&key_path, key).expect("write a key");
    std::fs::write(&authority_path, authority.certificate.pem()).expect("write a certificate");
    run("chmod", &["600", &key_path.display().to_string()]);
    let clients = clients.replace("CA", &authority_path.display().to_string());
    let settings = format!(
        "{SMALL}[nbd.tls]\ncert = \"{}\"\nkey = \"{}\"\n{clients}",
        cert_path.display(),
        key_path.display()
    );
    std::fs::write(daemon.place().join("spindle.toml"), settings).expect("write the configuration");
    daemon.announce("nbd");
    daemon.restart();
    daemon
}

fn opens(endpoint: &Endpoint, tls: &TlsClient) -> Result<(), String> {
    let wanted = Wanted { tls: Some(tls.clone()), ..Wanted::everything() };
    let mut connection = Connection::open(endpoint, &wanted).map_err(|error| error.to_string())?;
    connection.write(0, b"hello", 0);
    assert_eq!(connection.read(0, 5), b"hello");
    Ok(())
}

#[test]
fn the_whole_protocol_works_under_tls() {
    let authority = Authority::new("authority");
    let mut daemon = daemon(&authority, "");
    let tls = Some(authority.client(None));
    Way::new(daemon.tcp("disk"), tls, 96 << 20).check();
    daemon.stop();
}

#[test]
fn without_tls_nothing_is_served() {
    let authority = Authority::new("authority");
    let daemon = daemon(&authority, "");
    let endpoint = daemon.tcp("disk");
    for option in [OPT_LIST, OPT_INFO, OPT_GO, OPT_STRUCTURED_REPLY] {
        let mut haggle = Haggle::greet(endpoint.connect().unwrap()).unwrap();
        let payload = tests::nbd::negotiate::open_payload("disk", &[]);
        let payload = if [OPT_INFO, OPT_GO].contains(&option) { &payload[..] } else { &[] };
        let replies = haggle.ask(option, payload).expect("an answer");
        assert_eq!(replies.last().expect("one").kind, REP_ERR_TLS_REQD, "option {option}");
        assert_eq!(replies.len(), 1, "something was said before the refusal");
    }
    let mut haggle = Haggle::greet(endpoint.connect().unwrap()).unwrap();
    haggle.send(OPT_EXPORT_NAME, b"disk").unwrap();
    assert!(haggle.reply(OPT_EXPORT_NAME).is_err(), "the old way in is closed as well");
}

#[test]
fn certificates_identify_clients_and_limit_their_exports() {
    let authority = Authority::new("authority");
    let stranger = Authority::new("stranger");
    let clients = "client_ca = \"CA\"\n[nbd.tls.clients]\n\
                   \"db.example\" = [\"disk\"]\n\"backup.example\" = [\"*\"]\n";
    let daemon = daemon(&authority, clients);
    let (disk, other) = (daemon.tcp("disk"), daemon.tcp("other"));
    let db = authority.client(Some(&authority.issue("db.example")));
    let backup = authority.client(Some(&authority.issue("backup.example")));
    opens(&disk, &db).expect("its own export");
    opens(&other, &db).expect_err("another's export");
    opens(&disk, &backup).expect("everything");
    opens(&other, &backup).expect("everything");
    let nobody = authority.client(Some(&authority.issue("nobody.example")));
    opens(&disk, &nobody).expect_err("a name that is not in the list");
    opens(&disk, &authority.client(None)).expect_err("no certificate");
    let forged = authority.client(Some(&stranger.issue("db.example")));
    opens(&disk, &forged).expect_err("a certificate of another authority");
    let mut haggle = Haggle::greet(disk.connect().unwrap()).unwrap().start_tls(&db).unwrap();
    assert_eq!(haggle.list().expect("LIST works"), ["disk"], "others' exports are not listed");
}

#[test]
fn hangup_reloads_certificates_and_keeps_old_ones_on_error() {
    let old = Authority::new("old");
    let new = Authority::new("new");
    let mut daemon = daemon(&old, "");
    daemon.announce("could not read the TLS certificates again");
    let disk = daemon.tcp("disk");
    opens(&disk, &old.client(None)).expect("the certificate of the start");
    opens(&disk, &new.client(None)).expect_err("not yet");
    let wait_for = |text: &str| {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while !daemon.log().contains(text) {
            assert!(std::time::Instant::now() < deadline, "no {text:?} in: {}", daemon.tail());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    };
    let certificate = daemon.place().join("server.crt");
    std::fs::write(&certificate, "no certificate").expect("write a file");
    daemon.hang_up();
    wait_for("could not read the TLS certificates again");
    assert!(daemon.tail().contains("server.crt"), "it names the file: {}", daemon.tail());
    opens(&disk, &old.client(None)).expect("those from before stay");
    let (_, _, pem, key) = new.issue("localhost");
    std::fs::write(&certificate, pem).expect("write a certificate");
    std::fs::write(daemon.place().join("server.key"), key).expect("write a key");
    daemon.hang_up();
    wait_for("has read the TLS certificates again");
    opens(&disk, &new.client(None)).expect("the new certificate");
    opens(&disk, &old.client(None)).expect_err("the old one is gone");
    daemon.stop();
}
