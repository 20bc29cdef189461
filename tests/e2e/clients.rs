//! Common NBD clients against spindle, and the tests' own client against common NBD servers.
//!
//! Invariants:
//! - One client reads what another has written, over both kinds of sockets.

use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tests::daemon::{Daemon, SMALL};
use tests::nbd::{Connection, Endpoint, Wanted};
use tests::needs;
use tests::place::{Place, run};
use tests::process::Process;
use tests::seed::{Random, seeds};

/// Number of writers, each with one write in flight while the daemon is killed.
const WRITERS: u64 = 32;
const SLOTS: u64 = 8;

/// Python with the bindings of the distribution.
const PYTHON: &str = "/usr/bin/python3";

fn daemon() -> Daemon {
    Daemon::started(SMALL, &[("disk", "96MiB"), ("other", "1TiB")])
}

/// Makes a file with data, holes and zeroes.
fn sample(path: &Path, seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = Random::new(seed, 7);
    let mut content = vec![0; bytes];
    for part in content.chunks_mut(1 << 20) {
        match random.below(3) {
            0 => random.fill(part),
            1 => part.fill(0x5a),
            _ => {}
        }
    }
    std::fs::write(path, &content).expect("write the sample");
    content
}

#[test]
fn nbdinfo_sees_exports_sizes_and_abilities() {
    needs!("nbdinfo");
    let daemon = daemon();
    let list: Value = parse(&run("nbdinfo", &["--list", "--json", &daemon.tcp("").uri()]));
    let exports = list["exports"].as_array().expect("a list");
    let mut names: Vec<&str> =
        exports.iter().map(|export| export["export-name"].as_str().expect("a name")).collect();
    names.sort_unstable();
    assert_eq!(names, ["disk", "other"]);
    for endpoint in [daemon.tcp("other"), daemon.unix("other")] {
        let info: Value = parse(&run("nbdinfo", &["--json", &endpoint.uri()]));
        let export = &info["exports"][0];
        assert_eq!(export["export-size"], 1u64 << 40);
        assert_eq!(export["block_size_minimum"], 1, "{export}");
        for ability in [
            "can_flush",
            "can_fua",
            "can_trim",
            "can_zero",
            "can_multi_conn",
            "can_df",
            "can_cache",
        ] {
            assert_eq!(export[ability], true, "{ability}: {export}");
        }
        assert_eq!(export["is_read_only"], false);
        assert_eq!(info["structured"], true);
    }
    let map = parse(&run("nbdinfo", &["--map", "--json", &daemon.tcp("other").uri()]));
    assert_eq!(map[0]["type"], 3, "an empty volume is one hole: {map}");
}

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn nbdcopy_and_qemu_img_agree_about_every_byte() {
    needs!("nbdcopy", "qemu-img");
    for seed in seeds(1) {
        println!("SEED={seed}");
        let mut daemon = daemon();
        let place = Place::new();
        let (source, copy) = (place.join("source"), place.join("copy"));
        let content = sample(&source, seed, 96 << 20);
        let (source, copy_name) = (source.display().to_string(), copy.display().to_string());
        let (tcp, unix) = (daemon.tcp("disk").uri(), daemon.unix("disk").uri());
        run("nbdcopy", &["--flush", "--connections=4", "--requests=32", &source, &tcp]);
        run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &source, &unix]);
        daemon.kill();
        daemon.restart();
        let (tcp, unix) = (daemon.tcp("disk").uri(), daemon.unix("disk").uri());
        run("nbdcopy", &[&unix, &copy_name]);
        assert!(std::fs::read(&copy).expect("the copy") == content, "nbdcopy read other bytes");
        // The other way round, over the existing data.
        let content = sample(Path::new(&source), seed + 1, 96 << 20);
        run(
            "qemu-img",
            &["convert", "-n", "-f", "raw", "-O", "raw", "-m", "8", "-W", &source, &tcp],
        );
        run("nbdcopy", &[&tcp, &copy_name]);
        assert!(std::fs::read(&copy).expect("the copy") == content, "qemu-img wrote other bytes");
        daemon.stop();
        daemon.fsck();
    }
}

/// Whether fio is there and has an engine for NBD.
pub fn has_fio_with_nbd() -> bool {
    let engines = || tests::place::output("fio", &["--enghelp"]).stdout;
    tests::place::missing(&["fio"]).is_none()
        && String::from_utf8_lossy(&engines()).lines().any(|line| line.trim() == "nbd")
}

