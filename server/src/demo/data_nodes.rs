//! The demo on data nodes: some of them are killed, everything is read back without them, and their fragments are
//! rebuilt on a spare one.
//!
//! Invariants:
//! - As many data nodes are killed as the scheme survives, two at most.
//! - The caches of the pool are off, so that every read is answered by data nodes.
//! - A block that cannot be read is lost, and one that differs is wrong: both are counted, and neither is hidden.

use super::client::Client;
use super::daemon::{Daemon, Launch, VOLUME, VOLUME_SIZE};
use super::nodes::{
    ask, check_empty, free_addresses, give_up_after, make_dir, node_command, unexpected,
};
use super::one_node::fill;
use super::place::Place;
use super::stop::Stop;
use super::{DataNodes, Demo};
use api::demo::DataNodesInfo;
use api::node::{ClusterFounded, NodeRequest};
use api::pool::PoolRequest;
use api::status::StatusInfo;
use api::{Reply, Request};
use block::env::{Clock, SystemClock};
use block::{Error, ErrorKind, Result};
use cli::args::{Output, absolute};
use datanode::Scheme;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// Data written, in requests of 1 MiB.
const WRITTEN_MIB: u64 = 128;
const MIB: usize = 1 << 20;
const BLOCK_BYTES: usize = 4096;
/// Reads for each figure. Chosen by hand: a second or so.
const READ_COUNT: u64 = 2000;
/// Most data nodes that are killed.
const KILLED_MAX: usize = 2;
/// Options of the pool that are smaller than the defaults, and no caches.
const SMALL: [&str; 8] =
    ["--log-size", "512MiB", "--cache-size", "0", "--memory-cache", "0", "--memory", "700MiB"];
/// Pause between two looks.
const LOOK_PAUSE: Duration = Duration::from_millis(100);
/// Name of the node that serves the pool.
const OWNER: &str = "owner";

/// A cluster of data nodes, and the node that serves a pool over them.
struct World<'a> {
    dir: &'a Path,
    scheme: Scheme,
    owner: Launch,
    /// It ends before the data nodes, which it needs to close the pool.
    daemon: Option<Daemon>,
    nodes: Vec<(Launch, Option<Daemon>)>,
}

/// Counted differences.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    wrong_count: u64,
    lost_bytes: u64,
}

/// Runs the demo in `dir`, or in a temporary directory.
///
/// # Errors
/// `Invalid` for a scheme that is not known, or needs more data nodes; every failure to carry it out. Lost bytes and wrong
/// reads are a failure in the exit code.
pub(super) fn run(demo: Demo<'_>, asked: DataNodes<'_>) -> Result<ExitCode> {
    let Demo { dir, binary, is_short, output, .. } = demo;
    let scheme = checked_scheme(asked)?;
    let say = |text: String| {
        if output == Output::Text {
            println!("{text}");
        }
    };
    let stop = Stop::on_signals()?;
    let place = Place::new(dir.map(absolute).transpose()?.as_deref())?;
    check_empty(&place.path)?;
    let mut world = World::start(binary, &place.path, asked.count, scheme, &stop)?;
    say(format!(
        "{} data nodes in {}, and a pool over them with the scheme {scheme}: any {} may be lost.",
        asked.count,
        place.path.display(),
        scheme.parity()
    ));
    let info = prove(&mut world, &stop, &say)?;
    match output {
        Output::Json => cli::output::document(&info),
        Output::Text => print!("{}", cli::print::data_nodes(&info)),
    }
    if info.wrong_reads > 0 || info.lost_bytes > 0 {
        return Ok(ExitCode::FAILURE);
    }
    if !is_short {
        if output == Output::Text {
            world.print_what_is_next(binary);
        }
        while !stop.wait(Duration::from_millis(200)) {
            world.owner_daemon().check_running()?;
        }
        say("Stopping.".to_owned());
    }
    world.stop()?;
    Ok(ExitCode::SUCCESS)
}

