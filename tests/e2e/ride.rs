//! A pool whose directory is on a device that moves to another machine: it opens there without a
//! flag, with every acknowledged write that reached the device, and the old owner is fenced.
//!
//! Invariants:
//! - The tests run in a guest kernel (`tests/guest`): no file system is mounted on this machine. The
//!   other machine is another boot id and another mount point.
//! - The store is a directory that both machines reach; nothing but the device moves.

use crate::conditions::conditions;
use crate::power::Boot;
use crate::stores::{History, VOLUMES, open};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tests::daemon::Daemon;
use tests::place::run;
use tests::power::device::{Loop, Mount};
use tests::power::guest;
use tests::seed::{Random, seeds};
use tests::{Place, needs, needs_root};

/// The log is written through the page cache, which a lost machine takes along. No destage moves data
/// to the store meanwhile.
const SETTINGS: &str = "memory = \"640MiB\"\n\
    [log]\nsize = \"64MiB\"\nfile_size = \"4MiB\"\nio = \"buffered\"\n\
    [cache]\nsize = \"0\"\n\
    [destage]\nmax_age = \"1h\"\n";
/// Size of the device. Chosen by hand: twice the log.
const DEVICE_BYTES: u64 = 128 << 20;
/// Longest wait for the old owner to learn that it was fenced, and for a device to be idle.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Makes a device with a file system in a file.
fn device(place: &Place) -> PathBuf {
    let image = place.join("device");
    let file = std::fs::File::create(&image).expect("make a file");
    file.set_len(DEVICE_BYTES).expect("a sparse file");
    run("mkfs.ext4", &["-q", &image.display().to_string()]);
    image
}

/// Pause between two rounds of the kernel's write-back; 0 turns it off.
const WRITEBACK: &str = "/proc/sys/vm/dirty_writeback_centisecs";
/// The volume whose clients on other machines were answered ahead of stable storage, by choice.
const FLUSHED: &str = "db";

/// A machine that has the device: its mounted file system, and a daemon whose directory is there.
struct Machine {
    daemon: Daemon,
    _mount: Mount,
    _loop: Loop,
}

impl Machine {
    /// Mounts the device at a place of this name.
    #[track_caller]
    fn with(place: &Place, device: &Path, name: &str) -> Machine {
        let attached = Loop::attach(device);
        let mut daemon = Daemon::new(SETTINGS, VOLUMES);
        let mounted = place.join(name);
        let mount = Mount::new(attached.device(), &mounted).expect("the device is mounted");
        let pool = mounted.join("pool");
        std::fs::create_dir_all(&pool).expect("make a directory");
        std::os::unix::fs::symlink(pool, daemon.dir()).expect("make a link");
        daemon.argue(&["--store", &place.join("store").display().to_string()]);
        Machine { daemon, _mount: mount, _loop: attached }
    }

    /// Makes the pool.
    #[track_caller]
    fn first(place: &Place, device: &Path) -> Machine {
        let mut machine = Machine::with(place, device, "first");
        machine.daemon.restart();
        let durability = ["volume", "set", FLUSHED, "--durability", "flush"];
        let _ = machine.daemon.json(&durability);
        machine
    }

    /// Serves the pool of a machine that did not stop in order.
    #[track_caller]
    fn second(place: &Place, device: &Path) -> Machine {
        let mut machine = Machine::with(place, device, "second");
        for condition in ["log-tail-unproven", "writes-lost", "data-at-risk"] {
            machine.daemon.announce(&format!("condition=\"{condition}\""));
        }
        machine.daemon.restart();
        machine
    }
}

/// Insists that the daemon reports that unflushed writes may be gone, and that the volume which may
/// have lost some refuses clients of other machines until that is accepted.
#[track_caller]
fn accept_loss(daemon: &Daemon) {
    assert_eq!(conditions(daemon, "log-tail-unproven").len(), 1);
    let lost = conditions(daemon, "writes-lost");
    assert!(lost.len() == 1 && lost[0]["subject"] == FLUSHED, "{lost:?}");
    let _ = daemon.json(&["volume", "accept-loss", FLUSHED]);
    assert!(conditions(daemon, "writes-lost").is_empty());
}