#[test]
fn fio_verifies_its_random_writes() {
    needs!("fio");
    let daemon = daemon();
    if !has_fio_with_nbd() {
        return tests::place::skip("this fio has no nbd engine");
    }
    for (endpoint, block) in [(daemon.unix("disk"), "4k"), (daemon.tcp("disk"), "512-64k")] {
        run(
            "fio",
            &[
                "--name=verify",
                "--ioengine=nbd",
                &format!("--uri={}", endpoint.uri()),
                "--rw=randwrite",
                &format!("--bsrange={}", if block.contains('-') { block } else { "4k-4k" }),
                "--size=64m",
                "--iodepth=32",
                "--verify=crc32c",
                "--do_verify=1",
                "--verify_fatal=1",
                "--verify_state_save=0",
                "--randrepeat=0",
                "--fsync=64",
            ],
        );
    }
}

#[test]
fn libnbd_in_python_uses_many_connections_and_reads_the_map() {
    needs!("/usr/bin/python3");
    if !tests::place::output(PYTHON, &["-c", "import nbd"]).status.success() {
        return tests::place::skip("python3-libnbd is not installed");
    }
    let daemon = daemon();
    let script = r#"
import nbd, os, sys
uri = sys.argv[1]
handles = []
for _ in range(4):
    h = nbd.NBD(); h.add_meta_context("base:allocation"); h.connect_uri(uri); handles.append(h)
assert handles[0].can_multi_conn()
blocks = {i: os.urandom(4096) for i in range(0, 512, 3)}
pending = []
for i, b in blocks.items():
    h = handles[i % 4]
    pending.append((h, h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(b)), i * 8192)))
for h, cookie in pending:
    while not h.aio_command_completed(cookie): h.poll(-1)
handles[0].flush()
for i, b in blocks.items():
    assert handles[(i + 1) % 4].pread(4096, i * 8192) == b, i
handles[1].trim(1 << 20, 0)
assert handles[2].pread(1 << 20, 0) == bytes(1 << 20)
def extents(h, offset, length):
    found = []
    def note(context, at, entries, error):
        found.extend(zip(entries[::2], entries[1::2])); return 0
    h.block_status(length, offset, note); return found
first = extents(handles[3], 0, 1 << 20)[0]
assert first[1] == 3 and first[0] >= 1 << 20, first
i = max(blocks)
assert extents(handles[3], i * 8192, 4096)[0][1] == 0
handles[0].zero(4096, i * 8192, nbd.CMD_FLAG_NO_HOLE)
assert handles[1].pread(4096, i * 8192) == bytes(4096)
assert extents(handles[3], i * 8192, 4096)[0][1] & 1 == 0
for h in handles: h.shutdown()
print("ok")
"#;
    for endpoint in [daemon.tcp("disk"), daemon.unix("disk")] {
        assert_eq!(run(PYTHON, &["-c", script, &endpoint.uri()]).trim(), "ok");
    }
}

/// Returns the contents that a writer gives its block in a turn.
fn block(writer: u64, turn: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    Random::new(turn, writer).fill(&mut bytes);
    bytes
}

/// Writes one block after the other, insisting on success, and returns the number of the last turn.
/// The first turn is `first`, a multiple of the number of slots; each slot gets at least one turn.
fn write_until(
    connection: &mut Connection,
    writer: u64,
    first: u64,
    answered: &AtomicU64,
    is_over: &AtomicBool,
) -> u64 {
    for turn in first.. {
        connection.write((writer * SLOTS + turn % SLOTS) * 4096, &block(writer, turn), 0);
        answered.fetch_add(1, Ordering::SeqCst);
        if turn + 1 >= first + SLOTS && is_over.load(Ordering::SeqCst) {
            return turn;
        }
    }
    unreachable!("turns do not end by themselves")
}

