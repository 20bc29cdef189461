//! Devices under systemd, with the units, rules and the fstab line of the packages (`packaging/`).
//!
//! Invariants:
//! - The test runs in a guest kernel, where systemd is process 1 of a namespace: this machine's
//!   services are left alone.
//! - The units are those of `packaging/`, except for three paths that the guest cannot write to.

use crate::devices_moments::{RULES, UDEV};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tests::needs_root;
use tests::place::{binary, output, run, skip};
use tests::power::guest;
use tests::process::Process;

const SYSTEMD: &str = "/lib/systemd/systemd";
const FSTAB_GENERATOR: &str = "/lib/systemd/system-generators/systemd-fstab-generator";
/// systemd's own units that these need. They start nothing.
const TARGETS: [&str; 15] = [
    "basic.target",
    "final.target",
    "local-fs-pre.target",
    "local-fs.target",
    "network-online.target",
    "network.target",
    "poweroff.target",
    "remote-fs-pre.target",
    "remote-fs.target",
    "shutdown.target",
    "sockets.target",
    "sysinit.target",
    "systemd-poweroff.service",
    "timers.target",
    "umount.target",
];
const PACKAGING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging");
const UNITS: &str = "/run/units";
const PROGRAM: &str = "/var/lib/bin/spindle";
const DIR: &str = "/var/lib/spindle";
const CONFIGURATION: &str = "memory = \"800MiB\"\n\
    [log]\nsize = \"64MiB\"\nfile_size = \"8MiB\"\n\
    [cache]\nsize = \"64MiB\"\n\
    [[volumes]]\nname = \"db\"\nsize = \"256MiB\"\n\
    [[volumes]]\nname = \"raw\"\nsize = \"64MiB\"\n";
const LOG: &str = "/run/spindle.log";
const MOUNTPOINT: &str = "/run/db";
const STEP_TIME_MAX: Duration = Duration::from_secs(60);
/// Longer than `TimeoutStopSec=` of the unit: a daemon that stops waits for its store.
const STOP_TIME_MAX: Duration = Duration::from_secs(150);
/// Number of orderly restarts, and of kills, each during one load.
const RESTARTS: u32 = 3;

#[test]
fn units_restart_and_stop_without_errors_for_device_users() {
    needs_root!();
    tests::needs!("fio", "udevadm");
    if !Path::new(SYSTEMD).exists() || !Path::new(FSTAB_GENERATOR).exists() {
        return skip("systemd is not installed");
    }
    let name = "devices_units::units_restart_and_stop_without_errors_for_device_users";
    guest::run(name, Duration::from_secs(600), &[], under_systemd);
}

/// systemd as process 1 of a namespace; all processes that it has started end with it.
struct Machine(Process);

impl Machine {
    fn start() -> Machine {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]);
        // As systemd does on a machine: an unmount reaches the namespaces of services, too.
        command.args(["--propagation", "shared", SYSTEMD]);
        command.args(["--system", "--unit=default.target", "--log-target=kmsg"]);
        command.env("container", "spindle-test").env("SYSTEMD_UNIT_PATH", UNITS);
        command.stdin(Stdio::null());
        let log = Path::new("/run/systemd.log");
        let machine = Machine(Process::start(&mut command, log).expect("systemd starts"));
        until("systemd answers", || machine.ask(&["show", "--property=Version"]).is_some());
        machine
    }

    /// Returns the output of `systemctl` in the namespace, as systemd does not answer commands from
    /// outside; `None` if it failed.
    fn ask(&self, arguments: &[&str]) -> Option<String> {
        let first = self.first();
        let inside = ["--target", &first, "--pid", "--mount", "--", "systemctl"];
        let said =
            first.parse::<u32>().ok().map(|_| output("nsenter", &[&inside, arguments].concat()))?;
        said.status.success().then(|| String::from_utf8_lossy(&said.stdout).trim().to_owned())
    }

    #[track_caller]
    fn tell(&self, arguments: &[&str]) {
        assert!(
            self.ask(arguments).is_some(),
            "systemctl {arguments:?} fails\n{}",
            run("dmesg", &[])
        );
    }

    fn property(&self, unit: &str, name: &str) -> String {
        let asked = self.ask(&["show", &format!("--property={name}"), "--value", unit]);
        asked.unwrap_or_else(|| panic!("{unit} has a {name}"))
    }

    /// Returns the number, outside the namespace, of its first process: the child of `unshare`.
    /// Empty if there is none.
    fn first(&self) -> String {
        let id = self.0.id().to_string();
        let is_child = |number: &String| {
            let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).unwrap_or_default();
            // The name before it may contain any characters. Source: proc_pid_stat(5).
            let after_name = stat.rsplit_once(')').map(|(_, rest)| rest.to_owned());
            after_name.is_some_and(|rest| rest.split_whitespace().nth(1) == Some(&id))
        };
        let entries = std::fs::read_dir("/proc").expect("there are processes").flatten();
        let mut names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.find(is_child).unwrap_or_default()
    }

    /// Powers the namespace off, and returns once its units have ended in order.
    fn power_off(mut self) {
        self.tell(&["poweroff"]);
        let status = self.0.wait(STOP_TIME_MAX).unwrap_or_else(|| {
            let log = std::fs::read_to_string(LOG).unwrap_or_default();
            panic!("systemd does not end\n{}\n{log}", run("dmesg", &[]))
        });
        // In a namespace, power-off ends its first process by a signal. Source: reboot(2).
        assert!(status.success() || status.signal().is_some(), "{status}");
    }
}

