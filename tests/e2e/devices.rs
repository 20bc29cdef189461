//! Volumes as devices of a kernel (ublk, and its nbd driver): data written through the device
//! survives the death of the daemon, and commands at a bad moment are refused.
//!
//! Invariants:
//! - The tests run in a guest kernel (`tests/guest`): this machine's devices are left alone.
//! - When the daemon dies, clients of the device see a pause, never an error or wrong bytes.

use crate::mounted::{no_complaints_of_the_kernel, number_of};
use crate::postgres::Postgres;
use crate::space::Disk;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tests::daemon::Daemon;
use tests::place::{output, run, skip};
use tests::power::guest;
use tests::process::{Process, dies_with_us};
use tests::seed::{Random, seeds};
use tests::{Place, needs, needs_root};

/// A small log, so that it wraps and destages while the device is used.
pub(crate) const SETTINGS: &str = "memory = \"640MiB\"\n\
    [log]\nsize = \"64MiB\"\nfile_size = \"8MiB\"\n\
    [cache]\nsize = \"64MiB\"\n\
    [destage]\nmax_age = \"1s\"\nsegment_size = \"1MiB\"\n";

/// Returns the settings with a log that is written through the page cache or past it, as the seed
/// chooses.
fn with_log_io(settings: &str, seed: u64) -> String {
    let io = if seed.is_multiple_of(2) { "buffered" } else { "direct" };
    settings.replace("[log]\n", &format!("[log]\nio = \"{io}\"\n"))
}

/// Loads, each of which verifies the data that it has written.
const LOADS: &[&[&str]] = &[
    &["--rw=randwrite", "--bsrange=512-1M", "--iodepth=16"],
    &["--rw=write", "--bs=1M", "--iodepth=4"],
    &["--rw=randwrite", "--bs=4k", "--iodepth=32", "--fsync=16"],
    &["--rw=trimwrite", "--bs=16k", "--iodepth=8"],
];

/// Longest time of one load: some seconds, plus the pauses at deaths of the daemon. Over several
/// connections the kernel reissues requests 30 s after the last death. Chosen by hand.
const LOAD_TIME_MAX: Duration = Duration::from_secs(200);
const END_TIME_MAX: Duration = Duration::from_secs(5);

/// Attaches `db` and returns its device.
pub fn attach(daemon: &Daemon, more: &[&str]) -> String {
    let reply = daemon.json(&[&["attach", "db"], more].concat());
    reply["device"].as_str().unwrap_or_else(|| panic!("it has a device: {reply}")).to_owned()
}

/// Makes an ext4 file system on the device and mounts it.
#[track_caller]
fn mount(device: &str, place: &Place) -> PathBuf {
    let mountpoint = place.join("mnt");
    std::fs::create_dir(&mountpoint).expect("make a directory");
    run("mkfs.ext4", &["-q", device]);
    run("mount", &[device, &mountpoint.display().to_string()]);
    mountpoint
}

/// Unmounts the file system and insists that it is whole.
#[track_caller]
fn unmount(mountpoint: &Path, device: &str) {
    run("umount", &[&mountpoint.display().to_string()]);
    let checked = output("e2fsck", &["-fn", device]);
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
}

pub(crate) fn kills_wanted() -> u64 {
    let wanted = std::env::var("SPINDLE_TEST_DEVICE_KILLS").ok();
    wanted.map_or(4, |text| text.parse().expect("a number of kills"))
}

pub(crate) fn variables(seed: u64) -> Vec<(&'static str, String)> {
    let kills = std::env::var("SPINDLE_TEST_DEVICE_KILLS").ok();
    let kills = kills.map(|kills| ("SPINDLE_TEST_DEVICE_KILLS", kills));
    [Some(("SEED", seed.to_string())), kills].into_iter().flatten().collect()
}

#[test]
fn a_device_outlives_its_daemon() {
    needs_root!();
    needs!("fio");
    for seed in seeds(1) {
        let name = "devices::a_device_outlives_its_daemon";
        let time = Duration::from_secs(240 + 20 * kills_wanted());
        guest::run(name, time, &variables(seed), || {
            outlives(seed, &["--queues", "1", "--logical-block", "512"]);
        });
    }
}

