//! TLS between nodes: version 1.3, and certificates on both sides.
//!
//! Invariants:
//! - A handshake on the protocol of nodes succeeds only if the list admits the peer's certificate,
//!   byte for byte. Names and dates in certificates do not matter, and no authority does.
//! - A stranger's certificate is accepted only on the protocol of joiners, which leads to the join
//!   service alone.
//! - No session is resumed: a resumption would pass by the list.

use crate::identity::{Digest, Identity, NodeId, is_usable, sha256};
use crate::membership::Membership;
use crate::seeded_bugs::seeded_bugs;
use block::{Error, ErrorKind, Result};
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, ServerConfig,
    SignatureScheme,
};
use std::fmt;
use std::sync::Arc;

/// Protocol (ALPN) between admitted nodes.
pub const NODES: &[u8] = b"spindle-node";
/// Protocol (ALPN) of a joiner.
pub const JOINERS: &[u8] = b"spindle-join";

/// The certificates that a side accepts.
enum Accepts {
    /// Those of admitted nodes.
    Admitted(Arc<Membership>),
    /// That of one node, if it is admitted.
    Node(Arc<Membership>, NodeId),
    /// The one with this SHA-256.
    Pinned(Digest),
    /// Each that a node could have.
    Joiners,
}

impl Accepts {
    fn accepts(&self, certificate: &CertificateDer<'_>) -> bool {
        if seeded_bugs().strangers_accepted {
            return is_usable(certificate);
        }
        match self {
            Accepts::Admitted(membership) => membership.admitted(certificate).is_some(),
            Accepts::Node(membership, node) => membership.admitted(certificate) == Some(*node),
            Accepts::Pinned(digest) => {
                sha256(certificate) == *digest || seeded_bugs().pin_unchecked
            }
            Accepts::Joiners => is_usable(certificate),
        }
    }
}

/// Verifies the peer's certificate by the list, and its signature by the key in it.
struct Verifier {
    accepts: Accepts,
    algorithms: WebPkiSupportedAlgorithms,
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier").finish_non_exhaustive()
    }
}

impl Verifier {
    fn new(accepts: Accepts) -> Arc<Verifier> {
        let algorithms = provider().signature_verification_algorithms;
        Arc::new(Verifier { accepts, algorithms })
    }

    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        match self.accepts.accepts(certificate) {
            true => Ok(()),
            false => Err(CertificateError::ApplicationVerificationFailure.into()),
        }
    }
}

fn no_tls12() -> rustls::Error {
    rustls::Error::General("nodes speak TLS 1.3 only".to_owned())
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.check(end_entity).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.check(end_entity).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

fn failed(error: rustls::Error) -> Error {
    Error::with_source(ErrorKind::Invalid, "use the node's certificate for TLS", error)
}

/// The configurations of an accepting node.
#[derive(Clone, Debug)]
pub struct Acceptors {
    /// For admitted nodes.
    pub nodes: Arc<ServerConfig>,
    /// For joiners.
    pub joiners: Arc<ServerConfig>,
}

/// Makes the configurations of an accepting node.
///
/// # Errors
/// `Invalid` if the TLS library does not take the certificate.
pub fn acceptors(membership: &Arc<Membership>) -> Result<Acceptors> {
    let make = |accepts, protocol: &[u8]| -> Result<Arc<ServerConfig>> {
        let identity = membership.identity();
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(failed)?
            .with_client_cert_verifier(Verifier::new(accepts))
            .with_single_cert(vec![identity.certificate().clone()], identity.private_key())
            .map_err(failed)?;
        config.alpn_protocols = vec![protocol.to_vec()];
        if !seeded_bugs().sessions_resumed {
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
        }
        Ok(Arc::new(config))
    };
    Ok(Acceptors {
        nodes: make(Accepts::Admitted(Arc::clone(membership)), NODES)?,
        joiners: make(Accepts::Joiners, JOINERS)?,
    })
}

/// Makes the configuration with which this node dials another.
///
/// # Errors
/// `Invalid` if the TLS library does not take the certificate.
pub fn dialer(membership: &Arc<Membership>, node: NodeId) -> Result<Arc<ClientConfig>> {
    let accepts = Accepts::Node(Arc::clone(membership), node);
    client(membership.identity(), accepts, NODES)
}

/// Makes the configuration with which a joiner dials the issuer of its token.
///
/// # Errors
/// `Invalid` if the TLS library does not take the certificate.
pub fn joiner(identity: &Identity, issuer: Digest) -> Result<Arc<ClientConfig>> {
    client(identity, Accepts::Pinned(issuer), JOINERS)
}

fn client(identity: &Identity, accepts: Accepts, protocol: &[u8]) -> Result<Arc<ClientConfig>> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(failed)?
        .dangerous()
        .with_custom_certificate_verifier(Verifier::new(accepts))
        .with_client_auth_cert(vec![identity.certificate().clone()], identity.private_key())
        .map_err(failed)?;
    config.alpn_protocols = vec![protocol.to_vec()];
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::AdmissionList;
    use rustls::{ClientConnection, HandshakeKind, ServerConnection};

    fn founder() -> (tempfile::TempDir, Arc<Membership>) {
        let dir = tempfile::tempdir().unwrap();
        let identity = Identity::generate("n1").unwrap();
        let lock = crate::home::claim(dir.path(), &identity).unwrap();
        let list = AdmissionList::found(&identity, &["127.0.0.1:1".to_owned()], None).unwrap();
        let membership = Membership::create(dir.path(), identity, lock, list).unwrap();
        (dir, Arc::new(membership))
    }

    /// Runs a handshake in memory. Returns its kind.
    fn shake(
        client: &Arc<ClientConfig>,
        server: &Arc<ServerConfig>,
    ) -> Result<Option<HandshakeKind>, rustls::Error> {
        let name = ServerName::try_from("spindle").unwrap();
        let mut client = ClientConnection::new(Arc::clone(client), name)?;
        let mut server = ServerConnection::new(Arc::clone(server))?;
        for _ in 0..10 {
            let mut bytes = Vec::new();
            client.write_tls(&mut bytes).unwrap();
            server.read_tls(&mut &bytes[..]).unwrap();
            server.process_new_packets()?;
            bytes.clear();
            server.write_tls(&mut bytes).unwrap();
            client.read_tls(&mut &bytes[..]).unwrap();
            client.process_new_packets()?;
        }
        assert!(!client.is_handshaking() && !server.is_handshaking());
        Ok(server.handshake_kind())
    }

    #[test]
    fn older_tls_is_refused() {
        let (_dir, membership) = founder();
        let acceptors = acceptors(&membership).unwrap();
        let client = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS12])
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(Verifier::new(Accepts::Joiners))
            .with_no_client_auth();
        let error = shake(&Arc::new(client), &acceptors.nodes).unwrap_err();
        assert!(matches!(error, rustls::Error::PeerIncompatible(_)), "{error}");
    }

    /// A resumed session would not show the certificate to the list again.
    #[test]
    fn no_session_is_resumed() {
        let (_dir, membership) = founder();
        let acceptors = acceptors(&membership).unwrap();
        let mut client =
            ClientConfig::clone(&dialer(&membership, membership.identity().id()).unwrap());
        client.resumption = Resumption::in_memory_sessions(8);
        let client = Arc::new(client);
        for _ in 0..3 {
            let kind = shake(&client, &acceptors.nodes).unwrap();
            assert_eq!(kind, Some(HandshakeKind::Full));
        }
    }
}
