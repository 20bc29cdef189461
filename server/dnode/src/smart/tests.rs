//! Disks are found in a copy of sysfs, and asked with a script in place of `smartctl`.

use super::*;
use block::env::ManualClock;
use std::os::unix::fs::symlink;
use tempfile::TempDir;

/// Longest wait for something that should happen.
const WAIT: Duration = Duration::from_secs(30);

/// Makes the first argument a script of the second one.
const MAKE: &str = r#"rm -f "$1" && printf '#!/bin/sh\n%s\n' "$2" > "$1" && chmod 755 "$1""#;

/// A sysfs, and a program.
struct World(TempDir);

impl World {
    fn new() -> World {
        let world = World(tempfile::tempdir().unwrap());
        std::fs::create_dir_all(world.sys().join("dev/block")).unwrap();
        world
    }

    fn sys(&self) -> PathBuf {
        self.0.path().join("sys")
    }

    /// Makes a block device at this path below `devices`, on top of others.
    fn device(&self, numbers: &str, path: &str, below: &[&str]) {
        let place = self.sys().join("devices").join(path);
        std::fs::create_dir_all(place.join("slaves")).unwrap();
        symlink(&place, self.sys().join("dev/block").join(numbers)).unwrap();
        for other in below {
            let other = self.sys().join("devices").join(other);
            let link = place.join("slaves").join(other.file_name().unwrap());
            symlink(other, link).unwrap();
        }
    }

    fn partition(&self, numbers: &str, path: &str) {
        let place = self.sys().join("devices").join(path);
        std::fs::create_dir_all(&place).unwrap();
        std::fs::write(place.join("partition"), "1\n").unwrap();
        symlink(&place, self.sys().join("dev/block").join(numbers)).unwrap();
    }

    fn smart(&self) -> Smart {
        let program = self.0.path().join("smartctl");
        Smart { program, sys: self.sys(), time_max: WAIT }
    }

    /// Makes the program this script. Another process writes it: a file that this one has open for writing could not be
    /// run while a child of another test has a copy of the descriptor.
    fn script(&self, lines: &str) -> Smart {
        let smart = self.smart();
        let made = std::process::Command::new("sh")
            .args(["-c", MAKE, "sh"])
            .arg(&smart.program)
            .arg(lines)
            .status();
        assert!(made.unwrap().success());
        smart
    }

    fn disks(&self, major: u32, minor: u32) -> Vec<String> {
        self.smart().disks(rustix::fs::makedev(major, minor)).into_iter().collect()
    }
}

#[test]
fn disks_are_found_below_partitions_device_mapper_and_raid() {
    let world = World::new();
    world.device("259:0", "pci/nvme/nvme0n1", &[]);
    world.partition("259:1", "pci/nvme/nvme0n1/nvme0n1p1");
    world.device("8:0", "pci/ata/sda", &[]);
    world.device("104:0", "pci/cciss!c0d0", &[]);
    let members = ["pci/nvme/nvme0n1/nvme0n1p1", "pci/ata/sda"];
    world.device("9:0", "virtual/md0", &members);
    world.device("253:0", "virtual/dm-0", &["virtual/md0"]);
    assert_eq!(world.disks(259, 0), ["nvme0n1"]);
    assert_eq!(world.disks(259, 1), ["nvme0n1"]);
    assert_eq!(world.disks(104, 0), ["cciss/c0d0"]);
    assert_eq!(world.disks(253, 0), ["nvme0n1", "sda"]);
    // Of no disk, as tmpfs.
    assert!(world.disks(0, 41).is_empty());
    // A loop ends.
    world.device("253:1", "virtual/dm-1", &["virtual/dm-1"]);
    assert!(world.disks(253, 1).is_empty());
}

#[tokio::test]
async fn disk_is_asked_with_the_program() {
    let world = World::new();
    let smart = world.script(
        r#"[ "$*" = "--json=c --health --attributes /dev/nvme0n1" ] || exit 1
echo '{"smart_status":{"passed":true},'
echo '"nvme_smart_health_information_log":{"critical_warning":0,"percentage_used":97}}'
exit 4"#,
    );
    let found = smart.ask("nvme0n1").await.expect("it answers");
    assert_eq!(found.why.as_deref(), Some("97 % of its rated writes are used"));
    assert_eq!(smart.ask("sda").await, None, "other arguments");
}

