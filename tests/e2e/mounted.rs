//! File systems and their tools on devices of a kernel: the limits that a device reports are true,
//! the space that a file system gives back reaches the volume, and file systems stay whole when the
//! daemon or the machine dies.
//!
//! Invariants:
//! - The tests run in a guest kernel (`tests/guest`): no file system is mounted on this machine.
//! - An unmounted file system is whole according to its own checker, and the kernel has logged no
//!   complaint.
//!
//! There is no device mapper between file system and device: its faults (flakey) would be those of
//! a device that breaks its promises, and the reaction of file systems to these is not spindle's
//! concern. Writes that are lost with the power are tested below spindle (`power.rs`), and here by
//! stopping the machine.

use crate::devices::{SETTINGS, attach};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tests::daemon::Daemon;
use tests::place::{output, run};
use tests::power::device::{Loop, Mount};
use tests::power::guest;
use tests::process::Process;
use tests::seed::{Random, mix, seeds};
use tests::{Place, needs, needs_root};

/// The two drivers.
pub(crate) const DRIVERS: [&[&str]; 2] = [&[], &["--nbd"]];

/// A kind of file system.
pub(crate) struct Kind {
    name: &'static str,
    make: &'static [&'static str],
    /// Checks it without changing anything.
    check: &'static [&'static str],
}

pub(crate) const KINDS: [Kind; 3] = [
    Kind { name: "ext4", make: &["mkfs.ext4", "-q"], check: &["e2fsck", "-fn"] },
    Kind { name: "xfs", make: &["mkfs.xfs", "-q"], check: &["xfs_repair", "-n"] },
    Kind { name: "btrfs", make: &["mkfs.btrfs", "-q"], check: &["btrfs", "check"] },
];

impl Kind {
    pub(crate) fn make(&self, device: &str) {
        run(self.make[0], &[&self.make[1..], &[device]].concat());
    }

    #[track_caller]
    fn check(&self, device: &str) {
        let checked = output(self.check[0], &[&self.check[1..], &[device]].concat());
        let said = [checked.stdout, checked.stderr].concat();
        assert!(checked.status.success(), "{}: {}", self.name, String::from_utf8_lossy(&said));
    }
}

/// A mounted file system.
pub(crate) struct Mounted {
    device: String,
    pub(crate) path: PathBuf,
}

impl Mounted {
    #[track_caller]
    pub(crate) fn new(device: &str, path: PathBuf) -> Mounted {
        std::fs::create_dir_all(&path).expect("make a directory");
        run("mount", &[device, &path.display().to_string()]);
        Mounted { device: device.to_owned(), path }
    }

    /// Unmounts it and insists that it is whole.
    #[track_caller]
    pub(crate) fn unmount(self, kind: &Kind) {
        run("umount", &[&self.path.display().to_string()]);
        kind.check(&self.device);
    }

    /// Syncs all writes so far to the device.
    #[track_caller]
    fn sync(&self) {
        run("sync", &["-f", &self.path.display().to_string()]);
    }
}

/// Returns the number in an environment variable, or `otherwise`.
pub(crate) fn number_of(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |text| text.parse().expect("a number"))
}

/// Insists that the kernel has seen no error of a device or a file system.
#[track_caller]
pub(crate) fn no_complaints_of_the_kernel() {
    let said = run("dmesg", &[]);
    let is_bad = |line: &&str| {
        let errors = [
            "I/O error",
            "EXT4-fs error",
            "EXT4-fs warning",
            "BTRFS error",
            "BTRFS warning",
            "Out of memory",
            "blocked for more than",
        ];
        errors.iter().any(|text| line.contains(text))
            || line.contains("XFS") && (line.contains("orrupt") || line.contains("hutting down"))
    };
    let bad: Vec<_> = said.lines().filter(is_bad).collect();
    assert!(bad.is_empty(), "the kernel says {bad:#?}");
}

/// Runs a step and insists on a time limit.
#[track_caller]
fn within<T>(limit: Duration, name: &str, step: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = step();
    let took = begun.elapsed();
    println!("{name}: {took:.1?}");
    assert!(took < limit, "{name} took {took:?}");
    result
}

