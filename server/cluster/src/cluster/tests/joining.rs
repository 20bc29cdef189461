//! Joining with good and bad tokens.

use super::*;
use std::os::unix::fs::PermissionsExt;

#[tokio::test]
async fn joined_node_is_known_to_all() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let second = joined("n2", &first, &clock).await;
    // Any node may issue.
    let third = joined("n3", &second, &clock).await;
    for node in [&first, &second, &third] {
        node.wait_for(&["n1", "n2", "n3"]).await;
        assert_eq!(node.cluster.cluster_id(), first.cluster.cluster_id());
        assert!(node.cluster.conflicts().is_empty());
    }
    let of_third = first.cluster.nodes().into_iter().find(|node| node.name == "n3").unwrap();
    assert_eq!(of_third.admitted_by, second.id());
    assert_eq!(of_third.addresses, std::slice::from_ref(&third.address));
    let id = third.id();
    let error = Cluster::open(third.dir.path(), environment(&clock)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    let dir = third.stopped().await;
    let reopened = Cluster::open(dir.path(), environment(&clock)).unwrap();
    assert_eq!((reopened.node_id(), reopened.nodes().len()), (id, 3));
}

#[tokio::test]
async fn token_admits_one_node() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let token = first.cluster.issue_token().unwrap().to_word();
    let second = try_join("n2", &token, &clock).await.unwrap();
    let error = try_join("n3", &token, &clock).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(error.to_string().contains("used by another node"), "{error}");
    assert_eq!(first.names(), ["n1", "n2"]);
    drop(second);
    // A restart of the issuer keeps that.
    let dir = first.stopped().await;
    let again = Cluster::open(dir.path(), environment(&clock)).unwrap();
    let (listener, address) = listen().await;
    let serving = serve(&again, listener);
    let mut token = Token::parse(&token).unwrap();
    token.addresses = vec![address];
    let error = try_join("n3", &token.to_word(), &clock).await.err().unwrap();
    assert!(error.to_string().contains("used by another node"), "{error}");
    serving.abort();
}

#[tokio::test]
async fn expired_token_is_refused() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let [late, in_time, set_back] =
        [(); 3].map(|()| first.cluster.issue_token().unwrap().to_word());
    clock.advance(Duration::from_secs(3599));
    try_join("n2", &in_time, &clock).await.unwrap();
    clock.advance(Duration::from_secs(1));
    let error = try_join("n3", &late, &clock).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(error.to_string().contains("has expired"), "{error}");
    clock.jump(-3600 - 301);
    let error = try_join("n3", &set_back, &clock).await.err().unwrap();
    assert!(error.to_string().contains("has expired"), "{error}");
    assert_eq!(first.names(), ["n1", "n2"]);
}

#[tokio::test]
async fn lost_answer_costs_no_second_token() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let token = first.cluster.issue_token().unwrap().to_word();
    let second = try_join("n2", &token, &clock).await.unwrap();
    let (id, addresses) = (second.id(), [second.address.clone()]);
    let dir = second.stopped().await;
    // As if the answer had not arrived: the node has its key, and no list.
    std::fs::remove_file(dir.path().join("node/cluster.json")).unwrap();
    let joining =
        Cluster::join(dir.path(), NewNode::new("n2", &addresses), &token, environment(&clock));
    let again = joining.await.unwrap();
    assert_eq!((again.node_id(), again.nodes().len()), (id, 2));
}

#[tokio::test]
async fn taken_name_is_refused_and_another_works() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let token = first.cluster.issue_token().unwrap().to_word();
    let dir = tempfile::tempdir().unwrap();
    let addresses = ["127.0.0.1:1".to_owned()];
    let join = async |name: &'static str| {
        let node = NewNode::new(name, &addresses);
        Cluster::join(dir.path(), node, &token, environment(&clock)).await
    };
    let error = join("n1").await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains("name n1 is taken"), "{error}");
    let error = join("n 1").await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let joined = join("n2").await.unwrap();
    assert_eq!(joined.node_name(), "n2");
    let error = join("n3").await.err().unwrap();
    assert!(error.to_string().contains("already belongs to a cluster"), "{error}");
    let again = Cluster::init(dir.path(), NewNode::new("n3", &addresses), environment(&clock));
    assert_eq!(again.err().unwrap().kind(), ErrorKind::Busy);
}

