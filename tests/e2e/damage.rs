//! Damaged bytes at rest are found, named, and never returned as data.
//!
//! Invariants:
//! - A read of damaged data fails or returns the written data; nothing else is accepted.

use std::path::{Path, PathBuf};
use std::time::Duration;
use tests::daemon::{Daemon, SMALL};
use tests::nbd::wire::*;
use tests::nbd::{Connection, Wanted};
use tests::place::run;
use tests::seed::{Random, seeds};
use tests::stamp::{Stamp, stamped};

const RUN: u64 = 77;
const BYTES: u64 = 8 << 20;

/// Returns settings without caches between the client and the damage.
fn uncached() -> String {
    SMALL
        .replace("[cache]\nsize = \"64MiB\"", "[cache]\nsize = \"0\"\n[memory_cache]\nsize = \"0\"")
}

fn payload(sequence: u64, start: u64, bytes: u64) -> Vec<u8> {
    let stamp = Stamp { volume: 0, sector: start / 512, sequence };
    stamped(RUN, stamp, usize::try_from(bytes / 512).expect("small"))
}

fn fill(daemon: &Daemon) {
    let mut connection = connect(daemon);
    for start in (0..BYTES).step_by(64 << 10) {
        connection.write(start, &payload(1, start, 64 << 10), 0);
    }
    connection.flush();
}

fn connect(daemon: &Daemon) -> Connection {
    Connection::open(&daemon.tcp("disk"), &Wanted::everything()).expect("it opens")
}

/// Reads everything block by block and returns how many blocks failed. Wrong data fails the test.
fn failed_blocks(daemon: &Daemon) -> usize {
    failed_offsets(daemon).len()
}

/// Like [`failed_blocks`], but returns the offsets.
fn failed_offsets(daemon: &Daemon) -> Vec<u64> {
    let mut connection = connect(daemon);
    let mut failed = Vec::new();
    for start in (0..BYTES).step_by(4096) {
        let reply = connection.call(CMD_READ, 0, start, 4096, &[]).expect("a reply");
        if reply.error == 0 {
            assert!(reply.payload == payload(1, start, 4096), "wrong data at {start}");
        } else {
            assert_eq!(reply.error, EIO);
            failed.push(start);
        }
    }
    failed
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(path) = todo.pop() {
        if path.is_dir() {
            let entries = std::fs::read_dir(&path).expect("a readable directory");
            todo.extend(entries.map(|entry| entry.expect("a readable entry").path()));
        } else {
            files.push(path);
        }
    }
    files.sort();
    files
}

fn flip(path: &Path, at: usize) {
    let mut bytes = std::fs::read(path).expect("a readable file");
    bytes[at] ^= 0x10;
    std::fs::write(path, bytes).expect("a writable file");
}

#[test]
fn a_flipped_bit_in_a_segment_is_an_error_that_names_it() {
    for seed in seeds(1) {
        println!("SEED={seed}");
        let mut random = Random::new(seed, 5);
        let mut daemon = Daemon::started(&uncached(), &[("disk", "16MiB")]);
        fill(&daemon);
        daemon.stop();
        daemon.fsck();
        let segments = files(&daemon.dir().join("store/segments"));
        assert!(!segments.is_empty(), "{:?}", files(&daemon.dir()));
        let victim = random.pick(&segments).clone();
        let length = std::fs::metadata(&victim).expect("it exists").len();
        // After the header and before the directory at the end, in the frames.
        let at = random.between(length / 10, length * 6 / 10);
        flip(&victim, usize::try_from(at).expect("small"));
        let name = victim.file_name().expect("it has one").to_string_lossy().into_owned();
        let found = daemon.command(&["fsck", "-o", "json"]);
        let text = String::from_utf8_lossy(&found.stdout).into_owned();
        assert!(!found.status.success() && text.contains(&name), "fsck names {name}: {text}");
        daemon.announce("segment");
        daemon.announce("frame");
        daemon.announce("orrupt");
        daemon.restart();
        let failed = failed_offsets(&daemon);
        assert!((1..=64).contains(&failed.len()), "{failed:?} failed: one frame is damaged");
        let log = daemon.log();
        let place = format!("read volume 1, offset {}: read segment ", failed[0]);
        let is_named = |line: &str| {
            let cause = line.split_once(&place).map_or("", |(_, cause)| cause);
            cause.contains(&name) && cause.contains("frame ")
        };
        assert!(log.lines().any(is_named), "no {place:?} with {name}: {}", daemon.tail());
        // Rewritten, it is whole again.
        fill(&daemon);
        assert_eq!(failed_blocks(&daemon), 0);
    }
}

