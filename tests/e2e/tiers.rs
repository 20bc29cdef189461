//! Segments in two tiers: written to data stores, copied to the object store, dropped when they are cold, brought back
//! when they are hot, and moved to the object store for good.
//!
//! Invariants:
//! - Writes are sent one at a time, so the volumes must hold all of them in order.
//! - A drive is lost like one that is no longer mounted: its directory is there and empty.

use crate::copies::wait_for;
use crate::data_stores::{Drives, failing, files, settings};
use crate::stores::{History, VOLUMES, open};
use serde_json::Value;
use std::time::Duration;
use tests::daemon::Daemon;
use tests::seed::seeds;

fn tiered(tiers: &str, urls: &[String]) -> String {
    let text = settings("2+1", urls);
    text.replace(
        "[data]\n",
        &format!("[data]\ntiers = \"{tiers}\"\ncold_after = \"10s\"\nfree_min = 0\n"),
    )
}

/// The state of the job.
fn moves(daemon: &Daemon) -> Value {
    daemon.json(&["status"])["data_stores"]["tiers"].clone()
}

/// Whether the job has done this, and has nothing like it left.
fn is_done(daemon: &Daemon, left: &str, done: &str) -> bool {
    let moves = moves(daemon);
    moves[left] == 0 && moves[done].as_u64() > Some(0)
}

/// A count of the space by tier, of all segments as they are now.
fn counted(daemon: &Daemon, what: &str) -> u64 {
    daemon.json(&["doctor"])["data"]["space"][what].as_u64().expect("a number")
}

fn fragment_count(drives: &Drives) -> usize {
    let is_fragment =
        |path: &std::path::PathBuf| path.components().any(|part| part.as_os_str() == "fragments");
    drives.all().map(|drive| files(&drive).iter().filter(|path| is_fragment(path)).count()).sum()
}

#[test]
fn segments_move_between_data_stores_and_the_object_store_and_back() {
    for seed in seeds(1) {
        let drives = Drives::new(4);
        let mut daemon = Daemon::started(&tiered("both", &drives.urls()), VOLUMES);
        for expected in ["a data store fails", "data-store-away", "could not upload to the store"] {
            daemon.announce(expected);
        }
        let mut history = History::new(seed);
        let mut connections = open(&daemon);
        history.run_for(&mut connections, Duration::from_secs(2));
        let _ = daemon.command(&["drain"]);
        wait_for("all is copied", || is_done(&daemon, "to_copy_count", "copied_count"));
        wait_for("reclaim makes no new ones", || {
            counted(&daemon, "copied_count") == counted(&daemon, "coded_count")
        });
        // All data stores are lost, and nothing is.
        (0..4).for_each(|number| drives.unmount(number));
        assert_eq!(history.prefix(&mut connections), history.count());
        wait_for("they are away", || failing(&daemon) == 4);
        let reads = daemon.json(&["status"])["data_stores"]["object_read_count"].as_u64();
        assert!(reads > Some(0), "{reads:?}");
        let risk = daemon.json(&["doctor"])["data"]["now"]["survivals"].clone();
        assert_eq!(risk.as_array().map(Vec::len), Some(1), "{risk}");
        assert_eq!(risk[0]["losses"], 255, "{risk}");
        (0..4).for_each(|number| drives.mount(number));
        wait_for("they are back", || failing(&daemon) == 0);
        // Nothing is read any more, so all becomes cold.
        wait_for("all is cold", || counted(&daemon, "coded_count") == 0);
        assert!(moves(&daemon)["dropped_count"].as_u64() > Some(0));
        // What the next owner finds on the data stores is needed by nothing.
        drop(connections);
        daemon.stop();
        daemon.restart();
        wait_for("the data stores are empty", || fragment_count(&drives) == 0);
        let mut connections = open(&daemon);
        wait_for("all that is read is hot", || {
            assert_eq!(history.prefix(&mut connections), history.count());
            is_done(&daemon, "to_bring_back_count", "brought_back_count")
        });
        assert!(fragment_count(&drives) > 0);
        // Killed in the middle, it goes on: all moves to the object store.
        history.run_for(&mut connections, Duration::from_millis(500));
        daemon.configure(&tiered("object-store", &[]));
        daemon.kill();
        daemon.restart();
        let mut connections = open(&daemon);
        history.run_for(&mut connections, Duration::from_millis(500));
        let _ = daemon.command(&["drain"]);
        wait_for("all are objects", || counted(&daemon, "coded_count") == 0);
        assert_eq!(history.prefix(&mut connections), history.count());
        drop(connections);
        let _ = daemon.fsck();
        daemon.stop();
    }
}
