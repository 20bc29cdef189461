//! Pools whose data stores are the drives of a media group, on data nodes that come while the pool is open.
//!
//! Invariants:
//! - The nodes are processes on this machine, each with its own directory, drive and address.
//! - Writes are sent one at a time, so the volumes must hold all of them in order.

use crate::copies::wait_for;
use crate::data_nodes::DataNodes;
use crate::data_stores::{files, settings, store_count, wait_until_whole};
use crate::nodes::free_address;
use crate::stores::{History, VOLUMES, open};
use serde_json::Value;
use std::time::Duration;
use tests::daemon::Daemon;
use tests::nbd::Connection;
use tests::seed::seeds;

/// Settings of a pool over the media group `nvme`.
fn over_group(scheme: &str) -> String {
    settings(scheme, &[]).replace("stores = []", "group = \"nvme\"")
}

/// The entry of a node's drive in the list of data stores.
fn listed(all: &DataNodes, number: usize) -> Value {
    let list = all.owner.json(&["data", "list"]);
    let stores = list["stores"].as_array().expect("a list").clone();
    let url = format!("spindle://d{number}/nvme{number}");
    stores.into_iter().find(|store| store["url"] == url.as_str()).unwrap_or_default()
}

/// The number of files on a drive, beside its identity.
fn file_count(all: &DataNodes, number: usize) -> usize {
    files(&all.drive(number)).len() - 1
}

/// Writes until a drive gets fragments.
fn write_until_used(
    all: &DataNodes,
    number: usize,
    history: &mut History,
    connections: &mut [Connection],
) {
    let before = file_count(all, number);
    wait_for("it gets fragments", || {
        history.run_for(connections, Duration::from_millis(200));
        let _ = all.owner.json(&["drain"]);
        file_count(all, number) > before
    });
}

/// Starts the owner again, after an end that was not in order.
fn survive_a_kill(all: &mut DataNodes, history: &History) -> Vec<Connection> {
    all.owner.kill();
    all.owner.restart();
    let mut connections = open(&all.owner);
    assert_eq!(history.prefix(&mut connections), history.count());
    connections
}

#[test]
fn pool_uses_the_drives_of_its_media_group_as_they_come_and_go() {
    for seed in seeds(1) {
        let mut all = DataNodes::found(VOLUMES, &over_group("1+1"));
        for (number, group) in [(0, "nvme"), (1, "nvme"), (2, "hdd")] {
            // From the file or from the flag.
            let node = match number {
                0 => all.join_with(number, &[], &format!("[dnode]\ngroup = \"{group}\"\n")),
                _ => all.join_with(number, &["--group", group, "--domain", "rack-a"], ""),
            };
            all.nodes.push(node);
        }
        let status = all.nodes[1].json(&["status"]);
        assert_eq!(status["drives"][0]["group"], "nvme", "{status}");
        assert_eq!(status["drives"][0]["domain"], "rack-a", "{status}");
        all.owner.stop();
        all.owner.configure(&over_group("1+1"));
        all.owner.restart();
        assert_eq!(store_count(&all.owner), 2);
        assert_eq!(listed(&all, 0)["domain"], "spindle://d0");
        assert_eq!(listed(&all, 1)["domain"], "rack-a");
        wait_for("the groups are known", || listed(&all, 1)["group"] == "nvme");
        let mut history = History::new(seed);
        let mut connections = open(&all.owner);
        write_until_used(&all, 0, &mut history, &mut connections);
        assert_eq!(file_count(&all, 2), 0, "its drive is in another group");

        // Another node joins while the pool is open.
        let node = all.join_with(3, &["--group", "nvme"], "");
        all.nodes.push(node);
        wait_for("it is found", || store_count(&all.owner) == 3);
        write_until_used(&all, 3, &mut history, &mut connections);
        assert_eq!(listed(&all, 3)["is_added"], true);
        drop(connections);
        drop(survive_a_kill(&mut all, &history));
        assert_eq!(store_count(&all.owner), 3);

        // A drained drive stays drained, however often the owner starts.
        let _ = all.owner.json(&["data", "drain", "d0"]);
        drop(survive_a_kill(&mut all, &history));
        wait_for("it is empty", || listed(&all, 0)["is_empty"] == true);
        wait_until_whole(&all.owner, 1);
        let mut connections = survive_a_kill(&mut all, &history);
        let drained = listed(&all, 0);
        assert_eq!(drained["is_draining"], true, "{drained}");
        assert!(drained["is_leaving"].is_null(), "{drained}");
        write_until_used(&all, 3, &mut history, &mut connections);
        wait_for("it stays empty", || listed(&all, 0)["is_empty"] == true);
        drop(connections);

        // It leaves once its node says that it is in another group.
        all.nodes[0].stop();
        all.nodes[0].configure("[dnode]\ngroup = \"out\"\n");
        all.nodes[0].restart();
        all.owner.stop();
        all.owner.restart();
        wait_for("it is forgotten", || store_count(&all.owner) == 2);
        let mut connections = survive_a_kill(&mut all, &history);
        assert_eq!(store_count(&all.owner), 2);
        write_until_used(&all, 1, &mut history, &mut connections);
        assert_eq!(history.prefix(&mut connections), history.count());
        drop(connections);
        all.owner.stop();
        let _ = all.owner.fsck();
        all.nodes.iter_mut().for_each(Daemon::stop);
    }
}

#[test]
fn pool_that_cannot_use_its_media_group_says_why() {
    let mut alone = Daemon::new(&over_group("1+1"), VOLUMES);
    let said = alone.refuses_to_start();
    assert!(said.contains("data.group nvme") && said.contains("belongs to no cluster"), "{said}");
    let mut owner = Daemon::new(&over_group("1+1"), VOLUMES);
    let _ = owner.json(&["node", "init", "--address", &free_address(), "--name", "owner"]);
    let said = owner.refuses_to_start();
    assert!(said.contains("no data node answered"), "{said}");

    let mut all = DataNodes::found(VOLUMES, &over_group("2+1"));
    for (number, group) in [(0, "nvme"), (1, "hdd")] {
        let node = all.join_with(number, &["--group", group], "");
        all.nodes.push(node);
    }
    all.nodes[1].stop();
    all.owner.stop();
    all.owner.configure(&over_group("2+1"));
    let said = all.owner.refuses_to_start();
    for word in [
        "2+1 needs drives in 3 failure domains",
        "have 1;",
        "answered: d0 (1 drives of the group)",
        "did not answer: d1",
        "dnode.group",
    ] {
        assert!(said.contains(word), "{word}: {said}");
    }
}
