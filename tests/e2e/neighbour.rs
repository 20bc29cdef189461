//! One volume of a pool cannot be destaged: its neighbour is not slowed and loses nothing.
//!
//! Invariants:
//! - Two pools are measured in turn, one with a damaged volume and one without. Each is stopped
//!   while the other is measured, so other load of the machine affects both.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};
use tests::daemon::Daemon;
use tests::nbd::wire::*;
use tests::nbd::{Connection, Wanted};
use tests::seed::{Random, seeds};
use tests::stamp::{Stamp, stamped};

const SETTINGS: &str = "memory = \"416MiB\"\n\
    [log]\nsize = \"64MiB\"\nfile_size = \"8MiB\"\n\
    [cache]\nsize = \"0\"\n[memory_cache]\nsize = \"0\"\n\
    [destage]\nmax_age = \"1s\"\nsegment_size = \"1MiB\"\n";
const BAD_BYTES: u64 = 8 << 20;
const GOOD_BYTES: u64 = 64 << 20;
/// Writes per second: a load that the daemon handles with ease, so that delay is measured and not
/// throughput.
const GOOD_PER_SECOND: u64 = 1500;
const BAD_PER_SECOND: u64 = 400;
/// Number of measurements of each pool, and their length.
const SLICE_COUNT: usize = 9;
const SLICE: Duration = Duration::from_millis(1200);
/// The neighbour's p99 may exceed the undisturbed one by this factor and a slack. The slack is two
/// wake-ups of a scheduler whose tick is 1 ms to 4 ms, on a shared machine.
const PERCENT_MAX: u32 = 120;
const SLACK: Duration = Duration::from_millis(2);

/// A pool with its load: two connections, and the writes that were answered on them.
struct Pool {
    daemon: Daemon,
    run: u64,
    random: Random,
    sequence: u64,
    /// The newest answered write, by block of the good volume and by sector of the bad one.
    good: BTreeMap<u64, u64>,
    bad: BTreeMap<u64, u64>,
    p99s: Vec<Duration>,
}

fn connect(daemon: &Daemon, volume: &str) -> Connection {
    Connection::open(&daemon.unix(volume), &Wanted::default()).expect("it opens")
}

fn rot(dir: &Path) -> usize {
    let mut count = 0;
    for entry in std::fs::read_dir(dir).expect("a readable directory") {
        let path = entry.expect("a readable entry").path();
        if path.is_dir() {
            count += rot(&path);
        } else {
            let mut bytes = std::fs::read(&path).expect("a readable file");
            // The header stays valid, so that the frames of the volume fail to verify.
            bytes.iter_mut().skip(200).step_by(64).for_each(|byte| *byte ^= 1);
            std::fs::write(&path, bytes).expect("a writable file");
            count += 1;
        }
    }
    count
}

impl Pool {
    /// Makes a pool whose bad volume is in the store, in segments that hold no other data.
    fn new(seed: u64, is_damaged: bool) -> Pool {
        let mut daemon = Daemon::started(SETTINGS, &[("bad", "8MiB"), ("good", "64MiB")]);
        let mut connection = connect(&daemon, "bad");
        for start in (0..BAD_BYTES).step_by(256 << 10) {
            let stamp = Stamp { volume: 1, sector: start / 512, sequence: 1 };
            connection.write(start, &stamped(seed, stamp, 512), 0);
        }
        connection.disconnect().expect("it closes");
        daemon.stop();
        if is_damaged {
            assert!(rot(&daemon.dir().join("store/segments")) > 0, "no segment to damage");
            daemon.announce("cannot be destaged");
            daemon.announce("verify");
        }
        daemon.restart();
        let random = Random::new(seed, u64::from(is_damaged));
        let (good, bad) = (BTreeMap::new(), BTreeMap::new());
        Pool { daemon, run: seed, random, sequence: 1, good, bad, p99s: Vec::new() }
    }

    /// Writes to both volumes for a while; returns the latencies of the good one.
    fn slice(&mut self, time: Duration) -> Vec<Duration> {
        let (run, first) = (self.run, self.sequence);
        let good_random = Random::new(self.random.bits(), 1);
        let bad_random = Random::new(self.random.bits(), 2);
        let mut good = connect(&self.daemon, "good");
        let mut bad = connect(&self.daemon, "bad");
        let (good_writes, bad_writes) = std::thread::scope(|scope| {
            // Writes one sector of a block, so that destage reads the others from the store.
            let bad = scope.spawn(move || {
                let spread = Load { volume: 1, places: BAD_BYTES / 512, unit: 512, run, first };
                load(&mut bad, spread, BAD_PER_SECOND, time, bad_random)
            });
            let spread = Load { volume: 0, places: GOOD_BYTES / 4096, unit: 4096, run, first };
            let good = load(&mut good, spread, GOOD_PER_SECOND, time, good_random);
            (good, bad.join().expect("no panic"))
        });
        let count = good_writes.len().max(bad_writes.len());
        self.sequence += u64::try_from(count).expect("fits");
        for write in &bad_writes {
            // A write may be refused for lack of room; only answered writes count.
            if write.error == 0 {
                self.bad.insert(write.place, write.sequence);
            } else {
                self.bad.remove(&write.place);
            }
        }
        for write in &good_writes {
            assert_eq!(write.error, 0, "the neighbour's write was refused");
            self.good.insert(write.place, write.sequence);
        }
        good_writes.iter().map(|write| write.took).collect()
    }