#[test]
fn a_device_of_nbd_outlives_its_daemon() {
    needs_root!();
    needs!("fio");
    for seed in seeds(1) {
        let name = "devices::a_device_of_nbd_outlives_its_daemon";
        let time = Duration::from_secs(240 + 40 * kills_wanted());
        guest::run(name, time, &variables(seed), || {
            outlives(seed, &["--nbd", "--logical-block", "512"]);
        });
    }
}

#[test]
fn a_device_of_several_connections_outlives_its_daemon() {
    needs_root!();
    needs!("fio");
    for seed in seeds(1) {
        let name = "devices::a_device_of_several_connections_outlives_its_daemon";
        // The kernel reissues requests after 30 s.
        let time = Duration::from_secs(240 + 60 * kills_wanted());
        guest::run(name, time, &variables(seed), || {
            outlives(seed, &["--nbd", "--connections", "4", "--logical-block", "512"]);
        });
    }
}

fn outlives(seed: u64, options: &[&str]) {
    println!("SEED={seed}");
    let mut random = Random::new(seed, 0);
    let settings = with_log_io(SETTINGS, seed);
    let mut daemon = Daemon::started(&settings, &[("db", "256M")]);
    daemon.announce("the volume is larger than configured and stays so");
    daemon.announce("could not resize the device of a volume");
    let device = attach(&daemon, options);
    let place = Place::new();
    let (mut kills, mut stops, mut turn, mut size_mib) = (0, 0, 0, 256);
    while kills < kills_wanted() || turn < LOADS.len() {
        let load = LOADS[turn % LOADS.len()];
        turn += 1;
        let mut fio = Command::new("fio");
        fio.args(["--name=load", "--ioengine=libaio", "--direct=1", "--size=32M"]);
        // Slow enough for some kills per load, and for the store, which only grows, to fit in
        // memory.
        fio.arg("--rate=16M");
        fio.args(["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--verify_backlog=256"]);
        fio.args([
            &format!("--filename={device}"),
            &format!("--randseed={}", random.below(1 << 30)),
        ]);
        fio.args(load).current_dir(place.path());
        let log = place.join("fio.log");
        let mut fio = Process::start(&mut fio, &log).expect("fio starts");
        // At moments that are unrelated to the daemon's actions.
        let mut until = Instant::now() + Duration::from_millis(300 + random.below(900));
        let begun = Instant::now();
        let status = loop {
            let left = until.saturating_duration_since(Instant::now());
            if let Some(status) = fio.wait(left.max(Duration::from_millis(1))) {
                break status;
            }
            assert!(
                begun.elapsed() < LOAD_TIME_MAX + END_TIME_MAX * ((kills + stops) as u32),
                "SEED={seed}: fio {load:?} hangs after {kills} kills and {stops} stops of the daemon; {}\n{}",
                daemon.json(&["attach", "list"]),
                daemon.tail()
            );
            if Instant::now() >= until && kills < kills_wanted() {
                let moment = random.below(6);
                if moment == 0 {
                    // The device is in use, and the daemon has started recently.
                    size_mib += 8;
                    let _ = daemon.json(&["volume", "resize", "db", &format!("{size_mib}M")]);
                } else if moment == 1 {
                    // The daemon hangs for a while; sometimes it is killed instead of resumed.
                    daemon.pause();
                    let _ = fio.wait(Duration::from_millis(100 + random.below(1400)));
                }
                match moment {
                    0 => {}
                    1 if random.below(2) == 0 => daemon.resume(),
                    // An upgrade: requests in flight are answered first, or left to the next
                    // daemon.
                    2 | 3 => {
                        daemon.stop();
                        daemon.restart();
                        stops += 1;
                    }
                    _ => {
                        daemon.kill();
                        daemon.restart();
                        kills += 1;
                    }
                }
                until = Instant::now() + Duration::from_millis(300 + random.below(900));
            } else if Instant::now() >= until {
                until = Instant::now() + Duration::from_secs(1);
            }
        };
        let said = std::fs::read_to_string(&log).unwrap_or_default();
        assert!(status.success(), "SEED={seed}: fio {load:?}: {status}\n{said}\n{}", daemon.tail());
    }
    let listed = daemon.json(&["attach", "list"]);
    assert_eq!(listed["attachments"][0]["failure_count"], 0, "{listed}");
    let complaints = daemon.unannounced();
    assert!(complaints.is_empty(), "SEED={seed}: {complaints:#?}");
    println!(
        "{kills} kills and {stops} stops of the daemon, {turn} loads, {size_mib} MiB in the end"
    );
    let _ = daemon.json(&["detach", "db"]);
    assert_eq!(size_of(&device), 0, "the device is gone");
    daemon.stop();
    daemon.fsck();
}