#[test]
fn device_reports_limits_that_suit_the_engine() {
    needs_root!();
    let name = "mounted::device_reports_limits_that_suit_the_engine";
    guest::run(name, Duration::from_secs(120), &[], reported_device_limits);
}

/// Least size of the longest discard: whole blocks within 32 bits, in which the kernel counts the
/// bytes of a request.
const LONGEST_BYTES: u64 = (1 << 32) - 4096;

fn reported_device_limits() {
    let daemon = Daemon::started(SETTINGS, &[("db", "64M")]);
    for driver in DRIVERS {
        let is_nbd = !driver.is_empty();
        for logical in [512, 4096] {
            let text = logical.to_string();
            let options = [driver, &["--logical-block", &text]].concat();
            let device = attach(&daemon, &options);
            let queue = |name: &str| -> u64 {
                let path =
                    format!("/sys/block/{}/queue/{name}", device.trim_start_matches("/dev/"));
                let text = std::fs::read_to_string(path).expect("the kernel has it");
                text.trim().parse().expect("a number")
            };
            // The nbd driver supports one block size only, and has its own optimal request size.
            let physical = if is_nbd { logical } else { 4096 };
            let optimal = if is_nbd { 128 << 10 } else { 4096 };
            for (name, wanted) in [
                ("logical_block_size", logical),
                ("physical_block_size", physical),
                ("minimum_io_size", physical),
                ("optimal_io_size", optimal),
                ("discard_granularity", physical),
                ("rotational", 0),
                ("fua", 1),
            ] {
                assert_eq!(queue(name), wanted, "{options:?}: {name}");
            }
            for name in ["discard_max_bytes", "write_zeroes_max_bytes"] {
                assert!(queue(name) >= LONGEST_BYTES, "{options:?}: {name} {}", queue(name));
            }
            assert!(queue("max_sectors_kb") >= 128, "{options:?}: requests are not small");
            // The limits that programs get are those in /sys.
            let told =
                run("blockdev", &["--getss", "--getpbsz", "--getiomin", "--getioopt", &device]);
            let told: Vec<u64> = told.lines().map(|line| line.parse().expect("a number")).collect();
            assert_eq!(told, [logical, physical, physical, optimal], "{options:?}");
            let _ = daemon.json(&["detach", "db"]);
        }
    }
    for driver in DRIVERS {
        write_through(driver);
    }
    no_complaints_of_the_kernel();
}

/// If every write is on stable storage when it is answered, the device has no volatile cache,
/// whatever happens to its volume while the device is in use.
fn write_through(driver: &[&str]) {
    let mut daemon = Daemon::started(SETTINGS, &[("db", "64M")]);
    let caches = |device: &str| {
        let queue = format!("/sys/block/{}/queue", device.trim_start_matches("/dev/"));
        ["write_cache", "fua"].map(|name| {
            let text = std::fs::read_to_string(format!("{queue}/{name}"));
            text.expect("the kernel has it").trim().to_owned()
        })
    };
    let set = |daemon: &Daemon, durability: &str| {
        let _ = daemon.json(&["volume", "set", "db", "--durability", durability]);
    };
    set(&daemon, "write");
    let device = attach(&daemon, driver);
    assert_eq!(caches(&device), ["write through", "0"], "{driver:?}");
    set(&daemon, "flush");
    for end in ["none", "kill", "stop"] {
        match end {
            "kill" => daemon.kill(),
            "stop" => daemon.stop(),
            _ => {}
        }
        if end != "none" {
            daemon.restart();
        }
        assert_eq!(caches(&device), ["write through", "0"], "{driver:?} after {end}");
        let (to, count) = (format!("of={device}"), "count=1");
        run("dd", &["if=/dev/urandom", &to, "bs=64k", count, "oflag=direct", "conv=fsync"]);
        // The kernel has sent no flush, and needs none.
        let status = daemon.json(&["status"]);
        let log = &status["log"];
        assert_eq!(log["durable_lsn"], log["last_lsn"], "{driver:?} after {end}: {status}");
        let list = daemon.json(&["attach", "list"]);
        assert_eq!(list["attachments"][0]["flush_count"], 0, "{list}");
    }
    let _ = daemon.json(&["detach", "db"]);
    let device = attach(&daemon, driver);
    assert_eq!(caches(&device), ["write back", "1"], "{driver:?} attached anew");
    let _ = daemon.json(&["detach", "db"]);
    daemon.stop();
    daemon.fsck();
}

