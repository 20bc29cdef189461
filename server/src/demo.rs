//! `spindle demo`: a disk in five seconds, and a proof that it keeps the data written to it.
//!
//! Invariants:
//! - The demo runs this very binary as its daemon, started with `serve` as by any user.
//! - The child is killed hard once, on purpose, in the middle; every answered write must be there
//!   afterwards.
//! - A directory that the demo made is removed at the end; one that was named is kept.

use api::demo::{DemoInfo, LatencyInfo};
use block::env::{Clock, SystemClock};
use block::{Error, ErrorKind, Result};
use cli::args::Output;
use nbd::wire::{self, command, handshake_flag, option};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const VOLUME: &str = "demo";
const VOLUME_SIZE: &str = "1G";
/// Bytes of one write of the proof, and the number of these writes: 64 MiB.
const PROOF_WRITE_BYTES: usize = 1 << 20;
const PROOF_WRITE_COUNT: u64 = 64;
/// Small writes after them, none of which is flushed.
const SMALL_WRITE_COUNT: u64 = 1000;
const BLOCK_BYTES: usize = 4096;
/// Requests per latency figure. Chosen by hand: a second or so.
const LATENCY_COUNT: u64 = 2000;

/// Runs the demo in `dir`, or in a temporary directory, until Ctrl-C.
///
/// With `is_short` it ends after the measurements. With [`Output::Json`] it prints one JSON document after
/// the measurements, in place of its text.
///
/// # Errors
/// Every failure; a read that differs from the data written is `Corrupt`.
pub fn run(dir: Option<&Path>, binary: &Path, is_short: bool, output: Output) -> Result<()> {
    let is_json = output == Output::Json;
    let say = |text: String| {
        if !is_json {
            println!("{text}");
        }
    };
    let stop = stop_on_signals()?;
    let place = Place::new(dir)?;
    let mut daemon = Daemon::start(binary, &place.path, "127.0.0.1:0")?;
    say(format!("A pool in {} with a volume of {VOLUME_SIZE}.", place.path.display()));
    let mut client = Client::connect(&daemon.address)?;
    let seconds = prove_write(&mut client)?;
    say(format!(
        "Wrote {PROOF_WRITE_COUNT} MiB in {seconds:.2} s and {SMALL_WRITE_COUNT} blocks of 4 KiB, \
         no flush."
    ));
    drop(client);
    let address = daemon.address.clone();
    daemon.kill()?;
    say("Killed the daemon (kill -9), started it again …".to_owned());
    let started = SystemClock.now();
    let mut daemon = Daemon::start(binary, &place.path, &address)?;
    let opened = SystemClock.since(started);
    let mut client = Client::connect(&daemon.address)?;
    prove_read(&mut client)?;
    let restart_seconds = opened.as_secs_f64();
    say(format!("… up in {restart_seconds:.2} s; every byte that was answered is there."));
    let latencies = measure(&mut client)?;
    drop(client);
    let info = DemoInfo {
        dir: place.path.clone(),
        volume: VOLUME.to_owned(),
        endpoints: daemon.endpoints.clone(),
        written_mib: PROOF_WRITE_COUNT,
        write_seconds: seconds,
        restart_seconds,
        is_verified: true,
        latencies,
    };
    match output {
        Output::Json => cli::output::document(&info),
        Output::Text => print!("{}", cli::print::demo(&info)),
    }
    if is_short {
        return daemon.stop();
    }
    if !is_json {
        print_what_is_next(&daemon, binary, &place.path);
    }
    loop {
        match stop.recv_timeout(Duration::from_millis(200)) {
            Ok(()) => break,
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => daemon.check_running()?,
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    say("Stopping.".to_owned());
    daemon.stop()
}

fn print_what_is_next(daemon: &Daemon, binary: &Path, dir: &Path) {
    println!("\nIt serves until Ctrl-C:\n\n    nbd://{}/{VOLUME}\n", daemon.address);
    for uri in &daemon.endpoints {
        if uri.starts_with("nbd+unix") {
            println!("    {uri}\n");
        }
    }
    println!("Next, in another terminal:\n");
    println!("    nbdinfo nbd://{}/{VOLUME}", daemon.address);
    println!("    {} status --dir {}", binary.display(), dir.display());
    // It needs only the kernel's client, and root only for itself.
    println!("    sudo {} attach --nbd nbd://{}/{VOLUME}", binary.display(), daemon.address);
    println!("    {} serve --help\n", binary.display());
}

/// Sends a message on SIGINT, SIGTERM or SIGHUP (its terminal is gone).
fn stop_on_signals() -> Result<std::sync::mpsc::Receiver<()>> {
    let failed = |error| Error::with_source(ErrorKind::Io, "watch for signals", error);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(failed)?;
    let (sender, receiver) = std::sync::mpsc::channel();
    let signals = {
        use tokio::signal::unix::{SignalKind, signal};
        let _inside = runtime.enter();
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        kinds.map(signal)
    };
    let [interrupt, terminate, hangup] = signals;
    let (mut interrupt, mut terminate, mut hangup) =
        (interrupt.map_err(failed)?, terminate.map_err(failed)?, hangup.map_err(failed)?);
    std::thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                _ = hangup.recv() => {}
            }
        });
        // The receiver may have ended the demo already.
        let _ = sender.send(());
    });
    Ok(receiver)
}

