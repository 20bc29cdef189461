//! Three nodes, each in a network namespace of its own, and an S3 server that all reach.
//!
//! Invariants:
//! - The directory of one node is on a small file system of its own, which can be filled.
//! - Processes and mounts end with the guard.

use crate::stores::on_s3;
use serde_json::Value;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tests::daemon::Daemon;
use tests::nbd::Endpoint;
use tests::network::Network;
use tests::place::run;
use tests::store::Server;

pub const NODE_COUNT: usize = 3;
/// The node whose directory is on a file system of its own.
pub const SMALL_DISK: usize = 2;
/// Its size, for a log of 16 MiB and a cache of 64 MiB.
const SMALL_DISK_SIZE: &str = "size=192m";
/// The volume, with blocks for a thousand rounds.
pub const VOLUME: &str = "registers";
const VOLUMES: &[(&str, &str)] = &[(VOLUME, "128MiB")];
const PEER_PORT: u16 = 7420;
const NBD_PORT: u16 = 10809;
/// Longest wait for anything that the nodes do.
pub const WAIT_MAX: Duration = Duration::from_secs(60);

/// The nodes, their network and their store.
pub struct Cluster<'a> {
    pub nodes: Vec<Daemon>,
    pub network: &'a Network,
    names: Vec<String>,
    name_count: usize,
    _store: Server,
}

