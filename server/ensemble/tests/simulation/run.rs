//! One run of the simulation.

use crate::chain::Chain;
use crate::clients::Client;
use crate::executor::World;
use crate::faults::{Faults, Machines};
use crate::network::Network;
use crate::node::{Machine, Site, configuration, node_id};
use crate::oracle::Oracle;
use crate::printing::{self, LogLines};
use crate::report::{Counts, Outcome};
use crate::stores::Stores;
use crate::tier::Tier;
use parking_lot::Mutex;
use replication::MemberId;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Time with faults. Chosen by hand: some twenty faults.
const FAULTS_TIME: Duration = Duration::from_secs(30);
/// Time within which each client must have got answers after the last fault. Chosen by hand: several
/// take-overs, and a change of the members that is given up.
const CALM_TIME: Duration = Duration::from_secs(60);
/// Looks, half a second apart, within which all segments must have all fragments by then.
const WHOLE_LOOKS: u64 = 120;
/// Writes that each client must have answered by then.
const WRITES_LEAST: u64 = 5;

/// Runs a seed.
pub(crate) fn run(seed: u64) -> Outcome {
    let world = World::new(seed);
    let counts = Counts::default();
    let node_count = usize::try_from(3 + world.below(3)).expect("a few");
    let ids: Vec<MemberId> = (0..node_count).map(|node| node_id(node, 1)).collect();
    let (network, tier) = (Network::new(&world, &counts), Tier::default());
    let oracle = Oracle::default();
    let site = Site {
        stores: Stores::new(&network, &tier, &oracle, node_count),
        network,
        chain: Chain::new(&world, &counts, configuration(&ids, 0..3)),
        tier,
        oracle,
        counts: counts.clone(),
        wanted: Arc::new(Mutex::new((0..3).collect())),
        changing: Arc::default(),
        members: Arc::new(Mutex::new(ids)),
        world: world.clone(),
    };
    let in_memory = Path::new("/dev/shm");
    let under = if in_memory.is_dir() { in_memory.to_owned() } else { std::env::temp_dir() };
    let dir =
        tempfile::Builder::new().prefix("spindle-sim").tempdir_in(under).expect("a directory");
    let lines = LogLines(world.clone());
    let simulating = AssertUnwindSafe(|| simulate(&site, node_count, dir.path()));
    let ended = tracing::subscriber::with_default(lines, || catch_unwind(simulating));
    if ended.is_err() {
        site.oracle.fail("a panic".to_owned());
    }
    let simulated = world.now();
    world.end();
    let (failure, trace) = (site.oracle.failure(), world.trace());
    Outcome { seed, failure, trace, simulated, counts }
}

fn simulate(site: &Site, node_count: usize, dir: &Path) {
    let (world, oracle) = (&site.world, &site.oracle);
    let machines: Machines =
        Arc::new(Mutex::new((0..node_count).map(|node| Machine::new(site, node, dir)).collect()));
    machines.lock().iter_mut().for_each(Machine::start);
    let client_count = usize::try_from(2 + world.below(3)).expect("a few");
    let counts = (client_count, node_count);
    let clients: Vec<Client> =
        (0..client_count).map(|number| Client::new(site, number, counts)).collect();
    clients.iter().for_each(|client| world.spawn(client.clone().run()));
    let is_over = Arc::new(Mutex::new(false));
    let (over, until) = (Arc::clone(&is_over), world.now() + FAULTS_TIME);
    let faults = Faults { site: site.clone(), machines: Arc::clone(&machines), node_count };
    let disturbing = Faults { site: site.clone(), machines: Arc::clone(&machines), node_count };
    world.spawn(disturbing.disturb_changes(until));
    world.spawn(async move {
        faults.run(until).await;
        *over.lock() = true;
    });
    world.run(FAULTS_TIME * 20, || *is_over.lock() || oracle.has_failed());
    // What was begun before, such as a pause, ends by itself.
    world.run(Duration::from_secs(6), || oracle.has_failed());
    let before: Vec<u64> = clients.iter().map(|client| *client.answered.lock()).collect();
    let has_progress = || {
        let mut answered = clients.iter().map(|client| *client.answered.lock()).zip(&before);
        answered.all(|(now, before)| now >= before + WRITES_LEAST)
    };
    world.run(CALM_TIME, || has_progress() || oracle.has_failed());
    if !has_progress() {
        machines
            .lock()
            .iter()
            .for_each(|machine| printing::print(world, format_args!("{machine:?}")));
        oracle.fail(format!("no progress within {CALM_TIME:?} after the last fault"));
    }
    check_segments(site);
    machines.lock().iter_mut().for_each(Machine::kill);
}

/// Waits until all segments are whole, and reads them.
fn check_segments(site: &Site) {
    let (world, oracle) = (&site.world, &site.oracle);
    let mut wrong = site.stores.wrong();
    for _ in 0..WHOLE_LOOKS {
        if wrong.is_none() || oracle.has_failed() {
            break;
        }
        world.run(Duration::from_millis(500), || oracle.has_failed());
        wrong = site.stores.wrong();
    }
    if let Some(wrong) = wrong.or_else(|| site.stores.misread()) {
        oracle.fail(format!("long after the last fault, {wrong}"));
    }
}