/// The directory of the demo's pool.
struct Place {
    path: PathBuf,
    is_ours: bool,
}

impl Place {
    fn new(dir: Option<&Path>) -> Result<Place> {
        if let Some(dir) = dir {
            return Ok(Place { path: dir.to_owned(), is_ours: false });
        }
        let name = format!("spindle-demo-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).map_err(|error| {
            Error::with_source(ErrorKind::Io, format!("make {}", path.display()), error)
        })?;
        Ok(Place { path, is_ours: true })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.is_ours
            && let Err(error) = std::fs::remove_dir_all(&self.path)
        {
            eprintln!("spindle: could not remove {}: {error}", self.path.display());
        }
    }
}

struct Daemon {
    child: Child,
    address: String,
    endpoints: Vec<String>,
}

impl Daemon {
    fn start(binary: &Path, dir: &Path, address: &str) -> Result<Daemon> {
        let failed = |what: &str, error| Error::with_source(ErrorKind::Io, what, error);
        let mut child = Command::new(binary)
            .arg("serve")
            .args(["--nbd", address, "--volume", &format!("{VOLUME}={VOLUME_SIZE}")])
            .arg("--dir")
            .arg(dir)
            .arg("--nbd-unix")
            .arg(dir.join("nbd.sock"))
            .env("SPINDLE_LOG", std::env::var("SPINDLE_LOG").unwrap_or_else(|_| "error".into()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            // Ctrl-C in a terminal goes to a whole process group. The demo stops the daemon itself,
            // and a second signal would make it leave at once.
            .process_group(0)
            .spawn()
            .map_err(|error| failed("start the daemon", error))?;
        let out = child.stdout.take().expect("stdout is piped");
        let mut endpoints = Vec::new();
        for line in BufReader::new(out).lines() {
            let line = line.map_err(|error| failed("read the daemon's endpoints", error))?;
            if line == "ready" {
                break;
            }
            endpoints.push(line);
        }
        let tcp = endpoints.iter().find_map(|uri| {
            uri.strip_prefix("nbd://")?.strip_suffix(&format!("/{VOLUME}")).map(str::to_owned)
        });
        let Some(address) = tcp else {
            let status = child.wait().map_err(|error| failed("wait for the daemon", error))?;
            let what = format!("start the daemon: it did not become ready ({status})");
            return Err(Error::new(ErrorKind::Unavailable, what));
        };
        Ok(Daemon { child, address, endpoints })
    }

    fn kill(&mut self) -> Result<()> {
        let killed = self.child.kill().and_then(|()| self.child.wait());
        killed
            .map(drop)
            .map_err(|error| Error::with_source(ErrorKind::Io, "kill the daemon", error))
    }

    fn check_running(&mut self) -> Result<()> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => {
                let what = format!("serve the demo: the daemon ended ({status})");
                Err(Error::new(ErrorKind::Unavailable, what))
            }
            Err(error) => Err(Error::with_source(ErrorKind::Io, "watch the daemon", error)),
        }
    }

