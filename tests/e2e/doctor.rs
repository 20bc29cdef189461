//! The doctor of a pool over data stores: its answers are compared with what happens when the stores are taken away.
//!
//! Invariants:
//! - No block is written twice, so no segment is reclaimed.
//! - While the doctor is asked and stores are taken away, no client writes, so the segments stay as they are.

use crate::copies::wait_for;
use crate::data_nodes::DataNodes;
use crate::data_stores::{Drives, failing, settings};
use crate::nodes::refused;
use crate::stores::{VOLUMES, open};
use serde_json::Value;
use tests::daemon::{Daemon, SMALL};
use tests::nbd::Connection;
use tests::nbd::wire::CMD_READ;
use tests::seed::{Random, seeds};

/// What the daemon says and shows while stores are away.
const EXPECTED: &[&str] = &[
    "a data store fails",
    "data-store-away",
    "could not upload to the store",
    "store-unavailable",
    "object-unreadable",
    "reading it once more",
    "could not carry out a request",
    "fragments-lacking",
];

/// Bytes of a volume of [`VOLUMES`].
const VOLUME_BYTES: usize = 16 << 20;
/// Bytes of a read and of a write, at most.
const READ_BYTES: u32 = 1 << 20;

fn doctor(daemon: &Daemon, what_if: &[String]) -> Value {
    let mut arguments = vec!["doctor"];
    what_if.iter().for_each(|stores| arguments.extend(["--what-if", stores.as_str()]));
    daemon.json(&arguments)
}

/// Bytes that could not be read without these stores, as the doctor says.
fn predicted(found: &Value) -> u64 {
    found["data"]["without"]["unavailable"]["bytes"].as_u64().expect("a count")
}

/// Bytes that cannot be read now, as the doctor says.
fn unreadable(found: &Value) -> u64 {
    let classes = found["data"]["now"]["survivals"].as_array().expect("a list");
    let bad = classes.iter().filter(|class| class["losses"].is_null());
    bad.map(|class| class["bytes"].as_u64().expect("a count")).sum()
}

/// Bytes that could not be read if one failure domain more failed, as the doctor says.
fn without_domain(outlook: &Value, domain: &str) -> u64 {
    let domains = outlook["domains"].as_array().expect("a list");
    let found = domains.iter().find(|one| one["domain"] == domain);
    found.expect("it is listed")["unavailable"]["bytes"].as_u64().expect("a count")
}

/// A volume of a pool, and what it must hold.
struct Volume {
    connection: Connection,
    expected: Vec<u8>,
}

impl Volume {
    fn open(daemon: &Daemon) -> Volume {
        let connection = open(daemon).remove(0);
        Volume { connection, expected: vec![0; VOLUME_BYTES] }
    }

    /// Writes bytes that do not compress, where nothing was written before, and moves them to the data stores.
    fn write(&mut self, daemon: &Daemon, offset: usize, length: usize, random: &mut Random) {
        let byte = |_| u8::try_from(random.below(256)).expect("a byte");
        let bytes: Vec<u8> = (0..length).map(byte).collect();
        for (index, part) in bytes.chunks(READ_BYTES as usize).enumerate() {
            let at = offset + index * READ_BYTES as usize;
            self.connection.write(at as u64, part, 0);
        }
        self.expected[offset..offset + length].copy_from_slice(&bytes);
        let _ = daemon.json(&["drain"]);
    }

    /// Lets the daemon read from the data stores what it has in memory since it was written or read.
    fn leave_memory(&mut self, daemon: &mut Daemon) {
        daemon.stop();
        daemon.restart();
        self.connection = open(daemon).remove(0);
    }

    /// Reads everything. Returns false if the daemon answers with an error.
    fn is_read(&mut self) -> bool {
        for (index, expected) in (0u64..).zip(self.expected.chunks(READ_BYTES as usize)) {
            let offset = index * u64::from(READ_BYTES);
            let reply = self.connection.call(CMD_READ, 0, offset, READ_BYTES, &[]);
            let reply = reply.expect("it is answered");
            if reply.error != 0 {
                return false;
            }
            assert!(reply.payload == expected, "other bytes at {offset}");
        }
        true
    }

