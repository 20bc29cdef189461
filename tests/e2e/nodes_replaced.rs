//! A member whose machine is lost gets a successor by one command, and one that lost only its log another log.
//!
//! Invariants:
//! - No acknowledged write is lost, although each replacement begins with nothing.
//! - A command that is refused changes nothing.

use crate::fail_over::{NAMES, Nodes};
use crate::nodes::{free_address, refused};
use crate::stores::History;
use std::time::Duration;
use tests::seed::seeds;

const LOAD: Duration = Duration::from_millis(300);

fn replace(nodes: &Nodes, names: &[&str]) -> serde_json::Value {
    nodes.nodes[0].json(&[&["pool", "members", "replace"], names].concat())
}

#[track_caller]
fn replace_refused(nodes: &Nodes, names: &[&str], words: &str) {
    let arguments = [&["pool", "members", "replace"], names].concat();
    refused(&nodes.nodes[0].command(&arguments), 1, words);
}

#[test]
fn lost_member_is_replaced_by_one_command() {
    for seed in seeds(1) {
        let mut nodes = Nodes::start();
        let mut history = History::new(seed);
        let (_, mut connections) = nodes.connect(0);
        replace_refused(&nodes, &["a"], "it owns the pool");
        replace_refused(&nodes, &["nine"], "it is no member");
        replace_refused(&nodes, &["b"], "the cluster has no other node of this name");
        replace_refused(&nodes, &["b", "c"], "is a member of the pool's log already");
        replace_refused(&nodes, &["b", "nine"], "let the new machine join the cluster first");
        history.run_for(&mut connections, LOAD);

        // Only the log is lost; the node is still one of the cluster.
        nodes.nodes[2].kill();
        std::fs::remove_dir_all(nodes.nodes[2].dir().join("log")).expect("remove the log");
        nodes.nodes[2].restart();
        replace_refused(&nodes, &["c"], "`spindle pool members remove c`");
        let listed = nodes.nodes[0].json(&["pool", "members", "list"]);
        assert_eq!(listed["members"].as_array().map(Vec::len), Some(3), "{listed}");
        let _ = nodes.nodes[0].json(&["pool", "members", "remove", "c"]);
        let _ = nodes.nodes[0].json(&["pool", "members", "add", "c", "--force"]);
        history.run_for(&mut connections, LOAD);
        nodes.catch_up(0);

        // The machine is lost, and another one gets its name. The pool has two members meanwhile, so it
        // acknowledges nothing without the new one.
        let _ = nodes.nodes[0].json(&["pool", "members", "remove", "c"]);
        nodes.nodes[1].kill();
        std::fs::remove_dir_all(nodes.nodes[1].dir()).expect("remove the directory");
        std::fs::create_dir(nodes.nodes[1].dir()).expect("make a directory");
        let key = "spindle.key";
        let copied = std::fs::copy(nodes.nodes[0].dir().join(key), nodes.nodes[1].dir().join(key));
        copied.expect("copy the key");
        let _ = nodes.nodes[0].json(&["node", "remove", "b"]);
        let issued = nodes.nodes[0].json(&["node", "token"]);
        let token = issued["token"].as_str().expect("a token");
        let address = free_address();
        let _ = nodes.nodes[1].json(&["node", "join", token, "--address", &address, "--name", "b"]);
        nodes.nodes[1].restart();
        let replaced = replace(&nodes, &["b"]);
        assert_eq!((&replaced["replaced"], &replaced["member_count"]), (&"b".into(), &2.into()));
        history.run_for(&mut connections, LOAD);
        let _ = nodes.nodes[0].json(&["pool", "members", "add", "c", "--force"]);
        history.run_for(&mut connections, LOAD);
        nodes.catch_up(0);

        // Neither of the two that are left had anything at first.
        nodes.nodes[0].kill();
        let (_, mut connections) = nodes.connect(1);
        assert_eq!(history.prefix(&mut connections), history.count(), "{}", nodes.logs());
        assert!(NAMES[nodes.owner()] != "a");
    }
}
