//! The demo on three nodes: the owner is killed in the middle of the writing, and another node serves
//! every acknowledged write.
//!
//! Invariants:
//! - The client reaches the owner by way of another node, and flushes nothing.
//! - Its pause is the time between two answers: the last of the old owner, and the first of the new one.
//! - A write without an answer may or may not be there. Anything else that differs is counted.

use super::Demo;
use super::client::Client;
use super::daemon::{Daemon, VOLUME, VOLUME_SIZE};
use super::history::{BLOCK_BYTES, BLOCK_COUNT, Findings, History, Write};
use super::nodes::Nodes;
use super::place::Place;
use super::stop::Stop;
use api::demo::{DemoNodeInfo, FailOverInfo};
use block::env::{Clock, SystemClock};
use block::{Error, ErrorKind, Result};
use cli::args::{Output, absolute};
use std::collections::HashMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Time of writing before the kill, and after the fail-over. Chosen by hand: every block is written.
const WRITING: Duration = Duration::from_secs(1);
/// Writes in flight. Chosen by hand: each of them may be lost or kept by the kill.
const IN_FLIGHT_MAX: usize = 16;
/// The node that the client connects to at first. The first node owns the pool.
const FIRST_WAY: usize = 1;
/// Interval of the checks that all nodes run.
const LOOK_PAUSE: Duration = Duration::from_millis(200);

/// Runs the demo in `dir`, or in a temporary directory.
///
/// # Errors
/// Every failure to carry it out. Lost writes and wrong reads are a failure in the exit code.
pub(super) fn run(demo: Demo<'_>) -> Result<ExitCode> {
    let Demo { dir, binary, is_short, output, .. } = demo;
    let say = |text: String| {
        if output == Output::Text {
            println!("{text}");
        }
    };
    let stop = Stop::on_signals()?;
    let place = Place::new(dir.map(absolute).transpose()?.as_deref())?;
    let mut nodes = Nodes::start(binary, &place.path, &stop)?;
    say(format!(
        "Three nodes in {}: a owns the pool with a volume of {VOLUME_SIZE}; b and c store its log, too.",
        place.path.display()
    ));
    let info = prove(&mut nodes, &place.path, &stop, &say)?;
    match output {
        Output::Json => cli::output::document(&info),
        Output::Text => print!("{}", cli::print::fail_over(&info)),
    }
    if !info.is_verified {
        return Ok(ExitCode::FAILURE);
    }
    if !is_short {
        if output == Output::Text {
            print_what_is_next(binary, &info);
        }
        serve(&mut nodes, &stop, &say)?;
        say("Stopping.".to_owned());
    }
    nodes.stop()?;
    Ok(ExitCode::SUCCESS)
}

/// Kills the owner while a client writes, and compares what the next one serves.
fn prove(
    nodes: &mut Nodes,
    dir: &Path,
    stop: &Stop,
    say: &impl Fn(String),
) -> Result<FailOverInfo> {
    let mut history = History::new();
    let before = nodes.owner(stop)?;
    let (way, mut client) = nodes.connect(FIRST_WAY, stop, Ok)?;
    let name = |nodes: &Nodes, number: usize| nodes.0[number].name;
    let last = write_until_killed(&mut client, &mut history, nodes.daemon(before))?;
    say(format!(
        "Wrote {} blocks of 4 KiB by way of node {}, no flush.\n\
         Killed node {}, the owner (kill -9), with {} writes in flight …",
        history.acknowledged_count(),
        name(nodes, way),
        name(nodes, before),
        history.unanswered_count()
    ));
    nodes.reap(before)?;
    let first_answer = |mut client: Client| {
        InFlight::new(&mut client, &mut history).write_one()?;
        Ok((client, SystemClock.now()))
    };
    let (_, (mut client, first)) = nodes.connect(way, stop, first_answer)?;
    let pause = first.saturating_duration_since(last);
    let after = nodes.owner(stop)?;
    say(format!(
        "… node {} serves; the client waited {:.2} s for its next answer.",
        name(nodes, after),
        pause.as_secs_f64()
    ));
    write_for(&mut client, &mut history, WRITING)?;
    let Findings { lost_count, wrong_count } =
        history.compare(|offset, bytes| client.read(offset, bytes))?;
    say(format!(
        "Wrote on, {} blocks in all, and read all {BLOCK_COUNT} places: {lost_count} acknowledged \
         writes lost, {wrong_count} wrong reads.",
        history.acknowledged_count()
    ));
    let missed_batches = nodes.member(after, before)?.behind;
    let restarted = SystemClock.now();
    nodes.restart(before, stop)?;
    nodes.catch_up(after, before, stop)?;
    let catch_up = SystemClock.since(restarted);
    say(format!(
        "Started node {} again: as a member, it got the {missed_batches} batches that it lacked, in {:.2} s.",
        name(nodes, before),
        catch_up.as_secs_f64()
    ));
    Ok(FailOverInfo {
        dir: dir.to_owned(),
        volume: VOLUME.to_owned(),
        nodes: node_infos(nodes),
        owner_before: name(nodes, before).to_owned(),
        owner_after: name(nodes, after).to_owned(),
        client_node: name(nodes, way).to_owned(),
        acknowledged_writes: history.acknowledged_count(),
        unanswered_writes: history.unanswered_count(),
        pause_ms: millis(pause),
        lost_writes: lost_count,
        wrong_reads: wrong_count,
        is_verified: lost_count == 0 && wrong_count == 0,
        missed_batches,
        catch_up_ms: millis(catch_up),
    })
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn node_infos(nodes: &Nodes) -> Vec<DemoNodeInfo> {
    let of = |node: &super::nodes::Node| DemoNodeInfo {
        name: node.name.to_owned(),
        dir: node.launch.dir.clone(),
        endpoint: format!("nbd://{}/{VOLUME}", node.launch.address),
        process: node.daemon.as_ref().map_or(0, Daemon::id),
    };
    nodes.0.iter().map(of).collect()
}

/// Writes that wait for their answers.
struct InFlight<'a> {
    client: &'a mut Client,
    history: &'a mut History,
    /// By cookie.
    writes: HashMap<u64, Write>,
    payload: Vec<u8>,
}