#[test]
fn a_truncated_or_missing_segment_is_an_error_that_names_it() {
    let mut daemon = Daemon::started(&uncached(), &[("disk", "16MiB")]);
    fill(&daemon);
    daemon.stop();
    let segments = files(&daemon.dir().join("store/segments"));
    let victim = &segments[segments.len() / 2];
    let name = victim.file_name().expect("it has one").to_string_lossy().into_owned();
    let bytes = std::fs::read(victim).expect("a readable file");
    daemon.announce("segment");
    daemon.announce("frame");
    daemon.announce("orrupt");
    for cut in [bytes.len() / 2, 0] {
        std::fs::write(victim, &bytes[..cut]).expect("a writable file");
        if cut == 0 {
            std::fs::remove_file(victim).expect("it can be removed");
        }
        let found = daemon.command(&["fsck", "-o", "json"]);
        let text = String::from_utf8_lossy(&found.stdout).into_owned();
        assert!(!found.status.success() && text.contains(&name), "fsck names {name}: {text}");
        daemon.restart();
        assert!(failed_blocks(&daemon) > 0, "a segment is gone and nobody noticed");
        daemon.stop();
    }
    std::fs::write(victim, &bytes).expect("a writable file");
    daemon.fsck();
    daemon.restart();
    assert_eq!(failed_blocks(&daemon), 0);
}

#[test]
fn a_flipped_bit_in_the_cache_is_repaired_from_the_store() {
    let settings = SMALL.replace("[destage]", "[memory_cache]\nsize = \"0\"\n[destage]");
    let mut daemon = Daemon::started(&settings, &[("disk", "16MiB")]);
    fill(&daemon);
    daemon.stop();
    daemon.announce("cache");
    let mut random = Random::new(9, 9);
    for path in files(&daemon.dir().join("cache")) {
        let mut bytes = std::fs::read(&path).expect("a readable file");
        for _ in 0..bytes.len() / 4096 {
            let length = u64::try_from(bytes.len()).expect("fits");
            bytes[usize::try_from(random.below(length)).expect("fits")] ^= 1;
        }
        std::fs::write(&path, bytes).expect("a writable file");
    }
    daemon.restart();
    assert_eq!(failed_blocks(&daemon), 0, "the store has it all");
}

#[test]
fn damage_in_the_log_is_refused_or_harmless_but_never_wrong_data() {
    for seed in seeds(1) {
        println!("SEED={seed}");
        let mut random = Random::new(seed, 6);
        let mut refused = 0;
        for round in 0..12 {
            // Nothing is destaged: the log is the only copy.
            let settings = uncached()
                .replace("max_age = \"1s\"", "max_age = \"1h\"")
                .replace("16MiB", "128MiB");
            let mut daemon = Daemon::started(&settings, &[("disk", "16MiB")]);
            fill(&daemon);
            // A marker, a moment later, records which flushed data is known to be durable. Before
            // that, a damaged end cannot be distinguished from one that a power cut tore.
            std::thread::sleep(Duration::from_millis(500));
            daemon.kill();
            let logs: Vec<PathBuf> = files(&daemon.dir().join("log"))
                .into_iter()
                .filter(|path| used_bytes(path) > 64 << 10)
                .collect();
            let victim = random.pick(&logs).clone();
            let used = used_bytes(&victim);
            match round % 3 {
                0 | 1 => flip(&victim, usize::try_from(random.below(used)).expect("fits")),
                _ => {
                    let file = std::fs::OpenOptions::new().write(true).open(&victim);
                    let length = random.below(used);
                    file.and_then(|file| file.set_len(length)).expect("it can be cut");
                }
            }
            daemon.announce("log");
            match daemon.try_start() {
                Ok(()) => assert_eq!(failed_blocks(&daemon), 0, "flushed data is gone"),
                Err(said) => {
                    let words = said.to_lowercase();
                    let is_clear =
                        ["corrupt", "damaged", "checksum", "should have", "authentication"]
                            .iter()
                            .any(|word| words.contains(word));
                    assert!(is_clear && words.contains("log"), "not a clear error: {said}");
                    refused += 1;
                }
            }
        }
        assert!(refused > 0, "SEED={seed}: no damage was noticed in 12 rounds");
    }
}

