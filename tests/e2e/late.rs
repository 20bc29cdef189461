//! Requests of a client that disconnects while the log is full: none is applied over acknowledged
//! writes of its successor.
//!
//! Invariants:
//! - The log is full because the test keeps the store away.
//! - The test notices a daemon that keeps such requests.

use crate::conditions::conditions;
use crate::copies::wait_for;
use crate::stores::on;
use serde_json::Value;
use std::io;
use std::process::Stdio;
use tests::bucket::{Bucket, Care};
use tests::cut::{Line, Proxy};
use tests::daemon::Daemon;
use tests::nbd::wire::{CMD_TRIM, CMD_WRITE, CMD_WRITE_ZEROES};
use tests::nbd::{Connection, Endpoint, Wanted};
use tests::place::{binary, skip};

const MIB: u64 = 1 << 20;
const LENGTH: u32 = 64 << 10;
const BLOCK: usize = 4096;
/// Place of the successor's write, counted from the start of each request's range.
const INSIDE: u64 = 8192;

/// A request of the first client: the start of its range, its command, the number of bytes by which
/// it is unaligned, and the byte that it writes.
type Left = (u64, u16, u64, Option<u8>);

const LEFT: [Left; 4] = [
    (4 * MIB, CMD_WRITE, 0, Some(b'A')),
    (5 * MIB, CMD_WRITE, 1, Some(b'A')),
    (6 * MIB, CMD_WRITE_ZEROES, 1, None),
    (7 * MIB, CMD_TRIM, 1, None),
];

fn last_lsn(daemon: &Daemon) -> u64 {
    let status: Value = daemon.json(&["status"]);
    status["log"]["last_lsn"].as_u64().expect("a number")
}

fn connect(daemon: &Daemon, is_tcp: bool) -> Connection {
    let endpoint = if is_tcp { daemon.tcp("db") } else { daemon.unix("db") };
    Connection::open(&endpoint, &Wanted::default()).expect("it opens, though the log is full")
}

/// Sends a request and does not wait for its answer.
fn send(connection: &mut Connection, (start, command, ragged, payload): Left) {
    let length = LENGTH - 2 * u32::try_from(ragged).expect("it is small");
    let payload = payload.map(|byte| vec![byte; length as usize]).unwrap_or_default();
    let sent = connection.submit(command, 0, start + ragged, length, &payload);
    sent.expect("it is sent");
}

/// Returns the effects of requests that were applied too late.
fn late(program: &str, bugs: Option<&str>) -> Vec<&'static str> {
    let bucket = Bucket::start(Care::Honest);
    let proxy = Proxy::start(bucket.address()).expect("a proxy");
    let mut daemon = on(proxy.address());
    daemon.announce(""); // the store is away
    daemon.use_binary(program);
    daemon.environ(&[("SPINDLE_SEEDED_BUGS", bugs.unwrap_or_default())]);
    daemon.restart();
    let mut first = connect(&daemon, false);
    for (start, ..) in LEFT {
        first.write(start, &vec![b'O'; LENGTH as usize], 0);
    }
    first.flush();
    drop(first);
    let _ = daemon.json(&["drain"]);
    proxy.set(Line::Cut);
    let found = std::thread::scope(|scope| {
        let endpoint = daemon.unix("log");
        let filling = scope.spawn(move || fill(&endpoint));
        let _opened = OpenedAtTheEnd(&proxy);
        wait_for("the log is full", || !conditions(&daemon, "log-full").is_empty());
        let found = go_and_come(&daemon, &proxy, bugs.is_none());
        filling.join().expect("all is written").expect("the writer is served");
        found
    });
    daemon.stop();
    daemon.fsck();
    found
}

/// Lets the thread that fills the log end, even if the test fails.
struct OpenedAtTheEnd<'a>(&'a Proxy);

impl Drop for OpenedAtTheEnd<'_> {
    fn drop(&mut self) {
        self.0.set(Line::Open);
    }
}

