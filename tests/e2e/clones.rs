//! Clones and rollbacks from the user's side: over NBD, with the daemon killed and restarted,
//! against a model of every volume and every snapshot.

use crate::mounted::number_of;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tests::daemon::{Daemon, SMALL};
use tests::nbd::{Connection, Wanted};
use tests::seed::{Random, seeds};

const BLOCK: usize = 4096;
const BLOCKS: usize = 2048;

/// The number in each block of a volume.
type Held = Vec<u64>;

fn connect(daemon: &Daemon, export: &str) -> Connection {
    Connection::open(&daemon.tcp(export), &Wanted::everything()).expect("it opens")
}

fn read(daemon: &Daemon, export: &str) -> Held {
    let mut connection = connect(daemon, export);
    let mut held = Vec::with_capacity(BLOCKS);
    let part_bytes = (64 * BLOCK) as u32;
    for part in 0..BLOCKS / 64 {
        let bytes = connection.read((part * 64 * BLOCK) as u64, part_bytes);
        for block in bytes.chunks(BLOCK) {
            let (words, _) = block.as_chunks::<8>();
            assert!(words.iter().all(|word| *word == words[0]), "a torn block of {export}");
            held.push(u64::from_le_bytes(words[0]));
        }
    }
    connection.disconnect().expect("it ends");
    held
}

/// Runs the command once the server has noticed that clients have left.
fn soon(daemon: &Daemon, arguments: &[&str]) {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let output = daemon.command(arguments);
        if output.status.success() {
            return;
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let is_busy = said.contains("a client has it open");
        assert!(is_busy && Instant::now() < deadline, "{arguments:?}: {said}");
    }
}

