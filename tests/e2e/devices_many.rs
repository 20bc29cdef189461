//! Many devices of one daemon, and the places of a daemon's files.
//!
//! Invariants:
//! - Those of [`crate::devices`].

use crate::devices::{SETTINGS, attach, reader, refused};
use crate::devices_moments::{read, write};
use crate::mounted::{DRIVERS, attach_volume, no_complaints_of_the_kernel, number_of};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tests::daemon::Daemon;
use tests::place::{binary, run, skip};
use tests::power::guest;
use tests::seed::{Random, seeds};
use tests::{needs, needs_root};

/// Devices of one daemon. Chosen by hand: more ublk devices than the guest has processors, and more
/// than the default budget has room for with four queues each.
const DEVICE_COUNT: usize = 24;
/// How many of these use the nbd driver.
const NBD_COUNT: usize = 4;
/// Longest time from the start of a daemon until its devices answer, with a margin for slow
/// machines.
const RECOVERY_TIME_MAX: Duration = Duration::from_secs(60);

#[test]
fn many_devices_of_a_daemon_outlive_it_together() {
    needs_root!();
    let name = "devices_many::many_devices_of_a_daemon_outlive_it_together";
    guest::run(name, Duration::from_secs(300), &[], many);
}

fn many() {
    let names: Vec<String> = (0..DEVICE_COUNT).map(|number| format!("v{number}")).collect();
    let volumes: Vec<_> = names.iter().map(|name| (&**name, "64M")).collect();
    // The default budget.
    let settings = SETTINGS.replace("640MiB", "1GiB");
    let mut daemon = Daemon::started(&settings, &volumes);
    let is_nbd = |number: usize| number >= DEVICE_COUNT - NBD_COUNT;
    let devices: Vec<String> = names
        .iter()
        .enumerate()
        .map(|(number, name)| {
            let driver: &[&str] = if is_nbd(number) { &["--nbd"] } else { &[] };
            attach_volume(&daemon, name, driver)
        })
        .collect();
    for (name, device) in names.iter().zip(&devices) {
        write(device, &format!("before-of-{name}"));
    }
    for end in ["kill", "stop", "kill"] {
        match end {
            "kill" => daemon.kill(),
            _ => daemon.stop(),
        }
        // A reader waits at each device.
        let readers: Vec<_> = devices.iter().map(|device| reader(device)).collect();
        let begun = Instant::now();
        daemon.restart();
        for (mut reader, device) in readers.into_iter().zip(&devices) {
            assert!(reader.wait().expect("dd ends").success(), "{device}");
        }
        println!(
            "{DEVICE_COUNT} devices answer {:?} after the start, after a {end}",
            begun.elapsed()
        );
        assert!(begun.elapsed() < RECOVERY_TIME_MAX, "{:?}", begun.elapsed());
        for (name, device) in names.iter().zip(&devices) {
            assert_eq!(read(device), format!("before-of-{name}"), "{device}");
            let link = std::fs::read_link(format!("/dev/spindle/main/{name}"));
            assert_eq!(link.expect("there is a link"), Path::new(device));
        }
    }
    let listed = daemon.json(&["attach", "list"]);
    let attachments = listed["attachments"].as_array().expect("a list");
    assert_eq!(attachments.len(), DEVICE_COUNT, "{listed}");
    for attachment in attachments {
        assert_eq!(attachment["failure"], Value::Null, "{attachment}");
        assert_eq!(attachment["failure_count"], 0, "{attachment}");
    }
    // The text output. On a slow machine, the looks of the list before may still hold devices.
    let begun = Instant::now();
    loop {
        let said = daemon.command(&["attach", "list"]).stdout;
        let said = String::from_utf8(said).expect("it is text");
        assert!(said.lines().next().is_some_and(|head| head.contains("WRITTEN")), "{said}");
        let counts =
            ["idle, 1 queue", "idle, 1 connection"].map(|state| said.matches(state).count());
        if counts == [DEVICE_COUNT - NBD_COUNT, NBD_COUNT] {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "{said}");
        std::thread::sleep(Duration::from_millis(100));
    }
    for name in &names {
        let _ = daemon.json(&["detach", name]);
    }
    daemon.stop();
    daemon.fsck();
    no_complaints_of_the_kernel();
}

