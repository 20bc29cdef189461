//! Mistakes of an operator with the members of a pool's log.
//!
//! Invariants:
//! - A mistake gets a sentence that says what to do, at once, and changes nothing.

use crate::fail_over::{NAMES, Nodes};
use crate::nodes::{free_address, refused};
use crate::stores::{VOLUMES, on_store};
use serde_json::Value;
use std::time::{Duration, Instant};
use tests::daemon::{Daemon, SMALL};

/// Longest time for a refusal.
const AT_ONCE: Duration = Duration::from_secs(10);

#[track_caller]
fn refused_at_once(node: &Daemon, arguments: &[&str], words: &str) {
    let asked = Instant::now();
    refused(&node.command(arguments), 1, words);
    assert!(asked.elapsed() < AT_ONCE, "after {:?}", asked.elapsed());
}

/// Admits a node whose directory has the pool's key, and starts it.
fn admit(nodes: &Nodes, node: &mut Daemon, name: &str) {
    let issued = nodes.nodes[0].json(&["node", "token"]);
    let token = issued["token"].as_str().expect("a token");
    let address = free_address();
    // The name of another node is refused, and the token stays valid.
    let taken = ["node", "join", token, "--address", &address, "--name", NAMES[1]];
    refused_at_once(node, &taken, "the name b is taken");
    let _ = node.json(&["node", "join", token, "--address", &address, "--name", name]);
    node.announce("");
    node.restart();
}

#[test]
fn mistakes_with_members_are_refused_with_advice() {
    let mut nodes = Nodes::start();
    let members = |nodes: &Nodes| -> Vec<Value> {
        let list = nodes.nodes[0].json(&["pool", "members", "list"]);
        let of = |member: &Value| member["node"].clone();
        list["members"].as_array().expect("members").iter().map(of).collect()
    };
    let owner = &nodes.nodes[0];
    refused_at_once(owner, &["pool", "members", "add", "nine"], "`spindle node list` shows all");
    refused_at_once(owner, &["pool", "members", "remove", "nine"], "is no member");
    refused_at_once(owner, &["pool", "members", "remove", NAMES[0]], "it owns the pool");
    // Of the two that would stay, one is dead: writes would wait for it.
    nodes.nodes[1].kill();
    let owner = &nodes.nodes[0];
    let words = "of these b does not answer";
    refused_at_once(owner, &["pool", "members", "remove", NAMES[2]], words);
    assert_eq!(members(&nodes), NAMES);
    nodes.nodes[1].restart();
    nodes.catch_up(0);
    // A node that was a member, and one that had another pool.
    let _ = nodes.nodes[0].json(&["pool", "members", "remove", NAMES[2]]);
    refused_at_once(&nodes.nodes[2], &["pool", "take-over"], "this node is no member of its log");
    let mut foreign = Daemon::started(SMALL, VOLUMES);
    foreign.stop();
    on_store(&mut foreign, nodes.store());
    let key = "spindle.key";
    std::fs::copy(nodes.nodes[0].dir().join(key), foreign.dir().join(key)).expect("copy the key");
    admit(&nodes, &mut foreign, "d");
    let words = "use the right --store or another --dir";
    refused_at_once(&nodes.nodes[0], &["pool", "members", "add", "d"], words);
    assert_eq!(members(&nodes), NAMES[..2]);
}
