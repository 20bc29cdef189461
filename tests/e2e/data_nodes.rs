//! Pools whose segments are in fragments on the drives of data nodes, some of which die, hang or come back without
//! their drives.
//!
//! Invariants:
//! - The nodes are processes on this machine, each with its own directory, drives and address.
//! - Writes are sent one at a time, so the volumes must hold all of them in order.

use crate::conditions::conditions;
use crate::copies::wait_for;
use crate::data_stores::{failing, files, settings, store_count, wait_until_whole};
use crate::nodes::{free_address, refused};
use crate::stores::{History, VOLUMES, open};
use std::path::PathBuf;
use std::time::Duration;
use tests::Place;
use tests::daemon::Daemon;
use tests::seed::{Random, seeds};

/// A pool over the only drive of each of several data nodes.
pub struct DataNodes {
    pub owner: Daemon,
    pub nodes: Vec<Daemon>,
    drives: Place,
}

impl DataNodes {
    /// Founds a cluster, lets `count` data nodes join it, and starts the pool over them, with `more` in `[data]`.
    pub fn start(scheme: &str, count: usize, more: &str) -> DataNodes {
        let text = |urls: &[String]| {
            settings(scheme, urls).replace("[data]\n", &format!("[data]\n{more}"))
        };
        DataNodes::start_with(VOLUMES, count, text)
    }

    /// Like [`DataNodes::start`], with these volumes, and the settings that `text` makes of the URLs of the drives.
    pub fn start_with(
        volumes: &[(&str, &str)],
        count: usize,
        text: impl Fn(&[String]) -> String,
    ) -> DataNodes {
        let mut all = DataNodes::found(volumes, &text(&[]));
        for number in 0..count {
            let node = all.join_with(number, &[], "");
            all.nodes.push(node);
        }
        all.owner.stop();
        let urls: Vec<String> =
            (0..count).map(|number| format!("\"spindle://d{number}\"")).collect();
        all.owner.configure(&text(&urls));
        all.owner.restart();
        all
    }

    /// Founds a cluster of the owner alone, whose pool has these settings but for those of its data stores.
    pub fn found(volumes: &[(&str, &str)], settings: &str) -> DataNodes {
        // The log keeps the size that it is made with.
        let plain = settings.split("[data]").next().expect("the beginning");
        let mut owner = Daemon::new(plain, volumes);
        // A busy machine destages late while nodes hang.
        for expected in [
            "a data store fails",
            "data-store-away",
            "could not upload to the store",
            "data-at-risk",
        ] {
            owner.announce(expected);
        }
        let address = free_address();
        let _ = owner.json(&["node", "init", "--address", &address, "--name", "owner"]);
        owner.restart();
        DataNodes { owner, nodes: Vec::new(), drives: Place::new() }
    }

    /// Lets another data node join, with a drive of its own, and starts it with these arguments and settings.
    pub fn join_with(&self, number: usize, arguments: &[&str], settings: &str) -> Daemon {
        let drive = self.drive(number);
        std::fs::create_dir(&drive).expect("make a directory");
        let mut node = Daemon::data_node(&[&drive]);
        node.argue(arguments);
        node.configure(settings);
        let token = self.owner.json(&["node", "token"]);
        let (address, name) = (free_address(), format!("d{number}"));
        let token = token["token"].as_str().expect("a token");
        let joined = node.json(&[
            "node",
            "join",
            token,
            "--without-key",
            "--address",
            &address,
            "--name",
            &name,
        ]);
        assert!(joined["key_file"].is_null(), "{joined}");
        assert!(!node.dir().join("spindle.key").exists(), "a data node needs no key");
        node.restart();
        node
    }

    pub fn drive(&self, number: usize) -> PathBuf {
        self.drives.join(&format!("nvme{number}"))
    }
}

impl Drop for DataNodes {
    fn drop(&mut self) {
        // A process that is paused would not end in order.
        self.nodes.iter().filter(|node| node.is_running()).for_each(Daemon::resume);
    }
}

#[test]
fn any_data_node_may_die_or_hang_while_clients_write_and_read() {
    for seed in seeds(1) {
        let mut all = DataNodes::start("2+1", 4, "");
        wait_for("the nodes tell their room", || {
            let listed = all.owner.json(&["data", "list"]);
            let stores = listed["stores"].as_array().expect("a list");
            stores.iter().all(|store| store["free_bytes"].is_u64() && store["total_bytes"].is_u64())
        });
        let mut random = Random::new(seed, 3);
        let mut history = History::new(seed);
        let mut connections = open(&all.owner);
        for round in 0..6 {
            history.run_for(&mut connections, Duration::from_millis(500));
            let number = usize::try_from(random.below(4)).expect("small");
            let is_paused = round % 2 == 1;
            match is_paused {
                true => all.nodes[number].pause(),
                false => all.nodes[number].kill(),
            }
            history.run_for(&mut connections, Duration::from_millis(500));
            // A paused node is late at first, and away after a while; nothing waits for it meanwhile.
            assert_eq!(history.prefix(&mut connections), history.count());
            if !is_paused {
                let _ = all.owner.json(&["drain"]);
                wait_for("the dead node is told", || failing(&all.owner) == 1);
            }
            if round == 2 {
                all.owner.kill();
                all.owner.restart();
                connections = open(&all.owner);
                assert_eq!(history.prefix(&mut connections), history.count());
            }
            match is_paused {
                true => all.nodes[number].resume(),
                false => all.nodes[number].restart(),
            }
            wait_for("the node is back", || failing(&all.owner) == 0);
            let _ = all.owner.json(&["drain"]);
            assert_eq!(history.prefix(&mut connections), history.count());
        }
        drop(connections);
        all.owner.stop();
        let _ = all.owner.fsck();
        let status = all.owner.json(&["status"]);
        assert_eq!(status["node"]["name"], "owner", "{status}");
        all.nodes.iter_mut().for_each(Daemon::stop);
    }
}

