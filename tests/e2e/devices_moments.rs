//! Bad moments of devices that need a second daemon or a seeded failure.
//!
//! Invariants:
//! - Those of [`crate::devices`].

use crate::devices::{SETTINGS, attach, reader, refused, size_of};
use crate::mounted::{TAIL_LOST, attach_volume};
use crate::stores::on_s3;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tests::bucket::{Bucket, Care};
use tests::cut::{Line, Proxy};
use tests::daemon::Daemon;
use tests::place::{binary, output, run, skip};
use tests::power::guest;
use tests::{needs, needs_root};

/// Volumes, with the drivers of their devices.
const VOLUMES: [(&str, &[&str]); 2] = [("db", &[]), ("other", &["--nbd"])];

#[test]
fn two_daemons_do_not_both_go_on_with_a_device() {
    needs_root!();
    let name = "devices_moments::two_daemons_do_not_both_go_on_with_a_device";
    guest::run(name, Duration::from_secs(180), &[], twins);
}

/// Writes a block to stable storage.
pub(crate) fn write(device: &str, text: &str) {
    let script =
        format!("printf %-4096s {text} | dd of={device} bs=4096 count=1 oflag=direct,sync");
    run("sh", &["-c", &script]);
}

/// Returns the text that [`write`] has written.
pub(crate) fn read(device: &str) -> String {
    let script = format!("dd if={device} bs=4096 count=1 iflag=direct | tr -d ' '");
    run("sh", &["-c", &script])
}

fn twins() {
    let sizes = VOLUMES.map(|(volume, _)| (volume, "64M"));
    let mut daemon = Daemon::started(SETTINGS, &sizes);
    let devices = VOLUMES.map(|(volume, driver)| attach_volume(&daemon, volume, driver));
    devices.iter().for_each(|device| write(device, "before"));
    daemon.kill();

    // Two daemons start on one directory at the same moment: one of them gets it.
    let mut rival = daemon.prepare(&["serve", "--nbd", "127.0.0.1:0"]);
    let rival = rival.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut rival = rival.expect("the program runs");
    if let Err(error) = daemon.try_start() {
        assert!(error.contains("in use by process"), "{error}");
        rival.kill().expect("it runs");
        rival.wait().expect("it ends");
        daemon.restart();
    } else {
        let said = rival.wait_with_output().expect("it ends");
        let text = String::from_utf8_lossy(&said.stderr);
        assert!(!said.status.success() && text.contains("in use by process"), "{text}");
    }
    for device in &devices {
        assert_eq!(read(device), "before", "{device}");
    }

    // A copy of its directory, as if a backup were restored beside the original.
    let mut twin = Daemon::new(SETTINGS, &sizes);
    run("cp", &["-a", &daemon.dir().display().to_string(), &twin.dir().display().to_string()]);
    let said = twin.refuses_to_start();
    assert!(said.contains("opened from a copy of the directory"), "{said}");
    // The operator insists that the original is gone: the twin leaves its devices alone
    // nevertheless.
    twin.argue(&["--take-over"]);
    twin.announce("this directory is a copy, or was restored");
    twin.announce("is attached but not served; its device waits");
    twin.announce("clients on other machines are refused");
    twin.announce("could not serve a device again");
    twin.announce(TAIL_LOST);
    twin.restart();
    let listed = twin.json(&["attach", "list"]);
    assert_eq!(listed["attachments"].as_array().map(Vec::len), Some(0), "{listed}");
    // The operator reserves the devices for the twin, too.
    twin.stop();
    let list = twin.dir().join("attachments.json");
    let kept = twin.dir().join("attachments.json.of-the-original");
    std::fs::rename(kept, &list).expect("it is kept");
    twin.restart();
    let listed = twin.json(&["attach", "list"]);
    let attachments = listed["attachments"].as_array().expect("a list");
    assert_eq!(attachments.len(), 2, "{listed}");
    for attachment in attachments {
        let failure = attachment["failure"].as_str().unwrap_or_else(|| panic!("{listed}"));
        assert!(attachment["device"].is_null() && failure.contains("serves it"), "{listed}");
    }
    for ((volume, _), device) in VOLUMES.iter().zip(&devices) {
        refused(&twin, &["detach", volume], "its device is not served");
        // Force does not help either: another process serves the device.
        refused(&twin, &["detach", "--force", volume], "serves it");
        assert_eq!(read(device), "before", "{device}");
        write(device, "after");
    }
    twin.stop();
    refused(&twin, &["attach", "--cleanup"], "serves it");
    for ((volume, _), device) in VOLUMES.iter().zip(&devices) {
        let link = format!("/dev/spindle/main/{volume}");
        let linked = std::fs::read_link(&link).expect("there is a link");
        assert_eq!(linked, Path::new(device));
        assert_eq!(read(device), "after", "{device}");
        assert!(reader(device).wait().expect("dd ends").success());
    }
    daemon.kill();
    daemon.restart();
    for ((volume, _), device) in VOLUMES.iter().zip(&devices) {
        assert_eq!(read(device), "after", "{device}");
        let _ = daemon.json(&["detach", volume]);
    }
    daemon.stop();
    daemon.fsck();
}

