//! Pools whose segments are in fragments on several drives, or on buckets of several providers, some of which
//! are lost while clients write and read.
//!
//! Invariants:
//! - Writes are sent one at a time, so the volumes must hold all of them in order.
//! - A drive is lost like one that is no longer mounted: its directory is there and empty.

use crate::conditions::conditions;
use crate::copies::{restored, wait_for};
use crate::stores::{History, VOLUMES, open};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tests::daemon::{Daemon, SMALL};
use tests::provider::{KINDS, Provider};
use tests::seed::{Random, seeds};
use tests::{Place, needs_providers};

/// Settings without caches, so that reads are answered by the data stores.
pub fn settings(scheme: &str, stores: &[String]) -> String {
    let cache = "[cache]\nsize = \"64MiB\"";
    assert!(SMALL.contains(cache));
    let small = SMALL.replace(cache, "[cache]\nsize = \"0\"\n[memory_cache]\nsize = \"0\"");
    format!("{small}[data]\nscheme = \"{scheme}\"\nstores = [{}]\n", stores.join(", "))
}

/// Directories that are data stores.
pub struct Drives {
    place: Place,
    count: usize,
}

impl Drives {
    pub fn new(count: usize) -> Drives {
        let drives = Drives { place: Place::new(), count };
        drives.all().for_each(|drive| std::fs::create_dir(drive).expect("make a directory"));
        drives
    }

    fn all(&self) -> impl Iterator<Item = PathBuf> {
        (0..self.count).map(|number| self.drive(number))
    }

    pub fn drive(&self, number: usize) -> PathBuf {
        self.place.join(&format!("nvme{number}"))
    }

    fn aside(&self, number: usize) -> PathBuf {
        self.place.join(&format!("unmounted{number}"))
    }

    pub fn urls(&self) -> Vec<String> {
        self.all().map(|drive| format!("\"{}\"", drive.display())).collect()
    }

    pub fn unmount(&self, number: usize) {
        rename(&self.drive(number), &self.aside(number));
        std::fs::create_dir(self.drive(number)).expect("make a directory");
    }

    pub fn mount(&self, number: usize) {
        // A folder may be left of a write that was under way.
        assert_eq!(files(&self.drive(number)), Vec::<PathBuf>::new(), "at the mount point");
        std::fs::remove_dir_all(self.drive(number)).expect("it is there");
        rename(&self.aside(number), &self.drive(number));
    }
}

fn rename(from: &Path, to: &Path) {
    std::fs::rename(from, to).unwrap_or_else(|error| panic!("rename {}: {error}", from.display()));
}

/// The number of data stores that the pool has.
pub fn store_count(daemon: &Daemon) -> usize {
    let status = daemon.json(&["status"]);
    status["data_stores"]["stores"].as_array().expect("a list").len()
}

pub fn failing(daemon: &Daemon) -> usize {
    let status = daemon.json(&["status"]);
    let stores = status["data_stores"]["stores"].as_array().expect("a list").clone();
    stores.iter().filter(|store| !store["failure"].is_null()).count()
}

#[test]
fn any_two_of_eight_drives_may_be_lost_while_clients_write_and_read() {
    for seed in seeds(1) {
        let drives = Drives::new(8);
        let mut daemon = Daemon::started(&settings("4+2", &drives.urls()), VOLUMES);
        daemon.announce("a data store fails");
        daemon.announce("data-store-away");
        daemon.announce("could not upload to the store");
        let mut random = Random::new(seed, 3);
        let mut history = History::new(seed);
        let mut connections = open(&daemon);
        let mut pick = |below: u64| usize::try_from(random.below(below)).expect("small");
        for round in 0..6 {
            history.run_for(&mut connections, Duration::from_millis(700));
            let first = pick(8);
            let second = (first + 1 + pick(7)) % 8;
            let lost = [first, second];
            lost.iter().for_each(|number| drives.unmount(*number));
            history.run_for(&mut connections, Duration::from_millis(700));
            // Two other stores get the fragments, so that the next two may be lost.
            let _ = daemon.command(&["drain"]);
            assert_eq!(history.prefix(&mut connections), history.count());
            wait_for("the lost drives are told", || failing(&daemon) == lost.len());
            if round % 3 == 0 {
                daemon.kill();
                daemon.restart();
                connections = open(&daemon);
                assert_eq!(history.prefix(&mut connections), history.count());
            }
            lost.iter().for_each(|number| drives.mount(*number));
            wait_for("the drives are back", || failing(&daemon) == 0);
            let _ = daemon.command(&["drain"]);
            assert_eq!(history.prefix(&mut connections), history.count());
        }
        drop(connections);
        let _ = daemon.fsck();
        daemon.stop();
    }
}

/// Waits until every segment survives this many losses, whichever they are, and none lacks a fragment.
pub fn wait_until_whole(daemon: &Daemon, losses: u64) {
    wait_for("nothing is lacking", || {
        let status = daemon.json(&["status"]);
        let found = &status["data_stores"]["redundancy"];
        let survivals = found["survivals"].as_array().cloned().unwrap_or_default();
        found["lacking_count"] == 0
            && !survivals.is_empty()
            && survivals.iter().all(|one| one["losses"].as_u64() == Some(losses))
    });
}