#[tokio::test]
async fn program_that_is_absent_hangs_or_floods_tells_nothing() {
    let world = World::new();
    assert_eq!(world.smart().ask("sda").await, None, "it is not installed");
    let flood = world.script("while echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; do :; done");
    assert_eq!(timeout(WAIT, flood.ask("sda")).await.expect("it is ended"), None);
    let hanging = world.script(r#"echo $$ > "$0.pid"; exec sleep 1000"#);
    let hanging = Smart { time_max: Duration::from_millis(500), ..hanging };
    assert_eq!(timeout(WAIT, hanging.ask("sda")).await.expect("it is ended"), None);
    // It was reaped: its number is that of no process. A busy machine may not have started it in time.
    if let Ok(pid) = std::fs::read_to_string(world.0.path().join("smartctl.pid"))
        && !pid.is_empty()
    {
        assert!(!Path::new("/proc").join(pid.trim()).exists());
    }
}

#[tokio::test]
async fn directory_is_asked_for_at_once_and_then_every_hour() {
    let world = World::new();
    let dir = world.0.path();
    let device = std::fs::metadata(dir).unwrap().dev();
    let numbers = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    world.device(&numbers, "pci/nvme0n1", &[]);
    let smart = world.script(
        r#"echo x >> "$0.calls"
echo '{"endurance_used":{"current_percent":'$(cat "$0.used")'}}'"#,
    );
    let used = |percent: &str| std::fs::write(dir.join("smartctl.used"), percent).unwrap();
    let calls = || {
        let calls = std::fs::read_to_string(dir.join("smartctl.calls")).unwrap_or_default();
        calls.lines().count()
    };
    let clock = ManualClock::new();
    let watch = WearWatch::with_smart(Arc::new(clock.clone()), smart);
    let asked = async || {
        let is_asking = || watch.state.lock().is_asking;
        let ended = async {
            while is_asking() {
                tokio::task::yield_now().await;
            }
        };
        timeout(WAIT, ended).await.expect("it answers");
        watch.why()
    };
    used("95");
    watch.look(dir);
    watch.look(dir);
    assert_eq!(asked().await.as_deref(), Some("nvme0n1: 95 % of its rated writes are used"));
    clock.advance(PAUSE - Duration::from_secs(1));
    watch.look(dir);
    assert_eq!((asked().await.is_some(), calls()), (true, 1), "it is early");
    // Nothing is known, and what was known stays.
    used("nothing");
    clock.advance(Duration::from_secs(1));
    watch.look(dir);
    assert_eq!((asked().await.is_some(), calls()), (true, 2));
    // Another disk.
    used("3");
    clock.advance(PAUSE);
    watch.look(dir);
    assert_eq!((asked().await, calls()), (None, 3));
}

#[test]
fn worn_disk_that_does_not_answer_keeps_its_verdict() {
    let wear = |why: Option<&str>| Some(Wear { why: why.map(str::to_owned) });
    let found = |disks: Vec<(&str, Option<Wear>)>| {
        disks.into_iter().map(|(disk, wear)| (disk.to_owned(), wear)).collect::<Vec<_>>()
    };
    let mut state = State::default();
    state.note(found(vec![("sda", wear(Some("it fails"))), ("sdb", wear(None))]));
    assert_eq!(state.why().as_deref(), Some("sda: it fails"));
    // Another disk of the array answers, and then wears out, too.
    state.note(found(vec![("sda", None), ("sdb", wear(None))]));
    assert_eq!(state.why().as_deref(), Some("sda: it fails"));
    state.note(found(vec![("sda", None), ("sdb", wear(Some("it is old")))]));
    assert_eq!(state.why().as_deref(), Some("sda: it fails; sdb: it is old"));
    // No disk is found: the directory does not answer.
    state.note(Vec::new());
    assert!(state.why().is_some());
    // One is well, and the other one was taken out.
    state.note(found(vec![("sdb", wear(None))]));
    assert_eq!(state.why(), None);
}