impl<'a> Cluster<'a> {
    /// Starts three nodes, all of which are members. To be called at the switch of the network.
    pub fn start(network: &'a Network, settings: &str, seeded_bug: Option<&str>) -> Cluster<'a> {
        let store = Server::start_at(&network.switch_address());
        let make = |node: usize| {
            let mut daemon = on_s3(settings, VOLUMES, store.address());
            daemon.enter(network.space(node));
            daemon.listen(&format!("{}:{NBD_PORT}", network.address(node)));
            daemon.argue(&["--allow-plain-remote"]);
            // Nodes that fail and come back are warned about.
            daemon.announce("");
            if let Some(bug) = seeded_bug {
                daemon.use_binary("spindle-faulty");
                daemon.environ(&[("SPINDLE_SEEDED_BUGS", bug)]);
            }
            std::fs::create_dir_all(daemon.dir()).expect("make a directory");
            daemon
        };
        let nodes = (0..NODE_COUNT).map(make).collect();
        let names = vec![String::new(); NODE_COUNT];
        let mut cluster = Cluster { nodes, network, names, name_count: 0, _store: store };
        let dir = cluster.nodes[SMALL_DISK].dir().display().to_string();
        run("mount", &["-t", "tmpfs", "-o", SMALL_DISK_SIZE, "spindle-test", &dir]);
        cluster.found();
        for node in 1..NODE_COUNT {
            cluster.join(node, 0);
        }
        cluster
    }

    fn next_name(&mut self, node: usize) -> String {
        self.name_count += 1;
        self.names[node] = format!("n{}", self.name_count);
        self.names[node].clone()
    }

    fn peer_address(&self, node: usize) -> String {
        format!("{}:{PEER_PORT}", self.network.address(node))
    }

    fn found(&mut self) {
        let (name, address) = (self.next_name(0), self.peer_address(0));
        let _ = self.nodes[0].json(&["node", "init", "--address", &address, "--name", &name]);
        self.nodes[0].restart();
    }

    /// Makes an empty directory a member, with the help of a node that runs.
    fn join(&mut self, node: usize, helper: usize) {
        let name = self.admit(node, helper);
        // The machine is busy: a measurement of its network may show anything.
        let _ = self.nodes[helper].json(&["pool", "members", "add", &name, "--force"]);
    }

    /// Makes an empty directory a node of the cluster. Returns its name.
    fn admit(&mut self, node: usize, helper: usize) -> String {
        let key = "spindle.key";
        let copied =
            std::fs::copy(self.nodes[helper].dir().join(key), self.nodes[node].dir().join(key));
        copied.expect("copy the key");
        let issued = self.nodes[helper].json(&["node", "token"]);
        let token = issued["token"].as_str().expect("a token");
        let (name, address) = (self.next_name(node), self.peer_address(node));
        let joining = ["node", "join", token, "--address", &address, "--name", &name];
        let _ = self.nodes[node].json(&joining);
        self.nodes[node].restart();
        name
    }

    /// Replaces a node whose directory was lost: docs/cluster.md, "Replace a lost member".
    pub fn replace(&mut self, node: usize) {
        let helper = self.owner_but(Some(node));
        let old = self.names[node].clone();
        let _ = self.nodes[helper].json(&["node", "remove", &old]);
        let new = self.admit(node, helper);
        let _ = self.nodes[helper].json(&["pool", "members", "replace", &old, &new, "--force"]);
    }

    /// Loses all files of a node that does not run.
    pub fn wipe(&self, node: usize) {
        for entry in std::fs::read_dir(self.nodes[node].dir()).expect("a directory") {
            let path = entry.expect("an entry").path();
            let removed = if path.is_dir() {
                std::fs::remove_dir_all(path)
            } else {
                std::fs::remove_file(path)
            };
            removed.expect("remove it");
        }
    }

    fn ballast(&self) -> PathBuf {
        self.nodes[SMALL_DISK].dir().join("ballast")
    }

    /// Fills the small disk.
    pub fn fill_disk(&self) {
        let mut size_bytes = 0;
        let file = std::fs::File::create(self.ballast()).expect("make a file");
        // Smaller and smaller pieces, until not a page is free.
        for step_bytes in [16 << 20, 1 << 20, 64 << 10, 4 << 10] {
            let more = |size_bytes: u64| {
                rustix::fs::fallocate(
                    &file,
                    rustix::fs::FallocateFlags::empty(),
                    size_bytes,
                    step_bytes,
                )
            };
            while more(size_bytes).is_ok() {
                size_bytes += step_bytes;
            }
        }
    }

    /// Makes room on the small disk.
    pub fn free_disk(&self) {
        std::fs::remove_file(self.ballast()).expect("remove the file");
    }

    /// Returns the node that owns the pool.
    pub fn owner(&self) -> usize {
        self.owner_but(None)
    }

    /// Like [`Cluster::owner`], without asking one node.
    fn owner_but(&self, excluded: Option<usize>) -> usize {
        let begun = Instant::now();
        loop {
            for node in (0..NODE_COUNT).filter(|node| Some(*node) != excluded) {
                let Some(info) = self.members(node) else { continue };
                let members = info["members"].as_array().expect("members");
                let owner = members.iter().find(|member| member["is_owner"] == true);
                let name = owner.and_then(|owner| owner["node"].as_str()).unwrap_or_default();
                let owner = self.names.iter().position(|one| one == name);
                if let Some(owner) = owner.filter(|owner| Some(*owner) != excluded) {
                    return owner;
                }
            }
            assert!(begun.elapsed() < WAIT_MAX, "no node owns the pool: {}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn members(&self, node: usize) -> Option<Value> {
        if !self.nodes[node].is_running() {
            return None;
        }
        let out = self.nodes[node].command(&["pool", "members", "list", "-o", "json"]);
        let info: Value = serde_json::from_slice(&out.stdout).ok()?;
        info["members"].is_array().then_some(info)
    }

    /// Waits until every node is a member that has all that the owner acknowledged.
    pub fn catch_up(&self) {
        let begun = Instant::now();
        let is_up = |member: &Value| member["is_connected"] == true && member["behind"] == 0;
        loop {
            let info = self.members(0).unwrap_or_default();
            let members = info["members"].as_array();
            let has_all =
                |members: &Vec<Value>| members.len() == NODE_COUNT && members.iter().all(is_up);
            if members.is_some_and(has_all) {
                return;
            }
            assert!(begun.elapsed() < WAIT_MAX, "{info}\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Starts nodes at the same time, and waits until they are ready.
    pub fn start_nodes(&mut self, numbers: &[usize]) {
        for node in numbers {
            self.nodes[*node].spawn().expect("it starts");
        }
        for node in numbers {
            let ready = self.nodes[*node].wait_until_ready();
            ready.unwrap_or_else(|error| panic!("{error}\n{}", self.logs()));
        }
    }

    /// Returns the unix socket of a node.
    pub fn unix(&self, node: usize) -> Endpoint {
        let socket = self.nodes[node].place().join("nbd.sock");
        let uri = format!("nbd+unix:///{VOLUME}?socket={}", socket.display());
        Endpoint::parse(&uri).expect("an address")
    }

    /// Returns the TCP socket of a node.
    pub fn tcp(&self, node: usize) -> Endpoint {
        let uri = format!("nbd://{}:{NBD_PORT}/{VOLUME}", self.network.address(node));
        Endpoint::parse(&uri).expect("an address")
    }

    pub fn logs(&self) -> String {
        let tail = |(name, node): (&String, &Daemon)| format!("== {name}\n{}\n", node.tail());
        self.names.iter().zip(&self.nodes).map(tail).collect()
    }
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        self.nodes.iter_mut().for_each(Daemon::kill);
        let dir = self.nodes[SMALL_DISK].dir();
        let keep = self.nodes[SMALL_DISK].place().join("lost-dir");
        if std::thread::panicking() {
            // The file system goes with the mount namespace; a look at its files needs a copy.
            let _ = tests::place::output(
                "cp",
                &["-a", &dir.display().to_string(), &keep.display().to_string()],
            );
        }
        let _ = tests::place::output("umount", &["--lazy", &dir.display().to_string()]);
    }
}
