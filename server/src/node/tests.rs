//! Tests of a node's service in this process.

use super::*;
use crate::handlers::node::{answer, status};
use api::Reply;
use api::node::{NodeRequest, NodesInfo};
use cluster::NewNode;
use std::time::Duration;

/// Returns the address of a port that was free a moment ago.
fn free_address() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

/// Founds a cluster in this directory, or joins that of a token.
async fn node(dir: &Path, name: &str, token: Option<&str>) -> (Cluster, Serving) {
    let addresses = [free_address()];
    let new = NewNode::new(name, &addresses);
    let cluster = match token {
        None => Cluster::init(dir, new, bare_environment()).unwrap(),
        Some(token) => Cluster::join(dir, new, token, bare_environment()).await.unwrap(),
    };
    let serving = serve(&cluster).await.unwrap().expect("it is admitted");
    (cluster, serving)
}

async fn listed(served: Option<&Cluster>, dir: &Path) -> NodesInfo {
    match answer(served, dir, NodeRequest::List {}).await.unwrap() {
        Reply::Nodes(nodes) => nodes,
        other => panic!("{other:?}"),
    }
}

async fn token(served: Option<&Cluster>, dir: &Path) -> String {
    match answer(served, dir, NodeRequest::Token {}).await.unwrap() {
        Reply::NodeToken(info) => info.token.expose().to_owned(),
        other => panic!("{other:?}"),
    }
}

async fn refusal(served: &Cluster, dir: &Path, node: &str) -> Error {
    let request = NodeRequest::Remove { node: node.to_owned() };
    answer(Some(served), dir, request).await.unwrap_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_is_removed_by_name_or_id_and_its_connections_close() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (n1, _serving_1) = node(first.path(), "n1", None).await;
    let word = token(Some(&n1), first.path()).await;
    let (n2, _serving_2) = node(second.path(), "n2", Some(&word)).await;
    let error = refusal(&n1, first.path(), "n9").await;
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("`spindle node list` shows all"), "{error}");
    for own in ["n1", &n1.node_id().to_string()] {
        let error = refusal(&n1, first.path(), own).await;
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("run the command on another node"), "{error}");
    }
    let nodes = listed(Some(&n1), first.path()).await;
    let shown: Vec<_> = nodes.nodes.iter().map(|node| (&*node.name, node.is_this)).collect();
    assert_eq!(shown, [("n1", true), ("n2", false)]);
    assert!(nodes.is_served && nodes.nodes[0].connection_count.is_none());
    let held = n2.connect(n1.node_id(), cluster::Service::Admissions, None).await.unwrap();
    let of_second =
        |nodes: &NodesInfo| nodes.nodes.iter().find_map(|node| node.connection_count).unwrap();
    assert!(of_second(&listed(Some(&n1), first.path()).await) >= 1);
    let request = NodeRequest::Remove { node: n2.node_id().to_string() };
    answer(Some(&n1), first.path(), request).await.unwrap();
    let (mut reader, _writer) = held.into_frames();
    let read = tokio::time::timeout(Duration::from_secs(20), reader.read()).await;
    assert!(!matches!(read.expect("it is closed"), Ok(Some(_))));
    assert_eq!(listed(Some(&n1), first.path()).await.nodes.len(), 1);
    assert_eq!(refusal(&n1, first.path(), "n2").await.kind(), ErrorKind::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn address_in_use_is_named_and_the_port_is_free_after_the_guard() {
    let dir = tempfile::tempdir().unwrap();
    let (cluster, serving) = node(dir.path(), "n1", None).await;
    let address = cluster.nodes()[0].addresses[0].clone();
    let error = serve(&cluster).await.unwrap_err();
    assert!(error.to_string().contains(&address), "{error}");
    drop(serving);
    let deadline = tokio::time::sleep(Duration::from_secs(20));
    tokio::pin!(deadline);
    // The runtime drops the task, and with it the listener, a little later.
    loop {
        match serve(&cluster).await {
            Ok(serving) => break assert!(serving.is_some()),
            Err(error) => tokio::select! {
                () = &mut deadline => panic!("{}", error.chain()),
                () = tokio::time::sleep(Duration::from_millis(10)) => {}
            },
        }
    }
}

#[tokio::test]
async fn directory_without_a_daemon_answers_from_its_files() {
    let dir = tempfile::tempdir().unwrap();
    let error = answer(None, dir.path(), NodeRequest::List {}).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("`spindle node init`"), "{error}");
    assert_eq!(status(None, dir.path()).await.unwrap(), None);
    let addresses = ["127.0.0.1:7400".to_owned()];
    drop(Cluster::init(dir.path(), NewNode::new("n1", &addresses), bare_environment()).unwrap());
    let nodes = listed(None, dir.path()).await;
    assert!(!nodes.is_served && nodes.nodes[0].is_this);
    assert!(token(None, dir.path()).await.starts_with("spindle"));
    let place = status(None, dir.path()).await.unwrap().expect("it is a node");
    assert_eq!((&*place.name, place.node_count), ("n1", 1));
    assert!(place.is_admitted && !place.is_served);
}
