//! A node whose network is far slower than that of the others becomes a member by force only, and the
//! bytes sent within and across zones are counted.
//!
//! Invariants:
//! - The slow node is an ordinary one but for its answers to probes, which a seeded bug holds back.

use crate::stores::{History, VOLUMES, on};
use serde_json::Value;
use std::time::Duration;
use tests::daemon::Daemon;
use tests::nbd::{Connection, Wanted};
use tests::store::{Server, free_address};

const NAMES: [&str; 3] = ["a", "b", "c"];
const ZONES: [&str; 3] = ["west", "west", "east"];

/// Three nodes, each in its zone, of which the first owns the pool alone. The last one is slow.
fn three(address: &str) -> Vec<Daemon> {
    let mut nodes: Vec<Daemon> = NAMES.iter().map(|_| on(address)).collect();
    nodes[2].use_binary("spindle-faulty");
    nodes[2].environ(&[("SPINDLE_SEEDED_BUGS", "probe-answered-late")]);
    for node in &nodes {
        std::fs::create_dir_all(node.dir()).expect("make a directory");
    }
    let mut token = None;
    for number in 0..NAMES.len() {
        let address = free_address();
        let new = ["--address", &address, "--name", NAMES[number], "--zone", ZONES[number]];
        match token.take() {
            None => {
                let founded = nodes[0].json(&[&["node", "init"], &new[..]].concat());
                assert_eq!(founded["node"]["zone"], "west", "{founded}");
            }
            Some(token) => {
                let token: String = token;
                let _ = nodes[number].json(&[&["node", "join", &token], &new[..]].concat());
            }
        }
        // Nodes of a busy machine may miss each other for a moment.
        nodes[number].announce("");
        nodes[number].restart();
        let issued = nodes[0].json(&["node", "token"]);
        token = Some(issued["token"].as_str().expect("a token").to_owned());
    }
    nodes
}

fn add<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    [&["pool", "members", "add"], arguments].concat()
}

fn paths(added: &Value) -> Vec<(String, String)> {
    let paths = added["paths"].as_array().expect("paths").iter();
    paths.map(|path| (end_of(path, "from"), end_of(path, "to"))).collect()
}

fn end_of(path: &Value, end: &str) -> String {
    path[end].as_str().expect("a name").to_owned()
}

#[test]
fn slow_node_becomes_a_member_by_force_only() {
    let store = Server::start();
    let nodes = three(store.address());
    let added = nodes[0].json(&add(&["b"]));
    assert_eq!((&added["reply"], added["forced"].is_null()), (&"member_added".into(), true));
    assert_eq!(paths(&added), [("a".to_owned(), "b".to_owned())], "{added}");
    let refused = nodes[0].command(&add(&["c"]));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    println!("{said}");
    assert_eq!(refused.status.code(), Some(1), "{said}");
    for words in ["a round trip from node a to node c takes", "to a member, b,", "--force"] {
        assert!(said.contains(words), "it does not say {words:?}: {said}");
    }
    let members = |nodes: &[Daemon]| nodes[0].json(&["pool", "members", "list"]);
    let listed = members(&nodes);
    assert_eq!(
        listed["members"].as_array().map(Vec::len),
        Some(2),
        "nothing was changed: {listed}"
    );
    let added = nodes[0].json(&add(&["c", "--force"]));
    println!("{added}");
    assert!(added["forced"].as_str().is_some_and(|why| why.contains("round trip")), "{added}");
    let pairs = [("a", "c"), ("c", "b"), ("a", "b")];
    assert_eq!(paths(&added), pairs.map(|(from, to)| (from.to_owned(), to.to_owned())));
    let listed = members(&nodes);
    let zones: Vec<&Value> =
        listed["members"].as_array().expect("members").iter().map(|one| &one["zone"]).collect();
    assert_eq!(zones, ZONES);
    // From here on each batch goes to one member in the zone, and to one in another.
    let before = listed["traffic"].clone();
    let open = |(name, _): &(&str, &str)| {
        Connection::open(&nodes[0].unix(name), &Wanted::everything()).expect("it is served")
    };
    let mut connections: Vec<Connection> = VOLUMES.iter().map(open).collect();
    History::new(1).run_for(&mut connections, Duration::from_millis(500));
    let status = nodes[0].json(&["status"]);
    let traffic = &status["members"]["traffic"];
    println!("{before} {traffic}");
    let more = |field: &str| {
        let bytes = |traffic: &Value| traffic[field].as_u64().expect("a number");
        bytes(traffic) - bytes(&before)
    };
    let written = more("written_bytes");
    assert!(written > 0, "{traffic}");
    for sent in ["sent_within_bytes", "sent_across_bytes"].map(more) {
        // What is under way is not sent to both, or not acknowledged yet.
        assert!(sent > written / 2 && sent < written * 2, "{sent} for {written}");
    }
    let text = nodes[0].command(&["pool", "members", "list"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("bytes per byte written:") && text.contains("ZONE"), "{text}");
}