/// Returns the length up to the last byte that is not zero.
fn used_bytes(path: &Path) -> u64 {
    let bytes = std::fs::read(path).expect("a readable file");
    let last = bytes.iter().rposition(|byte| *byte != 0);
    last.map_or(0, |last| u64::try_from(last).expect("fits") + 1)
}

#[test]
fn a_damaged_manifest_or_key_ring_is_refused() {
    let mut daemon = Daemon::started(SMALL, &[("disk", "16MiB")]);
    fill(&daemon);
    daemon.stop();
    let store = daemon.dir().join("store");
    for kind in ["manifest", "keyring"] {
        // Only the newest object of a chain counts.
        let newest = files(&store.join(kind)).pop();
        let newest = newest.unwrap_or_else(|| panic!("no {kind} among {:?}", files(&store)));
        let name = newest.strip_prefix(&store).expect("below it").display().to_string();
        let bytes = std::fs::read(&newest).expect("a readable file");
        for at in [1, bytes.len() / 2, bytes.len() - 3] {
            flip(&newest, at);
            let said = daemon.refuses_to_start();
            println!("{name}, byte {at}: {said}");
            let refusal = said.lines().rfind(|line| line.contains("spindle: ")).unwrap_or(&said);
            for part in [&name, "damaged"] {
                assert!(refusal.contains(part), "{name}, byte {at}: no {part:?} in: {said}");
            }
            std::fs::write(&newest, &bytes).expect("a writable file");
        }
    }
    daemon.restart();
    assert_eq!(failed_blocks(&daemon), 0);
}

fn copy_tree(from: &Path, to: &Path) {
    run("cp", &["-a", &from.display().to_string(), &to.display().to_string()]);
}

/// Puts `older` in the place of the stopped daemon's store, which the daemon must refuse as rolled
/// back. Afterwards the newer store is back in place.
fn is_refused_as_rolled_back(daemon: &mut Daemon, older: &Path) {
    let (store, newer) = (daemon.dir().join("store"), daemon.place().join("newer"));
    std::fs::rename(&store, &newer).expect("it can be renamed");
    copy_tree(older, &store);
    daemon.announce("");
    let said = daemon.refuses_to_start();
    println!("{said}");
    assert!(said.contains("store was rolled back"), "{said}");
    std::fs::remove_dir_all(&store).expect("it can be removed");
    std::fs::rename(&newer, &store).expect("it can be renamed");
}

#[test]
fn a_store_rolled_back_to_an_earlier_epoch_is_refused() {
    let mut daemon = Daemon::started(SMALL, &[("disk", "16MiB")]);
    fill(&daemon);
    daemon.stop();
    let older = daemon.place().join("older");
    copy_tree(&daemon.dir().join("store"), &older);
    daemon.restart();
    let mut connection = connect(&daemon);
    connection.write(0, &payload(2, 0, 64 << 10), 0);
    drop(connection);
    let _ = daemon.json(&["drain"]);
    daemon.kill();
    is_refused_as_rolled_back(&mut daemon, &older);
    daemon.restart();
    assert!(connect(&daemon).read(0, 64 << 10) == payload(2, 0, 64 << 10));
}

/// Makes a daemon that is stopped after a refusal. Both states of its store have the same ownership
/// chain, so only the log knows how far the store had come.
fn refused_within_an_epoch() -> Daemon {
    let mut daemon = Daemon::started(SMALL, &[("disk", "16MiB")]);
    fill(&daemon);
    let _ = daemon.json(&["drain"]);
    let older = daemon.place().join("older");
    daemon.pause();
    copy_tree(&daemon.dir().join("store"), &older);
    daemon.resume();
    let mut connection = connect(&daemon);
    connection.write(0, &payload(2, 0, 64 << 10), 0);
    let _ = daemon.json(&["drain"]);
    // The next entry records in the log how far the store has come.
    connection.write(64 << 10, &payload(2, 64 << 10, 64 << 10), CMD_FLAG_FUA);
    drop(connection);
    daemon.kill();
    is_refused_as_rolled_back(&mut daemon, &older);
    daemon
}

#[test]
fn a_store_rolled_back_within_an_epoch_is_refused() {
    drop(refused_within_an_epoch());
}

#[test]
fn the_newer_store_opens_again_after_a_roll_back_within_an_epoch() {
    let mut daemon = refused_within_an_epoch();
    daemon.restart();
    assert!(connect(&daemon).read(0, 128 << 10) == payload(2, 0, 128 << 10));
}
