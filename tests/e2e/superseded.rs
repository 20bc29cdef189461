//! The write log of an owner that the pool went on without: it is kept, and what only it has becomes
//! volumes of their own.

use crate::fail_over::{Nodes, left_alone};
use crate::stores::{self, History, VOLUMES};
use std::path::PathBuf;
use std::time::Duration;
use tests::daemon::Daemon;
use tests::nbd::{Connection, Wanted};
use tests::seed::seeds;

/// Makes a volume from each of them, and connects to these.
fn recovered(owner: &Daemon, log: &str) -> Vec<Connection> {
    let made = |(name, _): &(&str, &str)| {
        let new = format!("{name}-old");
        let create = ["volume", "create", &new, "--from-superseded", name, "--log", log];
        let said = owner.json(&create);
        println!("{said}");
        assert!(said["entry_count"].as_u64().is_some_and(|count| count > 0), "{said}");
        Connection::open(&owner.unix(&new), &Wanted::everything()).expect("it is served")
    };
    VOLUMES.iter().map(made).collect()
}

fn set_aside(node: &Daemon) -> Vec<PathBuf> {
    let listed = std::fs::read_dir(node.dir()).expect("it is there");
    let paths = listed.map(|entry| entry.expect("it can be listed").path());
    let is_aside = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with("log.superseded-"))
    };
    paths.filter(is_aside).collect()
}

#[test]
fn writes_that_the_pool_went_on_without_become_volumes() {
    for seed in seeds(1) {
        let mut nodes = Nodes::start();
        let mut history = History::new(seed);
        let mut connections = left_alone(&mut nodes, &mut history, "solo");
        history.run_for(&mut connections, Duration::from_millis(300));
        let acknowledged = history.count();
        drop(connections);
        let mut another = stores::second(&nodes.nodes[0], nodes.store());
        nodes.nodes[0].kill();
        another.argue(&["--take-over"]);
        another.announce("");
        another.restart();
        let found = history.prefix(&mut stores::open(&another));
        println!("{found} of {acknowledged} writes are in the store");
        assert!(found < acknowledged, "the log has nothing that the store lacks");
        let snapshots = another.json(&["snapshot", "list"]);
        let names = snapshots["snapshots"].as_array().expect("snapshots");
        assert_eq!(names.len(), VOLUMES.len(), "{snapshots}");
        // From the directory of the node that is gone, as it was left.
        let log = nodes.nodes[0].dir().join("log");
        let mut old = recovered(&another, log.to_str().expect("a path of letters"));
        assert_eq!(history.prefix(&mut old), acknowledged);
        assert_eq!(history.prefix(&mut stores::open(&another)), found, "the volumes are unchanged");
        // The node comes back: its log is no longer one of the pool, and it is kept.
        nodes.nodes[0].restart();
        let [aside] = &set_aside(&nodes.nodes[0])[..] else { panic!("{}", nodes.logs()) };
        assert!(aside.join("ring-00000.log").exists());
        drop(old);
        another.stop();
    }
}
