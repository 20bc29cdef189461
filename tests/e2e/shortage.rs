//! A machine that runs out of memory while it writes to devices of its own daemon: to get memory
//! back it depends on the daemon, which needs memory itself.
//!
//! Invariants:
//! - The test runs in a guest kernel with little memory (`tests/guest`). The pool is on a disk of
//!   the guest, whose pages count too.
//! - Nothing waits for itself: everything ends, with the right bytes, and without complaints of the
//!   kernel.

use crate::devices::{SETTINGS, attach};
use crate::mounted::{DRIVERS, KINDS, Mounted, fill, filled, no_complaints_of_the_kernel};
use std::time::Duration;
use tests::daemon::Daemon;
use tests::place::run;
use tests::power::device::{Loop, Mount};
use tests::power::guest;
use tests::{Place, needs, needs_root};

/// The guest's memory, and the amount written to a mapped file; with the daemon this exceeds the
/// memory.
const MEMORY: &str = "448M";
const DIRTY: &str = "160M";
const SMALL_FILES_BYTES: usize = 32 << 20;
/// Flags of a thread whose memory allocations do not wait for I/O, and which is not throttled by
/// unwritten pages of other disks. `PR_SET_IO_FLUSHER` sets them. Source: Linux,
/// include/linux/sched.h, `PF_MEMALLOC_NOIO`, `PF_LOCAL_THROTTLE`.
const FLUSHER: u64 = 0x0018_0000;
/// Index of a thread's flags among the fields after the name in `/proc/PID/stat`. Source:
/// `proc_pid_stat(5)`, field 9 of all.
const FLAGS_FIELD: usize = 6;

#[test]
fn a_machine_short_of_memory_writes_to_its_own_devices() {
    needs_root!();
    needs!("fio", "mkfs.ext4", "losetup");
    let name = "shortage::a_machine_short_of_memory_writes_to_its_own_devices";
    let place = Place::new();
    let variables = [("SPINDLE_TEST_GUEST_MEMORY", MEMORY.to_owned())];
    guest::run_in(place.path(), name, Duration::from_secs(600), &variables, || {
        for driver in DRIVERS {
            written(driver);
        }
    });
}

fn written(driver: &[&str]) {
    // One of the drivers runs without locked memory, as on a machine that swaps.
    let is_locked = !driver.is_empty();
    let settings = format!("lock_memory = {is_locked}\n{SETTINGS}");
    let mut daemon = Daemon::new(&settings, &[("db", "1G")]);
    // The directory is shared with this machine.
    let disk = std::env::current_dir().expect("there is one").join("disk");
    let file = std::fs::File::create(&disk).expect("make a file");
    file.set_len(4 << 30).expect("make a file large");
    let disk = Loop::attach(&disk);
    run("mkfs.ext4", &["-q", disk.device()]);
    let under = Mount::new(disk.device(), &daemon.dir()).expect("it is mounted");
    daemon.restart();
    // As the packaged unit does.
    let score = format!("/proc/{}/oom_score_adj", daemon.id());
    std::fs::write(score, "-900").expect("we are root");
    let device = attach(&daemon, driver);
    let kind = &KINDS[0];
    kind.make(&device);
    let place = Place::new();
    let mounted = Mounted::new(&device, place.join("mnt"));
    let before = stalls();
    fill(&mounted.path.join("small"), 1, SMALL_FILES_BYTES);
    let path = mounted.path.join("large").display().to_string();
    let (filename, size) = (format!("--filename={path}"), format!("--size={DIRTY}"));
    // Writes through a mapping, so that pages are dirty before the file system knows of them.
    let fio = run(
        "fio",
        &[
            &["--name=dirty", "--ioengine=mmap", "--rw=randwrite", "--bs=4k", "--end_fsync=1"][..],
            &["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", &filename, &size],
        ]
        .concat(),
    );
    assert!(fio.contains("err= 0"), "{fio}");
    let stalls = stalls() - before;
    println!("{driver:?}: {stalls} times somebody had to look for memory");
    assert!(stalls > 0, "memory was not short");
    for (thread, flags) in threads(daemon.id()) {
        assert_eq!(flags & FLUSHER, FLUSHER, "{driver:?}: thread {thread} has flags {flags:#x}");
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.id()));
    let status = status.expect("it runs");
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:")).expect("a size");
    assert_eq!(locked.trim() != "0 kB", is_locked, "{driver:?}: {locked}");
    let ours = threads(std::process::id());
    assert!(ours.iter().all(|(_, flags)| flags & FLUSHER == 0), "others have none: {ours:?}");
    run("sysctl", &["-q", "vm.drop_caches=3"]);
    filled(&mounted.path.join("small"), 1, SMALL_FILES_BYTES);
    mounted.unmount(kind);
    no_complaints_of_the_kernel();
    let _ = daemon.json(&["detach", "db"]);
    daemon.stop();
    daemon.fsck();
    drop(under);
}

/// Returns how many memory allocations had to reclaim memory themselves.
fn stalls() -> u64 {
    let text = std::fs::read_to_string("/proc/vmstat").expect("the kernel has it");
    let counts = text.lines().filter(|line| line.starts_with("allocstall_"));
    counts
        .map(|line| line.rsplit(' ').next().expect("a word").parse::<u64>().expect("a number"))
        .sum()
}

/// Returns name and flags of every thread of a process.
fn threads(process: u32) -> Vec<(String, u64)> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).expect("it runs");
    // A thread may end during the scan.
    let stats =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok());
    let threads: Vec<_> = stats
        .map(|stat| {
            let (name, fields) = stat.rsplit_once(')').expect("a name in parentheses");
            let flags = fields.split_whitespace().nth(FLAGS_FIELD).expect("it has flags");
            (name.to_owned(), flags.parse().expect("a number"))
        })
        .collect();
    assert!(!threads.is_empty(), "process {process} has no thread");
    threads
}
