//! Three nodes of one cluster on this machine, with the write log of a pool on all of them.
//!
//! Invariants:
//! - Each node is a process of its own, with its directory, key file and addresses. The nodes share a
//!   store, which is a directory.
//! - The nodes are made with the commands that a user would type.

use super::client::Client;
use super::daemon::{Daemon, Launch};
use super::stop::Stop;
use api::key::Secret;
use api::member::{MemberInfo, MembersInfo};
use api::node::{ClusterFounded, NodeRequest};
use api::pool::PoolRequest;
use api::{Reply, Request};
use block::env::{Clock, SystemClock};
use block::{Error, ErrorKind, Result};
use std::ffi::OsString;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;
use tokio::runtime::Handle;

/// Names of the nodes. The first founds the cluster.
const NAMES: [&str; 3] = ["a", "b", "c"];
/// Options of each node that are smaller than the defaults, so that three fit on a laptop.
const SMALL: [&str; 6] = ["--log-size", "256MiB", "--cache-size", "0", "--memory", "700MiB"];
/// Longest wait for an owner, or for a member that catches up. Chosen by hand: many times as long as
/// either takes.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// Pause between two looks. Chosen by hand: it adds to the pause of the client.
const LOOK_PAUSE: Duration = Duration::from_millis(5);

/// A node, running or not.
pub(super) struct Node {
    pub(super) name: &'static str,
    pub(super) launch: Launch,
    pub(super) daemon: Option<Daemon>,
}

/// All nodes. They end when this is dropped.
pub(super) struct Nodes(pub(super) Vec<Node>);

impl Nodes {
    /// Makes and starts the nodes in an empty directory. The first owns the pool.
    ///
    /// # Errors
    /// `Busy` if the directory is not empty; those of each command.
    pub(super) fn start(binary: &Path, dir: &Path, stop: &Stop) -> Result<Nodes> {
        check_empty(dir)?;
        let addresses = free_addresses(2 * NAMES.len())?;
        let (for_clients, for_nodes) = addresses.split_at(NAMES.len());
        let mut nodes = Nodes(Vec::new());
        for (name, address) in NAMES.into_iter().zip(for_clients) {
            let launch = launch(binary, dir, name, address.clone());
            make_dir(&launch.dir)?;
            nodes.0.push(Node { name, launch, daemon: None });
        }
        let mut token = nodes.found(&for_nodes[0])?;
        nodes.restart(0, stop)?;
        for (number, address) in for_nodes.iter().enumerate().skip(1) {
            nodes.join(number, address, token.expose())?;
            nodes.restart(number, stop)?;
            nodes.add_member(number, stop)?;
            token = nodes.token()?;
        }
        Ok(nodes)
    }

    /// Founds the cluster, and returns the token for the next node.
    fn found(&self, address: &str) -> Result<Secret> {
        let founded = self.command(0, &["init", "--address", address, "--name", NAMES[0]])?;
        let founded: ClusterFounded = serde_json::from_slice(&founded).map_err(|error| {
            Error::with_source(ErrorKind::Corrupt, "read the reply of `node init`", error)
        })?;
        Ok(founded.token.token)
    }

    /// Makes a node a member of the log. On a machine that is busy, the owner may change meanwhile.
    fn add_member(&self, number: usize, stop: &Stop) -> Result<()> {
        let begun = SystemClock.now();
        loop {
            let owner = self.owner(stop)?;
            let node = NAMES[number].to_owned();
            let asked =
                self.ask(owner, &Request::Pool(PoolRequest::AddMember { node, force: true }));
            let Err(error) = asked else { return Ok(()) };
            if SystemClock.since(begun) > WAIT_MAX {
                return Err(error);
            }
            stop.pause(LOOK_PAUSE)?;
        }
    }

    fn token(&self) -> Result<Secret> {
        match self.ask(0, &Request::Node(NodeRequest::Token {}))? {
            Reply::NodeToken(info) => Ok(info.token),
            _ => Err(unexpected()),
        }
    }

    fn join(&self, number: usize, address: &str, token: &str) -> Result<()> {
        let name = NAMES[number];
        self.command(number, &["join", token, "--address", address, "--name", name]).map(drop)
    }

    /// Runs a command `spindle node …` on the directory of a node, and returns its JSON.
    fn command(&self, number: usize, arguments: &[&str]) -> Result<Vec<u8>> {
        node_command(&self.0[number].launch, arguments)
    }