fn checked_scheme(asked: DataNodes<'_>) -> Result<Scheme> {
    let scheme: Scheme = asked.scheme.parse().map_err(|error: Error| error.context("--scheme"))?;
    if asked.count < scheme.fragments() {
        let what = format!(
            "start the demo: {scheme} needs {} data nodes, and --dnodes {} are fewer",
            scheme.fragments(),
            asked.count
        );
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    Ok(scheme)
}

/// Writes, kills, reads back, makes fragments anew, and reads back again.
fn prove(world: &mut World<'_>, stop: &Stop, say: &impl Fn(String)) -> Result<DataNodesInfo> {
    let mut client = world.client()?;
    let begun = SystemClock.now();
    let mut payload = vec![0; MIB];
    for index in 0..WRITTEN_MIB {
        fill(&mut payload, index);
        client.write(index * MIB as u64, &payload)?;
    }
    client.flush()?;
    let _ = world.ask(PoolRequest::Drain {})?;
    let seconds = SystemClock.since(begun).as_secs_f64();
    say(format!("Wrote {WRITTEN_MIB} MiB, which are on the data nodes after {seconds:.2} s."));
    let mut found = Found::default();
    let healthy = world.read_times(&mut found, false)?;
    let killed = world.kill(KILLED_MAX.min(world.scheme.parity()))?;
    let names = killed.iter().map(|number| name_of(*number)).collect::<Vec<_>>();
    say(format!("Killed {} (kill -9).", names.join(" and ")));
    world.read_all(&mut found)?;
    let degraded = world.read_times(&mut found, true)?;
    let degraded_count = degraded.len() as u64;
    say(format!(
        "Read everything back without them: {} wrong reads, {} bytes lost.",
        found.wrong_count, found.lost_bytes
    ));
    let spare = world.add_spare(&killed, stop)?;
    let begun = SystemClock.now();
    let rebuilt = world.wait_until_whole(stop)?;
    let rebuild_seconds = SystemClock.since(begun).as_secs_f64();
    say(format!(
        "Started {} in the place of {}: its fragments were made anew in {rebuild_seconds:.2} s.",
        name_of(spare),
        name_of(killed[0])
    ));
    world.read_all(&mut found)?;
    let status = world.status()?;
    Ok(DataNodesInfo {
        dir: world.dir.to_owned(),
        volume: VOLUME.to_owned(),
        scheme: world.scheme.to_string(),
        data_nodes: (0..world.nodes.len()).map(name_of).collect(),
        killed: names,
        spare: name_of(spare),
        written_mib: WRITTEN_MIB,
        wrong_reads: found.wrong_count,
        lost_bytes: found.lost_bytes,
        rebuild_seconds,
        rebuilt_bytes: rebuilt.max(rebuilt_bytes(&status)),
        read_us_p50_healthy: median_us(healthy),
        read_us_p50_degraded: median_us(degraded),
        degraded_reads: degraded_count,
    })
}

fn rebuilt_bytes(status: &StatusInfo) -> u64 {
    status.data_stores.as_ref().map_or(0, |stores| stores.rebuilt_bytes)
}

/// Returns the median in microseconds; 0 without any.
fn median_us(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times.get(times.len() / 2).map_or(0.0, |time| time.as_secs_f64() * 1e6)
}

fn name_of(number: usize) -> String {
    format!("d{}", number + 1)
}

impl<'a> World<'a> {
    /// Makes and starts `count` data nodes, and a pool over them. The first data node founds the cluster.
    fn start(
        binary: &Path,
        dir: &'a Path,
        count: usize,
        scheme: Scheme,
        stop: &Stop,
    ) -> Result<World<'a>> {
        let addresses = free_addresses(2)?;
        let config = dir.join("pool.toml");
        let mut arguments = vec![OsString::from("--config"), config.into()];
        arguments.extend(SMALL.map(OsString::from));
        let owner = Launch {
            binary: binary.to_owned(),
            dir: dir.join(OWNER),
            address: addresses[0].clone(),
            arguments,
            is_data_node: false,
        };
        let mut world = World { dir, scheme, owner, daemon: None, nodes: Vec::new() };
        for _ in 0..count {
            world.add_node(stop)?;
        }
        let owner = &world.owner;
        make_dir(&owner.dir)?;
        let token = world.token()?;
        node_command(owner, &["join", &token, "--address", &addresses[1], "--name", OWNER])?;
        world.configure(&(0..count).collect::<Vec<_>>())?;
        world.daemon = Some(Daemon::start(&world.owner, stop)?);
        Ok(world)
    }

    /// Makes and starts another data node. Returns its number.
    fn add_node(&mut self, stop: &Stop) -> Result<usize> {
        let number = self.nodes.len();
        let name = name_of(number);
        let drive = self.dir.join(format!("{name}-nvme0"));
        let launch = Launch {
            binary: self.owner.binary.clone(),
            dir: self.dir.join(&name),
            address: String::new(),
            arguments: vec!["--drive".into(), drive.clone().into()],
            is_data_node: true,
        };
        make_dir(&launch.dir)?;
        make_dir(&drive)?;
        let address = &free_addresses(1)?[0];
        let end = ["--address", address, "--name", &name];
        if number == 0 {
            let founded = node_command(&launch, &[&["init"], &end[..]].concat())?;
            let _: ClusterFounded = serde_json::from_slice(&founded).map_err(|error| {
                Error::with_source(ErrorKind::Corrupt, "read the reply of `node init`", error)
            })?;
        } else {
            let token = self.token()?;
            node_command(&launch, &[&["join", &token, "--without-key"], &end[..]].concat())?;
        }
        let daemon = Daemon::start(&launch, stop)?;
        self.nodes.push((launch, Some(daemon)));
        Ok(number)
    }

    /// Issues a token on a data node that runs.
    fn token(&self) -> Result<String> {
        let issuer = self.nodes.iter().find(|(_, daemon)| daemon.is_some());
        let (launch, _) = issuer.ok_or_else(unexpected)?;
        match ask(&launch.dir, "a data node", &Request::Node(NodeRequest::Token {}))? {
            Reply::NodeToken(info) => Ok(info.token.expose().to_owned()),
            _ => Err(unexpected()),
        }
    }

    /// Writes the configuration of the pool over these data nodes.
    fn configure(&self, numbers: &[usize]) -> Result<()> {
        let urls = numbers.iter().map(|number| format!("\"spindle://{}\"", name_of(*number)));
        let urls = urls.collect::<Vec<_>>().join(", ");
        let text = format!(
            "[data]\nscheme = \"{}\"\nlost_after = \"1s\"\nstores = [{urls}]\n",
            self.scheme
        );
        let path = self.dir.join("pool.toml");
        std::fs::write(&path, text).map_err(|error| {
            Error::with_source(ErrorKind::Io, format!("write {}", path.display()), error)
        })
    }

    fn owner_daemon(&mut self) -> &mut Daemon {
        self.daemon.as_mut().expect("it runs")
    }

    fn client(&self) -> Result<Client> {
        Client::connect(&self.daemon.as_ref().expect("it runs").address)
    }

    fn ask(&self, request: PoolRequest) -> Result<Reply> {
        ask(&self.owner.dir, "the owner", &Request::Pool(request))
    }

    fn status(&self) -> Result<StatusInfo> {
        match self.ask(PoolRequest::Status {})? {
            Reply::Status(info) => Ok(*info),
            _ => Err(unexpected()),
        }
    }

    /// Reads of fragments that were decoded so far.
    fn decoded_count(&self) -> Result<u64> {
        Ok(self.status()?.data_stores.map_or(0, |stores| stores.degraded_read_count))
    }

    /// Reads single blocks, and returns the times; with `is_degraded`, of those that were decoded.
    fn read_times(&self, found: &mut Found, is_degraded: bool) -> Result<Vec<Duration>> {
        let mut client = self.client()?;
        let (mut wanted, mut block) = (vec![0; MIB], vec![0; BLOCK_BYTES]);
        let (mut times, mut decoded) = (Vec::new(), self.decoded_count()?);
        for index in 0..READ_COUNT {
            let at = index * 104_729 % (WRITTEN_MIB * 256);
            let (request, within) =
                (at / 256, usize::try_from(at % 256).expect("small") * BLOCK_BYTES);
            fill(&mut wanted, request);
            let begun = SystemClock.now();
            let read = client.read(at * BLOCK_BYTES as u64, &mut block);
            let time = SystemClock.since(begun);
            if read.is_err() {
                found.lost_bytes += BLOCK_BYTES as u64;
                client = self.client()?;
                continue;
            }
            found.wrong_count += u64::from(block != wanted[within..within + BLOCK_BYTES]);
            let now = if is_degraded { self.decoded_count()? } else { decoded };
            if !is_degraded || now > decoded {
                times.push(time);
            }
            decoded = now;
        }
        Ok(times)
    }

    /// Reads everything, and counts what differs.
    fn read_all(&self, found: &mut Found) -> Result<()> {
        let mut client = self.client()?;
        let (mut wanted, mut read) = (vec![0; MIB], vec![0; MIB]);
        for index in 0..WRITTEN_MIB {
            fill(&mut wanted, index);
            match client.read(index * MIB as u64, &mut read) {
                Ok(()) => {
                    let blocks = wanted.chunks(BLOCK_BYTES).zip(read.chunks(BLOCK_BYTES));
                    found.wrong_count +=
                        blocks.filter(|(wanted, read)| wanted != read).count() as u64;
                }
                Err(_) => {
                    found.lost_bytes += MIB as u64;
                    client = self.client()?;
                }
            }
        }
        Ok(())
    }

    /// Kills the last `count` data nodes.
    fn kill(&mut self, count: usize) -> Result<Vec<usize>> {
        let killed: Vec<usize> = (0..self.nodes.len()).rev().take(count).collect();
        for number in &killed {
            let mut daemon = self.nodes[*number].1.take().ok_or_else(unexpected)?;
            daemon.kill()?;
        }
        Ok(killed)
    }

    /// Puts a new data node in the place of the first one that was killed, starts the others again, and restarts the pool.
    fn add_spare(&mut self, killed: &[usize], stop: &Stop) -> Result<usize> {
        let spare = self.add_node(stop)?;
        for number in &killed[1..] {
            let started = Daemon::start(&self.nodes[*number].0, stop)?;
            self.nodes[*number].1 = Some(started);
        }
        let kept: Vec<usize> = (0..=spare).filter(|number| *number != killed[0]).collect();
        self.configure(&kept)?;
        self.owner_daemon().stop()?;
        self.daemon = Some(Daemon::start(&self.owner, stop)?);
        Ok(spare)
    }

    /// Waits until no segment lacks a fragment. Returns the bytes that were rebuilt.
    fn wait_until_whole(&self, stop: &Stop) -> Result<u64> {
        let begun = SystemClock.now();
        loop {
            let status = self.status()?;
            let found = status.data_stores.as_ref().and_then(|stores| stores.redundancy.as_ref());
            let parity = u8::try_from(self.scheme.parity()).ok();
            let is_whole = found.is_some_and(|found| {
                let survives = |one: &api::status::SurvivalInfo| one.losses == parity;
                found.lacking_count == 0
                    && !found.survivals.is_empty()
                    && found.survivals.iter().all(survives)
            });
            if is_whole {
                return Ok(rebuilt_bytes(&status));
            }
            give_up_after(begun, "wait until the fragments are made anew")?;
            stop.pause(LOOK_PAUSE)?;
        }
    }

    fn print_what_is_next(&self, binary: &Path) {
        let (binary, owner) = (binary.display(), self.owner.dir.display());
        println!(
            "\nIt serves {VOLUME_SIZE} until Ctrl-C:\n\n    nbd://{}/{VOLUME}\n",
            self.owner.address
        );
        println!("Next, in another terminal:\n");
        println!("    {binary} status --dir {owner}");
        if let Some((launch, Some(daemon))) = self.nodes.first() {
            println!("    {binary} status --dir {}    # a data node", launch.dir.display());
            println!("    kill -9 {}    # it, and see what the pool says\n", daemon.id());
        }
    }

    /// Stops everything in order, the pool first.
    fn stop(mut self) -> Result<()> {
        if let Some(mut owner) = self.daemon.take() {
            owner.stop()?;
        }
        let mut nodes: Vec<Daemon> =
            self.nodes.iter_mut().filter_map(|(_, daemon)| daemon.take()).collect();
        nodes.iter().try_for_each(Daemon::begin_stop)?;
        nodes.iter_mut().try_for_each(Daemon::finish_stop)
    }
}
