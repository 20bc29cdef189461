//! Strangers, other clusters, other versions, and silent peers.

use super::*;
use crate::connection::{ANSWER_MAGIC, Answer, PREFIX_BYTES, PROTOCOL_VERSION};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;

/// Connects with this configuration and sends these bytes. Returns the body of the answer.
async fn ask(address: &str, config: Arc<ClientConfig>, bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let socket = TcpStream::connect(address).await?;
    let name = ServerName::try_from("spindle").unwrap();
    let mut tls = TlsConnector::from(config).connect(name, socket).await?;
    tls.write_all(bytes).await?;
    let mut prefix = [0; PREFIX_BYTES];
    tls.read_exact(&mut prefix).await?;
    let mut body = vec![0; usize::from(u16::from_le_bytes([prefix[10], prefix[11]]))];
    tls.read_exact(&mut body).await?;
    assert!(prefix.starts_with(ANSWER_MAGIC));
    assert_eq!(u16::from_le_bytes([prefix[8], prefix[9]]), PROTOCOL_VERSION);
    Ok(body)
}

fn hello(of: &Cluster, service: u8) -> Vec<u8> {
    Hello { service, cluster: of.cluster_id(), pool: None, list: [0; 32] }.encode()
}

/// A stranger in a cluster of its own, whose list it made to contain the nodes of `other`.
fn pretender(other: &Cluster) -> (TempDir, Arc<Membership>) {
    let dir = tempfile::tempdir().unwrap();
    let identity = Identity::generate("x").unwrap();
    let lock = crate::home::claim(dir.path(), &identity).unwrap();
    let addresses = ["127.0.0.1:1".to_owned()];
    let mut list = AdmissionList::found(&identity, &addresses, None).unwrap();
    for node in other.nodes() {
        list.admit(&identity, NewNode::new(&node.name, &node.addresses), &node.certificate)
            .unwrap();
    }
    let membership = Membership::create(dir.path(), identity, lock, list).unwrap();
    (dir, Arc::new(membership))
}

fn is_alert(error: &std::io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    matches!(inner, Some(rustls::Error::AlertReceived(_)))
}

/// A client that has no certificate.
#[derive(Debug)]
struct NoCertificate;

impl rustls::client::ResolvesClientCert for NoCertificate {
    fn resolve(
        &self,
        _hints: &[&[u8]],
        _schemes: &[rustls::SignatureScheme],
    ) -> Option<Arc<rustls::sign::CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

#[tokio::test]
async fn stranger_without_certificate_is_refused_in_the_handshake() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let (_dir, pretender) = pretender(&first.cluster);
    for protocol in [tls::NODES, tls::JOINERS] {
        let with = tls::dialer(&pretender, first.id()).unwrap();
        let mut config = ClientConfig::clone(&with);
        config.client_auth_cert_resolver = Arc::new(NoCertificate);
        config.alpn_protocols = vec![protocol.to_vec()];
        let asked = ask(&first.address, Arc::new(config), &hello(&first.cluster, 1)).await;
        let error = asked.unwrap_err();
        assert!(is_alert(&error), "{error}");
    }
}

#[tokio::test]
async fn certificate_of_another_cluster_is_refused_in_the_handshake() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    register_echo(&first);
    let (_dir, pretender) = pretender(&first.cluster);
    let config = tls::dialer(&pretender, first.id()).unwrap();
    let error = ask(&first.address, config, &hello(&first.cluster, 3)).await.unwrap_err();
    assert!(is_alert(&error), "{error}");
}

#[tokio::test]
async fn joiner_reaches_no_other_service() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    register_echo(&first);
    let identity = Identity::generate("x").unwrap();
    let issuer = crate::identity::sha256(&first.cluster.nodes()[0].certificate);
    for service in 2..=6 {
        let config = tls::joiner(&identity, issuer).unwrap();
        let body = ask(&first.address, config, &hello(&first.cluster, service)).await.unwrap();
        let answer = Answer::decode(&body).unwrap();
        assert_eq!(answer.refused, Some(Refused::NotAdmitted), "{service}");
        assert_eq!(answer.list, [0; 32], "a stranger learns nothing of the list");
    }
}