#[test]
fn file_systems_return_freed_space_of_a_thin_volume() {
    needs_root!();
    needs!("sfdisk", "mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "fstrim", "blkdiscard", "nbdinfo");
    let name = "mounted::file_systems_return_freed_space_of_a_thin_volume";
    guest::run(name, Duration::from_secs(240), &[], || {
        for driver in DRIVERS {
            thin(driver);
        }
    });
}

/// Bytes of files that are kept, and of files that are removed.
const KEPT_BYTES: usize = 2 << 20;
const GONE_BYTES: usize = 12 << 20;
/// Limits for the space that a new file system of 300 GiB takes of the volume, and for the space
/// that removed files leave occupied.
const NEW_BYTES_MAX: u64 = 64 << 20;
const REST_BYTES_MAX: u64 = 1 << 20;
/// Largest number of trims, for file systems whose first trim does not give everything back.
const TRIMS_MAX: u32 = 10;
/// Alignment of partitions. Source: sfdisk(8).
const ALIGNMENT_SECTORS: u64 = 2048;

fn thin(driver: &[&str]) {
    let mut daemon = Daemon::started(SETTINGS, &[("db", "1T")]);
    let device = attach(&daemon, &[driver, &["--shared"]].concat());
    let uri = daemon.unix("db").uri();
    let place = Place::new();
    let table = place.join("table");
    std::fs::write(&table, "label: gpt\nsize=300G\nsize=300G\nsize=300G\n").expect("write a file");
    let script = format!("sfdisk -q {device} <{}", table.display());
    run("sh", &["-c", &script]);
    for (number, kind) in (1..).zip(&KINDS) {
        let part = format!("{device}p{number}");
        let start = format!("/sys/class/block/{}/start", part.trim_start_matches("/dev/"));
        let start = std::fs::read_to_string(&start).expect("the kernel has the partition");
        let start: u64 = start.trim().parse().expect("a number");
        assert!(start.is_multiple_of(ALIGNMENT_SECTORS), "{part} begins at sector {start}");
        let before = taken(&uri);
        within(Duration::from_secs(20), &format!("{driver:?}: make {}", kind.name), || {
            kind.make(&part);
        });
        if kind.name == "xfs" {
            let said = run("xfs_db", &["-r", "-c", "sb 0", "-c", "p sectsize", &part]);
            assert_eq!(said.trim(), "sectsize = 4096", "it takes the engine's block");
        }
        let new = taken(&uri) - before;
        println!("{driver:?}: a new {} takes {} KiB", kind.name, new >> 10);
        assert!(new < NEW_BYTES_MAX, "{}: it takes {new} bytes", kind.name);
        let mounted = Mounted::new(&part, place.join(kind.name));
        fill(&mounted.path.join("kept"), 1, KEPT_BYTES);
        mounted.sync();
        run("fstrim", &[&mounted.path.display().to_string()]);
        mounted.sync();
        let before = taken(&uri);
        fill(&mounted.path.join("gone"), 2, GONE_BYTES);
        mounted.sync();
        let full = taken(&uri);
        // Zeroed blocks that the file system has written count until they are destaged.
        let least = before + GONE_BYTES as u64 - REST_BYTES_MAX;
        assert!(full >= least, "{}: {before}, then {full}", kind.name);
        std::fs::remove_dir_all(mounted.path.join("gone")).expect("remove the files");
        mounted.sync();
        within(Duration::from_secs(20), &format!("{driver:?}: trim {}", kind.name), || {
            run("fstrim", &[&mounted.path.display().to_string()]);
        });
        mounted.sync();
        let mut after = taken(&uri);
        // On a busy machine btrfs may not have released the files yet. Since Linux 5.14 XFS frees
        // the blocks of removed files in the background, so it may not have either. ext4 is trimmed
        // once.
        for trim in 2..=TRIMS_MAX {
            if kind.name == "ext4" || after <= before + REST_BYTES_MAX {
                break;
            }
            println!("{driver:?}: {}: {after} bytes, trim {trim}", kind.name);
            run("fstrim", &[&mounted.path.display().to_string()]);
            mounted.sync();
            after = taken(&uri);
        }
        println!("{driver:?}: {}: {before} bytes, {full} with the files, {after}", kind.name);
        assert!(after <= before + REST_BYTES_MAX, "{}: {before}, then {after}", kind.name);
        mounted.unmount(kind);
    }
    // With none of it in the kernel's memory.
    let _ = daemon.json(&["detach", "db"]);
    daemon.kill();
    daemon.restart();
    let device = attach(&daemon, &[driver, &["--shared"]].concat());
    // Since Linux 6.19 the kernel reads the partition table after the attach.
    let last = format!("{device}p{}", KINDS.len());
    let until = Instant::now() + Duration::from_secs(20);
    while !Path::new(&last).exists() {
        assert!(Instant::now() < until, "{last} does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
    for (number, kind) in (1..).zip(&KINDS) {
        let mounted = Mounted::new(&format!("{device}p{number}"), place.join(kind.name));
        filled(&mounted.path.join("kept"), 1, KEPT_BYTES);
        mounted.unmount(kind);
    }
    let written = map(&uri, ZERO);
    assert!(!written.is_empty());
    within(Duration::from_secs(10), &format!("{driver:?}: discard 1 TiB"), || {
        run("blkdiscard", &["-f", &device]);
    });
    let rest = map(&uri, HOLE);
    assert!(rest.is_empty(), "{driver:?}: {} extents, the first {:?}", rest.len(), rest[0]);
    let disk = std::fs::File::open(&device).expect("open the device");
    for (offset, length) in written {
        let mut bytes = vec![1; usize::try_from(length.min(64 << 10)).expect("small")];
        disk.read_exact_at(&mut bytes, offset).expect("read the device");
        assert!(bytes.iter().all(|byte| *byte == 0), "{driver:?}: bytes at {offset}");
    }
    drop(disk);
    no_complaints_of_the_kernel();
    let _ = daemon.json(&["detach", "db"]);
    daemon.stop();
    daemon.fsck();
}

/// Flags of an extent. Source: the NBD specification, `base:allocation`.
const HOLE: u64 = 1;
const ZERO: u64 = 2;

/// Returns the extents of an export without this flag: offset and length.
fn map(uri: &str, without: u64) -> Vec<(u64, u64)> {
    let said = run("nbdinfo", &["--map", uri]);
    let extents = said.lines().map(|line| {
        let numbers: Vec<u64> =
            line.split_whitespace().take(3).map(|word| word.parse().expect("a number")).collect();
        let [offset, length, flags] = numbers[..] else { panic!("a line of a map: {line}") };
        (offset, length, flags)
    });
    extents.filter(|(_, _, flags)| flags & without == 0).map(|(at, len, _)| (at, len)).collect()
}

/// Returns the stored bytes of an export. They do not include zeroes that must not become a hole,
/// which the kernel's "zero this" (BLKZEROOUT) asks for when journals are made.
fn taken(uri: &str) -> u64 {
    map(uri, ZERO).iter().map(|(_, length)| length).sum()
}

/// Writes files of 64 KiB that do not compress.
pub(crate) fn fill(dir: &Path, stream: u64, bytes: usize) {
    std::fs::create_dir(dir).expect("make a directory");
    each(stream, bytes, |name, bytes| {
        std::fs::write(dir.join(name), bytes).expect("write a file");
    });
}

/// Insists that the files are present.
#[track_caller]
pub(crate) fn filled(dir: &Path, stream: u64, bytes: usize) {
    each(stream, bytes, |name, bytes| {
        let found = std::fs::read(dir.join(name)).expect("the file is there");
        assert!(found == bytes, "{} has other bytes", dir.join(name).display());
    });
}

fn each(stream: u64, bytes: usize, mut with: impl FnMut(&str, &[u8])) {
    let mut random = Random::new(stream, 31);
    let mut content = vec![0; 64 << 10];
    for number in 0..bytes / content.len() {
        random.fill(&mut content);
        with(&number.to_string(), &content);
    }
}

/// Makes a daemon in a guest with its store in the directory shared with this machine, because a
/// store only grows and the guest's memory does not.
fn daemon_in_shared_directory(volumes: &[(&str, &str)]) -> Daemon {
    let mut daemon = Daemon::new(SETTINGS, volumes);
    let store = std::env::current_dir().expect("there is one").join("store");
    std::fs::create_dir(&store).expect("make a directory");
    daemon.argue(&["--store", &store.display().to_string()]);
    daemon.restart();
    daemon
}

/// Names of the stressors of stress-ng; each runs as one process.
const STRESSORS: &str = "access chmod chown dentry dir fallocate fiemap filename fpunch getdent hdd io iomix \
    link rename seek symlink sync-file touch utime xattr";

/// Small files, because the number of changes is tested, not their length.
const STRESS_SIZES: &str = "--fallocate-bytes=8M --fiemap-bytes=4M --hdd-bytes=8M --iomix-bytes=8M \
    --seek-size=4M --sync-file-bytes=4M";

#[test]
fn file_systems_under_stress_stay_whole_while_the_daemon_dies() {
    needs_root!();
    needs!("mkfs.ext4", "mkfs.xfs", "stress-ng");
    for seed in seeds(1) {
        let name = "mounted::file_systems_under_stress_stay_whole_while_the_daemon_dies";
        let time = Duration::from_secs(240 + 4 * stress_seconds());
        let place = Place::new();
        guest::run_in(place.path(), name, time, &[("SEED", seed.to_string())], || stressed(seed));
    }
}

fn stress_seconds() -> u64 {
    number_of("SPINDLE_TEST_STRESS_SECONDS", 10)
}

fn stressed(seed: u64) {
    println!("SEED={seed}");
    let mut random = Random::new(seed, 0);
    let mut daemon = daemon_in_shared_directory(&[("ublk", "1G"), ("nbd", "1G")]);
    // About forty processes share one processor.
    daemon.announce("the data tier is not open yet");
    let place = Place::new();
    let volumes: [(&str, &[&str]); 2] = [("ublk", &[]), ("nbd", &["--nbd"])];
    let mut tried = Vec::new();
    for (number, (volume, driver)) in volumes.into_iter().enumerate() {
        let kind = &KINDS[(number + usize::from(!seed.is_multiple_of(2))) % 2];
        let device = attach_volume(&daemon, volume, driver);
        kind.make(&device);
        let mounted = Mounted::new(&device, place.join(volume));
        fill(&mounted.path.join("kept"), seed, KEPT_BYTES);
        let stress_dir = mounted.path.join("stress");
        std::fs::create_dir(&stress_dir).expect("make a directory");
        tried.push((volume, kind, device, mounted, stress_dir));
    }
    let mut running = Vec::new();
    for (volume, _, _, _, stress_dir) in &tried {
        // The daemon has priority, as otherwise it would hardly start.
        let mut command = Command::new("nice");
        command
            .args(["-n", "19", "stress-ng"])
            .args(STRESSORS.split_whitespace().map(|name| format!("--{name}=1")));
        command.args(STRESS_SIZES.split_whitespace()).args(["--verify", "--oomable"]);
        command.args(["--timeout", &stress_seconds().to_string(), "--temp-path"]).arg(stress_dir);
        let log = place.join(&format!("{volume}.log"));
        running.push((volume, Process::start(&mut command, &log).expect("it starts"), log));
    }
    let mut kill_count = 0;
    for (volume, mut stress, log) in running {
        let status = loop {
            // A moment that is unrelated to the daemon's actions.
            if let Some(status) = stress.wait(Duration::from_millis(1000 + random.below(2000))) {
                break status;
            }
            daemon.kill();
            daemon.restart();
            kill_count += 1;
        };
        let mut said = std::fs::read_to_string(&log).unwrap_or_default();
        while let Some(line) = stress.line(Duration::ZERO) {
            said.push_str(&line);
        }
        println!("{volume}: {said}");
        assert!(status.success(), "SEED={seed}: {volume}: {status}\n{said}\n{}", daemon.tail());
    }
    println!("{kill_count} ends of the daemon");
    assert!(kill_count >= 2, "SEED={seed}: it was killed {kill_count} times");
    for (volume, kind, device, mounted, _) in tried {
        mounted.unmount(kind);
        let mounted = Mounted::new(&device, place.join(volume));
        filled(&mounted.path.join("kept"), seed, KEPT_BYTES);
        mounted.unmount(kind);
        let _ = daemon.json(&["detach", volume]);
    }
    no_complaints_of_the_kernel();
    daemon.stop();
    daemon.fsck();
}

/// Like [`attach`], for any volume.
pub(crate) fn attach_volume(daemon: &Daemon, volume: &str, driver: &[&str]) -> String {
    let reply = daemon.json(&[&["attach", volume], driver].concat());
    reply["device"].as_str().unwrap_or_else(|| panic!("it has a device: {reply}")).to_owned()
}

#[test]
fn a_tree_of_many_files_arrives_while_the_daemon_dies() {
    needs_root!();
    needs!("mkfs.ext4", "mkfs.xfs", "mkfs.btrfs");
    for seed in seeds(1) {
        let name = "mounted::a_tree_of_many_files_arrives_while_the_daemon_dies";
        let time = Duration::from_secs(240 + tree_files() / 20);
        let place = Place::new();
        guest::run_in(place.path(), name, time, &[("SEED", seed.to_string())], || tree(seed));
    }
}

fn tree_files() -> u64 {
    number_of("SPINDLE_TEST_TREE_FILES", 5000)
}

/// One file of a tree like a source tree.
struct Leaf {
    path: PathBuf,
    bytes: Vec<u8>,
    mode: u32,
}

impl Leaf {
    fn new(seed: u64, number: u64, root: &Path) -> Leaf {
        let mut random = Random::new(seed, number);
        // A quarter of the files has up to 40 KiB, the others up to 6.
        let longest = if random.chance(25) { 40 << 10 } else { 6 << 10 };
        let mut bytes = vec![0; usize::try_from(random.below(longest)).expect("small")];
        random.fill(&mut bytes);
        let mode = if random.chance(5) { 0o755 } else { 0o644 };
        let dirs = format!("{}/{}/{}", number / 1000, number / 30 % 30, number % 1000);
        Leaf { path: root.join(dirs), bytes, mode }
    }

    fn write(&self) {
        std::fs::create_dir_all(self.path.parent().expect("in a directory")).expect("make it");
        std::fs::write(&self.path, &self.bytes).expect("write a file");
        let mode = std::fs::Permissions::from_mode(self.mode);
        std::fs::set_permissions(&self.path, mode).expect("set a mode");
        symlink(&self.path, self.path.with_extension("link")).expect("make a link");
    }

    fn check(&self) {
        let found = std::fs::read(self.path.with_extension("link")).expect("it is there");
        assert!(found == self.bytes, "{} has other bytes", self.path.display());
        let mode = std::fs::metadata(&self.path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, self.mode, "{}", self.path.display());
    }
}

fn tree(seed: u64) {
    let kind = &KINDS[usize::try_from(seed % 3).expect("small")];
    let driver = DRIVERS[usize::try_from(seed / 3 % 2).expect("small")];
    println!("SEED={seed}: {} {driver:?}", kind.name);
    let mut random = Random::new(seed, 0);
    let mut daemon = daemon_in_shared_directory(&[("db", "4G")]);
    let device = attach(&daemon, driver);
    let place = Place::new();
    kind.make(&device);
    let mounted = Mounted::new(&device, place.join("mnt"));
    let root = mounted.path.join("tree");
    let writer = {
        let root = root.clone();
        std::thread::spawn(move || {
            (0..tree_files()).for_each(|number| Leaf::new(seed, number, &root).write());
            run("sync", &["-f", &root.display().to_string()]);
        })
    };
    // The kernel's nbd driver looks for a new daemon every 2 s.
    let shortest = if driver.is_empty() { 300 } else { 3000 };
    let mut kill_count = 0;
    while !writer.is_finished() {
        // A moment that is unrelated to the daemon's actions.
        std::thread::sleep(Duration::from_millis(shortest + random.below(1500)));
        daemon.kill();
        daemon.restart();
        kill_count += 1;
    }
    writer.join().expect("the tree is written");
    println!("{kill_count} ends of the daemon");
    mounted.unmount(kind);
    let _ = daemon.json(&["detach", "db"]);
    let device = attach(&daemon, driver);
    let mounted = Mounted::new(&device, place.join("mnt"));
    (0..tree_files()).for_each(|number| Leaf::new(seed, number, &root).check());
    let counted = run("find", &[&root.display().to_string(), "-type", "f", "-printf", "."]);
    assert_eq!(counted.len() as u64, tree_files(), "SEED={seed}: nothing else is there");
    mounted.unmount(kind);
    no_complaints_of_the_kernel();
    let _ = daemon.json(&["detach", "db"]);
    daemon.stop();
    daemon.fsck();
}

/// Volumes of the test that stops the machine, with their file systems.
const STOPPED: [(&str, &[&str], &Kind); 4] = [
    ("ublk-ext4", &[], &KINDS[0]),
    ("nbd-xfs", &["--nbd"], &KINDS[1]),
    ("ublk-xfs", &[], &KINDS[1]),
    ("nbd-ext4", &["--nbd"], &KINDS[0]),
];
/// Expected log line of the daemon after a loss of power.
pub(crate) const TAIL_LOST: &str =
    "the machine stopped while writes were answered ahead of stable storage";

#[test]
fn synced_files_survive_a_stop_of_the_machine() {
    needs_root!();
    needs!("mkfs.ext4", "mkfs.xfs", "losetup");
    let name = "mounted::synced_files_survive_a_stop_of_the_machine";
    for seed in seeds(1) {
        let place = Place::new();
        let turn_count = 1 + number_of("SPINDLE_TEST_MACHINE_STOPS", 2);
        let this = number_of("TURN", 0);
        let turns = if guest::is_inside() { this..this + 1 } else { 0..turn_count };
        for turn in turns {
            let variables = [("SEED", seed.to_string()), ("TURN", turn.to_string())];
            let time = Duration::from_secs(300);
            if turn + 1 == turn_count {
                let variables = [&variables[..], &[("IS_LAST", "yes".to_owned())]].concat();
                guest::run_in(place.path(), name, time, &variables, || one_machine(seed));
            } else if !guest::run_until_stopped(place.path(), name, time, &variables, || {
                one_machine(seed);
            }) {
                return;
            }
        }
    }
}

/// Runs one machine: checks the data that earlier machines synced, writes more, and stops. The disk
/// with log, cache and store is a file of the directory that the machines share.
fn one_machine(seed: u64) {
    let turn = number_of("TURN", 0);
    println!("SEED={seed}: machine {turn}");
    let mut random = Random::new(seed, turn);
    let (shared, place) = (std::env::current_dir().expect("there is one"), Place::new());
    let image = shared.join("disk");
    if turn == 0 {
        File::create(&image).and_then(|file| file.set_len(4 << 30)).expect("make a disk");
    }
    let disk = Loop::attach(&image);
    if turn == 0 {
        KINDS[0].make(disk.device());
    }
    let disk_mount = Mount::new(disk.device(), &place.join("disk")).expect("it mounts");
    let pool = disk_mount.path().join("pool");
    std::fs::create_dir_all(&pool).expect("make a directory");
    let mut daemon = Daemon::new(SETTINGS, &STOPPED.map(|(volume, _, _)| (volume, "1G")));
    daemon.announce(TAIL_LOST);
    symlink(pool, daemon.dir()).expect("make a link");
    daemon.restart();
    let mut mounts = Vec::new();
    for (volume, driver, kind) in STOPPED {
        let device = if turn == 0 {
            let device = attach_volume(&daemon, volume, driver);
            kind.make(&device);
            device
        } else {
            // The daemon has attached it again. Mounting replays the file system's journal.
            let device = device_of(&daemon, volume);
            Mounted::new(&device, place.join(volume)).unmount(kind);
            device
        };
        let mounted = Mounted::new(&device, place.join(volume));
        let record = shared.join(format!("{volume}.synced"));
        let synced_count = Synced::check(seed, &mounted.path, &record);
        println!("{volume}: {synced_count} files were synced, and are there");
        assert!(turn == 0 || synced_count > 0, "SEED={seed}: nothing was synced");
        mounts.push((mounted, kind, record));
    }
    if std::env::var_os("IS_LAST").is_some() {
        for ((mounted, kind, _), (volume, _, _)) in mounts.into_iter().zip(STOPPED) {
            mounted.unmount(kind);
            let _ = daemon.json(&["detach", volume]);
        }
        no_complaints_of_the_kernel();
        daemon.stop();
        daemon.fsck();
        return;
    }
    for (mounted, _, record) in &mounts {
        for thread in 0..2 {
            let (root, record) = (mounted.path.clone(), record.clone());
            std::thread::spawn(move || {
                for number in 0.. {
                    Synced { turn, thread, number }.write(seed, &root, &record);
                }
            });
        }
    }
    std::thread::sleep(Duration::from_millis(2000 + random.below(3000)));
    if random.chance(30) {
        daemon.kill();
    }
    guest::stop_machine();
}

/// Returns the device of an attached volume.
fn device_of(daemon: &Daemon, volume: &str) -> String {
    let listed = daemon.json(&["attach", "list"]);
    let attachments = listed["attachments"].as_array().expect("a list").iter();
    let found: BTreeMap<_, _> = attachments
        .filter_map(|one| Some((one["volume"].as_str()?, one["device"].as_str()?)))
        .collect();
    (*found.get(volume).unwrap_or_else(|| panic!("{volume} has a device: {listed}"))).to_owned()
}

/// A file that was synced before its name was noted.
struct Synced {
    turn: u64,
    thread: u64,
    number: u64,
}

impl Synced {
    fn content(&self, seed: u64) -> Vec<u8> {
        let mut random = Random::new(seed, mix(self.turn << 40 | self.thread << 32 | self.number));
        let mut bytes = vec![0; usize::try_from(random.below(48 << 10)).expect("small")];
        random.fill(&mut bytes);
        bytes
    }

    fn path(&self, root: &Path) -> PathBuf {
        root.join(format!("{}-{}-{}", self.turn, self.thread, self.number))
    }

    fn write(&self, seed: u64, root: &Path, record: &Path) {
        let mut file = File::create(self.path(root)).expect("make a file");
        file.write_all(&self.content(seed)).expect("write a file");
        file.sync_all().expect("sync a file");
        File::open(root).and_then(|dir| dir.sync_all()).expect("sync a directory");
        let line = format!("{} {} {}\n", self.turn, self.thread, self.number);
        let mut noted = OpenOptions::new().append(true).create(true).open(record).expect("open it");
        noted.write_all(line.as_bytes()).and_then(|()| noted.sync_all()).expect("note it");
    }

    /// Insists that the noted files are present, and counts them.
    fn check(seed: u64, root: &Path, record: &Path) -> usize {
        let noted = std::fs::read_to_string(record).unwrap_or_default();
        // The machine may have stopped in the middle of the last line.
        let lines: Vec<_> =
            noted.split_inclusive('\n').filter(|line| line.ends_with('\n')).collect();
        for line in &lines {
            let numbers: Vec<u64> =
                line.split_whitespace().map(|word| word.parse().expect("a number")).collect();
            let [turn, thread, number] = numbers[..] else { panic!("a line: {line}") };
            let synced = Synced { turn, thread, number };
            let path = synced.path(root);
            let found = std::fs::read(&path)
                .unwrap_or_else(|error| panic!("SEED={seed}: {}: {error}", path.display()));
            assert!(found == synced.content(seed), "SEED={seed}: {} differs", path.display());
        }
        lines.len()
    }
}
