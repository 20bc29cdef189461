//! Snapshots from the user's side: made under load, read over NBD and removed, over restarts and
//! deaths of the daemon.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tests::daemon::{Daemon, SMALL};
use tests::nbd::wire::*;
use tests::nbd::{Connection, Wanted};

const BLOCK: u64 = 4096;
/// Number of blocks of a volume that the writers use.
const BLOCKS: u64 = 2048;

fn connect(daemon: &Daemon, export: &str) -> Connection {
    Connection::open(&daemon.tcp(export), &Wanted::everything()).expect("it opens")
}

/// Insists that a command is refused with this text in its message.
fn refused(daemon: &Daemon, arguments: &[&str], words: &str) {
    let output = daemon.command(arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{arguments:?} is accepted");
    assert!(said.contains(words), "{arguments:?}: {said}");
}

fn number(block: &[u8]) -> u64 {
    let (words, rest) = block.as_chunks::<8>();
    assert!(rest.is_empty() && words.iter().all(|word| *word == words[0]), "a torn block");
    u64::from_le_bytes(words[0])
}

/// Writers that count up, each in its own block of two volumes: first in `a`, and once that is
/// answered in `b`. At every moment a block of `b` is equal to the one of `a`, or one lower.
struct Counting {
    is_over: AtomicBool,
    /// Highest number answered for `b`, by block.
    answered: Vec<AtomicU64>,
    longest: Mutex<Duration>,
}

impl Counting {
    fn new() -> Counting {
        Counting {
            is_over: AtomicBool::new(false),
            answered: (0..BLOCKS).map(|_| AtomicU64::new(0)).collect(),
            longest: Mutex::default(),
        }
    }

    fn run(&self, (mut a, mut b): (Connection, Connection), writer: u64, writers: u64) {
        let mut random = tests::seed::Random::new(writer, 77);
        let mut longest = Duration::ZERO;
        while !self.is_over.load(Ordering::Relaxed) {
            let block = random.below(BLOCKS / writers) * writers + writer;
            let next = self.answered[block as usize].load(Ordering::Relaxed) + 1;
            let payload = next.to_le_bytes().repeat(BLOCK as usize / 8);
            let begun = Instant::now();
            a.write(block * BLOCK, &payload, 0);
            longest = longest.max(begun.elapsed());
            b.write(block * BLOCK, &payload, 0);
            self.answered[block as usize].store(next, Ordering::SeqCst);
        }
        let mut all = self.longest.lock().expect("no panic holds it");
        *all = all.max(longest);
    }
}

/// Returns the numbers of both volumes at a snapshot.
fn read_pair(daemon: &Daemon, name: &str) -> Vec<(u64, u64)> {
    let read = |volume: &str| -> Vec<u64> {
        let mut connection = connect(daemon, &format!("{volume}@{name}"));
        let mut numbers = Vec::new();
        for part in 0..BLOCKS / 64 {
            let bytes = connection.read(part * 64 * BLOCK, 64 * BLOCK as u32);
            numbers.extend(bytes.chunks(BLOCK as usize).map(number));
        }
        numbers
    };
    read("a").into_iter().zip(read("b")).collect()
}

#[test]
fn snapshots_of_two_volumes_are_of_one_instant_and_stay_so() {
    let volumes = [("a", "16MiB"), ("b", "16MiB")];
    let mut daemon = Daemon::started(SMALL, &volumes);
    let mut shown = Vec::new();
    for round in 0..3 {
        let counting = Counting::new();
        if round > 0 {
            // The volumes keep their contents, so the counters start again from zeroes.
            let (mut a, mut b) = (connect(&daemon, "a"), connect(&daemon, "b"));
            let zeroes = vec![0; (BLOCKS * BLOCK) as usize / 8];
            for part in 0..8 {
                a.write(part * BLOCKS * BLOCK / 8, &zeroes, 0);
                b.write(part * BLOCKS * BLOCK / 8, &zeroes, 0);
            }
        }
        std::thread::scope(|scope| {
            for writer in 0..3 {
                let connections = (connect(&daemon, "a"), connect(&daemon, "b"));
                let counting = &counting;
                scope.spawn(move || counting.run(connections, writer, 3));
            }
            for index in 0..6 {
                std::thread::sleep(Duration::from_millis(250));
                let name = format!("s{round}-{index}");
                let before: Vec<u64> = counting
                    .answered
                    .iter()
                    .map(|answered| answered.load(Ordering::SeqCst))
                    .collect();
                let begun = Instant::now();
                let made = daemon.json(&["snapshot", "create", &format!("a,b@{name}")]);
                let took = begun.elapsed();
                let list = made["snapshots"].as_array().expect("a list");
                assert_eq!(list.len(), 2);
                assert_eq!(list[0]["lsn"], list[1]["lsn"], "one instant");
                println!("{name}: {took:?} with the command");
                let after: Vec<u64> = counting
                    .answered
                    .iter()
                    .map(|answered| answered.load(Ordering::SeqCst))
                    .collect();
                let pairs = read_pair(&daemon, &name);
                for (block, (a, b)) in pairs.iter().enumerate() {
                    let (low, high) = (before[block], after[block] + 1);
                    assert!(*b >= low && *a <= high, "{name}, block {block}: {low} {a} {b} {high}");
                    assert!(*a == *b || *a == *b + 1, "{name}, block {block}: {a} and {b}");
                }
                shown.push((name, pairs));
            }
            counting.is_over.store(true, Ordering::Relaxed);
        });
        println!("round {round}: the longest write took {:?}", counting.longest.lock().unwrap());
        match round {
            0 => daemon.kill(),
            1 => {
                let _ = daemon.json(&["drain"]);
                daemon.kill();
            }
            _ => daemon.stop(),
        }
        daemon.restart();
        for (name, pairs) in &shown {
            assert!(read_pair(&daemon, name) == *pairs, "{name} has changed");
        }
        let listed = daemon.json(&["snapshot", "list", "a"]);
        assert_eq!(listed["snapshots"].as_array().expect("a list").len(), shown.len());
    }
    // Snapshots are removed one after the other, and the remaining ones do not change.
    while shown.len() > 2 {
        let (name, _) = shown.remove(shown.len() / 2);
        for volume in ["a", "b"] {
            let _ = daemon.json(&["snapshot", "rm", &format!("{volume}@{name}")]);
        }
        if shown.len() % 5 == 0 {
            let _ = daemon.json(&["drain"]);
        }
    }
    daemon.kill();
    daemon.restart();
    for (name, pairs) in &shown {
        assert!(read_pair(&daemon, name) == *pairs, "{name} has changed");
    }
    daemon.stop();
    daemon.fsck();
}

#[test]
fn a_snapshot_is_not_written_and_not_lost_by_mistake() {
    let mut daemon = Daemon::started(SMALL, &[("db", "32MiB"), ("other", "8MiB")]);
    let mut db = connect(&daemon, "db");
    let old = vec![7; 1 << 20];
    db.write(1 << 20, &old, 0);
    let made = daemon.json(&["snapshot", "create", "db@monday"]);
    assert_eq!(made["snapshots"][0]["size_bytes"], 32 << 20);
    db.write(1 << 20, &vec![8; 1 << 20], 0);
    let discarded = db.call(CMD_TRIM, 0, 0, 8 << 20, &[]).expect("an answer");
    assert_eq!(discarded.error, 0);

    let mut view = connect(&daemon, "db@monday");
    let written = view.call(CMD_WRITE, 0, 0, 4096, &[1; 4096]).expect("an answer");
    assert_eq!(written.error, EPERM);
    assert!(view.read(1 << 20, 1 << 20) == old);
    refused(&daemon, &["snapshot", "rm", "db@monday"], "a client has it open");
    refused(&daemon, &["snapshot", "create", "db@monday"], "it exists");
    refused(&daemon, &["snapshot", "create", "other,nothing@monday"], "find volume nothing");
    refused(&daemon, &["snapshot", "create", "db@-x"], "check name");
    refused(&daemon, &["snapshot", "create", "db"], "write VOLUME@NAME");
    refused(&daemon, &["snapshot", "rm", "db@tuesday"], "find snapshot db@tuesday");
    refused(&daemon, &["snapshot", "rm", "db,other@monday"], "is of one volume");
    refused(&daemon, &["snapshot", "list", "nothing"], "find volume nothing");
    refused(&daemon, &["volume", "rm", "db"], "db@monday");
    refused(&daemon, &["volume", "rm", "db", "--now"], "db@monday");
    refused(&daemon, &["volume", "create", "db@x", "1MiB"], "volume");

    // The snapshot keeps its size and contents when the volume shrinks, and is available without a
    // daemon.
    let _ = daemon.json(&["volume", "resize", "db", "1MiB", "--shrink"]);
    assert!(view.read(1 << 20, 1 << 20) == old);
    // `diff` names the changes, with a daemon and without one.
    let _ = daemon.json(&["snapshot", "create", "db@tuesday"]);
    let found = daemon.json(&["snapshot", "diff", "db@monday", "db@tuesday"]);
    let gone = serde_json::json!([{"offset": 1 << 20, "length": 1 << 20, "is_hole": true}]);
    assert_eq!(found["extents"], gone, "{found}");
    db.write(0, &[5; 8192], 0);
    let _ = daemon.json(&["snapshot", "create", "db@wednesday"]);
    refused(&daemon, &["snapshot", "diff", "db@tuesday", "db@monday"], "an older and a newer");
    drop((db, view));
    daemon.stop();
    let found = daemon.json(&["snapshot", "diff", "db@tuesday", "db@wednesday"]);
    let new = serde_json::json!([{"offset": 0, "length": 8192, "is_hole": false}]);
    assert_eq!(found["extents"], new, "{found}");
    let listed = daemon.json(&["snapshot", "list"]);
    assert_eq!(listed["snapshots"][0]["name"], "monday");
    let _ = daemon.json(&["snapshot", "create", "db,other@offline"]);
    daemon.restart();
    let mut view = connect(&daemon, "db@monday");
    assert!(view.read(1 << 20, 1 << 20) == old);
    drop(view);
    for name in ["db@monday", "db@tuesday", "db@wednesday", "db@offline", "other@offline"] {
        removed_soon(&daemon, name);
    }
    let _ = daemon.json(&["volume", "rm", "db", "--now"]);
    daemon.stop();
    daemon.fsck();
}

#[test]
fn schedule_makes_snapshots_and_announces_removals_beforehand() {
    let mut daemon = Daemon::started(SMALL, &[("db", "8MiB"), ("wal", "8MiB"), ("other", "8MiB")]);
    refused(&daemon, &["snapshot", "schedule", "db", "hourly"], "like \"0 * * * *\"");
    refused(&daemon, &["snapshot", "schedule", "db", "@daily", "--daily", "0"], "at least one");
    refused(&daemon, &["snapshot", "schedule", "nothing", "@daily"], "find volume nothing");
    refused(&daemon, &["snapshot", "create", "db@auto-mine"], "those of schedules");
    let none = daemon.json(&["snapshot", "schedule", "db"]);
    assert!(none.get("cron").is_none(), "{none}");
    for volume in ["db", "wal"] {
        let set = daemon.json(&["snapshot", "schedule", volume, "* * * * *", "--hourly", "2"]);
        assert_eq!(set["keep"]["hourly"], 2);
        assert!(set["next_at"].as_u64().is_some_and(|at| at % 60 == 0), "{set}");
    }
    // The snapshot is made at the next full minute, even after a death of the daemon.
    daemon.kill();
    daemon.restart();
    let deadline = Instant::now() + Duration::from_secs(90);
    let made = loop {
        let listed = daemon.json(&["snapshot", "list"]);
        let list = listed["snapshots"].as_array().expect("a list").clone();
        if list.len() == 2 {
            break list;
        }
        assert!(list.is_empty(), "one of two: {listed}");
        assert!(Instant::now() < deadline, "no snapshot was made");
        std::thread::sleep(Duration::from_millis(200));
    };
    assert_eq!(made[0]["lsn"], made[1]["lsn"], "one instant");
    assert!(made[0]["name"].as_str().is_some_and(|name| name.starts_with("auto-")), "{made:?}");
    let plan = daemon.json(&["snapshot", "schedule", "db"]);
    assert!(plan["snapshots"][0].get("kept_as").is_some() || plan["next_at"].is_u64(), "{plan}");
    let off = daemon.json(&["snapshot", "schedule", "db", "--off"]);
    assert_eq!(off["snapshots"].as_array().expect("a list").len(), 1, "it stays");
    daemon.stop();
}

/// Removes a snapshot; the server notices only a moment later that a client has left.
fn removed_soon(daemon: &Daemon, name: &str) {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let output = daemon.command(&["snapshot", "rm", name]);
        if output.status.success() {
            return;
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("a client has it open") && Instant::now() < deadline, "{said}");
    }
}
