//! Many devices of one daemon, and what a daemon has where.
//!
//! Invariants:
//! - As in [`crate::devices`].

use crate::devices::{SETTINGS, attach, reader, refused};
use crate::mounted::{attach_volume, no_complaints_of_the_kernel};
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};
use tests::daemon::Daemon;
use tests::needs_root;
use tests::place::run;
use tests::power::guest;

/// Devices of one daemon. Chosen by hand: more ublk devices than a processor of the guest has, and than four queues each
/// would leave room for at the default budget.
const DEVICE_COUNT: usize = 24;
/// Of these, with the nbd driver.
const NBD_COUNT: usize = 4;
/// From the start of a daemon until its devices answer, with what a slow machine adds.
const RECOVERY_TIME_MAX: Duration = Duration::from_secs(60);

#[test]
fn many_devices_of_a_daemon_outlive_it_together() {
    needs_root!();
    let name = "devices_many::many_devices_of_a_daemon_outlive_it_together";
    guest::run(name, Duration::from_secs(300), &[], many);
}

fn write(device: &str, text: &str) {
    let script =
        format!("printf %-4096s '{text}' | dd of={device} bs=4096 count=1 oflag=direct,sync");
    run("sh", &["-c", &script]);
}

fn read(device: &str) -> String {
    let script = format!("dd if={device} bs=4096 count=1 iflag=direct | tr -d ' '");
    run("sh", &["-c", &script])
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
        // Somebody waits at each.
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
    // As a person sees it.
    let said = String::from_utf8(daemon.command(&["attach", "list"]).stdout).expect("it is text");
    assert!(said.lines().next().is_some_and(|head| head.contains("WRITTEN")), "{said}");
    assert_eq!(said.matches("idle, 1 queue").count(), DEVICE_COUNT - NBD_COUNT, "{said}");
    assert_eq!(said.matches("idle, 1 connection").count(), NBD_COUNT, "{said}");
    for name in &names {
        let _ = daemon.json(&["detach", name]);
    }
    daemon.stop();
    daemon.fsck();
    no_complaints_of_the_kernel();
}

/// A daemon that keeps something on its own device would wait for itself.
#[test]
fn what_a_daemon_needs_is_not_on_its_own_device() {
    needs_root!();
    let name = "devices_many::what_a_daemon_needs_is_not_on_its_own_device";
    guest::run(name, Duration::from_secs(240), &[], on_its_own_device);
}

/// A refusal comes at once: nothing waits.
const REFUSAL_TIME_MAX: Duration = Duration::from_secs(20);

fn on_its_own_device() {
    let volumes = [("db", "64M"), ("other", "64M")];
    for driver in [&[][..], &["--nbd"]] {
        let mut daemon = Daemon::started(SETTINGS, &volumes);
        let device = attach(&daemon, driver);
        let at = daemon.place().join("mnt");
        std::fs::create_dir(&at).expect("make a directory");
        let at = at.display().to_string();
        run("mkfs.ext4", &["-q", &device]);
        run("mount", &[&device, &at]);
        run("mkdir", &[&format!("{at}/pool")]);
        // A disk in a file on it.
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

        // While it is served, another daemon may have something on it.
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
        // Its own daemon, where it should be, goes on with all of it.
        daemon.restart();
        run("umount", &[&above]);
        run("losetup", &["--detach", &over]);
        run("umount", &[&at]);
        let _ = daemon.json(&["detach", "db"]);
        daemon.stop();
        refused(&daemon, &["attach", "db"], "no daemon runs");
        daemon.fsck();
    }
    no_complaints_of_the_kernel();
}