/// When memory is short, the data of a read cannot be copied into the kernel's request, and the
/// linked fetch ends silently. The request is answered with an error, and its tag serves the next
/// one.
#[test]
fn undeliverable_read_fails_while_the_device_continues() {
    needs_root!();
    if !binary("spindle-faulty").exists() {
        return skip("the build with seeded failures is missing (tests/run makes it)");
    }
    let name = "devices_moments::undeliverable_read_fails_while_the_device_continues";
    guest::run(name, Duration::from_secs(120), &[], not_handed_over);
}

/// Number of sequential reads.
const READ_COUNT: usize = 1000;

/// Reads the blocks one by one, and returns the number of errors.
fn errors_of_reading(device: &str) -> usize {
    let (from, count) = (format!("if={device}"), format!("count={READ_COUNT}"));
    let blocks = ["of=/dev/null", "bs=4096", "iflag=direct", "conv=noerror"];
    let said = output("dd", &[&[from.as_str(), count.as_str()], &blocks[..]].concat());
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    // dd prints its progress at every error; the last line is the total.
    let mut ends = said.lines().filter(|line| line.ends_with(" records in"));
    assert_eq!(ends.next_back(), Some(format!("{READ_COUNT}+0 records in").as_str()), "{said}");
    said.matches("Input/output error").count()
}

fn not_handed_over() {
    let mut daemon = Daemon::new(SETTINGS, &[("db", "64M")]);
    daemon.use_binary("spindle-faulty");
    daemon.environ(&[("SPINDLE_SEEDED_BUGS", "read-not-copied")]);
    daemon.announce("could not copy the data of a read to the kernel");
    daemon.restart();
    // With few tags, each gets a failing request and serves another afterwards.
    let device = attach(&daemon, &["--depth", "4"]);
    write(&device, "before");
    let count = errors_of_reading(&device);
    assert!((1..READ_COUNT / 10).contains(&count), "{count} errors for {READ_COUNT} requests");
    assert!(daemon.log().contains("could not copy the data of a read to the kernel"));
    assert!(daemon.json(&["attach", "list"])["attachments"][0]["failure"].is_null());
    daemon.kill();
    daemon.use_binary("spindle");
    daemon.restart();
    assert_eq!(errors_of_reading(&device), 0);
    assert_eq!(read(&device), "before");
    let _ = daemon.json(&["detach", "db"]);
    daemon.stop();
    daemon.fsck();
}

#[test]
fn missing_prerequisites_are_reported_in_one_line() {
    needs_root!();
    needs!("setpriv");
    let name = "devices_moments::missing_prerequisites_are_reported_in_one_line";
    guest::run(name, Duration::from_secs(120), &[], lacking);
}

/// Lets the daemon run with fewer rights, or with another restriction.
fn confined(daemon: &mut Daemon, how: &str) {
    let program = daemon.place().join("confined");
    let script = format!("#!/bin/sh\n{how} {} \"$@\"\n", binary("spindle").display());
    std::fs::write(&program, script).expect("write a script");
    run("chmod", &["+x", &program.display().to_string()]);
    daemon.use_binary(&program.display().to_string());
}