/// The daemon waits some seconds for a device that another process holds; users of its other
/// devices do not wait.
#[test]
fn held_device_does_not_delay_other_devices() {
    needs_root!();
    let name = "devices_many::held_device_does_not_delay_other_devices";
    guest::run(name, Duration::from_secs(120), &[], held);
}

/// By how much the other devices are ahead: the daemon waits for 10 s, and the others need much
/// less, even on a slow machine.
const AHEAD_MIN: Duration = Duration::from_secs(4);

fn held() {
    let volumes = [("first", "64M"), ("second", "64M"), ("third", "64M")];
    let mut daemon = Daemon::started(SETTINGS, &volumes);
    daemon.announce("is attached but not served; its device waits");
    let first = attach_volume(&daemon, "first", &[]);
    let others =
        [attach_volume(&daemon, "second", &[]), attach_volume(&daemon, "third", &["--nbd"])];
    daemon.kill();
    let node = first.replace("ublkb", "ublkc");
    let until = Instant::now() + RECOVERY_TIME_MAX;
    let holder = loop {
        // Retries until the ending daemon has released the device.
        match File::options().read(true).write(true).open(&node) {
            Ok(holder) => break holder,
            Err(error) => assert!(Instant::now() < until, "{node}: {error}"),
        }
    };
    let readers = others.each_ref().map(|device| {
        let mut reader = reader(device);
        std::thread::spawn(move || (reader.wait().expect("dd ends").success(), Instant::now()))
    });
    daemon.restart();
    let is_up = Instant::now();
    for (reader, device) in readers.into_iter().zip(&others) {
        let (has_read, at) = reader.join().expect("it does not panic");
        assert!(
            has_read && at + AHEAD_MIN < is_up,
            "{device} was not served before the one that is held"
        );
    }
    let listed = daemon.json(&["attach", "list"]);
    let failures = listed["attachments"].as_array().expect("a list").iter();
    assert_eq!(failures.filter(|one| !one["failure"].is_null()).count(), 1, "{listed}");
    // Once the device is released, the daemon serves it again.
    drop(holder);
    assert_eq!(attach_volume(&daemon, "first", &[]), first);
    assert!(reader(&first).wait().expect("dd ends").success());
    for (volume, _) in volumes {
        let _ = daemon.json(&["detach", volume]);
    }
    daemon.stop();
    daemon.fsck();
}

/// An interrupted attach leaves no device, or one that is known, with the parameters that the
/// kernel got.
#[test]
fn a_daemon_that_ends_while_it_attaches_leaves_nothing_unknown() {
    needs_root!();
    if !binary("spindle-faulty").exists() {
        return skip("the build with seeded failures is missing (tests/run makes it)");
    }
    for seed in seeds(1) {
        let name = "devices_many::a_daemon_that_ends_while_it_attaches_leaves_nothing_unknown";
        let cuts = number_of(CUTS, 12);
        let variables = [("SEED", seed.to_string()), (CUTS, cuts.to_string())];
        guest::run(name, Duration::from_secs(240 + 10 * cuts), &variables, || {
            println!("SEED={seed}");
            for driver in DRIVERS {
                // At the moment when the kernel has the device and its number is not recorded yet.
                assert!(cut_short(driver, "ends-in-attach"), "{driver:?}");
                at_random(seed, driver);
            }
            // The test detects a daemon that records the cache mode too late.
            assert!(!cut_short(&["--nbd"], "ends-in-attach,cache-noted-late"));
        });
    }
}

/// Returns the devices that exist in the kernel, including those that have not appeared elsewhere
/// yet.
fn devices_of_the_kernel() -> BTreeSet<String> {
    let names_in = |dir: &str| {
        let names = std::fs::read_dir(dir).into_iter().flatten().flatten();
        names.map(|entry| entry.file_name().to_string_lossy().into_owned())
    };
    let ublk = names_in("/sys/class/ublk-char").map(|name| name.replace("ublkc", "ublkb"));
    let is_connected = |name: &String| {
        name.starts_with("nbd") && Path::new(&format!("/sys/block/{name}/pid")).exists()
    };
    let nbd = names_in("/sys/block").filter(is_connected);
    ublk.chain(nbd).map(|name| format!("/dev/{name}")).collect()
}