    fn stop(&mut self) -> Result<()> {
        let pid = rustix::process::Pid::from_child(&self.child);
        let stopped = rustix::process::kill_process(pid, rustix::process::Signal::TERM)
            .map_err(std::io::Error::from)
            .and_then(|()| self.child.wait());
        match stopped {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => {
                let what = format!("stop the daemon: it ended with {status}");
                Err(Error::new(ErrorKind::Io, what))
            }
            Err(error) => Err(Error::with_source(ErrorKind::Io, "stop the daemon", error)),
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // After an orderly stop there is nothing left to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Contents of the proof's block `index`: different everywhere, compressible like a database page.
fn fill(block: &mut [u8], index: u64) {
    let mut state = index.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for word in block.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&(state & 0x00ff_00ff_00ff_00ff).to_le_bytes());
    }
}

fn prove_write(client: &mut Client) -> Result<f64> {
    let started = SystemClock.now();
    let mut payload = vec![0; PROOF_WRITE_BYTES];
    for index in 0..PROOF_WRITE_COUNT {
        fill(&mut payload, index);
        client.write(index * PROOF_WRITE_BYTES as u64, &payload)?;
    }
    let seconds = SystemClock.since(started).as_secs_f64();
    for index in 0..SMALL_WRITE_COUNT {
        fill(&mut payload[..BLOCK_BYTES], small_seed(index));
        client.write(small_offset(index), &payload[..BLOCK_BYTES])?;
    }
    Ok(seconds)
}

fn small_seed(index: u64) -> u64 {
    1 << 32 | index
}

/// Offset of a small write: scattered over the second half of the volume, each different.
fn small_offset(index: u64) -> u64 {
    (512 << 20) + (index * 7919 % 100_000) * BLOCK_BYTES as u64
}

fn prove_read(client: &mut Client) -> Result<()> {
    let mut wanted = vec![0; PROOF_WRITE_BYTES];
    let mut found = vec![0; PROOF_WRITE_BYTES];
    let differs = |offset| {
        let what =
            format!("verify the demo volume: the bytes at {offset} differ from those written");
        Err(Error::new(ErrorKind::Corrupt, what))
    };
    for index in 0..PROOF_WRITE_COUNT {
        let offset = index * PROOF_WRITE_BYTES as u64;
        fill(&mut wanted, index);
        client.read(offset, &mut found)?;
        if wanted != found {
            return differs(offset);
        }
    }
    for index in 0..SMALL_WRITE_COUNT {
        fill(&mut wanted[..BLOCK_BYTES], small_seed(index));
        client.read(small_offset(index), &mut found[..BLOCK_BYTES])?;
        if wanted[..BLOCK_BYTES] != found[..BLOCK_BYTES] {
            return differs(small_offset(index));
        }
    }
    Ok(())
}

fn measure(client: &mut Client) -> Result<Vec<LatencyInfo>> {
    let mut block = vec![0; BLOCK_BYTES];
    fill(&mut block, 42);
    let offset = |index: u64| (index * 104_729 % 16_384) * BLOCK_BYTES as u64;
    let (mut writes, mut syncs, mut reads) = (Vec::new(), Vec::new(), Vec::new());
    for index in 0..LATENCY_COUNT {
        let started = SystemClock.now();
        client.write((640 << 20) + offset(index), &block)?;
        writes.push(SystemClock.since(started));
    }
    for index in 0..LATENCY_COUNT {
        let started = SystemClock.now();
        client.write((704 << 20) + offset(index), &block)?;
        client.flush()?;
        syncs.push(SystemClock.since(started));
    }
    for index in 0..LATENCY_COUNT {
        let started = SystemClock.now();
        client.read(offset(index), &mut block)?;
        reads.push(SystemClock.since(started));
    }
    let of = |what: &str, mut list: Vec<Duration>| {
        list.sort_unstable();
        let us = |permille: usize| list[list.len() * permille / 1000].as_secs_f64() * 1e6;
        LatencyInfo { what: what.to_owned(), median_us: us(500), p99_us: us(990) }
    };
    Ok(vec![of("write", writes), of("write and flush", syncs), of("read", reads)])
}

/// A client that runs one request at a time: enough to show the volume and to measure latencies.
struct Client {
    stream: TcpStream,
    cookie: u64,
}

fn broken(what: &str) -> Error {
    Error::new(ErrorKind::Unavailable, format!("talk NBD to the daemon: {what}"))
}

impl Client {
    fn connect(address: &str) -> Result<Client> {
        let failed =
            |error| Error::with_source(ErrorKind::Unavailable, "connect to the daemon", error);
        let stream = TcpStream::connect(address).map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        stream.set_read_timeout(Some(Duration::from_secs(60))).map_err(failed)?;
        let mut client = Client { stream, cookie: 0 };
        let greeting: [u8; 18] = client.take()?;
        if greeting[..8] != wire::NBDMAGIC.to_be_bytes() {
            return Err(broken("this is no NBD server"));
        }
        let flags = u32::from(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
        let mut hello = flags.to_be_bytes().to_vec();
        hello.extend(wire::IHAVEOPT.to_be_bytes());
        hello.extend(option::EXPORT_NAME.to_be_bytes());
        hello.extend((VOLUME.len() as u32).to_be_bytes());
        hello.extend(VOLUME.as_bytes());
        client.put(&hello)?;
        let _size_and_flags: [u8; 10] = client.take()?;
        Ok(client)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).map_err(|error| {
            Error::with_source(ErrorKind::Unavailable, "send to the daemon", error)
        })
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.stream.read_exact(bytes).map_err(|error| {
            Error::with_source(ErrorKind::Unavailable, "receive from the daemon", error)
        })
    }

