//! Object stores: the contents of the bucket are sufficient, and faults of the bucket are handled.
//!
//! Invariants:
//! - Writes are sent one at a time, so the store must hold the state after some number of them.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tests::bucket::{Bucket, Care};
use tests::cut::{Line, Proxy};
use tests::daemon::{Daemon, SMALL};
use tests::nbd::wire::*;
use tests::nbd::{Connection, Wanted};
use tests::seed::{Random, seeds};
use tests::stamp::{Stamp, stamped};
use tests::store::{BUCKET, Server, environment};
use tests::torture::target::Target;

pub const VOLUMES: &[(&str, &str)] = &[("db", "16MiB"), ("log", "16MiB")];
const SECTORS: u64 = (16 << 20) / 512;
/// Length of the reads of which some may be refused.
const PART_BYTES: u32 = 16 << 10;
/// Parts of each volume that are asked for at once. Chosen by hand: a socket has room for the requests.
pub const PARTS: usize = 128;

/// Makes a daemon, not started, on an S3 server reached at `address`.
pub fn on_s3(settings: &str, volumes: &[(&str, &str)], address: &str) -> Daemon {
    let mut daemon = Daemon::new(settings, volumes);
    on_store(&mut daemon, address);
    daemon
}

/// Lets a daemon that does not run use the S3 server at `address`.
pub fn on_store(daemon: &mut Daemon, address: &str) {
    daemon.argue(&["--store", &format!("s3://{BUCKET}/pools/one")]);
    let variables = environment(address);
    let pairs: Vec<(&str, &str)> =
        variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    daemon.environ(&pairs);
}

pub fn on(address: &str) -> Daemon {
    on_s3(SMALL, VOLUMES, address)
}

/// Makes another machine: an empty directory, the same store, the same key.
pub fn second(first: &Daemon, address: &str) -> Daemon {
    let second = on_s3(SMALL, VOLUMES, address);
    std::fs::create_dir_all(second.dir()).expect("make a directory");
    copy(&first.dir().join("spindle.key"), &second.dir().join("spindle.key"));
    second
}

fn copy(from: &Path, to: &Path) {
    std::fs::copy(from, to).unwrap_or_else(|error| panic!("copy {}: {error}", from.display()));
}

/// Numbered writes over two volumes, one after the other.
pub struct History {
    run: u64,
    random: Random,
    /// Chooses the reads, so that their number does not change the writes.
    reads: Random,
    writes: Vec<(usize, u64, u64)>,
}

impl History {
    pub fn new(seed: u64) -> History {
        println!("SEED={seed}");
        let (random, reads) = (Random::new(seed, 11), Random::new(seed, 12));
        History { run: seed, random, reads, writes: Vec::new() }
    }

    /// Returns the number of writes so far.
    pub fn count(&self) -> usize {
        self.writes.len()
    }

    /// Makes one more write; returns false when it was refused.
    pub fn write(&mut self, connections: &mut [Connection]) -> bool {
        self.write_next(connections).is_ok_and(|error| error == 0)
    }

    /// Makes one more write. Returns the error of its reply, 0 for success.
    fn write_next(&mut self, connections: &mut [Connection]) -> std::io::Result<u32> {
        let volume = usize::try_from(self.random.below(2)).expect("small");
        let count = self.random.between(1, 64);
        let sector = self.random.below(SECTORS - count);
        // The write may be carried out, whatever the answer.
        self.writes.push((volume, sector, count));
        self.send(connections)
    }

    /// Sends the newest write. Returns the error of its reply, 0 for success.
    fn send(&self, connections: &mut [Connection]) -> std::io::Result<u32> {
        let sequence = u64::try_from(self.writes.len()).expect("fits");
        let (volume, sector, count) = *self.writes.last().expect("there is one");
        let stamp = Stamp { volume: u8::try_from(volume).expect("small"), sector, sequence };
        let payload = stamped(self.run, stamp, usize::try_from(count).expect("small"));
        let length = u32::try_from(payload.len()).expect("small");
        let reply = connections[volume].call(CMD_WRITE, 0, sector * 512, length, &payload)?;
        Ok(reply.error)
    }

