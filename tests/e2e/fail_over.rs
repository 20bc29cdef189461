//! A pool whose write log is on three nodes: its owner dies, and another node serves every
//! acknowledged write.
//!
//! Invariants:
//! - The nodes are processes on this machine, each with its own directory, log and addresses; they
//!   share the object store.

use crate::stores::{self, History, VOLUMES, on_s3};
use std::time::{Duration, Instant};
use tests::daemon::{Daemon, SMALL};
use tests::nbd::{Connection, Endpoint, Wanted};
use tests::seed::seeds;
use tests::store::{Server, free_address};

pub const NAMES: [&str; 3] = ["a", "b", "c"];
/// Longest wait for anything that a node does.
pub const WAIT_MAX: Duration = Duration::from_secs(30);
/// Longest pause of a client when the owner dies, on a machine that does other work beside. Detection
/// takes a second of it.
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Three nodes, of which the first owns the pool.
pub struct Nodes {
    pub nodes: Vec<Daemon>,
    store: Server,
}

impl Nodes {
    pub fn start() -> Nodes {
        Nodes::start_with(SMALL)
    }

    /// Like [`Nodes::start`], with these settings of each node.
    pub fn start_with(settings: &str) -> Nodes {
        let store = Server::start();
        let node = |_| on_s3(settings, VOLUMES, store.address());
        let mut nodes: Vec<Daemon> = NAMES.iter().map(node).collect();
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
            let (address, name) = (free_address(), NAMES[number]);
            let joining = ["node", "join", &token, "--address", &address, "--name", name];
            let _ = nodes[number].json(&joining);
            nodes[number].restart();
            let _ = nodes[0].json(&["pool", "members", "add", name]);
            let issued = nodes[0].json(&["node", "token"]);
            token = issued["token"].as_str().expect("a token").to_owned();
        }
        let nodes = Nodes { nodes, store };
        assert_eq!(nodes.members(0)["quorum"], 2);
        nodes
    }

    /// Returns the address of the object store.
    pub fn store(&self) -> &str {
        self.store.address()
    }

    fn members(&self, node: usize) -> serde_json::Value {
        self.nodes[node].json(&["pool", "members", "list"])
    }

    /// Returns the node that owns the pool. Each node passes the question on to it.
    pub fn owner(&self) -> usize {
        self.owner_but(NAMES.len())
    }

    /// Like [`Nodes::owner`], while the daemon with the number `paused` is stopped: it is not asked.
    pub fn owner_but(&self, paused: usize) -> usize {
        let begun = Instant::now();
        loop {
            let said = |(number, node): (usize, &Daemon)| {
                let args = ["pool", "members", "list", "-o", "json"];
                let is_asked = node.is_running() && number != paused;
                let out = is_asked.then(|| node.command(&args))?;
                let info: serde_json::Value = serde_json::from_slice(&out.stdout).ok()?;
                let members = info["members"].as_array()?;
                let owner = members.iter().find(|member| member["is_owner"] == true)?;
                NAMES.iter().position(|name| owner["node"] == *name)
            };
            let owner = self.nodes.iter().enumerate().find_map(said);
            if let Some(owner) = owner.filter(|owner| *owner != paused) {
                return owner;
            }
            assert!(begun.elapsed() < WAIT_MAX, "no node owns the pool: {}", self.logs());
        }
    }

    /// Connects through any node that runs, in turn from `first`: each passes clients on to the owner.
    /// Returns the number of the node.
    pub fn connect(&self, first: usize) -> (usize, Vec<Connection>) {
        let begun = Instant::now();
        loop {
            for number in (0..NAMES.len()).map(|number| (first + number) % NAMES.len()) {
                let node = &self.nodes[number];
                if !node.is_running() {
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

    pub fn logs(&self) -> String {
        let tail = |(name, node): (&&str, &Daemon)| format!("== {name}\n{}\n", node.tail());
        NAMES.iter().zip(&self.nodes).map(tail).collect()
    }

    /// Waits until every member has everything that the owner acknowledged.
    pub fn catch_up(&self, owner: usize) {
        self.catch_up_with(owner, NAMES.len());
    }

    /// Like [`Nodes::catch_up`], for a pool with `count` members.
    fn catch_up_with(&self, owner: usize, count: usize) {
        let begun = Instant::now();
        loop {
            // An owner that has just begun may not yet answer.
            let listed = self.nodes[owner].command(&["pool", "members", "list", "-o", "json"]);
            let info: serde_json::Value =
                serde_json::from_slice(&listed.stdout).unwrap_or_default();
            let members = info["members"].as_array().map_or(&[][..], Vec::as_slice);
            let is_up = |member: &serde_json::Value| {
                member["is_connected"] == true && member["behind"] == 0
            };
            if members.len() == count && members.iter().all(is_up) {
                return;
            }
            assert!(begun.elapsed() < WAIT_MAX, "{listed:?}\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn acknowledged_writes_survive_the_death_of_the_owner() {
    for seed in seeds(1) {
        let mut nodes = Nodes::start();
        let mut history = History::new(seed);
        assert_eq!(nodes.owner(), 0);
        let mut owner = 0;
        // Not by way of the owner.
        let (way, mut connections) = nodes.connect(1);
        assert_eq!(way, 1);
        for round in 0..3 {
            history.run_for(&mut connections, Duration::from_millis(700));
            // Nothing was flushed, and no process has time to say goodbye.
            nodes.nodes[owner].kill();
            let killed = Instant::now();
            let (way, opened) = nodes.connect(owner + 1 + round % 2);
            let pause = killed.elapsed();
            let next = nodes.owner();
            println!(
                "round {round}: node {} serves after {pause:?}, by way of {}",
                NAMES[next], NAMES[way]
            );
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
        while nodes.owner() != next {}
        let (_, mut connections) = nodes.connect(owner);
        assert_eq!(history.prefix(&mut connections), history.count());
        nodes.catch_up(next);
        // An orderly end leaves everything in the store.
        drop(connections);
        // The owner first: it needs the others to the end.
        for number in 0..NAMES.len() {
            nodes.nodes[(next + number) % NAMES.len()].stop();
        }
    }
}

#[test]
fn pool_moves_without_a_failed_request() {
    for seed in seeds(1) {
        let nodes = Nodes::start();
        let mut history = History::new(seed);
        let (_, mut connections) = nodes.connect(0);
        let mut owner = 0;
        // Asked on the old owner, on the new one, and on the third.
        for asked in [0, 2, 1] {
            history.run_for(&mut connections, Duration::from_millis(300));
            let next = (owner + 1) % NAMES.len();
            let (ended, moved) = std::thread::scope(|scope| {
                let writing = scope.spawn(|| {
                    history.run_until_ended(&mut connections);
                    Instant::now()
                });
                let moved = nodes.nodes[asked].json(&["pool", "move", NAMES[next]]);
                (writing.join().expect("no write is refused"), moved)
            });
            let (way, opened) = nodes.connect(next);
            connections = opened;
            history.reissue(&mut connections);
            let (pause, said) = (ended.elapsed(), &moved["pause_ms"]);
            println!("to {}: {pause:?}, {said} ms between owners, by way of {way}", NAMES[next]);
            assert!(said.as_u64().is_some_and(|ms| ms < 5000), "{moved}\n{}", nodes.logs());
            assert_eq!(nodes.owner(), next, "{}", nodes.logs());
            assert_eq!(history.prefix(&mut connections), history.count(), "{}", nodes.logs());
            nodes.catch_up(next);
            owner = next;
        }
        let refused = nodes.nodes[owner].command(&["pool", "move", NAMES[owner]]);
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(text.contains("owns the pool already"), "{text}");
        let refused = nodes.nodes[owner].command(&["pool", "move", "d"]);
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(text.contains("is no member"), "{text}");
        drop(connections);
        let report = nodes.nodes[owner].place().join("report.json");
        let report = report.to_str().expect("a path of letters");
        let drill = nodes.nodes[owner].json(&["drill", "fail-over", "--report", report]);
        println!("{drill}");
        let moves = drill["moves"].as_array().expect("moves");
        assert_eq!(moves.len(), 4, "{drill}");
        assert!(moves.iter().all(|one| one["pause_ms"].as_u64().is_some_and(|ms| ms < 5000)));
        assert_eq!(drill["owner"], NAMES[owner]);
        let kept: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(report).expect("a report"))
                .expect("JSON");
        assert_eq!(kept, drill);
        assert_eq!(nodes.owner(), owner);
        assert_eq!(history.prefix(&mut nodes.connect(0).1), history.count());
    }
}

/// Each machine has a daemon for each pool, and owns one pool while it stores the log of the other.
#[test]
fn machine_that_dies_takes_only_its_own_pool_down() {
    for seed in seeds(1) {
        let (mut first, mut second) = (Nodes::start(), Nodes::start());
        let (mut of_first, mut of_second) = (History::new(seed), History::new(seed + 1));
        let _ = second.nodes[0].json(&["pool", "move", NAMES[1]]);
        let (_, mut connections) = first.connect(0);
        let (_, mut unharmed) = second.connect(1);
        of_first.run_for(&mut connections, Duration::from_millis(300));
        of_second.run_for(&mut unharmed, Duration::from_millis(300));
        // The machine a.
        first.nodes[0].kill();
        second.nodes[0].kill();
        // It had the log of the second pool only: no connection ends, and no write waits for it.
        of_second.run_for(&mut unharmed, Duration::from_millis(300));
        let (_, mut connections) = first.connect(1);
        assert_ne!(first.owner(), 0);
        assert_eq!(of_first.prefix(&mut connections), of_first.count(), "{}", first.logs());
        assert_eq!(of_second.prefix(&mut unharmed), of_second.count(), "{}", second.logs());
        first.nodes[0].restart();
        second.nodes[0].restart();
        first.catch_up(first.owner());
        second.catch_up(1);
    }
}

#[test]
fn missing_members_are_conditions_until_they_are_back() {
    let mut nodes = Nodes::start();
    let shown = |nodes: &Nodes| {
        let status = nodes.nodes[0].json(&["status"]);
        let of = |condition: &serde_json::Value| {
            condition["kind"]
                .as_str()
                .filter(|kind| ["member-away", "quorum-lost"].contains(kind))
                .map(str::to_owned)
        };
        let listed = status["conditions"].as_array().expect("conditions").iter();
        listed.filter_map(of).collect::<Vec<_>>()
    };
    let wait = |nodes: &Nodes, wanted: &[&str]| {
        let begun = Instant::now();
        while shown(nodes) != wanted {
            assert!(begun.elapsed() < WAIT_MAX, "{:?} and not {wanted:?}", shown(nodes));
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    assert!(shown(&nodes).is_empty());
    nodes.nodes[2].kill();
    wait(&nodes, &["member-away"]);
    nodes.nodes[1].kill();
    wait(&nodes, &["member-away", "member-away", "quorum-lost"]);
    // A write waits, and is answered once a quorum is back.
    let (_, mut connections) = nodes.connect(0);
    let writing = std::thread::spawn(move || {
        let mut history = History::new(7);
        history.run_for(&mut connections, Duration::from_millis(1));
    });
    std::thread::sleep(Duration::from_millis(300));
    assert!(!writing.is_finished(), "one of three members has acknowledged a write");
    nodes.nodes[1].restart();
    writing.join().expect("the write is answered");
    wait(&nodes, &["member-away"]);
    nodes.nodes[2].restart();
    wait(&nodes, &[]);
}

/// Sets the conduct without a quorum, and lets all members but the owner die. Returns the connections to it,
/// once the pool goes on.
pub fn left_alone(nodes: &mut Nodes, history: &mut History, conduct: &str) -> Vec<Connection> {
    let _ = nodes.nodes[0].json(&["pool", "members", "degraded", conduct]);
    let (_, mut connections) = nodes.connect(0);
    history.run_for(&mut connections, Duration::from_millis(300));
    let ended = Instant::now();
    nodes.nodes[1].kill();
    nodes.nodes[2].kill();
    // It waits until the two are left out.
    history.run_for(&mut connections, Duration::from_millis(1));
    println!("the owner goes on alone after {:?}", ended.elapsed());
    let members = nodes.members(0);
    assert_eq!((&members["quorum"], &members["degraded"]), (&1.into(), &conduct.into()));
    assert_eq!(members["away"], serde_json::json!(["b", "c"]), "{members}");
    connections
}

#[test]
fn owner_goes_on_alone_and_takes_the_others_back() {
    for seed in seeds(1) {
        let mut nodes = Nodes::start();
        let mut history = History::new(seed);
        let mut connections = left_alone(&mut nodes, &mut history, "solo");
        let status = nodes.nodes[0].command(&["status"]);
        let status = String::from_utf8_lossy(&status.stdout).into_owned();
        assert!(status.contains("alone: a loss of this machine loses it; away: b, c"), "{status}");
        history.run_for(&mut connections, Duration::from_millis(300));
        // A crash of the owner changes nothing about that.
        nodes.nodes[0].kill();
        nodes.nodes[0].restart();
        let (_, mut connections) = nodes.connect(0);
        assert_eq!(history.prefix(&mut connections), history.count(), "{}", nodes.logs());
        history.run_for(&mut connections, Duration::from_millis(300));
        nodes.nodes[1].restart();
        nodes.nodes[2].restart();
        nodes.catch_up(0);
        history.run_for(&mut connections, Duration::from_millis(300));
        nodes.nodes[0].kill();
        let (_, mut connections) = nodes.connect(1);
        assert_eq!(history.prefix(&mut connections), history.count(), "{}", nodes.logs());
    }
}

#[test]
fn one_of_two_members_takes_the_pool_over_alone() {
    for seed in seeds(1) {
        let mut nodes = Nodes::start();
        let _ = nodes.nodes[0].json(&["pool", "members", "remove", NAMES[2]]);
        let _ = nodes.nodes[0].json(&["pool", "members", "degraded", "solo"]);
        let mut history = History::new(seed);
        let (_, mut connections) = nodes.connect(0);
        for owner in [0, 1, 0] {
            history.run_for(&mut connections, Duration::from_millis(300));
            let next = 1 - owner;
            nodes.nodes[owner].kill();
            let killed = Instant::now();
            // By way of the new owner, or of the node that is no member.
            let (way, opened) = nodes.connect(next);
            println!("{} goes on alone after {:?}, by way of {way}", NAMES[next], killed.elapsed());
            connections = opened;
            assert_eq!(history.prefix(&mut connections), history.count(), "{}", nodes.logs());
            history.run_for(&mut connections, Duration::from_millis(300));
            let members = nodes.members(next);
            assert_eq!(members["away"], serde_json::json!([NAMES[owner]]), "{members}");
            nodes.nodes[owner].restart();
            nodes.catch_up_with(next, 2);
        }
    }
}

#[test]
fn flush_of_an_owner_that_is_alone_survives_its_directory() {
    for seed in seeds(1) {
        let mut nodes = Nodes::start();
        let mut history = History::new(seed);
        let mut connections = left_alone(&mut nodes, &mut history, "store");
        history.run_for(&mut connections, Duration::from_millis(300));
        connections.iter_mut().for_each(Connection::flush);
        let flushed = history.count();
        history.run_for(&mut connections, Duration::from_millis(100));
        let mut another = stores::second(&nodes.nodes[0], nodes.store.address());
        nodes.nodes[0].kill();
        std::fs::remove_dir_all(nodes.nodes[0].dir()).expect("remove the directory");
        another.argue(&["--take-over"]);
        another.announce("");
        another.restart();
        let found = history.prefix(&mut stores::open(&another));
        println!("{found} of {} writes, {flushed} of them flushed", history.count());
        assert!(found >= flushed, "{found} of {flushed} flushed writes");
        another.stop();
    }
}