#[tokio::test]
async fn secret_goes_only_to_the_node_that_issued_it() {
    let clock = ManualClock::new();
    let (first, other) = (founder("n1", &clock).await, founder("m1", &clock).await);
    let mut token = first.cluster.issue_token().unwrap();
    token.addresses = vec![other.address.clone()];
    let dir = tempfile::tempdir().unwrap();
    let addresses = ["127.0.0.1:1".to_owned()];
    let word = token.to_word();
    let joining =
        Cluster::join(dir.path(), NewNode::new("n2", &addresses), &word, environment(&clock));
    let error = joining.await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(error.to_string().contains("is not the node that issued the token"), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing was left behind");
    // The right node, and a token that names another cluster.
    let mut token = first.cluster.issue_token().unwrap();
    token.cluster = other.cluster.cluster_id();
    let error = try_join("n2", &token.to_word(), &clock).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(error.to_string().contains("is in cluster"), "{error}");
}

#[tokio::test]
async fn made_up_secret_is_refused() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let mut token = first.cluster.issue_token().unwrap();
    token.secret.0[0] ^= 1;
    let error = try_join("n2", &token.to_word(), &clock).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(error.to_string().contains("not known"), "{error}");
    let kept = std::fs::read_to_string(first.dir.path().join("node/tokens.json")).unwrap();
    token.secret.0[0] ^= 1;
    assert!(!kept.contains(&block::hex::to_hex(&token.secret.0)), "only a hash is kept");
}

#[tokio::test]
async fn valid_tokens_are_bounded() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    for _ in 0..256 {
        first.cluster.issue_token().unwrap();
    }
    assert_eq!(first.cluster.issue_token().unwrap_err().kind(), ErrorKind::Full);
    clock.advance(Duration::from_secs(3600));
    assert!(first.cluster.issue_token().is_ok());
}

#[tokio::test]
async fn key_file_goes_to_a_node_that_has_none() {
    let clock = ManualClock::new();
    let keys = tempfile::tempdir().unwrap();
    let with_key =
        |name: &str| Environment { key_file: Some(keys.path().join(name)), ..environment(&clock) };
    let (listener, address) = listen().await;
    let (dir, own) = (tempfile::tempdir().unwrap(), keys.path().join("n1"));
    std::fs::write(&own, b"the key of the pool").unwrap();
    let addresses = std::slice::from_ref(&address);
    let issuer = Cluster::init(dir.path(), NewNode::new("n1", addresses), with_key("n1")).unwrap();
    let serving = serve(&issuer, listener);
    let join = async |name: &str, environment: Environment| {
        let (dir, token) = (tempfile::tempdir().unwrap(), issuer.issue_token().unwrap().to_word());
        let node = NewNode::new(name, addresses);
        Cluster::join(dir.path(), node, &token, environment).await.unwrap();
    };
    let read = |name: &str| std::fs::read(keys.path().join(name)).ok();
    join("n2", with_key("n2")).await;
    assert_eq!(read("n2").as_deref(), Some(&b"the key of the pool"[..]));
    let mode = std::fs::metadata(keys.path().join("n2")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    std::fs::write(keys.path().join("n3"), b"of another pool").unwrap();
    join("n3", with_key("n3")).await;
    assert_eq!(read("n3").as_deref(), Some(&b"of another pool"[..]), "a key is never replaced");
    join("n4", environment(&clock)).await;
    std::fs::remove_file(&own).unwrap();
    join("n5", with_key("n5")).await;
    assert_eq!(read("n5"), None, "the issuer has none");
    serving.abort();
}