#[test]
fn fragments_of_a_dead_data_node_are_made_anew_on_a_spare_one() {
    for seed in seeds(1) {
        let mut all = DataNodes::start("2+1", 4, "lost_after = \"1s\"\n");
        all.owner.announce("fragments-lacking");
        let mut history = History::new(seed);
        let mut connections = open(&all.owner);
        history.run_for(&mut connections, Duration::from_secs(2));
        let _ = all.owner.json(&["drain"]);
        wait_until_whole(&all.owner, 1);
        // One dies for good: its drive is lost with it.
        all.nodes[1].kill();
        std::fs::remove_dir_all(all.drive(1)).expect("remove a directory");
        wait_for("it is seen", || !conditions(&all.owner, "fragments-lacking").is_empty());
        wait_until_whole(&all.owner, 1);
        assert_eq!(history.prefix(&mut connections), history.count());
        // Another one may go now.
        all.nodes[3].kill();
        assert_eq!(history.prefix(&mut connections), history.count());
        all.nodes[3].restart();
        wait_for("it is back", || failing(&all.owner) == 1);
        // The dead one is taken out of the list, and forgotten when nothing names it.
        drop(connections);
        all.owner.stop();
        let urls = [0, 2, 3].map(|number| format!("\"spindle://d{number}\""));
        all.owner.configure(&settings("2+1", &urls));
        all.owner.restart();
        wait_for("the dead node is forgotten", || store_count(&all.owner) == 3);
        assert!(conditions(&all.owner, "data-store-away").is_empty());
        let mut connections = open(&all.owner);
        assert_eq!(history.prefix(&mut connections), history.count());
        // Also by the next owner, after an end that was not in order.
        all.owner.kill();
        all.owner.restart();
        assert_eq!(store_count(&all.owner), 3);
        connections = open(&all.owner);
        assert_eq!(history.prefix(&mut connections), history.count());
    }
}

#[test]
fn data_node_shows_its_drives_and_serves_those_that_are_there() {
    let place = Place::new();
    let drive = |name: &str| place.join(name);
    let (first, second) = (drive("a"), drive("b"));
    for drive in [&first, &second] {
        std::fs::create_dir(drive).expect("make a directory");
    }
    let mut node = Daemon::data_node(&[&first, &second]);
    let said = node.refuses_to_start();
    assert!(said.contains("belongs to no cluster") && said.contains("--without-key"), "{said}");
    let _ = node.json(&["node", "init", "--address", &free_address(), "--name", "d1"]);
    node.restart();
    let status = node.json(&["status"]);
    let drives = status["drives"].as_array().expect("a list").clone();
    let urls: Vec<&str> = drives.iter().map(|drive| drive["url"].as_str().expect("text")).collect();
    assert_eq!(urls, ["spindle://d1/a", "spindle://d1/b"]);
    assert!(drives.iter().all(|drive| drive["failure"].is_null()), "{status}");
    assert!(drives[0]["capacity_bytes"].as_u64() > Some(1 << 20), "{status}");
    assert_eq!(node.json(&["node", "list"])["nodes"][0]["name"], "d1");
    refused(&node.command(&["volume", "list"]), 1, "is a data node");
    // A second process does not get the drives of the first.
    let mut other = Daemon::data_node(&[&first]);
    let _ = other.json(&["node", "init", "--address", &free_address(), "--name", "d2"]);
    assert!(other.refuses_to_start().contains("another cluster"));
    node.stop();
    // One is not mounted at the next start, and comes while the node runs.
    let aside = drive("aside");
    std::fs::rename(&second, &aside).expect("rename");
    std::fs::create_dir(&second).expect("make a directory");
    node.announce("a drive is away");
    node.restart();
    let failures = || {
        let status = node.json(&["status"]);
        let drives = status["drives"].as_array().expect("a list").clone();
        drives.iter().filter(|drive| !drive["failure"].is_null()).count()
    };
    assert_eq!(failures(), 1);
    assert_eq!(files(&second), Vec::<PathBuf>::new(), "nothing is written at the mount point");
    std::fs::remove_dir(&second).expect("it is empty");
    std::fs::rename(&aside, &second).expect("rename");
    wait_for("the drive is back", || failures() == 0);
    node.stop();
}

#[test]
fn pools_that_cannot_use_data_nodes_say_why() {
    let urls = ["\"spindle://d1\"".to_owned(), "\"spindle://d2\"".to_owned()];
    let mut alone = Daemon::new(&settings("1+1", &urls), VOLUMES);
    let said = alone.refuses_to_start();
    assert!(said.contains("belongs to no cluster") && said.contains("node init"), "{said}");
    let mut owner = Daemon::new(&settings("1+1", &urls), VOLUMES);
    let _ = owner.json(&["node", "init", "--address", &free_address(), "--name", "d1"]);
    let said = owner.refuses_to_start();
    assert!(said.contains("it is this node"), "{said}");
    let urls = ["\"spindle://d3\"".to_owned(), "\"spindle://d2\"".to_owned()];
    owner.configure(&settings("1+1", &urls));
    let said = owner.refuses_to_start();
    assert!(said.contains("has no node d3") && said.contains("spindle node list"), "{said}");
}
