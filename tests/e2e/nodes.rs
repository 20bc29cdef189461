//! Nodes of a cluster: founding, joining, listing and leaving, by the commands of an operator.
//!
//! Invariants:
//! - A mistake gets a sentence that says what to do, and changes nothing.

use serde_json::Value;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};
use tests::daemon::{Daemon, SMALL};

/// Longest time until a change of the list has reached the other node.
const SPREAD_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the address of a port that was free a moment ago.
pub fn free_address() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("it is bound").to_string()
}

#[track_caller]
pub fn refused(output: &Output, code: i32, words: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(said.contains(words), "it does not say {words:?}: {said}");
}

fn listed(daemon: &Daemon) -> Value {
    daemon.json(&["node", "list"])
}

fn names(list: &Value) -> Vec<String> {
    let nodes = list["nodes"].as_array().expect("a list").iter();
    nodes.map(|node| node["name"].as_str().expect("a name").to_owned()).collect()
}

#[track_caller]
fn wait_for_names(daemon: &Daemon, wanted: &[&str]) {
    let deadline = Instant::now() + SPREAD_TIMEOUT;
    while names(&listed(daemon)) != wanted {
        assert!(Instant::now() < deadline, "{wanted:?}: {}", listed(daemon));
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn joined_from_stdin(daemon: &Daemon, token: &str, arguments: &[&str]) -> Output {
    let mut command = daemon.prepare(&[&["node", "join", "-"], arguments].concat());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().expect("the program runs");
    let mut input = process.stdin.take().expect("it is piped");
    writeln!(input, "{token}").expect("it reads");
    drop(input);
    process.wait_with_output().expect("it ends")
}

#[test]
fn nodes_join_list_and_leave() {
    let mut first = Daemon::started(SMALL, &[("disk", "4MiB")]);
    let mut second = Daemon::new(SMALL, &[("disk", "4MiB")]);
    let third = Daemon::new(SMALL, &[]);
    let (address, other, last) = (free_address(), free_address(), free_address());
    refused(&first.command(&["node", "list"]), 1, "`spindle node init`");
    let init = ["node", "init", "--address", &address, "--name", "n1"];
    let founded = first.json(&init);
    assert_eq!(founded["is_restart_needed"], true, "{founded}");
    refused(&first.command(&init), 1, "already belongs to a cluster");
    let mode = std::fs::metadata(first.dir().join("node")).expect("it is there").permissions();
    assert_eq!(mode.mode() & 0o777, 0o700);
    let token = founded["token"]["token"].as_str().expect("a token").to_owned();
    let join =
        |token: &str| joined_from_stdin(&second, token, &["--address", &other, "--name", "n2"]);
    refused(&join(&token[..token.len() - 3]), 2, "cut or mistyped");
    // Nothing listens there before the restart.
    refused(&join(&token), 1, &address);
    first.stop();
    first.restart();
    let output = join(&token);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    refused(&join(&token), 1, "already belongs to a cluster");
    first.announce("could not admit a node");
    let used = ["node", "join", &token, "--address", &last, "--name", "n3"];
    refused(&third.command(&used), 1, "issue one for each node");
    assert_eq!(names(&listed(&first)), ["n1", "n2"]);
    let offline = listed(&second);
    assert_eq!(
        (names(&offline), &offline["is_served"]),
        (vec!["n1".into(), "n2".into()], &false.into())
    );
    second.restart();
    wait_for_names(&second, &["n1", "n2"]);
    let list = listed(&second);
    assert_eq!((&list["is_served"], &list["cluster"]), (&true.into(), &founded["cluster"]));
    let status = first.json(&["status"]);
    assert_eq!((&status["node"]["name"], &status["node"]["node_count"]), (&"n1".into(), &2.into()));
    refused(&first.command(&["node", "remove", "n1"]), 1, "run the command on another node");
    refused(&first.command(&["node", "remove", "n9"]), 1, "`spindle node list` shows all");
    let _ = first.json(&["node", "remove", "n2"]);
    assert_eq!(names(&listed(&first)), ["n1"]);
    // A removed node can still list, and a third one joins in its place.
    second.stop();
    let token = first.json(&["node", "token"])["token"].as_str().expect("a token").to_owned();
    let joined = third.json(&["node", "join", &token, "--address", &last, "--name", "n3"]);
    assert_eq!(joined["node_count"], 2, "{joined}");
    assert_eq!(names(&listed(&first)), ["n1", "n3"]);
    first.stop();
    let offline = first.json(&["status"]);
    assert_eq!(
        (&offline["node"]["is_served"], &offline["is_offline"]),
        (&false.into(), &true.into())
    );
    // The address of a node must be free.
    let _taken = std::net::TcpListener::bind(&address).expect("the daemon has left it");
    let said = first.refuses_to_start();
    assert!(said.contains(&address) && said.contains("listen for other nodes"), "{said}");
}