fn lacking() {
    let refused_in_one_line = |daemon: &Daemon, arguments: &[&str], why: &str| {
        refused(daemon, arguments, why);
        let said = String::from_utf8(daemon.command(arguments).stderr).expect("it is text");
        assert_eq!(said.lines().count(), 1, "{said}");
    };
    let (ublk, nbd) = (["attach", "db"], ["attach", "--nbd", "db"]);
    let rights = "devices of the kernel need root (CAP_SYS_ADMIN)";
    let sizes = [("db", "64M")];

    // Root, as in a container.
    let mut daemon = Daemon::new(SETTINGS, &sizes);
    confined(&mut daemon, "exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin");
    daemon.restart();
    refused_in_one_line(&daemon, &ublk, rights);
    refused_in_one_line(&daemon, &nbd, rights);
    daemon.stop();

    // An ordinary user, who may not write to /run/spindle either.
    daemon.announce("could not lock a device against");
    run("chown", &["-R", "nobody", &daemon.place().path().display().to_string()]);
    confined(&mut daemon, "exec setpriv --reuid=nobody --clear-groups");
    daemon.restart();
    refused_in_one_line(&daemon, &ublk, rights);
    refused_in_one_line(&daemon, &nbd, rights);
    daemon.stop();

    // The driver is not loaded.
    daemon.use_binary("spindle");
    daemon.restart();
    std::fs::rename("/dev/ublk-control", "/dev/aside").expect("it is there");
    refused_in_one_line(&daemon, &ublk, "no ublk driver loaded; run `modprobe ublk_drv`");
    std::fs::rename("/dev/aside", "/dev/ublk-control").expect("it is there");

    // io_uring is switched off, for root too.
    let switch = "/proc/sys/kernel/io_uring_disabled";
    std::fs::write(switch, "2").expect("the guest's root may");
    refused_in_one_line(&daemon, &ublk, "io_uring");
    std::fs::write(switch, "0").expect("the guest's root may");

    // None of that leaves a trace, and the volume works.
    let device = attach(&daemon, &[]);
    write(&device, "before");
    assert_eq!(read(&device), "before");
    let _ = daemon.json(&["detach", "db"]);
    daemon.stop();
    daemon.fsck();
}

#[test]
fn externally_removed_device_is_reported_and_its_number_untouched() {
    needs_root!();
    if !binary("spindle-faulty").exists() {
        return skip("the build with seeded failures is missing (tests/run makes it)");
    }
    let name = "devices_moments::externally_removed_device_is_reported_and_its_number_untouched";
    guest::run(name, Duration::from_secs(180), &[], || {
        removed_by_others("spindle", false);
        removed_by_others("spindle-faulty", true);
    });
}

/// Removes a served device from the kernel, as other programs can.
fn remove_served(device: &str) {
    let mut other = std::process::Command::new(binary("spindle-faulty"));
    other.args(["attach", "--cleanup", device]).env("SPINDLE_SEEDED_BUGS", "cleanup-of-served");
    let said = other.output().expect("it runs");
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
}

fn removed_by_others(program: &str, is_by_number: bool) {
    let mut daemon = Daemon::new(SETTINGS, &[("db", "64M")]);
    daemon.announce("could not resize the device of a volume");
    daemon.announce("the volume is larger than configured and stays so");
    daemon.announce("volume db is attached but not served"); // on a slow machine it lasts long enough
    daemon.use_binary(program);
    if is_by_number {
        daemon.environ(&[("SPINDLE_SEEDED_BUGS", "number-alone")]);
    }
    daemon.restart();
    let device = attach(&daemon, &[]);
    write(&device, "before");
    remove_served(&device);
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let listed = daemon.json(&["attach", "list"]);
        let failure = listed["attachments"][0]["failure"].as_str().unwrap_or_default().to_owned();
        if failure.contains("another program has disconnected") {
            break;
        }
        assert!(Instant::now() < until, "{listed}");
        std::thread::sleep(Duration::from_millis(5));
    }

    // Another pool gets the number.
    let mut other = Daemon::started(SETTINGS, &[("other", "64M")]);
    assert_eq!(attach_volume(&other, "other", &[]), device);
    write(&device, "of-the-other");
    let resized = daemon.json(&["volume", "resize", "db", "80M"]);
    let _ = daemon.json(&["detach", "--force", "db"]);
    let is_left = size_of(&device) == 64 << 20 && answers(&device);
    assert_eq!(is_left, !is_by_number, "{program}: {resized}");
    if is_by_number {
        daemon.kill();
        other.kill();
        let _ = other.json(&["attach", "--cleanup"]);
        return;
    }
    let warning = resized["warning"].as_str().unwrap_or_default();
    assert!(warning.contains("somebody else removed it"), "{resized}");
    assert_eq!(read(&device), "of-the-other");

    // The written data is present, and an orderly stop leaves the number alone, too.
    let again = attach(&daemon, &[]);
    assert_ne!(again, device);
    assert_eq!(read(&again), "before");
    remove_served(&again);
    let mut third = Daemon::started(SETTINGS, &[("third", "64M")]);
    assert_eq!(attach_volume(&third, "third", &[]), again);
    write(&again, "of-the-third");
    daemon.stop();
    assert_eq!(read(&again), "of-the-third");
    // The next daemon does not take it over either: it makes a device of its own.
    daemon.restart();
    let own = daemon.json(&["attach", "list"])["attachments"][0]["device"].clone();
    let own = own.as_str().expect("it is served");
    assert!(own != device && own != again, "{own}");
    assert_eq!(read(own), "before");
    assert_eq!((read(&device), read(&again)), ("of-the-other".into(), "of-the-third".into()));
    for (daemon, volume) in [(&mut daemon, "db"), (&mut other, "other"), (&mut third, "third")] {
        let _ = daemon.json(&["detach", volume]);
        daemon.stop();
        daemon.fsck();
    }
}