    /// Writes until a connection ends; no write is refused. [`History::reissue`] continues.
    pub fn run_until_ended(&mut self, connections: &mut [Connection]) {
        while let Ok(error) = self.write_next(connections) {
            assert_eq!(error, 0, "write {} was refused", self.writes.len());
        }
    }

    /// Sends the newest write again, as a client does that was not answered.
    pub fn reissue(&self, connections: &mut [Connection]) {
        let error = self.send(connections).expect("it is answered");
        assert_eq!(error, 0, "write {} was refused", self.writes.len());
    }

    pub fn run_for(&mut self, connections: &mut [Connection], time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            assert!(self.write(connections), "write {} was refused", self.writes.len());
        }
    }

    /// Makes up to `write_count_max` writes among reads of earlier ones, until `is_over`. Returns false if a
    /// connection has ended: [`History::reissue`] continues.
    pub fn run_until(
        &mut self,
        connections: &mut [Connection],
        write_count_max: usize,
        is_over: &AtomicBool,
    ) -> bool {
        let mut write_count = 0;
        while !is_over.load(Ordering::Relaxed) {
            let is_write =
                self.writes.is_empty() || write_count < write_count_max && self.reads.chance(30);
            let ended = if is_write {
                write_count += 1;
                self.write_next(connections).map(|error| {
                    assert_eq!(error, 0, "write {} was refused", self.writes.len());
                })
            } else {
                self.check_any(connections)
            };
            if ended.is_err() {
                return false;
            }
        }
        true
    }

    /// Reads the sectors of any write, some of which later writes may have changed.
    fn check_any(&mut self, connections: &mut [Connection]) -> std::io::Result<()> {
        let at = self.reads.below(u64::try_from(self.writes.len()).expect("fits"));
        let (volume, first, count) = self.writes[usize::try_from(at).expect("an index")];
        let length = u32::try_from(count * 512).expect("small");
        let reply = connections[volume].call(CMD_READ, 0, first * 512, length, &[])?;
        assert_eq!(reply.error, 0, "a read of volume {volume} sector {first} failed");
        let mut expected = vec![0; reply.payload.len()];
        for (index, (_, start, length)) in
            self.writes.iter().enumerate().filter(|(_, (written, ..))| *written == volume)
        {
            let sequence = u64::try_from(index).expect("fits") + 1;
            let number = u8::try_from(volume).expect("small");
            for sector in *start.max(&first)..(start + length).min(first + count) {
                let at = usize::try_from((sector - first) * 512).expect("small");
                let stamp = Stamp { volume: number, sector, sequence };
                stamp.fill(self.run, &mut expected[at..at + 512]);
            }
        }
        let mut sectors = reply.payload.chunks(512).zip(expected.chunks(512));
        if let Some(sector) = sectors.position(|(found, expected)| found != expected) {
            let words = tests::stamp::describe(self.run, &reply.payload[sector * 512..][..512]);
            panic!(
                "after write {}, volume {volume} sector {} holds {words:?}",
                self.writes.len(),
                first + sector as u64
            );
        }
        Ok(())
    }

    /// Asks each volume for the first [`PARTS`] parts, and does not wait. Returns the cookies for [`History::end_reads`].
    pub fn begin_reads(&self, connections: &mut [Connection]) -> Vec<Vec<u64>> {
        let ask = |connection: &mut Connection| {
            let offsets = (0..PARTS as u64).map(|part| part * u64::from(PART_BYTES));
            let sent = offsets.map(|at| connection.submit(CMD_READ, 0, at, PART_BYTES, &[]));
            sent.collect::<std::io::Result<_>>().expect("it is sent")
        };
        connections.iter_mut().map(ask).collect()
    }

    /// Waits for the answers. Insists that each part is right or refused with EIO, and returns the number of refused
    /// ones.
    pub fn end_reads(&self, connections: &mut [Connection], sent: &[Vec<u64>]) -> usize {
        let mut refused_count = 0;
        let expected = self.after(self.writes.len());
        for (volume, (connection, sent)) in connections.iter_mut().zip(sent).enumerate() {
            let parts: Vec<&[u8]> = expected[volume].chunks(PART_BYTES as usize).collect();
            for _ in sent {
                let reply = connection.receive().expect("it is answered");
                let part = sent.iter().position(|cookie| *cookie == reply.cookie);
                let part = part.expect("the connection knows its requests");
                match reply.error {
                    0 if reply.payload == parts[part] => {}
                    0 => {
                        let words = tests::stamp::describe(self.run, &reply.payload);
                        panic!("volume {volume} part {part} is wrong: {words:?}");
                    }
                    EIO => refused_count += 1,
                    error => panic!("volume {volume} part {part} got the error {error}"),
                }
            }
        }
        refused_count
    }

    /// Reads the first parts, as [`History::end_reads`] does.
    pub fn refused_reads(&self, connections: &mut [Connection]) -> usize {
        let sent = self.begin_reads(connections);
        self.end_reads(connections, &sent)
    }

    /// Reads the sector of the newest write.
    fn check_newest(&self, connections: &mut [Connection]) {
        let sequence = u64::try_from(self.writes.len()).expect("fits");
        let (volume, sector, count) = *self.writes.last().expect("there is one");
        let stamp = Stamp { volume: u8::try_from(volume).expect("small"), sector, sequence };
        let expected = stamped(self.run, stamp, usize::try_from(count).expect("small"));
        let length = u32::try_from(expected.len()).expect("small");
        assert!(connections[volume].read(sector * 512, length) == expected, "write {sequence}");
    }

    /// Returns the contents of the volumes after the first `count` writes.
    fn after(&self, count: usize) -> [Vec<u8>; 2] {
        let bytes = usize::try_from(SECTORS * 512).expect("fits");
        let mut volumes = [vec![0; bytes], vec![0; bytes]];
        for (index, (volume, sector, length)) in self.writes.iter().take(count).enumerate() {
            let sequence = u64::try_from(index).expect("fits") + 1;
            let number = u8::try_from(*volume).expect("small");
            let stamp = Stamp { volume: number, sector: *sector, sequence };
            let payload = stamped(self.run, stamp, usize::try_from(*length).expect("small"));
            let start = usize::try_from(sector * 512).expect("fits");
            volumes[*volume][start..start + payload.len()].copy_from_slice(&payload);
        }
        volumes
    }

    /// Returns the number of writes that leads to the volumes' contents; fails when there is none.
    pub fn prefix(&self, connections: &mut [Connection]) -> usize {
        let found: Vec<Vec<u8>> = connections.iter_mut().map(read_all).collect();
        // The newest stamp that is present shows the number of writes.
        let newest = |bytes: &Vec<u8>| {
            let tags = bytes.chunks(512).map(|sector| {
                u64::from_be_bytes(sector[..8].try_into().expect("8 bytes")) & ((1 << 28) - 1)
            });
            tags.max().unwrap_or(0)
        };
        let count = found.iter().map(newest).max().unwrap_or(0);
        let count = usize::try_from(count).expect("fits");
        let expected = self.after(count);
        for (volume, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let differs = found.chunks(512).zip(expected.chunks(512)).position(|(a, b)| a != b);
            if let Some(sector) = differs {
                let at = sector * 512..sector * 512 + 512;
                let words = tests::stamp::describe(self.run, &found[at]);
                panic!(
                    "not a prefix of history: after write {count}, volume {volume} sector {sector} \
                     holds {words:?}"
                );
            }
        }
        count
    }
}

