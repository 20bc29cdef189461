//! The demo on one node: it restarts after `kill -9` with every byte that was answered.
//!
//! Invariant: the child is killed hard once, on purpose, in the middle; every answered write must be
//! there afterwards.

use super::client::Client;
use super::daemon::{Daemon, Launch, VOLUME, VOLUME_SIZE};
use super::place::Place;
use super::stop::Stop;
use api::demo::{DemoInfo, LatencyInfo};
use block::env::{Clock, SystemClock};
use block::{Error, ErrorKind, Result};
use cli::args::Output;
use std::path::Path;
use std::time::Duration;

/// Bytes of one write of the proof, and the number of these writes: 64 MiB.
const PROOF_WRITE_BYTES: usize = 1 << 20;
const PROOF_WRITE_COUNT: u64 = 64;
/// Small writes after them, none of which is flushed.
const SMALL_WRITE_COUNT: u64 = 1000;
const BLOCK_BYTES: usize = 4096;
/// Requests per latency figure. Chosen by hand: a second or so.
const LATENCY_COUNT: u64 = 2000;

/// Runs the demo in `dir`, or in a temporary directory.
///
/// # Errors
/// Every failure; a read that differs from the data written is `Corrupt`.
pub(super) fn run(dir: Option<&Path>, binary: &Path, is_short: bool, output: Output) -> Result<()> {
    let is_json = output == Output::Json;
    let say = |text: String| {
        if !is_json {
            println!("{text}");
        }
    };
    let stop = Stop::on_signals()?;
    let place = Place::new(dir)?;
    let mut launch = Launch {
        binary: binary.to_owned(),
        dir: place.path.clone(),
        address: "127.0.0.1:0".to_owned(),
        arguments: Vec::new(),
        is_data_node: false,
    };
    let mut daemon = Daemon::start(&launch, &stop)?;
    say(format!("A pool in {} with a volume of {VOLUME_SIZE}.", place.path.display()));
    let mut client = Client::connect(&daemon.address)?;
    let seconds = prove_write(&mut client)?;
    say(format!(
        "Wrote {PROOF_WRITE_COUNT} MiB in {seconds:.2} s and {SMALL_WRITE_COUNT} blocks of 4 KiB, \
         no flush."
    ));
    drop(client);
    launch.address.clone_from(&daemon.address);
    daemon.kill()?;
    say("Killed the daemon (kill -9), started it again …".to_owned());
    let started = SystemClock.now();
    let mut daemon = Daemon::start(&launch, &stop)?;
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
    while !stop.wait(Duration::from_millis(200)) {
        daemon.check_running()?;
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

/// Contents of the proof's block `index`: different everywhere, compressible like a database page.
pub(super) fn fill(block: &mut [u8], index: u64) {
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
