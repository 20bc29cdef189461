//! A kernel device over several nodes: it follows its pool to whichever node serves it.
//!
//! Invariants:
//! - The tests run in a guest kernel (`tests/guest`): this machine's devices are left alone.
//! - fio verifies what it has written, and no request fails, whatever happens to the owner.

use crate::devices::{refused, variables};
use crate::devices_remote::Client;
use crate::fail_over::{NAMES, Nodes, WAIT_MAX};
use crate::stores::VOLUMES;
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use tests::daemon::SMALL;
use tests::place::run;
use tests::power::guest;
use tests::process::Process;
use tests::seed::{Random, seeds};
use tests::{needs, needs_root};

/// Things that happen to the owner of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// It is killed, and comes back.
    Killed,
    /// It hands the pool over.
    Moved,
    /// It is stopped for longer than its lease, while another node takes the pool over.
    Paused,
    /// It is killed, and its directory is gone with all files.
    Lost,
}

/// A load of 6 s, four pauses of a few seconds each, and a slow guest.
const LOAD_MAX: Duration = Duration::from_secs(120);

#[test]
fn device_follows_its_pool() {
    needs_root!();
    needs!("fio", "mkfs.ext4");
    for seed in seeds(1) {
        let name = "devices_nodes::device_follows_its_pool";
        guest::run(name, Duration::from_secs(400), &variables(seed), || follows(seed));
    }
}

fn follows(seed: u64) {
    println!("SEED={seed}");
    let mut random = Random::new(seed, 0);
    // In a slow guest, a node may fall silent for a second without an event.
    let mut nodes = Nodes::start_with(&SMALL.replace("[log]\n", "[log]\ndetection = \"3s\"\n"));
    let volume = VOLUMES[0].0;
    let uri = |number: usize| {
        let socket = nodes.nodes[number].place().join("nbd.sock");
        format!("nbd+unix:///{volume}?socket={}", socket.display())
    };
    // In an order that does not begin with the owner.
    let uris = [uri(1), uri(2), uri(0)].join(",");
    let mut client = Client::started(&nodes.nodes[0], &uris, &[]);
    let mut events = vec![Event::Killed, Event::Moved, Event::Paused, Event::Lost];
    let mut owner = 0;
    while !events.is_empty() {
        let mut fio = verified_load(&client, &mut random);
        let log = client.place.join("fio.log");
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = fio.wait(Duration::from_millis(300 + random.below(700))) {
                break status;
            }
            assert!(
                begun.elapsed() < LOAD_MAX,
                "SEED={seed}: the load does not end\n{}\n{}",
                client.log(),
                nodes.logs()
            );
            if !events.is_empty() {
                let event = events.remove(0);
                let before = owner;
                owner = befall(&mut nodes, owner, event);
                println!("{event:?}: {} -> {}", NAMES[before], NAMES[owner]);
            }
        };
        let said = std::fs::read_to_string(&log).unwrap_or_default();
        assert!(
            status.success(),
            "SEED={seed}: {status}\n{said}\n{}\n{}",
            client.log(),
            nodes.logs()
        );
    }
    // The new owner knows who has the volume, and can end it.
    let listed = on_owner(&nodes, &["attach", "list", "-o", "json"]);
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).expect("it is JSON");
    assert_eq!(listed["clients"].as_array().map(Vec::len), Some(1), "{listed}");
    owner = nodes.owner();
    refused(&nodes.nodes[owner], &["volume", "rm", volume], "detach it first");
    let mountpoint = client.place.join("mnt");
    std::fs::create_dir(&mountpoint).expect("make a directory");
    run("mkfs.ext4", &["-q", &client.device]);
    run("mount", &[&client.device, &mountpoint.display().to_string()]);
    let file = mountpoint.join("file");
    std::fs::write(&file, b"before").expect("it is mounted");
    let before = owner;
    let next = (0..NAMES.len()).find(|next| *next != owner && nodes.nodes[*next].is_running());
    let next = NAMES[next.expect("another node")];
    let moved = nodes.nodes[owner].command(&["pool", "move", next]);
    assert!(moved.status.success(), "{moved:?}\n{}", nodes.logs());
    owner = nodes.owner();
    assert_ne!(owner, before);
    assert_eq!(std::fs::read(&file).expect("it is mounted"), b"before");
    std::fs::write(&file, b"after").expect("it is mounted");
    run("umount", &[&mountpoint.display().to_string()]);
    // What was ended on one node is ended on the next one.
    let ended = on_owner(&nodes, &["detach", "--force", volume]);
    assert!(ended.status.success(), "{ended:?}\n{}", nodes.logs());
    assert_eq!(client.status().code(), Some(4), "{}", client.log());
}

/// Gives the owner a command. The pool may leave it meanwhile: in a slow guest, a node can fall silent for the second
/// after which the next one takes it over.
fn on_owner(nodes: &Nodes, args: &[&str]) -> Output {
    let begun = Instant::now();
    loop {
        let output = nodes.nodes[nodes.owner()].command(args);
        if !String::from_utf8_lossy(&output.stderr).contains("owns it, and this node") {
            return output;
        }
        assert!(begun.elapsed() < WAIT_MAX, "{output:?}\n{}", nodes.logs());
    }
}

fn verified_load(client: &Client, random: &mut Random) -> Process {
    let mut fio = Command::new("fio");
    fio.args(["--name=load", "--ioengine=libaio", "--direct=1", "--size=12M", "--rate=2M"]);
    fio.args(["--rw=randwrite", "--bsrange=4k-64k", "--iodepth=16"]);
    fio.args(["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--verify_backlog=256"]);
    fio.arg(format!("--filename={}", client.device));
    fio.arg(format!("--randseed={}", random.below(1 << 30)));
    fio.current_dir(client.place.path());
    Process::start(&mut fio, &client.place.join("fio.log")).expect("fio starts")
}

/// Lets something happen to the owner, and returns the next one.
fn befall(nodes: &mut Nodes, owner: usize, event: Event) -> usize {
    let next = match event {
        Event::Killed => {
            nodes.nodes[owner].kill();
            let next = nodes.owner();
            nodes.nodes[owner].restart();
            next
        }
        Event::Moved => {
            let _ = nodes.nodes[owner].json(&["pool", "move", NAMES[(owner + 1) % NAMES.len()]]);
            nodes.owner()
        }
        Event::Paused => {
            nodes.nodes[owner].pause();
            let next = nodes.owner_but(owner);
            nodes.nodes[owner].resume();
            next
        }
        Event::Lost => {
            nodes.nodes[owner].kill();
            std::fs::remove_dir_all(nodes.nodes[owner].dir()).expect("remove the directory");
            return nodes.owner();
        }
    };
    nodes.catch_up(next);
    next
}
