//! File systems and their tools on devices of a kernel: what a device says of itself is true, what a
//! file system gives back reaches the volume, and file systems stay whole whatever happens to the
//! daemon or the machine.
//!
//! Invariants:
//! - It runs in a guest kernel (`tests/guest`): no file system is mounted on this machine.
//! - A file system that was unmounted is whole by its own checker, and the kernel has complained of
//!   nothing.
//!
//! There is no device mapper between file system and device: its faults (flakey) would be those of
//! a device that breaks its promises, and what file systems do then is not spindle's. Writes that are lost
//! with the power are tested below spindle (`power.rs`), and here by stopping the machine.

use crate::devices::{SETTINGS, attach};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tests::daemon::Daemon;
use tests::place::{output, run};
use tests::power::guest;
use tests::seed::Random;
use tests::{Place, needs, needs_root};

/// The two drivers.
const DRIVERS: [&[&str]; 2] = [&[], &["--nbd"]];

/// A kind of file system.
struct Kind {
    name: &'static str,
    make: &'static [&'static str],
    /// Finds what is wrong and changes nothing.
    check: &'static [&'static str],
}

const KINDS: [Kind; 3] = [
    Kind { name: "ext4", make: &["mkfs.ext4", "-q"], check: &["e2fsck", "-fn"] },
    Kind { name: "xfs", make: &["mkfs.xfs", "-q"], check: &["xfs_repair", "-n"] },
    Kind { name: "btrfs", make: &["mkfs.btrfs", "-q"], check: &["btrfs", "check"] },
];

impl Kind {
    fn make(&self, device: &str) {
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
struct Mounted {
    device: String,
    path: PathBuf,
}

impl Mounted {
    #[track_caller]
    fn new(device: &str, path: PathBuf) -> Mounted {
        std::fs::create_dir_all(&path).expect("make a directory");
        run("mount", &[device, &path.display().to_string()]);
        Mounted { device: device.to_owned(), path }
    }

    /// Unmounts it and insists that it is whole.
    #[track_caller]
    fn unmount(self, kind: &Kind) {
        run("umount", &[&self.path.display().to_string()]);
        kind.check(&self.device);
    }

    /// Everything that was written so far is on the device.
    #[track_caller]
    fn sync(&self) {
        run("sync", &["-f", &self.path.display().to_string()]);
    }
}

/// Insists that the kernel has seen no error of a device or a file system.
#[track_caller]
fn no_complaints_of_the_kernel() {
    let said = run("dmesg", &[]);
    let is_bad = |line: &&str| {
        let errors =
            ["I/O error", "EXT4-fs error", "EXT4-fs warning", "BTRFS error", "BTRFS warning"];
        errors.iter().any(|text| line.contains(text))
            || line.contains("XFS") && (line.contains("orrupt") || line.contains("hutting down"))
    };
    let bad: Vec<_> = said.lines().filter(is_bad).collect();
    assert!(bad.is_empty(), "the kernel says {bad:#?}");
}

/// Runs a step and insists that it is not slow.
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
fn a_device_says_what_suits_the_engine() {
    needs_root!();
    let name = "mounted::a_device_says_what_suits_the_engine";
    guest::run(name, Duration::from_secs(120), &[], what_a_device_says);
}

/// The longest discard has at least so many bytes: whole blocks within 32 bits, in which the kernel
/// counts the bytes of a request.
const LONGEST_BYTES: u64 = (1 << 32) - 4096;

fn what_a_device_says() {
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
            // The nbd driver takes one size of block, and has a best request of its own.
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
            // What programs are told is what /sys says.
            let told =
                run("blockdev", &["--getss", "--getpbsz", "--getiomin", "--getioopt", &device]);
            let told: Vec<u64> = told.lines().map(|line| line.parse().expect("a number")).collect();
            assert_eq!(told, [logical, physical, physical, optimal], "{options:?}");
            let _ = daemon.json(&["detach", "db"]);
        }
    }
    no_complaints_of_the_kernel();
}

#[test]
fn file_systems_on_a_large_thin_volume_give_back_what_they_free() {
    needs_root!();
    needs!("sfdisk", "mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "fstrim", "blkdiscard", "nbdinfo");
    let name = "mounted::file_systems_on_a_large_thin_volume_give_back_what_they_free";
    guest::run(name, Duration::from_secs(240), &[], || {
        for driver in DRIVERS {
            thin(driver);
        }
    });
}

/// Bytes of files that are kept, and of those that go.
const KEPT_BYTES: usize = 2 << 20;
const GONE_BYTES: usize = 12 << 20;
/// What a new file system of 300 GiB may take of the volume, and what may stay of files that went.
const NEW_BYTES_MAX: u64 = 64 << 20;
const REST_BYTES_MAX: u64 = 1 << 20;
/// Partitions and their parts of the volume begin here. Source: sfdisk(8).
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
        assert!(full >= before + GONE_BYTES as u64, "{}: {before}, then {full}", kind.name);
        std::fs::remove_dir_all(mounted.path.join("gone")).expect("remove the files");
        mounted.sync();
        within(Duration::from_secs(20), &format!("{driver:?}: trim {}", kind.name), || {
            run("fstrim", &[&mounted.path.display().to_string()]);
        });
        mounted.sync();
        let after = taken(&uri);
        println!("{driver:?}: {}: {before} bytes, {full} with the files, {after}", kind.name);
        assert!(after <= before + REST_BYTES_MAX, "{}: {before}, then {after}", kind.name);
        mounted.unmount(kind);
    }
    // With nothing of it in the kernel's memory.
    let _ = daemon.json(&["detach", "db"]);
    daemon.kill();
    daemon.restart();
    let device = attach(&daemon, &[driver, &["--shared"]].concat());
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
    assert_eq!(map(&uri, HOLE), []);
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

/// Extents of an export without this flag: offset and length.
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

/// Bytes of an export that are stored. Zeroes that are not to be a hole are not: the kernel's "zero this"
/// (BLKZEROOUT), by which journals are made, asks for such.
fn taken(uri: &str) -> u64 {
    map(uri, ZERO).iter().map(|(_, length)| length).sum()
}

/// Writes files of 64 KiB that no compression makes smaller.
fn fill(dir: &Path, stream: u64, bytes: usize) {
    std::fs::create_dir(dir).expect("make a directory");
    each(stream, bytes, |name, bytes| {
        std::fs::write(dir.join(name), bytes).expect("write a file");
    });
}

/// Insists that they are there.
#[track_caller]
fn filled(dir: &Path, stream: u64, bytes: usize) {
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
