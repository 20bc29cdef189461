//! A client whose host vanishes is given up after about the same time, with or without a reply in
//! flight. The tests use their own network namespaces, which end with their processes.

use crate::World;
use crate::client::Client;
use crate::memory::{MemoryDevice, MemoryExports};
use block::Line as _;
use nbd::wire::{Dialect, command};
use nbd::{Line, Listener, Server, ServerOptions, TlsMode};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(10);
/// Set in the process that runs in its own network namespace.
const INSIDE: &str = "SPINDLE_NBD_TEST_INSIDE";
const NAME: &str = "silence::a_client_whose_host_is_gone_is_given_up_busy_or_idle";

/// Another host: a network namespace that ends with its process.
struct Host(Child);

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Host {
    fn new() -> Host {
        let own = std::fs::read_link("/proc/self/ns/net").unwrap();
        let child = Command::new("unshare").args(["--net", "sleep", "600"]).spawn().unwrap();
        let host = Host(child);
        while std::fs::read_link(host.network()).is_ok_and(|theirs| theirs == own) {
            std::thread::yield_now();
        }
        host
    }

    fn network(&self) -> String {
        format!("/proc/{}/ns/net", self.0.id())
    }

    /// Runs `ip` in the namespace.
    fn ip(&self, arguments: &[&str]) {
        let network = format!("--net={}", self.network());
        run("nsenter", &[&[&*network, "ip"], arguments].concat());
    }

    /// Connects from the namespace.
    fn connect(&self, address: SocketAddr) -> tokio::net::TcpStream {
        let network = File::open(self.network()).unwrap();
        let connected = std::thread::spawn(move || {
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(network.as_fd(), kind).unwrap();
            std::net::TcpStream::connect(address).unwrap()
        });
        let stream = connected.join().unwrap();
        stream.set_nonblocking(true).unwrap();
        tokio::net::TcpStream::from_std(stream).unwrap()
    }
}

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {arguments:?}: {status}");
}

#[test]
fn a_client_whose_host_is_gone_is_given_up_busy_or_idle() {
    if std::env::var_os(INSIDE).is_some() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        return runtime.block_on(given_up());
    }
    let can = Command::new("unshare")
        .args(["--net", "ip", "link", "show"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !can.is_ok_and(|status| status.success()) {
        println!("skipped: it needs root, unshare and ip");
        return;
    }
    let own = std::env::current_exe().unwrap();
    let status = Command::new("unshare")
        .arg("--net")
        .arg(own)
        .args(["--exact", NAME, "--nocapture"])
        .env(INSIDE, "1")
        .status();
    assert!(status.unwrap().success());
}

async fn given_up() {
    let host = Host::new();
    let id = host.0.id().to_string();
    run("ip", &["link", "add", "here", "type", "veth", "peer", "name", "there", "netns", &id]);
    run("ip", &["addr", "add", "10.231.0.1/24", "dev", "here"]);
    run("ip", &["link", "set", "here", "up"]);
    host.ip(&["addr", "add", "10.231.0.2/24", "dev", "there"]);
    host.ip(&["link", "set", "there", "up"]);
    let mut disk = MemoryDevice::new(1 << 20);
    disk.latency = Duration::from_millis(500);
    let disk = Arc::new(disk);
    let exports = MemoryExports([("disk".to_owned(), disk.clone())].into());
    let options = ServerOptions { client_timeout: TIMEOUT, ..ServerOptions::default() };
    let server = Server::new(Arc::new(exports), options).unwrap();
    let listener = Listener::tcp("10.231.0.1:0".parse().unwrap(), TlsMode::Off).await.unwrap();
    let address = listener.tcp_address().unwrap();
    let serving = tokio::spawn({
        let server = server.clone();
        async move { server.serve(listener).await }
    });
    let world = World { server, address, disk, serving };
    let mut clients = Vec::new();
    for _ in 0..2 {
        let client = Client::greet(host.connect(world.address)).await;
        clients.push(client.go("disk", Dialect::Simple).await);
    }
    let lines = world.disk.lines.lock().unwrap().clone();
    assert!(lines.iter().all(|line| line.silence().is_none() && !line.is_over()));
    while has_unacknowledged() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // One client is idle. A reply to the other is in flight when its host vanishes.
    clients[1].send(command::READ, 0, 0, 4096, &[]).await;
    while world.disk.running_count_peak.load(Ordering::Relaxed) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    host.ip(&["link", "set", "there", "down"]);
    let gone_at = Instant::now();
    let (mut told, mut over) = ([None; 2], [None; 2]);
    while over.contains(&None) {
        assert!(gone_at.elapsed() < 3 * TIMEOUT, "it holds its volume: {told:?} {over:?}");
        for (index, line) in lines.iter().enumerate() {
            look(line, gone_at, &mut told[index], &mut over[index]);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!("told {told:?}, over after {over:?}");
    for (told, over) in told.into_iter().zip(over) {
        let (told_at, ends_at): (Duration, Duration) =
            told.expect("its silence is reported before");
        let over = over.expect("seen above");
        assert!(told_at < over && over < ends_at + Duration::from_secs(2), "{told:?} {over:?}");
        assert!(over > TIMEOUT * 8 / 10 && over < TIMEOUT * 16 / 10, "{over:?}");
    }
    world.until("both have left", |status| status.connection_count == 0).await;
}

/// Whether a connection of this namespace has unacknowledged bytes.
fn has_unacknowledged() -> bool {
    let table = std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
    let queues = table.lines().skip(1).filter_map(|line| line.split_whitespace().nth(4));
    queues.filter_map(|queue| queue.split(':').next()).any(|unsent| unsent != "00000000")
}

/// Records the first reported silence, with its announced end, and the end of the connection.
fn look(
    line: &Line,
    gone_at: Instant,
    told: &mut Option<(Duration, Duration)>,
    over: &mut Option<Duration>,
) {
    let now = gone_at.elapsed();
    if let (None, Some(silence)) = (*told, line.silence()) {
        *told = Some((now, now + silence.gives_up_in));
        assert!(silence.lasts <= now + Duration::from_secs(1), "{silence}");
    }
    if over.is_none() && line.is_over() {
        *over = Some(now);
    }
}