/// Writes more than the log holds to the other volume.
fn fill(endpoint: &Endpoint) -> io::Result<()> {
    let mut writer = Connection::open(endpoint, &Wanted::default())?;
    let payload = vec![7; 128 << 10];
    for index in 0..160 {
        writer.submit(CMD_WRITE, 0, index % 64 * (128 << 10), 128 << 10, &payload)?;
        // The writer waits for as long as the test keeps the store away.
        loop {
            match writer.receive() {
                Ok(_) => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

/// Kills the command of a resize that waits for log space: the resize is dropped with it.
fn kill_resize(daemon: &Daemon) {
    let before = last_lsn(daemon);
    let resize = &mut daemon.prepare(&["volume", "resize", "db", "32MiB"]);
    let resize = resize.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut resize = resize.expect("the program runs");
    wait_for("it is queued", || last_lsn(daemon) > before);
    resize.kill().expect("it runs");
    resize.wait().expect("it ends");
    wait_for("it is taken back", || last_lsn(daemon) == before);
}

/// Runs both clients; returns late effects. `is_right`: the daemon takes requests back.
fn go_and_come(daemon: &Daemon, proxy: &Proxy, is_right: bool) -> Vec<&'static str> {
    let mut found = Vec::new();
    let start = last_lsn(daemon);
    let mut gone: Vec<Connection> = [false, true].map(|is_tcp| connect(daemon, is_tcp)).into();
    for (index, left) in LEFT.into_iter().enumerate() {
        let before = last_lsn(daemon);
        send(&mut gone[index % 2], left);
        wait_for("it is queued", || last_lsn(daemon) > before);
        // One entry for a write, three for each of the others, all in one step.
        let entry_count = if left.3.is_some() { 1 } else { 3 };
        if last_lsn(daemon) != before + entry_count {
            found.push("a request in parts");
        }
    }
    drop(gone);
    let mut next = connect(daemon, true);
    let seen = LEFT.map(|(start, ..)| next.read(start, LENGTH));
    if is_right {
        // The daemon may notice a little later that the clients are gone.
        wait_for("their requests are taken back", || last_lsn(daemon) == start);
        kill_resize(daemon);
    }
    let before = last_lsn(daemon);
    for (start, ..) in LEFT {
        let sent = next.submit(CMD_WRITE, 0, start + INSIDE, BLOCK as u32, &[b'B'; BLOCK]);
        sent.expect("it is sent");
    }
    wait_for("they are queued", || last_lsn(daemon) >= before + LEFT.len() as u64);
    proxy.set(Line::Open);
    for _ in LEFT {
        assert_eq!(next.receive().expect("an answer").error, 0);
    }
    next.flush();
    for value in 0..20 {
        next.write(0, &[value; BLOCK], 0);
        next.flush();
    }
    for ((start, ..), seen) in LEFT.into_iter().zip(seen) {
        let now = next.read(start, LENGTH);
        let inside = INSIDE as usize..INSIDE as usize + BLOCK;
        if now[inside.clone()] != [b'B'; BLOCK] {
            found.push("over an acknowledged write");
        }
        if now[..inside.start] != seen[..inside.start] || now[inside.end..] != seen[inside.end..] {
            found.push("after the successor had read");
        }
    }
    if daemon.json(&["volume", "show", "db"])["size_bytes"] != 16 * MIB {
        found.push("a resize");
    }
    found
}

#[test]
fn late_requests_never_overwrite_data_of_a_successor() {
    assert_eq!(late("spindle", None), Vec::<&str>::new());
}

#[test]
fn a_daemon_that_keeps_requests_of_disconnected_clients_is_noticed() {
    if !binary("spindle-faulty").exists() {
        return skip("the build with seeded failures is missing (tests/run makes it)");
    }
    let found = late("spindle-faulty", Some("kept-when-dropped,leftovers-kept,step-torn"));
    for effect in ["a request in parts", "after the successor had read"] {
        assert!(found.contains(&effect), "{found:?}");
    }
}
