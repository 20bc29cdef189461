//! Data stores that are drained, replaced and added by commands while clients write, and the owner dies in the middle.
//!
//! Invariants:
//! - Writes are sent one at a time, so the volumes must hold all of them in order.
//! - A drive is lost like one that is no longer mounted: its directory is there and empty.

use crate::copies::{refused, wait_for};
use crate::data_stores::{Drives, failing, settings, store_count, wait_until_whole};
use crate::stores::{History, VOLUMES, open};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;
use tests::daemon::Daemon;
use tests::nbd::Connection;
use tests::seed::{Random, seeds};

fn text(drive: &Path) -> String {
    drive.display().to_string()
}

/// The entry of a drive in the list of data stores.
fn listed(daemon: &Daemon, drive: &Path) -> Value {
    let list = daemon.json(&["data", "list"]);
    let stores = list["stores"].as_array().expect("a list").clone();
    let found = stores.into_iter().find(|store| store["url"] == text(drive).as_str());
    found.unwrap_or_else(|| panic!("no {}: {list}", drive.display()))
}

/// Writes, kills the owner, and starts it again. Everything must be there.
fn survive_a_kill(daemon: &mut Daemon, history: &mut History, connections: &mut Vec<Connection>) {
    history.run_for(connections, Duration::from_millis(500));
    daemon.kill();
    daemon.restart();
    *connections = open(daemon);
    assert_eq!(history.prefix(connections), history.count());
}

fn configure(daemon: &mut Daemon, scheme: &str, urls: &[String]) {
    daemon.stop();
    daemon.configure(&settings(scheme, urls));
    daemon.restart();
}

#[test]
fn drained_drive_becomes_empty_while_clients_write() {
    for seed in seeds(1) {
        let drives = Drives::new(7);
        let mut daemon = Daemon::started(&settings("4+2", &drives.urls()), VOLUMES);
        let mut random = Random::new(seed, 3);
        let mut history = History::new(seed);
        let mut connections = open(&daemon);
        history.run_for(&mut connections, Duration::from_secs(1));
        let _ = daemon.json(&["drain"]);
        let number = usize::try_from(random.below(7)).expect("small");
        let (drained, other) = (drives.drive(number), drives.drive((number + 1) % 7));
        refused(&daemon, &["data", "drain", &text(&drained), &text(&other)], "failure domains");
        assert!(listed(&daemon, &drained)["is_draining"].is_null(), "nothing was changed");
        let _ = daemon.json(&["data", "drain", &text(&drained)]);
        survive_a_kill(&mut daemon, &mut history, &mut connections);
        assert_eq!(listed(&daemon, &drained)["is_draining"], true);
        history.run_for(&mut connections, Duration::from_secs(1));
        let _ = daemon.json(&["drain"]);
        wait_for("it is empty", || listed(&daemon, &drained)["is_empty"] == true);
        wait_until_whole(&daemon, 2);
        // It is taken out of the configuration, forgotten, and removed.
        drop(connections);
        let mut urls = drives.urls();
        urls.remove(number);
        configure(&mut daemon, "4+2", &urls);
        wait_for("it is forgotten", || store_count(&daemon) == 6);
        std::fs::remove_dir_all(&drained).expect("remove a directory");
        let mut connections = open(&daemon);
        assert_eq!(history.prefix(&mut connections), history.count());
        survive_a_kill(&mut daemon, &mut history, &mut connections);
        drop(connections);
        let _ = daemon.fsck();
        daemon.stop();
    }
}

#[test]
fn dead_drive_is_replaced_while_clients_write() {
    for seed in seeds(1) {
        let drives = Drives::new(7);
        let mut urls = drives.urls();
        let spare = urls.pop().expect("seven").trim_matches('"').to_owned();
        let mut daemon = Daemon::started(&settings("4+2", &urls), VOLUMES);
        for expected in
            ["a data store fails", "data-store-away", "fragments-lacking", "could not upload"]
        {
            daemon.announce(expected);
        }
        let mut history = History::new(seed);
        let mut connections = open(&daemon);
        history.run_for(&mut connections, Duration::from_secs(1));
        let _ = daemon.json(&["drain"]);
        let number = usize::try_from(Random::new(seed, 3).below(6)).expect("small");
        let dead = drives.drive(number);
        drives.unmount(number);
        wait_for("it is seen", || failing(&daemon) == 1);
        refused(&daemon, &["data", "replace", &text(&dead), &text(&dead)], "another directory");
        let _ = daemon.json(&["data", "replace", &text(&dead), &spare]);
        survive_a_kill(&mut daemon, &mut history, &mut connections);
        assert_eq!(listed(&daemon, Path::new(&spare))["is_added"], true);
        history.run_for(&mut connections, Duration::from_millis(500));
        let _ = daemon.json(&["drain"]);
        wait_for("nothing needs the dead one", || listed(&daemon, &dead)["is_empty"] == true);
        wait_until_whole(&daemon, 2);
        drop(connections);
        urls[number] = format!("\"{spare}\"");
        configure(&mut daemon, "4+2", &urls);
        wait_for("the dead one is forgotten", || store_count(&daemon) == 6);
        let mut connections = open(&daemon);
        assert_eq!(history.prefix(&mut connections), history.count());
        // Two more may be lost.
        let more = [(number + 1) % 6, (number + 2) % 6];
        more.iter().for_each(|number| drives.unmount(*number));
        assert_eq!(history.prefix(&mut connections), history.count());
        more.iter().for_each(|number| drives.mount(*number));
        wait_for("they are back", || failing(&daemon) == 0);
        drop(connections);
        let _ = daemon.fsck();
        daemon.stop();
    }
}

#[test]
fn rebalance_gives_a_new_drive_its_share_while_clients_write() {
    for seed in seeds(1) {
        let drives = Drives::new(4);
        let urls = drives.urls();
        let mut daemon = Daemon::started(&settings("2+1", &urls[..3]), VOLUMES);
        let mut history = History::new(seed);
        let mut connections = open(&daemon);
        history.run_for(&mut connections, Duration::from_secs(2));
        let _ = daemon.json(&["drain"]);
        drop(connections);
        configure(&mut daemon, "2+1", &urls);
        let new = drives.drive(3);
        let mut connections = open(&daemon);
        let _ = daemon.json(&["data", "rebalance", "--stop"]);
        let _ = daemon.json(&["data", "rebalance"]);
        survive_a_kill(&mut daemon, &mut history, &mut connections);
        let _ = daemon.json(&["drain"]);
        wait_for("it ends", || daemon.json(&["data", "list"])["rebalance"]["is_running"] != true);
        let count = |store: &Value| store["fragment_count"].as_u64().unwrap_or(0);
        // The next walk counts, which the restart brings.
        daemon.kill();
        daemon.restart();
        connections = open(&daemon);
        wait_for("it is counted", || listed(&daemon, &new)["fragment_count"].is_u64());
        let list = daemon.json(&["data", "list"]);
        assert!(list["rebalance"].is_null(), "it has ended: {list}");
        let all: u64 = list["stores"].as_array().expect("a list").iter().map(count).sum();
        let own = count(&listed(&daemon, &new));
        assert!(own * 8 > all, "{own} of {all} fragments are more than half of a fourth");
        assert_eq!(history.prefix(&mut connections), history.count());
        // Any of the drives may be lost.
        wait_until_whole(&daemon, 1);
        drop(connections);
        let _ = daemon.fsck();
        daemon.stop();
    }
}