    /// Reads everything with stores away; `back` brings them back. Reads must fail before exactly if `is_failing`.
    fn check(&mut self, daemon: &Daemon, is_failing: bool, back: impl FnOnce()) {
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| self.is_read());
            // Reads of an object that fails alone end with an error after a while, others wait for the stores.
            let mut is_waiting = false;
            wait_for("reads succeed or fail", || {
                let status = daemon.json(&["status"]);
                is_waiting = !reading.is_finished() && !status["tier"]["read_failure"].is_null();
                is_waiting || reading.is_finished()
            });
            if is_waiting {
                assert!(is_failing, "a read fails");
                back();
                let _ = reading.join().expect("the right bytes, or an error");
                return;
            }
            let is_read = reading.join().expect("the right bytes, or an error");
            assert_eq!(is_read, !is_failing);
            back();
        });
        wait_for("the stores are back", || failing(daemon) == 0);
        wait_for("everything is read", || self.is_read());
    }
}

/// Takes away each store and each pair of the four stores, and compares. Returns the number of pairs without which
/// something cannot be read.
fn compare(daemon: &mut Daemon, drives: &Drives, volume: &mut Volume) -> usize {
    let store = |number: usize| format!("store={}", drives.drive(number).display());
    let mut fatal_count = 0;
    for first in 0..4 {
        let one = doctor(daemon, &[store(first)]);
        assert_eq!((predicted(&one), unreadable(&one)), (0, 0), "any one may be lost: {one}");
        let outlook = &one["data"]["without"]["outlook"];
        assert_eq!((&outlook["writes"], &outlook["short"]["bytes"]), (&"whole".into(), &0.into()));
        assert_eq!(outlook["is_room_enough"], true, "{one}");
        for second in first + 1..4 {
            let pair = [store(first), store(second)];
            let found = doctor(daemon, &pair);
            let bytes = predicted(&found);
            let by_domain = format!("domain={}", drives.drive(second).display());
            assert_eq!(predicted(&doctor(daemon, &[pair[0].clone(), by_domain])), bytes);
            let domain = drives.drive(second).display().to_string();
            assert_eq!(without_domain(outlook, &domain), bytes, "{one} and {found}");
            assert_eq!(found["data"]["without"]["outlook"]["writes"], "lacking", "{found}");
            fatal_count += usize::from(bytes > 0);
            volume.leave_memory(daemon);
            drives.unmount(first);
            drives.unmount(second);
            let now = doctor(daemon, &[]);
            assert_eq!(unreadable(&now), bytes, "{now} and {found}");
            assert_eq!(now["data"]["troubled"].as_array().map(Vec::len), Some(2), "{now}");
            assert_eq!(
                now["data"]["now"]["survivals"],
                found["data"]["without"]["outlook"]["survivals"]
            );
            let summary = now["summary"].as_str().expect("a sentence");
            assert_eq!(summary.contains("CANNOT BE READ"), bytes > 0, "{summary}");
            volume.check(daemon, bytes > 0, || {
                drives.mount(first);
                drives.mount(second);
                let _ = doctor(daemon, &[]);
            });
        }
    }
    let three = doctor(daemon, &[store(0), store(1), store(2)]);
    assert_eq!(three["data"]["without"]["outlook"]["writes"], "waiting", "{three}");
    fatal_count
}