    /// Sends a request to the daemon of a node.
    fn ask(&self, number: usize, request: &Request) -> Result<Reply> {
        let node = &self.0[number];
        ask(&node.launch.dir, &format!("node {}", node.name), request)
    }

    /// Starts a node that does not run, and waits until it is ready.
    pub(super) fn restart(&mut self, number: usize, stop: &Stop) -> Result<()> {
        let node = &mut self.0[number];
        let started = Daemon::start(&node.launch, stop);
        let started = started.map_err(|error| error.context(format!("start node {}", node.name)));
        node.daemon = Some(started?);
        Ok(())
    }

    /// Returns the daemon of a node that runs.
    pub(super) fn daemon(&mut self, number: usize) -> &mut Daemon {
        self.0[number].daemon.as_mut().expect("it runs")
    }

    /// Reaps a node that was killed.
    pub(super) fn reap(&mut self, number: usize) -> Result<()> {
        let Some(mut daemon) = self.0[number].daemon.take() else { return Ok(()) };
        daemon.kill()
    }

    /// Returns the nodes that have ended since the last call, with their exit status.
    pub(super) fn ended(&mut self) -> Result<Vec<(usize, ExitStatus)>> {
        let mut ended = Vec::new();
        for (number, node) in self.0.iter_mut().enumerate() {
            let Some(daemon) = &mut node.daemon else { continue };
            if let Some(status) = daemon.ended()? {
                node.daemon = None;
                ended.push((number, status));
            }
        }
        Ok(ended)
    }

    /// Tells whether enough nodes run to acknowledge a write.
    pub(super) fn has_quorum(&self) -> bool {
        let running = self.0.iter().filter(|node| node.daemon.is_some());
        running.count() > self.0.len() / 2
    }

    /// Returns the members of the log as the owner of the pool knows them.
    fn members(&self, owner: usize) -> Result<MembersInfo> {
        match self.ask(owner, &Request::Pool(PoolRequest::Members {}))? {
            Reply::Members(info) => Ok(info),
            _ => Err(unexpected()),
        }
    }

    /// Returns what the owner knows of one member.
    pub(super) fn member(&self, owner: usize, number: usize) -> Result<MemberInfo> {
        let name = self.0[number].name;
        let found = self.members(owner)?.members.into_iter().find(|member| member.node == name);
        found.ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("find node {name} among the members"))
        })
    }

    /// Returns the node that owns the pool, if one does at present. Any node may pass the question on.
    pub(super) fn owner_now(&self) -> Option<usize> {
        let runs = |number: &usize| self.0[*number].daemon.is_some();
        let told = (0..self.0.len()).filter(runs).find_map(|number| self.members(number).ok())?;
        let owner = told.members.into_iter().find(|member| member.is_owner)?;
        self.0.iter().position(|node| node.name == owner.node).filter(runs)
    }

    /// Waits until a node owns the pool, and returns its number.
    pub(super) fn owner(&self, stop: &Stop) -> Result<usize> {
        let begun = SystemClock.now();
        loop {
            if let Some(owner) = self.owner_now() {
                return Ok(owner);
            }
            give_up_after(begun, "find the owner of the pool: no node owns it")?;
            stop.pause(LOOK_PAUSE)?;
        }
    }

    /// Connects by way of a node that runs, in turn from `first`, until `begin` succeeds with the connection.
    /// Returns the number of the node.
    pub(super) fn connect<T>(
        &self,
        first: usize,
        stop: &Stop,
        mut begin: impl FnMut(Client) -> Result<T>,
    ) -> Result<(usize, T)> {
        let begun = SystemClock.now();
        loop {
            let mut failure = None;
            for number in (0..self.0.len()).map(|number| (first + number) % self.0.len()) {
                let Some(daemon) = &self.0[number].daemon else { continue };
                match Client::connect(&daemon.address).and_then(&mut begin) {
                    Ok(begun) => return Ok((number, begun)),
                    Err(error) => failure = Some(error),
                }
            }
            if let Err(error) = give_up_after(begun, "connect by way of any node") {
                return Err(failure.unwrap_or(error));
            }
            stop.pause(LOOK_PAUSE)?;
        }
    }

    /// Waits until a member has everything that was acknowledged.
    pub(super) fn catch_up(&self, owner: usize, number: usize, stop: &Stop) -> Result<()> {
        let begun = SystemClock.now();
        loop {
            let member = self.member(owner, number)?;
            if member.is_connected && member.behind == 0 {
                return Ok(());
            }
            give_up_after(begun, &format!("wait until node {} catches up", member.node))?;
            stop.pause(LOOK_PAUSE)?;
        }
    }

    /// Stops all nodes in order, the owner first: it needs the others to move its data to the store.
    pub(super) fn stop(mut self) -> Result<()> {
        let owner = self.owner_now();
        if let Some(mut daemon) = owner.and_then(|owner| self.0[owner].daemon.take()) {
            daemon.stop()?;
        }
        let mut others: Vec<Daemon> =
            self.0.iter_mut().filter_map(|node| node.daemon.take()).collect();
        others.iter().try_for_each(Daemon::begin_stop)?;
        others.iter_mut().try_for_each(Daemon::finish_stop)
    }
}

