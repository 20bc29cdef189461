//! A pool whose write log is on three nodes: its owner dies, and another node serves every
//! acknowledged write.
//!
//! Invariants:
//! - The nodes are processes on this machine, each with its own directory, log and addresses; they
//!   share the object store.

use crate::stores::{History, VOLUMES, on};
use std::time::{Duration, Instant};
use tests::daemon::Daemon;
use tests::nbd::{Connection, Endpoint, Wanted};
use tests::seed::seeds;
use tests::store::{Server, free_address};

const NAMES: [&str; 3] = ["a", "b", "c"];
/// Longest wait for anything that a node does.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Longest pause of a client when the owner dies, on a machine that does other work beside. Detection
/// takes a second of it.
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Three nodes, of which the first owns the pool.
struct Nodes {
    nodes: Vec<Daemon>,
    _store: Server,
}

impl Nodes {
    fn start() -> Nodes {
        let store = Server::start();
        let mut nodes: Vec<Daemon> = NAMES.iter().map(|_| on(store.address())).collect();
        for node in &mut nodes {
            // Nodes that die and come back are warned about.
            node.announce("");
            std::fs::create_dir_all(node.dir()).expect("make a directory");
        }
        let address = free_address();
        let founded = nodes[0].json(&["node", "init", "--address", &address, "--name", NAMES[0]]);
        nodes[0].restart();
        let mut token = founded["token"]["token"].as_str().expect("a token").to_owned();
        for number in 1..NAMES.len() {
            let key = "spindle.key";
            let copied = std::fs::copy(nodes[0].dir().join(key), nodes[number].dir().join(key));
            copied.expect("copy the key");
            let (address, name) = (free_address(), NAMES[number]);
            let joining = ["node", "join", &token, "--address", &address, "--name", name];
            let _ = nodes[number].json(&joining);
            nodes[number].restart();
            let _ = nodes[0].json(&["pool", "members", "add", name]);
            let issued = nodes[0].json(&["node", "token"]);
            token = issued["token"].as_str().expect("a token").to_owned();
        }
        let nodes = Nodes { nodes, _store: store };
        assert_eq!(nodes.members(0)["quorum"], 2);
        nodes
    }

    fn members(&self, node: usize) -> serde_json::Value {
        self.nodes[node].json(&["pool", "members", "list"])
    }

    /// Connects to the first node that serves the pool, but `except`. Returns its number.
    fn connect(&self, except: Option<usize>) -> (usize, Vec<Connection>) {
        let begun = Instant::now();
        loop {
            for (number, node) in self.nodes.iter().enumerate() {
                if Some(number) == except || !node.is_running() {
                    continue;
                }
                let socket = node.place().join("nbd.sock");
                let open = |(name, _): &(&str, &str)| {
                    let uri = format!("nbd+unix:///{name}?socket={}", socket.display());
                    let endpoint = Endpoint::parse(&uri).expect("an address");
                    Connection::open(&endpoint, &Wanted::everything()).ok()
                };
                if let Some(connections) = VOLUMES.iter().map(open).collect() {
                    return (number, connections);
                }
            }
            assert!(begun.elapsed() < WAIT_MAX, "no node serves the pool: {}", self.logs());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn logs(&self) -> String {
        let tail = |(name, node): (&&str, &Daemon)| format!("== {name}\n{}\n", node.tail());
        NAMES.iter().zip(&self.nodes).map(tail).collect()
    }

    /// Waits until every member has everything that the owner acknowledged.
    fn catch_up(&self, owner: usize) {
        let begun = Instant::now();
        loop {
            let info = self.members(owner);
            let members = info["members"].as_array().expect("members");
            let is_up = |member: &serde_json::Value| {
                member["is_connected"] == true && member["behind"] == 0
            };
            if members.len() == NAMES.len() && members.iter().all(is_up) {
                return;
            }
            assert!(begun.elapsed() < WAIT_MAX, "{info}\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn acknowledged_writes_survive_the_death_of_the_owner() {
    for seed in seeds(1) {
        let mut nodes = Nodes::start();
        let mut history = History::new(seed);
        let (mut owner, mut connections) = nodes.connect(None);
        assert_eq!(owner, 0);
        for round in 0..3 {
            history.run_for(&mut connections, Duration::from_millis(700));
            // Nothing was flushed, and no process has time to say goodbye.
            nodes.nodes[owner].kill();
            let killed = Instant::now();
            let (next, opened) = nodes.connect(Some(owner));
            let pause = killed.elapsed();
            println!("round {round}: node {} serves after {pause:?}", NAMES[next]);
            assert!(pause < PAUSE_MAX, "{pause:?}\n{}", nodes.logs());
            connections = opened;
            assert_eq!(history.prefix(&mut connections), history.count(), "{}", nodes.logs());
            nodes.nodes[owner].restart();
            nodes.catch_up(next);
            owner = next;
        }
        // By hand, while the owner runs.
        history.run_for(&mut connections, Duration::from_millis(300));
        let next = (owner + 1) % NAMES.len();
        let _ = nodes.nodes[next].json(&["pool", "take-over"]);
        let (now, mut connections) = nodes.connect(Some(owner));
        assert_eq!((now, history.prefix(&mut connections)), (next, history.count()));
        nodes.catch_up(next);
        // An orderly end leaves everything in the store.
        drop(connections);
        // The owner first: it needs the others to the end.
        for number in 0..NAMES.len() {
            nodes.nodes[(next + number) % NAMES.len()].stop();
        }
    }
}