fn read_all(connection: &mut Connection) -> Vec<u8> {
    (0..16).flat_map(|index| connection.read(index << 20, 1 << 20)).collect()
}

pub fn open(daemon: &Daemon) -> Vec<Connection> {
    let open = |(name, _): &(&str, &str)| {
        Connection::open(&daemon.endpoint(name), &Wanted::everything()).expect("it opens")
    };
    VOLUMES.iter().map(open).collect()
}

#[test]
fn a_bucket_and_a_key_are_enough_for_another_machine() {
    for seed in seeds(1) {
        let server = Server::start();
        let mut first = on(server.address());
        first.restart();
        let mut history = History::new(seed);
        history.run_for(&mut open(&first), Duration::from_secs(3));
        first.stop();
        let mut second = second(&first, server.address());
        second.restart();
        let mut connections = open(&second);
        let count = history.prefix(&mut connections);
        assert_eq!(count, history.writes.len(), "an orderly stop leaves nothing behind");
        history.run_for(&mut connections, Duration::from_secs(1));
        drop(connections);
        second.stop();
        // And back: the first machine's log is out of date and must not be replayed over the newer
        // state.
        first.announce("another node has owned the pool");
        first.restart();
        assert_eq!(history.prefix(&mut open(&first)), history.writes.len());
        first.stop();
        first.fsck();
    }
}