#[track_caller]
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(
            begun.elapsed() < STEP_TIME_MAX,
            "not within {STEP_TIME_MAX:?}: {what}\n{}\n{}",
            run("dmesg", &[]),
            std::fs::read_to_string(LOG).unwrap_or_default()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn spindle(arguments: &[&str]) -> String {
    run(PROGRAM, &[arguments, &["--dir", DIR]].concat())
}

fn is_ready() -> bool {
    output(PROGRAM, &["attach", "list", "--dir", DIR]).status.success()
}

fn install() {
    // The guest mounts its own, over directories that it can only read.
    run("mount", &["-t", "tmpfs", "own", "/var/lib"]);
    run("mount", &["-t", "cgroup2", "own", "/sys/fs/cgroup"]);
    for dir in ["/var/lib/bin", UNITS, "/run/etc", "/run/udev/rules.d"] {
        std::fs::create_dir_all(dir).expect("a directory of the guest's own");
    }
    // The place is not below /tmp, where the unit gets its own, and not in a home directory.
    std::fs::copy(binary("spindle"), PROGRAM).expect("copy the program");
    std::fs::copy(RULES, "/run/udev/rules.d/60-spindle.rules").expect("copy the rules");
    std::fs::write("/run/etc/spindle.toml", CONFIGURATION).expect("write the configuration");
    for target in TARGETS {
        let from = PathBuf::from("/lib/systemd/system").join(target);
        let text = std::fs::read_to_string(from).expect("systemd has it");
        // Their `Wants=` would start a whole machine.
        let is_kept = |line: &&str| !line.starts_with("Wants=") || target == "remote-fs.target";
        let text: Vec<&str> = text.lines().filter(is_kept).collect();
        std::fs::write(Path::new(UNITS).join(target), text.join("\n")).expect("write a unit");
    }
    let unit = std::fs::read_to_string(format!("{PACKAGING}/spindle.service")).expect("a unit");
    let unit = unit.replace("/usr/bin/spindle", PROGRAM).replace("/etc/spindle/", "/run/etc/");
    std::fs::write(format!("{UNITS}/spindle.service"), unit).expect("write a unit");
    let noted = format!("[Service]\nStandardOutput=append:{LOG}\nStandardError=append:{LOG}\n");
    std::fs::create_dir(format!("{UNITS}/spindle.service.d")).expect("a directory");
    std::fs::write(format!("{UNITS}/spindle.service.d/log.conf"), noted).expect("write a unit");
    let wanted = "[Unit]\nRequires=basic.target\nWants=spindle.service remote-fs.target\nAfter=basic.target\n\
        AllowIsolate=yes\n";
    std::fs::write(format!("{UNITS}/default.target"), wanted).expect("write a unit");
}

/// Returns the fstab line from the guide of `packaging/`, for the test's mountpoint.
fn line_of_fstab() -> String {
    let guide = std::fs::read_to_string(format!("{PACKAGING}/README.md")).expect("a guide");
    let line = guide.lines().find(|line| line.starts_with("/dev/spindle/main/db "));
    // fsck would need units of its own, so its pass number is 0.
    line.expect("the guide has a line").replace("/srv/db", MOUNTPOINT).replace("0 2", "0 0")
}

fn under_systemd() {
    install();
    run(UDEV, &["--daemon"]); // ends with the guest
    let machine = Machine::start();
    until("the daemon serves", is_ready);
    let _ = spindle(&["attach", "db"]);
    let _ = spindle(&["attach", "raw", "--nbd"]);
    run("mkfs.ext4", &["-q", "/dev/spindle/main/db"]);
    machine.power_off();

    // At the second start the file system is in fstab, as after following the guide.
    std::fs::write("/run/fstab", line_of_fstab()).expect("write fstab");
    // systemd looks for units in the test's directory alone, so that it does not start a whole
    // machine.
    let dirs = [UNITS; 3];
    let mut generator = Command::new(FSTAB_GENERATOR);
    let made = generator.args(dirs).env("SYSTEMD_FSTAB", "/run/fstab").status();
    assert!(made.expect("the generator starts").success());
    std::fs::create_dir(MOUNTPOINT).expect("a directory");
    let machine = Machine::start();
    let (unit, service) = ("run-db.mount", "spindle.service");
    until("the file system is mounted", || machine.property(unit, "ActiveState") == "active");
    let mounted = format!("--directory=/proc/{}/root{MOUNTPOINT}", machine.first());
    let is_over = Arc::new(AtomicBool::new(false));
    let loads = [mounted, "--filename=/dev/spindle/main/raw".to_owned()].map(|place| {
        let is_over = is_over.clone();
        std::thread::spawn(move || loads_until(&is_over, &place))
    });
    for round in 0..2 * RESTARTS {
        let before = machine.property(service, "MainPID");
        if round < RESTARTS {
            machine.tell(&["restart", service]);
        } else {
            machine.tell(&["kill", "--signal=KILL", service]);
        }
        until("another daemon serves", || {
            let now = machine.property(service, "MainPID");
            now != before && now != "0" && is_ready()
        });
        assert_eq!(
            machine.property(unit, "ActiveState"),
            "active",
            "a restart of the daemon leaves it mounted"
        );
        check_kernel();
        // The device is served again before the next restart or kill.
        let read =
            ["if=/dev/spindle/main/db", "of=/dev/null", "bs=4096", "count=1", "iflag=direct"];
        run("timeout", &[&["--signal=KILL", "40", "dd"][..], &read].concat());
    }
    is_over.store(true, Ordering::Relaxed);
    for load in loads {
        load.join().expect("no load fails");
    }
    machine.power_off();

    let log = std::fs::read_to_string(LOG).expect("the daemon has said something");
    assert!(!log.contains("ERROR"), "{log}");
    let machine = Machine::start();
    until("the file system is mounted again", || machine.property(unit, "ActiveState") == "active");
    check_kernel();
    machine.power_off();
}

/// Insists that no device has failed, and that the file system was unmounted before its daemon
/// ended.
#[track_caller]
fn check_kernel() {
    let said = run("dmesg", &[]);
    for wrong in ["I/O error", "recovery complete", "EXT4-fs error"] {
        assert!(!said.contains(wrong), "{wrong}: {said}");
    }
}

/// Writes, flushes and verifies, again and again, until `is_over`.
fn loads_until(is_over: &AtomicBool, place: &str) {
    while !is_over.load(Ordering::Relaxed) {
        let what = ["--name=units", place, "--rw=randwrite", "--bs=4k-64k", "--size=48m"];
        let how =
            ["--direct=1", "--ioengine=libaio", "--iodepth=8", "--fsync=16", "--randrepeat=0"];
        let verified = ["--verify=crc32c", "--verify_fatal=1", "--do_verify=1"];
        run("fio", &[&what[..], &how, &verified].concat());
    }
}