    /// Insists that every answered write is present.
    fn check(&self) {
        let mut good = connect(&self.daemon, "good");
        for (place, sequence) in &self.good {
            let stamp = Stamp { volume: 0, sector: place * 8, sequence: *sequence };
            let found = good.read(place * 4096, 4096);
            assert!(found == stamped(self.run, stamp, 8), "block {place} of the neighbour");
        }
        let mut bad = connect(&self.daemon, "bad");
        for (place, sequence) in &self.bad {
            let stamp = Stamp { volume: 1, sector: *place, sequence: *sequence };
            let found = bad.read(place * 512, 512);
            assert!(found == stamped(self.run, stamp, 1), "sector {place} of the bad volume");
        }
    }
}

#[derive(Clone, Copy)]
struct Load {
    volume: u8,
    places: u64,
    unit: u64,
    run: u64,
    first: u64,
}

struct Written {
    place: u64,
    sequence: u64,
    error: u32,
    took: Duration,
}

/// Sends one write after the other, at random places, each at its scheduled time; a late one starts
/// at once.
fn load(
    connection: &mut Connection,
    load: Load,
    per_second: u64,
    time: Duration,
    mut random: Random,
) -> Vec<Written> {
    let (begun, pause) =
        (Instant::now(), Duration::from_secs(1) / u32::try_from(per_second).expect("small"));
    let mut written = Vec::new();
    let mut due = begun;
    while due < begun + time {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let started = Instant::now();
        let place = random.below(load.places);
        let sequence = load.first + 1 + u64::try_from(written.len()).expect("fits");
        let stamp = Stamp { volume: load.volume, sector: place * (load.unit / 512), sequence };
        let payload = stamped(load.run, stamp, usize::try_from(load.unit / 512).expect("small"));
        let length = u32::try_from(load.unit).expect("small");
        let reply = connection.call(CMD_WRITE, 0, place * load.unit, length, &payload);
        let error = reply.expect("a reply").error;
        written.push(Written { place, sequence, error, took: started.elapsed() });
        due = (due + pause).max(started);
    }
    written
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn p99(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() * 99 / 100]
}

#[test]
fn a_volume_that_cannot_be_destaged_neither_slows_nor_harms_its_neighbour() {
    for seed in seeds(1) {
        println!("SEED={seed}");
        let mut pools = [Pool::new(seed, false), Pool::new(seed, true)];
        for pool in &mut pools {
            // Before anything is measured, the damage takes effect and the first windows are
            // destaged.
            pool.slice(SLICE * 3);
        }
        for pool in &pools {
            pool.daemon.pause();
        }
        let mut random = Random::new(seed, 8);
        for _ in 0..SLICE_COUNT {
            let first = usize::try_from(random.below(2)).expect("small");
            for index in [first, 1 - first] {
                let pool = &mut pools[index];
                pool.daemon.resume();
                let took = pool.slice(SLICE);
                pool.p99s.push(p99(took));
                pool.daemon.pause();
            }
        }
        for pool in &pools {
            pool.daemon.resume();
        }
        let status = pools[1].daemon.json(&["status"]).to_string();
        assert!(
            status.contains("cannot be destaged"),
            "the damaged volume is not set aside: {status}"
        );
        let [calm, disturbed] = [0, 1].map(|index| median(pools[index].p99s.clone()));
        println!("p99 of 4 KiB writes: {calm:?} undisturbed, {disturbed:?} beside the bad volume");
        println!("{:?}\n{:?}", pools[0].p99s, pools[1].p99s);
        pools[1].daemon.kill();
        pools[1].daemon.restart();
        pools[1].check();
        let limit = calm * PERCENT_MAX / 100 + SLACK;
        assert!(disturbed <= limit, "SEED={seed}: {disturbed:?} is more than {limit:?}");
        // The pool holds data that cannot be destaged, for which an orderly stop would wait in
        // vain.
        pools[1].daemon.kill();
    }
}