#[test]
fn bucket_of_a_dead_machine_holds_a_history_prefix() {
    for seed in seeds(1) {
        let server = Server::start();
        let mut first = on(server.address());
        first.restart();
        let mut history = History::new(seed);
        history.run_for(&mut open(&first), Duration::from_secs(6));
        first.kill();
        let mut second = second(&first, server.address());
        let refusal = second.refuses_to_start();
        assert!(refusal.contains("take-over"), "it says how to go on: {refusal}");
        second.argue(&["--take-over"]);
        second.announce("taken");
        second.announce("take-over");
        second.announce("spindle volume accept-loss");
        second.restart();
        let count = history.prefix(&mut open(&second));
        println!("{count} of {} writes were in the bucket", history.writes.len());
        assert!(count > 0, "six seconds are longer than destage.max_age");
        // The first machine returns with a log that has been superseded.
        let refusal = first.refuses_to_start();
        assert!(refusal.contains("take-over"), "{refusal}");
        assert_eq!(history.prefix(&mut open(&second)), count, "the refused one changed nothing");
    }
}

#[test]
fn a_taken_pool_fails_the_writes_of_its_old_owner() {
    let server = Server::start();
    let mut first = on(server.address());
    first.restart();
    let mut history = History::new(1);
    let mut connections = open(&first);
    history.run_for(&mut connections, Duration::from_secs(1));
    let _ = first.json(&["drain"]);
    let stored = history.writes.len();
    let mut second = second(&first, server.address());
    let refusal = second.refuses_to_start();
    assert!(refusal.contains("take-over"), "it says how to go on: {refusal}");
    history.run_for(&mut connections, Duration::from_millis(200));
    second.argue(&["--take-over"]);
    second.announce("take");
    second.announce("spindle volume accept-loss");
    second.restart();
    first.announce("pool stopped");
    first.announce("");
    let deadline = Instant::now() + Duration::from_secs(40);
    while history.write(&mut connections) {
        assert!(Instant::now() < deadline, "the old owner still acknowledges writes");
        std::thread::sleep(Duration::from_millis(10));
    }
    // The daemon ends with a reason, so that its supervisor acts.
    assert_eq!(first.wait(Duration::from_secs(60)).code(), Some(1));
    assert!(first.tail().contains("was taken over"), "{}", first.tail());
    let count = history.prefix(&mut open(&second));
    assert!(count >= stored, "{count} of {stored} flushed writes are there");
}

/// Returns how long the store is away.
fn outage() -> Duration {
    let seconds = std::env::var("SPINDLE_TEST_OUTAGE_SECONDS").ok();
    Duration::from_secs(seconds.map_or(5, |text| text.parse().expect("a number")))
}