/// Returns the bytes of a device; 0 for one that is gone or not connected.
pub(crate) fn size_of(device: &str) -> u64 {
    let name = device.trim_start_matches("/dev/");
    let sectors = std::fs::read_to_string(format!("/sys/block/{name}/size")).unwrap_or_default();
    sectors.trim().parse::<u64>().unwrap_or(0) * 512
}

#[test]
fn a_mounted_file_system_outlives_the_daemon() {
    needs_root!();
    needs!("mkfs.ext4", "tar");
    for seed in seeds(1) {
        let name = "devices::a_mounted_file_system_outlives_the_daemon";
        guest::run(name, Duration::from_secs(300), &variables(seed), || mounted(seed));
    }
}

fn mounted(seed: u64) {
    println!("SEED={seed}");
    let mut random = Random::new(seed, 0);
    let mut daemon = Daemon::started(SETTINGS, &[("db", "512M")]);
    // Two queues; in a guest with one processor they become one.
    let device = attach(&daemon, &["--queues", "2", "--logical-block", "4096"]);
    let place = Place::new();
    let mountpoint = mount(&device, &place);
    let busy = daemon.command(&["detach", "db"]);
    assert!(!busy.status.success());
    let said = String::from_utf8_lossy(&busy.stderr).into_owned();
    assert!(said.contains("is in use") && said.contains("unmount"), "{said}");
    // A few thousand files that every machine with a compiler has.
    let mut copy = Command::new("sh");
    copy.args([
        "-c",
        "cp -r /usr/include \"$1\" && sync && echo 3 >/proc/sys/vm/drop_caches",
        "sh",
    ]);
    copy.arg(mountpoint.join("copy"));
    let mut copy = Process::start(&mut copy, &place.join("cp.log")).expect("cp starts");
    let status = loop {
        if let Some(status) = copy.wait(Duration::from_millis(200 + random.below(800))) {
            break status;
        }
        daemon.kill();
        daemon.restart();
    };
    let said = std::fs::read_to_string(place.join("cp.log")).unwrap_or_default();
    assert!(status.success(), "SEED={seed}: {said}\n{}", daemon.tail());
    daemon.kill();
    daemon.restart();
    run(
        "diff",
        &["-r", "--no-dereference", "/usr/include", &mountpoint.join("copy").display().to_string()],
    );
    unmount(&mountpoint, &device);
    let _ = daemon.json(&["detach", "db"]);
    daemon.stop();
    daemon.fsck();
    no_complaints_of_the_kernel();
}

#[test]
fn postgresql_on_a_device_sees_a_pause_where_the_daemon_dies() {
    needs_root!();
    needs!("mkfs.ext4", "setpriv");
    if Postgres::programs().is_none() {
        return skip("PostgreSQL is not installed");
    }
    for seed in seeds(1) {
        let name = "devices::postgresql_on_a_device_sees_a_pause_where_the_daemon_dies";
        let seconds = number_of(PGBENCH_SECONDS, 10);
        let mut variables = variables(seed);
        variables.push((PGBENCH_SECONDS, seconds.to_string()));
        guest::run(name, Duration::from_secs(400 + 2 * seconds), &variables, || database(seed));
    }
}

/// Variable with the length of pgbench's load, in seconds.
const PGBENCH_SECONDS: &str = "SPINDLE_TEST_PGBENCH_SECONDS";