/// Insists that the daemon knows every device, and returns whether it knows the parameters that the
/// kernel got.
fn all_is_known(daemon: &Daemon) -> bool {
    let listed = daemon.json(&["attach", "list"]);
    let attachments = listed["attachments"].as_array().expect("a list");
    let known: BTreeSet<String> = attachments
        .iter()
        .map(|one| one["device"].as_str().unwrap_or_else(|| panic!("not served: {listed}")).into())
        .collect();
    assert_eq!(devices_of_the_kernel(), known, "{listed}");
    let noted = std::fs::read(daemon.dir().join("attachments.json")).unwrap_or_default();
    let noted: Value = serde_json::from_slice(&noted).unwrap_or_default();
    attachments.iter().all(|one| {
        let device = one["device"].as_str().expect("as above");
        let cache = format!("/sys/block/{}/queue/write_cache", device.trim_start_matches("/dev/"));
        let cache = std::fs::read_to_string(cache).expect("the kernel has it");
        let number: u64 = device
            .trim_start_matches(|letter: char| !letter.is_ascii_digit())
            .parse()
            .expect("a number");
        let mut records = noted["attachments"].as_array().expect("a list").iter();
        let record = records.find(|record| record["number"] == number).expect("it is noted");
        (cache.trim() == "write through") == (record["is_write_through"] == true)
    })
}

/// Ends a daemon during an attach at the seeded point, and returns whether the next daemon knows
/// everything.
fn cut_short(driver: &[&str], seeded_bug: &str) -> bool {
    let mut daemon = Daemon::new(SETTINGS, &[("db", "64M")]);
    daemon.use_binary("spindle-faulty");
    daemon.environ(&[("SPINDLE_SEEDED_BUGS", seeded_bug)]);
    daemon.restart();
    let _ = daemon.json(&["volume", "set", "db", "--durability", "write"]);
    assert!(!daemon.command(&[&["attach", "db"], driver].concat()).status.success());
    daemon.kill();
    assert_eq!(devices_of_the_kernel().len(), 1, "{driver:?}");
    daemon.use_binary("spindle");
    daemon.restart();
    let is_known = all_is_known(&daemon);
    let _ = daemon.json(&["detach", "--force", "db"]);
    daemon.stop();
    daemon.fsck();
    assert_eq!(devices_of_the_kernel(), BTreeSet::new());
    is_known
}

const CUTS: &str = "SPINDLE_TEST_ATTACH_CUTS";

fn at_random(seed: u64, driver: &[&str]) {
    let mut random = Random::new(seed, 1);
    let mut daemon = Daemon::started(SETTINGS, &[("db", "64M")]);
    let _ = daemon.json(&["volume", "set", "db", "--durability", "write"]);
    let mut served = 0;
    let begun = Instant::now();
    let _ = attach(&daemon, driver);
    // The moments range from the start of the attach to a little after its end.
    let whole = u64::try_from(begun.elapsed().as_micros()).expect("it is short") * 5 / 4;
    let _ = daemon.json(&["detach", "db"]);
    let cut_count = number_of(CUTS, 12);
    for _ in 0..cut_count {
        let mut attach = daemon.prepare(&[&["attach", "db"], driver].concat());
        let mut attach =
            attach.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it runs");
        // A moment that is unrelated to the daemon's actions.
        std::thread::sleep(Duration::from_micros(random.below(whole)));
        daemon.kill();
        attach.wait().expect("it ends");
        daemon.restart();
        assert!(all_is_known(&daemon), "SEED={seed} {driver:?}");
        if let Some(device) = devices_of_the_kernel().first() {
            served += 1;
            write(device, "there");
            assert_eq!(read(device), "there");
            let _ = daemon.json(&["detach", "db"]);
        }
    }
    println!("{driver:?}: {served} of {cut_count} devices were there after a kill");
    daemon.stop();
    daemon.fsck();
}

/// A daemon with files on its own device would wait for itself.
#[test]
fn daemon_refuses_files_on_its_own_device() {
    needs_root!();
    needs!("sfdisk", "dmsetup", "mkfs.ext4", "blockdev");
    let name = "devices_many::daemon_refuses_files_on_its_own_device";
    guest::run(name, Duration::from_secs(240), &[], on_its_own_device);
}