#[test]
fn writes_during_an_outage_arrive_when_it_ends() {
    for (seed, line) in
        seeds(1).into_iter().flat_map(|seed| [(seed, Line::Cut), (seed, Line::Silent)])
    {
        let mut server = Server::start();
        let proxy = Proxy::start(server.address()).expect("a proxy");
        let mut daemon = on(proxy.address());
        daemon.restart();
        // Failed attempts log warnings.
        daemon.announce("destage");
        daemon.announce("store");
        daemon.announce("slatedb");
        daemon.announce("object_store");
        let mut history = History::new(seed);
        let mut connections = open(&daemon);
        history.run_for(&mut connections, Duration::from_secs(1));
        // The log is empty, and its size is well above the few MiB that are written, first at once
        // and then little by little: so no writer has to wait.
        let _ = daemon.json(&["drain"]);
        proxy.set(line);
        let begun = Instant::now();
        for _ in 0..200 {
            assert!(history.write(&mut connections), "a write failed while the store was away");
        }
        connections[0].flush();
        let status = daemon.json(&["status"]);
        println!("at risk: {}", status["at_risk"]);
        let outage = outage();
        while begun.elapsed() < outage {
            assert!(history.write(&mut connections), "a write failed while the store was away");
            history.check_newest(&mut connections);
            std::thread::sleep(outage / 100);
        }
        println!("{} writes after {:?} without a store", history.writes.len(), begun.elapsed());
        server.down();
        server.up();
        assert!(history.write(&mut connections));
        proxy.set(Line::Open);
        let flushed = Instant::now();
        while !daemon.command(&["drain"]).status.success() {
            assert!(flushed.elapsed() < Duration::from_secs(150), "it does not come back");
            std::thread::sleep(Duration::from_millis(500));
        }
        println!("stored {:?} after the store came back", flushed.elapsed());
        history.run_for(&mut connections, Duration::from_millis(300));
        drop(connections);
        daemon.stop();
        let mut second = second(&daemon, proxy.address());
        second.restart();
        assert_eq!(history.prefix(&mut open(&second)), history.writes.len());
    }
}

/// Makes a daemon whose store went away with a write in the log; its status says so.
fn cut_off(bucket: &Bucket) -> (Proxy, Daemon) {
    let proxy = Proxy::start(bucket.address()).expect("a proxy");
    let mut daemon = on(proxy.address());
    for text in ["destage", "store", "slatedb", "segment", "given up", "connections", "at once"] {
        daemon.announce(text);
    }
    daemon.restart();
    let well = daemon.json(&["status"])["warnings"].to_string();
    assert!(!well.contains("store"), "{well}");
    proxy.set(Line::Cut);
    open(&daemon)[0].write(0, &[1; 4096], 0);
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let status = daemon.json(&["status"]);
        let warnings = status["warnings"].to_string();
        if warnings.contains("could not ask the store who owns the pool")
            && warnings.contains("could not upload to the store")
        {
            assert!(status["tier"]["upload_failure"].is_string(), "{status}");
            return (proxy, daemon);
        }
        assert!(Instant::now() < deadline, "status does not say that the store is away: {status}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn stop_ends_during_an_outage_while_flush_waits() {
    let bucket = Bucket::start(Care::Honest);
    let (proxy, mut daemon) = cut_off(&bucket);
    let mut flush = daemon.prepare(&["drain"]);
    let flush = flush.stderr(std::process::Stdio::piped()).spawn().expect("the program runs");
    // Connections are accepted in order: once a later status is answered, the flush has arrived.
    for _ in 0..3 {
        let _ = daemon.json(&["status"]);
    }
    daemon.ask_to_stop();
    let flushed = flush.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&flushed.stderr).into_owned();
    assert!(!flushed.status.success() && said.contains("daemon stopped"), "{said}");
    // Within the two minutes that the manual promises.
    daemon.finish_stop().unwrap_or_else(|error| panic!("{error}"));
    proxy.set(Line::Open);
    daemon.restart();
    assert_eq!(open(&daemon)[0].read(0, 4096), [1; 4096]);
    let _ = daemon.json(&["drain"]);
    let well = daemon.json(&["status"])["warnings"].to_string();
    assert!(!well.contains("the store"), "{well}");
    daemon.stop();
}

#[test]
fn a_second_signal_ends_a_stop_at_once_and_nothing_is_lost() {
    let bucket = Bucket::start(Care::Honest);
    let (proxy, mut daemon) = cut_off(&bucket);
    daemon.ask_to_stop();
    while !daemon.log().contains("stopping") {
        std::thread::sleep(Duration::from_millis(5));
    }
    daemon.ask_to_stop();
    assert_eq!(daemon.wait(Duration::from_secs(5)).code(), Some(3), "{}", daemon.tail());
    proxy.set(Line::Open);
    daemon.restart();
    assert_eq!(open(&daemon)[0].read(0, 4096), [1; 4096]);
    daemon.stop();
}