#[test]
fn what_if_says_what_happens_when_stores_are_taken_away() {
    for seed in seeds(1) {
        let drives = Drives::new(4);
        let mut daemon = Daemon::started(&settings("2+1", &drives.urls()), VOLUMES);
        EXPECTED.iter().for_each(|text| daemon.announce(text));
        let (mut random, mut volume) = (Random::new(seed, 3), Volume::open(&daemon));
        // A small segment, which is stored whole on two of the stores.
        volume.write(&daemon, 0, 64 << 10, &mut random);
        volume.leave_memory(&mut daemon);
        assert_eq!(compare(&mut daemon, &drives, &mut volume), 1, "pairs");
        // And larger ones, in fragments on three of them.
        volume.write(&daemon, 1 << 20, 4 << 20, &mut random);
        volume.leave_memory(&mut daemon);
        assert!(compare(&mut daemon, &drives, &mut volume) > 1, "pairs");
        let unknown = ["doctor", "--what-if", "store=/nowhere"];
        refused(&daemon.command(&unknown), 1, &drives.drive(2).display().to_string());
        refused(&daemon.command(&["doctor", "--what-if", "node=b"]), 1, "known are: none");
        let served = doctor(&daemon, &[]);
        let text = daemon.command(&["doctor"]);
        let text = String::from_utf8_lossy(&text.stdout).into_owned();
        assert!(
            text.contains("no data is at risk: everything survives the loss of any store"),
            "{text}"
        );
        // Space by tier, with the parity.
        let space = &served["data"]["space"];
        let bytes = |field: &str| space[field].as_u64().expect("a count");
        assert!(
            bytes("parity_bytes") > 0 && bytes("parity_bytes") <= bytes("data_bytes"),
            "{space}"
        );
        assert_eq!(
            (bytes("data_bytes"), bytes("object_bytes")),
            (bytes("coded_bytes"), 0),
            "{space}"
        );
        drop(volume);
        daemon.stop();
        let closed = doctor(&daemon, &[]);
        let counted = |found: &Value| {
            (found["data"]["space"].clone(), found["data"]["now"]["survivals"].clone())
        };
        assert!(counted(&closed).1.is_array(), "{closed}");
        assert_eq!(counted(&doctor(&daemon, &[])), counted(&closed), "nothing is changed");
        let _ = daemon.fsck();
    }
}

#[test]
fn what_if_without_data_nodes_is_what_happens_without_them() {
    for seed in seeds(1) {
        let mut all = DataNodes::start("2+1", 4, "");
        EXPECTED.iter().for_each(|text| all.owner.announce(text));
        let (mut random, mut volume) = (Random::new(seed, 3), Volume::open(&all.owner));
        volume.write(&all.owner, 0, 2 << 20, &mut random);
        let first = usize::try_from(random.below(4)).expect("small");
        let second = (first + 1) % 4;
        let nodes = [first, second].map(|number| format!("node=d{number}"));
        assert_eq!(predicted(&doctor(&all.owner, &nodes[..1])), 0);
        let found = doctor(&all.owner, &nodes);
        let bytes = predicted(&found);
        assert_eq!(found["data"]["without"]["outlook"]["room_unknown_count"], 0, "{found}");
        refused(
            &all.owner.command(&["doctor", "--what-if", "node=x"]),
            1,
            "known are: d0, d1, d2, d3",
        );
        [first, second].iter().for_each(|number| all.nodes[*number].kill());
        let now = doctor(&all.owner, &[]);
        assert_eq!(unreadable(&now), bytes, "{now} and {found}");
        let DataNodes { owner, nodes, .. } = &mut all;
        volume.check(owner, bytes > 0, || {
            [first, second].iter().for_each(|number| nodes[*number].restart());
            let _ = doctor(owner, &[]);
        });
        drop(volume);
        all.owner.stop();
        all.nodes.iter_mut().for_each(Daemon::stop);
    }
}

#[test]
fn doctor_of_a_pool_without_data_stores_says_so() {
    let mut daemon = Daemon::started(SMALL, VOLUMES);
    let found = doctor(&daemon, &[]);
    assert!(found["data"].is_null(), "{found}");
    assert!(
        found["summary"].as_str().is_some_and(|text| text.contains("are objects of the store"))
    );
    refused(&daemon.command(&["doctor", "--what-if", "node=b"]), 1, "it has none");
    refused(&daemon.command(&["doctor", "--what-if", "b"]), 2, "node=NAME");
    daemon.stop();
}
