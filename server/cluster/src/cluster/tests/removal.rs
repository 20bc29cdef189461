//! Removal: connections close, the node is refused, and all nodes hear of it.

use super::*;
use tokio::io::AsyncReadExt;

#[tokio::test]
async fn removal_closes_the_connections_of_that_node_only() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let second = joined("n2", &first, &clock).await;
    let third = joined("n3", &first, &clock).await;
    register_echo(&first);
    register_echo(&second);
    let member = second.cluster.connect(first.id(), Service::Member, Some(POOL)).await.unwrap();
    let other = third.cluster.connect(first.id(), Service::Member, Some(POOL)).await.unwrap();
    let outgoing = first.cluster.connect(second.id(), Service::Forward, Some(POOL)).await.unwrap();
    let mut outgoing = outgoing.into_stream();
    first.cluster.remove(second.id()).unwrap();
    let (mut reader, _writer) = member.into_frames();
    let ended = timeout(WAIT, reader.read()).await.expect("the connection is closed");
    assert!(matches!(ended, Ok(None) | Err(_)), "{ended:?}");
    let ended = timeout(WAIT, outgoing.read(&mut [0; 1])).await.expect("it is closed");
    assert!(ended.unwrap_err().to_string().contains("was removed"));
    let (mut reader, mut writer) = other.into_frames();
    writer.write(1, 5, &[]).await.unwrap();
    assert_eq!(reader.read().await.unwrap().unwrap().request, 5);
}

#[tokio::test]
async fn removed_node_is_refused_in_the_handshake() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let second = joined("n2", &first, &clock).await;
    register_echo(&first);
    first.cluster.remove(second.id()).unwrap();
    let connected = second.cluster.connect(first.id(), Service::Member, Some(POOL)).await;
    let error = connected.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(error.to_string().contains("does not admit this node"), "{error}");
    let error = first.cluster.connect(second.id(), Service::Member, None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let error = first.cluster.remove(second.id()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let removed: Vec<String> = first.cluster.removed_names().into_iter().collect();
    assert!(removed.len() == 2 && removed.contains(&"n2".to_owned()), "{removed:?}");
    assert!(removed.contains(&second.id().to_string()), "{removed:?}");
    assert_eq!(first.cluster.remove(first.id()).unwrap_err().kind(), ErrorKind::Invalid);
    // Its key never comes back, even with a token.
    let token = first.cluster.issue_token().unwrap().to_word();
    let addresses = [second.address.clone()];
    let dir = second.stopped().await;
    std::fs::remove_file(dir.path().join("node/cluster.json")).unwrap();
    let joining =
        Cluster::join(dir.path(), NewNode::new("n2", &addresses), &token, environment(&clock));
    let error = joining.await.err().unwrap();
    assert!(error.to_string().contains("from an empty directory"), "{error}");
}

#[tokio::test]
async fn removal_on_one_node_reaches_those_that_are_up() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let second = joined("n2", &first, &clock).await;
    let third = joined("n3", &first, &clock).await;
    let fourth = joined("n4", &first, &clock).await;
    for node in [&first, &second, &third, &fourth] {
        node.wait_for(&["n1", "n2", "n3", "n4"]).await;
    }
    second.cluster.remove(third.id()).unwrap();
    for node in [&first, &second, &fourth] {
        node.wait_for(&["n1", "n2", "n4"]).await;
    }
}

#[tokio::test]
async fn node_that_was_down_hears_of_a_removal_when_it_is_back() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let second = joined("n2", &first, &clock).await;
    let third = joined("n3", &first, &clock).await;
    for node in [&first, &second, &third] {
        node.wait_for(&["n1", "n2", "n3"]).await;
    }
    let dir = third.stopped().await;
    first.cluster.remove(second.id()).unwrap();
    let cluster = Cluster::open(dir.path(), environment(&clock)).unwrap();
    assert_eq!(cluster.nodes().len(), 3, "it has not heard of the removal");
    let (listener, address) = listen().await;
    let serving = serve(&cluster, listener);
    let back = Running { cluster, dir, address, serving };
    back.wait_for(&["n1", "n3"]).await;
}