/// Longest time of a refusal, which comes without waiting.
const REFUSAL_TIME_MAX: Duration = Duration::from_secs(20);

/// Makes one partition that spans a device.
fn partition(device: &str) {
    run("sh", &["-c", &format!("printf 'label: gpt\\n,\\n' | sfdisk --quiet {device}")]);
    // The kernel makes the node in /dev at once.
    assert!(Path::new(&format!("{device}p1")).exists(), "{device} has a partition");
}

fn on_its_own_device() {
    let volumes = [("db", "64M"), ("other", "64M")];
    for driver in [&[][..], &["--nbd"]] {
        let mut daemon = Daemon::started(SETTINGS, &volumes);
        let device = attach(&daemon, driver);
        let at = daemon.place().join("mnt");
        std::fs::create_dir(&at).expect("make a directory");
        let at = at.display().to_string();
        // Through a partition, and a mapping of it.
        partition(&device);
        let mapped = format!("own-{}", driver.len());
        let part = format!("{device}p1");
        let sectors = run("blockdev", &["--getsz", &part]);
        let table = format!("0 {} linear {part} 0", sectors.trim());
        // A guest has no udev to make the name.
        run("dmsetup", &["--noudevsync", "--noudevrules", "create", &mapped, "--table", &table]);
        run("dmsetup", &["mknodes", &mapped]);
        let disk = format!("/dev/mapper/{mapped}");
        run("mkfs.ext4", &["-q", &disk]);
        run("mount", &[&disk, &at]);
        run("mkdir", &[&format!("{at}/pool")]);
        // A disk in a file on the device.
        let file = format!("{at}/disk");
        run("truncate", &["--size=16M", &file]);
        let over = run("losetup", &["--find", "--show", &file]).trim().to_owned();
        run("mkfs.ext4", &["-q", &over]);
        let above = daemon.place().join("above").display().to_string();
        run("mkdir", &[&above]);
        run("mount", &[&over, &above]);
        let link = daemon.place().join("link").display().to_string();
        run("ln", &["-s", &format!("{at}/pool"), &link]);
        run("sync", &[]);

        // While the device is served, another daemon may have files on it.
        let mut above_it = Daemon::new(SETTINGS, &[]);
        above_it.argue(&["--store", &format!("file://{at}/pool/of-another")]);
        above_it.restart();
        above_it.stop();

        daemon.kill();
        let (dir, none) = (daemon.dir().display().to_string(), format!("{at}/pool/none"));
        let store = format!("file://{at}/pool/store");
        for arguments in [
            ["--dir", &none, "--store", "file:///nowhere"],
            ["--dir", &format!("{link}/more"), "--volume", "x=1M"],
            ["--dir", &format!("{above}/x"), "--volume", "x=1M"],
            ["--dir", &dir, "--store", &store],
            ["--dir", &dir, "--cache-dir", &none],
            ["--dir", &dir, "--key-file", &none],
            ["--dir", &dir, "--config", &format!("{at}/pool/spindle.toml")],
        ] {
            let begun = Instant::now();
            let mut asked = std::process::Command::new("timeout");
            asked.args(["--signal=KILL", "60"]).arg(tests::place::binary("spindle"));
            let said = asked.arg("serve").args(arguments).output().expect("it runs");
            let text = String::from_utf8_lossy(&said.stderr);
            let why = format!("it lies on {device}, which no daemon serves");
            assert!(!said.status.success() && text.contains(&why), "{arguments:?}: {text}");
            assert!(begun.elapsed() < REFUSAL_TIME_MAX, "{arguments:?}: {:?}", begun.elapsed());
        }
        // Its own daemon, started from the right place, continues with all of it.
        daemon.restart();
        run("umount", &[&above]);
        run("losetup", &["--detach", &over]);
        run("umount", &[&at]);
        run("dmsetup", &["--noudevsync", "--noudevrules", "remove", "--retry", &mapped]);
        let _ = daemon.json(&["detach", "db"]);
        daemon.stop();
        refused(&daemon, &["attach", "db"], "no daemon runs");
        daemon.fsck();
    }
    no_complaints_of_the_kernel();
}