/// Runs a test in the guest, once for each seed.
fn ride(name: &str, test: fn(u64)) {
    needs_root!();
    needs!("mkfs.ext4", "losetup");
    for seed in seeds(1) {
        let variables = [("SEED", seed.to_string())];
        guest::run(name, Duration::from_secs(240), &variables, || test(seed));
    }
}

#[test]
fn unmounted_device_brings_every_acknowledged_write() {
    ride("ride::unmounted_device_brings_every_acknowledged_write", |seed| {
        let (place, mut random) = (Place::new(), Random::new(seed, 3));
        let boot = Boot::new(&place);
        let device = device(&place);
        let mut first = Machine::first(&place, &device);
        let mut history = History::new(seed);
        let mut connections = open(&first.daemon);
        history.run_for(&mut connections, Duration::from_millis(500));
        connections[0].flush();
        history.run_for(&mut connections, Duration::from_millis(500));
        first.daemon.kill();
        // Unmounts the file system and detaches the device.
        drop(first);
        boot.again(&mut random);
        let mut second = Machine::second(&place, &device);
        let mut connections = open(&second.daemon);
        assert_eq!(history.prefix(&mut connections), history.count(), "{}", second.daemon.tail());
        accept_loss(&second.daemon);
        history.run_for(&mut connections, Duration::from_millis(300));
        assert_eq!(history.prefix(&mut connections), history.count());
        drop(connections);
        second.daemon.stop();
        second.daemon.fsck();
    });
}

#[test]
fn device_of_a_lost_machine_brings_every_flushed_write() {
    ride("ride::device_of_a_lost_machine_brings_every_flushed_write", |seed| {
        let (place, mut random) = (Place::new(), Random::new(seed, 3));
        let boot = Boot::new(&place);
        // The guest's kernel writes nothing back by the clock: what is not synced stays in memory.
        std::fs::write(WRITEBACK, "0").expect("set a parameter of the guest's kernel");
        let device = device(&place);
        let mut first = Machine::first(&place, &device);
        let mut history = History::new(seed);
        let mut connections = open(&first.daemon);
        history.run_for(&mut connections, Duration::from_millis(500));
        // One log has the writes of all volumes.
        connections[0].flush();
        let flushed = history.count();
        history.run_for(&mut connections, Duration::from_millis(200));
        let acknowledged = history.count();
        // The first machine stands still, is cut off from its device, and later continues.
        first.daemon.pause();
        let moved = place.join("moved");
        copy_instant(&device, &moved);
        boot.again(&mut random);
        let mut second = Machine::second(&place, &moved);
        let found = history.prefix(&mut open(&second.daemon));
        println!("{found} of {acknowledged} writes are on the device, {flushed} were flushed");
        assert!(found >= flushed, "{found} of {flushed}: {}", second.daemon.tail());
        assert!(found < acknowledged, "the page cache of the first machine has moved along");
        accept_loss(&second.daemon);
        // The store fences the first machine.
        first.daemon.announce("");
        first.daemon.resume();
        let begun = Instant::now();
        while history.write(&mut connections) {
            assert!(begun.elapsed() < WAIT_MAX, "the old owner still acknowledges writes");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(first.daemon.wait(WAIT_MAX).code(), Some(1));
        assert!(first.daemon.tail().contains("was taken over"), "{}", first.daemon.tail());
        assert_eq!(history.prefix(&mut open(&second.daemon)), found);
        second.daemon.stop();
        second.daemon.fsck();
    });
}

/// Copies a device as it was at one instant: nothing is written to it while it is read twice.
#[track_caller]
fn copy_instant(device: &Path, to: &Path) {
    let begun = Instant::now();
    let read = || std::fs::read(device).expect("read the device");
    let mut bytes = read();
    loop {
        let again = read();
        if bytes == again {
            return std::fs::write(to, bytes).expect("write the copy");
        }
        assert!(begun.elapsed() < WAIT_MAX, "the device is never idle");
        bytes = again;
    }
}
