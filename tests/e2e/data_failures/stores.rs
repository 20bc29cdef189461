//! Data stores that fail and are repaired: data nodes in network namespaces, or directories of the pool's machine.
//!
//! Invariants:
//! - A failure and its repair take turns. After the repair, the store is there with all that it held, or an empty
//!   one in its place, which the pool has to be told.

use super::Failure;
use super::drives::Drives;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tests::daemon::Daemon;
use tests::network::Network;
use tests::process::Killer;

/// The port of each node. Chosen by hand: each has a network namespace of its own.
const PEER_PORT: u16 = 7420;
/// Times for which a slow node stands still and works, again and again. Chosen by hand: requests are late, and are
/// answered before anything gives up.
const STANDSTILL: Duration = Duration::from_millis(150);
const WORK: Duration = Duration::from_millis(20);

/// The data stores of a test.
pub trait Stores {
    /// The failures that they can have.
    fn failures(&self) -> &'static [Failure];

    /// The URLs, as they stand in the settings.
    fn urls(&self) -> Vec<String>;

    /// Lets a store fail.
    fn fail(&mut self, number: usize, failure: Failure);

    /// Repairs a store.
    fn repair(&mut self, number: usize, failure: Failure);

    /// Ends them in order.
    fn stop(&mut self);
}

/// Directories of one machine.
pub struct Directories(pub Drives);

impl Stores for Directories {
    fn failures(&self) -> &'static [Failure] {
        &[Failure::Unmounted, Failure::Wiped, Failure::Full]
    }

    fn urls(&self) -> Vec<String> {
        (0..self.0.count()).map(|number| format!("\"{}\"", self.0.dir(number).display())).collect()
    }

    fn fail(&mut self, number: usize, failure: Failure) {
        match failure {
            Failure::Unmounted => self.0.unmount(number),
            Failure::Wiped => self.0.wipe(number),
            Failure::Full => self.0.fill(number),
            other => panic!("a directory does not fail in this way: {other:?}"),
        }
    }

    fn repair(&mut self, number: usize, failure: Failure) {
        match failure {
            Failure::Unmounted => self.0.mount(number),
            Failure::Wiped => self.0.replace(number),
            Failure::Full => self.0.free(number),
            other => panic!("a directory does not fail in this way: {other:?}"),
        }
    }

    fn stop(&mut self) {}
}

/// Lets a process stand still most of the time, as long as it lives.
struct Slowed {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Slowed {
    fn new(process: Killer) -> Slowed {
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&is_over);
        let thread = std::thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                process.signal(Signal::STOP);
                std::thread::sleep(STANDSTILL);
                process.signal(Signal::CONT);
                std::thread::sleep(WORK);
            }
        });
        Slowed { is_over, thread: Some(thread) }
    }
}

impl Drop for Slowed {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("it only sends signals");
        }
    }
}

/// Data nodes, each with one drive.
pub struct Nodes<'n> {
    network: &'n Network,
    nodes: Vec<Daemon>,
    drives: Drives,
    slowed: BTreeMap<usize, Slowed>,
}

impl<'n> Nodes<'n> {
    /// Starts data nodes in the namespaces behind that of the owner, whose pool does not use them yet. To be called at
    /// the switch of the network.
    pub fn start(network: &'n Network, owner: &mut Daemon, count: usize) -> Nodes<'n> {
        let address = |space: usize| format!("{}:{PEER_PORT}", network.address(space));
        let _ = owner.json(&["node", "init", "--address", &address(0), "--name", "owner"]);
        owner.restart();
        let (drives, slowed) = (Drives::new(count), BTreeMap::new());
        let mut all = Nodes { network, nodes: Vec::new(), drives, slowed };
        for number in 0..count {
            let mut node = Daemon::data_node(&[]);
            node.enter(network.space(number + 1));
            node.announce("a drive is away");
            node.announce("a drive fails");
            let token = owner.json(&["node", "token"]);
            let token = token["token"].as_str().expect("a token");
            let (address, name) = (address(number + 1), format!("d{number}"));
            let joining =
                ["node", "join", token, "--without-key", "--address", &address, "--name", &name];
            let _ = node.json(&joining);
            all.nodes.push(node);
            all.configure(number);
            all.nodes[number].restart();
        }
        owner.stop();
        all
    }

    fn configure(&self, number: usize) {
        let dir = self.drives.dir(number);
        self.nodes[number].configure(&format!("[dnode]\ndrives = [\"{}\"]\n", dir.display()));
    }

    /// Insists that a node whose drive was wiped says so. It must not take the empty directory for its drive.
    fn check_wiped(&self, number: usize) {
        let status = self.nodes[number].json(&["status"]);
        let failure = status["drives"][0]["failure"].as_str().unwrap_or_default();
        assert!(failure.contains("A new disk needs another name"), "{status}");
    }
}

impl Stores for Nodes<'_> {
    fn failures(&self) -> &'static [Failure] {
        &[
            Failure::Killed,
            Failure::Wiped,
            Failure::Paused,
            Failure::Cut,
            Failure::Slowed,
            Failure::Full,
        ]
    }

    fn urls(&self) -> Vec<String> {
        let url = |number| format!("\"spindle://d{number}/{}\"", self.drives.name(number));
        (0..self.drives.count()).map(url).collect()
    }

    fn fail(&mut self, number: usize, failure: Failure) {
        let node = &mut self.nodes[number];
        match failure {
            Failure::Killed => node.kill(),
            Failure::Wiped => {
                node.kill();
                self.drives.wipe(number);
                node.restart();
                self.check_wiped(number);
            }
            Failure::Unmounted => self.drives.unmount(number),
            Failure::Paused => node.pause(),
            Failure::Cut => self.network.isolate(number + 1),
            Failure::Slowed => drop(self.slowed.insert(number, Slowed::new(node.signals()))),
            Failure::Full => self.drives.fill(number),
        }
    }

    fn repair(&mut self, number: usize, failure: Failure) {
        match failure {
            Failure::Killed => self.nodes[number].restart(),
            Failure::Wiped => {
                self.check_wiped(number);
                self.nodes[number].stop();
                self.drives.replace(number);
                self.configure(number);
                self.nodes[number].restart();
            }
            Failure::Unmounted => self.drives.mount(number),
            Failure::Paused => self.nodes[number].resume(),
            // All cables at once; those of the others are in place.
            Failure::Cut => self.network.heal(),
            Failure::Slowed => drop(self.slowed.remove(&number)),
            Failure::Full => self.drives.free(number),
        }
    }

    fn stop(&mut self) {
        self.nodes.iter_mut().for_each(Daemon::stop);
    }
}