fn database(seed: u64) {
    println!("SEED={seed}");
    let mut random = Random::new(seed, 0);
    let mut daemon = Daemon::started(SETTINGS, &[("db", "1G")]);
    let device = attach(&daemon, &[]);
    let place = Place::new();
    let mountpoint = mount(&device, &place);
    let programs = Postgres::programs().expect("it is installed");
    let postgres = Postgres::made(programs, &mountpoint, &place);
    postgres.bench(&["-i", "-q", "-s", "2"]);
    let bench = std::thread::spawn(move || {
        let seconds = number_of(PGBENCH_SECONDS, 10).to_string();
        let said = postgres.bench(&["-T", &seconds, "-c", "4"]);
        (postgres, said)
    });
    let mut kills = 0;
    while !bench.is_finished() {
        // A moment that is unrelated to the daemon's actions.
        std::thread::sleep(Duration::from_millis(500 + random.below(1500)));
        // Now and then the daemon is stopped, as for an upgrade.
        if kills % 3 == 2 {
            daemon.stop();
            daemon.restart();
        }
        daemon.kill();
        daemon.restart();
        kills += 1;
    }
    let (mut postgres, said) = bench.join().expect("pgbench ends well");
    assert!(kills >= 2, "it was killed {kills} times");
    println!("{said}");
    assert!(said.contains("number of failed transactions: 0 "), "{said}");
    postgres.check();
    unmount(&mountpoint, &device);
    let _ = daemon.json(&["detach", "db"]);
    daemon.stop();
    daemon.fsck();
    no_complaints_of_the_kernel();
}

#[test]
fn bad_moments_of_a_device_are_refused_and_lose_nothing() {
    needs_root!();
    needs!("blkdiscard", "nbdinfo");
    let name = "devices::bad_moments_of_a_device_are_refused_and_lose_nothing";
    guest::run(name, Duration::from_secs(120), &[], bad_moments);
}

/// Insists that a command fails with this text in its error.
#[track_caller]
pub(crate) fn refused(daemon: &Daemon, arguments: &[&str], why: &str) {
    let output = daemon.command(arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains(why), "{arguments:?}: {said}");
}