    fn request(&mut self, kind: u16, offset: u64, length: usize, payload: &[u8]) -> Result<()> {
        self.cookie += 1;
        let mut header = wire::REQUEST_MAGIC.to_be_bytes().to_vec();
        header.extend(0u16.to_be_bytes()); // no flags
        header.extend(kind.to_be_bytes());
        header.extend(self.cookie.to_be_bytes());
        header.extend(offset.to_be_bytes());
        header.extend(u32::try_from(length).expect("a demo request is small").to_be_bytes());
        header.extend_from_slice(payload);
        self.put(&header)?;
        let reply: [u8; 16] = self.take()?;
        let is_ours = reply[..4] == wire::SIMPLE_REPLY_MAGIC.to_be_bytes()
            && reply[8..] == self.cookie.to_be_bytes();
        match u32::from_be_bytes([reply[4], reply[5], reply[6], reply[7]]) {
            0 if is_ours => Ok(()),
            error if is_ours => Err(broken(&format!("request failed with error {error}"))),
            _ => Err(broken("the reply is for another request")),
        }
    }

    fn write(&mut self, offset: u64, payload: &[u8]) -> Result<()> {
        self.request(command::WRITE, offset, payload.len(), payload)
    }

    fn read(&mut self, offset: u64, payload: &mut [u8]) -> Result<()> {
        self.request(command::READ, offset, payload.len(), &[])?;
        self.fill(payload)
    }

    fn flush(&mut self) -> Result<()> {
        self.request(command::FLUSH, 0, 0, &[])
    }
}