#[tokio::test]
async fn other_node_at_the_address_is_noticed() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let other = founder("m1", &clock).await;
    let second = Identity::generate("n2").unwrap();
    let addresses = std::slice::from_ref(&other.address);
    let membership = &first.cluster.0.membership;
    // The list has the address that the node of another cluster has taken.
    membership
        .change(|list| {
            list.admit(membership.identity(), NewNode::new("n2", addresses), second.certificate())
        })
        .unwrap();
    let connected = first.cluster.connect(second.id(), Service::Member, Some(POOL)).await;
    let error = connected.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(error.to_string().contains("is not the node that was dialed"), "{error}");
}

#[tokio::test]
async fn other_version_is_refused_with_both_versions() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let second = joined("n2", &first, &clock).await;
    let config = tls::dialer(&second.cluster.0.membership, first.id()).unwrap();
    let mut newer = hello(&first.cluster, 3);
    newer[8] = 9;
    let body = ask(&first.address, config, &newer).await.unwrap();
    let answer = Answer::decode(&body).unwrap();
    assert_eq!(answer.refused, Some(Refused::Version));
    assert_eq!(answer.text, "this node speaks version 1, and not 9");
}

#[tokio::test]
async fn answer_of_another_version_names_both_versions() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let (listener, address) = listen().await;
    let (dir, identity) = (tempfile::tempdir().unwrap(), Identity::generate("n2").unwrap());
    let lock = crate::home::claim(dir.path(), &identity).unwrap();
    let membership = &first.cluster.0.membership;
    let addresses = std::slice::from_ref(&address);
    membership
        .change(|list| {
            list.admit(membership.identity(), NewNode::new("n2", addresses), identity.certificate())
        })
        .unwrap();
    let second = identity.id();
    let list = (*membership.list()).clone();
    let other = Arc::new(Membership::create(dir.path(), identity, lock, list).unwrap());
    let acceptor = tokio_rustls::TlsAcceptor::from(tls::acceptors(&other).unwrap().nodes);
    let newer_program = tokio::spawn(async move {
        let (socket, _) = listener.accept().await.unwrap();
        let mut tls = acceptor.accept(socket).await.unwrap();
        let mut answer = ANSWER_MAGIC.to_vec();
        answer.extend_from_slice(&[9, 0, 3, 0, 1, 2, 3]);
        tls.write_all(&answer).await.unwrap();
        tls.flush().await.unwrap();
        let _ = tls.read(&mut [0; 1]).await;
    });
    let connected = first.cluster.connect(second, Service::Member, Some(POOL)).await;
    let error = connected.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let text = error.to_string();
    assert!(text.contains("version 9") && text.contains("version 1"), "{text}");
    newer_program.abort();
}

#[tokio::test]
async fn unknown_services_and_pools_are_refused_with_the_reason() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let second = joined("n2", &first, &clock).await;
    let connect = |service, pool| second.cluster.connect(first.id(), service, pool);
    let error = connect(Service::Member, Some(POOL)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    register_echo(&first);
    let error = connect(Service::Member, Some(Uuid::from_u128(9))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("no such pool here"), "{error}");
    let error = connect(Service::Member, None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let error = connect(Service::Join, None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied);
    let config = tls::dialer(&second.cluster.0.membership, first.id()).unwrap();
    let body = ask(&first.address, config, &hello(&first.cluster, 99)).await.unwrap();
    assert_eq!(Answer::decode(&body).unwrap().refused, Some(Refused::Service));
    let own = second.cluster.connect(second.id(), Service::Member, None).await.unwrap_err();
    assert_eq!(own.kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn silent_strangers_are_bounded_and_make_room_when_they_end() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let second = joined("n2", &first, &clock).await;
    register_echo(&first);
    // They wait for no answer, and hold every place.
    let mut silent = Vec::new();
    for _ in 0..STRANGER_COUNT_MAX {
        silent.push(TcpStream::connect(&first.address).await.unwrap());
    }
    let connect = || second.cluster.connect(first.id(), Service::Member, Some(POOL));
    let waiting = timeout(Duration::from_millis(300), connect()).await;
    assert!(waiting.is_err(), "all places were taken");
    drop(silent);
    assert!(timeout(WAIT, connect()).await.unwrap().is_ok());
}
