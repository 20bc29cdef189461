//! A member of a pool's log that fails or is missing while its process, or its connection, is there.
//!
//! Invariants:
//! - A client gets no error while another node can serve the pool.
//! - A node answers commands, whatever it waits for.

use crate::fail_over::{NAMES, Nodes};
use crate::failed_log::Disk;
use crate::stores::History;
use serde_json::Value;
use std::time::{Duration, Instant};
use tests::seed::seeds;
use tests::{Place, needs, needs_root};

/// Longest wait for anything that a node does.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Longest time until the owner goes on without members that hang: their silence, and then that of a quorum, on a
/// machine that does other work beside.
const GOES_ON_MAX: Duration = Duration::from_secs(10);

fn wait(nodes: &Nodes, what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < WAIT_MAX, "{what}: {}", nodes.logs());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn clients_of_an_owner_whose_log_disk_fails_get_no_error() {
    needs_root!();
    needs!("mkfs.ext4", "losetup");
    for seed in seeds(1) {
        let place = Place::new();
        let disk = Disk::new(&place, "ext4");
        let mut nodes = Nodes::start();
        nodes.nodes[0].kill();
        let (inside, log) = (disk.at().join("log"), nodes.nodes[0].dir().join("log"));
        tests::place::run("cp", &["-a", &log.display().to_string(), &inside.display().to_string()]);
        std::fs::remove_dir_all(&log).expect("it was copied");
        std::os::unix::fs::symlink(&inside, &log).expect("make a link");
        nodes.nodes[0].restart();
        if nodes.owner() != 0 {
            nodes.catch_up(nodes.owner());
            let _ = nodes.nodes[0].json(&["pool", "move", NAMES[0]]);
        }
        nodes.catch_up(0);
        let mut history = History::new(seed);
        let (_, mut connections) = nodes.connect(0);
        history.run_for(&mut connections, Duration::from_millis(300));
        let failed = std::thread::scope(|scope| {
            // It panics if a write is refused.
            let writing = scope.spawn(|| history.run_until_ended(&mut connections));
            disk.shut_down();
            let failed = Instant::now();
            writing.join().expect("no write is refused");
            failed
        });
        let (way, mut connections) = nodes.connect(1);
        println!("node {} serves {:?} after the failure", NAMES[way], failed.elapsed());
        history.reissue(&mut connections);
        assert_ne!(nodes.owner_but(0), 0);
        assert_eq!(history.prefix(&mut connections), history.count(), "{}", nodes.logs());
        drop(connections);
        nodes.nodes[0].kill();
    }
}

#[test]
fn members_that_hang_are_left_out_and_taken_back() {
    for seed in seeds(1) {
        let nodes = Nodes::start();
        let mut history = History::new(seed);
        let _ = nodes.nodes[0].json(&["pool", "members", "degraded", "solo"]);
        let (_, mut connections) = nodes.connect(0);
        history.run_for(&mut connections, Duration::from_millis(300));
        // Their connections stay open.
        nodes.nodes[1].pause();
        nodes.nodes[2].pause();
        let paused = Instant::now();
        history.run_for(&mut connections, Duration::from_millis(1));
        println!("the owner goes on alone after {:?}", paused.elapsed());
        assert!(paused.elapsed() < GOES_ON_MAX, "{}", nodes.logs());
        nodes.nodes[1].resume();
        nodes.nodes[2].resume();
        nodes.catch_up(0);
        // One hangs, and the quorum hides it.
        nodes.nodes[2].pause();
        let away = |condition: &Value| condition["kind"] == "member-away";
        wait(&nodes, "a member that hangs is a condition", || {
            history.run_for(&mut connections, Duration::from_millis(10));
            let status = nodes.nodes[0].json(&["status"]);
            status["conditions"].as_array().expect("conditions").iter().any(away)
        });
        nodes.nodes[2].resume();
        nodes.catch_up(0);
        assert_eq!(history.prefix(&mut connections), history.count(), "{}", nodes.logs());
    }
}

#[test]
fn node_that_starts_without_a_quorum_waits_and_answers_commands() {
    for seed in seeds(1) {
        let mut nodes = Nodes::start();
        let mut history = History::new(seed);
        let (_, mut connections) = nodes.connect(0);
        history.run_for(&mut connections, Duration::from_millis(300));
        for node in &mut nodes.nodes {
            node.kill();
        }
        drop(connections);
        nodes.nodes[0].restart();
        let listed = nodes.nodes[0].json(&["node", "list"]);
        assert_eq!(listed["nodes"].as_array().map(Vec::len), Some(3), "{listed}");
        wait(&nodes, "its log says so", || {
            nodes.nodes[0].log().contains("too few members of its log answer")
        });
        nodes.nodes[2].restart();
        let (_, mut connections) = nodes.connect(2);
        assert_eq!(history.prefix(&mut connections), history.count(), "{}", nodes.logs());
        // With two members each has everything that was acknowledged.
        nodes.nodes[1].restart();
        let owner = nodes.owner();
        nodes.catch_up(owner);
        let leaves = (owner + 1) % NAMES.len();
        let _ = nodes.nodes[owner].json(&["pool", "members", "remove", NAMES[leaves]]);
        let _ = nodes.nodes[owner].json(&["pool", "members", "degraded", "solo"]);
        history.run_for(&mut connections, Duration::from_millis(300));
        for node in &mut nodes.nodes {
            node.kill();
        }
        nodes.nodes[owner].restart();
        let (_, mut connections) = nodes.connect(owner);
        assert_eq!(history.prefix(&mut connections), history.count(), "{}", nodes.logs());
    }
}

#[test]
fn owner_knows_the_clients_of_other_nodes() {
    let nodes = Nodes::start();
    drop(nodes.connect(1));
    let log = nodes.nodes[0].log();
    assert!(log.contains("client=\"node b, unix socket\""), "{log}");
    drop(nodes.connect(0));
    assert!(nodes.nodes[0].log().contains("client=\"unix socket, uid"));
}