fn bad_moments() {
    let mut daemon = Daemon::started(SETTINGS, &[("db", "64M"), ("other", "64M")]);
    daemon.announce("the volume is larger than configured and stays so");
    daemon.announce("could not resize the device of a volume");
    daemon.announce("is attached but not served; its device waits");
    refused(&daemon, &["attach", "nothing"], "there is none");
    refused(&daemon, &["attach", "elsewhere/db"], "is called main, not elsewhere");
    refused(&daemon, &["attach", "db", "--logical-block", "1024"], "512 or 4096");
    refused(&daemon, &["attach", "db", "--depth", "0"], "a depth of 1 to 4096");
    refused(&daemon, &["attach", "db", "--queues", "100"], "raise `memory`");
    refused(&daemon, &["detach", "db"], "is not attached");
    let uri = daemon.unix("db").uri();
    let device = attach(&daemon, &[]);
    assert_eq!(daemon.json(&["attach", "list"])["attachments"].as_array().map(Vec::len), Some(1));
    refused(&daemon, &["volume", "resize", "db", "32M", "--shrink"], "detach it first");
    // Users that the kernel does not count: a loop device, and a mapping whose file is closed.
    let over = run("losetup", &["--find", "--show", &device]);
    refused(&daemon, &["detach", "db"], over.trim());
    run("losetup", &["--detach", over.trim()]);
    let mut mapper = mapper(&device);
    refused(&daemon, &["detach", "db"], "(python3");
    mapper.kill().expect("it runs");
    mapper.wait().expect("it ends");
    refused(&daemon, &["attach", "db"], "it is attached as /dev/spindle/main/db");
    refused(&daemon, &["volume", "rm", "db"], "detach it first");
    refused(&daemon, &["attach", "--cleanup"], "in use by process");
    // A second writer needs `--shared`.
    assert!(!output("nbdinfo", &[&uri]).status.success(), "NBD clients are refused");
    assert!(output("nbdinfo", &[&daemon.unix("other").uri()]).status.success());
    // The limits that the device reports are true.
    let queue = |name: &str| {
        let path = format!("/sys/block/{}/queue/{name}", device.trim_start_matches("/dev/"));
        std::fs::read_to_string(path).expect("the kernel has it").trim().to_owned()
    };
    assert_eq!((queue("write_cache"), queue("fua")), ("write back".to_owned(), "1".to_owned()));
    assert_eq!(
        (queue("logical_block_size"), queue("physical_block_size")),
        ("4096".into(), "4096".into())
    );
    assert_eq!(queue("discard_granularity"), "4096");
    // A link with a stable name.
    let link = "/dev/spindle/main/db";
    assert_eq!(std::fs::read_link(link).expect("there is a link"), Path::new(&device));
    let write = |text: &str| {
        let script =
            format!("printf %-4096s {text} | dd of={link} bs=4096 count=1 oflag=direct,sync");
        run("sh", &["-c", &script]);
    };
    let read =
        || run("sh", &["-c", &format!("dd if={link} bs=4096 count=1 iflag=direct | tr -d ' \\0'")]);
    write("before");
    // If the daemon does not come back, the device and the requests of its users wait.
    daemon.kill();
    refused(&daemon, &["attach", "other"], "no daemon runs");
    let mut waiting = reader(&device);
    let cleaned = daemon.json(&["attach", "--cleanup"]);
    assert!(cleaned["message"].as_str().is_some_and(|said| said.contains(&device)), "{cleaned}");
    let _ = waiting.wait().expect("its requests have ended");
    assert!(!Path::new(&device).exists());
    // After that nothing is attached automatically, and the data is present.
    daemon.restart();
    assert_eq!(daemon.json(&["attach", "list"])["attachments"].as_array().map(Vec::len), Some(0));
    let again = attach(&daemon, &["--shared"]);
    assert_eq!(read(), "before");
    assert!(output("nbdinfo", &[&uri]).status.success(), "NBD clients are welcome");
    run("blkdiscard", &[&again]);
    assert_eq!(read(), "");
    write("after");
    // A detach that cannot be recorded has not succeeded.
    let (list, kept) = (daemon.dir().join("attachments.json"), daemon.dir().join("kept"));
    std::fs::rename(&list, &kept).expect("rename the list");
    std::fs::create_dir(&list).expect("put a directory in its place");
    refused(&daemon, &["detach", "db"], "the list of devices still names it");
    assert!(!Path::new(&again).exists(), "the device is gone");
    assert_eq!(daemon.json(&["attach", "list"])["attachments"].as_array().map(Vec::len), Some(1));
    std::fs::remove_dir(&list).expect("remove the directory");
    let _ = daemon.json(&["detach", "--force", "db"]);
    assert_eq!(daemon.json(&["attach", "list"])["attachments"].as_array().map(Vec::len), Some(0));
    let again = attach(&daemon, &["--shared"]);
    // While the device is in use, on kernels that support it.
    let _ = daemon.json(&["volume", "resize", "db", "80M"]);
    let until = Instant::now() + Duration::from_secs(20);
    let keeps = || daemon.log().contains("could not resize the device of a volume");
    while size_of(&again) != 80 << 20 && !keeps() {
        assert!(Instant::now() < until, "the kernel keeps the size {}", size_of(&again));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(keeps(), !can_be_resized(), "Linux can be told from 6.16 on");
    // After an orderly stop the device stays; the volume grows meanwhile.
    daemon.stop();
    assert!(Path::new(&again).exists(), "the device waits for the next daemon");
    refused(&daemon, &["volume", "rm", "db"], "detach it first");
    let _ = daemon.json(&["volume", "resize", "db", "96M"]);
    daemon.restart();
    assert_eq!(size_of(&again), if can_be_resized() { 96 << 20 } else { 64 << 20 });
    assert_eq!(read(), "after");
    let _ = daemon.json(&["detach", link]);
    assert!(!Path::new(link).exists());
    daemon.stop();
    daemon.fsck();
}

#[test]
fn a_read_only_volume_is_a_read_only_device() {
    needs_root!();
    let name = "devices::a_read_only_volume_is_a_read_only_device";
    guest::run(name, Duration::from_secs(120), &[], read_only);
}

fn read_only() {
    for driver in [&[][..], &["--nbd"]] {
        let mut daemon = Daemon::started(SETTINGS, &[("db", "64M")]);
        daemon.announce("could not carry out a request");
        let set = |is_read_only: bool| {
            let value = is_read_only.to_string();
            let _ = daemon.json(&["volume", "set", "db", "--read-only", &value]);
        };
        let is_read_only = |device: &str| run("blockdev", &["--getro", device]).trim() == "1";
        let can_write = |device: &str| {
            let output_file = format!("of={device}");
            let block = ["bs=4096", "count=1", "oflag=direct"];
            let arguments = [&["if=/dev/zero", &output_file][..], &block].concat();
            output("dd", &arguments).status.success()
        };
        set(true);
        let device = attach(&daemon, driver);
        assert!(is_read_only(&device) && !can_write(&device), "{driver:?}");
        assert!(reader(&device).wait().expect("dd ends").success(), "{driver:?}");
        set(false);
        assert!(is_read_only(&device), "{driver:?}: the kernel knows what it was told first");
        let _ = daemon.json(&["detach", "db"]);
        let device = attach(&daemon, driver);
        assert!(!is_read_only(&device) && can_write(&device), "{driver:?}");
        // From here on its writers get errors.
        set(true);
        assert!(!can_write(&device), "{driver:?}");
        assert!(reader(&device).wait().expect("dd ends").success(), "{driver:?}");
        set(false);
        assert!(can_write(&device), "{driver:?}");
        let listed = daemon.json(&["attach", "list"]);
        let counted = &listed["attachments"][0];
        assert!(counted["written_bytes"].as_u64() >= Some(8192), "{driver:?}: {listed}");
        assert!(counted["failure_count"].as_u64() > Some(0), "{driver:?}: {listed}");
        let _ = daemon.json(&["detach", "db"]);
        daemon.stop();
        daemon.fsck();
    }
}

/// Whether the kernel can change the size of a ublk device, which it can from 6.16 on.
fn can_be_resized() -> bool {
    guest::release() >= (6, 16)
}

#[test]
fn bad_moments_of_an_nbd_device_are_refused_and_lose_nothing() {
    needs_root!();
    let name = "devices::bad_moments_of_an_nbd_device_are_refused_and_lose_nothing";
    guest::run(name, Duration::from_secs(120), &[], bad_moments_of_nbd);
}

fn bad_moments_of_nbd() {
    let mut daemon = Daemon::started(SETTINGS, &[("db", "64M"), ("other", "64M")]);
    daemon.announce("the volume is larger than configured and stays so");
    let place = Place::new();
    refused(&daemon, &["attach", "db", "--nbd", "--queues", "2"], "cannot be used with");
    refused(&daemon, &["attach", "db", "--connections", "2"], "--nbd");
    refused(&daemon, &["attach", "db", "--nbd", "--connections", "17"], "1 to 16 connections");
    refused(&daemon, &["attach", "db", "--nbd", "--logical-block", "1000"], "512 to 4096");
    refused(&daemon, &["attach", "db", "--nbd", "--dead-timeout", "10ms"], "at least 1 s");
    assert_eq!(daemon.json(&["attach", "list"])["attachments"].as_array().map(Vec::len), Some(0));
    let device = attach(&daemon, &["--nbd"]);
    refused(&daemon, &["attach", "db"], "it is attached as /dev/spindle/main/db");
    refused(&daemon, &["attach", "--cleanup", &device], "a process serves it");
    assert_eq!(size_of(&device), 64 << 20);
    let queue = |name: &str| {
        let path = format!("/sys/block/{}/queue/{name}", device.trim_start_matches("/dev/"));
        std::fs::read_to_string(path).expect("the kernel has it").trim().to_owned()
    };
    assert_eq!((queue("write_cache"), queue("fua")), ("write back".to_owned(), "1".to_owned()));
    assert_eq!(
        (queue("logical_block_size"), queue("physical_block_size")),
        ("4096".into(), "4096".into())
    );
    assert_eq!(queue("discard_granularity"), "4096");
    // The size changes while the device is in use.
    let _ = daemon.json(&["volume", "resize", "db", "96M"]);
    let until = Instant::now() + Duration::from_secs(20);
    while size_of(&device) != 96 << 20 {
        assert!(Instant::now() < until, "the kernel keeps the size {}", size_of(&device));
        std::thread::sleep(Duration::from_millis(5));
    }
    let mountpoint = mount(&device, &place);
    refused(&daemon, &["detach", "db"], "is in use");
    std::fs::write(mountpoint.join("kept"), b"kept").expect("write a file");
    unmount(&mountpoint, &device);
    // If the daemon does not come back, the device and its users wait.
    daemon.kill();
    let mut waiting = reader(&device);
    let cleaned = daemon.json(&["attach", "--cleanup"]);
    assert!(cleaned["message"].as_str().is_some_and(|said| said.contains(&device)), "{cleaned}");
    assert!(!waiting.wait().expect("its requests have ended").success());
    daemon.restart();
    assert_eq!(daemon.json(&["attach", "list"])["attachments"].as_array().map(Vec::len), Some(0));
    // A device that waits for one second only.
    let device = attach(&daemon, &["--nbd", "--dead-timeout", "1s"]);
    daemon.kill();
    assert!(!reader(&device).wait().expect("its requests have ended").success());
    daemon.restart();
    // The kernel has given up the device, but the daemon serves it again, with its data.
    let device = daemon.json(&["attach", "list"])["attachments"][0]["device"].clone();
    let device = device.as_str().expect("it is served").to_owned();
    run("mount", &[&device, &mountpoint.display().to_string()]);
    assert_eq!(std::fs::read(mountpoint.join("kept")).expect("it is there"), b"kept");
    unmount(&mountpoint, &device);
    let _ = daemon.json(&["detach", &device]);
    daemon.stop();
    daemon.fsck();
}

/// Starts a process that reads a block.
pub(crate) fn reader(device: &str) -> std::process::Child {
    let mut reader = Command::new("dd");
    reader.args([&format!("if={device}"), "of=/dev/null", "bs=4096", "count=1", "iflag=direct"]);
    reader.stdin(Stdio::null()).stderr(Stdio::null());
    dies_with_us(&mut reader).spawn().expect("dd starts")
}

/// Starts a process that has a device mapped, without an open file of it.
fn mapper(device: &str) -> std::process::Child {
    // Python's module mmap would keep the file open.
    const SCRIPT: &str = "import ctypes, os, sys, time\n\
        library = ctypes.CDLL(None)\n\
        library.mmap.restype = ctypes.c_void_p\n\
        file = os.open(sys.argv[1], os.O_RDWR)\n\
        place = library.mmap(None, ctypes.c_size_t(4096), 3, 1, file, ctypes.c_long(0))\n\
        os.close(file)\n\
        print('mapped' if place != ctypes.c_void_p(-1).value else 'failed', flush=True)\n\
        time.sleep(600)\n";
    let mut mapper = Command::new("python3");
    mapper.args(["-I", "-c", SCRIPT, device]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut mapper = dies_with_us(&mut mapper).spawn().expect("python3 starts");
    let mut said = String::new();
    let output = mapper.stdout.take().expect("a pipe");
    std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut said).expect("a line");
    assert_eq!(said, "mapped\n");
    mapper
}

#[test]
fn a_device_whose_log_is_full_can_be_taken_away() {
    needs_root!();
    needs!("fio");
    let name = "devices::a_device_whose_log_is_full_can_be_taken_away";
    guest::run(name, Duration::from_secs(240), &[], taken_away);
}

/// Returns the device to which a volume's link leads, without its directory.
fn link_of(volume: &str) -> String {
    let device =
        std::fs::read_link(format!("/dev/spindle/main/{volume}")).expect("there is a link");
    device.file_name().expect("it has a name").to_string_lossy().into_owned()
}

/// Waits until nothing is added to the log any more.
#[track_caller]
pub(crate) fn wait_for_full_log(daemon: &Daemon) {
    let lsn = || daemon.json(&["status"])["log"]["last_lsn"].as_u64().expect("a number");
    let until = Instant::now() + Duration::from_secs(60);
    let (mut last, mut since) = (0, Instant::now());
    while since.elapsed() < Duration::from_secs(3) {
        let now = lsn();
        if now != last {
            (last, since) = (now, Instant::now());
        }
        assert!(Instant::now() < until, "the log never was full: {now}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Detaches by force while writers wait for room that does not come, because the store is full too.
fn taken_away() {
    for driver in [&[][..], &["--nbd"]] {
        let mut daemon = Daemon::new(SETTINGS, &[("db", "256M")]);
        let store = Disk::mount(daemon.place().join("store"), 4);
        daemon.argue(&["--store", &store.path().display().to_string()]);
        daemon.announce("");
        daemon.restart();
        let device = attach(&daemon, driver);
        // More data at a time than a queue has memory for, and fewer requests than it has tags.
        let mut writer = Command::new("fio");
        writer.args(["--name=fill", "--ioengine=libaio", "--direct=1", "--rw=write", "--bs=1M"]);
        writer.args(["--iodepth=8", "--size=256M", &format!("--filename={device}")]);
        writer.current_dir(daemon.place().path());
        writer.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut writer = dies_with_us(&mut writer).spawn().expect("fio starts");
        wait_for_full_log(&daemon);
        assert!(writer.try_wait().expect("look").is_none(), "{driver:?}: the writer waits");
        // Readers do not wait behind the writers.
        let input = format!("if={device}");
        run("timeout", &["20", "dd", &input, "of=/dev/null", "bs=1M", "count=8", "iflag=direct"]);
        refused(&daemon, &["detach", "db"], "is in use");
        let asked = Instant::now();
        let _ = daemon.json(&["detach", "--force", "db"]);
        let took = asked.elapsed();
        println!("{driver:?}: taken away in {took:?}");
        assert!(took < Duration::from_secs(20), "{driver:?}: a forced detach took {took:?}");
        assert!(!writer.wait().expect("fio ends").success(), "{driver:?}: its users get errors");
        assert!(!Path::new(&device).exists() || size_of(&device) == 0, "{driver:?}");
        // Once there is room, the volume works like any other.
        store.resize(400);
        // The queued writes of the old writer come first, and the store is tried again after a
        // pause.
        let until = Instant::now() + Duration::from_secs(60);
        while !daemon.command(&[&["attach", "db"], driver].concat()).status.success() {
            assert!(Instant::now() < until, "{driver:?}: {}", daemon.tail());
        }
        let again = format!("/dev/{}", link_of("db"));
        let script = format!(
            "printf %-4096s kept | dd of={again} bs=4096 count=1 oflag=direct,sync && \
             dd if={again} bs=4096 count=1 iflag=direct | tr -d ' '"
        );
        assert_eq!(run("sh", &["-c", &script]), "kept");
        let _ = daemon.json(&["detach", "db"]);
        daemon.stop();
        daemon.fsck();
    }
}

#[test]
fn a_device_that_is_not_served_keeps_others_from_its_volume() {
    needs_root!();
    needs!("nbdinfo");
    let name = "devices::a_device_that_is_not_served_keeps_others_from_its_volume";
    guest::run(name, Duration::from_secs(240), &[], not_served);
}

fn not_served() {
    let mut daemon = Daemon::started(SETTINGS, &[("db", "64M")]);
    let device = attach(&daemon, &["--queues", "1"]);
    daemon.kill();
    // Another process has the device's node open, so the daemon cannot take over the device.
    let node = device.replace("ublkb", "ublkc");
    let until = Instant::now() + Duration::from_secs(20);
    let held = loop {
        match std::fs::File::open(&node) {
            Ok(held) => break held,
            // The killed daemon has not released it yet.
            Err(error) => assert!(Instant::now() < until, "open {node}: {error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    daemon.announce("is attached but not served; its device waits");
    daemon.restart();
    let listed = daemon.json(&["attach", "list"]);
    assert!(listed["attachments"][0]["failure"].is_string(), "{listed}");
    assert!(listed["attachments"][0]["device"].is_null(), "{listed}");
    let uri = daemon.unix("db").uri();
    assert!(!output("nbdinfo", &[&uri]).status.success(), "NBD clients are refused");
    refused(&daemon, &["attach", "db", "--shared"], "it was without --shared");
    refused(&daemon, &["attach", "db", "--nbd"], "by the other driver");
    refused(&daemon, &["attach", "db"], "it was attached, and is not served");
    assert!(!output("nbdinfo", &[&uri]).status.success(), "and still are");
    refused(&daemon, &["detach", "db"], "--force");
    let mut waiting = reader(&device);
    drop(held);
    // Once the cause is removed, the device is served again: by the same daemon, and by the next.
    assert_eq!(attach(&daemon, &[]), device);
    assert!(waiting.wait().expect("dd ends").success());
    refused(&daemon, &["attach", "db"], "it is attached as");
    daemon.stop();
    daemon.restart();
    assert!(reader(&device).wait().expect("dd ends").success());
    let _ = daemon.json(&["detach", "db"]);
    assert!(output("nbdinfo", &[&uri]).status.success());
    daemon.stop();
    daemon.fsck();
}