#[test]
fn writes_beyond_the_log_wait_without_an_error() {
    let server = Server::start();
    let proxy = Proxy::start(server.address()).expect("a proxy");
    let mut daemon = on(proxy.address());
    daemon.announce("destage");
    daemon.announce("store");
    daemon.announce("slatedb");
    daemon.announce("object_store");
    daemon.announce("full");
    daemon.restart();
    let mut history = History::new(1);
    let mut connections = open(&daemon);
    proxy.set(Line::Cut);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_secs(8));
            proxy.set(Line::Open);
        });
        // About three times the size of the log.
        for _ in 0..3000 {
            assert!(history.write(&mut connections), "write {} failed", history.writes.len());
        }
    });
    let elapsed = begun.elapsed();
    assert!(elapsed > Duration::from_secs(8), "48 MiB went into a log of 16 MiB in {elapsed:?}");
    assert_eq!(history.prefix(&mut connections), history.writes.len());
    drop(connections);
    daemon.stop();
    daemon.fsck();
}

#[test]
fn a_store_that_cannot_be_used_is_refused_with_the_reason() {
    let server = Server::start();
    let refusal = |changed: &[(&str, &str)], store: &str| {
        let mut daemon = Daemon::new(SMALL, VOLUMES);
        daemon.argue(&["--store", store]);
        let mut variables = environment(server.address());
        variables.retain(|(known, _)| changed.iter().all(|(name, _)| name != known));
        let kept = variables.iter().map(|(name, value)| (*name, value.as_str()));
        daemon.environ(&kept.chain(changed.iter().copied()).collect::<Vec<_>>());
        daemon.refuses_to_start().to_lowercase()
    };
    let store = format!("s3://{BUCKET}/p");
    let mut wrong = vec![("AWS_ACCESS_KEY_ID", "nobody")];
    if server.checks_signatures() {
        wrong.push(("AWS_SECRET_ACCESS_KEY", "not-the-secret"));
    }
    for credential in wrong {
        let said = refusal(&[credential], &store);
        assert!(said.contains("credentials") || said.contains("denied"), "{credential:?}: {said}");
    }
    let missing = refusal(&[], "s3://no-such-bucket/p");
    assert!(missing.contains("not found") && missing.contains("bucket"), "{missing}");
    let nobody = refusal(&[("AWS_ENDPOINT_URL", "http://127.0.0.1:9")], &store);
    assert!(nobody.contains("no answer") || nobody.contains("endpoint"), "{nobody}");
}

#[test]
fn store_without_safe_ownership_is_refused_with_the_reason() {
    for (care, reason) in [
        (Care::IgnoresConditions, "it let an object be created twice"),
        (Care::RefusesAndWrites, "a refused create changed the object all the same"),
        (Care::KnowsNoConditions, "create the probe object: not implemented"),
        (Care::ListsNothing, "a listing does not show an object just created"),
    ] {
        let bucket = Bucket::start(care);
        let mut daemon = on(bucket.address());
        daemon.announce("ERROR");
        let said = daemon.refuses_to_start();
        for part in [reason, "If-None-Match: *", "use another store", "disks/pools/one"] {
            assert!(said.contains(part), "{care:?}: no {part:?} in: {said}");
        }
        assert_eq!(bucket.keys(), [""; 0], "{care:?}: it left something behind");
    }
    // The same server with its conditions kept carries a pool, so the refusals are due to the
    // conditions.
    let bucket = Bucket::start(Care::Honest);
    let mut daemon = on(bucket.address());
    daemon.restart();
    let mut connections = open(&daemon);
    let mut history = History::new(4);
    history.run_for(&mut connections, Duration::from_secs(1));
    drop(connections);
    daemon.stop();
    daemon.fsck();
    daemon.restart();
    assert_eq!(history.prefix(&mut open(&daemon)), history.writes.len());
    daemon.stop();
}