/// All files below a directory.
pub fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            match path.is_dir() {
                true => dirs.push(path),
                false => found.push(path),
            }
        }
    }
    found.sort();
    found
}

fn fragments(drive: &Path) -> Vec<PathBuf> {
    let mut all = files(drive);
    all.retain(|path| path.components().any(|part| part.as_os_str() == "fragments"));
    all
}

#[test]
fn fragments_of_a_drive_that_is_lost_are_made_anew_on_others() {
    for seed in seeds(1) {
        let drives = Drives::new(8);
        let text = settings("4+2", &drives.urls());
        let text = text.replace("[data]\n", "[data]\nlost_after = \"1s\"\n");
        let mut daemon = Daemon::started(&text, VOLUMES);
        for expected in
            ["a data store fails", "data-store-away", "fragments-lacking", "could not upload"]
        {
            daemon.announce(expected);
        }
        let mut random = Random::new(seed, 3);
        let mut history = History::new(seed);
        let mut connections = open(&daemon);
        history.run_for(&mut connections, Duration::from_secs(2));
        let _ = daemon.command(&["drain"]);
        wait_until_whole(&daemon, 2);
        // A drive dies while clients write and read.
        let dead = usize::try_from(random.below(8)).expect("small");
        drives.unmount(dead);
        wait_for("it is seen", || !conditions(&daemon, "fragments-lacking").is_empty());
        history.run_for(&mut connections, Duration::from_secs(1));
        let _ = daemon.command(&["drain"]);
        wait_until_whole(&daemon, 2);
        let rebuilt = daemon.json(&["status"])["data_stores"]["rebuilt_count"].as_u64();
        assert!(rebuilt > Some(0), "{rebuilt:?}");
        wait_for("it has ended", || conditions(&daemon, "fragments-lacking").is_empty());
        // Two more may be lost.
        let others: Vec<usize> = (0..8).filter(|number| *number != dead).collect();
        let more = [others[0], others[4]];
        more.iter().for_each(|number| drives.unmount(*number));
        assert_eq!(history.prefix(&mut connections), history.count());
        more.iter().for_each(|number| drives.mount(*number));
        wait_for("they are back", || failing(&daemon) == 1);
        // The dead one comes back with stale fragments, after a restart that was not in order.
        daemon.kill();
        drives.mount(dead);
        daemon.restart();
        connections = open(&daemon);
        assert_eq!(history.prefix(&mut connections), history.count());
        wait_until_whole(&daemon, 2);
        // A drive is taken out of the list, and removed when nothing needs it any more.
        drop(connections);
        daemon.stop();
        let mut urls = drives.urls();
        let left = drives.drive(others[2]);
        urls.retain(|url| *url != format!("\"{}\"", left.display()));
        let text = settings("4+2", &urls);
        std::fs::write(daemon.place().join("spindle.toml"), text).expect("write the settings");
        daemon.restart();
        wait_until_whole(&daemon, 2);
        wait_for("nothing needs it", || store_count(&daemon) == 7);
        std::fs::remove_dir_all(&left).expect("it is there");
        drives.unmount(others[1]);
        drives.unmount(others[3]);
        let mut connections = open(&daemon);
        assert_eq!(history.prefix(&mut connections), history.count());
        drop(connections);
        drives.mount(others[1]);
        drives.mount(others[3]);
        wait_for("they are back", || failing(&daemon) == 0);
        assert_eq!(store_count(&daemon), 7, "the one that left is forgotten");
        let _ = daemon.fsck();
        daemon.stop();
    }
}

#[test]
fn scrub_mends_damaged_and_missing_fragments() {
    for seed in seeds(1) {
        let drives = Drives::new(6);
        let mut daemon = Daemon::started(&settings("4+2", &drives.urls()), VOLUMES);
        daemon.announce("was mended from its other fragments");
        // Reclaim may read a frame before the scrub does.
        daemon.announce("reading it once more");
        let mut random = Random::new(seed, 3);
        let mut history = History::new(seed);
        let mut connections = open(&daemon);
        history.run_for(&mut connections, Duration::from_secs(2));
        let _ = daemon.command(&["drain"]);
        // On one drive a bit of each fragment flips, on another all are gone.
        for path in fragments(&drives.drive(1)) {
            let mut bytes = std::fs::read(&path).expect("a fragment");
            let at = usize::try_from(random.below(bytes.len() as u64)).expect("small");
            bytes[at] ^= 1 << random.below(8);
            std::fs::write(&path, bytes).expect("it writes");
        }
        let gone = fragments(&drives.drive(4));
        assert!(!gone.is_empty());
        gone.iter().for_each(|path| std::fs::remove_file(path).expect("a fragment"));
        let _ = daemon.json(&["scrub", "start", "--rate", "10G"]);
        wait_for("it has ended", || daemon.json(&["scrub", "status"])["ended_at"].is_u64());
        let ended = daemon.json(&["scrub", "status"]);
        assert_eq!(ended["bad_count"], 0, "{ended}");
        assert!(ended["repaired_count"].as_u64() > Some(0), "{ended}");
        // Two other drives may be lost now.
        drives.all().for_each(|drive| assert!(!fragments(&drive).is_empty()));
        daemon.announce("a data store fails");
        daemon.announce("data-store-away");
        daemon.announce("could not upload to the store");
        drives.unmount(0);
        drives.unmount(3);
        assert_eq!(history.prefix(&mut connections), history.count());
        drives.mount(0);
        drives.mount(3);
        wait_for("the drives are back", || failing(&daemon) == 0);
        let _ = daemon.fsck();
        drop(connections);
        daemon.stop();
    }
}