impl<'a> InFlight<'a> {
    fn new(client: &'a mut Client, history: &'a mut History) -> InFlight<'a> {
        InFlight { client, history, writes: HashMap::new(), payload: vec![0; BLOCK_BYTES] }
    }

    fn send(&mut self) -> Result<()> {
        let write = self.history.begin();
        write.fill(&mut self.payload);
        let cookie = self.client.begin_write(write.offset(), &self.payload)?;
        self.writes.insert(cookie, write);
        Ok(())
    }

    fn send_all(&mut self) -> Result<()> {
        while self.writes.len() < IN_FLIGHT_MAX {
            self.send()?;
        }
        Ok(())
    }

    fn receive(&mut self) -> Result<()> {
        let cookie = self.client.finish_write()?;
        let write = self.writes.remove(&cookie).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, "talk NBD to the daemon: a reply is for no request")
        })?;
        self.history.acknowledge(write);
        Ok(())
    }

    fn write_one(&mut self) -> Result<()> {
        self.send()?;
        self.receive()
    }
}

/// Writes, kills the owner in the middle, and writes on until the connection ends. Returns the moment
/// of the last answer.
fn write_until_killed(
    client: &mut Client,
    history: &mut History,
    owner: &mut Daemon,
) -> Result<Instant> {
    let mut writes = InFlight::new(client, history);
    let begun = SystemClock.now();
    let (mut last, mut is_killed) = (begun, false);
    loop {
        let sent = writes.send_all();
        if !is_killed && sent.is_ok() && SystemClock.since(begun) > WRITING {
            owner.begin_kill()?;
            is_killed = true;
        }
        match sent.and_then(|()| writes.receive()) {
            Ok(()) => last = SystemClock.now(),
            Err(_) if is_killed => return Ok(last),
            Err(error) => return Err(error),
        }
    }
}

/// Writes for some time, and waits for the answers.
fn write_for(client: &mut Client, history: &mut History, time: Duration) -> Result<()> {
    let mut writes = InFlight::new(client, history);
    let begun = SystemClock.now();
    while SystemClock.since(begun) < time {
        writes.send_all()?;
        writes.receive()?;
    }
    while !writes.writes.is_empty() {
        writes.receive()?;
    }
    Ok(())
}

fn print_what_is_next(binary: &Path, info: &FailOverInfo) {
    println!("\nIt serves until Ctrl-C, by way of any node:\n");
    for node in &info.nodes {
        println!("    {}    node {}, process {}", node.endpoint, node.name, node.process);
    }
    let is_owner = |node: &&DemoNodeInfo| node.name == info.owner_after;
    let (owners, others): (Vec<_>, Vec<_>) = info.nodes.iter().partition(is_owner);
    let binary = binary.display();
    println!("\nNext, in another terminal:\n");
    for owner in owners {
        println!("    {binary} pool members list --dir {}", owner.dir.display());
        println!("    nbdinfo {}", owner.endpoint);
        println!(
            "    kill -9 {}    # the owner; the demo starts it again as a member",
            owner.process
        );
    }
    for other in others.iter().take(1) {
        println!("    {binary} pool take-over --dir {}    # by hand", other.dir.display());
    }
    println!();
}

/// Waits for a signal. Nodes that end are started again once another one owns the pool.
fn serve(nodes: &mut Nodes, stop: &Stop, say: &impl Fn(String)) -> Result<()> {
    let mut absent = Vec::new();
    while !stop.wait(LOOK_PAUSE) {
        for (number, status) in nodes.ended()? {
            say(format!("Node {} ended ({status}) …", nodes.0[number].name));
            absent.push(number);
        }
        if !nodes.has_quorum() {
            let what = "serve the demo: too few nodes are left to acknowledge a write";
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        if absent.is_empty() {
            continue;
        }
        let Some(owner) = nodes.owner_now() else { continue };
        say(format!("… node {} owns the pool.", nodes.0[owner].name));
        for number in absent.drain(..) {
            nodes.restart(number, stop)?;
            let (name, process) = (nodes.0[number].name, nodes.daemon(number).id());
            say(format!("Started node {name} again, process {process}: a member of the log."));
        }
    }
    Ok(())
}
