//! A network of namespaces for one test: a bridge, and a cable from it to each node.
//!
//! Invariants:
//! - A namespace has no name: a file descriptor of this process, or a process in it, keeps it. So
//!   several tests never meet, and nothing stays when the test ends, however it ends.
//! - A cut line loses packets and tells neither end. Its connections stay, and go on when it heals.

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

/// The first three bytes of all addresses. The namespaces have no route to any other network, so
/// that the addresses of this machine do not matter. Chosen by hand.
const SUBNET: &str = "10.77.0";
/// The last byte of the switch's own address, at which the test and its servers are reached.
const SWITCH: usize = 254;
/// An Ethernet address that no interface has (locally administered). Packets to it are lost.
const NO_INTERFACE: &str = "02:00:00:00:00:01";

/// A network namespace.
pub struct Space(File);

impl Space {
    fn new() -> Space {
        let space = Space::make().expect("make a network namespace");
        space.ip(&["link", "set", "lo", "up"]);
        space
    }

    fn make() -> io::Result<Space> {
        let made = std::thread::spawn(|| {
            // SAFETY: this thread ends below, and shares no state about networks with others.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            File::open("/proc/thread-self/ns/net").map(Space)
        });
        made.join().expect("no panic")
    }

    /// Lets the program of `command` run in this namespace.
    pub fn enter<'a>(self: &Arc<Self>, command: &'a mut Command) -> &'a mut Command {
        let space = Arc::clone(self);
        // SAFETY: between fork and exec the closure makes one system call and touches no memory
        // that another thread may hold locked.
        unsafe { command.pre_exec(move || space.enter_thread()) }
    }

    fn enter_thread(&self) -> io::Result<()> {
        Ok(move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network))?)
    }

    /// Runs `ip` in this namespace, and insists on success.
    #[track_caller]
    fn ip(&self, arguments: &[&str]) {
        let output = self.try_ip(arguments).expect("ip runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "ip {arguments:?}: {said}");
    }

    fn try_ip(&self, arguments: &[&str]) -> io::Result<Output> {
        let run = || {
            self.enter_thread()?;
            Command::new("ip").args(arguments).stdin(Stdio::null()).output()
        };
        std::thread::scope(|scope| scope.spawn(run).join().expect("no panic"))
    }
}

/// Whether networks can be made here: needs root, the program `ip`, and a kernel and a container that
/// permit namespaces, bridges and cables.
#[must_use]
pub fn is_possible() -> bool {
    let Ok(space) = Space::make() else { return false };
    let kinds = [&["name", "one", "type", "bridge"][..], &["name", "two", "type", "veth"][..]];
    kinds.into_iter().all(|kind| {
        let made = space.try_ip(&[&["link", "add"], kind].concat());
        made.is_ok_and(|output| output.status.success())
    })
}

/// Leaves the test unless networks can be made here.
#[macro_export]
macro_rules! needs_network {
    () => {
        if !$crate::network::is_possible() {
            return $crate::place::skip("needs root, ip, and network namespaces");
        }
    };
}

/// One way between two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Way {
    from: usize,
    to: usize,
}

/// Nodes that reach each other by way of a switch, at which the test is.
pub struct Network {
    switch: Arc<Space>,
    nodes: Vec<Arc<Space>>,
    cut: Mutex<Vec<Way>>,
    isolated: Mutex<Vec<usize>>,
}

impl Network {
    /// Makes a network with `node_count` nodes. Needs root, and the program `ip`.
    #[must_use]
    pub fn new(node_count: usize) -> Network {
        let switch = Arc::new(Space::new());
        switch.ip(&["link", "add", "bridge", "type", "bridge"]);
        let own = format!("{}/24", address_of(SWITCH));
        switch.ip(&["addr", "add", &own, "dev", "bridge"]);
        switch.ip(&["link", "set", "bridge", "up"]);
        let plug = |node: usize| {
            let (space, port) = (Arc::new(Space::new()), port_of(node));
            let path = format!("/proc/{}/fd/{}", std::process::id(), space.0.as_raw_fd());
            let ends = ["type", "veth", "peer", "name", "eth0", "netns", &path];
            switch.ip(&[&["link", "add", &port], &ends[..]].concat());
            switch.ip(&["link", "set", &port, "master", "bridge", "up"]);
            let own = format!("{}/24", address_of(node + 1));
            space.ip(&["addr", "add", &own, "dev", "eth0"]);
            space.ip(&["link", "set", "eth0", "up"]);
            space
        };
        let nodes = (0..node_count).map(plug).collect();
        Network { switch, nodes, cut: Mutex::default(), isolated: Mutex::default() }
    }

    /// Runs `work` on a thread at the switch, where its servers and clients, and those of threads
    /// that it starts, reach all nodes.
    ///
    /// # Panics
    /// When `work` does.
    pub fn at_switch<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let working = scope.spawn(|| {
                self.switch.enter_thread().expect("enter the namespace of the switch");
                work()
            });
            working.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Returns the namespace of a node.
    #[must_use]
    pub fn space(&self, node: usize) -> Arc<Space> {
        Arc::clone(&self.nodes[node])
    }