#[test]
fn udev_and_the_daemon_agree_on_links() {
    needs_root!();
    needs!("udevadm");
    let name = "devices_moments::udev_and_the_daemon_agree_on_links";
    guest::run(name, Duration::from_secs(120), &[], with_udev);
}

pub(crate) const UDEV: &str = "/lib/systemd/systemd-udevd";
pub(crate) const RULES: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/60-spindle.rules");

fn with_udev() {
    std::fs::create_dir_all("/run/udev/rules.d").expect("a directory of the guest's own");
    std::fs::copy(RULES, "/run/udev/rules.d/60-spindle.rules").expect("copy the rules");
    // It ends with the guest.
    run(UDEV, &["--daemon"]);
    let settled = || {
        let output =
            Command::new("udevadm").args(["settle", "--timeout=30"]).output().expect("it runs");
        assert!(output.status.success(), "{output:?}\n{}", tests::process::all_waits());
    };
    let links_of = |device: &str| run("udevadm", &["info", "--query=symlink", device]);
    let leads_to = |volume: &str, device: &str| {
        let link = std::fs::canonicalize(format!("/dev/spindle/main/{volume}"));
        assert_eq!(link.expect("there is a link"), Path::new(device));
    };
    let sizes = VOLUMES.map(|(volume, _)| (volume, "64M"));
    let mut daemon = Daemon::started(SETTINGS, &sizes);
    let devices = VOLUMES.map(|(volume, driver)| attach_volume(&daemon, volume, driver));
    for round in ["attached", "killed", "stopped", "announced"] {
        match round {
            "killed" => {
                daemon.kill();
                daemon.restart();
            }
            "stopped" => {
                daemon.stop();
                daemon.restart();
            }
            "announced" => {
                run(
                    "udevadm",
                    &["trigger", "--settle", "--action=change", "--subsystem-match=block"],
                );
            }
            _ => {}
        }
        settled();
        for ((volume, _), device) in VOLUMES.iter().zip(&devices) {
            let links = links_of(device);
            let link = format!("spindle/main/{volume}");
            assert!(links.split_whitespace().any(|made| made == link), "{round}: {links}");
            leads_to(volume, device);
            let name = device.trim_start_matches("/dev/");
            let scheduler = std::fs::read_to_string(format!("/sys/block/{name}/queue/scheduler"));
            assert!(scheduler.expect("it has one").contains("[none]"), "{round}: {device}");
            write(device, round);
            assert_eq!(read(device).trim(), round, "{device}");
        }
    }
    for (volume, _) in VOLUMES {
        // By the link that udev made.
        let _ = daemon.json(&["detach", &format!("/dev/spindle/main/{volume}")]);
    }
    settled();
    // `settle` waits only for events that udev has already received.
    let is_left = |count: usize| {
        let left = |dir: &str| std::fs::read_dir(dir).map_or(0, Iterator::count);
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            settled();
            let found = (left("/dev/spindle/main"), left("/run/spindle/devices"));
            if found == (count, count) {
                break;
            }
            assert!(Instant::now() < until, "{found:?} links instead of {count}");
        }
    };
    is_left(0);
    // The first device's number serves another volume now.
    let device = attach_volume(&daemon, "other", &[]);
    settled();
    leads_to("other", &device);
    assert!(!Path::new("/dev/spindle/main/db").exists());
    let _ = daemon.json(&["detach", "other"]);
    is_left(0);
    // Devices that a daemon left and will not return to: one is cleaned up by name, then all.
    let devices = VOLUMES.map(|(volume, driver)| attach_volume(&daemon, volume, driver));
    settled();
    daemon.kill();
    let _ = daemon.json(&["attach", "--cleanup", &devices[0]]);
    is_left(1);
    let _ = daemon.json(&["attach", "--cleanup"]);
    is_left(0);
    daemon.restart();
    daemon.stop();
    daemon.fsck();
}