fn refused(daemon: &Daemon, arguments: &[&str], words: &str) {
    let output = daemon.command(arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{arguments:?} is accepted");
    assert!(said.contains(words), "{arguments:?}: {said}");
}

struct World {
    daemon: Daemon,
    random: Random,
    volumes: BTreeMap<String, Held>,
    /// By volume and snapshot name.
    snapshots: BTreeMap<(String, String), Held>,
    /// The snapshot from which each clone was made; it cannot be removed.
    made_from: BTreeMap<String, (String, String)>,
    counter: u64,
}

impl World {
    fn new(seed: u64) -> World {
        let daemon = Daemon::started(SMALL, &[("v0", "8MiB")]);
        let volumes = [("v0".to_owned(), vec![0; BLOCKS])].into();
        let (snapshots, made_from) = (BTreeMap::new(), BTreeMap::new());
        World { daemon, random: Random::new(seed, 3), volumes, snapshots, made_from, counter: 0 }
    }

    fn next(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    fn any_volume(&mut self) -> String {
        let index = self.random.below(self.volumes.len() as u64) as usize;
        self.volumes.keys().nth(index).expect("one stays").clone()
    }

    fn any_snapshot(&mut self) -> Option<(String, String)> {
        let count = self.snapshots.len() as u64;
        let index = if count == 0 { return None } else { self.random.below(count) as usize };
        self.snapshots.keys().nth(index).cloned()
    }

    /// Makes some writes and trims on one volume.
    fn write(&mut self) {
        let name = self.any_volume();
        let mut connection = connect(&self.daemon, &name);
        for _ in 0..1 + self.random.below(12) {
            let first = self.random.below(BLOCKS as u64 - 200) as usize;
            let count_max = if self.random.chance(20) { 200 } else { 8 };
            let count = 1 + self.random.below(count_max) as usize;
            let is_trim = self.random.chance(15);
            let value = if is_trim { 0 } else { self.next() };
            let (offset, length) = ((first * BLOCK) as u64, count * BLOCK);
            match is_trim {
                true => connection.trim(offset, length as u32),
                false => connection.write(offset, &value.to_le_bytes().repeat(length / 8), 0),
            }
            let held = self.volumes.get_mut(&name).expect("it is there");
            held[first..first + count].fill(value);
        }
        connection.disconnect().expect("it ends");
    }

    fn snapshot(&mut self) {
        let (volume, name) = (self.any_volume(), format!("s{}", self.next()));
        let _ = self.daemon.json(&["snapshot", "create", &format!("{volume}@{name}")]);
        let held = self.volumes[&volume].clone();
        self.snapshots.insert((volume, name), held);
    }

    fn clone_one(&mut self) {
        let Some(of) = self.any_snapshot().filter(|_| self.volumes.len() < 6) else { return };
        let name = format!("v{}", self.next());
        let begun = Instant::now();
        let made = self.daemon.json(&["clone", &format!("{}@{}", of.0, of.1), &name]);
        println!("{name} from {of:?} took {:?}", begun.elapsed());
        assert_eq!(made["origin"], format!("{}@{}", of.0, of.1));
        self.volumes.insert(name.clone(), self.snapshots[&of].clone());
        self.made_from.insert(name, of);
    }

    fn roll_back(&mut self) {
        let Some((volume, name)) = self.any_snapshot() else { return };
        if self.volumes.contains_key(&volume) {
            soon(&self.daemon, &["snapshot", "rollback", &format!("{volume}@{name}")]);
            self.made_from.remove(&volume);
            let held = self.snapshots[&(volume.clone(), name)].clone();
            self.volumes.insert(volume, held);
        }
    }

    fn promote(&mut self) {
        let names: Vec<String> = self.made_from.keys().cloned().collect();
        let Some(name) = names.first() else { return };
        soon(&self.daemon, &["volume", "promote", name]);
        wait_independent(&self.daemon, name);
        self.made_from.remove(name);
    }

    /// Removes a snapshot, or a volume without snapshots.
    fn remove(&mut self) {
        if let Some(of) = self.any_snapshot() {
            let name = format!("{}@{}", of.0, of.1);
            if self.made_from.values().any(|from| *from == of) {
                return refused(&self.daemon, &["snapshot", "rm", &name], "clones depend on it");
            }
            soon(&self.daemon, &["snapshot", "rm", &name]);
            self.snapshots.remove(&of);
        }
        let volume = self.any_volume();
        if self.volumes.len() > 2 && !self.snapshots.keys().any(|(of, _)| *of == volume) {
            let _ = self.daemon.json(&["volume", "rm", &volume, "--now"]);
            self.volumes.remove(&volume);
            self.made_from.remove(&volume);
        }
    }

    fn restart(&mut self) {
        match self.random.below(3) {
            0 => self.daemon.stop(),
            1 => {
                let _ = self.daemon.json(&["drain"]);
                self.daemon.kill();
            }
            _ => self.daemon.kill(),
        }
        self.daemon.restart();
        self.check();
    }

    fn check(&self) {
        for (name, held) in &self.volumes {
            assert!(read(&self.daemon, name) == *held, "volume {name} has changed");
        }
        for ((volume, name), held) in &self.snapshots {
            let export = format!("{volume}@{name}");
            assert!(read(&self.daemon, &export) == *held, "snapshot {export} has changed");
        }
    }
}

fn wait_independent(daemon: &Daemon, name: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while daemon.json(&["volume", "show", name]).get("origin").is_some() {
        assert!(Instant::now() < deadline, "volume {name} is not made independent");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn clones_and_rollbacks_survive_kills_of_the_daemon() {
    for seed in seeds(number_of("SPINDLE_TEST_CLONE_RUNS", 1)) {
        println!("SEED={seed}");
        let mut world = World::new(seed);
        for _ in 0..90 {
            match world.random.below(20) {
                0..=7 => world.write(),
                8..=10 => world.snapshot(),
                11..=13 => world.clone_one(),
                14 | 15 => world.roll_back(),
                16 => world.promote(),
                17 | 18 => world.remove(),
                _ => world.restart(),
            }
        }
        world.check();
        world.restart();
        world.daemon.stop();
        world.daemon.fsck();
    }
}

#[test]
fn a_clone_is_a_volume_of_its_own_and_its_origin_is_kept() {
    let mut daemon = Daemon::started(SMALL, &[("db", "8MiB"), ("other", "8MiB")]);
    let mut db = connect(&daemon, "db");
    db.write(0, &[7; 1 << 20], 0);
    let _ = daemon.json(&["snapshot", "create", "db@monday"]);
    db.write(0, &[8; 4096], 0);
    let made = daemon.json(&["clone", "db@monday", "test", "--ttl", "1h"]);
    assert_eq!((&made["origin"], &made["size_bytes"]), (&"db@monday".into(), &(8 << 20).into()));
    assert!(made["expires_at"].as_u64().is_some_and(|at| at > 0), "{made}");
    let mut test = connect(&daemon, "test");
    assert!(test.read(0, 1 << 20) == vec![7; 1 << 20]);
    test.write(4096, &[9; 4096], 0);
    assert!(db.read(0, 8192) == [vec![8; 4096], vec![7; 4096]].concat());
    assert!(test.read(0, 8192) == [vec![7; 4096], vec![9; 4096]].concat());

    refused(&daemon, &["clone", "db@monday", "test"], "it exists");
    refused(&daemon, &["clone", "db@tuesday", "x"], "find snapshot db@tuesday");
    refused(&daemon, &["clone", "db,other@monday", "x"], "is of one volume");
    refused(&daemon, &["clone", "db", "x"], "write VOLUME@NAME");
    refused(&daemon, &["clone", "db@monday", "a/b"], "a/b");
    refused(&daemon, &["clone", "db@monday", "x", "--ttl", "soon"], "ttl");
    refused(&daemon, &["snapshot", "rm", "db@monday"], "clones depend on it (test)");
    refused(&daemon, &["volume", "rm", "db"], "db@monday");
    refused(&daemon, &["volume", "promote", "db"], "depends on no snapshot");
    refused(&daemon, &["volume", "rename", "test", "db"], "it exists");
    refused(&daemon, &["volume", "rename", "db", "new"], "the configuration names it");
    refused(&daemon, &["volume", "rename", "test", "new"], "a client has it open");
    refused(&daemon, &["snapshot", "rollback", "db@monday"], "a client has it open");
    drop(db);
    soon(&daemon, &["snapshot", "rollback", "db@monday"]);
    let mut db = connect(&daemon, "db");
    assert!(db.read(0, 1 << 20) == vec![7; 1 << 20]);
    drop((db, test));

    // A removed clone can be restored, so it still depends on the snapshot.
    let _ = daemon.json(&["volume", "rm", "test"]);
    refused(&daemon, &["snapshot", "rm", "db@monday"], "test (removed, restorable)");
    let _ = daemon.json(&["volume", "restore", "test"]);
    soon(&daemon, &["volume", "rename", "test", "kept"]);
    refused(&daemon, &["volume", "show", "test"], "there is none");
    daemon.kill();
    daemon.restart();
    assert!(connect(&daemon, "kept").read(0, 8192) == [vec![7; 4096], vec![9; 4096]].concat());
    let _ = daemon.json(&["volume", "promote", "kept"]);
    wait_independent(&daemon, "kept");
    wait_independent(&daemon, "db");
    soon(&daemon, &["snapshot", "rm", "db@monday"]);
    soon(&daemon, &["volume", "rm", "db", "--now"]);
    let _ = daemon.json(&["drain"]);
    daemon.kill();
    daemon.restart();
    let want = [vec![7; 4096], vec![9; 4096], vec![7; (1 << 20) - 8192]].concat();
    assert!(connect(&daemon, "kept").read(0, 1 << 20) == want);
    daemon.stop();
    daemon.fsck();
    // The same without a daemon.
    let _ = daemon.json(&["snapshot", "create", "kept@offline"]);
    let _ = daemon.json(&["clone", "kept@offline", "again"]);
    let _ = daemon.json(&["snapshot", "rollback", "kept@offline"]);
    daemon.restart();
    assert!(connect(&daemon, "again").read(0, 1 << 20) == want);
    daemon.stop();
}