    /// Returns the IP address of a node.
    #[must_use]
    pub fn address(&self, node: usize) -> String {
        address_of(node + 1)
    }

    /// Returns the IP address of the switch, for servers of the test.
    #[must_use]
    pub fn switch_address(&self) -> String {
        address_of(SWITCH)
    }

    /// Loses all packets from one node to another. The other way stays as it is.
    pub fn cut_one_way(&self, from: usize, to: usize) {
        let other = self.address(to);
        let nowhere = ["lladdr", NO_INTERFACE, "dev", "eth0", "nud", "permanent"];
        self.nodes[from].ip(&[&["neigh", "replace", &other], &nowhere[..]].concat());
        self.cut.lock().expect("no panic holds it").push(Way { from, to });
    }

    /// Loses all packets between two nodes.
    pub fn cut(&self, one: usize, other: usize) {
        self.cut_one_way(one, other);
        self.cut_one_way(other, one);
    }

    /// Pulls the cable of a node out of the switch.
    pub fn isolate(&self, node: usize) {
        self.switch.ip(&["link", "set", &port_of(node), "down"]);
        self.isolated.lock().expect("no panic holds it").push(node);
    }

    /// Repairs all that was cut and isolated.
    pub fn heal(&self) {
        for way in self.cut.lock().expect("no panic holds it").drain(..) {
            let other = self.address(way.to);
            self.nodes[way.from].ip(&["neigh", "del", &other, "dev", "eth0"]);
        }
        for node in self.isolated.lock().expect("no panic holds it").drain(..) {
            self.switch.ip(&["link", "set", &port_of(node), "up"]);
        }
    }
}

fn address_of(number: usize) -> String {
    format!("{SUBNET}.{number}")
}

/// Returns the name of the switch's end of a node's cable.
fn port_of(node: usize) -> String {
    format!("port{node}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::time::{Duration, Instant};

    /// Returns whether a packet from one socket arrives at the other.
    fn arrives(from: &UdpSocket, to: &UdpSocket, packet: u64) -> bool {
        // A node without a cable may refuse to send.
        let _ = from.send_to(&packet.to_be_bytes(), to.local_addr().unwrap());
        let mut bytes = [0; 8];
        // Earlier packets may have waited in the kernel for an Ethernet address.
        while to.recv(&mut bytes).is_ok() {
            if u64::from_be_bytes(bytes) == packet {
                return true;
            }
        }
        false
    }

    struct Nodes {
        sockets: Vec<UdpSocket>,
        packet_count: u64,
    }

    impl Nodes {
        /// Returns whether packets arrive from 0 at 1, from 1 at 0, from 0 at 2, and from 2 at 0.
        fn reached(&mut self) -> [bool; 4] {
            [(0, 1), (1, 0), (0, 2), (2, 0)].map(|(from, to)| {
                self.packet_count += 1;
                arrives(&self.sockets[from], &self.sockets[to], self.packet_count)
            })
        }

        /// Waits until all arrive: the kernel asks for a lost Ethernet address once a second.
        #[track_caller]
        fn wait_for_all(&mut self) {
            let begun = Instant::now();
            while self.reached() != [true; 4] {
                assert!(begun.elapsed() < Duration::from_secs(20), "the network does not heal");
            }
        }
    }

    fn socket(network: &Network, node: usize) -> UdpSocket {
        let bind = || {
            network.nodes[node].enter_thread().unwrap();
            UdpSocket::bind((network.address(node), 0)).unwrap()
        };
        let socket = std::thread::scope(|scope| scope.spawn(bind).join().unwrap());
        socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        socket
    }

    #[test]
    fn packets_of_a_cut_way_alone_are_lost_until_it_heals() {
        needs_network!();
        let network = Network::new(3);
        let sockets = (0..3).map(|node| socket(&network, node)).collect();
        let mut nodes = Nodes { sockets, packet_count: 0 };
        nodes.wait_for_all();
        network.cut_one_way(0, 1);
        assert_eq!(nodes.reached(), [false, true, true, true]);
        network.cut_one_way(1, 0);
        assert_eq!(nodes.reached(), [false, false, true, true]);
        network.heal();
        nodes.wait_for_all();
        network.isolate(2);
        assert_eq!(nodes.reached(), [true, true, false, false]);
        network.heal();
        nodes.wait_for_all();
    }

    #[test]
    fn servers_at_the_switch_are_reached_by_nodes() {
        needs_network!();
        let network = Network::new(1);
        let server = network.at_switch(|| UdpSocket::bind((network.switch_address(), 0)).unwrap());
        server.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let node = socket(&network, 0);
        assert!((0..20).any(|packet| arrives(&node, &server, packet)));
    }
}