#[test]
fn reconnecting_client_sees_a_pause_when_the_daemon_dies() {
    needs!("nbdkit");
    let mut daemon = daemon();
    let place = Place::new();
    let socket = place.join("retry.sock");
    let unix = daemon.unix("disk").uri();
    let mut command = Command::new("nbdkit");
    command.args(["-f", "-U"]).arg(&socket).args(["--filter=retry", "nbd"]);
    command.arg(format!("uri={unix}"));
    command.args(["retries=60", "retry-delay=1", "retry-exponential=no"]);
    let _proxy = Process::start(&mut command, &place.join("log")).expect("nbdkit starts");
    let endpoint = Endpoint::parse(&format!("nbd+unix:///?socket={}", socket.display()));
    let endpoint = endpoint.expect("well formed");
    // The proxy handles one request of a connection at a time, so each write that is to be in
    // flight when the daemon dies needs a connection.
    let mut connections: Vec<Connection> = (0..WRITERS).map(|_| connect(&endpoint)).collect();
    for round in 0..3u64 {
        let (answered, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
        let has_come = |count: u64| {
            let deadline = Instant::now() + Duration::from_secs(60);
            while answered.load(Ordering::SeqCst) < count && Instant::now() < deadline {
                std::thread::sleep(Duration::from_micros(100));
            }
            answered.load(Ordering::SeqCst) >= count
        };
        let written: Vec<u64> = std::thread::scope(|scope| {
            let (answered, is_over) = (&answered, &is_over);
            let spawn = |(writer, connection)| {
                scope.spawn(move || write_until(connection, writer, round << 32, answered, is_over))
            };
            let threads: Vec<_> = (0..).zip(&mut connections).map(spawn).collect();
            let is_busy = has_come(20 * WRITERS);
            daemon.kill();
            daemon.restart();
            // By then every writer has lost a write, which the next daemon has answered.
            let is_back = has_come(answered.load(Ordering::SeqCst) + 20 * WRITERS);
            is_over.store(true, Ordering::SeqCst);
            assert!(is_busy && is_back, "round {round}: {answered:?} answers, busy: {is_busy}");
            threads.into_iter().map(|thread| thread.join().expect("every write works")).collect()
        });
        connections[0].flush();
        for (writer, turn) in (0..).zip(written) {
            for slot in 0..SLOTS {
                let newest = (turn - slot) / SLOTS * SLOTS + slot;
                let found = connections[0].read((writer * SLOTS + slot) * 4096, 4096);
                assert!(found == block(writer, newest), "slot {slot} of {writer} in round {round}");
            }
        }
    }
}

fn connect(endpoint: &Endpoint) -> Connection {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match Connection::open(endpoint, &Wanted::everything()) {
            Ok(connection) => return connection,
            Err(error) => assert!(Instant::now() < deadline, "{}: {error}", endpoint.uri()),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn exercise(mut connection: Connection) {
    let mut random = Random::new(3, 3);
    let mut bytes = vec![0; 1 << 20];
    random.fill(&mut bytes);
    connection.write(4096, &bytes, 0);
    connection.flush();
    assert!(connection.read(4096, 1 << 20) == bytes);
    connection.write_zeroes(4096, 8192, 0);
    assert_eq!(connection.read(4096, 8192), vec![0; 8192]);
    connection.disconnect().expect("a goodbye");
}

#[test]
fn the_tests_own_client_works_with_nbdkit() {
    needs!("nbdkit");
    let place = Place::new();
    let socket = place.join("socket");
    let mut command = Command::new("nbdkit");
    command.args(["-f", "-U"]).arg(&socket).args(["memory", "8M"]);
    let _server = Process::start(&mut command, &place.join("log")).expect("nbdkit starts");
    let endpoint = Endpoint::parse(&format!("nbd+unix:///?socket={}", socket.display()));
    exercise(connect(&endpoint.expect("well formed")));
}

#[test]
fn the_tests_own_client_works_with_qemu_nbd() {
    needs!("qemu-nbd");
    let place = Place::new();
    let (socket, image) = (place.join("socket"), place.join("image"));
    std::fs::write(&image, vec![0; 8 << 20]).expect("write the image");
    let mut command = Command::new("qemu-nbd");
    command.args(["-f", "raw", "-t", "-x", "disk", "-k"]).arg(&socket).arg(&image);
    let _server = Process::start(&mut command, &place.join("log")).expect("qemu-nbd starts");
    let endpoint = Endpoint::parse(&format!("nbd+unix:///disk?socket={}", socket.display()));
    let mut connection = connect(&endpoint.expect("well formed"));
    assert!(connection.has_allocation());
    connection.trim(0, 4096);
    exercise(connection);
}