fn launch(binary: &Path, dir: &Path, name: &str, address: String) -> Launch {
    let mut arguments = vec![OsString::from("--store"), dir.join("store").into()];
    arguments.extend(SMALL.map(OsString::from));
    let (binary, dir) = (binary.to_owned(), dir.join(name));
    Launch { binary, dir, address, arguments, is_data_node: false }
}

/// Runs a command `spindle node …` on the directory of a node, and returns its JSON.
pub(super) fn node_command(launch: &Launch, arguments: &[&str]) -> Result<Vec<u8>> {
    let what = || format!("run `spindle node {}`", arguments[0]);
    let mut command = Command::new(&launch.binary);
    command.arg("node").args(arguments).arg("--dir").arg(&launch.dir).args(["-o", "json"]);
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|error| Error::with_source(ErrorKind::Io, what(), error))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let why = format!("{}: {}", what(), said.trim().trim_start_matches("spindle: "));
    Err(Error::new(ErrorKind::Unavailable, why))
}

/// Sends a request to the daemon on a directory, and calls it by this name in errors.
pub(super) fn ask(dir: &Path, name: &str, request: &Request) -> Result<Reply> {
    let asked = cli::client::call(dir, request);
    Handle::current().block_on(asked)?.ok_or_else(|| {
        Error::new(ErrorKind::Unavailable, format!("ask {name}: its daemon is not there"))
    })
}

pub(super) fn unexpected() -> Error {
    Error::new(ErrorKind::Corrupt, "ask a node: it gave another answer than was asked for")
}

pub(super) fn give_up_after(begun: std::time::Instant, what: &str) -> Result<()> {
    match SystemClock.since(begun) > WAIT_MAX {
        false => Ok(()),
        true => Err(Error::new(ErrorKind::Unavailable, format!("{what}, after {WAIT_MAX:?}"))),
    }
}

pub(super) fn make_dir(dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(|error| {
        Error::with_source(ErrorKind::Io, format!("make {}", dir.display()), error)
    })
}

/// Checks that a directory is empty or missing.
pub(super) fn check_empty(dir: &Path) -> Result<()> {
    let is_empty = match std::fs::read_dir(dir) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => true,
        Err(error) => {
            let what = format!("read {}", dir.display());
            return Err(Error::with_source(ErrorKind::Io, what, error));
        }
    };
    match is_empty {
        true => Ok(()),
        false => {
            let what = format!(
                "start the demo in {}: it is not empty; name a new directory for the nodes",
                dir.display()
            );
            Err(Error::new(ErrorKind::Busy, what))
        }
    }
}

/// Returns addresses of this machine that no process listens at. A node keeps its addresses when its
/// role changes, so the kernel cannot choose them at each start.
pub(super) fn free_addresses(count: usize) -> Result<Vec<String>> {
    let failed = |error| Error::with_source(ErrorKind::Io, "find a free port", error);
    // All at once, so that they differ.
    let listeners: Vec<TcpListener> = (0..count)
        .map(|_| TcpListener::bind("127.0.0.1:0"))
        .collect::<std::io::Result<_>>()
        .map_err(failed)?;
    let addresses = listeners.iter().map(|listener| Ok(listener.local_addr()?.to_string()));
    addresses.collect::<std::io::Result<_>>().map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_with_contents_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        check_empty(dir.path()).unwrap();
        check_empty(&dir.path().join("missing")).unwrap();
        std::fs::write(dir.path().join("file"), "x").unwrap();
        assert_eq!(check_empty(dir.path()).unwrap_err().kind(), ErrorKind::Busy);
    }

    #[test]
    fn free_addresses_differ() {
        let addresses = free_addresses(6).unwrap();
        let distinct: std::collections::BTreeSet<&String> = addresses.iter().collect();
        assert_eq!(distinct.len(), 6);
    }
}