/// A daemon never waits for its own device: if it is killed while the device does not answer, it
/// ends, and the next one continues.
#[test]
fn a_daemon_that_is_killed_while_its_device_does_not_answer_ends() {
    needs_root!();
    if !binary("spindle-faulty").exists() {
        return skip("the build with seeded failures is missing (tests/run makes it)");
    }
    let name = "devices_moments::a_daemon_that_is_killed_while_its_device_does_not_answer_ends";
    guest::run(name, Duration::from_secs(240), &[], || {
        for (_, driver) in VOLUMES {
            assert!(killed_while_it_looks(driver, false), "{driver:?}");
        }
        // The test detects a daemon that opens its device itself.
        for (_, driver) in VOLUMES {
            assert!(!killed_while_it_looks(driver, true), "{driver:?}");
        }
    });
}

/// Kills a daemon while the partition table of its new device is being read, which the silent store
/// delays, and returns whether it ended before the store answered.
fn killed_while_it_looks(driver: &[&str], is_seeded: bool) -> bool {
    let bucket = Bucket::start(Care::Honest);
    let proxy = Proxy::start(bucket.address()).expect("a proxy");
    // Nothing is cached.
    let settings = SETTINGS.replace("[cache]\nsize = \"64MiB\"", "[cache]\nsize = \"0\"");
    let mut daemon = on_s3(&settings, &[("db", "64M")], proxy.address());
    for part in ["destage", "store", "slatedb", "object_store"] {
        daemon.announce(part);
    }
    if is_seeded {
        daemon.use_binary("spindle-faulty");
        daemon.environ(&[("SPINDLE_SEEDED_BUGS", "opens-own-device")]);
    }
    daemon.restart();
    let device = attach(&daemon, driver);
    write(&device, "before");
    let _ = daemon.json(&["detach", "db"]);
    daemon.stop();
    daemon.restart();
    proxy.set(Line::Silent);
    assert_eq!(attach(&daemon, driver), device);
    // Opening the device makes the kernel read the table, and that read is not answered.
    let before = opener_count();
    let mut list = daemon.prepare(&["attach", "list"]);
    let list = list.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut list = list.expect("the program runs");
    let until = Instant::now() + Duration::from_secs(60);
    while opener_count() == before {
        assert!(Instant::now() < until, "nobody opens {device}: {}", daemon.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    let has_ended = daemon.is_killed_within(ENDING_MAX);
    list.kill().expect("it is ours");
    list.wait().expect("it ends");
    if !has_ended {
        // The daemon never ends; only the end of the guest can end it.
        std::mem::forget(daemon);
        std::fs::remove_file("/dev/spindle/main/db").expect("it is there");
        return false;
    }
    proxy.set(Line::Cut);
    proxy.set(Line::Open);
    daemon.restart();
    assert_eq!(read(&device), "before", "{driver:?}");
    let _ = daemon.json(&["detach", "db"]);
    daemon.stop();
    daemon.fsck();
    true
}

/// A kernel that reads the partition table within the command that makes a device holds its lock
/// meanwhile. If the daemon were killed at this point, the device that it leaves could not be taken
/// over. So the daemon does not give that command before the store has answered.
#[test]
fn daemon_killed_during_an_outage_leaves_no_locked_device() {
    needs_root!();
    if !binary("spindle-faulty").exists() {
        return skip("the build with seeded failures is missing (tests/run makes it)");
    }
    let name = "devices_moments::daemon_killed_during_an_outage_leaves_no_locked_device";
    guest::run(name, Duration::from_secs(600), &[], || {
        assert!(killed_while_it_attaches(false));
        if is_table_read_at_start() {
            assert!(!killed_while_it_attaches(true), "the test sees a daemon that does");
        }
    });
}

/// Whether the kernel reads the table at that point: Linux before 6.19 does. The kernels of
/// tests/nightly, with `--engine qemu`, are older.
fn is_table_read_at_start() -> bool {
    guest::release() < (6, 19)
}

/// Attaches a volume while the store does not answer, and kills the daemon meanwhile. Returns
/// whether it ended and the next one continued.
fn killed_while_it_attaches(is_seeded: bool) -> bool {
    let bucket = Bucket::start(Care::Honest);
    let proxy = Proxy::start(bucket.address()).expect("a proxy");
    // Nothing is cached.
    let settings = SETTINGS.replace("[cache]\nsize = \"64MiB\"", "[cache]\nsize = \"0\"");
    let mut daemon = on_s3(&settings, &[("db", "64M")], proxy.address());
    for part in ["destage", "store", "slatedb", "object_store", "attach"] {
        daemon.announce(part);
    }
    if is_seeded {
        daemon.use_binary("spindle-faulty");
        daemon.environ(&[("SPINDLE_SEEDED_BUGS", "table-unread")]);
    }
    daemon.restart();
    write(&attach(&daemon, &[]), "before");
    let _ = daemon.json(&["detach", "db"]);
    daemon.stop();
    daemon.restart();
    proxy.set(Line::Silent);
    let devices = || std::fs::read_dir("/sys/class/ublk-char").map_or(0, Iterator::count);
    let attaches = |daemon: &Daemon| {
        let mut command = daemon.prepare(&["attach", "db"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().expect("the program runs")
    };
    if is_table_read_at_start() && !is_seeded {
        let said = attaches(&daemon).wait_with_output().expect("it ends");
        let said = String::from_utf8_lossy(&said.stderr).into_owned();
        assert!(said.contains("could not be read within 60 s"), "{said}");
        assert_eq!(devices(), 0, "none is made before");
    }
    let mut attaching = attaches(&daemon);
    // The daemon waits for the store, or the kernel does.
    let noted = daemon.dir().join("attachments.json");
    let until = Instant::now() + Duration::from_secs(60);
    let is_under_way = || {
        let list = std::fs::read_to_string(&noted).unwrap_or_default();
        list.contains("\"volume\"") && (!is_seeded || list.contains("\"number\": 0"))
    };
    while !is_under_way() {
        assert!(Instant::now() < until, "it does not begin: {}", daemon.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(500));
    let has_ended = daemon.is_killed_within(ENDING_MAX);
    attaching.kill().expect("it is ours");
    attaching.wait().expect("it ends");
    if !has_ended {
        // The daemon never ends; only the end of the guest can end it.
        std::mem::forget(daemon);
        return false;
    }
    proxy.set(Line::Cut);
    proxy.set(Line::Open);
    daemon.restart();
    // The list names it, so the next daemon has attached it.
    assert_eq!(read("/dev/spindle/main/db"), "before");
    let _ = daemon.json(&["detach", "db"]);
    daemon.stop();
    daemon.fsck();
    true
}

/// Counts the threads inside open() with the flags that ask whether a device has an exclusive user.
fn opener_count() -> usize {
    let flags = rustix::fs::OFlags::EXCL | rustix::fs::OFlags::CLOEXEC;
    let wanted = format!(" {:#x} ", flags.bits());
    let ids = |dir: String| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_string_lossy().parse::<u32>().ok())
    };
    let threads = ids("/proc".to_owned()).flat_map(|process| {
        let threads = ids(format!("/proc/{process}/task"));
        threads.map(move |thread| format!("/proc/{process}/task/{thread}/syscall"))
    });
    let calls = threads.filter_map(|call| std::fs::read_to_string(call).ok());
    calls.filter(|call| call.contains(&wanted)).count()
}

/// A killed process takes a second or two to end; a process that waits for itself never ends.
const ENDING_MAX: Duration = Duration::from_secs(20);

/// Users of a device wait from the moment when a daemon leaves it until the next daemon answers. So
/// the slow parts of a stop come before that moment.
#[test]
fn a_device_is_served_until_a_stop_is_nearly_done() {
    needs_root!();
    let name = "devices_moments::a_device_is_served_until_a_stop_is_nearly_done";
    guest::run(name, Duration::from_secs(400), &[], || {
        stopped_without_a_store(Daemon::ask_to_stop);
        stopped_without_a_store(|daemon| drop(daemon.json(&["stop"])));
    });
}

/// Longest time of a stop, with a margin for slow machines.
const STOP_TIME_MAX: Duration = Duration::from_secs(150);

/// Whether the device answers soon.
fn answers(device: &str) -> bool {
    let (from, limit) = (format!("if={device}"), ["--signal=KILL", "20"]);
    let read = ["dd", &from, "of=/dev/null", "bs=4096", "count=1", "iflag=direct"];
    output("timeout", &[&limit[..], &read[..]].concat()).status.success()
}

fn stopped_without_a_store(ask_to_stop: impl Fn(&Daemon)) {
    let bucket = Bucket::start(Care::Honest);
    let proxy = Proxy::start(bucket.address()).expect("a proxy");
    let sizes = VOLUMES.map(|(volume, _)| (volume, "64M"));
    let mut daemon = on_s3(SETTINGS, &sizes, proxy.address());
    // Failed attempts log warnings.
    for part in ["destage", "store", "slatedb", "object_store"] {
        daemon.announce(part);
    }
    daemon.restart();
    let devices = VOLUMES.map(|(volume, driver)| attach_volume(&daemon, volume, driver));
    proxy.set(Line::Silent);
    devices.iter().for_each(|device| write(device, "before"));
    ask_to_stop(&daemon);
    let begun = Instant::now();
    while !daemon.log().contains("stopping") {
        assert!(begun.elapsed() < Duration::from_secs(20), "it does not stop: {}", daemon.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    // For much less time than the stop waits, and much more than leaving a device takes.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(5) {
        for device in &devices {
            assert!(answers(device), "{device} was left while the stop waits for the store");
        }
    }
    proxy.set(Line::Cut);
    proxy.set(Line::Open);
    assert!(daemon.wait(STOP_TIME_MAX).success(), "{}", daemon.log());
    daemon.restart();
    for ((volume, _), device) in VOLUMES.iter().zip(&devices) {
        assert_eq!(read(device), "before", "{device}");
        let _ = daemon.json(&["detach", volume]);
    }
    daemon.stop();
    daemon.fsck();
}

#[test]
fn device_stops_when_its_volume_has_lost_writes() {
    needs_root!();
    let name = "devices_moments::device_stops_when_its_volume_has_lost_writes";
    guest::run(name, Duration::from_secs(120), &[], lost_writes);
}

fn lost_writes() {
    for driver in [&[][..], &["--nbd"]] {
        let mut daemon = Daemon::started(SETTINGS, &[("db", "64M")]);
        daemon.announce("condition=\"writes-lost\"");
        let device = attach(&daemon, driver);
        let held = std::fs::File::open(&device).expect("open the device");
        daemon.kill();
        // The log is lost, and so are its writes.
        let dir = daemon.dir();
        std::fs::remove_dir_all(dir.join("log")).expect("remove the log");
        std::fs::remove_file(dir.join("log.made")).expect("remove its mark");
        daemon.restart();
        let complaints = daemon.unannounced();
        assert!(
            complaints.iter().any(|line| line.contains("has lost writes")),
            "{driver:?}: {complaints:#?}"
        );
        let listed = daemon.json(&["attach", "list"]);
        assert_eq!(listed["attachments"].as_array().map(Vec::len), Some(0), "{listed}");
        assert!(!reader(&device).wait().expect("dd ends").success(), "its users get errors");
        drop(held);
        // A new device is not affected, and survives a restart.
        let again = attach(&daemon, driver);
        daemon.kill();
        daemon.restart();
        assert!(reader(&again).wait().expect("dd ends").success());
        let _ = daemon.json(&["detach", "db"]);
        daemon.stop();
    }
}