#[test]
fn coded_pool_is_copied_and_its_copy_restored_to_other_drives() {
    for seed in seeds(1) {
        let (drives, others) = (Drives::new(3), Drives::new(2));
        let mut daemon = Daemon::started(&settings("2+1", &drives.urls()), VOLUMES);
        let mut history = History::new(seed);
        history.run_for(&mut open(&daemon), Duration::from_secs(2));
        let url = daemon.place().join("copy").display().to_string();
        let _ = daemon.json(&["copy", "add", &url]);
        let _ = daemon.json(&["copy", "sync", &url]);
        let mut other = restored(&daemon, &url, &[], &[]);
        daemon.stop();
        assert_eq!(history.prefix(&mut open(&other)), history.count());
        wait_for("the restored pool is whole", || {
            other.json(&["status"])["restored"]["is_complete"] == true
        });
        let is_pin = |file: &PathBuf| file.to_string_lossy().contains("/pins/");
        wait_for("the copy has no pin", || !files(Path::new(&url)).iter().any(is_pin));
        other.stop();
        // The drives of the first pool are not its own, although both pools have the same id.
        let wrong = settings("2+1", &drives.urls());
        std::fs::write(other.place().join("spindle.toml"), wrong).expect("write the settings");
        let refused = other.refuses_to_start();
        assert!(refused.contains("was restored from a copy"), "{refused}");
        // The copy and all drives of the first pool are gone. The restored pool gets drives of its own.
        std::fs::remove_dir_all(&url).expect("the copy is there");
        drives.all().for_each(|drive| std::fs::remove_dir_all(drive).expect("a drive"));
        let coded = settings("1+1", &others.urls());
        std::fs::write(other.place().join("spindle.toml"), coded).expect("write the settings");
        other.restart();
        let mut connections = open(&other);
        assert_eq!(history.prefix(&mut connections), history.count());
        history.run_for(&mut connections, Duration::from_secs(1));
        let _ = other.command(&["drain"]);
        assert_eq!(history.prefix(&mut connections), history.count());
        let status = other.json(&["status"]);
        assert!(status["data_stores"]["written_bytes"].as_u64() > Some(0), "{status}");
        drop(connections);
        let _ = other.fsck();
        other.stop();
    }
}

#[test]
fn one_of_three_providers_may_vanish() {
    needs_providers!();
    for seed in seeds(1) {
        let mut providers: Vec<Provider> = KINDS.into_iter().map(Provider::start).collect();
        let prefix = |provider: &Provider| format!("{}_", provider.kind().scheme().to_uppercase());
        let table = |provider: &Provider| {
            let (url, prefix) = (provider.url("data"), prefix(provider));
            format!("{{ url = \"{url}\", env_prefix = \"{prefix}\" }}")
        };
        let stores: Vec<String> = providers.iter().map(table).collect();
        let mut daemon = Daemon::new(&settings("2+1", &stores), VOLUMES);
        for provider in &providers {
            let variables = provider.environment(&prefix(provider));
            let pairs: Vec<_> =
                variables.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            daemon.environ(&pairs);
        }
        daemon.restart();
        let mut history = History::new(seed);
        let mut connections = open(&daemon);
        history.run_for(&mut connections, Duration::from_secs(3));
        let _ = daemon.command(&["drain"]);
        assert_eq!(history.prefix(&mut connections), history.count());
        daemon.announce("a data store fails");
        daemon.announce("data-store-away");
        daemon.announce("could not upload to the store");
        let gone = usize::try_from(Random::new(seed, 5).below(3)).expect("small");
        let gone = providers.remove(gone);
        daemon.announce("fragments-lacking");
        let url = gone.url("data");
        drop(gone);
        assert_eq!(history.prefix(&mut connections), history.count());
        history.run_for(&mut connections, Duration::from_secs(1));
        wait_for("it is told", || failing(&daemon) == 1);
        let _ = daemon.command(&["drain"]);
        assert_eq!(history.prefix(&mut connections), history.count(), "without {url}");
        daemon.kill();
        daemon.restart();
        connections = open(&daemon);
        assert_eq!(history.prefix(&mut connections), history.count(), "without {url}");
        drop(connections);
        daemon.stop();
    }
}
